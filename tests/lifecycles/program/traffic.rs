//! Issues operations and tagged messages, in the way of the end's user. Each may be refused.

use fishplate_core::engine::protocol::Payload;
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{ContextId, Notice, Signal};
use fishplate_core::error::OpError;
use fishplate_core::mem::{LocalAddr, PeerId};
use fishplate_core::op::{Amo, AmoOp, Cmp, SignalOp};
use fishplate_core::psm::MqReq;
use fishplate_core::queue::Command;

use super::super::end::{End, Imported, Role};
use super::super::memory::SIZE;
use super::super::users::{Kind, User};
use super::{Program, World};

const CX: ContextId = ContextId(0);

impl<W: World<RAILS>, const RAILS: usize> Program<'_, W, RAILS> {
    /// Posts one operation on imported memory. Writes only the target's own word.
    pub(super) fn post(&mut self, end: usize) {
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
    pub(super) fn message(&mut self, end: usize) {
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
}
