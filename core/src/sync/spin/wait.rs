//! The loop of a waiting thread: checks for work, spins, checks again and parks, until the
//! deadline.

use core::hint;

use super::{Idle, Step};
use crate::sync::{event::Park, host::Host};

/// The result of one check for work, or of one turn of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The awaited event has happened.
    Ready,
    /// The turn did some work, and the wait continues. Take another turn at once.
    Busy,
    /// There was nothing to do. New work will notify the eventcount.
    Nothing,
    /// There was nothing to do, but the awaited event may arrive without a notification. Do not
    /// sleep.
    Unnotified,
}

impl Turn {
    /// Returns [`Ready`](Turn::Ready) or [`Nothing`](Turn::Nothing).
    #[inline(always)]
    pub fn ready(is_ready: bool) -> Self {
        if is_ready { Self::Ready } else { Self::Nothing }
    }

    #[inline(always)]
    fn is_work(self) -> bool {
        matches!(self, Self::Ready | Self::Busy)
    }
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Waited {
    /// A turn returned [`Turn::Ready`].
    Ready,
    /// The deadline passed, and one more turn after it found nothing.
    Expired,
}

/// Number of busy turns between two checks of the deadline.
const BUSY_BATCH: u32 = 64;

/// Runs `turn` until it returns [`Turn::Ready`], or until `host.now_ns()` reaches `deadline_ns`.
/// `idle` determines how the thread waits between turns.
///
/// This thread sleeps on `event`: an [`EventCount`](super::EventCount), or two of them. Every turn
/// may do work, including the turn between the announcement and the sleep. A result of
/// [`Turn::Ready`] is never lost. `turn` runs at least once. An expired deadline is noticed within
/// a few microseconds. `u64::MAX` means no deadline.
#[inline]
pub fn wait_until<H: Host + ?Sized, P: Park + ?Sized>(
    host: &H,
    idle: &mut Idle,
    event: &P,
    deadline_ns: u64,
    mut turn: impl FnMut() -> Turn,
) -> Waited {
    let mut busy = 0u32;
    let mut found = turn();
    loop {
        let step = match found {
            Turn::Ready => {
                idle.found();
                return Waited::Ready;
            }
            Turn::Busy => {
                idle.found();
                busy = busy.wrapping_add(1);
                if busy.is_multiple_of(BUSY_BATCH) && host.now_ns() >= deadline_ns {
                    return Waited::Expired;
                }
                found = turn();
                continue;
            }
            Turn::Nothing => idle.step(host),
            Turn::Unnotified => idle.step_awake(host),
        };
        if idle.seen_ns() >= deadline_ns {
            return Waited::Expired;
        }
        found = match step {
            Step::Pause => {
                hint::spin_loop();
                turn()
            }
            Step::Yield => {
                host.yield_now();
                turn()
            }
            Step::Park => {
                let timeout_ns = (deadline_ns - idle.seen_ns()).min(idle.policy().park_ns);
                let mut last_look = Turn::Nothing;
                let look = || {
                    last_look = turn();
                    last_look != Turn::Nothing
                };
                match event.park(host, timeout_ns, look) {
                    None => last_look,
                    Some(woken) => {
                        let found = turn();
                        idle.woke(woken, found.is_work());
                        found
                    }
                }
            }
        };
    }
}
