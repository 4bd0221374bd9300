//! The settings of a node. `open` opens a node with them, and `gpu` opens its device.

mod gpu;
mod open;

use std::time::Duration;

use fishplate_core::engine::protocol::MatchConfig;
use fishplate_core::sync::spin::Policy;
use fishplate_gpu::GpuConfig;
use fishplate_sys::fabric::Library;

pub use gpu::{Gpu, NoSuchGpu};
pub(super) use open::parks;

use super::events::Callback;
use crate::config::Settings;
use crate::storage::Limits;
use crate::topology::Machine;
use crate::worker::Options;

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

/// Settings to open a [`Node`](super::Node) with. Every setting has a default.
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

    /// Maximum number of open requests in the node's [matched queue](super::Node::queue). The queue
    /// begins with room for up to 16,384 requests, and
    /// [`Node::grow_requests`](super::Node::grow_requests) doubles the room. At most 1,048,576.
    /// Default: 0, which means no queue. Without effect if the node has a [worker](Self::worker).
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

    /// Gives the node a descriptor for event loops, [`Node::wait_fd`](super::Node::wait_fd), even
    /// without libfabric rails. Peers on this host then wake the node with a packet, which costs
    /// more than a futex. By default only nodes with libfabric rails have the descriptor.
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
    /// exceptions are [`Node::queue`](super::Node::queue) and
    /// [`Node::wait_fd`](super::Node::wait_fd), which return `None`. Each call takes a lock, which
    /// costs about 25 ns and may wait for the end of one pass. Default: no worker.
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
}
