//! Queues of commands: what each kind does, what orders them, and what happens when queue, worker or events end at odd moments.
#[path = "../core/tests/support/mod.rs"]
mod support;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use fishplate::MatchStorage;
use fishplate::worker::{self, Options, StartError, Wakes};
use fishplate_core::engine::command::{Event, MAX_AFTER, Reply};
use fishplate_core::engine::lane::Desk;
use fishplate_core::engine::protocol::{Cancelled, MatchConfig, Received};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::worker::Worker;
use fishplate_core::engine::{Config, ContextId, Engine, Signal};
use fishplate_core::error::{OpError, WaitError};
use fishplate_core::mem::{LocalId, PeerId, RemoteId};
use fishplate_core::op::SignalOp;
use fishplate_core::queue::{
    Cmd, CommandError, CopyCommand, FillCommand, Held, HeldBy, MarkerCommand, PeerCopyCommand,
    PutSignalCommand, Queue, QueueCommand, ReadCommand, RecvCommand, Room, SendCommand, WriteCommand,
};
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::sync::event::{Channels, EventCount};
use fishplate_core::sync::pool::CreateError;
use fishplate_core::sync::spin::Policy;
use fishplate_sys::LinuxHost;

use support::{Own, Random, own, read, seeds, word, write};

const NEVER: u64 = u64::MAX;
/// Queues of one worker, at most.
const QUEUES: usize = 8;
const MATCHING: MatchConfig = MatchConfig { eager: 128, credits: 4, headers: 8, seed: 5 };
/// Too early for anything.
const NOW: u64 = 1;

type Rails = Faulty<Loopback<64>, 32>;
type Hosted = Queue<'static, LinuxHost>;

fn leak<T>(value: T) -> &'static mut T {
    Box::leak(Box::new(value))
}

/// An engine that talks to itself over two disordered rails.
fn scene(seed: u64, contexts: u16) -> Own<Rails, 2> {
    let rails = std::array::from_fn(|i| Faulty::new(Loopback::new(), Faults::DISORDER, seed * 2 + i as u64));
    let mut own = own(Config { contexts, window: 16, eager: 0, ..Config::default() }, rails, 1 << 20);
    let storage = leak(MatchStorage::new(&MATCHING, usize::from(contexts) * 4, 64, 4));
    own.engine.attach_matching(MATCHING, storage.memory()).unwrap();
    own
}

fn queue_of<const N: usize>(
    host: &'static LinuxHost,
    channels: &'static Channels<QUEUES>,
    id: u8,
) -> (Hosted, Desk<'static>) {
    let memory = leak(Room::<N>::new()).memory();
    Queue::new(ContextId(id), host, channels.queue(id.into()), memory, Policy::BALANCED).unwrap()
}

/// Queues, and the worker that serves them in this thread, turn by turn.
struct Bench {
    host: &'static LinuxHost,
    queues: Vec<Hosted>,
    worker: Worker<'static, 'static, 'static, Rails, 2>,
    at: Places,
}

#[derive(Clone, Copy)]
struct Places {
    peer: PeerId,
    source: LocalId,
    target: LocalId,
    remote: RemoteId,
}

fn bench(seed: u64, queues: u8) -> Bench {
    let Own { engine, peer, source, target, remote, .. } = scene(seed, queues.into());
    let (host, channels) = (&*leak(LinuxHost::private()), &*leak(Channels::new()));
    let (queues, desks): (Vec<_>, Vec<_>) = (0..queues).map(|id| queue_of::<16>(host, channels, id)).unzip();
    let worker = Worker::new(leak(engine), desks.leak(), Policy::BALANCED);
    Bench { host, queues, worker, at: Places { peer, source, target, remote } }
}

impl Bench {
    fn engine(&mut self) -> &mut Engine<'static, Rails, 2> {
        self.worker.engine_mut()
    }

    fn turns_until(&mut self, what: &str, mut ready: impl FnMut() -> bool) {
        for _ in 0..100_000 {
            if ready() {
                return;
            }
            self.worker.turn(self.host);
        }
        panic!("{what}: not after 100000 turns");
    }

    fn run<C: QueueCommand>(&mut self, queue: usize, command: C) -> Reply {
        let event = submit(&mut self.queues[queue], command);
        self.turns_until("a command", || event.is_done());
        event.reply().unwrap()
    }
}

fn create<C: QueueCommand>(queue: &mut Hosted, command: C) -> Cmd<'static, C> {
    loop {
        match queue.create(command) {
            Ok(command) => return command,
            Err(CreateError::Full) => thread::yield_now(),
            Err(refused) => panic!("{refused:?}"),
        }
    }
}

fn submit<C: QueueCommand>(queue: &mut Hosted, command: C) -> Event<'static> {
    let command = create(queue, command);
    queue.submit(command)
}

#[test]
fn every_kind_of_command_does_what_it_says() {
    let mut bench = bench(1, 1);
    let Places { source, target, remote, .. } = bench.at;
    let len = 300_000;
    let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 251) as u8).collect();
    write(bench.engine(), source.at(0), &bytes);

    assert_eq!(bench.run(0, WriteCommand { from: source.at(0), len, to: remote.at(0) }), Reply::Done(0));
    assert_eq!(read(bench.engine(), target.at(0), len), bytes);
    let into = source.at(500_000);
    assert_eq!(bench.run(0, ReadCommand { from: remote.at(0), len, into }), Reply::Done(0));
    assert_eq!(read(bench.engine(), into, len), bytes);
    // Longer than what one turn does, and towards lower addresses where they overlap.
    assert_eq!(bench.run(0, CopyCommand { from: source.at(0), len, to: target.at(400_001) }), Reply::Done(0));
    assert_eq!(read(bench.engine(), target.at(400_001), len), bytes);
    assert_eq!(
        bench.run(0, CopyCommand { from: target.at(400_001), len, to: target.at(399_990) }),
        Reply::Done(0)
    );
    assert_eq!(read(bench.engine(), target.at(399_990), len), bytes);
    for (width, pattern) in [(1, 0xa5), (2, 0x1234), (4, 0x1234_5678), (8, 0x0123_4567_89ab_cdef_u64)] {
        let fill = FillCommand { at: target.at(3), len: 300_000, pattern, width };
        assert_eq!(bench.run(0, fill), Reply::Done(0));
        let want = pattern.to_le_bytes();
        let found = read(bench.engine(), target.at(0), 300_011);
        assert!(
            found[3..300_003].iter().enumerate().all(|(i, byte)| *byte == want[i % width as usize]),
            "{width}"
        );
        assert_ne!(found[300_003..300_011], [want[0]; 8]);
    }
    write(bench.engine(), target.at(0), &bytes);
    let via = source.at(0);
    write(bench.engine(), via, &vec![0; len]);
    let peer_copy = PeerCopyCommand { from: remote.at(0), via, len, to: remote.at(400_000) };
    assert_eq!(bench.run(0, peer_copy), Reply::Done(0));
    assert_eq!(read(bench.engine(), target.at(400_000), len), bytes);
    let signal = Signal { at: remote.at(1_000_000), op: SignalOp::Add, value: 5 };
    let put = PutSignalCommand { from: source.at(0), len: 64, to: remote.at(800_000), signal };
    assert_eq!(bench.run(0, put), Reply::Done(0));
    assert_eq!(word(bench.engine(), target.at(1_000_000)), 5);
    assert_eq!(bench.run(0, MarkerCommand), Reply::Done(0));
}

fn tag(n: u64) -> Tag {
    Tag::new(n, 0)
}

#[test]
fn tagged_commands_send_and_receive() {
    for seed in seeds(20) {
        let mut bench = bench(seed, 2);
        let Places { peer, source, target, .. } = bench.at;
        for (n, len) in [0, 8, 128, 129, 5000].into_iter().enumerate() {
            let n = n as u64;
            let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + len + i / 251) as u8).collect();
            write(bench.engine(), source.at(0), &bytes);
            let into = target.at(10_000 * n);
            let recv =
                RecvCommand { source: Some(peer), tag: tag(n), ignore: Tag::ZERO, into: Some((into, len)) };
            let send = |sync| SendCommand { to: peer, tag: tag(n), from: Some((source.at(0), len)), sync };
            let early = submit(&mut bench.queues[0], recv);
            // What comes after a receive begins once a message is there.
            let copy = CopyCommand { from: into, len: len.max(1), to: target.at(100_000) };
            let copy = create(&mut bench.queues[1], copy).after(&early).unwrap();
            let sent = submit(&mut bench.queues[1], send(true));
            let copied = bench.queues[1].submit(copy);
            bench.turns_until("a message", || copied.is_done() && sent.is_done());
            assert_eq!(copied.reply(), Some(Reply::Done(0)), "seed {seed}");
            assert_eq!(sent.reply(), Some(Reply::Done(len as u64)), "seed {seed}");
            let Some(Reply::Received(status)) = early.reply() else { panic!("{early:?}") };
            assert_eq!((status.outcome, status.delivered), (Received::Ok, len as u64), "seed {seed}");
            assert_eq!(read(bench.engine(), target.at(100_000), len), bytes, "seed {seed}");
            // Truncated is not well: what comes after it does not begin.
            if len > 1 {
                let short = RecvCommand { into: Some((into, 1)), ..recv };
                let sent = submit(&mut bench.queues[1], send(false));
                let short = submit(&mut bench.queues[0], short);
                let after = create(&mut bench.queues[1], MarkerCommand).after(&short).unwrap();
                let after = bench.queues[1].submit(after);
                bench.turns_until("a short receive", || after.is_done() && sent.is_done());
                assert_eq!(after.reply(), Some(Reply::Dependency), "seed {seed}");
                let Some(Reply::Received(status)) = short.reply() else { panic!("{short:?}") };
                assert_eq!(status.outcome, Received::Truncated, "seed {seed}");
            }
        }
        assert_eq!(bench.queues[0].finish(NOW), Ok(()), "seed {seed}");
    }
}

#[test]
fn a_receive_that_nothing_matches_holds_up_no_slot_but_its_own_and_is_taken_back() {
    let mut bench = bench(1, 2);
    let recv = RecvCommand { source: None, tag: tag(99), ignore: Tag::ZERO, into: None };
    let open = submit(&mut bench.queues[0], recv);
    for _ in 0..100 {
        let fill = FillCommand { at: bench.at.target.at(0), len: 8, pattern: 1, width: 8 };
        assert_eq!(bench.run(0, fill), Reply::Done(0));
    }
    assert!(!open.is_done());
    let foreign = bench.queues[1].cancel(&open);
    assert_eq!(foreign.err(), Some(CreateError::Refused(CommandError::OtherQueue)));
    let cancel = bench.queues[0].cancel(&open).unwrap();
    bench.turns_until("a receive taken back", || open.is_done());
    assert_eq!(cancel.reply(), Some(Reply::Cancelled(Cancelled::Removed)));
    let Some(Reply::Received(status)) = open.reply() else { panic!("{open:?}") };
    assert_eq!((status.outcome, status.envelope), (Received::Cancelled, None));
    // Ended, and no receive at all.
    let marker = submit(&mut bench.queues[0], MarkerCommand);
    for event in [&open, &marker] {
        let cancel = bench.queues[0].cancel(event).unwrap();
        bench.turns_until("a refusal", || cancel.is_done());
        assert_eq!(cancel.reply(), Some(Reply::Refused(OpError::StaleToken)));
    }
}

#[test]
fn an_open_receive_does_not_keep_a_worker_from_stopping_nor_reach_the_next_one() {
    let Own { mut engine, peer, source, .. } = scene(1, 1);
    let (host, channels) = (&*leak(LinuxHost::private()), &*leak(Channels::new()));
    let stop = AtomicBool::new(true);
    let recv = RecvCommand { source: None, tag: tag(1), ignore: Tag::ZERO, into: None };
    let message = SendCommand { to: peer, tag: tag(1), from: Some((source.at(0), 0)), sync: true };

    let (mut queue, desk) = queue_of::<4>(host, channels, 0);
    let mut desks = [desk];
    let open = submit(&mut queue, recv);
    assert!(Worker::new(&mut engine, &mut desks, Policy::BALANCED).run(
        host,
        &channels.send,
        None,
        &stop,
        NEVER
    ));
    assert!(!open.is_done());
    drop(desks);
    assert_eq!(open.reply(), Some(Reply::Abandoned));

    // The engine still has it, and the message for it. A receive in the same slot of another queue is not it.
    let (mut queue, desk) = queue_of::<4>(host, channels, 0);
    let mut desks = [desk];
    let other = submit(&mut queue, RecvCommand { tag: tag(2), ..recv });
    let sent = submit(&mut queue, message);
    assert!(Worker::new(&mut engine, &mut desks, Policy::BALANCED).run(
        host,
        &channels.send,
        None,
        &stop,
        NEVER
    ));
    assert_eq!(sent.reply(), Some(Reply::Done(0)));
    assert!(!other.is_done());
}

#[test]
fn arguments_that_make_no_sense_are_refused_and_take_no_slot() {
    let mut bench = bench(1, 1);
    let Places { source, target, remote, .. } = bench.at;
    let queue = &mut bench.queues[0];
    for _ in 0..100 {
        let empty = queue.create(WriteCommand { from: source.at(0), len: 0, to: remote.at(0) });
        assert_eq!(empty.err(), Some(CreateError::Refused(CommandError::Empty)));
        let odd = queue.create(FillCommand { at: target.at(0), len: 6, pattern: 1, width: 4 });
        assert_eq!(odd.err(), Some(CreateError::Refused(CommandError::Pattern { width: 4, len: 6 })));
        let odd = queue.create(FillCommand { at: target.at(0), len: 6, pattern: 1, width: 3 });
        assert_eq!(odd.err(), Some(CreateError::Refused(CommandError::Pattern { width: 3, len: 6 })));
    }
    let counts = queue.pool_counts();
    assert_eq!(counts.allocs, counts.local_frees);
    // Out of bounds is seen by the worker, before anything is written.
    let before = read(bench.engine(), target.at(0), 1 << 20);
    let far = FillCommand { at: target.at(8), len: 1 << 20, pattern: !0, width: 8 };
    assert!(matches!(bench.run(0, far), Reply::Refused(OpError::OutOfBounds { .. })));
    let far = CopyCommand { from: source.at(0), len: 1 << 20, to: target.at(1) };
    assert!(matches!(bench.run(0, far), Reply::Refused(OpError::OutOfBounds { .. })));
    let far = PeerCopyCommand { from: remote.at(1 << 20), via: source.at(0), len: 8, to: remote.at(0) };
    assert!(matches!(bench.run(0, far), Reply::Refused(OpError::OutOfBounds { .. })));
    assert_eq!(read(bench.engine(), target.at(0), 1 << 20), before);
    assert_eq!(bench.run(0, MarkerCommand), Reply::Done(0));
}

#[test]
fn commands_dropped_before_submission_give_their_slots_back() {
    let mut bench = bench(1, 1);
    let queue = &mut bench.queues[0];
    for _ in 0..10 {
        let commands: Vec<_> = (0..16).map(|_| queue.create(MarkerCommand).unwrap()).collect();
        assert_eq!(queue.create(MarkerCommand).err(), Some(CreateError::Full));
        drop(commands);
    }
    assert_eq!(bench.run(0, MarkerCommand), Reply::Done(0));
}

#[test]
fn a_marker_is_done_after_everything_before_it_and_before_everything_behind() {
    for seed in seeds(20) {
        let mut bench = bench(seed, 1);
        let Places { source, remote, .. } = bench.at;
        let put = |i: u64| WriteCommand { from: source.at(0), len: 100, to: remote.at(100 * i) };
        let before: Vec<_> = (0..7).map(|i| submit(&mut bench.queues[0], put(i))).collect();
        let marker = submit(&mut bench.queues[0], MarkerCommand);
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
        let fill = |at, pattern| FillCommand { at, len: 64, pattern, width: 8 };
        // The second queue moves on what the first one makes, and the first what the second one moved.
        let made = create(&mut bench.queues[0], fill(source.at(0), 7));
        let moved =
            create(&mut bench.queues[1], WriteCommand { from: source.at(0), len: 64, to: remote.at(0) });
        let first = bench.queues[0].enqueue(made);
        let moved = moved.after(&first).unwrap();
        let moved = bench.queues[1].submit(moved);
        let copied =
            create(&mut bench.queues[0], CopyCommand { from: target.at(0), len: 64, to: target.at(64) });
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
fn what_comes_after_a_failure_is_not_begun() {
    let mut bench = bench(1, 2);
    let Places { source, target, .. } = bench.at;
    let far =
        submit(&mut bench.queues[0], CopyCommand { from: source.at(1 << 20), len: 1, to: target.at(0) });
    let after = create(&mut bench.queues[1], FillCommand { at: target.at(0), len: 8, pattern: 9, width: 8 });
    let after = after.after(&far).unwrap();
    let after = bench.queues[1].submit(after);
    bench.turns_until("both", || after.is_done());
    assert!(matches!(far.reply(), Some(Reply::Refused(OpError::OutOfBounds { .. }))));
    assert_eq!(after.reply(), Some(Reply::Dependency));
    assert_eq!(word(bench.engine(), target.at(0)), 0);
    let mut many = create(&mut bench.queues[0], MarkerCommand);
    for _ in 0..MAX_AFTER {
        many = many.after(&far).unwrap();
    }
    assert_eq!(many.after(&far).err(), Some(CommandError::TooManyEvents));
}

#[test]
fn waits_end_at_their_deadline_and_say_so() {
    let mut bench = bench(1, 1);
    let event = submit(&mut bench.queues[0], MarkerCommand);
    assert!(matches!(bench.queues[0].wait(&event, NOW), Err(WaitError::Deadline(_))));
    assert!(matches!(bench.queues[0].finish(NOW), Err(WaitError::Deadline(_))));
    bench.turns_until("a marker", || event.is_done());
    assert_eq!(bench.queues[0].wait(&event, NOW), Ok(Reply::Done(0)));
    assert_eq!(bench.queues[0].finish(NOW), Ok(()));
}

#[test]
fn a_wait_that_ends_at_its_deadline_leaves_word_of_what_holds_the_worker_up() {
    let mut bench = bench(1, 2);
    let Places { target, .. } = bench.at;
    let host = bench.host;
    let recv = RecvCommand { source: None, tag: tag(99), ignore: Tag::ZERO, into: None };
    let open = submit(&mut bench.queues[0], recv);
    let marker = submit(&mut bench.queues[0], MarkerCommand);
    let fill = FillCommand { at: target.at(0), len: 8, pattern: 1, width: 8 };
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
    let message = SendCommand { to: bench.at.peer, tag: tag(99), from: None, sync: false };
    // Behind what waits for the message, it would never be sent.
    let (mut third, desk) = queue_of::<4>(host, leak(Channels::new()), 0);
    let sent = submit(&mut third, message);
    let mut desks = [desk];
    for _ in 0..1000 {
        Worker::new(bench.engine(), &mut desks, Policy::BALANCED).turn(host);
        bench.worker.turn(host);
    }
    assert!(open.is_done() && after.is_done() && sent.is_done());
    assert_eq!([0, 1].map(|queue| bench.queues[queue].held()), [None; 2]);
}

#[test]
fn a_worker_that_goes_away_leaves_nothing_waiting() {
    let mut bench = bench(3, 1);
    let Places { source, remote, .. } = bench.at;
    let put = WriteCommand { from: source.at(0), len: 50_000, to: remote.at(0) };
    let host = bench.host;
    let channels = leak(Channels::new());
    let (mut queue, desk) = queue_of::<16>(host, channels, 0);
    let mut desks = [desk];
    let begun = submit(&mut queue, put);
    let mut worker = Worker::new(bench.engine(), &mut desks, Policy::BALANCED);
    worker.turn(host);
    let unseen = submit(&mut queue, MarkerCommand);
    drop(desks);
    assert_eq!(queue.finish(NEVER), Ok(()));
    assert!(begun.is_done());
    assert_eq!(unseen.reply(), Some(Reply::Abandoned));
    let after = submit(&mut queue, MarkerCommand);
    assert_eq!(queue.wait(&after, NEVER), Ok(Reply::Abandoned));
    // The engine still has the put; whoever drives it next is not disturbed by its end.
    bench.turns_until("the engine", {
        let mut turns = 0;
        move || {
            turns += 1;
            turns > 1000
        }
    });
}

/// Runs `user` in a thread per queue, beside a worker.
fn with_worker(seed: u64, queues: u8, user: impl Fn(usize, Hosted, Places) + Sync) {
    let Own { mut engine, peer, source, target, remote, .. } = scene(seed, queues.into());
    let at = Places { peer, source, target, remote };
    let (host, channels) = (&*leak(LinuxHost::private()), &*leak(Channels::new()));
    let (queues, mut desks): (Vec<_>, Vec<_>) =
        (0..queues).map(|id| queue_of::<16>(host, channels, id)).unzip();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let mut worker = Worker::new(&mut engine, &mut desks, Policy::BALANCED);
        let stopped = &stop;
        let running = scope.spawn(move || worker.run(host, &channels.send, None, stopped, NEVER));
        let users: Vec<_> = queues
            .into_iter()
            .enumerate()
            .map(|(i, queue)| {
                let user = &user;
                scope.spawn(move || user(i, queue, at))
            })
            .collect();
        let ends: Vec<_> = users.into_iter().map(|user| user.join()).collect();
        // Release: the worker that sees it has everything that was submitted before in its rings.
        stop.store(true, Ordering::Release);
        channels.send.notify(host);
        assert!(running.join().unwrap(), "seed {seed}");
        // The worker has stopped, so a failure ends the test.
        ends.into_iter().for_each(|end| end.unwrap());
    });
    assert!(desks.iter_mut().all(Desk::is_over));
}

#[test]
fn many_queues_feed_one_worker_and_get_their_own_events() {
    for seed in seeds(10) {
        let events = AtomicUsize::new(0);
        with_worker(seed, 4, |i, mut queue, at| {
            let mut random = Random(seed ^ (i as u64) << 32);
            let base = 4096 * i as u64;
            for round in 1..=50u64 {
                let fill = FillCommand { at: at.source.at(base), len: 64, pattern: round, width: 8 };
                let made = submit(&mut queue, fill);
                let put = WriteCommand { from: at.source.at(base), len: 64, to: at.remote.at(base) };
                let put = create(&mut queue, put).after(&made).unwrap();
                let put = queue.enqueue(put);
                match random.below(3) {
                    0 => assert_eq!(queue.wait(&put, NEVER), Ok(Reply::Done(0)), "seed {seed}"),
                    1 => {
                        let marker = submit(&mut queue, MarkerCommand);
                        assert_eq!(queue.wait(&marker, NEVER), Ok(Reply::Done(0)), "seed {seed}");
                    }
                    _ => queue.finish(NEVER).unwrap(),
                }
                assert_eq!(put.reply(), Some(Reply::Done(0)), "seed {seed}");
                events.fetch_add(1, Ordering::Relaxed);
            }
        });
        assert_eq!(events.into_inner(), 200, "seed {seed}");
    }
}

#[test]
fn a_queue_dropped_with_live_commands_has_them_done_all_the_same() {
    for seed in seeds(10) {
        let kept = std::sync::Mutex::new(vec![]);
        with_worker(seed, 3, |i, mut queue, at| {
            let to = at.remote.at(4096 * i as u64);
            let events =
                (0..10).map(|_| submit(&mut queue, WriteCommand { from: at.source.at(0), len: 4000, to }));
            kept.lock().unwrap().extend(events);
        });
        let kept = kept.into_inner().unwrap();
        assert!(kept.iter().all(|event| event.reply() == Some(Reply::Done(0))), "seed {seed}");
    }
}

/// Which processors the threads may use that are workers.
fn cpus_of_workers() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok())
        .filter(|status| status.starts_with("Name:\tfishplate\n"))
        .filter_map(|status| {
            status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:\t").map(str::to_owned))
        })
        .collect()
}

#[test]
fn a_worker_thread_does_what_was_submitted_before_it_is_stopped_and_gives_everything_back() {
    let cpu = fishplate_sys::affinity::allowed().unwrap().iter().next();
    let (host, channels, arrivals) = (LinuxHost::private(), <Channels>::new(), EventCount::new());
    let wakes = Wakes { host: &host, send: &channels.send, arrivals: Some(&arrivals) };
    for policy in [Policy::BALANCED, Policy::EFFICIENT] {
        let Own { engine, target, .. } = scene(1, 1);
        let mut room = Room::<16>::new();
        let (mut queue, desk) =
            Queue::new(ContextId(0), &host, channels.queue(0), room.memory(), Policy::BALANCED).unwrap();
        thread::scope(|scope| {
            let mut parts = (Box::new(engine), vec![desk]);
            for round in 0..20 {
                let options = Options { cpu, policy };
                let running = worker::start(scope, parts, wakes, options, NEVER).unwrap();
                let at = target.at(8 * round);
                let fill = FillCommand { at, len: 8, pattern: round + 1, width: 8 };
                let events: Vec<_> = (0..10)
                    .map(|_| {
                        let command = queue.create(fill).unwrap();
                        queue.submit(command)
                    })
                    .collect();
                let cpus = (round == 0).then(|| {
                    // What it has done, it has done pinned.
                    queue.finish(NEVER).unwrap();
                    cpus_of_workers()
                });
                let stopped = running.stop().unwrap();
                assert!(cpus.is_none_or(|cpus| cpus == [cpu.unwrap().to_string()]));
                assert!(stopped.finished && events.iter().all(|event| event.reply() == Some(Reply::Done(0))));
                assert_eq!(word(&stopped.parts.0, at), round + 1);
                parts = stopped.parts;
                queue.finish(NEVER).unwrap();
            }
        });
    }
    let options = Options { cpu: Some(1 << 20), ..Options::default() };
    let Own { engine, .. } = scene(1, 1);
    thread::scope(|scope| {
        let nowhere = worker::start(scope, (Box::new(engine), vec![]), wakes, options, NEVER);
        assert!(matches!(nowhere.unwrap().stop().err(), Some(StartError::Pin(_))));
    });
}
