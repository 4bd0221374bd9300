//! Rails that refuse an answer for good while a pass has a receive in hand: the peer fails in the middle of it, and every receive that waits
//! for it ends, once.

use fishplate_core::engine::Config;
use fishplate_core::engine::protocol::Received;
use fishplate_core::error::{PeerError, PostError};
use fishplate_core::mem::RailId;
use fishplate_core::op::Fault;
use fishplate_core::rail::Caps;
use fishplate_core::rail::loopback::Loopback;

use super::rig::*;
use super::support::tap::{Post, Verb, shared, tap};

const FIN: u8 = 19;
const PULL: u8 = 20;

/// Sends three messages that are matched at once, of which each takes an answer of `kind`; the second such answer is refused. How the
/// receives ended.
fn refused(kind: u8, len: usize, sync: bool) -> Vec<Received> {
    let control = shared();
    control.borrow_mut().caps = Some(|caps| Caps { read_from: usize::MAX, ..caps });
    let mut own = own1(Config::DEFAULT, SMALL, tap(Loopback::<64>::new(), &control));
    let mut answers = 0;
    control.borrow_mut().refuse = Some(Box::new(move |post: &Post| {
        let answer = post.verb == Verb::Message && post.bytes[0] == kind;
        answers += u32::from(answer);
        (answer && answers == 2).then_some(PostError::Provider(-5))
    }));
    for n in 0..3 {
        own.recv(n, EXACT, 2048 + n * 600, len);
    }
    for n in 0..3 {
        own.send_region(n, n * 600, len, sync).unwrap();
    }
    for _ in 0..200 {
        own.engine.progress();
    }
    let ended: Vec<_> = std::iter::from_fn(|| own.engine.next_recv()).collect();
    assert_eq!(own.engine.peer_error(own.me), Ok(Some(PeerError::Rail(RailId(0)))));
    let mut words: Vec<_> = ended.iter().map(|status| status.word).collect();
    words.sort_unstable();
    assert_eq!(words, [0, 1, 2]);
    ended.into_iter().map(|status| status.outcome).collect()
}

#[test]
fn a_refusal_to_pull_ends_every_receive_that_waits_for_that_peer_once() {
    let failed = Received::Failed(Fault::Peer(PeerError::Rail(RailId(0))));
    assert_eq!(refused(PULL, 600, false), [failed; 3]);
}

#[test]
fn a_refusal_to_tell_leaves_what_has_been_received() {
    assert_eq!(refused(FIN, 100, true), [Received::Ok; 3]);
}
