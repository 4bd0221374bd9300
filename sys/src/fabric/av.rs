//! An address vector: maps numbers (`fi_addr_t`) to addresses of peers. Slow path.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::ptr::{self, NonNull};

use super::domain::Domain;
use super::error::{CallError, Code};
use super::object;
use super::raw::*;

/// The form of a provider's addresses, derived from its own address. libfabric does not pass the
/// length of an address to the provider. So [`allows`](Self::allows) checks the length of a peer's
/// address first.
#[derive(Clone, Debug)]
pub struct AddressForm {
    format: u32,
    own: Box<[u8]>,
}

/// Maximum length of an address string in bytes, including its zero. The shm provider truncates
/// longer strings.
const STRING_MAX: usize = 256;

impl AddressForm {
    /// Returns the form of `own`, the provider's own address in `format` (`fi_info.addr_format`).
    pub fn new(format: u32, own: Vec<u8>) -> AddressForm {
        AddressForm { format, own: own.into() }
    }

    /// Returns the format, one of the `FI_ADDR_` and `FI_SOCKADDR` constants.
    pub fn format(&self) -> u32 {
        self.format
    }

    /// Returns the provider's own address.
    pub fn own(&self) -> &[u8] {
        &self.own
    }

    /// Returns whether `address` has this form. A string must end with its only zero and have the
    /// same scheme as our own address. Any other address must be as long as our own. A socket
    /// address must also have the same family.
    pub fn allows(&self, address: &[u8]) -> bool {
        match self.format {
            FI_ADDR_STR => {
                let ended = address.iter().position(|&byte| byte == 0).map(|at| at + 1)
                    == Some(address.len());
                ended && address.len() <= STRING_MAX && scheme(address) == scheme(&self.own)
            }
            FI_SOCKADDR | FI_SOCKADDR_IN | FI_SOCKADDR_IN6 | FI_SOCKADDR_IB => {
                address.len() == self.own.len() && address.get(..2) == self.own.get(..2)
            }
            _ => address.len() == self.own.len(),
        }
    }
}

fn scheme(address: &[u8]) -> Option<&[u8]> {
    address.windows(3).position(|three| three == b"://").map(|at| &address[..at])
}

/// An open address vector, closed when dropped.
#[derive(Debug)]
pub struct AddressVector {
    fid: NonNull<fid_av>,
    _domain: Arc<Domain>,
}

impl AddressVector {
    /// Opens an address vector for about `count` addresses.
    ///
    /// # Errors
    /// The provider's code.
    #[doc(alias = "fi_av_open")]
    pub fn open(
        domain: &Arc<Domain>,
        kind: c_int,
        count: usize,
    ) -> Result<AddressVector, CallError> {
        let mut attr = Tailed::new(fi_av_attr {
            r#type: kind,
            rx_ctx_bits: 0,
            count,
            ep_per_node: 0,
            name: ptr::null(),
            map_addr: ptr::null_mut(),
            flags: 0,
        });
        // SAFETY: the function at this offset opens a `fid_av` and takes a `fi_av_attr`.
        let fid = unsafe {
            domain.open_in("fi_av_open", offset_of!(fi_ops_domain, av_open), &mut attr.value)
        }?;
        Ok(AddressVector { fid, _domain: Arc::clone(domain) })
    }

    pub(super) fn as_ptr(&self) -> *mut fid_av {
        self.fid.as_ptr()
    }

    /// Inserts an address in the provider's form, and returns its `fi_addr_t`.
    ///
    /// # Errors
    /// The provider's code, or `FI_EINVAL` if the provider rejects the address.
    ///
    /// # Safety
    /// The address has the provider's [form](AddressForm). The provider does not know the length of
    /// the address. It reads the length that the form implies.
    #[doc(alias = "fi_av_insert")]
    pub unsafe fn insert(&mut self, address: &[u8]) -> Result<u64, CallError> {
        type Insert = unsafe extern "C" fn(
            *mut fid_av,
            *const c_void,
            usize,
            *mut u64,
            u64,
            *mut c_void,
        ) -> c_int;
        let call = "fi_av_insert";
        let mut number = FI_ADDR_NOTAVAIL;
        // SAFETY: the vector is open. Our caller guarantees a complete address, and `number` has
        // room for the one result.
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

    /// Removes an address. Outstanding posts to the address may complete with errors, or never.
    ///
    /// # Errors
    /// The provider's code: some providers fail while posts are outstanding.
    ///
    /// # Safety
    /// [`insert`](Self::insert) returned `number`, which has not been removed since.
    #[doc(alias = "fi_av_remove")]
    pub unsafe fn remove(&mut self, mut number: u64) -> Result<(), CallError> {
        type Remove = unsafe extern "C" fn(*mut fid_av, *mut u64, usize, u64) -> c_int;
        let call = "fi_av_remove";
        // SAFETY: the vector is open, and the count of addresses is 1.
        unsafe {
            let this = self.as_ptr();
            let remove = entry::<_, Remove>((*this).ops, offset_of!(fi_ops_av, remove));
            let remove = remove.ok_or(CallError::missing(call))?;
            CallError::check(call, remove(this, &mut number, 1, 0) as isize)?;
        }
        Ok(())
    }
}

impl Drop for AddressVector {
    fn drop(&mut self) {
        // SAFETY: the vector is open until here. Its endpoint owned this value and has closed
        // itself before.
        let _ = unsafe { object::close(self.fid.as_ptr().cast()) };
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::{AddressForm, STRING_MAX};
    use crate::fabric::raw::*;

    /// Addresses of another length are rejected, and so are addresses of the right length but
    /// another family.
    #[test]
    fn addresses_of_a_fixed_length_are_as_long_as_our_own() {
        let families = [FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6, FI_SOCKADDR_IB];
        for (format, len) in [
            (FI_SOCKADDR, 16),
            (FI_SOCKADDR_IN, 16),
            (FI_SOCKADDR_IN6, 28),
            (FI_SOCKADDR_IB, 48),
            (FI_ADDR_EFA, 32),
            (FI_FORMAT_UNSPEC, 16),
        ] {
            let form = AddressForm::new(format, (0..len).map(|n| n as u8 + 2).collect());
            for other in 0..=64 {
                let address: Vec<u8> =
                    (0..other).map(|n| if n < 2 { n as u8 + 2 } else { 0 }).collect();
                assert_eq!(form.allows(&address), other == len, "format {format}, {other} bytes");
            }
            for at in 0..2 {
                let mut address = form.own().to_vec();
                address[at] ^= 1;
                assert_eq!(form.allows(&address), !families.contains(&format), "format {format}");
            }
        }
    }

    #[test]
    fn a_string_ends_with_its_only_zero_and_has_our_scheme() {
        let form = AddressForm::new(FI_ADDR_STR, b"fi_shm://1:2\0".to_vec());
        for good in [&b"fi_shm://1:2\0"[..], b"fi_shm://\0", b"fi_shm://another and longer\0"] {
            assert!(form.allows(good), "{}", good.escape_ascii());
        }
        let (no_zero, two_zeros) = (b"fi_shm://1:2", b"fi_shm://1\x002\0");
        for bad in [&b""[..], b"\0", b"f", no_zero, two_zeros, b"fi_ns://1:2\0", b"/1:2\0"] {
            assert!(!form.allows(bad), "{}", bad.escape_ascii());
        }
        let long = |len: usize| {
            let mut name = b"fi_shm://".to_vec();
            name.resize(len - 1, b'x');
            name.push(0);
            name
        };
        assert!(form.allows(&long(STRING_MAX)) && !form.allows(&long(STRING_MAX + 1)));
        let plain = AddressForm::new(FI_ADDR_STR, b"plain\0".to_vec());
        assert!(plain.allows(&[0]) && !plain.allows(&[]), "even where names have no scheme");
    }
}
