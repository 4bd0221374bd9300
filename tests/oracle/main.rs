//! Memory as the oracle: random programs over the rails that a machine without a NIC has, in one
//! process, and after each step a look at whether the contract allows what is in the target's
//! memory.
//!
//! A program is made from its seed. Programs of one group run one after the other over the same
//! pair of engines; `FISHPLATE_SEED` runs the one of that seed, after those of its group that come
//! before it. `FISHPLATE_PROGRAMS` sets how many run.

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

/// Programs that run over one pair.
const GROUP: u64 = 25;

/// Runs the groups of programs that are asked for, `usual` of them unless the environment says
/// otherwise. `pair` makes what a group runs over; the number of the group says what it is like.
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
        assert!(fences > 0 && messages > 0 && waiting > operations / 10, "nothing was under way: {total:?}");
    }
}
