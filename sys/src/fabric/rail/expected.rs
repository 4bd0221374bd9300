//! Peers that are known and not attached yet. Each takes a few bytes: its signature, and those
//! bytes of its address that are not equal in all known addresses.
//!
//! A peer *calls* when something with its signature arrives before it is attached. The arrival
//! itself is dropped, and the owner of the rail attaches the peer. Each entry records the call of
//! its own peer, so no call is lost if many peers call at once.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use crate::index::Index;

/// The states of an entry.
const ABSENT: u8 = 0;
const SILENT: u8 = 1;
const CALLED: u8 = 2;

/// Length of an entry's state and signature, in bytes.
const HEAD: usize = 5;

/// Length of the length at the start of an address, in bytes.
const LEN: usize = 2;

#[derive(Default)]
pub(super) struct Expected {
    /// The entries of all peers up to the highest, each with the state, the signature, and the
    /// bytes of the address at the positions of `varies`.
    entries: Vec<u8>,
    /// An address with its length before it. All others are equal to it, except at the positions
    /// of `varies`. Shorter addresses end with zeros.
    base: Vec<u8>,
    varies: Vec<u16>,
    index: Index,
    /// Peers that have called, in order. Entries of peers that were removed since are skipped.
    callers: VecDeque<u16>,
}

impl Expected {
    /// Adds a peer that is absent, with a signature that no other peer has.
    pub fn add(&mut self, peer: u16, number: u32, provider: &[u8]) {
        let mut address = Vec::with_capacity(LEN + provider.len());
        address.extend_from_slice(&(provider.len() as u16).to_le_bytes());
        address.extend_from_slice(provider);
        if self.index.is_empty() {
            // No address is left, so any can be the base.
            (self.base, self.varies) = (address.clone(), vec![]);
            self.entries.clear();
        }
        let len = address.len().max(self.base.len());
        self.base.resize(len, 0);
        address.resize(len, 0);
        let differs = |at: &usize| self.base[*at] != address[*at];
        let fresh: Vec<u16> = (0..len)
            .filter(differs)
            .map(|at| at as u16)
            .filter(|at| !self.varies.contains(at))
            .collect();
        if !fresh.is_empty() {
            self.widen(&fresh);
        }
        let stride = self.stride();
        if self.entries.len() < (usize::from(peer) + 1) * stride {
            self.entries.resize((usize::from(peer) + 1) * stride, 0);
        }
        let at = usize::from(peer) * stride;
        let entry = &mut self.entries[at..at + stride];
        entry[0] = SILENT;
        entry[1..HEAD].copy_from_slice(&number.to_le_bytes());
        for (to, &from) in entry[HEAD..].iter_mut().zip(&self.varies) {
            *to = address[usize::from(from)];
        }
        let Expected { index, entries, .. } = self;
        index.insert(peer, |peer| hash(entries, stride, peer));
    }

    /// Adds positions at which addresses differ from the base.
    fn widen(&mut self, fresh: &[u16]) {
        let (before, after) = (self.stride(), self.stride() + fresh.len());
        let mut entries = vec![0; self.entries.len() / before * after];
        for (old, new) in self.entries.chunks(before).zip(entries.chunks_mut(after)) {
            if old[0] == ABSENT {
                continue;
            }
            new[..before].copy_from_slice(old);
            for (to, &from) in new[before..].iter_mut().zip(fresh) {
                *to = self.base[usize::from(from)];
            }
        }
        self.entries = entries;
        self.varies.extend_from_slice(fresh);
    }

    fn stride(&self) -> usize {
        HEAD + self.varies.len()
    }

    fn entry(&self, peer: u16) -> Option<&[u8]> {
        let stride = self.stride();
        let entry = self.entries.get(usize::from(peer) * stride..)?.get(..stride)?;
        (entry[0] != ABSENT).then_some(entry)
    }

    /// Removes a peer, and returns its signature and its address.
    pub fn take(&mut self, peer: u16) -> Option<(u32, Vec<u8>)> {
        let entry = self.entry(peer)?;
        let number = number_of(entry);
        let mut address = self.base.clone();
        for (&from, &at) in entry[HEAD..].iter().zip(&self.varies) {
            address[usize::from(at)] = from;
        }
        let len = usize::from(u16::from_le_bytes([address[0], address[1]]));
        address.truncate(LEN + len);
        address.drain(..LEN);
        let stride = self.stride();
        let Expected { index, entries, .. } = self;
        index.remove(peer, |peer| hash(entries, stride, peer));
        self.entries[usize::from(peer) * stride] = ABSENT;
        Some((number, address))
    }

    pub fn has(&self, peer: u16) -> bool {
        self.entry(peer).is_some()
    }

    fn find(&self, number: u32) -> Option<u16> {
        let is = |peer| self.entry(peer).is_some_and(|entry| number_of(entry) == number);
        self.index.find(number.into(), is)
    }

    pub fn knows(&self, number: u32) -> bool {
        self.find(number).is_some()
    }

    /// Records that something with this signature has arrived. Returns whether a peer with this
    /// signature is expected.
    #[cold]
    pub fn call(&mut self, number: u32) -> bool {
        let Some(peer) = self.find(number) else { return false };
        let at = usize::from(peer) * self.stride();
        if self.entries[at] == SILENT {
            self.entries[at] = CALLED;
            self.callers.push_back(peer);
        }
        true
    }

    /// Returns the next peer that has called. It stays expected.
    pub fn next_caller(&mut self) -> Option<u16> {
        loop {
            let peer = self.callers.pop_front()?;
            if self.entry(peer).is_some_and(|entry| entry[0] == CALLED) {
                let at = usize::from(peer) * self.stride();
                self.entries[at] = SILENT;
                return Some(peer);
            }
        }
    }

    pub fn bytes(&self) -> usize {
        self.entries.capacity()
    }
}

fn number_of(entry: &[u8]) -> u32 {
    u32::from_le_bytes([entry[1], entry[2], entry[3], entry[4]])
}

fn hash(entries: &[u8], stride: usize, peer: u16) -> u64 {
    number_of(&entries[usize::from(peer) * stride..]).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(n: u16) -> Vec<u8> {
        let mut address = vec![2, 0, 0, 0, 10, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        address[2..4].copy_from_slice(&n.wrapping_mul(7).to_be_bytes());
        address[6] = n as u8 / 16;
        address
    }

    #[test]
    fn addresses_come_back_whatever_was_added_after_them() {
        let mut expected = Expected::default();
        for n in (0..300).rev() {
            expected.add(n, u32::from(n) << 20, &address(n));
        }
        // Differ in length, and at positions that were equal in all others.
        expected.add(300, 7, b"fi_shm://1:2\0");
        expected.add(301, 8, &[9; 32]);
        let stride = expected.stride();
        for n in 0..300 {
            assert!(expected.has(n) && expected.knows(u32::from(n) << 20), "{n}");
            assert_eq!(expected.take(n), Some((u32::from(n) << 20, address(n))));
            assert_eq!((expected.take(n), expected.knows(u32::from(n) << 20)), (None, false));
        }
        assert_eq!(expected.take(300), Some((7, b"fi_shm://1:2\0".to_vec())));
        assert_eq!(expected.take(301), Some((8, vec![9; 32])));
        // Begins anew.
        expected.add(1, 1, &address(1));
        assert!(expected.stride() < stride);
        assert_eq!(expected.take(1), Some((1, address(1))));
    }

    #[test]
    fn a_peer_of_tcp_takes_few_bytes() {
        let mut expected = Expected::default();
        for n in 0..3000 {
            expected.add(n, u32::from(n) << 16, &address(n));
        }
        assert!(expected.stride() <= HEAD + 3, "{}", expected.stride());
    }

    #[test]
    fn each_caller_is_named_once_however_often_it_calls() {
        let mut expected = Expected::default();
        for n in 0..1000 {
            expected.add(n, u32::from(n), &address(n));
        }
        for _ in 0..3 {
            for n in 0..1000 {
                assert!(expected.call(n));
            }
            assert!(!expected.call(1000), "a stranger");
        }
        // A peer that is gone does not call, even if it is added again.
        expected.take(0);
        expected.take(1);
        expected.add(1, 1, &address(1));
        let callers: Vec<u16> = core::iter::from_fn(|| expected.next_caller()).collect();
        assert_eq!(callers, (2..1000).collect::<Vec<u16>>());
        assert!(expected.call(1) && expected.call(2));
        assert_eq!([expected.next_caller(), expected.next_caller()], [Some(1), Some(2)]);
        assert_eq!(expected.next_caller(), None);
    }
}
