//! Identifies the process at the other end of a socket.
//!
//! With each packet of the handshake the kernel passes the process and user of its sender
//! (`SCM_CREDENTIALS`), and since Linux 6.5 a pidfd (`SCM_PIDFD`). `SO_PEERCRED` is not enough: it
//! names the process that connected or created the socket pair, which after a fork can be this
//! process itself.
//!
//! A process ID alone proves little, because the kernel reuses it. It is *proven* here if a pidfd
//! that was opened before the peer could know our nonce, or that came with the packet, is still
//! alive after the last packet of the handshake:
//!
//! | kernel     | pidfd                                             | proves the sender of  |
//! |------------|---------------------------------------------------|-----------------------|
//! | 6.5 and on | comes with the Hello                              | the Hello             |
//! | before     | of the connected process, opened before our Hello | what echoes our nonce |
//!
//! On an older kernel a process that was forked with one end of a pair is not proven. Its private
//! memory is staged through the lane.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::error::HandshakeError;
use crate::socket::{Sender, Socket};

/// The identity of the peer.
#[derive(Debug)]
pub(crate) struct Credentials {
    /// Its process, or 0 if it lives in a process namespace that we cannot see.
    pub(crate) pid: i32,
    /// Its user: the effective one of the process that connected, then the real one of the sender.
    pub(crate) uid: u32,
    /// Becomes readable when it dies, if the kernel gave one.
    pub(crate) pidfd: Option<OwnedFd>,
    /// Whether `pidfd` provably belongs to the sender.
    proven: bool,
}

impl Credentials {
    /// Identifies the connected process, and enables credentials on all later packets.
    pub(crate) fn connected(socket: &Socket) -> Result<Self, HandshakeError> {
        let pidfds_come = socket.name_senders(true)?;
        let (pid, uid) = socket.connected_by()?;
        let pidfd = if pidfds_come { None } else { open(pid) };
        Ok(Credentials { pid, uid, pidfd, proven: false })
    }

    /// Replaces the connected process with the sender of the Hello.
    pub(crate) fn introduce(&mut self, sender: Sender) {
        let Sender { pid, uid, pidfd } = sender;
        let connected = self.pidfd.take().filter(|_| pid == self.pid);
        let proven = pidfd.is_some() || connected.is_some();
        *self = Credentials { pid, uid, pidfd: pidfd.or(connected).or_else(|| open(pid)), proven };
    }

    /// Whether the peer's process is alive and is not this process.
    pub(crate) fn is_another(&self) -> bool {
        self.proven && self.pidfd.as_ref().is_some_and(is_alive) && !is_own(self.pid)
    }
}

/// Opens a pidfd of the process that has this ID now.
fn open(pid: i32) -> Option<OwnedFd> {
    if pid <= 0 {
        return None;
    }
    // SAFETY: a call with plain numbers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    // SAFETY: the call above returned this descriptor to us.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

fn is_alive(pidfd: &OwnedFd) -> bool {
    let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one structure, which is ours.
    unsafe { libc::poll(&mut poll, 1, 0) == 0 }
}

/// Whether an ID is that of this process or one of its threads.
pub(crate) fn is_own(pid: i32) -> bool {
    // SAFETY: plain numbers; signal 0 only asks whether the thread exists.
    pid > 0 && unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), pid, 0) } == 0
}
