//! Random put-signals, gets and tagged messages between host memory and device memory. Checks every
//! byte, that each signal comes after its data, and that everything happens once.

use fishplate_core::engine::protocol::{Payload, Received, Request};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{ContextId, Engine, Issued, Notice, Signal};
use fishplate_core::error::OpError;
use fishplate_core::mem::{LocalAddr, LocalId, RemoteAddr, RemoteId};
use fishplate_core::op::{Completion, Outcome};
use fishplate_core::rail::Rail;

use super::fleet::Node;
use super::{Random, read, word, write};

/// The test's access to the device memory of all nodes. Each node has two regions of it.
pub trait Memory {
    fn peek(&self, node: usize, region: usize, at: u64, len: usize) -> Vec<u8>;
    fn poke(&self, node: usize, region: usize, at: u64, bytes: &[u8]);
}

const OUT: usize = 0;
const INTO: usize = 1;

/// Number of slots for the put-signals of one direction, and bytes of a slot.
const SLOTS: u64 = 4;
const SLOT: u64 = 700;
/// Bytes of one direction: a word in host memory, a word in device memory, then the slots.
const LANE: u64 = 64 + SLOTS * SLOT;

/// Number of gets that a node has outstanding, and bytes of a get.
const READERS: u64 = 6;
const READ: u64 = 1500;

/// Length of the longest tagged message, in bytes.
const LETTER: u64 = 2000;

/// Returns the size of each region for this many nodes, in bytes.
pub fn size(nodes: usize) -> usize {
    let nodes = nodes as u64;
    (nodes * (LANE + READERS * READ + LETTER)).next_multiple_of(8) as usize
}

/// The put-signals from one node to another. Signal `n` adds 1 to the word in the device if `n` is
/// odd, otherwise to the word in host memory.
struct Lane {
    from: usize,
    to: usize,
    sent: u64,
    /// Number of put-signals seen at the target (data and signal), and number completed at the
    /// origin.
    seen: u64,
    completed: u64,
    /// The payload in each slot, and whether the slot is device memory.
    slots: [(bool, Vec<u8>); SLOTS as usize],
}

/// The gets of one node into one place, one at a time.
struct Reader {
    node: usize,
    number: u64,
    /// The outstanding get: true if its buffer is device memory, and the expected bytes.
    waits: Option<(bool, Vec<u8>)>,
}

/// The tagged messages from one node to another, one at a time.
struct Letters {
    from: usize,
    to: usize,
    count: u64,
    /// The payload in flight, and true if its send has completed.
    payload: Option<(Vec<u8>, bool)>,
    request: Option<(Request, bool)>,
}

pub struct Traffic<M> {
    pub memory: M,
    ids: Vec<[LocalId; 2]>,
    theirs: Vec<Vec<RemoteId>>,
    lanes: Vec<Lane>,
    readers: Vec<Reader>,
    letters: Vec<Letters>,
    contexts: u64,
    pace: u64,
    seed: u64,
    pub issued: u64,
}

const PUT: u64 = 1 << 40;
const GET: u64 = 2 << 40;
const SEND: u64 = 3 << 40;

impl<M: Memory> Traffic<M> {
    /// Creates traffic over the source and target regions of all nodes and over their device memory
    /// `ids`. Imports that memory. Each region has [`size`] bytes.
    pub fn new<R: Rail, const RAILS: usize>(
        nodes: &mut [Node<R, RAILS>],
        (memory, ids): (M, Vec<[LocalId; 2]>),
        (contexts, pace): (u16, u64),
        seed: u64,
    ) -> Self {
        let count = nodes.len();
        let mut import = |me: usize, of: usize| {
            let mut handle = [0; 512];
            let len = nodes[of].engine.export(ids[of][INTO], &mut handle).unwrap();
            let peer = nodes[me].peers[of];
            nodes[me].engine.import(peer, &handle[..len]).unwrap()
        };
        let theirs = (0..count).map(|me| (0..count).map(|of| import(me, of)).collect()).collect();
        let pairs = || (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
        let slots = || std::array::from_fn(|_| (false, vec![]));
        let lane = |(from, to)| Lane { from, to, sent: 0, seen: 0, completed: 0, slots: slots() };
        let letters = |(from, to)| Letters { from, to, count: 0, payload: None, request: None };
        let reader = |node| (0..READERS).map(move |number| Reader { node, number, waits: None });
        Traffic {
            memory,
            ids,
            theirs,
            lanes: pairs().map(lane).collect(),
            readers: (0..count).flat_map(reader).collect(),
            letters: pairs().map(letters).collect(),
            contexts: contexts.into(),
            pace,
            seed,
            issued: 0,
        }
    }

    /// Returns the offsets in each region where the places of gets and the places of messages
    /// begin.
    fn places(&self) -> (u64, u64) {
        let nodes = self.ids.len() as u64;
        (nodes * LANE, nodes * (LANE + READERS * READ))
    }

    /// Writes bytes for a node to send, and returns their address.
    fn lay<R: Rail, const RAILS: usize>(
        &self,
        node: &Node<R, RAILS>,
        me: usize,
        device: bool,
        at: u64,
        bytes: &[u8],
    ) -> LocalAddr {
        match device {
            true => self.memory.poke(me, OUT, at, bytes),
            false => write(&node.engine, node.source.at(at), bytes),
        }
        if device { self.ids[me][OUT].at(at) } else { node.source.at(at) }
    }

    fn remote<R: Rail, const RAILS: usize>(
        &self,
        node: &Node<R, RAILS>,
        me: usize,
        to: usize,
        device: bool,
        at: u64,
    ) -> RemoteAddr {
        if device { self.theirs[me][to].at(at) } else { node.remotes[to].at(at) }
    }

    /// Returns bytes of a node's target region or of its device memory.
    fn found<R: Rail, const RAILS: usize>(
        &self,
        node: &Node<R, RAILS>,
        me: usize,
        device: bool,
        at: u64,
        len: usize,
    ) -> Vec<u8> {
        match device {
            true => self.memory.peek(me, INTO, at, len),
            false => read(&node.engine, node.target.at(at), len),
        }
    }

    /// Issues operations, checks what has arrived, and takes the completions of all nodes.
    pub fn turn<R: Rail, const RAILS: usize>(
        &mut self,
        nodes: &mut [Node<R, RAILS>],
        issues: bool,
        random: &mut Random,
    ) {
        for lane in 0..self.lanes.len() {
            self.check_lane(nodes, lane);
            if issues && random.below(self.pace) == 0 {
                self.put(nodes, lane, random);
            }
        }
        for reader in 0..self.readers.len() {
            if issues && self.readers[reader].waits.is_none() && random.below(2 * self.pace) == 0 {
                self.get(nodes, reader, random);
            }
        }
        for letters in 0..self.letters.len() {
            self.write_letter(nodes, letters, issues, random);
        }
        for (me, node) in nodes.iter_mut().enumerate() {
            while let Some(done) = node.engine.next_completion() {
                self.completed(node, me, &done);
            }
        }
    }

    fn put<R: Rail, const RAILS: usize>(
        &mut self,
        nodes: &mut [Node<R, RAILS>],
        index: usize,
        random: &mut Random,
    ) {
        let Lane { from, to, sent, seen, completed, .. } = self.lanes[index];
        if sent - seen.min(completed) >= SLOTS {
            return;
        }
        let slot = sent % SLOTS;
        let len = [0, 1, 8, 127, 128, 129, 400, SLOT][random.below(8) as usize] as usize;
        let payload: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        let (here, there) = (random.below(3) != 0, random.below(3) != 0);
        let offset = |of: usize| of as u64 * LANE + 64 + slot * SLOT;
        let source = self.lay(&nodes[from], from, here, offset(to), &payload);
        let target = self.remote(&nodes[from], from, to, there, offset(from));
        let odd = sent % 2 == 1;
        let word = self.remote(&nodes[from], from, to, odd, from as u64 * LANE);
        let notice = Notice::Report(PUT | index as u64);
        // All operations of a lane use one context, so they are one stream.
        let context = ContextId((index as u64 % self.contexts) as u8);
        let engine = &mut nodes[from].engine;
        match engine.put_signal(context, source, len, target, Signal::add(word, 1), notice) {
            Ok(issued) => {
                let lane = &mut self.lanes[index];
                lane.completed += u64::from(!matches!(issued, Issued::Pending(_)));
                lane.slots[slot as usize] = (there, payload);
                lane.sent += 1;
                self.issued += 1;
            }
            Err(error) => assert_eq!(error, OpError::Again, "seed {}", self.seed),
        }
    }

    fn check_lane<R: Rail, const RAILS: usize>(&mut self, nodes: &[Node<R, RAILS>], index: usize) {
        let Lane { from, to, sent, seen, ref slots, .. } = self.lanes[index];
        let (node, at, seed) = (&nodes[to], from as u64 * LANE, self.seed);
        let host = word(&node.engine, node.target.at(at));
        let device = u64::from_ne_bytes(self.found(node, to, true, at, 8).try_into().unwrap());
        let now = host + device;
        let fits = host == now.div_ceil(2) && (seen..=sent).contains(&now);
        assert!(
            fits,
            "seed {seed}: {from} to {to}: {host} and {device} of {sent} signals, after {seen}"
        );
        for n in seen..now {
            self.check_slot(node, index, n, &slots[(n % SLOTS) as usize]);
        }
        self.lanes[index].seen = now;
    }

    fn check_slot<R: Rail, const RAILS: usize>(
        &self,
        node: &Node<R, RAILS>,
        index: usize,
        n: u64,
        (device, payload): &(bool, Vec<u8>),
    ) {
        let Lane { from, to, .. } = self.lanes[index];
        let at = from as u64 * LANE + 64 + n % SLOTS * SLOT;
        let found = self.found(node, to, *device, at, payload.len());
        let seed = self.seed;
        assert!(
            found == *payload,
            "seed {seed}: {from} to {to}: data of signal {n}, device: {device}"
        );
    }

    fn get<R: Rail, const RAILS: usize>(
        &mut self,
        nodes: &mut [Node<R, RAILS>],
        index: usize,
        random: &mut Random,
    ) {
        let Reader { node: me, number, .. } = self.readers[index];
        let from = random.below(nodes.len() as u64) as usize;
        let (here, there) = (random.below(2) == 0, random.below(3) != 0);
        let len = 1 + random.below(READ) as usize;
        let payload: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        let (gets, _) = self.places();
        let source = gets + (me as u64 * READERS + number) * READ;
        match there {
            true => self.memory.poke(from, INTO, source, &payload),
            false => write(&nodes[from].engine, nodes[from].target.at(source), &payload),
        }
        let into = self.lay(&nodes[me], me, here, gets + number * READ, &vec![0; len]);
        let remote = self.remote(&nodes[me], me, from, there, source);
        let context = ContextId(random.below(self.contexts) as u8);
        let notice = Notice::Report(GET | index as u64);
        match nodes[me].engine.get(context, into, len, remote, notice) {
            Ok(issued) => {
                self.readers[index].waits = Some((here, payload));
                self.issued += 1;
                if !matches!(issued, Issued::Pending(_)) {
                    self.check_get(&nodes[me].engine, nodes[me].source, index);
                }
            }
            Err(error) => assert_eq!(error, OpError::Again, "seed {}", self.seed),
        }
    }

    fn check_get<R: Rail, const RAILS: usize>(
        &mut self,
        engine: &Engine<'_, R, RAILS>,
        source: LocalId,
        index: usize,
    ) {
        let (at, seed) = (self.places().0, self.seed);
        let reader = &mut self.readers[index];
        let (me, at) = (reader.node, at + reader.number * READ);
        let (device, payload) = reader.waits.take().expect("a get completes once");
        let found = match device {
            true => self.memory.peek(me, OUT, at, payload.len()),
            false => read(engine, source.at(at), payload.len()),
        };
        assert!(
            found == payload,
            "seed {seed}: node {me}: a get of {} bytes, device: {device}",
            payload.len()
        );
        // Reuses the buffer. Nothing may write to it any more.
        let filler = vec![0; payload.len()];
        match device {
            true => self.memory.poke(me, OUT, at, &filler),
            false => write(engine, source.at(at), &filler),
        }
    }

    /// Sends the next message of a pair, posts its receive, and checks the received bytes.
    fn write_letter<R: Rail, const RAILS: usize>(
        &mut self,
        nodes: &mut [Node<R, RAILS>],
        index: usize,
        issues: bool,
        random: &mut Random,
    ) {
        let (_, at) = self.places();
        let Letters { from, to, count, ref payload, request } = self.letters[index];
        let tag = Tag::from((from as u64) << 32 | count);
        if payload.is_none() && issues && random.below(2 * self.pace) == 0 {
            let here = random.below(2) == 0;
            let most = [100, 600, LETTER][random.below(3) as usize];
            let payload: Vec<u8> =
                (0..random.below(most + 1)).map(|_| random.next() as u8).collect();
            let place = self.lay(&nodes[from], from, here, at + to as u64 * LETTER, &payload);
            let context = ContextId(random.below(self.contexts) as u8);
            let (peer, notice) = (nodes[from].peers[to], Notice::Report(SEND | index as u64));
            let payload_at = Payload::Region(place, payload.len());
            match nodes[from].engine.send(context, peer, tag, payload_at, notice) {
                Ok(issued) => {
                    let over = !matches!(issued, Issued::Pending(_));
                    self.letters[index].payload = Some((payload, over));
                    self.issued += 1;
                }
                Err(error) => assert_eq!(error, OpError::Again, "seed {}", self.seed),
            }
        }
        let Letters { ref payload, .. } = self.letters[index];
        let Some((payload, over)) = payload else { return };
        let (len, over) = (payload.len(), *over);
        let into = at + from as u64 * LETTER;
        if request.is_none() && random.below(8) == 0 {
            let device = random.below(2) == 0;
            let node = &mut nodes[to];
            let place = if device { self.ids[to][INTO].at(into) } else { node.target.at(into) };
            let source = Some(node.peers[from]);
            match node.engine.recv(source, tag, Tag::ZERO, Some((place, len)), 0) {
                Ok(request) => self.letters[index].request = Some((request, device)),
                Err(error) => assert_eq!(error, OpError::Again, "seed {}", self.seed),
            }
            return;
        }
        let Some((request, device)) = request else { return };
        let status = nodes[to].engine.test_recv(request);
        if let Ok(Some(status)) = status {
            let seed = self.seed;
            assert_eq!(
                (status.outcome, status.delivered),
                (Received::Ok, len as u64),
                "seed {seed}"
            );
            let found = self.found(&nodes[to], to, device, into, len);
            assert!(
                found == *payload,
                "seed {seed}: message {count} from {from} to {to}, device: {device}"
            );
        } else if !over || status.is_ok() {
            return;
        }
        // The receive's status was taken above, in this turn or an earlier one.
        if over {
            let letters = &mut self.letters[index];
            (letters.payload, letters.request, letters.count) = (None, None, count + 1);
        }
    }

    fn completed<R: Rail, const RAILS: usize>(
        &mut self,
        node: &Node<R, RAILS>,
        me: usize,
        done: &Completion,
    ) {
        let (kind, index) = (done.tag >> 40 << 40, (done.tag & ((1 << 40) - 1)) as usize);
        assert_eq!(done.outcome, Outcome::Done, "seed {}: node {me}: {done:?}", self.seed);
        match kind {
            PUT => self.lanes[index].completed += 1,
            GET => self.check_get(&node.engine, node.source, index),
            _ => {
                let payload = self.letters[index].payload.as_mut().expect("a send completes once");
                assert!(!std::mem::replace(&mut payload.1, true), "a send completes once");
            }
        }
    }

    /// Describes the operations in flight as text.
    pub fn open(&self) -> String {
        let lanes = self.lanes.iter().filter(|lane| lane.seen.min(lane.completed) != lane.sent);
        let lanes =
            lanes.map(|l| format!("{} to {}: {} {} {}", l.from, l.to, l.sent, l.seen, l.completed));
        let gets = self.readers.iter().filter_map(|r| {
            r.waits
                .as_ref()
                .map(|(device, bytes)| format!("get of {} by {}, {device}", bytes.len(), r.node))
        });
        let letters = self.letters.iter().filter_map(|l| {
            let (payload, over) = l.payload.as_ref()?;
            Some(format!(
                "{} bytes from {} to {}, {over} {:?}",
                payload.len(),
                l.from,
                l.to,
                l.request
            ))
        });
        lanes.chain(gets).chain(letters).collect::<Vec<_>>().join("; ")
    }

    pub fn is_over(&self) -> bool {
        self.lanes.iter().all(|lane| lane.seen == lane.sent && lane.completed == lane.sent)
            && self.readers.iter().all(|reader| reader.waits.is_none())
            && self.letters.iter().all(|letters| letters.payload.is_none())
    }

    /// Checks all memory again. Nothing may be in flight.
    pub fn end<R: Rail, const RAILS: usize>(&mut self, nodes: &[Node<R, RAILS>]) {
        for index in 0..self.lanes.len() {
            self.check_lane(nodes, index);
            let lane = &self.lanes[index];
            for n in lane.sent.saturating_sub(SLOTS)..lane.sent {
                self.check_slot(&nodes[lane.to], index, n, &lane.slots[(n % SLOTS) as usize]);
            }
        }
    }
}
