//! The system calls that the lock of an endpoint makes. The models of the lock replace them.

use std::sync::atomic::{Ordering, compiler_fence};
use std::thread;
use std::time::Duration;

use fishplate::sys::{futex::Scope, membarrier};

const SPINS: u32 = 100;
const YIELDED: u32 = 200;
const SLEEP: Duration = Duration::from_micros(50);

/// Returns a number that identifies this thread. Another thread has the same number only if it
/// begins after this thread has ended.
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
