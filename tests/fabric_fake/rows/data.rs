//! Tests features 1 to 7: providers, memory and keys, puts and gets.

use fishplate_core::engine::{Config, HANDLE_MAX, Issued, Notice, RailPolicy, Signal, handle_len};
use fishplate_core::error::AttachError;
use fishplate_core::mem::{Region, RegionKind};
use fishplate_core::op::{AmoOp, SignalOp};
use fishplate_sys::fabric::FabricRail;
use fishplate_sys::fabric::raw::*;
use fishplate_testing::fabric::{Fake, Persona};

use crate::behaviour::fleet::{Node, turn_until};
use crate::behaviour::{read, word};
use crate::engines::join;
use crate::two::{CX, Two, amo, efa};

#[test]
fn row_01_personas_of_efa_cxi_and_verbs() {
    for (name, persona) in Persona::all() {
        let mut two = Two::<1>::new(name, persona, Config::DEFAULT, 1);
        let bytes = two.fill(3000, 1);
        two.put_signal(0, 3000, 64, 0, 7);
        two.quiet();
        assert_eq!((two.there(64, 3000), two.word(0)), (bytes, 7), "{name}");
    }
}

#[test]
fn row_02_keys_by_address_and_keys_by_offset() {
    for (persona, by_address) in [(Persona::efa_direct(), true), (Persona::cxi(), false)] {
        let name = if by_address { "efa-direct" } else { "cxi" };
        assert_eq!(persona.mr_mode & FI_MR_VIRT_ADDR != 0, by_address);
        let mut two = Two::<2>::new(name, persona, Config::DEFAULT, 2);
        let device = std::ptr::NonNull::new(0x0A5A_0000_0000_1000 as *mut u8).unwrap();
        // A rail that was opened without a device refuses device memory.
        // SAFETY: the region is refused, so nothing accesses it.
        let region = unsafe { Region::new(device, 4096, RegionKind::Device { ordinal: 0 }) };
        assert_eq!(two.nodes[0].engine.register(region), Err(AttachError::Unsupported), "{name}");
        let bytes = two.fill(5000, 2);
        two.put(100, 4000, 300);
        two.quiet();
        assert_eq!(two.there(300, 4000), bytes[100..4100], "{name}");
    }
}

#[test]
fn row_03_unexported_memory_works_locally() {
    let mut two = efa::<2>(Config::DEFAULT, 3);
    let bytes = two.fill(256, 3);
    // The source is registered with the engine, so operations may read it and write it.
    two.put(0, 256, 0);
    two.quiet();
    let issued = two.issue(|node| {
        node.engine.get(CX, node.source.at(1024), 256, node.remotes[1].at(0), Notice::Report(1))
    });
    assert_eq!(two.end(issued), Some(0));
    assert_eq!(read(&two.nodes[0].engine, two.nodes[0].source.at(1024), 256), bytes);
}

#[test]
fn row_04_a_handle_holds_the_keys_of_16_rails() {
    let mut two = efa::<16>(Config { policy: RailPolicy::RoundRobin, ..Config::DEFAULT }, 4);
    let mut handle = [0; HANDLE_MAX];
    let len = two.nodes[1].engine.export(two.nodes[1].target, &mut handle).unwrap();
    assert!(len == handle_len(16) && len <= 512);
    let bytes = two.fill(16 * 512, 4);
    for n in 0..16 {
        two.put(n * 512, 512, n * 512);
    }
    two.quiet();
    assert_eq!(two.there(0, 16 * 512), bytes);
}

#[test]
fn row_05_two_engines_of_a_process_progress_separately() {
    // Each pair of engines has its own network, which counts calls.
    let fakes = [5, 6].map(|seed| Fake::new(Persona::efa_direct(), seed));
    let persona = Persona::efa_direct();
    let this = ("efa-direct", &persona);
    let mut one = join::<1>(&fakes[0], this, 5, 2, Config::DEFAULT, 4096);
    let mut other = join::<2>(&fakes[1], this, 6, 2, Config::DEFAULT, 4096);
    for value in 1..=50 {
        let signal = |node: &Node<FabricRail, 1>| Signal {
            at: node.remotes[1].at(0),
            op: SignalOp::Set,
            value,
        };
        let at = signal(&one[0]);
        one[0].engine.signal(CX, at, Notice::Silent).unwrap();
        let at = Signal { at: other[0].remotes[1].at(0), op: SignalOp::Set, value: 100 + value };
        other[0].engine.signal(CX, at, Notice::Silent).unwrap();
        let there = |nodes: &[Node<FabricRail, 2>]| word(&nodes[1].engine, nodes[1].target.at(0));
        let before = (there(&other), fakes[1].counts());
        turn_until(&mut one, "the first", |nodes| {
            word(&nodes[1].engine, nodes[1].target.at(0)) == value
        });
        let after = (there(&other), fakes[1].counts());
        assert_eq!(after, before, "progress of one engine used the other's endpoints");
        turn_until(&mut other, "the second", |nodes| there(nodes) == 100 + value);
    }
    drop((one, other));
    assert!(fakes.iter().all(|fake| fake.violations().is_empty()));
}

#[test]
fn row_06_puts_and_gets_are_split_at_the_provider_s_limit() {
    let small = Persona { max_rma: 4096, ..Persona::efa_direct() };
    let mut two = Two::<2>::new("efa-direct", small, Config::DEFAULT, 6);
    for len in [1, 4095, 4096, 4097, 100_001, 300_000] {
        let bytes = two.fill(len, len as u64);
        let before = two.fake.0.counts().posted;
        two.put(0, len, 8);
        two.quiet();
        assert_eq!(two.there(8, len), bytes, "{len}");
        assert!(two.fake.0.counts().posted - before >= len.div_ceil(4096) as u64, "{len}");
        let issued = two.issue(|node| {
            node.engine.get(
                CX,
                node.source.at(500_000),
                len,
                node.remotes[1].at(8),
                Notice::Report(1),
            )
        });
        assert_eq!(two.end(issued), Some(0), "{len}");
        assert_eq!(
            read(&two.nodes[0].engine, two.nodes[0].source.at(500_000), len),
            bytes,
            "{len}"
        );
    }
}

#[test]
fn row_07_scalars_are_copied_by_the_call() {
    let mut two = efa::<2>(Config::DEFAULT, 7);
    for value in 1..100u64 {
        let mut bytes = value.to_ne_bytes();
        two.issue(|node| {
            let to = node.remotes[1].at(value * 8);
            node.engine.inject(CX, &bytes, to).map(|()| Issued::Done { value: 0 })
        });
        // The source may be reused at once, whether or not the provider has accepted it.
        bytes.fill(0xee);
        std::hint::black_box(&bytes);
        two.quiet();
        assert_eq!(two.word(value * 8), value);
        let issued = two.issue(|node| {
            let from = node.remotes[1].at(value * 8);
            node.engine.get(CX, node.source.at(0), 8, from, Notice::Report(1))
        });
        assert_eq!(two.end(issued), Some(0));
        assert_eq!(read(&two.nodes[0].engine, two.nodes[0].source.at(0), 8), value.to_ne_bytes());
        assert_eq!(two.fetch(value * 8, amo(AmoOp::Fetch, 8, 0, 0)), value);
    }
}
