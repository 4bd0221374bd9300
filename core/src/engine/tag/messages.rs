//! Finds, claims and takes messages that wait for a receive.

use super::key::Key;
use super::unexpected::State;
use super::{Arrived, Matcher, Tag, TagError, UnexpectedId};

impl<const SHAPES: usize, const INDEXES: usize> Matcher<'_, SHAPES, INDEXES> {
    /// Returns the message that a receive with these arguments would match. The message stays.
    ///
    /// # Errors
    /// [`TagError::TooWide`] if the tag or the mask has bits beyond the configured width.
    #[doc(alias = "psm2_mq_iprobe2")]
    #[doc(alias = "FI_PEEK")]
    pub fn probe(
        &mut self,
        source: Option<u32>,
        tag: Tag,
        ignore: Tag,
    ) -> Result<Option<(UnexpectedId, Arrived)>, TagError> {
        self.check_width(tag | ignore)?;
        if self.unexpected.len == 0 {
            return Ok(None);
        }
        let mask = Key::mask(source.is_some(), ignore);
        let shape = self.intern(mask);
        let index = self.search_unexpected(shape, mask, Key::new(source.unwrap_or(0), tag));
        let Some(slot) = self.unexpected.slots.get(index as usize) else { return Ok(None) };
        Ok(Some((self.unexpected.id(index), slot.arrived())))
    }

    /// Like [`probe`](Self::probe), but claims the message, so that only its id finds it.
    /// [Take](Self::take) or [discard](Self::discard) claimed messages in any order.
    ///
    /// # Errors
    /// [`TagError::TooWide`] if the tag or the mask has bits beyond the configured width.
    #[doc(alias = "psm2_mq_improbe2")]
    #[doc(alias = "FI_CLAIM")]
    pub fn mprobe(
        &mut self,
        source: Option<u32>,
        tag: Tag,
        ignore: Tag,
    ) -> Result<Option<(UnexpectedId, Arrived)>, TagError> {
        let found = self.probe(source, tag, ignore)?;
        if let Some((message, _)) = found {
            self.unexpected.unlink(&mut self.shapes, message.index);
            self.unexpected.slots[message.index as usize].state = State::Claimed;
            self.unexpected.claimed += 1;
        }
        Ok(found)
    }

    /// Receives a claimed message. Its id becomes stale.
    ///
    /// # Errors
    /// [`TagError::Stale`] if the id is stale. [`TagError::NotClaimed`] if the message is not
    /// claimed.
    #[doc(alias = "psm2_mq_imrecv")]
    pub fn take(&mut self, message: UnexpectedId) -> Result<Arrived, TagError> {
        match self.unexpected.slot(message).ok_or(TagError::Stale)?.state {
            State::Claimed => self.discard(message),
            _ => Err(TagError::NotClaimed),
        }
    }

    /// Discards a message, claimed or not. Its id becomes stale.
    ///
    /// # Errors
    /// [`TagError::Stale`] if the id is stale.
    #[doc(alias = "FI_DISCARD")]
    pub fn discard(&mut self, message: UnexpectedId) -> Result<Arrived, TagError> {
        let slot = self.unexpected.slot(message).ok_or(TagError::Stale)?;
        let (arrived, claimed) = (slot.arrived(), slot.state == State::Claimed);
        if claimed {
            self.unexpected.claimed -= 1;
        } else {
            self.unexpected.unlink(&mut self.shapes, message.index);
        }
        self.unexpected.release(message.index);
        Ok(arrived)
    }

    /// Returns a waiting or claimed message.
    ///
    /// # Errors
    /// [`TagError::Stale`] if the id is stale.
    pub fn message(&self, message: UnexpectedId) -> Result<Arrived, TagError> {
        self.unexpected.slot(message).map(|slot| slot.arrived()).ok_or(TagError::Stale)
    }

    /// Changes the cookie of a message.
    ///
    /// # Errors
    /// [`TagError::Stale`] if the id is stale.
    pub fn set_cookie(&mut self, message: UnexpectedId, cookie: u64) -> Result<(), TagError> {
        self.unexpected.slot(message).ok_or(TagError::Stale)?;
        self.unexpected.slots[message.index as usize].cookie = cookie;
        Ok(())
    }

    /// Discards every message of this source, including claimed ones. Slow path: scans every slot
    /// ever used.
    #[cold]
    pub fn forget_source(&mut self, source: u32) {
        let mut from = 0;
        while let Some((message, _)) = self.next_of(source, from) {
            from = message.index + 1;
            // The message exists, so this cannot fail.
            let _ = self.discard(message);
        }
    }

    /// Returns the next message of this source, claimed or not, from slot `from` on. The order is
    /// that of the slots. Slow path: scans every slot ever used.
    #[cold]
    pub(crate) fn next_of(&self, source: u32, from: u32) -> Option<(UnexpectedId, Arrived)> {
        let used = &self.unexpected.slots[..self.unexpected.used as usize];
        let slots = (from..).zip(used.get(from as usize..)?);
        let (index, slot) = slots
            .into_iter()
            .find(|(_, slot)| slot.state != State::Free && slot.key.source() == source)?;
        Some((self.unexpected.id(index), slot.arrived()))
    }
}
