//! Two processes exchange data in both directions, then one is killed. The child process runs this
//! same test binary.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::ptr::NonNull;
use std::time::{Duration, Instant};
use std::{env, fs};

use fishplate_core::error::{CompleteError, PeerError, PostError};
use fishplate_core::mem::{Peer, Region, RegionKind, Untrusted};
use fishplate_core::rail::{Local, Posted, Rail, RailKey, Remote, Sink};
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail};

use crate::support;

const PEER: Peer = Peer(3);
/// The longest write over `tcp`.
const LEN: usize = 768 << 10;
const DEADLINE: Duration = Duration::from_millis(500);
const CONFIG: FabricConfig = FabricConfig { deadline: Some(DEADLINE), depth: 64, ..support::SMALL };

/// Returns a deadline for events that must happen.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.trim().as_bytes().chunks(2);
    digits.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

#[derive(Debug, Default)]
struct Seen {
    done: Vec<(u64, Result<(), CompleteError>)>,
    landed: Vec<(Peer, u32)>,
    messages: Vec<(Peer, Vec<u8>)>,
    down: Vec<(Peer, PeerError)>,
}

impl Sink for Seen {
    fn done(&mut self, cx: u64, result: Result<(), CompleteError>) {
        self.done.push((cx, result));
    }
    fn landed(&mut self, peer: Peer, data: u32) {
        self.landed.push((peer, data));
    }
    fn message(&mut self, peer: Peer, bytes: Untrusted<'_>) {
        let mut copy = vec![0; bytes.len()];
        bytes.copy_out(&mut copy);
        self.messages.push((peer, copy));
    }
    fn peer_down(&mut self, peer: Peer, why: PeerError) {
        self.down.push((peer, why));
    }
}

fn insist(
    rail: &mut FabricRail,
    seen: &mut Seen,
    mut post: impl FnMut(&mut FabricRail) -> Result<Posted, PostError>,
) -> Posted {
    let end = soon();
    loop {
        match post(rail) {
            Ok(posted) => return posted,
            Err(PostError::Again) => {
                assert!(Instant::now() < end, "no room came: {rail:?}");
                rail.poll(32, seen);
            }
            Err(error) => panic!("{error:?}: {rail:?}"),
        }
    }
}

fn until(rail: &mut FabricRail, seen: &mut Seen, mut enough: impl FnMut(&Seen) -> bool) {
    let end = soon();
    while !enough(seen) {
        assert!(Instant::now() < end, "nothing more came: {rail:?} {seen:?}");
        rail.flush();
        rail.poll(32, seen);
        rail.check_peers(seen);
    }
}

fn say(rail: &mut FabricRail, seen: &mut Seen, bytes: &[u8]) {
    insist(rail, seen, |rail| rail.post_message(PEER, &[], Untrusted::from_slice(bytes), 0));
    rail.flush();
}

fn memory() -> (&'static mut [u8], Region) {
    let bytes = Box::leak(vec![0u8; LEN].into_boxed_slice());
    let ptr = NonNull::new(bytes.as_mut_ptr()).unwrap();
    // SAFETY: the memory is leaked. It is read by raw copies, and only while no write is in flight,
    // as a message from the peer has confirmed.
    (bytes, unsafe { Region::new(ptr, LEN, RegionKind::Private) })
}

fn pattern(round: u32, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u32).wrapping_mul(2_654_435_761).wrapping_add(round).to_le_bytes()[2])
        .collect()
}

/// Returns the number of bytes written in a round.
fn length(round: u32) -> usize {
    [8, 100, 4096, 70_000, LEN, 1][round as usize % 6]
}

/// Runs only in the child process. Sends its address and region. Then answers each message with
/// whether the data has arrived, until it is killed.
#[test]
fn child() {
    let Ok(provider) = env::var("FISHPLATE_TEST_PROVIDER") else { return };
    let mut rail = support::open(&Ask::new(&provider), CONFIG, 77);
    let (bytes, region) = memory();
    let (key, _) = rail.register(&region).unwrap();
    let told = format!("{} {} {}", hex(&rail.address().unwrap()), key.key, key.base);
    fs::write(env::var("FISHPLATE_TEST_ANSWER").unwrap(), told).unwrap();
    println!("\nready");
    std::io::stdout().flush().unwrap();
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    rail.attach(PEER, &unhex(&line)).unwrap();
    let (mut seen, mut answered) = (Seen::default(), 0);
    say(&mut rail, &mut seen, b"attached");
    let end = soon();
    while Instant::now() < end {
        rail.poll(32, &mut seen);
        while answered < seen.landed.len() {
            let (peer, round) = seen.landed[answered];
            answered += 1;
            // SAFETY: the parent waits for our answer before it writes again.
            let now =
                unsafe { std::ptr::read_volatile(&raw const bytes[..length(round)] as *const u8) };
            let good = peer == PEER
                && now == pattern(round, 1)[0]
                && bytes[..length(round)] == pattern(round, length(round));
            say(&mut rail, &mut seen, &[u8::from(good)]);
        }
    }
}

struct Killed(Child, String);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        let _ = fs::remove_file(&self.1);
    }
}

fn two_processes(name: &str, provider: &str, config: FabricConfig) {
    if let Some(why) = support::absent() {
        return println!("SKIPPED {name}: {why}");
    }
    let answer = env::temp_dir().join(format!("fishplate-{name}-{}", std::process::id()));
    let answer = answer.to_str().unwrap().to_string();
    let child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "processes::child", "--nocapture", "--test-threads=1"])
        .env("FISHPLATE_TEST_PROVIDER", provider)
        .env("FISHPLATE_TEST_ANSWER", &answer)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut child = Killed(child, answer);
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    while lines.next().expect("the child says that it is ready").unwrap() != "ready" {}
    let told = fs::read_to_string(&child.1).unwrap();
    let mut told = told.split(' ');
    let address = unhex(told.next().unwrap());
    let mut number = || told.next().unwrap().parse::<u64>().unwrap();
    let key = RailKey { key: number(), base: number() };

    let mut rail = support::open(&Ask::new(provider), config, 99);
    let (bytes, region) = memory();
    let (_, desc) = rail.register(&region).unwrap();
    rail.attach(PEER, &address).unwrap();
    rail.import(PEER, key, LEN as u64).unwrap();
    writeln!(child.0.stdin.as_mut().unwrap(), "{}", hex(&rail.address().unwrap())).unwrap();
    let mut seen = Seen::default();
    until(&mut rail, &mut seen, |seen| !seen.messages.is_empty());
    assert_eq!(seen.messages, [(PEER, b"attached".to_vec())]);

    let remote = Remote { key, offset: 0 };
    for round in 0..60 {
        let len = length(round);
        bytes[..len].copy_from_slice(&pattern(round, len));
        let local = Local { ptr: region.ptr(), len, desc };
        let ends = seen.done.len();
        // SAFETY: the source is leaked, and changes only after the write has completed and the
        // child has answered.
        let posted = insist(&mut rail, &mut seen, |rail| unsafe {
            rail.post_write(PEER, local, remote, Some(round), round as u64)
        });
        let pending = usize::from(posted == Posted::Pending);
        let answers = round as usize + 2;
        until(&mut rail, &mut seen, |seen| {
            seen.messages.len() == answers && seen.done.len() == ends + pending
        });
        assert_eq!(seen.messages.last().unwrap().1, [1], "{name}: round {round} of {len} bytes");
        bytes[..len].fill(0);
        // SAFETY: the target is leaked, and nothing reads it before the completion.
        insist(&mut rail, &mut seen, |rail| unsafe { rail.post_read(PEER, local, remote, 1000) });
        until(&mut rail, &mut seen, |seen| seen.done.len() == ends + pending + 1);
        assert!(bytes[..len] == pattern(round, len), "{name}: read back in round {round}");
    }
    assert!(seen.done.iter().all(|(_, result)| result.is_ok()), "{seen:?}");
    assert!(seen.down.is_empty(), "{seen:?}");

    // Kills the child, then posts reads to it.
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    let began = Instant::now();
    let (ends, mut posts) = (seen.done.len(), 0);
    let local = Local { ptr: region.ptr(), len: 4096, desc };
    while posts < 8 {
        assert!(
            began.elapsed() < 20 * DEADLINE,
            "{name}: refused for ever, and nothing said: {rail:?}"
        );
        // SAFETY: the target is leaked, and nothing reads it before the completion.
        match unsafe { rail.post_read(PEER, local, remote, posts) } {
            Ok(_) => posts += 1,
            Err(PostError::Again) => {
                rail.poll(32, &mut seen);
                rail.check_peers(&mut seen);
            }
            Err(PostError::PeerDown) => break,
            Err(error) => panic!("{name}: {error:?}"),
        }
    }
    until(&mut rail, &mut seen, |seen| {
        !seen.down.is_empty() && seen.done.len() == ends + posts as usize
    });
    // One deadline passes before the failure is detected, another before the outstanding operations
    // fail.
    assert!(began.elapsed() < 20 * DEADLINE, "{name}: after {:?}", began.elapsed());
    let told = matches!(seen.down[..], [(PEER, PeerError::Lost | PeerError::Silent)]);
    assert!(told, "{name}: {:?}", seen.down);
    for (_, result) in &seen.done[ends..] {
        assert!(
            matches!(result, Err(CompleteError::PeerDown | CompleteError::Unknown(_))),
            "{name}: {result:?}"
        );
    }
    // SAFETY: the target is leaked, and nothing reads it before the completion.
    let late = unsafe { rail.post_read(PEER, local, remote, 5000) };
    assert_eq!(late, Err(PostError::PeerDown), "{name}");
    rail.detach(PEER);
}

#[test]
fn two_processes_over_tcp() {
    two_processes("tcp", "tcp", CONFIG);
}

#[test]
fn two_processes_over_rxm() {
    two_processes("rxm", "tcp;ofi_rxm", CONFIG);
}

#[test]
fn two_processes_over_shm() {
    two_processes("shm", "shm", CONFIG);
}

#[test]
fn two_processes_over_shm_without_copies() {
    two_processes("shm-tracked", "shm", FabricConfig { inject: false, ..CONFIG });
}
