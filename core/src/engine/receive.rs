//! Handles the reports of rails: changes state, and marks work as due. Posts nothing, so progress
//! never recurses.
//!
//! Checks everything that a peer sends before it has an effect. A violation quarantines the peer.

use crate::error::{CompleteError, PeerError, Violation};
use crate::mem::{Peer, RailId, Untrusted, copy_bytes};
use crate::op::{Amo, AmoOp, Fault, SignalOp};
use crate::rail::Sink;
use crate::sync::seq::Seq;

use super::State;
use super::post_tag::{GENERATION_MASK, Owner, PostTag};
use super::protocol::FIRST_KIND;
use super::table::in_bounds;
use super::window::{Action, Arrival, Cells, Parked, Window, bitmap_words};
use super::wire::{Body, Message, NO_TOKEN, Place, context_of};

pub(super) struct Reports<'s, 'm, const RAILS: usize> {
    state: &'s mut State<'m, RAILS>,
    rail: usize,
}

impl<'m, const RAILS: usize> State<'m, RAILS> {
    #[inline(always)]
    pub(super) fn sink(&mut self, rail: usize) -> Reports<'_, 'm, RAILS> {
        Reports { state: self, rail }
    }

    #[inline(always)]
    pub(super) fn window(&mut self, stream: u32) -> (&mut Window, Cells<'_>) {
        let (size, words) = (self.config.window as usize, bitmap_words(self.config.window));
        let at = stream as usize;
        let (arrived, message) =
            self.bitmap[2 * at * words..2 * (at + 1) * words].split_at_mut(words);
        let parked = &mut self.parked[at * size..(at + 1) * size];
        (&mut self.streams[at].window, Cells { arrived, message, parked, mask: self.mask })
    }

    #[inline(always)]
    pub(super) fn place(&self, place: Place, len: u64) -> Result<*mut u8, Violation> {
        let slot = self.locals.get(place.region as usize).ok_or(Violation::Region)?;
        if slot.ptr.is_null() || slot.generation as u16 != place.generation {
            return Err(Violation::Region);
        }
        if !in_bounds(place.offset, len, slot.len) {
            return Err(Violation::Bounds);
        }
        // SAFETY: `in_bounds` has just checked that `offset + len` is within the region.
        Ok(unsafe { slot.ptr.add(place.offset as usize) })
    }

    #[inline(always)]
    pub(super) fn word(&self, place: Place, width: u8) -> Result<*mut u8, Violation> {
        if place.offset & (width as u64 - 1) != 0 {
            return Err(Violation::Bounds);
        }
        self.place(place, width as u64)
    }

    #[inline(always)]
    pub(super) fn apply_signal(
        &mut self,
        at: Place,
        op: SignalOp,
        value: u64,
    ) -> Result<(), Violation> {
        let word = self.word(at, 8)?;
        // The data of this signal, and everything earlier, has been applied by this thread or by a
        // rail that reported it. SAFETY: `word` checked that the word is inside a registered region
        // and aligned to 8 bytes, as regions are. Signal words are only accessed atomically.
        unsafe { op.apply(word, value) };
        self.stats.applied += 1;
        Ok(())
    }

    #[inline(always)]
    pub(super) fn apply_amo(&mut self, at: Place, amo: Amo) -> Result<u64, Violation> {
        let word = self.word(at, amo.width)?;
        // SAFETY: `word` checked that the word is inside a registered region and aligned to its
        // width. Words of atomics are only accessed atomically.
        let old = unsafe { amo.apply(word) };
        self.stats.applied += (amo.op != AmoOp::Fetch) as u64;
        Ok(old)
    }

    /// Returns the stream of a peer's context, if the word's epoch matches. Returns `None` if the
    /// word belongs to an earlier attachment, or to no attachment.
    #[inline(always)]
    pub(super) fn arrival_stream(
        &mut self,
        peer: Peer,
        context: u8,
        word: u32,
    ) -> Result<Option<u32>, Violation> {
        let stream = self.stream_of(context, peer.0);
        match self.streams.get(stream as usize) {
            Some(s) if s.window.stamp() == word & !self.mask && s.peer == peer.0 => {
                Ok(Some(stream))
            }
            _ => self.strange_arrival(peer, context, word),
        }
    }

    #[inline(always)]
    pub(super) fn in_order(&mut self, stream: u32) {
        self.stats.arrived += 1;
        self.due.push(self.streams, stream);
    }

    pub(super) fn held(&mut self, stream: u32, arrival: Arrival) {
        self.stats.arrived += 1;
        match arrival {
            Arrival::Due => {}
            Arrival::Early => {
                self.stats.arrivals_out_of_order += 1;
                return;
            }
            Arrival::Duplicate => self.stats.duplicates += 1,
        }
        self.due.push(self.streams, stream);
    }

    #[inline(always)]
    fn write_in_order(&mut self, peer: Peer, data: u32) -> bool {
        if peer.0 as usize >= self.reached {
            return false;
        }
        // An unconfigured context has no stream, and a closed stream expects no word.
        let stream = self.stream_of(context_of(data), peer.0);
        let next = match self.streams.get_mut(stream as usize) {
            Some(s) => s.window.take_in_order(data, self.mask),
            None => false,
        };
        if next {
            self.in_order(stream);
        }
        next
    }

    #[inline(never)]
    fn write_landed(&mut self, peer: Peer, data: u32) -> Result<(), Violation> {
        let Some(stream) = self.arrival_stream(peer, context_of(data), data)? else {
            return Ok(());
        };
        let (window, mut cells) = self.window(stream);
        let arrival = window.write(data, &mut cells)?;
        self.held(stream, arrival);
        Ok(())
    }

    /// The message may be applied out of order. Returns `true` if it is new.
    #[inline(always)]
    pub(super) fn is_fresh(&mut self, stream: u32, word: u32) -> Result<bool, Violation> {
        if self.streams[stream as usize].window.take_in_order(word, self.mask) {
            self.in_order(stream);
            return Ok(true);
        }
        let (window, mut cells) = self.window(stream);
        let arrival = window.write(word, &mut cells)?;
        self.held(stream, arrival);
        Ok(arrival != Arrival::Duplicate)
    }

    /// Parks a message until all earlier numbers are applied. Returns `true` if the message and its
    /// payload are new.
    #[inline(never)]
    pub(super) fn park(
        &mut self,
        stream: u32,
        word: u32,
        parked: Parked,
    ) -> Result<bool, Violation> {
        let (window, mut cells) = self.window(stream);
        let arrival = window.message(word, parked, &mut cells)?;
        self.held(stream, arrival);
        Ok(arrival != Arrival::Duplicate)
    }

    #[inline(never)]
    fn untagged_arrived(&mut self, peer: Peer, bytes: Untrusted<'_>) {
        match self.untagged_checked(peer, bytes) {
            Ok(()) => {}
            Err(violation @ Violation::Kind) => self.contextless_arrived(peer, bytes, violation),
            Err(Violation::Bounds) => self.device_word_arrived(peer, bytes),
            Err(violation) => self.quarantine(peer.0, violation),
        }
    }

    #[inline(always)]
    fn untagged_checked(&mut self, peer: Peer, bytes: Untrusted<'_>) -> Result<(), Violation> {
        let (message, payload) = Message::decode(bytes)?;
        let Some(stream) = self.arrival_stream(peer, message.context, message.word)? else {
            return Ok(());
        };
        self.acknowledged(stream, message.ack)?;
        match message.body {
            Body::Signal { at, op, value, data } => {
                self.word(at, 8)?;
                let target = match data {
                    Some((place, len)) => self.place(place, len as u64)?,
                    None => core::ptr::null_mut(),
                };
                let next =
                    self.streams[stream as usize].window.take_in_order(message.word, self.mask);
                let parked = Parked { at, what: Action::Signal { op, value } };
                if next || self.park(stream, message.word, parked)? {
                    // Data lands at once, in any order; only the signal waits for earlier numbers.
                    // SAFETY: `place` checked the target against its region, and decoding checked
                    // the payload against the message's length. Without a target the payload is
                    // empty.
                    unsafe { copy_bytes(payload.as_ptr(), target, payload.len()) };
                }
                if next {
                    self.apply_signal(at, op, value)?;
                    self.in_order(stream);
                }
            }
            Body::Data { at } => {
                let target = self.place(at, payload.len() as u64)?;
                if self.is_fresh(stream, message.word)? {
                    // SAFETY: `place` checked that the payload fits the region at the target.
                    unsafe { copy_bytes(payload.as_ptr(), target, payload.len()) };
                }
            }
            Body::Amo { at, amo, token } => {
                let word = self.word(at, amo.width)?;
                if token == NO_TOKEN
                    && self.streams[stream as usize].window.take_in_order(message.word, self.mask)
                {
                    // SAFETY: `word` checked that the word is inside a registered region and
                    // aligned to its width. Words of atomics are only accessed atomically.
                    unsafe { amo.apply(word) };
                    self.stats.applied += 1;
                    self.in_order(stream);
                } else {
                    self.park(
                        stream,
                        message.word,
                        Parked { at, what: Action::Amo { amo, token } },
                    )?;
                }
            }
            Body::Reply { token, value } => self.replied(peer.0, token, value)?,
            Body::Ack { wanted: None, freed } => {
                self.credits_freed(stream, freed)?;
                if self.is_kept(stream) {
                    self.note_answer(stream);
                }
            }
            Body::Ack { wanted: Some(wanted), freed } => {
                self.credits_freed(stream, freed)?;
                let window = self.config.window as u64;
                let s = &mut self.streams[stream as usize];
                if !wanted.is_before(s.window.expected().plus(window + 1)) {
                    return Err(Violation::Sequence);
                }
                if wanted == s.ack_wanted {
                    // Asked again: an earlier answer may be delayed, so answer with what has
                    // arrived.
                    s.ack_sent = Seq(s.window.expected().0.wrapping_sub(1));
                    s.age = self.config.ack_age;
                } else if !wanted.is_before(s.ack_wanted) {
                    s.ack_wanted = wanted;
                    // The request may have overtaken the numbers that it names.
                    s.unhurried = !s.window.expected().is_before(wanted);
                }
                self.due.push(self.streams, stream);
            }
        }
        Ok(())
    }

    #[cold]
    fn control_failed(&mut self, rail: usize, peer: Peer, generation: u16, error: CompleteError) {
        if error == CompleteError::PeerDown && self.kept_peer(peer.0).is_none() {
            return;
        }
        self.stats.failed += 1;
        if self.is_control_of(peer, generation) {
            // The next acknowledgement replaces a lost one. But a rail that loses messages must not
            // be used for this peer again.
            let id = RailId(rail as u8);
            self.rail_failed(peer.0, rail, Fault::Rail(id, error), PeerError::Rail(id));
        }
    }

    /// Returns whether a post belongs to this peer, not to an earlier peer of this slot.
    fn is_control_of(&self, peer: Peer, generation: u16) -> bool {
        let slot = self.peers.get(peer.0 as usize);
        slot.is_some_and(|slot| slot.generation & GENERATION_MASK == generation)
    }

    #[cold]
    pub(super) fn quarantine(&mut self, peer: u16, violation: Violation) {
        if (peer as usize) < self.peers.len() {
            self.fail_peer(peer, PeerError::Protocol(violation));
        }
    }
}

impl<const RAILS: usize> Sink for Reports<'_, '_, RAILS> {
    #[inline]
    fn done(&mut self, cx: u64, result: Result<(), CompleteError>) {
        let PostTag { owner, bytes } = PostTag::unpack(cx);
        if self.state.loads.ended(self.rail, 1, bytes as u64, result.is_ok()) {
            self.state.limit_single();
        }
        match (owner, result) {
            (Owner::Op(index), result) => self.state.post_done(self.rail, index, result),
            (Owner::Stream(stream, _), result) => {
                let tag = cx - bytes as u64;
                match result {
                    Ok(()) => self.state.silent_posts_done(stream, tag, 1),
                    Err(error) => self.state.silent_post_failed(self.rail, stream, tag, error),
                }
            }
            (Owner::Control(..), Ok(())) => {}
            (Owner::Atomic(index), result) => self.state.atomic_done(self.rail, index, result),
            (Owner::Control(peer, generation), Err(error)) => {
                self.state.control_failed(self.rail, peer, generation, error);
            }
        }
    }

    #[cold]
    fn repeats(&mut self, cx: u64) -> bool {
        let PostTag { owner: Owner::Control(peer, generation), bytes } = PostTag::unpack(cx) else {
            return false;
        };
        let repeats = self.state.is_control_of(peer, generation) && self.state.loses_hello(peer.0);
        if repeats {
            self.state.stats.failed += 1;
            if self.state.loads.ended(self.rail, 1, bytes as u64, false) {
                self.state.limit_single();
            }
        }
        repeats
    }

    #[inline]
    fn done_alike(&mut self, cx: u64, count: u32) {
        let PostTag { owner, bytes } = PostTag::unpack(cx);
        let Owner::Stream(stream, _) = owner else {
            // Pieces of a long transfer are rare enough to handle one by one.
            return (0..count).for_each(|_| self.done(cx, Ok(())));
        };
        if self.state.loads.ended(self.rail, count, bytes as u64, true) {
            self.state.limit_single();
        }
        self.state.silent_posts_done(stream, cx - bytes as u64, count);
    }

    #[inline]
    fn landed(&mut self, peer: Peer, data: u32) {
        if self.state.write_in_order(peer, data) {
            return;
        }
        if let Err(violation) = self.state.write_landed(peer, data) {
            self.state.quarantine(peer.0, violation);
        }
    }

    #[inline(always)]
    fn message(&mut self, peer: Peer, bytes: Untrusted<'_>) {
        // Only dispatches: each branch copies the header out and checks the kind itself.
        match bytes.first() >= FIRST_KIND {
            true => self.state.tagged_arrived(peer, bytes),
            false => self.state.untagged_arrived(peer, bytes),
        }
    }

    #[cold]
    fn peer_down(&mut self, peer: Peer, why: PeerError) {
        if (peer.0 as usize) >= self.state.peers.len() {
            return;
        }
        match why {
            // These errors concern the peer itself, whichever rail reports them.
            PeerError::Died | PeerError::Closed | PeerError::Protocol(_) => {
                self.state.fail_peer(peer.0, why)
            }
            _ => self.state.rail_failed(peer.0, self.rail, Fault::Peer(why), why),
        }
    }

    #[cold]
    fn silent(&mut self, peer: Peer, overdue: bool) -> bool {
        self.state.is_lost_in_silence(peer.0, self.rail, overdue)
    }

    #[cold]
    fn peer_up(&mut self, peer: Peer) {
        self.state.may_return(peer.0, 1 << self.rail);
    }

    #[cold]
    fn called(&mut self) {
        self.state.called = true;
    }
}
