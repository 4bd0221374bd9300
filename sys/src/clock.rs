//! Clocks. Only [`thread_cpu_ns`] makes a system call.

use core::mem::MaybeUninit;

use crate::errno::Errno;

/// Returns nanoseconds since a fixed moment, which is the same for all processes of this machine.
/// The clock never goes backwards. Reads it through the vDSO.
#[doc(alias = "clock_gettime")]
#[inline]
pub fn monotonic_ns() -> u64 {
    // `CLOCK_MONOTONIC` exists on every Linux, so the call cannot fail.
    read(libc::CLOCK_MONOTONIC).unwrap_or(0)
}

/// Returns the processor time that the calling thread has used, in nanoseconds.
///
/// # Errors
///
/// The error of `clock_gettime(2)`; none is known to occur.
#[doc(alias = "CLOCK_THREAD_CPUTIME_ID")]
pub fn thread_cpu_ns() -> Result<u64, Errno> {
    read(libc::CLOCK_THREAD_CPUTIME_ID)
}

#[inline]
fn read(clock: libc::clockid_t) -> Result<u64, Errno> {
    let mut time = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: `time` is valid for writing a timespec.
    Errno::check(unsafe { libc::clock_gettime(clock, time.as_mut_ptr()) })?;
    // SAFETY: the call has succeeded, so the kernel has written the value.
    let time = unsafe { time.assume_init() };
    Ok((time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64))
}

pub(crate) fn timespec(ns: u64) -> libc::timespec {
    libc::timespec {
        // At most 18.4e9 seconds, which fit a 64-bit `time_t`.
        tv_sec: (ns / 1_000_000_000) as libc::time_t,
        tv_nsec: (ns % 1_000_000_000) as _,
    }
}
