//! Which ranks send to which.

use std::ops::Range;

use clap::ValueEnum;
use serde::Serialize;

/// A pattern of flows among the ranks of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// Each of the first half to one of the second half.
    Pairs,
    /// Rank 0 to all others.
    OneToMany,
    /// All others to rank 0.
    ManyToOne,
    /// Each to all others.
    AllToAll,
    /// Each to the next.
    Ring,
}

impl Pattern {
    /// The ranks to which one of `size` sends.
    pub fn targets(self, rank: usize, size: usize) -> Vec<usize> {
        let others = |ranks: Range<usize>| ranks.filter(|&other| other != rank).collect();
        match self {
            Pattern::Pairs if rank < size / 2 => vec![rank + size / 2],
            Pattern::OneToMany if rank == 0 => others(0..size),
            Pattern::ManyToOne if rank != 0 => vec![0],
            // From the next on, so that not all begin with the same.
            Pattern::AllToAll => (1..size).map(|step| (rank + step) % size).collect(),
            Pattern::Ring => vec![(rank + 1) % size],
            _ => vec![],
        }
    }

    /// The ranks that send to one of `size`, in order.
    pub fn sources(self, rank: usize, size: usize) -> Vec<usize> {
        (0..size).filter(|&other| self.targets(other, size).contains(&rank)).collect()
    }

    /// How many flows there are.
    pub fn flows(self, size: usize) -> u64 {
        (0..size).map(|rank| self.targets(rank, size).len() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_has_its_flows_and_nobody_sends_to_itself() {
        for size in 2..20 {
            let n = size as u64;
            for (pattern, flows) in [
                (Pattern::Pairs, n / 2),
                (Pattern::OneToMany, n - 1),
                (Pattern::ManyToOne, n - 1),
                (Pattern::AllToAll, n * (n - 1)),
                (Pattern::Ring, n),
            ] {
                assert_eq!(pattern.flows(size), flows, "{pattern:?} {size}");
                let received: usize = (0..size).map(|rank| pattern.sources(rank, size).len()).sum();
                assert_eq!(received as u64, flows, "{pattern:?} {size}");
                assert!(
                    (0..size).all(|rank| !pattern.targets(rank, size).contains(&rank)),
                    "{pattern:?} {size}"
                );
            }
        }
    }
}
