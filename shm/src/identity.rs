//! Identifies the process at the other end of a socket.
//!
//! With each handshake packet, the kernel passes the sender's process and user (`SCM_CREDENTIALS`),
//! and since Linux 6.5 a pidfd (`SCM_PIDFD`). `SO_PEERCRED` is not enough: it names the process
//! that connected, or that created the socket pair. After a fork that can be this process itself.
//!
//! A process ID alone proves little, because the kernel reuses it. Here the process is *proven* if
//! its pidfd reports it alive after the last packet of the handshake. The pidfd must have come with
//! the packet, or been opened before the peer could know our nonce:
//!
//! | kernel     | pidfd                                             | proves the sender of  |
//! |------------|---------------------------------------------------|-----------------------|
//! | 6.5 and on | comes with the Hello                              | the Hello             |
//! | before     | of the connected process, opened before our Hello | the echo of our nonce |
//!
//! On older kernels, a forked process that inherited one end of a pair is not proven. Its private
//! memory is staged through the lane.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::error::HandshakeError;
use crate::socket::{Sender, Socket};

#[derive(Debug)]
pub(crate) struct Credentials {
    /// The peer's process, or 0 if its PID namespace is not visible to this process.
    pub(crate) pid: i32,
    /// After `connected`: the effective ID of the connected process. After `introduce`: the ID that
    /// the sender claimed and the kernel checked.
    pub(crate) uid: u32,
    /// Becomes readable when the process dies. `None` if the kernel provided none.
    pub(crate) pidfd: Option<OwnedFd>,
    /// Whether `pidfd` is proven to belong to the sender of the handshake packets.
    proven: bool,
}

impl Credentials {
    /// Requests credentials with all later packets.
    pub(crate) fn connected(socket: &Socket) -> Result<Self, HandshakeError> {
        let pidfds_come = socket.name_senders(true)?;
        let (pid, uid) = socket.connected_by()?;
        let pidfd = if pidfds_come { None } else { open(pid) };
        Ok(Credentials { pid, uid, pidfd, proven: false })
    }

    pub(crate) fn introduce(&mut self, sender: Sender) {
        let Sender { pid, uid, pidfd } = sender;
        let connected = self.pidfd.take().filter(|_| pid == self.pid);
        let proven = pidfd.is_some() || connected.is_some();
        *self = Credentials { pid, uid, pidfd: pidfd.or(connected).or_else(|| open(pid)), proven };
    }

    pub(crate) fn is_another(&self) -> bool {
        self.proven && self.pidfd.as_ref().is_some_and(is_alive) && !is_own(self.pid)
    }
}

fn open(pid: i32) -> Option<OwnedFd> {
    if pid <= 0 {
        return None;
    }
    // SAFETY: the call takes no pointers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    // SAFETY: the call above returned this new descriptor, so nothing else owns it.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

fn is_alive(pidfd: &OwnedFd) -> bool {
    let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: `poll` is one live structure, and the count is 1.
    unsafe { libc::poll(&mut poll, 1, 0) == 0 }
}

/// Returns whether an ID names this process or one of its threads.
pub(crate) fn is_own(pid: i32) -> bool {
    // SAFETY: the call takes no pointers. Signal 0 checks that the thread exists and sends nothing.
    pid > 0 && unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), pid, 0) } == 0
}
