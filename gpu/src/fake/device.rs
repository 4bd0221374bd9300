//! Implements [`Device`] over a fake process.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use super::FakeProcess;
use super::behaviour::{MemoryKind, Violation};
use super::stream::StreamId;
use crate::{
    Allocation, Bell, Device, DeviceCaps, DeviceError, DevicePtr, Handle, Mark, Share, Uuid,
};

/// One device of a fake process, used by one thread at a time. Dropping it finishes the work queued
/// on its streams. Memory that was not freed stays allocated, and counts as held.
#[derive(Debug)]
pub struct FakeDevice {
    process: FakeProcess,
    caps: DeviceCaps,
    streams: Vec<StreamId>,
    /// One for each stream. They wait for marks and ring bells.
    ringers: Vec<StreamId>,
    /// The marks. The lower half of a [`Mark`] is the index, and the upper half counts the uses of
    /// that entry.
    marks: Vec<(u16, Option<(StreamId, u64)>)>,
    free: Vec<u16>,
}

impl FakeDevice {
    pub(super) fn new(process: FakeProcess, ordinal: u32) -> Result<FakeDevice, DeviceError> {
        let behaviour = process.driver().behaviour();
        let marks = behaviour.marks.min(1 << 16);
        let caps = DeviceCaps {
            uuid: process.uuid(ordinal)?,
            ordinal,
            streams: behaviour.streams,
            marks,
            write_word: behaviour.write_word,
            must_flush: behaviour.must_flush,
        };
        let streams =
            || (0..behaviour.streams).map(|_| process.stream(ordinal)).collect::<Result<_, _>>();
        let (streams, ringers) = (streams()?, streams()?);
        let free = (0..marks).rev().map(|place| place as u16).collect();
        let marks = vec![(0, None); marks as usize];
        Ok(FakeDevice { process, caps, streams, ringers, marks, free })
    }

    /// Returns the process of the device.
    pub fn process(&self) -> &FakeProcess {
        &self.process
    }

    /// Allocates memory of the given kind.
    ///
    /// # Errors
    /// The errors of [`Device::alloc`].
    pub fn alloc_as(&mut self, kind: MemoryKind, size: u64) -> Result<DevicePtr, DeviceError> {
        self.process.alloc(self.caps.ordinal, kind, size)
    }

    fn stream(&self, stream: u8) -> Result<StreamId, DeviceError> {
        self.streams.get(usize::from(stream)).copied().ok_or_else(|| {
            self.process.count_violation(Violation::UnknownStream);
            DeviceError::Driver(1)
        })
    }
}

impl Drop for FakeDevice {
    fn drop(&mut self) {
        for &stream in self.streams.iter().chain(&self.ringers) {
            self.process.end_stream(stream);
        }
    }
}

// SAFETY: the fake keeps memory mapped until it is freed or closed. It executes queued copies
// before it reports their mark as reached.
unsafe impl Device for FakeDevice {
    fn caps(&self) -> DeviceCaps {
        self.caps
    }

    fn alloc(&mut self, size: u64) -> Result<DevicePtr, DeviceError> {
        self.alloc_as(self.process.driver().behaviour().kind, size)
    }

    unsafe fn free(&mut self, base: DevicePtr) -> Result<(), DeviceError> {
        self.process.free(self.caps.ordinal, base)
    }

    fn keep(&mut self, _base: DevicePtr) {
        self.process.count_kept();
    }

    fn allocation(&self, ptr: DevicePtr) -> Result<Allocation, DeviceError> {
        self.process.allocation(self.caps.ordinal, ptr)
    }

    fn export(&mut self, allocation: &Allocation) -> Result<Handle, DeviceError> {
        let ordinal = self.caps.ordinal;
        match allocation.share {
            Share::Legacy => {
                self.process.export_legacy(ordinal, allocation.base).map(Handle::Legacy)
            }
            Share::Descriptor => {
                self.process.export_descriptor(ordinal, allocation.base).map(Handle::Descriptor)
            }
            Share::Never(why) => Err(DeviceError::NotExportable(why)),
        }
    }

    unsafe fn open(&mut self, handle: &Handle, size: u64) -> Result<DevicePtr, DeviceError> {
        match handle {
            Handle::Legacy(bytes) => self.process.open_legacy(self.caps.ordinal, bytes),
            Handle::Descriptor(fd) => {
                self.process.open_descriptor(self.caps.ordinal, fd.as_fd(), size)
            }
            Handle::Segments(segments) => {
                if segments.iter().try_fold(0u64, |sum, (_, size)| sum.checked_add(*size))
                    != Some(size)
                {
                    return Err(DeviceError::BadHandle);
                }
                let segments: Vec<_> =
                    segments.iter().map(|(fd, size)| (fd.as_fd(), *size)).collect();
                self.process.open_segments(self.caps.ordinal, &segments)
            }
        }
    }

    unsafe fn close(&mut self, base: DevicePtr) -> Result<(), DeviceError> {
        self.process.close(self.caps.ordinal, base)
    }

    fn reaches(&self, uuid: &Uuid) -> bool {
        self.process.reaches(self.caps.ordinal, uuid)
    }

    unsafe fn pin(&mut self, ptr: NonNull<u8>, len: usize) -> Result<DevicePtr, DeviceError> {
        // SAFETY: the caller upholds the contract of `Device::pin`, as `FakeProcess::pin` requires.
        unsafe { self.process.pin(self.caps.ordinal, ptr, len) }
    }

    unsafe fn unpin(&mut self, ptr: NonNull<u8>) -> Result<(), DeviceError> {
        self.process.unpin(self.caps.ordinal, ptr)
    }

    fn host_view(&self, ptr: DevicePtr, len: u64) -> Option<NonNull<u8>> {
        self.process.host_view(ptr, len)
    }

    unsafe fn copy(
        &mut self,
        stream: u8,
        to: DevicePtr,
        from: DevicePtr,
        len: u64,
    ) -> Result<(), DeviceError> {
        let stream = self.stream(stream)?;
        // SAFETY: the caller upholds the contract of `Device::copy`, which includes the contract of
        // `FakeProcess::copy`.
        unsafe { self.process.copy(stream, to, from, len) }
    }

    unsafe fn write_word(
        &mut self,
        stream: u8,
        word: DevicePtr,
        value: u64,
    ) -> Result<(), DeviceError> {
        let stream = self.stream(stream)?;
        // SAFETY: the caller upholds the contract of `Device::write_word`, which includes the
        // contract of `FakeProcess::write_word`.
        unsafe { self.process.write_word(stream, word, value) }
    }

    fn mark(&mut self, stream: u8) -> Result<Mark, DeviceError> {
        let stream = self.stream(stream)?;
        let place = *self.free.last().ok_or(DeviceError::Exhausted)?;
        let at = self.process.mark(stream)?;
        self.free.pop();
        let (round, marked) = &mut self.marks[usize::from(place)];
        *marked = Some((stream, at));
        Ok(Mark(u32::from(*round) << 16 | u32::from(place)))
    }

    fn reached(&mut self, mark: Mark) -> Result<bool, DeviceError> {
        let (place, round) = (mark.0 as u16, (mark.0 >> 16) as u16);
        let there = self.marks.get_mut(usize::from(place)).filter(|(now, _)| *now == round);
        let Some((round, Some((stream, at)))) =
            there.map(|(round, marked)| (round, marked.as_mut().copied()))
        else {
            self.process.count_violation(Violation::UnknownMark);
            return Err(DeviceError::Driver(400));
        };
        let reached = self.process.reached(stream, at);
        if reached != Ok(false) {
            *round = round.wrapping_add(1);
            self.marks[usize::from(place)].1 = None;
            self.free.push(place);
            self.process.unmark();
        }
        reached
    }

    fn ring(&mut self, stream: u8, mark: Mark, bell: &Bell) -> Result<(), DeviceError> {
        let (of, ringer) = (self.stream(stream)?, self.ringers[usize::from(stream)]);
        let (place, round) = (mark.0 as u16, (mark.0 >> 16) as u16);
        let known = self.marks.get(usize::from(place)).filter(|(now, _)| *now == round);
        let Some((stream, at)) = known.and_then(|known| known.1).filter(|known| known.0 == of)
        else {
            self.process.count_violation(Violation::UnknownMark);
            return Err(DeviceError::Driver(400));
        };
        self.process.wait_for(ringer, stream, at)?;
        let raw = bell.to_raw();
        // SAFETY: the fake calls the function at most once, and the argument keeps the bell alive.
        unsafe { self.process.call(ringer, Bell::ring_raw, raw) }.inspect_err(|_| {
            // SAFETY: the fake has refused the call, so this is the only use of the argument.
            drop(unsafe { Bell::from_raw(raw) });
        })
    }

    fn dmabuf(&mut self, ptr: DevicePtr, len: u64) -> Option<(OwnedFd, u64)> {
        self.process.dmabuf(ptr, len)
    }

    fn flush_remote_writes(&mut self) -> Result<(), DeviceError> {
        match self.caps.must_flush {
            true => self.process.flush(self.caps.ordinal),
            false => Ok(()),
        }
    }
}
