//! Opening a node: settings, then rails, then the engine. Slow path: allocates, loads libraries,
//! and takes what time the providers take.

use std::time::Duration;

use fishplate_core::engine::Config;
use fishplate_core::engine::protocol::MatchConfig;
use fishplate_core::mem::RailId;
use fishplate_core::rail::{Rail, Rails, either::Either};
use fishplate_core::sync::spin::Policy;
use fishplate_shm::{Listener, ShmConfig, ShmRail};
use fishplate_sys::LinuxHost;
use fishplate_sys::fabric::Library;

use super::address::{Address, RailAddress, hash, socket};
use super::home::{Home, NodeRail, Sizes};
use super::{Node, OpenError};
use crate::config::{RAILS_LIMIT, Settings};
use crate::rails::{self, OpenRail, RailsError};
use crate::storage::Limits;
use crate::topology::{Anchor, FabricEnd, Machine};

/// Which libfabric rails a node opens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Fabric {
    /// Those of the first usable provider, where libfabric is installed; otherwise none. Providers
    /// or interfaces that the settings name must be there.
    #[default]
    IfThere,
    /// At least one; without it the node does not open.
    Required,
    /// None: the node reaches peers of this host only.
    Off,
}

/// Longest sleep without network rails, in nanoseconds: early in a wait, and later.
const PARKS_NS: [u64; 2] = [10_000_000, 10_000_000];

/// Longest sleep with network rails, which must be polled.
const NAPS_NS: [u64; 2] = [100_000, 1_000_000];

/// Settings of a [`Node`] that is yet to be opened. Every setting has a default.
#[derive(Clone, Debug)]
pub struct Builder {
    settings: Settings,
    pub(super) limits: Limits,
    receives: usize,
    matching: Option<MatchConfig>,
    fabric: Fabric,
    library: Option<Library>,
    policy: Policy,
    pub(super) connect_timeout: Duration,
    pub(super) patience: Duration,
    pub(super) local: bool,
}

impl Default for Builder {
    fn default() -> Self {
        Builder {
            settings: Settings::DEFAULT,
            limits: Limits::DEFAULT,
            receives: 1024,
            matching: None,
            fabric: Fabric::default(),
            library: None,
            policy: Policy::BALANCED,
            connect_timeout: Duration::from_secs(10),
            patience: Duration::from_secs(10),
            local: true,
        }
    }
}

impl Builder {
    /// Settings of the engine and of the libfabric rails. Default: [`Settings::DEFAULT`].
    /// [`Settings::library`] is ignored: see [`library`](Self::library).
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = settings;
        self
    }

    /// How many peers, regions and operations there can be at once. Default: [`Limits::DEFAULT`].
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Receives posted at once, those whose status was not taken included. Default: 1024.
    pub fn receives(mut self, receives: usize) -> Self {
        self.receives = receives;
        self
    }

    /// Sizes of tagged messages. Default: [`MatchConfig::for_streams`] of the peers there may be.
    pub fn matching(mut self, matching: MatchConfig) -> Self {
        self.matching = Some(matching);
        self
    }

    /// Which libfabric rails to open. Default: [`Fabric::IfThere`].
    pub fn fabric(mut self, fabric: Fabric) -> Self {
        self.fabric = fabric;
        self
    }

    /// The libfabric to use. Default: `libfabric.so.1`, where the dynamic linker finds it.
    pub fn library(mut self, library: Library) -> Self {
        self.library = Some(library);
        self
    }

    /// How long a wait spins before it sleeps. Default: [`Policy::BALANCED`].
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// How long the first use of a peer waits for it to connect. Default: 10 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How long an operation waits for room in queues and windows before it is refused with
    /// [`OpError::Again`](fishplate_core::error::OpError::Again). Zero: never. Default: 10 s.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Whether peers of this host are reached through shared memory. Default: yes.
    pub fn shared_memory(mut self, local: bool) -> Self {
        self.local = local;
        self
    }

    /// Opens the node.
    ///
    /// # Errors
    /// [`OpenError`] says what could not be opened, and why.
    pub fn open(self) -> Result<Node, OpenError> {
        let config = self.settings.engine(0).map_err(OpenError::Setting)?;
        let host = LinuxHost::shared();
        let mut opened = self.fabric_rails()?;
        for (open, id) in opened.iter_mut().zip(1..) {
            // The first rail is shared memory.
            open.rail.id = RailId(id);
        }
        let mut addresses = vec![];
        for OpenRail { rail, provider, fabric, mbit, .. } in &opened {
            let address = rail.inner().address().map_err(|_| OpenError::RailAddress)?;
            addresses.push(RailAddress {
                end: FabricEnd {
                    provider: hash(&[provider.as_bytes()]) as u32,
                    fabric: hash(&[fabric.as_bytes()]) as u32,
                    mbit: *mbit,
                },
                max_message: rail.caps().max_message.min(u32::MAX as usize) as u32,
                address,
            });
        }
        let streams = usize::from(self.limits.peers) * usize::from(config.contexts);
        let matching = self.matching.unwrap_or(MatchConfig::for_streams(streams));
        let own = Address::new(&config, &matching, addresses);
        let address = own.encode().ok_or(OpenError::RailAddress)?;
        let config = Config { seed: own.id, ..config };

        let shm = ShmRail::new(
            // The rail itself fences towards peers that sleep without membarrier.
            LinuxHost::shared().peer_uses_membarrier(true),
            ShmConfig {
                id: own.id,
                max_peers: self.limits.peers,
                max_regions: self.limits.locals.max(self.limits.remotes),
                max_segments: self.limits.locals,
                membarrier: host.sleeper_uses_membarrier(),
                ..ShmConfig::default()
            },
        )?;
        let listener = Listener::bind(socket(own.id)).map_err(OpenError::Listen)?;
        let (profile, bell) = (shm.profile(), shm.bell());
        let mut rails: Rails<NodeRail, RAILS_LIMIT> = Rails::new();
        let network = !opened.is_empty();
        let all = std::iter::once(Either::A(shm)).chain(opened.into_iter().map(|open| Either::B(open.rail)));
        for rail in all {
            // There is room: `fabric_rails` opens one less than the limit.
            drop(rails.push(rail));
        }
        let parks = if network { NAPS_NS } else { PARKS_NS };
        let early = Policy { park_ns: self.policy.park_ns.min(parks[0]), ..self.policy };
        let later = match self.policy.parks {
            true => Policy { park_ns: self.policy.park_ns.min(parks[1]), ..Policy::EFFICIENT },
            false => self.policy,
        };
        let sizes = Sizes { config, matching, limits: self.limits, receives: self.receives };
        let home = Home::new(sizes, rails, host, bell, [early, later])?;
        crate::close_in_background();
        Ok(Node::new(home, own, address, listener, profile, self))
    }

    /// The libfabric rails that were asked for.
    fn fabric_rails(&self) -> Result<Vec<OpenRail>, OpenError> {
        if self.fabric == Fabric::Off {
            return Ok(vec![]);
        }
        let named = !self.settings.providers.is_empty() || !self.settings.interfaces.is_empty();
        let optional = self.fabric == Fabric::IfThere && !named;
        let library = match self.library {
            Some(library) => Ok(library),
            // SAFETY: without a path the dynamic linker loads what this host has installed as
            // `libfabric.so.1`. A host whose library of that name is none is broken.
            None => unsafe { Library::open(None) }.map_err(RailsError::Load),
        };
        let opened = library.and_then(|library| {
            let machine = Machine::here().unwrap_or_default();
            let limit = self.settings.max_rails.min(RAILS_LIMIT - 1);
            let settings = Settings { max_rails: limit, ..self.settings.clone() };
            rails::open_all(&settings, self.limits, library, &machine, Anchor::Anywhere)
        });
        match opened {
            Err(RailsError::Load(_) | RailsError::Provider(_)) if optional => Ok(vec![]),
            opened => opened.map_err(OpenError::Rails),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fishplate_testing::fabric::{Fake, Persona};

    #[test]
    fn guards_bear_the_numbers_by_which_the_engine_counts_their_rails() {
        let provider = Fake::new(Persona::cxi(), 1);
        let settings = Settings { providers: vec!["cxi".into()], ..Settings::DEFAULT };
        let node = Node::builder().library(provider.library()).settings(settings).open().unwrap();
        let guards: Vec<_> = (1..)
            .map_while(|id| match node.home.engine.rail(RailId(id)) {
                Some(Either::B(guard)) => Some((guard.id, RailId(id))),
                _ => None,
            })
            .collect();
        assert_eq!(guards.len(), 4);
        assert!(guards.iter().all(|(own, counted)| own == counted), "{guards:?}");
    }
}
