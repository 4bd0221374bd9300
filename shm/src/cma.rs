//! Direct copies between the private memory of two processes: `process_vm_readv(2)` and
//! `process_vm_writev(2)`. Makes one system call per GiB, and allocates nothing. A copy blocks if
//! the peer's pages come from another program (`userfaultfd`, FUSE): see
//! [`ShmConfig::force_staging`](crate::ShmConfig::force_staging).
//! Processes are named by process ID, which the kernel may reuse after an exit. Callers check the
//! peer's pidfd and socket shortly before each copy.

use std::ptr::NonNull;

use crate::segment::errno;

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From this process into the peer's memory.
    Put,
    /// From the peer's memory into this process.
    Get,
}

/// Why a copy failed, entirely or in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CmaError {
    /// The kernel does not permit it between these two processes. Nothing was copied.
    Refused,
    /// The process is gone.
    Gone,
    /// Some of the memory is not mapped, or another error. A part may have been copied.
    Failed(i32),
}

/// Copies `len` bytes between `local` here and address `remote` there.
///
/// # Safety
/// `local` is valid for `len` bytes, readable to put, writable to get.
pub(crate) unsafe fn copy(
    pid: i32,
    way: Way,
    local: NonNull<u8>,
    remote: u64,
    len: usize,
) -> Result<(), CmaError> {
    let mut done = 0;
    while done < len {
        // SAFETY: `done < len`, and our caller guarantees `len` bytes.
        let here = unsafe { local.add(done) };
        let here = libc::iovec { iov_base: here.as_ptr().cast(), iov_len: len - done };
        let there = (remote as usize).wrapping_add(done) as *mut libc::c_void;
        let there = libc::iovec { iov_base: there, iov_len: len - done };
        // SAFETY: one element each. The kernel accesses only `here` in this process, and checks the
        // peer's addresses.
        // and checks addresses there.
        let n = unsafe {
            match way {
                Way::Put => libc::process_vm_writev(pid, &here, 1, &there, 1, 0),
                Way::Get => libc::process_vm_readv(pid, &here, 1, &there, 1, 0),
            }
        };
        match n {
            1.. => done += n as usize,
            0 => return Err(CmaError::Failed(libc::EFAULT)),
            _ => match errno() {
                libc::EINTR => {}
                libc::EPERM | libc::ENOSYS if done == 0 => return Err(CmaError::Refused),
                libc::ESRCH => return Err(CmaError::Gone),
                code => return Err(CmaError::Failed(code)),
            },
        }
    }
    Ok(())
}

/// Reads `N` bytes of another process; `None` if that fails.
pub(crate) fn read<const N: usize>(pid: i32, address: u64) -> Option<[u8; N]> {
    if pid <= 0 {
        return None;
    }
    let mut bytes = [0; N];
    // SAFETY: the array is ours and `N` bytes long.
    unsafe { copy(pid, Way::Get, NonNull::from(&mut bytes).cast(), address, N) }.ok()?;
    Some(bytes)
}
