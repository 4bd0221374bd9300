//! The state of the messages about device memory at one end of a link. The state is dropped with
//! the link, so that nothing from an earlier incarnation of the peer survives. Slow path:
//! allocates.
//!
//! Everything that a peer can make grow is bounded. A correct peer may exceed the bounds on
//! unopened offers and on old versions of a buffer. Then this end drops the oldest, and requests
//! offers again when needed. A message that no correct peer sends ends the link.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::RangeInclusive;

use fishplate_shm::HandshakeError;
use fishplate_shm::extension::{Batch, Extension, Reader};

use super::MAX_SEGMENTS;
use super::error::AllocId;
use super::export::MAX_EXPORTS;
use super::publish::{Binding, MAX_BUFFERS, Versions, Wanted};
use super::wire::{self, Ask, KINDS, Offer, Said};

pub(crate) const MAX_OFFERS: usize = 64;

/// Enough for two exports with the maximum number of segments.
pub(crate) const MAX_DESCRIPTORS: usize = 2 * MAX_SEGMENTS;

const MAX_ASKED: usize = 32;

/// More than the peer may have outstanding, because a request may cross with its answer.
const MAX_QUERIES: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// Outstanding.
    None,
    /// Outstanding, but the answer is no longer needed.
    Unwanted,
    Refused,
}

#[derive(Debug, Default)]
pub(crate) struct LinkRecord {
    /// Whether the peer is this process itself.
    pub(crate) home: bool,

    // Not opened by this end.
    offers: BTreeMap<AllocId, Offer>,
    buffers: BTreeMap<u64, Versions>,
    /// Allocations that the peer revokes, each with a sequence number to acknowledge.
    pub(crate) revokes: VecDeque<(u64, AllocId)>,
    /// Our allocations that the peer has closed, each with the sequence number that it
    /// acknowledged.
    pub(crate) acks: VecDeque<(u64, AllocId)>,
    pub(crate) requested: BTreeSet<AllocId>,
    /// Our buffers that the peer waits for, each with the version that it wants.
    pub(crate) queries: Vec<(u64, Wanted)>,

    /// Our requests, oldest first.
    asked: VecDeque<(Ask, Answer)>,
    /// Allocations that the peer may have open.
    pub(crate) given: BTreeSet<AllocId>,
    /// The buffers announced to the peer, with the last announced version. `None` if that version
    /// was withdrawn.
    pub(crate) told: BTreeMap<u64, Option<Binding>>,
}

impl Extension for LinkRecord {
    const KINDS: RangeInclusive<u16> = KINDS;

    /// Allows one segment, for the [`pair`](super::pair).
    const SEGMENTS: u16 = 1;

    const DESCRIPTORS: usize = MAX_SEGMENTS;

    fn new(home: bool) -> Self {
        LinkRecord { home, ..LinkRecord::default() }
    }

    fn take(&mut self, kind: u16, body: Reader<'_>, fds: &mut Batch) -> Result<(), HandshakeError> {
        match wire::read(kind, body, fds, self.home)? {
            Said::Export(offer) => {
                self.answered(Ask::Alloc(offer.alloc));
                // Removes an earlier offer of this allocation, and closes its descriptors.
                self.offers.remove(&offer.alloc);
                while self.offers.len() == MAX_OFFERS
                    || self.descriptors() + offer.descriptors() > MAX_DESCRIPTORS
                {
                    // Allocation ids increase, so the first offer is the oldest.
                    self.offers.pop_first();
                }
                self.offers.insert(offer.alloc, offer);
            }
            Said::Request(alloc) if self.requested.len() < MAX_EXPORTS => {
                self.requested.insert(alloc);
            }
            Said::Refuse(ask) => {
                // The rejection may cross with the cancellation of the request.
                if let Some(i) = self.asked.iter().position(|(asked, _)| *asked == ask) {
                    match self.asked[i].1 {
                        // A rejection is not kept, because it becomes outdated.
                        Answer::Unwanted => drop(self.asked.remove(i)),
                        _ => self.asked[i].1 = Answer::Refused,
                    }
                }
            }
            Said::Publish(buffer, binding) => {
                self.answered(Ask::Buffer(buffer, Wanted::Latest));
                self.answered(Ask::Buffer(buffer, Wanted::Version(binding.version)));
                if self.buffers.len() == MAX_BUFFERS && !self.buffers.contains_key(&buffer) {
                    return Err(HandshakeError::BadPacket);
                }
                let versions = self.buffers.entry(buffer).or_default();
                if !versions.insert(binding) {
                    return Err(HandshakeError::BadPacket);
                }
            }
            Said::Query { buffer, wanted, on } => {
                self.queries.retain(|query| *query != (buffer, wanted));
                if on && self.queries.len() == MAX_QUERIES {
                    return Err(HandshakeError::BadPacket);
                }
                if on {
                    self.queries.push((buffer, wanted));
                }
            }
            Said::Unpublish(buffer) => drop(self.buffers.remove(&buffer)),
            Said::Revoke { sequence, alloc } if self.revokes.len() < MAX_EXPORTS => {
                self.forget(alloc);
                self.revokes.push_back((sequence, alloc));
            }
            Said::RevokeAck { sequence, alloc } if self.acks.len() < MAX_EXPORTS => {
                self.acks.push_back((sequence, alloc));
            }
            Said::Request(_) | Said::Revoke { .. } | Said::RevokeAck { .. } => {
                return Err(HandshakeError::BadPacket);
            }
        }
        Ok(())
    }
}

impl LinkRecord {
    fn descriptors(&self) -> usize {
        self.offers.values().map(Offer::descriptors).sum()
    }

    fn forget(&mut self, alloc: AllocId) {
        self.offers.remove(&alloc);
        for versions in self.buffers.values_mut() {
            versions.forget(alloc);
        }
    }

    fn answered(&mut self, ask: Ask) {
        self.asked.retain(|(asked, _)| *asked != ask);
    }

    pub(crate) fn accept(&mut self, alloc: AllocId) -> Option<Offer> {
        self.offers.remove(&alloc)
    }

    pub(crate) fn find(&self, buffer: u64, wanted: Wanted) -> Option<Binding> {
        self.buffers.get(&buffer)?.find(wanted)
    }

    /// Returns the packets to send: none if the request is already outstanding.
    pub(crate) fn ask(&mut self, ask: Ask) -> Vec<Vec<u8>> {
        let mut packets = Vec::new();
        if let Some((_, answer)) = self.asked.iter_mut().find(|(asked, _)| *asked == ask) {
            *answer = Answer::None;
            return packets;
        }
        while self.asked.len() >= MAX_ASKED {
            let idle = |(asked, answer): &(Ask, Answer)| {
                *answer == Answer::Refused || matches!(asked, Ask::Buffer(..))
            };
            match self.asked.iter().position(idle).and_then(|i| self.asked.remove(i)) {
                Some((_, Answer::Refused)) => {}
                Some((asked, _)) => packets.extend(unask(asked)),
                // The limit of outstanding requests is reached. Retry after an answer.
                None => return packets,
            }
        }
        self.asked.push_back((ask, Answer::None));
        packets.push(match ask {
            Ask::Alloc(alloc) => wire::request(alloc),
            Ask::Buffer(buffer, wanted) => wire::query(buffer, wanted, true),
        });
        packets
    }

    /// Cancels a request. Returns the packet to send, if any.
    pub(crate) fn give_up(&mut self, ask: Ask) -> Option<Vec<u8>> {
        let i = self.asked.iter().position(|(asked, _)| *asked == ask)?;
        match ask {
            // The peer answers this request soon anyway.
            Ask::Alloc(_) => self.asked[i].1 = Answer::Unwanted,
            Ask::Buffer(..) => drop(self.asked.remove(i)),
        }
        unask(ask)
    }

    /// Returns whether a request was rejected. If so, removes it, so that it may be repeated.
    pub(crate) fn refused(&mut self, ask: Ask) -> bool {
        let found = self.asked.iter().position(|asked| *asked == (ask, Answer::Refused));
        found.and_then(|i| self.asked.remove(i)).is_some()
    }
}

fn unask(ask: Ask) -> Option<Vec<u8>> {
    match ask {
        Ask::Alloc(_) => None,
        Ask::Buffer(buffer, wanted) => Some(wire::query(buffer, wanted, false)),
    }
}
