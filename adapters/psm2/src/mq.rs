//! Matched queues: the sends and receives of an endpoint. Only [`psm2_mq_send2`] blocks, without a
//! deadline, as in PSM2. While it waits, it releases the lock at intervals. A call that needs a
//! request allocates if all requests are in use.

use std::ffi::c_void;
use std::ptr::NonNull;

use fishplate::PeerId;
use fishplate::core::engine::tag::Tag;
use fishplate::core::mem::Span;
use fishplate::core::psm::{Code, FLAG_SENDSYNC, MqReq};

use crate::call::{look, quick, run, tell, wait};
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::handle::{Ep, EpAddr, Mq, Req};
use crate::layout::{MqStats, MqStatus2, MqTag};
use crate::table::{Found, find, find_mq, find_request, guard, own_mq};

/// Converts the caller's pointer and length to a span.
///
/// # Errors
/// `at` is null but `len` is not 0.
///
/// # Safety
/// Until the request completes, `at` is valid for `len` bytes. The program does not change the
/// bytes of a send, and does not access the bytes of a receive.
#[inline(always)]
unsafe fn buffer(at: *mut c_void, len: u32) -> Result<Span, Error> {
    let at = match NonNull::new(at.cast::<u8>()) {
        Some(at) => at,
        None if len == 0 => NonNull::dangling(),
        None => return Err(Error::PARAM),
    };
    // SAFETY: the caller guarantees that `at` is valid until the request completes. An empty span
    // may be anywhere.
    Ok(unsafe { Span::new(at, len as usize) })
}

/// Copies the three words of a tag.
///
/// # Safety
/// `tag` is null or points to a tag.
#[inline(always)]
unsafe fn words(tag: *const MqTag) -> Result<Tag, Error> {
    if tag.is_null() {
        return Err(Error::PARAM);
    }
    // Programs store the words one by one just before the call. A load that spans two of these
    // stores cannot be forwarded, so volatile loads keep the words apart.
    let word = |at: usize| {
        // SAFETY: `tag` is not null, and the caller guarantees that it points to a tag.
        unsafe { (&raw const (*tag).words[at]).read_volatile() }
    };
    let lo = u64::from(word(0)) | u64::from(word(1)) << 32;
    Ok(Tag::new(lo, word(2)))
}

/// Initializes the endpoint's only queue. Ignores the options.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_init(
    ep: *mut Ep,
    _tag_order_mask: u64,
    _options: *const c_void,
    _count: i32,
    mq: *mut *mut Mq,
) -> Error {
    if mq.is_null() {
        return Error::PARAM;
    }
    guard(|| {
        let Some(mut endpoint) = find(ep) else { return Error::PARAM };
        if endpoint.retired || endpoint.queue != Err(Error::PARAM) {
            return Error::PARAM;
        }
        endpoint.queue = Ok(());
        // SAFETY: `mq` was checked not null, and PSM2 requires it to be writable.
        unsafe { mq.write(endpoint.home.mq()) };
        Error::OK
    })
}

/// Closes the queue. Cancels its receives and drops completed requests. If a send or a matched
/// receive is still open, disconnects all peers, which see the endpoint fail.
#[unsafe(no_mangle)]
pub extern "C" fn psm2_mq_finalize(mq: *mut Mq) -> Error {
    guard(|| match find_mq(mq) {
        Ok(mut endpoint) if endpoint.queue != Err(Error::PARAM) => {
            endpoint.finish();
            Error::OK
        }
        _ => Error::PARAM,
    })
}

/// Writes the counters. Writes zeros if the handle is invalid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_get_stats(mq: *mut Mq, stats: *mut MqStats) {
    if stats.is_null() {
        return;
    }
    let mut read = MqStats::default();
    run(|| {
        read = MqStats::new(find_mq(mq)?.queue()?.stats());
        Ok(())
    });
    // SAFETY: `stats` was checked not null, and PSM2 requires it to be writable.
    unsafe { stats.write(read) };
}

/// Posts a send. A send to the endpoint itself completes when a receive matches it, as in PSM2.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_isend2(
    mq: *mut Mq,
    to: *mut EpAddr,
    flags: u32,
    tag: *const MqTag,
    bytes: *mut c_void,
    len: u32,
    context: *mut c_void,
    req: *mut *mut Req,
) -> Error {
    let done = quick(|| {
        own_mq(mq)?.run(|endpoint| {
            if req.is_null() || flags != 0 {
                return None;
            }
            let peer = endpoint.peer_at(to).ok().filter(|_| !endpoint.is_own(to))?;
            // SAFETY: PSM2 requires the tag to be null or valid, and the buffer to stay valid until
            // the request completes.
            let (from, tag) = unsafe { (buffer(bytes, len).ok()?, words(tag).ok()?) };
            let context = context.addr() as u64;
            let sent = endpoint.queue_at_once()?.isend2_at_once(peer, tag, from, context)?;
            // SAFETY: `req` was checked not null, and PSM2 requires it to be writable.
            unsafe { req.write(endpoint.handle(sent)) };
            Some(Error::OK)
        })
    });
    // SAFETY: the requirements are the same.
    done.unwrap_or_else(|| unsafe { isend(mq, to, flags, tag, bytes, len, context, req) })
}

/// [`psm2_mq_isend2`] for a send that cannot be sent at once.
#[inline(never)]
unsafe extern "C" fn isend(
    mq: *mut Mq,
    to: *mut EpAddr,
    flags: u32,
    tag: *const MqTag,
    bytes: *mut c_void,
    len: u32,
    context: *mut c_void,
    req: *mut *mut Req,
) -> Error {
    run(|| {
        if req.is_null() {
            return Err(Error::PARAM);
        }
        // SAFETY: PSM2 requires the tag to be null or valid, and the buffer to stay valid until the
        // request completes.
        let (tag, from) = unsafe { (words(tag)?, buffer(bytes, len)?) };
        let mut endpoint = find_mq(mq)?;
        let peer = endpoint.peer_at(to)?;
        let flags = if endpoint.is_own(to) { flags | FLAG_SENDSYNC } else { flags };
        let begun = begin(&mut endpoint, peer, flags, tag, from, context.addr() as u64)?;
        // SAFETY: `req` was checked not null, and PSM2 requires it to be writable.
        unsafe { req.write(endpoint.handle(begun)) };
        Ok(())
    })
}

/// Begins a send that cannot be sent at once.
#[inline(never)]
fn begin(
    endpoint: &mut Endpoint,
    peer: PeerId,
    flags: u32,
    tag: Tag,
    from: Span,
    context: u64,
) -> Result<MqReq, Error> {
    endpoint.request(|queue| queue.isend2(peer, flags, tag, from, context))
}

/// Sends, and waits until the buffer may be reused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_send2(
    mq: *mut Mq,
    to: *mut EpAddr,
    flags: u32,
    tag: *const MqTag,
    bytes: *mut c_void,
    len: u32,
) -> Error {
    let done = quick(|| {
        own_mq(mq)?.run(|endpoint| {
            if flags != 0 {
                return None;
            }
            let peer = endpoint.peer_at(to).ok()?;
            // SAFETY: PSM2 requires the tag to be null or valid, and the buffer to stay valid until
            // this call returns.
            let (from, tag) = unsafe { (buffer(bytes, len).ok()?, words(tag).ok()?) };
            endpoint.queue_at_once()?.send2_at_once(peer, tag, from).then_some(Error::OK)
        })
    });
    // SAFETY: the requirements are the same.
    done.unwrap_or_else(|| unsafe { send(mq, to, flags, tag, bytes, len) })
}

/// [`psm2_mq_send2`] for a send that cannot be sent at once, or whose thread does not own the lock.
#[inline(never)]
unsafe extern "C" fn send(
    mq: *mut Mq,
    to: *mut EpAddr,
    flags: u32,
    tag: *const MqTag,
    bytes: *mut c_void,
    len: u32,
) -> Error {
    run(|| {
        // SAFETY: PSM2 requires the tag to be null or valid, and the buffer to stay valid until
        // this call returns.
        let (tag, from) = unsafe { (words(tag)?, buffer(bytes, len)?) };
        let mut endpoint = find_mq(mq)?;
        let peer = endpoint.peer_at(to)?;
        if flags == 0 && endpoint.queue()?.send2_at_once(peer, tag, from) {
            endpoint.release();
            return Ok(());
        }
        let begun = begin(&mut endpoint, peer, flags, tag, from, 0)?;
        match wait(endpoint, begun)?.error_code {
            Code::Ok => Ok(()),
            error => Err(error.into()),
        }
    })
}

/// Posts a receive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_irecv2(
    mq: *mut Mq,
    from: *mut EpAddr,
    tag: *const MqTag,
    tagsel: *const MqTag,
    flags: u32,
    bytes: *mut c_void,
    len: u32,
    context: *mut c_void,
    req: *mut *mut Req,
) -> Error {
    let done = quick(|| {
        own_mq(mq)?.run(|endpoint| {
            if req.is_null() {
                return None;
            }
            let source = endpoint.named(from).ok()?;
            // SAFETY: PSM2 requires the tags to be null or valid, and the buffer to stay valid
            // until the request completes.
            let into = unsafe { buffer(bytes, len).ok()? };
            // SAFETY: as above.
            let (tag, tagsel) = unsafe { (words(tag).ok()?, words(tagsel).ok()?) };
            let (queue, context) = (endpoint.queue_at_once(), context.addr() as u64);
            let posted = queue?.irecv2_at_once(source, tag, tagsel, into, context)?;
            // SAFETY: `req` was checked not null; PSM2 requires it to be writable.
            unsafe { req.write(endpoint.handle(posted)) };
            Some(Error::OK)
        })
    });
    // SAFETY: the requirements are the same.
    done.unwrap_or_else(|| unsafe { irecv(mq, from, tag, tagsel, flags, bytes, len, context, req) })
}

/// [`psm2_mq_irecv2`] for a receive that finds all requests in use or must connect a peer, and for
/// all errors.
#[inline(never)]
unsafe extern "C" fn irecv(
    mq: *mut Mq,
    from: *mut EpAddr,
    tag: *const MqTag,
    tagsel: *const MqTag,
    _flags: u32,
    bytes: *mut c_void,
    len: u32,
    context: *mut c_void,
    req: *mut *mut Req,
) -> Error {
    run(|| {
        if req.is_null() {
            return Err(Error::PARAM);
        }
        // SAFETY: PSM2 requires the tags to be null or valid, and the buffer to stay valid until
        // the request completes.
        let (tag, tagsel, into) = unsafe { (words(tag)?, words(tagsel)?, buffer(bytes, len)?) };
        let mut endpoint = find_mq(mq)?;
        let source = endpoint.named(from)?;
        let context = context.addr() as u64;
        let posted = endpoint.request(|queue| queue.irecv2(source, tag, tagsel, into, context))?;
        // SAFETY: `req` was checked not null; PSM2 requires it to be writable.
        unsafe { req.write(endpoint.handle(posted)) };
        Ok(())
    })
}

/// Receives a message claimed by [`psm2_mq_improbe2`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_imrecv(
    mq: *mut Mq,
    _flags: u32,
    bytes: *mut c_void,
    len: u32,
    context: *mut c_void,
    req: *mut *mut Req,
) -> Error {
    run(|| {
        // SAFETY: PSM2 requires `req` to be null or valid.
        let claimed = unsafe { req.as_ref() }.ok_or(Error::PARAM)?;
        // SAFETY: PSM2 requires the buffer to stay valid until the request completes.
        let into = unsafe { buffer(bytes, len)? };
        let (mut endpoint, number) = of_queue(mq, *claimed)?;
        Ok(endpoint.queue()?.imrecv(into, context.addr() as u64, number)?)
    })
}

/// Returns the endpoint that owns `req`, and the number of the request. `mq` must be the queue of
/// that endpoint.
///
/// # Errors
/// The request belongs to another queue.
fn of_queue(mq: *mut Mq, req: *mut Req) -> Result<(Found, MqReq), Error> {
    let (endpoint, req) = find_request(req)?;
    match endpoint.home.mq() == mq {
        true => Ok((endpoint, req)),
        false => Err(Error::PARAM),
    }
}

/// Finds a message that no receive has matched. Leaves it in the queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_iprobe2(
    mq: *mut Mq,
    from: *mut EpAddr,
    tag: *const MqTag,
    tagsel: *const MqTag,
    status: *mut MqStatus2,
) -> Error {
    look(mq, |endpoint| {
        // SAFETY: PSM2 requires each tag to be null or valid.
        let (tag, tagsel) = unsafe { (words(tag)?, words(tagsel)?) };
        let source = endpoint.named(from)?;
        let found = endpoint.queue()?.iprobe2(source, tag.words(), tagsel.words())?;
        // SAFETY: PSM2 requires `status` to be null or writable.
        unsafe { tell(status, &found, endpoint.home) };
        Ok(())
    })
}

/// Finds a message that no receive has matched, and claims it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_improbe2(
    mq: *mut Mq,
    from: *mut EpAddr,
    tag: *const MqTag,
    tagsel: *const MqTag,
    req: *mut *mut Req,
    status: *mut MqStatus2,
) -> Error {
    look(mq, |endpoint| {
        if req.is_null() {
            return Err(Error::PARAM);
        }
        // SAFETY: PSM2 requires each tag to be null or valid.
        let (tag, tagsel) = unsafe { (words(tag)?, words(tagsel)?) };
        let source = endpoint.named(from)?;
        let (claimed, found) =
            endpoint.request(|queue| queue.improbe2(source, tag.words(), tagsel.words()))?;
        // SAFETY: `req` was checked not null. PSM2 requires it to be writable, and `status` to be
        // null or writable.
        unsafe {
            req.write(endpoint.handle(claimed));
            tell(status, &found, endpoint.home);
        }
        Ok(())
    })
}

/// Cancels a receive that has not matched. The receive completes as cancelled. The program must
/// still test it or wait for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_cancel(req: *mut *mut Req) -> Error {
    run(|| {
        // SAFETY: PSM2 requires `req` to be null or valid.
        let req = unsafe { req.as_ref() }.ok_or(Error::PARAM)?;
        if req.is_null() {
            return Err(Error::NO_COMPLETIONS);
        }
        let (mut endpoint, number) = find_request(*req)?;
        Ok(endpoint.queue()?.cancel(&Some(number))?)
    })
}

/// Makes one progress pass.
#[unsafe(no_mangle)]
pub extern "C" fn psm2_poll(ep: *mut Ep) -> Error {
    guard(|| {
        let Some(mut endpoint) = find(ep) else { return Error::PARAM };
        if endpoint.retired {
            return Error::NO_PROGRESS;
        }
        if endpoint.queue == Err(Error::NO_MEMORY) {
            return Error::NO_MEMORY;
        }
        let found = match endpoint.node.queue() {
            Some(mut queue) => queue.poll() != 0,
            None => return Error::INTERNAL,
        };
        let after = endpoint.after(found);
        drop(endpoint);
        after.act();
        if found { Error::OK } else { Error::NO_PROGRESS }
    })
}
