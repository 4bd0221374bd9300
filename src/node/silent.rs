//! The peers on other hosts that are connected and not attached. Each takes a few bytes.

use std::sync::Arc;

use fishplate_core::engine::Joint;
use fishplate_core::engine::protocol::MatchLimits;
use fishplate_core::mem::PeerId;
use fishplate_sys::index::Index;

use super::RailPair;

/// What many peers have in common: how their rails are paired with ours, and their limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub pairs: Vec<RailPair>,
    pub joints: Vec<Joint>,
    pub limits: MatchLimits,
}

/// A table of peers and their kinds.
#[derive(Default)]
pub(super) struct Silent {
    /// By the number of the peer, up to the highest.
    slots: Vec<Slot>,
    ids: Index,
    /// The kinds and the numbers of their peers. The number of a kind counts from 1.
    kinds: Vec<(Arc<Kind>, usize)>,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    /// The node's id in two halves, so that the slot is aligned to 4.
    id: [u32; 2],
    generation: u16,
    /// The number of the kind, or 0 if this peer is not in the table.
    kind: u16,
}

static_assertions::const_assert_eq!(size_of::<Slot>(), 12);

impl Slot {
    fn id(&self) -> u64 {
        u64::from(self.id[0]) << 32 | u64::from(self.id[1])
    }

    fn peer(&self, number: u16) -> PeerId {
        PeerId::from_raw(u32::from(self.generation) << 16 | u32::from(number))
    }
}

impl Silent {
    /// Adds a peer, which is not in the table.
    pub fn add(&mut self, peer: PeerId, id: u64, kind: Kind) {
        let like = self.kinds.iter().position(|(known, _)| **known == kind);
        let unused = || self.kinds.iter().position(|(_, peers)| *peers == 0);
        // There are at most as many kinds as peers, so the number of a kind fits a slot.
        let at = match like.or_else(unused) {
            Some(at) => {
                if like.is_none() {
                    self.kinds[at].0 = Arc::new(kind);
                }
                at
            }
            None => {
                self.kinds.push((Arc::new(kind), 0));
                self.kinds.len() - 1
            }
        };
        self.kinds[at].1 += 1;
        let number = peer.peer().0;
        if self.slots.len() <= usize::from(number) {
            self.slots.resize(usize::from(number) + 1, Slot::default());
        }
        self.slots[usize::from(number)] = Slot {
            id: [(id >> 32) as u32, id as u32],
            generation: (peer.to_raw() >> 16) as u16,
            kind: at as u16 + 1,
        };
        let Silent { ids, slots, .. } = self;
        ids.insert(number, |number| slots[usize::from(number)].id());
    }

    fn slot(&self, peer: PeerId) -> Option<&Slot> {
        let number = peer.peer().0;
        let slot = self.slots.get(usize::from(number))?;
        (slot.kind != 0 && slot.peer(number) == peer).then_some(slot)
    }

    /// Removes a peer, and returns its id and its kind.
    pub fn take(&mut self, peer: PeerId) -> Option<(u64, Arc<Kind>)> {
        let Slot { kind, .. } = *self.slot(peer)?;
        let number = peer.peer().0;
        let Silent { ids, slots, kinds } = self;
        ids.remove(number, |number| slots[usize::from(number)].id());
        let slot = &mut slots[usize::from(number)];
        slot.kind = 0;
        let (kind, peers) = &mut kinds[usize::from(kind) - 1];
        *peers -= 1;
        Some((slot.id(), kind.clone()))
    }

    pub fn kind(&self, peer: PeerId) -> Option<&Kind> {
        let slot = self.slot(peer)?;
        Some(&self.kinds[usize::from(slot.kind) - 1].0)
    }

    pub fn has(&self, peer: PeerId) -> bool {
        self.slot(peer).is_some()
    }

    /// Returns the peer with this number.
    pub fn at(&self, number: u16) -> Option<PeerId> {
        let slot = self.slots.get(usize::from(number)).filter(|slot| slot.kind != 0)?;
        Some(slot.peer(number))
    }

    /// Returns the peer with this node id.
    pub fn named(&self, id: u64) -> Option<PeerId> {
        self.at(self.ids.find(id, |number| self.slots[usize::from(number)].id() == id)?)
    }

    pub fn len(&self) -> usize {
        self.ids.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fishplate_core::mem::RailId;

    #[test]
    fn peers_are_found_by_id_and_by_number_until_they_are_taken() {
        let kind = |mbit| Kind {
            pairs: vec![RailPair { ours: RailId(1), theirs: RailId(1), their_mbit: mbit }],
            joints: vec![],
            limits: MatchLimits { eager: 1, credits: 2, headers: 3 },
        };
        let peer = |n: u32| PeerId::from_raw((n % 3) << 16 | n);
        let id = |n: u32| u64::from(n).wrapping_mul(0x0123_4567_89ab_cdef);
        let mut silent = Silent::default();
        for n in 0..500 {
            silent.add(peer(n), id(n), kind(n % 5));
        }
        assert_eq!((silent.kinds.len(), silent.len()), (5, 500));
        for n in 0..500 {
            let stale = PeerId::from_raw(peer(n).to_raw() ^ 1 << 20);
            assert!(silent.has(peer(n)) && !silent.has(stale));
            assert_eq!((silent.at(n as u16), silent.named(id(n))), (Some(peer(n)), Some(peer(n))));
            assert!(silent.take(stale).is_none());
            let (own, taken) = silent.take(peer(n)).unwrap();
            assert_eq!((own, &*taken), (id(n), &kind(n % 5)));
            assert_eq!((silent.at(n as u16), silent.named(id(n))), (None, None));
        }
        // A kind that no peer has is replaced.
        silent.add(peer(1), 1, kind(9));
        assert_eq!((silent.kinds.len(), silent.kind(peer(1))), (5, Some(&kind(9))));
    }
}
