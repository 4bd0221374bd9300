//! Posts that every rail refuses for good fail only their operation. Its outcome is true, and its
//! slot and numbers are free again.

use fishplate_core::engine::{Config, Issued, Notice};
use fishplate_core::error::{OpError, PostError, WaitError};
use fishplate_core::mem::RailId;
use fishplate_core::op::{Fault, Outcome};
use fishplate_core::rail::Caps;
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;

use super::failure::INC;
use super::order::add;
use super::support::tap::{Tap, Verb, shared, tap};
use super::support::*;

type Network = Loopback<64>;

#[test]
fn a_write_whose_last_pieces_are_refused_completes() {
    let control = shared();
    control.borrow_mut().caps = Some(|caps| Caps { max_rma: 8, ..caps });
    let mut own = own(Config { window: 1, ..Config::DEFAULT }, tap(Network::new(), &control), 4096);
    let issued = own.engine.put(CX, own.source.at(0), 16, own.remote.at(64), Notice::Report(3));
    let token = pending(issued);
    control.borrow_mut().refuse =
        Some(Box::new(|post| (post.verb == Verb::Write).then_some(PostError::BadKey)));
    let done = own.engine.wait(token, &mut own.waiter, 100_000).unwrap();
    assert_eq!(done.outcome, Outcome::Failed(Fault::Post(RailId(0), PostError::BadKey)));
    assert_eq!(own.engine.is_quiet(CX, own.peer), Ok(true));
}

/// Permanent refusals of whole and split operations of every kind fail only those operations. Each
/// completes once with a correct outcome, and no slot leaks.
#[test]
fn permanently_refused_operations_complete_once_with_a_true_outcome() {
    const OPS: u64 = 200;
    const LIMIT: u64 = 300_000;
    for seed in seeds(60) {
        let control = shared();
        let mut random = Random(seed ^ 0xbad);
        let rails: [_; 2] = std::array::from_fn(|i| {
            let disordered =
                Faulty::<_, 32>::new(Network::new(), Faults::DISORDER, seed * 2 + i as u64);
            Tap::new(disordered, i, &control)
        });
        let config = Config {
            window: 16,
            eager: [0, 64][seed as usize % 2],
            stripe_threshold: 256,
            stripe_chunk: 100,
            ..Config::DEFAULT
        };
        let mut own = own(config, rails, 1 << 16);
        control.borrow_mut().refuse = Some(Box::new(move |post| {
            let needed = post.verb == Verb::Message && matches!(post.bytes[0], 4 | 5);
            let error =
                [PostError::BadKey, PostError::Provider(-9), PostError::Unsupported][post.len % 3];
            (!needed && random.below(6) == 0).then_some(error)
        }));
        let mut random = Random(seed);
        let (mut open, mut words) = (vec![false; OPS as usize], [0u64; 2]);
        let take = |own: &mut Own<_, 2>, open: &mut Vec<bool>, words: &mut [u64; 2]| {
            while let Some(end) = own.engine.next_completion() {
                let (n, kind) = ((end.tag >> 8) as usize, end.tag & 0xff);
                assert!(std::mem::take(&mut open[n]), "seed {seed}: {n} twice");
                let done = u64::from(end.outcome == Outcome::Done);
                match kind {
                    1 | 2 => words[0] += done,
                    3 => words[1] += done,
                    _ => {}
                }
            }
        };
        for n in 0..OPS {
            let kind = random.below(5);
            let silent = random.below(3) == 0;
            let notice = if silent { Notice::Silent } else { Notice::Report(n << 8 | kind) };
            let len = [8, 64, 200, 300, 1000][random.below(5) as usize];
            let (from, to) = (own.source.at(0), own.remote.at(4096));
            // Reported and silent operations use separate words.
            let at = if silent { 16 } else { 0 };
            if random.below(5) == 0 {
                own.engine.fence(CX, own.peer).unwrap();
            }
            let issued = match kind {
                0 => own.engine.put(CX, from, len, to, notice),
                1 => own.engine.put_signal(CX, from, len, to, add(own.remote, at, 1), notice),
                2 => own.engine.signal(CX, add(own.remote, at, 1), notice),
                3 if silent => own.engine.amo(CX, own.remote.at(at + 8), INC, notice),
                3 => own.engine.fetch(CX, own.remote.at(at + 8), INC, n << 8 | kind),
                _ => own.engine.get(CX, from, len, to, notice),
            };
            match issued {
                Ok(issued) => {
                    assert!(matches!(issued, Issued::Pending(_)));
                    open[n as usize] = !silent;
                }
                Err(error) => assert_eq!(error, OpError::Again, "seed {seed}"),
            }
            match own.engine.inject(CX, &[7; 8], own.remote.at(2048)) {
                Ok(()) | Err(OpError::Again | OpError::Rail(..)) => {}
                Err(error) => panic!("seed {seed}: {error:?}"),
            }
            passes(&mut own.engine, random.below(3) as u32);
            take(&mut own, &mut open, &mut words);
            if random.below(40) == 0 {
                match own.engine.quiet(CX, own.peer, &mut own.waiter, LIMIT) {
                    Ok(()) | Err(WaitError::Failed(_)) => {}
                    Err(error) => panic!("seed {seed}: {error:?}"),
                }
            }
        }
        let end = own.engine.quiet(CX, own.peer, &mut own.waiter, LIMIT);
        assert!(matches!(end, Ok(()) | Err(WaitError::Failed(_))), "seed {seed}: {end:?}");
        take(&mut own, &mut open, &mut words);
        assert!(open.iter().all(|open| !open), "seed {seed}: {open:?}");
        assert_eq!(own.engine.peer_error(own.peer), Ok(None), "seed {seed}");
        // A successful operation was executed once. A failed operation was not started, because no
        // message was lost.
        for (at, total) in [(0, words[0]), (8, words[1])] {
            assert_eq!(word(&own.engine, own.target.at(at)), total, "seed {seed}");
        }
        control.borrow_mut().refuse = None;
        own.engine.quiet(CX, own.peer, &mut own.waiter, LIMIT).unwrap();
        let mut slots = 0;
        while own
            .engine
            .get(CX, own.source.at(0), 8, own.remote.at(0), Notice::Report(slots))
            .is_ok()
        {
            slots += 1;
        }
        assert_eq!(slots, 256, "seed {seed}");
    }
}
