//! Atomics that a provider executes on words of a node. Runs over the fake provider, which reports
//! out of order, and over libfabric's providers that support atomics.

use fishplate::config::Settings;
use fishplate::core::error::{AttachError, OpError, PostError};
use fishplate::core::mem::RailId;
use fishplate::core::op::{Amo, AmoOp, AmoSet};
use fishplate::node::{Builder, Error, Fabric};
use fishplate::{Notice, Signal};
use fishplate_testing::fabric::{Fake, Persona};

use super::{SOON, Side, Way, builder, fake, two};

const ROUNDS: u64 = 300;

fn add(operand: u64) -> Amo {
    Amo { op: AmoOp::Add, width: 8, operand, compare: 0 }
}

/// Returns settings for rails over a provider that executes atomics.
fn native(provider: &str, interfaces: &[&str]) -> Settings {
    Settings {
        providers: vec![provider.into()],
        interfaces: interfaces.iter().map(|&name| name.into()).collect(),
        native_atomics: true,
        ..Settings::DEFAULT
    }
}

/// Each side adds to words of the other side. The provider executes the atomics on some words. The
/// node executes the atomics on the other words.
fn both_add(mut side: Side, rails: usize) {
    let atomics = side.node.rails().iter().map(|rail| rail.atomics).collect::<Vec<_>>();
    assert_eq!(atomics, vec![AmoSet::ALL; rails]);
    let words = side.node.alloc_native_atomics(64).unwrap();
    let plain = side.node.alloc(64).unwrap();
    let [words_there, plain_there] = [words, plain].map(|memory| {
        let handle = side.node.handle(memory).unwrap();
        let theirs = side.exchange(&handle);
        side.node.import(side.peer, theirs).unwrap()
    });
    for n in 0..ROUNDS {
        // Adds to a word of the node, then fetches and adds to one of the provider's words.
        side.node.amo(plain_there.at(0), add(1), Notice::Silent).unwrap();
        let old = side.node.fetch(words_there.at(8 * (n % 2)), add(1), SOON).unwrap();
        // Only this side adds to this word.
        assert_eq!(old, n / 2);
        // A signal that follows an atomic tells the peer that the atomic is applied.
        side.node.amo(words_there.at(16), add(1), Notice::Silent).unwrap();
        side.node.signal(Signal::set(plain_there.at(8), n + 1), Notice::Silent).unwrap();
        side.node.wait(plain.at(8), fishplate::Cmp::Ge, n + 1, Some(side.peer), SOON).unwrap();
        let told = side.node.load(plain.at(8)).unwrap();
        assert!(side.node.load(words.at(16)).unwrap() >= told);
    }
    side.node.quiet(side.peer, SOON).unwrap();
    side.exchange(&[]);
    let seen = [0, 8, 16].map(|at| side.node.load(words.at(at)).unwrap());
    assert_eq!((seen, side.node.load(plain.at(0))), ([ROUNDS / 2, ROUNDS / 2, ROUNDS], Ok(ROUNDS)));
    let signal = side.node.signal(Signal::set(words_there.at(0), 1), Notice::Silent);
    assert_eq!(signal, Err(OpError::NativeAtomics));
    side.exchange(&[]);
}

#[test]
fn a_provider_executes_atomics_in_memory_that_is_for_them() {
    for (seed, rails) in [(1, 1), (2, 4)] {
        let provider = Fake::new(Persona::cxi(), seed);
        let change = |_: Builder| {
            let settings = native("cxi", &["cxi0", "cxi1", "cxi2", "cxi3"][..rails]);
            fake(&provider, &[]).settings(settings)
        };
        two(Way::SharedMemory, change, |side| both_add(side, rails));
    }
}

#[test]
fn libfabric_executes_atomics_in_memory_that_is_for_them() {
    let over = || {
        let settings = native("tcp;ofi_rxm", &["lo"]);
        builder().settings(settings).fabric(Fabric::Required).shared_memory(false)
    };
    match over().open() {
        Err(error) => println!("SKIPPED atomics over tcp;ofi_rxm: {error}"),
        Ok(_) => two(Way::SharedMemory, |_| over(), |side| both_add(side, 1)),
    }
}

#[test]
fn a_node_without_a_rail_that_has_atomics_has_no_memory_for_them() {
    let mut node = builder().fabric(Fabric::Off).open().unwrap();
    let none = Err(Error::Attach(AttachError::Unsupported));
    assert_eq!(node.alloc_native_atomics(64), none);
    // Without the setting `native_atomics`, a node has no provider atomics.
    let provider = Fake::new(Persona::cxi(), 3);
    let mut node = fake(&provider, &["cxi0"]).open().unwrap();
    assert!(node.rails().iter().all(|rail| rail.atomics.is_empty()));
    assert_eq!(node.alloc_native_atomics(64), none);
}

#[test]
fn an_operation_that_the_provider_does_not_execute_is_refused() {
    let provider = Fake::new(Persona { few_atomics: true, ..Persona::cxi() }, 4);
    let change = |_: Builder| fake(&provider, &["cxi0"]).settings(native("cxi", &["cxi0"]));
    two(Way::SharedMemory, change, |mut side| {
        assert_eq!(side.node.rails()[0].atomics.to_string(), "Add 8, Inc 8, CompareSwap 8");
        let words = side.node.alloc_native_atomics(64).unwrap();
        let handle = side.node.handle(words).unwrap();
        let theirs = side.exchange(&handle);
        let there = side.node.import(side.peer, theirs).unwrap();
        let narrow = Amo { width: 4, ..add(1) };
        let refused = Err(OpError::Rail(RailId(1), PostError::Unsupported));
        assert_eq!(side.node.amo(there.at(0), narrow, Notice::Silent), refused);
        side.node.amo(there.at(0), add(7), Notice::Silent).unwrap();
        side.node.quiet(side.peer, SOON).unwrap();
        side.exchange(&[]);
        assert_eq!(side.node.load(words.at(0)), Ok(7));
        side.exchange(&[]);
    });
}
