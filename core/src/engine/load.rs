//! Load and speed of each rail: the input of rail selection.
//!
//! Counting costs a few additions per post and completion, and nothing in an engine of one rail.
//! Posts of [`LONG`] bytes and more are also timed, by the rail's clock ([`Rail::CLOCK`]) or,
//! without one, in passes. The bytes that a rail completes while such posts are outstanding, and
//! the time that this takes, give its cost per byte.
//!
//! All rails are timed in one *busy time*. Most of an interval does not count if no rail completes
//! anything in it. Such an interval is a pause of this process or of a peer. After the pause all
//! rails complete much at once. If the whole pause counted, every rail would seem slow. But a rail
//! that soon ends such intervals again, [`ALONE`] times with nothing outstanding on others, is
//! slow, and they count in full. Failed posts are not measured, and the return of a rail clears its
//! measurements.
//!
//! A choice takes the rail that is expected to complete the post first. A rail that has completed
//! nothing for some time is expected to take as much time again. After a longer time its posts
//! count as stuck, for example because their peer has stopped, and the rail is tried again. A new
//! rail may have [`FIRST`] bytes outstanding, and more as posts complete, so a slow rail delays few
//! bytes. A post also waits for a full rail if the other rails would take longer. It waits at most
//! for [`STOPPED`], because the full rail may never take posts to this peer. A rail too slow to be
//! chosen gets a post now and then, because it may have become faster. Pieces for slow rails and
//! new ones are [cut](Loads::cut), so that an operation does not wait long for them. If all rails
//! are slow, short operations are split too ([`Split`]).
//!
//! A rail may also stall: for some time it delivers nothing, although the peer answers over other
//! rails, for example because TCP has lost packets. Its posts may complete all the same, so the
//! engine notes the stalls ([`Loads::held_up`]). A rail that stalls repeatedly is tried only now
//! and then.
//!
//! [`Rail::CLOCK`]: crate::rail::Rail::CLOCK

mod speed;
#[cfg(test)]
mod tests;

use self::speed::{FEW, FIRST, Load, PROVEN};

/// Posts of at least this many bytes are timed.
pub(crate) const LONG: u64 = 4096;

/// How writes and reads to peers with several rails are split.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Split {
    /// Size from which they are split, in bytes.
    pub(crate) from: u64,
    /// Size of the pieces, in bytes.
    pub(crate) piece: u64,
}

/// The state of posts to one peer that wait for a full rail although another rail has room.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    /// When the wait began. 0 if no post waits.
    since: u64,
    rail: u8,
}

impl Wait {
    pub(crate) const NONE: Wait = Wait { since: 0, rail: 0 };

    /// Ends the wait if it is for this rail: the rail has accepted a post, or has failed.
    pub(crate) fn end(&mut self, rail: usize) {
        if usize::from(self.rail) == rail {
            self.since = 0;
        }
    }
}

/// Time without a completion, in nanoseconds or passes, after which no post waits for a rail: all
/// its posts may be to a peer that has stopped. If that is so of all rails, they are no longer
/// limited. Also the longest wait for a full rail.
const STOPPED: [u64; 2] = [200_000_000, 10_000];

/// Time without a completion after which all posts of a rail count as stuck. It doubles each time
/// until the next completion, at most [`TRIES`] times.
const STUCK: [u64; 2] = [1_500_000_000, 200_000];
const TRIES: u8 = 3;

/// Limits how much busy time an interval without a completion on any rail adds. The limit is this
/// value, in nanoseconds or passes, or [`LONGER`] times the expected time of the next completion,
/// whichever is greater.
const SILENCE: [u64; 2] = [1_000_000, u64::MAX];
const LONGER: u64 = 4;

/// Number of silences that a rail ends alone, from which on they count in full. The number begins
/// anew after `PROMPT` bytes without a silence. A rail that loses packets completes some posts
/// promptly too.
const ALONE: u8 = 3;
const PROMPT: u64 = 1 << 20;

/// Shortest piece to which a post is cut, in bytes. Shorter pieces would show little of a rail's
/// speed, because a few bytes take little longer than one.
const LEAST: u64 = 16 << 10;

/// An operation is split if one rail would take at least this time, in nanoseconds.
const SPLIT: u64 = 200_000;

/// A rail is late if its latest bytes took at least `SLOW` times as long as on the fastest rail. A
/// rail gets no short posts if it was late [`LATE`] times, or once by `STALL` times, and costs more
/// than `SLOW` times as much as the fastest rail.
const SLOW: u64 = 4;
const STALL: u64 = 32;
const LATE: u8 = 3;
const LATE_MAX: u8 = 8;

/// Number of short posts that pass over a slow rail, with no long post between them, before its
/// count of being late drops by one. Doubles with that count.
const LAPSE: u32 = 256;

/// Number of short posts that pass over a stalled rail between two looks at the clock.
const LOOKS: u32 = 16;

/// Rails count as equally fast if their expected times differ by less than 1/`NEAR` of the time
/// that the post takes.
const NEAR: u64 = 8;

/// A rail too slow to be chosen is probed once the others have worked for this many times the time
/// of a probe.
const REST: u64 = 16;

/// Load and speed of every rail. Bytes outstanding stay below 2^50: a window of posts of 2 GiB.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loads<const RAILS: usize> {
    rails: [Load; RAILS],
    clock: Option<fn() -> u64>,
    /// Number of passes: the time if there is no clock.
    pub(crate) passes: u64,
    /// Time of the last completion of a long post on any rail, or of the first long post after all
    /// rails were idle.
    last: u64,
    busy: u64,
    /// Rails that get no short posts, as a bitmask.
    slow: u16,
    /// Rails that hold up a stream, as a bitmask.
    held: u16,
    /// Rails that reach a peer together with another rail, as a bitmask. Only the speeds of these
    /// rails are compared.
    shared: u16,
    /// The rails that the next long post could take, as a bitmask.
    open: u16,
    /// The setting, and what the speeds of the rails make of it.
    set: Split,
    pub(crate) split: Split,
}

impl<const RAILS: usize> Loads<RAILS> {
    pub(crate) fn new(clock: Option<fn() -> u64>, split: Split) -> Self {
        Loads {
            rails: [Load::NEW; RAILS],
            clock,
            passes: 0,
            last: 0,
            busy: 0,
            slow: 0,
            held: 0,
            shared: 0,
            open: 0,
            set: split,
            split,
        }
    }

    fn busy_at(&self, now: u64, expected: u64) -> u64 {
        let most = SILENCE[self.untimed()].max(LONGER.saturating_mul(expected));
        self.busy.saturating_add(now.wrapping_sub(self.last).min(most))
    }

    /// Returns 1 if time is counted in passes, and 0 if in nanoseconds.
    pub(crate) fn untimed(&self) -> usize {
        self.clock.is_none() as usize
    }

    /// Returns the time in nanoseconds or passes.
    pub(crate) fn now(&self) -> u64 {
        self.clock.map_or(self.passes, |clock| clock())
    }

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

    /// Returns whether this has changed `split`.
    #[inline(always)]
    pub(crate) fn ended(&mut self, rail: usize, count: u32, each: u64, good: bool) -> bool {
        if RAILS > 1 {
            let load = &mut self.rails[rail];
            debug_assert!(load.posts >= count && load.bytes >= count as u64 * each, "{load:?}");
            load.posts = load.posts.wrapping_sub(count);
            load.bytes = load.bytes.wrapping_sub(count as u64 * each);
            if each >= LONG {
                return self.long_ended(rail, count as u64 * each, good);
            }
        }
        false
    }

    #[cold]
    fn long_posted(&mut self, rail: usize, bytes: u64) {
        if self.rails[rail].moving() == 0 {
            let now = self.now();
            if self.rails.iter().all(|load| load.moving() == 0) {
                self.last = now;
            }
            let busy = self.busy_at(now, self.rails[rail].takes(bytes));
            self.rails[rail].begin(now, busy);
        }
        // At least 1, although without a clock one pass may complete several posts.
        let took = self.rails[rail].takes(bytes).max(1);
        for other in ahead(core::mem::take(&mut self.open), 0) {
            let load = &mut self.rails[other];
            (load.passed, load.avoided) = (load.passed.saturating_add(took), 0);
        }
        let load = &mut self.rails[rail];
        (load.long, load.passed) = (load.long + bytes, 0);
        if load.stall.is_stalled() {
            self.probe(rail);
        }
    }

    #[cold]
    fn long_ended(&mut self, rail: usize, bytes: u64, good: bool) -> bool {
        let now = self.now();
        let mut busy = self.busy_at(now, self.rails[rail].takes(bytes));
        self.rails[rail].settle(bytes);
        if !good {
            self.rails[rail].begin(now, busy);
            return false;
        }
        self.rails[rail].last = self.rails[rail].age(now);
        // A longer interval is a stop of this process or of a peer, or the clock has jumped.
        let most = STUCK[self.untimed()];
        let whole = self.busy.saturating_add(now.wrapping_sub(self.last).min(most));
        if busy >= whole {
            let load = &mut self.rails[rail];
            load.prompt += bytes;
            if load.prompt >= PROMPT {
                (load.alone, load.prompt) = (0, 0);
                if !load.stall.is_stalled() {
                    load.stall.forgive();
                }
            }
        } else if self.ended_silence_alone(rail) {
            busy = whole;
        }
        (self.last, self.busy) = (now, busy);
        let few = self.split.piece.min(FEW);
        let load = &mut self.rails[rail];
        let Some(latest) = load.measure(bytes, now, busy, few) else { return false };
        let fastest = self.fastest();
        let Load { cost, late, .. } = &mut self.rails[rail];
        *late = match (latest / fastest, *cost / fastest) {
            (STALL.., _) => (*late + LATE).min(LATE_MAX),
            (SLOW.., _) => (*late + 1).min(LATE_MAX),
            (_, SLOW..) => *late,
            _ => *late / 2,
        };
        self.judge(fastest);
        let split = self.split_by(fastest);
        core::mem::replace(&mut self.split, split) != split
    }

    /// Pieces are not shorter than [`LEAST`].
    fn split_by(&self, fastest: u64) -> Split {
        let long = match fastest {
            // Nothing was measured, or not in nanoseconds.
            u64::MAX => u64::MAX,
            _ if self.clock.is_none() => u64::MAX,
            cost => speed::moves(SPLIT, cost).max(2 * LEAST),
        };
        if long >= self.set.from || self.set.from == u64::MAX {
            return self.set;
        }
        Split { from: long, piece: self.set.piece.min(long / 2) }
    }

    /// Notes that a post of this rail has ended a silence. Returns whether the silence is blamed on
    /// the rail.
    fn ended_silence_alone(&mut self, rail: usize) -> bool {
        let others = |(other, load): (usize, &Load)| other != rail && load.moving() != 0;
        if self.rails.iter().enumerate().any(others) {
            return false;
        }
        let load = &mut self.rails[rail];
        (load.alone, load.prompt) = ((load.alone + 1).min(ALONE), 0);
        if load.alone > 1 {
            // The rail may get no long post for some time, so nothing else shows that it is late.
            load.late = load.late.max(LATE);
        }
        load.alone == ALONE
    }

    /// Returns the length of the next piece of an operation to a peer with several rails. `left`
    /// bytes of it are not posted yet, and others are if it has `begun`.
    #[inline(always)]
    pub(crate) fn piece(&self, left: u64, begun: bool) -> u64 {
        if !begun && left < self.split.from {
            return left;
        }
        // Shorter pieces of a long operation would only add work.
        let long = left >= if begun { self.set.piece } else { self.set.from };
        left.min(if long { self.set.piece } else { self.split.piece })
    }

    /// Returns how many of `len` bytes to post on a rail at once: fewer on a new rail, and on one
    /// that is slow or suspected of it.
    #[inline(always)]
    pub(crate) fn cut(&self, rail: usize, len: u64) -> u64 {
        if RAILS == 1 || len <= LEAST { len } else { self.cut_long(rail, len) }
    }

    #[cold]
    fn cut_long(&self, rail: usize, len: u64) -> u64 {
        let Load { cost, alone, stall, .. } = self.rails[rail];
        let fastest = self.fastest();
        if cost == 0 || stall.is_stalled() {
            return LEAST;
        }
        let slow = cost > SLOW.saturating_mul(fastest);
        // A power of two near the ratio of the costs.
        let times = if slow { cost.ilog2() - fastest.ilog2() } else { 0 };
        (len >> times.max(2 * u32::from(alone))).max(LEAST)
    }

    fn fastest(&self) -> u64 {
        let known =
            ahead(self.shared, 0).map(|rail| self.rails[rail].cost).filter(|&cost| cost != 0);
        known.min().unwrap_or(u64::MAX)
    }

    fn judge(&mut self, fastest: u64) {
        let (mut late, mut dear, mut stalled) = (0, 0, 0);
        for (rail, load) in self.rails.iter().enumerate() {
            late |= u16::from(load.late >= LATE) << rail;
            dear |= u16::from(load.cost > SLOW.saturating_mul(fastest)) << rail;
            stalled |= u16::from(load.stall.is_stalled()) << rail;
        }
        self.held &= late;
        self.slow = late & (self.held | dear) | stalled;
    }

    /// Notes that a rail has held up an operation for `time` so far, in nanoseconds or passes, and
    /// whether this is the `first` note about it. Keeps short posts off the rail until that lapses
    /// or long posts show that the rail is fast. If the rail stalls again soon, it is only tried
    /// now and then ([`Stall`](speed::Stall)).
    #[cold]
    pub(crate) fn held_up(&mut self, rail: usize, time: u64, first: bool) {
        let now = self.now();
        let load = &mut self.rails[rail];
        load.stall.note(time, first, now);
        load.prompt = 0;
        if first {
            load.late = (load.late + LATE).min(LATE_MAX);
            load.room = (load.room.min(PROVEN) / 2).max(FIRST);
            self.held |= 1 << rail;
        }
        self.judge(self.fastest());
    }

    /// Returns whether a rail may need so much time for the long posts that it carries only because
    /// it is slow. `time` is in nanoseconds or passes.
    #[cold]
    pub(crate) fn may_need(&self, rail: usize, time: u64) -> bool {
        let load = &self.rails[rail];
        let needs = match (load.long, load.cost) {
            (0, _) => 0,
            (_, 0) => STUCK[self.untimed()],
            (long, _) => 2 * load.takes(long),
        };
        time < needs
    }

    /// Notes that a rail is given up, because it stalls.
    #[cold]
    pub(crate) fn given_up(&mut self, rail: usize) {
        let (now, untimed) = (self.now(), self.untimed());
        let load = &mut self.rails[rail];
        load.stall.fall(now, untimed);
        load.assume_slow(STUCK[untimed]);
        self.judge(self.fastest());
    }

    pub(crate) fn is_stalled(&self, rail: usize) -> bool {
        self.rails[rail].stall.is_stalled()
    }

    #[cold]
    pub(crate) fn renew(&mut self, rail: usize) {
        let now = self.now();
        let busy = self.busy_at(now, 0);
        self.rails[rail].forget(now);
        self.rails[rail].begin(now, busy);
        self.judge(self.fastest());
    }

    /// Returns whether posts may be outstanding on a rail. Always `true` with a single rail,
    /// because its posts are not counted.
    pub(crate) fn has_posts(&self, rail: usize) -> bool {
        RAILS == 1 || self.rails[rail].posts != 0
    }

    /// Chooses one of `rails`, beginning with rail `turn`. The rails in `full` have refused the
    /// post. At least one of `rails` is not in `full`. `wait` is the state of the peer. Returns
    /// `None` if the post must wait: each rail has its maximum outstanding, or waiting for a full
    /// rail takes less time.
    pub(crate) fn choose(
        &mut self,
        rails: u16,
        full: u16,
        turn: u8,
        bytes: u64,
        wait: &mut Wait,
    ) -> Option<usize> {
        self.shared |= rails;
        if bytes >= LONG {
            return self.choose_long(rails, full, turn, bytes, wait);
        }
        let rails = rails & !full;
        let mut fast = rails;
        if rails & self.slow != 0 && rails & !self.slow != 0 {
            fast &= !self.slow;
            if let Some(rail) = self.avoid(rails & self.slow) {
                return Some(rail);
            }
        }
        ahead(fast, turn).min_by_key(|&rail| self.rails[rail].bytes - self.rails[rail].stuck)
    }

    /// The slowness of a rail lapses, because without long posts nothing would show that they are
    /// fast again. Returns a stalled rail that is to be tried now.
    #[cold]
    fn avoid(&mut self, slow: u16) -> Option<usize> {
        let mut tried = None;
        for rail in ahead(slow, 0) {
            let load = &mut self.rails[rail];
            load.avoided += 1;
            if load.avoided >= LAPSE << load.late {
                (load.avoided, load.late) = (0, load.late.saturating_sub(1));
                self.judge(self.fastest());
            }
            let Load { posts, stall, avoided, .. } = &self.rails[rail];
            // A rail that carries nothing is not full.
            let free = stall.is_stalled() && *posts == 0;
            if free && avoided % LOOKS == 0 && stall.is_due(self.now()) {
                tried = Some(rail);
            }
        }
        tried.inspect(|&rail| self.probe(rail))
    }

    /// Notes that a stalled rail is tried, if that is due.
    fn probe(&mut self, rail: usize) {
        let (now, untimed) = (self.now(), self.untimed());
        let load = &mut self.rails[rail];
        if !load.stall.is_due(now) {
            return;
        }
        load.stall.tried(now, untimed);
        if !load.stall.is_stalled() {
            load.late = 0;
        }
        self.judge(self.fastest());
    }

    fn choose_long(
        &mut self,
        rails: u16,
        full: u16,
        turn: u8,
        bytes: u64,
        wait: &mut Wait,
    ) -> Option<usize> {
        let (now, untimed) = (self.now(), self.untimed());
        let waited = if wait.since != 0 { now.wrapping_sub(wait.since) } else { 0 };
        let (mut best, mut least) = (None, (true, u64::MAX));
        let mut probed = None;
        for rail in ahead(rails, turn) {
            let busy = self.busy_at(now, self.rails[rail].takes(bytes));
            let load = &mut self.rails[rail];
            let is_full = full >> rail & 1 != 0;
            // A rail with nothing outstanding is not full, but refuses posts for another reason.
            if is_full && (load.posts == 0 || waited >= STOPPED[untimed]) {
                continue;
            }
            if load.silent(now) >= STUCK[untimed] << load.tries {
                (load.stuck, load.room) = (load.long, FIRST);
                load.tries = (load.tries + 1).min(TRIES);
            }
            let expected = load.expected(bytes, busy).max(load.stall.expected(now));
            let new = load.cost == 0 && load.moving() == 0;
            // Two silences that the rail ended alone may not count, but the next probe may take as
            // long.
            let took = if load.alone > 1 { load.last.min(STOPPED[untimed]) } else { 0 };
            let rest = REST.saturating_mul(expected.max(took));
            let due = match load.stall.is_stalled() {
                true => load.stall.is_due(now),
                false => load.passed >= rest || new,
            };
            if !is_full && due {
                probed = probed.or(Some(rail));
            }
            let stopped = load.is_full(bytes) && load.silent(now) >= STOPPED[untimed];
            // Rails of about the same speed take turns.
            if best.is_none()
                || (stopped, expected.saturating_add(load.takes(bytes) / NEAR)) < least
            {
                (best, least) = (Some(rail), (stopped, expected));
            }
        }
        self.open = 0;
        let chosen = probed.or(best)?;
        if full >> chosen & 1 != 0 {
            if wait.since == 0 {
                *wait = Wait { since: now.max(1), rail: chosen as u8 };
            }
            return None;
        }
        let load = &mut self.rails[chosen];
        if load.is_full(bytes) && probed.is_none() {
            if load.silent(now) < STOPPED[untimed] {
                // The other rails would take longer, so wait for the chosen rail.
                return None;
            }
            load.room = load.moving().saturating_add(bytes).saturating_add(FIRST);
        }
        // The others count this post only once a rail accepts it.
        self.open = rails;
        Some(chosen)
    }
}

pub(crate) fn ahead(rails: u16, turn: u8) -> impl Iterator<Item = usize> {
    let turn = u32::from(turn);
    let mut ahead = rails.rotate_right(turn);
    core::iter::from_fn(move || {
        let next = ahead.trailing_zeros();
        ahead &= ahead.wrapping_sub(1);
        (next < 16).then_some((next + turn) as usize & 15)
    })
}
