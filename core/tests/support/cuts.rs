//! Schedules of cut links and disabled rails.

use fishplate_core::mem::RailId;
use fishplate_core::rail::sim::Sim;

use super::Random;
use super::fleet::{End, Node};

/// Most polls after a cut in which traffic of the link may still land.
pub const LATE: u32 = 2000;

/// The event of a rail between two nodes, and its turn.
#[derive(Clone, Copy, Debug)]
enum Cut {
    /// The link from the first to the second.
    OneWay,
    BothWays,
    /// The first node disables the rail.
    Disabled,
}

/// The events by turn.
pub struct Plan {
    sim: &'static Sim<'static>,
    rails: u16,
    cuts: Vec<(u64, Cut, u16, u16, u16)>,
}

impl Plan {
    /// Some of the rails between each two nodes, including a node and itself, fail in the first
    /// `turns` turns. One remains.
    pub fn new(sim: &'static Sim<'static>, nodes: u16, rails: u16, turns: u64, seed: u64) -> Plan {
        let mut random = Random(seed ^ 0xfa11);
        let mut cuts = vec![];
        for a in 0..nodes {
            for b in a..nodes {
                let spared = random.below(rails as u64) as u16;
                // Often at the same time.
                let mut turn = random.below(turns);
                for rail in (0..rails).filter(|&rail| rail != spared) {
                    if random.below(4) == 0 {
                        continue;
                    }
                    if random.below(2) == 0 {
                        turn = random.below(turns);
                    }
                    let cut = [Cut::OneWay, Cut::BothWays, Cut::Disabled][random.below(3) as usize];
                    let (from, to) = if random.below(2) == 0 { (a, b) } else { (b, a) };
                    cuts.push((turn, cut, from, to, rail));
                }
            }
        }
        Plan { sim, rails, cuts }
    }

    /// Executes the events of a turn.
    pub fn turn<const RAILS: usize>(&self, turn: u64, fleet: &mut [Node<End, RAILS>]) {
        for &(_, cut, from, to, rail) in self.cuts.iter().filter(|cut| cut.0 == turn) {
            match cut {
                Cut::OneWay => self.sim.cut(from, to, rail, LATE).unwrap(),
                Cut::BothWays => {
                    self.sim.cut(from, to, rail, LATE).unwrap();
                    self.sim.cut(to, from, rail, LATE).unwrap();
                }
                Cut::Disabled => {
                    // Each node numbers the rails of the fabric differently.
                    let ours = (rail + self.rails - from % self.rails) % self.rails;
                    let node = &mut fleet[from as usize];
                    let peer = node.peers[to as usize];
                    // It may have left.
                    if node.engine.has_left(peer) == Ok(false) {
                        node.engine.disable_rail(peer, RailId(ours as u8)).unwrap();
                    }
                }
            }
        }
    }
}
