//! Executes transfers.
//!
//! Over shared memory, posting a transfer to a connected peer copies all its data, with many ranges
//! per system call. The copy proceeds in steps, and other threads can make calls between the steps.
//!
//! Over other rails, a post issues operations while there is room, and later passes issue the rest.
//! The notification of a write is sent with the last chunk or after the writes. The notification of
//! a read is sent after the reads complete.

use fishplate::core::engine::NOW_MAX;
use fishplate::core::mem::copy_bytes;
use fishplate::core::op::Outcome;
use fishplate::node::Slice;
use fishplate::{Issued, LocalAddr, Node, Notice, PeerId, RemoteAddr};

use crate::memory::{Away, Local, contains, read, write};
use crate::notes::Notes;
use crate::packed::{self, Sides};
use crate::state::State;
use crate::status::Status;
use crate::transfer::{Desc, Piece, Regions, Transfer};

const PASSES: usize = 16;

/// Maximum number of bytes to copy in one step, during which the agent is locked.
const STEP: usize = 1 << 20;
const DEVICE_STEP: usize = 16 << 20;

impl State {
    /// Prepares a transfer. Moves no data.
    pub fn prepare(
        &mut self,
        write: bool,
        locals: &[Desc],
        remotes: &[Desc],
        agent: &[u8],
    ) -> Result<u64, Status> {
        let peer = match agent == self.name {
            true => None,
            false => Some(self.loaded(agent).ok_or(Status::NOT_FOUND)?),
        };
        if locals.len() != remotes.len() || locals.is_empty() {
            return Err(Status::INVALID_PARAM);
        }
        let mut pieces: Vec<Piece> = Vec::with_capacity(locals.len());
        let (mut ours, mut theirs) = (Regions::default(), Regions::default());
        let mut device = false;
        for (local, remote) in locals.iter().zip(remotes) {
            if local.len != remote.len {
                return Err(Status::MISMATCH);
            }
            let (Some(from), Some(to)) = (local.region(true), remote.region(peer.is_none())) else {
                return Err(Status::NOT_FOUND);
            };
            let known = here(self.locals.get(from))?;
            let there = match peer {
                None => here(self.locals.get(to))?,
                Some(_) => away(self.aways.get(to), peer)?,
            };
            let inside = |(range, _), desc: &Desc| contains(range, desc.address, desc.len);
            if !inside(known, local) || !inside(there, remote) {
                return Err(Status::INVALID_PARAM);
            }
            device |= known.1 || there.1;
            let (from, to) = (ours.position(from) as u32, theirs.position(to) as u32);
            match pieces.last_mut() {
                Some(last)
                    if (last.local, last.remote) == (from, to)
                        && last.here + last.len == local.address
                        && last.there + last.len == remote.address =>
                {
                    last.len += local.len;
                }
                _ if local.len == 0 => {}
                _ => pieces.push(Piece {
                    here: local.address,
                    there: remote.address,
                    len: local.len,
                    local: from,
                    remote: to,
                }),
            }
        }
        Ok(self.transfers.insert(Transfer {
            write,
            peer,
            pieces,
            device,
            locals: ours.numbers,
            remotes: theirs.numbers,
            ..Transfer::default()
        }))
    }

    pub fn post(&mut self, number: u64, note: Option<&[u8]>) -> Status {
        let Some(transfer) = self.transfers.get_mut(number) else { return Status::NOT_FOUND };
        if transfer.active || transfer.outstanding != 0 {
            return Status::REPOST_ACTIVE;
        }
        if let Err(status) = Notes::check(note.map_or(0, <[u8]>::len)) {
            return status;
        }
        (transfer.next, transfer.cut, transfer.fault, transfer.active) = (0, 0, None, true);
        (transfer.post, transfer.waits) = (transfer.post.wrapping_add(1), 0);
        transfer.note = note.map(<[u8]>::to_vec);
        transfer.here.clear();
        transfer.there.clear();
        self.stir();
        self.step(number)
    }

    /// Call this again while [`copies`](Self::copies) is true.
    pub fn step(&mut self, number: u64) -> Status {
        let status = self.advance(number);
        if status == Status::IN_PROG && !self.copies(number) {
            self.moving.push(number);
        }
        status
    }

    pub fn copies(&self, number: u64) -> bool {
        self.transfers.get(number).is_some_and(|transfer| transfer.copies)
    }

    /// Makes some passes if the transfer is in progress.
    pub fn check(&mut self, number: u64) -> Status {
        for _ in 0..PASSES {
            match self.transfers.get(number) {
                None => return Status::NOT_FOUND,
                Some(transfer) if transfer.active => {
                    self.pass();
                    if self.copies(number) {
                        break;
                    }
                }
                Some(transfer) => return transfer.fault.unwrap_or(Status::SUCCESS),
            }
        }
        Status::IN_PROG
    }

    /// Posts no more operations. The transfer is removed when the operations in flight complete.
    pub fn release(&mut self, number: u64) -> Status {
        let Some(transfer) = self.transfers.get_mut(number) else { return Status::NOT_FOUND };
        if transfer.outstanding == 0 {
            self.transfers.remove(number);
            self.moving.retain(|moving| *moving != number);
        } else {
            (transfer.released, transfer.note) = (true, None);
            transfer.fault.get_or_insert(Status::NOT_FOUND);
        }
        Status::SUCCESS
    }

    pub fn advance(&mut self, number: u64) -> Status {
        let Some(transfer) = self.transfers.get_mut(number) else { return Status::NOT_FOUND };
        transfer.copies = false;
        if transfer.fault.is_none()
            && let Err(status) = self.carry(number)
            && status != Status::IN_PROG
            && let Some(transfer) = self.transfers.get_mut(number)
        {
            transfer.fault.get_or_insert(status);
        }
        let Some(transfer) = self.transfers.get_mut(number) else { return Status::NOT_FOUND };
        let moved = transfer.next == transfer.pieces.len() && transfer.note.is_none();
        let open = !moved || transfer.waits != 0;
        if transfer.outstanding != 0 || (transfer.fault.is_none() && open) {
            return Status::IN_PROG;
        }
        transfer.active = false;
        let status = transfer.fault.unwrap_or(Status::SUCCESS);
        if transfer.released {
            self.transfers.remove(number);
        }
        status
    }

    /// Issues the remaining operations of a transfer.
    ///
    /// # Errors
    /// [`Status::IN_PROG`] if the transfer must be continued later.
    fn carry(&mut self, number: u64) -> Result<(), Status> {
        let transfer = self.transfers.get(number).ok_or(Status::NOT_FOUND)?;
        let Some(peer) = transfer.peer else { return self.carry_here(number) };
        if transfer.next < transfer.pieces.len() || transfer.note.is_some() {
            if !self.approach(peer)? {
                return Err(Status::IN_PROG);
            }
            if let Err(status) = self.carry_pieces(number, peer) {
                if status == Status::REMOTE_DISCONNECT {
                    self.lose(peer);
                }
                return Err(status);
            }
        }
        let transfer = self.transfers.get_mut(number).ok_or(Status::NOT_FOUND)?;
        // Sends the notification only after the target has answered all chunks, because it may
        // refuse a chunk. Puts need no wait, because they are ordered before the message. Gets must
        // be complete.
        if transfer.waits == 0
            && transfer.fault.is_none()
            && (transfer.write || transfer.outstanding == 0)
            && let Some(note) = transfer.note.take()
            && !self.tell(peer, &note)?
            && let Some(transfer) = self.transfers.get_mut(number)
        {
            transfer.note = Some(note);
        }
        Ok(())
    }

    fn carry_pieces(&mut self, number: u64, peer: u64) -> Result<(), Status> {
        let known = self.peers.get(peer).and_then(|peer| Some((peer.id?, peer.packs)));
        let (id, packs) = known.ok_or(Status::REMOTE_DISCONNECT)?;
        let transfer = self.transfers.get_mut(number).ok_or(Status::NOT_FOUND)?;
        // A rail that needs chunks does not carry device memory, so all of the transfer is sent in
        // chunks.
        let packs_all = packs && transfer.device;
        match packs_all {
            true => packed::split(transfer),
            false => self.resolve(number, id)?,
        }
        loop {
            let State { node, transfers, locals, aways, peers, buffers, .. } = self;
            let transfer = transfers.get_mut(number).ok_or(Status::NOT_FOUND)?;
            let left = &transfer.pieces[transfer.next..];
            if left.is_empty() {
                return Ok(());
            }
            let count = match packs {
                true => packed::run(left, transfer.write, packs_all, node.eager_max(id)),
                false => 0,
            };
            if count == 0 {
                carry_apart(node, transfer, number, packs)?;
                if transfer.copies {
                    return Err(Status::IN_PROG);
                }
                continue;
            }
            let mut sides = Sides { peers, locals, transfers, buffers };
            if !packed::carry(node, &mut sides, aways, (peer, id), number, count)? {
                return Err(Status::IN_PROG);
            }
        }
    }

    fn resolve(&mut self, number: u64, id: PeerId) -> Result<(), Status> {
        let State { node, transfers, locals, aways, .. } = self;
        let transfer = transfers.get_mut(number).ok_or(Status::NOT_FOUND)?;
        if !transfer.there.is_empty() {
            return Ok(());
        }
        for local in &transfer.locals {
            let local = locals.get(*local).ok_or(Status::NOT_FOUND)?;
            transfer.here.push((local.memory, local.base));
        }
        for away in &transfer.remotes {
            let away = aways.get_mut(*away).ok_or(Status::NOT_FOUND)?;
            let remote = match away.import {
                Some((of, remote)) if of == id => remote,
                _ => {
                    let remote = node.import(id, &away.export.handle)?;
                    away.import = Some((id, remote));
                    remote
                }
            };
            transfer.there.push((remote, away.base));
        }
        Ok(())
    }

    /// Copies the data of a transfer within the agent: at most [`STEP`] bytes, or [`DEVICE_STEP`]
    /// with device memory.
    fn carry_here(&mut self, number: u64) -> Result<(), Status> {
        let State { node, transfers, locals, .. } = self;
        let transfer = transfers.get_mut(number).ok_or(Status::NOT_FOUND)?;
        for region in transfer.locals.iter().chain(&transfer.remotes) {
            locals.get(*region).ok_or(Status::NOT_FOUND)?;
        }
        let mut copies = Copies::default();
        let mut room = if transfer.device { DEVICE_STEP } else { STEP };
        while let Some(piece) = transfer.pieces.get(transfer.next) {
            let (cut, len) = (transfer.cut, room.min(piece.len - transfer.cut));
            let (from, to) = match transfer.write {
                true => (piece.here + cut, piece.there + cut),
                false => (piece.there + cut, piece.here + cut),
            };
            match transfer.device {
                // SAFETY: `prepare` checked both ranges against their regions. The regions are
                // still registered, so the program keeps the memory valid.
                false => unsafe { copy_bytes(from as *const u8, to as *mut u8, len) },
                true => {
                    let regions = (
                        transfer.locals[piece.local as usize],
                        transfer.remotes[piece.remote as usize],
                    );
                    let (source, target) =
                        if transfer.write { regions } else { (regions.1, regions.0) };
                    let known = |region| locals.get(region).ok_or(Status::NOT_FOUND);
                    copies.add(node, (known(source)?, from), (known(target)?, to), len)?;
                }
            }
            room -= len;
            (transfer.next, transfer.cut) = match cut + len == piece.len {
                true => (transfer.next + 1, 0),
                false => (transfer.next, cut + len),
            };
            if room == 0 && transfer.next < transfer.pieces.len() {
                transfer.copies = true;
                break;
            }
        }
        copies.finish(node)?;
        if transfer.copies {
            return Err(Status::IN_PROG);
        }
        if let Some(note) = transfer.note.take() {
            self.notes.arrive((self.name.clone(), note));
        }
        Ok(())
    }

    /// Returns whether there were completions.
    pub fn reap(&mut self) -> bool {
        let mut found = false;
        while let Some(end) = self.node.next_completion() {
            found = true;
            let unknown = matches!(end.outcome, Outcome::Unknown(_));
            if let Some(peer) = self.buffers.end(&mut self.node, end.tag, unknown) {
                if let Some(peer) = self.peers.get_mut(peer) {
                    peer.lent -= 1;
                }
                continue;
            }
            let Some(transfer) = self.transfers.get_mut(end.tag) else { continue };
            transfer.outstanding = transfer.outstanding.saturating_sub(1);
            if end.outcome != Outcome::Done {
                // A failed operation does not show whether the peer or only the rail failed.
                let peer = transfer.peer.and_then(|peer| self.peers.get(peer)?.id);
                let lives = peer.is_some_and(|id| self.node.peer_error(id) == Ok(None));
                transfer.fault.get_or_insert(if lives {
                    Status::BACKEND
                } else {
                    Status::REMOTE_DISCONNECT
                });
            }
        }
        found
    }

    pub fn fail_transfers(&mut self, peer: u64) {
        for transfer in self.transfers.values_mut().filter(|transfer| transfer.active) {
            if transfer.peer == Some(peer) {
                transfer.waits = 0;
                transfer.fault.get_or_insert(Status::REMOTE_DISCONNECT);
            }
        }
    }
}

/// Copies at most [`STEP`] bytes at once where the node can copy directly. Otherwise posts pieces
/// as single puts or gets: only the next piece if `one`, else all remaining pieces.
fn carry_apart(
    node: &mut Node,
    transfer: &mut Transfer,
    number: u64,
    one: bool,
) -> Result<(), Status> {
    let Transfer { write, pieces, here, there, next, cut, copies, outstanding, .. } = transfer;
    let range = |piece: &Piece, cut: usize, len: usize| -> (Slice, RemoteAddr) {
        let (memory, base) = here[piece.local as usize];
        let (remote, start) = there[piece.remote as usize];
        let from: LocalAddr = memory.at((piece.here - base + cut) as u64);
        (Slice::new(from, len), remote.at(piece.there as u64 - start + cut as u64))
    };
    let (mut at_once, mut room) = (!one, STEP);
    while let Some(first) = pieces.get(*next) {
        if at_once {
            let mut now = |ranges: &[(Slice, RemoteAddr)]| match *write {
                true => node.put_now(ranges),
                false => node.get_now(ranges),
            };
            let len = room.min(first.len - *cut);
            let moved = match &pieces[*next + 1..] {
                [] => now(&[range(first, *cut, len)])?,
                left => {
                    let mut ranges = [range(first, *cut, len); NOW_MAX];
                    let (mut count, mut sum) = (1, len);
                    for (place, piece) in ranges[1..].iter_mut().zip(left) {
                        sum += piece.len;
                        if sum > room {
                            break;
                        }
                        *place = range(piece, 0, piece.len);
                        count += 1;
                    }
                    now(&ranges[..count])?
                }
            };
            at_once = moved != 0;
            if at_once {
                let more = pieces[*next + 1..*next + moved].iter().map(|piece| piece.len);
                room -= len + more.sum::<usize>();
                (*next, *cut) = match *cut + len == first.len {
                    true => (*next + moved, 0),
                    false => (*next, *cut + len),
                };
                *copies = room == 0 && *next < pieces.len();
                if *copies {
                    break;
                }
            }
            continue;
        }
        let (slice, remote) = range(first, *cut, first.len - *cut);
        let issued = match *write {
            true => node.put(slice, remote, Notice::Report(number)),
            false => node.get(slice, remote, Notice::Report(number)),
        };
        *outstanding += u32::from(matches!(issued?, Issued::Pending(_)));
        (*next, *cut) = (*next + 1, 0);
        if one {
            break;
        }
    }
    Ok(())
}

/// Copies within the agent from or to device memory. Copies within the device are queued, and one
/// wait covers all of them.
#[derive(Default)]
struct Copies(Vec<(LocalAddr, LocalAddr, usize)>);

impl Copies {
    fn add(
        &mut self,
        node: &mut Node,
        (source, from): (&Local, usize),
        (target, to): (&Local, usize),
        len: usize,
    ) -> Result<(), Status> {
        if source.device && target.device {
            self.0.push((target.at(to), source.at(from), len));
            if self.0.len() == NOW_MAX {
                self.finish(node)?;
            }
            return Ok(());
        }
        let mut at = 0;
        let mut bytes = vec![];
        while at < len {
            bytes.clear();
            let part = STEP.min(len - at);
            read(node, source, from + at, part, &mut bytes)?;
            write(node, target, to + at, &bytes)?;
            at += part;
        }
        Ok(())
    }

    fn finish(&mut self, node: &mut Node) -> Result<(), Status> {
        if !self.0.is_empty() {
            node.copy_device(&self.0)?;
            self.0.clear();
        }
        Ok(())
    }
}

/// A range of registered memory, and whether it is device memory.
type Known = ((usize, usize), bool);

fn here(local: Option<&Local>) -> Result<Known, Status> {
    local.map(|local| ((local.start, local.len), local.device)).ok_or(Status::NOT_FOUND)
}

fn away(away: Option<&Away>, peer: Option<u64>) -> Result<Known, Status> {
    let Away { export, .. } =
        away.filter(|away| Some(away.peer) == peer).ok_or(Status::NOT_FOUND)?;
    Ok(((export.start as usize, export.len as usize), export.device))
}

#[cfg(test)]
mod tests;
