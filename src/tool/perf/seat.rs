//! A [`Seat`]: one side's engine, and the memory it measures with.
//!
//! Everything a test touches in its timed loop is here. The arena is what the other side writes to; the buffer is this side's private
//! memory, from which it sends and into which it gets. Both are as large as each other and are mapped, but not touched,
//! until a test does.

use std::alloc::{Layout as Block, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use fishplate_core::engine::{ContextId, Engine, Waiter};
use fishplate_core::error::{OpError, WaitError};
use fishplate_core::mem::{LocalId, PeerId, Region, RegionKind, RemoteId};
use fishplate_core::op::Cmp;
use fishplate_core::rail::Rail;
use fishplate_shm::Bell;
use fishplate_sys::LinuxHost;

use crate::tool::clock::{Clock, monotonic_ns};
use crate::tool::failure::{Failure, Outcome};

/// Ticks of the clock after which a stream of direct operations looks whether its peer lives: some 10 to 30 ms.
pub const LOOK_TICKS: u64 = 1 << 25;

/// The context that the tests use.
pub const CONTEXT: ContextId = ContextId(0);

/// One side of a run.
pub struct Seat<'m, R: Rail, const RAILS: usize> {
    /// The engine.
    pub engine: Engine<'m, R, RAILS>,
    /// How this side waits when it drives the engine itself.
    pub waiter: Waiter<'m, LinuxHost>,
    /// What a worker sleeps on, where the rail rings something.
    pub bell: Option<Bell>,
    /// The other side.
    pub peer: PeerId,
    /// The arena here, which the other side writes to.
    pub ours: LocalId,
    /// First byte of it.
    pub arena: NonNull<u8>,
    /// The arena there.
    pub theirs: RemoteId,
    /// Private memory to send from and to get into.
    pub buffer: LocalId,
    /// First byte of it.
    pub bytes: NonNull<u8>,
    /// What time is measured with.
    pub clock: Clock,
    /// Both sides share one processor.
    pub crowded: bool,
    /// How to name the other side in messages.
    pub name: String,
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
        assert!(offset.is_multiple_of(8) && self.engine.local_ptr(self.ours.at(offset as u64), 8).is_some());
        // SAFETY: inside the arena, as just checked, and a multiple of 8 bytes from its page-aligned start; words of
        // the arena are only accessed atomically.
        unsafe { self.arena.add(offset).cast::<AtomicU64>().as_ref() }
    }

    /// Waits until a word of the arena here has a value.
    #[inline(always)]
    pub fn wait(&mut self, offset: usize, cmp: Cmp, value: u64, deadline_ns: u64) -> Outcome<u64> {
        let at = self.ours.at(offset as u64);
        match self.engine.wait_signal(at, cmp, value, Some(self.peer), &mut self.waiter, deadline_ns) {
            Ok(word) => Ok(word),
            Err(error) => Err(self.wait_failed(error)),
        }
    }

    /// Waits until everything sent is applied.
    #[inline(always)]
    pub fn quiet(&mut self, deadline_ns: u64) -> Outcome {
        match self.engine.quiet(CONTEXT, self.peer, &mut self.waiter, deadline_ns) {
            Ok(()) => Ok(()),
            Err(error) => Err(self.wait_failed(error)),
        }
    }

    /// Says what became of a wait.
    #[cold]
    pub fn wait_failed(&self, error: WaitError) -> Failure {
        wait_failed(&self.name, error)
    }

    /// After a refused operation: makes progress if that may help, and otherwise says what is wrong.
    #[cold]
    #[inline(never)]
    pub fn refused(&mut self, error: OpError, deadline_ns: u64) -> Outcome {
        match error {
            OpError::Again => {
                self.engine.progress();
                if monotonic_ns() > deadline_ns {
                    return Err(Failure::run(format!("{} takes no more operations", self.name)));
                }
                Ok(())
            }
            OpError::PeerFailed(why) => Err(Failure::lost(&self.name, why)),
            error => Err(Failure::run(format!("an operation to {} was refused: {error:?}", self.name))),
        }
    }

    /// While waiting outside of the engine: lets another thread run, and sees whether there is still somebody to wait for.
    #[cold]
    pub fn check(&mut self, deadline_ns: u64) -> Outcome {
        std::thread::yield_now();
        self.engine.check_peers();
        match self.engine.peer_error(self.peer) {
            Ok(None) if monotonic_ns() <= deadline_ns => Ok(()),
            Ok(None) => Err(Failure::run(format!("{} did not answer in time", self.name))),
            Ok(Some(why)) => Err(Failure::lost(&self.name, why)),
            Err(error) => Err(Failure::lost(&self.name, error)),
        }
    }
}

/// Says what became of a wait for somebody.
#[cold]
pub fn wait_failed(name: &str, error: WaitError) -> Failure {
    match error {
        WaitError::PeerFailed(_, why) => Failure::lost(name, why),
        WaitError::Deadline(_) => Failure::run(format!(
            "{name} did not answer in time; a longer --timeout helps if it is only slow"
        )),
        error => Failure::run(format!("waiting for {name} failed: {error:?}")),
    }
}

/// Issues an operation on a seat, making progress while there is no room for it.
macro_rules! issue {
    ($seat:expr, $deadline:expr, $engine:ident => $call:expr) => {
        loop {
            let $engine = &mut $seat.engine;
            match $call {
                Ok(issued) => break issued,
                Err(error) => $seat.refused(error, $deadline)?,
            }
        }
    };
}
pub(crate) use issue;

/// Zeroed private memory, aligned to a page. Not touched until used.
pub struct Buffer {
    ptr: NonNull<u8>,
    block: Block,
}

impl Buffer {
    /// Takes `len` bytes.
    pub fn new(len: usize) -> Outcome<Self> {
        let block = Block::from_size_align(len.max(1), 4096).map_err(|_| {
            Failure::usage(format!("--region: {len} bytes are more than this machine can address"))
        })?;
        // SAFETY: the size is not zero.
        let ptr = unsafe { alloc_zeroed(block) };
        match NonNull::new(ptr) {
            Some(ptr) => Ok(Buffer { ptr, block }),
            None => handle_alloc_error(block),
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
        // SAFETY: the memory is ours and lives as long as the caller promises; the tool touches it only through raw
        // pointers, atomics and the engine.
        unsafe { Region::new(self.ptr, self.block.size(), RegionKind::Private) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this very block.
        unsafe { dealloc(self.ptr.as_ptr(), self.block) }
    }
}
