//! Which peers a pass looks at: a pass costs no look at each peer that is silent. Nothing here
//! blocks or allocates, once made.
//!
//! | peer | since                                                      | a pass looks at    |
//! |------|------------------------------------------------------------|--------------------|
//! | hot  | something came from it, or was posted to it through a lane | all of them        |
//! | cold | [`LOOKS`] looks at hot peers found nothing of it           | a 64th, at least 4 |
//!
//! So a cold peer that begins to talk is found within 64 passes, and is hot from then on. Of up to
//! four cold peers every pass looks at all. So does a pass whose owner has announced a sleep: what
//! nobody has looked at cannot be slept through. If the owner is about to sleep and the word says
//! awake, a peer has rung meanwhile and the sleep ends at once.

use std::mem;

use fishplate_core::mem::Peer;

use crate::lane::Watch;
use crate::peer::Attached;

/// Looks at hot peers after which those that were silent meanwhile are cold.
const LOOKS: u32 = 4096;

/// Passes in which all cold peers are looked at.
const ROUND: usize = 64;

/// Cold peers that each pass looks at, at least.
const LEAST: usize = 4;

/// Peers by place, as a rail keeps them.
pub(crate) type Places = [Option<Box<Attached>>];

/// The attached peers that may have something to report, hot and cold, in no order.
#[derive(Debug)]
pub(crate) struct Roster {
    /// Every pass looks at them.
    pub(crate) hot: Vec<Peer>,
    cold: Vec<Cold>,
    /// Where in `cold` the next pass begins.
    next: usize,
    /// Looks at hot peers since some may last have become cold.
    looks: u32,
}

/// A cold peer: what a look at it takes.
#[derive(Debug)]
struct Cold {
    record: Watch,
    peer: Peer,
}

impl Roster {
    /// With room for so many peers.
    pub(crate) fn new(peers: usize) -> Self {
        Roster { hot: Vec::with_capacity(peers), cold: Vec::with_capacity(peers), next: 0, looks: 0 }
    }

    /// Takes in a peer that was attached just now: [hot](Attached::hot).
    pub(crate) fn join(&mut self, peer: Peer) {
        self.hot.push(peer);
    }

    /// Forgets a peer. Its lane may be unmapped from here on.
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

    /// Looks at the cold peers whose turn it is, or at `all`, and makes those hot that have sent
    /// something.
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
            // SAFETY: an attached peer's lane is mapped, and one that is detached has left.
            match unsafe { cold.record.has_come() } {
                true => self.found(places),
                false => self.next += 1,
            }
        }
    }

    /// The peer at `next` has sent something.
    #[cold]
    #[inline(never)]
    fn found(&mut self, places: &mut Places) {
        let Cold { peer, .. } = self.cold.swap_remove(self.next);
        if let Some(Some(attached)) = places.get_mut(usize::from(peer.0)) {
            (attached.hot, attached.heard) = (true, true);
            self.hot.push(peer);
        }
    }

    /// Counts a pass that has looked at all hot peers.
    #[inline(always)]
    pub(crate) fn count(&mut self, places: &mut Places) {
        self.looks += self.hot.len() as u32;
        if self.looks >= LOOKS {
            self.cool(places);
        }
    }

    /// Makes the peers cold that had nothing to report since the last time, and have nothing to do.
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
