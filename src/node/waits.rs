//! How a call waits: for room, or for what its caller asked for.

use std::time::Duration;

use fishplate_core::error::{OpError, WaitError};
use fishplate_core::sync::host::Host;

use super::home::{NodeEngine, NodeWaiter};
use super::{Driver, Error, Node, behind};

/// Makes progress while there is no room for the operation. Inlines the first attempt.
macro_rules! issue {
    ($node:expr, $engine:ident => $call:expr) => {
        match {
            let $engine = &mut $node.home.engine;
            $call
        } {
            Ok(issued) => Ok(issued),
            Err(error) => $node.issue_later(error, move |$engine| $call),
        }
    };
}
pub(super) use issue;

/// Length of the early part of a wait, in nanoseconds.
pub(super) const EARLY: u64 = 50_000_000;

const LOOK: u64 = 10_000_000;

pub(super) struct RoomWait {
    pub looked_ns: u64,
    pub deadline_ns: u64,
}

impl Node {
    /// Handles a refused operation: makes progress and retries until there is room. Completions of
    /// the node's own operations also make room.
    #[cold]
    #[inline(never)]
    pub(super) fn issue_later<T>(
        &mut self,
        mut error: OpError,
        mut issue: impl FnMut(&mut NodeEngine) -> Result<T, OpError>,
    ) -> Result<T, OpError> {
        behind!(self, |node| match issue(&mut node.home.engine) {
            Ok(issued) => Ok(issued),
            Err(error) => node.issue_later(error, issue),
        });
        let mut room =
            RoomWait { looked_ns: 0, deadline_ns: self.deadline_ns(self.builder.patience) };
        while error == OpError::Again {
            self.reap();
            match issue(&mut self.home.engine) {
                Ok(issued) => return Ok(issued),
                Err(other) => error = other,
            }
            if !self.waits_for(&mut room) {
                break;
            }
        }
        Err(error)
    }

    /// Changes [`Builder::patience`](super::Builder::patience).
    ///
    /// # Errors
    /// [`OpError::Abandoned`]: the worker has panicked.
    pub fn set_patience(&mut self, patience: Duration) -> Result<(), OpError> {
        behind!(self, |node| node.set_patience(patience));
        self.builder.patience = patience;
        Ok(())
    }

    /// At intervals, checks that peers are alive, because the slots of a failed peer become free.
    pub(super) fn waits_for(&mut self, room: &mut RoomWait) -> bool {
        let now_ns = self.home.host().now_ns();
        if now_ns >= room.deadline_ns {
            return false;
        }
        if now_ns.saturating_sub(room.looked_ns) >= LOOK {
            room.looked_ns = now_ns;
            self.home.engine.check_peers();
        }
        if self.progress() == 0 {
            self.home.host().yield_now();
        }
        true
    }

    #[inline(always)]
    pub(super) fn wait_with<T>(
        &mut self,
        timeout: Duration,
        mut wait: impl FnMut(&mut NodeEngine, &mut NodeWaiter, u64) -> Result<T, WaitError>,
    ) -> Result<T, Error> {
        let home = &mut *self.home;
        // The first attempt does not read the clock.
        match wait(&mut home.engine, &mut home.waiter, 0) {
            Ok(found) => Ok(found),
            Err(error) => self.wait_longer(error, timeout, wait),
        }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn wait_longer<T>(
        &mut self,
        error: WaitError,
        timeout: Duration,
        mut wait: impl FnMut(&mut NodeEngine, &mut NodeWaiter, u64) -> Result<T, WaitError>,
    ) -> Result<T, Error> {
        behind!(self, |node| node.wait_with(timeout, wait));
        let mut result = Err(error);
        if !matches!(result, Err(WaitError::Deadline(_))) {
            return Ok(result?);
        }
        if timeout.is_zero() {
            // A program may make all its progress by such calls, so they connect peers too.
            if self.peers.meeting | self.home.engine.has_call() {
                self.meet_now_and_then();
            }
            return Ok(result?);
        }
        let turns = match &self.driver {
            Driver::Turns(turns) => Some(turns.clone()),
            _ => None,
        };
        // While `_taken` is held, this call may sleep on the wait object, and the worker does not.
        let _taken = turns.as_ref().map(|turns| turns.take());
        let deadline_ns = self.deadline_ns(timeout);
        let late_ns = self.home.host().now_ns().saturating_add(EARLY);
        let mut until = 0;
        self.publish_counters();
        while matches!(result, Err(WaitError::Deadline(_)))
            && (until < deadline_ns
                || (self.home.engine.has_call() && self.home.host().now_ns() < deadline_ns))
        {
            self.meet();
            let early = until < late_ns;
            until = self.slice_ns(deadline_ns);
            let home = &mut *self.home;
            let waiter = if early { &mut home.waiter } else { &mut home.sleeper };
            result = wait(&mut home.engine, waiter, until);
            self.publish_counters();
        }
        Ok(result?)
    }
}
