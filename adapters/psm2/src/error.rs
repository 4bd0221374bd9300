//! PSM2's error codes, their descriptions, and the error handlers that programs register.
//!
//! A failed function returns its code. A handler is called if an endpoint cannot be opened, if a
//! peer has failed, and if unexpected messages block an endpoint.

use std::ffi::{CStr, CString, c_char};
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::handle::Ep;

/// `psm2_error_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Error(pub(crate) u32);

impl Error {
    pub(crate) const OK: Error = Error(0);
    pub(crate) const NO_PROGRESS: Error = Error(1);
    pub(crate) const PARAM: Error = Error(3);
    pub(crate) const NO_MEMORY: Error = Error(4);
    pub(crate) const NOT_INIT: Error = Error(5);
    pub(crate) const BAD_VERSION: Error = Error(6);
    pub(crate) const INTERNAL: Error = Error(8);
    pub(crate) const TIMEOUT: Error = Error(11);
    pub(crate) const TOO_MANY_ENDPOINTS: Error = Error(12);
    pub(crate) const DEVICE_FAILURE: Error = Error(23);
    pub(crate) const CLOSE_TIMEOUT: Error = Error(24);
    pub(crate) const NO_NETWORK: Error = Error(26);
    pub(crate) const NO_RESOURCES: Error = Error(28);
    pub(crate) const UNKNOWN: Error = Error(40);
    pub(crate) const UNREACHABLE: Error = Error(41);
    pub(crate) const BAD_UUID: Error = Error(45);
    pub(crate) const EPID_VERSION: Error = Error(46);
    pub(crate) const EPID_NETWORK: Error = Error(49);
    pub(crate) const INVALID_QUERY: Error = Error(71);
    pub(crate) const NO_COMPLETIONS: Error = Error(60);
}

fn text(error: Error) -> &'static CStr {
    match error.0 {
        0 => c"Success",
        1 => c"No events progressed",
        3 => c"Bad parameter",
        4 => c"All 1048576 requests of the endpoint, or all its memory for messages, are in use",
        5 => c"PSM2 is not initialized",
        6 => c"Incompatible API version",
        8 => c"Internal error, or the peer has failed",
        11 => c"Timeout",
        12 => c"Too many endpoints",
        13 => c"PSM2 is finalized",
        20 => c"The endpoint was closed",
        21 => c"No device",
        23 => c"The transport cannot be opened",
        24 => c"Timeout while closing the endpoint",
        26 => c"A peer has failed",
        28 => c"All active message handlers or sends are in use",
        40 => c"Unknown endpoint id",
        41 => c"The endpoint cannot be reached",
        45 => c"The endpoint belongs to another job",
        46 => c"The endpoint has another version",
        49 => c"The connection to the endpoint was lost",
        60 => c"No completions",
        61 => c"Message truncated",
        70 => c"Invalid reply",
        71 => c"Invalid query",
        _ => c"Unknown error",
    }
}

/// Returns a static description of an error.
#[unsafe(no_mangle)]
pub extern "C" fn psm2_error_get_string(error: Error) -> *const c_char {
    text(error).as_ptr()
}

/// Known as `psm2_error_token_t`. A handler may pass it to [`psm2_error_defer`].
pub struct Token {
    error: Error,
    text: CString,
}

/// `psm2_ep_errhandler_t`.
pub type Handler = unsafe extern "C" fn(*mut Ep, Error, *const c_char, *mut Token) -> Error;

/// A function address, `PSM_HANDLER` or `NO_HANDLER`.
static GLOBAL: AtomicUsize = AtomicUsize::new(PSM_HANDLER);

/// Prints the error and exits.
pub(crate) const PSM_HANDLER: usize = usize::MAX;
/// Prints nothing and does not exit.
const NO_HANDLER: usize = usize::MAX - 1;

pub(crate) fn global() -> usize {
    // Relaxed: the value is a code address and publishes no data.
    GLOBAL.load(Ordering::Relaxed)
}

pub(crate) fn set_global(handler: usize) {
    // Relaxed: the value is a code address and publishes no data.
    GLOBAL.store(handler, Ordering::Relaxed);
}

/// Handles an error as PSM2 does without a registered handler: prints it and exits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn psm2_error_defer(token: *mut Token) -> Error {
    // SAFETY: PSM2 requires null, or the token of the handler that is calling us. `report` keeps
    // that token alive until its handler returns.
    let Some(token) = (unsafe { token.as_ref() }) else { return Error::PARAM };
    // Not `eprintln`: it panics if stderr cannot be written, and no panic may cross into C.
    _ = writeln!(std::io::stderr(), "libpsm2: {}", token.text.to_string_lossy());
    std::process::exit(i32::try_from(token.error.0).unwrap_or(1).max(1));
}

/// Calls a handler. The caller must hold no lock, because the handler may call into the library.
pub(crate) fn report(ep: *mut Ep, handler: usize, error: Error, text: String) -> Error {
    if handler == NO_HANDLER {
        return error;
    }
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    let mut token = Token { error, text };
    if handler == PSM_HANDLER {
        // SAFETY: `token` is a local that outlives the call.
        return unsafe { psm2_error_defer(&raw mut token) };
    }
    let text = token.text.as_ptr();
    // SAFETY: the program registered a function of this type. `text` and `token` outlive the call.
    unsafe {
        let handler = std::mem::transmute::<*const (), Handler>(handler as *const ());
        handler(ep, error, text, &raw mut token)
    }
}
