//! Two real processes exchange puts, signals, atomics and messages, shut down at any time, and exit
//! at once. Everything accepted arrives, and neither process reports the other as dead.

use std::ffi::OsStr;
use std::time::Duration;

use fishplate_core::engine::protocol::{MatchConfig, Payload, Received};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{Config, ContextId, Engine, Notice, Signal, Waiter};
use fishplate_core::error::{Missing, OpError, PeerError, Unfinished};
use fishplate_core::mem::RailId;
use fishplate_core::op::{Fault, Outcome, SignalOp};
use fishplate_core::sync::host::Host;
use fishplate_core::sync::spin::Policy;
use fishplate_shm::{Link, Listener, Segment, ShmConfig, connect};
use fishplate_sys::LinuxHost;

mod support;
use support::*;

const CX: ContextId = ContextId(0);
const SIZE: usize = 1 << 16;

fn sizes(staged: bool) -> ShmConfig {
    ShmConfig { force_staging: staged, lane_cells: 256, ..ShmConfig::default() }
}

struct Fate {
    sent: u64,
    got: u64,
    shut: Result<(), Unfinished>,
    error: Option<PeerError>,
}

/// Drains the completions. Returns the number of sends that no receive had matched before the
/// peer's Bye. Checks that all other operations were applied.
fn unmatched(engine: &mut Engine<'static, TestRail, 1>) -> u64 {
    let mut count = 0;
    while let Some(end) = engine.next_completion() {
        if end.outcome != Outcome::Done {
            assert_eq!(
                (end.tag, end.outcome),
                (2, Outcome::Failed(Fault::Peer(PeerError::Closed)))
            );
            count += 1;
        }
    }
    count
}

/// Sends for a while, and shuts down. If `mapped` is true, exports shared memory, so that signals
/// are written directly.
fn live(rail: TestRail, link: Link, seed: u64, mapped: bool, rounds: u64) -> Fate {
    let mut engine = engine(rail, CONFIG, MATCHING);
    let peer = engine.reserve_peer().unwrap();
    engine.rail_mut(RailId(0)).unwrap().attach(peer.peer(), link).unwrap();
    engine.connect_peer(peer, 1).unwrap();
    let segment: &Segment = Box::leak(Box::new(Segment::create(SIZE).unwrap()));
    let words = leak(0u64, SIZE / 8);
    let private = fishplate_core::mem::RegionKind::Private;
    // SAFETY: the memory is leaked, and accessed only by the engine.
    let region = unsafe {
        match mapped {
            true => segment.region(0, SIZE).unwrap(),
            false => fishplate_core::mem::Region::new(
                std::ptr::NonNull::from(&mut words[0]).cast(),
                SIZE,
                private,
            ),
        }
    };
    let at = region.ptr();
    let mine = engine.register(region).unwrap();
    let mut handle = [0; 512];
    let len = engine.export(mine, &mut handle).unwrap();
    let theirs =
        engine.rail_mut(RailId(0)).unwrap().exchange(peer.peer(), &handle[..len], soon()).unwrap();
    let remote = engine.import(peer, &theirs).unwrap();
    let signal = Signal { at: remote.at(0), op: SignalOp::Add, value: 1 };
    for n in 0..16 {
        let from = [None, Some(peer)][n % 2];
        engine
            .recv(from, Tag::ZERO, Tag::ALL, Some((mine.at(4096 + 512 * n as u64), 512)), 0)
            .unwrap();
    }
    let (mut sent, mut received) = (0, 0);
    for n in 0..rounds {
        let issued = match (n + seed) % 4 {
            0 => engine.signal(CX, signal, Notice::Silent),
            1 => {
                engine.put_signal(CX, mine.at(1024), 1000, remote.at(2048), signal, Notice::Silent)
            }
            2 => {
                engine.put_signal(CX, mine.at(1024), 64, remote.at(2048), signal, Notice::Report(1))
            }
            _ => engine.send(
                CX,
                peer,
                Tag::from(n),
                Payload::Bytes(&n.to_le_bytes()),
                Notice::Report(2),
            ),
        };
        match issued {
            Ok(_) => sent += 1,
            Err(OpError::Again) => {}
            Err(OpError::PeerFailed(PeerError::Closed)) => break,
            Err(error) => panic!("{error:?}"),
        }
        engine.progress();
        sent -= unmatched(&mut engine);
        while let Some(status) = engine.next_recv() {
            received += u64::from(status.outcome == Received::Ok);
            let buffer = Some((mine.at(4096), 512));
            let again = engine.recv(None, Tag::ZERO, Tag::ALL, buffer, 0);
            assert!(again.is_ok());
        }
    }
    let host = LinuxHost::shared();
    let wait_object = engine.rail(RailId(0)).unwrap().wait_object();
    let mut waiter = Waiter::new(&host, &*wait_object, Policy::LOW_LATENCY);
    let deadline = host.now_ns() + Duration::from_secs(20).as_nanos() as u64;
    let shut = engine.shutdown(&mut waiter, deadline);
    sent -= unmatched(&mut engine);
    while let Some(status) = engine.next_recv() {
        received += u64::from(status.outcome == Received::Ok);
    }
    // Receives the messages that no receive has matched yet.
    while let Ok(Some(_)) = engine.probe(Some(peer), Tag::ZERO, Tag::ALL) {
        let late =
            engine.recv(Some(peer), Tag::ZERO, Tag::ALL, Some((mine.at(4096), 512)), 0).unwrap();
        received += u64::from(engine.test_recv(late).unwrap().unwrap().outcome == Received::Ok);
    }
    // SAFETY: the word lies in registered memory, and both processes have stopped writing to it.
    let word = unsafe { at.cast::<u64>().as_ptr().read_volatile() };
    Fate { sent, got: word + received, shut, error: engine.peer_error(peer).unwrap() }
}

fn number(role: &str, at: usize) -> u64 {
    role.split(' ').nth(at).unwrap().parse().unwrap()
}

/// Plays the other process's role, and exits at once. The exit code is the number of successful
/// sends.
fn lives(role: &str, address: &OsStr) {
    let (staged, mapped) = (number(role, 1) == 1, number(role, 2) == 1);
    let rail = rail(sizes(staged));
    let link = connect(address, &rail.profile(), soon()).unwrap();
    let fate = live(rail, link, number(role, 3), mapped, number(role, 4));
    assert_eq!((fate.shut, fate.error), (Ok(()), Some(PeerError::Closed)));
    let results = std::env::var("FISHPLATE_RESULTS").unwrap();
    std::fs::write(results, format!("{} {}", fate.sent, fate.got)).unwrap();
    // SAFETY: the process ends here. The test skips the rail's drop on purpose.
    unsafe { libc::_exit(0) };
}

#[test]
fn child() {
    let Some((role, address)) = role() else { return };
    match role.split(' ').next().unwrap() {
        "lives" => lives(&role, &address),
        "idle" => {
            let rail = rail(sizes(false));
            let _link = connect(&address, &rail.profile(), soon()).unwrap();
            std::thread::sleep(Duration::from_secs(60));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn processes_that_shut_down_and_exit_lose_nothing_and_are_not_reported_dead() {
    let _alone = alone();
    for seed in 0..24u64 {
        let (staged, mapped) = (seed & 1, seed >> 1 & 1);
        let (ours, theirs) =
            ([0, 40, 700][seed as usize % 3], [300, 0, 1500, 20][(seed / 3) as usize % 4]);
        let results =
            std::env::temp_dir().join(format!("fishplate-goodbye-{}-{seed}", std::process::id()));
        // SAFETY: this process runs a single test, and no thread reads the environment meanwhile.
        unsafe { std::env::set_var("FISHPLATE_RESULTS", &results) };
        let rail = rail(sizes(staged == 1));
        let address = name();
        let listener = Listener::bind(&address).unwrap();
        let child = spawn(&format!("lives {staged} {mapped} {} {theirs}", seed + 1), &address);
        let link = listener.accept(&rail.profile(), soon()).unwrap();
        let fate = live(rail, link, seed, mapped == 1, ours);
        assert_eq!((fate.shut, fate.error), (Ok(()), Some(PeerError::Closed)), "seed {seed}");
        child.join();
        let said = std::fs::read_to_string(&results).unwrap();
        let _ = std::fs::remove_file(&results);
        let mut said = said.split(' ').map(|word| word.parse::<u64>().unwrap());
        assert_eq!((said.next(), said.next()), (Some(fate.got), Some(fate.sent)), "seed {seed}");
    }
}

#[test]
fn an_expired_shutdown_names_the_silent_process() {
    let _alone = alone();
    let rail = rail(sizes(false));
    let address = name();
    let listener = Listener::bind(&address).unwrap();
    let child = spawn("idle", &address);
    let link = listener.accept(&rail.profile(), soon()).unwrap();
    let mut engine = engine(rail, Config::DEFAULT, MatchConfig::DEFAULT);
    let peer = engine.reserve_peer().unwrap();
    engine.rail_mut(RailId(0)).unwrap().attach(peer.peer(), link).unwrap();
    engine.connect_peer(peer, 1).unwrap();
    let host = LinuxHost::shared();
    let wait_object = engine.rail(RailId(0)).unwrap().wait_object();
    let mut waiter = Waiter::new(&host, &*wait_object, Policy::LOW_LATENCY);
    let late = engine.shutdown(&mut waiter, host.now_ns() + 50_000_000);
    assert_eq!(late, Err(Unfinished { peer, peers: 1, missing: Missing::Answer }));
    drop(child);
    let deadline = host.now_ns() + Duration::from_secs(20).as_nanos() as u64;
    assert_eq!(engine.shutdown(&mut waiter, deadline), Ok(()));
    assert_eq!(engine.peer_error(peer), Ok(Some(PeerError::Died)));
}
