//! Short messages: payloads that need no credit, because the receiver keeps them in small blocks.
//! A receiver grants them, a few at a time, to the streams whose credits no longer grow. Nothing
//! here blocks, allocates or posts.

use crate::error::Violation;
use crate::mem::{PeerId, Untrusted, copy_message};
use crate::rail::Rail;

use super::super::{Engine, State};
use super::stock::{Account, Kept, SHORT};

/// Short messages that a stream may send between two grants of its receiver, at most: more than are
/// in flight while a grant travels.
const GRANT: u32 = 1 << 12;

impl Account {
    /// Returns how many short messages may still be sent.
    pub(crate) fn shorts_left(&self) -> u32 {
        match self.shorts_most.wrapping_sub(self.shorts_sent) {
            left if left >> 31 == 0 => left,
            _ => 0,
        }
    }

    /// Handles the total of short messages that we may send. A reordered older total changes
    /// nothing.
    pub(crate) fn shorts_given(&mut self, most: u32) {
        if most.wrapping_sub(self.shorts_most) >> 31 == 0 {
            self.shorts_most = most;
        }
    }

    /// Returns how many short messages the peer may still send.
    pub(crate) fn shorts_open(&self) -> u32 {
        self.shorts_granted.wrapping_sub(self.shorts_heard)
    }

    /// Lets the peer send more short messages, if it has few left. `left` is the number of short
    /// blocks that are granted to nobody.
    #[cold]
    pub(crate) fn grant_shorts(&mut self, left: &mut u32) {
        let open = self.shorts_open();
        // A part of what is left, so that one stream does not take all from the others.
        let more = (*left).div_ceil(4).min(GRANT);
        if open <= more / 2 && more != 0 {
            *left -= more;
            self.shorts_granted = self.shorts_granted.wrapping_add(more);
            self.grown = true;
        }
    }
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Returns a peer whose unexpected messages fill all the room that they can have here, so that
    /// its further sends wait until some are received. Short messages use up their own room before
    /// they take headers. Slow path: visits every stream.
    pub fn crowding_peer(&self) -> Option<PeerId> {
        let protocol = self.state.protocol.as_ref()?;
        // A sender configured as this engine keeps no more payloads than this.
        let kept_there = protocol.outgoing.len() as u32;
        let streams = protocol.accounts.iter().take(self.state.streams.len());
        let (stream, _) = streams.enumerate().find(|(_, account)| {
            account.kept == protocol.credits.after(account.credit_doublings)
                && account.headers >= protocol.waiting.after(account.header_doublings).min(kept_there)
        })?;
        Some(self.state.peer_id(self.state.streams[stream].peer))
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    /// Copies the payload of a short message into a block, by our grant to its sender.
    pub(super) fn keep_short(&mut self, stream: u32, payload: Untrusted<'_>) -> Result<Kept, Violation> {
        let Some(protocol) = &mut self.protocol else { return Err(Violation::Kind) };
        let account = &mut protocol.accounts[stream as usize];
        if account.shorts_open() == 0 {
            return Err(Violation::Credit);
        }
        if payload.len() > SHORT {
            return Err(Violation::Length);
        }
        let peer = self.streams[stream as usize].peer;
        let source = PeerId { index: peer, generation: self.peers[peer as usize].generation };
        let len = payload.len();
        let block = protocol.blocks.take_short(stream, source, len as u32).ok_or(Violation::Credit)?;
        account.shorts_heard = account.shorts_heard.wrapping_add(1);
        account.grant_shorts(&mut protocol.shorts);
        protocol.stats.kept += 1;
        protocol.stats.kept_bytes += len as u64;
        // SAFETY: the block is this message's alone and holds `SHORT` bytes, at least the payload's
        // length.
        unsafe { copy_message(payload.as_ptr(), protocol.blocks.bytes(block), len) };
        Ok(Kept::Block(block))
    }

    /// Handles a free block for a short message: its sender may have none left to send.
    pub(super) fn short_freed(&mut self, stream: u32) {
        let Some(protocol) = &mut self.protocol else { return };
        protocol.shorts += 1;
        let Some(account) = protocol.accounts.get_mut(stream as usize) else { return };
        account.grant_shorts(&mut protocol.shorts);
        if account.grown {
            self.due.push(self.streams, stream);
        }
    }
}
