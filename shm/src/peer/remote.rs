//! What a rail keeps of a peer in another process.

use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;

use fishplate_core::error::AttachError;

use crate::control::Control;
use crate::event_page::EventPage;
use crate::segment::{Mapping, errno};
use crate::staged::within;

/// The state of a peer that is another process or another rail. A rail has no `Remote` for itself.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) control: Control,
    pub(crate) pidfd: Option<OwnedFd>,
    pub(crate) pid: i32,
    pub(crate) pair_id: u32,
    pub(crate) common: Option<Mapping>,
    pub(super) event_page: EventPage,
    pub(super) light: bool,
    /// Time until which the process ID is trusted: see [`lives`](Remote::lives).
    pub(super) known_until: u64,
}

/// How long a process ID is trusted after a check, in nanoseconds. The kernel assigns all other IDs
/// before it reuses one, usually tens of thousands.
const KNOWN: u64 = 1_000_000;

impl Remote {
    /// Resolves a region that the peer claims to be in the common segment of this pair.
    pub(crate) fn in_common(
        &self,
        pair: u32,
        base: u64,
        len: u64,
    ) -> Result<NonNull<u8>, AttachError> {
        let mapping =
            self.common.as_ref().filter(|_| pair == self.pair_id).ok_or(AttachError::BadHandle)?;
        if !within(base, len, mapping.len() as u64) {
            return Err(AttachError::BadRange);
        }
        // SAFETY: `within` has checked that the range lies inside the mapping.
        Ok(unsafe { mapping.ptr().add(base as usize) })
    }

    /// Returns whether the process of the handshake is still alive and linked to us. The answer may
    /// be up to [`KNOWN`] nanoseconds old. A fresh answer would prove no more, because the caller
    /// may be preempted before it uses the answer. If the process has exited and its ID is not
    /// reused, the copy itself fails. If the last answer has expired, makes a system call, which
    /// takes about 0.5 us.
    pub(crate) fn lives(&mut self, now: u64) -> bool {
        if now < self.known_until {
            return true;
        }
        let lives = self.looks_alive();
        if lives {
            self.known_until = now.saturating_add(KNOWN);
        }
        lives
    }

    /// Returns whether the process of the handshake is alive and linked to us. Asks the
    /// kernel.
    fn looks_alive(&self) -> bool {
        let pidfd = self.pidfd.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let mut polls = [
            // `poll(2)` always reports hang-ups, so no events are requested.
            libc::pollfd { fd: self.control.fd().as_raw_fd(), events: 0, revents: 0 },
            libc::pollfd { fd: pidfd, events: libc::POLLIN, revents: 0 },
        ];
        loop {
            // SAFETY: `polls` is a local array of two structures, and poll(2) skips negative
            // descriptors.
            match unsafe { libc::poll(polls.as_mut_ptr(), 2, 0) } {
                0 => return true,
                -1 if errno() == libc::EINTR => {}
                _ => return false,
            }
        }
    }
}
