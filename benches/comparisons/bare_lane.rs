//! What a message from one processor to another takes at the least: a ping-pong through rings of
//! cells, one each way, that keeps no state, checks nothing and matches nothing, beside one through
//! a single cache line. Payloads are copied as a lane copies them, to lines as the other side left
//! them, or to lines that were claimed behind the message before.
//!
//! cargo run --release --example bare-lane [PROCESSOR PROCESSOR]
//!
//! Each figure is half a round trip in nanoseconds: the median of many short batches with the pause
//! between two looks that served best, none to three.

use std::hint::{black_box, spin_loop};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use fishplate_benches::processors::{chosen, pin};
use fishplate_core::mem::copy_message;

/// Words of a line.
const LINE: usize = 8;
/// Lines of a ring: twice what the longest payload takes, and 64 KiB at least.
const LINES: usize = 1024;
const ROUNDS: u64 = 2_000;
const BATCHES: u64 = 25;

/// Where the word of a message lies, and how many bytes go with it.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    /// Words from the first word of one direction to that of the other.
    apart: usize,
    /// The next message lies behind this one, not in its place.
    goes_on: bool,
    payload: usize,
    /// After each message, stores to the next one's lines,
    /// which takes them back from the other side.
    claims: bool,
}

/// Two rings, one each way.
const fn rings(name: &'static str, payload: usize, claims: bool) -> Way {
    Way { name, apart: LINE * LINES, goes_on: true, payload, claims }
}

const WAYS: [Way; 10] = [
    Way { name: "one line, both words in it", apart: 4, goes_on: false, payload: 0, claims: false },
    Way { name: "two lines, one each way", apart: LINE * LINES, goes_on: false, payload: 0, claims: false },
    rings("two rings of lines", 0, false),
    rings("two rings, 4 KiB copied in and out", 4096, false),
    rings("two rings, 8 KiB copied in and out", 8192, false),
    rings("two rings, 16 KiB copied in and out", 16384, false),
    rings("two rings of lines, claimed", 0, true),
    rings("two rings, 4 KiB, claimed", 4096, true),
    rings("two rings, 8 KiB, claimed", 8192, true),
    rings("two rings, 16 KiB, claimed", 16384, true),
];

/// One side of a ping-pong.
struct Side<'m> {
    memory: &'m [AtomicU64],
    way: Way,
    pauses: u32,
    /// What is sent, and what was received.
    private: [Vec<u64>; 2],
}

impl Side<'_> {
    /// The words of message `number` in a direction: the first tells that it is there.
    fn place(&self, direction: usize, number: u64) -> Range<usize> {
        let words = (1 + self.way.payload / 8).next_multiple_of(LINE);
        let turn = if self.way.goes_on { number as usize % (LINES * LINE / words) } else { 0 };
        let first = direction * self.way.apart + turn * words;
        first..first + 1 + self.way.payload / 8
    }

    fn send(&self, direction: usize, number: u64) {
        let cells = &self.memory[self.place(direction, number)];
        // SAFETY: as many bytes as both have. The other side touches these cells only between the
        // number stored below and its answer, and this one only after the answer.
        unsafe { copy_message(self.private[0].as_ptr().cast(), payload(cells), self.way.payload) };
        // Release: the payload comes before. Its partner is the acquire load in `receive`.
        cells[0].store(number, Ordering::Release);
        if self.way.claims {
            // The other side finished with them a lap ago. Relaxed:
            // the next number's release store follows.
            let next = &self.memory[self.place(direction, number + 1)];
            next.iter().step_by(LINE).for_each(|word| word.store(0, Ordering::Relaxed));
        }
    }

    fn receive(&mut self, direction: usize, number: u64) {
        let cells = &self.memory[self.place(direction, number)];
        // Acquire: what was stored before `number` is seen.
        while cells[0].load(Ordering::Acquire) != number {
            (0..self.pauses).for_each(|_| spin_loop());
        }
        // SAFETY: as many bytes as both have.
        // The other side is done with these cells, and touches them again after our answer.
        unsafe { copy_message(payload(cells), self.private[1].as_mut_ptr().cast(), self.way.payload) };
        black_box(&self.private[1]);
    }
}

/// What follows the first word.
fn payload(cells: &[AtomicU64]) -> *mut u8 {
    cells[1..].as_ptr().cast_mut().cast()
}

fn main() {
    let (here, there) = chosen();
    for way in WAYS {
        let best = (0..4).map(|pauses| ping_pong(way, pauses, here, there)).min_by(f64::total_cmp);
        println!("{:<36} {:>8.1}", way.name, best.unwrap_or(f64::NAN));
    }
}

/// Half a round trip in nanoseconds.
fn ping_pong(way: Way, pauses: u32, here: usize, there: usize) -> f64 {
    let memory: Vec<AtomicU64> = (0..2 * LINE * LINES).map(|_| AtomicU64::new(0)).collect();
    let side = || Side { memory: &memory, way, pauses, private: [(); 2].map(|()| vec![1; way.payload / 8]) };
    let count = BATCHES * ROUNDS;
    thread::scope(|scope| {
        scope.spawn(|| {
            pin(there);
            let mut side = side();
            for number in 1..=count {
                side.receive(0, number);
                side.send(1, number);
            }
        });
        pin(here);
        let mut side = side();
        let mut batches: Vec<f64> = (0..BATCHES)
            .map(|batch| {
                let begun = Instant::now();
                for number in batch * ROUNDS + 1..=(batch + 1) * ROUNDS {
                    side.send(0, number);
                    side.receive(1, number);
                }
                begun.elapsed().as_nanos() as f64 / (2 * ROUNDS) as f64
            })
            .collect();
        batches.sort_by(f64::total_cmp);
        batches[batches.len() / 2]
    })
}
