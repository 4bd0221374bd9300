//! Tests the descriptions of a node's rails, and the detection of failed peers on other hosts.

use std::env;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use fishplate::config::Settings;
use fishplate::core::engine::tag::Tag;
use fishplate::core::error::{AttachError, PeerError, WaitError};
use fishplate::core::mem::RailId;
use fishplate::node::{Error, Fabric, OpenError, RailInfo, RailPair};
use fishplate::rails::RailsError;
use fishplate::topology::{LinkState, Machine, Nic};
use fishplate::{Cmp, Job, Node, Notice, PeerId, Signal};
use fishplate_testing::fabric::{Dead, Fake, Persona};

use super::{SOON, builder, fake};

/// Opens and connects two nodes over these interfaces of a provider.
fn two(provider: &Fake, interfaces: [&[&str]; 2]) -> ([Node; 2], [PeerId; 2]) {
    let [mut a, mut b] = interfaces.map(|names| fake(provider, names).open().unwrap());
    let (to_a, to_b) = (a.address().to_vec(), b.address().to_vec());
    let peers = [a.connect(to_b).unwrap(), b.connect(to_a).unwrap()];
    ([a, b], peers)
}

#[test]
fn a_node_without_shared_memory_reaches_itself() {
    let provider = Fake::new(Persona::cxi(), 1);
    let mut node = fake(&provider, &["cxi0"]).open().unwrap();
    let me = node.connect(node.address()).unwrap();
    let memory = node.alloc(64).unwrap();
    let own = node.import(me, node.handle(memory).unwrap()).unwrap();
    node.send(me, 7, b"to myself", Notice::Silent).unwrap();
    assert_eq!(node.recv(Some(me), 7, Tag::ZERO, &mut [0; 9], SOON).unwrap().len, 9);
    assert_eq!(node.fetch_add(own.at(8), 5, SOON), Ok(0));
    assert_eq!(node.load(memory.at(8)), Ok(5));
    assert_eq!(node.connect(node.address()), Ok(me));
    node.close(SOON).unwrap();
}

/// A launcher sets its variables before a process starts, so this test starts itself again.
#[test]
fn processes_of_one_host_begin_with_different_nics() {
    let provider = Fake::new(Persona::cxi(), 1);
    let nic = |at: usize| Nic {
        name: format!("cxi{at}"),
        interface: Some(format!("cxi{at}")),
        verbs: None,
        path: None,
        node: None,
        mbit: None,
        link: LinkState::Up,
    };
    let machine = Machine { nics: (0..4).map(nic).collect(), ..Machine::default() };
    let first = |local_rank| {
        let providers = vec!["cxi".into()];
        let settings = Settings { providers, max_rails: 1, local_rank, ..Settings::DEFAULT };
        let builder = fake(&provider, &[]).settings(settings).machine(machine.clone());
        builder.open().unwrap().rails()[0].interface.clone()
    };
    if env::var_os("FISHPLATE_TEST_CHILD").is_some() {
        assert_eq!(Job::local_rank_in_env().unwrap(), Some(2));
        assert_eq!(first(None), "cxi0", "the program has not asked for a job");
        assert_eq!(Job::from_env(SOON).unwrap().local_rank(), Some(2));
        assert_eq!(first(None), "cxi2");
        assert_eq!(first(Some(0)), "cxi0", "the setting is stronger");
        return;
    }
    assert_eq!([None, Some(1), Some(3), Some(4)].map(first), ["cxi0", "cxi1", "cxi3", "cxi0"]);
    let mut again = Command::new(env::current_exe().unwrap());
    let (_, module) = module_path!().split_once("::").unwrap();
    let name = format!("{module}::processes_of_one_host_begin_with_different_nics");
    again.args(["--exact", &name]);
    again
        .env_remove("FISHPLATE_LOCAL_RANK")
        .env("LOCAL_RANK", "2")
        .env("FISHPLATE_TEST_CHILD", "1");
    let told = again.output().unwrap();
    let text = String::from_utf8_lossy(&told.stdout);
    assert!(told.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn rails_are_listed_with_the_peer_s_rails() {
    let provider = Fake::new(Persona::cxi(), 1);
    let ([a, b], [b_at_a, a_at_b]) =
        two(&provider, [&["cxi3", "cxi1", "cxi0"], &["cxi0", "cxi2", "cxi3"]]);
    let name = |rail: &RailInfo| (rail.id.0, rail.provider.clone(), rail.interface.clone());
    let told: Vec<_> = a.rails().iter().map(name).collect();
    assert_eq!(
        told,
        [(1, "cxi", "cxi3"), (2, "cxi", "cxi1"), (3, "cxi", "cxi0")]
            .map(|(id, of, on)| { (id, of.to_owned(), on.to_owned()) })
    );
    let mbit = a.rails()[0].mbit;
    assert!(mbit > 0);
    // Both ends must report the same pairs of rails.
    let (there, mut back) = (a.rail_pairs(b_at_a).unwrap(), b.rail_pairs(a_at_b).unwrap());
    back.sort_by_key(|pair| pair.theirs.0);
    for (at, (there, back)) in there.iter().zip(&back).enumerate() {
        let &RailPair { ours, theirs, their_mbit } = there;
        assert_eq!((usize::from(ours.0), their_mbit), (at + 1, mbit));
        assert_eq!((back.theirs, back.ours, back.their_mbit), (ours, theirs, mbit));
    }
    assert_eq!((there.len(), back.len()), (3, 3));
    assert_eq!([0, 1, 9].map(|rail| a.last_error(RailId(rail))), [None, None, None]);
}

#[test]
fn no_libfabric_rail_reaches_a_peer_of_this_host() {
    let open = || builder().fabric(Fabric::Off).open().unwrap();
    let (mut node, other) = (open(), open());
    let peer = node.connect(other.address()).unwrap();
    assert_eq!((node.rails(), node.rail_pairs(peer)), (&[][..], Ok(vec![])));
    // The rail detects this peer's death itself, so the node ignores the stream.
    let (lifeline, end) = UnixStream::pair().unwrap();
    assert_eq!(node.watch(peer, lifeline), Ok(()));
    drop(end);
    assert_eq!(node.peer_error(peer), Ok(None));
    node.disconnect(peer).unwrap();
    let unknown = Error::Attach(AttachError::UnknownPeer);
    assert_eq!(node.rail_pairs(peer), Err(unknown));
    assert_eq!(node.watch(peer, UnixStream::pair().unwrap().0), Err(unknown));
}

#[test]
fn the_exact_number_of_rails_is_opened_or_none() {
    let provider = Fake::new(Persona::cxi(), 2);
    let open = |count| fake(&provider, &["cxi0", "cxi1"]).fabric(Fabric::Exactly(count)).open();
    for count in [1, 2] {
        assert_eq!(open(count).unwrap().rails().len(), count);
    }
    match open(3) {
        Err(OpenError::Rails(RailsError::TooMany { rails: 3, named: true, .. })) => {}
        other => panic!("{:?}", other.err()),
    }
}

#[test]
fn a_peer_whose_lifeline_ends_fails_at_once() {
    let provider = Fake::new(Persona::cxi(), 3);
    let ([mut a, b], [peer, _]) = two(&provider, [&["cxi0", "cxi1"], &["cxi2", "cxi3"]]);
    assert_eq!(a.rail_pairs(peer).unwrap().len(), 2);
    let inbox = a.alloc(64).unwrap();
    let ends = [0, 1].map(|_| UnixStream::pair().unwrap());
    let [(first, gone), (second, held)] = ends;
    // The second stream replaces the first.
    a.watch(peer, first).unwrap();
    a.watch(peer, second).unwrap();
    drop(gone);
    let short = a.wait(inbox.at(0), Cmp::Eq, 1, Some(peer), Duration::from_millis(50));
    assert!(matches!(short, Err(Error::Wait(WaitError::Deadline(stuck)))
            if stuck == a.missing(Some(peer))));
    assert_eq!(a.missing(None).peer, Some(peer));
    drop(held);
    let died = Err(Error::Wait(WaitError::PeerFailed(peer, PeerError::Died)));
    assert_eq!(a.wait(inbox.at(0), Cmp::Eq, 1, Some(peer), SOON), died);
    assert_eq!(a.peer_error(peer), Ok(Some(PeerError::Died)));
    drop(b);
}

#[test]
fn a_rail_that_loses_a_living_peer_is_named_with_its_error() {
    let provider = Fake::new(Persona::efa_direct(), 4);
    let over = |interface: &str| {
        let settings = fishplate::config::Settings {
            providers: vec!["efa-direct".into()],
            interfaces: vec![interface.into()],
            ..Default::default()
        };
        builder().library(provider.library()).settings(settings).shared_memory(false)
    };
    let [mut a, mut b] = ["rdmap0-rdm", "rdmap2-rdm"].map(|name| over(name).open().unwrap());
    let (to_a, to_b) = (a.address().to_vec(), b.address().to_vec());
    let (peer, _) = (a.connect(&to_b).unwrap(), b.connect(to_a).unwrap());
    let inbox = b.alloc(64).unwrap();
    let handle = b.handle(inbox).unwrap();
    let there = a.import(peer, handle).unwrap();
    a.signal(Signal::set(there.at(0), 1), Notice::Silent).unwrap();
    while b.load(inbox.at(0)).unwrap() == 0 {
        a.progress();
        b.progress();
    }
    let (lifeline, _held) = UnixStream::pair().unwrap();
    a.watch(peer, lifeline).unwrap();
    provider.kill(&to_b);
    let deadline = Instant::now() + SOON;
    while a.peer_error(peer).unwrap().is_none() {
        assert!(Instant::now() < deadline, "never detected");
        _ = a.send(peer, 1, &[0; 500], Notice::Silent);
        a.progress();
    }
    let rail = a.rails()[0].id;
    assert_eq!(a.peer_error(peer), Ok(Some(PeerError::Rail(rail))));
    assert!(a.last_error(rail).is_some_and(|text| !text.is_empty()));
}

#[test]
fn a_rail_taken_out_of_use_goes_unused_until_it_is_enabled_or_both_ends_connect_anew() {
    for worker in [false, true] {
        // The ends have different interfaces, so either rail of an end may pair with the first rail
        // of the other end.
        let interfaces = [["eth0", "eth1"], ["eth2", "eth3"]];
        let persona = Persona { interfaces: interfaces.concat(), ..Persona::tcp() };
        let provider = Fake::new(persona, 5 + worker as u64);
        let over = |interfaces: [&str; 2]| {
            let settings = fishplate::config::Settings {
                providers: vec!["tcp".into()],
                interfaces: interfaces.map(String::from).into(),
                ..Default::default()
            };
            let node = builder().library(provider.library()).settings(settings);
            let node = node.shared_memory(false).failover(true);
            if worker { node.worker(Default::default()) } else { node }
        };
        let [mut a, mut b] = interfaces.map(|interfaces| over(interfaces).open().unwrap());
        let inbox = b.alloc(64).unwrap();
        let handle = b.handle(inbox).unwrap();
        let meet = |a: &mut fishplate::Node, b: &mut fishplate::Node| {
            (a.connect(b.address()).unwrap(), b.connect(a.address()).unwrap())
        };
        let mut round = 0;
        let mut add =
            |a: &mut fishplate::Node, b: &mut fishplate::Node, there: fishplate::node::Remote| {
                for _ in 0..40 {
                    a.signal(Signal::add(there.at(0), 1), Notice::Silent).unwrap();
                    round += 1;
                }
                let deadline = Instant::now() + SOON;
                while b.load(inbox.at(0)).unwrap() != round {
                    assert!(Instant::now() < deadline, "{round} were sent");
                    a.progress();
                    b.progress();
                }
            };
        let posted = || provider.posted_on("eth0");
        let (to_b, to_a) = meet(&mut a, &mut b);
        let there = a.import(to_b, &handle).unwrap();
        add(&mut a, &mut b, there);
        assert_eq!((a.rail_errors(to_b), b.rail_errors(to_a)), (Ok(vec![]), Ok(vec![])));
        let rails: Vec<_> = a.rails().iter().map(|rail| rail.id).collect();
        a.disable_rail(to_b, rails[0]).unwrap();
        add(&mut a, &mut b, there);
        let errors = a.rail_errors(to_b).unwrap();
        assert_eq!(errors.iter().map(|error| error.rail).collect::<Vec<_>>(), rails[..1]);
        assert_eq!(
            errors[0].to_string(),
            format!("rail {} is out of use: it was disabled", rails[0].0)
        );
        // Until the other end learns of the failure, it may acknowledge over the failed rail.
        let deadline = Instant::now() + SOON;
        while b.rail_errors(to_a).unwrap().is_empty() {
            assert!(Instant::now() < deadline, "the other end was not told");
            a.progress();
            b.progress();
        }
        let before = posted();
        add(&mut a, &mut b, there);
        assert_eq!(posted(), before, "it is out of use");
        assert!(a.disable_rail(to_b, rails[1]).is_err(), "the last one");
        a.enable_rail(to_b, rails[0]).unwrap();
        let deadline = Instant::now() + SOON;
        while !(a.rail_errors(to_b).unwrap().is_empty() && b.rail_errors(to_a).unwrap().is_empty())
        {
            assert!(Instant::now() < deadline, "it did not return: {:?}", a.rail_errors(to_b));
            a.progress();
            b.progress();
        }
        assert_eq!((a.stats().rails_returned, b.stats().rails_returned), (1, 1));
        // Waits until the announcement of the return has completed, because a signal uses the rail
        // with fewer outstanding posts.
        for _ in 0..1000 {
            a.progress();
            b.progress();
        }
        let before = posted();
        add(&mut a, &mut b, there);
        assert!(posted() > before, "it is in use again");
        a.disable_rail(to_b, rails[0]).unwrap();
        add(&mut a, &mut b, there);
        let before = posted();
        assert_eq!((a.peer_error(to_b), b.peer_error(to_a)), (Ok(None), Ok(None)));
        // Both nodes now have new endpoints on the returned rail.
        a.disconnect(to_b).unwrap();
        b.disconnect(to_a).unwrap();
        let (to_b, _) = meet(&mut a, &mut b);
        let there = a.import(to_b, &handle).unwrap();
        add(&mut a, &mut b, there);
        assert_eq!(a.rail_errors(to_b), Ok(vec![]));
        assert!(posted() > before, "it is in use again");
        assert_eq!(provider.violations(), [] as [String; 0]);
    }
}

/// Returns the addresses of a node's endpoints, as the fake provider knows them.
fn endpoints(node: &Node) -> Vec<Vec<u8>> {
    let address = node.address();
    let starts = address.windows(4).enumerate().filter(|(_, word)| *word == b"fake");
    starts.map(|(at, _)| address[at..at + 16].to_vec()).collect()
}

#[test]
fn processes_that_end_on_different_rails_take_no_rail_from_others() {
    let interfaces = ["eth0", "eth1"];
    let persona = Persona { interfaces: interfaces.to_vec(), dead: Dead::Errors, ..Persona::tcp() };
    for seed in 0..6 {
        let provider = Fake::new(persona.clone(), seed);
        let open = || {
            let settings = fishplate::config::Settings {
                providers: vec!["tcp".into()],
                interfaces: interfaces.map(String::from).into(),
                ..Default::default()
            };
            // Uses no worker, because a worker would still run after the test has "killed" its
            // node.
            let node = Node::builder().library(provider.library()).settings(settings);
            node.patience(Duration::ZERO).shared_memory(false).open().unwrap()
        };
        let mut nodes: Vec<Node> = (0..4).map(|_| open()).collect();
        let addresses: Vec<_> = nodes.iter().map(|node| node.address()).collect();
        let memory: Vec<_> = nodes.iter_mut().map(|node| node.alloc(4096).unwrap()).collect();
        let handles: Vec<_> =
            nodes.iter().zip(&memory).map(|(node, &memory)| node.handle(memory).unwrap()).collect();
        let others = |me: usize| (0..4).filter(move |&other| other != me);
        let peers: Vec<Vec<Option<PeerId>>> = (0..4)
            .map(|me| {
                let peer =
                    |to: usize| (to != me).then(|| nodes[me].connect(&addresses[to]).unwrap());
                (0..4).map(peer).collect()
            })
            .collect();
        let there: Vec<Vec<_>> = (0..4)
            .map(|me| {
                let import = |to: usize| {
                    peers[me][to].map(|peer| nodes[me].import(peer, &handles[to]).unwrap())
                };
                (0..4).map(import).collect()
            })
            .collect();
        // Lets the first `alive` nodes put, get and make progress until `done` returns true.
        let rounds =
            |nodes: &mut Vec<Node>, alive: usize, what: &str, done: &dyn Fn(&[Node]) -> bool| {
                let deadline = Instant::now() + SOON;
                while !done(nodes) {
                    assert!(
                        Instant::now() < deadline,
                        "seed {seed}: {what}: {:?}",
                        nodes.iter().map(|node| node.stats()).collect::<Vec<_>>()
                    );
                    for (me, node) in nodes.iter_mut().enumerate().take(alive) {
                        for to in others(me) {
                            let there = there[me][to].unwrap();
                            _ = node.put(&[7; 600][..], there.at(8), Notice::Silent);
                            _ = node.get(memory[me].slice(1024..1624), there.at(8), Notice::Silent);
                        }
                        node.progress();
                        peers[me].iter().flatten().for_each(|&peer| _ = node.peer_error(peer));
                    }
                }
            };
        let failed = |node: &Node| node.stats().rails_failed;
        rounds(&mut nodes, 4, "all have met", &|nodes| {
            nodes.iter().all(|node| node.stats().arrived > 100)
        });
        assert!(nodes.iter().all(|node| failed(node) == 0), "seed {seed}");
        // Kills the last two nodes: first one rail of each, not the same, then their other rails.
        let gone: Vec<_> = nodes[2..].iter().map(endpoints).collect();
        assert!(gone.iter().all(|rails| rails.len() == 2), "{gone:?}");
        provider.kill(&gone[0][0]);
        provider.kill(&gone[1][1]);
        rounds(&mut nodes, 2, "both see that", &|nodes| {
            nodes[..2].iter().all(|node| failed(node) >= 2)
        });
        provider.kill(&gone[0][1]);
        provider.kill(&gone[1][0]);
        let both = |me: usize, nodes: &mut Vec<Node>| {
            let lost = [2, 3].map(|to| nodes[me].peer_error(peers[me][to].unwrap()).unwrap());
            lost.iter().all(Option::is_some)
        };
        let deadline = Instant::now() + SOON;
        while !(both(0, &mut nodes) && both(1, &mut nodes)) {
            assert!(Instant::now() < deadline, "seed {seed}: they are not lost");
            let turn = std::cell::Cell::new(0);
            rounds(&mut nodes, 2, "a turn", &|_| turn.replace(turn.get() + 1) > 10);
        }
        // Neither live node has fenced a rail, and both continue over both rails.
        for (me, to) in [(0, 1), (1, 0)] {
            assert_eq!(nodes[me].rail_errors(peers[me][to].unwrap()), Ok(vec![]), "seed {seed}");
            assert_eq!(nodes[me].address(), addresses[me], "seed {seed}: an endpoint was replaced");
            assert_eq!(
                (failed(&nodes[me]), nodes[me].stats().rails_returned),
                (2, 0),
                "seed {seed}"
            );
        }
        let before = interfaces.map(|interface| provider.posted_on(interface));
        let turn = std::cell::Cell::new(0);
        rounds(&mut nodes, 2, "more", &|_| turn.replace(turn.get() + 1) > 200);
        let after = interfaces.map(|interface| provider.posted_on(interface));
        assert!(
            before.iter().zip(&after).all(|(before, after)| after > before),
            "{before:?} {after:?}"
        );
        assert_eq!(provider.violations(), [] as [String; 0]);
    }
}
