//! What two processes have said to each other of device memory, at one end of one link. It dies
//! with the link, so nothing of an earlier life of the peer is ever believed. Slow path: allocates.
//!
//! Everything that a peer can make grow is bounded. What exceeds a bound because the peer is
//! entitled to it is forgotten, oldest first, and asked for again when it is needed: offers that
//! nobody has opened, and old versions of a buffer. What no correct peer does ends the link.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::RangeInclusive;

use fishplate_shm::HandshakeError;
use fishplate_shm::extension::{Batch, Extension, Reader};

use super::MAX_SEGMENTS;
use super::error::AllocId;
use super::export::MAX_EXPORTS;
use super::publish::{Binding, MAX_BUFFERS, Versions, Wanted};
use super::wire::{self, Ask, KINDS, Offer, Said};

/// Handles kept that nobody has opened yet.
pub(crate) const MAX_OFFERS: usize = 64;

/// Descriptors that those handles may have together: of two exports of the most segments.
pub(crate) const MAX_DESCRIPTORS: usize = 2 * MAX_SEGMENTS;

/// Questions that this end has open at once.
const MAX_ASKED: usize = 32;

/// Questions of the peer that stand. More than it has open, for one that was answered before it
/// came may have crossed with the answer.
const MAX_QUERIES: usize = 1024;

/// What became of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// It is open.
    None,
    /// It is open, and nobody waits for the answer any more.
    Unwanted,
    /// It was refused.
    Refused,
}

/// One end's view.
#[derive(Debug, Default)]
pub(crate) struct Board {
    /// Whether the peer is this very process.
    pub(crate) home: bool,

    // What the peer has said.
    offers: BTreeMap<AllocId, Offer>,
    buffers: BTreeMap<u64, Versions>,
    /// Allocations that the peer wants closed, and is owed an acknowledgement for.
    pub(crate) revokes: VecDeque<(u64, AllocId)>,
    /// Allocations of ours that it has closed.
    pub(crate) acks: VecDeque<(u64, AllocId)>,
    /// Handles that it wants.
    pub(crate) fetches: BTreeSet<AllocId>,
    /// Versions that it waits for.
    pub(crate) queries: Vec<(u64, Wanted)>,

    // What this end has said.
    /// Questions, oldest first.
    asked: VecDeque<(Ask, Answer)>,
    /// Allocations that the peer may have open.
    pub(crate) given: BTreeSet<AllocId>,
    /// The buffers that it was told of, and the last version, unless that was taken back.
    pub(crate) told: BTreeMap<u64, Option<Binding>>,
}

impl Extension for Board {
    const KINDS: RangeInclusive<u16> = KINDS;

    /// The one that a pair has: see [`pair`](super::pair).
    const SEGMENTS: u16 = 1;

    fn new(home: bool) -> Self {
        Board { home, ..Board::default() }
    }

    fn take(&mut self, kind: u16, body: Reader<'_>, fds: &mut Batch) -> Result<(), HandshakeError> {
        match wire::read(kind, body, fds, self.home)? {
            Said::Export(offer) => {
                self.answered(Ask::Alloc(offer.alloc));
                // What was offered under this number before is dropped here, with its descriptors.
                self.offers.remove(&offer.alloc);
                while self.offers.len() == MAX_OFFERS
                    || self.descriptors() + offer.descriptors() > MAX_DESCRIPTORS
                {
                    // Numbers grow: the first is the oldest.
                    self.offers.pop_first();
                }
                self.offers.insert(offer.alloc, offer);
            }
            Said::Fetch(alloc) if self.fetches.len() < MAX_EXPORTS => drop(self.fetches.insert(alloc)),
            Said::Refuse(ask) => {
                // An answer to a question that was taken back crosses with that.
                if let Some(i) = self.asked.iter().position(|(asked, _)| *asked == ask) {
                    match self.asked[i].1 {
                        // A refusal that is kept would be believed when it is long out of date.
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
            Said::Fetch(_) | Said::Revoke { .. } | Said::RevokeAck { .. } => {
                return Err(HandshakeError::BadPacket);
            }
        }
        Ok(())
    }

    /// Whatever handle is waited for has to be asked for again.
    fn lost(&mut self) {
        self.asked.retain(|(asked, _)| !matches!(asked, Ask::Alloc(_)));
    }
}

impl Board {
    /// Descriptors of the handles that nobody has opened.
    fn descriptors(&self) -> usize {
        self.offers.values().map(Offer::descriptors).sum()
    }

    /// Drops the handle of an allocation, and the versions that lie in it.
    fn forget(&mut self, alloc: AllocId) {
        self.offers.remove(&alloc);
        for versions in self.buffers.values_mut() {
            versions.forget(alloc);
        }
    }

    fn answered(&mut self, ask: Ask) {
        self.asked.retain(|(asked, _)| *asked != ask);
    }

    /// Takes a handle, to be opened.
    pub(crate) fn accept(&mut self, alloc: AllocId) -> Option<Offer> {
        self.offers.remove(&alloc)
    }

    /// Where a buffer of the peer is.
    pub(crate) fn find(&self, buffer: u64, wanted: Wanted) -> Option<Binding> {
        self.buffers.get(&buffer)?.find(wanted)
    }

    /// Notes a question and says what is to be sent for it: nothing if it is open already.
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
                // As many fetches as may be open: this one comes when one is answered.
                None => return packets,
            }
        }
        self.asked.push_back((ask, Answer::None));
        packets.push(match ask {
            Ask::Alloc(alloc) => wire::fetch(alloc),
            Ask::Buffer(buffer, wanted) => wire::query(buffer, wanted, true),
        });
        packets
    }

    /// Nobody waits for the answer any more: says what is to be sent for it.
    pub(crate) fn give_up(&mut self, ask: Ask) -> Option<Vec<u8>> {
        let i = self.asked.iter().position(|(asked, _)| *asked == ask)?;
        match ask {
            // Answered soon, whether or not anybody still wants to know.
            Ask::Alloc(_) => self.asked[i].1 = Answer::Unwanted,
            Ask::Buffer(..) => drop(self.asked.remove(i)),
        }
        unask(ask)
    }

    /// Whether a question was refused; if so, it may be asked again.
    pub(crate) fn refused(&mut self, ask: Ask) -> bool {
        let found = self.asked.iter().position(|asked| *asked == (ask, Answer::Refused));
        found.and_then(|i| self.asked.remove(i)).is_some()
    }
}

/// What tells the peer that a question is no longer open.
fn unask(ask: Ask) -> Option<Vec<u8>> {
    match ask {
        Ask::Alloc(_) => None,
        Ask::Buffer(buffer, wanted) => Some(wire::query(buffer, wanted, false)),
    }
}
