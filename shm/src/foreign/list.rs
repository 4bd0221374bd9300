//! A lock-free list of values to drop later: any thread adds, and one takes the whole list. Adding
//! never blocks, not even on a preempted thread. Allocates a node per value.
//!
//! | edge    | store         | load           | carries               |
//! |---------|---------------|----------------|-----------------------|
//! | `aside` | [`List::add`] | [`List::take`] | the nodes of the list |

use std::ptr;

use super::primitive::{AtomicPtr, Ordering, edge};

/// A value in the list.
#[derive(Debug)]
pub(crate) struct Node<T> {
    thing: T,
    next: *mut Node<T>,
}

/// The list. Its head is null, or came from `Box::into_raw` and is owned by the list.
#[derive(Debug)]
pub(crate) struct List<T>(pub(crate) AtomicPtr<Node<T>>);

impl<T> List<T> {
    /// Adds a value.
    pub(crate) fn add(&self, thing: T) {
        let node = Box::into_raw(Box::new(Node { thing, next: ptr::null_mut() }));
        let mut head = self.0.load(Ordering::Relaxed);
        loop {
            // SAFETY: the node is ours until the exchange succeeds.
            unsafe { (*node).next = head };
            // Release, edge `aside`: publishes this node to the thread that takes the list. Earlier
            // nodes are published too, because this exchange continues theirs. The head is only
            // compared, so a failed exchange needs no ordering.
            let stored = edge!("aside.store", Release);
            match self.0.compare_exchange_weak(head, node, stored, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Takes all values, the newest first.
    pub(crate) fn take(&self) -> Taken<T> {
        // Acquire, edge `aside`: the nodes' contents were written before they were added.
        Taken(self.0.swap(ptr::null_mut(), edge!("aside.load", Acquire)))
    }

    /// Whether the list is empty. May be stale on return.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.load(Ordering::Relaxed).is_null()
    }
}

/// The values taken out of a list.
pub(crate) struct Taken<T>(*mut Node<T>);

impl<T> Iterator for Taken<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: `add` made it with `Box::into_raw`, and the swap in `take` gave us the whole
        // chain.
        let Node { thing, next } = *unsafe { Box::from_raw(self.0) };
        self.0 = next;
        Some(thing)
    }
}

impl<T> Drop for Taken<T> {
    fn drop(&mut self) {
        self.for_each(drop);
    }
}
