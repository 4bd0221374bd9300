//! The peers of a rail: where they are, by what numbers they sign, what they owe.

use alloc::boxed::Box;
use alloc::vec;

/// A peer's place. The first fields are what a post needs. A cache line, so that its address is a shift.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct PeerSlot {
    /// Its number in the address vector.
    pub addr: u64,
    /// Shortest write to it that is just handed over; none is while it is not up.
    pub plain_from: usize,
    /// Attached, and not known to be gone.
    pub up: bool,
    /// Attached.
    pub attached: bool,
    /// A post to it was refused when [`accepted`](Self::accepted) was `refused_at`.
    pub refused: bool,
    pub refused_at: u32,
    /// Posts to it so far that have an end to come, wrapping; and of these how many are over.
    pub posted: u32,
    pub ended: u32,
    /// Posts to it so far that were over at once, wrapping.
    pub injected: u32,
    /// Arrivals from it so far, wrapping.
    pub arrived: u32,
    /// The number that it signs with.
    pub number: u32,
    /// `ended` and `arrived` together when they last changed, as far as was looked.
    pub marked: u32,
    /// When that was seen, in nanoseconds; 0: nothing was owed.
    pub since: u64,
    /// How often the rail had been polled then.
    pub polls: u32,
}

const GONE: PeerSlot = PeerSlot {
    addr: 0,
    plain_from: usize::MAX,
    up: false,
    attached: false,
    refused: false,
    refused_at: 0,
    posted: 0,
    ended: 0,
    injected: 0,
    arrived: 0,
    number: 0,
    marked: 0,
    since: 0,
    polls: 0,
};

impl PeerSlot {
    /// It is gone. Whether that is news.
    pub fn take_down(&mut self) -> bool {
        self.plain_from = usize::MAX;
        core::mem::replace(&mut self.up, false)
    }

    /// Posts whose end it owes.
    pub fn outstanding(&self) -> u32 {
        self.posted.wrapping_sub(self.ended)
    }

    /// Posts to it that were accepted so far, wrapping.
    pub fn accepted(&self) -> u32 {
        self.posted.wrapping_add(self.injected)
    }

    /// What tells that something has come from it.
    pub fn heard(&self) -> u32 {
        self.ended.wrapping_add(self.arrived)
    }

    /// Whether the last post to it was refused.
    pub fn is_refused(&self) -> bool {
        self.refused && self.refused_at == self.accepted()
    }
}

/// An entry of a table from numbers to peers.
#[derive(Clone, Copy)]
struct Name {
    number: u64,
    /// Or [`NOBODY`]: the entry is free.
    peer: u32,
}

/// No peer has this number.
const NOBODY: u32 = u32::MAX;

const NO_NAME: Name = Name { number: 0, peer: NOBODY };

/// A hash table from numbers that peers are known by to their places, at most half full. Rebuilt when a peer comes or goes.
pub(super) struct Names {
    /// Who was found last: most often it is the next one, too.
    last: Name,
    places: Box<[Name]>,
    shift: u32,
}

impl Names {
    fn new(peers: u16) -> Names {
        let size = (peers as usize * 2).next_power_of_two().max(2);
        Names { last: NO_NAME, places: vec![NO_NAME; size].into(), shift: 64 - size.trailing_zeros() }
    }

    #[inline(always)]
    fn start(&self, number: u64) -> usize {
        (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }

    fn place(&self, number: u64) -> usize {
        let mask = self.places.len() - 1;
        let mut at = self.start(number);
        // Ends: at least half of the places are free.
        loop {
            let name = &self.places[at];
            if name.peer == NOBODY || name.number == number {
                return at;
            }
            at = (at + 1) & mask;
        }
    }

    /// Who has this number.
    #[inline(always)]
    pub fn find(&mut self, number: u64) -> Option<u16> {
        if number != self.last.number {
            self.last = Name { number, peer: self.look_up(number) };
        }
        (self.last.peer != NOBODY).then_some(self.last.peer as u16)
    }

    #[inline(always)]
    fn look_up(&self, number: u64) -> u32 {
        // SAFETY: a start is below the number of places, by the shift that was made from it.
        let first = unsafe { self.places.get_unchecked(self.start(number)) };
        match first.number == number {
            true => first.peer,
            false => self.further(number),
        }
    }

    /// Who has a number that is not where it would be first.
    #[cold]
    #[inline(never)]
    fn further(&self, number: u64) -> u32 {
        self.places[self.place(number)].peer
    }
}

/// All peers of a rail.
pub(super) struct Peers {
    pub slots: Box<[PeerSlot]>,
    /// By the numbers that they sign with.
    pub numbers: Names,
    /// By their numbers in the address vector.
    pub addresses: Names,
}

impl Peers {
    pub fn new(max: u16) -> Peers {
        Peers { slots: vec![GONE; max as usize].into(), numbers: Names::new(max), addresses: Names::new(max) }
    }

    /// Attaches a peer to a place that is free.
    pub fn attach(&mut self, peer: u16, addr: u64, number: u32, plain_from: usize) {
        self.slots[peer as usize] = PeerSlot { addr, plain_from, number, up: true, attached: true, ..GONE };
        self.rename();
    }

    /// Frees a place.
    pub fn detach(&mut self, peer: u16) {
        self.slots[peer as usize] = GONE;
        self.rename();
    }

    fn rename(&mut self) {
        self.numbers.places.fill(NO_NAME);
        self.addresses.places.fill(NO_NAME);
        for (peer, slot) in self.slots.iter().enumerate().filter(|(_, slot)| slot.attached) {
            let peer = peer as u32;
            for (names, number) in [(&mut self.numbers, slot.number as u64), (&mut self.addresses, slot.addr)]
            {
                let at = names.place(number);
                names.places[at] = Name { number, peer };
            }
        }
        for names in [&mut self.numbers, &mut self.addresses] {
            names.last = Name { number: 0, peer: names.look_up(0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Peers;

    #[test]
    fn peers_are_found_by_both_numbers_as_they_come_and_go() {
        let mut peers = Peers::new(4);
        // Number 0 is as good as any: providers count addresses from there.
        for (addr, number) in [(0, 0), (1, 7), (7, 1)] {
            assert_eq!(peers.addresses.find(addr), None);
            assert_eq!(peers.numbers.find(number as u64), None);
            peers.attach(addr as u16 % 4, addr, number, 1);
            for _ in 0..2 {
                assert_eq!(peers.addresses.find(addr), Some(addr as u16 % 4));
                assert_eq!(peers.numbers.find(number as u64), Some(addr as u16 % 4));
            }
        }
        peers.detach(0);
        assert_eq!((peers.addresses.find(0), peers.numbers.find(0)), (None, None));
        assert_eq!((peers.addresses.find(7), peers.numbers.find(7)), (Some(3), Some(1)));
        peers.detach(3);
        assert_eq!(peers.addresses.find(7), None);
    }
}
