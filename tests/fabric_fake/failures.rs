//! A peer that is silent, a cable that is cut, a write that is too long.

use std::time::Duration;

use fishplate::fake::{Fake, Persona};
use fishplate_core::engine::Config;
use fishplate_core::error::PostError;
use fishplate_core::mem::{Peer, Untrusted};
use fishplate_core::op::SignalOp;
use fishplate_core::rail::{Local, Rail, Remote};
use fishplate_sys::fabric::negotiate::negotiate;
use fishplate_sys::fabric::{Ask, FabricRail};

use crate::behaviour::fleet::turn;
use crate::fixture::{pair, rail};
use crate::two::{CX, efa};

#[test]
fn a_silent_peer_is_given_up_at_the_deadline() {
    use fishplate_core::error::{CompleteError, PeerError};
    use fishplate_core::rail::Sink;
    use fishplate_sys::fabric::FabricConfig;

    #[derive(Default)]
    struct Seen(Vec<(Peer, PeerError)>, Vec<Result<(), CompleteError>>);
    impl Sink for Seen {
        fn done(&mut self, _: u64, result: Result<(), CompleteError>) {
            self.1.push(result);
        }
        fn landed(&mut self, _: Peer, _: u32) {}
        fn message(&mut self, _: Peer, _: Untrusted<'_>) {}
        fn peer_down(&mut self, peer: Peer, why: PeerError) {
            self.0.push((peer, why));
        }
    }
    let fake = Fake::new(Persona::verbs_rxm().calm(), 1);
    let offer = negotiate(fake.library(), &Ask::new("verbs;ofi_rxm")).unwrap();
    let config = FabricConfig { deadline: Some(Duration::from_millis(50)), ..FabricConfig::default() };
    let mut origin = FabricRail::open(&offer, config).unwrap();
    let target = rail(&fake, "verbs;ofi_rxm", "mlx5_0", 9);
    origin.attach(Peer(0), &target.address().unwrap()).unwrap();
    fake.kill(&target.address().unwrap());
    let posted = origin.post_message(Peer(0), b"are you there", Untrusted::from_slice(&[0; 500]), 4);
    assert!(posted.is_ok(), "{posted:?}");
    let (mut seen, begun) = (Seen::default(), std::time::Instant::now());
    while seen.0.is_empty() {
        origin.poll(32, &mut seen);
        origin.check_peers(&mut seen);
        assert!(begun.elapsed() < Duration::from_secs(20), "no end of waiting");
    }
    assert_eq!(seen.0, [(Peer(0), PeerError::Died)]);
    assert!(seen.1.len() == 1 && seen.1[0].is_err(), "{:?}", seen.1);
    let late = origin.post_message(Peer(0), b"x", Untrusted::from_slice(&[]), 5);
    assert_eq!(late, Err(PostError::PeerDown));
}

#[test]
fn a_cut_cable_is_silence_and_nothing_lands_any_more() {
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
fn a_longer_write_than_the_provider_takes_is_refused_by_the_rail() {
    let small = Persona { max_rma: 4096, ..Persona::efa_direct() };
    let fake = Fake::new(small, 41);
    let mut link = pair(&fake, "efa-direct", "rdmap0-rdm", 41);
    let most = link.rails[0].caps().max_rma;
    assert_eq!(most, 4096);
    let bytes = vec![0u8; most + 1];
    let ptr = std::ptr::NonNull::new(bytes.as_ptr().cast_mut()).unwrap();
    let local = Local { ptr, len: most + 1, desc: 0 };
    let remote = Remote { key: Default::default(), offset: 0 };
    // SAFETY: refused before anything is read.
    let refused = unsafe { link.rails[0].post_write(Peer(0), local, remote, None, 1) };
    assert!(refused.is_err(), "{refused:?}");
}
