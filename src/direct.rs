//! Memory of a GPU behind a libfabric rail: NICs read and write it themselves, where the provider
//! has `FI_HMEM`.

use std::os::fd::IntoRawFd;
use std::ptr::NonNull;
use std::time::Duration;

use fishplate_core::error::PostError;
use fishplate_core::mem::{Untrusted, copy_bytes};
use fishplate_gpu::{Device, DeviceError, DevicePtr, GpuDirect};
use fishplate_sys::fabric::rail::{DeviceMemory, Dmabuf, Interface};

/// How long the device may take to copy a few bytes of a message.
const TIMEOUT: Duration = Duration::from_secs(2);

/// What [`FabricRail::reach`](fishplate_sys::fabric::FabricRail::reach) takes: a device of that
/// driver. Each rail has a handle of its own to the device. Pins 64 KiB.
pub fn direct(device: impl Device + 'static, interface: Interface) -> Box<dyn DeviceMemory> {
    Box::new(Direct { device: GpuDirect::new(device, TIMEOUT), interface })
}

/// The memory of a [`HostDevice`](fishplate_gpu::HostDevice), which the processor reaches itself.
pub(crate) struct StandIn;

// SAFETY: nothing is left under way, and there is nothing to flush.
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

    unsafe fn place(&mut self, to: NonNull<u8>, from: Untrusted<'_>) -> Result<(), PostError> {
        // SAFETY: memory of the stand-in, which is the processor's; our caller's promise.
        unsafe { copy_bytes(from.as_ptr(), to.as_ptr(), from.len()) };
        Ok(())
    }

    unsafe fn fetch(&mut self, from: NonNull<u8>, into: &mut [u8]) -> Result<(), PostError> {
        // SAFETY: as above.
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

// SAFETY: the promises of `Device`, whose calls these are: descriptors lead to what was asked for,
// copies have ended when they say so, and what was flushed is visible. A copy that has not ended in
// time keeps pinned memory of its own, not the caller's.
unsafe impl<D: Device> DeviceMemory for Direct<D> {
    fn interface(&self) -> Interface {
        self.interface
    }

    fn ordinal(&self) -> u32 {
        self.device.caps().ordinal
    }

    fn dmabuf(&mut self, ptr: NonNull<u8>, len: usize) -> Option<Dmabuf> {
        let (fd, offset) = self.device.dmabuf(at(ptr), len as u64)?;
        // SAFETY: given up here.
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

    unsafe fn place(&mut self, to: NonNull<u8>, from: Untrusted<'_>) -> Result<(), PostError> {
        // SAFETY: handed on to our caller.
        unsafe { self.device.place(at(to), from) }
    }

    unsafe fn fetch(&mut self, from: NonNull<u8>, into: &mut [u8]) -> Result<(), PostError> {
        // SAFETY: handed on to our caller.
        unsafe { self.device.fetch(at(from), into) }
    }

    fn is_copying(&mut self) -> bool {
        self.device.is_copying()
    }
}
