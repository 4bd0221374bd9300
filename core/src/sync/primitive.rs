//! The facade: the one file that names loom. Everything in this crate takes its atomics from here.
//!
//! A normal build re-exports `core::sync::atomic`, and everything else here vanishes. The crate's own tests built
//! with `--cfg fishplate_loom` take loom's types instead. The cfg carries our name and `test`, so a dependent that
//! sets it changes nothing.
//!
//! | item            | normal build            | under the model checker                                          |
//! |-----------------|-------------------------|------------------------------------------------------------------|
//! | `edge!`         | the ordering named      | `Relaxed` if `FISHPLATE_WEAKEN` names this edge                  |
//! | `edge_fence!`   | `fence(SeqCst)`         | nothing if `FISHPLATE_WEAKEN` names this edge                    |
//! | [`Watch`]       | nothing, of no size     | reports racing accesses to memory that loom does not see         |
//! | `const_new!`    | a `const fn`            | a plain `fn`: loom's atomics are not const-constructible         |
//! | `filled!`       | an array of constants   | an array of values made one by one, for the same reason          |
//!
//! Every ordering that a hand-over depends on is written `edge!("ring.filled.store", Release)`, once per edge and
//! side. `tests/loom-edges.sh` finds the names by searching the source and demands that the models fail without each.

#[cfg(not(all(test, fishplate_loom)))]
mod imp {
    pub use core::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence,
    };

    /// Accesses to plain memory, reported to the model checker. Here: nothing, and of no size.
    #[derive(Debug, Default)]
    pub struct Watch;

    impl Watch {
        /// A watch over slots that nobody has touched.
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

    macro_rules! edge {
        ($name:literal, $order:ident) => {
            $crate::sync::primitive::Ordering::$order
        };
    }

    macro_rules! edge_fence {
        ($name:literal) => {
            $crate::sync::primitive::fence($crate::sync::primitive::Ordering::SeqCst)
        };
    }

    macro_rules! const_new {
        ($(#[$meta:meta])* pub fn $($rest:tt)*) => { $(#[$meta])* pub const fn $($rest)* };
    }

    macro_rules! filled {
        ($each:expr; $count:expr) => {
            [const { $each }; $count]
        };
    }

    pub(crate) use {const_new, edge, edge_fence, filled};
}

#[cfg(all(test, fishplate_loom))]
mod imp {
    extern crate std;

    use core::array;
    use std::{env, string::String, sync::OnceLock};

    use loom::cell::UnsafeCell;
    pub use loom::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence,
    };

    /// Accesses to plain memory, reported to the model checker, which fails a run where two of them race.
    #[derive(Debug)]
    pub struct Watch([UnsafeCell<()>; 8]);

    impl Default for Watch {
        fn default() -> Self {
            Self::new()
        }
    }

    impl Watch {
        /// A watch over slots that nobody has touched. Models use at most eight slots.
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

    /// Whether `FISHPLATE_WEAKEN` names this edge.
    pub fn weakened(edge: &str) -> bool {
        static NAMED: OnceLock<Option<String>> = OnceLock::new();
        NAMED.get_or_init(|| env::var("FISHPLATE_WEAKEN").ok()).as_deref() == Some(edge)
    }

    macro_rules! edge {
        ($name:literal, $order:ident) => {
            if $crate::sync::primitive::weakened($name) {
                $crate::sync::primitive::Ordering::Relaxed
            } else {
                $crate::sync::primitive::Ordering::$order
            }
        };
    }

    macro_rules! edge_fence {
        ($name:literal) => {
            if !$crate::sync::primitive::weakened($name) {
                $crate::sync::primitive::fence($crate::sync::primitive::Ordering::SeqCst)
            }
        };
    }

    macro_rules! const_new {
        ($(#[$meta:meta])* pub fn $($rest:tt)*) => { $(#[$meta])* pub fn $($rest)* };
    }

    macro_rules! filled {
        ($each:expr; $count:expr) => {
            core::array::from_fn(|_| $each)
        };
    }

    pub(crate) use {const_new, edge, edge_fence, filled};
}

pub use imp::*;
pub(crate) use imp::{const_new, edge, edge_fence, filled};
