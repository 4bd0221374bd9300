//! Measures how long a call takes, without the time that other threads take.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// Maximum duration of a call.
pub const LIMIT: Duration = Duration::from_millis(10);

/// Maximum number of attempts, and required number of attempts within the limit. The host of a
/// virtual machine may delay some attempts, and this kernel cannot detect that. A trick that works
/// delays most attempts.
const ATTEMPTS: usize = 8;
const GOOD: usize = 3;

/// The duration and the name of a call.
pub type Took = (Duration, &'static str);

/// Repeats an attempt until [`GOOD`] attempts are within the limit, at most [`ATTEMPTS`] times.
/// Sorts the attempts by their longest call, and returns the longest call of attempt `GOOD`. That
/// call exceeds the limit if fewer than `GOOD` attempts are within the limit.
pub fn repeat(mut attempt: impl FnMut() -> Took) -> Took {
    let mut all: Vec<Took> = vec![];
    while all.len() < ATTEMPTS && all.iter().filter(|(took, _)| *took <= LIMIT).count() < GOOD {
        all.push(attempt());
    }
    all.sort();
    all[GOOD - 1]
}

/// Measures calls of one thread: the elapsed time, minus the time that the thread was runnable but
/// not running. So the time of blocking and of working counts, and delay by other load does not.
pub struct Meter {
    /// The kernel's statistics of this thread, in nanoseconds: its run time, and its time waiting
    /// for a processor.
    schedule: Option<File>,
    pub longest: Took,
    /// The start of the lap, and the value of [`kept`](Self::kept) at that time.
    lap: (Instant, Duration),
}

impl Meter {
    pub fn new() -> Self {
        let schedule = File::open("/proc/thread-self/schedstat").ok();
        Meter { schedule, longest: Default::default(), lap: (Instant::now(), Duration::ZERO) }
    }

    /// Returns how long this thread has been runnable without running.
    fn kept(&self) -> Duration {
        let mut text = [0; 64];
        let read =
            self.schedule.as_ref().and_then(|file| file.read_at(&mut text, 0).ok()).unwrap_or(0);
        let text = std::str::from_utf8(&text[..read]).unwrap_or_default();
        Duration::from_nanos(text.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0))
    }

    pub fn call<T>(&mut self, what: &'static str, call: impl FnOnce() -> T) -> T {
        self.begin();
        let result = call();
        self.lap(what);
        result
    }

    pub fn begin(&mut self) {
        self.lap = (Instant::now(), self.kept());
    }

    /// Measures the time since the lap began, and begins the next lap.
    pub fn lap(&mut self, what: &'static str) {
        let (began, kept) = self.lap;
        let took = began.elapsed().saturating_sub(self.kept() - kept);
        self.longest = self.longest.max((took, what));
        self.begin();
    }
}
