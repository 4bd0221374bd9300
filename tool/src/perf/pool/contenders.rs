//! The contenders that need no other package: our pool, two kinds of ring under a mutex, and the
//! allocator.

use std::collections::VecDeque;
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

use fishplate_core::sync::pool::{Lease, Pool};

use super::scenario::{Body, Pools, first_lets_go};

/// Each stream has its own pool on the heap.
pub struct Fishplate;

impl Pools for Fishplate {
    const NAME: &'static str = "fishplate";
    type Own = Pool<'static, Body>;
    type Held = Lease<'static, Body>;

    fn streams(streams: usize, capacity: usize) -> Vec<Self::Own> {
        let pool =
            || Pool::on_heap(capacity.next_power_of_two()).expect("a power of two below the limit");
        (0..streams).map(|_| pool()).collect()
    }

    #[inline(always)]
    fn take(own: &mut Self::Own) -> Option<Self::Held> {
        let lease = own.create_with(|| Ok::<_, ()>(Body::new(1))).ok()?;
        black_box(&raw const *lease);
        Some(lease)
    }

    #[inline(always)]
    fn give(own: &mut Self::Own, held: Self::Held) {
        own.release(held);
    }

    #[inline(always)]
    fn twice(own: &mut Self::Own) -> bool {
        let Ok(lease) = own.create(Body::new(1)) else { return false };
        let [elsewhere, here] = lease.share_twice();
        drop(black_box(elsewhere));
        own.release_shared(here);
        true
    }
}

/// Keeps `KEPT` free blocks. Other blocks come from the allocator and return to it.
pub struct Ring(Mutex<VecDeque<Box<MaybeUninit<Body>>>>);

const KEPT: usize = 64;

impl Ring {
    fn fill(&self) {
        self.0.lock().expect("no panic").resize_with(KEPT, Box::new_uninit);
    }
}

/// Dropping this returns the block to the ring.
pub struct OfRing<R: Deref<Target = Ring>> {
    block: Option<Box<MaybeUninit<Body>>>,
    ring: R,
}

impl<R: Deref<Target = Ring>> OfRing<R> {
    #[inline(always)]
    fn take(ring: R) -> Self {
        let kept = ring.0.lock().expect("no panic").pop_front();
        let mut block = kept.unwrap_or_else(Box::new_uninit);
        block.write(Body::new(1));
        black_box(&raw const *block);
        OfRing { block: Some(block), ring }
    }

    #[inline(always)]
    fn two_holders(&self) -> bool {
        self.block.as_ref().is_some_and(|block| {
            // SAFETY: `take` wrote the body of the block. Nothing overwrites the body until the
            // block is dropped.
            first_lets_go(&unsafe { block.assume_init_ref() }.first);
            true
        })
    }
}

impl<R: Deref<Target = Ring>> Drop for OfRing<R> {
    #[inline(always)]
    fn drop(&mut self) {
        let mut ring = self.ring.0.lock().expect("no panic");
        if ring.len() < KEPT {
            ring.extend(self.block.take());
        }
    }
}

/// One ring for all streams, as in runtimes that could use our pool instead.
pub struct GlobalRing;

static GLOBAL: Ring = Ring(Mutex::new(VecDeque::new()));

impl Pools for GlobalRing {
    const NAME: &'static str = "mutex-ring-global";
    type Own = ();
    type Held = OfRing<&'static Ring>;

    fn streams(streams: usize, _capacity: usize) -> Vec<Self::Own> {
        GLOBAL.fill();
        vec![(); streams]
    }

    #[inline(always)]
    fn take(_own: &mut Self::Own) -> Option<Self::Held> {
        Some(OfRing::take(&GLOBAL))
    }

    #[inline(always)]
    fn give(_own: &mut Self::Own, held: Self::Held) {
        drop(held);
    }

    #[inline(always)]
    fn twice(_own: &mut Self::Own) -> bool {
        OfRing::take(&GLOBAL).two_holders()
    }
}

/// One ring per stream. The blocks keep their ring alive, because they may outlive the stream.
pub struct RingPerQueue;

impl Pools for RingPerQueue {
    const NAME: &'static str = "mutex-ring-per-queue";
    type Own = Arc<Ring>;
    type Held = OfRing<Arc<Ring>>;

    fn streams(streams: usize, _capacity: usize) -> Vec<Self::Own> {
        let ring = || {
            let ring = Ring(Mutex::default());
            ring.fill();
            Arc::new(ring)
        };
        (0..streams).map(|_| ring()).collect()
    }

    #[inline(always)]
    fn take(own: &mut Self::Own) -> Option<Self::Held> {
        Some(OfRing::take(own.clone()))
    }

    #[inline(always)]
    fn give(_own: &mut Self::Own, held: Self::Held) {
        drop(held);
    }

    #[inline(always)]
    fn twice(own: &mut Self::Own) -> bool {
        OfRing::take(own.clone()).two_holders()
    }
}

pub struct Boxes;

impl Pools for Boxes {
    const NAME: &'static str = "box";
    type Own = ();
    type Held = Box<Body>;

    fn streams(streams: usize, _capacity: usize) -> Vec<Self::Own> {
        vec![(); streams]
    }

    #[inline(always)]
    fn take(_own: &mut Self::Own) -> Option<Self::Held> {
        Some(black_box(Box::new(Body::new(1))))
    }

    #[inline(always)]
    fn give(_own: &mut Self::Own, held: Self::Held) {
        drop(held);
    }

    #[inline(always)]
    fn twice(_own: &mut Self::Own) -> bool {
        let held = black_box(Box::new(Body::new(1)));
        first_lets_go(&held.first);
        true
    }
}
