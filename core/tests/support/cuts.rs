//! Schedules of cut links and disabled rails.

use fishplate_core::mem::RailId;
use fishplate_core::rail::sim::Sim;

use super::Random;
use super::fleet::{self, End, Node};

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

/// What took a rail between two nodes out of use: links that are cut, or the first node's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Down {
    Links { there: bool, back: bool },
    Disabled,
}

/// Rails that fail and come back, again and again. One stays in use between each two nodes.
pub struct Flaps {
    sim: &'static Sim<'static>,
    random: Random,
    rails: u16,
    /// Of the rail between two nodes, the first not after the second.
    down: Vec<((u16, u16, u16), Down)>,
    /// Of 1000 turns, in how many something happens.
    often: u64,
    pub events: u64,
}

impl Flaps {
    pub fn new(sim: &'static Sim<'static>, rails: u16, often: u64, seed: u64) -> Flaps {
        Flaps { sim, random: Random(seed ^ 0xf1a9), rails, down: vec![], often, events: 0 }
    }

    /// A node's number of a rail.
    fn ours(&self, node: u16, rail: u16) -> RailId {
        RailId(((rail + self.rails - node % self.rails) % self.rails) as u8)
    }

    /// How many of the two ends of a rail use it.
    fn users<const RAILS: usize>(&self, fleet: &[Node<End, RAILS>], (a, b, rail): (u16, u16, u16)) -> usize {
        let used = |&(from, to): &(u16, u16)| {
            let Node { engine, peers, .. } = &fleet[from as usize];
            engine.rail_error(peers[to as usize], self.ours(from, rail)) == Ok(None)
        };
        [(a, b), (b, a)].iter().filter(|ends| used(ends)).count()
    }

    fn is_used<const RAILS: usize>(&self, fleet: &[Node<End, RAILS>], at: (u16, u16, u16)) -> bool {
        !self.down.iter().any(|(place, _)| *place == at) && self.users(fleet, at) == 2
    }

    /// Lets a rail fail, or come back, in some turns.
    pub fn turn<const RAILS: usize>(&mut self, fleet: &mut [Node<End, RAILS>]) {
        if self.random.below(1000) >= self.often {
            return;
        }
        let nodes = fleet.len() as u64;
        let (a, b) = (self.random.below(nodes) as u16, self.random.below(nodes) as u16);
        let (a, b) = (a.min(b), a.max(b));
        let place = (a, b, self.random.below(self.rails.into()) as u16);
        if let Some(at) = self.down.iter().position(|(other, _)| *other == place) {
            // Not before both know: until then it is not to be taken for one that is whole.
            return if self.users(fleet, place) == 0 {
                self.restore(fleet, at)
            };
        }
        let others = (0..self.rails).filter(|&rail| rail != place.2);
        if !others.into_iter().any(|rail| self.is_used(fleet, (a, b, rail))) {
            return;
        }
        let down = match self.random.below(4) {
            0 => Down::Disabled,
            1 => Down::Links { there: true, back: false },
            2 => Down::Links { there: false, back: true },
            _ => Down::Links { there: true, back: true },
        };
        let node = &mut fleet[a as usize];
        match down {
            // It may be the last one in use: those that return are not.
            Down::Disabled => {
                if node.engine.disable_rail(node.peers[b as usize], self.ours(a, place.2)).is_err() {
                    return;
                }
            }
            Down::Links { there, back } => {
                let late = self.random.below(LATE.into()) as u32;
                for (from, to, cut) in [(a, b, there), (b, a, back)] {
                    if cut {
                        self.sim.cut(from, to, place.2, late).unwrap();
                    }
                }
            }
        }
        self.down.push((place, down));
        self.events += 1;
    }

    fn restore<const RAILS: usize>(&mut self, fleet: &mut [Node<End, RAILS>], at: usize) {
        let ((a, b, rail), down) = self.down.swap_remove(at);
        match down {
            Down::Disabled => {
                let node = &mut fleet[a as usize];
                node.engine.enable_rail(node.peers[b as usize], self.ours(a, rail)).unwrap();
            }
            Down::Links { there, back } => {
                for (from, to, cut) in [(a, b, there), (b, a, back)] {
                    if cut {
                        self.sim.heal(from, to, rail).unwrap();
                    }
                }
            }
        }
        self.events += 1;
    }

    /// Restores all rails, and waits until all are in use again.
    pub fn end<const RAILS: usize>(&mut self, fleet: &mut [Node<End, RAILS>], seed: u64) {
        while !self.down.is_empty() {
            self.restore(fleet, 0);
        }
        fleet::turn_until(fleet, &format!("seed {seed}: all rails are back"), |fleet| {
            let nodes = fleet.len() as u16;
            let places = (0..nodes).flat_map(|a| (a..nodes).map(move |b| (a, b)));
            places.into_iter().all(|(a, b)| (0..self.rails).all(|rail| self.is_used(fleet, (a, b, rail))))
        });
    }
}
