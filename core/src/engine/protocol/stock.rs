//! Memory for waiting messages: blocks for payloads, headers for payloads that stay at the sender,
//! and for each stream an account of what each side may still use. Sizes are fixed at setup.
//! Nothing here allocates or posts.

use crate::error::Violation;
use crate::mem::{PeerId, Zeroable};
use crate::sync::pool::FreeList;
use crate::sync::seq::Seq;

use super::super::list::NONE;
use super::super::wire::NO_TOKEN;
use super::MatchLimits;
use super::head::Offer;

/// Longest payload of a short message, in bytes.
pub const SHORT: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    Block(u32),
    Header(u32),
}

impl Kept {
    const HEADER: u64 = 1 << 63;

    #[inline(always)]
    pub(crate) fn pack(self) -> u64 {
        match self {
            Kept::Block(index) => index as u64,
            Kept::Header(index) => index as u64 | Self::HEADER,
        }
    }

    #[inline(always)]
    pub(crate) fn unpack(word: u64) -> Self {
        if word & Self::HEADER == 0 { Kept::Block(word as u32) } else { Kept::Header(word as u32) }
    }
}

/// The description of one block. The bytes of the block are elsewhere.
#[derive(Clone, Copy, Debug)]
pub struct BlockSlot {
    link: u32,
    /// The stream that the block belongs to, or [`NONE`] if the block is free or its peer was
    /// removed.
    pub(crate) stream: u32,
    pub(crate) len: u32,
    pub(crate) source: PeerId,
    /// The token of a synchronous send that waits for the match; otherwise 0. For a piece of a get,
    /// the offset of the piece in the buffer.
    pub(crate) token: u64,
}

// SAFETY: zeroed memory is a valid value, because all fields are numbers.
unsafe impl Zeroable for BlockSlot {}

impl BlockSlot {
    /// A free block.
    pub const EMPTY: BlockSlot = BlockSlot {
        link: 0,
        stream: NONE,
        len: 0,
        source: PeerId { index: 0, generation: 0 },
        token: 0,
    };

    pub(crate) fn next(&self) -> u32 {
        self.link
    }

    pub(crate) fn set_next(&mut self, next: u32) {
        self.link = next;
    }
}

/// A pool of equal blocks, followed by short blocks of [`SHORT`] bytes each. The short blocks have
/// the highest indexes.
pub(crate) struct Blocks<'m> {
    bytes: &'m mut [u8],
    short_bytes: &'m mut [u8],
    pub slots: &'m mut [BlockSlot],
    size: usize,
    /// Number of blocks that are not short.
    long: usize,
    /// The free lists. Slots and bytes that were never taken are neither read nor written.
    free: FreeList,
    free_short: FreeList,
}

impl<'m> Blocks<'m> {
    pub(crate) fn new(bytes: &'m mut [u8], slots: &'m mut [BlockSlot], size: usize) -> Self {
        Blocks::with_short(bytes, &mut [], slots, size)
    }

    pub(crate) fn with_short(
        bytes: &'m mut [u8],
        short_bytes: &'m mut [u8],
        slots: &'m mut [BlockSlot],
        size: usize,
    ) -> Self {
        let long = slots.len() - (short_bytes.len() / SHORT).min(slots.len());
        let (free, free_short) = (FreeList::new(), FreeList::new());
        Blocks { bytes, short_bytes, slots, size, long, free, free_short }
    }

    #[inline(always)]
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    #[inline]
    pub(crate) fn take(
        &mut self,
        stream: u32,
        source: PeerId,
        len: u32,
        token: u64,
    ) -> Option<u32> {
        let Blocks { slots, free, long, .. } = self;
        let slots = slots.get_mut(..*long)?;
        let index =
            free.take(slots.len(), |index| slots.get(index as usize).map(|slot| slot.link))?;
        let slot = slots.get_mut(index as usize)?;
        (slot.stream, slot.source, slot.len, slot.token) = (stream, source, len, token);
        Some(index)
    }

    pub(crate) fn take_short(&mut self, stream: u32, source: PeerId, len: u32) -> Option<u32> {
        let slots = self.slots.get_mut(self.long..)?;
        let link = |index| slots.get(index as usize).map(|slot: &BlockSlot| slot.link);
        let index = self.free_short.take(slots.len(), link)?;
        let slot = slots.get_mut(index as usize)?;
        (slot.stream, slot.source, slot.len, slot.token) = (stream, source, len, NO_TOKEN);
        Some(self.long as u32 + index)
    }

    pub(crate) fn len(&self) -> usize {
        self.long
    }

    #[inline(always)]
    pub(crate) fn is_short(&self, index: u32) -> bool {
        index as usize >= self.long
    }

    /// Returns whether at most one long block is free.
    pub(crate) fn is_last(&self) -> bool {
        let (slots, mut free) = (&self.slots[..self.long], self.free.clone());
        let mut take =
            || free.take(slots.len(), |index| slots.get(index as usize).map(|slot| slot.link));
        take().and_then(|_| take()).is_none()
    }

    pub(crate) fn used(&self) -> impl Iterator<Item = u32> + use<> {
        let long = self.long as u32;
        (0..self.free.used()).chain(long..long + self.free_short.used())
    }

    #[inline]
    pub(crate) fn free(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.stream = NONE;
        slot.link = match (index as usize).checked_sub(self.long) {
            None => self.free.give(index),
            Some(short) => self.free_short.give(short as u32),
        };
    }

    #[inline]
    pub(crate) fn bytes(&mut self, index: u32) -> *mut u8 {
        if let Some(short) = (index as usize).checked_sub(self.long) {
            return self.short_bytes[short * SHORT..][..SHORT].as_mut_ptr();
        }
        let at = index as usize * self.size;
        self.bytes[at..at + self.size].as_mut_ptr()
    }
}

/// The header of a stored message. Its payload is still at the sender.
#[derive(Clone, Copy, Debug)]
pub struct HeaderSlot<const RAILS: usize> {
    link: u32,
    pub(crate) stream: u32,
    pub(crate) source: PeerId,
    pub(crate) offer: Offer<RAILS>,
}

// SAFETY: zeroed memory is a valid value, because all fields are numbers.
unsafe impl<const RAILS: usize> Zeroable for HeaderSlot<RAILS> {}

impl<const RAILS: usize> HeaderSlot<RAILS> {
    /// A free header.
    pub const EMPTY: Self = HeaderSlot {
        link: 0,
        stream: NONE,
        source: PeerId { index: 0, generation: 0 },
        offer: Offer::NONE,
    };
}

pub(crate) struct Headers<'m, const RAILS: usize> {
    pub slots: &'m mut [HeaderSlot<RAILS>],
    /// The free slots. A slot's memory stays untouched until it is first taken.
    free: FreeList,
}

impl<'m, const RAILS: usize> Headers<'m, RAILS> {
    pub(crate) fn new(slots: &'m mut [HeaderSlot<RAILS>]) -> Self {
        Headers { slots, free: FreeList::new() }
    }

    /// Takes a header. Its offer is stale.
    pub(crate) fn take(&mut self, stream: u32, source: PeerId) -> Option<u32> {
        let Headers { slots, free } = self;
        let index =
            free.take(slots.len(), |index| slots.get(index as usize).map(|slot| slot.link))?;
        let slot = slots.get_mut(index as usize)?;
        (slot.link, slot.stream, slot.source) = (0, stream, source);
        Some(index)
    }

    pub(crate) fn used(&self) -> u32 {
        self.free.used()
    }

    pub(crate) fn free(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.stream = NONE;
        slot.link = self.free.give(index);
    }
}

/// Room for payloads, in credits, or for headers. Each stream begins with `each`; streams that need
/// more double their room from the `left` of a shared pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub each: u32,
    pub left: u32,
}

impl Room {
    #[inline(always)]
    pub(crate) fn after(&self, doublings: u8) -> u32 {
        self.each << doublings
    }

    fn double(&mut self, doublings: &mut u8) -> bool {
        let more = self.after(*doublings);
        let grows = more != 0 && more <= self.left;
        if grows {
            self.left -= more;
            *doublings += 1;
        }
        grows
    }

    pub(crate) fn take_back(&mut self, doublings: u8) {
        self.left += self.after(doublings) - self.each;
    }
}

/// Counts how much of each other's memory the two sides of a stream use.
///
/// `sent` and `freed` count our credits at the peer. `kept` and `returned` count the peer's credits
/// here. A header is in use from its request to send until the reply, so it needs no count on the
/// wire. For short messages, the receiver raises the total that the sender may send.
///
/// The account has two cache lines, so that indexing is a shift. A message with a credit uses only
/// the first line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Account {
    pub(crate) sent: u32,
    pub(crate) freed: u32,
    /// Requests to send that wait for a reply.
    pub(crate) asked: u32,
    pub(crate) kept: u32,
    pub(crate) headers: u32,
    pub(crate) returned: u32,
    /// Returned credits that were announced to the peer.
    pub(crate) told: u32,
    pub(crate) takes: MatchLimits,
    pub(crate) fins_sent: u32,
    pub(crate) fins_heard: u32,
    /// Fins that the peer has sent, according to its Bye.
    pub(crate) fins_said: u32,
    pub(crate) credit_doublings: u8,
    pub(crate) header_doublings: u8,
    pub(crate) grown: bool,
    /// Messages sent on the fast path since the peer was connected. The counter is here, because
    /// such a message writes this cache line anyway.
    pub(crate) at_once: u64,
    pub(crate) shorts_sent: u32,
    /// Total of short messages that we may send.
    pub(crate) shorts_most: u32,
    pub(crate) shorts_heard: u32,
    /// Total of short messages that the peer may send.
    pub(crate) shorts_granted: u32,
    pub(crate) carriage: Carriage,
}

/// The state of a stream's data that travels in messages from or to device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Carriage {
    /// Bit n is set if the number `upto - 1 - n` is a piece that was sent to device memory.
    recent: u64,
    /// Low 32 bits of the number after the last piece.
    upto: u32,
    /// The rail's id of the copy in progress for a get of the peer, or 0.
    pub(crate) answering: u32,
    /// The rail's id of the copy in progress for our get, or 0.
    pub(crate) placing: u32,
    /// `first` and `last`: the list of blocks with pieces of our get that were not copied to the
    /// device. `got` is their number. The token of a block is the offset of its piece.
    pub(crate) first: u32,
    pub(crate) last: u32,
    pub(crate) got: u8,
    /// Number of pieces of the peer's puts that wait in blocks.
    pub(crate) kept: u8,
    /// Number of our incomplete gets from a peer with failover.
    pub(crate) asked: u8,
}

impl Carriage {
    /// Counts unacknowledged pieces. `next` is the stream's next number, and `in_flight` counts its
    /// unacknowledged numbers. Returns `u32::MAX` if more than 64 numbers are in flight.
    pub(crate) fn in_flight(&self, next: Seq, in_flight: u64) -> u32 {
        let later = (next.0 as u32).wrapping_sub(self.upto);
        match in_flight {
            0 => 0,
            1..=64 => {
                (self.recent.checked_shl(later).unwrap_or(0) << (64 - in_flight)).count_ones()
            }
            _ => u32::MAX,
        }
    }

    pub(crate) fn sent(&mut self, number: Seq) {
        let later = (number.0 as u32).wrapping_sub(self.upto);
        self.recent = self.recent.checked_shl(later).unwrap_or(0) << 1 | 1;
        self.upto = number.plus(1).0 as u32;
    }
}

const _: () =
    assert!(core::mem::offset_of!(Account, shorts_sent) == 64 && size_of::<Account>() == 128);

// SAFETY: zeroed memory is a valid value, because all fields are numbers and flags.
unsafe impl Zeroable for Account {}

impl Account {
    /// An account with nothing in use.
    pub const EMPTY: Account = Account {
        sent: 0,
        freed: 0,
        asked: 0,
        kept: 0,
        headers: 0,
        returned: 0,
        told: 0,
        takes: MatchLimits { eager: 0, credits: 0, headers: 0 },
        fins_sent: 0,
        fins_heard: 0,
        fins_said: 0,
        credit_doublings: 0,
        header_doublings: 0,
        grown: false,
        at_once: 0,
        shorts_sent: 0,
        shorts_most: 0,
        shorts_heard: 0,
        shorts_granted: 0,
        carriage: Carriage {
            recent: 0,
            upto: 0,
            answering: 0,
            placing: 0,
            first: 0,
            last: 0,
            got: 0,
            kept: 0,
            asked: 0,
        },
    };

    #[cold]
    pub(crate) fn grow_credits(&mut self, room: &mut Room) {
        self.grown |= room.double(&mut self.credit_doublings);
    }

    #[cold]
    pub(crate) fn grow_headers(&mut self, room: &mut Room) {
        self.grown |= room.double(&mut self.header_doublings);
    }

    #[inline(always)]
    pub(crate) fn used(&self) -> u32 {
        self.sent.wrapping_sub(self.freed)
    }

    #[inline(always)]
    pub(crate) fn owed(&self) -> u32 {
        self.returned.wrapping_sub(self.told)
    }

    #[inline(always)]
    pub(crate) fn freed(&mut self, freed: u32) -> Result<(), Violation> {
        let more = freed.wrapping_sub(self.freed);
        if more > self.used() {
            // An older total that arrives late changes nothing. A total above what was sent is
            // forged.
            return if more >> 31 != 0 { Ok(()) } else { Err(Violation::Credit) };
        }
        self.freed = freed;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credits_come_back_once_and_never_more_than_were_used() {
        for start in [0u32, u32::MAX - 1, 1 << 31] {
            let mut account =
                Account { sent: start.wrapping_add(3), freed: start, ..Account::EMPTY };
            assert_eq!(account.freed(start.wrapping_add(4)), Err(Violation::Credit));
            assert_eq!(account.freed(start.wrapping_add(2)), Ok(()));
            assert_eq!(account.used(), 1);
            // An older total arrives late.
            assert_eq!(account.freed(start), Ok(()));
            assert_eq!(account.freed(start.wrapping_sub(1000)), Ok(()));
            assert_eq!(account.used(), 1);
            assert_eq!(account.freed(start.wrapping_add(3)), Ok(()));
            assert_eq!(account.used(), 0);
        }
    }

    #[test]
    fn room_doubles_while_there_is_as_much_left_and_comes_back_whole() {
        let mut room = Room { each: 2, left: 7 };
        let mut accounts = [Account::EMPTY; 2];
        accounts[0].grow_credits(&mut room);
        assert_eq!(
            (room.after(accounts[0].credit_doublings), room.left, accounts[0].grown),
            (4, 5, true)
        );
        accounts[0].grown = false;
        accounts[0].grow_credits(&mut room);
        accounts[1].grow_credits(&mut room);
        assert!(
            !accounts[1].grown && accounts[1].credit_doublings == 0,
            "one left, and it has two"
        );
        assert_eq!((room.after(accounts[0].credit_doublings), room.left), (8, 1));
        room.take_back(accounts[0].credit_doublings);
        assert_eq!(room.left, 7);
        let mut none = Room { each: 0, left: 7 };
        accounts[1].grow_headers(&mut none);
        assert!(!accounts[1].grown, "nothing doubles to nothing");
    }

    #[test]
    fn every_block_is_taken_once_and_again_when_it_is_free() {
        let (mut bytes, mut slots) = ([0u8; 48], [BlockSlot::EMPTY; 3]);
        let mut blocks = Blocks::new(&mut bytes, &mut slots, 16);
        let source = PeerId { index: 1, generation: 2 };
        let taken: [_; 4] = core::array::from_fn(|_| blocks.take(5, source, 16, 0));
        assert_eq!(taken, [Some(0), Some(1), Some(2), None]);
        blocks.free(1);
        assert_eq!(blocks.take(5, source, 16, 0), Some(1));
        assert_eq!(blocks.bytes(2) as usize - blocks.bytes(1) as usize, 16);
    }

    #[test]
    fn what_is_kept_comes_back_from_its_word() {
        for kept in [Kept::Block(0), Kept::Block(u32::MAX), Kept::Header(0), Kept::Header(u32::MAX)]
        {
            assert_eq!(Kept::unpack(kept.pack()), kept);
        }
    }
}
