//! Which rail of one end talks to which rail of the other.
//!
//! Both ends compute the same pairing from what both have told: fast rails talk to fast rails, and among equally fast ones the start
//! differs from pair to pair, so that many senders do not all meet on the first NIC of everybody.

use std::fmt;

/// Why the rails of two ends do not fit together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mismatch {
    /// One end has no rails at all, or more than 16.
    Count {
        /// The number that cannot be.
        rails: usize,
    },
    /// The two ends have different numbers of rails.
    Rails {
        /// Theirs.
        theirs: usize,
        /// Ours.
        ours: usize,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mismatch::Count { rails } => write!(f, "{rails} rails: 1 to 16 are possible"),
            Mismatch::Rails { theirs, ours } => {
                write!(f, "the other side has {theirs} rails and this one {ours}: give both the same")
            }
        }
    }
}

impl std::error::Error for Mismatch {}

/// The rails of two ends, joined one to one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pairing {
    /// For each rail here, the rail there.
    pub theirs: Vec<u8>,
    /// Rails here that are joined to a rail of another speed, with both speeds in megabits per second.
    pub uneven: Vec<(u8, u32, u32)>,
}

impl Pairing {
    /// Joins the rails of two ends. `ours` and `theirs` are speeds in megabits per second, 0 where not known; `me` and `peer` are
    /// numbers by which both ends know each other. With the arguments swapped, the other end comes to the inverse.
    ///
    /// # Errors
    /// [`Mismatch`] names both counts.
    pub fn new(ours: &[u32], theirs: &[u32], me: u64, peer: u64) -> Result<Pairing, Mismatch> {
        for rails in [ours.len(), theirs.len()] {
            if rails == 0 || rails > 16 {
                return Err(Mismatch::Count { rails });
            }
        }
        if ours.len() != theirs.len() {
            return Err(Mismatch::Rails { theirs: theirs.len(), ours: ours.len() });
        }
        // Both ends look at it from the end with the smaller number.
        let (low, high) = if me <= peer { (ours, theirs) } else { (theirs, ours) };
        let by_speed = |speeds: &[u32]| {
            let mut order: Vec<usize> = (0..speeds.len()).collect();
            order.sort_by_key(|&rail| (std::cmp::Reverse(speeds[rail]), rail));
            order
        };
        let (low_order, mut high_order) = (by_speed(low), by_speed(high));
        let start = mix(me.min(peer), me.max(peer));
        let mut at = 0;
        while at < high_order.len() {
            // Rails that are alike at both ends turn together.
            let alike = |k: usize| {
                low[low_order[k]] == low[low_order[at]] && high[high_order[k]] == high[high_order[at]]
            };
            let end = (at..high_order.len()).find(|&k| !alike(k)).unwrap_or(high_order.len());
            high_order[at..end].rotate_left((start % (end - at) as u64) as usize);
            at = end;
        }
        let mut pairs = vec![0; ours.len()];
        let mut uneven = vec![];
        for (&l, &h) in low_order.iter().zip(&high_order) {
            let (here, there) = if me <= peer { (l, h) } else { (h, l) };
            pairs[here] = there as u8;
            let speeds = (ours[here], theirs[there]);
            if speeds.0 != speeds.1 && speeds.0 != 0 && speeds.1 != 0 {
                uneven.push((here as u8, speeds.0, speeds.1));
            }
        }
        uneven.sort_unstable();
        Ok(Pairing { theirs: pairs, uneven })
    }
}

/// Spreads the bits of two numbers (the finaliser of splitmix64).
fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_come_to_the_same_pairs_and_every_rail_is_used_once() {
        let speeds: [&[u32]; 4] = [&[100; 4], &[100, 400, 100, 400], &[0, 0, 0, 25], &[400, 400, 100, 0]];
        for seed in 0..200u64 {
            let (ours, theirs) = (speeds[seed as usize % 4], speeds[seed as usize / 4 % 4]);
            let here = Pairing::new(ours, theirs, seed, 1000 - seed).unwrap();
            let there = Pairing::new(theirs, ours, 1000 - seed, seed).unwrap();
            for (rail, &to) in here.theirs.iter().enumerate() {
                assert_eq!(there.theirs[to as usize] as usize, rail, "seed {seed}: {here:?} {there:?}");
            }
        }
    }

    #[test]
    fn fast_rails_meet_fast_rails_and_uneven_ones_are_named() {
        let pairing = Pairing::new(&[100, 400], &[400, 100], 1, 2).unwrap();
        assert_eq!((pairing.theirs, pairing.uneven), (vec![1, 0], vec![]));
        let pairing = Pairing::new(&[100, 25, 0], &[100, 100, 100], 1, 2).unwrap();
        assert_eq!(pairing.uneven, [(1, 25, 100)]);
    }

    #[test]
    fn starts_differ_from_pair_to_pair() {
        let firsts: Vec<u8> =
            (0..32).map(|peer| Pairing::new(&[100; 4], &[100; 4], 77, peer).unwrap().theirs[0]).collect();
        for rail in 0..4 {
            let share = firsts.iter().filter(|&&first| first == rail).count();
            assert!((2..=16).contains(&share), "rail {rail} is met by {share} of 32: {firsts:?}");
        }
    }

    #[test]
    fn differing_counts_are_refused_with_both_numbers() {
        let error = Pairing::new(&[100; 3], &[100; 2], 1, 2).unwrap_err();
        assert_eq!(error, Mismatch::Rails { theirs: 2, ours: 3 });
        assert!(error.to_string().contains('3') && error.to_string().contains('2'));
        assert_eq!(Pairing::new(&[], &[], 1, 2), Err(Mismatch::Count { rails: 0 }));
        assert_eq!(Pairing::new(&[1; 17], &[1; 17], 1, 2), Err(Mismatch::Count { rails: 17 }));
    }
}
