//! A list of this process under a lock. A forked child starts with an empty list, because another
//! thread of its parent may have held the lock at the fork, and nothing would ever unlock it in the
//! child.

use std::collections::VecDeque;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum number of generations of forked processes that each have a list of their own. Later
/// generations share the last list.
const DEPTH: usize = 8;

/// One list for each ancestor, the oldest first, then the list of this process.
pub(crate) struct PerProcess<T> {
    /// The process that owns the list with the same index, or 0.
    owners: [AtomicU32; DEPTH],
    lists: [Mutex<VecDeque<T>>; DEPTH],
}

impl<T> PerProcess<T> {
    pub const fn new() -> Self {
        PerProcess {
            owners: [const { AtomicU32::new(0) }; DEPTH],
            lists: [const { Mutex::new(VecDeque::new()) }; DEPTH],
        }
    }

    /// Locks the list. Ignores poisoning, so a panic under this lock must leave it consistent. Slow
    /// path: makes a system call.
    pub fn lock(&self) -> MutexGuard<'_, VecDeque<T>> {
        let own = process::id();
        // Relaxed: the lists are always initialized, and their locks order the accesses.
        let relaxed = Ordering::Relaxed;
        let claim = |owner: &AtomicU32| owner.compare_exchange(0, own, relaxed, relaxed);
        let is_own = |owner| claim(owner).map_or_else(|owner| owner == own, |_| true);
        let at = self.owners.iter().position(is_own).unwrap_or(DEPTH - 1);
        self.lists[at].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_child_forked_under_the_lock_has_state_of_its_own() {
        static STATE: PerProcess<u32> = PerProcess::new();
        STATE.lock().push_back(7);
        let held = STATE.lock();
        let mut status = -1;
        // SAFETY: the child locks and allocates, which glibc permits after a fork. An alarm ends it
        // if it waits for the lock, and it never returns into the test. `status` is writable.
        let child = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::alarm(10);
                STATE.lock().push_back(8);
                libc::_exit(i32::from(*STATE.lock() != [8]));
            }
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            child
        };
        assert!(child > 0 && status == 0, "{status:#x}");
        drop(held);
        thread::spawn(|| assert_eq!(*STATE.lock(), [7])).join().unwrap();
    }
}
