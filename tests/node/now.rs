//! Tests `put_now` and `get_now`, which copy a list of ranges before they return.

use std::ptr::NonNull;

use fishplate::core::engine::NOW_MAX;
use fishplate::core::error::OpError;
use fishplate::node::Slice;
use fishplate::{Cmp, Notice, Signal};

use super::{SOON, Side, Way, two, ways};

const LEN: usize = 1 << 20;

#[test]
fn a_list_has_moved_when_the_call_returns_or_is_left_alone() {
    for way in ways() {
        for private in [true, false] {
            two(way, |builder| builder, |side| program(way, private, side));
        }
    }
}

fn program(way: Way, private: bool, mut side: Side) {
    let mut own = vec![side.rank as u64 + 1; LEN / 8];
    let memory = match private {
        // SAFETY: the memory outlives the node, and nothing else accesses it meanwhile.
        true => unsafe { side.node.register(NonNull::from(&mut own[..]).cast(), LEN) },
        false => side.node.alloc(LEN),
    };
    let (memory, word) = (memory.unwrap(), side.node.alloc(8).unwrap());
    let handle = side.node.handle(memory).unwrap();
    let handle = side.exchange(&handle);
    let flag = side.node.handle(word).unwrap();
    let flag = side.exchange(&flag);
    let Side { node, peer, rank, .. } = &mut side;
    let (there, flag) = (node.import(*peer, handle).unwrap(), node.import(*peer, flag).unwrap());
    // Puts every second piece of 100 bytes to the second half of the peer's memory.
    let source = node.alloc(LEN).unwrap();
    let bytes: Vec<u8> = (0..LEN).map(|at| (at * 7 + at / 255 + *rank) as u8).collect();
    node.write(source.at(0), &bytes).unwrap();
    let piece = |n: u64| (Slice::new(source.at(n * 200), 100), there.at(LEN as u64 / 2 + n * 100));
    let list: Vec<_> = (0..200).map(piece).collect();
    let mut done = 0;
    while done < list.len() {
        let moved = node.put_now(&list[done..]).unwrap();
        assert_eq!(moved, if way == Way::SharedMemory { (200 - done).min(NOW_MAX) } else { 0 });
        if moved == 0 {
            node.put(list[done].0, list[done].1, Notice::Silent).unwrap();
        }
        done += moved.max(1);
    }
    // A later signal arrives after the data of the list.
    node.signal(Signal::add(flag.at(0), 1), Notice::Silent).unwrap();
    node.wait(word.at(0), Cmp::Ge, 1, Some(*peer), SOON).unwrap();
    let mut got = vec![0; LEN];
    node.read(memory.at(0), &mut got).unwrap();
    for n in 0..200 {
        let want: Vec<u8> =
            (n * 200..n * 200 + 100).map(|at| (at * 7 + at / 255 + 1 - *rank) as u8).collect();
        assert_eq!(got[LEN / 2 + n * 100..][..100], want, "{way:?}, piece {n}");
    }

    // Gets the written data back.
    let to = |(n, (_, to)): (usize, &(Slice, _))| (source.slice(n * 100..n * 100 + 100), *to);
    let back: Vec<_> = list.iter().enumerate().map(to).collect();
    if way == Way::SharedMemory {
        assert_eq!(node.get_now(&back), Ok(NOW_MAX));
        node.read(source.at(0), &mut got[..6400]).unwrap();
        for n in 0..NOW_MAX {
            assert_eq!(got[n * 100..][..100], bytes[n * 200..][..100], "piece {n}, read");
        }
    }
    // An invalid range is refused if it comes first. Otherwise the call moves the ranges before the
    // invalid one.
    let size = LEN as u64;
    let wrong = (source.slice(..100), there.at(size - 99));
    assert_eq!(
        node.put_now(&[wrong]),
        Err(OpError::OutOfBounds { offset: size - 99, len: 100, size })
    );
    if way == Way::SharedMemory {
        assert_eq!(node.put_now(&[piece(0), wrong, piece(1)]), Ok(1));
    }
    assert_eq!(node.put_now(&[]), Ok(0));
    side.exchange(b"end");
    side.node.close(SOON).unwrap();
}
