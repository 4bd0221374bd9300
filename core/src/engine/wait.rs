//! The blocking calls: quiet, waiting for an operation, and waiting for a signal. Each makes
//! progress while it waits, and spins and then parks according to its [`Waiter`]. At its deadline
//! it returns a diagnosis.

mod waiter;

use core::hint;

use crate::error::{Awaited, OpError, PeerError, Stuck, WaitError};
use crate::mem::{LocalAddr, PeerId, RailId};
use crate::op::{Cmp, Completion, Token, look_at_signal};
use crate::rail::Rail;
use crate::sync::event::Park;
use crate::sync::host::Host;
use crate::sync::primitive::{AtomicU64, edge_fence};

use super::list::NONE;
use super::pending::State as Stage;
use super::table::{PeerSlot, PeerState, resolve_local};
use super::{ContextId, Engine};

pub use waiter::{Asleep, Waiter};
pub(crate) use waiter::{Drive, Noted, Pulse, block};

const QUICK_LOOKS: u32 = 256;

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    pub(super) fn block<H: Host, P: Park, T>(
        &mut self,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
        mut ready: impl FnMut(&mut Self) -> Option<T>,
    ) -> Option<T> {
        let ready = |e: &mut Self| match ready(e) {
            None => e.state.called.then_some(None),
            found => Some(found),
        };
        block(self, waiter, deadline_ns, ready).flatten()
    }

    /// Waits until the peer has applied everything that this context has sent to it. Also waits
    /// until everything that this context has requested from the peer has arrived.
    ///
    /// If nothing is outstanding, the call takes a few loads. `deadline_ns` is in the clock of
    /// [`Host::now_ns`]; `u64::MAX` means no deadline.
    ///
    /// # Errors
    /// - [`WaitError::Deadline`]: the error says what is missing; the operations stay in flight.
    /// - [`WaitError::PeerFailed`]: the peer has failed.
    /// - [`WaitError::Failed`]: silent operations have failed since the last quiet.
    #[doc(alias = "shmem_quiet")]
    #[inline]
    pub fn quiet<H: Host, P: Park>(
        &mut self,
        context: ContextId,
        peer: PeerId,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<(), WaitError> {
        let state = &mut self.state;
        if state.open == 0
            && !state.direct
            && state.troubles == 0
            && (context.0 as u16) < state.config.contexts
            && matches!(state.peers.get(peer.index as usize), Some(slot)
                if slot.generation == peer.generation && slot.state == PeerState::Connected)
        {
            return Ok(());
        }
        self.quiet_slow(context, peer, waiter, deadline_ns)
    }

    /// Waits like [`quiet`](Self::quiet), for every peer.
    ///
    /// # Errors
    /// The errors of `quiet`, for the first peer with an error; other peers may not be quiet then.
    /// A failed peer is reported only while it has lost operations that no quiet has reported. So a
    /// second call continues with the other peers.
    #[doc(alias = "shmem_ctx_quiet")]
    #[inline]
    pub fn quiet_all<H: Host, P: Park>(
        &mut self,
        context: ContextId,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<(), WaitError> {
        if context.0 as u16 >= self.state.config.contexts {
            return Err(OpError::UnknownContext.into());
        }
        self.settle();
        if self.state.open == 0 && self.state.troubles == 0 {
            return Ok(());
        }
        for peer in 0..self.state.peers.len() as u16 {
            let stream = self.state.stream_of(context.0, peer);
            match self.state.peers[peer as usize].state {
                state if state.is_up() => self.quiet_stream(stream, waiter, deadline_ns)?,
                PeerState::Failed(_) if self.state.streams[stream as usize].lost != 0 => {
                    self.verdict(stream)?
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns whether [`quiet`](Self::quiet) would return at once, with or without an error.
    /// Requests missing acknowledgements. Does not make progress.
    pub fn is_quiet(&mut self, context: ContextId, peer: PeerId) -> Result<bool, OpError> {
        let stream = self.known_stream(context, peer)?;
        let quiet = self.state.streams[stream as usize].open == 0;
        if quiet {
            self.settle();
        } else {
            self.state.ask(stream);
        }
        Ok(quiet)
    }

    /// Makes direct writes into mapped memory visible to all threads.
    #[inline(always)]
    pub(super) fn settle(&mut self) {
        if self.state.direct {
            self.state.direct = false;
            // SeqCst: stores into mapped memory of peers may still be in this processor's store
            // buffer. Everything that this thread reads or sends after quiet, by any path, must
            // come after these stores.
            edge_fence!("engine.quiet", SeqCst);
        }
    }

    fn known_stream(&self, context: ContextId, peer: PeerId) -> Result<u32, OpError> {
        if context.0 as u16 >= self.state.config.contexts {
            return Err(OpError::UnknownContext);
        }
        match self.state.peers.get(peer.index as usize) {
            Some(slot)
                if slot.generation == peer.generation
                    && !matches!(slot.state, PeerState::Free | PeerState::Reserved) =>
            {
                Ok(self.state.stream_of(context.0, peer.index))
            }
            _ => Err(OpError::UnknownPeer),
        }
    }

    #[inline(never)]
    fn quiet_slow<H: Host, P: Park>(
        &mut self,
        context: ContextId,
        peer: PeerId,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<(), WaitError> {
        let stream = self.known_stream(context, peer)?;
        self.settle();
        self.quiet_stream(stream, waiter, deadline_ns)
    }

    fn quiet_stream<H: Host, P: Park>(
        &mut self,
        stream: u32,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<(), WaitError> {
        if self.state.streams[stream as usize].open != 0 {
            self.state.ask(stream);
            let quiet = self.block(waiter, deadline_ns, |e| {
                (e.state.streams[stream as usize].open == 0).then_some(())
            });
            if quiet.is_none() {
                return Err(WaitError::Deadline(self.stuck(stream)));
            }
        }
        self.verdict(stream)
    }

    fn verdict(&mut self, stream: u32) -> Result<(), WaitError> {
        let lost = self.state.take_lost(stream);
        let peer = self.state.streams[stream as usize].peer;
        match self.state.peers[peer as usize].state {
            PeerState::Failed(why) => Err(WaitError::PeerFailed(self.state.peer_id(peer), why)),
            _ if lost != 0 => Err(WaitError::Failed(lost)),
            _ => Ok(()),
        }
    }

    /// Waits until an operation has completed, and takes its completion.
    ///
    /// # Errors
    /// [`WaitError::Deadline`] if the operation is still in flight. [`OpError::StaleToken`] if the
    /// completion was taken before.
    pub fn wait<H: Host, P: Park>(
        &mut self,
        token: Token,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<Completion, WaitError> {
        if let Some(completion) = self.test(token)? {
            return Ok(completion);
        }
        let index = self.state.pending.find(token)?;
        let stream = self.state.pending.slots[index as usize].stream;
        if stream != NONE {
            self.state.ask(stream);
        }
        let done = self.block(waiter, deadline_ns, |e| {
            (e.state.pending.slots[index as usize].state == Stage::Ended).then_some(())
        });
        match done {
            Some(()) => self.test(token)?.ok_or(WaitError::Op(OpError::StaleToken)),
            None => Err(WaitError::Deadline(if stream == NONE {
                Stuck::default()
            } else {
                self.stuck(stream)
            })),
        }
    }

    /// Waits until the 64-bit word at `at` satisfies the comparison, and returns the word.
    /// Everything sent before the signal that satisfied the comparison is then visible.
    ///
    /// `from` is the peer that signals, if known: the wait ends when that peer fails.
    ///
    /// # Errors
    /// [`WaitError::Deadline`] names the peer, the rail if only one leads to the peer, and the
    /// first number missing here.
    #[doc(alias = "shmem_signal_wait_until")]
    #[inline]
    pub fn wait_signal<H: Host, P: Park>(
        &mut self,
        at: LocalAddr,
        cmp: Cmp,
        value: u64,
        from: Option<PeerId>,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<u64, WaitError> {
        let word = self.signal_word(at)?;
        for _ in 0..QUICK_LOOKS {
            let now = look_at_signal(word);
            if cmp.holds(now, value) {
                return Ok(now);
            }
            hint::spin_loop();
        }
        self.wait_signal_slow(at, cmp, value, from, waiter, deadline_ns)
    }

    #[cold]
    fn wait_signal_slow<H: Host, P: Park>(
        &mut self,
        at: LocalAddr,
        cmp: Cmp,
        value: u64,
        from: Option<PeerId>,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<u64, WaitError> {
        self.state.doubts.signals = from;
        let found = self.block(waiter, deadline_ns, |e| e.look(at, cmp, value, from).transpose());
        if let Some(peer) = self.state.doubts.signals.take() {
            self.state.awaits(peer);
        }
        found.unwrap_or_else(|| Err(WaitError::Deadline(self.missing(from))))
    }

    /// Diagnoses what has not arrived from a peer, or from any peer. Returns the first missing
    /// number, preferably one with later arrivals, and the rail if only one reaches the peer.
    pub fn missing(&self, from: Option<PeerId>) -> Stuck {
        let state = &self.state;
        let open = |slot: &PeerSlot| slot.state.is_up();
        // If only one peer is connected, it must be the peer that signals.
        let only = || {
            let mut all = (0..state.peers.len()).filter(|&peer| open(&state.peers[peer]));
            all.next().filter(|_| all.next().is_none()).map(|peer| state.peer_id(peer as u16))
        };
        let hole = state.first_hole(from);
        let Some(peer) = hole.map(|(peer, _)| state.peer_id(peer)).or(from).or_else(only) else {
            return Stuck { awaits: Awaited::Signal, ..Stuck::default() };
        };
        let known =
            state.peers.get(peer.index as usize).filter(|slot| slot.generation == peer.generation);
        let rails = known.map_or(0, |slot| slot.rails);
        let next = || {
            let stream = state.streams.iter().find(|s| s.live && s.peer == peer.index);
            stream.filter(|_| known.is_some()).map(|s| s.window.expected())
        };
        Stuck {
            awaits: Awaited::Signal,
            peer: Some(peer),
            rail: (rails.count_ones() == 1).then(|| RailId(rails.trailing_zeros() as u8)),
            hole: hole.map(|(_, seq)| seq).or_else(next).map(|seq| seq.0),
            unanswered: state.is_unanswered(peer.index),
        }
    }

    pub(super) fn look(
        &self,
        at: LocalAddr,
        cmp: Cmp,
        value: u64,
        from: Option<PeerId>,
    ) -> Result<Option<u64>, WaitError> {
        self.judge(look_at_signal(self.signal_word(at)?), cmp, value, from)
    }

    /// Returns the word if the comparison holds, or an error if it can never hold.
    pub(super) fn judge(
        &self,
        word: u64,
        cmp: Cmp,
        value: u64,
        from: Option<PeerId>,
    ) -> Result<Option<u64>, WaitError> {
        match (cmp.holds(word, value), self.lost_peer(from)) {
            (true, _) => Ok(Some(word)),
            (false, None) => Ok(None),
            (false, Some(error)) => Err(error),
        }
    }

    #[inline(always)]
    fn signal_word(&self, at: LocalAddr) -> Result<&AtomicU64, OpError> {
        if at.offset & 7 != 0 {
            return Err(OpError::Misaligned { offset: at.offset, width: 8 });
        }
        let word = resolve_local(self.state.locals, at, 8)?;
        // SAFETY: `resolve_local` checked that the word is inside a region, which stays registered
        // while `self` is borrowed. The word is aligned, because regions begin at a multiple of 8
        // bytes, and the offset was checked to be a multiple of 8. Signal words are only accessed
        // atomically.
        Ok(unsafe { word.cast::<AtomicU64>().as_ref() })
    }

    /// Returns an error if nothing more can arrive from a peer.
    fn lost_peer(&self, from: Option<PeerId>) -> Option<WaitError> {
        let from = from?;
        match self.state.peers.get(from.index as usize) {
            Some(slot) if slot.generation == from.generation => match slot.state {
                // Apply messages that have arrived before reporting the failure.
                PeerState::Failed(_) | PeerState::Closing if self.state.has_parked(from.index) => {
                    None
                }
                PeerState::Failed(why) => Some(WaitError::PeerFailed(from, why)),
                PeerState::Closing if self.state.has_said_bye(from.index) => {
                    Some(WaitError::PeerFailed(from, PeerError::Closed))
                }
                PeerState::Connected
                | PeerState::Meeting
                | PeerState::Closing
                | PeerState::Reserved => None,
                PeerState::Free => Some(OpError::UnknownPeer.into()),
            },
            _ => Some(OpError::UnknownPeer.into()),
        }
    }

    /// Checks once whether a stream is quiet. Returns `false` while operations are in flight,
    /// otherwise their result.
    pub(super) fn try_quiet(
        &mut self,
        context: ContextId,
        peer: PeerId,
    ) -> Result<bool, WaitError> {
        match self.is_quiet(context, peer)? {
            true => self.verdict(self.state.stream_of(context.0, peer.index)).map(|()| true),
            false => Ok(false),
        }
    }

    /// Returns whether work is left that no event announces, so that an idle thread must keep
    /// making progress.
    pub fn has_due(&self) -> bool {
        self.state.due.len != 0 || self.state.has_chores()
    }

    fn stuck(&self, stream: u32) -> Stuck {
        let s = &self.state.streams[stream as usize];
        // The load of a rail counts the posts to all peers. Blame the first rail to this peer that
        // has posts outstanding.
        let slots = &self.state.pending.slots;
        let list = |head| {
            core::iter::successors(slots.get(head as usize), |slot| {
                slots.get(slot.links.next as usize)
            })
        };
        let posted = s.silent_posts != 0
            || list(s.ops.head).chain(list(s.closing.head)).any(|slot| slot.posts != 0);
        let rails = if posted { self.state.peers[s.peer as usize].rails } else { 0 };
        let rail =
            (0..self.rails.len()).find(|&i| rails & (1 << i) != 0 && self.state.loads.has_posts(i));
        Stuck {
            awaits: Awaited::Completion,
            peer: Some(self.state.peer_id(s.peer)),
            rail: rail.map(|rail| RailId(rail as u8)),
            hole: (s.live && s.in_flight() != 0).then_some(s.acked.0),
            unanswered: self.state.is_unanswered(s.peer),
        }
    }
}

impl<const RAILS: usize> super::State<'_, RAILS> {
    #[cold]
    fn has_parked(&self, peer: u16) -> bool {
        (0..self.config.contexts).any(|context| {
            let stream = &self.streams[self.stream_of(context as u8, peer) as usize];
            stream.due && stream.window.held() != 0
        })
    }

    /// Returns whether this side waits for something from a peer.
    #[cold]
    pub(super) fn waits_for(&self, peer: u16) -> bool {
        match self.peers[peer as usize].state {
            PeerState::Closing => true,
            PeerState::Connected | PeerState::Meeting => {
                let mut contexts = 0..self.config.contexts;
                self.pairings[peer as usize].doubt.awaited
                    || contexts.any(|context| {
                        self.streams[self.stream_of(context as u8, peer) as usize].open != 0
                    })
            }
            _ => false,
        }
    }

    fn is_unanswered(&self, peer: u16) -> bool {
        (peer as usize) < self.peers.len() && self.is_meeting(peer)
    }

    pub(super) fn peer_id(&self, peer: u16) -> PeerId {
        PeerId { index: peer, generation: self.peers[peer as usize].generation }
    }
}
