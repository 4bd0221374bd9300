//! A simulated fabric: several nodes, several rails, one thread, one seed. Anything that a real
//! network may do to order and timing happens here, and the same seed does it again.
//!
//! Time is counted in polls. A write's bytes are copied when it arrives, not when it is posted, so
//! a signal that overtakes its data is seen for what it is. Nothing blocks or allocates: what is in
//! flight lies in borrowed [`Packet`]s, and when they are used up a post is refused. Not `Sync`:
//! all endpoints of a [`Sim`] live on one thread.
//!
//! Links of a rail can be [cut](Sim::cut), one way or both. What was under way is lost, or lands
//! although its post ends in an error, soon or long after, until the target
//! [fences](super::Rail::fence) the rail.
//!
//! `world` has what all endpoints share, `endpoint` posts and polls, `cut` is what becomes of a
//! link that is cut and how it is fenced.

mod cut;
mod endpoint;
mod links;
mod world;

pub use endpoint::{SimRail, SimSetup};
pub use world::Packet;

use core::cell::RefCell;

use super::random::Random;
use crate::error::AttachError;
#[cfg(doc)]
use crate::error::PeerError;

use endpoint::PEERS;
use links::{Cuts, ENDPOINTS};
use world::{NONE, REGIONS, Registered, World};

/// How one rail treats what is posted on it. Delays are in polls of any endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dials {
    /// The shortest time from post to arrival, and from arrival to its report at the origin.
    pub min_delay: u32,
    /// The longest.
    pub max_delay: u32,
    /// Of 1000 posts, how many are refused with `Again`.
    pub again: u16,
    /// Of 1000 polls, how many report nothing.
    pub idle: u16,
    /// Whether what is posted to one peer arrives in the order posted.
    pub ordered: bool,
    /// Bytes that reach one node per poll of any endpoint, one post after the other; 0: as many as
    /// there are. The delay comes on top.
    pub rate: u32,
    /// What was posted to a peer still arrives after that is detached, up to 256 bytes of it. Its
    /// post has ended as unknown by then.
    pub late: bool,
}

impl Dials {
    /// Prompt, in order, never full.
    pub const CALM: Dials =
        Dials { min_delay: 0, max_delay: 0, again: 0, idle: 0, ordered: true, rate: 0, late: false };

    /// Late, out of order, now and then full.
    pub const WILD: Dials =
        Dials { min_delay: 0, max_delay: 40, again: 50, idle: 100, ordered: false, rate: 0, late: false };
}

/// The fabric. Endpoints borrow it.
pub struct Sim<'m> {
    world: RefCell<World<'m>>,
}

impl<'m> Sim<'m> {
    /// A fabric of `nodes` nodes with `rails` rails each, at most 64 in all,
    /// which behave as `dials` says.
    ///
    /// # Errors
    /// [`AttachError::Config`] names what is out of range.
    pub fn new(
        packets: &'m mut [Packet],
        nodes: u16,
        rails: u16,
        dials: Dials,
        seed: u64,
    ) -> Result<Self, AttachError> {
        if nodes == 0 || rails == 0 || rails > 16 || nodes as usize * rails as usize > ENDPOINTS {
            return Err(AttachError::Config("sim: 1 to 16 rails, nodes x rails at most 64"));
        }
        if packets.is_empty() || packets.len() >= NONE as usize {
            return Err(AttachError::Config("sim: 1 to 65534 packets"));
        }
        let count = packets.len() as u16;
        for (i, packet) in packets.iter_mut().enumerate() {
            *packet =
                Packet { next: if i as u16 + 1 < count { i as u16 + 1 } else { NONE }, ..Packet::EMPTY };
        }
        Ok(Sim {
            world: RefCell::new(World {
                packets,
                free: 0,
                heads: [NONE; ENDPOINTS],
                regions: [Registered { memory: None, uses: 0 }; REGIONS],
                dials: [dials; 16],
                busy: [0; ENDPOINTS],
                dead: 0,
                cuts: Cuts::NONE,
                rails,
                now: 0,
                random: Random::new(seed),
                trace: seed,
            }),
        })
    }

    /// Node `node`'s end of rail `rail`.
    pub fn endpoint(&self, node: u16, rail: u16) -> SimRail<'_, 'm> {
        SimRail { sim: self, node, rail, peers: [NONE; PEERS], told: 0 }
    }

    /// Changes how one rail behaves.
    pub fn set_dials(&self, rail: u16, dials: Dials) {
        let world = &mut *self.world.borrow_mut();
        if let Some(slot) = world.dials.get_mut(rail as usize) {
            *slot = dials;
            // It is told in polls of the rate from before.
            world
                .busy
                .iter_mut()
                .skip(rail as usize)
                .step_by(world.rails as usize)
                .for_each(|busy| *busy = 0);
        }
    }

    /// Ends a node as if its process had died: its peers are notified, and operations in flight to
    /// it fail.
    pub fn kill(&self, node: u16) {
        self.world.borrow_mut().dead |= 1u64.unbounded_shl(node as u32);
    }

    /// Cuts a rail's link from node `from` to node `to`, one way, for good. Each operation in
    /// flight on it, or posted later, is lost, or still lands within `late` polls although its post
    /// has ended in an error, or is lost although its post has ended well. A read crosses both
    /// links. The rail tells `from` of it some polls later, as [`PeerError::Lost`].
    ///
    /// # Errors
    /// [`AttachError::Config`]: there is no such node or rail.
    pub fn cut(&self, from: u16, to: u16, rail: u16, late: u32) -> Result<(), AttachError> {
        let world = &mut *self.world.borrow_mut();
        let node = |node: u16| (node as usize + 1) * world.rails as usize <= ENDPOINTS;
        if rail >= world.rails || !node(from) || !node(to) {
            return Err(AttachError::Config("sim: no such link"));
        }
        world.cut(from, to, rail, late);
        Ok(())
    }

    /// Polls of any endpoint so far: the time.
    pub fn now(&self) -> u64 {
        self.world.borrow().now
    }

    /// A number that stands for everything that has happened: equal for equal seeds and equal use.
    pub fn trace(&self) -> u64 {
        self.world.borrow().trace
    }
}
