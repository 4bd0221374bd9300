//! Opens a node: its rails, then its engine. Slow path: allocates, loads libraries, and waits for
//! the providers.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fishplate_core::engine::Config;
use fishplate_core::engine::protocol::MatchConfig;
use fishplate_core::error::AttachError;
use fishplate_core::mem::RailId;
use fishplate_core::rail::{Rail, Rails};
use fishplate_core::sync::spin::Policy;
use fishplate_gpu::{GpuConfig, GpuRail};
use fishplate_shm::{Listener, ShmConfig, ShmRail};
use fishplate_sys::LinuxHost;
use fishplate_sys::fabric::Library;

use super::{Builder, Fabric, Gpu};
use crate::config::{BadSetting, RAILS_LIMIT, Settings};
use crate::counters::Page;
use crate::handlers::with_handlers_kept;
use crate::node::address::{Address, RailAddress, hash, socket};
use crate::node::home::{FirstWaitObject, Home, NodeWaitObject, Sizes};
use crate::node::rail::NodeRail;
use crate::node::sleep::Sleep;
use crate::node::{Node, OpenError, Profiles, RailInfo};
use crate::rails::{self, OpenRail, RailsError, Wanted};
use crate::storage::Limits;
use crate::topology::{Anchor, FabricEnd, Machine};

static OPENED: AtomicU32 = AtomicU32::new(0);

/// Maximum size of all windows together. Their memory is allocated at once, but used only by peers
/// whose messages arrive out of order.
const PARKED_MAX: usize = 1 << 26;

/// Returns the wait policies for the early and the later part of a wait. `longest` is the [longest
/// sleep](NodeWaitObject::longest) in each part.
pub(in crate::node) fn parks(policy: Policy, longest: [u64; 2]) -> [Policy; 2] {
    let early = Policy { park_ns: policy.park_ns.min(longest[0]), ..policy };
    let later = match policy.parks {
        true => Policy { park_ns: policy.park_ns.min(longest[1]), ..Policy::EFFICIENT },
        false => policy,
    };
    [early, later]
}

impl Builder {
    /// Checks the sizes of the tables. The allocator would end the process if the tables of a node
    /// did not fit into memory.
    fn check(&self) -> Result<(), BadSetting> {
        let streams = usize::from(self.limits.peers) * usize::from(self.settings.contexts);
        let parked = streams.saturating_mul(self.settings.window as usize);
        let (most, table) = (Limits::MAX.operations as usize, "at most 1048576");
        let checks = [
            (self.limits.peers != 0, "peers", "at least 1"),
            (self.limits.operations != 0, "operations", "at least 1"),
            (self.limits.operations as usize <= most, "operations", table),
            (self.receives <= most, "receives", table),
            (self.requests <= most, "requests", table),
            (parked <= PARKED_MAX, "window", "at most 67108864 / (peers * contexts)"),
        ];
        match checks.into_iter().find(|&(good, ..)| !good) {
            Some((_, field, allowed)) => Err(BadSetting { field, allowed }),
            None => Ok(()),
        }
    }

    /// Opens a node without a worker. Also returns the wait object that peers notify.
    pub(in crate::node) fn open_here(self) -> Result<(Node, NodeWaitObject), OpenError> {
        let config = self.settings.engine(0).map_err(OpenError::Setting)?;
        self.check().map_err(OpenError::Setting)?;
        let host = LinuxHost::shared();
        let mut opened = self.fabric_rails()?;
        let (infos, addresses) = self.describe(&mut opened)?;
        let streams = usize::from(self.limits.peers) * usize::from(config.contexts);
        let matching = self.matching.unwrap_or(MatchConfig::for_streams(streams));
        let pieces = if self.gpu.is_some() { MatchConfig::pieces_for(streams) } else { 0 };
        let matching = MatchConfig { pieces, ..matching };
        let own = Address::new(&config, &matching, self.gpu.is_some(), addresses);
        let address = own.encode().ok_or(OpenError::RailAddress)?;
        // Never 0, so that an id of zeros names no region.
        let owner = OPENED.fetch_add(1, Ordering::Relaxed) % 0xffff + 1;
        let config = Config { seed: own.id, owner: owner as u16, ..config };
        let network = !opened.is_empty();
        let fences = |open: &OpenRail| open.rail.inner().offer().persona.fences;
        let fencing = opened.iter().filter(|open| fences(open)).count();
        let failover = self.failover && fencing > 1 && !self.settings.native_atomics;
        let waits: Option<Vec<_>> = opened.iter().map(|open| open.rail.inner().wait()).collect();
        let sleep = match waits.filter(|_| network || self.wait_fd) {
            None => None,
            Some(waits) => Some(
                // SAFETY: the rails were just opened, and only this thread uses them.
                unsafe { Sleep::new(waits) }.map_err(|errno| AttachError::System(errno.raw()))?,
            ),
        };
        let (local, profiles, wait_object) = self.first_rail(own.id, &host, sleep)?;
        let listener = Listener::bind(socket(own.door)).map_err(OpenError::Listen)?;
        let add = |rails: &mut Rails<NodeRail, RAILS_LIMIT>| {
            // Cannot fail, because `fabric_rails` opens fewer rails than the limit.
            drop(rails.push(local));
            for open in opened {
                drop(rails.push(NodeRail::Fabric(open.rail)));
            }
        };
        let Builder { limits, receives, requests, .. } = self;
        let sizes = Sizes { config, matching, limits, receives, requests, failover };
        let home = Home::new(
            sizes,
            add,
            host,
            wait_object.clone(),
            parks(self.policy, wait_object.longest(network)),
        )?;
        crate::close_in_background();
        let page = match self.counters {
            true => Some(Page::create().map_err(|errno| AttachError::System(errno.raw()))?),
            false => None,
        };
        let node = Node::new(home, infos, (own, address), listener, profiles, page, self);
        Ok((node, wait_object))
    }

    /// Numbers the libfabric rails, and lets them reach the device's memory. Returns the
    /// descriptions of the rails for the program and for peers.
    fn describe(
        &self,
        opened: &mut [OpenRail],
    ) -> Result<(Vec<RailInfo>, Vec<RailAddress>), OpenError> {
        let (mut infos, mut addresses) = (vec![], vec![]);
        // The first rail is shared memory.
        for (open, id) in opened.iter_mut().zip(1..).map(|(open, id)| (open, RailId(id))) {
            open.rail.watch.id = id;
            // Every provider accepts the stand-in, because it is host memory. A GPU's memory needs
            // `FI_HMEM`.
            let stand_in = |gpu| gpu == Gpu::StandIn && self.settings.nic_device_memory;
            let reached = self.gpu.filter(|gpu| open.devices || stand_in(*gpu));
            if let Some(gpu) = reached {
                let device = gpu.behind_nic().map_err(|error| OpenError::Gpu(gpu, error))?;
                open.rail.setup().inner_mut().reach(device)?;
            }
            infos.push(RailInfo::of(open, id, reached.is_some()));
            let OpenRail { rail, provider, fabric, mbit, .. } = open;
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
        Ok((infos, addresses))
    }

    /// Opens the rail to peers on this host, with device memory if the node has a device. Returns
    /// the rail, its profiles for handshakes, and the node's wait object.
    fn first_rail(
        &self,
        id: u64,
        host: &LinuxHost,
        sleep: Option<Sleep>,
    ) -> Result<(NodeRail, Profiles, NodeWaitObject), OpenError> {
        // The notifier needs no fence of its own: the rail issues a fence for peers that sleep
        // without membarrier.
        let machine = LinuxHost::shared().peer_uses_membarrier(true);
        let max_regions = self.limits.locals.max(self.limits.remotes);
        let shm = ShmConfig {
            id,
            max_peers: self.limits.peers,
            max_regions,
            max_segments: self.limits.locals,
            membarrier: host.sleeper_uses_membarrier(),
            // `Node::import` waits instead, and serves other peers meanwhile.
            timeout: Duration::ZERO,
            ..ShmConfig::default()
        };
        match self.gpu {
            None => {
                let mut rail = ShmRail::new(machine, shm)?;
                if let Some(sleep) = &sleep {
                    rail.watch_peers(sleep.set());
                }
                let first = FirstWaitObject::Shm(rail.wait_object());
                let (profile, wait_object) = (rail.profile(), NodeWaitObject::new(first, sleep));
                Ok((NodeRail::Local(rail), (profile, None), wait_object))
            }
            Some(gpu) => {
                let device = gpu.open().map_err(|error| OpenError::Gpu(gpu, error))?;
                let config = GpuConfig { max_regions, ..self.gpu_config };
                let mut rail = Box::new(GpuRail::new(device, machine, shm, config)?);
                if let Some(sleep) = &sleep {
                    rail.watch_peers(sleep.set());
                }
                let first = FirstWaitObject::Gpu(rail.wait_object());
                let (agrees, wait_object) = (rail.profile(), NodeWaitObject::new(first, sleep));
                rail.set_bell(wait_object.bell());
                let profile = (agrees.profile().clone(), Some(agrees));
                Ok((NodeRail::Gpu(rail), profile, wait_object))
            }
        }
    }

    /// Opens the libfabric rails that the settings ask for.
    fn fabric_rails(&self) -> Result<Vec<OpenRail>, OpenError> {
        let count = match self.fabric {
            Fabric::Off => return Ok(vec![]),
            Fabric::Exactly(count) => Some(count),
            Fabric::IfThere | Fabric::Required => None,
        };
        let named = !self.settings.providers.is_empty() || !self.settings.interfaces.is_empty();
        let optional = self.fabric == Fabric::IfThere && !named;
        let library = match self.library {
            Some(library) => Ok(library),
            // SAFETY: without a path the linker loads the installed `libfabric.so.1`, which we
            // trust to be libfabric.
            None => with_handlers_kept(|| unsafe { Library::open(None) }).map_err(RailsError::Load),
        };
        let opened = library.and_then(|library| {
            let machine =
                self.machine.clone().unwrap_or_else(|| Machine::here().unwrap_or_default());
            let anchor = self.gpu.map_or_else(Anchor::here, Gpu::anchor);
            let limit = self.settings.max_rails.min(RAILS_LIMIT - 1);
            let settings = Settings { max_rails: limit, ..self.settings.clone() };
            let (limits, devices) = (self.limits, self.gpu.is_some() && settings.nic_device_memory);
            rails::open(
                Wanted { settings: &settings, limits, anchor, count, devices },
                library,
                &machine,
            )
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
    use crate::worker::Options;
    use fishplate_testing::fabric::{Fake, Persona};

    #[test]
    fn tables_that_do_not_fit_into_memory_are_refused() {
        let builder = || Node::builder().fabric(Fabric::Off);
        let refusal = |builder: Builder| match builder.open() {
            Err(OpenError::Setting(bad)) => bad.to_string(),
            opened => panic!("{:?}", opened.map(drop)),
        };
        let limits = Limits { operations: Limits::MAX.operations + 1, ..Limits::DEFAULT };
        let settings = Settings { window: 1 << 19, ..Settings::DEFAULT };
        for (builder, name) in [
            (builder().limits(limits), "operations"),
            (builder().limits(limits).worker(Options::default()), "operations"),
            (builder().receives(usize::MAX), "receives"),
            (builder().requests(usize::MAX), "requests"),
        ] {
            assert_eq!(refusal(builder), format!("{name} must be at most 1048576"));
        }
        let text = "window must be at most 67108864 / (peers * contexts)";
        assert_eq!(refusal(builder().limits(Limits::MAX).settings(settings)), text);
        drop(builder().limits(Limits { peers: u16::MAX, ..Limits::DEFAULT }).open().unwrap());
    }

    #[test]
    fn guards_have_the_rail_numbers_of_the_engine() {
        let provider = Fake::new(Persona::cxi(), 1);
        let settings = Settings { providers: vec!["cxi".into()], ..Settings::DEFAULT };
        let node = Node::builder().library(provider.library()).settings(settings).open().unwrap();
        let guards: Vec<_> = (1..)
            .map_while(|id| match node.home.engine.rail(RailId(id)) {
                Some(NodeRail::Fabric(guard)) => Some((guard.watch.id, RailId(id))),
                _ => None,
            })
            .collect();
        assert_eq!(guards.len(), 4);
        assert!(guards.iter().all(|(own, counted)| own == counted), "{guards:?}");
    }
}
