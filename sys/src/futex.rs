//! `futex(2)`: sleeps while a word of memory has a value, and wakes sleepers. [`wait`] and
//! [`wait_two`] block, at most until a timeout. [`wake`] does not block.
//!
//! The kernel identifies a private futex by its address. Such a futex is cheaper, and works between
//! threads of one process. The kernel identifies a shared futex by the mapped file or memfd, so it
//! works between processes. Sleeper and waker must use the same scope: a private wake-up does not
//! reach a shared sleeper.

use core::{ffi::c_long, ptr};

use fishplate_core::sync::primitive::AtomicU32;
use static_assertions::const_assert_eq;

use crate::{clock, errno::Errno};

/// The scope of a futex: which threads may wake each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Threads of one process.
    Private,
    /// All threads of processes that map the word.
    Shared,
}

/// An entry of the array that `futex_waitv(2)` takes.
#[repr(C)]
struct WaitEntry {
    value: u64,
    address: u64,
    flags: u32,
    reserved: u32,
}

const_assert_eq!(size_of::<WaitEntry>(), 24);

/// `FUTEX2_SIZE_U32`: the word is 32 bits wide.
const SIZE_U32: u32 = 2;
/// `FUTEX2_PRIVATE`.
const PRIVATE: u32 = 128;

impl Scope {
    fn flag(self) -> i32 {
        match self {
            Self::Private => libc::FUTEX_PRIVATE_FLAG,
            Self::Shared => 0,
        }
    }
}

/// Sleeps while `*word == expected`, for at most `timeout_ns`. Returns `Ok` after a wake-up.
///
/// # Errors
///
/// [`Errno::EAGAIN`] if the word has another value, [`Errno::ETIMEDOUT`] after the timeout,
/// [`Errno::EINTR`] after a signal.
#[doc(alias = "FUTEX_WAIT")]
pub fn wait(scope: Scope, word: &AtomicU32, expected: u32, timeout_ns: u64) -> Result<(), Errno> {
    let timeout = clock::timespec(timeout_ns);
    // SAFETY: the word is borrowed, so it stays mapped during the call. The kernel only reads it,
    // atomically.
    let returned = unsafe {
        libc::syscall(
            libc::SYS_futex,
            word as *const AtomicU32,
            libc::FUTEX_WAIT | scope.flag(),
            expected,
            &raw const timeout,
        )
    };
    Errno::check(returned).map(drop)
}

/// Sleeps while both words have their expected values, for at most `timeout_ns`. Returns `Ok` after
/// a wake-up on either word.
///
/// # Errors
///
/// The errors of [`wait`], and [`Errno::ENOSYS`] before Linux 5.16.
#[doc(alias = "futex_waitv")]
pub fn wait_two(scope: Scope, words: [(&AtomicU32, u32); 2], timeout_ns: u64) -> Result<(), Errno> {
    let flags = match scope {
        Scope::Private => SIZE_U32 | PRIVATE,
        Scope::Shared => SIZE_U32,
    };
    let entries = words.map(|(word, expected)| WaitEntry {
        value: expected.into(),
        address: ptr::from_ref(word).expose_provenance() as u64,
        flags,
        reserved: 0,
    });
    // Unlike `futex`, `futex_waitv` takes an absolute time.
    let until = clock::timespec(clock::monotonic_ns().saturating_add(timeout_ns));
    // SAFETY: the pointer leads to two entries. Both words are borrowed, so they stay mapped during
    // the call.
    let returned = unsafe {
        libc::syscall(
            libc::SYS_futex_waitv,
            entries.as_ptr(),
            entries.len() as c_long,
            0 as c_long,
            &raw const until,
            c_long::from(libc::CLOCK_MONOTONIC),
        )
    };
    Errno::check(returned).map(drop)
}

/// Wakes all threads that sleep on `word`. Returns the number of woken threads, or zero if the call
/// failed.
#[doc(alias = "FUTEX_WAKE")]
pub fn wake(scope: Scope, word: &AtomicU32) -> u32 {
    // SAFETY: the kernel uses the address only to find sleepers, and does not write the word.
    let returned = unsafe {
        libc::syscall(
            libc::SYS_futex,
            word as *const AtomicU32,
            libc::FUTEX_WAKE | scope.flag(),
            i32::MAX,
        )
    };
    Errno::check(returned).map_or(0, |woken| woken as u32)
}
