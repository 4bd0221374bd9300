//! The steps that queue calls share: they run a call, wait, and write statuses. Only [`wait`]
//! blocks.

use std::panic::{AssertUnwindSafe, catch_unwind};

use fishplate::core::psm::{Code, MqReq, Status2};

use crate::endpoint::{After, Endpoint};
use crate::error::Error;
use crate::handle::Mq;
use crate::home::Home;
use crate::layout::{Fields, Report};
use crate::table::{Found, find_mq, guard};

#[inline]
pub(crate) fn run(call: impl FnOnce() -> Result<(), Error>) -> Error {
    guard(|| call().err().unwrap_or(Error::OK))
}

/// Runs the fast path of a call. Returns `None` if the slow path must take the call. The fast path
/// has then changed nothing, and the slow path starts from the beginning. To save no registers, a
/// fast path neither calls functions nor panics. So it does not wait for the lock.
#[inline(always)]
pub(crate) fn quick(step: impl FnOnce() -> Option<Error>) -> Option<Error> {
    catch_unwind(AssertUnwindSafe(step)).unwrap_or(Some(Error::INTERNAL))
}

/// Writes a status, unless the pointer is null.
///
/// # Safety
/// `status` is null or valid for a write.
#[inline(always)]
pub(crate) unsafe fn tell<S: Report>(status: *mut S, found: &impl Fields, home: Home) {
    if !status.is_null() {
        // SAFETY: `status` is not null, and the caller guarantees that it is writable.
        unsafe { S::write(status, found, home) };
    }
}

pub(crate) fn wait(mut endpoint: Found, req: MqReq) -> Result<Status2, Error> {
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

/// Ends a call that polls. `found` is true if the call found something.
#[inline(always)]
pub(crate) fn finish(mut endpoint: Found, found: bool) {
    match endpoint.returns(found) {
        true => endpoint.release(),
        false => finish_aside(endpoint, found),
    }
}

#[inline(never)]
fn finish_aside(mut endpoint: Found, found: bool) {
    let after = endpoint.after_aside(found);
    endpoint.release();
    after.act();
}

/// Runs a call that polls. May yield the processor, because a program that finds nothing usually
/// calls again at once.
#[inline]
pub(crate) fn look(mq: *mut Mq, call: impl FnOnce(&mut Endpoint) -> Result<(), Error>) -> Error {
    run(|| {
        let mut endpoint = find_mq(mq)?;
        let result = call(&mut endpoint);
        finish(endpoint, result != Err(Error::NO_COMPLETIONS));
        result
    })
}
