//! Tests markers and events, and waits for them.

use fishplate_core::engine::command::{MAX_AFTER, Reply};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::worker::Worker;
use fishplate_core::error::{OpError, WaitError};
use fishplate_core::queue::{Command, CommandError, Held, HeldBy};
use fishplate_core::sync::event::Channels;
use fishplate_core::sync::spin::Policy;

use crate::rig::{NOW, Places, bench, create, leak, queue_of, submit, tag};
use crate::support::{seeds, word};

#[test]
fn a_marker_separates_earlier_and_later_commands() {
    for seed in seeds(20) {
        let mut bench = bench(seed, 1);
        let Places { source, remote, .. } = bench.at;
        let put = |i: u64| Command::Put { from: source.at(0), len: 100, to: remote.at(100 * i) };
        let before: Vec<_> = (0..7).map(|i| submit(&mut bench.queues[0], put(i))).collect();
        let marker = submit(&mut bench.queues[0], Command::Marker);
        let behind = submit(&mut bench.queues[0], put(8));
        let late = behind.clone();
        bench.turns_until("a marker", || {
            assert!(!late.is_done() || marker.is_done(), "seed {seed}");
            marker.is_done()
        });
        assert!(before.iter().all(|event| event.reply() == Some(Reply::Done(0))), "seed {seed}");
        bench.turns_until("the last", || behind.is_done());
    }
}

#[test]
fn a_command_begins_after_events_of_other_queues() {
    for seed in seeds(20) {
        let mut bench = bench(seed, 2);
        let Places { source, remote, target, .. } = bench.at;
        let fill = |at, pattern| Command::Fill { at, len: 64, pattern, width: 8 };
        // The second queue puts the data that the first queue has filled in, and the first queue
        // copies it again.
        let made = create(&mut bench.queues[0], fill(source.at(0), 7));
        let moved = create(
            &mut bench.queues[1],
            Command::Put { from: source.at(0), len: 64, to: remote.at(0) },
        );
        let first = bench.queues[0].enqueue(made);
        let moved = moved.after(&first).unwrap();
        let moved = bench.queues[1].submit(moved);
        let copied = create(
            &mut bench.queues[0],
            Command::Copy { from: target.at(0), len: 64, to: target.at(64) },
        );
        let copied = copied.after(&moved).unwrap();
        let copied = bench.queues[0].submit(copied);
        bench.turns_until("a chain over two queues", || copied.is_done());
        assert_eq!(
            [first, moved, copied].map(|event| event.reply()),
            [Some(Reply::Done(0)); 3],
            "seed {seed}"
        );
        assert_eq!(word(bench.engine(), target.at(64)), 7, "seed {seed}");
    }
}

#[test]
fn commands_after_a_failure_are_not_begun() {
    let mut bench = bench(1, 2);
    let Places { source, target, .. } = bench.at;
    let far = submit(
        &mut bench.queues[0],
        Command::Copy { from: source.at(1 << 20), len: 1, to: target.at(0) },
    );
    let after = create(
        &mut bench.queues[1],
        Command::Fill { at: target.at(0), len: 8, pattern: 9, width: 8 },
    );
    let after = after.after(&far).unwrap();
    let after = bench.queues[1].submit(after);
    bench.turns_until("both", || after.is_done());
    assert!(matches!(far.reply(), Some(Reply::Refused(OpError::OutOfBounds { .. }))));
    assert_eq!(after.reply(), Some(Reply::Dependency));
    assert_eq!(word(bench.engine(), target.at(0)), 0);
    let mut many = create(&mut bench.queues[0], Command::Marker);
    for _ in 0..MAX_AFTER {
        many = many.after(&far).unwrap();
    }
    assert_eq!(many.after(&far).err(), Some(CommandError::TooManyEvents));
}

#[test]
fn waits_expire_at_their_deadline() {
    let mut bench = bench(1, 1);
    let event = submit(&mut bench.queues[0], Command::Marker);
    assert!(matches!(bench.queues[0].wait(&event, NOW), Err(WaitError::Deadline(_))));
    assert!(matches!(bench.queues[0].finish(NOW), Err(WaitError::Deadline(_))));
    bench.turns_until("a marker", || event.is_done());
    assert_eq!(bench.queues[0].wait(&event, NOW), Ok(Reply::Done(0)));
    assert_eq!(bench.queues[0].finish(NOW), Ok(()));
}

#[test]
fn an_expired_wait_says_what_blocks_the_worker() {
    let mut bench = bench(1, 2);
    let Places { target, .. } = bench.at;
    let host = bench.host;
    let recv = Command::Recv { source: None, tag: tag(99), ignore: Tag::ZERO, into: None };
    let open = submit(&mut bench.queues[0], recv);
    let marker = submit(&mut bench.queues[0], Command::Marker);
    let fill = Command::Fill { at: target.at(0), len: 8, pattern: 1, width: 8 };
    let after = create(&mut bench.queues[1], fill).after(&marker).unwrap();
    let after = bench.queues[1].submit(after);
    bench.worker.turn(host);
    for queue in &mut bench.queues {
        assert!(matches!(queue.finish(NOW), Err(WaitError::Deadline(_))));
    }
    let engine = Held { command: marker.index(), by: HeldBy::Engine };
    assert_eq!(bench.queues[0].held(), Some(engine));
    let event = Held { command: after.index(), by: HeldBy::Event(marker.index()) };
    assert_eq!(bench.queues[1].held(), Some(event));
    let message = Command::Send { to: bench.at.peer, tag: tag(99), from: None, sync: false };
    // Sends from a third queue. In the same queue, the send would wait for ever behind the command
    // that depends on it.
    let (mut third, consumer) = queue_of::<4>(host, leak(Channels::new()), 0);
    let sent = submit(&mut third, message);
    let mut consumers = [consumer];
    for _ in 0..1000 {
        Worker::new(bench.engine(), &mut consumers, Policy::BALANCED).turn(host);
        bench.worker.turn(host);
    }
    assert!(open.is_done() && after.is_done() && sent.is_done());
    assert_eq!([0, 1].map(|queue| bench.queues[queue].held()), [None; 2]);
}
