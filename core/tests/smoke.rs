//! Smoke.

mod support;
use fishplate_core::engine::*;
use fishplate_core::op::*;
use fishplate_core::rail::loopback::Loopback;
use support::*;

#[test]
fn put_signal_to_oneself() {
    let mut own = own(Config::default(), [Loopback::<64>::new()], 4096);
    write(&own.engine, own.source.at(0), b"hello, fishplate");
    let signal = Signal { at: own.remote.at(1024), op: SignalOp::Add, value: 7 };
    let issued = own.engine.put_signal(CX, own.source.at(0), 16, own.remote.at(64), signal, Notice::Report(5)).unwrap();
    let Issued::Pending(token) = issued else { panic!() };
    let got = own.engine.wait_signal(own.target.at(1024), Cmp::Ge, 7, None, &mut own.waiter, SOON).unwrap();
    assert_eq!(got, 7);
    assert_eq!(read(&own.engine, own.target.at(64), 16), b"hello, fishplate");
    let done = own.engine.wait(token, &mut own.waiter, SOON).unwrap();
    assert_eq!((done.tag, done.outcome), (5, Outcome::Done));
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    for i in 0..1000u64 {
        let amo = Amo { op: AmoOp::Add, width: 8, operand: 3, compare: 0 };
        let Issued::Pending(t) = own.engine.fetch(CX, own.remote.at(2048), amo, i).unwrap() else { panic!() };
        let c = own.engine.wait(t, &mut own.waiter, SOON).unwrap();
        assert_eq!((c.value, c.tag), (3 * i, i));
    }
    eprintln!("{:?}", own.engine.stats());
}
