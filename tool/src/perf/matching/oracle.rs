//! Runs the same random operations in all engines. UCX's matching is independent of ours, so a
//! difference shows that an engine is wrong.

use super::engine::{Engine, Wanted};
use super::list::List;
use super::ours::Ours;
use super::ucx::Ucx;

/// splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (((z ^ (z >> 31)) as u128 * n as u128) >> 64) as u64
    }

    fn tag(&mut self) -> u64 {
        self.below(2) << 40 | self.below(4) | 1 << 43
    }

    /// Returns random criteria. The source and four bits of the tag are each compared or ignored:
    /// 32 combinations.
    fn wanted(&mut self) -> Wanted {
        let source = (self.below(2) == 0).then(|| self.below(2) as u32);
        let ignore = self.below(2) << 40 | self.below(4) | self.below(2) << 43;
        Wanted { source, tag: self.tag(), ignore: if self.below(2) == 0 { 0 } else { ignore } }
    }
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn random_operations_pair_as_in_ucx() {
    const NAME: &str = "random_operations_pair_as_in_ucx";
    let seed = setting("FISHPLATE_SEED").unwrap_or_else(|| {
        std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64)
    });
    let count = setting("FISHPLATE_TAG_OPS").unwrap_or(100_000).min(2_000_000);
    let mut ucx = match Ucx::new(count as usize) {
        Ok(ucx) => ucx,
        Err(why) => {
            println!("SKIPPED {NAME}: {why}");
            return;
        }
    };
    println!("{NAME}: FISHPLATE_SEED={seed}");
    let mut random = Random(seed);
    let mut ours = Ours::new(1 << 16, count as usize);
    let mut list = List::new(1 << 16, count as usize);
    for number in 0..count as u32 {
        let at = || format!("operation {number}, seed {seed}");
        let posts = if (number >> 11).is_multiple_of(2) { 60 } else { 40 };
        match random.below(100) {
            0..8 if number > 0 => {
                let context = number.saturating_sub(1 + random.below(400) as u32);
                let there = ucx.cancel(context);
                assert_eq!(
                    (ours.cancel(context), list.cancel(context)),
                    (there, there),
                    "cancel; {}",
                    at()
                );
            }
            8..12 => {
                let wanted = random.wanted();
                let there = ucx.probe(wanted);
                assert_eq!(
                    (ours.probe(wanted), list.probe(wanted)),
                    (there, there),
                    "{wanted:?}; {}",
                    at()
                );
            }
            12..16 => {
                let wanted = random.wanted();
                let there = ucx.claim(wanted, number);
                let others = (ours.claim(wanted, number), list.claim(wanted, number));
                assert_eq!(others, (there, there), "{wanted:?}; {}", at());
            }
            _ if random.below(100) < posts => {
                let wanted = random.wanted();
                ucx.post(wanted, number);
                ours.post(wanted, number);
                list.post(wanted, number);
            }
            _ => {
                let (source, tag) = (random.below(2) as u32, random.tag());
                ucx.arrive(source, tag, number);
                ours.arrive(source, tag, number);
                list.arrive(source, tag, number);
            }
        }
        let right = ucx.pairs();
        assert_eq!((ours.pairs(), list.pairs()), (right, right), "{}", at());
    }
    assert!(ucx.pairs().count > count / 4, "{:?}", ucx.pairs());
}
