//! One test per row of the feature table in section 3 of the ordering specification: two engines
//! over fake providers.

mod data;
mod order;
mod progress;
mod rails;
