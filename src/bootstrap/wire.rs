//! Messages over a TCP connection: a head of twelve bytes (`FPBS`, version, zero, length), then the bytes.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};

use super::{BootstrapError, Card, MESSAGE_MAX, WIRE_VERSION};

const MAGIC: [u8; 4] = *b"FPBS";
const HEAD: usize = 12;

/// How long somebody who connected may take to say who he is, before another is heard.
const GREETING: Duration = Duration::from_secs(5);

/// Between two looks at a connection on which nothing happens: first none, then this.
const NAP: Duration = Duration::from_micros(100);

/// Looks before the first nap.
const LOOKS: u32 = 200;

/// Waits for somebody at an address.
pub struct Listener {
    socket: TcpListener,
}

impl Listener {
    /// Listens at HOST:PORT. Port 0 takes any that is free.
    ///
    /// # Errors
    /// [`BootstrapError::Address`], or the system's code.
    pub fn bind(at: &str) -> Result<Listener, BootstrapError> {
        let addresses: Vec<_> = at.to_socket_addrs().map_err(|_| BootstrapError::Address)?.collect();
        let socket = TcpListener::bind(&addresses[..]).map_err(code)?;
        socket.set_nonblocking(true).map_err(code)?;
        Ok(Listener { socket })
    }

    /// The port that it listens at.
    ///
    /// # Errors
    /// The system's code.
    pub fn port(&self) -> Result<u16, BootstrapError> {
        Ok(self.socket.local_addr().map_err(code)?.port())
    }

    /// Waits for a process that shows a card, and shows it ours. Whoever connects and is no such process is hung up on. Asks every
    /// millisecond whether to go on waiting.
    ///
    /// # Errors
    /// [`BootstrapError::Deadline`] if nobody comes, [`BootstrapError::Stopped`] if there is no need to wait any more; whatever a process
    /// of this protocol says that does not fit.
    pub fn accept(
        &self,
        ours: &Card,
        deadline: Instant,
        mut wait: impl FnMut() -> bool,
    ) -> Result<(Wire, Card), BootstrapError> {
        let greeting = ours.encode()?;
        loop {
            match self.socket.accept() {
                Ok((stream, _)) => {
                    let mut wire = Wire::new(stream)?;
                    let until = deadline.min(Instant::now() + GREETING);
                    match wire.exchange(&greeting, until, || Some(0)) {
                        Ok(theirs) => return Ok((wire, Card::decode(&theirs)?)),
                        Err(BootstrapError::Stranger | BootstrapError::HungUp | BootstrapError::Deadline) => {
                        }
                        Err(error) => return Err(error),
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // Somebody who hung up before he was heard.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) => return Err(code(error)),
            }
            if Instant::now() >= deadline {
                return Err(BootstrapError::Deadline);
            }
            if !wait() {
                return Err(BootstrapError::Stopped);
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Connects to who listens at HOST:PORT, trying again until the deadline, and exchanges cards with it.
///
/// # Errors
/// The system's code if nobody listens there by then; whatever the other side says that does not fit.
pub fn connect(at: &str, ours: &Card, deadline: Instant) -> Result<(Wire, Card), BootstrapError> {
    let greeting = ours.encode()?;
    let addresses: Vec<_> = at.to_socket_addrs().map_err(|_| BootstrapError::Address)?.collect();
    if addresses.is_empty() {
        return Err(BootstrapError::Address);
    }
    let mut last = BootstrapError::Deadline;
    loop {
        for address in &addresses {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(last);
            }
            match TcpStream::connect_timeout(address, left) {
                Ok(stream) => {
                    let mut wire = Wire::new(stream)?;
                    let theirs = wire.exchange(&greeting, deadline, || Some(0))?;
                    return Ok((wire, Card::decode(&theirs)?));
                }
                Err(error) if error.kind() == ErrorKind::TimedOut => last = BootstrapError::Deadline,
                Err(error) => last = code(error),
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// A connection that carries messages. Dropping it hangs up.
#[derive(Debug)]
pub struct Wire {
    stream: TcpStream,
    /// What has come of messages not taken yet.
    inward: Vec<u8>,
}

impl Wire {
    fn new(stream: TcpStream) -> Result<Wire, BootstrapError> {
        stream.set_nonblocking(true).map_err(code)?;
        stream.set_nodelay(true).map_err(code)?;
        Ok(Wire { stream, inward: vec![] })
    }

    /// Sends a message and waits for one. Both sides do so at once. While nothing happens, `idle` is called; it says how much it found
    /// to do, and for nothing there are naps; with `None` it ends the wait.
    ///
    /// # Errors
    /// [`BootstrapError::Deadline`], [`BootstrapError::HungUp`], [`BootstrapError::Stopped`], and what a message can be that is none.
    /// After an error the wire is of no more use.
    pub fn exchange(
        &mut self,
        ours: &[u8],
        deadline: Instant,
        mut idle: impl FnMut() -> Option<u32>,
    ) -> Result<Vec<u8>, BootstrapError> {
        if ours.len() > MESSAGE_MAX {
            return Err(BootstrapError::TooLong { len: ours.len() as u64, max: MESSAGE_MAX });
        }
        let mut outward = Vec::with_capacity(HEAD + ours.len());
        outward.extend(MAGIC);
        outward.extend(WIRE_VERSION.to_le_bytes());
        outward.extend([0; 2]);
        outward.extend((ours.len() as u32).to_le_bytes());
        outward.extend(ours);
        let (mut sent, mut looks) = (0, 0);
        loop {
            let mut moved = false;
            if sent < outward.len() {
                let n = attempt(self.stream.write(&outward[sent..]))?;
                (sent, moved) = (sent + n, n > 0);
            }
            moved |= self.fill()?;
            if sent == outward.len()
                && let Some(message) = self.take()?
            {
                return Ok(message);
            }
            if Instant::now() >= deadline {
                return Err(BootstrapError::Deadline);
            }
            if moved || idle().ok_or(BootstrapError::Stopped)? > 0 {
                looks = 0;
            } else if looks < LOOKS {
                looks += 1;
                thread::yield_now();
            } else {
                thread::sleep(NAP);
            }
        }
    }

    /// Where the other side is: HOST:PORT.
    pub fn peer(&self) -> String {
        self.stream.peer_addr().map_or_else(|_| "an unknown address".into(), |address| address.to_string())
    }

    /// Whether the other side still has the connection open. Does not wait, and takes nothing away from the next message.
    pub fn is_open(&mut self) -> bool {
        // Whoever sends more than a message ahead is no correct peer.
        self.inward.len() <= HEAD + MESSAGE_MAX && self.fill().is_ok()
    }

    /// Something that tells whether the other side still has the connection open, also while messages are exchanged.
    ///
    /// # Errors
    /// The system's code.
    pub fn lifeline(&self) -> Result<Lifeline, BootstrapError> {
        self.stream.try_clone().map(Lifeline).map_err(code)
    }

    /// Takes in what has come; whether that was anything.
    fn fill(&mut self) -> Result<bool, BootstrapError> {
        let mut chunk = [0; 4096];
        match self.stream.read(&mut chunk) {
            Ok(0) => Err(BootstrapError::HungUp),
            Ok(n) => {
                self.inward.extend(&chunk[..n]);
                Ok(true)
            }
            Err(error) => attempt(Err(error)).map(|_| false),
        }
    }

    /// The first message, if it is whole. Its head is checked as soon as it is there.
    fn take(&mut self) -> Result<Option<Vec<u8>>, BootstrapError> {
        let known = self.inward.len().min(MAGIC.len());
        if self.inward[..known] != MAGIC[..known] {
            return Err(BootstrapError::Stranger);
        }
        let Some(head) = self.inward.first_chunk::<HEAD>() else {
            return Ok(None);
        };
        let theirs = u16::from_le_bytes([head[4], head[5]]);
        if theirs != WIRE_VERSION {
            return Err(BootstrapError::Version { theirs, ours: WIRE_VERSION });
        }
        let len = u32::from_le_bytes([head[8], head[9], head[10], head[11]]) as usize;
        if len > MESSAGE_MAX {
            return Err(BootstrapError::TooLong { len: len as u64, max: MESSAGE_MAX });
        }
        if self.inward.len() < HEAD + len {
            return Ok(None);
        }
        let message = self.inward[HEAD..HEAD + len].to_vec();
        self.inward.drain(..HEAD + len);
        Ok(Some(message))
    }
}

/// A look at a [`Wire`] from elsewhere.
#[derive(Debug)]
pub struct Lifeline(TcpStream);

impl Lifeline {
    /// Whether the other side, and so its process, still has the connection open, whatever it sent before. One system call.
    pub fn holds(&self) -> bool {
        let mut look = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
        // SAFETY: one entry, ours, and no time to wait.
        let found = unsafe { libc::poll(&mut look, 1, 0) };
        found <= 0 || look.revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) == 0
    }
}

/// Bytes moved; none if it would have to wait.
fn attempt(result: io::Result<usize>) -> Result<usize, BootstrapError> {
    match result {
        Ok(0) => Err(BootstrapError::HungUp),
        Ok(n) => Ok(n),
        Err(error) => match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(0),
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => {
                Err(BootstrapError::HungUp)
            }
            _ => Err(code(error)),
        },
    }
}

fn code(error: io::Error) -> BootstrapError {
    match error.raw_os_error() {
        Some(code) => BootstrapError::System(code),
        None => BootstrapError::Address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::RailCard;
    use std::net::SocketAddr;

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
        Card { id, window: 16, contexts: 1, first_sequence: 0, user: 0, rails: vec![rail] }
    }

    fn listener() -> (Listener, String) {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let at = format!("127.0.0.1:{}", listener.port().unwrap());
        (listener, at)
    }

    fn pair() -> (Wire, Wire) {
        let (listener, at) = listener();
        thread::scope(|scope| {
            let other = scope.spawn(move || connect(&at, &card(2), soon()).unwrap());
            let (here, theirs) = listener.accept(&card(1), soon(), || true).unwrap();
            assert_eq!(theirs, card(2));
            let (there, theirs) = other.join().unwrap();
            assert_eq!(theirs, card(1));
            (here, there)
        })
    }

    #[test]
    fn both_sides_say_something_at_once_however_long_it_is() {
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
        assert!(matches!(here.exchange(&long, soon(), || Some(0)), Err(BootstrapError::TooLong { .. })));
    }

    #[test]
    fn nobody_there_is_told_in_time() {
        let (listener, at) = listener();
        assert_eq!(listener.accept(&card(1), at_once(), || true).unwrap_err(), BootstrapError::Deadline);
        assert_eq!(listener.accept(&card(1), soon(), || false).unwrap_err(), BootstrapError::Stopped);
        drop(listener);
        let refused = connect(&at, &card(1), at_once()).unwrap_err();
        assert_eq!(refused, BootstrapError::System(111), "ECONNREFUSED");
        for wrong in ["nonsense", "127.0.0.1", "127.0.0.1:99999", ""] {
            assert_eq!(connect(wrong, &card(1), at_once()).unwrap_err(), BootstrapError::Address, "{wrong}");
            assert!(matches!(Listener::bind(wrong), Err(BootstrapError::Address)), "{wrong}");
        }
    }

    #[test]
    fn who_waits_makes_progress_meanwhile_and_gives_up_in_time() {
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
    fn a_side_that_goes_away_is_noticed_and_what_it_said_before_is_not_lost() {
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

    /// Whoever talks to a listener before the right process does.
    fn stranger(at: SocketAddr, says: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(at).unwrap();
        let _ = stream.write_all(says);
        stream
    }

    #[test]
    fn strangers_are_hung_up_on_and_the_right_one_is_heard() {
        let (listener, at) = listener();
        let address: SocketAddr = at.parse().unwrap();
        let held = [stranger(address, b"GET / HTTP/1.1\r\n\r\n"), stranger(address, b"F")];
        drop(stranger(address, b""));
        held[1].shutdown(std::net::Shutdown::Both).unwrap();
        thread::scope(|scope| {
            let other = scope.spawn(move || connect(&at, &card(2), soon()).map(|(_, card)| card.id));
            assert_eq!(listener.accept(&card(1), soon(), || true).unwrap().1.id, 2);
            assert_eq!(other.join().unwrap(), Ok(1));
        });
    }

    #[test]
    fn other_versions_lengths_and_cards_are_refused() {
        let head = |version: u16, len: u32| {
            let mut bytes = MAGIC.to_vec();
            bytes.extend(version.to_le_bytes());
            bytes.extend([0; 2]);
            bytes.extend(len.to_le_bytes());
            bytes
        };
        let nonsense = [head(WIRE_VERSION, 3), vec![1, 2, 3]].concat();
        for (says, error) in [
            (head(9, 0), BootstrapError::Version { theirs: 9, ours: WIRE_VERSION }),
            (
                head(WIRE_VERSION, u32::MAX),
                BootstrapError::TooLong { len: u32::MAX.into(), max: MESSAGE_MAX },
            ),
            (nonsense, BootstrapError::BadCard("number")),
        ] {
            let (listener, at) = listener();
            let _held = stranger(at.parse().unwrap(), &says);
            assert_eq!(listener.accept(&card(1), soon(), || true).unwrap_err(), error);
        }
    }
}
