//! Layer 2: one path to the fabric.
//!
//! A [`Rail`] moves bytes and reports events. It knows no streams, order or signals. The engine
//! above owns its rails, drives each from one thread, and adds order. `core/examples/file_rail.rs`
//! is a complete rail to start from.
//!
//! # The contract of a rail
//!
//! 1. **Nothing on refusal.** A post that returns an error has changed nothing. After
//!    [`PostError::Again`], poll and post again.
//! 2. **One completion per post.** A post that returned [`Posted::Pending`] yields exactly one
//!    [`Sink::done`] with its context word, even if the peer fails. A post that returned
//!    [`Posted::Done`] yields none, and so does a message that the engine [repeats](Sink::repeats).
//!    Success means only that the local memory may be reused.
//! 3. **Data before its word.** At the target, [`Sink::landed`] is reported only when all bytes of
//!    that write are visible to the target's processor. Messages arrive whole.
//! 4. **Once, in any order.** An accepted post arrives exactly once, or it completes with an error,
//!    or the peer is reported down. [`Caps::order`] says which posts keep their order. All other
//!    posts may be reordered.
//! 5. **Messages are copied** before the post returns. The caller may reuse the bytes at once.
//! 6. **Bounded.** `poll` reports at most `budget` events. No method blocks, allocates or waits for
//!    a peer, with two exceptions. Methods documented as slow paths may block, allocate or wait.
//!    `write_device` and `read_device` may wait for a device.
//! 7. **Not trusted.** The target checks each access against the memory registered on this rail
//!    before it writes anything. The post of a refused access returns [`PostError::BadKey`] or
//!    completes with an error. [`Sink::peer_down`] reports a peer that breaks the protocol, and the
//!    rail ignores that peer from then on.
//! 8. **Sleep.** A rail that can wake a sleeping owner offers its eventcount by an additional
//!    method. The eventcount outlives the rail, and waits take it as an argument.
//! 9. **Receive buffers return to the provider** before the next poll returns. The engine copies
//!    every message that it needs for longer.

pub mod faulty;
mod forward;
pub mod loopback;
mod rails;
mod random;
pub mod sim;
mod values;

pub use rails::Rails;
pub(crate) use rails::SomeRails;
pub use values::{Caps, Fence, Local, Order, Posted, REOPEN_MAX, RailKey, Remote};

use core::ptr::NonNull;

use crate::error::{AttachError, CompleteError, PeerError, PostError};
use crate::mem::{Peer, Region, Untrusted, copy_bytes};
use crate::op::Amo;

/// Receives a rail's reports. The methods only change state; none of them posts.
pub trait Sink {
    /// Reports the completion of a pending post.
    fn done(&mut self, cx: u64, result: Result<(), CompleteError>);
    /// Reports `count` successful completions that share one context word.
    #[inline]
    fn done_alike(&mut self, cx: u64, count: u32) {
        for _ in 0..count {
            self.done(cx, Ok(()));
        }
    }
    /// Reports that a write from `peer` with completion data is complete and visible here.
    fn landed(&mut self, peer: Peer, data: u32);
    /// Reports an arrived message. The bytes are valid during the call and may change. Copy them
    /// once, then check the copy.
    fn message(&mut self, peer: Peer, bytes: Untrusted<'_>);
    /// Returns whether the engine repeats a pending message that failed because its connection
    /// broke. The rail then reports no completion of it, and connects again. Otherwise it reports
    /// the peer as failed.
    #[cold]
    fn repeats(&mut self, _cx: u64) -> bool {
        false
    }
    /// Reports that the peer has failed on this rail. Each of its pending posts was or will be
    /// reported as failed.
    fn peer_down(&mut self, peer: Peer, why: PeerError);
    /// Reports that a peer makes no progress on this rail, although posts to it are pending.
    /// `overdue` says whether the rail's deadline has passed. If so, returns whether the peer has
    /// failed on this rail. If it has not, the rail asks again at each check, and gives the peer up
    /// only after a longer time.
    #[cold]
    fn silent(&mut self, _peer: Peer, overdue: bool) -> bool {
        overdue
    }
    /// Reports that the link to a [fenced](Rail::fence) peer is up, so the peer may be attached
    /// again. The rail may repeat this report until the peer is attached.
    fn peer_up(&mut self, _peer: Peer) {}
    /// Reports that a peer which the rail expects, but has not attached, has sent something. The
    /// rail itself names the peer to its owner.
    fn called(&mut self) {}
}

/// One path to the fabric. The [module's documentation](self) has the contract.
///
/// A wrapper of another rail forwards every call that it does not handle itself, with
/// [`forward_rail!`](crate::forward_rail).
///
/// # Safety
/// The engine relies on a rail's results when it accesses memory:
///
/// - A pointer that [`import`](Rail::import) returns is aligned to 8, and valid for reads and
///   writes of `len` bytes. It stays valid until the import is [released](Rail::release) or its
///   peer is [detached](Rail::detach).
/// - A post that returned [`Posted::Done`] or an error does not access its local memory after it
///   returns. A pending post does not access it after its only [`Sink::done`]. Exception: after
///   [`CompleteError::Unknown`] the rail may access the memory until the rail is dropped.
/// - Once [`deregister`](Rail::deregister) has returned without an error, the rail accesses that
///   memory only for posts that [`touches`](Rail::touches) reports. A dropped rail accesses no
///   memory.
/// - The bytes passed to a [`Sink`] are readable during the call.
/// - [`caps`](Rail::caps) never changes. A write of up to [`Caps::inject`] bytes does not access
///   its local memory after the post returns, unless that is device memory.
/// - Calls through `&self` or a [`Setup`](Rail::Setup) break none of these promises: they do not
///   end an import, detach a peer, post, poll or replace the rail.
pub unsafe trait Rail {
    /// The operations that the owner of an engine may call on a rail while the engine drives it,
    /// such as attaching peers.
    type Setup<'a>
    where
        Self: 'a;

    /// Whether [`copy_to`](Rail::copy_to) and [`copy_from`](Rail::copy_from) may copy. It has no
    /// default, so that a wrapper forwards the value of its inner rail.
    const COPIES: bool;

    /// A monotonic clock in nanoseconds, which times long posts in engines of several rails. It
    /// does not block or allocate. With `None` the engine counts its passes instead, so that
    /// simulations repeat. A wrapper forwards the clock of its inner rail.
    const CLOCK: Option<fn() -> u64> = None;

    /// Returns the setup access for the engine's owner. Slow path.
    fn setup(&mut self) -> Self::Setup<'_>;

    /// Returns the capabilities of this rail.
    fn caps(&self) -> Caps;

    /// Registers memory, so that peers can access it. Returns its key and the local descriptor. The
    /// key is [`RailKey::ELSEWHERE`] if this rail does not reach the memory, but others may. Slow
    /// path.
    fn register(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError>;

    /// Deregisters memory. The rail refuses later posts of peers to this memory if this side
    /// executes them. It cannot stop a peer that has mapped the memory or accesses it through the
    /// kernel, so such a peer must have finished before. Slow path.
    ///
    /// # Errors
    /// [`AttachError::Kept`]: the key is invalid, but the provider still holds the memory, which
    /// must never be freed.
    fn deregister(&mut self, key: RailKey) -> Result<(), AttachError>;

    /// Returns whether a post may still access any of these bytes. Such a post is pending, or
    /// completed as [`CompleteError::Unknown`]. A failed [`write_device`](Rail::write_device) or
    /// [`read_device`](Rail::read_device) counts until the device reports the end of the copy.
    /// False positives are allowed. Slow path: may scan all posts, and call a driver.
    fn touches(&mut self, memory: Local) -> bool;

    /// Prepares access to `len` bytes that `peer` has registered. Returns their address in this
    /// process if the rail maps memory. Device memory is never mapped. Slow path: may block for a
    /// bounded time.
    fn import(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError>;

    /// Like [`import`](Rail::import), but fails instead of waiting for the peer. The engine uses it
    /// for regions that a peer names in a message. Override this if `import` waits.
    fn try_import(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        self.import(peer, key, len)
    }

    /// Ends an [`import`](Rail::import) or [`try_import`](Rail::try_import). The mapped pointer
    /// becomes invalid. Slow path.
    fn release(&mut self, peer: Peer, key: RailKey);

    /// Detaches a peer. Its pending posts fail and its memory is unmapped. From then on the rail
    /// reports only the completions of those posts. No part of a post lands after its failure was
    /// reported. A rail that cannot ensure this says so in `LANDS_LATE` of its conformance fixture.
    /// Slow path.
    fn detach(&mut self, peer: Peer);

    /// Cuts this rail and a peer off from each other, because the rail has failed or is disabled.
    /// Slow path; does not wait. The caller posts nothing more to the peer on this rail. While the
    /// result is [`Fence::Pending`], the caller polls and calls again.
    ///
    /// After [`Fence::Fenced`], until the peer is attached again:
    ///
    /// - No earlier or later post of the peer on this rail lands in memory of this process or is
    ///   reported.
    /// - No post to the peer on this rail accesses local memory. A later poll reports posts that
    ///   are still pending.
    ///
    /// Posts to the peer may still land in its memory until its side fences the rail too. Once both
    /// sides have fenced the rail and [attached](Rail::rejoin) each other again, no earlier post
    /// lands or is reported.
    #[cold]
    fn fence(&mut self, _peer: Peer) -> Fence {
        Fence::Unknown
    }

    /// Returns the number of arrivals that were dropped, because their sender was not attached.
    /// Most are late arrivals from a peer that was fenced.
    #[cold]
    fn late(&self) -> u64 {
        0
    }

    /// Stops reporting arrivals from a peer, which will be [fenced](Rail::fence). Its writes may
    /// still land. Slow path; repeated calls change nothing.
    #[cold]
    fn mute(&mut self, _peer: Peer) {}

    /// Cuts this rail and a peer off from each other like [`fence`](Rail::fence), but does not
    /// affect other peers. The peer has closed its endpoint. Everything from the peer has arrived
    /// on this rail, except perhaps messages without an effect. Returns [`Fence::Pending`] until
    /// all posts to the peer have completed, and [`Fence::Unknown`] if this rail must close its
    /// endpoint all the same. A rail that [fences all](Rail::fences_all) should implement this: by
    /// default, the engine waits, and then closes the endpoint.
    #[cold]
    fn fence_left(&mut self, peer: Peer) -> Fence {
        if self.fences_all() { Fence::Pending } else { self.fence(peer) }
    }

    /// Opens the rail for a fenced peer again. Writes the address that the peer passes to
    /// [`rejoin`](Rail::rejoin) to `into`, and returns the length of the address in bytes. Also
    /// returns the address once the peer is attached again. Slow path; does not wait.
    ///
    /// Returns `None` if the link is down, or if completions of posts to the peer are not yet
    /// reported. Try again after [`Sink::peer_up`].
    #[cold]
    fn reopen(&mut self, _peer: Peer, _into: &mut [u8; REOPEN_MAX]) -> Option<usize> {
        None
    }

    /// Attaches a fenced peer again, at the address that its [`reopen`](Rail::reopen) returned. A
    /// peer that was attached in this way before may be attached at another address. Imports stay
    /// valid. The address comes from the peer, so the rail checks its length and form. Slow path;
    /// does not wait.
    ///
    /// # Errors
    /// If the peer is not fenced or the address is invalid, nothing has changed. If the error has
    /// the provider's code, the peer stays fenced.
    #[cold]
    fn rejoin(&mut self, _peer: Peer, _address: &[u8]) -> Result<(), AttachError> {
        Err(AttachError::Unsupported)
    }

    /// Returns whether a [`fence`](Rail::fence) cuts off every peer of this rail.
    /// [`Sink::peer_down`] then reports the other peers. The engine first asks the other peers to
    /// leave this rail. If a fence would cut off another peer for good, the engine fails the peer
    /// instead. The answer never changes.
    #[cold]
    fn fences_all(&self) -> bool {
        false
    }

    /// Returns whether a peer is fenced, so that [`fence`](Rail::fence) succeeds and cuts off no
    /// other peer. A rail that [fences all](Rail::fences_all) must implement this.
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
    /// The conditions of [`post_write`](Rail::post_write). `peer` is attached.
    /// [`import`](Rail::import) of this rail gave access to the region of `remote`, which contains
    /// all `local.len` bytes from `remote` on. The length is at most [`Caps::max_rma`].
    #[inline(always)]
    unsafe fn post_write_checked(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: u32,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: our caller guarantees the conditions of `post_write`, and more.
        unsafe { self.post_write(peer, local, remote, Some(data), cx) }
    }

    /// Posts a one-sided read.
    ///
    /// # Safety
    /// Until the post is done, `local` stays writable and nothing else accesses it.
    unsafe fn post_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError>;

    /// Reads the payload of a two-sided message. The sender keeps driving its rail until the
    /// payload is read, so a rail may let the sender write the payload if that is faster.
    ///
    /// # Safety
    /// The conditions of [`post_read`](Rail::post_read).
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

    /// Posts a message that consists of `head` and `body`. Both are copied before this returns.
    fn post_message(
        &mut self,
        peer: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        cx: u64,
    ) -> Result<Posted, PostError>;

    /// Posts an atomic that the rail executes. Stores a fetched value at `fetch` as a native `u64`.
    /// The post completes once the atomic is applied at the target. No order relative to other
    /// posts is required.
    ///
    /// # Safety
    /// If `fetch` is given, it stays writable for 8 bytes until the post is done.
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

    /// Reports at most `budget` events and returns their number.
    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32;

    /// Sends posts that were held back for batching. The engine calls this at the end of each pass
    /// that may have posted.
    #[inline(always)]
    fn flush(&mut self) {}

    /// Copies pieces into memory that is imported but not mapped, and completes before it returns.
    /// Returns `None` if the rail cannot copy. The caller then posts writes. After an error some
    /// bytes may have been copied.
    ///
    /// # Safety
    /// Each local range is readable.
    #[inline(always)]
    unsafe fn copy_to(
        &mut self,
        _peer: Peer,
        _pieces: &[(Local, Remote)],
    ) -> Option<Result<(), PostError>> {
        None
    }

    /// Copies pieces out of memory that is imported but not mapped. Otherwise like
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

    /// Returns whether this rail may copy unregistered memory of a peer's process by
    /// [`read_address`](Rail::read_address). The engine sends addresses of this process only to
    /// such peers. The answer may change.
    #[cold]
    fn reads_addresses(&self, _peer: Peer) -> bool {
        false
    }

    /// Copies unregistered memory of a peer's process into `local`, before it returns. `address`
    /// comes from the peer and may be wrong. Returns whether all bytes were copied. If not, any
    /// part of `local` may have been written, and the peer has to send the bytes.
    ///
    /// # Safety
    /// `local` is writable.
    #[cold]
    unsafe fn read_address(&mut self, _peer: Peer, _local: Local, _address: u64) -> bool {
        false
    }

    /// Writes into registered memory of this process that only a device may access. If the device
    /// can store words, a device kernel that polls an aligned word of 8 bytes sees all its bytes
    /// change at once. Slow path: may wait for the device to copy.
    ///
    /// # Errors
    /// [`PostError::Again`] if no staging memory is free, otherwise the device's error.
    ///
    /// # Safety
    /// `to` is registered with this rail, and its owner may write it.
    #[cold]
    unsafe fn write_device(&mut self, to: Local, from: Untrusted<'_>) -> Result<(), PostError> {
        let len = to.len.min(from.len());
        // SAFETY: a rail without its own implementation serves only processor memory. Both ranges
        // have at least `len` bytes.
        unsafe { copy_bytes(from.as_ptr(), to.ptr.as_ptr(), len) };
        Ok(())
    }

    /// Reads from registered memory of this process that only a device may access. Otherwise like
    /// [`write_device`](Rail::write_device).
    ///
    /// # Safety
    /// `from` is registered with this rail, and its owner may read it.
    #[cold]
    unsafe fn read_device(&mut self, from: Local, into: &mut [u8]) -> Result<(), PostError> {
        let len = from.len.min(into.len());
        // SAFETY: a rail without its own implementation serves only processor memory. Both ranges
        // have at least `len` bytes.
        unsafe { copy_bytes(from.ptr.as_ptr(), into.as_mut_ptr(), len) };
        Ok(())
    }

    /// Like [`write_device`](Rail::write_device), but does not wait for the device. `copy` is the
    /// rail's id of the copy between calls, and is 0 before the first call. `from` is copied when
    /// the copy begins. Copies take effect in the order in which they begin. A copy that is not
    /// continued ends by itself.
    ///
    /// # Errors
    /// [`PostError::Again`] while the copy is in progress, or if no staging memory is free: call
    /// again with the same arguments. Otherwise the device's error.
    ///
    /// # Safety
    /// The conditions of [`write_device`](Rail::write_device).
    #[cold]
    unsafe fn place_device(
        &mut self,
        to: Local,
        from: Untrusted<'_>,
        _copy: &mut u32,
    ) -> Result<(), PostError> {
        // SAFETY: our caller guarantees the same contract.
        unsafe { self.write_device(to, from) }
    }

    /// Like [`read_device`](Rail::read_device), but does not wait for the device. Otherwise like
    /// [`place_device`](Rail::place_device).
    ///
    /// # Safety
    /// The conditions of [`read_device`](Rail::read_device).
    #[cold]
    unsafe fn fetch_device(
        &mut self,
        from: Local,
        into: &mut [u8],
        _copy: &mut u32,
    ) -> Result<(), PostError> {
        // SAFETY: our caller guarantees the same contract.
        unsafe { self.read_device(from, into) }
    }

    /// Wakes the peer if it sleeps, after a write to its mapped memory. Hot path: a load and a
    /// branch.
    #[inline(always)]
    fn notify(&mut self, _peer: Peer) {}

    /// Returns a counter that changes with every arrival from a peer, or `None` if this rail itself
    /// notices that a peer is gone. With `asks`, the engine posts a message to the peer next. If it
    /// is rejected, `check_peers` finds out why. Slow path.
    fn doubt(&mut self, _peer: Peer, _asks: bool) -> Option<u32> {
        None
    }

    /// Checks whether peers are alive, and reports failed peers. Slow path: may make a system call.
    fn check_peers<S: Sink>(&mut self, _sink: &mut S) {}
}
