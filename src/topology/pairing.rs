//! Pairs the rails of two ends.
//!
//! Both ends compute the same pairs from both descriptions. Rails on the same fabric are paired in
//! order of speed. Equally fast rails are rotated by a hash of the two ends' ids. Without this,
//! many senders would all use the first NIC of a receiver.

use std::fmt;

/// The reason why the rails of two ends cannot be paired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mismatch {
    /// An end has no rails, or more than 16.
    Count {
        /// The number of rails of that end.
        rails: usize,
    },
    /// The two ends have different numbers of rails.
    Rails {
        /// The peer's number of rails.
        theirs: usize,
        /// Our number of rails.
        ours: usize,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mismatch::Count { rails } => write!(f, "invalid number of rails: {rails}; use 1 to 16"),
            Mismatch::Rails { theirs, ours } => {
                write!(
                    f,
                    "different numbers of rails: {theirs} on the other side, {ours} here; use the \
                     same number"
                )
            }
        }
    }
}

impl std::error::Error for Mismatch {}

/// The properties of a rail that pairing needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RailEnd<'a> {
    /// The provider's name for its fabric. Rails with the same name reach each other. Empty if
    /// unknown.
    pub fabric: &'a str,
    /// Speed in megabits per second; 0 if unknown.
    pub mbit: u32,
}

/// The rails of two ends, paired one to one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pairing {
    /// The remote rail that each local rail is paired with.
    pub theirs: Vec<u8>,
    /// Local rails paired with a rail of another speed, with both speeds in megabits per second.
    pub uneven: Vec<(u8, u32, u32)>,
}

impl Pairing {
    /// Pairs the rails of two ends. `me` and `peer` identify the ends. The other end swaps the
    /// arguments, and computes the inverse pairing.
    ///
    /// # Errors
    /// [`Mismatch`] names both counts.
    pub fn new(
        ours: &[RailEnd<'_>],
        theirs: &[RailEnd<'_>],
        me: u64,
        peer: u64,
    ) -> Result<Pairing, Mismatch> {
        for rails in [ours.len(), theirs.len()] {
            if rails == 0 || rails > 16 {
                return Err(Mismatch::Count { rails });
            }
        }
        if ours.len() != theirs.len() {
            return Err(Mismatch::Rails { theirs: theirs.len(), ours: ours.len() });
        }
        // Both ends compute the pairs from the view of the end with the smaller id.
        let (low, high) = if me <= peer { (ours, theirs) } else { (theirs, ours) };
        let start = mix(me.min(peer), me.max(peer));
        let mut joined = vec![];
        let (mut low_left, mut high_left) = (by_speed(&speeds(low)), by_speed(&speeds(high)));
        let fabrics: Vec<&str> = low_left.iter().map(|&rail| low[rail].fabric).collect();
        for (at, &fabric) in fabrics.iter().enumerate() {
            if !fabric.is_empty() && !fabrics[..at].contains(&fabric) {
                let on = |end: &[RailEnd<'_>], left: &[usize]| -> Vec<usize> {
                    left.iter().copied().filter(|&rail| end[rail].fabric == fabric).collect()
                };
                let (a, b) = (on(low, &low_left), on(high, &high_left));
                let pairs = join(&speeds(low), &speeds(high), &a, &b, start);
                low_left.retain(|rail| pairs.iter().all(|(low, _)| low != rail));
                high_left.retain(|rail| pairs.iter().all(|(_, high)| high != rail));
                joined.extend(pairs);
            }
        }
        // Pairs rails with a fabric that only one end names. It is unknown until use whether such
        // rails reach each other.
        joined.extend(join(&speeds(low), &speeds(high), &low_left, &high_left, 0));
        let mut pairs = vec![0; ours.len()];
        let mut uneven = vec![];
        for (l, h) in joined {
            let (here, there) = if me <= peer { (l, h) } else { (h, l) };
            pairs[here] = there as u8;
            let speeds = (ours[here].mbit, theirs[there].mbit);
            if speeds.0 != speeds.1 && speeds.0 != 0 && speeds.1 != 0 {
                uneven.push((here as u8, speeds.0, speeds.1));
            }
        }
        uneven.sort_unstable();
        Ok(Pairing { theirs: pairs, uneven })
    }
}

/// A rail of one end, for [`joined`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FabricEnd {
    /// Identifies the provider. Rails of different providers do not reach each other.
    pub provider: u32,
    /// Identifies the fabric of the provider.
    pub fabric: u32,
    /// Speed in megabits per second; 0 if unknown.
    pub mbit: u32,
}

/// Returns pairs of a local and a remote rail, by position. The ends may have different numbers of
/// rails; each rail is in at most one pair. The other end swaps the arguments, and computes the
/// same pairs.
///
/// Pairs rails on fabrics that both ends name. If there is no such fabric, pairs rails of the same
/// provider, because routers may connect them.
pub fn joined(ours: &[FabricEnd], theirs: &[FabricEnd], me: u64, peer: u64) -> Vec<(usize, usize)> {
    let (low, high) = if me <= peer { (ours, theirs) } else { (theirs, ours) };
    let on_one = |name: fn(&FabricEnd) -> (u32, u32)| {
        let speeds = |end: &[FabricEnd]| end.iter().map(|rail| rail.mbit).collect::<Vec<u32>>();
        let (low_speeds, high_speeds) = (speeds(low), speeds(high));
        let of = |end: &[FabricEnd], speeds: &[u32], named| {
            let rails = by_speed(speeds).into_iter();
            rails.filter(|&rail| name(&end[rail]) == named).collect::<Vec<usize>>()
        };
        let mut names: Vec<(u32, u32)> = low.iter().map(name).collect();
        names.sort_unstable();
        names.dedup();
        let pairs = names.into_iter().flat_map(|named| {
            let (a, b) = (of(low, &low_speeds, named), of(high, &high_speeds, named));
            join(&low_speeds, &high_speeds, &a, &b, mix(me.min(peer), me.max(peer)))
        });
        pairs.collect::<Vec<_>>()
    };
    let mut pairs = on_one(|rail| (rail.provider, rail.fabric));
    if pairs.is_empty() {
        pairs = on_one(|rail| (rail.provider, 0));
    }
    pairs.sort_unstable();
    if me <= peer { pairs } else { pairs.into_iter().map(|(low, high)| (high, low)).collect() }
}

fn speeds(end: &[RailEnd<'_>]) -> Vec<u32> {
    end.iter().map(|rail| rail.mbit).collect()
}

fn by_speed(speeds: &[u32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..speeds.len()).collect();
    order.sort_by_key(|&rail| (std::cmp::Reverse(speeds[rail]), rail));
    order
}

/// Pairs rails in order of speed, until one end has no rails left. The end with more rails rotates
/// its equally fast rails by `start`, so that each of them serves some peers.
fn join(low: &[u32], high: &[u32], a: &[usize], b: &[usize], start: u64) -> Vec<(usize, usize)> {
    let (mut a, mut b) = (a.to_vec(), b.to_vec());
    match a.len() > b.len() {
        true => rotate(low, &mut a, start),
        false => rotate(high, &mut b, start),
    }
    a.into_iter().zip(b).collect()
}

fn rotate(speeds: &[u32], rails: &mut [usize], start: u64) {
    for alike in rails.chunk_by_mut(|&a, &b| speeds[a] == speeds[b]) {
        alike.rotate_left((start % alike.len() as u64) as usize);
    }
}

/// Hashes two numbers (the finaliser of splitmix64).
fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    fn ends(speeds: &[u32]) -> Vec<RailEnd<'static>> {
        speeds.iter().map(|&mbit| RailEnd { fabric: "net", mbit }).collect()
    }

    fn pairing(ours: &[u32], theirs: &[u32], me: u64, peer: u64) -> Result<Pairing, Mismatch> {
        Pairing::new(&ends(ours), &ends(theirs), me, peer)
    }

    #[test]
    fn both_ends_compute_the_same_pairs_and_use_every_rail_once() {
        let speeds: [&[u32]; 4] =
            [&[100; 4], &[100, 400, 100, 400], &[0, 0, 0, 25], &[400, 400, 100, 0]];
        let fabrics = ["", "a", "b", "c"];
        for seed in 0..2000u64 {
            let end = |seed: u64| -> Vec<RailEnd<'static>> {
                let fabric = |at: usize| fabrics[(mix(seed, at as u64) % 4) as usize];
                let speeds = speeds[(mix(seed, 99) % 4) as usize].iter().enumerate();
                speeds.map(|(at, &mbit)| RailEnd { fabric: fabric(at), mbit }).collect()
            };
            let (ours, theirs) = (end(seed), end(!seed));
            let here = Pairing::new(&ours, &theirs, seed, 1000 - (seed % 1000)).unwrap();
            let there = Pairing::new(&theirs, &ours, 1000 - (seed % 1000), seed).unwrap();
            for (rail, &to) in here.theirs.iter().enumerate() {
                assert_eq!(
                    there.theirs[to as usize] as usize, rail,
                    "seed {seed}: {here:?} {there:?}"
                );
            }
        }
    }

    #[test]
    fn rails_on_one_fabric_are_paired_in_any_order() {
        let ours =
            [("left", 100), ("right", 400), ("", 0)].map(|(fabric, mbit)| RailEnd { fabric, mbit });
        let theirs = [("right", 25), ("other", 400), ("left", 100)]
            .map(|(fabric, mbit)| RailEnd { fabric, mbit });
        for peer in 0..50 {
            assert_eq!(Pairing::new(&ours, &theirs, 7, peer).unwrap().theirs, [2, 0, 1]);
        }
    }

    #[test]
    fn ends_with_different_numbers_of_rails_compute_the_same_pairs() {
        let end = |count: usize, seed: u64| -> Vec<FabricEnd> {
            let rail = |at: u64| FabricEnd {
                provider: (mix(seed, at) % 2) as u32,
                fabric: (mix(seed, at + 100) % 3) as u32,
                mbit: [0, 100, 400][(mix(seed, at + 200) % 3) as usize],
            };
            (0..count as u64).map(rail).collect()
        };
        for seed in 0..2000 {
            let (ours, theirs) =
                (end(1 + seed as usize % 8, seed), end(1 + seed as usize % 5, !seed));
            let here = joined(&ours, &theirs, seed, 1000);
            let mut there: Vec<_> =
                joined(&theirs, &ours, 1000, seed).into_iter().map(|(a, b)| (b, a)).collect();
            let mut sorted = here.clone();
            sorted.sort_unstable();
            there.sort_unstable();
            assert_eq!(sorted, there, "seed {seed}");
            for (at, &(a, b)) in here.iter().enumerate() {
                assert_eq!(ours[a].provider, theirs[b].provider, "seed {seed}");
                assert!(here[..at].iter().all(|&(c, d)| a != c && b != d), "seed {seed}: {here:?}");
            }
        }
    }

    #[test]
    fn rails_on_other_fabrics_are_paired_only_without_a_common_one() {
        let rail = |provider, fabric| FabricEnd { provider, fabric, mbit: 100 };
        let four = [rail(1, 1), rail(1, 2), rail(1, 1), rail(1, 3)];
        let two = [rail(1, 3), rail(1, 1)];
        let mut pairs = joined(&four, &two, 1, 2);
        pairs.sort_unstable();
        assert!(pairs == [(0, 1), (3, 0)] || pairs == [(2, 1), (3, 0)], "{pairs:?}");
        assert_eq!(joined(&four, &[rail(1, 9)], 1, 2).len(), 1, "through a router");
        assert_eq!(joined(&four, &[rail(2, 1)], 1, 2), [], "another provider");
        assert_eq!(joined(&four, &[], 1, 2), []);
    }

    #[test]
    fn fast_rails_pair_with_fast_ones_and_uneven_pairs_are_named() {
        let joined = pairing(&[100, 400], &[400, 100], 1, 2).unwrap();
        assert_eq!((joined.theirs, joined.uneven), (vec![1, 0], vec![]));
        let joined = pairing(&[100, 25, 0], &[100, 100, 100], 1, 2).unwrap();
        assert_eq!(joined.uneven, [(1, 25, 100)]);
    }

    #[test]
    fn rotation_differs_between_pairs_of_ends() {
        let firsts: Vec<u8> = (0..32)
            .map(|peer| pairing(&[100; 4], &[100; 4], 77, peer).unwrap().theirs[0])
            .collect();
        for rail in 0..4 {
            let share = firsts.iter().filter(|&&first| first == rail).count();
            assert!(
                (2..=16).contains(&share),
                "rail {rail} is paired with {share} of 32: {firsts:?}"
            );
        }
    }

    #[test]
    fn each_rail_of_the_larger_end_serves_some_peers() {
        let rail = FabricEnd { provider: 1, fabric: 1, mbit: 100 };
        let shares = |peers: Range<u64>, pair: &dyn Fn(u64) -> usize| {
            let mut shares = [0; 4];
            peers.for_each(|peer| shares[pair(peer)] += 1);
            shares
        };
        let clients = shares(0..32, &|peer| joined(&[rail], &[rail; 4], peer, 77)[0].1);
        let servers = shares(100..132, &|peer| joined(&[rail; 4], &[rail], 77, peer)[0].0);
        for share in clients.into_iter().chain(servers) {
            assert!((2..=16).contains(&share), "{clients:?} {servers:?}");
        }
    }

    #[test]
    fn differing_counts_are_refused_with_both_numbers() {
        let error = pairing(&[100; 3], &[100; 2], 1, 2).unwrap_err();
        assert_eq!(error, Mismatch::Rails { theirs: 2, ours: 3 });
        assert!(error.to_string().contains('3') && error.to_string().contains('2'));
        assert_eq!(pairing(&[], &[], 1, 2), Err(Mismatch::Count { rails: 0 }));
        assert_eq!(pairing(&[1; 17], &[1; 17], 1, 2), Err(Mismatch::Count { rails: 17 }));
    }
}
