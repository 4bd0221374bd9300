//! Each call of [`Verbs`] names a side, and a process executes the call if it runs that side.
//!
//! Every call ends by the job's deadline.

use std::ptr::NonNull;

use fishplate_core::engine::protocol::Request;
use fishplate_core::op::{Cmp, SignalOp};

use super::job::{Job, Side, Tally};
use crate::clock::Clock;
use crate::failure::{Failure, Outcome};
use crate::histogram::Histogram;
use crate::payload::Pattern;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    /// The area that the other side writes.
    Landing,
    /// The area that this side sends from, and receives and gets into.
    Buffer,
}

/// Offsets are in bytes from the start of an area. Words are in the landing area, or next to it if
/// the landing area is device memory.
pub trait Verbs {
    fn plays(&self, side: Side) -> bool;

    /// Returns the clock that times the samples.
    fn clock(&self) -> Clock;

    fn out_of_order(&self) -> u64;

    /// Sets the deadline, in nanoseconds from now.
    fn set_timeout(&mut self, ns: u64);

    /// Returns the host address of a side's area, and its size in bytes.
    fn area(&self, side: Side, area: Area) -> (NonNull<u8>, usize);

    /// If an area mirrors device memory, copies a part of it to the device.
    fn write_device(&mut self, area: Area, offset: usize, len: usize) -> Outcome;

    /// If an area mirrors device memory, copies a part of it from the device.
    fn read_device(&mut self, area: Area, offset: usize, len: usize) -> Outcome;

    fn set_word(&mut self, side: Side, offset: usize, value: u64) -> Outcome;

    fn word(&self, side: Side, offset: usize) -> Outcome<u64>;

    /// Puts from the buffer of `side` into the landing area of the other side.
    fn put(&mut self, side: Side, from: usize, len: usize, to: usize) -> Outcome;

    /// Puts as [`put`](Self::put) does, then sets a word of the other side.
    fn put_signal(
        &mut self,
        side: Side,
        from: usize,
        len: usize,
        to: usize,
        word: usize,
        value: u64,
    ) -> Outcome;

    /// Applies a signal to a word of the other side.
    fn signal(&mut self, side: Side, word: usize, op: SignalOp, value: u64) -> Outcome;

    /// Gets from the landing area of the other side into the buffer of `side`, and waits for the
    /// data.
    fn get(&mut self, side: Side, into: usize, len: usize, from: usize) -> Outcome;

    /// Adds 1 to a word of the other side, and waits for the old value.
    fn fetch_add(&mut self, side: Side, word: usize) -> Outcome<u64>;

    /// Waits until a word of `side` meets the condition `cmp` with `value`. Returns the word.
    fn wait(&mut self, side: Side, word: usize, cmp: Cmp, value: u64) -> Outcome<u64>;

    /// Waits until everything that `side` sent is applied.
    fn quiet(&mut self, side: Side) -> Outcome;

    /// Sends a message from the buffer of `side`. Returns the number of completions that the send
    /// will generate.
    fn send(&mut self, side: Side, tag: u64, offset: usize, len: usize) -> Outcome<u64>;

    /// Waits for this many completions of sends.
    fn sent(&mut self, side: Side, count: u64) -> Outcome;

    /// Posts a receive into the buffer of `side`. Its completion returns `word`.
    fn recv(
        &mut self,
        side: Side,
        tag: u64,
        offset: usize,
        len: usize,
        word: u64,
    ) -> Outcome<Request>;

    /// Waits for a receive.
    fn received(&mut self, side: Side, request: Request) -> Outcome;

    /// Waits for the next completed receive. Returns the `word` of that receive.
    fn next_recv(&mut self, side: Side) -> Outcome<u64>;

    /// Records a sample from `last` to now, and starts the next sample.
    fn lap(&mut self, histogram: &mut Histogram, last: &mut u64) -> Outcome;

    fn turn(&mut self) -> Outcome;

    /// Runs the ring test, or prepares it.
    fn ring(&mut self, _job: &Job, _histogram: Option<&mut Histogram>) -> Outcome<Tally> {
        Err(Failure::usage("ring needs two processes; use --transport shm"))
    }

    fn quiet_all(&mut self) -> Outcome {
        for side in Side::BOTH {
            if self.plays(side) {
                self.quiet(side)?;
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn fill(
        &mut self,
        side: Side,
        area: Area,
        offset: usize,
        pattern: Pattern,
        len: usize,
    ) -> Outcome {
        let (start, size) = self.area(side, area);
        assert!(offset + len <= size);
        // SAFETY: the range is inside the area, as just checked. The peer and the engine also
        // access it through raw pointers.
        unsafe { pattern.fill(start.as_ptr().add(offset), len) };
        self.write_device(area, offset, len)
    }

    #[inline(always)]
    fn is_whole(
        &mut self,
        side: Side,
        area: Area,
        offset: usize,
        pattern: Pattern,
        len: usize,
    ) -> Outcome<bool> {
        self.read_device(area, offset, len)?;
        let (start, size) = self.area(side, area);
        assert!(offset + len <= size);
        // SAFETY: the range is inside the area, as just checked. The peer and the engine also
        // access it through raw pointers.
        Ok(unsafe { pattern.verify(start.as_ptr().add(offset), len) })
    }

    /// Changes the first byte of a verified payload, so that this payload is not mistaken for the
    /// next one.
    fn spoil(&mut self, side: Side, area: Area, offset: usize) -> Outcome {
        let (start, size) = self.area(side, area);
        assert!(offset < size);
        // SAFETY: the byte is inside the area, as just checked. The peer and the engine also access
        // it through raw pointers.
        unsafe {
            let at = start.as_ptr().add(offset);
            at.write(!at.read());
        }
        self.write_device(area, offset, 1)
    }
}
