//! Load and speed of each rail: the input of rail selection.
//!
//! Counting costs a few additions per post and completion, and nothing with one rail. Posts of
//! [`LONG`] bytes and more are also timed, by the rail's clock ([`Rail::CLOCK`]) or, without one,
//! in passes. The bytes that a rail completes while such posts are outstanding, and the time
//! between, give its cost per byte. Only ratios of costs matter, and a long silence counts only as
//! far as other rails worked meanwhile, so a pause of the process or of a peer is not blamed on a
//! rail.
//!
//! A choice takes the rail that is expected to complete the post first. A rail that has completed
//! nothing for some time is expected to take as much time again. A new rail may have [`FIRST`]
//! bytes outstanding, and more as posts complete, so a rail that turns out to be slow holds up
//! little. A rail too slow to be chosen gets a post now and then, because it may have become
//! faster.
//!
//! [`Rail::CLOCK`]: crate::rail::Rail::CLOCK

use core::array;

/// Posts of at least this many bytes are timed.
pub(crate) const LONG: u64 = 4096;

/// Bytes that may be outstanding on a new rail, and those from which on it is not limited.
const FIRST: u64 = 64 << 10;
const PROVEN: u64 = 2 << 20;

/// Time without a completion, in nanoseconds or passes, after which a rail is no longer limited:
/// all its posts may be to a peer that has stopped.
const STOPPED: [u64; 2] = [200_000_000, 10_000];

/// Fraction bits of a cost, and the largest cost.
const FRACTION: u32 = 20;
const MOST: u64 = 1 << 40;

/// The time of a silence that always counts, in nanoseconds or passes. More of it counts up to
/// [`LONGER`] times the expected time, and up to [`BUSY`] times the work of other rails meanwhile.
const SILENCE: [u64; 2] = [500_000, u64::MAX];
const LONGER: u64 = 64;
const BUSY: u64 = 8;

/// Bytes and time after which the sums of a rail are halved, and the bytes after which its cost is
/// computed anew.
const BYTES: u64 = 16 << 20;
const TIME: u64 = 50_000_000;
const FRESH: u64 = 128 << 10;

const SLOW: u64 = 2;

/// A rail too slow to be chosen is probed once the others have worked for this many times the time
/// of a probe.
const REST: u64 = 16;

/// One rail.
#[derive(Clone, Copy, Debug)]
struct Load {
    /// Posts and bytes outstanding.
    posts: u32,
    bytes: u64,
    /// Bytes outstanding in timed posts.
    long: u64,
    /// The last time that one completed, or that the first was posted, and the time until then when
    /// posts were outstanding.
    since: u64,
    time: u64,
    /// [`Loads::work`] at `since`.
    mark: u64,
    /// Bytes completed in `time`, and those since the cost was computed.
    moved: u64,
    fresh: u64,
    /// The start of the current or last busy period, and the bytes completed in it.
    began: u64,
    period: u64,
    /// Time per byte, with [`FRACTION`] bits. 0 before the first completion.
    cost: u64,
    /// Bytes that may be outstanding.
    room: u64,
    /// Time that posts take for which other rails were chosen, since the last one here.
    passed: u64,
}

/// Load and speed of every rail. Bytes outstanding stay below 2^50: a window of posts of 2 GiB.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loads<const RAILS: usize> {
    rails: [Load; RAILS],
    clock: Option<fn() -> u64>,
    /// Time where there is no clock.
    pub(crate) passes: u64,
    /// The expected times of everything that has completed. Wraps.
    work: u64,
    /// Rails that cost more than [`SLOW`] times as much as the fastest: not for short posts.
    slow: u16,
}

impl Load {
    const NEW: Load = Load {
        posts: 0,
        bytes: 0,
        long: 0,
        since: 0,
        time: 0,
        mark: 0,
        moved: 0,
        fresh: 0,
        began: 0,
        period: 0,
        cost: 0,
        room: FIRST,
        passed: 0,
    };

    /// Returns the expected time until `more` bytes are complete: from the cost, and, if more, from
    /// the time without a completion.
    fn expected(&self, more: u64, now: u64) -> (u64, u64) {
        let cost = if self.cost == 0 { 1 << FRACTION } else { self.cost };
        let by_cost = (self.bytes + more).saturating_mul(cost) >> FRACTION;
        (by_cost.max(self.silent(now)), by_cost)
    }

    /// Returns the time for which nothing has completed, if something is outstanding.
    fn silent(&self, now: u64) -> u64 {
        if self.long != 0 { now.wrapping_sub(self.since) } else { 0 }
    }

    fn is_full(&self, more: u64) -> bool {
        self.bytes != 0 && self.bytes.saturating_add(more) > self.room
    }

    /// Counts `bytes` completed by `now`, of which a silence of `most` counts. Returns whether the
    /// cost was computed anew.
    fn count(&mut self, bytes: u64, now: u64, most: u64) -> bool {
        self.long = self.long.saturating_sub(bytes);
        self.time += now.wrapping_sub(self.since).min(most);
        (self.moved, self.fresh, self.since) = (self.moved + bytes, self.fresh + bytes, now);
        self.period += bytes;
        if self.room < PROVEN {
            self.room += bytes / 8;
            self.room = if self.room < PROVEN { self.room } else { u64::MAX };
        }
        let enough = self.long == 0 || self.fresh >= FRESH;
        if enough {
            // The rail may have become faster, or have saved up credit for a burst.
            let period = now.wrapping_sub(self.began);
            if self.long == 0 && ((period << FRACTION) / self.period.max(1)) < self.cost / 2 {
                self.time = self.time / 4 * 3;
            }
            self.cost = ((self.time << FRACTION) / self.moved.max(1)).clamp(1, MOST);
            self.fresh = 0;
            if self.moved >= BYTES || self.time >= TIME {
                (self.moved, self.time) = (self.moved / 2, self.time / 2);
            }
        }
        enough
    }
}

impl<const RAILS: usize> Loads<RAILS> {
    /// Creates the loads of rails with nothing outstanding.
    pub(crate) fn new(clock: Option<fn() -> u64>) -> Self {
        Loads { rails: array::from_fn(|_| Load::NEW), clock, passes: 0, work: 0, slow: 0 }
    }

    fn now(&self) -> u64 {
        self.clock.map_or(self.passes, |clock| clock())
    }

    /// Records an accepted post that is pending.
    #[inline(always)]
    pub(crate) fn posted(&mut self, rail: usize, bytes: u64) {
        if RAILS > 1 {
            let load = &mut self.rails[rail];
            load.posts += 1;
            load.bytes += bytes;
            if bytes >= LONG {
                self.long_posted(rail, bytes);
            }
        }
    }

    /// Records `count` completed posts of `each` bytes.
    #[inline(always)]
    pub(crate) fn ended(&mut self, rail: usize, count: u32, each: u64) {
        if RAILS > 1 {
            let load = &mut self.rails[rail];
            load.posts = load.posts.wrapping_sub(count);
            load.bytes = load.bytes.wrapping_sub(count as u64 * each);
            if each >= LONG {
                self.long_ended(rail, count as u64 * each);
            }
        }
    }

    #[cold]
    fn long_posted(&mut self, rail: usize, bytes: u64) {
        if self.rails[rail].long == 0 {
            let now = self.now();
            let load = &mut self.rails[rail];
            (load.since, load.began, load.period, load.mark) = (now, now, 0, self.work);
        }
        self.rails[rail].long += bytes;
    }

    #[cold]
    fn long_ended(&mut self, rail: usize, bytes: u64) {
        let now = self.now();
        let load = &mut self.rails[rail];
        let own = bytes.saturating_mul(load.cost) >> FRACTION;
        let others = self.work.wrapping_sub(load.mark);
        let silence = SILENCE[self.clock.is_none() as usize];
        let most = own.saturating_mul(LONGER).max(others.saturating_mul(BUSY)).max(silence);
        self.work = self.work.wrapping_add(own);
        load.mark = self.work;
        if load.count(bytes, now, most) {
            let known = |load: &&Load| load.cost != 0;
            let fastest = self.rails.iter().filter(known).map(|load| load.cost).min().unwrap_or(0);
            let slow = |(rail, load): (usize, &Load)| u16::from(load.cost > SLOW * fastest) << rail;
            self.slow = self.rails.iter().enumerate().map(slow).sum();
        }
    }

    /// Returns whether posts may be outstanding on a rail. A single rail is not counted.
    pub(crate) fn has_posts(&self, rail: usize) -> bool {
        RAILS == 1 || self.rails[rail].posts != 0
    }

    /// Chooses one of `rails`, which is not 0, for a post of `bytes` bytes, beginning with rail
    /// `turn`. `None`: none of them may have more outstanding now.
    pub(crate) fn choose(&mut self, rails: u16, turn: u8, bytes: u64) -> Option<usize> {
        if bytes >= LONG {
            return self.choose_long(rails, turn, bytes);
        }
        let fast = if rails & !self.slow != 0 { rails & !self.slow } else { rails };
        ahead(fast, turn).min_by_key(|&rail| self.rails[rail].bytes)
    }

    /// Chooses the rail that is expected to complete the post first, or one that has to be probed.
    fn choose_long(&mut self, rails: u16, turn: u8, bytes: u64) -> Option<usize> {
        let now = self.now();
        let (mut best, mut least) = (None, (u64::MAX, u64::MAX));
        let mut probed = None;
        for rail in ahead(rails, turn) {
            let load = &self.rails[rail];
            let expected = load.expected(bytes, now);
            if load.passed >= REST.saturating_mul(expected.0) || (load.cost == 0 && load.bytes == 0) {
                probed = probed.or(Some(rail));
            }
            if expected < least {
                (best, least) = (Some(rail), expected);
            }
        }
        let chosen = probed.or(best)?;
        let stopped = STOPPED[self.clock.is_none() as usize];
        let load = &mut self.rails[chosen];
        if load.is_full(bytes) && probed.is_none() {
            if load.silent(now) < stopped {
                // The others would take longer, so wait for this one.
                return None;
            }
            load.room = load.bytes.saturating_add(bytes).saturating_add(FIRST);
        }
        let took = bytes.saturating_mul(self.rails[chosen].cost) >> FRACTION;
        for rail in ahead(rails, 0) {
            self.rails[rail].passed = match rail == chosen {
                true => 0,
                false => self.rails[rail].passed.saturating_add(took),
            };
        }
        Some(chosen)
    }
}

/// Returns the rails of a bitmask, beginning with rail `turn`.
pub(crate) fn ahead(rails: u16, turn: u8) -> impl Iterator<Item = usize> {
    let turn = u32::from(turn);
    let mut ahead = rails.rotate_right(turn);
    core::iter::from_fn(move || {
        let next = ahead.trailing_zeros();
        ahead &= ahead.wrapping_sub(1);
        (next < 16).then_some((next + turn) as usize & 15)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;

    std::thread_local! {
        static NOW: core::cell::Cell<u64> = const { core::cell::Cell::new(1) };
    }

    const PIECE: u64 = 64 << 10;

    /// Two rails that take so many passes per piece, with at most `depth` pieces outstanding.
    struct Rig {
        loads: Loads<2>,
        takes: [u64; 2],
        /// When the first piece of each rail completes.
        next: [u64; 2],
        depth: u32,
        given: [u64; 2],
    }

    impl Rig {
        fn new(takes: [u64; 2], depth: u32) -> Rig {
            Rig { loads: Loads::new(None), takes, next: [0; 2], depth, given: [0; 2] }
        }

        /// Lets the rails work for a number of passes. Nothing is seen of the first `pause` of each
        /// `every`.
        fn run(&mut self, passes: u64, every: u64, pause: u64) {
            let end = self.loads.passes + passes;
            while self.loads.passes < end {
                self.loads.passes += 1;
                let now = self.loads.passes;
                if now % every < pause {
                    continue;
                }
                for rail in 0..2 {
                    while self.loads.rails[rail].posts != 0 && self.next[rail] <= now {
                        self.next[rail] += self.takes[rail];
                        self.loads.ended(rail, 1, PIECE);
                    }
                }
                while self.loads.rails.iter().map(|load| load.posts).sum::<u32>() < self.depth {
                    let Some(rail) = self.loads.choose(0b11, 0, PIECE) else { break };
                    if self.loads.rails[rail].posts == 0 {
                        self.next[rail] = now + self.takes[rail];
                    }
                    self.loads.posted(rail, PIECE);
                    self.given[rail] += 1;
                }
            }
        }

        /// Returns the share of the rails' possible work that they were given in a run.
        fn share(&mut self, passes: u64, every: u64, pause: u64) -> f64 {
            self.given = [0; 2];
            self.run(passes, every, pause);
            let able = passes as f64 / self.takes[0] as f64 + passes as f64 / self.takes[1] as f64;
            (self.given[0] + self.given[1]) as f64 / able
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
        // It has become as fast as the other.
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
        let mut loads = Loads::<2>::new(None);
        for rail in [0, 1] {
            assert_eq!(loads.choose(0b11, 0, PIECE), Some(rail));
            loads.posted(rail, PIECE);
        }
        assert_eq!(loads.choose(0b11, 0, PIECE), None);
        // Short posts are not limited.
        assert_eq!(loads.choose(0b11, 1, 8), Some(1));
        loads.passes = STOPPED[1] - 1;
        assert_eq!(loads.choose(0b11, 0, PIECE), None);
        loads.passes += 1;
        assert!(loads.choose(0b11, 0, PIECE).is_some());
    }

    #[test]
    fn isolated_posts_take_the_fast_rail() {
        let mut rig = Rig::new([10, 1000], 128);
        rig.run(100_000, 1, 0);
        rig.depth = 1;
        rig.run(100_000, 1, 0);
        for rail in [0, 1] {
            while rig.loads.rails[rail].posts != 0 {
                rig.loads.ended(rail, 1, PIECE);
            }
        }
        rig.given = [0; 2];
        for _ in 0..1000 {
            // Far more apart than the slow rail needs.
            rig.loads.passes += 1_000_000;
            let rail = rig.loads.choose(0b11, (rig.given[0] & 1) as u8, PIECE).expect("both are idle");
            rig.loads.posted(rail, PIECE);
            rig.loads.passes += rig.takes[rail];
            rig.loads.ended(rail, 1, PIECE);
            rig.given[rail] += 1;
        }
        assert!(rig.given[1] <= 2, "{:?}", rig.given);
    }

    #[test]
    fn a_silence_without_work_of_other_rails_is_not_blamed_on_a_rail() {
        fn clock() -> u64 {
            NOW.with(|now| now.get())
        }
        let after = |ns: u64| NOW.with(|now| now.set(now.get() + ns));
        let mut loads = Loads::<2>::new(Some(clock));
        // Each rail takes 10 us for a piece; the first of all comes two seconds late.
        loads.posted(0, PIECE);
        after(2_000_000_000);
        loads.ended(0, 1, PIECE);
        let mut given = [0; 2];
        for _ in 0..20_000 {
            while let Some(rail) = loads.choose(0b11, 0, PIECE) {
                loads.posted(rail, PIECE);
                given[rail] += 1;
                if loads.rails.iter().map(|load| load.posts).sum::<u32>() >= 16 {
                    break;
                }
            }
            after(10_000);
            for rail in [0, 1] {
                if loads.rails[rail].posts != 0 {
                    loads.ended(rail, 1, PIECE);
                }
            }
        }
        assert!(given[0] > 10_000 && given[1] > 10_000, "{given:?}");
    }

    #[test]
    fn short_posts_avoid_slow_rails_and_take_turns_on_others() {
        let mut rig = Rig::new([10, 100], 128);
        rig.run(10_000, 1, 0);
        let loads = &mut rig.loads;
        assert_eq!(
            (loads.slow, loads.choose(0b11, 1, 8), loads.choose(0b10, 1, 8)),
            (0b10, Some(0), Some(1))
        );
        rig.takes[1] = 12;
        rig.run(2_000_000, 1, 0);
        for rail in [0, 1] {
            while rig.loads.rails[rail].posts != 0 {
                rig.loads.ended(rail, 1, PIECE);
            }
        }
        assert_eq!(rig.loads.slow, 0);
        assert_eq!([0, 1].map(|turn| rig.loads.choose(0b11, turn, 8)), [Some(0), Some(1)]);
    }

    #[test]
    fn one_rail_is_not_counted() {
        let mut loads = Loads::<1>::new(None);
        loads.ended(0, 1, 100);
        assert!(loads.has_posts(0));
    }
}
