//! What an agent knows of a peer.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;

use fishplate::PeerId;

use crate::intro::Info;

/// How far the connection to a peer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Not connected. `again`: it was connected before.
    Apart {
        again: bool,
    },
    /// We have asked it to connect, and wait for its answer.
    Asked,
    /// It has agreed. The nodes connect.
    Meets,
    Up,
}

/// Refused chunks that are remembered for a peer: more than it has chunks under way.
const REFUSED: usize = 1024;

/// A peer.
pub(crate) struct Peer {
    pub name: Vec<u8>,
    pub address: Vec<u8>,
    /// Present if the program has loaded it.
    pub info: Option<Info>,
    pub stage: Stage,
    /// The node's number of it, unless it is apart.
    pub id: Option<PeerId>,
    /// It has asked for the connection, so it may use it.
    pub asks: bool,
    /// The streams over which either end has asked. Closed here, they would look at the other as if
    /// this process had ended.
    pub lines: Vec<UnixStream>,
    /// Whether short descriptors travel in chunks to it.
    pub packs: bool,
    /// Buffers that sends to it use.
    pub lent: u32,
    /// Its transfers and posts of which a chunk was refused here, over this connection. Their
    /// notification is dropped.
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

    /// Remembers that a chunk was refused.
    pub fn refuse(&mut self, transfer: u64, post: u32) {
        if self.refused.len() >= REFUSED {
            self.refused.pop_front();
        }
        self.refused.push_back((transfer, post));
    }
}
