//! Entry points for fuzzing: see [`fishplate_core::engine::fuzzing`]. They decode packets as the
//! handshake and the control channel do, header included. `/dev/null` stands in for received
//! descriptors.

use fishplate_core::engine::fuzzing::{Target, number, put};

use crate::handshake::hello_again;
use crate::packet::{PacketKind, Reader, Writer};
use crate::regions::{self, Key};

/// The parsers of this package.
pub const TARGETS: &[Target] = &[
    Target { name: "packet", sample: sample_packet, read: read_packet },
    Target { name: "shm-hello", sample: sample_hello, read: read_hello },
    Target { name: "region-key", sample: sample_key, read: read_key },
];

fn sample_packet(seed: u64, into: &mut [u8]) -> usize {
    let kinds = [
        PacketKind::Hello,
        PacketKind::Offer,
        PacketKind::Ready,
        PacketKind::Blob,
        PacketKind::Announce,
        PacketKind::Bye,
    ];
    let mut packet = Writer::new(kinds[number(seed, 1) as usize % kinds.len()]);
    for n in 0..number(seed, 2) % 9 {
        packet.put(number(seed, 3 + n).to_ne_bytes());
    }
    put(into, &packet.finish())
}

fn read_packet(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let (kind, body) = Reader::open(input).ok()?;
    let mut packet = Writer::new(kind);
    packet.extend(body.rest());
    Some(put(again, &packet.finish()))
}

fn sample_hello(seed: u64, into: &mut [u8]) -> usize {
    let [a, b, c] = [1, 2, 3].map(|n| number(seed, n));
    let mut packet = Writer::new(PacketKind::Hello);
    packet.put([1 + (a & 1) as u8, (a >> 1) as u8 & 1]).put((a as u16).to_ne_bytes());
    packet.put((b as u32).to_ne_bytes()).put((c as u32).to_ne_bytes());
    for n in 4..9 {
        packet.put((number(seed, n) >> (c % 64)).to_ne_bytes());
    }
    put(into, &packet.finish())
}

fn read_hello(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let (PacketKind::Hello, body) = Reader::open(input).ok()? else { return None };
    Some(put(again, &hello_again(body).ok()?))
}

fn sample_key(seed: u64, into: &mut [u8]) -> usize {
    let [a, b] = [1, 2].map(|n| number(seed, n));
    let kind = match a % 3 {
        0 => regions::KeyKind::Private,
        1 => regions::KeyKind::Shared(b as u32),
        _ => regions::KeyKind::Common(b as u32),
    };
    let key = Key { kind, generation: (a >> 8) as u16 & 0xfff, slot: (a >> 24) as u16 };
    put(into, &key.encode().to_le_bytes())
}

fn read_key(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let key = Key::decode(u64::from_le_bytes(input.try_into().ok()?))?;
    Some(put(again, &key.encode().to_le_bytes()))
}
