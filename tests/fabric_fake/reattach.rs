//! Engines over fake networks reattach while earlier traffic is in flight or in an unread
//! completion queue.

use fishplate_core::engine::{Config, Engine, Notice, Signal};
use fishplate_core::mem::{PeerId, RailId};
use fishplate_core::op::SignalOp;
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail, negotiate};
use fishplate_testing::fabric::{Fake, Persona};

use crate::behaviour::{self, CX, lives, read, seeds, word};

fn rail(fake: &Fake, (name, persona): (&str, &Persona), seed: u64) -> FabricRail {
    let ask = Ask { interface: Some(persona.interfaces[0]), ..Ask::new(name) };
    let offer = negotiate(fake.library(), &ask).expect("the fake offers the persona");
    let config = FabricConfig {
        depth: 32,
        receives: 32,
        bounces: 8,
        deadline: None,
        seed: Some(seed),
        ..FabricConfig::default()
    };
    FabricRail::open(&offer, config).expect("a rail on it")
}

fn attach(engine: &mut Engine<'static, FabricRail, 1>, peer: PeerId, address: &[u8]) {
    engine.rail_mut(RailId(0)).unwrap().attach(peer.peer(), address).unwrap();
}

fn runs(name: &str, persona: &Persona, count: u64) {
    let mut all = lives::Seen::default();
    for seed in seeds(count) {
        let fake = Fake::new(Persona { jitter: 50, ..persona.clone() }, seed);
        let rails = [
            [rail(&fake, (name, persona), 2 * seed)],
            [rail(&fake, (name, persona), 2 * seed + 1)],
        ];
        let addresses = rails.each_ref().map(|[rail]| rail.address().unwrap());
        let config = Config { window: [4, 16, 128][seed as usize % 3], ..Config::DEFAULT };
        let seen = lives::run::<_, 1>(seed, config, |_| (), rails, &move |engine, me, peer| {
            attach(engine, peer, &addresses[1 - me]);
        });
        (all.stale, all.renewed) = (all.stale + seen.stale, all.renewed + seen.renewed);
        assert_eq!(fake.violations(), [] as [String; 0], "{name}: seed {seed}");
    }
    println!("{name}: {all:?}");
    assert!(all.stale > 0 && all.renewed > 0, "{name}: {all:?}");
}

#[test]
fn traffic_of_an_earlier_attachment_is_dropped_on_every_network() {
    for (name, persona) in [
        ("efa-direct", Persona::efa_direct()),
        ("efa", Persona::efa()),
        ("verbs;ofi_rxm", Persona::verbs_rxm()),
        ("cxi", Persona::cxi()),
        ("psm3", Persona::psm3()),
        ("tcp", Persona::tcp()),
        ("shm", Persona::shm()),
    ] {
        runs(name, &persona, 20);
    }
}

#[test]
fn a_queued_completion_of_an_earlier_attachment_is_not_counted_in_the_next() {
    let persona = Persona { jitter: 50, ..Persona::efa_direct() };
    let mut stale = 0;
    for seed in seeds(200) {
        let fake = Fake::new(persona.clone(), seed);
        let rails = [2, 3].map(|number| rail(&fake, ("efa-direct", &persona), number));
        let [ours, theirs] = rails.each_ref().map(|rail| rail.address().unwrap());
        let [mut a, mut b] = rails.map(|rail| behaviour::engine(Config::DEFAULT, [rail]));
        let target = b.register(behaviour::region(8192)).unwrap();
        let source = a.register(behaviour::region(8192)).unwrap();
        behaviour::write(&a, source.at(0), &[7; 8192]);
        let mut handle = [0; 512];
        let len = b.export(target, &mut handle).unwrap();
        let meet = |a: &mut Engine<'static, FabricRail, 1>,
                    b: &mut Engine<'static, FabricRail, 1>| {
            let (to, from) = (a.reserve_peer().unwrap(), b.reserve_peer().unwrap());
            attach(a, to, &theirs);
            attach(b, from, &ours);
            a.connect_peer(to, 1).unwrap();
            b.connect_peer(from, 1).unwrap();
            (to, from, a.import(to, &handle[..len]).unwrap())
        };
        let (to, from, remote) = meet(&mut a, &mut b);
        while a.has_answered(to) == Ok(false) || b.has_answered(from) == Ok(false) {
            a.progress();
            b.progress();
        }
        // The target does not poll before it is attached again.
        a.put(CX, source.at(0), 1024, remote.at(4096), Notice::Silent).unwrap();
        behaviour::passes(&mut a, 3000);
        a.remove_peer(to).unwrap();
        b.remove_peer(from).unwrap();
        let (to, from, remote) = meet(&mut a, &mut b);
        let signal = Signal { at: remote.at(0), op: SignalOp::Set, value: 1 };
        a.put_signal(CX, source.at(0), 2048, remote.at(64), signal, Notice::Silent).unwrap();
        let mut turns = 0;
        while word(&b, target.at(0)) != 1 {
            turns += 1;
            assert!(turns < 100_000, "seed {seed}: no signal");
            a.progress();
            b.progress();
        }
        assert!(
            read(&b, target.at(64), 2048) == [7; 2048],
            "seed {seed}: the signal came before its data"
        );
        assert_eq!((a.peer_error(to), b.peer_error(from)), (Ok(None), Ok(None)), "seed {seed}");
        stale += b.stats().stale;
    }
    assert!(stale >= 100, "{stale}: the queue rarely held anything");
}
