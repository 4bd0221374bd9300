//! Lifecycles: random sequences of register, export, import, every verb, deregister, release,
//! remove, attach again, and drop with traffic outstanding, by both ends, over every rail. Whatever
//! safe calls come in whatever order, each is carried out, refused with an error, or without
//! effect: memory that `deregister` gave back is taken away at once, so a late access faults, and
//! data never turns up in a region that it was not put into.
//!
//! Each program prints its seed if it fails; `FISHPLATE_SEED=n` runs one, `FISHPLATE_SEEDS=n` that
//! many over each rail. A fault says no seed: the last line that starts with `lifecycle` does, with
//! `--nocapture`. `tests/sanitize.sh address` runs these as well.

#[path = "../../core/tests/support/mod.rs"]
#[allow(unused_imports, reason = "this uses its random numbers and seeds alone")]
mod behaviour;
mod end;
mod memory;
mod program;
mod worlds;

use behaviour::seeds;
use program::{Tally, World};

/// Runs programs over one kind of rail, and says what they did.
fn run<W: World>(count: u64) -> Tally {
    let mut tally = Tally::default();
    for seed in seeds(count) {
        println!("lifecycle over {}: seed {seed}", W::NAME);
        program::run::<W>(seed, &mut tally);
    }
    println!("lifecycles over {}: {tally:?}", W::NAME);
    tally
}

/// Whether programs did all that they are for; a few of them need not.
fn is_whole(tally: &Tally) {
    if tally.programs >= 50 {
        assert!(tally.is_whole(), "{tally:?}");
    }
}

#[test]
fn over_loopback() {
    is_whole(&run::<worlds::Network>(300));
}

#[test]
fn over_loopback_that_maps() {
    let tally = run::<worlds::Mapped>(300);
    assert!(tally.programs < 50 || tally.imported_in_use > 0, "{tally:?}");
}

#[test]
fn over_a_simulated_fabric() {
    is_whole(&run::<worlds::Simulated>(300));
}

#[test]
fn over_a_simulated_fabric_that_disorders() {
    is_whole(&run::<worlds::Disordered>(200));
}

#[test]
fn over_shared_memory() {
    is_whole(&run::<worlds::Shared>(150));
}

#[test]
fn over_shared_memory_in_chunks() {
    is_whole(&run::<worlds::Staged>(200));
}

#[test]
fn over_devices() {
    is_whole(&run::<worlds::Devices>(300));
}

#[test]
fn over_libfabric() {
    is_whole(&run::<worlds::Fabric>(300));
}
