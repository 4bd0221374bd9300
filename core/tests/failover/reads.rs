//! Repeated reads of constant memory into the same buffer. Checks that each read returns the
//! current source, and that the buffer does not change between two reads.

use fishplate_core::engine::Notice;
use fishplate_core::op::{Completion, Outcome};

use super::schedule::Fleet;
use super::support::*;

/// Length of a read in bytes.
const LEN: usize = 500;
pub const SIZE: usize = 8 * 512;
/// The bit that marks the completion tags of these reads.
pub const TAG: u64 = 1 << 62;

/// The reads of all nodes. Each node reads from one other node at a time.
pub struct Reads {
    at: u64,
    readers: Vec<Reader>,
    seed: u64,
    dead: Option<usize>,
}

#[derive(Clone, Copy, Default)]
struct Reader {
    from: usize,
    /// The fill value of the buffer. A read brings odd values. After a read, the test fills the
    /// buffer with an even value.
    round: u8,
    waits: bool,
    /// Number of turns until the next read.
    rest: u64,
}

impl Reads {
    /// Creates the reads of a fleet. Uses source and target regions from offset `at` on.
    pub fn new(nodes: usize, at: u64, seed: u64) -> Reads {
        Reads { at, readers: vec![Reader::default(); nodes], seed, dead: None }
    }

    pub fn dies(&mut self, node: usize) {
        self.dead = Some(node);
        self.readers[node].waits = false;
    }

    pub fn turn<const RAILS: usize>(
        &mut self,
        fleet: &mut Fleet<RAILS>,
        issues: bool,
        random: &mut Random,
    ) {
        for (me, reader) in self.readers.iter_mut().enumerate() {
            if reader.waits || self.dead == Some(me) {
                continue;
            }
            let into = fleet[me].source.at(self.at);
            assert_eq!(
                read(&fleet[me].engine, into, LEN),
                [reader.round; LEN],
                "seed {}: node {me}",
                self.seed
            );
            reader.rest = reader.rest.saturating_sub(1);
            if !issues || reader.rest != 0 {
                continue;
            }
            (reader.round, reader.from) =
                (reader.round.wrapping_add(2) | 1, random.below(fleet.len() as u64) as usize);
            if self.dead == Some(reader.from) {
                reader.from = me;
            }
            let there = self.at + 512 * me as u64;
            let source = &fleet[reader.from];
            write(&source.engine, source.target.at(there), &[reader.round; LEN]);
            write(&fleet[me].engine, into, &[reader.round - 1; LEN]);
            let from = fleet[me].remotes[reader.from].at(there);
            let issued = fleet[me].engine.get(CX, into, LEN, from, Notice::Report(TAG));
            reader.waits = issued.is_ok();
            if !reader.waits {
                reader.round -= 1;
            }
        }
    }

    pub fn completed<const RAILS: usize>(
        &mut self,
        fleet: &Fleet<RAILS>,
        me: usize,
        done: &Completion,
        random: &mut Random,
    ) {
        let (reader, seed) = (&mut self.readers[me], self.seed);
        let into = fleet[me].source.at(self.at);
        let got = read(&fleet[me].engine, into, LEN);
        let well = done.outcome == Outcome::Done && got == [reader.round; LEN];
        let lost = self.dead == Some(reader.from) && done.outcome != Outcome::Done;
        assert!(reader.waits && (well || lost), "seed {seed}: node {me}, {done:?}");
        // Fills the buffer, as a program that reuses it would.
        reader.round = reader.round.wrapping_add(2) & !1;
        write(&fleet[me].engine, into, &[reader.round; LEN]);
        (reader.waits, reader.rest) = (false, 1 + random.below(60));
    }

    pub fn is_over(&self) -> bool {
        !self.readers.iter().any(|reader| reader.waits)
    }
}
