//! Synchronous copies of a few bytes between host and device memory, for
//! [`write_device`](fishplate_core::rail::Rail::write_device) and
//! [`read_device`](fishplate_core::rail::Rail::read_device). Slow path: waits for the device until
//! a deadline.
//!
//! An aligned word of 8 bytes is stored whole, so a kernel that polls the word sees the old value
//! or the new value. The store goes through a bus window, or a stream of a device that [stores
//! words](crate::DeviceCaps::write_word).

use std::ptr::NonNull;
use std::time::Instant;

use fishplate_core::error::PostError;
use fishplate_core::mem::{Untrusted, copy_bytes, copy_to_window, order_window};
use fishplate_core::rail::Local;
use fishplate_core::sync::host::Host;
use fishplate_shm::Segment;
use fishplate_shm::extension::PAGE;

use super::{GpuRail, post_error};
use crate::done::tell;
use crate::primitive::AtomicU64;
use crate::{Device, DeviceError, DevicePtr, Mark};

/// Maximum number of bytes per copy.
const LEN: usize = 16 * PAGE;

/// `None` unless the write is exactly one aligned word of 8 bytes.
fn whole_word(to: u64, from: Untrusted<'_>) -> Option<u64> {
    let mut word = [0; 8];
    let is_word = from.len() == word.len() && to.is_multiple_of(8);
    (is_word && from.copy_out(&mut word) == word.len()).then_some(u64::from_ne_bytes(word))
}

/// Later stores of this thread become visible after the write.
pub(crate) unsafe fn write_window(view: *mut u8, from: Untrusted<'_>) {
    let word = whole_word(view.addr() as u64, from);
    // SAFETY: the caller guarantees that the range is valid, and `whole_word` returns a value only
    // if the address is aligned.
    unsafe {
        match word {
            Some(value) => {
                tell(AtomicU64::from_ptr(view.cast()), value);
                order_window();
            }
            None => copy_to_window(from.as_ptr(), view, from.len()),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Stage {
    memory: Option<(Segment, DevicePtr)>,
    /// The mark of a copy that missed its deadline.
    late: Option<Mark>,
    /// Whether the outcome of a copy will never be known.
    lost: bool,
}

impl Stage {
    pub(crate) fn new<D: Device>(device: &mut D) -> Self {
        let segment = Segment::create(LEN).ok();
        let memory = segment.and_then(|segment| {
            // SAFETY: `end` unpins the segment before it is unmapped.
            let at = unsafe { device.pin(segment.ptr(), segment.len()) }.ok()?;
            Some((segment, at))
        });
        Stage { memory, late: None, lost: false }
    }

    pub(crate) fn end<D: Device>(&mut self, device: &mut D) {
        let Some((segment, _)) = self.memory.take() else { return };
        let over = self.late.is_none_or(|mark| device.reached(mark) == Ok(true));
        // SAFETY: no copy is in flight, because `over` is true, so the device does not access the
        // buffer.
        if !over || unsafe { device.unpin(segment.ptr()) }.is_err() {
            std::mem::forget(segment);
        }
    }

    pub(crate) fn is_unsure(&self) -> bool {
        self.late.is_some() || self.lost
    }

    pub(crate) fn look<D: Device>(&mut self, device: &mut D) {
        if self.late.is_some() {
            let _ = self.free(device);
        }
    }

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

    #[cold]
    fn forsake(&mut self) {
        self.lost = true;
        if let Some((segment, _)) = self.memory.take() {
            std::mem::forget(segment);
        }
    }

    /// Queues a copy, and waits for it.
    ///
    /// # Safety
    /// The contract of [`Device::copy`] applies.
    unsafe fn copy<D: Device>(
        &mut self,
        device: &mut D,
        to: DevicePtr,
        from: DevicePtr,
        len: u64,
        deadline: Instant,
    ) -> Result<(), PostError> {
        // SAFETY: the caller upholds the contract of `Device::copy`.
        unsafe { device.copy(0, to, from, len) }.map_err(post_error)?;
        self.finish(device, deadline)
    }

    fn finish<D: Device>(&mut self, device: &mut D, deadline: Instant) -> Result<(), PostError> {
        let mark = loop {
            match device.mark(0) {
                Ok(mark) => break mark,
                // A mark becomes free when queued work completes.
                Err(DeviceError::Exhausted) if Instant::now() < deadline => {
                    std::thread::yield_now()
                }
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

    /// Copies bytes into device memory.
    ///
    /// # Safety
    /// `from.len()` bytes at `to` are device memory.
    pub(crate) unsafe fn write_device<D: Device>(
        &mut self,
        device: &mut D,
        to: DevicePtr,
        from: Untrusted<'_>,
        deadline: Instant,
    ) -> Result<(), PostError> {
        if device.caps().write_word
            && let Some(value) = whole_word(to.0, from)
        {
            self.free(device)?;
            // SAFETY: the caller guarantees that the word is device memory, and `whole_word` has
            // checked its alignment.
            unsafe { device.write_word(0, to, value) }.map_err(post_error)?;
            return self.finish(device, deadline);
        }
        let mut done = 0;
        while done < from.len() {
            let piece = (from.len() - done).min(LEN);
            let (bytes, at) = self.free(device)?;
            // SAFETY: `free` returned the buffer, so no copy uses it, and it is as long as `piece`.
            // The piece lies inside both ranges.
            unsafe {
                copy_bytes(from.as_ptr().add(done), bytes.as_ptr(), piece);
                self.copy(device, to.at(done as u64), at, piece as u64, deadline)?;
            }
            done += piece;
        }
        Ok(())
    }

    /// Copies bytes out of device memory.
    ///
    /// # Safety
    /// `into.len()` bytes at `from` are device memory.
    pub(crate) unsafe fn read_device<D: Device>(
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
            // SAFETY: `free` returned the buffer, so no copy uses it, and it is as long as `piece`.
            // The piece lies inside both ranges.
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
    /// Each range: to, from, length.
    ///
    /// # Safety
    /// The ranges are registered, and no copy overlaps itself.
    pub(super) unsafe fn copy_device_bytes(
        &mut self,
        ranges: &[(DevicePtr, DevicePtr, usize)],
    ) -> Result<(), PostError> {
        let deadline = Instant::now() + self.config.timeout;
        let (stage, device) = (&mut self.stage, self.sharing.driver());
        // Fails while an earlier copy is late, because `finish` would lose the mark of that copy.
        stage.free(device)?;
        for &(to, from, len) in ranges {
            // SAFETY: the caller guarantees that the ranges are valid. `finish` waits for the copy.
            // If the wait fails, `is_unsure` keeps the memory registered.
            if let Err(error) = unsafe { device.copy(0, to, from, len as u64) } {
                stage.finish(device, deadline)?;
                return Err(post_error(error));
            }
        }
        stage.finish(device, deadline)
    }

    /// Copies bytes into registered device memory.
    ///
    /// # Safety
    /// The contract of `Rail::write_device` applies.
    pub(super) unsafe fn write_device_bytes(
        &mut self,
        to: Local,
        from: Untrusted<'_>,
    ) -> Result<(), PostError> {
        let len = to.len.min(from.len());
        let (target, view) = self.own_device(to, len)?;
        let Some((from, _)) = from.split_at(len) else { return Ok(()) };
        if let Some(view) = view {
            // SAFETY: `own_device` has checked that the range is registered, and the processor has
            // it mapped.
            unsafe { write_window(view, from) };
            return Ok(());
        }
        let deadline = Instant::now() + self.config.timeout;
        // SAFETY: `own_device` has checked that the range is registered.
        unsafe { self.stage.write_device(self.sharing.driver(), target, from, deadline) }
    }

    /// Copies bytes out of registered device memory.
    ///
    /// # Safety
    /// The contract of `Rail::read_device` applies.
    pub(super) unsafe fn read_device_bytes(
        &mut self,
        from: Local,
        into: &mut [u8],
    ) -> Result<(), PostError> {
        let len = from.len.min(into.len());
        let (source, view) = self.own_device(from, len)?;
        if let Some(view) = view {
            // SAFETY: `own_device` has checked that the range is registered, and the processor has
            // it mapped.
            unsafe { copy_bytes(view, into.as_mut_ptr(), len) };
            return Ok(());
        }
        let deadline = Instant::now() + self.config.timeout;
        // SAFETY: `own_device` has checked that the range is registered.
        unsafe { self.stage.read_device(self.sharing.driver(), source, &mut into[..len], deadline) }
    }
}
