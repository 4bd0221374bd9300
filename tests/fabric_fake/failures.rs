//! Tests silent peers, pulled cables, long polls, refused writes, and registrations that a provider
//! keeps.

use std::ptr::NonNull;
use std::time::Duration;

use fishplate_core::engine::{Config, Notice};
use fishplate_core::error::{AttachError, CompleteError, PeerError, PostError, Use};
use fishplate_core::mem::{Peer, RailId, Region, RegionKind, Untrusted};
use fishplate_core::op::SignalOp;
use fishplate_core::rail::{Local, Rail, Remote, Sink};
use fishplate_sys::fabric::negotiate::negotiate;
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail};
use fishplate_testing::fabric::{Fake, Persona};

use crate::behaviour::fleet::{turn, turn_until};
use crate::engines::join_prepared;
use crate::fixture::{Checked, pair, rail};
use crate::two::{CX, Two, efa};

#[derive(Debug, Default)]
struct Seen {
    down: Vec<(Peer, PeerError)>,
    done: Vec<Result<(), CompleteError>>,
    messages: usize,
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
}

/// Checks that a silent peer fails at the deadline, even if `check_peers` is not called.
fn a_silent_peer(persona: Persona, name: &str, interface: &str, asked: bool) {
    let fake = Fake::new(persona.calm(), 1);
    let offer =
        negotiate(fake.library(), &Ask { interface: Some(interface), ..Ask::new(name) }).unwrap();
    let config =
        FabricConfig { deadline: Some(Duration::from_millis(50)), ..FabricConfig::default() };
    let mut origin = FabricRail::open(&offer, config).unwrap();
    let target = rail(&fake, name, interface, 9);
    origin.attach(Peer(0), &target.address().unwrap()).unwrap();
    fake.kill(&target.address().unwrap());
    let (mut seen, begun, mut posts) = (Seen::default(), std::time::Instant::now(), 0);
    while seen.down.is_empty() {
        // Before anything from a peer has arrived, a few messages may fail alone.
        if seen.done.len() == posts {
            let body = Untrusted::from_slice(&[0; 500]);
            let posted = origin.post_message(Peer(0), b"are you there", body, 4);
            assert!(posted.is_ok() || posts == 4, "{posted:?}");
            posts += usize::from(posted.is_ok());
        }
        origin.poll(32, &mut seen);
        if asked {
            origin.check_peers(&mut seen);
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{name}: not reported in time");
    }
    assert_eq!(seen.down, [(Peer(0), PeerError::Lost)], "{name}");
    assert!(posts <= 4 && seen.done.iter().all(Result::is_err), "{name}: {:?}", seen.done);
    let late = origin.post_message(Peer(0), b"x", Untrusted::from_slice(&[]), 5);
    assert_eq!(late, Err(PostError::PeerDown), "{name}");
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

/// A rail gives up after a few messages.
#[test]
fn a_peer_whose_connection_always_breaks_is_lost() {
    let fake = Fake::new(Persona::tcp().calm(), 1);
    let mut link = pair(&fake, "tcp", "eth0", 1);
    let mut seen = Seen::default();
    let mut posted = 0;
    while link.rails[0].post_message(link.to, b"hello", Untrusted::from_slice(&[]), posted).is_ok()
    {
        if posted == 0 {
            (0..20).for_each(|_| fake.fail(0, libc::ECONNRESET, 0, b""));
        }
        posted += 1;
        (0..50).for_each(|_| _ = link.rails[0].poll(8, &mut seen));
        assert!(posted <= 5, "{seen:?}");
    }
    assert_eq!(seen.down, [(link.to, PeerError::Lost)]);
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
