//! A rail over one endpoint of libfabric: one domain, one completion queue, one address vector.
//!
//! Posting, polling and flushing neither block, allocate, lock nor make a system call on our side.
//! Making a rail, registering, importing, attaching, detaching and
//! [`check_peers`](Rail::check_peers) are slow paths. One thread owns the rail. Posts that a
//! program makes and never polls for may never leave: under manual progress polling is what drives
//! the provider.
//!
//! # What becomes of a post
//!
//! | post | provider's call | ends |
//! |---|---|---|
//! | write up to [`Caps::inject`] | `fi_inject_writedata` | at once; errors go unreported |
//! | longer write | `fi_writedata` or `fi_writemsg` | with its completion, at the [`Level`] |
//! | the same, held back | `fi_writemsg` with `FI_MORE` | the same, after [`flush`](Rail::flush) |
//! | read | `fi_read` | with its completion |
//! | short message | `fi_inject` | at once |
//! | longer message | `fi_sendmsg`, bounced | with its completion |
//! | atomic | `fi_atomic` and its sisters | with its completion |
//!
//! Every post that is not over at once has a completion in the queue; there are no counters. Whose
//! write has arrived is known in one of three ways, see [`Notify`]. Each message carries eight
//! bytes of the rail's own: the sender's number and a kind.
//!
//! A post is checked against what was [imported](Rail::import) before it goes out, by the rail or
//! by a caller that [says so](Rail::post_write_checked), so an honest engine never sends a bad key;
//! at the target the provider checks what arrives against what is registered there. The numbers
//! that peers sign with are random but no secret: whoever is attached can pass for another in
//! `Word` and `Message`, and disturb that one's stream; with `Source` the provider says who it was.
//!
//! # When a peer is gone
//!
//! A completion with an error that means a lost connection takes its peer down, and so does a
//! [deadline](FabricConfig::deadline) kept by `check_peers` and by polls that find nothing: the
//! provider may retry for ever and say nothing. What such a peer still owes ends as
//! [`CompleteError::Unknown`] when the deadline passes: the provider may still touch that memory.
//! Its contexts stay with the provider until it gives them back; a provider that never does shrinks
//! the pool by as many.
//!
//! What a detach reports as ended the provider may still carry out. Deregistering ends a key at the
//! target at once where the provider moves the data there (`tcp`, devices); `shm` may copy by
//! address and ask nobody.

mod address;
mod batch;
mod complete;
mod config;
mod device;
#[doc(hidden)]
pub mod fuzzing;
mod imports;
mod peers;
mod pool;
mod post;
mod setup;
mod slab;
mod watch;

pub use config::{FabricConfig, SetupError};
use device::Reached;
pub use device::{DeviceMemory, Dmabuf, Interface};

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ffi::c_void;
use core::fmt;
use core::ptr::NonNull;

use fishplate_core::error::{AttachError, CompleteError, PeerError, PostError};
use fishplate_core::mem::{Peer, Region, RegionKind, Untrusted};
use fishplate_core::op::Amo;
use fishplate_core::rail::{Caps, Local, Posted, Rail, RailKey, Remote, Sink};
use static_assertions::{assert_impl_all, assert_not_impl_any};

use self::address::Address;
use self::batch::Batch;
use self::imports::Imports;
use self::peers::Peers;
use self::pool::{Pool, Slot};
use self::slab::Slab;
use super::cq::CqError;
use super::domain::Domain;
use super::endpoint::{Buffer, Endpoint, Target};
use super::error::{CallError, Code};
use super::mr::MemoryRegion;
use super::negotiate::{Level, Offer, Progress};
use super::persona::Notify;
use super::raw::*;

/// Longest write or read in one post, in bytes, whatever the provider says.
const MAX_RMA: usize = 1 << 30;

/// Bytes of ours at the head of a message: number u32, kind u32.
const HEAD: usize = 8;

/// Kinds of messages.
const USER: u32 = 0x6d_7367;
const WORD: u32 = 0x77_6f72;

/// Completions read in one call.
const BATCH: usize = 32;

/// Writes handed over under one doorbell.
const MORE: u32 = 16;

/// Something to be reported that came up outside of a completion.
#[derive(Clone, Copy, Debug)]
enum Event {
    Done(u64, Result<(), CompleteError>),
    Down(Peer, PeerError),
}

/// A region registered here.
struct Registered {
    key: u64,
    memory: MemoryRegion,
}

/// A write that was accepted and not handed over yet.
#[derive(Clone, Copy)]
struct Held {
    slot: *mut Slot,
    from: Buffer,
    to: Target,
    data: Option<u64>,
}

/// What a rail has seen that has no better place to be told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FabricStats {
    /// Posts that the provider refused for now.
    pub refused: u64,
    /// Arrivals from nobody who is attached: dropped.
    pub strangers: u64,
    /// Error completions.
    pub errors: u64,
    /// The last of those, or of a refused post: libfabric's code and the provider's.
    /// [`FabricRail::last_error`] has the words.
    pub last_error: (i32, i32),
    /// Registrations that the provider did not close: their memory is still in its use.
    pub kept: u32,
    /// Contexts that a provider has kept of posts whose end was reported for it.
    pub orphans: u32,
}

/// The rail between processes that libfabric joins. See the module.
pub struct FabricRail {
    // Registrations and endpoint are closed by `drop`, before the memory that they used goes.
    regions: Vec<Registered>,
    /// Registrations that the provider did not close. Tried once more when the rail is dropped.
    kept: Vec<MemoryRegion>,
    buffers: Option<MemoryRegion>,
    endpoint: Endpoint,
    domain: Arc<Domain>,
    peers: Peers,
    imports: Imports,
    pool: Pool,
    /// Receive buffers, then bounce buffers.
    slab: Slab,

    caps: Caps,
    notify: Notify,
    /// Our number, in the upper half of the data of a write.
    signature: u64,
    number: u32,
    /// Longest write that is given to the provider to be copied. With 0 it is empty ones alone: of
    /// those there is nothing to wait for, and shm 1.17 refuses them otherwise.
    inject: usize,
    /// Longest message that the provider copies, our head included.
    inject_message: usize,
    /// Descriptor of the slab.
    desc: *mut c_void,
    /// Flags of each write, if it must say them.
    say_level: Option<u64>,
    /// Writes that are shorter are given to the provider to be copied, others are just handed over.
    /// `None` where they are held back, have a level of their own, a message behind them, or may be
    /// of a device.
    short_below: Option<usize>,
    /// Whether writes are held back.
    more: bool,
    held: Option<Held>,
    /// Writes handed over since the last doorbell.
    batched: u32,
    /// A message follows its write at once.
    words_follow: bool,
    /// Whether a write with data uses up a receive buffer here.
    takes_receives: bool,
    /// Whether an arrived write's data names its sender, and the write has used up no receive.
    plain_arrivals: bool,
    /// Whether something waits for [`chores`](Self::chores).
    busy: bool,
    /// Polls up to the next [long](Self::long_poll) one. Those before it only read the queue.
    plain_polls: u32,

    /// Free bounce buffers.
    bounces: Vec<u32>,
    /// Receive contexts that the provider did not take back.
    unposted: Vec<u32>,
    /// Words whose write is complete, or ahead of them on the same way.
    owed: VecDeque<(u16, u32)>,
    /// To be reported.
    events: VecDeque<Event>,
    entries: Batch,
    sources: [u64; BATCH],
    /// Where a message is put together that the provider copies.
    scratch: Box<[u8]>,

    /// The device whose memory can be registered.
    device: Option<Reached>,
    broken: bool,
    /// Posts accepted of all peers when they were counted last, wrapping.
    accepted_marked: u32,
    /// How many polls there will have been at the next long one, wrapping.
    polls_planned: u32,
    next_key: u64,
    key_bits: u32,
    stats: FabricStats,
    last_error: CqError,
    config: FabricConfig,
    offer: Offer,
}

// SAFETY: all pointers in it lead to memory that it owns, to registered memory that any thread may
// touch, or are the provider's, whose thread model allows one thread at a time; it is not `Sync`.
unsafe impl Send for FabricRail {}

assert_impl_all!(FabricRail: Send);
// A raw pointer in it makes it so.
assert_not_impl_any!(FabricRail: Sync, Clone);

impl FabricRail {
    /// What peers [attach](Self::attach) with. Slow path.
    ///
    /// # Errors
    /// The provider's.
    pub fn address(&self) -> Result<Vec<u8>, CallError> {
        let provider = self.endpoint.name()?;
        let format = self.endpoint.form().format();
        Ok(Address { notify: self.notify, number: self.number, format, provider: &provider }.encode())
    }

    /// Makes a rail with this address reachable as `peer`. Both ends must have attached each other
    /// before either posts: what arrives from a stranger is dropped. Slow path.
    ///
    /// # Errors
    /// The place is taken or out of range, the address is not one, or of a rail that differs, or
    /// this rail's own, which a peer has no business to send ([`attach_self`](Self::attach_self));
    /// or the provider's code.
    pub fn attach(&mut self, peer: Peer, address: &[u8]) -> Result<(), AttachError> {
        let theirs = Address::decode(address)?;
        if theirs.provider == self.endpoint.form().own() {
            return Err(AttachError::Config("the address is this rail's own"));
        }
        self.attach_to(peer, theirs)
    }

    /// Makes the rail reachable to itself, as `peer`. Slow path.
    ///
    /// # Errors
    /// The place is taken or out of range; or the provider's code.
    pub fn attach_self(&mut self, peer: Peer) -> Result<(), AttachError> {
        let name = self.endpoint.form().own().to_vec();
        let (notify, number, format) = (self.notify, self.number, self.endpoint.form().format());
        self.attach_to(peer, Address { notify, number, format, provider: &name })
    }

    fn attach_to(&mut self, peer: Peer, theirs: Address<'_>) -> Result<(), AttachError> {
        match self.peers.slots.get(peer.0 as usize) {
            Some(slot) if !slot.attached => {}
            _ => return Err(AttachError::Full),
        }
        if theirs.notify != self.notify {
            return Err(AttachError::Config("the two rails notify in different ways"));
        }
        if theirs.format != self.endpoint.form().format() {
            return Err(AttachError::Config("the two rails have addresses of different formats"));
        }
        if self.peers.knows(theirs.number) {
            return Err(AttachError::Config("two peers have the same number"));
        }
        if !self.endpoint.form().allows(theirs.provider) {
            return Err(AttachError::BadHandle);
        }
        let inserted = self.endpoint.insert(theirs.provider);
        let addr = inserted.map_err(|error| AttachError::System(error.code.0))?;
        self.peers.attach(peer.0, addr, theirs.number, self.short_below);
        Ok(())
    }

    /// Lets memory of a device be registered, if the offer was asked for with
    /// [`Ask::devices`](super::Ask::devices). Where the device
    /// [must be flushed](DeviceMemory::must_flush), that is done once for all that one read of the
    /// queue brought, before it is reported.
    ///
    /// # Errors
    /// [`AttachError::Full`]: the rail has a device.
    pub fn reach(&mut self, device: Box<dyn DeviceMemory>) -> Result<(), AttachError> {
        if self.device.is_some() {
            return Err(AttachError::Full);
        }
        self.device = Some(Reached::new(device));
        self.short_below = None;
        self.peers.look_at_writes();
        self.plan();
        Ok(())
    }

    /// The offer that the rail was opened on.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Who drives the provider.
    pub fn progress(&self) -> Progress {
        self.offer.progress
    }

    /// When a write ends.
    pub fn level(&self) -> Level {
        self.offer.level
    }

    /// How the origin of a write is known.
    pub fn notify_way(&self) -> Notify {
        self.notify
    }

    /// What it has seen.
    pub fn stats(&self) -> FabricStats {
        self.stats
    }

    /// The last error that a completion or a post brought, in the library's and the provider's
    /// words; `None`: there was none. Slow path: allocates.
    #[doc(alias = "fi_cq_strerror")]
    pub fn last_error(&self) -> Option<String> {
        let CqError { code, provider, .. } = self.last_error;
        if code == Code(0) {
            return None;
        }
        let mut text = alloc::format!("{}: {code}", self.offer.info.library().describe(code));
        let words = self.endpoint.describe(&self.last_error);
        if provider != 0 || self.last_error.has_data() {
            text += &alloc::format!("; {} says {provider}: {words}", self.offer.info.provider());
        }
        Some(text)
    }

    /// A call was refused for good.
    #[cold]
    fn note_error(&mut self, code: Code) {
        self.stats.last_error = (code.0, 0);
        self.last_error = CqError::of_call(code);
    }

    /// Bytes of memory that the rail has allocated,
    /// and how many of them are there per peer at most.
    pub fn memory(&self) -> (usize, usize) {
        let per_peer = size_of::<peers::PeerSlot>() + 4 * 24;
        let peers = per_peer * self.peers.slots.len();
        let pool = self.pool.len() * size_of::<Slot>();
        let imports = self.imports.bytes();
        (size_of::<Self>() + self.slab.len + pool + imports + peers, per_peer)
    }

    fn fresh_key(&mut self) -> u64 {
        let key = self.next_key;
        self.next_key = self.next_key.wrapping_add(1);
        match self.key_bits {
            64.. => key,
            bits => key & ((1 << bits) - 1),
        }
    }

    /// Gives a receive buffer to the provider.
    #[inline(always)]
    fn post_receive(&mut self, index: u32) -> Result<(), Code> {
        let slot = self.pool.at(index as usize);
        let buffer = index as usize - self.caps.depth as usize;
        let into = Buffer { ptr: self.slab.at(buffer), len: self.caps.max_message + HEAD, desc: self.desc };
        // SAFETY: buffer and context are this receive's for good,
        // and untouched until its completion.
        unsafe { self.endpoint.recv(into, Pool::context(slot)) }
    }
}

impl Drop for FabricRail {
    fn drop(&mut self) {
        self.regions.clear();
        self.kept.clear();
        if self.buffers.take().is_some_and(|buffers| buffers.close().is_err()) {
            self.slab.keep();
        }
        if self.endpoint.close().is_err() {
            // The provider keeps the endpoint, and with it contexts and buffers: that memory stays.
            self.pool.keep();
            self.slab.keep();
        }
    }
}

/// What the owner of an engine may do with a [`FabricRail`] in it.
pub struct FabricSetup<'a>(&'a mut FabricRail);

impl FabricSetup<'_> {
    /// See [`FabricRail::attach`].
    ///
    /// # Errors
    /// As of [`FabricRail::attach`].
    pub fn attach(&mut self, peer: Peer, address: &[u8]) -> Result<(), AttachError> {
        self.0.attach(peer, address)
    }

    /// See [`FabricRail::attach_self`].
    ///
    /// # Errors
    /// As of [`FabricRail::attach_self`].
    pub fn attach_self(&mut self, peer: Peer) -> Result<(), AttachError> {
        self.0.attach_self(peer)
    }

    /// See [`FabricRail::reach`].
    ///
    /// # Errors
    /// As of [`FabricRail::reach`].
    pub fn reach(&mut self, device: Box<dyn DeviceMemory>) -> Result<(), AttachError> {
        self.0.reach(device)
    }
}

// SAFETY: nothing is ever mapped. A context is free, and its end reported, once the provider has
// completed it; what the rail reports before that is `Unknown`. `FabricSetup` fills places that are
// free.
unsafe impl Rail for FabricRail {
    type Setup<'a> = FabricSetup<'a>;

    const COPIES: bool = false;

    fn setup(&mut self) -> FabricSetup<'_> {
        FabricSetup(self)
    }

    #[inline]
    fn caps(&self) -> Caps {
        self.caps
    }

    fn register(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError> {
        let (ptr, len) = (region.ptr(), region.len());
        if len == 0 || (ptr.as_ptr() as usize).checked_add(len).is_none() {
            return Err(AttachError::BadRange);
        }
        let ordinal = match region.kind() {
            RegionKind::Private | RegionKind::Shared { .. } | RegionKind::Common { .. } => None,
            RegionKind::Device { ordinal } => Some(ordinal),
            _ => return Err(AttachError::Unsupported),
        };
        if self.regions.len() == self.config.max_regions as usize {
            return Err(AttachError::Full);
        }
        let system = |error: CallError| AttachError::System(error.code.0);
        let access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
        let key = self.fresh_key();
        let mut memory = match ordinal {
            Some(ordinal) => self.register_device((ptr, len), ordinal, access, key)?,
            // SAFETY: valid while registered, and written by others at any time:
            // the promise of `Region::new`.
            None => unsafe { MemoryRegion::register(&self.domain, ptr, len, access, key) }.map_err(system)?,
        };
        let mode = self.offer.info.domain().mr_mode;
        if mode & FI_MR_ENDPOINT != 0 {
            // SAFETY: dropping the rail drops its registrations first.
            unsafe { memory.bind(&self.endpoint) }.map_err(system)?;
        }
        let base = if mode & FI_MR_VIRT_ADDR != 0 { ptr.as_ptr() as u64 } else { 0 };
        let (key, desc) = (memory.key(), memory.desc() as u64);
        let start = ptr.as_ptr().addr();
        if let Some(reached) = self.device.as_mut().filter(|_| ordinal.is_some()) {
            reached.add(key, start..start + len);
        }
        self.regions.push(Registered { key, memory });
        Ok((RailKey { key, base }, desc))
    }

    fn deregister(&mut self, key: RailKey) -> Result<(), AttachError> {
        let Some(at) = self.regions.iter().position(|region| region.key == key.key) else {
            return Ok(());
        };
        let copying = self.device.as_mut().is_some_and(|reached| reached.remove(key.key));
        self.regions.swap_remove(at).memory.close().map_err(|(memory, error)| {
            self.stats.kept += 1;
            self.note_error(error.code);
            self.kept.push(memory);
            AttachError::Kept(error.code.0)
        })?;
        if copying { Err(AttachError::Kept(libc::EBUSY)) } else { Ok(()) }
    }

    fn touches(&self, memory: Local) -> bool {
        self.pool.touches(memory) || self.device.as_ref().is_some_and(|reached| reached.touches(memory))
    }

    fn import(&mut self, peer: Peer, key: RailKey, len: u64) -> Result<Option<NonNull<u8>>, AttachError> {
        if !self.peers.slots.get(peer.0 as usize).is_some_and(|slot| slot.attached) {
            return Err(AttachError::UnknownPeer);
        }
        if key.key == FI_KEY_NOTAVAIL || len > isize::MAX as u64 || key.base.checked_add(len).is_none() {
            return Err(AttachError::BadHandle);
        }
        match self.imports.insert(peer.0, key.key, len) {
            true => Ok(None),
            false => Err(AttachError::Full),
        }
    }

    fn release(&mut self, peer: Peer, key: RailKey) {
        self.imports.remove(peer.0, key.key);
    }

    fn detach(&mut self, peer: Peer) {
        self.forget(peer);
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
        // SAFETY: handed on to our caller.
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
        // SAFETY: handed on to our caller.
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
        // SAFETY: handed on to our caller.
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
        // SAFETY: handed on to our caller.
        unsafe { self.atomic(peer, amo, remote, fetch, cx) }
    }

    #[inline]
    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        self.reap(budget, sink)
    }

    #[cold]
    unsafe fn place(&mut self, to: Local, from: Untrusted<'_>) -> Result<(), PostError> {
        // SAFETY: handed on to our caller.
        unsafe { self.place_bytes(to, from) }
    }

    #[cold]
    unsafe fn fetch(&mut self, from: Local, into: &mut [u8]) -> Result<(), PostError> {
        // SAFETY: handed on to our caller.
        unsafe { self.fetch_bytes(from, into) }
    }

    #[inline(always)]
    fn flush(&mut self) {
        if self.held.is_some() {
            self.close_batch();
        }
    }

    fn check_peers<S: Sink>(&mut self, sink: &mut S) {
        if let Some(reached) = &mut self.device {
            reached.look();
        }
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
