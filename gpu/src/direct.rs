//! Memory of a device that NICs reach: what a rail over a network needs of the device.
//!
//! Slow paths, but for the flush, which is one call of the driver.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use fishplate_core::error::PostError;
use fishplate_core::mem::{Untrusted, copy_bytes, copy_to_window};

use crate::rail::Stage;
use crate::{Device, DeviceCaps, DeviceError, DevicePtr};

/// A device whose memory NICs reach.
pub struct GpuDirect<D: Device> {
    device: D,
    stage: Stage,
    timeout: Duration,
}

impl<D: Device> GpuDirect<D> {
    /// Takes a device, and 64 KiB of pinned memory. `timeout`: how long a copy of that much may
    /// take.
    pub fn new(mut device: D, timeout: Duration) -> Self {
        let stage = Stage::new(&mut device);
        GpuDirect { device, stage, timeout }
    }

    /// What the device is and can do.
    pub fn caps(&self) -> DeviceCaps {
        self.device.caps()
    }

    /// A descriptor of these bytes, and where they begin in it.
    pub fn dmabuf(&mut self, ptr: DevicePtr, len: u64) -> Option<(OwnedFd, u64)> {
        self.device.dmabuf(ptr, len)
    }

    /// Makes visible to the device what NICs have written.
    ///
    /// # Errors
    /// The driver's.
    pub fn flush(&mut self) -> Result<(), DeviceError> {
        self.device.flush_remote_writes()
    }

    /// Copies bytes into memory of the device, and waits for that.
    ///
    /// # Errors
    /// The copy before has not ended, there is no pinned memory, or the driver's.
    ///
    /// # Safety
    /// `to` and as many bytes behind it as there are in `from` are memory of the device.
    pub unsafe fn place(&mut self, to: DevicePtr, from: Untrusted<'_>) -> Result<(), PostError> {
        match self.device.host_view(to, from.len() as u64) {
            // SAFETY: the processor may write as many bytes there.
            Some(view) => unsafe { copy_to_window(from.as_ptr(), view.as_ptr(), from.len()) },
            None => {
                let deadline = Instant::now() + self.timeout;
                // SAFETY: handed on to our caller.
                unsafe { self.stage.place(&mut self.device, to, from, deadline)? };
            }
        }
        Ok(())
    }

    /// As [`place`](Self::place), the other way.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn fetch(&mut self, from: DevicePtr, into: &mut [u8]) -> Result<(), PostError> {
        match self.device.host_view(from, into.len() as u64) {
            // SAFETY: the processor may read as many bytes there.
            Some(view) => unsafe { copy_bytes(view.as_ptr(), into.as_mut_ptr(), into.len()) },
            None => {
                let deadline = Instant::now() + self.timeout;
                // SAFETY: handed on to our caller.
                unsafe { self.stage.fetch(&mut self.device, from, into, deadline)? };
            }
        }
        Ok(())
    }
}

impl<D: Device> Drop for GpuDirect<D> {
    fn drop(&mut self) {
        self.stage.end(&mut self.device);
    }
}
