//! Calls that all objects support: close, bind, control.

use core::ffi::{c_int, c_void};
use core::mem::offset_of;

use super::error::CallError;
use super::raw::*;

/// Closes an object. If the call fails, the object stays open.
///
/// # Safety
/// `object` is open, and all objects opened in it are closed. After success it is not used again.
#[doc(alias = "fi_close")]
pub(super) unsafe fn close(object: *mut fid) -> Result<(), CallError> {
    type Close = unsafe extern "C" fn(*mut fid) -> c_int;
    // SAFETY: our caller guarantees that the object is open, so its table is valid and as long as
    // its `size` field says.
    unsafe {
        let close = entry::<fi_ops, Close>((*object).ops, offset_of!(fi_ops, close));
        let close = close.ok_or(CallError::missing("fi_close"))?;
        CallError::check("fi_close", close(object) as isize)?;
    }
    Ok(())
}

/// Binds one object to another.
///
/// # Safety
/// Both objects are open, and `to` stays open until `object` is closed.
#[doc(alias = "fi_ep_bind")]
#[doc(alias = "fi_mr_bind")]
pub(super) unsafe fn bind(
    call: &'static str,
    object: *mut fid,
    to: *mut fid,
    flags: u64,
) -> Result<(), CallError> {
    type Bind = unsafe extern "C" fn(*mut fid, *mut fid, u64) -> c_int;
    // SAFETY: our caller guarantees that both objects are open, so their tables are valid.
    unsafe {
        let bind = entry::<fi_ops, Bind>((*object).ops, offset_of!(fi_ops, bind));
        let bind = bind.ok_or(CallError::missing(call))?;
        CallError::check(call, bind(object, to, flags) as isize)?;
    }
    Ok(())
}

/// Sends a command to an object.
///
/// # Safety
/// The object is open, and `argument` has the type that the command requires.
#[doc(alias = "fi_control")]
pub(super) unsafe fn control(
    call: &'static str,
    object: *mut fid,
    command: c_int,
    argument: *mut c_void,
) -> Result<(), CallError> {
    type Control = unsafe extern "C" fn(*mut fid, c_int, *mut c_void) -> c_int;
    // SAFETY: our caller guarantees that the object is open and the argument has the right type.
    unsafe {
        let control = entry::<fi_ops, Control>((*object).ops, offset_of!(fi_ops, control));
        let control = control.ok_or(CallError::missing(call))?;
        CallError::check(call, control(object, command, argument) as isize)?;
    }
    Ok(())
}
