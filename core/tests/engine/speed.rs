//! The combined throughput of rails with different speeds, on a simulated fabric, with the default
//! configuration.

use fishplate_core::engine::{Config, ContextId, Notice, RailPolicy};
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
