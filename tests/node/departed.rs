//! Tests waits for a peer over libfabric's tcp whose process or node ends while no post to it is
//! outstanding, and waits for a peer that only stops. The peer is another process: the test binary
//! runs itself again.

use std::env;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use fishplate::config::Settings;
use fishplate::core::engine::tag::Tag;
use fishplate::core::error::{PeerError, WaitError};
use fishplate::core::op::Outcome;
use fishplate::node::{Error, Memory, Remote};
use fishplate::{Cmp, Job, Node, Notice, PeerId, Signal};

use super::port::free_port;
use super::{SOON, WORKER, tcp};

/// Environment variables of the child process: where it meets its parent, its number of rails, and
/// what it does then.
const PLACE: &str = "FISHPLATE_TEST_DEPARTED";
const RAILS: &str = "FISHPLATE_TEST_RAILS";
const DOES: &str = "FISHPLATE_TEST_DOES";

const LEN: usize = 1 << 20;

/// What the other process does once it is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    /// Is stopped, and then killed.
    Dies,
    /// Starts a program that lives on, and dies as above.
    Spawns,
    /// Drops its node, and lives on.
    Drops,
    /// Is stopped for [`PAUSE`]. Then it signals.
    Stops,
    /// Makes no calls for [`PAUSE`]. Then it signals.
    Computes,
    /// Begins to read more than sockets hold, and then computes. So what is sent to it waits behind
    /// the answer.
    Reads,
}

impl Does {
    /// Returns the length of each side's memory.
    fn len(self) -> usize {
        if self == Does::Reads { 64 << 20 } else { LEN }
    }
}

/// How long the other process makes no progress.
const PAUSE: Duration = Duration::from_secs(6);

/// The deadline of the process that waits for a living peer. It must not expire, although it is
/// shorter than [`PAUSE`].
const DEADLINE: Duration = Duration::from_secs(2);

/// One of the two processes: its node, its peer, and their memory.
struct Half {
    node: Node,
    peer: PeerId,
    inbox: Memory,
    there: Remote,
    job: Job,
}

impl Half {
    /// Connects to the other process, and exchanges more messages with it than those that a new
    /// peer gets with a completion.
    fn new(place: &str, rails: usize, deadline: Duration, len: usize) -> Half {
        let mut job = Job::join(place, 2, SOON).unwrap();
        let settings = Settings {
            providers: vec!["tcp".into()],
            interfaces: vec!["lo".into(); rails],
            deadline,
            ..Settings::DEFAULT
        };
        let mut node = tcp(rails).settings(settings).open().unwrap();
        let peer = node.connect(job.exchange(node.address()).unwrap()).unwrap();
        let inbox = node.alloc(len).unwrap();
        let handle = node.handle(inbox).unwrap();
        let there = node.import(peer, job.exchange(&handle).unwrap()).unwrap();
        let mut half = Half { node, peer, inbox, there, job };
        for _ in 0..20 {
            half.node.send(peer, 1, b"first", Notice::Silent).unwrap();
            half.node.recv(Some(peer), 1, Tag::ZERO, &mut [0; 8], SOON).unwrap();
        }
        half.node.quiet(peer, SOON).unwrap();
        half.job.barrier_with(|| _ = half.node.progress()).unwrap();
        // Without progress, so that the other process takes nothing that is sent afterwards.
        half.job.barrier_with(|| ()).unwrap();
        half
    }

    fn signal(&mut self) -> Result<(), Error> {
        self.node.signal(Signal::set(self.there.at(0), 1), Notice::Silent)?;
        Ok(())
    }

    fn await_signal(&mut self, timeout: Duration) -> Result<(), Error> {
        self.node.wait(self.inbox.at(0), Cmp::Eq, 1, Some(self.peer), timeout).map(|_| ())
    }
}

/// The other process. It is killed when this is dropped.
pub(super) struct Other(Child);

impl Other {
    /// Starts a test of this binary in a process of its own, with these variables.
    pub(super) fn start(test: &str, variables: &[(&str, &str)]) -> Other {
        let (_, test) = test.split_once("::").unwrap();
        let mut child = Command::new(env::current_exe().unwrap());
        child.args([test, "--exact", "--nocapture"]).envs(variables.iter().copied());
        Other(child.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap())
    }

    pub(super) fn send(&self, signal: i32) {
        // SAFETY: the call takes no pointers. The process is a child that nothing has reaped.
        assert_eq!(unsafe { libc::kill(self.0.id() as i32, signal) }, 0);
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

/// Starts the other process, and connects to it.
fn start(rails: usize, does: Does, deadline: Duration) -> (Half, Other) {
    let place = format!("127.0.0.1:{}", free_port());
    let (count, does_so) = (rails.to_string(), format!("{does:?}"));
    let variables = [(PLACE, &*place), (RAILS, &*count), (DOES, &*does_so)];
    let other = Other::start(concat!(module_path!(), "::child"), &variables);
    (Half::new(&place, rails, deadline, does.len()), other)
}

/// The program of the other process.
#[test]
fn child() {
    let Ok(place) = env::var(PLACE) else { return };
    // Nodes of the parent process may have had new connections when it started this one.
    for socket in inheritable() {
        // SAFETY: the call accesses no memory.
        assert_eq!(unsafe { libc::fcntl(socket, libc::F_SETFD, libc::FD_CLOEXEC) }, 0);
    }
    let all = [Does::Dies, Does::Spawns, Does::Drops, Does::Stops, Does::Computes, Does::Reads];
    let wanted = env::var(DOES).unwrap();
    let does = all.into_iter().find(|does| format!("{does:?}") == wanted).unwrap();
    let rails = env::var(RAILS).unwrap().parse().unwrap();
    let mut half = Half::new(&place, rails, SOON, does.len());
    match does {
        Does::Dies => {}
        Does::Spawns => {
            let begun = Instant::now();
            while !inheritable().is_empty() && begun.elapsed() < SOON {
                _ = half.node.peer_error(half.peer);
            }
            // The program `cat` ends once the parent closes its standard input.
            let status = Command::new("sh").args(["-c", "exec 3<&0; cat <&3 &"]).status();
            assert!(status.unwrap().success());
            half.job.barrier_with(|| ()).unwrap();
        }
        Does::Drops => drop(half.node),
        Does::Stops | Does::Computes | Does::Reads => {
            if does == Does::Reads {
                let whole = half.inbox.slice(..);
                half.node.get(whole, half.there.at(0), Notice::Silent).unwrap();
            }
            thread::sleep(if does == Does::Stops { PAUSE / 6 } else { PAUSE });
            half.signal().unwrap();
            half.node.quiet(half.peer, SOON).unwrap();
        }
    }
    // Until the parent has finished.
    _ = std::io::stdin().read(&mut [0]);
}

/// Returns the TCP sockets that a program would inherit from this process.
fn inheritable() -> Vec<i32> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers = entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse());
    let inherited = |fd: &i32| {
        let (mut domain, mut len) = (0i32, size_of::<i32>() as u32);
        // SAFETY: the first call accesses no memory, and the second one writes at most `len` bytes.
        unsafe {
            let flags = libc::fcntl(*fd, libc::F_GETFD);
            let into = (&raw mut domain).cast();
            libc::getsockopt(*fd, libc::SOL_SOCKET, libc::SO_DOMAIN, into, &mut len);
            flags >= 0 && flags & libc::FD_CLOEXEC == 0 && domain == libc::AF_INET
        }
    };
    numbers.map(Result::unwrap).filter(inherited).collect()
}

/// Longer than any wait takes.
const LONG: Duration = Duration::from_secs(60);

/// Time within which a wait must end. It took at most 3 s, beside a build.
const LIMIT: Duration = Duration::from_secs(15);

/// A call that waits for the peer. Returns its result.
type Wait = fn(&mut Half) -> Result<(), Error>;

/// Names, whether the peer may satisfy the wait just before it ends, and the calls.
const WAITS: [(&str, bool, Wait); 9] = [
    ("a signal", false, |half| half.await_signal(LONG)),
    ("a message", false, |half| {
        half.node.recv(Some(half.peer), 7, Tag::ZERO, &mut [0; 8], LONG).map(|_| ())
    }),
    ("calls of peer_error", false, |half| {
        let begun = Instant::now();
        while begun.elapsed() < LONG {
            half.node.progress();
            if let Some(why) = half.node.peer_error(half.peer)? {
                return Err(Error::Wait(WaitError::PeerFailed(half.peer, why)));
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }),
    ("quiet", true, |half| {
        half.signal()?;
        half.node.quiet(half.peer, LONG)
    }),
    ("quiet_all", true, |half| {
        half.node.send(half.peer, 7, b"short", Notice::Silent)?;
        half.node.quiet_all(LONG)
    }),
    ("an atomic", true, |half| half.node.fetch_add(half.there.at(0), 1, LONG).map(|_| ())),
    ("a long message", true, |half| {
        half.node.send(half.peer, 7, &[7; LEN], Notice::Silent)?;
        half.node.quiet(half.peer, LONG)
    }),
    ("a get", true, |half| {
        half.node.get(half.inbox.slice(..8), half.there.at(0), Notice::Silent)?;
        half.node.quiet(half.peer, LONG)
    }),
    ("close", true, |half| half.node.shutdown(LONG)),
];

/// Runs all waits at once, each with its own peer.
fn all_end(rails: usize, does: Does) {
    if let Err(error) = tcp(rails).open() {
        return println!("SKIPPED waits for a peer that is gone: {error}");
    }
    let run = |(name, may_succeed, wait): (&str, bool, Wait)| {
        let (mut half, other) = start(rails, does, SOON);
        if does == Does::Spawns {
            half.job.barrier_with(|| ()).unwrap();
        }
        let dies = matches!(does, Does::Dies | Does::Spawns);
        if dies {
            other.send(libc::SIGSTOP);
        }
        let begun = Instant::now();
        let killer = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            if dies {
                other.send(libc::SIGKILL);
            }
            other
        });
        let result = wait(&mut half);
        let took = begun.elapsed();
        println!("{rails} rails, {does:?}: {name}: {took:?}, {result:?}");
        drop(killer.join().unwrap());
        let lost = |why| matches!(why, PeerError::Lost | PeerError::Rail(_) | PeerError::Closed);
        match result {
            Err(Error::Wait(WaitError::PeerFailed(peer, why))) => {
                assert!(peer == half.peer && lost(why), "{name}: {why}");
            }
            Err(Error::Failed(Outcome::Failed(_) | Outcome::Unknown(_))) => {}
            // The provider failed the post before it lost the connection.
            Err(Error::Wait(WaitError::Failed(1))) => {}
            result => assert!(may_succeed && result.is_ok(), "{name}: {result:?}"),
        }
        assert!(took < LIMIT, "{name}: {took:?}");
    };
    thread::scope(|scope| WAITS.map(|wait| _ = scope.spawn(move || run(wait))));
}

#[test]
fn waits_for_a_killed_process_end() {
    all_end(1, Does::Dies);
}

#[test]
fn waits_for_a_killed_process_that_two_rails_reached_end() {
    all_end(2, Does::Dies);
}

#[test]
fn waits_for_a_killed_process_whose_child_lives_on_end() {
    all_end(1, Does::Spawns);
}

#[test]
fn waits_for_a_node_that_was_dropped_end() {
    all_end(1, Does::Drops);
}

#[test]
fn waits_for_a_node_that_was_dropped_and_that_two_rails_reached_end() {
    all_end(2, Does::Drops);
}

#[test]
fn a_peer_that_stops_for_longer_than_the_deadline_is_not_lost() {
    if let Err(error) = tcp(1).open() {
        return println!("SKIPPED a peer that stops: {error}");
    }
    let run = |rails, does| {
        let (mut half, other) = start(rails, does, DEADLINE);
        if does == Does::Stops {
            other.send(libc::SIGSTOP);
        }
        let begun = Instant::now();
        let starter = thread::spawn(move || {
            thread::sleep(PAUSE);
            other.send(libc::SIGCONT);
            other
        });
        // A numbered message in flight, too.
        half.signal().unwrap();
        // Deadlines expire only with many polls, and a wait that sleeps makes few.
        while does == Does::Reads && begun.elapsed() < PAUSE / 6 * 5 {
            half.node.progress();
            assert_eq!(half.node.peer_error(half.peer), Ok(None), "{rails} rails");
            thread::sleep(Duration::from_millis(1));
        }
        half.await_signal(LONG).unwrap();
        assert!(begun.elapsed() > 2 * DEADLINE || WORKER, "{:?}", begun.elapsed());
        half.node.quiet(half.peer, SOON).unwrap();
        assert_eq!(half.node.peer_error(half.peer), Ok(None));
        drop(starter.join().unwrap());
    };
    let all = [Does::Stops, Does::Computes, Does::Reads];
    let cases = [1, 2].into_iter().flat_map(|rails| all.map(|does| (rails, does)));
    thread::scope(|scope| {
        for (rails, does) in cases {
            scope.spawn(move || run(rails, does));
        }
    });
}
