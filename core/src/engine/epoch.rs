//! Epochs identify the attachment of a message. The two sides agree on epochs with Hellos.
//!
//! Each attachment of a peer has an *epoch*. The receiver chooses it, and the sender puts it into
//! every word (see `wire`). A message with another epoch belongs to an earlier attachment. It is
//! dropped and counted ([`Stats::stale`](super::Stats)).
//!
//! An engine numbers its attachments in sequence. So the epochs of recent attachments differ, even
//! in the few bits that fit in a word. The epochs of successive attachments in one peer slot differ
//! too.
//!
//! Rails may keep attachments apart themselves ([`Caps::fresh`](crate::rail::Caps)). Over such
//! rails all epochs are 0, and operations are posted at once. Over other rails the two sides
//! exchange Hellos first. Until then operations are queued, as behind a full window.
//!
//! # The exchange
//!
//! A Hello carries three things: `mine`, the sender's epoch; `yours`, the receiver's epoch as the
//! sender knows it; and the attachment to which the sender is *bound*. A Hello whose `yours` is our
//! epoch is *proof* that its sender is alive, because the sender knows this attachment. Any other
//! Hello may be old and proves nothing.
//!
//! | received                                          | reaction                               |
//! |---------------------------------------------------|----------------------------------------|
//! | no proof                                          | answer, repeating its `mine`           |
//! | proof, while no sender is bound here              | bind its sender here, and answer       |
//! | proof from the bound sender, which is bound to us | both are bound: send operations        |
//! | proof from another sender than the bound one      | fail the peer, which has attached anew |
//! | proof from a sender bound to another attachment   | answer, so that the sender fails us    |
//!
//! Each received epoch is answered once. Unless a rail fails, nothing is sent again: the side that
//! attaches last always reaches the other. A word with our epoch counts as a Hello from the bound
//! peer, because only that peer knows the epoch.
//!
//! A Hello also says whether its sender keeps what `failover` needs. Unless both sides keep it, the
//! peer fails when its first rail fails. A rail that fails during the exchange may have lost
//! Hellos. The rail reports this to the sender, which sends its Hello again. The receiver then
//! repeats its answer. A Hello whose connection broke is sent again too, a few times.
//!
//! # Epochs of rails
//!
//! Each rail to a peer has its own epoch, which the messages about rails carry (see `failover`).
//! Words do not carry it. The rail promises that nothing posted before it was fenced arrives after
//! it was attached again ([`Rail::fence`]).

mod hello;

use crate::error::{PeerError, Violation};
use crate::mem::{Peer, PeerId, Untrusted};
use crate::probe::probe;
use crate::rail::Rail;

use super::close::Bye;
use super::failover::{Asks, Leave, Rejoin, Told};
use super::post::Blocked;
use super::table::PeerState;
use super::wire::stamp;
use super::{Engine, State};

pub(super) use hello::{Bond, Hello};

/// Maximum number of Hellos that wait for room in a rail. A newer Hello replaces the oldest Hello
/// that is not for the bound peer.
const ANSWERS: usize = 4;

/// Maximum number of Hellos to one attachment that are sent again after their connection broke.
const LOST: u8 = 8;

/// An epoch that is less than this distance below the bound epoch belongs to an earlier attachment
/// of the same engine.
const EARLIER: u32 = 1 << 16;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Meeting {
    /// The epoch of incoming words, or 0 if no Hello is needed.
    mine: u32,
    /// The epoch of outgoing words, which the bound peer has chosen, or 0 if no peer is bound.
    theirs: u32,
    /// The last Hello sent: the epoch of its receiver, and our bond at that time.
    told: (u32, Bond),
    /// Epochs to which a Hello is due, oldest first.
    answers: [u32; ANSWERS],
    count: u8,
    /// Whether our streams to the peer are kept for failover.
    keeps: bool,
    /// Whether the next Hello reports that earlier Hellos may have been lost.
    again: bool,
    /// Number of Hellos whose connection broke.
    lost: u8,
}

impl Meeting {
    pub(crate) const NONE: Meeting = Meeting {
        mine: 0,
        theirs: 0,
        told: (0, Bond::None),
        answers: [0; ANSWERS],
        count: 0,
        keeps: false,
        again: false,
        lost: 0,
    };

    fn bond(&self, epoch: u32) -> Bond {
        match self.theirs {
            0 => Bond::None,
            theirs if theirs == epoch => Bond::Yours,
            _ => Bond::Other,
        }
    }

    /// Queues a Hello to the side with this epoch, unless that side already knows our state.
    /// Returns how many Hellos were added to the queue.
    fn answer(&mut self, epoch: u32) -> u32 {
        let known = epoch != 0 && self.told == (epoch, self.bond(epoch));
        let count = self.count as usize;
        if known || self.answers[..count].contains(&epoch) {
            return 0;
        }
        if count == ANSWERS {
            // Keep the Hello to the bound peer, which sends nothing more before it is answered.
            let oldest = usize::from(self.theirs != 0 && self.answers[0] == self.theirs);
            self.answers.copy_within(oldest + 1.., oldest);
            self.answers[count - 1] = epoch;
            return 0;
        }
        self.answers[count] = epoch;
        self.count += 1;
        1
    }

    fn first(&self) -> Option<Hello> {
        let yours = *self.answers[..self.count as usize].first()?;
        Some(Hello {
            mine: self.mine,
            yours,
            bond: self.bond(yours),
            keeps: self.keeps,
            again: self.again,
        })
    }

    fn sent(&mut self, hello: Hello) {
        (self.told, self.again) = ((hello.yours, hello.bond), false);
        self.answers.copy_within(1.., 0);
        self.count -= 1;
    }
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Sends a Hello again to a peer that [has not answered](Self::has_answered). A rail drops the
    /// Hello of a peer that it does not know yet, so the owner of the engine repeats it until both
    /// sides have attached each other. Does nothing for other peers.
    #[cold]
    pub fn call_again(&mut self, peer: PeerId) {
        if self.peer_error(peer) == Ok(None) && self.state.is_meeting(peer.index) {
            self.state.meet_again(peer.index);
        }
    }

    /// Sends the waiting Hellos to a peer. Returns `false` if the peer has failed, or if no rail
    /// has room. Hellos that find no room stay queued.
    #[cold]
    pub(super) fn greet(&mut self, peer: u16) -> bool {
        let stream = self.state.stream_of(0, peer);
        while let Some(hello) = self.state.pairings[peer as usize].meeting.first() {
            let owner = self.state.control(peer);
            // A Hello carries no cursor, so the acknowledged position does not change.
            let cursor = self.state.streams[stream as usize].ack_sent;
            let nothing = Untrusted::from_slice(&[]);
            match self.post_bytes(stream, peer, &hello.encode(), nothing, owner, cursor) {
                Ok(_) => {
                    self.state.pairings[peer as usize].meeting.sent(hello);
                    self.state.hellos -= 1;
                }
                Err(Blocked::Refused(rail, _)) => {
                    self.state.fail_peer(peer, PeerError::Rail(rail));
                    return false;
                }
                Err(Blocked::PeerDown) => return false,
                Err(_) => {
                    self.state.due.push(self.state.streams, stream);
                    return false;
                }
            }
        }
        true
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    /// Begins an attachment. `fresh` is set if the rails keep attachments apart.
    pub(super) fn meet(&mut self, peer: u16, fresh: bool) {
        if fresh {
            return self.establish(peer);
        }
        let in_word = |epoch| stamp(0, epoch, self.mask);
        let before = self.pairings[peer as usize].last;
        let mut epoch = self.epoch.wrapping_add(1).max(1);
        // A completion word carries only the low bits of the epoch. Skip an epoch that has the same
        // low bits as the previous epoch.
        if in_word(epoch) == in_word(before) {
            epoch = epoch.wrapping_add(1).max(1);
        }
        self.epoch = epoch;
        self.peers[peer as usize].state = PeerState::Meeting;
        let keeps = self.kept_peer(peer).is_some();
        let pairing = &mut self.pairings[peer as usize];
        (pairing.last, pairing.meeting) = (epoch, Meeting { mine: epoch, keeps, ..Meeting::NONE });
        self.answer(peer, 0);
    }

    pub(super) fn meet_again(&mut self, peer: u16) {
        let meeting = &mut self.pairings[peer as usize].meeting;
        (meeting.told, meeting.again) = (Meeting::NONE.told, true);
        let theirs = meeting.theirs;
        self.answer(peer, theirs);
    }

    /// Sends a Hello again whose connection broke. Returns `false` if the peer has answered, or if
    /// this happened too often.
    #[cold]
    pub(super) fn loses_hello(&mut self, peer: u16) -> bool {
        let meeting = &mut self.pairings[peer as usize].meeting;
        meeting.lost = meeting.lost.saturating_add(1);
        let repeats = meeting.lost <= LOST && self.is_meeting(peer);
        if repeats {
            self.meet_again(peer);
        }
        repeats
    }

    pub(super) fn part(&mut self, peer: u16) {
        let meeting = &mut self.pairings[peer as usize].meeting;
        self.hellos -= meeting.count as u32;
        *meeting = Meeting::NONE;
    }

    #[cold]
    pub(super) fn is_meeting(&self, peer: u16) -> bool {
        match self.peers[peer as usize].state {
            PeerState::Meeting => true,
            PeerState::Closing => !self.streams[self.stream_of(0, peer) as usize].live,
            _ => false,
        }
    }

    fn establish(&mut self, peer: u16) {
        let Meeting { mine, theirs, .. } = self.pairings[peer as usize].meeting;
        probe!("peer_up", peer, mine);
        let waited = self.is_meeting(peer);
        let state = &mut self.peers[peer as usize].state;
        if *state != PeerState::Closing {
            *state = PeerState::Connected;
        }
        for context in 0..self.config.contexts {
            let (index, context) = (self.stream_of(context as u8, peer), context as u8);
            let (sends, takes) =
                (stamp(context, theirs, self.mask), stamp(context, mine, self.mask));
            self.streams[index as usize].open(sends, takes);
            if waited {
                self.due.push(self.streams, index);
            }
        }
    }

    fn answer(&mut self, peer: u16, epoch: u32) {
        self.hellos += self.pairings[peer as usize].meeting.answer(epoch);
        if self.pairings[peer as usize].meeting.count != 0 {
            self.ask(self.stream_of(0, peer));
        }
    }

    #[cold]
    pub(super) fn contextless_arrived(
        &mut self,
        peer: Peer,
        bytes: Untrusted<'_>,
        violation: Violation,
    ) {
        let heard = match self.get_arrived(peer, bytes) {
            Some(heard) => heard,
            None => self.rare_arrived(peer, bytes, violation),
        };
        if let Err(violation) = heard {
            self.quarantine(peer.0, violation);
        }
    }

    fn rare_arrived(
        &mut self,
        peer: Peer,
        bytes: Untrusted<'_>,
        violation: Violation,
    ) -> Result<(), Violation> {
        match Hello::decode(bytes) {
            Some(Ok(hello)) => self.greeted(peer.0, hello),
            Some(Err(violation)) => Err(violation),
            None => match Bye::decode(bytes) {
                Some(bye) => bye.and_then(|bye| self.bye_heard(peer, bye)),
                None => match Told::decode(bytes) {
                    Some(told) => told.and_then(|told| self.told_arrived(peer, &told)),
                    None => match Asks::decode(bytes) {
                        Some(asks) => asks.and_then(|asks| self.asked_again(peer, &asks)),
                        None => match Rejoin::decode(bytes) {
                            Some(rejoin) => {
                                rejoin.and_then(|rejoin| self.rejoin_arrived(peer, &rejoin))
                            }
                            None => match Leave::decode(bytes) {
                                Some(leave) => {
                                    leave.and_then(|leave| self.leave_arrived(peer, &leave))
                                }
                                None => Err(violation),
                            },
                        },
                    },
                },
            },
        }
    }

    fn greeted(&mut self, peer: u16, hello: Hello) -> Result<(), Violation> {
        let Some(slot) = self.peers.get(peer as usize) else { return Ok(()) };
        if !slot.state.is_up() {
            return Ok(());
        }
        let waiting = self.is_meeting(peer);
        let meeting = &mut self.pairings[peer as usize].meeting;
        if hello.mine == 0 || meeting.mine == 0 {
            return Err(Violation::Kind);
        }
        if hello.yours == meeting.mine {
            if meeting.bond(hello.mine) == Bond::Other {
                // A late Hello from an attachment before the bound one proves nothing.
                let earlier = (1..EARLIER).contains(&meeting.theirs.wrapping_sub(hello.mine));
                if !earlier {
                    self.fail_peer(peer, PeerError::Reattached);
                }
                return Ok(());
            }
            if hello.bond != Bond::Other {
                meeting.theirs = hello.mine;
                if waiting && !hello.keeps && !self.keep_no_more(peer) {
                    return Ok(());
                }
            }
            if hello.bond == Bond::Yours && waiting {
                self.establish(peer);
            }
        }
        let meeting = &mut self.pairings[peer as usize].meeting;
        if hello.again && meeting.told.0 == hello.mine {
            meeting.told.0 = 0;
        }
        self.answer(peer, hello.mine);
        Ok(())
    }

    /// Drops the message, unless its word shows that the other side is bound to us.
    #[cold]
    pub(super) fn strange_arrival(
        &mut self,
        peer: Peer,
        context: u8,
        word: u32,
    ) -> Result<Option<u32>, Violation> {
        let Some(slot) = self.peers.get(peer.0 as usize) else { return Ok(None) };
        if !slot.state.is_up() {
            return Ok(None);
        }
        let waiting = self.is_meeting(peer.0);
        let Meeting { mine, theirs, .. } = self.pairings[peer.0 as usize].meeting;
        let right = word & !self.mask == stamp(context, mine, self.mask);
        // If `mine` is 0, the rail separates attachments. Then nothing stale can arrive, and a
        // mismatch is a violation.
        if (right || mine == 0) && context as u16 >= self.config.contexts {
            return Err(Violation::Context);
        }
        if !right && mine == 0 {
            return Err(Violation::Sequence);
        }
        if !right || (waiting && theirs == 0) {
            self.stats.stale += 1;
            return Ok(None);
        }
        if waiting {
            self.establish(peer.0);
        }
        Ok(Some(self.stream_of(context, peer.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::sequence_mask;
    use super::super::{Config, Tables};
    use super::*;
    use crate::rail::loopback::Loopback;

    #[test]
    fn attachments_near_each_other_share_no_epoch_on_either_side_of_the_wrap() {
        let mut tables = Tables::<1, 1, 8, 1, 1>::new();
        let config = Config { window: 8, ..Config::DEFAULT };
        let mut engine = Engine::new(config, [Loopback::<4>::new()], tables.memory()).unwrap();
        engine.state.epoch = u32::MAX - 8;
        let epochs: [u32; 15] = core::array::from_fn(|_| {
            let peer = engine.reserve_peer().unwrap();
            engine.state.meet(peer.index, false);
            let Meeting { mine, .. } = engine.state.pairings[0].meeting;
            engine.remove_peer(peer).unwrap();
            assert_eq!(engine.state.hellos, 0);
            mine
        });
        for (at, &one) in epochs.iter().enumerate() {
            assert_ne!(one, 0);
            // With the widest window, a word holds four bits of the epoch. The value 0 is skipped,
            // so any 14 successive epochs differ in these bits.
            for &other in epochs[at + 1..].iter().take(13) {
                assert_ne!(one, other);
                let mask = sequence_mask(1 << 19);
                assert_ne!(stamp(0, one, mask), stamp(0, other, mask), "{one:#x} and {other:#x}");
            }
        }
    }

    #[test]
    fn peers_that_are_all_attached_anew_share_no_epoch_with_what_they_were_before() {
        // With this window, a word has room for four bits of an epoch. The tables have one slot for
        // each value of these bits.
        const MASK: u32 = sequence_mask(1 << 19);
        let mut tables = Tables::<1, 16, 1, 1, 1>::new();
        let config = Config { window: 1, ..Config::DEFAULT };
        let mut engine = Engine::new(config, [Loopback::<4>::new()], tables.memory()).unwrap();
        engine.state.mask = MASK;
        let mut round = || {
            let peers: [_; 16] = core::array::from_fn(|_| {
                let peer = engine.reserve_peer().unwrap();
                engine.state.meet(peer.index, false);
                peer
            });
            let stamps = peers.map(|peer| {
                stamp(0, engine.state.pairings[peer.index as usize].meeting.mine, MASK)
            });
            peers.iter().for_each(|&peer| engine.remove_peer(peer).unwrap());
            stamps
        };
        let mut before = round();
        for _ in 0..40 {
            let now = round();
            assert!(
                now.iter().zip(&before).all(|(now, before)| now != before),
                "{now:x?} {before:x?}"
            );
            before = now;
        }
    }

    #[test]
    fn each_epoch_is_answered_once_for_each_bond_and_the_oldest_gives_way() {
        let mut meeting = Meeting { mine: 9, ..Meeting::NONE };
        assert_eq!([1, 2, 2, 3, 4].map(|epoch| meeting.answer(epoch)), [1, 1, 0, 1, 1]);
        assert_eq!((meeting.answer(5), meeting.count), (0, 4));
        meeting.theirs = 3;
        for (yours, bond) in
            [(2, Bond::Other), (3, Bond::Yours), (4, Bond::Other), (5, Bond::Other)]
        {
            let hello = meeting.first().unwrap();
            assert_eq!(hello, Hello { mine: 9, yours, bond, keeps: false, again: false });
            meeting.sent(hello);
            assert_eq!(meeting.answer(yours), 0);
        }
        assert_eq!(meeting.first(), None);
        meeting.theirs = 5;
        assert_eq!(meeting.answer(5), 1, "it is bound since");
    }

    #[test]
    fn what_is_left_of_others_does_not_displace_the_answer_to_the_one_bound_here() {
        for before in 0..ANSWERS as u32 {
            let mut meeting = Meeting { mine: 9, ..Meeting::NONE };
            for epoch in 0..before {
                meeting.answer(20 + epoch);
            }
            meeting.theirs = 5;
            meeting.answer(5);
            for epoch in 0..2 * ANSWERS as u32 {
                meeting.answer(30 + epoch);
            }
            let mut told = [0; ANSWERS];
            for yours in &mut told {
                let hello = meeting.first().unwrap();
                meeting.sent(hello);
                *yours = hello.yours;
            }
            assert_eq!(meeting.first(), None);
            assert!(told.contains(&5) && told.contains(&37), "{before} before: {told:?}");
        }
    }
}
