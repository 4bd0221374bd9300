//! Operations on memory that the processor cannot access are always posted to a rail, in order with
//! all others. They are refused if the rail does not support them. An access by the processor would
//! fault, because [`veil`] hides the memory.

use fishplate_core::engine::{Config, Issued, Notice, Signal};
use fishplate_core::error::{AttachError, OpError};
use fishplate_core::mem::{LocalId, Region, RemoteId};
use fishplate_core::op::SignalOp;
use fishplate_core::rail::Rail;
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;

use super::support::veil::{Veiled, device_region, peek, poke};
use super::support::*;

const SIZE: usize = 4096;

/// An engine that is its own peer, with two device regions: `out` and `into`.
struct Rig<R: Rail, const RAILS: usize> {
    own: Own<R, RAILS>,
    out: Region,
    into: Region,
    source: LocalId,
    remote: RemoteId,
}

fn rig<R: Rail, const RAILS: usize>(
    config: Config,
    rails: [Veiled<R>; RAILS],
) -> Rig<Veiled<R>, RAILS> {
    let mut own = own(config, rails, SIZE);
    let (out, into) = (device_region(SIZE), device_region(SIZE));
    let source = own.engine.register(out).unwrap();
    let target = own.engine.register(into).unwrap();
    let remote = import(&mut own.engine, own.peer, target);
    Rig { own, out, into, source, remote }
}

fn mapped() -> [Veiled<Loopback<64>>; 1] {
    [Veiled::new(Loopback::mapped())]
}

#[test]
fn puts_gets_and_signals_move_device_memory_in_any_pairing() {
    fn run<R: Rail, const RAILS: usize>(rails: [Veiled<R>; RAILS], seed: u64) {
        let config = Config { stripe_threshold: 256, stripe_chunk: 64, ..Config::DEFAULT };
        let mut rig = rig(config, rails);
        let own = &mut rig.own;
        let mut random = Random(seed);
        for round in 1..60u64 {
            let len = random.below(700) as usize;
            let (from, to) = (random.below(300), 8 + random.below(300));
            let (here, there) = (random.below(2) == 0, random.below(2) == 0);
            let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
            let (source, remote) = (
                if here { rig.source } else { own.source },
                if there { rig.remote } else { own.remote },
            );
            match here {
                true => poke(&rig.out, from as usize, &bytes),
                false => write(&own.engine, own.source.at(from), &bytes),
            }
            let signal = Signal { at: own.remote.at(0), op: SignalOp::Set, value: round };
            let (source_at, remote_at) = (source.at(from), remote.at(to));
            let issued = own
                .engine
                .put_signal(CX, source_at, len, remote_at, signal, Notice::Silent)
                .unwrap();
            let what =
                format!("seed {seed} round {round}: {len} bytes, device {here} to device {there}");
            // Reads the word without a call of the engine, to detect a signal that overtakes its
            // data.
            for _ in 0..10_000 {
                if word(&own.engine, own.target.at(0)) == round {
                    break;
                }
                own.engine.progress();
            }
            assert_eq!(word(&own.engine, own.target.at(0)), round, "{what}");
            let got = match there {
                true => peek(&rig.into, to as usize, len),
                false => read(&own.engine, own.target.at(to), len),
            };
            assert!(got == bytes, "{what}");
            if (here || there) && len > 0 {
                assert!(matches!(issued, Issued::Pending(_)), "{what}");
            }
            // Copies the data back to another place.
            let back = SIZE as u64 / 2;
            let into = if here { rig.source } else { own.source };
            let issued = own
                .engine
                .get(CX, into.at(back), len, remote.at(to), Notice::Report(round))
                .unwrap();
            done(&mut own.engine, issued, &what);
            let got = match here {
                true => peek(&rig.out, back as usize, len),
                false => read(&own.engine, own.source.at(back), len),
            };
            assert!(got == bytes, "{what}, back");
            own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
        }
    }
    for seed in seeds(10) {
        run(mapped(), seed);
        run([Veiled::new(Loopback::<64>::new())], seed);
        let faulty = |n| {
            Veiled::new(Faulty::<_, 16>::new(Loopback::<64>::new(), Faults::DISORDER, seed + n))
        };
        run([faulty(0), faulty(1000)], seed);
    }
}

#[test]
fn a_silent_put_to_a_device_is_one_post_and_awaited_by_quiet() {
    let mut rig = rig(Config::DEFAULT, mapped());
    let own = &mut rig.own;
    write(&own.engine, own.source.at(0), b"to the device");
    let before = own.engine.stats().posted;
    let issued = own.engine.put(CX, own.source.at(0), 13, rig.remote.at(5), Notice::Silent);
    assert!(matches!(issued, Ok(Issued::Pending(_))));
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!(own.engine.stats().posted, before + 1);
    assert_eq!(peek(&rig.into, 5, 13), b"to the device");
}

#[test]
fn unsupported_device_operations_are_refused_and_change_nothing() {
    let mut rig = rig(Config::DEFAULT, mapped());
    let own = &mut rig.own;
    let before = own.engine.stats();
    let device = Err(OpError::DeviceMemory);
    assert_eq!(own.engine.inject(CX, &[1; 8], rig.remote.at(0)), device);
    assert_eq!(own.engine.local_ptr(rig.source.at(0), 1).map(drop), device);
    let outside = OpError::OutOfBounds { offset: SIZE as u64, len: 1, size: SIZE as u64 };
    let at = (rig.source.at(SIZE as u64), rig.remote.at(SIZE as u64));
    let put = own.engine.put(CX, at.0, 1, own.remote.at(0), Notice::Silent);
    assert_eq!(put.map(drop), Err(outside));
    assert_eq!(
        own.engine.put(CX, own.source.at(0), 1, at.1, Notice::Silent).map(drop),
        Err(outside)
    );
    assert_eq!(
        own.engine.get(CX, own.source.at(0), 1, at.1, Notice::Silent).map(drop),
        Err(outside)
    );
    let at = rig.source.at(0);
    let wait = own.engine.wait_signal(at, fishplate_core::op::Cmp::Eq, 0, None, &mut own.waiter, 1);
    assert_eq!(wait.map(drop), Err(OpError::DeviceMemory.into()));
    assert_eq!(own.engine.stats(), before);
    own.engine.release(rig.remote).unwrap();
    let put = own.engine.put(CX, own.source.at(0), 1, rig.remote.at(0), Notice::Silent);
    assert_eq!(put.map(drop), Err(OpError::UnknownRegion));
    own.engine.deregister(rig.source).unwrap();
    assert_eq!(own.engine.deregister(rig.source), Err(AttachError::UnknownRegion));
}
