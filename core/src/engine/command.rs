//! Commands: requests of a queue to its worker, with their state and result. A command occupies a
//! slot of its queue's pool from its creation until its last [`Event`] is dropped. The worker
//! writes the result to that slot. Nothing here blocks or allocates.
//!
//! | edge         | release                    | acquire                | carries        |
//! |--------------|----------------------------|------------------------|----------------|
//! | `queue.done` | state, by the worker       | state, by [`Event`]    | the [`Reply`]  |

use core::cell::UnsafeCell;

use crate::error::{OpError, WaitError};
use crate::mem::{LocalAddr, PeerId, RemoteAddr};
use crate::op::{Amo, Cmp, Outcome};
use crate::sync::event::{EventCount, Listeners, Listening};
use crate::sync::pool::Shared;
use crate::sync::primitive::{AtomicU32, Watch, edge};

use super::Signal;
use super::protocol::{Cancelled, Claimed, Envelope, Received, Status};
use super::tag::Tag;

/// A request of a queue to its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Calls [`Engine::put`](super::Engine::put).
    Put {
        /// First byte to read.
        from: LocalAddr,
        /// Length in bytes.
        len: usize,
        /// First byte to write.
        to: RemoteAddr,
    },
    /// Calls [`Engine::put_signal`](super::Engine::put_signal).
    PutSignal {
        /// First byte to read.
        from: LocalAddr,
        /// Length in bytes.
        len: usize,
        /// First byte to write.
        to: RemoteAddr,
        /// The signal, which is applied after the data.
        signal: Signal,
    },
    /// Calls [`Engine::get`](super::Engine::get).
    Get {
        /// First byte to write.
        into: LocalAddr,
        /// Length in bytes.
        len: usize,
        /// First byte to read.
        from: RemoteAddr,
    },
    /// Calls [`Engine::signal`](super::Engine::signal).
    Signal(Signal),
    /// Calls [`Engine::amo`](super::Engine::amo), or [`Engine::fetch`](super::Engine::fetch) if
    /// `fetch` is set.
    Amo {
        /// The word to change.
        at: RemoteAddr,
        /// The operation on the word.
        amo: Amo,
        /// Whether the reply has the old value.
        fetch: bool,
    },
    /// Calls [`Engine::fence`](super::Engine::fence).
    Fence(PeerId),
    /// Waits like [`Engine::quiet`](super::Engine::quiet). Later commands of the same queue wait
    /// until this command is done.
    Quiet(PeerId),
    /// Waits like [`Engine::wait_signal`](super::Engine::wait_signal). The worker polls the word
    /// between its other work.
    Watch {
        /// The word to watch.
        at: LocalAddr,
        /// The comparison of the word with `value`.
        cmp: Cmp,
        /// The value to compare the word with.
        value: u64,
        /// The peer that signals, if known. Its failure ends the watch.
        from: Option<PeerId>,
    },
    /// Fills registered local memory with a pattern. Each turn of the worker writes one piece.
    Fill {
        /// First byte to write.
        at: LocalAddr,
        /// Length in bytes, a multiple of `width`.
        len: usize,
        /// The pattern. Its low `width` bytes are used, lowest first.
        pattern: u64,
        /// Width of the pattern, in bytes: 1, 2, 4 or 8.
        width: u8,
    },
    /// Copies within registered memory of this process. Each turn of the worker copies one piece,
    /// in ascending order. If the ranges overlap, the target must be at the lower address.
    Copy {
        /// First byte to read.
        from: LocalAddr,
        /// Length in bytes.
        len: usize,
        /// First byte to write.
        to: LocalAddr,
    },
    /// Copies from one peer to another through memory of this process: a get, then a put. Later
    /// commands of the same queue wait until the get is done.
    PeerCopy {
        /// First byte to read, in memory of one peer.
        from: RemoteAddr,
        /// The staging buffer. Do not access it until the command is done.
        via: LocalAddr,
        /// Length in bytes.
        len: usize,
        /// First byte to write, in memory of the other peer.
        to: RemoteAddr,
    },
    /// Completes when every earlier command of the same queue has completed. Later commands wait
    /// until then.
    Marker,
    /// Calls [`Engine::send`](super::Engine::send), or
    /// [`Engine::send_sync`](super::Engine::send_sync) if `sync` is set.
    Send {
        /// The peer that receives the message.
        to: PeerId,
        /// The tag.
        tag: Tag,
        /// The payload and its length in bytes, or `None` for an empty message.
        from: Option<(LocalAddr, usize)>,
        /// Whether the send completes only once a receive has matched.
        sync: bool,
    },
    /// Calls [`Engine::recv`](super::Engine::recv). The reply is the status of the receive.
    Recv {
        /// The sender, or `None` for any peer.
        source: Option<PeerId>,
        /// The tag to match.
        tag: Tag,
        /// The bits of the tag that are not compared.
        ignore: Tag,
        /// The buffer and its length in bytes, or `None` to drop the message.
        into: Option<(LocalAddr, usize)>,
    },
    /// Calls [`Engine::probe`](super::Engine::probe), or [`Engine::mprobe`](super::Engine::mprobe)
    /// if `claim` is set.
    Probe {
        /// The sender, or `None` for any peer.
        source: Option<PeerId>,
        /// The tag to match.
        tag: Tag,
        /// The bits of the tag that are not compared.
        ignore: Tag,
        /// Whether to claim the message.
        claim: bool,
    },
    /// Calls [`Engine::mrecv`](super::Engine::mrecv). The reply is the status of the receive.
    ClaimedRecv {
        /// The claimed message.
        message: Claimed,
        /// The buffer and its length in bytes, or `None` to drop the message.
        into: Option<(LocalAddr, usize)>,
    },
    /// Calls [`Engine::discard`](super::Engine::discard).
    Discard(Claimed),
    /// Calls [`Engine::cancel`](super::Engine::cancel) for the receive in this slot of the same
    /// queue's pool. The receive completes exactly once, cancelled or not.
    Cancel {
        /// The slot of the receive.
        slot: u16,
    },
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The command is done. Holds the value that it fetched or found, or 0.
    Done(u64),
    /// The command was posted and failed. Never holds [`Outcome::Done`].
    Failed(Outcome),
    /// The command was rejected, and nothing was done. Never holds [`OpError::Again`].
    Refused(OpError),
    /// The quiet or watch ended with this error.
    Wait(WaitError),
    /// The receive has ended.
    Received(Status),
    /// The message found, if any.
    Found(Option<Envelope>),
    /// The message claimed, if any.
    Claimed(Option<Claimed>),
    /// The result of cancelling the receive.
    Cancelled(Cancelled),
    /// A command on which this command depends has failed. Nothing was done.
    Dependency,
    /// The worker is gone. The command may have begun, so its memory must not be reused.
    Abandoned,
}

impl Reply {
    /// Returns whether the command succeeded. For a receive, whether the buffer holds the whole
    /// message.
    pub fn is_well(&self) -> bool {
        match self {
            Self::Done(_) | Self::Found(_) | Self::Claimed(_) | Self::Cancelled(_) => true,
            Self::Received(status) => status.outcome == Received::Ok,
            Self::Failed(_)
            | Self::Refused(_)
            | Self::Wait(_)
            | Self::Dependency
            | Self::Abandoned => false,
        }
    }
}

/// Maximum number of events that a command can follow.
pub const MAX_AFTER: usize = 4;

/// A command in its slot.
#[derive(Debug)]
pub struct Entry<'m> {
    command: Command,
    listeners: &'m Listeners<'m>,
    state: AtomicU32,
    /// Only the worker writes it, once, before it sets `state` to [`DONE`].
    reply: UnsafeCell<Reply>,
    /// The queue writes it before the submission, and the worker afterwards.
    work: UnsafeCell<Work<'m>>,
    watch: Watch,
}

#[derive(Debug, Default)]
pub(super) struct Work<'m> {
    after: [Option<Event<'m>>; MAX_AFTER],
    pub progress: usize,
    pub relay: Relay,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Relay {
    #[default]
    Begin,
    Reading,
    Read,
}

const PENDING: u32 = 0;
const DONE: u32 = 1;

// SAFETY: before the submission only the holder of the entry writes `reply` and `work`, and
// afterwards only the worker. Other threads read `reply` only after edge `queue.done`.
unsafe impl Sync for Entry<'_> {}
// SAFETY: nothing in the entry belongs to a thread, and `reply` and `work` have one writer at a
// time.
unsafe impl Send for Entry<'_> {}

#[cfg(all(not(fishplate_loom), any(target_arch = "x86_64", target_arch = "aarch64")))]
const _: () = assert!(
    size_of::<crate::sync::pool::Slot<Entry<'static>>>() <= 320,
    "a command must fit its size class"
);

impl<'m> Entry<'m> {
    #[inline]
    pub(crate) fn new(command: Command, listeners: &'m Listeners<'m>) -> Self {
        Entry {
            command,
            listeners,
            state: AtomicU32::new(PENDING),
            reply: UnsafeCell::new(Reply::Abandoned),
            work: UnsafeCell::new(Work::default()),
            watch: Watch::new(),
        }
    }

    /// Returns the command.
    pub fn command(&self) -> &Command {
        &self.command
    }

    pub(crate) fn add_after(&mut self, event: Event<'m>) -> bool {
        match self.work.get_mut().after.iter_mut().find(|after| after.is_none()) {
            Some(free) => {
                *free = Some(event);
                true
            }
            None => false,
        }
    }

    /// Drops the dependencies that are done, or all if one failed. `worker` then listens for the
    /// first that is not done.
    ///
    /// # Safety
    /// The same as for [`work`](Self::work).
    pub(super) unsafe fn looks_ready(&self, worker: &'m EventCount) -> Readiness {
        // SAFETY: the caller guarantees what `work` requires.
        let work = unsafe { self.work() };
        for after in &mut work.after {
            let Some(event) = after else { continue };
            match event.reply() {
                None => return Readiness::Waits(event.index(), event.listen(worker)),
                Some(reply) if reply.is_well() => *after = None,
                Some(_) => {
                    work.after = Default::default();
                    return Readiness::Never;
                }
            }
        }
        Readiness::Ready
    }

    /// Returns the worker's state of the command.
    ///
    /// # Safety
    /// The caller is the worker that took the entry from its queue, and holds no other reference
    /// to the state.
    #[expect(clippy::mut_from_ref, reason = "our caller guarantees one worker at a time")]
    pub(super) unsafe fn work(&self) -> &mut Work<'m> {
        // SAFETY: the caller is that worker, so no other thread uses `work`. The submission ring
        // handed over the entry from its only holder.
        unsafe { &mut *self.work.get() }
    }

    /// Stores the result of the command.
    ///
    /// # Safety
    /// Called once, by the worker that took the entry from its queue, or by its successor.
    pub(crate) unsafe fn finish(&self, reply: Reply) {
        self.watch.write(0);
        // SAFETY: no thread reads `reply` before the store below, and only this worker writes it.
        unsafe { *self.reply.get() = reply };
        // Release, edge `queue.done`: pairs with the load in `is_done`. A thread that observes
        // `DONE` also observes the result, and all that the command wrote to memory.
        self.state.store(DONE, edge!("queue.done.store", Release));
    }

    /// Ends the command as abandoned, and drops its dependencies.
    ///
    /// # Safety
    /// The same as for [`finish`](Self::finish).
    #[cold]
    pub(crate) unsafe fn abandon(&self) {
        // SAFETY: the caller is the worker, or acts for a worker that is gone.
        unsafe {
            self.work().after = Default::default();
            self.finish(Reply::Abandoned);
        }
    }

    #[inline]
    pub(crate) fn is_done(&self) -> bool {
        // Acquire, edge `queue.done`: pairs with the store in `finish`.
        self.state.load(edge!("queue.done.load", Acquire)) != PENDING
    }

    #[inline]
    pub(crate) fn reply(&self) -> Option<Reply> {
        if !self.is_done() {
            return None;
        }
        self.watch.read(0);
        // SAFETY: `reply` is not written again after the store that `is_done` observed.
        Some(unsafe { *self.reply.get() })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    Ready,
    /// The event with this index is not done. [`Listening`] says whether its end will be notified.
    Waits(u16, Listening),
    Never,
}

/// The result of a command, readable from any thread, even after its queue is dropped.
#[derive(Clone, Debug)]
pub struct Event<'m>(pub(crate) Shared<'m, Entry<'m>>);

impl Event<'_> {
    /// Returns how the command ended, or `None` if it has not. Costs one load.
    #[inline]
    pub fn reply(&self) -> Option<Reply> {
        self.0.reply()
    }

    /// Returns whether the command has ended, with success or failure.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.0.is_done()
    }

    /// Returns the command.
    pub fn command(&self) -> &Command {
        self.0.command()
    }

    /// Returns the command's slot in its queue's pool. No other command of that queue uses the slot
    /// while this event exists.
    pub fn index(&self) -> u16 {
        self.0.index().unwrap_or(u16::MAX)
    }
}

impl<'m> Event<'m> {
    /// Arranges that `event` is notified when this command, or another of its queue, ends.
    pub(crate) fn listen(&self, event: &'m EventCount) -> Listening {
        self.0.listeners.listen(event)
    }
}
