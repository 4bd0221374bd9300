//! Matched queues: what an endpoint sends and receives. Only [`psm2_mq_send2`] and
//! [`psm2_mq_wait2`] block, without a deadline, as in PSM2. They release the lock now and then.
//! A call that needs a request may allocate, when all are in use.

use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};

use fishplate::core::mem::Span;
use fishplate::core::psm::{Buffer, Code, FLAG_SENDSYNC, MqReq, Status2};

use crate::error::Error;
use crate::handle::{Ep, EpAddr, Mq, Req};
use crate::layout::{MqStats, MqStatus, MqStatus2, MqTag};
use crate::table::{After, Endpoint, Found, Home, find, find_mq, find_request, guard};

/// Returns the caller's buffer as a slice.
///
/// # Errors
/// Bytes at null.
///
/// # Safety
/// PSM2's promise: until the request ends, `at` is valid for `len` bytes, unchanged where they are
/// sent, and the library's alone where they are received.
unsafe fn buffer(at: *mut c_void, len: u32) -> Result<Buffer, Error> {
    match NonNull::new(at.cast::<u8>()) {
        _ if len == 0 => Ok(Buffer::Nothing),
        // SAFETY: as this function requires.
        Some(at) => Ok(Buffer::Span(unsafe { Span::new(at, len as usize) })),
        None => Err(Error::PARAM),
    }
}

/// The three words of a tag.
///
/// # Safety
/// Null, or a tag of the caller.
unsafe fn words(tag: *const MqTag) -> Result<[u32; 3], Error> {
    // SAFETY: as this function requires.
    let tag = unsafe { tag.as_ref() }.ok_or(Error::PARAM)?;
    let [a, b, c, _] = tag.words;
    Ok([a, b, c])
}

/// Runs a function of the library, and returns its result as PSM2 does.
#[inline]
fn run(call: impl FnOnce() -> Result<(), Error>) -> Error {
    guard(|| call().err().unwrap_or(Error::OK))
}

/// A status that the program reads.
trait Report {
    fn new(found: &Status2, home: Home) -> Self;
}

impl Report for MqStatus {
    fn new(found: &Status2, _: Home) -> Self {
        MqStatus::new(found)
    }
}

impl Report for MqStatus2 {
    fn new(found: &Status2, home: Home) -> Self {
        MqStatus2::new(found, home)
    }
}

/// Writes a status, if the program wants one.
///
/// # Safety
/// `status` is null, or the caller's.
unsafe fn tell<S: Report>(status: *mut S, found: &Status2, home: Home) {
    if !status.is_null() {
        // SAFETY: not null, and room for a status, as our caller promises.
        unsafe { status.write(S::new(found, home)) };
    }
}

/// Initializes the only queue of an endpoint. Ignores the options.
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
        // SAFETY: not null, and the caller's.
        unsafe { mq.write(endpoint.home.mq()) };
        Error::OK
    })
}

/// Frees the queue: cancels its receives, and drops what has completed. If a send or a matched
/// receive is still open, the endpoint disconnects all its peers, which see it fail.
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

/// Writes the counters; zeros if the handle names no queue.
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
    // SAFETY: not null, and the caller's.
    unsafe { stats.write(read) };
}

fn isend(
    endpoint: &mut Endpoint,
    to: *mut EpAddr,
    flags: u32,
    tag: [u32; 3],
    from: Buffer,
    context: *mut c_void,
) -> Result<MqReq, Error> {
    let to = endpoint.named(to)?.ok_or(Error::PARAM)?;
    endpoint.request(|queue| queue.isend2(to, flags, tag, from, context.addr() as u64))
}

/// Begins a send. As in PSM2, a send to the endpoint itself completes only when it has matched.
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
        // SAFETY: as PSM2 demands of our caller.
        let (tag, from) = unsafe { (words(tag)?, buffer(bytes, len)?) };
        let mut endpoint = find_mq(mq)?;
        let flags = if endpoint.is_own(to) { flags | FLAG_SENDSYNC } else { flags };
        let begun = isend(&mut endpoint, to, flags, tag, from, context)?;
        // SAFETY: not null, and the caller's.
        unsafe { req.write(endpoint.home.request(begun)) };
        Ok(())
    })
}

/// Sends, and waits until the bytes may be reused.
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
        // SAFETY: as PSM2 demands of our caller.
        let (tag, from) = unsafe { (words(tag)?, buffer(bytes, len)?) };
        let mut endpoint = find_mq(mq)?;
        let begun = isend(&mut endpoint, to, flags, tag, from, null_mut())?;
        let status = wait(endpoint, begun)?;
        match Error::from(status.error_code) {
            Error::OK => Ok(()),
            error => Err(error),
        }
    })
}

/// Waits for a request of the endpoint, and takes it.
fn wait(mut endpoint: Found, req: MqReq) -> Result<Status2, Error> {
    let home = endpoint.home;
    loop {
        let mut queue = endpoint.queue()?;
        match queue.test2(&mut Some(req)) {
            Err(Code::NoCompletions) => {}
            ended => return Ok(ended?),
        }
        let found = queue.poll() != 0;
        match endpoint.after(found) {
            // The lock goes to another thread only if it is released for a while.
            After::Nothing => {}
            after => {
                drop(endpoint);
                after.act();
                endpoint = home.find().ok_or(Error::PARAM)?;
            }
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
        // SAFETY: as PSM2 demands of our caller.
        let (tag, tagsel, into) = unsafe { (words(tag)?, words(tagsel)?, buffer(bytes, len)?) };
        let mut endpoint = find_mq(mq)?;
        let source = endpoint.named(from)?;
        let context = context.addr() as u64;
        let posted = endpoint.request(|queue| queue.irecv2(source, tag, tagsel, into, context))?;
        // SAFETY: `req` is not null, and the caller guarantees that it is writable.
        unsafe { req.write(endpoint.home.request(posted)) };
        Ok(())
    })
}

/// Receives a message that [`psm2_mq_improbe2`] has claimed.
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
        // SAFETY: null, or the caller's.
        let claimed = unsafe { req.as_ref() }.ok_or(Error::PARAM)?;
        // SAFETY: as PSM2 demands of our caller.
        let into = unsafe { buffer(bytes, len)? };
        let (mut endpoint, number) = of_queue(mq, *claimed)?;
        endpoint.request(|queue| queue.imrecv(into, context.addr() as u64, number))
    })
}

/// The endpoint of a queue, and its request of that handle.
fn of_queue(mq: *mut Mq, req: *mut Req) -> Result<(Found, MqReq), Error> {
    let (endpoint, req) = find_request(req)?;
    match endpoint.home.mq() == mq {
        true => Ok((endpoint, req)),
        false => Err(Error::PARAM),
    }
}

/// Finds a message that no receive has taken, and leaves it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_iprobe2(
    mq: *mut Mq,
    from: *mut EpAddr,
    tag: *const MqTag,
    tagsel: *const MqTag,
    status: *mut MqStatus2,
) -> Error {
    look(mq, |endpoint| {
        // SAFETY: null, or tags of the caller.
        let (tag, tagsel) = unsafe { (words(tag)?, words(tagsel)?) };
        let source = endpoint.named(from)?;
        let found = endpoint.queue()?.iprobe2(source, tag, tagsel)?;
        // SAFETY: null, or the caller's.
        unsafe { tell(status, &found, endpoint.home) };
        Ok(())
    })
}

/// Finds a message that no receive has taken, and claims it.
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
        // SAFETY: null, or tags of the caller.
        let (tag, tagsel) = unsafe { (words(tag)?, words(tagsel)?) };
        let source = endpoint.named(from)?;
        let (claimed, found) = endpoint.request(|queue| queue.improbe2(source, tag, tagsel))?;
        // SAFETY: not null, and the caller's; the status may be null.
        unsafe {
            req.write(endpoint.home.request(claimed));
            tell(status, &found, endpoint.home);
        }
        Ok(())
    })
}

/// Returns the request that completed first, and leaves it in the queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_ipeek2(mq: *mut Mq, req: *mut *mut Req, status: *mut MqStatus2) -> Error {
    // SAFETY: as PSM2 demands of our caller.
    unsafe { peek(mq, req, status) }
}

/// [`psm2_mq_ipeek2`] for tags of 64 bits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_ipeek(mq: *mut Mq, req: *mut *mut Req, status: *mut MqStatus) -> Error {
    // SAFETY: as PSM2 demands of our caller.
    unsafe { peek(mq, req, status) }
}

/// # Safety
/// `req` and `status` are null, or the caller's.
#[inline]
unsafe fn peek<S: Report>(mq: *mut Mq, req: *mut *mut Req, status: *mut S) -> Error {
    look(mq, |endpoint| {
        if req.is_null() {
            return Err(Error::PARAM);
        }
        let (oldest, found) = endpoint.queue()?.ipeek2()?;
        // SAFETY: not null, and the caller's; the status may be null.
        unsafe {
            req.write(endpoint.home.request(oldest));
            tell(status, &found, endpoint.home);
        }
        Ok(())
    })
}

/// Runs a call that looks for something. A program that finds nothing calls again at once, so this
/// may yield.
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

/// Takes a request if it has completed. Makes no progress.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_test2(req: *mut *mut Req, status: *mut MqStatus2) -> Error {
    // SAFETY: as PSM2 demands of our caller.
    unsafe { take(req, status, test) }
}

/// [`psm2_mq_test2`] for tags of 64 bits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_test(req: *mut *mut Req, status: *mut MqStatus) -> Error {
    // SAFETY: as PSM2 demands of our caller.
    unsafe { take(req, status, test) }
}

/// Waits for a request, and takes it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_wait2(req: *mut *mut Req, status: *mut MqStatus2) -> Error {
    // SAFETY: as PSM2 demands of our caller.
    unsafe { take(req, status, wait) }
}

fn test(mut endpoint: Found, req: MqReq) -> Result<Status2, Error> {
    Ok(endpoint.queue()?.test2(&mut Some(req))?)
}

/// Takes a request by `call`, and clears the handle. Without a request there is nothing to do.
///
/// # Safety
/// `req` and `status` are null, or the caller's.
#[inline]
unsafe fn take<S: Report>(
    req: *mut *mut Req,
    status: *mut S,
    call: impl FnOnce(Found, MqReq) -> Result<Status2, Error>,
) -> Error {
    run(|| {
        // SAFETY: null, or the caller's.
        let req = unsafe { req.as_mut() }.ok_or(Error::PARAM)?;
        if req.is_null() {
            return Ok(());
        }
        let (endpoint, number) = find_request(*req)?;
        let home = endpoint.home;
        let found = call(endpoint, number)?;
        *req = null_mut();
        // SAFETY: null, or the caller's.
        unsafe { tell(status, &found, home) };
        Ok(())
    })
}

/// Cancels a receive that nothing has matched. It completes, and is still to be taken.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_mq_cancel(req: *mut *mut Req) -> Error {
    run(|| {
        // SAFETY: null, or the caller's.
        let req = unsafe { req.as_ref() }.ok_or(Error::PARAM)?;
        if req.is_null() {
            return Err(Error::NO_COMPLETIONS);
        }
        let (mut endpoint, number) = find_request(*req)?;
        Ok(endpoint.queue()?.cancel(&Some(number))?)
    })
}

/// Makes one pass on an endpoint.
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
