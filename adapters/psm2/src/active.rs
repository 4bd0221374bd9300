//! The second node of an endpoint, which carries active messages, and the active messages in
//! flight. Nothing here blocks or calls a handler.

use std::collections::HashMap;

use fishplate::core::mem::Span;
use fishplate::core::psm::Code;
use fishplate::{Node, PeerId};

use crate::error::Error;

/// Maximum number of arguments, and maximum payload in bytes, of an active message.
pub(crate) const ARGS: usize = 8;
pub(crate) const PAYLOAD: usize = 4096;

/// Maximum number of requests in flight to one peer. Replies are beyond this number and never wait,
/// so two endpoints cannot wait for each other. Replies are bounded by what peers send without
/// reading: their requests in flight, and the unexpected messages that this endpoint stores.
const REQUESTS: usize = 256;

/// Maximum number of sends in flight.
pub(crate) const SENDS: usize = 1 << 18;

/// Number of requests between two checks for messages from peers.
const UNREAD: u32 = 16;

/// State of an endpoint's active messages.
pub(crate) struct Am {
    pub node: Node,
    /// Address of each handler function, and its context.
    pub handlers: Vec<(usize, usize)>,
    /// Sends in flight by their context word, which is never 0. Each owns its buffer. A request has
    /// its peer.
    sends: HashMap<u64, (Box<[u8]>, Option<PeerId>)>,
    last_send: u64,
    /// Number of requests in flight to each peer that has any.
    requests: HashMap<PeerId, usize>,
    /// Requests since the last pass.
    unread: u32,
    /// A claimed message, and whether its payload has arrived. The context word of its receive is
    /// 0.
    claimed: Option<(Claimed, bool)>,
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
            sends: HashMap::new(),
            last_send: 0,
            requests: HashMap::new(),
            unread: 0,
            claimed: None,
            busy: false,
            completions: HashMap::new(),
            last_token: 0,
        }
    }

    /// Makes a pass, and returns the next message if one has arrived. Drops a message that is too
    /// long. Never waits for room, so peers can always send eventually.
    pub fn next(&mut self) -> Option<Claimed> {
        self.unread = 0;
        let mut queue = self.node.queue()?;
        while let Ok((req, _)) = queue.ipeek2() {
            let status = queue.test2(&mut Some(req)).ok()?;
            match self.sends.remove(&status.context) {
                Some((_, Some(to))) => {
                    self.requests.entry(to).and_modify(|count| *count -= 1);
                }
                Some((_, None)) => {}
                None if status.error_code == Code::Ok => self.claimed.as_mut()?.1 = true,
                None => self.claimed = None,
            }
        }
        if self.claimed.is_none() && !self.busy {
            let (req, status) = queue.improbe2(None, [0; 3], [0; 3]).ok()?;
            let bytes = vec![0; PAYLOAD + 8 * (ARGS + 1)].into_boxed_slice();
            let (from, len) = (status.msg_peer?, status.msg_length as usize);
            let (claimed, here) =
                self.claimed.insert((Claimed { from, tag: status.msg_tag, len, bytes }, false));
            // SAFETY: `claimed` owns the boxed bytes, and nothing else uses them until the receive
            // completes.
            queue.imrecv(unsafe { span(&mut claimed.bytes) }, 0, req).ok()?;
            if let Ok(status) = queue.test2(&mut Some(req)) {
                *here = status.error_code == Code::Ok;
                if !*here {
                    self.claimed = None;
                }
            }
        }
        match self.busy {
            true => None,
            false => self.claimed.take_if(|(_, here)| *here).map(|(claimed, _)| claimed),
        }
    }

    /// True if a request to this peer need not wait.
    pub fn has_room(&self, to: PeerId) -> bool {
        self.requests.get(&to).is_none_or(|count| *count < REQUESTS)
    }

    /// Counts a request. Returns true if the caller should check for messages from peers. Otherwise
    /// the replies to a caller that only sends would pile up.
    pub fn is_due(&mut self) -> bool {
        self.unread += 1;
        self.unread >= UNREAD
    }

    /// Sends a message. Never waits.
    ///
    /// # Errors
    /// The peer has failed, or too much is in flight.
    pub fn send(
        &mut self,
        to: PeerId,
        tag: [u32; 3],
        mut bytes: Box<[u8]>,
        request: bool,
    ) -> Result<(), Error> {
        let number = self.last_send + 1;
        let req = loop {
            let mut queue = self.node.queue().ok_or(Error::INTERNAL)?;
            // SAFETY: `sends` owns the box until `next` sees the send complete. If the send
            // completed at once, nothing reads the bytes any more.
            match queue.isend2(to, 0, tag, unsafe { span(&mut bytes) }, number) {
                Err(Code::NoMemory) if self.node.grow_requests() => {}
                begun => break begun?,
            }
        };
        let mut queue = self.node.queue().ok_or(Error::INTERNAL)?;
        if queue.test2(&mut Some(req)) == Err(Code::NoCompletions) {
            self.last_send = number;
            self.sends.insert(number, (bytes, request.then_some(to)));
            if request {
                *self.requests.entry(to).or_default() += 1;
            }
        }
        Ok(())
    }

    /// Drops everything that waits for a peer that has failed or disconnected. Completion functions
    /// are not called, because they report that a handler has returned.
    pub fn forget(&mut self, peer: PeerId) {
        self.completions.retain(|_, (from, ..)| *from != peer);
        self.requests.remove(&peer);
    }
}

/// # Safety
/// Until the request completes, the bytes stay valid and nothing else accesses them.
unsafe fn span(bytes: &mut [u8]) -> Span {
    // SAFETY: this function's contract; a slice pointer is never null.
    unsafe { Span::new(std::ptr::NonNull::from(&mut *bytes).cast(), bytes.len()) }
}
