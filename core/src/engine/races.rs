//! Two engines in two threads over one mapped region, run as threads and by the model checker. The
//! tests check what a signal, an atomic, a fence and a quiet guarantee to the other thread. Engines
//! change the atomics of the region. The data is a [`Watch`], which stands for ordinary bytes next
//! to the atomics.

extern crate std;

use core::ptr::NonNull;
use std::{boxed::Box, sync::Arc};

use super::wait::{Asleep, Waiter};
use super::{Config, ContextId, Engine, Issued, Notice, Signal, Tables};
use crate::mem::{LocalId, PeerId, Region, RegionKind, RemoteId};
use crate::op::{Amo, AmoOp, Cmp, SignalOp};
use crate::rail::loopback::Loopback;
use crate::sync::host::Host;
use crate::sync::primitive::{AtomicU64, Ordering, Watch};
use crate::sync::testing::{LockHost, model, rounds, thread};

const CONTEXT: ContextId = ContextId(0);

struct Shared {
    words: [AtomicU64; 2],
    data: Watch,
}

// SAFETY: the words are atomics, and the model checker checks the accesses to the watch.
unsafe impl Sync for Shared {}
// SAFETY: the words are atomics, and the model checker checks the accesses to the watch.
unsafe impl Send for Shared {}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Shared { words: [AtomicU64::new(0), AtomicU64::new(0)], data: Watch::new() })
    }
}

/// One thread's engine over the shared words, with itself as its only peer.
struct End {
    engine: Box<Engine<'static, Loopback<4>, 1>>,
    tables: *mut Tables<1, 1, 8, 2, 4>,
    peer: PeerId,
    local: LocalId,
    remote: RemoteId,
    shared: Arc<Shared>,
}

impl End {
    fn new(rail: Loopback<4>, shared: &Arc<Shared>) -> Self {
        let tables = Box::into_raw(Box::new(Tables::new()));
        // SAFETY: `drop` frees the tables after the last use of the engine.
        let memory = unsafe { &mut *tables }.memory();
        let config = Config { window: 8, ..Config::DEFAULT };
        let mut engine = Box::new(Engine::new(config, [rail], memory).unwrap());
        let peer = engine.reserve_peer().unwrap();
        engine.connect_peer(peer, 1).unwrap();
        let words = NonNull::from(&shared.words);
        // SAFETY: `shared` keeps the words alive longer than the engine. They are only used as
        // atomics.
        let region =
            unsafe { Region::new(words.cast(), size_of_val(&shared.words), RegionKind::Private) };
        let local = engine.register(region).unwrap();
        let mut handle = [0; super::HANDLE_MAX];
        let len = engine.export(local, &mut handle).unwrap();
        let remote = engine.import(peer, &handle[..len]).unwrap();
        End { engine, tables, peer, local, remote, shared: Arc::clone(shared) }
    }

    fn mapped(shared: &Arc<Shared>) -> Self {
        Self::new(Loopback::mapped(), shared)
    }

    fn signal(&mut self, word: u64, op: SignalOp, value: u64) -> Issued {
        let signal = Signal { at: self.remote.at(8 * word), op, value };
        self.engine.signal(CONTEXT, signal, Notice::Silent).unwrap()
    }

    fn await_word(&self, word: u64, value: u64) {
        while self.engine.look(self.local.at(8 * word), Cmp::Eq, value, None).unwrap().is_none() {
            thread::yield_now();
        }
    }

    fn amo(&mut self, op: AmoOp, operand: u64, compare: u64) -> u64 {
        let amo = Amo { op, width: 8, operand, compare };
        match self.engine.fetch(CONTEXT, self.remote.at(0), amo, 0).unwrap() {
            Issued::Done { value } => value,
            Issued::Pending(_) => panic!("the word is mapped"),
        }
    }

    fn quiet(&mut self) {
        let (host, asleep) = (LockHost::new(), Asleep::new());
        let mut waiter = Waiter::awake(&host, &asleep);
        self.engine.quiet(CONTEXT, self.peer, &mut waiter, host.now_ns() + 1).unwrap();
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // SAFETY: `new` created the tables from a box. The engine is not used again, and its drop
        // does nothing.
        drop(unsafe { Box::from_raw(self.tables) });
    }
}

// SAFETY: only the engine in the same structure uses the tables, and it may move to any thread.
unsafe impl Send for End {}

/// Runs both sides, each with its own engine.
fn sides(
    first: impl Fn(End) + Clone + Send + Sync + 'static,
    second: impl Fn(End) + Clone + Send + Sync + 'static,
) {
    model(move || {
        for _ in 0..rounds(1, 50) {
            let shared = Shared::new();
            let ends = [End::mapped(&shared), End::mapped(&shared)];
            let [ours, theirs] = ends;
            let first = first.clone();
            let other = thread::spawn(move || first(theirs));
            second(ours);
            other.join().unwrap();
        }
    });
}

#[test]
fn who_sees_a_signal_sees_what_was_written_before_it() {
    for op in [SignalOp::Set, SignalOp::Add] {
        sides(
            move |mut end| {
                end.shared.data.write(0);
                end.signal(0, op, 1);
            },
            |end| {
                end.await_word(0, 1);
                end.shared.data.read(0);
            },
        );
    }
}

#[test]
fn who_sees_a_signal_that_came_as_a_message_sees_what_was_written_before_it() {
    for op in [SignalOp::Set, SignalOp::Add] {
        model(move || {
            let shared = Shared::new();
            let theirs = End::mapped(&shared);
            let shared = Arc::clone(&shared);
            let target = thread::spawn(move || {
                let mut target = End::new(Loopback::new(), &shared);
                shared.data.write(0);
                assert!(matches!(target.signal(0, op, 1), Issued::Pending(_)));
                target.engine.progress();
                target.engine.progress();
                assert_eq!(target.engine.stats().applied, 1);
            });
            theirs.await_word(0, 1);
            theirs.shared.data.read(0);
            target.join().unwrap();
        });
    }
}

#[test]
fn who_sees_what_an_atomic_did_sees_what_was_written_before_it() {
    use AmoOp::*;
    for op in [Set, Swap, Add, Inc, Or, Xor, CompareSwap] {
        sides(
            move |mut end| {
                end.shared.data.write(0);
                end.amo(op, 1, 0);
            },
            |mut end| {
                while end.amo(Fetch, 0, 0) == 0 {
                    thread::yield_now();
                }
                end.shared.data.read(0);
            },
        );
    }
}

#[test]
fn a_refused_exchange_sees_what_was_written_before_the_word_that_refused_it() {
    sides(
        |mut end| {
            end.shared.data.write(0);
            end.amo(AmoOp::Set, 1, 0);
        },
        |mut end| {
            if end.amo(AmoOp::CompareSwap, 3, 2) == 1 {
                end.shared.data.read(0);
            }
        },
    );
}

#[test]
fn a_lock_made_of_atomics_keeps_two_threads_apart() {
    let both = |mut end: End| {
        while end.amo(AmoOp::CompareSwap, 1, 0) != 0 {
            thread::yield_now();
        }
        end.shared.data.write(0);
        end.amo(AmoOp::And, 0, 0);
    };
    sides(both, both);
}

#[test]
fn who_sees_what_was_written_behind_a_fence_sees_what_was_written_before_it() {
    sides(
        |mut end| {
            end.shared.data.write(0);
            end.engine.fence(CONTEXT, end.peer).unwrap();
            // Stands for a put of this word, which is a plain copy. Relaxed: a copy has no ordering
            // either.
            end.shared.words[0].store(1, Ordering::Relaxed);
        },
        |end| {
            end.await_word(0, 1);
            end.shared.data.read(0);
        },
    );
}

#[test]
fn of_two_that_write_make_quiet_and_look_one_sees_the_other() {
    model(|| {
        for _ in 0..rounds(1, 200) {
            let shared = Shared::new();
            let [mut ours, mut theirs] = [End::mapped(&shared), End::mapped(&shared)];
            let look = |end: &mut End, mine: u64, other: usize| {
                end.signal(mine, SignalOp::Set, 1);
                end.quiet();
                // Relaxed: only the quiet orders this load after the signal.
                end.shared.words[other].load(Ordering::Relaxed)
            };
            let other = thread::spawn(move || look(&mut theirs, 0, 1));
            let seen = look(&mut ours, 1, 0);
            assert!(seen + other.join().unwrap() > 0, "neither sees the other");
        }
    });
}
