//! Helpers of the tests: rails and engines that sleep by Linux calls, links between two rails in
//! one process, and a recording sink. Also child processes of this test binary, and counts of
//! descriptors and mappings.

#![allow(dead_code, reason = "each test binary uses its part")]

#[path = "../../../sys/tests/linux/asleep.rs"]
pub mod asleep;

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fishplate_core::engine::protocol::{
    Account, BlockSlot, HeaderSlot, MatchConfig, MatchMemory, RecvSlot, SHORT,
};
use fishplate_core::engine::tag::{MatcherMemory, PostedSlot, UnexpectedSlot};
use fishplate_core::engine::{
    Config, Engine, EngineMemory, LocalSlot, Pairing, Parked, PeerSlot, PendingSlot, RemoteSlot,
    Stream,
};
use fishplate_core::error::{CompleteError, PeerError};
use fishplate_core::mem::{Peer, Untrusted};
use fishplate_core::rail::{Rail, Sink};
use fishplate_core::sync::event::Park;
use fishplate_core::sync::host::Host;
use fishplate_shm::{Link, Role, ShmConfig, ShmRail};
use fishplate_sys::LinuxHost;

/// The peer number of the other end, at both ends.
pub const PEER: Peer = Peer(0);

/// Returns a deadline long enough for any expected event.
pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Runs one test at a time, because the tests count the resources of the whole process.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Closes descriptors at once, so that counts are exact. If a peer sends descriptors that are
    // slow to close, the test uses a thread instead.
    fishplate_shm::set_closer(fishplate_shm::close_aside);
    alone
}

/// A rail that sleeps and wakes by Linux calls.
pub type TestRail = ShmRail<LinuxHost>;

pub fn rail(config: ShmConfig) -> TestRail {
    let (host, config) = linux(config);
    ShmRail::new(host, config).unwrap()
}

/// Returns a host for a [`TestRail`], and `config` with the host's use of membarrier.
pub fn linux(config: ShmConfig) -> (LinuxHost, ShmConfig) {
    let host = LinuxHost::shared().peer_uses_membarrier(true);
    let membarrier = host.sleeper_uses_membarrier();
    (host, ShmConfig { membarrier, ..config })
}

/// Performs the handshake of two rails in two threads, over a pair of sockets.
pub fn meet(near: &TestRail, far: &TestRail, (ours, theirs): (OwnedFd, OwnedFd)) -> [Link; 2] {
    let profile = far.profile();
    let other = thread::spawn(move || Link::over(theirs, Role::First, &profile, soon()).unwrap());
    let link = Link::over(ours, Role::Second, &near.profile(), soon()).unwrap();
    [link, other.join().unwrap()]
}

/// The settings of test engines: a small window, and little room for messages.
pub const CONFIG: Config = Config { window: 16, ..Config::DEFAULT };
pub const MATCHING: MatchConfig = MatchConfig {
    eager: 1024,
    credits: 4,
    headers: 8,
    shared_credits: 0,
    shared_headers: 0,
    shared_shorts: 0,
    pieces: 0,
    seed: 3,
};

/// Leaks `n` copies of a value.
pub fn leak<T: Clone>(value: T, n: usize) -> &'static mut [T] {
    Box::leak(vec![value; n].into_boxed_slice())
}

/// Creates an engine over one rail, with one peer, tag matching, and little room.
pub fn engine<R: Rail>(rail: R, config: Config, matching: MatchConfig) -> Engine<'static, R, 1> {
    engine_of(rail, 1, config, matching)
}

/// Creates an engine like [`engine`], with this number of peers.
pub fn engine_of<R: Rail>(
    rail: R,
    peers: usize,
    config: Config,
    matching: MatchConfig,
) -> Engine<'static, R, 1> {
    let memory = EngineMemory {
        peers: leak(PeerSlot::EMPTY, peers),
        pairings: leak(Pairing::ALIKE, peers),
        streams: leak(Stream::EMPTY, peers),
        parked: leak(Parked::EMPTY, peers * config.window as usize),
        bitmap: leak(0, config.bitmap_words(peers)),
        locals: leak(LocalSlot::EMPTY, 4),
        remotes: leak(RemoteSlot::EMPTY, 8),
        pending: leak(PendingSlot::EMPTY, 32),
    };
    let mut engine = Engine::new(config, [rail], memory).unwrap();
    let (blocks, unexpected) = (matching.blocks(peers), matching.unexpected(peers));
    let memory = MatchMemory {
        matcher: MatcherMemory {
            posted: leak(PostedSlot::EMPTY, 16),
            unexpected: leak(UnexpectedSlot::EMPTY, unexpected),
            buckets: leak(0, MatcherMemory::buckets(16, unexpected)),
        },
        receives: leak(RecvSlot::EMPTY, 16),
        accounts: leak(Account::EMPTY, peers),
        blocks: leak(BlockSlot::EMPTY, blocks + matching.shared_shorts as usize),
        block_bytes: leak(0, blocks * matching.block()),
        short_bytes: leak(0, matching.shared_shorts as usize * SHORT),
        headers: leak(HeaderSlot::EMPTY, matching.waiting(peers)),
        outgoing: leak(BlockSlot::EMPTY, 4),
        outgoing_bytes: leak(0, 4 * matching.block()),
    };
    engine.attach_matching(matching, memory).unwrap();
    engine
}

/// Returns bytes that depend on index and seed.
pub fn bytes(seed: usize, len: usize) -> Vec<u8> {
    (seed..seed + len).map(|n| (n.wrapping_mul(0x9e37_79b9) >> 11) as u8).collect()
}

/// Returns an abstract socket name that no other test uses.
pub fn name() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("@fishplate-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Runs this test binary again as a child that plays `role`. The child runs only the test `child`.
pub fn spawn(role: &str, address: &str) -> Killed {
    spawn_over(role, address, Stdio::piped())
}

/// Like [`spawn`], with this descriptor 0.
pub fn spawn_over(role: &str, address: &str, stdin: Stdio) -> Killed {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env("FISHPLATE_ROLE", role)
        .env("FISHPLATE_ADDRESS", address)
        .stdin(stdin)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    Killed(child)
}

/// Returns the role and the address to connect to, if this process is a child.
pub fn role() -> Option<(String, OsString)> {
    Some((std::env::var("FISHPLATE_ROLE").ok()?, std::env::var_os("FISHPLATE_ADDRESS")?))
}

/// A child process. Dropping it kills and reaps the child.
pub struct Killed(pub Child);

impl Killed {
    /// Waits until the child exits, and checks that it succeeded.
    pub fn join(mut self) {
        let status = self.0.wait().unwrap();
        assert!(status.success(), "child: {status}");
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the numbers of descriptors and of shared-memory mappings of this process.
pub fn held() -> (usize, usize) {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (fds, maps.lines().filter(|line| line.contains("memfd:")).count())
}

/// Waits until this process holds the same number of descriptors and mappings as before. A thread
/// may still be closing some.
#[track_caller]
pub fn nothing_left(before: (usize, usize), what: &str) {
    let deadline = soon();
    while held() != before {
        assert!(Instant::now() < deadline, "{what}: left open: {:?}, before {before:?}", held());
        std::thread::yield_now();
    }
}

/// The reports of a rail.
#[derive(Debug, Default)]
pub struct Seen {
    pub messages: Vec<Vec<u8>>,
    pub landed: Vec<u32>,
    pub done: Vec<(u64, Result<(), CompleteError>)>,
    pub down: Vec<(Peer, PeerError)>,
}

impl Sink for Seen {
    fn done(&mut self, cx: u64, result: Result<(), CompleteError>) {
        self.done.push((cx, result));
    }

    fn landed(&mut self, _: Peer, data: u32) {
        self.landed.push(data);
    }

    fn message(&mut self, _: Peer, bytes: Untrusted<'_>) {
        let mut copy = vec![0; bytes.len()];
        bytes.copy_out(&mut copy);
        self.messages.push(copy);
    }

    fn peer_down(&mut self, peer: Peer, why: PeerError) {
        self.down.push((peer, why));
    }
}

/// Polls until `enough` returns true, and sleeps on the event page in between. Panics after a time
/// limit.
pub fn until(rail: &mut TestRail, seen: &mut Seen, mut enough: impl FnMut(&Seen) -> bool) {
    let host = LinuxHost::shared();
    let wait_object = rail.wait_object();
    let end = soon();
    while !enough(seen) {
        assert!(Instant::now() < end, "nothing more came: {seen:?}");
        if rail.poll(32, seen) == 0 {
            wait_object.park(&host, 100_000_000, || rail.poll(32, seen) > 0);
            rail.check_peers(seen);
        }
    }
}

/// Repeats a post until there is room.
pub fn insist<T>(
    rail: &mut TestRail,
    seen: &mut Seen,
    mut post: impl FnMut(&mut TestRail) -> Result<T, fishplate_core::error::PostError>,
) -> T {
    let end = soon();
    loop {
        match post(rail) {
            Ok(value) => return value,
            Err(fishplate_core::error::PostError::Again) => {
                assert!(Instant::now() < end, "no room came");
                if rail.poll(32, seen) == 0 {
                    rail.host().yield_now();
                }
            }
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// Lowers this process's limit of open descriptors, until dropped.
pub struct Limited(libc::rlimit);

impl Limited {
    pub fn to(most: u64) -> Self {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the call fills a local structure.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) }, 0);
        Self::set(&libc::rlimit { rlim_cur: most, ..limit });
        Limited(limit)
    }

    fn set(limit: &libc::rlimit) {
        // SAFETY: the call reads a structure that outlives it.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, limit) }, 0);
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        Self::set(&self.0);
    }
}
