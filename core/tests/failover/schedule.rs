//! The events of a fleet's rails and their times, drawn from a seed.

use fishplate_core::mem::RailId;
use fishplate_core::rail::sim::Sim;

use super::support::Random;
use super::support::fleet::{self, End, Node};

pub type Fleet<const RAILS: usize> = Vec<Node<End, RAILS>>;

/// A rail between two nodes, with `a <= b`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    pub a: u16,
    pub b: u16,
    pub rail: u16,
}

/// Why a link is out of use. It is cut in one or both directions, or one of its nodes has disabled
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    Cut { there: bool, back: bool },
    Disabled { by: u16, of: u16 },
}

/// A link that has failed, and is not known to be in use again.
#[derive(Debug)]
struct Down {
    link: Link,
    why: Why,
    /// Whether one of the two nodes has stopped using the link.
    seen: bool,
    healed: bool,
}

/// An event, printed if the run fails.
#[derive(Debug)]
#[allow(dead_code, reason = "printed")]
enum Event {
    Fails(Vec<Link>, Why, u32),
    Heals(Link),
    Stalls(u16, u64),
    Dies(u16),
}

/// Rails that fail and return. One rail between each two nodes stays in use.
pub struct Schedule {
    sim: &'static Sim<'static>,
    random: Random,
    nodes: u16,
    rails: u16,
    /// Whether a fence cuts off all peers of an endpoint. If so, nodes that are joined by one rail
    /// alone need no fence of that rail: it would separate them.
    closes: bool,
    /// Rate of turns in which something happens, per 1000.
    often: u64,
    down: Vec<Down>,
    /// A node that makes no passes until the given turn.
    stalled: Option<(u16, u64)>,
    /// The node that has died, if any.
    dead: Option<u16>,
    /// Maximum number of polls after which traffic of a cut link lands.
    late: u32,
    log: Vec<(u64, Event)>,
}

impl Schedule {
    pub fn new(sim: &'static Sim<'static>, nodes: u16, rails: u16, closes: bool, seed: u64) -> Schedule {
        let mut random = Random(seed ^ 0xf1a9);
        let often = [5, 20, 60][random.below(3) as usize];
        Schedule {
            sim,
            random,
            nodes,
            rails,
            closes,
            often,
            down: vec![],
            stalled: None,
            dead: None,
            late: 0,
            log: vec![],
        }
    }

    pub fn events(&self) -> usize {
        self.log.len()
    }

    /// Returns the maximum number of polls after which traffic of a cut link lands.
    pub fn late(&self) -> u64 {
        self.late.into()
    }

    pub fn print(&self) {
        self.log.iter().for_each(|(turn, event)| println!("turn {turn}: {event:?}"));
    }

    /// Returns whether a node makes a pass in this turn.
    pub fn is_awake(&self, node: u16, turn: u64) -> bool {
        self.dead != Some(node)
            && self.stalled.is_none_or(|(stalled, until)| stalled != node || turn >= until)
    }

    /// Kills a node. The simulator notifies its peers.
    pub fn kill(&mut self, node: u16, turn: u64) {
        self.sim.kill(node);
        self.dead = Some(node);
        // The other nodes may still close endpoints because of links to the dead one.
        self.down.retain(|down| self.closes || down.link.a != node && down.link.b != node);
        self.log.push((turn, Event::Dies(node)));
    }

    /// Returns a node's own number of a rail.
    fn ours(&self, node: u16, rail: u16) -> RailId {
        RailId(((rail + self.rails - node % self.rails) % self.rails) as u8)
    }

    /// Returns how many of the two nodes of a link use it.
    fn users<const RAILS: usize>(&self, fleet: &[Node<End, RAILS>], link: Link) -> usize {
        let Link { a, b, rail } = link;
        let used = |&(from, to): &(u16, u16)| {
            let Node { engine, peers, .. } = &fleet[from as usize];
            engine.rail_error(peers[to as usize], self.ours(from, rail)) == Ok(None)
        };
        [(a, b), (b, a)].iter().filter(|ends| used(ends)).count()
    }

    fn is_used<const RAILS: usize>(&self, fleet: &Fleet<RAILS>, link: Link) -> bool {
        !self.down.iter().any(|down| down.link == link) && self.users(fleet, link) == 2
    }

    fn links(&self) -> impl Iterator<Item = Link> + use<> {
        let (nodes, rails, dead) = (self.nodes, self.rails, self.dead);
        let pairs = (0..nodes).flat_map(move |a| (a..nodes).map(move |b| (a, b)));
        let pairs = pairs.filter(move |&(a, b)| dead != Some(a) && dead != Some(b));
        pairs.flat_map(move |(a, b)| (0..rails).map(move |rail| Link { a, b, rail }))
    }

    /// Returns whether links of a rail may fail at once, because other links between their nodes
    /// stay in use.
    fn may_fail<const RAILS: usize>(&self, fleet: &Fleet<RAILS>, links: &[Link]) -> bool {
        let stays = |&Link { a, b, rail }: &Link| {
            let mut others = (0..self.rails).filter(|&other| other != rail);
            others.any(|rail| {
                let other = Link { a, b, rail };
                self.is_used(fleet, other) && (!self.closes || !self.closes_end_of(other, links))
            })
        };
        links.iter().all(stays) && (!self.closes || self.may_close(links))
    }

    /// Returns the given links and all failed ones.
    fn all_down(&self, links: &[Link]) -> impl Iterator<Item = Link> {
        links.iter().copied().chain(self.down.iter().map(|down| down.link))
    }

    /// Returns whether an end of a link is closed because of these and all failed links.
    fn closes_end_of(&self, link: Link, links: &[Link]) -> bool {
        let ends = [link.a, link.b];
        self.all_down(links)
            .any(|down| down.rail == link.rail && (ends.contains(&down.a) || ends.contains(&down.b)))
    }

    /// Returns whether fences of these and all failed links leave a rail between each two nodes.
    fn may_close(&self, links: &[Link]) -> bool {
        self.links().all(|Link { a, b, .. }| {
            let all = (0..self.rails).map(|rail| Link { a, b, rail });
            let mut good = all.filter(|&link| self.all_down(links).all(|down| down != link));
            match (good.next(), good.next()) {
                (None, _) => false,
                (Some(last), None) => !self.closes_end_of(last, links),
                _ => true,
            }
        })
    }

    /// Cuts links in both directions at once.
    pub fn cut(&mut self, turn: u64, links: &[Link]) {
        assert!(self.may_close(links), "{links:?}");
        for &link in links {
            let Link { a, b, rail } = link;
            let why = Why::Cut { there: true, back: true };
            self.sim.cut(a, b, rail, 0).unwrap();
            self.sim.cut(b, a, rail, 0).unwrap();
            self.down.push(Down { link, why, seen: false, healed: false });
            self.log.push((turn, Event::Fails(vec![link], why, 0)));
        }
    }

    /// Executes the events of a turn.
    pub fn turn<const RAILS: usize>(&mut self, turn: u64, fleet: &mut Fleet<RAILS>) {
        let mut down = std::mem::take(&mut self.down);
        down.retain_mut(|down| {
            let users = self.users(fleet, down.link);
            down.seen |= users < 2;
            !(down.healed && down.seen && users == 2)
        });
        self.down = down;
        if self.random.below(1000) >= self.often {
            return;
        }
        match self.random.below(8) {
            0 => {
                let (node, until) = (self.random.below(self.nodes.into()) as u16, 1 + self.random.below(300));
                self.stalled = Some((node, turn + until));
                self.log.push((turn, Event::Stalls(node, until)));
            }
            1..=4 => {
                // Several fences at a time disturb each other only if they close endpoints.
                let count = if self.closes { 1 + self.random.below(3) } else { 1 };
                (0..count).for_each(|_| self.fail(turn, fleet));
            }
            5 => self.heal_all(turn, fleet),
            _ => {
                let broken: Vec<_> = (0..self.down.len()).filter(|&at| !self.down[at].healed).collect();
                if !broken.is_empty() {
                    let at = broken[self.random.below(broken.len() as u64) as usize];
                    self.heal(turn, fleet, at);
                }
            }
        }
    }

    fn fail<const RAILS: usize>(&mut self, turn: u64, fleet: &mut Fleet<RAILS>) {
        let rail = self.random.below(self.rails.into()) as u16;
        let (x, y) = (self.random.below(self.nodes.into()), self.random.below(self.nodes.into()));
        let (a, b) = (x.min(y) as u16, x.max(y) as u16);
        // Fails a switch, the cable of one node, or the path between two nodes.
        let which = self.random.below(8);
        let chosen = |link: &Link| match which {
            0 => true,
            1 => link.a == a || link.b == a,
            _ => (link.a, link.b) == (a, b),
        };
        let links: Vec<_> = self
            .links()
            .filter(|link| link.rail == rail && chosen(link))
            .filter(|link| !self.down.iter().any(|down| down.link == *link))
            .collect();
        if links.is_empty() || !self.may_fail(fleet, &links) {
            return;
        }
        let late = [0, 300, 5000][self.random.below(3) as usize];
        self.late = self.late.max(late);
        let why = match self.random.below(5) {
            0 if which > 1 => {
                let (by, of) = if self.random.below(2) == 0 { (a, b) } else { (b, a) };
                Why::Disabled { by, of }
            }
            1 => Why::Cut { there: true, back: false },
            2 => Why::Cut { there: false, back: true },
            _ => Why::Cut { there: true, back: true },
        };
        for &link in &links {
            match why {
                Why::Disabled { by, of } => {
                    let node = &mut fleet[by as usize];
                    if node.engine.disable_rail(node.peers[of as usize], self.ours(by, rail)).is_err() {
                        return;
                    }
                }
                Why::Cut { there, back } => {
                    for (from, to, cut) in [(link.a, link.b, there), (link.b, link.a, back)] {
                        if cut {
                            self.sim.cut(from, to, rail, late).unwrap();
                        }
                    }
                }
            }
            self.down.push(Down { link, why, seen: false, healed: false });
        }
        self.log.push((turn, Event::Fails(links, why, late)));
    }

    fn heal<const RAILS: usize>(&mut self, turn: u64, fleet: &mut Fleet<RAILS>, at: usize) {
        let Down { link, why, .. } = self.down[at];
        match why {
            Why::Disabled { by, of } => {
                let node = &mut fleet[by as usize];
                _ = node.engine.enable_rail(node.peers[of as usize], self.ours(by, link.rail));
            }
            Why::Cut { there, back } => {
                for (from, to, cut) in [(link.a, link.b, there), (link.b, link.a, back)] {
                    if cut {
                        self.sim.heal(from, to, link.rail).unwrap();
                    }
                }
            }
        }
        self.down[at].healed = true;
        self.log.push((turn, Event::Heals(link)));
    }

    pub fn heal_all<const RAILS: usize>(&mut self, turn: u64, fleet: &mut Fleet<RAILS>) {
        for at in 0..self.down.len() {
            if !self.down[at].healed {
                self.heal(turn, fleet, at);
            }
        }
    }

    /// Waits until both nodes use every link. All links must have been healed.
    pub fn all_return<const RAILS: usize>(&mut self, fleet: &mut Fleet<RAILS>, seed: u64) {
        let links: Vec<_> = self.links().collect();
        let dead = self.dead.map(usize::from);
        fleet::turn_until(fleet, &format!("seed {seed}: all rails are back"), |fleet| {
            for _ in 0..16 {
                let living = fleet.iter_mut().enumerate().filter(|(node, _)| dead != Some(*node));
                living.for_each(|(_, node)| _ = node.engine.progress());
            }
            links.iter().all(|&link| self.users(fleet, link) == 2)
        });
    }
}
