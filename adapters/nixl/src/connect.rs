//! How peers are connected: those whose metadata the program has loaded, and those that have ours
//! and asked. One that is lost is asked again when something is to be sent to it.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use fishplate::PeerId;

use crate::door::ask;
use crate::intro::{Info, Question};
use crate::peer::{Peer, Stage};
use crate::state::State;
use crate::status::Status;

/// How long an explicit connection waits.
pub(crate) const CONNECT: Duration = Duration::from_secs(10);

impl State {
    /// The number of the peer that the program has loaded under this name.
    pub fn loaded(&self, name: &[u8]) -> Option<u64> {
        let found = self.peers.iter().find(|(_, peer)| peer.name == name && peer.info.is_some());
        found.map(|(number, _)| number)
    }

    /// Loads a peer by its info. Does not wait.
    pub fn load_peer(&mut self, name: &[u8], bytes: &[u8]) -> Result<(), Status> {
        let info = Info::decode(bytes)?;
        if name == self.name {
            return if info == self.info { Ok(()) } else { Err(Status::NOT_ALLOWED) };
        }
        if let Some(peer) = self.loaded(name).and_then(|number| self.peers.get(number)) {
            return if peer.info.as_ref() == Some(&info) { Ok(()) } else { Err(Status::NOT_ALLOWED) };
        }
        let number = self.known(name, &info.address);
        if let Some(peer) = self.peers.get_mut(number) {
            peer.info = Some(info);
        }
        match self.approach(number) {
            Err(Status::REMOTE_DISCONNECT) | Ok(_) => Ok(()),
            Err(status) => {
                self.forget(number);
                Err(status)
            }
        }
    }

    /// The peer with this node, or a new one.
    fn known(&mut self, name: &[u8], address: &[u8]) -> u64 {
        let same = |peer: &Peer| peer.address == address && peer.name == name;
        let found = self.peers.iter().find(|(_, peer)| same(peer)).map(|(number, _)| number);
        found.unwrap_or_else(|| self.peers.insert(Peer::new(name, address)))
    }

    /// Whether a peer is connected. Asks it if nothing was done.
    ///
    /// # Errors
    /// The peer is not known, or cannot be connected.
    pub fn approach(&mut self, number: u64) -> Result<bool, Status> {
        let peer = self.peers.get_mut(number).ok_or(Status::NOT_FOUND)?;
        let Stage::Apart { again } = peer.stage else { return Ok(peer.stage == Stage::Up) };
        let info = peer.info.clone().ok_or(Status::NOT_FOUND)?;
        let id = self.node.connect(&peer.address)?;
        (peer.id, peer.stage) = (Some(id), Stage::Asked);
        let (name, address) = (self.name.clone(), self.info.address.clone());
        let question = Question { key: info.key, again, name, address }.encode();
        if ask(self.itself.clone(), number, info, question).is_err() {
            self.lose(number);
            return Err(Status::BACKEND);
        }
        Ok(false)
    }

    /// Whether a peer was connected, and is so no longer.
    pub fn is_lost(&self, number: u64) -> bool {
        self.peers.get(number).is_none_or(|peer| peer.stage == Stage::Apart { again: true })
    }

    /// Connects to one that asks. Returns its number.
    pub fn admit(&mut self, question: Question) -> Result<u64, Status> {
        let Question { key, again, name, address } = question;
        // Without an early end, so that time tells nothing of the key.
        let differs = key.iter().zip(&self.info.key).fold(0, |bits, (a, b)| bits | (a ^ b));
        if differs != 0 || name == self.name {
            return Err(Status::NOT_ALLOWED);
        }
        let number = self.known(&name, &address);
        if again {
            self.lose(number);
        }
        let connected = self.node.connect(&address);
        let peer = self.peers.get_mut(number).ok_or(Status::BACKEND)?;
        peer.asks = true;
        match connected {
            Ok(id) => {
                peer.id = Some(id);
                peer.refused.clear();
                if peer.stage != Stage::Up {
                    peer.stage = Stage::Meets;
                }
                Ok(number)
            }
            Err(error) => {
                if peer.info.is_none() {
                    self.peers.remove(number);
                }
                Err(error.into())
            }
        }
    }

    /// The peer that was asked has answered, or could not be reached.
    pub fn answered(&mut self, number: u64, admitted: bool) {
        let Some(peer) = self.peers.get_mut(number) else { return };
        if peer.stage == Stage::Asked {
            match admitted {
                true => peer.stage = Stage::Meets,
                false => self.lose(number),
            }
        }
    }

    /// Keeps the stream over which a peer was found.
    pub fn keep(&mut self, number: u64, line: UnixStream) {
        let Some(peer) = self.peers.get_mut(number) else { return };
        let Some(id) = peer.id.filter(|id| self.node.reach(*id).is_ok_and(|reach| reach.fabric != 0)) else {
            return;
        };
        if peer.lines.is_empty()
            && let Ok(copy) = line.try_clone()
        {
            // Without, the end of its process is noticed once something is sent to it.
            _ = self.node.watch(id, copy);
        }
        peer.lines.push(line);
    }

    /// Goes on meeting a peer; if it is late, gives it up. Whether that has ended.
    pub fn meet(&mut self, number: u64, late: bool) -> bool {
        self.node.progress();
        let Some(peer) = self.peers.get_mut(number) else { return true };
        let (Stage::Meets, Some(id)) = (peer.stage, peer.id) else { return true };
        let reach = self.node.reach(id).unwrap_or_default();
        if reach.shared_memory || reach.fabric != 0 {
            (peer.stage, peer.packs) = (Stage::Up, self.notes.packs && !reach.shared_memory);
            self.progress();
            return true;
        }
        if late || self.node.peer_error(id) != Ok(None) {
            self.lose(number);
            return true;
        }
        false
    }

    /// A peer has failed: its transfers fail, and it is asked again when the program wants it.
    pub fn lose(&mut self, number: u64) {
        self.collect();
        let Some(peer) = self.peers.get_mut(number) else { return };
        if let Some(id) = peer.id.take() {
            _ = self.node.disconnect(id);
        }
        (peer.stage, peer.asks) = (Stage::Apart { again: true }, false);
        peer.lines.clear();
        if peer.info.is_none() {
            self.peers.remove(number);
        }
        self.fail_transfers(number);
        self.reap();
    }

    /// Looks for peers that have failed.
    pub fn look(&mut self) {
        for (id, _) in self.node.failed_peers() {
            let known = self.peers.iter().find(|(_, peer)| peer.id == Some(id));
            if let Some((number, _)) = known {
                self.lose(number);
            }
        }
        // One that has closed is not among those that have failed.
        let closed = |(number, peer): (u64, &Peer)| match (peer.stage, peer.id) {
            (Stage::Up, Some(id)) => Some((number, id)),
            _ => None,
        };
        let up: Vec<(u64, PeerId)> = self.peers.iter().filter_map(closed).collect();
        for (number, id) in up {
            if self.node.peer_error(id) != Ok(None) {
                self.lose(number);
            }
        }
    }

    /// Forgets what the program has loaded of a peer. One that has asked for the connection keeps
    /// it.
    pub fn forget(&mut self, number: u64) {
        let Some(peer) = self.peers.get_mut(number) else { return };
        peer.info = None;
        if !peer.asks {
            self.lose(number);
        }
    }
}
