//! Device memory on a rail. Registers it with the NIC, flushes it before arrivals are reported, and
//! copies to and from it for the engine's messages.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ffi::c_int;
use core::ops::Range;
use core::ptr::NonNull;

use fishplate_core::error::{AttachError, PostError};
use fishplate_core::mem::{Untrusted, copy_bytes};
use fishplate_core::rail::Local;

use super::FabricRail;
use crate::fabric::domain::Domain;
use crate::fabric::mr::MemoryRegion;
use crate::fabric::raw::*;

/// The driver of a device, as libfabric names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Interface {
    /// NVIDIA CUDA (`FI_HMEM_CUDA`).
    Cuda,
    /// AMD ROCm (`FI_HMEM_ROCR`).
    Rocr,
    /// Intel Level Zero (`FI_HMEM_ZE`).
    LevelZero,
    /// No driver: host memory stands in for device memory, and every provider can access it.
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

/// A dmabuf descriptor of device memory. Closed on drop; a registration made from it stays valid.
#[derive(Debug)]
pub struct Dmabuf {
    fd: c_int,
    offset: u64,
}

impl Dmabuf {
    /// Takes ownership of a descriptor. The memory begins at `offset` in it.
    ///
    /// # Safety
    /// The descriptor is open, and nothing else closes it.
    pub unsafe fn new(fd: c_int, offset: u64) -> Dmabuf {
        Dmabuf { fd, offset }
    }
}

impl Drop for Dmabuf {
    fn drop(&mut self) {
        // SAFETY: the caller of `new` guaranteed that the descriptor is open and that nothing else
        // closes it.
        unsafe { libc::close(self.fd) };
    }
}

/// A device with memory that a rail registers.
///
/// # Safety
/// - A [`Dmabuf`] refers to the requested memory.
/// - Once [`write_device`](Self::write_device) or [`read_device`](Self::read_device) has returned,
///   with or without an error, the device does not access the host buffer.
/// - Once [`flush`](Self::flush) has succeeded, the device sees everything that NICs wrote before
///   the call.
pub unsafe trait DeviceMemory: Send {
    /// Returns the driver interface of the device.
    fn interface(&self) -> Interface;

    /// Returns the device's ordinal in this process, as in
    /// [`RegionKind::Device`](fishplate_core::mem::RegionKind::Device).
    fn ordinal(&self) -> u32;

    /// Exports `len` bytes at `ptr` as a dmabuf, if the driver supports it. Slow path.
    fn dmabuf(&mut self, ptr: NonNull<u8>, len: usize) -> Option<Dmabuf>;

    /// Returns whether the device sees NIC writes only after a flush. The answer never changes.
    fn must_flush(&self) -> bool;

    /// Makes NIC writes visible to the device. One driver call.
    ///
    /// # Errors
    /// The driver's error code.
    fn flush(&mut self) -> Result<(), i32>;

    /// Copies bytes into device memory and waits for the copy. Slow path.
    ///
    /// # Errors
    /// The errors of [`Rail::write_device`](fishplate_core::rail::Rail::write_device).
    ///
    /// # Safety
    /// The `from.len()` bytes at `to` are memory of this device.
    unsafe fn write_device(
        &mut self,
        to: NonNull<u8>,
        from: Untrusted<'_>,
    ) -> Result<(), PostError>;

    /// Copies bytes out of device memory and waits for the copy. Slow path.
    ///
    /// # Errors
    /// The errors of [`Rail::read_device`](fishplate_core::rail::Rail::read_device).
    ///
    /// # Safety
    /// The `into.len()` bytes at `from` are memory of this device.
    unsafe fn read_device(&mut self, from: NonNull<u8>, into: &mut [u8]) -> Result<(), PostError>;

    /// Asks the driver whether a copy that returned an error may still be running. Registered
    /// device memory stays in use until this returns `false`. Slow path.
    fn is_copying(&mut self) -> bool;
}

pub(super) struct Reached {
    pub device: Box<dyn DeviceMemory>,
    /// Key and address range of each registration.
    spans: Vec<(u64, Range<usize>)>,
    /// Whether a failed copy may still be running.
    copying: bool,
}

impl Reached {
    pub fn new(device: Box<dyn DeviceMemory>) -> Reached {
        Reached { device, spans: Vec::new(), copying: false }
    }

    pub fn add(&mut self, key: u64, span: Range<usize>) {
        self.spans.push((key, span));
    }

    /// Returns whether this was device memory that a failed copy may still access.
    pub fn remove(&mut self, key: u64) -> bool {
        let Some(at) = self.spans.iter().position(|span| span.0 == key) else { return false };
        self.spans.swap_remove(at);
        self.is_copying()
    }

    fn holds(&self, addr: usize, len: usize) -> bool {
        let holds = |span: &Range<usize>| span.contains(&addr) && len <= span.end - addr;
        self.spans.iter().any(|(_, span)| holds(span))
    }

    pub fn touches(&mut self, memory: Local) -> bool {
        let start = memory.ptr.addr().get();
        let meets = |span: &Range<usize>| start < span.end && span.start < start + memory.len;
        self.spans.iter().any(|(_, span)| meets(span)) && self.is_copying()
    }

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
    /// Registers memory of the rail's device as a dmabuf if driver and provider support that,
    /// otherwise by address.
    #[cold]
    pub(super) fn register_device(
        &mut self,
        domain: &Arc<Domain>,
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
            // SAFETY: the creator of a `Region` guarantees that its memory stays valid while
            // registered.
            return unsafe { MemoryRegion::register(domain, ptr, len, access, key) }
                .map_err(|error| AttachError::System(error.code.0));
        }
        if self.offer.info.raw().caps & FI_HMEM == 0 {
            return Err(AttachError::Unsupported);
        }
        let whose = (interface.number(), ordinal);
        let known = self.offer.info.library().api_version() >= fi_version(1, 20);
        if let Some(buffer) = known.then(|| device.dmabuf(ptr, len)).flatten() {
            let by = Some((buffer.fd, buffer.offset));
            // SAFETY: the creator of a `Region` guarantees that its memory stays valid while
            // registered. `DeviceMemory` guarantees that the descriptor refers to that memory.
            let region = unsafe {
                MemoryRegion::register_device(domain, (ptr, len), whose, by, access, key)
            };
            if let Ok(region) = region {
                return Ok(region);
            }
        }
        // SAFETY: the creator of a `Region` guarantees that its memory stays valid while
        // registered.
        unsafe { MemoryRegion::register_device(domain, (ptr, len), whose, None, access, key) }
            .map_err(|error| {
                self.note_error(error.code);
                AttachError::System(error.code.0)
            })
    }

    /// Returns whether these bytes are registered device memory, which the provider must not copy
    /// itself.
    pub(super) fn is_of_device(&self, ptr: *const u8, len: usize) -> bool {
        self.device.as_ref().is_some_and(|reached| reached.holds(ptr.addr(), len))
    }

    /// Copies bytes into local memory, on the device or on the host. Slow path.
    ///
    /// # Safety
    /// The contract of [`Rail::write_device`](fishplate_core::rail::Rail::write_device) applies.
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
                // SAFETY: `is_of_device` found these `len` bytes inside a registration of this
                // device.
                let placed = unsafe { reached.device.write_device(to.ptr, from) };
                reached.ended(placed)
            }
            _ => {
                // SAFETY: the bytes are host memory, and our caller guarantees that they are
                // writable.
                unsafe { copy_bytes(from.as_ptr(), ptr, len) };
                Ok(())
            }
        }
    }

    /// Copies bytes out of local memory, on the device or on the host. Slow path.
    ///
    /// # Safety
    /// The contract of [`Rail::read_device`](fishplate_core::rail::Rail::read_device) applies.
    #[cold]
    pub(super) unsafe fn read_device_bytes(
        &mut self,
        from: Local,
        into: &mut [u8],
    ) -> Result<(), PostError> {
        let (ptr, len) = (from.ptr.as_ptr(), from.len.min(into.len()));
        let of_device = self.is_of_device(ptr, len);
        match &mut self.device {
            Some(reached) if of_device => {
                // SAFETY: `is_of_device` found these `len` bytes inside a registration of this
                // device.
                let fetched = unsafe { reached.device.read_device(from.ptr, &mut into[..len]) };
                reached.ended(fetched)
            }
            _ => {
                // SAFETY: the bytes are host memory, and our caller guarantees that they are
                // readable.
                unsafe { copy_bytes(ptr, into.as_mut_ptr(), len) };
                Ok(())
            }
        }
    }
}
