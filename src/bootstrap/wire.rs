//! Messages over a connected stream socket: a head of twelve bytes (`FPBS`, version, zero, length),
//! then the bytes.

use std::io::{self, ErrorKind};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use fishplate_core::bytes::{Put, Reader};

use super::{BootstrapError, MESSAGE_MAX, WIRE_VERSION};

const MAGIC: [u8; 4] = *b"FPBS";
const HEAD: usize = 12;

/// Between two looks at a connection on which nothing happens: first none, then this.
const NAP: Duration = Duration::from_micros(100);

/// Looks before the first nap.
const LOOKS: u32 = 200;

/// A connection that carries messages. Dropping it hangs up.
#[derive(Debug)]
pub struct Wire {
    socket: OwnedFd,
    /// What has come of the next message, and at most a little of those after it.
    inward: Vec<u8>,
    /// Our message, and how much of it was sent.
    outward: Vec<u8>,
    sent: usize,
    /// Longest message that is accepted.
    longest: usize,
}

impl Wire {
    /// Carries messages over a connected stream socket, such as one end of a socket pair that a
    /// process inherited.
    pub fn over(socket: OwnedFd) -> Wire {
        Wire { socket, inward: vec![], outward: vec![], sent: 0, longest: MESSAGE_MAX }
    }

    /// Accepts no message longer than `longest` bytes from now on.
    pub(super) fn accept_at_most(&mut self, longest: usize) {
        self.longest = longest.min(MESSAGE_MAX);
    }

    /// Sends a message and waits for one. Both sides do so at once. While nothing happens, `idle`
    /// is called; it says how much it found to do, and for nothing there are naps; with `None` it
    /// ends the wait. A message that came before the wait ended, or before the other side hung up,
    /// is returned all the same.
    ///
    /// # Errors
    /// [`BootstrapError::Deadline`], [`BootstrapError::HungUp`], [`BootstrapError::Stopped`], and
    /// what a message can be that is none. After an error the wire is of no more use.
    pub fn exchange(
        &mut self,
        ours: &[u8],
        deadline: Instant,
        mut idle: impl FnMut() -> Option<u32>,
    ) -> Result<Vec<u8>, BootstrapError> {
        self.say(ours)?;
        let mut looks = 0;
        loop {
            let moved = self.pump();
            if let Some(message) = self.hear()? {
                return Ok(message);
            }
            let moved = moved?;
            if Instant::now() >= deadline {
                return Err(BootstrapError::Deadline);
            }
            let found = if moved { Some(1) } else { idle() };
            match found {
                // The other side may have said its last word and left while `idle` found that it is
                // gone.
                None => {
                    let _ = self.pump();
                    return self.hear()?.ok_or(BootstrapError::Stopped);
                }
                Some(0) if looks < LOOKS => {
                    looks += 1;
                    thread::yield_now();
                }
                Some(0) => thread::sleep(NAP),
                Some(_) => looks = 0,
            }
        }
    }

    /// Where the other side is: HOST:PORT.
    pub fn peer(&self) -> String {
        let address = self.socket.try_clone().and_then(|socket| TcpStream::from(socket).peer_addr());
        address.map_or_else(|_| "an unknown address".into(), |address| address.to_string())
    }

    /// Whether the other side still has the connection open.
    /// Does not wait, and leaves the next message in place.
    pub fn is_open(&self) -> bool {
        is_open(self.socket.as_fd())
    }

    /// Tells whether the other side still has the connection open,
    /// also during an exchange of messages.
    ///
    /// # Errors
    /// The system's code.
    pub fn lifeline(&self) -> Result<Lifeline, BootstrapError> {
        self.socket.try_clone().map(Lifeline).map_err(code)
    }

    /// What is heard where this has come in: see `fuzzing`.
    pub(super) fn heard(socket: OwnedFd, inward: &[u8]) -> Result<Option<Vec<u8>>, BootstrapError> {
        let mut wire = Wire { inward: inward.to_vec(), ..Wire::over(socket) };
        wire.hear()
    }

    /// The socket to wait for.
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// What to wait for.
    pub(super) fn events(&self) -> i16 {
        libc::POLLIN | if self.sent < self.outward.len() { libc::POLLOUT } else { 0 }
    }

    /// Makes `message` the one that is sent. The one before it was.
    pub(super) fn say(&mut self, message: &[u8]) -> Result<(), BootstrapError> {
        if message.len() > MESSAGE_MAX {
            return Err(BootstrapError::TooLong { len: message.len() as u64, max: MESSAGE_MAX });
        }
        self.outward.clear();
        self.sent = 0;
        self.outward.put(&MAGIC).put_u16(WIRE_VERSION).put_u16(0);
        self.outward.put_u32(message.len() as u32).put(message);
        Ok(())
    }

    /// Sends what the socket has room for, and takes in what has come until that is a message.
    /// Whether anything moved.
    pub(super) fn pump(&mut self) -> Result<bool, BootstrapError> {
        let mut moved = false;
        while self.sent < self.outward.len() {
            let n = send(&self.socket, &self.outward[self.sent..])?;
            if n == 0 {
                break;
            }
            (self.sent, moved) = (self.sent + n, true);
        }
        let mut chunk = [0; 4096];
        while self.whole()?.is_none() {
            let n = recv(&self.socket, &mut chunk)?;
            if n == 0 {
                break;
            }
            self.inward.extend(&chunk[..n]);
            moved = true;
        }
        Ok(moved)
    }

    /// The next message, once it is whole and ours is sent.
    pub(super) fn hear(&mut self) -> Result<Option<Vec<u8>>, BootstrapError> {
        let Some(end) = self.whole()?.filter(|_| self.sent == self.outward.len()) else {
            return Ok(None);
        };
        let message = self.inward[HEAD..end].to_vec();
        self.inward.drain(..end);
        Ok(Some(message))
    }

    /// Where the first message ends, if it is whole. Its head is checked as soon as it is there.
    fn whole(&self) -> Result<Option<usize>, BootstrapError> {
        let known = self.inward.len().min(MAGIC.len());
        if self.inward[..known] != MAGIC[..known] {
            return Err(BootstrapError::Stranger);
        }
        let mut fields = Reader::new(&self.inward[known..]);
        let (Ok(theirs), Ok(_), Ok(len)) = (fields.u16(), fields.u16(), fields.u32()) else {
            return Ok(None);
        };
        if theirs != WIRE_VERSION {
            return Err(BootstrapError::Version { theirs, ours: WIRE_VERSION });
        }
        let len = len as usize;
        if len > self.longest {
            return Err(BootstrapError::TooLong { len: len as u64, max: self.longest });
        }
        Ok((self.inward.len() >= HEAD + len).then_some(HEAD + len))
    }
}

/// A look at a [`Wire`] from elsewhere, or at another stream whose end says that a process is gone.
#[derive(Debug)]
pub struct Lifeline(OwnedFd);

impl From<OwnedFd> for Lifeline {
    fn from(stream: OwnedFd) -> Self {
        Lifeline(stream)
    }
}

impl Lifeline {
    /// Whether the other side, so its process, still has the connection open,
    /// whatever it sent. One system call.
    pub fn holds(&self) -> bool {
        is_open(self.0.as_fd())
    }
}

fn is_open(socket: BorrowedFd<'_>) -> bool {
    let mut look = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one entry, ours, and no time to wait.
    let found = unsafe { libc::poll(&mut look, 1, 0) };
    found <= 0 || look.revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) == 0
}

/// Sends what there is room for: how many bytes.
fn send(socket: &OwnedFd, bytes: &[u8]) -> Result<usize, BootstrapError> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: as many bytes as said, which are ours.
    attempt(unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) })
}

/// Receives what has come: how many bytes.
fn recv(socket: &OwnedFd, into: &mut [u8]) -> Result<usize, BootstrapError> {
    // SAFETY: as many bytes as said, which are ours.
    attempt(unsafe {
        libc::recv(socket.as_raw_fd(), into.as_mut_ptr().cast(), into.len(), libc::MSG_DONTWAIT)
    })
}

/// Bytes moved; none if it would have to wait.
fn attempt(moved: isize) -> Result<usize, BootstrapError> {
    match moved {
        0 => Err(BootstrapError::HungUp),
        1.. => Ok(moved as usize),
        _ => {
            let error = io::Error::last_os_error();
            match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(0),
                ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => {
                    Err(BootstrapError::HungUp)
                }
                _ => Err(code(error)),
            }
        }
    }
}

pub(super) fn code(error: io::Error) -> BootstrapError {
    match error.raw_os_error() {
        Some(code) => BootstrapError::System(code),
        None => BootstrapError::Address,
    }
}
