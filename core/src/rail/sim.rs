//! A simulated fabric: several nodes and rails on one thread, driven by one seed. It reorders and
//! delays traffic as a real network may, and the same seed repeats a run exactly.
//!
//! Time is counted in polls. A write changes the target's memory when it arrives, not when it is
//! posted, so a signal that overtakes its data is detected. Nothing blocks or allocates. Operations
//! in flight are stored in borrowed [`Packet`]s, and a post is refused when no packet is free. Not
//! `Sync`: all endpoints of a [`Sim`] share one thread.
//!
//! Links of a rail can be [cut](Sim::cut), in one direction or both. Operations in flight are then
//! lost, or land late although their post has failed. They may land until the target
//! [fences](super::Rail::fence) the peer on this rail. Links [heal](Sim::heal), and both sides
//! attach each other again. A fence ends one link, or closes [the
//! endpoint](SimRail::with_closing_fence) with all of its links.

mod cut;
mod endpoint;
mod links;
pub mod schedule;
mod world;

pub use endpoint::{SimRail, SimSetup};
pub use world::Packet;

use core::cell::RefCell;

use super::random::Random;
use crate::error::AttachError;
#[cfg(doc)]
use crate::error::PeerError;
#[cfg(doc)]
use crate::rail::Sink;

use endpoint::PEERS;
use links::{Cuts, ENDPOINTS};
use world::{NONE, REGIONS, Registered, World};

/// The behaviour of one rail. Delays are counted in polls of any endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dials {
    /// Minimum delay from post to arrival, and from arrival to the completion at the origin.
    pub min_delay: u32,
    /// Maximum of both delays.
    pub max_delay: u32,
    /// Rate of posts that are refused with `Again`, per 1000.
    pub again: u16,
    /// Rate of polls that report nothing, per 1000.
    pub idle: u16,
    /// Whether posts to one peer arrive in posting order.
    pub ordered: bool,
    /// Bandwidth into one node, in bytes per poll of any endpoint. 0 is unlimited. The delays are
    /// added to the time of the transfer.
    pub rate: u32,
    /// Whether posts of up to 256 bytes to a detached peer still arrive. They have already
    /// completed as unknown.
    pub late: bool,
    /// Whether messages that land late on a cut link may arrive twice.
    pub repeats: bool,
}

impl Dials {
    /// Delivers everything at once and in order, and always has room.
    pub const CALM: Dials = Dials {
        min_delay: 0,
        max_delay: 0,
        again: 0,
        idle: 0,
        ordered: true,
        rate: 0,
        late: false,
        repeats: false,
    };

    /// With delays, out of order, sometimes full.
    pub const WILD: Dials =
        Dials { max_delay: 40, again: 50, idle: 100, ordered: false, ..Dials::CALM };
}

/// A simulated fabric, which its endpoints borrow.
pub struct Sim<'m> {
    world: RefCell<World<'m>>,
}

impl<'m> Sim<'m> {
    /// Creates a fabric of `nodes` nodes with `rails` rails each, at most 64 endpoints in all.
    /// `dials` sets the behaviour of all rails.
    ///
    /// # Errors
    /// [`AttachError::Config`] names the parameter that is out of range.
    pub fn new(
        packets: &'m mut [Packet],
        nodes: u16,
        rails: u16,
        dials: Dials,
        seed: u64,
    ) -> Result<Self, AttachError> {
        if nodes == 0 || rails == 0 || rails > 16 || nodes as usize * rails as usize > ENDPOINTS {
            return Err(AttachError::Config(
                "sim: rails must be 1 to 16, and nodes x rails 1 to 64",
            ));
        }
        if packets.is_empty() || packets.len() >= NONE as usize {
            return Err(AttachError::Config("sim: packets must have 1 to 65534 entries"));
        }
        let count = packets.len() as u16;
        for (i, packet) in packets.iter_mut().enumerate() {
            *packet = Packet {
                next: if i as u16 + 1 < count { i as u16 + 1 } else { NONE },
                ..Packet::EMPTY
            };
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
                addresses: [0; ENDPOINTS],
                nodes,
                rails,
                now: 0,
                random: Random::new(seed),
                trace: seed,
            }),
        })
    }

    /// Returns the endpoint of node `node` on rail `rail`.
    pub fn endpoint(&self, node: u16, rail: u16) -> SimRail<'_, 'm> {
        SimRail {
            sim: self,
            node,
            rail,
            own: node * self.world.borrow().rails + rail,
            peers: [NONE; PEERS],
            addresses: [0; PEERS],
            closes: false,
            told: 0,
            lost: 0,
            up_at: 0,
        }
    }

    /// Changes the behaviour of one rail.
    pub fn set_dials(&self, rail: u16, dials: Dials) {
        let world = &mut *self.world.borrow_mut();
        if let Some(slot) = world.dials.get_mut(rail as usize) {
            *slot = dials;
            // Reset the backlogs, because they are scaled by the old bandwidth.
            world
                .busy
                .iter_mut()
                .skip(rail as usize)
                .step_by(world.rails as usize)
                .for_each(|busy| *busy = 0);
        }
    }

    /// Kills a node as if its process had died. The fabric notifies its peers, and operations in
    /// flight to the node fail.
    pub fn kill(&self, node: u16) {
        self.world.borrow_mut().dead |= 1u64.unbounded_shl(node as u32);
    }

    /// Cuts a rail's link from node `from` to node `to`, in this direction only. Each operation
    /// that is in flight on the link, or posted later, has one of three fates. It is lost; it fails
    /// but still lands within `late` polls; or it completes successfully but is lost. A read needs
    /// both directions. Some polls later the rail reports the cut to `from` as [`PeerError::Lost`].
    ///
    /// # Errors
    /// [`AttachError::Config`] if there is no such node or rail.
    pub fn cut(&self, from: u16, to: u16, rail: u16, late: u32) -> Result<(), AttachError> {
        let world = &mut *self.world.borrow_mut();
        world.check_link(from, to, rail)?;
        world.cut(from, to, rail, late);
        Ok(())
    }

    /// Restores a link that was [cut](Self::cut). Attachments that the cut broke stay broken until
    /// both sides fence each other on the rail and attach each other again. The rail of `from`
    /// calls [`Sink::peer_up`] when that is possible.
    ///
    /// # Errors
    /// The errors of [`cut`](Self::cut).
    pub fn heal(&self, from: u16, to: u16, rail: u16) -> Result<(), AttachError> {
        let world = &mut *self.world.borrow_mut();
        world.check_link(from, to, rail)?;
        world.cuts.heal((from * world.rails + rail) as usize, to);
        Ok(())
    }

    /// [Cuts](Self::cut) all links of node `node` on a rail in both directions, as if its cable
    /// were pulled.
    ///
    /// # Errors
    /// The errors of [`cut`](Self::cut).
    pub fn unplug(&self, node: u16, rail: u16, late: u32) -> Result<(), AttachError> {
        let nodes = self.world.borrow().nodes;
        (0..nodes).try_for_each(|other| {
            self.cut(node, other, rail, late)?;
            self.cut(other, node, rail, late)
        })
    }

    /// [Heals](Self::heal) all links of node `node` on a rail.
    ///
    /// # Errors
    /// The errors of [`cut`](Self::cut).
    pub fn plug(&self, node: u16, rail: u16) -> Result<(), AttachError> {
        let nodes = self.world.borrow().nodes;
        (0..nodes).try_for_each(|other| {
            self.heal(node, other, rail)?;
            self.heal(other, node, rail)
        })
    }

    /// Returns the simulated time: the number of polls of all endpoints so far.
    pub fn now(&self) -> u64 {
        self.world.borrow().now
    }

    /// Returns a hash of all events so far. Runs with the same seed and the same calls have the
    /// same hash.
    pub fn trace(&self) -> u64 {
        self.world.borrow().trace
    }
}
