//! Tests that a forked child can drop a node of its parent, and that no peer notices.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use fishplate::core::engine::tag::Tag;
use fishplate::{Node, Notice};

use super::{SOON, Side, two, ways};

/// Runs `child` in a forked process, and waits for its end.
fn fork(child: impl FnOnce()) {
    let mut status = -1;
    // SAFETY: the child drops a node, which allocates at most. glibc permits that after a fork. An
    // alarm ends the child if it waits for a thread of its parent, and it never returns. `status`
    // is writable.
    unsafe {
        let forked = libc::fork();
        if forked == 0 {
            libc::alarm(10);
            let ended = catch_unwind(AssertUnwindSafe(child));
            libc::_exit(i32::from(ended.is_err()));
        }
        assert_eq!(libc::waitpid(forked, &mut status, 0), forked);
    }
    assert_eq!(status, 0, "the child ends well");
}

/// Exchanges messages with the other side.
fn talk(side: &mut Side) {
    let peer = side.peer;
    for tag in 0..20 {
        side.node.send(peer, tag, b"short", Notice::Silent).unwrap();
        side.node.recv(Some(peer), tag, Tag::ZERO, &mut [0; 8], SOON).unwrap();
        assert_eq!(side.node.peer_error(peer), Ok(None));
    }
    side.node.quiet(peer, SOON).unwrap();
    side.exchange(&[]);
}

#[test]
fn a_child_drops_a_node_and_the_peers_of_its_parent_stay() {
    let program = |mut side: Side| {
        talk(&mut side);
        if side.rank == 0 {
            let mut node = Some(side.node);
            fork(|| drop(node.take()));
            side.node = node.unwrap();
        }
        side.exchange(&[]);
        talk(&mut side);
        side.node.close(SOON).unwrap();
    };
    ways().into_iter().for_each(|way| two(way, |builder| builder, program));
}

#[test]
fn a_child_drops_a_node_and_its_parent_can_connect_others() {
    for way in ways() {
        // Of two nodes, the one with the lower id dials.
        for dials in [false, true] {
            let mut nodes = [false, true].map(|second| way.builder(second).open().unwrap());
            nodes.sort_by_key(|node| u64::from_le_bytes(node.address()[6..14].try_into().unwrap()));
            if !dials {
                nodes.reverse();
            }
            let [node, other] = nodes;
            connects_after_fork(node, other);
        }
    }
}

fn connects_after_fork(node: Node, mut other: Node) {
    let mut node = Some(node);
    fork(|| drop(node.take()));
    let mut node = node.unwrap();
    let [to_node, to_other] = [&node, &other].map(Node::address);
    let sender = thread::spawn(move || {
        let peer = other.connect(to_node).unwrap();
        other.send(peer, 7, b"short", Notice::Silent).unwrap();
        other.quiet(peer, SOON).unwrap();
    });
    let peer = node.connect(to_other).unwrap();
    node.recv(Some(peer), 7, Tag::ZERO, &mut [0; 8], SOON).unwrap();
    while !sender.is_finished() {
        node.progress();
    }
    sender.join().unwrap();
}
