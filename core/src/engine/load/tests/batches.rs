//! Batches of bytes, one after another, as operations that a program waits for.

use super::*;

/// Moves batches of `size` bytes, one after another, over two rails that take `takes` and `slower`
/// times `takes` nanoseconds per 64 bytes. Returns the time of all batches, in nanoseconds.
fn batches(takes: u64, slower: u64, count: u64, size: u64) -> u64 {
    lossy_batches(takes, slower, count, size, |_| 0)
}

/// Also sends a short post after each batch. `stall` returns the additional time of a post of some
/// bytes on the slower rail, in nanoseconds.
fn lossy_batches(
    takes: u64,
    slower: u64,
    count: u64,
    size: u64,
    mut stall: impl FnMut(u64) -> u64,
) -> u64 {
    NOW.with(|now| now.set(1));
    let mut loads = Loads::<2>::new(Some(clock), SET);
    let (mut at, mut turn) = (0, 0);
    for _ in 0..count {
        let mut left = size;
        // The posts of each rail, by the time at which they complete.
        let mut posts: [std::collections::VecDeque<(u64, u64)>; 2] = Default::default();
        loop {
            while left != 0 {
                let whole = loads.piece(left, left != size);
                let Some(rail) = loads.choose(0b11, 0, turn, whole, &mut { Wait::NONE }) else {
                    break;
                };
                turn = (rail as u8 + 1) & 1;
                let len = loads.cut(rail, whole);
                loads.posted(rail, len);
                let begins = posts[rail].back().map_or(at, |&(ends, _)| ends);
                let stalls = if rail == 1 { stall(len) } else { 0 };
                let moves = len / 64 * [takes, takes * slower][rail];
                posts[rail].push_back((begins + moves + stalls, len));
                left -= len;
            }
            let first = |rail: usize| posts[rail].front().map_or(u64::MAX, |&(ends, _)| ends);
            let rail = usize::from(first(1) < first(0));
            let Some((ends, len)) = posts[rail].pop_front() else { break };
            at = ends;
            NOW.with(|now| now.set(1 + at));
            loads.ended(rail, 1, len, true);
        }
        if loads.choose(0b11, 0, turn, 8, &mut { Wait::NONE }) == Some(1) {
            at += stall(8);
            NOW.with(|now| now.set(1 + at));
        }
        turn = (turn + 1) & 1;
    }
    at
}

#[test]
fn a_rail_that_loses_packets_holds_up_little() {
    // As TCP with a loss of 20 %: half of the pieces and a fifth of the short posts wait for
    // retransmissions, one after the other, each for twice as long.
    for (count, size) in [(4000, PIECE), (300, 1 << 20), (80, 4 << 20)] {
        let mut sum = 0;
        for seed in 1..=20u64 {
            let mut random = seed;
            let mut chance = |percent| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random % 100 < percent
            };
            let both = lossy_batches(5000, 1, count, size, |bytes| {
                let mut waits = 0;
                if chance(if bytes < LONG { 20 } else { 50 }) {
                    waits = 200_000_000;
                    while waits < 6_000_000_000 && chance(36) {
                        waits *= 2;
                    }
                }
                waits
            });
            let share = 100 * count * size / 64 * 5000 / both;
            assert!(share >= 60, "{seed}, {size}: {share} %");
            sum += share;
        }
        assert!(sum >= 20 * 80, "{size}: {sum} %");
    }
}

#[test]
fn operations_do_not_wait_long_for_the_pieces_of_a_slow_rail() {
    for takes in [40, 1000, 5000] {
        for slower in [1, 3, 10, 100, 1000, 10_000] {
            for (count, size) in [(5000, PIECE), (300, 1 << 20), (5, 64 << 20)] {
                let learning = 5 * slower * takes * LEAST / 64;
                let both = batches(takes, slower, count, size);
                let short = (SPLIT * 64 / takes / 2).clamp(LEAST, PIECE);
                let piece = if size >= SET.from { PIECE } else { short };
                let pieces = size / piece;
                let shares = (0..=pieces).map(|share| (pieces - share).max(share * slower));
                let best = count * shares.min().unwrap() * piece / 64 * takes;
                assert!(
                    both <= best * 21 / 20 + learning,
                    "{takes}, {slower}, {size}: {both} ns, {best} at best"
                );
            }
        }
    }
}
