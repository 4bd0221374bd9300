//! An SPSC ring of fixed-size slots. Neither side blocks, allocates or makes a system call.
//! Whatever values the counters have, neither side accesses memory outside the slots. One thread at
//! a time owns each side.
//!
//! The ring borrows its memory, so a heap ring, a static and a shared mapping run the same code.
//!
//! # Layout
//!
//! [`Header`] has 256 bytes, aligned to 128: the producer's counter at 0, the consumer's at 128,
//! each on its own line. The slots are stored elsewhere. Their number is a power of two, and all of
//! them are usable. Counters have 64 bits and wrap. A slot's index is its counter modulo the
//! capacity. Zeroed memory is a valid empty header.
//!
//! # Edges
//!
//! | edge     | release store               | acquire load                | carries          |
//! |----------|-----------------------------|-----------------------------|------------------|
//! | `filled` | tail, by [`Producer::push`] | tail, by [`Consumer::pop`]  | the slots        |
//! | `freed`  | head, by [`Consumer::pop`]  | head, by [`Producer::push`] | the room in them |
//!
//! The batch forms use the same two edges, once per batch. Each side loads the opposite counter
//! only when the last loaded value shows too little. So in steady state the two lines move between
//! processors once per batch rather than once per value.
//!
//! # A hostile peer
//!
//! Each side keeps its own counter privately, and reads the published copy only when it attaches.
//! If a loaded counter of the peer implies more values than there are slots, the peer is faulty or
//! hostile. The handle then stays corrupt ([`Producer::is_corrupt`]): a producer finds the ring
//! full, a consumer finds it empty.

use core::{error::Error, fmt};

use crossbeam_utils::CachePadded;

use super::primitive::{AtomicU64, Ordering, Watch, const_new};

mod consumer;
mod memory;
mod producer;
#[cfg(test)]
mod races;
#[cfg(test)]
mod tests;

pub use consumer::{Consumer, Filled};
pub use memory::{Private, RingMemory, Shared};
pub use producer::{Full, Producer, Reserved};

use memory::Span;

/// The two counters of a ring: 256 bytes, aligned to 128 (on x86-64 and aarch64).
#[repr(C)]
#[derive(Debug)]
pub struct Header {
    /// Number of values ever published. Only the producer writes it.
    tail: CachePadded<AtomicU64>,
    /// Number of values ever released. Only the consumer writes it.
    head: CachePadded<AtomicU64>,
    watch: Watch,
}

#[cfg(all(not(fishplate_loom), any(target_arch = "x86_64", target_arch = "aarch64")))]
mod layout {
    use super::Header;
    use core::mem::{align_of, offset_of, size_of};
    use static_assertions::const_assert_eq;

    const_assert_eq!(size_of::<Header>(), 256);
    const_assert_eq!(align_of::<Header>(), 128);
    const_assert_eq!(offset_of!(Header, tail), 0);
    const_assert_eq!(offset_of!(Header, head), 128);
}

impl Header {
    const_new! {
        /// Creates the header of an empty ring, with counters at zero.
        pub fn new() -> Self {
            Self::starting_at(0)
        }
    }

    const_new! {
        /// Creates the header of an empty ring, with counters at `count`.
        pub fn starting_at(count: u64) -> Self {
            Self {
                tail: CachePadded::new(AtomicU64::new(count)),
                head: CachePadded::new(AtomicU64::new(count)),
                watch: Watch::new(),
            }
        }
    }
}

impl Default for Header {
    fn default() -> Self {
        Self::new()
    }
}

/// Creates the two sides of a ring over memory that no other process can write.
///
/// The ring starts empty, whatever the header counted before.
///
/// ```
/// use core::mem::MaybeUninit;
/// use fishplate_core::sync::ring::{self, Header};
///
/// let mut header = Header::new();
/// let mut slots = [MaybeUninit::<u32>::uninit(); 4];
/// let (mut tx, mut rx) = ring::split(&mut header, &mut slots)?;
/// tx.push(7).unwrap();
/// assert_eq!(rx.pop(), Some(7));
/// assert_eq!(rx.pop(), None);
/// # Ok::<(), ring::AttachError>(())
/// ```
///
/// # Errors
///
/// [`AttachError::Capacity`] unless the number of slots is a power of two.
pub fn split<'m, T: Copy>(
    header: &'m mut Header,
    slots: &'m mut [core::mem::MaybeUninit<T>],
) -> Result<(Producer<'m, T>, Consumer<'m, T>), AttachError> {
    let span = Span::of_slice(slots)?;
    let header = &*header;
    // Relaxed: the header is borrowed mutably, so neither side exists yet. The ring starts empty,
    // because an earlier `split` may have used other slots.
    let start = header.tail.load(Ordering::Relaxed);
    header.head.store(start, Ordering::Relaxed);
    Ok((Producer::new(header, span, start), Consumer::new(header, span, start)))
}

/// Why a ring could not be created over the given memory. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttachError {
    /// The number of slots is not a power of two.
    Capacity {
        /// The given number of slots.
        slots: usize,
    },
    /// The header or the slots do not have the alignment of their types.
    Misaligned,
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Capacity { slots } => {
                write!(f, "invalid ring size: {slots} slots; use a power of two")
            }
            Self::Misaligned => f.write_str(
                "ring memory is misaligned; align the header and the slots to their types",
            ),
        }
    }
}

impl Error for AttachError {}
