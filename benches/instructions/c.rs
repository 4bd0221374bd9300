//! Instruction counts of a put-signal through the C library and through [`Node::put_signal`]. Both
//! calls get all arguments at run time, through a function that is not inlined. This is a separate
//! program, because other code in the same program changes what the compiler inlines into a path.

// The attribute macros refer to this crate as `gungraun`.
extern crate iai_callgrind as gungraun;

use std::hint::black_box;
use std::ptr;

use fishplate::core::mem::{LocalId, RemoteId};
use fishplate::core::op::SignalOp;
use fishplate::node::{Fabric, Slice};
use fishplate::{Issued, Node, Notice, Signal};
use fishplate_c::*;
use iai_callgrind::{library_benchmark, library_benchmark_group, main};

use fishplate_benches::REPEATS;

mod budget;
use budget::budget;

/// A node that is its own peer, with the ids of a region and of that region's import.
struct Side<N> {
    node: N,
    ours: u64,
    theirs: u64,
}

fn in_rust() -> &'static mut Side<Node> {
    let mut node = Node::builder().fabric(Fabric::Off).open().unwrap();
    let own = node.address().to_vec();
    let me = node.connect(&own).unwrap();
    let ours = node.alloc(4096).unwrap();
    let theirs = node.import(me, node.handle(ours).unwrap()).unwrap();
    let (ours, theirs) = (ours.at(0).region.to_raw(), theirs.at(0).region.to_raw());
    Box::leak(Box::new(Side { node, ours, theirs }))
}

fn in_c() -> &'static mut Side<*mut FpNode> {
    let mut bytes = [0u8; 1024];
    let (mut node, mut me, mut ours, mut theirs) = (ptr::null_mut(), 0, 0, 0);
    // SAFETY: the options may be null. All pointers are to local variables. Each `len` is the size
    // of `bytes`, or of the part that the call before has written.
    unsafe {
        assert_eq!(fp_node_open(ptr::null(), &mut node), 0);
        let mut len = bytes.len();
        assert_eq!(fp_node_address(node, bytes.as_mut_ptr().cast(), &mut len), 0);
        assert_eq!(fp_peer_connect(node, bytes.as_ptr().cast(), len, &mut me), 0);
        assert_eq!(fp_mem_alloc(node, 4096, &mut ours), 0);
        let mut len = bytes.len();
        assert_eq!(fp_mem_export(node, ours, bytes.as_mut_ptr().cast(), &mut len), 0);
        assert_eq!(fp_mem_import(node, me, bytes.as_ptr().cast(), len, &mut theirs), 0);
    }
    Box::leak(Box::new(Side { node, ours, theirs }))
}

#[allow(clippy::too_many_arguments, reason = "those of the function in C")]
extern "C" fn node_put_signal(
    node: &mut Node,
    memory: u64,
    offset: u64,
    len: usize,
    remote: u64,
    remote_offset: u64,
    signal_remote: u64,
    signal_offset: u64,
    op: SignalOp,
    value: u64,
    notice: &Notice,
) -> bool {
    let from = Slice::new(LocalId::from_raw(memory).at(offset), len);
    let signal = Signal { at: RemoteId::from_raw(signal_remote).at(signal_offset), op, value };
    let to = RemoteId::from_raw(remote).at(remote_offset);
    node.put_signal(from, to, signal, *notice) == Ok(Issued::Done { value: 0 })
}

type InRust =
    extern "C" fn(&mut Node, u64, u64, usize, u64, u64, u64, u64, SignalOp, u64, &Notice) -> bool;
type InC = unsafe extern "C" fn(
    *mut FpNode,
    u64,
    u64,
    usize,
    u64,
    u64,
    u64,
    u64,
    i32,
    u64,
    *mut u64,
) -> i32;

#[library_benchmark(config = budget("node_put_signal_called"))]
#[bench::run(in_rust())]
fn node_put_signal_called(side: &'static mut Side<Node>) {
    let put_signal = black_box(node_put_signal as InRust);
    for _ in 0..REPEATS {
        let Side { node, ours, theirs } = black_box(&mut *side);
        let (len, op, notice) = black_box((8, SignalOp::Set, Notice::Silent));
        assert!(put_signal(node, *ours, 64, len, *theirs, 128, *theirs, 0, op, 1, &notice));
    }
}

#[library_benchmark(config = budget("c_put_signal"))]
#[bench::run(in_c())]
fn c_put_signal(side: &'static mut Side<*mut FpNode>) {
    let put_signal = black_box(fp_put_signal as InC);
    for _ in 0..REPEATS {
        let Side { node, ours, theirs } = black_box(&mut *side);
        let (len, op, token) = black_box((8, 1, ptr::null_mut()));
        // SAFETY: the node is open, the ranges lie in its regions, and the pointer for the token
        // may be null.
        let done =
            unsafe { put_signal(*node, *ours, 64, len, *theirs, 128, *theirs, 0, op, 1, token) };
        assert_eq!(done, 0);
    }
}

library_benchmark_group!(
    name = c;
    benchmarks = node_put_signal_called, c_put_signal
);
main!(library_benchmark_groups = c);
