//! AF_UNIX SEQPACKET sockets: packets that keep their borders, in order, with descriptors attached. Slow path only.
//! Every wait has a deadline; no call blocks otherwise. Descriptors that arrive are owned from the first moment and
//! close on drop, whatever is wrong with the packet they came with; all are close-on-exec.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{mem, ptr};

use crate::handshake::HandshakeError;
use crate::segment::errno;

type Result<T> = std::result::Result<T, HandshakeError>;

/// The most descriptors that the kernel attaches to one packet. Room is made for all of them, so that a peer that sends
/// more than the protocol knows cannot make us lose track of any.
pub(crate) const MAX_FDS: usize = 253;

/// How long a connecting process sleeps before it tries again, while nobody listens.
const RETRY: Duration = Duration::from_millis(1);

/// How many connections wait to be accepted.
const BACKLOG: i32 = 64;

fn system() -> HandshakeError {
    HandshakeError::System(errno())
}

/// Two connected sockets: for both ends in one process, or to be handed to the processes by other means.
///
/// [`Link`](crate::Link) takes the process that makes the call for the owner of both: a process forked afterwards is
/// seen to die only when the last copy of its socket closes, so each side must close the other's.
pub fn socket_pair() -> Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0i32; 2];
    // SAFETY: the call fills the two numbers.
    let rc = unsafe {
        libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0, fds.as_mut_ptr())
    };
    if rc != 0 {
        return Err(system());
    }
    // SAFETY: both were just made and are known to nobody else.
    unsafe { Ok((OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1]))) }
}

/// Who is at the other end, as the kernel says.
#[derive(Debug)]
pub(crate) struct Credentials {
    /// Its process, or 0 if it lives in a process namespace that we cannot see.
    pub(crate) pid: i32,
    /// Its effective user when it connected or listened.
    pub(crate) uid: u32,
    /// Becomes readable when it dies, if the kernel gave one.
    pub(crate) pidfd: Option<OwnedFd>,
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
}

impl Socket {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Socket { fd }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn credentials(&self) -> Result<Credentials> {
        // SAFETY: all zeroes is a value of `ucred`, three plain numbers.
        let mut cred: libc::ucred = unsafe { mem::zeroed() };
        self.option(libc::SO_PEERCRED, &mut cred)?;
        let mut pidfd = -1i32;
        let pidfd = match self.option(libc::SO_PEERPIDFD, &mut pidfd) {
            // SAFETY: the kernel made it for us just now.
            Ok(()) if pidfd >= 0 => Some(unsafe { OwnedFd::from_raw_fd(pidfd) }),
            _ if cred.pid > 0 => {
                // Kernels before 6.5. The process may have been replaced since it connected; then its socket hangs up.
                // SAFETY: a call with plain numbers.
                let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, cred.pid, 0) };
                // SAFETY: as above, when it is one.
                (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd as i32) })
            }
            _ => None,
        };
        Ok(Credentials { pid: cred.pid, uid: cred.uid, pidfd })
    }

    fn option<T>(&self, name: i32, value: &mut T) -> Result<()> {
        let mut len = size_of::<T>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to `value`, whose size that is; every `T` used here is plain
        // numbers.
        let rc = unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                name,
                ptr::from_mut(value).cast(),
                &mut len,
            )
        };
        if rc == 0 && len as usize == size_of::<T>() { Ok(()) } else { Err(system()) }
    }

    /// Sends one packet at once, or fails with `EAGAIN`.
    pub(crate) fn try_send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut control = Control::new();
        let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: all zeroes is a value of `msghdr`: null pointers and lengths of 0.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = &mut part;
        message.msg_iovlen = 1;
        if !fds.is_empty() {
            debug_assert!(fds.len() <= MAX_FDS);
            let len = size_of_val(fds) as u32;
            message.msg_control = control.bytes.as_mut_ptr().cast();
            // SAFETY: arithmetic.
            message.msg_controllen = unsafe { libc::CMSG_SPACE(len) } as usize;
            // SAFETY: the control buffer is aligned for and longer than a header and `MAX_FDS` numbers, so the first
            // header lies in it and the numbers behind it too. A `BorrowedFd` is its number.
            unsafe {
                let head = libc::CMSG_FIRSTHDR(&message);
                (*head).cmsg_level = libc::SOL_SOCKET;
                (*head).cmsg_type = libc::SCM_RIGHTS;
                (*head).cmsg_len = libc::CMSG_LEN(len) as usize;
                ptr::copy_nonoverlapping(fds.as_ptr().cast::<u8>(), libc::CMSG_DATA(head), len as usize);
            }
        }
        loop {
            // SAFETY: all that `message` points to lives on this frame; MSG_NOSIGNAL: no SIGPIPE.
            let n = unsafe {
                libc::sendmsg(self.fd.as_raw_fd(), &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
            };
            if n >= 0 {
                return Ok(());
            }
            match errno() {
                libc::EINTR => {}
                libc::EPIPE | libc::ECONNRESET | libc::ENOTCONN => return Err(HandshakeError::HungUp),
                // Too many descriptors under way: they leave as soon as the peer reads.
                libc::ETOOMANYREFS => return Err(HandshakeError::System(libc::EAGAIN)),
                code => return Err(HandshakeError::System(code)),
            }
        }
    }

    /// Sends one packet, waiting for room until the deadline.
    pub(crate) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>], deadline: Instant) -> Result<()> {
        loop {
            match self.try_send(bytes, fds) {
                Err(HandshakeError::System(libc::EAGAIN)) => wait(self.fd(), libc::POLLOUT, deadline)?,
                other => return other,
            }
        }
    }

    /// Waits for an event, a hang-up or the deadline.
    pub(crate) fn wait(&self, events: i16, deadline: Instant) -> Result<()> {
        wait(self.fd(), events, deadline)
    }

    /// Receives one packet if there is one: its length, and what was attached. `None`: there is none. With `EMFILE` a packet has
    /// come, and is lost, since this process may open no more descriptors.
    pub(crate) fn try_recv(&self, into: &mut [u8]) -> Result<Option<(usize, Vec<OwnedFd>)>> {
        let mut control = Control::new();
        let mut part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        // SAFETY: as in `try_send`.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = &mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.bytes.as_mut_ptr().cast();
        message.msg_controllen = size_of::<Control>();
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        // SAFETY: all that `message` points to lives on this frame or is `into`.
        let n = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &mut message, flags) };
        if n < 0 {
            return match errno() {
                libc::EAGAIN | libc::EINTR => Ok(None),
                libc::ECONNRESET => Err(HandshakeError::HungUp),
                code => Err(HandshakeError::System(code)),
            };
        }
        // Before anything can fail, every descriptor gets its owner.
        let fds = control.take(&message);
        if message.msg_flags & libc::MSG_TRUNC != 0 {
            return Err(HandshakeError::BadPacket);
        }
        // There was room for all that a packet can have: it is this process that cannot take more.
        if message.msg_flags & libc::MSG_CTRUNC != 0 {
            return Err(HandshakeError::System(libc::EMFILE));
        }
        match n {
            // Nobody sends empty packets: this is the end.
            0 => Err(HandshakeError::HungUp),
            n => Ok(Some((n as usize, fds))),
        }
    }

    /// Receives one packet, waiting for it until the deadline.
    pub(crate) fn recv(&self, into: &mut [u8], deadline: Instant) -> Result<(usize, Vec<OwnedFd>)> {
        loop {
            if let Some(packet) = self.try_recv(into)? {
                return Ok(packet);
            }
            wait(self.fd(), libc::POLLIN, deadline)?;
        }
    }
}

/// Room for the descriptors of one packet.
#[repr(C, align(8))]
struct Control {
    bytes: [u8; 16 + MAX_FDS.next_multiple_of(2) * 4],
}

impl Control {
    fn new() -> Self {
        Control { bytes: [0; 16 + MAX_FDS.next_multiple_of(2) * 4] }
    }

    fn take(&self, message: &libc::msghdr) -> Vec<OwnedFd> {
        let mut fds = Vec::new();
        // SAFETY: the kernel filled the control buffer, which `message` still points to, and set its length; the
        // macros walk the headers inside it. Each number under SCM_RIGHTS is a descriptor made for us by this call, so
        // it has no other owner. It may lie unaligned.
        unsafe {
            let mut head = libc::CMSG_FIRSTHDR(message);
            while !head.is_null() {
                if (*head).cmsg_level == libc::SOL_SOCKET && (*head).cmsg_type == libc::SCM_RIGHTS {
                    let data = libc::CMSG_DATA(head);
                    let len = (*head).cmsg_len - (data as usize - head as usize);
                    for i in 0..len / size_of::<i32>() {
                        fds.push(OwnedFd::from_raw_fd(data.cast::<i32>().add(i).read_unaligned()));
                    }
                }
                head = libc::CMSG_NXTHDR(message, head);
            }
        }
        fds
    }
}

/// Waits for an event, a hang-up or the deadline.
fn wait(fd: BorrowedFd<'_>, events: i16, deadline: Instant) -> Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(HandshakeError::Deadline);
        }
        // Rounded up: a deadline is never met early by polling in vain.
        let ms = i32::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX);
        let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
        // SAFETY: one structure, which is ours.
        match unsafe { libc::poll(&mut poll, 1, ms) } {
            0 => return Err(HandshakeError::Deadline),
            n if n > 0 => return Ok(()),
            _ => match errno() {
                libc::EINTR => {}
                code => return Err(HandshakeError::System(code)),
            },
        }
    }
}

/// A place to meet: a path, or a name without a file if it begins with `@`.
struct Address {
    raw: libc::sockaddr_un,
    len: libc::socklen_t,
    path: Option<PathBuf>,
}

impl Address {
    fn parse(text: &OsStr) -> Result<Self> {
        let bytes = text.as_bytes();
        // SAFETY: all zeroes is a value of `sockaddr_un`: plain numbers.
        let mut raw: libc::sockaddr_un = unsafe { mem::zeroed() };
        raw.sun_family = libc::AF_UNIX as libc::sa_family_t;
        let named = bytes.first() == Some(&b'@');
        // A path ends in a zero byte, an abstract name begins with one and ends where the length says.
        if bytes.len() < 1 + usize::from(named) || bytes.len() >= raw.sun_path.len() || bytes.contains(&0) {
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

    fn pointer(&self) -> *const libc::sockaddr {
        ptr::from_ref(&self.raw).cast()
    }
}

fn stream() -> Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: a call with plain numbers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return Err(system());
    }
    // SAFETY: just made, and known to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Where peers connect. A path is removed again on drop, if it still is the file that was made here; one that exists
/// already is left alone. A process that is killed leaves its path behind, an abstract name vanishes with it.
///
/// Accept in the process that bound: it is the one whose death connecting peers watch for.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    file: Option<(PathBuf, (u64, u64))>,
}

impl Listener {
    /// Listens on a path, or on an abstract name if it begins with `@`.
    ///
    /// # Errors
    /// [`HandshakeError::InUse`] when the path exists or the name is taken, whether or not its owner still lives.
    pub fn bind(address: impl AsRef<OsStr>) -> Result<Self> {
        let address = Address::parse(address.as_ref())?;
        let fd = stream()?;
        // SAFETY: `address` holds a socket address of that length.
        if unsafe { libc::bind(fd.as_raw_fd(), address.pointer(), address.len) } != 0 {
            return Err(match errno() {
                libc::EADDRINUSE => HandshakeError::InUse,
                code => HandshakeError::System(code),
            });
        }
        let file = address.path.and_then(|path| identity(&path).map(|id| (path, id)));
        let listener = Listener { fd, file };
        // SAFETY: a call on our descriptor with plain numbers.
        if unsafe { libc::listen(listener.fd.as_raw_fd(), BACKLOG) } != 0 {
            return Err(system());
        }
        Ok(listener)
    }

    /// Waits until a peer has connected, which [`accept`](Self::accept) then takes: for callers who have other things to look after
    /// while nobody comes.
    ///
    /// # Errors
    /// [`HandshakeError::Deadline`] if nobody has, or the system's code.
    pub fn wait(&self, deadline: Instant) -> Result<()> {
        wait(self.fd.as_fd(), libc::POLLIN, deadline)
    }

    pub(crate) fn accept_socket(&self, deadline: Instant) -> Result<Socket> {
        loop {
            // SAFETY: null pointers: the peer's address is not asked for.
            let fd = unsafe {
                libc::accept4(self.fd.as_raw_fd(), ptr::null_mut(), ptr::null_mut(), libc::SOCK_CLOEXEC)
            };
            if fd >= 0 {
                // SAFETY: just made, and known to nobody else.
                return Ok(Socket::new(unsafe { OwnedFd::from_raw_fd(fd) }));
            }
            match errno() {
                libc::EAGAIN => wait(self.fd.as_fd(), libc::POLLIN, deadline)?,
                libc::EINTR | libc::ECONNABORTED => {}
                code => return Err(HandshakeError::System(code)),
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some((path, id)) = &self.file
            && identity(path) == Some(*id)
        {
            // Nothing can be done about a failure here, and nothing depends on it.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Device and inode of a file: what tells ours from one that was put in its place.
fn identity(path: &std::path::Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let meta = std::fs::symlink_metadata(path).ok()?;
    Some((meta.dev(), meta.ino()))
}

/// Connects, trying again until the deadline while nobody listens there.
pub(crate) fn connect_socket(address: &OsStr, deadline: Instant) -> Result<Socket> {
    let address = Address::parse(address)?;
    let fd = stream()?;
    loop {
        // SAFETY: `address` holds a socket address of that length.
        if unsafe { libc::connect(fd.as_raw_fd(), address.pointer(), address.len) } == 0 {
            return Ok(Socket::new(fd));
        }
        match errno() {
            libc::EINTR => {}
            code @ (libc::EAGAIN | libc::ENOENT | libc::ECONNREFUSED) => {
                if Instant::now() + RETRY >= deadline {
                    return Err(HandshakeError::System(code));
                }
                std::thread::sleep(RETRY);
            }
            code => return Err(HandshakeError::System(code)),
        }
    }
}
