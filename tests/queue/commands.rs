//! Tests each kind of command on a queue, and its errors.

use fishplate_core::engine::Signal;
use fishplate_core::engine::command::Reply;
use fishplate_core::engine::protocol::{Cancelled, Received};
use fishplate_core::engine::tag::Tag;
use fishplate_core::error::OpError;
use fishplate_core::op::{Amo, AmoOp, Cmp, SignalOp};
use fishplate_core::queue::{Command, CommandError};
use fishplate_core::sync::pool::CreateError;

use crate::rig::{NOW, Places, bench, create, submit, tag};
use crate::support::{read, seeds, word, write};

#[test]
fn every_kind_of_command_works() {
    let mut bench = bench(1, 1);
    let Places { peer, source, target, remote } = bench.at;
    let len = 300_000;
    let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 251) as u8).collect();
    write(bench.engine(), source.at(0), &bytes);

    assert_eq!(
        bench.run(0, Command::Put { from: source.at(0), len, to: remote.at(0) }),
        Reply::Done(0)
    );
    assert_eq!(read(bench.engine(), target.at(0), len), bytes);
    let into = source.at(500_000);
    assert_eq!(bench.run(0, Command::Get { from: remote.at(0), len, into }), Reply::Done(0));
    assert_eq!(read(bench.engine(), into, len), bytes);
    // Copies more bytes than the worker copies per turn. The second copy moves bytes to a lower
    // address in the same region, so its source and target overlap.
    assert_eq!(
        bench.run(0, Command::Copy { from: source.at(0), len, to: target.at(400_001) }),
        Reply::Done(0)
    );
    assert_eq!(read(bench.engine(), target.at(400_001), len), bytes);
    assert_eq!(
        bench.run(0, Command::Copy { from: target.at(400_001), len, to: target.at(399_990) }),
        Reply::Done(0)
    );
    assert_eq!(read(bench.engine(), target.at(399_990), len), bytes);
    for (width, pattern) in
        [(1, 0xa5), (2, 0x1234), (4, 0x1234_5678), (8, 0x0123_4567_89ab_cdef_u64)]
    {
        let fill = Command::Fill { at: target.at(3), len: 300_000, pattern, width };
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
    let peer_copy = Command::PeerCopy { from: remote.at(0), via, len, to: remote.at(400_000) };
    assert_eq!(bench.run(0, peer_copy), Reply::Done(0));
    assert_eq!(read(bench.engine(), target.at(400_000), len), bytes);
    let signal = Signal { at: remote.at(1_000_000), op: SignalOp::Add, value: 5 };
    let put = Command::PutSignal { from: source.at(0), len: 64, to: remote.at(800_000), signal };
    assert_eq!(bench.run(0, put), Reply::Done(0));
    assert_eq!(word(bench.engine(), target.at(1_000_000)), 5);
    assert_eq!(bench.run(0, Command::Signal(signal)), Reply::Done(0));
    let amo = Amo { op: AmoOp::Add, width: 8, operand: 7, compare: 0 };
    assert_eq!(bench.run(0, Command::Fence(peer)), Reply::Done(0));
    assert_eq!(bench.run(0, Command::Amo { at: signal.at, amo, fetch: true }), Reply::Done(10));
    assert_eq!(bench.run(0, Command::Quiet(peer)), Reply::Done(0));
    let watch = Command::Watch { at: target.at(1_000_000), cmp: Cmp::Ge, value: 17, from: None };
    assert_eq!(bench.run(0, watch), Reply::Done(17));
    assert_eq!(bench.run(0, Command::Marker), Reply::Done(0));
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
            let recv = |len| {
                let (source, into) = (Some(peer), Some((into, len)));
                Command::Recv { source, tag: tag(n), ignore: Tag::ZERO, into }
            };
            let send = |sync| Command::Send {
                to: peer,
                tag: tag(n),
                from: Some((source.at(0), len)),
                sync,
            };
            let early = submit(&mut bench.queues[0], recv(len));
            // A command that depends on a receive begins once a message has arrived.
            let copy = Command::Copy { from: into, len: len.max(1), to: target.at(100_000) };
            let copy = create(&mut bench.queues[1], copy).after(&early).unwrap();
            let sent = submit(&mut bench.queues[1], send(true));
            let copied = bench.queues[1].submit(copy);
            bench.turns_until("a message", || copied.is_done() && sent.is_done());
            assert_eq!(copied.reply(), Some(Reply::Done(0)), "seed {seed}");
            assert_eq!(sent.reply(), Some(Reply::Done(len as u64)), "seed {seed}");
            let Some(Reply::Received(status)) = early.reply() else { panic!("{early:?}") };
            assert_eq!(
                (status.outcome, status.delivered),
                (Received::Ok, len as u64),
                "seed {seed}"
            );
            assert_eq!(read(bench.engine(), target.at(100_000), len), bytes, "seed {seed}");
            // A truncated message is a failure, so the dependent command does not begin.
            if len > 1 {
                let short = recv(1);
                let sent = submit(&mut bench.queues[1], send(false));
                let short = submit(&mut bench.queues[0], short);
                let after = create(&mut bench.queues[1], Command::Marker).after(&short).unwrap();
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
fn an_unmatched_receive_uses_one_slot_and_is_cancelled() {
    let mut bench = bench(1, 2);
    let recv = Command::Recv { source: None, tag: tag(99), ignore: Tag::ZERO, into: None };
    let open = submit(&mut bench.queues[0], recv);
    for _ in 0..100 {
        let fill = Command::Fill { at: bench.at.target.at(0), len: 8, pattern: 1, width: 8 };
        assert_eq!(bench.run(0, fill), Reply::Done(0));
    }
    assert!(!open.is_done());
    let foreign = bench.queues[1].cancel(&open);
    assert_eq!(foreign.err(), Some(CreateError::Refused(CommandError::OtherQueue)));
    let cancel = bench.queues[0].cancel(&open).unwrap();
    bench.turns_until("a cancelled receive", || open.is_done());
    assert_eq!(cancel.reply(), Some(Reply::Cancelled(Cancelled::Removed)));
    let Some(Reply::Received(status)) = open.reply() else { panic!("{open:?}") };
    assert_eq!((status.outcome, status.envelope), (Received::Cancelled, None));
    // A cancel is refused for a completed receive, and for a command that is not a receive.
    let marker = submit(&mut bench.queues[0], Command::Marker);
    for event in [&open, &marker] {
        let cancel = bench.queues[0].cancel(event).unwrap();
        bench.turns_until("a refusal", || cancel.is_done());
        assert_eq!(cancel.reply(), Some(Reply::Refused(OpError::StaleToken)));
    }
}

#[test]
fn invalid_arguments_are_refused_and_take_no_slot() {
    let mut bench = bench(1, 1);
    let Places { source, target, remote, .. } = bench.at;
    let queue = &mut bench.queues[0];
    for _ in 0..100 {
        let empty = queue.create(Command::Put { from: source.at(0), len: 0, to: remote.at(0) });
        assert_eq!(empty.err(), Some(CreateError::Refused(CommandError::Empty)));
        let odd = queue.create(Command::Fill { at: target.at(0), len: 6, pattern: 1, width: 4 });
        assert_eq!(
            odd.err(),
            Some(CreateError::Refused(CommandError::Pattern { width: 4, len: 6 }))
        );
        let odd = queue.create(Command::Fill { at: target.at(0), len: 6, pattern: 1, width: 3 });
        assert_eq!(
            odd.err(),
            Some(CreateError::Refused(CommandError::Pattern { width: 3, len: 6 }))
        );
        let bare = queue.create(Command::Cancel { slot: 0 });
        assert_eq!(bare.err(), Some(CreateError::Refused(CommandError::OtherQueue)));
    }
    let counts = queue.pool_counts();
    assert_eq!(counts.allocs, counts.local_frees);
    // The worker checks bounds before it writes anything.
    let before = read(bench.engine(), target.at(0), 1 << 20);
    let far = Command::Fill { at: target.at(8), len: 1 << 20, pattern: !0, width: 8 };
    assert!(matches!(bench.run(0, far), Reply::Refused(OpError::OutOfBounds { .. })));
    let far = Command::Copy { from: source.at(0), len: 1 << 20, to: target.at(1) };
    assert!(matches!(bench.run(0, far), Reply::Refused(OpError::OutOfBounds { .. })));
    let far =
        Command::PeerCopy { from: remote.at(1 << 20), via: source.at(0), len: 8, to: remote.at(0) };
    assert!(matches!(bench.run(0, far), Reply::Refused(OpError::OutOfBounds { .. })));
    assert_eq!(read(bench.engine(), target.at(0), 1 << 20), before);
    assert_eq!(bench.run(0, Command::Marker), Reply::Done(0));
}

#[test]
fn commands_dropped_before_submission_give_their_slots_back() {
    let mut bench = bench(1, 1);
    let queue = &mut bench.queues[0];
    for _ in 0..10 {
        let commands: Vec<_> = (0..16).map(|_| queue.create(Command::Marker).unwrap()).collect();
        assert_eq!(queue.create(Command::Marker).err(), Some(CreateError::Full));
        drop(commands);
    }
    assert_eq!(bench.run(0, Command::Marker), Reply::Done(0));
}
