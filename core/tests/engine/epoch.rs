//! What one attachment of a peer sent never counts in a later one, however late it comes.

use fishplate_core::engine::Config;
use fishplate_core::rail::sim::Dials;

use super::support::*;

/// The delays of a rail on which what was sent may outlive its attachment.
fn dials(seed: u64) -> Dials {
    let late = Dials { late: true, ..Dials::WILD };
    match seed % 4 {
        0 => Dials { ordered: true, ..late },
        1 => Dials { max_delay: 400, ..late },
        2 => Dials { late: false, ..late },
        _ => late,
    }
}

fn lives<const RAILS: usize>(seed: u64) -> lives::Seen {
    let sim = fleet::fabric(2, RAILS as u16, 96, dials(seed), seed);
    let rails = [0, 1].map(|node| std::array::from_fn(|rail| sim.endpoint(node, rail as u16)));
    let config = Config {
        window: [1, 4, 16, 128][seed as usize % 4],
        eager: [0, 192][(seed / 4) as usize % 2],
        first_sequence: STARTS[(seed / 8) as usize % 4],
        ..Config::DEFAULT
    };
    lives::run::<_, RAILS>(seed, config, |_| (), rails, &|engine, me, peer| {
        for rail in 0..RAILS {
            let mut rail = engine.rail_mut(fishplate_core::mem::RailId(rail as u8)).unwrap();
            rail.attach(peer.peer(), 1 - me as u16).unwrap();
        }
    })
}

#[test]
fn whenever_the_ends_attach_anew_what_was_sent_before_counts_no_more() {
    let mut all = lives::Seen::default();
    for seed in seeds(200) {
        let seen = if seed % 3 == 0 { lives::<2>(seed) } else { lives::<1>(seed) };
        all.stale += seen.stale;
        all.renewed += seen.renewed;
        all.applied += seen.applied;
    }
    println!("{all:?}");
    assert!(all.stale > 100 && all.renewed > 20 && all.applied > 1000, "{all:?}");
}
