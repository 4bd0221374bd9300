//! Entry points for fuzzing: see [`fishplate_core::engine::fuzzing`].

use std::fs::File;

use fishplate_core::engine::Config;
use fishplate_core::engine::fuzzing::{Target, number, put};

use super::{Card, RailCard, WIRE_VERSION, Wire};

/// The parsers of this package.
pub const TARGETS: &[Target] = &[
    Target { name: "card", sample: sample_card, read: read_card },
    Target { name: "frame", sample: sample_frame, read: read_frame },
];

fn card(seed: u64) -> Card {
    let [a, b] = [1, 2].map(|n| number(seed, n));
    let rail = |n: u64| {
        let c = number(seed, 3 + n);
        let text = |len: u64| "käse0123456789"[..(len as usize % 14).max(3)].to_owned();
        RailCard {
            provider: text(c),
            interface: text(c >> 8),
            fabric: text(c >> 16),
            address: vec![c as u8; 1 + (c >> 24) as usize % 40],
            mbit: (c >> 32) as u32,
        }
    };
    Card {
        id: a,
        transport: (a >> 5) as u8 % 2,
        window: b as u32,
        contexts: (b >> 32) as u16,
        first_sequence: a >> 7,
        user: b >> 9,
        rails: (0..=a % 4).map(rail).collect(),
    }
}

fn sample_card(seed: u64, into: &mut [u8]) -> usize {
    card(seed).encode().map_or(0, |bytes| put(into, &bytes))
}

fn read_card(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let theirs = Card::decode(input).ok()?;
    // Any two cards either agree or are rejected. Both sides compute the same result.
    for ours in [Card::new(&Config::DEFAULT, 0, card(1).rails), card(input.len() as u64)] {
        let (here, there) = (ours.agree(&theirs), theirs.agree(&ours));
        assert_eq!(here.is_ok(), there.is_ok(), "{here:?} {there:?}");
        if let Ok(agreement) = here {
            assert_eq!(agreement.in_our_order(&theirs.rails).len(), ours.rails.len());
        }
    }
    let len = put(again, &theirs.encode().expect("a decoded card can be encoded"));
    assert_eq!(len, input.len(), "trailing bytes");
    Some(len)
}

fn sample_frame(seed: u64, into: &mut [u8]) -> usize {
    let len = number(seed, 1) as usize % 200;
    let mut at = put(into, b"FPBS");
    at += put(&mut into[at..], &WIRE_VERSION.to_le_bytes());
    at += put(&mut into[at..], &[0, 0]);
    at += put(&mut into[at..], &(len as u32).to_le_bytes());
    into[at..at + len].fill(seed as u8);
    // In half of the cases the start of another message follows.
    at + len + number(seed, 2) as usize % 2 * put(&mut into[at + len..], b"FPBS")
}

fn read_frame(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let socket = File::open("/dev/null").ok()?;
    let message = Wire::heard(socket.into(), input).ok()??;
    // Magic and version take six bytes. The next two bytes are reserved.
    let at = 6;
    again[..at].copy_from_slice(&input[..at]);
    again[at..8].copy_from_slice(&input[at..8]);
    again[8..12].copy_from_slice(&(message.len() as u32).to_le_bytes());
    Some(12 + put(&mut again[12..], &message))
}
