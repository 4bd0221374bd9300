//! The receive window of one stream: which numbers have arrived, and the messages that wait for
//! earlier numbers.
//!
//! A write needs one bit. A message is copied into its own slot, so that the rail can reuse its
//! buffer. The index of number `s` is `s & (W - 1)` for a window of `W`, a power of two. Nothing
//! here posts, blocks or allocates. The cost of an arrival does not depend on the number of holes.
//!
//! Numbers below [`Window::expected`] are applied. The sender has at most `W` numbers in flight
//! from there on; other numbers are rejected.

use core::mem::MaybeUninit;

use crate::error::Violation;
use crate::op::{Amo, SignalOp};
use crate::sync::seq::Seq;

use super::wire::Place;

/// A message that waits in its slot until everything before it has landed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parked {
    pub(crate) at: Place,
    pub(crate) what: Action,
}

/// What to do with a parked message once it is next in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Change a signal word.
    Signal { op: SignalOp, value: u64 },
    /// Execute an atomic and send the old value, unless the token is
    /// [`NO_TOKEN`](super::wire::NO_TOKEN).
    Amo { amo: Amo, token: u64 },
    /// A tagged message. `kept` says where its payload or header is stored.
    Tagged { lo: u64, hi: u32, kept: u64 },
    /// An executed atomic with a reply that waits for room in a rail.
    Reply { token: u64, value: u64 },
    /// A piece for device memory, in this block. `copy` is the rail's id of the copy in progress,
    /// or 0.
    Piece { block: u32, copy: u32 },
    /// Send the rest of requested data. The low 16 bits of `into` hold the length of the longest
    /// piece, and the other bits hold the offset of the rest in the buffer. With three words, a
    /// parked message takes no more memory than a parked atomic.
    Get { token: u64, left: u64, into: u64 },
}

impl Parked {
    /// An unused slot. Its memory is not touched before a message is parked there.
    pub const EMPTY: MaybeUninit<Parked> = MaybeUninit::uninit();
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// The arrival has the next number. Take it with [`Window::next`].
    Due,
    Early,
    /// The number had arrived before. Nothing changed.
    Duplicate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing, because number [`Window::expected`] is missing.
    Hole,
    /// A write, which is now consumed.
    Write,
    /// A message, which stays until [`Window::consume`].
    Message(Parked),
}

/// The cursor of a receive window. Each call takes the bits and the slots: `W` of each for a window
/// of `W`.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    expected: Seq,
    /// Number of arrivals that are not consumed.
    held: u32,
    /// The context and epoch bits of arriving words.
    stamp: u32,
}

/// The memory of one window: which numbers have arrived, which of them are messages, and the
/// messages. `mask` selects the sequence bits of a word. A slot is initialized if both of its bits
/// are set. The bits start as zeros, and only [`Window`] sets them.
pub(crate) struct Cells<'a> {
    pub arrived: &'a mut [u64],
    pub message: &'a mut [u64],
    pub parked: &'a mut [MaybeUninit<Parked>],
    pub mask: u32,
}

impl Cells<'_> {
    #[inline(always)]
    fn index(&self, seq: Seq) -> u32 {
        // The number of slots is the size of the window, a power of two.
        seq.0 as u32 & (self.parked.len() as u32).wrapping_sub(1)
    }

    pub(crate) fn waiting(&self, index: u32) -> Option<Parked> {
        let (word, bit) = (index as usize / 64, 1u64 << (index % 64));
        let waits = self.arrived[word] & self.message[word] & bit != 0;
        // SAFETY: both bits are set, so `hold` has written the slot.
        waits.then(|| unsafe { self.parked[index as usize].assume_init() })
    }
}

/// Returns how many 64-bit words each bitmap of a window of `size` numbers needs.
pub const fn bitmap_words(size: u32) -> usize {
    (size as usize + 63) >> 6
}

impl Window {
    pub(crate) const fn new(stamp: u32, first: Seq) -> Self {
        Window { expected: first, held: 0, stamp }
    }

    #[inline(always)]
    pub(crate) fn stamp(&self) -> u32 {
        self.stamp
    }

    pub(crate) const fn set_stamp(&mut self, stamp: u32) {
        self.stamp = stamp;
    }

    #[inline(always)]
    fn next_word(&self, mask: u32) -> u32 {
        self.stamp | self.expected.low(mask)
    }

    #[inline(always)]
    pub(crate) fn expected(&self) -> Seq {
        self.expected
    }

    #[inline(always)]
    pub(crate) fn held(&self) -> u32 {
        self.held
    }

    /// Returns how far a word's number is ahead of the expected one, `None` for a duplicate, or the
    /// violation. A word stands for the number nearest to the expected one.
    #[inline(always)]
    fn ahead(&self, word: u32, cells: &Cells<'_>) -> Result<Option<u32>, Violation> {
        let ahead = word.wrapping_sub(self.expected.0 as u32) & cells.mask;
        if (ahead as usize) < cells.parked.len() {
            Ok(Some(ahead))
        } else if ahead > cells.mask >> 1 {
            Ok(None)
        } else {
            Err(Violation::Sequence)
        }
    }

    /// Consumes an arrival on the fast path, if it has the expected number of this attachment and
    /// nothing is parked. The caller then applies the arrival at once.
    #[inline(always)]
    pub(crate) fn take_in_order(&mut self, word: u32, mask: u32) -> bool {
        let next = word == self.next_word(mask) && self.held == 0;
        if next {
            self.expected = self.expected.plus(1);
        }
        next
    }

    #[inline]
    pub(crate) fn write(&mut self, word: u32, cells: &mut Cells<'_>) -> Result<Arrival, Violation> {
        self.hold(word, None, cells)
    }

    #[inline]
    pub(crate) fn message(
        &mut self,
        word: u32,
        parked: Parked,
        cells: &mut Cells<'_>,
    ) -> Result<Arrival, Violation> {
        self.hold(word, Some(parked), cells)
    }

    pub(crate) fn seen(&self, word: u32, cells: &mut Cells<'_>) -> Result<bool, Violation> {
        let Some(ahead) = self.ahead(word, cells)? else { return Ok(true) };
        let index = cells.index(self.expected.plus(ahead as u64));
        Ok(cells.arrived[index as usize / 64] & 1 << (index % 64) != 0)
    }

    fn hold(
        &mut self,
        number: u32,
        parked: Option<Parked>,
        cells: &mut Cells<'_>,
    ) -> Result<Arrival, Violation> {
        let Some(ahead) = self.ahead(number, cells)? else { return Ok(Arrival::Duplicate) };
        let index = cells.index(self.expected.plus(ahead as u64));
        let (word, bit) = (index as usize / 64, 1u64 << (index % 64));
        if cells.arrived[word] & bit != 0 {
            return Ok(Arrival::Duplicate);
        }
        cells.arrived[word] |= bit;
        match parked {
            Some(parked) => {
                cells.message[word] |= bit;
                cells.parked[index as usize].write(parked);
            }
            None => cells.message[word] &= !bit,
        }
        self.held += 1;
        Ok(if ahead == 0 { Arrival::Due } else { Arrival::Early })
    }

    /// Consumes the item if it is a write.
    #[inline]
    pub(crate) fn next(&mut self, cells: &mut Cells<'_>) -> Next {
        let index = cells.index(self.expected);
        let (word, bit) = (index as usize / 64, 1u64 << (index % 64));
        if cells.arrived[word] & bit == 0 {
            return Next::Hole;
        }
        if cells.message[word] & bit != 0 {
            // SAFETY: both bits are set, so `hold` has written the slot.
            return Next::Message(unsafe { cells.parked[index as usize].assume_init() });
        }
        self.consume(cells);
        Next::Write
    }

    #[inline]
    pub(crate) fn replace(&mut self, parked: Parked, cells: &mut Cells<'_>) {
        cells.parked[cells.index(self.expected) as usize].write(parked);
    }

    #[inline]
    pub(crate) fn consume(&mut self, cells: &mut Cells<'_>) {
        self.lose(cells);
        self.expected = self.expected.plus(1);
    }

    /// From then on the message is missing, and nothing after it is applied.
    #[inline]
    pub(crate) fn lose(&mut self, cells: &mut Cells<'_>) {
        let index = cells.index(self.expected);
        cells.arrived[index as usize / 64] &= !(1 << (index % 64));
        self.held -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;
    use std::vec;
    use std::vec::Vec;

    use super::super::wire::{sequence_mask, stamp};

    const STAMP: u32 = stamp(7, u32::MAX, sequence_mask(1 << 19));

    struct Model {
        window: Window,
        arrived: Vec<u64>,
        message: Vec<u64>,
        parked: Vec<MaybeUninit<Parked>>,
    }

    impl Model {
        fn new(size: u32, first: u64) -> Self {
            let words = bitmap_words(size);
            Model {
                window: Window::new(STAMP, Seq(first)),
                arrived: vec![0; words],
                message: vec![0; words],
                parked: vec![Parked::EMPTY; size as usize],
            }
        }

        fn split(&mut self) -> (&mut Window, Cells<'_>) {
            let mask = sequence_mask(self.parked.len() as u32);
            let Model { window, arrived, message, parked } = self;
            (window, Cells { arrived, message, parked, mask })
        }

        /// Simulates the arrival of number `seq`. Odd numbers are messages that carry their own
        /// number.
        fn arrive(&mut self, seq: u64) -> Result<Arrival, Violation> {
            let (window, mut cells) = self.split();
            let word = STAMP | Seq(seq).low(cells.mask);
            if seq.is_multiple_of(2) {
                if window.take_in_order(word, cells.mask) {
                    return Ok(Arrival::Due);
                }
                window.write(word, &mut cells)
            } else {
                let what = Action::Signal { op: SignalOp::Set, value: seq };
                window.message(word, Parked { at: Place::default(), what }, &mut cells)
            }
        }

        /// Consumes everything that is in order. Returns the numbers of the messages.
        fn drain(&mut self) -> Vec<u64> {
            let (window, mut cells) = self.split();
            let mut out = vec![];
            loop {
                match window.next(&mut cells) {
                    Next::Hole => return out,
                    Next::Write => {}
                    Next::Message(Parked { what: Action::Signal { value, .. }, .. }) => {
                        out.push(value);
                        window.consume(&mut cells);
                    }
                    Next::Message(other) => panic!("{other:?}"),
                }
            }
        }
    }

    #[test]
    fn every_permutation_within_a_small_window_is_applied_in_order() {
        // All orders of 6 numbers, from starts that cross the wrap of the wire and of 64 bits.
        for first in [0, (1 << 20) - 3, (1 << 40) - 2, u64::MAX - 2] {
            let mut order = [0u64, 1, 2, 3, 4, 5];
            permute(&mut order, 0, &mut |order| {
                let mut model = Model::new(8, first);
                let mut applied = vec![];
                for &n in order.iter() {
                    let seq = first.wrapping_add(n);
                    model.arrive(seq).unwrap();
                    applied.extend(model.drain());
                }
                let want: Vec<u64> =
                    (0..6).map(|n| first.wrapping_add(n)).filter(|s| s % 2 == 1).collect();
                assert_eq!(applied, want, "start {first:#x}, order {order:?}");
                assert_eq!(model.window.expected(), Seq(first.wrapping_add(6)));
                assert_eq!(model.window.held(), 0);
            });
        }
    }

    fn permute(order: &mut [u64; 6], k: usize, visit: &mut impl FnMut(&[u64; 6])) {
        if k == order.len() {
            return visit(order);
        }
        for i in k..order.len() {
            order.swap(k, i);
            permute(order, k + 1, visit);
            order.swap(k, i);
        }
    }

    #[test]
    fn repeated_numbers_change_nothing() {
        let mut model = Model::new(8, 100);
        assert_eq!(model.arrive(103), Ok(Arrival::Early));
        assert_eq!(model.arrive(103), Ok(Arrival::Duplicate));
        assert_eq!(model.arrive(102), Ok(Arrival::Early));
        assert_eq!(model.arrive(102), Ok(Arrival::Duplicate));
        assert_eq!(model.arrive(100), Ok(Arrival::Due));
        assert_eq!(model.drain(), []);
        assert_eq!(model.arrive(100), Ok(Arrival::Duplicate));
        assert_eq!(model.arrive(101), Ok(Arrival::Due));
        assert_eq!(model.drain(), [101, 103]);
        assert_eq!(model.arrive(103), Ok(Arrival::Duplicate));
    }

    #[test]
    fn a_number_that_is_repeated_late_changes_nothing_even_if_the_window_is_small() {
        for size in [1, 2, 64, 128] {
            let mut model = Model::new(size, 1001);
            for seq in 1001..1201 {
                model.arrive(seq).unwrap();
                model.drain();
                for late in 1001..=seq {
                    assert_eq!(
                        model.arrive(late),
                        Ok(Arrival::Duplicate),
                        "{late} after {seq}, window {size}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_lost_message_is_missing_and_stops_what_follows() {
        let mut model = Model::new(8, 101);
        assert_eq!((model.arrive(101), model.arrive(103)), (Ok(Arrival::Due), Ok(Arrival::Early)));
        let (window, mut cells) = model.split();
        window.lose(&mut cells);
        assert_eq!((model.drain(), model.window.held()), (vec![], 1));
        assert_eq!(model.window.expected(), Seq(101));
    }

    #[test]
    fn numbers_beyond_the_window_are_refused() {
        for size in [1, 2, 64, 128] {
            let mut model = Model::new(size, 1000);
            assert_eq!(model.arrive(1000 + size as u64), Err(Violation::Sequence));
            assert_eq!(model.arrive(1000 + 2 * size as u64 - 1), Err(Violation::Sequence));
            assert_eq!(model.arrive(1000 - size as u64), Ok(Arrival::Duplicate));
            model.arrive(1000 + size as u64 - 1).unwrap();
            assert_eq!(model.window.held(), u32::from(size > 1));
        }
    }

    #[test]
    fn a_full_window_drains_from_its_hole() {
        for size in [64u32, 128, 256] {
            let first = (1u64 << 20) - 7;
            let mut model = Model::new(size, first);
            for n in (1..size as u64).rev() {
                assert_eq!(model.arrive(first + n), Ok(Arrival::Early));
            }
            assert_eq!(model.drain(), []);
            model.arrive(first).unwrap();
            let want: Vec<u64> = (first..first + size as u64).filter(|s| s % 2 == 1).collect();
            assert_eq!(model.drain(), want);
        }
    }
}
