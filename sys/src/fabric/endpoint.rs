//! A reliable datagram endpoint, with its own completion queue and address vector.
//!
//! A post is one indirect call, and our side does not block or allocate. One thread posts and reads
//! completions.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::ptr::{self, NonNull};

use libc::iovec;

use super::av::{AddressForm, AddressVector};
use super::cq::{CompletionQueue, CqError, CqWait, Entry};
use super::domain::Domain;
use super::error::{CallError, Code};
use super::info::Info;
use super::listeners;
use super::object;
use super::raw::*;

/// Local memory of a post.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Address of the memory.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub len: usize,
    /// [Descriptor](super::mr::MemoryRegion::desc) of the memory's registration, or null.
    pub desc: *mut c_void,
}

/// Remote memory of a post.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The peer's `fi_addr_t`.
    pub peer: u64,
    /// The address in the peer's memory, or the offset into the registration.
    pub addr: u64,
    /// Key of the remote registration.
    pub key: u64,
}

/// An open and enabled endpoint. Drop closes the endpoint, then its completion queue and its
/// address vector. A rail may close the endpoint and reopen it in the same value. It posts nothing
/// in between.
#[derive(Debug)]
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
        listeners::set_timeout(self.form.own());
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

    fn check_tables(&mut self) -> Result<(), CallError> {
        // SAFETY: the endpoint is open, and each table is as long as its `size` field says.
        unsafe {
            let this = self.fid.as_ptr();
            let msg = [
                ("fi_recv", offset_of!(fi_ops_msg, recv)),
                ("fi_send", offset_of!(fi_ops_msg, send)),
                ("fi_sendmsg", offset_of!(fi_ops_msg, sendmsg)),
                ("fi_inject", offset_of!(fi_ops_msg, inject)),
            ];
            for (call, offset) in msg {
                entry::<_, *const c_void>((*this).msg, offset).ok_or(CallError::missing(call))?;
            }
            let rma = [
                ("fi_read", offset_of!(fi_ops_rma, read)),
                ("fi_write", offset_of!(fi_ops_rma, write)),
                ("fi_writemsg", offset_of!(fi_ops_rma, writemsg)),
                ("fi_inject_write", offset_of!(fi_ops_rma, inject)),
                ("fi_writedata", offset_of!(fi_ops_rma, writedata)),
                ("fi_inject_writedata", offset_of!(fi_ops_rma, injectdata)),
            ];
            for (call, offset) in rma {
                entry::<_, *const c_void>((*this).rma, offset).ok_or(CallError::missing(call))?;
            }
            let atomic = [
                offset_of!(fi_ops_atomic, write),
                offset_of!(fi_ops_atomic, readwrite),
                offset_of!(fi_ops_atomic, compwrite),
                offset_of!(fi_ops_atomic, writevalid),
                offset_of!(fi_ops_atomic, readwritevalid),
                offset_of!(fi_ops_atomic, compwritevalid),
            ];
            self.atomics = atomic
                .into_iter()
                .all(|offset| entry::<_, *const c_void>((*this).atomic, offset).is_some());
        }
        Ok(())
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

    /// Posts a receive buffer for a message from any peer.
    ///
    /// # Errors
    /// `FI_EAGAIN` if the provider has no room.
    ///
    /// # Safety
    /// Until the completion that carries `context`, the buffer stays writable, nothing reads it,
    /// and the context does not move.
    #[doc(alias = "fi_recv")]
    #[inline(always)]
    pub unsafe fn recv(&mut self, into: Buffer, context: *mut c_void) -> Result<(), Code> {
        // SAFETY: the endpoint is open, and `open` checked its tables. Our caller guarantees the
        // buffer and the context.
        let returned = unsafe {
            let this = self.fid.as_ptr();
            let recv = (*(*this).msg).recv.unwrap_unchecked();
            recv(this, into.ptr.cast(), into.len, into.desc, FI_ADDR_UNSPEC, context)
        };
        Code::check(returned).map(|_| ())
    }

    /// Sends a message without a completion. The caller may reuse its bytes on return.
    ///
    /// # Errors
    /// `FI_EAGAIN` if the provider has no room.
    ///
    /// # Safety
    /// [`insert`](Self::insert) returned `peer`, which has not been removed since.
    #[doc(alias = "fi_inject")]
    #[inline(always)]
    pub unsafe fn inject(&mut self, bytes: &[u8], peer: u64) -> Result<(), Code> {
        // SAFETY: the endpoint is open, and `open` checked its tables. The provider reads the bytes
        // only during the call, and our caller guarantees the peer.
        let returned = unsafe {
            let this = self.fid.as_ptr();
            let inject = (*(*this).msg).inject.unwrap_unchecked();
            inject(this, bytes.as_ptr().cast(), bytes.len(), peer)
        };
        Code::check(returned).map(|_| ())
    }

    /// Sends a message.
    ///
    /// # Errors
    /// `FI_EAGAIN` if the provider has no room.
    ///
    /// # Safety
    /// The conditions of [`inject`](Self::inject). Until the completion that carries `context`, the
    /// bytes stay readable and the context does not move.
    #[doc(alias = "fi_sendmsg")]
    #[inline]
    pub unsafe fn send(
        &mut self,
        from: Buffer,
        peer: u64,
        flags: u64,
        context: *mut c_void,
    ) -> Result<(), Code> {
        let iov = iovec { iov_base: from.ptr.cast(), iov_len: from.len };
        let mut desc = from.desc;
        let message =
            fi_msg { msg_iov: &iov, desc: &mut desc, iov_count: 1, addr: peer, context, data: 0 };
        // SAFETY: the endpoint is open, and `open` checked its tables. The provider reads `fi_msg`
        // and its vector only during the call. Our caller guarantees the rest.
        let returned = unsafe {
            let this = self.fid.as_ptr();
            let send = (*(*this).msg).sendmsg.unwrap_unchecked();
            send(this, &message, flags)
        };
        Code::check(returned).map(|_| ())
    }

    /// Posts a write, with completion data for the target if `data` is given.
    ///
    /// # Errors
    /// `FI_EAGAIN` if the provider has no room.
    ///
    /// # Safety
    /// The conditions of [`send`](Self::send).
    #[doc(alias = "fi_write")]
    #[doc(alias = "fi_writedata")]
    #[inline(always)]
    pub unsafe fn write(
        &mut self,
        from: Buffer,
        to: Target,
        data: Option<u64>,
        context: *mut c_void,
    ) -> Result<(), Code> {
        // SAFETY: the endpoint is open, and `open` checked its tables. Our caller guarantees the
        // buffer, the context and the peer.
        let returned = unsafe {
            let this = self.fid.as_ptr();
            let rma = (*this).rma;
            let (buf, Buffer { len, desc, .. }) = (from.ptr.cast_const().cast(), from);
            match data {
                Some(data) => {
                    let write = (*rma).writedata.unwrap_unchecked();
                    write(this, buf, len, desc, data, to.peer, to.addr, to.key, context)
                }
                None => {
                    let write = (*rma).write.unwrap_unchecked();
                    write(this, buf, len, desc, to.peer, to.addr, to.key, context)
                }
            }
        };
        Code::check(returned).map(|_| ())
    }

    /// Posts a write without a local completion. The caller may reuse its bytes on return.
    ///
    /// # Errors
    /// `FI_EAGAIN` if the provider has no room.
    ///
    /// # Safety
    /// The conditions of [`inject`](Self::inject) for the peer of `to`. `from` is readable during
    /// the call.
    #[doc(alias = "fi_inject_write")]
    #[doc(alias = "fi_inject_writedata")]
    #[inline(always)]
    pub unsafe fn inject_write(
        &mut self,
        from: Buffer,
        to: Target,
        data: Option<u64>,
    ) -> Result<(), Code> {
        // SAFETY: the endpoint is open, and `open` checked its tables. Our caller guarantees the
        // buffer and the peer.
        let returned = unsafe {
            let this = self.fid.as_ptr();
            let rma = (*this).rma;
            let (buf, len) = (from.ptr.cast_const().cast(), from.len);
            match data {
                Some(data) => {
                    let write = (*rma).injectdata.unwrap_unchecked();
                    write(this, buf, len, data, to.peer, to.addr, to.key)
                }
                None => {
                    let write = (*rma).inject.unwrap_unchecked();
                    write(this, buf, len, to.peer, to.addr, to.key)
                }
            }
        };
        Code::check(returned).map(|_| ())
    }

    /// Posts a write with flags that replace the endpoint's flags: `FI_MORE`, `FI_REMOTE_CQ_DATA`
    /// and a completion level.
    ///
    /// # Errors
    /// `FI_EAGAIN` if the provider has no room.
    ///
    /// # Safety
    /// The conditions of [`send`](Self::send).
    #[doc(alias = "fi_writemsg")]
    #[inline]
    pub unsafe fn write_with(
        &mut self,
        from: Buffer,
        to: Target,
        data: u64,
        flags: u64,
        context: *mut c_void,
    ) -> Result<(), Code> {
        let iov = iovec { iov_base: from.ptr.cast(), iov_len: from.len };
        let rma = fi_rma_iov { addr: to.addr, len: from.len, key: to.key };
        let mut desc = from.desc;
        let message = fi_msg_rma {
            msg_iov: &iov,
            desc: &mut desc,
            iov_count: 1,
            addr: to.peer,
            rma_iov: &rma,
            rma_iov_count: 1,
            context,
            data,
        };
        // SAFETY: the endpoint is open, and `open` checked its tables. The provider reads
        // `fi_msg_rma` and its vectors only during the call. Our caller guarantees the rest.
        let returned = unsafe {
            let this = self.fid.as_ptr();
            let write = (*(*this).rma).writemsg.unwrap_unchecked();
            write(this, &message, flags)
        };
        Code::check(returned).map(|_| ())
    }

    /// Posts a read.
    ///
    /// # Errors
    /// `FI_EAGAIN` if the provider has no room.
    ///
    /// # Safety
    /// The conditions of [`recv`](Self::recv), and the conditions of [`inject`](Self::inject) for
    /// the peer of `from`.
    #[doc(alias = "fi_read")]
    #[inline(always)]
    pub unsafe fn read(
        &mut self,
        into: Buffer,
        from: Target,
        context: *mut c_void,
    ) -> Result<(), Code> {
        // SAFETY: the endpoint is open, and `open` checked its tables. Our caller guarantees the
        // buffer, the context and the peer.
        let returned = unsafe {
            let this = self.fid.as_ptr();
            let read = (*(*this).rma).read.unwrap_unchecked();
            read(
                this,
                into.ptr.cast(),
                into.len,
                into.desc,
                from.peer,
                from.addr,
                from.key,
                context,
            )
        };
        Code::check(returned).map(|_| ())
    }

    /// Returns whether the provider supports `op` on `datatype` in the given form. Slow path.
    #[doc(alias = "fi_atomicvalid")]
    #[doc(alias = "fi_fetch_atomicvalid")]
    #[doc(alias = "fi_compare_atomicvalid")]
    pub fn has_atomic(&self, kind: AtomicKind, datatype: c_int, op: c_int) -> bool {
        if self.closed
            || !self.atomics
            || !(0..=FI_UINT64).contains(&datatype)
            || !(0..=FI_CSWAP).contains(&op)
        {
            return false;
        }
        let mut count = 0;
        // SAFETY: the endpoint is open, `open` checked its tables, and `count` has room for the
        // answer.
        let returned = unsafe {
            let this = self.fid.as_ptr();
            let ops = (*this).atomic;
            let valid = match kind {
                AtomicKind::Fetch => (*ops).readwritevalid,
                AtomicKind::Compare => (*ops).compwritevalid,
            };
            valid.unwrap_unchecked()(this, datatype, op, &mut count)
        };
        returned == 0 && count >= 1
    }

    /// Posts an atomic on one word.
    ///
    /// # Errors
    /// `FI_EAGAIN` if the provider has no room. `FI_ENOSYS` if it has no atomics.
    ///
    /// # Safety
    /// The conditions of [`inject`](Self::inject) for the peer of `to`. Until the completion that
    /// carries `context`, the words behind `words` do not move and nothing reads the result.
    /// [`has_atomic`](Self::has_atomic) returns `true` for this operation, type and form.
    #[doc(alias = "fi_atomic")]
    #[doc(alias = "fi_fetch_atomic")]
    #[doc(alias = "fi_compare_atomic")]
    pub unsafe fn atomic(
        &mut self,
        kind: AtomicKind,
        words: AtomicWords,
        to: Target,
        datatype: c_int,
        op: c_int,
        context: *mut c_void,
    ) -> Result<(), Code> {
        if !self.atomics {
            return Err(Code::ENOSYS);
        }
        let AtomicWords { operand, compare, result } = words;
        let (none, Target { peer, addr, key }) = (ptr::null_mut(), to);
        // SAFETY: the endpoint is open, and `open` checked its tables. Our caller guarantees the
        // words, the context and the peer.
        let returned = unsafe {
            let this = self.fid.as_ptr();
            let ops = (*this).atomic;
            let (operand, compare, result) = (operand.cast(), compare.cast(), result.cast());
            match kind {
                AtomicKind::Fetch => {
                    let call = (*ops).readwrite.unwrap_unchecked();
                    call(
                        this, operand, 1, none, result, none, peer, addr, key, datatype, op,
                        context,
                    )
                }
                AtomicKind::Compare => {
                    let call = (*ops).compwrite.unwrap_unchecked();
                    call(
                        this, operand, 1, none, compare, none, result, none, peer, addr, key,
                        datatype, op, context,
                    )
                }
            }
        };
        Code::check(returned).map(|_| ())
    }
}

/// The forms of atomics in use. Both return the previous value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicKind {
    /// Applies the operation and fetches the previous value.
    Fetch,
    /// Compares, swaps if equal, and fetches the previous value.
    Compare,
}

/// The words of an atomic. The datatype gives the width of each word.
#[derive(Clone, Copy, Debug)]
pub struct AtomicWords {
    /// Address of the operand.
    pub operand: *const u64,
    /// Address of the comparand.
    pub compare: *const u64,
    /// Destination of the previous value.
    pub result: *mut u64,
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let _ = self.close();
    }
}
