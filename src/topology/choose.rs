//! The choice of NICs.
//!
//! Every process computes the same deal over all GPUs and takes its own GPU's hand: nobody asks
//! anybody. Each GPU gets `NICs / GPUs` of them, at least one: first the nearest, and further ones
//! only if no farther away than its first; of equally near ones that which fewest others hold. Then
//! single NICs change hands where one is held by two more than another that is no farther away.
//! Never does a GPU get a farther NIC for the sake of balance.

use super::pci::PciAddress;
use super::{Distance, Machine, distance};

/// What a process wants to be near to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// A GPU.
    Gpu(PciAddress),
    /// A NUMA node.
    Node(u32),
    /// Nothing: every NIC is as good as any other.
    Anywhere,
}

impl Machine {
    /// How far a NIC is from where the process wants to be. An absent GPU is far from everything.
    pub fn distance(&self, nic: usize, anchor: Anchor) -> Distance {
        let Some(nic) = self.nics.get(nic) else {
            return Distance::System;
        };
        let here = (nic.path.as_ref(), nic.node);
        match anchor {
            Anchor::Gpu(address) => match self.gpus.iter().find(|gpu| gpu.address == address) {
                Some(gpu) => distance(here, (gpu.path.as_ref(), gpu.node)),
                None => Distance::System,
            },
            Anchor::Node(node) => distance(here, (None, Some(node))),
            Anchor::Anywhere => Distance::System,
        }
    }

    /// The NICs that a process should use, among those of `usable`, at most `limit`, best first.
    ///
    /// For a GPU, its hand of the deal over all GPUs of the machine. For a node or for nothing, all
    /// NICs that are as near as the nearest.
    pub fn choose(&self, usable: &[usize], anchor: Anchor, limit: usize) -> Vec<usize> {
        let mut usable: Vec<usize> = usable.iter().copied().filter(|&nic| nic < self.nics.len()).collect();
        usable.sort_unstable();
        usable.dedup();
        if let Anchor::Gpu(address) = anchor
            && let Some(gpu) = self.gpus.iter().position(|gpu| gpu.address == address)
        {
            return self.deal(&usable, limit).swap_remove(gpu);
        }
        let nearest = usable.iter().map(|&nic| self.distance(nic, anchor)).min();
        usable.retain(|&nic| Some(self.distance(nic, anchor)) == nearest);
        usable.truncate(limit);
        usable
    }

    /// Deals the NICs out: one hand per GPU.
    fn deal(&self, usable: &[usize], limit: usize) -> Vec<Vec<usize>> {
        let gpus = self.gpus.len();
        let share = (usable.len() / gpus.max(1)).max(1).min(limit);
        let mut held = vec![0usize; self.nics.len()];
        let mut hands: Vec<Vec<usize>> = vec![vec![]; gpus];
        for round in 0..share {
            for (gpu, hand) in hands.iter_mut().enumerate() {
                let farthest = match hand.first() {
                    Some(&first) => self.gpu_distance(first, gpu),
                    None if round == 0 => Distance::System,
                    None => continue,
                };
                let best = usable
                    .iter()
                    .copied()
                    .filter(|nic| !hand.contains(nic) && self.gpu_distance(*nic, gpu) <= farthest)
                    .min_by_key(|&nic| {
                        let twin = hand.iter().any(|&other| self.one_adapter(nic, other));
                        (self.gpu_distance(nic, gpu), twin, held[nic], self.hops(nic, gpu), nic)
                    });
                if let Some(nic) = best {
                    held[nic] += 1;
                    hand.push(nic);
                }
            }
        }
        self.even_out(usable, &mut hands, &mut held);
        hands
    }

    /// Moves NICs held by two more than another. Each move lessens the sum of squares, so it ends.
    fn even_out(&self, usable: &[usize], hands: &mut [Vec<usize>], held: &mut [usize]) {
        loop {
            let mut moved = false;
            for (gpu, hand) in hands.iter_mut().enumerate() {
                for at in 0..hand.len() {
                    let from = hand[at];
                    let to = usable
                        .iter()
                        .copied()
                        .filter(|to| !hand.contains(to) && held[*to] + 2 <= held[from])
                        .filter(|to| self.gpu_distance(*to, gpu) <= self.gpu_distance(from, gpu))
                        .min_by_key(|&to| (self.gpu_distance(to, gpu), held[to], to));
                    if let Some(to) = to {
                        held[from] -= 1;
                        held[to] += 1;
                        hand[at] = to;
                        moved = true;
                    }
                }
            }
            if !moved {
                return;
            }
        }
    }

    fn gpu_distance(&self, nic: usize, gpu: usize) -> Distance {
        self.distance(nic, Anchor::Gpu(self.gpus[gpu].address))
    }

    fn hops(&self, nic: usize, gpu: usize) -> usize {
        match (&self.nics[nic].path, &self.gpus[gpu].path) {
            (Some(a), Some(b)) => a.hops(b),
            _ => usize::MAX,
        }
    }

    /// Whether two NICs are ports of one adapter.
    fn one_adapter(&self, a: usize, b: usize) -> bool {
        match (&self.nics[a].path, &self.nics[b].path) {
            (Some(a), Some(b)) => a.address().same_device(&b.address()),
            _ => false,
        }
    }
}
