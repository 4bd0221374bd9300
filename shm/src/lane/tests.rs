use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use fishplate_core::sync::primitive::AtomicU64;

use super::ends::{CLAIMED, stamp};
use super::header::Cursor;
use super::*;
use crate::testing::Random;

impl LaneMemory {
    /// Returns the address and length of the whole writable segment, for tests that store invalid
    /// values.
    pub(crate) fn raw(&self) -> (*mut u8, usize) {
        (self.mapping.ptr().as_ptr(), CELLS + self.cells as usize * CELL)
    }

    /// Returns the cursor of the other lane.
    pub(crate) fn cursor(&self) -> &AtomicU64 {
        &self.header().freed.0
    }
}

const A: Nonce = [1; 16];
const B: Nonce = [2; 16];

/// Creates both ends of one lane at position `start`, and its memory.
fn lane(cells: u32, start: u64) -> (LaneMemory, Producer, Consumer) {
    let memory = LaneMemory::create(cells, A, B).unwrap();
    // SAFETY: each caller keeps the returned memory alive as long as the ends. These are the only
    // ends.
    let (producer, consumer) = unsafe { ends(&memory, &memory, start) };
    (memory, producer, consumer)
}

fn push(producer: &mut Producer, payload: &[u8]) -> Result<(), Refused> {
    let cells = cells_for(payload.len());
    let record = producer.reserve(cells)?;
    // SAFETY: `reserve` returned room for `cells` cells, which hold the payload. They are published
    // once, here.
    unsafe {
        copy_message(payload.as_ptr(), record.add(PAYLOAD), payload.len());
        producer.publish(cells, payload.len() as u64);
    }
    Ok(())
}

/// Consumes the next record, and returns its payload.
fn pop(consumer: &mut Consumer) -> Option<Vec<u8>> {
    let len = consumer.header()? as usize;
    let mut payload = vec![0; len];
    // SAFETY: `push` published the record with this length, and `payload` has the same length.
    unsafe { copy_message(consumer.record().add(PAYLOAD), payload.as_mut_ptr(), len) };
    consumer.advance(cells_for(len));
    Some(payload)
}

/// Two threads that wait for each other. A wait fails after a minute, or if either thread has
/// failed.
struct Together {
    over: AtomicBool,
    until: Instant,
}

impl Together {
    fn new() -> Self {
        Together { over: AtomicBool::new(false), until: Instant::now() + Duration::from_secs(300) }
    }

    /// Retries until `look` returns a value.
    fn wait<T>(&self, mut look: impl FnMut() -> Option<T>) -> T {
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(
                !self.over.load(Relaxed) && Instant::now() < self.until,
                "the other end is stuck"
            );
            std::thread::yield_now();
        }
    }
}

/// A guard that each thread holds. If the thread panics, the other thread stops waiting.
struct Side<'t>(&'t Together);

impl Drop for Side<'_> {
    fn drop(&mut self) {
        self.0.over.fetch_or(std::thread::panicking(), Relaxed);
    }
}

#[test]
fn any_sequence_of_pushes_and_pops_is_a_queue() {
    for start in [0, u64::MAX - 30, (1 << 63) - 30] {
        let seed = 0xfeed ^ start | 1;
        let mut random = Random(seed);
        let (_memory, mut producer, mut consumer) = lane(64, start);
        let mut model = VecDeque::new();
        for _ in 0..20_000 {
            if random.below(2) == 0 {
                let len = if random.below(4) == 0 { random.below(1500) } else { random.below(60) };
                let payload = random.bytes(len);
                match push(&mut producer, &payload) {
                    Ok(()) => model.push_back(payload),
                    // The consumer delays freeing less than a quarter of the lane, and one cell
                    // stays free.
                    Err(refused) => {
                        let used: u64 =
                            model.iter().map(|old: &Vec<u8>| cells_for(old.len())).sum();
                        assert_eq!(refused, Refused::Full);
                        assert!(used + cells_for(payload.len()) > 63 - 16, "seed {seed}");
                    }
                }
            } else {
                assert_eq!(pop(&mut consumer), model.pop_front(), "seed {seed}");
            }
            // The cell of the next record is clean, and the consumer has freed all claimed cells.
            assert!(producer.claimed.wrapping_sub(producer.at) >= 1, "seed {seed}");
            assert!(producer.claimed.wrapping_sub(producer.freed) <= 64, "seed {seed}");
        }
    }
}

#[test]
fn short_records_find_their_cells_claimed() {
    let (_memory, mut producer, mut consumer) = lane(64, 3);
    let mut claims = 0;
    for n in 0..1000u64 {
        let before = producer.claimed;
        push(&mut producer, &n.to_ne_bytes()).unwrap();
        claims += u64::from(producer.claimed != before);
        let known = producer.at + 1 < producer.freed + 64;
        assert_eq!(producer.has_claimed(producer.at + 1), known, "at record {n}");
        pop(&mut consumer).unwrap();
    }
    // While the producer does not know how much of the lane is free, it claims fewer cells per
    // call.
    assert!((1000 / CLAIMED..1000 / CLAIMED * 2).contains(&claims), "{claims}");
}

#[test]
fn a_record_as_long_as_the_last_finds_its_cells_claimed() {
    for (len, cells) in [(100, 2), (600, 10), (1000, 16), (2000, 32)] {
        let (_memory, mut producer, mut consumer) = lane(64, 3);
        assert_eq!(cells_for(len), cells);
        for n in 0..100u64 {
            push(&mut producer, &vec![n as u8; len]).unwrap();
            pop(&mut consumer).unwrap();
            let free = producer.freed + 64 - producer.at;
            // The producer claims at most a quarter of the lane and one more cell, and at least the
            // cell of the next record.
            let (most, least) =
                (1 + cells.clamp(CLAIMED, 15), if cells < CLAIMED { 2 } else { 1 + cells.min(15) });
            let ahead = producer.claimed - producer.at;
            assert!(
                (least.min(free)..=most).contains(&ahead),
                "{ahead} claimed behind record {n} of {cells}"
            );
        }
    }
}

#[test]
fn the_longest_message_fits_once_the_lane_is_empty_wherever_it_starts() {
    for offset in 0..64 {
        let (_memory, mut producer, mut consumer) = lane(64, offset);
        // The message has the longest gap, so it begins in the second cell.
        let longest = vec![0xa5; max_message(64) + CELL - PAYLOAD];
        // The consumer may delay freeing up to a quarter of the lane, less one cell.
        for held in 0..16 {
            for _ in 0..held {
                push(&mut producer, b"x").unwrap();
                pop(&mut consumer).unwrap();
            }
            push(&mut producer, &longest).unwrap();
            assert_eq!(pop(&mut consumer).as_ref(), Some(&longest));
        }
    }
}

#[test]
fn payload_that_looks_like_a_stamp_is_not_taken_for_a_record() {
    for lengths in [1, 700] {
        payload_that_looks_like_a_stamp(lengths);
    }
}

/// Publishes forged records. After each, publishes records of 8 to 7 + `lengths` bytes.
fn payload_that_looks_like_a_stamp(lengths: u64) {
    let (_memory, mut producer, mut consumer) = lane(64, 0);
    // The forged record of the first lap is filled with the stamps that the second lap waits for.
    // The second lap has short records in the same cells.
    for first in 1..40u64 {
        let mut forged = Vec::new();
        let base = producer.position();
        for cell in 0..40u64 {
            for word in 0..8 {
                // The first two words of the first cell are the record's own stamp and header.
                if cell > 0 || word >= 2 {
                    forged.extend_from_slice(&stamp(base + cell + 64).to_ne_bytes());
                }
            }
        }
        push(&mut producer, &forged).unwrap();
        assert_eq!(pop(&mut consumer), Some(forged));
        for n in 0..64 + first {
            assert_eq!(consumer.header(), None, "a record out of nothing after {n}");
            // The lengths differ, so some records end on claimed cells and some do not.
            let mut payload = n.to_ne_bytes().to_vec();
            payload.resize(8 + (n * first % lengths) as usize, n as u8);
            push(&mut producer, &payload).unwrap();
            assert_eq!(pop(&mut consumer), Some(payload));
        }
    }
}

#[test]
fn a_cursor_that_no_correct_consumer_writes_is_refused() {
    for wrong in [65, 1 << 40, u64::MAX, 1 << 63] {
        let (memory, mut producer, _consumer) = lane(64, 10);
        while push(&mut producer, b"x").is_ok() {}
        assert_eq!(push(&mut producer, b"x"), Err(Refused::Full));
        memory.cursor().store(wrong.wrapping_add(9), Relaxed);
        assert_eq!(push(&mut producer, b"x"), Err(Refused::Corrupt));
    }
    // The cursor moves backwards.
    let (memory, mut producer, mut consumer) = lane(64, 10);
    for _ in 0..40 {
        push(&mut producer, b"x").unwrap();
        pop(&mut consumer).unwrap();
    }
    while push(&mut producer, b"x").is_ok() {}
    memory.cursor().store(10, Relaxed);
    assert_eq!(push(&mut producer, b"x"), Err(Refused::Corrupt));
}

#[test]
fn two_threads_lose_and_reorder_nothing() {
    let rounds: u64 = 100_000;
    let (_memory, mut producer, mut consumer) = lane(64, u64::MAX - 1000);
    let together = &Together::new();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let _side = Side(together);
            let mut random = Random(42);
            for n in 0..rounds {
                let mut payload = n.to_ne_bytes().to_vec();
                payload.resize(8 + random.below(200), n as u8);
                together.wait(|| push(&mut producer, &payload).ok());
            }
        });
        let _side = Side(together);
        let mut random = Random(42);
        for n in 0..rounds {
            let payload = together.wait(|| pop(&mut consumer));
            assert_eq!(payload[..8], n.to_ne_bytes());
            assert_eq!(payload.len(), 8 + random.below(200));
            assert!(payload[8..].iter().all(|byte| *byte == n as u8));
        }
    });
}

/// The cell behind a long record may hold a stale stamp between publishing and claiming. Only a
/// concurrent consumer can see that stamp.
#[test]
fn a_consumer_beside_never_takes_payload_for_a_record() {
    let (rounds, seed) = (100_000, 0xce11);
    let (_memory, mut producer, mut consumer) = lane(64, 5);
    // Up to 20 cells, which is more than the producer claims.
    let len = |random: &mut Random| random.below(20) * CELL;
    let together = &Together::new();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let _side = Side(together);
            let mut random = Random(seed);
            for _ in 0..rounds {
                let len = len(&mut random);
                // In every cell, every word is the stamp that the consumer expects at that cell in
                // the next lap.
                let at = producer.position();
                let word =
                    |n: usize| stamp(at + 64 + ((PAYLOAD + 8 * n) / CELL) as u64).to_ne_bytes();
                let payload: Vec<u8> = (0..len / 8).flat_map(word).collect();
                together.wait(|| push(&mut producer, &payload).ok());
            }
        });
        let _side = Side(together);
        let mut random = Random(seed);
        for n in 0..rounds {
            let len = len(&mut random);
            // The next record follows too soon for this thread to yield.
            let found = (0..1000).find_map(|_| consumer.header());
            let found = found.unwrap_or_else(|| together.wait(|| consumer.header()));
            assert_eq!(found, len as u64, "record {n}, seed {seed}");
            consumer.advance(cells_for(len));
        }
    });
}

/// B21: the words that the two sides write in loops lie in different cache lines, and in different
/// prefetched pairs of lines.
#[test]
fn b21_cursors_and_cells_share_no_line() {
    assert!(memoffset::offset_of!(Header, freed) >= 128 && size_of::<Cursor>() == 128);
    assert!(memoffset::offset_of!(Header, freed) + size_of::<Cursor>() <= CELLS);
    assert_eq!(CELLS % 128, 0);
    assert_eq!(cells_for(48), 1, "a short message is one line");
    assert_eq!(cells_for(49), 2);
    // Each end writes only to its own segment, so no line is written by both ends.
}

/// B10: an incomplete segment is refused before its contents are used.
#[test]
fn b10_an_unfinished_or_foreign_segment_is_refused() {
    let whole = LaneMemory::create(64, A, B).unwrap();
    let attach = |memory: &LaneMemory, cells, maker, guest| {
        LaneMemory::attach(memory.fd.try_clone().unwrap().into(), cells, maker, guest).map(drop)
    };
    assert_eq!(attach(&whole, 64, A, B), Ok(()));
    let (actual, expected) = (PAGE as u64 + 64 * 64, PAGE as u64 + 128 * 64);
    assert_eq!(attach(&whole, 128, A, B), Err(SegmentError::Size { actual, expected }));
    // B9: a segment of another run has a different nonce in one of the two places.
    assert_eq!(attach(&whole, 64, B, A), Err(SegmentError::Foreign));
    assert_eq!(attach(&whole, 64, A, A), Err(SegmentError::Foreign));
    whole.header().magic.store(0, Relaxed);
    assert_eq!(attach(&whole, 64, A, B), Err(SegmentError::Foreign));
    whole.header().magic.store(MAGIC, Relaxed);
    whole.header().sizes.store(sizes(64) + (1 << 48), Relaxed);
    assert_eq!(attach(&whole, 64, A, B), Err(SegmentError::Foreign));
}

#[test]
fn whoever_is_handed_a_lane_cannot_write_it() {
    let memory = LaneMemory::create(64, A, B).unwrap();
    assert!(Mapping::new(memory.fd(), PAGE, Access::Write).is_err());
    assert!(Mapping::new(memory.fd(), PAGE, Access::Read).is_ok());
}
