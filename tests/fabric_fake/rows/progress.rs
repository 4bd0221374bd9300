//! Tests features 21 to 27 and 32: windows, passes, refusals, errors and counters.

use fishplate_core::engine::{Config, Notice, Signal};
use fishplate_core::error::{OpError, PostError};
use fishplate_core::mem::{Peer, RailId, Untrusted};
use fishplate_core::op::SignalOp;
use fishplate_core::rail::Rail;
use fishplate_sys::fabric::Ask;
use fishplate_sys::fabric::negotiate::{Level, Progress, negotiate};
use fishplate_sys::fabric::raw::*;
use fishplate_testing::fabric::{Fake, Persona};

use crate::behaviour::fleet::turn;
use crate::fixture::pair;
use crate::two::{CX, Two, efa};

#[test]
fn row_21_a_full_window_returns_again_until_acknowledged() {
    let mut two = efa::<2>(Config { window: 4, ..Config::DEFAULT }, 21);
    let mut refused = false;
    for n in 1..=100 {
        let signal = Signal { at: two.nodes[0].remotes[1].at(0), op: SignalOp::Set, value: n };
        match two.nodes[0].engine.signal(CX, signal, Notice::Silent) {
            Ok(_) => {}
            Err(OpError::Again) => {
                refused = true;
                // Progress at the target alone is not enough: the origin must receive the
                // acknowledgement.
                turn(&mut two.nodes);
            }
            Err(error) => panic!("{error:?}"),
        }
    }
    assert!(refused);
    for n in 1..=500 {
        two.signal(0, SignalOp::Set, n);
    }
    two.quiet();
    assert_eq!(two.word(0), 500);
}

#[test]
fn row_22_puts_are_acknowledged_in_batches() {
    let mut two = efa::<2>(Config { window: 64, ..Config::DEFAULT }, 22);
    for _ in 0..1000 {
        two.put(0, 256, 0);
    }
    two.quiet();
    let acks = two.nodes[1].engine.stats().acks_alone;
    assert!((1..500).contains(&acks), "{acks} acknowledgements of 1000 puts");
}

#[test]
fn row_23_automatic_progress_is_requested_first_and_manual_accepted() {
    for (name, persona) in Persona::all() {
        let fake = Fake::new(persona.clone(), 23);
        let offer = negotiate(fake.library(), &Ask::new(name)).unwrap();
        let want =
            if persona.progress == FI_PROGRESS_AUTO { Progress::Auto } else { Progress::Manual };
        assert_eq!((offer.progress, offer.level), (want, Level::Delivery), "{name}");
        assert_eq!(offer.info.provider(), persona.provider);
    }
}

#[test]
fn row_24_single_threaded_endpoints_request_no_lock() {
    let locks = Persona { locks: true, ..Persona::cxi() };
    for (persona, threading) in [
        (Persona::efa_direct(), FI_THREAD_DOMAIN),
        (Persona::cxi(), FI_THREAD_DOMAIN),
        (locks, FI_THREAD_SAFE),
    ] {
        let name = persona.fabric;
        let fake = Fake::new(persona, 24);
        let offer = negotiate(fake.library(), &Ask::new(name)).unwrap();
        assert_eq!(offer.info.domain().threading, threading, "{name}");
    }
}

#[test]
fn row_25_a_pass_handles_at_most_a_batch() {
    let calm = Persona::tcp().calm();
    let config = Config { batch: 8, window: 128, ..Config::DEFAULT };
    let mut two = Two::<1>::new("tcp", calm, config, 25);
    for _ in 0..20 {
        let node = &mut two.nodes[0];
        let _ = node.engine.put(CX, node.source.at(0), 300, node.remotes[1].at(0), Notice::Silent);
    }
    let mut most = 0;
    for _ in 0..1000 {
        most = most.max(two.nodes[1].engine.progress());
        two.nodes[0].engine.progress();
    }
    assert!((1..=8).contains(&most), "{most} events in one pass");
}

#[test]
fn row_26_refusals_are_retried_and_permanent_ones_fail_the_peer() {
    let grudging = Persona { refuse: 90, ..Persona::efa_direct() };
    let mut two = Two::<2>::new("efa-direct", grudging, Config::DEFAULT, 26);
    let bytes = two.fill(100_000, 26);
    two.put_signal(0, 100_000, 64, 0, 1);
    two.quiet();
    assert_eq!((two.there(64, 100_000), two.word(0)), (bytes, 1));
    assert!(two.fake.0.counts().refused > 10);
    // With a provider that refuses every post, each post returns `Again` and changes nothing.
    let never = Fake::new(Persona { refuse: 100, ..Persona::tcp() }, 26);
    let mut rail = pair(&never, "tcp", "eth0", 26).rails.swap_remove(0);
    for _ in 0..1000 {
        let refused = rail.post_message(Peer(0), b"word", Untrusted::from_slice(&[]), 1);
        assert_eq!(refused, Err(PostError::Again));
    }
    assert_eq!(never.counts().posted, 0);
}

#[test]
fn row_27_errors_include_the_provider_s_code() {
    let mut two = efa::<2>(Config::DEFAULT, 27);
    two.fake.0.fail(0, libc::EIO, 4711, b"hardware says no");
    two.put(0, 4096, 0);
    let mut told = None;
    for _ in 0..10_000 {
        turn(&mut two.nodes);
        let stats = [RailId(0), RailId(1)].map(|id| two.nodes[0].engine.rail(id).unwrap().stats());
        told = stats.into_iter().find(|stats| stats.errors > 0).map(|stats| stats.last_error);
        if told.is_some() {
            break;
        }
    }
    assert_eq!(told, Some((libc::EIO, 4711)));
    let words = [RailId(0), RailId(1)].map(|id| two.nodes[0].engine.rail(id).unwrap().last_error());
    let words = words.into_iter().flatten().collect::<Vec<_>>();
    assert_eq!(
        words,
        ["fake: some error: 5 (FI_EIO); efa says 4711: fake provider error 4711: hardware says no"]
    );
    let peer = two.nodes[0].peers[1];
    assert!(
        two.nodes[0].engine.peer_error(peer).unwrap().is_some(),
        "a hole in the stream fails the peer"
    );
}

#[test]
fn row_32_events_are_counted() {
    let mut two = efa::<2>(Config::DEFAULT, 32);
    for _ in 0..100 {
        two.put(0, 1000, 0);
    }
    two.quiet();
    let [here, there] = [0, 1].map(|n| two.nodes[n].engine.stats());
    assert!(here.posted >= 100 && there.arrived >= 100 && here.passes > 0, "{here:?} {there:?}");
}
