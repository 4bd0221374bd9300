//! Layer 2: one path to the fabric.
//!
//! A [`Rail`] moves bytes and reports events; it does not know streams, order or signals. The
//! engine above owns its rails, drives each from one thread, and adds order.
//! `core/examples/file_rail.rs` is a complete rail to start from.
//!
//! # The contract of a rail
//!
//! 1. **Nothing on refusal.** A post that returns an error has changed nothing.
//!    [`PostError::Again`] goes away by polling.
//! 2. **One completion per post.** A post that returned [`Posted::Pending`] yields exactly one
//!    [`Sink::done`] with its context word, whatever happens to the peer. One that returned
//!    [`Posted::Done`] yields none. Success means only that the local memory may be reused.
//! 3. **Data before its word.** [`Sink::landed`] is reported at the target only when all bytes of
//!    that write are visible to the target's processor. Messages arrive whole.
//! 4. **Once, in any order.** An accepted post arrives exactly once, or the peer is reported down.
//!    [`Caps::order`] says which posts keep their order; all others may be reordered.
//! 5. **Messages are copied** before the post returns; the caller's bytes are free at once.
//! 6. **Bounded.** `poll` reports at most `budget` events. No method blocks, allocates or waits for
//!    a peer, except `register`, `import`, `detach` and `check_peers`, which are slow paths, and
//!    `write_device` and `read_device`, which may wait for a device.
//! 7. **Not trusted.** The target checks each access against the memory registered on this rail
//!    before it writes anything. The post of a refused access returns [`PostError::BadKey`] or
//!    completes with an error. A peer that breaks the protocol is reported by [`Sink::peer_down`]
//!    and ignored from then on.
//! 8. **Sleep.** A rail that can wake a sleeping owner offers its eventcount by a method of its
//!    own. The eventcount outlives the rail; waits take it as an argument.
//! 9. **Receive buffers go back to the provider** before the next poll returns; the engine copies a
//!    message that it keeps.

pub mod faulty;
pub mod loopback;
mod rails;
mod random;
pub mod sim;

pub use rails::Rails;
pub(crate) use rails::SomeRails;

use core::ptr::NonNull;

use crate::error::{AttachError, CompleteError, PeerError, PostError};
use crate::mem::{Peer, Region, Untrusted, copy_bytes};
use crate::op::{Amo, AmoSet};

/// How much of the posting order to one peer a rail preserves. Each level includes the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    /// No order at all.
    None,
    /// Messages and completion words are reported in the order posted. The bytes of a write may be
    /// in place before messages that were posted earlier are reported, as in memory that the origin
    /// has mapped.
    Reports,
    /// The bytes of a write, too, are in place only once everything posted earlier is.
    All,
}

/// What a rail can do. Constant once the rail exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Longest message, in bytes. At least 256.
    pub max_message: usize,
    /// Longest single write or read, in bytes.
    pub max_rma: usize,
    /// Longest write whose source is copied before the post returns, in bytes.
    pub inject: usize,
    /// Bytes of remote completion data that a write carries: 4 or 8. The engine uses 4.
    pub data_bytes: u8,
    /// Which posts to one peer keep their order.
    pub order: Order,
    /// What [`Rail::post_atomic`] executes. The engine uses it for regions
    /// [with native atomics](Region::with_native_atomics).
    pub native_atomics: AmoSet,
    /// Posts that can be outstanding at once.
    pub depth: u32,
    /// Whether both ends keep attachments of a peer apart: a post of one is never reported in a
    /// later one. The engine relies on it and adds no check.
    pub fresh: bool,
}

/// Whether a post has already completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// Complete: the local memory may be reused, and [`Sink::done`] is not called.
    Done,
    /// [`Sink::done`] will report the completion.
    Pending,
}

/// Longest address of [`Rail::reopen`], in bytes.
pub const REOPEN_MAX: usize = 112;

/// How far [`Rail::fence`] has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// The rail and the peer are cut off from each other.
    Fenced,
    /// Something may still land: call again after the next poll.
    Pending,
    /// The rail cannot tell, so the peer must fail.
    Unknown,
}

/// Memory of this process that a post reads or fills.
#[derive(Clone, Copy, Debug)]
pub struct Local {
    /// First byte.
    pub ptr: NonNull<u8>,
    /// Size in bytes.
    pub len: usize,
    /// The descriptor that registration returned, or 0.
    pub desc: u64,
}

impl Local {
    /// Returns whether this memory overlaps the `len` bytes at `ptr`.
    pub fn overlaps(&self, ptr: *const u8, len: usize) -> bool {
        let (start, other) = (self.ptr.as_ptr().addr(), ptr.addr());
        start < other.saturating_add(len) && other < start.saturating_add(self.len)
    }
}

/// A peer's memory that a post reads or fills: the key of its registration, and an offset into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The key that [`Rail::register`] returned at the peer.
    pub key: RailKey,
    /// Offset from the start of the region, in bytes.
    pub offset: u64,
}

/// The key that registration returns, for peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RailKey {
    /// Identifies the region to the rail at both ends.
    pub key: u64,
    /// Address of the region's first byte in this rail's terms (0 if keys count from 0).
    pub base: u64,
}

/// The receiver of a rail's reports. Methods only change state; none of them posts.
pub trait Sink {
    /// A pending post has completed.
    fn done(&mut self, cx: u64, result: Result<(), CompleteError>);
    /// Reports `count` successful completions that share one context word.
    #[inline]
    fn done_alike(&mut self, cx: u64, count: u32) {
        for _ in 0..count {
            self.done(cx, Ok(()));
        }
    }
    /// A write with completion data from `peer` is complete and visible here.
    fn landed(&mut self, peer: Peer, data: u32);
    /// A message has arrived. The bytes are valid during the call and may change: copy once, then
    /// check.
    fn message(&mut self, peer: Peer, bytes: Untrusted<'_>);
    /// The peer has failed on this rail. Each of its pending posts is or will be reported as
    /// failed.
    fn peer_down(&mut self, peer: Peer, why: PeerError);
    /// A [fenced](Rail::fence) peer may be attached again: the link is up. May be repeated until it
    /// is.
    fn peer_up(&mut self, _peer: Peer) {}
}

/// One path to the fabric. See the contract in the module's documentation.
///
/// # Safety
/// The engine relies on what a rail returns when it accesses memory:
///
/// - A pointer that [`import`](Rail::import) returns is valid for reads and writes of `len` bytes,
///   and aligned to 8. It stays so until that import is [released](Rail::release), or its peer
///   [detached](Rail::detach).
/// - A post that returned [`Posted::Done`] or an error does not touch its local memory after it
///   returns. A pending post does not touch it after its only [`Sink::done`]. Exception: after
///   [`CompleteError::Unknown`] the rail may touch the memory until it is dropped.
/// - Once [`deregister`](Rail::deregister) returns without an error, the rail touches that memory
///   only for posts that [`touches`](Rail::touches) reports. A dropped rail touches no memory.
/// - The bytes passed to a [`Sink`] are readable during the call.
/// - [`caps`](Rail::caps) never changes. A write of up to [`Caps::inject`] bytes is done when the
///   post returns.
/// - Calls through `&self` or a [`Setup`](Rail::Setup) break none of these promises: they do not
///   end an import, forget a peer, post, poll or replace the rail.
pub unsafe trait Rail {
    /// The operations that the owner of an engine may call on a rail, such as attaching peers,
    /// while the engine drives it.
    type Setup<'a>
    where
        Self: 'a;

    /// Whether [`copy_to`](Rail::copy_to) and [`copy_from`](Rail::copy_from) may copy. Without a
    /// default, so that a wrapper forwards the value of its inner rail.
    const COPIES: bool;

    /// Borrows the rail for its engine's owner. Slow path.
    fn setup(&mut self) -> Self::Setup<'_>;

    /// Returns what this rail can do.
    fn caps(&self) -> Caps;

    /// Makes memory reachable to peers. Returns its key and the local descriptor. Slow path.
    fn register(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError>;

    /// Deregisters memory. Later posts of peers to it are refused if this end executes them. A peer
    /// that has the memory mapped, or accesses it through the kernel, is not stopped, so it must
    /// have finished before. Slow path.
    ///
    /// # Errors
    /// [`AttachError::Kept`]: the key is invalid, but the provider still holds the memory, which
    /// must never be freed.
    fn deregister(&mut self, key: RailKey) -> Result<(), AttachError>;

    /// Returns whether a post may still access any of these bytes: a pending one, or one that
    /// completed as [`CompleteError::Unknown`]. A failed [`write_device`](Rail::write_device) or
    /// [`read_device`](Rail::read_device) counts until the device reports its end. False positives
    /// are allowed. Slow path: may scan all posts, and call a driver.
    fn touches(&mut self, memory: Local) -> bool;

    /// Prepares access to `len` bytes that `peer` registered. Returns their address in this process
    /// if the rail maps memory. Device memory is never mapped. Slow path: may block for a bounded
    /// time.
    fn import(&mut self, peer: Peer, key: RailKey, len: u64) -> Result<Option<NonNull<u8>>, AttachError>;

    /// Like [`import`](Rail::import), but fails instead of waiting for the peer. The engine uses it
    /// for regions that a peer names in a message. Override it where `import` waits; a wrapper
    /// forwards the call.
    fn try_import(&mut self, peer: Peer, key: RailKey, len: u64) -> Result<Option<NonNull<u8>>, AttachError> {
        self.import(peer, key, len)
    }

    /// Ends an [`import`](Rail::import) or [`try_import`](Rail::try_import): its mapped pointer
    /// becomes invalid. Slow path.
    fn release(&mut self, peer: Peer, key: RailKey);

    /// Detaches a peer. Its pending posts fail and its memory is unmapped. From then on only the
    /// completions of those posts are reported. Slow path.
    fn detach(&mut self, peer: Peer);

    /// Cuts this rail and a peer off from each other, because the rail has failed or is disabled.
    /// Slow path; does not wait. The caller posts nothing more to the peer on this rail, and polls
    /// and calls again while the result is [`Fence::Pending`].
    ///
    /// After [`Fence::Fenced`], until the peer is attached again:
    ///
    /// - No post of the peer on this rail, earlier or later, lands in memory of this process or is
    ///   reported.
    /// - No post to the peer on this rail touches local memory. A later poll reports those that are
    ///   still pending.
    ///
    /// Posts to the peer may still land there until that end fences the rail too. Once both ends
    /// have fenced it and [attached](Rail::rejoin) each other again, nothing that was posted before
    /// lands or is reported.
    #[cold]
    fn fence(&mut self, _peer: Peer) -> Fence {
        Fence::Unknown
    }

    /// Opens the rail for a fenced peer again. Writes the address that the peer passes to
    /// [`rejoin`](Rail::rejoin) to `into`, and returns its length in bytes. `None`: not now: the
    /// link is down or completions of posts to the peer are still to be reported.
    /// [`Sink::peer_up`] says when to try again. Returns the address also once the peer is attached
    /// again. Slow path; does not wait.
    #[cold]
    fn reopen(&mut self, _peer: Peer, _into: &mut [u8; REOPEN_MAX]) -> Option<usize> {
        None
    }

    /// Attaches a fenced peer again, at the address that its [`reopen`](Rail::reopen) has returned,
    /// or attaches one at another address that was attached like this before. Imports stay. The
    /// address comes from the peer: the rail checks its length and form. Slow path; does not wait.
    ///
    /// # Errors
    /// The peer is not fenced or the address is invalid, and nothing has changed; or the
    /// provider's code, and the peer stays fenced.
    #[cold]
    fn rejoin(&mut self, _peer: Peer, _address: &[u8]) -> Result<(), AttachError> {
        Err(AttachError::Unsupported)
    }

    /// Whether a [`fence`](Rail::fence) cuts off every peer of this rail. The others are then
    /// reported by [`Sink::peer_down`]. The engine gives the peer up instead where the fence would
    /// cost another one. Constant once the rail exists; a wrapper forwards the call.
    #[cold]
    fn fences_all(&self) -> bool {
        false
    }

    /// Whether a peer is fenced, so that [`fence`](Rail::fence) succeeds and costs nobody anything.
    /// A rail that [fences all](Rail::fences_all) must tell. A wrapper forwards the call.
    #[cold]
    fn is_fenced(&self, _peer: Peer) -> bool {
        false
    }

    /// Posts a one-sided write, with a completion word for the target if `data` is given.
    ///
    /// # Safety
    /// `local` stays readable until the post is done.
    unsafe fn post_write(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError>;

    /// Like [`post_write`](Rail::post_write) with a completion word, without the checks that the
    /// caller has already made.
    ///
    /// # Safety
    /// The same as for [`post_write`](Rail::post_write). `peer` is attached.
    /// [`import`](Rail::import) of this rail gave access to the region of `remote`, which holds all
    /// `local.len` bytes from `remote` on. The length is at most [`Caps::max_rma`].
    #[inline(always)]
    unsafe fn post_write_checked(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: u32,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: our caller guarantees this, and more.
        unsafe { self.post_write(peer, local, remote, Some(data), cx) }
    }

    /// Posts a one-sided read.
    ///
    /// # Safety
    /// `local` stays writable, and unread, until the post is done.
    unsafe fn post_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError>;

    /// Reads the payload of a two-sided message. The sender keeps driving its rail until the
    /// payload is read, so a rail may have the sender write it if that is faster.
    ///
    /// # Safety
    /// As for [`post_read`](Rail::post_read).
    #[inline(always)]
    unsafe fn post_rendezvous_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: our caller guarantees the same contract.
        unsafe { self.post_read(peer, local, remote, cx) }
    }

    /// Posts a message of `head` followed by `body`. Both are copied before the return.
    fn post_message(
        &mut self,
        peer: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        cx: u64,
    ) -> Result<Posted, PostError>;

    /// Posts an atomic that the rail executes. Stores a fetched value at `fetch` as a native `u64`.
    /// It completes once it is applied at the target. Needs no order relative to other posts.
    ///
    /// # Safety
    /// `fetch`, if given, stays writable for 8 bytes until the post is done.
    unsafe fn post_atomic(
        &mut self,
        _peer: Peer,
        _amo: Amo,
        _remote: Remote,
        _fetch: Option<NonNull<u64>>,
        _cx: u64,
    ) -> Result<Posted, PostError> {
        Err(PostError::Unsupported)
    }

    /// Reports at most `budget` events and returns how many.
    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32;

    /// Sends posts that were held back for batching. Called before a pass ends.
    #[inline(always)]
    fn flush(&mut self) {}

    /// Copies pieces into memory that is imported but not mapped, and completes before it returns.
    /// `None`: the rail cannot; post writes. After an error a part may have been copied.
    ///
    /// # Safety
    /// Each local range is readable.
    #[inline(always)]
    unsafe fn copy_to(&mut self, _peer: Peer, _pieces: &[(Local, Remote)]) -> Option<Result<(), PostError>> {
        None
    }

    /// Copies out of memory that is imported but not mapped. The reverse of
    /// [`copy_to`](Rail::copy_to).
    ///
    /// # Safety
    /// Each local range is writable.
    #[inline(always)]
    unsafe fn copy_from(
        &mut self,
        _peer: Peer,
        _pieces: &[(Local, Remote)],
    ) -> Option<Result<(), PostError>> {
        None
    }

    /// Whether this rail may copy unregistered memory of a peer's process by
    /// [`read_address`](Rail::read_address). The engine tells addresses of this process to such
    /// peers alone. The answer may change.
    #[cold]
    fn reads_addresses(&self, _peer: Peer) -> bool {
        false
    }

    /// Copies memory of a peer's process that is not registered into `local`, before it returns.
    /// `address` comes from the peer and may be wrong. Returns whether all of it was copied; if
    /// not, any part of `local` may have been written, and the peer has to send the bytes.
    ///
    /// # Safety
    /// `local` is writable.
    #[cold]
    unsafe fn read_address(&mut self, _peer: Peer, _local: Local, _address: u64) -> bool {
        false
    }

    /// Writes into registered memory of this process that only a device may access. A kernel that
    /// polls an aligned word of 8 bytes sees it change at once, if the device can store words. Slow
    /// path: may wait for the device to copy.
    ///
    /// # Errors
    /// [`PostError::Again`] when no staging memory is free; otherwise the device's error.
    ///
    /// # Safety
    /// `to` is registered with this rail, and writable by its owner.
    #[cold]
    unsafe fn write_device(&mut self, to: Local, from: Untrusted<'_>) -> Result<(), PostError> {
        let len = to.len.min(from.len());
        // SAFETY: a rail without an implementation of its own serves only processor memory; both
        // ranges hold `len` bytes.
        unsafe { copy_bytes(from.as_ptr(), to.ptr.as_ptr(), len) };
        Ok(())
    }

    /// Reads from such memory: the reverse of [`write_device`](Rail::write_device).
    ///
    /// # Safety
    /// `from` is registered with this rail, and readable by its owner.
    #[cold]
    unsafe fn read_device(&mut self, from: Local, into: &mut [u8]) -> Result<(), PostError> {
        let len = from.len.min(into.len());
        // SAFETY: both ranges hold `len` bytes of processor memory, as in `write_device`.
        unsafe { copy_bytes(from.ptr.as_ptr(), into.as_mut_ptr(), len) };
        Ok(())
    }

    /// Wakes the peer if it sleeps, after a write to its mapped memory. Hot path: a load and a
    /// branch.
    #[inline(always)]
    fn notify(&mut self, _peer: Peer) {}

    /// Checks whether peers are alive, and reports dead ones. Slow path: may make a system call.
    fn check_peers<S: Sink>(&mut self, _sink: &mut S) {}
}
