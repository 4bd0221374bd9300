use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::*;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn at_once() -> Instant {
    Instant::now() + Duration::from_millis(30)
}

fn card(id: u64) -> Card {
    let rail = RailCard {
        provider: "tcp".into(),
        interface: "lo".into(),
        fabric: String::new(),
        address: vec![1, 2],
        mbit: 0,
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

fn listener() -> (Listener, String) {
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let at = format!("127.0.0.1:{}", listener.port().unwrap());
    (listener, at)
}

fn pair() -> (Wire, Wire) {
    let (mut listener, at) = listener();
    thread::scope(|scope| {
        let other = scope.spawn(move || connect(&at, &card(2), soon()).unwrap());
        let (here, theirs) = listener.accept(&card(1), soon()).unwrap();
        assert_eq!(theirs, card(2));
        let (there, theirs) = other.join().unwrap();
        assert_eq!(theirs, card(1));
        (here, there)
    })
}

#[test]
fn both_sides_send_long_messages_at_once() {
    let (mut here, mut there) = pair();
    for len in [0, 1, 4096, MESSAGE_MAX] {
        let (a, b) = (vec![1; len], vec![2; len]);
        thread::scope(|scope| {
            let (a, b) = (&a, &b);
            let there = &mut there;
            let other = scope.spawn(move || there.exchange(b, soon(), || Some(0)));
            let mut idled = 0u32;
            let heard = here.exchange(a, soon(), || {
                idled += 1;
                Some(0)
            });
            assert!(heard == Ok(b.clone()) && other.join().unwrap() == Ok(a.clone()));
        });
    }
    let long = vec![0; MESSAGE_MAX + 1];
    assert!(matches!(
        here.exchange(&long, soon(), || Some(0)),
        Err(BootstrapError::TooLong { .. })
    ));
}

#[test]
fn an_absent_peer_is_reported_at_the_deadline() {
    let (mut listener, at) = listener();
    assert_eq!(listener.accept(&card(1), at_once()).unwrap_err(), BootstrapError::Deadline);
    drop(listener);
    let refused = connect(&at, &card(1), at_once()).unwrap_err();
    assert_eq!(refused, BootstrapError::System(111), "ECONNREFUSED");
    for wrong in ["nonsense", "127.0.0.1", "127.0.0.1:99999", ""] {
        assert_eq!(
            connect(wrong, &card(1), at_once()).unwrap_err(),
            BootstrapError::Address,
            "{wrong}"
        );
        assert!(matches!(Listener::bind(wrong), Err(BootstrapError::Address)), "{wrong}");
    }
}

#[test]
fn waits_run_the_closure_and_end_at_the_deadline() {
    let (mut here, _there) = pair();
    let mut turns = 0;
    let result = here.exchange(b"hello", at_once(), || {
        turns += 1;
        Some(1)
    });
    assert_eq!(result, Err(BootstrapError::Deadline));
    assert!(turns > 1);
    assert_eq!(here.exchange(b"hello", soon(), || None), Err(BootstrapError::Stopped));
}

#[test]
fn a_closed_connection_is_detected_after_its_last_message() {
    let (mut here, mut there) = pair();
    let lifeline = here.lifeline().unwrap();
    assert!(here.is_open() && lifeline.holds());
    assert_eq!(there.exchange(b"last words", at_once(), || Some(0)), Err(BootstrapError::Deadline));
    assert!(here.is_open());
    assert_eq!(here.exchange(b"", soon(), || Some(0)).unwrap(), b"last words");
    drop(there);
    let deadline = soon();
    while lifeline.holds() || here.is_open() {
        assert!(Instant::now() < deadline);
    }
    assert_eq!(here.exchange(b"", soon(), || Some(0)), Err(BootstrapError::HungUp));
}

/// Returns the two ends of a socket pair. The test itself drives the second end.
fn half() -> (Wire, UnixStream) {
    let (here, there) = UnixStream::pair().unwrap();
    (Wire::over(OwnedFd::from(here)), there)
}

/// Returns a message with its header.
fn framed(version: u16, len: u32, message: &[u8]) -> Vec<u8> {
    let mut bytes = b"FPBS".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend([0; 2]);
    bytes.extend(len.to_le_bytes());
    bytes.extend(message);
    bytes
}

fn said(message: &[u8]) -> Vec<u8> {
    framed(WIRE_VERSION, message.len() as u32, message)
}

/// The other side sends two messages at once, reads our last message, and closes.
#[test]
fn a_message_sent_before_the_other_side_left_is_received() {
    let (mut here, mut there) = half();
    there.write_all(&[said(b"first"), said(b"last")].concat()).unwrap();
    // Half-closes the connection, so that we see the end of stream before the peer has read our
    // message.
    there.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(!here.is_open());
    assert_eq!(here.exchange(b"", soon(), || Some(0)).unwrap(), b"first");
    assert_eq!(here.exchange(b"done", soon(), || Some(0)).unwrap(), b"last");
    assert_eq!(here.exchange(b"", soon(), || Some(0)), Err(BootstrapError::HungUp));
}

#[test]
fn a_message_that_arrives_with_the_end_of_stream_is_received() {
    let (mut here, there) = half();
    let mut there = Some(there);
    let heard = here.exchange(b"done", soon(), || {
        // The other side reads our message, sends its last message and closes before we look again.
        let mut there = there.take()?;
        let mut ours = [0; 12 + 4];
        there.read_exact(&mut ours).unwrap();
        there.write_all(&said(b"so long")).unwrap();
        None
    });
    assert_eq!(heard.unwrap(), b"so long");
    assert_eq!(here.exchange(b"", soon(), || None), Err(BootstrapError::HungUp));
}

/// A peer sends without end and reads nothing. We receive one whole message. The rest stays in the
/// socket.
#[test]
fn a_flood_stays_in_the_socket_while_our_message_is_unsent() {
    let (here, mut there) = UnixStream::pair().unwrap();
    let here = OwnedFd::from(here);
    let little = 4096i32;
    // SAFETY: the option is a number of the given size.
    let set = unsafe {
        let (fd, len) = (here.as_raw_fd(), size_of_val(&little) as u32);
        libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, (&raw const little).cast(), len)
    };
    assert_eq!(set, 0);
    there.set_nonblocking(true).unwrap();
    let flood = said(&[7; 1000]).repeat(64);
    let (mut flooded, mut turns) = (0, 0);
    let outcome = Wire::over(here).exchange(&[0; MESSAGE_MAX], soon(), || {
        while let Ok(n @ 1..) = there.write(&flood) {
            flooded += n;
        }
        turns += 1;
        (turns < 2000 && flooded < 8 << 20).then_some(1)
    });
    assert_eq!(outcome, Err(BootstrapError::Stopped));
    assert!(flooded < 2 << 20, "{flooded} bytes were received");
}

/// Unrelated clients that connect to a listener. Each runs in its own thread until it is stopped.
struct Strangers<'s, 't> {
    scope: &'s thread::Scope<'s, 't>,
    at: SocketAddr,
    stop: &'s AtomicBool,
}

impl Strangers<'_, '_> {
    /// Connects repeatedly, and runs `each` on every connection.
    fn flood(&self, each: impl Fn(TcpStream) + Send + 'static + Copy) {
        let (at, stop) = (self.at, self.stop);
        self.scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                if let Ok(stream) = TcpStream::connect(at) {
                    each(stream);
                }
            }
        });
    }
}

/// Stops the clients, even if the test fails.
struct Stop<'s>(&'s AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Checks that the expected peer connects within half of a handshake's time limit, despite
/// unrelated clients. Returns the reasons for refusing those clients. Other load may delay some of
/// the five attempts. A listener that waits for a client would delay all five.
#[track_caller]
fn meets_beside(strangers: impl Fn(&Strangers<'_, '_>) -> Vec<TcpStream>) -> Vec<BootstrapError> {
    let mut late = vec![];
    while late.len() < 5 {
        match meets_once(&strangers) {
            (refused, took) if took < Duration::from_millis(2500) => return refused,
            (_, took) => late.push(took),
        }
    }
    panic!("{late:?}");
}

fn meets_once(
    strangers: impl Fn(&Strangers<'_, '_>) -> Vec<TcpStream>,
) -> (Vec<BootstrapError>, Duration) {
    let (mut listener, at) = listener();
    let stop = AtomicBool::new(false);
    let address: SocketAddr = at.parse().unwrap();
    thread::scope(|scope| {
        let _stop = Stop(&stop);
        let stop: &AtomicBool = &stop;
        let held = strangers(&Strangers { scope, at: address, stop });
        let begun = Instant::now();
        let other = scope.spawn(move || connect(&at, &card(2), soon()).map(|(_, card)| card.id));
        let met = listener.accept(&card(1), soon()).map(|(_, card)| card.id);
        assert_eq!((met, other.join().unwrap()), (Ok(2), Ok(1)));
        let took = begun.elapsed();
        drop(held);
        let refused = listener.refused().into_iter().map(|(_, why)| why).collect();
        // Closes the listener, so that no client waits to be accepted.
        drop(listener);
        (refused, took)
    })
}

/// Connects clients that each send one message.
fn say(at: SocketAddr, each: &[&[u8]]) -> Vec<TcpStream> {
    let connect = |says: &&[u8]| {
        let mut stream = TcpStream::connect(at).unwrap();
        stream.write_all(says).unwrap();
        stream
    };
    each.iter().map(connect).collect()
}

#[test]
fn silent_clients_cost_only_their_own_connections() {
    for count in [4, 64, 120] {
        meets_beside(|strangers| say(strangers.at, &vec![&b""[..]; count]));
    }
}

#[test]
fn clients_that_stop_during_the_handshake_cost_only_their_own_connections() {
    meets_beside(|strangers| say(strangers.at, &vec![&said(&[3; 16])[..]; 64]));
    let half = said(&[3; 16]);
    meets_beside(|strangers| say(strangers.at, &vec![&half[..half.len() - 1]; 64]));
}

#[test]
fn clients_with_invalid_messages_are_refused_by_reason() {
    let refused = |says: &[&[u8]], error| {
        let errors = meets_beside(|strangers| say(strangers.at, says));
        assert_eq!(errors, vec![error; says.len()]);
    };
    refused(&[b"GET / HTTP/1.1\r\n\r\n", &[0xee; 60_000], &[0; 12]], BootstrapError::Stranger);
    let theirs = WIRE_VERSION + 9;
    refused(&[&framed(theirs, 0, &[])], BootstrapError::Version { theirs, ours: WIRE_VERSION });
    for len in [17, MESSAGE_MAX as u32 + 1, u32::MAX] {
        let error = BootstrapError::TooLong { len: len.into(), max: 16 };
        refused(&[&framed(WIRE_VERSION, len, &[])], error);
    }
    let hello = said(&[3; 16]);
    let error = BootstrapError::TooLong { len: MESSAGE_MAX as u64 + 1, max: MESSAGE_MAX };
    refused(&[&[&hello[..], &framed(WIRE_VERSION, MESSAGE_MAX as u32 + 1, &[])].concat()], error);
    // Sends in turn: no message, a message that is too short, a message of an earlier protocol
    // version, and random bytes that are not ours.
    let bad = BootstrapError::BadCard("random bytes");
    let alone = said(&card(2).encode().unwrap());
    let stale = said(&[&[9; 16][..], &card(2).encode().unwrap()].concat());
    refused(&[&said(&[]), &said(&[3; 15])], bad);
    for second in [&said(&[]), &alone, &stale] {
        refused(&[&[&hello[..], second].concat()], bad);
    }
}

/// Performs the handshake byte by byte, with `spoil` applied to the card message.
fn greets(at: SocketAddr, spoil: impl FnOnce(Vec<u8>) -> Vec<u8>) -> TcpStream {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.write_all(&said(&[3; 16])).unwrap();
    let mut hello = [0; 12 + 16];
    stream.read_exact(&mut hello).unwrap();
    assert_eq!(hello[..12], said(&[0; 16])[..12]);
    let right = [&hello[12..], &card(7).encode().unwrap()].concat();
    stream.write_all(&said(&spoil(right))).unwrap();
    stream
}

#[test]
fn a_client_with_an_invalid_card_is_refused_and_the_next_is_accepted() {
    let refused = |spoil: fn(Vec<u8>) -> Vec<u8>| {
        let (mut listener, at) = listener();
        thread::scope(|scope| {
            let to = at.parse().unwrap();
            let stranger = scope.spawn(move || greets(to, spoil));
            let why = loop {
                assert_eq!(
                    listener.accept(&card(1), at_once()).unwrap_err(),
                    BootstrapError::Deadline
                );
                if let Some((_, why)) = listener.refused().pop() {
                    break why;
                }
            };
            drop(stranger.join().unwrap());
            let other =
                scope.spawn(move || connect(&at, &card(2), soon()).map(|(_, card)| card.id));
            assert_eq!(listener.accept(&card(1), soon()).unwrap().1.id, 2);
            assert_eq!(other.join().unwrap(), Ok(1));
            why
        })
    };
    assert_eq!(refused(|card| card[..16].to_vec()), BootstrapError::BadCard("id"));
    assert_eq!(refused(|card| card[..20].to_vec()), BootstrapError::BadCard("id"));
    assert_eq!(refused(|card| [card, vec![0]].concat()), BootstrapError::BadCard("length"));
    let other_window = |mut card: Vec<u8>| {
        card[25] += 1;
        card
    };
    let differs = BootstrapError::Differs { what: "window", theirs: 17, ours: 16 };
    assert_eq!(refused(other_window), differs);
}

#[test]
fn floods_cost_only_their_own_connections() {
    meets_beside(|strangers| {
        strangers.flood(drop);
        strangers.flood(drop);
        vec![]
    });
    meets_beside(|strangers| {
        strangers.flood(|mut stream| {
            let _ = stream.write_all(&[0xee; 4096]);
        });
        strangers.flood(|mut stream| {
            let _ = stream.write_all(&said(&[3; 16]));
        });
        vec![]
    });
}

#[test]
fn clients_that_send_slowly_cost_only_their_own_connections() {
    meets_beside(|strangers| {
        let mut held = say(strangers.at, &vec![&b"F"[..]; 64]);
        let stop = strangers.stop;
        strangers.scope.spawn(move || {
            for byte in said(&[3; 16]).into_iter().skip(1) {
                for stream in &mut held {
                    let _ = stream.write_all(&[byte]);
                }
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                thread::sleep(Duration::from_millis(20));
            }
        });
        vec![]
    });
}

/// More clients connect than the listener's queue holds, and no call accepts them for a while.
#[test]
fn a_full_backlog_delays_and_does_not_refuse() {
    let (mut listener, at) = listener();
    let address: SocketAddr = at.parse().unwrap();
    let quick = Duration::from_millis(20);
    let held: Vec<_> =
        (0..400).map_while(|_| TcpStream::connect_timeout(&address, quick).ok()).collect();
    thread::scope(|scope| {
        let other = scope.spawn(move || connect(&at, &card(2), soon()).map(|(_, card)| card.id));
        assert_eq!(listener.accept(&card(1), soon()).unwrap().1.id, 2);
        assert_eq!(other.join().unwrap(), Ok(1));
    });
    assert!(held.len() > 64);
}

/// A listener without room closes the connection. The client then tries again.
#[test]
fn a_client_whose_connection_is_closed_tries_again() {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    socket.set_nonblocking(true).unwrap();
    let at = socket.local_addr().unwrap().to_string();
    let deadline = soon();
    let accept = || loop {
        match socket.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).unwrap();
                return stream;
            }
            Err(_) => assert!(Instant::now() < deadline, "it does not try again"),
        }
        thread::yield_now();
    };
    thread::scope(|scope| {
        let other = scope.spawn(move || connect(&at, &card(2), soon()).map(|(_, card)| card.id));
        drop(accept());
        let mut stream = accept();
        stream.read_exact(&mut [0; 12]).unwrap();
        drop(stream);
        assert_eq!(over(accept().into(), &card(1), soon()).unwrap().1.id, 2);
        assert_eq!(other.join().unwrap(), Ok(1));
    });
}

#[test]
fn a_socket_pair_works_too() {
    let (here, there) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        let other =
            scope.spawn(move || over(there.into(), &card(2), soon()).map(|(_, card)| card.id));
        let (wire, theirs) = over(here.into(), &card(1), soon()).unwrap();
        assert_eq!((theirs.id, other.join().unwrap()), (2, Ok(1)));
        assert_eq!(wire.peer(), format!("pid {}", std::process::id()));
    });
}

#[test]
fn the_last_message_of_a_peer_that_closed_the_connection_is_received() {
    let (here, there) = UnixStream::pair().unwrap();
    let mut there = Wire::over(there.into());
    there.say(b"bye").unwrap();
    assert_eq!(there.pump(), Ok(true));
    drop(there);
    let mut here = Wire::over(here.into());
    assert_eq!(here.exchange(b"hi", soon(), || Some(0)), Ok(b"bye".to_vec()));
    assert_eq!(here.exchange(b"hi", soon(), || Some(0)), Err(BootstrapError::HungUp));
}

#[test]
fn two_processes_of_one_host_meet_at_a_path_or_a_name() {
    let path = std::env::temp_dir().join(format!("fishplate-bootstrap-{}", std::process::id()));
    let path = path.to_str().unwrap().to_owned();
    for at in [path.clone(), format!("@fishplate-bootstrap-{}", std::process::id())] {
        let mut listener = Listener::bind(&at).unwrap();
        assert_eq!(Listener::bind(&at).unwrap_err(), BootstrapError::System(libc::EADDRINUSE));
        let theirs = std::thread::scope(|scope| {
            let other = scope.spawn(|| connect(&at, &card(2), soon()).unwrap());
            let (wire, theirs) = listener.accept(&card(1), soon()).unwrap();
            assert_eq!(wire.pid(), Some(std::process::id()));
            assert_eq!(other.join().unwrap().1, card(1));
            theirs
        });
        assert_eq!(theirs, card(2));
    }
    assert!(!std::path::Path::new(&path).exists(), "the listener has removed its file");
}

#[test]
fn a_socket_file_that_nobody_listens_at_is_replaced_and_any_other_file_is_kept() {
    let path = std::env::temp_dir().join(format!("fishplate-abandoned-{}", std::process::id()));
    let at = path.to_str().unwrap();
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    drop(Listener::bind(at).unwrap());
    assert!(!path.exists());
    std::fs::write(&path, "precious").unwrap();
    assert_eq!(Listener::bind(at).unwrap_err(), BootstrapError::System(libc::EADDRINUSE));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    std::fs::remove_file(&path).unwrap();
}
