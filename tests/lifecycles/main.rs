//! Tests lifecycles: random sequences of register, export, import, all operations, deregister,
//! release, remove, reattach, and drop during traffic. Both ends make them, over every rail, and
//! through a worker's queue or a matched queue. Every safe call, in any order, must take effect,
//! fail with an error, or do nothing. Deregistered memory is unmapped at once, so a late access
//! faults. Data must not appear in a region that was not its target.
//!
//! A failing program prints its seed. `FISHPLATE_SEED=n` runs the program with that seed,
//! `FISHPLATE_SEEDS=n` runs n programs over each rail. After a fault, run with `--nocapture`: the
//! last line that starts with `lifecycle` has the seed. `tests/sanitize.sh address` runs these
//! tests too.

#[path = "../../core/tests/support/mod.rs"]
#[allow(unused_imports, reason = "this uses its random numbers and seeds alone")]
mod behaviour;
mod end;
mod memory;
mod program;
mod users;
mod worlds;

use behaviour::seeds;
use program::{Tally, World};

/// Runs programs over one kind of rail, and prints their counters.
fn run<W: World<RAILS>, const RAILS: usize>(count: u64) -> Tally {
    let mut tally = Tally::default();
    for seed in seeds(count) {
        println!("lifecycle over {}: seed {seed}", W::NAME);
        program::run::<W, RAILS>(seed, &mut tally);
    }
    println!("lifecycles over {}: {tally:?}", W::NAME);
    tally
}

/// Checks that the programs together covered all counted events. Skips the check if only a few
/// programs ran.
fn is_whole(tally: &Tally) {
    if tally.programs >= 50 {
        assert!(tally.is_whole(), "{tally:?}");
    }
}

#[test]
fn over_loopback() {
    is_whole(&run::<worlds::Network, 1>(300));
}

#[test]
fn over_loopback_that_maps() {
    let tally = run::<worlds::Mapped, 1>(300);
    assert!(tally.programs < 50 || tally.imported_in_use > 0, "{tally:?}");
}

#[test]
fn over_a_simulated_fabric() {
    is_whole(&run::<worlds::Simulated, 1>(300));
}

#[test]
fn over_a_simulated_fabric_that_disorders() {
    is_whole(&run::<worlds::Disordered, 1>(200));
}

#[test]
fn over_two_rails_that_disorder() {
    is_whole(&run::<worlds::Two<false>, 2>(200));
}

#[test]
fn over_two_rails_of_which_one_is_disabled() {
    let tally = run::<worlds::Two<true>, 2>(200);
    is_whole(&tally);
    assert!(tally.programs < 50 || tally.disabled > 0 && tally.returned > 0, "{tally:?}");
}

#[test]
fn over_shared_memory() {
    is_whole(&run::<worlds::Shared, 1>(150));
}

#[test]
fn over_shared_memory_in_chunks() {
    is_whole(&run::<worlds::Staged, 1>(200));
}

#[test]
fn over_devices() {
    is_whole(&run::<worlds::Devices, 1>(300));
}

#[test]
fn over_libfabric() {
    let tally = run::<worlds::Fabric, 1>(180);
    is_whole(&tally);
    assert!(tally.programs < 180 || tally.done > 1000 && tally.received > 50, "{tally:?}");
}

#[test]
fn through_a_queue_and_its_worker() {
    is_whole(&run::<worlds::Queued, 1>(200));
}

#[test]
fn through_a_matched_queue() {
    let tally = run::<worlds::Matched, 1>(200);
    let program::Tally { done, received, failed, receives_in_use, .. } = tally;
    let whole = [done, received, failed, receives_in_use].iter().all(|count| *count > 0);
    assert!(tally.programs < 50 || whole, "{tally:?}");
}
