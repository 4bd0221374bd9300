//! The peers of a rail: their addresses, signatures and outstanding posts.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::mem;

use static_assertions::const_assert_eq;

use crate::fabric::raw::FI_ADDR_NOTAVAIL;

/// Marks the calling branch as unlikely.
#[cold]
#[inline]
fn rare() {}

/// A peer's slot of one cache line, so that a shift computes its address. Posts use the first
/// fields.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct PeerSlot {
    /// The peer's `fi_addr_t` in the address vector.
    pub addr: u64,
    /// Writes shorter than this are injected. 0 while the peer is not up.
    pub short_below: usize,
    /// Whether longer writes take the fast path. `false` while the peer is not up.
    pub plain: bool,
    /// Whether the peer is attached and has not failed.
    pub up: bool,
    /// Whether the peer is attached.
    pub attached: bool,
    /// Whether the provider has ever rejected a post to the peer.
    pub refused: bool,
    /// Whether the endpoint was replaced after the peer was attached. Nothing from the peer arrives
    /// then.
    pub fenced: bool,
    /// Number of further messages that are posted with a completion, because the error of an inject
    /// names no peer. Once this is 0, short messages are injected. Never 0 while the peer is not
    /// up.
    pub first: u8,
    /// [`accepted`](Self::accepted) at the last rejection.
    pub refused_at: u32,
    /// Number of posts with a completion, and how many of them have completed. Both wrap.
    pub posted: u32,
    pub ended: u32,
    /// Number of posts that completed at once. Wraps.
    pub injected: u32,
    /// Number of arrivals from the peer. Wraps.
    pub arrived: u32,
    /// The peer's signature, which its words carry.
    pub number: u32,
    /// [`heard`](Self::heard) at the last check that saw a change.
    pub marked: u32,
    /// Time of the last check that saw a change, in nanoseconds. 0 if nothing was outstanding.
    pub since: u64,
    /// The rail's poll count at the last check that saw a change.
    pub polls: u32,
}

const_assert_eq!(size_of::<PeerSlot>(), 64);

/// Number of messages to a new peer that are posted with a completion. Engines exchange fewer
/// messages than this to connect.
const FIRST: u8 = 8;

const GONE: PeerSlot = PeerSlot {
    addr: 0,
    short_below: 0,
    plain: false,
    up: false,
    attached: false,
    refused: false,
    fenced: false,
    first: FIRST,
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
    /// Returns the number of outstanding posts.
    pub fn outstanding(&self) -> u32 {
        self.posted.wrapping_sub(self.ended)
    }

    /// Returns the number of accepted posts. Wraps.
    pub fn accepted(&self) -> u32 {
        self.posted.wrapping_add(self.injected)
    }

    /// Returns a number that changes with every sign of life of the peer.
    pub fn heard(&self) -> u32 {
        self.ended.wrapping_add(self.arrived)
    }

    /// Returns whether the last post was rejected.
    pub fn is_refused(&self) -> bool {
        self.refused && self.refused_at == self.accepted()
    }
}

/// An entry of [`Names`].
#[derive(Clone, Copy)]
struct Name {
    number: u64,
    /// The peer, or [`DOWN`] if it has failed, or [`NOBODY`] if the entry is free.
    peer: u32,
}

/// Marks a free entry.
const NOBODY: u32 = u32::MAX;

/// Marks a peer that is attached but has failed.
const DOWN: u32 = u32::MAX - 1;

const NO_NAME: Name = Name { number: 0, peer: NOBODY };

/// The value of `last` while there is no last hit. No peer has this number.
const NOT_FOUND: Name = Name { number: FI_ADDR_NOTAVAIL, peer: NOBODY };

/// A hash table from signatures or addresses to peers, at most half full. It grows when a peer is
/// attached.
pub(super) struct Names {
    /// The last hit, if its peer is still up. The next arrival is often from the same peer.
    last: Name,
    places: Box<[Name]>,
    shift: u32,
    /// Number of taken entries.
    taken: usize,
}

impl Names {
    /// Creates a table with room for this many peers.
    fn new(peers: usize) -> Names {
        let size = (peers * 2).next_power_of_two().max(2);
        let shift = 64 - size.trailing_zeros();
        Names { last: NOT_FOUND, places: vec![NO_NAME; size].into(), shift, taken: 0 }
    }

    /// Adds a peer. Several peers may have the same number: the first one that was added is found.
    fn add(&mut self, number: u64, peer: u32) {
        if 2 * (self.taken + 1) > self.places.len() {
            let larger = Names::new(self.places.len());
            let all = mem::replace(self, larger).places;
            for name in all.iter().filter(|name| name.peer != NOBODY) {
                self.add(name.number, name.peer);
            }
        }
        let mut at = self.start(number);
        while self.places[at].peer != NOBODY {
            at = self.next(at);
        }
        self.places[at] = Name { number, peer };
        self.taken += 1;
        self.last = NOT_FOUND;
    }

    /// Removes a peer that is up or [`DOWN`], and moves later entries forward, so that each is
    /// found.
    fn remove(&mut self, number: u64, peer: u16) {
        let mut free = self.start(number);
        loop {
            match self.places[free] {
                Name { peer: NOBODY, .. } => return,
                Name { number: same, peer: found }
                    if same == number && (found == peer.into() || found == DOWN) =>
                {
                    break;
                }
                _ => free = self.next(free),
            }
        }
        let (mask, mut at) = (self.places.len() - 1, self.next(free));
        while self.places[at].peer != NOBODY {
            let from_start = at.wrapping_sub(self.start(self.places[at].number)) & mask;
            if from_start >= at.wrapping_sub(free) & mask {
                self.places[free] = self.places[at];
                free = at;
            }
            at = self.next(at);
        }
        self.places[free] = NO_NAME;
        self.taken -= 1;
        self.last = NOT_FOUND;
    }

    fn next(&self, at: usize) -> usize {
        (at + 1) & (self.places.len() - 1)
    }

    #[inline(always)]
    fn start(&self, number: u64) -> usize {
        (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }

    fn place(&self, number: u64) -> usize {
        let mut at = self.start(number);
        // Terminates: at least half of the entries are free.
        loop {
            let name = &self.places[at];
            if name.peer == NOBODY || name.number == number {
                return at;
            }
            at = self.next(at);
        }
    }

    /// Returns the peer with this number if the peer is up. The number must not be
    /// `FI_ADDR_NOTAVAIL`.
    #[inline(always)]
    fn find(&mut self, number: u64) -> Option<u16> {
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

    /// Returns whether an attached peer has this number.
    fn has(&self, number: u64) -> bool {
        self.look_up(number) != NOBODY
    }

    /// Marks the only peer with this number as failed.
    fn take_down(&mut self, number: u64) {
        let at = self.place(number);
        if self.places[at].peer != NOBODY {
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

    /// Probes past the first entry for a number.
    #[cold]
    #[inline(never)]
    fn further(&self, number: u64) -> u32 {
        self.places[self.place(number)].peer
    }
}

pub(super) struct Peers {
    /// The slots up to the highest peer that was ever attached, so that other peers take no memory.
    pub slots: Vec<PeerSlot>,
    /// Peers by signature. No two have the same.
    numbers: Names,
    /// Peers that are up, by `fi_addr_t`. A provider may give a new peer the number of a failed
    /// one.
    addresses: Names,
}

impl Peers {
    pub fn new() -> Peers {
        Peers { slots: vec![], numbers: Names::new(0), addresses: Names::new(0) }
    }

    /// Attaches a peer to a free slot. Writes shorter than `short_below` are injected, longer ones
    /// take the fast path. With `None` all writes take the general path.
    pub fn attach(&mut self, peer: u16, addr: u64, number: u32, short_below: Option<usize>) {
        let (short_below, plain) = (short_below.unwrap_or(0), short_below.is_some());
        if self.slots.len() <= peer as usize {
            self.slots.resize(peer as usize + 1, GONE);
        }
        self.slots[peer as usize] =
            PeerSlot { addr, short_below, plain, number, up: true, attached: true, ..GONE };
        self.numbers.add(number.into(), peer.into());
        if addr != FI_ADDR_NOTAVAIL {
            self.addresses.add(addr, peer.into());
        }
    }

    /// Returns whether an attached peer has this signature.
    pub fn knows(&self, number: u32) -> bool {
        self.numbers.has(number as u64)
    }

    /// Counts an arrival with this signature. Returns its peer if the peer is up.
    #[inline(always)]
    pub fn hear_signed(&mut self, number: u32) -> Option<u16> {
        let peer = self.numbers.find(number as u64)?;
        self.count(peer);
        Some(peer)
    }

    /// Counts an arrival from this address. Returns its peer if the peer is up.
    #[inline(always)]
    pub fn hear_from(&mut self, addr: u64) -> Option<u16> {
        if addr == FI_ADDR_NOTAVAIL {
            return None;
        }
        let peer = self.addresses.find(addr)?;
        self.count(peer);
        Some(peer)
    }

    /// Counts an arrival.
    #[inline(always)]
    fn count(&mut self, peer: u16) {
        // SAFETY: the tables hold only peers that `attach` put into a slot, and slots are never
        // removed.
        let slot = unsafe { self.place(peer) };
        slot.arrived = slot.arrived.wrapping_add(1);
    }

    /// Returns the slot of a peer that is or was attached.
    ///
    /// # Safety
    /// `peer` is in range, which holds for every peer that was ever attached: slots are never
    /// removed.
    #[inline(always)]
    pub unsafe fn place(&mut self, peer: u16) -> &mut PeerSlot {
        debug_assert!((peer as usize) < self.slots.len());
        // SAFETY: our caller guarantees that the peer is in range.
        unsafe { self.slots.get_unchecked_mut(peer as usize) }
    }

    /// Marks a peer as failed: posts to it are rejected and lookups miss. Returns whether it was
    /// up.
    pub fn take_down(&mut self, peer: u16) -> bool {
        let slot = &mut self.slots[peer as usize];
        if !slot.up {
            return false;
        }
        (slot.up, slot.first, slot.short_below, slot.plain) = (false, FIRST, 0, false);
        self.numbers.take_down(slot.number.into());
        self.addresses.remove(slot.addr, peer);
        true
    }

    /// Forgets the addresses of all peers, because they belong to another address vector. All peers
    /// are down.
    pub fn forget_addresses(&mut self) {
        for slot in &mut self.slots {
            slot.addr = FI_ADDR_NOTAVAIL;
        }
    }

    /// Routes all writes to the general path from now on.
    pub fn look_at_writes(&mut self) {
        for slot in &mut self.slots {
            (slot.short_below, slot.plain) = (0, false);
        }
    }

    /// Frees the slot of an attached peer.
    pub fn detach(&mut self, peer: u16) {
        let PeerSlot { number, addr, .. } = mem::replace(&mut self.slots[peer as usize], GONE);
        self.numbers.remove(number.into(), peer);
        self.addresses.remove(addr, peer);
    }
}

#[cfg(test)]
mod tests {
    use super::Peers;
    use crate::fabric::raw::FI_ADDR_NOTAVAIL;

    #[test]
    fn peers_are_found_by_both_numbers_as_they_come_and_go() {
        let mut peers = Peers::new();
        // 0 is a valid `fi_addr_t`: providers count from 0.
        for (addr, number) in [(0, 0), (1, 7), (7, 1)] {
            assert!(!peers.knows(number));
            assert_eq!((peers.hear_from(addr), peers.hear_signed(number)), (None, None));
            let peer = addr as u16 % 4;
            peers.attach(peer, addr, number, None);
            for heard in [2, 4] {
                assert_eq!((peers.hear_from(addr), peers.hear_signed(number)), (Some(peer), Some(peer)));
                assert_eq!(peers.slots[peer as usize].arrived, heard);
            }
        }
        peers.detach(0);
        assert_eq!((peers.hear_from(0), peers.hear_signed(0)), (None, None));
        assert_eq!((peers.hear_from(7), peers.hear_signed(1)), (Some(3), Some(3)));
        peers.detach(3);
        assert_eq!(peers.hear_from(7), None);
        assert_eq!(peers.hear_from(FI_ADDR_NOTAVAIL), None);
    }

    #[test]
    fn a_peer_that_is_down_is_not_heard_and_keeps_its_number() {
        let mut peers = Peers::new();
        peers.attach(1, 5, 9, Some(65));
        peers.attach(2, 6, 8, Some(65));
        assert_eq!((peers.hear_from(5), peers.hear_signed(9)), (Some(1), Some(1)));
        assert_eq!((peers.slots[1].short_below, peers.slots[1].plain), (65, true));
        assert!(peers.take_down(1));
        assert!(!peers.take_down(1), "no news");
        assert_eq!((peers.slots[1].short_below, peers.slots[1].plain), (0, false));
        // Lookups must miss while the peer is down, whatever changes for other peers.
        for step in 0..3 {
            assert_eq!((peers.hear_from(5), peers.hear_signed(9)), (None, None), "step {step}");
            assert_eq!((peers.hear_from(6), peers.hear_signed(8)), (Some(2), Some(2)), "step {step}");
            assert_eq!((peers.hear_from(5), peers.hear_signed(9)), (None, None), "step {step}");
            assert!(peers.knows(9), "step {step}");
            match step {
                0 => peers.attach(3, 7, 7, Some(65)),
                _ => peers.detach(3),
            }
        }
        peers.detach(1);
        assert!(!peers.knows(9));
    }

    #[test]
    fn peers_that_come_fail_and_go_in_any_order_are_found_as_in_a_list() {
        for seed in 1..40u64 {
            let (mut random, mut peers) = (seed, Peers::new());
            let mut below = |bound: u64| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                (random >> 20) % bound
            };
            // Number, address and state of each peer. Few values, so that entries collide.
            let mut list: [Option<(u32, u64, bool)>; 24] = [None; 24];
            for step in 0..2000 {
                let (peer, number) = (below(24) as u16, below(1 << 10) as u32);
                let slot = &mut list[peer as usize];
                match *slot {
                    None if !peers.knows(number) => {
                        let addr = if below(8) == 0 { FI_ADDR_NOTAVAIL } else { 1000 + step };
                        peers.attach(peer, addr, number, None);
                        *slot = Some((number, addr, true));
                    }
                    Some(found) if below(3) == 0 => {
                        assert_eq!(peers.take_down(peer), found.2);
                        *slot = Some((found.0, found.1, false));
                    }
                    Some(_) => {
                        peers.detach(peer);
                        *slot = None;
                    }
                    None => {}
                }
                for (peer, slot) in (0..).zip(&list) {
                    let Some((number, addr, up)) = *slot else { continue };
                    assert!(peers.knows(number));
                    assert_eq!(peers.hear_signed(number), up.then_some(peer), "seed {seed}, step {step}");
                    let heard = (up && addr != FI_ADDR_NOTAVAIL).then_some(peer);
                    assert_eq!(peers.hear_from(addr), heard, "seed {seed}, step {step}");
                }
                let known = |number| list.iter().flatten().any(|one| one.0 == number);
                assert_eq!(peers.knows(number), known(number), "seed {seed}, step {step}");
            }
        }
    }

    #[test]
    fn a_new_peer_is_found_by_the_address_of_a_failed_one() {
        let mut peers = Peers::new();
        peers.attach(1, 5, 9, None);
        peers.take_down(1);
        peers.attach(2, 5, 8, None);
        assert_eq!(peers.hear_from(5), Some(2));
        peers.detach(1);
        assert_eq!(peers.hear_from(5), Some(2));
    }
}
