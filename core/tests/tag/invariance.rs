//! Tests that a sequence of operations has the same results in every configuration. Sizes and seeds
//! change only the cost of a search.

use super::differential::operation;
use super::engines::{Build, Ours};
use super::model::Model;
use super::ops::{Answers, Op, Random, Seen};

fn replay<const SHAPES: usize, const INDEXES: usize>(
    trace: &[(Op, Seen)],
    build: Build,
    seed: u64,
) {
    for build in
        [Build { unhashed: 0, walked: 0, ..build }, build, Build { unhashed: 1000, ..build }]
    {
        let mut ours = Ours::<SHAPES, INDEXES>::new(build);
        for (number, (op, right)) in trace.iter().enumerate() {
            let seen = ours.answer(op);
            assert_eq!(
                seen, *right,
                "operation {number}, {op:?}; seed {seed}, {SHAPES} {INDEXES} {build:?}"
            );
        }
        assert_eq!(ours.matcher.verify(), Ok(()));
    }
}

#[test]
fn sizes_and_seeds_do_not_change_results() {
    let mut random = Random::seeded("sizes_and_seeds_do_not_change_results");
    let seed = random.0;
    let mut model = Model::new(150);
    let trace: Vec<(Op, Seen)> = (0..8_000)
        .map(|number| {
            let op = operation(&mut random, number, &model);
            let seen = model.answer(&op);
            (op, seen)
        })
        .collect();
    for buckets in [2, 4, 128, 4096] {
        for seed_of_hash in [0, random.next()] {
            let build = Build { buckets, seed: seed_of_hash, ..Build::new(150) };
            replay::<0, 1>(&trace, build, seed);
            replay::<1, 4>(&trace, build, seed);
            replay::<2, 1>(&trace, build, seed);
            replay::<8, 4>(&trace, build, seed);
            replay::<64, 4>(&trace, build, seed);
        }
    }
}
