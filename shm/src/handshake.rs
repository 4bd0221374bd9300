//! How two processes meet: credentials, sizes, nonces and descriptors over one AF_UNIX SEQPACKET
//! socket. Slow path: everything here may allocate and make system calls, and waits for the peer,
//! but never past its deadline. `shake` has the steps of one handshake, [`meeting`](crate::meeting)
//! goes through many at once.
//!
//! | step  | both sides send | both sides check |
//! |-------|---|---|
//! | 0     |  | the peer's user, from the kernel |
//! | Hello | version, role, sizes, number, fresh nonce | version, role, sizes; the sender's user |
//! | Offer | *the other's nonce*, descriptors | own nonce; seals, sizes; the lane's header |
//! | Ready | the other's nonce again | own nonce, from the Hello's process |
//!
//! Descriptors are those of the lane, the doorbell and, from the first end, the common segment.
//! [`identity`](crate::identity) says how the Hello's process is proven.
//!
//! The end that listens makes its lane and the common segment once it has the other's Offer, so a
//! stranger costs it no memory by saying Hello.
//!
//! Nothing of a peer is used before it has echoed our nonce, which it can only know from this
//! conversation: a segment of an earlier run, or of a peer that has been replaced, never passes.
//! Nothing is *active* before Ready: both sides have then mapped and checked everything, so there
//! is no state in which one side uses a channel that the other has given up. A side that fails
//! closes its socket and drops whatever it was sent; the other sees [`HandshakeError::HungUp`], or
//! its deadline.

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
use crate::doorbell::Doorbell;
use crate::error::{HandshakeError, SegmentError};
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

/// Which end of a link this is. The two must differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The end that listens: it makes the common segment.
    First,
    /// The end that connects.
    Second,
}

/// What this process brings to every handshake: its sizes and its doorbell. From
/// [`ShmRail::profile`](crate::ShmRail::profile); usable from any thread, while the rail works
/// elsewhere.
#[derive(Clone, Debug)]
pub struct Profile {
    pub(crate) config: Arc<ShmConfig>,
    pub(crate) doorbell: Arc<Doorbell>,
}

/// A peer that has been met and not yet attached to a rail. Dropping it hangs up.
#[derive(Debug)]
pub struct Link {
    pub(crate) control: Control,
    pub(crate) peer: Credentials,
    peer_id: u64,
    pub(crate) pair: Pair,
    pub(crate) doorbell: Doorbell,
    pub(crate) common: Option<Mapping>,
    /// Names the pair: both ends compute the same; another pair has it with a chance of 1 in 2^32.
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
    /// Waits for the next handshake to complete, of peers that connect and of those that were
    /// [dialled](Self::dial). A process that is silent, slow or invalid costs only its own
    /// connection, and [`refused`](Self::refused) or [`failed`](Self::failed) names it. Handshakes
    /// that are not over at the deadline go on in the next call with the same profile.
    ///
    /// With a deadline that has passed it looks once and does not wait. One step asks the kernel
    /// whether the peer's memory can be read, which an admitted peer can hold up unless
    /// [`ShmConfig::force_staging`] is set.
    pub fn accept(&self, profile: &Profile, deadline: Instant) -> Result<Link, HandshakeError> {
        let mut meetings = self.lock_meetings().take();
        meetings.retain(|shake| shake.serves(profile));
        let met = meetings
            .next(self.fd(), deadline, |socket| Shake::new(Socket::new(socket), Role::First, profile));
        self.lock_meetings().absorb(meetings);
        met?.ok_or(HandshakeError::Deadline)
    }

    /// Begins a handshake with the listener at an address, as [`connect`] does, and does not wait
    /// for it: [`accept`](Self::accept) with the same profile goes on with it and returns its link.
    /// It may take as long as the handshake of a peer that connects.
    ///
    /// # Errors
    /// [`HandshakeError::System`]: `ECONNREFUSED` or `ENOENT` if nobody listens there, `EAGAIN` if
    /// too many wait there to be accepted. Dial again later. [`HandshakeError::User`] if the
    /// listener's user is not admitted, [`HandshakeError::Address`] if it is none.
    pub fn dial(&self, address: impl AsRef<OsStr>, profile: &Profile) -> Result<(), HandshakeError> {
        let socket = Address::parse(address.as_ref())?.connect()?;
        let shake = Shake::new(socket, Role::Second, profile)?;
        self.lock_meetings().dial(address.as_ref(), shake);
        Ok(())
    }

    /// Ends what was [dialled](Self::dial) at an address and is not met yet. It does not
    /// [fail](Self::failed).
    pub fn hang_up(&self, address: impl AsRef<OsStr>) {
        self.lock_meetings().hang_up(address.as_ref());
    }

    /// The dialled handshakes that failed since the last call: the address, and why.
    pub fn failed(&self) -> Vec<(OsString, HandshakeError)> {
        self.lock_meetings().failed()
    }

    /// Who was refused since the last call, and why: at most the last eight.
    pub fn refused(&self) -> Vec<(String, HandshakeError)> {
        self.lock_meetings().refused()
    }
}

/// Connects to a path, or to an abstract name if it begins with `@`, and shakes hands. Tries again
/// until the deadline while nobody listens there, and when the listener hangs up, as one with too
/// many connections does.
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
    /// Shakes hands over a SEQPACKET socket that is connected already, such as one end of
    /// [`socket_pair`](crate::socket_pair).
    pub fn over(
        socket: OwnedFd,
        role: Role,
        profile: &Profile,
        deadline: Instant,
    ) -> Result<Self, HandshakeError> {
        meet(Shake::new(Socket::new(socket), role, profile)?, deadline)
    }

    /// Swaps opaque bytes with the peer, at most [`MAX_BLOB`](crate::MAX_BLOB): the n-th call here
    /// gets what the n-th call there sent. After an error the two may not be in step any more: hang
    /// up.
    pub fn exchange(&mut self, blob: &[u8], deadline: Instant) -> Result<Vec<u8>, HandshakeError> {
        self.control.exchange(blob, deadline)
    }

    /// The socket, as packages use it that have [packets of their own](crate::extension).
    pub fn line(&mut self) -> Line<'_> {
        Line::new(&mut self.control, self.peer.pidfd.as_ref())
    }

    /// First byte and size of the segment that the two have in common, if one was configured. It is
    /// mapped until the peer is detached. Both write there: atomics and raw copies only.
    pub fn common(&self) -> Option<(NonNull<u8>, usize)> {
        self.common.as_ref().map(|mapping| (mapping.ptr(), mapping.len()))
    }

    /// The `len` bytes at `offset` of the common segment,
    /// to register once this link is attached as `peer`.
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
        // SAFETY: handed on to our caller.
        unsafe { segment::cut(mapping, offset, len, kind) }
    }

    /// Whether the peer has hung up, or died: nothing comes of attaching it. Does not wait.
    pub fn has_ended(&mut self) -> bool {
        self.control.pump();
        self.control.ended().is_some()
    }

    /// The peer's process, or 0 if it lives in a process namespace that we cannot see.
    pub fn pid(&self) -> i32 {
        self.peer.pid
    }

    /// The peer's user.
    pub fn uid(&self) -> u32 {
        self.peer.uid
    }

    /// What the peer calls itself: its [`ShmConfig::id`]. It proves nothing, any peer that is
    /// admitted can give any number.
    pub fn peer_id(&self) -> u64 {
        self.peer_id
    }

    /// Our nonce and the peer's: no other link has either.
    pub fn nonces(&self) -> [Nonce; 2] {
        self.nonces
    }

    /// Whether the peer's private memory can be accessed directly; otherwise the lane stages it.
    pub fn reaches_private(&self) -> bool {
        self.cma
    }
}

/// The same for both ends: folds both nonces without regard to their order.
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
