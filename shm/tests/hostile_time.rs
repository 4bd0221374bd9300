//! Tests that no call on the progress path takes long, whatever a peer sends, withholds or passes
//! as a descriptor. Meanwhile honest peers must make progress.
//!
//! The victim is an engine over [`ShmRail`](fishplate_shm::ShmRail) in this process. The honest
//! peer and the hostile peer are separate processes. The hostile process plays one [trick](tricks)
//! and then waits until it is killed. Meanwhile the victim accesses the hostile process's memory. A
//! trick counts as slow if it delays a call in most attempts.

use std::ffi::OsStr;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::ptr::NonNull;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use fishplate_core::engine::protocol::{MatchConfig, Payload, Received};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{
    Asleep, Config, ContextId, Engine, HANDLE_MAX, Notice, Signal, Waiter,
};
use fishplate_core::error::PeerError;
use fishplate_core::mem::{LocalId, PeerId, RailId, Region, RegionKind, RemoteId};
use fishplate_core::op::{Amo, AmoOp, SignalOp};
use fishplate_shm::{HandshakeError, Link, Listener, Profile, ShmConfig, connect};
use fishplate_sys::LinuxHost;

#[allow(dead_code, reason = "these tricks tell nothing but that they were played")]
#[path = "hostile_time/forks.rs"]
mod forks;
#[path = "hostile_time/meter.rs"]
mod meter;
#[path = "support/raw.rs"]
mod raw;
mod support;
#[path = "hostile_time/tricks.rs"]
mod tricks;

use forks::Forks;
use meter::{LIMIT, Meter, Took, repeat};
use raw::{Raw, shared_key};
use support::*;
use tricks::{AT, End, KEY, MEMORY, SEGMENT, SIZE, played};

const CX: ContextId = ContextId(0);
const CONFIG: Config = Config { window: 16, ..Config::DEFAULT };
const MATCHING: MatchConfig = MatchConfig {
    eager: 1024,
    credits: 4,
    headers: 8,
    shared_credits: 0,
    shared_headers: 0,
    shared_shorts: 0,
    pieces: 0,
    seed: 3,
};

/// The tags of messages for any peer, of messages to the honest peer, and of the honest peer's
/// answers.
const ANY: Tag = Tag { lo: 1, hi: 0 };
const THERE: Tag = Tag { lo: 2, hi: 0 };
const BACK: Tag = Tag { lo: 3, hi: 0 };

/// Number of any-source receives, offset of the honest peer's answers, and offset of data read from
/// the hostile peer.
const POSTED: u64 = 6;
const ANSWERS: u64 = 32 << 10;
const READ: u64 = 48 << 10;

/// Number of rounds with the honest peer that must complete during each trick.
const ROUNDS: u64 = 10;

/// Bytes of canaries before and after the registered memory.
const EDGE: usize = 4096;
const CANARY: u8 = 0xc5;

fn config() -> ShmConfig {
    ShmConfig { timeout: Duration::from_millis(500), ..ShmConfig::default() }
}

/// Connects to the victim, as any process may.
fn connect_raw(address: &OsStr) -> OwnedFd {
    let name = address.as_encoded_bytes();
    // SAFETY: the address is built in a local structure, within its size. The descriptor is created
    // here, so nothing else owns it.
    unsafe {
        let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
        let mut at: libc::sockaddr_un = std::mem::zeroed();
        at.sun_family = libc::AF_UNIX as libc::sa_family_t;
        // In an abstract name a zero byte replaces the `@`.
        for (to, from) in at.sun_path[1..].iter_mut().zip(&name[1..]) {
            *to = *from as libc::c_char;
        }
        let len = std::mem::offset_of!(libc::sockaddr_un, sun_path) + name.len();
        assert_eq!(libc::connect(fd, (&raw const at).cast(), len as u32), 0);
        OwnedFd::from_raw_fd(fd)
    }
}

/// The entry point of the child processes. Does nothing in the parent.
#[test]
fn child() {
    let Some((role, address)) = role() else { return };
    if role == "honest" {
        return echo(&address);
    }
    if let Some((_, play)) = handshakes().into_iter().find(|(name, _)| *name == role) {
        return play(Raw::new(connect_raw(&address), &config()));
    }
    if role == STRANGERS.0 {
        return strangers(&address);
    }
    let trick = |at: usize, address: &OsStr| {
        let mut raw = Raw::new(connect_raw(address), &config());
        tricks::lend(&mut raw);
        (tricks::all().nth(at).unwrap().2)(&mut raw);
        played();
        // Keeps the connection open.
        std::mem::forget(raw);
    };
    if role != forks::ROLE {
        trick(tricks::all().position(|(name, ..)| *name == role).unwrap(), &address);
        return wait_for_the_end();
    }
    forks::serve(|order| trick(order[0].into(), OsStr::from_bytes(&order[1..])));
}

/// The role of the process that connects many strangers, and the number of strangers.
const STRANGERS: (&str, usize) = ("strangers", 20);

/// Connects to the victim many times, each time as another stranger. Each connection leaves 16
/// descriptors that block when they are closed.
fn strangers(address: &OsStr) {
    // Raises the descriptor limit, because this process has inherited the victim's low limit.
    std::mem::forget(Limited::to(2048));
    for n in 0..STRANGERS.1 {
        let all: [OwnedFd; 16] = std::array::from_fn(|_| tricks::lingering());
        let raw = Raw::new(connect_raw(address), &config());
        assert!(raw.send(&raw::packet(raw::BLOB, &[]), &all.each_ref()));
        // Half of the strangers stay connected.
        if n % 2 == 0 {
            std::mem::forget(raw);
        }
    }
    played();
    wait_for_the_end();
}

/// Waits until the victim hangs up or kills this process.
fn wait_for_the_end() {
    // SAFETY: the buffer is a local byte. Descriptor 0 is the connection to the victim.
    unsafe { libc::read(0, [0u8; 1].as_mut_ptr().cast(), 1) };
}

/// Plays the honest peer, which returns every message.
fn echo(address: &OsStr) {
    let rail = rail(config());
    let link = connect(address, &rail.profile(), soon()).unwrap();
    let mut engine = engine(rail, CONFIG, MATCHING);
    let peer = engine.reserve_peer().unwrap();
    engine.rail_mut(RailId(0)).unwrap().attach(peer.peer(), link).unwrap();
    engine.connect_peer(peer, 1).unwrap();
    let at = leak(0u64, 8);
    // SAFETY: the memory is leaked, and accessed only through raw copies and the engine.
    let region = unsafe { Region::new(NonNull::from(&mut at[0]).cast(), 64, RegionKind::Private) };
    let bytes = region.ptr();
    let region = engine.register(region).unwrap();
    engine.recv(Some(peer), THERE, Tag::ZERO, Some((region.at(0), 64)), 0).unwrap();
    while engine.peer_error(peer) == Ok(None) {
        if engine.progress() == 0 {
            std::thread::yield_now();
            engine.check_peers();
        }
        if engine.next_recv().is_some_and(|status| status.outcome == Received::Ok) {
            // SAFETY: the region is 64 bytes long, and nothing writes to it before the next receive
            // is posted.
            let answer: [u8; 64] = unsafe { bytes.cast().read() };
            engine.send(CX, peer, BACK, Payload::Bytes(&answer), Notice::Silent).unwrap();
            engine.recv(Some(peer), THERE, Tag::ZERO, Some((region.at(0), 64)), 0).unwrap();
        }
    }
}

/// A child process that plays a role, and the connection to it. Dropping it kills the child.
struct Process {
    _child: Killed,
    line: UnixStream,
}

fn begin(role: &str, address: &str) -> Process {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env("FISHPLATE_ROLE", role)
        .env("FISHPLATE_ADDRESS", address)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    Process { _child: Killed(child), line: ours }
}

impl Process {
    /// True if the process has played its trick or has exited.
    fn has_played(&mut self) -> bool {
        match self.line.read(&mut [0; 1]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            read => read.is_ok(),
        }
    }
}

struct Victim {
    engine: Engine<'static, TestRail, 1>,
    listener: Listener,
    address: String,
    profile: Profile,
    honest: PeerId,
    region: LocalId,
    memory: &'static mut [u8],
    posted: u64,
    /// Number of completed rounds with the honest peer.
    rounds: u64,
    meter: Meter,
}

impl Victim {
    fn new(config: ShmConfig) -> (Self, Process) {
        let rail = rail(config);
        let (profile, address) = (rail.profile(), name());
        let listener = Listener::bind(&address).unwrap();
        let mut engine = engine_of(rail, 2, CONFIG, MATCHING);
        let memory = leak(CANARY, 2 * EDGE + SIZE);
        // Places the canaries so that the memory between them is aligned.
        let at = memory[EDGE - 8..].as_ptr().align_offset(8) + EDGE - 8;
        let first = NonNull::from(&mut memory[at]);
        // SAFETY: the memory is leaked, and the test reads it only between calls of the engine.
        let region = unsafe { Region::new(first, SIZE, RegionKind::Private) };
        let region = engine.register(region).unwrap();
        let honest = begin("honest", &address);
        let peer = engine.reserve_peer().unwrap();
        let link = listener.accept(&profile, soon()).unwrap();
        engine.rail_mut(RailId(0)).unwrap().attach(peer.peer(), link).unwrap();
        engine.connect_peer(peer, 1).unwrap();
        let mut victim = Victim {
            engine,
            listener,
            address,
            profile,
            honest: peer,
            region,
            memory,
            posted: 0,
            rounds: 0,
            meter: Meter::new(),
        };
        victim.ask();
        while victim.rounds < ROUNDS {
            victim.turn();
        }
        (victim, honest)
    }

    fn payload(round: u64) -> [u8; 64] {
        std::array::from_fn(|i| (round as u8).wrapping_mul(31).wrapping_add(i as u8))
    }

    /// Starts a round with the honest peer.
    fn ask(&mut self) {
        let into = Some((self.region.at(ANSWERS), 64));
        self.engine.recv(Some(self.honest), BACK, Tag::ZERO, into, ANSWERS).unwrap();
        let bytes = Self::payload(self.rounds);
        self.engine.send(CX, self.honest, THERE, Payload::Bytes(&bytes), Notice::Silent).unwrap();
    }

    /// Runs one turn of normal work, and measures each call.
    fn turn(&mut self) {
        let Victim { engine, meter, .. } = self;
        let events = meter.call("progress", || engine.progress());
        meter.call("check_peers", || engine.check_peers());
        while let Some(status) = self.engine.next_recv() {
            if status.word != ANSWERS {
                self.posted -= 1;
                continue;
            }
            assert_eq!(status.outcome, Received::Ok, "from the honest peer");
            let at = self.engine.local_ptr(self.region.at(ANSWERS), 64).unwrap();
            // SAFETY: the 64 bytes lie in the region, and nothing writes to them before the next
            // receive is posted.
            let answer: [u8; 64] = unsafe { at.cast().read() };
            assert_eq!(answer, Self::payload(self.rounds), "round {}", self.rounds);
            self.rounds += 1;
            self.ask();
        }
        while self.posted < POSTED {
            let into = Some((self.region.at(self.posted * 1024), 1024));
            self.engine.recv(None, ANY, Tag::ZERO, into, self.posted).unwrap();
            self.posted += 1;
        }
        if events == 0 {
            std::thread::yield_now();
        }
    }

    /// Imports memory of a hostile peer: the region with this key and base.
    fn import(&mut self, peer: PeerId, key: u64, base: u64) -> Option<RemoteId> {
        // The key and the base of our own region end the handle.
        let mut handle = [0; HANDLE_MAX];
        let len = self.engine.export(self.region, &mut handle).unwrap();
        handle[len - 16..len - 8].copy_from_slice(&key.to_le_bytes());
        handle[len - 8..len].copy_from_slice(&base.to_le_bytes());
        self.engine.import(peer, &handle[..len]).ok()
    }

    /// Starts every kind of operation on memory of a hostile peer. The peer may be dead or may
    /// never answer.
    fn uses(&mut self, peer: PeerId, there: RemoteId) {
        let Victim { engine, meter, region, .. } = self;
        let (from, at) = (region.at(ANSWERS), there.at(64));
        let signal = Signal { at: there.at(0), op: SignalOp::Add, value: 1 };
        let add = Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 };
        let _ = meter.call("put", || engine.put(CX, from, 64, at, Notice::Silent));
        let _ = meter.call("long put", || engine.put(CX, from, 8192, at, Notice::Silent));
        let _ = meter
            .call("put_signal", || engine.put_signal(CX, from, 1024, at, signal, Notice::Silent));
        let _ = meter.call("get", || engine.get(CX, region.at(READ), 8192, at, Notice::Silent));
        let _ = meter.call("amo", || engine.amo(CX, at, add, Notice::Silent));
        let _ = meter.call("fetch", || engine.fetch(CX, at, add, 1));
        let _ = meter.call("fence", || engine.fence(CX, peer));
    }

    /// Forks a hostile process that plays a trick. Returns the victim's error for that peer, and
    /// the longest call.
    fn suffers(&mut self, hostile: &mut Forks, trick: usize) -> (Option<PeerError>, Took) {
        let (name, end, _) = tricks::all().nth(trick).unwrap();
        hostile.fork(&[&[trick as u8], self.address.as_bytes()].concat());
        let (host, never) = (LinuxHost::shared(), Asleep::new());
        let mut waiter = Waiter::awake(&host, &never);
        let link = self.listener.accept(&self.profile, soon()).unwrap();
        let peer = self.engine.reserve_peer().unwrap();
        self.engine.rail_mut(RailId(0)).unwrap().attach(peer.peer(), link).unwrap();
        self.engine.connect_peer(peer, 1).unwrap();
        let lent = [(KEY, AT), (shared_key(0, SEGMENT), 0)]
            .map(|(key, base)| self.import(peer, key, base));
        self.meter = Meter::new();
        let deadline = soon();
        let (mut has_played, mut rounds) = (false, self.rounds);
        let why = loop {
            self.turn();
            let Victim { engine, meter, .. } = self;
            // Also sends to the hostile peer. That peer need not read the message.
            let bytes = Payload::Bytes(&[7; 100]);
            let _ = meter.call("send", || engine.send(CX, peer, ANY, bytes, Notice::Silent));
            let _ = meter.call("quiet", || engine.quiet(CX, peer, &mut waiter, 1));
            lent.iter().flatten().for_each(|there| self.uses(peer, *there));
            while self.engine.next_completion().is_some() {}
            let why = self.engine.peer_error(peer).unwrap();
            if !has_played && (hostile.heard().is_some() || why.is_some()) {
                (has_played, rounds) = (true, self.rounds);
            }
            let settled = match end {
                End::Blamed | End::Gone => why.is_some(),
                End::Harmless | End::Either | End::Unreachable => true,
            };
            if has_played && settled && self.rounds >= rounds + ROUNDS {
                break why;
            }
            let done = self.rounds - rounds;
            assert!(
                Instant::now() < deadline,
                "{name}: played {has_played}, {why:?}, {done} rounds"
            );
        };
        let Victim { engine, meter, .. } = self;
        meter.call("remove_peer", || engine.remove_peer(peer)).unwrap();
        let first = self.engine.local_ptr(self.region.at(0), SIZE).unwrap().as_ptr();
        let first = first.addr() - self.memory.as_ptr().addr();
        let edges = self.memory[..first].iter().chain(&self.memory[first + SIZE..]);
        assert!(edges.into_iter().all(|byte| *byte == CANARY), "{name}: written outside");
        (why, self.meter.longest)
    }
}

/// Like [`alone`], but closes descriptors in threads, as real programs do, because a close may
/// block.
fn alone_with_a_closer() -> MutexGuard<'static, ()> {
    let alone = alone();
    fishplate_shm::set_closer(|| drop(std::thread::spawn(fishplate_shm::close_aside)));
    alone
}

/// Lets hostile processes play all tricks except the first `skipped`. Checks the victim's error
/// after each trick, and that no call takes too long.
fn play(config: ShmConfig, skipped: usize) {
    let _alone = alone_with_a_closer();
    let (mut victim, _honest) = Victim::new(config);
    let wanted = std::env::var("FISHPLATE_TRICK").unwrap_or_default();
    let mut hostile = Forks::begin();
    let mut too_long = Vec::new();
    let chosen =
        tricks::all().enumerate().skip(skipped).filter(|(_, trick)| trick.0.contains(&wanted));
    for (at, (name, end, _)) in chosen {
        let before = held();
        let longest = repeat(|| {
            let (why, took) = victim.suffers(&mut hostile, at);
            nothing_left(before, name);
            let as_said = match end {
                End::Blamed => matches!(why, Some(PeerError::Protocol(_))),
                // A copy to or from a dead process may fail before the victim notices the death.
                End::Gone => {
                    matches!(why, Some(PeerError::Died | PeerError::Closed | PeerError::Rail(_)))
                }
                End::Harmless => why.is_none(),
                End::Either => matches!(why, None | Some(PeerError::Protocol(_))),
                End::Unreachable => matches!(why, None | Some(PeerError::Rail(_))),
            };
            assert!(as_said, "{name}: {why:?}, not {end:?}");
            took
        });
        println!("{:>9.3} ms in {:<12} {name}", longest.0.as_secs_f64() * 1e3, longest.1);
        if longest.0 > LIMIT {
            too_long.push((name, longest));
        }
    }
    assert!(MEMORY.len() >= 40);
    assert!(too_long.is_empty(), "longer than {LIMIT:?}: {too_long:#?}");
}

#[test]
fn no_trick_delays_progress() {
    play(config(), 0);
}

#[test]
fn no_trick_delays_progress_with_staging() {
    // Packets do not depend on staging, so this test skips their tricks.
    play(ShmConfig { force_staging: true, ..config() }, tricks::PACKETS.len());
}

#[test]
fn a_planted_wait_is_detected_and_load_is_not() {
    let _alone = alone_with_a_closer();
    let mut meter = Meter::new();
    meter.call("sleeps", || std::thread::sleep(Duration::from_millis(20)));
    assert!(meter.longest.0 > LIMIT && meter.longest.1 == "sleeps", "{:?}", meter.longest);
    let mut meter = Meter::new();
    meter.call("works", || (0..100_000_000u64).fold(1, |x, n| std::hint::black_box(x ^ n)));
    assert!(meter.longest.0 > LIMIT, "{:?}", meter.longest);
    // Starts four threads per processor, so that each thread waits for a processor much longer than
    // it runs.
    let end = Instant::now() + Duration::from_millis(300);
    let count = 4 * std::thread::available_parallelism().unwrap().get();
    let busy: Vec<_> =
        (0..count).map(|_| std::thread::spawn(move || while Instant::now() < end {})).collect();
    let mut shortest = Duration::MAX;
    for _ in 0..10 {
        let mut meter = Meter::new();
        meter.call("computes", || (0..100_000u64).fold(1, |x, n| std::hint::black_box(x ^ n)));
        shortest = shortest.min(meter.longest.0);
    }
    busy.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(shortest <= LIMIT, "{shortest:?}");
    // Eight attempts: a trick counts as slow if it delays seven, but not if it delays the first
    // five.
    let slow_if = |slow: fn(u32) -> bool| {
        let mut n = 0;
        repeat(|| {
            n += 1;
            (if slow(n) { 2 * LIMIT } else { LIMIT }, "")
        })
    };
    assert!(slow_if(|n| n % 8 != 1).0 > LIMIT && slow_if(|n| n < 6).0 <= LIMIT);
}

/// The name of a trick, and the function that plays it.
type Approach = (&'static str, fn(Raw));

/// Returns the tricks that replace a handshake.
fn handshakes() -> [Approach; 5] {
    [
        ("a socket that lingers instead of a Hello", |raw| {
            raw.send(&raw::packet(raw::BLOB, &[]), &[&tricks::lingering()]);
            wait_for_the_end();
        }),
        ("a socket that lingers with the Hello", |raw| {
            let hello = raw.recv();
            raw.send(&hello, &[&tricks::lingering()]);
            wait_for_the_end();
        }),
        ("sockets that linger in the Offer", |mut raw| {
            raw.hello([7; 16]);
            let both = [&tricks::lingering(), &tricks::lingering()];
            raw.send(&raw::packet(raw::OFFER, &raw.theirs), &both);
            wait_for_the_end();
        }),
        ("sockets that linger behind noise", |raw| {
            raw.send(&[0xee; 10], &[]);
            raw.send(&[], &[&tricks::lingering()]);
            raw.send(&[0xee; 10], &[&tricks::lingering()]);
            played();
            wait_for_the_end();
        }),
        ("a Ready from nobody", |mut raw| {
            raw.hello([7; 16]);
            raw.offer();
            raw.send(&raw::packet(raw::READY, &[0; 16]), &[]);
            wait_for_the_end();
        }),
    ]
}

/// Polls a listener until it refuses a client. Returns the longest call.
fn refuses(listener: &Listener, profile: &Profile, name: &str) -> Took {
    let (mut meter, end) = (Meter::new(), soon());
    loop {
        let met = meter.call("accept", || listener.accept(profile, Instant::now()));
        assert!(matches!(met, Err(HandshakeError::Deadline)), "{name}: {met:?}");
        let refused = listener.refused();
        assert!(Instant::now() < end, "{name}: not refused");
        match refused.first() {
            None => std::thread::yield_now(),
            Some((_, HandshakeError::Deadline)) => panic!("{name}: {refused:?}"),
            Some(_) => return meter.longest,
        }
    }
}

#[test]
fn no_trick_in_a_handshake_delays_a_listener() {
    let _alone = alone_with_a_closer();
    let rail = rail(config());
    let (profile, address) = (rail.profile(), name());
    let listener = Listener::bind(&address).unwrap();
    for (name, _) in handshakes() {
        let before = held();
        let longest = repeat(|| {
            let _hostile = begin(name, &address);
            refuses(&listener, &profile, name)
        });
        assert!(longest.0 <= LIMIT, "{name}: {longest:?}");
        nothing_left(before, name);
    }
}

#[test]
fn unaccepted_descriptors_do_not_delay_a_hang_up() {
    let _alone = alone_with_a_closer();
    let address = name();
    let listener = Listener::bind(&address).unwrap();
    let mut hostile = begin("sockets that linger behind noise", &address);
    while !hostile.has_played() {
        std::thread::yield_now();
    }
    let began = Instant::now();
    drop(listener);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

/// Lowers this process's limit of open descriptors, until dropped.
struct Limited(libc::rlimit);

impl Limited {
    fn to(most: u64) -> Self {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the call fills a local structure.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) }, 0);
        Self::set(&libc::rlimit { rlim_cur: most, ..limit });
        Limited(limit)
    }

    fn set(limit: &libc::rlimit) {
        // SAFETY: the call reads a structure that outlives it.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, limit) }, 0);
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        Self::set(&self.0);
    }
}

impl Victim {
    /// Runs turns and accepts links until `done` returns true for the links. Returns the links.
    fn accepts(&mut self, mut done: impl FnMut(&[Link]) -> bool) -> Vec<Link> {
        let (mut links, end) = (Vec::new(), soon());
        while !done(&links) {
            assert!(Instant::now() < end, "{} accepted, {:?} held", links.len(), held());
            self.turn();
            let Victim { listener, profile, meter, .. } = self;
            match meter.call("accept", || listener.accept(profile, Instant::now())) {
                Ok(link) => links.push(link),
                Err(error) => assert_eq!(error, HandshakeError::Deadline),
            }
        }
        links
    }
}

#[test]
fn strangers_leave_few_descriptors_and_do_not_delay_progress() {
    let _alone = alone();
    // Closes nothing, like a closer with only blocked threads.
    fishplate_shm::set_closer(|| {});
    let (mut victim, _honest) = Victim::new(config());
    let limited = Limited::to(64);
    let before = held().0;
    victim.meter = Meter::new();
    let first = begin(STRANGERS.0, &victim.address);
    victim.accepts(|_| held().0 == before + 1 + STRANGERS.1);
    let honest = begin("honest", &victim.address);
    victim.accepts(|links| links.len() == 1);
    drop(honest);

    // The strangers accepted so far use half of the 64 descriptors. Others wait in the backlog.
    let mut second = begin(STRANGERS.0, &victim.address);
    while !second.has_played() {
        std::thread::yield_now();
    }
    let mut calls = 0;
    victim.accepts(|_| {
        calls += 1;
        calls > 1000
    });
    assert_eq!(held().0, before + 2 + 32);
    drop((first, second));
    fishplate_shm::close_aside();
    let honest = begin("honest", &victim.address);
    victim.accepts(|links| links.len() == 1);
    drop((honest, limited));
    fishplate_shm::close_aside();
    assert_eq!(held().0, before);
    assert!(victim.meter.longest.0 <= LIMIT, "{:?}", victim.meter.longest);
}

#[test]
fn without_free_descriptors_progress_does_not_wait() {
    let _alone = alone_with_a_closer();
    let (mut victim, _honest) = Victim::new(config());
    let mut hostile = begin("a socket that lingers as a segment", &victim.address);
    let link = victim.listener.accept(&victim.profile, soon()).unwrap();
    let peer = victim.engine.reserve_peer().unwrap();
    victim.engine.rail_mut(RailId(0)).unwrap().attach(peer.peer(), link).unwrap();
    victim.engine.connect_peer(peer, 1).unwrap();
    while !hostile.has_played() {
        std::thread::yield_now();
    }
    victim.meter = Meter::new();
    // Lowers the limit to the lowest free descriptor, so that no descriptor can be opened.
    let lowest = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let limited = Limited::to(lowest.as_raw_fd() as u64);
    drop(lowest);
    let rounds = victim.rounds + ROUNDS;
    while victim.rounds < rounds {
        victim.turn();
    }
    assert_eq!(victim.engine.peer_error(peer), Ok(None), "its packet is still in the socket");
    drop(limited);
    let end = soon();
    while victim.engine.peer_error(peer) == Ok(None) {
        assert!(Instant::now() < end);
        victim.turn();
    }
    let Victim { engine, meter, .. } = &mut victim;
    meter.call("remove_peer", || engine.remove_peer(peer)).unwrap();
    assert!(victim.meter.longest.0 <= LIMIT, "{:?}", victim.meter.longest);
}
