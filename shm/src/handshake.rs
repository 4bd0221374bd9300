//! The handshake of two processes: exchanges credentials, sizes, nonces and descriptors over one
//! AF_UNIX SEQPACKET socket. Slow path: allocates, makes system calls, and waits for the peer up to
//! a deadline.
//!
//! | step  | both sides send | both sides check |
//! |-------|---|---|
//! | 0     |  | the peer's user, from the kernel |
//! | Hello | version, role, sizes, id, fresh nonce | version, role, sizes; the sender's user |
//! | Offer | *the peer's nonce*, descriptors | our nonce; seals, sizes; the lane's header |
//! | Ready | the peer's nonce again | our nonce, sent by the Hello's process |
//!
//! Both ends offer the descriptors of their lane and event page. The first end also offers the
//! common segment.
//!
//! The listening end creates its lane and the common segment only after it has the other end's
//! Offer. So a stranger's Hello costs the listener no memory.
//!
//! Neither side uses the peer's memory before the peer has echoed that side's nonce, which only
//! this handshake reveals. So segments of an earlier run, or of a replaced peer, are rejected. A
//! side sends Ready after it has mapped and checked everything, and no lane is used before Ready.
//! So neither side uses a lane that the other has already closed. A side that fails closes its
//! socket and drops the received memory. The other side then gets [`HandshakeError::HungUp`], or
//! its deadline expires.

mod listener;
mod shake;

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fishplate_core::mem::{Peer, Region, RegionKind};
use static_assertions::assert_impl_all;

use crate::config::{ShmConfig, Users};
use crate::control::{Control, Line};
use crate::error::{HandshakeError, SegmentError};
use crate::event_page::EventPage;
use crate::identity::Credentials;
use crate::lane::Pair;
use crate::meeting::meet;
use crate::packet::Nonce;
use crate::segment::{self, Mapping};
use crate::socket::{Address, Socket, connect_socket};

pub use listener::Listener;
pub(crate) use shake::{Shake, hello_again};

/// Maximum pause before reconnecting to a listener that hung up.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// The role of an end of a link. The two ends have different roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The listening end, which creates the common segment.
    First,
    /// The connecting end.
    Second,
}

/// The sizes and the event page of a rail, for use in handshakes. Returned by
/// [`ShmRail::profile`](crate::ShmRail::profile). Any thread may use it while the rail exists.
#[derive(Clone, Debug)]
pub struct Profile {
    pub(crate) config: Arc<ShmConfig>,
    pub(crate) event_page: Arc<EventPage>,
}

/// A connected peer that is not yet attached to a rail. Dropping the link hangs up.
#[derive(Debug)]
pub struct Link {
    pub(crate) control: Control,
    pub(crate) peer: Credentials,
    peer_id: u64,
    pub(crate) pair: Pair,
    pub(crate) event_page: EventPage,
    pub(crate) common: Option<Mapping>,
    /// Both ends compute the same value. Two pairs have the same value with a probability of 2^-32.
    pub(crate) pair_id: u32,
    /// Whether both ends use `membarrier`, so that notifying needs no fence.
    pub(crate) light: bool,
    pub(crate) cma: bool,
    pub(crate) config: Arc<ShmConfig>,
    nonces: [Nonce; 2],
}

assert_impl_all!(Profile: Send, Sync);
assert_impl_all!(Link: Send);

impl Listener {
    /// Waits until a handshake completes, with a peer that connected or that was
    /// [dialled](Self::dial). A silent, slow or invalid peer loses only its own connection.
    /// [`refused`](Self::refused) or [`failed`](Self::failed) then reports that peer. Handshakes
    /// that are incomplete at the deadline continue in the next call with the same profile.
    ///
    /// With a past deadline the call polls once and does not wait.
    pub fn accept(&self, profile: &Profile, deadline: Instant) -> Result<Link, HandshakeError> {
        let mut meetings = self.lock_meetings().take();
        meetings.retain(|shake| shake.serves(profile));
        let met = meetings.next(self.fd(), deadline, |socket| {
            Shake::new(Socket::new(socket), Role::First, profile)
        });
        self.lock_meetings().absorb(meetings);
        met?.ok_or(HandshakeError::Deadline)
    }

    /// Starts a handshake with the listener at an address, like [`connect`], but without waiting.
    /// [`accept`](Self::accept) with the same profile continues the handshake and returns its link.
    /// The time limit is the same as for a handshake with a connecting peer.
    ///
    /// - [`HandshakeError::System`]: `ECONNREFUSED` or `ENOENT` if nothing listens at the address,
    ///   `EAGAIN` if the backlog is full. Dial again later.
    /// - [`HandshakeError::User`]: the listener's user is not admitted.
    /// - [`HandshakeError::Address`]: the address is invalid.
    pub fn dial(
        &self,
        address: impl AsRef<OsStr>,
        profile: &Profile,
    ) -> Result<(), HandshakeError> {
        let socket = Address::parse(address.as_ref())?.connect()?;
        let shake = Shake::new(socket, Role::Second, profile)?;
        self.lock_meetings().dial(address.as_ref(), shake);
        Ok(())
    }

    /// Cancels an incomplete handshake that was [dialled](Self::dial) at this address.
    /// [`failed`](Self::failed) does not report it.
    pub fn hang_up(&self, address: impl AsRef<OsStr>) {
        self.lock_meetings().hang_up(address.as_ref());
    }

    /// Returns the dialled handshakes that failed since the last call, each with its address and
    /// error.
    pub fn failed(&self) -> Vec<(OsString, HandshakeError)> {
        self.lock_meetings().failed()
    }

    /// Returns the connecting peers that were refused since the last call, with the reasons. Keeps
    /// at most the last eight.
    pub fn refused(&self) -> Vec<(String, HandshakeError)> {
        self.lock_meetings().refused()
    }
}

/// Connects to a path, or to an abstract name if the address begins with `@`, and performs the
/// handshake. Retries until the deadline while nothing listens at the address, while the listener's
/// backlog is full, or while it hangs up, as it does if it has too many connections.
pub fn connect(
    address: impl AsRef<OsStr>,
    profile: &Profile,
    deadline: Instant,
) -> Result<Link, HandshakeError> {
    let mut pause = Duration::from_millis(1);
    loop {
        let socket = connect_socket(address.as_ref(), deadline)?;
        match meet(Shake::new(socket, Role::Second, profile)?, deadline) {
            Err(HandshakeError::HungUp) if Instant::now() + pause < deadline => {
                std::thread::sleep(pause)
            }
            met => return met,
        }
        pause = LONGEST_PAUSE.min(2 * pause);
    }
}

impl Link {
    /// Performs the handshake over a connected SEQPACKET socket, such as one end of a
    /// [`socket_pair`](crate::socket_pair).
    pub fn over(
        socket: OwnedFd,
        role: Role,
        profile: &Profile,
        deadline: Instant,
    ) -> Result<Self, HandshakeError> {
        meet(Shake::new(Socket::new(socket), role, profile)?, deadline)
    }

    /// Exchanges up to [`MAX_BLOB`](crate::MAX_BLOB) opaque bytes with the peer. The n-th call at
    /// this end receives the bytes that the n-th call at the other end sent. After an error the two
    /// ends may disagree about n, so drop the link.
    pub fn exchange(&mut self, blob: &[u8], deadline: Instant) -> Result<Vec<u8>, HandshakeError> {
        self.control.exchange(blob, deadline)
    }

    /// Returns the socket, for packages with [packets of their own](crate::extension).
    pub fn line(&mut self) -> Line<'_> {
        Line::new(&mut self.control, self.peer.pidfd.as_ref())
    }

    /// Returns the address and size of the common segment, if one is configured. It stays mapped
    /// until the peer is detached. Both ends write to it, so use only atomics and raw copies.
    pub fn common(&self) -> Option<(NonNull<u8>, usize)> {
        self.common.as_ref().map(|mapping| (mapping.ptr(), mapping.len()))
    }

    /// Returns the region of `len` bytes at `offset` of the common segment. Register it after this
    /// link is attached as `peer`.
    ///
    /// # Safety
    /// The contract of [`Region::new`] applies. The memory lives until the peer is detached.
    pub unsafe fn common_region(
        &self,
        peer: Peer,
        offset: usize,
        len: usize,
    ) -> Result<Region, SegmentError> {
        let mapping = self.common.as_ref().ok_or(SegmentError::Range)?;
        let kind = RegionKind::Common { peer, offset: offset as u64 };
        // SAFETY: the caller upholds the contract of `Region::new`, which is all that `cut`
        // requires.
        unsafe { segment::cut(mapping, offset, len, kind) }
    }

    /// Returns whether the peer has hung up or died, so that the link is useless. Does not wait.
    pub fn has_ended(&mut self) -> bool {
        self.control.pump();
        self.control.ended().is_some()
    }

    /// Returns the peer's process ID, or 0 if its PID namespace is not visible to this process.
    pub fn pid(&self) -> i32 {
        self.peer.pid
    }

    /// Returns the peer's user ID.
    pub fn uid(&self) -> u32 {
        self.peer.uid
    }

    /// Returns the [`ShmConfig::id`] that the peer claims. It is not proven: an admitted peer can
    /// claim any id.
    pub fn peer_id(&self) -> u64 {
        self.peer_id
    }

    /// Returns our nonce and the peer's nonce, in this order. No two links share a nonce.
    pub fn nonces(&self) -> [Nonce; 2] {
        self.nonces
    }

    /// Returns whether the peer's private memory can be accessed directly. If not, it is staged
    /// through the lane.
    pub fn reaches_private(&self) -> bool {
        self.cma
    }
}

/// Combines both nonces into the same value at both ends.
fn pair_id(a: &Nonce, b: &Nonce) -> u32 {
    (u128::from_ne_bytes(*a) ^ u128::from_ne_bytes(*b)) as u32
}

impl Users {
    fn admit(&self, uid: u32) -> bool {
        match self {
            // SAFETY: the call has no arguments and cannot fail.
            Users::Own => uid == unsafe { libc::geteuid() },
            Users::Listed(list) => list.contains(&uid),
        }
    }
}
