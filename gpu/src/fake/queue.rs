//! The driver calls that queue work and wait for it. Waiting advances the simulated time, and never
//! sleeps.

use std::ffi::c_void;

use super::FakeProcess;
use super::behaviour::{Call, Violation};
use super::calls::INVALID_VALUE;
use super::memory::FakeMemory;
use super::space::{Place, Range};
use super::stream::{Stream, StreamId, Verb};
use super::world::State;
use crate::{DeviceError, DevicePtr};

impl FakeProcess {
    /// Creates a stream.
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`] if the process does not see the device.
    pub fn stream(&self, ordinal: u32) -> Result<StreamId, DeviceError> {
        let mut state = self.driver.state();
        state.machine_device(self.place, ordinal)?;
        let streams = &mut state.processes[self.place].streams;
        let fresh = Stream { ordinal, open: true, queue: Default::default(), queued: 0, done: 0 };
        streams.push(fresh);
        Ok(StreamId(streams.len() as u32 - 1))
    }

    /// Destroys a stream after its queued work has finished.
    pub fn end_stream(&self, stream: StreamId) {
        let mut state = self.driver.state();
        while !state.processes[self.place].streams[stream.0 as usize].queue.is_empty() {
            state.advance(1);
        }
        state.processes[self.place].streams[stream.0 as usize].open = false;
    }

    /// Waits for all work queued on a stream.
    ///
    /// # Errors
    /// The device is lost, or the process was killed.
    pub fn wait(&self, stream: StreamId) -> Result<(), DeviceError> {
        loop {
            let mut state = self.driver.state();
            state.advance(1);
            let Stream { ordinal, queued, .. } =
                state.processes[self.place].streams[stream.0 as usize];
            state.begin(self.place, ordinal, Call::Reached)?;
            if state.processes[self.place].streams[stream.0 as usize].done >= queued {
                return Ok(());
            }
        }
    }

    /// Queues a copy.
    ///
    /// # Errors
    /// [`DeviceError::NotDeviceMemory`] unless each range lies inside an allocation or adjacent
    /// segments.
    ///
    /// # Safety
    /// Pinned memory in either range stays mapped until the copy has finished.
    pub unsafe fn copy(
        &self,
        stream: StreamId,
        to: DevicePtr,
        from: DevicePtr,
        len: u64,
    ) -> Result<(), DeviceError> {
        let mut state = self.driver.state();
        state.begin_queue(self.place, stream, Call::Copy)?;
        let space = &state.processes[self.place].space;
        let (Ok(targets), Ok(sources)) = (space.places(to, len), space.places(from, len)) else {
            state.violations.push(Violation::OutOfRange);
            return Err(DeviceError::NotDeviceMemory);
        };
        if to.0 < from.0 + len && from.0 < to.0 + len {
            state.violations.push(Violation::Overlap);
            return Err(INVALID_VALUE);
        }
        for (target, source, len) in side_by_side(&targets, &sources) {
            for place in [target, source] {
                let range = state.processes[self.place].space.range(place);
                let orphan = range.and_then(Range::memory).is_some_and(FakeMemory::is_orphan);
                state.processes[self.place].counts.orphans_touched += u64::from(orphan);
            }
            let pieces = 1 + state.random() % u64::from(state.behaviour.pieces.max(1));
            let (piece, backwards) = (len.div_ceil(pieces).max(1), state.random() & 1 == 1);
            let verb = Verb::Copy { to: target, from: source, len, piece, moved: 0, backwards };
            state.queue(self.place, stream, verb);
        }
        Ok(())
    }

    /// Queues the store of a word.
    ///
    /// # Errors
    /// [`DeviceError::NotDeviceMemory`] unless the 8 bytes are aligned and lie inside an
    /// allocation.
    ///
    /// # Safety
    /// If the word is in pinned memory, that memory stays mapped until the store has finished.
    pub unsafe fn write_word(
        &self,
        stream: StreamId,
        word: DevicePtr,
        value: u64,
    ) -> Result<(), DeviceError> {
        let mut state = self.driver.state();
        state.begin_queue(self.place, stream, Call::WriteWord)?;
        if !state.behaviour.write_word {
            return Err(DeviceError::Driver(801));
        }
        let Ok(at) = state.processes[self.place].space.place(word, 8) else {
            state.violations.push(Violation::OutOfRange);
            return Err(DeviceError::NotDeviceMemory);
        };
        if !word.0.is_multiple_of(8) {
            state.violations.push(Violation::Misaligned);
            return Err(INVALID_VALUE);
        }
        let range = state.processes[self.place].space.range(at);
        let orphan = range.and_then(Range::memory).is_some_and(FakeMemory::is_orphan);
        state.processes[self.place].counts.orphans_touched += u64::from(orphan);
        state.queue(self.place, stream, Verb::Word { at, value });
        Ok(())
    }

    /// Makes later work of a stream wait for a mark of another stream.
    ///
    /// # Errors
    /// The device is lost, or the process was killed.
    pub fn wait_for(
        &self,
        stream: StreamId,
        other: StreamId,
        mark: u64,
    ) -> Result<(), DeviceError> {
        let mut state = self.driver.state();
        state.begin_queue(self.place, stream, Call::Ring)?;
        state.queue(self.place, stream, Verb::Wait { stream: other, mark });
        Ok(())
    }

    /// Queues a call of a function. The function is called with the driver's lock held, so a call
    /// of the driver in it deadlocks. It is not called if the device is lost before.
    ///
    /// # Errors
    /// The device is lost, or the process was killed.
    ///
    /// # Safety
    /// The function may be called with `data` on any thread.
    pub unsafe fn call(
        &self,
        stream: StreamId,
        function: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) -> Result<(), DeviceError> {
        let mut state = self.driver.state();
        state.begin_queue(self.place, stream, Call::Ring)?;
        state.queue(self.place, stream, Verb::Call { function, data: data as usize });
        Ok(())
    }

    /// Marks the end of the work queued on a stream. Returns the number of copies and words before
    /// the mark.
    ///
    /// # Errors
    /// The device is lost, or the process was killed.
    pub fn mark(&self, stream: StreamId) -> Result<u64, DeviceError> {
        let mut state = self.driver.state();
        state.begin_queue(self.place, stream, Call::Mark)?;
        let process = &mut state.processes[self.place];
        process.counts.marks += 1;
        Ok(process.streams[stream.0 as usize].queued)
    }

    /// Returns whether all work before a mark has finished.
    ///
    /// # Errors
    /// The device is lost, or the process was killed.
    pub fn reached(&self, stream: StreamId, mark: u64) -> Result<bool, DeviceError> {
        let mut state = self.driver.state();
        state.begin_queue(self.place, stream, Call::Reached)?;
        Ok(state.processes[self.place].streams[stream.0 as usize].done >= mark)
    }

    /// Frees a mark. Not a driver call.
    pub fn unmark(&self) {
        self.driver.state().processes[self.place].counts.marks_back += 1;
    }
}

impl State {
    fn begin_queue(
        &mut self,
        place: usize,
        stream: StreamId,
        call: Call,
    ) -> Result<(), DeviceError> {
        let there =
            self.processes[place].streams.get(stream.0 as usize).filter(|stream| stream.open);
        let Some(ordinal) = there.map(|stream| stream.ordinal) else {
            self.violations.push(Violation::UnknownStream);
            return Err(INVALID_VALUE);
        };
        self.begin(place, ordinal, call).map(|_| ())
    }
}

fn side_by_side(to: &[(Place, u64)], from: &[(Place, u64)]) -> Vec<(Place, Place, u64)> {
    let (mut pieces, mut at, mut done) = (vec![], [0, 0], [0, 0]);
    while let (Some((target, to_len)), Some((source, from_len))) = (to.get(at[0]), from.get(at[1]))
    {
        let len = (to_len - done[0]).min(from_len - done[1]);
        let further = |place: &Place, by| Place { offset: place.offset + by, ..*place };
        pieces.push((further(target, done[0]), further(source, done[1]), len));
        for (end, whole) in [to_len, from_len].into_iter().enumerate() {
            done[end] += len;
            if done[end] == *whole {
                (at[end], done[end]) = (at[end] + 1, 0);
            }
        }
    }
    pieces
}
