//! The lower bound for a stream of messages, one cache line each, from one processor to another
//! through a ring. Between two messages the sender stores to some private lines. There are three
//! variants. The first is plain. The second prefetches each line for writing, eight messages ahead.
//! The third stores to each of the next eight lines after every eighth message, as a lane of the
//! shared-memory rail does.
//!
//! cargo run --release --example bare-stream [PROCESSOR PROCESSOR]
//!
//! Each figure is nanoseconds per message: the median of several runs, which alternate between the
//! variants.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use fishplate_benches::processors::{chosen, pin};

/// Words per cache line.
const LINE: usize = 8;
/// Number of lines in the ring, and maximum number of unread messages.
const LINES: u64 = 1024;
const MOST: u64 = LINES - 2 * AHEAD;
/// How many messages ahead the sender prefetches or claims lines.
const AHEAD: u64 = 8;
const MESSAGES: u64 = 500_000;
const RUNS: usize = 7;

/// How the sender takes ownership of its lines.
#[derive(Clone, Copy)]
enum Way {
    Plain,
    Prefetched,
    Claimed,
}

const WAYS: [(Way, &str); 3] =
    [(Way::Plain, "plain"), (Way::Prefetched, "prefetched"), (Way::Claimed, "claimed")];
/// Number of stores to private memory between two messages, eight per line.
const ELSEWHERE: [usize; 3] = [0, 16, 40];

#[repr(align(128))]
struct Cursor(AtomicU64);

struct Ring {
    words: Vec<AtomicU64>,
    freed: Cursor,
}

impl Ring {
    /// Returns the line of a message. `send` stores the message's number plus one in its first
    /// word.
    fn line(&self, message: u64) -> &[AtomicU64] {
        let first = (message % LINES) as usize * LINE;
        &self.words[first..first + LINE]
    }

    fn send(&self, way: Way, private: &[AtomicU64]) {
        let mut freed = 0;
        for message in 0..MESSAGES {
            while message - freed >= MOST {
                // Acquire: the receiver has finished with the lines to be overwritten. Pairs with
                // the release store in `receive`.
                freed = self.freed.0.load(Ordering::Acquire);
            }
            for word in private {
                word.store(message, Ordering::Relaxed);
            }
            let line = self.line(message);
            line[1].store(message, Ordering::Relaxed);
            // Release: publishes the payload. Pairs with the acquire load in `receive`.
            line[0].store(message + 1, Ordering::Release);
            match way {
                Way::Plain => {}
                Way::Prefetched => prefetch_write(self.line(message + AHEAD)),
                Way::Claimed if message % AHEAD == 0 => {
                    for ahead in 1..=AHEAD {
                        self.line(message + ahead)[0].store(0, Ordering::Relaxed);
                    }
                }
                Way::Claimed => {}
            }
        }
    }

    fn receive(&self) {
        for message in 0..MESSAGES {
            let line = self.line(message);
            while line[0].load(Ordering::Acquire) != message + 1 {
                (0..4).for_each(|_| spin_loop());
            }
            assert_eq!(line[1].load(Ordering::Relaxed), message);
            if message % (LINES / 4) == 0 {
                self.freed.0.store(message, Ordering::Release);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn prefetch_write(line: &[AtomicU64]) {
    // SAFETY: a prefetch cannot fault, whatever the address.
    unsafe {
        std::arch::asm!(
            "prefetchw [{}]",
            in(reg) line.as_ptr(),
            options(nostack, preserves_flags, readonly)
        );
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn prefetch_write(_line: &[AtomicU64]) {}

fn main() {
    let (here, there) = chosen();
    println!("stores elsewhere {}", WAYS.map(|(_, name)| format!("{name:>12}")).concat());
    for stores in ELSEWHERE {
        let mut runs = [const { Vec::new() }; WAYS.len()];
        for _ in 0..RUNS {
            for (run, (way, _)) in runs.iter_mut().zip(WAYS) {
                run.push(stream(way, stores, here, there));
            }
        }
        let medians = runs.map(|mut run| {
            run.sort_by(f64::total_cmp);
            format!("{:>12.1}", run[RUNS / 2])
        });
        println!("{stores:>16} {}", medians.concat());
    }
}

/// Returns nanoseconds per message.
fn stream(way: Way, stores: usize, here: usize, there: usize) -> f64 {
    let words = (0..LINES as usize * LINE).map(|_| AtomicU64::new(0)).collect();
    let ring = Ring { words, freed: Cursor(AtomicU64::new(0)) };
    let private: Vec<AtomicU64> = (0..stores).map(|_| AtomicU64::new(0)).collect();
    thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            pin(there);
            ring.receive();
        });
        pin(here);
        let begun = Instant::now();
        ring.send(way, &private);
        receiver.join().expect("the receiver sees every message");
        begun.elapsed().as_nanos() as f64 / MESSAGES as f64
    })
}
