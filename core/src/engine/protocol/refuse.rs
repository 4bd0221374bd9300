//! Refuses messages of a peer while the connection to it closes. Slow paths.

use crate::mem::PeerId;
use crate::rail::Rail;

use super::super::tag::UnexpectedId;
use super::super::wire::NO_TOKEN;
use super::super::{Engine, State};
use super::arrive::is_closing;
use super::head;
use super::stock::Kept;

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Answers the sends of a peer that wait for a match, a batch at a time. A message with its
    /// payload at the peer is discarded, even if it is claimed. A payload that is here stays, and
    /// may still be received.
    #[cold]
    pub(in super::super) fn refuse_unmatched(&mut self, peer: u16) {
        let mut from = 0;
        for _ in 0..self.state.config.batch {
            let Some((message, kept)) = self.state.next_waiting(peer, from) else { return };
            let Some(protocol) = &self.state.protocol else { return };
            let (stream, token) = match kept {
                Kept::Block(block) => {
                    let block = &protocol.blocks.slots[block as usize];
                    (block.stream, block.token)
                }
                Kept::Header(header) => {
                    let header = &protocol.headers.slots[header as usize];
                    (header.stream, header.offer.token)
                }
            };
            let words = [token, 0];
            if self.post_answer(stream, head::FIN, head::CLOSING, words, None, None).is_none() {
                return;
            }
            let Some(protocol) = &mut self.state.protocol else { return };
            let account = &mut protocol.accounts[stream as usize];
            account.fins_sent = account.fins_sent.wrapping_add(1);
            match kept {
                Kept::Block(block) => protocol.blocks.slots[block as usize].token = NO_TOKEN,
                Kept::Header(_) => {
                    // The message was found above, so this cannot fail.
                    let _ = protocol.matcher.discard(message);
                    self.state.give_back(kept, false);
                }
            }
            from = message.index + 1;
        }
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    /// Returns whether to refuse a matched message with its payload at the sender. While the
    /// connection closes, all are refused: otherwise a peer that keeps sending would delay the
    /// close for ever. An engine that is its own peer accepts the messages that it sent before:
    /// their tokens name its own open sends.
    #[cold]
    pub(super) fn refuses(&self, source: PeerId, token: u64) -> bool {
        is_closing(self.peers, source) && self.answered(source.index, token).is_err()
    }

    /// Returns the next message of a peer, in the matcher's slot `from` or later, whose sender
    /// waits for the match.
    fn next_waiting(&self, peer: u16, mut from: u32) -> Option<(UnexpectedId, Kept)> {
        let protocol = self.protocol.as_ref()?;
        loop {
            let (id, message) = protocol.matcher.next_of(peer as u32, from)?;
            let kept = Kept::unpack(message.cookie);
            match kept {
                Kept::Block(block) if protocol.blocks.slots[block as usize].token == NO_TOKEN => {
                    from = id.index + 1;
                }
                _ => return Some((id, kept)),
            }
        }
    }
}
