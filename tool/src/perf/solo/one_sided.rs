//! Puts, gets, signals and atomics where one thread plays both sides.

use fishplate_core::engine::{Issued, Notice, Signal};
use fishplate_core::op::{Amo, AmoOp, SignalOp};
use fishplate_core::rail::Rail;

use super::super::leg::{Leg, SLOTS_AT};
use super::super::seat::CONTEXT;
use super::{Solo, WORD};
use crate::args::SignalKind;
use crate::failure::{Failure, Outcome};
use crate::histogram::Histogram;
use crate::payload::Pattern;

impl<R: Rail, const RAILS: usize> Solo<'_, R, RAILS> {
    #[inline(always)]
    fn put_signal(
        &mut self,
        side: usize,
        from: usize,
        len: usize,
        to: usize,
        word: usize,
        seq: u64,
    ) -> Outcome {
        self.issue(side, |seat| {
            let signal = Signal { at: seat.theirs.at(word as u64), op: SignalOp::Set, value: seq };
            let (from, to) = (seat.buffer.at(from as u64), seat.theirs.at(to as u64));
            seat.engine.put_signal(CONTEXT, from, len, to, signal, Notice::Silent)
        })?;
        Ok(())
    }

    pub(super) fn ping_pong(
        &mut self,
        leg: &Leg,
        first: u64,
        count: u64,
        histogram: &mut Histogram,
    ) -> Outcome {
        let (place, clock) = (leg.placement(), self.seats[0].clock);
        let stride = leg.size.next_multiple_of(64);
        let mut last = clock.now();
        for seq in first..first + count {
            let mut whole = true;
            for way in 0..2 {
                let side = way % self.seats.len();
                let to = self.other(side);
                let from = (seq & 1) as usize * stride;
                let pattern = Pattern::new(leg.seed, way as u64, seq);
                if leg.check {
                    self.fill(side, from, pattern, leg.size);
                }
                self.put_signal(side, from, leg.size, place.payload[way], place.signal[way], seq)?;
                self.until(to, place.signal[way], seq)?;
                whole &= !leg.check || self.arrived(to, place.payload[way], pattern, leg.size);
            }
            self.lap(histogram, &mut last)?;
            self.tally.checked += u64::from(leg.check && whole);
            self.tally.errors += u64::from(!whole);
        }
        self.quiet(0)
    }

    /// Rounds of put-signals, `window` of them in flight, to and fro. After every pass, whatever
    /// the signal announces must be there, and the signal may not go back.
    pub(super) fn ordered(&mut self, leg: &Leg, count: u64) -> Outcome {
        let (stride, len) = (leg.stride(), leg.size);
        let mut sent = 0;
        let mut sides = [0, 1].into_iter().cycle();
        // Numbers of the two directions: each has a word of its own.
        let mut seen = [0u64; 2];
        while sent < count {
            let Some(side) = sides.next() else { break };
            let round = leg.window.min(count - sent);
            let base = seen[side];
            let slot = |seq: u64| (seq - base - 1) as usize * stride;
            for seq in base + 1..=base + round {
                self.fill(side, slot(seq), Pattern::new(leg.seed, side as u64, seq), len);
            }
            let mut posted = base;
            while seen[side] < base + round {
                if posted < base + round {
                    posted += 1;
                    self.put_signal(side, slot(posted), len, SLOTS_AT + slot(posted), WORD, posted)?;
                }
                self.pass()?;
                let word = self.word(1 - side, WORD);
                if word < seen[side] || word > posted {
                    self.tally.misordered += 1;
                    return Ok(());
                }
                if word > seen[side] {
                    self.passes = 0;
                }
                for seq in seen[side] + 1..=word {
                    let pattern = Pattern::new(leg.seed, side as u64, seq);
                    let there = self.arrived(1 - side, SLOTS_AT + slot(seq), pattern, len);
                    self.tally.checked += u64::from(there);
                    self.tally.misordered += u64::from(!there);
                }
                seen[side] = word;
            }
            self.quiet(side)?;
            sent += round;
        }
        Ok(())
    }

    pub(super) fn put(&mut self, leg: &Leg, first: u64, count: u64, histogram: &mut Histogram) -> Outcome {
        let (clock, to) = (self.seats[0].clock, self.other(0));
        let (stride, slots) = (leg.stride(), leg.slots());
        let mut last = clock.now();
        for window in 0..count / leg.per_window() {
            let pattern = |slot| Pattern::new(leg.seed, first + window, slot);
            for slot in (0..slots).filter(|_| leg.check) {
                self.fill(0, slot as usize * stride, pattern(slot), leg.size);
            }
            for k in 0..leg.per_window() {
                let offset = (k % slots) as usize * stride;
                self.issue(0, |seat| {
                    let (from, to) =
                        (seat.buffer.at(offset as u64), seat.theirs.at((SLOTS_AT + offset) as u64));
                    seat.engine.put(CONTEXT, from, leg.size, to, Notice::Silent)
                })?;
            }
            self.quiet(0)?;
            self.lap(histogram, &mut last)?;
            for slot in (0..slots).filter(|_| leg.check) {
                let there = self.arrived(to, SLOTS_AT + slot as usize * stride, pattern(slot), leg.size);
                self.tally.checked += u64::from(there);
                self.tally.errors += u64::from(!there);
            }
            last = clock.now();
        }
        Ok(())
    }

    pub(super) fn get(&mut self, leg: &Leg, count: u64, histogram: &mut Histogram) -> Outcome {
        let (clock, to) = (self.seats[0].clock, self.other(0));
        let pattern = Pattern::new(leg.seed, 0, 0);
        // SAFETY: as in `arrived`; nobody reads the arena now.
        unsafe { pattern.fill(self.seats[to].arena.as_ptr().add(SLOTS_AT), leg.size) };
        for _ in 0..count {
            let mut begun = clock.now();
            let issued = self.issue(0, |seat| {
                let (into, from) = (seat.buffer.at(0), seat.theirs.at(SLOTS_AT as u64));
                seat.engine.get(CONTEXT, into, leg.size, from, Notice::Report(0))
            })?;
            if let Issued::Pending(token) = issued {
                self.finish(token)?;
            }
            self.lap(histogram, &mut begun)?;
            if leg.check {
                let at = self.seats[0].bytes.as_ptr();
                // SAFETY: the payload lies at the start of the buffer, and the get is over. Its
                // first byte is spoilt so that the next get cannot pass for this one.
                let there = unsafe { pattern.verify(at, leg.size) };
                // SAFETY: as above.
                unsafe { at.write(!at.read()) };
                self.tally.checked += u64::from(there);
                self.tally.errors += u64::from(!there);
            }
        }
        Ok(())
    }

    pub(super) fn amo(&mut self, first: u64, count: u64, histogram: &mut Histogram) -> Outcome {
        let clock = self.seats[0].clock;
        let amo = Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 };
        for expected in first..first + count {
            let mut begun = clock.now();
            let issued =
                self.issue(0, |seat| seat.engine.fetch(CONTEXT, seat.theirs.at(WORD as u64), amo, 0))?;
            let value = match issued {
                Issued::Done { value } => value,
                Issued::Pending(token) => self.finish(token)?,
            };
            self.lap(histogram, &mut begun)?;
            self.tally.checked += u64::from(value == expected);
            self.tally.errors += u64::from(value != expected);
        }
        Ok(())
    }

    pub(super) fn signal_rate(
        &mut self,
        leg: &Leg,
        first: u64,
        count: u64,
        histogram: &mut Histogram,
    ) -> Outcome {
        let (clock, to) = (self.seats[0].clock, self.other(0));
        let (mut sent, mut seen) = (first, first);
        let mut last = clock.now();
        while sent < first + count {
            for _ in 0..leg.per_window() {
                sent += 1;
                self.issue(0, |seat| {
                    let at = seat.theirs.at(WORD as u64);
                    let signal = match leg.signal {
                        SignalKind::Add => Signal { at, op: SignalOp::Add, value: 1 },
                        SignalKind::Set => Signal { at, op: SignalOp::Set, value: sent },
                    };
                    seat.engine.signal(CONTEXT, signal, Notice::Silent)
                })?;
            }
            while seen != sent {
                self.pass()?;
                let word = self.word(to, WORD);
                self.tally.misordered += u64::from(word < seen);
                if word > sent {
                    return Err(Failure::run(format!("{sent} signals were sent and {word} have come")));
                }
                seen = word;
            }
            self.passes = 0;
            self.lap(histogram, &mut last)?;
        }
        self.tally.checked = count;
        Ok(())
    }
}
