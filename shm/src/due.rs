//! Peers that are to be rung: a bit each. Nothing here blocks or allocates.

use fishplate_core::mem::Peer;

/// A set of peers.
#[derive(Debug)]
pub(crate) struct Due {
    words: Box<[u64]>,
}

impl Due {
    /// With room for so many peers.
    pub(crate) fn new(peers: usize) -> Self {
        Due { words: vec![0; peers.div_ceil(64)].into_boxed_slice() }
    }

    #[inline(always)]
    pub(crate) fn insert(&mut self, peer: Peer) {
        if let Some(word) = self.words.get_mut(usize::from(peer.0 / 64)) {
            *word |= 1 << (peer.0 % 64);
        }
    }

    pub(crate) fn remove(&mut self, peer: Peer) {
        if let Some(word) = self.words.get_mut(usize::from(peer.0 / 64)) {
            *word &= !(1 << (peer.0 % 64));
        }
    }

    /// Takes each out, lowest first.
    #[inline(always)]
    pub(crate) fn take_each(&mut self, mut each: impl FnMut(Peer)) {
        for (i, word) in self.words.iter_mut().enumerate() {
            let mut left = *word;
            if left == 0 {
                continue;
            }
            *word = 0;
            while left != 0 {
                each(Peer(i as u16 * 64 + left.trailing_zeros() as u16));
                left &= left - 1;
            }
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
        assert_eq!(taken(&mut due), [0, 63, 64, 129]);
        assert_eq!(taken(&mut due), []);
        // No such peer, no such bit.
        due.insert(Peer(192));
        due.remove(Peer(u16::MAX));
        assert_eq!(taken(&mut due), []);
    }
}
