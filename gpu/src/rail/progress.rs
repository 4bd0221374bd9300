//! Polls the device, done words and bounce slots, and completes the operations of failed peers and
//! lost devices. The budget of a poll bounds its work. Only a detach allocates or waits.

use std::time::Instant;

use fishplate_core::error::{CompleteError, PeerError, PostError, Violation};
use fishplate_core::mem::Peer;
use fishplate_core::rail::{Rail, Sink};
use fishplate_core::sync::host::Host;

use super::GpuRail;
use super::memory::Reach;
use super::queue::{Bounced, End, OpKind, Owner};
use crate::Device;
use crate::done::Status;

impl<D: Device, H: Host> GpuRail<D, H> {
    #[inline]
    pub(super) fn poll_device<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let mut count = 0;
        if !self.ops.is_empty() || self.streams.out() > 0 || !self.ended.is_empty() {
            count += self.poll_ops(budget, sink);
        }
        if !self.active.is_empty() {
            count += self.poll_peers(budget - count, sink);
        }
        count
    }

    #[inline(never)]
    fn poll_ops<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        for _ in 0..self.telling.len() {
            let Some(index) = self.telling.pop_front() else { break };
            self.settle(index);
        }
        let mut steps = 0;
        // The budget also bounds the handled completions of the device. Each completion may notify
        // its target at once.
        while steps < budget.max(1)
            && self.ended.len() < usize::from(self.config.ops)
            && self.step_stream()
        {
            steps += 1;
        }
        let mut count = 0;
        while count < budget {
            let Some((cx, result)) = self.ended.pop_front() else { break };
            sink.done(cx, result);
            count += 1;
        }
        count
    }

    #[inline]
    fn poll_peers<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let mut count = 0;
        let n = self.active.len();
        self.first = if self.first + 1 >= n { 0 } else { self.first + 1 };
        for i in 0..n {
            if count >= budget {
                break;
            }
            let peer = self.active[(self.first + i) % n];
            let Some(known) = self.peers[usize::from(peer.0)].as_deref_mut() else { continue };
            if known.down {
                continue;
            }
            let Some(shared) = known.shared.as_mut() else { continue };
            let relays = shared.relay.is_some();
            if let Some((_, receiver)) = shared.done.as_mut() {
                let mut failures = 0;
                let seen = receiver.poll(budget - count, |status, data| match status {
                    Status::Landed => sink.landed(peer, data),
                    Status::Failed => failures += 1,
                });
                self.stats.failures_heard += failures;
                match seen {
                    Ok((seen, told)) => {
                        count += seen;
                        if told {
                            self.inner.mark_due(peer);
                        }
                    }
                    Err(_) => self.give_up(peer, Violation::Counter),
                }
            }
            if relays && self.bounce(peer) {
                self.pace.found();
            }
        }
        while count < budget {
            let Some((peer, data)) = self.landed.pop_front() else { break };
            sink.landed(peer, data);
            count += 1;
        }
        count
    }

    #[cold]
    fn give_up(&mut self, peer: Peer, violation: Violation) {
        self.inner.quarantine(peer, PeerError::Protocol(violation));
        self.fallen.push(peer);
    }

    /// Returns false if there is no completion.
    fn step_stream(&mut self) -> bool {
        match self.streams.next(self.sharing.driver()) {
            Ok(None) => false,
            Ok(Some((owner, end))) => {
                let error = match end {
                    End::Reached => None,
                    End::Unknown(code) => {
                        self.unsure = true;
                        Some(CompleteError::Unknown(code))
                    }
                };
                self.over(owner, error);
                true
            }
            Err(code) => {
                self.lose(code);
                false
            }
        }
    }

    /// Makes progress while a slow path waits. Returns false if nothing is in flight.
    pub(super) fn step_device(&mut self) -> bool {
        if self.streams.out() == 0 {
            return false;
        }
        if !self.step_stream() {
            std::thread::yield_now();
        }
        true
    }

    fn over(&mut self, owner: Owner, error: Option<CompleteError>) {
        match owner {
            Owner::Op(index) => {
                if let Some(op) = self.ops.get_mut(index) {
                    op.parts = op.parts.saturating_sub(1);
                    if let Some(error) = error {
                        // An unknown outcome replaces a failure, because the data may still land.
                        op.error = Some(error);
                    }
                }
                self.settle(index);
            }
            Owner::Filling(bounced) | Owner::Emptying(bounced) => {
                let Bounced { peer, life, number, op, local } = bounced;
                if let Some(slot) = local {
                    self.locals[slot as usize].uses -= 1;
                }
                match (self.peer(peer).filter(|known| known.life == life), op) {
                    (Some(known), _) => {
                        known.pieces -= 1;
                        match owner {
                            Owner::Filling(_) => self.filled(peer, number, error),
                            _ => self.emptied(peer, number, error),
                        }
                    }
                    // The peer was detached before the copy ended.
                    (None, Some(op)) => self.over(Owner::Op(op), error),
                    (None, None) => {}
                }
            }
        }
    }

    pub(super) fn settle(&mut self, index: u32) {
        let Some(op) = self.ops.get_mut(index) else { return };
        let waits = matches!(op.kind, OpKind::Read { left, .. } if left > 0 && op.error.is_none());
        if op.parts > 0 || op.unposted || waits {
            return;
        }
        let op = *op;
        let life = self.peer(op.peer).filter(|known| !known.down).map(|known| known.life);
        let up = life == Some(op.life) && self.inner.is_up(op.peer);
        if let Some(data) = op.data
            && !op.reported
            && up
            && !self.tell(index, op.ticket, op.word_queued, op.error, data, op.peer)
        {
            return;
        }
        // If the outcome is unknown, the device may still access the peer's memory, so the memory
        // stays open.
        if let Some(id) = op.import
            && !matches!(op.error, Some(CompleteError::Unknown(_)))
        {
            self.sharing.imports_mut().end(id);
        }
        if let Some(slot) = op.local {
            self.locals[slot as usize].uses -= 1;
        }
        self.ops.remove(index);
        if !op.reported {
            let result = match op.error {
                Some(error) => Err(error),
                None if !up => Err(CompleteError::PeerDown),
                None => Ok(()),
            };
            self.ended.push_back((op.cx, result));
        }
    }

    /// Notifies the target of a completed write. Returns false if the lane has no room yet.
    fn tell(
        &mut self,
        index: u32,
        ticket: Option<u64>,
        word_queued: bool,
        error: Option<CompleteError>,
        data: u32,
        peer: Peer,
    ) -> bool {
        match (ticket, error) {
            (Some(ticket), _) => {
                if let Some((sender, _)) = self.shared(peer).and_then(|shared| shared.done.as_mut())
                {
                    match error {
                        None if word_queued => {}
                        None => sender.store(ticket, Status::Landed, data),
                        Some(_) => sender.store(ticket, Status::Failed, data),
                    }
                }
                self.stats.told.0 += 1;
                self.inner.mark_due(peer);
            }
            (None, None) => match self.inner.land(peer, data) {
                Ok(()) => self.stats.told.1 += 1,
                Err(PostError::Again) => {
                    self.telling.push_back(index);
                    return false;
                }
                // The completion reports the failure.
                Err(_) => {}
            },
            (None, Some(_)) => {}
        }
        true
    }

    #[cold]
    fn lose(&mut self, code: i32) {
        self.lost.get_or_insert(code);
        self.unsure = true;
        while let Some(owner) = self.streams.abandon() {
            self.over(owner, Some(CompleteError::Unknown(code)));
        }
    }

    #[cold]
    pub(super) fn take_down(&mut self) {
        while let Some(peer) = self.fallen.pop() {
            let Some(known) = self.peer(peer) else { continue };
            known.down = true;
            self.drop_pieces(peer);
            self.expect();
        }
    }

    /// Waits until the device has finished the posts to the peer.
    #[cold]
    pub(super) fn detach_peer(&mut self, peer: Peer) {
        let Some(known) = self.peer(peer) else { return self.inner.detach(peer) };
        known.down = true;
        self.drop_pieces(peer);
        let deadline = Instant::now() + self.config.timeout;
        while self.is_moving(peer) && Instant::now() < deadline && self.step_device() {}
        let moving = self.is_moving(peer) || self.is_unsure();
        for index in self.ops.of(peer).collect::<Vec<_>>() {
            let Some(op) = self.ops.get_mut(index) else { continue };
            if op.parts == 0 {
                op.unposted = false;
                op.error.get_or_insert(CompleteError::PeerDown);
                self.settle(index);
            } else if !std::mem::replace(&mut op.reported, true) {
                // The device did not stop using the operation's memory in time.
                let cx = op.cx;
                self.ended.push_back((cx, Err(CompleteError::Unknown(libc::ETIMEDOUT))));
            }
        }
        self.telling.retain(|&index| self.ops.get_mut(index).is_some());
        self.landed.retain(|(other, _)| *other != peer);
        self.active.retain(|other| *other != peer);
        self.fallen.retain(|other| *other != peer);
        let Some(known) = self.peers[usize::from(peer.0)].take() else { return };
        for import in &known.imports {
            if let Reach::Open { id, .. } = import.reach {
                self.sharing.release(id);
            }
        }
        if let Some(shared) = known.shared {
            for (at, record) in [(shared.mine_at, shared.mine), (shared.theirs_at, shared.theirs)] {
                if at.is_some() && !moving {
                    // SAFETY: `moving` is false, so no work of the device accesses the segment.
                    let _ = unsafe { self.sharing.driver().unpin(record.ptr()) };
                }
            }
            if moving {
                // The device may still access both segments, so they stay mapped.
                std::mem::forget(shared.segment);
                if let Some(mut line) = self.inner.line(peer) {
                    line.keep(shared.number);
                }
            }
        }
        self.sharing.part(&mut self.inner, peer);
        self.inner.detach(peer);
        self.turn();
        self.expect();
    }

    fn is_moving(&mut self, peer: Peer) -> bool {
        let pieces = self.peer(peer).is_some_and(|known| known.pieces > 0);
        let mut ops = self.ops.of(peer).collect::<Vec<_>>().into_iter();
        pieces || ops.any(|index| self.ops.get_mut(index).is_some_and(|op| op.parts > 0))
    }
}
