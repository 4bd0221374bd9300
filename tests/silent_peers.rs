//! Measures a node's memory per peer, for peers that it has never reached, connected or not.
//!
//! This is the only test of its program, because it measures the memory of the whole process.
#![cfg(target_os = "linux")]

use std::time::Duration;

use fishplate::config::Settings;
use fishplate::node::{Builder, Fabric};
use fishplate::{Limits, Node};
use fishplate_testing::fabric::{Fake, Persona};

#[path = "support/resident.rs"]
mod resident;

use resident::resident;

/// Opens a node for `peers` peers, and connects it to `known` peers on this host that do not exist.
/// Returns the growth of the process's anonymous memory in bytes.
fn growth(builder: Builder, peers: u16, known: u16) -> usize {
    let before = resident();
    let limits = Limits { peers, ..Limits::DEFAULT };
    let mut node = builder.limits(limits).open().unwrap();
    let mut address = node.address().to_vec();
    for number in 1..=u64::from(known) {
        // Changes the id and the socket id in the address.
        address[6..14].copy_from_slice(&number.to_le_bytes());
        address[14..22].copy_from_slice(&number.to_le_bytes());
        node.connect(&address).unwrap();
    }
    let grown = resident().saturating_sub(before);
    node.close(Duration::from_secs(20)).unwrap();
    grown
}

/// Measures a node with room for a peer, over shared memory or several rails with failover. Also
/// measures a node that has connected a peer on this host but never reached it.
#[test]
fn a_peer_never_talked_to_costs_at_most_64_bytes() {
    // Makes malloc map tables separately. Otherwise it would reuse and clear an earlier node's
    // memory for zeroed tables. SAFETY: the call takes only numbers.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 4 << 10) };
    let provider = Fake::new(Persona::tcp(), 1);
    let settings = Settings { providers: vec!["tcp".into()], ..Settings::DEFAULT };
    let local = || Node::builder().fabric(Fabric::Off);
    let rails = || Node::builder().library(provider.library()).settings(settings.clone());
    let kinds: [(_, &dyn Fn() -> Builder, _); 3] = [
        ("shared memory", &local, false),
        ("two rails with failover", &rails, false),
        ("shared memory, connected", &local, true),
    ];
    for (name, builder, connects) in kinds {
        // The minimum over several nodes excludes one-time costs and memory that malloc keeps.
        let grown = |peers: u16| {
            let nodes = (0..4).map(|_| growth(builder(), peers, if connects { peers } else { 0 }));
            nodes.min().unwrap_or(0)
        };
        let (few, many) = (grown(64), grown(2064));
        let each = many.saturating_sub(few) / 2000;
        println!("{name}: 64 peers: {few} bytes; 2064: {many}; a peer never talked to: {each}");
        assert!(each <= 64, "{name}: a peer never talked to costs {each} bytes");
    }
}
