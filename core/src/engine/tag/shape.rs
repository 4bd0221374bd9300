//! Shapes: the masks in use.
//!
//! A shape keeps its slot after its last receive, until another mask needs the slot. A pinned shape
//! always keeps its slot. When the shapes in use fill the table, receives with further masks have
//! shape [`OVERFLOW`].

use super::key::Key;
use crate::engine::mix;

/// The shape of a receive with a mask that has no slot.
pub(super) const OVERFLOW: u8 = u8::MAX;
/// Maximum number of shapes: a set of shapes is one word.
pub(super) const MOST: usize = 64;
/// The mask of an unused slot. No receive has this mask, because a source is compared whole or not
/// at all.
const UNTAKEN: Key = Key { lo: 0, hi: 1 << 32 };
/// The value of [`Shape::index`] if the shape has no index over unexpected messages.
pub(super) const NO_INDEX: u8 = u8::MAX;

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Shape {
    pub mask: Key,
    pub salt: Key,
    /// A lower bound of the sequence numbers of this shape's indexed receives.
    pub min_seq: u64,
    pub indexed: u32,
    /// Number of reservations by [`Matcher::shape`](super::Matcher::shape) that were not released.
    pub pins: u32,
    /// Number of searches among many unexpected messages without an index.
    pub walks: u8,
    /// This shape's index over unexpected messages, or [`NO_INDEX`].
    pub index: u8,
}

const _: () = assert!(size_of::<Shape>() == 64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Known(u8),
    /// The mask has no slot, and may take this free or idle one.
    Idle(u8),
    Nowhere,
}

#[derive(Clone, Debug)]
pub(super) struct Shapes<const N: usize> {
    all: [Shape; N],
    /// Bit s is set if shape s has indexed receives.
    pub active: u64,
    /// The slot at which the search for an idle slot starts.
    hand: u32,
    /// The shape used last. `hints` holds recent shapes by a hash of their mask. Both may be
    /// outdated.
    last: u8,
    hints: [u8; 64],
}

impl<const N: usize> Shapes<N> {
    pub(super) fn new(seed: u64) -> Self {
        let salt = |n: usize| mix(seed.wrapping_add(n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Shapes {
            all: core::array::from_fn(|n| Shape {
                mask: UNTAKEN,
                salt: Key { lo: salt(2 * n), hi: salt(2 * n + 1) },
                min_seq: 0,
                indexed: 0,
                pins: 0,
                walks: 0,
                index: NO_INDEX,
            }),
            active: 0,
            hand: 0,
            last: 0,
            hints: [0; 64],
        }
    }

    #[inline(always)]
    pub(super) fn get(&self, shape: u8) -> Option<&Shape> {
        self.all.get(shape as usize)
    }

    #[inline(always)]
    pub(super) fn get_mut(&mut self, shape: u8) -> Option<&mut Shape> {
        self.all.get_mut(shape as usize)
    }

    #[inline(always)]
    pub(super) fn last(&self, mask: Key) -> Option<u8> {
        self.is(self.last, mask).then_some(self.last)
    }

    #[inline(always)]
    fn is(&self, shape: u8, mask: Key) -> bool {
        self.get(shape).is_some_and(|shape| shape.mask == mask)
    }

    /// Looks up a mask. A slot is not idle if its bit is set in `kept`.
    pub(super) fn place(&mut self, mask: Key, kept: impl Fn() -> u64) -> Place {
        let spread = (mask.lo ^ mask.hi.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let hint = (spread >> 58) as usize;
        if self.is(self.hints[hint], mask) {
            self.last = self.hints[hint];
            return Place::Known(self.last);
        }
        if let Some(known) = (0..N as u8).find(|shape| self.is(*shape, mask)) {
            (self.last, self.hints[hint]) = (known, known);
            return Place::Known(known);
        }
        if let Some(untaken) = (0..N as u8).find(|shape| self.is(*shape, UNTAKEN)) {
            return Place::Idle(untaken);
        }
        let kept = kept() | self.active;
        for _ in 0..N {
            let at = self.hand as usize % N;
            self.hand = at as u32 + 1;
            if kept >> at & 1 == 0 && self.all[at].pins == 0 {
                return Place::Idle(at as u8);
            }
        }
        Place::Nowhere
    }

    pub(super) fn take(&mut self, place: u8, mask: Key) {
        let shape = &mut self.all[place as usize];
        (shape.mask, shape.walks) = (mask, 0);
        self.last = place;
    }
}
