//! A rail over one libfabric endpoint, with one domain, one completion queue and one address
//! vector.
//!
//! Posting, polling and flushing do not block, allocate, lock, or make system calls of their own.
//! Opening, registering, importing, attaching, detaching and [`check_peers`](Rail::check_peers) are
//! slow paths. One thread owns the rail. Keep polling after posting: under manual progress only
//! polls drive the provider, and without them a post may never be sent.
//!
//! # Posts and their completions
//!
//! | post | provider's call | completes |
//! |---|---|---|
//! | write up to [`Caps::inject`] | `fi_inject_writedata` | at once; errors go unreported |
//! | longer write | `fi_writedata` or `fi_writemsg` | with its completion, at the [`Level`] |
//! | batched write | `fi_writemsg` with `FI_MORE` | the same, after [`flush`](Rail::flush) |
//! | read | `fi_read` | with its completion |
//! | short message | `fi_inject` | at once |
//! | longer message | `fi_sendmsg`, bounced | with its completion |
//! | atomic | `fi_fetch_atomic`, `fi_compare_atomic` | with its completion |
//!
//! Every post that does not complete at once has an entry in the completion queue; there are no
//! counters. [`Notify`] lists the three ways to learn the sender of an arrived write.
//!
//! Each post is checked against the [imported](Rail::import) regions, so that no invalid key is
//! sent. The caller of [`post_write_checked`](Rail::post_write_checked) has made this check itself.
//! At the target the provider checks arrivals against its registrations. A peer's signature is
//! random but not secret: with `Word` and `Message` an attached peer can pose as another peer and
//! disturb its stream. With `Source` the provider names the sender.
//!
//! # Failed peers
//!
//! An error completion that means a lost connection fails its peer. An expired
//! [deadline](FabricConfig::deadline) fails it too, because a provider may retry for ever in
//! silence; `check_peers` and idle polls check the deadline. The engine may extend it to six times
//! its length ([`Sink::silent`]). Outstanding posts of a failed peer complete as
//! [`CompleteError::Unknown`] when the deadline expires: the provider may still access their
//! memory. The provider still holds their contexts. A context that it never returns is lost to the
//! pool.
//!
//! The provider may still execute posts that a detach has reported as complete. If the target's
//! provider moves the data (`tcp`, devices), deregistering a region at the target stops them at
//! once. `shm` may copy by address without a check.

mod address;
mod attach;
mod batch;
mod complete;
mod config;
mod device;
mod expected;
mod fence;
#[doc(hidden)]
pub mod fuzzing;
mod imports;
mod knock;
mod memory;
mod names;
mod peers;
mod pool;
mod post;
mod searches;
mod setup;
mod slab;
mod stats;
mod trouble;
mod watch;

pub use attach::FabricSetup;
pub use config::{FabricConfig, SetupError};
use device::Reached;
pub use device::{DeviceMemory, Dmabuf, Interface};
pub use stats::FabricStats;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ffi::c_void;
use core::fmt;
use core::mem::offset_of;
use core::ptr::NonNull;

use fishplate_core::error::{AttachError, CompleteError, PeerError, PostError};
use fishplate_core::mem::{Peer, Region, Untrusted};
use fishplate_core::op::Amo;
use fishplate_core::rail::{Caps, Fence, Local, Posted, REOPEN_MAX, Rail, RailKey, Remote, Sink};
use static_assertions::{assert_impl_all, assert_not_impl_any, const_assert};

use self::batch::Batch;
use self::expected::Expected;
use self::fence::Return;
use self::imports::Imports;
use self::knock::Knocks;
use self::memory::Registered;
use self::peers::Peers;
use self::pool::{Pool, Slot};
use self::searches::Searches;
use self::slab::Slab;
use super::cq::{CqError, CqWait};
use super::domain::Domain;
use super::endpoint::{Buffer, Endpoint, Target};
use super::error::Code;
use super::mr::MemoryRegion;
use super::negotiate::{Level, Offer, Progress};
use super::persona::Notify;
use crate::clock::monotonic_ns;

/// Length of the rail's message header in bytes: signature u32, kind u32.
const HEAD: usize = 8;

const USER: u32 = 0x6d_7367;
const WORD: u32 = 0x77_6f72;

const BATCH: usize = 32;

/// Maximum number of writes posted under one doorbell.
const MORE: u32 = 16;

/// A queued report that does not come from the completion queue.
#[derive(Clone, Copy, Debug)]
enum Event {
    Done(u64, Result<(), CompleteError>),
    Down(Peer, PeerError),
    Up(Peer),
}

/// A write that was accepted but not posted yet.
#[derive(Clone, Copy)]
struct Held {
    slot: *mut Slot,
    from: Buffer,
    to: Target,
    data: Option<u64>,
}

/// A rail over a libfabric endpoint. The [module](self) describes its behaviour.
// `repr(C)` keeps this order: an injected write, an arrival and an idle poll use only two cache
// lines. Applications evict the caches between calls, so each line counts.
#[repr(C, align(64))]
pub struct FabricRail {
    /// Number of polls until the next [long](Self::long_poll) poll. Other polls only read the
    /// queue.
    plain_polls: u32,
    /// Whether an arrived write's data names its sender, and the write uses no receive buffer.
    plain_arrivals: bool,
    /// Whether writes are batched.
    more: bool,
    /// Whether [`chores`](Self::chores) has work. Always true while there is no endpoint.
    busy: bool,
    /// Whether an arrived write with data uses up a receive buffer.
    takes_receives: bool,
    entries: Batch,
    /// Our signature, in the upper half of a write's data.
    signature: u64,
    peers: Peers,
    endpoint: Endpoint,
    pool: Pool,
    imports: Imports,
    caps: Caps,
    number: u32,
    /// The poll count at the next long poll. Wraps.
    polls_planned: u32,
    /// Maximum length of an injected message, including the rail's header.
    inject_message: usize,
    scratch: Box<[u8]>,
    /// Receive buffers, then bounce buffers.
    slab: Slab,
    /// The slab's local descriptor (`fi_mr_desc`), or null.
    desc: *mut c_void,
    /// The last write of a batch. Always `None` without `more`.
    held: Option<Held>,
    batched: u32,
    notify: Notify,
    /// Whether a word's message is sent right after its write, without waiting for the write to
    /// complete.
    words_follow: bool,
    /// Flags of each write, if the provider needs the completion level per post.
    say_level: Option<u64>,
    /// Maximum length of an injected write. With 0 only empty writes are injected, because shm 1.17
    /// rejects them otherwise.
    inject: usize,
    /// Writes shorter than this are injected. Longer writes take the fast path. With `None` every
    /// write needs the general path, because the rail batches writes, sets a completion level per
    /// write, sends words in messages, or may read device memory.
    short_below: Option<usize>,

    bounces: Vec<u32>,
    unposted: Vec<u32>,
    /// Words to send, as (peer, word). Their writes are complete, or precede them in the provider's
    /// order.
    owed: VecDeque<(u16, u32)>,
    events: VecDeque<Event>,
    returns: Vec<Return>,
    knocks: Knocks,
    searches: Searches,
    sources: [u64; BATCH],

    regions: Vec<Registered>,
    /// Registrations that the provider did not close. Closing is retried on drop.
    kept: Vec<MemoryRegion>,
    buffers: Option<MemoryRegion>,
    domain: Arc<Domain>,
    expected: Expected,
    device: Option<Reached>,
    broken: bool,
    frees_reads_twice: bool,
    /// Whether the domain may be damaged, so that the next endpoint is opened in another domain.
    damaged: bool,
    /// Number of posts to all peers that the provider had accepted at the last check. Wraps.
    accepted_marked: u32,
    next_key: u64,
    key_bits: u32,
    stats: FabricStats,
    last_error: CqError,
    config: FabricConfig,
    offer: Offer,
}

const_assert!(offset_of!(FabricRail, peers) + Peers::HOT == 64);
const_assert!(offset_of!(FabricRail, endpoint) % 64 + Endpoint::HOT <= 64);

// SAFETY: the rail's pointers lead to its own memory or to registered memory, which any thread may
// access, or come from the provider. The provider's thread model allows one thread at a time, and
// the rail is not `Sync`. The rail owns every object of its domain, so all of them move together.
unsafe impl Send for FabricRail {}

assert_impl_all!(FabricRail: Send);
// The raw pointers in the rail make it `!Sync`.
assert_not_impl_any!(FabricRail: Sync, Clone);

impl FabricRail {
    /// Adds a device, so that its memory can be registered. The offer must have been requested with
    /// [`Ask::devices`](super::Ask::devices). If the device [must be
    /// flushed](DeviceMemory::must_flush), the rail flushes it once per batch of completions,
    /// before it reports them.
    ///
    /// # Errors
    /// [`AttachError::Full`] if the rail already has a device.
    pub fn reach(&mut self, device: Box<dyn DeviceMemory>) -> Result<(), AttachError> {
        if self.device.is_some() {
            return Err(AttachError::Full(
                "a rail has one device; use another rail for another device",
            ));
        }
        self.device = Some(Reached::new(device));
        self.short_below = None;
        self.peers.look_at_writes();
        self.plan();
        Ok(())
    }

    /// Returns the offer that the rail was opened with.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Returns whether the provider makes progress by itself or only in polls.
    pub fn progress(&self) -> Progress {
        self.offer.progress
    }

    /// Returns the completion level of writes.
    pub fn level(&self) -> Level {
        self.offer.level
    }

    /// Returns how the rail learns the sender of an arrived write.
    pub fn notify_way(&self) -> Notify {
        self.notify
    }

    /// Returns the wait object, if the provider has one. A call of [`CqWait::may_sleep`] counts as
    /// a use of the rail.
    pub fn wait(&self) -> Option<CqWait> {
        self.endpoint.wait()
    }

    /// Returns whether a write is held. Reads `held` only in rails that batch writes, because it
    /// lies in another cache line.
    #[inline(always)]
    fn holds(&self) -> bool {
        self.more && self.held.is_some()
    }

    #[inline(always)]
    fn post_receive(&mut self, index: u32) -> Result<(), Code> {
        let slot = self.pool.at(index as usize);
        let buffer = index as usize - self.caps.depth as usize;
        let into = Buffer {
            ptr: self.slab.at(buffer),
            len: self.caps.max_message + HEAD,
            desc: self.desc,
        };
        // SAFETY: this receive owns the buffer and the context. The rail does not access either of
        // them until the receive completes.
        unsafe { self.endpoint.recv(into, Pool::context(slot)) }
    }
}

impl Drop for FabricRail {
    /// Closes the registrations and the endpoint. Afterwards the fields are dropped, with the
    /// memory that these used.
    fn drop(&mut self) {
        self.regions.clear();
        self.kept.clear();
        if self.buffers.take().is_some_and(|buffers| buffers.close().is_err()) {
            self.slab.keep();
        }
        if self.endpoint.close().is_err() {
            // The provider failed to close the endpoint, so leak the contexts and buffers that it
            // may still use.
            self.pool.keep();
            self.slab.keep();
        }
    }
}

// SAFETY: the rail maps no peer memory. It reports a completion only after the provider has
// completed the post; any earlier report is `Unknown`. `FabricSetup` attaches only to free peer
// slots.
unsafe impl Rail for FabricRail {
    type Setup<'a> = FabricSetup<'a>;

    const COPIES: bool = false;

    const CLOCK: Option<fn() -> u64> = Some(monotonic_ns);

    fn setup(&mut self) -> FabricSetup<'_> {
        FabricSetup(self)
    }

    #[inline]
    fn caps(&self) -> Caps {
        self.caps
    }

    fn register(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError> {
        self.add_region(region)
    }

    fn deregister(&mut self, key: RailKey) -> Result<(), AttachError> {
        self.remove_region(key)
    }

    fn touches(&mut self, memory: Local) -> bool {
        self.pool.touches(memory)
            || self.device.as_mut().is_some_and(|reached| reached.touches(memory))
    }

    fn import(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        self.add_import(peer, key, len).map(|()| None)
    }

    fn release(&mut self, peer: Peer, key: RailKey) {
        self.imports.remove(peer.0, key.key);
    }

    fn detach(&mut self, peer: Peer) {
        self.forget(peer);
    }

    #[cold]
    fn fence(&mut self, peer: Peer) -> Fence {
        self.cut_off(peer)
    }

    #[cold]
    fn late(&self) -> u64 {
        self.stats.strangers
    }

    #[cold]
    fn mute(&mut self, peer: Peer) {
        if self.peers.slots.get(peer.0 as usize).is_some_and(|slot| slot.attached) {
            self.peers.take_down(peer.0);
        }
    }

    #[cold]
    fn fence_left(&mut self, peer: Peer) -> Fence {
        self.part(peer)
    }

    #[cold]
    fn reopen(&mut self, peer: Peer, into: &mut [u8; REOPEN_MAX]) -> Option<usize> {
        self.offer_again(peer, into)
    }

    #[cold]
    fn rejoin(&mut self, peer: Peer, address: &[u8]) -> Result<(), AttachError> {
        self.attach_again(peer, address)
    }

    #[cold]
    fn fences_all(&self) -> bool {
        true
    }

    #[cold]
    fn is_fenced(&self, peer: Peer) -> bool {
        self.peers.slots.get(peer.0 as usize).is_some_and(|slot| slot.fenced)
    }

    #[inline]
    unsafe fn post_write(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: the caller upholds the contract of `Rail::post_write`, which `write` requires.
        unsafe { self.write(peer, local, remote, data, cx) }
    }

    #[inline(always)]
    unsafe fn post_write_checked(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: u32,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: the caller upholds the contract of `Rail::post_write_checked`, which
        // `write_checked` requires.
        unsafe { self.write_checked(peer, local, remote, data, cx) }
    }

    #[inline]
    unsafe fn post_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: the caller upholds the contract of `Rail::post_read`, which `read` requires.
        unsafe { self.read(peer, local, remote, cx) }
    }

    #[inline]
    fn post_message(
        &mut self,
        peer: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        self.message(peer, head, body, cx)
    }

    unsafe fn post_atomic(
        &mut self,
        peer: Peer,
        amo: Amo,
        remote: Remote,
        fetch: Option<NonNull<u64>>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: the caller upholds the contract of `Rail::post_atomic`, which `atomic` requires.
        unsafe { self.atomic(peer, amo, remote, fetch, cx) }
    }

    #[inline]
    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        self.reap(budget, sink)
    }

    #[cold]
    unsafe fn write_device(&mut self, to: Local, from: Untrusted<'_>) -> Result<(), PostError> {
        // SAFETY: the caller upholds the contract of `Rail::write_device`, which
        // `write_device_bytes` requires.
        unsafe { self.write_device_bytes(to, from) }
    }

    #[cold]
    unsafe fn read_device(&mut self, from: Local, into: &mut [u8]) -> Result<(), PostError> {
        // SAFETY: the caller upholds the contract of `Rail::read_device`, which `read_device_bytes`
        // requires.
        unsafe { self.read_device_bytes(from, into) }
    }

    #[inline(always)]
    fn flush(&mut self) {
        if self.holds() {
            self.close_batch();
        }
    }

    #[cold]
    fn doubt(&mut self, peer: Peer, asks: bool) -> Option<u32> {
        self.doubted(peer, asks)
    }

    fn check_peers<S: Sink>(&mut self, sink: &mut S) {
        self.watch(sink);
    }
}

impl fmt::Debug for FabricRail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FabricRail")
            .field("offer", &self.offer)
            .field("caps", &self.caps)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}
