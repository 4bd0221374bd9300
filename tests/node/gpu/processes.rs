//! Tests device memory between two real processes: the test binary runs itself again.

use std::env;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fishplate::core::engine::protocol::Received;
use fishplate::core::engine::tag::Tag;
use fishplate::core::error::{OpError, PeerError};
use fishplate::core::op::{Amo, AmoOp, Outcome};
use fishplate::node::{Error, Memory, Remote};
use fishplate::{Cmp, Issued, Job, Node, Notice, PeerId, Signal};

use super::super::SOON;
use super::super::port::free_port;
use super::{LEN, SIZES, open, pattern};

/// Environment variable with the address at which a child process meets its parent.
const PLACE: &str = "FISHPLATE_TEST_PLACE";

/// One process of a test, connected to the other process.
struct Process {
    node: Node,
    peer: PeerId,
    job: Job,
    /// The child process. `None` in the child itself.
    child: Option<Child>,
    device: Memory,
    words: Memory,
    theirs: Remote,
    their_words: Remote,
}

impl Process {
    /// Starts the other process, which runs only the test named `test`. Returns in both processes.
    fn new(test: &str) -> Process {
        let place = env::var(PLACE).ok();
        let child = place.is_none().then(|| {
            let (_, module) = module_path!().split_once("::").unwrap();
            let place = format!("127.0.0.1:{}", free_port());
            let mut child = Command::new(env::current_exe().unwrap());
            child.args([&format!("{module}::{test}"), "--exact", "--nocapture"]).env(PLACE, &place);
            (child.stdin(Stdio::null()).spawn().unwrap(), place)
        });
        let at = place.or(child.as_ref().map(|(_, place)| place.clone())).unwrap();
        let mut job = Job::join(at, 2, SOON).unwrap();
        let mut node = open();
        let peer = node.connect(job.exchange(node.address()).unwrap()).unwrap();
        let (device, words) = (node.alloc_device(LEN).unwrap(), node.alloc(LEN).unwrap());
        let handles = [node.handle(device).unwrap(), node.handle(words).unwrap()];
        let theirs = node.import(peer, job.exchange(&handles[0]).unwrap()).unwrap();
        let their_words = node.import(peer, job.exchange(&handles[1]).unwrap()).unwrap();
        assert!(node.reach(peer).unwrap().gpu);
        Process {
            node,
            peer,
            job,
            child: child.map(|(child, _)| child),
            device,
            words,
            theirs,
            their_words,
        }
    }

    fn barrier(&mut self) {
        self.job.barrier_with(|| _ = self.node.progress()).unwrap();
    }

    fn fill(&mut self, bytes: &[u8]) {
        self.node.write_device(self.device.at(0), bytes).unwrap();
    }

    fn seen(&mut self, len: usize) -> Vec<u8> {
        let mut seen = vec![0; len];
        self.node.read_device(self.device.at(0), &mut seen).unwrap();
        seen
    }

    /// Waits for an operation that reports its completion, and returns its outcome.
    fn end(&mut self, issued: Issued) -> Outcome {
        let Issued::Pending(token) = issued else { return Outcome::Done };
        let end = Instant::now() + SOON;
        loop {
            self.node.progress();
            if let Some(completion) = self.node.test(token).unwrap() {
                return completion.outcome;
            }
            // This call also checks that the peer is alive.
            self.node.peer_error(self.peer).unwrap();
            assert!(Instant::now() < end, "it does not complete");
        }
    }

    /// Closes this node, after both processes have finished.
    fn close(mut self) {
        self.barrier();
        self.node.close(SOON).unwrap();
        if let Some(mut child) = self.child {
            assert!(child.wait().unwrap().success());
        }
    }
}

#[test]
fn puts_and_gets_of_device_memory_between_two_processes() {
    let mut own = Process::new("puts_and_gets_of_device_memory_between_two_processes");
    let from = own.node.alloc_device(LEN).unwrap();
    let (me, other) = (own.job.rank(), 1 - own.job.rank());
    for (round, len) in (1..).zip(SIZES) {
        // Puts from this device to the peer's device, with a signal in host memory.
        own.node.write_device(from.at(0), &pattern(me + round, len)).unwrap();
        let arrived = Signal::set(own.their_words.at(0), round as u64);
        own.node.put_signal(from.slice(..len), own.theirs.at(0), arrived, Notice::Silent).unwrap();
        own.node.wait(own.words.at(0), Cmp::Eq, round as u64, Some(own.peer), SOON).unwrap();
        assert!(own.seen(len) == pattern(other + round, len), "{len} bytes put");
        // Gets from the peer's device to host memory, and to this device.
        for into in [own.words, from] {
            let issued =
                own.node.get(into.slice(..len), own.theirs.at(0), Notice::Report(0)).unwrap();
            assert_eq!(own.end(issued), Outcome::Done);
            let mut got = vec![0; len];
            match into == from {
                true => own.node.read_device(from.at(0), &mut got).unwrap(),
                false => own.node.read(own.words.at(0), &mut got).unwrap(),
            }
            assert!(got == pattern(me + round, len), "{len} bytes got");
        }
        own.barrier();
        // Puts from host memory to the peer's device, and gets from the peer's device to host
        // memory.
        own.node.write(own.words.at(0), &pattern(me + 100, len)).unwrap();
        own.node.put(own.words.slice(..len), own.theirs.at(0), Notice::Silent).unwrap();
        own.node.quiet(own.peer, SOON).unwrap();
        own.barrier();
        assert!(own.seen(len) == pattern(other + 100, len), "{len} bytes put from the host");
        own.node.put(own.device.slice(..len), own.their_words.at(0), Notice::Silent).unwrap();
        own.node.quiet(own.peer, SOON).unwrap();
        own.barrier();
        let mut got = vec![0; len];
        own.node.read(own.words.at(0), &mut got).unwrap();
        assert!(got == pattern(me + 100, len), "{len} bytes put into the host");
        own.node.store(own.words.at(0), 0).unwrap();
        own.barrier();
    }
    own.close();
}

#[test]
fn tagged_messages_from_and_into_device_memory_between_two_processes() {
    let mut own = Process::new("tagged_messages_from_and_into_device_memory_between_two_processes");
    let from = own.node.alloc_device(LEN).unwrap();
    let (me, other) = (own.job.rank(), 1 - own.job.rank());
    for (round, len) in (0..).zip(SIZES) {
        own.node.write_device(from.at(0), &pattern(me + round, len)).unwrap();
        let tag = round as u64;
        let request =
            own.node.post_recv(Some(own.peer), tag, Tag::ZERO, own.device.slice(..len), 0).unwrap();
        own.node.send(own.peer, tag, from.slice(..len), Notice::Silent).unwrap();
        let status = own.node.wait_recv(request, SOON).unwrap();
        assert_eq!((status.outcome, status.delivered), (Received::Ok, len as u64));
        assert!(own.seen(len) == pattern(other + round, len), "{len} bytes into the device");
        // Sends from the device to host memory, and back.
        own.node.send(own.peer, tag, from.slice(..len), Notice::Silent).unwrap();
        let mut got = vec![0; len];
        own.node.recv(Some(own.peer), tag, Tag::ZERO, &mut got, SOON).unwrap();
        assert!(got == pattern(other + round, len), "{len} bytes into the host");
        own.node.send(own.peer, tag, &got[..], Notice::Silent).unwrap();
        let request =
            own.node.post_recv(Some(own.peer), tag, Tag::ZERO, own.device.slice(..len), 0).unwrap();
        assert_eq!(own.node.wait_recv(request, SOON).unwrap().outcome, Received::Ok);
        assert!(own.seen(len) == pattern(me + round, len), "{len} bytes back from the host");
        own.node.quiet(own.peer, SOON).unwrap();
    }
    own.close();
}

/// The sender has copied the bytes to host memory that the device cannot access. Both ends read
/// such a message through bounce slots at the same time.
#[test]
fn long_messages_of_copied_bytes_into_device_memory_between_two_processes() {
    const LONG: usize = 6 << 20;
    let mut own =
        Process::new("long_messages_of_copied_bytes_into_device_memory_between_two_processes");
    let (me, other) = (own.job.rank(), 1 - own.job.rank());
    let into = own.node.alloc_device(LONG).unwrap();
    for round in 0..4 {
        own.node
            .send(own.peer, round as u64, &pattern(me + round, LONG)[..], Notice::Silent)
            .unwrap();
        let request =
            own.node.post_recv(Some(own.peer), round as u64, Tag::ZERO, into.slice(..), 0).unwrap();
        let status = own.node.wait_recv(request, SOON).unwrap();
        assert_eq!((status.outcome, status.delivered), (Received::Ok, LONG as u64));
        let mut seen = vec![0; LONG];
        own.node.read_device(into.at(0), &mut seen).unwrap();
        assert!(seen == pattern(other + round, LONG), "round {round}");
    }
    own.close();
}

#[test]
fn freed_memory_refuses_puts_and_the_peer_stays() {
    let mut own = Process::new("freed_memory_refuses_puts_and_the_peer_stays");
    if own.job.rank() == 0 {
        own.node.free(own.device).unwrap();
        own.barrier();
        own.barrier();
        // The freed memory can be allocated again once the peer has closed it.
        own.device = own.node.alloc_device(LEN).unwrap();
    } else {
        own.fill(&[5; 8192]);
        own.barrier();
        let quiet =
            own.node.wait(own.words.at(0), Cmp::Eq, 1, Some(own.peer), Duration::from_millis(100));
        assert!(matches!(quiet, Err(Error::Wait(_))));
        for len in [8, 8192] {
            let issued = own.node.put(own.device.slice(..len), own.theirs.at(0), Notice::Report(0));
            let outcome = issued.map(|issued| own.end(issued));
            assert!(matches!(outcome, Ok(Outcome::Failed(_))), "{outcome:?}");
        }
        assert_eq!(own.node.peer_error(own.peer), Ok(None));
        own.node.release(own.theirs).unwrap();
        own.barrier();
    }
    // Host memory still works.
    own.node.signal(Signal::set(own.their_words.at(0), 1), Notice::Silent).unwrap();
    own.node.wait(own.words.at(0), Cmp::Eq, 1, Some(own.peer), SOON).unwrap();
    own.close();
}

#[test]
fn a_killed_process_invalidates_only_its_own_device_memory() {
    let mut own = Process::new("a_killed_process_invalidates_only_its_own_device_memory");
    own.barrier();
    let Some(mut child) = own.child.take() else {
        loop {
            own.node.progress();
        }
    };
    let put = |own: &mut Process| {
        let issued = own.node.put(own.device.slice(..), own.theirs.at(0), Notice::Report(0));
        issued.map(|issued| own.end(issued))
    };
    assert_eq!(put(&mut own), Ok(Outcome::Done));
    let pending = own.node.put(own.device.slice(..), own.theirs.at(0), Notice::Report(1)).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    own.end(pending);
    let end = Instant::now() + SOON;
    while own.node.peer_error(own.peer).unwrap().is_none() {
        assert!(Instant::now() < end, "the death of the peer was not reported");
        own.node.progress();
    }
    assert_eq!(own.node.peer_error(own.peer), Ok(Some(PeerError::Died)));
    assert_eq!(put(&mut own), Err(OpError::PeerFailed(PeerError::Died)));
    own.node.disconnect(own.peer).unwrap();
    // The free does not wait for the dead process that had imported the memory.
    own.node.free(own.device).unwrap();
    let address = own.node.address().to_vec();
    let me = own.node.connect(&address).unwrap();
    let device = own.node.alloc_device(LEN).unwrap();
    let there = own.node.import(me, own.node.handle(device).unwrap()).unwrap();
    own.node.put(own.words.slice(..), there.at(0), Notice::Silent).unwrap();
    own.node.quiet(me, SOON).unwrap();
    own.node.close(SOON).unwrap();
}

/// Signals, adds and waits on words in both devices.
#[test]
fn signals_and_atomics_on_words_of_a_device_between_two_processes() {
    const ROUNDS: u64 = 50;
    let mut own = Process::new("signals_and_atomics_on_words_of_a_device_between_two_processes");
    let (me, other) = (own.job.rank(), 1 - own.job.rank());
    let from = own.node.alloc_device(LEN).unwrap();
    own.fill(&[0; 64]);
    own.barrier();
    let add = |width, operand| Amo { op: AmoOp::Add, width, operand, compare: 0 };
    for (round, len) in (1..=ROUNDS).zip(SIZES.into_iter().cycle()) {
        let len = len.min(LEN - 64);
        own.node.write_device(from.at(0), &pattern(me + round as usize, len)).unwrap();
        // Sets and adds alternately.
        let signal = match round % 2 {
            0 => Signal::set(own.theirs.at(8), round),
            _ => Signal::add(own.theirs.at(8), 1),
        };
        own.node.put_signal(from.slice(..len), own.theirs.at(64), signal, Notice::Silent).unwrap();
        own.node.amo(own.theirs.at(17), add(1, 3), Notice::Silent).unwrap();
        let before = own.node.fetch_add(own.theirs.at(24), round, SOON).unwrap();
        assert_eq!(before, round * (round - 1) / 2, "round {round}");
        assert_eq!(
            own.node.wait(own.device.at(8), Cmp::Ge, round, Some(own.peer), SOON),
            Ok(round)
        );
        let mut seen = vec![0; len];
        own.node.read_device(own.device.at(64), &mut seen).unwrap();
        assert!(seen == pattern(other + round as usize, len), "round {round}: {len} bytes");
        own.barrier();
    }
    own.node.quiet(own.peer, SOON).unwrap();
    own.barrier();
    let word = |value: u64| value.to_ne_bytes();
    let bytes = [[0; 8], word(ROUNDS), [0, (3 * ROUNDS) as u8, 0, 0, 0, 0, 0, 0]].concat();
    assert_eq!(own.seen(24), bytes);
    own.close();
}
