//! Instruction counts of the pool: taking and giving back a slot by its owner, from elsewhere, in batches and by id; and of the
//! allocator of the system, for comparison.
//!
//! One thread does both sides. Given back from elsewhere, slots come home when the owner's list is empty: a share of that is in
//! the count of every pair.

// The macros name the crate by the name it goes by now.
extern crate iai_callgrind as gungraun;

use std::hint::black_box;

use fishplate_benches::{REPEATS, limit};
use fishplate_core::sync::pool::{Batch, Header, Lease, Pool, Slot};
use iai_callgrind::{
    Callgrind, EventKind, LibraryBenchmarkConfig, library_benchmark, library_benchmark_group, main,
};

/// The body that all benchmarks use: 128 bytes, of which a constructor writes the first word.
#[derive(Clone, Copy, Debug)]
#[repr(align(8))]
struct Body(#[expect(dead_code, reason = "room")] [std::mem::MaybeUninit<u64>; 16]);

impl Body {
    #[inline(always)]
    fn new() -> Self {
        Self([std::mem::MaybeUninit::uninit(); 16])
    }
}

fn budget(path: &str) -> LibraryBenchmarkConfig {
    let mut callgrind = Callgrind::default();
    callgrind.hard_limits([(EventKind::Ir, limit(path))]);
    LibraryBenchmarkConfig::default().tool(callgrind).clone()
}

/// A pool of 64 slots that have all been used.
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

/// Values that are out, and their pool.
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

#[library_benchmark]
#[bench::run()]
fn box_pair() {
    for _ in 0..REPEATS {
        drop(black_box(Box::new(Body::new())));
    }
}

library_benchmark_group!(
    name = pools,
    benchmarks =
        [pool_local_pair, pool_remote_release, pool_remote_pair, pool_batch_32, pool_id_pair, box_pair]
);

main!(library_benchmark_groups = pools);
