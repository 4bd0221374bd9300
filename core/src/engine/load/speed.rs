//! Load and speed of one rail.

use core::mem;

use super::REST;

/// Bytes that may be outstanding on a new rail. The limit grows, and is dropped once it reaches
/// [`PROVEN`].
pub(super) const FIRST: u64 = 16 << 10;
/// Largest size that may take about as long as one byte.
pub(super) const FEW: u64 = 64 << 10;
pub(super) const PROVEN: u64 = 2 << 20;

/// `FRACTION`: fraction bits of a cost. `MOST`: the largest cost.
const FRACTION: u32 = 20;
const MOST: u64 = 1 << 40;

/// `BYTES` and `TIME`: bytes and busy time after which the sums of a rail are halved. `FRESH`:
/// bytes after which its cost is computed anew, at the latest after `TIME`.
const BYTES: u64 = 16 << 20;
const TIME: u64 = 50_000_000;
const FRESH: u64 = 128 << 10;

#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) posts: u32,
    pub(super) bytes: u64,
    /// `long`: bytes outstanding in long posts. `stuck`: the part of `long` that counts as stuck.
    pub(super) long: u64,
    pub(super) stuck: u64,
    /// Number of times that posts became stuck since the last completion.
    pub(super) tries: u8,
    /// Time of the last completion, or of the first post after the rail was idle. `since` is by the
    /// clock, and `mark` in the busy time of all rails.
    since: u64,
    mark: u64,
    /// `time`: busy time of this rail. `moved`: bytes completed in this time.
    time: u64,
    moved: u64,
    /// The parts of `time` and `moved` since the cost was computed.
    spent: u64,
    fresh: u64,
    /// `began`: the busy time when the rail was last idle. `period`: bytes completed since then.
    began: u64,
    period: u64,
    /// Time per byte, with [`FRACTION`] bits. 0 before the first completion.
    pub(super) cost: u64,
    /// Number of times that a long post completed after a silence, with nothing outstanding on
    /// other rails. `prompt`: bytes completed without a silence since the last time.
    pub(super) alone: u8,
    pub(super) prompt: u64,
    /// Number of times that the rail was late, halved each time that it is not slow.
    pub(super) late: u8,
    pub(super) avoided: u32,
    /// Maximum of bytes that may be outstanding.
    pub(super) room: u64,
    /// Expected time of all posts that went to other rails since the last post on this rail.
    pub(super) passed: u64,
    /// Time until the last completion, from the one before or from the first post after the rail
    /// was idle. By the clock.
    pub(super) last: u64,
    pub(super) stall: Stall,
}

/// The stalls of a rail: the times for which it delivered nothing although the peer answered over
/// other rails. A rail that stalls again soon gets no posts for [`REST`] times as long, and is then
/// tried with one post. All times are in nanoseconds or passes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stall {
    /// Number of stalls, at most [`TWICE`], until they are forgiven.
    count: u8,
    /// When the rail was last given up, or 0.
    fell: u64,
    /// Time of the last note. `again`: whether the rail has stalled since it was last tried.
    noted: u64,
    again: bool,
    /// How long the rail is expected to stall.
    takes: u64,
    /// When the rail is next tried, or when its only stall is forgiven.
    next: u64,
}

/// Number of stalls from which on a rail counts as stalled.
const TWICE: u8 = 2;

/// Stalls that are expected to be shorter are forgiven.
const BRIEF: [u64; 2] = [40_000_000, 40_000];

/// A rail that was given up is expected to stall for this time once it has returned, and four times
/// as long if it was also given up less than [`CALM`] before.
const FALL: [u64; 2] = [80_000_000, 80_000];
const CALM: [u64; 2] = [60_000_000_000, 60_000_000];

/// A post on a stalled rail shows that the rail no longer stalls if nothing is noted for this many
/// times the expected stall.
const SHOWS: u64 = 4;

impl Stall {
    const NONE: Stall = Stall { count: 0, fell: 0, noted: 0, again: false, takes: 0, next: 0 };

    /// Notes that the rail stalls, for how long so far, and whether it is the first note about this
    /// number or read.
    pub(super) fn note(&mut self, takes: u64, first: bool, now: u64) {
        if !self.is_stalled() && now > self.next {
            self.forgive();
        }
        // One stall may hold up several streams.
        let new = first && now.saturating_sub(takes) > self.noted;
        self.count = (self.count + u8::from(new)).clamp(1, TWICE);
        (self.noted, self.again, self.takes) = (now, true, self.takes.max(takes));
        self.next = now.saturating_add(REST * self.takes);
    }

    /// Whether the rail gets no posts until it is tried.
    pub(super) fn is_stalled(&self) -> bool {
        self.count >= TWICE
    }

    /// Whether a stalled rail is to be tried.
    pub(super) fn is_due(&self, now: u64) -> bool {
        self.is_stalled() && now >= self.next
    }

    /// Returns the time until a post is expected to complete, if the rail has stalled.
    pub(super) fn expected(&self, now: u64) -> u64 {
        if self.is_stalled() { self.next.saturating_sub(now) + self.takes } else { 0 }
    }

    /// Notes that the rail is tried. If it has not stalled since it was last tried, the expected
    /// stall becomes shorter, or is forgiven.
    pub(super) fn tried(&mut self, now: u64, untimed: usize) {
        if mem::take(&mut self.again) {
            self.next = now.saturating_add(SHOWS * self.takes);
            return;
        }
        self.takes /= REST;
        if self.takes < BRIEF[untimed] {
            self.forgive();
        }
        self.next = now.saturating_add(REST * self.takes);
    }

    pub(super) fn forgive(&mut self) {
        *self = Stall { fell: self.fell, ..Stall::NONE };
    }

    /// Notes that the rail is given up.
    pub(super) fn fall(&mut self, now: u64, untimed: usize) {
        let soon = self.fell != 0 && now.saturating_sub(self.fell) < CALM[untimed];
        let takes = FALL[untimed] * if soon { 4 } else { 1 };
        *self = Stall { count: TWICE, fell: now, noted: now, again: true, takes, next: now };
    }
}

/// Returns the number of bytes that move in `time` at a cost.
pub(super) fn moves(time: u64, cost: u64) -> u64 {
    (time << FRACTION) / cost
}

impl Load {
    pub(super) const NEW: Load = Load {
        posts: 0,
        bytes: 0,
        long: 0,
        stuck: 0,
        tries: 0,
        since: 0,
        mark: 0,
        time: 0,
        moved: 0,
        spent: 0,
        fresh: 0,
        began: 0,
        period: 0,
        cost: 0,
        alone: 0,
        prompt: 0,
        late: 0,
        avoided: 0,
        room: FIRST,
        passed: 0,
        last: 0,
        stall: Stall::NONE,
    };

    pub(super) fn moving(&self) -> u64 {
        self.long - self.stuck
    }

    pub(super) fn takes(&self, bytes: u64) -> u64 {
        bytes.saturating_mul(self.cost) >> FRACTION
    }

    /// Returns the expected time until `more` bytes are complete: their time by the cost, or the
    /// busy time without a completion, whichever is longer.
    pub(super) fn expected(&self, more: u64, busy: u64) -> u64 {
        let cost = if self.cost == 0 { 1 << FRACTION } else { self.cost };
        let silent = if self.moving() != 0 { busy.saturating_sub(self.mark) } else { 0 };
        ((self.moving() + more).saturating_mul(cost) >> FRACTION).max(silent)
    }

    pub(super) fn silent(&self, now: u64) -> u64 {
        if self.moving() != 0 { self.age(now) } else { 0 }
    }

    /// Returns the time since the last completion, or since the first post after the rail was idle.
    pub(super) fn age(&self, now: u64) -> u64 {
        now.wrapping_sub(self.since)
    }

    pub(super) fn is_full(&self, more: u64) -> bool {
        self.moving() != 0 && self.moving().saturating_add(more) > self.room
    }

    pub(super) fn begin(&mut self, now: u64, busy: u64) {
        (self.since, self.mark, self.began, self.period) = (now, busy, busy, 0);
    }

    /// The rail has carried its long posts for `time`, and completed none. If its cost is unknown,
    /// it may be that slow.
    pub(super) fn assume_slow(&mut self, time: u64) {
        if self.cost == 0 && self.long != 0 {
            self.cost = ((time << FRACTION) / self.long).clamp(1, MOST);
        }
    }

    /// Forgets everything but the stalls, and a cost that was only assumed.
    pub(super) fn forget(&mut self, now: u64) {
        let Load { posts, bytes, long, stuck, cost, moved, mut stall, .. } = *self;
        stall.next = now.saturating_add(REST * stall.takes);
        let cost = if moved == 0 { cost } else { 0 };
        *self = Load { posts, bytes, long, stuck, cost, stall, ..Load::NEW };
    }

    pub(super) fn settle(&mut self, bytes: u64) {
        debug_assert!(self.long >= bytes, "more bytes completed than posted");
        self.long = self.long.saturating_sub(bytes);
        self.stuck = self.stuck.min(self.long);
    }

    /// Measures `bytes` completed at `now`, with `busy` of busy time. If a rail is idle again after
    /// fewer bytes than `few`, they count as `few`. Returns the cost of the latest bytes if the
    /// cost was computed anew.
    pub(super) fn measure(&mut self, bytes: u64, now: u64, busy: u64, few: u64) -> Option<u64> {
        let time = busy.saturating_sub(self.mark);
        (self.since, self.mark, self.tries) = (now, busy, 0);
        (self.time, self.spent) = (self.time + time, self.spent + time);
        (self.moved, self.fresh) = (self.moved + bytes, self.fresh + bytes);
        self.period += bytes;
        let room = self.room.saturating_add(bytes / 8);
        self.room = if room < PROVEN { room } else { u64::MAX };
        let idle = self.moving() == 0;
        if !idle && self.fresh < FRESH && self.spent < TIME {
            return None;
        }
        let period = busy.saturating_sub(self.began);
        if idle {
            // A few bytes take little longer than one, and may have waited for a peer that paused.
            let more = few.saturating_sub(self.period);
            (self.moved, self.fresh, self.period) =
                (self.moved + more, self.fresh + more, self.period + more);
        }
        if idle && (period << FRACTION) / self.period.max(1) < self.cost / 2 {
            // The rail has become faster, so forget the past sooner.
            self.time = self.time / 4 * 3;
        }
        let latest = (self.spent << FRACTION) / self.fresh.max(1);
        self.cost = ((self.time << FRACTION) / self.moved.max(1)).clamp(1, MOST);
        (self.spent, self.fresh) = (0, 0);
        if self.moved >= BYTES || self.time >= TIME {
            (self.time, self.moved) = (self.time / 2, self.moved / 2);
        }
        Some(latest)
    }
}
