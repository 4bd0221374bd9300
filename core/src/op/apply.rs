//! Executes atomics and signals on a word in memory. This happens at the target, or at an origin
//! that has mapped the word.
//!
//! An atomic is one lock-prefixed instruction, or a short compare-and-swap loop for the fetching
//! bit operations. A signal is a store or an addition. Neither blocks.
//!
//! | edge     | release             | acquire                            | carries          |
//! |----------|---------------------|------------------------------------|------------------|
//! | `signal` | [`SignalOp::apply`] | [`look_at_signal`], [`Amo::apply`] | writes before it |
//! | `amo`    | [`Amo::apply`]      | the same                           | writes before it |

use super::{Amo, AmoOp, SignalOp};
use crate::sync::primitive::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, edge};

impl SignalOp {
    /// Changes the word of a signal.
    ///
    /// # Safety
    /// `word` is a multiple of 8 and valid for reads and writes of 8 bytes. All accesses to it are
    /// atomic.
    #[inline(always)]
    pub(crate) unsafe fn apply(self, word: *mut u8, value: u64) {
        // SAFETY: our caller guarantees that the word is valid, aligned and only accessed
        // atomically.
        let word = unsafe { &*word.cast::<AtomicU64>() };
        // Release, edge `signal`: a thread that acquires this value sees all data copied or applied
        // earlier.
        match self {
            SignalOp::Set => set_signal(word, value),
            SignalOp::Add => {
                word.fetch_add(value, edge!("signal.add", Release));
            }
        }
    }
}

/// Stores a signal's word. A thread that looks at this value also sees everything written before.
#[inline(always)]
pub fn set_signal(word: &AtomicU64, value: u64) {
    word.store(value, edge!("signal.set", Release));
}

/// Loads a signal's word. All data sent before the observed signal is visible after this.
#[inline(always)]
pub fn look_at_signal(word: &AtomicU64) -> u64 {
    // Acquire, edge `signal`: pairs with the store or addition of the signal, by this engine or by
    // a peer that has mapped this memory.
    word.load(edge!("signal.look", Acquire))
}

impl Amo {
    /// Returns whether the width is 1, 2, 4 or 8 bytes.
    #[inline(always)]
    pub fn width_is_valid(&self) -> bool {
        matches!(self.width, 1 | 2 | 4 | 8)
    }

    /// Executes the operation. Returns the old value, zero-extended.
    ///
    /// The operation is atomic with respect to every other atomic access of the same width, by any
    /// process that maps the word. It is release and acquire: a thread that reads the new value
    /// sees everything written before the operation.
    ///
    /// # Safety
    /// The width is valid. `word` is a multiple of `width` and valid for reads and writes of
    /// `width` bytes. All accesses to it are atomic.
    #[inline]
    pub unsafe fn apply(&self, word: *mut u8) -> u64 {
        macro_rules! on {
            ($atomic:ty, $int:ty) => {{
                // SAFETY: our caller guarantees that the word is valid, aligned for this width and
                // only accessed atomically.
                let word = unsafe { &*word.cast::<$atomic>() };
                let operand = self.operand as $int;
                // AcqRel, edge `amo`. The release half orders the stream's earlier writes before
                // this word, for a thread that acquires the word. The acquire half orders the
                // writes that the fetched value announces before the caller's next step.
                let order = edge!("amo.change", AcqRel);
                let old: $int = match self.op {
                    AmoOp::Set | AmoOp::Swap => word.swap(operand, order),
                    AmoOp::Add => word.fetch_add(operand, order),
                    AmoOp::Inc => word.fetch_add(1, order),
                    AmoOp::And => word.fetch_and(operand, order),
                    AmoOp::Or => word.fetch_or(operand, order),
                    AmoOp::Xor => word.fetch_xor(operand, order),
                    AmoOp::CompareSwap => {
                        let compare = self.compare as $int;
                        // Acquire on failure too, because the fetched value is the result.
                        match word.compare_exchange(
                            compare,
                            operand,
                            order,
                            edge!("amo.differs", Acquire),
                        ) {
                            Ok(old) | Err(old) => old,
                        }
                    }
                    AmoOp::Fetch => word.load(edge!("amo.fetch", Acquire)),
                };
                old as u64
            }};
        }
        match self.width {
            1 => on!(AtomicU8, u8),
            2 => on!(AtomicU16, u16),
            4 => on!(AtomicU32, u32),
            _ => on!(AtomicU64, u64),
        }
    }
}

impl AmoOp {
    /// Returns the operation with this code on the wire, if any.
    #[inline]
    pub fn from_wire(code: u8) -> Option<Self> {
        Some(match code {
            1 => AmoOp::Set,
            2 => AmoOp::Add,
            3 => AmoOp::Inc,
            4 => AmoOp::And,
            5 => AmoOp::Or,
            6 => AmoOp::Xor,
            7 => AmoOp::Swap,
            8 => AmoOp::CompareSwap,
            9 => AmoOp::Fetch,
            _ => return None,
        })
    }
}

// Not under loom: its atomics have only one width in memory.
#[cfg(all(test, not(fishplate_loom)))]
mod tests {
    use super::*;

    /// Returns the result of a reference implementation of the operation.
    fn expected(amo: &Amo, old: u64) -> u64 {
        let mask = if amo.width == 8 { u64::MAX } else { (1 << (8 * amo.width)) - 1 };
        let (x, c) = (amo.operand & mask, amo.compare & mask);
        mask & match amo.op {
            AmoOp::Set | AmoOp::Swap => x,
            AmoOp::Add => old.wrapping_add(x),
            AmoOp::Inc => old.wrapping_add(1),
            AmoOp::And => old & x,
            AmoOp::Or => old | x,
            AmoOp::Xor => old ^ x,
            AmoOp::CompareSwap => {
                if old == c {
                    x
                } else {
                    old
                }
            }
            AmoOp::Fetch => old,
        }
    }

    #[test]
    fn every_operation_at_every_width_changes_its_bytes_alone() {
        for code in 1..=9 {
            let op = AmoOp::from_wire(code).unwrap();
            for width in [1u8, 2, 4, 8] {
                for old in [0u64, 1, 0x7f, 0xff, 0xffff_ffff, u64::MAX, 0x0123_4567_89ab_cdef] {
                    for (operand, compare) in [(1, 0), (u64::MAX, old), (0x55aa_55aa_55aa_55aa, 1)]
                    {
                        let amo = Amo { op, width, operand, compare };
                        let mask = if width == 8 { u64::MAX } else { (1 << (8 * width)) - 1 };
                        let mut memory =
                            [0xa5a5_a5a5_a5a5_a5a5u64, old & mask, 0x5a5a_5a5a_5a5a_5a5a];
                        // SAFETY: the middle word is aligned for every width, and nothing else uses
                        // it.
                        let was = unsafe { amo.apply((&raw mut memory[1]).cast()) };
                        assert_eq!(was, old & mask, "{amo:?}");
                        assert_eq!(memory[1], expected(&amo, old & mask), "{amo:?} on {old:#x}");
                        assert_eq!(
                            (memory[0], memory[2]),
                            (0xa5a5_a5a5_a5a5_a5a5, 0x5a5a_5a5a_5a5a_5a5a)
                        );
                    }
                }
            }
        }
        assert_eq!(AmoOp::from_wire(0), None);
        assert_eq!(AmoOp::from_wire(10), None);
    }
}
