//! Forged pieces of device memory, gets and answers: each is refused with an error that names the
//! violation, or is answered without data. None writes outside its turn.

use fishplate_core::engine::{Config, Issued, Notice};
use fishplate_core::error::{PeerError, PostError, Violation};
use fishplate_core::op::{Outcome, Token};
use fishplate_core::rail::loopback::Loopback;

use super::forge::forged;
use super::rig::*;
use super::support::tap::{Event, shared, tap};
use super::support::veil::{Veiled, device_region, peek, poke};
use super::support::*;

/// A get that names no registered memory reads nothing.
#[test]
fn a_get_of_unknown_memory_is_answered_without_data() {
    let control = shared();
    let mut rail = Veiled::new(Loopback::<64>::new());
    rail.apart = true;
    let mut own = own1(Config::DEFAULT, CARRYING, tap(rail, &control));
    let mut handle = [0; 512];
    own.engine.export(own.into, &mut handle).unwrap();
    let generation = u16::from_le_bytes([handle[6], handle[7]]);
    // Drops the answers, because the engine itself never sent these gets.
    control.borrow_mut().edit = Some(Box::new(|_, event| match event {
        Event::Message(..) => vec![],
        _ => vec![event],
    }));
    for (number, (region, generation)) in
        [(7, generation), (u16::MAX, 0), (1, generation + 1)].into_iter().enumerate()
    {
        let place = [region, generation].map(u16::to_le_bytes).concat();
        let words = [0, 9, 1 << 40, 0, 8].map(u64::to_le_bytes).concat();
        let get = forged(13, 0, number as u32, &[&place, &words]);
        control.borrow_mut().inject.push_back(Event::Message(own.me.peer(), get));
        passes(&mut own.engine, 10);
        let posts = &control.borrow().posts;
        let answers: Vec<_> = posts.iter().filter(|post| post.bytes[0] == 14).collect();
        assert_eq!(answers.len(), number + 1, "region {region}");
        let answer = &answers[number].bytes;
        assert_eq!((answer.len(), answer[2], answer[16]), (32, 1, 9), "region {region}");
        assert_eq!(own.engine.peer_error(own.me), Ok(None), "region {region}");
    }
}

#[test]
fn every_lie_about_pieces_is_named_and_writes_nothing() {
    let word = |value: u64| value.to_le_bytes();
    let data = |seq, place: [u16; 2], offset, len: usize| {
        let place = place.map(u16::to_le_bytes).concat();
        forged(6, 0, seq, &[&place, &word(offset), &vec![0xee; len]])
    };
    let get = |seq, place: [u16; 2], offset, token, len, piece: u32| {
        let place = place.map(u16::to_le_bytes).concat();
        let last = [piece.to_le_bytes(), [0; 4]].concat();
        forged(13, 0, seq, &[&place, &word(offset), &word(token), &word(len), &word(0), &last])
    };
    let got = |token, into, len: usize| {
        forged(14, 0, 0, &[&[0; 4], &word(token), &word(into), &vec![0xee; len]])
    };
    let size = SIZE as u64;
    for case in 0.. {
        let control = shared();
        let mut rail = Veiled::new(Loopback::<64>::new());
        (rail.apart, rail.delay) = (true, 1000);
        let config = Config { window: 8, ..Config::DEFAULT };
        let mut own = own1(config, CARRYING, tap(rail, &control));
        let (device, into) = (device_region(SIZE), device_region(SIZE));
        let [device_id, into_id] =
            [device, into].map(|region| own.engine.register(region).unwrap());
        let mut handle = [0; 512];
        let len = own.engine.export(device_id, &mut handle).unwrap();
        let theirs = own.engine.import(own.me, &handle[..len]).unwrap();
        let place = [4, 6].map(|at| u16::from_le_bytes([handle[at], handle[at + 1]]));
        let [region, generation] = place;
        // A get of four pieces is in flight (one piece in the last case). Its request has arrived,
        // and is not answered yet.
        let asked = if case == 15 { 100 } else { 500 };
        let issued =
            own.engine.get(CX, into_id.at(0), asked, theirs.at(0), Notice::Report(1)).unwrap();
        let Issued::Pending(token) = issued else { panic!("{issued:?}") };
        passes(&mut own.engine, 3);
        let token = token.to_raw();
        let cases: [(&str, Vec<Vec<u8>>, Violation); 16] = [
            ("data of an unknown region", vec![data(1, [7, generation], 0, 8)], Violation::Region),
            (
                "data of an old region",
                vec![data(1, [region, generation + 1], 0, 8)],
                Violation::Region,
            ),
            ("data beyond the region", vec![data(1, place, size - 7, 8)], Violation::Bounds),
            ("an offset that wraps", vec![data(1, place, u64::MAX - 3, 8)], Violation::Bounds),
            ("data longer than a block", vec![data(1, place, 0, 129)], Violation::Length),
            (
                "more pieces than granted",
                (1..5).map(|n| data(n, place, 0, 8)).collect(),
                Violation::Credit,
            ),
            ("a number beyond the window", vec![data(9, place, 0, 8)], Violation::Sequence),
            ("a get beyond the region", vec![get(1, place, 1, 9, size, 8)], Violation::Bounds),
            (
                "a get whose end wraps",
                vec![get(1, place, 8, 9, u64::MAX - 3, 8)],
                Violation::Bounds,
            ),
            (
                "a get of unknown memory whose end wraps",
                vec![get(1, [7, generation], u64::MAX, 9, 1, 8)],
                Violation::Bounds,
            ),
            ("a get without a token", vec![get(1, place, 0, 0, 8, 8)], Violation::Kind),
            ("a get in pieces of nothing", vec![get(1, place, 0, 9, 8, 0)], Violation::Kind),
            ("more than was asked for", vec![got(token, 300, 100)], Violation::Bounds),
            ("an answer longer than a block", vec![got(token, 0, 129)], Violation::Length),
            ("more answers than blocks", vec![got(token, 0, 8); 4], Violation::Credit),
            ("a second answer", vec![got(token, 0, 100); 2], Violation::Bounds),
        ];
        let Some((what, messages, want)) = cases.into_iter().nth(case) else { break };
        for bytes in messages {
            control.borrow_mut().inject.push_back(Event::Message(own.me.peer(), bytes));
            passes(&mut own.engine, 3);
        }
        let why = PeerError::Protocol(want);
        assert_eq!(own.engine.peer_error(own.me), Ok(Some(why)), "{what}");
        passes(&mut own.engine, 50);
        for region in [device, into] {
            assert!(peek(&region, 0, SIZE).iter().all(|&byte| byte == 0), "{what}: wrote");
        }
        let end = own.engine.test(Token::from_raw(token)).unwrap();
        assert!(end.is_some_and(|end| end.outcome != Outcome::Done), "{what}: {end:?}");
        own.engine.remove_peer(own.me).unwrap();
    }
}

#[test]
fn a_repeated_piece_is_not_copied_again() {
    let control = shared();
    let mut rail = Veiled::new(Loopback::<64>::new());
    (rail.apart, rail.delay) = (true, 2);
    let mut own = own1(Config { window: 8, ..Config::DEFAULT }, CARRYING, tap(rail, &control));
    let device = device_region(SIZE);
    let id = own.engine.register(device).unwrap();
    let mut handle = [0; 512];
    own.engine.export(id, &mut handle).unwrap();
    control.borrow_mut().refuse = Some(Box::new(|_| Some(PostError::Again)));
    let data = |seq, byte| forged(6, 0, seq, &[&handle[4..8], &64u64.to_le_bytes(), &[byte; 8]]);
    let hear = |own: &mut Own1<_, 1>, bytes| {
        control.borrow_mut().inject.push_back(Event::Message(own.me.peer(), bytes));
        passes(&mut own.engine, 8);
    };
    // Repeats a piece that waits for an earlier number, and again after the copy. If each
    // repetition took a block, no block would be left.
    (0..6).for_each(|_| hear(&mut own, data(1, 0xbb)));
    assert_eq!(peek(&device, 64, 8), [0; 8], "copied before its turn");
    hear(&mut own, data(0, 0xaa));
    assert_eq!(peek(&device, 64, 8), [0xbb; 8]);
    poke(&device, 64, &[0x11; 8]);
    hear(&mut own, data(1, 0xbb));
    assert_eq!(peek(&device, 64, 8), [0x11; 8], "copied again");
    assert_eq!((own.engine.peer_error(own.me), own.engine.stats().duplicates), (Ok(None), 6));
    // All blocks are free again.
    (2..20).for_each(|n| hear(&mut own, data(n % 32, n as u8)));
    assert_eq!((own.engine.peer_error(own.me), peek(&device, 64, 8)), (Ok(None), vec![19; 8]));
}
