//! Reads and sets the processors that may run the calling thread. Nothing here blocks.

use core::{ffi::c_int, fmt, mem};

use crate::errno::Errno;

/// A set of processors below [`CpuSet::MAX`], in the kernel's numbering.
#[derive(Clone, Copy)]
pub struct CpuSet(libc::cpu_set_t);

impl CpuSet {
    /// Upper bound of processor numbers. [`allowed`] and [`allow`] fail with [`Errno::EINVAL`] on a
    /// kernel with more processors.
    pub const MAX: usize = libc::CPU_SETSIZE as usize;

    /// Creates an empty set.
    pub fn empty() -> Self {
        // SAFETY: `cpu_set_t` is an array of integers, so zero bytes are valid.
        Self(unsafe { mem::zeroed() })
    }

    /// Adds a processor. Ignores a processor number of [`CpuSet::MAX`] or more.
    #[doc(alias = "CPU_SET")]
    pub fn insert(&mut self, cpu: usize) {
        if cpu < Self::MAX {
            // SAFETY: the number was just checked to be inside the set.
            unsafe { libc::CPU_SET(cpu, &mut self.0) }
        }
    }

    /// Returns whether the set contains a processor.
    #[doc(alias = "CPU_ISSET")]
    pub fn contains(&self, cpu: usize) -> bool {
        // SAFETY: the comparison before `&&` ensures that the number is inside the set.
        cpu < Self::MAX && unsafe { libc::CPU_ISSET(cpu, &self.0) }
    }

    /// Returns the number of processors in the set.
    #[doc(alias = "CPU_COUNT")]
    pub fn count(&self) -> usize {
        // SAFETY: the reference makes the set valid for reading.
        unsafe { libc::CPU_COUNT(&self.0) as usize }
    }

    /// Returns the processors in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        (0..Self::MAX).filter(|cpu| self.contains(*cpu))
    }
}

impl fmt::Debug for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

const THIS_THREAD: c_int = 0;

/// Returns the processors that may run the calling thread.
///
/// # Errors
///
/// [`Errno::EINVAL`] if the kernel has more processors than [`CpuSet::MAX`].
#[doc(alias = "sched_getaffinity")]
pub fn allowed() -> Result<CpuSet, Errno> {
    let mut set = CpuSet::empty();
    // SAFETY: the set is borrowed mutably, and its size is passed with it.
    Errno::check(unsafe {
        libc::sched_getaffinity(THIS_THREAD, size_of::<libc::cpu_set_t>(), &mut set.0)
    })?;
    Ok(set)
}

/// Restricts the calling thread to the processors of `set`.
///
/// # Errors
///
/// [`Errno::EINVAL`] if no processor of `set` exists, or the thread's cpuset allows none of them.
#[doc(alias = "sched_setaffinity")]
pub fn allow(set: &CpuSet) -> Result<(), Errno> {
    // SAFETY: the set is borrowed, and its size is passed with it.
    Errno::check(unsafe {
        libc::sched_setaffinity(THIS_THREAD, size_of::<libc::cpu_set_t>(), &set.0)
    })
    .map(drop)
}

/// Pins the calling thread to one processor.
///
/// # Errors
///
/// The errors of [`allow`].
pub fn pin(cpu: usize) -> Result<(), Errno> {
    let mut set = CpuSet::empty();
    set.insert(cpu);
    allow(&set)
}

/// Returns the processor that runs the calling thread now.
///
/// # Errors
///
/// [`Errno::ENOSYS`] if the kernel cannot tell.
#[doc(alias = "sched_getcpu")]
pub fn current() -> Result<usize, Errno> {
    // SAFETY: the call has no arguments.
    Errno::check(unsafe { libc::sched_getcpu() }).map(|cpu| cpu as usize)
}
