//! Tag matching with the semantics of MPI, libfabric and PSM. Within limits, the cost does not grow
//! with the number of receives and messages.
//!
//! A [`Matcher`] has one owner, and its state depends only on the operations on it. Nothing here
//! blocks or allocates: all memory is borrowed at setup ([`MatcherMemory`]). A rejected operation
//! changes nothing.
//!
//! ```
//! use fishplate_core::engine::tag::{Arrive, Matcher, MatcherMemory, Post, Tag};
//! use fishplate_core::engine::tag::{PostedSlot, UnexpectedSlot};
//!
//! let (mut posted, mut unexpected) = ([PostedSlot::EMPTY; 64], [UnexpectedSlot::EMPTY; 64]);
//! let mut buckets = [0; 256];
//! let (posted, unexpected, buckets) = (&mut posted, &mut unexpected, &mut buckets);
//! let memory = MatcherMemory { posted, unexpected, buckets };
//! let mut matcher: Matcher = Matcher::new(memory, 0x5eed).unwrap();
//!
//! // From any source. The low 16 bits of the tag are ignored.
//! let waits = matcher.post(None, Tag::from(0x7_0000), Tag::from(0xffff), 11).unwrap();
//! assert!(matches!(waits, Post::Waiting(_)));
//! // Source 3 sends 100 bytes with the tag 0x7_1234.
//! let arrives = matcher.arrive(3, Tag::from(0x7_1234), 100, 0).unwrap();
//! assert!(matches!(arrives, Arrive::Matched { context: 11, .. }));
//! ```
//!
//! # The rule
//!
//! A receive accepts a message if `(tag ^ message.tag) & !ignore == 0` over 96 bits, and if the
//! receive names no source or the message's source. A message matches the first posted receive that
//! accepts it. A receive matches the first arrived message that it accepts. Each receive has its
//! own mask, and any mask is allowed.
//!
//! | libfabric             | PSM                                     | here                 |
//! |-----------------------|-----------------------------------------|----------------------|
//! | `fi_trecv`, `ignore`  | `psm2_mq_irecv2`, `rtagsel` = `!ignore` | [`Matcher::post`]    |
//! | `FI_PEEK`             | `psm2_mq_iprobe2`                       | [`Matcher::probe`]   |
//! | `FI_PEEK`, `FI_CLAIM` | `psm2_mq_improbe2`                      | [`Matcher::mprobe`]  |
//! | `FI_CLAIM`            | `psm2_mq_imrecv`                        | [`Matcher::take`]    |
//! | `FI_DISCARD`          |                                         | [`Matcher::discard`] |
//! | `fi_cancel`           | `psm2_mq_cancel`                        | [`Matcher::cancel`]  |
//!
//! # Algorithm
//!
//! A *shape* is a mask over source and tag. A receive accepts a message if and only if their keys
//! are equal under the receive's mask. So each shape is a hash table of *groups*; a group has all
//! receives with one key, oldest first. A message looks up one group per shape in use, and matches
//! the oldest receive found. A shape is skipped if all its receives are younger than the best one
//! found so far. Unexpected messages are hashed too, in one table per shape that receives search
//! for. The oldest receive and message are checked before any table, and the youngest few receives
//! are in no table. So traffic in order is not hashed while the queue of receives is short.

mod group;
mod index;
mod key;
mod messages;
mod posted;
mod setup;
mod shape;
mod unexpected;
mod verify;
mod words;

pub use posted::PostedSlot;
pub use setup::{MatcherConfig, MatcherMemory};
pub use unexpected::UnexpectedSlot;
pub use words::{
    Arrive, Arrived, Cancel, MatchStats, Post, ReceiveId, ShapeId, Tag, TagError, UnexpectedId,
};

use crate::engine::mix;
use crate::error::AttachError;

use super::list::NONE;
use key::Key;
use posted::{Found, Posted};
use shape::{NO_INDEX, OVERFLOW, Place, Shapes};
use unexpected::Unexpected;

/// A tag matcher. Up to `SHAPES` masks (at most 64) can have receives waiting at one time without
/// slowing each other down. Up to `INDEXES` of them (at most 4) can be searched for at one time
/// among many unexpected messages. Beyond these limits the results are the same, but searches scan
/// linearly.
#[doc(alias = "psm2_mq_t")]
pub struct Matcher<'m, const SHAPES: usize = 32, const INDEXES: usize = 4> {
    shapes: Shapes<SHAPES>,
    posted: Posted<'m>,
    unexpected: Unexpected<'m, INDEXES>,
    /// The bits beyond the configured width of tags.
    beyond: Tag,
    stats: MatchStats,
}

impl<'m, const SHAPES: usize, const INDEXES: usize> Matcher<'m, SHAPES, INDEXES> {
    /// Moves the receives into longer memory. The hash table keeps its size.
    #[cold]
    pub(crate) fn grow(&mut self, posted: &'m mut [PostedSlot]) {
        self.posted.grow(posted);
    }

    /// Creates a matcher for tags of 96 bits. `seed` is [`MatcherConfig::seed`].
    ///
    /// # Errors
    /// [`AttachError::Config`] names the value that is out of range.
    pub fn new(memory: MatcherMemory<'m>, seed: u64) -> Result<Self, AttachError> {
        Self::with_config(memory, MatcherConfig { seed, ..MatcherConfig::DEFAULT })
    }

    /// Creates a matcher with a configuration.
    ///
    /// # Errors
    /// [`AttachError::Config`] names the value that is out of range.
    pub fn with_config(
        memory: MatcherMemory<'m>,
        config: MatcherConfig,
    ) -> Result<Self, AttachError> {
        const { assert!(SHAPES <= shape::MOST && INDEXES <= unexpected::MOST_INDEXES) };
        let MatcherMemory { posted, unexpected, buckets } = memory;
        let first = config.first_sequence.unwrap_or(mix(!config.seed) >> 16);
        let check = |ok: bool, what| if ok { Ok(()) } else { Err(AttachError::Config(what)) };
        check(config.tag_bits >= 1 && config.tag_bits <= 96, "tag_bits: must be 1 to 96")?;
        check(first < 1 << 63, "first_sequence: must be below 2^63")?;
        check(posted.len() < 1 << 31, "memory.posted: must have fewer than 2^31 entries")?;
        check(unexpected.len() < 1 << 29, "memory.unexpected: must have fewer than 2^29 entries")?;
        check(buckets.len() >= 2, "memory.buckets: must have at least 2 entries")?;
        let half = buckets.len() / 2;
        let (for_posted, for_unexpected) = buckets.split_at_mut(half);
        Ok(Matcher {
            shapes: Shapes::new(config.seed),
            posted: Posted::new(posted, for_posted, first, config.unhashed, config.lazily),
            unexpected: Unexpected::new(unexpected, for_unexpected, first, config.walked),
            beyond: !Tag::low_bits(config.tag_bits),
            stats: MatchStats::default(),
        })
    }

    /// Posts a receive: returns the oldest message that it accepts, or queues the receive. A
    /// `source` of `None` accepts any source. Bits set in `ignore` are not compared. A match
    /// returns `context`.
    ///
    /// # Errors
    /// [`TagError::Full`] if nothing matches and no slot is free. [`TagError::TooWide`] if the tag
    /// or the mask has bits beyond the configured width.
    #[doc(alias = "psm2_mq_irecv2")]
    #[doc(alias = "fi_trecv")]
    #[inline(always)]
    pub fn post(
        &mut self,
        source: Option<u32>,
        tag: Tag,
        ignore: Tag,
        context: u64,
    ) -> Result<Post, TagError> {
        self.check_width(tag | ignore)?;
        let mask = Key::mask(source.is_some(), ignore);
        let shape = self.intern(mask);
        self.post_under(shape, mask, Key::new(source.unwrap_or(0), tag), context)
    }

    /// Returns `None`, and changes nothing, unless the mask is that of the previous receive and no
    /// message waits.
    #[inline(always)]
    pub(crate) fn post_alike(
        &mut self,
        source: Option<u32>,
        tag: Tag,
        ignore: Tag,
        context: u64,
    ) -> Option<ReceiveId> {
        // The width of the mask was checked when its shape was taken.
        if self.unexpected.len != 0 || self.check_width(tag).is_err() {
            return None;
        }
        // Two copies of the code are shorter than one that computes with an optional source.
        match source {
            Some(source) => self.append_alike(true, Key::new(source, tag), ignore, context),
            None => self.append_alike(false, Key::new(0, tag), ignore, context),
        }
    }

    #[inline(always)]
    fn append_alike(
        &mut self,
        exact: bool,
        key: Key,
        ignore: Tag,
        context: u64,
    ) -> Option<ReceiveId> {
        let mask = Key::mask(exact, ignore);
        let shape = self.shapes.last(mask)?;
        self.posted.append(&mut self.shapes, shape, mask, key, context)
    }

    /// Posts a receive with a reserved shape. `source` is ignored if the shape compares no source.
    ///
    /// # Errors
    /// The errors of [`post`](Self::post). [`TagError::Stale`] if the shape was released.
    #[inline]
    pub fn post_shaped(
        &mut self,
        shape: ShapeId,
        source: u32,
        tag: Tag,
        context: u64,
    ) -> Result<Post, TagError> {
        self.check_width(tag)?;
        let mask = match self.shapes.get(shape.0) {
            Some(shape) if shape.pins > 0 => shape.mask,
            _ => return Err(TagError::Stale),
        };
        self.post_under(shape.0, mask, Key::new(source, tag), context)
    }

    #[inline(always)]
    fn post_under(
        &mut self,
        shape: u8,
        mask: Key,
        key: Key,
        context: u64,
    ) -> Result<Post, TagError> {
        if self.unexpected.len != 0 {
            if let Some(arrived) = self.unexpected.pop_unindexed(&mut self.shapes, mask, key) {
                self.stats.searches += 1;
                return Ok(Post::Matched(arrived));
            }
            if let Some(arrived) = self.receive_behind(shape, mask, key) {
                return Ok(Post::Matched(arrived));
            }
        }
        let waiting = self
            .posted
            .append(&mut self.shapes, shape, mask, key, context)
            .ok_or(TagError::Full)?;
        if shape == OVERFLOW {
            self.stats.overflowed += 1;
        }
        Ok(Post::Waiting(waiting))
    }

    /// Removes the oldest message that a receive with this shape, mask and key accepts. At least
    /// one message must wait.
    #[inline(never)]
    fn receive_behind(&mut self, shape: u8, mask: Key, key: Key) -> Option<Arrived> {
        let index = self.search_unexpected(shape, mask, key);
        let arrived = self.unexpected.slots.get(index as usize)?.arrived();
        self.unexpected.unlink(&mut self.shapes, index);
        self.unexpected.release(index);
        Some(arrived)
    }

    /// Matches an arrived message with the oldest receive that accepts it, or stores the message.
    /// `cookie` is for the caller's use.
    ///
    /// # Errors
    /// [`TagError::Full`] if no receive accepts the message and no slot is free.
    /// [`TagError::TooWide`] if the tag has bits beyond the configured width.
    #[inline(always)]
    pub fn arrive(
        &mut self,
        source: u32,
        tag: Tag,
        len: u64,
        cookie: u64,
    ) -> Result<Arrive, TagError> {
        self.check_width(tag)?;
        let key = Key::new(source, tag);
        let matched = match self.posted.pop_fresh(&self.shapes, key) {
            None if self.posted.order.head == NONE => None,
            None => self.deliver_behind(key),
            popped => popped,
        };
        if let Some((receive, context)) = matched {
            self.stats.expected += 1;
            self.stats.expected_bytes = self.stats.expected_bytes.wrapping_add(len);
            return Ok(Arrive::Matched { receive, context });
        }
        self.store(key, len, cookie)
    }

    #[inline(never)]
    fn store(&mut self, key: Key, len: u64, cookie: u64) -> Result<Arrive, TagError> {
        let Some(stored) = self.unexpected.store(key, len, cookie) else {
            return self.store_in_more(key, len, cookie);
        };
        self.stats.unexpected += 1;
        self.stats.unexpected_bytes = self.stats.unexpected_bytes.wrapping_add(len);
        let here = self.unexpected.len + self.unexpected.claimed;
        self.stats.unexpected_peak = self.stats.unexpected_peak.max(here);
        match self.unexpected.caught_up {
            0 => Ok(Arrive::Stored(stored)),
            _ => self.stored_beyond_indexes(stored),
        }
    }

    /// Called if indexes had all earlier messages. A tail call, so that `store` saves no registers.
    #[inline(never)]
    fn stored_beyond_indexes(&mut self, stored: UnexpectedId) -> Result<Arrive, TagError> {
        self.unexpected.wake_indexes(stored.index);
        Ok(Arrive::Stored(stored))
    }

    #[cold]
    fn store_in_more(&mut self, key: Key, len: u64, cookie: u64) -> Result<Arrive, TagError> {
        if self.unexpected.widen() { self.store(key, len, cookie) } else { Err(TagError::Full) }
    }

    /// Removes the oldest receive that accepts a message with this key. At least one receive must
    /// wait.
    #[inline(never)]
    fn deliver_behind(&mut self, key: Key) -> Option<(ReceiveId, u64)> {
        self.posted.catch_up(&mut self.shapes, key);
        let found = self.posted.find(&self.shapes, key);
        self.count(found);
        let Some(slot) = self.posted.slots.get(found.index as usize) else {
            self.stats.searches += 1;
            return None;
        };
        let context = slot.context;
        let receive = self.posted.id(found.index);
        self.posted.remove(&mut self.shapes, found.index, posted::State::Matched);
        Some((receive, context))
    }

    /// Returns the receive that a message with this source and tag would match, and its context.
    /// Changes nothing.
    pub fn would_match(&self, source: u32, tag: Tag) -> Option<(ReceiveId, u64)> {
        if self.posted.order.head == NONE {
            return None;
        }
        let Found { index, .. } = self.posted.find(&self.shapes, Key::new(source, tag));
        let slot = self.posted.slots.get(index as usize)?;
        Some((self.posted.id(index), slot.context))
    }

    /// Cancels a receive.
    #[doc(alias = "psm2_mq_cancel")]
    #[doc(alias = "fi_cancel")]
    pub fn cancel(&mut self, receive: ReceiveId) -> Cancel {
        match self.posted.slot(receive) {
            Some(slot) if slot.waits() => {
                let context = slot.context;
                self.posted.remove(&mut self.shapes, receive.index, posted::State::Free);
                Cancel::Removed(context)
            }
            Some(slot) if slot.state == posted::State::Matched => Cancel::AlreadyMatched,
            _ => Cancel::Stale,
        }
    }

    /// Returns the source that a waiting receive names, if it names one.
    pub(crate) fn source(&self, receive: ReceiveId) -> Option<u32> {
        let slot = self.posted.slot(receive).filter(|slot| slot.waits())?;
        let exact = Posted::mask_of(slot, &self.shapes).source() != 0;
        exact.then(|| slot.key.source())
    }

    /// Returns whether a receive still waits.
    pub fn is_waiting(&self, receive: ReceiveId) -> bool {
        self.posted.slot(receive).is_some_and(|slot| slot.waits())
    }

    /// Removes every receive that names this source, oldest first, and passes its id and context to
    /// `removed`. Slow path: scans all receives.
    #[cold]
    pub fn fail_source(&mut self, source: u32, mut removed: impl FnMut(ReceiveId, u64)) {
        let mut at = self.posted.order.head;
        while at != NONE {
            let slot = self.posted.slots[at as usize];
            if Posted::mask_of(&slot, &self.shapes).source() != 0 && slot.key.source() == source {
                let id = self.posted.id(at);
                self.posted.remove(&mut self.shapes, at, posted::State::Free);
                removed(id, slot.context);
            }
            at = slot.order.next;
        }
    }

    /// Reserves a shape for receives with this mask, with or without a source. Repeated calls
    /// return the same id.
    ///
    /// # Errors
    /// [`TagError::Full`] if every shape is in use. [`TagError::TooWide`] if the mask has bits
    /// beyond the configured width.
    pub fn shape(&mut self, exact_source: bool, ignore: Tag) -> Result<ShapeId, TagError> {
        self.check_width(ignore)?;
        let number = self.intern(Key::mask(exact_source, ignore));
        self.shapes.get_mut(number).ok_or(TagError::Full)?.pins += 1;
        Ok(ShapeId(number))
    }

    /// Releases a shape. Call this once per reservation. Receives posted with the shape stay.
    ///
    /// # Errors
    /// [`TagError::Stale`] if no reservation is left.
    pub fn release_shape(&mut self, shape: ShapeId) -> Result<(), TagError> {
        match self.shapes.get_mut(shape.0) {
            Some(shape) if shape.pins > 0 => shape.pins -= 1,
            _ => return Err(TagError::Stale),
        }
        Ok(())
    }

    /// Returns the number of waiting receives.
    pub fn posted(&self) -> usize {
        self.posted.len() as usize
    }

    /// Returns the number of waiting messages, excluding claimed ones.
    pub fn unexpected(&self) -> usize {
        self.unexpected.len as usize
    }

    /// Returns the number of claimed messages that are neither taken nor discarded.
    pub fn claimed(&self) -> usize {
        self.unexpected.claimed as usize
    }

    /// Returns how many more receives can wait.
    pub fn posted_room(&self) -> usize {
        self.posted.slots.len() - self.posted()
    }

    /// Returns how many more messages can wait.
    pub fn unexpected_room(&self) -> usize {
        self.unexpected.slots.len() - self.unexpected() - self.claimed()
    }

    /// Returns the counters.
    pub fn stats(&self) -> MatchStats {
        // The search that finds a receive is not counted again.
        MatchStats { searches: self.stats.searches + self.stats.expected, ..self.stats }
    }

    #[inline(always)]
    fn check_width(&self, bits: Tag) -> Result<(), TagError> {
        if bits & self.beyond == Tag::ZERO { Ok(()) } else { Err(TagError::TooWide) }
    }

    fn search_unexpected(&mut self, shape: u8, mask: Key, key: Key) -> u32 {
        let found = self.unexpected.find(&mut self.shapes, shape, mask, key);
        self.stats.searches += 1;
        self.count(found);
        found.index
    }

    fn count(&mut self, found: Found) {
        if found.probes | found.passed != 0 {
            self.stats.probes += found.probes as u64;
            self.stats.most_probes = self.stats.most_probes.max(found.probes);
            self.stats.longest_walk = self.stats.longest_walk.max(found.passed);
        }
    }

    /// Returns [`OVERFLOW`] if no shape is free for a new mask.
    #[inline(always)]
    fn intern(&mut self, mask: Key) -> u8 {
        match self.shapes.last(mask) {
            Some(shape) => shape,
            None => self.intern_another(mask),
        }
    }

    #[inline(never)]
    fn intern_another(&mut self, mask: Key) -> u8 {
        match self.shapes.place(mask, || self.posted.fresh_shapes()) {
            Place::Known(shape) => shape,
            Place::Idle(place) => {
                if let Some(index) = self.shapes.get(place).map(|shape| shape.index)
                    && index != NO_INDEX
                {
                    self.unexpected.evict(&mut self.shapes, index as usize);
                }
                self.shapes.take(place, mask);
                place
            }
            Place::Nowhere => OVERFLOW,
        }
    }
}

static_assertions::assert_impl_all!(Matcher<'static>: Send);
