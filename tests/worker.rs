//! Tests contexts and a worker with its engine on separate threads: no command is lost, replies
//! reach their callers, and sleepers are woken.
#[path = "../core/tests/support/mod.rs"]
mod support;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use fishplate::MatchStorage;
use fishplate_core::context::{Context, Ticket};
use fishplate_core::engine::command::{Command, Reply};
use fishplate_core::engine::lane::CommandConsumer;
use fishplate_core::engine::protocol::{Cancelled, MatchConfig, Received};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::worker::Worker;
use fishplate_core::engine::{Config, ContextId, Signal};
use fishplate_core::error::{OpError, WaitError};
use fishplate_core::mem::PeerId;
use fishplate_core::op::{Amo, AmoOp, Cmp, SignalOp};
use fishplate_core::queue::QueueStorage;
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::sync::event::{Channels, EventCount};
use fishplate_core::sync::host::Host;
use fishplate_core::sync::spin::Policy;
use fishplate_sys::LinuxHost;

use support::{Own, Random, own, seeds};

const NEVER: u64 = u64::MAX;

const MATCHING: MatchConfig = MatchConfig {
    eager: 128,
    credits: 4,
    headers: 8,
    shared_credits: 0,
    shared_headers: 0,
    shared_shorts: 0,
    pieces: 0,
    seed: 5,
};

fn leak<T>(value: T) -> &'static mut T {
    Box::leak(Box::new(value))
}

struct Rig {
    host: &'static LinuxHost,
    send: &'static EventCount,
    contexts: Vec<Context<'static, LinuxHost>>,
    consumers: Vec<CommandConsumer<'static>>,
}

fn rig(contexts: u8, policy: Policy) -> Rig {
    let (host, channels) = (&*leak(LinuxHost::private()), &*leak(Channels::<4>::new()));
    let mut rig = Rig { host, send: &channels.send, contexts: vec![], consumers: vec![] };
    for id in 0..contexts {
        let memory = leak(QueueStorage::<8>::new()).memory();
        let channel = channels.queue(id.into());
        let (context, consumer) =
            Context::new(ContextId(id), host, channel, memory, policy).unwrap();
        rig.contexts.push(context);
        rig.consumers.push(consumer);
    }
    rig
}

fn patiently(mut ask: impl FnMut() -> Result<Ticket, OpError>) -> Ticket {
    loop {
        match ask() {
            Ok(ticket) => return ticket,
            Err(OpError::Again) => thread::yield_now(),
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// Runs `user` in one thread per context. A worker serves the contexts. Its engine is its own peer
/// over reordering rails.
fn with_worker(
    seed: u64,
    contexts: u8,
    policy: Policy,
    user: impl Fn(usize, &mut Context<'static, LinuxHost>, Peers) + Sync,
) {
    let rails: [_; 2] = std::array::from_fn(|i| {
        Faulty::<_, 32>::new(Loopback::<64>::new(), Faults::DISORDER, seed * 2 + i as u64)
    });
    let config = Config {
        contexts: contexts as u16,
        window: 16,
        first_sequence: (1 << 20) - 9,
        ..Config::default()
    };
    let Own { mut engine, peer, source, target, remote, .. } = own(config, rails, 4096);
    let streams = engine.config().contexts as usize * 4;
    engine
        .attach_matching(MATCHING, leak(MatchStorage::new(&MATCHING, streams, 64, 4)).memory())
        .unwrap();
    let Rig { host, send, contexts, mut consumers } = rig(contexts, policy);
    let stop = AtomicBool::new(false);
    let peers = Peers { peer, source, target, remote };
    thread::scope(|scope| {
        let mut worker = Worker::new(&mut engine, &mut consumers, policy);
        let stopped = &stop;
        let running = scope.spawn(move || worker.run(host, send, None, stopped, NEVER));
        let users: Vec<_> = contexts
            .into_iter()
            .enumerate()
            .map(|(i, mut context)| {
                let user = &user;
                scope.spawn(move || user(i, &mut context, peers))
            })
            .collect();
        let ends: Vec<_> = users.into_iter().map(|user| user.join()).collect();
        // Release: a worker that sees `stop` also sees all earlier submissions in its rings.
        stop.store(true, Ordering::Release);
        send.notify(host);
        assert!(running.join().unwrap(), "seed {seed}");
        // Unwraps only now that the worker has stopped, so that a failure ends the test.
        ends.into_iter().for_each(|end| end.unwrap());
    });
}

#[derive(Clone, Copy)]
struct Peers {
    peer: PeerId,
    source: fishplate_core::mem::LocalId,
    target: fishplate_core::mem::LocalId,
    remote: fishplate_core::mem::RemoteId,
}

#[test]
fn every_context_gets_the_answers_to_its_own_requests() {
    for seed in seeds(20) {
        for policy in [Policy::EFFICIENT, Policy::BALANCED] {
            with_worker(seed, 3, policy, |i, context, at| {
                let mut random = Random(seed ^ (i as u64) << 32);
                let word = at.remote.at(8 * i as u64);
                let (mut sum, mut waiting) = (0u64, vec![]);
                for _ in 0..100 {
                    let operand = random.below(1000);
                    let amo = Amo { op: AmoOp::Add, width: 8, operand, compare: 0 };
                    waiting.push((patiently(|| context.fetch(word, amo)), sum));
                    sum += operand;
                    if waiting.len() == 8 {
                        // All slots are in use. The replies may be taken in any order.
                        while !waiting.is_empty() {
                            let (ticket, before) =
                                waiting.swap_remove(random.below(waiting.len() as u64) as usize);
                            assert_eq!(
                                context.wait(ticket, NEVER),
                                Ok(Reply::Done(before)),
                                "seed {seed}"
                            );
                            assert_eq!(context.test(ticket), Err(OpError::StaleToken));
                        }
                    }
                }
                for (ticket, before) in waiting {
                    assert_eq!(context.wait(ticket, NEVER), Ok(Reply::Done(before)), "seed {seed}");
                }
                context.quiet(at.peer, NEVER).unwrap();
            });
        }
    }
}

#[test]
fn a_signal_wakes_the_context_that_watches_it() {
    for seed in seeds(20) {
        with_worker(seed, 2, Policy::EFFICIENT, |i, context, at| {
            let (mine, theirs) = (64 * i as u64, 64 * (1 - i as u64));
            for round in 1..=50 {
                let signal = Signal { at: at.remote.at(theirs), op: SignalOp::Set, value: round };
                let ticket = patiently(|| {
                    context.put_signal(at.source.at(0), 40, at.remote.at(theirs + 8), signal)
                });
                let seen = context
                    .wait_signal(at.target.at(mine), Cmp::Ge, round, Some(at.peer), NEVER)
                    .unwrap();
                assert!(seen == round || seen == round + 1, "seed {seed}");
                assert_eq!(context.wait(ticket, NEVER), Ok(Reply::Done(0)));
            }
        });
    }
}

#[test]
fn submissions_before_the_stop_are_executed() {
    for seed in seeds(50) {
        let word = OnceLock::new();
        with_worker(seed, 2, Policy::BALANCED, |i, context, at| {
            let amo = Amo { op: AmoOp::Inc, width: 8, operand: 0, compare: 0 };
            for _ in 0..100 {
                let command = Command::Amo { at: at.remote.at(0), amo, fetch: false };
                while context.submit_silent(command) == Err(OpError::Again) {
                    thread::yield_now();
                }
            }
            if i == 0 {
                let _ = word.set(());
                // After the quiet all increments of this context are applied. Increments of the
                // other context may be in flight.
                context.quiet(at.peer, NEVER).unwrap();
                let ticket =
                    patiently(|| context.fetch(at.remote.at(0), Amo { op: AmoOp::Fetch, ..amo }));
                let Ok(Reply::Done(sum)) = context.wait(ticket, NEVER) else {
                    panic!("seed {seed}")
                };
                assert!((100..=200).contains(&sum), "seed {seed}: {sum}");
            }
        });
    }
}

#[test]
fn refusals_and_expired_deadlines_are_reported() {
    with_worker(1, 1, Policy::BALANCED, |_, context, at| {
        let ticket = patiently(|| context.put(at.source.at(0), 5000, at.remote.at(0)));
        let Ok(Reply::Refused(OpError::OutOfBounds { len: 5000, size: 4096, .. })) =
            context.wait(ticket, NEVER)
        else {
            panic!("not refused");
        };
        let soon = 1;
        let late = context.wait_signal(at.target.at(0), Cmp::Eq, 9, None, soon);
        assert!(matches!(late, Err(WaitError::Deadline(_))), "{late:?}");
        // After the deadline, the worker still watches the word. The signal ends the watch.
        let signal = Signal { at: at.remote.at(0), op: SignalOp::Set, value: 9 };
        let ticket = patiently(|| context.signal(signal));
        assert_eq!(context.wait(ticket, NEVER), Ok(Reply::Done(0)));
    });
}

#[test]
fn every_receive_through_a_worker_is_answered_once() {
    for seed in seeds(10) {
        with_worker(seed, 3, Policy::BALANCED, |i, context, at| {
            // Each context has its own tags and memory. All contexts share the matcher's queues.
            let tag = |n: u64| Tag::new(n, i as u32);
            let (from, into) = (at.source.at(1024 * i as u64), at.target.at(1024 * i as u64));
            for (n, len) in [0, 8, 128, 129, 1000].into_iter().enumerate() {
                let n = n as u64;
                let early =
                    patiently(|| context.recv(Some(at.peer), tag(n), Tag::ZERO, Some((into, len))));
                let sync = patiently(|| context.send_sync(at.peer, tag(n), Some((from, len))));
                match context.wait(early, NEVER) {
                    Ok(Reply::Received(status)) => {
                        let envelope = status.envelope.unwrap();
                        assert_eq!(
                            (status.outcome, status.delivered),
                            (Received::Ok, len as u64),
                            "seed {seed}"
                        );
                        assert_eq!((envelope.tag, envelope.source), (tag(n), at.peer));
                    }
                    other => panic!("seed {seed}: {other:?}"),
                }
                assert_eq!(context.wait(sync, NEVER), Ok(Reply::Done(len as u64)), "seed {seed}");
                // Probes, claims and receives an unexpected message.
                let sent = patiently(|| context.send(at.peer, tag(n), Some((from, len))));
                let any = Tag::new(u64::MAX, 0);
                let found = loop {
                    if let Some(found) = context.probe(None, tag(0), any, NEVER).unwrap() {
                        break found;
                    }
                };
                assert_eq!((found.tag, found.len), (tag(n), len as u64));
                let claimed = context.mprobe(Some(at.peer), tag(0), any, NEVER).unwrap().unwrap();
                assert_eq!(context.probe(None, tag(0), any, NEVER), Ok(None));
                let received = patiently(|| context.mrecv(claimed, Some((into, len / 2))));
                match context.wait(received, NEVER) {
                    Ok(Reply::Received(status)) => assert_eq!(status.delivered, len as u64 / 2),
                    other => panic!("seed {seed}: {other:?}"),
                }
                assert!(matches!(context.wait(sent, NEVER), Ok(Reply::Done(_))));
                let again = patiently(|| context.mrecv(claimed, None));
                assert_eq!(context.wait(again, NEVER), Ok(Reply::Refused(OpError::StaleToken)));
                // A cancelled receive gets a reply too.
                let open = patiently(|| context.recv(None, tag(99), Tag::ZERO, None));
                assert_eq!(context.cancel(open, NEVER), Ok(Cancelled::Removed));
                match context.wait(open, NEVER) {
                    Ok(Reply::Received(status)) => assert_eq!(status.outcome, Received::Cancelled),
                    other => panic!("seed {seed}: {other:?}"),
                }
                assert_eq!(context.cancel(open, NEVER), Err(WaitError::Op(OpError::StaleToken)));
            }
        });
    }
}

#[test]
fn an_expired_request_frees_its_slot_once_answered() {
    let Own { mut engine, peer, source, target, remote, .. } =
        own(Config::default(), [Loopback::<64>::new()], 4096);
    let matching = MatchStorage::new(&MATCHING, engine.config().contexts as usize * 4, 64, 4);
    engine.attach_matching(MATCHING, leak(matching).memory()).unwrap();
    let Rig { host, mut contexts, mut consumers, .. } = rig(1, Policy::BALANCED);
    let context = &mut contexts[0];
    let mut worker = Worker::new(&mut engine, &mut consumers, Policy::BALANCED);
    let late = |end| assert!(matches!(end, Err(WaitError::Deadline(_))), "{end:?}");
    for _ in 0..20 {
        let receive = context.recv(None, Tag::ZERO, Tag::ZERO, None).unwrap();
        late(context.quiet(peer, 1));
        late(context.wait_signal(target.at(0), Cmp::Eq, 0, None, 1).map(drop));
        late(context.probe(None, Tag::ZERO, Tag::ZERO, 1).map(drop));
        late(context.mprobe(None, Tag::ZERO, Tag::ZERO, 1).map(drop));
        late(context.cancel(receive, 1).map(drop));
        // The worker drops all replies, except the reply to a ticket that is still held.
        let put = context.put(source.at(0), 8, remote.at(64)).unwrap();
        late(context.wait(put, 1).map(drop));
        for _ in 0..20 {
            worker.turn(host);
        }
        assert_eq!(context.wait(put, 1), Ok(Reply::Done(0)));
        assert!(matches!(context.wait(receive, 1), Ok(Reply::Received(_))));
    }
}

#[test]
fn a_queue_waiting_for_silent_commands_is_woken() {
    /// A policy that parks until notified.
    const SLEEPY: Policy = Policy { park_ns: u64::MAX, ..Policy::EFFICIENT };
    with_worker(1, 1, SLEEPY, |_, context, at| {
        for n in 0..1000 {
            let at = at.source.at(8 * (n % 8));
            let command = Command::Fill { at, len: 8, pattern: n, width: 8 };
            assert_eq!(context.submit_silent(command), Ok(()));
            if n % 3 == 0 {
                let soon = LinuxHost::private().now_ns() + 20_000_000_000;
                assert_eq!(context.queue_mut().finish(soon), Ok(()), "{n}");
                assert_eq!(context.counts().deadline_wakes, 0, "{n}");
            }
        }
    });
}

#[test]
fn a_ticket_of_another_context_is_refused() {
    with_worker(1, 2, Policy::BALANCED, |i, context, at| {
        // The first requests of both contexts have the same number.
        let amo = Amo { op: AmoOp::Inc, width: 8, operand: 0, compare: 0 };
        let ticket = patiently(|| context.fetch(at.remote.at(8 * i as u64), amo));
        let theirs = exchange(i, ticket);
        assert_ne!(ticket, theirs);
        assert_eq!(context.test(theirs), Err(OpError::StaleToken));
        assert_eq!(context.wait(theirs, NEVER), Err(WaitError::Op(OpError::StaleToken)));
        assert_eq!(context.cancel(theirs, NEVER), Err(WaitError::Op(OpError::StaleToken)));
        assert_eq!(context.wait(ticket, NEVER), Ok(Reply::Done(0)));
        assert_eq!(context.test(ticket), Err(OpError::StaleToken));
    });
}

/// Exchanges tickets between two threads.
fn exchange(mine: usize, ticket: Ticket) -> Ticket {
    static TICKETS: [OnceLock<Ticket>; 2] = [const { OnceLock::new() }; 2];
    TICKETS[mine].set(ticket).unwrap();
    loop {
        match TICKETS[1 - mine].get() {
            Some(ticket) => return *ticket,
            None => thread::yield_now(),
        }
    }
}
