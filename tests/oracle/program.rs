//! One random program. It issues operations of every kind to a target that polls rarely, and checks
//! the target's memory after each step. After a final quiet everything must be visible.

use std::collections::HashMap;

use fishplate_core::engine::protocol::{Cancelled, Payload, Received, Request};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{Issued, Notice, Signal};
use fishplate_core::error::{OpError, WaitError};
use fishplate_core::mem::{LocalAddr, RemoteAddr};
use fishplate_core::op::{Amo, AmoOp, Outcome, SignalOp};
use fishplate_core::rail::Rail;
use fishplate_core::sync::host::Host;

use crate::model::{Model, Number};
use crate::rig::{CX, Pair};
use crate::support::Random;

/// The words that signals and atomics change: region, offset and width.
const WORDS: [(usize, usize, usize); 6] =
    [(0, 0, 8), (1, 0, 8), (0, 8, 8), (1, 8, 8), (0, 16, 4), (1, 20, 4)];

/// Offset of the first location.
const FIRST: usize = 64;

/// Maximum number of tagged messages per program.
const MESSAGES: usize = 6;

/// Lengths of data: inside a message, at the limit of a message, in one write, in several pieces,
/// and more than a small lane holds.
const LENGTHS: [usize; 9] = [1, 8, 8, 40, 192, 193, 600, 3000, 9000];

/// Number of turns after which missing data counts as lost.
const PATIENCE: u32 = 200_000;

/// Completion tag of sends.
const SEND: u64 = u64::MAX;

/// Counters of programs, with which a test checks its coverage.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub steps: u64,
    pub operations: u64,
    pub fences: u64,
    /// Number of operations that completed within the call.
    pub direct: u64,
    /// Number of memory checks during which an operation was not visible yet.
    pub waiting: u64,
    pub messages: u64,
}

/// A tagged message, and the location that its receive writes.
struct Message {
    region: usize,
    place: usize,
    offset: usize,
    len: usize,
    /// The message's operation. `None` until it is sent.
    number: Option<Number>,
}

impl Counts {
    pub fn add(&mut self, other: Counts) {
        let Counts { steps, operations, fences, direct, waiting, messages } = other;
        self.steps += steps;
        self.operations += operations;
        self.fences += fences;
        self.direct += direct;
        self.waiting += waiting;
        self.messages += messages;
    }
}

struct Run<'p, 'm, R: Rail, const RAILS: usize> {
    pair: &'p mut Pair<'m, R, RAILS>,
    model: Model,
    random: Random,
    counts: Counts,
    /// Offset of the next unused byte of the source.
    free: usize,
    /// Expected results of fetches.
    fetches: HashMap<Number, u64>,
    messages: Vec<Message>,
    posted: Vec<Request>,
    received: usize,
    ended: usize,
    reported: usize,
}

/// Runs the program of a seed. Returns a description of the first error.
pub fn run<R: Rail, const RAILS: usize>(
    pair: &mut Pair<'_, R, RAILS>,
    seed: u64,
) -> Result<Counts, String> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut model = Model::new(pair.targets.map(|target| target.base).to_vec(), &WORDS, FIRST);
    let messages = (0..MESSAGES)
        .map(|_| {
            let len = [1, 8, 100, 128, 129, 1000, 5000][random.below(7) as usize];
            let region = random.below(2) as usize;
            let (place, offset) = model.place(region, len);
            Message { region, place, offset, len, number: None }
        })
        .collect();
    let mut run = Run {
        pair,
        model,
        random,
        counts: Counts::default(),
        free: 0,
        fetches: HashMap::new(),
        messages,
        posted: vec![],
        received: 0,
        ended: 0,
        reported: 0,
    };
    // Number of target polls per step. Often 0, because direct operations require a stream without
    // other traffic.
    let polls = [0, 2, 10][run.random.below(3) as usize];
    let steps = 8 + run.random.below(32);
    for step in 0..steps {
        let what = run.step(polls);
        run.look().map_err(|why| format!("step {step}, {what}: {why}"))?;
    }
    run.finish()?;
    run.clear();
    Ok(run.counts)
}

impl<R: Rail, const RAILS: usize> Run<'_, '_, R, RAILS> {
    fn step(&mut self, polls: u64) -> &'static str {
        self.counts.steps += 1;
        match self.random.below(100) {
            0..22 => self.put(),
            22..46 => self.put_signal(),
            46..54 => self.signal(),
            54..60 => self.inject(),
            60..70 => self.atomic(),
            70..80 => {
                self.pair.a.engine.fence(CX, self.pair.a.peer).unwrap();
                self.model.fence();
                self.counts.fences += 1;
                "fence"
            }
            80..83 => self.quiet(),
            83..88 => self.send(),
            88..91 => {
                self.post();
                "recv"
            }
            n if n < 91 + polls.min(6) => {
                self.pair.b.engine.progress();
                "the target polls"
            }
            _ => {
                self.pair.a.engine.progress();
                "the origin polls"
            }
        }
    }

    /// Chooses a new or rewritable location. Returns region, location, offset and length.
    fn place(&mut self, lengths: &[usize]) -> (usize, usize, usize, usize) {
        let again = self.model.rewritable();
        if !again.is_empty() && self.random.below(3) == 0 {
            let (place, region, offset, len) =
                again[self.random.below(again.len() as u64) as usize];
            if lengths.contains(&len) {
                return (region, place, offset, len);
            }
        }
        let len = lengths[self.random.below(lengths.len() as u64) as usize];
        let region = self.random.below(2) as usize;
        let (place, offset) = self.model.place(region, len);
        (region, place, offset, len)
    }

    /// Fills unused memory of the origin.
    fn fill(&mut self, value: u8, len: usize) -> LocalAddr {
        let at = self.free;
        self.free += len.next_multiple_of(8);
        // SAFETY: the range lies inside the region, because a program has at most 40 operations.
        // The bytes are unused so far, so nothing reads them.
        unsafe { self.pair.source.as_ptr().add(at).write_bytes(value, len) };
        self.pair.from.at(at as u64)
    }

    fn remote(&self, region: usize, offset: usize) -> RemoteAddr {
        self.pair.targets[region].remote.at(offset as u64)
    }

    fn notice(&mut self) -> Notice {
        match self.random.below(3) {
            0 => Notice::Report(self.model.issued() as u64),
            _ => Notice::Silent,
        }
    }

    /// Records an issued operation in the model.
    fn issued(
        &mut self,
        issued: Result<Issued, OpError>,
        place: Option<usize>,
        word: Option<usize>,
        notice: Notice,
    ) {
        let issued = match issued {
            Ok(issued) => issued,
            Err(OpError::Again) => return,
            Err(error) => panic!("{error:?}"),
        };
        let number = self.model.issue(place, word);
        self.counts.operations += 1;
        match issued {
            Issued::Done { .. } => {
                self.counts.direct += 1;
                self.model.done(number);
            }
            Issued::Pending(_) => self.reported += usize::from(notice != Notice::Silent),
        }
    }

    fn put(&mut self) -> &'static str {
        let (region, place, offset, len) = self.place(&LENGTHS);
        let from = self.fill(self.model.value(place), len);
        let (to, notice) = (self.remote(region, offset), self.notice());
        let issued = self.pair.a.engine.put(CX, from, len, to, notice);
        self.issued(issued, Some(place), None, notice);
        "put"
    }

    fn change(&mut self) -> (usize, Signal) {
        // One of the 8-byte words.
        let word = self.random.below(4) as usize;
        let (region, offset, _) = WORDS[word];
        let (op, value) = match self.random.below(2) {
            0 => (SignalOp::Set, self.model.next(word)),
            _ => (SignalOp::Add, 1),
        };
        (word, Signal { at: self.remote(region, offset), op, value })
    }

    fn put_signal(&mut self) -> &'static str {
        let (region, place, offset, len) = self.place(&LENGTHS);
        let from = self.fill(self.model.value(place), len);
        let (to, notice, (word, signal)) =
            (self.remote(region, offset), self.notice(), self.change());
        let issued = self.pair.a.engine.put_signal(CX, from, len, to, signal, notice);
        self.issued(issued, Some(place), Some(word), notice);
        "put-signal"
    }

    fn signal(&mut self) -> &'static str {
        let (notice, (word, signal)) = (self.notice(), self.change());
        let issued = self.pair.a.engine.signal(CX, signal, notice);
        self.issued(issued, None, Some(word), notice);
        "signal"
    }

    fn inject(&mut self) -> &'static str {
        let (region, place, offset, len) = self.place(&[1, 8, 40, 192]);
        let (bytes, to) = (vec![self.model.value(place); len], self.remote(region, offset));
        let issued = self.pair.a.engine.inject(CX, &bytes, to);
        // `inject` does not report whether the operation completed at once.
        let issued = issued.map(|()| Issued::Pending(fishplate_core::op::Token::NONE));
        self.issued(issued, Some(place), None, Notice::Silent);
        "inject"
    }

    fn atomic(&mut self) -> &'static str {
        let word = self.random.below(WORDS.len() as u64) as usize;
        let ((region, offset, width), next) = (WORDS[word], self.model.next(word));
        let (op, operand) = match self.random.below(4) {
            0 => (AmoOp::Inc, 0),
            1 => (AmoOp::Add, 1),
            2 => (AmoOp::Set, next),
            _ => (AmoOp::CompareSwap, next),
        };
        let amo = Amo { op, width: width as u8, operand, compare: next - 1 };
        let at = self.remote(region, offset);
        if self.random.below(2) == 0 {
            let notice = self.notice();
            let issued = self.pair.a.engine.amo(CX, at, amo, notice);
            self.issued(issued, None, Some(word), notice);
            return "amo";
        }
        let number = self.model.issued();
        let issued = self.pair.a.engine.fetch(CX, at, amo, number as u64);
        match issued {
            Ok(Issued::Done { value }) => assert_eq!(value, next - 1, "fetched at once"),
            Ok(Issued::Pending(_)) => drop(self.fetches.insert(number, next - 1)),
            Err(_) => {}
        }
        self.issued(issued, None, Some(word), Notice::Report(0));
        "fetch"
    }

    /// Calls `quiet` with a short deadline. During the call only the origin polls. In half of the
    /// calls both sides poll first, so that the quiet succeeds and later operations can be direct.
    fn quiet(&mut self) -> &'static str {
        if self.random.below(2) == 0 {
            for _ in 0..8 {
                let _ = self.pair.a.engine.is_quiet(CX, self.pair.a.peer);
                self.pair.a.engine.progress();
                self.pair.b.engine.progress();
            }
        }
        let deadline = self.pair.waiter.host().now_ns() + 20;
        match self.pair.a.engine.quiet(CX, self.pair.a.peer, &mut self.pair.waiter, deadline) {
            Ok(()) => self.model.quiet(),
            Err(WaitError::Deadline(_)) => {}
            Err(error) => panic!("{error:?}"),
        }
        "quiet"
    }

    fn send(&mut self) -> &'static str {
        let next = self.messages.iter().position(|message| message.number.is_none());
        let Some(next) = next else { return "nothing to send" };
        let Message { place, len, .. } = self.messages[next];
        let from = self.fill(self.model.value(place), len);
        let (a, notice) = (&mut self.pair.a, Notice::Report(SEND));
        let issued = a.engine.send(CX, a.peer, Tag::from(7), Payload::Region(from, len), notice);
        match issued {
            Ok(issued) => {
                self.reported += usize::from(matches!(issued, Issued::Pending(_)));
                self.messages[next].number = Some(self.model.send(place));
                self.counts.messages += 1;
            }
            Err(error) => assert_eq!(error, OpError::Again),
        }
        "send"
    }

    fn post(&mut self) {
        let Some(&Message { region, offset, len, .. }) = self.messages.get(self.posted.len())
        else {
            return;
        };
        let (b, into) = (&mut self.pair.b, self.pair.targets[region].local.at(offset as u64));
        let word = self.posted.len() as u64;
        let request =
            b.engine.recv(Some(b.peer), Tag::from(7), Tag::ZERO, Some((into, len)), word).unwrap();
        self.posted.push(request);
    }

    /// Takes completions at both ends, and checks the memory.
    fn look(&mut self) -> Result<(), String> {
        while let Some(end) = self.pair.a.engine.next_completion() {
            assert_eq!(end.outcome, Outcome::Done);
            self.ended += 1;
            if end.tag != SEND {
                let number = end.tag as Number;
                self.model.done(number);
                if let Some(want) = self.fetches.remove(&number)
                    && want != end.value
                {
                    return Err(format!(
                        "operation {number} fetched {} instead of {want}",
                        end.value
                    ));
                }
            }
        }
        while let Some(status) = self.pair.b.engine.next_recv() {
            // Receives match in the order sent, but may complete in another order.
            let Message { len, number, .. } = self.messages[status.word as usize];
            if status.outcome != Received::Ok || status.delivered != len as u64 {
                return Err(format!("receive {}: {status:?}", status.word));
            }
            self.received += 1;
            self.model.received(number.ok_or("received before it was sent")?);
        }
        self.model.check()?;
        self.counts.waiting += u64::from(!self.model.is_complete());
        Ok(())
    }

    /// Completes everything. After the quiet all operations must be visible.
    fn finish(&mut self) -> Result<(), String> {
        let sent = self.messages.iter().filter(|message| message.number.is_some()).count();
        while self.posted.len() < sent {
            self.post();
        }
        let mut quiet = false;
        for _ in 0..PATIENCE {
            let a = &mut self.pair.a;
            if !quiet && a.engine.is_quiet(CX, a.peer) == Ok(true) {
                quiet = true;
                self.model.quiet();
            }
            self.look().map_err(|why| format!("at the end, quiet {quiet}: {why}"))?;
            if quiet && self.received == sent && self.ended == self.reported {
                return self.nothing_else();
            }
            self.pair.a.engine.progress();
            self.pair.b.engine.progress();
        }
        let (a, b) = (&self.pair.a, &self.pair.b);
        Err(format!(
            "no end: quiet {quiet}, {} of {sent} received, {} of {} ended, peers {:?} {:?}",
            self.received,
            self.ended,
            self.reported,
            a.engine.peer_error(a.peer),
            b.engine.peer_error(b.peer)
        ))
    }

    /// Cancels unmatched receives, and checks that the bytes after the used bytes are still zero.
    fn nothing_else(&mut self) -> Result<(), String> {
        for &request in &self.posted[self.received..] {
            let cancelled = self.pair.b.engine.cancel(request);
            let status = self.pair.b.engine.next_recv().map(|status| status.outcome);
            if (cancelled, status) != (Ok(Cancelled::Removed), Some(Received::Cancelled)) {
                return Err(format!("a receive without a message: {cancelled:?} {status:?}"));
            }
        }
        self.model.check()?;
        for (region, target) in self.pair.targets.iter().enumerate() {
            let used = self.model.used(region);
            // SAFETY: the range lies inside the region, and a program uses only a part of the
            // region.
            let behind =
                unsafe { std::slice::from_raw_parts(target.base.as_ptr().add(used), 4096) };
            if behind.iter().any(|&byte| byte != 0) {
                return Err(format!("region {region}: written after the last location"));
            }
        }
        Ok(())
    }

    /// Zeroes the used memory.
    fn clear(&mut self) {
        for (region, target) in self.pair.targets.iter().enumerate() {
            // SAFETY: the range lies inside the region, and all operations are complete.
            unsafe { target.base.as_ptr().write_bytes(0, self.model.used(region)) };
        }
    }
}
