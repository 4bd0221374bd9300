//! Tests workers that stop: a worker stops once all its messages are received, and does not wait
//! for a stopped worker.

use std::sync::atomic::AtomicBool;

use fishplate_core::context::{Context, Ticket};
use fishplate_core::engine::command::{Command, Reply};
use fishplate_core::engine::lane::CommandConsumer;
use fishplate_core::engine::protocol::{MatchConfig, Payload, Received};
use fishplate_core::engine::worker::Worker;
use fishplate_core::engine::{Config, Notice, RailPolicy, Signal};
use fishplate_core::op::{Amo, AmoOp, SignalOp};
use fishplate_core::queue::QueueStorage;
use fishplate_core::rail::sim::Dials;
use fishplate_core::sync::event::Channels;
use fishplate_core::sync::host::SpinHost;
use fishplate_core::sync::spin::Policy;

use super::rig::*;
use super::support::fleet::{self, End, Node};
use super::support::*;

/// Acknowledgements are sent only on request or at half a window, never by age.
const CONFIG: Config = Config { window: 64, ack_age: u32::MAX, ..Config::DEFAULT };

/// Maximum number of checks until a condition must hold. Conditions normally hold much earlier.
const PATIENCE: u32 = 20_000;

/// An engine, a worker that the test drives, and the worker's only user.
struct Place<const RAILS: usize> {
    node: Node<End, RAILS>,
    context: Context<'static, SpinHost>,
    consumers: Vec<CommandConsumer<'static>>,
    channels: &'static Channels<1>,
    stopped: bool,
}

impl<const RAILS: usize> Place<RAILS> {
    fn pair(dials: Dials, config: Config, seed: u64) -> [Self; 2] {
        let nodes = tagged_fleet::<RAILS>(2, dials, config, SMALL, seed);
        let places = nodes.into_iter().map(|node| {
            let channels = &*Box::leak(Box::new(Channels::new()));
            let memory = Box::leak(Box::new(QueueStorage::<8>::new())).memory();
            let made = Context::new(CX, host(), channels.queue(0), memory, Policy::BALANCED);
            let (context, consumer) = made.unwrap();
            Place { node, context, consumers: vec![consumer], channels, stopped: false }
        });
        places.collect::<Vec<_>>().try_into().ok().unwrap()
    }

    /// Runs one turn of the worker, unless it has stopped.
    fn turn(&mut self) {
        if !self.stopped {
            Worker::new(&mut self.node.engine, &mut self.consumers, Policy::BALANCED).turn(host());
        }
    }

    /// Tells the worker to stop, and lets it run for a few turns. Returns true if it has stopped.
    fn stop(&mut self) -> bool {
        let mut worker = Worker::new(&mut self.node.engine, &mut self.consumers, Policy::BALANCED);
        self.stopped |= worker.run(host(), &self.channels.send, None, &AtomicBool::new(true), 0);
        self.stopped
    }

    fn recv(&mut self, from: usize, len: usize) -> Ticket {
        let (from, into) = (self.node.peers[from], self.node.target.at(64));
        self.context.recv(Some(from), tag(1), EXACT, Some((into, len))).unwrap()
    }

    fn send(&mut self, to: usize, len: usize) -> Ticket {
        let (to, from) = (self.node.peers[to], self.node.source.at(0));
        self.context.send(to, tag(1), Some((from, len))).unwrap()
    }

    fn add_to(&mut self, to: usize) {
        let amo = Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 };
        let command = Command::Amo { at: self.node.remotes[to].at(0), amo, fetch: false };
        self.context.submit_silent(command).unwrap();
    }

    fn put_signal(&mut self, to: usize, len: usize) {
        let signal = Signal { at: self.node.remotes[to].at(0), op: SignalOp::Add, value: 1 };
        let (from, to) = (self.node.source.at(0), self.node.remotes[to].at(64));
        self.context.submit_silent(Command::PutSignal { from, len, to, signal }).unwrap();
    }

    fn reply(&mut self, ticket: Ticket) -> Option<Reply> {
        self.context.test(ticket).unwrap()
    }

    /// Returns the word that signals and atomics of the other place change.
    fn word(&self) -> u64 {
        word(&self.node.engine, self.node.target.at(0))
    }
}

/// Runs turns of both workers until `ready` returns true.
fn until<const RAILS: usize>(
    places: &mut [Place<RAILS>; 2],
    what: &str,
    mut ready: impl FnMut(&mut [Place<RAILS>; 2]) -> bool,
) {
    for _ in 0..PATIENCE {
        if ready(places) {
            return;
        }
        places.iter_mut().for_each(Place::turn);
    }
    panic!(
        "{what}: not after {PATIENCE} turns; {:?}",
        places.each_ref().map(|p| p.node.engine.stats())
    );
}

/// The last operation before the workers stop.
#[derive(Clone, Copy, Debug)]
enum Last {
    Send(usize),
    PutSignal(usize),
    Amo,
}

/// Executes an operation from place `from` to the other place. Waits until it has arrived there and
/// the payload may be reused.
fn carry_out<const RAILS: usize>(
    places: &mut [Place<RAILS>; 2],
    from: usize,
    last: Last,
    what: &str,
) {
    let to = 1 - from;
    let before = places[to].word();
    match last {
        Last::Send(len) => {
            let received = places[to].recv(from, len);
            let sent = places[from].send(to, len);
            let (mut got, mut free) = (None, None);
            until(places, what, |places| {
                got = got.or_else(|| places[to].reply(received));
                free = free.or_else(|| places[from].reply(sent));
                got.is_some() && free.is_some()
            });
            assert!(
                matches!(got, Some(Reply::Received(status)) if status.outcome == Received::Ok),
                "{what}: {got:?}"
            );
            return;
        }
        Last::PutSignal(len) => places[from].put_signal(to, len),
        Last::Amo => places[from].add_to(to),
    }
    until(places, what, |places| places[to].word() == before + 1);
}

/// The order in which the two workers stop.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// The worker of this place stops while the other runs. The other stops many turns later.
    First(usize),
    Together,
}

fn stop_both<const RAILS: usize>(places: &mut [Place<RAILS>; 2], order: Order, what: &str) {
    if let Order::First(first) = order {
        until(places, what, |places| places[first].stop());
        (0..1000).for_each(|_| places[1 - first].turn());
    }
    for _ in 0..PATIENCE {
        if places.each_mut().map(|place| place.stopped || place.stop()) == [true; 2] {
            return;
        }
    }
    let stats = places.each_ref().map(|place| (place.stopped, place.node.engine.stats()));
    panic!("{what}: a worker does not stop; {stats:?}");
}

fn every_order<const RAILS: usize>(dials: Dials, config: Config, seed: u64) {
    let kinds = [
        Last::Send(8),
        Last::Send(128),
        Last::Send(600),
        Last::PutSignal(8),
        Last::PutSignal(600),
        Last::Amo,
    ];
    for last in kinds {
        for order in [Order::First(0), Order::First(1), Order::Together] {
            let what = format!("{RAILS} rails, seed {seed}, {last:?}, {order:?}");
            let mut places = Place::<RAILS>::pair(dials, config, seed);
            // Seven operations, alternating between the places, so no operation answers the last
            // one. Later rounds run new workers over the same engines.
            for _ in 0..3 {
                for n in 0..7 {
                    carry_out(&mut places, n % 2, last, &what);
                }
                stop_both(&mut places, order, &what);
                for place in &mut places {
                    let (engine, peers) = (&mut place.node.engine, &place.node.peers);
                    for &peer in peers {
                        assert_eq!(engine.is_quiet(CX, peer), Ok(true), "{what}");
                    }
                    place.stopped = false;
                }
            }
        }
    }
}

#[test]
fn workers_stop_in_any_order_once_all_messages_are_received() {
    every_order::<1>(Dials::CALM, CONFIG, 1);
    // If a rail refuses a send at first, the send needs an acknowledgement to complete, but the
    // sender does not request one. So here the receiver also acknowledges by age.
    let config = Config { ack_age: 1000, ..CONFIG };
    for seed in seeds(5) {
        every_order::<1>(Dials::WILD, config, seed);
        every_order::<2>(Dials::WILD, config, seed);
    }
}

#[test]
fn a_stop_waits_until_messages_have_arrived() {
    for last in [Last::Send(8), Last::PutSignal(8), Last::PutSignal(600), Last::Amo] {
        let mut places = Place::<1>::pair(Dials::CALM, CONFIG, 1);
        // The worker of the other place does not run yet.
        let received = places[1].recv(0, 600);
        match last {
            Last::Send(len) => drop(places[0].send(1, len)),
            Last::PutSignal(len) => places[0].put_signal(1, len),
            Last::Amo => places[0].add_to(1),
        }
        for _ in 0..100 {
            assert!(!places[0].stop(), "{last:?}: stopped before it was there");
        }
        until(&mut places, "a stop", |places| places[0].stop());
        match last {
            Last::Send(_) => assert!(matches!(places[1].reply(received), Some(Reply::Received(_)))),
            _ => assert_eq!(places[1].word(), 1, "{last:?}"),
        }
    }
}

#[test]
fn a_worker_that_stops_gives_credits_back() {
    // A signal back acknowledges earlier messages, but returns no credits. The signal itself is
    // acknowledged by age, before any request.
    for signal in [false, true] {
        let mut places = Place::<1>::pair(Dials::CALM, Config { ack_age: 4, ..CONFIG }, 1);
        for _ in 0..2 {
            carry_out(&mut places, 0, Last::Send(8), "two messages");
        }
        if signal {
            places[1].put_signal(0, 8);
            (0..100).for_each(|_| places.iter_mut().for_each(Place::turn));
        }
        until(&mut places, "a stop", |places| places[1].stop());
        for _ in 0..SMALL.credits {
            let sent = places[0].send(1, 8);
            until(&mut places, "a send", |places| places[0].reply(sent).is_some());
        }
        let stats = places[0].node.engine.matching_stats();
        assert_eq!(
            (stats.eager, stats.rendezvous),
            (2 + u64::from(SMALL.credits), 0),
            "signal {signal}"
        );
    }
}

#[test]
fn an_acknowledgement_requested_before_its_message_is_sent() {
    // The request uses the rail with the lower load, and arrives before the message if that rail is
    // faster.
    let slow = Dials { min_delay: 60, max_delay: 60, ..Dials::CALM };
    for policy in [RailPolicy::RoundRobin, RailPolicy::LeastOutstanding] {
        for late in [0, 1] {
            let matching = MatchConfig { credits: 16, ..SMALL };
            let sim = fleet::fabric(2, 2, 64, Dials::CALM, 1);
            sim.set_dials(late, slow);
            let mut nodes =
                fleet::fleet::<_, 2>(sim, 2, Config { policy, ..CONFIG }, SIZE, |_, _, end| end);
            for node in &mut nodes {
                node.engine.attach_matching(matching, match_memory(matching, 2, 4)).unwrap();
            }
            for round in 0..8 {
                let [one, other] = &mut nodes[..] else { panic!("two") };
                let into = Some((other.target.at(0), 8));
                other.engine.recv(Some(other.peers[0]), tag(1), EXACT, into, 0).unwrap();
                one.engine
                    .send(CX, one.peers[1], tag(1), Payload::Bytes(&[7; 8]), Notice::Silent)
                    .unwrap();
                fleet::turn_until(
                    &mut nodes,
                    &format!("{policy:?}, rail {late} late, {round}"),
                    |nodes| {
                        let to = nodes[0].peers[1];
                        nodes[0].engine.is_quiet(CX, to) == Ok(true)
                    },
                );
                assert_eq!(nodes[1].engine.next_recv().unwrap().outcome, Received::Ok);
            }
        }
    }
}
