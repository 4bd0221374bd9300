//! An owner and releasing threads, run as threads and under the model checker. The pools have two
//! slots, so that both full and empty occur. The model checker reports races and uses after free.

extern crate std;

use std::{
    boxed::Box,
    sync::{Arc, atomic::AtomicUsize},
    vec::Vec,
};

use super::*;
use crate::sync::testing::{model, rounds, thread};

/// The memory of a test's pool, which the last holder frees.
struct PoolMemory<const N: usize> {
    header: Header,
    slots: [Slot<u64>; N],
    ended: Arc<AtomicUsize>,
}

/// Creates a pool that frees its memory when the last reference is dropped. `ended` counts the
/// freed pools.
fn pool_of<const N: usize>(ended: &Arc<AtomicUsize>) -> Pool<'static, u64> {
    fn free<const N: usize>(memory: *mut ()) {
        // SAFETY: the pointer came from `Box::into_raw` below. The last holder calls this once,
        // when nothing uses the memory any more.
        let memory = unsafe { Box::from_raw(memory.cast::<PoolMemory<N>>()) };
        memory.ended.fetch_add(1, core::sync::atomic::Ordering::Relaxed);
    }
    let slots = core::array::from_fn(|_| Slot::starting_at(u64::MAX));
    let memory = Box::into_raw(Box::new(PoolMemory::<N> {
        header: Header::new(),
        slots,
        ended: ended.clone(),
    }));
    // SAFETY: the box was just leaked. Only `free` frees it, after the last use.
    let (header, slots) = unsafe { (&mut (*memory).header, &mut (*memory).slots) };
    Pool::new(header, slots, Some(Reclaim::new(free::<N>, memory.cast()))).unwrap()
}

fn ended_once(ended: &AtomicUsize) {
    assert_eq!(ended.load(core::sync::atomic::Ordering::Relaxed), 1, "times that the slab ended");
}

fn create(pool: &mut Pool<'static, u64>, value: u64) -> Lease<'static, u64> {
    loop {
        match pool.create(value) {
            Ok(lease) => return lease,
            Err(Full(_)) => thread::yield_now(),
        }
    }
}

/// Runs `give_back` in a separate thread for each lease.
fn elsewhere(
    leases: impl IntoIterator<Item = Lease<'static, u64>>,
    give_back: fn(Lease<'static, u64>),
) -> Vec<thread::JoinHandle<()>> {
    leases.into_iter().map(|lease| thread::spawn(move || give_back(lease))).collect()
}

fn join(threads: Vec<thread::JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn slots_given_back_elsewhere_are_created_in_again() {
    model(|| {
        for _ in 0..rounds(1, 200) {
            let ended = Arc::default();
            let mut pool = pool_of::<2>(&ended);
            let both = [create(&mut pool, 1), create(&mut pool, 2)];
            let threads = elsewhere(both, |mut lease| *lease += 10);
            let again = [create(&mut pool, 3), create(&mut pool, 4)];
            assert_eq!(again.each_ref().map(|lease| **lease), [3, 4]);
            assert!(pool.create(5).is_err());
            again.into_iter().for_each(|lease| pool.release(lease));
            join(threads);
            assert_eq!(pool.outstanding(), 0);
            pool.close();
            ended_once(&ended);
        }
    });
}

#[test]
fn values_outlive_their_pool_and_the_last_one_ends_the_slab() {
    model(|| {
        for _ in 0..rounds(1, 200) {
            let ended = Arc::default();
            let mut pool = pool_of::<4>(&ended);
            let local = create(&mut pool, 0);
            let both = [create(&mut pool, 1), create(&mut pool, 2)];
            let threads = elsewhere(both, |mut lease| *lease += 10);
            pool.release(local);
            pool.close();
            join(threads);
            ended_once(&ended);
        }
    });
}

#[test]
fn a_pool_closes_while_it_takes_and_others_give_back() {
    model(|| {
        for _ in 0..rounds(1, 200) {
            let ended = Arc::default();
            let mut pool = pool_of::<2>(&ended);
            let both = [create(&mut pool, 1), create(&mut pool, 2)];
            let threads = elsewhere(both, drop);
            if let Ok(lease) = pool.create(3) {
                pool.release(lease);
            }
            pool.close();
            join(threads);
            ended_once(&ended);
        }
    });
}

#[test]
fn the_last_holder_ends_the_value_after_all_uses() {
    model(|| {
        for _ in 0..rounds(1, 200) {
            let ended = Arc::default();
            let mut pool = pool_of::<2>(&ended);
            let shared = create(&mut pool, 7).share();
            let threads: Vec<_> = [shared.clone(), shared.clone()]
                .map(|clone| thread::spawn(move || assert_eq!(*clone, 7)))
                .into_iter()
                .collect();
            assert_eq!(*shared, 7);
            pool.release_shared(shared);
            join(threads);
            pool.close();
            ended_once(&ended);
        }
    });
}

#[test]
fn a_holder_that_is_alone_may_write() {
    model(|| {
        for _ in 0..rounds(1, 200) {
            let ended = Arc::default();
            let mut pool = pool_of::<2>(&ended);
            let mut shared = create(&mut pool, 7).share();
            let clone = shared.clone();
            let other = thread::spawn(move || assert_eq!(*clone, 7));
            let mut alone = loop {
                match shared.into_lease() {
                    Ok(lease) => break lease,
                    Err(back) => shared = back,
                }
                thread::yield_now();
            };
            *alone = 8;
            drop(alone);
            other.join().unwrap();
            pool.close();
            ended_once(&ended);
        }
    });
}

#[test]
fn a_batch_comes_back_whole() {
    model(|| {
        for _ in 0..rounds(1, 200) {
            let ended = Arc::default();
            let mut pool = pool_of::<4>(&ended);
            let [a, b, c] = [1, 2, 3].map(|value| create(&mut pool, value));
            let batching = thread::spawn(move || {
                let mut batch = Batch::new();
                batch.release(a);
                batch.release(b);
            });
            let threads = elsewhere([c], drop);
            let fourth = create(&mut pool, 4);
            let again = create(&mut pool, 5);
            assert_eq!((*fourth, *again), (4, 5));
            drop(fourth);
            pool.close();
            drop(again);
            batching.join().unwrap();
            join(threads);
            ended_once(&ended);
        }
    });
}

#[test]
fn an_id_carries_the_value_to_its_owner() {
    model(|| {
        for _ in 0..rounds(1, 200) {
            let ended = Arc::default();
            let mut pool = pool_of::<2>(&ended);
            let mut lease = create(&mut pool, 1);
            let published = Arc::new(AtomicU64::new(u64::MAX));
            let other = thread::spawn({
                let published = published.clone();
                move || {
                    *lease = 2;
                    let id = lease.share().into_id().unwrap();
                    // Relaxed on purpose: the program's way of passing the id orders nothing.
                    published.store(id.to_bits(), Ordering::Relaxed);
                }
            });
            let bits = loop {
                match published.load(Ordering::Relaxed) {
                    u64::MAX => thread::yield_now(),
                    bits => break bits,
                }
            };
            let id = Id::from_bits(bits);
            while pool.get(id).is_err() {
                thread::yield_now();
            }
            assert_eq!(pool.get(id), Ok(&2));
            assert_eq!(pool.release_id(id), Ok(()));
            assert_eq!(pool.release_id(id), Err(StaleId));
            other.join().unwrap();
            pool.close();
            ended_once(&ended);
        }
    });
}

#[test]
fn an_id_is_redeemed_without_a_look() {
    model(|| {
        let ended = Arc::default();
        let mut pool = pool_of::<2>(&ended);
        let mut lease = create(&mut pool, 1);
        // Guesses the slot's first id, from the generation at which `pool_of` starts.
        let id = Id::from_bits(u64::MAX << 16);
        let other = thread::spawn(move || {
            *lease = 2;
            assert_eq!(lease.share().into_id().unwrap().to_bits() & 1, 0);
        });
        let shared = loop {
            match pool.redeem(id) {
                Ok(shared) => break shared,
                Err(StaleId) => thread::yield_now(),
            }
        };
        assert_eq!(*shared, 2);
        pool.release_shared(shared);
        other.join().unwrap();
        pool.close();
        ended_once(&ended);
    });
}

#[test]
fn a_slab_is_claimed_again_once_all_is_back() {
    model(|| {
        let slab = Arc::new(Slab::<u64, 2>::new());
        let lent: &'static Slab<u64, 2> = {
            // SAFETY: the `Arc` of `slab` is dropped at the end of the test, after every use.
            unsafe { &*Arc::as_ptr(&slab) }
        };
        let mut pool = lent.claim().unwrap();
        let lease = create(&mut pool, 1);
        let other = thread::spawn(move || drop(lease));
        pool.close();
        let mut pool = loop {
            match lent.claim() {
                Ok(pool) => break pool,
                Err(error) => assert_eq!(error, AttachError::Claimed),
            }
            thread::yield_now();
        };
        drop([create(&mut pool, 2), create(&mut pool, 3)]);
        pool.close();
        other.join().unwrap();
        drop(slab);
    });
}
