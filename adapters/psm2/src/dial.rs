//! Asks an endpoint for the address of its node, knowing nothing but its id. Never waits: a step
//! does what can be done at once.
//!
//! The id of an endpoint says where it answers:
//!
//! | bits | what |
//! |---|---|
//! | 32..64 | the IPv4 address of its host, or 0: it answers on its own host only |
//! | 16..32 | the TCP port |
//! | 0..32 without an address, 0..16 with one | random |
//!
//! On its own host it answers on an abstract AF_UNIX socket that the id and the user name, too.

use std::io::{self, ErrorKind, Read};
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::frame::{Frame, LEN};

/// Time between two attempts.
const REDIAL: Duration = Duration::from_millis(10);

/// Time for one attempt. A host that drops what is sent to it never refuses it.
const ATTEMPT: Duration = Duration::from_secs(2);

/// The name of the socket on which an endpoint of this host and user answers.
pub(crate) fn name(epid: u64) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("fishplate-psm2-{}-{epid:016x}", user()))
}

/// The user whose processes are believed.
fn user() -> u32 {
    // SAFETY: takes nothing, and always succeeds.
    unsafe { libc::geteuid() }
}

/// Whether the process at the other end of a socket of this host is one of this user.
pub(crate) fn is_own(stream: &UnixStream) -> bool {
    let mut cred = libc::ucred { pid: 0, uid: u32::MAX, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the call fills a structure of ours, whose length it is told.
    let got = unsafe {
        let cred = (&raw mut cred).cast();
        libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, cred, &raw mut len)
    };
    got == 0 && cred.uid == user()
}

/// A question under way.
pub(crate) struct Dial {
    epid: u64,
    uuid: [u8; 16],
    question: Box<[u8; LEN]>,
    /// Any stream socket: the type only sends and receives.
    stream: Option<UnixStream>,
    sent: usize,
    answer: Box<[u8; LEN]>,
    got: usize,
    again: Instant,
    /// When this attempt is given up.
    until: Instant,
    /// Whether the last attempt was over TCP.
    tcp: bool,
}

impl Dial {
    /// Requests the address of the endpoint `epid`, for the endpoint that `own` describes.
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
            // The first attempt is within this host.
            tcp: true,
        }
    }

    /// Does what can be done now. `None`: no answer yet. An endpoint that does not answer is asked
    /// again.
    ///
    /// # Errors
    /// The endpoint refuses, for good.
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

    /// Whether the last attempt was within this host.
    pub fn is_local(&self) -> bool {
        !self.tcp
    }

    /// The stream over which the answer came.
    pub fn take_stream(&mut self) -> Option<UnixStream> {
        self.stream.take()
    }

    /// Whether the answer is there.
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

/// A stream socket that never waits.
fn socket(family: i32) -> io::Result<UnixStream> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: takes numbers. What it returns is a descriptor of ours alone.
    unsafe {
        match libc::socket(family, kind, 0) {
            fd @ 0.. => Ok(UnixStream::from_raw_fd(fd)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Begins to connect over TCP. Until that is done, nothing can be sent.
fn connect_tcp(host: Ipv4Addr, port: u16) -> io::Result<UnixStream> {
    let stream = socket(libc::AF_INET)?;
    // SAFETY: all zeros are a valid address.
    let mut address: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    address.sin_family = libc::AF_INET as libc::sa_family_t;
    (address.sin_port, address.sin_addr.s_addr) = (port.to_be(), u32::from(host).to_be());
    let len = size_of::<libc::sockaddr_in>() as libc::socklen_t;
    // SAFETY: the address is as long as said, and lives during the call.
    let connected = unsafe { libc::connect(stream.as_raw_fd(), (&raw const address).cast(), len) };
    match io::Error::last_os_error() {
        _ if connected == 0 => Ok(stream),
        error if error.raw_os_error() == Some(libc::EINPROGRESS) => Ok(stream),
        error => Err(error),
    }
}

/// Whether no endpoint of this host has this id.
pub(crate) fn is_absent(epid: u64) -> bool {
    connect_local(epid).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

/// Connects to an endpoint of this host. Fails where its backlog is full, rather than wait.
fn connect_local(epid: u64) -> io::Result<UnixStream> {
    let stream = socket(libc::AF_UNIX)?;
    let name = name(epid)?;
    let name = name.as_abstract_name().unwrap_or_default();
    // SAFETY: all zeros are a valid address.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    // The first byte stays 0: an abstract name.
    for (to, from) in address.sun_path[1..].iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    let len = size_of::<libc::sa_family_t>() + 1 + name.len();
    // SAFETY: the address is as long as said, and lives during the call.
    let connected =
        unsafe { libc::connect(stream.as_raw_fd(), (&raw const address).cast(), len as libc::socklen_t) };
    if connected == 0 { Ok(stream) } else { Err(io::Error::last_os_error()) }
}

/// Sends the rest. Whether all is sent.
pub(crate) fn put(stream: &UnixStream, bytes: &[u8], sent: &mut usize) -> io::Result<bool> {
    while *sent < bytes.len() {
        let rest = &bytes[*sent..];
        // SAFETY: reads as many bytes as there are. A program may die of SIGPIPE, so none is sent.
        let n =
            unsafe { libc::send(stream.as_raw_fd(), rest.as_ptr().cast(), rest.len(), libc::MSG_NOSIGNAL) };
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

/// Receives the rest. Whether all is here.
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
