//! Defines the patterns of flows between ranks.

use clap::ValueEnum;
use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// Each rank of the first half to one rank of the second half.
    Pairs,
    /// Rank 0 to all others.
    OneToMany,
    /// All others to rank 0.
    ManyToOne,
    /// Each rank to all others.
    AllToAll,
    /// Each rank to the next.
    Ring,
}

impl Pattern {
    pub fn targets(self, rank: usize, size: usize) -> Vec<usize> {
        match self {
            Pattern::Pairs if rank < size / 2 => vec![rank + size / 2],
            Pattern::OneToMany if rank == 0 => (1..size).collect(),
            Pattern::ManyToOne if rank != 0 => vec![0],
            // Starts with the next rank, so that not all ranks send to the same rank first.
            Pattern::AllToAll => (1..size).map(|step| (rank + step) % size).collect(),
            Pattern::Ring => vec![(rank + 1) % size],
            _ => vec![],
        }
    }

    /// The inverse of [`targets`](Self::targets), in ascending order.
    pub fn sources(self, rank: usize, size: usize) -> Vec<usize> {
        let others = || (0..size).filter(|&other| other != rank).collect();
        match self {
            Pattern::Pairs if (size / 2..size / 2 * 2).contains(&rank) => vec![rank - size / 2],
            Pattern::OneToMany if rank != 0 => vec![0],
            Pattern::ManyToOne if rank == 0 => others(),
            Pattern::AllToAll => others(),
            Pattern::Ring => vec![(rank + size - 1) % size],
            _ => vec![],
        }
    }

    pub fn flows(self, size: usize) -> u64 {
        let size = size as u64;
        match self {
            Pattern::Pairs => size / 2,
            Pattern::OneToMany | Pattern::ManyToOne => size - 1,
            Pattern::AllToAll => size * (size - 1),
            Pattern::Ring => size,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_the_inverse_of_targets_and_nobody_sends_to_itself() {
        for size in 2..20 {
            for &pattern in Pattern::value_variants() {
                let targets: Vec<Vec<usize>> =
                    (0..size).map(|rank| pattern.targets(rank, size)).collect();
                for rank in 0..size {
                    let senders: Vec<usize> =
                        (0..size).filter(|&other| targets[other].contains(&rank)).collect();
                    assert_eq!(
                        pattern.sources(rank, size),
                        senders,
                        "{pattern:?} {rank} of {size}"
                    );
                    assert!(!senders.contains(&rank), "{pattern:?} {rank} of {size}");
                }
                let flows = targets.iter().map(Vec::len).sum::<usize>() as u64;
                assert_eq!(pattern.flows(size), flows, "{pattern:?} {size}");
            }
        }
    }
}
