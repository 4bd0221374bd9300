//! Functions for tagged messages.

use std::ffi::{c_int, c_void};

use fishplate::Notice;
use fishplate::core::engine::protocol::{Cancelled, Envelope, Request};
use fishplate::core::engine::tag::Tag;
use fishplate::core::error::OpError;
use fishplate::node::Slice;

use crate::handle::{FpNode, Inner, enter};
use crate::node::{buffer, bytes, millis, place};
use crate::status::Status;
use crate::verbs::{issued, notice};

/// A 96-bit tag.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FpTag {
    /// The lower 64 bits.
    pub low: u64,
    /// The upper 32 bits.
    pub high: u32,
}

/// A message that was received or probed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FpMessage {
    /// The sender's tag.
    pub tag: FpTag,
    /// Length at the sender, in bytes.
    pub len: u64,
    /// The claim to pass to `fp_recv_claimed`, or 0. Set by `fp_probe`.
    pub claim: u64,
    /// The sending peer.
    pub source: u32,
}

impl FpTag {
    fn tag(self) -> Tag {
        Tag::new(self.low, self.high)
    }
}

impl Inner {
    pub fn message(&self, envelope: Envelope) -> FpMessage {
        let Envelope { source, tag, len } = envelope;
        let source = self.peer(source.to_raw());
        FpMessage { tag: FpTag { low: tag.lo, high: tag.hi }, len, claim: 0, source }
    }
}

/// Sends bytes of the program. They may be reused on return.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_send(
    node: *mut FpNode,
    to: u32,
    tag: FpTag,
    from: *const c_void,
    len: usize,
) -> c_int {
    enter(node, |inner| {
        let to = inner.named(to);
        inner.node.send(to, tag.tag(), bytes(from, len)?, Notice::Silent)?;
        Ok(0)
    })
}

/// Sends memory of the node. It must not change until the send completes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_send_mem(
    node: *mut FpNode,
    to: u32,
    tag: FpTag,
    memory: u64,
    offset: u64,
    len: usize,
    token: *mut u64,
) -> c_int {
    enter(node, |inner| {
        let (to, from) = (inner.named(to), Slice::new(inner.here(memory, offset), len));
        let sent = inner.node.send(to, tag.tag(), from, notice(token)?)?;
        issued(inner, sent, token)
    })
}

/// Waits for a message, and copies it into the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_recv(
    node: *mut FpNode,
    source: u32,
    tag: FpTag,
    ignore: FpTag,
    into: *mut c_void,
    len: usize,
    timeout_ms: i64,
    message: *mut FpMessage,
) -> c_int {
    enter(node, |inner| {
        let into = buffer(into, len)?;
        let place = if message.is_null() { None } else { Some(place(message, "message")?) };
        let source = inner.anyone(source);
        let envelope =
            inner.node.recv(source, tag.tag(), ignore.tag(), into, millis(timeout_ms))?;
        if let Some(place) = place {
            place.write(inner.message(envelope));
        }
        Ok(0)
    })
}

/// Posts a receive into memory of the node.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_post_recv(
    node: *mut FpNode,
    source: u32,
    tag: FpTag,
    ignore: FpTag,
    memory: u64,
    offset: u64,
    len: usize,
    word: u64,
    request: *mut u64,
) -> c_int {
    enter(node, |inner| {
        let place = place(request, "request")?;
        let (source, into) = (inner.anyone(source), Slice::new(inner.here(memory, offset), len));
        let posted = inner.node.post_recv(source, tag.tag(), ignore.tag(), into, word)?;
        place.write(inner.token(posted.to_raw()));
        Ok(0)
    })
}

/// Cancels a receive that has not matched.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_cancel(node: *mut FpNode, request: u64) -> c_int {
    enter(node, |inner| {
        let request = Request::from_raw(inner.token(request));
        Ok((inner.node.cancel(request)? == Cancelled::Removed).into())
    })
}

/// Checks for a matching message, and optionally claims it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_probe(
    node: *mut FpNode,
    source: u32,
    tag: FpTag,
    ignore: FpTag,
    claim: c_int,
    message: *mut FpMessage,
) -> c_int {
    enter(node, |inner| {
        let place = place(message, "message")?;
        let (source, tag, ignore) = (inner.anyone(source), tag.tag(), ignore.tag());
        if claim == 0 {
            let Some(envelope) = inner.node.probe(source, tag, ignore)? else { return Ok(0) };
            place.write(inner.message(envelope));
            return Ok(1);
        }
        let Some(claimed) = inner.node.mprobe(source, tag, ignore)? else { return Ok(0) };
        let claim = inner.next_claim;
        inner.next_claim += 1;
        inner.claims.insert(claim, claimed);
        place.write(FpMessage { claim, ..inner.message(claimed.envelope) });
        Ok(1)
    })
}

/// Posts a receive for a claimed message.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fp_recv_claimed(
    node: *mut FpNode,
    claim: u64,
    memory: u64,
    offset: u64,
    len: usize,
    word: u64,
    request: *mut u64,
) -> c_int {
    enter(node, |inner| {
        let place = place(request, "request")?;
        let claimed = *inner.claims.get(&claim).ok_or_else(|| Status::from(OpError::StaleToken))?;
        let into = Slice::new(inner.here(memory, offset), len);
        let posted = inner.node.post_mrecv(claimed, into, word)?;
        inner.claims.remove(&claim);
        place.write(inner.token(posted.to_raw()));
        Ok(0)
    })
}
