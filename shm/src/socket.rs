//! AF_UNIX SEQPACKET sockets: ordered packets with descriptors. Slow path only. Every wait has a
//! deadline, no other call blocks, and dropping a socket does not block either. Received
//! descriptors are [owned](Foreign) at once, and are closed on drop even if their packet is
//! invalid. All descriptors are close-on-exec.

use std::mem::{self, ManuallyDrop};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::time::Instant;

use crate::error::HandshakeError;
use crate::foreign::{Batch, Foreign, put_aside};
use crate::meeting::poll;
use crate::segment::errno;

mod address;
pub(crate) use address::{Address, connect_socket, unconnected};

pub(crate) type Result<T> = std::result::Result<T, HandshakeError>;

/// Maximum number of descriptors in one packet, a limit of the kernel.
pub const MAX_FDS: usize = 253;

pub(crate) fn system() -> HandshakeError {
    HandshakeError::System(errno())
}

/// Creates two connected sockets, for both ends in one process, or to pass to other processes.
///
/// A process that passes a socket to a child must close its own copy. Otherwise it does not notice
/// when the child hangs up.
pub fn socket_pair() -> Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0i32; 2];
    // SAFETY: the call fills the array of two integers.
    let rc = unsafe {
        libc::socketpair(
            libc::AF_UNIX,
            libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC,
            0,
            fds.as_mut_ptr(),
        )
    };
    if rc != 0 {
        return Err(system());
    }
    // SAFETY: `socketpair` returned these new descriptors, so nothing else owns them.
    unsafe { Ok((OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1]))) }
}

/// The sender of a packet, as the kernel reports it after [`name_senders`](Socket::name_senders).
#[derive(Debug)]
pub(crate) struct Sender {
    /// 0 if unknown, or if its PID namespace is not visible to this process.
    pub(crate) pid: i32,
    /// Claimed by the sender, and checked by the kernel.
    pub(crate) uid: u32,
    pub(crate) pidfd: Option<OwnedFd>,
}

impl Sender {
    /// `u32::MAX` is never a valid user ID.
    const UNKNOWN: Sender = Sender { pid: 0, uid: u32::MAX, pidfd: None };

    fn is_named(&self) -> bool {
        self.uid != u32::MAX
    }
}

/// Whether the kernel reports senders, as requested by [`name_senders`](Socket::name_senders).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Senders {
    Named,
    Unnamed,
}

#[derive(Debug)]
pub(crate) struct Packet {
    pub(crate) len: usize,
    pub(crate) fds: Batch,
    pub(crate) sender: Sender,
}

/// Socket option since Linux 6.5: each received packet carries a pidfd of its sender. The second
/// constant is the type of that control message.
const SO_PASSPIDFD: i32 = 76;
const SCM_PIDFD: i32 = 4;

#[derive(Debug)]
pub(crate) struct Socket {
    fd: ManuallyDrop<OwnedFd>,
}

impl Socket {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Socket { fd: ManuallyDrop::new(fd) }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns the process ID and the effective user ID of the process that connected, or that
    /// created the socket pair. The process may have passed the socket on since then.
    pub(crate) fn connected_by(&self) -> Result<(i32, u32)> {
        // SAFETY: `ucred` consists of three integers, so zero bytes are a valid value.
        let mut cred: libc::ucred = unsafe { mem::zeroed() };
        self.option(libc::SO_PEERCRED, &mut cred)?;
        Ok((cred.pid, cred.uid))
    }

    /// Returns whether the reports include a pidfd.
    pub(crate) fn name_senders(&self, on: bool) -> Result<bool> {
        self.switch(libc::SO_PASSCRED, on)?;
        Ok(self.switch(SO_PASSPIDFD, on).is_ok())
    }

    fn switch(&self, name: i32, on: bool) -> Result<()> {
        let value = i32::from(on);
        // SAFETY: the kernel reads the local variable `value`. Its size is passed with it.
        let rc = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                name,
                ptr::from_ref(&value).cast(),
                size_of::<i32>() as libc::socklen_t,
            )
        };
        if rc == 0 { Ok(()) } else { Err(system()) }
    }

    fn option<T>(&self, name: i32, value: &mut T) -> Result<()> {
        let mut len = size_of::<T>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes, the size of `value`. Every `T` used here
        // consists of integers.
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

    /// Sends one packet. Fails with `EAGAIN` if there is no room.
    pub(crate) fn try_send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.send_now(bytes, fds, None)
    }

    fn send_now(
        &self,
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
        sender: Option<&libc::ucred>,
    ) -> Result<()> {
        let mut control = Control::new();
        let mut part =
            libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: `msghdr` consists of pointers and integers, so zero bytes are a valid value.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = &mut part;
        message.msg_iovlen = 1;
        debug_assert!(fds.len() <= MAX_FDS);
        let mut used = 0;
        if let Some(sender) = sender {
            // SAFETY: `ucred` consists of three integers. `CONTROL` has room for one sender.
            used +=
                unsafe { control.put(used, libc::SCM_CREDENTIALS, std::slice::from_ref(sender)) };
        }
        if !fds.is_empty() {
            // SAFETY: a `BorrowedFd` is represented as an integer. `put` checks that the message
            // fits.
            used += unsafe { control.put(used, libc::SCM_RIGHTS, fds) };
        }
        if used > 0 {
            message.msg_control = control.bytes.as_mut_ptr().cast();
            message.msg_controllen = used;
        }
        loop {
            // SAFETY: `message` points only to values that outlive the call. MSG_NOSIGNAL prevents
            // SIGPIPE.
            let n = unsafe {
                libc::sendmsg(
                    self.fd.as_raw_fd(),
                    &message,
                    libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
                )
            };
            if n >= 0 {
                return Ok(());
            }
            match errno() {
                libc::EINTR => {}
                libc::EPIPE | libc::ECONNRESET | libc::ENOTCONN => {
                    return Err(HandshakeError::HungUp);
                }
                // Too many descriptors are in flight. Retry after the peer has received some.
                libc::ETOOMANYREFS => return Err(HandshakeError::System(libc::EAGAIN)),
                code => return Err(HandshakeError::System(code)),
            }
        }
    }

    /// Sends one packet with our credentials. Fails with `EAGAIN` if there is no room.
    pub(crate) fn try_send_named(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        // SAFETY: the calls have no arguments and cannot fail.
        let sender = unsafe {
            libc::ucred { pid: libc::getpid(), uid: libc::geteuid(), gid: libc::getegid() }
        };
        self.send_now(bytes, fds, Some(&sender))
    }

    pub(crate) fn wait(&self, events: i16, deadline: Instant) -> Result<()> {
        wait(self.fd(), events, deadline)
    }

    /// Receives one packet, if one has arrived. `room` returns the maximum number of descriptors
    /// that a packet of these bytes may carry.
    ///
    /// If there were no room for descriptors, the kernel would close them in this thread. So this
    /// call first checks whether the packet has descriptors. It then receives them while the packet
    /// stays in the queue, and removes the packet only once it has them all.
    ///
    /// # Errors
    /// The packet that caused the error stays in the queue.
    /// - [`HandshakeError::BadPacket`]: it is too long, or carries too many descriptors.
    /// - `EMFILE`: this process has too few free descriptors. Try again later.
    /// - [`HandshakeError::HungUp`]: no packet is left, and the peer has closed the connection.
    pub(crate) fn try_recv(
        &self,
        into: &mut [u8],
        senders: Senders,
        room: impl FnOnce(&[u8]) -> usize,
    ) -> Result<Option<Packet>> {
        // The kernel stores a pidfd after the descriptors. If no pidfd is requested, there is no
        // spare room that could receive descriptors.
        self.name_pidfds(senders, false);
        let named = if senders == Senders::Named { CREDENTIALS } else { 0 };
        let peeked = self.peek(into, named);
        self.name_pidfds(senders, true);
        let Some((mut packet, mut flags)) = peeked? else { return Ok(None) };
        if flags & libc::MSG_TRUNC != 0 {
            return Err(HandshakeError::BadPacket);
        }
        // Packets are never empty, so a length of 0 means that the peer closed the connection.
        if packet.len == 0 {
            return Err(HandshakeError::HungUp);
        }
        let mut fds = 0;
        if has_fds(flags) {
            fds = room(&into[..packet.len]).min(MAX_FDS);
            if fds == 0 {
                return Err(HandshakeError::BadPacket);
            }
        }
        if fds > 0 || named > 0 {
            let rights = if fds > 0 { HEADER + fds * size_of::<i32>() } else { 0 };
            // The room for the pidfd may receive more descriptors than allowed.
            let pidfd = if named > 0 { rights % 8 + PIDFD } else { 0 };
            let Some(again) = self.peek(into, named + rights + pidfd)? else { return Ok(None) };
            (packet, flags) = again;
        }
        let there = packet.fds.len();
        if there > fds || (there == fds && has_fds(flags)) {
            return Err(HandshakeError::BadPacket);
        }
        if has_fds(flags) {
            return Err(HandshakeError::System(libc::EMFILE));
        }
        self.skip();
        Ok(Some(packet))
    }

    /// Asks the kernel to add pidfds to the reports about senders, or to leave them out. Does
    /// nothing before Linux 6.5.
    fn name_pidfds(&self, senders: Senders, on: bool) {
        if senders == Senders::Named {
            let _ = self.switch(SO_PASSPIDFD, on);
        }
    }

    /// The kernel closes the packet's descriptors in this thread, so the caller must have received
    /// them all, or know that there are none.
    fn skip(&self) {
        let none = ptr::null_mut();
        // SAFETY: the call writes nothing, because the length is 0.
        unsafe { libc::recv(self.fd.as_raw_fd(), none, 0, libc::MSG_DONTWAIT) };
    }

    /// Receives the next packet and the kernel's flags for it, but leaves it in the queue. `room`
    /// is the size of the buffer for control messages.
    fn peek(&self, into: &mut [u8], room: usize) -> Result<Option<(Packet, i32)>> {
        let mut control = Control::new();
        let mut part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        // SAFETY: `msghdr` consists of pointers and integers, so zero bytes are a valid value.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = &mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.bytes.as_mut_ptr().cast();
        message.msg_controllen = room;
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC | libc::MSG_PEEK;
        let n = loop {
            // SAFETY: `message` points only to local variables and to `into`, which outlive the
            // call.
            let n = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &mut message, flags) };
            if n >= 0 {
                break n;
            }
            match errno() {
                libc::EAGAIN | libc::EINTR => return Ok(None),
                // The peer closed before it had read all packets. The kernel reports this once,
                // before it delivers the packets that the peer sent.
                libc::ECONNRESET => {}
                code => return Err(HandshakeError::System(code)),
            }
        };
        // Every descriptor must have an owner before an error is returned.
        let (fds, sender) = control.take(&message);
        Ok(Some((Packet { len: n as usize, fds: fds.into(), sender }, message.msg_flags)))
    }

    pub(crate) fn recv(
        &self,
        into: &mut [u8],
        room: impl Fn(&[u8]) -> usize,
        deadline: Instant,
    ) -> Result<Packet> {
        loop {
            if let Some(packet) = self.try_recv(into, Senders::Unnamed, &room)? {
                return Ok(packet);
            }
            wait(self.fd(), libc::POLLIN, deadline)?;
        }
    }
}

fn has_fds(flags: i32) -> bool {
    flags & libc::MSG_CTRUNC != 0
}

/// Packets that `drop` removes before it sets the socket aside. The kernel usually queues fewer.
const LAST: usize = 64;

impl Drop for Socket {
    /// Removes packets without descriptors, then closes the socket. If a packet has descriptors,
    /// sets the socket aside, because closing it would close them too, which may block.
    fn drop(&mut self) {
        // SAFETY: the call takes no pointers, and the descriptor is ours. No packet arrives after
        // it.
        unsafe { libc::shutdown(self.fd.as_raw_fd(), libc::SHUT_RDWR) };
        // The end of the connection looks like an empty packet, but names no sender.
        let named = self.name_senders(true).is_ok();
        self.name_pidfds(Senders::Named, false);
        for _ in 0..LAST {
            match self.peek(&mut [0; 1], CREDENTIALS) {
                Ok(Some((_, flags))) if has_fds(flags) => break,
                Ok(Some((packet, _))) if packet.len > 0 || packet.sender.is_named() => self.skip(),
                Ok(_) if named => {
                    // SAFETY: `drop` returns right after this, so nothing uses `fd` again.
                    unsafe { ManuallyDrop::drop(&mut self.fd) };
                    return;
                }
                // The error may concern only one packet, so continue.
                _ => {}
            }
        }
        // SAFETY: the branch that dropped `fd` has returned, so `fd` is taken once.
        put_aside(unsafe { ManuallyDrop::take(&mut self.fd) });
    }
}

#[repr(C, align(8))]
struct Control {
    bytes: [u8; CONTROL],
}

const HEADER: usize = 16;

/// Sizes of the control messages that name a sender: 12 bytes of credentials, and a pidfd of 4
/// bytes, each padded to 8.
const CREDENTIALS: usize = HEADER + 16;
const PIDFD: usize = HEADER + 8;

/// Each descriptor takes 4 bytes, and the contents are padded to 8.
const CONTROL: usize = CREDENTIALS + (HEADER + MAX_FDS.next_multiple_of(2) * 4) + PIDFD;

impl Control {
    fn new() -> Self {
        Control { bytes: [0; CONTROL] }
    }

    /// Returns the message's size in bytes; `at` is a multiple of 8.
    ///
    /// # Safety
    /// `T` consists of integers without padding.
    unsafe fn put<T>(&mut self, at: usize, kind: i32, values: &[T]) -> usize {
        let len = size_of_val(values);
        // SAFETY: these macros only compute lengths.
        let (whole, taken) = unsafe { (libc::CMSG_LEN(len as u32), libc::CMSG_SPACE(len as u32)) };
        assert!(at + taken as usize <= CONTROL);
        // SAFETY: the assertion above keeps the message inside the buffer. The buffer is aligned to
        // 8, and `at` is a multiple of 8, so the header is aligned.
        unsafe {
            let head = self.bytes.as_mut_ptr().add(at).cast::<libc::cmsghdr>();
            (*head).cmsg_level = libc::SOL_SOCKET;
            (*head).cmsg_type = kind;
            (*head).cmsg_len = whole as usize;
            ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), libc::CMSG_DATA(head), len);
        }
        taken as usize
    }

    fn take(&self, message: &libc::msghdr) -> (Vec<Foreign>, Sender) {
        let (mut fds, mut sender) = (Vec::new(), Sender::UNKNOWN);
        // SAFETY: the kernel filled the control buffer and set its length, and `message` still
        // points to it. The macros iterate over the headers inside that length. The kernel opened
        // each descriptor under SCM_RIGHTS and SCM_PIDFD for this receive, so nothing else owns it.
        // A pidfd that could not be opened is negative. The integers are read unaligned.
        unsafe {
            let mut head = libc::CMSG_FIRSTHDR(message);
            while !head.is_null() {
                let data = libc::CMSG_DATA(head);
                let len = (*head).cmsg_len - (data as usize - head as usize);
                let number = |i: usize| data.cast::<i32>().add(i).read_unaligned();
                match ((*head).cmsg_level, (*head).cmsg_type) {
                    (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                        let owned = |i| OwnedFd::from_raw_fd(number(i)).into();
                        fds.extend((0..len / size_of::<i32>()).map(owned));
                    }
                    (libc::SOL_SOCKET, libc::SCM_CREDENTIALS)
                        if len >= size_of::<libc::ucred>() =>
                    {
                        let cred = data.cast::<libc::ucred>().read_unaligned();
                        (sender.pid, sender.uid) = (cred.pid, cred.uid);
                    }
                    (libc::SOL_SOCKET, SCM_PIDFD) if len >= size_of::<i32>() && number(0) >= 0 => {
                        sender.pidfd = Some(OwnedFd::from_raw_fd(number(0)));
                    }
                    _ => {}
                }
                head = libc::CMSG_NXTHDR(message, head);
            }
        }
        (fds, sender)
    }
}

fn wait(fd: BorrowedFd<'_>, events: i16, deadline: Instant) -> Result<()> {
    // Checks the deadline first, because a peer may cause unrelated events endlessly.
    if Instant::now() >= deadline {
        return Err(HandshakeError::Deadline);
    }
    let mut polls = [libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 }];
    poll(&mut polls, deadline).map_err(HandshakeError::System)?;
    if polls[0].revents == 0 { Err(HandshakeError::Deadline) } else { Ok(()) }
}
