//! Device memory that NICs access, over a fake provider with `FI_HMEM` and a fake GPU driver. The
//! driver makes a NIC's writes visible only after a flush.

use std::env;
use std::ptr::NonNull;
use std::sync::Arc;

use fishplate::{MatchStorage, direct, gpu};
use fishplate_core::engine::protocol::{MatchConfig, Payload, Received};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{Config, Issued, Notice, Signal};
use fishplate_core::error::{AttachError, CompleteError, OpError, PeerError};
use fishplate_core::mem::{LocalId, Peer, RailId, Region, RegionKind, RemoteId, Untrusted};
use fishplate_core::op::SignalOp;
use fishplate_core::rail::{self, Local, Posted, Rail, Sink};
use fishplate_sys::fabric::rail::Interface;
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail, negotiate};
use fishplate_testing::fabric::{Bus, Fake, Persona};
use gpu::fake::{Behaviour, Call, FakeDevice, FakeDriver, FakeProcess};
use gpu::{Device, DeviceError, DevicePtr};

use crate::behaviour::fleet::{Node, turn, turn_until};
use crate::behaviour::{Random, seeds, word};
use crate::engines;
use crate::fixture::Checked;
use crate::two::CX;

const SIZE: u64 = 1 << 20;

/// The bus of the fake NICs: it accesses the devices of both processes.
#[derive(Debug)]
pub struct Devices(pub [FakeProcess; 2]);

impl Devices {
    fn owner(&self, at: u64) -> &FakeProcess {
        let of = |process: &&FakeProcess| process.allocation(0, DevicePtr(at)).is_ok();
        self.0.iter().find(of).expect("an address of a device")
    }
}

impl Bus for Devices {
    fn device_of(&self, at: u64, len: usize) -> Option<u32> {
        let inside = |process: &FakeProcess| {
            let memory = process.allocation(0, DevicePtr(at)).ok();
            memory.is_some_and(|memory| at + len as u64 <= memory.base.0 + memory.size)
        };
        self.0.iter().any(inside).then_some(0)
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        self.owner(at).remote_write(DevicePtr(at), bytes).unwrap();
    }

    fn read(&self, at: u64, into: &mut [u8]) {
        into.copy_from_slice(&self.owner(at).peek(DevicePtr(at), into.len()).unwrap());
    }
}

/// Two engines with device memory that all their rails reach. The first engine sends to the second.
struct Two<const RAILS: usize> {
    nodes: Vec<Node<FabricRail, RAILS>>,
    processes: [FakeProcess; 2],
    /// Per node: its registered memory and the address of that memory. Then each node's import of
    /// the other's memory.
    memory: [(LocalId, DevicePtr); 2],
    theirs: [RemoteId; 2],
    _devices: [FakeDevice; 2],
    fake: Checked,
}

const FLUSHED: Behaviour = Behaviour { must_flush: true, ..Behaviour::LATE };

pub fn region(at: DevicePtr, len: u64) -> Region {
    let start = NonNull::new(at.0 as *mut u8).unwrap();
    // SAFETY: device memory, which rails do not dereference. It outlives the rails.
    unsafe { Region::new(start, len as usize, RegionKind::Device { ordinal: 0 }) }
}

impl<const RAILS: usize> Two<RAILS> {
    fn new(name: &str, persona: Persona, behaviour: Behaviour, seed: u64) -> Self {
        let persona = persona.with_devices();
        let fake = Fake::new(persona.clone(), seed);
        let driver = FakeDriver::new(behaviour, seed);
        let processes = [driver.process(), driver.process()];
        fake.join_devices(Arc::new(Devices(processes.clone())));
        let mut nodes =
            engines::join::<RAILS>(&fake, (name, &persona), seed, 2, Config::DEFAULT, 1 << 16);
        let mut devices = [0, 1].map(|node| processes[node].device(0).unwrap());
        let memory = [0, 1].map(|node| {
            let engine = &mut nodes[node].engine;
            for rail in 0..RAILS {
                let device = direct(processes[node].device(0).unwrap(), Interface::Cuda);
                engine.rail_mut(RailId(rail as u8)).unwrap().reach(device).unwrap();
            }
            let at = devices[node].alloc(SIZE).unwrap();
            (engine.register(region(at, SIZE)).unwrap(), at)
        });
        let theirs = [0, 1].map(|node| {
            let mut handle = [0; 512];
            let len = nodes[1 - node].engine.export(memory[1 - node].0, &mut handle).unwrap();
            let peer = nodes[node].peers[1 - node];
            nodes[node].engine.import(peer, &handle[..len]).unwrap()
        });
        Two { nodes, processes, memory, theirs, _devices: devices, fake: Checked(fake) }
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

    fn quiet(&mut self) {
        turn_until(&mut self.nodes, "quiet", |nodes| {
            let peer = nodes[0].peers[1];
            nodes[0].engine.is_quiet(CX, peer).expect("the peer has not failed")
        });
    }
}

/// Returns providers that together use all three ways to report arrivals.
pub fn personas() -> [(&'static str, Persona); 5] {
    [
        ("efa-direct", Persona::efa_direct()),
        ("efa", Persona::efa()),
        ("verbs;ofi_rxm", Persona::verbs_rxm()),
        ("cxi", Persona::cxi()),
        ("tcp", Persona::tcp()),
    ]
}

fn bytes(random: &mut Random, len: usize) -> Vec<u8> {
    (0..len).map(|_| random.next() as u8).collect()
}

/// Where the signal words are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Words {
    Host,
    Device,
}

/// Sends put-signals of mixed lengths from device memory to device memory. When a signal is
/// visible, all earlier puts must be visible to kernels.
fn put_signals(
    name: &str,
    persona: Persona,
    behaviour: Behaviour,
    words: Words,
    seed: u64,
    count: u64,
) {
    const SLOTS: u64 = 16;
    const SLOT: u64 = SIZE / SLOTS;
    // Offset of the signal word, after the longest payload of the last slot.
    const WORD: u64 = SIZE - 8;
    let mut two = Two::<4>::new(name, persona, behaviour, seed);
    let mut random = Random(!seed);
    // The payload last sent to each slot.
    let mut sent: [Vec<u8>; SLOTS as usize] = Default::default();
    let mut checked = 0;
    for n in 1..=count {
        let len = [0, 1, 8, 31, 64, 200, 3000, 20_000][random.below(8) as usize];
        let payload = bytes(&mut random, len);
        let at = (n % SLOTS) * SLOT;
        if n % SLOTS == 0 {
            two.quiet();
        }
        two.fill(0, at, &payload);
        sent[(n % SLOTS) as usize] = payload;
        two.issue(|two| {
            let node = &mut two.nodes[0];
            let signal = match words {
                Words::Host => Signal::set(node.remotes[1].at(0), n),
                Words::Device if n % 2 == 0 => Signal::set(two.theirs[0].at(WORD), n),
                Words::Device => Signal::add(two.theirs[0].at(WORD), 1),
            };
            let (from, to) = (two.memory[0].0.at(at), two.theirs[0].at(at));
            node.engine.put_signal(CX, from, len, to, signal, Notice::Silent)
        });
        loop {
            let arrived = match words {
                Words::Host => word(&two.nodes[1].engine, two.nodes[1].target.at(0)),
                Words::Device => u64::from_ne_bytes(two.seen(1, WORD, 8).try_into().unwrap()),
            };
            assert!(
                (checked..=n).contains(&arrived),
                "{name}: seed {seed}: {arrived} after {checked}"
            );
            // Later payloads may have overwritten older slots, so only the last slots are checked.
            for n in (checked + 1).max(arrived.saturating_sub(SLOTS / 2))..=arrived {
                let payload = &sent[(n % SLOTS) as usize];
                let there = two.seen(1, (n % SLOTS) * SLOT, payload.len());
                assert!(
                    there == *payload,
                    "{name}: seed {seed}: data put before signal {n} is missing"
                );
            }
            checked = checked.max(arrived);
            // Leaves a few puts in flight.
            if checked + random.below(6) >= n && (n != count || checked == n) {
                break;
            }
            turn(&mut two.nodes);
        }
    }
    assert_eq!(two.fake.0.device_registrations(), (2 * 4, 0));
}

/// Returns the number of put-signals per provider: `FISHPLATE_STRESS`, by default 500.
fn rounds() -> u64 {
    env::var("FISHPLATE_STRESS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(500)
}

#[test]
fn put_signals_between_devices_are_visible_in_order_over_four_rails() {
    for (name, persona) in personas() {
        for seed in seeds(2) {
            println!("{name}: seed {seed}");
            put_signals(name, persona.clone(), FLUSHED, Words::Host, seed, rounds());
        }
    }
}

#[test]
fn a_kernel_that_polls_a_word_of_its_device_sees_the_data_before_it() {
    for (name, persona) in personas() {
        for (seed, host_view) in seeds(2).into_iter().zip([false, true].into_iter().cycle()) {
            println!("{name}: seed {seed}, mapped for the processor: {host_view}");
            let behaviour = Behaviour { host_view, ..FLUSHED };
            put_signals(name, persona.clone(), behaviour, Words::Device, seed, rounds());
        }
    }
}

#[test]
fn a_get_into_device_memory_is_visible_at_its_completion() {
    for (name, persona) in personas() {
        for seed in seeds(4) {
            println!("{name}: seed {seed}");
            let mut two = Two::<2>::new(name, persona.clone(), FLUSHED, seed);
            let mut random = Random(seed);
            for _ in 0..50 {
                let len = 1 + random.below(50_000) as usize;
                let payload = bytes(&mut random, len);
                two.fill(1, 0, &payload);
                let issued = two.issue(|two| {
                    let (into, from) = (two.memory[0].0.at(0), two.theirs[0].at(0));
                    two.nodes[0].engine.get(CX, into, len, from, Notice::Report(1))
                });
                let Issued::Pending(token) = issued else { panic!("a read is posted") };
                while two.nodes[0].engine.test(token).unwrap().is_none() {
                    turn(&mut two.nodes);
                }
                assert!(two.seen(0, 0, len) == payload, "{name}: seed {seed}");
            }
        }
    }
}

#[test]
fn messages_between_devices_arrive() {
    const MATCHING: MatchConfig = MatchConfig::DEFAULT;
    for (name, persona) in personas() {
        for seed in seeds(2) {
            println!("{name}: seed {seed}");
            let mut two = Two::<2>::new(name, persona.clone(), FLUSHED, seed);
            for node in &mut two.nodes {
                let matching = Box::leak(Box::new(MatchStorage::new(&MATCHING, 2, 16, 16)));
                node.engine.attach_matching(MATCHING, matching.memory()).unwrap();
            }
            messages(name, two, seed);
        }
    }
}

fn messages(name: &str, mut two: Two<2>, seed: u64) {
    let mut random = Random(seed);
    for round in 0..40u64 {
        let len = [1, 64, 5000, 70_000][random.below(4) as usize];
        let payload = bytes(&mut random, len);
        two.fill(0, 0, &payload);
        // Posts the receive before the message in every second round.
        let early = round % 2 == 0;
        let post = |two: &mut Two<2>| {
            let (node, into) = (&mut two.nodes[1], two.memory[1].0.at(0));
            let peer = node.peers[0];
            node.engine.recv(Some(peer), Tag::from(round), Tag::ZERO, Some((into, len)), 0).unwrap()
        };
        let request = early.then(|| post(&mut two));
        two.issue(|two| {
            let (node, at) = (&mut two.nodes[0], two.memory[0].0.at(0));
            let peer = node.peers[1];
            node.engine.send(CX, peer, Tag::from(round), Payload::Region(at, len), Notice::Silent)
        });
        let request = request.unwrap_or_else(|| {
            (0..random.below(200)).for_each(|_| turn(&mut two.nodes));
            post(&mut two)
        });
        let status = loop {
            if let Some(status) = two.nodes[1].engine.test_recv(request).unwrap() {
                break status;
            }
            turn(&mut two.nodes);
        };
        assert_eq!(
            (status.outcome, status.delivered),
            (Received::Ok, len as u64),
            "{name}: seed {seed}"
        );
        assert!(
            two.seen(1, 0, len) == payload,
            "{name}: seed {seed}: message {round} of {len} bytes"
        );
        two.quiet();
    }
}

#[test]
fn memory_is_registered_by_dmabuf_if_supported() {
    for (driver, provider) in [(false, true), (true, false), (true, true)] {
        let persona = Persona { dmabuf: provider, ..Persona::efa_direct() };
        let mut two = Two::<2>::new(
            "efa-direct",
            persona,
            Behaviour { dmabuf: driver, ..Behaviour::PLAIN },
            1,
        );
        let by_descriptor = if driver && provider { 4 } else { 0 };
        assert_eq!(two.fake.0.device_registrations(), (4, by_descriptor));
        // Memory that begins within a page has an offset in its descriptor.
        let part = region(two.memory[0].1.at(5000), 300);
        let part = two.nodes[0].engine.register(part).unwrap();
        let more = if by_descriptor == 0 { 0 } else { 2 };
        assert_eq!(two.fake.0.device_registrations(), (6, by_descriptor + more));
        two.nodes[0].engine.deregister(part).unwrap();
        for node in 0..2 {
            let (theirs, own) = (two.theirs[node], two.memory[node].0);
            two.nodes[node].engine.release(theirs).unwrap();
            two.nodes[node].engine.deregister(own).unwrap();
        }
        assert_eq!(two.fake.0.device_registrations(), (0, 0));
    }
}

#[test]
fn device_memory_is_refused_by_rails_that_cannot_reach_it() {
    let persona = Persona::efa_direct().with_devices();
    let fake = Checked(Fake::new(persona.clone(), 1));
    let driver = FakeDriver::new(Behaviour::PLAIN, 1);
    let processes = [driver.process(), driver.process()];
    fake.0.join_devices(Arc::new(Devices(processes.clone())));
    let mut device = processes[0].device(0).unwrap();
    let memory = region(device.alloc(4096).unwrap(), 4096);
    let open = |devices| {
        let ask = Ask { interface: Some(persona.interfaces[0]), devices, ..Ask::new("efa-direct") };
        FabricRail::open(&negotiate(fake.0.library(), &ask).unwrap(), FabricConfig::default())
            .unwrap()
    };
    let reached = |ordinal| direct(processes[0].device(ordinal).unwrap(), Interface::Cuda);
    // Memory is refused by a rail without a device, one opened without device memory, and one with
    // another device.
    let mut without = open(true);
    assert_eq!(without.register(&memory), Err(AttachError::Unsupported));
    let mut unasked = open(false);
    unasked.reach(reached(0)).unwrap();
    assert_eq!(unasked.register(&memory), Err(AttachError::Unsupported));
    let mut other = open(true);
    other.reach(reached(1)).unwrap();
    assert_eq!(other.register(&memory), Err(AttachError::Unsupported));
    let mut rail = open(true);
    rail.reach(reached(0)).unwrap();
    assert_eq!(
        rail.reach(reached(1)),
        Err(AttachError::Full("a rail has one device; use another rail for another device"))
    );
    assert!(rail.register(&memory).is_ok());
    // Host memory, declared as device memory, is refused.
    let mut host = vec![0u8; 4096];
    // SAFETY: `register` refuses the region before any access.
    let claimed = unsafe {
        Region::new(NonNull::from(&mut host[0]), 4096, RegionKind::Device { ordinal: 0 })
    };
    assert_eq!(rail.register(&claimed), Err(AttachError::System(libc::EFAULT)));
}

/// Checks device memory whenever a write is reported.
struct Look<'a> {
    process: &'a FakeProcess,
    memory: DevicePtr,
    reported: u32,
}

impl Sink for Look<'_> {
    fn done(&mut self, _: u64, result: Result<(), CompleteError>) {
        assert_eq!(result, Ok(()));
    }

    fn landed(&mut self, _: Peer, data: u32) {
        let byte = self.process.peek(self.memory.at(data.into()), 1).unwrap();
        assert_eq!(byte, [data as u8], "reported before it was flushed");
        self.reported += 1;
    }

    fn message(&mut self, _: Peer, _: Untrusted<'_>) {}

    fn peer_down(&mut self, _: Peer, why: PeerError) {
        panic!("{why:?}");
    }
}

#[test]
fn a_write_is_flushed_before_it_is_reported() {
    const COUNT: u32 = 200;
    // The calm providers also fill whole batches.
    for (name, persona) in
        personas().into_iter().flat_map(|(name, p)| [(name, p.clone()), (name, p.calm())])
    {
        println!("{name}");
        let persona = persona.with_devices();
        let fake = Checked(Fake::new(persona.clone(), 1));
        let driver = FakeDriver::new(FLUSHED, 1);
        let processes = [driver.process(), driver.process()];
        fake.0.join_devices(Arc::new(Devices(processes.clone())));
        let open = || {
            let ask =
                Ask { interface: Some(persona.interfaces[0]), devices: true, ..Ask::new(name) };
            FabricRail::open(&negotiate(fake.0.library(), &ask).unwrap(), FabricConfig::default())
                .unwrap()
        };
        let (mut origin, mut target) = (open(), open());
        origin.attach(Peer(0), &target.address().unwrap()).unwrap();
        target.attach(Peer(0), &origin.address().unwrap()).unwrap();
        target.reach(direct(processes[0].device(0).unwrap(), Interface::Cuda)).unwrap();
        let mut device = processes[0].device(0).unwrap();
        let memory = device.alloc(4096).unwrap();
        let (key, _) = target.register(&region(memory, 4096)).unwrap();
        origin.import(Peer(0), key, 4096).unwrap();
        let source = crate::conformance::leaked(COUNT as usize);
        let (_, desc) = origin.register(&source).unwrap();
        let mut look = Look { process: &processes[0], memory, reported: 0 };
        let mut posted = 0;
        for _ in 0..100_000 {
            if look.reported == COUNT {
                break;
            }
            while posted < COUNT {
                let ptr =
                    NonNull::new(source.ptr().as_ptr().wrapping_add(posted as usize)).unwrap();
                let (local, at) =
                    (Local { ptr, len: 1, desc }, rail::Remote { key, offset: posted.into() });
                // SAFETY: `ptr` is leaked memory of sufficient size.
                unsafe { ptr.write(posted as u8) };
                // SAFETY: the source is leaked, and the target is registered device memory.
                if unsafe { origin.post_write(Peer(0), local, at, Some(posted), 7) }.is_err() {
                    break;
                }
                posted += 1;
            }
            origin.flush();
            origin.poll(32, &mut look);
            target.poll(32, &mut look);
        }
        assert_eq!(look.reported, COUNT, "{name}");
        drop(origin);
        drop(target);
    }
}

/// Checks device memory when a read is reported.
struct Ended<'a>(&'a FakeProcess, DevicePtr, u32);

impl Sink for Ended<'_> {
    fn done(&mut self, _: u64, result: Result<(), CompleteError>) {
        assert_eq!(result, Ok(()));
        assert_eq!(self.0.peek(self.1, 8).unwrap(), [0xaa; 8], "reported before it was flushed");
        self.2 += 1;
    }

    fn landed(&mut self, _: Peer, _: u32) {}

    fn message(&mut self, _: Peer, _: Untrusted<'_>) {}

    fn peer_down(&mut self, _: Peer, _: PeerError) {}
}

#[test]
fn a_read_that_a_fence_finds_complete_is_flushed_before_it_is_reported() {
    let persona = Persona::tcp().calm().with_devices();
    let fake = Checked(Fake::new(persona.clone(), 1));
    let driver = FakeDriver::new(FLUSHED, 1);
    let processes = [driver.process(), driver.process()];
    fake.0.join_devices(Arc::new(Devices(processes.clone())));
    let open = || {
        let ask = Ask { interface: Some(persona.interfaces[0]), devices: true, ..Ask::new("tcp") };
        FabricRail::open(&negotiate(fake.0.library(), &ask).unwrap(), FabricConfig::default())
            .unwrap()
    };
    let (mut origin, mut target) = (open(), open());
    origin.attach(Peer(0), &target.address().unwrap()).unwrap();
    target.attach(Peer(0), &origin.address().unwrap()).unwrap();
    origin.reach(direct(processes[0].device(0).unwrap(), Interface::Cuda)).unwrap();
    let mut device = processes[0].device(0).unwrap();
    let memory = device.alloc(4096).unwrap();
    let into = region(memory, 4096);
    let (_, desc) = origin.register(&into).unwrap();
    let source = crate::conformance::leaked(8);
    // SAFETY: the region is leaked, and has 8 bytes.
    unsafe { source.ptr().as_ptr().write_bytes(0xaa, 8) };
    let (key, _) = target.register(&source).unwrap();
    origin.import(Peer(0), key, 8).unwrap();
    let local = Local { ptr: into.ptr(), len: 8, desc };
    // SAFETY: the device memory is registered, and lives until the end of the test.
    let posted = unsafe { origin.post_read(Peer(0), local, rail::Remote { key, offset: 0 }, 7) };
    assert_eq!(posted, Ok(Posted::Pending));
    let mut ended = Ended(&processes[0], memory, 0);
    // The provider completes the read while nobody reads the origin's queue.
    (0..1000).for_each(|_| _ = target.poll(32, &mut ended));
    assert_eq!(origin.fence(Peer(0)), rail::Fence::Fenced);
    origin.poll(32, &mut ended);
    assert_eq!(ended.2, 1);
    drop((origin, target));
}

#[test]
fn a_signal_is_not_applied_when_the_flush_before_it_fails() {
    for (name, persona) in personas() {
        println!("{name}");
        let mut two = Two::<1>::new(name, persona, FLUSHED, 3);
        two.processes[1].fail(Call::Flush, 0, DeviceError::Lost(719));
        two.fill(0, 0, &[7; 3000]);
        two.issue(|two| {
            let signal = Signal { at: two.nodes[0].remotes[1].at(0), op: SignalOp::Set, value: 1 };
            let (from, to) = (two.memory[0].0.at(0), two.theirs[0].at(0));
            two.nodes[0].engine.put_signal(CX, from, 3000, to, signal, Notice::Silent)
        });
        let peer = two.nodes[1].peers[0];
        turn_until(&mut two.nodes, "the loss of the peer", |nodes| {
            nodes[1].engine.peer_error(peer) != Ok(None)
        });
        (0..500).for_each(|_| turn(&mut two.nodes));
        assert_eq!(word(&two.nodes[1].engine, two.nodes[1].target.at(0)), 0, "{name}");
    }
}

#[test]
fn a_short_write_from_a_device_is_posted_and_one_from_the_processor_copied() {
    let persona = Persona::efa().calm().with_devices();
    for attached_before in [false, true] {
        let fake = Checked(Fake::new(persona.clone(), 1));
        let driver = FakeDriver::new(Behaviour::PLAIN, 1);
        let processes = [driver.process(), driver.process()];
        fake.0.join_devices(Arc::new(Devices(processes.clone())));
        let mut device = processes[0].device(0).unwrap();
        let open = || {
            let ask =
                Ask { interface: Some(persona.interfaces[0]), devices: true, ..Ask::new("efa") };
            FabricRail::open(&negotiate(fake.0.library(), &ask).unwrap(), FabricConfig::default())
                .unwrap()
        };
        let (mut rail, mut target) = (open(), open());
        let attach =
            |rail: &mut FabricRail| rail.attach(Peer(0), &target.address().unwrap()).unwrap();
        if attached_before {
            attach(&mut rail);
        }
        rail.reach(direct(processes[0].device(0).unwrap(), Interface::Cuda)).unwrap();
        if !attached_before {
            attach(&mut rail);
        }
        let (key, _) = target.register(&crate::conformance::leaked(64)).unwrap();
        rail.import(Peer(0), key, 64).unwrap();
        let memories = [region(device.alloc(4096).unwrap(), 4096), crate::conformance::leaked(64)];
        let posted = memories.map(|memory| {
            let (_, desc) = rail.register(&memory).unwrap();
            let local = Local { ptr: memory.ptr(), len: 8, desc };
            // SAFETY: both regions live until the end of the test.
            unsafe { rail.post_write(Peer(0), local, rail::Remote { key, offset: 0 }, Some(1), 7) }
        });
        assert_eq!(posted, [Ok(Posted::Pending), Ok(Posted::Done)]);
        drop(rail);
        drop(target);
    }
}
