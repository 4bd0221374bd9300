//! Sequence numbers: 64-bit counters on both sides, truncated to a few bits on the wire. Pure
//! arithmetic.
//!
//! A wire value stands for every 2^BITS-th number, and the receiver picks the number nearest to its
//! own cursor. This is correct as long as the sender keeps all numbers in flight within a window of
//! half the wire's space. No value is reserved, and both the 64-bit counter and the wire value may
//! wrap at any time.

/// Maximum number of bits of the sequence number in a message's word or in remote CQ data.
pub const WIRE_BITS: u32 = 20;

/// The largest window that [`WIRE_BITS`] bits can number without ambiguity: half their space.
pub const MAX_WINDOW: u64 = 1 << (WIRE_BITS - 1);

/// A position in a stream: the number of earlier items, modulo 2^64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Seq(pub u64);

impl Seq {
    /// Returns the position `n` places later.
    #[inline(always)]
    #[must_use]
    pub const fn plus(self, n: u64) -> Self {
        Self(self.0.wrapping_add(n))
    }

    /// Returns the distance from `earlier` to this position. It is above 2^63 if this position is
    /// before `earlier`.
    #[inline(always)]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.wrapping_sub(earlier.0)
    }

    /// Returns whether this position is before `other`. The two must be less than 2^63 apart.
    #[inline(always)]
    pub const fn is_before(self, other: Self) -> bool {
        self.0.wrapping_sub(other.0).cast_signed() < 0
    }

    /// Returns whether this position is one of the `len` positions from `start` on.
    #[inline(always)]
    pub const fn in_window(self, start: Self, len: u64) -> bool {
        self.since(start) < len
    }

    /// Returns the low bits of the position that `mask` selects.
    #[inline(always)]
    pub const fn low(self, mask: u32) -> u32 {
        self.0 as u32 & mask
    }
}

/// Returns the low `BITS` bits of `seq`.
#[inline(always)]
pub const fn truncate<const BITS: u32>(seq: u64) -> u32 {
    const { assert!(BITS >= 1 && BITS <= 32) };
    (seq & (u64::MAX >> (64 - BITS))) as u32
}

/// Returns the number nearest to `near` that has the same low `BITS` bits as `wire`. Ignores higher
/// bits of `wire`.
///
/// If two numbers are equally near, returns the lower one, because a window of half the space that
/// *starts* at `near` does not reach the upper one.
#[inline(always)]
pub const fn expand<const BITS: u32>(wire: u32, near: u64) -> u64 {
    const { assert!(BITS >= 1 && BITS <= 32) };
    let ahead = (wire as u64).wrapping_sub(near) << (64 - BITS);
    // The shift is arithmetic, so that the upper half of the space counts backwards.
    let offset = ahead.cast_signed() >> (64 - BITS);
    near.wrapping_add_signed(offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STARTS: [u64; 5] = [0, 1 << 31, (1 << 32) - 70, u64::MAX / 2 - 70, u64::MAX - 70];

    /// Checks every number within half the space of every cursor, over a range that includes the
    /// 64-bit wrap.
    fn every_number_in_reach_survives_the_wire<const BITS: u32>() {
        let half = 1i64 << (BITS - 1);
        for start in STARTS {
            for near in (0..140).map(|n| start.wrapping_add(n)) {
                for offset in -half..half {
                    let seq = near.wrapping_add_signed(offset);
                    assert_eq!(
                        expand::<BITS>(truncate::<BITS>(seq), near),
                        seq,
                        "{seq:#x} near {near:#x}"
                    );
                }
            }
        }
    }

    #[test]
    fn every_number_in_reach_survives_a_narrow_wire() {
        every_number_in_reach_survives_the_wire::<1>();
        every_number_in_reach_survives_the_wire::<2>();
        every_number_in_reach_survives_the_wire::<3>();
        every_number_in_reach_survives_the_wire::<5>();
        every_number_in_reach_survives_the_wire::<8>();
    }

    #[test]
    fn the_ends_of_the_widest_window_survive_a_wide_wire() {
        for near in STARTS {
            for offset in [-(1i64 << 31), -1, 0, 1, (1 << 31) - 1] {
                let seq = near.wrapping_add_signed(offset);
                assert_eq!(expand::<32>(truncate::<32>(seq), near), seq);
            }
            for n in [0, 1, MAX_WINDOW - 1] {
                let seq = Seq(near).plus(n);
                assert!(seq.in_window(Seq(near), MAX_WINDOW));
                assert_eq!(expand::<WIRE_BITS>(seq.low(u32::MAX), near), seq.0);
            }
            assert!(!Seq(near).plus(MAX_WINDOW).in_window(Seq(near), MAX_WINDOW));
        }
    }

    #[test]
    fn bits_of_a_wire_word_above_the_field_are_ignored() {
        for wire in 0..16u32 {
            for near in 0..40 {
                assert_eq!(expand::<4>(wire | 0xabcd_ef50, near), expand::<4>(wire, near));
            }
        }
    }

    #[test]
    fn order_and_distance_hold_across_the_wrap() {
        let last = Seq(u64::MAX);
        let first = last.plus(1);
        assert_eq!(first, Seq(0));
        assert!(last.is_before(first) && !first.is_before(last) && !last.is_before(last));
        assert_eq!(first.plus(4).since(last), 5);
        assert!(first.in_window(last, 2) && !first.in_window(last, 1));
        assert!(!Seq(u64::MAX - 1).in_window(last, 1 << 63));
    }
}
