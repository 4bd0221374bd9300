//! What an agent knows of a peer.

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
}

impl Peer {
    pub fn new(name: &[u8], address: &[u8]) -> Peer {
        let (name, address) = (name.to_vec(), address.to_vec());
        let stage = Stage::Apart { again: false };
        Peer { name, address, info: None, stage, id: None, asks: false, lines: vec![], packs: false, lent: 0 }
    }
}
