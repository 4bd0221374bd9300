//! Different rails in one engine: only the rails that reach a peer determine the limits for that
//! peer.

use fishplate_core::engine::{Config, Engine, Issued, Notice, RailPolicy};
use fishplate_core::error::OpError;
use fishplate_core::mem::{LocalId, PeerId, RemoteId};
use fishplate_core::op::{Amo, AmoOp, AmoSet};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::{Caps, Order};

use super::order::set;
use super::support::tap::{Shared, Tap, Verb, shared};
use super::support::*;

type Network = Loopback<32>;

/// An engine over two rails that is its own peer three times: over the first rail, over the second
/// rail, and over both.
struct Bench {
    engine: Engine<'static, Tap<Network>, 4>,
    controls: [Shared; 2],
    peers: [PeerId; 3],
    remotes: [RemoteId; 3],
    source: LocalId,
}

impl Bench {
    fn new(config: Config, caps: [fn(Caps) -> Caps; 2]) -> Bench {
        let controls = [shared(), shared()];
        let mut rails = fishplate_core::rail::Rails::new();
        for (at, (control, caps)) in controls.iter().zip(caps).enumerate() {
            control.borrow_mut().caps = Some(caps);
            let rail = Loopback::new().with_native_atomics();
            assert!(rails.push(Tap::new(rail, at, control)).is_ok());
        }
        let mut engine = Engine::new(config, rails, memory(&config, 3, 64)).unwrap();
        let source = engine.register(region(8192)).unwrap();
        let target = engine.register(region(8192)).unwrap();
        let peers = [1, 2, 3].map(|rails| {
            let peer = engine.reserve_peer().unwrap();
            engine.connect_peer(peer, rails).unwrap();
            peer
        });
        let remotes = peers.map(|peer| import(&mut engine, peer, target));
        Bench { engine, controls, peers, remotes, source }
    }

    /// Returns each rail's posts since the last call, as verbs and lengths.
    fn posts(&mut self) -> [Vec<(Verb, usize)>; 2] {
        [0, 1].map(|rail: usize| {
            let posts = std::mem::take(&mut self.controls[rail].borrow_mut().posts);
            posts.into_iter().map(|post| (post.verb, post.len)).collect()
        })
    }

    /// Completes all operations, and discards the recorded posts.
    fn rest(&mut self) {
        for peer in self.peers {
            pass_until(&mut self.engine, "quiet", |engine| engine.is_quiet(CX, peer).unwrap());
        }
        passes(&mut self.engine, 40);
        self.posts();
    }
}

fn narrow(caps: Caps) -> Caps {
    Caps { max_message: 128, inject: 8, max_rma: 1000, ..caps }
}

fn wide(caps: Caps) -> Caps {
    Caps { inject: 64, ..caps }
}

const EACH: Config = Config { policy: RailPolicy::RoundRobin, ..Config::DEFAULT };

#[test]
fn injected_bytes_use_a_rail_that_copies_or_a_message() {
    let mut bench = Bench::new(EACH, [narrow, wide]);
    let [a, b, c] = bench.remotes;
    let most = bench.peers.map(|peer| bench.engine.inject_max(peer));
    assert_eq!(most, [128 - 48, 256 - 48, 256 - 48]);
    for _ in 0..4 {
        bench.engine.inject(CX, &[7; 64], a.at(0)).unwrap();
        assert_eq!(bench.posts(), [vec![(Verb::Message, 24 + 64)], vec![]]);
        for wide in [b, c] {
            bench.engine.inject(CX, &[7; 64], wide.at(0)).unwrap();
            assert_eq!(bench.posts(), [vec![], vec![(Verb::Write, 64)]]);
            bench.engine.inject(CX, &[7; 200], wide.at(0)).unwrap();
            assert_eq!(bench.posts(), [vec![], vec![(Verb::Message, 24 + 200)]]);
        }
        let long = bench.engine.inject(CX, &[7; 81], a.at(0));
        assert_eq!(long, Err(OpError::TooLong { len: 81, max: 80 }));
        bench.rest();
    }
    // Both rails copy writes of eight bytes, so they take turns.
    bench.engine.inject(CX, &[7; 8], c.at(0)).unwrap();
    bench.engine.inject(CX, &[7; 8], c.at(0)).unwrap();
    assert_eq!(bench.posts(), [vec![(Verb::Write, 8)], vec![(Verb::Write, 8)]]);
}

#[test]
fn a_put_signal_is_one_message_if_a_rail_to_the_peer_permits() {
    let mut bench = Bench::new(EACH, [narrow, wide]);
    let from = bench.source.at(0);
    for _ in 0..4 {
        for (peer, len) in [(0, 80), (1, 100), (2, 100), (1, 192), (2, 192)] {
            let remote = bench.remotes[peer];
            let signal = set(remote, 4096, 1);
            bench.engine.put_signal(CX, from, len, remote.at(0), signal, Notice::Silent).unwrap();
            let mut want = [vec![], vec![]];
            want[peer.min(1)] = vec![(Verb::Message, 48 + len)];
            assert_eq!(bench.posts(), want);
        }
        bench
            .engine
            .put_signal(
                CX,
                from,
                81,
                bench.remotes[0].at(0),
                set(bench.remotes[0], 4096, 1),
                Notice::Silent,
            )
            .unwrap();
        assert_eq!(bench.posts(), [vec![(Verb::Write, 81), (Verb::Message, 32)], vec![]]);
        bench.rest();
    }
}

#[test]
fn a_long_put_is_split_for_the_rails_to_its_peer() {
    let config = Config { stripe_threshold: 2048, stripe_chunk: 1024, ..EACH };
    let mut bench = Bench::new(config, [narrow, wide]);
    let from = bench.source.at(0);
    for notice in [Notice::Silent, Notice::Report(1)] {
        bench.engine.put(CX, from, 2500, bench.remotes[0].at(0), notice).unwrap();
        let pieces = [1000, 1000, 500].map(|len| (Verb::Write, len));
        assert_eq!(bench.posts(), [pieces.to_vec(), vec![]]);
        bench.engine.put(CX, from, 8000, bench.remotes[1].at(0), notice).unwrap();
        assert_eq!(
            bench.posts(),
            [vec![], vec![(Verb::Write, 8000)]],
            "there is nothing to stripe over"
        );
        bench.engine.put(CX, from, 8000, bench.remotes[2].at(0), notice).unwrap();
        let [near, far] = bench.posts();
        assert!(near.iter().all(|&(_, len)| len <= 1000) && near.len() >= 3, "{near:?}");
        assert!(far.iter().all(|&(_, len)| len < 2048) && far.len() >= 3, "{far:?}");
        bench.rest();
    }
}

#[test]
fn order_and_atomics_depend_on_the_rails_to_the_peer() {
    let ordered = |caps| Caps { order: Order::All, ..caps };
    let loose = |caps| Caps { order: Order::None, native_atomics: AmoSet::NONE, ..caps };
    let mut bench = Bench::new(EACH, [ordered, loose]);
    let (from, [a, b, c]) = (bench.source.at(0), bench.remotes);
    // Only rail 0 executes the atomics. It reaches the first and the third peer.
    let words = bench.engine.register(region(64).with_native_atomics()).unwrap();
    let natives = bench.peers.map(|peer| import(&mut bench.engine, peer, words));
    let add = Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 };
    let unreached = bench.engine.amo(CX, natives[1].at(0), add, Notice::Silent);
    assert_eq!(unreached, Err(OpError::NativeAtomics));
    let by_rail_0 = [(natives[0], Verb::Atomic), (natives[2], Verb::Atomic)];
    let by_message = [(a, Verb::Message), (b, Verb::Message), (c, Verb::Message)];
    for (n, (remote, verb)) in by_rail_0.into_iter().chain(by_message).enumerate() {
        let at = remote.at(8 * n as u64);
        bench.engine.amo(CX, at, add, Notice::Silent).unwrap();
        let posts = bench.posts().concat();
        assert_eq!(posts.iter().map(|post| post.0).collect::<Vec<_>>(), [verb]);
        bench.rest();
        let token = pending(bench.engine.fetch(CX, at, add, 5));
        done(&mut bench.engine, Issued::Pending(token), "a fetch");
        bench.rest();
    }
    // If the rail preserves order, a fence delays nothing.
    for (remote, peer, at_once) in [(a, 0, 2), (b, 1, 1), (c, 2, 1)] {
        bench.engine.put(CX, from, 8, remote.at(64), Notice::Silent).unwrap();
        bench.engine.fence(CX, bench.peers[peer]).unwrap();
        bench.engine.put(CX, from, 8, remote.at(64), Notice::Silent).unwrap();
        assert_eq!(bench.posts().concat().len(), at_once, "peer {peer}");
        bench.rest();
    }
}
