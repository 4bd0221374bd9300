//! The memory under a range: one allocation, or the adjacent physical segments of virtual memory
//! that the range touches. Slow path: calls the driver and allocates.
//!
//! A *run* extends from the start of its first segment to the end of its last segment. It stores
//! the driver's buffer id of each segment. The id distinguishes the segment from a segment that is
//! mapped at the same addresses later. Two runs *agree* if they have the same segments wherever
//! they overlap. Then both are parts of the same memory, and one may lie inside the other.
//!
//! Segments form a run only if their addresses were reserved together. A driver does not treat
//! other adjacent segments as one piece of memory.

use std::os::fd::OwnedFd;

use super::error::ExportError;
use super::{Allocation, Device, DeviceError, DevicePtr, Handle, MAX_SEGMENTS, Unshared};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// The first segment, with the size of the whole run.
    whole: Allocation,
    /// The segments, at least one, in address order.
    segments: Box<[Allocation]>,
}

fn end(of: &Allocation) -> u64 {
    of.base.0.saturating_add(of.size)
}

fn overlap(a: &Allocation, b: &Allocation) -> bool {
    a.base.0 < end(b) && b.base.0 < end(a)
}

impl Run {
    /// Finds the memory under a range. Makes one or two driver calls per segment.
    pub(crate) fn of<D: Device>(device: &D, ptr: DevicePtr, len: u64) -> Result<Self, ExportError> {
        let first = device.allocation(ptr)?;
        let mut segments = vec![first];
        let mut whole = first;
        let there = |whole: &Allocation| end(whole).saturating_sub(ptr.0);
        let wanted = ptr.0.checked_add(len).filter(|_| len > 0);
        let wanted = wanted.ok_or(ExportError::BadRange { there: there(&whole) })?;
        while end(&whole) < wanted {
            let outside = ExportError::BadRange { there: there(&whole) };
            if first.reservation.is_none() {
                return Err(outside);
            }
            let next = match device.allocation(DevicePtr(end(&whole))) {
                Ok(next) => next,
                Err(DeviceError::NotDeviceMemory) => return Err(outside),
                Err(error) => return Err(error.into()),
            };
            if next.base.0 != end(&whole) || next.reservation != first.reservation {
                return Err(outside);
            }
            if segments.len() == MAX_SEGMENTS {
                return Err(ExportError::Segments { max: MAX_SEGMENTS, there: there(&whole) });
            }
            whole.size += next.size;
            segments.push(next);
        }
        Ok(Run { whole, segments: segments.into() })
    }

    /// Returns the run as one allocation, with the buffer id of the first segment.
    pub(crate) fn whole(&self) -> &Allocation {
        &self.whole
    }

    pub(crate) fn contains(&self, other: &Run) -> bool {
        self.whole.base <= other.whole.base && end(&other.whole) <= end(&self.whole)
    }

    pub(crate) fn overlaps(&self, other: &Run) -> bool {
        overlap(&self.whole, &other.whole)
    }

    pub(crate) fn agrees(&self, other: &Run) -> bool {
        let all_in = |a: &Run, b: &Run| {
            let mut there = a.segments.iter().filter(|segment| overlap(segment, &b.whole));
            there.all(|segment| b.segments.contains(segment))
        };
        all_in(self, other) && all_in(other, self)
    }

    /// Returns whether the driver still reports the same segments. Makes one or two driver calls
    /// per segment, up to the first mismatch.
    pub(crate) fn is_there<D: Device>(&self, device: &D) -> Result<bool, DeviceError> {
        for segment in &self.segments {
            match device.allocation(segment.base) {
                Ok(now) if now.buffer == segment.buffer && now.base == segment.base => {}
                Ok(_) | Err(DeviceError::NotDeviceMemory) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Exports the run as a handle. Makes one driver export per segment. On an error, drops the
    /// earlier exports.
    pub(crate) fn export<D: Device>(&self, device: &mut D) -> Result<Handle, DeviceError> {
        if let [only] = &*self.segments {
            return device.export(only);
        }
        let one = |segment: &Allocation| -> Result<(OwnedFd, u64), DeviceError> {
            match device.export(segment)? {
                Handle::Descriptor(fd) => Ok((fd, segment.size)),
                _ => Err(DeviceError::NotExportable(Unshared::NoHandleType)),
            }
        };
        self.segments.iter().map(one).collect::<Result<_, _>>().map(Handle::Segments)
    }
}
