//! Two processes over shared memory: their rail, and their link's socket, over which they talk.

use std::time::{Duration, Instant};

use fishplate_core::engine::{Asleep, Config, HANDLE_MAX, Waiter};
use fishplate_core::mem::RailId;
use fishplate_shm::{HandshakeError, Link, ShmConfig, ShmRail};
use fishplate_sys::LinuxHost;

use super::leg::Leg;
use super::meet::{self, Second};
use super::seat::{Buffer, MATCHING, RECEIVES, Seat};
use super::table::{self, Talk};
use super::watch::Watch;
use super::who::Who;
use crate::args::{Meeting, PeerArgs, Plan, Test, Transport};
use crate::clock::Clock;
use crate::cpu::{self, Pinned};
use crate::failure::{Failure, Outcome};
use crate::floor::{PAD_LEN, Pad};
use crate::room;

use fishplate::{Limits, MatchStorage, Storage};

/// The pad of the floor comes first in the common segment, then the arena.
const ARENA_AT: usize = 4096;
const _: () = assert!(PAD_LEN <= ARENA_AT);

type Rail = ShmRail<LinuxHost>;

/// Runs a plan as the side that its meeting says.
pub fn run(plan: &Plan) -> Outcome {
    // What both have in common, and what each has of its own.
    let sides = if plan.meeting == Meeting::Spawn { 2 } else { 1 };
    let arena = Leg::arena(plan.region);
    room::demand(plan.region, 2 * arena, (1 + sides) * arena)?;
    match &plan.meeting {
        Meeting::Listen(at) => {
            let rail = rail(plan.region)?;
            let link = meet::listen(plan, at, &rail.profile())?;
            follow(rail, link, plan.region, plan.timeout, Some(plan.test))
        }
        Meeting::Connect(at) => {
            let _pinned = pin_first(plan)?;
            let rail = rail(plan.region)?;
            let link = meet::find(at, plan.region, plan.timeout, &rail.profile())?;
            lead(plan, rail, link, None)
        }
        Meeting::Spawn => {
            // The second process starts before this one is pinned,
            // so that it does not inherit that.
            let rail = rail(plan.region)?;
            let (link, second) = meet::spawn(plan, &rail.profile(), &[])?;
            let _pinned = pin_first(plan)?;
            lead(plan, rail, link, Some(second))
        }
    }
}

/// The process that [`meet::spawn`] starts.
pub fn answer(args: &PeerArgs) -> Outcome {
    let rail = rail(args.region)?;
    let link = meet::answer(args, &rail.profile())?;
    follow(rail, link, args.region, args.timeout, None)
}

fn pin_first(plan: &Plan) -> Outcome<Option<Pinned>> {
    plan.places.cpus.map(|(first, _)| cpu::pin(first)).transpose()
}

fn rail(region: usize) -> Outcome<Rail> {
    // The rail itself fences towards peers that sleep without membarrier.
    let host = LinuxHost::shared().peer_uses_membarrier(true);
    let config = ShmConfig {
        max_peers: 1,
        common_len: ARENA_AT + Leg::arena(region),
        membarrier: host.sleeper_uses_membarrier(),
        ..ShmConfig::default()
    };
    ShmRail::new(host, config).map_err(|error| room::attach_failed("the rail", error))
}

/// What a table stands on.
struct Ground {
    storage: Storage<1>,
    matching: MatchStorage<1>,
    buffer: Buffer,
    host: LinuxHost,
    never: Asleep,
}

const CONFIG: Config = Config { window: 256, ..Config::DEFAULT };

impl Ground {
    fn new(region: usize) -> Outcome<Self> {
        let limits = Limits { peers: 1, locals: 2, remotes: 8, operations: 1024 };
        Ok(Ground {
            storage: Storage::new(&CONFIG, limits),
            matching: MatchStorage::new(&MATCHING, 1, RECEIVES, 1),
            buffer: Buffer::new(region, Leg::arena(region))?,
            host: LinuxHost::shared(),
            never: Asleep::new(),
        })
    }

    fn set(&mut self, rail: Rail, link: Link, region: usize, timeout: u64) -> Outcome<Table<'_>> {
        let refused = |error| room::attach_failed("the connection", error);
        let pid = link.pid();
        let common = link.common().map(|(base, _)| base);
        let base = common.ok_or_else(|| Failure::run("the two processes have no memory in common"))?;
        let mut engine = self.storage.engine(CONFIG, [rail]).map_err(refused)?;
        engine.attach_matching(MATCHING, self.matching.memory()).map_err(refused)?;
        let peer = engine.reserve_peer().map_err(refused)?;
        // SAFETY: both processes touch the common segment only through atomics, raw copies and the
        // engine. The engine and the table, which use it, are dropped together, and the peer is not
        // detached before.
        let region = unsafe { link.common_region(peer.peer(), ARENA_AT, Leg::arena(region)) }
            .map_err(|error| Failure::run(format!("the common segment is too small: {error}")))?;
        let mut rail = engine.rail_mut(RailId(0)).ok_or_else(|| Failure::run("the engine has no rail"))?;
        rail.attach(peer.peer(), link).map_err(refused)?;
        engine.connect_peer(peer, 1).map_err(refused)?;
        let ours = engine.register(region).map_err(refused)?;
        // SAFETY: the buffer belongs to the engine memory's owner, and so outlives the engine.
        let buffer = engine.register(unsafe { self.buffer.region() }).map_err(refused)?;
        let mut handle = [0; HANDLE_MAX];
        let len = engine.export(ours, &mut handle).map_err(refused)?;
        let deadline = Instant::now() + Duration::from_secs(timeout);
        let mut rail = engine.rail_mut(RailId(0)).ok_or_else(|| Failure::run("the engine has no rail"))?;
        let theirs = rail
            .exchange(peer.peer(), &handle[..len], deadline)
            .map_err(|error| Failure::lost(&format!("the other process (pid {pid})"), error))?;
        let bell = engine.rail(RailId(0)).map(Rail::bell);
        let theirs = engine.import(peer, &theirs).map_err(refused)?;
        // SAFETY: page-aligned, at least ARENA_AT bytes, mapped until the peer is detached;
        // nothing else is there.
        let pad = unsafe { Pad::new(base) };
        // SAFETY: the segment is longer than ARENA_AT.
        let arena = unsafe { base.add(ARENA_AT) };
        let clock = Clock::calibrate();
        Ok(Table {
            seat: Seat {
                engine,
                waiter: Waiter::awake(&self.host, &self.never),
                bell,
                peer,
                ours,
                arena,
                theirs,
                there: theirs,
                landing: arena,
                on_device: false,
                mirror: None,
                buffer,
                bytes: self.buffer.ptr(),
                clock,
                watch: Watch::new(clock),
                crowded: false,
                name: Who::new(format!("the other process (pid {pid})"), vec![]),
            },
            transport: Transport::Shm,
            talk: Socket,
            pad: Some(pad),
            timeout: Duration::from_secs(timeout),
            notes: vec![],
        })
    }
}

/// Talks over the link of the rail itself.
struct Socket;

impl Talk<Rail, 1> for Socket {
    fn exchange(&mut self, seat: &mut Seat<'_, Rail, 1>, word: &[u8], deadline: Instant) -> Outcome<Vec<u8>> {
        let peer = seat.peer.peer();
        let mut rail =
            seat.engine.rail_mut(RailId(0)).ok_or_else(|| Failure::run("the engine has no rail"))?;
        rail.exchange(peer, word, deadline).map_err(|error| match error {
            HandshakeError::Deadline => Failure::run(format!("{} did not answer in time", seat.name)),
            error => Failure::lost(&seat.name.to_string(), error),
        })
    }
}

type Table<'m> = table::Table<'m, Rail, 1, Socket>;

fn lead(plan: &Plan, rail: Rail, link: Link, second: Option<Second>) -> Outcome {
    let mut ground = Ground::new(plan.region)?;
    table::lead(plan, ground.set(rail, link, plan.region, plan.timeout), second)
}

fn follow(rail: Rail, link: Link, region: usize, timeout: u64, expected: Option<Test>) -> Outcome {
    let mut ground = Ground::new(region)?;
    ground.set(rail, link, region, timeout)?.follow(region, expected)
}
