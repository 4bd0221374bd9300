//! Instruction counts of tag matching: the matcher at depth 0, and the workloads of `fishplate perf
//! match` at depths 64 and 65,536. The count at 65,536 may be at most 5 % higher than at 64. The
//! linear lists of the comparison run the same workloads.

// The attribute macros refer to this crate as `gungraun`.
extern crate iai_callgrind as gungraun;

use std::hint::black_box;

use fishplate_benches::{REPEATS, UNITS};
use fishplate_core::engine::tag::{
    Arrive, Matcher, MatcherMemory, Post, PostedSlot, ShapeId, Tag, UnexpectedSlot,
};
use iai_callgrind::{library_benchmark, library_benchmark_group, main};

mod budget;
#[allow(dead_code, reason = "the tool uses all of it, the benchmark a part")]
mod matching;

use budget::budget;
use matching::engine::{Engine, Wanted};
use matching::list::List;
use matching::ours::Ours;
use matching::workload::{Bench, Workload, room};

fn matcher() -> Matcher<'static> {
    let memory = MatcherMemory {
        posted: vec![PostedSlot::EMPTY; 64].leak(),
        unexpected: vec![UnexpectedSlot::EMPTY; 64].leak(),
        buckets: vec![0; 128].leak(),
    };
    Matcher::new(memory, 1).unwrap()
}

// The receive is posted first.
#[library_benchmark(config = budget("tag_expected"))]
#[bench::run(matcher())]
fn tag_expected(mut matcher: Matcher<'static>) -> Matcher<'static> {
    for n in 0..REPEATS {
        let tag = black_box(Tag::from(n));
        let post = matcher.post(black_box(Some(3)), tag, black_box(Tag::ZERO), n);
        assert!(matches!(post, Ok(Post::Waiting(_))));
        let arrive = matcher.arrive(black_box(3), tag, 8, n);
        assert!(matches!(arrive, Ok(Arrive::Matched { context, .. }) if context == n));
    }
    matcher
}

// The message arrives first.
#[library_benchmark(config = budget("tag_unexpected"))]
#[bench::run(matcher())]
fn tag_unexpected(mut matcher: Matcher<'static>) -> Matcher<'static> {
    for n in 0..REPEATS {
        let tag = black_box(Tag::from(n));
        let arrive = matcher.arrive(black_box(3), tag, 8, n);
        assert!(matches!(arrive, Ok(Arrive::Stored(_))));
        let post = matcher.post(black_box(Some(3)), tag, black_box(Tag::ZERO), n);
        assert!(matches!(post, Ok(Post::Matched(message)) if message.cookie == n));
    }
    matcher
}

fn shaped() -> (Matcher<'static>, ShapeId) {
    let mut matcher = matcher();
    let shape = matcher.shape(true, Tag::ZERO).unwrap();
    (matcher, shape)
}

// Like `tag_expected`, with the mask registered beforehand.
#[library_benchmark(config = budget("tag_expected_shaped"))]
#[bench::run(shaped())]
fn tag_expected_shaped((mut matcher, shape): (Matcher<'static>, ShapeId)) -> Matcher<'static> {
    for n in 0..REPEATS {
        let tag = black_box(Tag::from(n));
        let Ok(Post::Waiting(_)) = matcher.post_shaped(shape, black_box(3), tag, n) else {
            panic!()
        };
        let Ok(Arrive::Matched { .. }) = matcher.arrive(black_box(3), tag, 8, n) else { panic!() };
    }
    matcher
}

fn ready<E: Engine>(workload: Workload, depth: u32, mut engine: E) -> (Bench, E, u64) {
    let bench = Bench::new(workload, depth);
    bench.prepare(&mut engine);
    if matches!(workload, Workload::U1 | Workload::U2 | Workload::U3 | Workload::U4) {
        // The first message in a slot costs more, whatever the depth.
        (0..depth).for_each(|n| engine.arrive(1, u64::from(n), n));
        (0..depth).for_each(|n| engine.post(Wanted::exact(1, u64::from(n)), n));
    }
    (bench, engine, UNITS / workload.units(depth))
}

fn ours(workload: Workload, depth: u32) -> (Bench, Ours, u64) {
    ready(workload, depth, Ours::new(room(depth), room(depth)))
}

fn list(workload: Workload, depth: u32) -> (Bench, List, u64) {
    let (bench, engine, rounds) = ready(workload, depth, List::new(room(depth), room(depth)));
    (bench, engine, rounds / 16)
}

#[inline(always)]
fn run<E: Engine>((mut bench, mut engine, rounds): (Bench, E, u64)) -> (Bench, E) {
    for _ in 0..rounds {
        bench.round(&mut engine, || {});
    }
    (bench, engine)
}

#[library_benchmark]
#[bench::tag_p1_64(args = (ours(Workload::P1, 64)), config = budget("tag_p1_64"))]
#[bench::tag_p1_64k(args = (ours(Workload::P1, 65_536)), config = budget("tag_p1_64k"))]
#[bench::tag_p2_64(args = (ours(Workload::P2, 64)), config = budget("tag_p2_64"))]
#[bench::tag_p2_64k(args = (ours(Workload::P2, 65_536)), config = budget("tag_p2_64k"))]
#[bench::tag_p3_64(args = (ours(Workload::P3, 64)), config = budget("tag_p3_64"))]
#[bench::tag_p3_64k(args = (ours(Workload::P3, 65_536)), config = budget("tag_p3_64k"))]
#[bench::tag_p4_64(args = (ours(Workload::P4, 64)), config = budget("tag_p4_64"))]
#[bench::tag_p4_64k(args = (ours(Workload::P4, 65_536)), config = budget("tag_p4_64k"))]
#[bench::tag_p5_64(args = (ours(Workload::P5, 64)), config = budget("tag_p5_64"))]
#[bench::tag_p5_64k(args = (ours(Workload::P5, 65_536)), config = budget("tag_p5_64k"))]
#[bench::tag_p6_64(args = (ours(Workload::P6, 64)), config = budget("tag_p6_64"))]
#[bench::tag_p6_64k(args = (ours(Workload::P6, 65_536)), config = budget("tag_p6_64k"))]
#[bench::tag_p7_64(args = (ours(Workload::P7, 64)), config = budget("tag_p7_64"))]
#[bench::tag_p7_64k(args = (ours(Workload::P7, 65_536)), config = budget("tag_p7_64k"))]
#[bench::tag_p8_64(args = (ours(Workload::P8, 64)), config = budget("tag_p8_64"))]
#[bench::tag_p8_64k(args = (ours(Workload::P8, 65_536)), config = budget("tag_p8_64k"))]
#[bench::tag_p9_64(args = (ours(Workload::P9, 64)), config = budget("tag_p9_64"))]
#[bench::tag_p9_64k(args = (ours(Workload::P9, 65_536)), config = budget("tag_p9_64k"))]
#[bench::tag_p10_64(args = (ours(Workload::P10, 64)), config = budget("tag_p10_64"))]
#[bench::tag_p10_64k(args = (ours(Workload::P10, 65_536)), config = budget("tag_p10_64k"))]
#[bench::tag_p11_64(args = (ours(Workload::P11, 64)), config = budget("tag_p11_64"))]
#[bench::tag_p11_64k(args = (ours(Workload::P11, 65_536)), config = budget("tag_p11_64k"))]
#[bench::tag_u1_64(args = (ours(Workload::U1, 64)), config = budget("tag_u1_64"))]
#[bench::tag_u1_64k(args = (ours(Workload::U1, 65_536)), config = budget("tag_u1_64k"))]
#[bench::tag_u2_64(args = (ours(Workload::U2, 64)), config = budget("tag_u2_64"))]
#[bench::tag_u2_64k(args = (ours(Workload::U2, 65_536)), config = budget("tag_u2_64k"))]
#[bench::tag_u3_64(args = (ours(Workload::U3, 64)), config = budget("tag_u3_64"))]
#[bench::tag_u3_64k(args = (ours(Workload::U3, 65_536)), config = budget("tag_u3_64k"))]
#[bench::tag_u4_64(args = (ours(Workload::U4, 64)), config = budget("tag_u4_64"))]
#[bench::tag_u4_64k(args = (ours(Workload::U4, 65_536)), config = budget("tag_u4_64k"))]
#[bench::tag_c1_64(args = (ours(Workload::C1, 64)), config = budget("tag_c1_64"))]
#[bench::tag_u6_64(args = (ours(Workload::U6, 64)), config = budget("tag_u6_64"))]
#[bench::tag_u6_64k(args = (ours(Workload::U6, 65_536)), config = budget("tag_u6_64k"))]
#[bench::tag_p11_1k(args = (ours(Workload::P11, 1024)), config = budget("tag_p11_1k"))]
fn tag_workload(state: (Bench, Ours, u64)) -> (Bench, Ours) {
    run(state)
}

#[library_benchmark]
#[bench::list_p1_64(list(Workload::P1, 64))]
#[bench::list_p11_1k(list(Workload::P11, 1024))]
fn tag_list(state: (Bench, List, u64)) -> (Bench, List) {
    run(state)
}

library_benchmark_group!(
    name = tags,
    benchmarks = [tag_expected, tag_unexpected, tag_expected_shaped, tag_workload, tag_list]
);

main!(library_benchmark_groups = tags);
