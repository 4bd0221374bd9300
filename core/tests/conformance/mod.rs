//! The contract of `Rail`, clause by clause, as tests that any rail can be put through.
//!
//! A package includes this file by `#[path]`, implements [`Fixture`] for its rail, and adds one line:
//! `rail_conformance!(name, MyFixture);`. Every test is a named function over the fixture; `cN_` is the clause of the contract in
//! `core/src/rail.rs`. Randomised ones run over a few seeds and name the seed when they fail.
#![allow(dead_code, reason = "each package uses its part of this")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ptr::NonNull;

use fishplate_core::error::{CompleteError, PeerError, PostError};
use fishplate_core::mem::{Peer, Region, RegionKind, Untrusted};
use fishplate_core::op::{Amo, AmoOp};
use fishplate_core::rail::{Caps, Local, Posted, Rail, RailKey, Remote, Sink};

/// Polls after which a rail that still owes something is held to have lost it.
const PATIENCE: usize = 100_000;

/// What lies around a region under test, and in it before anything is written.
const CANARY: u8 = 0xc5;

/// Two ends that are connected, or one that is connected to itself.
pub struct Link<R> {
    /// The ends; one if the rail is connected to itself.
    pub rails: Vec<R>,
    /// Which of `rails` posts, and which is posted to.
    pub origin: usize,
    pub target: usize,
    /// The target as the origin numbers it, and the origin as the target does.
    pub to: Peer,
    pub from: Peer,
}

/// How to make a rail for the tests.
pub trait Fixture {
    type Rail: Rail;

    /// Why an origin may still reach memory that it imported when that is taken back, if it may. A region registered
    /// later is out of its reach all the same.
    const REACHES_ON: Option<&'static str> = None;

    /// Why a write whose end a detach reported as failed may land later, if it may.
    const LANDS_LATE: Option<&'static str> = None;

    /// Why an import longer than what was registered is not refused, if it is not. What is posted through it is refused all the same.
    const IMPORTS_UNSEEN: Option<&'static str> = None;

    /// Why there is no such rail on this machine, if there is none.
    fn absent() -> Option<String> {
        None
    }

    /// A fresh pair; randomness, if there is any, comes from `seed`.
    fn link(seed: u64) -> Link<Self::Rail>;

    /// Memory that the rail can serve: `len` bytes, aligned to 8, zeroed, never freed.
    fn memory(_link: &mut Link<Self::Rail>, len: usize) -> Region {
        leaked(len)
    }

    /// Prepares the origin's access to what the target registered.
    fn import(link: &mut Link<Self::Rail>, key: RailKey, len: usize) -> Option<NonNull<u8>> {
        let to = link.to;
        link.origin().import(to, key, len as u64).expect("a key just given is imported")
    }

    /// Ends the target as if its process had died. `false`: this fixture cannot.
    fn kill_target(_link: &mut Link<Self::Rail>) -> bool {
        false
    }
}

/// Zeroed memory of this process that is never freed.
pub fn leaked(len: usize) -> Region {
    let words = Box::leak(vec![0u64; len.div_ceil(8).max(1)].into_boxed_slice());
    // SAFETY: leaked, so valid for ever; the tests touch it through raw copies alone.
    unsafe { Region::new(NonNull::new(words.as_mut_ptr().cast()).unwrap(), len, RegionKind::Private) }
}

impl<R: Rail> Link<R> {
    pub fn origin(&mut self) -> &mut R {
        &mut self.rails[self.origin]
    }

    pub fn target(&mut self) -> &mut R {
        &mut self.rails[self.target]
    }

    fn caps(&mut self) -> Caps {
        self.origin().caps()
    }

    /// Polls every end once and collects what they report; posts may have been held back to be sent together.
    fn turn(&mut self, budget: u32, seen: &mut Seen) -> u32 {
        let mut most = 0;
        for rail in &mut self.rails {
            rail.flush();
            let before = seen.events;
            let told = rail.poll(budget, seen);
            let reported = seen.events - before;
            assert!(reported <= budget, "a poll of {budget} reported {reported} events");
            assert!(
                told >= reported && told <= budget,
                "a poll reported {reported} of {budget} events and said {told}"
            );
            most = most.max(reported);
        }
        most
    }

    /// Polls until `enough`, and then some, so that what comes twice is seen.
    fn until(&mut self, seen: &mut Seen, what: &str, enough: impl Fn(&Seen) -> bool) {
        let mut turns = 0;
        while !enough(seen) {
            self.turn(8, seen);
            turns += 1;
            assert!(turns < PATIENCE, "{what}: not after {turns} polls; seen {seen:?}");
        }
        self.linger(seen);
    }

    fn linger(&mut self, seen: &mut Seen) {
        for _ in 0..200 {
            self.turn(8, seen);
        }
    }
}

/// What a rail has reported.
#[derive(Default)]
pub struct Seen {
    pub done: Vec<(u64, Result<(), CompleteError>)>,
    pub landed: Vec<(Peer, u32)>,
    pub messages: Vec<(Peer, Vec<u8>)>,
    pub down: Vec<(Peer, PeerError)>,
    pub events: u32,
    /// Looks at memory at the moment when a write is reported.
    on_landed: Option<Box<dyn FnMut(u32)>>,
}

impl std::fmt::Debug for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Seen { done, landed, messages, down, .. } = self;
        write!(f, "done {done:?} landed {landed:?} messages {} down {down:?}", messages.len())
    }
}

impl Seen {
    fn ends(&self) -> BTreeMap<u64, usize> {
        let mut ends = BTreeMap::new();
        for &(cx, _) in &self.done {
            *ends.entry(cx).or_default() += 1;
        }
        ends
    }
}

impl Sink for Seen {
    fn done(&mut self, cx: u64, result: Result<(), CompleteError>) {
        self.events += 1;
        self.done.push((cx, result));
    }

    fn landed(&mut self, peer: Peer, data: u32) {
        self.events += 1;
        if let Some(look) = &mut self.on_landed {
            look(data);
        }
        self.landed.push((peer, data));
    }

    fn message(&mut self, peer: Peer, bytes: Untrusted<'_>) {
        self.events += 1;
        let mut copy = vec![0; bytes.len()];
        bytes.copy_out(&mut copy);
        self.messages.push((peer, copy));
    }

    fn peer_down(&mut self, peer: Peer, why: PeerError) {
        self.events += 1;
        self.down.push((peer, why));
    }
}

/// A region of the target between canaries, and a source at the origin, both registered and imported.
struct Field {
    /// All of the target's memory: `PAD` bytes, the region, `PAD` bytes.
    whole: Region,
    len: usize,
    key: RailKey,
    mapped: Option<NonNull<u8>>,
    source: Region,
    desc: u64,
}

const PAD: usize = 64;

impl Field {
    fn new<F: Fixture>(link: &mut Link<F::Rail>, len: usize) -> Field {
        let whole = F::memory(link, len + 2 * PAD);
        fill(&whole, CANARY);
        let kind = match whole.kind() {
            RegionKind::Shared { segment, offset } => {
                RegionKind::Shared { segment, offset: offset + PAD as u64 }
            }
            RegionKind::Common { peer, offset } => RegionKind::Common { peer, offset: offset + PAD as u64 },
            kind => kind,
        };
        // SAFETY: PAD bytes into memory of len + 2 PAD bytes that is never freed.
        let inner = unsafe { Region::new(whole.ptr().add(PAD), len, kind) };
        let (key, _) = link.target().register(&inner).expect("memory of the fixture is registered");
        let source = leaked(len);
        let (_, desc) = link.origin().register(&source).expect("private memory is registered");
        let mapped = F::import(link, key, len);
        Field { whole, len, key, mapped, source, desc }
    }

    /// A part of the source.
    fn local(&self, offset: usize, len: usize) -> Local {
        // SAFETY: the tests stay inside the source.
        Local { ptr: unsafe { self.source.ptr().add(offset) }, len, desc: self.desc }
    }

    fn remote(&self, offset: u64) -> Remote {
        Remote { key: self.key, offset }
    }

    fn inside(&self) -> Vec<u8> {
        look(&self.whole)[PAD..PAD + self.len].to_vec()
    }

    fn check_canaries(&self, what: &str) {
        let bytes = look(&self.whole);
        assert!(bytes[..PAD].iter().all(|&b| b == CANARY), "{what}: written before the region");
        assert!(bytes[PAD + self.len..].iter().all(|&b| b == CANARY), "{what}: written behind the region");
    }
}

/// Copies memory out.
fn look(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    // SAFETY: the region is never freed, and as long as the copy.
    unsafe { std::ptr::copy(region.ptr().as_ptr(), bytes.as_mut_ptr(), region.len()) };
    bytes
}

fn fill(region: &Region, byte: u8) {
    // SAFETY: the region is never freed.
    unsafe { std::ptr::write_bytes(region.ptr().as_ptr(), byte, region.len()) };
}

fn set(region: &Region, offset: usize, bytes: &[u8]) {
    assert!(offset + bytes.len() <= region.len());
    // SAFETY: checked just now.
    unsafe { std::ptr::copy(bytes.as_ptr(), region.ptr().as_ptr().add(offset), bytes.len()) };
}

/// Posts until it is accepted, polling in between.
fn accept<R: Rail>(
    link: &mut Link<R>,
    seen: &mut Seen,
    mut post: impl FnMut(&mut R) -> Result<Posted, PostError>,
) -> Posted {
    for _ in 0..PATIENCE {
        let at = link.origin;
        match post(&mut link.rails[at]) {
            Ok(posted) => return posted,
            Err(PostError::Again) => {
                link.turn(8, seen);
            }
            Err(error) => panic!("a good post was refused: {error:?}"),
        }
    }
    panic!("Again did not go away by polling");
}

fn write<R: Rail>(
    link: &mut Link<R>,
    seen: &mut Seen,
    local: Local,
    remote: Remote,
    data: Option<u32>,
    cx: u64,
) -> Posted {
    let to = link.to;
    // SAFETY: the sources of these tests are never freed, and unchanged until the post is done.
    accept(link, seen, |rail| unsafe { rail.post_write(to, local, remote, data, cx) })
}

fn message<R: Rail>(link: &mut Link<R>, seen: &mut Seen, head: &[u8], body: &[u8], cx: u64) -> Posted {
    let to = link.to;
    accept(link, seen, |rail| rail.post_message(to, head, Untrusted::from_slice(body), cx))
}

/// Posts 4 writes, 4 messages and 4 reads in turn, each with 64 bytes of its own; those that are still pending.
fn posts_of_each_kind<R: Rail>(link: &mut Link<R>, field: &Field) -> Vec<u64> {
    let (mut seen, mut pending, to) = (Seen::default(), vec![], link.to);
    for n in 0..12u64 {
        let (local, remote) = (field.local(n as usize * 64, 64), field.remote(n * 64));
        let posted = match n % 3 {
            0 => write(link, &mut seen, local, remote, Some(n as u32), n),
            1 => message(link, &mut seen, &[n as u8], &[], n),
            // SAFETY: the source is never freed, and not read before the end.
            _ => accept(link, &mut seen, |rail| unsafe { rail.post_read(to, local, remote, n) }),
        };
        if posted == Posted::Pending {
            pending.push(n);
        }
    }
    pending.retain(|cx| !seen.done.iter().any(|(ended, _)| ended == cx));
    pending
}

thread_local! {
    /// What this test has said that it does not test.
    static SKIPPED: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Says what is not tested, once per test, if there is a reason not to.
fn skipped(what: &str, why: Option<&str>) -> bool {
    if let Some(why) = why {
        let line = format!("SKIPPED {what}: {why}");
        SKIPPED.with_borrow_mut(|said| {
            if !said.contains(&line) {
                println!("{line}");
                said.push(line);
            }
        });
    }
    why.is_some()
}

const SEEDS: std::ops::Range<u64> = 1..6;

pub fn caps_keep_their_promises<F: Fixture>() {
    let caps = F::link(1).caps();
    assert!(caps.max_message >= 256 && caps.max_rma >= 1 && caps.depth >= 1, "{caps:?}");
    assert!(matches!(caps.data_bytes, 4 | 8), "{caps:?}");
    assert_eq!(F::link(2).caps(), caps, "constant");
}

pub fn c1_a_refused_post_has_changed_nothing_and_again_goes_away<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 8192);
        let (mut seen, mut accepted, mut pending, mut refused) = (Seen::default(), vec![], vec![], 0);
        let to = link.to;
        for round in 0..3u64 {
            // Without a poll in between, until it is refused a few times; some rails never refuse.
            for i in 0..1000u64 {
                let n = round * 1000 + i;
                let at = (n % 1024) as usize * 8;
                let fresh = !accepted.iter().any(|m| m % 1024 == n % 1024);
                if fresh {
                    set(&field.source, at, &(n + 1).to_le_bytes());
                }
                let word = Some(n as u32);
                // SAFETY: the source is never freed, and a part of it is set once.
                let result = unsafe {
                    link.origin().post_write(to, field.local(at, 8), field.remote(at as u64), word, n)
                };
                match result {
                    Ok(posted) => {
                        accepted.push(n);
                        if posted == Posted::Pending {
                            pending.push(n);
                        }
                    }
                    Err(PostError::Again) => refused += 1,
                    Err(error) => panic!("seed {seed}: {error:?}"),
                }
                if refused > 20 * (round + 1) || accepted.len() == 1024 {
                    break;
                }
            }
            link.linger(&mut seen);
        }
        let all = accepted.len();
        link.until(&mut seen, "what was accepted", |seen| {
            seen.landed.len() >= all && seen.done.len() >= pending.len()
        });
        let mut landed: Vec<u64> = seen.landed.iter().map(|&(_, data)| data as u64).collect();
        landed.sort_unstable();
        assert_eq!(landed, accepted, "seed {seed}: what was refused arrived, or what was accepted did not");
        let mut ended: Vec<u64> = seen.done.iter().map(|&(cx, _)| cx).collect();
        ended.sort_unstable();
        assert_eq!(ended, pending, "seed {seed}");
        let inside = field.inside();
        for place in 0..1024usize {
            let want = accepted.iter().find(|&&n| n as usize % 1024 == place);
            let word = &inside[place * 8..place * 8 + 8];
            match want {
                Some(n) => assert_eq!(word, (n + 1).to_le_bytes(), "seed {seed}"),
                None => assert_eq!(word, [CANARY; 8], "seed {seed}: a refused write landed"),
            }
        }
    }
}

pub fn c2_a_pending_post_ends_once_and_a_done_one_never<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 4096);
        let (mut seen, mut pending) = (Seen::default(), vec![]);
        for n in 0..96u64 {
            let at = n as usize * 32;
            let posted = match n % 4 {
                0 => write(&mut link, &mut seen, field.local(at, 32), field.remote(at as u64), None, n),
                1 => write(
                    &mut link,
                    &mut seen,
                    field.local(at, 32),
                    field.remote(at as u64),
                    Some(n as u32),
                    n,
                ),
                2 => message(&mut link, &mut seen, &n.to_le_bytes(), b"body", n),
                _ => {
                    let to = link.to;
                    let (local, remote) = (field.local(at, 32), field.remote(at as u64));
                    // SAFETY: the source is never freed, and not read before the end.
                    accept(&mut link, &mut seen, |rail| unsafe { rail.post_read(to, local, remote, n) })
                }
            };
            if posted == Posted::Pending {
                pending.push(n);
            }
        }
        link.until(&mut seen, "ends", |seen| seen.done.len() >= pending.len() && seen.landed.len() >= 24);
        assert_eq!(seen.ends().into_keys().collect::<Vec<_>>(), pending, "seed {seed}");
        assert!(seen.ends().into_values().all(|n| n == 1), "seed {seed}: {seen:?}");
        assert!(seen.done.iter().all(|(_, result)| result.is_ok()), "seed {seed}: {seen:?}");
    }
}

pub fn c2_a_read_brings_what_was_there<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 256);
        let bytes: Vec<u8> = (0..=255).collect();
        set(&field.whole, PAD, &bytes);
        let mut seen = Seen::default();
        for (n, (offset, len)) in
            [(0usize, 256usize), (1, 7), (255, 1), (256, 0), (64, 128)].into_iter().enumerate()
        {
            fill(&field.source, 0);
            let to = link.to;
            let (local, remote) = (field.local(0, len), field.remote(offset as u64));
            // SAFETY: the source is never freed, and not read before the end.
            let posted =
                accept(&mut link, &mut seen, |rail| unsafe { rail.post_read(to, local, remote, n as u64) });
            if posted == Posted::Pending {
                link.until(&mut seen, "read", |seen| seen.done.iter().any(|&(cx, _)| cx == n as u64));
            }
            assert_eq!(look(&field.source)[..len], bytes[offset..offset + len], "seed {seed}");
            assert!(look(&field.source)[len..].iter().all(|&b| b == 0), "seed {seed}: read too much");
        }
        assert!(seen.landed.is_empty() && seen.messages.is_empty());
    }
}

pub fn c3_the_data_is_there_when_its_word_is_reported<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 64 * 64);
        let whole = field.whole;
        let mut seen = Seen {
            on_landed: Some(Box::new(move |data| {
                let at = PAD + data as usize * 64;
                assert_eq!(
                    look(&whole)[at..at + 64],
                    [data as u8 + 1; 64],
                    "seed {seed}: word {data} before its data"
                );
            })),
            ..Seen::default()
        };
        for n in 0..64u32 {
            set(&field.source, n as usize * 64, &[n as u8 + 1; 64]);
            let (local, remote) = (field.local(n as usize * 64, 64), field.remote(n as u64 * 64));
            write(&mut link, &mut seen, local, remote, Some(n), n as u64);
        }
        link.until(&mut seen, "writes", |seen| seen.landed.len() >= 64);
        field.check_canaries("writes inside");
    }
}

pub fn c4_everything_arrives_once_from_the_right_peer<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 64);
        let mut seen = Seen::default();
        let max = link.caps().max_message;
        let ordered = link.caps().ordered;
        for n in 0..200u32 {
            match n % 2 {
                0 => {
                    write(
                        &mut link,
                        &mut seen,
                        field.local(0, 8),
                        field.remote(0),
                        Some(n | 0xffff_0000),
                        n as u64,
                    );
                }
                _ => {
                    let mut bytes = n.to_le_bytes().to_vec();
                    bytes.resize(4 + n as usize * (max.min(512) - 4) / 200, n as u8);
                    let (head, body) = bytes.split_at(n as usize % 5);
                    message(&mut link, &mut seen, head, body, n as u64);
                }
            }
        }
        link.until(&mut seen, "arrivals", |seen| seen.landed.len() >= 100 && seen.messages.len() >= 100);
        assert_eq!((seen.landed.len(), seen.messages.len()), (100, 100), "seed {seed}");
        assert!(seen.landed.iter().all(|&(peer, _)| peer == link.from), "seed {seed}: {:?}", seen.landed);
        let mut words: Vec<u32> = seen.landed.iter().map(|&(_, data)| data & 0xffff).collect();
        let mut numbers = vec![];
        for (peer, bytes) in &seen.messages {
            assert_eq!(*peer, link.from);
            let n = u32::from_le_bytes(bytes[..4].try_into().unwrap());
            assert_eq!(bytes.len(), 4 + n as usize * (max.min(512) - 4) / 200, "seed {seed}: message {n}");
            assert!(bytes[4..].iter().all(|&b| b == n as u8), "seed {seed}: message {n} was changed");
            numbers.push(n);
        }
        if !ordered {
            words.sort_unstable();
            numbers.sort_unstable();
        }
        assert_eq!(words, (0..200).step_by(2).collect::<Vec<_>>(), "seed {seed}");
        assert_eq!(numbers, (1..200).step_by(2).collect::<Vec<_>>(), "seed {seed}");
        assert!(seen.down.is_empty());
    }
}

pub fn c4_empty_writes_and_messages_arrive_too<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 64);
        let mut seen = Seen::default();
        write(&mut link, &mut seen, field.local(64, 0), field.remote(64), Some(7), 1);
        message(&mut link, &mut seen, &[], &[], 2);
        link.until(&mut seen, "empty", |seen| seen.landed.len() == 1 && seen.messages.len() == 1);
        assert_eq!(seen.landed, [(link.from, 7)]);
        assert_eq!(seen.messages, [(link.from, vec![])]);
        assert_eq!(field.inside(), [CANARY; 64]);
    }
}

pub fn c4_a_write_without_a_word_is_not_reported<F: Fixture>() {
    let mut link = F::link(1);
    let field = Field::new::<F>(&mut link, 64);
    set(&field.source, 0, b"quietly");
    let mut seen = Seen::default();
    let pending = write(&mut link, &mut seen, field.local(0, 7), field.remote(5), None, 3) == Posted::Pending;
    link.until(&mut seen, "write", |seen| seen.done.len() >= pending as usize);
    assert_eq!(field.inside()[5..12], *b"quietly");
    assert!(seen.landed.is_empty() && seen.messages.is_empty());
}

pub fn c5_messages_and_injects_are_copied_before_the_post_returns<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 4096);
        let inject = link.caps().inject.min(64);
        let mut seen = Seen::default();
        for n in 0..40u8 {
            let mut head = [n; 20];
            let mut body = [n ^ 0xff; 30];
            message(&mut link, &mut seen, &head, &body, n as u64);
            (head, body) = ([0xee; 20], [0xee; 30]);
            std::hint::black_box((&head, &body));
            if inject != 0 {
                let mut bytes = vec![n + 1; inject];
                let local = Local { ptr: NonNull::new(bytes.as_mut_ptr()).unwrap(), len: inject, desc: 0 };
                write(
                    &mut link,
                    &mut seen,
                    local,
                    field.remote(n as u64 * 64),
                    Some(n as u32),
                    100 + n as u64,
                );
                bytes.fill(0xee);
                std::hint::black_box(&bytes);
            }
        }
        let writes = if inject != 0 { 40 } else { 0 };
        link.until(&mut seen, "messages", |seen| seen.messages.len() >= 40 && seen.landed.len() >= writes);
        for (_, bytes) in &seen.messages {
            let n = bytes[0];
            assert!(
                bytes.len() == 50 && bytes[..20] == [n; 20] && bytes[20..] == [n ^ 0xff; 30],
                "seed {seed}"
            );
        }
        for n in 0..writes {
            let inside = field.inside();
            assert!(
                inside[n * 64..n * 64 + inject].iter().all(|&b| b == n as u8 + 1),
                "seed {seed}: inject {n}"
            );
        }
    }
}

pub fn c6_poll_reports_at_most_its_budget<F: Fixture>() {
    for budget in [0u32, 1, 2, 3, 7] {
        for seed in SEEDS {
            let mut link = F::link(seed);
            let mut seen = Seen::default();
            for n in 0..16u32 {
                message(&mut link, &mut seen, &n.to_le_bytes(), &[], n as u64);
            }
            // `turn` checks each poll.
            for _ in 0..400 {
                link.turn(budget, &mut seen);
            }
            link.until(&mut seen, "messages", |seen| seen.messages.len() == 16);
        }
    }
}

pub fn c7_bad_keys_and_ranges_touch_nothing<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 128);
        let RailKey { key, base } = field.key;
        fill(&field.source, 0x11);
        let mut bad = vec![];
        for (offset, len) in
            [(128u64, 1usize), (127, 2), (121, 8), (129, 0), (u64::MAX, 1), (u64::MAX - 7, 8), (1, 128)]
        {
            bad.push((field.remote(offset), len));
        }
        for wrong in [0, key ^ 1, key.wrapping_add(1 << 20), u64::MAX, key | 1 << 63] {
            if wrong != key {
                bad.push((Remote { key: RailKey { key: wrong, base }, offset: 0 }, 8));
            }
        }
        let mut seen = Seen::default();
        let (to, mut pending) = (link.to, 0);
        for (n, &(remote, len)) in bad.iter().enumerate() {
            for read in [false, true] {
                let local = field.local(0, len.min(128));
                let cx = n as u64 * 2 + read as u64;
                let mut result = Err(PostError::Again);
                for _ in 0..PATIENCE {
                    // SAFETY: the source is never freed.
                    result = unsafe {
                        match read {
                            false => link.origin().post_write(to, local, remote, Some(cx as u32), cx),
                            true => link.origin().post_read(to, local, remote, cx),
                        }
                    };
                    if result != Err(PostError::Again) {
                        break;
                    }
                    link.turn(8, &mut seen);
                }
                match result {
                    Ok(Posted::Done) => panic!("seed {seed}: {remote:?} for {len} bytes was done at once"),
                    Ok(Posted::Pending) => pending += 1,
                    Err(error) => {
                        assert_eq!(error, PostError::BadKey, "seed {seed}: {remote:?} for {len} bytes")
                    }
                }
            }
        }
        link.until(&mut seen, "ends", |seen| seen.done.len() >= pending);
        assert_eq!(seen.done.len(), pending, "seed {seed}");
        assert!(seen.done.iter().all(|(_, result)| result.is_err()), "seed {seed}: {seen:?}");
        assert!(seen.landed.is_empty(), "seed {seed}: a refused write was reported: {seen:?}");
        assert_eq!(field.inside(), [CANARY; 128], "seed {seed}");
        field.check_canaries("bad ranges");
        assert_eq!(look(&field.source), [0x11; 128], "seed {seed}: a refused read changed local memory");
    }
}

pub fn c7_a_key_taken_back_is_dead_for_ever<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 64);
        link.target().deregister(field.key);
        // The next region must not be reachable by the old key.
        let next = F::memory(&mut link, 64);
        fill(&next, CANARY);
        let (key, _) = link.target().register(&next).unwrap();
        F::import(&mut link, key, 64);
        set(&field.source, 0, &[0x22; 64]);
        let (mut seen, mut pending, to) = (Seen::default(), 0, link.to);
        for n in 0..8u64 {
            // SAFETY: the source is never freed.
            match unsafe { link.origin().post_write(to, field.local(0, 8), field.remote(0), Some(9), n) } {
                Ok(Posted::Pending) => pending += 1,
                Ok(Posted::Done) => assert!(F::REACHES_ON.is_some(), "seed {seed}: done"),
                Err(_) => {}
            }
            link.turn(8, &mut seen);
        }
        link.until(&mut seen, "ends", |seen| seen.done.len() >= pending);
        let failed = |(_, result): &(u64, Result<(), CompleteError>)| result.is_err();
        assert!(F::REACHES_ON.is_some() || seen.done.iter().all(failed), "seed {seed}: {seen:?}");
        field.check_canaries("taken back");
        assert_eq!(look(&next), [CANARY; 64], "seed {seed}: another region was written");
        if skipped("that it is not written any more", F::REACHES_ON) {
            continue;
        }
        assert!(seen.landed.is_empty(), "seed {seed}: {seen:?}");
        assert_eq!(field.inside(), [CANARY; 64], "seed {seed}: the old region was written");
    }
}

pub fn c7_a_region_taken_back_in_flight_is_not_written_any_more<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 1024);
        set(&field.source, 0, &[0x33; 1024]);
        let (mut seen, mut pending) = (Seen::default(), 0);
        for n in 0..16u64 {
            let (local, remote) = (field.local(n as usize * 64, 64), field.remote(n * 64));
            pending += (write(&mut link, &mut seen, local, remote, None, n) == Posted::Pending) as usize;
        }
        link.target().deregister(field.key);
        let then = field.inside();
        link.until(&mut seen, "ends", |seen| seen.done.len() >= pending);
        assert_eq!(field.inside(), then, "seed {seed}: written after it was taken back");
        assert_eq!(seen.done.len(), pending, "seed {seed}");
    }
}

pub fn c7_an_import_of_nothing_is_refused<F: Fixture>() {
    let mut link = F::link(1);
    let field = Field::new::<F>(&mut link, 64);
    let to = link.to;
    let RailKey { key, base } = field.key;
    assert!(link.origin().import(to, RailKey { key: u64::MAX, base }, 8).is_err());
    if !skipped("that an import is no longer than the region", F::IMPORTS_UNSEEN) {
        assert!(
            link.origin().import(to, RailKey { key, base }, 65).is_err(),
            "longer than what was registered"
        );
    }
    assert!(link.origin().import(to, RailKey { key, base }, u64::MAX).is_err());
}

pub fn too_long_is_said_and_nothing_is_posted<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let Caps { max_message, max_rma, .. } = link.caps();
        let to = link.to;
        let mut seen = Seen::default();
        let body = vec![1; max_message];
        let longest = |link: &mut Link<F::Rail>, len: usize| {
            for _ in 0..PATIENCE {
                let (head, body) = body[..len.min(max_message)].split_at(16);
                let extra = [1; 17];
                let head = if len > max_message { &extra[..] } else { head };
                match link.origin().post_message(to, head, Untrusted::from_slice(body), 5) {
                    Err(PostError::Again) => link.turn(8, &mut Seen::default()),
                    other => return other,
                };
            }
            Err(PostError::Again)
        };
        let error = PostError::TooLong { len: max_message + 1, max: max_message };
        assert_eq!(longest(&mut link, max_message + 1), Err(error), "seed {seed}");
        assert!(longest(&mut link, max_message).is_ok(), "seed {seed}");
        link.until(&mut seen, "the longest message", |seen| seen.messages.len() == 1);
        assert_eq!(seen.messages[0].1.len(), max_message);
        if max_rma <= 1 << 30 {
            // One byte more than the rail carries; never touched, so never really there.
            let field = Field::new::<F>(&mut link, 64);
            let long = leaked(max_rma + 1);
            let local = Local { ptr: long.ptr(), len: max_rma + 1, desc: field.desc };
            let mut pending = false;
            // SAFETY: the source is as long as said and never freed.
            match unsafe { link.origin().post_write(to, local, field.remote(0), Some(1), 77) } {
                Ok(posted) => {
                    assert_eq!(posted, Posted::Pending);
                    pending = true;
                }
                Err(PostError::Again) => {}
                Err(error) => {
                    assert!(
                        matches!(error, PostError::TooLong { .. } | PostError::BadKey),
                        "seed {seed}: {error:?}"
                    );
                }
            }
            let mut seen = Seen::default();
            link.until(&mut seen, "end", |seen| {
                !pending || seen.done.iter().any(|&(cx, r)| cx == 77 && r.is_err())
            });
            assert_eq!(field.inside(), [CANARY; 64]);
            field.check_canaries("too long");
            if max_rma <= 1 << 20 {
                let field = Field::new::<F>(&mut link, max_rma + 1);
                let local = field.local(0, max_rma + 1);
                // SAFETY: the source is as long as said and never freed.
                match unsafe { link.origin().post_write(to, local, field.remote(0), Some(1), 78) } {
                    Ok(posted) => assert_eq!(posted, Posted::Pending),
                    Err(error) => {
                        let long = PostError::TooLong { len: max_rma + 1, max: max_rma };
                        assert!(error == long || error == PostError::Again, "seed {seed}: {error:?}");
                    }
                }
                link.linger(&mut seen);
                assert!(seen.landed.is_empty(), "seed {seed}: longer than it says it carries");
            }
        }
    }
}

pub fn detach_ends_what_is_pending_and_reports_nothing_else<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 1024);
        set(&field.source, 0, &[0x44; 1024]);
        let (to, pending) = (link.to, posts_of_each_kind(&mut link, &field));
        link.origin().detach(to);
        let mut after = Seen::default();
        let at = link.origin;
        let mut last = None;
        for turns in 0.. {
            link.rails[at].flush();
            link.rails[at].poll(8, &mut after);
            if last.is_none() && after.done.len() >= pending.len() {
                last = Some(field.inside());
            }
            if last.is_some() && turns > 400 {
                break;
            }
            assert!(turns < PATIENCE, "seed {seed}: {after:?} of {pending:?}");
        }
        assert_eq!(after.ends().into_keys().collect::<Vec<_>>(), pending, "seed {seed}");
        assert!(after.ends().into_values().all(|n| n == 1), "seed {seed}: {after:?}");
        assert!(
            after.landed.is_empty() && after.messages.is_empty() && after.down.is_empty(),
            "seed {seed}: {after:?}"
        );
        // Once more is harmless, and so is a peer that never was.
        link.origin().detach(to);
        link.origin().detach(Peer(9));
        // What ended as failed does not land later.
        if skipped("that what failed does not land later", F::LANDS_LATE) {
            continue;
        }
        let failed: Vec<u64> = after.done.iter().filter(|(_, r)| r.is_err()).map(|&(cx, _)| cx).collect();
        let then = last.unwrap();
        link.linger(&mut Seen::default());
        for n in failed.into_iter().filter(|n| n % 3 == 0) {
            let place = n as usize * 64..n as usize * 64 + 64;
            assert_eq!(
                field.inside()[place.clone()],
                then[place],
                "seed {seed}: write {n} landed after its end"
            );
        }
    }
}

pub fn a_dead_peer_is_reported_once_and_what_is_pending_to_it_fails<F: Fixture>() {
    for seed in SEEDS {
        let mut link = F::link(seed);
        let field = Field::new::<F>(&mut link, 4096);
        let (to, pending) = (link.to, posts_of_each_kind(&mut link, &field));
        if !F::kill_target(&mut link) {
            skipped("all of it", Some("the target cannot be killed"));
            return;
        }
        let mut after = Seen::default();
        let at = link.origin;
        for turns in 0.. {
            link.rails[at].poll(8, &mut after);
            link.rails[at].check_peers(&mut after);
            if after.done.len() >= pending.len() && turns > 400 {
                break;
            }
            assert!(turns < PATIENCE, "seed {seed}: {after:?} of {pending:?}");
        }
        assert_eq!(after.ends().into_keys().collect::<Vec<_>>(), pending, "seed {seed}");
        let ok = after.done.iter().filter(|(_, result)| result.is_ok()).count();
        // What an origin reaches without asking, it reaches until it knows.
        if F::REACHES_ON.is_none() {
            assert!(
                after.done.iter().all(|&(cx, result)| cx % 3 != 2 || result.is_err()),
                "seed {seed}: read from the dead"
            );
            assert!(ok < after.done.len() || pending.is_empty(), "seed {seed}: {after:?}");
        }
        assert_eq!(after.down, [(to, PeerError::Died)], "seed {seed}");
        // SAFETY: the source is never freed.
        let late = unsafe { link.origin().post_write(to, field.local(0, 8), field.remote(0), None, 99) };
        match late {
            Err(error) => {
                assert!(matches!(error, PostError::PeerDown | PostError::Again), "seed {seed}: {error:?}")
            }
            Ok(posted) => {
                assert_eq!(posted, Posted::Pending, "seed {seed}");
                for _ in 0..400 {
                    link.rails[at].poll(8, &mut after);
                }
                let end = after.done.iter().find(|&&(cx, _)| cx == 99);
                assert!(matches!(end, Some((_, Err(CompleteError::PeerDown)))), "seed {seed}: {end:?}");
            }
        }
    }
}

pub fn mapped_memory_is_the_peers_memory<F: Fixture>() {
    let mut link = F::link(1);
    let field = Field::new::<F>(&mut link, 64);
    let Some(mapped) = field.mapped else { return };
    // SAFETY: the mapping is as long as the region was imported.
    unsafe { std::ptr::write_bytes(mapped.as_ptr(), 0x66, 64) };
    assert_eq!(field.inside(), [0x66; 64]);
    field.check_canaries("mapped");
    let to = link.to;
    link.origin().notify(to);
    link.origin().release(to, field.key);
}

pub fn copies_at_once_are_whole_and_checked<F: Fixture>() {
    let mut link = F::link(1);
    let field = Field::new::<F>(&mut link, 64);
    let to = link.to;
    set(&field.source, 0, &[0x77; 64]);
    // SAFETY: the source is as long as said.
    unsafe {
        if let Some(done) = link.origin().copy_to(to, field.local(0, 16), field.remote(48)) {
            assert_eq!(done, Ok(()));
            assert_eq!(field.inside()[48..], [0x77; 16]);
            assert!(
                link.origin()
                    .copy_to(to, field.local(0, 17), field.remote(48))
                    .is_none_or(|done| done.is_err())
            );
            field.check_canaries("copy_to");
        }
        if let Some(done) = link.origin().copy_from(to, field.local(16, 16), field.remote(0)) {
            assert_eq!(done, Ok(()));
            assert_eq!(look(&field.source)[16..32], [CANARY; 16]);
            assert!(
                link.origin()
                    .copy_from(to, field.local(0, 17), field.remote(48))
                    .is_none_or(|done| done.is_err())
            );
            assert_eq!(look(&field.source)[..16], [0x77; 16]);
        }
    }
}

pub fn native_atomics_are_atomics_or_unsupported<F: Fixture>() {
    let mut link = F::link(1);
    let native = link.caps().native_atomics;
    let field = Field::new::<F>(&mut link, 64);
    set(&field.whole, PAD, &[0; 64]);
    let (mut seen, to) = (Seen::default(), link.to);
    for (n, (op, width)) in
        [(AmoOp::Add, 8u8), (AmoOp::Inc, 1), (AmoOp::Xor, 4), (AmoOp::Swap, 2)].into_iter().enumerate()
    {
        let amo = Amo { op, width, operand: 0x55, compare: 0 };
        let fetch = field.source.ptr().cast();
        let mut result = Err(PostError::Again);
        for _ in 0..PATIENCE {
            // SAFETY: the source is never freed and aligned.
            result = unsafe {
                link.origin().post_atomic(to, amo, field.remote(n as u64 * 8), Some(fetch), n as u64)
            };
            if result != Err(PostError::Again) {
                break;
            }
            link.turn(8, &mut seen);
        }
        if !native {
            assert_eq!(result, Err(PostError::Unsupported));
            continue;
        }
        assert!(result.is_ok(), "{result:?}");
        link.until(&mut seen, "atomic", |seen| seen.done.len() > n);
        let want = if op == AmoOp::Inc { 1 } else { 0x55 };
        assert_eq!(field.inside()[n * 8..n * 8 + 8], u64::to_le_bytes(want), "{op:?}");
        assert_eq!(look(&field.source)[..8], [0; 8], "fetched");
    }
    if native {
        let amo = Amo { op: AmoOp::Set, width: 8, operand: u64::MAX, compare: 0 };
        for offset in [64, 57, u64::MAX - 3] {
            // SAFETY: nothing is fetched.
            assert!(unsafe { link.origin().post_atomic(to, amo, field.remote(offset), None, 9) }.is_err());
        }
        field.check_canaries("atomics");
    }
}

/// Every test of the suite for one fixture, in a module of its own.
#[macro_export]
macro_rules! rail_conformance {
    ($name:ident, $fixture:ty) => {
        mod $name {
            #[allow(unused_imports, reason = "the fixture may be named by path")]
            use super::*;
            $crate::rail_conformance! { @tests $fixture;
                caps_keep_their_promises
                c1_a_refused_post_has_changed_nothing_and_again_goes_away
                c2_a_pending_post_ends_once_and_a_done_one_never
                c2_a_read_brings_what_was_there
                c3_the_data_is_there_when_its_word_is_reported
                c4_everything_arrives_once_from_the_right_peer
                c4_empty_writes_and_messages_arrive_too
                c4_a_write_without_a_word_is_not_reported
                c5_messages_and_injects_are_copied_before_the_post_returns
                c6_poll_reports_at_most_its_budget
                c7_bad_keys_and_ranges_touch_nothing
                c7_a_key_taken_back_is_dead_for_ever
                c7_a_region_taken_back_in_flight_is_not_written_any_more
                c7_an_import_of_nothing_is_refused
                too_long_is_said_and_nothing_is_posted
                detach_ends_what_is_pending_and_reports_nothing_else
                a_dead_peer_is_reported_once_and_what_is_pending_to_it_fails
                mapped_memory_is_the_peers_memory
                copies_at_once_are_whole_and_checked
                native_atomics_are_atomics_or_unsupported
            }
        }
    };
    (@tests $fixture:ty; $($test:ident)*) => {
        $(#[test] fn $test() {
            match <$fixture as conformance::Fixture>::absent() {
                None => conformance::$test::<$fixture>(),
                Some(why) => println!("SKIPPED {}: {why}", stringify!($test)),
            }
        })*
    };
}
