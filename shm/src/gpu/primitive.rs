//! What [`done`](super::done) takes its atomics from. Its models compile it a second time, over the atomics of loom: see `races.rs`.

pub(super) use fishplate_core::sync::primitive::AtomicU64;

/// An ordering that a hand-over depends on, by its name.
macro_rules! edge {
    ($name:literal, $order:ident) => {
        fishplate_core::sync::primitive::Ordering::$order
    };
}

pub(super) use edge;
