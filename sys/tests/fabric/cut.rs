//! Fencing a peer: once the fence has completed, no write or message of the peer lands.

use std::io::Write;
use std::net::{Ipv4Addr, TcpStream};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use fishplate_core::error::{AttachError, CompleteError, PeerError};
use fishplate_core::mem::{Peer, Region, Untrusted};
use fishplate_core::rail::{Fence, Local, REOPEN_MAX, Rail, RailKey, Remote};
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail};

use crate::behaviour::{Random, seeds};
use crate::conformance::{Link, Seen, leaked};
use crate::{FROM, TO, TRACKED, manual, pair, support};

const LEN: usize = 32 << 10;
const SLOTS: usize = 32;

struct Ends {
    a: FabricRail,
    b: FabricRail,
    source: Region,
    desc: u64,
    memory: Region,
    key: RailKey,
    here: Seen,
    there: Seen,
    written: u32,
}

impl Ends {
    fn new(ask: &Ask<'_>, config: FabricConfig, seed: u64) -> Ends {
        let Link { rails, .. } = pair(ask, config, seed);
        let [mut a, mut b]: [FabricRail; 2] = rails.try_into().unwrap();
        let (source, memory) = (leaked(LEN), leaked(LEN * SLOTS));
        let (_, desc) = a.register(&source).unwrap();
        let (key, _) = b.register(&memory).unwrap();
        a.import(TO, key, memory.len() as u64).unwrap();
        Ends {
            a,
            b,
            source,
            desc,
            memory,
            key,
            here: Seen::default(),
            there: Seen::default(),
            written: 0,
        }
    }

    /// Writes new bytes to the next slot. Returns whether the post was accepted.
    fn write(&mut self) -> bool {
        let n = self.written;
        let local = Local { ptr: self.source.ptr(), len: LEN, desc: self.desc };
        let remote = Remote { key: self.key, offset: (n as usize % SLOTS * LEN) as u64 };
        // SAFETY: the memory is never freed. It changes under earlier writes on purpose: a late
        // write is detected by bytes that differ from the earlier ones.
        let posted = unsafe {
            self.source.ptr().as_ptr().write_bytes(n as u8, LEN);
            self.a.post_write(TO, local, remote, Some(n), u64::from(n))
        };
        self.written += posted.is_ok() as u32;
        posted.is_ok()
    }

    fn poll(&mut self) {
        self.a.poll(8, &mut self.here);
        self.b.poll(8, &mut self.there);
    }

    fn until(&mut self, what: &str, mut ready: impl FnMut(&mut Ends) -> bool) {
        let end = Instant::now() + Duration::from_secs(30);
        while !ready(self) {
            self.poll();
            assert!(
                Instant::now() < end,
                "{what}: {} written, {:?}",
                self.written,
                self.there.landed.len()
            );
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.memory.len()];
        // SAFETY: the memory is never freed. The test looks for a race with the provider, so the
        // copy is volatile, byte by byte.
        unsafe { copy(self.memory.ptr(), &mut bytes) };
        bytes
    }
}

/// # Safety
/// `from` is readable for `into.len()` bytes.
unsafe fn copy(from: NonNull<u8>, into: &mut [u8]) {
    for (at, byte) in into.iter_mut().enumerate() {
        // SAFETY: `at` is below `into.len()`, and our caller guarantees that many readable bytes.
        *byte = unsafe { from.as_ptr().add(at).read_volatile() };
    }
}

/// The origin keeps writing before and after the fence, and does not know of the fence.
fn nothing_lands_behind(ask: &Ask<'_>, config: FabricConfig, seed: u64) {
    let mut random = Random(!seed);
    let mut ends = Ends::new(ask, config, seed);
    ends.until("the first write", |ends| {
        ends.write();
        !ends.there.landed.is_empty()
    });
    // Some writes are only posted, some are in flight, and some sit in socket buffers.
    for _ in 0..random.below(60) {
        ends.write();
        if random.below(3) == 0 {
            ends.poll();
        }
    }
    assert_eq!(ends.b.fence(FROM), Fence::Fenced, "seed {seed}");
    assert_eq!(ends.b.fence(FROM), Fence::Fenced, "seed {seed}: fenced already");
    let (before, landed) = (ends.bytes(), ends.there.landed.len());
    let end = Instant::now() + Duration::from_millis(random.below(60));
    while Instant::now() < end {
        ends.write();
        ends.poll();
    }
    for _ in 0..200 {
        ends.write();
        ends.poll();
    }
    assert!(ends.bytes() == before, "seed {seed}: memory was written behind the fence");
    assert_eq!(
        ends.there.landed.len(),
        landed,
        "seed {seed}: a write was reported behind the fence"
    );
    assert_eq!(ends.there.down, [], "seed {seed}: the caller knows that this peer is cut off");
    // Both sides attach each other again, and traffic flows as before.
    match random.below(2) {
        0 => {
            ends.a.detach(TO);
            ends.b.detach(FROM);
            ends.until("the posts of the old attachment", |ends| {
                ends.here.done.len() as u32 == ends.written
            });
            ends.a.attach(TO, &ends.b.address().unwrap()).unwrap();
            ends.b.attach(FROM, &ends.a.address().unwrap()).unwrap();
            ends.a.import(TO, ends.key, ends.memory.len() as u64).unwrap();
        }
        _ => rejoin(&mut ends, seed),
    }
    let mut posted = false;
    ends.until("a write after the return", |ends| {
        posted |= !posted && ends.write();
        ends.there.landed.len() > landed
    });
    assert_eq!(
        ends.there.landed.last().map(|&(peer, n)| (peer, n + 1)),
        Some((FROM, ends.written))
    );
}

/// Both sides have fenced each other. They attach each other again at their new addresses.
fn rejoin(ends: &mut Ends, seed: u64) {
    let before = [ends.a.address().unwrap(), ends.b.address().unwrap()];
    assert_eq!(ends.a.fence(TO), Fence::Fenced, "seed {seed}");
    let (mut here, mut there) = (vec![], vec![]);
    ends.until("both say that they are up", |ends| {
        // A waiting engine calls `check_peers` in the same way.
        ends.a.check_peers(&mut ends.here);
        ends.b.check_peers(&mut ends.there);
        !ends.here.up.is_empty() && !ends.there.up.is_empty()
    });
    ends.until("both are open again", |ends| {
        let mut into = [0; REOPEN_MAX];
        here = ends.a.reopen(TO, &mut into).map_or(vec![], |len| into[..len].to_vec());
        there = ends.b.reopen(FROM, &mut into).map_or(vec![], |len| into[..len].to_vec());
        !here.is_empty() && !there.is_empty()
    });
    assert_eq!(ends.here.done.len() as u32, ends.written, "seed {seed}: all were reported before");
    assert!(
        here != before[0] && there == before[1],
        "seed {seed}: each fence opens another endpoint"
    );
    // Malformed addresses, which `rejoin` must reject.
    for (at, wrong) in [(0, b'x'), (4, 9), (6, 2), (8, !there[8]), (12, 9), (16, 99)] {
        let mut bad = there.clone();
        bad[at] = wrong;
        assert!(ends.a.rejoin(TO, &bad).is_err(), "seed {seed}: byte {at}");
    }
    for cut in 0..there.len() {
        assert!(ends.a.rejoin(TO, &there[..cut]).is_err(), "seed {seed}: cut to {cut}");
    }
    assert!(ends.a.rejoin(TO, &[&there[..], &[0]].concat()).is_err(), "seed {seed}");
    assert_eq!(ends.a.rejoin(Peer(9), &there), Err(AttachError::UnknownPeer));
    assert!(!ends.write(), "seed {seed}: it is still fenced");
    ends.a.rejoin(TO, &there).unwrap();
    ends.b.rejoin(FROM, &here).unwrap();
}

/// Operations of the fencing side complete exactly once. Afterwards they do not access their
/// memory.
fn own_posts_end(ask: &Ask<'_>, config: FabricConfig, seed: u64) {
    let mut random = Random(!seed);
    let mut ends = Ends::new(ask, config, seed);
    ends.until("the first write", |ends| {
        ends.write();
        !ends.there.landed.is_empty()
    });
    for _ in 0..1 + random.below(40) {
        ends.write();
        if random.below(3) == 0 {
            ends.a.poll(1, &mut ends.here);
        }
    }
    // A third peer that never answers.
    let third = support::open(ask, config, seed ^ 0xbeef);
    ends.a.attach(Peer(7), &third.address().unwrap()).unwrap();
    assert_eq!(ends.a.fence(TO), Fence::Fenced, "seed {seed}");
    assert!(!ends.write(), "seed {seed}: a post to a fenced peer");
    let source = Local { ptr: ends.source.ptr(), len: LEN, desc: ends.desc };
    assert!(!ends.a.touches(source), "seed {seed}: the provider has let go of all");
    for _ in 0..100 {
        ends.a.poll(8, &mut ends.here);
    }
    assert_eq!(ends.here.done.len() as u32, ends.written, "seed {seed}");
    let fates = ends.here.done.iter().map(|done| done.1);
    assert!(
        fates.clone().all(|fate| matches!(fate, Ok(()) | Err(CompleteError::PeerDown))),
        "seed {seed}"
    );
    assert_eq!(
        ends.here.down,
        [(Peer(7), PeerError::Lost)],
        "seed {seed}: the rail has one endpoint"
    );
    assert_eq!(ends.a.fence(Peer(7)), Fence::Fenced);
    assert_eq!(ends.a.stats().orphans, 0);
}

/// Both sides fence while the data of reads arrives. libfabric 1.17.0 frees the record of such a
/// read twice, so the rail must open another domain. All memory keeps its key, and the wait object
/// follows.
fn reads_are_cut(ask: &Ask<'_>, config: FabricConfig, seed: u64) {
    const LONG: usize = LEN * SLOTS / 2;
    let mut ends = Ends::new(ask, config, seed);
    let here = leaked(LEN * SLOTS);
    let (key, desc) = ends.a.register(&here).unwrap();
    ends.b.import(FROM, key, here.len() as u64).unwrap();
    let theirs: Vec<u8> = (0..ends.memory.len()).map(|at| (at / LEN) as u8 + 1).collect();
    // SAFETY: the memory is never freed, and no operation accesses it yet.
    unsafe { ends.memory.ptr().as_ptr().copy_from_nonoverlapping(theirs.as_ptr(), theirs.len()) };
    let wait = ends.a.wait().expect("tcp has a wait object");
    // SAFETY: the call creates a descriptor, and the rail is open and used by this thread only.
    let set = unsafe {
        let set = libc::epoll_create1(libc::EPOLL_CLOEXEC);
        wait.join(set).unwrap();
        set
    };
    let read = |ends: &mut Ends, at: usize, len: usize| {
        // SAFETY: the memory is longer than `at`.
        let local = Local { ptr: unsafe { here.ptr().add(at) }, len, desc };
        let remote = Remote { key: ends.key, offset: at as u64 };
        // SAFETY: the memory is never freed, and nothing else accesses it before the read is done.
        let posted = unsafe { ends.a.post_read(TO, local, remote, u64::from(ends.written)) };
        ends.written += posted.is_ok() as u32;
        posted.is_ok()
    };
    let mine = || {
        let mut bytes = vec![0; 8 * LEN];
        // SAFETY: the memory is never freed.
        unsafe { copy(here.ptr(), &mut bytes) };
        bytes
    };
    for _ in 0..4 {
        ends.until("a long read", |ends| read(ends, 0, LONG));
    }
    // SAFETY: the memory is never freed. The provider writes it, so the read is volatile.
    ends.until("data of a read", |_| unsafe { here.ptr().as_ptr().read_volatile() } != 0);
    assert_eq!(ends.b.fence(FROM), Fence::Fenced, "seed {seed}");
    rejoin(&mut ends, seed);
    for round in 1..6 {
        let done = [ends.here.done.len(), ends.there.done.len()];
        for n in 0..8 {
            ends.until("a short read", |ends| read(ends, n * LEN, LEN / 2));
            let bytes = [n as u8; 600];
            let post = |rail: &mut FabricRail, peer: Peer| {
                rail.post_message(peer, &bytes, Untrusted::from_slice(&[]), 0).is_ok()
            };
            ends.until("a message", |ends| post(&mut ends.a, TO));
            ends.until("a message", |ends| post(&mut ends.b, FROM));
        }
        ends.written += 8;
        ends.until("posts after the return", |ends| {
            let ended =
                ends.here.done.len() == done[0] + 16 && ends.there.done.len() == done[1] + 8;
            ended && ends.here.messages.len() == 8 * round && ends.there.messages.len() == 8 * round
        });
        for (at, peer, seen) in [(0, TO, &ends.here), (1, FROM, &ends.there)] {
            assert!(seen.done[done[at]..].iter().all(|done| done.1.is_ok()), "seed {seed}");
            let last = seen.messages[8 * (round - 1)..].iter().zip(0..);
            assert!(
                last.into_iter().all(|(message, n)| *message == (peer, vec![n; 600])),
                "seed {seed}"
            );
        }
        let halves = mine().chunks(LEN).zip(1..).all(|(slot, n)| slot[..LEN / 2] == [n; LEN / 2]);
        assert!(halves, "seed {seed}: round {round}");
    }
    let into = leaked(LEN);
    let (_, desc) = ends.b.register(&into).unwrap();
    let (local, remote) = (Local { ptr: into.ptr(), len: LEN, desc }, Remote { key, offset: 0 });
    let done = ends.there.done.len();
    // SAFETY: the memory is never freed, and nothing else accesses it before the read is done.
    unsafe { ends.b.post_read(FROM, local, remote, 0) }.unwrap();
    ends.until("a read under the key of the beginning", |ends| ends.there.done.len() > done);
    assert!(ends.there.done[done].1.is_ok(), "seed {seed}");
    let mut told = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: `told` has room for one event, the set is open until here, and the rail is open and
    // used by this thread only.
    let woken = unsafe {
        wait.may_sleep();
        let woken = libc::epoll_wait(set, &mut told, 1, 0);
        libc::close(set);
        woken
    };
    assert_eq!(woken, 1, "seed {seed}: completions make the set readable");
    assert_eq!(
        ends.a.stats().replaced,
        u32::from(ends.a.offer().frees_reads_twice()),
        "seed {seed}"
    );
}

/// Strangers, or peers whose packets are delayed, have connected to an end before its fence. Their
/// requests for the connections arrive afterwards. With the flawed version they must stay in the
/// old domain: otherwise the provider accesses freed memory, which need not show.
fn late_requests_stay_behind(ask: &Ask<'_>, config: FabricConfig, seed: u64) {
    let mut ends = Ends::new(ask, config, seed);
    ends.until("the first write", |ends| {
        ends.write();
        !ends.there.landed.is_empty()
    });
    let address = ends.b.address().unwrap();
    let inet = (libc::AF_INET as u16).to_ne_bytes();
    let at = address.windows(2).position(|two| two == inet).expect("an IPv4 address");
    let port = u16::from_be_bytes(address[at + 2..at + 4].try_into().unwrap());
    let host = Ipv4Addr::from(<[u8; 4]>::try_from(&address[at + 4..at + 8]).unwrap());
    let mut strangers: Vec<_> =
        (0..4).map(|_| TcpStream::connect((host, port)).expect("the end listens")).collect();
    let accepted = Instant::now() + Duration::from_millis(20);
    ends.until("time to accept", |_| Instant::now() > accepted);
    assert_eq!(ends.b.fence(FROM), Fence::Fenced, "seed {seed}");
    rejoin(&mut ends, seed);
    let flawed = u32::from(ends.b.offer().frees_reads_twice());
    assert_eq!(ends.b.stats().replaced, flawed, "seed {seed}: requests stay in the old domain");
    for (n, stranger) in strangers.iter_mut().enumerate() {
        let landed = ends.there.landed.len();
        // The end may have closed the connection.
        _ = stranger.write(&[n as u8; 41]);
        ends.until("writes beside a late request", |ends| {
            ends.write();
            ends.there.landed.len() > landed + 8
        });
    }
    drop(strangers);
    let landed = ends.there.landed.len();
    ends.until("writes afterwards", |ends| {
        ends.write();
        ends.there.landed.len() > landed + 8
    });
}

fn each(test: &str, count: u64, run: fn(&Ask<'_>, FabricConfig, u64)) {
    if let Some(why) = support::absent() {
        return println!("SKIPPED {test}: {why}");
    }
    let asks = [manual("tcp"), Ask::new("tcp")];
    for seed in seeds(count) {
        run(&asks[seed as usize % asks.len()], TRACKED, seed);
    }
}

#[test]
fn nothing_lands_behind_a_fence_over_tcp() {
    each("nothing_lands_behind_a_fence_over_tcp", 24, nothing_lands_behind);
}

#[test]
fn the_posts_of_the_end_that_fences_end_once_over_tcp() {
    each("the_posts_of_the_end_that_fences_end_once_over_tcp", 24, own_posts_end);
}

#[test]
fn a_rail_over_tcp_returns_after_a_fence_during_reads() {
    each("a_rail_over_tcp_returns_after_a_fence_during_reads", 4, reads_are_cut);
}

#[test]
fn other_providers_do_not_claim_to_fence() {
    if let Some(why) = support::absent() {
        return println!("SKIPPED other_providers_do_not_claim_to_fence: {why}");
    }
    for provider in ["shm", "tcp;ofi_rxm"] {
        let mut link = pair(&manual(provider), TRACKED, 1);
        assert_eq!(link.rails[1].fence(FROM), Fence::Unknown, "{provider}");
        assert_eq!(link.rails[1].fence(Peer(9)), Fence::Unknown, "{provider}: nobody");
        // The refused fences must not have changed anything.
        let mut seen = Seen::default();
        link.rails[1].poll(8, &mut seen);
        assert_eq!(seen.down, [], "{provider}");
    }
}

#[test]
fn a_fence_leaves_late_requests_for_connections_in_the_old_domain() {
    let test = "a_fence_leaves_late_requests_for_connections_in_the_old_domain";
    each(test, 6, late_requests_stay_behind);
}
