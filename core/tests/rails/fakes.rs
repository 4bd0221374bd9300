//! Properties of the simulated fabric and the faulty rail beyond the contract: a seed determines a
//! run, faults occur at the requested rates, and a key of another node gives no access.

use fishplate_core::error::{CompleteError, PostError};
use fishplate_core::mem::{Peer, Untrusted};
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::{Dials, Packet, Sim};
use fishplate_core::rail::{Local, Posted, Rail, Remote};

use super::conformance::{Seen, leaked};

fn sim(nodes: u16, rails: u16, dials: Dials, seed: u64) -> Sim<'static> {
    Sim::new(Box::leak(vec![Packet::EMPTY; 64].into_boxed_slice()), nodes, rails, dials, seed)
        .unwrap()
}

fn chatter(seed: u64, count: u8) -> (u64, Vec<Vec<u8>>) {
    let sim = sim(2, 1, Dials::WILD, seed);
    let (mut a, mut b) = (sim.endpoint(0, 0), sim.endpoint(1, 0));
    a.attach(Peer(0), 1).unwrap();
    b.attach(Peer(0), 0).unwrap();
    let (mut here, mut there) = (Seen::default(), Seen::default());
    let mut n = 0;
    while here.done.len() < count as usize {
        if n < count && a.post_message(Peer(0), &[n], Untrusted::from_slice(&[]), n as u64).is_ok()
        {
            n += 1;
        }
        a.poll(4, &mut here);
        b.poll(4, &mut there);
    }
    (sim.trace(), there.messages.into_iter().map(|(_, bytes)| bytes).collect())
}

#[test]
fn runs_are_determined_by_the_seed() {
    for seed in 1..20 {
        assert_eq!(chatter(seed, 30), chatter(seed, 30), "seed {seed}");
        assert_ne!(chatter(seed, 30).1, chatter(seed + 1000, 30).1, "seed {seed}");
    }
}

#[test]
fn a_faulty_rail_reorders_and_a_calm_one_does_not() {
    let sorted = |messages: &[Vec<u8>]| messages.is_sorted();
    assert!((1..20).all(|seed| !sorted(&chatter(seed, 60).1)));
    let ordered = Dials { ordered: true, ..Dials::WILD };
    for seed in 1..20 {
        let sim = sim(2, 1, ordered, seed);
        let (mut a, mut b) = (sim.endpoint(0, 0), sim.endpoint(1, 0));
        a.attach(Peer(0), 1).unwrap();
        b.attach(Peer(0), 0).unwrap();
        let (mut seen, mut n) = (Seen::default(), 0);
        while seen.messages.len() < 60 {
            if n < 60 && a.post_message(Peer(0), &[n], Untrusted::from_slice(&[]), 0).is_ok() {
                n += 1;
            }
            a.poll(4, &mut Seen::default());
            b.poll(4, &mut seen);
        }
        assert!(seen.messages.is_sorted(), "seed {seed}: late but in order");
    }
}

#[test]
fn a_key_of_one_node_is_invalid_at_another() {
    let sim = sim(3, 1, Dials::CALM, 1);
    let (mut a, _b, mut c) = (sim.endpoint(0, 0), sim.endpoint(1, 0), sim.endpoint(2, 0));
    a.attach(Peer(0), 1).unwrap();
    let theirs = leaked(64);
    let (key, _) = c.register(&theirs).unwrap();
    assert!(a.import(Peer(0), key, 64).is_err());
    let source = leaked(8);
    let local = Local { ptr: source.ptr(), len: 8, desc: 0 };
    // SAFETY: the source is never freed.
    unsafe {
        assert_eq!(
            a.post_write(Peer(0), local, Remote { key, offset: 0 }, None, 1),
            Err(PostError::BadKey)
        );
        assert_eq!(
            a.post_read(Peer(0), local, Remote { key, offset: 0 }, 1),
            Err(PostError::BadKey)
        );
    }
}

#[test]
fn several_deaths_are_reported_within_the_budget() {
    let sim = sim(4, 1, Dials::CALM, 1);
    let mut a = sim.endpoint(0, 0);
    for node in 1..4u16 {
        a.attach(Peer(node), node).unwrap();
        sim.kill(node);
    }
    let mut seen = Seen::default();
    for told in 1..4 {
        assert_eq!(a.poll(1, &mut seen), 1);
        assert_eq!(seen.down.len(), told);
    }
    assert_eq!(a.poll(8, &mut seen), 0);
}

#[test]
fn a_faulty_rail_fails_as_often_as_requested() {
    let mut rail =
        Faulty::<_, 32>::new(Loopback::<64>::new(), Faults { fail: 300, ..Faults::NONE }, 5);
    let (mut seen, mut failed) = (Seen::default(), 0);
    for n in 0..1000u64 {
        let posted = rail.post_message(Peer(0), &[1], Untrusted::from_slice(&[]), n).unwrap();
        failed += (posted == Posted::Pending) as usize;
        rail.poll(32, &mut seen);
        rail.poll(32, &mut seen);
    }
    assert_eq!(seen.done.len(), failed);
    assert_eq!(seen.messages.len() + failed, 1000);
    assert!((200..400).contains(&failed), "{failed}");
    assert!(seen.done.iter().all(|(_, result)| matches!(result, Err(CompleteError::Failed(_)))));
}

#[test]
fn a_faulty_rail_without_faults_is_transparent() {
    let mut rail = Faulty::<_, 4>::new(Loopback::<64>::new(), Faults::NONE, 5);
    let mut seen = Seen::default();
    for n in 0..50u8 {
        assert_eq!(
            rail.post_message(Peer(2), &[n], Untrusted::from_slice(&[]), 0),
            Ok(Posted::Done)
        );
    }
    assert_eq!(rail.poll(64, &mut seen), 50);
    assert!(
        seen.messages
            .iter()
            .enumerate()
            .all(|(n, (peer, bytes))| *peer == Peer(2) && *bytes == [n as u8])
    );
}

#[test]
fn a_fabric_out_of_range_is_refused() {
    let packets = || Box::leak(vec![Packet::EMPTY; 4].into_boxed_slice());
    assert!(Sim::new(&mut [], 1, 1, Dials::CALM, 1).is_err());
    for (nodes, rails) in [(0, 1), (1, 0), (1, 17), (65, 1), (5, 16)] {
        assert!(
            Sim::new(packets(), nodes, rails, Dials::CALM, 1).is_err(),
            "{nodes} nodes, {rails} rails"
        );
    }
    assert!(Sim::new(packets(), 4, 16, Dials::CALM, 1).is_ok());
    assert!(sim(1, 1, Dials::CALM, 1).endpoint(0, 0).attach(Peer(16), 0).is_err());
}
