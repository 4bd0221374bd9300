//! Many peers, most of them silent. Tests which peers a pass polls, and that passes poll every peer
//! in time.

use std::sync::{Mutex, MutexGuard, PoisonError};

use fishplate_core::error::Violation;
use fishplate_core::mem::RegionKind;
use fishplate_core::sync::event::EventCount;

use super::*;
use crate::Link;
use crate::testing::{PEER, Random, Seen, TestRail, couple, settle, soon};

const PEERS: u16 = 40;
/// Number of passes that together poll each cold peer once: four peers per pass.
const ROUND: u32 = 10;

fn config() -> ShmConfig {
    ShmConfig { max_peers: PEERS, lane_cells: 64, max_message: 256, ..ShmConfig::default() }
}

/// Creates a rail with [`PEERS`] peers, each with its own rail. Only one crowd exists at a time,
/// because each peer needs eleven descriptors.
fn crowd() -> (TestRail, Vec<TestRail>, MutexGuard<'static, ()>) {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let rail = || ShmRail::new(SpinHost::new(1), config()).unwrap();
    let mut hub = rail();
    let join = |n| {
        let mut spoke = rail();
        let (x, y) = crate::socket_pair().unwrap();
        let (hubs, theirs) = (hub.profile(), spoke.profile());
        let first =
            std::thread::spawn(move || Link::over(x, crate::Role::First, &hubs, soon()).unwrap());
        spoke.attach(PEER, Link::over(y, crate::Role::Second, &theirs, soon()).unwrap()).unwrap();
        hub.attach(Peer(n), first.join().unwrap()).unwrap();
        spoke
    };
    let spokes = (0..PEERS).map(join).collect();
    (hub, spokes, alone)
}

/// Makes passes until every silent peer is cold.
fn cool(rail: &mut TestRail) {
    for _ in 0..10_000 {
        assert_eq!(rail.poll(32, &mut Seen::default()), 0);
    }
    assert!(rail.roster.hot.is_empty(), "hot without a reason: {:?}", rail.roster.hot);
}

fn say(spoke: &mut TestRail, n: u8) {
    spoke.post_message(PEER, &[n], Untrusted::from_slice(&[]), 0).unwrap();
    spoke.flush();
}

#[test]
fn a_peer_that_begins_to_talk_is_found_within_a_round_and_then_by_every_pass() {
    let (mut hub, mut spokes, _alone) = crowd();
    let mut random = Random(0xc01d);
    for _ in 0..20 {
        cool(&mut hub);
        for _ in 0..random.below(200) {
            hub.poll(32, &mut Seen::default());
        }
        let n = random.below(spokes.len());
        let mut seen = Seen::default();
        say(&mut spokes[n], 1);
        let passes = (1..).find(|_| hub.poll(32, &mut seen) != 0).unwrap();
        assert!(passes <= ROUND, "found in pass {passes}");
        assert_eq!(hub.roster.hot, [Peer(n as u16)]);
        for n in 2..100 {
            say(&mut spokes[usize::from(hub.roster.hot[0].0)], n);
            assert_eq!(hub.poll(32, &mut seen), 1);
        }
    }
}

#[test]
fn a_peer_that_pauses_stays_hot() {
    let (mut hub, mut spokes, _alone) = crowd();
    for n in 0..20u16 {
        cool(&mut hub);
        // Each message arrives at a different point between two checks for cold peers.
        (0..n * 211).for_each(|_| assert_eq!(hub.poll(32, &mut Seen::default()), 0));
        say(&mut spokes[usize::from(n)], 1);
        while hub.poll(32, &mut Seen::default()) == 0 {}
        for pass in 0..1000 {
            assert_eq!(hub.roster.hot, [Peer(n)], "cold after {pass} silent passes");
            hub.poll(32, &mut Seen::default());
        }
    }
}

#[test]
fn peers_that_flood_keep_no_cold_one_from_being_heard() {
    let (mut hub, mut spokes, _alone) = crowd();
    cool(&mut hub);
    let mut seen = Seen::default();
    for pass in 0..=ROUND {
        while spokes[7].post_message(PEER, &[7], Untrusted::from_slice(&[]), 0).is_ok() {}
        if pass == 1 {
            say(&mut spokes[8], 8);
        }
        assert_eq!(hub.poll(4, &mut seen), if hub.roster.hot.is_empty() { 0 } else { 4 });
    }
    for _ in 0..2 {
        hub.poll(4, &mut seen);
    }
    assert_eq!(seen.messages.iter().filter(|message| **message == [8]).count(), 1);
}

#[test]
fn an_owner_that_is_about_to_sleep_has_looked_at_every_peer() {
    let (mut hub, mut spokes, _alone) = crowd();
    let host = SpinHost::new(1);
    let wait_object = hub.wait_object();
    for (n, spoke) in spokes.iter_mut().enumerate() {
        cool(&mut hub);
        // Peers do not notify the hub before it announces a sleep.
        say(spoke, 1);
        let mut seen = Seen::default();
        let armed = wait_object.prepare(&host).recheck(|| hub.poll(32, &mut seen) != 0);
        assert!(armed.is_none() && seen.messages == [[1]], "slept through peer {n}");
    }
}

#[test]
fn what_comes_before_the_last_look_wakes_an_owner_that_passed_it_over() {
    let (mut hub, mut spokes, _alone) = crowd();
    let host = SpinHost::new(1);
    let wait_object = hub.wait_object();
    let word: &EventCount = &wait_object;
    let mut passed_over = 0;
    for spoke in &mut spokes {
        cool(&mut hub);
        let mut seen = Seen::default();
        let armed = word.prepare(&host).recheck(|| {
            say(spoke, 1);
            hub.poll(32, &mut seen) != 0
        });
        // The peer has notified the hub, so this sleep would end at once.
        assert!(!word.is_announced());
        passed_over += u32::from(armed.is_some());
        drop(armed);
        while seen.messages.is_empty() {
            hub.poll(32, &mut seen);
        }
    }
    assert!(passed_over > 20, "only {passed_over} were passed over: the test proves nothing");
}

#[test]
fn a_cold_peer_that_is_given_up_is_reported_and_looked_at_no_more() {
    let (mut hub, mut spokes, _alone) = crowd();
    cool(&mut hub);
    let mut seen = Seen::default();
    hub.quarantine(Peer(9), PeerError::Protocol(Violation::Kind));
    assert_eq!(hub.poll(32, &mut seen), 1);
    assert_eq!(seen.down, [(Peer(9), PeerError::Protocol(Violation::Kind))]);
    say(&mut spokes[9], 1);
    cool(&mut hub);
    // With other peers present, the checks find every peer that left.
    let (gone, left) = spokes.split_at_mut(20);
    gone.iter_mut().for_each(|spoke| spoke.detach(PEER));
    say(&mut left[0], 1);
    for check in 0..2 * usize::from(PEERS).div_ceil(CHECKED) {
        let before = seen.down.len();
        hub.check_peers(&mut seen);
        assert!(seen.down.len() - before <= CHECKED, "check {check}");
    }
    assert_eq!(seen.down.len(), 20);
    assert!(seen.down[1..].iter().all(|(_, why)| *why == PeerError::Closed));
    while seen.messages.is_empty() {
        hub.poll(32, &mut seen);
    }
    // Both hot and cold peers may be detached after they failed.
    (0..30).for_each(|n| hub.detach(Peer(n)));
    cool(&mut hub);
    hub.attach_self(Peer(9)).unwrap();
    assert_eq!(hub.roster.hot, [Peer(9)]);
}

#[test]
fn a_peer_is_hot_once_whichever_of_the_two_ends_talks_first_and_not_when_it_has_left() {
    let (mut hub, mut spokes, _alone) = crowd();
    cool(&mut hub);
    hub.post_message(Peer(3), &[1], Untrusted::from_slice(&[]), 0).unwrap();
    assert_eq!(hub.roster.hot, [Peer(3)]);
    say(&mut spokes[3], 2);
    let mut seen = Seen::default();
    for _ in 0..=ROUND {
        hub.poll(32, &mut seen);
    }
    assert_eq!((&hub.roster.hot[..], seen.messages.len()), (&[Peer(3)][..], 1));
    hub.detach(Peer(3));
    assert_eq!(hub.roster.hot, []);
}

#[test]
fn what_waits_for_room_or_an_answer_keeps_its_peer_hot() {
    let config = ShmConfig { force_staging: true, ..config() };
    let mut rails = couple(config);
    let mut memory = vec![0u8; 50_000];
    // SAFETY: the memory outlives the rails, and is read only after the write has completed.
    let region = unsafe {
        Region::new(NonNull::from(&mut *memory).cast(), memory.len(), RegionKind::Private)
    };
    let key = rails[1].register(&region).unwrap().0;
    rails[0].import(PEER, key, 50_000).unwrap();
    let mut data = Random(3).bytes(50_000);
    let local = Local { ptr: NonNull::from(&mut *data).cast(), len: data.len(), desc: 0 };
    let remote = Remote { key, offset: 0 };
    // SAFETY: the bytes outlive the rails, and nothing writes to them.
    let posted = unsafe { rails[0].post_write(PEER, local, remote, Some(5), 1) };
    assert_eq!(posted, Ok(Posted::Pending));
    let mut seen = [Seen::default(), Seen::default()];
    for _ in 0..20_000 {
        rails[0].poll(32, &mut seen[0]);
    }
    assert_eq!(rails[0].roster.hot, [PEER]);
    settle(&mut rails, &mut seen);
    assert_eq!((&seen[0].done[..], &seen[1].landed[..]), (&[(1, Ok(()))][..], &[5][..]));
    assert!(memory == data);
}
