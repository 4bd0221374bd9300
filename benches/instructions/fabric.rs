//! Instruction counts of the libfabric rail inside its guard, as in a node, over a provider that
//! does nothing ([`noop`]). For each path there is a `bare_` path that makes the same provider
//! calls without a rail. The difference is the rail's share. The `put_` paths run an engine over
//! the rail: puts in passes of 16, until all are acknowledged.

// The attribute macros refer to this crate as `gungraun`.
extern crate iai_callgrind as gungraun;

use std::hint::black_box;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use fishplate::guard::Guard;
use fishplate_benches::setup::{leak, memory, region};
use fishplate_benches::{REPEATS, noop};
use fishplate_core::engine::{Asleep, Config, ContextId, Engine, HANDLE_MAX, Notice, Waiter};
use fishplate_core::error::{CompleteError, PeerError};
use fishplate_core::mem::{
    LocalAddr, Peer, PeerId, RailId, Region, RegionKind, RemoteAddr, Untrusted,
};
use fishplate_core::rail::{Local, Rail, Remote, Sink};
use fishplate_core::sync::host::SpinHost;
use fishplate_sys::fabric::av::AddressVector;
use fishplate_sys::fabric::cq::{CompletionQueue, EMPTY};
use fishplate_sys::fabric::domain::Domain;
use fishplate_sys::fabric::endpoint::{Buffer, Endpoint, Target};
use fishplate_sys::fabric::fabric::Fabric;
use fishplate_sys::fabric::persona::Notify;
use fishplate_sys::fabric::raw::FI_RECV;
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail, negotiate};
use iai_callgrind::{library_benchmark, library_benchmark_group, main};

mod budget;
use budget::budget;

const PEER: Peer = Peer(0);

#[derive(Default)]
struct Count(u64);

impl Sink for Count {
    fn done(&mut self, cx: u64, _: Result<(), CompleteError>) {
        self.0 += cx;
    }
    fn landed(&mut self, peer: Peer, data: u32) {
        self.0 += peer.0 as u64 + data as u64;
    }
    fn message(&mut self, _: Peer, bytes: Untrusted<'_>) {
        self.0 += bytes.len() as u64;
    }
    fn peer_down(&mut self, _: Peer, _: PeerError) {}
}

/// A guarded rail that is its own peer.
struct Own {
    rail: Guard<FabricRail>,
    local: Local,
    remote: Remote,
}

fn ask() -> Ask<'static> {
    Ask { notify: Some(Notify::Word), ..Ask::new("noop") }
}

fn own(inject: bool) -> &'static mut Own {
    let offer = negotiate(noop::library(), &ask()).unwrap();
    let config = FabricConfig { seed: Some(1), inject, ..FabricConfig::default() };
    let mut rail = FabricRail::open(&offer, config).unwrap();
    rail.attach_self(PEER).unwrap();
    let bytes = Box::leak(Box::new([0u8; 64]));
    let ptr = NonNull::new(bytes.as_mut_ptr()).unwrap();
    // SAFETY: the memory is leaked, and nothing writes to it.
    let region = unsafe { Region::new(ptr, 64, RegionKind::Private) };
    let (key, desc) = rail.register(&region).unwrap();
    rail.import(PEER, key, 64).unwrap();
    // The rail asks for a completion of the first messages to a peer. Sends them here, uncounted.
    for n in 0..8 {
        rail.post_message(PEER, &[7; 24], Untrusted::from_slice(&[]), n).unwrap();
        rail.poll(32, &mut Count(0));
    }
    let local = Local { ptr, len: 8, desc };
    let rail = Guard::new(rail, RailId(0), None);
    Box::leak(Box::new(Own { rail, local, remote: Remote { key, offset: 8 } }))
}

/// Creates a rail. The rail's next polls report writes from its peer.
fn expecting() -> &'static mut Own {
    let own = own(true);
    let address = own.rail.inner().address().unwrap();
    let number = u32::from_le_bytes(address[8..12].try_into().unwrap());
    noop::arrive(REPEATS * 32, (number as u64) << 32 | 1);
    own
}

fn bare() -> &'static mut Endpoint {
    let offer = negotiate(noop::library(), &ask()).unwrap();
    let fabric = Arc::new(Fabric::open(&offer.info).unwrap());
    let domain = Domain::open(fabric, &offer.info).unwrap();
    let cq = CompletionQueue::open(&domain, 0).unwrap();
    let av = AddressVector::open(&domain, 0, 1).unwrap();
    Box::leak(Box::new(Endpoint::open(&domain, &offer.info, cq, av).unwrap()))
}

#[library_benchmark(config = budget("fabric_write_to_completion"))]
#[bench::run(own(false))]
fn fabric_write_to_completion(own: &'static mut Own) {
    let mut count = Count(0);
    for n in 0..REPEATS {
        // SAFETY: the source is leaked.
        black_box(
            unsafe { own.rail.post_write(PEER, own.local, own.remote, Some(n as u32), n) }.unwrap(),
        );
        own.rail.flush();
        own.rail.poll(32, &mut count);
    }
    assert_eq!(count.0, REPEATS * (REPEATS - 1) / 2);
}

#[library_benchmark]
#[bench::run(bare())]
fn bare_write_to_completion(endpoint: &'static mut Endpoint) {
    let mut bytes = [0u8; 8];
    let (mut entries, mut sum) = ([EMPTY; 32], 0);
    let from = Buffer { ptr: bytes.as_mut_ptr(), len: 8, desc: ptr::null_mut() };
    let to = Target { peer: 0, addr: 8, key: 1 };
    for n in 0..REPEATS {
        let context = ptr::without_provenance_mut(n as usize);
        // SAFETY: the source outlives the loop, and the provider does not dereference contexts.
        unsafe { endpoint.write(black_box(from), to, Some(n), context) }.unwrap();
        let got = endpoint.completions(&mut entries).unwrap();
        for entry in &entries[..got] {
            sum += entry.op_context.addr() as u64;
        }
    }
    assert_eq!(sum, REPEATS * (REPEATS - 1) / 2);
}

#[library_benchmark(config = budget("fabric_write_inject"))]
#[bench::run(own(true))]
fn fabric_write_inject(own: &'static mut Own) {
    for n in 0..REPEATS {
        // SAFETY: the source is leaked.
        black_box(
            unsafe { own.rail.post_write(PEER, own.local, own.remote, Some(n as u32), n) }.unwrap(),
        );
    }
}

#[library_benchmark]
#[bench::run(bare())]
fn bare_write_inject(endpoint: &'static mut Endpoint) {
    let mut bytes = [0u8; 8];
    let from = Buffer { ptr: bytes.as_mut_ptr(), len: 8, desc: ptr::null_mut() };
    for n in 0..REPEATS {
        let to = Target { peer: 0, addr: 8, key: 1 };
        // SAFETY: the source outlives the call.
        black_box(unsafe { endpoint.inject_write(black_box(from), to, Some(n)) }).unwrap();
    }
}

#[library_benchmark(config = budget("fabric_message"))]
#[bench::run(own(true))]
fn fabric_message(own: &'static mut Own) {
    for n in 0..REPEATS {
        black_box(
            own.rail.post_message(PEER, &[7; 24], Untrusted::from_slice(&[1; 8]), n).unwrap(),
        );
    }
}

#[library_benchmark(config = budget("fabric_poll_idle"))]
#[bench::run(own(true))]
fn fabric_poll_idle(own: &'static mut Own) {
    let mut count = Count(0);
    for _ in 0..REPEATS {
        black_box(own.rail.poll(32, &mut count));
    }
}

#[library_benchmark(config = budget("fabric_landed_32"))]
#[bench::run(expecting())]
fn fabric_landed_32(own: &'static mut Own) {
    let mut count = Count(0);
    for _ in 0..REPEATS {
        own.rail.poll(32, &mut count);
    }
    assert_eq!(count.0, REPEATS * 32);
}

/// An engine over a guarded rail that is its own peer.
struct Whole {
    engine: Engine<'static, Guard<FabricRail>, 1>,
    peer: PeerId,
    // Source and target of the puts. Not constants, so that the compiler cannot specialize for
    // them.
    from: LocalAddr,
    len: usize,
    to: RemoteAddr,
}

/// Writes per acknowledgement: half a window, as in an engine.
const ACKNOWLEDGED: u64 = Config::DEFAULT.window as u64 / 2;

/// Puts between two passes.
const PACE: u64 = 16;

/// Number of puts per benchmark: a multiple of `ACKNOWLEDGED`, so that all are acknowledged at the
/// end.
const PUTS: u64 = REPEATS / ACKNOWLEDGED * ACKNOWLEDGED;

/// Makes the provider deliver acknowledgements for context 0 and `epoch`. They carry `number`, the
/// id of the sending rail.
fn acknowledge(number: u32, epoch: u32) {
    const USER: u64 = 0x6d_7367;
    const ACK: u64 = 5;
    let sequence = Config::DEFAULT.window.ilog2() + 2;
    let word = (epoch << sequence) as u64 & 0xff_ffff;
    noop::answer(ACKNOWLEDGED, [USER << 32 | number as u64, ACK | word << 32]);
}

fn whole(inject: bool) -> &'static mut Whole {
    let Own { rail, .. } = own(inject);
    let address = rail.inner().address().unwrap();
    // SAFETY: the rail is leaked, and nothing else uses it after this read.
    let rail = unsafe { ptr::read(rail) };
    let config = Config::DEFAULT;
    let mut engine = Engine::new(config, [rail], memory(&config, 1)).unwrap();
    let peer = engine.reserve_peer().unwrap();
    engine.connect_peer(peer, 1).unwrap();
    noop::echo(true);
    while engine.has_answered(peer) == Ok(false) {
        engine.progress();
    }
    let [_, hello, _] = noop::echo(false);
    let epoch = (hello >> 32) as u32;
    acknowledge(u32::from_le_bytes(address[8..12].try_into().unwrap()), epoch);
    let from = engine.register(region()).unwrap().at(0);
    let mut handle = [0; HANDLE_MAX];
    let len = engine.export(from.region, &mut handle).unwrap();
    let to = engine.import(peer, &handle[..len]).unwrap().at(8);
    Box::leak(Box::new(Whole { engine, peer, from, len: 8, to }))
}

/// Posts silent puts, with a pass after every 16. Ends when the last put is acknowledged and
/// nothing is left to send.
fn puts(whole: &'static mut Whole) {
    for _ in 0..PUTS / PACE {
        for _ in 0..PACE {
            let whole = black_box(&mut *whole);
            whole
                .engine
                .put(ContextId(0), whole.from, whole.len, whole.to, Notice::Silent)
                .unwrap();
        }
        whole.engine.progress();
    }
    let (host, never) = (SpinHost::new(1), Asleep::new());
    whole.engine.quiet(ContextId(0), whole.peer, &mut Waiter::awake(&host, &never), 0).unwrap();
}

#[library_benchmark(config = budget("put_over_fabric"))]
#[bench::run(whole(false))]
fn put_over_fabric(whole: &'static mut Whole) {
    puts(whole);
}

#[library_benchmark(config = budget("put_over_fabric_inject"))]
#[bench::run(whole(true))]
fn put_over_fabric_inject(whole: &'static mut Whole) {
    puts(whole);
}

/// Makes the same provider calls as [`puts`]: writes, queue reads, and a receive per
/// acknowledgement.
fn bare_puts(endpoint: &'static mut Endpoint, inject: bool) {
    let (bytes, buffer) = (leak(0u8, 8), leak(0u8, 64));
    let (mut entries, mut ended, mut acknowledged) = ([EMPTY; 32], 0, 0);
    let from = Buffer { ptr: bytes.as_mut_ptr(), len: 8, desc: ptr::null_mut() };
    let into = Buffer { ptr: buffer.as_mut_ptr(), len: 64, desc: ptr::null_mut() };
    let to = Target { peer: 0, addr: 8, key: 1 };
    // SAFETY: the buffers are leaked, and the provider does not dereference contexts.
    unsafe { endpoint.recv(into, ptr::null_mut()) }.unwrap();
    for pass in 0..PUTS / PACE {
        for n in 0..PACE {
            let context = ptr::without_provenance_mut(n as usize);
            let data = Some(pass * PACE + n);
            // SAFETY: the buffers are leaked, and the provider does not dereference contexts.
            let posted = unsafe {
                match inject {
                    true => endpoint.inject_write(black_box(from), to, data),
                    false => endpoint.write(black_box(from), to, data, context),
                }
            };
            posted.unwrap();
        }
        while let Ok(got) = endpoint.completions(&mut entries) {
            for entry in &entries[..got] {
                if entry.flags & FI_RECV != 0 {
                    acknowledged += ACKNOWLEDGED;
                    // SAFETY: the buffers are leaked, and the provider does not dereference
                    // contexts.
                    unsafe { endpoint.recv(into, ptr::null_mut()) }.unwrap();
                } else {
                    ended += 1;
                }
            }
            if got < entries.len() {
                break;
            }
        }
    }
    assert_eq!((acknowledged, ended), (PUTS, if inject { 0 } else { PUTS }));
}

fn bare_answered() -> &'static mut Endpoint {
    acknowledge(0, 0);
    bare()
}

#[library_benchmark]
#[bench::run(bare_answered())]
fn bare_put(endpoint: &'static mut Endpoint) {
    bare_puts(endpoint, false);
}

#[library_benchmark]
#[bench::run(bare_answered())]
fn bare_put_inject(endpoint: &'static mut Endpoint) {
    bare_puts(endpoint, true);
}

library_benchmark_group!(
    name = fabric,
    benchmarks = [
        put_over_fabric,
        bare_put,
        put_over_fabric_inject,
        bare_put_inject,
        fabric_write_to_completion,
        bare_write_to_completion,
        fabric_write_inject,
        bare_write_inject,
        fabric_message,
        fabric_poll_idle,
        fabric_landed_32
    ]
);

main!(library_benchmark_groups = fabric);
