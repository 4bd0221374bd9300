//! The name of an exported allocation, and why one was not exported.

use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

use super::DeviceError;

/// An exported allocation of a process. Never given twice in the life of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AllocId(NonZeroU64);

impl AllocId {
    /// As a number that travels in the key of a rail; never 0.
    pub fn key(self) -> u64 {
        self.0.get()
    }

    /// From a number that may come from anybody.
    pub fn from_key(key: u64) -> Option<Self> {
        NonZeroU64::new(key).map(AllocId)
    }

    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // Relaxed: only the number's being unique matters. Over zero it gets in some centuries.
        AllocId(NonZeroU64::new(NEXT.fetch_add(1, Ordering::Relaxed)).unwrap_or(NonZeroU64::MAX))
    }
}

/// Why memory was not exported, or not revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExportError {
    /// No bytes, or not all in one allocation, or in segments side by side: how many bytes there
    /// are from the first to the end of what it lies in.
    BadRange {
        /// Bytes that there are.
        there: u64,
    },
    /// The range has more physical segments than one export may have. Register it in parts.
    Segments {
        /// As many as may be: [`MAX_SEGMENTS`](super::MAX_SEGMENTS).
        max: usize,
        /// Bytes from the first on that lie in no more.
        there: u64,
    },
    /// What the device says; [`DeviceError::NotExportable`] with what can be done about it.
    Device(DeviceError),
    /// So many allocations are exported already: the number.
    Full(usize),
    /// The allocation is being revoked.
    Revoking(AllocId),
    /// No such allocation is exported, or no longer.
    Unknown(AllocId),
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExportError::BadRange { there } => {
                write!(f, "the range is not inside one allocation, which has {there} bytes from its start")
            }
            ExportError::Segments { max, there } => write!(
                f,
                "the range touches more than {max} physical segments, which are the most that one export may be made of: \
                 register it in parts, the first of {there} bytes at most"
            ),
            ExportError::Device(error) => error.fmt(f),
            ExportError::Full(max) => write!(f, "{max} allocations are exported already: revoke one"),
            ExportError::Revoking(alloc) => write!(f, "allocation {} is being revoked", alloc.key()),
            ExportError::Unknown(alloc) => write!(f, "allocation {} is not exported", alloc.key()),
        }
    }
}

impl std::error::Error for ExportError {}

impl From<DeviceError> for ExportError {
    fn from(error: DeviceError) -> Self {
        ExportError::Device(error)
    }
}
