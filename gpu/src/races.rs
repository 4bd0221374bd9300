//! Loom models of the done channel and the bounce slots. They compile `done.rs` and `relay.rs` over
//! loom's atomics. `tests/loom-edges.sh` runs them unchanged, and with each ordering weakened in
//! turn.
//!
//! Each word has a loom cell that represents the bytes of a write. The origin writes the cell
//! before it stores the word, and the target reads the cell when the write is reported. The origin
//! writes the cell again only for a later ticket of the same word. Loom checks these accesses.

use fishplate_core::sync::primitive::modelled as primitive;

#[path = "done.rs"]
#[allow(dead_code, reason = "the models use a part of it")]
mod done;
#[path = "relay.rs"]
#[allow(dead_code, reason = "the models use a part of it")]
mod relay;

use fishplate_core::rail::RailKey;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;

use done::{Line, Receiver, Sender, Status};
use relay::{Descriptor, Incoming, Outgoing, Piece, What};

const WORDS: u32 = 2;

/// The shared words, and the bytes of the writes.
struct Channel {
    words: Box<[Line]>,
    cursor: AtomicU64,
    bytes: [UnsafeCell<u64>; WORDS as usize],
}

// SAFETY: the fields are atomics and loom cells, and loom checks every access to a cell.
unsafe impl Send for Channel {}
// SAFETY: the fields are atomics and loom cells, and loom checks every access to a cell.
unsafe impl Sync for Channel {}

impl Channel {
    /// Creates a channel with `start` as the next ticket.
    fn new(start: u64) -> Arc<Channel> {
        let words = (0..WORDS).map(|_| Line { word: AtomicU64::new(0) }).collect();
        let bytes = [UnsafeCell::new(0), UnsafeCell::new(0)];
        Arc::new(Channel { words, cursor: AtomicU64::new(start), bytes })
    }

    fn sender(&self, start: u64) -> Sender {
        // SAFETY: the channel outlives both ends, and each model creates one sender.
        unsafe { Sender::new(self.words.as_ptr(), WORDS, &raw const self.cursor, start) }
    }

    fn receiver(&self, start: u64) -> Receiver {
        // SAFETY: the channel outlives both ends, and each model creates one receiver.
        unsafe { Receiver::new(self.words.as_ptr(), WORDS, &raw const self.cursor, start) }
    }

    fn cell(&self, ticket: u64) -> &UnsafeCell<u64> {
        &self.bytes[(ticket % u64::from(WORDS)) as usize]
    }

    /// Stores the bytes of the write with this ticket.
    fn land(&self, ticket: u64) {
        // SAFETY: loom fails the test if another thread accesses the cell at the same time.
        self.cell(ticket).with_mut(|bytes| unsafe { *bytes = ticket });
    }

    /// Loads the bytes of the write with this ticket.
    fn landed(&self, ticket: u64) -> u64 {
        // SAFETY: loom fails the test if another thread accesses the cell at the same time.
        self.cell(ticket).with(|bytes| unsafe { *bytes })
    }
}

/// Waits for the next ticket, and takes it.
fn ticket(sender: &mut Sender) -> u64 {
    loop {
        if let Some(ticket) = sender.reserve().unwrap() {
            sender.take();
            return ticket;
        }
        thread::yield_now();
    }
}

/// Polls for `count` writes. Returns their tickets and outcomes in the order of the reports.
fn take(
    channel: &Channel,
    receiver: &mut Receiver,
    count: usize,
    start: u64,
) -> Vec<(u64, Status)> {
    let mut told = Vec::new();
    while told.len() < count {
        let ended = |status, data| {
            let ticket = start.wrapping_add(u64::from(data));
            if status == Status::Landed {
                assert_eq!(channel.landed(ticket), ticket, "reported before it landed");
            }
            told.push((ticket, status));
        };
        let (ends, _) = receiver.poll(4, ended).unwrap();
        if ends == 0 {
            thread::yield_now();
        }
    }
    told
}

#[test]
fn a_reported_write_has_landed_and_its_word_is_reused_after_consumption() {
    loom::model(|| {
        // The ticket number in a word wraps after the first of the three writes.
        let start = (1 << 30) - 1;
        let channel = Channel::new(start);
        let origin = Arc::clone(&channel);
        let writes = thread::spawn(move || {
            let mut sender = origin.sender(start);
            for number in 0..3u32 {
                let ticket = ticket(&mut sender);
                origin.land(ticket);
                sender.store(ticket, Status::Landed, number);
            }
        });
        let mut told = take(&channel, &mut channel.receiver(start), 3, start);
        // The receiver may find a later word before an earlier one.
        told.sort_unstable_by_key(|(ticket, _)| *ticket);
        assert_eq!(told, [0, 1, 2].map(|number| (start + number, Status::Landed)));
        writes.join().unwrap();
    });
}

#[test]
fn writes_that_complete_out_of_order_are_reported_once() {
    loom::model(|| {
        let channel = Channel::new(0);
        let origin = Arc::clone(&channel);
        let writes = thread::spawn(move || {
            let mut sender = origin.sender(0);
            let [first, second] = [(); 2].map(|()| ticket(&mut sender));
            origin.land(second);
            sender.store(second, Status::Landed, 1);
            sender.store(first, Status::Failed, 0);
            let third = ticket(&mut sender);
            origin.land(third);
            sender.store(third, Status::Landed, 2);
        });
        let mut told = take(&channel, &mut channel.receiver(0), 3, 0);
        told.sort_unstable_by_key(|(ticket, _)| *ticket);
        assert_eq!(told, [(0, Status::Failed), (1, Status::Landed), (2, Status::Landed)]);
        writes.join().unwrap();
    });
}

#[test]
fn an_origin_that_leaves_has_reported_what_it_stored() {
    loom::model(|| {
        let channel = Channel::new(0);
        let origin = Arc::clone(&channel);
        let writes = thread::spawn(move || {
            let mut sender = origin.sender(0);
            let [first, second] = [(); 2].map(|()| ticket(&mut sender));
            origin.land(second);
            sender.store(second, Status::Landed, 1);
            // The origin exits before its first write completes.
            origin.land(first);
        });
        let mut receiver = channel.receiver(0);
        let look = |receiver: &mut Receiver| {
            let mut seen = 0;
            let ended = |status, data| {
                assert_eq!((status, data, channel.landed(1)), (Status::Landed, 1, 1));
                seen += 1;
            };
            receiver.poll(4, ended).unwrap();
            seen
        };
        let seen = look(&mut receiver);
        writes.join().unwrap();
        // Words that the origin stored before it exited can still be read, each once.
        assert_eq!(seen + look(&mut receiver), 1);
        assert_eq!(look(&mut receiver), 0);
    });
}

/// The bounce slots of one direction, and their bytes.
struct Slots {
    descriptors: Box<[Descriptor]>,
    acks: Box<[Line]>,
    bytes: [UnsafeCell<u64>; WORDS as usize],
}

// SAFETY: the fields are atomics and loom cells, and loom checks every access to a cell.
unsafe impl Send for Slots {}
// SAFETY: the fields are atomics and loom cells, and loom checks every access to a cell.
unsafe impl Sync for Slots {}

#[test]
fn a_piece_carries_its_bytes_and_its_slot_is_refilled_after_the_answer() {
    let piece = |number: u64| Piece {
        what: What::Write { key: RailKey { key: 7, base: 9 }, last: false, data: None },
        offset: number << 12,
        len: 4096,
        failed: false,
    };
    loom::model(move || {
        let slots = Arc::new(Slots {
            descriptors: (0..WORDS)
                .map(|_| Descriptor {
                    stamp: AtomicU64::new(0),
                    words: std::array::from_fn(|_| AtomicU64::new(0)),
                })
                .collect(),
            acks: (0..WORDS).map(|_| Line { word: AtomicU64::new(0) }).collect(),
            bytes: [UnsafeCell::new(0), UnsafeCell::new(0)],
        });
        let origin = Arc::clone(&slots);
        let fills = thread::spawn(move || {
            // SAFETY: the slots outlive both ends, and this is the only `Outgoing`.
            let mut out =
                unsafe { Outgoing::new(origin.descriptors.as_ptr(), origin.acks.as_ptr(), WORDS) };
            for _ in 0..3 {
                let (number, slot) = out.turn();
                while number >= WORDS.into() && out.answer(number - u64::from(WORDS)).is_none() {
                    thread::yield_now();
                }
                out.take();
                // SAFETY: loom fails the test if another thread accesses the cell at the same time.
                origin.bytes[slot as usize].with_mut(|bytes| unsafe { *bytes = number });
                out.fill(number, &piece(number));
            }
        });
        // SAFETY: the slots outlive both ends, and this is the only `Incoming`.
        let mut input =
            unsafe { Incoming::new(slots.descriptors.as_ptr(), slots.acks.as_ptr(), WORDS) };
        for expected in 0..3 {
            let (number, slot, found) = loop {
                match input.next() {
                    Some(found) => break found,
                    None => thread::yield_now(),
                }
            };
            assert_eq!((number, found), (expected, Some(piece(expected))));
            // SAFETY: loom fails the test if another thread accesses the cell at the same time.
            let bytes = slots.bytes[slot as usize].with(|bytes| unsafe { *bytes });
            assert_eq!(bytes, number);
            input.answer(number, 0);
        }
        fills.join().unwrap();
    });
}
