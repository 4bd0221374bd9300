//! Streams and marks. A mark is an event of a pool. Only [`CudaDevice::end_streams`] waits for the
//! device.

use cudarc::driver::sys::{CUevent, CUevent_flags, CUstream, CUstream_flags};

use super::CudaDevice;
use super::driver::{self, check};
use crate::{Bell, DeviceError, Mark};

const NO_SUCH: DeviceError = DeviceError::Driver(400);

/// The events for marks. Each entry holds an event, a wrapping count of its completed uses, and
/// whether it is in use.
#[derive(Debug, Default)]
pub(super) struct Marks {
    events: Vec<(CUevent, u16, bool)>,
    free: Vec<u16>,
}

impl Marks {
    #[inline]
    fn find(&mut self, mark: Mark) -> Result<&mut (CUevent, u16, bool), DeviceError> {
        let (place, round) = (mark.0 as u16, (mark.0 >> 16) as u16);
        let there = self.events.get_mut(usize::from(place));
        there.filter(|(_, now, marks)| *now == round && *marks).ok_or(NO_SUCH)
    }
}

impl CudaDevice {
    pub(super) fn make_streams(&mut self) -> Result<(), DeviceError> {
        let _entered = self.enter()?;
        for streams in [&mut self.streams, &mut self.ringers] {
            for _ in 0..self.caps.streams {
                let mut stream = std::ptr::null_mut();
                let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
                // SAFETY: the result is written to a local variable.
                check(unsafe { (self.driver.cuStreamCreate)(&raw mut stream, flags) })?;
                streams.push(stream);
            }
        }
        for place in 0..self.caps.marks {
            let mut event = std::ptr::null_mut();
            let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
            // SAFETY: the result is written to a local variable.
            check(unsafe { (self.driver.cuEventCreate)(&raw mut event, flags) })?;
            self.marks.events.push((event, 0, false));
            self.marks.free.push(place as u16);
        }
        Ok(())
    }

    pub(super) fn end_streams(&mut self) {
        let streams = std::mem::take(&mut self.streams);
        for stream in streams.into_iter().chain(std::mem::take(&mut self.ringers)) {
            // SAFETY: `make_streams` created the stream, and it is not used again. On a lost device
            // both calls fail, and nothing remains to be done.
            unsafe {
                (self.driver.cuStreamSynchronize)(stream);
                (self.driver.cuStreamDestroy_v2)(stream);
            }
        }
        for (event, ..) in std::mem::take(&mut self.marks).events {
            // SAFETY: `make_streams` created the event, and it is not used again.
            unsafe { (self.driver.cuEventDestroy_v2)(event) };
        }
    }

    #[inline]
    pub(super) fn stream(&self, stream: u8) -> Result<CUstream, DeviceError> {
        self.streams.get(usize::from(stream)).copied().ok_or(NO_SUCH)
    }

    #[inline]
    pub(super) fn record(&mut self, stream: u8) -> Result<Mark, DeviceError> {
        let _entered = self.enter()?;
        let stream = self.stream(stream)?;
        let place = *self.marks.free.last().ok_or(DeviceError::Exhausted)?;
        let (event, round, marks) = &mut self.marks.events[usize::from(place)];
        // SAFETY: `make_streams` created the event and the stream, which live as long as `self`.
        check(unsafe { (self.driver.cuEventRecord)(*event, stream) })?;
        *marks = true;
        self.marks.free.pop();
        Ok(Mark(u32::from(*round) << 16 | u32::from(place)))
    }

    #[inline]
    pub(super) fn query(&mut self, mark: Mark) -> Result<bool, DeviceError> {
        let _entered = self.enter()?;
        let (event, now, marks) = self.marks.find(mark)?;
        // SAFETY: `make_streams` created the event, which lives as long as `self`.
        let code = unsafe { (self.driver.cuEventQuery)(*event) };
        if code == driver::NOT_READY {
            return Ok(false);
        }
        *now = now.wrapping_add(1);
        *marks = false;
        self.marks.free.push(mark.0 as u16);
        check(code).map(|()| true)
    }

    #[cold]
    pub(super) fn ring_at(
        &mut self,
        stream: u8,
        mark: Mark,
        bell: &Bell,
    ) -> Result<(), DeviceError> {
        let _entered = self.enter()?;
        let ringer = *self.ringers.get(usize::from(stream)).ok_or(NO_SUCH)?;
        let (event, ..) = self.marks.find(mark)?;
        // SAFETY: `make_streams` created the event and the stream, which live as long as `self`. A
        // later record of the event does not change what the stream waits for.
        check(unsafe { (self.driver.cuStreamWaitEvent)(ringer, *event, 0) })?;
        let raw = bell.to_raw();
        // SAFETY: the stream is open. The driver calls the function at most once, and the argument
        // keeps the bell alive until then.
        let code = unsafe { (self.driver.cuLaunchHostFunc)(ringer, Some(Bell::ring_raw), raw) };
        check(code).inspect_err(|_| {
            // SAFETY: the driver has refused the call, so this is the only use of the argument.
            drop(unsafe { Bell::from_raw(raw) });
        })
    }
}
