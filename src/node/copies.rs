//! The node's own memory for messages from and into slices, and the operations that use it.

use fishplate_core::engine::protocol::{Received, Request};
use fishplate_core::mem::PeerId;
use fishplate_core::op::{Completion, Outcome, Token};

use super::memory::Memory;
use super::waits::RoomWait;
use super::{Error, Node};

/// Maximum number of free copies that are cached for later messages, and the maximum size of a
/// cached copy in bytes.
const KEPT: usize = 16;
const KEPT_LEN: usize = 1 << 20;

/// A send with a copy that the receiver has not read yet, or an abandoned fetch.
pub(super) struct Operation {
    pub token: Token,
    /// The receiver of a send, and the copy.
    pub sends: Option<(PeerId, Memory)>,
}

/// The node's own operations, and its memory for messages from and into slices. The program does
/// not see the completions of these operations.
#[derive(Default)]
pub(super) struct Own {
    free: Vec<Memory>,
    pub operations: Vec<Operation>,
    /// Receives that the program abandoned after they had matched.
    pub receives: Vec<(Request, Memory)>,
}

impl Own {
    /// Takes over a fetch that the program no longer waits for.
    pub fn abandon(&mut self, token: Token) {
        self.operations.push(Operation { token, sends: None });
    }
}

impl Node {
    /// Returns memory of at least `len` bytes for a message from or into a slice. If no memory is
    /// free, makes progress until peers have read earlier copies.
    pub(super) fn copy_of(&mut self, len: usize) -> Result<Memory, Error> {
        let mut room =
            RoomWait { looked_ns: 0, deadline_ns: self.deadline_ns(self.builder.patience) };
        loop {
            self.reap();
            let fits = |(_, memory): &(usize, &Memory)| memory.len() >= len;
            let kept =
                self.own.free.iter().enumerate().filter(fits).min_by_key(|(_, kept)| kept.len());
            if let Some((at, _)) = kept {
                return Ok(self.own.free.swap_remove(at));
            }
            match self.alloc(len.next_power_of_two().max(4096)) {
                Err(Error::Full { .. }) => {}
                memory => return memory,
            }
            if self.own.operations.is_empty() || !self.waits_for(&mut room) {
                return Err(Error::Full {
                    limit: "locals",
                    value: self.builder.limits.locals.into(),
                });
            }
        }
    }

    pub(super) fn give_back(&mut self, copy: Memory) {
        match self.own.free.len() < KEPT && copy.len() <= KEPT_LEN {
            true => self.own.free.push(copy),
            false => self.drop_copy(copy),
        }
    }

    pub(super) fn drop_kept_copy(&mut self) -> bool {
        self.reap();
        let kept = self.own.free.pop();
        kept.map(|copy| self.drop_copy(copy)).is_some()
    }

    /// Frees a copy's memory. If a provider still holds the memory, the node keeps it allocated.
    fn drop_copy(&mut self, copy: Memory) {
        let _ = self.free(copy);
    }

    pub(super) fn reap(&mut self) {
        for at in (0..self.own.operations.len()).rev() {
            if let Ok(Some(end)) = self.home.engine.test(self.own.operations[at].token) {
                self.reap_operation(&end);
            }
        }
        for at in (0..self.own.receives.len()).rev() {
            if let Ok(Some(status)) = self.home.engine.test_recv(self.own.receives[at].0) {
                let (_, copy) = self.own.receives.swap_remove(at);
                self.received(copy, status.outcome);
            }
        }
    }

    pub(super) fn reap_operation(&mut self, end: &Completion) -> bool {
        let Some(at) = self.own.operations.iter().position(|own| own.token == end.token) else {
            return false;
        };
        match (self.own.operations.swap_remove(at).sends, end.outcome) {
            // A rail may still read the copy, so it is not reused.
            (Some((_, copy)), Outcome::Unknown(_)) => self.drop_copy(copy),
            (Some((_, copy)), _) => self.give_back(copy),
            (None, _) => {}
        }
        true
    }

    pub(super) fn received(&mut self, copy: Memory, outcome: Received) {
        match outcome {
            // A rail may still write the copy, so it is not reused.
            Received::Unknown(_) => self.drop_copy(copy),
            _ => self.give_back(copy),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::Fabric;
    use fishplate_core::error::{AttachError, PeerError};
    use fishplate_core::op::Fault;

    #[test]
    fn a_copy_that_something_may_still_access_serves_no_other_message() {
        let mut node = Node::builder().fabric(Fabric::Off).open().unwrap();
        let me = node.connect(node.address()).unwrap();
        let fault = Fault::Peer(PeerError::Lost);
        let gone = Err(AttachError::UnknownRegion.into());
        for (outcome, again) in [
            (Outcome::Done, true),
            (Outcome::Failed(fault), true),
            (Outcome::Unknown(fault), false),
        ] {
            let copy = node.copy_of(100_000).unwrap();
            let token = Token::from_raw(77);
            node.own.operations.push(Operation { token, sends: Some((me, copy)) });
            let end = Completion { token, tag: 0, outcome, value: 0, order: 0 };
            assert!(node.reap_operation(&end) && !node.reap_operation(&end));
            assert_eq!(node.own.free.pop(), again.then_some(copy), "{outcome:?}");
            assert!(again || node.segment(copy).map(drop) == gone);
        }
        for (outcome, again) in [
            (Received::Ok, true),
            (Received::Truncated, true),
            (Received::Failed(fault), true),
            (Received::Unknown(fault), false),
        ] {
            let copy = node.copy_of(100_000).unwrap();
            node.received(copy, outcome);
            assert_eq!(node.own.free.pop(), again.then_some(copy), "{outcome:?}");
            assert!(again || node.segment(copy).map(drop) == gone);
        }
    }
}
