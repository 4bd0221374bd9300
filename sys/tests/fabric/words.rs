//! Atomics of two peers on shared words, over real providers. The provider updates some words, the
//! engine others. One order of all operations that preserves the order of each stream must explain
//! the fetched values and the final values.

use std::collections::HashSet;
use std::time::Duration;

use fishplate_core::engine::{Config, ContextId, Issued, Notice};
use fishplate_core::error::OpError;
use fishplate_core::mem::{LocalId, RemoteId};
use fishplate_core::op::{Amo, Outcome, Token};
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail};

use crate::behaviour::fleet::{Node, turn};
use crate::behaviour::oracle::{OPS, model};
use crate::behaviour::{Random, region, seeds};
use crate::{engines, support, with_atomics};

const CONFIG: FabricConfig = FabricConfig {
    native_atomics: true,
    deadline: Some(Duration::from_secs(20)),
    ..support::SMALL
};

/// Number of contexts per peer, so that a peer has several atomics in flight.
const CONTEXTS: u16 = 2;
/// Number of operations per stream and round.
const OPS_IN_ROUND: usize = 16;
const STREAMS: usize = 2 * CONTEXTS as usize;
const WIDTHS: [u8; 4] = [1, 2, 4, 8];
/// Distance between words, in bytes. The words of a region differ in width.
const STEP: u64 = 16;

/// A completed atomic with its word, and the fetched value if any.
struct Done {
    native: bool,
    word: usize,
    amo: Amo,
    token: Option<Token>,
    fetched: Option<u64>,
}

/// Searches for an order of the operations that preserves the order of each stream, leads from
/// `start` to `end` and yields every fetched value. Returns whether one exists.
fn is_explained(streams: &[Vec<&Done>; STREAMS], start: u64, end: u64) -> bool {
    let (mut states, mut seen) = (vec![([0; STREAMS], start)], HashSet::new());
    while let Some((at, value)) = states.pop() {
        if !seen.insert((at, value)) {
            continue;
        }
        if value == end && at.iter().zip(streams).all(|(&at, stream)| at == stream.len()) {
            return true;
        }
        for (n, stream) in streams.iter().enumerate() {
            let Some(next) = stream.get(at[n]) else { continue };
            if next.fetched.is_none_or(|fetched| fetched == value) {
                let mut at = at;
                at[n] += 1;
                states.push((at, model(&next.amo, value)));
            }
        }
    }
    false
}

#[test]
fn an_order_is_found_where_there_is_one_and_only_there() {
    let amo = |op, operand| Amo { op, width: 8, operand, compare: 0 };
    let done = |op, operand, fetched| Done {
        native: true,
        word: 3,
        amo: amo(op, operand),
        token: None,
        fetched,
    };
    use fishplate_core::op::AmoOp::{Add, Set};
    let (one, two, three) = (done(Add, 1, Some(0)), done(Add, 1, Some(0)), done(Set, 9, None));
    assert!(is_explained(&[vec![&one, &three], vec![], vec![], vec![]], 0, 9));
    assert!(!is_explained(&[vec![&one], vec![&two], vec![], vec![]], 0, 2), "an addition lost");
    assert!(
        !is_explained(&[vec![&three, &one], vec![], vec![], vec![]], 0, 9),
        "a stream reordered"
    );
    assert!(!is_explained(&[vec![&one], vec![&three], vec![], vec![]], 0, 8), "a value made up");
}

/// The words of one region: the owner's id, and the id that each peer got from its import.
struct Words {
    here: LocalId,
    there: [RemoteId; 2],
}

impl Words {
    fn new(nodes: &mut [Node<FabricRail, 1>], native: bool) -> Words {
        let memory = region(64);
        let memory = if native { memory.with_native_atomics() } else { memory };
        let here = nodes[0].engine.register(memory).unwrap();
        let mut handle = [0; 512];
        let len = nodes[0].engine.export(here, &mut handle).unwrap();
        let there = [1, 2].map(|node| {
            let node: &mut Node<FabricRail, 1> = &mut nodes[node];
            node.engine.import(node.peers[0], &handle[..len]).unwrap()
        });
        Words { here, there }
    }

    fn value(&self, nodes: &[Node<FabricRail, 1>], word: usize) -> u64 {
        let width = WIDTHS[word];
        let at = nodes[0].engine.local_ptr(self.here.at(word as u64 * STEP), 8).unwrap();
        // SAFETY: `local_ptr` checked the range. This thread owns the region, and nothing is in
        // flight.
        let value = u64::from_le(unsafe { at.cast::<u64>().read_volatile() });
        let mask = u64::MAX >> (64 - 8 * width as u32);
        assert_eq!(value & !mask, 0, "beside the word of {width} bytes");
        value & mask
    }
}

fn issue(
    node: &mut Node<FabricRail, 1>,
    context: ContextId,
    at: [RemoteId; 2],
    op: &mut Done,
) -> bool {
    let at = at[op.native as usize].at(op.word as u64 * STEP);
    let issued = match op.fetched {
        Some(_) => node.engine.fetch(context, at, op.amo, 0),
        None => node.engine.amo(context, at, op.amo, Notice::Silent),
    };
    match issued {
        Ok(Issued::Pending(token)) => op.token = op.fetched.map(|_| token),
        Ok(Issued::Done { .. }) => panic!("nothing is mapped"),
        Err(OpError::Again) => return false,
        Err(error) => panic!("{:?}: {error}", op.amo),
    }
    true
}

/// Returns the number of operations per run, from `FISHPLATE_ATOMICS` or a small default.
fn count() -> usize {
    std::env::var("FISHPLATE_ATOMICS")
        .map_or(4_000, |n| n.parse().expect("FISHPLATE_ATOMICS is a number"))
}

fn shared_words(name: &str, ask: Ask<'_>) {
    if let Some(why) = support::absent() {
        return println!("SKIPPED words that two peers share over {name}: {why}");
    }
    for seed in seeds(1) {
        let engines = Config { window: 16, contexts: CONTEXTS, ..Config::DEFAULT };
        let mut nodes = engines::join::<1>(&ask, CONFIG, seed, 3, engines, 64);
        let words = [false, true].map(|native| Words::new(&mut nodes, native));
        let mut random = Random(seed);
        let mut counts = [0usize; 2];
        let mut starts = [[0u64; 4]; 2];
        while counts[0] + counts[1] < count() {
            let mut streams: [Vec<Done>; STREAMS] = Default::default();
            for n in 0..STREAMS * OPS_IN_ROUND {
                let word = random.below(4) as usize;
                let old = random.next();
                let amo = Amo {
                    op: OPS[random.below(9) as usize],
                    width: WIDTHS[word],
                    operand: random.next(),
                    compare: if random.below(2) == 0 { old } else { random.below(2) },
                };
                let fetched = (random.below(4) != 0).then_some(0);
                let native = random.below(2) == 0;
                counts[native as usize] += 1;
                streams[n % STREAMS].push(Done { native, word, amo, token: None, fetched });
            }
            let mut at = [0; STREAMS];
            while at.iter().zip(&streams).any(|(&at, stream)| at < stream.len()) {
                let n = random.below(STREAMS as u64) as usize;
                let (peer, context) = (n % 2, ContextId((n / 2) as u8));
                let there = words.each_ref().map(|words| words.there[peer]);
                if let Some(op) = streams[n].get_mut(at[n])
                    && issue(&mut nodes[1 + peer], context, there, op)
                {
                    at[n] += 1;
                }
                if random.below(4) == 0 {
                    turn(&mut nodes);
                }
            }
            for (n, stream) in streams.iter_mut().enumerate() {
                for op in stream.iter_mut().filter(|op| op.token.is_some()) {
                    op.fetched = loop {
                        let token = op.token.unwrap();
                        if let Some(end) = nodes[1 + n % 2].engine.test(token).unwrap() {
                            assert_eq!(end.outcome, Outcome::Done);
                            break Some(end.value);
                        }
                        turn(&mut nodes);
                    };
                }
            }
            for n in 0..STREAMS {
                let (node, context) = (1 + n % 2, ContextId((n / 2) as u8));
                let owner = nodes[node].peers[0];
                while nodes[node].engine.is_quiet(context, owner) != Ok(true) {
                    turn(&mut nodes);
                }
            }
            for native in [false, true] {
                for (word, start) in starts[native as usize].iter_mut().enumerate() {
                    let of_word = streams.each_ref().map(|stream| {
                        stream
                            .iter()
                            .filter(|op| op.native == native && op.word == word)
                            .collect::<Vec<_>>()
                    });
                    let end = words[native as usize].value(&nodes, word);
                    let told = || {
                        of_word.each_ref().map(|stream| {
                            stream.iter().map(|op| (op.amo, op.fetched)).collect::<Vec<_>>()
                        })
                    };
                    assert!(
                        is_explained(&of_word, *start, end),
                        "{name}, seed {seed}, native {native}: no order leads from {start:#x} to \
                         {end:#x}: {:?}",
                        told()
                    );
                    *start = end;
                }
            }
        }
        println!(
            "{name}, seed {seed}: {} executed by the processor, {} by the provider",
            counts[0], counts[1]
        );
    }
}

#[test]
fn atomics_of_two_peers_over_rxm_have_an_order() {
    shared_words("tcp;ofi_rxm", with_atomics("tcp;ofi_rxm"));
}

#[test]
fn atomics_of_two_peers_over_rxm_that_drives_itself_have_an_order() {
    shared_words("tcp;ofi_rxm, auto", Ask { progress: None, ..with_atomics("tcp;ofi_rxm") });
}

#[test]
fn atomics_of_two_peers_over_shm_have_an_order() {
    shared_words("shm", with_atomics("shm"));
}
