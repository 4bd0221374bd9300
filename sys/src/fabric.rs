//! libfabric.

pub mod raw;
