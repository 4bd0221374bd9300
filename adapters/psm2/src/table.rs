//! The endpoints of the process, and the layout of handles to endpoints, queues, peers and
//! requests.
//!
//! | bits of a handle | endpoint, queue | address of a peer | request |
//! |---|---|---|---|
//! | 56..64 | kind | kind | the queue's number of the request, with |
//! | 52..56 | slot in the table | slot | these bits replaced: |
//! | 32..52 | generation of the slot | generation | 28..32: slot |
//! | 0..32 | 0 | the node's number of the peer | 20..28: low byte of the generation |
//!
//! The generation counts the uses of a slot, so a stale handle is recognized. Each slot has a
//! [lock](crate::lock). A panic poisons it, and every later call on that endpoint fails.

use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

use fishplate::core::psm::{Code, MqReq};
use fishplate::core::sync::primitive::{AtomicU8, AtomicU32, AtomicU64};
use fishplate::node::Queue;
use fishplate::{Node, PeerId};

use crate::active::Am;
use crate::error::{Error, global, report};
use crate::frame::Frame;
use crate::handle::{Ep, EpAddr, Mq, Req};
use crate::lock::{Held, Lock, Words};
use crate::pause::{Idle, Next, unexpected};

const _: () = assert!(size_of::<usize>() == 8, "handles have 64 bits");

pub(crate) const SLOTS: usize = 16;

/// As in PSM2.
pub(crate) const REQUESTS: usize = 1 << 20;
const _: () = assert!(REQUESTS <= 1 << 20, "a request's number ends where the slot's begins");

const GENERATION: u32 = (1 << 20) - 1;

const EP: u64 = 0xe1;
const MQ: u64 = 0xe2;
const ADDRESS: u64 = 0xe3;

/// Bits 32 to 55 of a handle. Never 0 for an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Home(u32);

impl Home {
    /// The caller passes a `generation` other than 0.
    fn new(slot: usize, generation: u32) -> Home {
        Home((slot as u32) << 20 | generation)
    }

    fn slot(self) -> &'static Lock<Slot> {
        &TABLE[(self.0 >> 20) as usize % SLOTS]
    }

    fn handle<T>(self, kind: u64, low: u32) -> *mut T {
        let handle = u64::from(self.high(kind)) << 32 | u64::from(low);
        handle as usize as *mut T
    }

    /// Returns the upper half of a handle. One comparison checks all that it contains.
    #[inline(always)]
    fn high(self, kind: u64) -> u32 {
        (kind as u32) << 24 | self.0
    }

    #[inline(always)]
    fn split<T>(handle: *mut T, kind: u64) -> Option<(Home, u32)> {
        let bits = handle.addr() as u64;
        let home = Home((bits >> 32) as u32 & 0xff_ffff);
        (bits >> 56 == kind).then_some((home, bits as u32))
    }

    pub fn ep(self) -> *mut Ep {
        self.handle(EP, 0)
    }

    pub fn mq(self) -> *mut Mq {
        self.handle(MQ, 0)
    }

    pub fn address(self, peer: PeerId) -> *mut EpAddr {
        self.handle(ADDRESS, peer.to_raw())
    }

    /// The bits of this home in the handles of requests.
    fn mark(self) -> u64 {
        u64::from(self.0 >> 20 << 8 | self.0 & 0xff) << 20
    }

    /// Returns `None` if the endpoint is not open.
    #[inline]
    pub fn find(self) -> Option<Found> {
        self.of(self.slot().lock()?)
    }

    /// Locks the endpoint for a thread of this library. The lock keeps its owner, so calls of the
    /// program stay fast.
    pub fn find_aside(self) -> Option<Found> {
        self.of(self.slot().lock_aside()?)
    }

    #[inline(always)]
    fn of(self, slot: Held<'static, Slot>) -> Option<Found> {
        slot.narrow(|slot| slot.endpoint.as_deref_mut().filter(|_| slot.home == self))
    }

    pub fn take(self) -> Option<Box<Endpoint>> {
        let mut slot = self.slot().lock()?;
        if slot.home != self {
            return None;
        }
        slot.endpoint.take()
    }
}

#[derive(Debug)]
pub(crate) struct Peer {
    pub id: PeerId,
    pub epid: u64,
    pub context: usize,
    /// This peer's id in the node for active messages.
    pub am: Option<PeerId>,
    reported: bool,
    /// Streams that close when the peer's process ends. They stay open here, because the peer would
    /// take a closed stream for the end of this process.
    lines: Vec<UnixStream>,
}

pub(crate) struct Endpoint {
    pub home: Home,
    /// [`Home::mark`].
    mark: u64,
    pub epid: u64,
    pub uuid: [u8; 16],
    /// The endpoint's error handler: a function address, or a constant of PSM2.
    pub handler: usize,
    /// The error that queue calls return, if the queue is not usable.
    pub queue: Result<(), Error>,
    /// True if the queue was finalized with requests that could not be cancelled. The program may
    /// have freed their buffers, so the node makes no more passes.
    pub retired: bool,
    pub node: Node,
    /// `None` until active messages are first used.
    pub am: Option<Box<Am>>,
    /// Handles active messages. The caller must hold no lock.
    pub serve: Option<fn(Home)>,
    pub peers: Vec<Peer>,
    own: *mut EpAddr,
    pub idle: Idle,
    /// The thread that answers peers. Dropping this joins the thread, and the thread takes the
    /// endpoint's lock. So drop this without holding the lock.
    pub door: Option<Box<dyn Send>>,
}

// SAFETY: the raw pointers are handle numbers and are never dereferenced.
unsafe impl Send for Endpoint {}

impl Endpoint {
    pub fn new(home: Home, epid: u64, uuid: [u8; 16], node: Node) -> Endpoint {
        let (handler, peers, own, idle) = (global(), vec![], null_mut(), Idle::new());
        let (queue, retired) = (Err(Error::PARAM), false);
        let (am, door) = (None, None);
        Endpoint {
            home,
            mark: home.mark(),
            epid,
            uuid,
            handler,
            queue,
            retired,
            node,
            am,
            serve: None,
            peers,
            own,
            idle,
            door,
        }
    }

    /// Returns whether an address of a [peer](Self::peer_at) is that of the endpoint itself.
    #[inline(always)]
    pub fn is_own(&self, address: *mut EpAddr) -> bool {
        address == self.own
    }

    pub fn peer(&self, epid: u64) -> Option<&Peer> {
        self.peers.iter().find(|peer| peer.epid == epid)
    }

    /// Returns an empty vector if there is no node for active messages.
    pub fn am_address(&self) -> Vec<u8> {
        self.am.as_ref().map_or(vec![], |am| am.node.address().to_vec())
    }

    pub fn am_of(&self, peer: PeerId) -> Option<PeerId> {
        self.peers.iter().find(|known| known.id == peer)?.am
    }

    /// Starts to connect to the peer that sent this frame, and records it. Does not wait for the
    /// connection.
    ///
    /// # Errors
    /// The epid is already in use with another node address.
    pub fn admit(&mut self, frame: &Frame) -> Result<PeerId, Error> {
        let id = self.admit_node(frame.epid, &frame.address)?;
        if let Some(am) = &mut self.am
            && let Some(peer) = self.peers.iter_mut().find(|peer| peer.id == id)
            && peer.am.is_none()
            && !frame.am.is_empty()
        {
            peer.am = Some(am.node.connect(&frame.am).map_err(|_| Error::EPID_NETWORK)?);
        }
        Ok(id)
    }

    fn admit_node(&mut self, epid: u64, address: &[u8]) -> Result<PeerId, Error> {
        if epid == self.epid && address != self.node.address() {
            return Err(Error::EPID_NETWORK);
        }
        let id = self.node.connect(address).map_err(|error| match error {
            fishplate::node::Error::Version { .. } => Error::EPID_VERSION,
            fishplate::node::Error::NoRail => Error::UNREACHABLE,
            _ => Error::EPID_NETWORK,
        })?;
        if self.peers.iter().any(|peer| peer.epid == epid && peer.id != id) {
            _ = self.node.disconnect(id);
            return Err(Error::EPID_NETWORK);
        }
        if self.peers.iter().all(|peer| peer.id != id) {
            self.peers.push(Peer {
                id,
                epid,
                context: 0,
                am: None,
                reported: false,
                lines: vec![],
            });
            if epid == self.epid {
                self.own = self.home.address(id);
            }
        }
        Ok(id)
    }

    /// The stream closes when the peer dies.
    pub fn keep(&mut self, id: PeerId, line: UnixStream) {
        let elsewhere = self.node.reach(id).is_ok_and(|reach| reach.fabric != 0);
        let Some(peer) = self.peers.iter_mut().find(|peer| peer.id == id && elsewhere) else {
            return;
        };
        if peer.lines.is_empty()
            && let Ok(copy) = line.try_clone()
        {
            // Ignores an error: without the watch, the next send detects the death.
            _ = self.node.watch(id, copy);
        }
        peer.lines.push(line);
    }

    pub fn dismiss(&mut self, id: PeerId) -> Error {
        if self.node.disconnect(id).is_err() {
            return Error::PARAM;
        }
        if let (Some(peer), Some(am)) = (self.am_of(id), &mut self.am) {
            _ = am.node.disconnect(peer);
            am.forget(peer);
        }
        self.peers.retain(|peer| peer.id != id);
        Error::OK
    }

    /// Returns whether the peer is connected.
    ///
    /// # Errors
    /// The peer has failed or could not be connected.
    pub fn reached(&mut self, peer: PeerId) -> Result<bool, Error> {
        if !matches!(self.node.peer_error(peer), Ok(None)) {
            return Err(Error::EPID_NETWORK);
        }
        let reaches = |node: &Node, peer| {
            let reach = node.reach(peer).map_err(|_| Error::EPID_NETWORK)?;
            Ok(reach.shared_memory || reach.fabric != 0)
        };
        match (self.am_of(peer), &mut self.am) {
            (Some(id), Some(am)) => {
                if !matches!(am.node.peer_error(id), Ok(None)) {
                    return Err(Error::EPID_NETWORK);
                }
                Ok(reaches(&self.node, peer)? && reaches(&am.node, id)?)
            }
            _ => reaches(&self.node, peer),
        }
    }

    /// Makes one pass. Returns the number of events that the rails reported.
    pub fn progress(&mut self) -> u32 {
        if self.retired {
            return 0;
        }
        self.node.progress() + self.am.as_mut().map_or(0, |am| am.node.progress())
    }

    /// Closes the queue. Nothing accesses the program's buffers afterwards. If a send or a matched
    /// receive is open, disconnects every peer, because a peer may still read those buffers.
    pub fn finish(&mut self) {
        self.queue = Err(Error::PARAM);
        let is_over = |node: &mut Node| node.queue().is_none_or(|mut queue| queue.finish());
        if is_over(&mut self.node) {
            return;
        }
        for peer in self.peers.drain(..) {
            _ = self.node.disconnect(peer.id);
        }
        self.retired = !is_over(&mut self.node);
    }

    #[inline(always)]
    pub fn queue(&mut self) -> Result<Queue<'_>, Error> {
        self.queue?;
        self.node.queue().ok_or(Error::INTERNAL)
    }

    /// Returns the queue for a fast path, or `None` if the slow path must take the call.
    #[inline(always)]
    pub fn queue_at_once(&mut self) -> Option<Queue<'_>> {
        self.queue.ok()?;
        self.node.queue_at_once()
    }

    /// Adds requests to the queue if all requests are in use. Slow path: the loop makes a call
    /// longer.
    pub fn request<T>(
        &mut self,
        mut call: impl FnMut(&mut Queue<'_>) -> Result<T, Code>,
    ) -> Result<T, Error> {
        loop {
            match call(&mut self.queue()?) {
                Err(Code::NoMemory) if self.node.grow_requests() => {}
                result => return Ok(result?),
            }
        }
    }

    /// Returns the program's handle of a request.
    #[inline(always)]
    pub fn handle(&self, req: MqReq) -> *mut Req {
        (req.to_raw() | self.mark) as usize as *mut Req
    }

    /// Returns the peer that an address names. Null means any peer.
    ///
    /// # Errors
    /// The address is invalid or belongs to another endpoint.
    #[inline(always)]
    pub fn named(&self, address: *mut EpAddr) -> Result<Option<PeerId>, Error> {
        if address.is_null() {
            return Ok(None);
        }
        self.peer_at(address).map(Some)
    }

    /// Returns the peer that an address names.
    ///
    /// # Errors
    /// The address is invalid or belongs to another endpoint.
    #[inline(always)]
    pub fn peer_at(&self, address: *mut EpAddr) -> Result<PeerId, Error> {
        let bits = address.addr() as u64;
        match (bits >> 32) as u32 == self.home.high(ADDRESS) {
            true => Ok(PeerId::from_raw(bits as u32)),
            false => Err(Error::PARAM),
        }
    }

    /// Returns whether a call that found something may return at once. If not, counts nothing: then
    /// the slow path takes the call.
    #[inline(always)]
    pub fn returns_at_once(&mut self) -> bool {
        self.am.is_none() && self.idle.returns_at_once()
    }

    /// Chooses the last step of a call, which follows after the lock is released. `found` is true
    /// if the call found something.
    #[inline(always)]
    pub fn after(&mut self, found: bool) -> After {
        if self.am.is_none() && self.idle.returns(found) {
            return After::Nothing;
        }
        self.after_aside(found)
    }

    /// [`after`](Self::after) for a call with a last step, or with active messages.
    #[inline(never)]
    fn after_aside(&mut self, found: bool) -> After {
        let next = match self.am {
            Some(_) if self.idle.returns(found) => Next::Return,
            _ => self.idle.next(),
        };
        match next {
            Next::Look => self.look(),
            next if self.am.is_some() => After::Serve(self.home, self.serve, next == Next::Yield),
            Next::Return => After::Nothing,
            Next::Yield => After::Yield,
        }
    }

    /// Checks that peers are alive. Also checks that unexpected messages do not block the messages
    /// that the program waits for. Publishes the counters.
    #[cold]
    fn look(&mut self) -> After {
        self.node.publish_counters();
        if let Some(am) = &mut self.am {
            am.node.publish_counters();
        }
        let crowding = self.node.queue().and_then(|queue| queue.crowding_peer());
        if self.idle.is_crowded_out(crowding.map(|(_, awaited)| awaited)) && self.queue.is_ok() {
            self.queue = Err(Error::NO_MEMORY);
            let peer = self.peers.iter().find(|peer| crowding.is_some_and(|(id, _)| id == peer.id));
            let text = format!(
                "no memory for messages: unexpected messages of peer {:016x} fill it, and no \
                 expected message arrives; receive them earlier, or set FISHPLATE_PSM2_UNEXPECTED \
                 to a number above {}",
                peer.map_or(0, |peer| peer.epid),
                unexpected()
            );
            return After::Report(self.home.ep(), self.handler, Error::NO_MEMORY, vec![text]);
        }
        let mut texts = vec![];
        let mut failed = self.node.failed_peers();
        for (id, error) in self.am.as_mut().map_or(vec![], |am| am.node.failed_peers()) {
            if let Some(am) = &mut self.am {
                am.forget(id);
            }
            failed.extend(
                self.peers.iter().find(|peer| peer.am == Some(id)).map(|peer| (peer.id, error)),
            );
        }
        for (id, error) in failed {
            let peer = self.peers.iter_mut().find(|peer| peer.id == id && !peer.reported);
            if let Some(peer) = peer {
                peer.reported = true;
                texts.push(format!("peer {:016x} has failed: {error}", peer.epid));
            }
        }
        match texts.is_empty() {
            true => After::Nothing,
            false => After::Report(self.home.ep(), self.handler, Error::NO_NETWORK, texts),
        }
    }
}

/// The last step of a call, after it has released the lock.
#[must_use]
pub(crate) enum After {
    Nothing,
    Yield,
    /// Handles active messages, then yields if the flag is true.
    Serve(Home, Option<fn(Home)>, bool),
    Report(*mut Ep, usize, Error, Vec<String>),
}

impl After {
    #[inline(always)]
    pub fn act(self) {
        match self {
            After::Nothing => {}
            other => other.act_aside(),
        }
    }

    #[inline(never)]
    fn act_aside(self) {
        match self {
            After::Nothing => {}
            After::Yield => std::thread::yield_now(),
            After::Serve(home, serve, yields) => {
                if let Some(serve) = serve {
                    serve(home);
                }
                if yields {
                    std::thread::yield_now();
                }
            }
            After::Report(ep, handler, error, texts) => {
                for text in texts {
                    report(ep, handler, error, text);
                }
            }
        }
    }
}

struct Slot {
    /// The last endpoint that reserved this slot.
    home: Home,
    reserved: bool,
    endpoint: Option<Box<Endpoint>>,
}

impl Slot {
    const fn unused() -> Lock<Slot> {
        let (state, inside) = (AtomicU8::new(0), AtomicU8::new(0));
        let words = Words { state, inside, owner: AtomicU64::new(0), others: AtomicU32::new(0) };
        Lock::new(words, Slot { home: Home(0), reserved: false, endpoint: None })
    }
}

static TABLE: [Lock<Slot>; SLOTS] = [const { Slot::unused() }; SLOTS];

pub(crate) type Found = Held<'static, Endpoint>;
type HeldSlot = Held<'static, Slot>;

pub(crate) fn reserve() -> Option<Reserved> {
    for (at, slot) in TABLE.iter().enumerate() {
        let Some(mut slot) = slot.lock() else { continue };
        if slot.endpoint.is_none() && !slot.reserved {
            slot.reserved = true;
            // The generation is never 0, so no handle matches an unused slot.
            slot.home = Home::new(at, (slot.home.0 & GENERATION) % GENERATION + 1);
            return Some(Reserved(slot.home));
        }
    }
    None
}

pub(crate) struct Reserved(Home);

impl Reserved {
    pub fn home(&self) -> Home {
        self.0
    }

    pub fn insert(self, endpoint: Endpoint) {
        if let Some(mut slot) = self.0.slot().lock() {
            slot.endpoint = Some(Box::new(endpoint));
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if let Some(mut slot) = self.0.slot().lock() {
            slot.reserved = false;
        }
    }
}

#[inline]
pub(crate) fn find(ep: *mut Ep) -> Option<Found> {
    Home::split(ep, EP)?.0.find()
}

pub(crate) fn home(ep: *mut Ep) -> Option<Home> {
    Some(Home::split(ep, EP)?.0)
}

pub(crate) fn find_mq(mq: *mut Mq) -> Result<Found, Error> {
    of_mq(mq, Lock::lock).ok_or(Error::PARAM)
}

/// [`find_mq`], for a fast path. Returns `None` if this thread does not own the lock.
#[inline(always)]
pub(crate) fn own_mq(mq: *mut Mq) -> Option<Found> {
    of_mq(mq, Lock::own)
}

#[inline(always)]
fn of_mq(mq: *mut Mq, lock: impl FnOnce(&'static Lock<Slot>) -> Option<HeldSlot>) -> Option<Found> {
    let high = (mq.addr() as u64 >> 32) as u32;
    let found = in_slot(high >> 20, lock)?;
    found.narrow(|endpoint| (endpoint.home.high(MQ) == high).then_some(endpoint))
}

/// Locks the endpoint in the slot with this number. The slot of an open endpoint has its home.
#[inline(always)]
fn in_slot(
    number: u32,
    lock: impl FnOnce(&'static Lock<Slot>) -> Option<HeldSlot>,
) -> Option<Found> {
    lock(&TABLE[number as usize % SLOTS])?.narrow(|slot| slot.endpoint.as_deref_mut())
}

/// Locks the endpoint of a peer's address. Also returns the peer.
pub(crate) fn find_address(address: *mut EpAddr) -> Option<(Found, PeerId)> {
    let (home, raw) = Home::split(address, ADDRESS)?;
    Some((home.find()?, PeerId::from_raw(raw)))
}

/// Locks the endpoint of a request. Also returns the request's number in the queue.
pub(crate) fn find_request(request: *mut Req) -> Result<(Found, MqReq), Error> {
    of_request(request, Lock::lock).ok_or(Error::PARAM)
}

/// [`find_request`], for a fast path. Returns `None` if this thread does not own the lock.
#[inline(always)]
pub(crate) fn own_request(request: *mut Req) -> Option<(Found, MqReq)> {
    of_request(request, Lock::own)
}

#[inline(always)]
fn of_request(
    request: *mut Req,
    lock: impl FnOnce(&'static Lock<Slot>) -> Option<HeldSlot>,
) -> Option<(Found, MqReq)> {
    let bits = request.addr() as u64;
    // The number of the slot agrees, because the endpoint was found by it.
    let same = |endpoint: &Endpoint| endpoint.home.0 as u8 == (bits >> 20) as u8;
    let found = in_slot((bits >> 28) as u32, lock)?;
    let found = found.narrow(|endpoint| same(endpoint).then_some(endpoint))?;
    Some((found, MqReq::from_raw(bits & !(0xfff << 20))))
}

pub(crate) fn open() -> Vec<Home> {
    let homes = TABLE.iter().filter_map(|slot| {
        let slot = slot.lock()?;
        slot.endpoint.is_some().then_some(slot.home)
    });
    homes.collect()
}

/// Runs a library function. Converts a panic to an error.
#[inline]
pub(crate) fn guard(call: impl FnOnce() -> Error) -> Error {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or(Error::INTERNAL)
}
