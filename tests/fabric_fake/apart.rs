//! Device memory that NICs do not access, over a fake provider without `FI_HMEM` and a fake GPU
//! driver with late copies. Each engine has four libfabric rails, and a rail for the device that
//! reaches no peer.

use std::env;
use std::ptr::NonNull;

use fishplate::MatchStorage;
use fishplate::gpu::fake::{Behaviour, Call, FakeDevice, FakeDriver, FakeProcess};
use fishplate::gpu::{DeviceError, DevicePtr, GpuConfig, GpuRail};
use fishplate_core::engine::protocol::MatchConfig;
use fishplate_core::engine::{Config, Engine, Issued, Notice, Signal};
use fishplate_core::error::{AttachError, OpError, PeerError, PostError};
use fishplate_core::forward_rail;
use fishplate_core::mem::{LocalId, Peer, RailId, Region, RegionKind, RemoteId};
use fishplate_core::op::Outcome;
use fishplate_core::rail::{Local, Posted, Rail, RailKey, Remote};
use fishplate_core::sync::host::SpinHost;
use fishplate_shm::ShmConfig;
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail, negotiate};
use fishplate_testing::fabric::{Fake, Persona};

use crate::behaviour::fleet::{self, Node, joint, turn, turn_until};
use crate::behaviour::{Random, seeds, word};
use crate::devices::{personas, region};
use crate::fixture::Checked;
use crate::two::CX;

const SIZE: u64 = 1 << 18;

/// The key and descriptor of device memory on a libfabric rail.
const ELSEWHERE: RailKey = RailKey::ELSEWHERE;
const NOT_HERE: u64 = u64::MAX;

#[expect(clippy::large_enum_variant, reason = "few rails")]
pub enum Mixed {
    Device(GpuRail<FakeDevice, SpinHost>),
    Fabric(FabricRail),
}

macro_rules! each {
    ($self:ident, $rail:ident => $call:expr) => {
        match $self {
            Mixed::Device($rail) => $call,
            Mixed::Fabric($rail) => $call,
        }
    };
}

// SAFETY: forwards every call to one rail. A refused call changes nothing. Through `Setup` the
// tests only allocate memory.
unsafe impl Rail for Mixed {
    type Setup<'a> = &'a mut Mixed;

    const COPIES: bool = false;

    fn setup(&mut self) -> &mut Mixed {
        self
    }

    fn register(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError> {
        match self {
            Mixed::Fabric(_) if matches!(region.kind(), RegionKind::Device { .. }) => {
                Ok((ELSEWHERE, NOT_HERE))
            }
            _ => each!(self, rail => rail.register(region)),
        }
    }

    fn deregister(&mut self, key: RailKey) -> Result<(), AttachError> {
        if key == ELSEWHERE { Ok(()) } else { each!(self, rail => rail.deregister(key)) }
    }

    fn import(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        match key {
            ELSEWHERE => Err(AttachError::Unsupported),
            _ => each!(self, rail => rail.import(peer, key, len)),
        }
    }

    fn release(&mut self, peer: Peer, key: RailKey) {
        if key != ELSEWHERE {
            each!(self, rail => rail.release(peer, key));
        }
    }

    unsafe fn post_write(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        if local.desc == NOT_HERE || remote.key == ELSEWHERE {
            return Err(PostError::Unsupported);
        }
        // SAFETY: our caller guarantees the same contract.
        each!(self, rail => unsafe { rail.post_write(peer, local, remote, data, cx) })
    }

    unsafe fn post_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        if local.desc == NOT_HERE || remote.key == ELSEWHERE {
            return Err(PostError::Unsupported);
        }
        // SAFETY: our caller guarantees the same contract.
        each!(self, rail => unsafe { rail.post_read(peer, local, remote, cx) })
    }

    forward_rail! { each!(self) =>
        caps touches detach fence late mute fence_left reopen rejoin fences_all is_fenced
        post_message poll flush write_device read_device place_device fetch_device notify doubt
        check_peers
    }
}

/// Two engines, each with device memory that no NIC accesses.
struct Two {
    nodes: Vec<Node<Mixed, 5>>,
    processes: [FakeProcess; 2],
    memory: [(LocalId, DevicePtr); 2],
    theirs: [RemoteId; 2],
    _fake: Checked,
}

pub const MATCHING: MatchConfig = MatchConfig {
    pieces: 8,
    shared_credits: 0,
    shared_headers: 0,
    ..MatchConfig::for_streams(256)
};

/// Connects two engines with a device and four rails each.
pub fn join(
    fake: &Fake,
    (name, persona): (&str, &Persona),
    processes: &[FakeProcess; 2],
    (seed, inject): (u64, bool),
    (engines, size): (Config, usize),
    prepare: impl Fn(&mut Engine<'static, Mixed, 5>),
) -> Vec<Node<Mixed, 5>> {
    let mut ends: Vec<[Mixed; 5]> = (0..2u64)
        .map(|node| {
            std::array::from_fn(|rail| {
                let Some(rail) = rail.checked_sub(1) else {
                    let device = processes[node as usize].device(0).unwrap();
                    let shm = ShmConfig { max_peers: 4, ..ShmConfig::default() };
                    let host = SpinHost::new(1000);
                    return Mixed::Device(
                        GpuRail::new(device, host, shm, GpuConfig::default()).unwrap(),
                    );
                };
                let interface = persona.interfaces[rail % persona.interfaces.len()];
                let ask = Ask { interface: Some(interface), ..Ask::new(name) };
                let offer = negotiate(fake.library(), &ask).expect("the persona is offered");
                let seed = Some(seed << 16 | (rail as u64) << 8 | node);
                let (depth, receives, bounces) = (32, 32, 8);
                let config = FabricConfig {
                    depth,
                    receives,
                    bounces,
                    deadline: None,
                    seed,
                    inject,
                    ..FabricConfig::default()
                };
                Mixed::Fabric(FabricRail::open(&offer, config).expect("a rail on it"))
            })
        })
        .collect();
    let addresses: Vec<Vec<Vec<u8>>> = ends
        .iter()
        .map(|node| {
            let fabric = node.iter().filter_map(|rail| match rail {
                Mixed::Fabric(rail) => Some(rail.address().unwrap()),
                Mixed::Device(_) => None,
            });
            fabric.collect()
        })
        .collect();
    for (own, node) in ends.iter_mut().enumerate() {
        let fabric = node.iter_mut().filter_map(|rail| match rail {
            Mixed::Fabric(rail) => Some(rail),
            Mixed::Device(_) => None,
        });
        for (at, rail) in fabric.enumerate() {
            rail.attach_self(Peer(own as u16)).unwrap();
            rail.attach(Peer(1 - own as u16), &addresses[1 - own][at]).unwrap();
        }
    }
    let joints = |_: usize, _: usize, rails: &[Mixed]| {
        (1..rails.len()).map(|rail| joint(rail, rail, usize::MAX)).collect()
    };
    fleet::join_prepared(ends, engines, size, joints, |_| None, prepare)
}

impl Two {
    fn new(name: &str, persona: &Persona, behaviour: Behaviour, seed: u64) -> Self {
        let fake = Fake::new(persona.clone(), seed);
        let driver = FakeDriver::new(behaviour, seed);
        let processes = [driver.process(), driver.process()];
        let prepare = |engine: &mut Engine<'static, Mixed, 5>| {
            let matching = Box::leak(Box::new(MatchStorage::new(&MATCHING, 2, 16, 16)));
            engine.attach_matching(MATCHING, matching.memory()).unwrap();
        };
        let engines = (Config::DEFAULT, 1 << 16);
        let mut nodes = join(&fake, (name, persona), &processes, (seed, true), engines, prepare);
        let memory = [0, 1].map(|node| {
            let engine = &mut nodes[node].engine;
            let Some(Mixed::Device(rail)) = engine.rail_mut(RailId(0)) else { panic!("no device") };
            let at = rail.alloc(SIZE).unwrap();
            (engine.register(region(at, SIZE)).unwrap(), at)
        });
        let theirs = [0, 1].map(|node| {
            let mut handle = [0; 512];
            let len = nodes[1 - node].engine.export(memory[1 - node].0, &mut handle).unwrap();
            let peer = nodes[node].peers[1 - node];
            let theirs = nodes[node].engine.import(peer, &handle[..len]).unwrap();
            assert!(nodes[node].engine.is_carried(theirs));
            theirs
        });
        Two { nodes, processes, memory, theirs, _fake: Checked(fake) }
    }

    fn fill(&self, node: usize, at: u64, bytes: &[u8]) {
        self.processes[node].poke(self.memory[node].1.at(at), bytes).unwrap();
    }

    fn seen(&self, node: usize, at: u64, len: usize) -> Vec<u8> {
        self.processes[node].peek(self.memory[node].1.at(at), len).unwrap()
    }

    fn issue(&mut self, mut call: impl FnMut(&mut Self) -> Result<Issued, OpError>) -> Issued {
        for _ in 0..200_000 {
            match call(self) {
                Ok(issued) => return issued,
                Err(OpError::Again) => turn(&mut self.nodes),
                Err(error) => panic!("{error:?}"),
            }
        }
        panic!("no room after many passes");
    }

    fn complete(&mut self, issued: Issued) -> Outcome {
        let Issued::Pending(token) = issued else { panic!("not posted: {issued:?}") };
        let mut outcome = None;
        turn_until(&mut self.nodes, "a completion", |nodes| {
            outcome = nodes[0].engine.test(token).unwrap().map(|end| end.outcome);
            outcome.is_some()
        });
        outcome.unwrap()
    }

    fn quiet(&mut self) {
        turn_until(&mut self.nodes, "quiet", |nodes| {
            let peer = nodes[0].peers[1];
            nodes[0].engine.is_quiet(CX, peer).expect("the peer has not failed")
        });
    }
}

/// Returns the number of put-signals per provider and seed: `FISHPLATE_STRESS`, by default 1000.
fn rounds() -> u64 {
    env::var("FISHPLATE_STRESS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1000)
}

/// When a signal in host or device memory is visible, kernels see the data of all earlier puts.
#[test]
fn put_signals_between_devices_that_no_nic_accesses_are_visible_in_order() {
    const SLOTS: u64 = 8;
    const SLOT: u64 = SIZE / SLOTS;
    const WORD: u64 = SIZE - 8;
    for (name, persona) in personas() {
        for seed in seeds(2) {
            println!("{name}: seed {seed}");
            let behaviour = Behaviour { pieces: 3, ..Behaviour::LATE };
            let mut two = Two::new(name, &persona, behaviour, seed);
            let mut random = Random(!seed);
            let mut sent: [Vec<u8>; SLOTS as usize] = Default::default();
            let (mut checked, count) = (0, rounds());
            for n in 1..=count {
                let len = [0, 1, 8, 31, 200, 3000, 4048, 9000][random.below(8) as usize];
                let payload: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
                let at = (n % SLOTS) * SLOT;
                if n % SLOTS == 0 {
                    two.quiet();
                }
                two.fill(0, at, &payload);
                sent[(n % SLOTS) as usize] = payload;
                two.issue(|two| {
                    let node = &mut two.nodes[0];
                    let signal = match n % 2 {
                        0 => Signal::set(node.remotes[1].at(0), n),
                        _ => Signal::set(two.theirs[0].at(WORD), n),
                    };
                    let (from, to) = (two.memory[0].0.at(at), two.theirs[0].at(at));
                    node.engine.put_signal(CX, from, len, to, signal, Notice::Silent)
                });
                loop {
                    let host = word(&two.nodes[1].engine, two.nodes[1].target.at(0));
                    let device = u64::from_ne_bytes(two.seen(1, WORD, 8).try_into().unwrap());
                    let arrived = host.max(device);
                    assert!(
                        (checked..=n).contains(&arrived),
                        "{name}: seed {seed}: {arrived} after {checked}"
                    );
                    for n in (checked + 1).max(arrived.saturating_sub(SLOTS / 2))..=arrived {
                        let payload = &sent[(n % SLOTS) as usize];
                        let there = two.seen(1, (n % SLOTS) * SLOT, payload.len());
                        assert!(
                            there == *payload,
                            "{name}: seed {seed}: data put before signal {n} is missing"
                        );
                    }
                    checked = checked.max(arrived);
                    if checked + random.below(4) >= n && (n != count || checked == n) {
                        break;
                    }
                    turn(&mut two.nodes);
                }
            }
        }
    }
}

#[test]
fn gets_between_devices_that_no_nic_accesses_are_whole_at_their_completion() {
    for (name, persona) in personas() {
        let mut two = Two::new(name, &persona, Behaviour::LATE, 3);
        let mut random = Random(3);
        for _ in 0..20 {
            let len = 1 + random.below(60_000) as usize;
            let payload: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
            two.fill(1, 0, &payload);
            let issued = two.issue(|two| {
                let (into, from) = (two.memory[0].0.at(SIZE / 2), two.theirs[0].at(0));
                two.nodes[0].engine.get(CX, into, len, from, Notice::Report(1))
            });
            assert_eq!(two.complete(issued), Outcome::Done);
            assert!(two.seen(0, SIZE / 2, len) == payload, "{name}: {len} bytes");
        }
    }
}

#[test]
fn a_device_that_fails_a_piece_fails_its_peer_and_no_signal_follows() {
    for failing in [Call::Copy, Call::Reached] {
        let mut two = Two::new("tcp", &Persona::tcp(), Behaviour::LATE, 3);
        two.fill(0, 0, &[7; 9000]);
        two.processes[1].fail(failing, 1, DeviceError::Lost(719));
        two.issue(|two| {
            let signal = Signal::set(two.nodes[0].remotes[1].at(0), 1);
            let (from, to) = (two.memory[0].0.at(0), two.theirs[0].at(0));
            two.nodes[0].engine.put_signal(CX, from, 9000, to, signal, Notice::Silent)
        });
        let peer = two.nodes[1].peers[0];
        let mut error = None;
        turn_until(&mut two.nodes, "the loss of the peer", |nodes| {
            error = nodes[1].engine.peer_error(peer).unwrap();
            error.is_some()
        });
        assert_eq!(error, Some(PeerError::Rail(RailId(0))), "{failing:?}");
        (0..500).for_each(|_| turn(&mut two.nodes));
        assert_eq!(word(&two.nodes[1].engine, two.nodes[1].target.at(0)), 0, "{failing:?}");
    }
}
