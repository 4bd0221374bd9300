//! The fast path for a message that is next in its stream and carries its payload. Hot: if a
//! receive into host memory is posted, the only function call is the copy of a longer payload. A
//! message that needs more checks changes nothing here, and `arrive` handles it.

use crate::error::Violation;
use crate::mem::{Peer, PeerId, Untrusted, copy_message};
use crate::sync::seq::truncate;

use super::super::State;
use super::super::list::NONE;
use super::super::stream::KEPT;
use super::super::tag::{Arrive, Tag, UnexpectedId};
use super::super::wire::NO_TOKEN;
use super::head::{self, Head};
use super::near;
use super::requests::end;
use super::slot::Sender;

impl<const RAILS: usize> State<'_, RAILS> {
    /// Handles a message that is next in its stream and carries its payload, if its cursor and
    /// credits need no further checks. Returns `false` in any other case, and changes nothing.
    #[inline(always)]
    pub(super) fn next_tagged(&mut self, peer: Peer, bytes: Untrusted<'_>) -> bool {
        let Ok((head, payload)) = Head::read(bytes) else { return false };
        let Some(protocol) = &mut self.protocol else { return false };
        let count = self.peers.len();
        let stream = head.context as usize * count + peer.0 as usize;
        // An unconfigured context has no stream, and a closed stream is not `unhurried`. If the
        // peer requested an acknowledgement, the stream becomes due below.
        let Some(s) = self.streams.get_mut(stream) else { return false };
        let Some(account) = protocol.accounts.get_mut(stream) else { return false };
        let acked = head.ack.wrapping_sub(truncate::<32>(s.acked.0));
        let freed = head.freed.wrapping_sub(account.freed);
        // One combined check: the kind, an `op` of 0 or 1, a tag of 96 bits. Both bytes come from
        // one word, so one mask compares them. The slow path handles streams with operations that
        // are not fully posted, and streams that are kept for failover.
        let form = u32::from(head.kind) | u32::from(head.op & !1) << 16;
        if u64::from(form ^ u32::from(head::TAGGED)) | head.words[1] >> 32 != 0
            || peer.0 as usize >= count
            || !s.unhurried
            || acked as u64 > s.in_flight()
            || freed > account.used()
            || s.ops.head != NONE
            || (RAILS > 1 && acked != 0 && s.fence & KEPT != 0)
            || payload.len() > protocol.blocks.size()
            || !s.window.take_in_order(head.word, self.mask)
        {
            return false;
        }
        let source = Sender::new(PeerId { index: peer.0, generation: s.generation });
        account.freed = head.freed;
        // Return the credit now, because the receive is usually posted.
        account.returned = account.returned.wrapping_add(1);
        if acked != 0 {
            s.acked = s.acked.plus(acked as u64);
            self.open -= s.silent_over();
        }
        // The acknowledgement may be delayed, because a sender that waits for one requests it.
        let half = self.config.window as u64 / 2;
        if head.op != 0
            || s.owed() > half
            || account.owed() > protocol.credits.after(account.credit_doublings) / 2
        {
            self.due.push(self.streams, stream as u32);
        }
        self.stats.arrived += 1;
        let tag = Tag { lo: head.words[0], hi: head.words[1] as u32 };
        let len = payload.len() as u64;
        // The matcher's cookie is set later, if the message is kept.
        match protocol.matcher.arrive(peer.0 as u32, tag, len, 0) {
            Ok(Arrive::Matched { context, .. }) => {
                let index = context as u32;
                let (slots, _) = protocol.requests.slots.parts();
                let Some(receive) = slots.get_mut(index as usize) else {
                    self.next_for_device(stream as u32, context, tag, payload);
                    return true;
                };
                protocol.stats.near += near(self.peers, peer.0);
                let (n, fit) = receive.fit(len);
                (receive.source, receive.tag, receive.len) = (source, tag, len);
                (receive.delivered, receive.fit) = (n, fit);
                let into = receive.ptr;
                if end(slots, &mut protocol.requests.ended, index, &mut self.pending.ends) {
                    protocol.requests.release(index);
                }
                // SAFETY: posting the receive checked the buffer against its region, and `fit`
                // limits `n` to the buffer. The payload is readable during this call. Nothing reads
                // the buffer before this returns.
                unsafe { copy_message(payload.as_ptr(), into, n as usize) };
            }
            Ok(Arrive::Stored(id)) => self.next_unexpected(stream as u32, Some(id), payload),
            Err(_) => self.next_unexpected(stream as u32, None, payload),
        }
        true
    }

    /// Handles an unexpected message. `id` is `None` if the matcher had no room for the message.
    #[inline(never)]
    fn next_unexpected(&mut self, stream: u32, id: Option<UnexpectedId>, payload: Untrusted<'_>) {
        if let Some(protocol) = &mut self.protocol {
            // The message is stored, so do not return its credit yet.
            let account = &mut protocol.accounts[stream as usize];
            account.returned = account.returned.wrapping_sub(1);
        }
        let kept = match id {
            Some(id) => self.store(stream, id, payload, NO_TOKEN),
            None => Err(Violation::Credit),
        };
        if let Err(violation) = kept {
            self.quarantine(self.streams[stream as usize].peer, violation);
        }
    }

    #[cold]
    #[inline(never)]
    fn next_for_device(&mut self, stream: u32, context: u64, tag: Tag, payload: Untrusted<'_>) {
        if let Some(protocol) = &mut self.protocol {
            let account = &mut protocol.accounts[stream as usize];
            account.returned = account.returned.wrapping_sub(1);
        }
        if let Err(violation) = self.matched_device(stream, context, tag, payload, NO_TOKEN) {
            self.quarantine(self.streams[stream as usize].peer, violation);
        }
    }
}
