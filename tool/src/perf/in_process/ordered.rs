//! Tests of order over the simulated fabric, which delays and reorders operations. The tests verify
//! the order that the contract promises.

use fishplate_core::engine::protocol::Request;
use fishplate_core::engine::tag::Tag;
use fishplate_core::rail::Rail;

use super::super::job::{Job, SLOTS_AT, Side};
use super::super::tag_bw::POSTED;
use super::super::verbs::{Area, Verbs};
use super::{InProcess, One};
use crate::failure::{Failure, Outcome};
use crate::payload::Pattern;

const WORD: usize = 0;

impl<'m, R: Rail> InProcess<'m, R> {
    /// Runs rounds of put-signals in both directions, with `window` operations in flight. After
    /// every pass, checks that the data before each signal has landed, and that the signal does not
    /// decrease.
    ///
    /// Before each operation, calls `before` with the number of operations issued so far.
    pub(super) fn put_signals(
        &mut self,
        job: &Job,
        mut before: impl FnMut(u64, &mut [One<'m, R>]),
    ) -> Outcome {
        let (stride, len) = (job.stride(), job.size);
        let mut sent = 0;
        let mut sides = Side::BOTH.into_iter().cycle();
        // Each direction has its own word.
        let mut seen = [0u64; 2];
        while sent < job.iters {
            let Some(side) = sides.next() else { break };
            let (from, to) = (side as usize, side.other());
            let round = job.window.min(job.iters - sent);
            let base = seen[from];
            let slot = |seq: u64| (seq - base - 1) as usize * stride;
            let pattern = |seq| Pattern::new(job.seed, from as u64, seq);
            for seq in base + 1..=base + round {
                self.fill(side, Area::Buffer, slot(seq), pattern(seq), len)?;
            }
            let mut posted = base;
            while seen[from] < base + round {
                if posted < base + round {
                    before(sent + posted - base, &mut self.engines);
                    posted += 1;
                    self.put_signal(
                        side,
                        slot(posted),
                        len,
                        SLOTS_AT + slot(posted),
                        WORD,
                        posted,
                    )?;
                }
                self.pass()?;
                let word = self.word(to, WORD)?;
                if word < seen[from] || word > posted {
                    self.tally.misordered += 1;
                    return Ok(());
                }
                if word > seen[from] {
                    self.passes = 0;
                }
                for seq in seen[from] + 1..=word {
                    let there =
                        self.is_whole(to, Area::Landing, SLOTS_AT + slot(seq), pattern(seq), len)?;
                    self.tally.checked += u64::from(there);
                    self.tally.misordered += u64::from(!there);
                }
                seen[from] = word;
            }
            self.quiet(side)?;
            sent += round;
        }
        Ok(())
    }

    /// Sends windows of messages with different tags in both directions. For every other window,
    /// posts receives of any tag in advance. Checks that the k-th receive gets the k-th message.
    ///
    /// Before each message, calls `before` with the number of messages sent so far.
    pub(super) fn messages(
        &mut self,
        job: &Job,
        mut before: impl FnMut(u64, &mut [One<'m, R>]),
    ) -> Outcome {
        let (stride, len) = (job.stride(), job.size);
        let place = |k: u64| SLOTS_AT + k as usize * stride;
        let (mut sent, mut turn) = (0, 0u64);
        while sent < job.iters {
            let (side, early) = (Side::BOTH[(turn % 2) as usize], turn / 2 % 2 == 0);
            let to = side.other();
            let round = job.window.min(job.iters - sent).min(POSTED);
            let pattern = |k| Pattern::new(job.seed, side as u64, sent + k);
            let mut requests = Vec::with_capacity(round as usize);
            for k in (0..round).filter(|_| early) {
                requests.push(self.recv_any(to, place(k), len)?);
            }
            for k in 0..round {
                self.fill(side, Area::Buffer, place(k), pattern(k), len)?;
                before(sent + k, &mut self.engines);
                self.send(side, sent + k, place(k), len)?;
                if !early && k % 2 == 1 {
                    // Posts receives in order, although messages arrive in any order.
                    for k in k - 1..=k {
                        requests.push(self.recv_any(to, place(k), len)?);
                    }
                }
            }
            for k in requests.len() as u64..round {
                requests.push(self.recv_any(to, place(k), len)?);
            }
            for (k, request) in (0..).zip(requests) {
                let status = self.status(to, request)?;
                let number = status.envelope.map(|envelope| envelope.tag.lo);
                self.tally.misordered += u64::from(number != Some(sent + k));
                let there = self.is_whole(to, Area::Buffer, place(k), pattern(k), len)?;
                self.tally.checked += u64::from(there);
                self.tally.errors += u64::from(!there);
            }
            self.quiet(side)?;
            self.forget_ends(side);
            (sent, turn) = (sent + round, turn + 1);
        }
        Ok(())
    }

    fn recv_any(&mut self, side: Side, offset: usize, len: usize) -> Outcome<Request> {
        let into = self.buffer_at(side, offset);
        let one = self.one(side);
        let posted = one.engine.recv(Some(one.peer), Tag::ZERO, Tag::ALL, Some((into, len)), 0);
        posted.map_err(|error| Failure::run(format!("a receive was refused: {error}")))
    }
}
