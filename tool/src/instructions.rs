//! Counts the instructions that this thread executes in user space, through the kernel
//! (`perf_event_open(2)`).

use perf_event::events::Hardware;
use perf_event::{Builder, Counter};

/// `None` without a counter: most virtual machines have no hardware counters, and
/// `kernel.perf_event_paranoid` may forbid them.
pub struct Instructions(Option<Counter>);

impl Instructions {
    pub fn start() -> Self {
        let counter = Builder::new(Hardware::INSTRUCTIONS).build();
        Instructions(
            counter.ok().and_then(|mut counter| counter.enable().is_ok().then_some(counter)),
        )
    }

    /// Returns the number of instructions since the start, or `None` without a counter. Makes a
    /// system call.
    pub fn read(&mut self) -> Option<u64> {
        self.0.as_mut()?.read().ok()
    }
}
