//! Compares our pool with allocators and other pools in the scenarios of `fishplate perf pool`.
//! Prints the same JSON rows.
//!
//! cargo run --release --example pool-comparison [OPERATIONS PER STREAM [STREAMS...]]

// Shared with the tool, which compares only the contenders that need no extra package.
#[path = "../../tool/src/perf/pool/contenders.rs"]
mod contenders;
#[path = "../../tool/src/perf/pool/rows.rs"]
mod rows;
#[path = "../../tool/src/perf/pool/scenario.rs"]
mod scenario;

use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use mimalloc::MiMalloc;

use contenders::{Boxes, Fishplate, GlobalRing, RingPerQueue};
use scenario::{Body, Pools, Scenario, first_lets_go};

fn main() {
    let mut numbers = std::env::args().skip(1).map(|word| word.parse::<usize>().expect("numbers"));
    let ops = numbers.next().unwrap_or(200_000) as u64;
    let mut streams: Vec<usize> = numbers.collect();
    if streams.is_empty() {
        streams = vec![1, 2, 4, 8, 16, 32];
    }
    let contenders = [
        rows::contender::<Fishplate>(),
        rows::contender::<GlobalRing>(),
        rows::contender::<RingPerQueue>(),
        rows::contender::<Boxes>(),
        rows::contender::<Mimalloc>(),
        rows::contender::<ArrayQueues>(),
        rows::contender::<ShardedSlab>(),
        rows::contender::<ObjectPool>(),
    ];
    let written: Result<(), std::convert::Infallible> =
        rows::run(&contenders, &Scenario::all(&streams), ops, |row| {
            println!("{}", row.json(1));
            Ok(())
        });
    match written {
        Ok(()) => {}
    }
}

/// Boxes allocated by mimalloc.
struct Mimalloc;

struct OfMimalloc(NonNull<Body>);

// SAFETY: this is the only handle to its block, and any thread may free it.
unsafe impl Send for OfMimalloc {}

const LAYOUT: Layout = Layout::new::<Body>();

impl Drop for OfMimalloc {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: the block was allocated with that layout, and this is its only handle.
        unsafe { MiMalloc.dealloc(self.0.as_ptr().cast(), LAYOUT) };
    }
}

impl Pools for Mimalloc {
    const NAME: &'static str = "mimalloc";
    type Own = ();
    type Held = OfMimalloc;

    fn streams(streams: usize, _capacity: usize) -> Vec<()> {
        vec![(); streams]
    }

    #[inline(always)]
    fn take(_own: &mut ()) -> Option<OfMimalloc> {
        // SAFETY: the layout's size is not zero.
        let block = NonNull::new(unsafe { MiMalloc.alloc(LAYOUT) })?.cast::<Body>();
        // SAFETY: the block was just allocated with the layout of a body.
        unsafe { block.write(Body::new(1)) };
        Some(OfMimalloc(black_box(block)))
    }

    #[inline(always)]
    fn give(_own: &mut (), held: OfMimalloc) {
        drop(held);
    }

    #[inline(always)]
    fn twice(own: &mut ()) -> bool {
        let held = Self::take(own);
        held.is_some_and(|held| {
            // SAFETY: `take` initialized the block.
            first_lets_go(unsafe { &held.0.as_ref().first });
            true
        })
    }
}

/// A slab whose free indices are in a bounded crossbeam queue, one per stream.
struct ArrayQueues;

struct Slab {
    free: ArrayQueue<usize>,
    blocks: Box<[UnsafeCell<MaybeUninit<Body>>]>,
}

// SAFETY: only the holder of a block's index accesses the block.
unsafe impl Sync for Slab {}

struct OfSlab {
    index: usize,
    slab: Arc<Slab>,
}

impl Drop for OfSlab {
    #[inline(always)]
    fn drop(&mut self) {
        let _ = self.slab.free.push(self.index);
    }
}

impl Pools for ArrayQueues {
    const NAME: &'static str = "crossbeam-array-queue";
    type Own = Arc<Slab>;
    type Held = OfSlab;

    fn streams(streams: usize, capacity: usize) -> Vec<Arc<Slab>> {
        let slab = || {
            let free = ArrayQueue::new(capacity);
            (0..capacity).for_each(|index| free.push(index).expect("room for each"));
            Arc::new(Slab {
                free,
                blocks: (0..capacity).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect(),
            })
        };
        (0..streams).map(|_| slab()).collect()
    }

    #[inline(always)]
    fn take(own: &mut Arc<Slab>) -> Option<OfSlab> {
        let index = own.free.pop()?;
        // SAFETY: the index was free, so no other holder accesses the block.
        unsafe { black_box((*own.blocks[index].get()).write(Body::new(1)) as *const Body) };
        Some(OfSlab { index, slab: own.clone() })
    }

    #[inline(always)]
    fn give(_own: &mut Arc<Slab>, held: OfSlab) {
        drop(held);
    }

    #[inline(always)]
    fn twice(own: &mut Arc<Slab>) -> bool {
        Self::take(own).is_some_and(|held| {
            // SAFETY: `take` initialized the block.
            first_lets_go(unsafe {
                &(*held.slab.blocks[held.index].get()).assume_init_ref().first
            });
            true
        })
    }
}

/// sharded-slab: one slab for all streams, because it shards by thread itself.
struct ShardedSlab;

struct OfShards {
    key: usize,
    slab: Arc<sharded_slab::Slab<Body>>,
}

impl Drop for OfShards {
    #[inline(always)]
    fn drop(&mut self) {
        self.slab.remove(self.key);
    }
}

impl Pools for ShardedSlab {
    const NAME: &'static str = "sharded-slab";
    type Own = Arc<sharded_slab::Slab<Body>>;
    type Held = OfShards;

    fn streams(streams: usize, _capacity: usize) -> Vec<Self::Own> {
        let one = Arc::new(sharded_slab::Slab::new());
        vec![one; streams]
    }

    #[inline(always)]
    fn take(own: &mut Self::Own) -> Option<OfShards> {
        let key = own.insert(Body::new(1))?;
        Some(OfShards { key: black_box(key), slab: own.clone() })
    }

    #[inline(always)]
    fn give(_own: &mut Self::Own, held: OfShards) {
        drop(held);
    }

    #[inline(always)]
    fn twice(own: &mut Self::Own) -> bool {
        Self::take(own).is_some_and(|held| {
            if let Some(body) = held.slab.get(held.key) {
                first_lets_go(&body.first);
            }
            true
        })
    }
}

/// object-pool: one pool per stream. A pool is a stack under a mutex, and creates an object when
/// empty.
struct ObjectPool;

type OfStack = object_pool::ReusableOwned<Box<Body>>;

impl Pools for ObjectPool {
    const NAME: &'static str = "object-pool";
    type Own = Arc<object_pool::Pool<Box<Body>>>;
    type Held = OfStack;

    fn streams(streams: usize, capacity: usize) -> Vec<Self::Own> {
        let pool = || Arc::new(object_pool::Pool::new(capacity, || Box::new(Body::new(0))));
        (0..streams).map(|_| pool()).collect()
    }

    #[inline(always)]
    fn take(own: &mut Self::Own) -> Option<OfStack> {
        let mut held = own.pull_owned(|| Box::new(Body::new(0)));
        **held = Body::new(1);
        black_box(&raw const **held);
        Some(held)
    }

    #[inline(always)]
    fn give(_own: &mut Self::Own, held: OfStack) {
        drop(held);
    }

    #[inline(always)]
    fn twice(own: &mut Self::Own) -> bool {
        Self::take(own).is_some_and(|held| {
            first_lets_go(&held.first);
            true
        })
    }
}
