//! Entry points for fuzzing: see [`fishplate_core::engine::fuzzing`].

use fishplate_core::engine::fuzzing::{Target, number, put};

use super::address::{Address, RailAddress};
use crate::topology::FabricEnd;

/// The parsers of this module.
pub const TARGETS: &[Target] =
    &[Target { name: "node-address", sample: sample_address, read: read_address }];

fn sample_address(seed: u64, into: &mut [u8]) -> usize {
    let [a, b, c] = [1, 2, 3].map(|n| number(seed, n));
    let rail = |n: u64| {
        let d = number(seed, 6 + n);
        let end = FabricEnd { provider: d as u32, fabric: (d >> 32) as u32, mbit: (d >> 7) as u32 };
        RailAddress {
            end,
            max_message: (d >> 16) as u32,
            address: vec![d as u8; (d >> 40) as usize % 40],
        }
    };
    let address = Address {
        id: a,
        door: b,
        host: c,
        window: number(seed, 4) as u32,
        contexts: a as u16,
        eager: (a >> 32) as u32,
        credits: (b >> 32) as u32,
        headers: (c >> 32) as u32,
        gpu: a & 1 == 1,
        rails: (0..b % 15).map(rail).collect(),
    };
    address.encode().map_or(0, |bytes| put(into, &bytes))
}

fn read_address(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let address = Address::decode(input).ok()?;
    let bytes = address.encode().expect("a decoded address can be encoded");
    assert_eq!(bytes.len(), input.len(), "trailing bytes");
    Some(put(again, &bytes))
}
