//! [`InProcess`] runs both sides of a run in one thread. Either one engine has a loopback rail to
//! itself, or two engines share the simulated fabric.
//!
//! Nothing here waits: while operations are outstanding, the engines make passes in turn. The
//! number of passes without a completion is limited, so an operation that never completes is
//! reported with its seed.

mod faults;
mod ordered;
mod run;
mod verbs;

pub use run::run;

use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use fishplate::{FailoverStorage, Limits, MatchStorage, Storage};
use fishplate_core::engine::protocol::{MatchConfig, Received, Request, Status};
use fishplate_core::engine::{Config, ContextId, Engine, HANDLE_MAX, Issued};
use fishplate_core::error::{AttachError, OpError};
use fishplate_core::mem::{
    LocalAddr, LocalId, PeerId, RailId, Region, RegionKind, RemoteAddr, RemoteId,
};
use fishplate_core::op::Outcome as Ended;
use fishplate_core::rail::{Rail, Rails};

use super::endpoint::Mapped;
use super::job::{Job, SLOTS_AT, Side, Tally};
use super::verbs::{Area, Verbs};
use super::watch::Watch;
use crate::args::RAILS_IN_PROCESS;
use crate::clock::Clock;
use crate::failure::{Failure, Outcome};
use crate::interrupt;

/// Passes without a completion after which an operation counts as hung.
const PATIENCE: u64 = 2_000_000;

/// Each seed allocates its own tables, so there are fewer credits than between two processes.
const MATCHING: MatchConfig =
    MatchConfig { eager: 192, credits: 96, headers: 96, ..MatchConfig::DEFAULT };
const RECEIVES: usize = 1024;

const CONTEXT: ContextId = ContextId(0);

struct Parts {
    storage: Storage<RAILS_IN_PROCESS>,
    matching: MatchStorage<RAILS_IN_PROCESS>,
    failover: Option<FailoverStorage>,
    landing: Mapped,
    buffer: Mapped,
    lens: [usize; 2],
}

impl Parts {
    fn new(config: &Config, job: &Job, sides: usize) -> Outcome<Self> {
        // The tests of order use a slot for each operation in flight.
        let slots = SLOTS_AT + job.window as usize * job.stride();
        let lens = [Job::arena(job.size), Job::buffer(job.size)].map(|len| len.max(slots));
        Ok(Parts {
            storage: Storage::new(config, Self::limits(config)),
            failover: None,
            matching: MatchStorage::new(&MATCHING, 1, RECEIVES, 1),
            landing: Mapped::new(job.size, sides * lens[0])?,
            buffer: Mapped::new(job.size, sides * lens[1])?,
            lens,
        })
    }

    fn limits(config: &Config) -> Limits {
        Limits { peers: 1, locals: 2, remotes: 8, operations: 4 * config.window.max(64) }
    }

    fn keep(&mut self, config: &Config) {
        self.failover = Some(FailoverStorage::new(config, Self::limits(config)));
    }
}

/// Runs with fewer rails use it too: the compiler takes long to generate an engine.
type OwnEngine<'m, R> = Engine<'m, R, RAILS_IN_PROCESS>;

struct One<'m, R: Rail> {
    engine: OwnEngine<'m, R>,
    peer: PeerId,
    /// The landing memory and the buffer memory. Each has an area for each side that the engine
    /// serves.
    memory: [(LocalId, NonNull<u8>); 2],
    lens: [usize; 2],
    /// `None` until the memory is imported.
    theirs: Option<RemoteId>,
}

impl<'m, R: Rail> One<'m, R> {
    /// Creates an engine, and returns the handle of its landing area. `attach` connects its rails.
    fn new(
        parts: &'m mut Parts,
        config: Config,
        rails: usize,
        make: impl FnMut(usize) -> R,
        mut attach: impl FnMut(&mut OwnEngine<'m, R>, RailId, PeerId) -> Result<(), AttachError>,
    ) -> Result<(Self, Vec<u8>), AttachError> {
        let Parts { storage, matching, failover, landing, buffer, lens } = parts;
        let mut list = Rails::new();
        for rail in (0..rails).map(make) {
            list.push(rail).map_err(|_| AttachError::Full("rails: too many in one process"))?;
        }
        let mut engine = storage.engine(config, list)?;
        engine.attach_matching(MATCHING, matching.memory())?;
        if let Some(failover) = failover {
            engine.attach_failover(failover.memory())?;
        }
        let peer = engine.reserve_peer()?;
        for rail in 0..rails {
            attach(&mut engine, RailId(rail as u8), peer)?;
        }
        engine.connect_peer(peer, (1 << rails) - 1)?;
        let mut register = |memory: &Mapped| {
            // SAFETY: the parts, which the engine borrows, own the memory. It is accessed only
            // through raw pointers and atomics.
            let region = unsafe { Region::new(memory.ptr(), memory.len(), RegionKind::Private) };
            engine.register(region).map(|id| (id, memory.ptr()))
        };
        let memory = [register(landing)?, register(buffer)?];
        let mut handle = [0; HANDLE_MAX];
        let written = engine.export(memory[0].0, &mut handle)?;
        Ok((One { engine, peer, memory, lens: *lens, theirs: None }, handle[..written].to_vec()))
    }

    fn import(&mut self, handle: &[u8]) -> Result<(), AttachError> {
        self.theirs = Some(self.engine.import(self.peer, handle)?);
        Ok(())
    }
}

/// Either one engine is its own peer, or two engines are peers.
pub struct InProcess<'m, R: Rail> {
    engines: Vec<One<'m, R>>,
    clock: Clock,
    watch: Watch,
    tally: Tally,
    passes: u64,
}

impl<'m, R: Rail> InProcess<'m, R> {
    fn new(engines: Vec<One<'m, R>>, clock: Clock) -> Self {
        InProcess { engines, clock, watch: Watch::new(clock), tally: Tally::default(), passes: 0 }
    }

    #[inline(always)]
    fn one(&mut self, side: Side) -> &mut One<'m, R> {
        let at = side as usize % self.engines.len();
        &mut self.engines[at]
    }

    /// Not zero if one engine serves both sides.
    #[inline(always)]
    fn start(&self, side: Side, area: Area) -> usize {
        let before = if self.engines.len() == 1 { side as usize } else { 0 };
        before * self.engines[0].lens[area as usize]
    }

    #[inline(always)]
    fn buffer_at(&mut self, side: Side, offset: usize) -> LocalAddr {
        let start = self.start(side, Area::Buffer);
        self.one(side).memory[Area::Buffer as usize].0.at((start + offset) as u64)
    }

    #[inline(always)]
    fn there(&mut self, side: Side, offset: usize) -> Outcome<RemoteAddr> {
        let start = self.start(side.other(), Area::Landing);
        let theirs =
            self.one(side).theirs.ok_or_else(|| Failure::run("the two sides are not connected"))?;
        Ok(theirs.at((start + offset) as u64))
    }

    #[inline(always)]
    fn pass(&mut self) -> Outcome {
        for one in &mut self.engines {
            one.engine.progress();
        }
        self.turn()?;
        self.passes += 1;
        if self.passes > PATIENCE {
            Err(Failure::run("no progress: an operation hangs"))
        } else {
            Ok(())
        }
    }

    #[inline(always)]
    fn until<T>(
        &mut self,
        side: Side,
        what: &str,
        mut done: impl FnMut(&mut One<'m, R>) -> Result<Option<T>, OpError>,
    ) -> Outcome<T> {
        loop {
            match done(self.one(side)) {
                Ok(Some(value)) => {
                    self.passes = 0;
                    return Ok(value);
                }
                Ok(None) | Err(OpError::Again) => self.pass()?,
                Err(error) => {
                    return Err(Failure::run(format!("{what} failed: {error}{}", self.why(side))));
                }
            }
        }
    }

    #[cold]
    fn why(&mut self, side: Side) -> String {
        let One { engine, peer, .. } = self.one(side);
        let faults = (0..RAILS_IN_PROCESS).filter_map(|rail| {
            let fault = engine.rail_error(*peer, RailId(rail as u8)).ok()??;
            Some(format!("; rail {rail}: {fault}"))
        });
        faults.collect()
    }

    /// Makes passes until an operation of `side` completes. Returns the fetched value.
    fn finish(&mut self, side: Side, issued: Issued) -> Outcome<u64> {
        let token = match issued {
            Issued::Done { value } => return Ok(value),
            Issued::Pending(token) => token,
        };
        let end = self.until(side, "an operation", |one| one.engine.test(token))?;
        match end.outcome {
            Ended::Done => Ok(end.value),
            outcome => Err(Failure::run(format!("an operation has {outcome}"))),
        }
    }

    fn status(&mut self, side: Side, request: Request) -> Outcome<Status> {
        let status = self.until(side, "a receive", |one| one.engine.test_recv(request))?;
        match status.outcome {
            Received::Ok => Ok(status),
            outcome => Err(Failure::run(format!("a receive did not succeed: {outcome}"))),
        }
    }

    fn forget_ends(&mut self, side: Side) {
        while self.one(side).engine.next_completion().is_some() {}
    }

    /// Fails if the time is up or the user has pressed Ctrl-C. First lets another thread run.
    #[cold]
    #[inline(never)]
    fn check(&mut self) -> Outcome {
        std::thread::yield_now();
        interrupt::check()?;
        match self.watch.is_up() {
            true => Err(Failure::run("the run did not complete in time; use a longer --timeout")),
            false => Ok(()),
        }
    }

    #[inline(always)]
    fn landing_word(&self, side: Side, offset: usize) -> &AtomicU64 {
        let (start, len) = self.area(side, Area::Landing);
        assert!(offset.is_multiple_of(8) && offset + 8 <= len);
        // SAFETY: the word is inside the area, as just checked. It is aligned, because areas begin
        // at a page. The area stays mapped as long as the engines exist. Words are accessed only
        // atomically.
        unsafe { start.add(offset).cast::<AtomicU64>().as_ref() }
    }
}
