//! [`Endpoint`] is one side of a run between two processes, over a [`Node`].
//!
//! Each wait, and each retry of a refused operation, lasts at most 100 ms. Between them the side
//! checks for Ctrl-C and its deadline. Only the first attempt is on the hot path.

use std::ptr::NonNull;
use std::time::Duration;

use fishplate::node::{Error, Memory, RailInfo, Remote, Slice};
use fishplate::{Issued, LocalAddr, Node, PeerId, RemoteAddr};
use fishplate_core::engine::protocol::{Received, Status};
use fishplate_core::error::{OpError, WaitError};
use fishplate_core::op::{Outcome as Ended, Token};

use super::verbs::Area;
use super::watch::Watch;
use super::who::Who;
use crate::clock::Clock;
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::limits;
use crate::rails::{OneRail, Rails};
use crate::report::Moved;

/// Time limit of one call, which is then repeated after a check.
pub const SLICE: Duration = Duration::from_millis(100);

/// The memory for measuring the floor precedes the areas.
pub const AREAS_AT: usize = 4096;

pub struct Endpoint<const STARTS: bool> {
    pub node: Node,
    pub peer: PeerId,
    /// Includes the landing area, unless that area is on a device.
    pub words: (Memory, Remote),
    pub landing: Remote,
    pub buffer: Memory,
    /// The landing area, if it is on a device. If so, the buffer is on that device too.
    pub device: Option<Memory>,
    pub views: [NonNull<u8>; 2],
    pub lens: [usize; 2],
    /// The memory of the starting side's words, if both processes have mapped it.
    pub common: Option<NonNull<u8>>,
    pub eager: usize,
    pub clock: Clock,
    pub watch: Watch,
    pub crowded: bool,
    pub who: Who,
    /// Owns the memory of the buffer and the views. Dropped after the node.
    pub _kept: Vec<Mapped>,
}

impl<const STARTS: bool> Endpoint<STARTS> {
    #[inline(always)]
    pub fn here(&self, word: usize) -> LocalAddr {
        self.words.0.at((AREAS_AT + word) as u64)
    }

    #[inline(always)]
    pub fn there(&self, word: usize) -> RemoteAddr {
        self.words.1.at((AREAS_AT + word) as u64)
    }

    #[inline(always)]
    pub fn target(&self, offset: usize) -> RemoteAddr {
        self.landing.at((AREAS_AT + offset) as u64)
    }

    #[inline(always)]
    pub fn slice(&self, offset: usize, len: usize) -> Slice {
        Slice::new(self.buffer.at(offset as u64), len)
    }

    #[inline(always)]
    pub fn retry<T, E: Into<Error>>(
        &mut self,
        mut call: impl FnMut(&mut Self) -> Result<T, E>,
    ) -> Outcome<T> {
        loop {
            match call(self) {
                Ok(done) => return Ok(done),
                Err(error) => self.again(error.into())?,
            }
        }
    }

    #[cold]
    #[inline(never)]
    pub fn again(&mut self, error: Error) -> Outcome {
        match error {
            Error::Op(OpError::Again) => self.check(),
            Error::Wait(WaitError::Deadline(_)) if !self.watch.is_up() => self.check(),
            error => Err(self.who.failed("an operation", error)),
        }
    }

    #[inline(always)]
    pub fn finish(&mut self, issued: Issued) -> Outcome<u64> {
        match issued {
            Issued::Done { value } => Ok(value),
            Issued::Pending(token) => self.wait_for(token),
        }
    }

    #[inline(never)]
    pub fn wait_for(&mut self, token: Token) -> Outcome<u64> {
        let end = self.retry(|side| side.node.wait_completion(token, SLICE))?;
        match end.outcome {
            Ended::Done => Ok(end.value),
            outcome => Err(self.who.failed("an operation", Error::Failed(outcome))),
        }
    }

    #[inline(always)]
    pub fn right(&self, status: Status) -> Outcome<u64> {
        match status.outcome {
            Received::Ok => Ok(status.word),
            outcome => Err(self.who.receive_ended(outcome)),
        }
    }

    /// Counts a pass without events. At intervals, checks whether to continue.
    #[inline(always)]
    pub fn idle(&mut self) -> Outcome {
        if self.watch.fruitless() { self.check() } else { Ok(()) }
    }

    /// Fails if the peer has failed, the time is up, or the user has pressed Ctrl-C. First lets
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

    /// Names this side's operations in flight, or the missing arrivals.
    #[cold]
    pub fn expired(&mut self) -> Failure {
        match self.node.quiet(self.peer, Duration::from_nanos(1)) {
            Ok(()) => self.who.out_of_time(self.node.missing(Some(self.peer))),
            Err(error) => self.who.failed("an operation", error),
        }
    }

    /// Returns the number of payloads that took each path so far. `None` if payloads are in host
    /// memory.
    pub fn moved(&self) -> Option<Moved> {
        let stats = self.node.gpu_stats()?;
        Some(Moved { direct: stats.direct, relayed: stats.relayed, stored: stats.stored })
    }

    pub fn rails(&self) -> Rails {
        let stats = self.node.stats();
        let counts = |info: &RailInfo| self.node.rail_stats(info.id).unwrap_or_default().values();
        let each = (0..).zip(self.node.rails());
        Rails {
            failed: stats.rails_failed,
            returned: stats.rails_returned,
            reposted: stats.reposted,
            each: each.map(|(rail, info)| OneRail { rail, values: counts(info) }).collect(),
        }
    }

    /// Describes what has happened to each rail.
    pub fn what_happened(&self, rails: &Rails) -> Vec<String> {
        let told = self.node.rails().iter().zip(&rails.each);
        told.filter_map(|(info, one)| Some(format!("{}: {}", self.who.rail(info.id), one.text()?)))
            .collect()
    }

    /// Describes each rail that is out of use.
    pub fn out_of_use(&self) -> Vec<String> {
        let errors = self.node.rail_errors(self.peer).unwrap_or_default();
        errors.iter().map(|error| self.who.out_of_use(error)).collect()
    }

    pub fn on_device(&self, area: Area) -> Option<Memory> {
        self.device.map(|landing| if area == Area::Landing { landing } else { self.buffer })
    }
}

/// Zeroed private memory of whole pages. All pages are allocated at once, so that timed code
/// allocates none.
pub struct Mapped {
    ptr: NonNull<u8>,
    len: usize,
}

impl Mapped {
    pub fn new(region: usize, len: usize) -> Outcome<Self> {
        let len = len.max(1);
        limits::demand(region, len, len)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        // SAFETY: the system chooses a free range, so no memory of ours is replaced.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        match NonNull::new(at.cast()).filter(|_| at != libc::MAP_FAILED) {
            Some(ptr) => Ok(Mapped { ptr, len }),
            None => Err(limits::lack(region, fishplate_shm::SegmentError::System(libc::ENOMEM))),
        }
    }

    pub fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: `new` mapped this memory with this length, and nothing uses it after the drop.
        unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}
