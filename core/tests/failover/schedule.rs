//! The fleet's side of a schedule: which rails the engines use.

use fishplate_core::mem::RailId;
use fishplate_core::rail::Rail;
use fishplate_core::rail::sim::schedule::{Nodes, Schedule};

use super::support::fleet::{self, End, Node};

pub type Fleet<const RAILS: usize> = Vec<Node<End, RAILS>>;

/// A fleet, and its number of rails. Each node numbers the rails differently.
pub struct Ends<'a, R: Rail, const RAILS: usize>(pub &'a mut [Node<R, RAILS>], pub u16);

impl<R: Rail, const RAILS: usize> Ends<'_, R, RAILS> {
    /// Returns the node's own id for rail `rail` of the fabric.
    fn ours(&self, node: u16, rail: u16) -> RailId {
        RailId(((rail + self.1 - node % self.1) % self.1) as u8)
    }
}

impl<R: Rail, const RAILS: usize> Nodes for Ends<'_, R, RAILS> {
    fn uses(&self, from: u16, to: u16, rail: u16) -> bool {
        let Node { engine, peers, .. } = &self.0[from as usize];
        engine.rail_error(peers[to as usize], self.ours(from, rail)) == Ok(None)
    }

    fn disable(&mut self, by: u16, of: u16, rail: u16) -> bool {
        let rail = self.ours(by, rail);
        let node = &mut self.0[by as usize];
        node.engine.disable_rail(node.peers[of as usize], rail).is_ok()
    }

    fn enable(&mut self, by: u16, of: u16, rail: u16) {
        let rail = self.ours(by, rail);
        let node = &mut self.0[by as usize];
        _ = node.engine.enable_rail(node.peers[of as usize], rail);
    }
}

/// Waits until both nodes use every link. All links must have been healed.
pub fn all_return<R: Rail, const RAILS: usize>(
    schedule: &Schedule<'_, '_>,
    fleet: &mut [Node<R, RAILS>],
    rails: u16,
    dead: Option<usize>,
    seed: u64,
) {
    fleet::turn_until(fleet, &format!("seed {seed}: all rails are back"), |fleet| {
        for _ in 0..16 {
            let living = fleet.iter_mut().enumerate().filter(|(node, _)| dead != Some(*node));
            living.for_each(|(_, node)| _ = node.engine.progress());
        }
        schedule.all_used(&Ends(fleet, rails))
    });
}
