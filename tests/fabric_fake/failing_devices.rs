//! Device memory over rails that fail and return. The fake GPUs copy late and need flushes. NICs
//! access the memory, or its bytes travel in messages.

use std::sync::Arc;

use fishplate::MatchStorage;
use fishplate::gpu::fake::{Behaviour, FakeDriver, FakeProcess};
use fishplate::gpu::{Device, DevicePtr};
use fishplate_core::engine::protocol::MatchConfig;
use fishplate_core::engine::{Config, Engine};
use fishplate_core::mem::{LocalId, RailId};
use fishplate_core::rail::Rail;
use fishplate_sys::fabric::rail::Interface;
use fishplate_testing::fabric::{Fake, Persona};

use crate::apart::{self, MATCHING, Mixed};
use crate::behaviour::devices::{self, Memory, Traffic};
use crate::behaviour::fleet::Node;
use crate::behaviour::{Random, failover, seeds};
use crate::devices::{Devices, region};
use crate::engines;

/// Settings with short pieces, so that most transfers have several pieces.
const SMALL: MatchConfig = MatchConfig { eager: 256, ..MATCHING };

const INTERFACES: [&str; 4] = ["eth0", "eth1", "eth2", "eth3"];

/// Maximum delay of a late operation, in reads of a completion queue.
const LATE: u32 = 2000;

/// The device memory of each process.
struct Fakes(Vec<FakeProcess>, Vec<[DevicePtr; 2]>);

impl Memory for Fakes {
    fn peek(&self, node: usize, region: usize, at: u64, len: usize) -> Vec<u8> {
        self.0[node].peek(self.1[node][region].at(at), len).unwrap()
    }

    fn poke(&self, node: usize, region: usize, at: u64, bytes: &[u8]) {
        self.0[node].poke(self.1[node][region].at(at), bytes).unwrap();
    }
}

fn persona() -> Persona {
    Persona { interfaces: INTERFACES.to_vec(), ..Persona::tcp() }
}

fn prepare<R: Rail, const RAILS: usize>(
    engine: &mut Engine<'static, R, RAILS>,
    matching: MatchConfig,
) {
    let memory = Box::leak(Box::new(MatchStorage::new(&matching, 2, 32, 32)));
    engine.attach_matching(matching, memory.memory()).unwrap();
    engine.attach_failover(failover(&Config::DEFAULT, 2)).unwrap();
}

#[derive(Debug, Default)]
struct Totals {
    issued: u64,
    failed: u64,
    reposted: u64,
    returned: u64,
    late: u64,
}

/// Moves data while cables are pulled and plugged in again. `first` is the index of the engine's
/// rail on the first interface.
fn run<R: Rail, const RAILS: usize>(
    fake: &Fake,
    mut nodes: Vec<Node<R, RAILS>>,
    memory: (Fakes, Vec<[LocalId; 2]>),
    first: usize,
    seed: u64,
    totals: &mut Totals,
) {
    let mut random = Random(!seed);
    let rails = RAILS - first;
    let id = |rail: usize| RailId((first + rail) as u8);
    let mut traffic = Traffic::new(&mut nodes, memory, (1, 6), seed);
    let mut down = [false; INTERFACES.len()];
    let (mut until, mut rest) = (600, 0);
    for turn in 0.. {
        let stats = || nodes.iter().map(|node| node.engine.stats()).collect::<Vec<_>>();
        assert!(turn < 300_000, "seed {seed}: no end: {}; {:?}", traffic.open(), stats());
        let rail = random.below(rails as u64) as usize;
        if turn < until && random.below(200) == 0 {
            let uses = |other: usize| {
                let used = |node: &Node<R, RAILS>| {
                    node.peers
                        .iter()
                        .all(|&peer| node.engine.rail_error(peer, id(other)) == Ok(None))
                };
                !down[other] && nodes.iter().all(used)
            };
            if down[rail] {
                fake.plug(INTERFACES[rail]);
                down[rail] = false;
            } else if uses(rail) && (0..rails).any(|other| other != rail && uses(other)) {
                match random.below(3) {
                    0 => {
                        let (node, of) =
                            (&mut nodes[random.below(2) as usize], random.below(2) as usize);
                        let peer = node.peers[of];
                        _ = node.engine.disable_rail(peer, id(rail));
                        _ = node.engine.enable_rail(peer, id(rail));
                    }
                    late => {
                        fake.pull(INTERFACES[rail], if late == 1 { LATE } else { 20 });
                        down[rail] = true;
                        // A message in flight is lost silently. So the nodes report the failure, as
                        // if they watched the link.
                        for Node { engine, peers, .. } in &mut nodes {
                            for &peer in &*peers {
                                _ = engine.disable_rail(peer, id(rail));
                                _ = engine.enable_rail(peer, id(rail));
                            }
                        }
                    }
                }
            }
        }
        if turn == until {
            for (interface, down) in INTERFACES.iter().zip(&mut down) {
                if std::mem::take(down) {
                    fake.plug(interface);
                }
            }
        }
        traffic.turn(&mut nodes, turn < until, &mut random);
        for node in &mut nodes {
            node.engine.progress();
            node.engine.check_peers();
        }
        if turn > until && traffic.is_over() {
            rest += 1;
            // Late operations may land now, and must not change anything.
            if rest > LATE / 4 {
                break;
            }
        } else if turn > until {
            until = until.min(turn - 1);
        }
    }
    traffic.end(&nodes);
    for node in &nodes {
        node.peers
            .iter()
            .for_each(|&peer| assert_eq!(node.engine.peer_error(peer), Ok(None), "seed {seed}"));
        let stats = node.engine.stats();
        totals.failed += stats.rails_failed;
        totals.reposted += stats.reposted;
        totals.returned += stats.rails_returned;
    }
    totals.issued += traffic.issued;
    totals.late += fake.counts().landed_late;
    drop((nodes, traffic));
    assert_eq!(fake.violations(), [] as [String; 0], "seed {seed}");
}

fn check(name: &str, totals: &Totals, count: usize) {
    println!("{name}: {count} seeds: {totals:?}");
    let Totals { issued, failed, reposted, .. } = *totals;
    let covered = issued >= 1000 && failed.min(reposted) >= 1;
    assert!(count < 8 || covered, "{name}: {totals:?}");
}

const BEHAVIOUR: Behaviour = Behaviour { must_flush: true, ..Behaviour::LATE };

#[test]
fn nics_fail_that_access_device_memory() {
    fn direct<const RAILS: usize>(seed: u64, totals: &mut Totals) {
        let persona = persona().with_devices();
        let fake = Fake::new(persona.clone(), seed);
        let driver = FakeDriver::new(BEHAVIOUR, seed);
        let processes = [driver.process(), driver.process()];
        fake.join_devices(Arc::new(Devices(processes.clone())));
        let size = devices::size(2);
        let this = (("tcp", &persona), (seed, false));
        let mut nodes = engines::join_prepared::<RAILS>(
            &fake,
            this.0,
            this.1,
            2,
            Config::DEFAULT,
            size,
            |engine| {
                prepare(engine, SMALL);
            },
        );
        let mut memory = [0, 1].map(|node| processes[node].device(0).unwrap());
        let at: Vec<_> = memory
            .iter_mut()
            .map(|device| [0, 1].map(|_| device.alloc(size as u64).unwrap()))
            .collect();
        let ids = (0..2).map(|node| {
            let engine = &mut nodes[node].engine;
            for rail in 0..RAILS {
                let device = fishplate::direct(processes[node].device(0).unwrap(), Interface::Cuda);
                engine.rail_mut(RailId(rail as u8)).unwrap().reach(device).unwrap();
            }
            at[node].map(|at| engine.register(region(at, size as u64)).unwrap())
        });
        let ids = ids.collect();
        run(&fake, nodes, (Fakes(processes.to_vec(), at), ids), 0, seed, totals);
        assert_eq!(fake.open_objects(), 0, "seed {seed}");
    }
    let (mut totals, seeds) = (Totals::default(), seeds(8));
    for &seed in &seeds {
        match seed % 2 {
            0 => direct::<2>(seed, &mut totals),
            _ => direct::<4>(seed, &mut totals),
        }
    }
    check("direct", &totals, seeds.len());
}

#[test]
fn rails_fail_that_carry_device_memory_in_messages() {
    let (mut totals, seeds) = (Totals::default(), seeds(24));
    for &seed in &seeds {
        let persona = persona();
        let fake = Fake::new(persona.clone(), seed);
        let driver = FakeDriver::new(BEHAVIOUR, seed);
        let processes = [driver.process(), driver.process()];
        let size = devices::size(2);
        let rails = (("tcp", &persona), (seed, false), (Config::DEFAULT, size));
        let mut nodes = apart::join(&fake, rails.0, &processes, rails.1, rails.2, |engine| {
            prepare(engine, SMALL);
        });
        let (mut ids, mut at) = (vec![], vec![]);
        for node in &mut nodes {
            let Some(Mixed::Device(rail)) = node.engine.rail_mut(RailId(0)) else {
                panic!("no device")
            };
            let both = [0, 1].map(|_| rail.alloc(size as u64).unwrap());
            ids.push(both.map(|at| node.engine.register(region(at, size as u64)).unwrap()));
            at.push(both);
        }
        run(&fake, nodes, (Fakes(processes.to_vec(), at), ids), 1, seed, &mut totals);
    }
    check("carried", &totals, seeds.len());
}
