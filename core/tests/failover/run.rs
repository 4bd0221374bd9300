//! Runs one schedule: a fleet, its traffic, and the events of its rails.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use fishplate_core::engine::Stats;
use fishplate_core::engine::protocol::MatchConfig;
use fishplate_core::error::{OpError, PeerError};
use fishplate_core::mem::RailId;
use fishplate_core::op::Fault;
use fishplate_core::rail::sim::Dials;
use fishplate_core::rail::sim::schedule::{self, Change, Event, Link, Schedule};

use super::mail::{self, Mail};
use super::reads::{self, Reads};
use super::rig::{SMALL, match_memory};
use super::schedule::{Ends, Fleet, all_return};
use super::support::oracle::{self, Streams};
use super::support::scope::{Scope, leak_all};
use super::support::*;

/// Maximum number of rails of a schedule.
const RAILS: usize = 8;

/// Maximum number of turns. A longer run counts as hung.
const TURNS: u64 = 60_000;

#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    pub schedules: u64,
    pub turns: u64,
    pub events: u64,
    pub failed: u64,
    pub returned: u64,
    pub reposted: u64,
    pub replied_again: u64,
    pub stale: u64,
    pub given_up: u64,
}

impl Totals {
    fn add(&mut self, stats: &Stats) {
        self.failed += stats.rails_failed;
        self.returned += stats.rails_returned;
        self.reposted += stats.reposted;
        self.replied_again += stats.replied_again;
        self.stale += stats.stale;
    }
}

/// Room for the events of a run.
const EVENTS: usize = 1024;

/// Keeps the events of a run, even if the run fails.
struct Told<'s, 'e>(Schedule<'s, 'static>, &'e mut Vec<Event>);

impl Drop for Told<'_, '_> {
    fn drop(&mut self) {
        self.1.extend(self.0.events());
    }
}

/// The size of a fleet with fences that close endpoints, and the links to cut at once.
#[derive(Clone, Debug)]
pub struct Closing {
    pub nodes: u16,
    pub rails: u16,
    pub cuts: Vec<Link>,
}

/// The turn that cuts the links of a [`Closing`].
const CUT_AT: u64 = 5;

pub fn run(seed: u64, totals: &mut Totals) {
    run_in(seed, None, totals);
}

/// Time limit of the search for fewer events that still make a run fail.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs a schedule in the given fleet, or in a fleet drawn from the seed. If the run fails, removes
/// the events that the failure does not need, and prints the rest.
pub fn run_in(seed: u64, given: Option<&Closing>, totals: &mut Totals) {
    let mut events = vec![];
    let mut attempt = |script: Option<&[Event]>, events: &mut Vec<Event>| {
        catch_unwind(AssertUnwindSafe(|| run_with(seed, given, script, events, totals)))
    };
    let Err(failure) = attempt(None, &mut events) else { return };
    println!("seed {seed} fails, with {} events", events.len());
    let until = Instant::now() + PATIENCE;
    let fails =
        |some: &[Event]| Instant::now() < until && attempt(Some(some), &mut vec![]).is_err();
    let left = schedule::shrink(&mut events, fails);
    println!("seed {seed} fails with these {left} of them, the numbers of turns first:");
    events[..left].iter().for_each(|event| println!("{event}"));
    resume_unwind(failure);
}

/// Runs the events of a script, or draws events from the seed. Adds the executed events to
/// `events`. Returns the simulator's hash of the run.
fn run_with(
    seed: u64,
    given: Option<&Closing>,
    script: Option<&[Event]>,
    events: &mut Vec<Event>,
    totals: &mut Totals,
) -> u64 {
    let _scope = Scope::new();
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9));
    let nodes = [2, 2, 2, 3, 3, 4][random.below(6) as usize];
    let count = 2 + random.below(RAILS as u64 - 1) as u16;
    let closes = random.below(4) == 0;
    let (nodes, count, closes) =
        given.map_or((nodes, count, closes), |given| (given.nodes, given.rails, true));
    let config = oracle::config(&mut random, seed);
    let matching = MatchConfig { credits: 1 + random.below(6) as u32, ..SMALL };
    let calm = if random.below(8) == 0 { Dials::CALM } else { Dials::WILD };
    let dials = Dials { repeats: random.below(2) == 0, ..calm };
    let sim = fleet::fabric(nodes, count, 512, dials, seed);
    let mail_at = Streams::size(nodes.into(), &config);
    let reads_at = mail_at + mail::SIZE;
    let mut fleet: Fleet<RAILS> = fleet::lasting(
        sim,
        nodes,
        count,
        closes,
        config,
        reads_at + reads::SIZE,
        |_, end| end,
        |engine| {
            let streams = nodes as usize * config.contexts as usize;
            engine.attach_matching(matching, match_memory(matching, streams, 8)).unwrap();
        },
    );
    let pace = [2, 4, 12][random.below(3) as usize];
    let mut streams = Streams::new(&fleet, &config, pace);
    let mut mail = Mail::new(nodes.into(), config.contexts, mail_at as u64, pace, seed);
    let mut reads = Reads::new(nodes.into(), reads_at as u64, seed);
    let scope = schedule::Scope { nodes, rails: count, own: true, closes, stalls: true };
    let log = leak(Event::EMPTY, EVENTS);
    let schedule = match script {
        None => Schedule::drawn(sim, scope, seed, log),
        Some(script) => Schedule::given(sim, scope, leak_all(script), true, log),
    };
    let mut told = Told(schedule, events);
    let schedule = &mut told.0;
    let busy = 100 + random.below(100) * pace;
    let heals = random.below(4) != 0;
    // If there are three or more nodes, one of them may die.
    let dies = (nodes > 2 && random.below(3) == 0)
        .then(|| (random.below(nodes.into()), random.below(busy)));
    let dies = script.map_or(dies, |script| {
        script.iter().find_map(|event| match event.change {
            Change::Die(node) => Some((node.into(), event.at)),
            _ => None,
        })
    });
    let dead =
        |node: usize, turn| dies.is_some_and(|(dies, at)| dies as usize == node && turn >= at);
    // Each check of the peers lets 10 ms pass, so the engines give up rails. They would also soon
    // lose patience with other peers, so not if fences close endpoints (see `stalls`).
    let mut given_up = vec![false; nodes as usize * nodes as usize * count as usize];
    let checks = !closes && seed / 4 % 4 == 2;
    let (mut over, mut closing) = (None, None);
    let mut last = 0;
    for turn in 0.. {
        last = turn;
        let stats = || fleet.iter().map(|node| node.engine.stats()).collect::<Vec<_>>();
        assert!(turn < TURNS, "seed {seed}: no end; {:?}", stats());
        if let Some((node, at)) = dies
            && at == turn
        {
            schedule.kill(node as u16, turn);
            streams.dies(node as usize);
            mail.dies(node as usize);
            reads.dies(node as usize);
        }
        if let Some(given) = given
            && turn <= CUT_AT
            && script.is_none()
        {
            if turn == CUT_AT {
                schedule.cut(turn, &mut Ends(&mut fleet, count), &given.cuts);
            }
        } else if turn < busy {
            schedule.turn(turn, &mut Ends(&mut fleet, count));
        } else if turn == busy && heals {
            schedule.heal_all(turn, &mut Ends(&mut fleet, count));
        }
        streams.turn(&mut fleet, turn < busy, &mut random);
        reads.turn(&mut fleet, turn < busy, &mut random);
        for me in (0..nodes).filter(|&me| schedule.is_awake(me, turn)) {
            let me = me as usize;
            mail.turn(&mut fleet, me, turn < busy, &mut random);
            fleet[me].engine.progress();
            if checks && turn % 4 == 0 {
                fleet[me].engine.check_peers();
            }
            while let Some(done) = fleet[me].engine.next_completion() {
                match done.tag {
                    mail::TAG.. => mail.completed(me, &done),
                    reads::TAG.. => reads.completed(&fleet, me, &done, &mut random),
                    _ => streams.completed(me, &done),
                }
            }
            streams.check(&fleet, me);
        }
        if checks {
            let peers = fleet.iter().flat_map(|node| node.peers.iter().map(move |&to| (node, to)));
            let rails = peers.flat_map(|(node, to)| (0..count).map(move |rail| (node, to, rail)));
            for (was, (node, peer, rail)) in given_up.iter_mut().zip(rails) {
                let error = node.engine.rail_error(peer, RailId(rail as u8));
                let is = error == Ok(Some(Fault::Peer(PeerError::Silent)));
                totals.given_up += u64::from(is && !std::mem::replace(was, is));
            }
        }
        if turn < busy || !streams.is_over() || !mail.is_over() || !reads.is_over() {
            continue;
        }
        let since = *over.get_or_insert(turn);
        // Continues until all late traffic must have landed.
        if turn < since + schedule.late() / (nodes as u64 * count as u64) {
            continue;
        }
        if closing.is_none() {
            streams.end(&fleet);
            for (_, node) in fleet.iter().enumerate().filter(|(me, _)| !dead(*me, turn)) {
                totals.add(&node.engine.stats());
                for (to, &peer) in node.peers.iter().enumerate() {
                    let error = node.engine.peer_error(peer).unwrap();
                    assert_eq!(error.is_some(), dead(to, turn), "seed {seed}: {error:?}");
                }
            }
            if heals {
                let dead = dies.map(|(node, _)| node as usize);
                all_return(schedule, &mut fleet, count, dead, seed);
            }
            closing = Some(turn);
            for (me, node) in fleet.iter_mut().enumerate() {
                for (to, &peer) in node.peers.iter().enumerate() {
                    match node.engine.close_peer(peer) {
                        Ok(()) | Err(OpError::PeerFailed(PeerError::Closed)) => {}
                        Err(_) if dead(me, turn) || dead(to, turn) => {}
                        Err(error) => panic!("seed {seed}: {error:?}"),
                    }
                }
            }
        }
        // Rails also fail while the nodes close.
        if closing == Some(turn) || turn < closing.unwrap_or(0) + 20 {
            schedule.turn(turn, &mut Ends(&mut fleet, count));
        }
        let left = |(me, node): (usize, &fleet::Node<_, RAILS>)| {
            dead(me, turn) || node.peers.iter().all(|&peer| node.engine.has_left(peer) == Ok(true))
        };
        if fleet.iter().enumerate().all(left) {
            break;
        }
    }
    for (_, node) in fleet.iter().enumerate().filter(|(me, _)| !dead(*me, last)) {
        for (_, &peer) in node.peers.iter().enumerate().filter(|(to, _)| !dead(*to, last)) {
            assert_eq!(node.engine.peer_error(peer), Ok(Some(PeerError::Closed)), "seed {seed}");
        }
    }
    totals.schedules += 1;
    totals.turns += last;
    totals.events += schedule.events().len() as u64;
    sim.trace()
}

/// Replaying the events of a run, written and read as text, repeats the run exactly.
#[test]
fn the_events_of_a_run_repeat_it() {
    for seed in 1..=20 {
        let given = (seed % 2 == 0).then_some(Closing { nodes: 3, rails: 3, cuts: vec![] });
        let (mut drawn, mut again, totals) = (vec![], vec![], &mut Totals::default());
        let hash = run_with(seed, given.as_ref(), None, &mut drawn, totals);
        let read: Vec<Event> =
            drawn.iter().map(|event| event.to_string().parse().unwrap()).collect();
        assert_eq!(
            run_with(seed, given.as_ref(), Some(&read), &mut again, totals),
            hash,
            "seed {seed}"
        );
        assert_eq!(again, drawn, "seed {seed}");
    }
}

/// In this run a rail accepts the first Bye and refuses the second. The engine must send both
/// again.
#[test]
fn the_byes_before_one_that_is_refused_are_said_again() {
    run(231, &mut Totals::default());
}

/// Runs the schedules with `seed % of == n`, so that several parts can run at a time.
fn part(n: u64, of: u64) {
    let mut totals = Totals::default();
    for seed in seeds(if cfg!(debug_assertions) { 400 } else { 1000 })
        .into_iter()
        .filter(|seed| seed % of == n)
    {
        run(seed, &mut totals);
    }
    println!("{totals:?}");
    if totals.schedules >= 100 {
        let Totals { failed, returned, reposted, replied_again, stale, .. } = totals;
        assert!(
            [failed, returned, reposted, replied_again, stale].iter().all(|&n| n >= 20)
                && totals.given_up != 0,
            "{totals:?}"
        );
    }
}

#[test]
fn every_operation_happens_once_and_in_order_in_schedules_1() {
    part(0, 4);
}

#[test]
fn every_operation_happens_once_and_in_order_in_schedules_2() {
    part(1, 4);
}

#[test]
fn every_operation_happens_once_and_in_order_in_schedules_3() {
    part(2, 4);
}

#[test]
fn every_operation_happens_once_and_in_order_in_schedules_4() {
    part(3, 4);
}
