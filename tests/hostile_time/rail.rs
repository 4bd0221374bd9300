//! The victim, an engine over a rail of libfabric's tcp provider, and the honest peer.

use std::ffi::CString;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use fishplate::sys::LinuxHost;
use fishplate::sys::fabric::{Ask, FabricConfig, FabricRail, Library, Offer, negotiate};
use fishplate::{Limits, MatchStorage, Storage};
use fishplate_core::engine::protocol::{MatchConfig, Payload, Received};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{
    Asleep, Config, ContextId, Engine, HANDLE_MAX, Notice, Signal, Waiter,
};
use fishplate_core::error::{OpError, PeerError};
use fishplate_core::mem::{LocalId, PeerId, RailId, Region, RegionKind};
use fishplate_core::op::{Amo, AmoOp, SignalOp};

use crate::forks::{Forks, tell};
use crate::meter::{Meter, Took, repeat};
use crate::wire::{End, TRICKS};
use crate::{HONEST, RAIL, is_wanted, note, soon};

const CX: ContextId = ContextId(0);
pub const CONFIG: Config = Config { window: 16, ..Config::DEFAULT };
const MATCHING: MatchConfig = MatchConfig {
    eager: 512,
    credits: 4,
    headers: 8,
    shared_credits: 0,
    shared_headers: 0,
    shared_shorts: 0,
    pieces: 0,
    seed: 3,
};
const LIMITS: Limits = Limits { peers: 2, locals: 4, remotes: 8, operations: 48 };

/// Settings of the rails. The deadline is long enough for an honest peer on a loaded machine.
pub const FABRIC: FabricConfig = FabricConfig {
    max_peers: 4,
    max_message: 1024,
    depth: 32,
    receives: 64,
    bounces: 8,
    max_regions: 8,
    max_imports: 16,
    completions: 0,
    deadline: Some(Duration::from_secs(10)),
    inject: true,
    more: None,
    native_atomics: false,
    seed: None,
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

/// The size of the registered memory in bytes, and of the canaries before and after it.
pub const SIZE: usize = 1 << 16;
const EDGE: usize = 4096;
const CANARY: u64 = 0xc5c5_c5c5_c5c5_c5c5;

/// Number of rounds with the honest peer that must complete during each trick.
const ROUNDS: u64 = 10;

/// Returns the tcp provider's offer on the loopback interface, or the reason why it has none.
pub fn offer() -> Result<Offer, String> {
    let path = std::env::var("FISHPLATE_LIBFABRIC").ok().and_then(|path| CString::new(path).ok());
    // SAFETY: the loader's default libfabric, or the one that `FISHPLATE_LIBFABRIC` names, is a
    // libfabric.
    let library = unsafe { Library::open(path.as_deref()) }.map_err(|error| error.to_string())?;
    let ask = Ask { interface: Some("lo"), ..Ask::new("tcp") };
    negotiate(library, &ask).map_err(|error| error.to_string())
}

fn leak(bytes: usize) -> &'static mut [u64] {
    Box::leak(vec![CANARY; bytes / 8].into_boxed_slice())
}

fn engine(offer: &Offer) -> Engine<'static, FabricRail, 1> {
    let rail = FabricRail::open(offer, FABRIC).unwrap();
    let storage = Box::leak(Box::new((
        Storage::<1>::new(&CONFIG, LIMITS),
        MatchStorage::new(&MATCHING, LIMITS.peers.into(), 16, 4),
    )));
    let mut engine = storage.0.engine(CONFIG, [rail]).unwrap();
    engine.attach_matching(MATCHING, storage.1.memory()).unwrap();
    engine
}

fn address(engine: &Engine<'static, FabricRail, 1>) -> Vec<u8> {
    engine.rail(RailId(0)).unwrap().address().unwrap()
}

fn join(engine: &mut Engine<'static, FabricRail, 1>, address: &[u8]) -> PeerId {
    let peer = engine.reserve_peer().unwrap();
    engine.rail_mut(RailId(0)).unwrap().attach(peer.peer(), address).unwrap();
    engine.connect_peer(peer, 1).unwrap();
    peer
}

/// Plays the honest peer, which returns every message.
pub fn echo(offer: &Offer, victim: &[u8]) {
    let mut engine = engine(offer);
    tell(&address(&engine));
    let peer = join(&mut engine, victim);
    let at = leak(64);
    // SAFETY: the memory is leaked, and accessed only through raw copies and the engine.
    let region = unsafe { Region::new(NonNull::from(&mut at[0]).cast(), 64, RegionKind::Private) };
    let bytes = region.ptr();
    let region = engine.register(region).unwrap();
    engine.recv(Some(peer), THERE, Tag::ZERO, Some((region.at(0), 64)), 0).unwrap();
    while engine.peer_error(peer) == Ok(None) {
        if engine.progress() == 0 {
            std::thread::yield_now();
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

struct Victim {
    engine: Engine<'static, FabricRail, 1>,
    honest: PeerId,
    region: LocalId,
    memory: &'static mut [u64],
    posted: u64,
    /// Number of completed rounds with the honest peer.
    rounds: u64,
    /// True while a message to the honest peer waits for room.
    asks: bool,
    meter: Meter,
}

impl Victim {
    fn new(offer: &Offer) -> (Self, Forks) {
        let mut engine = engine(offer);
        let memory = leak(2 * EDGE + SIZE);
        let first = NonNull::from(&mut memory[EDGE / 8]).cast();
        // SAFETY: the memory is leaked, and the test reads it only between calls of the engine.
        let region =
            engine.register(unsafe { Region::new(first, SIZE, RegionKind::Private) }).unwrap();
        let mut forks = Forks::begin();
        forks.fork(&[&[HONEST][..], &address(&engine)].concat());
        let end = soon();
        let theirs = loop {
            if let Some(address) = forks.heard() {
                break address;
            }
            assert!(Instant::now() < end, "no honest process");
        };
        let honest = join(&mut engine, &theirs);
        let meter = Meter::new();
        let mut victim =
            Victim { engine, honest, region, memory, posted: 0, rounds: 0, asks: true, meter };
        while victim.rounds < ROUNDS {
            victim.turn();
            assert!(Instant::now() < end, "{} rounds", victim.rounds);
        }
        (victim, forks)
    }

    fn payload(round: u64) -> [u8; 64] {
        std::array::from_fn(|i| (round as u8).wrapping_mul(31).wrapping_add(i as u8))
    }

    /// Starts a round with the honest peer, once the engine has room.
    fn ask(&mut self) {
        let bytes = Self::payload(self.rounds);
        match self.engine.send(CX, self.honest, THERE, Payload::Bytes(&bytes), Notice::Silent) {
            Err(OpError::Again) => self.asks = true,
            Err(error) => panic!("{error}"),
            Ok(_) => {
                self.asks = false;
                let into = Some((self.region.at(ANSWERS), 64));
                self.engine.recv(Some(self.honest), BACK, Tag::ZERO, into, ANSWERS).unwrap();
            }
        }
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
            self.asks = true;
        }
        if self.asks {
            self.ask();
        }
        while self.posted < POSTED {
            let into = Some((self.region.at(self.posted * 1024), 1024));
            self.engine.recv(None, ANY, Tag::ZERO, into, self.posted).unwrap();
            self.posted += 1;
        }
        while self.engine.next_completion().is_some() {}
        if events == 0 {
            std::thread::yield_now();
        }
    }

    /// Forks a hostile process that plays a trick. Returns the victim's error for that peer, and
    /// the longest call.
    fn suffers(&mut self, hostile: &mut Forks, trick: usize) -> (Option<PeerError>, Took) {
        let (name, end, _) = TRICKS[trick];
        let (host, never) = (LinuxHost::shared(), Asleep::new());
        let mut waiter = Waiter::awake(&host, &never);
        let mut handle = [0; HANDLE_MAX];
        let len = self.engine.export(self.region, &mut handle).unwrap();
        hostile.fork(
            &[&[RAIL, trick as u8, len as u8], &handle[..len], &address(&self.engine)].concat(),
        );
        let deadline = soon();
        // Waits for the hostile process's message: the key and base of its memory, and its rail's
        // address.
        let theirs = loop {
            self.turn();
            if let Some(theirs) = hostile.heard() {
                break theirs;
            }
            assert!(Instant::now() < deadline, "{name}: no hostile process");
        };
        let peer = join(&mut self.engine, &theirs[16..]);
        handle[len - 16..len].copy_from_slice(&theirs[..16]);
        let there = self.engine.import(peer, &handle[..len]).unwrap();
        self.meter = Meter::new();
        let (mut has_played, mut rounds) = (false, self.rounds);
        let why = loop {
            self.turn();
            let Victim { engine, meter, region, .. } = self;
            let (from, at) = (region.at(ANSWERS), there.at(64));
            let signal = Signal { at: there.at(0), op: SignalOp::Add, value: 1 };
            let add = Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 };
            let bytes = Payload::Bytes(&[7; 100]);
            let _ = meter.call("send", || engine.send(CX, peer, ANY, bytes, Notice::Silent));
            let _ = meter.call("put", || engine.put(CX, from, 64, at, Notice::Silent));
            let _ = meter.call("long put", || engine.put(CX, from, 8192, at, Notice::Silent));
            let _ = meter.call("put_signal", || {
                engine.put_signal(CX, from, 1024, at, signal, Notice::Silent)
            });
            let _ = meter.call("get", || engine.get(CX, region.at(READ), 8192, at, Notice::Silent));
            let _ = meter.call("fetch", || engine.fetch(CX, at, add, 1));
            let _ = meter.call("quiet", || engine.quiet(CX, peer, &mut waiter, 1));
            let why = engine.peer_error(peer).unwrap();
            if !has_played && (hostile.heard().is_some() || why.is_some()) {
                (has_played, rounds) = (true, self.rounds);
            }
            let settled = end == End::Any || why.is_some();
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
        let mut edges = self.memory[..EDGE / 8].iter().chain(&self.memory[(EDGE + SIZE) / 8..]);
        assert!(edges.all(|word| *word == CANARY), "{name}: written outside");
        (why, self.meter.longest)
    }
}

#[test]
fn no_trick_over_tcp_delays_progress() {
    let offer = match offer() {
        Ok(offer) => offer,
        Err(why) => return println!("SKIPPED no_trick_over_tcp_delays_progress: {why}"),
    };
    let (mut victim, _honest) = Victim::new(&offer);
    let mut hostile = Forks::begin();
    let mut too_long = vec![];
    for (at, (name, end, _)) in TRICKS.iter().enumerate().filter(|(_, trick)| is_wanted(trick.0)) {
        let longest = repeat(|| {
            let (why, took) = victim.suffers(&mut hostile, at);
            let as_said = *end == End::Any || matches!(why, Some(PeerError::Protocol(_)));
            assert!(as_said, "{name}: {why:?}, not {end:?}");
            took
        });
        note(name, longest, &mut too_long);
    }
    assert!(TRICKS.len() >= 30);
    assert!(too_long.is_empty(), "too long: {too_long:#?}");
}
