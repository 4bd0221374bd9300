//! The id of an exported allocation, and the errors of exporting.

use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

use super::DeviceError;

/// The id of an exported allocation. Never reused within a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AllocId(NonZeroU64);

impl AllocId {
    /// Returns the id as a nonzero integer, for the key of a rail.
    pub fn key(self) -> u64 {
        self.0.get()
    }

    /// Converts an untrusted integer to an id. Returns `None` for 0.
    pub fn from_key(key: u64) -> Option<Self> {
        NonZeroU64::new(key).map(AllocId)
    }

    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // Relaxed: the id only needs to be unique. It wraps after centuries.
        AllocId(NonZeroU64::new(NEXT.fetch_add(1, Ordering::Relaxed)).unwrap_or(NonZeroU64::MAX))
    }
}

/// Why memory could not be exported or revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExportError {
    /// The range is empty, or extends beyond its allocation or adjacent segments.
    BadRange {
        /// Number of bytes from the start of the range to the end of the allocation or its adjacent
        /// segments.
        there: u64,
    },
    /// The range has more physical segments than one export allows. Register it in parts.
    Segments {
        /// The maximum number of segments: [`MAX_SEGMENTS`](super::MAX_SEGMENTS).
        max: usize,
        /// Number of bytes from the start of the range that fit the limit.
        there: u64,
    },
    /// An error of the device. [`DeviceError::NotExportable`] names the remedy.
    Device(DeviceError),
    /// This limit of exported allocations is reached.
    Full(usize),
    /// The allocation with this id is being revoked.
    Revoking(AllocId),
    /// No allocation with this id is exported.
    Unknown(AllocId),
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExportError::BadRange { there } => {
                write!(
                    f,
                    "invalid range: it is empty or exceeds its allocation; register 1 to {there} \
                     bytes from this address"
                )
            }
            ExportError::Segments { max, there } => write!(
                f,
                "too many physical segments: one export holds at most {max}; register the range in \
                 parts, the first with at most {there} bytes"
            ),
            ExportError::Device(error) => error.fmt(f),
            ExportError::Full(max) => {
                write!(f, "too many exports: all {max} are in use; revoke an allocation")
            }
            ExportError::Revoking(alloc) => {
                write!(
                    f,
                    "allocation {} is being revoked; finish or cancel the revocation",
                    alloc.key()
                )
            }
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
