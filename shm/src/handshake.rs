//! How two processes meet: credentials, sizes, nonces and descriptors over one AF_UNIX SEQPACKET socket. Slow path:
//! everything here may allocate and make system calls, and waits for the peer, but never past its deadline.
//!
//! | step  | both sides send                                                  | both sides check                     |
//! |-------|------------------------------------------------------------------|--------------------------------------|
//! | 0     |                                                                  | the user who connected, from the kernel |
//! | Hello | version, role, sizes, a fresh random nonce                       | version, role, sizes; the sender's user, from the kernel |
//! | Offer | *the other's nonce*, lane and doorbell descriptors; the first also the common segment | own nonce came back; seals, sizes, pages; magic, version and both nonces in the lane |
//! | Ready | the other's nonce again                                          | own nonce came back, from the process that sent the Hello: see [`identity`](crate::identity) |
//!
//! Nothing of a peer is used before it has echoed our nonce, which it can only know from this conversation: a segment
//! of an earlier run, or of a peer that has been replaced, never passes. Nothing is *active* before Ready: both
//! sides have then mapped and checked everything, so there is no state in which one side uses a channel that the other
//! has given up. A side that fails closes its socket and drops whatever it was sent; the other sees
//! [`HandshakeError::HungUp`], or its deadline.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use fishplate_core::error::AttachError;
use fishplate_core::mem::{Peer, Region, RegionKind};
use static_assertions::assert_impl_all;

use crate::cma;
use crate::config::{ShmConfig, Users};
use crate::control::Control;
use crate::doorbell::Doorbell;
use crate::foreign::Foreign;
use crate::identity::{Credentials, is_own};
use crate::lane::{self, LaneMemory, Pair};
use crate::packet::{Kind, MAX_PACKET, Reader, Writer};
use crate::segment::{self, Access, Mapping, SegmentError, errno};
use crate::socket::{Listener, Packet, Sender, Socket, connect_socket};

/// Why two processes did not come together. Nothing is mapped, and no descriptor is left open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The time given has passed.
    Deadline,
    /// The peer closed the connection.
    HungUp,
    /// Not a packet of this protocol, or not the one due, or with the wrong descriptors.
    BadPacket,
    /// The peer speaks another version.
    Version {
        /// Theirs.
        theirs: u16,
        /// Ours.
        ours: u16,
    },
    /// The two ends were configured with different sizes.
    Mismatch {
        /// Which size.
        what: &'static str,
        /// Theirs.
        theirs: u64,
        /// Ours.
        ours: u64,
    },
    /// The peer did not send our nonce back: it answers to somebody else, or to an earlier run.
    Nonce,
    /// The peer belongs to a user who is not admitted: the user's number.
    User(u32),
    /// The packets of the handshake came from more than one process.
    Process {
        /// The one that sent the first, or 0 if it is not known.
        hello: i32,
        /// The one that sent the last, likewise.
        ready: i32,
    },
    /// Memory that the peer offered was not what it must be.
    Segment(SegmentError),
    /// The path or name to listen on exists.
    InUse,
    /// Not a path or name that fits a socket address.
    Address,
    /// More bytes than one packet carries.
    TooLong {
        /// What was asked, in bytes.
        len: usize,
        /// What fits, in bytes.
        max: usize,
    },
    /// No such peer is attached over a socket.
    UnknownPeer,
    /// The system's own code.
    System(i32),
}

impl From<SegmentError> for HandshakeError {
    fn from(error: SegmentError) -> Self {
        HandshakeError::Segment(error)
    }
}

impl From<HandshakeError> for AttachError {
    fn from(error: HandshakeError) -> Self {
        match error {
            HandshakeError::Version { theirs, ours } => AttachError::Version { theirs, ours },
            HandshakeError::Segment(error) => error.into(),
            HandshakeError::System(code) => AttachError::System(code),
            HandshakeError::Deadline => AttachError::System(libc::ETIMEDOUT),
            HandshakeError::HungUp | HandshakeError::UnknownPeer => AttachError::UnknownPeer,
            HandshakeError::Mismatch { what, .. } => AttachError::Config(what),
            _ => AttachError::BadHandle,
        }
    }
}

/// 128 random bits that name one end of one link.
pub type Nonce = [u8; 16];

/// Which end of a link this is. The two must differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The end that listens: it makes the common segment.
    First,
    /// The end that connects.
    Second,
}

/// What this process brings to every handshake: its sizes and its doorbell. From
/// [`ShmRail::profile`](crate::ShmRail::profile); usable from any thread, while the rail works elsewhere.
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
    pub(crate) pair: Pair,
    pub(crate) doorbell: Doorbell,
    pub(crate) common: Option<Mapping>,
    /// Names the pair: both ends compute the same, and no other pair the same but by a chance of one in 2^32.
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
    /// Waits for the next peer and shakes hands with it. A peer that fails costs this call, not the listener: call
    /// again.
    pub fn accept(&self, profile: &Profile, deadline: Instant) -> Result<Link, HandshakeError> {
        Link::establish(self.accept_socket(deadline)?, Role::First, profile, deadline)
    }
}

/// Connects to a path, or to an abstract name if it begins with `@`, and shakes hands. Tries again until the deadline
/// while nobody listens there.
pub fn connect(
    address: impl AsRef<OsStr>,
    profile: &Profile,
    deadline: Instant,
) -> Result<Link, HandshakeError> {
    Link::establish(connect_socket(address.as_ref(), deadline)?, Role::Second, profile, deadline)
}

/// What a Hello says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hello {
    role: Role,
    max_segments: u16,
    cell_size: u32,
    lane_cells: u32,
    max_message: u64,
    common_len: u64,
    membarrier: bool,
    /// Where the sender's nonce lies in its own memory: whoever can read it there can read and write all of it.
    probe: u64,
    nonce: Nonce,
}

impl Hello {
    fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(Kind::Hello);
        out.put([match self.role {
            Role::First => 1,
            Role::Second => 2,
        }])
        .put([u8::from(self.membarrier)])
        .put(self.max_segments.to_ne_bytes())
        .put(self.cell_size.to_ne_bytes())
        .put(self.lane_cells.to_ne_bytes())
        .put(self.max_message.to_ne_bytes())
        .put(self.common_len.to_ne_bytes())
        .put(self.probe.to_ne_bytes())
        .put(self.nonce);
        out.finish()
    }

    fn decode(mut body: Reader<'_>) -> Result<Self, HandshakeError> {
        let [role, membarrier] = body.take()?;
        let hello = Hello {
            role: match role {
                1 => Role::First,
                2 => Role::Second,
                _ => return Err(HandshakeError::BadPacket),
            },
            membarrier: match membarrier {
                0 => false,
                1 => true,
                _ => return Err(HandshakeError::BadPacket),
            },
            max_segments: u16::from_ne_bytes(body.take()?),
            cell_size: u32::from_ne_bytes(body.take()?),
            lane_cells: u32::from_ne_bytes(body.take()?),
            max_message: u64::from_ne_bytes(body.take()?),
            common_len: u64::from_ne_bytes(body.take()?),
            probe: u64::from_ne_bytes(body.take()?),
            nonce: body.take()?,
        };
        body.end()?;
        Ok(hello)
    }

    fn agree(&self, theirs: &Hello) -> Result<(), HandshakeError> {
        if self.role == theirs.role || self.nonce == theirs.nonce {
            return Err(HandshakeError::BadPacket);
        }
        for (what, theirs, ours) in [
            ("max segments", theirs.max_segments.into(), self.max_segments.into()),
            ("cell size", theirs.cell_size.into(), self.cell_size.into()),
            ("lane cells", theirs.lane_cells.into(), self.lane_cells.into()),
            ("max message", theirs.max_message, self.max_message),
            ("common length", theirs.common_len, self.common_len),
        ] {
            if theirs != ours {
                return Err(HandshakeError::Mismatch { what, theirs, ours });
            }
        }
        Ok(())
    }
}

/// Receives one packet of a kind, with exactly `N` descriptors.
fn expect<const N: usize>(
    socket: &Socket,
    kind: Kind,
    buffer: &mut [u8],
    deadline: Instant,
) -> Result<(usize, [Foreign; N], Sender), HandshakeError> {
    let Packet { len, fds, sender } = socket.recv(buffer, deadline)?;
    let (found, _) = Reader::open(&buffer[..len])?;
    if found != kind {
        return Err(HandshakeError::BadPacket);
    }
    // On a wrong number of descriptors they come back in the error and close.
    let fds = <[Foreign; N]>::try_from(fds).map_err(|_| HandshakeError::BadPacket)?;
    Ok((len, fds, sender))
}

/// Checks that a packet carries our nonce and nothing else.
fn echoes(packet: &[u8], ours: &Nonce) -> Result<(), HandshakeError> {
    let (_, mut body) = Reader::open(packet)?;
    let echo: Nonce = body.take()?;
    body.end()?;
    if echo == *ours { Ok(()) } else { Err(HandshakeError::Nonce) }
}

fn nonce() -> Result<Nonce, HandshakeError> {
    let mut nonce = [0; 16];
    // SAFETY: 16 bytes, all ours.
    let n = unsafe { libc::getrandom(nonce.as_mut_ptr().cast(), nonce.len(), 0) };
    // Up to 256 bytes come whole once the generator is seeded, which the call waits for.
    if n == nonce.len() as isize { Ok(nonce) } else { Err(HandshakeError::System(errno())) }
}

/// The nonces of the handshakes that this process is in: a peer with one of them, and our process number, is ourselves. After a
/// fork the number alone could be another's.
struct Mine(Nonce);

static MINE: Mutex<Vec<Nonce>> = Mutex::new(Vec::new());

impl Mine {
    /// Notes a nonce for as long as the handshake lasts.
    fn enter(nonce: Nonce) -> Self {
        MINE.lock().unwrap_or_else(PoisonError::into_inner).push(nonce);
        Mine(nonce)
    }

    /// Whether a handshake of this process has that nonce. The other end of ours has not left its own before we are ready.
    fn has(nonce: &Nonce) -> bool {
        MINE.lock().unwrap_or_else(PoisonError::into_inner).contains(nonce)
    }
}

impl Drop for Mine {
    fn drop(&mut self) {
        MINE.lock().unwrap_or_else(PoisonError::into_inner).retain(|nonce| *nonce != self.0);
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
        Self::establish(Socket::new(socket), role, profile, deadline)
    }

    fn establish(
        socket: Socket,
        role: Role,
        profile: &Profile,
        deadline: Instant,
    ) -> Result<Self, HandshakeError> {
        let config = &*profile.config;
        let peer = Credentials::connected(&socket)?;
        if !config.users.admit(peer.uid) {
            return Err(HandshakeError::User(peer.uid));
        }
        let mut buffer = vec![0; MAX_PACKET].into_boxed_slice();

        let probe = Box::new(nonce()?);
        let _mine = Mine::enter(*probe);
        let ours = Hello {
            role,
            max_segments: config.max_segments,
            cell_size: lane::CELL as u32,
            lane_cells: config.lane_cells,
            max_message: config.max_message as u64,
            common_len: config.common_len as u64,
            membarrier: config.membarrier,
            probe: probe.as_ptr() as u64,
            nonce: *probe,
        };
        socket.send(&ours.encode(), &[], deadline)?;
        let (len, [], sender) = expect(&socket, Kind::Hello, &mut buffer, deadline)?;
        let theirs = Hello::decode(Reader::open(&buffer[..len])?.1)?;
        ours.agree(&theirs)?;
        let peer = peer.introduced(sender);
        if !config.users.admit(peer.uid) {
            return Err(HandshakeError::User(peer.uid));
        }

        let outgoing = LaneMemory::create(config.lane_cells, ours.nonce, theirs.nonce)?;
        let common = match role {
            Role::First if config.common_len > 0 => Some(segment::create(config.common_len)?),
            _ => None,
        };
        let made = match &common {
            Some(fd) => {
                let mapping = Mapping::new(fd.as_fd(), config.common_len, Access::Write)?;
                segment::seal(fd.as_fd())?;
                Some(mapping)
            }
            None => None,
        };
        let mut offer = Writer::new(Kind::Offer);
        offer.put(theirs.nonce);
        let mut fds: Vec<BorrowedFd<'_>> = vec![outgoing.fd(), profile.doorbell.fd()];
        fds.extend(common.as_ref().map(|fd| fd.as_fd()));
        socket.send(&offer.finish(), &fds, deadline)?;

        let (len, lane, bell, offered) = if role == Role::Second && config.common_len > 0 {
            let (len, [lane, bell, common], _) = expect(&socket, Kind::Offer, &mut buffer, deadline)?;
            (len, lane, bell, Some(common))
        } else {
            let (len, [lane, bell], _) = expect(&socket, Kind::Offer, &mut buffer, deadline)?;
            (len, lane, bell, None)
        };
        echoes(&buffer[..len], &ours.nonce)?;
        let incoming = LaneMemory::attach(lane, config.lane_cells, theirs.nonce, ours.nonce)?;
        let doorbell = Doorbell::attach(bell)?;
        let common = match offered {
            Some(fd) => {
                let fd = fd.into_memory(config.common_len as u64)?;
                Some(Mapping::new(fd.as_fd(), config.common_len, Access::Write)?)
            }
            None => made,
        };
        // The other end keeps its nonce where it says until we are ready; only a process that lets us shows it.
        let home = is_own(peer.pid) && Mine::has(&theirs.nonce);
        let shown = !config.force_staging && cma::read(peer.pid, theirs.probe) == Some(theirs.nonce);

        let mut ready = Writer::new(Kind::Ready);
        ready.put(theirs.nonce);
        socket.send(&ready.finish(), &[], deadline)?;
        let (len, [], sender) = expect(&socket, Kind::Ready, &mut buffer, deadline)?;
        echoes(&buffer[..len], &ours.nonce)?;
        if sender.pid != peer.pid {
            return Err(HandshakeError::Process { hello: peer.pid, ready: sender.pid });
        }
        socket.name_senders(false)?;
        // Towards this process the kernel copies only if it is the peer: another could name our own memory as its.
        let cma = shown && (home || peer.is_another());

        Ok(Link {
            control: Control::new(socket, buffer, config.max_segments, theirs.nonce, home),
            peer,
            pair: Pair { outgoing, incoming },
            doorbell,
            common,
            pair_id: pair_id(&ours.nonce, &theirs.nonce),
            light: ours.membarrier && theirs.membarrier,
            cma,
            config: Arc::clone(&profile.config),
            nonces: [ours.nonce, theirs.nonce],
        })
    }

    /// Swaps opaque bytes with the peer, at most [`MAX_BLOB`](crate::MAX_BLOB): the n-th call here gets what the n-th
    /// call there sent. After an error the two may not be in step any more: hang up.
    pub fn exchange(&mut self, blob: &[u8], deadline: Instant) -> Result<Vec<u8>, HandshakeError> {
        self.control.exchange(blob, deadline)
    }

    /// First byte and size of the segment that the two have in common, if one was configured. It is mapped until the
    /// peer is detached. Both write there: atomics and raw copies only.
    pub fn common(&self) -> Option<(NonNull<u8>, usize)> {
        self.common.as_ref().map(|mapping| (mapping.ptr(), mapping.len()))
    }

    /// The `len` bytes at `offset` of the common segment, to be registered once this link is attached as `peer`.
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

    /// The peer's process, or 0 if it lives in a process namespace that we cannot see.
    pub fn pid(&self) -> i32 {
        self.peer.pid
    }

    /// The peer's user.
    pub fn uid(&self) -> u32 {
        self.peer.uid
    }

    /// Our nonce and the peer's: no other link has either.
    pub fn nonces(&self) -> [Nonce; 2] {
        self.nonces
    }

    /// Whether the peer's private memory can be read and written directly; otherwise it is staged through the lane.
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
