//! Rails that deliver nothing for some time, although the peer answers over other rails.

use super::*;

const MS: u64 = 1000;

/// Two rails that complete a piece in 50 microseconds. The second stalls `times` times for 100 ms.
fn stalled(times: u32) -> Rig {
    let mut rig = Rig::timed([50, 50], 8);
    rig.run(20 * MS, 1, 0);
    rig.drain();
    (0..times).for_each(|_| stall(&mut rig, 100));
    rig
}

/// The second rail stalls for some milliseconds, which is noted every 10 ms.
fn stall(rig: &mut Rig, ms: u64) {
    for noted in (80..=ms).step_by(10) {
        rig.pause(if noted == 80 { 80 * MS } else { 10 * MS });
        rig.loads.held_up(1, noted * 1_000_000, noted == 80);
    }
    rig.pause(MS);
}

/// Returns the number of long posts that the second rail gets in some milliseconds.
fn posts(rig: &mut Rig, ms: u64) -> u64 {
    let before = rig.given[1];
    rig.run(ms * MS, 1, 0);
    rig.given[1] - before
}

#[test]
fn a_rail_that_stalls_twice_gets_one_post_in_sixteen_times_as_long() {
    let mut rig = stalled(1);
    assert!(posts(&mut rig, 10) > 50, "{:?}", rig.loads);
    rig.drain();
    let mut rig = stalled(2);
    assert_eq!(posts(&mut rig, 1500), 0);
    assert_eq!(posts(&mut rig, 200), 1);
    stall(&mut rig, 300);
    assert_eq!(posts(&mut rig, 16 * 300 - 100), 0);
    assert_eq!(posts(&mut rig, 200), 1);
}

#[test]
fn a_rail_that_stalls_no_longer_is_soon_used_again() {
    let mut rig = stalled(2);
    // The first post shows that only after a while.
    assert_eq!(posts(&mut rig, 1600 + 390), 1);
    assert!(posts(&mut rig, 20) > 100, "{:?}", rig.loads);
    assert_eq!(rig.loads.slow, 0);
}

#[test]
fn stalls_far_apart_do_not_count_together() {
    let mut rig = stalled(1);
    rig.pause(1700 * MS);
    stall(&mut rig, 100);
    assert!(!rig.loads.is_stalled(1), "{:?}", rig.loads);
    // Nor do two with much in between.
    let mut rig = stalled(1);
    assert!(posts(&mut rig, 10) > 50);
    rig.drain();
    stall(&mut rig, 100);
    assert!(!rig.loads.is_stalled(1), "{:?}", rig.loads);
    // One stall that holds up two streams counts once.
    rig.loads.held_up(1, 90_000_000, true);
    assert!(!rig.loads.is_stalled(1), "{:?}", rig.loads);
    rig.pause(MS);
    stall(&mut rig, 100);
    assert!(rig.loads.is_stalled(1), "{:?}", rig.loads);
}

#[test]
fn short_posts_try_a_stalled_rail_as_rarely() {
    let mut rig = stalled(2);
    assert_eq!(rig.shorts(10_000), [10_000, 0]);
    rig.pause(1500 * MS);
    assert_eq!(rig.shorts(10_000), [10_000, 0]);
    rig.pause(150 * MS);
    assert_eq!(rig.shorts(10_000), [9_999, 1]);
    rig.pause(410 * MS);
    assert!(rig.shorts(100)[1] > 40, "{:?}", rig.loads);
}

#[test]
fn a_rail_that_was_given_up_rests_and_longer_the_second_time() {
    let mut rig = stalled(0);
    for rest in [80, 320, 320].map(|ms| ms * REST) {
        rig.loads.given_up(1);
        rig.loads.renew(1);
        assert_eq!(posts(&mut rig, rest - 10), 0, "{rest} ms");
        assert_eq!(posts(&mut rig, 20), 1, "{rest} ms");
        rig.drain();
    }
    // Long without a failure, the number is forgotten.
    rig.pause(61_000 * MS);
    rig.loads.given_up(1);
    rig.loads.renew(1);
    assert_eq!(posts(&mut rig, 80 * REST - 10), 0);
    assert_eq!(posts(&mut rig, 20), 1);
}

#[test]
fn posts_that_a_stalled_rail_refuses_show_nothing() {
    let mut rig = stalled(2);
    rig.pause(1700 * MS);
    rig.most[1] = 0;
    assert_eq!(posts(&mut rig, 5000), 0);
    assert!(rig.loads.is_stalled(1), "{:?}", rig.loads);
    // The posts of a full rail are not complete.
    rig.hold(1, 1);
    rig.pause(5000 * MS);
    assert_eq!(rig.shorts(10_000), [10_000, 0]);
    assert!(rig.loads.is_stalled(1), "{:?}", rig.loads);
}

#[test]
fn a_slow_rail_may_need_long_for_what_it_carries() {
    let mut rig = Rig::timed([50, 50_000], 8);
    // Nothing is known of the rail yet.
    rig.loads.posted(1, PIECE);
    assert!(rig.loads.may_need(1, 1_400_000_000) && !rig.loads.may_need(1, 1_600_000_000));
    rig.loads.ended(1, 1, PIECE, true);
    rig.run(2000 * MS, 1, 0);
    rig.drain();
    assert!(!rig.loads.may_need(1, 0), "it carries nothing");
    rig.loads.posted(1, PIECE);
    assert!(rig.loads.may_need(1, 60_000_000) && !rig.loads.may_need(1, 200_000_000));
}

#[test]
fn a_rail_that_was_given_up_before_its_speed_was_known_may_be_slow() {
    let mut rig = Rig::timed([50, 50], 8);
    rig.loads.posted(1, PIECE);
    rig.loads.given_up(1);
    rig.loads.ended(1, 1, PIECE, false);
    rig.loads.renew(1);
    rig.loads.posted(1, PIECE);
    assert!(rig.loads.may_need(1, 2_900_000_000) && !rig.loads.may_need(1, 3_100_000_000));
    // Once it has completed posts, its speed is measured again when it returns.
    rig.loads.ended(1, 1, PIECE, true);
    rig.loads.given_up(1);
    rig.loads.renew(1);
    rig.loads.posted(1, PIECE);
    assert!(rig.loads.may_need(1, 1_400_000_000) && !rig.loads.may_need(1, 1_600_000_000));
}
