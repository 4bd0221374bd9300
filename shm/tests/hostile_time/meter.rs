//! How long a call takes that nobody else holds up.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// Measures calls of one thread: the time that passes, less what the thread spends ready to run
/// while others do. So a busy machine does not count, and both waiting and working do.
pub struct Meter {
    /// Says of this thread, in nanoseconds: how long it ran, and how long it was kept from it.
    schedule: Option<File>,
    /// The longest call so far, and what it was.
    pub longest: (Duration, &'static str),
}

impl Meter {
    pub fn new() -> Self {
        Meter { schedule: File::open("/proc/thread-self/schedstat").ok(), longest: Default::default() }
    }

    /// How long this thread was ready and did not run, up to now.
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
