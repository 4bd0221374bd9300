//! Sends notifications.

use fishplate::Notice;
use fishplate::node::Error;

use crate::chunk::TAG;
use crate::notes::Notes;
use crate::peer::Stage;
use crate::state::State;
use crate::status::Status;

impl State {
    /// Queues the notification if the peer is not connected yet.
    pub fn notify(&mut self, name: &[u8], bytes: &[u8]) -> Result<(), Status> {
        Notes::check(bytes.len())?;
        if name == self.name {
            self.notes.arrive((self.name.clone(), bytes.to_vec()));
            return Ok(());
        }
        let number = self.loaded(name).ok_or(Status::NOT_FOUND)?;
        let lost = self.is_lost(number);
        let up = self.approach(number)?;
        if lost {
            // This notification fails. The next notification may reach the peer after it
            // reconnects.
            return Err(Status::REMOTE_DISCONNECT);
        }
        let queued = self.notes.outgoing.iter().any(|(to, _)| *to == number);
        if up && !queued && self.tell(number, bytes)? {
            return Ok(());
        }
        self.notes.outgoing.push_back((number, bytes.to_vec()));
        Ok(())
    }

    /// Sends a notification to a connected peer. Returns `false` if there was no room.
    pub fn tell(&mut self, number: u64, bytes: &[u8]) -> Result<bool, Status> {
        let id =
            self.peers.get(number).and_then(|peer| peer.id).ok_or(Status::REMOTE_DISCONNECT)?;
        let sent = self.node.send(id, TAG, bytes, Notice::Silent);
        if matches!(sent, Err(Error::Full { .. })) {
            // The node has no memory to copy a long notification into.
            return Ok(false);
        }
        match sent.map_err(Status::from) {
            Ok(_) => Ok(true),
            Err(Status::IN_PROG) => Ok(false),
            Err(status) => {
                if status == Status::REMOTE_DISCONNECT {
                    self.lose(number);
                }
                Err(status)
            }
        }
    }

    pub fn tell_later(&mut self) {
        if self.notes.outgoing.is_empty() {
            return;
        }
        let mut full: Vec<u64> = vec![];
        for (number, bytes) in std::mem::take(&mut self.notes.outgoing) {
            let stage = self.peers.get(number).map(|peer| peer.stage);
            let sent = match stage {
                None | Some(Stage::Apart { .. }) => continue,
                Some(Stage::Up) if !full.contains(&number) => self.tell(number, &bytes),
                _ => Ok(false),
            };
            if sent != Ok(true) && sent != Err(Status::REMOTE_DISCONNECT) {
                full.push(number);
                self.notes.outgoing.push_back((number, bytes));
            }
        }
    }
}
