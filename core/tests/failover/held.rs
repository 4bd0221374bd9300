//! A rail that delays what it carries, as TCP does after lost packets, holds up other rails little.

use fishplate_core::engine::{Config, ContextId, Engine, Notice, Signal};
use fishplate_core::rail::sim::Dials;

use super::support::failover;
use super::support::fleet::{self, End};
use super::support::scope::Scope;
use super::support::tap::{NOW, Tap, shared};

/// The time of a poll of the fabric, and the delay of the late rail in polls.
const POLL_NS: u64 = 10_000;
const DELAY: u32 = 25_000;

#[test]
fn short_operations_leave_a_rail_that_holds_them_up() {
    for late in [0, 1] {
        let _scope = Scope::new();
        NOW.set(1);
        let control = shared();
        let sim = fleet::fabric(2, 2, 1024, Dials::CALM, 1);
        let keep = |engine: &mut Engine<'static, Tap<End, true>, 2>| {
            engine.attach_failover(failover(&Config::DEFAULT, 2)).unwrap();
        };
        let wrap = |_, rail: u16, end: End| Tap::timed(end, rail.into(), &control);
        let mut nodes = fleet::prepared::<_, 2>(sim, 2, Config::DEFAULT, 4096, wrap, keep);
        sim.set_dials(late, Dials { min_delay: DELAY, max_delay: DELAY, ..Dials::CALM });
        let (begun, mut looked) = (sim.now(), 0);
        for count in 1..=100 {
            let to = nodes[0].remotes[1];
            let (from, signal) = (nodes[0].source.at(0), Signal::add(to.at(0), 1));
            let notice = Notice::Report(count);
            nodes[0].engine.put_signal(ContextId(0), from, 8, to.at(8), signal, notice).unwrap();
            fleet::turn_until(&mut nodes, "the operation is done", |nodes| {
                NOW.set(1 + sim.now() * POLL_NS);
                // As in waits, every 10 ms.
                if (sim.now() - looked) * POLL_NS >= 10_000_000 {
                    looked = sim.now();
                    nodes.iter_mut().for_each(|node| node.engine.check_peers());
                }
                nodes[0].engine.next_completion().is_some()
            });
        }
        let delays = (sim.now() - begun) / u64::from(DELAY);
        println!("rail {late}: {delays} delays");
        assert!(delays < 20, "rail {late}: {delays} delays for 100 operations");
    }
}
