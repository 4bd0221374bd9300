//! A device of a kind chosen at run time, so that the generic code above it is compiled once.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

#[cfg(any(feature = "cuda", feature = "hip"))]
use super::cuda::CudaDevice;
use super::{
    Allocation, Bell, Device, DeviceCaps, DeviceError, DevicePtr, Handle, HostDevice, Mark, Uuid,
};

/// A device of one of the supported kinds.
#[derive(Debug)]
pub enum AnyDevice {
    /// Processor memory.
    Host(HostDevice),
    /// A GPU that is driven through CUDA or HIP.
    #[cfg(any(feature = "cuda", feature = "hip"))]
    Cuda(Box<CudaDevice>),
}

macro_rules! each {
    ($any:expr, $device:ident => $call:expr) => {
        match $any {
            AnyDevice::Host($device) => $call,
            #[cfg(any(feature = "cuda", feature = "hip"))]
            AnyDevice::Cuda($device) => $call,
        }
    };
}

// SAFETY: every call is forwarded to the inner device, which never changes and upholds the contract
// of `Device`.
unsafe impl Device for AnyDevice {
    fn caps(&self) -> DeviceCaps {
        each!(self, device => device.caps())
    }

    fn alloc(&mut self, size: u64) -> Result<DevicePtr, DeviceError> {
        each!(self, device => device.alloc(size))
    }

    unsafe fn free(&mut self, base: DevicePtr) -> Result<(), DeviceError> {
        // SAFETY: the caller upholds the contract of `Device::free`, as the inner device
        // requires.
        each!(self, device => unsafe { device.free(base) })
    }

    fn forsake(&mut self, base: DevicePtr) {
        each!(self, device => device.forsake(base));
    }

    fn keep(&mut self, base: DevicePtr) {
        each!(self, device => device.keep(base));
    }

    fn allocation(&self, ptr: DevicePtr) -> Result<Allocation, DeviceError> {
        each!(self, device => device.allocation(ptr))
    }

    fn export(&mut self, allocation: &Allocation) -> Result<Handle, DeviceError> {
        each!(self, device => device.export(allocation))
    }

    unsafe fn open(&mut self, handle: &Handle, size: u64) -> Result<DevicePtr, DeviceError> {
        // SAFETY: the caller upholds the contract of `Device::open`, as the inner device
        // requires.
        each!(self, device => unsafe { device.open(handle, size) })
    }

    unsafe fn close(&mut self, base: DevicePtr) -> Result<(), DeviceError> {
        // SAFETY: the caller upholds the contract of `Device::close`, as the inner device
        // requires.
        each!(self, device => unsafe { device.close(base) })
    }

    fn reaches(&self, uuid: &Uuid) -> bool {
        each!(self, device => device.reaches(uuid))
    }

    unsafe fn pin(&mut self, ptr: NonNull<u8>, len: usize) -> Result<DevicePtr, DeviceError> {
        // SAFETY: the caller upholds the contract of `Device::pin`, as the inner device
        // requires.
        each!(self, device => unsafe { device.pin(ptr, len) })
    }

    unsafe fn unpin(&mut self, ptr: NonNull<u8>) -> Result<(), DeviceError> {
        // SAFETY: the caller upholds the contract of `Device::unpin`, as the inner device
        // requires.
        each!(self, device => unsafe { device.unpin(ptr) })
    }

    fn host_view(&self, ptr: DevicePtr, len: u64) -> Option<NonNull<u8>> {
        each!(self, device => device.host_view(ptr, len))
    }

    #[inline]
    unsafe fn copy(
        &mut self,
        stream: u8,
        to: DevicePtr,
        from: DevicePtr,
        len: u64,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller upholds the contract of `Device::copy`, as the inner device
        // requires.
        each!(self, device => unsafe { device.copy(stream, to, from, len) })
    }

    #[inline]
    unsafe fn write_word(
        &mut self,
        stream: u8,
        word: DevicePtr,
        value: u64,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller upholds the contract of `Device::write_word`, as the inner device
        // requires.
        each!(self, device => unsafe { device.write_word(stream, word, value) })
    }

    #[inline]
    fn mark(&mut self, stream: u8) -> Result<Mark, DeviceError> {
        each!(self, device => device.mark(stream))
    }

    #[inline]
    fn reached(&mut self, mark: Mark) -> Result<bool, DeviceError> {
        each!(self, device => device.reached(mark))
    }

    fn ring(&mut self, stream: u8, mark: Mark, bell: &Bell) -> Result<(), DeviceError> {
        each!(self, device => device.ring(stream, mark, bell))
    }

    fn dmabuf(&mut self, ptr: DevicePtr, len: u64) -> Option<(OwnedFd, u64)> {
        each!(self, device => device.dmabuf(ptr, len))
    }

    fn flush_remote_writes(&mut self) -> Result<(), DeviceError> {
        each!(self, device => device.flush_remote_writes())
    }
}
