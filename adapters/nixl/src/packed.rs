//! Moves short descriptors in chunks, for providers such as `tcp` where each operation needs the
//! processors of both sides.
//!
//! For a write, the initiator gathers descriptors into a chunk. The target scatters the chunk, and
//! reports when it is done. For a read, the target gathers, and the initiator scatters.
//!
//! Before it touches memory, the target checks all ranges of a chunk against its registered memory.
//! Both sides limit lengths and counts. A peer that sends too much waits.

use fishplate::core::mem::copy_bytes;
use fishplate::node::Error;
use fishplate::{Issued, Node, Notice, PeerId};

use crate::buffers::Buffers;
use crate::chunk::{CHUNK_MAX, HEAD, Head, Kind, NO_NOTE, NOTE_WITHIN, RANGE, Range, TAG};
use crate::intro::Refused;
use crate::memory::{Away, Local, append, contains, read, write};
use crate::peer::Peer;
use crate::slab::Slab;
use crate::status::Status;
use crate::transfer::{Piece, Transfer};

/// Maximum length in bytes of a descriptor that is sent in a chunk.
const SHORT: usize = 32 << 10;

/// A piece of this length fits into a chunk together with its range.
const PIECE_MAX: usize = CHUNK_MAX - HEAD - RANGE;

const UNANSWERED: u32 = 32;

const LENT: u32 = 32;

pub(crate) struct Sides<'a> {
    pub peers: &'a mut Slab<Peer>,
    pub locals: &'a Slab<Local>,
    pub transfers: &'a mut Slab<Transfer>,
    pub buffers: &'a mut Buffers,
}

/// A received chunk in memory of the node. Peers may still write to it, so fields are copied out
/// before they are checked.
#[derive(Clone, Copy)]
pub(crate) struct Chunk {
    start: *const u8,
    len: usize,
}

impl Chunk {
    /// # Safety
    /// The memory stays valid while the chunk is in use.
    pub unsafe fn new(start: *const u8, len: usize) -> Chunk {
        Chunk { start, len }
    }

    fn bytes(&self, from: usize, len: usize) -> Result<Vec<u8>, Refused> {
        let end = from.checked_add(len).ok_or(Refused::Malformed)?;
        if end > self.len {
            return Err(Refused::Malformed);
        }
        let mut bytes = Vec::with_capacity(len);
        // SAFETY: the range was checked above to lie inside the chunk.
        unsafe { append(&mut bytes, self.start.add(from), len) };
        Ok(bytes)
    }

    fn head(&self) -> Result<Head, Refused> {
        Head::decode(&self.bytes(0, HEAD)?)
    }

    /// Copies a part of the chunk to registered memory.
    ///
    /// # Safety
    /// The part lies inside the chunk, and `len` bytes at `address` lie inside the region.
    unsafe fn scatter(
        &self,
        node: &mut Node,
        from: usize,
        local: &Local,
        address: usize,
        len: usize,
    ) -> Result<(), Status> {
        if local.device {
            return write(node, local, address, &self.bytes(from, len)?);
        }
        // SAFETY: the caller guarantees both ranges, and the program keeps registered memory valid.
        unsafe { copy_bytes(self.start.add(from), address as *mut u8, len) };
        Ok(())
    }

    fn ranges(&self, head: &Head) -> Result<(Vec<Range>, usize, usize), Refused> {
        let before = head.before_data(self.len)?;
        let (ranges, sum) = Range::decode_all(&self.bytes(HEAD, head.ranges as usize * RANGE)?)?;
        Ok((ranges, sum, before))
    }
}

fn check(locals: &Slab<Local>, ranges: &[Range]) -> Result<(), Status> {
    for range in ranges {
        let local = locals.get(range.region).ok_or(Status::NOT_FOUND)?;
        if !contains((local.start, local.len), range.address as usize, range.len as usize) {
            return Err(Status::INVALID_PARAM);
        }
    }
    Ok(())
}

pub(crate) fn take_write(
    node: &mut Node,
    sides: &Sides<'_>,
    chunk: Chunk,
) -> Option<(Head, Option<Vec<u8>>)> {
    let head = chunk.head().ok()?;
    let scatter = |node: &mut Node| -> Result<Option<Vec<u8>>, Status> {
        let (ranges, sum, before) = chunk.ranges(&head)?;
        if before + sum != chunk.len || ranges.is_empty() || head.note_len() > NOTE_WITHIN {
            return Err(Status::INVALID_PARAM);
        }
        check(sides.locals, &ranges)?;
        let mut at = before;
        for range in ranges {
            let local = sides.locals.get(range.region).ok_or(Status::NOT_FOUND)?;
            // SAFETY: the source lies inside the chunk, because `before + sum` is its length.
            // `check` found the target in registered memory.
            unsafe { chunk.scatter(node, at, local, range.address as usize, range.len as usize) }?;
            at += range.len as usize;
        }
        match head.note {
            NO_NOTE => Ok(None),
            _ => Ok(Some(chunk.bytes(before - head.note_len(), head.note_len())?)),
        }
    };
    let result = scatter(node);
    let status = result.as_ref().err().map_or(0, |status| status.0);
    Some((Head { ranges: 1, note: NO_NOTE, status, ..head }, result.ok().flatten()))
}

pub(crate) fn take_read(chunk: Chunk) -> Result<(Head, Vec<Range>), Option<Head>> {
    let head = chunk.head().map_err(|_| None)?;
    let refused = Head { ranges: 0, note: NO_NOTE, status: Status::INVALID_PARAM.0, ..head };
    match chunk.ranges(&head) {
        Ok((ranges, sum, before)) if before == chunk.len && sum <= CHUNK_MAX - HEAD => {
            Ok((Head { note: NO_NOTE, status: 0, ..head }, ranges))
        }
        _ => Err(Some(refused)),
    }
}

/// Answers a *read* chunk. Returns `false` if there was no room.
pub(crate) fn answer_read(
    node: &mut Node,
    sides: &mut Sides<'_>,
    (number, id): (u64, PeerId),
    head: &Head,
    ranges: &[Range],
) -> Result<bool, Status> {
    let mut head = *head;
    if let Err(status) = check(sides.locals, ranges) {
        (head.status, head.ranges) = (status.0, 0);
    }
    let mut ranges = if head.status < 0 { &[] } else { ranges };
    let mut bytes = Vec::with_capacity(HEAD);
    head.encode(&mut bytes);
    if ranges.iter().any(|range| sides.locals.get(range.region).is_some_and(|local| local.device)) {
        if !has_buffers(sides.peers, number) {
            return Ok(false);
        }
        for range in std::mem::take(&mut ranges) {
            let local = sides.locals.get(range.region).ok_or(Status::NOT_FOUND)?;
            if read(node, local, range.address as usize, range.len as usize, &mut bytes).is_err() {
                // The device failed. The peer still waits for an answer.
                (head.status, head.ranges) = (Status::BACKEND.0, 0);
                bytes.clear();
                head.encode(&mut bytes);
                break;
            }
        }
    }
    let parts = ranges.iter().map(|range| (range.address as usize, range.len as usize));
    // SAFETY: `check` above found the ranges in registered memory. `take_read` limited their sum to
    // a chunk.
    unsafe { send(node, sides, (number, id), Kind::Data, bytes, parts) }
}

fn awaited<'t>(
    transfers: &'t mut Slab<Transfer>,
    peers: &Slab<Peer>,
    head: &Head,
    source: PeerId,
) -> Option<&'t mut Transfer> {
    let transfer = transfers.get_mut(head.transfer)?;
    let from = transfer.peer.and_then(|peer| peers.get(peer)?.id);
    let expects = transfer.active && !transfer.released && transfer.waits != 0;
    let wanted = expects && transfer.post == head.post;
    (wanted && from == Some(source)).then_some(transfer)
}

/// Returns the error in an answer. Maps unexpected codes to [`Status::BACKEND`].
fn fault(head: &Head) -> Option<Status> {
    match Status(head.status) {
        Status::SUCCESS => None,
        status @ (Status::NOT_FOUND | Status::INVALID_PARAM) => Some(status),
        _ => Some(Status::BACKEND),
    }
}

pub(crate) fn take_data(node: &mut Node, sides: &mut Sides<'_>, source: PeerId, chunk: Chunk) {
    let Ok(head) = chunk.head() else { return };
    let Some(transfer) = awaited(sides.transfers, sides.peers, &head, source) else { return };
    transfer.waits -= 1;
    let result = fault(&head).map_or(Ok(()), Err).and_then(|()| {
        let first = head.first as usize;
        let pieces =
            first.checked_add(head.ranges as usize).and_then(|end| transfer.pieces.get(first..end));
        let pieces =
            pieces.filter(|_| !transfer.write && head.ranges != 0).ok_or(Status::BACKEND)?;
        if pieces.iter().map(|piece| piece.len).sum::<usize>() != chunk.len - HEAD {
            return Err(Status::BACKEND);
        }
        let mut at = HEAD;
        for piece in pieces {
            let region = transfer.locals[piece.local as usize];
            let local = sides.locals.get(region).ok_or(Status::NOT_FOUND)?;
            // SAFETY: the source lies inside the chunk, because the lengths add up to it. `prepare`
            // checked the target, and its region is still registered.
            unsafe { chunk.scatter(node, at, local, piece.here, piece.len) }?;
            at += piece.len;
        }
        Ok(())
    });
    if let Err(status) = result {
        transfer.fault.get_or_insert(status);
    }
}

pub(crate) fn take_done(sides: &mut Sides<'_>, source: PeerId, chunk: Chunk) {
    let Ok(head) = chunk.head() else { return };
    let Some(transfer) = awaited(sides.transfers, sides.peers, &head, source) else { return };
    transfer.waits = transfer.waits.saturating_sub(if transfer.write { head.ranges } else { 0 });
    if let Some(status) = fault(&head) {
        transfer.fault.get_or_insert(status);
    }
}

/// Returns whether another buffer may be lent to a send to this peer. Callers check this before
/// they read device memory, because the read is slow and would be wasted.
fn has_buffers(peers: &Slab<Peer>, number: u64) -> bool {
    peers.get(number).is_some_and(|peer| peer.lent < LENT)
}

/// Sends `bytes` and then the parts of memory as one message. Returns `false` if there was no room.
///
/// # Safety
/// The parts are valid for reads. `bytes` and the parts together fit into [`CHUNK_MAX`].
unsafe fn send(
    node: &mut Node,
    sides: &mut Sides<'_>,
    (number, id): (u64, PeerId),
    kind: Kind,
    mut bytes: Vec<u8>,
    parts: impl Iterator<Item = (usize, usize)> + Clone,
) -> Result<bool, Status> {
    let len = bytes.len() + parts.clone().map(|(_, len)| len).sum::<usize>();
    let tag = TAG | kind as u64;
    let sent = if len <= node.eager_max(id) {
        for (start, len) in parts {
            // SAFETY: the caller guarantees that the parts are valid.
            unsafe { append(&mut bytes, start as *const u8, len) };
        }
        node.send(id, tag, &bytes[..], Notice::Silent)
    } else {
        let peer = sides.peers.get_mut(number).ok_or(Status::REMOTE_DISCONNECT)?;
        if peer.lent >= LENT {
            return Ok(false);
        }
        let buffer = match sides.buffers.take(node) {
            Ok(buffer) => buffer,
            Err(Error::Full { .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let (memory, start) = (buffer.memory(), buffer.start().as_ptr());
        // SAFETY: the caller guarantees that the parts are valid and that everything fits the
        // buffer. No other send uses the buffer.
        unsafe {
            copy_bytes(bytes.as_ptr(), start, bytes.len());
            let mut at = bytes.len();
            for (from, len) in parts {
                copy_bytes(from as *const u8, start.add(at), len);
                at += len;
            }
        }
        peer.lent += 1;
        let word = sides.buffers.lend(buffer, number);
        let sent = node.send(id, tag, memory.slice(..len), Notice::Report(word));
        if !matches!(sent, Ok(Issued::Pending(_))) {
            sides.buffers.end(node, word, false);
            peer.lent -= 1;
        }
        sent
    };
    match sent {
        Ok(_) => Ok(true),
        Err(Error::Full { .. }) => Ok(false),
        Err(error) => match Status::from(error) {
            Status::IN_PROG => Ok(false),
            status => Err(status),
        },
    }
}

/// Sends a *done* chunk. Returns `false` if there was no room.
pub(crate) fn send_done(node: &mut Node, id: PeerId, head: &Head) -> Result<bool, Status> {
    let mut bytes = Vec::with_capacity(HEAD);
    head.encode(&mut bytes);
    match node.send(id, TAG | Kind::Done as u64, &bytes[..], Notice::Silent) {
        Ok(_) => Ok(true),
        Err(error) => match Status::from(error) {
            Status::IN_PROG => Ok(false),
            status => Err(status),
        },
    }
}

pub(crate) fn split(transfer: &mut Transfer) {
    if transfer.pieces.iter().all(|piece| piece.len <= PIECE_MAX) {
        return;
    }
    let parts = |piece: Piece| {
        (0..piece.len).step_by(PIECE_MAX).map(move |at| Piece {
            here: piece.here + at,
            there: piece.there + at,
            len: PIECE_MAX.min(piece.len - at),
            ..piece
        })
    };
    transfer.pieces = std::mem::take(&mut transfer.pieces).into_iter().flat_map(parts).collect();
}

/// Returns the number of next pieces that fit into one chunk. Returns 0 if the first piece should
/// be put or read alone. Never returns 0 if `all` is true.
pub(crate) fn run(pieces: &[Piece], write: bool, all: bool, eager: usize) -> usize {
    let (mut count, mut len, mut data) = (0, HEAD, 0);
    for piece in pieces {
        let long = len + RANGE > eager;
        let full = HEAD + data + piece.len > CHUNK_MAX;
        let more = if write { len + RANGE + piece.len > CHUNK_MAX } else { long || full };
        if (piece.len > SHORT && !all) || more {
            break;
        }
        (count, data) = (count + 1, data + piece.len);
        len += RANGE + if write { piece.len } else { 0 };
    }
    // A chunk of one piece would not save a message, compared with a put or get.
    if count == 1 && !all && (!write || len > eager) { 0 } else { count }
}

/// Sends the next pieces of a write, or requests those of a read. Returns false if there was no
/// room.
pub(crate) fn carry(
    node: &mut Node,
    sides: &mut Sides<'_>,
    aways: &Slab<Away>,
    to: (u64, PeerId),
    number: u64,
    count: usize,
) -> Result<bool, Status> {
    let transfer = sides.transfers.get_mut(number).ok_or(Status::NOT_FOUND)?;
    if transfer.waits >= UNANSWERED || (transfer.device && !has_buffers(sides.peers, to.0)) {
        return Ok(false);
    }
    let (first, write, eager) = (transfer.next, transfer.write, node.eager_max(to.1));
    let pieces = &transfer.pieces[first..first + count];
    let data: usize = pieces.iter().map(|piece| piece.len).sum();
    let len = HEAD + count * RANGE + data;
    let last = write && first + count == transfer.pieces.len();
    let note = transfer.note.take_if(|note| {
        let with = len + note.len();
        last && note.len() <= NOTE_WITHIN && with <= if len <= eager { eager } else { CHUNK_MAX }
    });
    let mut bytes = Vec::with_capacity(if len <= eager { len + NOTE_WITHIN } else { len - data });
    Head {
        transfer: number,
        post: transfer.post,
        first: first as u32,
        ranges: count as u32,
        note: note.as_ref().map_or(NO_NOTE, |note| note.len() as u32),
        status: 0,
    }
    .encode(&mut bytes);
    let mut device = false;
    for piece in pieces {
        let local =
            sides.locals.get(transfer.locals[piece.local as usize]).ok_or(Status::NOT_FOUND)?;
        device |= local.device;
        let away = aways.get(transfer.remotes[piece.remote as usize]).ok_or(Status::NOT_FOUND)?;
        Range { region: away.export.number, address: piece.there as u64, len: piece.len as u32 }
            .encode(&mut bytes);
    }
    bytes.extend_from_slice(note.as_deref().unwrap_or_default());
    let kind = if write { Kind::Write } else { Kind::Read };
    let parts: Vec<(usize, usize)> = match write {
        true if device => {
            for piece in pieces {
                let local = sides
                    .locals
                    .get(transfer.locals[piece.local as usize])
                    .ok_or(Status::NOT_FOUND)?;
                read(node, local, piece.here, piece.len, &mut bytes)?;
            }
            vec![]
        }
        true => pieces.iter().map(|piece| (piece.here, piece.len)).collect(),
        false => vec![],
    };
    // SAFETY: the loop above found the regions of all pieces still registered, and `run` limited
    // the pieces to one chunk.
    let sent = unsafe { send(node, sides, to, kind, bytes, parts.into_iter()) };
    let transfer = sides.transfers.get_mut(number).ok_or(Status::NOT_FOUND)?;
    match sent {
        Ok(true) => (transfer.next, transfer.waits) = (first + count, transfer.waits + 1),
        _ => transfer.note = transfer.note.take().or(note),
    }
    sent
}

#[cfg(test)]
pub(crate) mod tests;
