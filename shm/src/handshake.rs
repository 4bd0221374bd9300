//! The handshake of two processes: exchanges credentials, sizes, nonces and descriptors over one
//! AF_UNIX SEQPACKET socket. Slow path: allocates, makes system calls, and waits for the peer up to
//! a deadline. `shake` has the steps of one handshake; [`meeting`](crate::meeting) drives many at
//! once.
//!
//! | step  | both sides send | both sides check |
//! |-------|---|---|
//! | 0     |  | the peer's user, from the kernel |
//! | Hello | version, role, sizes, number, fresh nonce | version, role, sizes; the sender's user |
//! | Offer | *the other's nonce*, descriptors | own nonce; seals, sizes; the lane's header |
//! | Ready | the other's nonce again | own nonce, from the Hello's process |
//!
//! The descriptors are those of the lane, the event page and, from the first end, the common
//! segment.
//! [`identity`](crate::identity) says how the Hello's process is proven.
//!
//! The listening end creates its lane and the common segment only after the other's Offer, so a
//! stranger's Hello costs it no memory.
//!
//! Nothing from a peer is used before it has echoed our nonce, which it can only know from this
//! handshake. So segments of an earlier run, or of a replaced peer, are rejected. No channel is
//! *active* before Ready, when both sides have mapped and checked everything. So neither side uses
//! a channel that the other has given up. A side that fails closes its socket and drops what it
//! received; the other gets [`HandshakeError::HungUp`] or reaches its deadline.

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

/// Longest pause before a listener that hung up is connected to again.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// The role of an end of a link. The two ends have different roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The end that listens: it makes the common segment.
    First,
    /// The end that connects.
    Second,
}

/// The sizes and the event page of this process, for handshakes. From
/// [`ShmRail::profile`](crate::ShmRail::profile); usable from any thread while the rail is in use.
#[derive(Clone, Debug)]
pub struct Profile {
    pub(crate) config: Arc<ShmConfig>,
    pub(crate) event_page: Arc<EventPage>,
}

/// A peer that has been met and not yet attached to a rail. Dropping it hangs up.
#[derive(Debug)]
pub struct Link {
    pub(crate) control: Control,
    pub(crate) peer: Credentials,
    peer_id: u64,
    pub(crate) pair: Pair,
    pub(crate) event_page: EventPage,
    pub(crate) common: Option<Mapping>,
    /// Identifies the pair: both ends compute the same value. Two pairs collide with a probability
    /// of 2^-32.
    pub(crate) pair_id: u32,
    /// Whether every sleeper and notifier of the two works with `membarrier`.
    pub(crate) light: bool,
    /// Whether the peer's memory was found readable.
    pub(crate) cma: bool,
    pub(crate) config: Arc<ShmConfig>,
    nonces: [Nonce; 2],
}

assert_impl_all!(Profile: Send, Sync);
assert_impl_all!(Link: Send);

impl Listener {
    /// Waits for the next handshake to complete, with a peer that connects or that was
    /// [dialled](Self::dial). A silent, slow or invalid process costs only its own connection, and
    /// [`refused`](Self::refused) or [`failed`](Self::failed) names it. Handshakes that are
    /// incomplete at the deadline continue in the next call with the same profile.
    ///
    /// With a past deadline it polls once and does not wait. One step reads the peer's memory to
    /// test access; an admitted peer can block that unless [`ShmConfig::force_staging`] is set.
    pub fn accept(&self, profile: &Profile, deadline: Instant) -> Result<Link, HandshakeError> {
        let mut meetings = self.lock_meetings().take();
        meetings.retain(|shake| shake.serves(profile));
        let met = meetings
            .next(self.fd(), deadline, |socket| Shake::new(Socket::new(socket), Role::First, profile));
        self.lock_meetings().absorb(meetings);
        met?.ok_or(HandshakeError::Deadline)
    }

    /// Starts a handshake with the listener at an address, like [`connect`], without waiting:
    /// [`accept`](Self::accept) with the same profile continues it and returns its link. It has the
    /// same time limit as the handshake of a peer that connects.
    ///
    /// - [`HandshakeError::System`]: `ECONNREFUSED` or `ENOENT` if nothing listens there, `EAGAIN`
    ///   if the backlog is full. Dial again later.
    /// - [`HandshakeError::User`]: the listener's user is not admitted.
    /// - [`HandshakeError::Address`]: not a valid address.
    pub fn dial(&self, address: impl AsRef<OsStr>, profile: &Profile) -> Result<(), HandshakeError> {
        let socket = Address::parse(address.as_ref())?.connect()?;
        let shake = Shake::new(socket, Role::Second, profile)?;
        self.lock_meetings().dial(address.as_ref(), shake);
        Ok(())
    }

    /// Cancels an incomplete handshake [dialled](Self::dial) at an address.
    /// [`failed`](Self::failed) does not report it.
    pub fn hang_up(&self, address: impl AsRef<OsStr>) {
        self.lock_meetings().hang_up(address.as_ref());
    }

    /// Returns the dialled handshakes that failed since the last call: address and reason.
    pub fn failed(&self) -> Vec<(OsString, HandshakeError)> {
        self.lock_meetings().failed()
    }

    /// Returns the peers refused since the last call, and why: at most the last eight.
    pub fn refused(&self) -> Vec<(String, HandshakeError)> {
        self.lock_meetings().refused()
    }
}

/// Connects to a path, or to an abstract name if it begins with `@`, and shakes hands. Retries
/// until the deadline while nothing listens there, or while the listener hangs up because it has
/// too many connections.
pub fn connect(
    address: impl AsRef<OsStr>,
    profile: &Profile,
    deadline: Instant,
) -> Result<Link, HandshakeError> {
    let mut pause = Duration::from_millis(1);
    loop {
        let socket = connect_socket(address.as_ref(), deadline)?;
        match meet(Shake::new(socket, Role::Second, profile)?, deadline) {
            Err(HandshakeError::HungUp) if Instant::now() + pause < deadline => std::thread::sleep(pause),
            met => return met,
        }
        pause = LONGEST_PAUSE.min(2 * pause);
    }
}

impl Link {
    /// Shakes hands over a connected SEQPACKET socket, such as one end of
    /// [`socket_pair`](crate::socket_pair).
    pub fn over(
        socket: OwnedFd,
        role: Role,
        profile: &Profile,
        deadline: Instant,
    ) -> Result<Self, HandshakeError> {
        meet(Shake::new(Socket::new(socket), role, profile)?, deadline)
    }

    /// Exchanges opaque bytes with the peer, at most [`MAX_BLOB`](crate::MAX_BLOB): the n-th call
    /// here receives what the n-th call there sent. After an error the two ends may be out of step:
    /// hang up.
    pub fn exchange(&mut self, blob: &[u8], deadline: Instant) -> Result<Vec<u8>, HandshakeError> {
        self.control.exchange(blob, deadline)
    }

    /// Returns the socket, for packages with [packets of their own](crate::extension).
    pub fn line(&mut self) -> Line<'_> {
        Line::new(&mut self.control, self.peer.pidfd.as_ref())
    }

    /// Returns the first byte and the size of the common segment, if one is configured. It stays
    /// mapped until the peer is detached. Both ends write to it: use atomics and raw copies only.
    pub fn common(&self) -> Option<(NonNull<u8>, usize)> {
        self.common.as_ref().map(|mapping| (mapping.ptr(), mapping.len()))
    }

    /// Returns the region of `len` bytes at `offset` of the common segment. Register it once this
    /// link is attached as `peer`.
    ///
    /// # Safety
    /// As for [`Region::new`]; the memory lives until the peer is detached.
    pub unsafe fn common_region(
        &self,
        peer: Peer,
        offset: usize,
        len: usize,
    ) -> Result<Region, SegmentError> {
        let mapping = self.common.as_ref().ok_or(SegmentError::Range)?;
        let kind = RegionKind::Common { peer, offset: offset as u64 };
        // SAFETY: our caller guarantees the same contract.
        unsafe { segment::cut(mapping, offset, len, kind) }
    }

    /// Returns whether the peer has hung up or died, so that attaching it is useless. Does not
    /// wait.
    pub fn has_ended(&mut self) -> bool {
        self.control.pump();
        self.control.ended().is_some()
    }

    /// Returns the peer's process ID, or 0 if it is in a process namespace that we cannot see.
    pub fn pid(&self) -> i32 {
        self.peer.pid
    }

    /// Returns the peer's user ID.
    pub fn uid(&self) -> u32 {
        self.peer.uid
    }

    /// Returns the peer's [`ShmConfig::id`]. It proves nothing: an admitted peer can claim any
    /// number.
    pub fn peer_id(&self) -> u64 {
        self.peer_id
    }

    /// Returns our nonce and the peer's. Nonces are unique to a link.
    pub fn nonces(&self) -> [Nonce; 2] {
        self.nonces
    }

    /// Returns whether the peer's private memory can be accessed directly; otherwise the lane
    /// stages it.
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
