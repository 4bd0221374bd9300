use fishplate_core::sync::primitive::Ordering;

use super::*;
use crate::testing::Random;

/// Both ends of a done channel over memory of this process.
struct Channel {
    lines: Box<[Line]>,
    cursor: Box<AtomicU64>,
    sender: Sender,
    receiver: Receiver,
}

fn channel(count: u32, start: u64) -> Channel {
    let lines: Box<[Line]> = (0..count).map(|_| Line { word: AtomicU64::new(0) }).collect();
    let cursor = Box::new(AtomicU64::new(start));
    // SAFETY: words and cursor are on the heap, so they do not move with the value. They outlive
    // the ends.
    let sender = unsafe { Sender::new(lines.as_ptr(), count, &raw const *cursor, start) };
    // SAFETY: words and cursor are on the heap, so they do not move with the value. They outlive
    // the ends.
    let receiver = unsafe { Receiver::new(lines.as_ptr(), count, &raw const *cursor, start) };
    Channel { lines, cursor, sender, receiver }
}

impl Channel {
    fn ticket(&mut self) -> Option<u64> {
        let ticket = self.sender.reserve().unwrap()?;
        self.sender.take();
        Some(ticket)
    }

    fn poll(&mut self, budget: u32) -> Vec<(Status, u32)> {
        let mut seen = vec![];
        self.receiver.poll(budget, |status, data| seen.push((status, data))).unwrap();
        seen
    }
}

/// First tickets: zero, and values just before a wrap at 30, 32 and 64 bits.
const STARTS: [u64; 4] = [0, (1 << 30) - 5, (1 << 32) - 3, u64::MAX - 4];

#[test]
fn b8_a_failure_is_reported_for_its_own_write_only() {
    for start in STARTS {
        let mut channel = channel(8, start);
        let [n, next] = [channel.ticket().unwrap(), channel.ticket().unwrap()];
        channel.sender.store(next, Status::Landed, 11);
        channel.sender.store(n, Status::Failed, 10);
        let mut seen = channel.poll(32);
        seen.extend(channel.poll(32));
        assert_eq!(seen, [(Status::Failed, 10), (Status::Landed, 11)], "start {start}");
        assert!(channel.poll(32).is_empty());
    }
}

#[test]
fn words_are_reported_once_and_tickets_are_bounded() {
    for start in STARTS {
        for seed in 1..20 {
            let mut random = Random(seed);
            let mut channel = channel(16, start);
            let (mut open, mut stored, mut told) = (vec![], 0u32, vec![false; 4000]);
            let mut next = 0u32;
            while stored < 2000 && next < 3900 {
                if random.below(2) == 0
                    && let Some(ticket) = channel.ticket()
                {
                    open.push((ticket, next));
                    next += 1;
                    assert!(open.len() <= 16);
                }
                if random.below(3) == 0 && !open.is_empty() {
                    let (ticket, data) = open.swap_remove(random.below(open.len()));
                    let status = if data % 7 == 3 { Status::Failed } else { Status::Landed };
                    channel.sender.store(ticket, status, data);
                    stored += 1;
                }
                let budget = random.below(5) as u32;
                let seen = channel.poll(budget);
                assert!(seen.len() <= budget as usize);
                for (status, data) in seen {
                    assert!(
                        !std::mem::replace(&mut told[data as usize], true),
                        "seed {seed}: {data} reported twice"
                    );
                    let want = if data % 7 == 3 { Status::Failed } else { Status::Landed };
                    assert_eq!(status, want, "seed {seed} start {start}: {data}");
                }
            }
            for _ in 0..50 {
                for (_, data) in channel.poll(32) {
                    told[data as usize] = true;
                }
            }
            let missing = (0..next).filter(|&data| !told[data as usize]).count();
            assert_eq!(missing, open.len(), "seed {seed} start {start}");
        }
    }
}

#[test]
fn a_word_stored_out_of_order_is_found() {
    let mut channel = channel(64, 0);
    let tickets: Vec<u64> = (0..64).map(|_| channel.ticket().unwrap()).collect();
    assert_eq!(channel.ticket(), None, "more tickets than words");
    channel.sender.store(tickets[63], Status::Landed, 63);
    let seen: Vec<_> = (0..64).flat_map(|_| channel.poll(32)).collect();
    assert_eq!(seen, [(Status::Landed, 63)]);
}

#[test]
fn b22_tickets_are_bounded_by_credits_that_a_corrupt_cursor_cannot_raise() {
    let mut channel = channel(4, 100);
    let taken: Vec<_> = (0..5).map(|_| channel.ticket()).collect();
    assert_eq!(taken, [Some(100), Some(101), Some(102), Some(103), None]);
    for wrong in [99, 105, 0, u64::MAX] {
        channel.cursor.store(wrong, Ordering::Relaxed);
        assert_eq!(channel.sender.reserve(), Err(Corrupt), "{wrong}");
    }
    channel.cursor.store(102, Ordering::Relaxed);
    assert_eq!(channel.sender.reserve(), Ok(Some(104)));
}

#[test]
fn b21_every_word_has_its_own_line() {
    let channel = channel(8, 0);
    let base = channel.lines.as_ptr() as usize;
    assert!(base.is_multiple_of(128));
    for (i, line) in channel.lines.iter().enumerate() {
        assert_eq!(&raw const line.word as usize, base + i * 128);
    }
    assert_eq!(channel.sender.offset(8 + 3), 3 * 128);
}

#[test]
fn words_with_wrong_tickets_are_ignored() {
    let mut random = Random(5);
    let mut channel = channel(8, 0);
    for _ in 0..10_000 {
        let at = random.below(8);
        channel.lines[at].word.store(random.next(), Ordering::Relaxed);
        // The poll may return a word, nothing, or corruption. It must not panic.
        let _ = channel.receiver.poll(3, |_, _| {});
    }
    let mut channel = self::channel(8, 0);
    channel.lines[0].word.store(word(8, Status::Landed, 1), Ordering::Relaxed);
    assert!(channel.poll(32).is_empty(), "a word of the next lap");
    channel.lines[0].word.store(3 << STATUS, Ordering::Relaxed);
    assert_eq!(channel.receiver.poll(32, |_, _| {}), Err(Corrupt));
}
