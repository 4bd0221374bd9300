//! The choice of rails, in a model of two rails that complete pieces at fixed rates.

extern crate std;

mod batches;
mod stalls;

use super::*;

std::thread_local! {
    static NOW: core::cell::Cell<u64> = const { core::cell::Cell::new(1) };
}

const PIECE: u64 = 64 << 10;
const SET: Split = Split { from: 2 * PIECE, piece: PIECE };

fn clock() -> u64 {
    NOW.with(|now| now.get())
}

/// Two rails that take `takes` microseconds per piece. At most `depth` pieces that will complete
/// are outstanding. A pass takes a microsecond.
struct Rig {
    loads: Loads<2>,
    takes: [u64; 2],
    at: u64,
    /// Time at which the first outstanding piece of each rail completes.
    next: [u64; 2],
    depth: u32,
    /// Number of pieces outstanding from which on each rail refuses more.
    most: [u32; 2],
    wait: Wait,
    /// Pieces outstanding that never complete.
    held: [u32; 2],
    given: [u64; 2],
}

impl Rig {
    /// Creates two rails without a clock.
    fn new(takes: [u64; 2], depth: u32) -> Rig {
        Rig {
            loads: Loads::new(None, SET),
            takes,
            at: 0,
            next: [0; 2],
            depth,
            most: [u32::MAX; 2],
            wait: Wait::NONE,
            held: [0; 2],
            given: [0; 2],
        }
    }

    /// Creates two rails with a clock.
    fn timed(takes: [u64; 2], depth: u32) -> Rig {
        NOW.with(|now| now.set(1));
        Rig { loads: Loads::new(Some(clock), SET), ..Rig::new(takes, depth) }
    }

    /// Lets time pass, with polls that find nothing.
    fn wait(&mut self, us: u64) {
        self.loads.passes += us;
        self.pause(us);
    }

    /// Lets time pass without polls.
    fn pause(&mut self, us: u64) {
        self.at += us;
        NOW.with(|now| now.set(self.at * 1000));
    }

    fn moving(&self) -> [u32; 2] {
        [0, 1].map(|rail| self.loads.rails[rail].posts - self.held[rail])
    }

    fn pass(&mut self) {
        self.wait(1);
        for rail in 0..2 {
            while self.moving()[rail] != 0 && self.next[rail] <= self.at {
                self.next[rail] += self.takes[rail];
                self.loads.ended(rail, 1, PIECE, true);
            }
        }
        let mut full = 0;
        while full != 0b11 && self.moving().iter().sum::<u32>() < self.depth {
            let turn = (self.given[0] & 1) as u8;
            let Some(rail) = self.loads.choose(0b11, full, turn, PIECE, &mut self.wait) else {
                break;
            };
            if self.moving()[rail] >= self.most[rail] {
                full |= 1 << rail;
                continue;
            }
            if self.moving()[rail] == 0 {
                self.next[rail] = self.at + self.takes[rail];
            }
            self.loads.posted(rail, PIECE);
            self.wait.end(rail);
            self.given[rail] += 1;
        }
    }

    /// Lets the rails work for `us` microseconds. In the first `pause` of each `every`
    /// microseconds, polls find nothing.
    fn run(&mut self, us: u64, every: u64, pause: u64) {
        let end = self.at + us;
        while self.at < end {
            if self.at % every < pause {
                self.wait(1);
                continue;
            }
            // Skip most passes in which nothing completes.
            let moving = self.moving();
            let next = (0..2).filter(|&rail| moving[rail] != 0).map(|rail| self.next[rail]).min();
            let skip = next.unwrap_or(0).saturating_sub(self.at + 1);
            self.wait(skip.min(20).min(end - self.at - 1));
            self.pass();
        }
    }

    /// Returns the share of the rails' possible work that they were given in a run.
    fn share(&mut self, passes: u64, every: u64, pause: u64) -> f64 {
        self.given = [0; 2];
        self.run(passes, every, pause);
        let able = passes as f64 / self.takes[0] as f64 + passes as f64 / self.takes[1] as f64;
        (self.given[0] + self.given[1]) as f64 / able
    }

    fn drain(&mut self) {
        for rail in [0, 1] {
            while self.loads.rails[rail].posts != 0 {
                self.loads.ended(rail, 1, PIECE, true);
            }
        }
    }

    /// Posts pieces on a rail that never complete them.
    fn hold(&mut self, rail: usize, pieces: u32) {
        self.held[rail] += pieces;
        (0..pieces).for_each(|_| self.loads.posted(rail, PIECE));
    }

    /// Returns how many of `count` isolated short posts each rail gets.
    fn shorts(&mut self, count: usize) -> [usize; 2] {
        let mut got = [0; 2];
        for turn in 0..count {
            got[self
                .loads
                .choose(0b11, 0, (turn & 1) as u8, 8, &mut { Wait::NONE })
                .expect("short posts always have room")] += 1;
        }
        got
    }
}

#[test]
fn rails_of_any_speed_are_kept_busy_from_the_start() {
    for slower in [1, 3, 10, 100] {
        for takes in [[10, 10 * slower], [10 * slower, 10]] {
            let share = Rig::new(takes, 128).share(100_000, 1, 0);
            assert!(share > 0.95, "{takes:?}: {share}");
        }
    }
}

#[test]
fn pauses_of_the_process_are_not_blamed_on_a_rail() {
    for slower in [1, 3, 10, 100] {
        // A pause is shorter than the work that is outstanding.
        let share = Rig::new([10, 10 * slower], 128).share(100_000, 700, 400);
        assert!(share > 0.95, "{slower}: {share}");
    }
}

#[test]
fn a_rail_that_cannot_help_holds_up_one_piece_and_is_tried_again_after_a_rest() {
    let mut rig = Rig::new([10, 100_000], 128);
    rig.run(1_000_000, 1, 0);
    assert!((1..=2).contains(&rig.given[1]), "{}", rig.given[1]);
    rig.run(REST * 200_000, 1, 0);
    assert!((2..=4).contains(&rig.given[1]), "{} {:?}", rig.given[1], rig.loads);
    // Rail 1 becomes as fast as rail 0.
    rig.takes[1] = 10;
    rig.run(REST * 400_000, 1, 0);
    let share = rig.share(100_000, 1, 0);
    assert!(share > 0.95, "{share}");
}

#[test]
fn a_rail_that_becomes_slow_is_avoided_at_once() {
    let mut rig = Rig::new([10, 10], 32);
    rig.run(20_000, 1, 0);
    rig.takes[1] = 1000;
    rig.run(10_000, 1, 0);
    let share = rig.share(100_000, 1, 0);
    assert!(share > 0.9, "{share}");
}

#[test]
fn new_rails_wait_for_their_first_completion_unless_a_peer_has_stopped() {
    let mut loads = Loads::<2>::new(None, SET);
    for rail in [0, 1] {
        assert_eq!(loads.choose(0b11, 0, 0, PIECE, &mut { Wait::NONE }), Some(rail));
        loads.posted(rail, PIECE);
    }
    assert_eq!(loads.choose(0b11, 0, 0, PIECE, &mut { Wait::NONE }), None);
    // Short posts are not limited.
    assert_eq!(loads.choose(0b11, 0, 1, 8, &mut { Wait::NONE }), Some(1));
    loads.passes = STOPPED[1] - 1;
    assert_eq!(loads.choose(0b11, 0, 0, PIECE, &mut { Wait::NONE }), None);
    loads.passes += 1;
    assert!(loads.choose(0b11, 0, 0, PIECE, &mut { Wait::NONE }).is_some());
}

#[test]
fn a_rail_that_many_posts_waited_for_is_not_limited_once_they_complete() {
    let mut loads = Loads::<2>::new(None, SET);
    for rail in [0, 1] {
        loads.posted(rail, PIECE);
    }
    // The peer has stopped, so the rails get more than new rails may have outstanding.
    loads.passes = STOPPED[1];
    for turn in 0..80 {
        let rail = loads
            .choose(0b11, 0, turn & 1, PIECE, &mut { Wait::NONE })
            .expect("the rails have stopped");
        loads.posted(rail, PIECE);
    }
    for rail in [0, 1] {
        let posts = loads.rails[rail].posts;
        assert!(posts > 32, "{loads:?}");
        loads.passes += 1;
        loads.ended(rail, posts, PIECE, true);
        assert_eq!(loads.rails[rail].room, u64::MAX, "{loads:?}");
    }
}

#[test]
fn rails_that_do_not_reach_a_peer_are_not_compared_with_those_that_do() {
    let mut loads = Loads::<3>::new(None, SET);
    for turn in 0..100 {
        // Rails 1 and 2 lead to one peer. Rail 0 leads to others, and is far faster.
        let short = loads.choose(0b110, 0, turn, 8, &mut { Wait::NONE });
        assert!(turn < 10 || short == Some(1), "{turn}: {short:?} {loads:?}");
        (0..3).for_each(|rail| loads.posted(rail, PIECE));
        for (rail, passes) in [(0, 1), (1, 9), (2, 90)] {
            loads.passes += passes;
            loads.ended(rail, 1, PIECE, true);
        }
    }
}

#[test]
fn posts_that_a_fast_rail_refuses_do_not_go_to_a_slow_one() {
    for mut rig in [Rig::new([5000, 500_000], 128), Rig::timed([5000, 500_000], 128)] {
        rig.most[0] = 16;
        rig.run(3_000_000, 1, 0);
        rig.given = [0; 2];
        rig.run(8_000_000, 1, 0);
        assert!(rig.given[0] > 1500 && rig.given[1] <= 2, "{:?}", rig.given);
    }
}

#[test]
fn isolated_posts_take_the_fast_rail() {
    let mut rig = Rig::new([10, 1000], 128);
    rig.run(100_000, 1, 0);
    rig.depth = 1;
    rig.run(100_000, 1, 0);
    rig.drain();
    rig.given = [0; 2];
    for _ in 0..1000 {
        // The interval between two posts is longer than the slow rail takes for a piece.
        rig.loads.passes += 1_000_000;
        let rail = rig
            .loads
            .choose(0b11, 0, (rig.given[0] & 1) as u8, PIECE, &mut { Wait::NONE })
            .expect("both are idle");
        rig.loads.posted(rail, PIECE);
        rig.loads.passes += rig.takes[rail];
        rig.loads.ended(rail, 1, PIECE, true);
        rig.given[rail] += 1;
    }
    assert!(rig.given[1] <= 2, "{:?}", rig.given);
}

#[test]
fn a_silence_without_work_of_other_rails_is_not_blamed_on_a_rail() {
    let mut rig = Rig::timed([10, 10], 16);
    // The very first piece completes two seconds late.
    rig.hold(0, 1);
    rig.pause(2_000_000);
    rig.held[0] = 0;
    rig.run(200_000, 1, 0);
    assert!(rig.given[0] > 10_000 && rig.given[1] > 10_000, "{:?}", rig.given);
}

#[test]
fn pauses_of_this_process_or_of_the_peer_are_blamed_on_no_rail() {
    for (slower, depth) in [(1, 16), (1, 128), (3, 16), (3, 64), (10, 64), (10, 128), (100, 128)] {
        for own in [true, false] {
            let mut rig = Rig::timed([50, 50 * slower], depth);
            let mut ratios = 0.0;
            for turn in 0..400 {
                rig.run(2000 + turn * 7 % 1300, 1, 0);
                let us = 2000 + turn * 611 % 23_000;
                match own {
                    true => rig.pause(us),
                    false => {
                        rig.next = rig.next.map(|next| next + us);
                        rig.run(us, 1, 0);
                    }
                }
                if turn >= 300 {
                    ratios += rig.loads.rails[1].cost as f64 / rig.loads.rails[0].cost as f64;
                }
            }
            let ratio = ratios / 100.0 / slower as f64;
            let case = std::format!("{slower}, {depth}, {own}: {ratio} {:?}", rig.given);
            assert!((0.85..1.15).contains(&ratio), "{case}");
            assert!(slower > SLOW || rig.loads.slow == 0, "{case}");
            let given = rig.given[0] as f64 / rig.given[1] as f64 / slower as f64;
            assert!((0.85..2.0).contains(&given), "{case}");
        }
    }
}

#[test]
fn one_late_completion_does_not_disable_a_rail_for_long() {
    // A piece of rail 1 is 200 ms late while rail 0 works on, in the middle or at the start.
    for (before, recovers) in [(100_000, 500_000), (0, 5_000_000)] {
        let mut rig = Rig::timed([50, 50], 64);
        rig.run(before + 1, 1, 0);
        rig.next[1] += 200_000;
        rig.run(250_000 + recovers, 1, 0);
        assert_eq!(rig.loads.slow, 0, "{before}: {:?}", rig.loads);
        let share = rig.share(200_000, 1, 0);
        assert!(share > 0.9, "{before}: {share} {:?}", rig.loads);
    }
    // A piece is late while nothing else is posted.
    let mut rig = Rig::timed([50, 50], 1);
    rig.run(10_000, 1, 0);
    while rig.moving()[1] == 0 {
        rig.pass();
    }
    rig.next[1] += 20_000;
    rig.run(20_100, 1, 0);
    rig.given = [0; 2];
    rig.run(20_000, 1, 0);
    assert!(rig.given[1] > 40, "{:?} {:?}", rig.given, rig.loads);
    rig.drain();
    assert_eq!(rig.shorts(100), [50, 50]);
}

#[test]
fn a_peer_that_has_stopped_does_not_throttle_others() {
    // Pieces get stuck at the start or later, on both rails or on one.
    for (before, held) in [(0, [1, 1]), (0, [0, 1]), (100_000, [32, 32]), (100_000, [0, 64])] {
        let mut rig = Rig::timed([50, 50], 64);
        rig.run(before, 1, 0);
        for rail in [0, 1] {
            rig.hold(rail, held[rail]);
        }
        // Until its posts count as stuck, the rail may as well have become slow.
        let least = match (before, held) {
            (0, [1, 1]) => 0.75,
            (_, [0, _]) => 0.49,
            _ => 0.9,
        };
        let share = rig.share(1_000_000, 1, 0);
        assert!(share > least, "{before}, {held:?}: {share}");
        rig.run(1_000_000, 1, 0);
        let share = rig.share(2_000_000, 1, 0);
        assert!(share > 0.95, "{before}, {held:?}: {share} {:?}", rig.loads);
    }
}

#[test]
fn a_stuck_post_does_not_make_a_rail_unusable() {
    // Nothing on the rail completes for ten seconds, so it gets little meanwhile.
    let mut rig = Rig::timed([50, 50], 64);
    rig.run(100_000, 1, 0);
    rig.hold(1, 3);
    rig.next[1] = u64::MAX;
    rig.run(1000, 1, 0);
    rig.given = [0; 2];
    rig.run(10_000_000, 1, 0);
    assert!((2..5).contains(&rig.given[1]), "{:?}", rig.given);
    // Afterwards only the first posts stay stuck.
    rig.next[1] = rig.at;
    rig.run(1_000_000, 1, 0);
    let share = rig.share(1_000_000, 1, 0);
    assert!(share > 0.95, "{share} {:?}", rig.loads);
    // Later the stuck posts complete too.
    rig.held = [0; 2];
    rig.run(1000, 1, 0);
    rig.drain();
    assert!(
        rig.loads.rails.iter().all(|load| load.bytes == 0 && load.long == 0 && load.stuck == 0)
    );
}

#[test]
fn a_rail_that_returns_is_used_at_once() {
    for depth in [1, 64] {
        let mut rig = Rig::timed([50, 50], depth);
        rig.run(100_000, 1, 0);
        // The rail fails with pieces outstanding, which are reported much later.
        rig.hold(1, 3);
        rig.next[1] = u64::MAX;
        rig.run(100_000, 1, 0);
        rig.held[1] = 0;
        while rig.loads.rails[1].posts != 0 {
            rig.loads.ended(1, 1, PIECE, false);
        }
        assert_eq!(rig.loads.rails[1].moving(), 0);
        rig.loads.renew(1);
        assert!(rig.shorts(100)[1] >= 50);
        rig.given = [0; 2];
        rig.next[1] = rig.at + 50;
        rig.run(60, 1, 0);
        assert!(rig.given[1] >= 1, "{:?}", rig.given);
        let share = rig.share(100_000, 1, 0);
        assert!(depth == 1 || share > 0.9, "{share}");
    }
}

#[test]
fn short_posts_avoid_slow_rails_and_take_turns_on_others() {
    let mut rig = Rig::new([10, 100], 128);
    rig.run(10_000, 1, 0);
    let loads = &mut rig.loads;
    assert_eq!(
        (
            loads.slow,
            loads.choose(0b11, 0, 1, 8, &mut { Wait::NONE }),
            loads.choose(0b10, 0, 1, 8, &mut { Wait::NONE })
        ),
        (0b10, Some(0), Some(1))
    );
    rig.takes[1] = 12;
    rig.run(2_000_000, 1, 0);
    rig.drain();
    assert_eq!(rig.loads.slow, 0);
    assert_eq!(
        [0, 1].map(|turn| rig.loads.choose(0b11, 0, turn, 8, &mut { Wait::NONE })),
        [Some(0), Some(1)]
    );
}

#[test]
fn a_rail_that_holds_up_a_stream_gets_no_short_posts_for_a_while() {
    let mut rig = Rig::timed([50, 50], 8);
    rig.shorts(2);
    rig.loads.held_up(1, 0, true);
    assert_eq!(rig.shorts(100), [100, 0]);
    rig.shorts((LAPSE << LATE) as usize);
    assert_eq!(rig.shorts(100), [50, 50]);
    // Long posts show that the rail is fast.
    rig.loads.held_up(1, 0, true);
    rig.run(20_000, 1, 0);
    rig.drain();
    assert_eq!(rig.shorts(100), [50, 50]);
}

#[test]
fn one_rail_is_not_counted() {
    let mut loads = Loads::<1>::new(None, SET);
    loads.ended(0, 1, 100, true);
    assert!(loads.has_posts(0));
}

#[test]
fn short_operations_are_split_while_all_rails_are_slow() {
    // The time of a piece on the fast rail, and the size from which operations are split then.
    let cases =
        [(50, SET.from), (120, 2 * PIECE * 10 / 12), (240, PIECE * 10 / 12), (4000, 2 * LEAST)];
    let mut rig = Rig::timed([50, 500], 8);
    for (takes, from) in cases.into_iter().chain(cases.into_iter().rev()) {
        rig.takes = [takes, takes * 10];
        rig.run(20_000_000, 1, 0);
        let split = rig.loads.split;
        assert!(split.from.abs_diff(from) < from / 8, "{takes}: {split:?}");
        assert!(split.piece == PIECE || split.piece == split.from / 2, "{split:?}");
    }
    // Without a clock, speeds are not known.
    let mut rig = Rig::new([4000, 4000], 8);
    rig.run(1_000_000, 1, 0);
    assert_eq!(rig.loads.split, SET);
    let never = Split { from: u64::MAX, ..SET };
    let mut rig = Rig::timed([4000, 4000], 8);
    rig.loads = Loads::new(Some(clock), never);
    rig.run(1_000_000, 1, 0);
    assert_eq!(rig.loads.split, never);
}

#[test]
fn the_latency_of_a_few_bytes_does_not_make_a_rail_slow() {
    NOW.with(|now| now.set(1));
    let mut loads = Loads::<2>::new(Some(clock), SET);
    for at in 1..100 {
        let rail = loads.choose(0b11, 0, 0, LONG, &mut { Wait::NONE }).unwrap();
        loads.posted(rail, LONG);
        NOW.with(|now| now.set(1 + at * 30_000));
        assert!(!loads.ended(rail, 1, LONG, true), "{:?}", loads.split);
    }
}

#[test]
fn rails_are_measured_again_after_long_stops_and_after_the_clock_has_jumped() {
    const DAY: u64 = 86_400_000_000_000;
    for jump in [DAY, 0u64.wrapping_sub(1000)] {
        let mut rig = Rig::timed([100, 400], 16);
        rig.run(20_000, 1, 0);
        rig.drain();
        for _ in 0..5 {
            rig.loads.posted(0, PIECE);
            NOW.with(|now| now.set(now.get().wrapping_add(jump)));
            rig.loads.ended(0, 1, PIECE, true);
        }
        rig.run(5_000_000, 1, 0);
        let share = rig.share(200_000, 1, 0);
        assert!(share > 0.9, "{jump:#x}: {share} {:?}", rig.loads);
    }
}

#[test]
fn no_sequence_of_times_and_sizes_overflows() {
    for seed in 1..40u64 {
        NOW.with(|now| now.set(seed));
        let mut random = seed;
        let mut next = |limit: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % limit
        };
        let mut loads = Loads::<3>::new((seed % 4 != 0).then_some(clock as fn() -> u64), SET);
        let mut posts: [std::vec::Vec<u64>; 3] = Default::default();
        for _ in 0..3000 {
            let step = match next(8) {
                0 => next(1 << 50),
                1 => 0u64.wrapping_sub(next(1 << 30)),
                _ => next(1 << 24),
            };
            NOW.with(|now| now.set(now.get().wrapping_add(step)));
            loads.passes = loads.passes.wrapping_add(next(3));
            let (size, full, rail) = (1 << next(31), next(7) as u16, next(3) as usize);
            if next(2) == 0 {
                let mut wait = Wait::NONE;
                if let Some(rail) = loads.choose(0b111, full, rail as u8, size, &mut wait) {
                    let len = loads.cut(rail, size);
                    assert!((1..=size).contains(&len));
                    loads.posted(rail, len);
                    posts[rail].push(len);
                }
            } else if let Some(len) = posts[rail].pop() {
                loads.ended(rail, 1, len, next(10) != 0);
            } else {
                loads.renew(rail);
            }
        }
    }
}
