//! Device memory on a rail: registers it with the NIC, flushes it before arrivals are reported, and
//! copies to and from it for the engine's messages.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ffi::c_int;
use core::ops::Range;
use core::ptr::NonNull;

use fishplate_core::error::{AttachError, PostError};
use fishplate_core::mem::{Untrusted, copy_bytes};
use fishplate_core::rail::Local;

use super::FabricRail;
use crate::fabric::mr::MemoryRegion;
use crate::fabric::raw::*;

/// The driver of a device, by libfabric's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Interface {
    /// NVIDIA's (`FI_HMEM_CUDA`).
    Cuda,
    /// AMD's (`FI_HMEM_ROCR`).
    Rocr,
    /// Intel's (`FI_HMEM_ZE`).
    LevelZero,
    /// No driver: host memory stands in for a device, and every provider reaches it.
    Host,
}

impl Interface {
    fn number(self) -> c_int {
        match self {
            Interface::Cuda => FI_HMEM_CUDA,
            Interface::Rocr => FI_HMEM_ROCR,
            Interface::LevelZero => FI_HMEM_ZE,
            Interface::Host => FI_HMEM_SYSTEM,
        }
    }
}

/// A dmabuf descriptor of device memory. Closed when dropped; a registration made from it stays.
#[derive(Debug)]
pub struct Dmabuf {
    fd: c_int,
    offset: u64,
}

impl Dmabuf {
    /// Takes ownership of a descriptor. The memory begins at `offset` in it.
    ///
    /// # Safety
    /// The descriptor is open, and it is not closed elsewhere.
    pub unsafe fn new(fd: c_int, offset: u64) -> Dmabuf {
        Dmabuf { fd, offset }
    }
}

impl Drop for Dmabuf {
    fn drop(&mut self) {
        // SAFETY: open and ours, as `new` requires.
        unsafe { libc::close(self.fd) };
    }
}

/// A device whose memory a rail registers.
///
/// # Safety
/// - A [`Dmabuf`] refers to the requested memory.
/// - After [`write_device`](Self::write_device) or [`read_device`](Self::read_device) returns, with
///   or without an error, the device does not access the host buffer.
/// - After [`flush`](Self::flush) succeeds, the device sees all that NICs had written before the
///   call.
pub unsafe trait DeviceMemory: Send {
    /// The device's driver.
    fn interface(&self) -> Interface;

    /// The device's number in this process, as in
    /// [`RegionKind::Device`](fishplate_core::mem::RegionKind::Device).
    fn ordinal(&self) -> u32;

    /// Exports these bytes as a dmabuf, if the driver supports it. Slow path.
    fn dmabuf(&mut self, ptr: NonNull<u8>, len: usize) -> Option<Dmabuf>;

    /// Whether NIC writes are visible to the device only after a flush. Constant.
    fn must_flush(&self) -> bool;

    /// Makes NIC writes visible to the device. One driver call.
    ///
    /// # Errors
    /// The driver's error code.
    fn flush(&mut self) -> Result<(), i32>;

    /// Copies bytes into device memory, and waits for the copy. Slow path.
    ///
    /// # Errors
    /// As of [`Rail::write_device`](fishplate_core::rail::Rail::write_device).
    ///
    /// # Safety
    /// `from.len()` bytes at `to` are memory of this device.
    unsafe fn write_device(&mut self, to: NonNull<u8>, from: Untrusted<'_>) -> Result<(), PostError>;

    /// Copies bytes out of device memory, and waits for the copy. Slow path.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    unsafe fn read_device(&mut self, from: NonNull<u8>, into: &mut [u8]) -> Result<(), PostError>;

    /// Whether a copy whose call returned an error may still be running on the device. Registered
    /// device memory stays in use until it is not. Asks the driver; slow path.
    fn is_copying(&mut self) -> bool;
}

/// A device, and the addresses of its registered memory.
pub(super) struct Reached {
    pub device: Box<dyn DeviceMemory>,
    /// Key and addresses of each registration.
    spans: Vec<(u64, Range<usize>)>,
    /// A failed copy may still be running.
    copying: bool,
}

impl Reached {
    pub fn new(device: Box<dyn DeviceMemory>) -> Reached {
        Reached { device, spans: Vec::new(), copying: false }
    }

    pub fn add(&mut self, key: u64, span: Range<usize>) {
        self.spans.push((key, span));
    }

    /// Removes a registration. Returns whether it was device memory that a failed copy may still
    /// use.
    pub fn remove(&mut self, key: u64) -> bool {
        let Some(at) = self.spans.iter().position(|span| span.0 == key) else { return false };
        self.spans.swap_remove(at);
        self.is_copying()
    }

    fn holds(&self, addr: usize, len: usize) -> bool {
        let holds = |span: &Range<usize>| span.contains(&addr) && len <= span.end - addr;
        self.spans.iter().any(|(_, span)| holds(span))
    }

    /// Whether a failed copy may still use these bytes.
    pub fn touches(&mut self, memory: Local) -> bool {
        let start = memory.ptr.addr().get();
        let meets = |span: &Range<usize>| start < span.end && span.start < start + memory.len;
        self.spans.iter().any(|(_, span)| meets(span)) && self.is_copying()
    }

    /// Returns whether a failed copy may still run. Asks the device about it.
    fn is_copying(&mut self) -> bool {
        self.copying = self.copying && self.device.is_copying();
        self.copying
    }

    fn ended(&mut self, copy: Result<(), PostError>) -> Result<(), PostError> {
        self.copying |= copy.is_err();
        copy
    }
}

impl FabricRail {
    /// Registers memory of the rail's device: as a dmabuf if driver and provider support that, else
    /// by address.
    #[cold]
    pub(super) fn register_device(
        &mut self,
        (ptr, len): (NonNull<u8>, usize),
        ordinal: u32,
        access: u64,
        key: u64,
    ) -> Result<MemoryRegion, AttachError> {
        let of = |reached: &&mut Reached| reached.device.ordinal() == ordinal;
        let Some(Reached { device, .. }) = self.device.as_mut().filter(of) else {
            return Err(AttachError::Unsupported);
        };
        let interface = device.interface();
        if interface == Interface::Host {
            // SAFETY: `Region::new` requires that it is valid while registered.
            return unsafe { MemoryRegion::register(&self.domain, ptr, len, access, key) }
                .map_err(|error| AttachError::System(error.code.0));
        }
        if self.offer.info.raw().caps & FI_HMEM == 0 {
            return Err(AttachError::Unsupported);
        }
        let whose = (interface.number(), ordinal);
        let known = self.offer.info.library().api_version() >= fi_version(1, 20);
        if let Some(buffer) = known.then(|| device.dmabuf(ptr, len)).flatten() {
            let by = Some((buffer.fd, buffer.offset));
            // SAFETY: `Region::new` requires that it is valid while registered, and the device
            // guarantees that the descriptor refers to it.
            let region =
                unsafe { MemoryRegion::register_device(&self.domain, (ptr, len), whose, by, access, key) };
            if let Ok(region) = region {
                return Ok(region);
            }
        }
        // SAFETY: as above.
        unsafe { MemoryRegion::register_device(&self.domain, (ptr, len), whose, None, access, key) }.map_err(
            |error| {
                self.note_error(error.code);
                AttachError::System(error.code.0)
            },
        )
    }

    /// Whether these bytes are registered device memory, which the provider must not copy itself.
    pub(super) fn is_of_device(&self, ptr: *const u8, len: usize) -> bool {
        self.device.as_ref().is_some_and(|reached| reached.holds(ptr.addr(), len))
    }

    /// # Safety
    /// As for [`Rail::write_device`](fishplate_core::rail::Rail::write_device).
    #[cold]
    pub(super) unsafe fn write_device_bytes(
        &mut self,
        to: Local,
        from: Untrusted<'_>,
    ) -> Result<(), PostError> {
        let (ptr, len) = (to.ptr.as_ptr(), to.len.min(from.len()));
        let of_device = self.is_of_device(ptr, len);
        let Some((from, _)) = from.split_at(len) else { return Ok(()) };
        match &mut self.device {
            Some(reached) if of_device => {
                // SAFETY: `len` registered bytes of the device.
                let placed = unsafe { reached.device.write_device(to.ptr, from) };
                reached.ended(placed)
            }
            _ => {
                // SAFETY: registered host memory, and our caller guarantees that it is writable.
                unsafe { copy_bytes(from.as_ptr(), ptr, len) };
                Ok(())
            }
        }
    }

    /// # Safety
    /// As for [`Rail::read_device`](fishplate_core::rail::Rail::read_device).
    #[cold]
    pub(super) unsafe fn read_device_bytes(&mut self, from: Local, into: &mut [u8]) -> Result<(), PostError> {
        let (ptr, len) = (from.ptr.as_ptr(), from.len.min(into.len()));
        let of_device = self.is_of_device(ptr, len);
        match &mut self.device {
            Some(reached) if of_device => {
                // SAFETY: `len` registered bytes of the device.
                let fetched = unsafe { reached.device.read_device(from.ptr, &mut into[..len]) };
                reached.ended(fetched)
            }
            _ => {
                // SAFETY: registered host memory, and our caller guarantees that it is readable.
                unsafe { copy_bytes(ptr, into.as_mut_ptr(), len) };
                Ok(())
            }
        }
    }
}
