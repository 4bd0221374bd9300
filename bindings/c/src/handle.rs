//! Nodes as C programs name them, and who may call into one.
//!
//! A handle is a number that looks like a pointer and is never followed: the slot of a fixed table,
//! and how often that slot was used before. A null, closed or invented one is found out by a
//! compare. A node belongs to the thread that opened it, until that thread gives it up
//! ([`fp_node_unbind`]); then to the first that calls into it. A call of any other thread is
//! refused. So a call costs two loads and two compares, and no read-modify-write.
//!
//! # Edges
//!
//! The owner's word of a slot is changed from "nobody" to a thread by a compare-and-swap with
//! acquire, and back by a store with release, which that thread alone makes. What the slot holds is
//! touched by its owner only.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use fishplate::Node;
use fishplate::core::engine::protocol::Claimed;
use fishplate::node::{Memory, Remote};

use crate::status::{Status, fail};

/// A node, to C. Never followed.
#[repr(C)]
pub struct FpNode {
    _opaque: [u8; 0],
}

/// Nodes that a process may have open at once.
const SLOTS: usize = 64;

/// A node, and what its C program names by number.
pub(crate) struct Inner {
    pub node: Node,
    /// By their raw numbers.
    pub memories: HashMap<u64, Memory>,
    pub remotes: HashMap<u64, Remote>,
    /// Claimed messages that were not received yet, by the numbers given out for them.
    pub claims: HashMap<u64, Claimed>,
    pub next_claim: u64,
}

struct Slot {
    /// The handle that is good, or 0. Changes only while the slot has an owner, by that.
    name: AtomicUsize,
    /// The thread that may call, or 0.
    owner: AtomicUsize,
    /// None of an open node: a panic has passed through, and it was left where it was.
    inner: UnsafeCell<Option<Box<Inner>>>,
}

// SAFETY: `inner` is touched by the thread in `owner` alone, and handed over by its edges; what it
// holds is `Send`.
unsafe impl Sync for Slot {}
const _: () = {
    const fn send<T: Send>() {}
    send::<Inner>();
};

static TABLE: [Slot; SLOTS] =
    [const { Slot { name: AtomicUsize::new(0), owner: AtomicUsize::new(0), inner: UnsafeCell::new(None) } };
        SLOTS];

/// Counts nodes, so that no handle comes twice.
static OPENED: AtomicUsize = AtomicUsize::new(0);

/// A number that no two threads have at once, and that is not 0.
#[inline(always)]
fn me() -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        let thread: usize;
        // SAFETY: the ABI keeps the address of the thread's control block there.
        unsafe {
            std::arch::asm!("mov {}, fs:0", out(reg) thread, options(nostack, pure, readonly, preserves_flags));
        }
        thread
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        thread_local!(static HERE: u8 = const { 0 });
        HERE.with(|here| std::ptr::from_ref(here).addr())
    }
}

#[inline(always)]
fn slot(node: *mut FpNode) -> &'static Slot {
    &TABLE[node.addr() % SLOTS]
}

/// Puts a node into the table. Its owner is this thread.
pub(crate) fn insert(node: Node) -> Result<*mut FpNode, Status> {
    let inner = Inner {
        node,
        memories: HashMap::new(),
        remotes: HashMap::new(),
        claims: HashMap::new(),
        next_claim: 1,
    };
    for (at, slot) in TABLE.iter().enumerate() {
        if slot.owner.compare_exchange(0, me(), Ordering::Acquire, Ordering::Relaxed).is_err() {
            continue;
        }
        if slot.name.load(Ordering::Relaxed) != 0 {
            // An open node that belongs to nobody.
            slot.owner.store(0, Ordering::Release);
            continue;
        }
        let number = OPENED.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let name = number.wrapping_mul(SLOTS).wrapping_add(at);
        // SAFETY: this thread owns the slot, and nothing else borrows from it.
        unsafe { *slot.inner.get() = Some(Box::new(inner)) };
        slot.name.store(name, Ordering::Relaxed);
        return Ok(std::ptr::without_provenance_mut(name));
    }
    Err(fail(libc::ENOSPC, format_args!("{SLOTS} nodes are open in this process")))
}

/// Takes a node out of the table. Nobody can call into it any more.
pub(crate) fn remove(node: *mut FpNode) -> Result<Box<Inner>, Status> {
    owned(node)?;
    let slot = slot(node);
    slot.name.store(0, Ordering::Relaxed);
    // SAFETY: this thread owns the slot, and no call is under way in it.
    let inner = unsafe { (*slot.inner.get()).take() };
    slot.owner.store(0, Ordering::Release);
    inner.ok_or_else(broken)
}

/// Whether the handle is good, and this thread owns the node.
#[inline(always)]
fn owned(node: *mut FpNode) -> Result<(), Status> {
    let slot = slot(node);
    if slot.owner.load(Ordering::Relaxed) == me() && slot.name.load(Ordering::Relaxed) == node.addr() {
        return Ok(());
    }
    adopt(node)
}

/// A handle that is not this thread's: it may be nobody's.
#[cold]
fn adopt(node: *mut FpNode) -> Result<(), Status> {
    let slot = slot(node);
    if node.is_null() || slot.name.load(Ordering::Relaxed) != node.addr() {
        return Err(stranger());
    }
    if slot.owner.compare_exchange(0, me(), Ordering::Acquire, Ordering::Relaxed).is_err() {
        return Err(fail(
            libc::EPERM,
            "the node belongs to another thread, which has not called fp_node_unbind",
        ));
    }
    // It may have been closed meanwhile.
    if slot.name.load(Ordering::Relaxed) != node.addr() {
        slot.owner.store(0, Ordering::Release);
        return Err(stranger());
    }
    Ok(())
}

#[cold]
fn stranger() -> Status {
    fail(libc::EBADF, "no node has this handle: it is null, closed, or was never given")
}

/// The node behind a handle, for what cannot panic. `None`: [`enter`] says why.
#[inline(always)]
pub(crate) fn at_once<'a>(node: *mut FpNode) -> Option<&'a mut Inner> {
    let slot = slot(node);
    if slot.owner.load(Ordering::Relaxed) != me() || slot.name.load(Ordering::Relaxed) != node.addr() {
        return None;
    }
    // SAFETY: as in `enter`.
    unsafe { (*slot.inner.get()).as_deref_mut() }
}

/// Makes a call into a node. What `call` returns is what C gets; a panic ends the node.
#[inline(always)]
pub(crate) fn enter(node: *mut FpNode, call: impl FnOnce(&mut Inner) -> Result<c_int, Status>) -> c_int {
    if let Err(status) = owned(node) {
        return status.0;
    }
    // SAFETY: this thread owns the slot, and makes one call at a time: none of them calls back into
    // the program.
    let Some(inner) = (unsafe { (*slot(node).inner.get()).as_deref_mut() }) else { return broken().0 };
    match catch_unwind(AssertUnwindSafe(|| call(inner))) {
        Ok(Ok(done)) => done,
        Ok(Err(status)) => status.0,
        Err(_) => panicked(node),
    }
}

#[cold]
fn panicked(node: *mut FpNode) -> c_int {
    // SAFETY: as in `enter`, whose borrow has ended.
    let inner = unsafe { (*slot(node).inner.get()).take() };
    // Nothing inside is believed any more, so nothing of it is dropped.
    std::mem::forget(inner);
    broken().0
}

#[cold]
fn broken() -> Status {
    fail(libc::ENOTRECOVERABLE, "a defect of the library ended this node; please report it")
}

/// Makes a call without a node.
pub(crate) fn outside(call: impl FnOnce() -> Result<c_int, Status>) -> c_int {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(done)) => done,
        Ok(Err(status)) => status.0,
        Err(_) => broken().0,
    }
}

/// Gives the node up: the next thread that calls into it owns it.
#[unsafe(no_mangle)]
pub extern "C" fn fp_node_unbind(node: *mut FpNode) -> c_int {
    match owned(node) {
        Ok(()) => {
            slot(node).owner.store(0, Ordering::Release);
            0
        }
        Err(status) => status.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fishplate::node::Fabric;

    #[test]
    fn a_panic_ends_its_node_and_no_other() {
        let open = || insert(Node::builder().fabric(Fabric::Off).open().unwrap()).ok().unwrap();
        let (bad, good) = (open(), open());
        assert_eq!(enter(bad, |_| panic!("a defect")), -libc::ENOTRECOVERABLE);
        assert_eq!(enter(bad, |_| Ok(7)), -libc::ENOTRECOVERABLE);
        assert!(at_once(bad).is_none());
        assert_eq!(enter(good, |_| Ok(7)), 7);
        assert_eq!(remove(bad).err(), Some(Status(-libc::ENOTRECOVERABLE)));
        assert_eq!(enter(bad, |_| Ok(7)), -libc::EBADF);
        assert_eq!(outside(|| panic!("a defect")), -libc::ENOTRECOVERABLE);
        assert!(remove(good).is_ok());
    }

    #[test]
    fn a_handle_never_comes_twice_and_there_are_no_more_than_slots() {
        let open = || insert(Node::builder().fabric(Fabric::Off).open().unwrap());
        let mut seen = vec![];
        for _ in 0..3 {
            let nodes: Vec<_> = std::iter::from_fn(|| open().ok()).collect();
            // The other test has two of them.
            assert!((SLOTS - 2..=SLOTS).contains(&nodes.len()));
            for node in nodes {
                assert!(!seen.contains(&node));
                seen.push(node);
                assert!(remove(node).is_ok());
            }
        }
    }
}
