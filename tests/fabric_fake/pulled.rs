//! Pulled cables, with engines that survive the loss of a rail. Operations in flight fail, but may
//! still land, soon or late. The test checks that every operation takes effect once and in order.

use fishplate_core::engine::Config;
use fishplate_core::mem::RailId;
use fishplate_sys::fabric::FabricRail;
use fishplate_testing::fabric::{Fake, Persona};

use crate::behaviour::fleet::{Node, turn};
use crate::behaviour::oracle::Streams;
use crate::behaviour::{Random, failover, oracle, seeds};
use crate::engines::join_prepared;

/// Maximum delay of a late operation, in reads of a completion queue.
const LATE: u32 = 4000;

/// The turns at which links are cut, and the calls of `disable_rail`: turn, node, peer and rail.
struct Plan {
    cuts: Vec<(u64, usize, bool)>,
    disables: Vec<(u64, usize, usize, usize)>,
}

impl Plan {
    /// Creates a random plan. All rails but one may fail in the first turns. Injected posts are
    /// lost silently, so at least one node disables the rail, as if it watched the link.
    fn new(nodes: usize, rails: usize, inject: bool, random: &mut Random) -> Plan {
        let (mut cuts, mut disables) = (vec![], vec![]);
        let spared = random.below(rails as u64) as usize;
        for rail in (0..rails).filter(|&rail| rail != spared) {
            let turn = random.below(300);
            let pulled = random.below(4) != 0;
            if pulled {
                cuts.push((turn, rail, random.below(2) == 0));
            }
            let one = random.below(nodes as u64) as usize;
            for node in (0..nodes).filter(|&node| inject || node == one) {
                let at = turn + random.below(40);
                disables.extend((0..nodes).map(|peer| (at, node, peer, rail)));
            }
        }
        Plan { cuts, disables }
    }

    fn turn<const RAILS: usize>(
        &self,
        turn: u64,
        fake: &Fake,
        interfaces: &[&str],
        fleet: &mut [Node<FabricRail, RAILS>],
    ) {
        for &(_, rail, long) in self.cuts.iter().filter(|cut| cut.0 == turn) {
            fake.pull(interfaces[rail], if long { LATE } else { 20 });
        }
        for &(_, node, peer, rail) in self.disables.iter().filter(|cut| cut.0 == turn) {
            let Node { engine, peers, .. } = &mut fleet[node];
            // Fails if the rail has failed there already, or if the peer has left.
            _ = engine.disable_rail(peers[peer], RailId(rail as u8));
        }
    }
}

/// Runs the given plan with four nodes, or a random plan with two or three nodes.
fn run<const RAILS: usize>(seed: u64, given: Option<Plan>) -> (u64, u64) {
    let interfaces = ["eth0", "eth1", "eth2", "eth3"];
    let provider = if seed % 4 < 2 { Persona::tcp() } else { Persona::net() };
    let persona = Persona { interfaces: interfaces[..RAILS].to_vec(), ..provider };
    let fake = Fake::new(persona.clone(), seed);
    let mut random = Random(!seed);
    let inject = random.below(2) == 0;
    let make = |nodes: u16, config: Config, size| {
        join_prepared::<RAILS>(
            &fake,
            ("tcp", &persona),
            (seed, inject),
            nodes,
            config,
            size,
            |engine| {
                engine.attach_failover(failover(&config, nodes.into())).unwrap();
            },
        )
    };
    let mut choices = Random(seed.wrapping_mul(0x9e37_79b9));
    let nodes = if given.is_some() { 4 } else { 2 + (seed % 2) as usize };
    let config = oracle::config(&mut choices, seed);
    let mut fleet = make(nodes as u16, config, Streams::size(nodes, &config));
    let plan = given.unwrap_or_else(|| Plan::new(nodes, RAILS, inject, &mut random));
    let mut streams = Streams::new(&fleet, &config, 2);
    let issue_until = 60 + choices.below(60);
    for now in 0.. {
        let stats = || fleet.iter().map(|node| node.engine.stats()).collect::<Vec<_>>();
        assert!(now < 200_000, "seed {seed}: not complete; {:?}", stats());
        plan.turn(now, &fake, &interfaces, &mut fleet);
        streams.turn(&mut fleet, now < issue_until, &mut choices);
        for me in 0..nodes {
            fleet[me].engine.progress();
            while let Some(done) = fleet[me].engine.next_completion() {
                streams.completed(me, &done);
            }
            (0..nodes).for_each(|to| streams.check(&fleet, to));
        }
        if now > issue_until && streams.is_over() {
            break;
        }
    }
    // Late operations may land now, and must not change anything.
    (0..LATE / 4).for_each(|_| turn(&mut fleet));
    streams.end(&fleet);
    for node in &fleet {
        node.peers
            .iter()
            .for_each(|&peer| assert_eq!(node.engine.peer_error(peer), Ok(None), "seed {seed}"));
    }
    drop(fleet);
    assert_eq!(fake.violations(), [] as [String; 0], "seed {seed}");
    assert_eq!(fake.open_objects(), 0, "seed {seed}");
    (fake.counts().strays, fake.counts().landed_late)
}

#[test]
fn streams_over_tcp_are_what_the_model_says_while_cables_are_pulled() {
    let seeds = seeds(150);
    let (mut strays, mut late) = (0, 0);
    for &seed in &seeds {
        let (left, landed) = match seed % 3 {
            0 => run::<2>(seed, None),
            1 => run::<3>(seed, None),
            _ => run::<4>(seed, None),
        };
        (strays, late) = (strays + left, late + landed);
    }
    println!(
        "{} seeds, the last is {:?}: {strays} strays, {late} landed late",
        seeds.len(),
        seeds.last()
    );
    // Checks that some strays land late and that fences drop the others.
    assert!(
        seeds.len() < 100 || (late > 0 && late < strays),
        "{strays} strays, {late} landed late"
    );
}

/// Each end reports its failed rail over the rail that has failed at the other end. Both reports
/// are lost, and the ends must repeat them.
#[test]
fn two_ends_that_lose_two_rails_at_once_tell_each_other_until_they_are_heard() {
    run::<4>(4642, None);
}

/// A fence closes an endpoint, so all its peers must stop using it first.
#[test]
fn two_pairs_that_lose_different_rails_at_once_stay_connected() {
    for seed in seeds(20) {
        let plan = Plan { cuts: vec![], disables: vec![(20, 0, 1, 0), (20, 2, 3, 1)] };
        run::<2>(seed, Some(plan));
    }
}
