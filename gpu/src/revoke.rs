//! Revokes what peers have open, before it is freed.
//! Nothing here waits or enters a driver; slow path.
//!
//! | exporter                                | importer                                 |
//! |-----------------------------------------|------------------------------------------|
//! | gives the allocation to nobody any more |                                          |
//! | `Revoke` to every peer that has it      | begins no more transfers, drains, closes |
//! | takes each `RevokeAck` of live peers    | `RevokeAck` with the last sequence       |
//! | all taken: the memory may be freed      |                                          |
//!
//! A revocation that was called off can be followed by another of the same allocation. Each has its
//! own sequence, so an acknowledgement of the first, coming late, says nothing about the second.

use std::collections::BTreeMap;
use std::fmt;

use fishplate_core::mem::Peer;
use fishplate_shm::Nonce;

use super::error::{AllocId, ExportError};

/// Why memory may not be freed yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RevokeError {
    /// There is nothing to revoke.
    Export(ExportError),
    /// The time given has passed and these have not acknowledged: the first of them, and their
    /// number. It can be waited for again, or called off.
    Deadline {
        /// The allocation.
        alloc: AllocId,
        /// One peer that has not.
        peer: Peer,
        /// How many have not.
        peers: usize,
    },
}

impl fmt::Display for RevokeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RevokeError::Export(error) => error.fmt(f),
            RevokeError::Deadline { alloc, peer, peers } => {
                write!(
                    f,
                    "allocation {} is still open at {peers} peers, peer {} among them",
                    alloc.key(),
                    peer.0
                )
            }
        }
    }
}

impl std::error::Error for RevokeError {}

impl From<ExportError> for RevokeError {
    fn from(error: ExportError) -> Self {
        RevokeError::Export(error)
    }
}

#[derive(Debug)]
struct Pending {
    sequence: u64,
    awaited: Vec<(Peer, Nonce)>,
}

/// What is being taken back.
#[derive(Debug, Default)]
pub(crate) struct Revocations {
    pending: BTreeMap<AllocId, Pending>,
    sequence: u64,
}

impl Revocations {
    /// Begins to take an allocation back from those peers, and says under which sequence.
    pub(crate) fn begin(&mut self, alloc: AllocId, awaited: Vec<(Peer, Nonce)>) -> u64 {
        self.sequence += 1;
        self.pending.insert(alloc, Pending { sequence: self.sequence, awaited });
        self.sequence
    }

    /// Calls it off.
    pub(crate) fn call_off(&mut self, alloc: AllocId) {
        self.pending.remove(&alloc);
    }

    /// A peer says that it has closed an allocation. Whether that is what was asked.
    pub(crate) fn acked(&mut self, from: Nonce, sequence: u64, alloc: AllocId) -> bool {
        let Some(pending) = self.pending.get_mut(&alloc).filter(|pending| pending.sequence == sequence)
        else {
            return false;
        };
        let before = pending.awaited.len();
        pending.awaited.retain(|(_, nonce)| *nonce != from);
        pending.awaited.len() < before
    }

    /// Waits no more for peers that are not among those alive.
    pub(crate) fn keep_only(&mut self, alive: impl Fn(&Nonce) -> bool) {
        for pending in self.pending.values_mut() {
            pending.awaited.retain(|(_, nonce)| alive(nonce));
        }
    }

    /// Who has not acknowledged yet.
    pub(crate) fn awaited(&self, alloc: AllocId) -> impl Iterator<Item = Peer> {
        self.pending.get(&alloc).into_iter().flat_map(|pending| pending.awaited.iter().map(|(peer, _)| *peer))
    }

    /// Takes out what all have acknowledged.
    pub(crate) fn take_done(&mut self) -> Vec<AllocId> {
        let done: Vec<_> = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.awaited.is_empty())
            .map(|(&alloc, _)| alloc)
            .collect();
        for alloc in &done {
            self.pending.remove(alloc);
        }
        done
    }
}
