//! A custom rail over files: each end appends to a file that the other end reads.
//! `docs/writing-a-rail.md` explains it, and `core/tests/rails` runs the conformance suite on it.
//!
//! The code is short, not fast: a post is a system call, and `poll` copies the bytes that it reads.
//!
//! Run it: `cargo run -p fishplate-core --example file_rail`.

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;
use std::ptr::{self, NonNull};

use fishplate_core::engine::{Config, ContextId, Engine, HANDLE_MAX, Notice, Signal, Tables};
use fishplate_core::error::{AttachError, CompleteError, PeerError, PostError, Violation};
use fishplate_core::mem::{Peer, RailId, Region, RegionKind, Untrusted};
use fishplate_core::op::AmoSet;
use fishplate_core::rail::{Caps, Local, Order, Posted, Rail, RailKey, Remote, Sink};

const MESSAGE: usize = 4096;
const RMA: usize = 64 << 10;
const DEPTH: usize = 64;
const REGIONS: usize = 64;

/// A `DONE` frame answers each frame of another kind.
const WRITE: u64 = 1;
const WRITE_WITH_WORD: u64 = 2;
const READ: u64 = 3;
const MESSAGE_FRAME: u64 = 4;
const DONE: u64 = 5;

struct Frame {
    kind: u64,
    /// Number of the post, chosen by the rail that posted it.
    post: u64,
    key: u64,
    offset: u64,
    /// A write's completion word, the length of a read, or the result of a post (0: success).
    arg: u64,
    len: u64,
}

impl Frame {
    const SIZE: usize = 48;

    fn encode(&self) -> Vec<u8> {
        let fields = [self.kind, self.post, self.key, self.offset, self.arg, self.len];
        fields.iter().flat_map(|field| field.to_le_bytes()).collect()
    }

    /// Copies a frame out of bytes that a peer wrote. Returns `None` if the frame is not complete
    /// yet.
    fn take(bytes: &mut Vec<u8>) -> Result<Option<(Frame, Vec<u8>)>, Violation> {
        if bytes.len() < Frame::SIZE {
            return Ok(None);
        }
        let field = |n: usize| u64::from_le_bytes(bytes[n * 8..n * 8 + 8].try_into().unwrap());
        let (kind, post, key) = (field(0), field(1), field(2));
        let frame = Frame { kind, post, key, offset: field(3), arg: field(4), len: field(5) };
        // Check the length first, because it limits the number of buffered bytes.
        if frame.len > RMA as u64 || kind == MESSAGE_FRAME && frame.len > MESSAGE as u64 {
            return Err(Violation::Length);
        }
        let end = Frame::SIZE + frame.len as usize;
        if bytes.len() < end {
            return Ok(None);
        }
        let payload = bytes[Frame::SIZE..end].to_vec();
        bytes.drain(..end);
        Ok(Some((frame, payload)))
    }
}

struct Link {
    to: File,
    from: File,
    read: Vec<u8>,
    /// Reported once, by the next poll.
    broken: Option<PeerError>,
    reported: bool,
}

impl Link {
    /// Appends a frame. After an error nothing more is written. So a half-written frame stays
    /// incomplete, and the peer never applies it.
    fn send(&mut self, frame: Frame, payload: &[u8]) -> Result<(), PostError> {
        if self.broken.is_some() {
            return Err(PostError::PeerDown);
        }
        let bytes = [&frame.encode(), payload].concat();
        self.to.write_all(&bytes).map_err(|_| {
            self.broken = Some(PeerError::Lost);
            PostError::PeerDown
        })
    }
}

struct Pending {
    post: u64,
    peer: Peer,
    cx: u64,
    /// The destination, if the post is a read.
    into: Option<Local>,
}

/// A rail over files.
pub struct FileRail {
    links: Vec<Option<Link>>,
    /// The registered regions and the use count of each slot. The count is part of a key, so the
    /// key of a deregistered region is invalid.
    regions: [(Option<Region>, u64); REGIONS],
    pending: Vec<Pending>,
    ended: Vec<u64>,
    posts: u64,
}

impl Default for FileRail {
    fn default() -> Self {
        let regions = [(None, 0); REGIONS];
        FileRail { links: vec![], regions, pending: vec![], ended: vec![], posts: 0 }
    }
}

impl FileRail {
    /// Returns the key of a slot: its index, the region's length, and the slot's use count.
    fn key(&self, place: usize) -> u64 {
        let (region, uses) = &self.regions[place];
        let len = region.as_ref().map_or(0, Region::len) as u64;
        uses << 40 | len << 8 | place as u64
    }

    fn resolve(&self, key: u64, offset: u64, len: u64) -> Option<NonNull<u8>> {
        let place = key as usize & 0xff;
        let region = self.regions.get(place)?.0.as_ref()?;
        let end = offset.checked_add(len)?;
        if self.key(place) != key || end > region.len() as u64 {
            return None;
        }
        // SAFETY: `offset <= end <= region.len()`, so the address lies in the region.
        Some(unsafe { region.ptr().add(offset as usize) })
    }

    fn post(
        &mut self,
        (peer, cx): (Peer, u64),
        frame: Frame,
        payload: &[u8],
        into: Option<Local>,
    ) -> Result<Posted, PostError> {
        if self.pending.len() == DEPTH {
            return Err(PostError::Again);
        }
        let link = self.links.get_mut(usize::from(peer.0)).and_then(Option::as_mut);
        let post = self.posts;
        link.ok_or(PostError::PeerDown)?.send(Frame { post, ..frame }, payload)?;
        self.pending.push(Pending { post, peer, cx, into });
        self.posts += 1;
        Ok(Posted::Pending)
    }

    fn handle<S: Sink>(
        &mut self,
        peer: Peer,
        frame: Frame,
        payload: &[u8],
        sink: &mut S,
    ) -> Result<(), Violation> {
        let mut answer = vec![];
        let mut failed = false;
        match frame.kind {
            WRITE | WRITE_WITH_WORD => match self.resolve(frame.key, frame.offset, frame.len) {
                Some(to) => {
                    // SAFETY: the range lies in a registered region, which is writable.
                    unsafe { ptr::copy(payload.as_ptr(), to.as_ptr(), payload.len()) };
                    if frame.kind == WRITE_WITH_WORD {
                        sink.landed(peer, frame.arg as u32);
                    }
                }
                None => failed = true,
            },
            READ if frame.arg > RMA as u64 => return Err(Violation::Length),
            READ => match self.resolve(frame.key, frame.offset, frame.arg) {
                Some(from) => {
                    answer.resize(frame.arg as usize, 0);
                    // SAFETY: the range lies in a registered region, which is readable.
                    unsafe { ptr::copy(from.as_ptr(), answer.as_mut_ptr(), answer.len()) };
                }
                None => failed = true,
            },
            MESSAGE_FRAME => sink.message(peer, Untrusted::from_slice(payload)),
            DONE => {
                let is = |pending: &Pending| (pending.post, pending.peer) == (frame.post, peer);
                // The answered post may belong to an earlier attachment.
                let Some(at) = self.pending.iter().position(is) else { return Ok(()) };
                let Pending { cx, into, .. } = self.pending[at];
                if frame.arg == 0 && into.map_or(0, |local| local.len) != payload.len() {
                    return Err(Violation::Reply);
                }
                self.pending.swap_remove(at);
                if frame.arg != 0 {
                    sink.done(cx, Err(CompleteError::Failed(1)));
                    return Ok(());
                }
                if let Some(local) = into {
                    // SAFETY: the destination is as long as the payload, and writable until the
                    // post is complete.
                    unsafe { ptr::copy(payload.as_ptr(), local.ptr.as_ptr(), local.len) };
                }
                sink.done(cx, Ok(()));
                return Ok(());
            }
            _ => return Err(Violation::Kind),
        }
        let len = answer.len() as u64;
        let done = Frame { kind: DONE, key: 0, offset: 0, arg: failed.into(), len, ..frame };
        if let Some(link) = &mut self.links[usize::from(peer.0)] {
            // If the write fails, the next poll reports the link as broken.
            _ = link.send(done, &answer);
        }
        Ok(())
    }

    /// Returns `false` if there is no frame.
    fn poll_link<S: Sink>(&mut self, peer: Peer, sink: &mut S) -> bool {
        let Some(link) = &mut self.links[usize::from(peer.0)] else { return false };
        if link.broken.is_some() {
            let report = !link.reported;
            link.reported = true;
            if report {
                self.end_all(peer);
                let why = self.links[usize::from(peer.0)].as_ref().and_then(|link| link.broken);
                sink.peer_down(peer, why.unwrap_or(PeerError::Lost));
            }
            return report;
        }
        let mut taken = Frame::take(&mut link.read);
        if matches!(taken, Ok(None)) {
            let mut bytes = [0; 4096];
            match link.from.read(&mut bytes) {
                Ok(n) => link.read.extend(&bytes[..n]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => link.broken = Some(PeerError::Lost),
            }
            taken = Frame::take(&mut link.read);
        }
        let handled = match taken {
            Ok(None) => return false,
            Ok(Some((frame, payload))) => self.handle(peer, frame, &payload, sink),
            Err(violation) => Err(violation),
        };
        if let (Err(violation), Some(link)) = (handled, &mut self.links[usize::from(peer.0)]) {
            link.broken = Some(PeerError::Protocol(violation));
        }
        true
    }

    /// The next poll reports the posts as failed.
    fn end_all(&mut self, peer: Peer) {
        let ended = &mut self.ended;
        self.pending.retain(|pending| {
            if pending.peer == peer {
                ended.push(pending.cx);
            }
            pending.peer != peer
        });
    }
}

/// Setup calls for a [`FileRail`] that an engine owns.
pub struct FileSetup<'a>(&'a mut FileRail);

impl FileSetup<'_> {
    /// Attaches a peer through two files: we append to `to`, and the peer appends to `from`. Use
    /// new files for each attachment. Blocks as `open` does, and allocates.
    pub fn attach(&mut self, peer: Peer, to: &Path, from: &Path) -> io::Result<()> {
        let links = &mut self.0.links;
        let place = usize::from(peer.0);
        if links.len() <= place {
            links.resize_with(place + 1, || None);
        }
        if links[place].is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let append = |path| OpenOptions::new().create(true).append(true).open(path);
        append(from)?; // Creates the file if the peer has not created it yet.
        let (to, from) = (append(to)?, File::open(from)?);
        links[place] = Some(Link { to, from, read: vec![], broken: None, reported: false });
        Ok(())
    }
}

// SAFETY: nothing is mapped. Writes and messages are copied when they are posted. Only a pending
// read accesses local memory later; it is removed when it completes or its peer is detached.
// `FileSetup` fills only free slots.
unsafe impl Rail for FileRail {
    type Setup<'a> = FileSetup<'a>;

    const COPIES: bool = false;

    fn setup(&mut self) -> FileSetup<'_> {
        FileSetup(self)
    }

    fn caps(&self) -> Caps {
        Caps {
            max_message: MESSAGE,
            max_rma: RMA,
            // A post copies the source of a write to the file, so the source may change at once.
            inject: RMA,
            data_bytes: 4,
            // The peer handles frames in the order posted.
            order: Order::All,
            native_atomics: AmoSet::NONE,
            depth: DEPTH as u32,
            fresh: false,
            fences: false,
        }
    }

    fn register(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError> {
        if matches!(region.kind(), RegionKind::Device { .. }) || region.len() >> 32 != 0 {
            return Err(AttachError::Unsupported);
        }
        let free = self.regions.iter().position(|(region, _)| region.is_none());
        let place = free.ok_or(AttachError::Full("file rail: 64 regions; deregister one"))?;
        self.regions[place].0 = Some(*region);
        Ok((RailKey { key: self.key(place), base: 0 }, 0))
    }

    fn deregister(&mut self, key: RailKey) -> Result<(), AttachError> {
        if self.resolve(key.key, 0, 0).is_some() {
            let (region, uses) = &mut self.regions[key.key as usize & 0xff];
            (*region, *uses) = (None, *uses + 1);
        }
        Ok(())
    }

    fn touches(&mut self, memory: Local) -> bool {
        let reads = self.pending.iter().filter_map(|pending| pending.into);
        reads.into_iter().any(|into| into.overlaps(memory.ptr.as_ptr(), memory.len))
    }

    /// Nothing is mapped. The key contains the region's length; the owner checks each access.
    fn import(
        &mut self,
        _: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        match (key.key & 0xff, key.key >> 8 & 0xffff_ffff) {
            (place, _) if place >= REGIONS as u64 => Err(AttachError::BadHandle),
            (_, registered) if len > registered => Err(AttachError::BadRange),
            _ => Ok(None),
        }
    }

    fn release(&mut self, _: Peer, _: RailKey) {}

    fn detach(&mut self, peer: Peer) {
        if let Some(link) = self.links.get_mut(usize::from(peer.0)) {
            *link = None;
            self.end_all(peer);
        }
    }

    unsafe fn post_write(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        if local.len > RMA {
            return Err(PostError::TooLong { len: local.len, max: RMA });
        }
        let mut payload = vec![0; local.len];
        // SAFETY: the source is readable, as the caller guarantees.
        unsafe { ptr::copy(local.ptr.as_ptr(), payload.as_mut_ptr(), local.len) };
        let (kind, arg) = data.map_or((WRITE, 0), |data| (WRITE_WITH_WORD, data.into()));
        let (key, offset, len) = (remote.key.key, remote.offset, local.len as u64);
        self.post((peer, cx), Frame { kind, post: 0, key, offset, arg, len }, &payload, None)
    }

    unsafe fn post_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        if local.len > RMA {
            return Err(PostError::TooLong { len: local.len, max: RMA });
        }
        let (key, offset, arg) = (remote.key.key, remote.offset, local.len as u64);
        self.post(
            (peer, cx),
            Frame { kind: READ, post: 0, key, offset, arg, len: 0 },
            &[],
            Some(local),
        )
    }

    fn post_message(
        &mut self,
        peer: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let len = head.len() + body.len();
        if len > MESSAGE {
            return Err(PostError::TooLong { len, max: MESSAGE });
        }
        let mut payload = head.to_vec();
        payload.resize(len, 0);
        body.copy_out(&mut payload[head.len()..]);
        let frame =
            Frame { kind: MESSAGE_FRAME, post: 0, key: 0, offset: 0, arg: 0, len: len as u64 };
        self.post((peer, cx), frame, &payload, None)
    }

    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let mut events = 0;
        for peer in 0..self.links.len() as u16 {
            while events < budget && self.poll_link(Peer(peer), sink) {
                events += 1;
            }
        }
        while events < budget
            && let Some(cx) = self.ended.pop()
        {
            sink.done(cx, Err(CompleteError::PeerDown));
            events += 1;
        }
        events
    }
}

/// Two engines of this process, joined by two files: a put-signal from one to the other.
pub fn main() -> Result<(), Box<dyn Error>> {
    let dir = std::env::temp_dir().join(format!("fishplate-file-rail-{}", std::process::id()));
    fs::create_dir_all(&dir)?;
    let (there, back) = (dir.join("there"), dir.join("back"));
    let (mut here, mut far) =
        (Tables::<1, 1, 128, 4, 16>::new(), Tables::<1, 1, 128, 4, 16>::new());
    let mut a = Engine::new(Config::DEFAULT, [FileRail::default()], here.memory())?;
    let mut b =
        Engine::new(Config { seed: 1, ..Config::DEFAULT }, [FileRail::default()], far.memory())?;

    let (to_b, to_a) = (a.reserve_peer()?, b.reserve_peer()?);
    a.rail_mut(RailId(0)).unwrap().attach(to_b.peer(), &there, &back)?;
    b.rail_mut(RailId(0)).unwrap().attach(to_a.peer(), &back, &there)?;
    a.connect_peer(to_b, 0b1)?;
    b.connect_peer(to_a, 0b1)?;

    let (mut source, mut target) = ([7u64; 4], [0u64; 4]);
    // SAFETY: both arrays outlive the engines' use of them, and are read only afterwards.
    let region = |words: &mut [u64; 4]| unsafe {
        Region::new(NonNull::from(words).cast(), 32, RegionKind::Private)
    };
    let from = a.register(region(&mut source))?;
    let into = b.register(region(&mut target))?;
    let mut handle = [0; HANDLE_MAX];
    let len = b.export(into, &mut handle)?;
    let theirs = a.import(to_b, &handle[..len])?;

    let signal = Signal::set(theirs.at(24), 1);
    a.put_signal(ContextId(0), from.at(0), 24, theirs.at(0), signal, Notice::Silent)
        .map_err(|e| format!("{e:?}"))?;
    while !a.is_quiet(ContextId(0), to_b).map_err(|e| format!("{e:?}"))? {
        a.progress();
        b.progress();
    }
    drop((a, b));
    fs::remove_dir_all(dir)?;
    println!("{target:?}");
    assert_eq!(target, [7, 7, 7, 1]);
    Ok(())
}
