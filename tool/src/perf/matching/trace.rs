//! The traces T1 to T6 are sequences of receives and messages as in real programs. They are
//! generated from a fixed seed, so every engine gets the same trace. Every receive gets its message
//! within the trace, so a trace can be repeated.

use super::engine::{Engine, Wanted};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trace {
    /// Halo exchange with 6, 18 or 26 neighbours in two alternating phases. Messages of the next
    /// phase may arrive early.
    T1,
    /// All to all: one receive per peer, and arrivals in random order.
    T2,
    /// A master that receives from any of its workers.
    T3,
    /// Many to one: all messages arrive first. Then receives are posted by rank.
    T4,
    /// Threads that share a rank. Each thread posts the receives of its stencil. All receives are
    /// posted in random order, and their messages arrive in random order.
    T5,
    /// A runtime with receives that accept any message.
    T6,
}

use Trace::*;

/// A step has 32 bytes.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    Post(Wanted, u32),
    Arrive(u32, u64, u32),
}

/// The communicator of all traces, in the upper bits of the tag.
const WORLD: u64 = 3 << 32;
const ANY_TAG: u64 = (1 << 32) - 1;

struct Random(u64);

impl Random {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        ((self.0 >> 33) % n as u64) as u32
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at as u32 + 1) as usize);
        }
    }
}

impl Trace {
    pub const ALL: [Trace; 6] = [T1, T2, T3, T4, T5, T6];

    /// A depth counts neighbours, peers, workers, senders, threads or posted receives.
    pub fn depths(self) -> &'static [u32] {
        match self {
            T1 => &[6, 18, 26],
            T2 => &[1024],
            T3 => &[16, 256, 4096],
            T4 => &[64, 1024],
            T5 => &[8, 64],
            T6 => &[16, 256],
        }
    }

    pub fn steps(self, depth: u32) -> Vec<Step> {
        let mut random = Random(0x5eed ^ depth as u64);
        let mut steps = vec![];
        let mut contexts = 0..;
        let mut post = |wanted| Step::Post(wanted, contexts.next().unwrap_or(0));
        let exact = |source: u32, tag: u64| Wanted::exact(source, WORLD | tag);
        match self {
            T1 => {
                // In each phase, a quarter of the messages arrive before their receives.
                for phase in 0..8 {
                    let mut sources: Vec<u32> = (0..depth).collect();
                    random.shuffle(&mut sources);
                    let (early, late) = sources.split_at(depth as usize / 4);
                    steps.extend(early.iter().map(|s| Step::Arrive(*s, WORLD | phase, *s)));
                    steps.extend((0..depth).map(|s| post(exact(s, phase))));
                    steps.extend(late.iter().map(|s| Step::Arrive(*s, WORLD | phase, *s)));
                }
            }
            T2 => {
                let mut sources: Vec<u32> = (0..depth).collect();
                steps.extend(sources.iter().map(|s| post(exact(*s, 9))));
                random.shuffle(&mut sources);
                steps.extend(sources.iter().map(|s| Step::Arrive(*s, WORLD | 9, *s)));
            }
            T3 => {
                // Requests pile up while the master answers them one at a time.
                let mut waiting = 0u32;
                for n in 0..4 * depth {
                    steps.push(Step::Arrive(random.below(depth), WORLD | 5, n));
                    waiting += 1;
                    while waiting > 0 && random.below(depth.min(64)) >= waiting.min(32) / 2 {
                        steps.push(post(Wanted::any_source(WORLD | 5)));
                        waiting -= 1;
                    }
                }
                steps.extend((0..waiting).map(|_| post(Wanted::any_source(WORLD | 5))));
            }
            T4 => {
                let mut messages: Vec<(u32, u64)> =
                    (0..depth).flat_map(|s| (0..8).map(move |n| (s, n))).collect();
                // The order among senders is random, but the messages of each sender stay in order.
                random.shuffle(&mut messages);
                let mut sent = vec![0; depth as usize];
                for (source, _) in messages {
                    let n = &mut sent[source as usize];
                    steps.push(Step::Arrive(source, WORLD | *n, source * 8 + *n as u32));
                    *n += 1;
                }
                steps.extend(
                    (0..depth)
                        .flat_map(|s| (0..8).map(move |n| (s, n)))
                        .map(|(s, n)| post(exact(s, n))),
                );
            }
            T5 => {
                let mut all: Vec<(u32, u64)> =
                    (0..depth).flat_map(|t| (0..26).map(move |s| (s, t as u64))).collect();
                random.shuffle(&mut all);
                steps.extend(all.iter().map(|(s, t)| post(exact(*s, *t))));
                random.shuffle(&mut all);
                steps.extend(
                    all.iter().map(|(s, t)| Step::Arrive(*s, WORLD | *t, *t as u32 * 26 + *s)),
                );
            }
            T6 => {
                let anything = Wanted { source: None, tag: WORLD, ignore: ANY_TAG };
                steps.extend((0..depth).map(|_| post(anything)));
                for n in 0..16 * depth {
                    steps.push(Step::Arrive(
                        random.below(64),
                        WORLD | random.below(1000) as u64,
                        n,
                    ));
                    if n < 15 * depth {
                        steps.push(post(anything));
                    }
                }
            }
        }
        steps
    }
}

/// Runs the steps in an engine. Calls `tick` after each step.
#[inline(always)]
pub fn replay(steps: &[Step], engine: &mut impl Engine, mut tick: impl FnMut()) {
    for step in steps {
        match *step {
            Step::Post(wanted, context) => engine.post(wanted, context),
            Step::Arrive(source, tag, cookie) => engine.arrive(source, tag, cookie),
        }
        tick();
    }
}
