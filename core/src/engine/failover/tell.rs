//! Fences failed rails, and exchanges with the peer which numbers have arrived. Bounded: work that
//! finds no room continues in the next pass.

use crate::error::{CompleteError, PeerError, Violation};
use crate::mem::{Peer, RailId, Untrusted};
use crate::op::Fault;
use crate::rail::{Fence, Posted, Rail};
use crate::sync::seq::{Seq, expand, truncate};

use super::super::joint::RAILS_MAX;
use super::super::post::Blocked;
use super::super::post_tag::{Owner, PostTag};
use super::super::wire::{Body, NO_TOKEN};
use super::super::{Engine, State};
use super::sent::{Carried, Sent};
use super::told::WORDS;
use super::{AGAIN, Failover, FailoverPeer, LOOK, RARELY, Told, nth};

/// Time, in nanoseconds or passes, that a fence waits for the rails of other peers before the fence
/// counts as impossible.
const PATIENCE: [u64; 2] = [1_000_000_000, 1 << 20];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Cost {
    /// Other rails lead to that peer.
    Nothing,
    /// The rail is that peer's last rail, but another rail may return, or the peer may be dead.
    Wait,
    /// The rail is that peer's last rail.
    Peer,
}

impl FailoverPeer {
    /// Whether a failed rail is not fenced yet, or the peer has not confirmed the report of a
    /// fenced rail. Then reports to it are repeated.
    pub(super) fn is_unconfirmed(&self) -> bool {
        self.suspect | self.fencing | self.fenced & !self.confirmed != 0
    }
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    pub(super) fn fence_rails(&mut self, peer: u16) {
        self.state.count_time();
        self.answer_leave(peer);
        self.ask_for_spares(peer);
        self.ask_on(peer);
        let Some(kept) = self.state.kept_peer(peer) else { return };
        let mut fencing = kept.fencing;
        while fencing != 0 {
            let rail = fencing.trailing_zeros() as usize;
            fencing &= fencing - 1;
            let fence = self.fence_rail(peer, rail);
            let Some(kept) = self.state.kept_peer_mut(peer) else { return };
            match fence {
                Fence::Fenced => {
                    let new = kept.fenced >> rail & 1 == 0;
                    kept.fencing &= !(1 << rail);
                    kept.fenced |= 1 << rail;
                    kept.waits[rail] = 0;
                    kept.tell_anew();
                    if let Some(counts) = self.state.counts(rail).filter(|_| new) {
                        counts.fenced += 1;
                    }
                }
                Fence::Pending => {}
                Fence::Unknown => {
                    self.state.fail_peer(peer, PeerError::Rail(RailId(rail as u8)));
                    return;
                }
            }
        }
    }

    /// If the fence closes the endpoint, asks the other peers to leave the rail first.
    fn fence_rail(&mut self, peer: u16, rail: usize) -> Fence {
        let bit = 1 << rail;
        let id = Peer(peer);
        // Fencing a fenced peer again does not affect other peers.
        let all = self.rails[rail].fences_all() && !self.rails[rail].is_fenced(id);
        let needed = self.state.needs_fence(peer, rail);
        let patient = !self
            .state
            .kept_peer(peer)
            .is_some_and(|kept| self.state.is_over(kept.waits[rail], PATIENCE));
        let time = self.state.failover.as_ref().map_or(0, |failover| failover.time);
        let Some(kept) = self.state.kept_peer_mut(peer) else { return Fence::Pending };
        if all && kept.allowed & bit != 0 {
            if patient {
                kept.waits[rail] = match (needed, kept.waits[rail]) {
                    (false, _) => 0,
                    (true, 0) => time,
                    (true, since) => since,
                };
                let left = kept.left & bit != 0;
                let fence = if left { self.rails[rail].fence_left(id) } else { Fence::Pending };
                if fence != Fence::Unknown {
                    return fence;
                }
            }
            (kept.allowed, kept.waits[rail]) = (kept.allowed & !bit, 0);
        }
        if all && kept.leaving & bit == 0 {
            // The fence may have to wait. Mute the rail, so that a late arrival is not taken for a
            // new one.
            self.rails[rail].mute(id);
        }
        let leaving = kept.leaving & bit != 0;
        match if all { self.state.cost_of_fence(peer, rail) } else { Cost::Nothing } {
            Cost::Nothing if !all => return self.rails[rail].fence(id),
            Cost::Nothing if !self.may_close(peer, rail) => return Fence::Pending,
            Cost::Nothing => {}
            Cost::Wait | Cost::Peer if leaving => {
                // No data to this peer is lost, so the fence waits without limit.
                self.state.closing_waits(rail);
                return Fence::Pending;
            }
            Cost::Wait if patient => {
                self.state.closing_waits(rail);
                if let Some(kept) = self.state.kept_peer_mut(peer)
                    && kept.waits[rail] == 0
                {
                    kept.waits[rail] = time;
                }
                return Fence::Pending;
            }
            Cost::Wait | Cost::Peer => return Fence::Unknown,
        }
        let fence = self.rails[rail].fence(id);
        if fence == Fence::Fenced {
            self.state.closed(rail);
            self.state.all_fenced(peer, rail);
        }
        fence
    }

    /// Updates the state of failover after the rails have checked which peers are alive. Forgets
    /// endpoints that no longer need to be closed, looks for streams that are held up, and advances
    /// the time if the rails have no clock.
    pub(in super::super) fn rails_checked(&mut self) {
        self.state.closings_looked();
        self.state.look_at_held();
        if self.state.loads.untimed() == 1
            && let Some(failover) = &mut self.state.failover
        {
            failover.time += LOOK[1];
        }
    }

    pub(super) fn tell_fenced(&mut self, peer: u16) {
        let Some(kept) = self.state.kept_peer_mut(peer) else { return };
        if kept.telling.is_none() && kept.is_unconfirmed() {
            kept.wait = kept.wait.saturating_sub(1);
            if kept.wait == 0 {
                kept.told = kept.told.saturating_add(1);
                (kept.telling, kept.wait) = (Some((0, None)), AGAIN << kept.told.min(RARELY));
            }
        }
        let turn = self.state.turn_to_tell(peer);
        for _ in 0..self.state.config.batch {
            let Some((context, from)) = self.state.kept_peer(peer).and_then(|kept| kept.telling)
            else {
                return;
            };
            let stream = self.state.stream_of(context as u8, peer);
            let (told, next) = self.state.told(stream, from);
            let owner = self.state.control(peer);
            let cursor = self.state.streams[stream as usize].window.expected();
            let (bytes, nothing) = (&told.encode()[..], Untrusted::from_slice(&[]));
            let posted = match turn {
                Some(rail) if self.post_on(rail, stream, peer, bytes, owner, cursor) => {
                    Ok(Posted::Done)
                }
                _ => self.post_bytes(stream, peer, bytes, nothing, owner, cursor),
            };
            match posted {
                Ok(_) => {}
                Err(Blocked::Refused(rail, _)) => {
                    self.state.fail_peer(peer, PeerError::Rail(rail));
                    return;
                }
                Err(_) => return,
            }
            self.state.credits_told(stream);
            let contexts = self.state.config.contexts;
            let Some(kept) = self.state.kept_peer_mut(peer) else { return };
            kept.telling = match next {
                None if context + 1 < contexts => Some((context + 1, None)),
                None => None,
                from => Some((context, from)),
            };
        }
    }

    /// Posts a message on this rail. Returns `false` if the caller should try another rail.
    pub(super) fn post_on(
        &mut self,
        rail: usize,
        stream: u32,
        peer: u16,
        bytes: &[u8],
        owner: Owner,
        cursor: Seq,
    ) -> bool {
        let (len, nothing) = (bytes.len() as u32, Untrusted::from_slice(&[]));
        let tag = PostTag { owner, bytes: len }.pack();
        match self.rails[rail].post_message(Peer(peer), bytes, nothing, tag) {
            Ok(Posted::Pending) => self.state.loads.posted(rail, u64::from(len)),
            Ok(Posted::Done) => {}
            Err(_) => return false,
        }
        let s = &mut self.state.streams[stream as usize];
        (s.ack_sent, s.age) = (cursor, 0);
        true
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    /// Returns the highest cost to another peer if all peers of a rail are fenced.
    fn cost_of_fence(&self, peer: u16, rail: usize) -> Cost {
        let others = (0..self.peers.len() as u16).filter(|&other| other != peer);
        let cost = |other: u16| {
            let (state, rails) = (self.peers[other as usize].state, self.open_rails(other));
            // Nothing is in flight to a peer that has not answered.
            if !state.is_up() || self.is_meeting(other) || rails >> rail & 1 == 0 {
                return Cost::Nothing;
            }
            let Some(kept) = self.kept_peer(other) else { return Cost::Peer };
            // The peer may have left these rails, but has not reported it.
            let sure = rails & kept.spare.sure;
            match kept.joined & !rails & !kept.disabled {
                _ if rails & !sure & !(1 << rail) != 0 => Cost::Nothing,
                0 if sure == 0 => Cost::Peer,
                _ => Cost::Wait,
            }
        };
        others.map(cost).max().unwrap_or(Cost::Nothing)
    }

    /// Fails the rail for all other peers, because fencing one peer has cut off all of them. The
    /// rail reports this later, but the next fence must already take it into account.
    fn all_fenced(&mut self, peer: u16, rail: usize) {
        let id = RailId(rail as u8);
        for other in (0..self.peers.len() as u16).filter(|&other| other != peer) {
            let (state, rails) = (self.peers[other as usize].state, self.open_rails(other));
            if state.is_up() && rails >> rail & 1 != 0 {
                let why = Fault::Rail(id, CompleteError::PeerDown);
                self.rail_failed(other, rail, why, PeerError::Rail(id));
            }
        }
    }

    /// Builds the report about a stream. The report begins at the number `from`, or at the cursor
    /// if `from` is `None`. Also returns the number at which the next report continues.
    fn told(&mut self, stream: u32, from: Option<Seq>) -> (Told, Option<Seq>) {
        let freed = self.returned(stream);
        let s = &self.streams[stream as usize];
        let (context, word, peer) = (s.context, s.stamp, s.peer);
        let (mut rails, mut failed, mut left, mut asks, mut epochs) =
            (0, 0, 0, false, [0; RAILS_MAX]);
        if let Some(kept) = self.kept_peer(peer) {
            (rails, failed) = (kept.fenced, kept.suspect | kept.fencing);
            left = rails & kept.leaving | failed & kept.allowed;
            (asks, epochs) = (kept.fenced & !kept.confirmed != 0, kept.back.epochs());
        }
        let heard = self.heard(peer);
        let (size, mask) = (self.config.window as u64, self.mask);
        let (window, mut cells) = self.window(stream);
        let (expected, stamp) = (window.expected(), window.stamp());
        let from = from.unwrap_or(expected);
        // No number beyond this number can have arrived.
        let end = expected.plus(size);
        let rest = if from.is_before(end) { end.since(from) } else { 0 };
        let count = rest.div_ceil(64).min(WORDS as u64);
        let mut words = [0; WORDS];
        for n in 0..(64 * count).min(rest) {
            let seq = from.plus(n);
            let seen = window.seen(stamp | seq.low(mask), &mut cells);
            words[(n / 64) as usize] |= u64::from(seen == Ok(true)) << (n % 64);
        }
        let last = 64 * count >= rest;
        let ack = truncate::<32>(expected.0);
        let told = Told {
            context,
            last,
            asks,
            word,
            ack,
            freed,
            from,
            rails,
            heard,
            failed,
            left,
            epochs,
            words,
        };
        (told, (!last).then(|| from.plus(64 * count)))
    }

    /// Returns the rails with a complete report of the peer: it covers all streams, and every
    /// number in flight on these rails.
    pub(super) fn heard(&self, peer: u16) -> u16 {
        let Some(failover) = &self.failover else { return 0 };
        let mut heard = self.joined_rails(peer);
        for context in 0..self.config.contexts {
            let stream = self.stream_of(context as u8, peer) as usize;
            heard &= failover.streams[stream].told;
            let s = &self.streams[stream];
            if heard == 0 || !s.live {
                continue;
            }
            let sent = &failover.sent[stream * failover.window as usize..];
            for n in 0..s.in_flight() {
                let at = s.acked.plus(n).0 as usize & (failover.window as usize - 1);
                if let Carried::By(rail) = sent[at].carried {
                    heard &= !(1 << rail);
                }
            }
        }
        heard
    }

    /// Each repetition of a report uses another rail, because any rail may have failed unnoticed.
    /// Returns `None` for the first report, which may use any rail.
    fn turn_to_tell(&self, peer: u16) -> Option<usize> {
        let kept = self.kept_peer(peer).filter(|kept| kept.told != 0)?;
        nth(self.peers[peer as usize].rails, kept.told.into())
    }

    /// Translates a bitmask of the peer's rails into ours. Drops the rails with an epoch in the
    /// message that is not current here. A peer may end an epoch that has not begun here.
    fn of_this_epoch(&mut self, peer: u16, told: &Told, theirs: u16) -> Result<u16, Violation> {
        let joined = self.joined_rails(peer);
        let pairing = &self.pairings[peer as usize];
        let (mut rails, mut epochs) = (pairing.as_ours(theirs) & joined, [0; RAILS_MAX]);
        for (rail, epoch) in epochs.iter_mut().enumerate() {
            *epoch = told.epochs[pairing.theirs(rail)];
        }
        let mut stale = false;
        for (rail, &epoch) in epochs.iter().enumerate() {
            let bit = 1 << rail;
            if rails & bit == 0 {
                continue;
            }
            let Some(kept) = self.kept_peer_mut(peer) else { return Ok(0) };
            match epoch.wrapping_sub(kept.back.epoch(rail)).cast_signed() {
                0 => {}
                1 if kept.back.may_have_begun(bit) && kept.fenced & bit != 0 => {
                    self.begin_epoch(peer, rail)
                }
                1.. => return Err(Violation::Sequence),
                _ => {
                    rails &= !bit;
                    stale = true;
                }
            }
        }
        self.stats.stale += u64::from(stale);
        Ok(rails)
    }

    pub(super) fn peer_fences(&mut self, peer: u16, rail: usize) {
        let (id, bit) = (RailId(rail as u8), 1 << rail);
        let why = Fault::Rail(id, CompleteError::PeerDown);
        if !self.has_failed(peer, bit) {
            self.rail_failed(peer, rail, why, PeerError::Rail(id));
        }
        let Some(kept) = self.kept_peer_mut(peer) else { return };
        // The peer is alive, so fence the rail now.
        kept.fencing |= kept.suspect & bit;
        kept.suspect &= !bit;
    }

    #[cold]
    pub(in super::super) fn told_arrived(
        &mut self,
        peer: Peer,
        told: &Told,
    ) -> Result<(), Violation> {
        let Some(stream) = self.arrival_stream(peer, told.context, told.word)? else {
            return Ok(());
        };
        if self.kept_peer(peer.0).is_none() {
            return Err(Violation::Kind);
        }
        let cursor = Seq(expand::<32>(told.ack, self.streams[stream as usize].acked.0));
        self.credits_freed(stream, told.freed)?;
        self.acknowledged(stream, told.ack)?;
        let failed = self.of_this_epoch(peer.0, told, told.rails | told.failed)?;
        let pairing = &self.pairings[peer.0 as usize];
        let (ours, asked) =
            (pairing.as_ours(told.rails) & failed, pairing.as_ours(told.failed) & failed);
        let left = pairing.as_ours(told.left) & failed;
        let leaving = left & asked & self.open_rails(peer.0);
        for rail in (0..RAILS).filter(|rail| failed >> rail & 1 != 0) {
            self.peer_fences(peer.0, rail);
        }
        let confirmed = self.of_this_epoch(peer.0, told, told.heard)?;
        if let Some(kept) = self.kept_peer_mut(peer.0) {
            kept.confirmed |= confirmed & kept.fenced;
            // If the peer has closed its endpoint first, data that it sent on the rail may arrive
            // late.
            kept.leaving = kept.leaving & (kept.fenced | !ours | left) | leaving;
            kept.left |= left & ours;
            kept.allowed = kept.allowed & !ours | left & ours;
            let asked = kept.fenced & asked != 0 || told.asks && kept.fenced != 0;
            if asked && kept.telling.is_none() {
                kept.telling = Some((0, None));
            }
        }
        self.ask(self.stream_of(0, peer.0));
        let s = &self.streams[stream as usize];
        if !s.live {
            return Ok(());
        }
        let (acked, count) = (s.acked, s.in_flight());
        let State { failover, pending, .. } = self;
        let Some(failover) = failover else { return Ok(()) };
        let resuming = failover.streams[stream as usize];
        let news = ours & !resuming.told != 0;
        let mut lost = false;
        for n in 0..count {
            let seq = acked.plus(n);
            let slot = failover.at(stream, seq);
            if let Carried::By(rail) = slot.carried {
                match told.says(seq, cursor) {
                    // A rail that is left is drained once all its numbers have arrived, even if the
                    // peer's cursor waits for the fence of another rail.
                    Some(true) => slot.carried = Carried::Arrived,
                    Some(false) if ours >> rail & 1 != 0 => slot.carried = Carried::Lost(rail),
                    _ => {}
                }
            }
            // The failed rail may have carried the reply, even if another rail carried the atomic.
            if news
                && let Sent::Message { op, body: Body::Amo { token, .. }, .. } = slot.what
                && token != NO_TOKEN
                && pending.slots[op as usize].fetch
            {
                slot.ask = true;
            }
            lost |= matches!(slot.carried, Carried::Lost(_)) || slot.ask;
        }
        let Failover { streams, .. } = failover;
        let resuming = &mut streams[stream as usize];
        (resuming.told, resuming.lost) = (resuming.told | ours, resuming.lost | lost);
        self.ask(stream);
        self.note_resumed(peer.0);
        Ok(())
    }
}
