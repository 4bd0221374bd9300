//! Addresses of sockets. Only [`connect_socket`] waits, until its deadline.

use std::ffi::OsStr;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr;
use std::time::{Duration, Instant};

use super::{Result, Socket, system};
use crate::error::HandshakeError;
use crate::segment::errno;

const RETRY: Duration = Duration::from_millis(1);

/// An address: a path, or an abstract name if it begins with `@`.
pub(crate) struct Address {
    raw: libc::sockaddr_un,
    len: libc::socklen_t,
    pub(crate) path: Option<PathBuf>,
}

impl Address {
    pub(crate) fn parse(text: &OsStr) -> Result<Self> {
        let bytes = text.as_bytes();
        // SAFETY: `sockaddr_un` consists of integers, so zero bytes are a valid value.
        let mut raw: libc::sockaddr_un = unsafe { mem::zeroed() };
        raw.sun_family = libc::AF_UNIX as libc::sa_family_t;
        let named = bytes.first() == Some(&b'@');
        // A path is terminated by a zero byte. An abstract name begins with a zero byte and is
        // terminated by the length of the address.
        if bytes.len() < 1 + usize::from(named)
            || bytes.len() >= raw.sun_path.len()
            || bytes.contains(&0)
        {
            return Err(HandshakeError::Address);
        }
        for (to, from) in raw.sun_path.iter_mut().zip(bytes) {
            *to = *from as libc::c_char;
        }
        if named {
            raw.sun_path[0] = 0;
        }
        let len = mem::offset_of!(libc::sockaddr_un, sun_path) + bytes.len() + usize::from(!named);
        let path = (!named).then(|| PathBuf::from(text));
        Ok(Address { raw, len: len as libc::socklen_t, path })
    }

    /// Connects without waiting. Fails with `EAGAIN` if the backlog is full.
    pub(crate) fn connect(&self) -> Result<Socket> {
        let fd = unconnected()?;
        loop {
            // SAFETY: `self` holds a socket address of `self.len` bytes.
            if unsafe { libc::connect(fd.as_raw_fd(), self.pointer(), self.len) } == 0 {
                return Ok(Socket::new(fd));
            }
            match errno() {
                libc::EINTR => {}
                code => return Err(HandshakeError::System(code)),
            }
        }
    }

    pub(crate) fn bind(&self, fd: BorrowedFd<'_>) -> Result<()> {
        // SAFETY: `self` holds a socket address of `self.len` bytes.
        if unsafe { libc::bind(fd.as_raw_fd(), self.pointer(), self.len) } == 0 {
            return Ok(());
        }
        Err(match errno() {
            libc::EADDRINUSE => HandshakeError::InUse,
            code => HandshakeError::System(code),
        })
    }

    fn pointer(&self) -> *const libc::sockaddr {
        ptr::from_ref(&self.raw).cast()
    }
}

/// Creates a socket for packets.
pub(crate) fn unconnected() -> Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the call takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return Err(system());
    }
    // SAFETY: `socket` returned this new descriptor, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Connects to an address. Retries until the deadline while there is no listener.
pub(crate) fn connect_socket(address: &OsStr, deadline: Instant) -> Result<Socket> {
    let address = Address::parse(address)?;
    loop {
        let code = match address.connect() {
            Err(HandshakeError::System(
                code @ (libc::EAGAIN | libc::ENOENT | libc::ECONNREFUSED),
            )) => code,
            connected => return connected,
        };
        if Instant::now() + RETRY >= deadline {
            // The backlog stayed full until the deadline, so the listener did not answer.
            let full = code == libc::EAGAIN;
            return Err(if full { HandshakeError::Deadline } else { HandshakeError::System(code) });
        }
        std::thread::sleep(RETRY);
    }
}
