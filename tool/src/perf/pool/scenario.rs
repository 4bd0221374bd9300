//! Runs the scenarios with any pool of 128-byte blocks. An operation takes a block and returns it.
//!
//! The tool runs them over pools that need no other package, and benches/ runs them over the other
//! pools.
//!
//! `ns_per_op` is processor time of the thread that takes blocks, so it excludes waits for a
//! processor. `p99_ns` is wall-clock time, and includes such waits.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use std::thread;
use std::time::Instant;

pub trait Pools {
    const NAME: &'static str;
    type Own: Send;
    /// Dropping this returns the block to the pool, on any thread.
    type Held: Send;
    /// Creates pool access for `streams` streams. Each stream has at most `capacity` blocks in use
    /// at once.
    fn streams(streams: usize, capacity: usize) -> Vec<Self::Own>;
    /// Takes a block, and writes a [`Body`] to it. `None` if all blocks of a bounded pool are in
    /// use.
    fn take(own: &mut Self::Own) -> Option<Self::Held>;
    fn give(own: &mut Self::Own, held: Self::Held);
    /// Takes a block for two holders, which both release it. The pool must assume that the first
    /// holder is on another thread. Returns `false` if no block is free.
    fn twice(own: &mut Self::Own) -> bool;
}

/// As large as the largest command of the compared runtimes.
#[repr(C, align(64))]
pub struct Body {
    pub first: AtomicU64,
    rest: [u64; 15],
}

impl Body {
    #[inline(always)]
    pub fn new(first: u64) -> Self {
        Body { first: AtomicU64::new(first), rest: [0; 15] }
    }
}

/// Counts two holders down to zero in the first word. For pools with one holder per block. The
/// caller then returns the block to its pool.
#[inline(always)]
pub fn first_lets_go(first: &AtomicU64) {
    first.store(2, Ordering::Relaxed);
    for _ in 0..2 {
        // As in a reference count: release on each decrement, and acquire for the last holder.
        if first.fetch_sub(1, Ordering::Release) == 1 {
            fence(Ordering::Acquire);
        }
    }
}

pub const BATCH: u64 = 64;

#[derive(Clone, Copy, Debug)]
pub struct Figures {
    pub ns_per_op: f64,
    /// Operations of all streams per second of wall time.
    pub ops_per_s: f64,
    /// 99th percentile of the time per operation of a batch, in nanoseconds.
    pub p99_ns: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// One stream with this many blocks in use, returned in the order taken.
    Single(usize),
    /// Several streams. Each has its own thread, its own pool access, and 16 blocks in use.
    Streams,
    /// One thread takes blocks. This many other threads return them.
    HandOff(usize),
    /// One thread takes a thousand blocks in a burst. Another thread returns them in random order.
    Burst,
    /// All slots are in use. A take is refused, a block is returned, and another block is taken.
    Exhausted,
    TwoHolders,
    /// A pool is created, 16 blocks are taken, the pool is dropped, and the blocks are returned.
    Lifecycle,
}

impl Scenario {
    pub fn name(self) -> String {
        match self {
            Scenario::Single(window) => format!("single-{window}"),
            Scenario::Streams => "streams".into(),
            Scenario::HandOff(releasers) => format!("hand-off-{releasers}"),
            Scenario::Burst => "burst-1000".into(),
            Scenario::Exhausted => "exhausted".into(),
            Scenario::TwoHolders => "two-holders".into(),
            Scenario::Lifecycle => "lifecycle".into(),
        }
    }

    pub fn all(streams: &[usize]) -> Vec<(Scenario, usize)> {
        let mut all: Vec<_> = [1, 64, 4096].map(|window| (Scenario::Single(window), 1)).into();
        all.extend(streams.iter().map(|&streams| (Scenario::Streams, streams)));
        all.extend([1, 2, 4].map(|releasers| (Scenario::HandOff(releasers), 1)));
        all.extend(
            [Scenario::Burst, Scenario::Exhausted, Scenario::TwoHolders, Scenario::Lifecycle]
                .map(|s| (s, 1)),
        );
        all
    }

    /// Returns `None` if the scenario does not apply: a pool without a bound is never exhausted.
    pub fn run<P: Pools>(self, streams: usize, ops: u64) -> Option<Figures> {
        match self {
            Scenario::Single(window) => Some(windows::<P>(1, window, ops)),
            Scenario::Streams => Some(windows::<P>(streams, 16, ops)),
            Scenario::HandOff(releasers) => Some(hand_off::<P>(releasers, 1, ops)),
            Scenario::Burst => Some(hand_off::<P>(1, 1000, ops)),
            Scenario::Exhausted => exhausted::<P>(ops),
            Scenario::TwoHolders => Some(alone::<P>(64, ops, |own| {
                assert!(P::twice(own));
            })),
            Scenario::Lifecycle => Some(lifecycle::<P>(ops)),
        }
    }
}

/// Returns the processor time of the calling thread, in nanoseconds. Makes a system call, which
/// takes some hundred nanoseconds.
fn cpu_ns() -> u64 {
    fishplate_sys::clock::thread_cpu_ns().unwrap_or(0)
}

#[derive(Default)]
struct Times(Vec<u64>);

impl Times {
    #[inline(always)]
    fn record(&mut self, begun: &mut Instant) {
        let now = Instant::now();
        self.0.push((now - *begun).as_nanos() as u64);
        *begun = now;
    }

    fn figures(mut self, ops: u64, batch: u64, cpu: u64, wall: f64) -> Figures {
        self.0.sort_unstable();
        let p99 = self.0.get(self.0.len() * 99 / 100).copied().unwrap_or(0);
        Figures {
            ns_per_op: cpu as f64 / ops as f64,
            ops_per_s: ops as f64 / wall,
            p99_ns: p99 as f64 / batch as f64,
        }
    }
}

fn alone<P: Pools>(capacity: usize, ops: u64, mut step: impl FnMut(&mut P::Own)) -> Figures {
    let mut own = P::streams(1, capacity).pop().expect("one stream");
    let mut times = Times::default();
    let batches = ops.div_ceil(BATCH);
    let (start, cpu) = (Instant::now(), cpu_ns());
    let mut begun = start;
    for _ in 0..batches {
        for _ in 0..BATCH {
            step(&mut own);
        }
        times.record(&mut begun);
    }
    times.figures(batches * BATCH, BATCH, cpu_ns() - cpu, start.elapsed().as_secs_f64())
}

fn windows<P: Pools>(streams: usize, window: usize, ops: u64) -> Figures {
    let owns = P::streams(streams, window);
    let barrier = Barrier::new(streams);
    let parts: Vec<(u64, u64, [Instant; 2], Times)> = thread::scope(|scope| {
        let threads: Vec<_> = owns
            .into_iter()
            .map(|mut own| {
                let barrier = &barrier;
                scope.spawn(move || {
                    let mut held = Vec::with_capacity(window);
                    let mut times = Times(Vec::with_capacity((ops / BATCH + 1) as usize));
                    let mut pass = |own: &mut P::Own| {
                        for _ in 0..window {
                            held.push(P::take(own).expect("no more than the capacity is out"));
                        }
                        for held in held.drain(..) {
                            P::give(own, held);
                        }
                    };
                    pass(&mut own);
                    let passes = (BATCH as usize / window).max(1);
                    let rounds = (ops as usize).div_ceil(passes * window);
                    barrier.wait();
                    let cpu = cpu_ns();
                    let start = Instant::now();
                    let mut begun = start;
                    for _ in 0..rounds {
                        for _ in 0..passes {
                            pass(&mut own);
                        }
                        times.record(&mut begun);
                    }
                    let cpu = cpu_ns() - cpu;
                    ((rounds * passes * window) as u64, cpu, [start, begun], times)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a stream panicked")).collect()
    });
    let (mut ops, mut cpu, mut all) = (0, 0, Times::default());
    let mut span: Option<[Instant; 2]> = None;
    for (part_ops, part_cpu, [start, end], times) in parts {
        ops += part_ops;
        cpu += part_cpu;
        all.0.extend(times.0);
        let [first, last] = span.unwrap_or([start, end]);
        span = Some([first.min(start), last.max(end)]);
    }
    let wall = span.map_or(0.0, |[first, last]| (last - first).as_secs_f64());
    let batch = (BATCH as usize / window).max(1) * window;
    all.figures(ops, batch as u64, cpu, wall)
}

/// A bounded queue that passes batches of blocks from one thread to another.
struct Way<T> {
    places: Box<[std::sync::Mutex<Vec<T>>]>,
    sent: AtomicUsize,
    taken: AtomicUsize,
}

const PLACES: usize = 4;
const HANDFUL: usize = 64;

impl<T> Way<T> {
    fn new() -> Self {
        Way {
            places: (0..PLACES).map(|_| std::sync::Mutex::default()).collect(),
            sent: AtomicUsize::new(0),
            taken: AtomicUsize::new(0),
        }
    }

    fn send(&self, handful: &mut Vec<T>) {
        let sent = self.sent.load(Ordering::Relaxed);
        while sent - self.taken.load(Ordering::Acquire) == PLACES {
            thread::yield_now();
        }
        // Never contended: the counters decide which thread owns the place.
        std::mem::swap(handful, &mut self.places[sent % PLACES].lock().expect("no panic"));
        self.sent.store(sent + 1, Ordering::Release);
    }

    /// Processes batches until `done` is set and no batch is left.
    fn receive(&self, done: &AtomicUsize, mut work: impl FnMut(&mut Vec<T>)) {
        loop {
            let finished = done.load(Ordering::Acquire) != 0;
            let taken = self.taken.load(Ordering::Relaxed);
            if self.sent.load(Ordering::Acquire) != taken {
                work(&mut self.places[taken % PLACES].lock().expect("no panic"));
                self.taken.store(taken + 1, Ordering::Release);
            } else if finished {
                return;
            } else {
                thread::yield_now();
            }
        }
    }
}

/// One thread takes blocks, and hands them in batches to `releasers` threads. These return the
/// blocks of a burst in random order.
fn hand_off<P: Pools>(releasers: usize, burst: usize, ops: u64) -> Figures {
    let handful = burst.max(HANDFUL);
    let capacity = (releasers * (PLACES + 2) * handful).next_power_of_two();
    let mut own = P::streams(1, capacity).pop().expect("one stream");
    let ways: Vec<Way<P::Held>> = (0..releasers).map(|_| Way::new()).collect();
    let done = AtomicUsize::new(0);
    thread::scope(|scope| {
        for (seed, way) in ways.iter().enumerate() {
            let done = &done;
            scope.spawn(move || {
                let mut state = seed as u64 + 1;
                way.receive(done, |blocks| {
                    if burst > 1 {
                        for at in (1..blocks.len()).rev() {
                            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                            blocks.swap(at, (state >> 33) as usize % (at + 1));
                        }
                    }
                    blocks.clear();
                });
            });
        }
        let mut times = Times::default();
        let mut taken = Vec::with_capacity(handful);
        let rounds = (ops as usize).div_ceil(handful);
        let (start, mut cpu) = (Instant::now(), 0);
        for round in 0..rounds {
            let (before, mut begun) = (cpu_ns(), Instant::now());
            while taken.len() < handful {
                match P::take(&mut own) {
                    Some(block) => taken.push(block),
                    None => thread::yield_now(),
                }
            }
            times.record(&mut begun);
            cpu += cpu_ns() - before;
            ways[round % releasers].send(&mut taken);
        }
        done.store(1, Ordering::Release);
        times.figures((rounds * handful) as u64, handful as u64, cpu, start.elapsed().as_secs_f64())
    })
}

fn exhausted<P: Pools>(ops: u64) -> Option<Figures> {
    const CAPACITY: usize = 64;
    {
        let mut own = P::streams(1, CAPACITY).pop().expect("one stream");
        let all: Vec<_> = (0..2 * CAPACITY).map_while(|_| P::take(&mut own)).collect();
        if all.len() == 2 * CAPACITY {
            return None;
        }
    }
    let mut held: Vec<P::Held> = vec![];
    Some(alone::<P>(CAPACITY, ops, |own| {
        while let Some(block) = P::take(own) {
            held.push(block);
        }
        P::give(own, held.swap_remove(held.len() / 2));
    }))
}

fn lifecycle<P: Pools>(ops: u64) -> Figures {
    const LIVE: u64 = 16;
    let mut times = Times::default();
    let rounds = (ops / 16).div_ceil(LIVE);
    let (start, cpu) = (Instant::now(), cpu_ns());
    let mut begun = start;
    for _ in 0..rounds {
        let mut own = P::streams(1, 64).pop().expect("one stream");
        let held: Vec<_> = (0..LIVE).map_while(|_| P::take(&mut own)).collect();
        drop(own);
        drop(held);
        times.record(&mut begun);
    }
    times.figures(rounds * LIVE, LIVE, cpu_ns() - cpu, start.elapsed().as_secs_f64())
}
