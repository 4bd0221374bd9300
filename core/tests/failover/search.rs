//! Searches the orders of events of a pair over two rails, with a window of four. The events are:
//! post, deliver, cut, fence, answer, post again, acknowledge. The engines are real. The rails act
//! only when the search tells them to. The search is bounded, so it is no proof. It takes one free
//! choice at each point of the usual runs, and more until the limit of states is reached.
//!
//! The search starts from a run in the usual order. It repeats that run with a cut after each
//! choice, for each way to cut a link. From every point of these runs it takes the possible
//! choices, breadth first. It replays each path from the start, and drops states with the same
//! rails, memory and counters as an earlier one. It completes each new state in the usual order.
//! All operations must then complete, once and in order. `FISHPLATE_STATES=n` sets the number of
//! states to visit.

use std::cell::RefCell;
use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ptr::NonNull;
use std::rc::Rc;

use fishplate_core::engine::{Config, Engine, Notice, Signal};
use fishplate_core::error::{AttachError, CompleteError, PeerError, PostError};
use fishplate_core::mem::{LocalId, Peer, PeerId, Region, RemoteId, Untrusted};
use fishplate_core::op::{Amo, AmoOp, AmoSet, Outcome};
use fishplate_core::rail::{Caps, Fence, Local, Order, Posted, Rail, RailKey, Remote, Sink};

use super::support::scope::Scope;
use super::support::*;

const RAILS: usize = 2;

/// A post in flight to a node on a rail.
#[derive(Clone, Hash)]
struct Packet {
    cx: u64,
    /// True if the post has been reported as failed.
    failed: bool,
    what: What,
}

#[derive(Clone, Hash)]
enum What {
    Write { bytes: Vec<u8>, region: usize, offset: usize, data: Option<u32> },
    Message(Vec<u8>),
}

#[derive(Clone, Hash)]
enum Event {
    Done(u64, bool),
    Landed(u32),
    Message(Vec<u8>),
    Down,
}

/// One end of a rail.
#[derive(Default, Hash)]
struct Side {
    /// Packets in flight to this node, and events that the rail will report here.
    queue: VecDeque<Packet>,
    events: VecDeque<Event>,
    /// True if the link from this node is cut, and true if this node has fenced the other node.
    cut: bool,
    fenced: bool,
}

/// The state of all rails by node and rail, and the registered memory of each node.
#[derive(Default)]
struct World {
    sides: [[Side; RAILS]; 2],
    regions: [Vec<Region>; 2],
}

struct Wire {
    world: Rc<RefCell<World>>,
    node: usize,
    rail: usize,
}

impl Wire {
    fn post(&self, cx: u64, what: What) -> Result<Posted, PostError> {
        let mut world = self.world.borrow_mut();
        let cut = world.sides[self.node][self.rail].cut;
        let fenced = [0, 1].iter().any(|&node| world.sides[node][self.rail].fenced);
        if cut || fenced {
            world.sides[self.node][self.rail].events.push_back(Event::Done(cx, false));
        }
        if !fenced {
            world.sides[1 - self.node][self.rail].queue.push_back(Packet { cx, failed: cut, what });
        }
        Ok(Posted::Pending)
    }
}

// SAFETY: the rail maps nothing, and a post copies its memory before it returns. `Setup` is empty.
unsafe impl Rail for Wire {
    type Setup<'a> = ();

    const COPIES: bool = false;

    fn setup(&mut self) {}

    fn caps(&self) -> Caps {
        Caps {
            max_message: 256,
            max_rma: 1 << 16,
            inject: 64,
            data_bytes: 4,
            order: Order::None,
            native_atomics: AmoSet::NONE,
            depth: 64,
            fresh: true,
            fences: false,
        }
    }

    fn register(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError> {
        let regions = &mut self.world.borrow_mut().regions[self.node];
        let known = regions.iter().position(|other| other.ptr() == region.ptr());
        let key = known.unwrap_or(regions.len());
        if known.is_none() {
            // SAFETY: the engine keeps the region's memory valid as long as the rail lives.
            regions.push(unsafe { Region::new(region.ptr(), region.len(), region.kind()) });
        }
        Ok((RailKey { key: key as u64, base: 0 }, 0))
    }

    fn deregister(&mut self, _: RailKey) -> Result<(), AttachError> {
        Ok(())
    }

    fn touches(&mut self, _: Local) -> bool {
        false
    }

    fn import(&mut self, _: Peer, _: RailKey, _: u64) -> Result<Option<NonNull<u8>>, AttachError> {
        Ok(None)
    }

    fn release(&mut self, _: Peer, _: RailKey) {}

    fn detach(&mut self, _: Peer) {}

    fn fence(&mut self, _: Peer) -> Fence {
        let mut world = self.world.borrow_mut();
        for packet in std::mem::take(&mut world.sides[self.node][self.rail].queue) {
            if !packet.failed {
                world.sides[1 - self.node][self.rail]
                    .events
                    .push_back(Event::Done(packet.cx, false));
            }
        }
        let side = &mut world.sides[self.node][self.rail];
        side.events.retain(|event| matches!(event, Event::Done(..)));
        side.fenced = true;
        Fence::Fenced
    }

    unsafe fn post_write(
        &mut self,
        _: Peer,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: our caller guarantees that the local memory is readable.
        let bytes = unsafe { std::slice::from_raw_parts(local.ptr.as_ptr(), local.len) }.to_vec();
        let (region, offset) = (remote.key.key as usize, remote.offset as usize);
        self.post(cx, What::Write { bytes, region, offset, data })
    }

    unsafe fn post_read(
        &mut self,
        _: Peer,
        _: Local,
        _: Remote,
        _: u64,
    ) -> Result<Posted, PostError> {
        Err(PostError::Unsupported)
    }

    fn post_message(
        &mut self,
        _: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let mut bytes = head.to_vec();
        bytes.resize(head.len() + body.len(), 0);
        body.copy_out(&mut bytes[head.len()..]);
        self.post(cx, What::Message(bytes))
    }

    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        for n in 0..budget {
            let event = self.world.borrow_mut().sides[self.node][self.rail].events.pop_front();
            match event {
                None => return n,
                Some(Event::Done(cx, well)) => {
                    sink.done(cx, if well { Ok(()) } else { Err(CompleteError::Unknown(-1)) });
                }
                Some(Event::Landed(data)) => sink.landed(Peer(0), data),
                Some(Event::Message(bytes)) => sink.message(Peer(0), Untrusted::from_slice(&bytes)),
                Some(Event::Down) => sink.peer_down(Peer(0), PeerError::Lost),
            }
        }
        budget
    }
}

/// A choice of the search. Nodes and rails have the numbers 0 and 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    /// Issue the next operation of the script.
    Issue,
    /// Make a pass of a node: it handles reports and posts due operations.
    Pass(usize),
    /// Deliver a packet to a node on a rail, from this position of the queue.
    Deliver(usize, usize, usize),
    /// Cut the link from a node on a rail. `None` cuts both directions.
    Cut(Option<usize>, usize),
}

struct Node {
    engine: Engine<'static, Wire, RAILS>,
    peer: PeerId,
    source: LocalId,
    target: LocalId,
    remote: Option<RemoteId>,
}

/// The state of one run.
struct Pair {
    world: Rc<RefCell<World>>,
    nodes: [Node; 2],
    issued: usize,
    /// Fetched values in completion order, and the number of completions of any kind.
    fetched: Vec<u64>,
    done: usize,
}

/// The issuing node of each operation. Node 0 issues two put-signals to different places, a
/// fetching addition, and another put-signal. Node 1 issues one put-signal. Each signal adds 1.
const SCRIPT: [usize; 5] = [0, 0, 1, 0, 0];
const FETCHES: usize = 1;

impl Pair {
    fn new() -> Pair {
        let world = Rc::<RefCell<World>>::default();
        let config = Config { window: 4, ack_age: 0, eager: 0, ..Config::DEFAULT };
        let mut nodes = [0, 1].map(|node| {
            let wires = std::array::from_fn(|rail| Wire { world: world.clone(), node, rail });
            let mut engine = Engine::new(config, wires, memory(&config, 1, 16)).unwrap();
            engine.attach_failover(failover(&config, 1)).unwrap();
            let peer = engine.reserve_peer().unwrap();
            engine.connect_peer(peer, 0b11).unwrap();
            let (source, target) =
                (engine.register(region(128)).unwrap(), engine.register(region(128)).unwrap());
            Node { engine, peer, source, target, remote: None }
        });
        for (me, to) in [(0, 1), (1, 0)] {
            let mut handle = [0; 512];
            let len = nodes[to].engine.export(nodes[to].target, &mut handle).unwrap();
            let node = &mut nodes[me];
            node.remote = Some(node.engine.import(node.peer, &handle[..len]).unwrap());
        }
        Pair { world, nodes, issued: 0, fetched: vec![], done: 0 }
    }

    fn choices(&self) -> Vec<Choice> {
        let mut all = vec![Choice::Pass(0), Choice::Pass(1)];
        if self.issued < SCRIPT.len() {
            all.push(Choice::Issue);
        }
        let world = self.world.borrow();
        for (node, sides) in world.sides.iter().enumerate() {
            for (rail, side) in sides.iter().enumerate() {
                // Any of the first packets may be next, because rails preserve no order.
                all.extend((0..side.queue.len().min(3)).map(|at| Choice::Deliver(node, rail, at)));
            }
        }
        if world.sides.iter().flatten().all(|side| !side.cut) {
            for rail in 0..RAILS {
                all.extend([None, Some(0), Some(1)].map(|from| Choice::Cut(from, rail)));
            }
        }
        all
    }

    fn choose(&mut self, choice: Choice) {
        match choice {
            Choice::Issue => self.issue(),
            Choice::Pass(node) => {
                self.nodes[node].engine.progress();
                while let Some(done) = self.nodes[node].engine.next_completion() {
                    assert_eq!(done.outcome, Outcome::Done);
                    self.done += 1;
                    if done.tag == FETCHES as u64 + 100 {
                        self.fetched.push(done.value);
                    }
                }
            }
            Choice::Deliver(node, rail, at) => self.deliver(node, rail, at),
            Choice::Cut(from, rail) => {
                let world = &mut *self.world.borrow_mut();
                for node in [0, 1].into_iter().filter(|&node| from.is_none_or(|from| from == node))
                {
                    world.sides[node][rail].cut = true;
                    world.sides[node][rail].events.push_back(Event::Down);
                    // Each packet in flight is reported as failed, but may still land.
                    let mut failed = vec![];
                    for packet in &mut world.sides[1 - node][rail].queue {
                        packet.failed = true;
                        failed.push(Event::Done(packet.cx, false));
                    }
                    world.sides[node][rail].events.extend(failed);
                }
            }
        }
    }

    fn issue(&mut self) {
        let n = self.issued as u64;
        let (from, count) =
            (SCRIPT[self.issued], SCRIPT[..self.issued].iter().filter(|&&by| by == 0).count());
        let Node { engine, source, remote, .. } = &mut self.nodes[from];
        let remote = remote.unwrap();
        let issued = if from == 0 && count == 2 {
            let add = Amo { op: AmoOp::Add, width: 8, operand: 10, compare: 0 };
            engine.fetch(CX, remote.at(0), add, FETCHES as u64 + 100)
        } else {
            let place = 8 + 8 * n;
            write(engine, source.at(place), &[n as u8 + 1; 8]);
            let signal = Signal::add(remote.at(0), 1);
            engine.put_signal(CX, source.at(place), 8, remote.at(place), signal, Notice::Report(n))
        };
        issued.unwrap();
        self.issued += 1;
    }

    fn deliver(&mut self, node: usize, rail: usize, at: usize) {
        let world = &mut *self.world.borrow_mut();
        let Packet { cx, failed, what } = world.sides[node][rail].queue.remove(at).unwrap();
        let event = match what {
            What::Message(bytes) => Some(Event::Message(bytes)),
            What::Write { bytes, region, offset, data } => {
                let region = &world.regions[node][region];
                assert!(offset + bytes.len() <= region.len());
                // SAFETY: the range was checked above, and the region's memory lives as long as the
                // engine.
                unsafe {
                    std::ptr::copy(bytes.as_ptr(), region.ptr().as_ptr().add(offset), bytes.len());
                }
                data.map(Event::Landed)
            }
        };
        world.sides[node][rail].events.extend(event);
        if !failed {
            world.sides[1 - node][rail].events.push_back(Event::Done(cx, true));
        }
    }

    /// Hashes the visible state.
    fn look(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let world = self.world.borrow();
        world.sides.hash(&mut hasher);
        (self.issued, &self.fetched, self.done).hash(&mut hasher);
        for node in &self.nodes {
            read(&node.engine, node.target.at(0), 64).hash(&mut hasher);
            format!("{:?}", node.engine.stats()).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Checks that the data of every signal counted at node 1 has landed there.
    fn check(&self, path: &[Choice]) {
        let Node { engine, target, .. } = &self.nodes[1];
        let value = word(engine, target.at(0));
        // The addition adds 10, after two signals. One more signal may follow.
        let signals = match value {
            0..=2 => value,
            12 => 2,
            13 => 3,
            value => panic!("{value}: {path:?}"),
        };
        for (n, place) in [0u64, 1, 4].into_iter().enumerate().take(signals as usize) {
            let got = read(engine, target.at(8 + 8 * place), 8);
            assert_eq!(got, [place as u8 + 1; 8], "data of signal {n}: {path:?}");
        }
    }

    /// Makes the choices of one round in the usual order. Delivers all packets that are not on a
    /// cut link.
    fn usual(&mut self, log: &mut Vec<Choice>) {
        let mut choose = |pair: &mut Pair, choice| {
            pair.choose(choice);
            log.push(choice);
        };
        if self.issued < SCRIPT.len() {
            choose(self, Choice::Issue);
        }
        for node in 0..2 {
            choose(self, Choice::Pass(node));
            let to = 1 - node;
            for rail in 0..RAILS {
                let waits = |pair: &Pair| {
                    let sides = &pair.world.borrow().sides;
                    !sides[node][rail].cut && !sides[to][rail].queue.is_empty()
                };
                while waits(self) {
                    choose(self, Choice::Deliver(to, rail, 0));
                }
            }
        }
    }

    /// Completes the run in the usual order. Returns the choices.
    fn finish(&mut self, path: &[Choice]) -> Vec<Choice> {
        let (mut log, mut rounds) = (vec![], 0);
        while self.done < SCRIPT.len() {
            assert!(rounds < 3000, "no end: {path:?}");
            rounds += 1;
            self.usual(&mut log);
            self.check(path);
        }
        assert_eq!(word(&self.nodes[1].engine, self.nodes[1].target.at(0)), 13, "{path:?}");
        assert_eq!(word(&self.nodes[0].engine, self.nodes[0].target.at(0)), 1, "{path:?}");
        assert_eq!(self.fetched, [2], "{path:?}");
        for node in &self.nodes {
            assert_eq!(node.engine.peer_error(node.peer), Ok(None), "{path:?}");
        }
        log
    }
}

/// Returns the beginnings of runs in the usual order: without a cut, and with a cut after each
/// choice.
fn beginnings() -> VecDeque<Vec<Choice>> {
    let _scope = Scope::new();
    let whole = Pair::new().finish(&[]);
    let mut all = VecDeque::new();
    for at in 0..=whole.len() {
        for (from, rail) in
            [None, Some(0), Some(1)].into_iter().flat_map(|from| [(from, 0), (from, 1)])
        {
            let mut path = whole[..at].to_vec();
            path.push(Choice::Cut(from, rail));
            let mut pair = Pair::new();
            path.iter().for_each(|&choice| pair.choose(choice));
            let rest = pair.finish(&path);
            all.extend((0..rest.len().min(60)).map(|n| [&path, &rest[..n]].concat()));
        }
        all.push_back(whole[..at].to_vec());
    }
    all
}

#[test]
fn every_order_found_by_a_bounded_search_ends_well() {
    let most = std::env::var("FISHPLATE_STATES").map_or(20_000, |n| n.parse().expect("a number"));
    let waiting = beginnings();
    let begun = waiting.len();
    let mut waiting: VecDeque<_> = waiting.into_iter().map(|path| (path, 0)).collect();
    let (mut seen, mut paths, mut free) = (HashSet::new(), 0u64, 0);
    while let Some((path, chosen)) = waiting.pop_front() {
        if seen.len() >= most {
            break;
        }
        paths += 1;
        let _scope = Scope::new();
        let mut pair = Pair::new();
        for &choice in &path {
            pair.choose(choice);
            pair.check(&path);
        }
        if !seen.insert(pair.look()) {
            continue;
        }
        free = chosen;
        for choice in pair.choices() {
            let mut next = path.clone();
            next.push(choice);
            waiting.push_back((next, chosen + 1));
        }
        pair.finish(&path);
    }
    let states = seen.len();
    println!(
        "{begun} beginnings, {states} states, {paths} paths, all of fewer than {free} free choices"
    );
    assert!(free >= 2, "{free}");
}
