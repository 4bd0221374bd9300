//! Random operations with small alphabets: 2 communicators, 2 sources, 4 tags, 2 values of bits 64
//! to 95, and 48 shapes.

use fishplate_core::engine::tag::{Arrived, Tag};

use super::engines::{Build, Ours};
use super::model::Model;
use super::ops::{Answers, Op, Random, Seen, Wanted, setting};

/// Number of operations in a phase. Phases with more posts and phases with more arrivals alternate.
const PERIOD: u64 = 8192;

/// Number of sources that send.
pub const SOURCES: u64 = 2;

pub fn tag(random: &mut Random) -> Tag {
    Tag::new(random.below(2) << 40 | random.below(4) | 1 << 63, random.below(2) as u32)
}

/// Returns one of 24 masks. A mask compares or ignores each of these: the communicator, the two
/// bits of the tag, a bit that is set in all tags, and bits 64 to 95.
pub fn ignore(random: &mut Random) -> Tag {
    let kind = random.below(12);
    let lo = (kind & 1) << 40 | kind >> 1 & 3 | (kind >> 3) << 63;
    Tag::new(lo, if random.below(2) == 0 { 0 } else { u32::MAX })
}

pub fn wanted(random: &mut Random) -> Wanted {
    let source = (random.below(2) == 0).then(|| random.below(SOURCES) as u32);
    // Half of the receives have common shapes, as in programs. The others have any shape.
    let ignore = if random.below(2) == 0 { Tag::ZERO } else { ignore(random) };
    Wanted { source, tag: tag(random), ignore }
}

/// Returns the next operation. Cancels and takes choose from the model's entries.
pub fn operation(random: &mut Random, number: u64, model: &Model) -> Op {
    let share = if (number / PERIOD).is_multiple_of(2) { 60 } else { 40 };
    match random.below(100) {
        0..8 if !model.posted.is_empty() => {
            Op::Cancel { context: model.posted[random.below(model.posted.len() as u64) as usize].0 }
        }
        8..12 => Op::Probe(wanted(random)),
        12..16 => Op::Claim(wanted(random)),
        16..20 if !model.claimed.is_empty() => Op::Take {
            cookie: model.claimed[random.below(model.claimed.len() as u64) as usize].cookie,
        },
        20 if !model.unexpected.is_empty() => {
            let at = random.below(model.unexpected.len() as u64) as usize;
            Op::Discard { cookie: model.unexpected[at].cookie }
        }
        21 if random.below(40) == 0 => Op::FailSource(random.below(SOURCES) as u32),
        _ if random.below(100) < share => Op::Post { wanted: wanted(random), context: number },
        _ => Op::Arrive(Arrived {
            source: random.below(SOURCES) as u32,
            tag: tag(random),
            len: random.below(1 << 20),
            cookie: number,
        }),
    }
}

/// Runs operations on matcher and model, and compares the results of each.
fn agree<const SHAPES: usize, const INDEXES: usize>(build: Build, seed: u64, count: u64) {
    let mut random = Random(seed);
    let mut ours = Ours::<SHAPES, INDEXES>::new(build);
    let mut model = Model::new(build.room);
    let named = || format!("seed {seed}, {SHAPES} shapes, {INDEXES} indexes, {build:?}");
    let (mut most_posted, mut most_unexpected) = (0, 0);
    for number in 0..count {
        let op = operation(&mut random, number, &model);
        let (right, seen) = (model.answer(&op), ours.answer(&op));
        assert_eq!(seen, right, "operation {number}, {op:?}; {}", named());
        if number % 64 == 0 || build.room < 8 {
            assert_eq!(
                ours.matcher.verify(),
                Ok(()),
                "after operation {number}, {op:?}; {}",
                named()
            );
        }
        let counts = (model.posted.len(), model.unexpected.len(), model.claimed.len());
        let matcher = &ours.matcher;
        assert_eq!(
            (matcher.posted(), matcher.unexpected(), matcher.claimed()),
            counts,
            "{}",
            named()
        );
        most_posted = most_posted.max(counts.0);
        most_unexpected = most_unexpected.max(counts.1);
        // Takes a claimed message when many are claimed, so that they do not use up the slots.
        if counts.2 > build.room / 2 {
            let op = Op::Take { cookie: model.claimed[0].cookie };
            assert!(matches!(model.answer(&op), Seen::Message(_)));
            assert!(matches!(ours.answer(&op), Seen::Message(_)));
        }
    }
    if count >= 2 * PERIOD {
        // Checks that both queues became deep or full.
        let deep = if build.room < 100 { build.room } else { 60 };
        assert!(
            most_posted >= deep && most_unexpected >= deep,
            "{most_posted} {most_unexpected}; {}",
            named()
        );
    }
}

#[test]
fn any_configuration_agrees_with_two_lists() {
    let mut random = Random::seeded("any_configuration_agrees_with_two_lists");
    // Divides the operations among 16 runs. Deeper lists make a run slower.
    let each = setting("FISHPLATE_TAG_OPS", 16 * 20_000).div_ceil(16);
    let build = |room: usize, buckets: usize, unhashed: u32, walked: u32, seed: u64| Build {
        buckets,
        unhashed,
        walked,
        seed,
        ..Build::new(room)
    };
    let from =
        |first_sequence: u64, build: Build| Build { first_sequence: Some(first_sequence), ..build };
    let mut seed = || random.next();
    agree::<32, 4>(Build { seed: seed(), ..Build::new(1000) }, seed(), each);
    agree::<32, 4>(Build { seed: seed(), ..Build::new(300) }, seed(), each);
    agree::<64, 4>(build(300, 1024, 0, 0, seed()), seed(), each);
    agree::<16, 4>(build(300, 1024, 1, 2, seed()), seed(), each);
    // Ids of these runs wrap, or change the sign bit of their generation.
    agree::<16, 4>(from((1 << 32) - each / 4, build(300, 512, 4, 8, seed())), seed(), each);
    agree::<16, 4>(from((1 << 63) - 1 - each / 4, build(300, 512, 0, 0, seed())), seed(), each);
    // Degenerate configurations: all entries in one chain, one shape, one index, no index.
    agree::<32, 4>(build(120, 2, 0, 0, seed()), seed(), each);
    agree::<2, 2>(build(120, 4, 0, 0, seed()), seed(), each);
    agree::<1, 1>(build(120, 2, 0, 0, seed()), seed(), each);
    agree::<1, 1>(build(120, 256, 4, 8, seed()), seed(), each);
    agree::<0, 0>(build(120, 2, 0, 0, seed()), seed(), each);
    agree::<8, 1>(build(120, 3, 30, 8, seed()), seed(), each);
    // Queues that are always full or nearly full.
    agree::<32, 4>(build(1, 2, 0, 0, seed()), seed(), each);
    agree::<32, 4>(build(3, 8, 1, 0, seed()), seed(), each);
    agree::<2, 2>(build(20, 2, 4, 8, seed()), seed(), each);
    agree::<32, 2>(from((1 << 32) - 5, build(20, 64, 0, 0, seed())), seed(), each);
}
