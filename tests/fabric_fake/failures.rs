//! Tests silent peers, pulled cables, long polls, refused writes, and registrations that a provider
//! keeps.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use fishplate_core::engine::{Config, Engine, Notice, Signal};
use fishplate_core::error::{AttachError, CompleteError, PeerError, PostError, Use};
use fishplate_core::mem::{Peer, PeerId, RailId, Region, RegionKind, Untrusted};
use fishplate_core::op::{Fault, Outcome, SignalOp};
use fishplate_core::rail::{Local, Rail, Remote, Sink};
use fishplate_sys::fabric::negotiate::negotiate;
use fishplate_sys::fabric::raw::FI_PROGRESS_MANUAL;
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail};
use fishplate_testing::fabric::{Dead, Fake, Persona};

use crate::behaviour::fleet::{turn, turn_until};
use crate::behaviour::{engine, region};
use crate::engines::join_prepared;
use crate::fixture::{Checked, pair, rail};
use crate::two::{CX, Two, efa};

#[derive(Debug, Default)]
struct Seen {
    down: Vec<(Peer, PeerError)>,
    done: Vec<Result<(), CompleteError>>,
    messages: usize,
    /// The reports of silent peers: whether they were overdue.
    silent: Vec<bool>,
}

impl Sink for Seen {
    fn done(&mut self, _: u64, result: Result<(), CompleteError>) {
        self.done.push(result);
    }
    fn landed(&mut self, _: Peer, _: u32) {}
    fn message(&mut self, _: Peer, _: Untrusted<'_>) {
        self.messages += 1;
    }
    fn peer_down(&mut self, peer: Peer, why: PeerError) {
        self.down.push((peer, why));
    }
    fn silent(&mut self, _: Peer, overdue: bool) -> bool {
        self.silent.push(overdue);
        overdue
    }
}

/// Checks that a silent peer fails at the deadline, even if `check_peers` is not called.
fn a_silent_peer(persona: Persona, name: &str, interface: &str, asked: bool) {
    let errs = persona.dead == Dead::Errors;
    let fake = Fake::new(persona.calm(), 1);
    let offer =
        negotiate(fake.library(), &Ask { interface: Some(interface), ..Ask::new(name) }).unwrap();
    let config =
        FabricConfig { deadline: Some(Duration::from_millis(50)), ..FabricConfig::default() };
    let mut origin = FabricRail::open(&offer, config).unwrap();
    let target = rail(&fake, name, interface, 9);
    origin.attach(Peer(0), &target.address().unwrap()).unwrap();
    fake.kill(&target.address().unwrap());
    let posted =
        origin.post_message(Peer(0), b"are you there", Untrusted::from_slice(&[0; 500]), 4);
    assert!(posted.is_ok(), "{posted:?}");
    let (mut seen, begun) = (Seen::default(), Instant::now());
    while seen.down.is_empty() {
        origin.poll(32, &mut seen);
        if asked {
            origin.check_peers(&mut seen);
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{name}: not reported in time");
    }
    let why = if errs { PeerError::Lost } else { PeerError::Silent };
    assert_eq!(seen.down, [(Peer(0), why)], "{name}");
    assert!(seen.done.len() == 1 && seen.done[0].is_err(), "{name}: {:?}", seen.done);
    let late = origin.post_message(Peer(0), b"x", Untrusted::from_slice(&[]), 5);
    assert_eq!(late, Err(PostError::PeerDown), "{name}");
}

/// The engine may fence such a rail before the deadline.
#[test]
fn rails_that_can_fence_report_a_silent_peer_after_80_ms() {
    let manual = FI_PROGRESS_MANUAL;
    for (persona, name, interface, fences) in [
        (Persona { progress: manual, ..Persona::tcp() }, "tcp", "eth0", true),
        (Persona { progress: manual, ..Persona::efa_direct() }, "efa-direct", "rdmap0-rdm", false),
    ] {
        let fake = Fake::new(persona.calm(), 1);
        let mut origin = rail(&fake, name, interface, 1);
        let target = rail(&fake, name, interface, 9);
        assert_eq!(origin.caps().fences, fences, "{name}");
        origin.attach(Peer(0), &target.address().unwrap()).unwrap();
        let nothing = Untrusted::from_slice(&[0; 500]);
        assert!(origin.post_message(Peer(0), b"are you there", nothing, 4).is_ok(), "{name}");
        let (mut seen, begun) = (Seen::default(), Instant::now());
        while begun.elapsed() < Duration::from_millis(200) {
            origin.poll(32, &mut seen);
            origin.check_peers(&mut seen);
            let early = begun.elapsed() < Duration::from_millis(80);
            assert!(!early || seen.silent.is_empty(), "{name}: reported at once");
        }
        assert_eq!(seen.silent.is_empty(), !fences, "{name}");
        assert!(!seen.silent.contains(&true) && seen.down.is_empty(), "{name}: {seen:?}");
    }
}

#[test]
fn a_silent_peer_fails_at_the_deadline() {
    a_silent_peer(Persona::verbs_rxm(), "verbs;ofi_rxm", "mlx5_0", true);
}

#[test]
fn a_silent_peer_fails_with_polls_alone() {
    a_silent_peer(Persona::verbs_rxm(), "verbs;ofi_rxm", "mlx5_0", false);
    a_silent_peer(Persona::efa_direct(), "efa-direct", "rdmap0-rdm", false);
}

/// Two engines whose connection breaks while they exchange their first messages, as with libfabric
/// 1.17's tcp provider if both connect at once.
#[test]
fn a_connection_that_breaks_before_the_peer_has_answered_is_made_again() {
    for code in [libc::ECONNRESET, libc::EPIPE, libc::ECANCELED] {
        for broken in 1..3 {
            let fake = Fake::new(Persona::tcp(), broken);
            let engines = join_prepared::<1>(
                &fake,
                ("tcp", &Persona::tcp()),
                (broken, true),
                2,
                Config::DEFAULT,
                4096,
                |_| (0..broken).for_each(|_| fake.fail(0, code, 0, b"")),
            );
            let mut two = Two { nodes: engines, fake: Checked(fake) };
            two.signal(0, SignalOp::Set, 7);
            two.quiet();
            assert_eq!(two.word(0), 7);
            // It counts once the peer has answered.
            two.fake.0.fail(0, code, 0, b"");
            two.put(0, 4096, 0);
            let peer = two.nodes[0].peers[1];
            turn_until(&mut two.nodes, "the failure", |nodes| {
                nodes[0].engine.peer_error(peer) != Ok(None)
            });
        }
    }
}

/// Creates two engines that are about to meet over tcp. The second uses only these rails.
fn two_that_meet<const RAILS: usize>(
    seed: u64,
    uses: u16,
) -> ([(Engine<'static, FabricRail, RAILS>, PeerId); 2], Checked) {
    let fake = Fake::new(Persona::tcp(), seed);
    let mut rails = [0, 8].map(|low| {
        std::array::from_fn(|at| rail(&fake, "tcp", ["eth0", "eth1"][at], seed + low + at as u64))
    });
    for at in 0..RAILS {
        let addresses = rails.each_ref().map(|rails: &[_; RAILS]| rails[at].address().unwrap());
        rails[0][at].attach(Peer(0), &addresses[1]).unwrap();
        rails[1][at].attach(Peer(0), &addresses[0]).unwrap();
    }
    let mut uses = [(1 << RAILS) - 1, uses].into_iter();
    let engines = rails.map(|rails| {
        let mut engine = engine(Config::DEFAULT, rails);
        let peer = engine.reserve_peer().unwrap();
        engine.connect_peer(peer, uses.next().unwrap()).unwrap();
        (engine, peer)
    });
    (engines, Checked(fake))
}

/// The first Hello arrives over the connection that breaks under the answer.
#[test]
fn a_connection_that_breaks_after_the_peer_was_heard_is_made_again() {
    for code in [libc::ECONNRESET, libc::ECANCELED] {
        for seed in 1..10 {
            let ([(mut a, to_b), (mut b, to_a)], fake) = two_that_meet::<1>(seed, 1);
            (0..100).for_each(|_| _ = a.progress());
            fake.0.fail(0, code, 0, b"");
            let begun = Instant::now();
            while a.has_answered(to_b) != Ok(true) || b.has_answered(to_a) != Ok(true) {
                a.progress();
                b.progress();
                let errors = (a.peer_error(to_b), b.peer_error(to_a));
                assert_eq!(errors, (Ok(None), Ok(None)), "{code}, {seed}");
                assert!(begun.elapsed() < Duration::from_secs(20), "{code}, {seed}");
            }
            assert_ne!(b.rail(RailId(0)).unwrap().stats().errors, 0, "{code}, {seed}");
        }
    }
}

/// An engine gives up after a few messages.
#[test]
fn a_peer_whose_connection_always_breaks_is_lost() {
    let ([(mut a, to_b), _b], fake) = two_that_meet::<1>(1, 1);
    (0..20).for_each(|_| fake.0.fail(0, libc::ECONNRESET, 0, b""));
    let begun = Instant::now();
    while a.peer_error(to_b) == Ok(None) {
        a.progress();
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
    assert_eq!(a.peer_error(to_b), Ok(Some(PeerError::Lost)));
    assert_eq!(a.rail(RailId(0)).unwrap().stats().errors, 9);
}

/// An operation may have landed although its connection broke, even over a rail from which nothing
/// has arrived.
#[test]
fn an_operation_whose_connection_breaks_may_have_landed() {
    for (seed, skip) in (1..4).flat_map(|seed| (0..4).map(move |skip| (seed, skip))) {
        let ([(mut a, to_b), (mut b, to_a)], fake) = two_that_meet::<2>(seed, 1);
        let (source, target) =
            (a.register(region(4096)).unwrap(), b.register(region(4096)).unwrap());
        let mut handle = [0; 512];
        let len = b.export(target, &mut handle).unwrap();
        let there = a.import(to_b, &handle[..len]).unwrap();
        while a.has_answered(to_b) != Ok(true) || b.has_answered(to_a) != Ok(true) {
            a.progress();
            b.progress();
        }
        fake.0.fail(skip, libc::ECONNRESET, 0, b"");
        // Posted at once, so that both rails carry some.
        for _ in 0..4 {
            let signal = Signal::add(there.at(0), 1);
            a.put_signal(CX, source.at(0), 100, there.at(64), signal, Notice::Report(1)).unwrap();
        }
        let (mut ended, mut broken) = (0, 0);
        while ended < 4 {
            a.progress();
            b.progress();
            while let Some(end) = a.next_completion() {
                ended += 1;
                let is_final = matches!(
                    end.outcome,
                    Outcome::Failed(_) | Outcome::Unknown(Fault::Rail(_, CompleteError::Failed(_)))
                );
                assert!(!is_final, "{seed}, {skip}: {end:?}");
                broken += u32::from(end.outcome != Outcome::Done);
            }
        }
        assert_ne!(broken, 0, "{seed}, {skip}");
    }
}

/// One poll handles entries up to its budget, in several reads if needed.
#[test]
fn a_poll_reads_on_after_a_full_batch() {
    for (persona, name, interface) in [
        (Persona::verbs_rxm(), "verbs;ofi_rxm", "mlx5_0"),
        (Persona::efa_direct(), "efa-direct", "rdmap0-rdm"),
    ] {
        let fake = Fake::new(persona.calm(), 2);
        let mut link = pair(&fake, name, interface, 2);
        let (mut here, mut seen) = (Seen::default(), Seen::default());
        for n in 0..50 {
            while link.rails[0]
                .post_message(link.to, &[1; 16], Untrusted::from_slice(&[]), n)
                .is_err()
            {
                link.rails[0].poll(32, &mut here);
            }
        }
        let mut idle = 0;
        while idle < 1000 {
            idle = if link.rails[0].poll(32, &mut here) == 0 { idle + 1 } else { 0 };
        }
        assert_eq!((link.rails[1].poll(40, &mut seen), seen.messages), (40, 40), "{name}");
        assert_eq!((link.rails[1].poll(40, &mut seen), seen.messages), (10, 50), "{name}");
    }
}

#[test]
fn after_a_cut_cable_nothing_lands() {
    let mut two = efa::<1>(Config::DEFAULT, 40);
    two.put(0, 64, 0);
    two.quiet();
    two.fake.0.cut("rdmap0-rdm");
    two.signal(0, SignalOp::Set, 99);
    for _ in 0..1000 {
        turn(&mut two.nodes);
    }
    assert_ne!(two.word(0), 99);
    let peer = two.nodes[0].peers[1];
    assert_eq!(two.nodes[0].engine.is_quiet(CX, peer), Ok(false));
}

#[test]
fn a_write_beyond_the_provider_s_limit_is_refused_by_the_rail() {
    let small = Persona { max_rma: 4096, ..Persona::efa_direct() };
    let fake = Fake::new(small, 41);
    let mut link = pair(&fake, "efa-direct", "rdmap0-rdm", 41);
    let most = link.rails[0].caps().max_rma;
    assert_eq!(most, 4096);
    let bytes = vec![0u8; most + 1];
    let ptr = std::ptr::NonNull::new(bytes.as_ptr().cast_mut()).unwrap();
    let local = Local { ptr, len: most + 1, desc: 0 };
    let remote = Remote { key: Default::default(), offset: 0 };
    // SAFETY: the post is refused before anything is read.
    let refused = unsafe { link.rails[0].post_write(Peer(0), local, remote, None, 1) };
    assert!(refused.is_err(), "{refused:?}");
}

/// One of two rails keeps the registration. The region is deregistered anyway, and the error says
/// that the memory must not be reused.
#[test]
fn a_registration_that_the_provider_keeps_is_reported() {
    let mut two = efa::<2>(Config::DEFAULT, 31);
    let region = two.nodes[0].source.at(0).region;
    two.fake.0.keep_registrations(true);
    let engine = &mut two.nodes[0].engine;
    assert_eq!(engine.deregister(region), Err(AttachError::Kept(libc::EBUSY)));
    assert_eq!(engine.deregister(region), Err(AttachError::UnknownRegion));
    let stats = [RailId(0), RailId(1)].map(|id| engine.rail(id).unwrap().stats().kept);
    assert_eq!(stats, [1, 1]);
    // Lets the rails deregister on drop, where they retry.
    two.fake.0.keep_registrations(false);
}

#[test]
fn a_post_in_flight_keeps_only_its_own_memory() {
    let mut two = efa::<1>(Config::DEFAULT, 8);
    let mut other = vec![0u64; 512];
    // SAFETY: `other` outlives its registration, and nothing else uses it.
    let other =
        unsafe { Region::new(NonNull::from(&mut other[..]).cast(), 4096, RegionKind::Private) };
    let other = two.nodes[0].engine.register(other).unwrap();
    two.put(0, 4096, 0);
    let source = two.nodes[0].source;
    let engine = &mut two.nodes[0].engine;
    assert_eq!(engine.deregister(source), Err(AttachError::InUse(Use::Posts(RailId(0)))));
    assert_eq!(engine.deregister(other), Ok(()));
    two.quiet();
    let got = two.issue(|node| {
        node.engine.get(CX, node.source.at(0), 4096, node.remotes[1].at(0), Notice::Report(1))
    });
    assert!(two.nodes[0].engine.deregister(source).is_err(), "a read fills it");
    assert!(two.end(got).is_some());
    assert_eq!(two.nodes[0].engine.deregister(source), Ok(()));
}
