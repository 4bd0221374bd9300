//! Tells an endpoint's owner which peers are down, and which may be attached again.

use super::super::world::NONE;
use super::{PEERS, SimRail};
use crate::error::PeerError;
use crate::mem::Peer;
use crate::rail::Sink;

/// Number of polls between two reports that a fenced peer may be attached again.
const UP: u64 = 300;

impl SimRail<'_, '_> {
    /// Returns the number of reports, which is at most `budget`.
    pub(super) fn report_peers<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let count = self.report_deaths(budget, sink);
        let count = count + self.report_cuts(budget - count, sink);
        count + self.report_heals(budget - count, sink)
    }

    /// Reports dead nodes, after the completions of their operations were sent.
    fn report_deaths<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let mut peers_down = 0u16;
        {
            let world = &mut *self.sim.world.borrow_mut();
            if world.dead == 0 {
                return 0;
            }
            world.fail_dead();
            for (i, &node) in self.peers.iter().enumerate() {
                let known = node == NONE || self.told & (1 << i) != 0;
                if !known && world.is_dead(node) && peers_down.count_ones() < budget {
                    peers_down |= 1 << i;
                }
            }
        }
        self.told |= peers_down;
        for peer in (0..16).filter(|i| peers_down & (1 << i) != 0) {
            sink.peer_down(Peer(peer), PeerError::Died);
        }
        peers_down.count_ones()
    }

    /// Reports nodes whose link was cut, or that the fence of another node cut off.
    fn report_cuts<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let cut = {
            let world = self.sim.world.borrow();
            world.cuts.reported(self.own as usize, world.now)
        };
        if cut == 0 && self.lost == 0 {
            return 0;
        }
        let (told, mut reported) = (self.told, 0);
        for i in (0..PEERS).filter(|i| told & 1 << i == 0) {
            let node = self.peers[i];
            let lost = self.lost & 1 << i != 0 || cut & 1u64.unbounded_shl(node as u32) != 0;
            if node != NONE && lost && reported < budget {
                (self.told, self.lost) = (self.told | 1 << i, self.lost & !(1 << i));
                reported += 1;
                sink.peer_down(Peer(i as u16), PeerError::Lost);
            }
        }
        reported
    }

    /// Reports only nodes whose link is intact, every [`UP`] polls.
    fn report_heals<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let up = {
            let world = self.sim.world.borrow();
            let own = self.own as usize;
            let up = world.cuts.fenced[own] & !world.cuts.cut[own] & !world.dead;
            if up == 0 || world.now < self.up_at {
                return 0;
            }
            self.up_at = world.now + UP;
            up
        };
        let mut reported = 0;
        for (i, &node) in self.peers.iter().enumerate() {
            if node != NONE && up & 1u64.unbounded_shl(node as u32) != 0 && reported < budget {
                reported += 1;
                sink.peer_up(Peer(i as u16));
            }
        }
        reported
    }
}
