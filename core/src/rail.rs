//! Layer 2: one path to the fabric.
//!
//! A [`Rail`] moves bytes and reports what happened; it knows nothing of streams, order or signals.
//! The engine above owns its rails, drives each from one thread, and puts order on top.
//!
//! # The contract of a rail
//!
//! 1. **Nothing on refusal.** A post that returns an error has changed nothing.
//!    [`PostError::Again`] goes away by polling.
//! 2. **One end per post.** A post that returned [`Posted::Pending`] yields exactly one
//!    [`Sink::done`] with its context word, whatever happens to the peer; one that returned
//!    [`Posted::Done`] yields none. Done without an error means that the local memory may be
//!    reused, no more.
//! 3. **Data before its word.** [`Sink::landed`] is reported at the target only when all bytes of
//!    that write are visible to the target's processor. Messages arrive whole.
//! 4. **Once, in any order.** What is accepted arrives exactly once or the peer is reported down.
//!    [`Caps::order`] says what keeps the order of the posts; the rest may overtake anything.
//! 5. **Messages are copied** before the post returns; the caller's bytes are free at once.
//! 6. **Bounded.** `poll` reports at most `budget` events. No method blocks, allocates or waits for
//!    a peer, except `register`, `import`, `detach` and `check_peers`, which are slow paths, and
//!    `place` and `fetch`, which may wait for a device.
//! 7. **Not trusted.** What arrives was checked against what was registered on this rail before
//!    anything was written; a peer that breaks the protocol is reported by [`Sink::peer_down`] and
//!    not heard again.
//! 8. **Sleep.** A rail that can wake a sleeping owner hands out the eventcount that it rings by a
//!    method of its own, as something that outlives the rail; waits take it as an argument.
//! 9. **Receive buffers go back** before the next poll returns; the engine copies a message that it
//!    keeps.

pub mod either;
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
use crate::op::Amo;

/// What a rail keeps of the order in which posts to one peer were made. Each keeps all that the one
/// before it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    /// Nothing: anything may overtake anything.
    None,
    /// Messages and completion words are reported in the order posted. The bytes of a write may be
    /// in place before messages that were posted earlier are reported, as in memory that the origin
    /// has mapped.
    Reports,
    /// The bytes of a write, too, are in place only once everything posted earlier is, and so is
    /// the effect of a native atomic.
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
    /// What keeps the order in which it was posted to one peer.
    pub order: Order,
    /// Whether [`Rail::post_atomic`] is offered.
    pub native_atomics: bool,
    /// Posts that can be outstanding at once.
    pub depth: u32,
    /// Whether attachments of a peer are kept apart at both ends: what was posted in one is never
    /// reported in a later one. The engine believes it and adds no check of its own.
    pub fresh: bool,
}

/// Whether a post is already over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// Local memory may be reused; no event will come.
    Done,
    /// [`Sink::done`] will come.
    Pending,
}

/// How far [`Rail::fence`] has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// The rail and the peer are cut off from each other.
    Fenced,
    /// Something may still land: call again after the next poll.
    Pending,
    /// The rail has no way to tell. The peer is to be given up.
    Unknown,
}

/// Memory of this process that a post reads or fills.
#[derive(Clone, Copy, Debug)]
pub struct Local {
    /// First byte.
    pub ptr: NonNull<u8>,
    /// Size in bytes.
    pub len: usize,
    /// The descriptor that registration gave, or 0.
    pub desc: u64,
}

impl Local {
    /// Whether any of the `len` bytes from `ptr` on are among these.
    pub fn overlaps(&self, ptr: *const u8, len: usize) -> bool {
        let (start, other) = (self.ptr.as_ptr().addr(), ptr.addr());
        start < other.saturating_add(len) && other < start.saturating_add(self.len)
    }
}

/// A peer's memory that a post reads or fills: the key of its registration, and an offset into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// What [`Rail::register`] gave at the peer.
    pub key: RailKey,
    /// Bytes from the start of the region.
    pub offset: u64,
}

/// What registration gives: `key` travels to peers, `desc` stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RailKey {
    /// Names the region to the rail at both ends.
    pub key: u64,
    /// Address of the region's first byte as this rail counts (0 where keys count from 0).
    pub base: u64,
}

/// Where a rail reports. Methods only change state; none of them posts.
pub trait Sink {
    /// A pending post is over.
    fn done(&mut self, cx: u64, result: Result<(), CompleteError>);
    /// As many pending posts with the same context word are over, all of them well.
    #[inline]
    fn done_alike(&mut self, cx: u64, count: u32) {
        for _ in 0..count {
            self.done(cx, Ok(()));
        }
    }
    /// A write with completion data from `peer` is complete and visible here.
    fn landed(&mut self, peer: Peer, data: u32);
    /// A message. The bytes are valid during the call and may change: copy out once, then check.
    fn message(&mut self, peer: Peer, bytes: Untrusted<'_>);
    /// The peer has failed on this rail;
    /// each of its pending posts is or will be reported as failed.
    fn peer_down(&mut self, peer: Peer, why: PeerError);
}

/// One path to the fabric. See the contract in the module's documentation.
///
/// # Safety
/// The engine believes what a rail answers, and touches memory on its word:
///
/// - A pointer that [`import`](Rail::import) returns is valid for reads and writes of `len` bytes,
///   and aligned to 8. It stays so until that import is [released](Rail::release), or its peer
///   [detached](Rail::detach).
/// - A post that returned [`Posted::Done`] leaves its local memory alone from then on, and so does
///   one that returned an error. A pending post leaves it alone once its [`Sink::done`] was
///   reported, and that is reported once. An end reported with [`CompleteError::Unknown`] is the
///   exception: the rail may touch the memory until it is dropped.
/// - Once [`deregister`](Rail::deregister) returns without an error, the rail touches that memory
///   only for posts that [`touches`](Rail::touches) tells of. Once the rail is dropped, not even
///   for those.
/// - The bytes that a [`Sink`] is given are readable for as long as the call lasts.
/// - [`caps`](Rail::caps) never changes. A write of up to [`Caps::inject`] bytes is done when the
///   post returns.
/// - Nothing that is done through `&self`, or through a [`Setup`](Rail::Setup), undoes any of this:
///   neither ends an import, forgets a peer, posts, polls, or puts another rail in this one's
///   place.
pub unsafe trait Rail {
    /// What the owner of an engine may do with one of its rails: attach peers, and whatever else
    /// the rail allows while an engine drives it.
    type Setup<'a>
    where
        Self: 'a;

    /// Whether [`copy_to`](Rail::copy_to) and [`copy_from`](Rail::copy_from) may be worth a call.
    /// No default: a rail around another one says what that says.
    const COPIES: bool;

    /// Lends the rail to the owner of its engine. Slow path.
    fn setup(&mut self) -> Self::Setup<'_>;

    /// What this rail can do.
    fn caps(&self) -> Caps;

    /// Makes memory reachable to peers. Returns its key and the local descriptor. Slow path.
    fn register(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError>;

    /// Takes memory back. What peers post to it from now on is refused where this end carries it
    /// out; a peer that has the memory mapped, or has it copied by the kernel, asks nobody and must
    /// be done with it before. Slow path.
    ///
    /// # Errors
    /// [`AttachError::Kept`]: the key is dead, but the provider still holds the memory, which must
    /// never be given back.
    fn deregister(&mut self, key: RailKey) -> Result<(), AttachError>;

    /// Whether a post may still read or fill any of these bytes: one that is pending, or that ended
    /// as [`CompleteError::Unknown`]. It may say so of more posts than those. Slow path: may look
    /// at every post.
    fn touches(&self, memory: Local) -> bool;

    /// Prepares access to `len` bytes that `peer` registered. Returns where they are mapped in this
    /// process, if the rail maps memory; memory of a device never is. Slow path: may block for a
    /// bounded time.
    fn import(&mut self, peer: Peer, key: RailKey, len: u64) -> Result<Option<NonNull<u8>>, AttachError>;

    /// As [`import`](Rail::import), but refuses what would have to be waited for: the engine
    /// imports so what a peer names in a message. A rail whose `import` waits for a peer says
    /// otherwise than this, and one that wraps another hands the call on.
    fn try_import(&mut self, peer: Peer, key: RailKey, len: u64) -> Result<Option<NonNull<u8>>, AttachError> {
        self.import(peer, key, len)
    }

    /// Gives up what [`import`](Rail::import) or [`try_import`](Rail::try_import) prepared; a
    /// mapped pointer dies here. Slow path.
    fn release(&mut self, peer: Peer, key: RailKey);

    /// Forgets a peer. Its pending posts end as failed, mappings of it are unmapped, and nothing
    /// but those ends is reported for it any more. Slow path.
    fn detach(&mut self, peer: Peer);

    /// Cuts this rail and a peer off from each other, because the rail has failed or is taken out
    /// of use. Slow path, which does not wait: the caller posts nothing more to the peer on this
    /// rail, polls, and calls again while the answer is [`Fence::Pending`].
    ///
    /// From [`Fence::Fenced`] on, until the peer is attached anew:
    ///
    /// - Nothing that the peer has posted on this rail, or posts later, lands in memory of this
    ///   process, and nothing of it is reported. What was reported before is all that there is.
    /// - No post to the peer on this rail touches local memory. Each pending one was reported as
    ///   over, or is by a later poll.
    ///
    /// What was posted to the peer may still land there, until the rail is fenced at that end.
    #[cold]
    fn fence(&mut self, _peer: Peer) -> Fence {
        Fence::Unknown
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

    /// As [`post_write`](Rail::post_write) with a completion word, for a caller that has looked up
    /// what it names: nothing of that is looked up or checked once more.
    ///
    /// # Safety
    /// As [`post_write`](Rail::post_write). `peer` is attached, [`import`](Rail::import) of this
    /// rail gave access to the region that `remote` names, all `local.len` bytes from `remote` on
    /// lie in it, and they are at most [`Caps::max_rma`].
    #[inline(always)]
    unsafe fn post_write_checked(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: u32,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: a part of the caller's promise.
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

    /// Reads the payload of a two-sided message: as [`post_read`](Rail::post_read), but its sender
    /// has offered it and drives its rail until it has gone. So a rail may have the sender bring
    /// it, where that is quicker.
    ///
    /// # Safety
    /// As for [`post_read`](Rail::post_read).
    #[inline(always)]
    unsafe fn post_fetch(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: handed on to our caller.
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

    /// Sends off whatever posts were held back to be sent together. Called before a pass ends.
    #[inline(always)]
    fn flush(&mut self) {}

    /// Copies into memory that was imported but not mapped, completely and at once, where the rail
    /// can. `None`: it cannot, post a write.
    ///
    /// # Safety
    /// `local` is readable.
    #[inline(always)]
    unsafe fn copy_to(
        &mut self,
        _peer: Peer,
        _local: Local,
        _remote: Remote,
    ) -> Option<Result<(), PostError>> {
        None
    }

    /// Copies out of memory that was imported but not mapped. As [`copy_to`](Rail::copy_to).
    ///
    /// # Safety
    /// `local` is writable.
    #[inline(always)]
    unsafe fn copy_from(
        &mut self,
        _peer: Peer,
        _local: Local,
        _remote: Remote,
    ) -> Option<Result<(), PostError>> {
        None
    }

    /// Puts bytes into registered memory of this process that the processor may not touch. Slow
    /// path: may wait for the device, as long as one copy of so few bytes takes.
    ///
    /// # Errors
    /// [`PostError::Again`] when no staging memory is free; otherwise the device's error.
    ///
    /// # Safety
    /// `to` is registered with this rail, and writable by its owner.
    #[cold]
    unsafe fn place(&mut self, to: Local, from: Untrusted<'_>) -> Result<(), PostError> {
        let len = to.len.min(from.len());
        // SAFETY: a rail without its own copy serves processor memory only;
        // both ranges hold `len` bytes.
        unsafe { copy_bytes(from.as_ptr(), to.ptr.as_ptr(), len) };
        Ok(())
    }

    /// Gets bytes out of such memory. As [`place`](Rail::place), the other way.
    ///
    /// # Safety
    /// `from` is registered with this rail, and readable by its owner.
    #[cold]
    unsafe fn fetch(&mut self, from: Local, into: &mut [u8]) -> Result<(), PostError> {
        let len = from.len.min(into.len());
        // SAFETY: as in `place`.
        unsafe { copy_bytes(from.ptr.as_ptr(), into.as_mut_ptr(), len) };
        Ok(())
    }

    /// Wakes the peer if it sleeps, after a write to its mapped memory.
    /// Hot path: a load and a branch.
    #[inline(always)]
    fn notify(&mut self, _peer: Peer) {}

    /// Checks whether peers live, and reports those that do not. Slow path: may make a system call.
    fn check_peers<S: Sink>(&mut self, _sink: &mut S) {}
}
