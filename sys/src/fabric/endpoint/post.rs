//! The posts of an endpoint. Each is one indirect call into the provider, and our side does not
//! block or allocate. Opening has checked that the provider's tables have these calls.

use core::ffi::{c_int, c_void};
use core::mem::offset_of;
use core::ptr;

use libc::iovec;

use super::super::error::{CallError, Code};
use super::super::raw::*;
use super::Endpoint;

/// Local memory of a post.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Address of the memory.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub len: usize,
    /// [Descriptor](super::super::mr::MemoryRegion::desc) of the memory's registration, or null.
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

impl Endpoint {
    pub(super) fn check_tables(&mut self) -> Result<(), CallError> {
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
