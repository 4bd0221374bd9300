//! The importer's side: looks up buffers of peers, and imports their memory.

use std::time::Instant;

use fishplate_core::mem::Peer;

use super::{Links, Sharing, record};
use crate::Device;
use crate::error::AllocId;
use crate::import::{Fault, ImportError, ImportId, Imported};
use crate::publish::{Binding, DirectToken, Wanted};
use crate::wire::Ask;

pub(super) fn fault(peer: Peer, alloc: Option<AllocId>, why: Fault) -> ImportError {
    ImportError { peer, alloc, why }
}

impl<D: Device> Sharing<D> {
    /// Returns the location of a peer's buffer, if the peer has sent it.
    pub fn look_up<L: Links + ?Sized>(
        &self,
        links: &mut L,
        peer: Peer,
        buffer: u64,
        wanted: Wanted,
    ) -> Option<DirectToken> {
        let mut line = links.line(peer)?;
        let binding = record(&mut line).find(buffer, wanted)?;
        Some(DirectToken { incarnation: line.incarnation(), binding })
    }

    /// Handles the messages that have arrived, and returns the location of a peer's buffer. If the
    /// location is unknown, requests it from the peer. Does not wait for the answer.
    pub fn query<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        peer: Peer,
        buffer: u64,
        wanted: Wanted,
    ) -> Result<Option<DirectToken>, ImportError> {
        self.turn(links);
        let found = self.look_up(links, peer, buffer, wanted);
        let gone = fault(peer, None, Fault::PeerGone);
        let mut line = links.line(peer).ok_or(gone)?;
        if line.ended().is_some() {
            return Err(gone);
        }
        if found.is_some() {
            return Ok(found);
        }
        let ask = Ask::Buffer(buffer, wanted);
        if record(&mut line).refused(ask) {
            return Err(fault(peer, None, Fault::Gone));
        }
        for packet in record(&mut line).ask(ask) {
            line.tell(packet, None);
        }
        Ok(None)
    }

    /// Waits for the location of a peer's buffer.
    pub fn wait<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        peer: Peer,
        buffer: u64,
        wanted: Wanted,
        deadline: Instant,
    ) -> Result<DirectToken, ImportError> {
        loop {
            if let Some(found) = self.query(links, peer, buffer, wanted)? {
                return Ok(found);
            }
            if !self.sleep(links, deadline) {
                self.give_up(links, peer, Ask::Buffer(buffer, wanted));
                return Err(fault(peer, None, Fault::Deadline));
            }
        }
    }

    /// Waits for the location of a peer's buffer and opens its allocation, so that the first
    /// transfer need not open it.
    pub fn prefetch<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        peer: Peer,
        buffer: u64,
        wanted: Wanted,
        deadline: Instant,
    ) -> Result<(DirectToken, Imported), ImportError> {
        let token = self.wait(links, peer, buffer, wanted, deadline)?;
        Ok((token, self.open_direct(links, peer, &token, deadline)?))
    }

    /// Like [`prefetch`](Sharing::prefetch), but without waiting for the peer. Returns `None` until
    /// the peer has answered the requests.
    pub fn try_prefetch<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        peer: Peer,
        buffer: u64,
        wanted: Wanted,
    ) -> Result<Option<(DirectToken, Imported)>, ImportError> {
        let Some(token) = self.query(links, peer, buffer, wanted)? else { return Ok(None) };
        let Binding { alloc, offset, len, .. } = token.binding;
        // The location belongs to this incarnation of the peer, because no message was handled
        // since the lookup.
        let imported = self.try_import(links, peer, alloc, offset, len)?;
        Ok(imported.map(|imported| (token, imported)))
    }

    /// Imports the range of a token, which must belong to this incarnation of the peer.
    pub fn open_direct<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        peer: Peer,
        token: &DirectToken,
        deadline: Instant,
    ) -> Result<Imported, ImportError> {
        let Binding { alloc, offset, len, .. } = token.binding;
        let incarnation = links.line(peer).map(|line| line.incarnation());
        match incarnation {
            None => Err(fault(peer, Some(alloc), Fault::PeerGone)),
            Some(now) if now != token.incarnation => {
                Err(fault(peer, Some(alloc), Fault::Incarnation))
            }
            Some(_) => self.import(links, peer, alloc, offset, len, deadline),
        }
    }

    /// Imports a range of a peer's allocation. Opens the allocation if needed, and requests its
    /// handle if the peer has not sent it. Makes no system call if the allocation is open.
    pub fn import<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        peer: Peer,
        alloc: AllocId,
        offset: u64,
        len: u64,
        deadline: Instant,
    ) -> Result<Imported, ImportError> {
        loop {
            if let Some(imported) = self.try_import(links, peer, alloc, offset, len)? {
                return Ok(imported);
            }
            if !self.sleep(links, deadline) {
                self.give_up(links, peer, Ask::Alloc(alloc));
                return Err(fault(peer, Some(alloc), Fault::Deadline));
            }
        }
    }

    fn give_up<L: Links + ?Sized>(&mut self, links: &mut L, peer: Peer, ask: Ask) {
        if let Some(mut line) = links.line(peer)
            && let Some(packet) = record(&mut line).give_up(ask)
        {
            line.tell(packet, None);
        }
    }

    /// Like [`import`](Sharing::import), but without waiting for the peer. Returns `None` until the
    /// handle has arrived.
    pub fn try_import<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        peer: Peer,
        alloc: AllocId,
        offset: u64,
        len: u64,
    ) -> Result<Option<Imported>, ImportError> {
        // Memory that is already open needs no message.
        if let Some(found) = self.open_already(links, peer, alloc, offset, len) {
            return found.map(Some);
        }
        self.turn(links);
        if let Some(found) = self.open_already(links, peer, alloc, offset, len) {
            return found.map(Some);
        }
        let error = |why| fault(peer, Some(alloc), why);
        let mut line = links.line(peer).ok_or(error(Fault::PeerGone))?;
        if line.ended().is_some() {
            return Err(error(Fault::PeerGone));
        }
        let incarnation = line.incarnation();
        if let Some(offer) = record(&mut line).accept(alloc) {
            let opened = self.imports.open(&mut self.device, peer, incarnation, offer, offset, len);
            return opened.map(Some).map_err(error);
        }
        let ask = Ask::Alloc(alloc);
        if record(&mut line).refused(ask) {
            return Err(error(Fault::NotExported));
        }
        for packet in record(&mut line).ask(ask) {
            line.tell(packet, None);
        }
        Ok(None)
    }

    fn open_already<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        peer: Peer,
        alloc: AllocId,
        offset: u64,
        len: u64,
    ) -> Option<Result<Imported, ImportError>> {
        let line = links.line(peer)?;
        if line.ended().is_some() {
            return None;
        }
        let found = self.imports.find(line.incarnation(), alloc, offset, len)?;
        Some(found.map_err(|why| fault(peer, Some(alloc), why)))
    }

    /// Releases an import.
    pub fn release(&mut self, id: ImportId) {
        self.imports.release(id);
    }
}
