//! Strangers and hostile peers attack a bootstrap listener, a wire, and the processes of a job.
//! While a call waits, it must call the closure that makes progress often enough.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::thread;
use std::time::{Duration, Instant};

use fishplate::Job;
use fishplate::bootstrap::{BootstrapError, Card, Listener, RailCard, connect};
use fishplate::job::Leader;

use crate::forks::{Forks, tell};
use crate::meter::{Meter, Took, repeat};
use crate::port::free_port;
use crate::{SETUP, is_wanted, note, soon};

/// The victim of a trick.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Against {
    /// A bootstrap listener.
    Listener,
    /// A wire. The hostile process has completed the handshake.
    Wire,
    /// Rank 0 of a job that is being formed.
    Meeting,
    /// Rank 0 of a job in an exchange. The hostile process is a member.
    Leader,
    /// A member of a job. The hostile process is rank 0.
    Member,
}
use Against::{Leader as ToLeader, Listener as ToListener, Meeting, Member, Wire};

/// The name of a trick, its victim, and the function that plays it.
type Trick = (&'static str, Against, fn(SocketAddr));

/// Maximum interval between two calls of a closure in a job, in addition to [`LIMIT`]. Rank 0
/// checks at this interval.
const CHECKS: Duration = Duration::from_millis(50);

fn card(id: u64) -> Card {
    let rail = RailCard {
        provider: "tcp".into(),
        interface: "lo".into(),
        fabric: "127.0.0.0/8".into(),
        address: vec![1, 2, 3],
        mbit: 1000,
    };
    Card {
        id,
        transport: 0,
        window: 16,
        contexts: 1,
        first_sequence: 0,
        user: 0,
        rails: vec![rail],
    }
}

/// Connects. Retries until a listener exists.
fn dial(at: SocketAddr) -> TcpStream {
    let end = soon();
    let stream = loop {
        match TcpStream::connect(at) {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        thread::sleep(Duration::from_micros(200));
    };
    stream.set_nodelay(true).unwrap();
    stream
}

/// Sends bytes over many new connections, which stay open.
fn pour(at: SocketAddr, count: usize, bytes: &[u8]) {
    for _ in 0..count {
        let mut stream = dial(at);
        let _ = stream.write_all(bytes);
        std::mem::forget(stream);
    }
}

fn byte_by_byte(stream: &mut TcpStream, bytes: &[u8]) {
    for byte in bytes {
        if stream.write_all(&[*byte]).is_err() {
            return;
        }
    }
}

/// Sends bytes `count` times, or until the socket is full. Then ends the stream. Does not read.
fn flood(mut stream: TcpStream, count: usize, bytes: &[u8]) {
    stream.set_write_timeout(Some(Duration::from_millis(5))).unwrap();
    let _ = stream.write_all(&bytes.repeat(count));
    let _ = stream.shutdown(Shutdown::Write);
    std::mem::forget(stream);
}

/// Encodes a message of a wire, with the given version and length in its header.
fn wire_message(version: u16, len: u32, payload: &[u8]) -> Vec<u8> {
    [&b"FPBS"[..], &version.to_le_bytes(), &[0, 0], &len.to_le_bytes(), payload].concat()
}

/// Sends a greeting with a nonce. Returns the listener's nonce.
fn greet(stream: &mut TcpStream) -> [u8; 16] {
    stream.write_all(&wire_message(3, 16, &[7; 16])).unwrap();
    let mut theirs = [0; 28];
    stream.read_exact(&mut theirs).unwrap();
    theirs[12..].try_into().unwrap()
}

/// Exchanges greetings, then sends these bytes instead of a card.
fn show(at: SocketAddr, card: &[u8]) {
    let mut stream = dial(at);
    let nonce = greet(&mut stream);
    let card = [&nonce, card].concat();
    stream.write_all(&wire_message(3, card.len() as u32, &card)).unwrap();
    std::mem::forget(stream);
}

/// Connects to a listener correctly. Returns the wire's socket.
fn below(at: SocketAddr) -> TcpStream {
    let (wire, _) = connect(&at.to_string(), &card(2), soon()).unwrap();
    let socket = wire.as_fd().try_clone_to_owned().unwrap().into();
    std::mem::forget(wire);
    socket
}

/// The kinds of frames of a job.
const DATA: u32 = 0;
const MISSING: u32 = 1;
const WELCOME: u32 = 4;
const RANK: u32 = 6;

/// The first bytes that a member sends: the magic, then the zeros of a job without a cookie.
const HELLO: [u8; 40] = {
    let mut hello = [0; 40];
    let (mut at, magic) = (0, b"FPjob\0\0\x01");
    while at < magic.len() {
        hello[at] = magic[at];
        at += 1;
    }
    hello
};

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Joins a job of two ranks correctly.
fn member(at: SocketAddr) -> TcpStream {
    let mut stream = dial(at);
    stream.write_all(&HELLO).unwrap();
    stream.read_exact(&mut [0; 8]).unwrap();
    stream.write_all(&words(&[2, u32::MAX])).unwrap();
    let mut bytes = [0; 12];
    loop {
        stream.read_exact(&mut bytes[..8]).unwrap();
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let (kind, len) = (word(0), word(4));
        stream.read_exact(&mut vec![0; len as usize]).unwrap();
        if kind == RANK {
            return stream;
        }
    }
}

/// Leads a job of two ranks correctly.
fn leader() -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    tell(listener.local_addr().unwrap().to_string().as_bytes());
    let mut stream = listener.accept().unwrap().0;
    stream.read_exact(&mut [0; 40]).unwrap();
    stream.write_all(&words(&[WELCOME, 0])).unwrap();
    stream.read_exact(&mut [0; 8]).unwrap();
    stream.write_all(&words(&[MISSING, 4, 0, RANK, 4, 1])).unwrap();
    stream
}

fn stop() {
    tell(b"played");
    // SAFETY: the call takes only a number. The signal stops this process, which is killed later.
    unsafe { libc::raise(libc::SIGSTOP) };
}

/// Closes connections with a reset.
fn reset(at: SocketAddr) {
    for _ in 0..100 {
        let stream = dial(at);
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        let len = size_of_val(&linger) as libc::socklen_t;
        let value = (&raw const linger).cast();
        // SAFETY: `linger` lives during the call, and its size is passed with it.
        unsafe {
            libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, value, len)
        };
        let _ = (&stream).write(b"FP");
    }
}

pub const TRICKS: &[Trick] = &[
    ("connections that say nothing", ToListener, |at| pour(at, 100, &[])),
    ("connections of noise", ToListener, |at| pour(at, 20, &[0xee; 60_000])),
    ("half a header", ToListener, |at| pour(at, 70, b"FPBS\x03")),
    ("a message of four gigabytes", ToListener, |at| pour(at, 1, &wire_message(3, u32::MAX, &[]))),
    ("another version", ToListener, |at| pour(at, 1, &wire_message(99, 16, &[7; 16]))),
    ("a greeting byte by byte", ToListener, |at| {
        let mut stream = dial(at);
        byte_by_byte(&mut stream, &wire_message(3, 16, &[7; 16]));
        std::mem::forget(stream);
    }),
    ("its own bytes sent back", ToListener, |at| {
        let mut stream = dial(at);
        let mut theirs = [0; 28];
        stream.read_exact(&mut theirs).unwrap();
        stream.write_all(&theirs).unwrap();
        std::mem::forget(stream);
    }),
    ("a card cut short", ToListener, |at| show(at, &[1, 0, 0, 0, 0])),
    ("a card of noise", ToListener, |at| show(at, &[0xee; 60_000])),
    ("a card that does not agree", ToListener, |at| {
        show(at, &Card { window: 32, ..card(2) }.encode().unwrap());
    }),
    ("messages that never end", ToListener, |at| {
        let mut stream = dial(at);
        greet(&mut stream);
        flood(stream, 20_000, &wire_message(3, 0, &[]));
    }),
    ("connections that close at once", ToListener, |at| (0..100).for_each(|_| drop(dial(at)))),
    ("connections that are reset", ToListener, reset),
    ("stopped in mid-greeting", ToListener, |at| {
        let mut stream = dial(at);
        stream.write_all(b"FPBS").unwrap();
        stop();
    }),
    ("a message byte by byte", Wire, |at| {
        byte_by_byte(&mut below(at), &wire_message(3, 20_000, &[7; 20_000]));
    }),
    ("a flood of messages", Wire, |at| flood(below(at), 20_000, &wire_message(3, 10, &[7; 10]))),
    ("half a message", Wire, |at| {
        below(at).write_all(&wire_message(3, 60_000, &[7; 30_000])).unwrap()
    }),
    ("a message too long", Wire, |at| {
        below(at).write_all(&wire_message(3, 1 << 17, &[7; 9])).unwrap()
    }),
    ("strangers of a job that say nothing", Meeting, |at| pour(at, 100, &[])),
    ("strangers of a job that make noise", Meeting, |at| pour(at, 20, &[0xee; 60_000])),
    ("a wrong cookie", Meeting, |at| pour(at, 70, &HELLO)),
    ("half of a hello", Meeting, |at| pour(at, 70, &HELLO[..9])),
    ("a hello byte by byte", Meeting, |at| byte_by_byte(&mut dial(at), &HELLO)),
    ("strangers of a job that close at once", Meeting, |at| (0..100).for_each(|_| drop(dial(at)))),
    ("strangers of a job that are reset", Meeting, reset),
    ("a stranger of a job that is stopped", Meeting, |at| {
        let mut stream = dial(at);
        stream.write_all(b"FPj").unwrap();
        stop();
    }),
    ("a contribution of four gigabytes", ToLeader, |at| {
        member(at).write_all(&words(&[DATA, u32::MAX])).unwrap();
    }),
    ("a flood of contributions", ToLeader, |at| flood(member(at), 1000, &words(&[DATA, 0]))),
    ("a contribution byte by byte", ToLeader, |at| {
        let mut stream = member(at);
        tell(b"played");
        byte_by_byte(&mut stream, &[words(&[DATA, 20_000]), vec![7; 20_000]].concat());
    }),
    ("a flood of missing ranks", Member, |_| {
        flood(leader(), 20_000, &words(&[MISSING, 8, 1, 1]));
    }),
    ("an answer byte by byte", Member, |_| {
        let mut stream = leader();
        tell(b"played");
        byte_by_byte(&mut stream, &[words(&[DATA, 20_000]), vec![7; 20_000]].concat());
    }),
    ("noise from rank 0", Member, |_| leader().write_all(&[0xee; 60_000]).unwrap()),
];

/// Runs the victim of a trick. Returns the longest call, or the longest time between two calls of
/// the progress closure.
fn suffers(hostile: &mut Forks, trick: usize) -> Took {
    let (name, against, _) = TRICKS[trick];
    let start = |hostile: &mut Forks, at: SocketAddr| {
        hostile.fork(&[&[SETUP, trick as u8], at.to_string().as_bytes()].concat());
    };
    let local = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
    let mut meter = Meter::new();
    match against {
        ToListener => {
            let mut listener = Listener::bind("127.0.0.1:0").unwrap();
            let at = local(listener.port().unwrap());
            start(hostile, at);
            let (mut honest, end) = (None, soon());
            loop {
                match meter.call("accept", || listener.accept(&card(1), Instant::now())) {
                    Err(BootstrapError::Deadline) => thread::yield_now(),
                    Err(error) => panic!("{name}: {error}"),
                    Ok((_, theirs)) => break assert_eq!(theirs, card(3)),
                }
                assert!(Instant::now() < end, "{name}: the honest peer did not meet the listener");
                if honest.is_none() && hostile.heard().is_some() {
                    let honest_card = card(3);
                    honest =
                        Some(thread::spawn(move || connect(&at.to_string(), &honest_card, soon())));
                }
            }
            honest.expect("it has met the listener").join().unwrap().unwrap();
        }
        Wire => {
            let mut listener = Listener::bind("127.0.0.1:0").unwrap();
            start(hostile, local(listener.port().unwrap()));
            let (mut wire, _) = listener.accept(&card(1), soon()).unwrap();
            let end = Instant::now() + Duration::from_millis(100);
            for _ in 0..50 {
                meter.begin();
                let idle = || {
                    meter.lap("exchange");
                    Some(0)
                };
                if wire.exchange(b"ours", end, idle).is_err() {
                    break;
                }
            }
        }
        Meeting => {
            let leader = Leader::open().unwrap();
            let id = leader.id();
            // The port of the id follows the magic, the version and a count.
            start(hostile, local(u16::from_le_bytes([id.as_bytes()[6], id.as_bytes()[7]])));
            meter.begin();
            let mut honest = None;
            let check = || {
                meter.lap("lead");
                if honest.is_none() && hostile.heard().is_some() {
                    honest = Some(thread::spawn(move || {
                        Job::follow(&id, 1, 2, Duration::from_secs(20))
                    }));
                }
                Ok(())
            };
            leader.lead_while(2, Duration::from_secs(20), check).unwrap();
            honest.expect("it has joined").join().unwrap().unwrap();
            meter.longest.0 = meter.longest.0.saturating_sub(CHECKS);
        }
        ToLeader | Member => {
            let end = soon();
            let at = match against {
                ToLeader => local(free_port()),
                _ => {
                    start(hostile, local(0));
                    loop {
                        if let Some(at) = hostile.heard() {
                            break std::str::from_utf8(&at).unwrap().parse().unwrap();
                        }
                        assert!(Instant::now() < end, "{name}: no hostile process");
                    }
                }
            };
            if against == ToLeader {
                // The hostile process retries until this process listens.
                start(hostile, at);
            }
            let mut job = Job::join(at, 2, Duration::from_secs(20)).unwrap();
            // Waits until the trick is played, so that a flood is in the socket.
            while hostile.heard().is_none() {
                assert!(Instant::now() < end, "{name}: not played");
            }
            meter.begin();
            let mut goes_on = true;
            while goes_on {
                // A job calls the closure 64 times in a row, so only every 64th call ends a lap.
                let mut calls = 0;
                let meanwhile = || {
                    calls += 1;
                    if calls % 64 == 0 {
                        meter.lap("allgather");
                    }
                };
                goes_on = job.allgather_with(&[1], meanwhile).is_ok();
                meter.lap("allgather");
            }
        }
    }
    meter.longest
}

#[test]
fn no_trick_delays_those_who_wait_at_setup() {
    let mut hostile = Forks::begin();
    let mut too_long = vec![];
    for (at, (name, ..)) in TRICKS.iter().enumerate().filter(|(_, trick)| is_wanted(trick.0)) {
        note(name, repeat(|| suffers(&mut hostile, at)), &mut too_long);
    }
    assert!(TRICKS.len() >= 30);
    assert!(too_long.is_empty(), "too long: {too_long:#?}");
}
