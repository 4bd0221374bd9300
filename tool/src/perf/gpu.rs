//! Two processes with devices: payloads are in their memory, signals in memory of the processor
//! that both have in common. `device` is what was chosen, `mirror` lets the processor verify what
//! is there.

mod device;
mod mirror;

use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fishplate_core::error::AttachError;
use fishplate_core::mem::{RailId, Region, RegionKind};
use fishplate_gpu::{AnyDevice, Device, DevicePtr, GpuConfig, GpuRail, GpuStats, Refused};
use fishplate_shm::Link;
use fishplate_sys::LinuxHost;

use super::leg::Leg;
use super::meet;
use super::seat::{self, Base, Seat};
use super::table::{self, Talk};
use super::who::Who;
use crate::args::{DeviceName, IpcPath, Meeting, PeerArgs, Plan, Transport, name};
use crate::clock::Clock;
use crate::failure::{Failure, Outcome};
use crate::report::{Moved, Row};
use crate::room;

use mirror::Copies;

/// Memory of the signals, which both have in common.
const SIGNALS: usize = 4096;

/// Where a side says that it wants to talk, the leader first. The tests use the words before.
const TALK: [usize; 2] = [2048, 2048 + 128];

/// How long both sides take memory back from each other, at the end.
const PART: Duration = Duration::from_secs(5);

type Rail = GpuRail<AnyDevice, LinuxHost>;

/// What one side brings.
struct Side {
    leads: bool,
    device: DeviceName,
    path: IpcPath,
    region: usize,
    timeout: u64,
}

/// Runs a plan as the side that its meeting says.
pub fn run(plan: &Plan) -> Outcome {
    let sides = if plan.meeting == Meeting::Spawn { 2 } else { 1 };
    let own = 2 * Leg::arena(plan.region);
    room::demand(plan.region, own, sides * own)?;
    let first = plan.devices.first().copied().unwrap_or_else(device::usual);
    let second = plan.devices.get(1).copied().unwrap_or(first);
    let plan = &Plan { devices: vec![first, second], ..plan.clone() };
    let leads = !matches!(plan.meeting, Meeting::Listen(_));
    let side = Side { leads, device: first, path: plan.ipc_path, region: plan.region, timeout: plan.timeout };
    let mut base = Base::new(meet::SHARING, LinuxHost::shared());
    let rail = side.rail()?;
    match &plan.meeting {
        Meeting::Listen(at) => {
            let link = meet::listen(plan, at, rail.profile().profile())?;
            side.set(&mut base, rail, link)?.follow(plan.region, Some(plan.test))
        }
        Meeting::Connect(at) => {
            let _pinned = plan.places.pin_first()?;
            let link = meet::find(at, plan.region, plan.timeout, rail.profile().profile())?;
            table::lead(plan, side.set(&mut base, rail, link), None)
        }
        Meeting::Spawn => {
            // The second process starts before this one is pinned,
            // so that it does not inherit that.
            let more =
                ["--transport", "gpu", "--device", &second.to_string(), "--ipc-path", &name(plan.ipc_path)]
                    .map(str::to_owned);
            let (link, second) = meet::spawn(plan, rail.profile().profile(), &more)?;
            let _pinned = plan.places.pin_first()?;
            table::lead(plan, side.set(&mut base, rail, link), Some(second))
        }
    }
}

/// The process that [`meet::spawn`] starts.
pub fn answer(args: &PeerArgs) -> Outcome {
    let side = Side {
        leads: false,
        device: args.device,
        path: args.ipc_path,
        region: args.region,
        timeout: args.timeout,
    };
    let mut base = Base::new(meet::SHARING, LinuxHost::shared());
    let rail = side.rail()?;
    let link = meet::answer(args, rail.profile().profile())?;
    side.set(&mut base, rail, link)?.follow(args.region, None)
}

impl Side {
    fn rail(&self) -> Outcome<Rail> {
        let (host, shm) = meet::sharing(SIGNALS);
        let config = GpuConfig { force_relay: self.path == IpcPath::Relay, ..GpuConfig::default() };
        GpuRail::new(device::open(self.device)?, host, shm, config)
            .map_err(|error| room::attach_failed("the rail", error))
    }

    /// Attaches the other side, and exchanges what both may write to.
    fn set<'m>(&self, base: &'m mut Base<1>, mut rail: Rail, link: Link) -> Outcome<Table<'m>> {
        let refused = |error| room::attach_failed("the connection", error);
        let deadline = Instant::now() + Duration::from_secs(self.timeout);
        let pid = link.pid();
        let who = format!("the other process (pid {pid})");
        let common = link.common().map(|(base, _)| base);
        let common = common.ok_or_else(|| Failure::run("the two processes have no memory in common"))?;
        let link =
            rail.profile().agree(link, deadline).map_err(|error| Failure::run(format!("{who}: {error}")))?;
        let (told_by_words, bounces) = link.active();
        let len = Leg::arena(self.region);
        let memory = (take(&mut rail, self, len)?, take(&mut rail, self, len)?);
        let (landing, buffer, mirror) = see(self, memory, len)?;
        let stats = rail.stats();

        let (mut engine, waiter) = base.engine([rail])?;
        let peer = engine.reserve_peer().map_err(refused)?;
        // SAFETY: both processes touch the common segment only through atomics, raw copies and the
        // engine. The engine and the table, which use it, are dropped together, and the peer is not
        // detached before.
        let signals = unsafe { link.link().common_region(peer.peer(), 0, SIGNALS) }
            .map_err(|error| Failure::run(format!("the common segment is too small: {error}")))?;
        let mut rail = engine.rail_mut(RailId(0)).ok_or_else(no_rail)?;
        rail.attach(peer.peer(), link).map_err(refused)?;
        engine.connect_peer(peer, 1).map_err(refused)?;
        let ours = engine.register(signals).map_err(refused)?;
        let ordinal = engine.rail(RailId(0)).ok_or_else(no_rail)?.device().caps().ordinal;
        let mut register = |at: DevicePtr| {
            let ptr = NonNull::new(at.0 as *mut u8).ok_or_else(|| refused(AttachError::BadRange))?;
            // SAFETY: memory of the device, which the rail gives back after the engine; nobody but
            // the engine and the mirror uses it.
            let region = unsafe { Region::new(ptr, len, RegionKind::Device { ordinal }) };
            engine.register(region).map_err(|error| {
                let why = engine.rail(RailId(0)).and_then(|rail| rail.why());
                match why {
                    Some(Refused::Export(why)) => {
                        Failure::run(format!("--device {}: cannot export: {why}", self.device))
                    }
                    _ => refused(error),
                }
            })
        };
        let (there, from) = (register(memory.0)?, register(memory.1)?);

        // Signals, then payloads; and how much there is.
        let mut told = (self.region as u64).to_ne_bytes().to_vec();
        for region in [ours, there] {
            let handle = seat::handle(&engine, region).map_err(refused)?;
            told.push(handle.len() as u8);
            told.extend_from_slice(&handle);
        }
        let mut rail = engine.rail_mut(RailId(0)).ok_or_else(no_rail)?;
        let heard =
            rail.exchange(peer.peer(), &told, deadline).map_err(|error| Failure::lost(&who, error))?;
        let (region, handles) = parts(&heard).ok_or_else(|| {
            Failure::run(format!("{who} said what was not understood: run the same build on both sides"))
        })?;
        if region != self.region as u64 {
            return Err(Failure::run(format!(
                "{who} was started with another --region, of {region} bytes: give both the same"
            )));
        }
        let theirs = engine.import(peer, handles[0]).map_err(refused)?;
        let imported = engine.import(peer, handles[1]);
        let there = imported.map_err(|error| match engine.rail(RailId(0)).and_then(|rail| rail.why()) {
            Some(Refused::Import(why)) => Failure::run(format!("cannot open the memory of {who}: {why}")),
            _ => refused(error),
        })?;
        let path = match (self.path, bounces) {
            (IpcPath::Direct, _) => "direct, or through bounce slots where devices do not reach each other",
            (IpcPath::Relay, true) => "through bounce slots",
            (IpcPath::Relay, false) => return Err(Failure::run("both sides must have bounce slots")),
        };
        let words = if told_by_words { "done words" } else { "records" };
        let (driven, name) = ((engine, waiter), Who::new(who, vec![]));
        let (signals, from) = ((ours, common), (from, buffer));
        Ok(Table {
            seat: Seat {
                there,
                landing,
                on_device: true,
                mirror: mirror.map(|mirror| Box::new(mirror) as Box<_>),
                ..Seat::new(driven, peer, signals, theirs, from, Clock::calibrate(), name)
            },
            transport: Transport::Gpu,
            talk: Aside { memory, stats, leads: self.leads, words: 0 },
            // What two processors need for each other says nothing of what a device needs.
            pad: None,
            timeout: Duration::from_secs(self.timeout),
            notes: vec![format!("payloads in {}, {path}; writes are told by {words}", self.device)],
        })
    }
}

#[cold]
fn no_rail() -> Failure {
    Failure::run("the engine has no rail")
}

fn take(rail: &mut Rail, side: &Side, len: usize) -> Outcome<DevicePtr> {
    rail.alloc(len as u64).map_err(|error| {
        Failure::run(format!(
            "--device {}: {len} bytes for payloads: {error}; choose a smaller --region",
            side.device
        ))
    })
}

/// Where the processor sees the two memories, and what it sees them by, unless it is themselves.
fn see(
    side: &Side,
    (landing, buffer): (DevicePtr, DevicePtr),
    len: usize,
) -> Outcome<(NonNull<u8>, NonNull<u8>, Option<Copies>)> {
    let views = NonNull::new(landing.0 as *mut u8).zip(NonNull::new(buffer.0 as *mut u8));
    match (side.device, views) {
        (DeviceName::Host, Some((landing, buffer))) => Ok((landing, buffer, None)),
        _ => {
            let copies = Copies::new(device::open(side.device)?, landing, buffer, len)?;
            let (landing, buffer) = copies.views();
            Ok((landing, buffer, Some(copies)))
        }
    }
}

/// The region's size and the two handles.
fn parts(heard: &[u8]) -> Option<(u64, [&[u8]; 2])> {
    let (region, mut rest) = heard.split_first_chunk()?;
    let mut handles = [&[][..]; 2];
    for handle in &mut handles {
        let (len, more) = rest.split_first()?;
        (*handle, rest) = more.split_at_checked(usize::from(*len))?;
    }
    rest.is_empty().then_some((u64::from_ne_bytes(*region), handles))
}

/// Talks over the link of the rail itself.
struct Aside {
    memory: (DevicePtr, DevicePtr),
    /// When the last row began.
    stats: GpuStats,
    /// Whether this side leads.
    leads: bool,
    /// How many words were exchanged.
    words: u64,
}

impl Talk<Rail, 1> for Aside {
    /// Before either waits for the other's word, which makes no progress,
    /// both have seen all of each other's operations end.
    fn exchange(&mut self, seat: &mut Seat<'_, Rail, 1>, word: &[u8], deadline: Instant) -> Outcome<Vec<u8>> {
        let left = deadline.saturating_duration_since(Instant::now()).as_nanos();
        seat.watch.set(u64::try_from(left).unwrap_or(u64::MAX));
        self.words += 1;
        seat.quiet()?;
        let [ours, theirs] = if self.leads { TALK } else { [TALK[1], TALK[0]] };
        // Both sides have these words in common, and nobody else uses them.
        seat.set_word(ours, self.words);
        while seat.word(theirs).load(Ordering::Acquire) < self.words {
            if seat.engine.progress() == 0 {
                seat.idle()?;
            }
        }
        let peer = seat.peer.peer();
        let mut rail = seat.engine.rail_mut(RailId(0)).ok_or_else(no_rail)?;
        rail.exchange(peer, word, deadline).map_err(|error| seat.name.fell_silent(error))
    }

    fn fill_in(&mut self, seat: &mut Seat<'_, Rail, 1>, row: &mut Row) {
        let Some(rail) = seat.engine.rail(RailId(0)) else { return };
        let (now, before) = (rail.stats(), self.stats);
        row.moved = Some(Moved {
            direct: now.direct - before.direct,
            relayed: now.relayed - before.relayed,
            stored: now.stored - before.stored,
        });
        self.stats = now;
    }

    /// Takes this side's memory back before it is freed, and gives the other side's back.
    fn part(&mut self, seat: &mut Seat<'_, Rail, 1>) -> Outcome {
        let refused = |error| room::attach_failed("the end", error);
        seat.engine.release(seat.there).map_err(refused)?;
        seat.engine.deregister(seat.buffer).map_err(refused)?;
        let deadline = Instant::now() + PART;
        let mut rail = seat.engine.rail_mut(RailId(0)).ok_or_else(no_rail)?;
        for memory in [self.memory.0, self.memory.1] {
            rail.revoke(memory, deadline)
                .map_err(|error| Failure::run(format!("{} does not give memory back: {error}", seat.name)))?;
        }
        match rail.close_revoked(deadline) {
            true => Ok(()),
            false => Err(Failure::run(format!("{} does not take its memory back", seat.name))),
        }
    }
}

type Table<'m> = table::Table<'m, Rail, 1, Aside>;
