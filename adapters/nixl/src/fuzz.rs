//! Fuzzes the messages of other agents, and the metadata that NIXL carries from them. Each input
//! must be accepted or refused, and must not cause a panic.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

use fishplate_core::engine::fuzzing::{Target, number, put};

use crate::chunk::{HEAD, Head, NO_NOTE, RANGE, Range};
use crate::intro::{Export, Info, Question};

#[path = "../../../tests/fuzz/driver.rs"]
mod driver;
#[path = "../../../tests/fence/mod.rs"]
mod fence;

const TARGETS: [Target; 4] = [
    Target { name: "nixl-info", sample: sample_info, read: read_info },
    Target { name: "nixl-question", sample: sample_question, read: read_question },
    Target { name: "nixl-region", sample: sample_region, read: read_region },
    Target { name: "nixl-chunk", sample: sample_chunk, read: read_chunk },
];

fn bytes(seed: u64, n: u64, most: u64) -> Vec<u8> {
    vec![seed as u8; (number(seed, n) % most) as usize]
}

fn sample_info(seed: u64, into: &mut [u8]) -> usize {
    let hosts = (0..number(seed, 1) % 5).map(|n| Ipv4Addr::from_bits(number(seed, 2 + n) as u32));
    let (hosts, address) = (hosts.collect(), bytes(seed, 7, 300));
    put(
        into,
        &Info { key: [seed as u8; 16], door: seed, port: seed as u16, hosts, address }.encode(),
    )
}

fn read_info(input: &[u8], again: &mut [u8]) -> Option<usize> {
    Some(put(again, &Info::decode(input).ok()?.encode()))
}

fn sample_question(seed: u64, into: &mut [u8]) -> usize {
    let (name, address) = (bytes(seed, 1, 40), bytes(seed, 2, 300));
    put(into, &Question { key: [seed as u8; 16], again: seed & 1 == 1, name, address }.encode())
}

fn read_question(input: &[u8], again: &mut [u8]) -> Option<usize> {
    Some(put(again, &Question::decode(input).ok()?.encode()))
}

fn sample_region(seed: u64, into: &mut [u8]) -> usize {
    let [start, len] = [1, 2].map(|n| number(seed, n) >> 1);
    let handle = bytes(seed, 3, 200);
    put(into, &Export { start, len, number: seed, device: seed & 1 == 1, handle }.encode())
}

fn read_region(input: &[u8], again: &mut [u8]) -> Option<usize> {
    Some(put(again, &Export::decode(input).ok()?.encode()))
}

fn sample_chunk(seed: u64, into: &mut [u8]) -> usize {
    let [a, b] = [1, 2].map(|n| number(seed, n));
    let (ranges, mut note, data) = (a as u32 % 9, b as u32 % 50, bytes(seed, 3, 100));
    let said = if note == 49 { NO_NOTE } else { note };
    note %= 49;
    let mut chunk = vec![];
    let (post, first, status) = ((a >> 32) as u32, (b >> 32) as u32, -((seed % 5) as i32));
    Head { transfer: b, post, first, ranges, note: said, status }.encode(&mut chunk);
    for n in 0..u64::from(ranges) {
        Range { region: n, address: number(seed, 4 + n), len: a as u32 }.encode(&mut chunk);
    }
    chunk.resize(chunk.len() + note as usize + data.len(), 7);
    put(into, &chunk)
}

fn read_chunk(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let head = Head::decode(input.get(..HEAD)?).ok()?;
    let before = head.before_data(input.len()).ok()?;
    let end = HEAD + head.ranges as usize * RANGE;
    let (ranges, sum) = Range::decode_all(&input[HEAD..end]).expect("whole ranges");
    assert!(end + head.note_len() == before && ranges.len() == head.ranges as usize);
    assert_eq!(sum, ranges.iter().map(|range| range.len as usize).sum());
    let mut chunk = vec![];
    head.encode(&mut chunk);
    ranges.iter().for_each(|range| range.encode(&mut chunk));
    Some(put(again, &chunk))
}

#[test]
fn what_agents_send_neither_panics_nor_changes() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fuzz/corpus");
    let seed = std::env::var("FISHPLATE_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    println!("FISHPLATE_SEED={seed}");
    for target in TARGETS {
        let count = driver::drive(&target, &corpus, seed, Duration::from_millis(100));
        let count = count.unwrap_or_else(|error| panic!("FISHPLATE_SEED={seed}\n{error}"));
        println!("{}: {count:?}", target.name);
        assert!(count.accepted > 0 && count.accepted < count.inputs, "{}: {count:?}", target.name);
    }
}
