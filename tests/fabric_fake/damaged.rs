//! A provider that frees the record of a read twice if the endpoint closes while the data arrives.
//! tcp of libfabric 1.17.0 does that. The bug damages the domain, so the rail must open another
//! domain.

use std::time::{Duration, Instant};

use fishplate_core::error::{AttachError, CompleteError, PeerError, PostError};
use fishplate_core::mem::{Peer, Region, Untrusted};
use fishplate_core::rail::{Fence, Local, REOPEN_MAX, Rail, RailKey, Remote, Sink};
use fishplate_sys::fabric::FabricRail;
use fishplate_testing::fabric::{Fake, Persona};

use crate::conformance::{leaked, look};
use crate::fixture::{Checked, rail};

const LEN: usize = 4096;
const A: Peer = Peer(0);
const B: Peer = Peer(1);
const C: Peer = Peer(2);

#[derive(Default)]
struct Seen {
    down: Vec<(Peer, PeerError)>,
    done: Vec<(u64, Result<(), CompleteError>)>,
}

impl Sink for Seen {
    fn done(&mut self, cx: u64, result: Result<(), CompleteError>) {
        self.done.push((cx, result));
    }
    fn landed(&mut self, _: Peer, _: u32) {}
    fn message(&mut self, _: Peer, _: Untrusted<'_>) {}
    fn peer_down(&mut self, peer: Peer, why: PeerError) {
        self.down.push((peer, why));
    }
}

struct End {
    rail: FabricRail,
    seen: Seen,
    memory: Region,
    key: RailKey,
    desc: u64,
}

/// Three rails, attached to each other. Each has registered memory that is filled with the rail's
/// number.
struct Three {
    ends: [End; 3],
    network: Checked,
}

impl Three {
    fn new() -> Three {
        let fake = Fake::new(Persona { jitter: 0, refuse: 0, ..Persona::net() }, 7);
        let mut ends = [0u8, 1, 2].map(|own| {
            let mut rail = rail(&fake, "tcp", "eth0", own.into());
            let memory = leaked(LEN);
            // SAFETY: the memory is never freed, and nobody else knows it yet.
            unsafe { memory.ptr().as_ptr().write_bytes(own, LEN) };
            let (key, desc) = rail.register(&memory).unwrap();
            End { rail, seen: Seen::default(), memory, key, desc }
        });
        let addresses = ends.each_ref().map(|end| end.rail.address().unwrap());
        let keys = ends.each_ref().map(|end| end.key);
        for (own, end) in ends.iter_mut().enumerate() {
            for other in (0..3).filter(|&other| other != own) {
                end.rail.attach(Peer(other as u16), &addresses[other]).unwrap();
                end.rail.import(Peer(other as u16), keys[other], LEN as u64).unwrap();
            }
        }
        Three { ends, network: Checked(fake) }
    }

    /// Posts a read of the first half of another end's memory.
    fn read(&mut self, own: Peer, from: Peer, cx: u64) -> Result<(), PostError> {
        let remote = Remote { key: self.ends[from.0 as usize].key, offset: 0 };
        let End { rail, memory, desc, .. } = &mut self.ends[own.0 as usize];
        let local = Local { ptr: memory.ptr(), len: LEN / 2, desc: *desc };
        // SAFETY: the memory is never freed, and nothing accesses it before the read is done.
        unsafe { rail.post_read(from, local, remote, cx) }.map(drop)
    }

    fn until(&mut self, what: &str, mut ready: impl FnMut(&mut [End; 3]) -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !ready(&mut self.ends) {
            for End { rail, seen, .. } in &mut self.ends {
                rail.poll(1, seen);
                rail.check_peers(seen);
            }
            assert!(Instant::now() < end, "{what}");
        }
    }

    /// Attaches two ends to each other again.
    fn rejoin(&mut self, one: Peer, other: Peer) {
        for (own, peer) in [(one, other), (other, one)] {
            self.until("it opens again", |ends| {
                ends[own.0 as usize].rail.reopen(peer, &mut [0; REOPEN_MAX]).is_some()
            });
        }
        for (own, peer) in [(one, other), (other, one)] {
            let theirs = self.ends[peer.0 as usize].rail.address().unwrap();
            self.ends[own.0 as usize].rail.rejoin(peer, &theirs).unwrap();
        }
    }

    /// Checks that both ends reach each other's memory under the original keys.
    fn exchange(&mut self, one: Peer, other: Peer) {
        for (own, from, cx) in [(one, other, 100), (other, one, 101)] {
            let before = self.ends[own.0 as usize].seen.done.len();
            self.read(own, from, cx).unwrap();
            self.until("a read", |ends| ends[own.0 as usize].seen.done.len() > before);
            assert_eq!(self.ends[own.0 as usize].seen.done[before], (cx, Ok(())));
            let halves = look(&self.ends[own.0 as usize].memory);
            let theirs = look(&self.ends[from.0 as usize].memory)[0];
            assert!(halves[..LEN / 2].iter().all(|&byte| byte == theirs));
        }
    }

    fn replaced(&self) -> [u32; 3] {
        self.ends.each_ref().map(|end| end.rail.stats().replaced)
    }
}

#[test]
fn a_fence_during_a_read_replaces_the_domain() {
    let mut three = Three::new();
    let objects = three.network.0.open_objects();
    three.read(A, B, 1).unwrap();
    // The read is in flight: its data has not arrived.
    let End { rail, seen, .. } = &mut three.ends[0];
    rail.poll(1, seen);
    assert_eq!(seen.done, []);
    assert_eq!(rail.fence(B), Fence::Fenced);
    assert_eq!(three.network.0.counts().damaged, 1, "the read was in flight");
    assert_eq!(three.ends[1].rail.fence(A), Fence::Fenced);
    assert_eq!(three.ends[2].rail.fence(A), Fence::Fenced);
    // Rejoins in a different order, so that the peers get other indexes in the address vector.
    three.rejoin(A, C);
    three.rejoin(A, B);
    assert_eq!(three.ends[0].seen.done, [(1, Err(CompleteError::PeerDown))]);
    assert_eq!(three.ends[0].seen.down, [(C, PeerError::Lost)]);
    three.exchange(A, B);
    three.exchange(A, C);
    assert_eq!(three.replaced(), [1, 1, 1]);
    assert_eq!(three.network.0.open_objects(), objects, "the old domain is closed");
    // Memory that was registered in the old domain can be deregistered.
    let End { rail, key, .. } = &mut three.ends[0];
    rail.deregister(*key).unwrap();
    assert_eq!(three.network.0.open_objects(), objects - 1);
}

/// The provider may free the record twice too if the peer closes the connection. With other peers,
/// the rail waits for a fence that closes its endpoint anyway.
#[test]
fn a_read_that_ends_because_the_peer_has_closed_replaces_the_domain() {
    for others in [false, true] {
        let mut three = Three::new();
        if !others {
            three.ends[0].rail.detach(C);
        }
        three.read(A, B, 1).unwrap();
        assert_eq!(three.ends[1].rail.fence(A), Fence::Fenced);
        three.until("the read ends", |ends| !ends[0].seen.done.is_empty());
        assert_eq!(three.ends[0].seen.done, [(1, Err(CompleteError::PeerDown))]);
        three.until("nothing is in flight", |ends| ends[0].rail.fence_left(B) != Fence::Pending);
        let End { rail, .. } = &mut three.ends[0];
        match others {
            false => {
                assert_eq!(rail.fence_left(B), Fence::Unknown, "the endpoint must be closed");
                assert_eq!(rail.fence(B), Fence::Fenced);
            }
            true => {
                assert_eq!(rail.fence_left(B), Fence::Fenced);
                assert_eq!(rail.fence(C), Fence::Fenced);
            }
        }
        three.rejoin(A, B);
        three.exchange(A, B);
        assert_eq!(three.replaced(), [1, 1, 0]);
    }
}

/// The rail stays out of use and reports the error. It returns once memory can be registered.
#[test]
fn memory_that_cannot_be_registered_again_keeps_the_rail_out_of_use() {
    let mut three = Three::new();
    let objects = three.network.0.open_objects();
    three.read(A, B, 1).unwrap();
    three.network.0.refuse_registrations(true);
    assert_eq!(three.ends[0].rail.fence(B), Fence::Fenced);
    three.network.0.refuse_registrations(false);
    assert_eq!(three.ends[1].rail.fence(A), Fence::Fenced);
    three.network.0.refuse_registrations(true);
    let from = Instant::now();
    three.until("the pause is over", |ends| {
        assert_eq!(ends[0].rail.reopen(B, &mut [0; REOPEN_MAX]), None);
        from.elapsed() > Duration::from_millis(20)
    });
    let theirs = three.ends[1].rail.address().unwrap();
    let End { rail, .. } = &mut three.ends[0];
    assert_eq!(rail.rejoin(B, &theirs), Err(AttachError::System(libc::ENOMEM)));
    assert!(rail.is_fenced(B) && rail.is_fenced(C));
    assert_eq!(rail.stats().last_error, (libc::ENOMEM, 0));
    assert!(
        rail.last_error().is_some_and(|text| text.contains("ENOMEM")),
        "{:?}",
        rail.last_error()
    );
    assert_eq!(three.read(A, B, 2), Err(PostError::PeerDown));
    assert_eq!(three.network.0.open_objects(), objects - 1, "nothing but the endpoint is closed");
    three.network.0.refuse_registrations(false);
    // Opens an endpoint in another domain.
    three.ends[0].rail.rejoin(B, &theirs).unwrap();
    let ours = three.ends[0].rail.address().unwrap();
    three.until("it opens again", |ends| ends[1].rail.reopen(A, &mut [0; REOPEN_MAX]).is_some());
    three.ends[1].rail.rejoin(A, &ours).unwrap();
    three.exchange(A, B);
    assert_eq!(three.replaced(), [1, 1, 0]);
    assert_eq!(three.network.0.open_objects(), objects);
}

/// The provider does not close the old registrations. The rail keeps them open, and works.
#[test]
fn old_registrations_that_stay_open_are_kept() {
    let mut three = Three::new();
    three.read(A, B, 1).unwrap();
    three.network.0.keep_registrations(true);
    assert_eq!(three.ends[0].rail.fence(B), Fence::Fenced);
    three.network.0.keep_registrations(false);
    assert_eq!(three.ends[1].rail.fence(A), Fence::Fenced);
    three.rejoin(A, B);
    three.exchange(A, B);
    assert_eq!(three.ends[0].rail.stats().kept, 1);
    let Three { ends, network } = three;
    drop(ends);
    assert_eq!(network.0.open_objects(), 0, "closed with the rail");
}
