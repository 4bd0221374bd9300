//! Connects peers. Either the program loads a peer's metadata, or a peer that has our metadata asks
//! to connect. After the connection is lost, the next send asks the peer again.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use fishplate::PeerId;

use crate::door::ask;
use crate::intro::{Info, Question};
use crate::peer::{Peer, Stage};
use crate::state::State;
use crate::status::Status;

pub(crate) const CONNECT: Duration = Duration::from_secs(10);

impl State {
    pub fn loaded(&self, name: &[u8]) -> Option<u64> {
        let found = self.peers.iter().find(|(_, peer)| peer.name == name && peer.info.is_some());
        found.map(|(number, _)| number)
    }

    /// Loads a peer from its connection info. Does not wait.
    pub fn load_peer(&mut self, name: &[u8], bytes: &[u8]) -> Result<(), Status> {
        let info = Info::decode(bytes)?;
        if name == self.name {
            return if info == self.info { Ok(()) } else { Err(Status::NOT_ALLOWED) };
        }
        if let Some(peer) = self.loaded(name).and_then(|number| self.peers.get(number)) {
            return if peer.info.as_ref() == Some(&info) {
                Ok(())
            } else {
                Err(Status::NOT_ALLOWED)
            };
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

    fn find(&self, name: &[u8], address: &[u8]) -> Option<u64> {
        let same = |peer: &Peer| peer.address == address && peer.name == name;
        self.peers.iter().find(|(_, peer)| same(peer)).map(|(number, _)| number)
    }

    /// Creates a peer if none has this name and address.
    fn known(&mut self, name: &[u8], address: &[u8]) -> u64 {
        self.find(name, address).unwrap_or_else(|| self.peers.insert(Peer::new(name, address)))
    }

    /// Returns whether the peer is connected. Starts to connect if no attempt is under way.
    ///
    /// # Errors
    /// The peer is unknown or cannot be connected.
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

    pub fn is_lost(&self, number: u64) -> bool {
        self.peers.get(number).is_none_or(|peer| peer.stage == Stage::Apart { again: true })
    }

    pub fn admit(&mut self, question: Question) -> Result<u64, Status> {
        let Question { key, again, name, address } = question;
        // Compares in constant time, so that timing does not reveal the key.
        let differs = key.iter().zip(&self.info.key).fold(0, |bits, (a, b)| bits | (a ^ b));
        if differs != 0 || name == self.name {
            return Err(Status::NOT_ALLOWED);
        }
        // A peer that only asked is removed when it is lost, so look it up again.
        if again && let Some(number) = self.find(&name, &address) {
            self.lose(number);
        }
        let number = self.known(&name, &address);
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

    /// Handles a peer's answer to our question. `admitted` is false if the peer refused or is
    /// unreachable.
    pub fn answered(&mut self, number: u64, admitted: bool) {
        let Some(peer) = self.peers.get_mut(number) else { return };
        if peer.stage == Stage::Asked {
            match admitted {
                true => peer.stage = Stage::Meets,
                false => self.lose(number),
            }
        }
    }

    /// Keeps the stream, to detect the peer's death.
    pub fn keep(&mut self, number: u64, line: UnixStream) {
        let Some(peer) = self.peers.get_mut(number) else { return };
        let Some(id) =
            peer.id.filter(|id| self.node.reach(*id).is_ok_and(|reach| reach.fabric != 0))
        else {
            return;
        };
        if peer.lines.is_empty()
            && let Ok(copy) = line.try_clone()
        {
            // Ignores an error: without the watch, the next send detects the peer's death.
            _ = self.node.watch(id, copy);
        }
        peer.lines.push(line);
    }

    /// Continues to connect a peer. Gives up if `late`. Returns true when the peer is connected or
    /// lost.
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

    /// Disconnects a failed peer and fails its transfers. The next use asks the peer again.
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

    pub fn look(&mut self) {
        for (id, _) in self.node.failed_peers() {
            let known = self.peers.iter().find(|(_, peer)| peer.id == Some(id));
            if let Some((number, _)) = known {
                self.lose(number);
            }
        }
        // `failed_peers` does not report peers that closed normally.
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

    /// Removes the info that the program loaded for a peer. If the peer asked for the connection,
    /// the connection stays.
    pub fn forget(&mut self, number: u64) {
        let Some(peer) = self.peers.get_mut(number) else { return };
        peer.info = None;
        if !peer.asks {
            self.lose(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::agent::Agent;

    fn with<T>(agent: &Agent, call: impl FnOnce(&mut State) -> T) -> T {
        agent.shared.with(call).expect("a panic has closed the agent")
    }

    #[test]
    fn a_peer_that_asks_again_is_admitted_by_an_agent_that_has_removed_it() {
        let open = |name: &str| {
            Agent::open(name.into(), &[("fabric".into(), "off".into())], None).unwrap()
        };
        let (a, b) = (open("a"), open("b"));
        let (name, address) = with(&a, |state| (state.name.clone(), state.info.address.clone()));
        let key = with(&b, |state| state.info.key);
        let question = Question { key, again: true, name, address };
        assert!(with(&b, |state| state.admit(question)).is_ok());
    }

    #[test]
    fn hostile_connection_info_is_refused_and_leaves_the_agent_usable() {
        let open = |name: &str| {
            Agent::open(name.into(), &[("fabric".into(), "off".into())], None).unwrap()
        };
        let (a, b) = (open("a"), open("b"));
        let good = with(&b, |state| state.info.encode());
        let load = |bytes: &[u8]| with(&a, |state| state.load_peer(b"x", bytes));
        for cut in 0..good.len() {
            assert!(load(&good[..cut]).is_err(), "cut to {cut} bytes");
        }
        let long = [good.as_slice(), &[0; 1 << 16]].concat();
        assert!(load(&long).is_err() && load(&[0xff; 100]).is_err());
        assert_eq!(
            with(&a, |state| state.peers.iter().count()),
            0,
            "what was refused leaves no peer"
        );
        // Changes bytes of the node's address. Some changes only affect a number, so the address
        // still decodes but names no node.
        let before = good.len() - with(&b, |state| state.info.address.len());
        for at in before..good.len() {
            for wrong in [0, 0x80, 0xff] {
                let mut bytes = good.clone();
                bytes[at] ^= wrong;
                _ = load(&bytes);
                with(&a, |state| {
                    state.loaded(b"x").into_iter().for_each(|number| state.forget(number))
                });
            }
        }
        assert_eq!(with(&a, |state| state.load_peer(b"b", &good)), Ok(()));
        let end = Instant::now() + Duration::from_secs(20);
        let number = with(&a, |state| state.loaded(b"b")).unwrap();
        // The first attempt may be lost with the earlier connections. Each use tries again.
        while with(&a, |state| state.approach(number)) != Ok(true) {
            assert!(Instant::now() < end, "the right info does not connect any more");
            [&a, &b].into_iter().for_each(|agent| with(agent, State::progress));
            std::thread::yield_now();
        }
    }
}
