//! The worlds: the kinds of rails that programs run over.

use std::ptr::NonNull;
use std::thread;
use std::time::{Duration, Instant};

use fishplate_core::engine::Engine;
use fishplate_core::mem::{Peer, PeerId, RailId, RegionKind};
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::{Dials, Packet, Sim, SimRail};
use fishplate_gpu::{GpuConfig, GpuRail, HostDevice};
use fishplate_shm::{Link, Role, ShmConfig, ShmRail, socket_pair};
use fishplate_sys::LinuxHost;
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail, negotiate};
use fishplate_testing::fabric::{Fake, Persona};

use super::end::End;
use super::memory::SIZE;
use super::program::World;
use super::users::Kind;

/// Borrows a rail of an end's engine.
macro_rules! rail {
    ($ends:ident[$end:expr]) => {
        $ends[$end].engine().rail_mut(RailId(0)).unwrap()
    };
}

/// A loopback rail that does not map memory.
pub struct Network(u64);

impl World<1> for Network {
    type Rail = Loopback<32>;
    const NAME: &'static str = "loopback";
    const ENDS: usize = 1;

    fn new(seed: u64) -> Self {
        Network(seed)
    }

    fn rail(&mut self, _: usize, _: usize) -> Self::Rail {
        if self.0.is_multiple_of(2) {
            Loopback::new()
        } else {
            Loopback::new().with_native_atomics()
        }
    }

    fn attach(&mut self, _: [(usize, PeerId); 2], _: &mut [End<Self::Rail, 1>]) {}
}

/// A loopback rail that maps memory.
pub struct Mapped(u64);

impl World<1> for Mapped {
    type Rail = Loopback<32>;
    const NAME: &'static str = "loopback that maps";
    const ENDS: usize = 1;

    fn new(seed: u64) -> Self {
        Mapped(seed)
    }

    fn rail(&mut self, _: usize, _: usize) -> Self::Rail {
        if self.0.is_multiple_of(2) { Loopback::mapped() } else { Loopback::mapped_where_shared() }
    }

    fn attach(&mut self, _: [(usize, PeerId); 2], _: &mut [End<Self::Rail, 1>]) {}
}

/// A simulated fabric and the memory that it borrows. Drop frees the fabric first.
struct Owned {
    sim: *mut Sim<'static>,
    packets: *mut [Packet],
}

impl Owned {
    fn new(dials: Dials, rails: u16, seed: u64) -> Self {
        let packets: *mut [Packet] = Box::into_raw(vec![Packet::EMPTY; 48].into_boxed_slice());
        // SAFETY: `packets` was just allocated, and is freed after the fabric.
        let sim = Sim::new(unsafe { &mut *packets }, 2, rails, dials, seed).unwrap();
        Owned { sim: Box::into_raw(Box::new(sim)), packets }
    }

    fn rail(&self, end: usize, rail: usize) -> SimRail<'static, 'static> {
        // SAFETY: programs drop their rails before their world, so the fabric is still alive.
        unsafe { &*self.sim }.endpoint(end as u16, rail as u16)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: `new` allocated both, and all rails that borrow them were dropped.
        unsafe {
            drop(Box::from_raw(self.sim));
            drop(Box::from_raw(self.packets));
        }
    }
}

/// A simulated fabric.
pub struct Simulated(Owned);

impl World<1> for Simulated {
    type Rail = SimRail<'static, 'static>;
    const NAME: &'static str = "a simulated fabric";

    fn new(seed: u64) -> Self {
        Simulated(Owned::new(
            if seed.is_multiple_of(2) { Dials::WILD } else { Dials::CALM },
            1,
            seed,
        ))
    }

    fn rail(&mut self, end: usize, _: usize) -> Self::Rail {
        self.0.rail(end, 0)
    }

    fn attach(
        &mut self,
        [(a, of_a), (b, of_b)]: [(usize, PeerId); 2],
        ends: &mut [End<Self::Rail, 1>],
    ) {
        rail!(ends[a]).attach(of_a.peer(), b as u16).unwrap();
        if a != b {
            rail!(ends[b]).attach(of_b.peer(), a as u16).unwrap();
        }
    }
}

/// A faulty rail over a simulated fabric. It reorders traffic.
pub struct Disordered(Owned, u64);

impl World<1> for Disordered {
    type Rail = Faulty<SimRail<'static, 'static>, 16>;
    const NAME: &'static str = "a simulated fabric that reorders";

    fn new(seed: u64) -> Self {
        Disordered(Owned::new(Dials::WILD, 1, seed), seed)
    }

    fn rail(&mut self, end: usize, _: usize) -> Self::Rail {
        Faulty::new(
            self.0.rail(end, 0),
            Faults { fail: 2, ..Faults::DISORDER },
            self.1 + end as u64,
        )
    }

    fn attach(
        &mut self,
        [(a, of_a), (b, of_b)]: [(usize, PeerId); 2],
        ends: &mut [End<Self::Rail, 1>],
    ) {
        rail!(ends[a]).inner_mut().attach(of_a.peer(), b as u16).unwrap();
        if a != b {
            rail!(ends[b]).inner_mut().attach(of_b.peer(), a as u16).unwrap();
        }
    }
}

/// Defines a simulated fabric with another user of the engine.
macro_rules! simulated {
    ($name:ident, $called:literal, $user:expr) => {
        pub struct $name(Simulated);

        impl World<1> for $name {
            type Rail = SimRail<'static, 'static>;
            const NAME: &'static str = $called;
            const USER: Kind = $user;

            fn new(seed: u64) -> Self {
                $name(Simulated::new(seed))
            }

            fn rail(&mut self, end: usize, rail: usize) -> Self::Rail {
                self.0.rail(end, rail)
            }

            fn attach(&mut self, links: [(usize, PeerId); 2], ends: &mut [End<Self::Rail, 1>]) {
                self.0.attach(links, ends);
            }
        }
    };
}

simulated!(Queued, "a queue", Kind::Queue);
simulated!(Matched, "a matched queue", Kind::Mq);

/// Two rails of a simulated fabric that reorders, with or without failover.
pub struct Two<const FAILOVER: bool>(Owned);

impl<const FAILOVER: bool> World<2> for Two<FAILOVER> {
    type Rail = SimRail<'static, 'static>;
    const NAME: &'static str = if FAILOVER { "two rails with failover" } else { "two rails" };
    const FAILOVER: bool = FAILOVER;

    fn new(seed: u64) -> Self {
        Two(Owned::new(Dials::WILD, 2, seed))
    }

    fn rail(&mut self, end: usize, rail: usize) -> Self::Rail {
        self.0.rail(end, rail)
    }

    fn attach(&mut self, [a, b]: [(usize, PeerId); 2], ends: &mut [End<Self::Rail, 2>]) {
        let both = [(a.0, a.1, b.0), (b.0, b.1, a.0)];
        for &(end, peer, other) in &both[..1 + usize::from(a.0 != b.0)] {
            for rail in [0, 1].map(RailId) {
                let mut setup = ends[end].engine().rail_mut(rail).unwrap();
                setup.attach(peer.peer(), other as u16).unwrap();
            }
        }
    }
}

const PATIENCE: Duration = Duration::from_secs(20);

fn shm_config(staging: bool) -> ShmConfig {
    ShmConfig {
        max_peers: 3,
        max_regions: 16,
        max_segments: 16,
        lane_cells: 128,
        max_message: 1024,
        force_staging: staging,
        timeout: Duration::from_millis(20),
        ..ShmConfig::default()
    }
}

type Shm = ShmRail<LinuxHost>;

fn attach_shm([(a, of_a), (b, of_b)]: [(usize, PeerId); 2], ends: &mut [End<Shm, 1>]) {
    if a == b {
        return rail!(ends[a]).attach_self(of_a.peer()).unwrap();
    }
    let profiles = [a, b].map(|end| ends[end].engine().rail(RailId(0)).unwrap().profile());
    let [first, second] = &profiles;
    let (ours, theirs) = socket_pair().unwrap();
    let deadline = Instant::now() + PATIENCE;
    let (ours, theirs) = thread::scope(|scope| {
        let other = scope.spawn(|| Link::over(theirs, Role::Second, second, deadline).unwrap());
        (Link::over(ours, Role::First, first, deadline).unwrap(), other.join().unwrap())
    });
    rail!(ends[a]).attach(of_a.peer(), ours).unwrap();
    rail!(ends[b]).attach(of_b.peer(), theirs).unwrap();
}

/// Shared memory. The kernel copies private memory.
pub struct Shared;

impl World<1> for Shared {
    type Rail = Shm;
    const NAME: &'static str = "shared memory";

    fn new(_: u64) -> Self {
        Shared
    }

    fn rail(&mut self, _: usize, _: usize) -> Shm {
        ShmRail::new(LinuxHost::shared(), shm_config(false)).unwrap()
    }

    fn attach(&mut self, links: [(usize, PeerId); 2], ends: &mut [End<Shm, 1>]) {
        attach_shm(links, ends);
    }
}

/// Shared memory. Private memory is sent through the lane.
pub struct Staged;

impl World<1> for Staged {
    type Rail = Shm;
    const NAME: &'static str = "shared memory in chunks";

    fn new(_: u64) -> Self {
        Staged
    }

    fn rail(&mut self, _: usize, _: usize) -> Shm {
        ShmRail::new(LinuxHost::shared(), shm_config(true)).unwrap()
    }

    fn attach(&mut self, links: [(usize, PeerId); 2], ends: &mut [End<Shm, 1>]) {
        attach_shm(links, ends);
    }
}

/// Devices backed by host memory, accessed directly or through bounce slots.
pub struct Devices(u64);

impl World<1> for Devices {
    type Rail = GpuRail<HostDevice, LinuxHost>;
    const NAME: &'static str = "devices";

    fn new(seed: u64) -> Self {
        Devices(seed)
    }

    fn rail(&mut self, _: usize, _: usize) -> Self::Rail {
        let gpu = GpuConfig {
            ops: 16,
            max_regions: 16,
            chunk: 1024,
            relay_slots: 4,
            relay_chunk: 4096,
            force_relay: self.0.is_multiple_of(2),
            pin_regions: self.0.is_multiple_of(3),
            mapped_store: 64,
            timeout: Duration::from_millis(20),
            ..GpuConfig::default()
        };
        GpuRail::new(
            HostDevice::new(),
            LinuxHost::shared(),
            shm_config(self.0.is_multiple_of(5)),
            gpu,
        )
        .unwrap()
    }

    fn attach(
        &mut self,
        [(a, of_a), (b, of_b)]: [(usize, PeerId); 2],
        ends: &mut [End<Self::Rail, 1>],
    ) {
        if a == b {
            return rail!(ends[a]).attach_self(of_a.peer()).unwrap();
        }
        let profiles = [a, b].map(|end| ends[end].engine().rail(RailId(0)).unwrap().profile());
        let (ours, theirs) = socket_pair().unwrap();
        let deadline = Instant::now() + PATIENCE;
        let [first, second] = &profiles;
        let (ours, theirs) = thread::scope(|scope| {
            let other = scope.spawn(|| {
                let link = Link::over(theirs, Role::Second, second.profile(), deadline).unwrap();
                second.agree(link, deadline).unwrap()
            });
            let link = Link::over(ours, Role::First, first.profile(), deadline).unwrap();
            (first.agree(link, deadline).unwrap(), other.join().unwrap())
        });
        rail!(ends[a]).attach(of_a.peer(), ours).unwrap();
        rail!(ends[b]).attach(of_b.peer(), theirs).unwrap();
    }

    fn device(engine: &mut Engine<'static, Self::Rail, 1>) -> Option<(NonNull<u8>, RegionKind)> {
        let at = engine.rail_mut(RailId(0))?.alloc(SIZE as u64).ok()?;
        Some((NonNull::new(at.0 as *mut u8)?, RegionKind::Device { ordinal: 0 }))
    }
}

/// A fake libfabric provider. Its persona depends on the seed.
pub struct Fabric {
    fake: Fake,
    name: &'static str,
    interface: &'static str,
    opened: u64,
}

impl World<1> for Fabric {
    type Rail = FabricRail;
    const NAME: &'static str = "libfabric";
    const OWN: bool = false;
    // A provider may not report dead peers, so memory may stay in use.
    const KEEPS: bool = true;
    const STEADY: bool = true;
    const STEPS: u64 = 500;

    fn new(seed: u64) -> Self {
        let all = Persona::all();
        let (name, persona) = all[seed as usize % all.len()].clone();
        let interface = persona.interfaces[0];
        Fabric { fake: Fake::new(persona, seed), name, interface, opened: seed << 16 }
    }

    fn rail(&mut self, _: usize, _: usize) -> FabricRail {
        let ask = Ask { interface: Some(self.interface), ..Ask::new(self.name) };
        let offer = negotiate(self.fake.library(), &ask).unwrap();
        self.opened += 1;
        let config = FabricConfig {
            max_peers: 3,
            depth: 16,
            receives: 16,
            bounces: 8,
            deadline: Some(Duration::from_millis(3)),
            seed: Some(self.opened),
            ..FabricConfig::default()
        };
        FabricRail::open(&offer, config).unwrap()
    }

    fn attach(
        &mut self,
        [(a, of_a), (b, of_b)]: [(usize, PeerId); 2],
        ends: &mut [End<Self::Rail, 1>],
    ) {
        let [of, by] =
            [a, b].map(|end| ends[end].engine().rail(RailId(0)).unwrap().address().unwrap());
        let mut attach = |end: usize, peer: Peer, address: &[u8]| {
            rail!(ends[end]).attach(peer, address).unwrap()
        };
        attach(a, of_a.peer(), &by);
        if a != b {
            attach(b, of_b.peer(), &of);
        }
    }
}
