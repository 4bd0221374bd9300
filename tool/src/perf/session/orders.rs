//! Tests that a follower refuses invalid orders, and that its error names the side that sent them.
//! Here the follower is its own peer, and a script acts as the leader.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use fishplate::bootstrap::{WIRE_VERSION, Wire};
use fishplate::config::Settings;
use serde::Serialize;

use super::super::job::{Job, Tally};
use super::super::meet::Met;
use super::super::setup::Setup;
use super::{Order, Session};
use crate::args::{Layout, Mode, SignalKind, Test, Transport};
use crate::cpu::Places;
use crate::failure::Failure;

const REGION: usize = 64 << 10;

const TRANSPORTS: [Transport; 3] = [Transport::Shm, Transport::Fabric, Transport::Gpu];

const TESTS: [Test; 9] = [
    Test::PutSignal,
    Test::Put,
    Test::Get,
    Test::Amo,
    Test::SignalRate,
    Test::Tag,
    Test::TagBw,
    Test::Ring,
    Test::Pool,
];

fn head(len: usize) -> Vec<u8> {
    let mut head = b"FPBS".to_vec();
    head.extend(WIRE_VERSION.to_le_bytes());
    head.extend([0, 0]);
    head.extend((len as u32).to_le_bytes());
    head
}

/// The follower's node is its own peer.
fn follower() -> Session<false> {
    let setup = Setup {
        transport: Transport::Shm,
        rails: 1,
        settings: Settings::DEFAULT,
        device: None,
        relay: false,
        mode: Mode::Inline,
        crowded: false,
        region: REGION,
        timeout: Duration::from_secs(20),
    };
    let opened = setup.open().unwrap();
    let (here, mut there) = UnixStream::pair().unwrap();
    // The leader's address and handles are the follower's own.
    let echo = std::thread::spawn(move || {
        for _ in 0..2 {
            let mut message = [0; 12];
            there.read_exact(&mut message).unwrap();
            let len = u32::from_le_bytes(message[8..].try_into().unwrap());
            let mut body = vec![0; len as usize];
            there.read_exact(&mut body).unwrap();
            there.write_all(&[&message[..], &body].concat()).unwrap();
        }
    });
    let theirs = opened.card.clone();
    let name = "this process".into();
    let met = Met { wire: Wire::over(here.into()), theirs, name, second: None, notes: vec![] };
    let session = Session::join(&setup, opened, met).unwrap();
    echo.join().unwrap();
    Session { timeout: Duration::from_nanos(1), ..session }
}

fn json(word: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(word).unwrap()
}

/// Returns the error of a follower over `transport`, after a leader greets, sends `words` and
/// closes.
fn follow(
    session: &mut Session<false>,
    transport: Transport,
    words: impl IntoIterator<Item = Vec<u8>>,
) -> Failure {
    let hello = Order::Hello {
        version: env!("CARGO_PKG_VERSION").into(),
        test: Test::Put,
        places: Places { cpus: None },
    };
    let (here, mut there) = UnixStream::pair().unwrap();
    for word in [json(&hello), b"null".to_vec()].into_iter().chain(words) {
        there.write_all(&[head(word.len()), word].concat()).unwrap();
    }
    there.shutdown(std::net::Shutdown::Write).unwrap();
    (session.met.wire, session.transport) = (Wire::over(here.into()), transport);
    session.follow_all(REGION, Some(Test::Put)).unwrap_err()
}

fn order(test: Test) -> Job {
    Job {
        test,
        size: 8,
        iters: 64,
        warmup: 0,
        check: false,
        window: 16,
        layout: Layout::Split,
        signal: SignalKind::Add,
        bidirectional: false,
        seed: 1,
        timeout_ns: 1,
    }
}

fn ordered(job: Job) -> [Vec<u8>; 3] {
    [json(&Order::Measure(job)), b"null".to_vec(), json(&Tally::default())]
}

/// Returns orders that equal `job` except for one invalid field.
fn spoilt(job: Job) -> Vec<Job> {
    let mut all = vec![
        Job { iters: 0, ..job },
        Job { iters: u64::MAX, ..job },
        Job { warmup: u64::MAX, ..job },
        Job { timeout_ns: 0, ..job },
        Job { timeout_ns: u64::MAX, ..job },
    ];
    all.extend([0, REGION + 1, usize::MAX - 7, usize::MAX].map(|size| Job { size, ..job }));
    all.extend([0, 3, 1 << 17, 1 << 63, u64::MAX].map(|window| Job { window, ..job }));
    all
}

#[test]
fn an_order_that_cannot_be_is_refused_and_names_who_gave_it() {
    let (mut session, mut refused) = (follower(), 0);
    for transport in TRANSPORTS {
        for test in TESTS {
            for job in spoilt(order(test)) {
                let told = follow(&mut session, transport, ordered(job)).to_string();
                assert!(
                    told.starts_with("this process sent an invalid order: "),
                    "{transport:?} {job:?}: {told}"
                );
                refused += 1;
            }
        }
    }
    println!("{refused} orders were refused");
    for (transport, job) in [
        (Transport::Gpu, order(Test::Amo)),
        (Transport::Fabric, order(Test::Ring)),
        (Transport::Gpu, Job { layout: Layout::Adjacent, ..order(Test::PutSignal) }),
        (Transport::Shm, Job { size: 16, ..order(Test::Amo) }),
        (Transport::Shm, Job { size: 24, ..order(Test::Ring) }),
        (Transport::Shm, order(Test::Pool)),
        (Transport::Shm, Job { bidirectional: true, ..order(Test::Get) }),
    ] {
        let told = follow(&mut session, transport, ordered(job)).to_string();
        assert!(told.contains("sent an invalid order"), "{transport:?} {job:?}: {told}");
    }
}

#[test]
fn an_order_that_can_be_is_followed() {
    let mut session = follower();
    for transport in TRANSPORTS {
        for test in [Test::PutSignal, Test::Put, Test::Get, Test::Tag] {
            let told = follow(&mut session, transport, ordered(order(test))).to_string();
            assert!(told.contains("in time"), "{transport:?} {test:?}: {told}");
        }
    }
}

#[test]
fn words_that_are_no_orders_end_a_follower_with_an_error() {
    let seed: u64 =
        std::env::var("FISHPLATE_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    println!("FISHPLATE_SEED={seed}");
    let mut session = follower();
    let mut state = seed | 1;
    // xorshift64.
    let mut below = |end: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % end as u64) as usize
    };
    for _ in 0..400 {
        let mut words = ordered(order(TESTS[below(TESTS.len())]));
        let word = &mut words[0];
        for _ in 0..=below(3) {
            let at = below(word.len());
            match below(4) {
                0 => word.truncate(at + 1),
                1 => word.insert(at, b"0123456789\"{},:-e.\x1b\xff"[below(20)]),
                2 => drop(word.remove(at)),
                _ => word[at] = b"0123456789\"{},:-e.\x1b\xff"[below(20)],
            }
            if word.is_empty() {
                break;
            }
        }
        let told = follow(&mut session, TRANSPORTS[below(3)], words).to_string();
        assert!(!told.contains('\x1b'), "a terminal obeys {told:?}");
    }
}
