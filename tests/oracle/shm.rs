//! Runs the programs over the shared-memory rail, with mapped and unmapped target memory.

use std::time::{Duration, Instant};

use fishplate::core::mem::Peer;
use fishplate::core::sync::host::SpinHost;
use fishplate::shm::{Link, Role, Segment, ShmConfig, ShmRail, socket_pair};
use fishplate_core::engine::{Config, Notice, Signal};
use fishplate_core::error::PeerError;
use fishplate_core::op::{Fault, Outcome, SignalOp};

use crate::programs;
use crate::rig::{CONFIG, CX, Pair, Room, SIZE};

type Rails<const RAILS: usize> = [ShmRail<SpinHost>; RAILS];

/// Creates two rails, attached to each other as peer 0. The handshake takes two threads.
fn meet(config: &ShmConfig) -> [ShmRail<SpinHost>; 2] {
    let rail = || ShmRail::new(SpinHost::new(1), config.clone()).unwrap();
    let (mut near, mut far) = (rail(), rail());
    let (ours, theirs) = socket_pair().unwrap();
    let (profile, soon) = (far.profile(), Instant::now() + Duration::from_secs(20));
    let other =
        std::thread::spawn(move || Link::over(theirs, Role::First, &profile, soon).unwrap());
    let link = Link::over(ours, Role::Second, &near.profile(), soon).unwrap();
    near.attach(Peer(0), link).unwrap();
    far.attach(Peer(0), other.join().unwrap()).unwrap();
    [near, far]
}

fn ends<const RAILS: usize>(config: &ShmConfig) -> [Rails<RAILS>; 2] {
    let (near, far): (Vec<_>, Vec<_>) =
        (0..RAILS).map(|_| meet(config)).map(|[near, far]| (near, far)).unzip();
    [near, far].map(|rails| rails.try_into().unwrap_or_else(|_| unreachable!()))
}

/// Returns the settings of a group of programs. They vary the path of writes to private memory, and
/// the size of lanes.
fn config(group: u64) -> ShmConfig {
    let config = ShmConfig {
        max_regions: 8,
        max_segments: 4,
        timeout: Duration::from_secs(20),
        ..ShmConfig::default()
    };
    match group % 4 {
        // The kernel copies if it can.
        0 => config,
        1 => ShmConfig { force_staging: true, ..config },
        2 => ShmConfig { force_staging: true, lane_cells: 64, max_message: 512, ..config },
        _ => ShmConfig { lane_cells: 128, max_message: 1024, ..config },
    }
}

fn pair<const RAILS: usize>(
    group: u64,
    room: &mut Room<RAILS>,
) -> Pair<'_, ShmRail<SpinHost>, RAILS> {
    let first_sequence = [0, (1 << 20) - 40, u64::MAX - 100][group as usize % 3];
    // Writes are striped over both rails or use one rail. Staged writes need several chunks.
    let stripe_threshold = [512, CONFIG.stripe_threshold][group as usize / 4 % 2];
    let engine = Config { first_sequence, stripe_threshold, stripe_chunk: 256, ..CONFIG };
    Pair::new(room, engine, ends(&config(group)), Some(Segment::create(SIZE).unwrap()))
}

#[test]
fn memory_is_what_the_contract_allows_over_shared_memory() {
    programs("shared memory", 2000, pair::<1>);
}

#[test]
fn memory_is_what_the_contract_allows_over_two_rails_of_shared_memory() {
    programs("two rails of shared memory", 1000, pair::<2>);
}

/// A removed peer that is alive still applies the contents of the lane, so the operation's outcome
/// is unknown.
#[test]
fn operations_that_a_removed_peer_still_applies_have_an_unknown_outcome() {
    let config = ShmConfig { force_staging: true, ..ShmConfig::default() };
    let mut room = Room::new();
    let mut pair = Pair::new(&mut room, CONFIG, ends::<1>(&config), None);
    let (engine, to) = (&mut pair.a.engine, pair.targets[0].remote);
    // SAFETY: the range lies inside the source, which nothing reads yet.
    unsafe { pair.source.write_bytes(7, 8) };
    let signal = Signal { at: to.at(0), op: SignalOp::Set, value: 1 };
    engine.put_signal(CX, pair.from.at(0), 8, to.at(64), signal, Notice::Report(5)).unwrap();
    engine.remove_peer(pair.a.peer).unwrap();
    engine.progress();
    let end = engine.next_completion().unwrap();
    assert_eq!((end.tag, end.outcome), (5, Outcome::Unknown(Fault::Peer(PeerError::Removed))));
    // SAFETY: the word lies inside the target's region, and only this thread writes it.
    let word = |at: usize| unsafe { pair.targets[0].base.add(at).cast::<u64>().read_volatile() };
    assert_eq!([word(0), word(64)], [0, 0]);
    pair.b.engine.progress();
    assert_eq!([word(0), word(64)], [1, 0x0707_0707_0707_0707]);
}
