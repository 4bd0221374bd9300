//! Entry points for fuzzing: every parser of peer-controlled input, and an encoder that makes valid
//! input for it. Not part of the public interface; the tests in `tests/fuzz` use it.

use super::close::Bye;
use super::epoch::{Bond, Hello};
use super::failover::{Asks, Leave, LeaveStage, Rejoin, Told};
use super::joint::Pairing;
use super::pieces::{Get, Got};
use super::protocol::head::{self, Head, Offer};
use super::table::{Access, HANDLE_MAX, Handle};
use super::wire::{Body, HEAD_MAX, Message, Place};
use crate::mem::Untrusted;
use crate::op::{Amo, AmoOp, SignalOp};
use crate::rail::RailKey;
use crate::sync::seq::Seq;

/// A parser of peer-controlled input.
pub struct Target {
    /// The name of the parser.
    pub name: &'static str,
    /// Writes a valid input that depends on the given number. Returns the length of the input.
    pub sample: fn(u64, &mut [u8]) -> usize,
    /// Parses an input. Returns `None` if the parser rejects the input. Otherwise encodes the
    /// result into the second argument, and returns how many bytes of it must equal the input.
    /// Panics if the encoded result does not parse again.
    pub read: fn(&[u8], &mut [u8]) -> Option<usize>,
}

/// The parsers of this package.
pub const TARGETS: &[Target] = &[
    Target { name: "message", sample: sample_message, read: read_message },
    Target { name: "hello", sample: sample_hello, read: read_hello },
    Target { name: "bye", sample: sample_bye, read: read_bye },
    Target { name: "told", sample: sample_told, read: read_told },
    Target { name: "asks", sample: sample_asks, read: read_asks },
    Target { name: "rejoin", sample: sample_rejoin, read: read_rejoin },
    Target { name: "leave", sample: sample_leave, read: read_leave },
    Target { name: "get", sample: sample_get, read: read_get },
    Target { name: "got", sample: sample_got, read: read_got },
    Target { name: "tagged", sample: sample_tagged, read: read_tagged },
    Target { name: "request", sample: sample_request::<2>, read: read_request::<2> },
    Target { name: "request-of-16-rails", sample: sample_request::<16>, read: read_request::<16> },
    Target { name: "handle", sample: sample_handle::<1>, read: read_handle::<1> },
    Target { name: "handle-of-16-rails", sample: sample_handle::<16>, read: read_handle::<16> },
];

/// Returns the `n`-th random number of a seed.
pub fn number(seed: u64, n: u64) -> u64 {
    let z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ n.wrapping_mul(0xd1b5_4a32_d192_ed03);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Copies bytes to the start of a buffer, and returns their number.
pub fn put(into: &mut [u8], bytes: &[u8]) -> usize {
    into[..bytes.len()].copy_from_slice(bytes);
    bytes.len()
}

fn place(seed: u64, n: u64) -> Place {
    let word = number(seed, n);
    Place {
        region: word as u16 & 3,
        generation: (word >> 16) as u16,
        offset: word >> (16 + word % 48),
    }
}

fn sample_message(seed: u64, into: &mut [u8]) -> usize {
    let [a, b, c] = [1, 2, 3].map(|n| number(seed, n));
    let (at, len) = (place(seed, 4), b as u32 % 100);
    let op = [SignalOp::Set, SignalOp::Add][(a >> 8) as usize % 2];
    let (body, payload) = match a % 7 {
        0 => (Body::Signal { at, op, value: b, data: None }, 0),
        1 => (Body::Signal { at, op, value: c, data: Some((place(seed, 5), len)) }, len),
        2 => (Body::Data { at }, len),
        3 => {
            let (width, op) =
                (1 << (b % 4), AmoOp::from_wire((b >> 8) as u8 % 8).unwrap_or(AmoOp::Add));
            (Body::Amo { at, amo: Amo { op, width, operand: c, compare: !c }, token: a }, 0)
        }
        4 => (Body::Reply { token: a, value: b }, 0),
        5 => (Body::Ack { wanted: None, freed: b as u32 }, 0),
        _ => (Body::Ack { wanted: Some(Seq(c)), freed: b as u32 }, 0),
    };
    let message = Message { context: c as u8 & 3, word: b as u32, ack: a as u32, body };
    let mut head = [0; HEAD_MAX];
    let len = message.encode(&mut head);
    let payload = payload as usize;
    into[len..len + payload].fill(a as u8);
    put(into, &head[..len]) + payload
}

fn read_message(input: &[u8], _: &mut [u8]) -> Option<usize> {
    let (message, rest) = Message::decode(Untrusted::from_slice(input)).ok()?;
    let payload = match message.body {
        Body::Signal { data: Some((_, len)), .. } => len as usize,
        Body::Data { .. } => rest.len(),
        _ => 0,
    };
    assert_eq!(rest.len(), payload, "a payload that the message does not describe");
    // Bytes that a kind does not use are ignored, so only the meaning survives a round trip.
    let mut head = [0; HEAD_MAX];
    let len = message.encode(&mut head);
    assert_eq!(len + rest.len(), input.len(), "a part of the message was ignored");
    let again = match rest.is_empty() {
        true => Message::decode(Untrusted::from_slice(&head[..len])).ok(),
        false => Message::decode(Untrusted::from_slice(input)).ok(),
    };
    assert_eq!(again.map(|(again, _)| again), Some(message));
    Some(0)
}

fn sample_hello(seed: u64, into: &mut [u8]) -> usize {
    let bond = [Bond::None, Bond::Yours, Bond::Other][number(seed, 1) as usize % 3];
    let (mine, yours) = (number(seed, 2) as u32, number(seed, 3) as u32);
    let hello = Hello {
        mine,
        yours,
        bond,
        keeps: number(seed, 4) & 1 != 0,
        again: number(seed, 5) & 1 != 0,
    };
    put(into, &hello.encode())
}

fn read_hello(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let hello = Hello::decode(Untrusted::from_slice(input))?.ok()?;
    Some(put(again, &hello.encode()))
}

fn sample_bye(seed: u64, into: &mut [u8]) -> usize {
    let [a, b, c] = [1, 2, 3].map(|n| number(seed, n));
    let (word, ack, freed, fins) = (a as u32, b as u32, (b >> 32) as u32, (a >> 40) as u32);
    put(into, &Bye { context: (a >> 32) as u8 & 3, word, ack, freed, end: Seq(c), fins }.encode())
}

fn read_bye(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let bye = Bye::decode(Untrusted::from_slice(input))?.ok()?;
    Some(put(again, &bye.encode()))
}

fn sample_told(seed: u64, into: &mut [u8]) -> usize {
    let [a, b, c] = [1, 2, 3].map(|n| number(seed, n));
    let told = Told {
        context: (a >> 32) as u8 & 3,
        last: a >> 63 != 0,
        asks: c & 4 != 0,
        word: a as u32,
        ack: b as u32,
        freed: (b >> 32) as u32,
        from: Seq(c),
        rails: (a >> 40) as u16,
        heard: (c >> 24) as u16,
        failed: (c >> 40) as u16,
        left: (c >> 8) as u16,
        epochs: core::array::from_fn(|at| number(seed, 20 + at as u64) as u16),
        words: core::array::from_fn(|at| number(seed, 4 + at as u64)),
    };
    put(into, &told.encode())
}

fn read_told(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let told = Told::decode(Untrusted::from_slice(input))?.ok()?;
    Some(put(again, &told.encode()))
}

fn sample_asks(seed: u64, into: &mut [u8]) -> usize {
    let [a, b, c] = [1, 2, 3].map(|n| number(seed, n));
    let (word, ack) = (a as u32, b as u32);
    put(into, &Asks { context: (a >> 32) as u8 & 3, word, ack, token: c, number: Seq(b) }.encode())
}

fn read_asks(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let asks = Asks::decode(Untrusted::from_slice(input))?.ok()?;
    Some(put(again, &asks.encode()))
}

fn sample_rejoin(seed: u64, into: &mut [u8]) -> usize {
    put(into, &Rejoin::sample([1, 2, 3].map(|n| number(seed, n))).encode())
}

fn read_rejoin(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let rejoin = Rejoin::decode(Untrusted::from_slice(input))?.ok()?;
    Some(put(again, &rejoin.encode()))
}

fn sample_leave(seed: u64, into: &mut [u8]) -> usize {
    let [a, b] = [1, 2].map(|n| number(seed, n));
    let stage =
        [LeaveStage::Asks, LeaveStage::Answers, LeaveStage::Confirms][(a >> 48) as usize % 3];
    let (rail, apart) = ((a >> 60) as u8, 1 + (a >> 52) as u8 % 15);
    let (over, word, epoch) = ((rail + apart) % 16, a as u32, (a >> 32) as u16);
    let stalls = a >> 59 & 1 != 0;
    let leave = Leave { rail, over, stage, word, epoch, stalls, ticket: b };
    put(into, &leave.encode())
}

fn read_leave(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let leave = Leave::decode(Untrusted::from_slice(input))?.ok()?;
    Some(put(again, &leave.encode()))
}

fn sample_get(seed: u64, into: &mut [u8]) -> usize {
    let [a, b, c] = [1, 2, 3].map(|n| number(seed, n));
    let (context, word, ack) = ((a >> 32) as u8 & 3, a as u32, b as u32);
    let (len, piece) = (1 + c % 100_000, 1 + (b >> 40) as u32);
    let get =
        Get { context, word, ack, at: place(seed, 4), token: a | 1, len, into: c >> 20, piece };
    put(into, &get.encode())
}

fn read_get(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let get = Get::decode(Untrusted::from_slice(input))?.ok()?;
    Some(put(again, &get.encode()))
}

fn sample_got(seed: u64, into: &mut [u8]) -> usize {
    let [a, b, c] = [1, 2, 3].map(|n| number(seed, n));
    let (context, word, ack) = ((a >> 32) as u8 & 3, a as u32, b as u32);
    let got = Got { context, last: a >> 63 != 0, word, ack, token: c, into: b };
    let (len, payload) = (put(into, &got.encode()), (a >> 48) as usize % 40);
    into[len..len + payload].fill(a as u8);
    len + payload
}

fn read_got(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let (got, rest) = Got::decode(Untrusted::from_slice(input))?.ok()?;
    let len = put(again, &got.encode());
    assert_eq!(len + rest.len(), input.len(), "a part of the message was ignored");
    Some(len)
}

fn head(seed: u64) -> Head {
    let [a, b] = [1, 2].map(|n| number(seed, n));
    let kind = [
        head::TAGGED,
        head::SYNCHRONOUS,
        head::REQUEST,
        head::FIN,
        head::PULL,
        head::CHUNK,
        head::ROOM,
        head::SHORT,
    ][a as usize % 8];
    Head {
        kind,
        context: (a >> 8) as u8 & 3,
        op: (a >> 16) as u8 & if kind == head::FIN { 3 } else { 1 },
        word: b as u32,
        ack: (b >> 32) as u32,
        freed: (a >> 32) as u32,
        words: [number(seed, 3), number(seed, 4) >> 32],
    }
}

fn sample_tagged(seed: u64, into: &mut [u8]) -> usize {
    let len = put(into, &head(seed).write());
    let more = number(seed, 5) as usize % 20;
    into[len..len + more].fill(7);
    len + more
}

fn read_tagged(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let (head, rest) = Head::read(Untrusted::from_slice(input)).ok()?;
    assert_eq!(rest.len() + head::HEAD, input.len());
    let _ = (head.tag(), head::trailing(rest));
    // The fourth byte is unused.
    let bytes = head.write();
    assert_eq!(bytes[4..], input[4..head::HEAD]);
    Some(put(again, &bytes[..3]))
}

fn sample_request<const RAILS: usize>(seed: u64, into: &mut [u8]) -> usize {
    let [a, b, c] = [6, 7, 8].map(|n| number(seed, n));
    let (len, offset) = (a >> (1 + a % 60), b >> (2 + b % 60));
    let size = (len + offset).min(i64::MAX as u64);
    let hidden = c.is_multiple_of(4);
    let offer = Offer::<RAILS> {
        token: c | 1,
        len: len.min(size),
        offset: offset.min(size - len.min(size)),
        size,
        region: match hidden {
            true => [head::UNREADABLE, head::ADDRESS][a as usize % 2],
            false => a as u16 & 0xff,
        },
        generation: (a >> 16) as u16,
        rails: if hidden { 0 } else { (c >> 8) as u16 & low(RAILS) | 1 },
        keys: core::array::from_fn(|rail| RailKey {
            key: number(seed, 9 + rail as u64),
            base: number(seed, 99 + rail as u64),
        }),
    };
    let mut bytes = [0; head::LONGEST];
    let len = offer.write(&mut bytes);
    bytes[..head::HEAD].copy_from_slice(&Head { kind: head::REQUEST, ..head(seed) }.write());
    put(into, &bytes[..len])
}

fn read_request<const RAILS: usize>(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let (_, rest) = Head::read(Untrusted::from_slice(input)).ok()?;
    // Pretend that exactly the rails with keys reach the peer, so that all keys are read.
    let rails = input.get(head::RTS - 4..head::RTS)?;
    let rails = u16::from_le_bytes([rails[0], rails[1]]) & low(RAILS);
    let mut offer = Offer::<RAILS>::NONE;
    offer.read(rest, &Pairing::ALIKE, rails).ok()?;
    assert!(offer.offset.checked_add(offer.len).is_some_and(|end| end <= offer.size));
    let mut bytes = [0; head::LONGEST];
    let len = offer.write(&mut bytes);
    bytes[..head::HEAD].copy_from_slice(&input[..head::HEAD]);
    match input[head::RTS - 4..head::RTS - 2] == rails.to_le_bytes() {
        true => assert_eq!(len, input.len(), "bytes after the request"),
        // Keys of rails that this side does not have were skipped.
        false => return Some(0),
    }
    Some(put(again, &bytes[..len]))
}

fn sample_handle<const RAILS: usize>(seed: u64, into: &mut [u8]) -> usize {
    let [a, b] = [1, 2].map(|n| number(seed, n));
    let rails = 1 + (a >> 32) as usize % RAILS;
    let handle = Handle::<RAILS> {
        theirs: (a as u16, (a >> 16) as u16),
        len: (b >> (b % 64)) | 1,
        access: match a >> 62 {
            0 | 1 => Access::Plain,
            2 => Access::Device((b >> 40) as u8),
            _ => Access::Native((b >> 32) as u8 % rails as u8),
        },
        keys: core::array::from_fn(|rail| RailKey {
            key: number(seed, 3 + rail as u64),
            base: number(seed, 50 + rail as u64),
        }),
    };
    handle.encode(rails, into).unwrap_or(0)
}

fn read_handle<const RAILS: usize>(input: &[u8], again: &mut [u8]) -> Option<usize> {
    // Byte 16 is the number of keys. A side with `RAILS` rails skips further keys.
    let count = usize::from(*input.get(16)?).min(RAILS);
    let handle = Handle::<RAILS>::decode(input, &Pairing::ALIKE, low(count)).ok()?;
    let mut bytes = [0; HANDLE_MAX];
    let len = handle.encode(count, &mut bytes).unwrap_or(0);
    // Keys of rails that this side does not have were skipped, but are counted in the input.
    let skipped = usize::from(input[16]) > count;
    Some(if skipped { 0 } else { put(again, &bytes[..len]) })
}

/// Returns the bitmask of the lowest `count` rails.
fn low(count: usize) -> u16 {
    ((1u32 << count) - 1) as u16
}
