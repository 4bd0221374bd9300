//! Entry points for fuzzing: see [`fishplate_core::engine::fuzzing`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use fishplate_core::engine::fuzzing::{Target, number, put};

use super::id::{Cookie, UniqueId};
use super::{Ranks, pmi, round};

/// The parsers of this module.
pub const TARGETS: &[Target] = &[
    Target { name: "job-id", sample: sample_id, read: read_id },
    Target { name: "job-frame", sample: sample_frame, read: read_frame },
    Target { name: "job-ranks", sample: sample_ranks, read: read_ranks },
    Target { name: "pmi-answer", sample: sample_answer, read: read_answer },
];

fn unique_id(seed: u64) -> UniqueId {
    let address = |n: u64| match number(seed, 2 + n) {
        odd if odd & 1 == 1 => IpAddr::V4(Ipv4Addr::from_bits(odd as u32)),
        even => IpAddr::V6(Ipv6Addr::from_bits(u128::from(even) << 64 | u128::from(n))),
    };
    let addresses: Vec<_> = (0..=number(seed, 1) % 5).map(address).collect();
    let cookie: Cookie = "7".repeat(32).parse().expect("short enough");
    UniqueId::new(&addresses, seed as u16, cookie)
}

fn sample_id(seed: u64, into: &mut [u8]) -> usize {
    put(into, unique_id(seed).as_bytes())
}

fn read_id(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let id = UniqueId::from_bytes(input).ok()?;
    assert!((1..=5).contains(&id.addresses().len()));
    assert!(UniqueId::from_hex(&id.to_hex()).is_ok_and(|same| same == id));
    Some(put(again, id.as_bytes()))
}

fn sample_frame(seed: u64, into: &mut [u8]) -> usize {
    let mut bytes = vec![];
    round::frame(
        &mut bytes,
        number(seed, 1) as u32 % 5,
        &vec![seed as u8; number(seed, 2) as usize % 100],
    );
    put(into, &bytes)
}

fn read_frame(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let (kind, len) = round::head(input.get(..8)?.try_into().ok()?).ok()?;
    let mut bytes = vec![];
    round::frame(&mut bytes, kind, input.get(8..8 + len)?);
    Some(put(again, &bytes))
}

fn sample_ranks(seed: u64, into: &mut [u8]) -> usize {
    let first = number(seed, 1) as u32 >> 8;
    put(into, &Ranks::new(first..first + number(seed, 2) as u32 % 30).encode())
}

fn read_ranks(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let ranks = Ranks::decode(input)?;
    assert!(!ranks.to_string().is_empty());
    Some(put(again, &ranks.encode()))
}

fn sample_answer(seed: u64, into: &mut [u8]) -> usize {
    let rc = ["", "rc=0 ", "msg= rc=0 "][number(seed, 9) as usize % 3];
    let next = ["", "cmd=finalize_ack\n"][number(seed, 10) as usize % 2];
    put(into, format!("cmd=get_result {rc}value={}\n{next}", unique_id(seed).to_hex()).as_bytes())
}

/// Reads an answer that arrives in two halves.
fn read_answer(input: &[u8], _: &mut [u8]) -> Option<usize> {
    let (mut received, half) = (vec![], input.len() / 2);
    let mut answer = None;
    for part in [&input[..half], &input[half..]] {
        received.extend(part);
        if answer.is_none() {
            answer = pmi::answer(&mut received, "get_result").ok()?;
        }
    }
    let answer = answer?;
    let end = input.iter().position(|&byte| byte == b'\n').expect("a line");
    assert!(answer.len() <= 3 * end && received == input[end + 1..], "{answer:?}");
    let id = pmi::id(&answer).ok()?;
    assert!(UniqueId::from_hex(&id.to_hex()).is_ok_and(|same| same == id));
    Some(0)
}
