//! A library to preload that shows a program an Omni-Path device. Open MPI's PSM2 component and
//! libfabric's PSM2 provider find the device by `glob`; the former reads the state of its ports. On
//! a machine with such a device it changes nothing.
//!
//! Exports only `glob`, which blocks and allocates as the C library's does. Any thread may call it.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::transmute;
use std::sync::OnceLock;

type OnError = Option<extern "C" fn(*const c_char, c_int) -> c_int>;
type Glob = unsafe extern "C" fn(*const c_char, c_int, OnError, *mut c_void) -> c_int;

/// The contents of a port's state file.
const STATE: &[u8] = b"4: ACTIVE\n";

/// The path of a file in memory which says that a port is active.
fn state() -> Option<&'static CStr> {
    static PATH: OnceLock<Option<CString>> = OnceLock::new();
    let path = PATH.get_or_init(|| {
        // SAFETY: the name is a C string, and the write gets the length of its buffer.
        let file = unsafe {
            let file = libc::memfd_create(c"hfi1-port-state".as_ptr(), libc::MFD_CLOEXEC);
            if file < 0 || libc::write(file, STATE.as_ptr().cast(), STATE.len()) != STATE.len() as isize {
                return None;
            }
            file
        };
        // The process id: threads of a process share its files.
        CString::new(format!("/proc/self/fd/{file}")).ok()
    });
    path.as_deref()
}

/// The answer to a pattern on a machine without the device.
fn stand_in(pattern: &CStr) -> Option<&'static CStr> {
    match pattern.to_bytes() {
        // Open MPI's, and libfabric's.
        b"/dev/hfi1_[0-9]" | b"/dev/hfi[0-9]_[0-9]" => Some(c"/dev/null"),
        pattern if pattern.starts_with(b"/sys/class/infiniband/hfi1_") && pattern.ends_with(b"/state") => {
            state()
        }
        _ => None,
    }
}

/// `glob(3)`.
///
/// # Safety
/// As for `glob(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glob(
    pattern: *const c_char,
    flags: c_int,
    on_error: OnError,
    found: *mut c_void,
) -> c_int {
    static NEXT: OnceLock<Option<Glob>> = OnceLock::new();
    let next = NEXT.get_or_init(|| {
        // SAFETY: the name is a C string, and the C library's function of that name has this type.
        unsafe { transmute::<*mut c_void, Option<Glob>>(libc::dlsym(libc::RTLD_NEXT, c"glob".as_ptr())) }
    });
    let Some(next) = next else { return libc::GLOB_ABORTED };
    // SAFETY: our caller guarantees the same contract.
    let result = unsafe { next(pattern, flags, on_error, found) };
    if result != libc::GLOB_NOMATCH || pattern.is_null() {
        return result;
    }
    // SAFETY: not null, and our caller guarantees a C string.
    match stand_in(unsafe { CStr::from_ptr(pattern) }) {
        // SAFETY: as above. A call that found nothing has nothing to free.
        Some(path) => unsafe { next(path.as_ptr(), flags, on_error, found) },
        None => result,
    }
}
