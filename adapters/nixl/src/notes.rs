//! Receives notifications, and the chunks of transfers (see `packed`). Both are tagged messages. A
//! notification arrives exactly once, after the data of its transfer. Notifications of one peer
//! arrive in order.
//!
//! Memory for unread notifications from peers is limited. If the program leaves [`READY_MAX`] bytes
//! unread, further notifications wait at their senders. Each peer has a limited share of the
//! messages that are being received.

use std::collections::VecDeque;
use std::io::{self, Write};

use fishplate::core::engine::protocol::{Claimed, Received, Request};
use fishplate::core::engine::tag::Tag;
use fishplate::core::error::OpError;
use fishplate::node::{Error, Memory};
use fishplate::{Node, PeerId};

use crate::chunk::{CHUNK_MAX, Head, Kind, Range, TAG};
use crate::packed::{self, Chunk, Sides};
use crate::peer::Peer;
use crate::slab::Slab;
use crate::status::Status;

pub(crate) const NOTE_MAX: usize = 64 << 20;

/// Above this limit, no more notifications are received until the program reads them.
const READY_MAX: usize = 64 << 20;

/// Estimated overhead of an unread notification in bytes.
const NOTE_COST: usize = 128;

const SPARE_LEN: usize = CHUNK_MAX;
const SPARES: usize = 32;

const BATCH: usize = 256;

/// Maximum number of messages of one peer that are being received or wait for an answer. A peer's
/// answers to our own chunks have twice this limit. The total length of the messages being received
/// is at most [`NOTE_MAX`] bytes.
const SHARE: usize = 64;

struct Incoming {
    request: Request,
    kind: Kind,
    /// `None` if the message is discarded.
    memory: Option<Memory>,
    from: Vec<u8>,
    source: PeerId,
    len: usize,
    /// Contains the notification, if the message carried one and did not fail.
    ended: Option<Option<Vec<u8>>>,
}

#[derive(Default)]
struct Source {
    count: usize,
    bytes: usize,
    held: VecDeque<Claimed>,
    /// Claimed answers to our chunks that wait for room. They do not wait behind other messages,
    /// because the peer needs its send buffers back.
    answers: VecDeque<Claimed>,
    owed: VecDeque<Head>,
    asked: VecDeque<(Head, Vec<Range>)>,
}

impl Source {
    fn has_room(&self, kind: Kind, len: usize) -> bool {
        let has_room = match kind.is_answer() {
            true => self.count < 2 * SHARE,
            false => self.count + self.owed.len() + self.asked.len() < SHARE,
        };
        has_room && (self.count == 0 || self.bytes + len <= NOTE_MAX)
    }

    fn holds(&self) -> bool {
        !self.held.is_empty() || !self.answers.is_empty()
    }

    fn is_idle(&self) -> bool {
        !self.holds() && self.owed.is_empty() && self.asked.is_empty()
    }

    fn queue(&mut self, kind: Kind) -> &mut VecDeque<Claimed> {
        if kind.is_answer() { &mut self.answers } else { &mut self.held }
    }

    /// Queues an answer to a chunk. Merges answers of one post.
    fn owe(&mut self, done: Head) {
        let same = |last: &&mut Head| {
            (last.transfer, last.post, last.status) == (done.transfer, done.post, done.status)
        };
        match self.owed.back_mut().filter(same) {
            Some(last) => last.ranges += done.ranges,
            None => self.owed.push_back(done),
        }
    }
}

/// The messages in progress, by peer. There are few peers, so a linear scan beats hashing.
#[derive(Default)]
struct Sources(Vec<(PeerId, Source)>);

impl Sources {
    fn get(&self, id: PeerId) -> Option<&Source> {
        self.0.iter().find(|(of, _)| *of == id).map(|(_, source)| source)
    }

    fn get_mut(&mut self, id: PeerId) -> Option<&mut Source> {
        self.0.iter_mut().find(|(of, _)| *of == id).map(|(_, source)| source)
    }

    fn entry(&mut self, id: PeerId) -> &mut Source {
        let at = self.0.iter().position(|(of, _)| *of == id).unwrap_or_else(|| {
            self.0.push((id, Source::default()));
            self.0.len() - 1
        });
        &mut self.0[at].1
    }

    fn which(&self, holds: impl Fn(&Source) -> bool) -> Vec<PeerId> {
        self.0.iter().filter(|(_, source)| holds(source)).map(|(id, _)| *id).collect()
    }
}

/// A notification: the name of its sender, and its bytes.
pub(crate) type Note = (Vec<u8>, Vec<u8>);

pub(crate) struct Notes {
    ready: VecDeque<Note>,
    ready_bytes: usize,
    incoming: VecDeque<Incoming>,
    /// Idle entries are removed.
    sources: Sources,
    /// Notifications that wait until their peer is connected, with the peer's number.
    pub outgoing: VecDeque<(u64, Vec<u8>)>,
    spare: Vec<Memory>,
    nowhere: Memory,
    found: bool,
    pub packs: bool,
    told: bool,
}

impl Notes {
    pub fn new(node: &mut Node) -> Result<Notes, Error> {
        Ok(Notes {
            ready: VecDeque::new(),
            ready_bytes: 0,
            incoming: VecDeque::new(),
            sources: Sources::default(),
            outgoing: VecDeque::new(),
            spare: vec![node.alloc(SPARE_LEN)?],
            nowhere: node.alloc(8)?,
            found: false,
            packs: !node.rails().is_empty()
                && node.rails().iter().all(|rail| is_soft(&rail.provider)),
            told: false,
        })
    }

    pub fn check(len: usize) -> Result<(), Status> {
        if len <= NOTE_MAX { Ok(()) } else { Err(Status::INVALID_PARAM) }
    }

    pub fn arrive(&mut self, note: Note) {
        self.ready_bytes += NOTE_COST + note.0.len() + note.1.len();
        self.ready.push_back(note);
    }

    pub fn are_there(&self) -> bool {
        !self.ready.is_empty()
    }

    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        let of = |source: &Source| source.count + source.owed.len() + source.asked.len();
        self.sources.0.iter().map(|(_, source)| of(source)).sum()
    }

    pub fn take(&mut self) -> impl Iterator<Item = Note> {
        self.ready_bytes = 0;
        self.ready.drain(..)
    }

    pub fn collect(&mut self, node: &mut Node, sides: &mut Sides<'_>) {
        if self.sources.0.iter().any(|(_, source)| source.holds()) {
            self.begin_held(node, sides.peers);
        }
        let lone = !std::mem::replace(&mut self.found, false);
        for _ in 0..BATCH {
            // Receives reads and answers even if the program reads no notifications.
            let (tag, ignore) = match (self.packs, self.ready_bytes >= READY_MAX) {
                (false, false) => (TAG, 0),
                (true, false) => (TAG, 7),
                (true, true) => (TAG | 4, 3),
                (false, true) => break,
            };
            let Ok(Some(claimed)) = node.mprobe(None, tag, Tag::from(ignore)) else { break };
            self.found = true;
            let source = claimed.envelope.source;
            let kind = kind_of(&claimed);
            let held =
                self.sources.get_mut(source).is_some_and(|source| !source.queue(kind).is_empty());
            if held || !self.begin(node, sides.peers, claimed) {
                self.sources.entry(source).queue(kind).push_back(claimed);
            } else if self.incoming.len() == 1 {
                // The usual case is a short message, which is complete already.
                self.finish(node, sides);
            }
            if lone {
                // Leaves the next message to the next pass, which costs the same. If that pass also
                // finds a message, it receives a batch.
                break;
            }
        }
        if !self.incoming.is_empty() {
            self.finish(node, sides);
        }
        if self.packs && self.sources.0.iter().any(|(_, source)| !source.is_idle()) {
            self.answer(node, sides);
        }
    }

    #[cold]
    fn begin_held(&mut self, node: &mut Node, peers: &Slab<Peer>) {
        for id in self.sources.which(Source::holds) {
            for of in [Kind::Data, Kind::Note] {
                let next =
                    |notes: &mut Notes| notes.sources.get_mut(id)?.queue(of).front().copied();
                while let Some(claimed) = next(self)
                    && (self.ready_bytes < READY_MAX || !kind_of(&claimed).may_notify())
                    && self.begin(node, peers, claimed)
                {
                    if let Some(source) = self.sources.get_mut(id) {
                        source.queue(of).pop_front();
                    }
                }
            }
            self.tidy(id);
        }
    }

    /// Returns `false` if there is no room: the message stays claimed.
    fn begin(&mut self, node: &mut Node, peers: &Slab<Peer>, claimed: Claimed) -> bool {
        let source = claimed.envelope.source;
        let kind = Kind::of(claimed.envelope.tag.lo);
        let most = if kind == Some(Kind::Note) { NOTE_MAX } else { CHUNK_MAX };
        let len =
            usize::try_from(claimed.envelope.len).ok().filter(|len| *len <= most && kind.is_some());
        let kind = kind.unwrap_or(Kind::Note);
        let wanted = len.unwrap_or(0);
        if self.sources.get(source).is_some_and(|source| !source.has_room(kind, wanted)) {
            return false;
        }
        let memory = match len {
            // The message is too long or of an unknown kind, so no agent has sent it.
            None => None,
            Some(len) => match self
                .spare
                .pop_if(|_| len <= SPARE_LEN)
                .map_or_else(|| node.alloc(len.max(SPARE_LEN)), Ok)
            {
                Ok(memory) => Some(memory),
                Err(error) => {
                    if !std::mem::replace(&mut self.told, true) {
                        let text = "no memory for a notification";
                        _ = writeln!(
                            io::stderr(),
                            "fishplate: {text} of {len} bytes, which waits: {error}"
                        );
                    }
                    return false;
                }
            },
        };
        let into = memory.map_or(self.nowhere.slice(..0), |memory| memory.slice(..wanted));
        match node.post_mrecv(claimed, into, 0) {
            Ok(request) => {
                let named = peers.iter().find(|(_, peer)| peer.id == Some(source));
                let from = named.map(|(_, peer)| peer.name.clone()).unwrap_or_default();
                let of = self.sources.entry(source);
                (of.count, of.bytes) = (of.count + 1, of.bytes + wanted);
                self.incoming.push_back(Incoming {
                    request,
                    kind,
                    memory,
                    from,
                    source,
                    len: wanted,
                    ended: None,
                });
                true
            }
            Err(error) => {
                memory.into_iter().for_each(|memory| self.give_back(node, memory));
                // The peer was removed, and the message with it.
                !matches!(error, Error::Op(OpError::Again))
            }
        }
    }

    fn tidy(&mut self, id: PeerId) {
        if self.sources.get(id).is_some_and(|source| source.count == 0 && source.is_idle()) {
            self.sources.0.retain(|(of, _)| *of != id);
        }
    }

    /// Processes completed receives. Keeps the notifications and chunks of one peer in order.
    fn finish(&mut self, node: &mut Node, sides: &mut Sides<'_>) {
        let mut waiting: Vec<PeerId> = vec![];
        for _ in 0..self.incoming.len() {
            let Some(mut note) = self.incoming.pop_front() else { break };
            if note.ended.is_none()
                && let Ok(Some(status)) = node.test_recv(note.request)
            {
                let arrived = note.memory.filter(|_| status.outcome == Received::Ok);
                note.ended = Some(arrived.and_then(|memory| {
                    let len = status.delivered as usize;
                    if note.kind != Kind::Note {
                        return self.take_chunk(node, sides, &note, memory, len);
                    }
                    let mut bytes = vec![0; len];
                    node.read(memory.at(0), &mut bytes).is_ok().then_some(bytes)
                }));
                match (note.memory, status.outcome) {
                    (None, _) => {}
                    // If the outcome is unknown, the rail may still write the buffer, so it is not
                    // reused.
                    (Some(memory), Received::Unknown(_)) => drop(node.free(memory)),
                    (Some(memory), _) => self.give_back(node, memory),
                }
                if let Some(source) = self.sources.get_mut(note.source) {
                    (source.count, source.bytes) = (source.count - 1, source.bytes - note.len);
                }
                self.tidy(note.source);
            }
            match note.ended {
                Some(bytes) if !waiting.contains(&note.source) => {
                    if let Some(bytes) = bytes {
                        self.arrive((note.from, bytes));
                    }
                }
                _ => {
                    waiting.push(note.source);
                    self.incoming.push_back(note);
                }
            }
        }
    }

    /// Returns the notification in the chunk.
    fn take_chunk(
        &mut self,
        node: &mut Node,
        sides: &mut Sides<'_>,
        incoming: &Incoming,
        memory: Memory,
        len: usize,
    ) -> Option<Vec<u8>> {
        let segment = node.segment(memory).ok()?;
        // SAFETY: `segment` keeps the memory mapped during this call. `len` is the received length,
        // which fits the buffer.
        let chunk = unsafe { Chunk::new(segment.ptr().as_ptr(), len) };
        let source = self.sources.get_mut(incoming.source)?;
        match incoming.kind {
            Kind::Write => {
                let (done, note) = packed::take_write(node, sides, chunk)?;
                let (transfer, post) = (done.transfer, done.post);
                let peer =
                    sides.peers.values_mut().find(|peer| peer.id == Some(incoming.source))?;
                if done.status < 0 {
                    peer.refuse(transfer, post);
                }
                source.owe(done);
                return note.filter(|_| !peer.refused.contains(&(transfer, post)));
            }
            Kind::Read => match packed::take_read(chunk) {
                Ok(asked) => source.asked.push_back(asked),
                Err(refused) => source.asked.extend(refused.map(|head| (head, vec![]))),
            },
            Kind::Data => packed::take_data(node, sides, incoming.source, chunk),
            Kind::Done => packed::take_done(sides, incoming.source, chunk),
            Kind::Note => {}
        }
        None
    }

    #[cold]
    fn answer(&mut self, node: &mut Node, sides: &mut Sides<'_>) {
        for id in self.sources.which(|source| !source.is_idle()) {
            let Some(source) = self.sources.get_mut(id) else { continue };
            let number =
                sides.peers.iter().find(|(_, peer)| peer.id == Some(id)).map(|(number, _)| number);
            let Some(number) = number else {
                // The peer was removed.
                (source.owed, source.asked) = Default::default();
                self.tidy(id);
                continue;
            };
            while let Some(done) = source.owed.front()
                && packed::send_done(node, id, done) != Ok(false)
            {
                source.owed.pop_front();
            }
            while let Some((head, ranges)) = source.asked.front()
                && packed::answer_read(node, sides, (number, id), head, ranges) != Ok(false)
            {
                source.asked.pop_front();
            }
            self.tidy(id);
        }
    }

    fn give_back(&mut self, node: &mut Node, memory: Memory) {
        match memory.len() == SPARE_LEN && self.spare.len() < SPARES {
            true => self.spare.push(memory),
            false => drop(node.free(memory)),
        }
    }
}

/// Returns the kind of a message. An unknown kind counts as a notification, and is discarded.
fn kind_of(claimed: &Claimed) -> Kind {
    Kind::of(claimed.envelope.tag.lo).unwrap_or(Kind::Note)
}

/// Returns whether each operation of the provider needs the processors of both sides.
fn is_soft(provider: &str) -> bool {
    provider.starts_with("tcp")
}
