//! Listens and connects over TCP, and exchanges cards in a handshake.
//!
//! | step  | both sides send                         | both sides check                       |
//! |-------|-----------------------------------------|----------------------------------------|
//! | Hello | 16 random bytes                         | version, length                        |
//! | Card  | *the other's* 16 bytes, then their card | own bytes came back; the card's fields |
//!
//! A replayed card does not contain our random bytes, so it is rejected. The listening side also
//! checks that the two cards agree.

use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fishplate_shm::meeting::{HalfOpen, Meetings, Step, meet};

use super::wire::code;
use super::{BootstrapError, Card, Wire};

/// Time limit of one handshake.
const GREETING: Duration = Duration::from_secs(5);

/// Pause between two attempts to connect.
const RETRY: Duration = Duration::from_millis(20);

type Nonce = [u8; 16];

/// Accepts processes at an address.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    meetings: Meetings<Greeting>,
}

impl Listener {
    /// Listens at HOST:PORT. Port 0 selects a free one.
    ///
    /// # Errors
    /// [`BootstrapError::Address`] or [`BootstrapError::System`].
    pub fn bind(at: &str) -> Result<Listener, BootstrapError> {
        let addresses: Vec<_> = at.to_socket_addrs().map_err(|_| BootstrapError::Address)?.collect();
        let socket = TcpListener::bind(&addresses[..]).map_err(code)?;
        socket.set_nonblocking(true).map_err(code)?;
        Ok(Listener { socket, meetings: Meetings::new(GREETING) })
    }

    /// Returns the port.
    ///
    /// # Errors
    /// [`BootstrapError::System`].
    pub fn port(&self) -> Result<u16, BootstrapError> {
        Ok(self.socket.local_addr().map_err(code)?.port())
    }

    /// Waits for a process whose card agrees with ours, and sends it ours. Serves many handshakes
    /// at once: a silent, slow or incompatible process costs only its own connection, and
    /// [`refused`](Self::refused) names it. Handshakes that the deadline interrupts continue in the
    /// next call with the same card.
    ///
    /// # Errors
    /// [`BootstrapError::Deadline`] if no process came, or [`BootstrapError::System`].
    pub fn accept(&mut self, ours: &Card, deadline: Instant) -> Result<(Wire, Card), BootstrapError> {
        let card = Shown::new(ours)?;
        self.meetings.retain(|greeting| greeting.ours.card == card.card);
        let met =
            self.meetings.next(self.socket.as_fd(), deadline, |socket| Greeting::new(socket, &card, true))?;
        met.ok_or(BootstrapError::Deadline)
    }

    /// Takes the peers that were rejected since the last call, and why: at most the last eight.
    pub fn refused(&mut self) -> Vec<(String, BootstrapError)> {
        self.meetings.refused()
    }
}

/// Connects to the process that listens at HOST:PORT, and exchanges cards with it. Retries until
/// the deadline while no process listens there, or the listener closes the connection before it
/// has sent its card.
///
/// # Errors
/// [`BootstrapError::System`] if no process listened in time; or why the peer does not fit.
pub fn connect(at: &str, ours: &Card, deadline: Instant) -> Result<(Wire, Card), BootstrapError> {
    let card = Shown::new(ours)?;
    let addresses: Vec<_> = at.to_socket_addrs().map_err(|_| BootstrapError::Address)?.collect();
    if addresses.is_empty() {
        return Err(BootstrapError::Address);
    }
    let mut last = BootstrapError::Deadline;
    loop {
        for (at, address) in addresses.iter().enumerate() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(last);
            }
            // An address that does not answer must leave time for the others.
            let share = left / (addresses.len() - at) as u32;
            match TcpStream::connect_timeout(address, share.max(Duration::from_millis(1))) {
                Ok(stream) => match meet(Greeting::new(stream.into(), &card, false)?, deadline) {
                    Err(BootstrapError::HungUp) => last = BootstrapError::HungUp,
                    met => return met,
                },
                Err(error) if error.kind() == ErrorKind::TimedOut => last = BootstrapError::Deadline,
                Err(error) => last = code(error),
            }
        }
        thread::sleep(RETRY);
    }
}

/// Exchanges cards over a connected stream socket, such as one end of a socket pair.
///
/// # Errors
/// [`BootstrapError::Deadline`], [`BootstrapError::HungUp`]; or why the peer does not fit.
pub fn over(socket: OwnedFd, ours: &Card, deadline: Instant) -> Result<(Wire, Card), BootstrapError> {
    meet(Greeting::new(socket, &Shown::new(ours)?, false)?, deadline)
}

/// Our card, and its encoding.
#[derive(Clone, Debug)]
struct Shown {
    card: Arc<Card>,
    bytes: Arc<[u8]>,
}

impl Shown {
    fn new(card: &Card) -> Result<Shown, BootstrapError> {
        Ok(Shown { bytes: card.encode()?.into(), card: Arc::new(card.clone()) })
    }
}

/// One side of a handshake.
#[derive(Debug)]
struct Greeting {
    wire: Wire,
    ours: Shown,
    nonce: Nonce,
    /// Whether the peer has sent its random bytes.
    greeted: bool,
    /// Whether this side checks that the cards agree.
    judges: bool,
}

impl Greeting {
    fn new(socket: OwnedFd, ours: &Shown, judges: bool) -> Result<Greeting, BootstrapError> {
        let stream = TcpStream::from(socket);
        // Fails on a socket pair, which does not delay either.
        let _ = stream.set_nodelay(true);
        let mut wire = Wire::over(stream.into());
        let nonce = random()?;
        wire.say(&nonce)?;
        wire.accept_at_most(nonce.len());
        Ok(Greeting { wire, ours: ours.clone(), nonce, greeted: false, judges })
    }

    /// Advances the handshake. Returns the peer's card once it has arrived.
    fn go_on(&mut self) -> Result<Option<Card>, BootstrapError> {
        loop {
            let moved = self.wire.pump();
            let Some(message) = self.wire.hear()? else {
                return moved.map(|_| None);
            };
            let (nonce, rest) =
                message.split_first_chunk::<16>().ok_or(BootstrapError::BadCard("random bytes"))?;
            if self.greeted {
                // The card belongs to another handshake.
                if *nonce != self.nonce {
                    return Err(BootstrapError::BadCard("random bytes"));
                }
                let theirs = Card::decode(rest)?;
                if self.judges {
                    self.ours.card.agree(&theirs)?;
                }
                return Ok(Some(theirs));
            }
            // A peer that reflects our bytes would make us answer ourselves.
            if *nonce == self.nonce {
                return Err(BootstrapError::BadCard("random bytes"));
            }
            self.wire.say(&[nonce, &*self.ours.bytes].concat())?;
            self.wire.accept_at_most(usize::MAX);
            self.greeted = true;
        }
    }
}

impl HalfOpen for Greeting {
    type Met = (Wire, Card);
    type Error = BootstrapError;
    const LATE: BootstrapError = BootstrapError::Deadline;

    fn system(code: i32) -> BootstrapError {
        BootstrapError::System(code)
    }

    fn step(mut self) -> Step<Self> {
        match self.go_on() {
            Ok(Some(card)) => Step::Met((self.wire, card)),
            Ok(None) => Step::Waits(self),
            Err(error) => Step::Failed(error),
        }
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.wire.socket()
    }

    fn events(&self) -> i16 {
        self.wire.events()
    }

    fn heard(&self) -> u32 {
        self.greeted.into()
    }

    fn who(&self) -> String {
        self.wire.peer()
    }
}

fn random() -> Result<Nonce, BootstrapError> {
    let mut nonce = [0; 16];
    // SAFETY: `nonce` has 16 writable bytes, the length that the call gets.
    let n = unsafe { libc::getrandom(nonce.as_mut_ptr().cast(), nonce.len(), 0) };
    // The call waits for the generator's seed, then returns up to 256 bytes at once.
    if n == nonce.len() as isize { Ok(nonce) } else { Err(code(std::io::Error::last_os_error())) }
}
