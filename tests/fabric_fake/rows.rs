//! One test for each row of the feature table in the ordering specification, section 3, by its
//! number: two engines over fake providers.

mod data;
mod order;
mod progress;
mod rails;
