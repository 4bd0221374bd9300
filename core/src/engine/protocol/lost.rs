//! Cleans up after failed and removed peers. A failure ends the receives that name the peer, and
//! the receives with a payload that is still at the peer. Receives from any source stay posted, and
//! payloads that have arrived can still be received. Removing the peer clears the rest. Slow paths.

use crate::error::PeerError;
use crate::op::Fault;
use crate::probe::probe;

use super::super::State;
use super::super::doubt::RECEIVES;
use super::super::list::NONE;
use super::super::window::{Action, Parked};
use super::Protocol;
use super::request::Received;
use super::slot::{DEVICE, Stage};
use super::stock::{Account, Kept};

impl<const RAILS: usize> State<'_, RAILS> {
    /// Marks the peers for which receives wait. Examines a part of the table, and returns whether
    /// it was the last part.
    #[cold]
    pub(in super::super) fn examine_receives(&mut self) -> bool {
        let Some(protocol) = &self.protocol else { return true };
        let (used, first) = (protocol.requests.slots.used(), self.doubts.receive);
        let end = used.min(first.saturating_add(RECEIVES));
        for index in first..end {
            let Some(protocol) = &self.protocol else { return true };
            let slot = &protocol.requests.slots[index as usize];
            let source = match slot.stage {
                Stage::Posted => protocol.matcher.source(slot.posted).map(|source| source as u16),
                Stage::Claimed | Stage::Dequeued | Stage::Ended => None,
                _ => slot.source.get().map(|source| source.index),
            };
            if let Some(source) = source {
                self.awaits_slot(source);
            }
        }
        self.doubts.receive = if end == used { 0 } else { end };
        end == used
    }

    #[cold]
    pub(in super::super) fn fail_matching(&mut self, peer: u16, why: PeerError) {
        let failed = Received::Failed(Fault::Peer(why));
        let Some(Protocol { matcher, requests, .. }) = &mut self.protocol else { return };
        let ends = &mut self.pending.ends;
        matcher.fail_source(peer as u32, |_, context| {
            let index = (context & !DEVICE) as u32;
            requests.slots[index as usize].spoil(failed);
            requests.end(index, ends);
        });
        let count = self.protocol.as_ref().map_or(0, |protocol| protocol.requests.slots.used());
        for index in 0..count {
            let Some(protocol) = &mut self.protocol else { return };
            let slot = &protocol.requests.slots[index as usize];
            if slot.source.get().is_none_or(|source| source.index != peer) {
                continue;
            }
            match slot.stage {
                Stage::Chunks => self.fail_receive(index, failed),
                Stage::ChunksDevice => {
                    protocol.outgoing.free(slot.token as u32);
                    self.fail_receive(index, failed);
                }
                Stage::Read(_) | Stage::ReadDevice => {
                    protocol.requests.remove_due(index);
                    self.fail_receive(index, failed);
                }
                Stage::Tell(_) => {
                    protocol.requests.remove_due(index);
                    let header = core::mem::replace(
                        &mut protocol.requests.slots[index as usize].header,
                        NONE,
                    );
                    protocol.requests.end(index, &mut self.pending.ends);
                    if header != NONE {
                        probe!("rendezvous_end", index, 0u64);
                        self.give_back(Kept::Header(header), false);
                    }
                }
                // The payload has already arrived.
                Stage::Place(_) | Stage::PlaceOurs => {}
                // The pass that continues the receive, or the completion of its read, ends it.
                Stage::InHand | Stage::Reading | Stage::ReadingDevice => {}
                Stage::Posted | Stage::Ended | Stage::Dequeued => {}
                // A deferred send fails when it is posted, and a send in flight with its operation.
                Stage::Deferred | Stage::Sending | Stage::Claimed => {}
            }
        }
    }

    #[cold]
    pub(in super::super) fn forget_matching(&mut self, peer: u16) {
        self.forget_placing(peer);
        for context in 0..self.config.contexts {
            let stream = self.stream_of(context as u8, peer);
            for place in 0..self.config.window {
                let (_, cells) = self.window(stream);
                if let Some(Parked { what: Action::Tagged { kept, .. }, .. }) = cells.waiting(place)
                {
                    self.give_back(Kept::unpack(kept), false);
                }
            }
        }
        let Some(protocol) = &mut self.protocol else { return };
        // The ids of unexpected and claimed messages become stale here. Their memory is freed
        // below.
        protocol.matcher.forget_source(peer as u32);
        // Receives that still read from the peer, or that have not ended since the peer failed,
        // drop their header here. The memory of the headers is freed below.
        let used = protocol.requests.slots.used() as usize;
        for slot in &mut protocol.requests.slots[..used] {
            if slot.source.get().is_some_and(|source| source.index == peer) {
                slot.header = NONE;
            }
        }
        let peers = self.peers.len() as u32;
        let theirs = |stream: u32| stream != NONE && stream % peers == peer as u32;
        for index in protocol.blocks.used() {
            if theirs(protocol.blocks.slots[index as usize].stream) {
                protocol.blocks.free(index);
                protocol.shorts += protocol.blocks.is_short(index) as u32;
            }
        }
        for index in 0..protocol.headers.used() {
            if theirs(protocol.headers.slots[index as usize].stream) {
                protocol.headers.free(index);
            }
        }
        for context in 0..self.config.contexts as u32 {
            let account = &mut protocol.accounts[(context * peers + peer as u32) as usize];
            protocol.stats.eager += account.at_once;
            self.stats.posted += account.at_once;
            protocol.credits.take_back(account.credit_doublings);
            protocol.waiting.take_back(account.header_doublings);
            protocol.shorts += account.shorts_open();
            *account = Account::EMPTY;
        }
    }
}
