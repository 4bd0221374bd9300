//! A completion queue. Our side of a read does not block or allocate. Under manual progress the
//! provider makes progress inside these calls.

use alloc::string::String;
use alloc::sync::Arc;
use core::ffi::{c_char, c_int, c_void};
use core::mem::offset_of;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicI32, AtomicPtr, Ordering::Relaxed};

use super::domain::Domain;
use super::error::{CallError, Code};
use super::fabric::TryWait;
use super::library::copy_string;
use super::object;
use super::raw::*;
use super::sockets;
use crate::Errno;

/// A completion entry.
pub type Entry = fi_cq_data_entry;

/// An empty completion entry.
pub const EMPTY: Entry =
    Entry { op_context: ptr::null_mut(), flags: 0, len: 0, buf: ptr::null_mut(), data: 0 };

/// Maximum stored length of a provider's error data, in bytes.
pub const ERROR_DATA: usize = 128;

/// An error completion.
#[derive(Clone, Copy, Debug)]
pub struct CqError {
    /// The context of the failed post, or null.
    pub op_context: *mut c_void,
    /// Flags of the operation.
    pub flags: u64,
    /// libfabric's error code.
    pub code: Code,
    /// The provider's error code.
    pub provider: i32,
    len: usize,
    data: [u8; ERROR_DATA],
}

impl CqError {
    pub(super) const fn of_call(code: Code) -> CqError {
        CqError {
            op_context: ptr::null_mut(),
            flags: 0,
            code,
            provider: 0,
            len: 0,
            data: [0; ERROR_DATA],
        }
    }

    pub(super) const fn has_data(&self) -> bool {
        self.len != 0
    }
}

/// An open completion queue, closed when dropped.
#[derive(Debug)]
pub struct CompletionQueue {
    fid: NonNull<fid_cq>,
    wait: Option<CqWait>,
    domain: Arc<Domain>,
}

/// The wait object of a rail's queue. A thread sleeps on it until the queue has an entry. If the
/// rail replaces its queue, the wait object follows. It does not keep the queue open.
#[derive(Clone, Debug)]
pub struct CqWait(Arc<WaitObject>);

#[derive(Debug)]
struct WaitObject {
    try_wait: TryWait,
    fabric: *mut fid_fabric,
    // All accesses are Relaxed: only the thread that may use the rail reads or writes these fields.
    queue: AtomicPtr<fid_cq>,
    fd: AtomicI32,
    /// A duplicate of the descriptor that [`CqWait::join`] received, or -1.
    set: AtomicI32,
}

// SAFETY: only `may_sleep` uses the pointers, and its caller excludes other threads.
unsafe impl Send for WaitObject {}
// SAFETY: as for `Send`.
unsafe impl Sync for WaitObject {}

impl CqWait {
    fn new(
        try_wait: TryWait,
        fabric: *mut fid_fabric,
        queue: NonNull<fid_cq>,
        fd: c_int,
    ) -> CqWait {
        let (queue, fd, set) =
            (AtomicPtr::new(queue.as_ptr()), AtomicI32::new(fd), AtomicI32::new(-1));
        CqWait(Arc::new(WaitObject { try_wait, fabric, queue, fd, set }))
    }

    /// Adds the queue's descriptor to an `epoll(7)` set, edge-triggered, because `fi_trywait` of
    /// tcp before 1.18 leaves the descriptor readable. The descriptor becomes readable once the
    /// queue may have an entry. If the rail replaces its queue, the set gets the new descriptor.
    /// Call this once.
    ///
    /// # Errors
    /// The error of `fcntl(2)` or `epoll_ctl(2)`.
    ///
    /// # Safety
    /// The rail is open, and no other thread uses it during the call.
    pub unsafe fn join(&self, set: c_int) -> Result<(), Errno> {
        // SAFETY: the call duplicates a descriptor and accesses no memory.
        let set = unsafe { libc::fcntl(set, libc::F_DUPFD_CLOEXEC, 0) };
        if set < 0 {
            return Err(Errno::last());
        }
        self.0.set.store(set, Relaxed);
        self.0.add(self.0.fd.load(Relaxed))
    }

    /// Returns whether a thread may sleep on the descriptor now. If not, poll the rail first. Does
    /// not block; may make system calls.
    ///
    /// # Safety
    /// The rail is open, and no other thread uses it during the call.
    #[doc(alias = "fi_trywait")]
    pub unsafe fn may_sleep(&self) -> bool {
        let WaitObject { try_wait, fabric, queue, .. } = &*self.0;
        let mut object: *mut fid = queue.load(Relaxed).cast();
        // SAFETY: the pointer leads to the queue of the rail, which our caller keeps open, and the
        // queue has a wait object. Our caller excludes other threads. An open queue keeps its
        // fabric open.
        unsafe { try_wait(*fabric, &mut object, 1) == 0 }
    }
}

impl WaitObject {
    fn add(&self, fd: c_int) -> Result<(), Errno> {
        let set = self.set.load(Relaxed);
        let mut event =
            libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: 0 };
        // SAFETY: this value owns the set's descriptor, and `event` is only read during the call.
        match set < 0 || unsafe { libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, &mut event) } == 0 {
            true => Ok(()),
            false => Err(Errno::last()),
        }
    }
}

impl Drop for WaitObject {
    fn drop(&mut self) {
        let set = *self.set.get_mut();
        if set >= 0 {
            // SAFETY: this value owns the descriptor.
            unsafe { libc::close(set) };
        }
    }
}

impl CompletionQueue {
    /// Opens a queue of `size` completions, with a [wait object](Self::wait) if the provider
    /// supports one. Size 0 means the provider's default.
    ///
    /// # Errors
    /// The provider's code, or `FI_ENOSYS` if its table lacks a needed function.
    #[doc(alias = "fi_cq_open")]
    pub fn open(domain: &Arc<Domain>, size: usize) -> Result<CompletionQueue, CallError> {
        let Ok(mut queue) = Self::open_with(domain, size, FI_WAIT_FD) else {
            return Self::open_with(domain, size, FI_WAIT_NONE);
        };
        queue.find_wait();
        Ok(queue)
    }

    fn open_with(
        domain: &Arc<Domain>,
        size: usize,
        wait_obj: c_int,
    ) -> Result<CompletionQueue, CallError> {
        let mut attr = Tailed::new(fi_cq_attr {
            size,
            flags: 0,
            format: FI_CQ_FORMAT_DATA,
            wait_obj,
            signaling_vector: 0,
            wait_cond: FI_CQ_COND_NONE,
            wait_set: ptr::null_mut(),
        });
        // SAFETY: the function at this offset opens a `fid_cq` and takes a `fi_cq_attr`.
        let fid: NonNull<fid_cq> = unsafe {
            domain.open_in("fi_cq_open", offset_of!(fi_ops_domain, cq_open), &mut attr.value)
        }?;
        let queue = CompletionQueue { fid, wait: None, domain: Arc::clone(domain) };
        let needed = [
            ("fi_cq_read", offset_of!(fi_ops_cq, read)),
            ("fi_cq_readfrom", offset_of!(fi_ops_cq, readfrom)),
            ("fi_cq_readerr", offset_of!(fi_ops_cq, readerr)),
        ];
        for (call, offset) in needed {
            // SAFETY: the queue is open, and its table is as long as its `size` field says.
            let found = unsafe { entry::<_, *const c_void>((*fid.as_ptr()).ops, offset) };
            found.ok_or(CallError::missing(call))?;
        }
        Ok(queue)
    }

    #[doc(alias = "FI_GETWAIT")]
    fn find_wait(&mut self) {
        let fabric = self.domain.fabric();
        let Some(try_wait) = fabric.try_wait() else { return };
        let mut fd: c_int = -1;
        // SAFETY: the queue is open, and `FI_GETWAIT` writes one descriptor to `fd`.
        let found = unsafe {
            object::control("fi_control", self.as_fid(), FI_GETWAIT, (&raw mut fd).cast())
        };
        if found.is_ok() && fd >= 0 {
            self.wait = Some(CqWait::new(try_wait, fabric.as_ptr(), self.fid, fd));
        }
    }

    /// Returns the wait object, if the queue has one.
    pub fn wait(&self) -> Option<CqWait> {
        self.wait.clone()
    }

    /// Makes the sockets in the queue's wait object close-on-exec. Returns whether one of them was
    /// not. Slow path.
    pub(super) fn close_on_exec(&self) -> bool {
        let wait = self.wait.as_ref();
        wait.is_some_and(|CqWait(wait)| sockets::close_on_exec(wait.fd.load(Relaxed)))
    }

    /// Takes over the wait object of `old`, the queue that this queue replaces in its rail.
    ///
    /// # Errors
    /// `FI_ENOSYS` if this queue has no wait object, or the error of `epoll_ctl(2)`. Nothing has
    /// changed then.
    pub(super) fn take_over(&mut self, old: &CompletionQueue) -> Result<(), CallError> {
        let Some(CqWait(theirs)) = &old.wait else { return Ok(()) };
        let Some(CqWait(ours)) = &self.wait else { return Err(CallError::missing("FI_GETWAIT")) };
        let (fd, before) = (ours.fd.load(Relaxed), theirs.fd.load(Relaxed));
        theirs.add(fd).map_err(|errno| CallError { call: "epoll_ctl", code: Code(errno.raw()) })?;
        let set = theirs.set.load(Relaxed);
        if set >= 0 {
            // SAFETY: the call accesses no memory. The old queue is open, so its descriptor is its
            // own.
            unsafe { libc::epoll_ctl(set, libc::EPOLL_CTL_DEL, before, ptr::null_mut()) };
        }
        theirs.fd.store(fd, Relaxed);
        theirs.queue.store(self.fid.as_ptr(), Relaxed);
        self.wait = Some(CqWait(Arc::clone(theirs)));
        Ok(())
    }

    pub(super) fn as_fid(&self) -> *mut fid {
        self.fid.as_ptr().cast()
    }

    /// Reads completions into `entries`, and returns the number of entries read.
    ///
    /// # Errors
    /// `FI_EAGAIN` if the queue is empty. `FI_EAVAIL` if the next entry is an error, which
    /// [`read_error`](Self::read_error) reads. Otherwise the provider's code.
    #[doc(alias = "fi_cq_read")]
    #[inline(always)]
    pub fn read(&mut self, entries: &mut [Entry]) -> Result<usize, Code> {
        // SAFETY: the queue is open, and `open` checked its table. `entries` has room for all
        // requested completions.
        let returned = unsafe {
            let this = self.fid.as_ptr();
            let read = (*(*this).ops).read.unwrap_unchecked();
            read(this, entries.as_mut_ptr().cast(), entries.len())
        };
        Code::check(returned)
    }

    /// Like [`read`](Self::read), with the source address of each completion, or `FI_ADDR_NOTAVAIL`
    /// if it is unknown.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read).
    #[doc(alias = "fi_cq_readfrom")]
    #[inline(always)]
    pub fn read_from(&mut self, entries: &mut [Entry], sources: &mut [u64]) -> Result<usize, Code> {
        let count = entries.len().min(sources.len());
        // SAFETY: the queue is open, and `open` checked its table. Both slices have room for all
        // requested completions.
        let returned = unsafe {
            let this = self.fid.as_ptr();
            let read = (*(*this).ops).readfrom.unwrap_unchecked();
            read(this, entries.as_mut_ptr().cast(), count, sources.as_mut_ptr())
        };
        Code::check(returned)
    }

    /// Reads the next error completion.
    ///
    /// # Errors
    /// `FI_EAGAIN` if there is none.
    #[doc(alias = "fi_cq_readerr")]
    #[cold]
    pub fn read_error(&mut self) -> Result<CqError, Code> {
        let mut data = [0; ERROR_DATA];
        let mut error = Tailed::new(fi_cq_err_entry {
            op_context: ptr::null_mut(),
            flags: 0,
            len: 0,
            buf: ptr::null_mut(),
            data: 0,
            tag: 0,
            olen: 0,
            err: 0,
            prov_errno: 0,
            err_data: data.as_mut_ptr().cast(),
            err_data_size: data.len(),
            src_addr: FI_ADDR_NOTAVAIL,
        });
        // SAFETY: the queue is open, and `open` checked its table. The entry is as long as in every
        // requested version, and names the room for the provider's data.
        let returned = unsafe {
            let this = self.fid.as_ptr();
            let read = (*(*this).ops).readerr.unwrap_unchecked();
            read(this, &mut error.value, 0)
        };
        match Code::check(returned)? {
            0 => Err(Code::EAGAIN),
            _ => {
                let fi_cq_err_entry { op_context, flags, err, prov_errno, err_data_size, .. } =
                    error.value;
                let (code, len) = (Code(err.saturating_abs()), err_data_size.min(data.len()));
                Ok(CqError { op_context, flags, code, provider: prov_errno, len, data })
            }
        }
    }

    /// Returns the provider's message for the code and data of `error`. Slow path.
    #[doc(alias = "fi_cq_strerror")]
    pub fn describe(&self, error: &CqError) -> String {
        type Strerror = unsafe extern "C" fn(
            *mut fid_cq,
            c_int,
            *const c_void,
            *mut c_char,
            usize,
        ) -> *const c_char;
        let mut text = [0 as c_char; 256];
        let data = if error.len == 0 { ptr::null() } else { error.data.as_ptr().cast() };
        // SAFETY: the queue is open, and the buffer has the given length. The data pointer is null,
        // or leads to zero-terminated data from the provider. The result is null or a C string.
        unsafe {
            let this = self.fid.as_ptr();
            let Some(words) = entry::<_, Strerror>((*this).ops, offset_of!(fi_ops_cq, strerror))
            else {
                return String::new();
            };
            copy_string(words(this, error.provider, data, text.as_mut_ptr(), text.len() - 1))
                .unwrap_or_default()
        }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: the queue is open. Its endpoint owns it, and has closed itself before.
        let _ = unsafe { object::close(self.fid.as_ptr().cast()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn yes(_: *mut fid_fabric, _: *mut *mut fid, _: c_int) -> c_int {
        0
    }

    unsafe extern "C" fn no(_: *mut fid_fabric, _: *mut *mut fid, _: c_int) -> c_int {
        -libc::EAGAIN
    }

    #[test]
    fn a_thread_may_sleep_only_if_the_provider_agrees() {
        for (answer, sleeps) in [(yes as TryWait, true), (no, false)] {
            let wait = CqWait::new(answer, ptr::null_mut(), NonNull::dangling(), -1);
            // SAFETY: the functions above use none of their arguments.
            assert_eq!(unsafe { wait.may_sleep() }, sleeps);
        }
    }
}
