//! Tests `GpuRail` between real processes over host memory. Each process has an allocation of the
//! other open. Covers data on every path, and processes that are killed during transfers.

use std::ptr::NonNull;
use std::time::Instant;

use fishplate_core::error::{CompleteError, PeerError, PostError};
use fishplate_core::mem::{Region, RegionKind, Untrusted};
use fishplate_core::rail::{Local, Rail, RailKey, Remote};
use fishplate_core::sync::event::Park;
use fishplate_core::sync::host::Host;
use fishplate_gpu::GpuConfig;
use fishplate_shm::{Link, Listener, ShmConfig, connect};
use fishplate_sys::LinuxHost;

mod support;
use support::{
    PEER, Seen, TestGpuRail, alone, gpu_rail, held, name, nothing_left, role, soon, spawn,
};

const LEN: usize = 300_000;

/// Returns the configuration for a path of device memory.
fn config(way: &str) -> GpuConfig {
    let config = GpuConfig { chunk: 65536, relay_chunk: 16384, ..GpuConfig::default() };
    match way {
        "stores" => GpuConfig { mapped_store: 1 << 30, ..config },
        "copies" => GpuConfig { mapped_store: 0, ..config },
        "records" => GpuConfig { mapped_store: 0, done_channel: false, ..config },
        "bounces" => GpuConfig { force_relay: true, ..config },
        _ => panic!("no such way: {way}"),
    }
}

const WAYS: [&str; 4] = ["stores", "copies", "records", "bounces"];

fn make(way: &str) -> TestGpuRail {
    gpu_rail(ShmConfig::default(), config(way))
}

fn attach(rail: &mut TestGpuRail, link: Link) {
    let link = rail.profile().agree(link, soon()).unwrap();
    rail.attach(PEER, link).unwrap();
}

/// Device memory of this process.
struct Mine {
    at: NonNull<u8>,
    key: RailKey,
    desc: u64,
}

impl Mine {
    fn new(rail: &mut TestGpuRail) -> Self {
        let at = rail.alloc(LEN as u64).unwrap();
        let at = NonNull::new(at.0 as *mut u8).unwrap();
        // SAFETY: the memory is freed with the device, after the rail. It is accessed only through
        // raw copies.
        let region = unsafe { Region::new(at, LEN, RegionKind::Device { ordinal: 0 }) };
        let (key, desc) = rail.register(&region).unwrap();
        Mine { at, key, desc }
    }

    fn set(&self, bytes: &[u8]) {
        // SAFETY: the range lies inside the memory, and no transfer uses it.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.at.as_ptr(), bytes.len()) };
    }

    fn get(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: the range lies inside the memory, and no transfer uses it.
        unsafe { std::ptr::copy(self.at.as_ptr(), bytes.as_mut_ptr(), len) };
        bytes
    }

    fn local(&self, len: usize) -> Local {
        Local { ptr: self.at, len, desc: self.desc }
    }

    fn handle(&self) -> Vec<u8> {
        [self.key.key.to_ne_bytes(), self.key.base.to_ne_bytes()].concat()
    }
}

fn key_from(bytes: &[u8]) -> RailKey {
    let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
    RailKey { key: word(0), base: word(8) }
}

fn pattern(seed: u32, len: usize) -> Vec<u8> {
    (0..len as u32).map(|i| (i ^ seed).wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect()
}

/// Polls until `enough` returns true, and sleeps between polls.
fn until(rail: &mut TestGpuRail, seen: &mut Seen, mut enough: impl FnMut(&Seen) -> bool) {
    let host = LinuxHost::shared();
    let (wait_object, end) = (rail.wait_object(), soon());
    while !enough(seen) {
        assert!(Instant::now() < end, "nothing more came: {seen:?}");
        if rail.poll(32, seen) == 0 {
            wait_object.park(&host, 100_000_000, || rail.poll(32, seen) > 0);
            rail.check_peers(seen);
        }
    }
}

fn insist<T>(
    rail: &mut TestGpuRail,
    seen: &mut Seen,
    mut post: impl FnMut(&mut TestGpuRail) -> Result<T, PostError>,
) -> T {
    let end = soon();
    loop {
        match post(rail) {
            Ok(value) => return value,
            Err(PostError::Again) => {
                assert!(Instant::now() < end, "no room came");
                if rail.poll(32, seen) == 0 {
                    rail.host().yield_now();
                }
            }
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// Reports for each write whether the bytes match the completion word, until the process is killed.
fn serve(address: &std::ffi::OsStr, way: &str) {
    let mut rail = make(way);
    let link = connect(address, rail.profile().profile(), soon()).unwrap();
    attach(&mut rail, link);
    let mine = Mine::new(&mut rail);
    rail.exchange(PEER, &mine.handle(), soon()).unwrap();
    let (mut seen, mut told) = (Seen::default(), 0);
    while seen.messages.is_empty() {
        until(&mut rail, &mut seen, |seen| seen.landed.len() > told || !seen.messages.is_empty());
        while told < seen.landed.len() {
            let seed = seen.landed[told];
            told += 1;
            let good = mine.get(length(seed)) == pattern(seed, length(seed));
            // Changes the memory, so that the peer reads other bytes than it wrote.
            mine.set(&pattern(!seed, length(seed)));
            insist(&mut rail, &mut seen, |rail| {
                rail.post_message(PEER, &[u8::from(good)], Untrusted::from_slice(&[]), 0)
            });
            rail.flush();
        }
    }
}

/// Returns the length of the write with this completion word.
fn length(seed: u32) -> usize {
    [1, 8, 4096, 65_536, 65_537, LEN][seed as usize % 6]
}

fn connected(way: &str, role: &str) -> (TestGpuRail, support::Killed, RailKey) {
    let mut rail = make(way);
    let address = name();
    let listener = Listener::bind(&address).unwrap();
    let child = spawn(&format!("{role} {way}"), &address);
    let link = listener.accept(rail.profile().profile(), soon()).unwrap();
    attach(&mut rail, link);
    let key = key_from(&rail.exchange(PEER, &[], soon()).unwrap());
    rail.import(PEER, key, LEN as u64).unwrap();
    (rail, child, key)
}

#[test]
fn row_20_two_processes_write_and_read_each_other_s_device_memory() {
    let _alone = alone();
    for way in WAYS {
        let before = held();
        {
            let (mut rail, child, key) = connected(way, "serve");
            let mine = Mine::new(&mut rail);
            let (mut seen, mut pending) = (Seen::default(), 0usize);
            for seed in 0..60u32 {
                let (len, remote) = (length(seed), Remote { key, offset: 0 });
                mine.set(&pattern(seed, len));
                let cx = u64::from(seed);
                // SAFETY: the memory outlives the rail.
                let posted = insist(&mut rail, &mut seen, |rail| unsafe {
                    rail.post_write(PEER, mine.local(len), remote, Some(seed), cx)
                });
                pending += usize::from(posted == fishplate_core::rail::Posted::Pending);
                rail.flush();
                until(&mut rail, &mut seen, |seen| seen.messages.len() > seed as usize);
                assert_eq!(seen.messages[seed as usize], [1], "{way}: write {seed} of {len} bytes");
                // SAFETY: the memory outlives the rail.
                let posted = insist(&mut rail, &mut seen, |rail| unsafe {
                    rail.post_read(PEER, mine.local(len), remote, 1000 + cx)
                });
                pending += usize::from(posted == fishplate_core::rail::Posted::Pending);
                until(&mut rail, &mut seen, |seen| seen.done.len() == pending);
                assert!(mine.get(len) == pattern(!seed, len), "{way}: read {seed} of {len} bytes");
            }
            assert!(seen.done.iter().all(|(_, result)| result.is_ok()), "{way}: {seen:?}");
            let stats = rail.stats();
            match way {
                "stores" => assert_eq!((stats.stored, stats.direct, stats.relayed), (120, 0, 0)),
                "copies" | "records" => {
                    assert_eq!((stats.stored, stats.direct, stats.relayed), (0, 120, 0))
                }
                _ => assert_eq!((stats.stored, stats.direct, stats.relayed), (0, 0, 120)),
            }
            insist(&mut rail, &mut seen, |rail| {
                rail.post_message(PEER, b"stop", Untrusted::from_slice(&[]), 0)
            });
            rail.flush();
            until(&mut rail, &mut seen, |seen| !seen.down.is_empty());
            assert_eq!(seen.down, [(PEER, PeerError::Closed)]);
            child.join();
        }
        nothing_left(before, way);
    }
}

/// Writes into the parent's memory until the parent kills this process.
fn flood(address: &std::ffi::OsStr, way: &str) {
    let mut rail = make(way);
    let link = connect(address, rail.profile().profile(), soon()).unwrap();
    attach(&mut rail, link);
    let mine = Mine::new(&mut rail);
    let theirs = key_from(&rail.exchange(PEER, &mine.handle(), soon()).unwrap());
    rail.import(PEER, theirs, LEN as u64).unwrap();
    let mut seen = Seen::default();
    let end = soon();
    for n in 0u32.. {
        let remote = Remote { key: theirs, offset: 0 };
        // SAFETY: the memory outlives the rail.
        let _ = unsafe { rail.post_write(PEER, mine.local(20_000), remote, Some(n), n.into()) };
        rail.poll(32, &mut seen);
        seen.done.clear();
        assert!(Instant::now() < end && seen.down.is_empty());
    }
}

#[test]
fn b17_b20_a_process_killed_during_writes_is_survived_and_leaves_nothing() {
    let _alone = alone();
    let before = held();
    let mut landed = 0;
    for round in 0..24u64 {
        let way = WAYS[round as usize % 4];
        let mut rail = make(way);
        let mine = Mine::new(&mut rail);
        let address = name();
        let listener = Listener::bind(&address).unwrap();
        let mut child = spawn(&format!("flood {way}"), &address);
        let link = listener.accept(rail.profile().profile(), soon()).unwrap();
        attach(&mut rail, link);
        let theirs = key_from(&rail.exchange(PEER, &mine.handle(), soon()).unwrap());
        rail.import(PEER, theirs, LEN as u64).unwrap();
        let mut seen = Seen::default();
        until(&mut rail, &mut seen, |seen| seen.landed.len() as u64 > round * 3);
        // Kills the child at a random point, while this process also writes to it.
        child.0.kill().unwrap();
        let (remote, mut pending) = (Remote { key: theirs, offset: 0 }, 0usize);
        let end = soon();
        let mut posted = 0u64;
        while seen.down.is_empty() {
            assert!(Instant::now() < end, "{way}: {seen:?}");
            // SAFETY: the memory outlives the rail.
            match unsafe { rail.post_write(PEER, mine.local(LEN), remote, Some(1), posted) } {
                Ok(fishplate_core::rail::Posted::Pending) => pending += 1,
                Ok(_) | Err(PostError::Again | PostError::PeerDown) => {}
                Err(error) => panic!("{way}: {error:?}"),
            }
            posted += 1;
            rail.poll(32, &mut seen);
            rail.check_peers(&mut seen);
        }
        assert_eq!(seen.down, [(PEER, PeerError::Died)], "{way}");
        until(&mut rail, &mut seen, |seen| seen.done.len() == pending);
        let known = |(_, result): &(u64, Result<(), CompleteError>)| {
            !matches!(result, Err(CompleteError::Unknown(_)))
        };
        assert!(seen.done.iter().all(known), "{way}: {seen:?}");
        landed += seen.landed.len();
    }
    assert!(landed > 0);
    nothing_left(before, "both ends");
}

/// Runs in the child processes.
#[test]
fn child() {
    let Some((role, address)) = role() else { return };
    match role.split_once(' ') {
        Some(("serve", way)) => serve(&address, way),
        Some(("flood", way)) => flood(&address, way),
        _ => panic!("no such role: {role}"),
    }
}
