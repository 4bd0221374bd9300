//! The progress bar: on standard error, only if that is a terminal and there is much to do, and
//! only between measurements. It has no thread of its own and no timer.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Steps from which a bar is worth showing.
const MANY: u64 = 8;

/// A bar, or nothing.
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar of `steps`, if they are many or `long`.
    pub fn new(steps: u64, long: bool) -> Self {
        let bar = if (steps >= MANY || long) && std::io::stderr().is_terminal() {
            ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr())
        } else {
            ProgressBar::hidden()
        };
        if let Ok(style) = ProgressStyle::with_template("{msg:>16} [{wide_bar}] {pos}/{len}") {
            bar.set_style(style.progress_chars("=> "));
        }
        Progress { bar }
    }

    /// Says what comes next. Not while anything is timed.
    pub fn begin(&self, what: String) {
        self.bar.set_message(what);
    }

    /// One step is done. Not while anything is timed.
    pub fn step(&self) {
        self.bar.inc(1);
    }

    /// There are more steps.
    pub fn extend(&self, steps: u64) {
        self.bar.inc_length(steps);
    }

    /// Takes the bar away while `write` writes to the terminal.
    pub fn around<T>(&self, write: impl FnOnce() -> T) -> T {
        self.bar.suspend(write)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
