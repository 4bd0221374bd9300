//! Runs engines over real providers with several rails each, and checks them against the model of
//! core's tests. Up to three engines exchange random puts, put-signals, signals, atomics of all
//! widths, gets, fences and quiets, and also put to themselves.

use std::time::Duration;

use fishplate_core::engine::Config;
use fishplate_core::mem::{Peer, RailId};
use fishplate_sys::fabric::persona::Notify;
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail};

use crate::behaviour::{fleet, lives, oracle, seeds};
use crate::support;

/// Small tables that fill up. The deadline suits a loaded machine, because no peer dies here.
const CONFIG: FabricConfig =
    FabricConfig { deadline: Some(Duration::from_secs(20)), ..support::SMALL };

pub(super) fn join<const RAILS: usize>(
    ask: &Ask<'_>,
    config: FabricConfig,
    seed: u64,
    nodes: u16,
    engines: Config,
    size: usize,
) -> Vec<fleet::Node<FabricRail, RAILS>> {
    let number = |node: u16, rail: usize| seed << 16 | (rail as u64) << 8 | node as u64;
    let mut rails: Vec<[FabricRail; RAILS]> = (0..nodes)
        .map(|node| std::array::from_fn(|rail| support::open(ask, config, number(node, rail))))
        .collect();
    let addresses: Vec<[Vec<u8>; RAILS]> =
        rails.iter().map(|node| node.each_ref().map(|rail| rail.address().unwrap())).collect();
    for (own, node) in rails.iter_mut().enumerate() {
        for (at, rail) in node.iter_mut().enumerate() {
            for (peer, theirs) in addresses.iter().enumerate() {
                let number = Peer(peer as u16);
                match peer == own {
                    true => rail.attach_self(number).unwrap(),
                    false => rail.attach(number, &theirs[at]).unwrap(),
                }
            }
        }
    }
    fleet::join(rails, engines, size, fleet::alike, |_| None)
}

fn streams(name: &str, ask: Ask<'_>, config: FabricConfig, runs: u64) {
    if let Some(why) = support::absent() {
        return println!("SKIPPED {name}: {why}");
    }
    for seed in seeds(runs) {
        println!("{name}: seed {seed}");
        match seed % 2 {
            0 => oracle::run(seed, 5_000_000, |n, engines, size| {
                join::<1>(&ask, config, seed, n, engines, size)
            }),
            _ => oracle::run(seed, 5_000_000, |n, engines, size| {
                join::<2>(&ask, config, seed, n, engines, size)
            }),
        }
    }
}

#[test]
fn streams_over_tcp_are_what_the_model_says() {
    streams("tcp", Ask::new("tcp"), CONFIG, 6);
}

#[test]
fn streams_over_tcp_are_what_the_model_says_with_writes_held_back() {
    streams(
        "tcp, FI_MORE",
        Ask::new("tcp"),
        FabricConfig { inject: false, more: Some(true), ..CONFIG },
        4,
    );
}

#[test]
fn streams_over_tcp_are_what_the_model_says_with_words_in_messages() {
    let ask = Ask { notify: Some(Notify::Message), ..Ask::new("tcp") };
    streams("tcp, messages", ask, CONFIG, 4);
}

#[test]
fn streams_over_rxm_are_what_the_model_says() {
    streams("tcp;ofi_rxm", Ask::new("tcp;ofi_rxm"), CONFIG, 4);
}

#[test]
fn streams_over_shm_are_what_the_model_says() {
    streams("shm", Ask::new("shm"), CONFIG, 6);
}

#[test]
fn streams_over_shm_are_what_the_model_says_with_words_in_messages() {
    let ask = Ask { notify: Some(Notify::Message), ..Ask::new("shm") };
    streams("shm, messages", ask, FabricConfig { inject: false, ..CONFIG }, 4);
}

/// Detaches and attaches engines repeatedly while traffic is still queued.
fn attachments(name: &str, ask: Ask<'_>, runs: u64) {
    if let Some(why) = support::absent() {
        return println!("SKIPPED {name}: {why}");
    }
    let mut all = lives::Seen::default();
    for seed in seeds(runs) {
        let rails = [0, 1].map(|node| [support::open(&ask, CONFIG, seed << 8 | node)]);
        let addresses = rails.each_ref().map(|[rail]| rail.address().unwrap());
        let config = Config { window: [4, 16, 128][seed as usize % 3], ..Config::DEFAULT };
        let seen = lives::run::<_, 1>(seed, config, |_| (), rails, &move |engine, me, peer| {
            engine.rail_mut(RailId(0)).unwrap().attach(peer.peer(), &addresses[1 - me]).unwrap();
        });
        (all.stale, all.renewed) = (all.stale + seen.stale, all.renewed + seen.renewed);
    }
    println!("{name}: {all:?}");
    assert!(all.stale > 0, "{name}: {all:?}");
}

#[test]
fn over_tcp_what_was_sent_to_an_earlier_attachment_counts_no_more() {
    attachments("tcp", Ask::new("tcp"), 20);
}

#[test]
fn over_rxm_what_was_sent_to_an_earlier_attachment_counts_no_more() {
    attachments("tcp;ofi_rxm", Ask::new("tcp;ofi_rxm"), 10);
}

#[test]
fn over_shm_what_was_sent_to_an_earlier_attachment_counts_no_more() {
    attachments("shm", Ask::new("shm"), 10);
}
