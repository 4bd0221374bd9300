//! The device operations that a network rail needs for device memory that NICs access.
//!
//! All are slow paths except [`GpuDirect::flush`], which is one driver call.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use fishplate_core::error::PostError;
use fishplate_core::mem::{Untrusted, copy_bytes};

use crate::rail::{Stage, write_window};
use crate::{Device, DeviceCaps, DeviceError, DevicePtr};

/// A device with memory that NICs access, and a pinned buffer for copies from and to host memory.
pub struct GpuDirect<D: Device> {
    device: D,
    stage: Stage,
    timeout: Duration,
}

impl<D: Device> GpuDirect<D> {
    /// Pins 64 KiB of host memory for copies. `timeout` limits the copy of one 64 KiB piece.
    pub fn new(mut device: D, timeout: Duration) -> Self {
        let stage = Stage::new(&mut device);
        GpuDirect { device, stage, timeout }
    }

    /// Returns the device's properties.
    pub fn caps(&self) -> DeviceCaps {
        self.device.caps()
    }

    /// Returns a dmabuf descriptor of a range, and the offset of the range in it.
    pub fn dmabuf(&mut self, ptr: DevicePtr, len: u64) -> Option<(OwnedFd, u64)> {
        self.device.dmabuf(ptr, len)
    }

    /// Makes earlier NIC writes visible to the device.
    pub fn flush(&mut self) -> Result<(), DeviceError> {
        self.device.flush_remote_writes()
    }

    /// Copies bytes into device memory, and waits for the copy.
    ///
    /// # Errors
    /// Fails if an earlier copy is still in progress, or this copy exceeds the time limit. Also
    /// fails if there is no pinned memory, or the driver fails.
    ///
    /// # Safety
    /// `from.len()` bytes at `to` are device memory.
    pub unsafe fn write_device(
        &mut self,
        to: DevicePtr,
        from: Untrusted<'_>,
    ) -> Result<(), PostError> {
        match self.device.host_view(to, from.len() as u64) {
            // SAFETY: the processor may write `from.len()` bytes at the address that `host_view`
            // returned.
            Some(view) => unsafe { write_window(view.as_ptr(), from) },
            None => {
                let deadline = Instant::now() + self.timeout;
                // SAFETY: the caller guarantees that the range is device memory.
                unsafe { self.stage.write_device(&mut self.device, to, from, deadline)? };
            }
        }
        Ok(())
    }

    /// Copies bytes out of device memory, and waits for the copy.
    ///
    /// # Errors
    /// Fails if an earlier copy is still in progress, or this copy exceeds the time limit. Also
    /// fails if there is no pinned memory, or the driver fails.
    ///
    /// # Safety
    /// `into.len()` bytes at `from` are device memory.
    pub unsafe fn read_device(
        &mut self,
        from: DevicePtr,
        into: &mut [u8],
    ) -> Result<(), PostError> {
        match self.device.host_view(from, into.len() as u64) {
            // SAFETY: the processor may read `into.len()` bytes at the address that `host_view`
            // returned.
            Some(view) => unsafe { copy_bytes(view.as_ptr(), into.as_mut_ptr(), into.len()) },
            None => {
                let deadline = Instant::now() + self.timeout;
                // SAFETY: the caller guarantees that the range is device memory.
                unsafe { self.stage.read_device(&mut self.device, from, into, deadline)? };
            }
        }
        Ok(())
    }

    /// Asks the driver whether a failed call may have left a copy in progress.
    pub fn is_copying(&mut self) -> bool {
        self.stage.look(&mut self.device);
        self.stage.is_unsure()
    }
}

impl<D: Device> Drop for GpuDirect<D> {
    fn drop(&mut self) {
        self.stage.end(&mut self.device);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Behaviour, Call, FakeDriver};

    #[test]
    fn an_abandoned_copy_is_reported_until_it_finishes() {
        for known in [true, false] {
            let driver = FakeDriver::new(Behaviour { late: 1_000_000, ..Behaviour::LATE }, 5);
            let process = driver.process();
            let mut memory = process.device(0).unwrap();
            let at = memory.alloc(4096).unwrap();
            let mut direct = GpuDirect::new(process.device(0).unwrap(), Duration::from_millis(1));
            assert!(!direct.is_copying());
            if !known {
                process.fail(Call::Reached, 0, DeviceError::Driver(999));
            }
            // SAFETY: `at` is device memory of 4096 bytes.
            let placed = unsafe { direct.write_device(at, Untrusted::from_slice(&[7; 64])) };
            assert!(placed.is_err());
            assert!(direct.is_copying());
            driver.drain();
            assert_eq!(direct.is_copying(), !known);
        }
    }
}
