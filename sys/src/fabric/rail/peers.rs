//! The peers of a rail: their addresses, signatures and outstanding posts.

use alloc::vec;
use alloc::vec::Vec;
use core::mem::offset_of;

use static_assertions::const_assert_eq;

use super::names::{DOWN, Name, Names};
use crate::fabric::raw::FI_ADDR_NOTAVAIL;

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
    pub attached: bool,
    /// Whether the provider has ever rejected a post to the peer.
    pub refused: bool,
    /// Whether the engine doubts that the peer is still there.
    pub doubted: bool,
    /// Whether the peer is cut off: the endpoint was replaced, or the peer has closed its own
    /// endpoint. Nothing from the peer arrives then.
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
    /// Random 32-bit signature of the peer's rail. Writes carry it in the upper half of their data,
    /// and messages in their header.
    pub number: u32,
    /// [`heard`](Self::heard) at the last check that saw a change.
    pub marked: u32,
    /// Time of the last check that saw a change, in nanoseconds. 0 if nothing was outstanding.
    pub since: u64,
    /// The rail's poll count at the last check that saw a change.
    pub polls: u32,
}

const_assert_eq!(size_of::<PeerSlot>(), 64);

/// Number of messages that are posted with a completion, to a new peer and after a message whose
/// connection broke. Engines exchange fewer messages than this to connect, unless they repeat some
/// because the peer does not know them yet.
pub(super) const FIRST: u8 = 8;

const GONE: PeerSlot = PeerSlot {
    addr: 0,
    short_below: 0,
    plain: false,
    up: false,
    attached: false,
    refused: false,
    doubted: false,
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
    pub fn outstanding(&self) -> u32 {
        self.posted.wrapping_sub(self.ended)
    }

    pub fn accepted(&self) -> u32 {
        self.posted.wrapping_add(self.injected)
    }

    /// Returns a counter that changes with every sign of life of the peer.
    pub fn heard(&self) -> u32 {
        self.ended.wrapping_add(self.arrived)
    }

    pub fn is_refused(&self) -> bool {
        self.refused && self.refused_at == self.accepted()
    }
}

// `repr(C)` keeps this order, in which writes and arrivals use only the first `HOT` bytes.
#[repr(C)]
pub(super) struct Peers {
    /// The slots up to the highest peer that was ever attached, so that other peers take no memory.
    pub slots: Vec<PeerSlot>,
    /// Peers by signature.
    numbers: Names,
    /// Peers by `fi_addr_t`.
    addresses: Names,
    attached: usize,
}

impl Peers {
    pub const HOT: usize = offset_of!(Peers, numbers.last) + size_of::<Name>();

    pub fn new() -> Peers {
        Peers { slots: vec![], numbers: Names::new(0), addresses: Names::new(0), attached: 0 }
    }

    /// Attaches a peer, or changes the names of an attached one. If `short_below` is `None`, all
    /// writes take the general path.
    pub fn attach(&mut self, peer: u16, addr: u64, number: u32, short_below: Option<usize>) {
        let (short_below, plain) = (short_below.unwrap_or(0), short_below.is_some());
        if self.slots.len() <= peer as usize {
            self.slots.resize(peer as usize + 1, GONE);
        }
        let slot = PeerSlot { addr, short_below, plain, number, up: true, attached: true, ..GONE };
        if core::mem::replace(&mut self.slots[peer as usize], slot).attached {
            // The tables still have the earlier names of this peer.
            return self.rename();
        }
        self.attached += 1;
        if !(self.numbers.has_room() && self.addresses.has_room()) {
            return self.rename();
        }
        self.numbers.insert(number.into(), peer.into());
        self.addresses.insert(addr, peer.into());
    }

    pub fn knows(&self, number: u32) -> bool {
        self.numbers.has(number as u64)
    }

    #[inline(always)]
    pub fn hear_signed(&mut self, number: u32) -> Option<u16> {
        let peer = self.numbers.find(number as u64)?;
        self.count(peer);
        Some(peer)
    }

    #[inline(always)]
    pub fn hear_from(&mut self, addr: u64) -> Option<u16> {
        if addr == FI_ADDR_NOTAVAIL {
            return None;
        }
        let peer = self.addresses.find(addr)?;
        self.count(peer);
        Some(peer)
    }

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

    /// Marks a peer as failed: posts to it are rejected and lookups miss.
    pub fn take_down(&mut self, peer: u16) -> bool {
        let slot = &mut self.slots[peer as usize];
        if !slot.up {
            return false;
        }
        (slot.up, slot.first, slot.short_below, slot.plain) = (false, FIRST, 0, false);
        self.numbers.take_down(slot.number as u64, peer);
        self.addresses.take_down(slot.addr, peer);
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

    pub fn detach(&mut self, peer: u16) {
        let slot = core::mem::replace(&mut self.slots[peer as usize], GONE);
        if !slot.attached {
            return;
        }
        self.attached -= 1;
        if self.numbers.shared || self.addresses.shared {
            return self.rename();
        }
        self.numbers.remove(slot.number.into());
        self.addresses.remove(slot.addr);
    }

    fn rename(&mut self) {
        self.numbers.clear(self.attached);
        self.addresses.clear(self.attached);
        for (peer, slot) in self.slots.iter().enumerate().filter(|(_, slot)| slot.attached) {
            let peer = if slot.up { peer as u32 } else { DOWN };
            self.numbers.insert(slot.number.into(), peer);
            self.addresses.insert(slot.addr, peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{DOWN, Peers};
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
                assert_eq!(
                    (peers.hear_from(addr), peers.hear_signed(number)),
                    (Some(peer), Some(peer))
                );
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
            assert_eq!(
                (peers.hear_from(6), peers.hear_signed(8)),
                (Some(2), Some(2)),
                "step {step}"
            );
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
    fn names_are_found_in_any_order_of_attaching_and_detaching() {
        let mut peers = Peers::new();
        // Whether each peer is attached and up. Its names depend on how often it was attached.
        let mut lives = [(false, 0u32); 40];
        let names = |peer: u16, times: u32| {
            (u64::from(peer) + 50 * u64::from(times % 7), times * 41 + u32::from(peer))
        };
        let mut random = 1u64;
        for _ in 0..4000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let peer = (random >> 33) as u16 % 40;
            let (up, times) = &mut lives[usize::from(peer)];
            match (random >> 60, *up) {
                (0..8, true) => {
                    peers.detach(peer);
                    *up = false;
                }
                (8..10, true) => _ = peers.take_down(peer),
                // Attached again while it is attached, as a rail that returns does.
                _ => {
                    *times += 1;
                    let (addr, number) = names(peer, *times);
                    peers.attach(peer, addr, number, None);
                    *up = true;
                }
            }
            for (peer, (up, times)) in (0..).zip(lives) {
                let (addr, number) = names(peer, times);
                let heard = peers.slots.get(usize::from(peer)).is_some_and(|slot| slot.up);
                let expected = heard.then_some(peer);
                assert_eq!(
                    (peers.hear_from(addr), peers.hear_signed(number)),
                    (expected, expected)
                );
                assert_eq!(peers.knows(number), up);
            }
        }
    }

    /// Returns how often the names were written anew in these steps.
    fn rebuilds(
        peers: &mut Peers,
        steps: impl Iterator<Item = u16>,
        step: fn(&mut Peers, u16),
    ) -> u32 {
        let mut rebuilt = 0;
        for peer in steps {
            // A rebuild writes each name anew.
            let at = peers.numbers.place(0);
            peers.numbers.places[at].peer = DOWN;
            step(peers, peer);
            rebuilt += u32::from(peers.hear_signed(0).is_some());
        }
        rebuilt
    }

    #[test]
    fn peers_that_come_and_go_leave_the_names_of_others_alone_while_there_is_room() {
        let mut peers = Peers::new();
        let attach = |peers: &mut Peers, peer: u16| {
            peers.attach(peer, peer.into(), peer.into(), None);
        };
        attach(&mut peers, 0);
        let rebuilt = rebuilds(&mut peers, 1..1000, attach);
        assert_eq!(rebuilt, 9, "each time with twice the room");
        // The same peers, each time with another signature and another address.
        let rebuilt = rebuilds(&mut peers, (1..1000).cycle().take(10_000), |peers, peer| {
            let number = peers.slots[peer as usize].number + 1000;
            peers.detach(peer);
            peers.attach(peer, number.into(), number, None);
        });
        assert_eq!(rebuilt, 10);
        let rebuilt = rebuilds(&mut peers, 1..1000, |peers, peer| peers.detach(peer));
        assert_eq!(rebuilt, 0);
    }

    #[test]
    fn an_address_that_two_peers_share_stays_with_the_one_that_is_left() {
        let mut peers = Peers::new();
        peers.attach(1, 5, 1, None);
        peers.attach(2, 5, 2, None);
        assert_eq!(peers.hear_from(5), Some(2));
        peers.detach(2);
        assert_eq!((peers.hear_from(5), peers.hear_signed(1)), (Some(1), Some(1)));
    }
}
