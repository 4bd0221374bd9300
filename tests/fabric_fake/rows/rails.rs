//! Tests features 17 to 20, 31 and 34: rails, and the traffic on each rail.

use fishplate::Limits;
use fishplate::config::Settings;
use fishplate::rails::{self, OpenRail, Wanted};
use fishplate::topology::{Anchor, LinkState, Machine, Nic, PciPath};
use fishplate_core::engine::{Config, RailPolicy};
use fishplate_testing::fabric::{Fake, Persona};

use crate::behaviour::fleet::turn;
use crate::two::{Two, efa};

#[test]
fn row_17_round_robin_uses_every_one_of_16_rails() {
    let interfaces: Vec<&'static str> = (0..16).map(|n| &*format!("rdmap{n}").leak()).collect();
    let persona = Persona { interfaces: interfaces.clone(), ..Persona::efa_direct() };
    let config = Config { policy: RailPolicy::RoundRobin, ..Config::DEFAULT };
    let mut two = Two::<16>::new("efa-direct", persona, config, 17);
    let before: Vec<u64> = interfaces.iter().map(|name| two.fake.0.posted_on(name)).collect();
    for _ in 0..320 {
        two.put(0, 1000, 0);
    }
    two.quiet();
    for (name, before) in interfaces.iter().zip(before) {
        // An even share is 20. One post in ten is refused and uses the next rail.
        let posted = two.fake.0.posted_on(name) - before;
        assert!((18..=24).contains(&posted), "{name}: {posted}");
    }
}

#[test]
fn row_18_a_large_put_is_spread_over_the_rails() {
    let config = Config { stripe_threshold: 64 << 10, stripe_chunk: 16 << 10, ..Config::DEFAULT };
    let mut two = efa::<4>(config, 18);
    let names = Persona::efa_direct().interfaces;
    let before: Vec<u64> = names.iter().map(|name| two.fake.0.posted_on(name)).collect();
    let bytes = two.fill(512 << 10, 18);
    two.put_signal(0, 512 << 10, 64, 0, 1);
    two.quiet();
    assert_eq!(two.there(64, 512 << 10), bytes);
    for (name, before) in names.iter().zip(before) {
        assert!(
            two.fake.0.posted_on(name) - before >= 2,
            "{name} carries a part of one put-signal"
        );
    }
}

/// Returns a machine with four NICs, two per NUMA node.
fn machine() -> Machine {
    let nic = |at: usize| Nic {
        name: format!("cxi{at}"),
        interface: Some(format!("cxi{at}")),
        verbs: None,
        path: PciPath::parse(std::path::Path::new(&format!(
            "/sys/devices/pci0000:{at:02x}/0000:{at:02x}:01.0"
        ))),
        node: Some(at as u32 / 2),
        mbit: None,
        link: LinkState::Up,
    };
    Machine { nics: (0..4).map(nic).collect(), ..Machine::default() }
}

fn open(settings: &Settings, fake: &Fake, anchor: Anchor) -> Vec<OpenRail> {
    let wanted =
        Wanted { settings, limits: Limits::DEFAULT, anchor, count: Some(2), devices: false };
    rails::open(wanted, fake.library(), &machine()).unwrap()
}

#[test]
fn row_19_near_rails_are_chosen() {
    let fake = Fake::new(Persona::cxi(), 19);
    let settings = Settings { providers: vec!["cxi".into()], ..Settings::DEFAULT };
    for (node, want) in [(0, ["cxi0", "cxi1"]), (1, ["cxi2", "cxi3"])] {
        let rails = open(&settings, &fake, Anchor::Node(node));
        let names: Vec<&str> = rails.iter().map(|rail| rail.interface.as_str()).collect();
        assert_eq!(names, want);
    }
}

#[test]
fn row_20_rails_are_pinned_by_name() {
    let fake = Fake::new(Persona::cxi(), 20);
    let interfaces = vec!["cxi3".to_owned(), "cxi0".to_owned()];
    let settings = Settings { providers: vec!["cxi".into()], interfaces, ..Settings::DEFAULT };
    let rails = open(&settings, &fake, Anchor::Node(0));
    let names: Vec<&str> = rails.iter().map(|rail| rail.interface.as_str()).collect();
    assert_eq!(names, ["cxi3", "cxi0"]);
}

#[test]
fn row_31_doorbells_are_shared_and_no_batch_is_left_open() {
    let mut two = efa::<2>(Config::DEFAULT, 31);
    for round in 0..50 {
        for n in 0..8 {
            two.put(0, 1000, (round * 8 + n) * 1000);
        }
        turn(&mut two.nodes);
    }
    two.quiet();
    let counts = two.fake.0.counts();
    assert!(counts.held_back > 0, "{counts:?}");
    assert_eq!(counts.left_open, 0, "{counts:?}");
}

#[test]
fn row_34_rails_open_and_close_without_leaks() {
    for (name, persona) in Persona::all() {
        let mut two = Two::<2>::new(name, persona, Config::DEFAULT, 34);
        two.put(0, 10_000, 0);
        // Puts more traffic in flight before the drop.
        turn(&mut two.nodes);
        let Two { nodes, fake } = two;
        assert!(fake.0.open_objects() > 0);
        drop(nodes);
        assert_eq!(fake.0.open_objects(), 0, "{name}");
    }
}
