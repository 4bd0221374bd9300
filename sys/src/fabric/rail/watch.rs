//! Detects, reports and removes failed peers. Slow path.
//!
//! When a peer's process dies, some providers complete posts with errors, some retry for ever, and
//! some return `FI_EAGAIN` for every post. So the rail watches for signs of life. A pause of this
//! process fails no peer, because the deadline counts only with enough polls. The rail cannot know
//! whether the peer's process is alive. So it reports [`PeerError::Silent`], never `Died`.

use core::mem;

use fishplate_core::error::{CompleteError, PeerError};
use fishplate_core::mem::Peer;
use fishplate_core::rail::Sink;

use super::complete::report;
use super::fence::Return;
use super::pool::ContextKind;
use super::{Event, FabricRail};
use crate::clock::monotonic_ns;
use crate::fabric::error::Code;
use crate::fabric::raw::FI_ADDR_NOTAVAIL;

/// After an expired deadline the engine may keep the peer: the peer may only be stopped, and
/// another rail may lead to it. After this many deadlines the rail itself fails the peer.
const PATIENCE: u64 = 6;

/// Minimum number of polls within a deadline before the deadline counts as expired.
const ENOUGH: u32 = 1024;

/// A peer is reported as silent after this time, in nanoseconds, and this number of polls. The
/// engine examines whether only this rail holds it up.
const SOON: u64 = 80_000_000;
const FEW: u32 = 8;

impl FabricRail {
    pub(super) fn watch<S: Sink>(&mut self, sink: &mut S) {
        let now = monotonic_ns().max(1);
        self.check_knocks(now);
        self.search_connections(now);
        self.look(sink);
        while let Some(event) = self.events.pop_front() {
            report(event, sink);
        }
    }

    /// Checks all peers for expired deadlines. Reads the clock; makes no system call.
    #[cold]
    pub(super) fn look<S: Sink>(&mut self, sink: &mut S) {
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
            if slot.fenced {
                self.report_up(peer as u16, now);
                continue;
            }
            // A rejection counts only if the rail has room: no post to another peer is outstanding,
            // or other posts are accepted.
            let starved = slot.is_refused() && (total == slot.outstanding() || others_go_on);
            if slot.outstanding() == 0 && !starved {
                slot.since = 0;
                continue;
            }
            if slot.since == 0 || slot.marked != slot.heard() {
                (slot.since, slot.marked, slot.polls) = (now, slot.heard(), polls);
                continue;
            }
            let (polled, silent) = (polls.wrapping_sub(slot.polls), now - slot.since);
            let (peer, up) = (Peer(peer as u16), slot.up);
            if up && self.caps.fences && silent >= SOON && polled >= FEW {
                sink.silent(peer, false);
            }
            let Some(deadline) = deadline.filter(|_| polled >= ENOUGH) else { continue };
            let patient = up && silent / PATIENCE < deadline;
            if silent >= deadline && (!patient || sink.silent(peer, true)) {
                let slot = &mut self.peers.slots[usize::from(peer.0)];
                slot.since = now;
                self.take_down(peer, PeerError::Silent);
                self.abandon(peer, Code(libc::ETIMEDOUT));
            }
        }
    }

    /// Fails a peer: posts to it are rejected and its arrivals are dropped. Outstanding posts may
    /// still complete until the deadline.
    #[cold]
    pub(super) fn take_down(&mut self, peer: Peer, why: PeerError) {
        if self.peers.take_down(peer.0) {
            self.peers.slots[peer.0 as usize].refused = false;
            self.tell(Event::Down(peer, why));
        }
    }

    /// Completes a peer's outstanding posts as unknown; the provider may still access their memory.
    fn abandon(&mut self, peer: Peer, code: Code) {
        self.close_batch();
        if self.held.is_some_and(|held| {
            // SAFETY: the context belongs to the held write, and the provider has not seen it.
            unsafe { (*held.slot).peer == peer.0 }
        }) {
            self.drop_held(code);
        }
        for index in 0..self.caps.depth as usize {
            let slot = self.pool.at(index);
            // SAFETY: the index is in range. The provider does not access the fields that are read
            // and written here.
            let cx = unsafe {
                if matches!((*slot).kind, ContextKind::Free | ContextKind::Orphan)
                    || (*slot).peer != peer.0
                {
                    continue;
                }
                ((*slot).was, (*slot).kind) = ((*slot).kind, ContextKind::Orphan);
                (*slot).cx
            };
            self.stats.orphans += 1;
            self.tell(Event::Done(cx, Err(CompleteError::Unknown(code.0))));
        }
        let slot = &mut self.peers.slots[peer.0 as usize];
        slot.ended = slot.posted;
    }

    pub(super) fn drop_held(&mut self, code: Code) {
        let Some(held) = self.held.take() else { return };
        // SAFETY: the context belongs to the held write, and the provider has not seen it.
        let cx = unsafe {
            let cx = (*held.slot).cx;
            self.pool.give(held.slot);
            cx
        };
        self.tell(Event::Done(cx, Err(CompleteError::Failed(code.0))));
    }

    pub(super) fn forget(&mut self, peer: Peer) {
        self.expected.take(peer.0);
        if !self.peers.slots.get(peer.0 as usize).is_some_and(|slot| slot.attached) {
            return;
        }
        self.take_down(peer, PeerError::Closed);
        self.abandon(peer, Code::ECANCELED);
        self.events.retain(
            |event| !matches!(event, Event::Down(other, _) | Event::Up(other) if *other == peer),
        );
        self.owed.retain(|(other, _)| *other != peer.0);
        self.imports.forget(peer.0);
        let addr = self.peers.slots[peer.0 as usize].addr;
        self.returns[peer.0 as usize] = Return::default();
        self.peers.detach(peer.0);
        if addr == FI_ADDR_NOTAVAIL {
            return;
        }
        // On an error the provider keeps an unused address, which is harmless. SAFETY: `addr` was
        // the peer's `fi_addr_t`. The slot is free, so no post uses it any more.
        let _ = unsafe { self.endpoint.remove(addr) };
    }

    /// Marks the rail as broken: the completion queue itself has failed, so the outcome of every
    /// post is unknown.
    #[cold]
    pub(super) fn break_down(&mut self, code: Code) {
        if !mem::replace(&mut self.broken, true) {
            self.lose_all(code);
        }
    }

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
