//! Records which thread owns an object that threads pass to each other.
//!
//! | edge    | release         | acquire         | carries                   |
//! |---------|-----------------|-----------------|---------------------------|
//! | `owner` | [`Owner::give`] | [`Owner::take`] | all writes by past owners |

use super::primitive::{AtomicU64, Ordering, const_new, edge};

/// The number of the owning thread, or 0.
#[derive(Debug)]
pub struct Owner(AtomicU64);

impl Owner {
    const_new! {
        /// Creates the record, with no owning thread.
        pub fn new() -> Self {
            Owner(AtomicU64::new(0))
        }
    }

    /// Makes thread `me` the owner, if there is none. Returns whether it did. `me` is not 0.
    pub fn take(&self, me: u64) -> bool {
        // Acquire, edge `owner`: makes visible here what past owners have written.
        self.0.compare_exchange(0, me, edge!("owner.take", Acquire), Ordering::Relaxed).is_ok()
    }

    /// Returns whether thread `me` is the owner, if the calling thread has that number.
    pub fn is(&self, me: u64) -> bool {
        // Relaxed: a thread sees its own stores.
        self.0.load(Ordering::Relaxed) == me
    }

    /// Ends the ownership. Only the owner calls this.
    pub fn give(&self) {
        // Release, edge `owner`: publishes what this owner has written.
        self.0.store(0, edge!("owner.give", Release));
    }
}

impl Default for Owner {
    fn default() -> Self {
        Owner::new()
    }
}

#[cfg(test)]
mod races;
