//! The throughput of tagged messages over two rails of different speed, on a simulated fabric. The
//! receiver reads the payloads. The requests to send wait behind those reads.

use fishplate_core::engine::protocol::{MatchConfig, Payload};
use fishplate_core::engine::{Config, Engine, Notice};
use fishplate_core::rail::sim::Dials;

use super::rig::*;
use super::support::fleet::{End, fabric, prepared, turn_until};
use super::support::tap::{ABSORBED, Event, Tap, shared};
use super::support::*;

const MATCHING: MatchConfig = MatchConfig { headers: RECEIVES as u32, ..SMALL };

/// Sends `total` bytes in messages of `len` bytes, with at most [`RECEIVES`] in flight. Returns the
/// bytes per poll. The rails buffer requests to send, as tcp does, so the sender cannot see a
/// request's delay.
fn messages(rates: [u32; 2], len: usize, total: u64) -> f64 {
    let dials = Dials { min_delay: 4, max_delay: 12, ..Dials::CALM };
    let sim = fabric(2, 2, 1024, dials, 7);
    for (rail, rate) in rates.into_iter().enumerate() {
        sim.set_dials(rail as u16, Dials { rate, ..dials });
    }
    let prepare = |engine: &mut Engine<'static, Tap<End>, 2>| {
        engine.attach_failover(failover(&Config::DEFAULT, 2)).unwrap();
        engine.attach_matching(MATCHING, match_memory(MATCHING, 2, 4)).unwrap();
    };
    let control = shared();
    control.borrow_mut().absorbs = true;
    control.borrow_mut().edit = Some(Box::new(|_, event| match event {
        Event::Done(ABSORBED, _) => vec![],
        event => vec![event],
    }));
    let wrap = |_, rail: u16, end| Tap::new(end, rail.into(), &control);
    let mut nodes = prepared::<_, 2>(sim, 2, Config::DEFAULT, len, wrap, prepare);
    let (begun, count) = (sim.now(), total / len as u64);
    let (mut posted, mut sent, mut got, mut done) = (0, 0, 0, 0);
    turn_until(&mut nodes, "all messages are received", |nodes| {
        let [from, to] = &mut nodes[..] else { unreachable!("two nodes") };
        while to.engine.next_recv().is_some() {
            got += 1;
        }
        while posted < count && posted < got + RECEIVES as u64 {
            let into = (to.target.at(0), len);
            to.engine.recv(Some(to.peers[0]), tag(1), EXACT, Some(into), posted).unwrap();
            posted += 1;
        }
        while from.engine.next_completion().is_some() {
            done += 1;
        }
        while sent < count && sent < done + RECEIVES as u64 {
            let payload = Payload::Region(from.source.at(0), len);
            if from.engine.send(CX, from.peers[1], tag(1), payload, Notice::Report(sent)).is_err() {
                break;
            }
            sent += 1;
        }
        got == count && done == count
    });
    total as f64 / (sim.now() - begun) as f64
}

#[test]
fn messages_are_not_held_up_by_a_slow_rail() {
    for slower in [3, 10, 100] {
        let rates = [8000, 8000 / slower];
        let sum = (rates[0] + rates[1]) as f64;
        let got = messages(rates, 64 << 10, 1 << 27);
        println!("1:{slower}: {:.3} of the sum", got / sum);
        assert!(got >= 0.9 * sum, "1:{slower}: {:.3} of the sum", got / sum);
    }
}
