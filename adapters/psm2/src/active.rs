//! The second node of an endpoint, which carries active messages, and the active messages in
//! flight. Nothing here blocks or calls a handler.

use std::collections::HashMap;

use fishplate::core::mem::Span;
use fishplate::core::psm::{Code, MqReq};
use fishplate::{Node, PeerId};

use crate::error::Error;

/// Maximum number of arguments, and maximum payload in bytes, of an active message.
pub(crate) const ARGS: usize = 8;
pub(crate) const PAYLOAD: usize = 4096;

/// Maximum number of sends that wait for room. Above it, the endpoint reads no further messages.
pub(crate) const SENDS: usize = 256;

/// State of an endpoint's active messages.
pub(crate) struct Am {
    pub node: Node,
    /// Address of each handler function, and its context.
    pub handlers: Vec<(usize, usize)>,
    /// Sends in flight, with their buffers.
    pub sends: Vec<(MqReq, Box<[u8]>)>,
    /// A claimed message whose payload is still arriving.
    claimed: Option<(MqReq, Claimed)>,
    /// True while a handler runs.
    pub busy: bool,
    /// By token: the peer whose `DONE` message completes the request, the completion function, and
    /// its context.
    pub completions: HashMap<u64, (PeerId, usize, usize)>,
    pub last_token: u64,
}

/// A message claimed by an `improbe2`, with its buffer.
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

    /// Makes a pass, and returns the next message if one has arrived. Drops a message that is too
    /// long.
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
            // SAFETY: `claimed` owns the boxed bytes, and nothing else uses them until `test2`
            // below completes the receive.
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

    pub fn send(&mut self, to: PeerId, tag: [u32; 3], mut bytes: Box<[u8]>) -> Result<(), Error> {
        let mut queue = self.node.queue().ok_or(Error::INTERNAL)?;
        // SAFETY: `sends` owns the box until `next` sees the send complete. If the send completed
        // at once, nothing reads the bytes any more.
        let req = queue.isend2(to, 0, tag, unsafe { span(&mut bytes) }, 0)?;
        if queue.test2(&mut Some(req)) == Err(Code::NoCompletions) {
            self.sends.push((req, bytes));
        }
        Ok(())
    }
}

/// # Safety
/// Until the request completes, the bytes stay valid and nothing else accesses them.
unsafe fn span(bytes: &mut [u8]) -> Span {
    // SAFETY: this function's contract; a slice pointer is never null.
    unsafe { Span::new(std::ptr::NonNull::from(&mut *bytes).cast(), bytes.len()) }
}
