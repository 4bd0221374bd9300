//! The device of the payloads: chosen when a run begins,
//! so that the measured code is compiled once.

use std::ptr::NonNull;

#[cfg(feature = "cuda")]
use fishplate_gpu::cuda::{self, CudaConfig, CudaDevice};
use fishplate_gpu::{Allocation, Device, DeviceCaps, DeviceError, DevicePtr, Handle, HostDevice, Mark, Uuid};

use crate::args::DeviceName;
use crate::failure::{Failure, Outcome};

/// One of those that there are.
#[derive(Debug)]
pub enum Chosen {
    /// Memory of the processor.
    Host(HostDevice),
    /// A GPU.
    #[cfg(feature = "cuda")]
    Cuda(CudaDevice),
}

/// The device that is taken if none is named.
pub fn usual() -> DeviceName {
    #[cfg(feature = "cuda")]
    if cuda::devices().is_ok_and(|devices| !devices.is_empty()) {
        return DeviceName::Cuda(0);
    }
    DeviceName::Host
}

/// Opens a device.
pub fn open(name: DeviceName) -> Outcome<Chosen> {
    match name {
        DeviceName::Host => Ok(Chosen::Host(HostDevice::new())),
        #[cfg(feature = "cuda")]
        DeviceName::Cuda(ordinal) => match CudaDevice::open(ordinal, CudaConfig::default()) {
            Ok(device) => Ok(Chosen::Cuda(device)),
            Err(DeviceError::NoDriver) => {
                let why = cuda::devices().map_or_else(|why| why.to_string(), |_| String::new());
                Err(Failure::run(format!("--device {name}: {why}; host needs no driver")))
            }
            Err(error) => Err(Failure::run(format!("--device {name}: {error}"))),
        },
        #[cfg(not(feature = "cuda"))]
        DeviceName::Cuda(_) => {
            Err(Failure::run(format!("--device {name}: this program was built without its feature `cuda`")))
        }
    }
}

/// Calls the device that there is.
macro_rules! each {
    ($chosen:expr, $device:ident => $call:expr) => {
        match $chosen {
            Chosen::Host($device) => $call,
            #[cfg(feature = "cuda")]
            Chosen::Cuda($device) => $call,
        }
    };
}

// SAFETY: each call goes to the one device inside, which stays the same.
unsafe impl Device for Chosen {
    fn caps(&self) -> DeviceCaps {
        each!(self, device => device.caps())
    }

    fn alloc(&mut self, size: u64) -> Result<DevicePtr, DeviceError> {
        each!(self, device => device.alloc(size))
    }

    unsafe fn free(&mut self, base: DevicePtr) -> Result<(), DeviceError> {
        // SAFETY: handed on to our caller.
        each!(self, device => unsafe { device.free(base) })
    }

    fn allocation(&self, ptr: DevicePtr) -> Result<Allocation, DeviceError> {
        each!(self, device => device.allocation(ptr))
    }

    fn export(&mut self, allocation: &Allocation) -> Result<Handle, DeviceError> {
        each!(self, device => device.export(allocation))
    }

    unsafe fn open(&mut self, handle: &Handle, size: u64) -> Result<DevicePtr, DeviceError> {
        // SAFETY: handed on to our caller.
        each!(self, device => unsafe { device.open(handle, size) })
    }

    unsafe fn close(&mut self, base: DevicePtr) -> Result<(), DeviceError> {
        // SAFETY: handed on to our caller.
        each!(self, device => unsafe { device.close(base) })
    }

    fn reaches(&self, uuid: &Uuid) -> bool {
        each!(self, device => device.reaches(uuid))
    }

    unsafe fn pin(&mut self, ptr: NonNull<u8>, len: usize) -> Result<DevicePtr, DeviceError> {
        // SAFETY: handed on to our caller.
        each!(self, device => unsafe { device.pin(ptr, len) })
    }

    unsafe fn unpin(&mut self, ptr: NonNull<u8>) -> Result<(), DeviceError> {
        // SAFETY: handed on to our caller.
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
        // SAFETY: handed on to our caller.
        each!(self, device => unsafe { device.copy(stream, to, from, len) })
    }

    #[inline]
    unsafe fn write_word(&mut self, stream: u8, word: DevicePtr, value: u64) -> Result<(), DeviceError> {
        // SAFETY: handed on to our caller.
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

    fn flush_remote_writes(&mut self) -> Result<(), DeviceError> {
        each!(self, device => device.flush_remote_writes())
    }
}
