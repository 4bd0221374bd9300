//! `membarrier(2)`: runs a full memory barrier on every processor that runs a registered process.
//!
//! The call takes microseconds. The rare side of a store-then-load race makes this call, so that
//! the frequent side needs only a compiler fence.

use core::ffi::c_int;

use crate::{errno::Errno, futex::Scope};

const GLOBAL_EXPEDITED: c_int = 1 << 1;
const REGISTER_GLOBAL_EXPEDITED: c_int = 1 << 2;
const PRIVATE_EXPEDITED: c_int = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: c_int = 1 << 4;

/// Registers this process, so that [`all`] of the same scope reaches it. With the private scope,
/// only threads of this process reach it. With the shared scope, every process does. Registering
/// again does nothing.
///
/// # Errors
///
/// [`Errno::ENOSYS`] or [`Errno::EINVAL`] on old kernels, [`Errno::EPERM`] in some sandboxes.
#[doc(alias = "MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED")]
#[doc(alias = "MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED")]
pub fn register(scope: Scope) -> Result<(), Errno> {
    call(match scope {
        Scope::Private => REGISTER_PRIVATE_EXPEDITED,
        Scope::Shared => REGISTER_GLOBAL_EXPEDITED,
    })
}

/// Runs a full barrier on the calling thread and on other processors. With the private scope it
/// covers every processor that runs a thread of this process. With the shared scope it covers every
/// processor that runs a registered process.
///
/// # Errors
///
/// The errors of [`register`], and [`Errno::EPERM`] for the private scope if this process has not
/// registered.
#[doc(alias = "MEMBARRIER_CMD_PRIVATE_EXPEDITED")]
#[doc(alias = "MEMBARRIER_CMD_GLOBAL_EXPEDITED")]
pub fn all(scope: Scope) -> Result<(), Errno> {
    call(match scope {
        Scope::Private => PRIVATE_EXPEDITED,
        Scope::Shared => GLOBAL_EXPEDITED,
    })
}

fn call(command: c_int) -> Result<(), Errno> {
    // SAFETY: the call accesses no memory of this process.
    Errno::check(unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) }).map(drop)
}
