//! Waits for a peer that may be gone, over a rail that learns this only from its posts. The engine
//! asks the peer at growing intervals, and only if it waits for this peer.

use fishplate_core::engine::protocol::{Payload, Received, RecvSlot};
use fishplate_core::engine::tag::PostedSlot;
use fishplate_core::engine::{Asleep, Config, Notice, Signal, Waiter};
use fishplate_core::error::{AttachError, OpError, PeerError, PostError, WaitError};
use fishplate_core::mem::{Peer, RemoteId};
use fishplate_core::op::{Cmp, Fault};
use fishplate_core::rail::Caps;
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::sync::host::SpinHost;

use super::rig::*;
use super::support::tap::{Event, NOW, Post, Shared, Tap, Verb, shared};
use super::support::*;

type Rig = Own1<Tap<Loopback<64>, true>, 1>;

/// Interval between two checks, in nanoseconds.
const CHECK: u64 = 10_000_000;
const SECOND: u64 = 100 * CHECK;

/// An engine that is its own peer, over a rail that reports no arrivals, and an imported region.
fn rig() -> (Rig, RemoteId, Shared) {
    rig_of(shared())
}

fn rig_of(control: Shared) -> (Rig, RemoteId, Shared) {
    NOW.set(7 * SECOND);
    let mut own = own1(Config::DEFAULT, SMALL, [Tap::timed(Loopback::new(), 0, &control)]);
    let into = own.into;
    let there = import(&mut own.engine, own.me, into);
    {
        let mut control = control.borrow_mut();
        (control.mute, control.heard, control.tick) = (true, Some(3), CHECK);
        // The peer acknowledges nothing, and so its rail's queue must not fill.
        control.absorbs = true;
    }
    (own, there, control)
}

/// Returns whether the post requests an acknowledgement, or greets a peer.
fn asks(post: &Post) -> bool {
    post.verb == Verb::Message
        && (post.bytes[0] == 5 && post.bytes[2] == 1 || post.bytes[0] == HELLO)
}

/// The kind of a message that greets a peer.
const HELLO: u8 = 7;

/// Checks the peers for this many seconds. Returns the seconds in which the engine asked.
fn watch(own: &mut Rig, control: &Shared, seconds: u64) -> Vec<u64> {
    let mut asked = vec![];
    for n in 0..seconds * SECOND / CHECK {
        own.engine.check_peers();
        own.engine.progress();
        let posts = std::mem::take(&mut control.borrow_mut().posts);
        asked.extend(posts.iter().filter(|post| asks(post)).map(|_| (n + 1) * CHECK / SECOND));
    }
    asked
}

#[test]
fn a_silent_peer_is_asked_at_growing_intervals_while_a_number_is_in_flight() {
    let (mut own, there, control) = rig();
    assert_eq!(watch(&mut own, &control, 20), []);
    assert_eq!(control.borrow().doubts, [], "nobody waits");
    own.engine.signal(CX, Signal::set(there.at(0), 1), Notice::Silent).unwrap();
    // The first look only notes what was heard.
    let times = watch(&mut own, &control, 140);
    assert!(times.first().is_some_and(|&first| first <= 2), "{times:?}");
    // The rail hears of each request, and looks closer only then.
    let told = control.borrow().doubts.iter().filter(|(.., asks)| *asks).count();
    assert_eq!(told, times.len());
    let gaps: Vec<_> = times.windows(2).map(|two| two[1] - two[0]).collect();
    assert_eq!(gaps, [1, 2, 4, 8, 16, 32, 32, 32], "{times:?}");
    // Something arrives every two seconds.
    let mut asked = vec![];
    for n in 0..20 {
        control.borrow_mut().heard = Some(10 + n);
        asked.extend(watch(&mut own, &control, 2));
    }
    assert!((18..=20).contains(&asked.len()), "once for each silence: {asked:?}");
    // A post is outstanding, so the rail learns of a failure.
    control.borrow_mut().heard = None;
    assert_eq!(watch(&mut own, &control, 20), []);
}

/// Lets requests fail: the peer is gone.
fn lose(control: &Shared) {
    let told = control.clone();
    control.borrow_mut().refuse = Some(Box::new(move |post| {
        if !asks(post) {
            return None;
        }
        let mut control = told.borrow_mut();
        control.mute = false;
        control.inject.push_back(Event::Down(Peer(0), PeerError::Lost));
        Some(PostError::Again)
    }));
}

#[test]
fn a_wait_for_a_signal_of_a_peer_that_is_gone_ends() {
    for named in [true, false] {
        let (mut own, _, control) = rig();
        lose(&control);
        let (host, asleep) = (SpinHost::new(CHECK), Asleep::new());
        let mut waiter = Waiter::awake(&host, &asleep);
        let from = named.then_some(own.me);
        let at = own.into.at(0);
        let waited = own.engine.wait_signal(at, Cmp::Eq, 1, from, &mut waiter, 1000 * SECOND);
        match named {
            true => assert_eq!(waited, Err(WaitError::PeerFailed(own.me, PeerError::Lost))),
            false => assert!(matches!(waited, Err(WaitError::Deadline(_))), "{waited:?}"),
        }
        assert_eq!(control.borrow().doubts.is_empty(), !named);
        // The engine does not go on to ask for the sake of a wait that is over.
        control.borrow_mut().doubts.clear();
        watch(&mut own, &control, 10);
        assert_eq!(control.borrow().doubts, []);
    }
}

/// A program may wait in short pieces, and check its peers only in between.
#[test]
fn waits_too_short_for_a_check_count_as_waits() {
    let (mut own, _, control) = rig();
    lose(&control);
    let (host, asleep) = (SpinHost::new(CHECK), Asleep::new());
    let mut waiter = Waiter::awake(&host, &asleep);
    for _ in 0..4 * SECOND / CHECK {
        let at = own.into.at(0);
        let waited = own.engine.wait_signal(at, Cmp::Eq, 1, Some(own.me), &mut waiter, 0);
        if waited == Err(WaitError::PeerFailed(own.me, PeerError::Lost)) {
            return;
        }
        assert!(matches!(waited, Err(WaitError::Deadline(_))), "{waited:?}");
        own.engine.check_peers();
        own.engine.progress();
    }
    panic!("the peer is not lost after 4 s");
}

#[test]
fn a_peer_that_has_not_answered_is_greeted_again_at_growing_intervals() {
    for closes in [false, true] {
        let control = shared();
        control.borrow_mut().caps = Some(|caps| Caps { fresh: false, ..caps });
        let (mut own, _, control) = rig_of(control);
        assert_eq!(own.engine.has_answered(own.me), Ok(false));
        control.borrow_mut().refuse = Some(Box::new(|post| {
            assert_eq!(post.bytes[0], HELLO, "the peer knows no other message");
            None
        }));
        assert_eq!(watch(&mut own, &control, 20), [0], "nobody waits");
        match closes {
            true => _ = own.engine.close_peer(own.me),
            false => _ = own.engine.recv(Some(own.me), tag(7), EXACT, None, 0).unwrap(),
        }
        let times = watch(&mut own, &control, 140);
        assert!(times.first().is_some_and(|&first| first <= 2), "{times:?}");
        let gaps: Vec<_> = times.windows(2).map(|two| two[1] - two[0]).collect();
        assert_eq!(gaps, [1, 2, 4, 8, 16, 32, 32, 32], "{times:?}");
        lose(&control);
        watch(&mut own, &control, 33);
        assert_eq!(own.engine.peer_error(own.me), Ok(Some(PeerError::Lost)));
    }
}

#[test]
fn checks_of_one_peer_count_as_waits_for_it() {
    let (mut own, _, control) = rig();
    lose(&control);
    for _ in 0..4 * SECOND / CHECK {
        own.engine.check_peer(own.me);
        own.engine.progress();
    }
    assert_eq!(own.engine.peer_error(own.me), Ok(Some(PeerError::Lost)));
    // Of no effect for a peer that is gone.
    own.engine.check_peer(own.me);
    own.engine.remove_peer(own.me).unwrap();
    own.engine.check_peer(own.me);
    assert_eq!(own.engine.peer_error(own.me), Err(AttachError::UnknownPeer));
}

#[test]
fn a_receive_that_names_a_peer_is_found_among_thousands_that_do_not() {
    const MANY: usize = 5000;
    for named in [true, false] {
        let (mut own, _, control) = rig();
        own.engine.grow_receives(leak(RecvSlot::EMPTY, MANY), leak(PostedSlot::EMPTY, MANY));
        for n in 0..MANY - 1 {
            own.engine.recv(None, tag(n as u64), EXACT, None, 0).unwrap();
        }
        lose(&control);
        let source = named.then_some(own.me);
        let request = own.engine.recv(source, tag(7), EXACT, None, 0).unwrap();
        watch(&mut own, &control, 5);
        let failed = Received::Failed(Fault::Peer(PeerError::Lost));
        let status = own.engine.test_recv(request).unwrap();
        assert_eq!(status.map(|status| status.outcome), named.then_some(failed));
    }
}

/// The rail refuses every post, as `tcp` does once a peer is gone. The engine queues no bytes, so
/// the program tries again and again, and nothing is in flight.
#[test]
fn a_peer_that_takes_no_bytes_is_asked_while_the_program_tries_again() {
    for sends in [true, false] {
        let (mut own, there, control) = rig();
        control.borrow_mut().refuse = Some(Box::new(|_| Some(PostError::Again)));
        for n in 0..3 * SECOND / CHECK {
            let tried = match sends {
                true => {
                    let payload = Payload::Bytes(b"short");
                    own.engine.send(CX, own.me, tag(1), payload, Notice::Silent).map(drop)
                }
                false => own.engine.inject(CX, &[1; 8], there.at(0)),
            };
            assert_eq!(tried, Err(OpError::Again), "{n}");
            own.engine.check_peers();
            own.engine.progress();
        }
        let asked = control.borrow().doubts.iter().filter(|(.., asks)| *asks).count();
        assert!(asked > 0, "sends: {sends}");
        // The program gives up.
        control.borrow_mut().refuse = None;
        watch(&mut own, &control, 2);
        control.borrow_mut().doubts.clear();
        watch(&mut own, &control, 10);
        assert_eq!(control.borrow().doubts, [], "sends: {sends}");
    }
}
