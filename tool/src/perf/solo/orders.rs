//! What a follower does with orders that no leader of ours gives: it refuses them, and names who
//! gave them. Here the follower is its own peer, and a script stands in for the leader.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fishplate_core::engine::{Asleep, Config};
use fishplate_core::rail::Rail;
use fishplate_core::rail::loopback::Loopback;
use fishplate_sys::LinuxHost;
use serde::Serialize;

use super::super::leg::{Leg, Tally};
use super::super::seat::Seat;
use super::super::table::{Order, Table, Talk};
use super::ground::{Ground, sit};
use crate::args::{Layout, Mode, SignalKind, Test, Transport};
use crate::clock::Clock;
use crate::cpu::Places;
use crate::failure::{Failure, Outcome};

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

/// Says what it was told to say, then hangs up.
struct Script(VecDeque<Vec<u8>>);

impl<R: Rail, const RAILS: usize> Talk<R, RAILS> for Script {
    fn exchange(&mut self, _: &mut Seat<'_, R, RAILS>, _: &[u8], _: Instant) -> Outcome<Vec<u8>> {
        self.0.pop_front().ok_or_else(|| Failure::lost("the script", "it has ended"))
    }
}

fn json(word: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(word).unwrap()
}

/// What a follower over `transport` says to a leader that greets and then says `words`.
fn follow(transport: Transport, words: impl IntoIterator<Item = Vec<u8>>) -> Failure {
    let hello = Order::Hello {
        version: env!("CARGO_PKG_VERSION").into(),
        test: Test::Put,
        places: Places { cpus: None },
    };
    let greeting = [json(&hello), b"null".to_vec()];
    let (config, host, never, clock) =
        (Config::DEFAULT, LinuxHost::private(), Asleep::new(), Clock::stepping(1));
    let leg = Leg { size: REGION, ..order(Test::Put) };
    let mut ground = Ground::<1>::new(&config, &leg).unwrap();
    let rails = [Loopback::<64>::new()];
    let (halfway, handle) = sit(&mut ground, config, rails, &host, &never, clock, |_, _, _| Ok(())).unwrap();
    let mut table = Table {
        seat: halfway.import(&handle).unwrap(),
        talk: Script(greeting.into_iter().chain(words).collect()),
        transport,
        pad: None,
        timeout: Duration::from_nanos(1),
        notes: vec![],
    };
    table.follow(REGION, Some(Test::Put)).unwrap_err()
}

/// An order that can be followed.
fn order(test: Test) -> Leg {
    Leg {
        test,
        size: 8,
        iters: 64,
        warmup: 0,
        check: false,
        window: 16,
        layout: Layout::Split,
        signal: SignalKind::Add,
        mode: Mode::Inline,
        seed: 1,
        timeout_ns: 1,
    }
}

/// An order, and the words that follow it.
fn ordered(leg: Leg) -> [Vec<u8>; 3] {
    [json(&Order::Leg(leg)), b"null".to_vec(), json(&Tally::default())]
}

/// The orders that are like `leg` but for one field that cannot be.
fn spoilt(leg: Leg) -> Vec<Leg> {
    let mut all = vec![
        Leg { iters: 0, ..leg },
        Leg { iters: u64::MAX, ..leg },
        Leg { warmup: u64::MAX, ..leg },
        Leg { timeout_ns: 0, ..leg },
        Leg { timeout_ns: u64::MAX, ..leg },
    ];
    all.extend([0, REGION + 1, usize::MAX - 7, usize::MAX].map(|size| Leg { size, ..leg }));
    all.extend([0, 3, 1 << 17, 1 << 63, u64::MAX].map(|window| Leg { window, ..leg }));
    all
}

#[test]
fn an_order_that_cannot_be_is_refused_and_names_who_gave_it() {
    let mut refused = 0;
    for transport in TRANSPORTS {
        for test in TESTS {
            for leg in spoilt(order(test)) {
                let told = follow(transport, ordered(leg)).to_string();
                assert!(
                    told.starts_with("this process orders what cannot be done: "),
                    "{transport:?} {leg:?}: {told}"
                );
                refused += 1;
            }
        }
    }
    println!("{refused} orders were refused");
    for (transport, leg) in [
        (Transport::Gpu, order(Test::Amo)),
        (Transport::Fabric, order(Test::Ring)),
        (Transport::Gpu, Leg { layout: Layout::Adjacent, ..order(Test::PutSignal) }),
        (Transport::Shm, Leg { mode: Mode::Worker, ..order(Test::SignalRate) }),
        (Transport::Gpu, Leg { mode: Mode::Worker, ..order(Test::Put) }),
        (Transport::Shm, Leg { size: 16, ..order(Test::Amo) }),
        (Transport::Shm, Leg { size: 24, ..order(Test::Ring) }),
        (Transport::Shm, order(Test::Pool)),
    ] {
        let told = follow(transport, ordered(leg)).to_string();
        assert!(told.contains("orders what cannot be done"), "{transport:?} {leg:?}: {told}");
    }
}

#[test]
fn an_order_that_can_be_is_followed() {
    for transport in TRANSPORTS {
        for test in [Test::PutSignal, Test::Put, Test::Get, Test::Tag] {
            let told = follow(transport, ordered(order(test))).to_string();
            assert!(told.contains("in time"), "{transport:?} {test:?}: {told}");
        }
    }
}

#[test]
fn words_that_are_no_orders_end_a_follower_with_an_error() {
    let seed: u64 = std::env::var("FISHPLATE_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    println!("FISHPLATE_SEED={seed}");
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
        let told = follow(TRANSPORTS[below(3)], words).to_string();
        assert!(!told.contains('\x1b'), "a terminal obeys {told:?}");
    }
}
