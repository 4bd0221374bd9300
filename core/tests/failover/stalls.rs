//! Rails stall at random: a rail delays what it carries until the stall is over. The nodes give
//! such rails up, and use them again later. No operation is lost, doubled or late for ever.

use fishplate_core::engine::{Config, ContextId, Notice, Signal};
use fishplate_core::error::PeerError;
use fishplate_core::mem::{Peer, RailId};
use fishplate_core::op::{Fault, Outcome};
use fishplate_core::rail::sim::Dials;

use super::support::fleet::{self, End, Node};
use super::support::scope::Scope;
use super::support::tap::{Event, NOW, Tap, shared};
use super::support::{Random, read, seeds, write};

type Fleet = Vec<Node<Tap<End, true>, 4>>;

/// The rails stall, and both ends disable and enable them. No link is cut, so no peer is lost.
/// Returns how often a rail was given up, and how often so with fences that close endpoints.
fn run(seed: u64) -> [u64; 2] {
    let _scope = Scope::new();
    NOW.set(1);
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let nodes = [2, 2, 2, 3, 4][random.below(5) as usize];
    let count = 2 + random.below(3) as u16;
    let closes = random.below(2) == 0;
    let calm = random.below(2) == 0;
    let base = if calm { Dials::CALM } else { Dials::WILD };
    let sim = fleet::fabric(nodes, count, 1024, base, seed);
    let config = Config { seed, ..Config::DEFAULT };
    let control = shared();
    let mut fleet: Fleet = fleet::lasting(
        sim,
        nodes,
        count,
        closes,
        config,
        1 << 16,
        |rail, end| Tap::timed(end, rail.into(), &control),
        |_| {},
    );
    // A rail that closes its endpoint for a fence is given up only if no other peer uses it.
    for (me, node) in fleet.iter_mut().enumerate() {
        node.engine.close_peer(node.peers[me]).unwrap();
    }
    fleet::turn_until(&mut fleet, "no node talks to itself", |fleet| {
        (0..fleet.len()).all(|me| fleet[me].engine.has_left(fleet[me].peers[me]) == Ok(true))
    });
    let n = nodes as usize;
    let pairs: Vec<(usize, usize)> = (0..n)
        .flat_map(|a| (0..n).map(move |b| (a, b)))
        .filter(|&(a, b)| a != b)
        // With more nodes, only some talk.
        .collect();
    let mut sent = vec![0u64; n * n];
    let mut done = vec![0u64; n * n];
    let mut seen = vec![0u64; n * n];
    let mut stalls = vec![0u64; count.into()];
    let mut asleep = vec![0u64; n];
    let mut given = 0;
    let mut was = vec![false; n * n * count as usize];
    let keep = 1 + random.below(20);
    let disables = random.below(3) == 0 && (!closes || nodes == 2);
    let busy = 6000 + random.below(6000);
    // In a millisecond.
    let polls = 5 * nodes as u64 * count as u64;
    let what = format!("seed {seed} nodes {nodes} rails {count} closes {closes} calm {calm}");
    for ms in 0.. {
        assert!(ms < busy + 120_000, "{what}: no end, sent {sent:?} done {done:?} seen {seen:?}");
        for (rail, until) in stalls.iter_mut().enumerate() {
            if ms < busy && ms >= *until && random.below(2000) == 0 {
                *until = ms + [50, 200, 700, 1500, 4000][random.below(5) as usize];
            }
            let left = (until.saturating_sub(ms) * polls) as u32;
            sim.set_dials(
                rail as u16,
                Dials {
                    min_delay: base.min_delay + left,
                    max_delay: base.max_delay + left,
                    ..base
                },
            );
        }
        if disables && ms < busy && random.below(100) == 0 {
            let me = random.below(n as u64) as usize;
            let to = (me + 1) % n;
            let (peer, rail) = (fleet[me].peers[to], RailId(random.below(count.into()) as u8));
            match random.below(3) {
                0 => _ = fleet[me].engine.disable_rail(peer, rail),
                _ => _ = fleet[me].engine.enable_rail(peer, rail),
            }
        }
        if ms == busy {
            for (me, to) in pairs.clone() {
                for rail in 0..count {
                    let peer = fleet[me].peers[to];
                    fleet[me].engine.enable_rail(peer, RailId(rail as u8)).unwrap();
                }
            }
        }
        for until in &mut asleep {
            if ms < busy && ms >= *until && random.below(3000) == 0 {
                *until = ms + random.below(1500);
            }
        }
        for _ in 0..5 {
            NOW.set(NOW.get() + 200_000);
            for &(me, to) in &pairs {
                let at = me * n + to;
                if ms < busy && ms >= asleep[me] && sent[at] - done[at] < keep {
                    let next = sent[at] + 1;
                    let off = 4096 + (to as u64 * 64 + next % 64) * 8;
                    let node = &mut fleet[me];
                    write(&node.engine, node.source.at(off), &next.to_le_bytes());
                    let remote = node.remotes[to];
                    let signal = Signal::add(remote.at(16 * me as u64), 1);
                    let (from, into) =
                        (node.source.at(off), remote.at(4096 * (1 + me as u64) + next % 64 * 8));
                    let tag = Notice::Report((at as u64) << 32 | next);
                    if node.engine.put_signal(ContextId(0), from, 8, into, signal, tag).is_ok() {
                        sent[at] = next;
                    }
                }
            }
            for me in 0..n {
                if ms >= asleep[me] {
                    fleet[me].engine.progress();
                }
                while let Some(end) = fleet[me].engine.next_completion() {
                    let at = (end.tag >> 32) as usize;
                    assert!(end.outcome == Outcome::Done, "{what}: {:?}", end.outcome);
                    done[at] += 1;
                }
            }
            for &(me, to) in &pairs {
                let at = me * n + to;
                let node = &fleet[to];
                let word = |off| {
                    let bytes = read(&node.engine, node.target.at(off), 8);
                    u64::from_le_bytes(bytes.try_into().unwrap())
                };
                let adds = word(16 * me as u64);
                assert!(adds >= seen[at] && adds <= sent[at], "{what}: {adds} of {}", sent[at]);
                for k in (seen[at] + 1)..=adds {
                    let value = word(4096 * (1 + me as u64) + k % 64 * 8);
                    assert!(value >= k && value % 64 == k % 64, "{what}: {value} for {k}");
                }
                seen[at] = adds;
            }
        }
        if ms % 10 == 0 {
            for me in (0..n).filter(|&me| ms >= asleep[me]) {
                fleet[me].engine.check_peers();
            }
        }
        for &(me, to) in &pairs {
            let peer = fleet[me].peers[to];
            assert_eq!(fleet[me].engine.peer_error(peer), Ok(None), "{what}: {me} -> {to} at {ms}");
            for rail in 0..count {
                let is = fleet[me].engine.rail_error(peer, RailId(rail as u8))
                    == Ok(Some(Fault::Peer(PeerError::Silent)));
                let was = &mut was[(me * n + to) * count as usize + rail as usize];
                given += u64::from(is && !std::mem::replace(was, is));
                *was = is;
            }
        }
        if ms > busy && seen == sent && done == sent {
            let all = pairs.iter().all(|&(me, to)| {
                (0..count).all(|rail| {
                    fleet[me].engine.rail_error(fleet[me].peers[to], RailId(rail as u8)) == Ok(None)
                })
            });
            if all {
                break;
            }
        }
    }
    [given, u64::from(closes) * given]
}

#[test]
fn rails_that_stall_at_random_cost_no_peer_and_no_operation() {
    let mut totals = [0; 2];
    let seeds = seeds(if cfg!(debug_assertions) { 40 } else { 200 });
    for &seed in &seeds {
        let given = run(seed);
        totals = [0, 1].map(|at| totals[at] + given[at]);
    }
    println!("{} seeds: given up, and so with closing fences: {totals:?}", seeds.len());
    assert!(seeds.len() < 40 || (totals[0] >= 50 && totals[1] >= 5), "{totals:?}");
}

/// The kind and the stage of the confirmation.
const LEAVE: u8 = 12;
const CONFIRMS: u8 = 2;

/// A third peer returns to the rail after node 1 has agreed to leave it, and before node 1 has
/// received the confirmation.
#[test]
fn a_rail_that_is_given_up_is_not_spare_for_ever() {
    let _scope = Scope::new();
    NOW.set(1);
    let sim = fleet::fabric(3, 2, 1024, Dials::CALM, 1);
    let controls = [shared(), shared(), shared()];
    controls[1].borrow_mut().fences_all = true;
    let made = std::cell::Cell::new(0);
    let mut fleet: Vec<Node<Tap<End, true>, 2>> = fleet::lasting(
        sim,
        3,
        2,
        false,
        Config::DEFAULT,
        4096,
        |rail, end| {
            let node = made.replace(made.get() + 1) / 2;
            Tap::timed(end, rail.into(), &controls[node])
        },
        |_| {},
    );
    for (me, node) in fleet.iter_mut().enumerate() {
        node.engine.close_peer(node.peers[me]).unwrap();
    }
    let tick = |fleet: &mut Vec<Node<Tap<End, true>, 2>>, ms: u64| {
        for _ in 0..ms / 10 {
            NOW.set(NOW.get() + 10_000_000);
            (0..20).for_each(|_| fleet::turn(fleet));
            fleet.iter_mut().for_each(|node| node.engine.check_peers());
        }
    };
    let put = |fleet: &mut Vec<Node<Tap<End, true>, 2>>| {
        let (from, to) = (fleet[0].source.at(0), fleet[0].remotes[1]);
        let signal = Signal::add(to.at(0), 1);
        fleet[0].engine.put_signal(ContextId(0), from, 8, to.at(8), signal, Notice::Silent).is_ok()
    };
    let [zero_one, one_two] = [fleet[0].peers[1], fleet[1].peers[2]];
    // Rail 0 of the fabric is rail 0 of node 0, and rail 1 of node 1.
    fleet[1].engine.disable_rail(one_two, RailId(1)).unwrap();
    tick(&mut fleet, 3000);
    let of = |fleet: &Vec<Node<Tap<End, true>, 2>>| fleet[0].engine.rail_error(zero_one, RailId(0));
    assert_eq!(of(&fleet), Ok(None), "the rail is back after the fence");
    let drop = |_, event| match event {
        Event::Message(Peer(0), bytes) if bytes[0] == LEAVE && bytes[3] == CONFIRMS => vec![],
        event => vec![event],
    };
    controls[1].borrow_mut().edit = Some(Box::new(drop));
    sim.set_dials(0, Dials { min_delay: 60_000, max_delay: 60_000, ..Dials::CALM });
    let mut ms = 0;
    while of(&fleet) == Ok(None) {
        (0..4).for_each(|_| _ = put(&mut fleet));
        tick(&mut fleet, 10);
        ms += 10;
        assert!(ms < 10_000, "never given up");
    }
    tick(&mut fleet, 500);
    sim.set_dials(0, Dials::CALM);
    fleet[1].engine.enable_rail(one_two, RailId(1)).unwrap();
    tick(&mut fleet, 3000);
    controls[1].borrow_mut().edit = None;
    tick(&mut fleet, 60_000);
    assert_eq!(fleet[0].engine.peer_error(zero_one), Ok(None));
    assert_eq!(of(&fleet), Ok(None), "a minute after the stall, the rail is spare");
}
