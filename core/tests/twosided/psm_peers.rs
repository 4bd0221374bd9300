//! Tests the PSM layer with several peers: no peer delays another, and no peer leaves requests that
//! cannot complete.

use fishplate_core::engine::protocol::{MatchConfig, Payload};
use fishplate_core::engine::{Config, Notice};
use fishplate_core::error::OpError;
use fishplate_core::mem::{LocalId, PeerId, RailId, Untrusted};
use fishplate_core::psm::{Buffer, Code, FLAG_SENDSYNC, Mq, MqReq, MqState};
use fishplate_core::rail::Rail;
use fishplate_core::rail::loopback::Loopback;

use super::rig::*;
use super::support::*;

const ALL: u64 = u64::MAX;
const ALL3: [u32; 3] = [u32::MAX; 3];

struct Bench {
    mq: Mq<'static, 'static, Loopback<64>, 1>,
    /// The peers. All are this engine.
    peers: [PeerId; 3],
    out: LocalId,
    into: LocalId,
}

fn bench(requests: usize, matching: MatchConfig) -> Bench {
    let Own1 { mut engine, me, out, into } = queue(requests, matching);
    let peers = [me, engine.reserve_peer().unwrap(), engine.reserve_peer().unwrap()];
    for peer in &peers[1..] {
        engine.connect_peer(*peer, 1).unwrap();
    }
    let engine = Box::leak(Box::new(engine));
    let state = Box::leak(Box::new(MqState::new(CX)));
    Bench { mq: Mq::new(engine, state).unwrap(), peers, out, into }
}

impl Bench {
    fn from(&self, len: u32) -> Buffer {
        Buffer::Region(self.out.at(0), len)
    }

    fn to(&self, len: u32) -> Buffer {
        Buffer::Region(self.into.at(0), len)
    }

    fn send(&mut self, to: usize, tag: u64) -> MqReq {
        self.mq.isend(self.peers[to], 0, tag, self.from(8), tag).unwrap()
    }

    /// True if a receive from this peer with this tag completes soon.
    fn receives(&mut self, from: usize, tag: u32) -> bool {
        let req = self.mq.irecv2(Some(self.peers[from]), [tag, 0, 0], ALL3, self.to(8), 0).unwrap();
        (0..200).any(|_| {
            self.mq.poll();
            self.mq.test2(&mut Some(req)).is_ok_and(|status| status.error_code == Code::Ok)
        })
    }
}

/// Limits that give each stream room for one header and no payload.
const TIGHT: MatchConfig = MatchConfig { credits: 0, headers: 1, ..SMALL };

#[test]
fn a_send_without_room_delays_none_to_another_peer() {
    for blocked in [1, 5] {
        let mut bench = bench(32, TIGHT);
        for n in 0..1 + blocked {
            bench.send(0, n);
        }
        // Messages to peers 1 and 2 are received at once, while messages to peer 0 wait.
        for n in 0..3 {
            bench.send(1, 10 + n);
            bench.send(2, 20 + n);
        }
        for n in 0..3 {
            assert!(bench.receives(2, 20 + n), "message {n} to the third waits for the first");
            assert!(bench.receives(1, 10 + n), "message {n} to the second waits for the first");
        }
        // Sends to the same peer wait for each other.
        for n in 0..1 + blocked as u32 {
            let found =
                (0..200).find_map(|_| bench.mq.iprobe2(Some(bench.peers[0]), [0; 3], [0; 3]).ok());
            assert_eq!(found.unwrap().msg_tag[0], n);
            assert!(bench.receives(0, n), "{n} of {blocked}");
        }
    }
}

#[test]
fn probes_retry_deferred_sends() {
    for claim in [false, true] {
        let mut bench = bench(32, TIGHT);
        let (first, second) = (bench.send(0, 1), bench.send(0, 2));
        let into = bench.to(8);
        bench.mq.irecv(1, ALL, into, 0).unwrap();
        let found = (0..200).any(|_| match claim {
            false => bench.mq.iprobe(2, ALL).is_ok(),
            true => bench.mq.improbe(2, ALL).is_ok(),
        });
        assert!(found, "the second send was never tried again; claim {claim}");
        assert_eq!(bench.mq.test(&mut Some(first)).unwrap().error_code, Code::Ok);
        assert_eq!(bench.mq.test(&mut Some(second)), Err(Code::NoCompletions));
    }
}

/// Synchronous sends to a peer that receives nothing fill the table of operations. A short message
/// needs no operation, so other peers still get theirs, in order.
#[test]
fn a_short_send_needs_no_operation_while_another_send_is_deferred() {
    let mut bench = bench(16, MatchConfig { headers: 300, ..SMALL });
    let (silent, from, payload) =
        (bench.peers[0], bench.from(8), Payload::Region(bench.out.at(0), 8));
    let mut sends = (0..300)
        .map(|_| bench.mq.engine_mut().send_sync(CX, silent, tag(9), payload, Notice::Silent));
    assert!(sends.any(|sent| sent == Err(OpError::Again)), "the table is not full");
    bench.mq.isend(silent, FLAG_SENDSYNC, 9, from, 9).unwrap();
    // The last of these sends has no credit at first.
    let sends: Vec<_> = (1..=u64::from(SMALL.credits) + 1).map(|n| bench.send(1, n)).collect();
    for n in 1..=SMALL.credits + 1 {
        assert!(bench.receives(1, n), "message {n} waits for another peer");
    }
    for send in sends {
        let status = bench.mq.test2(&mut Some(send)).expect("sent at once");
        assert_eq!((status.error_code, status.nbytes), (Code::Ok, 8));
    }
}

/// A new send waits behind a deferred one, even if the receiver has room again. A pass by the
/// engine's owner, or by a probe that finds a message, frees room without retrying the deferred
/// send. With credits, only a send without a request can use the new credit at once.
#[test]
fn a_send_does_not_overtake_a_deferred_one() {
    let credits = MatchConfig { credits: 2, headers: 1, ..SMALL };
    for (matching, room) in [(TIGHT, 1), (credits, 3)] {
        let mut found_both = 0;
        for passes in 0..24 {
            for probes in [false, true] {
                let mut bench = bench(32, matching);
                for tag in 1..=room + 1 {
                    bench.send(0, tag);
                }
                let into = bench.to(8);
                bench.mq.irecv(1, ALL, into, 0).unwrap();
                for _ in 0..passes {
                    bench.mq.engine_mut().progress();
                }
                if probes {
                    bench.send(1, 9);
                    found_both += u32::from(bench.mq.iprobe(9, ALL).is_ok());
                }
                let (to, tag) = (bench.peers[0], room + 2);
                let from = bench.from(8);
                if !bench.mq.send2_at_once(to, [tag as u32, 0, 0], from) {
                    bench.send(0, tag);
                }
                for tag in 2..=room + 2 {
                    let any =
                        bench.mq.irecv2(Some(bench.peers[0]), [0; 3], [0; 3], into, 0).unwrap();
                    let status = bench.mq.wait2(&mut Some(any), &mut waiter(), SOON).unwrap();
                    let case = format!("{passes} passes, probes {probes}, room for {room}");
                    assert_eq!(u64::from(status.msg_tag[0]), tag, "{case}");
                }
            }
        }
        assert!(found_both > 0, "no probe found its message in the pass that it made");
    }
}

#[test]
fn deferred_sends_keep_their_order() {
    let mut bench = bench(64, TIGHT);
    let mut next = 1..;
    let mut send = |bench: &mut Bench, count| {
        for tag in next.by_ref().take(count) {
            bench.send(0, tag);
        }
    };
    send(&mut bench, 4);
    for tag in 1..30 {
        let any = bench.mq.irecv2(Some(bench.peers[0]), [0; 3], [0; 3], bench.to(8), 0).unwrap();
        let status = bench.mq.wait2(&mut Some(any), &mut waiter(), 1_000_000).unwrap();
        assert_eq!(status.msg_tag[0], tag);
        // The new sends wait behind those that are still deferred.
        send(&mut bench, tag as usize % 3);
    }
}

#[test]
fn a_claimed_message_of_a_removed_sender_fails() {
    let mut bench = bench(2, MatchConfig { credits: 8, ..SMALL });
    for _ in 0..5 {
        let sent = bench.send(1, 1);
        bench.mq.wait(&mut Some(sent), &mut waiter(), SOON).unwrap();
        bench.mq.poll();
        let (req, _) = bench.mq.improbe(1, ALL).expect("a request is free");
        let gone = bench.peers[1];
        bench.mq.engine_mut().remove_peer(gone).unwrap();
        let into = bench.to(8);
        assert_eq!(bench.mq.imrecv(into, 7, req), Ok(()));
        let status = bench.mq.test2(&mut Some(req)).unwrap();
        assert_eq!((status.error_code, status.context, status.nbytes), (Code::InternalErr, 7, 0));
        let engine = bench.mq.engine_mut();
        let next = engine.reserve_peer().unwrap();
        engine.connect_peer(next, 1).unwrap();
        bench.peers[1] = next;
    }
}

#[test]
fn a_claimed_message_of_a_failed_sender_has_a_receive_that_ends() {
    for (len, code) in [(8, Code::Ok), (5000, Code::InternalErr)] {
        let mut bench = bench(4, MatchConfig { credits: 8, ..SMALL });
        let (from, into) = (bench.from(len), bench.to(len));
        bench.mq.isend(bench.peers[1], 0, 1, from, 1).unwrap();
        bench.mq.poll();
        let (req, _) = bench.mq.improbe(1, ALL).unwrap();
        bench.fail(1);
        assert_eq!(bench.mq.imrecv(into, 7, req), Ok(()));
        bench.mq.poll();
        let status = bench.mq.test2(&mut Some(req)).unwrap();
        let nbytes = if code == Code::Ok { len } else { 0 };
        assert_eq!((status.error_code, status.context, status.nbytes), (code, 7, nbytes));
        assert_eq!((status.msg_peer, status.msg_length), (Some(bench.peers[1]), len));
    }
}

#[test]
fn finish_frees_the_claims_of_failed_and_removed_senders() {
    for (removed, len) in [(false, 8), (false, 5000), (true, 8), (true, 5000)] {
        let mut bench = bench(2, MatchConfig { credits: 8, ..SMALL });
        let (gone, from, into) = (bench.peers[1], bench.from(len), bench.to(8));
        let sent = bench.mq.isend(gone, 0, 1, from, 1).unwrap();
        bench.mq.poll();
        let (req, _) = bench.mq.improbe(1, ALL).unwrap();
        match removed {
            false => bench.fail(1),
            true => bench.mq.engine_mut().remove_peer(gone).unwrap(),
        }
        bench.mq.poll();
        assert!(bench.mq.finish(), "removed {removed}, {len} bytes");
        assert_eq!(bench.mq.test2(&mut Some(req)), Err(Code::ParamErr));
        assert_eq!(bench.mq.test2(&mut Some(sent)), Err(Code::ParamErr));
        for n in 0..2 {
            bench.mq.irecv(n, ALL, into, n).expect("all requests are free");
        }
    }
}

/// The deadline of a deferred send expires, and another send waits behind it.
#[test]
fn a_deferred_send_that_nobody_waits_for_is_still_sent_in_order() {
    let mut bench = bench(4, TIGHT);
    let (to, from, into) = (bench.peers[0], bench.from(8), bench.to(8));
    let first = bench.send(0, 1);
    let late = bench.mq.send(to, 0, 2, from, &mut waiter(), 2000);
    assert_eq!(late, Err(Code::NoCompletions));
    let last = bench.send(0, 3);
    for tag in 1..=3 {
        let any = bench.mq.irecv2(Some(to), [0; 3], [0; 3], into, 0).unwrap();
        let status = bench.mq.wait2(&mut Some(any), &mut waiter(), SOON).unwrap();
        assert_eq!(status.msg_tag[0], tag);
    }
    for req in [first, last] {
        bench.mq.wait(&mut Some(req), &mut waiter(), SOON).unwrap();
    }
    assert_eq!(bench.mq.ipeek(), Err(Code::NoCompletions));
    for n in 0..4 {
        bench.mq.irecv(n, ALL, into, n).expect("all requests are free");
    }
}

impl Bench {
    /// Returns the context words of all completions, in order.
    fn completed(&mut self) -> Vec<u64> {
        let mut contexts = vec![];
        while let Ok((req, status)) = self.mq.ipeek_dequeue() {
            contexts.push(status.context);
            self.mq.req_free(req).unwrap();
        }
        contexts
    }

    /// Makes a peer violate the protocol.
    fn fail(&mut self, peer: usize) {
        let mut ack = [0u8; 16];
        (ack[0], ack[11]) = (5, 0x40);
        // SAFETY: the test posts one message, which completes at once and so uses no context word.
        let rail = unsafe { self.mq.engine_mut().rail_unchecked(RailId(0)) }.unwrap();
        rail.post_message(self.peers[peer].peer(), &ack, Untrusted::from_slice(&[]), 0).unwrap();
        self.mq.poll();
    }
}

/// The engine's owner makes the passes, so requests complete between the calls of the queue.
#[test]
fn earlier_completions_are_reported_before_a_request_that_completes_at_once() {
    for claimed in [false, true] {
        let mut bench = bench(8, MatchConfig { credits: 8, ..SMALL });
        let (into, from) = (bench.to(8), bench.from(8));
        bench.send(1, 1);
        bench.mq.poll();
        let (req, _) = bench.mq.improbe(1, ALL).unwrap();
        bench.mq.irecv(2, ALL, into, 10).unwrap();
        bench.mq.isend(bench.peers[0], 0, 2, from, 11).unwrap();
        for _ in 0..10 {
            bench.mq.engine_mut().progress();
        }
        match claimed {
            true => {
                let gone = bench.peers[1];
                bench.mq.engine_mut().remove_peer(gone).unwrap();
                bench.mq.imrecv(into, 12, req).unwrap();
            }
            false => drop(bench.mq.isend(bench.peers[0], 0, 3, from, 12).unwrap()),
        }
        assert_eq!(bench.completed(), [1, 11, 10, 12], "claimed {claimed}");
    }
}

#[test]
fn deferred_sends_to_a_failed_peer_fail() {
    let mut bench = bench(16, TIGHT);
    for tag in 1..5 {
        bench.send(1, tag);
    }
    bench.send(0, 5);
    bench.fail(1);
    for _ in 0..20 {
        bench.mq.poll();
    }
    let mut ends = vec![];
    while let Ok((req, status)) = bench.mq.ipeek_dequeue() {
        ends.push((status.context, status.error_code));
        bench.mq.req_free(req).unwrap();
    }
    ends.sort_unstable_by_key(|&(tag, _)| tag);
    assert_eq!(ends, [1, 2, 3, 4].map(|tag| (tag, Code::InternalErr)));
}

#[test]
fn a_failed_peer_is_not_a_parameter_error() {
    let mut bench = bench(4, SMALL);
    let (gone, into, from) = (bench.peers[1], bench.to(8), bench.from(8));
    bench.fail(1);
    assert_eq!(bench.mq.isend(gone, 0, 1, from, 0), Err(Code::InternalErr));
    assert_eq!(bench.mq.irecv2(Some(gone), [1; 3], ALL3, into, 0), Err(Code::InternalErr));
    assert_eq!(bench.mq.iprobe2(Some(gone), [1; 3], ALL3), Err(Code::InternalErr));
    assert_eq!(bench.mq.improbe2(Some(gone), [1; 3], ALL3), Err(Code::InternalErr));
    bench.mq.engine_mut().remove_peer(gone).unwrap();
    assert_eq!(bench.mq.isend(gone, 0, 1, from, 0), Err(Code::ParamErr));
    assert_eq!(bench.mq.irecv2(Some(gone), [1; 3], ALL3, into, 0), Err(Code::ParamErr));
}

#[test]
fn state_of_an_earlier_queue_completes_no_request_of_a_later_one() {
    let Own1 { mut engine, me, out, into } = own1(Config::DEFAULT, SMALL, [Loopback::<64>::new()]);
    let to = Some((into.at(0), 8));
    let mut state = MqState::new(CX);
    Mq::new(&mut engine, &mut state).unwrap().irecv(1, ALL, to, 1).unwrap();
    let mut state = MqState::new(CX);
    let mut later = Mq::new(&mut engine, &mut state).unwrap();
    let other = later.irecv(2, ALL, Some((into.at(64), 8)), 2).unwrap();
    let sent = later.isend(me, 0, 1, Some((out.at(0), 8)), 3).unwrap();
    for _ in 0..20 {
        later.poll();
    }
    assert_eq!(later.test(&mut Some(sent)).unwrap().context, 3);
    assert_eq!(
        later.test(&mut Some(other)),
        Err(Code::NoCompletions),
        "ended by a message for another"
    );
    later.isend(me, 0, 2, Some((out.at(0), 8)), 4).unwrap();
    let status = later.wait(&mut Some(other), &mut waiter(), SOON).unwrap();
    assert_eq!((status.msg_tag, status.context), (2, 2));
}
