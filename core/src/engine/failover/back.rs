//! The return of a rail to a peer.
//!
//! It begins where each end has fenced the rail and knows that the other has told it all, so that
//! nothing of the epoch that ended is in flight. Then, over the rails in use:
//!
//! 1. *Offer*: the rail opens again ([`Rail::reopen`]), and its address goes to the peer. An offer
//!    is repeated some times, then it lapses until [`Sink::peer_up`] comes again.
//! 2. *Attached*: an end that is ready itself attaches the address that it is offered
//!    ([`Rail::rejoin`]), which begins the next epoch, and says so.
//! 3. *Proven*: an end that is attached, and attached at the other end, posts a probe on the rail
//!    itself. Who has received the probe of the other says so.
//! 4. *In use*: an end uses the rail once both probes have arrived. It answers an end that does not
//!    know that yet.
//!
//! A rail that fails before both ends use it ends the epoch, because the other end may have begun
//! to use it. Nothing waits for a rail that returns: the others go on.

use crate::error::{PostError, Violation};
use crate::mem::{Peer, RailId, Untrusted};
use crate::op::Fault;
use crate::probe::probe;
#[cfg(doc)]
use crate::rail::Sink;
use crate::rail::{Posted, REOPEN_MAX, Rail};

use super::super::joint::RAILS_MAX;
use super::super::post::Blocked;
use super::super::table::{PeerSlot, PeerState};
use super::super::wire::PostTag;
use super::super::{Engine, State};
use super::rejoin::{Rejoin, Stage};
use super::{AGAIN, PeerError, RARELY};

/// How often an offer is repeated.
const OFFERS: u16 = 6;

/// One rail.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// How often it was attached again.
    epoch: u16,
    /// The serials of the last message said and heard.
    said: u16,
    heard: u16,
    /// A hash of the peer's address that is attached.
    address: u32,
}

/// The rails to a peer that return. Bitmasks count our rails.
#[derive(Clone, Copy, Debug)]
pub(super) struct Back {
    /// Rails that may return: the rail or the user says so, or the peer has offered it.
    ready: u16,
    /// Rails offered to the peer, which may begin the next epoch.
    offered: u16,
    /// Rails that are attached again. Of these: the peer has attached them too; our probe was
    /// posted; the peer's has arrived; the peer has received ours.
    attached: u16,
    welcome: u16,
    probed: u16,
    proven: u16,
    agreed: u16,
    /// Rails of which the peer is to hear now. All are repeated after so many passes.
    due: u16,
    repeated: u16,
    wait: u32,
    /// What the peer has said of a rail that is to be attached.
    incoming: Option<Rejoin>,
    turns: [Turn; RAILS_MAX],
}

impl Back {
    /// No rail has failed.
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

    /// Whether a rail is attached again and not in use.
    pub(super) fn is_attached(&self, rail: u16) -> bool {
        self.attached & rail != 0
    }

    /// Whether the peer may have begun the next epoch of a rail.
    pub(super) fn may_have_begun(&self, rail: u16) -> bool {
        self.offered & rail != 0
    }

    /// Offers rails no more.
    pub(super) fn rest(&mut self, rails: u16) {
        self.ready &= !rails;
        self.due &= !rails;
    }

    /// Ends the return of rails.
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

    /// Says so of rails in the next pass, and begins to repeat.
    fn say(&mut self, rails: u16) {
        self.due |= rails;
        (self.repeated, self.wait) = (0, AGAIN);
    }

    /// Counts a pass. After a number of them, sends the messages about `rails` again; after
    /// [`OFFERS`] repetitions, stops offering the rails in `able`.
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

/// FNV-1a.
fn hash(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// The rails of a bitmask.
fn each(mut rails: u16) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let rail = rails.trailing_zeros() as usize;
        rails &= rails.wrapping_sub(1);
        (rail < RAILS_MAX).then_some(rail)
    })
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Continues the return of the rails of a peer.
    pub(super) fn rejoin_rails(&mut self, peer: u16) {
        if self.state.peers[peer as usize].state != PeerState::Connected {
            return;
        }
        self.attach_incoming(peer);
        let (able, in_use) = (self.state.able(peer), self.state.peers[peer as usize].rails);
        let Some(kept) = self.state.kept_peer_mut(peer) else { return };
        let back = &mut kept.back;
        back.repeat(able | back.attached, able);
        let (due, probes) =
            (back.due & (able | back.attached | in_use), back.attached & back.welcome & !back.probed);
        for rail in each(due) {
            if !self.say_stage(peer, rail) {
                return;
            }
        }
        for rail in each(probes) {
            self.post_probe(peer, rail);
        }
    }

    /// Attaches the peer at the address that it has sent.
    fn attach_incoming(&mut self, peer: u16) {
        let able = self.state.able(peer);
        let Some(kept) = self.state.kept_peer_mut(peer) else { return };
        let Some(message) = kept.back.incoming.take() else { return };
        let (attached, joined) = (kept.back.attached, kept.joined);
        // One rail: checked when it arrived.
        let bit = self.state.pairings[peer as usize].as_ours(1 << message.rail) & joined;
        let rail = bit.trailing_zeros() as usize;
        let ahead = message.epoch.wrapping_sub(self.state.epoch_of(peer, rail));
        let again = ahead == 0 && attached & bit != 0;
        if !again && (ahead != 1 || able & bit == 0) {
            // The peer has offered it before this end is ready, which then offers it too.
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

    /// Tells the peer how far this end has come with a rail. `false`: no rail has room, or the peer
    /// has failed.
    fn say_stage(&mut self, peer: u16, rail: usize) -> bool {
        let bit = 1 << rail;
        let in_use = self.state.peers[peer as usize].rails & bit != 0;
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
                    // One that is attached is said to be when that is repeated.
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
        let message = Rejoin { rail: rail as u8, stage, asks: !in_use, word, epoch, serial, length, address };
        // It carries no cursor.
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

    /// Posts a probe on the rail itself, once.
    fn post_probe(&mut self, peer: u16, rail: usize) {
        let epoch = self.state.epoch_of(peer, rail);
        let word = self.state.streams[self.state.stream_of(0, peer) as usize].stamp;
        let (stage, address) = (Stage::Probe, [0; REOPEN_MAX]);
        let probe =
            Rejoin { rail: rail as u8, stage, asks: true, word, epoch, serial: 0, length: 0, address }
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
    /// Rails to a peer may return.
    #[cold]
    pub(in super::super) fn may_return(&mut self, peer: u16, rails: u16) {
        let Some(slot) = self.peers.get(peer as usize) else { return };
        let in_use = slot.rails;
        let Some(kept) = self.kept_peer_mut(peer) else { return };
        let back = &mut kept.back;
        let new = rails & kept.joined & !in_use & !kept.disabled & !back.attached & !back.ready;
        if new != 0 {
            back.ready |= new;
            back.say(new);
            self.ask(self.stream_of(0, peer));
        }
    }

    /// Rails that can be offered: both ends have told each other all of the epoch that ended.
    fn able(&self, peer: u16) -> u16 {
        match self.kept_peer(peer).map(|kept| kept.back.ready & kept.fenced & kept.confirmed & !kept.disabled)
        {
            None | Some(0) => 0,
            Some(able) => able & self.heard(peer),
        }
    }

    /// Whether the return of a rail goes on in the next pass.
    pub(super) fn is_returning(&self, peer: u16) -> bool {
        let PeerSlot { state, rails: in_use, .. } = self.peers[peer as usize];
        // Nothing returns to one that closes.
        state == PeerState::Connected
            && self.kept_peer(peer).is_some_and(|kept| {
                let able = kept.back.ready & kept.fenced & kept.confirmed & !kept.disabled;
                kept.back.incoming.is_some() || able | kept.back.attached | kept.back.due & in_use != 0
            })
    }

    fn epoch_of(&self, peer: u16, rail: usize) -> u16 {
        self.kept_peer(peer).map_or(0, |kept| kept.back.epoch(rail))
    }

    /// The next epoch of a rail begins. Nothing that was said of it before counts any more.
    fn next_epoch(&mut self, peer: u16, rail: usize) {
        let bit = 1 << rail;
        let Some(kept) = self.kept_peer_mut(peer) else { return };
        kept.fenced &= !bit;
        kept.confirmed &= !bit;
        kept.back.stop(bit);
        kept.back.turns[rail].epoch = kept.back.turns[rail].epoch.wrapping_add(1);
        for context in 0..self.config.contexts {
            let stream = self.stream_of(context as u8, peer) as usize;
            if let Some(failover) = &mut self.failover {
                failover.streams[stream].told &= !bit;
            }
        }
    }

    /// The peer has begun the next epoch of a rail, which has failed meanwhile.
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

    /// A peer has said how far it has come with a rail.
    #[cold]
    pub(in super::super) fn rejoin_arrived(&mut self, peer: Peer, message: &Rejoin) -> Result<(), Violation> {
        let Some(stream) = self.arrival_stream(peer, 0, message.word)? else { return Ok(()) };
        let ours = self.pairings[peer.0 as usize].as_ours(1 << message.rail) & self.joined_rails(peer.0);
        let in_use = self.peers[peer.0 as usize].rails & ours != 0;
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
            // It is not to be used. A peer that has attached it is told so.
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

    /// Uses a rail that both ends have proven.
    fn use_again(&mut self, peer: u16, rail: usize) {
        let bit = 1 << rail;
        let Some(kept) = self.kept_peer_mut(peer) else { return };
        kept.back.stop(bit);
        kept.why[rail] = None;
        kept.back.due |= bit;
        self.peers[peer as usize].rails |= bit;
        let pairing = &mut self.pairings[peer as usize];
        pairing.longest = pairing.longest.max(pairing.messages[rail]);
        self.open_accounts(peer);
        self.stats.rails_returned += 1;
        probe!("rail_up", peer, rail);
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
        assert!(sent.windows(3).all(|two| two[2] - two[1] >= 2 * (two[1] - two[0]) - 1), "{sent:?}");
        // One that is attached is said to be for ever.
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
