//! Tagged messages to and from memory that the processor cannot access. An access by the processor
//! would fault, because [`veil`] hides the memory.

use fishplate_core::engine::protocol::{Payload, Received};
use fishplate_core::engine::{Config, Notice};
use fishplate_core::error::{OpError, PeerError};
use fishplate_core::mem::{LocalId, RailId, Region};
use fishplate_core::rail::Rail;
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;

use super::rig::*;
use super::support::veil::{Veiled, device_region, peek, poke};
use super::support::*;

struct Rig<R: Rail, const RAILS: usize> {
    own: Own1<R, RAILS>,
    out: Region,
    into: Region,
    source: LocalId,
    target: LocalId,
}

fn rig<R: Rail, const RAILS: usize>(config: Config, rails: [R; RAILS]) -> Rig<R, RAILS> {
    let mut own = own1(config, SMALL, rails);
    let (out, into) = (device_region(SIZE), device_region(SIZE));
    let source = own.engine.register(out).unwrap();
    let target = own.engine.register(into).unwrap();
    Rig { own, out, into, source, target }
}

fn plain() -> Rig<Veiled<Loopback<64>>, 1> {
    rig(Config::DEFAULT, [Veiled::new(Loopback::mapped())])
}

impl<R: Rail, const RAILS: usize> Rig<R, RAILS> {
    /// Sends `bytes` from device or host memory, and receives them into device or host memory.
    #[expect(clippy::too_many_arguments, reason = "one message in every way")]
    fn exchange(
        &mut self,
        n: u64,
        bytes: &[u8],
        room: usize,
        from: bool,
        to: bool,
        first: bool,
        what: &str,
    ) {
        let own = &mut self.own;
        let into = if to { self.target } else { own.into };
        poke(&self.into, 0, &vec![0xa5; bytes.len() + 64]);
        let recv = |own: &mut Own1<R, RAILS>| {
            own.engine.recv(Some(own.me), tag(n), EXACT, Some((into.at(16), room)), n).unwrap()
        };
        let early = first.then(|| recv(own));
        let at = match from {
            true => {
                poke(&self.out, 24, bytes);
                self.source.at(24)
            }
            false => {
                write(&own.engine, own.out.at(24), bytes);
                own.out.at(24)
            }
        };
        let payload = Payload::Region(at, bytes.len());
        let issued = own.engine.send(CX, own.me, tag(n), payload, Notice::Report(n)).unwrap();
        passes(&mut own.engine, 5);
        let request = early.unwrap_or_else(|| recv(own));
        let status = own.finish(request);
        let want = bytes.len().min(room);
        let outcome = if want < bytes.len() { Received::Truncated } else { Received::Ok };
        check(&status, outcome, n, bytes.len() as u64, want as u64);
        let got = match to {
            true => {
                let got = peek(&self.into, 0, want + 48);
                let outside = got[..16].iter().chain(&got[16 + want..]);
                assert!(outside.into_iter().all(|&b| b == 0xa5), "{what}: wrote outside");
                got[16..16 + want].to_vec()
            }
            false => own.bytes(16, want),
        };
        assert!(got == bytes[..want], "{what}");
        done(&mut own.engine, issued, what);
    }
}

fn every_way<R: Rail, const RAILS: usize>(mut rig: Rig<R, RAILS>, what: &str) {
    let mut n = 0;
    for len in [0, 1, 64, 128, 129, 5000] {
        for (from, to) in [(true, true), (true, false), (false, true)] {
            for (room, first) in [(len, true), (len, false), (len / 2, true), (len / 2, false)] {
                n += 1;
                let what = format!(
                    "{what}: {len} into {room}, device {from} to device {to}, first {first}"
                );
                rig.exchange(n, &pattern(n, len), room, from, to, first, &what);
            }
        }
    }
    assert_eq!(rig.own.engine.peer_error(rig.own.me), Ok(None));
}

#[test]
fn every_length_to_and_from_a_device() {
    every_way(plain(), "loopback");
    every_way(rig(Config::DEFAULT, [Veiled::new(Loopback::<64>::new())]), "loopback, unmapped");
}

#[test]
fn every_length_to_and_from_a_device_over_faulty_rails() {
    for seed in seeds(3) {
        let rail = |n| {
            Veiled::new(Faulty::<_, 16>::new(Loopback::<32>::new(), Faults::DISORDER, seed + n))
        };
        every_way(
            rig(Config { window: 16, ..Config::DEFAULT }, [rail(0), rail(1000)]),
            &format!("seed {seed}"),
        );
        let rail = |n| {
            Faulty::<_, 16>::new(Veiled::new(Loopback::<32>::new()), Faults::DISORDER, seed + n)
        };
        every_way(
            rig(Config { window: 16, ..Config::DEFAULT }, [rail(0), rail(1000)]),
            &format!("seed {seed}, faults outside"),
        );
    }
}

#[test]
fn the_rail_writes_an_eager_payload_to_the_device_once_it_has_room() {
    let mut rig = plain();
    let own = &mut rig.own;
    let request = own.engine.recv(None, tag(1), EXACT, Some((rig.target.at(0), 64)), 1).unwrap();
    own.engine.rail_mut(RailId(0)).unwrap().full = 10;
    own.send(1, &pattern(3, 50)).unwrap();
    passes(&mut own.engine, 5);
    assert_eq!(own.engine.test_recv(request), Ok(None), "there is no room yet");
    assert_eq!(peek(&rig.into, 0, 50), [0; 50]);
    let status = own.finish(request);
    check(&status, Received::Ok, 1, 50, 50);
    assert_eq!(peek(&rig.into, 0, 50), pattern(3, 50));
    assert_eq!(own.engine.rail_mut(RailId(0)).unwrap().placed, 1);
}

#[test]
fn credits_return_after_device_writes_and_the_rest_is_pulled() {
    let mut rig = plain();
    let own = &mut rig.own;
    // Sends more messages than credits. The other payloads stay at the sender, where no rail can
    // read them. One block is reserved for receiving such payloads, so that the receives always
    // complete.
    let count = SMALL.credits as u64 + 3;
    for round in 0..5u64 {
        for n in 0..count {
            own.send(n, &pattern(n + round, 100)).unwrap();
        }
        assert_eq!(own.send(count, &[1; 100]), Err(OpError::Again));
        passes(&mut own.engine, 10);
        for n in 0..count {
            let request = own
                .engine
                .recv(None, tag(n), EXACT, Some((rig.target.at(n * 128), 128)), n)
                .unwrap();
            let status = own.finish(request);
            check(&status, Received::Ok, n, 100, 100);
            assert_eq!(
                peek(&rig.into, n as usize * 128, 100),
                pattern(n + round, 100),
                "round {round}"
            );
        }
        passes(&mut own.engine, 20);
    }
    assert!(own.engine.matching_stats().pulled > 0, "nothing was pulled");
}

#[test]
fn a_device_s_payload_that_cannot_be_read_is_sent_in_chunks() {
    let mut rig = plain();
    rig.own.engine.rail_mut(RailId(0)).unwrap().unreadable = true;
    rig.exchange(1, &pattern(1, 9000), 9000, true, false, true, "pulled from a device");
    assert!(rig.own.engine.rail_mut(RailId(0)).unwrap().fetched >= 5);
}

#[test]
fn a_receive_into_a_device_fails_with_its_peer_and_frees_its_block() {
    let mut rig = plain();
    let own = &mut rig.own;
    let open =
        own.engine.recv(Some(own.me), tag(1), EXACT, Some((rig.target.at(0), 64)), 1).unwrap();
    let placing = own.engine.recv(None, tag(2), EXACT, Some((rig.target.at(64), 64)), 2).unwrap();
    own.engine.rail_mut(RailId(0)).unwrap().full = u32::MAX;
    own.send(2, &pattern(0, 64)).unwrap();
    passes(&mut own.engine, 5);
    let me = own.me;
    own.engine.remove_peer(me).unwrap();
    for request in [open, placing] {
        let status = own.engine.test_recv(request).unwrap().expect("ended");
        assert!(
            matches!(
                status.outcome,
                Received::Failed(fishplate_core::op::Fault::Peer(PeerError::Removed))
            ),
            "{status:?}"
        );
    }
    assert_eq!(peek(&rig.into, 0, 128), [0; 128]);
    passes(&mut own.engine, 5);
}
