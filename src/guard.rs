//! [`Guard`] wraps a rail, and watches what its provider may not report: whether the interface has
//! a link, and whether the peer's process is alive.
//!
//! Providers over TCP retry for ever on a link that is down, and do not report a killed peer.
//! [`Guard`] checks both in [`Rail::check_peers`], which waits call every 10 ms. This check makes
//! one system call for the link, and one for each peer with a lifeline. All other paths make no
//! system call.
//!
//! The guard reports [`PeerError::Rail`], which names the rail, or [`PeerError::Died`]. It forwards
//! all other reports.

mod link;

use fishplate_core::error::{AttachError, CompleteError, PeerError};
use fishplate_core::forward_rail;
use fishplate_core::mem::{Peer, RailId, Untrusted};
use fishplate_core::rail::{Fence, REOPEN_MAX, Rail, Sink};

pub use link::LinkWatch;

use crate::bootstrap::Lifeline;

/// A rail, its link, and the lifelines of its peers.
#[derive(Debug)]
pub struct Guard<R> {
    rail: R,
    pub(crate) watch: Watch,
}

#[derive(Debug)]
pub(crate) struct Watch {
    pub id: RailId,
    link: Option<LinkWatch>,
    peers: Vec<Watched>,
}

/// An attached peer. Its process is not known to be dead.
#[derive(Debug)]
struct Watched {
    peer: Peer,
    lifeline: Option<Lifeline>,
    /// False once the guard has reported the rail as failed.
    up: bool,
}

impl<R> Guard<R> {
    /// Guards `rail`, which has the number `id` in its engine.
    pub fn new(rail: R, id: RailId, link: Option<LinkWatch>) -> Guard<R> {
        Guard { rail, watch: Watch { id, link, peers: vec![] } }
    }

    /// Watches an attached peer through `lifeline` from now on.
    pub fn watch(&mut self, peer: Peer, lifeline: Option<Lifeline>) {
        match self.watch.find(peer) {
            Some(watched) => watched.lifeline = lifeline,
            None => self.watch.peers.push(Watched { peer, lifeline, up: true }),
        }
    }

    /// Returns the wrapped rail.
    pub fn inner(&self) -> &R {
        &self.rail
    }
}

impl Watch {
    fn find(&mut self, peer: Peer) -> Option<&mut Watched> {
        self.peers.iter_mut().find(|watched| watched.peer == peer)
    }

    fn set_up(&mut self, peer: Peer, up: bool) {
        if let Some(watched) = self.find(peer) {
            watched.up = up;
        }
    }

    fn has_link(&self) -> bool {
        self.link.as_ref().is_none_or(LinkWatch::is_up)
    }
}

/// If the rail reports a lost peer, the peer's lifeline decides: if the peer's process is alive,
/// the rail has failed.
struct Judge<'a, S> {
    sink: &'a mut S,
    watch: &'a mut Watch,
}

#[deny(clippy::missing_trait_methods, reason = "a report that is not forwarded arrives one by one")]
impl<S: Sink> Sink for Judge<'_, S> {
    #[inline(always)]
    fn done(&mut self, cx: u64, result: Result<(), CompleteError>) {
        self.sink.done(cx, result);
    }

    #[inline(always)]
    fn done_alike(&mut self, cx: u64, count: u32) {
        self.sink.done_alike(cx, count);
    }

    #[inline(always)]
    fn landed(&mut self, peer: Peer, data: u32) {
        self.sink.landed(peer, data);
    }

    #[inline(always)]
    fn message(&mut self, peer: Peer, bytes: Untrusted<'_>) {
        self.sink.message(peer, bytes);
    }

    #[cold]
    fn repeats(&mut self, cx: u64) -> bool {
        self.sink.repeats(cx)
    }

    #[cold]
    fn peer_down(&mut self, peer: Peer, why: PeerError) {
        let alive = self.watch.find(peer).and_then(|watched| {
            watched.up = false;
            watched.lifeline.as_ref().map(Lifeline::holds)
        });
        let why = match (why, alive) {
            (PeerError::Lost | PeerError::Died, Some(true)) => PeerError::Rail(self.watch.id),
            (PeerError::Lost | PeerError::Silent, Some(false)) => PeerError::Died,
            _ => why,
        };
        if why == PeerError::Died {
            self.watch.peers.retain(|watched| watched.peer != peer);
        }
        self.sink.peer_down(peer, why);
    }

    #[cold]
    fn silent(&mut self, peer: Peer, overdue: bool) -> bool {
        self.sink.silent(peer, overdue)
    }

    #[cold]
    fn peer_up(&mut self, peer: Peer) {
        if self.watch.has_link() {
            self.sink.peer_up(peer);
        }
    }

    #[cold]
    fn called(&mut self) {
        self.sink.called();
    }
}

/// The setup calls of a [`Guard`] in an engine.
pub struct GuardSetup<'a, R: Rail + 'a>(&'a mut Guard<R>);

impl<R: Rail> GuardSetup<'_, R> {
    /// Calls [`Guard::watch`].
    pub fn watch(&mut self, peer: Peer, lifeline: Option<Lifeline>) {
        self.0.watch(peer, lifeline);
    }

    /// Returns the setup calls of the wrapped rail, such as attaching peers.
    pub fn inner_mut(&mut self) -> R::Setup<'_> {
        self.0.rail.setup()
    }
}

#[deny(
    clippy::missing_trait_methods,
    reason = "a call that is not forwarded would use the default, which ignores the rail"
)]
// SAFETY: the guard forwards every call to one rail, and all reports of that rail. `setup` adds
// only `watch`, which posts nothing.
unsafe impl<R: Rail> Rail for Guard<R> {
    type Setup<'a>
        = GuardSetup<'a, R>
    where
        Self: 'a;

    const COPIES: bool = R::COPIES;

    const CLOCK: Option<fn() -> u64> = R::CLOCK;

    fn setup(&mut self) -> GuardSetup<'_, R> {
        GuardSetup(self)
    }

    fn detach(&mut self, peer: Peer) {
        self.watch.peers.retain(|watched| watched.peer != peer);
        self.rail.detach(peer);
    }

    #[cold]
    fn fence(&mut self, peer: Peer) -> Fence {
        let fence = self.rail.fence(peer);
        if fence == Fence::Fenced {
            self.watch.set_up(peer, false);
        }
        fence
    }

    #[cold]
    fn fence_left(&mut self, peer: Peer) -> Fence {
        let fence = self.rail.fence_left(peer);
        if fence == Fence::Fenced {
            self.watch.set_up(peer, false);
        }
        fence
    }

    #[cold]
    fn reopen(&mut self, peer: Peer, into: &mut [u8; REOPEN_MAX]) -> Option<usize> {
        self.watch.has_link().then(|| self.rail.reopen(peer, into)).flatten()
    }

    #[cold]
    fn rejoin(&mut self, peer: Peer, address: &[u8]) -> Result<(), AttachError> {
        self.rail.rejoin(peer, address)?;
        self.watch.set_up(peer, true);
        Ok(())
    }

    #[inline(always)]
    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        self.rail.poll(budget, &mut Judge { sink, watch: &mut self.watch })
    }

    fn check_peers<S: Sink>(&mut self, sink: &mut S) {
        self.rail.check_peers(&mut Judge { sink, watch: &mut self.watch });
        let Watch { id, link, peers } = &mut self.watch;
        let down = link.as_ref().is_some_and(|link| !link.is_up());
        peers.retain_mut(|Watched { peer, lifeline, up }| {
            let dead = lifeline.as_ref().is_some_and(|lifeline| !lifeline.holds());
            if dead {
                sink.peer_down(*peer, PeerError::Died);
            } else if down && *up {
                *up = false;
                sink.peer_down(*peer, PeerError::Rail(*id));
            }
            !dead
        });
    }

    forward_rail! { self.rail =>
        caps register deregister touches import try_import release late mute fences_all is_fenced
        post_write post_write_checked post_read post_rendezvous_read post_message post_atomic flush
        copy_to copy_from reads_addresses read_address write_device read_device place_device
        fetch_device notify doubt
    }
}
