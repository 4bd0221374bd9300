//! Versioned locations of buffers, under names that users choose. Slow path: allocates, but does
//! not wait.
//!
//! The owner publishes a new version whenever a buffer moves. Publishing the same location again
//! changes nothing. The versions of a buffer increase, and the location of a version never changes.
//! A lookup by version returns that location or nothing. Versions belong to one incarnation of the
//! owner, so a [`DirectToken`] names the incarnation too. Both ends keep the last [`VERSIONS_KEPT`]
//! versions of each buffer.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use fishplate_shm::Nonce;

use super::error::AllocId;
use super::export::Registration;

/// Number of versions kept per buffer.
pub const VERSIONS_KEPT: usize = 4;

/// Maximum number of buffers that one process publishes.
pub const MAX_BUFFERS: usize = 4096;

/// Selects a version of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The latest version.
    Latest,
    /// Exactly this version.
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

/// The location of one version of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The version, never 0.
    pub version: u64,
    /// The allocation that contains the buffer.
    pub alloc: AllocId,
    /// Offset in the allocation, in bytes.
    pub offset: u64,
    /// Size in bytes.
    pub len: u64,
}

impl Binding {
    fn says(&self, of: &Registration) -> bool {
        (self.alloc, self.offset, self.len) == (of.alloc, of.offset, of.len)
    }
}

/// Permits direct transfers with one version of a peer's buffer, in one incarnation of the peer.
/// Only a lookup returns a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectToken {
    pub(crate) incarnation: Nonce,
    pub(crate) binding: Binding,
}

impl DirectToken {
    /// Returns the location of the buffer.
    pub fn binding(&self) -> Binding {
        self.binding
    }
}

/// Why nothing was published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PublishError {
    /// The limit of published buffers is reached. The value is the limit.
    Full(usize),
    /// The version is not greater than the buffer's last version.
    Version {
        /// The last version.
        last: u64,
    },
}

impl fmt::Display for PublishError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PublishError::Full(max) => {
                write!(f, "too many publications: all {max} are in use; unpublish a buffer")
            }
            PublishError::Version { last } => {
                write!(
                    f,
                    "the version is too low: the last version is {last}; use a greater version"
                )
            }
        }
    }
}

impl std::error::Error for PublishError {}

#[derive(Debug, Default)]
pub(crate) struct Versions {
    /// In ascending order.
    kept: VecDeque<Binding>,
    /// The greatest version ever published. If that version was withdrawn, the buffer has no latest
    /// location, even if older versions are kept.
    last: u64,
}

impl Versions {
    /// Returns false if the version is known with another location.
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

    pub(crate) fn forget(&mut self, alloc: AllocId) {
        self.kept.retain(|known| known.alloc != alloc);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Here(Binding),
    NotYet,
    /// No longer kept, because later versions were published.
    Gone,
}

/// The published buffers of this process.
#[derive(Debug, Default)]
pub struct Publications {
    buffers: BTreeMap<u64, Versions>,
}

/// The next automatic version. A buffer with a higher last version continues from that version.
static NEXT: AtomicU64 = AtomicU64::new(1);

impl Publications {
    /// Publishes a buffer's location, with the given version or an automatic one. Returns the
    /// latest location, and whether it is new.
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
        // Relaxed: the versions of a buffer only need to increase.
        let version = version
            .unwrap_or_else(|| NEXT.fetch_add(1, Ordering::Relaxed).max(last.saturating_add(1)));
        if version <= last {
            return Err(PublishError::Version { last });
        }
        let binding = Binding { version, alloc: at.alloc, offset: at.offset, len: at.len };
        self.buffers.entry(buffer).or_default().insert(binding);
        Ok((binding, true))
    }

    /// Withdraws a buffer. Returns whether it was published.
    pub fn unpublish(&mut self, buffer: u64) -> bool {
        self.buffers.remove(&buffer).is_some()
    }

    /// Returns the location of a buffer of this process.
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

    /// Removes the versions that are located in an allocation. Keeps the buffers, so that their
    /// versions still increase.
    pub(crate) fn forget(&mut self, alloc: AllocId) {
        for versions in self.buffers.values_mut() {
            versions.forget(alloc);
        }
    }

    /// Returns the number of published buffers. Also counts buffers in revoked memory.
    pub fn len(&self) -> usize {
        self.buffers.len()
    }

    /// Returns whether no buffer is published.
    pub fn is_empty(&self) -> bool {
        self.buffers.is_empty()
    }
}
