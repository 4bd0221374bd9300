//! A lock-free list of values to drop later. Any thread may add a value, or take the whole list.
//! Adding never blocks, even if another thread is preempted while it adds, but allocates a node.
//!
//! | edge    | store         | load           | carries               |
//! |---------|---------------|----------------|-----------------------|
//! | `aside` | [`List::add`] | [`List::take`] | the nodes of the list |

use std::ptr;

use super::primitive::{AtomicPtr, Ordering, edge};

#[derive(Debug)]
pub(crate) struct Node<T> {
    thing: T,
    next: *mut Node<T>,
}

/// `Box::into_raw` made each node, and the list owns it.
#[derive(Debug)]
pub(crate) struct List<T>(pub(crate) AtomicPtr<Node<T>>);

impl<T> List<T> {
    pub(crate) fn add(&self, thing: T) {
        let node = Box::into_raw(Box::new(Node { thing, next: ptr::null_mut() }));
        let mut head = self.0.load(Ordering::Relaxed);
        loop {
            // SAFETY: `node` was allocated just above, and no other thread knows it until the
            // exchange succeeds.
            unsafe { (*node).next = head };
            // Release, edge `aside`: publishes this node to the thread that takes the list. Earlier
            // nodes are published too, because this exchange continues their release sequences. A
            // failed exchange only compares the head, so it needs no ordering.
            let stored = edge!("aside.store", Release);
            match self.0.compare_exchange_weak(head, node, stored, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Takes all values, the newest first.
    pub(crate) fn take(&self) -> Taken<T> {
        // Acquire, edge `aside`: makes the contents of all nodes visible to this thread.
        Taken(self.0.swap(ptr::null_mut(), edge!("aside.load", Acquire)))
    }

    /// Returns whether the list is empty. May be stale on return.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.load(Ordering::Relaxed).is_null()
    }
}

pub(crate) struct Taken<T>(*mut Node<T>);

impl<T> Iterator for Taken<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: `add` made the node with `Box::into_raw`. The swap in `take` made this chain ours
        // alone.
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
