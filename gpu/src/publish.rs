//! Buffers by their users' names: where each is, in versions.
//! Nothing here waits; slow path, allocates.
//!
//! The owner of a buffer publishes a version whenever the buffer is somewhere else than before; a
//! version that would say the same again is left out. Versions of a buffer only grow, and a version
//! never changes its meaning: what a peer looked up by version is that or nothing. A version counts
//! within one life of its owner, which is why a [`DirectToken`] carries the owner's incarnation. Of
//! each buffer the last [`VERSIONS_KEPT`] are remembered, at both ends.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use fishplate_shm::Nonce;

use super::error::AllocId;
use super::export::Registration;

/// Versions of a buffer that are remembered.
pub const VERSIONS_KEPT: usize = 4;

/// Buffers that one process may have published at once.
pub const MAX_BUFFERS: usize = 4096;

/// Which version of a buffer is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The last one published.
    Latest,
    /// This one and no other.
    Version(u64),
}

impl Wanted {
    pub(crate) fn from_wire(version: u64) -> Self {
        if version == 0 { Wanted::Latest } else { Wanted::Version(version) }
    }

    pub(crate) fn to_wire(self) -> u64 {
        match self {
            Wanted::Latest => 0,
            Wanted::Version(version) => version,
        }
    }
}

/// Where one version of a buffer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Never 0.
    pub version: u64,
    /// The allocation.
    pub alloc: AllocId,
    /// First byte, counted from that of the allocation.
    pub offset: u64,
    /// Size in bytes.
    pub len: u64,
}

impl Binding {
    fn says(&self, of: &Registration) -> bool {
        (self.alloc, self.offset, self.len) == (of.alloc, of.offset, of.len)
    }
}

/// What lets a transfer go straight to a buffer of a peer: an explicit version, from one life of
/// that peer. There is no other way to one than a look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectToken {
    pub(crate) incarnation: Nonce,
    pub(crate) binding: Binding,
}

impl DirectToken {
    /// Where the buffer is.
    pub fn binding(&self) -> Binding {
        self.binding
    }
}

/// Why nothing was published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PublishError {
    /// So many buffers are published already: the number.
    Full(usize),
    /// Not greater than the last version of the buffer, which is this.
    Version {
        /// The last version.
        last: u64,
    },
}

impl fmt::Display for PublishError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PublishError::Full(max) => write!(f, "{max} buffers are published already: take one back"),
            PublishError::Version { last } => {
                write!(f, "versions of a buffer must grow, and its last is {last}")
            }
        }
    }
}

impl std::error::Error for PublishError {}

/// The last versions of one buffer.
#[derive(Debug, Default)]
pub(crate) struct Versions {
    /// The greatest at the end.
    kept: VecDeque<Binding>,
    /// The greatest ever entered. If it was taken back the buffer is nowhere,
    /// even with older ones known.
    last: u64,
}

impl Versions {
    /// Enters a version. Refuses one that is known and says something else.
    pub(crate) fn insert(&mut self, binding: Binding) -> bool {
        match self.kept.binary_search_by_key(&binding.version, |known| known.version) {
            Ok(i) => return self.kept[i] == binding,
            Err(i) => self.kept.insert(i, binding),
        }
        if self.kept.len() > VERSIONS_KEPT {
            self.kept.pop_front();
        }
        self.last = self.last.max(binding.version);
        true
    }

    pub(crate) fn find(&self, wanted: Wanted) -> Option<Binding> {
        match wanted {
            Wanted::Latest => self.kept.back().filter(|known| known.version == self.last),
            Wanted::Version(version) => self.kept.iter().find(|known| known.version == version),
        }
        .copied()
    }

    /// Forgets what lies in an allocation.
    pub(crate) fn forget(&mut self, alloc: AllocId) {
        self.kept.retain(|known| known.alloc != alloc);
    }
}

/// What is known of a version that a peer asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Here(Binding),
    /// Not published yet.
    NotYet,
    /// A later version was published, and this one is not remembered.
    Gone,
}

/// The buffers that this process has published.
#[derive(Debug, Default)]
pub struct Publications {
    buffers: BTreeMap<u64, Versions>,
}

/// Versions that the user does not choose: every one greater than all before in this process.
static NEXT: AtomicU64 = AtomicU64::new(1);

impl Publications {
    /// Enters where a buffer is, under a version that the user chooses or else one of our own.
    /// Returns what is the latest now, and whether it was not before.
    pub fn publish(
        &mut self,
        buffer: u64,
        version: Option<u64>,
        at: &Registration,
    ) -> Result<(Binding, bool), PublishError> {
        if let Some(latest) = self.find(buffer, Wanted::Latest)
            && latest.says(at)
            && version.is_none_or(|version| version == latest.version)
        {
            return Ok((latest, false));
        }
        if self.buffers.len() == MAX_BUFFERS && !self.buffers.contains_key(&buffer) {
            return Err(PublishError::Full(MAX_BUFFERS));
        }
        let last = self.buffers.get(&buffer).map_or(0, |versions| versions.last);
        // Relaxed: only the number's being unique and growing matters.
        let version =
            version.unwrap_or_else(|| NEXT.fetch_add(1, Ordering::Relaxed).max(last.saturating_add(1)));
        if version <= last {
            return Err(PublishError::Version { last });
        }
        let binding = Binding { version, alloc: at.alloc, offset: at.offset, len: at.len };
        self.buffers.entry(buffer).or_default().insert(binding);
        Ok((binding, true))
    }

    /// Takes a buffer back. Whether there was one.
    pub fn unpublish(&mut self, buffer: u64) -> bool {
        self.buffers.remove(&buffer).is_some()
    }

    /// Where a buffer of this process is.
    pub fn find(&self, buffer: u64, wanted: Wanted) -> Option<Binding> {
        self.buffers.get(&buffer)?.find(wanted)
    }

    pub(crate) fn look(&self, buffer: u64, wanted: Wanted) -> Found {
        match (self.find(buffer, wanted), wanted, self.buffers.get(&buffer)) {
            (Some(binding), ..) => Found::Here(binding),
            (None, Wanted::Version(version), Some(known)) if version <= known.last => Found::Gone,
            _ => Found::NotYet,
        }
    }

    /// Forgets what lies in an allocation; the buffers stay, so that their versions go on growing.
    pub(crate) fn forget(&mut self, alloc: AllocId) {
        for versions in self.buffers.values_mut() {
            versions.forget(alloc);
        }
    }

    /// Buffers that are published, those included whose memory was taken back.
    pub fn len(&self) -> usize {
        self.buffers.len()
    }

    /// Whether nothing is published.
    pub fn is_empty(&self) -> bool {
        self.buffers.is_empty()
    }
}
