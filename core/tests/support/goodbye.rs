//! Engines that shut down at any time and in any order. Checks that accepted operations are applied
//! once, and that no engine mistakes the exit of another for a failure.

use fishplate_core::engine::{Asleep, ContextId, Notice, Signal, Waiter};
use fishplate_core::error::{OpError, PeerError, Unfinished};
use fishplate_core::op::{Amo, AmoOp, Outcome, SignalOp};
use fishplate_core::rail::Rail;
use fishplate_core::sync::host::{Host, SpinHost};

use super::fleet::Node;
use super::{Random, host, word};

pub fn add(node: u64) -> Amo {
    Amo { op: AmoOp::Add, width: 8, operand: 1 << (8 * node), compare: 0 }
}

/// Issues a random operation to a peer: an addition to one of its words, or a read. Returns `None`
/// if the operation is permanently refused.
fn issue<R: Rail, const RAILS: usize>(
    node: &mut Node<R, RAILS>,
    me: u64,
    to: usize,
    context: ContextId,
    random: &mut Random,
) -> Option<bool> {
    let (remote, from) = (node.remotes[to], node.source.at(0));
    let e = &mut node.engine;
    let notice = if random.below(2) == 0 { Notice::Silent } else { Notice::Report(1) };
    let data = remote.at(512 + 256 * me);
    // Each origin and context adds to its own word.
    let at = remote.at(8 * (4 * context.0 as u64 + me));
    let signal = Signal { at, op: SignalOp::Add, value: 1 };
    let (issued, adds) = match random.below(6) {
        0 => (e.put_signal(context, from, 200, data, signal, notice), true),
        1 => (e.put_signal(context, from, 16, data, signal, notice), true),
        2 => (e.signal(context, signal, notice), true),
        3 => (e.fetch(context, at, add(0), 1), true),
        4 => (e.get(context, node.source.at(2048), 300, data, notice), false),
        _ => (e.put(context, from, 64, data, notice), false),
    };
    match issued {
        Ok(_) => Some(adds),
        Err(OpError::Again) => Some(false),
        Err(OpError::PeerFailed(PeerError::Closed)) => None,
        Err(error) => panic!("{error:?}"),
    }
}

/// The state of a node. It issues operations for `turns` turns, shuts down, and exits.
struct Life {
    turns: u64,
    waiter: Waiter<'static, SpinHost, Asleep>,
    host: &'static SpinHost,
    gone: bool,
}

/// Runs nodes that issue random operations to each other and shut down at random times. Calls
/// `exit` for each node that has shut down. Such a node makes no more progress. Returns the number
/// of applied operations.
pub fn run<R: Rail, const RAILS: usize>(
    seed: u64,
    mut nodes: Vec<Node<R, RAILS>>,
    contexts: u16,
    mut exit: impl FnMut(usize),
) -> u64 {
    let mut random = Random(seed);
    let asleep: &'static Asleep = Box::leak(Box::new(Asleep::new()));
    let spread = [1, 30, 400][seed as usize % 3];
    let mut lives: Vec<Life> = (0..nodes.len())
        .map(|_| {
            let host = host();
            let turns = random.below(spread);
            Life { turns, waiter: Waiter::awake(host, asleep), host, gone: false }
        })
        .collect();
    let mut sent = vec![[[0u64; 4]; 4]; nodes.len()];
    let mut now = 0;
    while lives.iter().any(|life| !life.gone) {
        now += 1;
        assert!(now < 200_000, "seed {seed}: no end");
        for me in 0..nodes.len() {
            if lives[me].gone {
                continue;
            }
            for _ in 0..random.below(3) {
                let (to, context) =
                    (random.below(nodes.len() as u64) as usize, random.below(contexts as u64));
                let context = ContextId(context as u8);
                if let Some(true) = issue(&mut nodes[me], me as u64, to, context, &mut random) {
                    sent[to][context.0 as usize][me] += 1;
                }
            }
            let life = &mut lives[me];
            if now < life.turns {
                nodes[me].engine.progress();
            } else {
                let deadline = life.host.now_ns() + random.below(20);
                match nodes[me].engine.shutdown(&mut life.waiter, deadline) {
                    Ok(()) => {
                        life.gone = true;
                        exit(me);
                    }
                    Err(Unfinished { peer, peers, .. }) => {
                        assert!(nodes[me].peers.contains(&peer) && peers as usize <= nodes.len());
                    }
                }
            }
            let node = &mut nodes[me];
            while let Some(end) = node.engine.next_completion() {
                assert_eq!(end.outcome, Outcome::Done, "seed {seed}: node {me}");
            }
            for &peer in &node.peers {
                let error = node.engine.peer_error(peer).unwrap();
                assert!(
                    matches!(error, None | Some(PeerError::Closed)),
                    "seed {seed}: node {me}: {error:?}"
                );
            }
        }
    }
    let mut all = 0;
    for (to, node) in nodes.iter().enumerate() {
        for (context, sent) in sent[to].iter().enumerate() {
            for (from, &sent) in sent.iter().enumerate() {
                let word =
                    word(&node.engine, node.target.at(8 * (4 * context as u64 + from as u64)));
                assert_eq!(word, sent, "seed {seed}: {from} to {to} in {context}");
                all += word;
            }
        }
        for &peer in &node.peers {
            assert_eq!(node.engine.has_left(peer), Ok(true));
            assert_eq!(node.engine.peer_error(peer), Ok(Some(PeerError::Closed)));
        }
    }
    all
}
