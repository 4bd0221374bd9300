//! A rail whose messages may be longer than the tag of a silent operation's post can tell: 16 MiB.

use std::collections::VecDeque;
use std::ptr::NonNull;

use fishplate_core::engine::{Config, Notice};
use fishplate_core::error::{AttachError, PostError};
use fishplate_core::mem::{Peer, Region, Untrusted};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::{Caps, Local, Posted, Rail, RailKey, Remote, Sink};

use super::order::add;
use super::support::*;

/// What the tag can tell, and what of it the head of a message takes.
const TOLD: usize = (1 << 24) - 1;
const HEAD: usize = 48;

/// Loopback with messages of any length: what it has no room for lies here until the next poll.
struct Roomy {
    inner: Loopback<64>,
    mail: VecDeque<(Peer, Vec<u8>, u64)>,
    /// The longest so far.
    longest: usize,
}

impl Roomy {
    fn new() -> Roomy {
        Roomy { inner: Loopback::new(), mail: VecDeque::new(), longest: 0 }
    }
}

impl Rail for Roomy {
    fn caps(&self) -> Caps {
        Caps { max_message: 1 << 26, ordered: false, ..self.inner.caps() }
    }

    fn register(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError> {
        self.inner.register(region)
    }

    fn deregister(&mut self, key: RailKey) {
        self.inner.deregister(key);
    }

    fn import(&mut self, peer: Peer, key: RailKey, len: u64) -> Result<Option<NonNull<u8>>, AttachError> {
        self.inner.import(peer, key, len)
    }

    fn release(&mut self, peer: Peer, key: RailKey) {
        self.inner.release(peer, key);
    }

    fn detach(&mut self, peer: Peer) {
        self.inner.detach(peer);
    }

    unsafe fn post_write(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: passed on.
        unsafe { self.inner.post_write(peer, local, remote, data, cx) }
    }

    unsafe fn post_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: passed on.
        unsafe { self.inner.post_read(peer, local, remote, cx) }
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
        self.longest = self.longest.max(bytes.len());
        self.mail.push_back((peer, bytes, cx));
        Ok(Posted::Pending)
    }

    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let mut count = self.inner.poll(budget, sink);
        while count + 2 <= budget
            && let Some((peer, bytes, cx)) = self.mail.pop_front()
        {
            sink.message(peer, Untrusted::from_slice(&bytes));
            sink.done(cx, Ok(()));
            count += 2;
        }
        count
    }
}

#[test]
fn a_silent_put_signal_longer_than_its_tag_can_tell_ends() {
    let config = Config { eager: 1 << 25, ..Config::DEFAULT };
    for len in [TOLD - HEAD, TOLD - HEAD + 1, TOLD, TOLD + 1, (17 << 20) + 5] {
        let mut own = own(config, [Roomy::new()], 18 << 20);
        let payload: Vec<u8> = (0..len).map(|n| (n ^ (n >> 9)) as u8).collect();
        write(&own.engine, own.source.at(8), &payload);
        let (from, to) = (own.source.at(8), own.remote.at(8));
        for notice in [Notice::Silent, Notice::Report(1), Notice::Silent] {
            own.engine.put_signal(CX, from, len, to, add(own.remote, 0, 1), notice).unwrap();
        }
        own.engine.quiet(CX, own.peer, &mut own.waiter, 100_000).unwrap_or_else(|e| panic!("{len}: {e:?}"));
        assert_eq!(word(&own.engine, own.target.at(0)), 3, "{len}");
        assert!(read(&own.engine, own.target.at(8), len) == payload, "{len}");
        let longest = own.engine.rail_mut(fishplate_core::mem::RailId(0)).unwrap().longest;
        // As long a message as the tag can tell; what is longer is written.
        assert_eq!(longest == TOLD, len == TOLD - HEAD, "{len}: {longest}");
    }
}
