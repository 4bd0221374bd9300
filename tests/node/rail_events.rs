//! Tests what a program learns about rails that fail and return: events and counters.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fishplate::config::Settings;
use fishplate::core::engine::RailStats;
use fishplate::core::error::WaitError;
use fishplate::core::mem::RailId;
use fishplate::node::{Builder, Error, Remote};
use fishplate::worker::Options;
use fishplate::{Cmp, Node, Notice, PeerId, Signal};
use fishplate_testing::fabric::{Fake, Persona};

use super::{SOON, WORKER, builder};

const INTERFACES: [[&str; 2]; 2] = [["eth0", "eth1"], ["eth2", "eth3"]];

fn network(seed: u64) -> Fake {
    Fake::new(Persona { interfaces: INTERFACES.concat(), ..Persona::tcp() }, seed)
}

fn on(provider: &Fake, interfaces: [&str; 2]) -> Builder {
    let settings = Settings {
        providers: vec!["tcp".into()],
        interfaces: interfaces.map(String::from).into(),
        ..Settings::DEFAULT
    };
    // One thread drives both nodes, so no call waits for the other node.
    let builder = builder().patience(Duration::ZERO).shared_memory(false);
    builder.library(provider.library()).settings(settings)
}

/// Two nodes. The first puts to the second.
struct Pair {
    nodes: [Node; 2],
    to: PeerId,
    there: Remote,
}

impl Pair {
    fn new(first: Builder, second: Builder) -> Pair {
        let [mut a, mut b] = [first, second].map(|builder| builder.open().unwrap());
        let to = a.connect(b.address()).unwrap();
        b.connect(a.address()).unwrap();
        let inbox = b.alloc(4096).unwrap();
        let there = a.import(to, b.handle(inbox).unwrap()).unwrap();
        let mut pair = Pair { nodes: [a, b], to, there };
        pair.until("both have met", |nodes| nodes[1].stats().arrived > 20);
        pair
    }

    fn until(&mut self, what: &str, done: impl Fn(&[Node; 2]) -> bool) {
        let deadline = Instant::now() + SOON;
        while !done(&self.nodes) {
            let all = |rail| self.nodes.each_ref().map(|node| node.rail_stats(RailId(rail)));
            assert!(Instant::now() < deadline, "{what}: {:?}", [1, 2].map(all));
            let signal = Signal::add(self.there.at(0), 1);
            _ = self.nodes[0].put_signal(&[7; 600], self.there.at(8), signal, Notice::Silent);
            for node in &mut self.nodes {
                node.progress();
                assert_eq!(node.failed_peers(), []);
            }
        }
    }
}

fn counts(node: &Node, rail: u8) -> RailStats {
    node.rail_stats(RailId(rail)).unwrap()
}

#[test]
fn a_program_is_told_which_rails_fail_and_return_and_counts_them() {
    let provider = network(1);
    let told = Arc::new(Mutex::new(vec![]));
    let into = told.clone();
    let first = on(&provider, INTERFACES[0]).on_rail_event(move |event| {
        into.lock().unwrap().push((event.peer, event.rail.id, event.error.clone()));
    });
    let mut pair = Pair::new(first, on(&provider, INTERFACES[1]));
    assert_eq!(pair.nodes[0].rail_stats(RailId(3)), None);
    assert!(told.lock().unwrap().is_empty());

    // No new endpoint can be opened, so the rail does not return.
    provider.set_address("eth0", false);
    provider.pull("eth0", 4);
    pair.until("the failure is told", |_| told.lock().unwrap().len() == 1);
    let (peer, rail, error) = told.lock().unwrap()[0].clone();
    assert_eq!((peer, rail), (pair.to, RailId(1)));
    assert!(error.is_some_and(|error| error.rail == rail));
    pair.until("all is posted again", |nodes| counts(&nodes[0], 1).resumed_ns > 0);
    let RailStats { failed, fenced, returned, resumed_ns, resumed_max_ns, .. } =
        counts(&pair.nodes[0], 1);
    assert_eq!((failed, fenced, returned), (1, 1, 0));
    assert!(resumed_ns == resumed_max_ns && u128::from(resumed_ns) < SOON.as_nanos());

    provider.plug("eth0");
    provider.set_address("eth0", true);
    pair.until("the return is told", |_| told.lock().unwrap().len() == 2);
    assert_eq!(told.lock().unwrap()[1], (pair.to, RailId(1), None));
    let (stats, count) = (pair.nodes[0].stats(), counts(&pair.nodes[0], 1));
    assert!(count.returned == 1 && count.reposted == stats.reposted);
    // With workers, there may be nothing in flight on the rail.
    assert!(count.reposted > 0 || WORKER);
    assert_eq!((stats.rails_failed, stats.rails_returned), (1, 1));
    assert_eq!(counts(&pair.nodes[0], 2), RailStats::default());
    assert_eq!(provider.violations(), [] as [String; 0]);
}

#[test]
fn a_wait_tells_events_and_lasts_as_long_as_without_them() {
    let provider = network(5);
    let told = Arc::new(AtomicU32::new(0));
    let into = told.clone();
    let first = on(&provider, INTERFACES[0]).on_rail_event(move |_| {
        into.fetch_add(1, Ordering::Relaxed);
    });
    let mut pair = Pair::new(first, on(&provider, INTERFACES[1]).worker(Options::default()));
    let inbox = pair.nodes[0].alloc(64).unwrap();
    pair.nodes[0].disable_rail(pair.to, RailId(1)).unwrap();
    let (deadline, limit) = (Instant::now() + SOON, Duration::from_millis(200));
    while told.load(Ordering::Relaxed) == 0 {
        assert!(Instant::now() < deadline, "not told");
        let begun = Instant::now();
        let waited = pair.nodes[0].wait(inbox.at(0), Cmp::Eq, 1, Some(pair.to), limit);
        assert!(matches!(waited, Err(Error::Wait(WaitError::Deadline(_)))), "{waited:?}");
        assert!(begun.elapsed() >= limit);
    }
    assert_eq!(told.load(Ordering::Relaxed), 1);
}

#[test]
fn an_event_is_one_line_for_a_log() {
    let provider = network(2);
    let lines = Arc::new(Mutex::new(vec![]));
    let into = lines.clone();
    let first = on(&provider, INTERFACES[0])
        .on_rail_event(move |event| into.lock().unwrap().push(event.to_string()));
    let mut pair = Pair::new(first, on(&provider, INTERFACES[1]));
    pair.nodes[0].disable_rail(pair.to, RailId(2)).unwrap();
    pair.until("the rail is out of use", |_| lines.lock().unwrap().len() == 1);
    pair.nodes[0].enable_rail(pair.to, RailId(2)).unwrap();
    pair.until("the rail is in use", |_| lines.lock().unwrap().len() == 2);
    assert_eq!(
        *lines.lock().unwrap(),
        [
            "rail 2 (tcp on eth1) to peer 0 is out of use: it was disabled",
            "rail 2 (tcp on eth1) to peer 0 is in use again",
        ]
    );
}

#[test]
fn a_callback_that_panics_is_not_called_again_and_the_node_continues() {
    let provider = network(3);
    let calls = Arc::new(AtomicU32::new(0));
    let into = calls.clone();
    let first = on(&provider, INTERFACES[0]).on_rail_event(move |_| {
        into.fetch_add(1, Ordering::Relaxed);
        panic!("as planned");
    });
    let mut pair = Pair::new(first, on(&provider, INTERFACES[1]));
    provider.pull("eth1", 0);
    pair.until("the failure is told", |_| calls.load(Ordering::Relaxed) == 1);
    provider.plug("eth1");
    pair.until("the rail has returned", |nodes| counts(&nodes[0], 2).returned == 1);
    let arrived = pair.nodes[1].stats().arrived;
    pair.until("more arrives", |nodes| nodes[1].stats().arrived > arrived + 100);
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

#[test]
fn arrivals_from_a_sender_that_is_not_attached_are_counted() {
    let provider = network(4);
    let [mut a, mut b] = INTERFACES.map(|names| on(&provider, names).open().unwrap());
    let to = a.connect(b.address()).unwrap();
    let deadline = Instant::now() + SOON;
    while counts(&b, 1).late + counts(&b, 2).late == 0 {
        assert!(Instant::now() < deadline, "no arrival is counted");
        _ = a.send(to, 1, b"hello", Notice::Silent);
        a.progress();
        b.progress();
    }
    assert_eq!(b.rail_stats(RailId(0)), Some(RailStats::default()));
}
