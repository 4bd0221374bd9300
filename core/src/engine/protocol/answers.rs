//! Handles the messages that follow a match: Fin, Pull and Chunk, and Room. Changes state only. All
//! input from a peer is checked before it has an effect.

use crate::error::Violation;
use crate::mem::{Untrusted, copy_message};
use crate::op::{Fault, Token};
use crate::probe::probe;

use super::super::State;
use super::super::list::NONE;
use super::super::pending::OpKind;
use super::head::{self, Head};
use super::request::Request;
use super::send::Form;
use super::slot::Stage;
use super::stock::Kept;

impl<const RAILS: usize> State<'_, RAILS> {
    /// Handles a Fin: the receiver of our send has all that it wants, could not receive it, or has
    /// refused it. The Fin may overtake the acknowledgement of chunks. A send that is kept for
    /// failover ends only after both.
    pub(super) fn finned(&mut self, stream: u32, peer: u16, head: &Head) -> Result<(), Violation> {
        let [token, delivered] = head.words;
        let index = self.answered(peer, token)?;
        if let Some(protocol) = &mut self.protocol {
            let account = &mut protocol.accounts[stream as usize];
            account.fins_heard = account.fins_heard.wrapping_add(1);
        }
        let slot = &mut self.pending.slots[index as usize];
        if slot.pulled || delivered > slot.left {
            return Err(Violation::Reply);
        }
        slot.fetch = false;
        slot.value = delivered;
        match head.op {
            head::RECEIVED => {}
            head::CLOSING => slot.fail_unmatched(),
            _ => slot.fail(Fault::Receiver, true),
        }
        self.end_if_over(index);
        Ok(())
    }

    pub(super) fn pull_asked(
        &mut self,
        peer: u16,
        token: u64,
        request: u64,
        len: u64,
    ) -> Result<(), Violation> {
        let index = self.answered(peer, token)?;
        let Some(protocol) = &mut self.protocol else { return Err(Violation::Kind) };
        let slot = &mut self.pending.slots[index as usize];
        // A send accepts one Pull. A send that is kept for failover stays open until its Fin, even
        // after everything was sent.
        let again = slot.pulled || slot.offset != 0;
        if again || slot.form != Form::Request || len > slot.left || len == 0 {
            return Err(Violation::Reply);
        }
        (slot.pulled, slot.request, slot.left, slot.value) = (true, request, len, len);
        protocol.pulled.push(&mut self.pending.slots, index);
        Ok(())
    }

    /// Returns the slot of a send to this peer that waits for a reply. A failed send does not wait.
    pub(super) fn answered(&self, peer: u16, token: u64) -> Result<u32, Violation> {
        let index = self.pending.find(Token(token)).map_err(|_| Violation::Reply)?;
        let slot = &self.pending.slots[index as usize];
        let theirs = slot.stream != NONE && self.streams[slot.stream as usize].peer == peer;
        let waits = slot.kind == OpKind::Send && slot.fetch && slot.posted;
        if theirs && waits { Ok(index) } else { Err(Violation::Reply) }
    }

    /// The peer has more room for our messages. An older Room that arrives late changes nothing.
    pub(super) fn room_given(&mut self, stream: u32, words: [u64; 2]) -> Result<(), Violation> {
        let Some(protocol) = &mut self.protocol else { return Err(Violation::Kind) };
        let account = &mut protocol.accounts[stream as usize];
        let headers = u32::try_from(words[1]).map_err(|_| Violation::Credit)?;
        let takes = &mut account.takes;
        (takes.credits, takes.headers) =
            (takes.credits.max(words[0] as u32), takes.headers.max(headers));
        account.shorts_given((words[0] >> 32) as u32);
        Ok(())
    }

    pub(super) fn chunk(
        &mut self,
        stream: u32,
        request: u64,
        offset: u64,
        bytes: Untrusted<'_>,
    ) -> Result<(), Violation> {
        let kept = self.is_kept(stream);
        let Some(protocol) = &mut self.protocol else { return Err(Violation::Kind) };
        let index = protocol.requests.find(Request(request)).map_err(|_| Violation::Reply)?;
        let slot = &mut protocol.requests.slots[index as usize];
        if slot.stage != Stage::Chunks || slot.stream != stream {
            return self.chunk_for_device(index, stream, offset, bytes);
        }
        // Chunks arrive in any order, each once, and together fill the requested range.
        let len = bytes.len() as u64;
        let want = slot.fit(slot.len).0;
        if len == 0 || len > slot.left || offset > want || len > want - offset {
            return Err(Violation::Bounds);
        }
        // SAFETY: `offset + len` was checked to fit the buffer, which was checked against its
        // region when the receive was posted.
        unsafe { copy_message(bytes.as_ptr(), slot.ptr.add(offset as usize), len as usize) };
        slot.left -= len;
        if slot.left == 0 {
            slot.delivered = want;
            probe!("rendezvous_end", index, want);
            if kept {
                protocol.requests.push_due(index, Stage::Tell(false));
                return Ok(());
            }
            let header = core::mem::replace(&mut slot.header, NONE);
            protocol.requests.end(index, &mut self.pending.ends);
            if header != NONE {
                self.give_back(Kept::Header(header), false);
            }
        }
        Ok(())
    }
}
