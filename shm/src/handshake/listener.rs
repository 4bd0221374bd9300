//! The listening socket. Slow path, but nothing here waits.

use std::ffi::OsStr;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Shake;
use crate::foreign::put_aside;
use crate::meeting::{Meetings, accept_now};
use crate::socket::{Address, Result, Socket, system, unconnected};

const BACKLOG: i32 = 256;

/// Time limit of one handshake with a listener.
const PATIENCE: Duration = Duration::from_secs(5);

/// A listening socket. Dropping it removes its path, if the path still names the file that `bind`
/// created. A killed process leaves a path behind, but not an abstract name.
///
/// Accept in the process that called `bind`, because connecting peers watch that process.
#[derive(Debug)]
pub struct Listener {
    fd: ManuallyDrop<OwnedFd>,
    file: Option<(PathBuf, (u64, u64))>,
    meetings: Mutex<Meetings<Shake>>,
}

impl Listener {
    /// Listens on a path, or on an abstract name if it begins with `@`.
    ///
    /// # Errors
    /// [`InUse`](crate::HandshakeError::InUse) if the name is taken or the path exists, even if the
    /// process that created it has exited.
    pub fn bind(address: impl AsRef<OsStr>) -> Result<Self> {
        let address = Address::parse(address.as_ref())?;
        let fd = unconnected()?;
        address.bind(fd.as_fd())?;
        let file = address.path.and_then(|path| identity(&path).map(|id| (path, id)));
        let fd = ManuallyDrop::new(fd);
        let listener = Listener { fd, file, meetings: Mutex::new(Meetings::new(PATIENCE)) };
        // SAFETY: the call takes no pointers, and the descriptor is ours.
        if unsafe { libc::listen(listener.fd.as_raw_fd(), BACKLOG) } != 0 {
            return Err(system());
        }
        Ok(listener)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Locks the open handshakes. No call holds the lock while it waits.
    pub(crate) fn lock_meetings(&self) -> MutexGuard<'_, Meetings<Shake>> {
        self.meetings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // SAFETY: the call takes no pointers, and the descriptor is ours. New connections are
        // refused afterwards, so the loop below terminates.
        unsafe { libc::shutdown(self.fd.as_raw_fd(), libc::SHUT_RDWR) };
        // Pending connections may carry descriptors, which `Socket` closes without blocking.
        let last = loop {
            match accept_now(self.fd()) {
                Ok(socket) => drop(Socket::new(socket)),
                Err(code) => break code,
            }
        };
        // SAFETY: `drop` runs once, and nothing uses `fd` after this.
        let fd = unsafe { ManuallyDrop::take(&mut self.fd) };
        // If there are no free descriptors, connections are still pending, and the kernel closes
        // them together with the listener.
        if last != libc::EAGAIN && last != libc::EINVAL {
            put_aside(fd);
        }
        if let Some((path, id)) = &self.file
            && identity(path) == Some(*id)
        {
            // Ignore errors: at worst the path remains.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Returns the device and inode of a file, which distinguish our file from a replacement.
fn identity(path: &std::path::Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let meta = std::fs::symlink_metadata(path).ok()?;
    Some((meta.dev(), meta.ino()))
}
