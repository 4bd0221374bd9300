//! Tests a receiver that sleeps: unexpected messages stay within their limit, no message is lost,
//! and nothing hangs.

use fishplate_core::engine::protocol::{MatchConfig, Payload, Received};
use fishplate_core::engine::{Config, Issued, Notice};
use fishplate_core::error::OpError;
use fishplate_core::rail::sim::Dials;

use super::rig::*;
use super::support::fleet;
use super::support::*;

/// Returns the total number of messages: `FISHPLATE_FLOOD`, by default a million in release builds.
fn messages() -> u64 {
    let default = if cfg!(debug_assertions) { 20_000 } else { 1_000_000 };
    std::env::var("FISHPLATE_FLOOD")
        .map_or(default, |n| n.parse().expect("FISHPLATE_FLOOD is a number"))
}

fn flood<const RAILS: usize>(dials: Dials, count: u64) {
    let matching =
        MatchConfig { credits: 3, headers: 3, shared_credits: 93, shared_headers: 45, ..SMALL };
    let config = Config { window: 64, ..Config::DEFAULT };
    let mut fleet = tagged_fleet::<RAILS>(2, dials, config, matching, 11);
    let bound = matching.unexpected(2);
    let (mut sent, mut received, mut sleeps, mut exhausted) = (0u64, 0u64, 0u64, 0u64);
    while received < count {
        // Until the sender is blocked, the receiver's engine makes passes but posts no receive.
        let mut idle = 0;
        while sent < count && idle < 2000 {
            let node = &mut fleet[0];
            let at = node.source.at(sent % 4096 * 16);
            write(&node.engine, at, &sent.to_le_bytes());
            let issued = node.engine.send(
                CX,
                node.peers[1],
                tag(sent),
                Payload::Region(at, 8),
                Notice::Report(sent),
            );
            match issued {
                Ok(Issued::Done { .. } | Issued::Pending(_)) => (sent, idle) = (sent + 1, 0),
                Err(OpError::Again) => {
                    idle += 1;
                    fleet::turn(&mut fleet);
                }
                Err(error) => panic!("{error:?}"),
            }
            while fleet[0].engine.next_completion().is_some() {}
        }
        sleeps += 1;
        let stats = fleet[1].engine.matching_stats().matching;
        assert!(stats.unexpected_peak as usize <= bound, "{} of {bound}", stats.unexpected_peak);
        exhausted = exhausted.max(sent - received);
        // The receiver receives all messages, in order.
        while received < sent {
            let node = &mut fleet[1];
            let into = Some((node.target.at(0), 8));
            let request = node.engine.recv(None, tag(0), ANY, into, 0).unwrap();
            let mut status = None;
            fleet::turn_until(&mut fleet, "a message that was sent", |fleet| {
                while fleet[0].engine.next_completion().is_some() {}
                status = fleet[1].engine.test_recv(request).unwrap();
                status.is_some()
            });
            check(&status.unwrap(), Received::Ok, received, 8, 8);
            assert_eq!(word(&fleet[1].engine, fleet[1].target.at(0)), received);
            received += 1;
        }
    }
    println!("{count} messages, {sleeps} sleeps, at most {exhausted} at once, bound {bound}");
    let most = grown(3, 93) + grown(3, 45);
    assert!(exhausted >= most as u64, "the bound was never reached");
    let end = fleet[1].engine.matching_stats();
    assert_eq!(end.matching.expected + end.matching.unexpected, count);
    for node in &fleet {
        assert!(node.peers.iter().all(|&peer| node.engine.peer_error(peer) == Ok(None)));
    }
}

#[test]
fn a_flood_against_a_sleeping_receiver_is_bounded_and_in_order() {
    flood::<1>(Dials::CALM, messages());
}

#[test]
fn a_flood_over_four_faulty_rails_is_in_order() {
    flood::<4>(Dials::WILD, messages() / 20);
}
