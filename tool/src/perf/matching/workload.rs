//! Prepares and runs the workloads P1 to P11, U1 to U6 and C1. A round leaves the engine in the
//! state that it found, so rounds can be repeated.
//!
//! The unit of work is a receive with its message: post, arrival, match, completion. A unit of U6
//! is a probe that finds nothing, and a matched probe with its receive. A unit of C1 is a post and
//! its cancellation.

use super::engine::{Engine, Wanted};

/// *D* is the depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// An exact receive behind *D* exact receives.
    P1,
    /// An exact receive behind *D* receives from any source.
    P2,
    /// An exact receive behind *D* receives of any tag, each from a different source.
    P3,
    /// An exact receive behind *D* receives of any source and tag, in another communicator.
    P4,
    /// A receive from any source behind *D* receives from any source.
    P5,
    /// *D* receives, then their messages in order.
    P6,
    /// *D* receives, then their messages in reverse.
    P7,
    /// *D* receives, then their messages in random order.
    P8,
    /// *D* equal receives, then their messages.
    P9,
    /// A receive behind *D* receives of the same tag from other sources. All of them ignore one bit
    /// of the tag.
    P10,
    /// A receive behind *D* receives that use 32 different masks.
    P11,
    /// *D* messages, then exact receives in reverse.
    U1,
    /// *D* messages, then receives from any source in reverse.
    U2,
    /// *D* messages, then receives of any tag in reverse.
    U3,
    /// *D* messages, each in its own communicator, then receives of any source and tag in reverse.
    U4,
    /// 16 receives with a new mask behind *D* messages.
    U5,
    /// *D* messages. For each, a probe that finds nothing, and a matched probe with its receive.
    U6,
    /// *D* receives cancelled from the oldest, from the youngest, and in random order.
    C1,
}

use Workload::*;

impl Workload {
    pub const ALL: [Workload; 18] =
        [P1, P2, P3, P4, P5, P6, P7, P8, P9, P10, P11, U1, U2, U3, U4, U5, U6, C1];

    /// Returns whether the depth counts messages rather than receives.
    pub fn is_unexpected(self) -> bool {
        matches!(self, U1 | U2 | U3 | U4 | U5 | U6)
    }

    /// Returns whether a round covers the whole depth, so that a depth of 0 has no units.
    pub fn drains(self) -> bool {
        matches!(self, P6 | P7 | P8 | P9 | U1 | U2 | U3 | U4 | U6 | C1)
    }

    pub fn units(self, depth: u32) -> u64 {
        match self {
            C1 => 3 * depth as u64,
            U5 => FRESH_MASK,
            _ if self.drains() => depth as u64,
            _ => ROUND,
        }
    }
}

/// Units per round of a workload with a background: *D* entries that no unit matches.
const ROUND: u64 = 64;
const FRESH_MASK: u64 = 16;
const MASKS: u64 = 32;
/// A source and a tag that no entry of the background matches.
const LIVE: u32 = 7;
const LIVE_TAG: u64 = 1 << 30;
/// The communicator is in the bits above the tag.
const COMMUNICATOR: u64 = 1 << 32;
const ANY_TAG: u64 = COMMUNICATOR - 1;
const PROTOCOL_BIT: u64 = 1 << 40;

pub const fn room(depth: u32) -> usize {
    depth as usize + 64
}

#[derive(Clone, Debug)]
pub struct Bench {
    workload: Workload,
    depth: u32,
    order: Vec<u32>,
    next_mask: u64,
}

impl Bench {
    /// Does not prepare the background.
    pub fn new(workload: Workload, depth: u32) -> Self {
        let mut order: Vec<u32> = (0..depth).collect();
        let mut random = 0x5eed_u64;
        for at in (1..order.len()).rev() {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            order.swap(at, ((random >> 33) % (at as u64 + 1)) as usize);
        }
        Bench { workload, depth, order, next_mask: 1 }
    }

    pub fn prepare(&self, engine: &mut impl Engine) {
        for n in 0..self.depth {
            let tag = n as u64;
            let background = match self.workload {
                P1 => Wanted::exact(n % 64 + 100, tag),
                P2 | P5 => Wanted::any_source(tag),
                P3 => Wanted { source: Some(n + 100), tag: 0, ignore: ANY_TAG },
                P4 => Wanted { source: None, tag: COMMUNICATOR, ignore: ANY_TAG },
                P10 => Wanted { source: Some(n + 100), tag: LIVE_TAG, ignore: PROTOCOL_BIT },
                P11 => Wanted { source: Some(LIVE), tag: tag << 6, ignore: tag % MASKS },
                U5 => {
                    engine.arrive(n % 64 + 100, tag, n);
                    continue;
                }
                _ => return,
            };
            engine.post(background, n);
        }
    }

    /// Runs one round. Calls `tick` after each call of the engine, or after each unit if there is a
    /// background.
    #[inline(always)]
    pub fn round(&mut self, engine: &mut impl Engine, mut tick: impl FnMut()) {
        let (depth, live) = (self.depth, self.depth);
        match self.workload {
            P1 | P2 | P3 | P4 => {
                for n in 0..ROUND as u32 {
                    engine.post(Wanted::exact(LIVE, LIVE_TAG), live);
                    engine.arrive(LIVE, LIVE_TAG, n);
                    tick();
                }
            }
            P5 => {
                for n in 0..ROUND as u32 {
                    engine.post(Wanted::any_source(LIVE_TAG), live);
                    engine.arrive(LIVE, LIVE_TAG, n);
                    tick();
                }
            }
            P6 | P7 | P8 => {
                for n in 0..depth {
                    engine.post(Wanted::exact(LIVE, n as u64), n);
                    tick();
                }
                for n in 0..depth {
                    let n = match self.workload {
                        P6 => n,
                        P7 => depth - 1 - n,
                        _ => self.order[n as usize],
                    };
                    engine.arrive(LIVE, n as u64, n);
                    tick();
                }
            }
            P9 => {
                for n in 0..depth {
                    engine.post(Wanted::exact(LIVE, LIVE_TAG), n);
                    tick();
                }
                for n in 0..depth {
                    engine.arrive(LIVE, LIVE_TAG, n);
                    tick();
                }
            }
            P10 => {
                for n in 0..ROUND as u32 {
                    let wanted = Wanted { source: Some(LIVE), tag: LIVE_TAG, ignore: PROTOCOL_BIT };
                    engine.post(wanted, live);
                    engine.arrive(LIVE, LIVE_TAG | PROTOCOL_BIT, n);
                    tick();
                }
            }
            P11 => {
                for n in 0..ROUND {
                    let wanted = Wanted { source: Some(LIVE), tag: LIVE_TAG, ignore: n % MASKS };
                    engine.post(wanted, live);
                    engine.arrive(LIVE, LIVE_TAG, n as u32);
                    tick();
                }
            }
            U1 | U2 | U3 | U4 => {
                for n in 0..depth {
                    let (source, tag) = match self.workload {
                        U3 => (n + 100, LIVE_TAG),
                        U4 => (LIVE, n as u64 * COMMUNICATOR / 16),
                        _ => (LIVE, n as u64),
                    };
                    engine.arrive(source, tag, n);
                    tick();
                }
                for n in (0..depth).rev() {
                    let wanted = match self.workload {
                        U1 => Wanted::exact(LIVE, n as u64),
                        U2 => Wanted::any_source(n as u64),
                        U3 => Wanted { source: Some(n + 100), tag: 0, ignore: ANY_TAG },
                        _ => Wanted {
                            source: None,
                            tag: n as u64 * COMMUNICATOR / 16,
                            ignore: COMMUNICATOR / 16 - 1,
                        },
                    };
                    engine.post(wanted, n);
                    tick();
                }
            }
            U5 => {
                // Cycles through 2^14 masks. They have only bits that are zero in every background
                // tag.
                let ignore = (self.next_mask & 0x3fff) << 17;
                self.next_mask += 1;
                for n in 0..FRESH_MASK as u32 {
                    engine.arrive(LIVE, LIVE_TAG | 1 << 31, n);
                    tick();
                    let wanted = Wanted { source: Some(LIVE), tag: LIVE_TAG | 1 << 31, ignore };
                    engine.post(wanted, live);
                    tick();
                }
            }
            U6 => {
                for n in 0..depth {
                    engine.arrive(LIVE, n as u64, n);
                    tick();
                }
                for n in (0..depth).rev() {
                    assert!(!engine.probe(Wanted::exact(LIVE, LIVE_TAG)), "a probe that must miss");
                    assert!(
                        engine.claim(Wanted::exact(LIVE, n as u64), n),
                        "a message that must be there"
                    );
                    tick();
                }
            }
            C1 => {
                for how in 0..3 {
                    for n in 0..depth {
                        engine.post(Wanted::exact(LIVE, n as u64), n);
                        tick();
                    }
                    for n in 0..depth {
                        let n = [n, depth - 1 - n, self.order[n as usize]][how];
                        assert!(engine.cancel(n), "a receive that must be there");
                        tick();
                    }
                }
            }
        }
    }
}
