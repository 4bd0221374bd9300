//! Forms a job through a folder. Rank 0 writes the job's id to a file in the folder, and the other
//! processes read the file.
//!
//! Rank 0 locks the file, and removes it once the job has formed or has failed to form. A process
//! that gives up removes the file if rank 0 has died. The file is readable only by its owner, and
//! files of other users are refused.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::id::{Cookie, UniqueId};
use super::leader::Leader;
use super::meet::{self, Entry};
use super::{ID_LEN, Job, PAUSE};

const NAME: &str = "fishplate-job";

pub(super) fn in_folder(folder: &Path, entry: &Entry) -> io::Result<Job> {
    if !folder.is_dir() {
        let text = format!(
            "no folder to meet in: {}; create it where all processes can access it",
            folder.display()
        );
        return Err(io::Error::new(ErrorKind::NotFound, text));
    }
    let path = folder.join(NAME);
    let claim = |entry: &Entry| {
        let Some(mut claim) = Claim::take(&path)? else { return Ok(None) };
        let leader = Leader::open()?;
        claim.file.set_len(0)?;
        claim.file.write_all(leader.id().as_bytes())?;
        leader.lead_as(entry).map(Some)
    };
    let met = meet::meet(entry, claim, || find(&path));
    if met.is_err() {
        remove_if_dead(&path, DYING);
    }
    met
}

/// Maximum time between the moment when a dying process's connections close and the moment when its
/// locks do. The kernel closes descriptors one after another.
const DYING: Duration = Duration::from_millis(100);

/// Removes the file of a rank 0 that has died, or that dies within this time. A living rank 0 still
/// holds the lock.
pub(super) fn remove_if_dead(path: &Path, within: Duration) {
    let begun = Instant::now();
    while matches!(Claim::take(path), Ok(None)) && begun.elapsed() < within {
        sleep(PAUSE);
    }
}

struct Claim {
    path: PathBuf,
    file: File,
}

impl Claim {
    fn take(path: &Path) -> io::Result<Option<Claim>> {
        let file = open(OpenOptions::new().write(true).create(true).mode(0o600), path)?;
        // SAFETY: `file` keeps the descriptor open.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
        }
        // The file contains the cookie. An older file may have a looser mode.
        file.set_permissions(fs::Permissions::from_mode(0o600))?;
        let ours = file.metadata()?;
        // The previous owner may have removed the file between our open and our lock.
        let same = fs::metadata(path)
            .is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino()));
        Ok(same.then(|| Claim { path: path.to_owned(), file }))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let named =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let file = options.custom_flags(flags).open(path).map_err(named)?;
    // SAFETY: the call takes no pointers and cannot fail.
    let user = unsafe { libc::geteuid() };
    let there = file.metadata()?;
    let refused = match () {
        () if there.uid() != user => "belongs to another user; use a folder of your own",
        () if !there.is_file() || there.nlink() > 1 => "is not a file of its own; remove it",
        () => return Ok(file),
    };
    let text = format!("job file refused: {} {refused}", path.display());
    Err(io::Error::new(ErrorKind::PermissionDenied, text))
}

fn find(path: &Path) -> io::Result<(Vec<SocketAddr>, Cookie)> {
    let file = open(OpenOptions::new().read(true), path)?;
    let mut bytes = vec![];
    file.take(ID_LEN as u64 + 1).read_to_end(&mut bytes)?;
    let id = UniqueId::from_bytes(&bytes)?;
    Ok((id.addresses(), id.cookie()))
}
