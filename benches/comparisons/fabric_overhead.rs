//! Measures the overhead of the libfabric rail over the bare provider. One thread drives two
//! endpoints in this process, through rails and through bare `fi_*` calls.
//!
//! Usage: fabric-overhead PROVIDER [ROUNDS]
//!
//! | figure  | one run                                                              |
//! |---------|----------------------------------------------------------------------|
//! | latency | 1000 8-byte writes with data, each answered by a write            |
//! | bandwidth | 64 writes of 1 MiB with data, until all have arrived and completed |
//!
//! A round is four runs: rail, bare, bare, rail. So each side follows itself as often as it follows
//! the other. The latency rounds come before all bandwidth rounds: a bandwidth run evicts the
//! caches, and the run after it would pay to fill them for both sides. Prints the medians of the
//! times, and the median of the rounds' ratios.

use std::ptr;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use fishplate_core::error::{CompleteError, PeerError};
use fishplate_core::mem::{Peer, Region, RegionKind, Untrusted};
use fishplate_core::rail::{Local, Posted, Rail, Remote, Sink};
use fishplate_sys::fabric::av::AddressVector;
use fishplate_sys::fabric::cq::{CompletionQueue, EMPTY, Entry};
use fishplate_sys::fabric::domain::Domain;
use fishplate_sys::fabric::endpoint::{Buffer, Endpoint, Target};
use fishplate_sys::fabric::error::Code;
use fishplate_sys::fabric::fabric::Fabric;
use fishplate_sys::fabric::mr::MemoryRegion;
use fishplate_sys::fabric::raw::*;
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail, Library, Offer, negotiate};

const LEN: usize = 1 << 20;
const PEER: Peer = Peer(0);

/// The operations of two endpoints, with or without rails.
trait Ends {
    /// Posts a write from endpoint `from`. Returns `false` if there is no room.
    fn write(&mut self, from: usize, len: usize) -> bool;
    fn poll(&mut self, end: usize);
    /// Returns the number of arrivals and of completed writes of an endpoint.
    fn counts(&self, end: usize) -> (u64, u64);
}

fn memory() -> NonNull<u8> {
    NonNull::new(Box::leak(vec![1u8; LEN].into_boxed_slice()).as_mut_ptr()).unwrap()
}

#[derive(Default)]
struct Count(u64, u64);

impl Sink for Count {
    fn done(&mut self, _: u64, result: Result<(), CompleteError>) {
        result.unwrap();
        self.1 += 1;
    }
    fn landed(&mut self, _: Peer, _: u32) {
        self.0 += 1;
    }
    fn message(&mut self, _: Peer, _: Untrusted<'_>) {}
    fn peer_down(&mut self, _: Peer, why: PeerError) {
        panic!("{why:?}");
    }
}

struct Rails {
    rails: [FabricRail; 2],
    local: [Local; 2],
    remote: [Remote; 2],
    counts: [Count; 2],
}

impl Rails {
    fn new(offer: &Offer) -> Rails {
        let mut rails = [0, 1].map(|seed| {
            let config = FabricConfig {
                seed: Some(seed),
                max_regions: 4,
                deadline: None,
                ..FabricConfig::default()
            };
            FabricRail::open(offer, config).unwrap()
        });
        let addresses = rails.each_ref().map(|rail| rail.address().unwrap());
        let pointers = [memory(), memory()];
        let mut keys = vec![];
        let mut local = vec![];
        for (rail, ptr) in rails.iter_mut().zip(pointers) {
            // SAFETY: the memory is leaked, and nothing reads it.
            let region = unsafe { Region::new(ptr, LEN, RegionKind::Private) };
            let (key, desc) = rail.register(&region).unwrap();
            keys.push(key);
            local.push(Local { ptr, len: LEN, desc });
        }
        for (at, rail) in rails.iter_mut().enumerate() {
            rail.attach(PEER, &addresses[1 - at]).unwrap();
            rail.import(PEER, keys[1 - at], LEN as u64).unwrap();
        }
        let remote = [Remote { key: keys[1], offset: 0 }, Remote { key: keys[0], offset: 0 }];
        Rails { rails, local: [local[0], local[1]], remote, counts: Default::default() }
    }
}

impl Ends for Rails {
    fn write(&mut self, from: usize, len: usize) -> bool {
        let local = Local { len, ..self.local[from] };
        // SAFETY: the source is leaked. The other rail is attached, and the target lies inside its
        // imported region. An engine makes the same checks.
        match unsafe { self.rails[from].post_write_checked(PEER, local, self.remote[from], 7, 0) } {
            Ok(Posted::Done) => self.counts[from].1 += 1,
            Ok(Posted::Pending) => {}
            Err(_) => return false,
        }
        self.rails[from].flush();
        true
    }
    fn poll(&mut self, end: usize) {
        self.rails[end].poll(32, &mut self.counts[end]);
    }
    fn counts(&self, end: usize) -> (u64, u64) {
        (self.counts[end].0, self.counts[end].1)
    }
}

struct Bare {
    ends: [Endpoint; 2],
    from: [Buffer; 2],
    to: [Target; 2],
    contexts: Box<[[fi_context2; 256]; 2]>,
    next: [usize; 2],
    counts: [(u64, u64); 2],
    entries: [Entry; 32],
    inject: usize,
    level: Option<u64>,
    _regions: Vec<MemoryRegion>,
}

impl Bare {
    fn new(offer: &Offer) -> Bare {
        let info = &offer.info;
        let access = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
        let (mut regions, mut pointers, mut ends) = (vec![], vec![], vec![]);
        for key in [1, 2] {
            let fabric = Arc::new(Fabric::open(info).unwrap());
            let domain = Domain::open(fabric, info).unwrap();
            let cq = CompletionQueue::open(&domain, 4096).unwrap();
            let av = AddressVector::open(&domain, FI_AV_TABLE, 4).unwrap();
            let ptr = memory();
            pointers.push(ptr);
            // SAFETY: the memory is leaked, and nothing reads it.
            regions
                .push(unsafe { MemoryRegion::register(&domain, ptr, LEN, access, key) }.unwrap());
            ends.push(Endpoint::open(&domain, info, cq, av).unwrap());
        }
        let mut ends: [Endpoint; 2] = ends.try_into().unwrap();
        let names = ends.each_ref().map(|end| end.name().unwrap());
        let virt = info.domain().mr_mode & FI_MR_VIRT_ADDR != 0;
        let to = [0, 1].map(|at| Target {
            peer: ends[at].insert(&names[1 - at]).unwrap(),
            addr: if virt { pointers[1 - at].as_ptr() as u64 } else { 0 },
            key: regions[1 - at].key(),
        });
        let from = [0, 1].map(|at| Buffer {
            ptr: pointers[at].as_ptr(),
            len: LEN,
            desc: regions[at].desc(),
        });
        Bare {
            ends,
            from,
            to,
            contexts: Box::new([[fi_context2 { internal: [ptr::null_mut(); 8] }; 256]; 2]),
            next: [0; 2],
            counts: [(0, 0); 2],
            entries: [EMPTY; 32],
            inject: info.tx().inject_size,
            level: offer.persona.forgets_level.then(|| offer.level.flag()),
            _regions: regions,
        }
    }
}

impl Ends for Bare {
    fn write(&mut self, from: usize, len: usize) -> bool {
        let (end, buffer, to) =
            (&mut self.ends[from], Buffer { len, ..self.from[from] }, self.to[from]);
        if len <= self.inject {
            // SAFETY: the source is leaked, so it stays valid.
            let result = unsafe { end.inject_write(buffer, to, Some(7)) };
            self.counts[from].1 += result.is_ok() as u64;
            return result.is_ok();
        }
        let context = (&raw mut self.contexts[from][self.next[from] % 256]).cast();
        // SAFETY: the source is leaked. At most 64 writes are in flight, so each context word is
        // unused.
        let result = unsafe {
            match self.level {
                Some(level) => end.write_with(
                    buffer,
                    to,
                    7,
                    FI_COMPLETION | FI_REMOTE_CQ_DATA | level,
                    context,
                ),
                None => end.write(buffer, to, Some(7), context),
            }
        };
        self.next[from] += result.is_ok() as usize;
        result.is_ok()
    }
    fn poll(&mut self, end: usize) {
        match self.ends[end].completions(&mut self.entries) {
            Ok(n) => {
                for entry in &self.entries[..n] {
                    match entry.flags & FI_REMOTE_CQ_DATA != 0 {
                        true => self.counts[end].0 += 1,
                        false => self.counts[end].1 += 1,
                    }
                }
            }
            Err(Code::EAGAIN) => {}
            Err(code) => panic!("{code}"),
        }
    }
    fn counts(&self, end: usize) -> (u64, u64) {
        self.counts[end]
    }
}

/// Runs writes there and back. Returns nanoseconds per write.
fn latency(ends: &mut impl Ends) -> f64 {
    let began = Instant::now();
    for n in 0..1000 {
        let from = n % 2;
        let seen = ends.counts(1 - from).0;
        while !ends.write(from, 8) {
            ends.poll(0);
            ends.poll(1);
        }
        while ends.counts(1 - from).0 == seen {
            ends.poll(1 - from);
            ends.poll(from);
        }
    }
    began.elapsed().as_nanos() as f64 / 1000.0
}

/// Runs long writes. Returns nanoseconds per write.
fn bandwidth(ends: &mut impl Ends) -> f64 {
    let (before, over) = (ends.counts(1).0, ends.counts(0).1);
    let began = Instant::now();
    let mut posted = 0;
    while posted < 64 || ends.counts(1).0 < before + 64 || ends.counts(0).1 < over + 64 {
        if posted < 64 && ends.write(0, LEN) {
            posted += 1;
        }
        ends.poll(0);
        ends.poll(1);
    }
    began.elapsed().as_nanos() as f64 / 64.0
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Runs the rounds of one figure, and prints the figure.
fn compare(
    name: &str,
    rounds: usize,
    mut rails: impl FnMut() -> f64,
    mut bare: impl FnMut() -> f64,
) {
    let mut times = Vec::with_capacity(rounds);
    for round in 0..rounds + 2 {
        let (first, second, third, fourth) = (rails(), bare(), bare(), rails());
        // The first two rounds connect and warm up.
        if round >= 2 {
            times.push(((first + fourth) / 2.0, (second + third) / 2.0));
        }
    }
    let ratio = median(times.iter().map(|(rails, bare)| rails / bare).collect());
    let (rails, bare): (Vec<f64>, Vec<f64>) = times.into_iter().unzip();
    let (rails, bare) = (median(rails), median(bare));
    let over = (ratio - 1.0) * 100.0;
    println!("{name} rail {rails:.0} ns, bare {bare:.0} ns: {over:+.1} %");
}

fn main() {
    let provider = std::env::args().nth(1).unwrap_or("shm".into());
    let rounds: usize =
        std::env::args().nth(2).map_or(31, |n| n.parse().expect("a number of rounds"));
    // SAFETY: the linker's default library name for libfabric names a libfabric.
    let library = unsafe { Library::open(None) }.unwrap_or_else(|error| panic!("{error}"));
    let interface = if provider == "shm" { None } else { Some("lo") };
    let ask = Ask { interface, ..Ask::new(&provider) };
    let offer = negotiate(library, &ask).unwrap_or_else(|error| panic!("{error}"));
    println!("{offer:?}");
    let (rails, bare) = (&mut Rails::new(&offer), &mut Bare::new(&offer));
    compare("8 B write, seen to arrive:", rounds, || latency(rails), || latency(bare));
    compare("1 MiB write, 64 at once:  ", rounds, || bandwidth(rails), || bandwidth(bare));
}
