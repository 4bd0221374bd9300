//! The facade: where every crate takes its atomics and names its orderings. The one file that names
//! loom's types.
//!
//! A normal build re-exports `core::sync::atomic`, and everything else here vanishes.
//!
//! | item | normal build | under the model checker |
//! |---|---|---|
//! | `edge!` | the ordering named | `Relaxed` if `FISHPLATE_WEAKEN` names this edge |
//! | `edge_fence!` | the fence named | nothing if `FISHPLATE_WEAKEN` names this edge |
//! | [`Watch`] | nothing, of no size | reports racing accesses to memory that loom does not see |
//! | `const_new!` | a `const fn` | a plain `fn`: loom's atomics are not const-constructible |
//! | `filled!` | an array of constants | an array of values made one by one, for the same reason |
//!
//! # Edges
//!
//! An *edge* is an ordering that a hand-over between threads or processes depends on. Each is
//! written `edge!("ring.filled.store", Release)`, with one name per side. `tests/loom-edges.sh`
//! finds the names by searching the sources of every crate, weakens one at a time and demands that
//! a model fails. An `AcqRel` is two edges: besides the whole, `NAME/acquire` and `NAME/release`
//! weaken one half each. `tests/imports.rs` refuses an ordering stronger than `Relaxed` that is not
//! an edge.
//!
//! # How a crate is modelled
//!
//! `--cfg fishplate_loom` adds the module `modelled`: the same names over loom's types. Nothing
//! else changes for a crate that depends on this one: this crate takes its own atomics from
//! `modelled` in its own tests alone. What lies in a mapped segment could not: the rest of a
//! program expects plain atomics there.
//!
//! Another crate (today: `shm`) keeps what hands over in files that take everything from
//! `super::primitive`, the facade. Its models compile such a file a second time, with `#[path]`,
//! beside `use fishplate_core::sync::primitive::modelled as primitive`. So they run the source
//! itself, not a copy.

#[cfg(not(all(test, fishplate_loom)))]
mod imp {
    pub use core::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence,
    };

    /// Accesses to plain memory, reported to the model checker. Here: nothing, and of no size.
    #[derive(Debug, Default)]
    pub struct Watch;

    impl Watch {
        /// A watch over unused slots.
        pub const fn new() -> Self {
            Self
        }

        /// The calling thread reads slot `index`.
        #[inline(always)]
        pub fn read(&self, _index: usize) {}

        /// The calling thread writes slot `index`.
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

/// The ordering of one side of an edge, by name: see the module's documentation.
#[cfg(not(fishplate_loom))]
#[doc(hidden)]
#[macro_export]
macro_rules! __edge {
    ($name:literal, $order:ident) => {
        $crate::sync::primitive::Ordering::$order
    };
}

/// The ordering of one side of an edge, by name: see the module's documentation.
#[cfg(fishplate_loom)]
#[doc(hidden)]
#[macro_export]
macro_rules! __edge {
    ($name:literal, $order:ident) => {
        $crate::sync::primitive::modelled::order($name, $crate::sync::primitive::Ordering::$order)
    };
}

/// One side of an edge that is a fence, by name: see the module's documentation.
#[cfg(not(fishplate_loom))]
#[doc(hidden)]
#[macro_export]
macro_rules! __edge_fence {
    ($name:literal, $order:ident) => {
        $crate::sync::primitive::fence($crate::sync::primitive::Ordering::$order)
    };
}

/// One side of an edge that is a fence, by name: see the module's documentation.
#[cfg(fishplate_loom)]
#[doc(hidden)]
#[macro_export]
macro_rules! __edge_fence {
    ($name:literal, $order:ident) => {
        match $crate::sync::primitive::modelled::order($name, $crate::sync::primitive::Ordering::$order) {
            $crate::sync::primitive::Ordering::Relaxed => {}
            order => $crate::sync::primitive::fence(order),
        }
    };
}

/// What models take instead: loom's atomics, and a [`Watch`] that watches.
#[cfg(fishplate_loom)]
pub mod modelled {
    extern crate std;

    use core::array;
    use std::{env, string::String, sync::OnceLock};

    use loom::cell::UnsafeCell;
    pub use loom::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence,
    };

    pub use crate::{__edge as edge, __edge_fence as edge_fence};

    // Models lay loom's words out where the words of a segment would be.
    const _: () = assert!(size_of::<AtomicU64>() == 8 && size_of::<AtomicU8>() == 8);

    /// Plain memory accesses, reported to the model checker,
    /// which fails a run where two of them race.
    #[derive(Debug)]
    pub struct Watch([UnsafeCell<()>; 16]);

    impl Default for Watch {
        fn default() -> Self {
            Self::new()
        }
    }

    impl Watch {
        /// A watch over unused slots. Models use at most sixteen slots.
        pub fn new() -> Self {
            Self(array::from_fn(|_| UnsafeCell::new(())))
        }

        /// The calling thread reads slot `index`.
        pub fn read(&self, index: usize) {
            self.0[index].with(|_| ());
        }

        /// The calling thread writes slot `index`.
        pub fn write(&self, index: usize) {
            self.0[index].with_mut(|_| ());
        }
    }

    /// The ordering of an edge, unless `FISHPLATE_WEAKEN` names the edge or half of it.
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
