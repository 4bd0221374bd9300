//! A domain: one NIC or interface with its registrations, queues and endpoints. Slow path.

use alloc::sync::Arc;
use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::ptr::{self, NonNull};

use super::error::{CallError, Code};
use super::fabric::Fabric;
use super::info::Info;
use super::object;
use super::raw::*;

/// An open domain. Drop closes the domain, then its fabric. Under `FI_THREAD_DOMAIN` only one
/// thread at a time may use a domain and its objects. So these types are not `Send` or `Sync`.
#[derive(Debug)]
pub struct Domain {
    fid: NonNull<fid_domain>,
    fabric: Arc<Fabric>,
}

impl Domain {
    /// Opens the domain of an offer.
    ///
    /// # Errors
    /// The provider's code.
    #[doc(alias = "fi_domain")]
    #[expect(
        clippy::arc_with_non_send_sync,
        reason = "a queue may outlive its rail in the handle of a wait"
    )]
    pub fn open(fabric: Arc<Fabric>, info: &Info) -> Result<Arc<Domain>, CallError> {
        type Open = unsafe extern "C" fn(
            *mut fid_fabric,
            *mut fi_info,
            *mut *mut fid_domain,
            *mut c_void,
        ) -> c_int;
        let mut fid = ptr::null_mut();
        // SAFETY: the fabric is open, the `fi_info` is complete, and the result is written to
        // `fid`.
        unsafe {
            let this = fabric.as_ptr();
            let open = entry::<_, Open>((*this).ops, offset_of!(fi_ops_fabric, domain));
            let open = open.ok_or(CallError::missing("fi_domain"))?;
            CallError::check(
                "fi_domain",
                open(this, info.as_ptr(), &mut fid, ptr::null_mut()) as isize,
            )?;
        }
        let fid =
            NonNull::new(fid).ok_or(CallError { call: "fi_domain", code: Code(FI_EOTHER) })?;
        Ok(Arc::new(Domain { fid, fabric }))
    }

    pub(super) fn as_ptr(&self) -> *mut fid_domain {
        self.fid.as_ptr()
    }

    pub(super) fn fabric(&self) -> &Arc<Fabric> {
        &self.fabric
    }

    /// Opens an object in this domain through a function of its table.
    ///
    /// # Safety
    /// The function at `offset` opens a `T` and takes `attr`.
    pub(super) unsafe fn open_in<A, T>(
        &self,
        call: &'static str,
        offset: usize,
        attr: *mut A,
    ) -> Result<NonNull<T>, CallError> {
        type Open<A, T> =
            unsafe extern "C" fn(*mut fid_domain, *mut A, *mut *mut T, *mut c_void) -> c_int;
        let mut fid = ptr::null_mut();
        // SAFETY: the domain is open. Our caller guarantees that the function opens a `T` and takes
        // `attr`.
        unsafe {
            let this = self.as_ptr();
            let open =
                entry::<_, Open<A, T>>((*this).ops, offset).ok_or(CallError::missing(call))?;
            CallError::check(call, open(this, attr, &mut fid, ptr::null_mut()) as isize)?;
        }
        NonNull::new(fid).ok_or(CallError { call, code: Code(FI_EOTHER) })
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: the domain is open until here. Each object opened in it holds a reference to this
        // value, so all of them are closed.
        let _ = unsafe { object::close(self.fid.as_ptr().cast()) };
    }
}
