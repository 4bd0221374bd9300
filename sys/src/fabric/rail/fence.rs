//! Fences peers by replacing the endpoint, where the persona says that this ends all arrivals.
//! Slow path: opens and closes an endpoint, which makes system calls and allocates.
//!
//! Removing a peer from the address vector is no fence: its connection stays, and what it has sent
//! still lands (`net` of libfabric 1.17). A closed endpoint has no connections, and nobody knows
//! the address of the next one. So a fence costs all peers of the rail, which are reported as lost.
//! All of them are then fenced, until they are attached again.

use fishplate_core::error::{CompleteError, PeerError};
use fishplate_core::mem::Peer;
use fishplate_core::rail::Fence;

use super::pool::{ContextKind, Slot};
use super::{BATCH, Event, FabricRail};
use crate::fabric::error::Code;
use crate::fabric::raw::*;

impl FabricRail {
    /// Fences a peer, and with it all others.
    pub(super) fn cut_off(&mut self, peer: Peer) -> Fence {
        match self.peers.slots.get(peer.0 as usize) {
            Some(slot) if slot.fenced => return Fence::Fenced,
            Some(slot) if slot.attached => {}
            _ => return Fence::Unknown,
        }
        let bound = self.offer.info.domain().mr_mode & FI_MR_ENDPOINT != 0;
        if !self.offer.persona.fences || bound || self.broken {
            return Fence::Unknown;
        }
        self.drop_held(Code::ECANCELED);
        if let Err(error) = self.endpoint.replace(&self.domain, &self.offer.info) {
            self.note_error(error.code);
            return Fence::Unknown;
        }
        self.drain();
        self.take_back();
        // The caller handles this one.
        self.peers.take_down(peer.0);
        for other in 0..self.peers.slots.len() as u16 {
            if self.peers.slots[other as usize].attached {
                self.take_down(Peer(other), PeerError::Lost);
                let slot = &mut self.peers.slots[other as usize];
                (slot.fenced, slot.refused, slot.since, slot.ended) = (true, false, 0, slot.posted);
            }
        }
        self.owed.clear();
        self.unposted.clear();
        for index in (self.caps.depth..self.pool.len() as u32).rev() {
            self.unposted.push(index);
        }
        self.hurry();
        Fence::Fenced
    }

    /// Reads the completions of the closed endpoint. The posts among them are over; arrivals are
    /// dropped, as are those that come later.
    fn drain(&mut self) {
        loop {
            match self.endpoint.completions(self.entries.room(BATCH)) {
                Ok(0) => return,
                Ok(count) => {
                    for at in 0..count {
                        // The source of an arrival may be a pointer of another process.
                        let entry = self.entries.room(count)[at];
                        let arrived = entry.flags & (FI_REMOTE_CQ_DATA | FI_RECV) != 0;
                        if !arrived && !entry.op_context.is_null() {
                            self.give_up(entry.op_context.cast(), Ok(()));
                        }
                    }
                }
                Err(Code::EAVAIL) => match self.endpoint.error_completion() {
                    Ok(error) if !error.op_context.is_null() => {
                        self.give_up(error.op_context.cast(), Err(CompleteError::PeerDown));
                    }
                    Ok(_) => {}
                    Err(_) => return,
                },
                Err(_) => return,
            }
        }
    }

    /// Takes back all contexts that the closed endpoint has not completed.
    fn take_back(&mut self) {
        for index in 0..self.caps.depth as usize {
            self.give_up(self.pool.at(index), Err(CompleteError::PeerDown));
        }
    }

    /// Ends a post that the provider has completed.
    fn give_up(&mut self, slot: *mut Slot, result: Result<(), CompleteError>) {
        // SAFETY: contexts that come back are ours and stay in place; the provider is done with
        // this one, because its endpoint is closed.
        let (cx, extra, (kind, orphan)) = unsafe { ((*slot).cx, (*slot).extra, (*slot).used_for()) };
        match kind {
            ContextKind::Free | ContextKind::Receive | ContextKind::Orphan => return,
            ContextKind::Send => self.bounces.push(extra),
            ContextKind::Atomic if result.is_ok() && !orphan => {
                // SAFETY: writable for 8 bytes until the end is reported, as promised by its post.
                unsafe {
                    if !(*slot).fetch.is_null() {
                        (*slot).fetch.write((*slot).words[2]);
                    }
                }
            }
            _ => {}
        }
        self.free(slot);
        if !orphan {
            self.tell(Event::Done(cx, result));
        }
    }
}
