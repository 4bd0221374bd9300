//! Tests the matched queue of a node with unregistered memory: messages of any length, synchronous
//! or not, received in any order, by receives and by claims.

use std::time::Instant;

use fishplate::PeerId;
use fishplate::core::mem::Span;
use fishplate::core::psm::{Code, FLAG_SENDSYNC, MqReq, Status2};
use fishplate::node::Node;

use super::{SOON, Side, WORKER, two, ways};

const ALL: [u32; 3] = [u32::MAX; 3];
const MESSAGES: u32 = 80;

/// A random generator that prints its seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Returns the length of message `n`. Some lengths are short, some close to the eager limit, some
/// long.
fn length(n: u32) -> usize {
    match n % 5 {
        0 => n as usize % 17,
        1 => 8192 - 3 + n as usize % 7,
        2 if n % 40 == 2 => (1 << 20) + n as usize,
        _ => 300 * n as usize,
    }
}

fn bytes(n: u32) -> Vec<u8> {
    (0..length(n))
        .map(|at| (at as u32).wrapping_mul(7).wrapping_add(n + (at >> 8) as u32) as u8)
        .collect()
}

fn span(bytes: &mut [u8]) -> Span {
    // SAFETY: each test keeps the bytes, and does not access them, until the request has completed.
    unsafe { Span::new(std::ptr::NonNull::from(&mut *bytes).cast(), bytes.len()) }
}

fn wait(node: &mut Node, req: MqReq) -> Status2 {
    let (end, mut req) = (Instant::now() + SOON, Some(req));
    loop {
        let mut queue = node.queue().unwrap();
        match queue.test2(&mut req) {
            Err(Code::NoCompletions) => _ = queue.poll(),
            ended => return ended.unwrap(),
        }
        assert!(Instant::now() < end, "a request does not end");
    }
}

/// Waits until messages can be sent to the peer.
fn reached(node: &mut Node, peer: PeerId) {
    let end = Instant::now() + SOON;
    while node.reach(peer).unwrap() == Default::default() {
        node.progress();
        assert!(Instant::now() < end, "the peer is not reached");
    }
}

fn sends(side: &mut Side) {
    let mut memory: Vec<Vec<u8>> = (0..MESSAGES).map(bytes).collect();
    let mut reqs = vec![];
    for (n, bytes) in (0..).zip(&mut memory) {
        let flags = if n % 3 == 0 { FLAG_SENDSYNC } else { 0 };
        let mut queue = side.node.queue().unwrap();
        reqs.push(queue.isend2(side.peer, flags, [n, 5, 6], span(bytes), n.into()).unwrap());
    }
    for (n, req) in (0..).zip(reqs) {
        let status = wait(&mut side.node, req);
        assert_eq!((status.error_code, status.context), (Code::Ok, n), "message {n}");
    }
}

fn receives(side: &mut Side, random: &mut Random) {
    let mut order: Vec<u32> = (0..MESSAGES).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.below(at as u64 + 1) as usize);
    }
    for n in order {
        let len = length(n);
        // Some receives have less room than the message needs.
        let room = if random.below(8) == 0 { len / 2 } else { len + 9 };
        let mut memory = vec![0xee; room + 16];
        let into = span(&mut memory[8..8 + room]);
        let source = (random.below(2) == 0).then_some(side.peer);
        let req = match random.below(3) {
            0 => loop {
                let mut queue = side.node.queue().unwrap();
                if let Ok((req, status)) = queue.improbe2(source, [n, 0, 0], [u32::MAX, 0, 0]) {
                    assert_eq!(status.msg_length as usize, len);
                    queue.imrecv(into, n.into(), req).unwrap();
                    break req;
                }
            },
            _ => side.node.queue().unwrap().irecv2(source, [n, 5, 6], ALL, into, n.into()).unwrap(),
        };
        let status = wait(&mut side.node, req);
        let whole = if room < len { Code::Truncation } else { Code::Ok };
        assert_eq!((status.error_code, status.msg_length as usize), (whole, len), "message {n}");
        assert_eq!((status.msg_peer, status.nbytes as usize), (Some(side.peer), room.min(len)));
        let (got, rest) = memory[8..].split_at(room.min(len));
        assert!(got == &bytes(n)[..room.min(len)], "message {n} brought other bytes");
        assert!(
            rest.iter().chain(&memory[..8]).all(|byte| *byte == 0xee),
            "message {n} went too far"
        );
    }
}

#[test]
fn any_memory_is_sent_and_received_whole_and_nothing_else_is_touched() {
    if WORKER {
        return;
    }
    for way in ways() {
        let seed = 1 + std::process::id() as u64;
        println!("{way:?}, seed {seed}");
        two(
            way,
            |builder| builder.requests(512),
            |mut side| {
                reached(&mut side.node, side.peer);
                let mut random = Random((seed << 8) + side.rank as u64);
                for turn in 0..2 {
                    match turn == side.rank {
                        true => sends(&mut side),
                        false => receives(&mut side, &mut random),
                    }
                }
                assert_eq!(side.node.queue().unwrap().stats().tx_num, MESSAGES.into());
                side.exchange(b"done");
                side.node.close(SOON).unwrap();
            },
        );
    }
}

#[test]
fn a_node_has_a_queue_if_it_was_opened_with_requests() {
    assert!(super::builder().open().unwrap().queue().is_none());
    let mut node = super::builder().requests(8).open().unwrap();
    assert_eq!(node.queue().is_some(), !WORKER);
    assert!(!node.grow_requests(), "it has all the room that it may have");
    assert_eq!(super::builder().requests(1 << 15).open().unwrap().grow_requests(), !WORKER);
}
