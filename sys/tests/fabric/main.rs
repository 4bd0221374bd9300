//! Tests the `Rail` contract of [`FabricRail`](fishplate_sys::fabric::FabricRail) in one process,
//! on providers that work on any machine. Each test module is one provider with one configuration.

mod atomics;
mod bad_input;
#[path = "../../../core/tests/support/mod.rs"]
mod behaviour;
#[path = "../../../core/tests/conformance/mod.rs"]
mod conformance;
mod cut;
mod engines;
#[path = "../../../tests/fence/mod.rs"]
mod fence;
mod processes;
mod support;
mod words;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use conformance::{Fixture, Link};
use fishplate_core::error::{CompleteError, PeerError, PostError};
use fishplate_core::mem::{Peer, Untrusted};
use fishplate_core::rail::{Local, Rail, Remote, Sink};
use fishplate_sys::fabric::negotiate::Progress;
use fishplate_sys::fabric::persona::Notify;
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail};
use support::{open, rails};

/// The target's peer number at the origin, and the origin's peer number at the target.
const TO: Peer = Peer(5);
const FROM: Peer = Peer(2);

fn pair(ask: &Ask<'_>, config: FabricConfig, seed: u64) -> Link<FabricRail> {
    let mut ends = [open(ask, config, seed), open(ask, config, !seed)];
    let addresses = ends.each_ref().map(|end| end.address().unwrap());
    ends[0].attach(TO, &addresses[1]).unwrap();
    ends[1].attach(FROM, &addresses[0]).unwrap();
    Link { rails: ends.into(), origin: 0, target: 1, to: TO, from: FROM }
}

/// Ends the target without a goodbye. Returns false if no operation would be lost: a provider with
/// automatic progress may have completed all operations already.
fn kill(link: &mut Link<FabricRail>) -> bool {
    let info = &link.rails[0].offer().info;
    let (major, minor) = info.library().version();
    if info.provider() == "shm" && major >= 2 {
        // The provider does not detect this death within one process. The test in `processes` kills
        // another process.
        println!(
            "SKIPPED a peer that dies in the same process: shm of libfabric {major}.{minor} keeps \
             reading the memory of an endpoint that this process has closed, and crashes"
        );
        return false;
    }
    if link.rails[0].progress() == Progress::Auto {
        return false;
    }
    link.rails.truncate(1);
    true
}

const TAKEN: &str = "the provider executes what it has accepted";

/// Requests manual progress, so nothing happens between the polls of a test.
const fn manual(provider: &'static str) -> Ask<'static> {
    Ask { progress: Some(Progress::Manual), ..Ask::new(provider) }
}

const fn notify(provider: &'static str, notify: Notify) -> Ask<'static> {
    Ask { notify: Some(notify), ..manual(provider) }
}

const fn with_atomics(provider: &'static str) -> Ask<'static> {
    Ask { atomics: true, ..manual(provider) }
}

/// Does not inject: an injected write completes at once, so a later error would go unreported.
const TRACKED: FabricConfig = FabricConfig { inject: false, ..support::SMALL };
const MORE: FabricConfig = FabricConfig { more: Some(true), ..TRACKED };
const ATOMICS: FabricConfig = FabricConfig { native_atomics: true, ..TRACKED };
const UNSEEN: &str = "an injected write does not report its error";

rails! {
    tcp: manual("tcp"), TRACKED, None;
    tcp_auto: Ask::new("tcp"), TRACKED, None;
    tcp_inject: manual("tcp"), support::SMALL, Some(UNSEEN);
    tcp_message: notify("tcp", Notify::Message), TRACKED, None;
    tcp_more: manual("tcp"), MORE, None;
    tcp_source: notify("tcp", Notify::Source), TRACKED, None;
    rxm: manual("tcp;ofi_rxm"), TRACKED, None;
    rxm_auto: Ask::new("tcp;ofi_rxm"), TRACKED, None;
    rxm_inject: manual("tcp;ofi_rxm"), support::SMALL, Some(UNSEEN);
    rxm_message: notify("tcp;ofi_rxm", Notify::Message), TRACKED, None;
    rxm_atomics: with_atomics("tcp;ofi_rxm"), ATOMICS, None;
    shm: manual("shm"), TRACKED, None;
    shm_inject: manual("shm"), support::SMALL, Some(UNSEEN);
    shm_message: notify("shm", Notify::Message), TRACKED, None;
    shm_source: notify("shm", Notify::Source), TRACKED, None;
    shm_atomics: with_atomics("shm"), ATOMICS, None;
}

/// A flush posts the held write. The test does not poll the origin after the flush.
#[test]
fn a_flush_closes_the_batch() {
    if let Some(why) = support::absent() {
        return println!("SKIPPED a_flush_closes_the_batch: {why}");
    }
    let Link { rails, .. } = pair(&Ask::new("tcp"), MORE, 4);
    let [mut origin, mut target]: [FabricRail; 2] = rails.try_into().unwrap();
    let source = conformance::leaked(4096);
    let (_, desc) = origin.register(&source).unwrap();
    let memory = conformance::leaked(4096);
    let (key, _) = target.register(&memory).unwrap();
    origin.import(TO, key, 4096).unwrap();
    let (local, remote) = (Local { ptr: source.ptr(), len: 1024, desc }, Remote { key, offset: 0 });
    let (mut there, mut here) = (conformance::Seen::default(), conformance::Seen::default());
    // The first write also connects the two rails.
    for n in 0..3 {
        let before = there.landed.len();
        // SAFETY: the source is never freed or changed.
        while unsafe { origin.post_write(TO, local, remote, Some(n), 0) } == Err(PostError::Again) {
            origin.poll(8, &mut here);
        }
        for _ in 0..1000 {
            target.poll(8, &mut there);
        }
        assert_eq!(there.landed.len(), before, "write {n} went out before the flush");
        origin.flush();
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while there.landed.len() == before {
            // Connecting needs progress on both sides.
            if n == 0 {
                origin.poll(8, &mut here);
            }
            target.poll(8, &mut there);
            assert!(std::time::Instant::now() < end, "write {n} did not go out with the flush");
        }
        while here.done.len() <= n as usize {
            origin.poll(8, &mut here);
        }
    }
}

/// A sink that records the number of flushes so far at each event.
struct Looks(Arc<AtomicU32>, Vec<(&'static str, u32)>);

impl Sink for Looks {
    fn done(&mut self, _: u64, _: Result<(), CompleteError>) {
        self.1.push(("done", self.0.load(Relaxed)));
    }
    fn landed(&mut self, _: Peer, _: u32) {
        self.1.push(("landed", self.0.load(Relaxed)));
    }
    fn message(&mut self, _: Peer, _: Untrusted<'_>) {
        self.1.push(("message", self.0.load(Relaxed)));
    }
    fn peer_down(&mut self, _: Peer, _: PeerError) {}
}

#[test]
fn a_device_is_flushed_before_arrivals_are_reported_and_not_for_ends() {
    if let Some(why) = support::absent() {
        return println!("SKIPPED a_device_is_flushed_before_arrivals: {why}");
    }
    let Link { rails, .. } = pair(&manual("shm"), TRACKED, 4);
    let [mut origin, mut target]: [FabricRail; 2] = rails.try_into().unwrap();
    let source = conformance::leaked(64);
    let (_, desc) = origin.register(&source).unwrap();
    let (key, _) = target.register(&conformance::leaked(64)).unwrap();
    origin.import(TO, key, 64).unwrap();
    let looks = || Looks(Arc::new(AtomicU32::new(0)), vec![]);
    let (mut here, mut there) = (looks(), looks());
    for (rail, looks) in [(&mut origin, &here), (&mut target, &there)] {
        let calls = looks.0.clone();
        let flush = move || _ = calls.fetch_add(1, Relaxed);
        rail.reach(Box::new(support::Flushed(flush))).unwrap();
    }
    let local = Local { ptr: source.ptr(), len: 64, desc };
    for n in 0..10u32 {
        let (landed, ended) = (there.1.len(), here.1.len());
        // SAFETY: the source is never freed or changed.
        while unsafe { origin.post_write(TO, local, Remote { key, offset: 0 }, Some(n), 0) }
            == Err(PostError::Again)
        {
            origin.poll(8, &mut here);
            target.poll(8, &mut there);
        }
        while there.1.len() == landed || here.1.len() == ended {
            origin.poll(8, &mut here);
            target.poll(8, &mut there);
        }
        while origin.post_message(TO, &[1], Untrusted::from_slice(&[]), 0) == Err(PostError::Again)
        {
            origin.poll(8, &mut here);
        }
        while there.1.len() == landed + 1 {
            target.poll(8, &mut there);
        }
    }
    let want: Vec<_> =
        (0..10).flat_map(|n| [("landed", 2 * n + 1), ("message", 2 * n + 2)]).collect();
    assert_eq!(there.1, want);
    assert!(here.1.iter().all(|&look| look == ("done", 0)), "{:?}", here.1);
}
