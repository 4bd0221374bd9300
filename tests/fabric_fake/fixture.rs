//! Pairs of rails on a fake network.

use std::cell::RefCell;

use fishplate_core::mem::Peer;
use fishplate_sys::fabric::raw::FI_RX_CQ_DATA;
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail, negotiate};
use fishplate_testing::fabric::{Dead, Fake, Persona};

use crate::conformance::{Fixture, Link};

thread_local! {
    /// The network of this test's latest pair. It is checked when it is replaced and at the end of
    /// the test.
    static NETWORK: RefCell<Option<Checked>> = const { RefCell::new(None) };
}

/// A network that checks for violations when it is dropped.
pub struct Checked(pub Fake);

impl Drop for Checked {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.0.violations(), [] as [String; 0]);
        }
    }
}

/// Opens a rail with queues of 64 entries on an interface of the fake network.
pub fn rail(fake: &Fake, persona: &str, interface: &str, seed: u64) -> FabricRail {
    let ask = Ask { interface: Some(interface), ..Ask::new(persona) };
    let offer = negotiate(fake.library(), &ask).expect("the persona is offered");
    let config = FabricConfig {
        depth: 64,
        receives: 64,
        bounces: 16,
        inject: false,
        seed: Some(seed),
        ..FabricConfig::default()
    };
    FabricRail::open(&offer, config).expect("a rail on it")
}

/// Creates two rails attached to each other, with different peer numbers.
pub fn pair(fake: &Fake, persona: &str, interface: &str, seed: u64) -> Link<FabricRail> {
    let (mut a, mut b) =
        (rail(fake, persona, interface, 2 * seed), rail(fake, persona, interface, 2 * seed + 1));
    let (to, from) = (Peer(0), Peer(3));
    a.attach(to, &b.address().unwrap()).unwrap();
    b.attach(from, &a.address().unwrap()).unwrap();
    Link { rails: vec![a, b], origin: 0, target: 1, to, from }
}

fn link(name: &str, persona: Persona, seed: u64) -> Link<FabricRail> {
    let interface = persona.interfaces[0];
    let fake = Fake::new(persona, seed);
    let link = pair(&fake, name, interface, seed);
    NETWORK.with(|network| *network.borrow_mut() = Some(Checked(fake)));
    link
}

macro_rules! fixtures {
    ($($(#[$doc:meta])* $fixture:ident = $name:literal, $persona:expr;)*) => {$(
        $(#[$doc])*
        pub struct $fixture;

        impl Fixture for $fixture {
            type Rail = FabricRail;

            const IMPORTS_UNSEEN: Option<&'static str> =
                Some("only the target knows the length of a region");

            const LANDS_LATE: Option<&'static str> = Some("a provider may still carry out what it \
                has accepted");

            fn link(seed: u64) -> Link<FabricRail> {
                link($name, $persona, seed)
            }

            fn kill_target(link: &mut Link<FabricRail>) -> bool {
                let address = link.rails[link.target].address().unwrap();
                NETWORK.with(|network| network.borrow().as_ref().unwrap().0.kill(&address));
                true
            }
        }
    )*};
}

fixtures! {
    EfaDirect = "efa-direct", Persona::efa_direct();
    Efa = "efa", Persona::efa();
    /// A death without notice is detected only at the deadline, for which these tests do not wait.
    VerbsRxm = "verbs;ofi_rxm", Persona { dead: Dead::Errors, ..Persona::verbs_rxm() };
    Cxi = "cxi", Persona::cxi();
    Psm3 = "psm3", Persona { dead: Dead::Errors, ..Persona::psm3() };
    Tcp = "tcp", Persona::tcp();
    Shm = "shm", Persona::shm();
    Shm2 = "shm", Persona::shm2();
    /// A write with data consumes a receive, as with plain verbs.
    TakesReceives = "tcp",
        Persona { data_takes_receive: true, mode: FI_RX_CQ_DATA, ..Persona::tcp() };
    Calm = "efa-direct", Persona::efa_direct().calm();
}
