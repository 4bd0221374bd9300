//! Runs random programs of calls on two ends, or on one end.

use std::ptr::NonNull;

use fishplate_core::engine::protocol::Payload;
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{ContextId, Engine, HANDLE_MAX, Notice, Signal};
use fishplate_core::error::{AttachError, OpError, Use};
use fishplate_core::mem::{LocalAddr, LocalId, PeerId, RailId, RegionKind};
use fishplate_core::op::{Amo, AmoOp, Cmp, Outcome, SignalOp};
use fishplate_core::psm::{Mq, MqReq};
use fishplate_core::queue::Command;
use fishplate_core::rail::Rail;

use super::behaviour::Random;
use super::end::{End, Imported, Registered, Role};
use super::memory::{Memory, SIZE};
use super::users::{Kind, User};

const CX: ContextId = ContextId(0);

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

    fn register(&mut self, end: usize, role: Role, word: Option<u64>) -> Option<LocalId> {
        self.words += 1;
        let word = word.unwrap_or(self.words);
        let kind = self.below(6);
        let engine = self.ends[end].engine();
        let memory = match kind {
            0 => Memory::segment(),
            1 | 2 => match W::device(engine) {
                Some((at, kind)) => Memory::Device(at, kind),
                None => Memory::page(),
            },
            _ => Memory::page(),
        };
        memory.fill(if role == Role::Source { word } else { 0 });
        // A rail may refuse the kind of memory, or have no room.
        let id = engine.register(memory.region()).ok()?;
        self.ends[end].regions.push(Registered { id, role, word, memory });
        Some(id)
    }

    /// Returns a random region with this role, or sometimes an invalid id.
    fn local(&mut self, end: usize, role: Role) -> Option<LocalId> {
        let fit: Vec<_> =
            self.ends[end].regions.iter().filter(|r| r.role == role).map(|r| r.id).collect();
        match self.below(16) {
            0 => self.one_of(&self.ends[end].old_locals.clone()),
            _ => self.one_of(&fit).or_else(|| self.register(end, role, None)),
        }
    }

    /// Returns a source that contains this word. Registers one if necessary.
    fn source(&mut self, end: usize, word: u64) -> Option<LocalId> {
        let is = |region: &&Registered| region.role == Role::Source && region.word == word;
        match self.ends[end].regions.iter().find(is) {
            Some(region) => Some(region.id),
            None => self.register(end, Role::Source, Some(word)),
        }
    }

    fn deregister(&mut self, end: usize) {
        let stale = self.below(8) == 0;
        if let (true, Some(id)) = (stale, self.one_of(&self.ends[end].old_locals.clone())) {
            assert_eq!(self.ends[end].engine().deregister(id), Err(AttachError::UnknownRegion));
            self.tally.stale += 1;
            return;
        }
        let count = self.ends[end].regions.len();
        if count > 0 {
            let at = self.below(count);
            self.deregister_at(end, at);
        }
    }

    /// Deregisters a region and unmaps its memory. Returns false if the engine refuses.
    fn deregister_at(&mut self, end: usize, at: usize) -> bool {
        let id = self.ends[end].regions[at].id;
        match self.ends[end].engine().deregister(id) {
            Ok(()) => {
                let region = self.ends[end].regions.swap_remove(at);
                region.check();
                drop(region);
                self.ends[end].old_locals.push(id);
                self.tally.deregistered += 1;
                return true;
            }
            Err(AttachError::InUse(by)) => match by {
                Use::Operations => self.tally.operations_in_use += 1,
                Use::Receives => self.tally.receives_in_use += 1,
                Use::Posts(_) => self.tally.posts_in_use += 1,
                Use::Import => self.tally.imported_in_use += 1,
                other => panic!("{other:?}"),
            },
            Err(error) => panic!("{error:?}"),
        }
        false
    }

    /// Imports a target of a random end that is attached to this end.
    fn import(&mut self, end: usize) {
        let from = self.below(W::ENDS);
        let Some(peer) = self.ends[end].peers[from] else { return };
        let targets = self.ends[from].regions.iter().filter(|region| region.role == Role::Target);
        let targets: Vec<_> = targets.map(|region| (region.id, region.word)).collect();
        let Some((id, word)) = self.one_of(&targets) else { return };
        let mut handle = [0; HANDLE_MAX];
        let len = self.ends[from].engine().export(id, &mut handle).unwrap();
        let changed = self.below(16) == 0;
        if changed {
            let (at, bit) = (self.below(len), self.below(8));
            handle[at] ^= 1 << bit;
        }
        match self.ends[end].engine().import(peer, &handle[..len]) {
            // The changed handle may name another region of the peer, so the import is released.
            Ok(id) if changed => {
                self.ends[end].engine().release(id).unwrap();
            }
            Ok(id) => self.ends[end].imports.push(Imported { id, word }),
            Err(_) => self.tally.refused += 1,
        }
    }

    fn release(&mut self, end: usize) {
        let count = self.ends[end].imports.len();
        if count == 0 {
            return;
        }
        let at = self.below(count);
        let id = self.ends[end].imports[at].id;
        match self.ends[end].engine().release(id) {
            Ok(()) => {
                self.ends[end].imports.swap_remove(at);
                self.ends[end].old_remotes.push(id);
            }
            Err(AttachError::InUse(_)) => self.tally.release_in_use += 1,
            Err(error) => panic!("{error:?}"),
        }
    }

    /// Posts one operation on imported memory. Writes only the target's own word.
    fn post(&mut self, end: usize) {
        let imports = self.ends[end].imports.clone();
        let stale =
            self.one_of(&self.ends[end].old_remotes.clone()).filter(|_| self.below(16) == 0);
        let Some(Imported { id, word }) = self.one_of(&imports) else { return };
        let to = stale.unwrap_or(id);
        let burst = 1 + self.below(12);
        let (verb, report) = (self.below(9), self.below(3) == 0);
        let len = 8 * [1, 7, 30, 200, SIZE / 8][self.below(5)];
        let offset = 8 * self.below((SIZE - len) / 8 + 1) as u64;
        let Some(source) = self.source(end, word) else { return };
        let Some(scratch) = self.local(end, Role::Scratch) else { return };
        let notice = if report { Notice::Report(1) } else { Notice::Silent };
        let at = to.at(offset);
        let amo = |op, width, operand| Amo { op, width, operand, compare: 0 };
        if let User::Queue(queue) = &mut self.ends[end].user {
            let target = Signal { at: to.at(0), op: SignalOp::Set, value: word };
            let from = source.at(offset);
            let command = match verb {
                0..3 => Command::Put { from, len, to: at },
                3 => Command::PutSignal { from, len, to: at, signal: target },
                4 => Command::Get { into: scratch.at(offset), len, from: at },
                5 => Command::Signal(target),
                6 => Command::Amo { at, amo: amo(AmoOp::Swap, 8, word), fetch: false },
                7 => Command::Amo { at, amo: amo(AmoOp::Add, 8, 0), fetch: true },
                _ => Command::Fill { at: scratch.at(offset), len, pattern: word, width: 8 },
            };
            let refused = (0..burst).filter(|_| !queue.submit(command)).count();
            self.tally.refused += refused as u64;
            return;
        }
        let engine = self.ends[end].engine();
        for _ in 0..burst {
            let signal = Signal { at: to.at(0), op: SignalOp::Set, value: word };
            let issued = match verb {
                0..3 => engine.put(CX, source.at(offset), len, at, notice).map(drop),
                3 => engine.put_signal(CX, source.at(offset), len, at, signal, notice).map(drop),
                4 => engine.get(CX, scratch.at(offset), len, at, notice).map(drop),
                5 => engine.signal(CX, signal, notice).map(drop),
                6 => engine.amo(CX, at, amo(AmoOp::Swap, 8, word), notice).map(drop),
                7 => engine.fetch(CX, at, amo(AmoOp::Add, 8, 0), 1).map(drop),
                _ => engine.inject(CX, &word.to_ne_bytes(), at),
            };
            if let Err(error) = issued {
                self.tally.refused += 1;
                self.tally.stale += u64::from(error == OpError::UnknownRegion);
            }
        }
    }

    /// Returns a random peer of an end, or sometimes an invalid id.
    fn peer(&mut self, end: usize) -> Option<PeerId> {
        let known: Vec<_> = self.ends[end].peers.iter().flatten().copied().collect();
        match self.below(16) {
            0 => self.one_of(&self.ends[end].old_peers.clone()),
            _ => self.one_of(&known),
        }
    }

    /// Sends, receives, probes or cancels tagged messages.
    fn message(&mut self, end: usize) {
        let tag = Tag::from(self.random.below(3));
        let ignore = if self.below(3) == 0 { Tag::ALL } else { Tag::ZERO };
        let len = [0, 8, 90, 300, SIZE][self.below(5)];
        let notice = if self.below(2) == 0 { Notice::Report(2) } else { Notice::Silent };
        let Some(peer) = self.peer(end) else { return };
        let from = if self.below(3) == 0 { None } else { Some(peer) };
        let choice = self.below(12);
        let region = match choice {
            0..4 => {
                let known =
                    self.ends[end].regions.iter().find(|r| r.role == Role::Source).map(|r| r.id);
                // Operations that write register their sources. A matched queue has no such
                // operations, so it registers one here.
                known.or_else(|| {
                    if W::USER == Kind::Mq { self.register(end, Role::Source, None) } else { None }
                })
            }
            _ => self.local(end, Role::Scratch),
        };
        let Some(region) = region else { return };
        let into = Some((region.at(0), len));
        let chosen = self.random.next() as usize;
        match W::USER {
            Kind::Engine => {}
            Kind::Queue => {
                return self.command(end, choice, [from, Some(peer)], (tag, ignore), into, chosen);
            }
            Kind::Mq => {
                return self.request(end, choice, [from, Some(peer)], (tag, ignore), into, chosen);
            }
        }
        let End { requests, claimed, .. } = &mut self.ends[end];
        let (mut requests, mut claimed) = (std::mem::take(requests), std::mem::take(claimed));
        let engine = self.ends[end].engine();
        let done = match choice {
            0 | 1 => {
                engine.send(CX, peer, tag, Payload::Region(region.at(0), len), notice).map(drop)
            }
            2 => engine
                .send_sync(CX, peer, tag, Payload::Region(region.at(0), len), notice)
                .map(drop),
            3 => engine
                .send(CX, peer, tag, Payload::Bytes(&[7; 64][..len.min(64)]), notice)
                .map(drop),
            4..8 => engine.recv(from, tag, ignore, into, 0).map(|request| requests.push(request)),
            8 => engine.mprobe(from, tag, ignore).map(|found| claimed.extend(found)),
            9 if !claimed.is_empty() => {
                let message = claimed.swap_remove(chosen % claimed.len());
                match chosen % 3 {
                    0 => engine.discard(message),
                    _ => engine.mrecv(message, into, 0).map(|request| requests.push(request)),
                }
            }
            10 if !requests.is_empty() => {
                engine.cancel(requests[chosen % requests.len()]).map(drop)
            }
            _ => engine.fence(CX, peer),
        };
        self.tally.refused += u64::from(done.is_err());
        (self.ends[end].requests, self.ends[end].claimed) = (requests, claimed);
    }

    fn command(
        &mut self,
        end: usize,
        choice: usize,
        [source, peer]: [Option<PeerId>; 2],
        (tag, ignore): (Tag, Tag),
        memory: Option<(LocalAddr, usize)>,
        chosen: usize,
    ) {
        let (Some(to), End { user: User::Queue(queue), claimed, .. }) = (peer, &mut self.ends[end])
        else {
            return;
        };
        let message = if choice == 9 { claimed.pop() } else { None };
        let command = match (choice, message) {
            (0..4, _) => Command::Send { to, tag, from: memory, sync: choice == 2 },
            (4..8, _) => Command::Recv { source, tag, ignore, into: memory },
            (8, _) => Command::Probe { source, tag, ignore, claim: true },
            (_, Some(message)) if chosen.is_multiple_of(3) => Command::Discard(message),
            (_, Some(message)) => Command::ClaimedRecv { message, into: memory },
            (10, _) => return queue.cancel(Some(chosen)),
            _ if chosen.is_multiple_of(4) => Command::Quiet(to),
            _ if chosen % 4 == 1 => {
                let Some((at, _)) = memory else { return };
                Command::Watch { at, cmp: Cmp::Eq, value: u64::MAX, from: peer }
            }
            _ => Command::Fence(to),
        };
        self.tally.refused += u64::from(!queue.submit(command));
    }

    /// Makes a call of a matched queue.
    fn request(
        &mut self,
        end: usize,
        choice: usize,
        [source, peer]: [Option<PeerId>; 2],
        (tag, ignore): (Tag, Tag),
        memory: Option<(LocalAddr, usize)>,
        chosen: usize,
    ) {
        let (Some(to), End { user: User::Mq(matched), engine: Some(engine), .. }) =
            (peer, &mut self.ends[end])
        else {
            return;
        };
        let memory = memory.map(|(at, len)| (at, len as u32));
        let (tag, select) = (tag.words(), (!ignore).words());
        let of =
            |requests: &[MqReq]| (!requests.is_empty()).then(|| requests[chosen % requests.len()]);
        let open = of(&matched.requests);
        let done = matched.call(engine, |mq| match (choice, open) {
            (0..4, _) => mq.isend2(to, (choice == 2).into(), tag, memory, 0).map(Some),
            (4..8, _) => mq.irecv2(source, tag, select, memory, 0).map(Some),
            (8, _) => mq.improbe2(source, tag, select).map(|(claimed, _)| Some(claimed)),
            (9, Some(open)) => mq.imrecv(memory, 0, open).map(|()| None),
            (10, _) => mq.cancel(&open).map(|()| None),
            _ => mq.iprobe2(source, tag, select).map(|_| None),
        });
        self.tally.refused += u64::from(done.is_err());
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
