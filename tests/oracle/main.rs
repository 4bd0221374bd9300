//! Checks memory against the contract with random programs, in one process, over shared memory and
//! libfabric's tcp. After each step the model checks that the contract allows the present contents
//! of the target's memory.
//!
//! The seed determines a program. The programs of a group run one after the other over the same
//! pair of engines. `FISHPLATE_SEED` runs one program and the earlier programs of its group.
//! `FISHPLATE_PROGRAMS` sets the number of programs.

mod model;
mod program;
mod rig;
mod shm;
#[path = "../../core/tests/support/mod.rs"]
mod support;
mod tcp;

use fishplate_core::rail::Rail;

use program::Counts;
use rig::{Pair, Room};

/// Number of programs per pair of engines.
const GROUP: u64 = 25;

/// Runs groups of programs, `usual` programs by default. `pair` creates a pair of engines with
/// settings that depend on the group number.
fn programs<R: Rail, const RAILS: usize>(
    name: &str,
    usual: u64,
    pair: impl for<'m> Fn(u64, &'m mut Room<RAILS>) -> Pair<'m, R, RAILS>,
) {
    let set = |name| std::env::var(name).ok().map(|n| n.parse::<u64>().expect("a number"));
    let (first, last) = match set("FISHPLATE_SEED") {
        Some(seed) => (seed - seed % GROUP, seed),
        None => (0, set("FISHPLATE_PROGRAMS").unwrap_or(usual) - 1),
    };
    let (mut total, mut room) = (Counts::default(), Room::new());
    for group in first / GROUP..=last / GROUP {
        let mut pair = pair(group, &mut room);
        for seed in group * GROUP..=(group * GROUP + GROUP - 1).min(last) {
            match program::run(&mut pair, seed) {
                Ok(counts) => total.add(counts),
                Err(why) => panic!("{name}, FISHPLATE_SEED={seed}: {why}"),
            }
        }
    }
    println!("{name}: programs {first} to {last}: {total:?}");
    if last - first >= 2 * GROUP {
        let Counts { operations, fences, waiting, messages, .. } = total;
        assert!(
            fences > 0 && messages > 0 && waiting > operations / 10,
            "nothing was ever in flight: {total:?}"
        );
    }
}
