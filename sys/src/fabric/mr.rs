//! Memory registrations. Slow path.

use alloc::sync::Arc;
use core::ffi::{c_int, c_void};
use core::mem::{ManuallyDrop, offset_of};
use core::ptr::{self, NonNull};

use super::domain::Domain;
use super::endpoint::Endpoint;
use super::error::{CallError, Code};
use super::object;
use super::raw::*;

/// A memory registration. Drop closes it.
#[derive(Debug)]
pub struct MemoryRegion {
    fid: NonNull<fid_mr>,
    _domain: Arc<Domain>,
}

impl MemoryRegion {
    /// Registers memory for `access`, with `key` unless the provider chooses keys.
    ///
    /// # Errors
    /// The provider's code: `FI_ENOKEY` if the key is taken.
    ///
    /// # Safety
    /// The memory is valid for `len` bytes until the registration is dropped. Until then peers may
    /// read and write the memory as `access` allows.
    #[doc(alias = "fi_mr_reg")]
    pub unsafe fn register(
        domain: &Arc<Domain>,
        ptr: NonNull<u8>,
        len: usize,
        access: u64,
        key: u64,
    ) -> Result<MemoryRegion, CallError> {
        type Register = unsafe extern "C" fn(
            *mut fid,
            *const c_void,
            usize,
            u64,
            u64,
            u64,
            u64,
            *mut *mut fid_mr,
            *mut c_void,
        ) -> c_int;
        let call = "fi_mr_reg";
        let mut mr = ptr::null_mut();
        // SAFETY: the domain is open, and the result is written to `fid`. Our caller guarantees the
        // registered memory.
        unsafe {
            let this = domain.as_ptr();
            let register = entry::<_, Register>((*this).mr, offset_of!(fi_ops_mr, reg));
            let register = register.ok_or(CallError::missing(call))?;
            let (buf, context) = (ptr.as_ptr().cast_const().cast(), ptr::null_mut());
            CallError::check(
                call,
                register(this.cast(), buf, len, access, 0, key, 0, &mut mr, context) as isize,
            )?;
        }
        let fid = NonNull::new(mr).ok_or(CallError { call, code: Code(FI_EOTHER) })?;
        Ok(MemoryRegion { fid, _domain: Arc::clone(domain) })
    }

    /// Registers device memory. `dmabuf` is a descriptor and the memory's offset in it
    /// (`FI_MR_DMABUF`). With `None` the provider asks the device's driver about the address.
    ///
    /// # Errors
    /// The provider's code, for example if it does not support dmabuf.
    ///
    /// # Safety
    /// The conditions of [`register`](Self::register), for memory of the device.
    #[doc(alias = "fi_mr_regattr")]
    pub unsafe fn register_device(
        domain: &Arc<Domain>,
        (ptr, len): (NonNull<u8>, usize),
        (iface, device): (c_int, u32),
        dmabuf: Option<(c_int, u64)>,
        access: u64,
        requested_key: u64,
    ) -> Result<MemoryRegion, CallError> {
        type Register =
            unsafe extern "C" fn(*mut fid, *const fi_mr_attr, u64, *mut *mut fid_mr) -> c_int;
        let call = "fi_mr_regattr";
        let base_addr = ptr.as_ptr().cast();
        let whole = libc::iovec { iov_base: base_addr, iov_len: len };
        let (fd, offset) = dmabuf.unwrap_or((-1, 0));
        let buffer = Tailed::new(fi_mr_dmabuf { fd, offset, len, base_addr });
        let (mr_iov, flags) = match dmabuf {
            Some(_) => ((&raw const buffer).cast(), FI_MR_DMABUF),
            None => ((&raw const whole).cast(), 0),
        };
        let attr = Tailed::new(fi_mr_attr {
            mr_iov,
            iov_count: 1,
            access,
            offset: 0,
            requested_key,
            context: ptr::null_mut(),
            auth_key_size: 0,
            auth_key: ptr::null_mut(),
            iface,
            device: device.into(),
        });
        let mut mr = ptr::null_mut();
        // SAFETY: the domain is open, and the attributes and the result are local variables. Our
        // caller guarantees the registered memory.
        unsafe {
            let this = domain.as_ptr();
            let register = entry::<_, Register>((*this).mr, offset_of!(fi_ops_mr, regattr));
            let register = register.ok_or(CallError::missing(call))?;
            CallError::check(
                call,
                register(this.cast(), (&raw const attr).cast(), flags, &mut mr) as isize,
            )?;
        }
        let fid = NonNull::new(mr).ok_or(CallError { call, code: Code(FI_EOTHER) })?;
        Ok(MemoryRegion { fid, _domain: Arc::clone(domain) })
    }

    /// Binds the registration to an endpoint, for providers with `FI_MR_ENDPOINT`.
    ///
    /// # Errors
    /// The provider's code.
    ///
    /// # Safety
    /// The registration is closed or dropped before the endpoint.
    #[doc(alias = "fi_mr_bind")]
    #[doc(alias = "fi_mr_enable")]
    pub unsafe fn bind(&mut self, endpoint: &Endpoint) -> Result<(), CallError> {
        // SAFETY: registration and endpoint are open, and `FI_ENABLE` takes no argument.
        unsafe {
            object::bind("fi_mr_bind", self.fid.as_ptr().cast(), endpoint.as_fid(), 0)?;
            object::control("fi_mr_enable", self.fid.as_ptr().cast(), FI_ENABLE, ptr::null_mut())
        }
    }

    /// Closes the registration. If that fails, the provider still uses the memory, and the
    /// registration is returned for another try.
    ///
    /// # Errors
    /// The registration, with the provider's code.
    #[doc(alias = "fi_close")]
    pub fn close(self) -> Result<(), (MemoryRegion, CallError)> {
        // SAFETY: the registration is open until here, and stays open if the provider returns an
        // error.
        match unsafe { object::close(self.fid.as_ptr().cast()) } {
            Ok(()) => {
                let mut closed = ManuallyDrop::new(self);
                // SAFETY: `closed` is never dropped, so the reference to the domain is dropped
                // once, here.
                unsafe { ptr::drop_in_place(&mut closed._domain) };
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Returns the key that peers use to access the memory.
    #[doc(alias = "fi_mr_key")]
    pub fn key(&self) -> u64 {
        // SAFETY: the registration is open until it is dropped.
        unsafe { (*self.fid.as_ptr()).key }
    }

    /// Returns the descriptor that local posts need, for providers with `FI_MR_LOCAL`.
    #[doc(alias = "fi_mr_desc")]
    pub fn desc(&self) -> *mut c_void {
        // SAFETY: the registration is open until it is dropped.
        unsafe { (*self.fid.as_ptr()).mem_desc }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // A failed close cannot be reported from drop; call `close` to get the error. SAFETY: the
        // registration is open until here.
        let _ = unsafe { object::close(self.fid.as_ptr().cast()) };
    }
}
