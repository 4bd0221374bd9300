//! Contexts of posts and receives. The provider keeps its own notes in the first 64 bytes of each
//! (`FI_CONTEXT`, `FI_CONTEXT2`) from post to completion, so they stay where they are and are
//! reached by pointers alone.
//!
//! Fixed size, a free list through the contexts; taking and giving back is a few instructions.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ffi::c_void;
use core::ptr::{self, NonNull};

use fishplate_core::rail::Local;

use crate::fabric::raw::fi_context2;

/// What a context is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Nothing.
    Free,
    /// A write.
    Write,
    /// A write whose word follows when it is complete.
    WriteThenWord,
    /// A read.
    Read,
    /// A message in a bounce buffer.
    Send,
    /// An atomic.
    Atomic,
    /// A receive buffer.
    Receive,
    /// A post whose end was reported already: the provider still has it, nobody else.
    Orphan,
}

/// One context.
#[repr(C, align(64))]
pub(super) struct Slot {
    /// The provider's.
    scratch: fi_context2,
    /// The engine's word for the post.
    pub cx: u64,
    /// Where an atomic's fetched value goes, or null.
    pub fetch: *mut u64,
    /// Operand, comparand and result of an atomic.
    /// Of a write or read the first is the address of its local memory.
    pub words: [u64; 3],
    /// Position in the pool.
    pub index: u32,
    /// Of a send its bounce buffer; of a write whose word follows, that word.
    pub extra: u32,
    /// The next free one, or null.
    next: *mut Slot,
    /// The peer it goes to.
    pub peer: u16,
    /// What for.
    pub kind: Kind,
    /// What an orphan was used for.
    pub was: Kind,
}

impl Slot {
    /// What it is used for, and whether its end was reported already.
    #[inline(always)]
    pub fn used_for(&self) -> (Kind, bool) {
        if self.kind == Kind::Orphan { (self.was, true) } else { (self.kind, false) }
    }
}

/// All contexts of a rail.
pub(super) struct Pool {
    slots: NonNull<Slot>,
    len: usize,
    /// The first free one, or null.
    free: *mut Slot,
    kept: bool,
}

// SAFETY: the pool owns its memory;
// its pointers are the provider's, or to memory that any thread may touch.
unsafe impl Send for Pool {}

impl Pool {
    /// `posts` contexts to be taken, and behind them `receives` that are in use for good.
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
                kind: if index < posts { Kind::Free } else { Kind::Receive },
                was: Kind::Free,
            })
            .collect();
        let slots: NonNull<Slot> = NonNull::from(Box::leak(slots.into_boxed_slice())).cast();
        let mut pool = Pool { slots, len, free: ptr::null_mut(), kept: false };
        for index in (0..posts as usize).rev() {
            // SAFETY: one of ours, and nobody's yet.
            unsafe { pool.give(pool.at(index)) };
        }
        pool
    }

    /// The memory is the provider's for good.
    pub fn keep(&mut self) {
        self.kept = true;
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the provider has a write or read whose local memory begins in this. The local memory
    /// of a post lies in one registered region, so its first byte tells which. Slow path: looks at
    /// every context.
    pub fn touches(&self, memory: Local) -> bool {
        let first = memory.ptr.addr().get() as u64;
        (0..self.len).any(|index| {
            let slot = self.at(index);
            // SAFETY: one of ours. Only this thread writes the fields behind the provider's part.
            let ((kind, _), [at, ..]) = unsafe { ((*slot).used_for(), (*slot).words) };
            let of_memory = matches!(kind, Kind::Write | Kind::WriteThenWord | Kind::Read);
            of_memory && at.wrapping_sub(first) < memory.len as u64
        })
    }

    /// The context at a position below [`len`](Self::len).
    #[inline(always)]
    pub fn at(&self, index: usize) -> *mut Slot {
        debug_assert!(index < self.len);
        self.slots.as_ptr().wrapping_add(index)
    }

    /// Takes a free context; it is the caller's until given back.
    #[inline(always)]
    pub fn take(&mut self) -> Option<*mut Slot> {
        let slot = self.free;
        if slot.is_null() {
            return None;
        }
        // SAFETY: from the free list, so one of ours, and nobody else's.
        self.free = unsafe { (*slot).next };
        Some(slot)
    }

    /// Gives a context back.
    ///
    /// # Safety
    /// It was taken from this pool, and the provider does not have it.
    #[inline(always)]
    pub unsafe fn give(&mut self, slot: *mut Slot) {
        // SAFETY: handed on to our caller.
        unsafe {
            (*slot).kind = Kind::Free;
            (*slot).next = self.free;
            self.free = slot;
        }
    }

    /// Where the provider's part of a context is: what it is given, and gives back.
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
        // SAFETY: as it was leaked; the endpoint is closed, so the provider has none of them.
        unsafe { drop(Box::from_raw(ptr::slice_from_raw_parts_mut(self.slots.as_ptr(), self.len))) }
    }
}

#[cfg(test)]
mod tests {
    use super::{Kind, Pool};

    #[test]
    fn every_context_is_taken_once_and_receives_never() {
        let mut pool = Pool::new(3, 2);
        let taken: [_; 3] = core::array::from_fn(|_| pool.take().unwrap());
        assert!(pool.take().is_none());
        assert!(taken[0] != taken[1] && taken[1] != taken[2] && taken[0] != taken[2]);
        for at in 3..5 {
            assert!(taken.iter().all(|slot| *slot != pool.at(at)));
            // SAFETY: the pool is alive, and nobody else has it.
            assert_eq!(unsafe { (*pool.at(at)).kind }, Kind::Receive);
        }
        // SAFETY: taken above, and known to no provider.
        unsafe { pool.give(taken[1]) };
        assert_eq!(pool.take(), Some(taken[1]));
        assert!(pool.take().is_none());
    }
}
