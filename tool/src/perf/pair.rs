//! Two processes over shared memory: their rail, and their link's socket, over which they talk.

use std::time::{Duration, Instant};

use fishplate_core::mem::RailId;
use fishplate_shm::{Link, ShmRail};
use fishplate_sys::LinuxHost;

use super::leg::Leg;
use super::meet::{self, Second};
use super::seat::{self, Base, Buffer, Seat};
use super::table::{self, Talk};
use super::who::Who;
use crate::args::{Meeting, PeerArgs, Plan, Test, Transport};
use crate::clock::Clock;
use crate::failure::{Failure, Outcome};
use crate::floor::{PAD_LEN, Pad};
use crate::room;

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
            let _pinned = plan.places.pin_first()?;
            let rail = rail(plan.region)?;
            let link = meet::find(at, plan.region, plan.timeout, &rail.profile())?;
            lead(plan, rail, link, None)
        }
        Meeting::Spawn => {
            // The second process starts before this one is pinned,
            // so that it does not inherit that.
            let rail = rail(plan.region)?;
            let (link, second) = meet::spawn(plan, &rail.profile(), &[])?;
            let _pinned = plan.places.pin_first()?;
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

fn rail(region: usize) -> Outcome<Rail> {
    let (host, config) = meet::sharing(ARENA_AT + Leg::arena(region));
    ShmRail::new(host, config).map_err(|error| room::attach_failed("the rail", error))
}

/// What a table stands on.
struct Ground {
    base: Base<1>,
    buffer: Buffer,
}

impl Ground {
    fn new(region: usize) -> Outcome<Self> {
        Ok(Ground {
            base: Base::new(meet::SHARING, LinuxHost::shared()),
            buffer: Buffer::new(region, Leg::arena(region))?,
        })
    }

    fn set(&mut self, rail: Rail, link: Link, region: usize, timeout: u64) -> Outcome<Table<'_>> {
        let refused = |error| room::attach_failed("the connection", error);
        let pid = link.pid();
        let common = link.common().map(|(base, _)| base);
        let base = common.ok_or_else(|| Failure::run("the two processes have no memory in common"))?;
        let (mut engine, waiter) = self.base.engine([rail])?;
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
        let handle = seat::handle(&engine, ours).map_err(refused)?;
        let deadline = Instant::now() + Duration::from_secs(timeout);
        let mut rail = engine.rail_mut(RailId(0)).ok_or_else(|| Failure::run("the engine has no rail"))?;
        let theirs = rail
            .exchange(peer.peer(), &handle, deadline)
            .map_err(|error| Failure::lost(&format!("the other process (pid {pid})"), error))?;
        let bell = engine.rail(RailId(0)).map(Rail::wait_object);
        let theirs = engine.import(peer, &theirs).map_err(refused)?;
        // SAFETY: page-aligned, at least ARENA_AT bytes, mapped until the peer is detached;
        // nothing else is there.
        let pad = unsafe { Pad::new(base) };
        // SAFETY: the segment is longer than ARENA_AT.
        let arena = unsafe { base.add(ARENA_AT) };
        let (driven, name) = ((engine, waiter), Who::new(format!("the other process (pid {pid})"), vec![]));
        let (arena, buffer) = ((ours, arena), (buffer, self.buffer.ptr()));
        Ok(Table {
            seat: Seat { bell, ..Seat::new(driven, peer, arena, theirs, buffer, Clock::calibrate(), name) },
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
        rail.exchange(peer, word, deadline).map_err(|error| seat.name.fell_silent(error))
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
