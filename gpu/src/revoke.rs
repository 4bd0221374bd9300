//! Revokes memory that peers have open, before it is freed. Slow path, but it does not wait or call
//! the driver.
//!
//! | exporter                                | importer                                 |
//! |-----------------------------------------|------------------------------------------|
//! | stops handing out the allocation        |                                          |
//! | `Revoke` to every peer that has it      | begins no more transfers, drains, closes |
//! | waits for `RevokeAck` of live peers     | `RevokeAck` with the last sequence       |
//! | all acknowledged: may free the memory   |                                          |
//!
//! After a cancelled revocation, the same allocation may be revoked again. Each revocation has its
//! own sequence number. So a late acknowledgement of the first revocation does not count for the
//! second.

use std::collections::BTreeMap;
use std::fmt;

use fishplate_core::mem::Peer;
use fishplate_shm::Nonce;

use super::error::{AllocId, ExportError};

/// Why memory cannot be freed yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RevokeError {
    /// An error of exporting, for example that the allocation is not exported.
    Export(ExportError),
    /// The deadline expired before all peers acknowledged. Wait again, or cancel the revocation.
    Deadline {
        /// The allocation that is being revoked.
        alloc: AllocId,
        /// The first peer that has not acknowledged.
        peer: Peer,
        /// Number of peers that have not acknowledged.
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
                    "allocation {} is still open at {peers} peers, including peer {}; wait, or \
                     cancel the revocation",
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

#[derive(Debug, Default)]
pub(crate) struct Revocations {
    pending: BTreeMap<AllocId, Pending>,
    sequence: u64,
}

impl Revocations {
    pub(crate) fn begin(&mut self, alloc: AllocId, awaited: Vec<(Peer, Nonce)>) -> u64 {
        self.sequence += 1;
        self.pending.insert(alloc, Pending { sequence: self.sequence, awaited });
        self.sequence
    }

    pub(crate) fn call_off(&mut self, alloc: AllocId) {
        self.pending.remove(&alloc);
    }

    /// Records a peer's acknowledgement. Returns whether a pending revocation expected it.
    pub(crate) fn acked(&mut self, from: Nonce, sequence: u64, alloc: AllocId) -> bool {
        let Some(pending) =
            self.pending.get_mut(&alloc).filter(|pending| pending.sequence == sequence)
        else {
            return false;
        };
        let before = pending.awaited.len();
        pending.awaited.retain(|(_, nonce)| *nonce != from);
        pending.awaited.len() < before
    }

    pub(crate) fn keep_only(&mut self, alive: impl Fn(&Nonce) -> bool) {
        for pending in self.pending.values_mut() {
            pending.awaited.retain(|(_, nonce)| alive(nonce));
        }
    }

    pub(crate) fn awaited(&self, alloc: AllocId) -> impl Iterator<Item = Peer> {
        self.pending
            .get(&alloc)
            .into_iter()
            .flat_map(|pending| pending.awaited.iter().map(|(peer, _)| *peer))
    }

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
