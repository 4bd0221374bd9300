//! Brings a failed rail to a peer back into use.
//!
//! The return begins once each side has fenced the rail and knows that the other side has reported
//! everything about it. Then nothing of the old epoch is in flight. Messages about the stages
//! travel on the rails in use:
//!
//! 1. *Offer*: a side opens the rail again ([`Rail::reopen`]) and sends the address to the peer. It
//!    repeats the offer a few times. Then the offer lapses until the next [`Sink::peer_up`].
//! 2. *Attached*: a side that is ready attaches the address from the peer's offer
//!    ([`Rail::rejoin`]). This begins the next epoch. The side reports the stage.
//! 3. *Proven*: a side posts a probe on the rail itself once both sides are attached. A side that
//!    has received the peer's probe reports the stage.
//! 4. *In use*: a side uses the rail once both probes have arrived. It answers a peer that does not
//!    know this yet.
//!
//! If a rail fails before both sides use it, its epoch ends, because the other side may have begun
//! to use it. Nothing waits for a rail that returns: the other rails continue.

use crate::error::{PostError, Violation};
use crate::mem::{Peer, RailId, Untrusted};
use crate::op::Fault;
#[cfg(doc)]
use crate::rail::Sink;
use crate::rail::{Posted, REOPEN_MAX, Rail};

use super::super::joint::RAILS_MAX;
use super::super::post::Blocked;
use super::super::post_tag::PostTag;
use super::super::table::PeerState;
use super::super::{Engine, State};
use super::rejoin::{Rejoin, Stage};
use super::{AGAIN, PeerError, RARELY};

const OFFERS: u16 = 6;

#[derive(Clone, Copy, Debug)]
struct Turn {
    /// Number of times the rail was attached again.
    epoch: u16,
    /// The serial of the last message sent about the rail.
    said: u16,
    /// The serial of the last message received about the rail.
    heard: u16,
    /// A hash of the peer's address that was attached last.
    address: u32,
}

/// The returning rails to a peer. Bitmasks use our rail numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Back {
    /// Rails that may return. Set by the rail, by the user, or by the peer's offer.
    ready: u16,
    /// Rails offered to the peer. The peer may have begun their next epoch.
    offered: u16,
    attached: u16,
    /// Attached rails that the peer has attached too.
    welcome: u16,
    probed: u16,
    /// Attached rails on which the peer's probe has arrived.
    proven: u16,
    /// Attached rails on which the peer has received our probe.
    agreed: u16,
    /// Rails whose stage must be reported to the peer now.
    due: u16,
    repeated: u16,
    wait: u32,
    incoming: Option<Rejoin>,
    turns: [Turn; RAILS_MAX],
}

impl Back {
    pub(super) const NONE: Back = Back {
        ready: 0,
        offered: 0,
        attached: 0,
        welcome: 0,
        probed: 0,
        proven: 0,
        agreed: 0,
        due: 0,
        repeated: 0,
        wait: 0,
        incoming: None,
        turns: [Turn { epoch: 0, said: 0, heard: 0, address: 0 }; RAILS_MAX],
    };

    pub(super) fn epoch(&self, rail: usize) -> u16 {
        self.turns.get(rail).map_or(0, |turn| turn.epoch)
    }

    pub(super) fn epochs(&self) -> [u16; RAILS_MAX] {
        self.turns.map(|turn| turn.epoch)
    }

    pub(super) fn is_attached(&self, rail: u16) -> bool {
        self.attached & rail != 0
    }

    pub(super) fn may_have_begun(&self, rail: u16) -> bool {
        self.offered & rail != 0
    }

    /// Stops offering these rails.
    pub(super) fn rest(&mut self, rails: u16) {
        self.ready &= !rails;
        self.due &= !rails;
    }

    pub(super) fn stop(&mut self, rails: u16) {
        self.rest(rails);
        for set in [
            &mut self.offered,
            &mut self.attached,
            &mut self.welcome,
            &mut self.probed,
            &mut self.proven,
            &mut self.agreed,
        ] {
            *set &= !rails;
        }
    }

    fn say(&mut self, rails: u16) {
        self.due |= rails;
        (self.repeated, self.wait) = (0, AGAIN);
    }

    /// Makes the reports about `rails` due again when the wait is over. After [`OFFERS`]
    /// repetitions, stops offering the rails in `able`.
    fn repeat(&mut self, rails: u16, able: u16) {
        self.wait = self.wait.saturating_sub(1);
        if rails == 0 || self.wait != 0 {
            return;
        }
        self.repeated = self.repeated.saturating_add(1);
        self.wait = AGAIN << self.repeated.min(RARELY);
        self.due |= rails;
        if self.repeated > OFFERS {
            self.rest(able);
        }
    }
}

fn hash(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

fn each(mut rails: u16) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let rail = rails.trailing_zeros() as usize;
        rails &= rails.wrapping_sub(1);
        (rail < RAILS_MAX).then_some(rail)
    })
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    pub(super) fn rejoin_rails(&mut self, peer: u16) {
        if self.state.peers[peer as usize].state != PeerState::Connected {
            return;
        }
        self.attach_incoming(peer);
        let (able, in_use) = (self.state.able(peer), self.state.open_rails(peer));
        let Some(kept) = self.state.kept_peer_mut(peer) else { return };
        let back = &mut kept.back;
        back.repeat(able | back.attached, able);
        let (due, probes) = (
            back.due & (able | back.attached | in_use),
            back.attached & back.welcome & !back.probed,
        );
        for rail in each(due) {
            if !self.say_stage(peer, rail) {
                return;
            }
        }
        for rail in each(probes) {
            self.post_probe(peer, rail);
        }
    }

    fn attach_incoming(&mut self, peer: u16) {
        let able = self.state.able(peer);
        let Some(kept) = self.state.kept_peer_mut(peer) else { return };
        let Some(message) = kept.back.incoming.take() else { return };
        let (attached, joined) = (kept.back.attached, kept.joined);
        // Exactly one rail, because `rejoin_arrived` has checked it.
        let bit = self.state.pairings[peer as usize].as_ours(1 << message.rail) & joined;
        let rail = bit.trailing_zeros() as usize;
        let ahead = message.epoch.wrapping_sub(self.state.epoch_of(peer, rail));
        let again = ahead == 0 && attached & bit != 0;
        if !again && (ahead != 1 || able & bit == 0) {
            // The peer has offered the rail before this side is ready. This side offers it later.
            return;
        }
        let opened = self.rails[rail].reopen(Peer(peer), &mut [0; REOPEN_MAX]).is_some();
        let joined = opened && self.rails[rail].rejoin(Peer(peer), message.address()).is_ok();
        if !joined {
            if again {
                return self.state.lose_rail(peer, rail, Fault::Peer(PeerError::Lost));
            }
            if let Some(kept) = self.state.kept_peer_mut(peer) {
                kept.back.rest(bit);
            }
            return;
        }
        if !again {
            self.state.next_epoch(peer, rail);
        }
        let Some(kept) = self.state.kept_peer_mut(peer) else { return };
        kept.back.attached |= bit;
        kept.back.turns[rail].address = hash(message.address());
        if message.stage == Stage::Attached {
            kept.back.welcome |= bit;
        }
        kept.back.say(bit);
    }

    /// Reports to the peer the stage that a rail has reached here. Returns `false` if no rail has
    /// room, or if the peer has failed.
    fn say_stage(&mut self, peer: u16, rail: usize) -> bool {
        let bit = 1 << rail;
        let in_use = self.state.open_rails(peer) & bit != 0;
        let Some(kept) = self.state.kept_peer_mut(peer) else { return false };
        let back = &mut kept.back;
        let (mut epoch, mut stage) = (back.epoch(rail), Stage::Proven);
        if !in_use && back.attached & bit == 0 {
            (epoch, stage) = (epoch.wrapping_add(1), Stage::Offer);
        } else if !in_use && back.proven & bit == 0 {
            stage = Stage::Attached;
        }
        let (mut address, mut length) = ([0; REOPEN_MAX], 0);
        if stage != Stage::Proven {
            match self.rails[rail].reopen(Peer(peer), &mut address) {
                Some(len) => length = len.min(REOPEN_MAX) as u8,
                None => {
                    // The stage of an attached rail is reported at the next repetition.
                    back.due &= !bit;
                    back.ready &= !bit;
                    return true;
                }
            }
        }
        back.turns[rail].said = back.turns[rail].said.wrapping_add(1);
        let serial = back.turns[rail].said;
        let stream = self.state.stream_of(0, peer);
        let word = self.state.streams[stream as usize].stamp;
        let message =
            Rejoin { rail: rail as u8, stage, asks: !in_use, word, epoch, serial, length, address };
        // The message carries no cursor, so the acknowledged position does not change.
        let cursor = self.state.streams[stream as usize].ack_sent;
        let (owner, nothing) = (self.state.control(peer), Untrusted::from_slice(&[]));
        match self.post_bytes(stream, peer, &message.encode(), nothing, owner, cursor) {
            Ok(_) => {}
            Err(Blocked::Refused(rail, _)) => {
                self.state.fail_peer(peer, PeerError::Rail(rail));
                return false;
            }
            Err(_) => return false,
        }
        if let Some(kept) = self.state.kept_peer_mut(peer) {
            kept.back.due &= !bit;
            if stage == Stage::Offer {
                kept.back.offered |= bit;
            }
        }
        true
    }

    fn post_probe(&mut self, peer: u16, rail: usize) {
        let epoch = self.state.epoch_of(peer, rail);
        let word = self.state.streams[self.state.stream_of(0, peer) as usize].stamp;
        let (stage, address) = (Stage::Probe, [0; REOPEN_MAX]);
        let probe = Rejoin {
            rail: rail as u8,
            stage,
            asks: true,
            word,
            epoch,
            serial: 0,
            length: 0,
            address,
        }
        .encode();
        let (owner, nothing) = (self.state.control(peer), Untrusted::from_slice(&[]));
        let tag = PostTag { owner, bytes: probe.len() as u32 }.pack();
        match self.rails[rail].post_message(Peer(peer), &probe, nothing, tag) {
            Ok(posted) => {
                if posted == Posted::Pending {
                    self.state.loads.posted(rail, probe.len() as u64);
                }
                if let Some(kept) = self.state.kept_peer_mut(peer) {
                    kept.back.probed |= 1 << rail;
                }
            }
            Err(PostError::Again) => {}
            Err(error) => self.state.lose_rail(peer, rail, Fault::Post(RailId(rail as u8), error)),
        }
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    #[cold]
    pub(in super::super) fn may_return(&mut self, peer: u16, rails: u16) {
        let Some(kept) = self.kept_peer(peer) else { return };
        let in_use = self.peers[peer as usize].rails | kept.spare.rails;
        let Some(kept) = self.kept_peer_mut(peer) else { return };
        let back = &mut kept.back;
        let new = rails & kept.joined & !in_use & !kept.disabled & !back.attached & !back.ready;
        if new != 0 {
            back.ready |= new;
            back.say(new);
            self.ask(self.stream_of(0, peer));
        }
    }

    /// Returns the rails about which both sides have reported everything of the epoch that ended.
    fn able(&self, peer: u16) -> u16 {
        match self
            .kept_peer(peer)
            .map(|kept| kept.back.ready & kept.fenced & kept.confirmed & !kept.disabled)
        {
            None | Some(0) => 0,
            Some(able) => able & self.heard(peer),
        }
    }

    pub(super) fn is_returning(&self, peer: u16) -> bool {
        let (state, in_use) = (self.peers[peer as usize].state, self.open_rails(peer));
        // Nothing returns to a peer that is closing.
        state == PeerState::Connected
            && self.kept_peer(peer).is_some_and(|kept| {
                let able = kept.back.ready & kept.fenced & kept.confirmed & !kept.disabled;
                kept.back.incoming.is_some()
                    || able | kept.back.attached | kept.back.due & in_use != 0
            })
    }

    fn epoch_of(&self, peer: u16, rail: usize) -> u16 {
        self.kept_peer(peer).map_or(0, |kept| kept.back.epoch(rail))
    }

    fn next_epoch(&mut self, peer: u16, rail: usize) {
        let bit = 1 << rail;
        let Some(kept) = self.kept_peer_mut(peer) else { return };
        kept.fenced &= !bit;
        kept.confirmed &= !bit;
        kept.allowed &= !bit;
        kept.left &= !bit;
        kept.leaving &= !bit;
        kept.sure &= !bit;
        kept.back.stop(bit);
        kept.back.turns[rail].epoch = kept.back.turns[rail].epoch.wrapping_add(1);
        for context in 0..self.config.contexts {
            let stream = self.stream_of(context as u8, peer) as usize;
            if let Some(failover) = &mut self.failover {
                failover.streams[stream].told &= !bit;
            }
        }
    }

    /// Called if the rail has failed after the peer has begun the epoch.
    pub(super) fn begin_epoch(&mut self, peer: u16, rail: usize) {
        self.next_epoch(peer, rail);
        if let Some(kept) = self.kept_peer_mut(peer) {
            kept.suspect |= 1 << rail;
            kept.tell_anew();
        }
    }

    fn lose_rail(&mut self, peer: u16, rail: usize, why: Fault) {
        self.rail_failed(peer, rail, why, PeerError::Rail(RailId(rail as u8)));
    }

    #[cold]
    pub(in super::super) fn rejoin_arrived(
        &mut self,
        peer: Peer,
        message: &Rejoin,
    ) -> Result<(), Violation> {
        let Some(stream) = self.arrival_stream(peer, 0, message.word)? else { return Ok(()) };
        let ours =
            self.pairings[peer.0 as usize].as_ours(1 << message.rail) & self.joined_rails(peer.0);
        let in_use = self.open_rails(peer.0) & ours != 0;
        let Some(kept) = self.kept_peer_mut(peer.0).filter(|_| ours != 0) else {
            return Err(Violation::Kind);
        };
        let rail = ours.trailing_zeros() as usize;
        let (fenced, disabled) = (kept.fenced & ours != 0, kept.disabled & ours != 0);
        let back = &mut kept.back;
        let turn = &mut back.turns[rail];
        let ahead = message.epoch.wrapping_sub(turn.epoch).cast_signed();
        let probe = message.stage == Stage::Probe;
        let late = !probe && message.serial.wrapping_sub(turn.heard).cast_signed() <= 0;
        match ahead {
            1 if fenced => {}
            1.. => return Err(Violation::Sequence),
            0 if in_use || back.attached & ours != 0 => {}
            _ => {
                self.stats.stale += 1;
                return Ok(());
            }
        }
        if late || (probe && ahead != 0) {
            self.stats.stale += 1;
            return Ok(());
        }
        if !probe {
            turn.heard = message.serial;
        }
        self.due.push(self.streams, stream);
        self.streams[stream as usize].ask = true;
        let Some(kept) = self.kept_peer_mut(peer.0) else { return Ok(()) };
        let back = &mut kept.back;
        let named = matches!(message.stage, Stage::Offer | Stage::Attached);
        if ahead == 1 && disabled {
            // The rail is disabled here. If the peer has attached it, end the new epoch, and report
            // that to the peer.
            if message.stage == Stage::Attached && back.may_have_begun(ours) {
                self.begin_epoch(peer.0, rail);
                self.peer_fences(peer.0, rail);
            }
            return Ok(());
        }
        if ahead == 1 {
            back.incoming = named.then_some(*message).or(back.incoming);
            self.may_return(peer.0, ours);
            return Ok(());
        }
        if in_use {
            back.due |= if message.asks { ours } else { 0 };
            return Ok(());
        }
        if named && hash(message.address()) != back.turns[rail].address {
            back.incoming = Some(*message);
        }
        match message.stage {
            Stage::Offer => back.welcome &= !ours,
            Stage::Attached => back.welcome |= ours,
            Stage::Proven => {
                back.welcome |= ours;
                back.agreed |= ours;
            }
            Stage::Probe if back.proven & ours == 0 => {
                back.proven |= ours;
                back.say(ours);
            }
            Stage::Probe => {}
        }
        if back.proven & back.agreed & ours != 0 {
            self.use_again(peer.0, rail);
        }
        Ok(())
    }

    fn use_again(&mut self, peer: u16, rail: usize) {
        let bit = 1 << rail;
        let Some(kept) = self.kept_peer_mut(peer) else { return };
        kept.back.stop(bit);
        kept.why[rail] = None;
        kept.back.due |= bit;
        self.peers[peer as usize].rails |= bit;
        self.loads.renew(rail);
        self.note_returned(peer, rail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_is_repeated_more_and_more_rarely_and_lapses() {
        let mut back = Back::NONE;
        back.ready = 0b100;
        back.say(0b100);
        let mut sent = [0u32; OFFERS as usize + 1];
        let (mut at, mut passes) = (0, 0u32);
        while back.ready != 0 {
            if core::mem::take(&mut back.due) != 0 {
                (sent[at], at) = (passes, at + 1);
            }
            back.repeat(0b100, 0b100);
            passes += 1;
            assert!(passes < 1 << 20, "{back:?}");
        }
        assert_eq!(at, sent.len());
        assert!(
            sent.windows(3).all(|two| two[2] - two[1] >= 2 * (two[1] - two[0]) - 1),
            "{sent:?}"
        );
        // Reports of the stage of an attached rail are repeated without limit.
        (back.attached, back.repeated) = (0b10, 100);
        (0..AGAIN << RARELY).for_each(|_| back.repeat(0b10, 0));
        assert_eq!(back.due, 0b10);
    }

    #[test]
    fn rails_of_a_bitmask_are_counted() {
        for (mask, rails) in [(0, 0), (1, 1), (0x8000, 1), (u16::MAX, 16), (0b1010, 2)] {
            assert_eq!(each(mask).fold(0, |all, rail| all | 1 << rail), mask);
            assert_eq!(each(mask).count(), rails);
        }
    }
}
