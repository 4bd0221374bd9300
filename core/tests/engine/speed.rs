//! The combined throughput of rails with different speeds, on a simulated fabric, with the default
//! configuration.

use fishplate_core::engine::{Config, ContextId, Notice, RailPolicy, Signal};
use fishplate_core::rail::sim::Dials;

use super::support::fleet::{fabric, fleet, turn_until};

const PUT: usize = 1 << 20;
const PUTS: u64 = 256;

/// Returns the bytes per poll that two rails with these rates carry together.
fn together(rates: [u32; 2], policy: RailPolicy, dials: Dials) -> f64 {
    let config = Config { policy, ..Config::DEFAULT };
    let sim = fabric(2, 2, 1024, dials, 7);
    for (rail, rate) in rates.into_iter().enumerate() {
        sim.set_dials(rail as u16, Dials { rate, ..dials });
    }
    let mut nodes = fleet::<_, 2>(sim, 2, config, PUT, |_, _, end| end);
    let (mut issued, mut done) = (0, 0);
    let begun = sim.now();
    turn_until(&mut nodes, "all puts are done", |nodes| {
        let node = &mut nodes[0];
        while issued < PUTS && issued < done + 16 {
            let (from, to) = (node.source.at(0), node.remotes[1].at(0));
            node.engine.put(ContextId(0), from, PUT, to, Notice::Report(issued)).unwrap();
            issued += 1;
        }
        while node.engine.next_completion().is_some() {
            done += 1;
        }
        done == PUTS
    });
    (PUTS * PUT as u64) as f64 / (sim.now() - begun) as f64
}

/// Returns the bytes per poll of put-signals of `len` bytes, which complete in order, with at most
/// `depth` in flight. `change`: the rates from half of the bytes on.
fn in_order(rates: [u32; 2], change: Option<[u32; 2]>, len: usize, depth: u64, total: u64) -> f64 {
    let config = Config::DEFAULT;
    let sim = fabric(2, 2, 1024, QUICK, 7);
    let set = |rates: [u32; 2]| {
        for (rail, rate) in rates.into_iter().enumerate() {
            sim.set_dials(rail as u16, Dials { rate, ..QUICK });
        }
    };
    set(rates);
    let mut nodes = fleet::<_, 2>(sim, 2, config, PUT, |_, _, end| end);
    let (mut issued, mut done) = (0, 0);
    let (mut begun, count) = (sim.now(), total / len as u64);
    turn_until(&mut nodes, "all put-signals are done", |nodes| {
        let node = &mut nodes[0];
        while issued < count && issued < done + depth {
            let (from, to) = (node.source.at(0), node.remotes[1].at(8));
            let signal = Signal::add(node.remotes[1].at(0), 1);
            let notice = Notice::Report(issued);
            match node.engine.put_signal(ContextId(0), from, len - 8, to, signal, notice) {
                Ok(_) => issued += 1,
                Err(_) => break,
            }
        }
        while node.engine.next_completion().is_some() {
            done += 1;
            if let Some(rates) = change
                && done == count / 2
            {
                set(rates);
                begun = sim.now();
            }
        }
        done == count
    });
    let bytes = if change.is_some() { total / 2 } else { total };
    bytes as f64 / (sim.now() - begun) as f64
}

#[test]
fn put_signals_are_not_held_up_by_a_rail_that_is_slow_from_the_start() {
    for (slower, least) in [(1, 0.9), (3, 0.9), (10, 0.9), (100, 0.9), (1000, 0.85)] {
        for len in [64 << 10, PUT] {
            let rates = [8000, 8000 / slower];
            let sum = (rates[0] + rates[1]) as f64;
            let got = in_order(rates, None, len, 64, 1 << 30);
            println!("1:{slower}, {len} bytes: {:.3} of the sum", got / sum);
            assert!(got >= least * sum, "1:{slower}, {len} bytes: {:.3} of the sum", got / sum);
        }
    }
}

#[test]
fn rails_that_change_their_speed_are_found_out() {
    for (before, after, least) in [
        ([8000, 80], [8000, 8000], 0.75),
        ([8000, 2000], [2000, 8000], 0.9),
        // The posts outstanding on the rail that becomes slow hold up the window once.
        ([80, 8000], [8000, 80], 0.4),
    ] {
        let sum = (after[0] + after[1]) as f64;
        let got = in_order(before, Some(after), 64 << 10, 64, 1 << 30);
        println!("{before:?}, then {after:?}: {:.3} of the sum", got / sum);
        assert!(got >= least * sum, "{before:?}, then {after:?}: {:.3} of the sum", got / sum);
    }
}

const QUICK: Dials = Dials { min_delay: 4, max_delay: 12, ..Dials::CALM };

#[test]
fn two_unequal_rails_carry_nine_tenths_of_their_sum() {
    for rates in [[6144, 2048], [2048, 6144], [4096, 4096], [7168, 1024]] {
        for ordered in [true, false] {
            let sum = (rates[0] + rates[1]) as f64;
            let got = together(rates, RailPolicy::LeastOutstanding, Dials { ordered, ..QUICK });
            println!("{rates:?}: {:.3} of the sum", got / sum);
            assert!(got >= 0.9 * sum, "{rates:?}: {:.3} of the sum", got / sum);
        }
    }
}

#[test]
fn with_round_robin_the_slower_rail_sets_the_pace() {
    // Round robin is slower, for comparison with the policies above.
    let got = together([6144, 2048], RailPolicy::RoundRobin, QUICK);
    assert!(got < 0.6 * 8192.0, "{:.3} of the sum", got / 8192.0);
}
