//! A few bytes between the processor and memory of the device, at once: what
//! [`place`](fishplate_core::rail::Rail::place) and [`fetch`](fishplate_core::rail::Rail::fetch)
//! need. Slow path: waits for the device, for a bounded time.

use std::ptr::NonNull;
use std::time::Instant;

use fishplate_core::error::PostError;
use fishplate_core::mem::{Untrusted, copy_bytes, copy_to_window};
use fishplate_core::rail::Local;
use fishplate_core::sync::host::Host;
use fishplate_shm::Segment;
use fishplate_shm::extension::PAGE;

use super::{GpuRail, post_error};
use crate::{Device, DeviceError, DevicePtr, Mark};

/// Bytes that go at once.
const LEN: usize = 16 * PAGE;

/// Pinned memory of this process for one copy at a time.
#[derive(Debug)]
pub(crate) struct Stage {
    memory: Option<(Segment, DevicePtr)>,
    /// A copy that had not ended when its caller gave up.
    late: Option<Mark>,
    /// There was one of which nobody knows.
    lost: bool,
}

impl Stage {
    /// Memory that the device can use, if there is any.
    pub(crate) fn new<D: Device>(device: &mut D) -> Self {
        let segment = Segment::create(LEN).ok();
        let memory = segment.and_then(|segment| {
            // SAFETY: mapped until `end`, which unpins it.
            let at = unsafe { device.pin(segment.ptr(), segment.len()) }.ok()?;
            Some((segment, at))
        });
        Stage { memory, late: None, lost: false }
    }

    /// Gives the memory back, unless the device may still be using it.
    pub(crate) fn end<D: Device>(&mut self, device: &mut D) {
        let Some((segment, _)) = self.memory.take() else { return };
        let over = self.late.is_none_or(|mark| device.reached(mark) == Ok(true));
        // SAFETY: nothing queued uses it any more.
        if !over || unsafe { device.unpin(segment.ptr()) }.is_err() {
            std::mem::forget(segment);
        }
    }

    /// Whether the device may still be copying.
    pub(crate) fn is_unsure(&self) -> bool {
        self.late.is_some() || self.lost
    }

    /// Asks after a copy that was late.
    pub(crate) fn look<D: Device>(&mut self, device: &mut D) {
        if self.late.is_some() {
            let _ = self.free(device);
        }
    }

    /// The memory, if nothing is under way in it.
    fn free<D: Device>(&mut self, device: &mut D) -> Result<(NonNull<u8>, DevicePtr), PostError> {
        if let Some(mark) = self.late {
            match device.reached(mark) {
                Ok(false) => return Err(PostError::Again),
                Ok(true) => self.late = None,
                Err(error) => {
                    self.late = None;
                    self.forsake();
                    return Err(post_error(error));
                }
            }
        }
        self.memory.as_ref().map(|(segment, at)| (segment.ptr(), *at)).ok_or(PostError::Unsupported)
    }

    /// Leaves the memory mapped and unused for good: the device may still be using it.
    #[cold]
    fn forsake(&mut self) {
        self.lost = true;
        if let Some((segment, _)) = self.memory.take() {
            std::mem::forget(segment);
        }
    }

    /// Copies, and waits until that has ended.
    ///
    /// # Safety
    /// As for [`Device::copy`].
    unsafe fn copy<D: Device>(
        &mut self,
        device: &mut D,
        to: DevicePtr,
        from: DevicePtr,
        len: u64,
        deadline: Instant,
    ) -> Result<(), PostError> {
        // SAFETY: handed on to our caller.
        unsafe { device.copy(0, to, from, len) }.map_err(post_error)?;
        let mark = loop {
            match device.mark(0) {
                Ok(mark) => break mark,
                // Marks come back when what is queued ends.
                Err(DeviceError::Exhausted) if Instant::now() < deadline => std::thread::yield_now(),
                Err(error) => {
                    self.forsake();
                    return Err(PostError::Provider(super::queue::code(error)));
                }
            }
        };
        loop {
            match device.reached(mark) {
                Ok(true) => return Ok(()),
                Ok(false) if Instant::now() < deadline => std::hint::spin_loop(),
                Ok(false) => {
                    self.late = Some(mark);
                    return Err(PostError::Provider(libc::ETIMEDOUT));
                }
                Err(error) => {
                    self.forsake();
                    return Err(PostError::Provider(super::queue::code(error)));
                }
            }
        }
    }

    /// Copies bytes into memory of the device.
    ///
    /// # Safety
    /// The bytes fit the memory of the device from `to` on.
    pub(crate) unsafe fn place<D: Device>(
        &mut self,
        device: &mut D,
        to: DevicePtr,
        from: Untrusted<'_>,
        deadline: Instant,
    ) -> Result<(), PostError> {
        let mut done = 0;
        while done < from.len() {
            let piece = (from.len() - done).min(LEN);
            let (bytes, at) = self.free(device)?;
            // SAFETY: the piece fits the staging memory, which is ours,
            // and lies inside both ranges.
            unsafe {
                copy_bytes(from.as_ptr().add(done), bytes.as_ptr(), piece);
                self.copy(device, to.at(done as u64), at, piece as u64, deadline)?;
            }
            done += piece;
        }
        Ok(())
    }

    /// As [`place`](Self::place), the other way.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn fetch<D: Device>(
        &mut self,
        device: &mut D,
        from: DevicePtr,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<(), PostError> {
        let mut done = 0;
        while done < into.len() {
            let piece = (into.len() - done).min(LEN);
            let (bytes, at) = self.free(device)?;
            // SAFETY: as in `place`.
            unsafe {
                self.copy(device, at, from.at(done as u64), piece as u64, deadline)?;
                copy_bytes(bytes.as_ptr(), into.as_mut_ptr().add(done), piece);
            }
            done += piece;
        }
        Ok(())
    }
}

impl<D: Device, H: Host> GpuRail<D, H> {
    /// # Safety
    /// As for `Rail::place`.
    pub(super) unsafe fn place_bytes(&mut self, to: Local, from: Untrusted<'_>) -> Result<(), PostError> {
        let len = to.len.min(from.len());
        let addr = to.ptr.as_ptr() as u64;
        let local = self.local_of(to.desc).map(|slot| self.locals[slot as usize]);
        let local = local.ok_or(PostError::BadKey)?;
        let target = local.place(addr, len as u64).ok_or(PostError::BadKey)?;
        if let Some(view) = local.view(addr) {
            // SAFETY: `len` bytes from there are inside the registered memory,
            // which the processor sees.
            unsafe { copy_to_window(from.as_ptr(), view, len) };
            return Ok(());
        }
        let Some((from, _)) = from.split_at(len) else { return Ok(()) };
        let deadline = Instant::now() + self.config.timeout;
        // SAFETY: `len` bytes from there are inside the registered memory.
        unsafe { self.stage.place(self.sharing.driver(), target, from, deadline) }
    }

    /// # Safety
    /// As for `Rail::fetch`.
    pub(super) unsafe fn fetch_bytes(&mut self, from: Local, into: &mut [u8]) -> Result<(), PostError> {
        let len = from.len.min(into.len());
        let addr = from.ptr.as_ptr() as u64;
        let local = self.local_of(from.desc).map(|slot| self.locals[slot as usize]);
        let local = local.ok_or(PostError::BadKey)?;
        let source = local.place(addr, len as u64).ok_or(PostError::BadKey)?;
        if let Some(view) = local.view(addr) {
            // SAFETY: `len` bytes from there are inside the registered memory,
            // which the processor sees.
            unsafe { copy_bytes(view, into.as_mut_ptr(), len) };
            return Ok(());
        }
        let deadline = Instant::now() + self.config.timeout;
        // SAFETY: as in `place_bytes`.
        unsafe { self.stage.fetch(self.sharing.driver(), source, &mut into[..len], deadline) }
    }
}
