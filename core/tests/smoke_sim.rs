//! Smoke.
mod support;
use fishplate_core::engine::*;
use fishplate_core::op::*;
use fishplate_core::mem::*;
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::faulty::*;
use fishplate_core::rail::sim::*;
use support::*;

#[test]
fn put_signal_to_oneself() {
    for seed in 1..2000u64 {
    let rails: [_; 4] = std::array::from_fn(|i| Faulty::<_, 32>::new(Loopback::<64>::new(), Faults::DISORDER, seed * 4 + i as u64));
    let config = Config { stripe_threshold: 64, stripe_chunk: 24, first_sequence: (1<<20) - 20, window: 16, ..Config::default() };
    let mut own = own(config, rails, 4096);
    let mut rng = Random(seed);
    let mut hist = vec![];
    for i in 0..40u64 {
        let len = rng.below(300) as usize;
        let off = rng.below(256);
        let fill = vec![(i + 1) as u8; len];
        let src = i * 8 % 64;
        let _ = src;
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap_or_else(|e| panic!("{seed} {e:?}"));
        write(&own.engine, own.source.at(0), &fill);
        let signal = Signal { at: own.remote.at(2048), op: SignalOp::Set, value: i + 1 };
        own.engine.put_signal(CX, own.source.at(0), len, own.remote.at(off), signal, Notice::Silent).unwrap();
        own.engine.wait_signal(own.target.at(2048), Cmp::Eq, i + 1, None, &mut own.waiter, SOON).unwrap_or_else(|e| panic!("{seed} {e:?} {:?}", own.engine.stats()));
        assert_eq!(read(&own.engine, own.target.at(off), len), fill, "seed {seed}");
        hist.push(len);
    }
    if seed == 1 { eprintln!("{:?}", own.engine.stats()); }
    }
}

#[test]
fn sim_two() {
    let t = std::time::Instant::now();
    for seed in 1..1000u64 {
        let packets = Box::leak(vec![Packet::EMPTY; 128].into_boxed_slice());
        let sim = Sim::new(packets, 2, 4, Dials::WILD, seed).unwrap();
        let config = Config { window: 32, ..Config::default() };
        let mut e: Vec<_> = (0..2u16).map(|n| engine(config, std::array::from_fn::<_, 4, _>(|r| { let mut ep = sim.endpoint(n, r as u16); ep.attach(Peer(0), 1 - n).unwrap(); ep }))).collect();
        let ids: Vec<_> = e.iter_mut().map(|e| { let p = e.reserve_peer().unwrap(); e.connect_peer(p, 15).unwrap(); p }).collect();
        let mut b = e.pop().unwrap(); let mut a = e.pop().unwrap();
        let src = a.register(region(8192)).unwrap();
        let dst = b.register(region(8192)).unwrap();
        let mut h = [0; 512]; let n = b.export(dst, &mut h).unwrap();
        let rem = a.import(ids[0], &h[..n]).unwrap();
        let mut sent = 0u64; let mut seen = 0u64; let mut turns = 0;
        while seen < 50 {
            if sent < 50 {
                let s = Signal { at: rem.at(8000), op: SignalOp::Set, value: sent + 1 };
                write(&a, src.at(sent * 100), &[sent as u8 + 1; 100]);
                if a.put_signal(CX, src.at(sent * 100), 100, rem.at(sent * 100), s, Notice::Silent).is_ok() { sent += 1; }
            }
            a.progress(); b.progress();
            let now = word(&b, dst.at(8000));
            assert!(now >= seen);
            while seen < now { assert_eq!(read(&b, dst.at(seen * 100), 100), [seen as u8 + 1; 100], "seed {seed}"); seen += 1; }
            turns += 1; assert!(turns < 1000000);
        }
        if seed == 1 { eprintln!("{:?}\n{:?} {turns}", a.stats(), b.stats()); }
    }
    eprintln!("{:?}", t.elapsed());
}
