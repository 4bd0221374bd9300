//! Loom models of the lane. They compile `ends.rs` and `header.rs` over loom's atomics.
//! `tests/loom-edges.sh` runs them unchanged, and with each ordering weakened in turn.
//!
//! Each lane cell has a loom cell that represents its payload. The producer writes the loom cell
//! before it publishes, and the consumer reads it before it advances. Loom checks these accesses.
//! Where a long record has payload at the offset of a stamp, the models store the worst value. That
//! is the stamp that the consumer expects at this offset one lap later.

use fishplate_core::sync::primitive::modelled as primitive;

#[path = "ends.rs"]
#[allow(dead_code, reason = "the models use what is shared")]
mod ends;
#[path = "header.rs"]
#[allow(dead_code, reason = "the models use what is shared")]
mod header;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use ends::{Consumer, Producer, Refused, stamp};
use header::{Cursor, Header};
use primitive::{AtomicU64, Ordering};

/// A cell with the layout that `ends.rs` expects.
#[repr(C, align(64))]
struct Cell {
    stamp: AtomicU64,
    header: AtomicU64,
}

const _: () = assert!(size_of::<Cell>() == ends::CELL);

/// A lane, and one payload per cell.
struct Lane {
    cells: Box<[Cell]>,
    cursor: AtomicU64,
    payload: Box<[UnsafeCell<u64>]>,
}

// SAFETY: the fields are atomics and loom cells, and loom checks every access to a cell.
unsafe impl Send for Lane {}
// SAFETY: the fields are atomics and loom cells, and loom checks every access to a cell.
unsafe impl Sync for Lane {}

impl Lane {
    fn new(cells: u32, start: u64) -> Arc<Lane> {
        let cell = |_| Cell { stamp: AtomicU64::new(0), header: AtomicU64::new(0) };
        Arc::new(Lane {
            cells: (0..cells).map(cell).collect(),
            cursor: AtomicU64::new(start),
            payload: (0..cells).map(|_| UnsafeCell::new(0)).collect(),
        })
    }

    fn producer(&self, start: u64) -> Producer {
        let first = self.cells.as_ptr().cast_mut().cast();
        // SAFETY: the models keep the lane in an `Arc` longer than its ends, and create one
        // producer. The pointer covers all cells. Records that would wrap are written cell by cell
        // in `push`.
        unsafe { Producer::new(first, self.cells.len() as u32, &raw const self.cursor, start) }
    }

    fn consumer(&self, start: u64) -> Consumer {
        let first = self.cells.as_ptr().cast();
        // SAFETY: the models keep the lane in an `Arc` longer than its ends, and create one
        // consumer.
        unsafe { Consumer::new(first, self.cells.len() as u32, &raw const self.cursor, start) }
    }

    fn place(&self, position: u64) -> usize {
        (position % self.cells.len() as u64) as usize
    }

    /// Sends a record of `cells` cells.
    fn push(&self, producer: &mut Producer, cells: u64) {
        loop {
            match producer.reserve(cells) {
                Ok(_) => break,
                Err(Refused::Full) => thread::yield_now(),
                Err(Refused::Corrupt) => panic!("a cursor that no consumer wrote"),
            }
        }
        let at = producer.position();
        for position in (0..cells).map(|ahead| at.wrapping_add(ahead)) {
            // SAFETY: loom fails the test if another thread accesses the cell at the same time.
            self.payload[self.place(position)].with_mut(|payload| unsafe { *payload = position });
            if position != at {
                let next_lap = stamp(position.wrapping_add(self.cells.len() as u64));
                // Relaxed: payload is stored without ordering.
                self.cells[self.place(position)].stamp.store(next_lap, Ordering::Relaxed);
            }
        }
        // SAFETY: `reserve` succeeded above for the same number of cells.
        unsafe { producer.publish(cells, at.wrapping_mul(16).wrapping_add(cells)) };
    }

    /// Waits for the next record, checks that it has `cells` cells, and consumes it.
    fn pop(&self, consumer: &mut Consumer, cells: u64) {
        let header = loop {
            match consumer.header() {
                Some(header) => break header,
                None => thread::yield_now(),
            }
        };
        consumer.prefetch();
        consumer.prefetch_record(cells);
        let at = consumer.at;
        assert_eq!(header, at.wrapping_mul(16).wrapping_add(cells), "a record out of nothing");
        for position in (0..cells).map(|ahead| at.wrapping_add(ahead)) {
            // SAFETY: loom fails the test if another thread accesses the cell at the same time.
            let found = self.payload[self.place(position)].with(|payload| unsafe { *payload });
            assert_eq!(found, position, "the payload of another record");
        }
        consumer.advance(cells);
    }
}

/// Sends records of these lengths, in cells, through a lane that starts at position `start`. Loom
/// preempts threads at most twice. Three preemptions take ten times as long, and find no further
/// planted bugs.
fn across(cells: u32, start: u64, lengths: &'static [u64]) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(move || {
        let lane = Lane::new(cells, start);
        let other = Arc::clone(&lane);
        let sends = thread::spawn(move || {
            let mut producer = other.producer(start);
            lengths.iter().for_each(|&cells| other.push(&mut producer, cells));
        });
        let mut consumer = lane.consumer(start);
        lengths.iter().for_each(|&cells| lane.pop(&mut consumer, cells));
        sends.join().unwrap();
        // Nothing after the last record may look like a record.
        assert_eq!(consumer.header(), None);
    });
}

/// Every claim extends to the last free cell. Both the positions and the ring wrap.
#[test]
fn records_arrive_whole_and_once_where_every_free_cell_is_claimed() {
    across(4, u64::MAX - 1, &[1, 1, 1, 1, 1]);
    across(4, u64::MAX - 1, &[2, 1, 3]);
    across(4, 3, &[3, 3, 1]);
}

/// Each claim ends before the last free cell, so a record may end at an unclaimed cell. `publish`
/// then clears that cell's stamp itself.
#[test]
fn records_arrive_whole_and_once_where_some_cells_are_claimed() {
    across(16, u64::MAX - 4, &[1, 1, 12, 1, 9, 2]);
    // The record of nine cells ends behind the last claimed cell, where the first record had
    // payload.
    across(16, 9, &[12, 1, 1, 1, 1, 9, 1]);
}

#[test]
fn two_that_answer_each_other_read_what_was_sent() {
    loom::model(|| {
        let lanes = [Lane::new(4, 3), Lane::new(4, u64::MAX)];
        let [there, back] = [Arc::clone(&lanes[0]), Arc::clone(&lanes[1])];
        let answers = thread::spawn(move || {
            let (mut consumer, mut producer) = (there.consumer(3), back.producer(u64::MAX));
            for cells in [1, 2] {
                there.pop(&mut consumer, cells);
                back.push(&mut producer, cells);
            }
        });
        let (mut producer, mut consumer) = (lanes[0].producer(3), lanes[1].consumer(u64::MAX));
        for cells in [1, 2] {
            lanes[0].push(&mut producer, cells);
            lanes[1].pop(&mut consumer, cells);
        }
        answers.join().unwrap();
    });
}

fn header() -> Arc<Header> {
    let word = || AtomicU64::new(0);
    Arc::new(Header {
        magic: word(),
        sizes: word(),
        maker: [word(), word()],
        guest: [word(), word()],
        freed: Cursor(word()),
    })
}

#[test]
fn who_sees_the_magic_of_a_segment_sees_all_of_its_head() {
    loom::model(|| {
        let header = header();
        let made = Arc::clone(&header);
        let maker = thread::spawn(move || made.complete(1, 2, [3, 4], [5, 6]));
        // Relaxed: this load only decides whether to try again.
        if header.magic.load(Ordering::Relaxed) == 1 {
            assert!(header.is(1, 2, [3, 4], [5, 6]), "a part of the head is missing");
        }
        maker.join().unwrap();
    });
}

#[test]
fn who_reads_a_payload_that_was_reused_sees_that_its_sender_has_left() {
    loom::model(|| {
        let (header, payload) = (header(), Arc::new(AtomicU64::new(0)));
        header.complete(1, 2, [3, 4], [5, 6]);
        let (left, reused) = (Arc::clone(&header), Arc::clone(&payload));
        let sender = thread::spawn(move || {
            left.leave();
            // Relaxed: the program writes to its memory without ordering.
            reused.store(7, Ordering::Relaxed);
        });
        // Relaxed: the kernel copies without ordering.
        let read = payload.load(Ordering::Relaxed);
        assert!(!header.is_there(1) || read == 0, "a payload of a sender that has left");
        sender.join().unwrap();
    });
}
