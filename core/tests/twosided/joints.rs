//! Ends with different limits: a sender respects its receiver's limits for tagged messages.

use fishplate_core::engine::protocol::{MatchLimits, Payload, Received};
use fishplate_core::engine::{Config, Engine, Issued, Joint, Notice};
use fishplate_core::error::OpError;
use fishplate_core::mem::RailId;
use fishplate_core::rail::Rails;
use fishplate_core::rail::loopback::Loopback;

use super::rig::*;
use super::support::fleet;
use super::support::*;

#[test]
fn a_sender_respects_its_receiver_s_limits() {
    for before in [false, true] {
        let mut engine: Engine<'static, Loopback<64>, 1> =
            engine(Config::DEFAULT, [Loopback::new()]);
        let out = engine.register(region(SIZE)).unwrap();
        let into = engine.register(region(SIZE)).unwrap();
        if before {
            engine.attach_matching(SMALL, match_memory(SMALL, 4, 4)).unwrap();
        }
        let takes = MatchLimits { eager: 40, credits: 1, headers: 2 };
        let joint = Joint { ours: RailId(0), theirs: 0, max_message: 128 };
        let [small, short] = [Some(takes), None].map(|takes| {
            let peer = engine.reserve_peer().unwrap();
            engine.join_peer(peer, &[joint], takes).unwrap();
            peer
        });
        if !before {
            engine.attach_matching(SMALL, match_memory(SMALL, 4, 4)).unwrap();
        }
        assert_eq!((engine.eager_max(small), engine.eager_max(short)), (40, 128 - 40));
        let bytes = pattern(0, 200);
        write(&engine, out.at(0), &bytes);
        let long = engine.send(CX, small, tag(1), Payload::Bytes(&bytes[..41]), Notice::Silent);
        assert_eq!(long, Err(OpError::TooLong { len: 41, max: 40 }));
        // The receiver has a credit for one eager payload, and room for two more headers, whose
        // payloads stay with the sender.
        let sent = engine.send(CX, small, tag(1), Payload::Bytes(&bytes[..40]), Notice::Silent);
        assert_eq!(sent, Ok(Issued::Done { value: 40 }));
        for len in [40, 200] {
            let sent =
                engine.send(CX, small, tag(1), Payload::Region(out.at(0), len), Notice::Silent);
            assert!(matches!(sent, Ok(Issued::Pending(_))), "{sent:?}");
        }
        let more = engine.send(CX, small, tag(1), Payload::Region(out.at(0), 8), Notice::Silent);
        assert_eq!(more, Err(OpError::Again));
        let stats = engine.matching_stats();
        assert_eq!((stats.eager, stats.rendezvous, stats.credits_exhausted), (1, 2, 1));
        for (at, len) in [(0, 40), (1000, 40), (2000, 200)] {
            let into_at = into.at(at);
            let request = engine.recv(Some(small), tag(1), EXACT, Some((into_at, 300)), 0).unwrap();
            let mut status = None;
            pass_until(&mut engine, "receive", |engine| {
                status = engine.test_recv(request).unwrap();
                status.is_some()
            });
            let status = status.unwrap();
            check(&status, Received::Ok, 1, len as u64, len as u64);
            assert_eq!(read(&engine, into_at, len), bytes[..len]);
        }
        // With equal limits, the rail's maximum message length decides.
        let sent = engine.send(CX, short, tag(2), Payload::Bytes(&bytes[..88]), Notice::Silent);
        assert_eq!(sent, Ok(Issued::Done { value: 88 }));
        let long = engine.send(CX, short, tag(2), Payload::Bytes(&bytes[..89]), Notice::Silent);
        assert_eq!(long, Err(OpError::TooLong { len: 89, max: 88 }));
        pass_until(&mut engine, "quiet", |engine| engine.is_quiet(CX, short).unwrap());
    }
}

#[test]
fn long_payloads_are_read_between_different_ends() {
    let config = Config { stripe_threshold: 256, stripe_chunk: 100, ..Config::DEFAULT };
    for seed in seeds(40) {
        let mut fleet = fleet::mixed::<16>(3, config, SIZE, seed, |_| None);
        for node in &mut fleet {
            node.engine.attach_matching(SMALL, match_memory(SMALL, 3, 4)).unwrap();
            write(&node.engine, node.source.at(0), &pattern(seed, 2000));
        }
        for (from, to) in (0..9).map(|pair| (pair / 3, pair % 3)) {
            let payload = Payload::Region(fleet[from].source.at(0), 2000);
            let (peer, source) = (fleet[from].peers[to], fleet[to].peers[from]);
            fleet[from].engine.send(CX, peer, tag(1), payload, Notice::Silent).unwrap();
            let at = fleet[to].target.at(2000 * from as u64);
            let request =
                fleet[to].engine.recv(Some(source), tag(1), EXACT, Some((at, 2000)), 0).unwrap();
            fleet::turn_until(&mut fleet, "a long message", |fleet| {
                let status = fleet[to].engine.test_recv(request).unwrap();
                status.is_some_and(|status| status.outcome == Received::Ok)
            });
            assert_eq!(
                read(&fleet[to].engine, at, 2000),
                pattern(seed, 2000),
                "seed {seed}: {from} to {to}"
            );
        }
        let stats: Vec<_> = fleet.iter().map(|node| node.engine.matching_stats()).collect();
        assert!(
            stats.iter().all(|stats| stats.read == 3 && stats.pulled == 0),
            "seed {seed}: {stats:?}"
        );
    }
}

#[test]
fn a_payload_whose_keys_exceed_a_message_comes_in_chunks() {
    // A message of 256 bytes has room for the keys of eleven rails.
    for (count, pulled) in [(11, 0), (12, 1)] {
        let mut rails = Rails::<Loopback<8>, 16>::new();
        for _ in 0..count {
            assert!(rails.push(Loopback::new()).is_ok());
        }
        let mut engine =
            Engine::new(Config::DEFAULT, rails, memory(&Config::DEFAULT, 1, 8)).unwrap();
        engine.attach_matching(SMALL, match_memory(SMALL, 1, 4)).unwrap();
        let peer = engine.reserve_peer().unwrap();
        engine.connect_peer(peer, (1 << count) - 1).unwrap();
        let [out, into] = [(); 2].map(|()| engine.register(region(SIZE)).unwrap());
        write(&engine, out.at(0), &pattern(7, 2000));
        engine.send(CX, peer, tag(1), Payload::Region(out.at(0), 2000), Notice::Silent).unwrap();
        let request = engine.recv(Some(peer), tag(1), EXACT, Some((into.at(0), 2000)), 0).unwrap();
        pass_until(&mut engine, "receive", |engine| engine.test_recv(request).unwrap().is_some());
        assert_eq!(read(&engine, into.at(0), 2000), pattern(7, 2000));
        assert_eq!(engine.matching_stats().pulled, pulled, "{count} rails");
    }
}
