//! One message at a time: expected or unexpected, short, long, synchronous, truncated, claimed,
//! cancelled.

use fishplate_core::engine::protocol::{Cancelled, Received};
use fishplate_core::engine::{Issued, Notice};
use fishplate_core::error::OpError;
use fishplate_core::op::{Amo, AmoOp};
use fishplate_core::rail::Rail;

use super::rig::*;
use super::support::*;

/// Lengths around every limit.
const LENGTHS: [usize; 12] = [0, 1, 8, 9, 31, 32, 33, 64, 65, 128, 129, 5000];

#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    PostedFirst,
    Unexpected,
    Claimed,
}

fn exchange<R: Rail, const RAILS: usize>(own: &mut Own1<R, RAILS>, what: &str) {
    let mut n = 0u64;
    for len in LENGTHS {
        for when in [When::PostedFirst, When::Unexpected, When::Claimed] {
            for room in [len / 2, len.saturating_sub(1), len, len + 1, len + 500] {
                for sync in [false, true] {
                    n += 1;
                    let what = format!("{what}: {len} into {room}, {when:?}, sync {sync}");
                    let at = n % 7 * 3;
                    write(&own.engine, own.into.at(0), &vec![0xa5; len + 1000]);
                    let posted = (when == When::PostedFirst).then(|| own.recv(n, EXACT, at, room));
                    let issued = own.send_region(n, 8, len, sync).unwrap();
                    passes(&mut own.engine, 20);
                    let request = match (posted, when) {
                        (Some(request), _) => request,
                        (None, When::Claimed) => {
                            let mut claimed = None;
                            pass_until(&mut own.engine, &what, |e| {
                                claimed = e.mprobe(None, tag(n), EXACT).unwrap();
                                claimed.is_some()
                            });
                            let claimed = claimed.unwrap();
                            assert_eq!(claimed.envelope.len, len as u64);
                            assert_eq!(own.engine.probe(None, tag(n), EXACT), Ok(None), "{what}");
                            own.engine.mrecv(claimed, Some((own.into.at(at), room)), n).unwrap()
                        }
                        (None, _) => {
                            if sync && let Issued::Pending(token) = issued {
                                passes(&mut own.engine, 50);
                                assert_eq!(
                                    own.engine.test(token),
                                    Ok(None),
                                    "{what}: done before the match"
                                );
                            }
                            own.recv(n, EXACT, at, room)
                        }
                    };
                    let status = own.finish(request);
                    let want = len.min(room);
                    let outcome = if want < len { Received::Truncated } else { Received::Ok };
                    check(&status, outcome, n, len as u64, want as u64);
                    assert_eq!(status.envelope.unwrap().source, own.me);
                    assert_eq!((status.word, status.request), (n, request));
                    let got = own.bytes(0, len + 1000);
                    assert_eq!(
                        got[at as usize..at as usize + want],
                        pattern(8, len)[..want],
                        "{what}"
                    );
                    let outside = got[..at as usize].iter().chain(&got[at as usize + want..]);
                    assert!(outside.into_iter().all(|&b| b == 0xa5), "{what}: wrote outside");
                    if sync {
                        assert!(matches!(issued, Issued::Pending(_)), "{what}");
                    }
                    done(&mut own.engine, issued, &what);
                    assert_eq!(own.engine.test_recv(request), Err(OpError::StaleToken));
                }
            }
        }
    }
    assert_eq!(own.engine.peer_error(own.me), Ok(None));
}

#[test]
fn every_length_arrives_whole_or_truncated_over_loopback() {
    exchange(&mut loopback(SMALL), "loopback");
}

#[test]
fn every_length_arrives_whole_or_truncated_over_faulty_rails() {
    for seed in 1..4 {
        exchange(&mut faulty(SMALL, seed), "faulty");
    }
}

#[test]
fn a_cancelled_receive_completes_once_as_cancelled() {
    let mut own = loopback(SMALL);
    let first = own.recv(1, EXACT, 0, 8);
    let second = own.recv(1, EXACT, 8, 8);
    assert_eq!(own.engine.cancel(first), Ok(Cancelled::Removed));
    assert_eq!(own.engine.cancel(first), Ok(Cancelled::AlreadyMatched));
    own.send(1, &[9; 8]).unwrap();
    let status = own.finish(second);
    check(&status, Received::Ok, 1, 8, 8);
    let status = own.engine.test_recv(first).unwrap().unwrap();
    assert_eq!((status.outcome, status.envelope, status.delivered), (Received::Cancelled, None, 0));
    assert_eq!(own.engine.cancel(first), Err(OpError::StaleToken));
    assert_eq!(own.engine.cancel(second), Err(OpError::StaleToken));
    assert_eq!(own.engine.next_recv(), None);
}

#[test]
fn a_long_message_arrives_with_all_operation_slots_in_use() {
    let mut own = loopback(SMALL);
    let (me, into) = (own.me, own.into);
    let word = import(&mut own.engine, me, into).at(SIZE as u64 - 8);
    // The first message finds enough free operation slots.
    let before = own.recv(9, EXACT, 0, 5000);
    let sent = own.send_region(9, 0, 5000, false).unwrap();
    check(&own.finish(before), Received::Ok, 9, 5000, 5000);
    done(&mut own.engine, sent, "the send before");
    assert_eq!(own.engine.matching_stats().pulled, 0);
    let sent = pending(own.send_region(1, 0, 5000, false));
    // Fills the table of operations with completions. A waiter that only receives never takes them.
    let amo = Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 };
    for _ in 0..1000 {
        let _ = own.engine.amo(CX, word, amo, Notice::Report(2));
        own.engine.progress();
    }
    assert_eq!(own.engine.amo(CX, word, amo, Notice::Report(2)), Err(OpError::Again));
    let request = own.recv(1, EXACT, 0, 5000);
    check(&own.finish(request), Received::Ok, 1, 5000, 5000);
    assert_eq!(own.bytes(0, 5000), pattern(0, 5000));
    done(&mut own.engine, Issued::Pending(sent), "the send");
}
