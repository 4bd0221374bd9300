//! Asks an endpoint for the address of its node, given only its epid. Never waits: each step does
//! only the work that is possible at once.
//!
//! An epid encodes the place where the endpoint answers:
//!
//! | bits | what |
//! |---|---|
//! | 32..64 | the IPv4 address of its host; 0 if it answers only on its own host |
//! | 16..32 | the TCP port |
//! | 0..32 without an address, 0..16 with one | random |
//!
//! For peers on its own host, an endpoint also listens on an abstract AF_UNIX socket.

use std::io::{self, ErrorKind, Read};
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::frame::{Frame, LEN};

const REDIAL: Duration = Duration::from_millis(10);

/// A host that drops packets never refuses a connection.
const ATTEMPT: Duration = Duration::from_secs(2);

pub(crate) fn name(epid: u64) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("fishplate-psm2-{}-{epid:016x}", user()))
}

/// Returns the effective user. Only processes of this user are trusted.
fn user() -> u32 {
    // SAFETY: the call takes no arguments and always succeeds.
    unsafe { libc::geteuid() }
}

pub(crate) fn is_own(stream: &UnixStream) -> bool {
    let mut cred = libc::ucred { pid: 0, uid: u32::MAX, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `cred` and `len` are local variables that outlive the call; `len` is the size of
    // `cred`.
    let got = unsafe {
        let cred = (&raw mut cred).cast();
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            cred,
            &raw mut len,
        )
    };
    got == 0 && cred.uid == user()
}

pub(crate) struct Dial {
    epid: u64,
    uuid: [u8; 16],
    question: Box<[u8; LEN]>,
    /// A Unix or TCP socket. Sends and receives work the same on both.
    stream: Option<UnixStream>,
    sent: usize,
    answer: Box<[u8; LEN]>,
    got: usize,
    again: Instant,
    until: Instant,
    tcp: bool,
}

impl Dial {
    /// Starts to ask the endpoint `epid` for its address. `own` describes the asking endpoint.
    pub fn new(epid: u64, own: &Frame) -> Dial {
        Dial {
            epid,
            uuid: own.uuid,
            question: Box::new(own.encode()),
            stream: None,
            sent: 0,
            answer: Box::new([0; LEN]),
            got: 0,
            again: Instant::now(),
            until: Instant::now(),
            tcp: true,
        }
    }

    /// Makes progress without waiting. Returns `None` until the answer arrives. Retries if nothing
    /// answers.
    ///
    /// # Errors
    /// The endpoint refused; retrying would not help.
    pub fn step(&mut self, now: Instant) -> Result<Option<Frame>, Error> {
        if now >= self.until {
            self.stream = None;
        }
        if self.stream.is_none() && now >= self.again {
            (self.sent, self.got) = (0, 0);
            (self.again, self.until) = (now + REDIAL, now + ATTEMPT);
            self.stream = self.open().ok();
        }
        match self.talk() {
            Ok(false) => Ok(None),
            Ok(true) => {
                let frame = Frame::decode(&self.answer, &self.uuid)?;
                match frame.verdict {
                    0 if frame.epid == self.epid => Ok(Some(frame)),
                    0 => Err(Error::EPID_NETWORK),
                    verdict => Err(Error(verdict.into())),
                }
            }
            Err(_) => {
                self.stream = None;
                Ok(None)
            }
        }
    }

    pub fn is_local(&self) -> bool {
        !self.tcp
    }

    pub fn take_stream(&mut self) -> Option<UnixStream> {
        self.stream.take()
    }

    /// Sends the question and receives the answer. Returns `true` once the answer is complete.
    fn talk(&mut self) -> io::Result<bool> {
        let Some(stream) = &mut self.stream else { return Ok(false) };
        Ok(put(stream, &self.question[..], &mut self.sent)?
            && get(stream, &mut self.answer[..], &mut self.got)?)
    }

    fn open(&mut self) -> io::Result<UnixStream> {
        let host = Ipv4Addr::from((self.epid >> 32) as u32);
        self.tcp = !self.tcp && !host.is_unspecified();
        if self.tcp {
            return connect_tcp(host, (self.epid >> 16) as u16);
        }
        let stream = connect_local(self.epid)?;
        match is_own(&stream) {
            true => Ok(stream),
            false => Err(ErrorKind::PermissionDenied.into()),
        }
    }
}

fn socket(family: i32) -> io::Result<UnixStream> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the arguments are numbers, and the returned descriptor is ours to own.
    unsafe {
        match libc::socket(family, kind, 0) {
            fd @ 0.. => Ok(UnixStream::from_raw_fd(fd)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Starts a TCP connection. Sending fails with `WouldBlock` until it is established.
fn connect_tcp(host: Ipv4Addr, port: u16) -> io::Result<UnixStream> {
    let stream = socket(libc::AF_INET)?;
    // SAFETY: all zeros are a valid `sockaddr_in`.
    let mut address: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    address.sin_family = libc::AF_INET as libc::sa_family_t;
    (address.sin_port, address.sin_addr.s_addr) = (port.to_be(), u32::from(host).to_be());
    let len = size_of::<libc::sockaddr_in>() as libc::socklen_t;
    // SAFETY: `address` has length `len` and outlives the call.
    let connected = unsafe { libc::connect(stream.as_raw_fd(), (&raw const address).cast(), len) };
    match io::Error::last_os_error() {
        _ if connected == 0 => Ok(stream),
        error if error.raw_os_error() == Some(libc::EINPROGRESS) => Ok(stream),
        error => Err(error),
    }
}

/// Returns whether no endpoint of this user on this host has this epid.
pub(crate) fn is_absent(epid: u64) -> bool {
    connect_local(epid).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

/// Does not wait: fails if the endpoint's backlog is full.
fn connect_local(epid: u64) -> io::Result<UnixStream> {
    let stream = socket(libc::AF_UNIX)?;
    let name = name(epid)?;
    let name = name.as_abstract_name().unwrap_or_default();
    // SAFETY: all zeros are a valid `sockaddr_un`.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    // An abstract name begins with a zero byte.
    for (to, from) in address.sun_path[1..].iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    let len = size_of::<libc::sa_family_t>() + 1 + name.len();
    // SAFETY: `address` has at least length `len` and outlives the call.
    let connected = unsafe {
        libc::connect(stream.as_raw_fd(), (&raw const address).cast(), len as libc::socklen_t)
    };
    if connected == 0 { Ok(stream) } else { Err(io::Error::last_os_error()) }
}

/// Returns `true` once all bytes are sent.
pub(crate) fn put(stream: &UnixStream, bytes: &[u8], sent: &mut usize) -> io::Result<bool> {
    while *sent < bytes.len() {
        let rest = &bytes[*sent..];
        // SAFETY: `rest` is valid for `rest.len()` bytes. MSG_NOSIGNAL, because SIGPIPE could kill
        // the program.
        let n = unsafe {
            libc::send(stream.as_raw_fd(), rest.as_ptr().cast(), rest.len(), libc::MSG_NOSIGNAL)
        };
        let written = usize::try_from(n).map_err(|_| io::Error::last_os_error());
        match written {
            Ok(n) => *sent += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Returns `true` once all bytes have arrived.
pub(crate) fn get(stream: &mut UnixStream, bytes: &mut [u8], got: &mut usize) -> io::Result<bool> {
    while *got < bytes.len() {
        match stream.read(&mut bytes[*got..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => *got += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}
