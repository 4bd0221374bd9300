//! Detects whether a thread sleeps, in this process or another.

use std::time::{Duration, Instant};

/// Returns this thread's kernel id, by which other threads can look it up. The first thread of a
/// process has the id of the process.
pub fn this_thread() -> i32 {
    // SAFETY: the call takes no pointers and cannot fail.
    unsafe { libc::gettid() }
}

/// Waits until the thread sleeps. By then it has announced its sleep, so a notification must wake
/// it.
pub fn until_asleep(thread: i32) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let stat =
            std::fs::read_to_string(format!("/proc/{thread}/stat")).expect("the thread is there");
        // In `/proc/.../stat` the state follows the thread's name, which is in parentheses.
        if stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S')) {
            return;
        }
        assert!(Instant::now() < deadline, "thread {thread} does not fall asleep: {stat}");
        std::thread::yield_now();
    }
}
