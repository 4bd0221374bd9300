//! Engines over fake networks with several rails each, checked against the model in the core's
//! tests. Up to three engines issue random puts, put-signals, signals, atomics of all widths,
//! fetches, gets, fences and quiets to each other and to themselves.

use fishplate_core::engine::{Config, Engine};
use fishplate_core::mem::Peer;
use fishplate_sys::fabric::raw::FI_HMEM;
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail, negotiate};
use fishplate_testing::fabric::{Fake, Persona};

use crate::behaviour::{fleet, oracle, seeds};

/// Returns a configuration with small sizes, so that tests reach every limit.
fn config(seed: u64) -> FabricConfig {
    FabricConfig {
        depth: 32,
        receives: 32,
        bounces: 8,
        deadline: None,
        seed: Some(seed),
        ..FabricConfig::default()
    }
}

/// Creates engines, and connects each engine to all. Rail i is on interface i.
pub fn join<const RAILS: usize>(
    fake: &Fake,
    (name, persona): (&str, &Persona),
    seed: u64,
    nodes: u16,
    engines: Config,
    size: usize,
) -> Vec<fleet::Node<FabricRail, RAILS>> {
    join_prepared(fake, (name, persona), (seed, true), nodes, engines, size, |_| ())
}

/// Like [`join`]. Calls `prepare` for each engine before it connects. With `inject`, the rails
/// inject short posts.
pub fn join_prepared<const RAILS: usize>(
    fake: &Fake,
    (name, persona): (&str, &Persona),
    (seed, inject): (u64, bool),
    nodes: u16,
    engines: Config,
    size: usize,
    prepare: impl Fn(&mut Engine<'static, FabricRail, RAILS>),
) -> Vec<fleet::Node<FabricRail, RAILS>> {
    let open = |node: u16, rail: usize| {
        let interface = persona.interfaces[rail % persona.interfaces.len()];
        let devices = persona.caps & FI_HMEM != 0;
        let ask = Ask { interface: Some(interface), devices, ..Ask::new(name) };
        let offer = negotiate(fake.library(), &ask).expect("the persona is offered");
        let config = config(seed << 16 | (rail as u64) << 8 | u64::from(node));
        FabricRail::open(&offer, FabricConfig { inject, ..config }).expect("a rail on it")
    };
    let mut rails: Vec<[FabricRail; RAILS]> =
        (0..nodes).map(|node| std::array::from_fn(|rail| open(node, rail))).collect();
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
    fleet::join_prepared(rails, engines, size, fleet::alike, |_| None, prepare)
}

fn streams(name: &str, persona: Persona) {
    for seed in seeds(8) {
        println!("{name}: seed {seed}");
        let fake = Fake::new(persona.clone(), seed);
        let this = (name, &persona);
        match seed % 3 {
            0 => oracle::run(seed, 2_000_000, |n, engines, size| {
                join::<1>(&fake, this, seed, n, engines, size)
            }),
            1 => oracle::run(seed, 2_000_000, |n, engines, size| {
                join::<2>(&fake, this, seed, n, engines, size)
            }),
            _ => oracle::run(seed, 2_000_000, |n, engines, size| {
                join::<4>(&fake, this, seed, n, engines, size)
            }),
        }
        assert_eq!(fake.violations(), [] as [String; 0], "{name}: seed {seed}");
        assert_eq!(fake.open_objects(), 0, "{name}: seed {seed}");
    }
}

#[test]
fn streams_over_efa_direct_are_what_the_model_says() {
    streams("efa-direct", Persona::efa_direct());
}

#[test]
fn streams_over_efa_are_what_the_model_says() {
    streams("efa", Persona::efa());
}

#[test]
fn streams_over_verbs_are_what_the_model_says() {
    streams("verbs;ofi_rxm", Persona::verbs_rxm());
}

#[test]
fn streams_over_cxi_are_what_the_model_says() {
    streams("cxi", Persona::cxi());
}

#[test]
fn streams_over_psm3_are_what_the_model_says() {
    streams("psm3", Persona::psm3());
}

#[test]
fn streams_over_tcp_are_what_the_model_says() {
    streams("tcp", Persona::tcp());
}

#[test]
fn streams_over_shm_are_what_the_model_says() {
    streams("shm", Persona::shm());
}
