//! Cut links and fenced peers: each post still completes once and lands at most once, and no post
//! lands after a fence.

use std::collections::BTreeMap;

use fishplate_core::error::{AttachError, PeerError, PostError};
use fishplate_core::mem::{Peer, Untrusted};
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::{Dials, Packet, Sim};
use fishplate_core::rail::{Fence, Local, Posted, REOPEN_MAX, Rail, Remote};

use super::conformance::{Seen, leaked};

const A: Peer = Peer(0);
const B: Peer = Peer(1);
const LATE: u32 = 500;

/// Counts of the outcomes of posts to a cut link, without posts that succeeded.
#[derive(Debug, Default)]
struct Fates {
    lost: u32,
    lost_but_well: u32,
    landed_but_failed: u32,
    refused: u32,
}

/// Posts to a link before and after it is cut, and counts the outcomes. With `fence` the target
/// also fences the origin.
fn fates(seed: u64, fence: bool, fates: &mut Fates) {
    let packets = Box::leak(vec![Packet::EMPTY; 256].into_boxed_slice());
    let sim: &Sim<'_> = Box::leak(Box::new(Sim::new(packets, 2, 1, Dials::WILD, seed).unwrap()));
    let (mut a, mut b) = (sim.endpoint(0, 0), sim.endpoint(1, 0));
    a.attach(B, 1).unwrap();
    b.attach(A, 0).unwrap();
    let (memory, source) = (leaked(4096), leaked(128));
    let (key, _) = b.register(&memory).unwrap();
    a.import(B, key, 4096).unwrap();
    let local = Local { ptr: source.ptr(), len: 128, desc: 0 };
    let (mut here, mut there) = (Seen::default(), Seen::default());
    let (mut posted, mut reads) = (0u64, vec![]);
    let mut fenced = None;
    for turn in 0..2000 {
        if turn == 30 {
            sim.cut(0, 1, 0, LATE).unwrap();
        }
        if turn < 60 {
            let remote = Remote { key, offset: 0 };
            let result = match turn % 3 {
                // SAFETY: the memory is never freed.
                0 => unsafe { a.post_write(B, local, remote, Some(posted as u32), posted) },
                // SAFETY: the memory is never freed.
                1 => unsafe { a.post_read(B, local, remote, posted) },
                _ => a.post_message(B, &[posted as u8], Untrusted::from_slice(&[]), posted),
            };
            match result {
                Ok(state) => {
                    assert_eq!(state, Posted::Pending);
                    reads.extend((turn % 3 == 1).then_some(posted));
                    posted += 1;
                }
                Err(PostError::Again) => {}
                Err(error) => {
                    assert_eq!(error, PostError::PeerDown);
                    fates.refused += 1;
                }
            }
        }
        if fence && turn >= 40 && fenced.is_none() && b.fence(A) == Fence::Fenced {
            fenced = Some((there.landed.len(), there.messages.len()));
            assert_eq!(b.fence(A), Fence::Fenced);
        }
        a.poll(4, &mut here);
        b.poll(4, &mut there);
        if let Some(fenced) = fenced {
            assert_eq!(
                (there.landed.len(), there.messages.len()),
                fenced,
                "seed {seed}: landed after the fence"
            );
        }
    }
    assert!(
        here.down.iter().all(|(peer, why)| (*peer, *why) == (B, PeerError::Lost))
            && here.down.len() == 1
    );
    assert!(there.down.is_empty());
    let mut ends = BTreeMap::new();
    for (cx, result) in here.done {
        assert!(ends.insert(cx, result).is_none(), "seed {seed}: {cx} completed twice");
    }
    assert_eq!(ends.len() as u64, posted, "seed {seed}");
    let mut landed: Vec<u64> = there.landed.iter().map(|(_, data)| *data as u64).collect();
    landed.extend(there.messages.iter().map(|(_, bytes)| bytes[0] as u64));
    landed.sort_unstable();
    assert!(landed.windows(2).all(|two| two[0] != two[1]), "seed {seed}: landed twice");
    for (cx, result) in ends {
        if reads.contains(&cx) {
            continue;
        }
        match (result, landed.binary_search(&cx).is_ok()) {
            (Ok(()), true) => {}
            (Ok(()), false) => fates.lost_but_well += 1,
            (Err(_), true) => fates.landed_but_failed += 1,
            (Err(_), false) => fates.lost += 1,
        }
    }
}

#[test]
fn posts_to_a_cut_link_complete_once_and_land_at_most_once() {
    for fence in [false, true] {
        let mut seen = Fates::default();
        (0..200).for_each(|seed| fates(seed, fence, &mut seen));
        let Fates { lost, lost_but_well, landed_but_failed, refused } = seen;
        assert!(
            [lost, lost_but_well, landed_but_failed, refused].iter().all(|&count| count > 30),
            "{seen:?}"
        );
    }
}

#[test]
fn a_link_that_does_not_exist_is_not_cut() {
    let packets = Box::leak(vec![Packet::EMPTY; 4].into_boxed_slice());
    let sim = Sim::new(packets, 4, 16, Dials::CALM, 1).unwrap();
    for (from, to, rail) in [(4, 0, 0), (0, 4, 0), (0, 0, 16), (u16::MAX, 0, 0)] {
        assert!(
            matches!(sim.cut(from, to, rail, 0), Err(AttachError::Config(_))),
            "{from} {to} {rail}"
        );
    }
}

#[test]
fn a_reattached_endpoint_is_heard_again() {
    let packets = Box::leak(vec![Packet::EMPTY; 64].into_boxed_slice());
    let sim = Sim::new(packets, 2, 1, Dials::CALM, 3).unwrap();
    let (mut a, mut b) = (sim.endpoint(0, 0), sim.endpoint(1, 0));
    a.attach(B, 1).unwrap();
    b.attach(A, 0).unwrap();
    let mut seen = Seen::default();
    while b.fence(A) != Fence::Fenced {
        b.poll(1, &mut seen);
    }
    b.detach(A);
    b.attach(A, 0).unwrap();
    assert!(a.post_message(B, &[1], Untrusted::from_slice(&[]), 0).is_ok());
    b.poll(8, &mut seen);
    assert_eq!(seen.messages.len(), 1);
}

#[test]
fn a_closing_fence_cuts_off_all_peers_until_they_attach_the_new_address() {
    let packets = Box::leak(vec![Packet::EMPTY; 64].into_boxed_slice());
    let sim = Sim::new(packets, 3, 1, Dials::CALM, 3).unwrap();
    let mut ends = [0, 1, 2].map(|node| {
        let mut end = sim.endpoint(node, 0);
        (0..3).for_each(|peer| end.attach(Peer(peer), peer).unwrap());
        end
    });
    ends[0] = sim.endpoint(0, 0).with_closing_fence();
    (0..3).for_each(|peer| ends[0].attach(Peer(peer), peer).unwrap());
    assert!(ends[0].fences_all() && !ends[1].fences_all());
    let mut seen = [(); 3].map(|()| Seen::default());
    let old = address(&mut ends[0], B);
    // Messages from both other nodes are in flight when the first node closes its endpoint.
    for from in [1, 2] {
        ends[from].post_message(A, &[from as u8], Untrusted::from_slice(&[]), 0).unwrap();
    }
    while ends[0].fence(B) != Fence::Fenced {
        ends[1].poll(1, &mut seen[1]);
    }
    for _ in 0..400 {
        (0..3).for_each(|n| _ = ends[n].poll(4, &mut seen[n]));
    }
    assert!(seen[0].messages.is_empty());
    let down: Vec<_> = seen[0].down.iter().map(|(peer, _)| *peer).collect();
    assert_eq!(down, [A, Peer(2)], "all but the one that was fenced");
    assert!((0..3).all(|peer| ends[0].is_fenced(Peer(peer))));
    // Both nodes attach each other again, one of them at the address of the closed endpoint.
    let new = address(&mut ends[0], B);
    assert_ne!(old, new);
    for (node, theirs) in [(1, old), (2, new)] {
        let peer = Peer(node as u16);
        while ends[node].fence(A) != Fence::Fenced {
            ends[node].poll(1, &mut seen[node]);
        }
        let own = address(&mut ends[node], A);
        ends[0].rejoin(peer, &own).unwrap();
        ends[node].rejoin(A, &theirs).unwrap();
        _ = ends[node].post_message(A, &[10 + node as u8], Untrusted::from_slice(&[]), 1);
    }
    (0..400).for_each(|_| (0..3).for_each(|n| _ = ends[n].poll(4, &mut seen[n])));
    assert_eq!(seen[0].messages, [(Peer(2), vec![12])]);
    assert_eq!(ends[1].rejoin(A, b"node"), Err(AttachError::BadHandle));
}

fn address(end: &mut impl Rail, peer: Peer) -> Vec<u8> {
    let mut bytes = [0; REOPEN_MAX];
    let len = end.reopen(peer, &mut bytes).unwrap();
    bytes[..len].to_vec()
}

#[test]
fn an_unplugged_end_is_cut_off_from_all_until_it_is_plugged_in() {
    let packets = Box::leak(vec![Packet::EMPTY; 64].into_boxed_slice());
    let sim = Sim::new(packets, 3, 2, Dials::CALM, 3).unwrap();
    let mut ends: Vec<_> = (0..3).map(|node| sim.endpoint(node, 1)).collect();
    for end in &mut ends {
        (0..3).for_each(|peer| end.attach(Peer(peer), peer).unwrap());
    }
    let mut seen = [(); 3].map(|()| Seen::default());
    sim.unplug(2, 1, 0).unwrap();
    (0..400).for_each(|_| (0..3).for_each(|n| _ = ends[n].poll(4, &mut seen[n])));
    let down: Vec<Vec<_>> =
        seen.iter().map(|seen| seen.down.iter().map(|(peer, _)| peer.0).collect()).collect();
    assert_eq!(down, [vec![2], vec![2], vec![0, 1, 2]]);
    sim.plug(2, 1).unwrap();
    assert!((0..3).all(|peer| ends[2].reopen(Peer(peer), &mut [0; REOPEN_MAX]).is_some()));
    for (node, rail) in [(3, 0), (0, 2)] {
        assert!(matches!(sim.unplug(node, rail, 0), Err(AttachError::Config(_))));
        assert!(matches!(sim.plug(node, rail), Err(AttachError::Config(_))));
    }
}

#[test]
fn posts_held_back_for_a_fenced_peer_are_dropped_and_complete() {
    let faults = Faults { hold: 1000, keep: 0, ..Faults::NONE };
    let mut rail = Faulty::<_, 8>::new(Loopback::<16>::new(), Faults::NONE, 1);
    for n in 0..6 {
        rail.set_faults(if n < 3 { Faults::NONE } else { faults });
        for peer in [A, B] {
            rail.post_message(peer, &[n], Untrusted::from_slice(&[]), n.into()).unwrap();
        }
    }
    assert_eq!(rail.fence(A), Fence::Fenced);
    let mut seen = Seen::default();
    for _ in 0..8 {
        rail.poll(32, &mut seen);
    }
    assert_eq!(seen.messages.len(), 6);
    assert!(seen.messages.iter().all(|(peer, _)| *peer == B));
    assert_eq!(seen.done.len(), 6, "each that was held back");
    assert_eq!(seen.done.iter().filter(|(_, result)| result.is_err()).count(), 3);
}
