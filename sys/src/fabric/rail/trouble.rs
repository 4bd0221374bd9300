//! Handles posts that failed, and a completion queue that fails.

use fishplate_core::error::{CompleteError, PeerError};
use fishplate_core::mem::Peer;
use fishplate_core::rail::Sink;

use super::peers::FIRST;
use super::pool::{ContextKind, Slot};
use super::{BATCH, FabricRail};
use crate::fabric::cq::CqError;
use crate::fabric::error::Code;

impl FabricRail {
    /// Handles a queue that returned an error. Reads all error entries, then the completions behind
    /// them.
    #[cold]
    #[inline(never)]
    pub(super) fn trouble<S: Sink>(&mut self, code: Code, budget: u32, sink: &mut S) -> u32 {
        let (mut code, mut count) = (code, 0);
        while code == Code::EAVAIL {
            match self.endpoint.error_completion() {
                Ok(error) => self.failed(error, sink),
                Err(Code::EAGAIN) => return count,
                Err(other) => {
                    code = other;
                    break;
                }
            }
            count += 1;
            if count == budget {
                return count;
            }
            let want = ((budget - count) as usize).min(BATCH);
            match self.read_queue(want) {
                Ok(more) if more < want => {
                    self.prepare(more);
                    self.complete_all(more, sink);
                    return count + more as u32;
                }
                Ok(_) => return count + self.full_batch(budget - count, sink),
                Err(Code::EAGAIN) => return count,
                Err(other) => code = other,
            }
        }
        self.break_down(code);
        count
    }

    #[cold]
    fn failed<S: Sink>(&mut self, error: CqError, sink: &mut S) {
        self.stats.errors += 1;
        self.stats.last_error = (error.code.0, error.provider);
        self.last_error = error;
        let slot = error.op_context.cast::<Slot>();
        if slot.is_null() {
            return;
        }
        // SAFETY: contexts of failed posts are from our pool and never move. The provider has
        // completed the post of this context.
        let (cx, peer, extra, (kind, orphan)) =
            unsafe { ((*slot).cx, (*slot).peer, (*slot).extra, (*slot).used_for()) };
        match kind {
            ContextKind::Free => return,
            // A truncated or cancelled receive. The error entry does not name the sender.
            ContextKind::Receive => return self.give_back(slot),
            ContextKind::Send => self.bounces.push(extra),
            // A broken connection ends reads as a closed endpoint does.
            ContextKind::Read => self.damaged |= self.frees_reads_twice,
            _ => {}
        }
        self.free(slot);
        if orphan {
            return;
        }
        self.settle(peer);
        let place = &mut self.peers.slots[peer as usize];
        // If both sides connect at once, libfabric 1.17's tcp may break the connection that it made
        // first. The engine repeats the messages that a peer has not answered.
        if kind == ContextKind::Send && error.code.is_break() && place.up && sink.repeats(cx) {
            place.first = FIRST;
            return;
        }
        // The rail never cancels posts, so `ECANCELED` means that the provider dropped the post
        // with its connection.
        let lost = error.code.is_disconnect() || error.code == Code::ECANCELED || !place.up;
        let end = if lost { CompleteError::PeerDown } else { CompleteError::Failed(error.code.0) };
        if lost {
            self.take_down(Peer(peer), PeerError::Lost);
        }
        sink.done(cx, Err(end));
    }
}
