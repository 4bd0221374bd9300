//! Opens and closes agents.

use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use crate::door::{Door, drive, hosts};
use crate::intro::Info;
use crate::notes::Notes;
use crate::options;
use crate::state::{Shared, State};

const CLOSE: Duration = Duration::from_millis(100);

const PAUSE: Duration = Duration::from_micros(100);

/// An open agent, owned by the program.
pub struct Agent {
    pub(crate) shared: Arc<Shared>,
    /// The last field, so that it drops last.
    _door: Door,
}

impl Agent {
    /// Opens an agent. If `progress` is set, a thread makes progress, and pauses for this time
    /// between passes.
    ///
    /// # Errors
    /// A message for the program.
    pub(crate) fn open(
        name: Vec<u8>,
        params: &[(String, String)],
        progress: Option<Duration>,
    ) -> Result<Agent, String> {
        let (mut node, device) = options::open(params)?;
        let random = |error| format!("cannot read /dev/urandom: {error}");
        let (mut key, mut door) = ([0; 16], [0; 8]);
        let mut source = File::open("/dev/urandom").map_err(random)?;
        source.read_exact(&mut key).and_then(|()| source.read_exact(&mut door)).map_err(random)?;
        let (door, network) = (u64::from_le_bytes(door), !node.rails().is_empty());
        let told = |error| format!("cannot open a socket for peers to connect to: {error}");
        let (opened, port) = Door::open(door, network).map_err(told)?;
        let hosts = if network { hosts() } else { vec![] };
        let info = Info { key, door, port, hosts, address: node.address() };
        let notes = Notes::new(&mut node).map_err(|error| error.to_string())?;
        let shared = Shared::new(State::new(node, device, name, info, notes));
        let threads = |error| format!("cannot start a thread: {error}");
        opened.answer(&shared).map_err(threads)?;
        if let Some(pause) = progress {
            drive(Arc::downgrade(&shared), pause.max(PAUSE)).map_err(threads)?;
        }
        Ok(Agent { shared, _door: opened })
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let state = self.shared.take();
        if let Some(state) = state {
            // A peer that makes no call within `CLOSE` takes the agent for a dead process.
            _ = state.node.close(CLOSE);
        }
    }
}
