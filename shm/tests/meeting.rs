//! Many handshakes at once. Each handshake has its own deadline. At the limit, the least advanced
//! handshake is evicted.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use fishplate_shm::meeting::{HalfOpen, MOST, Meetings, Step, meet};

/// A handshake that expects the bytes of [`WORD`] one by one, and fails on any other byte.
#[derive(Debug)]
struct Word {
    stream: UnixStream,
    heard: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failed {
    Late,
    Byte(u8),
    HungUp,
    System(i32),
}

const WORD: &[u8] = &[b'h'; 256];

impl Word {
    fn new(socket: OwnedFd) -> Result<Word, Failed> {
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(true).map_err(|_| Failed::System(0))?;
        Ok(Word { stream, heard: 0 })
    }
}

impl HalfOpen for Word {
    type Met = UnixStream;
    type Error = Failed;
    const LATE: Failed = Failed::Late;

    fn system(code: i32) -> Failed {
        Failed::System(code)
    }

    fn step(mut self) -> Step<Self> {
        let mut byte = [0];
        while self.heard < WORD.len() {
            match self.stream.read(&mut byte) {
                Ok(1) if byte[0] == WORD[self.heard] => self.heard += 1,
                Ok(1) => return Step::Failed(Failed::Byte(byte[0])),
                Ok(_) => return Step::Failed(Failed::HungUp),
                Err(_) => return Step::Waits(self),
            }
        }
        Step::Met(self.stream)
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    fn events(&self) -> i16 {
        libc::POLLIN
    }

    fn heard(&self) -> u32 {
        self.heard as u32
    }

    fn who(&self) -> String {
        "somebody".into()
    }
}

fn listener(name: &str) -> (UnixListener, SocketAddr) {
    let address =
        SocketAddr::from_abstract_name(format!("meeting-{name}-{}", std::process::id())).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    listener.set_nonblocking(true).unwrap();
    (listener, address)
}

fn says(address: &SocketAddr, bytes: &[u8]) -> UnixStream {
    let mut stream = UnixStream::connect_addr(address).unwrap();
    stream.write_all(bytes).unwrap();
    stream
}

fn ended(stream: &mut UnixStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    stream.read(&mut [0]).is_ok_and(|n| n == 0)
}

#[test]
fn occasional_bytes_do_not_renew_the_deadline_of_a_handshake() {
    let (listener, address) = listener("deadline");
    let patience = Duration::from_secs(1);
    let mut meetings = Meetings::<Word>::new(patience);
    let mut slow = says(&address, b"h");
    thread::scope(|scope| {
        // At this rate the whole word takes five seconds. It would complete only if every byte
        // renewed the deadline.
        let trickle = scope.spawn(|| {
            while slow.write_all(&WORD[..1]).is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        while meetings.refused().is_empty() {
            let quick = Instant::now() + Duration::from_millis(10);
            assert!(meetings.next(listener.as_fd(), quick, Word::new).unwrap().is_none());
        }
        trickle.join().unwrap();
    });
    assert!(ended(&mut slow));
    // The next handshake has the full time limit.
    let _fast = says(&address, WORD);
    assert!(meetings.next(listener.as_fd(), Instant::now(), Word::new).unwrap().is_some());
}

#[test]
fn at_the_limit_the_oldest_handshake_with_the_least_progress_ends() {
    let (listener, address) = listener("evict");
    let mut meetings = Meetings::<Word>::new(Duration::from_secs(60));
    let mut far = says(&address, b"hh");
    let look = |meetings: &mut Meetings<Word>| {
        let turns = MOST / 8;
        (0..turns).find_map(|_| meetings.next(listener.as_fd(), Instant::now(), Word::new).unwrap())
    };
    assert!(look(&mut meetings).is_none());
    let mut silent: Vec<_> = (1..MOST).map(|_| says(&address, b"")).collect();
    assert!(look(&mut meetings).is_none());
    assert_eq!(meetings.refused(), [], "there is room for so many");
    let mut more: Vec<_> = (0..2).map(|_| says(&address, b"")).collect();
    assert!(look(&mut meetings).is_none());
    assert_eq!(
        meetings.refused(),
        [("somebody".to_owned(), Failed::Late), ("somebody".to_owned(), Failed::Late)]
    );
    assert!(silent[..2].iter_mut().all(ended) && !silent[2..].iter_mut().any(ended));
    assert!(!ended(&mut far) && !more.iter_mut().any(ended));
    far.set_nonblocking(false).unwrap();
    far.write_all(&WORD[2..]).unwrap();
    assert!(look(&mut meetings).is_some());
}

#[test]
fn the_last_failures_are_kept_by_name() {
    let (listener, address) = listener("refused");
    let mut meetings = Meetings::<Word>::new(Duration::from_secs(60));
    let _held: Vec<_> =
        (b'a'..b'a' + 5).chain(b'p'..b'p' + 8).map(|byte| says(&address, &[byte])).collect();
    for _ in 0..4 {
        assert!(meetings.next(listener.as_fd(), Instant::now(), Word::new).unwrap().is_none());
    }
    let why: Vec<_> = meetings.refused().into_iter().map(|(_, why)| why).collect();
    assert_eq!(why, (b'p'..b'p' + 8).map(Failed::Byte).collect::<Vec<_>>());
    drop(says(&address, b"hh"));
    assert!(meetings.next(listener.as_fd(), Instant::now(), Word::new).unwrap().is_none());
    assert_eq!(meetings.refused(), [("somebody".to_owned(), Failed::HungUp)]);
}

#[test]
fn a_single_handshake_ends_at_its_deadline() {
    let (here, mut there) = UnixStream::pair().unwrap();
    let quick = Instant::now() + Duration::from_millis(20);
    assert_eq!(meet(Word::new(here.into()).unwrap(), quick).map(drop), Err(Failed::Late));
    assert!(ended(&mut there));
    let (here, mut there) = UnixStream::pair().unwrap();
    there.write_all(WORD).unwrap();
    assert!(meet(Word::new(here.into()).unwrap(), Instant::now()).is_ok());
}
