//! Staged operations: writes and reads of unmapped memory that go through the lane in chunks. They
//! are used if the kernel does not permit copies between the two processes, if its copies are
//! slower, or if [`force_staging`](crate::ShmConfig::force_staging) is set. Nothing here blocks or
//! allocates.
//!
//! | end    | write                                      | read                               |
//! |--------|--------------------------------------------|------------------------------------|
//! | origin | posts chunks without records in between    | posts a request                    |
//! | target | checks and copies chunks; owes a status    | owes replies, sent as room permits |
//! | origin | completes with the status                  | completes with the last reply      |
//!
//! The target keeps owed records in a table with one entry per id, so it needs no room in its
//! outgoing lane to drain its incoming lane. Two ends that write to each other through full lanes
//! therefore cannot deadlock.
//!
//! An operation on an unregistered region fails with `EFAULT`, because the region may have been
//! deregistered while the record was in flight. A range outside a registered region is a violation,
//! because a correct origin checks it before it posts.

use std::ptr::NonNull;

use fishplate_core::error::{CompleteError, PeerError, Violation};
use fishplate_core::mem::Peer;
use fishplate_core::rail::{Local, Remote, Sink};

use crate::cma::Way;
use crate::lane::{Consumer, Producer, Refused};
use crate::record::{self, DATA, LAST, READ, REPLY, STAGED, STATUS, WRITE, chunk_cells};
use crate::regions::Regions;

/// Chunks of a write that one pass sends. A lane of the default size holds about this number.
const CHUNKS: u32 = 16;

/// Reply records that one pass sends.
const REPLIES: u32 = 8;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Posted {
    pub(crate) way: Way,
    pub(crate) cx: u64,
    pub(crate) ptr: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) key: u64,
    pub(crate) offset: u64,
    pub(crate) data: Option<u32>,
    /// [`PayloadPaths`](crate::payload::PayloadPaths) records the completion.
    pub(crate) payload: bool,
    pub(crate) done: usize,
}

impl Posted {
    pub(crate) fn new(way: Way, local: Local, remote: Remote, data: Option<u32>, cx: u64) -> Self {
        let (Local { ptr, len, .. }, Remote { key, offset }) = (local, remote);
        Posted { way, cx, ptr, len, key: key.key, offset, data, payload: false, done: 0 }
    }

    fn payload_len(&self) -> Option<usize> {
        self.payload.then_some(self.len)
    }
}

#[derive(Clone, Copy, Debug)]
enum Owed {
    Status(i32),
    Read { key: u64, offset: u64, len: usize, sent: usize },
}

#[derive(Debug)]
pub(crate) struct Staged {
    posted: [Option<Posted>; STAGED],
    owed: [Option<Owed>; STAGED],
    owed_count: u32,
    /// The index in `owed` where the next search begins.
    turn: usize,
    /// The write with an unsent last chunk.
    sending: Option<u8>,
    /// The result so far of the write that is arriving: 0 or an error code.
    arriving: i32,
    chunk: usize,
}

impl Staged {
    pub(crate) fn new(chunk: usize) -> Self {
        Staged {
            posted: [None; STAGED],
            owed: [None; STAGED],
            owed_count: 0,
            turn: 0,
            sending: None,
            arriving: 0,
            chunk,
        }
    }

    /// Returns whether a write is partly sent. Until it is complete, all other posts are refused.
    pub(crate) fn sending(&self) -> bool {
        self.sending.is_some()
    }

    pub(crate) fn has_posts(&self) -> bool {
        self.posted.iter().any(Option::is_some)
    }

    pub(crate) fn touches(&self, memory: Local) -> bool {
        self.posted.iter().flatten().any(|op| memory.overlaps(op.ptr.as_ptr(), op.len))
    }

    #[inline(always)]
    pub(crate) fn owes(&self) -> bool {
        self.owed_count != 0
    }

    /// A refusal changes nothing.
    pub(crate) fn post(&mut self, out: &mut Producer, op: Posted) -> Result<(), Refused> {
        let id = self.posted.iter().position(Option::is_none).ok_or(Refused::Full)?;
        match op.way {
            Way::Get => {
                let record = out.reserve(1)?;
                let words = [op.key, op.offset, id as u64, op.len as u64, 0, 0];
                // SAFETY: `reserve` returned room for one cell, which is published once, here.
                unsafe {
                    record::store(record, words);
                    out.publish(1, record::header(READ, 0));
                }
                self.posted[id] = Some(op);
            }
            Way::Put => {
                // Checks for room first, so that a refusal changes nothing.
                out.reserve(chunk_cells(op.len.min(self.chunk)))?;
                self.posted[id] = Some(op);
                self.sending = Some(id as u8);
                // The operation is accepted. If sending fails, the next pass fails the peer.
                let _ = self.send(out);
            }
        }
        Ok(())
    }

    /// Sends up to [`CHUNKS`] chunks of the partly sent write, as room permits. A full lane is not
    /// an error. Returns whether more could be sent at once.
    pub(crate) fn send(&mut self, out: &mut Producer) -> Result<bool, Refused> {
        let Some(id) = self.sending else { return Ok(false) };
        let Some(op) = &mut self.posted[usize::from(id)] else { return Ok(false) };
        for _ in 0..CHUNKS {
            let len = (op.len - op.done).min(self.chunk);
            let cells = chunk_cells(len);
            let record = match out.reserve(cells) {
                Ok(record) => record,
                Err(Refused::Full) => return Ok(false),
                Err(corrupt) => return Err(corrupt),
            };
            let last = op.done + len == op.len;
            let mut flags = u64::from(id);
            flags |= if last { LAST } else { 0 };
            flags |= if op.data.is_some() { DATA } else { 0 };
            let words =
                [op.key, op.offset + op.done as u64, flags, op.data.unwrap_or(0).into(), 0, 0];
            // SAFETY: `reserve` returned room for `cells` cells: one for the words, and the others
            // for at least `len` bytes. They are published once, here. The poster keeps the source
            // readable until the operation completes, which it has not.
            unsafe {
                record::store(record, words);
                let from = op.ptr.as_ptr().add(op.done);
                std::ptr::copy_nonoverlapping(from, record.add(crate::lane::CELL), len);
                out.publish(cells, record::header(WRITE, len as u32));
            }
            op.done += len;
            if last {
                self.sending = None;
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Sends up to [`REPLIES`] owed records as room permits, one record per operation in turn.
    /// Without turns, a peer that reuses an id at once could starve its other operations. A full
    /// lane is not an error. Returns whether more could be sent at once.
    pub(crate) fn serve(
        &mut self,
        out: &mut Producer,
        peer: Peer,
        regions: &Regions,
    ) -> Result<bool, Refused> {
        for _ in 0..REPLIES {
            let owed = (0..STAGED)
                .map(|i| (self.turn + i) % STAGED)
                .find_map(|id| Some((id, self.owed[id]?)));
            let Some((id, owed)) = owed else { return Ok(false) };
            match self.serve_one(out, id, owed, peer, regions) {
                Ok(rest) => self.owed[id] = rest,
                // `turn` stays the same, so the next call continues with this operation.
                Err(Refused::Full) => return Ok(false),
                Err(corrupt) => return Err(corrupt),
            }
            self.owed_count -= u32::from(self.owed[id].is_none());
            self.turn = (id + 1) % STAGED;
        }
        Ok(self.owes())
    }

    fn serve_one(
        &self,
        out: &mut Producer,
        id: usize,
        owed: Owed,
        peer: Peer,
        regions: &Regions,
    ) -> Result<Option<Owed>, Refused> {
        let (key, offset, len, sent) = match owed {
            Owed::Status(code) => {
                let record = out.reserve(1)?;
                // SAFETY: `reserve` returned room for one cell, which is published once, here.
                unsafe {
                    record::store(record, [id as u64, 0, 0, 0, 0, 0]);
                    out.publish(1, record::header(STATUS, code as u32));
                }
                return Ok(None);
            }
            Owed::Read { key, offset, len, sent } => (key, offset, len, sent),
        };
        // Looks up the region for every chunk, because it may be deregistered at any time.
        let Some((base, size)) = regions.find(key, peer) else {
            return Ok(Some(Owed::Status(libc::EFAULT)));
        };
        if !within(offset, len as u64, size) {
            return Ok(Some(Owed::Status(libc::EFAULT)));
        }
        let part = (len - sent).min(self.chunk);
        let cells = chunk_cells(part);
        let record = out.reserve(cells)?;
        // SAFETY: `reserve` returned room for `cells` cells: one for the words, and the others for
        // at least `part` bytes. They are published once, here. `sent + part <= len`, and `within`
        // has checked that `len` bytes at `offset` lie inside the registered region.
        unsafe {
            record::store(record, [id as u64, sent as u64, 0, 0, 0, 0]);
            let from = base.as_ptr().add(offset as usize + sent);
            std::ptr::copy_nonoverlapping(from, record.add(crate::lane::CELL), part);
            out.publish(cells, record::header(REPLY, part as u32));
        }
        let sent = sent + part;
        Ok((sent < len).then_some(Owed::Read { key, offset, len, sent }))
    }

    fn owe(&mut self, id: usize, owed: Owed) -> Result<(), Violation> {
        // An operation with this id is still in flight, so the peer violates the protocol.
        if self.owed[id].is_some() {
            return Err(Violation::Sequence);
        }
        self.owed[id] = Some(owed);
        self.owed_count += 1;
        Ok(())
    }

    /// Returns the record's length in cells. If the record completes a rendezvous read, also
    /// returns the payload's length.
    #[cold]
    pub(crate) fn take<S: Sink>(
        &mut self,
        input: &Consumer,
        header: u64,
        peer: Peer,
        regions: &Regions,
        sink: &mut S,
    ) -> Result<(u64, Option<usize>), Violation> {
        // SAFETY: `header` found the next record, so its first cell is readable.
        let words = unsafe { record::load(input.record()) };
        let value = (header >> 32) as u32;
        let len = value as usize;
        match header as u32 {
            WRITE => {
                let [key, offset, flags, data, ..] = words;
                let id = number(flags & !(LAST | DATA))?;
                let cells = self.chunk_cells(len, input)?;
                let data = u32::try_from(data).map_err(|_| Violation::Kind)?;
                match regions.find(key, peer) {
                    Some((_, size)) if !within(offset, len as u64, size) => {
                        return Err(Violation::Bounds);
                    }
                    // SAFETY: `within` has checked that the bytes lie inside the region, which is
                    // registered, and so mapped and writable. `chunk_cells` has checked that the
                    // chunk lies inside the lane.
                    Some((base, _)) => unsafe {
                        let from = input.record().add(crate::lane::CELL);
                        std::ptr::copy_nonoverlapping(
                            from,
                            base.as_ptr().add(offset as usize),
                            len,
                        );
                    },
                    None => self.arriving = libc::EFAULT,
                }
                if flags & LAST != 0 {
                    let status = std::mem::take(&mut self.arriving);
                    self.owe(id, Owed::Status(status))?;
                    if status == 0 && flags & DATA != 0 {
                        sink.landed(peer, data);
                    }
                }
                Ok((cells, None))
            }
            READ => {
                let [key, offset, id, len, ..] = words;
                let id = number(id)?;
                let len = usize::try_from(len).map_err(|_| Violation::Length)?;
                if value != 0 {
                    return Err(Violation::Kind);
                }
                let owed = match regions.find(key, peer) {
                    Some((_, size)) if !within(offset, len as u64, size) => {
                        return Err(Violation::Bounds);
                    }
                    Some(_) => Owed::Read { key, offset, len, sent: 0 },
                    None => Owed::Status(libc::EFAULT),
                };
                self.owe(id, owed)?;
                Ok((1, None))
            }
            REPLY => {
                let [id, at, ..] = words;
                let id = number(id)?;
                let cells = self.chunk_cells(len, input)?;
                let Some(op) = self.posted[id].as_mut().filter(|op| op.way == Way::Get) else {
                    return Err(Violation::Reply);
                };
                // Chunks arrive in order and at full length. Only the last chunk may be shorter. An
                // empty chunk is valid only for an empty operation.
                if at != op.done as u64 || len != (op.len - op.done).min(self.chunk) {
                    return Err(Violation::Length);
                }
                // SAFETY: `done + len <= op.len`, and the poster keeps that memory writable until
                // the operation completes. `chunk_cells` has checked that the chunk lies inside the
                // lane.
                unsafe {
                    let from = input.record().add(crate::lane::CELL);
                    std::ptr::copy_nonoverlapping(from, op.ptr.as_ptr().add(op.done), len);
                }
                op.done += len;
                if op.done < op.len {
                    return Ok((cells, None));
                }
                let (cx, ended) = (op.cx, op.payload_len());
                self.posted[id] = None;
                sink.done(cx, Ok(()));
                Ok((cells, ended))
            }
            STATUS => {
                let [id, ..] = words;
                let id = number(id)?;
                let op = self.posted[id].as_ref().ok_or(Violation::Reply)?;
                // A read succeeds only with its last reply, and a write completes only after its
                // last chunk was sent.
                if (op.way == Way::Get && value == 0) || self.sending == Some(id as u8) {
                    return Err(Violation::Reply);
                }
                let (cx, ended) = (op.cx, op.payload_len());
                self.posted[id] = None;
                let result =
                    if value == 0 { Ok(()) } else { Err(CompleteError::Failed(value as i32)) };
                sink.done(cx, result);
                Ok((1, ended))
            }
            _ => Err(Violation::Kind),
        }
    }

    fn chunk_cells(&self, len: usize, input: &Consumer) -> Result<u64, Violation> {
        let cells = chunk_cells(len);
        if len > self.chunk || cells > input.most() { Err(Violation::Length) } else { Ok(cells) }
    }

    /// Removes one operation of this end, because the peer has failed. Returns its context.
    pub(crate) fn abandon(&mut self) -> Option<u64> {
        self.sending = None;
        self.posted.iter_mut().find_map(Option::take).map(|op| op.cx)
    }
}

fn number(id: u64) -> Result<usize, Violation> {
    match usize::try_from(id) {
        Ok(id) if id < STAGED => Ok(id),
        _ => Err(Violation::Sequence),
    }
}

#[inline(always)]
pub(crate) fn within(offset: u64, len: u64, size: u64) -> bool {
    offset.checked_add(len).is_some_and(|end| end <= size)
}

/// Returns the peer's violation, if the violation made our outgoing lane refuse a record. Returns
/// `None` if the lane is only full.
pub(crate) fn blame(refused: Refused) -> Option<PeerError> {
    match refused {
        Refused::Full => None,
        Refused::Corrupt => Some(PeerError::Protocol(Violation::Counter)),
    }
}
