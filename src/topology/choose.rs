//! Chooses the NICs of a process.
//!
//! Every process computes the same assignment of NICs to all GPUs of the machine, without
//! communication. It then takes the share of its own GPU.
//!
//! Each GPU gets `NICs / GPUs` NICs, at least one: first the nearest NIC, and then only NICs at the
//! same distance. Among equally near NICs, it prefers one on an adapter that it does not have yet,
//! and then the NIC that the fewest GPUs have.
//!
//! Then the loads are evened out. A GPU exchanges a NIC for one that is at least as near and has at
//! least two fewer users, until no such exchange is left.

use std::path::Path;

use fishplate_sys::affinity::{self, CpuSet};

use super::pci::PciAddress;
use super::{Distance, Machine, distance};

/// The device or node that a process's NICs should be near.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// A GPU.
    Gpu(PciAddress),
    /// A NUMA node.
    Node(u32),
    /// No preference.
    Anywhere,
}

impl Anchor {
    /// Returns the NUMA node that the calling thread is confined to. Returns [`Anchor::Anywhere`]
    /// if the thread may run on several nodes, or the machine has only one.
    pub fn here() -> Anchor {
        let (mut cpu, mut node) = (0u32, 0u32);
        // SAFETY: the call writes the two numbers, and ignores its third argument.
        let done = unsafe { libc::syscall(libc::SYS_getcpu, &raw mut cpu, &raw mut node, 0usize) };
        match affinity::allowed() {
            Ok(allowed) if done == 0 => Anchor::confined(Path::new("/sys"), node, &allowed),
            _ => Anchor::Anywhere,
        }
    }

    fn confined(sys: &Path, node: u32, allowed: &CpuSet) -> Anchor {
        let nodes = sys.join("devices/system/node");
        let several = nodes.join("node1").exists();
        let inside = |cpu| nodes.join(format!("node{node}/cpu{cpu}")).exists();
        if several && allowed.iter().all(inside) { Anchor::Node(node) } else { Anchor::Anywhere }
    }
}

impl Machine {
    /// Returns the distance of a NIC from an anchor. The distance from an unknown GPU is
    /// [`Distance::System`].
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

    /// Returns the NICs of `usable` that a process should use, at most `limit`, best first.
    ///
    /// For a GPU these are its share of the assignment to all GPUs of the machine. For other
    /// anchors they are all NICs at the smallest distance. With an anchor, NICs with less than a
    /// quarter of the fastest NIC's speed are left out.
    pub fn choose(&self, usable: &[usize], anchor: Anchor, limit: usize) -> Vec<usize> {
        let mut usable: Vec<usize> =
            usable.iter().copied().filter(|&nic| nic < self.nics.len()).collect();
        usable.sort_unstable();
        usable.dedup();
        if anchor != Anchor::Anywhere {
            // Leaves out the port of a management network, even if it is near.
            let fastest = usable.iter().filter_map(|&nic| self.nics[nic].mbit).max();
            let slow = |nic: usize| {
                self.nics[nic].mbit.is_some_and(|own| Some(own) < fastest.map(|most| most / 4))
            };
            usable.retain(|&nic| !slow(nic));
        }
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

    /// Exchanges a GPU's NIC for a NIC that is at least as near and has at least two fewer users.
    /// Each exchange reduces the sum of the squared numbers of users, so this terminates.
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

    fn one_adapter(&self, a: usize, b: usize) -> bool {
        match (&self.nics[a].path, &self.nics[b].path) {
            (Some(a), Some(b)) => a.address().same_device(&b.address()),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{LinkState, Nic};
    use std::fs;

    #[test]
    fn a_thread_allowed_on_two_nodes_has_no_anchor() {
        let sys = std::env::temp_dir().join(format!("fishplate-nodes-{}", std::process::id()));
        for (node, cpu) in [(0, 0), (0, 1), (1, 2), (1, 3)] {
            fs::create_dir_all(sys.join(format!("devices/system/node/node{node}/cpu{cpu}")))
                .unwrap();
        }
        let on = |node, cpus: &[usize]| {
            let mut allowed = CpuSet::empty();
            cpus.iter().for_each(|&cpu| allowed.insert(cpu));
            Anchor::confined(&sys, node, &allowed)
        };
        assert_eq!(on(0, &[0, 1]), Anchor::Node(0));
        assert_eq!(on(1, &[3]), Anchor::Node(1));
        assert_eq!((on(0, &[0, 2]), on(1, &[0, 1, 2, 3])), (Anchor::Anywhere, Anchor::Anywhere));
        fs::remove_dir_all(sys.join("devices/system/node/node1")).unwrap();
        assert_eq!(on(0, &[0]), Anchor::Anywhere, "one node");
        fs::remove_dir_all(&sys).unwrap();
    }

    #[test]
    fn a_slow_near_nic_does_not_displace_a_fast_one() {
        let nic = |node, mbit| Nic {
            name: "n".into(),
            interface: None,
            verbs: None,
            path: None,
            node: Some(node),
            mbit,
            link: LinkState::Up,
        };
        let nics =
            vec![nic(0, Some(1_000)), nic(1, Some(100_000)), nic(0, None), nic(0, Some(25_000))];
        let machine = Machine { nics, ..Machine::default() };
        assert_eq!(machine.choose(&[0, 1], Anchor::Node(0), 4), [1]);
        assert_eq!(machine.choose(&[0, 1, 2, 3], Anchor::Node(0), 4), [2, 3]);
        assert_eq!(machine.choose(&[0, 1], Anchor::Anywhere, 4), [0, 1]);
    }
}
