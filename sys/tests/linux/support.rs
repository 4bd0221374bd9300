//! What the tests of this package share.

use std::{
    env,
    ptr::{self, NonNull},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// Rounds of a stress test: `FISHPLATE_STRESS`, or else the number given.
pub fn rounds(usual: u64) -> u64 {
    env::var("FISHPLATE_STRESS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(usual)
}

/// A seed that differs from run to run, printed so that `FISHPLATE_SEED` can bring it back.
pub fn seed(test: &str) -> u64 {
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64);
    let seed = env::var("FISHPLATE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(clock);
    eprintln!("{test}: FISHPLATE_SEED={seed}");
    seed
}

/// Numbers that look random (xorshift64*).
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

/// A memfd mapped into this process and into the children it makes from now on. Starts zeroed.
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

impl Mapping {
    pub fn new(len: usize) -> Self {
        // SAFETY: plain calls, whose results are checked; the mapping outlives the descriptor.
        unsafe {
            let fd = libc::memfd_create(c"fishplate-test".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0 && libc::ftruncate(fd, len as libc::off_t) == 0);
            let start =
                libc::mmap(ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd, 0);
            assert_ne!(start, libc::MAP_FAILED);
            libc::close(fd);
            Self { start: NonNull::new(start.cast()).unwrap(), len }
        }
    }

    /// The `T` at `offset`.
    pub fn at<T>(&self, offset: usize) -> NonNull<T> {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + size_of::<T>() <= self.len);
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.start.add(offset).cast() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nothing borrowed from it outlives it in these tests.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// A child process that runs `body` and says whether it returned true.
pub struct Child(libc::pid_t);

impl Child {
    /// Forks. `body` must not allocate, lock or panic:
    /// another thread may hold a lock at this moment.
    pub fn run(body: impl FnOnce() -> bool) -> Self {
        // SAFETY: the child calls `body`, which does only what a forked child may,
        // and leaves by `_exit`.
        match unsafe { libc::fork() } {
            // SAFETY: as above.
            0 => unsafe { libc::_exit(if body() { 0 } else { 1 }) },
            pid => {
                assert!(pid > 0);
                Self(pid)
            }
        }
    }

    /// Its process number.
    pub fn id(&self) -> libc::pid_t {
        self.0
    }

    /// Waits for the child, and kills it after a minute. Returns whether `body` returned true.
    pub fn succeeded(self) -> bool {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let mut status = 0;
            // SAFETY: our own child, which nobody else waits for.
            match unsafe { libc::waitpid(self.0, &mut status, libc::WNOHANG) } {
                0 if Instant::now() > until => {
                    // SAFETY: as above.
                    unsafe { libc::kill(self.0, libc::SIGKILL) };
                }
                0 => std::thread::sleep(Duration::from_millis(1)),
                _ => return libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
            }
        }
    }
}
