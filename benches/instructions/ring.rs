//! Instruction counts of the SPSC ring, and of four other queues with the same workload.
//!
//! One thread runs both sides, so each push-and-pop pair finds the ring empty. The consumer then
//! reads the producer's counter at every pop, and the producer reads the consumer's once per lap.
//! Creating and dropping queues is not counted.

// The attribute macros refer to this crate as `gungraun`.
extern crate iai_callgrind as gungraun;

use std::hint::black_box;
use std::mem::MaybeUninit;

use fishplate_benches::REPEATS;
use fishplate_core::sync::ring::{self, Consumer, Header, Producer};
use iai_callgrind::{library_benchmark, library_benchmark_group, main};

mod budget;
use budget::budget;
use ringbuf::traits::{Consumer as _, Producer as _, Split as _};

/// Slots per queue, except for queues that hold all repeats at once.
const SLOTS: usize = 64;

type Ring = (Producer<'static, u64>, Consumer<'static, u64>);

/// Creates a ring of `slots` that holds `filled` values.
fn ring_of(slots: usize, filled: u64) -> Ring {
    let header = Box::leak(Box::new(Header::new()));
    let slots = Box::leak(vec![MaybeUninit::uninit(); slots].into_boxed_slice());
    let (mut tx, rx) = ring::split(header, slots).unwrap();
    for value in 0..filled {
        tx.push(value).unwrap();
    }
    (tx, rx)
}

#[library_benchmark(config = budget("ring_push"))]
#[bench::run(ring_of(1024, 0))]
fn ring_push((mut tx, rx): Ring) -> Ring {
    for value in 0..REPEATS {
        tx.push(black_box(value)).unwrap();
    }
    (tx, rx)
}

#[library_benchmark(config = budget("ring_pop"))]
#[bench::run(ring_of(1024, 1024))]
fn ring_pop((tx, mut rx): Ring) -> Ring {
    for _ in 0..REPEATS {
        black_box(rx.pop().unwrap());
    }
    (tx, rx)
}

#[library_benchmark(config = budget("ring_push_pop"))]
#[bench::run(ring_of(SLOTS, 0))]
fn ring_push_pop((mut tx, mut rx): Ring) -> Ring {
    for value in 0..REPEATS {
        tx.push(black_box(value)).unwrap();
        black_box(rx.pop().unwrap());
    }
    (tx, rx)
}

#[library_benchmark(config = budget("ring_batch_32"))]
#[bench::run(ring_of(SLOTS, 0))]
fn ring_batch_32((mut tx, mut rx): Ring) -> Ring {
    let mut values = [0; 32];
    for _ in 0..REPEATS {
        assert_eq!(tx.push_slice(black_box(&values)), 32);
        assert_eq!(rx.pop_slice(black_box(&mut values)), 32);
    }
    (tx, rx)
}

type Rtrb = (rtrb::Producer<u64>, rtrb::Consumer<u64>);

#[library_benchmark]
#[bench::run(rtrb::RingBuffer::new(SLOTS))]
fn rtrb_push_pop((mut tx, mut rx): Rtrb) -> Rtrb {
    for value in 0..REPEATS {
        tx.push(black_box(value)).unwrap();
        black_box(rx.pop().unwrap());
    }
    (tx, rx)
}

type Array = crossbeam_queue::ArrayQueue<u64>;

#[library_benchmark]
#[bench::run(Array::new(SLOTS))]
fn crossbeam_push_pop(queue: Array) -> Array {
    for value in 0..REPEATS {
        queue.push(black_box(value)).unwrap();
        black_box(queue.pop().unwrap());
    }
    queue
}

type Ringbuf = (ringbuf::HeapProd<u64>, ringbuf::HeapCons<u64>);

#[library_benchmark]
#[bench::run(ringbuf::HeapRb::new(SLOTS).split())]
fn ringbuf_push_pop((mut tx, mut rx): Ringbuf) -> Ringbuf {
    for value in 0..REPEATS {
        tx.try_push(black_box(value)).unwrap();
        black_box(rx.try_pop().unwrap());
    }
    (tx, rx)
}

type Heapless = (heapless::spsc::Producer<'static, u64>, heapless::spsc::Consumer<'static, u64>);

fn heapless_queue() -> Heapless {
    Box::leak(Box::new(heapless::spsc::Queue::<u64, SLOTS>::new())).split()
}

#[library_benchmark]
#[bench::run(heapless_queue())]
fn heapless_push_pop((mut tx, mut rx): Heapless) -> Heapless {
    for value in 0..REPEATS {
        tx.enqueue(black_box(value)).unwrap();
        black_box(rx.dequeue().unwrap());
    }
    (tx, rx)
}

library_benchmark_group!(
    name = rings,
    benchmarks = [
        ring_push,
        ring_pop,
        ring_push_pop,
        ring_batch_32,
        rtrb_push_pop,
        crossbeam_push_pop,
        ringbuf_push_pop,
        heapless_push_pop
    ]
);

main!(library_benchmark_groups = rings);
