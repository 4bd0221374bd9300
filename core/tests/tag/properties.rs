//! Tests properties of every sequence of operations, without a model.

use std::collections::{BTreeMap, BTreeSet};

use fishplate_core::engine::tag::{Arrived, Tag};

use super::differential::{tag, wanted};
use super::engines::{Build, Ours};
use super::ops::{Answers, Op, Random, Seen, Wanted};

type Engine = Ours<16, 4>;

/// Returns the matched pairs (context, cookie) of a sequence, in order.
fn pairs(ops: &[Op]) -> Vec<(u64, u64)> {
    let mut engine = Engine::new(Build { unhashed: 1, walked: 1, ..Build::new(ops.len()) });
    let mut pairs = vec![];
    for op in ops {
        match (op, engine.answer(op)) {
            (Op::Post { context, .. }, Seen::Message(message)) => {
                pairs.push((*context, message.cookie))
            }
            (Op::Arrive(message), Seen::Receive(context)) => pairs.push((context, message.cookie)),
            _ => {}
        }
    }
    assert_eq!(engine.matcher.verify(), Ok(()));
    pairs
}

fn message(random: &mut Random, cookie: u64) -> Arrived {
    Arrived { source: random.below(2) as u32, tag: tag(random), len: cookie * 3, cookie }
}

#[test]
fn every_message_and_every_receive_ends_once() {
    let mut random = Random::seeded("every_message_is_delivered_once");
    let mut engine = Engine::new(Build::new(400));
    let (mut waiting, mut there) = (BTreeSet::new(), BTreeMap::new());
    for number in 0..30_000 {
        let op = match random.below(10) {
            0 if !waiting.is_empty() => {
                let at = random.below(waiting.len() as u64) as usize;
                Op::Cancel { context: *waiting.iter().nth(at).unwrap() }
            }
            1..6 => Op::Post { wanted: wanted(&mut random), context: number },
            _ => Op::Arrive(message(&mut random, number)),
        };
        match (op, engine.answer(&op)) {
            (Op::Post { .. }, Seen::Message(message)) => {
                assert_eq!(there.remove(&message.cookie), Some(message))
            }
            (Op::Post { .. }, Seen::Waits) => assert!(waiting.insert(number)),
            (Op::Arrive(message), Seen::Waits) => assert_eq!(there.insert(number, message), None),
            (Op::Arrive(_), Seen::Receive(context)) => assert!(waiting.remove(&context)),
            (Op::Cancel { context }, Seen::Cancelled(_)) => assert!(waiting.remove(&context)),
            (Op::Post { .. } | Op::Arrive(_), Seen::Refused(_)) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(
            (engine.matcher.posted(), engine.matcher.unexpected()),
            (waiting.len(), there.len())
        );
    }
    // All remaining messages are found, oldest first.
    let everything = Wanted { source: None, tag: Tag::ZERO, ignore: Tag::ALL };
    for context in waiting {
        assert!(matches!(engine.answer(&Op::Cancel { context }), Seen::Cancelled(_)));
    }
    for (_, message) in there {
        let op = Op::Post { wanted: everything, context: 0 };
        assert_eq!(engine.answer(&op), Seen::Message(message));
    }
    assert_eq!(engine.answer(&Op::Probe(everything)), Seen::Nothing);
}

#[test]
fn messages_of_one_pair_are_not_reordered() {
    let mut random = Random::seeded("messages_of_one_pair_are_not_reordered");
    let ops: Vec<Op> = (0..4000)
        .map(|number| match random.below(2) {
            0 => Op::Post { wanted: wanted(&mut random), context: number },
            _ => Op::Arrive(message(&mut random, number)),
        })
        .collect();
    let pairs: BTreeMap<u64, u64> =
        pairs(&ops).into_iter().map(|(context, cookie)| (cookie, context)).collect();
    // Of two equal messages, the second matches no receive before the first does. The first message
    // never gets the later of two receives that both messages match.
    let mut last: BTreeMap<(u32, Tag), (u64, Option<u64>)> = BTreeMap::new();
    for op in &ops {
        let Op::Arrive(message) = op else { continue };
        let to = pairs.get(&message.cookie).copied();
        if let Some((first, before)) =
            last.insert((message.source, message.tag), (message.cookie, to))
        {
            assert!(before.is_some() || to.is_none(), "{first} waits, {} does not", message.cookie);
            if let (Some(before), Some(to)) = (before, to) {
                let wants = |context: u64| match ops[context as usize] {
                    Op::Post { wanted, .. } => wanted,
                    _ => unreachable!(),
                };
                let both = wants(before).accepts(message) && wants(to).accepts(message);
                assert!(!both || before < to, "{first} to {before}, {} to {to}", message.cookie);
            }
        }
    }
}

#[test]
fn interleaving_of_independent_pairs_does_not_change_pairs() {
    let mut random = Random::seeded("how_independent_pairs_interleave");
    // Each source has its own receives, so operations that name one source do not depend on the
    // other source.
    let streams: [Vec<Op>; 2] = [0, 1].map(|source| {
        (0..300)
            .map(|n| match random.below(2) {
                0 => {
                    let wanted = Wanted { source: Some(source), ..wanted(&mut random) };
                    Op::Post { wanted, context: n * 2 + source as u64 }
                }
                _ => Op::Arrive(Arrived { source, ..message(&mut random, n * 2 + source as u64) }),
            })
            .collect()
    });
    let alone: BTreeSet<_> = streams.iter().flat_map(|ops| pairs(ops)).collect();
    for _ in 0..20 {
        let mut at = [0, 0];
        let mut ops = vec![];
        while ops.len() < 600 {
            let which = random.below(2) as usize;
            if let Some(op) = streams[which].get(at[which]) {
                ops.push(*op);
                at[which] += 1;
            }
        }
        assert_eq!(pairs(&ops).into_iter().collect::<BTreeSet<_>>(), alone);
    }
}

#[test]
fn exact_receives_and_messages_are_symmetric() {
    let mut random = Random::seeded("exact_receives_and_messages_are_symmetric");
    let halves: Vec<(bool, Arrived)> =
        (0..3000).map(|n| (random.below(2) == 0, message(&mut random, n))).collect();
    let run = |swapped: bool| -> BTreeSet<(u64, u64)> {
        let ops: Vec<Op> = halves
            .iter()
            .map(|(posts, half)| match *posts != swapped {
                true => {
                    let wanted =
                        Wanted { source: Some(half.source), tag: half.tag, ignore: Tag::ZERO };
                    Op::Post { wanted, context: half.cookie }
                }
                false => Op::Arrive(*half),
            })
            .collect();
        pairs(&ops).into_iter().collect()
    };
    let there: BTreeSet<_> =
        run(true).into_iter().map(|(context, cookie)| (cookie, context)).collect();
    assert_eq!(run(false), there);
}

#[test]
fn a_rebuilt_index_finds_the_same() {
    let mut engine = Ours::<8, 1>::new(Build::new(200));
    let mut random = Random::seeded("an_index_that_was_given_up");
    let messages: Vec<Arrived> = (0..200).map(|n| message(&mut random, n)).collect();
    for message in &messages {
        assert_eq!(engine.answer(&Op::Arrive(*message)), Seen::Waits);
    }
    // Two shapes repeatedly take the only index from each other, because both search often.
    for _ in 0..6 {
        for ignore in [Tag::from(1), Tag::from(2)] {
            for _ in 0..100 {
                let wanted = Wanted { source: None, tag: tag(&mut random), ignore };
                let right = messages
                    .iter()
                    .find(|m| wanted.accepts(m))
                    .map_or(Seen::Nothing, |m| Seen::Message(*m));
                assert_eq!(engine.answer(&Op::Probe(wanted)), right);
            }
            assert_eq!(engine.matcher.verify(), Ok(()));
        }
    }
    assert!(engine.matcher.stats().probes > 300, "indexes were used: {:?}", engine.matcher.stats());
}
