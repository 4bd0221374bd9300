//! Contexts of posts and receives. The provider uses the first 64 bytes of each context
//! (`FI_CONTEXT`, `FI_CONTEXT2`) from post to completion. So contexts never move and are accessed
//! only through pointers.
//!
//! The pool has a fixed size, and its free list runs through the contexts.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ffi::c_void;
use core::ptr::{self, NonNull};

use fishplate_core::rail::Local;

use crate::fabric::raw::fi_context2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum ContextKind {
    Free,
    Write,
    /// A write. The rail sends its word after the write has completed.
    WriteThenWord,
    Read,
    Send,
    Atomic,
    Receive,
    /// An orphan: its completion was already reported, but the provider still holds the context.
    Orphan,
}

#[repr(C, align(64))]
pub(super) struct Slot {
    scratch: fi_context2,
    pub cx: u64,
    /// Destination of the value that an atomic returns, or null.
    pub fetch: *mut u64,
    /// Operand, comparand and result of an atomic. For a write or read, the first word is the
    /// address of its local memory.
    pub words: [u64; 3],
    pub index: u32,
    /// The bounce buffer of a send, or the word that follows a write.
    pub extra: u32,
    next: *mut Slot,
    pub peer: u16,
    pub kind: ContextKind,
    /// Use of an orphan before its completion was reported.
    pub was: ContextKind,
}

impl Slot {
    /// Returns the context's use, and whether its completion was already reported.
    #[inline(always)]
    pub fn used_for(&self) -> (ContextKind, bool) {
        if self.kind == ContextKind::Orphan { (self.was, true) } else { (self.kind, false) }
    }
}

pub(super) struct Pool {
    slots: NonNull<Slot>,
    len: usize,
    free: *mut Slot,
    kept: bool,
}

// SAFETY: the pool owns its slots. The pointers in them belong to the provider, or lead to memory
// that any thread may access.
unsafe impl Send for Pool {}

impl Pool {
    /// Creates a pool of `posts` free contexts, followed by `receives` contexts that are always in
    /// use.
    pub fn new(posts: u32, receives: u32) -> Pool {
        let len = posts as usize + receives as usize;
        let slots: Vec<Slot> = (0..len as u32)
            .map(|index| Slot {
                scratch: fi_context2 { internal: [ptr::null_mut(); 8] },
                cx: 0,
                fetch: ptr::null_mut(),
                words: [0; 3],
                index,
                extra: 0,
                next: ptr::null_mut(),
                peer: 0,
                kind: if index < posts { ContextKind::Free } else { ContextKind::Receive },
                was: ContextKind::Free,
            })
            .collect();
        let slots: NonNull<Slot> = NonNull::from(Box::leak(slots.into_boxed_slice())).cast();
        let mut pool = Pool { slots, len, free: ptr::null_mut(), kept: false };
        for index in (0..posts as usize).rev() {
            // SAFETY: the index is below `posts`, and no post has used the context yet.
            unsafe { pool.give(pool.at(index)) };
        }
        pool
    }

    /// Leaks the memory, because the provider may still use it.
    pub fn keep(&mut self) {
        self.kept = true;
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Checks only the first byte of a post's local memory, because that memory lies in one region.
    pub fn touches(&self, memory: Local) -> bool {
        let first = memory.ptr.addr().get() as u64;
        (0..self.len).any(|index| {
            let slot = self.at(index);
            // SAFETY: the index is in range. The provider writes only the scratch part, and only
            // this thread writes the fields behind it.
            let ((kind, _), [at, ..]) = unsafe { ((*slot).used_for(), (*slot).words) };
            let of_memory =
                matches!(kind, ContextKind::Write | ContextKind::WriteThenWord | ContextKind::Read);
            of_memory && at.wrapping_sub(first) < memory.len as u64
        })
    }

    pub fn has_posts_to(&self, peer: u16) -> bool {
        (0..self.len).any(|index| {
            let slot = self.at(index);
            // SAFETY: the index is in range. The provider writes only the scratch part, and only
            // this thread writes the fields behind it.
            let (kind, to) = unsafe { ((*slot).kind, (*slot).peer) };
            to == peer && !matches!(kind, ContextKind::Free | ContextKind::Receive)
        })
    }

    #[inline(always)]
    pub fn at(&self, index: usize) -> *mut Slot {
        debug_assert!(index < self.len);
        self.slots.as_ptr().wrapping_add(index)
    }

    #[inline(always)]
    pub fn take(&mut self) -> Option<*mut Slot> {
        let slot = self.free;
        if slot.is_null() {
            return None;
        }
        // SAFETY: the context was at the head of the free list, so it is from this pool and has no
        // other owner.
        self.free = unsafe { (*slot).next };
        Some(slot)
    }

    /// Returns a context to the free list.
    ///
    /// # Safety
    /// The context was taken from this pool, and the provider no longer holds it.
    #[inline(always)]
    pub unsafe fn give(&mut self, slot: *mut Slot) {
        // SAFETY: our caller guarantees that the context is from this pool and has no other owner.
        unsafe {
            (*slot).kind = ContextKind::Free;
            (*slot).next = self.free;
            self.free = slot;
        }
    }

    /// Returns the provider's part of a context, the `op_context` of posts and completions.
    #[inline(always)]
    pub fn context(slot: *mut Slot) -> *mut c_void {
        slot.cast()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        // SAFETY: `new` leaked this allocation of `len` slots. The endpoint is closed, so the
        // provider holds none of the contexts.
        unsafe { drop(Box::from_raw(ptr::slice_from_raw_parts_mut(self.slots.as_ptr(), self.len))) }
    }
}

#[cfg(test)]
mod tests {
    use super::{ContextKind, Pool};

    #[test]
    fn every_context_is_taken_once_and_receives_never() {
        let mut pool = Pool::new(3, 2);
        let taken: [_; 3] = core::array::from_fn(|_| pool.take().unwrap());
        assert!(pool.take().is_none());
        assert!(taken[0] != taken[1] && taken[1] != taken[2] && taken[0] != taken[2]);
        for at in 3..5 {
            assert!(taken.iter().all(|slot| *slot != pool.at(at)));
            // SAFETY: the index is in range, the pool is alive, and nothing else uses the context.
            assert_eq!(unsafe { (*pool.at(at)).kind }, ContextKind::Receive);
        }
        // SAFETY: the context was taken above and never passed to a provider.
        unsafe { pool.give(taken[1]) };
        assert_eq!(pool.take(), Some(taken[1]));
        assert!(pool.take().is_none());
    }
}
