//! Lets a node with libfabric rails, or a program with an event loop, sleep on a set of descriptors
//! (`epoll(7)`). The set contains the completion queues, the sockets of peers on this host, and an
//! eventfd.
//!
//! Setup and sleeping make system calls. Only [`Sleep::park`] blocks. The event page tells peers on
//! this host that a futex does not wake this process, so they send a packet instead.

use std::cell::Cell;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use fishplate_core::sync::event::EventCount;
use fishplate_core::sync::host::{Host, Woken};
use fishplate_sys::Errno;
use fishplate_sys::fabric::cq::CqWait;

const NAP_NS: u64 = 100_000;

/// Number of times in a row that a provider advises against sleeping before the node sleeps for
/// [`NAP_NS`] anyway.
const REFUSALS: u32 = 16;

pub(super) struct Sleep {
    set: Arc<OwnedFd>,
    /// Readable after [`ring`](Self::ring).
    called: OwnedFd,
    queues: Vec<CqWait>,
    refused: AtomicU32,
}

/// Marks the events of the eventfd. All other events have the mark 0.
const CALLED: u64 = 1;

impl Sleep {
    /// Creates a set with these queues.
    ///
    /// # Safety
    /// The queues' rails are open, and no other thread uses them during the call.
    pub unsafe fn new(queues: Vec<CqWait>) -> Result<Sleep, Errno> {
        // SAFETY: each call returns a new descriptor or -1.
        let (set, called) = unsafe {
            (
                owned(libc::epoll_create1(libc::EPOLL_CLOEXEC))?,
                owned(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK))?,
            )
        };
        add_called(&set, called.as_raw_fd())?;
        for queue in &queues {
            // SAFETY: our caller guarantees that the rails are open and that no other thread uses
            // them.
            unsafe { queue.join(set.as_raw_fd()) }?;
        }
        Ok(Sleep { set: Arc::new(set), called, queues, refused: AtomicU32::new(0) })
    }

    /// Returns the set. Links of peers add their sockets to it.
    pub fn set(&self) -> Arc<OwnedFd> {
        self.set.clone()
    }

    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }

    /// Ends the current sleep, or the next one.
    pub fn ring(&self) {
        // SAFETY: `ONE` is readable for its eight bytes. If the call fails, the counter is at its
        // maximum, and the descriptor is readable.
        unsafe { libc::write(self.called.as_raw_fd(), (&raw const ONE).cast(), size_of_val(&ONE)) };
    }

    /// Runs all phases of a sleep, like [`Park::park`](fishplate_core::sync::event::Park::park). A
    /// notification of one of `wait_objects` ends the sleep. `look` looks for work. If it finds
    /// none, it returns the maximum time to sleep in nanoseconds.
    pub fn park<H: Host + ?Sized, const N: usize>(
        &self,
        wait_objects: [&EventCount; N],
        host: &H,
        look: impl FnOnce() -> Option<u64>,
    ) -> Option<Woken> {
        let timeout_ns = Cell::new(0);
        let work = || match look() {
            Some(ns) => {
                timeout_ns.set(ns);
                false
            }
            None => true,
        };
        EventCount::park_elsewhere(wait_objects, host, work, || self.sleep(timeout_ns.get()))
    }

    /// Returns the maximum length of a sleep of `timeout_ns`, in nanoseconds. `None`: a provider
    /// asks to be polled first.
    ///
    /// # Safety
    /// The node's rails are open, and no other thread uses them during the call.
    pub unsafe fn advised(&self, timeout_ns: u64) -> Option<u64> {
        // SAFETY: our caller guarantees that no other thread uses the rails.
        let advised = self.queues.iter().all(|queue| unsafe { queue.may_sleep() });
        // Relaxed: one thread at a time changes this counter, and it publishes no other data.
        let refused =
            if advised { 0 } else { self.refused.load(Ordering::Relaxed).saturating_add(1) };
        self.refused.store(refused, Ordering::Relaxed);
        match refused {
            0 => Some(timeout_ns),
            1..REFUSALS => None,
            _ => Some(timeout_ns.min(NAP_NS)),
        }
    }

    fn sleep(&self, timeout_ns: u64) -> Woken {
        let mut set = libc::pollfd { fd: self.set.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let timeout = libc::timespec {
            tv_sec: (timeout_ns / 1_000_000_000).min(i32::MAX as u64) as libc::time_t,
            tv_nsec: (timeout_ns % 1_000_000_000) as libc::c_long,
        };
        // SAFETY: `set` is one entry, `timeout` is a valid time, and the null mask changes no
        // signals. A failure only ends the sleep early.
        let readable = unsafe { libc::ppoll(&mut set, 1, &timeout, std::ptr::null()) };
        if readable == 0 {
            return Woken::Deadline;
        }
        self.drain();
        Woken::Called
    }

    /// Makes the set unreadable until the next event. Reads the eventfd only after a
    /// [`ring`](Self::ring), because each system call here delays a wake-up.
    fn drain(&self) {
        let mut told = [libc::epoll_event { events: 0, u64: 0 }; 16];
        // SAFETY: `told` has room for the number of events passed.
        let count = unsafe {
            let most = told.len() as libc::c_int;
            libc::epoll_wait(self.set.as_raw_fd(), told.as_mut_ptr(), most, 0)
        };
        if told[..count.max(0) as usize].iter().any(|event| event.u64 == CALLED) {
            let mut rings = 0u64;
            // SAFETY: `rings` has room for eight bytes.
            unsafe {
                let into = (&raw mut rings).cast();
                libc::read(self.called.as_raw_fd(), into, size_of_val(&rings));
            }
        }
    }

    /// Prepares for a wait on the set's descriptor that the caller performs, for example with
    /// `poll(2)`. `look` looks for work. If it finds none, it returns the maximum time to wait in
    /// nanoseconds. Returns that time; `None` if there is work, or if a provider must be polled
    /// first.
    ///
    /// # Safety
    /// The same as for [`advised`](Self::advised).
    pub unsafe fn arm<H: Host + ?Sized>(
        &self,
        event: &EventCount,
        host: &H,
        look: impl FnOnce() -> Option<u64>,
    ) -> Option<u64> {
        // Drains the set before it looks for work. Later events make the set readable again.
        self.drain();
        let mut timeout_ns = None;
        let busy = || {
            timeout_ns = look();
            timeout_ns.is_none()
        };
        if !EventCount::arm_elsewhere([event], host, busy) {
            return None;
        }
        // SAFETY: our caller guarantees the same contract.
        timeout_ns.and_then(|timeout_ns| unsafe { self.advised(timeout_ns) })
    }
}

static ONE: u64 = 1;

/// # Safety
/// `fd` is new, or negative if the call that made it has just failed.
unsafe fn owned(fd: RawFd) -> Result<OwnedFd, Errno> {
    // SAFETY: our caller guarantees that a descriptor that is not negative is new.
    if fd < 0 { Err(Errno::last()) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
}

fn add_called(set: &OwnedFd, fd: RawFd) -> Result<(), Errno> {
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: CALLED };
    // SAFETY: both descriptors are open, and `event` is only read during the call.
    match unsafe { libc::epoll_ctl(set.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut event) } {
        0 => Ok(()),
        _ => Err(Errno::last()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fishplate_sys::LinuxHost;

    #[test]
    fn a_ring_ends_one_sleep() {
        // SAFETY: there are no rails.
        let sleep = unsafe { Sleep::new(vec![]) }.unwrap();
        let (host, event) = (LinuxHost::shared(), EventCount::new());
        let park = |ns| sleep.park([&event], &host, || Some(ns));
        sleep.ring();
        sleep.ring();
        assert_eq!(park(20_000_000_000), Some(Woken::Called));
        assert_eq!(park(1_000_000), Some(Woken::Deadline), "both rings ended one sleep");
        sleep.ring();
        sleep.drain();
        assert_eq!(park(1_000_000), Some(Woken::Deadline), "the ring was drained");
    }
}
