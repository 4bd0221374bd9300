//! Peers that are gone: noticing, reporting, forgetting. All of it slow.
//!
//! Providers do not agree on what happens when a peer's process dies. Some end what was posted with
//! errors, some retry for ever and some answer `FI_EAGAIN` to every post. So what counts is whether
//! anything comes back: a peer that owes an end, or to which no post is accepted although others
//! are, and from which nothing has come since a deadline, is given up. That we were not running
//! ourselves is not held against it: the rail must have been polled meanwhile. Whether its process
//! lives the rail cannot know: it reports [`PeerError::Lost`], never that a peer died.

use core::mem;

use fishplate_core::error::{CompleteError, PeerError};
use fishplate_core::mem::Peer;
use fishplate_core::rail::Sink;

use super::complete::report;
use super::pool::Kind;
use super::{Event, FabricRail};
use crate::clock::monotonic_ns;
use crate::fabric::error::Code;

/// Polls that must have been made before a deadline counts.
const ENOUGH: u32 = 1024;

impl FabricRail {
    /// Looks who is overdue, and reports everything that waits to be reported.
    pub(super) fn watch<S: Sink>(&mut self, sink: &mut S) {
        self.look();
        while let Some(event) = self.events.pop_front() {
            report(event, sink);
        }
    }

    /// Looks who is overdue. Reads the clock, and nothing else of the system.
    #[cold]
    pub(super) fn look(&mut self) {
        let (now, polls) = (monotonic_ns().max(1), self.polls());
        let slots = &self.peers.slots;
        let accepted = slots.iter().fold(0u32, |sum, slot| sum.wrapping_add(slot.accepted()));
        let total: u32 = slots.iter().map(|slot| slot.outstanding()).sum();
        let others_go_on = mem::replace(&mut self.accepted_marked, accepted) != accepted;
        let deadline = self.config.deadline.map(|deadline| deadline.as_nanos() as u64);
        for peer in 0..self.peers.slots.len() {
            let slot = &mut self.peers.slots[peer];
            if !slot.attached {
                continue;
            }
            // A refusal is held against a peer only if it is not for want of room that others take.
            let starved = slot.is_refused() && (total == slot.outstanding() || others_go_on);
            if slot.outstanding() == 0 && !starved {
                slot.since = 0;
                continue;
            }
            if slot.since == 0 || slot.marked != slot.heard() {
                (slot.since, slot.marked, slot.polls) = (now, slot.heard(), polls);
                continue;
            }
            if polls.wrapping_sub(slot.polls) < ENOUGH {
                continue;
            }
            if deadline.is_some_and(|deadline| now - slot.since >= deadline) {
                slot.since = now;
                let peer = Peer(peer as u16);
                self.take_down(peer, PeerError::Lost);
                self.abandon(peer, Code(libc::ETIMEDOUT));
            }
        }
    }

    /// A peer is gone: nothing is posted to it and nothing heard from it any more. What it owes is
    /// still awaited, up to the deadline.
    #[cold]
    pub(super) fn take_down(&mut self, peer: Peer, why: PeerError) {
        if self.peers.take_down(peer.0) {
            self.peers.slots[peer.0 as usize].refused = false;
            self.tell(Event::Down(peer, why));
        }
    }

    /// Ends what a peer owes; the provider may still touch that memory.
    fn abandon(&mut self, peer: Peer, code: Code) {
        self.close_batch();
        if let Some(held) = self.held {
            // SAFETY: a kept write's context, which the provider has not seen.
            let (of, cx) = unsafe { ((*held.slot).peer, (*held.slot).cx) };
            if of == peer.0 {
                self.held = None;
                // SAFETY: as above.
                unsafe { self.pool.give(held.slot) };
                self.tell(Event::Done(cx, Err(CompleteError::Failed(code.0))));
            }
        }
        for index in 0..self.caps.depth as usize {
            let slot = self.pool.at(index);
            // SAFETY: inside the pool. What is read and written here the provider leaves alone.
            let cx = unsafe {
                if matches!((*slot).kind, Kind::Free | Kind::Orphan) || (*slot).peer != peer.0 {
                    continue;
                }
                ((*slot).was, (*slot).kind) = ((*slot).kind, Kind::Orphan);
                (*slot).cx
            };
            self.stats.orphans += 1;
            self.tell(Event::Done(cx, Err(CompleteError::Unknown(code.0))));
        }
        let slot = &mut self.peers.slots[peer.0 as usize];
        slot.ended = slot.posted;
    }

    /// Detaches a peer.
    pub(super) fn forget(&mut self, peer: Peer) {
        if !self.peers.slots.get(peer.0 as usize).is_some_and(|slot| slot.attached) {
            return;
        }
        self.take_down(peer, PeerError::Closed);
        self.abandon(peer, Code::ECANCELED);
        self.events.retain(|event| !matches!(event, Event::Down(other, _) if *other == peer));
        self.owed.retain(|(other, _)| *other != peer.0);
        self.imports.forget(peer.0);
        let addr = self.peers.slots[peer.0 as usize].addr;
        // A provider that refuses keeps an address that nobody uses; there is nobody to tell.
        // SAFETY: the peer's number since it was attached, and its place is freed below.
        let _ = unsafe { self.endpoint.remove(addr) };
        self.peers.detach(peer.0);
    }

    /// The queue itself has failed: nothing can be known of any post.
    #[cold]
    pub(super) fn break_down(&mut self, code: Code) {
        if !mem::replace(&mut self.broken, true) {
            self.lose_all(code);
        }
    }

    /// Gives all peers up.
    #[cold]
    pub(super) fn lose_all(&mut self, code: Code) {
        self.note_error(code);
        for peer in 0..self.peers.slots.len() as u16 {
            if self.peers.slots[peer as usize].attached {
                self.take_down(Peer(peer), PeerError::Lost);
                self.abandon(Peer(peer), code);
            }
        }
    }
}
