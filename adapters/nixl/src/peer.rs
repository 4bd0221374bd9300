//! The state of a peer.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;

use fishplate::PeerId;

use crate::intro::Info;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// `again` is true if the peer was connected before.
    Apart {
        again: bool,
    },
    /// Waiting for the peer's answer.
    Asked,
    /// The peer has answered, and the nodes are connecting.
    Meets,
    Up,
}

/// A peer has fewer chunks in flight.
const REFUSED: usize = 1024;

/// A peer.
pub(crate) struct Peer {
    pub name: Vec<u8>,
    pub address: Vec<u8>,
    /// The metadata that the program has loaded.
    pub info: Option<Info>,
    pub stage: Stage,
    /// `None` while the peer is not connected.
    pub id: Option<PeerId>,
    /// True if the peer asked for the connection, and so may use it.
    pub asks: bool,
    /// The streams that carried a question, in either direction. They stay open, because the peer
    /// would take a closed stream for the end of this process.
    pub lines: Vec<UnixStream>,
    /// True if short descriptors are sent to the peer in chunks.
    pub packs: bool,
    pub lent: u32,
    /// Transfers and posts of the peer with a chunk that was refused on this connection. Their
    /// notifications are dropped.
    pub refused: VecDeque<(u64, u32)>,
}

impl Peer {
    pub fn new(name: &[u8], address: &[u8]) -> Peer {
        let (name, address) = (name.to_vec(), address.to_vec());
        let stage = Stage::Apart { again: false };
        let (lines, refused) = (vec![], VecDeque::new());
        Peer {
            name,
            address,
            info: None,
            stage,
            id: None,
            asks: false,
            lines,
            packs: false,
            lent: 0,
            refused,
        }
    }

    pub fn refuse(&mut self, transfer: u64, post: u32) {
        if self.refused.len() >= REFUSED {
            self.refused.pop_front();
        }
        self.refused.push_back((transfer, post));
    }
}
