//! Completed requests: peeking at the oldest one, and taking one. Only [`psm2_mq_wait2`] blocks,
//! like [`psm2_mq_send2`](crate::psm2_mq_send2). The others neither wait nor allocate.

use std::ptr::null_mut;

use fishplate::core::psm::Status2;

use crate::call::{Report, finish, run, tell, wait};
use crate::error::Error;
use crate::handle::{Mq, Req};
use crate::layout::{MqStatus, MqStatus2};
use crate::table::{Found, find_mq, find_request};

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
#[inline(always)]
unsafe fn peek<S: Report>(mq: *mut Mq, req: *mut *mut Req, status: *mut S) -> Error {
    run(|| {
        let mut endpoint = find_mq(mq)?;
        if req.is_null() {
            return Err(Error::PARAM);
        }
        let home = endpoint.home;
        let queue = endpoint.queue()?;
        let Some(oldest) = queue.oldest() else {
            // SAFETY: `req` was checked not null, and the caller guarantees the rest.
            return unsafe { peek_after_pass(endpoint, req, status) };
        };
        // SAFETY: `req` was checked not null. PSM2 requires it to be writable, and `status` to be
        // null or writable.
        unsafe {
            if !status.is_null() {
                tell(status, &oldest.status(), home);
            }
            let oldest = oldest.req();
            req.write(endpoint.handle(oldest));
        }
        finish(endpoint, true);
        Ok(())
    })
}

/// # Safety
/// `req` is valid for a write, and `status` is null or valid for a write.
#[inline(never)]
unsafe fn peek_after_pass<S: Report>(
    mut endpoint: Found,
    req: *mut *mut Req,
    status: *mut S,
) -> Result<(), Error> {
    let found = endpoint.queue()?.ipeek2();
    if let Ok((oldest, found)) = &found {
        // SAFETY: the caller guarantees that `req` is writable and `status` null or writable.
        unsafe {
            tell(status, found, endpoint.home);
            req.write(endpoint.handle(*oldest));
        }
    }
    finish(endpoint, found.is_ok());
    Ok(found.map(drop)?)
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
        // SAFETY: the caller guarantees that `status` is null or writable.
        let take = |found: &Status2| unsafe { tell(status, found, home) };
        match WAITS {
            true => take(&wait(endpoint, number)?),
            false => {
                endpoint.queue()?.test2_with(number, take)?;
                endpoint.release();
            }
        }
        *req = null_mut();
        Ok(())
    })
}
