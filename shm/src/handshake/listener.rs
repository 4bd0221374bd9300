//! The listening socket. Slow path only; nothing here waits.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Shake;
use crate::meeting::{Meetings, accept_now};
use crate::socket::{Address, Result, Socket, stream, system};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 256;

/// How long one handshake with a listener may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// A listening socket. Drop removes its path, if it is still the file created here. A killed
/// process leaves its path behind; an abstract name disappears with it.
///
/// Accept in the process that called `bind`, because connecting peers watch that process.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    file: Option<(PathBuf, (u64, u64))>,
    meetings: Mutex<Meetings<Shake>>,
}

impl Listener {
    /// Listens on a path, or on an abstract name if it begins with `@`.
    ///
    /// # Errors
    /// [`InUse`](crate::HandshakeError::InUse) when the path exists or the name is taken, even if
    /// its owner has exited.
    pub fn bind(address: impl AsRef<OsStr>) -> Result<Self> {
        let address = Address::parse(address.as_ref())?;
        let fd = stream()?;
        address.bind(fd.as_fd())?;
        let file = address.path.and_then(|path| identity(&path).map(|id| (path, id)));
        let listener = Listener { fd, file, meetings: Mutex::new(Meetings::new(PATIENCE)) };
        // SAFETY: a call on our descriptor with plain numbers.
        if unsafe { libc::listen(listener.fd.as_raw_fd(), BACKLOG) } != 0 {
            return Err(system());
        }
        Ok(listener)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Locks the open handshakes. Never held while a call waits.
    pub(crate) fn lock_meetings(&self) -> MutexGuard<'_, Meetings<Shake>> {
        self.meetings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // SAFETY: a call on our descriptor. Afterwards no new connections arrive, so the loop below
        // ends.
        unsafe { libc::shutdown(self.fd.as_raw_fd(), libc::SHUT_RDWR) };
        // Pending connections may carry descriptors: see `Socket`.
        while let Ok(socket) = accept_now(self.fd()) {
            drop(Socket::new(socket));
        }
        if let Some((path, id)) = &self.file
            && identity(path) == Some(*id)
        {
            // Ignore errors: at worst the path stays behind.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Returns device and inode of a file, to distinguish ours from a replacement.
fn identity(path: &std::path::Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let meta = std::fs::symlink_metadata(path).ok()?;
    Some((meta.dev(), meta.ino()))
}
