//! Fences and closes while the peer sends long messages. The answers to those messages have
//! sequence numbers.

use fishplate_core::engine::protocol::{MatchConfig, Payload, Received};
use fishplate_core::engine::{Config, Engine, Notice};
use fishplate_core::error::{Missing, PeerError};
use fishplate_core::mem::Span;
use fishplate_core::op::Outcome;
use fishplate_core::rail::sim::{Dials, Sim};

use super::rig::{EXACT, SMALL, match_memory, tag};
use super::support::fleet::{self, End, Node};
use super::support::{CX, seeds, waiter};

const LEN: usize = 512;
const MATCHING: MatchConfig = MatchConfig { headers: 16, ..SMALL };

/// Two nodes that exchange messages over two rails.
fn nodes(window: u32, dials: Dials, seed: u64) -> (&'static Sim<'static>, Vec<Node<End, 2>>) {
    let sim = fleet::fabric(2, 2, 512, dials, seed);
    let config = Config { window, ..Config::DEFAULT };
    let fleet = fleet::lasting(
        sim,
        2,
        2,
        false,
        config,
        4096,
        |_, end| end,
        |engine: &mut Engine<'static, End, 2>| {
            engine.attach_matching(MATCHING, match_memory(MATCHING, 2, 8)).unwrap();
        },
    );
    (sim, fleet)
}

/// Issues sends and receives until no room is left, and makes a pass of every node. Returns the
/// number of completed sends.
fn stream(fleet: &mut [Node<End, 2>]) -> usize {
    let (from, to) = (fleet[0].source.at(0), fleet[0].peers[1]);
    let payload = Payload::Region(from, LEN);
    while fleet[0].engine.send(CX, to, tag(0), payload, Notice::Report(0)).is_ok() {}
    let (source, into) = (fleet[1].peers[0], fleet[1].target.at(0));
    while fleet[1].engine.recv(Some(source), tag(0), EXACT, Some((into, LEN)), 0).is_ok() {}
    fleet::turn(fleet);
    while fleet[1].engine.next_recv().is_some() {}
    std::iter::from_fn(|| fleet[0].engine.next_completion()).count()
}

/// Something is always in flight.
#[test]
fn a_fence_ends_while_the_peer_keeps_sending_long_messages() {
    for (seed, inject) in seeds(20).into_iter().flat_map(|seed| [(seed, false), (seed, true)]) {
        let (_, mut fleet) = nodes(16, Dials { min_delay: 20, max_delay: 40, ..Dials::CALM }, seed);
        (0..200).for_each(|_| _ = stream(&mut fleet));
        let (from, two, to) = (fleet[1].source.at(0), fleet[1].peers[0], fleet[1].remotes[0].at(0));
        let engine = &mut fleet[1].engine;
        while engine.inject(CX, &[1; 8], to).is_err() {
            engine.progress();
        }
        engine.fence(CX, two).unwrap();
        if !inject {
            engine.put(CX, from, 512, to, Notice::Report(1)).unwrap();
        }
        let ended = (0..2000).any(|_| {
            stream(&mut fleet);
            match inject {
                true => fleet[1].engine.inject(CX, &[2; 8], to).is_ok(),
                false => fleet[1].engine.next_completion().is_some(),
            }
        });
        assert!(ended, "seed {seed}, {inject}");
    }
}

#[test]
fn a_long_message_is_done_at_both_ends_or_at_neither_if_one_closes() {
    for seed in seeds(200) {
        let (sim, mut fleet) = nodes(16, Dials::WILD, seed);
        let (one, two) = (fleet[0].peers[1], fleet[1].peers[0]);
        let (from, into) = (fleet[0].source.at(0), fleet[1].target.at(0));
        let sent = match seed % 2 {
            0 => Payload::Region(from, LEN),
            // SAFETY: the region lives as long as the test.
            _ => Payload::Span(unsafe {
                Span::new(fleet[0].engine.local_ptr(from, LEN).unwrap(), LEN)
            }),
        };
        fleet[1].engine.recv(Some(two), tag(0), EXACT, Some((into, LEN)), 0).unwrap();
        fleet[0].engine.send(CX, one, tag(0), sent, Notice::Report(1)).unwrap();
        (0..seed % 40).for_each(|_| fleet::turn(&mut fleet));
        let closer = (seed / 2 % 2) as usize;
        let peer = fleet[closer].peers[1 - closer];
        fleet[closer].engine.close_peer(peer).unwrap();
        (0..seed % 13).for_each(|_| fleet::turn(&mut fleet));
        if seed % 3 == 0 {
            let rail = (seed % 2) as u16;
            sim.cut(0, 1, rail, 0).unwrap();
            sim.cut(1, 0, rail, 0).unwrap();
        }
        let (mut sent, mut received) = (None, None);
        fleet::turn_until(&mut fleet, "both have closed", |fleet| {
            sent = sent.or(fleet[0].engine.next_completion());
            received = received.or(fleet[1].engine.next_recv());
            let errors = [fleet[0].engine.peer_error(one), fleet[1].engine.peer_error(two)];
            errors.iter().all(|error| *error != Ok(None))
        });
        let errors = [fleet[0].engine.peer_error(one), fleet[1].engine.peer_error(two)];
        assert_eq!(errors, [Ok(Some(PeerError::Closed)); 2], "seed {seed}");
        let done = sent.map(|end| end.outcome) == Some(Outcome::Done);
        let arrived = received.map(|status| status.outcome) == Some(Received::Ok);
        assert_eq!(done, arrived, "seed {seed}: {sent:?} {received:?}");
    }
}

/// A node that may leave makes no more passes, so it sends nothing again.
#[test]
fn a_close_waits_for_the_answer_to_a_long_message_if_a_rail_has_lost_it() {
    for seed in seeds(200) {
        let (sim, mut fleet) = nodes(16, Dials::WILD, seed);
        let (one, two) = (fleet[0].peers[1], fleet[1].peers[0]);
        let (from, into) = (fleet[0].source.at(0), fleet[1].target.at(0));
        fleet[1].engine.recv(Some(two), tag(0), EXACT, Some((into, LEN)), 0).unwrap();
        let sent = Payload::Region(from, LEN);
        fleet[0].engine.send(CX, one, tag(0), sent, Notice::Report(1)).unwrap();
        fleet::turn_until(&mut fleet, "the message has arrived", |fleet| {
            fleet[1].engine.next_recv().is_some()
        });
        let rail = (seed % 2) as u16;
        sim.cut(0, 1, rail, 0).unwrap();
        sim.cut(1, 0, rail, 0).unwrap();
        let mut waiter = waiter();
        fleet::turn_until(&mut fleet, "the receiver may leave", |fleet| {
            let left = fleet[1].engine.shutdown(&mut waiter, 0);
            left.map_or_else(|late| late.missing == Missing::Answer, |()| true)
        });
        let done = (0..1000).find_map(|_| {
            fleet[0].engine.progress();
            fleet[0].engine.next_completion()
        });
        assert_eq!(done.map(|end| end.outcome), Some(Outcome::Done), "seed {seed}");
    }
}

/// Each node could fill the window with sequence numbers as soon as the window has room.
#[test]
fn puts_and_answers_to_long_messages_do_not_hold_up_each_other() {
    for (seed, window) in
        seeds(2).into_iter().flat_map(|seed| [1, 2, 4, 16].map(|window| (seed, window)))
    {
        let dials = Dials { min_delay: 20, max_delay: 40, ..Dials::CALM };
        let (_, mut fleet) = nodes(window, dials, seed);
        let (source, to) = (fleet[1].source.at(0), fleet[1].remotes[0].at(2048));
        let (mut sends, mut puts) = (0, 0);
        for _ in 0..2000 {
            while fleet[1].engine.put(CX, source, 8, to, Notice::Report(2)).is_ok() {}
            sends += stream(&mut fleet);
            puts += std::iter::from_fn(|| fleet[1].engine.next_completion()).count();
        }
        assert!(
            sends >= 10 && puts >= 10,
            "seed {seed}, window {window}: {sends} sends, {puts} puts"
        );
    }
}
