//! Checks node handles from C programs, and which thread may call into a node.
//!
//! A handle is a number that has a pointer type and is never dereferenced. Its lower bits select a
//! slot of a fixed table, and its upper 16 bits count the uses of that slot. A null, closed or
//! made-up handle differs from the handle in its slot. A node belongs to the thread that opened it,
//! until that thread calls [`fp_node_unbind`]. After that it belongs to the next thread that calls
//! into it. Calls by other threads are refused, and so are calls by a signal handler that has
//! interrupted a call.
//!
//! One comparison checks the handle, the thread and the signal handler: a slot's `key` is its
//! handle xor the owner's thread number while that thread may enter, and 0 otherwise. A thread's
//! number is an address below 2^48, so every pair of a thread and a returned handle has a different
//! key in a slot.
//!
//! Peer, operation and receive numbers given to C are XORed with a value that identifies the node.
//! So zero and the numbers of other nodes are invalid. Region numbers already identify their node.
//! Numbers of imported regions differ from those of own regions by [`REMOTE`].
//!
//! # Edges
//!
//! Only the [`Owner`] of a slot accesses its contents. The edges of the owner order the accesses.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering, compiler_fence};
use std::sync::{Mutex, Once, PoisonError};

use fishplate::core::engine::protocol::Claimed;
use fishplate::core::mem::{LocalId, RemoteId};
use fishplate::core::sync::owner::Owner;
use fishplate::node::{Memory, Remote};
use fishplate::{LocalAddr, Node, PeerId, RemoteAddr};

use crate::status::{Status, fail};

/// Never dereferenced.
#[repr(C)]
pub struct FpNode {
    _opaque: [u8; 0],
}

const SLOTS: usize = 64;
const USES: usize = 0xffff;
/// The lowest bit of the use count in a handle.
const USE: u32 = 48;
const _: () = assert!(usize::BITS == 64 && size_of::<Slot>() == 32);

/// A node, and the objects that a C program names by number.
pub(crate) struct Inner {
    pub node: Node,
    /// Memory of the node, by raw region number.
    pub memories: HashMap<u64, Memory>,
    /// Imported memory and its peer, by the number given to C.
    pub remotes: HashMap<u64, (Remote, PeerId)>,
    /// Claimed messages that are not received yet, by number.
    pub claims: HashMap<u64, Claimed>,
    pub next_claim: u64,
    /// Identifies this node in the numbers given to C: 1 to 0x7fff.
    mixed: u64,
}

/// A slot's address is the address of the table plus the lower bits of its handles.
#[repr(C)]
struct Slot {
    /// `name ^ owner` while the node is open, has an owner, and is in no call. Otherwise 0. Only
    /// the owner changes it.
    key: AtomicUsize,
    /// Null while the node is closed, or after a panic in it.
    inner: UnsafeCell<*mut Inner>,
    /// The valid handle of the slot. Without an open node, the last handle with [`CLOSED`] set.
    name: AtomicUsize,
    owner: Owner,
}

// SAFETY: only the thread in `owner` accesses `inner`, and the node that it points to is `Send`.
// The edges of `owner` order each owner's accesses before the next owner's accesses.
unsafe impl Sync for Slot {}
const _: () = {
    const fn send<T: Send>() {}
    send::<Inner>();
};

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        key: AtomicUsize::new(0),
        inner: UnsafeCell::new(ptr::null_mut()),
        name: AtomicUsize::new(CLOSED),
        owner: Owner::new(),
    }
}; SLOTS];

const CLOSED: usize = 1;

/// Nodes whose calls panicked. Their state may be inconsistent, so they are never dropped.
static LEFT: Mutex<Vec<Inner>> = Mutex::new(Vec::new());

/// Selects the `mixed` value of the next node.
static OPENED: AtomicUsize = AtomicUsize::new(0);

/// Returns a nonzero number that no other live thread has.
#[inline(always)]
fn me() -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        let thread: usize;
        // SAFETY: the x86-64 ABI stores the address of the thread control block at fs:0.
        unsafe {
            std::arch::asm!(
                "mov {}, fs:0",
                out(reg) thread,
                options(nostack, pure, readonly, preserves_flags)
            );
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
    let within = node.addr() & ((SLOTS - 1) * size_of::<Slot>());
    // SAFETY: the offset selects a slot of the table.
    unsafe { &*ptr::from_ref(&TABLE).cast::<Slot>().byte_add(within) }
}

/// Closes all handles in a forked child, which has its parent's memory. The nodes stay as they are,
/// because their connections belong to the parent.
extern "C" fn in_child() {
    for slot in &TABLE {
        let name = slot.name.load(Ordering::Relaxed);
        slot.key.store(0, Ordering::Relaxed);
        slot.name.store(name | CLOSED, Ordering::Relaxed);
        // SAFETY: a child has one thread, and no call is in progress in it. If a signal handler has
        // interrupted a call and forks, the header requires that the child never returns to it.
        unsafe { *slot.inner.get() = ptr::null_mut() };
        slot.owner.give();
    }
}

/// This thread becomes the node's owner.
pub(crate) fn insert(node: Node) -> Result<*mut FpNode, Status> {
    static WATCH: Once = Once::new();
    // SAFETY: the handler makes plain stores, which are allowed in a forked child.
    WATCH.call_once(|| _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) });
    let number = OPENED.fetch_add(1, Ordering::Relaxed);
    let inner = Box::new(Inner {
        node,
        memories: HashMap::new(),
        remotes: HashMap::new(),
        claims: HashMap::new(),
        next_claim: 1,
        mixed: (number % 0x7fff) as u64 + 1,
    });
    for (at, slot) in TABLE.iter().enumerate() {
        if !slot.owner.take(me() as u64) {
            continue;
        }
        let last = slot.name.load(Ordering::Relaxed);
        if last & CLOSED == 0 || last >> USE == USES {
            // The slot has an open node without an owner, or no unused handle.
            slot.owner.give();
            continue;
        }
        let name = (((last >> USE) + 1) << USE) | (at * size_of::<Slot>());
        // SAFETY: this thread owns the slot, and nothing else borrows from it.
        unsafe { *slot.inner.get() = Box::into_raw(inner) };
        slot.name.store(name, Ordering::Relaxed);
        slot.key.store(name ^ me(), Ordering::Relaxed);
        return Ok(ptr::without_provenance_mut(name));
    }
    Err(fail(
        libc::ENOSPC,
        format_args!(
            "cannot open a node: {SLOTS} are open in this process, or it has opened four million \
             in all; close nodes, or reuse open ones"
        ),
    ))
}

/// No call can enter the node afterwards.
pub(crate) fn remove(node: *mut FpNode) -> Result<Box<Inner>, Status> {
    let slot = match idle(node) {
        Err(status) if status != Status(-libc::ENOTRECOVERABLE) => return Err(status),
        _ => slot(node),
    };
    slot.key.store(0, Ordering::Relaxed);
    compiler_fence(Ordering::SeqCst);
    slot.name.store(node.addr() | CLOSED, Ordering::Relaxed);
    // SAFETY: this thread owns the slot, and no call is in progress in it.
    let inner = unsafe { slot.inner.get().replace(ptr::null_mut()) };
    slot.owner.give();
    // SAFETY: the pointer comes from `Box::into_raw` in `insert`, and is no longer in the table.
    if inner.is_null() { Err(broken()) } else { Ok(unsafe { Box::from_raw(inner) }) }
}

fn idle(node: *mut FpNode) -> Result<&'static Slot, Status> {
    let slot = slot(node);
    match slot.key.load(Ordering::Relaxed) == node.addr() ^ me() {
        true => Ok(slot),
        false => adopt(node),
    }
}

/// Takes ownership of a node that has no owner, or returns why this thread cannot enter it.
#[cold]
fn adopt(node: *mut FpNode) -> Result<&'static Slot, Status> {
    let slot = slot(node);
    let stranger =
        || fail(libc::EBADF, "invalid node handle: null, closed, or made up; pass an open node");
    if slot.name.load(Ordering::Relaxed) != node.addr() {
        return Err(stranger());
    }
    if slot.owner.is(me() as u64) {
        // SAFETY: this thread owns the slot. If this runs in a signal handler, the interrupted call
        // has borrowed the node but not the pointer.
        return Err(if unsafe { (*slot.inner.get()).is_null() } {
            broken()
        } else {
            interrupted()
        });
    }
    if !slot.owner.take(me() as u64) {
        return Err(fail(
            libc::EPERM,
            "the node belongs to another thread; call fp_node_unbind in that thread first",
        ));
    }
    // Another thread may have closed the node before the exchange.
    if slot.name.load(Ordering::Relaxed) != node.addr() {
        slot.owner.give();
        return Err(stranger());
    }
    slot.key.store(node.addr() ^ me(), Ordering::Relaxed);
    Ok(slot)
}

/// Makes a call into the node of a slot. This thread owns the slot, no other call is in progress,
/// and the call does not unwind.
#[inline(always)]
fn during<T>(slot: &Slot, key: usize, call: impl FnOnce(&mut Inner) -> T) -> T {
    slot.key.store(0, Ordering::Relaxed);
    compiler_fence(Ordering::SeqCst);
    // SAFETY: this thread owns the slot, and no other call is in progress, because a signal handler
    // that interrupts this call finds no key. A slot with a key has a node.
    let done = call(unsafe { &mut **slot.inner.get() });
    compiler_fence(Ordering::SeqCst);
    slot.key.store(key, Ordering::Relaxed);
    done
}

/// Makes a call that cannot panic. Returns `None` if the call was not made; [`enter`] then returns
/// the reason.
#[inline(always)]
pub(crate) fn at_once<T>(node: *mut FpNode, call: impl FnOnce(&mut Inner) -> T) -> Option<T> {
    let (slot, key) = (slot(node), node.addr() ^ me());
    (slot.key.load(Ordering::Relaxed) == key).then(|| during(slot, key, call))
}

/// Makes a call into a node, and returns its result to C. A panic makes the node unusable.
#[inline(always)]
pub(crate) fn enter(
    node: *mut FpNode,
    call: impl FnOnce(&mut Inner) -> Result<c_int, Status>,
) -> c_int {
    let slot = match idle(node) {
        Ok(slot) => slot,
        Err(status) => return status.0,
    };
    match during(slot, node.addr() ^ me(), |inner| catch_unwind(AssertUnwindSafe(|| call(inner)))) {
        Ok(Ok(done)) => done,
        Ok(Err(status)) => status.0,
        Err(_) => panicked(slot),
    }
}

#[cold]
fn interrupted() -> Status {
    fail(
        libc::EBUSY,
        "the signal handler has interrupted a call on this node; call the node outside the handler",
    )
}

impl Inner {
    /// Converts the number of an operation or a receive between the node and C. The upper half of
    /// the number distinguishes it from earlier numbers of the same slot.
    #[inline(always)]
    pub fn token(&self, raw: u64) -> u64 {
        raw ^ self.mixed << 48
    }

    pub fn peer(&self, raw: u32) -> u32 {
        raw ^ (self.mixed as u32) << 16
    }

    #[inline(always)]
    pub fn here(&self, memory: u64, offset: u64) -> LocalAddr {
        LocalId::from_raw(memory).at(offset)
    }

    #[inline(always)]
    pub fn there(&self, remote: u64, offset: u64) -> RemoteAddr {
        RemoteId::from_raw(remote ^ REMOTE).at(offset)
    }

    pub fn named(&self, peer: u32) -> PeerId {
        PeerId::from_raw(self.peer(peer))
    }

    pub fn anyone(&self, peer: u32) -> Option<PeerId> {
        (peer != ANY).then(|| self.named(peer))
    }
}

pub(crate) const ANY: u32 = u32::MAX;

/// A bit that is 0 in the node's region numbers: tables of regions have less than 2^16 entries, and
/// the lower 32 bits of a number are an index. With the bit, a number is outside the other table.
pub(crate) const REMOTE: u64 = 1 << 30;

#[cold]
fn panicked(slot: &Slot) -> c_int {
    slot.key.store(0, Ordering::Relaxed);
    // SAFETY: this thread owns the slot, and the call that panicked has returned.
    let inner = unsafe { slot.inner.get().replace(ptr::null_mut()) };
    // SAFETY: the pointer comes from `Box::into_raw` in `insert`, and is no longer in the table.
    LEFT.lock().unwrap_or_else(PoisonError::into_inner).push(*unsafe { Box::from_raw(inner) });
    broken().0
}

#[cold]
fn broken() -> Status {
    fail(
        libc::ENOTRECOVERABLE,
        "internal error in the library: the node is unusable; please report this bug",
    )
}

/// Makes a call that involves no node. Converts a panic to an error.
pub(crate) fn outside(call: impl FnOnce() -> Result<c_int, Status>) -> c_int {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(done)) => done,
        Ok(Err(status)) => status.0,
        Err(_) => {
            let text = "internal error in the library (this is a bug; please report it)";
            fail(libc::ENOTRECOVERABLE, text).0
        }
    }
}

/// Releases the node. The next thread that calls into the node owns it.
#[unsafe(no_mangle)]
pub extern "C" fn fp_node_unbind(node: *mut FpNode) -> c_int {
    match idle(node) {
        Ok(slot) => {
            slot.key.store(0, Ordering::Relaxed);
            slot.owner.give();
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
            // A concurrent test may have up to two nodes open.
            assert!((SLOTS - 2..=SLOTS).contains(&nodes.len()));
            for node in nodes {
                assert!(!seen.contains(&node));
                seen.push(node);
                assert!(remove(node).is_ok());
            }
        }
    }
}
