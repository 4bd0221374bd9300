//! [`Node`] is one object per process that sends to its peers and receives from them. It reaches
//! peers on its host over shared memory, and other peers over libfabric.
//!
//! Two processes that can exchange a few bytes by other means need only this code:
//!
//! ```no_run
//! use fishplate::{Cmp, Node, Notice, Signal};
//! use std::time::Duration;
//!
//! # fn exchange(_: impl AsRef<[u8]>) -> std::io::Result<Vec<u8>> { unimplemented!() }
//! let mut node = Node::builder().open()?;
//! let peer = node.connect(exchange(node.address())?)?;
//! let inbox = node.alloc(4096)?;
//! let theirs = node.import(peer, exchange(&node.handle(inbox)?)?)?;
//! node.put_signal(b"hello", theirs.at(8), Signal::set(theirs.at(0), 1), Notice::Silent)?;
//! node.wait(inbox.at(0), Cmp::Eq, 1, Some(peer), Duration::from_secs(5))?;
//! node.close(Duration::from_secs(5))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! One thread at a time uses a node, and the node can move between threads. It makes progress only
//! in its own calls. A program that computes for a long time calls [`Node::progress`] regularly, or
//! opens the node with a [worker](Builder::worker) thread. Only two calls are `unsafe` and can
//! cause undefined behaviour: [`Node::register`] and [`Node::register_device`].
//!
//! | call                                | waits                        | allocates      |
//! |-------------------------------------|------------------------------|----------------|
//! | puts, `get`, signals, atomics       | for room, up to the patience | no             |
//! | `send`, `post_recv`                 | for room, up to the patience | for long bytes |
//! | `fence`, `test`, `load`, `store`    | no                           | no             |
//! | `progress`                          | for a device, rarely         | rarely         |
//! | calls with a timeout                | up to their timeout          | some           |
//! | `import`                            | until the peer is connected  | yes            |
//! | first `send` to a peer of this host | until the peer is connected  | yes            |
//! | calls on device memory of this node | for the device               | some           |
//! | all others                          | no                           | possibly       |
//!
//! Of the calls with a timeout, only `recv` and `close` allocate, but any of them may allocate
//! while it connects peers.
//!
//! # Fork
//!
//! A child of `fork` must not use a node of its parent. It may drop the node, which then does
//! nothing, and it may open a node of its own.
//!
//! # Device memory
//!
//! A node that is opened with [`Builder::gpu`] has device memory as well as host memory: see
//! [`Node::alloc_device`] and [`Node::register_device`].
//!
//! Shared memory carries device memory if both nodes have a device. Libfabric carries device memory
//! if the provider of its owner supports `FI_HMEM`. The other node then needs no device.
//!
//! Otherwise the bytes travel in messages through host memory, and [`is_carried`](Node::is_carried)
//! returns `true`. All operations work then too, except that a long message from unregistered
//! memory ([`Node::queue`]) is not received into device memory.
//!
//! Words of signals and atomics may be in device memory. The device itself then changes them. A put
//! of unregistered bytes to device memory fails: [`OpError::DeviceMemory`].
//!
//! Freed memory returns to the device once no peer has it open. Peers close it in `progress` and in
//! waits, and its owner frees it in the same calls.
//!
//! A sleeping thread wakes when a copy by this node's own device ends. It also wakes when a copy by
//! a peer's device ends, if that peer makes progress. A peer that computes wakes nobody, so a wait
//! polls for its copies every 20 microseconds to 10 milliseconds.
//!
//! # Waits
//!
//! A wait spins for some microseconds. Then it sleeps until a peer on this host wakes it or
//! something arrives over a libfabric rail.
//!
//! Rails of providers without `FI_WAIT_FD` cannot end a sleep. With such rails, a wait polls every
//! 100 microseconds, and after 50 milliseconds every millisecond. `RailInfo::wakes` says which
//! rails can end a sleep.

mod address;
mod builder;
mod connect;
mod contact;
mod copies;
mod descriptor;
mod device;
mod distant;
mod error;
mod events;
#[doc(hidden)]
pub mod fuzzing;
mod home;
mod memory;
mod messages;
mod near;
mod of_process;
mod operations;
mod queue;
mod rail;
mod rails;
mod silent;
mod sleep;
mod waits;
mod worker;

use std::mem;
use std::time::{Duration, Instant};

use fishplate_core::engine::Stats;
use fishplate_core::error::OpError;
use fishplate_core::mem::PeerId;
use fishplate_core::sync::host::Host;
use fishplate_gpu::{GpuAgreement, GpuProfile};
use fishplate_shm::{Link, Listener, Profile, Segment};

pub use address::ADDRESS_MAX;
pub use builder::{Builder, Fabric, Gpu, NoSuchGpu};
pub use contact::Reach;
pub use error::{Error, OpenError};
pub use events::RailEvent;
pub use memory::{Memory, Remote, Slice};
pub use operations::Source;
pub use queue::Queue;
pub use rails::{RailError, RailInfo, RailPair};

use crate::counters::Page;
use address::Address;
use copies::Own;
use device::OnDevice;
use distant::Peers;
use events::Events;
use home::{CONTEXT, Home};
use of_process::OfProcess;
use rail::NodeRail;
use worker::Driver;

/// Limits while a peer is not connected or has not answered: the number of calls of `progress`
/// between two clock reads, and the minimum time between two polls for such peers, in nanoseconds.
const MEETING_PASSES: u32 = 16;
const MEETING_PAUSE: u64 = 50_000;

/// Maximum length of one slice of a wait, in nanoseconds: while a peer on this host is not
/// connected, and at other times.
const MEETING_SLICE: u64 = 2_000_000;
const SLICE: u64 = 20_000_000;

/// If this node is a front, forwards a call to the node behind it. Calls that the front's engine
/// would not refuse by itself need this.
macro_rules! behind {
    ($node:expr, $call:expr) => {
        if let super::Driver::Worker(worker) = &$node.driver {
            return worker.call($call)?;
        }
    };
}
use behind;

/// The settings to agree on with peers on this host: of shared memory, and of the device if the
/// node has one.
type Profiles = (Profile, Option<GpuProfile>);

/// The assembled transport of one process. See the module's documentation.
pub struct Node {
    /// Declared first, so that the rails are dropped before the memory registered with them.
    home: OfProcess<Home>,
    segments: Vec<(fishplate_core::mem::LocalId, Segment)>,
    rails: Vec<RailInfo>,
    address: Address,
    encoded: Vec<u8>,
    listener: OfProcess<Listener>,
    profile: Profile,
    /// The settings to agree on with peers that have a device. `None` if this node has no device.
    agrees: Option<GpuProfile>,
    agreements: Vec<(PeerId, GpuAgreement)>,
    on_device: OnDevice,
    peers: OfProcess<Peers>,
    /// Index in `peers.contacts` of the peer to poll next.
    turn: usize,
    /// Links of peers that dialled before the program has connected to them.
    early: OfProcess<Vec<Link>>,
    own: Own,
    builder: Box<Builder>,
    page: Option<Page>,
    driver: Driver,
}

static_assertions::assert_impl_all!(Node: Send);
static_assertions::assert_not_impl_any!(Node: Sync, Clone);
// Unoptimized code moves a node from one place on the stack to another some 25 times while it
// opens, and threads can have small stacks.
static_assertions::const_assert!(size_of::<Node>() <= 1536);

impl Node {
    /// Returns the default settings of a new node.
    pub fn builder() -> Builder {
        Builder::default()
    }

    fn new(
        mut home: Home,
        rails: Vec<RailInfo>,
        (address, encoded): (Address, Vec<u8>),
        listener: Listener,
        (profile, agrees): Profiles,
        page: Option<Page>,
        mut builder: Builder,
    ) -> Node {
        let mut peers = Peers::default();
        peers.events = Events::new(builder.on_rail_event.take(), &rails, &mut home.engine);
        Node {
            home: OfProcess::new(home),
            segments: vec![],
            rails,
            address,
            encoded,
            listener: OfProcess::new(listener),
            profile,
            agrees,
            agreements: vec![],
            on_device: OnDevice::default(),
            peers: OfProcess::new(peers),
            turn: 0,
            early: OfProcess::default(),
            own: Own::default(),
            builder: Box::new(builder),
            page,
            driver: Driver::Program,
        }
    }

    /// Returns the address that peers [connect](Self::connect) to: opaque, at most [`ADDRESS_MAX`]
    /// bytes. It changes when a libfabric rail fails, so call this again before another peer
    /// connects. Slow path: allocates.
    pub fn address(&self) -> Vec<u8> {
        if let Driver::Worker(worker) = &self.driver {
            return worker.call(|node| node.address()).unwrap_or_else(|_| self.encoded.clone());
        }
        let mut address = self.address.clone();
        for (rail, info) in address.rails.iter_mut().zip(&self.rails) {
            if let Some(NodeRail::Fabric(guard)) = self.home.engine.rail(info.id)
                && let Ok(own) = guard.inner().address()
            {
                rail.address = own;
            }
        }
        address.encode().unwrap_or_else(|| self.encoded.clone())
    }

    /// Makes progress without waiting: posts queued operations and applies arrivals. Returns the
    /// number of events that the rails reported. Hot path.
    ///
    /// Does not check that peers are alive: call [`failed_peers`](Self::failed_peers) from time to
    /// time. While a peer on this host is not connected, some calls make system calls to connect
    /// it, at most every 50 microseconds. Between nodes with devices, some calls close and free
    /// device memory, at most one call per millisecond. Such a call may wait for the device.
    #[inline]
    pub fn progress(&mut self) -> u32 {
        if self.peers.meeting | self.home.engine.has_call() {
            return self.progress_meeting();
        }
        self.home.engine.progress()
    }

    #[cold]
    fn progress_meeting(&mut self) -> u32 {
        if let Driver::Worker(worker) = &self.driver {
            return worker.call(Node::progress).unwrap_or(0);
        }
        self.meet_now_and_then();
        self.home.engine.progress()
    }

    /// Returns the engine's counters.
    pub fn stats(&self) -> Stats {
        if let Driver::Worker(worker) = &self.driver {
            return worker.call(|node| node.stats()).unwrap_or_default();
        }
        self.home.engine.stats()
    }

    /// Copies the counters to the page of a node with [`Builder::counters`](Builder::counters),
    /// unless that was done in the last 10 ms. Only programs that use neither waits, a worker,
    /// [`arm`](Self::arm) nor [`failed_peers`](Self::failed_peers) need this call.
    pub fn publish_counters(&mut self) {
        let Some(page) = &mut self.page else { return };
        let (home, peers, rails) = (&self.home, &self.peers, &self.rails);
        page.publish(
            home.host().now_ns(),
            || {
                let connected = peers.contacts.len() + peers.silent.len();
                (home.engine.stats(), [connected as u64, rails.len() as u64 + 1])
            },
            |rail| home.engine.rail_stats(rail),
        );
    }

    /// Shuts the node down. Waits until everything that it sent is applied, and until every peer
    /// knows that this node leaves. Peers then do not report this node as dead.
    ///
    /// Peers answer in [`progress`](Self::progress) and in calls that wait, but not in calls that
    /// complete at once. Once a peer has answered, its operations to this node fail, because the
    /// node is closed. Use a barrier first if processes may still need each other.
    ///
    /// A peer on another host that has never talked to this node is not told. If its first message
    /// arrives while this node waits, the peer is connected and told.
    ///
    /// # Errors
    /// [`Error::Unfinished`] names what was missing when the deadline expired.
    /// [`Error::StillOpen`]: peers have not closed device memory. [`Error::Wait`]: silent
    /// operations have failed. The node is dropped in each case.
    pub fn close(mut self, timeout: Duration) -> Result<(), Error> {
        if let Driver::Worker(worker) = mem::replace(&mut self.driver, Driver::Program) {
            return worker.into_inner().stop()?.close(timeout);
        }
        let deadline = Instant::now().checked_add(timeout);
        self.shutdown(timeout)?;
        self.revoke_device(deadline)?;
        // Reports operations that were lost with failed peers.
        self.quiet_all(Duration::ZERO)
    }

    /// Closes the connections to all peers as [`close`](Self::close) does, but keeps the node.
    ///
    /// # Errors
    /// [`Error::Unfinished`] names what was missing when the deadline expired. If that is
    /// [`Missing::Answer`](fishplate_core::error::Missing::Answer), peers need this node only for
    /// operations that they posted to its memory. Call `shutdown` again to continue.
    pub fn shutdown(&mut self, timeout: Duration) -> Result<(), Error> {
        if let Driver::Worker(worker) = &self.driver {
            return worker.call(|node| node.shutdown(timeout))?;
        }
        let deadline_ns = self.deadline_ns(timeout);
        // Attaches peers whose first message has arrived.
        self.home.engine.progress();
        self.meet();
        self.peers.closes = true;
        let callers = self.peers.recent_callers();
        for contact in &self.peers.contacts {
            let engine = &mut self.home.engine;
            // This peer has not connected, and nothing was sent to it. So it expects no Bye.
            if !callers.contains(&contact.peer)
                && engine.peer_error(contact.peer) == Ok(None)
                && engine.has_answered(contact.peer) == Ok(false)
                && engine.is_quiet(CONTEXT, contact.peer) == Ok(true)
            {
                engine.remove_peer(contact.peer)?;
            }
        }
        // Uses the waiter for short waits, so this does not sleep between passes.
        loop {
            let until = self.slice_ns(deadline_ns);
            let home = &mut *self.home;
            let closed = home.engine.shutdown(&mut home.waiter, until);
            let called = self.home.engine.has_call();
            self.meet();
            match closed {
                Ok(()) if !called => return Ok(()),
                Err(missing) if self.home.host().now_ns() >= deadline_ns => {
                    return Err(Error::Unfinished(missing));
                }
                _ => {}
            }
        }
    }

    /// If this node is a front, repeats the call on the node behind it. Only that node knows the
    /// peers, the memory and the operations.
    #[cold]
    fn else_behind<T, E: From<OpError>>(
        &self,
        refusal: impl Into<E>,
        call: impl FnOnce(&mut Node) -> Result<T, E>,
    ) -> Result<T, E> {
        match &self.driver {
            Driver::Worker(worker) => worker.call(call)?,
            _ => Err(refusal.into()),
        }
    }

    #[inline]
    fn deadline_ns(&self, timeout: Duration) -> u64 {
        let timeout = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        self.home.host().now_ns().saturating_add(timeout)
    }

    #[inline]
    fn slice_ns(&self, deadline_ns: u64) -> u64 {
        let longest = if self.peers.hurries() { MEETING_SLICE } else { SLICE };
        deadline_ns.min(self.home.host().now_ns().saturating_add(longest))
    }
}
