//! Single-threaded tests: compares the ring with a `VecDeque`, and runs it against a hostile
//! peer.

#![cfg(not(fishplate_loom))]

extern crate std;

use core::{mem::MaybeUninit, ptr::NonNull};
use std::{boxed::Box, collections::VecDeque, vec, vec::Vec};

use super::*;
use crate::sync::testing::Random;

/// Starting counters: zero, and values just before a wrap of 32, 63 and 64 bits.
const STARTS: [u64; 4] = [0, u32::MAX as u64 - 3, u64::MAX / 2 - 3, u64::MAX - 3];

/// Memory laid out as two processes would share it, without the second process.
struct Mapping {
    header: Box<Header>,
    slots: Box<[u64]>,
}

impl Mapping {
    fn starting_at(count: u64, slots: usize) -> Self {
        // A guard slot on each side detects writes outside the ring.
        Self {
            header: Box::new(Header::starting_at(count)),
            slots: vec![GUARD; slots + 2].into_boxed_slice(),
        }
    }

    fn sides(&mut self) -> (Producer<'_, u64, Shared>, Consumer<'_, u64, Shared>) {
        let capacity = self.slots.len() - 2;
        let header = NonNull::from(&*self.header);
        let slots = NonNull::from(&mut self.slots[1]);
        // SAFETY: header and slots live as long as the borrow of `self`, which excludes other uses.
        // Every u64 is valid.
        unsafe {
            (
                Producer::from_raw(header, slots, capacity).unwrap(),
                Consumer::from_raw(header, slots, capacity).unwrap(),
            )
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        assert_eq!(
            (self.slots[0], self.slots[self.slots.len() - 1]),
            (GUARD, GUARD),
            "wrote outside the slots"
        );
    }
}

const GUARD: u64 = 0xdead_beef_dead_beef;

/// Runs random operations of every form on both sides, and compares each with a `VecDeque`.
fn agrees_with_a_queue<M: RingMemory>(
    random: &mut Random,
    (mut tx, mut rx): (Producer<'_, u64, M>, Consumer<'_, u64, M>),
) {
    let capacity = tx.capacity();
    let mut queue = VecDeque::new();
    let mut next = 0u64;
    for _ in 0..2_000 {
        let len = random.within(0..capacity + 2);
        let fits = capacity - queue.len();
        match random.within(0..10) {
            0 | 1 => {
                assert_eq!(tx.push(next).is_ok(), fits > 0);
                queue.extend((fits > 0).then_some(next));
            }
            2 => {
                let values: Vec<u64> = (next..next + len as u64).collect();
                let pushed = tx.push_slice(&values);
                assert_eq!(pushed, len.min(fits));
                queue.extend(&values[..pushed]);
            }
            3 => match tx.reserve(len) {
                Some(reserved) => {
                    assert!(len <= fits);
                    reserved.fill(|at| next + at as u64);
                    queue.extend(next..next + len as u64);
                }
                None => assert!(len > fits),
            },
            4 => {
                if let Some(mut reserved) = tx.reserve(len.min(fits)) {
                    let kept = random.within(0..reserved.len() + 1);
                    let mut at = next;
                    for (first, run) in reserved.parts() {
                        for place in 0..run {
                            // SAFETY: `place` is inside the run, which is reserved for this
                            // producer.
                            unsafe { first.add(place).write(at) };
                            at += 1;
                        }
                    }
                    // SAFETY: the loop above filled all reserved slots.
                    unsafe { reserved.publish(kept) };
                    queue.extend(next..next + kept as u64);
                }
            }
            5 | 6 => {
                assert_eq!(rx.peek(), queue.front().copied());
                assert_eq!(rx.pop(), queue.pop_front());
            }
            7 => {
                let mut into = vec![0; len];
                let popped = rx.pop_slice(&mut into);
                assert_eq!(popped, len.min(queue.len()));
                assert!(queue.drain(..popped).eq(into[..popped].iter().copied()));
            }
            8 => match rx.filled(len) {
                Some(filled) => {
                    assert_eq!(filled.len(), len.min(queue.len()));
                    assert!(filled.iter().eq(queue.iter().copied().take(filled.len())));
                    assert_eq!(filled.get(filled.len()), None);
                    let released = random.within(0..filled.len() + 1);
                    filled.release(released);
                    queue.drain(..released);
                }
                None => assert!(len == 0 || queue.is_empty()),
            },
            _ => {
                assert_eq!(
                    (tx.free(), rx.len(), rx.is_empty()),
                    (fits, queue.len(), queue.is_empty())
                );
            }
        }
        next += capacity as u64 + 2;
        assert!(!tx.is_corrupt() && !rx.is_corrupt());
        assert_eq!(tx.published().wrapping_sub(rx.released()), queue.len() as u64);
    }
}

#[test]
fn a_private_ring_agrees_with_a_queue_under_random_operations() {
    let mut random = Random::new("private ring");
    for start in STARTS {
        for capacity in [1, 2, 4, 8, 64] {
            let mut header = Header::starting_at(start);
            let mut slots = vec![MaybeUninit::uninit(); capacity];
            agrees_with_a_queue(&mut random, split(&mut header, &mut slots).unwrap());
        }
    }
}

#[test]
fn a_shared_ring_agrees_with_a_queue_under_random_operations() {
    let mut random = Random::new("shared ring");
    for start in STARTS {
        for capacity in [1, 2, 4, 8, 64] {
            agrees_with_a_queue(&mut random, Mapping::starting_at(start, capacity).sides());
        }
    }
}

#[test]
fn slices_lent_in_place_wrap_where_the_memory_ends() {
    let mut header = Header::starting_at(u64::MAX - 5);
    let mut slots = [MaybeUninit::uninit(); 8];
    let (mut tx, mut rx) = split(&mut header, &mut slots).unwrap();
    let mut reserved = tx.reserve(8).unwrap();
    let (a, b) = reserved.slices();
    // The counter u64::MAX - 5 maps to slot 2.
    assert_eq!((a.len(), b.len()), (6, 2));
    for (at, slot) in a.iter_mut().chain(b).enumerate() {
        slot.write(at as u16);
    }
    // SAFETY: the loop above filled all eight slots.
    unsafe { reserved.publish(8) };
    let filled = rx.filled(usize::MAX).unwrap();
    assert_eq!(filled.slices(), (&[0, 1, 2, 3, 4, 5][..], &[6, 7][..]));
    filled.release(7);
    assert_eq!((rx.pop(), rx.pop()), (Some(7), None));
}

#[test]
fn a_reservation_dropped_leaves_the_ring_as_it_was() {
    let mut header = Header::new();
    let mut slots = [MaybeUninit::uninit(); 4];
    let (mut tx, mut rx) = split(&mut header, &mut slots).unwrap();
    assert!(tx.reserve(4).is_some());
    assert!(tx.reserve(5).is_none());
    assert_eq!((rx.pop(), tx.free()), (None, 4));
    tx.push(1u8).unwrap();
    assert!(rx.filled(1).is_some());
    assert_eq!(rx.pop(), Some(1));
}

#[test]
fn a_static_ring_serves() {
    static mut HEADER: Header = Header::starting_at(u64::MAX);
    static mut SLOTS: [MaybeUninit<u8>; 2] = [MaybeUninit::uninit(); 2];
    let (header, slots) = (&raw mut HEADER, &raw mut SLOTS);
    // SAFETY: this test runs once, and nothing else names the two statics.
    let (mut tx, mut rx) = split(unsafe { &mut *header }, unsafe { &mut *slots }).unwrap();
    assert_eq!((tx.push(1), tx.push(2), tx.push(3)), (Ok(()), Ok(()), Err(Full(3))));
    assert_eq!((rx.pop(), rx.pop(), rx.pop()), (Some(1), Some(2), None));
}

#[test]
fn a_ring_split_again_is_empty() {
    let mut header = Header::new();
    let mut slots = [MaybeUninit::uninit(); 4];
    let (mut tx, _) = split(&mut header, &mut slots).unwrap();
    tx.push(1).unwrap();
    let mut others = [MaybeUninit::<u8>::uninit(); 2];
    let (mut tx, mut rx) = split(&mut header, &mut others).unwrap();
    assert_eq!((rx.pop(), tx.free()), (None, 2));
}

#[test]
fn a_capacity_that_is_no_power_of_two_is_refused() {
    let mut header = Header::new();
    for len in [0usize, 3, 6, 12] {
        let mut slots = vec![MaybeUninit::<u8>::uninit(); len];
        assert_eq!(
            split(&mut header, &mut slots).err(),
            Some(AttachError::Capacity { slots: len })
        );
    }
}

#[test]
fn memory_that_is_not_aligned_is_refused() {
    let mut mapping = Mapping::starting_at(0, 4);
    let header = NonNull::from(&*mapping.header);
    let slots = NonNull::from(&mut mapping.slots[1]);
    // SAFETY: the constructors reject misaligned memory without accessing it. The memory lives
    // until the end of the test.
    unsafe {
        let askew = Producer::from_raw(header.byte_add(8), slots, 4);
        assert_eq!(askew.err(), Some(AttachError::Misaligned));
        let askew = Consumer::from_raw(header, slots.byte_add(1), 2);
        assert_eq!(askew.err(), Some(AttachError::Misaligned));
    }
}

#[test]
fn a_head_that_no_consumer_wrote_leaves_the_ring_full_for_ever() {
    for start in STARTS {
        for lie in [start.wrapping_add(4), start.wrapping_sub(2), start ^ 1 << 63, start ^ 1 << 40]
        {
            let mut mapping = Mapping::starting_at(start, 4);
            let header = NonNull::from(&*mapping.header);
            let (mut tx, _) = mapping.sides();
            for n in 0..3 {
                tx.push(n).unwrap();
            }
            // SAFETY: the header lives longer than the body of this loop.
            let head = unsafe { &header.as_ref().head };
            head.store(lie, Ordering::Relaxed);
            assert_eq!(tx.free(), 0);
            assert!(tx.is_corrupt(), "start {start:#x}, head {lie:#x}");
            // No later value of the head repairs the handle.
            for head_now in [start, start.wrapping_add(3), lie, 0, u64::MAX] {
                head.store(head_now, Ordering::Relaxed);
                assert_eq!(tx.push(9), Err(Full(9)));
                assert_eq!(
                    (tx.free(), tx.push_slice(&[9; 9]), tx.reserve(1).is_none()),
                    (0, 0, true)
                );
                assert!(tx.is_corrupt());
            }
        }
    }
}

#[test]
fn a_tail_that_no_producer_wrote_leaves_the_ring_empty_for_ever() {
    for start in STARTS {
        for lie in [start.wrapping_add(5), start.wrapping_sub(1), start ^ 1 << 63, start ^ 1 << 40]
        {
            let mut mapping = Mapping::starting_at(start, 4);
            let header = NonNull::from(&*mapping.header);
            let (_, mut rx) = mapping.sides();
            // SAFETY: the header lives longer than the body of this loop.
            let tail = unsafe { &header.as_ref().tail };
            tail.store(lie, Ordering::Relaxed);
            assert_eq!(rx.pop(), None);
            assert!(rx.is_corrupt(), "start {start:#x}, tail {lie:#x}");
            for tail_now in [start, start.wrapping_add(1), lie, 0, u64::MAX] {
                tail.store(tail_now, Ordering::Relaxed);
                assert_eq!((rx.pop(), rx.peek(), rx.len(), rx.is_empty()), (None, None, 0, true));
                assert_eq!((rx.pop_slice(&mut [0; 9]), rx.filled(9).is_none()), (0, true));
                assert!(rx.is_corrupt());
            }
        }
    }
}

#[test]
fn random_counters_from_a_peer_never_reach_outside_the_slots() {
    let mut random = Random::new("random counters");
    for _ in 0..2_000 {
        let start = random.next();
        let mut mapping = Mapping::starting_at(start, 1 << random.within(0..5));
        let header = NonNull::from(&*mapping.header);
        let (mut tx, mut rx) = mapping.sides();
        // SAFETY: the header lives longer than the body of this loop.
        let (head, tail) = unsafe { (&header.as_ref().head, &header.as_ref().tail) };
        for _ in 0..50 {
            // Most lies are close to the correct value, so that a side accepts some of them.
            let lie = start.wrapping_add(random.within(0..40) as u64).wrapping_sub(4);
            let lie = if random.within(0..20) == 0 { random.next() } else { lie };
            if random.within(0..2) == 0 { head } else { tail }.store(lie, Ordering::Relaxed);
            match random.within(0..4) {
                0 => _ = tx.push(lie),
                1 => _ = tx.push_slice(&[lie; 7]),
                2 => _ = rx.pop(),
                _ => _ = rx.pop_slice(&mut [0; 7]),
            }
            assert!(tx.free() <= tx.capacity() && rx.len() <= rx.capacity());
        }
    }
}
