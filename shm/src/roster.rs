//! Selects the peers that a pass polls, so that silent peers cost almost nothing. Nothing here
//! blocks or allocates after creation.
//!
//! | peer | condition                                                  | polled by a pass   |
//! |------|------------------------------------------------------------|--------------------|
//! | hot  | sent a record recently, or has a recent post to its lane   | all hot peers      |
//! | cold | silent while hot peers were polled [`LOOKS`] times         | a 64th, at least 4 |
//!
//! So a record of a cold peer is found within 64 passes, and makes the peer hot. If there are at
//! most four cold peers, every pass polls them all. After the owner has announced a sleep, a pass
//! polls all cold peers, because the owner must not sleep while a record waits. If a peer notifies
//! the owner after the announcement, the announcement is withdrawn, and the sleep ends immediately.

use std::mem;

use fishplate_core::mem::Peer;

use crate::lane::Watch;
use crate::peer::Attached;

/// Polls of hot peers between two checks for cold peers.
const LOOKS: u32 = 4096;

/// Number of passes that together poll each cold peer once.
const ROUND: usize = 64;

/// Minimum number of cold peers that each pass polls.
const LEAST: usize = 4;

pub(crate) type Places = [Option<Box<Attached>>];

/// Both lists are unordered.
#[derive(Debug)]
pub(crate) struct Roster {
    pub(crate) hot: Vec<Peer>,
    cold: Vec<Cold>,
    /// The index in `cold` where the next pass begins.
    next: usize,
    /// Polls since the last check for cold peers.
    looks: u32,
}

#[derive(Debug)]
struct Cold {
    record: Watch,
    peer: Peer,
}

impl Roster {
    pub(crate) fn new(peers: usize) -> Self {
        Roster {
            hot: Vec::with_capacity(peers),
            cold: Vec::with_capacity(peers),
            next: 0,
            looks: 0,
        }
    }

    pub(crate) fn join(&mut self, peer: Peer) {
        self.hot.push(peer);
    }

    /// Removes a peer. The caller may then unmap the peer's lane.
    pub(crate) fn leave(&mut self, peer: Peer) {
        self.hot.retain(|other| *other != peer);
        self.cold.retain(|other| other.peer != peer);
    }

    #[inline(always)]
    pub(crate) fn has_cold(&self) -> bool {
        !self.cold.is_empty()
    }

    #[inline(always)]
    pub(crate) fn warm(&mut self, attached: &mut Attached, peer: Peer) {
        if !attached.hot {
            self.warm_up(attached, peer);
        }
    }

    #[cold]
    #[inline(never)]
    fn warm_up(&mut self, attached: &mut Attached, peer: Peer) {
        self.cold.retain(|other| other.peer != peer);
        (attached.hot, attached.heard) = (true, true);
        self.hot.push(peer);
    }

    /// Polls the next cold peers in turn, or all if `all` is true. Peers that sent a record become
    /// hot.
    #[inline]
    pub(crate) fn look(&mut self, places: &mut Places, all: bool) {
        let len = self.cold.len();
        let mut looks = len.div_ceil(ROUND).max(LEAST).min(len);
        if all {
            (self.next, looks) = (0, len);
        }
        for _ in 0..looks {
            if self.next >= self.cold.len() {
                self.next = 0;
            }
            let Some(cold) = self.cold.get(self.next) else { return };
            // SAFETY: an attached peer's lane is mapped, and `leave` removes a peer before its lane
            // is unmapped.
            match unsafe { cold.record.has_come() } {
                true => self.found(places),
                false => self.next += 1,
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn found(&mut self, places: &mut Places) {
        let Cold { peer, .. } = self.cold.swap_remove(self.next);
        if let Some(Some(attached)) = places.get_mut(usize::from(peer.0)) {
            (attached.hot, attached.heard) = (true, true);
            self.hot.push(peer);
        }
    }

    /// Counts a pass that polled all hot peers.
    #[inline(always)]
    pub(crate) fn count(&mut self, places: &mut Places) {
        self.looks += self.hot.len() as u32;
        if self.looks >= LOOKS {
            self.cool(places);
        }
    }

    /// Makes each hot peer cold if it sent nothing since the last call and has no work left.
    #[cold]
    #[inline(never)]
    fn cool(&mut self, places: &mut Places) {
        self.looks = 0;
        self.hot.retain(|peer| {
            let Some(Some(attached)) = places.get_mut(usize::from(peer.0)) else { return false };
            attached.hot = mem::take(&mut attached.heard) || !attached.rests();
            // A failed peer joins neither list, because its lane is not read again.
            if !attached.hot && attached.is_up() {
                self.cold.push(Cold { record: attached.input.watch(), peer: *peer });
            }
            attached.hot
        });
    }
}
