//! Fuzzes traces, and the orders that another process sends. Each is accepted or refused, and never
//! causes a panic.

use std::path::Path;
use std::time::Duration;

use fishplate_core::engine::fuzzing::{Target, number, put};
use fishplate_core::rail::sim::schedule::{Change, Event, Link};

use super::job::Job;
use super::session::Order;
use crate::args::{SignalKind, Test, Trace, Transport};
use crate::layout;

#[path = "../../../tests/fuzz/driver.rs"]
mod driver;
#[path = "../../../tests/fence/mod.rs"]
mod fence;

const REGION: usize = 1 << 20;

fn sample(seed: u64, into: &mut [u8]) -> usize {
    let [a, b] = [1, 2].map(|n| number(seed, n));
    let tests = [
        Test::PutSignal,
        Test::Put,
        Test::Get,
        Test::Amo,
        Test::SignalRate,
        Test::Tag,
        Test::TagBw,
    ];
    let size = 8 << (b % 10);
    let job = Job {
        test: tests[a as usize % tests.len()],
        size,
        iters: 1 + (a >> 40),
        warmup: b >> 50,
        check: a & 8 != 0,
        window: 1 << (b % 7),
        layout: layout::fitting(size),
        signal: if a & 16 == 0 { SignalKind::Add } else { SignalKind::Set },
        bidirectional: a & 32 != 0,
        seed: b,
        timeout_ns: 10_000_000_000,
    };
    let order = match a % 8 {
        0 => Order::Floor,
        1 => Order::Done,
        _ => Order::Measure(job),
    };
    put(into, &serde_json::to_vec(&order).expect("an order can be written"))
}

fn read(input: &[u8], _: &mut [u8]) -> Option<usize> {
    let order: Order = serde_json::from_slice(input).ok()?;
    let again = serde_json::to_vec(&order).expect("an order can be written");
    let again: Order = serde_json::from_slice(&again).expect("and read again");
    assert_eq!(format!("{again:?}"), format!("{order:?}"));
    let Order::Measure(job) = order else { return Some(0) };
    for transport in [Transport::Shm, Transport::Fabric] {
        if job.check_bounds(transport, REGION).is_err() {
            continue;
        }
        // Runs the computations that a side makes with a job before it measures.
        assert!(job.slots() > 0 && job.per_window() > 0 && job.divisor() > 0.0, "{job:?}");
        assert!(
            job.size <= REGION && job.size as u64 * job.slots() < Job::arena(REGION) as u64,
            "{job:?}"
        );
        let _ = (job.placement(), job.halves());
    }
    Some(0)
}

fn sample_trace(seed: u64, into: &mut [u8]) -> usize {
    let [a, b] = [1, 2].map(|n| number(seed, n));
    let link = Link { a: 0, b: 1, rail: (b % 4) as u16 };
    let cut = Change::Cut {
        link,
        there: b & 4 != 0 || b & 8 == 0,
        back: b & 8 != 0,
        late: (b >> 60) as u32,
    };
    let changes = [cut, Change::Disable { link, back: a & 1 != 0 }, Change::Heal(link)];
    let trace = Trace {
        test: if a & 2 == 0 { Test::PutSignal } else { Test::Tag },
        rails: 4,
        size: 1 << (a % 20),
        iters: a >> 30,
        window: 1 << (b % 7),
        seed: b,
        events: changes
            .into_iter()
            .zip(a % 100..)
            .map(|(change, at)| Event { at, change })
            .collect(),
        end: "1 polls, done".into(),
    };
    put(into, trace.to_string().as_bytes())
}

fn read_trace(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let trace = Trace::parse(std::str::from_utf8(input).ok()?).ok()?;
    assert_eq!(Trace::parse(&trace.to_string()).as_ref(), Ok(&trace));
    Some(put(again, trace.to_string().as_bytes()))
}

#[test]
fn no_order_panics() {
    drive(&Target { name: "order", sample, read });
}

#[test]
fn no_trace_panics() {
    drive(&Target { name: "trace", sample: sample_trace, read: read_trace });
}

fn drive(target: &Target) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus");
    let seed = std::env::var("FISHPLATE_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    println!("FISHPLATE_SEED={seed}");
    let count =
        driver::drive(target, &corpus, seed, Duration::from_secs(1)).unwrap_or_else(|error| {
            panic!("FISHPLATE_SEED={seed}\n{error}");
        });
    assert!(count.accepted > 0 && count.accepted < count.inputs, "{count:?}");
}
