//! Hash tables from the names of peers, their signatures or addresses, to their numbers. A lookup
//! is hot and allocates nothing. Only creating and clearing a table allocate.

use alloc::boxed::Box;
use alloc::vec;

use crate::fabric::raw::FI_ADDR_NOTAVAIL;

/// Marks the calling branch as unlikely.
#[cold]
#[inline]
fn rare() {}

#[derive(Clone, Copy)]
pub(super) struct Name {
    pub number: u64,
    /// The peer, or [`DOWN`] if it has failed, [`LEFT`] if it was detached, or [`NOBODY`] if the
    /// entry is free.
    pub peer: u32,
}

const NOBODY: u32 = u32::MAX;

/// The entry of a detached peer. Lookups of other names pass over it.
const LEFT: u32 = u32::MAX - 1;

pub(super) const DOWN: u32 = u32::MAX - 2;

const NO_NAME: Name = Name { number: 0, peer: NOBODY };

/// The value of `last` while there is no last hit. `FI_ADDR_NOTAVAIL` is no peer's signature or
/// address.
const NOT_FOUND: Name = Name { number: FI_ADDR_NOTAVAIL, peer: NOBODY };

/// A hash table from signatures or addresses to peers, at most half full. The entry of a detached
/// peer stays until the table is rebuilt. That happens when there is no room for another peer.
// `repr(C)` keeps `last` first, beside the slots in `Peers`.
#[repr(C)]
pub(super) struct Names {
    /// The last hit, if its peer is still up. The next arrival is often from the same peer.
    pub last: Name,
    pub places: Box<[Name]>,
    /// Number of entries that are not free.
    used: usize,
    shift: u32,
    /// Whether some name was inserted for a second peer while the first still had it. Only a
    /// rebuild gives the name back to the first peer.
    pub shared: bool,
}

impl Names {
    pub fn new(peers: usize) -> Names {
        let size = (peers * 3).next_power_of_two().max(2);
        Names {
            last: NOT_FOUND,
            places: vec![NO_NAME; size].into(),
            shift: 64 - size.trailing_zeros(),
            used: 0,
            shared: false,
        }
    }

    /// Forgets all names, and makes the table at least three times as long as the number of peers.
    /// So at least a sixth of the table is free for changes until the next rebuild.
    pub fn clear(&mut self, peers: usize) {
        match 3 * peers <= self.places.len() {
            true => self.places.fill(NO_NAME),
            false => *self = Names::new(peers),
        }
        (self.last, self.used, self.shared) = (NOT_FOUND, 0, false);
    }

    pub fn has_room(&self) -> bool {
        2 * (self.used + 1) <= self.places.len()
    }

    pub fn insert(&mut self, number: u64, peer: u32) {
        let at = self.place(number);
        self.used += usize::from(self.places[at].peer == NOBODY);
        self.shared |= self.places[at].peer < LEFT;
        self.places[at] = Name { number, peer };
        self.last = NOT_FOUND;
    }

    pub fn remove(&mut self, number: u64) {
        let at = self.place(number);
        if self.places[at].peer != NOBODY {
            self.places[at].peer = LEFT;
        }
        self.last = NOT_FOUND;
    }

    #[inline(always)]
    fn start(&self, number: u64) -> usize {
        (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }

    pub fn place(&self, number: u64) -> usize {
        let mask = self.places.len() - 1;
        let mut at = self.start(number);
        // Terminates: at least half of the entries are free.
        loop {
            let name = &self.places[at];
            if name.peer == NOBODY || name.number == number {
                return at;
            }
            at = (at + 1) & mask;
        }
    }

    /// Returns the peer with this signature or address, if the peer is up. `number` must not be
    /// `FI_ADDR_NOTAVAIL`.
    #[inline(always)]
    pub fn find(&mut self, number: u64) -> Option<u16> {
        if number != self.last.number {
            rare();
            let peer = self.look_up(number);
            if peer >= DOWN {
                return None;
            }
            self.last = Name { number, peer };
        }
        Some(self.last.peer as u16)
    }

    pub fn has(&self, number: u64) -> bool {
        self.look_up(number) < LEFT
    }

    pub fn take_down(&mut self, number: u64, peer: u16) {
        let at = self.place(number);
        if self.places[at].peer == peer as u32 {
            self.places[at].peer = DOWN;
        }
        self.last = NOT_FOUND;
    }

    #[inline(always)]
    fn look_up(&self, number: u64) -> u32 {
        // SAFETY: the shift leaves an index below the number of entries, which is a power of two.
        let first = unsafe { self.places.get_unchecked(self.start(number)) };
        match first.number == number {
            true => first.peer,
            false => self.further(number),
        }
    }

    #[cold]
    #[inline(never)]
    fn further(&self, number: u64) -> u32 {
        self.places[self.place(number)].peer
    }
}
