//! Checks all operations against a model ([`support::oracle`](super::support::oracle)), over faulty
//! rails.

use fishplate_core::rail::sim::Dials;

use super::support::oracle;
use super::support::*;

fn run<const RAILS: usize>(seed: u64) {
    let dials = if Random(!seed).below(8) == 0 { Dials::CALM } else { Dials::WILD };
    oracle::run(seed, 100_000, |nodes, config, size| {
        fleet::plain::<RAILS>(nodes, dials, config, size, seed).1
    });
}

#[test]
fn streams_between_different_ends_match_the_model() {
    for seed in seeds(200) {
        match seed % 2 {
            0 => oracle::run(seed, 100_000, |nodes, config, size| {
                fleet::mixed::<4>(nodes, config, size, seed, |_| None)
            }),
            _ => oracle::run(seed, 100_000, |nodes, config, size| {
                fleet::mixed::<16>(nodes, config, size, seed, |_| None)
            }),
        }
    }
}

#[test]
fn streams_of_engines_with_few_rails_match_the_model() {
    for seed in seeds(90) {
        let count = 1 + (seed % 3) as u16;
        oracle::run(seed, 100_000, |nodes, config, size| {
            fleet::few::<16>(nodes, count, Dials::WILD, config, size, seed)
        });
    }
}

#[test]
fn streams_match_the_model() {
    for seed in seeds(400) {
        match seed % 4 {
            0 => run::<1>(seed),
            1 => run::<2>(seed),
            2 => run::<3>(seed),
            _ => run::<4>(seed),
        }
    }
}
