//! Engines over fake networks shut down at any time, and their processes then end at once.

use fishplate_core::engine::Config;
use fishplate_core::mem::RailId;
use fishplate_sys::fabric::FabricRail;
use fishplate_testing::fabric::{Fake, Persona};

use crate::behaviour::fleet::Node;
use crate::behaviour::{goodbye, seeds};
use crate::engines::join;

/// Runs until all engines have shut down. An engine that is done makes no more progress. If `dies`,
/// its endpoint is killed too.
fn run<const RAILS: usize>(
    fake: &Fake,
    seed: u64,
    nodes: Vec<Node<FabricRail, RAILS>>,
    dies: bool,
) -> u64 {
    let address = |node: &Node<FabricRail, RAILS>, rail| {
        node.engine.rail(RailId(rail as u8)).map(|rail: &FabricRail| rail.address().unwrap())
    };
    let all: Vec<Vec<_>> = nodes
        .iter()
        .map(|node| (0..RAILS).filter_map(|rail| address(node, rail)).collect())
        .collect();
    goodbye::run(seed, nodes, 1, |me| {
        if dies {
            all[me].iter().for_each(|address| fake.kill(address));
        }
    })
}

fn runs(name: &str, persona: Persona, dies: bool) {
    for seed in seeds(20) {
        let fake = Fake::new(persona.clone(), seed);
        let config = Config { window: [4, 128][seed as usize % 2], ..Config::DEFAULT };
        let this = (name, &persona);
        let nodes = 2 + seed as u16 % 2;
        let applied = match seed % 3 {
            0 => run::<2>(&fake, seed, join(&fake, this, seed, nodes, config, 4096), dies),
            _ => run::<1>(&fake, seed, join(&fake, this, seed, nodes, config, 4096), dies),
        };
        println!("{name}: seed {seed}: {applied}");
        assert_eq!(fake.violations(), [] as [String; 0], "{name}: seed {seed}");
    }
}

#[test]
fn no_peer_is_reported_dead_after_a_shutdown_in_any_order() {
    // The other fakes drop messages of a killed endpoint even if their completion was reported.
    for (name, persona, dies) in [
        ("efa-direct", Persona::efa_direct(), true),
        ("efa", Persona::efa(), true),
        ("verbs;ofi_rxm", Persona::verbs_rxm(), false),
        ("cxi", Persona::cxi(), false),
        ("psm3", Persona::psm3(), false),
        ("tcp", Persona::tcp(), false),
        ("shm", Persona::shm(), false),
    ] {
        runs(name, persona, dies);
    }
}
