//! Helpers for these tests.

use std::{
    env,
    ptr::{self, NonNull},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Returns the number of rounds of a stress test, from `FISHPLATE_STRESS` or `usual`.
pub fn rounds(usual: u64) -> u64 {
    env::var("FISHPLATE_STRESS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(usual)
}

/// Prints and returns a seed that differs from run to run. `FISHPLATE_SEED` repeats a run.
pub fn seed(test: &str) -> u64 {
    let clock =
        || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64);
    let seed =
        env::var("FISHPLATE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(clock);
    eprintln!("{test}: FISHPLATE_SEED={seed}");
    seed
}

/// A pseudo-random generator (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % bound
    }
}

/// A memfd mapped into this process and into children forked later. The memory starts zeroed.
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

impl Mapping {
    pub fn new(len: usize) -> Self {
        // SAFETY: each result is checked, and the mapping stays after the descriptor is closed.
        unsafe {
            let fd = libc::memfd_create(c"fishplate-test".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0 && libc::ftruncate(fd, len as libc::off_t) == 0);
            let start = libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd,
                0,
            );
            assert_ne!(start, libc::MAP_FAILED);
            libc::close(fd);
            Self { start: NonNull::new(start.cast()).unwrap(), len }
        }
    }

    /// Returns a pointer to the `T` at `offset`.
    pub fn at<T>(&self, offset: usize) -> NonNull<T> {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + size_of::<T>() <= self.len);
        // SAFETY: the assertion above keeps the `T` inside the mapping.
        unsafe { self.start.add(offset).cast() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` mapped this memory, and these tests keep no reference beyond the mapping.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// A forked child that runs `body` and exits with its result.
pub struct Child(libc::pid_t);

impl Child {
    /// Forks. `body` must not allocate, lock or panic, because another thread may hold a lock
    /// during the fork.
    pub fn run(body: impl FnOnce() -> bool) -> Self {
        // SAFETY: the child calls only `_exit` and `body`, which does nothing that a forked child
        // may not do.
        match unsafe { libc::fork() } {
            // SAFETY: `_exit` runs no handlers of the parent.
            0 => unsafe { libc::_exit(if body() { 0 } else { 1 }) },
            pid => {
                assert!(pid > 0);
                Self(pid)
            }
        }
    }

    pub fn id(&self) -> libc::pid_t {
        self.0
    }

    /// Waits for the child, and kills it after a minute. Returns whether `body` returned true.
    pub fn succeeded(self) -> bool {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let mut status = 0;
            // SAFETY: the process is our own child, and nothing else waits for it.
            match unsafe { libc::waitpid(self.0, &mut status, libc::WNOHANG) } {
                0 if Instant::now() > until => {
                    // SAFETY: the child has not been reaped, so its id is not reused.
                    unsafe { libc::kill(self.0, libc::SIGKILL) };
                }
                0 => std::thread::sleep(Duration::from_millis(1)),
                _ => return libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
            }
        }
    }
}
