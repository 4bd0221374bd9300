//! Faults of links at chosen times: drawn from a seed, or given as a list. The list of a drawn run
//! repeats that run, and [`shrink`] removes the events that a failure does not need.

mod event;

pub use event::{Change, Event, Link};

use core::ops::{Deref, DerefMut};

use super::Sim;
use super::links::ENDPOINTS;
use crate::rail::random::Random;

/// Controls the rails that the engines of the nodes use.
pub trait Nodes {
    /// Returns whether a node uses a rail to another node.
    fn uses(&self, from: u16, to: u16, rail: u16) -> bool;

    /// Makes a node stop using a rail to another node. Returns whether it could.
    fn disable(&mut self, by: u16, of: u16, rail: u16) -> bool;

    /// Makes a node use a rail to another node again.
    fn enable(&mut self, by: u16, of: u16, rail: u16);
}

/// What a schedule may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scope {
    /// Number of nodes.
    pub nodes: u16,
    /// Number of rails.
    pub rails: u16,
    /// Whether each node is also its own peer.
    pub own: bool,
    /// Whether a fence cuts off all peers of an endpoint. If so, a fence would separate nodes that
    /// only one rail joins, so such nodes need no fence of that rail.
    pub closes: bool,
    /// Whether nodes may stall.
    pub stalls: bool,
}

/// A link that has failed, and is not known to be in use again.
#[derive(Clone, Copy, Debug, Default)]
struct Down {
    link: Link,
    there: bool,
    back: bool,
    /// The node that has disabled the link, and the other node of the link.
    disabled: Option<(u16, u16)>,
    /// Whether one of the two nodes has stopped using the link.
    seen: bool,
    healed: bool,
}

const MOST: usize = 2 * ENDPOINTS;

#[derive(Clone)]
struct List<T> {
    items: [T; MOST],
    len: usize,
}

impl<T: Copy + Default> List<T> {
    fn new() -> Self {
        List { items: [T::default(); MOST], len: 0 }
    }

    fn push(&mut self, item: T) {
        if let Some(slot) = self.items.get_mut(self.len) {
            *slot = item;
            self.len += 1;
        }
    }

    fn retain(&mut self, mut keep: impl FnMut(&mut T) -> bool) {
        let mut kept = 0;
        for at in 0..self.len {
            if keep(&mut self.items[at]) {
                self.items[kept] = self.items[at];
                kept += 1;
            }
        }
        self.len = kept;
    }
}

impl<T> Deref for List<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.items[..self.len]
    }
}

impl<T> DerefMut for List<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.items[..self.len]
    }
}

#[derive(Clone)]
enum Source<'s> {
    /// Drawn from `random`, in `often` of 1000 turns.
    Drawn { random: Random, often: u64 },
    /// Given in a list, in order of time. If `spares` is set, an event that could take the last
    /// rail between two nodes is left out.
    Given { events: &'s [Event], next: usize, spares: bool },
}

/// The faults of one run. Drawn events leave one rail between every two nodes in use.
pub struct Schedule<'s, 'm> {
    sim: &'s Sim<'m>,
    scope: Scope,
    source: Source<'s>,
    down: List<Down>,
    /// A node that makes no passes until the given turn.
    stalled: Option<(u16, u64)>,
    dead: Option<u16>,
    late: u32,
    log: &'s mut [Event],
    logged: usize,
}

impl<'s, 'm> Schedule<'s, 'm> {
    fn new(sim: &'s Sim<'m>, scope: Scope, source: Source<'s>, log: &'s mut [Event]) -> Self {
        let down = List::new();
        Schedule { sim, scope, source, down, stalled: None, dead: None, late: 0, log, logged: 0 }
    }

    /// Draws the events from a seed, and stops drawing in the turn that fills `log`. Events of that
    /// turn that do not fit into `log` are executed, but not recorded.
    pub fn drawn(sim: &'s Sim<'m>, scope: Scope, seed: u64, log: &'s mut [Event]) -> Self {
        let mut random = Random::new(seed ^ 0xf1a9);
        let often = [5, 20, 60][(random.next() % 3) as usize];
        Self::new(sim, scope, Source::Drawn { random, often }, log)
    }

    /// Takes the events from a list in the order of time. If `spares` is set, leaves out events
    /// that could take the last rail between two nodes. `log` needs room for all.
    pub fn given(
        sim: &'s Sim<'m>,
        scope: Scope,
        events: &'s [Event],
        spares: bool,
        log: &'s mut [Event],
    ) -> Self {
        Self::new(sim, scope, Source::Given { events, next: 0, spares }, log)
    }

    /// Returns the events so far.
    pub fn events(&self) -> &[Event] {
        &self.log[..self.logged]
    }

    /// Returns the maximum number of polls after which traffic of a cut link lands.
    pub fn late(&self) -> u64 {
        self.late.into()
    }

    /// Returns whether a node makes a pass in this turn.
    pub fn is_awake(&self, node: u16, turn: u64) -> bool {
        self.dead != Some(node)
            && self.stalled.is_none_or(|(stalled, until)| stalled != node || turn >= until)
    }

    fn record(&mut self, at: u64, change: Change) {
        if let Some(slot) = self.log.get_mut(self.logged) {
            *slot = Event { at, change };
            self.logged += 1;
        }
    }

    /// Kills a node. The simulator notifies its peers.
    pub fn kill(&mut self, node: u16, turn: u64) {
        self.sim.kill(node);
        self.dead = Some(node);
        // The other nodes may still close endpoints because of links to the dead one.
        let closes = self.scope.closes;
        self.down.retain(|down| closes || down.link.a != node && down.link.b != node);
        self.record(turn, Change::Die(node));
    }

    fn users(nodes: &impl Nodes, link: Link) -> usize {
        let Link { a, b, rail } = link;
        [(a, b), (b, a)].iter().filter(|&&(from, to)| nodes.uses(from, to, rail)).count()
    }

    fn is_used(&self, nodes: &impl Nodes, link: Link) -> bool {
        !self.is_down(link) && Self::users(nodes, link) == 2
    }

    fn is_down(&self, link: Link) -> bool {
        self.down.iter().any(|down| down.link == link)
    }

    /// Returns whether both nodes of every link use it.
    pub fn all_used(&self, nodes: &impl Nodes) -> bool {
        self.links().all(|link| Self::users(nodes, link) == 2)
    }

    fn links(&self) -> impl Iterator<Item = Link> + use<> {
        let (Scope { nodes, rails, own, .. }, dead) = (self.scope, self.dead);
        let pairs = (0..nodes).flat_map(move |a| (a..nodes).map(move |b| (a, b)));
        let pairs =
            pairs.filter(move |&(a, b)| (own || a != b) && dead != Some(a) && dead != Some(b));
        pairs.flat_map(move |(a, b)| (0..rails).map(move |rail| Link { a, b, rail }))
    }

    /// Returns whether these links may fail together, because other links between their nodes stay
    /// in use.
    fn may_fail(&self, nodes: &impl Nodes, links: &[Link]) -> bool {
        let closes = self.scope.closes;
        let stays = |&Link { a, b, rail }: &Link| {
            let mut others = (0..self.scope.rails).filter(|&other| other != rail);
            others.any(|rail| {
                let other = Link { a, b, rail };
                self.is_used(nodes, other) && (!closes || !self.closes_end_of(other, links))
            })
        };
        links.iter().all(stays) && (!closes || self.may_close(links))
    }

    fn all_down(&self, links: &[Link]) -> impl Iterator<Item = Link> {
        links.iter().copied().chain(self.down.iter().map(|down| down.link))
    }

    /// Returns whether an end of a link is closed because of these and all failed links.
    fn closes_end_of(&self, link: Link, links: &[Link]) -> bool {
        let ends = [link.a, link.b];
        self.all_down(links).any(|down| {
            down.rail == link.rail && (ends.contains(&down.a) || ends.contains(&down.b))
        })
    }

    /// Returns whether fences of these and all failed links leave a rail between every two nodes.
    fn may_close(&self, links: &[Link]) -> bool {
        self.links().all(|Link { a, b, .. }| {
            let all = (0..self.scope.rails).map(|rail| Link { a, b, rail });
            let mut good = all.filter(|&link| self.all_down(links).all(|down| down != link));
            match (good.next(), good.next()) {
                (None, _) => false,
                (Some(last), None) => !self.closes_end_of(last, links),
                _ => true,
            }
        })
    }

    /// Cuts links in both directions at once.
    ///
    /// # Panics
    /// If closing fences would separate two nodes.
    pub fn cut(&mut self, turn: u64, nodes: &mut impl Nodes, links: &[Link]) {
        assert!(self.may_close(links), "{links:?}");
        for &link in links {
            self.apply(turn, nodes, Change::Cut { link, there: true, back: true, late: 0 });
        }
    }

    /// Executes the events of a turn.
    pub fn turn(&mut self, turn: u64, nodes: &mut impl Nodes) {
        self.down.retain(|down| {
            let users = Self::users(nodes, down.link);
            down.seen |= users < 2;
            !(down.healed && down.seen && users == 2)
        });
        self.play(turn, nodes);
        let often = if let Source::Drawn { often, .. } = self.source { often } else { return };
        if self.below(1000) >= often || self.logged == self.log.len() {
            return;
        }
        match self.below(8) {
            0 => {
                let (node, turns) = (self.node(), 1 + self.below(300));
                if self.scope.stalls {
                    self.apply(turn, nodes, Change::Stall { node, turns });
                }
            }
            1..=4 => {
                // Several fences at a time disturb each other only if they close endpoints.
                let count = if self.scope.closes { 1 + self.below(3) } else { 1 };
                (0..count).for_each(|_| self.fail(turn, nodes));
            }
            5 => self.heal_all(turn, nodes),
            _ => {
                let count = self.down.iter().filter(|down| !down.healed).count() as u64;
                if count != 0 {
                    let chosen = self.below(count) as usize;
                    let broken = self.down.iter().filter(|down| !down.healed).nth(chosen);
                    broken.map(|down| down.link).into_iter().for_each(|link| {
                        self.apply(turn, nodes, Change::Heal(link));
                    });
                }
            }
        }
    }

    fn play(&mut self, turn: u64, nodes: &mut impl Nodes) {
        while let Source::Given { events, next, spares } = &mut self.source
            && let Some(event) = events.get(*next).filter(|event| event.at <= turn)
        {
            *next += 1;
            let spares = *spares;
            let allowed = match event.change {
                Change::Cut { link, .. } | Change::Disable { link, .. } if spares => {
                    !self.is_down(link) && self.may_fail(nodes, &[link])
                }
                _ => true,
            };
            if allowed {
                self.apply(turn, nodes, event.change);
            }
        }
    }

    fn below(&mut self, n: u64) -> u64 {
        match &mut self.source {
            Source::Drawn { random, .. } => random.next() % n,
            Source::Given { .. } => 0,
        }
    }

    fn node(&mut self) -> u16 {
        self.below(self.scope.nodes.into()) as u16
    }

    fn fail(&mut self, turn: u64, nodes: &mut impl Nodes) {
        let rail = self.below(self.scope.rails.into()) as u16;
        let (x, y) = (self.node(), self.node());
        let (a, b) = (x.min(y), x.max(y));
        // Fails a switch, the cable of one node, or the path between two nodes.
        let which = self.below(8);
        let chosen = |link: &Link| match which {
            0 => true,
            1 => link.a == a || link.b == a,
            _ => (link.a, link.b) == (a, b),
        };
        let mut links = List::new();
        self.links()
            .filter(|link| link.rail == rail && chosen(link) && !self.is_down(*link))
            .for_each(|link| links.push(link));
        if links.is_empty() || !self.may_fail(nodes, &links) {
            return;
        }
        let late = [0, 300, 5000][self.below(3) as usize];
        let cut = |link, there, back| Change::Cut { link, there, back, late };
        match self.below(5) {
            0 if which > 1 => {
                let back = self.below(2) != 0;
                links
                    .iter()
                    .for_each(|&link| self.apply(turn, nodes, Change::Disable { link, back }));
            }
            1 => links.iter().for_each(|&link| self.apply(turn, nodes, cut(link, true, false))),
            2 => links.iter().for_each(|&link| self.apply(turn, nodes, cut(link, false, true))),
            _ => links.iter().for_each(|&link| self.apply(turn, nodes, cut(link, true, true))),
        }
    }

    /// Records an event that has an effect.
    fn apply(&mut self, turn: u64, nodes: &mut impl Nodes, change: Change) {
        match change {
            Change::Cut { link, there, back, late } => {
                for (from, to, cut) in [(link.a, link.b, there), (link.b, link.a, back)] {
                    if cut && self.sim.cut(from, to, link.rail, late).is_err() {
                        return;
                    }
                }
                self.late = self.late.max(late);
                let down = self.down_of(link);
                (down.there, down.back) = (down.there | there, down.back | back);
            }
            Change::Disable { link, back } => {
                let (by, of) = if back { (link.b, link.a) } else { (link.a, link.b) };
                if !nodes.disable(by, of, link.rail) {
                    return;
                }
                self.down_of(link).disabled = Some((by, of));
            }
            Change::Heal(link) => {
                let Some(down) =
                    self.down.iter_mut().find(|down| down.link == link && !down.healed)
                else {
                    return;
                };
                down.healed = true;
                let Down { there, back, disabled, .. } = *down;
                if let Some((by, of)) = disabled {
                    nodes.enable(by, of, link.rail);
                }
                for (from, to, cut) in [(link.a, link.b, there), (link.b, link.a, back)] {
                    if cut && self.sim.heal(from, to, link.rail).is_err() {
                        return;
                    }
                }
            }
            Change::Stall { node, turns } => self.stalled = Some((node, turn + turns)),
            Change::Die(_) => return,
        }
        self.record(turn, change);
    }

    fn down_of(&mut self, link: Link) -> &mut Down {
        self.down.retain(|down| down.link != link || !down.healed);
        if !self.is_down(link) {
            self.down.push(Down { link, ..Down::default() });
        }
        let at = self.down.iter().position(|down| down.link == link).unwrap_or(0);
        &mut self.down.items[at]
    }

    /// Restores all links.
    pub fn heal_all(&mut self, turn: u64, nodes: &mut impl Nodes) {
        self.play(turn, nodes);
        for at in 0..self.down.len() {
            let Down { link, healed, .. } = self.down[at];
            if !healed {
                self.apply(turn, nodes, Change::Heal(link));
            }
        }
    }
}

/// Removes events as long as a run of the rest still `fails`. Returns the number of remaining
/// events, which are at the front. If any one of them is removed too, `fails` is false.
pub fn shrink(events: &mut [Event], mut fails: impl FnMut(&[Event]) -> bool) -> usize {
    let (mut left, mut chunk) = (events.len(), events.len().div_ceil(2));
    while chunk != 0 {
        let (mut at, before) = (0, left);
        while at < left {
            let count = chunk.min(left - at);
            events[at..left].rotate_left(count);
            if fails(&events[..left - count]) {
                left -= count;
            } else {
                events[at..left].rotate_right(count);
                at += count;
            }
        }
        chunk = if chunk == 1 && left < before { 1 } else { chunk / 2 };
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shrinking_keeps_what_a_failure_needs() {
        let event = |at| Event { at, change: Change::Die(0) };
        for count in 0..40 {
            for needed in [&[][..], &[0], &[3, 30], &[7, 8, 20]] {
                let mut events = [Event::EMPTY; 40];
                (0..40).for_each(|at| events[at as usize] = event(at));
                let fails = |some: &[Event]| {
                    needed.iter().all(|&at| at >= count || some.contains(&event(at)))
                };
                let left = shrink(&mut events[..count as usize], fails);
                let kept = events[..left].iter().map(|event| event.at);
                assert!(
                    kept.eq(needed.iter().copied().filter(|&at| at < count)),
                    "{count} {needed:?}"
                );
            }
        }
    }
}
