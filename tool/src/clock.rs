//! A clock that is cheap to read.
//!
//! [`Clock::now`] is one `rdtsc` if the processor's counter runs at a constant rate, and
//! `clock_gettime` otherwise. Neither blocks nor allocates. The read is deliberately not ordered
//! with the memory accesses around it.

use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug)]
pub struct Clock {
    ns_per_tick: f64,
    /// The smallest increment of the counter, in ticks: 1 on most processors, some 10 ns on others.
    step: u64,
    tsc: bool,
}

/// The fallback without a usable counter: nanoseconds of the system's clock.
const SYSTEM: Clock = Clock { ns_per_tick: 1.0, step: 1, tsc: false };

impl Clock {
    /// Measures the length of a tick against the monotonic clock, for 25 ms.
    pub fn calibrate() -> Self {
        if !constant_tsc() {
            return SYSTEM;
        }
        let clock = Clock { tsc: true, ..SYSTEM };
        let (ticks, instant) = (clock.now(), Instant::now());
        std::thread::sleep(Duration::from_millis(25));
        let (ticks, elapsed) = (clock.now().wrapping_sub(ticks), instant.elapsed());
        if ticks == 0 {
            return SYSTEM;
        }
        Clock {
            ns_per_tick: elapsed.as_nanos() as f64 / ticks as f64,
            step: clock.find_step(),
            tsc: true,
        }
    }

    /// Finds the smallest increment of the counter: the greatest common divisor of many short
    /// durations.
    fn find_step(&self) -> u64 {
        let mut step = 0;
        let mut last = self.now();
        for _ in 0..10_000 {
            let now = self.now();
            let (mut a, mut b) = (step, now.wrapping_sub(last));
            while b != 0 {
                (a, b) = (b, a % b);
            }
            (step, last) = (a, now);
        }
        step.max(1)
    }

    pub fn step(&self) -> u64 {
        self.step
    }

    #[cfg(test)]
    pub fn stepping(step: u64) -> Self {
        Clock { step, ..SYSTEM }
    }

    /// Returns the counter, in ticks. Hot path.
    #[inline(always)]
    pub fn now(&self) -> u64 {
        #[cfg(target_arch = "x86_64")]
        if self.tsc {
            // SAFETY: every x86_64 processor has `rdtsc`. `tsc` is true only if the kernel shows
            // the flag `constant_tsc`. A kernel that forbids `rdtsc` to user code hides that flag.
            return unsafe { core::arch::x86_64::_rdtsc() };
        }
        monotonic_ns()
    }

    pub fn ns(&self, ticks: u64) -> f64 {
        ticks as f64 * self.ns_per_tick
    }

    pub fn describe(&self) -> String {
        if self.tsc {
            format!(
                "tsc {:.2} GHz in steps of {:.1} ns",
                1.0 / self.ns_per_tick,
                self.ns(self.step)
            )
        } else {
            "clock_gettime".into()
        }
    }
}

pub fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable for the result.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

pub fn processor_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable for the result. Every Linux has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns whether the time stamp counter runs at the same rate in every power state.
fn constant_tsc() -> bool {
    if !cfg!(target_arch = "x86_64") {
        return false;
    }
    let Ok(text) = std::fs::read_to_string("/proc/cpuinfo") else { return false };
    text.lines().find(|line| line.starts_with("flags")).is_some_and(|flags| {
        flags.split(' ').any(|f| f == "constant_tsc")
            && flags.split(' ').any(|f| f == "nonstop_tsc")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_agree_with_the_monotonic_clock() {
        let clock = Clock::calibrate();
        let (ticks, instant) = (clock.now(), Instant::now());
        std::thread::sleep(Duration::from_millis(30));
        let (ns, expected) = (clock.ns(clock.now() - ticks), instant.elapsed().as_nanos() as f64);
        assert!((ns / expected - 1.0).abs() < 0.05, "{ns} against {expected}");
    }
}
