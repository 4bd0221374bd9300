//! The lower bound for a message between two processors. Measures two ping-pongs: one through two
//! rings of cells, one ring per direction, and one through a single cache line. The ping-pongs keep
//! no state, and check and match nothing. Payloads are copied as a lane copies them. The target
//! lines are still in the other side's cache, or the sender has claimed them after the previous
//! message.
//!
//! cargo run --release --example bare-lane [PROCESSOR PROCESSOR]
//!
//! Each figure is half a round trip in nanoseconds: the median of many short batches. Each variant
//! runs with 0 to 3 pauses between two polls, and the best result is printed.

use std::hint::{black_box, spin_loop};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use fishplate_benches::processors::{chosen, pin};
use fishplate_core::mem::copy_message;

/// Words per cache line.
const LINE: usize = 8;
/// Lines per ring: 64 KiB, at least twice the longest payload.
const LINES: usize = 1024;
const ROUNDS: u64 = 2_000;
const BATCHES: u64 = 25;

/// A variant of the ping-pong: the cells of the messages, and the length of their payload.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    /// Distance between the first words of the two directions, in words.
    apart: usize,
    /// True if each message uses the cells after the previous message, false if all messages use
    /// the same cells.
    goes_on: bool,
    payload: usize,
    /// True to store to the next message's lines after each message. The store removes the lines
    /// from the other side's cache.
    claims: bool,
}

/// A variant with two rings, one per direction.
const fn rings(name: &'static str, payload: usize, claims: bool) -> Way {
    Way { name, apart: LINE * LINES, goes_on: true, payload, claims }
}

const WAYS: [Way; 10] = [
    Way { name: "one line, both words in it", apart: 4, goes_on: false, payload: 0, claims: false },
    Way {
        name: "two lines, one each way",
        apart: LINE * LINES,
        goes_on: false,
        payload: 0,
        claims: false,
    },
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
    /// The bytes sent, and the bytes received.
    private: [Vec<u64>; 2],
}

impl Side<'_> {
    /// Returns the range of the words of message `number` in a direction. The receiver polls the
    /// first word.
    fn place(&self, direction: usize, number: u64) -> Range<usize> {
        let words = (1 + self.way.payload / 8).next_multiple_of(LINE);
        let turn = if self.way.goes_on { number as usize % (LINES * LINE / words) } else { 0 };
        let first = direction * self.way.apart + turn * words;
        first..first + 1 + self.way.payload / 8
    }

    fn send(&self, direction: usize, number: u64) {
        let cells = &self.memory[self.place(direction, number)];
        // SAFETY: both buffers have `payload` bytes. The other side accesses these cells only
        // between the store below and its answer, and this side only after the answer.
        unsafe { copy_message(self.private[0].as_ptr().cast(), payload(cells), self.way.payload) };
        // Release: publishes the payload. Pairs with the acquire load in `receive`.
        cells[0].store(number, Ordering::Release);
        if self.way.claims {
            // The other side finished with these lines one lap of the ring ago. Relaxed: the
            // release store of the next number follows.
            let next = &self.memory[self.place(direction, number + 1)];
            next.iter().step_by(LINE).for_each(|word| word.store(0, Ordering::Relaxed));
        }
    }

    fn receive(&mut self, direction: usize, number: u64) {
        let cells = &self.memory[self.place(direction, number)];
        // Acquire: makes the payload that was stored before `number` visible.
        while cells[0].load(Ordering::Acquire) != number {
            (0..self.pauses).for_each(|_| spin_loop());
        }
        // SAFETY: both buffers have `payload` bytes. The other side has finished with these cells,
        // and accesses them again only after our answer.
        unsafe {
            copy_message(payload(cells), self.private[1].as_mut_ptr().cast(), self.way.payload)
        };
        black_box(&self.private[1]);
    }
}

/// The cells after the first word.
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

/// Returns half a round trip, in nanoseconds.
fn ping_pong(way: Way, pauses: u32, here: usize, there: usize) -> f64 {
    let memory: Vec<AtomicU64> = (0..2 * LINE * LINES).map(|_| AtomicU64::new(0)).collect();
    let side = || Side {
        memory: &memory,
        way,
        pauses,
        private: [(); 2].map(|()| vec![1; way.payload / 8]),
    };
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
