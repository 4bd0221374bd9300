//! The message that most are: the next of its stream, with its payload, for a receive that is
//! there. Hot: no call but the copy of a longer payload. Whatever else it is, nothing has changed,
//! and `arrive` looks at everything about it.

use crate::error::Violation;
use crate::mem::{Peer, PeerId, Untrusted, copy_message};
use crate::sync::seq::truncate;

use super::super::State;
use super::super::list::NONE;
use super::super::tag::{Arrive, Tag, UnexpectedId};
use super::super::wire::NO_TOKEN;
use super::head::{self, Head};
use super::request::Sender;

impl<const RAILS: usize> State<'_, RAILS> {
    /// The usual case at once: the next message of its stream, with its payload, and nothing about
    /// its cursor or credits that has to be looked at closely. `false`: it is something else, and
    /// nothing changed.
    #[inline(always)]
    pub(super) fn next_tagged(&mut self, peer: Peer, bytes: Untrusted<'_>) -> bool {
        let Ok((head, payload)) = Head::read(bytes) else { return false };
        let Some(protocol) = &mut self.protocol else { return false };
        let count = self.peers.len();
        let stream = head.context as usize * count + peer.0 as usize;
        // Of a context that is not configured there is no stream; one that is shut is not
        // unhurried. Where the peer has asked to be told of what is yet to come, that is made due
        // below.
        let Some(s) = self.streams.get_mut(stream) else { return false };
        let Some(account) = protocol.accounts.get_mut(stream) else { return false };
        let acked = head.ack.wrapping_sub(truncate::<32>(s.acked.0));
        let freed = head.freed.wrapping_sub(account.freed);
        // The first look is one: the kind, an op of 0 or 1, a tag of 96 bits. An operation that is
        // not wholly posted is among those that are not acknowledged.
        if (head.kind ^ head::TAGGED) as u64 | head.op as u64 >> 1 | head.words[1] >> 32 != 0
            || peer.0 as usize >= count
            || !s.unhurried
            || acked as u64 > s.in_flight()
            || freed > account.used()
            || s.ops.head != NONE
            || payload.len() > protocol.blocks.size()
            || !s.window.take_in_order(head.word, self.mask)
        {
            return false;
        }
        let source = Sender::new(PeerId { index: peer.0, generation: s.generation });
        account.freed = head.freed;
        // Its credit goes back at once: most often its receive is there.
        account.returned = account.returned.wrapping_add(1);
        if acked != 0 {
            s.acked = s.acked.plus(acked as u64);
            self.open -= s.silent_over();
        }
        // An acknowledgement is not hurried: whoever waits for one asks, or says so in the message.
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
        // The matcher's word for what is kept of it comes afterwards, if that is needed.
        match protocol.matcher.arrive(peer.0 as u32, tag, len, 0) {
            Ok(Arrive::Matched { context, .. }) => {
                let Some(receive) = protocol.requests.slots.get_mut(context as u32 as usize) else {
                    self.next_for_device(stream as u32, context, tag, payload);
                    return true;
                };
                let (n, fit) = receive.fit(len);
                (receive.source, receive.tag, receive.len) = (source, tag, len);
                (receive.delivered, receive.fit) = (n, fit);
                let into = receive.ptr;
                protocol.requests.end(context as u32, &mut self.pending.ends);
                // SAFETY: the buffer was checked against its region when the receive was posted,
                // and `n` against the buffer; the payload is readable during this call. Nobody
                // looks at the buffer before this returns.
                unsafe { copy_message(payload.as_ptr(), into, n as usize) };
            }
            Ok(Arrive::Stored(id)) => self.next_unexpected(stream as u32, Some(id), payload),
            Err(_) => self.next_unexpected(stream as u32, None, payload),
        }
        true
    }

    /// Handles a message that no receive has matched: the matcher has stored it, or has no room.
    #[inline(never)]
    fn next_unexpected(&mut self, stream: u32, id: Option<UnexpectedId>, payload: Untrusted<'_>) {
        if let Some(protocol) = &mut self.protocol {
            // Not yet.
            let account = &mut protocol.accounts[stream as usize];
            account.returned = account.returned.wrapping_sub(1);
        }
        let kept = match id {
            Some(id) => self.store(stream, id, payload, NO_TOKEN),
            None => Err(Violation::Credit),
        };
        match kept {
            Ok(()) => self.due.push(self.streams, stream),
            Err(violation) => self.quarantine(self.streams[stream as usize].peer, violation),
        }
    }

    /// What follows for such a message when its receive is into a device's memory.
    #[cold]
    #[inline(never)]
    fn next_for_device(&mut self, stream: u32, context: u64, tag: Tag, payload: Untrusted<'_>) {
        if let Some(protocol) = &mut self.protocol {
            // Not yet.
            let account = &mut protocol.accounts[stream as usize];
            account.returned = account.returned.wrapping_sub(1);
        }
        if let Err(violation) = self.matched_device(stream, context, tag, payload, NO_TOKEN) {
            self.quarantine(self.streams[stream as usize].peer, violation);
        }
    }
}
