//! Sends and receives the messages of a rank in a pattern.
//!
//! A rank's memory begins with a cache line for each flow. For a flow to this rank, the line counts
//! the messages that have arrived. For a flow from this rank, it counts the messages that the
//! receiver has taken. The slots of flows to this rank follow. Message numbers continue from row to
//! row.

use fishplate::node::{Error, Memory, Remote};
use fishplate::{Node, Notice, Signal};
use fishplate_core::error::OpError;

use super::super::watch::Watch;
use super::Member;
use super::pattern::Pattern;
use crate::failure::{Failure, Outcome};
use crate::payload;
use crate::sizes;

/// Distance between the words of two flows, in bytes.
const LINE: usize = 64;

/// Maximum memory of a rank for slots, and for the payloads that it sends, in bytes.
const MEMORY_MAX: usize = 1 << 30;

pub struct Traffic {
    memory: Memory,
    buffer: Memory,
    targets: Vec<Target>,
    sources: Vec<Source>,
    remotes: Vec<Remote>,
    stride: usize,
    window: u64,
    done: u64,
    payload: Vec<u8>,
}

struct Target {
    rank: usize,
    there: Remote,
    /// Offsets in the receiver's memory: the flow's first slot, and the word that counts its
    /// messages.
    slots: usize,
    word: usize,
    sent: u64,
    taken: u64,
}

struct Source {
    rank: usize,
    there: Remote,
    /// Offset in the sender's memory of the word that counts the messages taken.
    word: usize,
    seen: u64,
    told: u64,
}

fn slots_at(flows: usize) -> usize {
    (flows * LINE).next_multiple_of(4096)
}

impl Traffic {
    /// Connects to the ranks that have flows with this rank. A collective call.
    pub fn open(
        member: &mut Member,
        pattern: Pattern,
        most: usize,
        window: u64,
    ) -> Outcome<Traffic> {
        let (me, size) = (member.job.rank(), member.job.size());
        let (targets, sources) = (pattern.targets(me, size), pattern.sources(me, size));
        let stride = most.next_multiple_of(LINE);
        let flows = targets.len() + sources.len();
        let bytes = |flows: usize| flows.checked_mul(window as usize)?.checked_mul(stride);
        // All ranks compute the same size, so either all ranks refuse or none does.
        if bytes(size - 1).is_none_or(|bytes| bytes > MEMORY_MAX) {
            return Err(Failure::usage(format!(
                "{size} ranks with {window} slots of {} each need more than {}; use smaller sizes \
                 or a smaller --window",
                sizes::show(most),
                sizes::show(MEMORY_MAX)
            )));
        }
        let lacking =
            |error: Error| Failure::run(format!("rank {me}: cannot allocate slots: {error}"));
        let slots = |flows: usize| bytes(flows).unwrap_or_default().max(LINE);
        let memory = member.node.alloc(slots_at(flows) + slots(sources.len())).map_err(lacking)?;
        let buffer = member.node.alloc(slots(targets.len())).map_err(lacking)?;
        // Both ranks of each flow add each other as peers before either imports memory.
        targets.iter().chain(&sources).try_for_each(|&rank| member.peer(rank).map(drop))?;
        let handle = member.node.handle(memory).map_err(lacking)?;
        let handles = member.gather(&handle)?;
        let mut remotes = vec![];
        let mut import = |member: &mut Member, rank: usize| {
            let peer = member.peer(rank)?;
            let there = member.node.import(peer, &handles[rank]);
            let there = there.map_err(|error| match error {
                Error::Op(OpError::PeerFailed(_)) => failed(rank, &error),
                error => Failure::run(format!("cannot import the memory of rank {rank}: {error}")),
            })?;
            remotes.push(there);
            Ok::<_, Failure>(there)
        };
        let place = |ranks: &[usize], other: usize| {
            let at = ranks.iter().position(|&rank| rank == me);
            at.ok_or_else(|| Failure::run(format!("rank {other} has no flow with rank {me}")))
        };
        let mut out = vec![];
        for rank in targets {
            let theirs = pattern.sources(rank, size);
            let before = theirs.len() + pattern.targets(rank, size).len();
            let at = place(&theirs, rank)?;
            let slots = slots_at(before) + at * window as usize * stride;
            out.push(Target {
                rank,
                there: import(member, rank)?,
                slots,
                word: at * LINE,
                sent: 0,
                taken: 0,
            });
        }
        let mut inward = vec![];
        for rank in sources {
            let at = pattern.sources(rank, size).len() + place(&pattern.targets(rank, size), rank)?;
            inward.push(Source {
                rank,
                there: import(member, rank)?,
                word: at * LINE,
                seen: 0,
                told: 0,
            });
        }
        Ok(Traffic {
            memory,
            buffer,
            targets: out,
            sources: inward,
            remotes,
            stride,
            window,
            done: 0,
            payload: vec![0; most],
        })
    }

    /// Sends `count` messages of each flow from this rank, and receives `count` messages of each
    /// flow to this rank. With a seed, writes and verifies payloads. Returns the numbers of right
    /// and of wrong payloads.
    pub fn run(
        &mut self,
        member: &mut Member,
        size: usize,
        count: u64,
        seed: Option<u64>,
    ) -> Outcome<(u64, u64)> {
        let end = self.done + count;
        let mut watch = Watch::new(member.clock);
        watch.set(member.timeout.as_nanos() as u64);
        let (mut right, mut wrong) = (0, 0);
        loop {
            let mut moved = false;
            for at in 0..self.targets.len() {
                moved |= self.send(member, at, size, end, seed)?;
            }
            for at in 0..self.sources.len() {
                let (good, bad) = self.receive(member, at, size, end, seed)?;
                moved |= good + bad > 0;
                (right, wrong) = (right + good, wrong + bad);
            }
            member.node.progress();
            let sent = self.targets.iter().all(|target| target.taken == end);
            if sent && self.sources.iter().all(|source| source.told == end) {
                break;
            }
            if if moved { watch.turn() } else { watch.fruitless() } {
                member.look()?;
                if watch.is_up() {
                    return Err(self.expired(member, end));
                }
            }
        }
        self.done = end;
        Ok(if seed.is_some() { (right, wrong) } else { (0, wrong) })
    }

    /// Returns whether any message was sent.
    #[inline]
    fn send(
        &mut self,
        member: &mut Member,
        at: usize,
        size: usize,
        end: u64,
        seed: Option<u64>,
    ) -> Outcome<bool> {
        let Traffic { memory, buffer, targets, stride, window, payload, .. } = self;
        let word = memory.at(((self.sources.len() + at) * LINE) as u64);
        let (target, node) = (&mut targets[at], &mut member.node);
        if target.taken == end {
            return Ok(false);
        }
        // The peer writes this word, so the value is not trusted.
        target.taken = load(node, word)?.clamp(target.taken, target.sent);
        let before = target.sent;
        while target.sent < end && target.sent - target.taken < *window {
            let number = target.sent + 1;
            let slot = (target.sent % *window) as usize * *stride;
            let from = buffer.at((at * *window as usize * *stride + slot) as u64);
            if let Some(seed) = seed {
                let pattern = contents(seed, member.job.rank(), target.rank, number);
                pattern.fill_slice(&mut payload[..size]);
                node.write(from, &payload[..size]).map_err(|error| failed(target.rank, &error))?;
            }
            let signal = Signal::set(target.there.at(target.word as u64), number);
            let (from, to) = (
                fishplate::node::Slice::new(from, size),
                target.there.at((target.slots + slot) as u64),
            );
            match node.put_signal(from, to, signal, Notice::Silent) {
                Ok(_) => target.sent = number,
                Err(OpError::Again) => break,
                Err(error) => return Err(failed(target.rank, &Error::Op(error))),
            }
        }
        Ok(target.sent != before)
    }

    /// Takes the messages that have arrived, and frees their slots. Returns the numbers of right
    /// and of wrong payloads.
    #[inline]
    fn receive(
        &mut self,
        member: &mut Member,
        at: usize,
        size: usize,
        end: u64,
        seed: Option<u64>,
    ) -> Outcome<(u64, u64)> {
        let Traffic { memory, sources, targets, stride, window, payload, .. } = self;
        let start = slots_at(sources.len() + targets.len()) + at * *window as usize * *stride;
        let (source, node, me) = (&mut sources[at], &mut member.node, member.job.rank());
        let (mut right, mut wrong) = (0, 0);
        if source.seen < end {
            let arrived = load(node, memory.at((at * LINE) as u64))?;
            // The peer writes this word. A count beyond the receiver's slots is wrong.
            let most = end.min(source.told + *window);
            wrong += u64::from(arrived > most);
            while source.seen < arrived.min(most) {
                let slot = (source.seen % *window) as usize * *stride;
                source.seen += 1;
                let whole = match seed {
                    None => true,
                    Some(seed) => {
                        node.read(memory.at((start + slot) as u64), &mut payload[..size])
                            .map_err(|error| failed(source.rank, &error))?;
                        let expected = contents(seed, source.rank, me, source.seen);
                        expected.is_in(&payload[..size])
                    }
                };
                right += u64::from(whole);
                wrong += u64::from(!whole);
            }
        }
        if source.told < source.seen {
            let signal = Signal::set(source.there.at(source.word as u64), source.seen);
            match node.signal(signal, Notice::Silent) {
                Ok(_) => source.told = source.seen,
                Err(OpError::Again) => {}
                Err(error) => return Err(failed(source.rank, &Error::Op(error))),
            }
        }
        Ok((right, wrong))
    }

    /// Frees the memory. A collective call.
    pub fn close(self, member: &mut Member) -> Outcome {
        let kept =
            |error: Error| Failure::run(format!("cannot free the memory of a pattern: {error}"));
        member.node.quiet_all(member.timeout).map_err(kept)?;
        member.barrier()?;
        for there in self.remotes {
            member.node.release(there).map_err(kept)?;
        }
        member.barrier()?;
        member.node.free(self.memory).and_then(|()| member.node.free(self.buffer)).map_err(kept)
    }

    /// Names the ranks that this rank waits for.
    #[cold]
    fn expired(&self, member: &Member, end: u64) -> Failure {
        let names =
            |ranks: Vec<usize>| ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        let late: Vec<usize> = self
            .sources
            .iter()
            .filter(|source| source.seen < end)
            .map(|source| source.rank)
            .collect();
        let slow: Vec<usize> = self
            .targets
            .iter()
            .filter(|target| target.taken < end)
            .map(|target| target.rank)
            .collect();
        let time = sizes::show_time(member.timeout);
        let mut message = format!("rank {} was not done after {time}", member.job.rank());
        if !late.is_empty() {
            message += &format!("; messages from ranks {} are missing", names(late));
        }
        if !slow.is_empty() {
            message += &format!("; ranks {} have not taken all messages", names(slow));
        }
        Failure::run(format!("{message}; wait longer with --timeout, or use a smaller -n"))
    }
}

fn contents(seed: u64, from: usize, to: usize, number: u64) -> payload::Pattern {
    payload::Pattern::new(seed, ((from as u64) << 32) | to as u64, number)
}

fn load(node: &Node, at: fishplate::LocalAddr) -> Outcome<u64> {
    node.load(at).map_err(|error| Failure::run(format!("cannot read a message counter: {error}")))
}

#[cold]
fn failed(rank: usize, error: &Error) -> Failure {
    Failure::lost(&format!("rank {rank}"), error)
}
