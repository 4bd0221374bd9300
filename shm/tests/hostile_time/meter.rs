//! Measures the duration of a call without the influence of other threads.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// Measures calls of one thread: the elapsed time, minus the time that the thread was runnable but
/// not running. So load does not count, but waiting and working do.
pub struct Meter {
    /// The kernel's statistics of this thread, in nanoseconds: its run time, and its time waiting
    /// for a processor.
    schedule: Option<File>,
    /// The duration and the name of the longest call so far.
    pub longest: (Duration, &'static str),
}

impl Meter {
    pub fn new() -> Self {
        Meter { schedule: File::open("/proc/thread-self/schedstat").ok(), longest: Default::default() }
    }

    /// Returns how long this thread has been runnable without running.
    fn kept(&self) -> Duration {
        let mut text = [0; 64];
        let read = self.schedule.as_ref().and_then(|file| file.read_at(&mut text, 0).ok()).unwrap_or(0);
        let text = std::str::from_utf8(&text[..read]).unwrap_or_default();
        Duration::from_nanos(text.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0))
    }

    /// Makes a call and measures it.
    pub fn call<T>(&mut self, what: &'static str, call: impl FnOnce() -> T) -> T {
        let (began, kept) = (Instant::now(), self.kept());
        let result = call();
        let took = began.elapsed().saturating_sub(self.kept() - kept);
        self.longest = self.longest.max((took, what));
        result
    }
}
