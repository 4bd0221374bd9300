//! Lets a bounded number of threads drain a list that any thread may add to. A draining thread
//! exists only while the list has entries.
//!
//! A thread adds to the list, then calls [`Turns::take`], and starts a draining thread if `take`
//! returns true. A draining thread calls [`Turns::end`] when the list is empty, then looks at the
//! list again, and takes another turn if there is more.
//!
//! If two threads make these calls at the same time, at least one sees the other's store:
//!
//! | edge         | store                   | fence           | load                 |
//! |--------------|-------------------------|-----------------|----------------------|
//! | `turns.more` | an addition to the list | [`Turns::take`] | the count of turns   |
//! | `turns.end`  | the count of turns      | [`Turns::end`]  | the list, afterwards |

use super::primitive::{AtomicU32, Ordering, const_new, edge_fence};

/// The number of threads that drain a list.
#[derive(Debug)]
pub struct Turns {
    taken: AtomicU32,
    most: u32,
}

impl Turns {
    const_new! {
        /// Allows `most` threads at once.
        pub fn new(most: u32) -> Self {
            Turns { taken: AtomicU32::new(0), most }
        }
    }

    /// Takes a turn, if fewer than the maximum are taken. Call it after adding to the list.
    pub fn take(&self) -> bool {
        // Pairs with the fence in `end`: either this thread sees that a turn has ended, or the
        // ending thread sees what was added.
        edge_fence!("turns.more", SeqCst);
        let more = |taken| (taken < self.most).then_some(taken + 1);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Ends a turn. Look at the list again afterwards.
    pub fn end(&self) {
        self.taken.fetch_sub(1, Ordering::Relaxed);
        edge_fence!("turns.end", SeqCst);
    }
}

#[cfg(test)]
mod races;
