//! Notifications: tagged messages between the nodes of two agents. Each arrives once, after the
//! data of its transfer, and those of one peer in order.

use std::collections::VecDeque;

use fishplate::core::engine::protocol::{Received, Request};
use fishplate::core::engine::tag::Tag;
use fishplate::node::{Error, Memory};
use fishplate::{Node, PeerId};

use crate::peer::Peer;
use crate::slab::Slab;

/// The tag of all notifications.
pub(crate) const TAG: u64 = 0x4650_6e78;

/// Memory for one notification that is kept for the next, in bytes, and how often.
const SPARE_LEN: usize = 64 << 10;
const SPARES: usize = 8;

/// Notifications that one pass begins to receive.
const BATCH: usize = 256;

/// A notification on its way in.
struct Incoming {
    request: Request,
    memory: Memory,
    from: Vec<u8>,
    source: PeerId,
    /// Present once it has ended: its bytes, unless it failed.
    ended: Option<Option<Vec<u8>>>,
}

/// A notification: the name of its sender, and its bytes.
pub(crate) type Note = (Vec<u8>, Vec<u8>);

/// The notifications of an agent.
pub(crate) struct Notes {
    pub ready: VecDeque<Note>,
    incoming: VecDeque<Incoming>,
    /// Those that wait for their peer, by its number.
    pub outgoing: VecDeque<(u64, Vec<u8>)>,
    spare: Vec<Memory>,
}

impl Notes {
    pub fn new(node: &mut Node) -> Result<Notes, Error> {
        let spare = vec![node.alloc(SPARE_LEN)?];
        let (ready, incoming, outgoing) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        Ok(Notes { ready, incoming, outgoing, spare })
    }

    /// The agent notifies itself.
    pub fn arrive(&mut self, note: Note) {
        self.ready.push_back(note);
    }

    /// Receives what has arrived.
    pub fn collect(&mut self, node: &mut Node, peers: &Slab<Peer>) {
        for _ in 0..BATCH {
            let Ok(Some(claimed)) = node.mprobe(None, TAG, Tag::from(0)) else { break };
            let source = claimed.envelope.source;
            let len = usize::try_from(claimed.envelope.len).unwrap_or(usize::MAX);
            let fits = self.spare.pop_if(|_| len <= SPARE_LEN);
            let memory = fits.map_or_else(|| node.alloc(len.max(SPARE_LEN)), Ok);
            // Without memory it is received into nothing, so that the sender is not held up.
            let (memory, len) = match memory {
                Ok(memory) => (memory, len),
                Err(error) => {
                    eprintln!("fishplate: no memory for a notification of {len} bytes: {error}");
                    let Ok(memory) = node.alloc(8) else { return };
                    (memory, 0)
                }
            };
            let named = peers.iter().find(|(_, peer)| peer.id == Some(source));
            let from = named.map(|(_, peer)| peer.name.clone()).unwrap_or_default();
            match node.post_mrecv(claimed, memory.slice(..len), 0) {
                Ok(request) => {
                    self.incoming.push_back(Incoming { request, memory, from, source, ended: None });
                }
                Err(_) => self.give_back(node, memory),
            }
        }
        if !self.incoming.is_empty() {
            self.finish(node);
        }
    }

    /// Takes notifications that are received, those of one peer in order.
    fn finish(&mut self, node: &mut Node) {
        let mut waiting: Vec<PeerId> = vec![];
        for mut note in std::mem::take(&mut self.incoming) {
            if note.ended.is_none()
                && let Ok(Some(status)) = node.test_recv(note.request)
            {
                let mut bytes = vec![0; status.delivered as usize];
                let read = node.read(note.memory.at(0), &mut bytes);
                note.ended = Some((status.outcome == Received::Ok && read.is_ok()).then_some(bytes));
                match status.outcome {
                    // It may still be written.
                    Received::Unknown(_) => drop(node.free(note.memory)),
                    _ => self.give_back(node, note.memory),
                }
            }
            match note.ended {
                Some(bytes) if !waiting.contains(&note.source) => {
                    self.ready.extend(bytes.map(|bytes| (note.from, bytes)));
                }
                _ => {
                    waiting.push(note.source);
                    self.incoming.push_back(note);
                }
            }
        }
    }

    fn give_back(&mut self, node: &mut Node, memory: Memory) {
        match memory.len() == SPARE_LEN && self.spare.len() < SPARES {
            true => self.spare.push(memory),
            false => drop(node.free(memory)),
        }
    }
}
