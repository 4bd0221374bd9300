//! Mostly single-threaded tests: compares the pool with a simple model, and tries every misuse that
//! it detects.

#![cfg(not(fishplate_loom))]

extern crate std;

use core::sync::atomic::AtomicUsize;
use std::{
    collections::{HashMap, HashSet},
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
    vec,
    vec::Vec,
};

use super::*;
use crate::sync::testing::Random;

/// Creates slots with generations that start at `generation`.
fn slots<T>(capacity: usize, generation: u64) -> Vec<Slot<T>> {
    (0..capacity).map(|_| Slot::starting_at(generation)).collect()
}

/// A value that counts its drops.
#[derive(Debug)]
struct Counted<'c> {
    number: u64,
    ended: &'c AtomicUsize,
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.ended.fetch_add(1, Ordering::Relaxed);
    }
}

const LAST_GENERATION: u64 = (1 << 48) - 1;

/// Takes, holds and releases slots at random, and compares the values in use with sets.
#[test]
fn the_live_set_is_unique_and_generations_never_go_back() {
    let mut random = Random::new("pool against a model");
    for round in 0..40 {
        let capacity = 1 << random.within(0..7);
        let mut header = Header::new();
        let start = [0, LAST_GENERATION - 3][round % 2];
        let mut memory = slots::<u64>(capacity, start);
        let mut pool = Pool::new(&mut header, &mut memory, None).unwrap();
        let mut batch = Batch::new();
        let mut leases = vec![];
        let mut shared: Vec<(Shared<'_, u64>, u64)> = vec![];
        let mut ids: Vec<(Id, u64)> = vec![];
        let mut stale = vec![];
        let mut issued: HashMap<u16, u64> = HashMap::new();
        let (mut in_batch, mut next) = (0, 0);
        for _ in 0..3_000 {
            let live: HashSet<_> = leases
                .iter()
                .map(|(lease, _): &(Lease<'_, u64>, u64)| &raw const **lease)
                .collect();
            assert_eq!(live.len(), leases.len(), "two leases of one slot");
            let held: HashSet<_> = shared.iter().map(|(shared, _)| &raw const **shared).collect();
            assert!(live.is_disjoint(&held));
            match random.within(0..10) {
                0..=2 => match pool.create(next) {
                    Ok(lease) => {
                        leases.push((lease, next));
                        next += 1;
                    }
                    Err(Full(value)) => {
                        assert_eq!(value, next);
                        let distinct: HashSet<_> = shared.iter().map(|(_, value)| *value).collect();
                        let held =
                            distinct.union(&ids.iter().map(|(_, value)| *value).collect()).count();
                        assert_eq!(leases.len() + held + in_batch, capacity, "full too early");
                    }
                },
                3 if !leases.is_empty() => {
                    let (lease, value) = leases.swap_remove(random.within(0..leases.len()));
                    assert_eq!(*lease, value);
                    pool.release(lease);
                }
                4 if !leases.is_empty() => drop(leases.swap_remove(random.within(0..leases.len()))),
                5 if !leases.is_empty() => {
                    let (lease, _) = leases.swap_remove(random.within(0..leases.len()));
                    in_batch =
                        if in_batch == Batch::<u64>::LIMIT as usize { 1 } else { in_batch + 1 };
                    batch.release(lease);
                }
                6 if !leases.is_empty() => {
                    let (lease, value) = leases.swap_remove(random.within(0..leases.len()));
                    let handle = lease.share();
                    shared.extend((0..random.within(0..3)).map(|_| (handle.clone(), value)));
                    shared.push((handle, value));
                }
                7 if !shared.is_empty() => {
                    let (handle, value) = shared.swap_remove(random.within(0..shared.len()));
                    match handle.into_id() {
                        Ok(id) => {
                            let (index, generation) = (id.to_bits() as u16, id.to_bits() >> 16);
                            if let Some(before) = issued.insert(index, generation) {
                                assert_eq!(
                                    generation,
                                    (before + 1) & LAST_GENERATION,
                                    "generations count up by one"
                                );
                            }
                            ids.push((id, value));
                        }
                        Err(handle) => {
                            assert!(ids.iter().any(|(_, other)| *other == value));
                            pool.release_shared(handle);
                        }
                    }
                }
                8 if !ids.is_empty() => {
                    let (id, value) = ids.swap_remove(random.within(0..ids.len()));
                    assert_eq!(pool.get(id), Ok(&value));
                    match random.within(0..2) {
                        0 => shared.push((pool.redeem(id).unwrap(), value)),
                        _ => pool.release_id(id).unwrap(),
                    }
                    stale.push(id);
                }
                _ => {
                    batch.flush();
                    in_batch = 0;
                    if !stale.is_empty() {
                        let id = stale[random.within(0..stale.len())];
                        assert_eq!(pool.get(id).err(), Some(StaleId));
                        assert_eq!(pool.redeem(id).err(), Some(StaleId));
                    }
                    assert_eq!(
                        pool.get(Id::from_bits(random.next() | 1 << 15)).err(),
                        Some(StaleId)
                    );
                }
            }
        }
        let counts = pool.counts();
        assert!(counts.high_water <= capacity as u64 && counts.max_chain <= capacity as u64);
    }
}

#[test]
fn every_body_ends_once_whoever_releases_it() {
    let ended = AtomicUsize::new(0);
    let mut header = Header::new();
    let mut memory = slots(8, 0);
    let mut pool = Pool::new(&mut header, &mut memory, None).unwrap();
    let make = |number| Counted { number, ended: &ended };
    let [a, b, c, d] = [1, 2, 3, 4].map(|number| pool.create(make(number)).unwrap());
    assert_eq!([&a, &b, &c, &d].map(|lease| lease.number), [1, 2, 3, 4]);
    pool.release(a);
    drop(b);
    let mut batch = Batch::new();
    batch.release(c);
    let shared = d.share();
    drop(shared.clone());
    assert_eq!(ended.load(Ordering::Relaxed), 3);
    batch.release_shared(shared);
    assert_eq!(ended.load(Ordering::Relaxed), 4);
    drop(batch);
    drop(pool);
    assert_eq!(ended.load(Ordering::Relaxed), 4);
}

#[test]
fn generations_wrap_after_2_to_the_48_and_ids_before_it_are_stale() {
    let mut header = Header::new();
    let mut memory = slots::<u64>(1, LAST_GENERATION - 1);
    let mut pool = Pool::new(&mut header, &mut memory, None).unwrap();
    let mut ids = vec![];
    for value in 0..4 {
        let id = pool.create(value).unwrap().share().into_id().unwrap();
        assert_eq!(pool.get(id), Ok(&value));
        assert!(ids.iter().all(|&old| pool.get(old).is_err()));
        pool.release_id(id).unwrap();
        ids.push(id);
    }
    assert_eq!(
        ids.iter().map(|id| id.to_bits() >> 16).collect::<Vec<_>>(),
        [LAST_GENERATION - 1, LAST_GENERATION, 0, 1]
    );
}

#[test]
fn an_exhausted_pool_says_so_and_recovers_with_the_first_slot_given_back() {
    let slab = Slab::<u64, 4>::new();
    let mut pool = slab.claim().unwrap();
    for _ in 0..3 {
        let mut leases: Vec<_> = (0..4).map(|value| pool.create(value).unwrap()).collect();
        assert_eq!(pool.create(9).err(), Some(Full(9)));
        assert_eq!(pool.create_with(|| Ok::<_, ()>(9)).err(), Some(CreateError::Full));
        drop(leases.pop());
        leases.push(pool.create(5).unwrap());
        assert_eq!(pool.create(9).err(), Some(Full(9)));
        pool.release(leases.pop().unwrap());
        leases.push(pool.create(6).unwrap());
        leases.into_iter().for_each(|lease| pool.release(lease));
    }
    let counts = pool.counts();
    assert_eq!(
        (counts.full, counts.high_water, counts.remote_frees, counts.drains, counts.max_chain),
        (9, 4, 3, 3, 1)
    );
    assert_eq!((counts.allocs, counts.local_frees, pool.outstanding()), (18, 15, 0));
}

#[test]
fn slots_given_back_in_reverse_order_are_all_there_again() {
    for elsewhere in [false, true] {
        let slab = Slab::<u64, 16>::new();
        let mut pool = slab.claim().unwrap();
        for round in 0..3 {
            let leases: Vec<_> = (0..16).map(|value| pool.create(value).unwrap()).collect();
            let places: HashSet<_> = leases.iter().map(|lease| &raw const **lease).collect();
            assert_eq!(places.len(), 16, "round {round}");
            for (value, lease) in leases.into_iter().enumerate().rev() {
                assert_eq!(*lease, value as u64);
                if elsewhere { drop(lease) } else { pool.release(lease) }
            }
        }
        assert_eq!(pool.counts().max_chain, if elsewhere { 16 } else { 0 });
    }
}

#[test]
fn a_value_of_another_pool_goes_home_and_keeps_its_home_alive() {
    let slabs = [Slab::<u64, 2>::new(), Slab::new()];
    let [mut one, mut two] = slabs.each_ref().map(|slab| slab.claim().unwrap());
    let (a, b) = (one.create(1).unwrap(), two.create(2).unwrap());
    let held = b.share();
    let reference = held.clone();
    one.release_shared(held);
    assert_eq!(*reference, 2);
    two.release(a);
    assert_eq!((one.counts().local_frees, two.counts().local_frees), (0, 0));
    // Both slots of `one` are free again: they are in the list of slots that other threads
    // released.
    let leases = [one.create(3).unwrap(), one.create(4).unwrap()];
    assert!(one.create(5).is_err());
    two.close();
    assert_eq!(slabs[1].claim().err(), Some(AttachError::Claimed));
    assert_eq!(*reference, 2);
    let mut batch = Batch::new();
    leases.into_iter().for_each(|lease| batch.release(lease));
    batch.release_shared(reference);
    drop(batch);
    assert_eq!(one.create(6).as_deref(), Ok(&6));
    assert!(slabs[1].claim().is_ok());
}

#[test]
fn stale_and_forged_ids_are_refused() {
    let slab = Slab::<u64, 4>::new();
    let mut pool = slab.claim().unwrap();
    let lease = pool.create(7).unwrap();
    for bits in [0, 1, 3, 4, u64::MAX, 1 << 16, 0xffff] {
        assert_eq!(pool.get(Id::from_bits(bits)).err(), Some(StaleId), "{bits:#x}");
        assert_eq!(pool.release_id(Id::from_bits(bits)).err(), Some(StaleId), "{bits:#x}");
    }
    let shared = lease.share();
    let other = shared.clone();
    let id = shared.into_id().unwrap();
    let other = other.into_id().unwrap_err();
    assert_eq!(pool.release_id(Id::from_bits(id.to_bits() + (1 << 16))), Err(StaleId));
    assert_eq!(pool.release_id(id), Ok(()));
    // A second release is an error, and the other holder's value stays valid.
    assert_eq!(pool.release_id(id), Err(StaleId));
    assert_eq!(*other, 7);
    let next = other.into_id().unwrap();
    assert_ne!(next, id);
    assert_eq!(pool.redeem(next).map(|shared| *shared), Ok(7));
    assert_eq!(pool.create(8).as_deref(), Ok(&8));
}

#[test]
fn an_id_that_was_out_when_the_slab_was_given_up_is_stale_in_the_next_pool() {
    let mut header = Header::new();
    let mut memory = slots::<u64>(2, 0);
    let id = {
        let mut pool = Pool::new(&mut header, &mut memory, None).unwrap();
        pool.create(1).unwrap().share().into_id().unwrap()
    };
    let mut pool = Pool::new(&mut header, &mut memory, None).unwrap();
    assert_eq!(pool.get(id), Err(StaleId));
    let again = pool.create(2).unwrap().share().into_id().unwrap();
    assert_ne!(again, id);
}

#[test]
fn capacities_that_are_no_powers_of_two_are_refused() {
    let mut header = Header::new();
    for capacity in [0, 3, 48, 1000] {
        let mut memory = slots::<u8>(capacity, 0);
        let refused = Pool::new(&mut header, &mut memory, None).err();
        assert_eq!(refused, Some(AttachError::Capacity { slots: capacity }));
    }
    let mut memory = slots::<u8>(2 * MAX_CAPACITY, 0);
    assert!(Pool::new(&mut header, &mut memory, None).is_err());
    let mut memory = slots::<u8>(MAX_CAPACITY, 0);
    let mut pool = Pool::new(&mut header, &mut memory, None).unwrap();
    let ids: HashSet<_> =
        (0..MAX_CAPACITY).map(|_| pool.create(0).unwrap().share().into_id().unwrap()).collect();
    assert_eq!(ids.len(), MAX_CAPACITY);
    assert!(pool.create(0).is_err());
}

#[test]
fn construction_that_fails_or_panics_gives_the_slot_back() {
    let slab = Slab::<u64, 2>::new();
    let mut pool = slab.claim().unwrap();
    for _ in 0..10 {
        assert_eq!(pool.create_with(|| Err("no")).err(), Some(CreateError::Refused("no")));
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _ = pool.create_with(|| if true { panic!("planted") } else { Ok::<_, ()>(1) });
        }));
        assert!(panicked.is_err());
    }
    let both = [pool.create(1).unwrap(), pool.create_with(|| Ok::<_, ()>(2)).unwrap()];
    assert_eq!(both.map(|lease| *lease), [1, 2]);
}

#[test]
fn a_body_that_panics_as_it_ends_leaves_its_slot() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("planted");
        }
    }
    let slab = Slab::<Bomb, 1>::new();
    let mut pool = slab.claim().unwrap();
    let bomb = pool.create(Bomb).ok().unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| pool.release(bomb))).is_err());
    let bomb = pool.create(Bomb).ok().unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| drop(bomb))).is_err());
    let bomb = pool.create(Bomb).ok().unwrap();
    let mut batch = Batch::new();
    assert!(catch_unwind(AssertUnwindSafe(|| batch.release(bomb))).is_err());
    drop(batch);
    core::mem::forget(pool.create(Bomb).ok().unwrap());
}

#[test]
fn bodies_need_not_be_sendable() {
    let slab = Slab::<Rc<u8>, 2>::new();
    let mut pool = slab.claim().unwrap();
    let counted = Rc::new(1);
    let lease = pool.create(counted.clone()).unwrap();
    assert_eq!(Rc::strong_count(&counted), 2);
    drop(lease);
    assert_eq!(Rc::strong_count(&counted), 1);
}

/// A corrupted list makes the pool smaller, and has no other effect.
#[test]
fn links_that_somebody_overwrote_lead_nowhere() {
    for planted in [5, 4000, u32::MAX - 1, u32::MAX, 3] {
        let mut header = Header::new();
        let mut memory = slots::<u64>(4, 0);
        let mut pool = Pool::new(&mut header, &mut memory, None).unwrap();
        let leases: Vec<_> = (0..4).map(|value| pool.create(value).unwrap()).collect();
        for lease in leases {
            let slot = lease.vacate();
            // SAFETY: the slot stays in place. `vacate` consumed its lease, so it is never
            // released.
            let slot = unsafe { slot.as_ref() };
            slot.next.store(planted, Ordering::Relaxed);
        }
        pool.header().line.head.store(2, Ordering::Relaxed);
        let taken =
            (0..10).map_while(|value| pool.create(value).ok()).map(core::mem::forget).count();
        assert!((1..=10).contains(&taken), "{planted}");
        core::mem::forget(pool);
    }
}

#[test]
fn a_block_gives_back_what_was_put_in() {
    let block = Block::<40>::new([1u64, 2, 3, 4, 5]);
    // SAFETY: the block was made from this type.
    assert_eq!(unsafe { block.read::<[u64; 5]>() }, [1, 2, 3, 4, 5]);
    assert_eq!(core::mem::size_of::<Block<104>>(), 104);
}

#[cfg(feature = "alloc")]
mod heap {
    use std::{boxed::Box, thread};

    use super::*;
    use crate::sync::ring;

    #[test]
    fn the_heap_form_lends_more_than_it_has_if_asked_and_counts_it() {
        let mut pool = Pool::<Box<u64>>::on_heap(2).unwrap();
        let leases: Vec<_> = (0..5).map(|value| pool.create_or_spill(Box::new(value))).collect();
        assert_eq!(leases.iter().map(|lease| ***lease).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        assert_eq!((pool.counts().overflow, pool.counts().full, pool.counts().allocs), (3, 3, 2));
        let mut leases = leases.into_iter();
        pool.release(leases.next().unwrap());
        drop(leases.next());
        pool.release(leases.next().unwrap());
        let mut batch = Batch::new();
        batch.release(leases.next().unwrap());
        let shared = leases.next().unwrap().share();
        let shared = shared.clone().into_id().unwrap_err();
        pool.close();
        assert_eq!(**shared, 4);
        assert_eq!(Pool::<u8>::on_heap(0).err(), Some(AttachError::Capacity { slots: 0 }));
        assert_eq!(Pool::<u8>::on_heap(100).err(), Some(AttachError::Capacity { slots: 100 }));
    }

    /// Drops pools while their values are alive in four threads and in events. Under
    /// AddressSanitizer (tests/sanitize.sh) this shows leaks and uses after free.
    #[test]
    fn pools_destroyed_under_load_leave_nothing_behind() {
        const POOLS: usize = 10_000;
        static ENDED: AtomicUsize = AtomicUsize::new(0);
        type Body = (Counted<'static>, Box<u64>);
        let mut random = Random::new("pools destroyed under load");
        let mut created = 0;
        // Uses our own rings, because race checkers do not see into std's channels.
        let mut memory: [_; 3] =
            core::array::from_fn(|_| (ring::Header::new(), [MaybeUninit::uninit(); 64]));
        thread::scope(|scope| {
            let lanes = memory.each_mut().map(|(header, slots)| {
                let (tx, mut rx) =
                    ring::split::<Option<RawShared<'static, Body>>>(header, slots).unwrap();
                (tx, move || {
                    loop {
                        match rx.pop() {
                            // SAFETY: the value was just popped, and each value is popped once.
                            Some(raw) => break raw.map(|raw| unsafe { raw.open() }),
                            None => thread::yield_now(),
                        }
                    }
                })
            });
            let mut lanes: Vec<_> = lanes
                .into_iter()
                .enumerate()
                .map(|(way, (tx, mut next))| {
                    scope.spawn(move || {
                        let mut batch = Batch::new();
                        let mut kept = vec![];
                        while let Some(shared) = next() {
                            assert_eq!(shared.0.number, *shared.1);
                            match way {
                                0 => drop(shared),
                                1 => batch.release_shared(shared),
                                _ => kept.push(shared),
                            }
                            if kept.len() > 40 {
                                kept.clear();
                            }
                        }
                    });
                    tx
                })
                .collect();
            let mut send = |way: usize, shared: Option<Shared<'static, Body>>| {
                let raw = shared.map(Shared::into_raw);
                while lanes[way].push(raw).is_err() {
                    thread::yield_now();
                }
            };
            for _ in 0..POOLS {
                let mut pool = Pool::on_heap(16).unwrap();
                for number in 0..random.within(1..24) as u64 {
                    let body = (Counted { number, ended: &ENDED }, Box::new(number));
                    created += 1;
                    let Ok(lease) = pool.create(body) else { break };
                    match random.within(0..5) {
                        0 => pool.release(lease),
                        1 => {
                            let [one, other] = lease.share_twice();
                            send(0, Some(one));
                            send(2, Some(other));
                        }
                        way => send(way - 2, Some(lease.share())),
                    }
                }
                pool.close();
            }
            (0..3).for_each(|way| send(way, None));
        });
        assert_eq!(ENDED.load(Ordering::Relaxed), created);
    }
}
