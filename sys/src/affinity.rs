//! Which processors the calling thread may run on. Nothing here blocks.

use core::{ffi::c_int, fmt, mem};

use crate::errno::Errno;

/// A set of processors, numbered as the kernel does, below [`CpuSet::MAX`].
#[derive(Clone, Copy)]
pub struct CpuSet(libc::cpu_set_t);

impl CpuSet {
    /// Processors beyond this number are ignored; a kernel with more refuses the calls below with
    /// [`Errno::EINVAL`].
    pub const MAX: usize = libc::CPU_SETSIZE as usize;

    /// No processor.
    pub fn empty() -> Self {
        // SAFETY: a set is an array of integers, for which zero is valid.
        Self(unsafe { mem::zeroed() })
    }

    /// Adds a processor. Numbers from [`CpuSet::MAX`] on change nothing.
    #[doc(alias = "CPU_SET")]
    pub fn insert(&mut self, cpu: usize) {
        if cpu < Self::MAX {
            // SAFETY: the number is inside the set, as just checked.
            unsafe { libc::CPU_SET(cpu, &mut self.0) }
        }
    }

    /// Returns whether the set holds a processor.
    #[doc(alias = "CPU_ISSET")]
    pub fn contains(&self, cpu: usize) -> bool {
        // SAFETY: the number is inside the set, as checked first.
        cpu < Self::MAX && unsafe { libc::CPU_ISSET(cpu, &self.0) }
    }

    /// Returns the number of processors in the set.
    #[doc(alias = "CPU_COUNT")]
    pub fn count(&self) -> usize {
        // SAFETY: the set is valid for reading.
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

/// The calling thread.
const THIS_THREAD: c_int = 0;

/// Returns the processors on which the calling thread may run.
///
/// # Errors
///
/// [`Errno::EINVAL`] if the kernel has more processors than [`CpuSet::MAX`].
#[doc(alias = "sched_getaffinity")]
pub fn allowed() -> Result<CpuSet, Errno> {
    let mut set = CpuSet::empty();
    // SAFETY: the set is valid for writing, and its size is the one given.
    Errno::check(unsafe { libc::sched_getaffinity(THIS_THREAD, size_of::<libc::cpu_set_t>(), &mut set.0) })?;
    Ok(set)
}

/// Restricts the calling thread to the processors of `set`.
///
/// # Errors
///
/// [`Errno::EINVAL`] if none of them exists or the thread's cpuset allows none.
#[doc(alias = "sched_setaffinity")]
pub fn allow(set: &CpuSet) -> Result<(), Errno> {
    // SAFETY: the set is valid for reading, and its size is the one given.
    Errno::check(unsafe { libc::sched_setaffinity(THIS_THREAD, size_of::<libc::cpu_set_t>(), &set.0) })
        .map(drop)
}

/// Pins the calling thread to one processor.
///
/// # Errors
///
/// As [`allow`].
pub fn pin(cpu: usize) -> Result<(), Errno> {
    let mut set = CpuSet::empty();
    set.insert(cpu);
    allow(&set)
}

/// Returns the processor on which the calling thread runs now.
///
/// # Errors
///
/// [`Errno::ENOSYS`] if the kernel cannot tell.
#[doc(alias = "sched_getcpu")]
pub fn current() -> Result<usize, Errno> {
    // SAFETY: the call has no arguments.
    Errno::check(unsafe { libc::sched_getcpu() }).map(|cpu| cpu as usize)
}
