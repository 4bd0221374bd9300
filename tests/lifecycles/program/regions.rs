//! Registers and deregisters memory, and imports and releases that of others. Sometimes uses an
//! invalid id or a damaged handle.

use fishplate_core::engine::HANDLE_MAX;
use fishplate_core::error::{AttachError, Use};
use fishplate_core::mem::LocalId;

use super::super::end::{Imported, Registered, Role};
use super::super::memory::Memory;
use super::{Program, World};

impl<W: World<RAILS>, const RAILS: usize> Program<'_, W, RAILS> {
    pub(super) fn register(
        &mut self,
        end: usize,
        role: Role,
        word: Option<u64>,
    ) -> Option<LocalId> {
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
    pub(super) fn local(&mut self, end: usize, role: Role) -> Option<LocalId> {
        let fit: Vec<_> =
            self.ends[end].regions.iter().filter(|r| r.role == role).map(|r| r.id).collect();
        match self.below(16) {
            0 => self.one_of(&self.ends[end].old_locals.clone()),
            _ => self.one_of(&fit).or_else(|| self.register(end, role, None)),
        }
    }

    /// Returns a source that contains this word. Registers one if necessary.
    pub(super) fn source(&mut self, end: usize, word: u64) -> Option<LocalId> {
        let is = |region: &&Registered| region.role == Role::Source && region.word == word;
        match self.ends[end].regions.iter().find(is) {
            Some(region) => Some(region.id),
            None => self.register(end, Role::Source, Some(word)),
        }
    }

    pub(super) fn deregister(&mut self, end: usize) {
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
    pub(super) fn deregister_at(&mut self, end: usize, at: usize) -> bool {
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
    pub(super) fn import(&mut self, end: usize) {
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

    pub(super) fn release(&mut self, end: usize) {
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
}
