//! The steps of one handshake. No step waits.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::{Link, Profile, Role, pair_id};
use crate::cma;
use crate::control::Control;
use crate::error::HandshakeError;
use crate::event_page::EventPage;
use crate::foreign::{self, Batch, Foreign};
use crate::identity::{Credentials, is_own};
use crate::lane::{self, LaneMemory, Pair};
use crate::meeting::{HalfOpen, Step};
use crate::packet::{MAX_PACKET, Nonce, PacketKind, Reader, Writer};
use crate::per_process::PerProcess;
use crate::segment::{self, Access, Mapping, errno};
use crate::socket::{Packet, Sender, Senders, Socket};

const OFFERED: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hello {
    role: Role,
    max_segments: u16,
    cell_size: u32,
    lane_cells: u32,
    max_message: u64,
    common_len: u64,
    id: u64,
    membarrier: bool,
    nonce: Nonce,
}

impl Hello {
    fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(PacketKind::Hello);
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
        .put(self.id.to_ne_bytes())
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
            id: u64::from_ne_bytes(body.take()?),
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

/// Decodes the body of a Hello and encodes it again, for [`fuzzing`](crate::fuzzing).
pub(crate) fn hello_again(body: Reader<'_>) -> Result<Vec<u8>, HandshakeError> {
    Ok(Hello::decode(body)?.encode())
}

fn echoes(mut body: Reader<'_>, ours: &Nonce) -> Result<(), HandshakeError> {
    let echo: Nonce = body.take()?;
    body.end()?;
    if echo == *ours { Ok(()) } else { Err(HandshakeError::Nonce) }
}

fn nonce() -> Result<Nonce, HandshakeError> {
    let mut nonce = [0; 16];
    // SAFETY: `nonce` is a local array of 16 bytes, and its length is passed with it.
    let n = unsafe { libc::getrandom(nonce.as_mut_ptr().cast(), nonce.len(), 0) };
    // The kernel never truncates requests of up to 256 bytes. The call waits until the generator is
    // seeded.
    if n == nonce.len() as isize { Ok(nonce) } else { Err(HandshakeError::System(errno())) }
}

/// A nonce of an open handshake of this process. A peer is this process if it has this nonce and
/// our process ID. After a fork, the ID alone does not prove that.
#[derive(Debug)]
struct Mine(Nonce);

static MINE: PerProcess<Nonce> = PerProcess::new();

impl Mine {
    fn enter(nonce: Nonce) -> Self {
        MINE.lock().push_back(nonce);
        Mine(nonce)
    }

    /// Returns whether an open handshake of this process has this nonce. The other end's nonce
    /// stays registered until it receives our Ready.
    fn has(nonce: &Nonce) -> bool {
        MINE.lock().contains(nonce)
    }
}

impl Drop for Mine {
    fn drop(&mut self) {
        MINE.lock().retain(|nonce| *nonce != self.0);
    }
}

#[derive(Debug)]
pub(crate) struct Shake {
    socket: Socket,
    profile: Profile,
    peer: Credentials,
    buffer: Box<[u8]>,
    ours: Hello,
    _mine: Mine,
    made: Option<Made>,
    /// Packets to send. The flag says whether our descriptors are sent with the packet.
    unsent: VecDeque<(Vec<u8>, bool)>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Nothing,
    Hello(Hello),
    Offer(Hello, Given),
}

#[derive(Debug)]
struct Made {
    lane: LaneMemory,
    common: Option<(OwnedFd, Mapping)>,
}

#[derive(Debug)]
struct Given {
    lane: LaneMemory,
    event_page: EventPage,
    common: Option<Mapping>,
    home: bool,
    shown: bool,
}

impl Shake {
    pub(crate) fn new(
        socket: Socket,
        role: Role,
        profile: &Profile,
    ) -> Result<Self, HandshakeError> {
        let config = &*profile.config;
        let peer = Credentials::connected(&socket)?;
        if !config.users.admit(peer.uid) {
            return Err(HandshakeError::User(peer.uid));
        }
        let nonce = nonce()?;
        let ours = Hello {
            role,
            max_segments: config.max_segments,
            cell_size: lane::CELL as u32,
            lane_cells: config.lane_cells,
            max_message: config.max_message as u64,
            common_len: config.common_len as u64,
            id: config.id,
            membarrier: config.membarrier,
            nonce,
        };
        Ok(Shake {
            socket,
            profile: profile.clone(),
            peer,
            buffer: vec![0; MAX_PACKET].into_boxed_slice(),
            _mine: Mine::enter(nonce),
            made: None,
            unsent: VecDeque::from([(ours.encode(), false)]),
            ours,
            stage: Stage::Nothing,
        })
    }

    pub(crate) fn serves(&self, profile: &Profile) -> bool {
        Arc::ptr_eq(&self.profile.config, &profile.config)
            && Arc::ptr_eq(&self.profile.event_page, &profile.event_page)
    }

    /// Continues until input from the peer is needed. Returns both offers when the handshake is
    /// complete.
    fn go_on(&mut self) -> Result<Option<(Hello, Made, Given)>, HandshakeError> {
        loop {
            if !self.send()? {
                return Ok(None);
            }
            let room = if matches!(self.stage, Stage::Hello(_)) { OFFERED } else { 0 };
            let packet = self.socket.try_recv(&mut self.buffer, Senders::Named, |_| room)?;
            let Some(Packet { len, fds, sender }) = packet else { return Ok(None) };
            let (kind, body) = Reader::open(&self.buffer[..len])?;
            self.stage = match (std::mem::replace(&mut self.stage, Stage::Nothing), kind) {
                (Stage::Nothing, PacketKind::Hello) => {
                    let [] = exactly(fds)?;
                    let theirs = Hello::decode(body)?;
                    self.hear_hello(theirs, sender)?
                }
                (Stage::Hello(theirs), PacketKind::Offer) => {
                    echoes(body, &self.ours.nonce)?;
                    self.hear_offer(theirs, fds)?
                }
                (Stage::Offer(theirs, given), PacketKind::Ready) => {
                    let [] = exactly(fds)?;
                    echoes(body, &self.ours.nonce)?;
                    if sender.pid != self.peer.pid {
                        let hello = self.peer.pid;
                        return Err(HandshakeError::Process { hello, ready: sender.pid });
                    }
                    self.socket.name_senders(false)?;
                    let made = self.made.take().ok_or(HandshakeError::BadPacket)?;
                    return Ok(Some((theirs, made, given)));
                }
                _ => return Err(HandshakeError::BadPacket),
            };
        }
    }

    fn hear_hello(&mut self, theirs: Hello, sender: Sender) -> Result<Stage, HandshakeError> {
        self.ours.agree(&theirs)?;
        self.peer.introduce(sender);
        if !self.profile.config.users.admit(self.peer.uid) {
            return Err(HandshakeError::User(self.peer.uid));
        }
        if self.ours.role == Role::Second {
            self.make(&theirs)?;
        }
        Ok(Stage::Hello(theirs))
    }

    fn hear_offer(&mut self, theirs: Hello, fds: Batch) -> Result<Stage, HandshakeError> {
        let config = Arc::clone(&self.profile.config);
        let (lane, wait_object, common) = match self.ours.role {
            Role::Second if config.common_len > 0 => {
                let [lane, wait_object, common] = exactly(fds)?;
                (lane, wait_object, Some(common))
            }
            _ => {
                let [lane, wait_object] = exactly(fds)?;
                (lane, wait_object, None)
            }
        };
        let lane = LaneMemory::attach(lane, config.lane_cells, theirs.nonce, self.ours.nonce)?;
        let event_page = EventPage::attach(wait_object)?;
        let common = match common {
            Some(fd) => {
                let fd = fd.into_memory(config.common_len as u64)?;
                Some(Mapping::new(fd.as_fd(), config.common_len, Access::Write)?)
            }
            None => None,
        };
        if self.made.is_none() {
            self.make(&theirs)?;
        }
        let home = is_own(self.peer.pid) && Mine::has(&theirs.nonce);
        let shown = !config.force_staging && cma::is_permitted(self.peer.pid);
        let mut ready = Writer::new(PacketKind::Ready);
        ready.put(theirs.nonce);
        self.unsent.push_back((ready.finish(), false));
        Ok(Stage::Offer(theirs, Given { lane, event_page, common, home, shown }))
    }

    fn make(&mut self, theirs: &Hello) -> Result<(), HandshakeError> {
        let config = &*self.profile.config;
        let lane = LaneMemory::create(config.lane_cells, self.ours.nonce, theirs.nonce)?;
        let mut common = None;
        if self.ours.role == Role::First && config.common_len > 0 {
            let fd = segment::create(config.common_len)?;
            let mapping = Mapping::new(fd.as_fd(), config.common_len, Access::Write)?;
            segment::seal(fd.as_fd())?;
            common = Some((fd, mapping));
        }
        let mut offer = Writer::new(PacketKind::Offer);
        offer.put(theirs.nonce);
        self.unsent.push_back((offer.finish(), true));
        self.made = Some(Made { lane, common });
        Ok(())
    }

    /// Returns whether all packets were sent.
    fn send(&mut self) -> Result<bool, HandshakeError> {
        while let Some((packet, offers)) = self.unsent.front() {
            let mut fds = Vec::new();
            if let Some(made) = self.made.as_ref().filter(|_| *offers) {
                fds.extend([made.lane.fd(), self.profile.event_page.fd()]);
                fds.extend(made.common.as_ref().map(|(fd, _)| fd.as_fd()));
            }
            match self.socket.try_send_named(packet, &fds) {
                Ok(()) => {}
                Err(HandshakeError::System(libc::EAGAIN)) => return Ok(false),
                Err(error) => return Err(error),
            }
            self.unsent.pop_front();
        }
        Ok(true)
    }

    fn link(self, (theirs, made, given): (Hello, Made, Given)) -> Link {
        let Shake { socket, profile, peer, ours, .. } = self;
        let common = made.common.map(|(_, mapping)| mapping).or(given.common);
        // If the peer's process ID is our own, kernel copies are used only if the peer is this
        // process. Another peer could present our memory as its own.
        let cma = given.shown && (given.home || peer.is_another());
        Link {
            control: Control::new(socket, theirs.max_segments, theirs.nonce, given.home),
            peer,
            peer_id: theirs.id,
            pair: Pair { outgoing: made.lane, incoming: given.lane },
            event_page: given.event_page,
            common,
            pair_id: pair_id(&ours.nonce, &theirs.nonce),
            light: ours.membarrier && theirs.membarrier,
            cma,
            config: profile.config,
            nonces: [ours.nonce, theirs.nonce],
        }
    }
}

impl HalfOpen for Shake {
    type Met = Link;
    type Error = HandshakeError;
    const LATE: HandshakeError = HandshakeError::Deadline;

    fn may_accept() -> bool {
        !foreign::is_full()
    }

    fn system(code: i32) -> HandshakeError {
        HandshakeError::System(code)
    }

    fn step(mut self) -> Step<Self> {
        match self.go_on() {
            Ok(Some(said)) => Step::Met(self.link(said)),
            Ok(None) => Step::Waits(self),
            Err(error) => Step::Failed(error),
        }
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.fd()
    }

    fn events(&self) -> i16 {
        if self.unsent.is_empty() { libc::POLLIN } else { libc::POLLOUT }
    }

    fn heard(&self) -> u32 {
        match self.stage {
            Stage::Nothing => 0,
            Stage::Hello(_) => 1,
            Stage::Offer(..) => 2,
        }
    }

    fn who(&self) -> String {
        format!("process {} of user {}", self.peer.pid, self.peer.uid)
    }
}

/// Returns exactly `N` descriptors. A different number is an error, and closes them.
fn exactly<const N: usize>(fds: Batch) -> Result<[Foreign; N], HandshakeError> {
    if fds.len() != N {
        return Err(HandshakeError::BadPacket);
    }
    <[Foreign; N]>::try_from(fds.collect::<Vec<_>>()).map_err(|_| HandshakeError::BadPacket)
}
