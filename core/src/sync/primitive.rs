//! The facade: the atomics and the named orderings of this crate, and of the files with hand-over
//! code in other crates. Except for test helpers, only this file names loom's types.
//!
//! A normal build re-exports `core::sync::atomic`, and the other items cost nothing.
//!
//! | item | normal build | under the model checker |
//! |---|---|---|
//! | `edge!` | the ordering named | `Relaxed` if `FISHPLATE_WEAKEN` names this edge |
//! | `edge_fence!` | the fence named | nothing if `FISHPLATE_WEAKEN` names this edge |
//! | [`Watch`] | nothing, with no size | reports racing accesses that loom does not see |
//! | `const_new!` | a `const fn` | a plain `fn`: loom's atomics are not const-constructible |
//! | `filled!` | an array of constants | an array of values made one by one, for the same reason |
//!
//! # Edges
//!
//! An *edge* is an ordering on which a hand-over between threads or processes depends. Each is
//! written `edge!("ring.filled.store", Release)`, with one name per side. `tests/loom-edges.sh`
//! finds the names in the sources of every crate, weakens one at a time, and requires that a model
//! fails. An `AcqRel` has two halves, so `NAME/acquire` and `NAME/release` weaken one half each.
//! `tests/imports` rejects an ordering stronger than `Relaxed` that is not an edge.
//!
//! # How a crate is modelled
//!
//! `--cfg fishplate_loom` adds the module `modelled`: the same names over loom's types. Nothing
//! else changes for a crate that depends on `fishplate-core`, because `fishplate-core` uses
//! `modelled` only in its own tests. Memory in a mapped segment could not use loom's types: other
//! code of a program expects plain atomics there.
//!
//! In another crate (`shm`, `gpu`) the files with hand-over code import everything from
//! `super::primitive`, the facade. The models compile such a file a second time, with `#[path]`,
//! next to `use fishplate_core::sync::primitive::modelled as primitive`. So the models run the
//! source itself, not a copy.

#[cfg(not(all(test, fishplate_loom)))]
mod imp {
    pub use core::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence,
    };

    /// Reports accesses to plain memory to the model checker. In this build it does nothing and has
    /// no size.
    #[derive(Debug, Default)]
    pub struct Watch;

    impl Watch {
        /// Creates a watch.
        pub const fn new() -> Self {
            Self
        }

        /// Reports that the calling thread reads slot `index`.
        #[inline(always)]
        pub fn read(&self, _index: usize) {}

        /// Reports that the calling thread writes slot `index`.
        #[inline(always)]
        pub fn write(&self, _index: usize) {}
    }

    macro_rules! const_new {
        ($(#[$meta:meta])* pub fn $($rest:tt)*) => { $(#[$meta])* pub const fn $($rest)* };
    }

    macro_rules! filled {
        ($each:expr; $count:expr) => {
            [const { $each }; $count]
        };
    }

    pub(crate) use {const_new, filled};
}

#[cfg(all(test, fishplate_loom))]
mod imp {
    pub use super::modelled::*;

    macro_rules! const_new {
        ($(#[$meta:meta])* pub fn $($rest:tt)*) => { $(#[$meta])* pub fn $($rest)* };
    }

    macro_rules! filled {
        ($each:expr; $count:expr) => {
            core::array::from_fn(|_| $each)
        };
    }

    pub(crate) use {const_new, filled};
}

pub use imp::*;
pub(crate) use imp::{const_new, filled};

pub use crate::{__edge as edge, __edge_fence as edge_fence};

/// Returns the ordering of one side of a named edge, as described in the module's documentation.
#[cfg(not(fishplate_loom))]
#[doc(hidden)]
#[macro_export]
macro_rules! __edge {
    ($name:literal, $order:ident) => {
        $crate::sync::primitive::Ordering::$order
    };
}

/// Returns the ordering of one side of a named edge, as described in the module's documentation.
#[cfg(fishplate_loom)]
#[doc(hidden)]
#[macro_export]
macro_rules! __edge {
    ($name:literal, $order:ident) => {
        $crate::sync::primitive::modelled::order($name, $crate::sync::primitive::Ordering::$order)
    };
}

/// Executes the fence of one side of a named edge, as described in the module's documentation.
#[cfg(not(fishplate_loom))]
#[doc(hidden)]
#[macro_export]
macro_rules! __edge_fence {
    ($name:literal, $order:ident) => {
        $crate::sync::primitive::fence($crate::sync::primitive::Ordering::$order)
    };
}

/// Executes the fence of one side of a named edge, as described in the module's documentation.
#[cfg(fishplate_loom)]
#[doc(hidden)]
#[macro_export]
macro_rules! __edge_fence {
    ($name:literal, $order:ident) => {
        match $crate::__edge!($name, $order) {
            $crate::sync::primitive::Ordering::Relaxed => {}
            order => $crate::sync::primitive::fence(order),
        }
    };
}

/// `edge_fence!` for a file of another crate that a model compiles a second time.
#[cfg(fishplate_loom)]
#[doc(hidden)]
#[macro_export]
macro_rules! __modelled_edge_fence {
    ($name:literal, $order:ident) => {
        match $crate::__edge!($name, $order) {
            $crate::sync::primitive::Ordering::Relaxed => {}
            order => $crate::sync::primitive::modelled::fence(order),
        }
    };
}

/// The items that models use instead: loom's atomics, and a [`Watch`] that reports accesses.
#[cfg(fishplate_loom)]
pub mod modelled {
    extern crate std;

    use core::array;
    use std::{env, string::String, sync::OnceLock};

    use loom::cell::UnsafeCell;
    pub use loom::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence,
    };

    pub use crate::{__edge as edge, __modelled_edge_fence as edge_fence};

    // Models lay out loom's words as in a segment, so the sizes must be equal.
    const _: () = assert!(size_of::<AtomicU64>() == 8 && size_of::<AtomicU8>() == 8);

    /// Reports plain memory accesses to the model checker, which fails a run if two of them race.
    #[derive(Debug)]
    pub struct Watch([UnsafeCell<()>; 16]);

    impl Default for Watch {
        fn default() -> Self {
            Self::new()
        }
    }

    impl Watch {
        /// Creates a watch for unused slots. Models use at most sixteen slots.
        pub fn new() -> Self {
            Self(array::from_fn(|_| UnsafeCell::new(())))
        }

        /// Reports that the calling thread reads slot `index`.
        pub fn read(&self, index: usize) {
            self.0[index].with(|_| ());
        }

        /// Reports that the calling thread writes slot `index`.
        pub fn write(&self, index: usize) {
            self.0[index].with_mut(|_| ());
        }
    }

    /// Returns the ordering of an edge, weakened if `FISHPLATE_WEAKEN` names the edge or half of
    /// it.
    pub fn order(edge: &str, order: Ordering) -> Ordering {
        static NAMED: OnceLock<Option<String>> = OnceLock::new();
        let named = NAMED.get_or_init(|| env::var("FISHPLATE_WEAKEN").ok()).as_deref();
        match named.and_then(|named| named.strip_prefix(edge)) {
            Some("") => Ordering::Relaxed,
            Some("/acquire") => Ordering::Release,
            Some("/release") => Ordering::Acquire,
            _ => order,
        }
    }
}
