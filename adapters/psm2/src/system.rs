//! The system calls that the lock of an endpoint makes. The models of the lock replace them.

#[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
use std::arch::asm;
use std::sync::atomic::{Ordering, compiler_fence};
use std::thread;
use std::time::Duration;

use fishplate::sys::{futex::Scope, membarrier};

const SPINS: u32 = 100;
const YIELDED: u32 = 200;
const SLEEP: Duration = Duration::from_micros(50);

/// Returns a number that identifies this thread. Another thread has the same number only if it
/// begins after this thread has ended.
#[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
#[inline(always)]
pub(crate) fn me() -> u64 {
    let me;
    // A call to `pthread_self` would make the caller save all that it holds in registers.
    // SAFETY: the ABI of x86-64 ELF keeps the address of the thread's control block, which is
    // unique to the thread, in the word at offset 0 of `fs`. Reading it has no effects.
    unsafe { asm!("mov {}, fs:0", out(reg) me, options(pure, readonly, nostack, preserves_flags)) };
    me
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux", not(miri))))]
#[inline(always)]
pub(crate) fn me() -> u64 {
    // SAFETY: the call has no preconditions.
    unsafe { libc::pthread_self() }
}

/// Prepares this process for [`heavy_barrier`]. Returns `false` if the kernel refuses.
pub(crate) fn register() -> bool {
    membarrier::register(Scope::Private).is_ok()
}

/// Orders a store before a load, as seen by threads that call [`heavy_barrier`]. This function
/// orders them for the compiler, and the other thread's `heavy_barrier` orders them for the
/// processor.
#[inline(always)]
pub(crate) fn light_barrier() {
    compiler_fence(Ordering::SeqCst);
}

/// Orders a store before a load, in this thread and in threads that call [`light_barrier`]. Returns
/// `false` if the kernel refuses.
pub(crate) fn heavy_barrier() -> bool {
    membarrier::all(Scope::Private).is_ok()
}

pub(crate) fn pause(before: u32) {
    match before {
        0..SPINS => std::hint::spin_loop(),
        SPINS..YIELDED => thread::yield_now(),
        _ => thread::sleep(SLEEP),
    }
}
