//! Listens and connects over TCP, and exchanges cards in a handshake.
//!
//! | step  | both sides send                         | both sides check                       |
//! |-------|-----------------------------------------|----------------------------------------|
//! | Hello | 16 random bytes                         | version, length                        |
//! | Card  | the peer's 16 bytes, then our own card  | own bytes came back; the card's fields |
//!
//! A replayed card does not contain our random bytes, so it is rejected. The listening side also
//! checks that the two cards agree.

use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fishplate_shm::meeting::{HalfOpen, Meetings, Step, meet};

use super::wire::code;
use super::{BootstrapError, Card, Wire};

/// Time limit of each handshake.
const GREETING: Duration = Duration::from_secs(5);

const RETRY: Duration = Duration::from_millis(20);

type Nonce = [u8; 16];

/// Accepts connections from processes at an address. If the address is a path, dropping the
/// listener removes the socket file.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    meetings: Meetings<Greeting>,
    file: Option<(PathBuf, FileId)>,
}

type FileId = (u64, u64);

impl Listener {
    /// Listens at one of three kinds of address: HOST:PORT (port 0 selects a free port), a path
    /// that contains a slash, or `@NAME`, an abstract socket on this host. Replaces a socket file
    /// if no process listens at it any more.
    ///
    /// # Errors
    /// [`BootstrapError::Address`], or [`BootstrapError::System`]. The errno is `EADDRINUSE` if a
    /// process listens at the address, or if the path names a file of another kind.
    pub fn bind(at: &str) -> Result<Listener, BootstrapError> {
        let mut file = None;
        let socket = match Place::of(at) {
            Place::Network(at) => {
                let addresses: Vec<_> =
                    at.to_socket_addrs().map_err(|_| BootstrapError::Address)?.collect();
                let socket = TcpListener::bind(&addresses[..]).map_err(code)?;
                socket.set_nonblocking(true).map_err(code)?;
                OwnedFd::from(socket)
            }
            place => {
                let address = place.local()?;
                let socket = match UnixListener::bind_addr(&address) {
                    Err(error)
                        if error.kind() == ErrorKind::AddrInUse && is_abandoned(&address) =>
                    {
                        address.as_pathname().map_or(Ok(()), std::fs::remove_file).map_err(code)?;
                        UnixListener::bind_addr(&address)
                    }
                    bound => bound,
                };
                let socket = socket.map_err(code)?;
                socket.set_nonblocking(true).map_err(code)?;
                file =
                    address.as_pathname().and_then(|path| Some((path.to_owned(), file_id(path)?)));
                OwnedFd::from(socket)
            }
        };
        Ok(Listener { socket, meetings: Meetings::new(GREETING), file })
    }

    /// Returns the TCP port.
    ///
    /// # Errors
    /// [`BootstrapError::System`]; or [`BootstrapError::Address`] if the address is a path or a
    /// name.
    pub fn port(&self) -> Result<u16, BootstrapError> {
        let socket = TcpListener::from(self.socket.try_clone().map_err(code)?);
        Ok(socket.local_addr().map_err(|_| BootstrapError::Address)?.port())
    }

    /// Waits for a process with a card that agrees with ours, and sends our card to it. Serves many
    /// handshakes at once. A silent, slow or incompatible process costs only its own connection,
    /// and [`refused`](Self::refused) names it. If the deadline interrupts a handshake, the next
    /// call with the same card continues it.
    ///
    /// # Errors
    /// [`BootstrapError::Deadline`] if no process connected in time, or [`BootstrapError::System`].
    pub fn accept(
        &mut self,
        ours: &Card,
        deadline: Instant,
    ) -> Result<(Wire, Card), BootstrapError> {
        let card = Shown::new(ours)?;
        self.meetings.retain(|greeting| greeting.ours.card == card.card);
        let met = self
            .meetings
            .next(self.socket.as_fd(), deadline, |socket| Greeting::new(socket, &card, true))?;
        met.ok_or(BootstrapError::Deadline)
    }

    /// Returns the processes that were rejected since the last call, with the reasons. At most the
    /// last eight are kept.
    pub fn refused(&mut self) -> Vec<(String, BootstrapError)> {
        self.meetings.refused()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some((path, made)) = &self.file
            && file_id(path) == Some(*made)
        {
            // If the removal fails, the file stays, and the next listener replaces it.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn file_id(path: &Path) -> Option<FileId> {
    let found = std::fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

fn is_abandoned(address: &SocketAddr) -> bool {
    let is_socket = |path: &Path| {
        std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
    };
    address.as_pathname().is_some_and(is_socket)
        && UnixStream::connect_addr(address)
            .is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

enum Place<'a> {
    /// HOST:PORT.
    Network(&'a str),
    File(&'a str),
    Abstract(&'a str),
}

impl Place<'_> {
    fn of(at: &str) -> Place<'_> {
        match at.strip_prefix('@') {
            Some(name) => Place::Abstract(name),
            None if at.contains('/') => Place::File(at),
            None => Place::Network(at),
        }
    }

    fn local(&self) -> Result<SocketAddr, BootstrapError> {
        let address = match self {
            Place::Abstract("") | Place::Network(_) => Err(io::ErrorKind::InvalidInput.into()),
            Place::Abstract(name) => SocketAddr::from_abstract_name(name),
            Place::File(path) => SocketAddr::from_pathname(path),
        };
        address.map_err(|_| BootstrapError::Address)
    }
}

/// Connects to the process that listens at `at`, and exchanges cards with it. The address has the
/// same form as for [`Listener::bind`]. Retries until the deadline if no process listens yet, or if
/// the listener closes the connection before it has sent its card.
///
/// # Errors
/// [`BootstrapError::System`] if no process listened in time, or the reason why the cards do not
/// match.
pub fn connect(at: &str, ours: &Card, deadline: Instant) -> Result<(Wire, Card), BootstrapError> {
    let card = Shown::new(ours)?;
    let (local, addresses) = match Place::of(at) {
        Place::Network(at) => {
            let addresses: Vec<_> =
                at.to_socket_addrs().map_err(|_| BootstrapError::Address)?.collect();
            (None, addresses)
        }
        place => (Some(place.local()?), vec![]),
    };
    if local.is_none() && addresses.is_empty() {
        return Err(BootstrapError::Address);
    }
    let mut last;
    loop {
        let sockets =
            local.iter().map(|address| UnixStream::connect_addr(address).map(OwnedFd::from));
        let streams = addresses.iter().enumerate().map(|(at, address)| {
            let left = deadline.saturating_duration_since(Instant::now());
            // Leaves time for the other addresses if this one does not answer.
            let share = left / (addresses.len() - at) as u32;
            TcpStream::connect_timeout(address, share.max(Duration::from_millis(1)))
                .map(OwnedFd::from)
        });
        for connected in sockets.chain(streams) {
            match connected {
                Ok(socket) => match meet(Greeting::new(socket, &card, false)?, deadline) {
                    Err(BootstrapError::HungUp) => last = BootstrapError::HungUp,
                    met => return met,
                },
                Err(error) if error.kind() == ErrorKind::TimedOut => {
                    last = BootstrapError::Deadline
                }
                Err(error) => last = code(error),
            }
            if Instant::now() >= deadline {
                return Err(last);
            }
        }
        thread::sleep(RETRY);
    }
}

/// Exchanges cards over a connected stream socket, such as one end of a socket pair.
///
/// # Errors
/// [`BootstrapError::Deadline`] or [`BootstrapError::HungUp`], or the reason why the cards do not
/// match.
pub fn over(
    socket: OwnedFd,
    ours: &Card,
    deadline: Instant,
) -> Result<(Wire, Card), BootstrapError> {
    meet(Greeting::new(socket, &Shown::new(ours)?, false)?, deadline)
}

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

#[derive(Debug)]
struct Greeting {
    wire: Wire,
    ours: Shown,
    nonce: Nonce,
    greeted: bool,
    /// Whether this side checks that the cards agree.
    judges: bool,
}

impl Greeting {
    fn new(socket: OwnedFd, ours: &Shown, judges: bool) -> Result<Greeting, BootstrapError> {
        let stream = TcpStream::from(socket);
        // Fails on a socket pair. A socket pair never delays data, so that is no loss.
        let _ = stream.set_nodelay(true);
        let mut wire = Wire::over(stream.into());
        let nonce = random()?;
        wire.say(&nonce)?;
        wire.accept_at_most(nonce.len());
        Ok(Greeting { wire, ours: ours.clone(), nonce, greeted: false, judges })
    }

    fn go_on(&mut self) -> Result<Option<Card>, BootstrapError> {
        loop {
            let moved = self.wire.pump();
            let Some(message) = self.wire.hear()? else {
                return moved.map(|_| None);
            };
            let (nonce, rest) =
                message.split_first_chunk::<16>().ok_or(BootstrapError::BadCard("random bytes"))?;
            if self.greeted {
                // The card comes from another handshake.
                if *nonce != self.nonce {
                    return Err(BootstrapError::BadCard("random bytes"));
                }
                let theirs = Card::decode(rest)?;
                if self.judges {
                    self.ours.card.agree(&theirs)?;
                }
                return Ok(Some(theirs));
            }
            // Rejects a peer that sends our own random bytes back. It could otherwise return our
            // reply as its own card.
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
        self.wire.as_fd()
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
    // SAFETY: `nonce` is writable for its length, which is passed with it.
    let n = unsafe { libc::getrandom(nonce.as_mut_ptr().cast(), nonce.len(), 0) };
    // The call waits until the generator is seeded. After that, the kernel never truncates a
    // request of up to 256 bytes.
    if n == nonce.len() as isize { Ok(nonce) } else { Err(code(std::io::Error::last_os_error())) }
}
