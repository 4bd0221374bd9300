//! Tests that the PSM layer follows PSM's rules: two or three tag words, status fields, oldest
//! completion first, cancel before wait.

use fishplate_core::engine::protocol::MatchConfig;
use fishplate_core::engine::{Config, ContextId, Waiter};
use fishplate_core::mem::{LocalId, PeerId};
use fishplate_core::psm::{
    Buffer, Code, Copied, FLAG_SENDSYNC, Fast, Mq, MqReq, MqState, Opt, Status, Status2,
};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::sync::event::Park;
use fishplate_core::sync::host::{Host, Woken};
use fishplate_core::sync::spin::Policy;

use super::rig::*;
use super::support::*;

const ALL: u64 = u64::MAX;
const ALL3: [u32; 3] = [u32::MAX; 3];

struct Bench {
    mq: Mq<'static, 'static, Loopback<64>, 1>,
    me: PeerId,
    out: LocalId,
    into: LocalId,
}

fn bench(requests: usize, matching: MatchConfig) -> Bench {
    let Own1 { engine, me, out, into } = queue(requests, matching);
    let engine = Box::leak(Box::new(engine));
    let state = Box::leak(Box::new(MqState::new(CX)));
    Bench { mq: Mq::new(engine, state).unwrap(), me, out, into }
}

const ROOMY: MatchConfig = MatchConfig { credits: 32, ..SMALL };

impl Bench {
    fn from(&self, len: u32) -> Buffer {
        Buffer::Region(self.out.at(0), len)
    }

    fn to(&self, len: u32) -> Buffer {
        Buffer::Region(self.into.at(0), len)
    }

    fn wait(&mut self, req: MqReq) -> Status2 {
        self.mq.wait2(&mut Some(req), &mut waiter(), SOON).unwrap()
    }
}

#[test]
fn a_two_word_receive_accepts_any_third_word() {
    let mut bench = bench(16, ROOMY);
    let sent = bench.mq.isend2(bench.me, 0, [5, 6, 9], bench.from(8), 1).unwrap();
    let narrow = bench.mq.irecv(5 | 6 << 32, ALL, bench.to(8), 2).unwrap();
    let status = bench.wait(narrow);
    let want = Status2 {
        msg_peer: Some(bench.me),
        msg_tag: [5, 6, 9],
        msg_length: 8,
        nbytes: 8,
        error_code: Code::Ok,
        context: 2,
    };
    assert_eq!(status, want);
    assert_eq!(Status::from(status).msg_tag, 5 | 6 << 32);
    assert_eq!(bench.wait(sent), Status2 { context: 1, ..want });
    // All three words are compared if all three are selected.
    bench.mq.isend2(bench.me, 0, [5, 6, 8], bench.from(4), 3).unwrap();
    let mut other = Some(bench.mq.irecv2(Some(bench.me), [5, 6, 9], ALL3, bench.to(8), 4).unwrap());
    bench.mq.poll();
    assert_eq!(bench.mq.test2(&mut other), Err(Code::NoCompletions));
    let any = bench.mq.irecv2(None, [5, 0, 0], [u32::MAX, 0, 0], bench.to(8), 5).unwrap();
    assert_eq!(bench.wait(any).msg_tag, [5, 6, 8]);
}

#[test]
fn truncation_reports_both_lengths() {
    for (len, posted_first) in [(8, true), (8, false), (5000, true), (5000, false)] {
        let mut bench = bench(16, ROOMY);
        let early = posted_first.then(|| bench.mq.irecv(1, ALL, bench.to(4), 7).unwrap());
        let send = bench.mq.isend(bench.me, 0, 1, bench.from(len), 8).unwrap();
        for _ in 0..10 {
            bench.mq.poll();
        }
        let recv = early.unwrap_or_else(|| bench.mq.irecv(1, ALL, bench.to(4), 7).unwrap());
        let status = bench.wait(recv);
        let got = (status.error_code, status.msg_length, status.nbytes, status.context);
        assert_eq!(got, (Code::Truncation, len, 4, 7), "{len} {posted_first}");
        assert_eq!(bench.wait(send).error_code, Code::Ok);
    }
}

#[test]
fn peek_returns_the_oldest_completed_request_and_leaves_it() {
    let mut bench = bench(16, ROOMY);
    assert_eq!(bench.mq.ipeek(), Err(Code::NoCompletions));
    let long = bench.mq.irecv(1, ALL, bench.to(5000), 1).unwrap();
    let short = bench.mq.irecv(2, ALL, Some((bench.into.at(6000), 8)), 2).unwrap();
    let first = bench.mq.isend(bench.me, 0, 1, bench.from(5000), 3).unwrap();
    let second = bench.mq.isend(bench.me, 0, 2, bench.from(8), 4).unwrap();
    // The short send completes at once. The long send completes last.
    let mut order = vec![];
    for _ in 0..4 {
        while bench.mq.ipeek().is_err() {}
        let (req, status) = bench.mq.ipeek2().unwrap();
        assert_eq!(bench.mq.ipeek2(), Ok((req, status)), "a look changes nothing");
        order.push(req);
        let mut req = Some(req);
        assert_eq!(bench.mq.test2(&mut req).unwrap(), status);
        assert_eq!(req, None);
    }
    let place = |req| order.iter().position(|&other| other == req).unwrap();
    assert_eq!(place(second), 0);
    assert!(place(short) < place(long) && place(long) < place(first), "{order:?}");
    assert_eq!(bench.mq.ipeek(), Err(Code::NoCompletions));
}

#[test]
fn a_send_at_once_has_completed_behind_all_earlier_completions() {
    let mut bench = bench(3, ROOMY);
    let (from, to) = (bench.from(8), bench.to(8));
    let early = bench.mq.irecv2(None, [1, 2, 3], ALL3, to, 1).unwrap();
    let late = bench.mq.irecv2(None, [9, 9, 9], ALL3, to, 2).unwrap();
    assert!(bench.mq.oldest().is_none());
    let refused = bench.mq.isend2_at_once(bench.me, [1, 2, 3], bench.from(5000), 3);
    assert_eq!((refused, bench.mq.stats().tx_num), (None, 0), "too long to be sent at once");
    let first = bench.mq.isend2_at_once(bench.me, [1, 2, 3], from, 3).unwrap();
    let full = bench.mq.isend2_at_once(bench.me, [1, 2, 3], from, 4);
    assert_eq!((full, bench.mq.stats().tx_num), (None, 1), "no request is free");
    assert_eq!(bench.mq.oldest().map(|oldest| oldest.status().context), Some(3));
    assert_eq!(bench.mq.test2_with(first, |ended| ended.msg_tag()), Some([1, 2, 3]));
    assert_eq!(bench.mq.test2_with(first, |_| panic!("taken twice")), None::<()>);
    assert_eq!(bench.mq.test2(&mut Some(first)), Err(Code::ParamErr));
    while bench.mq.engine_mut().progress() != 0 {}
    let second = bench.mq.isend2_at_once(bench.me, [7, 7, 7], from, 4).unwrap();
    for (req, context) in [(early, 1), (second, 4)] {
        assert_eq!(bench.mq.oldest().map(|oldest| oldest.req()), Some(req));
        assert_eq!(bench.mq.test2_with(req, |ended| ended.context()), Some(context));
    }
    assert_eq!(bench.mq.test2_with(late, |_| panic!("incomplete")), None::<()>);
    assert_eq!(bench.mq.test2(&mut Some(late)), Err(Code::NoCompletions));
    assert_eq!(bench.mq.cancel(&Some(late)), Ok(()));
    assert_eq!(bench.mq.test2_with(late, |ended| ended.msg_peer()), Some(None));
}

#[test]
fn a_send_at_once_that_the_rail_refuses_leaves_no_request() {
    let Own1 { mut engine, me, out, .. } = own1(Config::DEFAULT, ROOMY, [Loopback::<8>::new()]);
    let mut state = MqState::new(CX);
    let mut mq = Mq::new(&mut engine, &mut state).unwrap();
    let from = Buffer::Region(out.at(0), 8);
    for _ in 0..2 {
        let mut sent = vec![];
        while let Some(req) = mq.isend2_at_once(me, [1, 2, 3], from, 0) {
            sent.push(req);
        }
        assert!((1..=8).contains(&sent.len()), "the rail is full after {} sends", sent.len());
        assert_eq!(mq.stats().tx_num % sent.len() as u64, 0);
        for req in sent {
            assert_eq!(mq.oldest().map(|oldest| oldest.req()), Some(req));
            assert_eq!(mq.test2(&mut Some(req)).map(|status| status.nbytes), Ok(8));
        }
        assert!(mq.oldest().is_none());
        while mq.engine_mut().progress() != 0 {}
    }
}

#[test]
fn a_queue_of_a_context_that_does_not_exist_sends_nothing() {
    let Own1 { mut engine, me, out, into } = own1(Config::DEFAULT, ROOMY, [Loopback::<64>::new()]);
    let mut state = MqState::new(ContextId(1));
    assert!(Mq::new(&mut engine, &mut state).is_err());
    // `resume` does not check.
    let mut mq = Mq::resume(&mut engine, &mut state);
    let from = Buffer::Region(out.at(0), 8);
    assert_eq!(mq.isend2_at_once(me, [1, 2, 3], from, 0), None);
    assert_eq!(mq.isend2(me, 0, [1, 2, 3], from, 0), Err(Code::ParamErr));
    assert!(!mq.send2_at_once(me, [1, 2, 3], from));
    let receive = mq.irecv2(None, [1, 2, 3], ALL3, Buffer::Region(into.at(0), 8), 0).unwrap();
    assert_eq!(mq.iprobe2(Some(me), [1, 2, 3], ALL3), Err(Code::NoCompletions));
    assert_eq!(mq.ipeek2(), Err(Code::NoCompletions));
    assert_eq!(mq.cancel(&Some(receive)), Ok(()));
    assert!(mq.finish());
}

#[test]
fn a_dequeued_request_is_freed_once() {
    let mut bench = bench(2, ROOMY);
    bench.mq.isend(bench.me, 0, 1, bench.from(8), 1).unwrap();
    let (req, status) = bench.mq.ipeek_dequeue().unwrap();
    assert_eq!(status.context, 1);
    assert_eq!(bench.mq.test2(&mut Some(req)), Err(Code::ParamErr));
    assert_eq!(bench.mq.req_free(req), Ok(()));
    assert_eq!(bench.mq.req_free(req), Err(Code::ParamErr));
    assert_eq!(bench.mq.test2(&mut Some(req)), Err(Code::ParamErr));
    assert_eq!(bench.mq.test2(&mut None), Ok(Status2::EMPTY), "no request is done at once");
}

#[test]
fn a_cancelled_receive_completes_and_must_be_taken() {
    let mut bench = bench(4, ROOMY);
    let recv = bench.mq.irecv(1, ALL, bench.to(8), 11).unwrap();
    assert_eq!(bench.mq.cancel(&Some(recv)), Ok(()));
    assert_eq!(bench.mq.cancel(&Some(recv)), Err(Code::NoCompletions));
    assert_eq!(bench.mq.ipeek2().unwrap().0, recv);
    assert_eq!(bench.wait(recv), Status2 { context: 11, ..Status2::EMPTY });
    assert_eq!(bench.mq.cancel(&Some(recv)), Err(Code::ParamErr));
    assert_eq!(bench.mq.cancel(&None), Err(Code::NoCompletions));
    let send = bench.mq.isend(bench.me, FLAG_SENDSYNC, 1, bench.from(8), 0).unwrap();
    assert_eq!(bench.mq.cancel(&Some(send)), Err(Code::ParamErr), "a send");
    bench.mq.poll();
    let matched = bench.mq.irecv(1, ALL, bench.to(8), 12).unwrap();
    assert_eq!(bench.mq.cancel(&Some(matched)), Err(Code::NoCompletions));
    assert_eq!(bench.wait(matched).nbytes, 8);
    bench.wait(send);
}

#[test]
fn a_synchronous_send_to_oneself_completes_with_its_match() {
    let mut bench = bench(4, ROOMY);
    let send = bench.mq.isend(bench.me, FLAG_SENDSYNC, 1, bench.from(8), 0).unwrap();
    for _ in 0..100 {
        bench.mq.poll();
        assert_eq!(bench.mq.test(&mut Some(send)), Err(Code::NoCompletions));
    }
    assert_eq!(bench.mq.isend(bench.me, 0x80, 1, bench.from(8), 0), Err(Code::ParamErr));
    let recv = bench.mq.irecv(1, ALL, bench.to(8), 0).unwrap();
    bench.wait(recv);
    assert_eq!(bench.wait(send).error_code, Code::Ok);
}

#[test]
fn probes_find_claim_and_fill_every_field() {
    let mut bench = bench(8, ROOMY);
    assert_eq!(bench.mq.iprobe(1, ALL), Err(Code::NoCompletions));
    for n in 0..3 {
        bench.mq.isend2(bench.me, 0, [1, 0, n], bench.from(8 + n), 0).unwrap();
    }
    let want = Status2 {
        msg_peer: Some(bench.me),
        msg_tag: [1, 0, 0],
        msg_length: 8,
        nbytes: 8,
        error_code: Code::Ok,
        context: 0,
    };
    assert_eq!(bench.mq.iprobe2(None, [1, 0, 0], [1, 0, 0]), Ok(want));
    let (first, status) = bench.mq.improbe2(Some(bench.me), [1, 0, 0], [u32::MAX, 0, 0]).unwrap();
    assert_eq!(status, want);
    let (second, status) = bench.mq.improbe(1, ALL).unwrap();
    assert_eq!(status.msg_length, 9);
    // Claimed messages may be received in any order, each once. The message's handle then becomes
    // the receive's handle.
    assert_eq!(bench.mq.test2(&mut Some(second)), Err(Code::ParamErr));
    bench.mq.imrecv(bench.to(64), 21, second).unwrap();
    assert_eq!(bench.mq.imrecv(bench.to(64), 21, second), Err(Code::ParamErr));
    bench.mq.imrecv(bench.to(64), 20, first).unwrap();
    assert_eq!(
        (bench.wait(first).msg_tag, bench.mq.iprobe(1, ALL).unwrap().msg_length),
        ([1, 0, 0], 10)
    );
    assert_eq!((bench.wait(second).context, bench.mq.stats().rx_sys_num), (21, 3));
}

#[test]
fn finish_discards_claimed_messages_and_frees_every_request() {
    for len in [8, 5000] {
        let mut bench = bench(3, ROOMY);
        let send = bench.mq.isend(bench.me, FLAG_SENDSYNC, 1, bench.from(len), 0).unwrap();
        bench.mq.isend(bench.me, 0, 2, bench.from(8), 0).unwrap();
        let (dequeued, _) = bench.mq.ipeek_dequeue().unwrap();
        let (claimed, _) = bench.mq.improbe(1, ALL).unwrap();
        assert!(!bench.mq.finish(), "the first send is open");
        for _ in 0..10 {
            bench.mq.poll();
        }
        let status = bench.mq.test2(&mut Some(send)).expect("its message was discarded");
        assert_eq!(status.error_code, Code::Ok);
        assert!(bench.mq.finish());
        for req in [claimed, dequeued] {
            assert_eq!(bench.mq.test2(&mut Some(req)), Err(Code::ParamErr));
        }
        for n in 7..10 {
            bench.mq.irecv(n, ALL, bench.to(8), n).expect("all requests are free");
        }
    }
}

#[test]
fn a_stale_handle_does_not_name_a_receive_of_the_engine_in_its_slot() {
    let mut bench = bench(1, ROOMY);
    let req = bench.mq.isend(bench.me, 0, 1, bench.from(8), 0).unwrap();
    bench.wait(req);
    let into = Some((bench.into.at(0), 8));
    let receive = bench.mq.engine_mut().recv(None, tag(9), EXACT, into, 3).unwrap();
    assert_eq!(receive.to_raw() as u32, req.to_raw() as u32, "another slot");
    for stale in [req, MqReq::from_raw(req.to_raw())] {
        assert_eq!(bench.mq.test2(&mut Some(stale)), Err(Code::ParamErr));
        assert_eq!(bench.mq.cancel(&Some(stale)), Err(Code::ParamErr));
        assert_eq!(bench.mq.req_free(stale), Err(Code::ParamErr));
        assert_eq!(bench.mq.imrecv(bench.to(8), 4, stale), Err(Code::ParamErr));
    }
    assert_eq!(bench.mq.engine_mut().test_recv(receive), Ok(None));
}

#[test]
fn deferred_sends_keep_order_and_full_requests_are_an_error() {
    // The receiver stores at most four headers and no payload, so most of these sends wait.
    let mut bench = bench(40, MatchConfig { credits: 0, headers: 4, ..SMALL });
    for n in 0..30u32 {
        bench.mq.isend2(bench.me, 0, [7, n, 0], bench.from(8), n as u64).unwrap();
    }
    let requests: Vec<_> = (0..10)
        .map(|n| bench.mq.irecv2(None, [7, 0, 0], [u32::MAX, 0, 0], bench.to(8), n).unwrap())
        .collect();
    assert_eq!(bench.mq.irecv(7, ALL, bench.to(8), 0), Err(Code::NoMemory));
    assert_eq!(bench.mq.isend(bench.me, 0, 7, bench.from(8), 0), Err(Code::NoMemory));
    for (n, req) in requests.into_iter().enumerate() {
        assert_eq!(bench.wait(req).msg_tag, [7, n as u32, 0]);
    }
    for n in 10..30 {
        let req = bench.mq.irecv2(None, [7, 0, 0], [u32::MAX, 0, 0], bench.to(8), n).unwrap();
        assert_eq!(bench.wait(req).msg_tag, [7, n as u32, 0]);
    }
    let mut ends = 0;
    for _ in 0..100 {
        while let Ok((req, status)) = bench.mq.ipeek_dequeue() {
            assert_eq!((status.context, status.error_code), (ends, Code::Ok));
            bench.mq.req_free(req).unwrap();
            ends += 1;
        }
    }
    assert_eq!((ends, bench.mq.stats().tx_num), (30, 30));
}

#[test]
fn a_short_send_without_a_credit_counts_as_rendezvous() {
    for (credits, eager, fetched) in [(32, 3, 0), (2, 2, 1), (0, 0, 3)] {
        let mut bench = bench(16, MatchConfig { credits, ..ROOMY });
        for n in 0..3 {
            bench.mq.isend(bench.me, 0, n, bench.from(8), n).unwrap();
        }
        let stats = bench.mq.stats();
        assert_eq!(
            (stats.tx_num, stats.tx_eager_num, stats.tx_rndv_num),
            (3, eager, fetched),
            "{credits}"
        );
        assert_eq!(
            (stats.tx_eager_bytes, stats.tx_rndv_bytes),
            (8 * eager, 8 * fetched),
            "{credits}"
        );
    }
}

/// A parker that counts how often it parks.
struct Bed(std::cell::Cell<u32>);

impl Park for Bed {
    fn park<H: Host + ?Sized>(
        &self,
        host: &H,
        _: u64,
        work: impl FnOnce() -> bool,
    ) -> Option<Woken> {
        self.0.set(self.0.get() + 1);
        host.now_ns();
        (!work()).then_some(Woken::Called)
    }
}

#[test]
fn a_wait_sleeps_on_its_wait_object_unless_a_send_is_deferred() {
    for deferred in [false, true] {
        let mut bench = bench(8, MatchConfig { credits: 0, headers: 1, ..SMALL });
        for n in 0..1 + u64::from(deferred) {
            bench.mq.isend(bench.me, 0, 5, bench.from(8), n).unwrap();
        }
        let never = bench.mq.irecv(1, ALL, bench.to(8), 0).unwrap();
        let bed = Bed(0.into());
        let mut waiter = Waiter::new(host(), &bed, Policy::BALANCED);
        let deadline = host().now_ns().saturating_add(100_000);
        let end = bench.mq.wait2(&mut Some(never), &mut waiter, deadline);
        assert_eq!(end, Err(Code::NoCompletions));
        assert_eq!(bed.0.get() > 0, !deferred, "slept {} times", bed.0.get());
    }
}

#[test]
fn a_blocking_send_returns_when_its_buffer_is_free() {
    let mut bench = bench(4, ROOMY);
    let (me, from) = (bench.me, bench.from(8));
    bench.mq.send(me, 0, 1, from, &mut waiter(), SOON).unwrap();
    // No receive matches the send, so its wait expires. Its slot is freed when it completes.
    let late = bench.mq.send(me, FLAG_SENDSYNC, 2, from, &mut waiter(), 2000);
    assert_eq!(late, Err(Code::NoCompletions));
    let recv = bench.mq.irecv(2, ALL, bench.to(8), 0).unwrap();
    bench.wait(recv);
    for _ in 0..100 {
        bench.mq.poll();
    }
    assert_eq!(bench.mq.ipeek(), Err(Code::NoCompletions));
}

#[test]
fn the_rendezvous_threshold_can_be_changed_at_any_time() {
    let mut bench = bench(16, ROOMY);
    let most = bench.mq.getopt(Opt::RndvShmSz);
    assert_eq!(bench.mq.getopt(Opt::RndvHfiSz), most);
    for (value, fetched) in [(7, 1), (8, 0), (0, 1), (u32::MAX, 0)] {
        bench.mq.setopt(Opt::RndvHfiSz, value);
        assert_eq!(bench.mq.getopt(Opt::RndvShmSz), value.min(most));
        let before = bench.mq.engine_mut().matching_stats().read;
        let recv = bench.mq.irecv(1, ALL, bench.to(8), 1).unwrap();
        let send = bench.mq.isend(bench.me, 0, 1, bench.from(8), 2).unwrap();
        assert_eq!(bench.wait(recv).nbytes, 8);
        bench.wait(send);
        assert_eq!(bench.mq.engine_mut().matching_stats().read - before, fetched, "at {value}");
    }
    bench.mq.setopt(Opt::MaxSysbufMbytes, 3);
    assert_eq!(bench.mq.getopt(Opt::MaxSysbufMbytes), 3);
    for (key, option) in
        [(0x301, Opt::RndvHfiSz), (0x302, Opt::RndvShmSz), (0x303, Opt::MaxSysbufMbytes)]
    {
        assert_eq!(Opt::from_key(key), Ok(option));
    }
    assert_eq!(Opt::from_key(0x304), Err(Code::ParamErr));
}

#[test]
fn completions_are_offered_oldest_first_and_unaccepted_ones_stay() {
    let mut bench = bench(8, ROOMY);
    // Seven sends on a queue with eight slots. Each send completes at once.
    let send = |bench: &mut Bench, context| {
        let from = bench.from(8);
        bench.mq.fp_msg(Fast::Send(bench.me, 0), [1, 0, 0], from, context).unwrap()
    };
    let requests: Vec<_> = (0..7).map(|context| send(&mut bench, context)).collect();
    let answers = [Copied::Stored, Copied::Skipped, Copied::Stored, Copied::Refused];
    let mut seen = vec![];
    let stored = bench.mq.ipeek_dequeue_multi(8, |req, status, entry| {
        seen.push((req, status.context, entry));
        answers[seen.len() - 1]
    });
    assert_eq!(stored, 2);
    assert_eq!(seen, [0, 1, 2, 3].map(|n| (requests[n], n as u64, [0, 1, 1, 2][n])));
    // If the callback accepts a request, the request is finished. If the callback refuses it, it
    // stays the oldest.
    assert_eq!(bench.mq.test(&mut Some(requests[1])), Err(Code::ParamErr));
    let mut contexts = vec![];
    let mut offer = |bench: &mut Bench, entries, answer| {
        bench.mq.ipeek_dequeue_multi(entries, |_, status, _| {
            contexts.push(status.context);
            answer
        })
    };
    assert_eq!(offer(&mut bench, 8, Copied::StoredLast), 1);
    assert_eq!(offer(&mut bench, 0, Copied::Stored), 0);
    assert_eq!(offer(&mut bench, 2, Copied::Stored), 2);
    assert_eq!(offer(&mut bench, 2, Copied::Stored), 1);
    assert_eq!(offer(&mut bench, 2, Copied::Stored), 0);
    assert_eq!(contexts, [3, 4, 5, 6]);
    // Without a completion the call polls. The messages have arrived, so each receive matches at
    // once.
    let into = bench.to(8);
    let recv = bench.mq.fp_msg(Fast::Receive(Some(bench.me), ALL3), [1, 0, 0], into, 9).unwrap();
    let mut got = None;
    while got.is_none() {
        bench.mq.ipeek_dequeue_multi(1, |req, status, _| {
            got = Some((req, status.context, status.nbytes));
            Copied::Stored
        });
    }
    assert_eq!(got, Some((recv, 9, 8)));
}
