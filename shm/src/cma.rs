//! Direct copies between the private memory of two processes: `process_vm_readv(2)` and
//! `process_vm_writev(2)`. One system call copies up to 64 ranges and at most about 2 GiB. Nothing
//! allocates, but the call can block if another program (`userfaultfd`, FUSE) provides the peer's
//! pages. [`ShmConfig::force_staging`](crate::ShmConfig::force_staging) avoids that.
//!
//! The process ID names the peer, but the kernel may reuse it after the peer exits. So callers
//! check the peer's pidfd and socket shortly before each copy.

use std::fs::{self, File};
use std::ptr::{self, NonNull};

use crate::segment::errno;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Put,
    Get,
}

/// Why a copy failed, entirely or in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CmaError {
    /// The kernel does not copy from or to this process, or the process has ended. The lane can
    /// carry the data instead. Some bytes may have been copied.
    Refused,
    /// For example, memory is not mapped. Some bytes may have been copied.
    Failed(i32),
}

/// Maximum number of ranges per system call.
pub(crate) const PIECES: usize = 64;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    pub local: NonNull<u8>,
    pub remote: u64,
    pub len: usize,
}

impl Range {
    pub const NONE: Range = Range { local: NonNull::dangling(), remote: 0, len: 0 };
}

/// Copies the first `N` ranges, at most [`PIECES`], and ignores the rest.
///
/// # Safety
/// Each `local` is valid for `len` bytes: for reads with [`Way::Put`], for writes with
/// [`Way::Get`].
pub(crate) unsafe fn copy<const N: usize>(
    pid: i32,
    way: Way,
    ranges: &[Range],
) -> Result<(), CmaError> {
    const { assert!(N <= PIECES) };
    const EMPTY: libc::iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
    let (mut here, mut there) = ([EMPTY; N], [EMPTY; N]);
    let mut left = 0;
    for ((range, here), there) in ranges.iter().zip(&mut here).zip(&mut there) {
        *here = libc::iovec { iov_base: range.local.as_ptr().cast(), iov_len: range.len };
        *there = libc::iovec { iov_base: range.remote as usize as *mut _, iov_len: range.len };
        left += range.len;
    }
    let count = ranges.len().min(N);
    let (mut here, mut there) = (&mut here[..count], &mut there[..count]);
    while left != 0 {
        let (ours, theirs, count) = (here.as_ptr(), there.as_ptr(), here.len() as libc::c_ulong);
        // SAFETY: both pointers come from slices of `count` entries. In this process the kernel
        // accesses only the `local` ranges, which are valid by this function's contract. It checks
        // the remote addresses itself.
        let n = unsafe {
            match way {
                Way::Put => libc::process_vm_writev(pid, ours, count, theirs, count, 0),
                Way::Get => libc::process_vm_readv(pid, ours, count, theirs, count, 0),
            }
        };
        match n {
            1.. => {
                left -= n as usize;
                if left != 0 {
                    (here, there) = (skip(here, n as usize), skip(there, n as usize));
                }
            }
            0 => return Err(CmaError::Failed(libc::EFAULT)),
            _ => match errno() {
                libc::EINTR => {}
                libc::EPERM | libc::ENOSYS | libc::ESRCH => return Err(CmaError::Refused),
                code => return Err(CmaError::Failed(code)),
            },
        }
    }
    Ok(())
}

#[cold]
fn skip(mut ranges: &mut [libc::iovec], mut done: usize) -> &mut [libc::iovec] {
    while ranges.first().is_some_and(|first| first.iov_len <= done) {
        done -= ranges[0].iov_len;
        ranges = &mut ranges[1..];
    }
    if let Some(first) = ranges.first_mut() {
        first.iov_base = first.iov_base.wrapping_byte_add(done);
        first.iov_len -= done;
    }
    ranges
}

/// Returns whether the kernel permits copies from and to the memory of another process. Touches
/// none of that memory, because the process could delay a copy through pages that another program
/// provides.
pub(crate) fn is_permitted(pid: i32) -> bool {
    // The kernel makes the same check to open this file as to copy. But the check for a copy uses
    // the real user and group.
    pid > 0 && is_possible() && File::open(format!("/proc/{pid}/mem")).is_ok()
}

fn is_possible() -> bool {
    // SAFETY: the calls have no arguments and cannot fail.
    let (pid, is_itself) = unsafe {
        (libc::getpid(), libc::getuid() == libc::geteuid() && libc::getgid() == libc::getegid())
    };
    // In a new PID namespace, `/proc` may still show the processes of another namespace.
    let sees_itself = || {
        fs::read_link("/proc/self").is_ok_and(|link| link.as_os_str() == pid.to_string().as_str())
    };
    // A filter of system calls may forbid the copy.
    let (from, mut to) = (0u8, 1u8);
    let range = Range { local: NonNull::from(&mut to), remote: (&raw const from) as u64, len: 1 };
    // SAFETY: `local` points to a local variable of one byte.
    let copies = || unsafe { copy::<1>(pid, Way::Get, &[range]) }.is_ok();
    is_itself && sees_itself() && copies()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_goes_on_where_it_was_cut_short() {
        for (done, left) in [
            (0, &[(0, 3), (9, 0), (20, 5)][..]),
            (2, &[(2, 1), (9, 0), (20, 5)]),
            (3, &[(20, 5)]),
            (7, &[(24, 1)]),
            (8, &[]),
        ] {
            let range =
                |(at, len): (usize, usize)| libc::iovec { iov_base: at as *mut _, iov_len: len };
            let mut ranges = [(0, 3), (9, 0), (20, 5)].map(range);
            let found: Vec<_> =
                skip(&mut ranges, done).iter().map(|it| (it.iov_base.addr(), it.iov_len)).collect();
            assert_eq!(found, left, "after {done} bytes");
        }
    }

    /// Reads a byte of another process by a copy.
    fn is_copied(pid: i32, remote: u64) -> bool {
        let mut byte = 0;
        let range = Range { local: NonNull::from(&mut byte), remote, len: 1 };
        // SAFETY: `local` points to a local variable of one byte.
        unsafe { copy::<1>(pid, Way::Get, &[range]) }.is_ok()
    }

    /// Runs `answer` in a forked child, and returns the result.
    fn in_a_child(answer: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child makes system calls and allocates, which glibc permits after a fork. It
        // exits in this block.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(i32::from(answer()));
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            assert!(libc::WIFEXITED(status), "{status}");
            libc::WEXITSTATUS(status) == 1
        }
    }

    static KNOWN: u8 = 7;

    #[test]
    fn what_is_permitted_is_what_a_copy_succeeds_at() {
        let (this, known) = (std::process::id() as i32, (&raw const KNOWN) as u64);
        assert_eq!(is_permitted(this), is_copied(this, known));
        assert!(!is_permitted(0) && !is_permitted(-1) && !is_permitted(i32::MAX));
        let agrees = |prepare: &dyn Fn() -> bool| {
            in_a_child(|| prepare() && is_permitted(this) == is_copied(this, known))
        };
        assert!(agrees(&|| true), "a child of the same user");
        // SAFETY: the calls take no pointers. Each runs in its own child.
        unsafe {
            if libc::geteuid() != 0 {
                return println!("SKIPPED other users: not the superuser");
            }
            assert!(agrees(&|| libc::setuid(65_534) == 0), "a child of another user");
            assert!(in_a_child(|| libc::setuid(65_534) == 0 && !is_permitted(this)));
            // The real user may not copy, although the effective user may open the file.
            assert!(in_a_child(|| libc::setresuid(65_534, 0, 0) == 0 && !is_permitted(this)));
        }
    }

    #[test]
    fn more_ranges_are_copied_than_bytes_lie_together() {
        let from: Vec<u8> = (0..=255).collect();
        let mut to = vec![0u8; 256];
        let base = to.as_mut_ptr();
        let range = |n: usize| Range {
            local: NonNull::from(&from[4 * n..]).cast(),
            // SAFETY: `n` is at most 63, so the offset is at most 252, within the vector.
            remote: unsafe { base.add(252 - 4 * n) } as u64,
            len: n % 4 + 1,
        };
        let ranges: Vec<_> = (0..PIECES).map(range).collect();
        let pid = std::process::id() as i32;
        // SAFETY: every `local` points into a live vector, within its length.
        match unsafe { copy::<PIECES>(pid, Way::Put, &ranges) } {
            Err(CmaError::Refused) => return println!("SKIPPED: the kernel refuses it here"),
            copied => assert_eq!(copied, Ok(())),
        }
        for n in 0..PIECES {
            assert_eq!(to[252 - 4 * n..][..n % 4 + 1], from[4 * n..][..n % 4 + 1], "piece {n}");
        }
    }
}
