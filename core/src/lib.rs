//! Fishplate core.
#![no_std]

pub mod context;
pub mod engine;
pub mod error;
pub mod mem;
pub mod op;
pub mod rail;
pub mod sync;
