//! Asks silent peers for which this side waits, because nothing else may reveal that they are gone.
//!
//! A rail may report a lost connection only with the completion of a post. If all posts to the peer
//! completed at once, as short messages do, there is none: the peer could end, and this side would
//! wait until its deadline. So this side *doubts* a peer that it waits for and that has sent
//! nothing for about a second. It requests an acknowledgement, and the rail looks closer if this
//! message is rejected ([`Rail::doubt`]).
//!
//! A request needs no answer. A peer that computes or is stopped gives none, and that proves
//! nothing. The interval between requests doubles until something arrives, so a stopped peer finds
//! few of them. A peer that has not answered yet gets its Hello again instead.

use crate::mem::{Peer, PeerId};
use crate::rail::Rail;

use super::{Engine, State};

/// Time between two looks at the peers, in nanoseconds or passes.
const LOOK: [u64; 2] = [1_000_000_000, 1 << 20];

/// Number of times that the interval between two requests doubles.
const DOUBLINGS: u8 = 5;

/// Maximum number of receives that a check examines, because their table may be long.
pub(super) const RECEIVES: u32 = 1024;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Doubts {
    /// When the peers were last looked at.
    looked: u64,
    /// The first receive to examine.
    pub(super) receive: u32,
    /// The peer that the current wait for a signal names.
    pub(super) signals: Option<PeerId>,
}

impl Doubts {
    pub(super) const NONE: Doubts = Doubts { looked: 0, receive: 0, signals: None };
}

/// The doubt about one peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Doubt {
    /// Whether this side waits for the peer, for another reason than an operation.
    pub(super) awaited: bool,
    /// Whether `heard` is valid: this side already waited for the peer at the last look.
    begun: bool,
    /// Number of requests, up to [`DOUBLINGS`], and of looks until the next one.
    asked: u8,
    wait: u8,
    /// What the rails counted at the last look.
    heard: u32,
}

impl Doubt {
    pub(super) const NONE: Doubt =
        Doubt { awaited: false, begun: false, asked: 0, wait: 0, heard: 0 };

    /// Returns whether to ask the peer now.
    fn look(&mut self, heard: u32) -> bool {
        if !self.begun || self.heard != heard {
            *self = Doubt { begun: true, heard, ..Doubt::NONE };
            return false;
        }
        if self.wait != 0 {
            self.wait -= 1;
            return false;
        }
        self.wait = (1 << self.asked) - 1;
        self.asked = (self.asked + 1).min(DOUBLINGS);
        true
    }
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Checks a peer like [`check_peers`](Self::check_peers), and counts as a wait for this peer.
    /// So calls in a row also detect that a silent peer is gone.
    #[cold]
    pub fn check_peer(&mut self, peer: PeerId) {
        self.state.awaits(peer);
        self.check_peers();
    }

    /// Asks peers for which this side waits. Called when the rails have checked their peers.
    pub(super) fn doubt_peers(&mut self) {
        let now = self.state.loads.now();
        let untimed = self.state.loads.untimed();
        if now.wrapping_sub(self.state.doubts.looked) < LOOK[untimed]
            || !self.state.examine_receives()
        {
            return;
        }
        self.state.doubts.looked = now;
        if let Some(peer) = self.state.doubts.signals {
            self.state.awaits(peer);
        }
        let mut asked = false;
        for peer in 0..self.state.reached as u16 {
            asked |= self.is_doubtful(peer) && self.ask_peer(peer);
        }
        if asked {
            self.flush();
        }
    }

    fn is_doubtful(&mut self, peer: u16) -> bool {
        let heard = match self.state.waits_for(peer) {
            true => self.heard_from(peer, false),
            false => None,
        };
        let doubt = &mut self.state.pairings[peer as usize].doubt;
        doubt.awaited = false;
        match heard {
            Some(heard) => doubt.look(heard),
            None => {
                *doubt = Doubt::NONE;
                false
            }
        }
    }

    fn heard_from(&mut self, peer: u16, asks: bool) -> Option<u32> {
        let rails = self.state.peers[peer as usize].rails;
        let reaching = self.rails.iter_mut().enumerate().filter(|(i, _)| rails >> i & 1 != 0);
        let heard = reaching.filter_map(|(_, rail)| rail.doubt(Peer(peer), asks));
        heard.reduce(u32::wrapping_add)
    }

    fn ask_peer(&mut self, peer: u16) -> bool {
        self.heard_from(peer, true);
        if self.state.is_meeting(peer) {
            self.state.meet_again(peer);
            return self.greet(peer);
        }
        let stream = self.state.stream_of(0, peer);
        let next = self.state.streams[stream as usize].next;
        self.post_ack(stream, Some(next))
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    /// Notes that this side waits for a peer, until the next look.
    #[cold]
    pub(super) fn awaits(&mut self, peer: PeerId) {
        let slot = self.peers.get(peer.index as usize);
        if slot.is_some_and(|slot| slot.generation == peer.generation && slot.state.is_up()) {
            self.awaits_slot(peer.index);
        }
    }

    #[cold]
    pub(super) fn awaits_slot(&mut self, peer: u16) {
        if (peer as usize) < self.reached {
            self.pairings[peer as usize].doubt.awaited = true;
        }
    }
}
