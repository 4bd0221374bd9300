//! Tests waits over libfabric's tcp for a peer that has never answered: its process ends before, or
//! it connects late. The peer is another process: the test binary runs itself again.

use std::env;
use std::io::Read;
use std::thread;
use std::time::{Duration, Instant};

use fishplate::config::Settings;
use fishplate::core::engine::tag::Tag;
use fishplate::core::error::{PeerError, WaitError};
use fishplate::core::op::{Fault, Outcome};
use fishplate::node::Error;
use fishplate::{Cmp, Job, Node, Notice, PeerId};

use super::departed::Other;
use super::port::free_port;
use super::{SOON, tcp};

/// Environment variables of the child process: where it meets its parent, its number of rails, and
/// what it does then.
const PLACE: &str = "FISHPLATE_TEST_UNMET";
const RAILS: &str = "FISHPLATE_TEST_UNMET_RAILS";
const DOES: &str = "FISHPLATE_TEST_UNMET_DOES";

/// What the other process does once its address is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    /// Dies before this process connects.
    Dies,
    /// Is stopped before this process connects, and killed later.
    Stops,
    /// Makes progress and does not connect. Is killed later.
    Polls,
    /// Makes no calls for [`PAUSE`]. Then it connects.
    Computes,
    /// Is stopped for [`PAUSE`]. Then it connects.
    Pauses,
}

const PAUSE: Duration = Duration::from_secs(6);

/// Longer than any wait takes.
const LONG: Duration = Duration::from_secs(60);

/// Time within which a wait must end. It took at most 3 s, beside a build.
const LIMIT: Duration = Duration::from_secs(15);

fn open(rails: usize) -> Node {
    let settings = Settings {
        providers: vec!["tcp".into()],
        interfaces: vec!["lo".into(); rails],
        deadline: SOON,
        ..Settings::DEFAULT
    };
    tcp(rails).settings(settings).connect_timeout(LONG).open().unwrap()
}

/// Starts the other process. Returns our node, the address of the other one, and the process.
fn start(rails: usize, does: Does) -> (Node, Vec<u8>, Other) {
    let place = format!("127.0.0.1:{}", free_port());
    let (count, does) = (rails.to_string(), format!("{does:?}"));
    let variables = [(PLACE, &*place), (RAILS, &*count), (DOES, &*does)];
    let other = Other::start(concat!(module_path!(), "::child"), &variables);
    let node = open(rails);
    let mut job = Job::join(&place, 2, SOON).unwrap();
    let theirs = job.exchange(node.address()).unwrap();
    (node, theirs, other)
}

/// The program of the other process.
#[test]
fn child() {
    let Ok(place) = env::var(PLACE) else { return };
    let all = [Does::Dies, Does::Stops, Does::Polls, Does::Computes, Does::Pauses];
    let wanted = env::var(DOES).unwrap();
    let does = all.into_iter().find(|does| format!("{does:?}") == wanted).unwrap();
    let mut job = Job::join(&place, 2, SOON).unwrap();
    let mut node = open(env::var(RAILS).unwrap().parse().unwrap());
    let theirs = job.exchange(node.address()).unwrap();
    match does {
        Does::Dies | Does::Stops => {}
        Does::Polls => loop {
            node.progress();
        },
        Does::Computes | Does::Pauses => {
            thread::sleep(if does == Does::Pauses { PAUSE / 6 } else { PAUSE });
            let peer = node.connect(theirs).unwrap();
            node.send(peer, 7, b"late", Notice::Silent).unwrap();
            node.recv(Some(peer), 7, Tag::ZERO, &mut [0; 8], SOON).unwrap();
            node.close(SOON).unwrap();
        }
    }
    // Until the parent has finished.
    _ = std::io::stdin().read(&mut [0]);
}

/// A call that waits for the peer. Returns its result.
type Wait = fn(&mut Node, PeerId) -> Result<(), Error>;

const WAITS: [(&str, Wait); 5] = [
    ("a signal", |node, peer| {
        let word = node.alloc(8)?;
        node.wait(word.at(0), Cmp::Eq, 1, Some(peer), LONG).map(|_| ())
    }),
    ("a message", |node, peer| node.recv(Some(peer), 7, Tag::ZERO, &mut [0; 8], LONG).map(|_| ())),
    ("calls of peer_error", |node, peer| {
        let begun = Instant::now();
        // The first use attaches the peer.
        node.send(peer, 7, b"short", Notice::Silent)?;
        while begun.elapsed() < LONG {
            node.progress();
            if let Some(why) = node.peer_error(peer)? {
                return Err(Error::Wait(WaitError::PeerFailed(peer, why)));
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }),
    ("quiet", |node, peer| {
        node.send(peer, 7, b"short", Notice::Silent)?;
        node.quiet(peer, LONG)
    }),
    ("shutdown", |node, peer| {
        node.send(peer, 7, b"short", Notice::Silent)?;
        node.shutdown(LONG)
    }),
];

/// Runs all waits at once, each with its own peer.
fn all_end(rails: usize, does: Does) {
    if let Err(error) = tcp(rails).open() {
        return println!("SKIPPED waits for a peer that never answers: {error}");
    }
    let run = |(name, wait): (&str, Wait)| {
        let (mut node, theirs, other) = start(rails, does);
        if does == Does::Stops {
            other.send(libc::SIGSTOP);
        }
        let kill = move || {
            other.send(libc::SIGKILL);
            other
        };
        let killer = match does {
            Does::Dies => {
                // Kills and reaps the process.
                drop(kill());
                None
            }
            _ => Some(thread::spawn(move || {
                thread::sleep(Duration::from_millis(500));
                kill()
            })),
        };
        let peer = node.connect(&theirs).unwrap();
        let begun = Instant::now();
        let result = wait(&mut node, peer);
        let took = begun.elapsed();
        println!("{rails} rails, {does:?}: {name}: {took:?}, {result:?}");
        drop(killer.map(|killer| killer.join().unwrap()));
        match result {
            Err(Error::Wait(WaitError::PeerFailed(failed, PeerError::Lost))) => {
                assert_eq!(failed, peer, "{name}");
            }
            Err(Error::Failed(Outcome::Failed(Fault::Peer(PeerError::Lost)))) => {}
            result => assert!(name == "shutdown" && result.is_ok(), "{name}: {result:?}"),
        }
        assert!(took < LIMIT, "{name}: {took:?}");
    };
    thread::scope(|scope| WAITS.map(|wait| _ = scope.spawn(move || run(wait))));
}

#[test]
fn waits_for_a_process_that_ended_before_end() {
    all_end(1, Does::Dies);
}

#[test]
fn waits_for_a_process_that_ends_without_progress_end() {
    all_end(1, Does::Stops);
}

#[test]
fn waits_for_a_process_that_ends_without_connecting_end() {
    all_end(1, Does::Polls);
}

#[test]
fn waits_for_a_process_that_ended_before_and_that_two_rails_would_reach_end() {
    all_end(2, Does::Dies);
}

#[test]
fn a_peer_that_connects_late_is_not_lost() {
    if let Err(error) = tcp(1).open() {
        return println!("SKIPPED a peer that connects late: {error}");
    }
    let run = |rails, does| {
        let (mut node, theirs, other) = start(rails, does);
        if does == Does::Pauses {
            other.send(libc::SIGSTOP);
        }
        let starter = thread::spawn(move || {
            thread::sleep(PAUSE);
            other.send(libc::SIGCONT);
            other
        });
        let peer = node.connect(&theirs).unwrap();
        node.send(peer, 7, b"early", Notice::Silent).unwrap();
        node.recv(Some(peer), 7, Tag::ZERO, &mut [0; 8], LONG).unwrap();
        node.quiet(peer, SOON).unwrap();
        let error = node.peer_error(peer).unwrap();
        assert!(matches!(error, None | Some(PeerError::Closed)), "{error:?}");
        node.close(SOON).unwrap();
        drop(starter.join().unwrap());
    };
    let cases = [1, 2].into_iter().flat_map(|n| [Does::Computes, Does::Pauses].map(|d| (n, d)));
    thread::scope(|scope| {
        for (rails, does) in cases {
            scope.spawn(move || run(rails, does));
        }
    });
}
