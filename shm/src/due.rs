//! A FIFO of peers to notify. After creation nothing blocks or allocates.

use fishplate_core::mem::Peer;

#[derive(Debug)]
pub(crate) struct Due {
    list: Vec<Peer>,
    /// One bit per peer: set if the peer is on the list.
    listed: Box<[u64]>,
}

impl Due {
    pub(crate) fn new(peers: usize) -> Self {
        let words = peers.div_ceil(64);
        Due { list: Vec::with_capacity(64 * words), listed: vec![0; words].into_boxed_slice() }
    }

    #[inline(always)]
    pub(crate) fn insert(&mut self, peer: Peer) {
        let Some(word) = self.listed.get_mut(usize::from(peer.0 / 64)) else { return };
        let bit = 1 << (peer.0 % 64);
        if *word & bit == 0 {
            *word |= bit;
            self.list.push(peer);
        }
    }

    pub(crate) fn remove(&mut self, peer: Peer) {
        if let Some(word) = self.listed.get_mut(usize::from(peer.0 / 64)) {
            *word &= !(1 << (peer.0 % 64));
            self.list.retain(|other| *other != peer);
        }
    }

    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    #[inline(always)]
    pub(crate) fn take_each(&mut self, mut each: impl FnMut(Peer)) {
        for peer in self.list.drain(..) {
            self.listed[usize::from(peer.0 / 64)] &= !(1 << (peer.0 % 64));
            each(peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_peer_is_taken_out_once_however_often_it_was_put_in() {
        let mut due = Due::new(130);
        let taken = |due: &mut Due| {
            let mut peers = Vec::new();
            due.take_each(|peer| peers.push(peer.0));
            peers
        };
        for peer in [129, 0, 63, 64, 0, 129, 5] {
            due.insert(Peer(peer));
        }
        due.remove(Peer(5));
        due.remove(Peer(7));
        assert_eq!(taken(&mut due), [129, 0, 63, 64]);
        assert_eq!(taken(&mut due), []);
        due.insert(Peer(64));
        assert_eq!(taken(&mut due), [64]);
        // Peer numbers out of range are ignored.
        due.insert(Peer(192));
        due.remove(Peer(u16::MAX));
        assert_eq!(taken(&mut due), []);
    }
}
