//! Tests every rail of this package against the contract of `Rail`, and further properties of the
//! fakes.

#[path = "../conformance/mod.rs"]
mod conformance;
mod cuts;
mod fakes;
#[path = "../../examples/file_rail.rs"]
mod file_rail;

use std::cell::RefCell;
use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicU32, Ordering};

use conformance::{Fixture, Link};
use file_rail::FileRail;
use fishplate_core::mem::Peer;
use fishplate_core::rail::Rail;
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::{Dials, Packet, Sim, SimRail};

type Network = Loopback<64>;

struct Plain;
struct Mapped;
struct Native;
struct Disordered;
struct TwiceDisordered;
struct Calm;
struct Wild;
struct WildAndDisordered;
struct Files;

const STAYS: Option<&'static str> = Some("a loopback needs no attachment");

fn own<R: Rail>(rail: R) -> Link<R> {
    Link { rails: vec![rail], origin: 0, target: 0, to: Peer(0), from: Peer(0) }
}

/// Returns two nodes that have different peer numbers.
fn pair(dials: Dials, seed: u64) -> (&'static Sim<'static>, Link<SimRail<'static, 'static>>) {
    let packets = Box::leak(vec![Packet::EMPTY; 64].into_boxed_slice());
    let sim: &Sim<'_> = Box::leak(Box::new(Sim::new(packets, 2, 1, dials, seed).unwrap()));
    let (mut a, mut b) = (sim.endpoint(0, 0), sim.endpoint(1, 0));
    a.attach(Peer(0), 1).unwrap();
    b.attach(Peer(3), 0).unwrap();
    (sim, Link { rails: vec![a, b], origin: 0, target: 1, to: Peer(0), from: Peer(3) })
}

fn kill(link: &mut Link<SimRail<'static, 'static>>) -> bool {
    link.rails[1].sim().kill(1);
    true
}

impl Fixture for Plain {
    type Rail = Network;
    const STAYS_ATTACHED: Option<&'static str> = STAYS;
    fn link(_: u64) -> Link<Network> {
        own(Loopback::new())
    }
}

impl Fixture for Mapped {
    type Rail = Network;
    const STAYS_ATTACHED: Option<&'static str> = STAYS;
    fn link(_: u64) -> Link<Network> {
        own(Loopback::mapped())
    }
}

impl Fixture for Native {
    type Rail = Network;
    const STAYS_ATTACHED: Option<&'static str> = STAYS;
    fn link(_: u64) -> Link<Network> {
        own(Loopback::new().with_native_atomics())
    }
}

impl Fixture for Disordered {
    type Rail = Faulty<Network, 16>;
    const STAYS_ATTACHED: Option<&'static str> = STAYS;
    fn link(seed: u64) -> Link<Self::Rail> {
        own(Faulty::new(Loopback::new(), Faults::DISORDER, seed))
    }
}

impl Fixture for TwiceDisordered {
    type Rail = Faulty<Faulty<Network, 16>, 8>;
    const STAYS_ATTACHED: Option<&'static str> = STAYS;
    fn link(seed: u64) -> Link<Self::Rail> {
        own(Faulty::new(
            Faulty::new(Loopback::new(), Faults::DISORDER, seed),
            Faults::DISORDER,
            !seed,
        ))
    }
}

impl Fixture for Calm {
    type Rail = SimRail<'static, 'static>;
    fn link(seed: u64) -> Link<Self::Rail> {
        pair(Dials::CALM, seed).1
    }
    fn kill_target(link: &mut Link<Self::Rail>) -> bool {
        kill(link)
    }
}

impl Fixture for Wild {
    type Rail = SimRail<'static, 'static>;
    fn link(seed: u64) -> Link<Self::Rail> {
        pair(Dials::WILD, seed).1
    }
    fn kill_target(link: &mut Link<Self::Rail>) -> bool {
        kill(link)
    }
}

impl Fixture for WildAndDisordered {
    type Rail = Faulty<SimRail<'static, 'static>, 16>;
    fn link(seed: u64) -> Link<Self::Rail> {
        let Link { rails, origin, target, to, from } = pair(Dials::WILD, seed).1;
        let rails =
            rails.into_iter().map(|rail| Faulty::new(rail, Faults::DISORDER, !seed)).collect();
        Link { rails, origin, target, to, from }
    }
    fn kill_target(link: &mut Link<Self::Rail>) -> bool {
        link.rails[1].inner_mut().sim().kill(1);
        true
    }
}

impl Fixture for Files {
    type Rail = FileRail;
    const LANDS_LATE: Option<&'static str> = Some("frames that lie in the file are still handled");
    fn link(_: u64) -> Link<FileRail> {
        static LINKS: AtomicU32 = AtomicU32::new(0);
        let (process, link) = (std::process::id(), LINKS.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(format!("fishplate-rails-{process}-{link}"));
        std::fs::create_dir_all(&dir).unwrap();
        let (there, back) = (dir.join("there"), dir.join("back"));
        let mut rails = vec![FileRail::default(), FileRail::default()];
        rails[0].setup().attach(Peer(0), &there, &back).unwrap();
        rails[1].setup().attach(Peer(3), &back, &there).unwrap();
        THERE.set(std::fs::OpenOptions::new().append(true).open(&there).ok());
        // Both ends have opened the files, so the folder can go.
        std::fs::remove_dir_all(dir).unwrap();
        Link { rails, origin: 0, target: 1, to: Peer(0), from: Peer(3) }
    }

    fn corrupt(_: &mut Link<FileRail>) -> bool {
        THERE.with_borrow_mut(|file| file.as_mut().unwrap().write_all(&[0xff; 64])).unwrap();
        true
    }
}

thread_local! {
    /// The file to which the origin of this test's latest link appends.
    static THERE: RefCell<Option<File>> = const { RefCell::new(None) };
}

#[test]
fn the_example_rail_runs() {
    file_rail::main().unwrap();
}

rail_conformance!(example_over_files, Files);
rail_conformance!(loopback, Plain);
rail_conformance!(loopback_mapped, Mapped);
rail_conformance!(loopback_native, Native);
rail_conformance!(faulty_loopback, Disordered);
rail_conformance!(faulty_faulty_loopback, TwiceDisordered);
rail_conformance!(sim_calm, Calm);
rail_conformance!(sim_wild, Wild);
rail_conformance!(faulty_sim, WildAndDisordered);
