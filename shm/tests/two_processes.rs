//! Two real processes: data on every path, wake-ups, and the death of a peer.

use std::io::Read;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use fishplate_core::error::{CompleteError, PeerError};
use fishplate_core::mem::{Region, RegionKind, Untrusted};
use fishplate_core::rail::{Local, Posted, Rail, RailKey, Remote};
use fishplate_core::sync::event::Park;
use fishplate_core::sync::host::Woken;
use fishplate_shm::{Listener, Segment, ShmConfig, connect};
use fishplate_sys::LinuxHost;

mod support;
use support::asleep::{this_thread, until_asleep};
use support::*;

/// Returns bytes that depend on index and seed.
fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ seed).collect()
}

fn local(bytes: &[u8]) -> Local {
    Local { ptr: NonNull::from(bytes).cast(), len: bytes.len(), desc: 0 }
}

fn key_bytes(key: RailKey) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&key.key.to_ne_bytes());
    bytes[8..].copy_from_slice(&key.base.to_ne_bytes());
    bytes
}

fn key_from(bytes: &[u8]) -> RailKey {
    let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
    RailKey { key: word(0), base: word(8) }
}

const LEN: usize = 200_000;

fn sizes(staged: bool) -> ShmConfig {
    ShmConfig {
        force_staging: staged,
        common_len: 1 << 16,
        lane_cells: 256,
        ..ShmConfig::default()
    }
}

/// Exports a segment, private memory and common memory. Then answers every message with the
/// reversed bytes, until a message stops it.
fn serve(address: &std::ffi::OsStr, staged: bool) {
    let mut rail = rail(sizes(staged));
    let link = connect(address, &rail.profile(), soon()).unwrap();
    let segment = Segment::create(LEN).unwrap();
    let mut private = vec![0u8; LEN];
    // SAFETY: all three outlive the rail's use of them, and are read only after a write has landed.
    let regions = unsafe {
        [
            segment.region(0, LEN).unwrap(),
            Region::new(NonNull::from(&mut private[..]).cast(), LEN, RegionKind::Private),
            link.common_region(PEER, 0, 1 << 16).unwrap(),
        ]
    };
    rail.attach(PEER, link).unwrap();
    let keys: Vec<u8> =
        regions.iter().flat_map(|region| key_bytes(rail.register(region).unwrap().0)).collect();
    rail.exchange(PEER, &keys, soon()).unwrap();
    let mut seen = Seen::default();
    let (mut echoed, mut landed) = (0, 0);
    loop {
        until(&mut rail, &mut seen, |seen| {
            seen.messages.len() > echoed || seen.landed.len() > landed
        });
        while landed < seen.landed.len() {
            // The completion word encodes the region and the seed, which determine the expected
            // bytes.
            let word = seen.landed[landed];
            landed += 1;
            let region = &regions[(word >> 8) as usize];
            let mut found = vec![0; region.len()];
            // SAFETY: the whole region is mapped, and the peer writes nothing until we answer.
            unsafe {
                region
                    .ptr()
                    .copy_to_nonoverlapping(NonNull::from(&mut found[..]).cast(), found.len())
            };
            let good = found == pattern(word as u8, region.len());
            insist(&mut rail, &mut seen, |rail| {
                rail.post_message(PEER, &[u8::from(good)], Untrusted::from_slice(&[]), 0)
            });
            rail.flush();
        }
        while echoed < seen.messages.len() {
            let mut message = std::mem::take(&mut seen.messages[echoed]);
            echoed += 1;
            if message == b"stop" {
                return;
            }
            message.reverse();
            insist(&mut rail, &mut seen, |rail| {
                rail.post_message(PEER, &[], Untrusted::from_slice(&message), 0)
            });
            rail.flush();
        }
    }
}

/// Posts puts, gets and messages to a child that runs `serve`.
fn data_arrives(staged: bool) {
    let _alone = alone();
    let before = held();
    {
        let mut rail = rail(sizes(staged));
        let address = name();
        let listener = Listener::bind(&address).unwrap();
        let child = spawn(if staged { "serve staged" } else { "serve" }, &address);
        let link = listener.accept(&rail.profile(), soon()).unwrap();
        let direct = link.reaches_private();
        rail.attach(PEER, link).unwrap();
        let keys = rail.exchange(PEER, &[], soon()).unwrap();
        let mut seen = Seen::default();
        for (i, bytes) in keys.chunks(16).enumerate() {
            let key = key_from(bytes);
            let len = if i == 2 { 1 << 16 } else { LEN };
            let mapped = rail.import(PEER, key, len as u64).unwrap();
            assert_eq!(mapped.is_some(), i != 1);
            for seed in 1..=4u8 {
                let data = pattern(seed, len);
                let word = (i as u32) << 8 | u32::from(seed);
                let remote = Remote { key, offset: 0 };
                let (answers, ends) = (seen.messages.len(), seen.done.len());
                // SAFETY: `data` lives until the post completes, which the test waits for.
                let posted = insist(&mut rail, &mut seen, |rail| unsafe {
                    rail.post_write(PEER, local(&data), remote, Some(word), 1)
                });
                rail.flush();
                assert_eq!(posted, if i == 1 && !direct { Posted::Pending } else { Posted::Done });
                let pending = usize::from(posted == Posted::Pending);
                until(&mut rail, &mut seen, |seen| {
                    seen.messages.len() > answers && seen.done.len() == ends + pending
                });
                assert_eq!(seen.messages[answers], [1], "region {i}, seed {seed}");
                let mut back = vec![0; len];
                let ends = seen.done.len();
                let into = Local { ptr: NonNull::from(&mut back[..]).cast(), len, desc: 0 };
                // SAFETY: `back` lives until the post completes, and nothing reads it before.
                let posted = insist(&mut rail, &mut seen, |rail| unsafe {
                    rail.post_read(PEER, into, remote, 2)
                });
                rail.flush();
                let pending = usize::from(posted == Posted::Pending);
                until(&mut rail, &mut seen, |seen| seen.done.len() == ends + pending);
                assert!(back == data, "region {i}, seed {seed}");
            }
        }
        assert!(seen.done.iter().all(|(_, result)| result.is_ok()));
        assert_eq!(seen.done.is_empty(), direct);
        seen = Seen::default();
        for n in 0..3000usize {
            let message = pattern(n as u8, 1 + n * 7 % 8000);
            insist(&mut rail, &mut seen, |rail| {
                rail.post_message(PEER, &message[..1], Untrusted::from_slice(&message[1..]), 0)
            });
        }
        rail.flush();
        until(&mut rail, &mut seen, |seen| seen.messages.len() == 3000);
        for (n, message) in seen.messages.iter().enumerate() {
            assert!(message.iter().rev().eq(&pattern(n as u8, 1 + n * 7 % 8000)), "message {n}");
        }
        rail.post_message(PEER, b"stop", Untrusted::from_slice(&[]), 0).unwrap();
        rail.flush();
        until(&mut rail, &mut seen, |seen| !seen.down.is_empty());
        assert_eq!(seen.down, [(PEER, PeerError::Closed)]);
        child.join();
    }
    nothing_left(before, "both ends");
}

#[test]
fn data_arrives_by_mapping_direct_copy_and_message() {
    data_arrives(false);
}

#[test]
fn data_arrives_staged_through_the_lane() {
    data_arrives(true);
}

/// Answers each message once a thread of the parent sleeps. The message contains the thread's id.
fn slow(address: &std::ffi::OsStr) {
    let mut rail = rail(ShmConfig::default());
    let link = connect(address, &rail.profile(), soon()).unwrap();
    rail.attach(PEER, link).unwrap();
    let mut seen = Seen::default();
    for n in 1..=30 {
        until(&mut rail, &mut seen, |seen| seen.messages.len() == n);
        until_asleep(i32::from_ne_bytes(seen.messages[n - 1][..].try_into().unwrap()));
        rail.post_message(PEER, b"pong", Untrusted::from_slice(&[]), 0).unwrap();
        rail.flush();
    }
    until(&mut rail, &mut seen, |seen| !seen.down.is_empty());
}

#[test]
fn a_sleeper_is_woken_by_the_other_process_before_its_deadline() {
    let _alone = alone();
    let mut rail = rail(ShmConfig::default());
    let address = name();
    let listener = Listener::bind(&address).unwrap();
    let _child = spawn("slow", &address);
    rail.attach(PEER, listener.accept(&rail.profile(), soon()).unwrap()).unwrap();
    let host = LinuxHost::shared();
    let wait_object = rail.wait_object();
    let mut seen = Seen::default();
    let mut slept = 0;
    for n in 1..=30 {
        let began = Instant::now();
        rail.post_message(PEER, &this_thread().to_ne_bytes(), Untrusted::from_slice(&[]), 0)
            .unwrap();
        rail.flush();
        while seen.messages.len() < n {
            let woken = wait_object.park(&host, 60_000_000_000, || rail.poll(32, &mut seen) > 0);
            assert_ne!(woken, Some(Woken::Deadline));
            slept += u32::from(woken.is_some());
            rail.poll(32, &mut seen);
        }
        // A wait that is notified at its deadline may report the notification instead of the
        // timeout.
        assert!(began.elapsed() < Duration::from_secs(60), "slept through it");
    }
    assert!(slept >= 30, "slept only {slept} times: the test proves nothing");
}

/// Posts writes and messages, and polls, until killed.
fn busy(address: &std::ffi::OsStr) {
    let mut rail = rail(ShmConfig { force_staging: true, ..small() });
    let link = connect(address, &rail.profile(), soon()).unwrap();
    let segment = Segment::create(1 << 16).unwrap();
    let mut private = vec![0u8; 1 << 16];
    // SAFETY: both regions outlive the rail, and nothing reads them.
    let regions = unsafe {
        [
            Region::new(NonNull::from(&mut private[..]).cast(), 1 << 16, RegionKind::Private),
            segment.region(0, 1 << 16).unwrap(),
        ]
    };
    let keys: Vec<u8> =
        regions.iter().flat_map(|region| key_bytes(rail.register(region).unwrap().0)).collect();
    rail.attach(PEER, link).unwrap();
    let theirs = key_from(&rail.exchange(PEER, &keys, soon()).unwrap());
    rail.import(PEER, theirs, 1 << 16).unwrap();
    let mut seen = Seen::default();
    let data = pattern(1, 1 << 14);
    let end = soon();
    for n in 0u64.. {
        let remote = Remote { key: theirs, offset: n * 64 % (1 << 15) };
        // SAFETY: `data` outlives the rail.
        let _ = unsafe { rail.post_write(PEER, local(&data), remote, Some(n as u32), n) };
        let _ = rail.post_message(
            PEER,
            &n.to_ne_bytes(),
            Untrusted::from_slice(&data[..n as usize % 900]),
            n,
        );
        rail.poll(32, &mut seen);
        seen = Seen::default();
        if n.is_multiple_of(1024) && Instant::now() > end {
            return;
        }
    }
}

fn small() -> ShmConfig {
    ShmConfig { lane_cells: 128, max_message: 2048, ..ShmConfig::default() }
}

/// Performs every operation of a rail with a peer until the peer is killed. Returns the number of
/// posts that were pending then.
fn survive(child: Killed, address_listener: &Listener, rail: &mut TestRail, seed: u64) -> usize {
    let mut child = child;
    let link = address_listener.accept(&rail.profile(), soon()).unwrap();
    rail.attach(PEER, link).unwrap();
    let mut private = vec![0u8; 1 << 16];
    // SAFETY: the region is deregistered before `private` is dropped.
    let region = unsafe {
        Region::new(NonNull::from(&mut private[..]).cast(), 1 << 16, RegionKind::Private)
    };
    let (key, _) = rail.register(&region).unwrap();
    let keys = rail.exchange(PEER, &key_bytes(key), soon()).unwrap();
    let (staged, mapped) = (key_from(&keys), key_from(&keys[16..]));
    rail.import(PEER, staged, 1 << 16).unwrap();
    let pointer = rail.import(PEER, mapped, 1 << 16).unwrap().unwrap();
    let mut seen = Seen::default();
    let mut accepted = Vec::new();
    let data = pattern(2, 1 << 15);
    let mut back = vec![0u8; 1 << 15];
    let kill = Instant::now() + Duration::from_micros(seed % 3000);
    let mut killed = false;
    let end = soon();
    let mut n = 0u64;
    while seen.down.is_empty() {
        assert!(Instant::now() < end);
        if !killed && Instant::now() >= kill {
            child.0.kill().unwrap();
            killed = true;
        }
        n += 1;
        let remote = Remote { key: staged, offset: 0 };
        // SAFETY: `data` and `back` outlive all posts, because the test waits for the completions.
        let posts = unsafe {
            let into = Local {
                ptr: NonNull::from(&mut back[..]).cast(),
                len: 1 + n as usize % 20_000,
                desc: 0,
            };
            [
                rail.post_write(
                    PEER,
                    local(&data[..n as usize * 37 % 20_000]),
                    remote,
                    Some(1),
                    2 * n,
                ),
                rail.post_read(PEER, into, remote, 2 * n + 1),
            ]
        };
        for (post, cx) in posts.into_iter().zip([2 * n, 2 * n + 1]) {
            if post == Ok(Posted::Pending) {
                accepted.push(cx);
            }
        }
        rail.poll(32, &mut seen);
        if n.is_multiple_of(16) {
            rail.check_peers(&mut seen);
        }
        seen.messages.clear();
        seen.landed.clear();
    }
    assert!(killed, "down before it was killed: {:?}", seen.down);
    assert_eq!(seen.down, [(PEER, PeerError::Died)]);
    while rail.poll(32, &mut seen) > 0 {}
    let mut ended: Vec<u64> = seen.done.iter().map(|(cx, _)| *cx).collect();
    ended.sort_unstable();
    assert_eq!(ended, accepted, "every post completes once");
    // SAFETY: the memory stays mapped until the peer is detached.
    unsafe { pointer.write(1) };
    rail.detach(PEER);
    rail.deregister(key).unwrap();
    seen.done.iter().filter(|(_, result)| *result == Err(CompleteError::PeerDown)).count()
}

/// B17, B20: a peer killed at any moment leaves no pending posts and no leaks. The next peer can
/// connect.
#[test]
fn b17_b20_a_killed_peer_leaves_nothing_behind() {
    let _alone = alone();
    let rounds =
        std::env::var("FISHPLATE_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(50u64);
    let mut rail = rail(ShmConfig { force_staging: true, ..small() });
    let address = name();
    let listener = Listener::bind(&address).unwrap();
    let before = held();
    let mut cut = 0;
    for round in 0..rounds {
        let child = spawn("busy", &address);
        cut +=
            survive(child, &listener, &mut rail, round.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32);
        nothing_left(before, &format!("round {round}"));
    }
    assert!(cut > 0, "no post was ever in flight: the test proves nothing");
}

/// Connects to a listening process that is killed later. Checks that the rail reports the peer's
/// death, and that no resources of the link remain.
fn bereaved(address: &std::ffi::OsStr) {
    let mut rail = rail(ShmConfig::default());
    let before = held();
    let link = connect(address, &rail.profile(), soon()).unwrap();
    rail.attach(PEER, link).unwrap();
    drop(UnixStream::connect_addr(&met_at(address)).unwrap());
    let mut seen = Seen::default();
    until(&mut rail, &mut seen, |seen| !seen.down.is_empty());
    assert_eq!(seen.down, [(PEER, PeerError::Died)]);
    rail.detach(PEER);
    nothing_left(before, "both ends");
    let mut line = [0];
    assert_eq!(std::io::stdin().read(&mut line).unwrap(), 0);
}

/// Returns the address of a socket on which the connecting process reports that it is connected.
fn met_at(address: &std::ffi::OsStr) -> SocketAddr {
    SocketAddr::from_abstract_name([address.as_encoded_bytes(), b"-met"].concat()).unwrap()
}

/// Listens, accepts one peer, and stays idle until killed.
fn hang(address: &std::ffi::OsStr) {
    let mut rail = rail(ShmConfig::default());
    let listener = Listener::bind(address).unwrap();
    rail.attach(PEER, listener.accept(&rail.profile(), soon()).unwrap()).unwrap();
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
fn the_connecting_side_detects_the_death_of_the_listening_side() {
    let _alone = alone();
    for _ in 0..3 {
        let address = name();
        let met = UnixListener::bind_addr(&met_at(address.as_ref())).unwrap();
        let listening = spawn("hang", &address);
        let mut connected = spawn("bereaved", &address);
        // If the listener is killed before the handshake, the connecting side fails to connect.
        // Another test covers that.
        met.accept().unwrap();
        drop(listening);
        drop(connected.0.stdin.take());
        connected.join();
    }
}

/// The entry point of the child processes. Does nothing in the parent.
#[test]
fn child() {
    let Some((role, address)) = role() else { return };
    match &*role {
        "serve" => serve(&address, false),
        "serve staged" => serve(&address, true),
        "slow" => slow(&address),
        "busy" => busy(&address),
        "bereaved" => bereaved(&address),
        "hang" => hang(&address),
        other => panic!("{other}"),
    }
}
