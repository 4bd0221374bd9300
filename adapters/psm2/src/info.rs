//! The library reports one unit with one active port. Nothing here waits.

use std::ffi::c_void;

use crate::error::Error;
use crate::home::SLOTS;
use crate::open::is_nested;

const UNITS: u32 = 0;
const PORTS: u32 = 1;
const UNIT_STATUS: u32 = 2;
const PORT_STATUS: u32 = 3;
const FREE_CONTEXTS: u32 = 4;
const CONTEXTS: u32 = 5;
const FEATURES: u32 = 12;

/// Answers queries about units, ports and the library. Refuses queries about a connection.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_info_query(
    query: u32,
    out: *mut c_void,
    count: usize,
    args: *const u64,
) -> Error {
    let wanted = match query {
        UNIT_STATUS | FREE_CONTEXTS | CONTEXTS => 1,
        PORT_STATUS => 2,
        _ => 0,
    };
    if out.is_null() || count != wanted || (wanted != 0 && args.is_null()) {
        return Error::INVALID_QUERY;
    }
    // SAFETY: `args` was checked not null unless `wanted` is 0. PSM2 requires `wanted` unions. The
    // low half of each union is a number.
    let named = unsafe { (0..wanted).map(|at| *args.add(at) as u32) };
    // PSM2 numbers units from 0 and ports from 1.
    let exists = named.enumerate().all(|(nth, number)| number == nth as u32);
    let answer = match query {
        // Reports no unit to the libfabric that this library loads, so that libfabric does not call
        // back.
        UNITS => u32::from(!is_nested()),
        PORTS => 1,
        UNIT_STATUS | PORT_STATUS => u32::from(exists),
        FREE_CONTEXTS | CONTEXTS if exists => SLOTS as u32,
        FEATURES => 0,
        _ => return Error::INVALID_QUERY,
    };
    // SAFETY: `out` was checked not null. For these queries `psm2.h` requires a writable u32 there.
    unsafe { out.cast::<u32>().write(answer) };
    Error::OK
}
