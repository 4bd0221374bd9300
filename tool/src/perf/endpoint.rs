//! An [`Endpoint`]: one side of a run between two processes, over a [`Node`].
//!
//! Waits and refused operations are retried in slices of 100 ms, so that a side notices Ctrl-C and
//! the end of its time. Only the first try of each is on the hot path.

use std::ptr::NonNull;
use std::time::Duration;

use fishplate::node::{Error, Memory, Remote, Slice, Source};
use fishplate::{Cmp, Issued, LocalAddr, Node, Notice, PeerId, RemoteAddr, Signal};
use fishplate_core::engine::protocol::{Received, Request, Status};
use fishplate_core::engine::tag::Tag;
use fishplate_core::error::{OpError, WaitError};
use fishplate_core::op::{Amo, AmoOp, Outcome as Ended, SignalOp, Token};

use super::job::{Job, Side, Tally};
use super::ring;
use super::verbs::{Area, Verbs};
use super::watch::Watch;
use super::who::Who;
use crate::clock::Clock;
use crate::failure::{Failure, Outcome};
use crate::histogram::Histogram;
use crate::interrupt;
use crate::limits;
use crate::report::Moved;

/// How long one call of the node waits.
pub const SLICE: Duration = Duration::from_millis(100);

/// Where the areas begin in their regions. The floor is measured in front of them.
pub const AREAS_AT: usize = 4096;

/// The side that this process plays, and its node.
pub struct Endpoint<const STARTS: bool> {
    pub node: Node,
    pub peer: PeerId,
    /// Words, and where no device has it the landing area, here and there.
    pub words: (Memory, Remote),
    /// The landing area there.
    pub landing: Remote,
    pub buffer: Memory,
    /// The landing area on the device, if it is there; the buffer is, too.
    pub device: Option<Memory>,
    /// The areas as the processor sees them: landing, then buffer.
    pub views: [NonNull<u8>; 2],
    /// Size of each.
    pub lens: [usize; 2],
    /// Memory that both processes have mapped: words of the side that starts.
    pub common: Option<NonNull<u8>>,
    /// Messages up to this length are sent as bytes.
    pub eager: usize,
    pub clock: Clock,
    pub watch: Watch,
    /// Both sides share one processor.
    pub crowded: bool,
    pub who: Who,
    /// Memory behind the buffer and the views. Dropped after the node.
    pub _kept: Vec<Mapped>,
}

impl<const STARTS: bool> Endpoint<STARTS> {
    #[inline(always)]
    fn here(&self, word: usize) -> LocalAddr {
        self.words.0.at((AREAS_AT + word) as u64)
    }

    #[inline(always)]
    fn there(&self, word: usize) -> RemoteAddr {
        self.words.1.at((AREAS_AT + word) as u64)
    }

    #[inline(always)]
    fn target(&self, offset: usize) -> RemoteAddr {
        self.landing.at((AREAS_AT + offset) as u64)
    }

    #[inline(always)]
    fn slice(&self, offset: usize, len: usize) -> Slice {
        Slice::new(self.buffer.at(offset as u64), len)
    }

    /// Calls the node until it does what is wanted, the time is up, or it fails.
    #[inline(always)]
    fn retry<T, E: Into<Error>>(&mut self, mut call: impl FnMut(&mut Self) -> Result<T, E>) -> Outcome<T> {
        loop {
            match call(self) {
                Ok(done) => return Ok(done),
                Err(error) => self.again(error.into())?,
            }
        }
    }

    /// After a call that did not succeed in its slice: checks whether to go on.
    #[cold]
    #[inline(never)]
    fn again(&mut self, error: Error) -> Outcome {
        match error {
            Error::Op(OpError::Again) => self.check(),
            Error::Wait(WaitError::Deadline(_)) if !self.watch.is_up() => self.check(),
            error => Err(self.who.failed("an operation", error)),
        }
    }

    /// Waits for an operation, and returns what it fetched.
    #[inline(always)]
    fn finish(&mut self, issued: Issued) -> Outcome<u64> {
        match issued {
            Issued::Done { value } => Ok(value),
            Issued::Pending(token) => self.wait_for(token),
        }
    }

    #[inline(never)]
    fn wait_for(&mut self, token: Token) -> Outcome<u64> {
        let end = self.retry(|side| side.node.wait_completion(token, SLICE))?;
        match end.outcome {
            Ended::Done => Ok(end.value),
            outcome => Err(self.who.failed("an operation", Error::Failed(outcome))),
        }
    }

    fn right(&self, status: &Status) -> Outcome {
        match status.outcome {
            Received::Ok => Ok(()),
            outcome => Err(self.who.receive_ended(outcome)),
        }
    }

    /// A pass that found nothing. Sometimes checks whether to go on.
    #[inline(always)]
    pub fn idle(&mut self) -> Outcome {
        if self.watch.fruitless() { self.check() } else { Ok(()) }
    }

    /// Checks whether to go on: the peer lives, the time is not up, nobody has pressed Ctrl-C. Lets
    /// another thread run.
    #[cold]
    #[inline(never)]
    pub fn check(&mut self) -> Outcome {
        std::thread::yield_now();
        interrupt::check()?;
        match self.node.peer_error(self.peer) {
            Ok(None) if !self.watch.is_up() => Ok(()),
            Ok(None) => Err(self.expired()),
            Ok(Some(why)) => Err(self.who.lost(why)),
            Err(error) => Err(self.who.failed("the connection", error)),
        }
    }

    /// The time is up: names what this side has in flight, or else what it misses.
    #[cold]
    fn expired(&mut self) -> Failure {
        match self.node.quiet(self.peer, Duration::from_nanos(1)) {
            Ok(()) => self.who.out_of_time(self.node.missing(Some(self.peer))),
            Err(error) => self.who.failed("an operation", error),
        }
    }

    /// How device memory travelled so far, if a device has the payloads.
    pub fn moved(&self) -> Option<Moved> {
        let stats = self.node.gpu_stats()?;
        Some(Moved { direct: stats.direct, relayed: stats.relayed, stored: stats.stored })
    }

    fn on_device(&self, area: Area) -> Option<Memory> {
        self.device.map(|landing| if area == Area::Landing { landing } else { self.buffer })
    }
}

impl<const STARTS: bool> Verbs for Endpoint<STARTS> {
    #[inline(always)]
    fn plays(&self, side: Side) -> bool {
        (side == Side::Starts) == STARTS
    }

    #[inline(always)]
    fn clock(&self) -> Clock {
        self.clock
    }

    fn out_of_order(&self) -> u64 {
        self.node.stats().arrivals_out_of_order
    }

    fn set_timeout(&mut self, ns: u64) {
        self.watch.set(ns);
    }

    #[inline(always)]
    fn area(&self, _: Side, area: Area) -> (NonNull<u8>, usize) {
        (self.views[area as usize], self.lens[area as usize])
    }

    #[inline(always)]
    fn write_device(&mut self, area: Area, offset: usize, len: usize) -> Outcome {
        let Some(memory) = self.on_device(area) else { return Ok(()) };
        let at = memory.at((if area == Area::Landing { AREAS_AT } else { 0 } + offset) as u64);
        // SAFETY: inside the view, as the callers check; only this thread uses views of a device.
        let bytes =
            unsafe { std::slice::from_raw_parts(self.views[area as usize].as_ptr().add(offset), len) };
        self.node.write_device(at, bytes).map_err(|error| self.who.failed("a copy to the device", error))
    }

    #[inline(always)]
    fn read_device(&mut self, area: Area, offset: usize, len: usize) -> Outcome {
        let Some(memory) = self.on_device(area) else { return Ok(()) };
        let at = memory.at((if area == Area::Landing { AREAS_AT } else { 0 } + offset) as u64);
        // SAFETY: as in `write_device`.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(self.views[area as usize].as_ptr().add(offset), len) };
        self.node.read_device(at, bytes).map_err(|error| self.who.failed("a copy from the device", error))
    }

    fn set_word(&mut self, _: Side, offset: usize, value: u64) -> Outcome {
        let at = self.here(offset);
        self.node.store(at, value).map_err(|error| self.who.failed("a word", error))
    }

    fn word(&self, _: Side, offset: usize) -> Outcome<u64> {
        self.node.load(self.here(offset)).map_err(|error| self.who.failed("a word", error))
    }

    #[inline(always)]
    fn put(&mut self, _: Side, from: usize, len: usize, to: usize) -> Outcome {
        let (from, to) = (self.slice(from, len), self.target(to));
        self.retry(|side| side.node.put(from, to, Notice::Silent)).map(drop)
    }

    #[inline(always)]
    fn put_signal(
        &mut self,
        _: Side,
        from: usize,
        len: usize,
        to: usize,
        word: usize,
        value: u64,
    ) -> Outcome {
        let (from, to) = (self.slice(from, len), self.target(to));
        let signal = Signal::set(self.there(word), value);
        self.retry(|side| side.node.put_signal(from, to, signal, Notice::Silent)).map(drop)
    }

    #[inline(always)]
    fn signal(&mut self, _: Side, word: usize, op: SignalOp, value: u64) -> Outcome {
        let signal = Signal { at: self.there(word), op, value };
        self.retry(|side| side.node.signal(signal, Notice::Silent)).map(drop)
    }

    #[inline(always)]
    fn get(&mut self, _: Side, into: usize, len: usize, from: usize) -> Outcome {
        let (into, from) = (self.slice(into, len), self.target(from));
        let issued = self.retry(|side| side.node.get(into, from, Notice::Report(0)))?;
        self.finish(issued).map(drop)
    }

    #[inline(always)]
    fn fetch_add(&mut self, _: Side, word: usize) -> Outcome<u64> {
        let (at, amo) = (self.there(word), Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 });
        let issued = self.retry(|side| side.node.start_fetch(at, amo))?;
        self.finish(issued)
    }

    #[inline(always)]
    fn wait(&mut self, _: Side, word: usize, cmp: Cmp, value: u64) -> Outcome<u64> {
        let (at, from) = (self.here(word), Some(self.peer));
        self.retry(|side| side.node.wait(at, cmp, value, from, SLICE))
    }

    fn quiet(&mut self, _: Side) -> Outcome {
        let peer = self.peer;
        self.retry(|side| side.node.quiet(peer, SLICE))
    }

    #[inline(always)]
    fn send(&mut self, _: Side, tag: u64, offset: usize, len: usize) -> Outcome<u64> {
        let (peer, slice) = (self.peer, self.slice(offset, len));
        if len <= self.eager {
            let start = self.views[Area::Buffer as usize];
            // SAFETY: the tests use offsets inside the buffer, and the call ends before anything
            // writes there.
            let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr().add(offset), len) };
            self.retry(|side| side.node.send(peer, tag, Source::Bytes(bytes), Notice::Silent))?;
            return Ok(0);
        }
        let issued = self.retry(|side| side.node.send(peer, tag, slice, Notice::Report(tag)))?;
        Ok(u64::from(matches!(issued, Issued::Pending(_))))
    }

    fn sent(&mut self, _: Side, mut count: u64) -> Outcome {
        while count != 0 {
            match self.node.next_completion() {
                Some(end) if end.outcome == Ended::Done => count -= 1,
                Some(end) => return Err(self.who.failed("a send", Error::Failed(end.outcome))),
                None => {
                    self.node.progress();
                    self.idle()?;
                }
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn recv(&mut self, _: Side, tag: u64, offset: usize, len: usize, word: u64) -> Outcome<Request> {
        let (from, into) = (Some(self.peer), self.slice(offset, len));
        self.retry(|side| side.node.post_recv(from, tag, Tag::ZERO, into, word))
    }

    #[inline(always)]
    fn received(&mut self, _: Side, request: Request) -> Outcome {
        let status = self.retry(|side| side.node.wait_recv(request, SLICE))?;
        self.right(&status)
    }

    #[inline(always)]
    fn next_recv(&mut self, _: Side) -> Outcome<u64> {
        loop {
            if let Some(status) = self.node.next_recv() {
                self.right(&status)?;
                self.turn()?;
                return Ok(status.word);
            }
            self.node.progress();
            self.idle()?;
        }
    }

    #[inline(always)]
    fn lap(&mut self, histogram: &mut Histogram, last: &mut u64) -> Outcome {
        if self.watch.lap(histogram, last) { self.check() } else { Ok(()) }
    }

    #[inline(always)]
    fn turn(&mut self) -> Outcome {
        if self.watch.turn() { self.check() } else { Ok(()) }
    }

    fn ring(&mut self, job: &Job, histogram: Option<&mut Histogram>) -> Outcome<Tally> {
        ring::run(self, job, histogram)
    }
}

/// Zeroed private memory of whole pages. All pages exist from the beginning, so that none is made
/// while something is timed.
pub struct Mapped {
    ptr: NonNull<u8>,
    len: usize,
}

impl Mapped {
    /// Takes `len` bytes for a region of `region` bytes.
    pub fn new(region: usize, len: usize) -> Outcome<Self> {
        let len = len.max(1);
        limits::demand(region, len, len)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        // SAFETY: the system chooses a free place, so no memory of ours is replaced.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        match NonNull::new(at.cast()).filter(|_| at != libc::MAP_FAILED) {
            Some(ptr) => Ok(Mapped { ptr, len }),
            None => Err(limits::lack(region, fishplate_shm::SegmentError::System(libc::ENOMEM))),
        }
    }

    /// First byte.
    pub fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this very length.
        unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}
