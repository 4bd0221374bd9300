//! Damages, repeats and drops the traffic of a peer, or adds messages that a correct peer might
//! send at another time.

use fishplate_core::mem::Peer;

use super::Random;
use super::tap::{Edit, Event};

/// Kinds of the answers of the two-sided protocol, with and without a sequence number.
const ANSWERS: [u8; 7] = [19, 20, 21, 22, 23, 24, 25];

const PULLS: [u8; 2] = [20, 24];

/// Damages one in `rate` events of a peer. `first` is the first sequence number of all streams.
pub fn damage(bad: Peer, rate: u64, first: u64, seed: u64) -> Edit {
    let mut random = Random(seed ^ 0xdead);
    let mut old: Vec<Event> = vec![];
    // Half of the peers only add forged messages, so that they are quarantined later. Some of them
    // send nothing more after requesting chunks.
    let lies = (seed / 2).is_multiple_of(2);
    let mut mute = None;
    Box::new(move |_, event| {
        let theirs = match &event {
            Event::Landed(peer, _) | Event::Message(peer, _) => *peer == bad,
            _ => false,
        };
        if theirs && mute.is_none() {
            old.push(event.clone());
        }
        if theirs && let Some(rest) = &mut mute {
            *rest -= u64::from(*rest != 0);
            if *rest != 0 {
                return vec![];
            }
            return made_up(&old, first, true, &mut random);
        }
        let asks = matches!(&event, Event::Message(_, bytes) if PULLS.contains(&bytes[0]));
        if theirs && lies && random.below(if asks { 3 } else { 4 * rate }) == 0 {
            mute = Some(random.below(8));
        }
        if !theirs || random.below(rate) != 0 {
            return vec![event];
        }
        match (if lies { 2 } else { random.below(6) }, event) {
            (0, _) => vec![],
            (1, event) => {
                vec![event.clone(), old[random.below(old.len() as u64) as usize].clone(), event]
            }
            (2, event) => {
                let mut events = made_up(&old, first, false, &mut random);
                events.insert(random.below(events.len() as u64 + 1) as usize, event);
                events
            }
            (_, Event::Landed(peer, data)) => {
                vec![Event::Landed(peer, data ^ 1 << random.below(32))]
            }
            (3, Event::Message(peer, mut bytes)) => {
                bytes.truncate(random.below(bytes.len() as u64) as usize);
                vec![Event::Message(peer, bytes)]
            }
            (4, Event::Message(peer, mut bytes)) => {
                for _ in 0..1 + random.below(4) {
                    let at = random.below(bytes.len() as u64) as usize;
                    bytes[at] = random.next() as u8;
                }
                vec![Event::Message(peer, bytes)]
            }
            (_, Event::Message(peer, mut bytes)) => {
                let bit = random.below(bytes.len() as u64 * 8) as usize;
                bytes[bit / 8] ^= 1 << (bit % 8);
                vec![Event::Message(peer, bytes)]
            }
            (_, event) => vec![event],
        }
    })
}

/// Returns a forged answer or a forged report of arrivals, with the header and token of earlier
/// messages. If `calm`, an answer completes an open request, and a report names one rail. Then the
/// peer is quarantined later.
fn made_up(old: &[Event], first: u64, calm: bool, random: &mut Random) -> Vec<Event> {
    let (kinds, about) =
        if calm { (&ANSWERS[..1], &PULLS[..]) } else { (&ANSWERS[..], &ANSWERS[..]) };
    let pick = |random: &mut Random, wanted: &dyn Fn(&[u8]) -> bool| {
        let mut fits = old.iter().rev().filter_map(|event| match event {
            Event::Message(from, bytes) if wanted(bytes) => Some((*from, bytes.clone())),
            _ => None,
        });
        fits.nth([0, 0, 1, 4][random.below(4) as usize])
    };
    let Some((from, head)) = pick(random, &|bytes| bytes.len() >= 16) else { return vec![] };
    let some = |random: &mut Random| [0u64, 1, 2, 8, 64, 100, 600][random.below(7) as usize];
    // A number near the stream's last acknowledged sequence number.
    let near = |random: &mut Random| {
        let acked = u32::from_le_bytes(head[8..12].try_into().unwrap());
        first.wrapping_add(acked.wrapping_sub(first as u32).into()).wrapping_add(random.below(4))
    };
    let answer = pick(random, &|bytes| about.contains(&bytes[0]) && bytes.len() >= 32);
    let bytes = match (random.below(3), answer) {
        (0, Some((_, answer))) => {
            let mut bytes = answer[..32].to_vec();
            bytes[0] = kinds[random.below(kinds.len() as u64) as usize];
            bytes[4..12].copy_from_slice(&head[4..12]);
            if calm || random.below(2) == 0 {
                bytes[24..32].copy_from_slice(&some(random).to_le_bytes());
            }
            if PULLS.contains(&bytes[0]) {
                bytes.extend(some(random).to_le_bytes());
            }
            bytes
        }
        (0, None) => {
            // A request for a reply, an acknowledgement, or a Bye.
            let (kind, len) = [(10, 32), (5, 24), (8, 28)][random.below(3) as usize];
            let mut bytes = vec![kind, head[1], (kind == 5) as u8, 0];
            bytes.extend_from_slice(&head[4..16]);
            bytes.extend(if kind == 10 { some(random) } else { near(random) }.to_le_bytes());
            bytes.extend(if kind == 10 { near(random) } else { some(random) }.to_le_bytes());
            bytes.truncate(len);
            bytes
        }
        _ => {
            // A report that only a few numbers have arrived, on some rails.
            let mut bytes = vec![9, head[1], 1, 0];
            bytes.extend_from_slice(&head[4..16]);
            bytes.extend(near(random).to_le_bytes());
            let (rails, words) = (if calm { 1 } else { 1 + random.below(3) }, random.below(2));
            bytes.extend((rails | words << 16).to_le_bytes());
            (0..words).for_each(|_| bytes.extend(random.next().to_le_bytes()));
            bytes
        }
    };
    vec![Event::Message(from, bytes)]
}
