//! An endpoint: a node, its peers, and how its calls begin and end. Only the holder of its lock
//! accesses it.

use std::os::unix::net::UnixStream;
use std::ptr::null_mut;

use fishplate::core::psm::{Code, MqReq};
use fishplate::node::Queue;
use fishplate::{Node, PeerId};

use crate::active::Am;
use crate::error::{Error, global, report};
use crate::frame::Frame;
use crate::handle::{Ep, EpAddr, Mq, Req};
use crate::home::{ADDRESS, Home};
use crate::pause::{Idle, Next, unexpected};

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
    /// [`Home::mq`].
    pub mq: *mut Mq,
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
    /// Whether the last peek found a request by a pass that was not full.
    pub drained: bool,
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
        let (am, door, drained) = (None, None, false);
        Endpoint {
            home,
            mark: home.mark(),
            mq: home.mq(),
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
            drained,
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

    /// Makes a call on the queue. If all requests are in use, adds requests and repeats the call.
    /// Slow path.
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

    /// Counts a call that found something, and returns whether it may return at once. If it may
    /// not, counts nothing, because the slow path counts it.
    #[inline(always)]
    pub fn returns_at_once(&mut self) -> bool {
        self.am.is_none() && self.idle.returns_at_once()
    }

    /// Counts a call, and chooses its last step, to take after the lock is released. `found` is
    /// true if the call found something.
    #[inline(always)]
    pub fn after(&mut self, found: bool) -> After {
        if self.returns(found) { After::Nothing } else { self.after_aside(found) }
    }

    /// Counts a call, and returns whether it has no last step. If this returns `false`,
    /// [`after_aside`](Self::after_aside) chooses the step.
    #[inline(always)]
    pub fn returns(&mut self, found: bool) -> bool {
        self.am.is_none() && self.idle.returns(found)
    }

    /// [`after`](Self::after) for a call with a last step, or with active messages.
    #[inline(never)]
    pub fn after_aside(&mut self, found: bool) -> After {
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
