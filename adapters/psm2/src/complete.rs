//! Completed requests: peeking at the oldest one, and taking one. Only [`psm2_mq_wait2`] blocks,
//! like [`psm2_mq_send2`](crate::psm2_mq_send2). The others neither wait nor allocate.

use std::ptr::null_mut;

use fishplate::core::psm::Completed;

use crate::call::{look, quick, run, tell, wait};
use crate::error::Error;
use crate::handle::{Mq, Req};
use crate::layout::{MqStatus, MqStatus2, Report};
use crate::table::{find_request, own_mq, own_request};

/// Returns the oldest completed request. Leaves it in the queue. Open MPI calls this in a loop
/// until it finds no request. If the pass that found the loop's first request was not full, another
/// pass would seldom find more. So the loop's last call makes no pass.
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
#[inline(always)]
unsafe fn peek<S: Report>(mq: *mut Mq, req: *mut *mut Req, status: *mut S) -> Error {
    let done = quick(|| {
        own_mq(mq)?.run(|endpoint| {
            if req.is_null() {
                return None;
            }
            let home = endpoint.home;
            let queue = endpoint.queue_at_once()?;
            let Some(oldest) = queue.oldest() else {
                return std::mem::take(&mut endpoint.drained).then_some(Error::NO_COMPLETIONS);
            };
            // SAFETY: `req` was checked not null. The caller guarantees that it is writable, and
            // `status` null or writable.
            unsafe {
                tell(status, &oldest, home);
                let oldest = oldest.req();
                req.write(endpoint.handle(oldest));
            }
            endpoint.returns_at_once().then_some(Error::OK)
        })
    });
    // SAFETY: the caller guarantees the same.
    done.unwrap_or_else(|| unsafe { peek_slow(mq, req, status) })
}

/// # Safety
/// As for [`peek`].
#[inline(never)]
unsafe extern "C" fn peek_slow<S: Report>(
    mq: *mut Mq,
    req: *mut *mut Req,
    status: *mut S,
) -> Error {
    look(mq, |endpoint| {
        if req.is_null() {
            return Err(Error::PARAM);
        }
        let home = endpoint.home;
        endpoint.drained = false;
        let mut queue = endpoint.queue()?;
        let (oldest, drained) = queue.look();
        let oldest = oldest.ok_or(Error::NO_COMPLETIONS)?;
        // SAFETY: `req` was checked not null. The caller guarantees that it is writable, and
        // `status` null or writable.
        let peer = unsafe {
            tell(status, &oldest, home);
            let (oldest, peer) = (oldest.req(), oldest.msg_peer());
            req.write(endpoint.handle(oldest));
            peer
        };
        // A send to the endpoint itself completes in a later pass than its receive.
        endpoint.drained = drained && !peer.is_some_and(|it| endpoint.is_own(home.address(it)));
        Ok(())
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
    let done = quick(|| {
        // SAFETY: the caller guarantees that `req` is null or valid.
        let req = unsafe { req.as_mut() }?;
        let (endpoint, number) = own_request(*req)?;
        endpoint.run(|endpoint| {
            let home = endpoint.home;
            // SAFETY: the caller guarantees that `status` is null or writable.
            let take = |ended: Completed<'_>| unsafe { tell(status, &ended, home) };
            endpoint.queue_at_once()?.test2_with(number, take)
        })?;
        *req = null_mut();
        Some(Error::OK)
    });
    // SAFETY: the caller guarantees the same.
    done.unwrap_or_else(|| unsafe { take_slow::<S, WAITS>(req, status) })
}

/// # Safety
/// As for [`take`].
#[inline(never)]
unsafe extern "C" fn take_slow<S: Report, const WAITS: bool>(
    req: *mut *mut Req,
    status: *mut S,
) -> Error {
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
        // SAFETY: the caller guarantees that `status` is null or writable.
        unsafe { tell(status, &found, home) };
        *req = null_mut();
        Ok(())
    })
}
