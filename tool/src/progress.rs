//! Shows a progress bar on standard error, if that is a terminal and the run is long. The bar is
//! drawn only between measurements.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

const MANY: u64 = 8;

/// Hidden if the run needs no bar.
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// Shows the bar if standard error is a terminal, and there are many steps or the run is
    /// `long`.
    pub fn new(steps: u64, long: bool) -> Self {
        let shown = (steps >= MANY || long) && std::io::stderr().is_terminal();
        let target =
            if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(steps), target);
        if let Ok(style) = ProgressStyle::with_template("{msg:>16} [{wide_bar}] {pos}/{len}") {
            bar.set_style(style.progress_chars("=> "));
        }
        Progress { bar }
    }

    /// Shows the next step. Not called in timed code.
    pub fn begin(&self, what: String) {
        self.bar.set_message(what);
    }

    /// Counts a finished step. Not called in timed code.
    pub fn step(&self) {
        self.bar.inc(1);
        debug_assert!(Some(self.bar.position()) <= self.bar.length(), "more steps than announced");
    }

    /// Adds steps, because a row is measured again.
    pub fn extend(&self, steps: u64) {
        self.bar.inc_length(steps);
    }

    /// Hides the bar while `write` writes to the terminal.
    pub fn around<T>(&self, write: impl FnOnce() -> T) -> T {
        self.bar.suspend(write)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
