//! Selects the peers that a pass polls, so that silent peers cost almost nothing. After creation
//! nothing here blocks or allocates.
//!
//! | peer | condition                                                  | polled by a pass   |
//! |------|------------------------------------------------------------|--------------------|
//! | hot  | it sent a record, or something was posted to its lane      | all of them        |
//! | cold | [`LOOKS`] polls of hot peers found nothing from it         | a 64th, at least 4 |
//!
//! So a record of a cold peer is found within 64 passes, and makes the peer hot. With up to four
//! cold peers, every pass polls all of them. So does a pass whose owner has announced a sleep,
//! because the owner must not sleep while a record waits. If the announcement is gone before the
//! owner sleeps, a peer has notified it, and the sleep ends at once.

use std::mem;

use fishplate_core::mem::Peer;

use crate::lane::Watch;
use crate::peer::Attached;

/// Polls of hot peers after which those that were silent become cold.
const LOOKS: u32 = 4096;

/// Passes within which all cold peers are polled.
const ROUND: usize = 64;

/// Fewest cold peers that each pass polls.
const LEAST: usize = 4;

/// Peers by number, as a rail stores them.
pub(crate) type Places = [Option<Box<Attached>>];

/// The attached peers that may have something to report, hot and cold, in no order.
#[derive(Debug)]
pub(crate) struct Roster {
    /// Every pass polls them.
    pub(crate) hot: Vec<Peer>,
    cold: Vec<Cold>,
    /// Where in `cold` the next pass begins.
    next: usize,
    /// Polls since the last check for peers that became cold.
    looks: u32,
}

/// A cold peer: what polling it needs.
#[derive(Debug)]
struct Cold {
    record: Watch,
    peer: Peer,
}

impl Roster {
    /// Creates a roster with room for `peers`.
    pub(crate) fn new(peers: usize) -> Self {
        Roster { hot: Vec::with_capacity(peers), cold: Vec::with_capacity(peers), next: 0, looks: 0 }
    }

    /// Adds a new peer, as [hot](Attached::hot).
    pub(crate) fn join(&mut self, peer: Peer) {
        self.hot.push(peer);
    }

    /// Removes a peer. Its lane may be unmapped afterwards.
    pub(crate) fn leave(&mut self, peer: Peer) {
        self.hot.retain(|other| *other != peer);
        self.cold.retain(|other| other.peer != peer);
    }

    #[inline(always)]
    pub(crate) fn has_cold(&self) -> bool {
        !self.cold.is_empty()
    }

    /// Makes a peer hot.
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

    /// Polls the cold peers whose turn it is, or `all`, and makes those hot that have sent a
    /// record.
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
            // SAFETY: the lane of an attached peer is mapped, and detached peers have left the
            // roster.
            match unsafe { cold.record.has_come() } {
                true => self.found(places),
                false => self.next += 1,
            }
        }
    }

    /// Makes the peer at `next` hot, because it has sent a record.
    #[cold]
    #[inline(never)]
    fn found(&mut self, places: &mut Places) {
        let Cold { peer, .. } = self.cold.swap_remove(self.next);
        if let Some(Some(attached)) = places.get_mut(usize::from(peer.0)) {
            (attached.hot, attached.heard) = (true, true);
            self.hot.push(peer);
        }
    }

    /// Counts a pass that has polled all hot peers.
    #[inline(always)]
    pub(crate) fn count(&mut self, places: &mut Places) {
        self.looks += self.hot.len() as u32;
        if self.looks >= LOOKS {
            self.cool(places);
        }
    }

    /// Makes those peers cold that were silent since the last call and have no work.
    #[cold]
    #[inline(never)]
    fn cool(&mut self, places: &mut Places) {
        self.looks = 0;
        self.hot.retain(|peer| {
            let Some(Some(attached)) = places.get_mut(usize::from(peer.0)) else { return false };
            attached.hot = mem::take(&mut attached.heard) || !attached.rests();
            // Nothing more is read of a peer that is down.
            if !attached.hot && attached.is_up() {
                self.cold.push(Cold { record: attached.input.watch(), peer: *peer });
            }
            attached.hot
        });
    }
}
