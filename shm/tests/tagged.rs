//! Tagged messages over shared memory. Covers two engines in one process, with each kind of memory
//! and each way to reach it, and an engine that is its own peer.

use std::ptr::NonNull;

use fishplate_core::engine::protocol::{MatchConfig, Payload, Received, Request, Status};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{ContextId, Engine, Issued, Notice};
use fishplate_core::mem::{LocalId, PeerId, RailId, Region, RegionKind, Span};
use fishplate_core::op::{Fault, Outcome};
use fishplate_core::rail::Rail;
use fishplate_shm::{Segment, ShmConfig, ShmSetup, socket_pair};
use fishplate_sys::LinuxHost;

mod support;
use support::{CONFIG, MATCHING, TestRail, bytes, engine, leak, meet, rail};

const CX: ContextId = ContextId(0);
const SIZE: usize = 1 << 18;

/// One end: an engine, its peer, and a region for sends and receives.
struct End {
    engine: Engine<'static, TestRail, 1>,
    peer: PeerId,
    region: LocalId,
    at: NonNull<u8>,
}

fn private() -> Region {
    let words = leak(0u64, SIZE / 8);
    // SAFETY: the memory is leaked, and accessed only through raw copies and the engine.
    unsafe { Region::new(NonNull::from(&mut words[0]).cast(), SIZE, RegionKind::Private) }
}

fn segment() -> Region {
    let segment = Box::leak(Box::new(Segment::create(SIZE).unwrap()));
    // SAFETY: the segment is never dropped, and is accessed only through raw copies and the engine.
    unsafe { segment.region(0, SIZE) }.unwrap()
}

fn end(
    rail: TestRail,
    region: Region,
    attach: impl FnOnce(ShmSetup<'_, LinuxHost>, PeerId),
) -> End {
    let mut engine = engine(rail, CONFIG, MatchConfig { eager: 4096, ..MATCHING });
    let peer = engine.reserve_peer().unwrap();
    attach(engine.rail_mut(RailId(0)).unwrap(), peer);
    engine.connect_peer(peer, 1).unwrap();
    let at = region.ptr();
    let region = engine.register(region).unwrap();
    End { engine, peer, region, at }
}

/// Creates two connected ends. The handshake takes two threads. Afterwards this thread drives both
/// ends.
fn pair(config: &ShmConfig, region: fn() -> Region) -> Vec<End> {
    pair_of(config, config, region)
}

fn pair_of(near: &ShmConfig, far: &ShmConfig, region: fn() -> Region) -> Vec<End> {
    let (near, far) = (rail(near.clone()), rail(far.clone()));
    let [ours, theirs] = meet(&near, &far, socket_pair().unwrap());
    vec![
        end(near, region(), |mut rail, peer| rail.attach(peer.peer(), ours).unwrap()),
        end(far, region(), |mut rail, peer| rail.attach(peer.peer(), theirs).unwrap()),
    ]
}

fn own() -> Vec<End> {
    vec![end(rail(ShmConfig::default()), private(), |mut rail, peer| {
        rail.attach_self(peer.peer()).unwrap()
    })]
}

fn turns(ends: &mut [End], count: u32) {
    for _ in 0..count {
        for end in &mut *ends {
            end.engine.progress();
        }
    }
}

/// Sends messages of many lengths into buffers that fit or are too short. Posts the receive before
/// or after the message arrives. The sender's memory begins at offset 0, the receiver's buffer in
/// the middle of the region.
fn exchange(mut ends: Vec<End>, what: &str) {
    let half = (SIZE / 2) as u64;
    let lengths = [0, 1, 8, 9, 15, 16, 17, 47, 48, 4095, 4096, 4097, 100_000];
    let mut n = 0;
    for len in lengths {
        for posted_first in [true, false] {
            for room in [len / 2, len, len + 1] {
                for sync in [false, true] {
                    n += 1;
                    let what = format!(
                        "{what}: {len} into {room}, posted first {posted_first}, sync {sync}"
                    );
                    let (from, to) = (n % 2 % ends.len(), (n + 1) % 2 % ends.len());
                    let sent = bytes(n, len);
                    // SAFETY: both ranges lie inside the regions, and no transfer is in flight.
                    unsafe {
                        std::ptr::copy(sent.as_ptr(), ends[from].at.as_ptr(), len);
                        std::ptr::write_bytes(
                            ends[to].at.as_ptr().add(half as usize),
                            0xa5,
                            len + 64,
                        );
                    }
                    let post = |end: &mut End| {
                        let into = Some((end.region.at(half), room));
                        end.engine
                            .recv(Some(end.peer), Tag::from(n as u64), Tag::ZERO, into, 5)
                            .unwrap()
                    };
                    let early = posted_first.then(|| post(&mut ends[to]));
                    let End { engine, peer, region, .. } = &mut ends[from];
                    let payload = Payload::Region(region.at(0), len);
                    let send = if sync { Engine::send_sync } else { Engine::send };
                    let issued = send(
                        engine,
                        CX,
                        *peer,
                        Tag::from(n as u64),
                        payload,
                        Notice::Report(n as u64),
                    )
                    .unwrap();
                    turns(&mut ends, 3);
                    let request = early.unwrap_or_else(|| post(&mut ends[to]));
                    let status = finish(&mut ends, to, request, &what);
                    let want = len.min(room);
                    let outcome = if want < len { Received::Truncated } else { Received::Ok };
                    assert_eq!(
                        (status.outcome, status.delivered),
                        (outcome, want as u64),
                        "{what}"
                    );
                    assert_eq!(status.envelope.unwrap().len, len as u64, "{what}");
                    let mut got = vec![0u8; len + 64];
                    // SAFETY: the range lies inside the region, and the receive is complete.
                    unsafe {
                        std::ptr::copy(
                            ends[to].at.as_ptr().add(half as usize),
                            got.as_mut_ptr(),
                            len + 64,
                        );
                    }
                    assert_eq!(got[..want], sent[..want], "{what}");
                    assert!(got[want..].iter().all(|&byte| byte == 0xa5), "{what}: wrote outside");
                    if let Issued::Pending(token) = issued {
                        let mut end = None;
                        for _ in 0..10_000 {
                            turns(&mut ends, 1);
                            end = ends[from].engine.test(token).unwrap();
                            if end.is_some() {
                                break;
                            }
                        }
                        assert_eq!(end.expect(&what).outcome, Outcome::Done, "{what}");
                    }
                }
            }
        }
    }
    for end in &ends {
        assert_eq!(end.engine.peer_error(end.peer), Ok(None), "{what}");
    }
}

fn finish(ends: &mut [End], at: usize, request: Request, what: &str) -> Status {
    for _ in 0..100_000 {
        if let Some(status) = ends[at].engine.test_recv(request).unwrap() {
            return status;
        }
        turns(ends, 1);
    }
    panic!("{what}: nothing came");
}

#[test]
fn messages_from_segments_arrive_whole_or_truncated() {
    let ends = pair(&ShmConfig::default(), segment);
    exchange(ends, "segments");
}

#[test]
fn messages_from_private_memory_arrive_whole_or_truncated() {
    exchange(pair(&ShmConfig { read_from: 0, ..ShmConfig::default() }, private), "private, read");
    exchange(pair(&ShmConfig::default(), private), "private, either way");
}

#[test]
fn long_payloads_are_read_from_any_memory() {
    let config = ShmConfig { read_from: 50_000, ..ShmConfig::default() };
    for region in [private as fn() -> Region, segment] {
        let mut ends = pair(&config, region);
        for (len, want) in [(49_999, (1, 0)), (50_000, (2, 0))] {
            let End { engine, peer, region, .. } = &mut ends[1];
            let into = Some((region.at(0), len));
            let request = engine.recv(Some(*peer), Tag::ZERO, Tag::ALL, into, 0).unwrap();
            let End { engine, peer, region, .. } = &mut ends[0];
            engine
                .send(CX, *peer, Tag::ZERO, Payload::Region(region.at(0), len), Notice::Silent)
                .unwrap();
            finish(&mut ends, 1, request, "a long message");
            let stats = ends[1].engine.matching_stats();
            assert_eq!((stats.read, stats.pulled), want, "{len} bytes");
        }
    }
}

/// Sends bytes that are not registered. Returns the status of the receive, and whether the receiver
/// requested the payload in chunks.
fn send_span(ends: &mut [End], len: usize, room: usize) -> (Status, bool) {
    // Each MiB has different bytes.
    let byte = |n: usize| (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()[7];
    let sent = (0..len).map(byte).collect::<Vec<u8>>().leak();
    let got = vec![0xa5u8; len + 64].leak();
    // SAFETY: both buffers are leaked, and nothing else uses them meanwhile.
    let (from, into) = unsafe {
        let into = Span::new(NonNull::from(&mut got[0]), room);
        (Span::new(NonNull::from(&mut sent[0]), len), into)
    };
    let before = ends[1].engine.matching_stats().pulled;
    let End { engine, peer, .. } = &mut ends[1];
    let request = engine.recv(Some(*peer), Tag::ZERO, Tag::ALL, into, 0).unwrap();
    let End { engine, peer, .. } = &mut ends[0];
    let issued = engine.send(CX, *peer, Tag::ZERO, Payload::Span(from), Notice::Report(0)).unwrap();
    let what = format!("a span of {len} into {room}");
    let status = finish(ends, 1, request, &what);
    assert_eq!(status.delivered, len.min(room) as u64, "{what}");
    assert!(got[..len.min(room)] == sent[..len.min(room)], "{what}");
    assert!(got[room.min(len)..].iter().all(|&byte| byte == 0xa5), "{what}: wrote outside");
    if let Issued::Pending(token) = issued {
        let over = (0..100_000).any(|_| {
            turns(ends, 1);
            ends[0].engine.test(token).unwrap().is_some()
        });
        assert!(over, "{what}: the send is still open");
    }
    (status, ends[1].engine.matching_stats().pulled != before)
}

#[test]
fn long_payloads_that_are_not_registered_are_copied_by_the_kernel_if_it_permits_that() {
    let mut ends = pair(&ShmConfig::default(), private);
    let (near, peer) = (&ends[0].engine, ends[0].peer.peer());
    if !near.rail(RailId(0)).unwrap().reads_addresses(peer) {
        println!("SKIPPED: the kernel refuses process_vm_readv here");
        return;
    }
    for (len, room) in
        [(4097, 5000), (100_000, 100_000), (3 << 20, 4 << 20), (3_000_001, 2_000_001)]
    {
        let (status, pulled) = send_span(&mut ends, len, room);
        let outcome = if room < len { Received::Truncated } else { Received::Ok };
        assert_eq!((status.outcome, pulled), (outcome, false), "{len} into {room}");
    }
    let refusing = ShmConfig { force_staging: true, ..ShmConfig::default() };
    for (near, far) in [(refusing.clone(), ShmConfig::default()), (ShmConfig::default(), refusing)]
    {
        let mut ends = pair_of(&near, &far, private);
        for (len, room) in [(100_000, 100_000), (3 << 20, 1 << 20)] {
            assert!(send_span(&mut ends, len, room).1, "{len} bytes came although one end refuses");
        }
    }
}

#[test]
fn memory_of_a_sender_that_is_gone_is_not_taken_for_its_message() {
    let mut ends = pair(&ShmConfig::default(), private);
    let sent = vec![1u8; 100_000].leak();
    // SAFETY: `sent` is leaked, and stays unchanged until the sending engine is dropped.
    let from = unsafe { Span::new(NonNull::from(&mut sent[0]), 100_000) };
    let End { engine, peer, .. } = &mut ends[0];
    engine.send(CX, *peer, Tag::ZERO, Payload::Span(from), Notice::Silent).unwrap();
    turns(&mut ends, 3);
    drop(ends.remove(0));
    sent.fill(2);
    let End { engine, peer, region, .. } = &mut ends[0];
    let into = Some((region.at(0), 100_000));
    let request = engine.recv(Some(*peer), Tag::ZERO, Tag::ALL, into, 0).unwrap();
    let mut status = None;
    for _ in 0..1000 {
        engine.progress();
        if status.is_none() {
            status = engine.test_recv(request).unwrap();
        }
        engine.check_peers();
    }
    let status = status.expect("ended with its peer");
    assert!(matches!(status.outcome, Received::Failed(Fault::Peer(_))), "{status:?}");
}

#[test]
fn by_default_the_eager_limit_is_8_kib() {
    let rail = rail(ShmConfig::default());
    let mut engine = engine(rail, CONFIG, MatchConfig::DEFAULT);
    let peer = engine.reserve_peer().unwrap();
    engine.connect_peer(peer, 1).unwrap();
    assert_eq!(engine.eager_max(peer), 8192);
}

#[test]
fn messages_through_a_small_lane_arrive_whole_or_truncated() {
    let config = ShmConfig {
        force_staging: true,
        lane_cells: 64,
        max_message: 1024,
        ..ShmConfig::default()
    };
    exchange(pair(&config, private), "staged");
}

#[test]
fn messages_to_oneself_arrive_whole_or_truncated() {
    exchange(own(), "own");
}

#[test]
fn a_stream_faster_than_its_receiver_arrives_in_order() {
    let mut ends = pair(&ShmConfig::default(), private);
    let (mut sent, mut got) = (0u64, 0u64);
    while got < 3000 {
        for _ in 0..40 {
            let End { engine, peer, region, at } = &mut ends[0];
            let place = sent % 512 * 16;
            // SAFETY: the word lies inside the region, and the last send from this place is
            // complete.
            unsafe { at.as_ptr().add(place as usize).cast::<u64>().write(sent) };
            let payload = Payload::Region(region.at(place), 8);
            if engine.send(CX, *peer, Tag::from(sent), payload, Notice::Report(sent)).is_ok() {
                sent += 1;
            }
            while engine.next_completion().is_some() {}
        }
        turns(&mut ends, 1);
        for _ in 0..8.min(sent - got) {
            let End { engine, peer, region, .. } = &mut ends[1];
            let into = Some((region.at(0), 8));
            let request = engine.recv(Some(*peer), Tag::ZERO, Tag::ALL, into, 0).unwrap();
            let status = finish(&mut ends, 1, request, "a message that was sent");
            // SAFETY: the word lies inside the region, and the receive is complete.
            let word = unsafe { ends[1].at.as_ptr().cast::<u64>().read() };
            assert_eq!((status.envelope.unwrap().tag.lo, word), (got, got));
            got += 1;
        }
    }
    assert!(ends[0].engine.matching_stats().credits_exhausted > 0, "the receiver kept up");
}

#[test]
fn the_end_of_a_process_fails_operations_to_it() {
    let mut ends = pair(&ShmConfig::default(), private);
    let End { engine, peer, region, .. } = &mut ends[0];
    let into = Some((region.at(0), 8));
    let directed = engine.recv(Some(*peer), Tag::ZERO, Tag::ALL, into, 0).unwrap();
    let anybody = engine.recv(None, Tag::ZERO, Tag::ALL, into, 0).unwrap();
    let payload = Payload::Region(region.at(64), 100_000);
    let Issued::Pending(send) =
        engine.send(CX, *peer, Tag::ZERO, payload, Notice::Report(0)).unwrap()
    else {
        panic!("too long to be done at once");
    };
    drop(ends.pop());
    let end = &mut ends[0];
    for _ in 0..1000 {
        end.engine.progress();
        end.engine.check_peers();
    }
    let status = end.engine.test_recv(directed).unwrap().expect("ended with its peer");
    assert!(matches!(status.outcome, Received::Failed(Fault::Peer(_))), "{status:?}");
    assert_eq!(end.engine.test_recv(anybody), Ok(None));
    assert!(matches!(
        end.engine.test(send).unwrap().expect("ended").outcome,
        Outcome::Failed(Fault::Peer(_))
    ));
}
