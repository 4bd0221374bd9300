//! The wire format: the 32-bit word that a write carries as completion data, and the messages.
//! Little-endian, no padding.
//!
//! ```text
//! word                context 8 | epoch 24 - n | sequence n
//!
//! message head, 16 bytes, common to all
//!    0 kind u8 | 1 context u8 | 2 op u8 | 3 width u8 | 4 word u32
//!    8 ack u32 | 12 region u16 | 14 generation u16
//! Signal      32 bytes: head, offset u64, value u64
//! SignalData  48 bytes and the payload: the fields of Signal, offset u64, len u32, region u16,
//!             generation u16
//! Data        24 bytes and the payload: head, offset u64; counts as a write; if the target is
//!             device memory, waits for all earlier numbers
//! Amo         48 bytes: head, offset u64, operand u64, compare u64, token u64 (0: no fetch)
//! Reply       32 bytes: head, token u64, value u64
//! Hello       16 bytes; no context
//! Bye         28 bytes: head, with returned credits u32 in place of region and generation;
//!             end u64, fins u32
//! Told        128 bytes
//! Asks        32 bytes
//! Leave       24 bytes
//! Rejoin      128 bytes
//! Get         56 bytes
//! Got         32 bytes and the payload
//! Ack         16 bytes: head, with returned credits u32 in place of region and generation;
//!             24 bytes if op is 1: also wanted u64, the number up to which the sender requests
//!             an acknowledgement
//! ```
//!
//! `epoch` has the layout of Hello in `hello`, and `close` explains Bye. `failover` has the layouts
//! of Told, Asks, Leave and Rejoin in `told`, `leave` and `rejoin`, and `pieces` has those of Get
//! and Got. The messages of `protocol` have kinds from 16 on.
//!
//! The sequence has two bits more than the window needs, but at least 9 and at most 20. The epoch
//! gets the remaining bits, and identifies the attachment that the word belongs to. A message
//! without a number (Reply, Ack, and the answers of `protocol`) carries the word with a sequence of
//! 0.
//!
//! Except for Hello, Leave and Rejoin, each message carries in `ack` the low 32 bits of the reverse
//! stream's cursor: all numbers below the cursor were applied here. A sequence would have too few
//! bits for this. A message without a number may be millions of numbers late on a slow rail. Its
//! cursor must not be mistaken for a newer cursor.

use crate::error::Violation;
use crate::mem::Untrusted;
use crate::op::{Amo, AmoOp, SignalOp};
use crate::sync::seq::{Seq, WIRE_BITS};

/// The version of the wire format, exchanged in Hello.
pub(super) const VERSION: u32 = 12;

/// Longest header of a message, in bytes. It is copied out before it is checked.
pub(crate) const HEAD_MAX: usize = 48;

/// The token of an atomic that does not fetch.
pub(crate) const NO_TOKEN: u64 = 0;

const KIND_SIGNAL: u8 = 1;
const KIND_SIGNAL_DATA: u8 = 2;
const KIND_AMO: u8 = 3;
const KIND_REPLY: u8 = 4;
pub(super) const KIND_ACK: u8 = 5;
const KIND_DATA: u8 = 6;
pub(super) const KIND_HELLO: u8 = 7;
pub(super) const KIND_BYE: u8 = 8;
pub(super) const KIND_TOLD: u8 = 9;
pub(super) const KIND_ASKS: u8 = 10;
pub(super) const KIND_REJOIN: u8 = 11;
pub(super) const KIND_LEAVE: u8 = 12;
pub(super) const KIND_GET: u8 = 13;
pub(super) const KIND_GOT: u8 = 14;

/// The fewest sequence bits of a word. A rail that fails may deliver a message twice, and the
/// second copy must not be taken for a new number, even if the window is small.
const FEWEST_BITS: u32 = 9;

pub(crate) const fn sequence_mask(window: u32) -> u32 {
    let bits = window.trailing_zeros() + 2;
    let bits = if bits > FEWEST_BITS { bits } else { FEWEST_BITS };
    (1 << if bits < WIRE_BITS { bits } else { WIRE_BITS }) - 1
}

/// Returns the context and epoch bits of a word. Only the low bits of `epoch` that fit are used.
pub(crate) const fn stamp(context: u8, epoch: u32, mask: u32) -> u32 {
    (context as u32) << CONTEXT_SHIFT | epoch << mask.count_ones() & ((1 << CONTEXT_SHIFT) - 1)
}

#[inline(always)]
pub(crate) const fn context_of(word: u32) -> u8 {
    (word >> CONTEXT_SHIFT) as u8
}

const CONTEXT_SHIFT: u32 = 24;

/// A location in the target's registered memory, by the target's own numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Place {
    pub region: u16,
    pub generation: u16,
    pub offset: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    /// Changes a signal word. `data` has the target and the length in bytes of the payload that
    /// follows.
    Signal { at: Place, op: SignalOp, value: u64, data: Option<(Place, u32)> },
    /// A write that is short enough to be sent as a message. `at` is the target of the payload.
    Data { at: Place },
    /// Executes an atomic. Unless `token` is [`NO_TOKEN`], a reply returns the token and the
    /// fetched value.
    Amo { at: Place, amo: Amo, token: u64 },
    /// Returns a fetched value.
    Reply { token: u64, value: u64 },
    /// Carries the cursor and the returned credits. With `wanted`, the sender requests an
    /// acknowledgement once everything below that number is applied. `freed` is the total of
    /// returned credits of the reverse stream.
    Ack { wanted: Option<Seq>, freed: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub context: u8,
    /// The word. Its sequence is the number of a Signal, Data or Amo, otherwise 0.
    pub word: u32,
    /// Low 32 bits of the reverse stream's cursor.
    pub ack: u32,
    pub body: Body,
}

impl Message {
    #[inline]
    pub(crate) fn encode(&self, out: &mut [u8; HEAD_MAX]) -> usize {
        let (kind, op, width, at, len) = match self.body {
            Body::Signal { at, op, data: None, .. } => (KIND_SIGNAL, op as u8, 8, at, 32),
            Body::Signal { at, op, data: Some(_), .. } => (KIND_SIGNAL_DATA, op as u8, 8, at, 48),
            Body::Data { at } => (KIND_DATA, 0, 0, at, 24),
            Body::Amo { at, amo, .. } => (KIND_AMO, amo.op as u8, amo.width, at, 48),
            Body::Reply { .. } => (KIND_REPLY, 0, 0, Place::default(), 32),
            Body::Ack { wanted: None, .. } => (KIND_ACK, 0, 0, Place::default(), 16),
            Body::Ack { wanted: Some(_), .. } => (KIND_ACK, 1, 0, Place::default(), 24),
        };
        out[0..4].copy_from_slice(&[kind, self.context, op, width]);
        out[4..8].copy_from_slice(&self.word.to_le_bytes());
        out[8..12].copy_from_slice(&self.ack.to_le_bytes());
        out[12..14].copy_from_slice(&at.region.to_le_bytes());
        out[14..16].copy_from_slice(&at.generation.to_le_bytes());
        match self.body {
            Body::Signal { value, data, .. } => {
                put64(out, 16, at.offset);
                put64(out, 24, value);
                if let Some((place, len)) = data {
                    put64(out, 32, place.offset);
                    out[40..44].copy_from_slice(&len.to_le_bytes());
                    out[44..46].copy_from_slice(&place.region.to_le_bytes());
                    out[46..48].copy_from_slice(&place.generation.to_le_bytes());
                }
            }
            Body::Data { .. } => put64(out, 16, at.offset),
            Body::Amo { amo, token, .. } => {
                put64(out, 16, at.offset);
                put64(out, 24, amo.operand);
                put64(out, 32, amo.compare);
                put64(out, 40, token);
            }
            Body::Reply { token, value } => {
                put64(out, 16, token);
                put64(out, 24, value);
            }
            Body::Ack { wanted, freed } => {
                out[12..16].copy_from_slice(&freed.to_le_bytes());
                if let Some(Seq(wanted)) = wanted {
                    put64(out, 16, wanted);
                }
            }
        }
        len
    }

    #[inline(always)]
    pub(crate) fn decode(bytes: Untrusted<'_>) -> Result<(Message, Untrusted<'_>), Violation> {
        let mut head = [0u8; HEAD_MAX];
        let copied = bytes.copy_out(&mut head);
        if copied < 16 {
            return Err(Violation::Length);
        }
        let [kind, context, op, width] = [head[0], head[1], head[2], head[3]];
        let place = Place {
            region: get16(&head, 12),
            generation: get16(&head, 14),
            offset: get64(&head, 16),
        };
        let need = match kind {
            KIND_SIGNAL | KIND_REPLY => 32,
            KIND_SIGNAL_DATA | KIND_AMO => 48,
            KIND_ACK if op != 1 => 16,
            KIND_ACK | KIND_DATA => 24,
            _ => return Err(Violation::Kind),
        };
        let (_, rest) = bytes.split_at(need).ok_or(Violation::Length)?;
        let body = match kind {
            KIND_SIGNAL | KIND_SIGNAL_DATA => {
                let op = match op {
                    1 => SignalOp::Set,
                    2 => SignalOp::Add,
                    _ => return Err(Violation::Kind),
                };
                let data = (kind == KIND_SIGNAL_DATA).then(|| {
                    let place = Place {
                        region: get16(&head, 44),
                        generation: get16(&head, 46),
                        offset: get64(&head, 32),
                    };
                    (place, get32(&head, 40))
                });
                Body::Signal { at: place, op, value: get64(&head, 24), data }
            }
            KIND_DATA => Body::Data { at: place },
            KIND_AMO => {
                let op = AmoOp::from_wire(op).ok_or(Violation::Kind)?;
                let amo = Amo { op, width, operand: get64(&head, 24), compare: get64(&head, 32) };
                if !amo.width_is_valid() {
                    return Err(Violation::Kind);
                }
                Body::Amo { at: place, amo, token: get64(&head, 40) }
            }
            KIND_REPLY => Body::Reply { token: get64(&head, 16), value: get64(&head, 24) },
            _ => match op {
                0 => Body::Ack { wanted: None, freed: get32(&head, 12) },
                1 => Body::Ack { wanted: Some(Seq(get64(&head, 16))), freed: get32(&head, 12) },
                _ => return Err(Violation::Kind),
            },
        };
        let payload = match body {
            Body::Signal { data: Some((_, len)), .. } => len as usize,
            Body::Data { .. } => rest.len(),
            _ => 0,
        };
        if rest.len() != payload {
            return Err(Violation::Length);
        }
        let (word, ack) = (get32(&head, 4), get32(&head, 8));
        Ok((Message { context, word, ack, body }, rest))
    }
}

#[inline(always)]
pub(super) fn put64(out: &mut [u8; HEAD_MAX], at: usize, value: u64) {
    out[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

#[inline(always)]
pub(super) fn get64(head: &[u8; HEAD_MAX], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&head[at..at + 8]);
    u64::from_le_bytes(bytes)
}

#[inline(always)]
pub(super) fn get32(head: &[u8; HEAD_MAX], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&head[at..at + 4]);
    u32::from_le_bytes(bytes)
}

#[inline(always)]
fn get16(head: &[u8; HEAD_MAX], at: usize) -> u16 {
    u16::from_le_bytes([head[at], head[at + 1]])
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;
    use std::vec::Vec;

    fn samples() -> [Message; 8] {
        let at = Place { region: 0xfffe, generation: 7, offset: u64::MAX - 1 };
        let data = Place { region: 3, generation: 0xffff, offset: 0x1122_3344_5566_7788 };
        let amo = Amo { op: AmoOp::CompareSwap, width: 4, operand: 5, compare: u64::MAX };
        [
            Body::Signal { at, op: SignalOp::Set, value: 9, data: None },
            Body::Signal { at, op: SignalOp::Add, value: u64::MAX, data: Some((data, 5)) },
            Body::Signal { at, op: SignalOp::Add, value: 0, data: Some((data, 0)) },
            Body::Data { at },
            Body::Amo { at, amo, token: 77 },
            Body::Reply { token: u64::MAX, value: 1 },
            Body::Ack { wanted: None, freed: 0 },
            Body::Ack { wanted: Some(Seq(u64::MAX)), freed: u32::MAX },
        ]
        .map(|body| Message { context: 200, word: u32::MAX - 1, ack: 0xa_bcde, body })
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        for message in samples() {
            let mut head = [0xee; HEAD_MAX + 5];
            let len = message.encode((&mut head[..HEAD_MAX]).try_into().unwrap());
            let payload = if let Body::Signal { data: Some((_, n)), .. } = message.body {
                n as usize
            } else {
                0
            };
            let (back, rest) =
                Message::decode(Untrusted::from_slice(&head[..len + payload])).unwrap();
            assert_eq!(back, message);
            assert_eq!(rest.len(), payload);
        }
    }

    #[test]
    fn messages_have_the_bytes_of_their_description() {
        let place = Place { region: 0x0201, generation: 0x0403, offset: 0x0c0b_0a09_0807_0605 };
        let data = Place { region: 0x2221, generation: 0x2423, offset: 0x1c1b_1a19_1817_1615 };
        let amo = Amo { op: AmoOp::CompareSwap, width: 4, operand: 0x50, compare: 0x60 };
        let at = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
        let word = |value: u8| [value, 0, 0, 0, 0, 0, 0, 0];
        let head =
            |kind, op, width| [kind, 9, op, width, 0xa1, 0xa2, 0xa3, 0xa4, 0xb1, 0xb2, 0xb3, 0xb4];
        let far =
            [0x15, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x1b, 0x1c, 0x0f, 0, 0, 0, 0x21, 0x22, 0x23, 0x24];
        let golden: [(Body, &[&[u8]]); 7] = [
            (
                Body::Signal { at: place, op: SignalOp::Add, value: 0x40, data: None },
                &[&head(1, 2, 8), &at, &word(0x40)],
            ),
            (
                Body::Signal { at: place, op: SignalOp::Set, value: 0x40, data: Some((data, 15)) },
                &[&head(2, 1, 8), &at, &word(0x40), &far],
            ),
            (Body::Data { at: place }, &[&head(6, 0, 0), &at]),
            (
                Body::Amo { at: place, amo, token: 0x70 },
                &[&head(3, amo.op as u8, 4), &at, &word(0x50), &word(0x60), &word(0x70)],
            ),
            (
                Body::Reply { token: 0x70, value: 0x40 },
                &[&head(4, 0, 0), &[0; 4], &word(0x70), &word(0x40)],
            ),
            (Body::Ack { wanted: None, freed: 0x0d0c_0b0a }, &[&head(5, 0, 0), &[10, 11, 12, 13]]),
            (
                Body::Ack { wanted: Some(Seq(0x30)), freed: 0x0d0c_0b0a },
                &[&head(5, 1, 0), &[10, 11, 12, 13], &word(0x30)],
            ),
        ];
        for (body, bytes) in golden {
            let message = Message { context: 9, word: 0xa4a3_a2a1, ack: 0xb4b3_b2b1, body };
            let mut out = [0; HEAD_MAX];
            let len = message.encode(&mut out);
            assert_eq!(
                out[..len],
                *bytes.iter().copied().flatten().copied().collect::<Vec<u8>>(),
                "{body:?}"
            );
        }
    }

    #[test]
    fn every_cut_or_padded_message_is_refused() {
        for message in samples() {
            let mut head = [0; 64];
            let len = message.encode((&mut head[..HEAD_MAX]).try_into().unwrap());
            let payload = if let Body::Signal { data: Some((_, n)), .. } = message.body {
                n as usize
            } else {
                0
            };
            let open_ended = matches!(message.body, Body::Data { .. });
            for cut in (0..=64).filter(|&cut| cut != len + payload && !(open_ended && cut > len)) {
                let got = Message::decode(Untrusted::from_slice(&head[..cut]));
                assert_eq!(got.err(), Some(Violation::Length), "{message:?} cut to {cut}");
            }
        }
    }

    #[test]
    fn unknown_kinds_operations_and_widths_are_refused() {
        for message in samples() {
            let mut head = [0; HEAD_MAX];
            let len = message.encode(&mut head);
            let decode = |at: usize, value: u8| {
                let mut bytes = [0; 64];
                bytes[..HEAD_MAX].copy_from_slice(&head);
                bytes[at] = value;
                let payload = if let Body::Signal { data: Some((_, n)), .. } = message.body {
                    n as usize
                } else {
                    0
                };
                Message::decode(Untrusted::from_slice(&bytes[..len + payload])).err()
            };
            assert_eq!(decode(0, 0), Some(Violation::Kind));
            assert_eq!(decode(0, 7), Some(Violation::Kind));
            if !matches!(message.body, Body::Reply { .. } | Body::Data { .. }) {
                assert_eq!(decode(2, 99), Some(Violation::Kind));
            }
            if matches!(message.body, Body::Amo { .. }) {
                assert_eq!(decode(3, 3), Some(Violation::Kind));
            }
        }
    }

    #[test]
    fn the_parts_of_a_word_do_not_overlap() {
        for (window, epochs) in
            [(1, 15), (64, 15), (128, 15), (2048, 11), (1 << 18, 4), (1 << 19, 4)]
        {
            let mask = sequence_mask(window);
            assert_eq!(mask.count_ones() + epochs, 24, "window {window}");
            assert!(mask as u64 + 1 >= 2 * window as u64);
            for context in [0, 3, 255] {
                let last = stamp(context, (1 << epochs) - 1, mask);
                assert_eq!((context_of(last), last & mask), (context, 0));
                assert_eq!(last | mask, (context as u32) << 24 | 0xff_ffff);
                assert_eq!(stamp(context, 1 << epochs, mask), (context as u32) << 24);
                let near = (1..1 << epochs).map(|n| stamp(context, n, mask));
                assert!(near.clone().zip(near.skip(1)).all(|(a, b)| a != b));
            }
        }
    }
}
