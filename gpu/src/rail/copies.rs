//! Asynchronous copies between host and device memory, for
//! [`place_device`](fishplate_core::rail::Rail::place_device) and
//! [`fetch_device`](fishplate_core::rail::Rail::fetch_device). A call begins a copy through a slot
//! of pinned host memory, or asks the driver whether the copy has ended.
//!
//! All copies use stream 0, so the device makes them in the order in which they begin. An abandoned
//! copy keeps its slot until the copy has ended and no other slot is free. A copy from the device
//! keeps its slot at least for [`KEPT`], so that the caller can take the bytes.

use std::time::{Duration, Instant};

use fishplate_core::error::PostError;
use fishplate_core::mem::{Untrusted, copy_bytes};
use fishplate_core::rail::Local;
use fishplate_core::sync::host::Host;
use fishplate_shm::Segment;

use super::stage::write_window;
use super::wait_object::Ends;
use super::{GpuRail, post_error};
use crate::{Bell, Device, DeviceError, DevicePtr, Mark};

const SLOTS: usize = 16;

/// The longest copy, in bytes.
const LEN: usize = 8192;

const KEPT: Duration = Duration::from_secs(1);

/// Number of low bits of a copy's name that hold the slot's index plus 1.
const SLOT_BITS: u32 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// Queued, but the device had no mark left.
    Unmarked,
    Marked(Mark),
    /// Like `Marked`, and the device rings when it reaches the mark.
    Rings(Mark),
    Ended,
}

impl State {
    fn is_pending(self) -> bool {
        !matches!(self, State::Free | State::Ended)
    }
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    state: State,
    /// Invalidates the names of earlier copies.
    generation: u32,
    at: DevicePtr,
    len: usize,
    /// Whether the copy is from the device. If so, the caller takes its bytes later.
    fetches: bool,
    begun: Instant,
}

impl Slot {
    fn is_abandoned(&self) -> bool {
        self.state == State::Ended && (!self.fetches || self.begun.elapsed() >= KEPT)
    }
}

#[derive(Debug)]
pub(crate) struct Copies {
    memory: Option<(Segment, DevicePtr)>,
    slots: [Slot; SLOTS],
    turn: usize,
    /// The outcome of some copy stays unknown, so the device may still access the slots.
    lost: bool,
    timeout: Duration,
}

impl Copies {
    pub(crate) fn new<D: Device>(device: &mut D, timeout: Duration) -> Self {
        let segment = Segment::create(SLOTS * LEN).ok();
        let memory = segment.and_then(|segment| {
            // SAFETY: `end` unpins the segment before it is unmapped.
            let at = unsafe { device.pin(segment.ptr(), segment.len()) }.ok()?;
            Some((segment, at))
        });
        let (at, begun) = (DevicePtr(0), Instant::now());
        let slot = Slot { state: State::Free, generation: 0, at, len: 0, fetches: false, begun };
        Copies { memory, slots: [slot; SLOTS], turn: 0, lost: false, timeout }
    }

    pub(crate) fn end<D: Device>(&mut self, device: &mut D) {
        let Some((segment, _)) = self.memory.take() else { return };
        // SAFETY: `settle` has waited for all copies, or found them lost.
        if self.lost || unsafe { device.unpin(segment.ptr()) }.is_err() {
            std::mem::forget(segment);
        }
    }

    /// Copies that do not end before the deadline count as lost.
    pub(crate) fn settle<D: Device>(&mut self, device: &mut D, deadline: Instant) {
        while (0..SLOTS).any(|slot| self.is_busy(device, slot)) && !self.lost {
            self.lost = Instant::now() >= deadline;
        }
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lost
    }

    pub(crate) fn touches<D: Device>(&mut self, device: &mut D, at: DevicePtr, len: usize) -> bool {
        (0..SLOTS).any(|slot| {
            let known = self.slots[slot];
            let meets = at.0 < known.at.0 + known.len as u64 && known.at.0 < at.0 + len as u64;
            meets && self.is_busy(device, slot)
        })
    }

    fn is_busy<D: Device>(&mut self, device: &mut D, slot: usize) -> bool {
        let _ = self.look(device, slot);
        self.slots[slot].state.is_pending()
    }

    /// Returns whether copies are in flight, as far as the last calls have found out.
    pub(crate) fn is_pending(&self) -> bool {
        self.slots.iter().any(|slot| slot.state.is_pending())
    }

    /// Makes the end of each copy ring the bell. Returns `false` if some copy will not ring, or has
    /// just ended. Adds the number of copies newly made to ring to `count`.
    pub(crate) fn ring<D: Device>(&mut self, device: &mut D, bell: &Bell, count: &mut u64) -> bool {
        let mut all = true;
        for slot in 0..SLOTS {
            match self.slots[slot].state {
                State::Free | State::Ended => {}
                State::Unmarked => all = false,
                State::Marked(mark) => match device.ring(0, mark, bell) {
                    Ok(()) => {
                        self.slots[slot].state = State::Rings(mark);
                        *count += 1;
                    }
                    Err(_) => all = false,
                },
                // Asks the driver: the caller of an abandoned copy does not ask any more, and the
                // copy must not count as pending for ever.
                State::Rings(_) => all &= self.is_busy(device, slot),
            }
        }
        all
    }

    fn look<D: Device>(&mut self, device: &mut D, slot: usize) -> Result<(), PostError> {
        if self.slots[slot].state == State::Unmarked {
            match device.mark(0) {
                Ok(mark) => self.slots[slot].state = State::Marked(mark),
                // A mark becomes free when queued work completes.
                Err(DeviceError::Exhausted) => return Ok(()),
                Err(error) => return Err(self.forsake(error)),
            }
        }
        if let State::Marked(mark) | State::Rings(mark) = self.slots[slot].state {
            match device.reached(mark) {
                Ok(true) => self.slots[slot].state = State::Ended,
                Ok(false) => {}
                Err(error) => {
                    self.slots[slot].state = State::Ended;
                    return Err(self.forsake(error));
                }
            }
        }
        Ok(())
    }

    /// The caller of a slow copy gets an error. The copy keeps its slot and its device memory until
    /// it ends.
    fn ended<D: Device>(
        &mut self,
        device: &mut D,
        slot: usize,
        copy: &mut u32,
    ) -> Result<(), PostError> {
        self.look(device, slot)?;
        match self.slots[slot] {
            Slot { state: State::Ended, .. } => Ok(()),
            Slot { begun, .. } if begun.elapsed() >= self.timeout => {
                *copy = 0;
                Err(PostError::Provider(libc::ETIMEDOUT))
            }
            _ => Err(PostError::Again),
        }
    }

    #[cold]
    fn forsake(&mut self, error: DeviceError) -> PostError {
        self.lost = true;
        if let Some((segment, _)) = self.memory.take() {
            std::mem::forget(segment);
        }
        PostError::Provider(super::queue::code(error))
    }

    /// Takes a slot: a free slot, or the slot of an abandoned copy that has ended.
    fn take<D: Device>(&mut self, device: &mut D) -> Result<usize, PostError> {
        let order = |turn: usize| (0..SLOTS).map(move |n| (turn + n) % SLOTS);
        let mut found = order(self.turn).find(|&slot| self.slots[slot].state == State::Free);
        if found.is_none() {
            for slot in order(self.turn) {
                self.look(device, slot)?;
                if self.slots[slot].is_abandoned() {
                    found = Some(slot);
                    break;
                }
            }
        }
        let slot = found.ok_or(PostError::Again)?;
        self.turn = (slot + 1) % SLOTS;
        Ok(slot)
    }

    /// `None` if the slot was taken again.
    fn slot_of(&self, copy: u32) -> Option<usize> {
        let slot = (copy & ((1 << SLOT_BITS) - 1)) as usize - 1;
        (self.slots[slot].generation << SLOT_BITS == copy & (u32::MAX << SLOT_BITS)).then_some(slot)
    }

    /// Queues a copy between the device memory `at` and a slot, and returns its name. First copies
    /// `from`, if given, into the slot.
    ///
    /// # Safety
    /// `len` bytes at `at` are device memory that stays valid while it is [touched](Self::touches).
    unsafe fn begin<D: Device>(
        &mut self,
        device: &mut D,
        at: DevicePtr,
        len: usize,
        from: Option<Untrusted<'_>>,
    ) -> Result<u32, PostError> {
        let slot = self.take(device)?;
        // From now on, the name of the slot's last copy is invalid, even if no new copy begins.
        let generation = self.slots[slot].generation.wrapping_add(1);
        (self.slots[slot].state, self.slots[slot].generation) = (State::Free, generation);
        let (segment, start) = self.memory.as_ref().ok_or(PostError::Unsupported)?;
        let (bytes, staged) = (segment.ptr(), start.at((slot * LEN) as u64));
        let (to, source) = match from {
            Some(from) => {
                // SAFETY: the slot holds `LEN` bytes, at least `len`, and no copy uses it.
                unsafe { copy_bytes(from.as_ptr(), bytes.as_ptr().add(slot * LEN), len) };
                (at, staged)
            }
            None => (staged, at),
        };
        // SAFETY: the slot is pinned, and its owner keeps the device memory while the copy is in
        // flight.
        unsafe { device.copy(0, to, source, len as u64) }.map_err(post_error)?;
        let (fetches, begun) = (from.is_none(), Instant::now());
        self.slots[slot] = Slot { state: State::Unmarked, generation, at, len, fetches, begun };
        Ok(generation << SLOT_BITS | (slot as u32 + 1))
    }

    /// See [`Rail::place_device`](fishplate_core::rail::Rail).
    ///
    /// # Safety
    /// The contract of [`begin`](Self::begin) applies, with the length of `from`. `from` has at
    /// most [`LEN`] bytes.
    unsafe fn place<D: Device>(
        &mut self,
        device: &mut D,
        to: DevicePtr,
        from: Untrusted<'_>,
        copy: &mut u32,
    ) -> Result<(), PostError> {
        if *copy == 0 {
            // SAFETY: the caller upholds the contract of `begin`.
            *copy = unsafe { self.begin(device, to, from.len(), Some(from)) }?;
        }
        if let Some(slot) = self.slot_of(*copy) {
            self.ended(device, slot, copy)?;
            self.slots[slot].state = State::Free;
        }
        // If the slot was taken again, the copy has ended.
        *copy = 0;
        if self.lost { Err(PostError::Provider(libc::EIO)) } else { Ok(()) }
    }

    /// See [`Rail::fetch_device`](fishplate_core::rail::Rail).
    ///
    /// # Safety
    /// The contract of [`begin`](Self::begin) applies, with the length of `into`. `into` has at
    /// most [`LEN`] bytes.
    unsafe fn fetch<D: Device>(
        &mut self,
        device: &mut D,
        from: DevicePtr,
        into: &mut [u8],
        copy: &mut u32,
    ) -> Result<(), PostError> {
        let slot = match *copy {
            0 => None,
            copy => self.slot_of(copy),
        };
        // The caller may ask for more bytes than before, after a rail for longer messages has
        // recovered.
        let begun =
            |slot: &usize| (self.slots[*slot].at, self.slots[*slot].len) == (from, into.len());
        let slot = match slot.filter(begun) {
            Some(slot) => slot,
            // The first call, or the slot was taken again and its bytes are gone.
            None => {
                *copy = 0;
                // SAFETY: the caller upholds the contract of `begin`.
                *copy = unsafe { self.begin(device, from, into.len(), None) }?;
                match self.slot_of(*copy) {
                    Some(slot) => slot,
                    None => return Err(PostError::Again),
                }
            }
        };
        self.ended(device, slot, copy)?;
        let (segment, _) = self.memory.as_ref().ok_or(PostError::Provider(libc::EIO))?;
        // SAFETY: the slot holds `LEN` bytes, and `into` has at most `LEN`. No copy uses the slot.
        unsafe {
            copy_bytes(segment.ptr().as_ptr().add(slot * LEN), into.as_mut_ptr(), into.len())
        };
        (self.slots[slot].state, *copy) = (State::Free, 0);
        Ok(())
    }
}

impl<D: Device, H: Host> GpuRail<D, H> {
    /// Waits only for more than [`LEN`] bytes.
    ///
    /// # Safety
    /// The contract of `Rail::place_device` applies.
    pub(super) unsafe fn place_device_bytes(
        &mut self,
        to: Local,
        from: Untrusted<'_>,
        copy: &mut u32,
    ) -> Result<(), PostError> {
        let len = to.len.min(from.len());
        let (target, view) = self.own_device(to, len)?;
        let Some((from, _)) = from.split_at(len) else { return Ok(()) };
        match view {
            _ if len == 0 => Ok(()),
            Some(view) => {
                // SAFETY: `own_device` has checked that the range is registered, and the processor
                // has it mapped.
                unsafe { write_window(view, from) };
                Ok(())
            }
            // SAFETY: the caller upholds the contract of `Rail::place_device`, which includes the
            // contract of `Rail::write_device`.
            None if len > LEN => unsafe { self.write_device_bytes(to, from) },
            None => {
                let before = *copy;
                // SAFETY: `own_device` has checked that the range is registered.
                let placed =
                    unsafe { self.copies.place(self.sharing.driver(), target, from, copy) };
                self.began(before, *copy);
                placed
            }
        }
    }

    /// Waits only for more than [`LEN`] bytes.
    ///
    /// # Safety
    /// The contract of `Rail::fetch_device` applies.
    pub(super) unsafe fn fetch_device_bytes(
        &mut self,
        from: Local,
        into: &mut [u8],
        copy: &mut u32,
    ) -> Result<(), PostError> {
        let len = from.len.min(into.len());
        let (source, view) = self.own_device(from, len)?;
        match view {
            _ if len == 0 => Ok(()),
            Some(view) => {
                // SAFETY: `own_device` has checked that the range is registered, and the processor
                // has it mapped.
                unsafe { copy_bytes(view, into.as_mut_ptr(), len) };
                Ok(())
            }
            // SAFETY: the caller upholds the contract of `Rail::fetch_device`, which includes the
            // contract of `Rail::read_device`.
            None if len > LEN => unsafe { self.read_device_bytes(from, into) },
            None => {
                let before = *copy;
                // SAFETY: `own_device` has checked that the range is registered.
                let fetched = unsafe {
                    self.copies.fetch(self.sharing.driver(), source, &mut into[..len], copy)
                };
                self.began(before, *copy);
                fetched
            }
        }
    }

    /// Records a copy that the call just made has begun. The arguments are the name of the caller's
    /// copy before and after the call.
    fn began(&mut self, before: u32, copy: u32) {
        if copy != before {
            // The last poll before a sleep makes copies ring. A copy that begins after that poll
            // does not ring, so that sleep must be a nap.
            self.pace.set_ends(Ends::Some);
        }
    }

    pub(super) fn own_device(
        &self,
        memory: Local,
        len: usize,
    ) -> Result<(DevicePtr, Option<*mut u8>), PostError> {
        let addr = memory.ptr.as_ptr() as u64;
        let local = self.local_of(memory.desc).map(|slot| self.locals[slot as usize]);
        let local = local.ok_or(PostError::BadKey)?;
        let place = local.place(addr, len as u64).ok_or(PostError::BadKey)?;
        Ok((place, local.view(addr)))
    }

    pub(super) fn is_copying(&mut self, at: u64, len: usize) -> bool {
        self.copies.touches(self.sharing.driver(), DevicePtr(at), len)
    }
}
