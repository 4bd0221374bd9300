//! Two threads use a ring. Each scenario runs as threads and under the model checker.

extern crate std;

use core::mem::MaybeUninit;
use std::boxed::Box;

use super::*;
use crate::sync::testing::{model, rounds, thread};

/// Runs one side of a ring of `N` slots in a new thread, and the other side in this thread. The
/// counters wrap meanwhile.
fn across<const N: usize>(
    fill: impl FnOnce(Producer<'static, u64>) + Send + 'static,
    drain: impl FnOnce(Consumer<'static, u64>),
) {
    let header = Box::into_raw(Box::new(Header::starting_at(u64::MAX - 1)));
    let slots = Box::into_raw(Box::new([MaybeUninit::uninit(); N]));
    // SAFETY: both boxes live until both sides are dropped, below.
    let (tx, rx) = split(unsafe { &mut *header }, unsafe { &mut *slots }).unwrap();
    let filling = thread::spawn(move || fill(tx));
    drain(rx);
    filling.join().unwrap();
    // SAFETY: both pointers come from boxes, and both sides are dropped: one by its thread, one by
    // `drain`.
    drop(unsafe { (Box::from_raw(header), Box::from_raw(slots)) });
}

#[test]
fn every_value_arrives_once_and_in_order() {
    const VALUES: u64 = rounds(4, 20_000);
    model(|| {
        across::<2>(
            |mut tx| {
                for n in 0..VALUES {
                    while tx.push(n).is_err() {
                        thread::yield_now();
                    }
                }
            },
            |mut rx| {
                for want in 0..VALUES {
                    let got = loop {
                        if let Some(got) = rx.pop() {
                            break got;
                        }
                        thread::yield_now();
                    };
                    assert_eq!(got, want);
                }
                assert_eq!(rx.pop(), None);
            },
        );
    });
}

#[test]
fn every_batch_arrives_once_and_in_order() {
    const VALUES: u64 = rounds(4, 20_000);
    model(|| {
        across::<2>(
            |mut tx| {
                let mut next = 0;
                while next < VALUES {
                    match tx.reserve(2) {
                        Some(reserved) => {
                            reserved.fill(|at| next + at as u64);
                            next += 2;
                        }
                        None => thread::yield_now(),
                    }
                }
            },
            |mut rx| {
                let mut want = 0;
                while want < VALUES {
                    match rx.filled(2) {
                        Some(filled) => {
                            let (a, b) = filled.slices();
                            assert!(
                                a.iter().chain(b).copied().eq(want..want + filled.len() as u64)
                            );
                            want += filled.len() as u64;
                            filled.release(usize::MAX);
                        }
                        None => thread::yield_now(),
                    }
                }
            },
        );
    });
}
