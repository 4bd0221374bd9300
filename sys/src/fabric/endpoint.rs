//! A reliable datagram endpoint, with its own completion queue and address vector.
//!
//! One thread posts and reads completions. Our side of these calls does not block or allocate.

mod post;

pub use post::{AtomicKind, AtomicWords, Buffer, Target};

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::ptr::{self, NonNull};

use super::av::{AddressForm, AddressVector};
use super::cq::{CompletionQueue, CqError, CqWait, Entry};
use super::domain::Domain;
use super::error::{CallError, Code};
use super::info::Info;
use super::listeners;
use super::object;
use super::raw::*;

/// An open and enabled endpoint. Drop closes the endpoint, then its completion queue and its
/// address vector. A rail may close the endpoint and reopen it in the same value. It posts nothing
/// in between.
#[derive(Debug)]
// `repr(C)` keeps this order, in which posts and polls use only the first `HOT` bytes.
#[repr(C)]
pub struct Endpoint {
    fid: NonNull<fid_ep>,
    // Private, because the provider uses queue and address vector while the endpoint is open.
    cq: CompletionQueue,
    av: AddressVector,
    form: AddressForm,
    atomics: bool,
    closed: bool,
}

impl Endpoint {
    pub(super) const HOT: usize = offset_of!(Endpoint, av);

    /// Opens an endpoint, binds its completion queue and address vector, and enables it. Every post
    /// generates a completion.
    ///
    /// # Errors
    /// The provider's code, or `FI_ENOSYS` if its tables lack a needed function.
    #[doc(alias = "fi_endpoint")]
    pub fn open(
        domain: &Arc<Domain>,
        info: &Info,
        cq: CompletionQueue,
        av: AddressVector,
    ) -> Result<Endpoint, CallError> {
        let fid = Endpoint::open_fid(domain, info)?;
        let form = AddressForm::new(info.raw().addr_format, Vec::new());
        let mut endpoint = Endpoint { fid, cq, av, form, atomics: false, closed: false };
        endpoint.make_ready(info)?;
        Ok(endpoint)
    }

    fn open_fid(domain: &Arc<Domain>, info: &Info) -> Result<NonNull<fid_ep>, CallError> {
        let offset = offset_of!(fi_ops_domain, endpoint);
        // SAFETY: the function at this offset opens a `fid_ep` and takes a `fi_info`.
        unsafe { domain.open_in("fi_endpoint", offset, info.as_ptr()) }
    }

    fn make_ready(&mut self, info: &Info) -> Result<(), CallError> {
        // SAFETY: endpoint, queue and address vector are open. `Drop` closes the endpoint before
        // the other two.
        unsafe {
            let this = self.as_fid();
            object::bind("fi_ep_bind(av)", this, self.av.as_ptr().cast(), 0)?;
            object::bind("fi_ep_bind(cq)", this, self.cq.as_fid(), FI_TRANSMIT | FI_RECV)?;
            object::control("fi_enable", this, FI_ENABLE, ptr::null_mut())?;
        }
        self.check_tables()?;
        self.form = AddressForm::new(info.raw().addr_format, self.name()?);
        listeners::prepare(self.form.own());
        Ok(())
    }

    /// Opens a new endpoint after [`close`](Self::close), with a new address and the same
    /// completion queue and address vector. The queue may still have completions of the closed
    /// endpoint. Slow path.
    ///
    /// # Errors
    /// The provider's code. After an error there is no endpoint.
    pub(super) fn reopen(&mut self, domain: &Arc<Domain>, info: &Info) -> Result<(), CallError> {
        if !self.closed {
            return Ok(());
        }
        self.fid = Endpoint::open_fid(domain, info)?;
        self.closed = false;
        let ready = self.make_ready(info);
        if ready.is_err() {
            self.closed = true;
            // If the close fails, the open endpoint is harmless: no peer knows its address. SAFETY:
            // the endpoint was just opened, and it is not used again.
            let _ = unsafe { object::close(self.as_fid()) };
        }
        ready
    }

    pub(super) fn is_open(&self) -> bool {
        !self.closed
    }

    /// Closes the endpoint. Post nothing until [`reopen`](Self::reopen). Afterwards the provider
    /// holds none of its posts or receive buffers. Drop bound registrations first.
    ///
    /// # Errors
    /// The provider's code. The endpoint stays open then, and the provider may still use posted
    /// buffers.
    #[doc(alias = "fi_close")]
    pub(super) fn close(&mut self) -> Result<(), CallError> {
        if !self.closed {
            // SAFETY: the endpoint is open until here. Afterwards only `reopen` writes `fid`, with
            // a new endpoint.
            unsafe { object::close(self.as_fid()) }?;
            self.closed = true;
        }
        Ok(())
    }

    pub(super) fn as_fid(&self) -> *mut fid {
        self.fid.as_ptr().cast()
    }

    /// Returns the endpoint's address in the provider's format. Slow path.
    ///
    /// # Errors
    /// The provider's code.
    #[doc(alias = "fi_getname")]
    pub fn name(&self) -> Result<Vec<u8>, CallError> {
        type GetName = unsafe extern "C" fn(*mut fid, *mut c_void, *mut usize) -> c_int;
        let call = "fi_getname";
        if self.closed {
            return Err(CallError { call, code: Code(libc::EBADFD) });
        }
        // SAFETY: the endpoint is open, and `open` checked its table. The buffer has the given
        // length, and the provider returns the needed length.
        unsafe {
            let this = self.fid.as_ptr();
            let name = entry::<_, GetName>((*this).cm, offset_of!(fi_ops_cm, getname));
            let name = name.ok_or(CallError::missing(call))?;
            let mut bytes = vec![0u8; 64];
            loop {
                let mut len = bytes.len();
                let returned = name(this.cast(), bytes.as_mut_ptr().cast(), &mut len) as isize;
                if returned == -(FI_ETOOSMALL as isize) && len > bytes.len() && len <= 1 << 12 {
                    bytes.resize(len, 0);
                    continue;
                }
                CallError::check(call, returned)?;
                bytes.truncate(len);
                return Ok(bytes);
            }
        }
    }

    /// Returns the form of accepted addresses, which includes the endpoint's own address.
    pub fn form(&self) -> &AddressForm {
        &self.form
    }

    /// Inserts a peer's address, and returns its `fi_addr_t`. Slow path.
    ///
    /// # Errors
    /// `FI_EINVAL` if the address does not have the provider's [form](Self::form), or the
    /// provider's code.
    #[doc(alias = "fi_av_insert")]
    pub fn insert(&mut self, address: &[u8]) -> Result<u64, CallError> {
        if !self.form.allows(address) {
            return Err(CallError { call: "fi_av_insert", code: Code(libc::EINVAL) });
        }
        // SAFETY: the address was just checked to have the provider's form.
        unsafe { self.av.insert(address) }
    }

    /// Removes an address. Outstanding posts to the address may complete with errors, or never.
    /// Slow path.
    ///
    /// # Errors
    /// The provider's code: some providers fail while posts are outstanding.
    ///
    /// # Safety
    /// [`insert`](Self::insert) returned `number`, which has not been removed since.
    #[doc(alias = "fi_av_remove")]
    pub unsafe fn remove(&mut self, number: u64) -> Result<(), CallError> {
        // SAFETY: the caller upholds the contract of `AddressVector::remove`.
        unsafe { self.av.remove(number) }
    }

    /// Takes over the wait object of `old`, the endpoint that this endpoint replaces in its rail.
    ///
    /// # Errors
    /// The errors of [`CompletionQueue::take_over`]. Nothing has changed then.
    pub(super) fn take_over(&mut self, old: &Endpoint) -> Result<(), CallError> {
        self.cq.take_over(&old.cq)
    }

    /// Makes the provider's connections close-on-exec. Returns whether one of them was not. Slow
    /// path.
    pub(super) fn close_on_exec(&self) -> bool {
        self.cq.close_on_exec()
    }

    /// Returns the queue's wait object, if it has one.
    pub fn wait(&self) -> Option<CqWait> {
        self.cq.wait()
    }

    /// Reads completions into `entries`, and returns the number of entries read.
    ///
    /// # Errors
    /// The errors of [`CompletionQueue::read`].
    #[doc(alias = "fi_cq_read")]
    #[inline(always)]
    pub fn completions(&mut self, entries: &mut [Entry]) -> Result<usize, Code> {
        self.cq.read(entries)
    }

    /// Like [`completions`](Self::completions), with the source address of each completion.
    ///
    /// # Errors
    /// The errors of [`CompletionQueue::read_from`].
    #[doc(alias = "fi_cq_readfrom")]
    #[inline(always)]
    pub fn completions_from(
        &mut self,
        entries: &mut [Entry],
        sources: &mut [u64],
    ) -> Result<usize, Code> {
        self.cq.read_from(entries, sources)
    }

    /// Reads the next error completion.
    ///
    /// # Errors
    /// `FI_EAGAIN` if there is none.
    #[doc(alias = "fi_cq_readerr")]
    #[cold]
    pub fn error_completion(&mut self) -> Result<CqError, Code> {
        self.cq.read_error()
    }

    /// Returns the provider's message for an error completion. Slow path.
    #[doc(alias = "fi_cq_strerror")]
    pub fn describe(&self, error: &CqError) -> String {
        self.cq.describe(error)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let _ = self.close();
    }
}
