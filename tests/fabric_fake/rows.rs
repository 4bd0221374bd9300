//! One test per row of the feature table in the ordering specification, section 3: two engines over
//! fake providers.

mod data;
mod order;
mod progress;
mod rails;
