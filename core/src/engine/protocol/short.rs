//! Short messages: payloads that need no credit, because the receiver keeps them in small blocks.
//! Nothing here blocks, allocates or posts.

use crate::error::Violation;
use crate::mem::{PeerId, Untrusted, copy_message};
use crate::rail::Rail;

use super::super::{Engine, State};
use super::Protocol;
use super::stock::{Account, Kept, SHORT};

/// Maximum number of short messages that a stream may send between two grants. It exceeds the
/// number in flight while a grant travels.
const GRANT: u32 = 1 << 12;

impl Account {
    pub(crate) fn shorts_left(&self) -> u32 {
        match self.shorts_most.wrapping_sub(self.shorts_sent) {
            left if left >> 31 == 0 => left,
            _ => 0,
        }
    }

    /// Records the total number of short messages that the peer lets us send. An older total that
    /// arrives late changes nothing.
    pub(crate) fn shorts_given(&mut self, most: u32) {
        if most.wrapping_sub(self.shorts_most) >> 31 == 0 {
            self.shorts_most = most;
        }
    }

    pub(crate) fn shorts_open(&self) -> u32 {
        self.shorts_granted.wrapping_sub(self.shorts_heard)
    }

    /// Grants the peer more short messages if it has few left. `left` is the number of short blocks
    /// that are granted to no stream.
    #[cold]
    pub(crate) fn grant_shorts(&mut self, left: &mut u32) {
        let open = self.shorts_open();
        // Grant only a part, so that one stream does not take all blocks.
        let more = (*left).div_ceil(4).min(GRANT);
        if open <= more / 2 && more != 0 {
            *left -= more;
            self.shorts_granted = self.shorts_granted.wrapping_add(more);
            self.grown = true;
        }
    }
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Returns the peers with unexpected messages that fill all their room here. Further sends of
    /// such a peer wait until some of its messages are received. Short messages fill their own room
    /// before they take header room. Slow path: visits every stream.
    pub fn crowding_peers(&self) -> impl Iterator<Item = PeerId> + Clone {
        let crowded = |protocol: &Protocol<'_, RAILS>, account: &Account| {
            // A sender that is configured like this engine keeps at most this many payloads.
            let kept_there = protocol.outgoing.len() as u32;
            account.kept == protocol.credits.after(account.credit_doublings)
                && account.headers
                    >= protocol.waiting.after(account.header_doublings).min(kept_there)
        };
        self.state.protocol.iter().flat_map(move |protocol| {
            let streams = self.state.streams.iter().zip(protocol.accounts.iter());
            streams
                .filter(move |(_, account)| crowded(protocol, account))
                .map(|(stream, _)| self.state.peer_id(stream.peer))
        })
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    pub(super) fn keep_short(
        &mut self,
        stream: u32,
        payload: Untrusted<'_>,
    ) -> Result<Kept, Violation> {
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
        let block =
            protocol.blocks.take_short(stream, source, len as u32).ok_or(Violation::Credit)?;
        account.shorts_heard = account.shorts_heard.wrapping_add(1);
        account.grant_shorts(&mut protocol.shorts);
        protocol.stats.kept += 1;
        protocol.stats.kept_bytes += len as u64;
        // SAFETY: `take_short` has just reserved the block for this message alone. The block holds
        // `SHORT` bytes, and the payload was checked above to be no longer.
        unsafe { copy_message(payload.as_ptr(), protocol.blocks.bytes(block), len) };
        Ok(Kept::Block(block))
    }

    /// The sender may have used up its grant, so more may be granted here.
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
