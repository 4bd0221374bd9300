//! Measures the floor: half a round trip of two bare atomics between the two sides. No signal
//! through a cache line can be faster. Results therefore also give each latency as a multiple of
//! the floor.
//!
//! Both sides call this with the same [`Pad`] in shared memory. One side starts, and the other
//! answers. There are four ways to measure: both words in one cache line or in two, with and
//! without a pause between loads. [`Floor::apart_ns`] is the time of the fastest way with two
//! lines. It applies to sides that write to each other's memory.
//!
//! With two lines, each direction needs two transfers. With one line, the answer travels back with
//! the line itself. The time of each way is the median of many short batches, so an interrupt
//! spoils only one batch.
//!
//! Sides on the same processor have no floor: each side waits until the other is scheduled.
//! The measurement would take minutes, so it is abandoned.

use std::hint::spin_loop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::clock::Clock;
use super::failure::Outcome;

/// The memory of a [`Pad`] is aligned to 128.
pub const PAD_LEN: usize = 512;

/// A batch takes some 5 µs.
const ROUNDS: u64 = 64;
const BATCHES: usize = 64;
/// A callback that a waiting side calls regularly. An error ends the wait.
pub type Alive<'a> = &'a mut dyn FnMut() -> Outcome;

/// Number of loads between two calls of [`Alive`]. These calls also let the other side run if it
/// shares this processor. An answer from another processor takes far fewer loads.
const PATIENCE: u32 = 1 << 12;

/// Time limit for all batches, which take some milliseconds on two idle processors.
pub const AMPLE: Duration = Duration::from_secs(1);

/// The flag of the last number that a measuring side sends when it gives up. The answer to that
/// number has the flag too.
const STOP: u64 = 1 << 63;

/// Words in memory that both sides have mapped, zero at first.
#[derive(Clone, Copy, Debug)]
pub struct Pad {
    base: NonNull<AtomicU64>,
}

const WORDS: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Way {
    /// Offsets of the two words in the pad, in units of 8 bytes.
    words: [usize; 2],
    pause: bool,
}

/// Each way has its own pair of words, so that its counts do not disturb the next way.
const WAYS: [Way; 4] = [
    Way { words: [0, 1], pause: false },
    Way { words: [2, 3], pause: true },
    Way { words: [16, 32], pause: false },
    Way { words: [17, 33], pause: true },
];

impl Pad {
    /// Creates a view of shared memory.
    ///
    /// # Safety
    /// `base` is aligned to 128, and [`PAD_LEN`] bytes stay mapped as long as the pad is used. Both
    /// processes access those bytes only through pads.
    pub unsafe fn new(base: NonNull<u8>) -> Self {
        Pad { base: base.cast() }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < PAD_LEN / 8);
        // SAFETY: the constants above keep `index` inside the pad. `new` requires that the pad is
        // mapped and accessed only by pads, which use atomics.
        unsafe { self.base.add(index).as_ref() }
    }

    /// Runs the measuring side. Returns the floor, or `None` if the measurement takes longer than
    /// `limit`.
    pub fn measure(
        &self,
        limit: Duration,
        clock: &Clock,
        alive: Alive<'_>,
    ) -> Outcome<Option<Floor>> {
        let until = Instant::now() + limit;
        let mut best = Floor { ns: f64::INFINITY, apart_ns: f64::INFINITY };
        for way in WAYS {
            let mut batches = [0u64; BATCHES];
            for ticks in &mut batches {
                let start = clock.now();
                if !self.play(way, Some(until), alive)? {
                    return Ok(None);
                }
                *ticks = clock.now().wrapping_sub(start);
            }
            batches.sort_unstable();
            let ns = clock.ns(batches[BATCHES / 2]) / (2 * ROUNDS) as f64;
            best.ns = best.ns.min(ns);
            if way.words[0] / WORDS != way.words[1] / WORDS {
                best.apart_ns = best.apart_ns.min(ns);
            }
        }
        Ok(Some(best))
    }

    pub fn answer(&self, alive: Alive<'_>) -> Outcome {
        for way in WAYS {
            for _ in 0..BATCHES {
                if !self.play(way, None, alive)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Measures or answers one way. Returns whether to continue, which the starting side decides.
    fn play(&self, way: Way, starts: Option<Instant>, alive: Alive<'_>) -> Outcome<bool> {
        let [ping, pong] = way.words.map(|index| self.word(index));
        let (mine, theirs) = if starts.is_some() { (ping, pong) } else { (pong, ping) };
        if way.pause {
            bounce::<true>(mine, theirs, starts, alive)
        } else {
            bounce::<false>(mine, theirs, starts, alive)
        }
    }
}

/// Runs one batch of round trips. Returns `false` if the starting side gave up before the batch
/// ended. Both words are equal before and after.
#[inline(never)]
fn bounce<const PAUSE: bool>(
    mine: &AtomicU64,
    theirs: &AtomicU64,
    starts: Option<Instant>,
    alive: Alive<'_>,
) -> Outcome<bool> {
    // Relaxed throughout: only the words themselves are exchanged.
    let first = mine.load(Ordering::Relaxed) & !STOP;
    let mut number = first + 1;
    loop {
        if starts.is_some() {
            mine.store(number, Ordering::Relaxed);
        }
        let mut looks = 0u32;
        let mut late = false;
        while theirs.load(Ordering::Relaxed) != number {
            if PAUSE {
                spin_loop();
            }
            looks += 1;
            if looks == PATIENCE {
                looks = 0;
                alive()?;
                late = starts.is_some_and(|until| Instant::now() >= until);
                // Checks for `STOP` only here. A check at every load would slow the loads down.
                if starts.is_none() && theirs.load(Ordering::Relaxed) == number | STOP {
                    number |= STOP;
                }
            }
        }
        if starts.is_none() {
            mine.store(number, Ordering::Relaxed);
        }
        if number & STOP != 0 {
            return Ok(false);
        }
        if number == first + ROUNDS {
            return Ok(true);
        }
        number = (number + 1) | if late { STOP } else { 0 };
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Floor {
    /// The floor of the fastest way.
    pub ns: f64,
    /// The floor with a separate cache line for each direction.
    pub apart_ns: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Floors {
    pub taken: [Floor; 3],
}

impl Floors {
    /// Maximum ratio of the largest to the smallest floor of a stable row.
    const STEADY: f64 = 1.2;

    pub fn median(&self) -> Floor {
        let middle = |pick: fn(&Floor) -> f64| {
            let mut sorted = self.taken.each_ref().map(pick);
            sorted.sort_by(f64::total_cmp);
            sorted[1]
        };
        Floor { ns: middle(|floor| floor.ns), apart_ns: middle(|floor| floor.apart_ns) }
    }

    pub fn steady(&self) -> bool {
        let taken = self.taken.map(|floor| floor.ns);
        let least = taken.into_iter().fold(f64::INFINITY, f64::min);
        let most = taken.into_iter().fold(0.0, f64::max);
        most <= least * Self::STEADY
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Failure;
    use std::sync::atomic::AtomicBool;

    fn yields() -> Outcome {
        std::thread::yield_now();
        Ok(())
    }

    #[repr(align(128))]
    struct Memory([AtomicU64; PAD_LEN / 8]);

    #[test]
    fn two_threads_find_a_floor_and_may_find_it_again() {
        let memory = Memory([const { AtomicU64::new(0) }; PAD_LEN / 8]);
        let address = memory.0.as_ptr().addr();
        let pad = || {
            // SAFETY: `memory` has the size and alignment of a pad, and outlives the scope that
            // uses both pads.
            unsafe {
                Pad::new(
                    NonNull::new(memory.0.as_ptr().with_addr(address).cast_mut().cast()).unwrap(),
                )
            }
        };
        std::thread::scope(|scope| {
            let memory = &memory;
            scope.spawn(move || {
                // SAFETY: `memory` has the size and alignment of a pad, and outlives the scope that
                // uses both pads.
                let pad = unsafe { Pad::new(NonNull::from(memory).cast()) };
                for _ in 0..2 {
                    pad.answer(&mut yields).unwrap();
                }
            });
            let clock = Clock::calibrate();
            for _ in 0..2 {
                let floor =
                    pad().measure(3600 * AMPLE, &clock, &mut yields).unwrap().expect("a floor");
                assert!(
                    floor.ns > 1.0 && floor.ns <= floor.apart_ns && floor.apart_ns.is_finite(),
                    "{floor:?}"
                );
            }
        });
    }

    #[test]
    fn what_takes_too_long_is_given_up_on_both_sides_and_may_be_tried_again() {
        let memory = Memory([const { AtomicU64::new(0) }; PAD_LEN / 8]);
        let waited = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (memory, waited) = (&memory, &waited);
            let pad = move || {
                // SAFETY: `memory` has the size and alignment of a pad, and outlives the scope that
                // uses both pads.
                unsafe { Pad::new(NonNull::from(memory).cast()) }
            };
            scope.spawn(move || {
                // Answers only after the other side has waited longer than its limit.
                while !waited.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                pad().answer(&mut yields).unwrap();
                pad().answer(&mut yields).unwrap();
            });
            let clock = Clock::calibrate();
            let mut wait = || {
                waited.store(true, Ordering::Relaxed);
                yields()
            };
            let given_up = pad().measure(Duration::ZERO, &clock, &mut wait);
            // Measures before asserting, so that a failure does not leave the other side waiting.
            let again = pad().measure(3600 * AMPLE, &clock, &mut yields);
            assert_eq!(given_up, Ok(None));
            assert!(again.unwrap().is_some());
        });
    }

    #[test]
    fn nobody_there_ends_when_told_so() {
        let memory = Memory([const { AtomicU64::new(0) }; PAD_LEN / 8]);
        // SAFETY: `memory` has the size and alignment of a pad, and outlives the pad.
        let pad = unsafe { Pad::new(NonNull::from(&memory).cast()) };
        let mut gone = || Err(Failure::run("gone"));
        assert_eq!(pad.measure(AMPLE, &Clock::calibrate(), &mut gone), Err(Failure::run("gone")));
    }

    #[test]
    fn floors_are_steady_within_a_fifth() {
        let floors =
            |taken: [f64; 3]| Floors { taken: taken.map(|ns| Floor { ns, apart_ns: 100.0 - ns }) };
        assert!(floors([33.0, 36.0, 39.0]).steady());
        assert!(!floors([33.0, 36.0, 40.0]).steady());
        assert_eq!(floors([40.0, 33.0, 36.0]).median(), Floor { ns: 36.0, apart_ns: 64.0 });
    }
}
