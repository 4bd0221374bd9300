//! Memory of a device behind a rail: registered so that the NIC reaches it, flushed before what has
//! arrived in it is reported, and filled and read for the messages of the engine.

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

/// Whose driver a device has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Interface {
    /// NVIDIA's (`FI_HMEM_CUDA`).
    Cuda,
    /// AMD's (`FI_HMEM_ROCR`).
    Rocr,
    /// Intel's (`FI_HMEM_ZE`).
    LevelZero,
    /// None: memory of the processor stands in for a device, and every provider reaches it.
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

/// A descriptor by which a NIC reaches memory of a device. Closed when dropped: who registers
/// memory by it keeps that memory.
#[derive(Debug)]
pub struct Dmabuf {
    fd: c_int,
    offset: u64,
}

impl Dmabuf {
    /// Takes a descriptor over. The memory begins `offset` bytes into it.
    ///
    /// # Safety
    /// The descriptor is open, and nobody else closes it.
    pub unsafe fn new(fd: c_int, offset: u64) -> Dmabuf {
        Dmabuf { fd, offset }
    }
}

impl Drop for Dmabuf {
    fn drop(&mut self) {
        // SAFETY: open and ours, by the promise of `new`.
        unsafe { libc::close(self.fd) };
    }
}

/// A device whose memory a rail registers.
///
/// # Safety
/// - A [`Dmabuf`] leads to the memory asked for.
/// - Once [`place`](Self::place) or [`fetch`](Self::fetch) returns without an error, the device
///   touches the processor's bytes no more; after an error it never does.
/// - Once [`flush`](Self::flush) returns without an error, the device sees what NICs had written
///   when it was called.
pub unsafe trait DeviceMemory: Send {
    /// Whose driver it has.
    fn interface(&self) -> Interface;

    /// Its number in this process, as in
    /// [`RegionKind::Device`](fishplate_core::mem::RegionKind::Device).
    fn ordinal(&self) -> u32;

    /// A descriptor of these bytes, where the driver gives one. Slow path.
    fn dmabuf(&mut self, ptr: NonNull<u8>, len: usize) -> Option<Dmabuf>;

    /// Whether what a NIC writes is visible to the device only once it is flushed. Constant.
    fn must_flush(&self) -> bool;

    /// Makes visible to the device what NICs have written. One call of the driver.
    ///
    /// # Errors
    /// The driver's code.
    fn flush(&mut self) -> Result<(), i32>;

    /// Copies bytes into memory of the device, and waits for that. Slow path.
    ///
    /// # Errors
    /// As of [`Rail::place`](fishplate_core::rail::Rail::place).
    ///
    /// # Safety
    /// `to` and as many bytes behind it as there are in `from` are memory of the device.
    unsafe fn place(&mut self, to: NonNull<u8>, from: Untrusted<'_>) -> Result<(), PostError>;

    /// As [`place`](Self::place), the other way.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    unsafe fn fetch(&mut self, from: NonNull<u8>, into: &mut [u8]) -> Result<(), PostError>;

    /// Whether the device may still be at a copy whose call returned an error: then memory of the
    /// device that is registered stays in use. Asks the driver; slow path.
    fn is_copying(&mut self) -> bool;
}

/// A device, and where its registered memory lies: addresses, of which none is the processor's.
pub(super) struct Reached {
    pub device: Box<dyn DeviceMemory>,
    /// By key of the registration.
    spans: Vec<(u64, Range<usize>)>,
    /// A copy failed, and may still be under way.
    copying: bool,
}

impl Reached {
    pub fn new(device: Box<dyn DeviceMemory>) -> Reached {
        Reached { device, spans: Vec::new(), copying: false }
    }

    pub fn add(&mut self, key: u64, span: Range<usize>) {
        self.spans.push((key, span));
    }

    /// Forgets what was registered by this key. Whether it was memory of the device that a copy may
    /// still use.
    pub fn remove(&mut self, key: u64) -> bool {
        let Some(at) = self.spans.iter().position(|span| span.0 == key) else { return false };
        self.spans.swap_remove(at);
        self.copying
    }

    fn holds(&self, addr: usize, len: usize) -> bool {
        let holds = |span: &Range<usize>| span.contains(&addr) && len <= span.end - addr;
        self.spans.iter().any(|(_, span)| holds(span))
    }

    /// Whether a copy that failed may still use these bytes.
    pub fn touches(&self, memory: Local) -> bool {
        let start = memory.ptr.addr().get();
        let meets = |span: &Range<usize>| start < span.end && span.start < start + memory.len;
        self.copying && self.spans.iter().any(|(_, span)| meets(span))
    }

    /// Asks after a copy that failed.
    pub fn look(&mut self) {
        self.copying = self.copying && self.device.is_copying();
    }

    fn ended(&mut self, copy: Result<(), PostError>) -> Result<(), PostError> {
        self.copying |= copy.is_err();
        self.look();
        copy
    }
}

impl FabricRail {
    /// Registers memory of the rail's device: by a descriptor where driver and provider have that,
    /// else by its address.
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
            // SAFETY: valid while registered, by the promise of `Region::new`.
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
            // SAFETY: valid while registered, by the promise of `Region::new`; the descriptor leads
            // to it, by that of the device.
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

    /// Whether these bytes are a registered device's: then the provider must not copy them itself.
    pub(super) fn is_of_device(&self, ptr: *const u8, len: usize) -> bool {
        self.device.as_ref().is_some_and(|reached| reached.holds(ptr.addr(), len))
    }

    /// # Safety
    /// As for [`Rail::place`](fishplate_core::rail::Rail::place).
    #[cold]
    pub(super) unsafe fn place_bytes(&mut self, to: Local, from: Untrusted<'_>) -> Result<(), PostError> {
        let (ptr, len) = (to.ptr.as_ptr(), to.len.min(from.len()));
        let of_device = self.is_of_device(ptr, len);
        let Some((from, _)) = from.split_at(len) else { return Ok(()) };
        match &mut self.device {
            Some(reached) if of_device => {
                // SAFETY: `len` registered bytes of the device.
                let placed = unsafe { reached.device.place(to.ptr, from) };
                reached.ended(placed)
            }
            _ => {
                // SAFETY: registered memory of the processor, and writable, as our caller promises.
                unsafe { copy_bytes(from.as_ptr(), ptr, len) };
                Ok(())
            }
        }
    }

    /// # Safety
    /// As for [`Rail::fetch`](fishplate_core::rail::Rail::fetch).
    #[cold]
    pub(super) unsafe fn fetch_bytes(&mut self, from: Local, into: &mut [u8]) -> Result<(), PostError> {
        let (ptr, len) = (from.ptr.as_ptr(), from.len.min(into.len()));
        let of_device = self.is_of_device(ptr, len);
        match &mut self.device {
            Some(reached) if of_device => {
                // SAFETY: `len` registered bytes of the device.
                let fetched = unsafe { reached.device.fetch(from.ptr, &mut into[..len]) };
                reached.ended(fetched)
            }
            _ => {
                // SAFETY: registered memory of the processor, and readable, as our caller promises.
                unsafe { copy_bytes(ptr, into.as_mut_ptr(), len) };
                Ok(())
            }
        }
    }
}
