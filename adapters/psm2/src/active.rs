//! The second node of an endpoint, which carries active messages, and the active messages in
//! flight. Nothing here blocks or calls a handler.

use std::collections::{HashMap, VecDeque};

use fishplate::core::mem::Span;
use fishplate::core::psm::Code;
use fishplate::{Node, PeerId};

use crate::error::Error;

/// Maximum number of arguments, and maximum payload in bytes, of an active message.
pub(crate) const ARGS: usize = 8;
pub(crate) const PAYLOAD: usize = 4096;

/// Maximum number of requests in flight to one peer. Replies do not count and never wait, so two
/// endpoints cannot wait for each other. The number of replies is bounded by the peers' requests in
/// flight and by the unexpected messages that this endpoint stores.
const REQUESTS: usize = 256;

pub(crate) const SENDS: usize = 1 << 18;

/// Kind of a report: the sender's handlers have returned for all messages up to a token. The
/// payload is the token. A later report replaces an earlier report that was not sent yet.
pub(crate) const DONE: u32 = 4;

const UNREAD: u32 = 16;

pub(crate) struct Am {
    pub node: Node,
    /// Address of each handler function, and its context.
    pub handlers: Vec<(usize, usize)>,
    /// Sends in flight, by context word, which is never 0. Each entry owns the buffer of its send.
    /// The entry of a request also has the peer.
    sends: HashMap<u64, (Box<[u8]>, Option<PeerId>)>,
    /// Number of requests in the node's queue. Sends leave one of them to a receive.
    room: usize,
    last_send: u64,
    requests: HashMap<PeerId, usize>,
    unread: u32,
    /// A claimed message, and whether its payload has arrived. The context word of its receive is
    /// 0.
    claimed: Option<(Claimed, bool)>,
    pub busy: bool,
    /// By peer: the messages that its `DONE` completes, oldest first. Each has its token, its
    /// completion function, and the context of that function.
    completions: HashMap<PeerId, VecDeque<(u64, usize, usize)>>,
    last_token: u64,
    /// By peer: the token of a `DONE` that found no room.
    owed: HashMap<PeerId, u64>,
}

pub(crate) struct Claimed {
    pub from: PeerId,
    pub tag: [u32; 3],
    pub len: usize,
    pub bytes: Box<[u8]>,
}

impl Am {
    /// `room` is the number of requests in the node's queue.
    pub fn new(node: Node, room: usize) -> Am {
        Am {
            node,
            handlers: vec![],
            sends: HashMap::new(),
            room,
            last_send: 0,
            requests: HashMap::new(),
            unread: 0,
            claimed: None,
            busy: false,
            completions: HashMap::new(),
            last_token: 0,
            owed: HashMap::new(),
        }
    }

    /// Makes a pass, and returns the next message if one has arrived. Drops a message that is too
    /// long. Never waits for room, so a peer that waits for this endpoint can continue.
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
        self.send_owed();
        let mut queue = self.node.queue()?;
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

    /// Makes passes of an endpoint that closes: drops messages that have arrived, because no
    /// handler runs any more. Returns true once no send is in flight.
    pub fn drain(&mut self) -> bool {
        while self.next().is_some() {}
        self.sends.is_empty()
    }

    pub fn has_room(&self, to: PeerId) -> bool {
        self.requests.get(&to).is_none_or(|count| *count < REQUESTS)
    }

    /// Counts a request. Returns `true` if the caller should now check for messages from peers. A
    /// caller that only sends must check, or its replies pile up.
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
        if self.sends.len() + 1 >= self.room {
            return Err(Error::NO_MEMORY);
        }
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

    /// Sends a message with a completion function. Never waits.
    ///
    /// # Errors
    /// The errors of [`send`](Self::send).
    pub fn send_counted(
        &mut self,
        to: PeerId,
        tag: [u32; 3],
        mut bytes: Box<[u8]>,
        request: bool,
        (function, context): (usize, usize),
    ) -> Result<(), Error> {
        let token = self.last_token + 1;
        bytes[..8].copy_from_slice(&token.to_le_bytes());
        self.send(to, tag, bytes, request)?;
        self.last_token = token;
        self.completions.entry(to).or_default().push_back((token, function, context));
        Ok(())
    }

    /// Returns an empty vector if no message up to `token` has a completion function.
    pub fn completed(&mut self, from: PeerId, token: u64) -> Vec<(usize, usize)> {
        let Some(waiting) = self.completions.get_mut(&from) else { return vec![] };
        let Ok(last) = waiting.binary_search_by_key(&token, |entry| entry.0) else { return vec![] };
        waiting.drain(..=last).map(|(_, function, context)| (function, context)).collect()
    }

    /// Reports later if there is no room now. A message without a completion function has the token
    /// 0.
    pub fn done(&mut self, to: PeerId, token: u64) {
        if token != 0 {
            self.owed.insert(to, token);
            self.send_owed();
        }
    }

    fn send_owed(&mut self) {
        let mut owed = std::mem::take(&mut self.owed);
        // A failed peer does not wait for a report.
        owed.retain(|to, token| {
            let sent = self.send(*to, [DONE, 0, 0], token.to_le_bytes().into(), false);
            sent == Err(Error::NO_MEMORY)
        });
        self.owed = owed;
    }

    /// Drops everything that waits for a peer that has failed or disconnected. Completion functions
    /// are not called, because they report that a handler has returned.
    pub fn forget(&mut self, peer: PeerId) {
        self.completions.remove(&peer);
        self.owed.remove(&peer);
        self.requests.remove(&peer);
    }
}

/// # Safety
/// Until the request completes, the bytes stay valid and nothing else accesses them.
unsafe fn span(bytes: &mut [u8]) -> Span {
    // SAFETY: the caller guarantees that the bytes stay valid and unused until the request
    // completes.
    unsafe { Span::new(std::ptr::NonNull::from(&mut *bytes).cast(), bytes.len()) }
}

#[cfg(test)]
mod tests {
    use fishplate::node::Fabric;

    use super::*;

    const ROOM: usize = 64;

    /// Opens two connected nodes. Returns each node with its id for the other node.
    fn pair() -> [(Am, PeerId); 2] {
        let mut nodes =
            [(); 2].map(|()| Node::builder().fabric(Fabric::Off).requests(ROOM).open().unwrap());
        let addresses = [1, 0].map(|at: usize| nodes[at].address().to_vec());
        let ids = [0, 1].map(|at: usize| nodes[at].connect(&addresses[at]).unwrap());
        while (0..2).any(|at| !nodes[at].reach(ids[at]).unwrap().shared_memory) {
            nodes.iter_mut().for_each(|node| _ = node.progress());
        }
        let [a, b] = nodes;
        [(Am::new(a, ROOM), ids[0]), (Am::new(b, ROOM), ids[1])]
    }

    /// One endpoint sends until there is no room, while the other receives nothing.
    #[test]
    fn without_room_messages_are_received_and_reports_are_sent_later() {
        let [(mut a, to_b), (mut b, to_a)] = pair();
        let mut sent = 0;
        while a.send_counted(to_b, [1, 0, 0], vec![0; 8].into(), false, (sent, 0)).is_ok() {
            sent += 1;
        }
        for token in [3, 5, sent as u64 - 1] {
            a.done(to_b, token);
        }
        b.send(to_a, [2, 0, 0], vec![0; 8].into(), true).unwrap();
        assert!((0..1000).any(|_| a.next().is_some_and(|message| message.tag == [2, 0, 0])));

        let (mut received, mut reports) = (0, vec![]);
        for _ in 0..10_000 {
            a.next();
            match b.next() {
                Some(message) if message.tag[0] == DONE => reports.push(message.bytes[0]),
                message => received += usize::from(message.is_some()),
            }
        }
        assert_eq!((received, reports), (sent, vec![sent as u8 - 1]));
        assert_eq!(a.completed(to_b, 0), []);
        assert_eq!(a.completed(to_b, 2), [(0, 0), (1, 0)]);
        assert_eq!(a.completed(to_b, 2), []);
        assert_eq!(a.completed(to_b, sent as u64 - 1).len(), sent - 3);
    }
}
