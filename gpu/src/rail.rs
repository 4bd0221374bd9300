//! The rail between processes of one machine that have devices: [`ShmRail`] for host memory and
//! messages, and device memory beside it.

mod bounce;
mod config;
mod contract;
mod copies;
mod link;
mod memory;
mod owned;
mod post;
mod progress;
mod queue;
mod setup;
mod stage;
mod wait_object;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use fishplate_core::error::{AttachError, CompleteError, PostError};
use fishplate_core::mem::Peer;
use fishplate_core::rail::{Caps, Order, Rail};
use fishplate_core::sync::host::{Host, SpinHost};
use fishplate_shm::extension::FOREVER;
use fishplate_shm::{HandshakeError, Segment, ShmConfig, ShmRail};
use static_assertions::{assert_impl_all, assert_not_impl_any};

use super::done::{Receiver, Sender};
use super::pair::PairSegment;
use super::{
    Bell, Device, DeviceCaps, DeviceError, DevicePtr, ExportError, HostDevice, ImportError, Sharing,
};
use bounce::Relay;
use copies::Copies;
use memory::{Imported, Registered};
use owned::Owned;
use queue::{Ops, Streams};
pub(crate) use stage::{Stage, write_window};
use wait_object::{Ends, Pace};

pub use config::GpuConfig;
pub use link::{GpuAgreement, GpuLink, GpuProfile};
pub use memory::is_device;
pub use setup::GpuSetup;
pub use wait_object::GpuWaitObject;

/// Counters of a rail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuStats {
    /// Number of transfers that the device copied.
    pub direct: u64,
    /// Number of transfers through bounce slots.
    pub relayed: u64,
    /// Number of transfers that the processor copied.
    pub stored: u64,
    /// Numbers of writes reported to peers: by done words, and by records.
    pub told: (u64, u64),
    /// Number of writes that peers reported as failed.
    pub failures_heard: u64,
    /// Number of copies that were made to end a sleep.
    pub rings: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Put,
    Get,
}

#[derive(Debug)]
struct Shared {
    segment: Segment,
    mine: PairSegment,
    theirs: PairSegment,
    number: u32,
    mine_at: Option<DevicePtr>,
    theirs_at: Option<DevicePtr>,
    done: Option<(Sender, Receiver)>,
    relay: Option<Relay>,
}

// SAFETY: the segments are addresses in shared mappings, which are not tied to a thread. The
// segment and the link keep them mapped longer than this value.
unsafe impl Send for Shared {}

#[derive(Debug)]
struct GpuPeer {
    /// Distinguishes this attachment from earlier attachments under the same peer number.
    life: u32,
    own: bool,
    /// Whether the peer has a device. If so, we send it our memory handles.
    device: bool,
    down: bool,
    imports: Vec<Imported>,
    /// Index in `imports` of the import that was used last.
    hint: usize,
    shared: Option<Shared>,
    /// Number of copies in flight into or out of the segments.
    pieces: u32,
}

/// A rail between processes of one machine, with device memory.
///
/// For device memory, posting and polling do not block, allocate, lock, or make system calls,
/// except to wake a peer that sleeps. They call the driver only to queue and query copies and
/// words. But while peers with devices are attached, at most one poll per millisecond may be slow.
/// That poll answers peers that revoke memory, closes the revoked memory, and frees our own memory
/// after peers have closed it. Registering, importing, attaching, detaching,
/// [`write_device`](Rail::write_device), [`read_device`](Rail::read_device) and
/// [`check_peers`](Rail::check_peers) are slow paths. One thread owns the rail.
///
/// | local memory | memory of the peer | copied by |
/// |---|---|---|
/// | host | host | [`ShmRail`] |
/// | device, or pinned host | device, reachable | the device, in chunks over several streams |
/// | mapped by us | device, mapped by us | the processor, if [short](GpuConfig::mapped_store) |
/// | any | device, not reachable; or host | both ends, through bounce slots |
///
/// A write is reported to its target after the whole write has landed. The report is a word in the
/// [done channel](GpuConfig::done_channel), which the device stores itself if it can, or a record
/// in the lane. Writes complete in any order: the rail is not [ordered](Caps::order).
///
/// An operation to a failed peer completes when the device has stopped using the operation's
/// buffer. If the peer is detached and the device does not finish in time, or if the device is
/// lost, the outcome is [unknown](CompleteError::Unknown).
///
/// A word that a peer's device stores does not wake the owner. The end of a copy wakes it only if
/// [`set_bell`](GpuRail::set_bell) was called. So sleep on [`wait_object`](GpuRail::wait_object),
/// which wakes the owner periodically.
#[derive(Debug)]
pub struct GpuRail<D: Device, H: Host> {
    inner: ShmRail<H>,
    sharing: Sharing<D>,
    config: GpuConfig,
    device: DeviceCaps,
    caps: Caps,
    locals: Box<[Registered]>,
    peers: Box<[Option<Box<GpuPeer>>]>,
    owned: Owned,
    /// Peers with segments, unordered.
    active: Vec<Peer>,
    first: usize,
    life: u32,
    ops: Ops,
    streams: Streams,
    /// Completions to report in the next poll.
    ended: VecDeque<(u64, Result<(), CompleteError>)>,
    landed: VecDeque<(Peer, u32)>,
    /// Operations with a record that waits for room in the lane.
    telling: VecDeque<u32>,
    /// Peers that this pass reported as failed.
    fallen: Vec<Peer>,
    lost: Option<i32>,
    /// Whether some work of the device has an unknown outcome, so that the device may still access
    /// its memory.
    unsure: bool,
    stage: Stage,
    copies: Copies,
    pace: Arc<Pace>,
    bell: Option<Bell>,
    /// Whether an attached peer reports by done words, which do not wake this process.
    silent: bool,
    stats: GpuStats,
    why: Option<Refused>,
    /// Number of polls. The device and the inner rail take turns at being polled first.
    passes: u32,
    /// Peers may send messages about device memory, so some polls take a slow turn.
    hears: bool,
    next_turn_ns: u64,
}

assert_impl_all!(GpuRail<HostDevice, SpinHost>: Send);
assert_not_impl_any!(GpuRail<HostDevice, SpinHost>: Sync, Clone);

/// Why device memory was last rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refused {
    /// A registration was rejected.
    Export(ExportError),
    /// An import was rejected.
    Import(ImportError),
}

impl<D: Device, H: Host> GpuRail<D, H> {
    /// Creates a rail without peers. The rail owns the device.
    pub fn new(device: D, host: H, shm: ShmConfig, config: GpuConfig) -> Result<Self, AttachError> {
        config.check()?;
        let config = GpuConfig { timeout: config.timeout.min(FOREVER), ..config };
        let peers = usize::from(shm.max_peers);
        let inner = ShmRail::new(host, shm)?;
        let mut sharing = Sharing::new(device, config.imports);
        let device = sharing.device().caps();
        let stage = Stage::new(sharing.driver());
        let copies = Copies::new(sharing.driver(), config.timeout);
        let caps = Caps {
            inject: 0,
            order: Order::None,
            depth: inner.caps().depth.min(config.ops.into()),
            ..inner.caps()
        };
        let ops = usize::from(config.ops);
        Ok(GpuRail {
            inner,
            sharing,
            device,
            caps,
            locals: (0..config.max_regions).map(|_| Registered::EMPTY).collect(),
            owned: Owned::default(),
            peers: (0..peers).map(|_| None).collect(),
            active: Vec::with_capacity(peers),
            first: 0,
            life: 0,
            ops: Ops::new(config.ops),
            streams: Streams::new(device.streams.min(config.spread.max(1)), device.marks, ops * 4),
            ended: VecDeque::with_capacity(2 * ops),
            landed: VecDeque::with_capacity(peers * config.relay_slots as usize),
            telling: VecDeque::with_capacity(ops),
            fallen: Vec::with_capacity(peers),
            lost: None,
            unsure: false,
            stage,
            copies,
            pace: Arc::new(Pace::new(config.longest_nap)),
            bell: None,
            silent: false,
            stats: GpuStats::default(),
            why: None,
            passes: 0,
            hears: false,
            next_turn_ns: 0,
            config,
        })
    }

    /// Returns this rail's settings for the handshake and for the agreement after it.
    pub fn profile(&self) -> GpuProfile {
        GpuProfile {
            profile: self.inner.profile(),
            layout: self.config.layout(),
            want: (self.config.done_channel, self.config.relay_slots > 0),
        }
    }

    /// Returns the wait object for the owner to sleep on. It may outlive the rail.
    pub fn wait_object(&self) -> GpuWaitObject {
        GpuWaitObject { wait_object: self.inner.wait_object(), pace: Arc::clone(&self.pace) }
    }

    /// Sets the bell that ends a sleep on the [wait object](Self::wait_object). While the owner
    /// sleeps, the device rings it when a copy ends. Without a bell the owner sleeps in naps.
    pub fn set_bell(&mut self, bell: Bell) {
        self.bell = Some(bell);
    }

    /// Adds the sockets of peers to an `epoll(7)` set: see [`ShmRail::watch_peers`].
    pub fn watch_peers(&mut self, set: Arc<OwnedFd>) {
        self.inner.watch_peers(set);
    }

    /// Returns the rail's host.
    pub fn host(&self) -> &H {
        self.inner.host()
    }

    /// Returns the device.
    pub fn device(&self) -> &D {
        self.sharing.device()
    }

    /// Returns the device, to free its memory.
    ///
    /// # Safety
    /// The contract of [`Sharing::device_mut`] applies.
    pub unsafe fn device_mut(&mut self) -> &mut D {
        self.sharing.driver()
    }

    /// Returns the rail's counters.
    pub fn stats(&self) -> GpuStats {
        self.stats
    }

    /// Returns why device memory was last rejected.
    pub fn why(&self) -> Option<Refused> {
        self.why
    }

    /// Exchanges opaque bytes with an attached peer, as [`ShmRail::exchange`] does.
    pub fn exchange(
        &mut self,
        peer: Peer,
        blob: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, HandshakeError> {
        self.inner.exchange(peer, blob, deadline)
    }

    /// Attaches a peer. The link and its agreement must have used this rail's
    /// [`profile`](Self::profile). Slow path.
    pub fn attach(&mut self, peer: Peer, link: GpuLink) -> Result<(), AttachError> {
        let GpuLink { link, agreed, device } = link;
        self.inner.attach(peer, link)?;
        let layout = agreed.layout;
        let shared = agreed.segments.map(|(segment, mine, theirs, number)| {
            let device = self.sharing.driver();
            // SAFETY: both segments stay mapped until the peer is detached. Detaching unpins them,
            // or leaves them mapped for good.
            let mut pin =
                |record: PairSegment| unsafe { device.pin(record.ptr(), record.len()) }.ok();
            let (mine_at, theirs_at) = (pin(mine), pin(theirs));
            // SAFETY: both segments stay mapped while the ends are used. Our segment holds the
            // words that we store, and our cursor. The peer's segment holds its words, and its
            // cursor. These are the only ends.
            let done = agreed.done.then(|| unsafe {
                let sender = Sender::new(mine.words(), layout.words, theirs.cursor(), 0);
                (sender, Receiver::new(theirs.words(), layout.words, mine.cursor(), 0))
            });
            // SAFETY: both segments stay mapped while the relay is used, and this is the only relay
            // on them.
            let relay =
                agreed.relay.then(|| unsafe { Relay::new(&mine, &theirs, layout, &self.config) });
            Shared { segment, mine, theirs, number, mine_at, theirs_at, done, relay }
        });
        if shared.is_some() {
            self.active.push(peer);
        }
        self.enter(peer, shared, false, device);
        if device {
            self.publish_to(peer);
        }
        Ok(())
    }

    /// Attaches this rail as its own peer. Slow path.
    pub fn attach_self(&mut self, peer: Peer) -> Result<(), AttachError> {
        self.inner.attach_self(peer)?;
        self.enter(peer, None, true, true);
        Ok(())
    }

    fn enter(&mut self, peer: Peer, shared: Option<Shared>, own: bool, device: bool) {
        self.life = self.life.wrapping_add(1);
        let life = self.life;
        let fresh = GpuPeer {
            life,
            own,
            device,
            down: false,
            imports: Vec::new(),
            hint: 0,
            shared,
            pieces: 0,
        };
        self.peers[usize::from(peer.0)] = Some(Box::new(fresh));
        self.expect();
    }

    fn peer(&mut self, peer: Peer) -> Option<&mut GpuPeer> {
        self.peers.get_mut(usize::from(peer.0))?.as_deref_mut()
    }

    fn shared(&mut self, peer: Peer) -> Option<&mut Shared> {
        self.peer(peer)?.shared.as_mut()
    }

    fn is_unsure(&self) -> bool {
        self.unsure || self.stage.is_unsure() || self.copies.is_lost()
    }

    fn expect(&mut self) {
        self.hears = self.peers.iter().flatten().any(|peer| peer.device && !peer.own);
        self.silent = self.peers.iter().flatten().any(|peer| {
            !peer.down && peer.shared.as_ref().is_some_and(|shared| shared.done.is_some())
        });
    }

    /// Returns whether work is in flight that a poll must complete: transfers, or copies by the
    /// device.
    pub fn is_working(&self) -> bool {
        !self.ops.is_empty() || self.awaits_device()
    }

    fn awaits_device(&self) -> bool {
        self.streams.out() > 0 || self.copies.is_pending()
    }

    /// Prepares a sleep, after its last poll has found nothing. Makes the end of each copy ring the
    /// bell, and decides whether the sleep is a nap.
    #[cold]
    #[inline(never)]
    fn prepare_sleep(&mut self) {
        let (works, copies) = (self.is_working(), self.awaits_device());
        let device = self.sharing.driver();
        let count = &mut self.stats.rings;
        let rings = match &self.bell {
            Some(bell) => {
                self.streams.ring(device, bell, count) & self.copies.ring(device, bell, count)
            }
            None => false,
        };
        // Peers notify when they take pieces or send some, but not when a lane has room again.
        let naps = self.silent || works && !(rings && self.telling.is_empty());
        self.pace.set_ends(match naps {
            true => Ends::Some,
            false if copies => Ends::Rings,
            false => Ends::All,
        });
    }
}

impl<D: Device, H: Host> Drop for GpuRail<D, H> {
    /// Detaches all peers. Waits for the device up to the configured timeout per peer. Memory that
    /// a peer may have open, or that the device may access, stays allocated.
    fn drop(&mut self) {
        self.end();
        for slot in 0..self.locals.len() {
            // If unpinning fails, the memory is released with the device's context.
            let _ = self.unpin_local(slot);
        }
        self.stage.end(self.sharing.driver());
        self.copies.end(self.sharing.driver());
    }
}

fn post_error(error: DeviceError) -> PostError {
    match error {
        DeviceError::Exhausted => PostError::Again,
        error => PostError::Provider(queue::code(error)),
    }
}

#[cfg(test)]
mod tests;
