//! Handles Ctrl-C and SIGTERM. The first signal ends the run with a message and exit status 130. A
//! signal more than 200 ms later ends the process at once. One within that time has no effect,
//! because `timeout` sends each signal twice.
//!
//! The loops of tests check for a signal at least ten times a second, and so does a side that waits
//! for the other side. Setup checks only after each step. `perf pool` and `perf match` have nothing
//! to clean up, so the first signal ends their process at once.

use std::sync::atomic::{AtomicU64, Ordering};

use std::thread;
use std::time::{Duration, Instant};

use super::failure::{Failure, Outcome};

/// Time after the first signal in which others have no effect.
const TWICE: Duration = Duration::from_millis(200);

/// When the first signal arrived, in monotonic nanoseconds. 0 before.
static INTERRUPTED: AtomicU64 = AtomicU64::new(0);

extern "C" fn note(_: libc::c_int) {
    // SAFETY: `timespec` is plain data, and zeros are valid for it. A signal handler may call
    // `clock_gettime` and `_exit`.
    unsafe {
        let mut now: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now);
        let now = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        // Relaxed: the time publishes no other data.
        let first = INTERRUPTED.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        if first.is_err_and(|first| now.saturating_sub(first) > TWICE.as_nanos() as u64) {
            libc::_exit(130)
        }
    }
}

extern "C" fn end(_: libc::c_int) {
    const MESSAGE: &[u8] = b"fishplate: interrupted\n";
    // SAFETY: the message is readable, and a signal handler may call both functions.
    unsafe {
        libc::write(libc::STDERR_FILENO, MESSAGE.as_ptr().cast(), MESSAGE.len());
        libc::_exit(130)
    }
}

/// Installs handlers that note a signal, for [`check`].
pub fn watch() {
    install(note);
}

pub fn end_at_once() {
    install(end);
}

fn install(handler: extern "C" fn(libc::c_int)) {
    // SAFETY: `sigaction` is plain data, and zeros are valid for it. The handlers change an atomic
    // or write, read the clock and exit. A signal handler may do that.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        for signal in [libc::SIGINT, libc::SIGTERM] {
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// Sleeps for `time`. Fails within 50 ms if the run is interrupted.
pub fn sleep(time: Duration) -> Outcome {
    let begun = Instant::now();
    while let Some(left) = time.checked_sub(begun.elapsed()).filter(|left| !left.is_zero()) {
        thread::sleep(left.min(Duration::from_millis(50)));
        check()?;
    }
    Ok(())
}

/// Ignores Ctrl-C in a process that the tool has started. The parent process handles Ctrl-C and
/// ends both processes.
pub fn leave_to_parent() {
    // SAFETY: ignoring a signal installs no handler.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_IGN) };
}

pub fn check() -> Outcome {
    // Relaxed: the time publishes no other data.
    match INTERRUPTED.load(Ordering::Relaxed) {
        0 => Ok(()),
        _ => Err(Failure::Interrupted("interrupted".into())),
    }
}
