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

/// Offsets in a node's address.
const ID: usize = 6;
const DOOR: usize = 14;
const HOST: usize = 22;
const RAILS: usize = 49;
const FIRST: usize = 50;

/// Offsets in a rail of such an address: the length of the rail's own address, and, inside that
/// address, the rail's signature and the provider's address.
const LEN: usize = 16;
const NUMBER: usize = 26;
const PROVIDER: usize = 34;

/// Changes an address to that of another node, which does not exist. The node is on another host if
/// the address has rails.
fn rename(address: &mut [u8], number: u64) {
    address[ID..ID + 8].copy_from_slice(&number.to_le_bytes());
    address[DOOR..DOOR + 8].copy_from_slice(&number.to_le_bytes());
    let mut at = FIRST;
    for rail in 0..u32::from(address[RAILS]) {
        address[HOST] = !0;
        let random = (2 * number as u32 + rail).wrapping_mul(0x9e37_79b9);
        address[at + NUMBER..][..4].copy_from_slice(&random.to_le_bytes());
        // A port, and two bytes of an IP address.
        address[at + PROVIDER + 2..][..2].copy_from_slice(&random.to_le_bytes()[..2]);
        address[at + PROVIDER + 6..][..2].copy_from_slice(&(number as u16).to_be_bytes());
        at += LEN + 2 + usize::from(u16::from_le_bytes([address[at + LEN], address[at + LEN + 1]]));
    }
}

/// Opens a node for `peers` peers, and connects it to `known` peers that do not exist. Returns the
/// growth of the process's anonymous memory in bytes.
fn growth(builder: Builder, peers: u16, known: u16) -> usize {
    let before = resident();
    let limits = Limits { peers, ..Limits::DEFAULT };
    let mut node = builder.limits(limits).open().unwrap();
    let mut address = node.address().to_vec();
    for number in 1..=u64::from(known) {
        rename(&mut address, number);
        node.connect(&address).unwrap();
    }
    let grown = resident().saturating_sub(before);
    node.close(Duration::from_secs(20)).unwrap();
    grown
}

/// Measures a node with room for a peer, over shared memory or several rails with failover. Also
/// measures a node that has connected a peer but never reached it.
#[test]
fn a_peer_never_talked_to_costs_at_most_64_bytes() {
    // Makes malloc map tables separately. Otherwise it would reuse and clear an earlier node's
    // memory for zeroed tables. SAFETY: the call takes only numbers.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 4 << 10) };
    let provider = Fake::new(Persona::tcp(), 1);
    let settings = Settings { providers: vec!["tcp".into()], ..Settings::DEFAULT };
    let local = || Node::builder().fabric(Fabric::Off);
    let rails = || Node::builder().library(provider.library()).settings(settings.clone());
    let one = || rails().settings(Settings { interfaces: vec!["eth0".into()], ..settings.clone() });
    let kinds: [(_, &dyn Fn() -> Builder, _); 5] = [
        ("shared memory", &local, false),
        ("two rails with failover", &rails, false),
        ("shared memory, connected", &local, true),
        ("one rail, connected", &one, true),
        ("two rails with failover, connected", &rails, true),
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
