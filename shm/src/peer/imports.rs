//! The imports of a peer's memory.

use std::ptr::NonNull;

use fishplate_core::error::AttachError;
use fishplate_core::rail::RailKey;

use super::{Attached, Remote};
use crate::regions::{Key, KeyKind};
use crate::staged::within;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Import {
    pub(crate) key: u64,
    pub(crate) base: u64,
    pub(crate) len: u64,
    /// `None` if the memory is not mapped.
    pub(crate) ptr: Option<NonNull<u8>>,
    uses: u32,
}

impl Import {
    #[inline(always)]
    pub(crate) fn holds(&self, offset: u64, len: usize) -> bool {
        within(offset, len as u64, self.len)
    }
}

impl Attached {
    #[inline(always)]
    pub(crate) fn import_of(&self, key: u64) -> Option<&Import> {
        let place = usize::from((key >> 32) as u16);
        match self.imports.get(place) {
            Some(Some(import)) if import.key == key => Some(import),
            _ => self.import_elsewhere(key),
        }
    }

    #[cold]
    fn import_elsewhere(&self, key: u64) -> Option<&Import> {
        self.imports.iter().flatten().find(|import| import.key == key)
    }

    /// Records an import. `map` maps the memory on the first import.
    pub(crate) fn import(
        &mut self,
        key: RailKey,
        len: u64,
        map: impl FnOnce(Option<&mut Remote>, KeyKind) -> Result<Option<NonNull<u8>>, AttachError>,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        let RailKey { key, base } = key;
        let parts = Key::decode(key).ok_or(AttachError::BadHandle)?;
        if len == 0 || base.checked_add(len).is_none() {
            return Err(AttachError::BadRange);
        }
        if self.down.is_some() {
            return Err(AttachError::UnknownPeer);
        }
        if let Some(known) = self.imports.iter_mut().flatten().find(|import| import.key == key) {
            if known.base != base || known.len != len {
                return Err(AttachError::BadHandle);
            }
            known.uses += 1;
            return Ok(known.ptr);
        }
        let place = usize::from(parts.slot);
        let free = match self.imports.get(place) {
            Some(None) => place,
            None if place < self.max_imports => place,
            _ => self.imports.iter().position(Option::is_none).unwrap_or(self.imports.len()),
        };
        if free >= self.max_imports {
            return Err(AttachError::Full("ShmConfig::max_regions, imports of one peer"));
        }
        let ptr = map(self.remote.as_mut(), parts.kind)?;
        if free >= self.imports.len() {
            self.imports.resize(free + 1, None);
        }
        self.imports[free] = Some(Import { key, base, len, ptr, uses: 1 });
        Ok(ptr)
    }

    /// Drops this process's own imports of a key that it has deregistered.
    pub(crate) fn forget(&mut self, key: u64) {
        for place in
            self.imports.iter_mut().filter(|place| place.is_some_and(|import| import.key == key))
        {
            *place = None;
        }
    }

    /// Releases one import of a key.
    pub(crate) fn release(&mut self, key: u64) {
        let Some(place) =
            self.imports.iter_mut().find(|place| place.is_some_and(|import| import.key == key))
        else {
            return;
        };
        if let Some(import) = place {
            import.uses -= 1;
            if import.uses > 0 {
                return;
            }
        }
        *place = None;
        if let (Some(remote), Some(Key { kind: KeyKind::Shared(number), .. })) =
            (&mut self.remote, Key::decode(key))
        {
            remote.control.release(number);
        }
    }
}
