//! The layout of handles to endpoints, queues, peers and requests.
//!
//! | bits of a handle | endpoint, queue | address of a peer | request |
//! |---|---|---|---|
//! | 56..64 | kind | kind | the queue's number of the request, with |
//! | 52..56 | slot in the table | slot | these bits replaced: |
//! | 32..52 | generation of the slot | generation | 28..32: slot |
//! | 0..32 | 0 | the node's number of the peer | 20..28: low byte of the generation |
//!
//! The generation counts the uses of a slot, so a stale handle is recognized.

use fishplate::PeerId;

use crate::handle::{Ep, EpAddr, Mq};

const _: () = assert!(size_of::<usize>() == 8, "handles have 64 bits");

pub(crate) const SLOTS: usize = 16;

/// As in PSM2.
pub(crate) const REQUESTS: usize = 1 << 20;
const _: () = assert!(REQUESTS <= 1 << 20, "a request's number ends where the slot's begins");

pub(crate) const GENERATION: u32 = (1 << 20) - 1;

pub(crate) const EP: u64 = 0xe1;
pub(crate) const MQ: u64 = 0xe2;
pub(crate) const ADDRESS: u64 = 0xe3;

/// Bits 32 to 55 of a handle. Never 0 for an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Home(pub u32);

impl Home {
    /// The caller passes a `generation` other than 0.
    pub fn new(slot: usize, generation: u32) -> Home {
        Home((slot as u32) << 20 | generation)
    }

    fn handle<T>(self, kind: u64, low: u32) -> *mut T {
        let handle = u64::from(self.high(kind)) << 32 | u64::from(low);
        handle as usize as *mut T
    }

    /// Returns the upper half of a handle. One comparison checks all that it contains.
    #[inline(always)]
    pub fn high(self, kind: u64) -> u32 {
        (kind as u32) << 24 | self.0
    }

    #[inline(always)]
    pub fn split<T>(handle: *mut T, kind: u64) -> Option<(Home, u32)> {
        let bits = handle.addr() as u64;
        let home = Home((bits >> 32) as u32 & 0xff_ffff);
        (bits >> 56 == kind).then_some((home, bits as u32))
    }

    pub fn ep(self) -> *mut Ep {
        self.handle(EP, 0)
    }

    pub fn mq(self) -> *mut Mq {
        self.handle(MQ, 0)
    }

    pub fn address(self, peer: PeerId) -> *mut EpAddr {
        self.handle(ADDRESS, peer.to_raw())
    }

    /// The bits of this home in the handles of requests.
    pub fn mark(self) -> u64 {
        u64::from(self.0 >> 20 << 8 | self.0 & 0xff) << 20
    }
}
