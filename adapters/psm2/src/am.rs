//! Active messages and the query of devices. Debian's libfabric is linked with these functions, and
//! does not load without them. The functions of active messages return an error. The query reports
//! no devices, so libfabric's own `psm2` provider offers nothing.

use std::ffi::c_void;

use crate::error::Error;
use crate::handle::{Ep, EpAddr};

/// `PSM2_INFO_QUERY_NUM_UNITS`.
const UNITS: u32 = 0;

/// Returns the number of devices: 0. Any other query is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_info_query(
    query: u32,
    out: *mut c_void,
    _count: usize,
    _: *mut c_void,
) -> Error {
    if query != UNITS || out.is_null() {
        return Error::INVALID_QUERY;
    }
    // SAFETY: not null. For this query the header requires a number of the caller.
    unsafe { out.cast::<u32>().write(0) };
    Error::OK
}

/// Always fails: active messages are not supported.
#[unsafe(no_mangle)]
pub extern "C" fn psm2_am_get_parameters(_: *mut Ep, _: *mut c_void, _: usize, _: *mut usize) -> Error {
    Error::PARAM
}

/// Refused.
#[unsafe(no_mangle)]
pub extern "C" fn psm2_am_register_handlers_2(
    _: *mut Ep,
    _: *const c_void,
    _: i32,
    _: *mut *mut c_void,
    _: *mut i32,
) -> Error {
    Error::PARAM
}

/// Refused.
#[unsafe(no_mangle)]
pub extern "C" fn psm2_am_request_short(
    _: *mut EpAddr,
    _: u32,
    _: *mut c_void,
    _: i32,
    _: *mut c_void,
    _: usize,
    _: i32,
    _: *mut c_void,
    _: *mut c_void,
) -> Error {
    Error::PARAM
}

/// Refused.
#[unsafe(no_mangle)]
pub extern "C" fn psm2_am_reply_short(
    _: *mut c_void,
    _: u32,
    _: *mut c_void,
    _: i32,
    _: *mut c_void,
    _: usize,
    _: i32,
    _: *mut c_void,
    _: *mut c_void,
) -> Error {
    Error::PARAM
}

/// Refused.
#[unsafe(no_mangle)]
pub extern "C" fn psm2_am_get_source(_: *mut c_void, _: *mut *mut EpAddr) -> Error {
    Error::PARAM
}
