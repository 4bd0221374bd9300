//! The victim: an engine that works with an honest peer in another process, and measures each call
//! while a hostile peer plays a trick.

use std::ffi::OsStr;
use std::io::{ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::ptr::NonNull;
use std::time::Instant;

use fishplate_core::engine::protocol::{Payload, Received};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{Asleep, ContextId, Engine, HANDLE_MAX, Notice, Signal, Waiter};
use fishplate_core::error::PeerError;
use fishplate_core::mem::{LocalId, PeerId, RailId, Region, RegionKind, RemoteId};
use fishplate_core::op::{Amo, AmoOp, SignalOp};
use fishplate_shm::{HandshakeError, Link, Listener, Profile, ShmConfig, connect};
use fishplate_sys::LinuxHost;

use crate::config;
use crate::forks::Forks;
use crate::meter::{Meter, Took};
use crate::raw::shared_key;
use crate::support::*;
use crate::tricks::{self, AT, End, KEY, SEGMENT, SIZE};

const CX: ContextId = ContextId(0);

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
pub const ROUNDS: u64 = 10;

/// Bytes of canaries before and after the registered memory.
const EDGE: usize = 4096;
const CANARY: u8 = 0xc5;

/// Plays the honest peer, which returns every message.
pub fn echo(address: &OsStr) {
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
pub struct Process {
    _child: Killed,
    line: UnixStream,
}

pub fn begin(role: &str, address: &str) -> Process {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let child = spawn_over(role, address, Stdio::from(OwnedFd::from(theirs)));
    Process { _child: child, line: ours }
}

impl Process {
    /// True if the process has played its trick or has exited.
    pub fn has_played(&mut self) -> bool {
        match self.line.read(&mut [0; 1]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            read => read.is_ok(),
        }
    }
}

pub struct Victim {
    pub engine: Engine<'static, TestRail, 1>,
    pub listener: Listener,
    pub address: String,
    pub profile: Profile,
    honest: PeerId,
    region: LocalId,
    memory: &'static mut [u8],
    posted: u64,
    /// Number of completed rounds with the honest peer.
    pub rounds: u64,
    pub meter: Meter,
}

impl Victim {
    pub fn new(config: ShmConfig) -> (Self, Process) {
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
    pub fn turn(&mut self) {
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
    pub fn suffers(&mut self, hostile: &mut Forks, trick: usize) -> (Option<PeerError>, Took) {
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

    /// Runs turns and accepts links until `done` returns true for the links. Returns the links.
    pub fn accepts(&mut self, mut done: impl FnMut(&[Link]) -> bool) -> Vec<Link> {
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
