//! Two processes over libfabric, on one host or two: rails of the providers and interfaces asked
//! for, and a TCP connection over which the two meet, exchange what their rails need, and talk.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use fishplate::bootstrap::{self, Agreement, BootstrapError, Card, Listener, RailCard, Wire};
use fishplate::config::Settings;
use fishplate::guard::Guard;
use fishplate::rails::{self, OpenRail, RailsError, Wanted};
use fishplate::topology::{Anchor, Machine};
use fishplate_core::engine::{Config, Joint};
use fishplate_core::error::{AttachError, PeerError};
use fishplate_core::mem::RailId;
use fishplate_sys::LinuxHost;
use fishplate_sys::fabric::FabricRail;

use super::leg::Leg;
use super::meet::{self, Refusals, Second};
use super::seat::{self, Base, Buffer, Seat};
use super::table::{self, Talk};
use super::who::Who;
use crate::args::{Meeting, PeerArgs, Plan, Transport, name};
use crate::clock::{Clock, monotonic_ns};
use crate::failure::{Failure, Outcome};
use crate::room;
use crate::variables;

/// How long a listener may take to appear.
const APPEAR: u64 = 5;

/// How often a side that waits for words looks whether the other still lives, in nanoseconds.
const LOOK_NS: u64 = 10_000_000;

/// How long a side that lost the other waits for its last word, and to learn whether its process is
/// gone.
const GRACE: Duration = Duration::from_millis(500);

type Rail = Guard<FabricRail>;

/// Runs a plan as the side that its meeting says.
pub fn run(plan: &Plan) -> Outcome {
    let sides = if plan.meeting == Meeting::Spawn { 2 } else { 1 };
    let own = 2 * Leg::arena(plan.region);
    room::demand(plan.region, own, sides * own)?;
    match plan.rails {
        1 => side::<1>(plan),
        2 => side::<2>(plan),
        3 => side::<3>(plan),
        _ => side::<4>(plan),
    }
}

/// The process that the leader starts.
pub fn answer(args: &PeerArgs) -> Outcome {
    let mut settings = variables::for_run(args.timeout)?;
    settings.providers.clone_from(&args.provider);
    settings.interfaces.clone_from(&args.interface);
    match args.rails {
        1 => follow_there::<1>(args, &settings),
        2 => follow_there::<2>(args, &settings),
        3 => follow_there::<3>(args, &settings),
        _ => follow_there::<4>(args, &settings),
    }
}

fn follow_there<const RAILS: usize>(args: &PeerArgs, settings: &Settings) -> Outcome {
    let socket = meet::inherited(args.socket)?;
    let mut ground = Ground::<RAILS>::new(settings, args.region)?;
    let met = bootstrap::over(socket, &ground.card, meet::soon(args.timeout))
        .map_err(|error| Failure::run(format!("the other process: {error}")))?;
    ground.lay(met, args.timeout, "the other process")?.follow(args.region, None)
}

fn side<const RAILS: usize>(plan: &Plan) -> Outcome {
    match &plan.meeting {
        Meeting::Listen(at) => {
            let mut ground = Ground::<RAILS>::new(&plan.settings, plan.region)?;
            let met = listen(plan, &at.to_string_lossy(), &ground.card)?;
            let who = format!("the process at {}", met.0.peer());
            ground.lay(met, plan.timeout, &who)?.follow(plan.region, Some(plan.test))
        }
        Meeting::Connect(at) => {
            let _pinned = plan.places.pin_first()?;
            let at = at.to_string_lossy();
            let mut ground = Ground::<RAILS>::new(&plan.settings, plan.region)?;
            let met = find(&at, &ground.card, plan.timeout)?;
            table::lead(plan, ground.lay(met, plan.timeout, &format!("the process at {at}")), None)
        }
        Meeting::Spawn => {
            let mut ground = Ground::<RAILS>::new(&plan.settings, plan.region)?;
            // The second process starts before this one is pinned,
            // so that it does not inherit that.
            let (met, second) = spawn::<RAILS>(plan, &ground)?;
            let _pinned = plan.places.pin_first()?;
            let who = format!("the other process (pid {})", second.id());
            table::lead(plan, ground.lay(met, plan.timeout, &who), Some(second))
        }
    }
}

/// What a table stands on. The rails are taken out when it is laid.
struct Ground<const RAILS: usize> {
    rails: Option<[OpenRail; RAILS]>,
    card: Card,
    base: Base<RAILS>,
    arena: Buffer,
    buffer: Buffer,
}

impl<const RAILS: usize> Ground<RAILS> {
    fn new(settings: &Settings, region: usize) -> Outcome<Self> {
        let rails = open::<RAILS>(settings)?;
        let config = settings.engine(0).map_err(|error| Failure::usage(error.to_string()))?;
        let mut cards = vec![];
        for rail in &rails {
            let address = rail.rail.inner().address();
            let address = address.map_err(|error| Failure::run(format!("{}: {error}", rail.interface)))?;
            let OpenRail { provider, interface, fabric, mbit, .. } = rail;
            let (provider, interface, fabric) = (provider.clone(), interface.clone(), fabric.clone());
            cards.push(RailCard { provider, interface, fabric, address, mbit: *mbit });
        }
        let card = Card::new(&config, region as u64, cards);
        let config = Config { seed: card.id, ..config };
        Ok(Ground {
            rails: Some(rails),
            card,
            base: Base::new(config, LinuxHost::private()),
            arena: Buffer::new(region, Leg::arena(region))?,
            buffer: Buffer::new(region, Leg::arena(region))?,
        })
    }

    /// Attaches the other side's rails to ours, and exchanges what both may write to.
    fn lay(
        &mut self,
        (mut wire, theirs): (Wire, Card),
        timeout: u64,
        who: &str,
    ) -> Outcome<table::Table<'_, Rail, RAILS, Aside>> {
        let failed = |error| room::attach_failed("the connection", error);
        let agreement = self.card.agree(&theirs).map_err(|error| Failure::run(format!("{who}: {error}")))?;
        let notes = notes(&self.card, &theirs, &agreement);
        let names = self.card.rails.iter().enumerate().map(|(at, rail)| rail_name(at, rail)).collect();
        let name = Who::new(who, names);
        let rails = self.rails.take().ok_or_else(|| Failure::run("the rails are in use"))?;
        let (mut engine, waiter) = self.base.engine(rails.map(|rail| rail.rail))?;
        let peer = engine.reserve_peer().map_err(failed)?;
        for (at, rail) in agreement.in_our_order(&theirs.rails).into_iter().enumerate() {
            let lifeline = wire.lifeline().map_err(|error| Failure::run(format!("{who}: {error}")))?;
            let Some(mut guard) = engine.rail_mut(RailId(at as u8)) else { continue };
            guard.inner_mut().attach(peer.peer(), &rail.address).map_err(|error| {
                Failure::run(format!(
                    "{}: cannot reach {} of {who}: {error}",
                    rail_name(at, &self.card.rails[at]),
                    rail_name(usize::from(agreement.pairing.theirs[at]), rail)
                ))
            })?;
            guard.watch(peer.peer(), Some(lifeline));
        }
        let joint = |(at, &theirs)| Joint { ours: RailId(at as u8), theirs, max_message: usize::MAX };
        let joints: Vec<_> = agreement.pairing.theirs.iter().enumerate().map(joint).collect();
        engine.join_peer(peer, &joints, None).map_err(failed)?;
        // SAFETY: the ground outlives the engine, which borrows it.
        let ours = engine.register(unsafe { self.arena.region() }).map_err(failed)?;
        // SAFETY: as above.
        let buffer = engine.register(unsafe { self.buffer.region() }).map_err(failed)?;
        let handle = seat::handle(&engine, ours).map_err(failed)?;
        // Who has the other's handle knows that the other has attached.
        let deadline = Instant::now() + Duration::from_secs(timeout);
        let theirs = wire.exchange(&handle, deadline, || Some(engine.progress()));
        let theirs = theirs.map_err(|error| match error {
            BootstrapError::HungUp => name.gone(error),
            error => Failure::run(format!("{who}: {error}")),
        })?;
        let theirs = engine
            .import(peer, &theirs)
            .map_err(|error| Failure::run(format!("{who}: {}", handle_refused(error))))?;
        let (arena, buffer) = ((ours, self.arena.ptr()), (buffer, self.buffer.ptr()));
        Ok(table::Table {
            seat: Seat::new((engine, waiter), peer, arena, theirs, buffer, Clock::calibrate(), name),
            transport: Transport::Fabric,
            talk: Aside { wire },
            pad: None,
            timeout: Duration::from_secs(timeout),
            notes,
        })
    }
}

fn handle_refused(error: AttachError) -> String {
    match error {
        AttachError::Version { theirs, ours } => format!(
            "its region's handle is of version {theirs}, and this program reads {ours}: run the same build on both sides"
        ),
        error => format!("its region's handle is no use: {error}"),
    }
}

/// Opens the rails near this process.
fn open<const RAILS: usize>(settings: &Settings) -> Outcome<[OpenRail; RAILS]> {
    // SAFETY: a library is loaded only from where the linker looks, or where the user of this
    // program says that a libfabric is.
    let library = unsafe { rails::load(settings) }.map_err(|error| refused(RailsError::Load(error)))?;
    let machine = Machine::here().unwrap_or_default();
    let anchor = Anchor::here();
    let wanted = Wanted { settings, limits: seat::LIMITS, anchor, count: Some(RAILS), devices: false };
    let rails = rails::open(wanted, library, &machine).map_err(refused)?;
    rails.try_into().map_err(|_| Failure::run("fewer rails were opened than asked for"))
}

fn refused(error: RailsError) -> Failure {
    match error {
        RailsError::Setup { .. } => Failure::run(error.to_string()),
        error => Failure::usage(format!("--transport fabric: {error}")),
    }
}

fn rail_name(at: usize, rail: &RailCard) -> String {
    format!("rail {at} ({} on {})", rail.provider, rail.interface)
}

/// Which rail talks to which, and which pairs are uneven.
fn notes(ours: &Card, theirs: &Card, agreement: &Agreement) -> Vec<String> {
    let mut notes = vec![];
    for (at, (rail, other)) in ours.rails.iter().zip(agreement.in_our_order(&theirs.rails)).enumerate() {
        let mut note = rail_name(at, rail);
        if rail.mbit > 0 {
            note += &format!(", {} Mbit/s", rail.mbit);
        }
        note += &format!(", to rail {} on {}", agreement.pairing.theirs[at], other.interface);
        if agreement.pairing.uneven.iter().any(|&(uneven, ..)| usize::from(uneven) == at) {
            note += &format!(" with {} Mbit/s: the slower of the two counts", other.mbit);
        }
        notes.push(note);
    }
    notes
}

/// Talks over the connection of the bootstrap.
struct Aside {
    wire: Wire,
}

impl Aside {
    /// Says of a lost side whether its process still lives.
    fn fate(&mut self, failure: Failure) -> Failure {
        let Failure::Lost(message) = failure else {
            return failure;
        };
        let until = Instant::now() + GRACE;
        while self.wire.is_open() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        Failure::Lost(match self.wire.is_open() {
            true => format!("{message}; its process still lives"),
            false => format!("{message}; its process has ended"),
        })
    }
}

impl<const RAILS: usize> Talk<Rail, RAILS> for Aside {
    fn exchange(
        &mut self,
        seat: &mut Seat<'_, Rail, RAILS>,
        word: &[u8],
        deadline: Instant,
    ) -> Outcome<Vec<u8>> {
        let Seat { engine, peer, name, .. } = seat;
        let (mut looked, mut lost) = (monotonic_ns(), None);
        let heard = self.wire.exchange(word, deadline, || {
            let events = engine.progress();
            let now = monotonic_ns();
            if now.wrapping_sub(looked) >= LOOK_NS {
                looked = now;
                engine.check_peers();
                let why = engine.peer_error(*peer).unwrap_or(Some(PeerError::Closed));
                lost = lost.or(why.map(|why| (why, Instant::now() + GRACE)));
            }
            // A side that has said its last word closes its rails, and that may be seen before the
            // word has come.
            match lost {
                Some((_, until)) if Instant::now() >= until => None,
                _ => Some(events),
            }
        });
        heard.map_err(|error| match (error, lost) {
            (BootstrapError::Stopped | BootstrapError::HungUp, Some((why, _))) => self.fate(name.lost(why)),
            (BootstrapError::Deadline, _) => Failure::run(format!("{name} did not answer in time")),
            (error, _) => self.fate(name.gone(error)),
        })
    }

    fn explain(&mut self, seat: &Seat<'_, Rail, RAILS>, failure: Failure) -> Failure {
        let said = |rail: usize| {
            let text = seat.engine.rail(RailId(rail as u8))?.inner().last_error()?;
            Some(format!("; rail {rail} says: {text}"))
        };
        match self.fate(failure) {
            Failure::Lost(message) => {
                Failure::Lost(message + &(0..RAILS).filter_map(said).collect::<String>())
            }
            failure => failure,
        }
    }
}

/// Waits for the other side at HOST:PORT.
fn listen(plan: &Plan, at: &str, card: &Card) -> Outcome<(Wire, Card)> {
    let mut listener = Listener::bind(at).map_err(|error| match error {
        BootstrapError::Address => Failure::usage(format!("--listen {at}: {error}, such as 0.0.0.0:7000")),
        error => Failure::run(format!("--listen {at}: {error}")),
    })?;
    eprintln!(
        "# waiting at {at} for: fishplate perf {} --transport fabric --rails {} --connect {}",
        name(plan.test),
        plan.rails,
        reachable(at)
    );
    let deadline = Instant::now() + Duration::from_secs(plan.timeout);
    let mut refusals = Refusals::default();
    loop {
        let met = listener.accept(card, deadline.min(Instant::now() + meet::LOOK));
        for (who, why) in listener.refused() {
            refusals.tell(&Failure::run(format!("the process at {who}: {why}")));
        }
        match met {
            Err(BootstrapError::Deadline) if Instant::now() < deadline => {}
            Err(BootstrapError::Deadline) => return Err(refusals.nobody(at, plan.timeout)),
            Err(error) => return Err(Failure::run(format!("--listen {at}: {error}"))),
            Ok(met) => return Ok(met),
        }
    }
}

/// Where the other side finds who listens at `at`:
/// where that is every address of this host, it says that a name goes there.
fn reachable(at: &str) -> String {
    match at.rsplit_once(':') {
        Some(("0.0.0.0" | "[::]" | "::" | "*" | "", port)) => format!("HOST:{port}"),
        _ => at.to_owned(),
    }
}

/// Finds the other side at HOST:PORT.
fn find(at: &str, card: &Card, timeout: u64) -> Outcome<(Wire, Card)> {
    let deadline = Instant::now() + Duration::from_secs(timeout.min(APPEAR));
    bootstrap::connect(at, card, deadline).map_err(|error| match error {
        BootstrapError::Address => Failure::usage(format!("--connect {at}: {error}, such as 10.0.0.2:7000")),
        BootstrapError::System(libc::ECONNREFUSED) => Failure::run(format!(
            "--connect {at}: nobody listens there; start the other side with --listen {at} first"
        )),
        error => Failure::run(format!("--connect {at}: {error}")),
    })
}

/// Starts the second process and meets it, over a socket that it inherits.
fn spawn<const RAILS: usize>(plan: &Plan, ground: &Ground<RAILS>) -> Outcome<((Wire, Card), Second)> {
    let (here, there) = UnixStream::pair()
        .map_err(|error| Failure::run(format!("cannot make a socket for a second process: {error}")))?;
    let mut more: Vec<String> =
        ["--transport", "fabric", "--rails", &RAILS.to_string()].map(String::from).into();
    // What this side has found, so that the other looks no further.
    let rails = &ground.card.rails;
    more.extend(["--provider".to_owned(), rails[0].provider.clone()]);
    let interfaces: Vec<&str> = rails.iter().map(|rail| rail.interface.as_str()).collect();
    more.extend(["--interface".to_owned(), interfaces.join(",")]);
    let mut second = meet::launch(plan, there.into(), &more)?;
    match bootstrap::over(here.into(), &ground.card, meet::soon(plan.timeout)) {
        Ok(met) => Ok((met, second)),
        Err(error) => Err(second.did_not_answer(error == BootstrapError::HungUp, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::reachable;

    #[test]
    fn an_address_that_means_every_one_of_this_host_is_not_shown_as_one_to_connect_to() {
        for (at, shown) in [
            ("0.0.0.0:7000", "HOST:7000"),
            ("[::]:7000", "HOST:7000"),
            ("10.0.0.2:7000", "10.0.0.2:7000"),
            ("node7:80", "node7:80"),
            ("[fe80::1]:7000", "[fe80::1]:7000"),
        ] {
            assert_eq!(reachable(at), shown);
        }
    }
}
