//! Opens a side's node, and connects it to the other side's node.

use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use fishplate::bootstrap::{BootstrapError, Card, RailCard, Wire};
use fishplate::core::engine::protocol::MatchConfig;
use fishplate::core::sync::spin::Policy;
use fishplate::node::{Error, Fabric, Gpu, Memory, OpenError};
use fishplate::rails::{self, RailsError};
use fishplate::worker::Options;
use fishplate::{Limits, Node, PeerId};
use fishplate_core::error::OpError;
use fishplate_gpu::{DeviceError, GpuConfig};

use super::endpoint::{AREAS_AT, Endpoint, Mapped};
use super::job::Job;
use super::meet::Met;
use super::setup::Setup;
use super::watch::Watch;
use super::who::Who;
use crate::args::{DeviceName, Mode, Transport};
use crate::clock::Clock;
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::limits;

/// If the receiver posts receives in time, only the window limits the sender.
const MATCHING: MatchConfig = MatchConfig { credits: 512, headers: 512, ..MatchConfig::DEFAULT };

const LIMITS: Limits = Limits { peers: 1, locals: 8, remotes: 8, operations: 1024 };

const RECEIVES: usize = 1024;

/// A short `--timeout` is meant for measurements, not for setup.
const SETUP: Duration = Duration::from_secs(10);

pub struct Opened {
    node: Node,
    pub card: Card,
}

impl Setup {
    pub fn open(&self) -> Outcome<Opened> {
        let fabric = self.transport == Transport::Fabric;
        let settings = self.settings.clone();
        let policy = match self.crowded {
            // The other side can run only when this side yields.
            true => Policy { probes: 0, max_spin_ns: 0, yield_after_ns: 0, ..Policy::LOW_LATENCY },
            false => Policy::LOW_LATENCY,
        };
        let mut builder = Node::builder()
            .limits(LIMITS)
            .receives(RECEIVES)
            .matching(MATCHING)
            .policy(policy)
            .patience(super::endpoint::SLICE)
            .connect_timeout(self.setup_time())
            .counters()
            .shared_memory(!fabric)
            .fabric(if fabric { Fabric::Exactly(self.rails) } else { Fabric::Off });
        if fabric {
            // SAFETY: the library comes from the linker's search path, or from a path that the user
            // names as libfabric.
            let library = unsafe { rails::load(&settings) };
            let library =
                library.map_err(|error| self.refused(OpenError::Rails(RailsError::Load(error))))?;
            builder = builder.library(library);
        }
        if let Some(device) = self.device {
            let config = GpuConfig { force_relay: self.relay, ..GpuConfig::default() };
            builder = builder.gpu(gpu(device)?).gpu_config(config);
        }
        if self.mode == Mode::Worker {
            builder = builder.policy(Policy::BALANCED).worker(Options::default());
        }
        let config = settings.engine(0).map_err(|error| Failure::usage(error.to_string()))?;
        let node = builder.settings(settings).open().map_err(|error| self.refused(error))?;
        // The nodes exchange the addresses of rails themselves, so the card contains none.
        let rail = |provider: &str, interface: &str, mbit| RailCard {
            provider: provider.into(),
            interface: interface.into(),
            fabric: String::new(),
            address: vec![0],
            mbit,
        };
        let mut cards: Vec<_> = node
            .rails()
            .iter()
            .map(|info| rail(&info.provider, &info.interface, info.mbit))
            .collect();
        if cards.is_empty() {
            cards.push(rail("shared memory", "", 0));
        }
        let transport = self.transport as u8;
        let card = Card { transport, ..Card::new(&config, self.region as u64, cards) };
        Ok(Opened { node, card })
    }

    fn refused(&self, error: OpenError) -> Failure {
        let device = self.device.unwrap_or(DeviceName::Host);
        match error {
            OpenError::Rails(error @ RailsError::Setup { .. }) => Failure::run(error.to_string()),
            OpenError::Rails(error) => Failure::usage(format!("--transport fabric: {error}")),
            OpenError::Gpu(_, error @ DeviceError::NoDriver) => Failure::usage(format!(
                "--device {device}: {}; use host, which needs no driver",
                no_driver(device, error)
            )),
            OpenError::Gpu(_, error @ DeviceError::NoDevice(_)) => {
                Failure::usage(format!("--device {device}: {error}"))
            }
            OpenError::Gpu(_, error) => Failure::run(format!("--device {device}: {error}")),
            OpenError::Attach(error) => limits::attach_failed("the node", error),
            OpenError::Worker(error) => Failure::run(format!(
                "cannot start a worker: {error}; raise ulimit -v or ulimit -u"
            )),
            error => Failure::run(error.to_string()),
        }
    }

    pub fn join<const STARTS: bool>(
        &self,
        opened: Opened,
        met: &mut Met,
    ) -> Outcome<Endpoint<STARTS>> {
        let Opened { mut node, card } = opened;
        let deadline = Instant::now() + self.setup_time();
        let names = node.rails().iter().enumerate();
        let names =
            names.map(|(at, info)| rail_name(at, &info.provider, &info.interface)).collect();
        let who = Who::new(met.name.clone(), names);
        let failed = |error| self.failed(error);

        let memory = self.take(&mut node)?;
        let theirs = exchange(&mut node, &mut met.wire, node_address, deadline, &who)?;
        let peer = node.connect(theirs).map_err(failed)?;
        if let Ok(socket) = met.wire.as_fd().try_clone_to_owned() {
            node.watch(peer, socket).map_err(failed)?;
        }
        let mut told = vec![];
        for region in std::iter::once(memory.words).chain(memory.device) {
            let handle = node.handle(region).map_err(failed)?;
            told.extend((handle.len() as u16).to_ne_bytes());
            told.extend(handle);
        }
        let heard = exchange(&mut node, &mut met.wire, |_| told.clone(), deadline, &who)?;
        let mut handles = handles(&heard).into_iter();
        let mut import = |what: &str| {
            let handle = handles.next().ok_or_else(|| {
                Failure::run(format!(
                    "{who} sent no handle of its {what}; run the same build on both sides"
                ))
            })?;
            node.import(peer, handle).map_err(|error| match error {
                Error::NotConnected(_) => {
                    Failure::run(format!("{who} did not answer in time{}", limits::descriptors()))
                }
                // The other side reports the reason itself if it has time.
                Error::Op(OpError::PeerFailed(_)) => {
                    who.gone("it closed before this side opened its memory")
                }
                error => Failure::run(format!("cannot open the memory of {who}: {error}")),
            })
        };
        let words = import("memory")?;
        let landing = if memory.device.is_some() { import("device memory")? } else { words };
        met.notes = self.notes(&node, peer, &met.theirs, &card);
        let shared = self.transport == Transport::Shm;
        let common = match STARTS {
            true => Some(memory.start),
            false => node.remote_ptr(words.at(0), AREAS_AT + self.lens()[0]),
        };
        let (eager, clock) =
            (if memory.device.is_some() { 0 } else { node.eager_max(peer) }, Clock::calibrate());
        Ok(Endpoint {
            node,
            peer,
            words: (memory.words, words),
            landing,
            buffer: memory.buffer,
            device: memory.device,
            views: memory.views,
            lens: self.lens(),
            common: common.filter(|_| shared),
            eager,
            clock,
            watch: Watch::new(clock),
            crowded: self.crowded,
            who,
            _kept: memory.kept,
        })
    }

    fn setup_time(&self) -> Duration {
        self.timeout.max(SETUP)
    }

    fn lens(&self) -> [usize; 2] {
        [Job::arena(self.region), Job::buffer(self.region)]
    }

    fn take(&self, node: &mut Node) -> Outcome<Taken> {
        let [len, buffer_len] = self.lens();
        let failed = |error| self.failed(error);
        let on_device = self.device.is_some();
        let words =
            node.alloc(AREAS_AT + if on_device { AREAS_AT } else { len }).map_err(failed)?;
        let start = node.segment(words).map_err(failed)?.ptr();
        let (mut device, mut kept) = (None, vec![Mapped::new(self.region, buffer_len)?]);
        let (buffer, views) = if on_device {
            kept.push(Mapped::new(self.region, len)?);
            device = Some(node.alloc_device(AREAS_AT + len).map_err(failed)?);
            (node.alloc_device(buffer_len).map_err(failed)?, [kept[1].ptr(), kept[0].ptr()])
        } else {
            // SAFETY: the memory is mapped until the node is dropped, and accessed only through raw
            // pointers.
            let buffer = unsafe { node.register(kept[0].ptr(), kept[0].len()) }.map_err(failed)?;
            // SAFETY: the areas begin inside the memory of the words.
            (buffer, [unsafe { start.add(AREAS_AT) }, kept[0].ptr()])
        };
        Ok(Taken { words, start, device, buffer, views, kept })
    }

    fn failed(&self, error: Error) -> Failure {
        match (error, self.device) {
            (Error::Attach(error), _) => limits::attach_failed("the node", error),
            (Error::Device(error), Some(device)) => Failure::run(format!(
                "--device {device}: {} bytes for payloads: {error}; choose a smaller --region",
                self.lens()[1]
            )),
            (error, _) => Failure::run(format!("cannot set up the node: {error}")),
        }
    }

    fn notes(&self, node: &Node, peer: PeerId, theirs: &Card, ours: &Card) -> Vec<String> {
        let mut notes = vec![];
        for pair in node.rail_pairs(peer).unwrap_or_default() {
            let at = usize::from(pair.ours.0).saturating_sub(1);
            let there = usize::from(pair.theirs.0).saturating_sub(1);
            let (Some(rail), Some(other)) = (ours.rails.get(at), theirs.rails.get(there)) else {
                continue;
            };
            let mut note = rail_name(at, &rail.provider, &rail.interface);
            if rail.mbit > 0 {
                note += &format!(", {} Mbit/s", rail.mbit);
            }
            note += &format!(", to rail {there} on {}", other.interface);
            if rail.mbit != pair.their_mbit && rail.mbit != 0 && pair.their_mbit != 0 {
                note += &format!(" with {} Mbit/s: the slower rail limits both", pair.their_mbit);
            }
            notes.push(note);
        }
        if let Some(device) = self.device {
            let path = match self.relay {
                true => "through bounce slots",
                false => "direct, or through bounce slots where devices do not reach each other",
            };
            notes.push(format!("payloads in {device}, {path}"));
        }
        notes
    }
}

struct Taken {
    words: Memory,
    start: NonNull<u8>,
    device: Option<Memory>,
    buffer: Memory,
    views: [NonNull<u8>; 2],
    kept: Vec<Mapped>,
}

fn node_address(node: &Node) -> Vec<u8> {
    node.address().to_vec()
}

fn exchange(
    node: &mut Node,
    wire: &mut Wire,
    ours: impl FnOnce(&Node) -> Vec<u8>,
    deadline: Instant,
    who: &Who,
) -> Outcome<Vec<u8>> {
    let ours = ours(node);
    let heard =
        wire.exchange(&ours, deadline, || interrupt::check().ok().map(|()| node.progress()));
    interrupt::check()?;
    heard.map_err(|error| match error {
        BootstrapError::HungUp => who.gone(error),
        BootstrapError::Deadline => Failure::run(format!("{who} did not answer in time")),
        error => Failure::run(format!("{who}: {error}")),
    })
}

/// Splits a message into handles. Each handle is preceded by its length.
fn handles(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut all = vec![];
    while let Some((len, rest)) = bytes.split_first_chunk() {
        let Some((handle, rest)) = rest.split_at_checked(usize::from(u16::from_ne_bytes(*len)))
        else {
            break;
        };
        all.push(handle);
        bytes = rest;
    }
    all
}

fn rail_name(at: usize, provider: &str, interface: &str) -> String {
    format!("rail {at} ({provider} on {interface})")
}

fn gpu(device: DeviceName) -> Outcome<Gpu> {
    match device {
        DeviceName::Host => Ok(Gpu::StandIn),
        device => device.to_string().parse().map_err(|_| {
            Failure::usage(format!(
                "--device {device}: this program was built without support for it; build it with \
                 the feature {}",
                if matches!(device, DeviceName::Hip(_)) { "hip" } else { "cuda" }
            ))
        }),
    }
}

pub fn usual_device() -> DeviceName {
    #[cfg(any(feature = "cuda", feature = "hip"))]
    for api in fishplate_gpu::cuda::Api::ALL {
        if api.devices().is_ok_and(|devices| !devices.is_empty()) {
            return format!("{api}:0")
                .parse()
                .expect("the names of interfaces are prefixes of devices");
        }
    }
    DeviceName::Host
}

fn no_driver(device: DeviceName, error: DeviceError) -> String {
    #[cfg(any(feature = "cuda", feature = "hip"))]
    for api in fishplate_gpu::cuda::Api::ALL {
        if let (true, Err(why)) = (device.to_string().starts_with(&api.to_string()), api.devices())
        {
            return why.to_string();
        }
    }
    let _ = device;
    error.to_string()
}
