//! Tests engines over [`GpuRail`], with device memory at either end or at both ends. The device is
//! host memory, so that the tests can inspect it. The engines treat it as device memory.

use std::ptr::NonNull;
use std::thread;
use std::time::{Duration, Instant};

use fishplate_core::engine::protocol::{Payload, Received};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{ContextId, Engine, HANDLE_MAX, Issued, Notice, Signal, Waiter};
use fishplate_core::error::{OpError, WaitError};
use fishplate_core::mem::{LocalId, PeerId, RailId, Region, RegionKind, RemoteId};
use fishplate_core::op::{Amo, AmoOp, Cmp, Outcome, SignalOp};
use fishplate_core::sync::host::Host;
use fishplate_core::sync::spin::Policy;
use fishplate_gpu::{GpuConfig, GpuSetup, HostDevice};
use fishplate_shm::{ShmConfig, socket_pair};
use fishplate_sys::LinuxHost;

mod support;
use support::{CONFIG, MATCHING, TestGpuRail, bytes, engine, gpu_rail, leak, meet_gpu};

const CX: ContextId = ContextId(0);
const SIZE: usize = 1 << 18;

/// Memory of one end. The other end has imported it.
#[derive(Clone, Copy)]
struct Part {
    at: NonNull<u8>,
    local: LocalId,
    remote: Option<RemoteId>,
}

// SAFETY: the memory is not tied to a thread, and one thread at a time uses an end.
unsafe impl Send for Part {}

struct End {
    engine: Engine<'static, TestGpuRail, 1>,
    peer: PeerId,
    host: Part,
    device: Part,
}

impl Part {
    fn set(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= SIZE);
        // SAFETY: the range lies inside the region, and no transfer uses it.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.at.as_ptr().add(at), bytes.len()) };
    }

    fn get(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= SIZE);
        let mut bytes = vec![0; len];
        // SAFETY: the range lies inside the region, and no transfer uses it.
        unsafe { std::ptr::copy(self.at.as_ptr().add(at), bytes.as_mut_ptr(), len) };
        bytes
    }
}

fn end(
    mut rail: TestGpuRail,
    attach: impl FnOnce(GpuSetup<'_, HostDevice, LinuxHost>, PeerId),
) -> End {
    let device = rail.alloc(SIZE as u64).unwrap();
    let mut engine = engine(rail, CONFIG, MATCHING);
    let peer = engine.reserve_peer().unwrap();
    attach(engine.rail_mut(RailId(0)).unwrap(), peer);
    engine.connect_peer(peer, 1).unwrap();
    let words = leak(0u64, SIZE / 8);
    let (host, device) =
        (NonNull::from(&mut words[0]).cast::<u8>(), NonNull::new(device.0 as *mut u8).unwrap());
    let mut part = |at: NonNull<u8>, kind| {
        // SAFETY: the memory is leaked, or freed with the device. It is accessed only through raw
        // copies and the engine.
        let local = engine.register(unsafe { Region::new(at, SIZE, kind) }).unwrap();
        Part { at, local, remote: None }
    };
    let (host, device) =
        (part(host, RegionKind::Private), part(device, RegionKind::Device { ordinal: 0 }));
    End { engine, peer, host, device }
}

/// Creates two connected ends. The handshake takes two threads. Afterwards this thread drives both
/// ends.
fn pair(config: &GpuConfig) -> [End; 2] {
    let make = || gpu_rail(ShmConfig::default(), config.clone());
    let (near, far) = (make(), make());
    let [ours, theirs] = meet_gpu(&near, &far, socket_pair().unwrap());
    let mut ends = [
        end(near, |mut rail, peer| rail.attach(peer.peer(), ours).unwrap()),
        end(far, |mut rail, peer| rail.attach(peer.peer(), theirs).unwrap()),
    ];
    for (of, by) in [(0, 1), (1, 0)] {
        for device in [false, true] {
            let part = if device { ends[of].device } else { ends[of].host };
            let mut handle = [0; HANDLE_MAX];
            let len = ends[of].engine.export(part.local, &mut handle).unwrap();
            let peer = ends[by].peer;
            let remote = ends[by].engine.import(peer, &handle[..len]).unwrap();
            let part = if device { &mut ends[of].device } else { &mut ends[of].host };
            part.remote = Some(remote);
        }
    }
    ends
}

/// Returns a configuration for each path of device memory.
fn ways() -> [(&'static str, GpuConfig); 4] {
    let config =
        GpuConfig { chunk: 4096, relay_chunk: 4096, done_words: 16, ..GpuConfig::default() };
    [
        ("stores and copies", config.clone()),
        ("copies", GpuConfig { mapped_store: 0, ..config.clone() }),
        ("records", GpuConfig { mapped_store: 0, done_channel: false, ..config.clone() }),
        ("bounce slots", GpuConfig { force_relay: true, ..config }),
    ]
}

fn turns(ends: &mut [End; 2], count: u32) {
    for _ in 0..count {
        for end in &mut *ends {
            end.engine.progress();
        }
    }
}

fn until(ends: &mut [End; 2], what: &str, mut ready: impl FnMut(&mut [End; 2]) -> bool) {
    for _ in 0..200_000 {
        if ready(ends) {
            return;
        }
        turns(ends, 1);
    }
    let [a, b] = ends;
    panic!("{what}: {:?} and {:?}", a.engine.stats(), b.engine.stats());
}

/// Drives both ends until an operation of the first end has succeeded.
fn done(ends: &mut [End; 2], issued: Issued, what: &str) {
    let Issued::Pending(token) = issued else { return };
    let mut end = None;
    until(ends, what, |ends| {
        end = ends[0].engine.test(token).unwrap();
        end.is_some()
    });
    assert_eq!(end.unwrap().outcome, Outcome::Done, "{what}");
}

const LENGTHS: [usize; 8] = [1, 8, 192, 193, 4096, 4097, 50_000, 200_001];

#[test]
fn row_21_a_signal_comes_after_its_data_in_any_memory() {
    for (way, config) in ways() {
        let mut ends = pair(&config);
        let mut count = 0u64;
        for len in LENGTHS {
            for (from, to) in [(true, true), (true, false), (false, true), (false, false)] {
                let what = format!("{way}: {len} bytes, device {from} to device {to}");
                count += 1;
                let sent = bytes(count as usize, len);
                let (source, target) = (
                    if from { ends[0].device } else { ends[0].host },
                    if to { ends[1].device } else { ends[1].host },
                );
                source.set(64, &sent);
                target.set(64, &vec![0; len]);
                let signal =
                    Signal { at: ends[1].host.remote.unwrap().at(0), op: SignalOp::Add, value: 1 };
                ends[0]
                    .engine
                    .put_signal(
                        CX,
                        source.local.at(64),
                        len,
                        target.remote.unwrap().at(64),
                        signal,
                        Notice::Silent,
                    )
                    .unwrap();
                let word = |ends: &[End; 2]| {
                    u64::from_ne_bytes(ends[1].host.get(0, 8).try_into().unwrap())
                };
                // Checks the word after every pass, to detect a signal that arrives before its
                // data.
                until(&mut ends, &what, |ends| word(ends) >= count);
                assert_eq!(word(&ends), count, "{what}");
                assert!(target.get(64, len) == sent, "{what}");
            }
        }
        let mut quiet = false;
        until(&mut ends, way, |ends| {
            let End { engine, peer, .. } = &mut ends[0];
            quiet = engine.is_quiet(CX, *peer).unwrap();
            quiet
        });
    }
}

#[test]
fn row_21_gets_puts_and_counting_signals_in_any_memory() {
    for (way, config) in ways() {
        let mut ends = pair(&config);
        for (n, len) in LENGTHS.into_iter().enumerate() {
            for (here, there) in [(true, true), (true, false), (false, true)] {
                let what = format!("{way}: {len} bytes, device {here} from device {there}");
                let (into, from) = (
                    if here { ends[0].device } else { ends[0].host },
                    if there { ends[1].device } else { ends[1].host },
                );
                let sent = bytes(n * 3 + 7, len);
                from.set(8, &sent);
                into.set(8, &vec![0; len]);
                let remote = from.remote.unwrap().at(8);
                let issued = ends[0]
                    .engine
                    .get(CX, into.local.at(8), len, remote, Notice::Report(1))
                    .unwrap();
                done(&mut ends, issued, &what);
                assert!(into.get(8, len) == sent, "{what}");
            }
        }
        counts(way, &mut ends, false);
        counts(way, &mut ends, true);
    }
}

/// Checks that every signal counts, and that atomics stay in order with writes to a device. `words`
/// is true if the words are in device memory too.
fn counts(way: &str, ends: &mut [End; 2], words: bool) {
    const AT: usize = 10_240;
    let part = if words { ends[1].device } else { ends[1].host };
    part.set(AT, &[0; 16]);
    let amo = Amo { op: AmoOp::Add, width: 8, operand: 5, compare: 0 };
    let remote = part.remote.unwrap();
    let (word, counter) = (remote.at(AT as u64), remote.at(AT as u64 + 8));
    let (source, target) = (ends[0].device.local.at(0), ends[1].device.remote.unwrap().at(0));
    for _ in 0..100 {
        until(ends, "a put", |ends| {
            match ends[0].engine.put(CX, source, 9000, target, Notice::Silent) {
                Ok(_) => true,
                Err(error) => {
                    assert_eq!(error, OpError::Again);
                    false
                }
            }
        });
        let signal = Signal { at: word, op: SignalOp::Add, value: 1 };
        until(ends, "a signal", |ends| ends[0].engine.signal(CX, signal, Notice::Silent).is_ok());
        until(ends, "an atomic", |ends| {
            ends[0].engine.amo(CX, counter, amo, Notice::Silent).is_ok()
        });
    }
    let value = |at| u64::from_ne_bytes(part.get(at, 8).try_into().unwrap());
    until(ends, "all atomics", |_| value(AT + 8) == 500);
    assert_eq!(value(AT), 100, "{way}, words in the device: {words}");
}

#[test]
fn row_21_tagged_messages_in_any_memory() {
    for (way, config) in ways() {
        let mut ends = pair(&config);
        let mut n = 0u64;
        for len in [0, 1, 1024, 1025, 50_000] {
            for (from, to) in [(true, true), (true, false), (false, true)] {
                for (room, first) in [(len, true), (len, false), (len / 2, true)] {
                    n += 1;
                    let what =
                        format!("{way}: {len} into {room}, device {from} to {to}, first {first}");
                    let (source, target) = (
                        if from { ends[0].device } else { ends[0].host },
                        if to { ends[1].device } else { ends[1].host },
                    );
                    let sent = bytes(n as usize, len);
                    source.set(8, &sent);
                    target.set(0, &vec![0xa5; len + 64]);
                    let recv = |end: &mut End| {
                        let into = Some((target.local.at(8), room));
                        end.engine.recv(Some(end.peer), Tag::from(n), Tag::ZERO, into, n).unwrap()
                    };
                    let early = first.then(|| recv(&mut ends[1]));
                    let End { engine, peer, .. } = &mut ends[0];
                    let payload = Payload::Region(source.local.at(8), len);
                    let issued =
                        engine.send(CX, *peer, Tag::from(n), payload, Notice::Report(n)).unwrap();
                    turns(&mut ends, 3);
                    let request = early.unwrap_or_else(|| recv(&mut ends[1]));
                    let mut status = None;
                    until(&mut ends, &what, |ends| {
                        status = ends[1].engine.test_recv(request).unwrap();
                        status.is_some()
                    });
                    let (status, want) = (status.unwrap(), len.min(room));
                    let outcome = if want < len { Received::Truncated } else { Received::Ok };
                    assert_eq!(
                        (status.outcome, status.delivered),
                        (outcome, want as u64),
                        "{what}"
                    );
                    let got = target.get(0, len + 64);
                    assert!(got[8..8 + want] == sent[..want], "{what}");
                    assert!(
                        got[..8].iter().chain(&got[8 + want..]).all(|&b| b == 0xa5),
                        "{what}: outside"
                    );
                    done(&mut ends, issued, &what);
                }
            }
        }
    }
}

/// Returns the processor time of this thread.
fn cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a local structure of the type that the call fills.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn b2_b3_row_10_waiting_for_a_silent_peer_takes_little_processor_time() {
    for (way, config) in ways() {
        let [mut near, far] = pair(&config);
        let wait_object = near.engine.rail(RailId(0)).unwrap().wait_object();
        let host = LinuxHost::shared();
        let mut waiter = Waiter::new(&host, &wait_object, Policy::BALANCED);
        let (at, from) = (near.host.local.at(0), near.peer);
        let (began, deadline) = (cpu(), host.now_ns() + 2_000_000_000);
        let waited = near.engine.wait_signal(at, Cmp::Ne, 0, Some(from), &mut waiter, deadline);
        let used = cpu() - began;
        println!("{way}: {used:?} of processor in 2 s; {:?}", waiter.counts());
        assert!(matches!(waited, Err(WaitError::Deadline(_))), "{way}: {waited:?}");
        // If the waiter did not sleep, it would use up to two seconds of processor time.
        assert!(used < Duration::from_millis(400), "{way}: {used:?}");
        drop(far);
    }
}

#[test]
fn row_12_a_wait_that_expires_names_what_is_missing() {
    for (way, config) in ways() {
        let [mut near, mut far] = pair(&config);
        let wait_object = near.engine.rail(RailId(0)).unwrap().wait_object();
        let host = LinuxHost::shared();
        let mut waiter = Waiter::new(&host, &wait_object, Policy::BALANCED);
        let (source, target) = (near.device.local.at(0), far.device.remote.unwrap().at(0));
        let issued = near.engine.put(CX, source, 100_000, target, Notice::Report(7)).unwrap();
        let Issued::Pending(token) = issued else { panic!("{way}: done at once") };
        // The peer makes no progress, so nothing is acknowledged.
        let stuck = near.engine.wait(token, &mut waiter, host.now_ns() + 20_000_000);
        match stuck {
            Err(WaitError::Deadline(stuck)) => assert_eq!(stuck.peer, Some(near.peer), "{way}"),
            other => panic!("{way}: {other:?}"),
        }
        let turning = thread::spawn(move || {
            let end = Instant::now() + Duration::from_secs(20);
            while far.engine.stats().arrived == 0 {
                assert!(Instant::now() < end);
                far.engine.progress();
            }
            for _ in 0..10_000 {
                far.engine.progress();
            }
            far
        });
        let done = near.engine.wait(token, &mut waiter, host.now_ns() + 20_000_000_000).unwrap();
        assert_eq!((done.outcome, done.tag), (Outcome::Done, 7), "{way}");
        assert!(near.engine.wait(token, &mut waiter, 0).is_err(), "{way}: taken twice");
        drop(turning.join().unwrap());
    }
}
