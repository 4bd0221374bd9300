//! Entry points for fuzzing, as in [`fishplate_core::engine::fuzzing`].

use alloc::vec::Vec;

use fishplate_core::engine::fuzzing::{Target, number, put};

use super::address::Address;
use crate::fabric::av::AddressForm;
use crate::fabric::persona::Notify;
use crate::fabric::raw::*;

/// The parsers of this package.
pub const TARGETS: &[Target] = &[Target { name: "rail-address", sample, read }];

/// Address formats, each with the length of its addresses.
const FORMATS: [(u32, usize); 4] =
    [(FI_SOCKADDR_IN, 16), (FI_SOCKADDR_IN6, 28), (FI_ADDR_EFA, 32), (FI_ADDR_STR, 20)];

/// Returns the address form of a provider that uses this format.
fn form((format, len): (u32, usize)) -> AddressForm {
    let own: Vec<u8> = match format {
        FI_ADDR_STR => b"fi_shm://1234:567\0".to_vec(),
        _ => (0..len).map(|at| if at < 2 { at as u8 + 2 } else { 0 }).collect(),
    };
    AddressForm::new(format, own)
}

fn sample(seed: u64, into: &mut [u8]) -> usize {
    let a = number(seed, 1);
    let chosen = form(FORMATS[a as usize % FORMATS.len()]);
    let address = Address {
        notify: [Notify::Word, Notify::Source, Notify::Message][(a >> 8) as usize % 3],
        number: (a >> 32) as u32,
        format: chosen.format(),
        provider: chosen.own(),
    };
    put(into, &address.encode())
}

fn read(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let address = Address::decode(input).ok()?;
    for (format, len) in FORMATS {
        let form = form((format, len));
        let allowed = form.allows(address.provider);
        // Checks that a provider would read only bytes of the input.
        let reads = match format {
            FI_ADDR_STR => address.provider.iter().position(|&byte| byte == 0).map(|at| at + 1),
            _ => Some(len),
        };
        assert!(
            !allowed || reads.is_some_and(|reads| reads <= address.provider.len()),
            "format {format}"
        );
    }
    Some(put(again, &address.encode()))
}
