//! An address vector: peers' addresses, by number. Slow path.

use alloc::string::String;
use alloc::sync::Arc;
use core::ffi::{c_char, c_int, c_void};
use core::mem::offset_of;
use core::ptr::{self, NonNull};

use super::domain::Domain;
use super::error::{CallError, Code};
use super::library::copy_string;
use super::object;
use super::raw::*;

/// An open address vector, closed when dropped.
#[derive(Debug)]
pub struct AddressVector {
    fid: NonNull<fid_av>,
    _domain: Arc<Domain>,
}

// SAFETY: it is used by the thread that owns its endpoint; that may change.
unsafe impl Send for AddressVector {}

impl AddressVector {
    /// Opens one for about `count` addresses.
    ///
    /// # Errors
    /// The provider's.
    #[doc(alias = "fi_av_open")]
    pub fn open(domain: &Arc<Domain>, kind: c_int, count: usize) -> Result<AddressVector, CallError> {
        let mut attr = Tailed::new(fi_av_attr {
            r#type: kind,
            rx_ctx_bits: 0,
            count,
            ep_per_node: 0,
            name: ptr::null(),
            map_addr: ptr::null_mut(),
            flags: 0,
        });
        // SAFETY: this entry takes such attributes.
        let fid =
            unsafe { domain.open_in("fi_av_open", offset_of!(fi_ops_domain, av_open), &mut attr.value) }?;
        Ok(AddressVector { fid, _domain: Arc::clone(domain) })
    }

    pub(super) fn as_ptr(&self) -> *mut fid_av {
        self.fid.as_ptr()
    }

    /// Adds an address in the provider's form, and returns its number.
    ///
    /// # Errors
    /// The provider's, or `FI_EINVAL` if it does not take the address.
    #[doc(alias = "fi_av_insert")]
    pub fn insert(&mut self, address: &[u8]) -> Result<u64, CallError> {
        type Insert =
            unsafe extern "C" fn(*mut fid_av, *const c_void, usize, *mut u64, u64, *mut c_void) -> c_int;
        let call = "fi_av_insert";
        let mut number = FI_ADDR_NOTAVAIL;
        // SAFETY: the vector is open; one address is given, and there is room for one number.
        let inserted = unsafe {
            let this = self.as_ptr();
            let insert = entry::<_, Insert>((*this).ops, offset_of!(fi_ops_av, insert));
            let insert = insert.ok_or(CallError::missing(call))?;
            insert(this, address.as_ptr().cast(), 1, &mut number, 0, ptr::null_mut())
        };
        match CallError::check(call, inserted as isize)? {
            1 if number != FI_ADDR_NOTAVAIL => Ok(number),
            _ => Err(CallError { call, code: Code(libc::EINVAL) }),
        }
    }

    /// Takes an address out. What was posted to it may end with errors, or not at all.
    ///
    /// # Errors
    /// The provider's: some refuse while posts are outstanding.
    #[doc(alias = "fi_av_remove")]
    pub fn remove(&mut self, mut number: u64) -> Result<(), CallError> {
        type Remove = unsafe extern "C" fn(*mut fid_av, *mut u64, usize, u64) -> c_int;
        let call = "fi_av_remove";
        // SAFETY: the vector is open; one number is given.
        unsafe {
            let this = self.as_ptr();
            let remove = entry::<_, Remove>((*this).ops, offset_of!(fi_ops_av, remove));
            let remove = remove.ok_or(CallError::missing(call))?;
            CallError::check(call, remove(this, &mut number, 1, 0) as isize)?;
        }
        Ok(())
    }

    /// The provider's words for an address.
    #[doc(alias = "fi_av_straddr")]
    pub fn show(&self, address: &[u8]) -> String {
        type Show =
            unsafe extern "C" fn(*mut fid_av, *const c_void, *mut c_char, *mut usize) -> *const c_char;
        let mut text = [0 as c_char; 256];
        let mut len = text.len() - 1;
        // SAFETY: the vector is open, the address is one of its form, and the text ends with zero whatever is written.
        unsafe {
            let this = self.as_ptr();
            let Some(show) = entry::<_, Show>((*this).ops, offset_of!(fi_ops_av, straddr)) else {
                return String::new();
            };
            show(this, address.as_ptr().cast(), text.as_mut_ptr(), &mut len);
            copy_string(text.as_ptr()).unwrap_or_default()
        }
    }
}

impl Drop for AddressVector {
    fn drop(&mut self) {
        // If the provider keeps it, there is nobody to tell.
        // SAFETY: open until here; the endpoint that was bound to it owned it, and is closed.
        let _ = unsafe { object::close(self.fid.as_ptr().cast()) };
    }
}
