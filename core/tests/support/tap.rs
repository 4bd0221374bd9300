//! A test rail around another rail. It counts traffic, refuses posts, and changes, drops, repeats
//! or forges reports.
//!
//! Several taps may share one [`Control`]. A tap also checks the engine's side of the contract:
//! nothing is posted or polled from inside a report, and no poll requests more than a batch.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::rc::Rc;

use fishplate_core::error::{AttachError, CompleteError, PeerError, PostError};
use fishplate_core::forward_rail;
use fishplate_core::mem::{Peer, Untrusted};
use fishplate_core::op::Amo;
use fishplate_core::rail::{Caps, Fence, Local, Posted, REOPEN_MAX, Rail, RailKey, Remote, Sink};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Done(u64, Result<(), CompleteError>),
    Landed(Peer, u32),
    Message(Peer, Vec<u8>),
    Down(Peer, PeerError),
    Up(Peer),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Write,
    Read,
    Message,
    Atomic,
}

/// A post, recorded before it is passed to the rail.
#[derive(Clone, Debug)]
pub struct Post {
    pub rail: usize,
    pub verb: Verb,
    pub peer: Peer,
    pub len: usize,
    pub data: Option<u32>,
    pub bytes: Vec<u8>,
    pub cx: u64,
}

/// The context word of a message that completed at its post.
pub const ABSORBED: u64 = u64::MAX;

type Refuse = Box<dyn FnMut(&Post) -> Option<PostError>>;
pub type Edit = Box<dyn FnMut(usize, Event) -> Vec<Event>>;

/// What a test tells its taps to do, and what they have counted.
#[derive(Default)]
pub struct Control {
    /// The accepted posts.
    pub posts: Vec<Post>,
    pub polls: u64,
    pub flushes: u64,
    /// The largest budget of a poll, and the largest number of events reported in one poll.
    pub budget: u32,
    pub reported: u32,
    /// Changes the reported capabilities. The tap itself carries messages that exceed the inner
    /// rail's limit.
    pub caps: Option<fn(Caps) -> Caps>,
    /// Makes imports fail, so payloads are sent in messages.
    pub unreadable: bool,
    /// Completes messages when they are posted, as a rail with long buffers does.
    pub absorbs: bool,
    /// Decides for each post whether it is refused.
    pub refuse: Option<Refuse>,
    /// Replaces each event by a list of events.
    pub edit: Option<Edit>,
    /// Events that the next polls of rail 0 report.
    pub inject: VecDeque<Event>,
    /// Makes polls report nothing, without polling the inner rail.
    pub mute: bool,
    /// The rails, as a bitmask, that report this peer as silent at each poll and check.
    pub silent: Option<(u16, Peer)>,
    /// The answer to [`Rail::doubt`], and the calls: rail, peer, and whether the engine asks.
    pub heard: Option<u32>,
    pub doubts: Vec<(usize, Peer, bool)>,
    /// How far the clock of timed taps advances at each check of the peers, in nanoseconds.
    pub tick: u64,
    /// The result of fencing a peer. `None`: the inner rail fences.
    pub fence: Option<Fence>,
    pub fences_all: bool,
    /// Whether the endpoint must be closed although the peer has left the rail.
    pub must_close: bool,
    /// The calls of `fence`: pairs of rail and peer.
    pub fences: Vec<(usize, Peer)>,
    pub detached: Vec<Peer>,
    /// The offset in bytes that imports add to mapped addresses, and the number of imports not yet
    /// released.
    pub shift: usize,
    pub imported: i32,
    inside: bool,
}

impl Control {
    /// Drops received messages of these kinds, and delivers all other events unchanged.
    pub fn lose(&mut self, kinds: &'static [u8]) {
        self.edit = Some(Box::new(|_, event| match &event {
            Event::Message(_, bytes) if kinds.contains(&bytes[0]) => vec![],
            _ => vec![event],
        }));
    }
}

pub type Shared = Rc<RefCell<Control>>;

/// A rail that wraps `R`. `rail` is the tap's index among the taps that share `control`. A timed
/// tap has a clock, which stands still until the test sets [`NOW`].
pub struct Tap<R, const TIMED: bool = false> {
    inner: R,
    rail: usize,
    control: Shared,
    backlog: VecDeque<Event>,
}

pub fn shared() -> Shared {
    Shared::default()
}

/// Wraps one rail in a tap.
pub fn tap<R>(inner: R, control: &Shared) -> [Tap<R>; 1] {
    [Tap::new(inner, 0, control)]
}

thread_local! {
    /// The clock of timed taps, in nanoseconds.
    pub static NOW: Cell<u64> = const { Cell::new(1) };
}

impl<R> Tap<R> {
    pub fn new(inner: R, rail: usize, control: &Shared) -> Self {
        Tap { inner, rail, control: control.clone(), backlog: VecDeque::new() }
    }
}

impl<R> Tap<R, true> {
    pub fn timed(inner: R, rail: usize, control: &Shared) -> Self {
        Tap { inner, rail, control: control.clone(), backlog: VecDeque::new() }
    }
}

impl<R, const TIMED: bool> Tap<R, TIMED> {
    fn report_silence<S: Sink>(&self, sink: &mut S) {
        let silent = self.control.borrow().silent;
        if let Some((rails, peer)) = silent
            && rails >> self.rail & 1 != 0
            && sink.silent(peer, true)
        {
            sink.peer_down(peer, PeerError::Silent);
        }
    }

    fn look(
        &self,
        verb: Verb,
        peer: Peer,
        len: usize,
        data: Option<u32>,
        bytes: Vec<u8>,
        cx: u64,
    ) -> Result<Post, PostError> {
        let post = Post { rail: self.rail, verb, peer, len, data, bytes, cx };
        let mut control = self.control.borrow_mut();
        assert!(!control.inside, "posted from inside a report");
        let mut refuse = control.refuse.take();
        drop(control);
        let refused = refuse.as_mut().and_then(|refuse| refuse(&post));
        let mut control = self.control.borrow_mut();
        if control.refuse.is_none() {
            control.refuse = refuse;
        }
        refused.map_or(Ok(post), Err)
    }

    /// Drops all queued reports about a peer.
    fn hush(&mut self, peer: Peer) {
        self.backlog.retain(|event| match event {
            Event::Landed(from, _) | Event::Message(from, _) | Event::Down(from, _) => {
                *from != peer
            }
            Event::Up(from) => *from != peer,
            Event::Done(..) => true,
        });
    }

    fn note(&self, post: Post, result: Result<Posted, PostError>) -> Result<Posted, PostError> {
        if result.is_ok() {
            self.control.borrow_mut().posts.push(post);
        }
        result
    }
}

struct Notes<'a>(&'a mut VecDeque<Event>);

impl Sink for Notes<'_> {
    fn done(&mut self, cx: u64, result: Result<(), CompleteError>) {
        self.0.push_back(Event::Done(cx, result));
    }

    fn landed(&mut self, peer: Peer, data: u32) {
        self.0.push_back(Event::Landed(peer, data));
    }

    fn message(&mut self, peer: Peer, bytes: Untrusted<'_>) {
        let mut copy = vec![0; bytes.len()];
        bytes.copy_out(&mut copy);
        self.0.push_back(Event::Message(peer, copy));
    }

    fn peer_down(&mut self, peer: Peer, why: PeerError) {
        self.0.push_back(Event::Down(peer, why));
    }

    fn peer_up(&mut self, peer: Peer) {
        self.0.push_back(Event::Up(peer));
    }
}

// SAFETY: the inner rail satisfies the contract. The tests are responsible for forged events.
unsafe impl<R: Rail, const TIMED: bool> Rail for Tap<R, TIMED> {
    type Setup<'a>
        = R::Setup<'a>
    where
        Self: 'a;

    fn setup(&mut self) -> R::Setup<'_> {
        self.inner.setup()
    }

    const COPIES: bool = R::COPIES;

    const CLOCK: Option<fn() -> u64> = if TIMED { Some(|| NOW.get()) } else { None };

    fn caps(&self) -> Caps {
        let caps = self.inner.caps();
        self.control.borrow().caps.map_or(caps, |say| say(caps))
    }

    fn import(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        if self.control.borrow().unreadable {
            return Err(AttachError::Full("tap: imports"));
        }
        let mapped = self.inner.import(peer, key, len)?;
        let mut control = self.control.borrow_mut();
        control.imported += 1;
        // SAFETY: the offset is smaller than the mapped region.
        Ok(mapped.map(|mapped| unsafe { mapped.add(control.shift) }))
    }

    fn release(&mut self, peer: Peer, key: RailKey) {
        self.control.borrow_mut().imported -= 1;
        self.inner.release(peer, key);
    }

    fn detach(&mut self, peer: Peer) {
        self.control.borrow_mut().detached.push(peer);
        self.hush(peer);
        self.inner.detach(peer);
    }

    fn fence(&mut self, peer: Peer) -> Fence {
        self.hush(peer);
        let fence = self.inner.fence(peer);
        self.control.borrow_mut().fences.push((self.rail, peer));
        self.control.borrow().fence.unwrap_or(fence)
    }

    fn fence_left(&mut self, peer: Peer) -> Fence {
        self.hush(peer);
        match self.control.borrow().must_close {
            true => Fence::Unknown,
            false => self.inner.fence_left(peer),
        }
    }

    fn reopen(&mut self, peer: Peer, into: &mut [u8; REOPEN_MAX]) -> Option<usize> {
        if self.backlog.iter().any(|event| matches!(event, Event::Done(..))) {
            return None;
        }
        self.inner.reopen(peer, into)
    }

    fn fences_all(&self) -> bool {
        self.control.borrow().fences_all || self.inner.fences_all()
    }

    unsafe fn post_write(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let post = self.look(Verb::Write, peer, local.len, data, vec![], cx)?;
        // SAFETY: our caller guarantees the same contract.
        let result = unsafe { self.inner.post_write(peer, local, remote, data, cx) };
        self.note(post, result)
    }

    unsafe fn post_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let post = self.look(Verb::Read, peer, local.len, None, vec![], cx)?;
        // SAFETY: our caller guarantees the same contract.
        let result = unsafe { self.inner.post_read(peer, local, remote, cx) };
        self.note(post, result)
    }

    fn post_message(
        &mut self,
        peer: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let mut bytes = head.to_vec();
        bytes.resize(head.len() + body.len(), 0);
        body.copy_out(&mut bytes[head.len()..]);
        let post = self.look(Verb::Message, peer, bytes.len(), None, bytes, cx)?;
        if self.control.borrow().caps.is_some() && post.len > self.inner.caps().max_message {
            self.backlog
                .extend([Event::Message(peer, post.bytes.clone()), Event::Done(cx, Ok(()))]);
            return self.note(post, Ok(Posted::Pending));
        }
        if self.control.borrow().absorbs {
            let result = self.inner.post_message(peer, head, body, ABSORBED);
            return self.note(post, result.map(|_| Posted::Done));
        }
        let result = self.inner.post_message(peer, head, body, cx);
        self.note(post, result)
    }

    unsafe fn post_atomic(
        &mut self,
        peer: Peer,
        amo: Amo,
        remote: Remote,
        fetch: Option<NonNull<u64>>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let post = self.look(Verb::Atomic, peer, amo.width as usize, None, vec![], cx)?;
        // SAFETY: our caller guarantees the same contract.
        let result = unsafe { self.inner.post_atomic(peer, amo, remote, fetch, cx) };
        self.note(post, result)
    }

    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let (mute, injected) = {
            let mut control = self.control.borrow_mut();
            assert!(!control.inside, "polled from inside a report");
            control.polls += 1;
            control.budget = control.budget.max(budget);
            let injected =
                if self.rail == 0 { std::mem::take(&mut control.inject) } else { VecDeque::new() };
            (control.mute, injected)
        };
        self.backlog.extend(injected);
        if !mute && (self.backlog.len() as u32) < budget {
            let mut events = VecDeque::new();
            self.inner.poll(budget - self.backlog.len() as u32, &mut Notes(&mut events));
            let mut edit = self.control.borrow_mut().edit.take();
            for event in events {
                match &mut edit {
                    Some(edit) => self.backlog.extend(edit(self.rail, event)),
                    None => self.backlog.push_back(event),
                }
            }
            let mut control = self.control.borrow_mut();
            if control.edit.is_none() {
                control.edit = edit;
            }
        }
        self.report_silence(sink);
        self.control.borrow_mut().inside = true;
        let mut reported = 0;
        while reported < budget
            && let Some(event) = self.backlog.pop_front()
        {
            reported += 1;
            match event {
                Event::Done(cx, result) => sink.done(cx, result),
                Event::Landed(peer, data) => sink.landed(peer, data),
                Event::Message(peer, bytes) => sink.message(peer, Untrusted::from_slice(&bytes)),
                Event::Down(peer, why) => sink.peer_down(peer, why),
                Event::Up(peer) => sink.peer_up(peer),
            }
        }
        let mut control = self.control.borrow_mut();
        control.inside = false;
        control.reported = control.reported.max(reported);
        reported
    }

    fn flush(&mut self) {
        self.control.borrow_mut().flushes += 1;
        self.inner.flush();
    }

    fn doubt(&mut self, peer: Peer, asks: bool) -> Option<u32> {
        let mut control = self.control.borrow_mut();
        control.doubts.push((self.rail, peer, asks));
        control.heard
    }

    fn check_peers<S: Sink>(&mut self, sink: &mut S) {
        NOW.set(NOW.get() + self.control.borrow().tick);
        self.inner.check_peers(sink);
        self.report_silence(sink);
    }

    forward_rail! { self.inner =>
        register deregister touches late mute rejoin is_fenced copy_to copy_from write_device
        read_device place_device fetch_device notify
    }
}
