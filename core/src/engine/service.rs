//! The second half of a pass serves the streams that are due. It applies parked messages in order,
//! sends the replies to fetching atomics, acknowledges, and continues to post operations. Bounded:
//! at most a batch of streams, and a batch of steps for each.

use crate::error::PeerError;
use crate::mem::PeerId;
use crate::rail::Rail;
use crate::sync::seq::Seq;

use super::list::NONE;
use super::pieces::Answer;
use super::protocol::Kept;
use super::stream::{KEPT, MESSAGES, Stream, WRITES};
use super::table::PeerState;
use super::tag::Tag;
use super::window::{Action, Next, Parked};
use super::wire::{Body, NO_TOKEN};
use super::{Engine, State};

enum Applied {
    All,
    /// Not all: the batch is used up, a rail has no room for a reply, or a device is busy.
    More,
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Serves at most a batch. Streams that become due meanwhile wait for the next pass.
    #[inline(always)]
    pub(super) fn service(&mut self) {
        for _ in 0..self.state.due.len.min(self.state.config.batch) {
            let Some(stream) = self.state.due.pop(self.state.streams) else { return };
            self.serve(stream);
        }
    }

    fn serve(&mut self, stream: u32) {
        let peer = self.state.streams[stream as usize].peer;
        match self.state.peers[peer as usize].state {
            PeerState::Connected => {}
            PeerState::Closing => {
                if !self.close_step(stream) {
                    return;
                }
            }
            PeerState::Meeting => {
                self.greet(peer);
                return;
            }
            PeerState::Failed(_) => return self.apply_parked(stream),
            PeerState::Free | PeerState::Reserved => return,
        }
        if self.state.streams[stream as usize].window.held() != 0 {
            self.apply_parked(stream);
            if !self.state.streams[stream as usize].live {
                return;
            }
        }
        self.acknowledge(stream);
        // Answer gets before posting new operations, which may fill the window.
        if self.state.streams[stream as usize].ask && self.state.is_kept(stream) {
            self.answer_first();
            self.answer_gets(stream);
        }
        if self.state.streams[stream as usize].unposted != NONE {
            self.advance(stream);
        }
        self.ask_if_wanted(stream);
    }

    /// Applies parked messages in order, even from a peer that has failed since. Fails the peer if
    /// a message cannot be applied.
    fn apply_parked(&mut self, stream: u32) {
        match self.apply(stream) {
            Ok(Applied::All) => {}
            Ok(Applied::More) => self.state.due.push(self.state.streams, stream),
            Err(why) => {
                // The message may have been applied in part. Never apply this message again, nor
                // any later message.
                let (window, mut cells) = self.state.window(stream);
                window.lose(&mut cells);
                self.state.fail_peer(self.state.streams[stream as usize].peer, why);
            }
        }
    }

    fn apply(&mut self, stream: u32) -> Result<Applied, PeerError> {
        for _ in 0..self.state.config.batch {
            let (window, mut cells) = self.state.window(stream);
            let Parked { at, what } = match window.next(&mut cells) {
                Next::Hole => return Ok(Applied::All),
                Next::Write => continue,
                Next::Message(parked) => parked,
            };
            match what {
                Action::Signal { op, value } => {
                    if let Err(why) = self.state.apply_signal(at, op, value)
                        && !self.signal_on_device(stream, at, op, value, why)?
                    {
                        return Ok(Applied::More);
                    }
                }
                Action::Amo { amo, token } => {
                    let value = match self.state.apply_amo(at, amo) {
                        Ok(value) => value,
                        Err(why) => {
                            match self.amo_on_device(stream, at, amo, token != NO_TOKEN, why)? {
                                Some(value) => value,
                                None => return Ok(Applied::More),
                            }
                        }
                    };
                    if token != NO_TOKEN && self.state.is_kept(stream) {
                        self.state.keep_reply(stream, value);
                    }
                    if token != NO_TOKEN && !self.reply(stream, token, value) {
                        // The atomic was executed: only its reply is outstanding.
                        let (window, mut cells) = self.state.window(stream);
                        window.replace(
                            Parked { at, what: Action::Reply { token, value } },
                            &mut cells,
                        );
                        return Ok(Applied::More);
                    }
                }
                Action::Tagged { lo, hi, kept } => {
                    self.state.turn(stream, Tag { lo, hi }, Kept::unpack(kept))?;
                }
                Action::Reply { token, value } => {
                    if !self.reply(stream, token, value) {
                        return Ok(Applied::More);
                    }
                }
                Action::Piece { block, copy } => {
                    if let Some(copy) = self.place_piece(stream, at, block, copy)? {
                        let (window, mut cells) = self.state.window(stream);
                        window.replace(
                            Parked { at, what: Action::Piece { block, copy } },
                            &mut cells,
                        );
                        return Ok(Applied::More);
                    }
                }
                Action::Get { token, left, into } => {
                    if let Some(rest) = self.answer(stream, Answer::of(at, token, left, into))? {
                        let (window, mut cells) = self.state.window(stream);
                        window.replace(rest.parked(), &mut cells);
                        return Ok(Applied::More);
                    }
                }
            }
            let (window, mut cells) = self.state.window(stream);
            window.consume(&mut cells);
        }
        Ok(Applied::More)
    }

    /// Sends the old value of an atomic. Returns `false` if no rail has room. Sends nothing to a
    /// failed peer, and returns `true`.
    fn reply(&mut self, stream: u32, token: u64, value: u64) -> bool {
        self.post_control(stream, Body::Reply { token, value })
            || !self.state.streams[stream as usize].live
    }

    /// Acknowledges if half a window is owed, if the peer has requested it, or after `ack_age`
    /// passes without a message that carries the cursor.
    fn acknowledge(&mut self, stream: u32) {
        let config = self.state.config;
        let s = &self.state.streams[stream as usize];
        let owed = s.owed();
        let (credits, many) = self.state.credits_owed(stream);
        if owed == 0 && !credits {
            return;
        }
        let s = &mut self.state.streams[stream as usize];
        // A wrap-around only delays the retry.
        s.age = s.age.wrapping_add(1);
        let asked =
            s.ack_sent.is_before(s.ack_wanted) && !s.window.expected().is_before(s.ack_wanted);
        let now =
            asked || many || owed >= (config.window as u64 / 2).max(1) || s.age > config.ack_age;
        if many {
            self.state.credits_alone(stream);
        }
        if now && self.post_alone(stream) {
            self.state.stats.acks_alone += 1;
        } else {
            self.state.due.push(self.state.streams, stream);
        }
    }

    /// Sends an acknowledgement as a separate message. Returns `false` if no rail has room.
    fn post_alone(&mut self, stream: u32) -> bool {
        match self.state.has_grown(stream) {
            true => self.post_room(stream),
            false => self.post_ack(stream, None),
        }
    }

    /// Peers may need all acknowledgements and credits later, when nothing drives this engine.
    /// Acknowledgements that find no room in a rail stay due.
    #[cold]
    pub(super) fn acknowledge_all(&mut self) {
        for stream in 0..self.state.streams.len() as u32 {
            let s = &self.state.streams[stream as usize];
            if !s.live || (s.owed() == 0 && !self.state.credits_owed(stream).0) {
                continue;
            }
            match self.post_alone(stream) {
                true => self.state.stats.acks_alone += 1,
                false => self.state.due.push(self.state.streams, stream),
            }
        }
        self.flush();
    }

    /// With `wanted`, also requests an acknowledgement from the peer up to this number. Returns
    /// `false` if no rail has room.
    #[inline(never)]
    pub(super) fn post_ack(&mut self, stream: u32, wanted: Option<Seq>) -> bool {
        let freed = self.state.returned(stream);
        let posted = self.post_control(stream, Body::Ack { wanted, freed });
        if posted {
            self.state.credits_told(stream);
        }
        posted
    }

    /// Asks at most once for each number.
    fn ask_if_wanted(&mut self, stream: u32) {
        let s = &self.state.streams[stream as usize];
        if !s.ask {
            return;
        }
        let peer = s.peer;
        if self.state.hellos != 0 && !self.greet(peer) {
            return;
        }
        if self.state.is_kept(stream) {
            self.mend(stream);
            if !self.ask_silent(stream) {
                return self.state.due.push(self.state.streams, stream);
            }
        }
        let s = &self.state.streams[stream as usize];
        let upto = s.next;
        if s.live && s.in_flight() != 0 && s.asked != upto {
            if !self.post_ack(stream, Some(upto)) {
                return self.state.due.push(self.state.streams, stream);
            }
            self.state.streams[stream as usize].asked = upto;
        }
        // Request an acknowledgement of unposted numbers later: an acknowledgement, or room in a
        // rail, makes the stream due again.
        let broken = self.state.is_kept(stream) && self.state.is_broken(stream);
        let s = &mut self.state.streams[stream as usize];
        s.ask = s.unposted != NONE || broken;
        if broken {
            self.state.due.push(self.state.streams, stream);
        }
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    pub(super) fn ask(&mut self, stream: u32) {
        self.streams[stream as usize].ask = true;
        self.due.push(self.streams, stream);
    }

    /// Makes the next data of a stream wait, if it could overtake outstanding operations.
    #[inline(never)]
    pub(super) fn fence(&mut self, stream: u32) {
        let s = &mut self.streams[stream as usize];
        let holds = s.holds & (WRITES | MESSAGES);
        if holds == 0 || s.open == 0 {
            return;
        }
        s.fence = holds | s.fence & KEPT;
        // If only writes are held back, the next write requests the acknowledgement itself.
        if holds & MESSAGES != 0 {
            self.ask(stream);
        }
    }

    pub(super) fn ask_all(&mut self) {
        for stream in 0..self.streams.len() as u32 {
            let s = &self.streams[stream as usize];
            if s.live && s.in_flight() != 0 && s.asked != s.next {
                self.ask(stream);
            }
        }
    }

    /// Returns the first number that is missing in a stream from this peer, or from any peer. Also
    /// returns the index of the peer. For diagnostics.
    pub(super) fn first_hole(&self, from: Option<PeerId>) -> Option<(u16, Seq)> {
        let wanted =
            |s: &&Stream| s.window.held() != 0 && from.is_none_or(|from| from.index == s.peer);
        let holed = self.streams.iter().find(wanted)?;
        Some((holed.peer, holed.window.expected()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Config, Tables};
    use crate::rail::loopback::Loopback;

    #[test]
    fn what_is_owed_for_more_passes_than_there_are_numbers_is_owed_still() {
        let mut tables = Tables::<1, 1, 8, 1, 1>::new();
        let config = Config { window: 8, ack_age: u32::MAX, ..Config::DEFAULT };
        let mut engine = Engine::new(config, [Loopback::<4>::new()], tables.memory()).unwrap();
        let peer = engine.reserve_peer().unwrap();
        engine.connect_peer(peer, 1).unwrap();
        let state = &mut engine.state;
        assert!(state.streams[0].window.take_in_order(0, state.mask));
        state.streams[0].age = u32::MAX - 1;
        state.due.push(state.streams, 0);
        for _ in 0..3 {
            engine.progress();
        }
        assert_eq!((engine.state.streams[0].owed(), engine.stats().acks_alone), (1, 0));
        assert_eq!(engine.state.due.len, 1);
    }
}
