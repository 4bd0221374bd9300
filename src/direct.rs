//! Lets a libfabric rail access GPU memory directly, if the rail's provider supports `FI_HMEM`.

use std::os::fd::IntoRawFd;
use std::ptr::NonNull;
use std::time::Duration;

use fishplate_core::error::PostError;
use fishplate_core::mem::{Untrusted, copy_bytes};
use fishplate_gpu::{Device, DeviceError, DevicePtr, GpuDirect};
use fishplate_sys::fabric::rail::{DeviceMemory, Dmabuf, Interface};

/// Time limit for copies of small messages by the device.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Wraps a device of the driver `interface` for
/// [`FabricRail::reach`](fishplate_sys::fabric::FabricRail::reach). Each rail needs its own
/// wrapper. A wrapper pins 64 KiB.
pub fn direct(device: impl Device + 'static, interface: Interface) -> Box<dyn DeviceMemory> {
    Box::new(Direct { device: GpuDirect::new(device, TIMEOUT), interface })
}

/// Stands in for a GPU: the memory of a [`HostDevice`](fishplate_gpu::HostDevice), which the
/// processor accesses directly.
pub(crate) struct StandIn;

// SAFETY: copies complete before they return, and the processor's stores need no flush.
unsafe impl DeviceMemory for StandIn {
    fn interface(&self) -> Interface {
        Interface::Host
    }

    fn ordinal(&self) -> u32 {
        0
    }

    fn dmabuf(&mut self, _: NonNull<u8>, _: usize) -> Option<Dmabuf> {
        None
    }

    fn must_flush(&self) -> bool {
        false
    }

    fn flush(&mut self) -> Result<(), i32> {
        Ok(())
    }

    unsafe fn write_device(
        &mut self,
        to: NonNull<u8>,
        from: Untrusted<'_>,
    ) -> Result<(), PostError> {
        // SAFETY: the memory is host memory, and the caller guarantees that the range is valid.
        unsafe { copy_bytes(from.as_ptr(), to.as_ptr(), from.len()) };
        Ok(())
    }

    unsafe fn read_device(&mut self, from: NonNull<u8>, into: &mut [u8]) -> Result<(), PostError> {
        // SAFETY: the memory is host memory, and the caller guarantees that the range is valid.
        unsafe { copy_bytes(from.as_ptr(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    fn is_copying(&mut self) -> bool {
        false
    }
}

struct Direct<D: Device> {
    device: GpuDirect<D>,
    interface: Interface,
}

fn at(ptr: NonNull<u8>) -> DevicePtr {
    DevicePtr(ptr.as_ptr().addr() as u64)
}

// SAFETY: `Device` gives the same guarantees: a descriptor names the requested range, a copy that
// returns has completed, and a flush makes earlier writes visible. A copy that exceeds its deadline
// uses the device's own pinned memory, not the caller's.
unsafe impl<D: Device> DeviceMemory for Direct<D> {
    fn interface(&self) -> Interface {
        self.interface
    }

    fn ordinal(&self) -> u32 {
        self.device.caps().ordinal
    }

    fn dmabuf(&mut self, ptr: NonNull<u8>, len: usize) -> Option<Dmabuf> {
        let (fd, offset) = self.device.dmabuf(at(ptr), len as u64)?;
        // SAFETY: `into_raw_fd` gives up the descriptor, so the `Dmabuf` is its only owner.
        Some(unsafe { Dmabuf::new(fd.into_raw_fd(), offset) })
    }

    fn must_flush(&self) -> bool {
        self.device.caps().must_flush
    }

    fn flush(&mut self) -> Result<(), i32> {
        self.device.flush().map_err(|error| match error {
            DeviceError::Lost(code) | DeviceError::Driver(code) => code,
            _ => libc::EIO,
        })
    }

    unsafe fn write_device(
        &mut self,
        to: NonNull<u8>,
        from: Untrusted<'_>,
    ) -> Result<(), PostError> {
        // SAFETY: our caller guarantees the same contract.
        unsafe { self.device.write_device(at(to), from) }
    }

    unsafe fn read_device(&mut self, from: NonNull<u8>, into: &mut [u8]) -> Result<(), PostError> {
        // SAFETY: our caller guarantees the same contract.
        unsafe { self.device.read_device(at(from), into) }
    }

    fn is_copying(&mut self) -> bool {
        self.device.is_copying()
    }
}
