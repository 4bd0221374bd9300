//! Instruction counts of the pool: taking and returning slots by the owner, by other threads, in
//! batches and by id. Also counts queue commands and, for comparison, the system allocator.
//!
//! One thread runs both sides. The owner collects slots that other threads returned only when its
//! own list is empty. Each count includes a share of this collection.

// The attribute macros refer to this crate as `gungraun`.
extern crate iai_callgrind as gungraun;

use std::hint::black_box;
use std::mem::MaybeUninit;

use fishplate_benches::{REPEATS, limit};
use fishplate_core::engine::worker::Worker;
use fishplate_core::engine::{Config, ContextId, Engine, Tables};
use fishplate_core::queue::{Command, Queue, QueueStorage};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::sync::event::Channels;
use fishplate_core::sync::host::SpinHost;
use fishplate_core::sync::pool::{Batch, Header, Lease, Pool, Slot};
use fishplate_core::sync::spin::Policy;
use iai_callgrind::{
    Callgrind, EntryPoint, EventKind, LibraryBenchmarkConfig, library_benchmark,
    library_benchmark_group, main,
};

mod budget;
use budget::budget;

/// The slot type of all benchmarks: 128 bytes. The constructor writes none of them.
#[derive(Clone, Copy, Debug)]
#[repr(align(8))]
struct Body(#[expect(dead_code, reason = "room")] [MaybeUninit<u64>; 16]);

impl Body {
    #[inline(always)]
    fn new() -> Self {
        Self([MaybeUninit::uninit(); 16])
    }
}

/// Creates a pool of 64 slots that have all been used.
fn pool() -> Pool<'static, Body> {
    pool_of(64)
}

fn pool_of(capacity: usize) -> Pool<'static, Body> {
    let slots = Box::leak((0..capacity).map(|_| Slot::new()).collect());
    let mut pool = Pool::new(Box::leak(Box::new(Header::new())), slots, None).unwrap();
    let all: Vec<_> = std::iter::from_fn(|| pool.create(Body::new()).ok()).collect();
    all.into_iter().for_each(|lease| pool.release(lease));
    pool
}

/// Creates a pool, and takes [`REPEATS`] values from it.
fn out() -> (Pool<'static, Body>, Vec<Lease<'static, Body>>) {
    let mut pool = pool_of(1024);
    let leases = (0..REPEATS).map(|_| pool.create(Body::new()).unwrap()).collect();
    (pool, leases)
}

#[library_benchmark(config = budget("pool_local_pair"))]
#[bench::run(pool())]
fn pool_local_pair(mut pool: Pool<'static, Body>) -> Pool<'static, Body> {
    for _ in 0..REPEATS {
        let lease = pool.create(Body::new()).unwrap();
        black_box(&raw const *lease);
        pool.release(lease);
    }
    pool
}

// Takes 32 slots at once. Keeps the leases in memory, so the compiler cannot track them.
#[library_benchmark(config = budget("pool_window_32"))]
#[bench::run(pool())]
fn pool_window_32(mut pool: Pool<'static, Body>) -> Pool<'static, Body> {
    let mut held = [const { MaybeUninit::<Lease<'static, Body>>::uninit() }; 32];
    for _ in 0..REPEATS {
        for place in &mut held {
            place.write(pool.create(Body::new()).unwrap());
        }
        for place in black_box(&held) {
            // SAFETY: the loop above wrote each place, and this loop reads each once.
            pool.release(unsafe { place.assume_init_read() });
        }
    }
    pool
}

#[library_benchmark(config = budget("pool_remote_release"))]
#[bench::run(out())]
fn pool_remote_release(
    (pool, leases): (Pool<'static, Body>, Vec<Lease<'static, Body>>),
) -> Pool<'static, Body> {
    for lease in leases {
        drop(black_box(lease));
    }
    pool
}

#[library_benchmark(config = budget("pool_remote_pair"))]
#[bench::run(pool())]
fn pool_remote_pair(mut pool: Pool<'static, Body>) -> Pool<'static, Body> {
    for _ in 0..REPEATS {
        drop(black_box(pool.create(Body::new()).unwrap()));
    }
    pool
}

#[library_benchmark(config = budget("pool_batch_32"))]
#[bench::run(pool())]
fn pool_batch_32(mut pool: Pool<'static, Body>) -> Pool<'static, Body> {
    let mut batch = Batch::new();
    for _ in 0..REPEATS {
        for _ in 0..32 {
            batch.release(black_box(pool.create(Body::new()).unwrap()));
        }
        batch.flush();
    }
    pool
}

#[library_benchmark(config = budget("pool_id_pair"))]
#[bench::run(pool_of_words())]
fn pool_id_pair(mut pool: Pool<'static, u64>) -> Pool<'static, u64> {
    for value in 0..REPEATS {
        let id = pool.create(black_box(value)).unwrap().share().into_id().unwrap();
        pool.release_id(black_box(id)).unwrap();
    }
    pool
}

fn pool_of_words() -> Pool<'static, u64> {
    let slots = Box::leak((0..64).map(|_| Slot::new()).collect());
    Pool::new(Box::leak(Box::new(Header::new())), slots, None).unwrap()
}

/// A queue and its worker, on one thread.
struct Served {
    queue: Queue<'static, SpinHost>,
    worker: Worker<'static, 'static, 'static, Loopback<16>, 1>,
    host: &'static SpinHost,
}

fn served() -> Served {
    let host = Box::leak(Box::new(SpinHost::new(1)));
    let channels: &Channels = Box::leak(Box::new(Channels::new()));
    let memory = Box::leak(Box::new(QueueStorage::<64>::new())).memory();
    let (queue, consumer) =
        Queue::new(ContextId(0), host, channels.queue(0), memory, Policy::BALANCED).unwrap();
    let tables = Box::leak(Box::new(Tables::<1, 1, 128, 4, 16>::new()));
    let engine = Engine::new(Config::DEFAULT, [Loopback::new()], tables.memory()).unwrap();
    let worker =
        Worker::new(Box::leak(Box::new(engine)), Vec::leak(vec![consumer]), Policy::BALANCED);
    Served { queue, worker, host }
}

// Per command: create, submit, execute, read the event, and return the slot, plus a share of the
// worker's turn.
#[library_benchmark(config = budget("queue_32_commands"))]
#[bench::run(served())]
fn queue_32_commands(mut served: Served) -> Served {
    for _ in 0..REPEATS {
        let events: [_; 32] = std::array::from_fn(|_| {
            let command = served.queue.create(Command::Marker).unwrap();
            served.queue.enqueue(command)
        });
        served.queue.flush();
        served.worker.turn(served.host);
        assert!(black_box(events).iter().all(|event| event.is_done()));
    }
    served
}

#[library_benchmark]
#[bench::run()]
fn box_pair() {
    for _ in 0..REPEATS {
        drop(black_box(Box::new(Body::new())));
    }
}

/// One stream: rounds of 16 commands in flight, from its own pool.
#[inline(never)]
fn one_stream_of_commands(pool: &mut Pool<'static, Body>) {
    let mut held = [const { MaybeUninit::<Lease<'static, Body>>::uninit() }; 16];
    for _ in 0..REPEATS {
        for place in &mut held {
            place.write(pool.create(Body::new()).unwrap());
        }
        for place in black_box(&held) {
            // SAFETY: the loop above wrote each place, and this loop reads each once.
            pool.release(unsafe { place.assume_init_read() });
        }
    }
}

/// Limits the instructions of `one_stream_of_commands`, summed over all threads.
fn counting_threads(path: &str) -> LibraryBenchmarkConfig {
    let mut callgrind = Callgrind::default();
    callgrind
        .entry_point(EntryPoint::Custom("*one_stream_of_commands*".into()))
        .hard_limits([(EventKind::Ir, limit(path))]);
    LibraryBenchmarkConfig::default().tool(callgrind).clone()
}

fn streams(count: usize) -> Vec<Pool<'static, Body>> {
    (0..count).map(|_| pool()).collect()
}

fn run_streams(pools: Vec<Pool<'static, Body>>) {
    std::thread::scope(|scope| {
        for mut pool in pools {
            scope.spawn(move || one_stream_of_commands(&mut pool));
        }
    });
}

#[library_benchmark(config = counting_threads("pool_1_stream"))]
#[bench::run(streams(1))]
fn pool_1_stream(pools: Vec<Pool<'static, Body>>) {
    run_streams(pools);
}

#[library_benchmark(config = counting_threads("pool_32_streams"))]
#[bench::run(streams(32))]
fn pool_32_streams(pools: Vec<Pool<'static, Body>>) {
    run_streams(pools);
}

library_benchmark_group!(
    name = pools,
    benchmarks = [
        pool_local_pair,
        pool_window_32,
        queue_32_commands,
        pool_remote_release,
        pool_remote_pair,
        pool_batch_32,
        pool_id_pair,
        pool_1_stream,
        pool_32_streams,
        box_pair
    ]
);

main!(library_benchmark_groups = pools);
