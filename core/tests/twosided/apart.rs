//! Device memory that no rail reaches: its bytes travel in messages, in the order of the stream.
//! An access by the processor would fault, because [`veil`] hides the memory.

use fishplate_core::engine::protocol::{Payload, Received};
use fishplate_core::engine::{Config, Issued, Notice, Signal};
use fishplate_core::error::{AttachError, OpError, PeerError, PostError, Use, Violation};
use fishplate_core::mem::{LocalId, PeerId, RailId, Region, RemoteId};
use fishplate_core::op::{Fault, Outcome, SignalOp};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::Dials;

use super::rig::*;
use super::support::fleet::{self, End, Node, turn, turn_until};
use super::support::veil::{Veiled, device_region, peek, poke};
use super::support::*;

/// Two nodes with device memory. Each node imports the other's memory.
struct Two<const RAILS: usize = 4> {
    nodes: Vec<Node<Veiled<End>, RAILS>>,
    regions: [Region; 2],
    ids: [LocalId; 2],
    theirs: [RemoteId; 2],
}

fn two(seed: u64, dials: Dials, delay: u32, config: Config) -> Two {
    join(seed, dials, (delay, usize::MAX), config)
}

/// `most` is the longest message of each rail, in bytes.
fn join<const RAILS: usize>(
    seed: u64,
    dials: Dials,
    (delay, most): (u32, usize),
    config: Config,
) -> Two<RAILS> {
    let sim = fleet::fabric(2, RAILS as u16, 256, dials, seed);
    let wrap = |_, _, end| {
        let mut rail = Veiled::new(end);
        (rail.apart, rail.delay, rail.most) = (true, delay, most);
        rail
    };
    let attach = |engine: &mut fishplate_core::engine::Engine<'static, Veiled<End>, RAILS>| {
        let streams = 2 * config.contexts as usize;
        engine.attach_matching(CARRYING, match_memory(CARRYING, streams, 4)).unwrap();
    };
    let mut nodes = fleet::prepared(sim, 2, config, SIZE, wrap, attach);
    let regions = [(); 2].map(|()| device_region(SIZE));
    let ids = [0, 1].map(|node| nodes[node].engine.register(regions[node]).unwrap());
    let theirs = [0, 1].map(|node| {
        let mut handle = [0; 512];
        let len = nodes[1 - node].engine.export(ids[1 - node], &mut handle).unwrap();
        let peer = nodes[node].peers[1 - node];
        nodes[node].engine.import(peer, &handle[..len]).unwrap()
    });
    Two { nodes, regions, ids, theirs }
}

impl<const RAILS: usize> Two<RAILS> {
    fn peer(&self, node: usize) -> PeerId {
        self.nodes[node].peers[1 - node]
    }

    fn issue(&mut self, mut call: impl FnMut(&mut Self) -> Result<Issued, OpError>) -> Issued {
        for _ in 0..100_000 {
            match call(self) {
                Ok(issued) => return issued,
                Err(OpError::Again) => turn(&mut self.nodes),
                Err(error) => panic!("{error:?}"),
            }
        }
        panic!("no room after many passes");
    }

    fn complete(&mut self, node: usize, issued: Issued) -> Outcome {
        let Issued::Pending(token) = issued else { panic!("not posted: {issued:?}") };
        let mut outcome = None;
        turn_until(&mut self.nodes, "a completion", |nodes| {
            outcome = nodes[node].engine.test(token).unwrap().map(|end| end.outcome);
            outcome.is_some()
        });
        outcome.unwrap()
    }

    fn put(&mut self, len: usize, from: u64, to: u64) -> Issued {
        self.issue(|two| {
            let (from, to) = (two.ids[0].at(from), two.theirs[0].at(to));
            two.nodes[0].engine.put(CX, from, len, to, Notice::Report(1))
        })
    }

    fn get(&mut self, node: usize, len: usize, from: u64, into: u64) -> Issued {
        self.issue(|two| {
            let (into, from) = (two.ids[node].at(into), two.theirs[node].at(from));
            two.nodes[node].engine.get(CX, into, len, from, Notice::Report(2))
        })
    }

    fn quiet(&mut self) {
        turn_until(&mut self.nodes, "quiet", |nodes| {
            (0..2).all(|node| nodes[node].engine.is_quiet(CX, nodes[node].peers[1 - node]).unwrap())
        });
    }

    fn failure(&mut self, node: usize) -> PeerError {
        let mut error = None;
        let peer = self.peer(node);
        turn_until(&mut self.nodes, "the failure of the peer", |nodes| {
            error = nodes[node].engine.peer_error(peer).unwrap();
            error.is_some()
        });
        error.unwrap()
    }
}

fn bytes(random: &mut Random, len: usize) -> Vec<u8> {
    (0..len).map(|_| random.next() as u8).collect()
}

/// Puts with signals in all pairings of host and device memory. When a signal is visible, the data
/// of all earlier puts has landed, and no other memory has changed.
#[test]
fn a_signal_follows_the_data_before_it() {
    const SLOTS: u64 = 8;
    const SLOT: usize = 4096;
    for seed in seeds(6) {
        let config = Config { window: 32, ..Config::DEFAULT };
        let mut two = two(seed, Dials::WILD, seed as u32 % 4, config);
        let mut random = Random(seed);
        let mut sent: Vec<(bool, Vec<u8>)> = vec![(false, vec![]); SLOTS as usize];
        let mut checked = 0;
        for n in 1..=400u64 {
            let len = [0, 1, 8, 100, 127, 128, 129, 1000, 3000][random.below(9) as usize];
            let (here, there) = (random.below(3) != 0, random.below(3) != 0);
            let payload = bytes(&mut random, len);
            let at = (n % SLOTS) * SLOT as u64 + 64;
            if n % SLOTS == 0 {
                two.quiet();
            }
            match here {
                true => poke(&two.regions[0], at as usize, &payload),
                false => write(&two.nodes[0].engine, two.nodes[0].source.at(at), &payload),
            }
            let on_device = n % 2 == 0;
            two.issue(|two| {
                let host = two.nodes[0].remotes[1];
                let from = if here { two.ids[0] } else { two.nodes[0].source };
                let to = if there { two.theirs[0] } else { host };
                let word = if on_device { two.theirs[0] } else { host };
                let signal = Signal { at: word.at(8 * (n % 2)), op: SignalOp::Set, value: n };
                two.nodes[0].engine.put_signal(
                    CX,
                    from.at(at),
                    len,
                    to.at(at),
                    signal,
                    Notice::Silent,
                )
            });
            sent[(n % SLOTS) as usize] = (there, payload);
            loop {
                let device = u64::from_ne_bytes(peek(&two.regions[1], 0, 8).try_into().unwrap());
                let host = word(&two.nodes[1].engine, two.nodes[1].target.at(8));
                let arrived = device.max(host);
                assert!((checked..=n).contains(&arrived), "seed {seed}: {arrived} after {checked}");
                for n in (checked + 1).max(arrived.saturating_sub(SLOTS / 2))..=arrived {
                    let (there, payload) = &sent[(n % SLOTS) as usize];
                    let at = (n % SLOTS) as usize * SLOT + 64;
                    let got = match there {
                        true => peek(&two.regions[1], at, payload.len()),
                        false => read(
                            &two.nodes[1].engine,
                            two.nodes[1].target.at(at as u64),
                            payload.len(),
                        ),
                    };
                    assert!(got == *payload, "seed {seed}: data before signal {n} is missing");
                }
                checked = checked.max(arrived);
                if checked + random.below(4) >= n && (n != 400 || checked == n) {
                    break;
                }
                turn(&mut two.nodes);
            }
        }
        two.quiet();
        assert_eq!(two.nodes[1].engine.peer_error(two.peer(1)), Ok(None));
    }
}

#[test]
fn gets_of_every_length_arrive_in_both_directions_at_once() {
    for seed in seeds(4) {
        for window in [2, 16] {
            let config = Config { window, ..Config::DEFAULT };
            let mut two = two(seed, Dials::WILD, 2, config);
            let mut random = Random(seed);
            for (at, len) in [1, 127, 128, 129, 384, 385, 5000, 20_000].into_iter().enumerate() {
                let payloads = [bytes(&mut random, len), bytes(&mut random, len)];
                for (region, payload) in two.regions.iter().zip(&payloads) {
                    poke(region, at, payload);
                }
                // Gets device memory into device and host memory, and host memory into device
                // memory.
                let both = [0, 1].map(|node| two.get(node, len, at as u64, 30_000));
                let host = two.issue(|two| {
                    let (node, from) = (&mut two.nodes[0], two.theirs[0].at(at as u64));
                    node.engine.get(CX, node.source.at(0), len, from, Notice::Report(3))
                });
                write(&two.nodes[1].engine, two.nodes[1].target.at(64), &payloads[0]);
                let from_host = two.issue(|two| {
                    let (node, into) = (&mut two.nodes[0], two.ids[0].at(55_000));
                    node.engine.get(
                        CX,
                        into,
                        len.min(9000),
                        node.remotes[1].at(64),
                        Notice::Report(4),
                    )
                });
                for (node, issued) in [(0, both[0]), (1, both[1]), (0, host), (0, from_host)] {
                    assert_eq!(
                        two.complete(node, issued),
                        Outcome::Done,
                        "seed {seed}: {len} bytes"
                    );
                }
                for node in 0..2 {
                    let got = peek(&two.regions[node], 29_999, len + 2);
                    assert!(
                        got[1..=len] == payloads[1 - node],
                        "seed {seed}: {len} bytes to {node}"
                    );
                    assert_eq!((got[0], got[len + 1]), (0, 0), "wrote outside");
                    poke(&two.regions[node], 30_000, &vec![0; len]);
                }
                assert!(read(&two.nodes[0].engine, two.nodes[0].source.at(0), len) == payloads[1]);
                let got = peek(&two.regions[0], 55_000, len.min(9000));
                assert!(got == payloads[0][..len.min(9000)]);
            }
            two.quiet();
        }
    }
}

#[test]
fn a_get_in_the_slot_of_an_earlier_read_arrives() {
    for device in [true, false] {
        let mut two = two(1, Dials::CALM, 1, Config::DEFAULT);
        poke(&two.regions[1], 0, &pattern(1, 300));
        let read = two.issue(|two| {
            let node = &mut two.nodes[0];
            node.engine.get(CX, node.source.at(0), 77, node.remotes[1].at(0), Notice::Report(1))
        });
        assert_eq!(two.complete(0, read), Outcome::Done);
        let get = two.issue(|two| {
            let (node, from) = (&mut two.nodes[0], two.theirs[0].at(0));
            let into = if device { two.ids[0].at(0) } else { node.source.at(0) };
            node.engine.get(CX, into, 300, from, Notice::Report(2))
        });
        assert_eq!(two.complete(0, get), Outcome::Done, "device: {device}");
    }
}

#[test]
fn long_tagged_messages_arrive_in_device_memory() {
    for seed in seeds(3) {
        // Messages of 128 bytes have room for three of four keys.
        for (from_device, most) in [(false, 256), (false, 128), (true, 256), (true, 128)] {
            let what = format!("seed {seed}: from a device: {from_device}, rails of {most} bytes");
            let mut two = join::<4>(seed, Dials::WILD, (2, most), Config::DEFAULT);
            for (n, len) in [100, 129, 5000, 40_000].into_iter().enumerate() {
                let payload = bytes(&mut Random(seed + n as u64), len);
                match from_device {
                    true => poke(&two.regions[0], 0, &payload),
                    false => write(&two.nodes[0].engine, two.nodes[0].source.at(0), &payload),
                }
                let (from, into) = (two.peer(1), two.ids[1].at(8));
                let tag = tag(n as u64);
                let request =
                    two.nodes[1].engine.recv(Some(from), tag, EXACT, Some((into, len)), 1).unwrap();
                two.issue(|two| {
                    let to = two.peer(0);
                    let at = if from_device { two.ids[0] } else { two.nodes[0].source }.at(0);
                    let payload = Payload::Region(at, len);
                    two.nodes[0].engine.send(CX, to, tag, payload, Notice::Silent)
                });
                let mut status = None;
                turn_until(&mut two.nodes, "a receive", |nodes| {
                    status = nodes[1].engine.test_recv(request).unwrap();
                    status.is_some()
                });
                let outcome = status.map(|status| status.outcome);
                assert_eq!(outcome, Some(Received::Ok), "{what}: {len} bytes");
                assert!(peek(&two.regions[1], 8, len) == payload, "{what}: {len} bytes");
            }
            two.quiet();
        }
    }
}

#[test]
fn a_fence_holds_later_writes_back_until_the_device_has_the_data() {
    // The rails keep order, and the device is slow.
    let mut two = two(1, Dials::CALM, 50, Config::DEFAULT);
    poke(&two.regions[0], 0, &pattern(1, 300));
    write(&two.nodes[0].engine, two.nodes[0].source.at(0), &[9; 8]);
    two.put(300, 0, 0);
    let peer = two.peer(0);
    let node = &mut two.nodes[0];
    node.engine.fence(CX, peer).unwrap();
    node.engine.put(CX, node.source.at(0), 8, node.remotes[1].at(0), Notice::Silent).unwrap();
    turn_until(&mut two.nodes, "the later write", |nodes| {
        word(&nodes[1].engine, nodes[1].target.at(0)) != 0
    });
    assert!(peek(&two.regions[1], 0, 300) == pattern(1, 300));
}

/// A single rail that preserves order delivers all data in order, but the device copies later. So
/// after an import of device memory, a fence must delay later data.
#[test]
fn a_fence_holds_data_back_even_on_one_rail_that_keeps_order() {
    for eager in [0, 64] {
        let (config, dials) =
            (Config { eager, ..Config::DEFAULT }, Dials { ordered: true, ..Dials::CALM });
        let mut two = join::<1>(1, dials, (50, usize::MAX), config);
        poke(&two.regions[0], 0, &pattern(1, 300));
        write(&two.nodes[0].engine, two.nodes[0].source.at(0), &[9; 8]);
        two.put(300, 0, 0);
        let peer = two.peer(0);
        let node = &mut two.nodes[0];
        node.engine.fence(CX, peer).unwrap();
        let (from, to) = (node.source.at(0), node.remotes[1].at(0));
        let signal = Signal::set(node.remotes[1].at(64), 1);
        // The data is a write, or travels in the message of the signal.
        node.engine.put_signal(CX, from, 8, to, signal, Notice::Silent).unwrap();
        turn_until(&mut two.nodes, "the later data", |nodes| {
            word(&nodes[1].engine, nodes[1].target.at(0)) != 0
        });
        assert!(peek(&two.regions[1], 0, 300) == pattern(1, 300), "eager: {eager}");
    }
}

#[test]
fn a_target_that_does_not_poll_keeps_few_pieces_and_loses_none() {
    let mut two = two(1, Dials::CALM, 1, Config::DEFAULT);
    poke(&two.regions[0], 0, &pattern(1, 5000));
    let issued = two.put(5000, 0, 0);
    for _ in 0..2000 {
        two.nodes[0].engine.progress();
    }
    // The put needs all pieces of the pool, because each piece has at most 128 bytes.
    assert_eq!(two.nodes[0].engine.stats().posted, CARRYING.pieces as u64);
    let get = two.get(1, 5000, 0, 20_000);
    assert_eq!(two.complete(0, issued), Outcome::Done);
    assert!(peek(&two.regions[1], 0, 5000) == pattern(1, 5000));
    assert_eq!(two.complete(1, get), Outcome::Done);
}

#[test]
fn regions_in_use_by_pieces_stay() {
    let mut two = two(1, Dials::CALM, 3, Config::DEFAULT);
    poke(&two.regions[0], 0, &pattern(1, 5000));
    let (issued, get) = (two.put(5000, 0, 0), two.get(0, 3000, 0, 10_000));
    let in_use = Err(AttachError::InUse(Use::Operations));
    let (theirs, ours) = (two.theirs[0], two.ids[0]);
    assert_eq!(two.nodes[0].engine.release(theirs), in_use);
    assert_eq!(two.nodes[0].engine.deregister(ours), in_use);
    assert_eq!(two.complete(0, issued), Outcome::Done);
    assert_eq!(two.nodes[0].engine.deregister(ours), in_use, "the get goes on");
    assert_eq!(two.complete(0, get), Outcome::Done);
    two.nodes[0].engine.release(theirs).unwrap();
    two.nodes[0].engine.deregister(ours).unwrap();
}

#[test]
fn a_region_that_is_gone_rejects_the_rest_of_a_put() {
    let mut two = two(1, Dials::CALM, 3, Config::DEFAULT);
    poke(&two.regions[0], 0, &pattern(1, 5000));
    let issued = two.put(5000, 0, 0);
    (0..40).for_each(|_| turn(&mut two.nodes));
    let gone = two.ids[1];
    two.nodes[1].engine.deregister(gone).unwrap();
    let before = peek(&two.regions[1], 0, SIZE);
    assert_eq!(two.failure(1), PeerError::Protocol(Violation::Region));
    // Node 0 does not learn of the failure. It removes the peer.
    let peer = two.peer(0);
    two.nodes[0].engine.remove_peer(peer).unwrap();
    assert!(matches!(two.complete(0, issued), Outcome::Unknown(_)));
    (0..100).for_each(|_| turn(&mut two.nodes));
    assert!(peek(&two.regions[1], 0, SIZE) == before, "written after it was gone");
}

/// The get fails as if a rail had refused it. Neither peer fails.
#[test]
fn a_get_of_memory_that_is_gone_fails_alone() {
    let refused = Outcome::Failed(Fault::Post(RailId(0), PostError::BadKey));
    let data = pattern(1, 5000);
    for (turns, device) in (0..60).step_by(3).flat_map(|turns| [(turns, true), (turns, false)]) {
        let mut two = two(1, Dials::CALM, 3, Config::DEFAULT);
        let get = |two: &mut Two, at: u64| {
            two.issue(|two| {
                let (node, from) = (&mut two.nodes[0], two.theirs[0].at(0));
                let into = if device { two.ids[0] } else { node.source };
                node.engine.get(CX, into.at(at), 5000, from, Notice::Report(1))
            })
        };
        let found = |two: &Two, at: u64| match device {
            true => peek(&two.regions[0], at as usize, 5000),
            false => read(&two.nodes[0].engine, two.nodes[0].source.at(at), 5000),
        };
        poke(&two.regions[1], 0, &data);
        let both = [get(&mut two, 0), get(&mut two, 5000)];
        (0..turns).for_each(|_| turn(&mut two.nodes));
        let gone = two.ids[1];
        two.nodes[1].engine.deregister(gone).unwrap();
        poke(&two.regions[1], 0, &[0; 5000]);
        for (at, issued) in [0, 5000].into_iter().zip(both) {
            assert_eq!(two.complete(0, issued), refused, "after {turns}, device: {device}");
            let got = found(&two, at);
            assert!(got.iter().zip(&data).all(|(got, want)| got == want || *got == 0));
        }
        // The same memory is registered again, as a new region. The old import stays invalid.
        poke(&two.regions[1], 0, &data);
        let id = two.nodes[1].engine.register(two.regions[1]).unwrap();
        let again = get(&mut two, 10_000);
        assert_eq!(two.complete(0, again), refused, "after {turns}, device: {device}");
        let mut handle = [0; 512];
        let len = two.nodes[1].engine.export(id, &mut handle).unwrap();
        let peer = two.peer(0);
        two.theirs[0] = two.nodes[0].engine.import(peer, &handle[..len]).unwrap();
        let last = get(&mut two, 15_000);
        assert_eq!(two.complete(0, last), Outcome::Done, "after {turns}, device: {device}");
        assert!(found(&two, 15_000) == data, "after {turns}, device: {device}");
        two.quiet();
        let errors = [0, 1].map(|node| two.nodes[node].engine.peer_error(two.peer(node)));
        assert_eq!(errors, [Ok(None); 2], "after {turns}, device: {device}");
    }
}

#[test]
fn a_peer_removed_with_pieces_in_flight_leaves_room_for_the_next() {
    for seed in seeds(20) {
        let mut two = two(seed, Dials::CALM, 2, Config::DEFAULT);
        let issued = [two.put(4000, 0, 0), two.get(0, 4000, 0, 8000)];
        two.get(1, 4000, 0, 8000);
        (0..seed % 60).for_each(|_| turn(&mut two.nodes));
        for node in 0..2 {
            let peer = two.peer(node);
            two.nodes[node].engine.remove_peer(peer).unwrap();
        }
        (0..50).for_each(|_| turn(&mut two.nodes));
        for issued in issued {
            let Issued::Pending(token) = issued else { panic!("{issued:?}") };
            let outcome = two.nodes[0].engine.test(token).unwrap().map(|end| end.outcome);
            assert!(outcome.is_some(), "seed {seed}: an operation to a removed peer is open");
        }
        for node in 0..2 {
            let own = two.ids[node];
            two.nodes[node].engine.deregister(own).unwrap();
        }
    }
}

#[test]
fn memory_that_cannot_be_carried_is_refused_as_before() {
    let mut own = own(Config::DEFAULT, [Veiled::new(Loopback::<64>::new())], SIZE);
    own.engine.rail_mut(RailId(0)).unwrap().apart = true;
    let device = own.engine.register(device_region(SIZE)).unwrap();
    let mut handle = [0; 512];
    // Without matching, the engine has no blocks for the pieces.
    let len = own.engine.export(device, &mut handle).unwrap();
    assert_eq!(own.engine.import(own.peer, &handle[..len]), Err(AttachError::Unsupported));
    let issued = own.engine.put(CX, device.at(0), 8, own.remote.at(0), Notice::Report(1)).unwrap();
    let Issued::Pending(token) = issued else { panic!("{issued:?}") };
    let mut outcome = None;
    for _ in 0..100 {
        own.engine.progress();
        outcome = outcome.or(own.engine.test(token).unwrap_or(None));
    }
    let fault = outcome.map(|end| end.outcome);
    assert!(matches!(fault, Some(Outcome::Failed(_))), "{fault:?}");
}

/// Memory with native atomics takes no pieces and answers no gets.
#[test]
fn memory_with_native_atomics_is_out_of_reach_of_device_memory_apart() {
    for puts in [true, false] {
        let mut rail = Veiled::new(Loopback::<64>::new().with_native_atomics());
        rail.apart = true;
        let mut own = own1(Config::DEFAULT, CARRYING, [rail]);
        let device = own.engine.register(device_region(SIZE)).unwrap();
        let words = own.engine.register(region(4096).with_native_atomics()).unwrap();
        let words = import(&mut own.engine, own.me, words);
        let (here, there, notice) = (device.at(0), words.at(0), Notice::Report(1));
        let issued = match puts {
            true => own.engine.put(CX, here, 64, there, notice),
            false => own.engine.get(CX, here, 64, there, notice),
        };
        assert!(issued.is_ok(), "{issued:?}");
        let ends = (0..1000).find_map(|_| {
            own.engine.progress();
            own.engine.next_completion()
        });
        let refused = Outcome::Failed(Fault::Post(RailId(0), PostError::Unsupported));
        assert_eq!(ends.map(|end| end.outcome), Some(refused), "puts: {puts}");
        assert_eq!(own.engine.peer_error(own.me), Ok(None), "puts: {puts}");
    }
}

/// No rail reads the payload, and memory with native atomics answers no gets.
#[test]
fn a_long_message_from_memory_with_native_atomics_fails_alone() {
    let mut rail = Veiled::new(Loopback::<64>::new().with_native_atomics());
    rail.apart = true;
    let mut own = own1(Config::DEFAULT, CARRYING, [rail]);
    own.engine.rail_mut(RailId(0)).unwrap().imports_nothing = true;
    let device = own.engine.register(device_region(SIZE)).unwrap();
    let words = own.engine.register(region(4096).with_native_atomics()).unwrap();
    let (me, into) = (own.me, Some((device.at(0), 4096)));
    let request = own.engine.recv(Some(me), tag(1), EXACT, into, 1).unwrap();
    let payload = Payload::Region(words.at(0), 4096);
    own.engine.send(CX, me, tag(1), payload, Notice::Silent).unwrap();
    let status = (0..1000).find_map(|_| {
        own.engine.progress();
        own.engine.test_recv(request).unwrap()
    });
    let outcome = status.map(|status| status.outcome);
    assert!(matches!(outcome, Some(Received::Failed(_))), "{outcome:?}");
    assert_eq!(own.engine.peer_error(own.me), Ok(None));
}
