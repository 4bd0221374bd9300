//! Runs random programs of calls on two ends, or on one end.

mod regions;
mod traffic;

use std::ptr::NonNull;

use fishplate_core::engine::Engine;
use fishplate_core::error::AttachError;
use fishplate_core::mem::{PeerId, RailId, RegionKind};
use fishplate_core::op::Outcome;
use fishplate_core::psm::Mq;
use fishplate_core::rail::Rail;

use super::behaviour::Random;
use super::end::{End, Role};
use super::users::{Kind, User};

/// Provides rails, and connects ends.
pub trait World<const RAILS: usize>: Sized {
    type Rail: Rail;
    const NAME: &'static str;
    /// Number of ends that can connect. If there is one end, it connects only to itself.
    const ENDS: usize = 2;
    /// True if an end may be its own peer.
    const OWN: bool = true;
    /// True if the ends use failover and disable rails.
    const FAILOVER: bool = false;
    /// The user that issues the operations.
    const USER: Kind = Kind::Engine;
    const STEPS: u64 = 250;
    /// True if an end seldom removes its peer or is replaced, because connecting takes long here.
    const STEADY: bool = false;
    /// True if a rail may keep memory posted to a failed peer in use until the rail is dropped.
    const KEEPS: bool = false;

    fn new(seed: u64) -> Self;

    /// Creates rail `rail` of end `end`.
    fn rail(&mut self, end: usize, rail: usize) -> Self::Rail;

    /// Attaches the rails of two ends, which may be the same end. Each entry names an end and the
    /// id that it uses for the other end.
    fn attach(&mut self, ends: [(usize, PeerId); 2], engines: &mut [End<Self::Rail, RAILS>]);

    /// Returns device memory of the rail, if it has any.
    fn device(
        _engine: &mut Engine<'static, Self::Rail, RAILS>,
    ) -> Option<(NonNull<u8>, RegionKind)> {
        None
    }
}

/// Counts of programs and of their events.
#[derive(Debug, Default)]
pub struct Tally {
    pub programs: u64,
    pub done: u64,
    pub failed: u64,
    pub unknown: u64,
    pub received: u64,
    deregistered: u64,
    operations_in_use: u64,
    pub receives_in_use: u64,
    posts_in_use: u64,
    pub imported_in_use: u64,
    release_in_use: u64,
    pub refused: u64,
    pub stale: u64,
    removed: u64,
    dropped: u64,
    pub disabled: u64,
    pub returned: u64,
}

impl Tally {
    /// True if each event that every run must cover occurred at least once.
    pub fn is_whole(&self) -> bool {
        let Tally { done, received, deregistered, operations_in_use, receives_in_use, .. } = *self;
        let Tally { release_in_use, stale, removed, dropped, failed, .. } = *self;
        [done, received, deregistered, operations_in_use, receives_in_use, release_in_use]
            .into_iter()
            .chain([stale, removed, dropped, failed])
            .all(|count| count > 0)
    }
}

struct Program<'t, W: World<RAILS>, const RAILS: usize> {
    random: Random,
    ends: Vec<End<W::Rail, RAILS>>,
    words: u64,
    tally: &'t mut Tally,
    // Dropped last, because rails may need the world until they are dropped.
    world: W,
}

pub fn run<W: World<RAILS>, const RAILS: usize>(seed: u64, tally: &mut Tally) {
    let mut world = W::new(seed);
    let ends = (0..W::ENDS).map(|end| fresh(&mut world, end)).collect();
    let random = Random(seed);
    let mut program = Program { random, ends, words: seed << 20, tally, world };
    program.tally.programs += 1;
    program.meet();
    for _ in 0..W::STEPS {
        program.step();
    }
    program.finish();
}

/// Creates an end without peers.
fn fresh<W: World<RAILS>, const RAILS: usize>(world: &mut W, end: usize) -> End<W::Rail, RAILS> {
    End::new(std::array::from_fn(|rail| world.rail(end, rail)), W::ENDS, W::FAILOVER, W::USER)
}

impl<W: World<RAILS>, const RAILS: usize> Program<'_, W, RAILS> {
    fn below(&mut self, n: usize) -> usize {
        self.random.below(n as u64) as usize
    }

    /// Returns a random element of `of`, or `None` if it is empty.
    fn one_of<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        if of.is_empty() { None } else { Some(of[self.below(of.len())]) }
    }

    /// Attaches every pair of ends that is not attached.
    fn meet(&mut self) {
        for a in 0..W::ENDS {
            for b in a..W::ENDS {
                if a == b && !W::OWN
                    || self.ends[a].peers[b].is_some()
                    || self.ends[b].peers[a].is_some()
                {
                    continue;
                }
                let Ok(of_a) = self.ends[a].engine().reserve_peer() else { continue };
                let of_b = if a == b { Ok(of_a) } else { self.ends[b].engine().reserve_peer() };
                let Ok(of_b) = of_b else { continue };
                self.world.attach([(a, of_a), (b, of_b)], &mut self.ends);
                self.ends[a].engine().connect_peer(of_a, (1 << RAILS) - 1).unwrap();
                self.ends[a].peers[b] = Some(of_a);
                if a != b {
                    self.ends[b].engine().connect_peer(of_b, (1 << RAILS) - 1).unwrap();
                    self.ends[b].peers[a] = Some(of_b);
                }
            }
        }
    }

    /// Like [`meet`](Self::meet), but also reattaches a pair if one end has removed the other.
    fn meet_again(&mut self) {
        for a in 0..W::ENDS {
            for b in 0..W::ENDS {
                let failed = |why| !matches!(why, Ok(None));
                let peer = self.ends[a].peers[b];
                let gone = peer.is_some_and(|peer| failed(self.ends[a].engine().peer_error(peer)));
                if gone || self.ends[b].peers[a].is_none() {
                    self.remove_peer(a, b);
                }
            }
        }
        self.meet();
    }

    fn step(&mut self) {
        let end = self.below(W::ENDS);
        match self.below(100) {
            0..10 => drop(self.register(end, Role::Target, None)),
            10..13 => drop(self.register(end, Role::Scratch, None)),
            13..23 => self.deregister(end),
            23..33 => self.import(end),
            33..38 => self.release(end),
            // A matched queue is the only user of its engine.
            38..64 if W::USER == Kind::Mq => self.message(end),
            38..64 => self.post(end),
            64..76 => self.message(end),
            76..95 => self.progress(end),
            95 if W::FAILOVER => self.disable(end),
            95.. if W::STEADY && self.below(4) > 0 => self.meet_again(),
            95..97 => self.meet_again(),
            97..99 => self.remove(end),
            _ => self.replace(end),
        }
    }

    /// Makes one pass of an end in the way of its user.
    fn pass(&mut self, end: usize) {
        let End { user, engine: Some(engine), .. } = &mut self.ends[end] else { return };
        match user {
            User::Engine => _ = engine.progress(),
            User::Queue(queue) => queue.turn(engine),
            User::Mq(matched) => {
                let poll = |mq: &mut Mq<'_, 'static, W::Rail, RAILS>| {
                    mq.poll();
                    Ok(None)
                };
                matched.call(engine, poll).expect("a poll cannot fail");
            }
        }
    }

    fn progress(&mut self, end: usize) {
        let passes = 1 + self.below(6);
        let check = self.below(20) == 0;
        for _ in 0..passes {
            self.pass(end);
        }
        if check {
            self.ends[end].engine().check_peers();
        }
        self.collect(end);
    }

    fn collect(&mut self, end: usize) {
        let End { user, engine: Some(engine), claimed, .. } = &mut self.ends[end] else { return };
        match user {
            User::Engine => {}
            User::Queue(queue) => return queue.collect(claimed, self.tally),
            User::Mq(matched) => return matched.collect(engine, self.tally),
        }
        while let Some(completion) = self.ends[end].engine().next_completion() {
            match completion.outcome {
                Outcome::Done => self.tally.done += 1,
                Outcome::Failed(_) => self.tally.failed += 1,
                Outcome::Unknown(_) => self.tally.unknown += 1,
            }
        }
        while let Some(status) = self.ends[end].engine().next_recv() {
            self.ends[end].requests.retain(|request| *request != status.request);
            self.tally.received += u64::from(status.delivered > 0);
        }
    }

    fn remove(&mut self, end: usize) {
        let other = self.below(W::ENDS);
        self.remove_peer(end, other);
    }

    fn remove_peer(&mut self, end: usize, other: usize) {
        let Some(peer) = self.ends[end].peers[other].take() else { return };
        self.ends[end].engine().remove_peer(peer).unwrap();
        assert_eq!(self.ends[end].engine().remove_peer(peer), Err(AttachError::UnknownPeer));
        self.ends[end].old_peers.push(peer);
        self.tally.removed += 1;
        // Removing the peer has released its imports. `release` returns an error for them.
        let End { imports, .. } = &mut self.ends[end];
        let imports = std::mem::take(imports);
        for import in imports {
            // Imports from other peers still exist, and are released here.
            let released = self.ends[end].engine().release(import.id);
            match released {
                Ok(()) | Err(AttachError::UnknownRegion) => {
                    self.ends[end].old_remotes.push(import.id)
                }
                Err(AttachError::InUse(_)) => self.ends[end].imports.push(import),
                Err(error) => panic!("{error:?}"),
            }
        }
    }

    /// Enables a rail to a peer, or disables one if another is left. Both ends make progress
    /// meanwhile, because the fence of a rail needs the peer's answer.
    fn disable(&mut self, end: usize) {
        let (other, rail) = (self.below(W::ENDS), RailId(self.below(RAILS) as u8));
        let Some(peer) = self.ends[end].peers[other] else { return };
        if self.below(3) == 0 {
            _ = self.ends[end].engine().enable_rail(peer, rail);
        } else {
            let disabled = self.ends[end].engine().disable_rail(peer, rail);
            self.tally.disabled += u64::from(disabled.is_ok());
        }
        for _ in 0..self.below(40) {
            (0..W::ENDS).for_each(|end| self.progress(end));
        }
    }

    /// Drops an end during traffic and creates a new one. The other end is not notified.
    fn replace(&mut self, end: usize) {
        self.tally.dropped += 1;
        self.tally.returned += self.ends[end].engine().stats().rails_returned;
        // Drops the old rails first, because the world may have room for only one set.
        self.ends.remove(end);
        let fresh = fresh(&mut self.world, end);
        self.ends.insert(end, fresh);
    }

    /// Completes everything, and checks that nothing is left in use.
    fn finish(&mut self) {
        for end in 0..W::ENDS {
            for other in 0..W::ENDS {
                self.remove_peer(end, other);
            }
            for request in std::mem::take(&mut self.ends[end].requests) {
                let _ = self.ends[end].engine().cancel(request);
            }
        }
        for _ in 0..200 {
            for end in 0..W::ENDS {
                if let User::Queue(queue) = &mut self.ends[end].user {
                    queue.cancel(None);
                }
                self.pass(end);
                self.collect(end);
            }
        }
        for end in 0..W::ENDS {
            match &mut self.ends[end] {
                End { user: User::Queue(queue), .. } => {
                    assert!(queue.is_over(), "a command never ended")
                }
                End { user: User::Mq(matched), engine: Some(engine), .. } => {
                    assert!(matched.finish(engine))
                }
                _ => {}
            }
            self.tally.returned += self.ends[end].engine().stats().rails_returned;
            while let Some(import) = self.ends[end].imports.pop() {
                self.ends[end].engine().release(import.id).expect("all operations have ended");
            }
            for at in (0..self.ends[end].regions.len()).rev() {
                let gone = self.deregister_at(end, at);
                assert!(gone || W::KEEPS, "still in use: {:?}", self.tally);
            }
        }
    }
}
