//! Tests device memory that no NIC accesses: its bytes travel through host memory. Runs over
//! libfabric's tcp and over the fake provider.

use std::time::Instant;

use fishplate::config::Settings;
use fishplate::core::engine::protocol::Received;
use fishplate::core::engine::tag::Tag;
use fishplate::core::mem::RailId;
use fishplate::core::op::Outcome;
use fishplate::node::{Builder, Fabric, Source};
use fishplate::{Cmp, Issued, Node, Notice, Signal};
use fishplate_testing::fabric::{Fake, Persona};

use super::super::{SOON, Side, Way, builder, two, ways};
use super::{LEN, SIZES, device, pattern};

/// Returns a builder of nodes on these interfaces. The NICs do not access device memory.
fn over(builder: Builder, provider: &str, interfaces: &[&str]) -> Builder {
    let interfaces = interfaces.iter().map(|name| (*name).to_owned()).collect();
    let providers = vec![provider.into()];
    let settings =
        Settings { providers, interfaces, nic_device_memory: false, ..Settings::DEFAULT };
    builder.settings(settings).fabric(Fabric::Required).shared_memory(false)
}

fn done(node: &mut Node, issued: Issued) {
    let Issued::Pending(token) = issued else { panic!("{issued:?}") };
    let end = node.wait_completion(token, SOON).unwrap();
    assert_eq!(end.outcome, Outcome::Done);
}

/// Moves data of every length with each operation, between device memory of this side and device or
/// host memory of the other side.
fn every_verb(side: &mut Side) {
    let (node, peer) = (&mut side.node, side.peer);
    let (device, host) = (node.alloc_device(2 * LEN).unwrap(), node.alloc(2 * LEN + 64).unwrap());
    let handles = [node.handle(device).unwrap(), node.handle(host).unwrap()];
    let theirs = handles.map(|handle| side.exchange(&handle));
    let node = &mut side.node;
    let [their_device, their_host] = theirs.map(|handle| node.import(peer, handle).unwrap());
    assert!(node.is_carried(their_device) && !node.is_carried(their_host));
    assert!(node.rails().iter().all(|rail| !rail.device));
    side.exchange(&[]);
    if side.rank == 1 {
        let mut rounds = 0;
        for len in SIZES {
            for on_device in [true, false] {
                rounds += 1;
                side.node.wait(host.at(2 * LEN as u64), Cmp::Eq, rounds, Some(peer), SOON).unwrap();
                let mut got = vec![0; len];
                match on_device {
                    true => side.node.read_device(device.at(8), &mut got).unwrap(),
                    false => side.node.read(host.at(8), &mut got).unwrap(),
                }
                assert!(got == pattern(rounds as usize, len), "{len} bytes, device {on_device}");
                side.exchange(&[]);
            }
        }
        for len in SIZES {
            for from in [host, device] {
                side.exchange(&[]);
                side.node.send(peer, len as u64, from.slice(8..8 + len), Notice::Silent).unwrap();
                side.exchange(&[]);
            }
        }
        return;
    }
    let mut rounds = 0;
    for len in SIZES {
        for their in [their_device, their_host] {
            rounds += 1;
            let node = &mut side.node;
            node.write_device(device.at(16), &pattern(rounds, len)).unwrap();
            let signal = Signal::set(their_host.at(2 * LEN as u64), rounds as u64);
            let from: Source<'_> = device.slice(16..16 + len).into();
            node.put_signal(from, their.at(8), signal, Notice::Silent).unwrap();
            side.exchange(&[]);
            // Gets the data back, into device memory and into host memory.
            let node = &mut side.node;
            let get =
                node.get(device.slice(LEN..LEN + len), their.at(8), Notice::Report(1)).unwrap();
            done(node, get);
            let mut got = vec![0; len];
            node.read_device(device.at(LEN as u64), &mut got).unwrap();
            assert!(got == pattern(rounds, len), "{len} bytes back");
            if their == their_device {
                let get = node.get(host.slice(..len), their.at(8), Notice::Report(1)).unwrap();
                done(node, get);
                node.read(host.at(0), &mut got).unwrap();
                assert!(got == pattern(rounds, len), "{len} bytes back to the host");
                // Also puts from host memory, and gets that data back.
                node.write(host.at(0), &pattern(rounds + 100, len)).unwrap();
                let put = node.put(host.slice(..len), their.at(8), Notice::Report(1)).unwrap();
                done(node, put);
                let get =
                    node.get(device.slice(LEN..LEN + len), their.at(8), Notice::Report(1)).unwrap();
                done(node, get);
                node.read_device(device.at(LEN as u64), &mut got).unwrap();
                assert!(got == pattern(rounds + 100, len), "{len} bytes from the host");
            }
        }
    }
    // Receives messages into device memory. The other side sends what the last puts have written
    // to its host memory and to its device memory.
    for len in SIZES {
        for sent in [rounds, rounds - 1 + 100] {
            let into = device.slice(..len);
            let request = side.node.post_recv(Some(peer), len as u64, Tag::ZERO, into, 0).unwrap();
            side.exchange(&[]);
            assert_eq!(side.node.wait_recv(request, SOON).unwrap().outcome, Received::Ok);
            let mut got = vec![0; len];
            side.node.read_device(device.at(0), &mut got).unwrap();
            assert!(got == pattern(sent, LEN)[..len], "a message of {len} bytes");
            side.exchange(&[]);
        }
    }
}

#[test]
fn every_verb_moves_device_memory_over_tcp_through_host_memory() {
    for way in ways() {
        let Way::Tcp(first, second) = way else { continue };
        let rails =
            |builder: Builder, count| over(builder, "tcp", &vec!["lo"; count]).gpu(device());
        assert!(first <= second);
        let change = |builder| rails(builder, first);
        two(way, change, |mut side| {
            every_verb(&mut side);
            side.node.close(SOON).unwrap();
        });
    }
}

#[test]
fn a_provider_without_fi_hmem_moves_device_memory_through_host_memory() {
    let provider = Fake::new(Persona::cxi(), 5);
    let interfaces = ["cxi0", "cxi1"].map(|name| over(builder(), "cxi", &[name]).gpu(device()));
    let mut nodes = interfaces.map(|builder| builder.library(provider.library()).open().unwrap());
    let addresses = nodes.each_ref().map(|node| node.address().to_vec());
    let peers = [0, 1].map(|at| nodes[at].connect(&addresses[1 - at]).unwrap());
    let memory = nodes.each_mut().map(|node| node.alloc_device(LEN).unwrap());
    let handles = [0, 1].map(|at| nodes[at].handle(memory[at]).unwrap());
    let theirs = nodes[0].import(peers[0], &handles[1]).unwrap();
    assert!(nodes[0].is_carried(theirs));
    nodes[0].write_device(memory[0].at(0), &pattern(1, LEN)).unwrap();
    let put = nodes[0].put(memory[0].slice(..), theirs.at(0), Notice::Report(1)).unwrap();
    let Issued::Pending(token) = put else { panic!("{put:?}") };
    while nodes[0].test(token).unwrap().is_none() {
        nodes.iter_mut().for_each(|node| _ = node.progress());
    }
    let mut got = vec![0; LEN];
    nodes[1].read_device(memory[1].at(0), &mut got).unwrap();
    assert!(got == pattern(1, LEN));
}

/// The other rail takes over. The first rail returns once its cable is plugged in again.
#[test]
fn device_memory_survives_a_pulled_cable() {
    for carried in [true, false] {
        // The ends have different interfaces, because any two interfaces may form a pair.
        let interfaces = [["eth0", "eth1"], ["eth2", "eth3"]];
        let provider = Fake::new(Persona { interfaces: interfaces.concat(), ..Persona::tcp() }, 6);
        let mut nodes = interfaces.map(|interfaces| {
            let settings = Settings {
                providers: vec!["tcp".into()],
                interfaces: interfaces.map(String::from).into(),
                nic_device_memory: !carried,
                ..Settings::DEFAULT
            };
            let node = builder().settings(settings).shared_memory(false).gpu(device());
            node.library(provider.library()).open().unwrap()
        });
        let addresses = nodes.each_ref().map(|node| node.address().to_vec());
        let peers = [0, 1].map(|at| nodes[at].connect(&addresses[1 - at]).unwrap());
        let memory = nodes.each_mut().map(|node| node.alloc_device(2 * LEN).unwrap());
        let handles = [0, 1].map(|at| nodes[at].handle(memory[at]).unwrap());
        let theirs = nodes[0].import(peers[0], &handles[1]).unwrap();
        if !carried && nodes[0].is_carried(theirs) {
            println!("SKIPPED a pulled cable: the NICs do not reach this kind of device");
            continue;
        }
        assert_eq!(nodes[0].is_carried(theirs), carried);
        let pull = |nodes: &mut [Node; 2]| {
            provider.pull("eth0", 20);
            // Operations in flight are lost silently. So the node takes the rail out of use, as if
            // it watched the link.
            _ = nodes[0].disable_rail(peers[0], RailId(1));
        };
        let end = |nodes: &mut [Node; 2], issued: Issued, mut pulls: bool| {
            let Issued::Pending(token) = issued else { panic!("{issued:?}") };
            let deadline = Instant::now() + SOON;
            let end = loop {
                if let Some(end) = nodes[0].test(token).unwrap() {
                    break end;
                }
                assert!(Instant::now() < deadline, "it does not end");
                nodes.iter_mut().for_each(|node| _ = node.progress());
                if std::mem::take(&mut pulls) {
                    pull(nodes);
                }
            };
            assert_eq!(end.outcome, Outcome::Done);
            if pulls {
                // The operation completed before the cable was pulled, by a worker.
                pull(nodes);
            }
        };
        let first = nodes[0].put(memory[0].slice(..8), theirs.at(0), Notice::Report(0)).unwrap();
        end(&mut nodes, first, false);
        for round in 0..2 {
            nodes[0].write_device(memory[0].at(0), &pattern(round, LEN)).unwrap();
            let put =
                nodes[0].put(memory[0].slice(..LEN), theirs.at(0), Notice::Report(1)).unwrap();
            end(&mut nodes, put, round == 0);
            let get = nodes[0]
                .get(memory[0].slice(LEN..2 * LEN), theirs.at(0), Notice::Report(2))
                .unwrap();
            end(&mut nodes, get, round == 1);
            let mut got = vec![0; LEN];
            for (node, at) in [(1, 0), (0, LEN as u64)] {
                nodes[node].read_device(memory[node].at(at), &mut got).unwrap();
                assert!(got == pattern(round, LEN), "round {round}, carried: {carried}");
            }
            let deadline = Instant::now() + SOON;
            while nodes[0].stats().rails_failed + nodes[1].stats().rails_failed <= round as u64 {
                assert!(Instant::now() < deadline, "round {round}, carried: {carried}");
                nodes.iter_mut().for_each(|node| _ = node.progress());
            }
            provider.plug("eth0");
            _ = nodes[0].enable_rail(peers[0], RailId(1));
            while [0, 1].iter().any(|&at| !nodes[at].rail_errors(peers[at]).unwrap().is_empty()) {
                assert!(Instant::now() < deadline, "the rail does not return");
                nodes.iter_mut().for_each(|node| _ = node.progress());
            }
        }
        assert_eq!([0, 1].map(|at| nodes[at].peer_error(peers[at])), [Ok(None); 2]);
        assert_eq!(provider.violations(), [] as [String; 0]);
    }
}
