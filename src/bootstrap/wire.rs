//! Sends and receives messages over a connected stream socket. A message has a header of twelve
//! bytes (`FPBS`, version, zero, length), then the payload.

use std::io::{self, ErrorKind};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use fishplate_core::bytes::{Put, Reader};

use super::{BootstrapError, MESSAGE_MAX, WIRE_VERSION};

const MAGIC: [u8; 4] = *b"FPBS";
const HEAD: usize = 12;

const NAP: Duration = Duration::from_micros(100);

const LOOKS: u32 = 200;

/// Maximum number of receiving calls in a row. A peer may send a message byte by byte.
const RECEIVES: usize = 32;

/// A connection that carries messages. Dropping it closes the connection.
#[derive(Debug)]
pub struct Wire {
    socket: OwnedFd,
    /// Received bytes: the next message, and possibly the start of later messages.
    inward: Vec<u8>,
    outward: Vec<u8>,
    sent: usize,
    longest: usize,
}

impl Wire {
    /// Wraps a connected stream socket, such as an inherited end of a socket pair.
    pub fn over(socket: OwnedFd) -> Wire {
        Wire { socket, inward: vec![], outward: vec![], sent: 0, longest: MESSAGE_MAX }
    }

    pub(super) fn accept_at_most(&mut self, longest: usize) {
        self.longest = longest.min(MESSAGE_MAX);
    }

    /// Sends a message and waits for the peer's message. The peer must make the same call.
    ///
    /// Until the peer's message arrives, calls `idle`, which returns the number of events that it
    /// handled. Pauses between these calls after many of them without events. Stops waiting if
    /// `idle` returns `None`. If a message arrived before that, or before the peer closed the
    /// connection, it is still returned.
    ///
    /// # Errors
    /// [`BootstrapError::Deadline`], [`BootstrapError::HungUp`] or [`BootstrapError::Stopped`], or
    /// an error that describes a malformed message of the peer. After an error the wire cannot be
    /// used.
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
            // Also runs while bytes arrive, because a peer may send a message byte by byte.
            let found = idle().map(|found| found.saturating_add(moved.into()));
            match found {
                // The peer may have sent its last message just before `idle` stopped the wait.
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

    /// Returns the peer's HOST:PORT. If the socket is local to this host, returns the name of the
    /// process that created the other end.
    pub fn peer(&self) -> String {
        let address =
            self.socket.try_clone().and_then(|socket| TcpStream::from(socket).peer_addr());
        match (address, self.pid()) {
            (Ok(address), _) => address.to_string(),
            (_, Some(pid)) => format!("pid {pid}"),
            _ => "an unknown address".into(),
        }
    }

    /// Returns the id of the process that created the other end, if the socket is local to this
    /// host.
    pub fn pid(&self) -> Option<u32> {
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of_val(&peer) as libc::socklen_t;
        let (fd, level, name) = (self.socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED);
        // SAFETY: the call writes at most `len` bytes, which `peer` has.
        let got = unsafe { libc::getsockopt(fd, level, name, (&raw mut peer).cast(), &mut len) };
        u32::try_from(peer.pid).ok().filter(|&pid| got == 0 && pid != 0)
    }

    /// Returns whether the peer still has the connection open. Does not wait or consume a message.
    pub fn is_open(&self) -> bool {
        is_open(self.socket.as_fd())
    }

    /// Returns a second handle that reports whether the peer still has the connection open.
    ///
    /// # Errors
    /// [`BootstrapError::System`].
    pub fn lifeline(&self) -> Result<Lifeline, BootstrapError> {
        self.socket.try_clone().map(Lifeline).map_err(code)
    }

    pub(super) fn heard(socket: OwnedFd, inward: &[u8]) -> Result<Option<Vec<u8>>, BootstrapError> {
        let mut wire = Wire { inward: inward.to_vec(), ..Wire::over(socket) };
        wire.hear()
    }

    pub(super) fn events(&self) -> i16 {
        libc::POLLIN | if self.sent < self.outward.len() { libc::POLLOUT } else { 0 }
    }

    /// Queues a message. The previous message must have been sent.
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

    /// Receives until a message is complete, in at most [`RECEIVES`] calls. Returns whether any
    /// byte was sent or received.
    pub(super) fn pump(&mut self) -> Result<bool, BootstrapError> {
        let sent = self.push();
        let mut moved = false;
        let mut chunk = [0; 4096];
        for _ in 0..RECEIVES {
            if self.whole()?.is_some() {
                break;
            }
            let n = recv(&self.socket, &mut chunk)?;
            if n == 0 {
                break;
            }
            self.inward.extend(&chunk[..n]);
            moved = true;
        }
        Ok(sent? || moved)
    }

    /// Sends as much as the socket accepts. Returns whether any byte was sent. If the peer has
    /// closed the connection, sends nothing. The peer's last message still counts as its answer.
    fn push(&mut self) -> Result<bool, BootstrapError> {
        let mut moved = false;
        while self.sent < self.outward.len() {
            let n = match send(&self.socket, &self.outward[self.sent..]) {
                Ok(n) => n,
                Err(error) => {
                    self.sent = self.outward.len();
                    return Err(error);
                }
            };
            if n == 0 {
                break;
            }
            (self.sent, moved) = (self.sent + n, true);
        }
        Ok(moved)
    }

    pub(super) fn hear(&mut self) -> Result<Option<Vec<u8>>, BootstrapError> {
        let Some(end) = self.whole()?.filter(|_| self.sent == self.outward.len()) else {
            return Ok(None);
        };
        let message = self.inward[HEAD..end].to_vec();
        self.inward.drain(..end);
        Ok(Some(message))
    }

    /// Returns the end of the first message, or `None` if the message is incomplete. Checks the
    /// header as soon as the header has arrived.
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

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Watches a [`Wire`], or another stream socket that closes when the peer's process ends.
#[derive(Debug)]
pub struct Lifeline(OwnedFd);

impl From<OwnedFd> for Lifeline {
    fn from(stream: OwnedFd) -> Self {
        Lifeline(stream)
    }
}

impl Lifeline {
    /// Returns whether the peer still has the connection open. Makes one system call, and does not
    /// wait.
    pub fn holds(&self) -> bool {
        is_open(self.0.as_fd())
    }
}

fn is_open(socket: BorrowedFd<'_>) -> bool {
    let mut look = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: `look` is one entry, and the count is 1.
    let found = unsafe { libc::poll(&mut look, 1, 0) };
    found <= 0 || look.revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) == 0
}

fn send(socket: &OwnedFd, bytes: &[u8]) -> Result<usize, BootstrapError> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `bytes` is readable for its length.
    attempt(unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) })
}

fn recv(socket: &OwnedFd, into: &mut [u8]) -> Result<usize, BootstrapError> {
    // SAFETY: `into` is writable for its length.
    attempt(unsafe {
        libc::recv(socket.as_raw_fd(), into.as_mut_ptr().cast(), into.len(), libc::MSG_DONTWAIT)
    })
}

/// Converts a system call's result. Returns 0 if the call would block.
fn attempt(moved: isize) -> Result<usize, BootstrapError> {
    match moved {
        0 => Err(BootstrapError::HungUp),
        1.. => Ok(moved as usize),
        _ => {
            let error = io::Error::last_os_error();
            match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(0),
                ErrorKind::ConnectionReset
                | ErrorKind::BrokenPipe
                | ErrorKind::ConnectionAborted => Err(BootstrapError::HungUp),
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
