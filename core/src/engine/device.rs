//! Handles signals and atomics on words in device memory: receives them, applies them in order, and
//! waits for such a word. Slow paths that wait only for the device.
//!
//! The processor does not access the word: the first rail reads and writes it. So the message is
//! parked on arrival, even if it is next in order, and a later step of the pass applies it. A
//! change of the word takes two copies. The change is atomic with respect to other messages that
//! this engine applies. It is not atomic with respect to kernels, or to other engines that have
//! registered the memory.

use core::ptr::NonNull;

use crate::error::{OpError, PeerError, PostError, Violation, WaitError};
use crate::mem::{LocalAddr, Peer, PeerId, Untrusted, copy_bytes};
use crate::op::{Amo, AmoOp, Cmp, SignalOp};
use crate::rail::{Local, Rail};
use crate::sync::event::Park;
use crate::sync::host::Host;

use super::list::NONE;
use super::pieces::COPIER;
use super::table::{NO_RAIL, in_bounds, locate};
use super::wait::Waiter;
use super::window::{Action, Parked};
use super::wire::{Body, Message, Place};
use super::{Engine, State};

const SIGNAL: u8 = 8;

/// `pass` and `last`: the pass and the stream of the last change. `next`: the first stream that had
/// to wait since then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceTurn {
    pass: u64,
    last: u32,
    next: u32,
}

impl DeviceTurn {
    pub const NEW: DeviceTurn = DeviceTurn { pass: u64::MAX, last: NONE, next: NONE };
}

#[repr(align(8))]
struct Copied([u8; 8]);

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Applies a signal to a word in device memory. Returns `false` without effect if the device
    /// has no room now, or if this pass has already changed a word in device memory.
    ///
    /// # Errors
    /// The violation `why` if the word is not in device memory. [`PeerError::Rail`] if the device
    /// has failed; it may or may not change the word.
    #[cold]
    #[inline(never)]
    pub(super) fn signal_on_device(
        &mut self,
        stream: u32,
        at: Place,
        op: SignalOp,
        value: u64,
        why: Violation,
    ) -> Result<bool, PeerError> {
        let op = match op {
            SignalOp::Set => AmoOp::Set,
            SignalOp::Add => AmoOp::Add,
        };
        let amo = Amo { op, width: SIGNAL, operand: value, compare: 0 };
        Ok(self.amo_on_device(stream, at, amo, false, why)?.is_some())
    }

    /// Executes an atomic under the rules of [`signal_on_device`](Self::signal_on_device). Returns
    /// the old value, which is valid only if `fetch` is set. Returns `None` if the word cannot be
    /// changed now.
    #[cold]
    #[inline(never)]
    pub(super) fn amo_on_device(
        &mut self,
        stream: u32,
        at: Place,
        amo: Amo,
        fetch: bool,
        why: Violation,
    ) -> Result<Option<u64>, PeerError> {
        let word = self.state.device_word(at, amo.width).map_err(|_| why)?;
        if !self.state.may_change_device(stream) {
            return Ok(None);
        }
        let rail = self.rails.first_mut();
        let mut copied = Copied([0; 8]);
        let reads = fetch || amo.op != AmoOp::Set;
        if reads {
            // SAFETY: `device_word` checked that the word is in memory registered with this rail.
            // The owner of that memory may read it.
            match unsafe { rail.read_device(word, &mut copied.0[..word.len]) } {
                Err(PostError::Again) => return Ok(None),
                read => read.map_err(|_| PeerError::Rail(COPIER))?,
            }
        }
        let before = copied.0;
        // SAFETY: `copied` is an aligned local variable of 8 bytes. Decoding the message checked
        // the width.
        let old = unsafe { amo.apply(copied.0.as_mut_ptr()) };
        if !reads || copied.0 != before {
            let bytes = Untrusted::from_slice(&copied.0[..word.len]);
            // SAFETY: `device_word` checked that the word is in memory registered with this rail.
            // The owner of that memory may write it.
            match unsafe { rail.write_device(word, bytes) } {
                Err(PostError::Again) => return Ok(None),
                written => written.map_err(|_| PeerError::Rail(COPIER))?,
            }
        }
        self.state.device = DeviceTurn { pass: self.state.loads.passes, last: stream, next: NONE };
        self.state.stats.applied += (amo.op != AmoOp::Fetch) as u64;
        Ok(Some(old))
    }

    /// Waits like [`wait_signal`](Self::wait_signal), for a word in host or device memory. The
    /// device reads its word between two passes, which takes some microseconds each time.
    ///
    /// # Errors
    /// The errors of `wait_signal`. [`OpError::Rail`] if the device failed.
    pub fn wait_signal_anywhere<H: Host, P: Park>(
        &mut self,
        at: LocalAddr,
        cmp: Cmp,
        value: u64,
        from: Option<PeerId>,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<u64, WaitError> {
        self.state.doubts.signals = from;
        let found =
            self.block(waiter, deadline_ns, |e| e.look_anywhere(at, cmp, value, from).transpose());
        if let Some(peer) = self.state.doubts.signals.take() {
            self.state.awaits(peer);
        }
        found.unwrap_or_else(|| Err(WaitError::Deadline(self.missing(from))))
    }

    pub(super) fn look_anywhere(
        &mut self,
        at: LocalAddr,
        cmp: Cmp,
        value: u64,
        from: Option<PeerId>,
    ) -> Result<Option<u64>, WaitError> {
        match self.look(at, cmp, value, from) {
            Err(WaitError::Op(OpError::DeviceMemory)) => {}
            looked => return looked,
        }
        let mut word = [0; SIGNAL as usize];
        let (ptr, _) = locate(self.state.locals, at, word.len() as u64)?;
        let desc = self.state.locals[at.region.index()].desc[COPIER.0 as usize];
        // SAFETY: `locate` checked that the word is in memory registered with this rail. The owner
        // of that memory may read it.
        match unsafe {
            self.rails.first_mut().read_device(Local { ptr, len: word.len(), desc }, &mut word)
        } {
            Ok(()) => self.judge(u64::from_ne_bytes(word), cmp, value, from),
            Err(PostError::Again) => {
                // No event announces that the device has room, so the waiter must not sleep. A due
                // stream keeps the waiter awake for one pass, and costs that pass nothing.
                self.state.due.push(self.state.streams, 0);
                Ok(None)
            }
            Err(error) => Err(OpError::Rail(COPIER, error).into()),
        }
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    /// Returns whether a stream may change a device's word now. The copies take microseconds, so
    /// each pass changes one word, and streams take turns.
    fn may_change_device(&mut self, stream: u32) -> bool {
        let DeviceTurn { pass, last, next } = self.device;
        if next != NONE && next != stream && self.streams[next as usize].due {
            return false;
        }
        let may = pass != self.loads.passes;
        if !may && stream != last {
            self.device.next = stream;
        }
        may
    }

    /// Parks signals and atomics on words in device memory, and data for device memory.
    #[cold]
    #[inline(never)]
    pub(super) fn device_word_arrived(&mut self, peer: Peer, bytes: Untrusted<'_>) {
        if let Err(violation) = self.park_for_device(peer, bytes) {
            self.quarantine(peer.0, violation);
        }
    }

    fn park_for_device(&mut self, peer: Peer, bytes: Untrusted<'_>) -> Result<(), Violation> {
        // Decode the message again, because the peer may have changed it since the first copy.
        let (message, payload) = Message::decode(bytes)?;
        let Some(stream) = self.arrival_stream(peer, message.context, message.word)? else {
            return Ok(());
        };
        let (at, width, what, data) = match message.body {
            Body::Signal { at, op, value, data } => {
                (at, SIGNAL, Action::Signal { op, value }, data)
            }
            Body::Amo { at, amo, token } => (at, amo.width, Action::Amo { amo, token }, None),
            Body::Data { at } => return self.piece_arrived(stream, message.word, at, payload),
            _ => return Err(Violation::Bounds),
        };
        self.device_word(at, width)?;
        let target = match data {
            Some((place, len)) => self.place(place, len as u64)?,
            None => core::ptr::null_mut(),
        };
        if self.park(stream, message.word, Parked { at, what })? {
            // SAFETY: `place` checked the target against its region, and decoding checked the
            // payload against the message's length. Without a target the payload is empty.
            unsafe { copy_bytes(payload.as_ptr(), target, payload.len()) };
        }
        Ok(())
    }

    fn device_word(&self, place: Place, width: u8) -> Result<Local, Violation> {
        let slot = self.locals.get(place.region as usize).ok_or(Violation::Region)?;
        let Some(start) =
            NonNull::new(slot.ptr).filter(|_| slot.generation as u16 == place.generation)
        else {
            return Err(Violation::Region);
        };
        let aligned = place.offset & (width as u64 - 1) == 0;
        if slot.native != NO_RAIL || !aligned || !in_bounds(place.offset, width as u64, slot.device)
        {
            return Err(Violation::Bounds);
        }
        let ptr = NonNull::new(start.as_ptr().wrapping_add(place.offset as usize))
            .ok_or(Violation::Bounds)?;
        Ok(Local { ptr, len: width as usize, desc: slot.desc[COPIER.0 as usize] })
    }
}
