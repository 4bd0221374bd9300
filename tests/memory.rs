//! Memory cost of a peer with default settings and tag matching, in four states: unused, connected,
//! after a few messages, and busy.
#![cfg(target_os = "linux")]

use std::fs;
use std::ptr::NonNull;

use fishplate::{Limits, MatchStorage, Storage};
use fishplate_core::engine::protocol::{Account, BlockSlot, HeaderSlot, MatchConfig, Payload};
use fishplate_core::engine::tag::{Tag, UnexpectedSlot};
use fishplate_core::engine::{
    Config, ContextId, Engine, Notice, Pairing, Parked, PeerSlot, Signal, Stream,
};
use fishplate_core::error::OpError;
use fishplate_core::mem::{LocalId, PeerId, RailId, Region, RegionKind, RemoteId};
use fishplate_core::op::SignalOp;
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;

const PEERS: u16 = 1000;
/// Maximum number of peers. The last peer number is reserved for "no peer".
const MOST: u16 = u16::MAX;
const CX: ContextId = ContextId(0);
const MATCHING: MatchConfig = MatchConfig::for_streams(PEERS as usize);

type Rail = Faulty<Loopback<256>, 64>;

/// Returns the anonymous memory of this process in bytes.
fn resident() -> i64 {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")).unwrap();
    1024 * line.trim().trim_end_matches(" kB").parse::<i64>().unwrap()
}

/// Returns the bytes reserved per peer: its state, and its initial room for messages.
fn laid_out(config: &Config) -> (usize, usize) {
    let contexts = usize::from(config.contexts);
    let state = size_of::<PeerSlot>() + size_of::<Pairing>();
    let stream = size_of::<Stream>() + size_of::<Account>() + 8 * config.bitmap_words(1);
    let (credits, headers) = (MATCHING.credits as usize, MATCHING.headers as usize);
    let room = config.window as usize * size_of::<Parked>()
        + credits * (size_of::<BlockSlot>() + MATCHING.block())
        + headers * size_of::<HeaderSlot<4>>()
        + (credits + headers) * size_of::<UnexpectedSlot>();
    (state + contexts * stream, contexts * room)
}

/// An engine over one rail with many peers. Each peer is the engine itself.
struct World<'m> {
    engine: Engine<'m, Rail, 1>,
    peers: Vec<(PeerId, RemoteId)>,
    here: LocalId,
}

impl World<'_> {
    /// Calls `post` `times` times for each peer, and makes passes until everything has arrived.
    fn each(
        &mut self,
        times: u32,
        mut post: impl FnMut(&mut Engine<'_, Rail, 1>, &(PeerId, RemoteId), LocalId) -> bool,
    ) {
        for peer in &self.peers {
            for _ in 0..times {
                while !post(&mut self.engine, peer, self.here) {
                    self.engine.progress();
                }
            }
        }
        let mut idle = 0;
        while idle < 1000 {
            idle = if self.engine.progress() == 0 { idle + 1 } else { 0 };
        }
    }

    fn put_signal(&mut self, times: u32) {
        self.each(times, |engine, (_, there), here| {
            let signal = Signal { at: there.at(8), op: SignalOp::Add, value: 1 };
            match engine.put_signal(CX, here.at(16), 8, there.at(0), signal, Notice::Silent) {
                Ok(_) => true,
                Err(OpError::Again) => false,
                Err(error) => panic!("{error:?}"),
            }
        });
    }

    fn send(&mut self, times: u32) {
        self.each(times, |engine, (peer, _), _| {
            match engine.send(CX, *peer, Tag::from(7), Payload::Bytes(&[5; 64]), Notice::Silent) {
                Ok(_) => true,
                Err(OpError::Again) => false,
                Err(error) => panic!("{error:?}"),
            }
        });
    }

    fn faults(&mut self, faults: Faults) {
        // SAFETY: the injected faults affect no registered, imported or posted memory.
        unsafe { self.engine.rail_unchecked(RailId(0)) }.unwrap().set_faults(faults);
    }
}

/// Returns the resident bytes for `count` peers in four states: unused; connected; after one
/// put-signal and one unexpected message; busy, with a full reordered window and all credits used.
fn stages(count: u16, busy: bool) -> [i64; 4] {
    let config = Config::DEFAULT;
    let limits = Limits { peers: count, remotes: count, ..Limits::DEFAULT };
    let mut memory = vec![0u64; 512];
    let rail = Rail::new(Loopback::new(), Faults::NONE, 1);

    let before = resident();
    let mut storage = Storage::new(&config, limits);
    let mut matching = MatchStorage::new(&MATCHING, count.into(), 64, 64);
    let mut engine = storage.engine(config, [rail]).unwrap();
    engine.attach_matching(MATCHING, matching.memory()).unwrap();
    let unused = resident() - before;

    // SAFETY: the memory outlives the engine, and only the engine accesses it.
    let region =
        unsafe { Region::new(NonNull::from(&mut memory[0]).cast(), 4096, RegionKind::Private) };
    let here = engine.register(region).unwrap();
    let mut handle = [0; 512];
    let len = engine.export(here, &mut handle).unwrap();
    let mut peers = Vec::with_capacity(count.into());
    for _ in 0..count {
        let peer = engine.reserve_peer().unwrap();
        engine.connect_peer(peer, 1).unwrap();
        peers.push((peer, engine.import(peer, &handle[..len]).unwrap()));
    }
    let mut world = World { engine, peers, here };
    let connected = resident() - before;

    world.put_signal(1);
    world.send(1);
    let talked = resident() - before;
    if busy {
        world.faults(Faults::DISORDER);
        world.put_signal(2 * config.window);
        world.faults(Faults::NONE);
        world.send(MATCHING.credits - 1);
        let stats = world.engine.matching_stats();
        assert_eq!(stats.kept, u64::from(count) * u64::from(MATCHING.credits));
        assert!(world.engine.stats().arrivals_out_of_order > 0);
    }
    [unused, connected, talked, resident() - before]
}

#[test]
fn peers_cost_little_before_they_are_busy() {
    // Makes the allocator map large tables separately and unmap them when freed, so that earlier
    // frees do not affect the result. SAFETY: the call only sets a parameter of the allocator.
    assert_eq!(unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 10) }, 1);
    // The first run includes one-time costs of stack, allocator and engine.
    stages(1, true);
    let one = stages(1, false);
    let all = stages(PEERS, true);
    let each = |stage: usize| (all[stage] - one[stage]) / i64::from(PEERS - 1);
    let (state, room) = laid_out(&Config::DEFAULT);
    println!("reserved for each of {PEERS} peers: {state} bytes of state, {room} for its messages");
    assert!(state + room <= 16 << 10, "{state} + {room}");
    println!("resident for each: unused {} bytes, connected {},", each(0), each(1));
    println!("with a put-signal and a waiting message {}, busy {}", each(2), each(3));
    assert!(each(0) <= 650, "an unused peer costs {} bytes", each(0));
    assert!(each(1) <= 700, "a connected peer costs {} bytes", each(1));
    assert!(each(2) <= 6 << 10, "a peer that sent one message costs {} bytes", each(2));
    assert!(each(3) <= (state + room) as i64, "a busy peer costs {} bytes", each(3));

    let before = resident();
    let limits = Limits { peers: MOST, ..Limits::DEFAULT };
    let mut storage = Storage::<1>::new(&Config::DEFAULT, limits);
    let mut engine = storage.engine(Config::DEFAULT, [Loopback::<16>::new()]).unwrap();
    assert!(engine.reserve_peer().is_ok());
    let each = (resident() - before) / i64::from(MOST);
    println!("without matching, each of {MOST} unused peers: {each} bytes");
    assert!(each <= 330, "one of {MOST} peers costs {each} bytes");
}
