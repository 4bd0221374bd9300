//! Workers that stop or are dropped before their queues are empty.

use std::sync::atomic::AtomicBool;

use fishplate_core::engine::Engine;
use fishplate_core::engine::command::Reply;
use fishplate_core::engine::lane::CommandConsumer;
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::worker::Worker;
use fishplate_core::queue::Command;
use fishplate_core::sync::event::Channels;
use fishplate_core::sync::spin::Policy;
use fishplate_sys::LinuxHost;

use crate::rig::{NEVER, Places, Rails, bench, create, leak, queue_of, scene, submit, tag};
use crate::support::Own;

#[test]
fn a_worker_with_an_open_receive_can_stop() {
    let Own { mut engine, peer, source, .. } = scene(1, 1);
    let (host, channels) = (&*leak(LinuxHost::private()), &*leak(Channels::new()));
    let stop = AtomicBool::new(true);
    let recv = |n| Command::Recv { source: None, tag: tag(n), ignore: Tag::ZERO, into: None };
    let run = |engine: &mut Engine<'static, Rails, 2>,
               consumers: &mut [CommandConsumer<'static>]| {
        let mut worker = Worker::new(engine, consumers, Policy::BALANCED);
        assert!(worker.run(host, &channels.send, None, &stop, NEVER));
    };
    let message =
        Command::Send { to: peer, tag: tag(1), from: Some((source.at(0), 0)), sync: true };

    let (mut queue, consumer) = queue_of::<4>(host, channels, 0);
    let mut consumers = [consumer];
    let open = submit(&mut queue, recv(1));
    run(&mut engine, &mut consumers);
    assert!(!open.is_done());
    drop(consumers);
    assert_eq!(open.reply(), Some(Reply::Abandoned));

    // The engine still has the first queue's receive and message. A receive in the same slot of
    // another queue must not get that reply.
    let (mut queue, consumer) = queue_of::<4>(host, channels, 0);
    let mut consumers = [consumer];
    let other = submit(&mut queue, recv(2));
    let sent = submit(&mut queue, message);
    run(&mut engine, &mut consumers);
    assert_eq!(sent.reply(), Some(Reply::Done(0)));
    assert!(!other.is_done());
}

#[test]
fn an_ended_command_releases_its_dependencies() {
    let mut bench = bench(4, 1);
    let Places { source, remote, .. } = bench.at;
    let refused = Command::Put { from: source.at(u64::MAX), len: 8, to: remote.at(0) };
    let host = bench.host;
    for goes in [false, true] {
        let (mut queue, consumer) = queue_of::<2>(host, leak(Channels::new()), 0);
        let first = submit(&mut queue, refused);
        let second = create(&mut queue, Command::Marker).after(&first).unwrap();
        let second = queue.submit(second);
        let mut consumers = [consumer];
        if !goes {
            Worker::new(bench.engine(), &mut consumers, Policy::BALANCED).turn(host);
        }
        drop(consumers);
        assert_eq!(queue.finish(NEVER), Ok(()));
        let want = if goes { Reply::Abandoned } else { Reply::Dependency };
        assert_eq!(second.reply(), Some(want));
        drop(first);
        assert!(queue.create(Command::Marker).is_ok(), "abandoned: {goes}");
        drop(second);
    }
}

#[test]
fn a_dropped_worker_leaves_nothing_waiting() {
    let mut bench = bench(3, 1);
    let Places { source, remote, .. } = bench.at;
    let put = Command::Put { from: source.at(0), len: 50_000, to: remote.at(0) };
    let host = bench.host;
    let channels = leak(Channels::new());
    let (mut queue, consumer) = queue_of::<16>(host, channels, 0);
    let mut consumers = [consumer];
    let begun = submit(&mut queue, put);
    let mut worker = Worker::new(bench.engine(), &mut consumers, Policy::BALANCED);
    worker.turn(host);
    let unseen = submit(&mut queue, Command::Marker);
    drop(consumers);
    assert_eq!(queue.finish(NEVER), Ok(()));
    assert!(begun.is_done());
    assert_eq!(unseen.reply(), Some(Reply::Abandoned));
    let after = submit(&mut queue, Command::Marker);
    assert_eq!(queue.wait(&after, NEVER), Ok(Reply::Abandoned));
    // The engine still has the put. The put's completion must not disturb the next worker.
    bench.turns_until("the engine", {
        let mut turns = 0;
        move || {
            turns += 1;
            turns > 1000
        }
    });
}
