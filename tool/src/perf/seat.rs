//! A [`Seat`]: one side's engine, and the memory it measures with.
//!
//! Everything a test touches in its timed loop is here. The arena is what the other side writes to;
//! the buffer is this side's private memory, from which it sends and into which it gets. Both are
//! as large as each other.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use fishplate::{Limits, MatchStorage, Storage};
use fishplate_core::engine::protocol::{MatchConfig, Payload, Received, Request, Status};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{Asleep, Config, ContextId, Engine, HANDLE_MAX, Notice, Waiter};
use fishplate_core::error::{AttachError, OpError, WaitError};
use fishplate_core::mem::{LocalId, PeerId, Region, RegionKind, RemoteId};
use fishplate_core::op::Cmp;
use fishplate_core::rail::Rail;
use fishplate_shm::{SegmentError, WaitObject};
use fishplate_sys::LinuxHost;

use super::watch::Watch;
use super::who::Who;
use crate::clock::Clock;
use crate::failure::{Failure, Outcome};
use crate::histogram::Histogram;
use crate::room;

/// Two-sided messages in the tests: twice as many credits as numbers may be in flight, so that a
/// receiver that posts its receives in time never makes its sender wait for more than the window.
pub const MATCHING: MatchConfig = MatchConfig { credits: 512, headers: 512, ..MatchConfig::DEFAULT };

/// Receives that a test has open at once.
pub const RECEIVES: usize = 1024;

/// What one process of two has at once.
pub const LIMITS: Limits = Limits { peers: 1, locals: 4, remotes: 8, operations: 1024 };

/// The context that the tests use.
pub const CONTEXT: ContextId = ContextId(0);

/// Memory that payloads are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// What the other side writes to.
    Landing,
    /// What this side sends from and gets into.
    Buffer,
}

/// Copies payloads from processor memory into device memory, and back.
/// Slow path: waits for the device.
pub trait Mirror: Send {
    /// Into the device.
    fn give(&mut self, memory: Memory, offset: usize, len: usize) -> Outcome;

    /// Out of it.
    fn take(&mut self, memory: Memory, offset: usize, len: usize) -> Outcome;
}

/// One side of a run.
pub struct Seat<'m, R: Rail, const RAILS: usize> {
    /// The engine.
    pub engine: Engine<'m, R, RAILS>,
    /// How this side waits when it drives the engine itself.
    pub waiter: Waiter<'m, LinuxHost>,
    /// What a worker sleeps on, where the rail rings something.
    pub bell: Option<WaitObject>,
    /// The other side.
    pub peer: PeerId,
    /// The arena here, which the other side writes to.
    pub ours: LocalId,
    /// First byte of it.
    pub arena: NonNull<u8>,
    /// The arena there.
    pub theirs: RemoteId,
    /// Where payloads go there: the arena, or memory of a device.
    pub there: RemoteId,
    /// Where payloads come here, as the processor sees them.
    pub landing: NonNull<u8>,
    /// Whether payloads are in memory of a device: then none of it travels in a call.
    pub on_device: bool,
    /// What keeps what the processor sees of a device's memory equal to it, when a test asks for
    /// that. Without it, both are one.
    pub mirror: Option<Box<dyn Mirror>>,
    /// Private memory to send from and to get into.
    pub buffer: LocalId,
    /// First byte of it.
    pub bytes: NonNull<u8>,
    /// What time is measured with.
    pub clock: Clock,
    /// How long this side goes on.
    pub watch: Watch,
    /// Both sides share one processor.
    pub crowded: bool,
    /// How to name the other side in messages.
    pub name: Who,
}

impl<'m, R: Rail, const RAILS: usize> Seat<'m, R, RAILS> {
    /// A side that has met the other: payloads go from the buffer here into the arena there. Memory
    /// comes as its name and its first byte.
    pub fn new(
        (engine, waiter): Driven<'m, R, RAILS>,
        peer: PeerId,
        (ours, arena): (LocalId, NonNull<u8>),
        theirs: RemoteId,
        (buffer, bytes): (LocalId, NonNull<u8>),
        clock: Clock,
        name: Who,
    ) -> Self {
        Seat {
            engine,
            waiter,
            bell: None,
            peer,
            ours,
            arena,
            theirs,
            there: theirs,
            landing: arena,
            on_device: false,
            mirror: None,
            buffer,
            bytes,
            clock,
            watch: Watch::new(clock),
            crowded: false,
            name,
        }
    }
}

impl<R: Rail, const RAILS: usize> Seat<'_, R, RAILS> {
    /// Says whether both sides share one processor: then, whoever waits gives way at once.
    pub fn set_crowded(&mut self, crowded: bool) {
        self.crowded = crowded;
        self.waiter.set_oversubscribed(crowded);
    }

    /// Stores into a word of the arena here, before a test begins.
    pub fn set_word(&self, offset: usize, value: u64) {
        self.word(offset).store(value, Ordering::Release);
    }

    /// A word of the arena here.
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && self.engine.local_ptr(self.ours.at(offset as u64), 8).is_ok());
        // SAFETY: inside the arena, as just checked, and a multiple of 8 bytes from its
        // page-aligned start; words of the arena are only accessed atomically.
        unsafe { self.arena.add(offset).cast::<AtomicU64>().as_ref() }
    }

    /// Waits until a word of the arena here has a value.
    #[inline(always)]
    pub fn wait(&mut self, offset: usize, cmp: Cmp, value: u64) -> Outcome<u64> {
        let deadline_ns = self.watch.deadline_ns();
        let at = self.ours.at(offset as u64);
        match self.engine.wait_signal(at, cmp, value, Some(self.peer), &mut self.waiter, deadline_ns) {
            Ok(word) => Ok(word),
            Err(error) => Err(self.wait_failed(error)),
        }
    }

    /// Waits until everything sent is applied.
    #[inline(always)]
    pub fn quiet(&mut self) -> Outcome {
        let deadline_ns = self.watch.deadline_ns();
        match self.engine.quiet(CONTEXT, self.peer, &mut self.waiter, deadline_ns) {
            Ok(()) => Ok(()),
            Err(error) => Err(self.wait_failed(error)),
        }
    }

    /// Makes a payload that the processor has written be there.
    #[inline(always)]
    pub fn give(&mut self, memory: Memory, offset: usize, len: usize) -> Outcome {
        match &mut self.mirror {
            None => Ok(()),
            Some(mirror) => mirror.give(memory, offset, len),
        }
    }

    /// Lets the processor see a payload that is there.
    #[inline(always)]
    pub fn take(&mut self, memory: Memory, offset: usize, len: usize) -> Outcome {
        match &mut self.mirror {
            None => Ok(()),
            Some(mirror) => mirror.take(memory, offset, len),
        }
    }

    /// Whether payloads are in memory that the processor may not touch.
    #[inline(always)]
    pub fn is_mirrored(&self) -> bool {
        self.mirror.is_some()
    }

    /// The payload of a message: a slice where that is short enough to travel in it.
    #[inline(always)]
    pub fn payload(&self, offset: usize, len: usize) -> Payload<'_> {
        if len <= self.engine.eager_max(self.peer) && !self.on_device {
            // SAFETY: the tests use offsets inside the buffer;
            // nothing writes there before the send returns.
            Payload::Bytes(unsafe { std::slice::from_raw_parts(self.bytes.as_ptr().add(offset), len) })
        } else {
            Payload::Region(self.buffer.at(offset as u64), len)
        }
    }

    /// Sends `len` bytes of the buffer, making progress while there is no room.
    /// Returns whether its end is reported.
    #[inline(always)]
    pub fn send(&mut self, tag: u64, offset: usize, len: usize) -> Outcome<bool> {
        loop {
            let payload: Payload<'static> = match self.payload(offset, len) {
                // SAFETY: the buffer is not freed before the engine is,
                // and the call below is over before anything writes there.
                Payload::Bytes(bytes) => Payload::Bytes(unsafe { &*(bytes as *const [u8]) }),
                Payload::Region(at, len) => Payload::Region(at, len),
                Payload::Span(span) => Payload::Span(span),
            };
            match self.engine.send(CONTEXT, self.peer, Tag::from(tag), payload, Notice::Report(tag)) {
                Ok(issued) => return Ok(matches!(issued, fishplate_core::engine::Issued::Pending(_))),
                Err(error) => self.refused(error)?,
            }
        }
    }

    /// Posts a receive of a message with this tag into the buffer.
    #[inline(always)]
    pub fn recv(&mut self, tag: u64, offset: usize, len: usize) -> Outcome<Request> {
        let into = Some((self.buffer.at(offset as u64), len));
        let posted = self.engine.recv(Some(self.peer), Tag::from(tag), Tag::ZERO, into, tag);
        posted.map_err(|error| Failure::run(format!("a receive was refused: {error}")))
    }

    /// Waits for a receive.
    #[inline(always)]
    pub fn received(&mut self, request: Request) -> Outcome<Status> {
        let deadline_ns = self.watch.deadline_ns();
        match self.engine.wait_recv(request, &mut self.waiter, deadline_ns) {
            Ok(status) if status.outcome == Received::Ok => Ok(status),
            Ok(status) => Err(self.name.receive_ended(status.outcome)),
            Err(error) => Err(self.wait_failed(error)),
        }
    }

    /// Makes progress until so many sends have ended.
    pub fn sent(&mut self, mut count: u64) -> Outcome {
        while count != 0 {
            match self.engine.next_completion() {
                Some(end) if end.outcome == fishplate_core::op::Outcome::Done => count -= 1,
                Some(end) => return Err(self.name.ended("a send", end.outcome)),
                None => {
                    self.engine.progress();
                    self.idle()?;
                }
            }
        }
        Ok(())
    }

    /// Says what became of a wait.
    #[cold]
    pub fn wait_failed(&self, error: WaitError) -> Failure {
        self.name.wait_failed(error)
    }

    /// The time is up: names what this side has outstanding, or else what it misses.
    #[cold]
    pub fn expired(&mut self) -> Failure {
        match self.engine.quiet(CONTEXT, self.peer, &mut self.waiter, 1) {
            Ok(()) => self.name.out_of_time(self.engine.missing(Some(self.peer))),
            Err(error) => self.wait_failed(error),
        }
    }

    /// After a refused operation: makes progress if that may help, and otherwise reports it.
    #[cold]
    #[inline(never)]
    pub fn refused(&mut self, error: OpError) -> Outcome {
        match error {
            OpError::Again => match self.engine.progress() {
                0 => self.idle(),
                _ => self.turn(),
            },
            OpError::PeerFailed(why) => Err(self.name.lost(why)),
            error => Err(Failure::run(format!("an operation to {} was refused: {error}", self.name))),
        }
    }

    /// Records a sample that ends now, where the next begins. Now and then looks whether to go on.
    #[inline(always)]
    pub fn lap(&mut self, histogram: &mut Histogram, last: &mut u64) -> Outcome {
        if self.watch.lap(histogram, last) { self.check() } else { Ok(()) }
    }

    /// A turn of a loop that records nothing. Now and then looks whether to go on.
    #[inline(always)]
    pub fn turn(&mut self) -> Outcome {
        if self.watch.turn() { self.check() } else { Ok(()) }
    }

    /// A turn of a loop that found nothing to do. Now and then lets another thread run, and looks
    /// whether to go on.
    #[inline(always)]
    pub fn idle(&mut self) -> Outcome {
        if self.watch.fruitless() { self.check() } else { Ok(()) }
    }

    /// Looks whether to go on: whether the peer lives, and the time is not up. Lets another thread
    /// run.
    #[cold]
    #[inline(never)]
    pub fn check(&mut self) -> Outcome {
        std::thread::yield_now();
        self.engine.check_peers();
        match self.engine.peer_error(self.peer) {
            Ok(None) if !self.watch.is_up() => Ok(()),
            Ok(None) => Err(self.expired()),
            Ok(Some(why)) => Err(self.name.lost(why)),
            Err(error) => Err(Failure::run(format!("{} is not known: {error}", self.name))),
        }
    }
}

/// Issues an operation on a seat, making progress while there is no room for it.
macro_rules! issue {
    ($seat:expr, $engine:ident => $call:expr) => {
        loop {
            let $engine = &mut $seat.engine;
            match $call {
                Ok(issued) => break issued,
                Err(error) => $seat.refused(error)?,
            }
        }
    };
}
pub(crate) use issue;

/// An engine, and how a side waits that drives it itself.
pub type Driven<'m, R, const RAILS: usize> = (Engine<'m, R, RAILS>, Waiter<'m, LinuxHost>);

/// What the engine of one process of two borrows.
pub struct Base<const RAILS: usize> {
    config: Config,
    storage: Storage<RAILS>,
    matching: MatchStorage<RAILS>,
    host: LinuxHost,
    never: Asleep,
}

impl<const RAILS: usize> Base<RAILS> {
    /// Takes the memory.
    pub fn new(config: Config, host: LinuxHost) -> Self {
        Base {
            config,
            storage: Storage::new(&config, LIMITS),
            matching: MatchStorage::new(&MATCHING, 1, RECEIVES, 1),
            host,
            never: Asleep::new(),
        }
    }

    /// Sets the engine up over its rails.
    pub fn engine<R: Rail>(&mut self, rails: [R; RAILS]) -> Outcome<Driven<'_, R, RAILS>> {
        let refused = |error| room::attach_failed("the connection", error);
        let mut engine = self.storage.engine(self.config, rails).map_err(refused)?;
        engine.attach_matching(MATCHING, self.matching.memory()).map_err(refused)?;
        Ok((engine, Waiter::awake(&self.host, &self.never)))
    }
}

/// The handle of a region, to be told to the other side.
pub fn handle<R: Rail, const RAILS: usize>(
    engine: &Engine<'_, R, RAILS>,
    region: LocalId,
) -> Result<Vec<u8>, AttachError> {
    let mut handle = [0; HANDLE_MAX];
    let len = engine.export(region, &mut handle)?;
    Ok(handle[..len].to_vec())
}

/// Zeroed private memory, aligned to a page. All of it is there from the beginning: no page is
/// made, and none is one that stands in for pages never written, while something is timed.
pub struct Buffer {
    ptr: NonNull<u8>,
    len: usize,
}

impl Buffer {
    /// Takes `len` bytes for a region of `region` bytes.
    pub fn new(region: usize, len: usize) -> Outcome<Self> {
        let len = len.max(1);
        room::demand(region, len, len)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        // SAFETY: the system chooses a free place, so no memory of ours is replaced.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        match NonNull::new(at.cast()).filter(|_| at != libc::MAP_FAILED) {
            Some(ptr) => Ok(Buffer { ptr, len }),
            None => Err(room::lack(region, SegmentError::System(libc::ENOMEM))),
        }
    }

    /// First byte.
    pub fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// All of it, to be registered.
    ///
    /// # Safety
    /// The buffer outlives the engine that it is registered with.
    pub unsafe fn region(&self) -> Region {
        // SAFETY: the memory is ours and lives as long as the caller promises; the tool touches it
        // only through raw pointers, atomics and the engine.
        unsafe { Region::new(self.ptr, self.len, RegionKind::Private) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this very length.
        unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}
