//! A peer that sends requests to send with payloads in unannounced memory.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use fishplate_core::engine::Engine;
use fishplate_core::engine::protocol::MatchConfig;
use fishplate_core::engine::tag::Tag;
use fishplate_core::mem::{PeerId, Region, RegionKind, Untrusted};
use fishplate_core::rail::Rail;

use super::raw::request_to_send;
use super::support::*;

/// How long an import may wait for an announcement.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Creates an engine over `near`. Its peer is a raw rail that sends one request to send for each of
/// these keys.
pub fn requests<R: Rail>(
    near: R,
    mut far: R,
    attach: impl FnOnce(&mut R, &mut Engine<'static, R, 1>, PeerId),
    keys: &[u64],
) {
    let mut victim = engine(near, CONFIG, MatchConfig { eager: 4096, ..MATCHING });
    let peer = victim.reserve_peer().unwrap();
    attach(&mut far, &mut victim, peer);
    victim.connect_peer(peer, 1).unwrap();
    let words = leak(0u64, 512);
    // SAFETY: the memory is leaked, and accessed only by the engine.
    let region =
        unsafe { Region::new(NonNull::from(&mut words[0]).cast(), 4096, RegionKind::Private) };
    let region = victim.register(region).unwrap();
    for (n, key) in (0..).zip(keys) {
        victim.recv(None, Tag::from(1), Tag::ZERO, Some((region.at(0), 64)), n.into()).unwrap();
        let message = request_to_send(n, 64, 4096, *key, 0);
        far.post_message(PEER, &message, Untrusted::from_slice(&[]), 0).unwrap();
        let began = Instant::now();
        assert!(victim.progress() > 0);
        let took = began.elapsed();
        assert!(took < TIMEOUT / 2, "{took:?} for key {key:#x}");
        assert_eq!(victim.peer_error(peer), Ok(None));
    }
    // The engine cannot import the regions, so it requests each payload in chunks.
    let mut seen = Seen::default();
    while far.poll(32, &mut seen) > 0 {}
    let pulls = seen.messages.iter().filter(|message| message[0] == 20).count();
    assert_eq!(pulls, keys.len());
}
