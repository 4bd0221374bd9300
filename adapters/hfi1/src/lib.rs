//! A preload library that makes a program see an Omni-Path device. Open MPI's PSM2 component and
//! libfabric's PSM2 provider look for the device with `glob`. Open MPI also reads the state of the
//! device's ports. If the machine has an Omni-Path device, the library changes nothing.
//!
//! Set `LD_PRELOAD=libfishplate_hfi1.so`; `docs/mpi.md` shows how with `mpirun`.
//!
//! Exports only `glob`, which blocks and allocates as the C library's `glob` does. Any thread may
//! call it.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::transmute;
use std::sync::OnceLock;

type OnError = Option<extern "C" fn(*const c_char, c_int) -> c_int>;
type Glob = unsafe extern "C" fn(*const c_char, c_int, OnError, *mut c_void) -> c_int;

const STATE: &[u8] = b"4: ACTIVE\n";

/// The path of an in-memory file that holds [`STATE`].
fn state() -> Option<&'static CStr> {
    static PATH: OnceLock<Option<CString>> = OnceLock::new();
    let path = PATH.get_or_init(|| {
        // SAFETY: the name is a C string, and `STATE` is valid for its length.
        let file = unsafe {
            let file = libc::memfd_create(c"hfi1-port-state".as_ptr(), libc::MFD_CLOEXEC);
            if file < 0
                || libc::write(file, STATE.as_ptr().cast(), STATE.len()) != STATE.len() as isize
            {
                return None;
            }
            file
        };
        // `/proc/self` names the process, and its threads share the descriptor.
        CString::new(format!("/proc/self/fd/{file}")).ok()
    });
    path.as_deref()
}

/// Returns the path to report for a pattern that matches nothing. Returns `None` for patterns of
/// other files.
fn stand_in(pattern: &CStr) -> Option<&'static CStr> {
    match pattern.to_bytes() {
        b"/dev/hfi1_[0-9]" | b"/dev/hfi[0-9]_[0-9]" => Some(c"/dev/null"),
        pattern
            if pattern.starts_with(b"/sys/class/infiniband/hfi1_")
                && pattern.ends_with(b"/state") =>
        {
            state()
        }
        _ => None,
    }
}

/// Wraps the C library's `glob(3)`.
///
/// # Safety
/// The same as for `glob(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glob(
    pattern: *const c_char,
    flags: c_int,
    on_error: OnError,
    found: *mut c_void,
) -> c_int {
    static NEXT: OnceLock<Option<Glob>> = OnceLock::new();
    let next = NEXT.get_or_init(|| {
        // SAFETY: the name is a C string, and the next `glob` in the search order has this type.
        unsafe {
            transmute::<*mut c_void, Option<Glob>>(libc::dlsym(libc::RTLD_NEXT, c"glob".as_ptr()))
        }
    });
    let Some(next) = next else { return libc::GLOB_ABORTED };
    // SAFETY: our caller guarantees the same contract.
    let result = unsafe { next(pattern, flags, on_error, found) };
    if result != libc::GLOB_NOMATCH || pattern.is_null() {
        return result;
    }
    // SAFETY: `pattern` is not null, and `glob(3)` requires a C string.
    match stand_in(unsafe { CStr::from_ptr(pattern) }) {
        // SAFETY: the path is a C string, and `found` is the caller's. The first call found
        // nothing, so it left nothing to free.
        Some(path) => unsafe { next(path.as_ptr(), flags, on_error, found) },
        None => result,
    }
}
