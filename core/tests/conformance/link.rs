//! The two ends under test, their reports, and helpers that repeat a post until it is accepted.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fishplate_core::error::{CompleteError, PeerError, PostError};
use fishplate_core::mem::{Peer, Untrusted};
use fishplate_core::rail::{Caps, Local, Posted, Rail, Remote, Sink};

use super::Field;

/// Limits how long a test waits for a report: at least 100,000 polls, and at least 20 seconds. On a
/// loaded machine the rail's other threads need that time.
pub struct Patience {
    polls: u32,
    since: Instant,
}

impl Patience {
    pub fn new() -> Patience {
        Patience { polls: 0, since: Instant::now() }
    }

    /// Counts one poll. Returns false once the limit is exceeded.
    pub fn lasts(&mut self) -> bool {
        self.polls += 1;
        self.polls < 100_000 || self.since.elapsed() < Duration::from_secs(20)
    }
}

/// Two connected ends, or one end that is its own peer.
pub struct Link<R> {
    /// Both ends, or one if the rail is its own peer.
    pub rails: Vec<R>,
    /// Indexes of the posting end and of the target in `rails`.
    pub origin: usize,
    pub target: usize,
    /// The target's peer number at the origin, and the origin's peer number at the target.
    pub to: Peer,
    pub from: Peer,
}

impl<R: Rail> Link<R> {
    pub fn origin(&mut self) -> &mut R {
        &mut self.rails[self.origin]
    }

    pub fn target(&mut self) -> &mut R {
        &mut self.rails[self.target]
    }

    pub fn caps(&mut self) -> Caps {
        self.origin().caps()
    }

    /// Polls every end and collects the reports. Several polls may be needed, because posts may be
    /// batched.
    pub fn turn(&mut self, budget: u32, seen: &mut Seen) -> u32 {
        let mut most = 0;
        for rail in &mut self.rails {
            rail.flush();
            let before = seen.events;
            let told = rail.poll(budget, seen);
            let reported = seen.events - before;
            assert!(reported <= budget, "a poll of {budget} reported {reported} events");
            assert!(
                told >= reported && told <= budget,
                "a poll reported {reported} of {budget} events and said {told}"
            );
            most = most.max(reported);
        }
        most
    }

    /// Polls until `enough` returns true. Then polls some more, to detect repeated reports.
    pub fn until(&mut self, seen: &mut Seen, what: &str, enough: impl Fn(&Seen) -> bool) {
        let mut patience = Patience::new();
        while !enough(seen) {
            self.turn(8, seen);
            assert!(patience.lasts(), "{what}: not after {} polls; seen {seen:?}", patience.polls);
        }
        self.linger(seen);
    }

    pub fn linger(&mut self, seen: &mut Seen) {
        for _ in 0..200 {
            self.turn(8, seen);
        }
    }
}

#[derive(Default)]
pub struct Seen {
    pub done: Vec<(u64, Result<(), CompleteError>)>,
    pub landed: Vec<(Peer, u32)>,
    pub messages: Vec<(Peer, Vec<u8>)>,
    /// For each arrival in order, whether it was a message.
    pub arrivals: Vec<bool>,
    pub down: Vec<(Peer, PeerError)>,
    pub up: Vec<Peer>,
    pub events: u32,
    /// Called with the data of each reported write, so that a test can read the written memory.
    pub on_landed: Option<Box<dyn FnMut(u32)>>,
}

impl std::fmt::Debug for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Seen { done, landed, messages, down, .. } = self;
        write!(f, "done {done:?} landed {landed:?} messages {} down {down:?}", messages.len())
    }
}

impl Seen {
    pub fn ends(&self) -> BTreeMap<u64, usize> {
        let mut ends = BTreeMap::new();
        for &(cx, _) in &self.done {
            *ends.entry(cx).or_default() += 1;
        }
        ends
    }
}

impl Sink for Seen {
    fn done(&mut self, cx: u64, result: Result<(), CompleteError>) {
        self.events += 1;
        self.done.push((cx, result));
    }

    fn landed(&mut self, peer: Peer, data: u32) {
        self.events += 1;
        if let Some(look) = &mut self.on_landed {
            look(data);
        }
        self.landed.push((peer, data));
        self.arrivals.push(false);
    }

    fn message(&mut self, peer: Peer, bytes: Untrusted<'_>) {
        self.events += 1;
        let mut copy = vec![0; bytes.len()];
        bytes.copy_out(&mut copy);
        self.messages.push((peer, copy));
        self.arrivals.push(true);
    }

    fn peer_down(&mut self, peer: Peer, why: PeerError) {
        self.events += 1;
        self.down.push((peer, why));
    }

    fn peer_up(&mut self, peer: Peer) {
        self.up.push(peer);
    }
}

/// Posts, and polls in between, until the result is not `Again`.
pub fn attempt<R: Rail>(
    link: &mut Link<R>,
    seen: &mut Seen,
    mut post: impl FnMut(&mut R) -> Result<Posted, PostError>,
) -> Result<Posted, PostError> {
    let mut patience = Patience::new();
    loop {
        match post(link.origin()) {
            Err(PostError::Again) if patience.lasts() => link.turn(8, seen),
            answer => return answer,
        };
    }
}

/// Posts, and polls in between, until the post is accepted.
pub fn accept<R: Rail>(
    link: &mut Link<R>,
    seen: &mut Seen,
    post: impl FnMut(&mut R) -> Result<Posted, PostError>,
) -> Posted {
    attempt(link, seen, post).unwrap_or_else(|error| panic!("a good post was refused: {error:?}"))
}

pub fn write<R: Rail>(
    link: &mut Link<R>,
    seen: &mut Seen,
    local: Local,
    remote: Remote,
    data: Option<u32>,
    cx: u64,
) -> Posted {
    let to = link.to;
    // SAFETY: the sources of these tests are never freed, and do not change until the post
    // completes.
    accept(link, seen, |rail| unsafe { rail.post_write(to, local, remote, data, cx) })
}

pub fn message<R: Rail>(
    link: &mut Link<R>,
    seen: &mut Seen,
    head: &[u8],
    body: &[u8],
    cx: u64,
) -> Posted {
    let to = link.to;
    accept(link, seen, |rail| rail.post_message(to, head, Untrusted::from_slice(body), cx))
}

/// Posts 4 writes, 4 messages and 4 reads of 64 bytes each, in turn. Returns the posts that are
/// still pending.
pub fn posts_of_each_kind<R: Rail>(link: &mut Link<R>, field: &Field) -> Vec<u64> {
    let (mut seen, mut pending, to) = (Seen::default(), vec![], link.to);
    for n in 0..12u64 {
        let (local, remote) = (field.local(n as usize * 64, 64), field.remote(n * 64));
        let posted = match n % 3 {
            0 => write(link, &mut seen, local, remote, Some(n as u32), n),
            1 => message(link, &mut seen, &[n as u8], &[], n),
            // SAFETY: the source is never freed, and nothing reads it before all posts have
            // completed.
            _ => accept(link, &mut seen, |rail| unsafe { rail.post_read(to, local, remote, n) }),
        };
        if posted == Posted::Pending {
            pending.push(n);
        }
    }
    pending.retain(|cx| !seen.done.iter().any(|(ended, _)| ended == cx));
    pending
}
