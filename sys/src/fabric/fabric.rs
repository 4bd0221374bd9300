//! A fabric: the parent of domains that can reach each other. Slow path.

use core::ffi::c_int;
use core::mem::offset_of;
use core::ptr::{self, NonNull};

use super::error::{CallError, Code};
use super::info::Info;
use super::object;
use super::raw::*;

/// `fi_trywait`. Returns 0 if a thread may sleep on the wait objects of these objects.
pub(super) type TryWait = unsafe extern "C" fn(*mut fid_fabric, *mut *mut fid, c_int) -> c_int;

/// An open fabric, closed when dropped.
#[derive(Debug)]
pub struct Fabric {
    fid: NonNull<fid_fabric>,
}

// SAFETY: any thread may open and close a fabric; `fi_domain(3)` restricts only endpoints and
// queues.
unsafe impl Send for Fabric {}
// SAFETY: a shared reference only opens domains, which libfabric serialises.
unsafe impl Sync for Fabric {}

impl Fabric {
    /// Opens the fabric of an offer.
    ///
    /// # Errors
    /// The provider's code.
    #[doc(alias = "fi_fabric")]
    pub fn open(info: &Info) -> Result<Fabric, CallError> {
        let mut fid = ptr::null_mut();
        // SAFETY: the attributes belong to a complete `fi_info`, and the result is written to
        // `fid`.
        let returned = unsafe {
            (info.library().entries().fabric)(info.fabric_attr(), &mut fid, ptr::null_mut())
        };
        CallError::check("fi_fabric", returned as isize)?;
        let fid =
            NonNull::new(fid).ok_or(CallError { call: "fi_fabric", code: Code(FI_EOTHER) })?;
        Ok(Fabric { fid })
    }

    pub(super) fn as_ptr(&self) -> *mut fid_fabric {
        self.fid.as_ptr()
    }

    pub(super) fn try_wait(&self) -> Option<TryWait> {
        // SAFETY: the fabric is open, and its table is as long as its `size` field says.
        unsafe { entry((*self.as_ptr()).ops, offset_of!(fi_ops_fabric, trywait)) }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        // SAFETY: the fabric is open until here. Each domain opened in it holds a reference to this
        // value, so all of them are closed.
        let _ = unsafe { object::close(self.fid.as_ptr().cast()) };
    }
}
