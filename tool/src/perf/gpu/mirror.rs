//! What the processor sees of memory of a device: copies of it, made by a device of its own beside
//! the one that is measured. Slow path.

use std::ptr::NonNull;

use fishplate_gpu::{AnyDevice, Device, DeviceError, DevicePtr};

use crate::failure::{Failure, Outcome};
use crate::perf::seat::{Buffer, Memory, Mirror};

/// Bytes that are copied at once.
const PIECE: usize = 4 << 20;

/// The two memories of a side, and where the processor sees them.
pub struct Copies {
    device: AnyDevice,
    /// What the device copies to and from.
    pinned: Buffer,
    seen: DevicePtr,
    landing: (DevicePtr, Buffer),
    buffer: (DevicePtr, Buffer),
}

// SAFETY: the addresses are of buffers of its own and of device memory;
// neither belongs to a thread.
unsafe impl Send for Copies {}

fn failed(error: DeviceError) -> Failure {
    Failure::run(format!("the device cannot copy what is to be verified: {error}"))
}

impl Copies {
    /// Copies of two memories of `len` bytes, made by `device`.
    pub fn new(mut device: AnyDevice, landing: DevicePtr, buffer: DevicePtr, len: usize) -> Outcome<Copies> {
        let pinned = Buffer::new(PIECE, PIECE)?;
        // SAFETY: the buffer is given back only after it was unpinned, by drop.
        let seen = unsafe { device.pin(pinned.ptr(), PIECE) }.map_err(failed)?;
        let (landing, buffer) = ((landing, Buffer::new(len, len)?), (buffer, Buffer::new(len, len)?));
        Ok(Copies { device, pinned, seen, landing, buffer })
    }

    /// Where the processor sees the two.
    pub fn views(&self) -> (NonNull<u8>, NonNull<u8>) {
        (self.landing.1.ptr(), self.buffer.1.ptr())
    }

    fn each(&mut self, memory: Memory, offset: usize, len: usize, into_device: bool) -> Outcome {
        let (there, here) = match memory {
            Memory::Landing => (self.landing.0, self.landing.1.ptr()),
            Memory::Buffer => (self.buffer.0, self.buffer.1.ptr()),
        };
        let mut at = offset;
        while at < offset + len {
            let piece = PIECE.min(offset + len - at);
            // SAFETY: offset and length lie inside both memories, as the test keeps to them; the
            // piece is no longer than what is pinned.
            unsafe {
                let (view, pinned, place) = (here.add(at), self.pinned.ptr(), there.at(at as u64));
                if into_device {
                    pinned.copy_from_nonoverlapping(view, piece);
                    self.device.copy(0, place, self.seen, piece as u64).map_err(failed)?;
                } else {
                    self.device.copy(0, self.seen, place, piece as u64).map_err(failed)?;
                }
                let mark = self.device.mark(0).map_err(failed)?;
                while !self.device.reached(mark).map_err(failed)? {
                    std::hint::spin_loop();
                }
                if !into_device {
                    view.copy_from_nonoverlapping(pinned, piece);
                }
            }
            at += piece;
        }
        Ok(())
    }
}

impl Mirror for Copies {
    fn give(&mut self, memory: Memory, offset: usize, len: usize) -> Outcome {
        self.each(memory, offset, len, true)
    }

    fn take(&mut self, memory: Memory, offset: usize, len: usize) -> Outcome {
        self.each(memory, offset, len, false)
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        // SAFETY: pinned by `new`; every copy was waited for.
        // An error leaves it pinned until the process ends.
        let _ = unsafe { self.device.unpin(self.pinned.ptr()) };
    }
}
