//! Fences peers by closing the endpoint and opening a new endpoint, if the persona says that
//! closing ends all arrivals. Attaches fenced peers again. Slow path: makes system calls and
//! allocates.
//!
//! Removing a peer from the address vector does not fence it: its connection stays, and its writes
//! in flight still land (`net` of libfabric 1.17). A closed endpoint has no connections, and no
//! peer knows the address of the new endpoint. So a fence cuts off all peers of the rail. They are
//! reported as lost and stay fenced until they are attached again. If the interface has lost its
//! address, no new endpoint can be opened; the rail retries when it attaches a peer again.
//!
//! The domain keeps what a closed endpoint leaves behind. `net` of libfabric 1.17.0 [frees the
//! record of a read twice](crate::fabric::persona::Persona::frees_reads_twice) if the endpoint is
//! closed while the data arrives. If a connection was accepted, and its request arrives after that,
//! `net` accesses the freed endpoint. So with this version, after a fence, the rail opens another
//! domain, registers all memory there under the same keys, and closes the old domain. A peer that
//! closes the connection during a read may cause the same double free, if one of our sends fails
//! before the read.
//!
//! If a peer has closed its own endpoint, its connections are gone, and the rail keeps its endpoint
//! open. It marks the peer as fenced once the provider has completed all posts to it. There is one
//! exception: if a read has failed with the connection, and the rail has no other peers, the rail
//! closes its endpoint too. With other peers, it waits for the next fence that closes the endpoint.
//!
//! Some milliseconds after the fence the rail reports the peer as up. The pause doubles if the peer
//! is fenced again soon after its return. The report is repeated at growing intervals.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem;
use core::time::Duration;

use fishplate_core::error::{AttachError, CompleteError, PeerError};
use fishplate_core::mem::Peer;
use fishplate_core::rail::{Fence, REOPEN_MAX};

use super::address::Address;
use super::complete::is_arrival;
use super::memory::Registered;
use super::peers::PeerSlot;
use super::pool::{ContextKind, Slot};
use super::setup::open_endpoint;
use super::{BATCH, Event, FabricRail};
use crate::clock::monotonic_ns;
use crate::fabric::domain::Domain;
use crate::fabric::error::{CallError, Code};
use crate::fabric::raw::*;

/// The minimum and maximum pause before a fenced peer may return.
const PAUSE: u64 = Duration::from_millis(5).as_nanos() as u64;
const PAUSE_MAX: u64 = Duration::from_secs(10).as_nanos() as u64;

/// The maximum time between two reports that a peer may return.
const UP_MAX: u64 = Duration::from_secs(1).as_nanos() as u64;

/// If a peer is fenced more than this time after its return, it starts again with the minimum
/// pause.
const CALM: u64 = Duration::from_secs(20).as_nanos() as u64;

/// When a fenced peer may return. All times are in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Return {
    /// `from`: time of the first report as up after the last fence. `at`: time of the next report.
    from: u64,
    at: u64,
    /// Time between the next two reports.
    wait: u64,
    /// Minimum time from the last fence to the peer's return.
    pause: u64,
    /// Time at which the peer last returned, or 0 if the peer has never returned.
    since: u64,
}

impl FabricRail {
    pub(super) fn cut_off(&mut self, peer: Peer) -> Fence {
        match self.peers.slots.get(peer.0 as usize) {
            Some(slot) if slot.fenced => return Fence::Fenced,
            Some(slot) if slot.attached => {}
            _ => return Fence::Unknown,
        }
        if !self.caps.fences || self.broken {
            return Fence::Unknown;
        }
        self.damaged |= self.frees_reads_twice;
        if let Err(error) = self.endpoint.close() {
            // The endpoint is still open, so the provider may still execute all posts.
            self.break_down(error.code);
            return Fence::Unknown;
        }
        self.drop_held(Code::ECANCELED);
        self.drain();
        self.take_back();
        // The caller reports the loss of this peer, so no event is queued for it.
        self.peers.take_down(peer.0);
        let now = monotonic_ns();
        for other in 0..self.peers.slots.len() as u16 {
            if self.peers.slots[other as usize].attached {
                self.shut_out(Peer(other), now);
            }
        }
        let back = &mut self.returns[peer.0 as usize];
        back.pause = match back.since != 0 && now - back.since < CALM {
            true => (2 * back.pause).min(PAUSE_MAX),
            false => PAUSE,
        };
        back.from = now + back.pause;
        (back.at, back.wait) = (back.from, PAUSE);
        self.owed.clear();
        self.open_again();
        self.hurry();
        Fence::Fenced
    }

    /// Implements [`Rail::fence_left`](fishplate_core::rail::Rail::fence_left).
    pub(super) fn part(&mut self, peer: Peer) -> Fence {
        match self.peers.slots.get(peer.0 as usize) {
            Some(slot) if slot.fenced => return Fence::Fenced,
            Some(slot) if slot.attached && !self.broken => {}
            _ => return Fence::Unknown,
        }
        // The caller reports the loss of this peer, so no event is queued for it.
        self.peers.take_down(peer.0);
        if !self.close_batch() || self.pool.has_posts_to(peer.0) {
            return Fence::Pending;
        }
        if self.damaged && !self.has_others(peer) {
            return Fence::Unknown;
        }
        self.owed.retain(|(other, _)| *other != peer.0);
        self.shut_out(peer, monotonic_ns());
        Fence::Fenced
    }

    fn has_others(&self, peer: Peer) -> bool {
        let mut slots = self.peers.slots.iter().enumerate();
        slots.any(|(at, slot)| at != peer.0 as usize && slot.attached && !slot.fenced)
    }

    pub(super) fn shut_out(&mut self, peer: Peer, now: u64) {
        self.take_down(peer, PeerError::Lost);
        let slot = &mut self.peers.slots[peer.0 as usize];
        (slot.fenced, slot.refused, slot.since, slot.ended) = (true, false, 0, slot.posted);
        let back = &mut self.returns[peer.0 as usize];
        (back.at, back.wait) = (now + PAUSE, PAUSE);
    }

    pub(super) fn open_again(&mut self) -> bool {
        if self.endpoint.is_open() {
            return true;
        }
        self.unposted.clear();
        let opened = match self.damaged {
            true => self.replace_domain(),
            false => {
                self.endpoint.reopen(&self.domain, &self.offer.info).map_err(|error| error.code)
            }
        };
        if let Err(code) = opened {
            self.note_error(code);
            return false;
        }
        for index in (self.caps.depth..self.pool.len() as u32).rev() {
            self.unposted.push(index);
        }
        self.hurry();
        true
    }

    /// Opens another domain with an endpoint, registers all memory in it under the same keys, and
    /// closes the old domain.
    ///
    /// # Errors
    /// The provider's code. The rail has no endpoint, and everything else is as before.
    #[cold]
    fn replace_domain(&mut self) -> Result<(), Code> {
        let of_call = |error: CallError| error.code;
        let domain =
            Domain::open(Arc::clone(self.domain.fabric()), &self.offer.info).map_err(of_call)?;
        let mut endpoint = open_endpoint(&domain, &self.offer, &self.config).map_err(of_call)?;
        let mut regions = Vec::with_capacity(self.config.max_regions as usize);
        for at in 0..self.regions.len() {
            let Registered { key, ptr, len, ordinal, .. } = self.regions[at];
            let memory = self.register_in(&domain, (ptr, len), ordinal, key);
            let memory = memory.map_err(|error| match error {
                AttachError::System(code) => Code(code),
                _ => Code(FI_EOTHER),
            })?;
            if memory.key() != key {
                return Err(Code(FI_ENOKEY));
            }
            regions.push(Registered { key, ptr, len, ordinal, memory });
        }
        endpoint.take_over(&self.endpoint).map_err(of_call)?;
        self.endpoint = endpoint;
        for region in mem::replace(&mut self.regions, regions) {
            if let Err((memory, error)) = region.memory.close() {
                self.keep_memory(memory, error.code);
            }
        }
        self.domain = domain;
        self.peers.forget_addresses();
        self.damaged = false;
        self.stats.replaced += 1;
        Ok(())
    }

    pub(super) fn report_up(&mut self, peer: u16, now: u64) {
        let back = &mut self.returns[peer as usize];
        if now >= back.at && !self.broken {
            back.at = now + back.wait.max(PAUSE);
            back.wait = (2 * back.wait).clamp(PAUSE, UP_MAX);
            self.tell(Event::Up(Peer(peer)));
        }
    }

    /// Implements [`Rail::reopen`](fishplate_core::rail::Rail::reopen).
    pub(super) fn offer_again(&mut self, peer: Peer, into: &mut [u8; REOPEN_MAX]) -> Option<usize> {
        let &PeerSlot { attached, fenced, .. } = self.peers.slots.get(peer.0 as usize)?;
        if !attached || self.broken {
            return None;
        }
        let early = monotonic_ns() < self.returns[peer.0 as usize].from;
        if fenced && (early || !self.events.is_empty()) || !self.open_again() {
            return None;
        }
        let address = self.address().ok()?;
        into.get_mut(..address.len())?.copy_from_slice(&address);
        Some(address.len())
    }

    /// Implements [`Rail::rejoin`](fishplate_core::rail::Rail::rejoin).
    pub(super) fn attach_again(&mut self, peer: Peer, address: &[u8]) -> Result<(), AttachError> {
        let theirs = Address::decode(address)?;
        let slot = self.peers.slots.get(peer.0 as usize).copied().filter(|slot| slot.attached);
        let slot = slot.ok_or(AttachError::UnknownPeer)?;
        if !slot.fenced && self.returns[peer.0 as usize].since == 0 {
            return Err(AttachError::BadHandle);
        }
        let same = (theirs.notify, theirs.number) == (self.notify, slot.number);
        let form = self.endpoint.form();
        if !same || theirs.format != form.format() || !form.allows(theirs.provider) {
            return Err(AttachError::BadHandle);
        }
        if !self.open_again() {
            return Err(AttachError::System(self.stats.last_error.0));
        }
        if theirs.provider == self.endpoint.form().own() && theirs.number != self.number {
            return Err(AttachError::BadHandle);
        }
        // Read after `open_again`, which may replace the address vector.
        let addr = self.peers.slots[peer.0 as usize].addr;
        self.peers.detach(peer.0);
        if addr != FI_ADDR_NOTAVAIL {
            // On an error the provider keeps an unused address, which is harmless. SAFETY: `addr`
            // was the peer's `fi_addr_t`. The slot is free, so no post uses it any more.
            let _ = unsafe { self.endpoint.remove(addr) };
        }
        let inserted = self.endpoint.insert(theirs.provider);
        let addr = *inserted.as_ref().unwrap_or(&FI_ADDR_NOTAVAIL);
        self.peers.attach(peer.0, addr, slot.number, self.short_below);
        self.knocks.note(peer.0, theirs.provider);
        self.searches.resume();
        let PeerSlot { posted, ended, injected, arrived, .. } = slot;
        let place = &mut self.peers.slots[peer.0 as usize];
        *place = PeerSlot { posted, ended, injected, arrived, ..*place };
        match inserted {
            Ok(_) => {
                self.returns[peer.0 as usize].since = monotonic_ns();
                Ok(())
            }
            Err(error) => {
                self.peers.take_down(peer.0);
                self.peers.slots[peer.0 as usize].fenced = true;
                Err(AttachError::System(error.code.0))
            }
        }
    }

    /// Reads the completions of the closed endpoint. Flushes the device, then reports completed
    /// posts. Drops arrivals.
    fn drain(&mut self) {
        loop {
            match self.endpoint.completions(self.entries.room(BATCH)) {
                Ok(0) => return,
                Ok(count) => {
                    self.prepare(count);
                    for at in 0..count {
                        // Not counted as an arrival: its source may be a pointer of another
                        // process.
                        let entry = self.entries.room(count)[at];
                        let arrived = is_arrival(&entry) || entry.flags & FI_RECV != 0;
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

    fn take_back(&mut self) {
        for index in 0..self.caps.depth as usize {
            self.give_up(self.pool.at(index), Err(CompleteError::PeerDown));
        }
    }

    fn give_up(&mut self, slot: *mut Slot, result: Result<(), CompleteError>) {
        // SAFETY: the context is from our pool and never moves. The provider no longer uses it,
        // because its endpoint is closed.
        let (cx, extra, (kind, orphan)) =
            unsafe { ((*slot).cx, (*slot).extra, (*slot).used_for()) };
        match kind {
            ContextKind::Free | ContextKind::Receive | ContextKind::Orphan => return,
            ContextKind::Send => self.bounces.push(extra),
            ContextKind::Atomic if result.is_ok() && !orphan => {
                // SAFETY: the poster guarantees 8 writable bytes until the completion is reported.
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
