//! Whether a thread sleeps, in this process or another.

use std::time::{Duration, Instant};

/// The number by which others can ask for this thread. That of a process is its first thread's.
pub fn this_thread() -> i32 {
    // SAFETY: a call without arguments.
    unsafe { libc::gettid() }
}

/// Returns when a thread sleeps: it has announced that, and a wake-up call must reach it.
pub fn until_asleep(thread: i32) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).expect("the thread is there");
        // The state is behind the name, which is in parentheses.
        if stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S')) {
            return;
        }
        assert!(Instant::now() < deadline, "thread {thread} does not fall asleep: {stat}");
        std::thread::yield_now();
    }
}
