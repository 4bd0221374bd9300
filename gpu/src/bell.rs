//! Lets a device wake the thread that owns it. A thread of the driver rings the bell, so the owner
//! need not poll while the device works.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

/// A function that a device calls when it has reached a mark: see [`Device::ring`]. Clones call the
/// same function.
///
/// [`Device::ring`]: crate::Device::ring
#[derive(Clone)]
pub struct Bell(Arc<Function>);

// Boxed, so that a pointer to it is thin and fits a `void *`.
struct Function(Box<dyn Fn() + Send + Sync>);

impl fmt::Debug for Bell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bell").finish_non_exhaustive()
    }
}

impl Bell {
    /// Creates a bell. A thread of the driver calls `ring`, perhaps after the device was dropped.
    /// So `ring` must not block, panic, or call the device.
    pub fn new(ring: impl Fn() + Send + Sync + 'static) -> Bell {
        Bell(Arc::new(Function(Box::new(ring))))
    }

    /// Calls the function.
    pub fn ring(&self) {
        (self.0.0)();
    }

    /// Returns the argument for one call of [`ring_raw`](Self::ring_raw). Without that call, one
    /// reference leaks.
    pub(crate) fn to_raw(&self) -> *mut c_void {
        Arc::into_raw(Arc::clone(&self.0)).cast_mut().cast()
    }

    /// Takes back the argument of a call that will not happen.
    ///
    /// # Safety
    /// [`to_raw`](Self::to_raw) returned `bell`, and this is its only use.
    pub(crate) unsafe fn from_raw(bell: *mut c_void) -> Bell {
        // SAFETY: our caller guarantees that `to_raw` made the pointer, and gives up its reference.
        Bell(unsafe { Arc::from_raw(bell.cast_const().cast()) })
    }

    /// Rings a bell once, as a driver calls it.
    ///
    /// # Safety
    /// The same as for [`from_raw`](Self::from_raw).
    pub(crate) unsafe extern "C" fn ring_raw(bell: *mut c_void) {
        // SAFETY: our caller guarantees the same contract.
        unsafe { Bell::from_raw(bell) }.ring();
    }
}
