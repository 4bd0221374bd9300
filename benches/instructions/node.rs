//! Instruction counts of the calls of a [`Node`] over its mixed rails. The node is its own peer,
//! and the memory is mapped. For some paths, `engine.rs` measures the engine alone, in a path named
//! `..._mapped`.

// The attribute macros refer to this crate as `gungraun`.
extern crate iai_callgrind as gungraun;

use std::hint::black_box;
use std::ptr::NonNull;

use fishplate::core::engine::tag::Tag;
use fishplate::core::engine::{Config, ContextId, Engine, HANDLE_MAX};
use fishplate::core::mem::{LocalId, PeerId, RailId, RemoteId, Span};
use fishplate::node::{Fabric, Memory, Remote};
use fishplate::shm::{Segment, ShmConfig, ShmRail};
use fishplate::sys::LinuxHost;
use fishplate::{Cmp, Issued, Limits, Node, Notice, Signal, Storage};
use iai_callgrind::{library_benchmark, library_benchmark_group, main};

use fishplate_benches::REPEATS;

mod budget;
use budget::budget;

/// A node that is its own peer.
struct Side {
    node: Node,
    me: PeerId,
    ours: Memory,
    theirs: Remote,
}

fn side() -> &'static mut Side {
    let mut node = Node::builder().fabric(Fabric::Off).open().unwrap();
    let own = node.address().to_vec();
    let me = node.connect(&own).unwrap();
    let ours = node.alloc(4096).unwrap();
    let theirs = node.import(me, node.handle(ours).unwrap()).unwrap();
    Box::leak(Box::new(Side { node, me, ours, theirs }))
}

/// An engine that is its own peer, over only shared memory.
struct Bare {
    engine: Engine<'static, ShmRail<LinuxHost>, 1>,
    ours: LocalId,
    theirs: RemoteId,
}

fn bare() -> &'static mut Bare {
    let config = Config::DEFAULT;
    let storage = Box::leak(Box::new(Storage::<1>::new(&config, Limits::DEFAULT)));
    let host = LinuxHost::shared().peer_uses_membarrier(true);
    let shm = ShmConfig { membarrier: host.sleeper_uses_membarrier(), ..ShmConfig::default() };
    let mut engine = storage.engine(config, [ShmRail::new(host, shm).unwrap()]).unwrap();
    let me = engine.reserve_peer().unwrap();
    engine.rail_mut(RailId(0)).unwrap().attach_self(me.peer()).unwrap();
    engine.connect_peer(me, 1).unwrap();
    let segment = Box::leak(Box::new(Segment::create(4096).unwrap()));
    // SAFETY: the segment is never freed, and only the engine accesses it.
    let ours = engine.register(unsafe { segment.region(0, 4096) }.unwrap()).unwrap();
    let mut handle = [0; HANDLE_MAX];
    let len = engine.export(ours, &mut handle).unwrap();
    let theirs = engine.import(me, &handle[..len]).unwrap();
    Box::leak(Box::new(Bare { engine, ours, theirs }))
}

#[library_benchmark(config = budget("shm_put_signal"))]
#[bench::run(bare())]
fn shm_put_signal(side: &'static mut Bare) {
    for _ in 0..REPEATS {
        let Bare { engine, ours, theirs } = black_box(&mut *side);
        let signal = Signal::add(theirs.at(0), 1);
        let issued =
            engine.put_signal(ContextId(0), ours.at(64), 8, theirs.at(128), signal, Notice::Silent);
        assert_eq!(issued, Ok(Issued::Done { value: 0 }));
    }
}

#[library_benchmark(config = budget("shm_signal"))]
#[bench::run(bare())]
fn shm_signal(side: &'static mut Bare) {
    for _ in 0..REPEATS {
        let Bare { engine, theirs, .. } = black_box(&mut *side);
        engine.signal(ContextId(0), Signal::add(theirs.at(0), 1), Notice::Silent).unwrap();
    }
}

#[library_benchmark(config = budget("shm_progress_idle"))]
#[bench::run(bare())]
fn shm_progress_idle(side: &'static mut Bare) {
    for _ in 0..REPEATS {
        black_box(side.engine.progress());
    }
}

/// Creates an engine like that of [`Bare`], with 127 more peers that stay silent.
fn crowd() -> Engine<'static, ShmRail<LinuxHost>, 1> {
    const PEERS: u16 = 128;
    let limits = Limits { peers: PEERS, ..Limits::DEFAULT };
    let storage = Box::leak(Box::new(Storage::<1>::new(&Config::DEFAULT, limits)));
    let shm = ShmConfig { max_peers: PEERS, lane_cells: 256, ..ShmConfig::default() };
    let shm = ShmConfig { max_message: 4096, ..shm };
    let rail = ShmRail::new(LinuxHost::shared(), shm).unwrap();
    let mut engine = storage.engine(Config::DEFAULT, [rail]).unwrap();
    for _ in 0..PEERS {
        let peer = engine.reserve_peer().unwrap();
        engine.rail_mut(RailId(0)).unwrap().attach_self(peer.peer()).unwrap();
        engine.connect_peer(peer, 1).unwrap();
    }
    for _ in 0..10_000 {
        engine.progress();
    }
    engine
}

#[library_benchmark(config = budget("shm_progress_idle_128"))]
#[bench::run(crowd())]
fn shm_progress_idle_128(mut engine: Engine<'static, ShmRail<LinuxHost>, 1>) {
    for _ in 0..REPEATS {
        black_box(engine.progress());
    }
    std::mem::forget(engine);
}

#[library_benchmark(config = budget("node_put_signal"))]
#[bench::run(side())]
fn node_put_signal(side: &'static mut Side) {
    for _ in 0..REPEATS {
        let Side { node, ours, theirs, .. } = black_box(&mut *side);
        let signal = Signal::add(theirs.at(0), 1);
        let issued = node.put_signal(ours.slice(64..72), theirs.at(128), signal, Notice::Silent);
        assert_eq!(issued, Ok(Issued::Done { value: 0 }));
    }
}

#[library_benchmark(config = budget("node_put_signal_bytes"))]
#[bench::run(side())]
fn node_put_signal_bytes(side: &'static mut Side) {
    for _ in 0..REPEATS {
        let Side { node, theirs, .. } = black_box(&mut *side);
        let signal = Signal::add(theirs.at(0), 1);
        let issued = node.put_signal(b"8 bytes.", theirs.at(128), signal, Notice::Silent);
        assert_eq!(issued, Ok(Issued::Done { value: 0 }));
    }
}

#[library_benchmark(config = budget("node_signal"))]
#[bench::run(side())]
fn node_signal(side: &'static mut Side) {
    for _ in 0..REPEATS {
        let Side { node, theirs, .. } = black_box(&mut *side);
        node.signal(Signal::add(theirs.at(0), 1), Notice::Silent).unwrap();
    }
}

#[library_benchmark(config = budget("node_wait_arrived"))]
#[bench::run(side())]
fn node_wait_arrived(side: &'static mut Side) {
    for _ in 0..REPEATS {
        let Side { node, ours, .. } = black_box(&mut *side);
        black_box(
            node.wait(ours.at(0), Cmp::Ge, 0, None, std::time::Duration::from_secs(1)).unwrap(),
        );
    }
}

#[library_benchmark(config = budget("node_quiet_idle"))]
#[bench::run(side())]
fn node_quiet_idle(side: &'static mut Side) {
    for _ in 0..REPEATS {
        let Side { node, me, .. } = black_box(&mut *side);
        node.quiet(*me, std::time::Duration::from_secs(1)).unwrap();
    }
}

#[library_benchmark(config = budget("node_progress_idle"))]
#[bench::run(side())]
fn node_progress_idle(side: &'static mut Side) {
    for _ in 0..REPEATS {
        black_box(side.node.progress());
    }
}

/// A node with a matched queue that is its own peer.
fn queue() -> &'static mut (Node, PeerId) {
    let mut node = Node::builder().fabric(Fabric::Off).requests(64).open().unwrap();
    let own = node.address().to_vec();
    let me = node.connect(&own).unwrap();
    Box::leak(Box::new((node, me)))
}

// A receive, a send of 8 bytes, and the completions of both.
#[library_benchmark(config = budget("node_queue_round"))]
#[bench::run(queue())]
fn node_queue_round((node, me): &'static mut (Node, PeerId)) {
    let spans = [(), ()].map(|()| {
        let bytes = NonNull::from(Box::leak(Box::new([7u8; 8]))).cast();
        // SAFETY: the bytes are leaked, and one request at a time uses them.
        unsafe { Span::new(bytes, 8) }
    });
    for _ in 0..REPEATS {
        let mut queue = black_box(&mut *node).queue().unwrap();
        queue.irecv2(Some(*me), [1, 2, 3], [u32::MAX; 3], spans[0], 0).unwrap();
        queue.isend2(*me, 0, [1, 2, 3], spans[1], 0).unwrap();
        queue.poll();
        for _ in 0..2 {
            let (req, _) = queue.ipeek2().unwrap();
            queue.test2(&mut Some(req)).unwrap();
        }
    }
}

// The same with the calls of `adapters/psm2` for Open MPI.
#[library_benchmark(config = budget("node_queue_psm2"))]
#[bench::run(queue())]
fn node_queue_psm2((node, me): &'static mut (Node, PeerId)) {
    let spans = [(), ()].map(|()| {
        let bytes = NonNull::from(Box::leak(Box::new([7u8; 8]))).cast();
        // SAFETY: the bytes are leaked, and one request at a time uses them.
        unsafe { Span::new(bytes, 8) }
    });
    let tag = Tag::from([1, 2, 3]);
    for _ in 0..REPEATS {
        let mut queue = black_box(&mut *node).queue().unwrap();
        if queue.irecv2_at_once(None, tag, Tag::ALL, spans[0], 0).is_none() {
            queue.irecv2(None, tag, Tag::ALL, spans[0], 0).unwrap();
        }
        queue.isend2_at_once(*me, tag, spans[1], 0).unwrap();
        queue.poll();
        for _ in 0..2 {
            let req = queue.oldest().unwrap().req();
            queue.test2_with(req, |ended| _ = black_box(ended.context())).unwrap();
        }
    }
}

#[library_benchmark(config = budget("node_queue_idle"))]
#[bench::run(queue())]
fn node_queue_idle((node, _): &'static mut (Node, PeerId)) {
    for _ in 0..REPEATS {
        assert!(black_box(&mut *node).queue().unwrap().ipeek2().is_err());
    }
}

library_benchmark_group!(
    name = node;
    benchmarks =
        shm_put_signal, shm_signal, shm_progress_idle, shm_progress_idle_128, node_put_signal,
        node_put_signal_bytes, node_signal, node_wait_arrived, node_quiet_idle, node_progress_idle,
        node_queue_round, node_queue_psm2, node_queue_idle
);
main!(library_benchmark_groups = node);
