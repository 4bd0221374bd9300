//! The handles of nodes in C programs, and which thread may call into a node.
//!
//! A handle is a number typed as a pointer. It is never dereferenced. It encodes a slot of a fixed
//! table and a count of opened nodes, so a null, closed or made-up handle is detected. The thread
//! that opens a node owns it. After [`fp_node_unbind`] the next thread that calls into the node
//! owns it. Calls by other threads are refused, and so are calls by a signal handler that has
//! interrupted a call. The check costs a few loads and compares, and no atomic read-modify-write.
//!
//! The numbers of memory, peers, operations and receives are mixed with a value of the node. Zero
//! and the numbers of another node are therefore invalid.
//!
//! # Edges
//!
//! A compare-and-swap with acquire changes a slot's owner from 0 to a thread. Only that thread
//! stores 0 again, with release. Only the owner accesses the contents of the slot.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, compiler_fence};
use std::sync::{Mutex, PoisonError};

use fishplate::core::engine::protocol::Claimed;
use fishplate::core::mem::{LocalId, RemoteId};
use fishplate::node::{Memory, Remote};
use fishplate::{LocalAddr, Node, PeerId, RemoteAddr};

use crate::status::{Status, fail};

/// The C type of a node handle. Never dereferenced.
#[repr(C)]
pub struct FpNode {
    _opaque: [u8; 0],
}

/// Maximum number of open nodes in a process.
const SLOTS: usize = 64;

/// A node, and the objects that a C program names by number.
pub(crate) struct Inner {
    pub node: Node,
    /// Memory of the node, by raw region number.
    pub memories: HashMap<u64, Memory>,
    pub remotes: HashMap<u64, Remote>,
    /// Claimed messages that are not received yet, by number.
    pub claims: HashMap<u64, Claimed>,
    pub next_claim: u64,
    /// The value mixed into the numbers of this node: 1 to 0x7fff.
    mixed: u64,
}

struct Slot {
    /// The handle of the open node, or 0. Only the slot's owner changes it.
    name: AtomicUsize,
    /// The owning thread, or 0.
    owner: AtomicUsize,
    /// True during a call. Only the owner checks it, in case a signal handler interrupts the
    /// owner's call.
    busy: AtomicBool,
    /// `None` while no node is open, or after a panic.
    inner: UnsafeCell<Option<Box<Inner>>>,
}

// SAFETY: only the thread in `owner` accesses `inner`, whose contents are `Send`. The edges of
// `owner` order one owner's accesses before the next one's.
unsafe impl Sync for Slot {}
const _: () = {
    const fn send<T: Send>() {}
    send::<Inner>();
};

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        name: AtomicUsize::new(0),
        owner: AtomicUsize::new(0),
        busy: AtomicBool::new(false),
        inner: UnsafeCell::new(None),
    }
}; SLOTS];

/// Nodes whose calls panicked. Their state may be inconsistent, so they are never dropped.
static LEFT: Mutex<Vec<Box<Inner>>> = Mutex::new(Vec::new());

/// Counts nodes, so that no handle is reused.
static OPENED: AtomicUsize = AtomicUsize::new(0);

/// Returns a number that is unique among live threads, and not 0.
#[inline(always)]
fn me() -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        let thread: usize;
        // SAFETY: the x86-64 ABI stores the address of the thread control block at fs:0.
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

/// Adds a node to the table. This thread becomes its owner.
pub(crate) fn insert(node: Node) -> Result<*mut FpNode, Status> {
    let number = OPENED.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
    let inner = Inner {
        node,
        memories: HashMap::new(),
        remotes: HashMap::new(),
        claims: HashMap::new(),
        next_claim: 1,
        mixed: (number % 0x7fff) as u64 + 1,
    };
    for (at, slot) in TABLE.iter().enumerate() {
        if slot.owner.compare_exchange(0, me(), Ordering::Acquire, Ordering::Relaxed).is_err() {
            continue;
        }
        if slot.name.load(Ordering::Relaxed) != 0 {
            // An open node that has no owner.
            slot.owner.store(0, Ordering::Release);
            continue;
        }
        let name = number.wrapping_mul(SLOTS).wrapping_add(at);
        // SAFETY: this thread owns the slot, and nothing else borrows from it.
        unsafe { *slot.inner.get() = Some(Box::new(inner)) };
        slot.name.store(name, Ordering::Relaxed);
        return Ok(std::ptr::without_provenance_mut(name));
    }
    Err(fail(
        libc::ENOSPC,
        format_args!("cannot open a node: {SLOTS} are open in this process; close one first"),
    ))
}

/// Removes a node from the table. No call can enter it afterwards.
pub(crate) fn remove(node: *mut FpNode) -> Result<Box<Inner>, Status> {
    owned(node)?;
    let slot = slot(node);
    if slot.busy.load(Ordering::Relaxed) {
        return Err(interrupted());
    }
    slot.name.store(0, Ordering::Relaxed);
    // SAFETY: this thread owns the slot, and no call is in progress in it.
    let inner = unsafe { (*slot.inner.get()).take() };
    slot.owner.store(0, Ordering::Release);
    inner.ok_or_else(broken)
}

/// Checks that the handle is valid and that this thread owns the node. Adopts a node without an
/// owner.
#[inline(always)]
fn owned(node: *mut FpNode) -> Result<(), Status> {
    let slot = slot(node);
    if slot.owner.load(Ordering::Relaxed) == me() && slot.name.load(Ordering::Relaxed) == node.addr() {
        return Ok(());
    }
    adopt(node)
}

/// Takes ownership of a node that has no owner.
#[cold]
fn adopt(node: *mut FpNode) -> Result<(), Status> {
    let slot = slot(node);
    if node.is_null() || slot.name.load(Ordering::Relaxed) != node.addr() {
        return Err(stranger());
    }
    if slot.owner.compare_exchange(0, me(), Ordering::Acquire, Ordering::Relaxed).is_err() {
        return Err(fail(libc::EPERM, "the node belongs to another thread; call fp_node_unbind there first"));
    }
    // Another thread may have closed the node before the exchange.
    if slot.name.load(Ordering::Relaxed) != node.addr() {
        slot.owner.store(0, Ordering::Release);
        return Err(stranger());
    }
    Ok(())
}

#[cold]
fn stranger() -> Status {
    fail(libc::EBADF, "invalid node handle: null, closed or never returned")
}

/// Makes a call, which must not unwind, into a slot that this thread owns. Returns `None` if
/// another call is in progress or no node is open.
#[inline(always)]
fn during<T>(slot: &Slot, call: impl FnOnce(&mut Inner) -> T) -> Option<T> {
    if slot.busy.load(Ordering::Relaxed) {
        return None;
    }
    slot.busy.store(true, Ordering::Relaxed);
    compiler_fence(Ordering::SeqCst);
    // SAFETY: this thread owns the slot, and no other call is in progress: a signal handler that
    // interrupts this one finds `busy` set.
    let done = unsafe { (*slot.inner.get()).as_deref_mut() }.map(call);
    compiler_fence(Ordering::SeqCst);
    slot.busy.store(false, Ordering::Relaxed);
    done
}

/// Makes a call that cannot panic. Returns `None` if the call was not made; [`enter`] then returns
/// the reason.
#[inline(always)]
pub(crate) fn at_once<T>(node: *mut FpNode, call: impl FnOnce(&mut Inner) -> T) -> Option<T> {
    let slot = slot(node);
    if slot.owner.load(Ordering::Relaxed) != me() || slot.name.load(Ordering::Relaxed) != node.addr() {
        return None;
    }
    during(slot, call)
}

/// Makes a call into a node, and returns its result to C. A panic makes the node unusable.
#[inline(always)]
pub(crate) fn enter(node: *mut FpNode, call: impl FnOnce(&mut Inner) -> Result<c_int, Status>) -> c_int {
    if let Err(status) = owned(node) {
        return status.0;
    }
    let slot = slot(node);
    match during(slot, |inner| catch_unwind(AssertUnwindSafe(|| call(inner)))) {
        Some(Ok(Ok(done))) => done,
        Some(Ok(Err(status))) => status.0,
        Some(Err(_)) => panicked(slot),
        None => refused(node).0,
    }
}

/// Returns why this thread cannot enter a node that it owns.
#[cold]
fn refused(node: *mut FpNode) -> Status {
    if slot(node).busy.load(Ordering::Relaxed) { interrupted() } else { broken() }
}

#[cold]
fn interrupted() -> Status {
    fail(
        libc::EBUSY,
        "the signal handler has interrupted a call of this node; make the call outside the handler",
    )
}

impl Inner {
    /// Converts a region's number between the node and C. The conversion is its own inverse.
    #[inline(always)]
    pub fn region(&self, raw: u64) -> u64 {
        // Region numbers use 16 bits of the lower half, so those of another node are out of range.
        raw ^ self.mixed << 16
    }

    /// Converts the number of an operation or a receive between the node and C. The upper half
    /// distinguishes it from earlier ones in the same slot.
    #[inline(always)]
    pub fn token(&self, raw: u64) -> u64 {
        raw ^ self.mixed << 48
    }

    /// Converts the number of a peer between the node and C.
    pub fn peer(&self, raw: u32) -> u32 {
        raw ^ (self.mixed as u32) << 16
    }

    /// Returns an address in memory of the node.
    #[inline(always)]
    pub fn here(&self, memory: u64, offset: u64) -> LocalAddr {
        LocalId::from_raw(self.region(memory)).at(offset)
    }

    /// Returns an address in imported memory.
    #[inline(always)]
    pub fn there(&self, remote: u64, offset: u64) -> RemoteAddr {
        RemoteId::from_raw(self.region(remote)).at(offset)
    }

    /// Converts a peer number from C.
    pub fn named(&self, peer: u32) -> PeerId {
        PeerId::from_raw(self.peer(peer))
    }

    /// Converts a peer number from C; `None` means any peer.
    pub fn anyone(&self, peer: u32) -> Option<PeerId> {
        (peer != ANY).then(|| self.named(peer))
    }
}

/// The peer number that means any peer.
pub(crate) const ANY: u32 = u32::MAX;

#[cold]
fn panicked(slot: &Slot) -> c_int {
    // SAFETY: this thread owns the slot, and the call that panicked has returned.
    let inner = unsafe { (*slot.inner.get()).take() };
    LEFT.lock().unwrap_or_else(PoisonError::into_inner).extend(inner);
    broken().0
}

#[cold]
fn broken() -> Status {
    fail(libc::ENOTRECOVERABLE, "an internal error of the library ended this node; please report it")
}

/// Makes a call that involves no node. Converts a panic to an error.
pub(crate) fn outside(call: impl FnOnce() -> Result<c_int, Status>) -> c_int {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(done)) => done,
        Ok(Err(status)) => status.0,
        Err(_) => broken().0,
    }
}

/// Releases the node. The next thread that calls into the node owns it.
#[unsafe(no_mangle)]
pub extern "C" fn fp_node_unbind(node: *mut FpNode) -> c_int {
    match owned(node) {
        Ok(()) if slot(node).busy.load(Ordering::Relaxed) => interrupted().0,
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
        assert!(at_once(bad, |_| ()).is_none());
        assert_eq!(enter(good, |_| Ok(7)), 7);
        assert_eq!(remove(bad).err(), Some(Status(-libc::ENOTRECOVERABLE)));
        assert_eq!(enter(bad, |_| Ok(7)), -libc::EBADF);
        assert_eq!(outside(|| panic!("a defect")), -libc::ENOTRECOVERABLE);
        assert!(remove(good).is_ok());
    }

    #[test]
    fn handles_are_unique_and_limited() {
        let open = || insert(Node::builder().fabric(Fabric::Off).open().unwrap());
        let mut seen = vec![];
        for _ in 0..3 {
            let nodes: Vec<_> = std::iter::from_fn(|| open().ok()).collect();
            // A concurrent test has two nodes open.
            assert!((SLOTS - 2..=SLOTS).contains(&nodes.len()));
            for node in nodes {
                assert!(!seen.contains(&node));
                seen.push(node);
                assert!(remove(node).is_ok());
            }
        }
    }
}
