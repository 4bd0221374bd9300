//! Tests the features of two engines over fake providers, with one test per numbered feature.

mod data;
mod order;
mod progress;
mod rails;
