//! Opens a node: first its settings, then its rails, then its engine. Slow path: allocates, loads
//! libraries, and waits for the providers.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fishplate_core::engine::Config;
use fishplate_core::engine::protocol::MatchConfig;
use fishplate_core::error::AttachError;
use fishplate_core::mem::RailId;
use fishplate_core::rail::{Rail, Rails};
use fishplate_core::sync::spin::Policy;
#[cfg(any(feature = "cuda", feature = "hip"))]
use fishplate_gpu::cuda::{Api, CudaConfig, CudaDevice};
use fishplate_gpu::{AnyDevice, DeviceError, GpuConfig, GpuRail, HostDevice};
use fishplate_shm::{Listener, ShmConfig, ShmRail};
use fishplate_sys::LinuxHost;
use fishplate_sys::fabric::Library;
use fishplate_sys::fabric::rail::DeviceMemory;
#[cfg(any(feature = "cuda", feature = "hip"))]
use fishplate_sys::fabric::rail::Interface;

use super::address::{Address, RailAddress, hash, socket};
use super::events::Callback;
use super::home::{FirstWaitObject, Home, NodeWaitObject, Sizes};
use super::rail::NodeRail;
use super::sleep::Sleep;
use super::{Node, OpenError, RailInfo};
use crate::config::{BadSetting, RAILS_LIMIT, Settings};
use crate::counters::Page;
use crate::direct::StandIn;
use crate::handlers::with_handlers_kept;
use crate::rails::{self, OpenRail, RailsError, Wanted};
use crate::storage::Limits;
#[cfg(any(feature = "cuda", feature = "hip"))]
use crate::topology::PciAddress;
use crate::topology::{Anchor, FabricEnd, Machine};
use crate::worker::Options;

static OPENED: AtomicU32 = AtomicU32::new(0);

/// Maximum size of all windows together. Their memory is allocated at once, but used only by peers
/// whose messages arrive out of order.
const PARKED_MAX: usize = 1 << 26;

/// Which libfabric rails a node opens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Fabric {
    /// Opens the rails of the first usable provider. Opens no rails if there is no libfabric or no
    /// usable provider. Providers and interfaces that the settings name must exist.
    #[default]
    IfThere,
    /// Opens at least one rail. Otherwise the node does not open.
    Required,
    /// Opens exactly this many rails. Otherwise the node does not open. At most
    /// [`Settings::max_rails`], and at most 15.
    Exactly(usize),
    /// Opens no rail: the node reaches only peers on this host.
    Off,
}

/// The device of a node. Peers can access its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Gpu {
    /// Host memory in place of device memory, for tests and for machines without a GPU.
    StandIn,
    /// The NVIDIA GPU with this ordinal in this process. Opening the node loads the driver.
    #[cfg(feature = "cuda")]
    Cuda(u32),
    /// The AMD GPU with this ordinal in this process. Opening the node loads HIP.
    #[cfg(feature = "hip")]
    Hip(u32),
}

#[cfg(any(feature = "cuda", feature = "hip"))]
impl Gpu {
    fn driver(self) -> Option<(Api, u32)> {
        match self {
            Gpu::StandIn => None,
            #[cfg(feature = "cuda")]
            Gpu::Cuda(ordinal) => Some((Api::Cuda, ordinal)),
            #[cfg(feature = "hip")]
            Gpu::Hip(ordinal) => Some((Api::Hip, ordinal)),
        }
    }
}

impl Gpu {
    fn open(self) -> Result<AnyDevice, DeviceError> {
        #[cfg(any(feature = "cuda", feature = "hip"))]
        if let Some((api, ordinal)) = self.driver() {
            let opened = CudaDevice::open(api, ordinal, CudaConfig::default())?;
            return Ok(AnyDevice::Cuda(Box::new(opened)));
        }
        Ok(AnyDevice::Host(HostDevice::new()))
    }

    fn anchor(self) -> Anchor {
        #[cfg(any(feature = "cuda", feature = "hip"))]
        if let Some((api, ordinal)) = self.driver() {
            let gpus = api.devices().unwrap_or_default();
            if let Some(gpu) = gpus.iter().find(|gpu| gpu.ordinal == ordinal) {
                let (domain, bus, device) = gpu.pci;
                let (bus, device) = (bus as u8, device as u8);
                return Anchor::Gpu(PciAddress { domain, bus, device, function: 0 });
            }
        }
        Anchor::here()
    }

    fn behind_nic(self) -> Result<Box<dyn DeviceMemory>, DeviceError> {
        match self {
            Gpu::StandIn => Ok(Box::new(StandIn)),
            #[cfg(feature = "cuda")]
            Gpu::Cuda(_) => Ok(crate::direct(self.open()?, Interface::Cuda)),
            #[cfg(feature = "hip")]
            Gpu::Hip(_) => Ok(crate::direct(self.open()?, Interface::Rocr)),
        }
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[cfg(any(feature = "cuda", feature = "hip"))]
        if let Some((api, ordinal)) = self.driver() {
            return write!(f, "{api}:{ordinal}");
        }
        f.write_str("stand-in")
    }
}

impl FromStr for Gpu {
    type Err = NoSuchGpu;

    fn from_str(text: &str) -> Result<Gpu, NoSuchGpu> {
        match text.split_once(':') {
            None if text == "stand-in" => Ok(Gpu::StandIn),
            #[cfg(feature = "cuda")]
            Some(("cuda", ordinal)) => ordinal.parse().map(Gpu::Cuda).map_err(|_| NoSuchGpu),
            #[cfg(feature = "hip")]
            Some(("hip", ordinal)) => ordinal.parse().map(Gpu::Hip).map_err(|_| NoSuchGpu),
            _ => Err(NoSuchGpu),
        }
    }
}

/// The error of a text that names no [`Gpu`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoSuchGpu;

impl fmt::Display for NoSuchGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "no such device; use `stand-in`, `cuda:N` (with feature `cuda`) or `hip:N` (with \
             feature `hip`)",
        )
    }
}

impl std::error::Error for NoSuchGpu {}

/// Returns the wait policies for the early and the later part of a wait. `longest` is the [longest
/// sleep](NodeWaitObject::longest) in each part.
pub(super) fn parks(policy: Policy, longest: [u64; 2]) -> [Policy; 2] {
    let early = Policy { park_ns: policy.park_ns.min(longest[0]), ..policy };
    let later = match policy.parks {
        true => Policy { park_ns: policy.park_ns.min(longest[1]), ..Policy::EFFICIENT },
        false => policy,
    };
    [early, later]
}

/// Settings to open a [`Node`] with. Every setting has a default.
#[derive(Clone, Debug)]
pub struct Builder {
    settings: Settings,
    pub(super) limits: Limits,
    receives: usize,
    requests: usize,
    matching: Option<MatchConfig>,
    fabric: Fabric,
    library: Option<Library>,
    gpu: Option<Gpu>,
    gpu_config: GpuConfig,
    machine: Option<Machine>,
    policy: Policy,
    pub(super) worker: Option<Options>,
    wait_fd: bool,
    counters: bool,
    pub(super) connect_timeout: Duration,
    pub(super) patience: Duration,
    pub(super) local: bool,
    failover: bool,
    pub(super) on_rail_event: Option<Callback>,
}

impl Default for Builder {
    fn default() -> Self {
        Builder {
            settings: Settings::DEFAULT,
            limits: Limits::DEFAULT,
            receives: 1024,
            requests: 0,
            matching: None,
            fabric: Fabric::default(),
            library: None,
            gpu: None,
            gpu_config: GpuConfig::default(),
            machine: None,
            policy: Policy::BALANCED,
            worker: None,
            wait_fd: false,
            counters: false,
            connect_timeout: Duration::from_secs(10),
            patience: Duration::from_secs(10),
            local: true,
            failover: true,
            on_rail_event: None,
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

    /// Maximum numbers of peers, regions and operations at once. At most [`Limits::MAX`]. Default:
    /// [`Limits::DEFAULT`].
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Maximum number of receives posted at once. A receive counts until its status is taken.
    /// At most 1,048,576. Default: 1024. Without effect if the node has a
    /// [matched queue](Self::requests).
    pub fn receives(mut self, receives: usize) -> Self {
        self.receives = receives;
        self
    }

    /// Maximum number of open requests in the node's [matched queue](Node::queue). The queue begins
    /// with room for up to 16,384 requests, and [`Node::grow_requests`] doubles the room. At most
    /// 1,048,576. Default: 0, which means no queue. Without effect if the node has a
    /// [worker](Self::worker).
    pub fn requests(mut self, requests: usize) -> Self {
        self.requests = requests;
        self
    }

    /// Limits of tagged messages. Default: [`MatchConfig::for_streams`] for the maximum number of
    /// peers.
    pub fn matching(mut self, matching: MatchConfig) -> Self {
        self.matching = Some(matching);
        self
    }

    /// Which libfabric rails to open. Default: [`Fabric::IfThere`].
    pub fn fabric(mut self, fabric: Fabric) -> Self {
        self.fabric = fabric;
        self
    }

    /// The libfabric to use. Default: `libfabric.so.1` on the linker's search path.
    pub fn library(mut self, library: Library) -> Self {
        self.library = Some(library);
        self
    }

    /// The node's device. Peers on this host can access its memory if they have a device too. Peers
    /// over libfabric always can, through the NIC if the provider supports `FI_HMEM`. Default:
    /// none.
    ///
    /// For each peer on this host with a device, either side needs 2 MiB of shared memory for
    /// bounce slots. Bounce slots carry data that the devices cannot copy directly.
    pub fn gpu(mut self, gpu: Gpu) -> Self {
        self.gpu = Some(gpu);
        self
    }

    /// Settings of the rail that carries device memory between nodes on this host. Both sides need
    /// the same bounce slots. [`GpuConfig::max_regions`] is ignored: see [`limits`](Self::limits).
    /// Default: [`GpuConfig::default`].
    pub fn gpu_config(mut self, config: GpuConfig) -> Self {
        self.gpu_config = config;
        self
    }

    /// The NICs and GPUs of this host. Unless interfaces are named, the libfabric rails use the
    /// NICs near the node's device, or near the thread that opens the node. Default:
    /// [`Machine::here`], which reads `/sys`. If a container hides `/sys`, pass a description.
    pub fn machine(mut self, machine: Machine) -> Self {
        self.machine = Some(machine);
        self
    }

    /// How long a wait spins before it sleeps. Default: [`Policy::BALANCED`].
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Gives the node a descriptor for event loops, [`Node::wait_fd`], even without libfabric
    /// rails. Peers on this host then wake the node with a packet, which costs more than a futex.
    /// By default only nodes with libfabric rails have the descriptor.
    pub fn wait_fd(mut self) -> Self {
        self.wait_fd = true;
        self
    }

    /// Gives the node a page of [counters](crate::counters). Default: none.
    pub fn counters(mut self) -> Self {
        self.counters = true;
        self
    }

    /// Starts a thread that makes progress while the program is outside the node's calls. It spins
    /// and parks according to the options, and ends with the node.
    ///
    /// Inside its calls the program drives the node itself, so they behave as without a worker. The
    /// exceptions are [`Node::queue`] and [`Node::wait_fd`], which return `None`. Each call takes a
    /// lock, which costs about 25 ns and may wait for the end of one pass. Default: no worker.
    pub fn worker(mut self, options: Options) -> Self {
        self.worker = Some(options);
        self
    }

    /// Maximum time that the first use of a peer waits for it to connect. Default: 10 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Maximum time that an operation waits for room in queues and windows. After that it fails
    /// with [`OpError::Again`](fishplate_core::error::OpError::Again). Zero: never waits. Default:
    /// 10 s.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Whether peers on this host are reached through shared memory. Default: yes.
    pub fn shared_memory(mut self, local: bool) -> Self {
        self.local = local;
        self
    }

    /// Whether a peer survives the failure of all but one of its libfabric rails. The other node
    /// needs failover too, and both nodes need two libfabric rails of a provider that can fence.
    /// Only `tcp` can. A node with [`Settings::native_atomics`] has no failover.
    ///
    /// Failover costs about 23 KiB for each peer that this node sends to. An operation to a peer
    /// with failover occupies one of [`Limits::operations`] until it is acknowledged.
    ///
    /// Default: yes.
    pub fn failover(mut self, failover: bool) -> Self {
        self.failover = failover;
        self
    }

    /// Checks the sizes of the tables. The allocator would end the process if the tables of a node
    /// did not fit into memory.
    fn check(&self) -> Result<(), BadSetting> {
        let streams = usize::from(self.limits.peers) * usize::from(self.settings.contexts);
        let parked = streams.saturating_mul(self.settings.window as usize);
        let (most, table) = (Limits::MAX.operations as usize, "at most 1048576");
        let checks = [
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
    pub(super) fn open_here(self) -> Result<(Node, NodeWaitObject), OpenError> {
        let config = self.settings.engine(0).map_err(OpenError::Setting)?;
        self.check().map_err(OpenError::Setting)?;
        let host = LinuxHost::shared();
        let mut opened = self.fabric_rails()?;
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
        let streams = usize::from(self.limits.peers) * usize::from(config.contexts);
        let matching = self.matching.unwrap_or(MatchConfig::for_streams(streams));
        let pieces = if self.gpu.is_some() { MatchConfig::pieces_for(streams) } else { 0 };
        let matching = MatchConfig { pieces, ..matching };
        let own = Address::new(&config, &matching, self.gpu.is_some(), addresses);
        let address = own.encode().ok_or(OpenError::RailAddress)?;
        // Never 0, so that an id of zeros names no region.
        let owner = OPENED.fetch_add(1, Ordering::Relaxed) % 0xffff + 1;
        let config = Config { seed: own.id, owner: owner as u16, ..config };

        // The notifier needs no fence of its own: the rail issues a fence for peers that sleep
        // without membarrier.
        let machine = LinuxHost::shared().peer_uses_membarrier(true);
        let max_regions = self.limits.locals.max(self.limits.remotes);
        let shm = ShmConfig {
            id: own.id,
            max_peers: self.limits.peers,
            max_regions,
            max_segments: self.limits.locals,
            membarrier: host.sleeper_uses_membarrier(),
            // `Node::import` waits instead, and serves other peers meanwhile.
            timeout: Duration::ZERO,
            ..ShmConfig::default()
        };
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
        let (local, profile, agrees, wait_object) = match self.gpu {
            None => {
                let mut rail = ShmRail::new(machine, shm)?;
                if let Some(sleep) = &sleep {
                    rail.watch_peers(sleep.set());
                }
                let first = FirstWaitObject::Shm(rail.wait_object());
                let (profile, wait_object) = (rail.profile(), NodeWaitObject::new(first, sleep));
                (NodeRail::Local(rail), profile, None, wait_object)
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
                (NodeRail::Gpu(rail), agrees.profile().clone(), Some(agrees), wait_object)
            }
        };
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
        let (own, profile) = ((own, address), (profile, agrees));
        Ok((Node::new(home, infos, own, listener, profile, page, self), wait_object))
    }

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
    use fishplate_testing::fabric::{Fake, Persona};

    #[test]
    fn device_names_survive_a_round_trip() {
        #[cfg(feature = "cuda")]
        assert_eq!(Gpu::Cuda(7).to_string().parse(), Ok(Gpu::Cuda(7)));
        #[cfg(feature = "hip")]
        assert_eq!("hip:0".parse(), Ok(Gpu::Hip(0)));
        assert_eq!(Gpu::StandIn.to_string().parse(), Ok(Gpu::StandIn));
        for text in
            ["", "cuda", "cuda:", "cuda:-1", "cuda:4294967296", "cuda:1:2", "stand-in:0", "hip"]
        {
            assert_eq!(text.parse::<Gpu>(), Err(NoSuchGpu), "{text}");
        }
    }

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
