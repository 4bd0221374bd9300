//! The second node of an endpoint, which carries its active messages, and what has not ended there.
//! Nothing here blocks or calls a handler.

use std::collections::HashMap;

use fishplate::core::mem::Span;
use fishplate::core::psm::{Code, MqReq};
use fishplate::{Node, PeerId};

use crate::error::Error;

/// Most arguments of a message, and bytes of its payload.
pub(crate) const ARGS: usize = 8;
pub(crate) const PAYLOAD: usize = 4096;

/// Requests that may wait for room at once. As many requests of peers are answered meanwhile.
pub(crate) const SENDS: usize = 256;

/// What an endpoint has for active messages.
pub(crate) struct Am {
    pub node: Node,
    /// Addresses of functions and of their contexts.
    pub handlers: Vec<(usize, usize)>,
    /// Sends that have not ended, and their bytes.
    pub sends: Vec<(MqReq, Box<[u8]>)>,
    /// A claimed message whose bytes are not here yet.
    claimed: Option<(MqReq, Claimed)>,
    /// Whether a handler runs.
    pub busy: bool,
    /// Completion functions and their contexts by token, and who ends them.
    pub completions: HashMap<u64, (PeerId, usize, usize)>,
    pub last_token: u64,
}

/// A message that was claimed.
pub(crate) struct Claimed {
    pub from: PeerId,
    pub tag: [u32; 3],
    pub len: usize,
    pub bytes: Box<[u8]>,
}

impl Am {
    pub fn new(node: Node) -> Am {
        Am {
            node,
            handlers: vec![],
            sends: vec![],
            claimed: None,
            busy: false,
            completions: HashMap::new(),
            last_token: 0,
        }
    }

    /// Makes a pass, and returns the next message if it is here. One that breaks the rules is
    /// dropped.
    pub fn next(&mut self) -> Option<Claimed> {
        let mut queue = self.node.queue()?;
        queue.poll();
        self.sends.retain(|(req, _)| queue.test2(&mut Some(*req)) == Err(Code::NoCompletions));
        if self.busy || self.sends.len() >= SENDS {
            return None;
        }
        if self.claimed.is_none() {
            let (req, status) = queue.improbe2(None, [0; 3], [0; 3]).ok()?;
            let bytes = vec![0; PAYLOAD + 8 * (ARGS + 1)].into_boxed_slice();
            let (from, len) = (status.msg_peer?, status.msg_length as usize);
            self.claimed = Some((req, Claimed { from, tag: status.msg_tag, len, bytes }));
            let (_, claimed) = self.claimed.as_mut()?;
            // SAFETY: the bytes stay in their box, which is kept until the receive has ended.
            queue.imrecv(unsafe { span(&mut claimed.bytes) }, 0, req).ok()?;
        }
        let (req, _) = self.claimed.as_ref()?;
        match queue.test2(&mut Some(*req)) {
            Err(Code::NoCompletions) => None,
            ended => {
                let (_, claimed) = self.claimed.take()?;
                ended.is_ok_and(|status| status.error_code == Code::Ok).then_some(claimed)
            }
        }
    }

    /// Sends a message to a peer of the node.
    pub fn send(&mut self, to: PeerId, tag: [u32; 3], mut bytes: Box<[u8]>) -> Result<(), Error> {
        let mut queue = self.node.queue().ok_or(Error::INTERNAL)?;
        // SAFETY: the bytes stay in their box, which is kept until the send has ended.
        let req = queue.isend2(to, 0, tag, unsafe { span(&mut bytes) }, 0)?;
        if queue.test2(&mut Some(req)) == Err(Code::NoCompletions) {
            self.sends.push((req, bytes));
        }
        Ok(())
    }
}

/// # Safety
/// The bytes stay valid, and unused otherwise, until the request ends.
unsafe fn span(bytes: &mut [u8]) -> Span {
    // SAFETY: as this function requires; a slice is not null.
    unsafe { Span::new(std::ptr::NonNull::from(&mut *bytes).cast(), bytes.len()) }
}
