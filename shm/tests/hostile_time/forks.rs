//! Hostile processes, one after the other. A helper process forks each of them, because starting a
//! program takes longer than most tricks.

use std::io::{ErrorKind, Read, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fishplate_shm::socket_pair;

/// Maximum size of an order or of a message.
const LONGEST: usize = 4096;

/// The message that the helper sends between the messages of two forked processes.
const NEXT: &[u8] = b".";

/// The role of the helper process that forks the others.
pub const ROLE: &str = "forks";

/// The helper process that forks the others. Dropping this kills all of them.
pub struct Forks {
    child: Child,
    /// A socket that keeps the boundaries of messages.
    line: UnixStream,
}

impl Forks {
    /// Starts this test binary again as the helper. Its test `child` calls [`serve`].
    pub fn begin() -> Self {
        let (ours, theirs) = socket_pair().unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env("FISHPLATE_ROLE", ROLE)
            .env("FISHPLATE_ADDRESS", "")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Forks { child, line: UnixStream::from(ours) }
    }

    /// Kills the current forked process, and forks a new one that runs `play` with this order.
    pub fn fork(&mut self, order: &[u8]) {
        self.line.set_nonblocking(true).unwrap();
        // Reads pending messages, because the forked process may fill the socket.
        let end = Instant::now() + Duration::from_secs(20);
        while self.line.write(order).is_err() {
            self.heard();
            assert!(Instant::now() < end, "the forks do not read");
        }
        while self.heard().as_deref() != Some(NEXT) {
            assert!(Instant::now() < end, "nothing was forked");
            std::thread::yield_now();
        }
    }

    /// Returns the next message of the forked process, if one has arrived.
    pub fn heard(&mut self) -> Option<Vec<u8>> {
        let mut message = vec![0; LONGEST];
        match self.line.read(&mut message) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
            Err(error) => panic!("{error}"),
            Ok(0) => panic!("the forks have ended"),
            Ok(len) => message.truncate(len),
        }
        Some(message)
    }
}

impl Drop for Forks {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn line() -> ManuallyDrop<UnixStream> {
    // SAFETY: `begin` gave this process the socket as descriptor 0. The value does not close it.
    ManuallyDrop::new(unsafe { UnixStream::from_raw_fd(0) })
}

/// Forks a process for each order of the test, until the test ends. The forked process runs `play`,
/// then waits until it is killed.
pub fn serve(play: impl Fn(&[u8])) {
    let (mut line, mut order, mut forked) = (line(), vec![0; LONGEST], 0);
    while let Ok(len @ 1..) = line.read(&mut order) {
        if forked != 0 {
            // SAFETY: the calls take only numbers and a null pointer. The process is our child and
            // has not been waited for, so its number is not reused.
            unsafe {
                libc::kill(forked, libc::SIGKILL);
                libc::waitpid(forked, std::ptr::null_mut(), 0);
            }
        }
        line.write_all(NEXT).unwrap();
        // SAFETY: this process has one thread, because `begin` sets `--test-threads=1`.
        forked = unsafe { libc::fork() };
        if forked != 0 {
            continue;
        }
        // SAFETY: the call takes only numbers.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        if catch_unwind(AssertUnwindSafe(|| play(&order[..len]))).is_ok() {
            until_the_end();
        }
        // SAFETY: the call ends the process.
        unsafe { libc::_exit(1) };
    }
}

/// Sends a message to the test.
pub fn tell(message: &[u8]) {
    let _ = line().write(message);
}

/// Waits until the test closes the socket.
pub fn until_the_end() {
    let mut end = libc::pollfd { fd: line().as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: `end` is one entry, and the count is 1.
    while unsafe { libc::poll(&mut end, 1, -1) } < 1 {}
}
