//! Runs parsers on mutated valid inputs, with the stable toolchain. Each input lies between two
//! inaccessible pages. Every second input ends at the second page. The others start right after the
//! first page.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};
use std::{env, fs};

use fishplate_core::engine::fuzzing::{Target, number};

use super::fence::Fence;

/// Maximum length of an input in bytes.
pub const LONGEST: usize = 1 << 16;

/// Number of inputs run, of inputs accepted, and of inputs saved.
#[derive(Debug, Default)]
pub struct Count {
    pub inputs: u64,
    pub accepted: u64,
    pub saved: usize,
}

struct Random {
    seed: u64,
    n: u64,
}

impl Random {
    fn next(&mut self) -> u64 {
        self.n += 1;
        number(self.seed, self.n)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// Runs a parser on its saved corpus, on its samples, and on mutations until `time` is up. Fails
/// with a message that shows the input.
pub fn drive(target: &Target, corpus: &Path, seed: u64, time: Duration) -> Result<Count, String> {
    let mut bench = Bench {
        target,
        fence: Fence::new(LONGEST),
        again: vec![0; LONGEST],
        count: Count::default(),
    };
    if env::var_os("FISHPLATE_FUZZ_SAVE").is_some() {
        save(target, corpus);
    }
    let saved = saved(corpus, target.name);
    for input in &saved {
        bench.check(input, "saved")?;
    }
    if bench.count.accepted == 0 && corpus.exists() {
        return Err(format!("{}: the parser accepts no input of the corpus", target.name));
    }
    bench.count.saved = saved.len();
    let (end, mut sample) = (Instant::now() + time, vec![0; LONGEST]);
    for n in 0u64.. {
        // Reads the clock rarely, because many parsers are faster than a clock read.
        if n >= 256 && n.is_multiple_of(64) && Instant::now() >= end {
            break;
        }
        let mut random = Random { seed: number(seed, n), n: 0 };
        let mut input = match saved.is_empty() || random.below(8) > 0 {
            true => {
                let len = (target.sample)(random.next(), &mut sample);
                sample[..len].to_vec()
            }
            false => saved[random.below(saved.len())].clone(),
        };
        if n < 64 && saved.is_empty() || n.is_multiple_of(64) {
            let len = (target.sample)(number(seed, n), &mut sample);
            if !bench.check(&sample[..len], "valid")? {
                return Err(format!(
                    "{}: its own sample is refused: {}",
                    target.name,
                    hex(&sample[..len])
                ));
            }
        }
        for _ in 0..1 + random.below(4) {
            change(&mut input, target, &mut sample, &mut random);
        }
        bench.check(&input, &format!("changed, seed {seed} number {n}"))?;
    }
    Ok(bench.count)
}

struct Bench<'a> {
    target: &'a Target,
    fence: Fence,
    again: Vec<u8>,
    count: Count,
}

impl Bench<'_> {
    /// Runs the parser on an input. Returns true if it accepts the input.
    fn check(&mut self, input: &[u8], what: &str) -> Result<bool, String> {
        let Bench { target, fence, again, count } = self;
        count.inputs += 1;
        let placed = match count.inputs.is_multiple_of(2) {
            true => fence.end(input),
            false => fence.front(input),
        };
        let name = target.name;
        let read = catch_unwind(AssertUnwindSafe(|| (target.read)(placed, again)));
        let accepted =
            read.map_err(|_| format!("{name}: panics at an input ({what}): {}", hex(input)))?;
        if let Some(same) = accepted
            && input.get(..same) != Some(&again[..same])
        {
            let again = hex(&again[..same]);
            return Err(format!(
                "{name}: an input ({what}) changes in a round trip: {} to {again}",
                hex(input)
            ));
        }
        count.accepted += u64::from(accepted.is_some());
        Ok(accepted.is_some())
    }
}

/// Integers around common limits, for [`change`].
const EDGES: [u64; 16] = [
    0,
    1,
    2,
    7,
    8,
    0x7f,
    0x80,
    0xff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 32,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];

/// Mutates an input: its bits, numbers, lengths or order.
fn change(input: &mut Vec<u8>, target: &Target, sample: &mut [u8], random: &mut Random) {
    let len = input.len();
    let at = random.below(len);
    match random.below(12) {
        0 if len > 0 => input[at] ^= 1 << random.below(8),
        1 if len > 0 => input[at] = random.next() as u8,
        // Replaces an integer of 1, 2, 4 or 8 bytes by a limit, by the length, or by its value plus
        // or minus one.
        2..=4 if len > 0 => {
            let width = (1 << random.below(4)).min(len);
            let at = random.below(len - width + 1);
            let at = if random.below(2) == 0 { at - at % width } else { at };
            let mut there = [0; 8];
            there[..width].copy_from_slice(&input[at..at + width]);
            let there = u64::from_le_bytes(there);
            let value = match random.below(4) {
                0 => EDGES[random.below(EDGES.len())],
                1 => (len as u64).wrapping_add(random.next() % 5).wrapping_sub(2),
                2 => there.wrapping_add(random.next() % 5).wrapping_sub(2),
                _ => EDGES[random.below(EDGES.len())].wrapping_sub(there),
            };
            input[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        }
        5 => input.truncate(at),
        6 => input.resize((len + 1 + random.below(40)).min(LONGEST), random.next() as u8),
        7 if len > 0 => {
            let end = at + random.below(len - at) + 1;
            input.drain(at..end);
        }
        8 if len > 0 && len < LONGEST / 2 => {
            let piece = input[at..(at + 1 + random.below(32)).min(len)].to_vec();
            let to = random.below(len);
            input.splice(to..to, piece);
        }
        // Lengthens or shortens a field, and corrects its length prefix.
        9 | 10 if len > 2 => {
            let width = (1 << random.below(2)).min(len - 1);
            let at = at.min(len - width);
            let mut there = [0; 8];
            there[..width].copy_from_slice(&input[at..at + width]);
            let there = u64::from_le_bytes(there) as usize;
            let (start, other) =
                (at + width, [0, 1, there.wrapping_sub(1), there + 1, random.below(1200)]);
            let other = other[random.below(other.len())];
            if start + there <= len && other < LONGEST / 2 && (width == 2 || other < 256) {
                input[at..start].copy_from_slice(&(other as u64).to_le_bytes()[..width]);
                let filler = vec![b'a'; other.saturating_sub(there)];
                input.splice(start + other.min(there)..start + there, filler);
            }
        }
        // Joins the start of this input and the end of another input.
        _ => {
            let other = (target.sample)(random.next(), sample);
            input.truncate(at);
            input.extend(&sample[at.min(other)..other]);
        }
    }
}

/// Returns the saved inputs, sorted by name.
fn saved(corpus: &Path, name: &str) -> Vec<Vec<u8>> {
    let files =
        fs::read_dir(corpus.join(name)).map(|dir| dir.flatten().map(|file| file.path()).collect());
    let mut files: Vec<_> = files.unwrap_or_default();
    files.sort();
    files.iter().map(|file| fs::read(file).expect("a file of the corpus")).collect()
}

/// Adds valid inputs and some mutated inputs to the corpus.
fn save(target: &Target, corpus: &Path) {
    let (place, mut sample) = (corpus.join(target.name), vec![0; LONGEST]);
    fs::create_dir_all(&place).expect("a folder of the corpus");
    for n in 0..12 {
        let len = (target.sample)(n, &mut sample);
        let mut input = sample[..len].to_vec();
        let mut random = Random { seed: n, n: 0 };
        for _ in 0..n / 4 {
            change(&mut input, target, &mut sample, &mut random);
        }
        fs::write(place.join(format!("{n:02}")), input).expect("a file of the corpus");
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
