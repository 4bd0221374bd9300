//! Matched queues: the sends and receives of an endpoint. Only [`psm2_mq_send2`] and
//! [`psm2_mq_wait2`] block, without a deadline, as in PSM2. While they wait, they release the lock
//! at intervals. A call that needs a request allocates if all requests are in use.

use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};

use fishplate::core::mem::Span;
use fishplate::core::psm::{Buffer, Code, FLAG_SENDSYNC, MqReq, Status2};

use crate::error::Error;
use crate::handle::{Ep, EpAddr, Mq, Req};
use crate::layout::{MqStats, MqStatus, MqStatus2, MqTag};
use crate::table::{After, Endpoint, Found, Home, find, find_mq, find_request, guard};

/// Converts the caller's pointer and length to a buffer.
///
/// # Errors
/// `at` is null but `len` is not 0.
///
/// # Safety
/// Until the request completes, `at` is valid for `len` bytes. The program does not change the
/// bytes of a send, and does not access the bytes of a receive.
unsafe fn buffer(at: *mut c_void, len: u32) -> Result<Buffer, Error> {
    match NonNull::new(at.cast::<u8>()) {
        _ if len == 0 => Ok(Buffer::Nothing),
        // SAFETY: the caller guarantees that `at` is valid until the request completes.
        Some(at) => Ok(Buffer::Span(unsafe { Span::new(at, len as usize) })),
        None => Err(Error::PARAM),
    }
}

/// Copies the three words of a tag.
///
/// # Safety
/// `tag` is null or points to a tag.
#[inline(always)]
unsafe fn words(tag: *const MqTag) -> Result<[u32; 3], Error> {
    if tag.is_null() {
        return Err(Error::PARAM);
    }
    // Programs store the words one by one just before the call. A load that spans two of these
    // stores cannot be forwarded, so volatile loads keep the words apart.
    let word = |at: usize| {
        // SAFETY: `tag` is not null, and the caller guarantees that it points to a tag.
        unsafe { (&raw const (*tag).words[at]).read_volatile() }
    };
    Ok([word(0), word(1), word(2)])
}

#[inline]
fn run(call: impl FnOnce() -> Result<(), Error>) -> Error {
    guard(|| call().err().unwrap_or(Error::OK))
}

trait Report {
    fn new(found: &Status2, home: Home) -> Self;
}

impl Report for MqStatus {
    #[inline(always)]
    fn new(found: &Status2, _: Home) -> Self {
        MqStatus::new(found)
    }
}

impl Report for MqStatus2 {
    #[inline(always)]
    fn new(found: &Status2, home: Home) -> Self {
        MqStatus2::new(found, home)
    }
}

/// Writes a status, unless the pointer is null.
///
/// # Safety
/// `status` is null or valid for a write.
#[inline(always)]
unsafe fn tell<S: Report>(status: *mut S, found: &Status2, home: Home) {
    if !status.is_null() {
        // SAFETY: `status` is not null, and the caller guarantees that it is writable.
        unsafe { status.write(S::new(found, home)) };
    }
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
    run(|| {
        if req.is_null() {
            return Err(Error::PARAM);
        }
        // SAFETY: PSM2 requires the tag to be null or valid, and the buffer to stay valid until the
        // request completes.
        let (tag, from) = unsafe { (words(tag)?, buffer(bytes, len)?) };
        let mut endpoint = find_mq(mq)?;
        let flags = if endpoint.is_own(to) { flags | FLAG_SENDSYNC } else { flags };
        let peer = endpoint.named(to)?.ok_or(Error::PARAM)?;
        let context = context.addr() as u64;
        let begun = endpoint.request(|queue| queue.isend2(peer, flags, tag, from, context))?;
        // SAFETY: `req` was checked not null, and PSM2 requires it to be writable.
        unsafe { req.write(endpoint.home.request(begun)) };
        Ok(())
    })
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
    run(|| {
        // SAFETY: PSM2 requires the tag to be null or valid, and the buffer to stay valid until
        // this call returns.
        let (tag, from) = unsafe { (words(tag)?, buffer(bytes, len)?) };
        let mut endpoint = find_mq(mq)?;
        let peer = endpoint.named(to)?.ok_or(Error::PARAM)?;
        if flags == 0 && endpoint.queue()?.send2_at_once(peer, tag, from) {
            return Ok(());
        }
        let begun = endpoint.request(|queue| queue.isend2(peer, flags, tag, from, 0))?;
        match wait(endpoint, begun)?.error_code {
            Code::Ok => Ok(()),
            error => Err(error.into()),
        }
    })
}

fn wait(mut endpoint: Found, req: MqReq) -> Result<Status2, Error> {
    loop {
        match endpoint.queue()?.test2(&mut Some(req)) {
            Err(Code::NoCompletions) => endpoint = pass(endpoint)?,
            ended => return Ok(ended?),
        }
    }
}

/// Makes a pass. Releases the lock for a moment if there is something else to do.
#[inline(never)]
fn pass(mut endpoint: Found) -> Result<Found, Error> {
    let home = endpoint.home;
    let found = endpoint.queue()?.poll() != 0;
    match endpoint.after(found) {
        After::Nothing => Ok(endpoint),
        after => {
            drop(endpoint);
            after.act();
            home.find().ok_or(Error::PARAM)
        }
    }
}

/// Posts a receive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_irecv2(
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
        unsafe { req.write(endpoint.home.request(posted)) };
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
        endpoint.request(|queue| queue.imrecv(into, context.addr() as u64, number))
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
        let found = endpoint.queue()?.iprobe2(source, tag, tagsel)?;
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
        let (claimed, found) = endpoint.request(|queue| queue.improbe2(source, tag, tagsel))?;
        // SAFETY: `req` was checked not null. PSM2 requires it to be writable, and `status` to be
        // null or writable.
        unsafe {
            req.write(endpoint.home.request(claimed));
            tell(status, &found, endpoint.home);
        }
        Ok(())
    })
}

/// Returns the oldest completed request. Leaves it in the queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_ipeek2(
    mq: *mut Mq,
    req: *mut *mut Req,
    status: *mut MqStatus2,
) -> Error {
    // SAFETY: PSM2 requires `req` and `status` to be null or writable.
    unsafe { peek(mq, req, status) }
}

/// [`psm2_mq_ipeek2`] for 64-bit tags.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_ipeek(
    mq: *mut Mq,
    req: *mut *mut Req,
    status: *mut MqStatus,
) -> Error {
    // SAFETY: PSM2 requires `req` and `status` to be null or writable.
    unsafe { peek(mq, req, status) }
}

/// # Safety
/// `req` and `status` are null or valid for a write.
#[inline]
unsafe fn peek<S: Report>(mq: *mut Mq, req: *mut *mut Req, status: *mut S) -> Error {
    look(mq, |endpoint| {
        if req.is_null() {
            return Err(Error::PARAM);
        }
        let (oldest, found) = endpoint.queue()?.ipeek2()?;
        // SAFETY: `req` was checked not null. PSM2 requires it to be writable, and `status` to be
        // null or writable.
        unsafe {
            req.write(endpoint.home.request(oldest));
            tell(status, &found, endpoint.home);
        }
        Ok(())
    })
}

/// Runs a call that polls. May yield the processor, because a program that finds nothing usually
/// calls again at once.
#[inline]
fn look(mq: *mut Mq, call: impl FnOnce(&mut Endpoint) -> Result<(), Error>) -> Error {
    run(|| {
        let mut endpoint = find_mq(mq)?;
        let result = call(&mut endpoint);
        let after = endpoint.after(result != Err(Error::NO_COMPLETIONS));
        drop(endpoint);
        after.act();
        result
    })
}

/// Frees a request if it has completed. Makes no progress.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_test2(req: *mut *mut Req, status: *mut MqStatus2) -> Error {
    // SAFETY: PSM2 requires `req` and `status` to be null or valid.
    unsafe { take::<_, false>(req, status) }
}

/// [`psm2_mq_test2`] for 64-bit tags.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_test(req: *mut *mut Req, status: *mut MqStatus) -> Error {
    // SAFETY: PSM2 requires `req` and `status` to be null or valid.
    unsafe { take::<_, false>(req, status) }
}

/// Waits for a request to complete, and frees it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_wait2(req: *mut *mut Req, status: *mut MqStatus2) -> Error {
    // SAFETY: PSM2 requires `req` and `status` to be null or valid.
    unsafe { take::<_, true>(req, status) }
}

/// Frees a completed request, and clears the handle. Does nothing if the handle is null. If
/// `WAITS`, waits until the request has completed.
///
/// # Safety
/// `req` and `status` are null or valid for reads and writes.
#[inline(always)]
unsafe fn take<S: Report, const WAITS: bool>(req: *mut *mut Req, status: *mut S) -> Error {
    run(|| {
        // SAFETY: the caller guarantees that `req` is null or valid.
        let req = unsafe { req.as_mut() }.ok_or(Error::PARAM)?;
        if req.is_null() {
            return Ok(());
        }
        let (mut endpoint, number) = find_request(*req)?;
        let home = endpoint.home;
        let found = match WAITS {
            true => wait(endpoint, number)?,
            false => endpoint.queue()?.test2(&mut Some(number))?,
        };
        *req = null_mut();
        // SAFETY: the caller guarantees that `status` is null or writable.
        unsafe { tell(status, &found, home) };
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
