//! Tests peers on other hosts that come and go.

use fishplate::Limits;
use fishplate::core::error::PeerError;
use fishplate_testing::fabric::{Fake, Persona};

use super::distant::{LIMITS, connect, has_message, on, send, until};

#[test]
fn a_peer_learns_that_it_was_connected_again_after_many_others_have_gone() {
    let provider = Fake::new(Persona::tcp(), 51);
    let open = || on(&provider, "tcp").limits(Limits { peers: 2, ..LIMITS }).open().unwrap();
    let [mut a, mut b] = [open(), open()];
    let [_, to_b] = connect(&mut b, &mut a);
    for _ in 0..5 {
        let mut guest = open();
        let [to_a, to_guest] = connect(&mut guest, &mut a);
        send(&mut guest, to_a, 7, &mut a);
        until([&mut guest, &mut a], |[_, a]| has_message(a, to_guest, 7));
        a.disconnect(to_guest).unwrap();
    }
    send(&mut a, to_b, 8, &mut b);
    let to_a = b.connect(a.address()).unwrap();
    until([&mut a, &mut b], |[_, b]| has_message(b, to_a, 8));
    // Nothing is on its way that would call.
    for _ in 0..5000 {
        a.progress();
        b.progress();
    }
    a.disconnect(to_b).unwrap();
    a.connect(b.address()).unwrap();
    until([&mut a, &mut b], |[_, b]| b.peer_error(to_a) != Ok(None));
    assert_eq!(b.peer_error(to_a), Ok(Some(PeerError::Reattached)));
}
