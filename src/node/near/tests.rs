//! Nodes of one host that connect, are given up, and dial again.

use std::time::Duration;

use super::*;
use crate::node::{Fabric, Gpu};

#[test]
fn a_peer_that_is_given_up_before_it_has_answered_is_hung_up_on() {
    let open = || Node::builder().fabric(Fabric::Off).open().unwrap();
    let (mut node, silent) = (open(), open());
    // The node keeps trying to connect to this peer, which never answers.
    node.connect(silent.address()).unwrap();
    // The address of a node with the largest id. This node waits until others dial it.
    let door = u64::MAX - u64::from(std::process::id());
    let mut address = node.address().to_vec();
    address[6..14].copy_from_slice(&u64::MAX.to_le_bytes());
    address[14..22].copy_from_slice(&door.to_le_bytes());
    let listener = Listener::bind(socket(door)).unwrap();
    let peer = node.connect(&address).unwrap();
    node.disconnect(peer).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let refused = loop {
        node.progress();
        let link = listener.accept(&node.profile, Instant::now());
        assert!(link.is_err(), "the handshake went on");
        match listener.refused() {
            refused if refused.is_empty() => assert!(Instant::now() < deadline, "not hung up"),
            refused => break refused,
        }
    };
    assert!(refused.iter().all(|(_, why)| *why == HandshakeError::HungUp), "{refused:?}");
}

#[test]
fn a_peer_that_dials_again_while_the_two_agree_on_devices_is_connected_by_its_last_link() {
    let open = || Node::builder().fabric(Fabric::Off).gpu(Gpu::StandIn).open().unwrap();
    let mut nodes = [open(), open()];
    // The node with the smaller id dials.
    nodes.sort_by_key(|node| node.address.id);
    let [mut dials, mut other] = nodes;
    let (to_dials, to_other) = (dials.address().to_vec(), other.address().to_vec());
    let there = other.connect(&to_dials).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut here = dials.connect(&to_other).unwrap();
    for _ in 0..2 {
        while other.agreements.is_empty() {
            assert!(Instant::now() < deadline, "no agreement begins");
            dials.meet();
            other.peers.meeting = true;
            other.accept(Instant::now());
        }
        dials.disconnect(here).unwrap();
        here = dials.connect(&to_other).unwrap();
        // The other node still has its half of the handshake.
        let before = other.early.len();
        while other.agreements.len() + other.early.len() == before + 1
            && dials.agreements.is_empty()
        {
            assert!(Instant::now() < deadline, "no second link");
            dials.meet();
            other.accept(Instant::now());
        }
    }
    assert_eq!(other.agreements.len(), 1);
    while !(dials.reach(here).unwrap().gpu && other.reach(there).unwrap().gpu) {
        assert!(Instant::now() < deadline, "not connected");
        dials.meet();
        other.meet();
    }
}
