//! Commands: requests of a queue to its worker, with their state and result. A command occupies a
//! slot of its queue's pool from its creation until its last [`Event`] is dropped; the worker
//! writes the result there. Nothing here blocks or allocates.
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

/// What a queue asks of the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// [`Engine::put`](super::Engine::put).
    Put {
        /// The source.
        from: LocalAddr,
        /// Bytes.
        len: usize,
        /// The target.
        to: RemoteAddr,
    },
    /// [`Engine::put_signal`](super::Engine::put_signal).
    PutSignal {
        /// The source.
        from: LocalAddr,
        /// Bytes.
        len: usize,
        /// The target.
        to: RemoteAddr,
        /// The signal that follows.
        signal: Signal,
    },
    /// [`Engine::get`](super::Engine::get).
    Get {
        /// The target.
        into: LocalAddr,
        /// Bytes.
        len: usize,
        /// The source.
        from: RemoteAddr,
    },
    /// [`Engine::signal`](super::Engine::signal).
    Signal(Signal),
    /// [`Engine::amo`](super::Engine::amo), or with `fetch`
    /// [`Engine::fetch`](super::Engine::fetch).
    Amo {
        /// The word.
        at: RemoteAddr,
        /// What to do with it.
        amo: Amo,
        /// Whether the answer carries the value from before.
        fetch: bool,
    },
    /// [`Engine::fence`](super::Engine::fence).
    Fence(PeerId),
    /// [`Engine::quiet`](super::Engine::quiet); later commands of the same queue wait behind it.
    Quiet(PeerId),
    /// [`Engine::wait_signal`](super::Engine::wait_signal),
    /// polled by the worker between its other work.
    Watch {
        /// The word.
        at: LocalAddr,
        /// How it is compared,
        cmp: Cmp,
        /// and with what.
        value: u64,
        /// The peer whose failure ends the watch.
        from: Option<PeerId>,
    },
    /// Fills registered local memory with a pattern. The worker writes a piece per turn.
    Fill {
        /// The target.
        at: LocalAddr,
        /// Bytes, a multiple of `width`.
        len: usize,
        /// The pattern; its low `width` bytes count, lowest first.
        pattern: u64,
        /// Bytes of the pattern: 1, 2, 4 or 8.
        width: u8,
    },
    /// Copies within registered memory of this process. The worker copies a piece per turn, in
    /// ascending order, so overlapping ranges may only move towards lower addresses.
    Copy {
        /// The source.
        from: LocalAddr,
        /// Bytes.
        len: usize,
        /// The target.
        to: LocalAddr,
    },
    /// Copies from one peer to another through memory of this process: a get, then a put. Later
    /// commands of the same queue wait behind the get.
    PeerCopy {
        /// The source.
        from: RemoteAddr,
        /// The staging buffer; do not touch it until the command is done.
        via: LocalAddr,
        /// Bytes.
        len: usize,
        /// The target.
        to: RemoteAddr,
    },
    /// Does nothing. Completes when every earlier command of the same queue has; later ones wait
    /// behind it.
    Marker,
    /// [`Engine::send`](super::Engine::send), or with `sync`
    /// [`Engine::send_sync`](super::Engine::send_sync).
    Send {
        /// The receiver.
        to: PeerId,
        /// The tag.
        tag: Tag,
        /// The payload and its length in bytes; without it, none.
        from: Option<(LocalAddr, usize)>,
        /// Whether it completes only once a receive has matched.
        sync: bool,
    },
    /// [`Engine::recv`](super::Engine::recv); the answer is its status.
    Recv {
        /// The sender, or any peer.
        source: Option<PeerId>,
        /// The tag,
        tag: Tag,
        /// and the bits of it that are not compared.
        ignore: Tag,
        /// The buffer and its length in bytes; without it, none.
        into: Option<(LocalAddr, usize)>,
    },
    /// [`Engine::probe`](super::Engine::probe), or with `claim`
    /// [`Engine::mprobe`](super::Engine::mprobe).
    Probe {
        /// The sender, or any peer.
        source: Option<PeerId>,
        /// The tag,
        tag: Tag,
        /// and the bits of it that are not compared.
        ignore: Tag,
        /// Whether the message is claimed.
        claim: bool,
    },
    /// [`Engine::mrecv`](super::Engine::mrecv); the answer is its status.
    ClaimedRecv {
        /// The message.
        message: Claimed,
        /// The buffer and its length in bytes; without it, none.
        into: Option<(LocalAddr, usize)>,
    },
    /// [`Engine::discard`](super::Engine::discard).
    Discard(Claimed),
    /// [`Engine::cancel`](super::Engine::cancel) of the receive in this slot of the same queue's
    /// pool. The receive completes as well, once, whatever the result here.
    Cancel {
        /// The slot.
        slot: u16,
    },
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Done; the value that it fetched or found, or 0.
    Done(u64),
    /// It was posted and failed: never [`Outcome::Done`].
    Failed(Outcome),
    /// It was refused; nothing was done. Never [`OpError::Again`].
    Refused(OpError),
    /// Its quiet or watch ended with this error.
    Wait(WaitError),
    /// The receive has ended.
    Received(Status),
    /// What was found, if anything.
    Found(Option<Envelope>),
    /// What was claimed, if anything was found.
    Claimed(Option<Claimed>),
    /// What became of the receive.
    Cancelled(Cancelled),
    /// A command that it depends on failed; nothing was done.
    Dependency,
    /// The worker is gone. The command may have begun, so its memory must not be reused.
    Abandoned,
}

impl Reply {
    /// Whether the command succeeded. For a receive: the buffer holds a whole message.
    pub fn is_well(&self) -> bool {
        match self {
            Self::Done(_) | Self::Found(_) | Self::Claimed(_) | Self::Cancelled(_) => true,
            Self::Received(status) => status.outcome == Received::Ok,
            Self::Failed(_) | Self::Refused(_) | Self::Wait(_) | Self::Dependency | Self::Abandoned => false,
        }
    }
}

/// Most events that one command can follow.
pub const MAX_AFTER: usize = 4;

/// A command in its slot.
#[derive(Debug)]
pub struct Entry<'m> {
    command: Command,
    /// Notified when it has ended, by its worker.
    listeners: &'m Listeners<'m>,
    /// [`PENDING`] or [`DONE`].
    state: AtomicU32,
    /// Written by the worker alone, before `state` says [`DONE`], and never again.
    reply: UnsafeCell<Reply>,
    /// Written while the command has one holder, and from its submission on by the worker alone.
    work: UnsafeCell<Work<'m>>,
    watch: Watch,
}

/// The worker's state of a command that it has begun.
#[derive(Debug, Default)]
pub(super) struct Work<'m> {
    /// The events that must happen before it begins.
    after: [Option<Event<'m>>; MAX_AFTER],
    /// Bytes of a fill or copy that are done.
    pub progress: usize,
    /// State of a copy between peers.
    pub relay: Relay,
}

/// The first half of a copy between peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Relay {
    #[default]
    Begin,
    Reading,
    Read,
}

const PENDING: u32 = 0;
const DONE: u32 = 1;

// SAFETY: only the holder of the entry writes `reply` and `work`, and then the one worker it was
// submitted to; others read `reply` only after edge `queue.done`.
unsafe impl Sync for Entry<'_> {}
// SAFETY: as above.
unsafe impl Send for Entry<'_> {}

#[cfg(all(not(fishplate_loom), any(target_arch = "x86_64", target_arch = "aarch64")))]
const _: () =
    assert!(size_of::<crate::sync::pool::Slot<Entry<'static>>>() <= 320, "the size class of commands");

impl<'m> Entry<'m> {
    /// Creates a command for the queue whose worker notifies these listeners.
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

    /// The command.
    pub fn command(&self) -> &Command {
        &self.command
    }

    /// Makes it begin only after `event`. Returns `false` if [`MAX_AFTER`] events are set.
    pub(crate) fn add_after(&mut self, event: Event<'m>) -> bool {
        match self.work.get_mut().after.iter_mut().find(|after| after.is_none()) {
            Some(free) => {
                *free = Some(event);
                true
            }
            None => false,
        }
    }

    /// Checks whether all its dependencies are done. Drops events that are done, or all of them if
    /// one failed. `worker` then listens for the first that is not done.
    ///
    /// # Safety
    /// The same as for [`work`](Self::work).
    pub(super) unsafe fn looks_ready(&self, worker: &'m EventCount) -> Readiness {
        // SAFETY: as this function requires.
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

    /// Returns the worker's state.
    ///
    /// # Safety
    /// The caller is the worker that was given the entry, and holds no other reference to this.
    #[expect(clippy::mut_from_ref, reason = "one worker at a time, as promised")]
    pub(super) unsafe fn work(&self) -> &mut Work<'m> {
        // SAFETY: our caller is that worker. The submission ring handed over the entry from its
        // only holder.
        unsafe { &mut *self.work.get() }
    }

    /// Stores the result of the command.
    ///
    /// # Safety
    /// Called once, by the worker to which the entry was submitted, or by its successor.
    pub(crate) unsafe fn finish(&self, reply: Reply) {
        self.watch.write(0);
        // SAFETY: nothing reads it before the store below.
        unsafe { *self.reply.get() = reply };
        // Release, edge `queue.done`: pairs with the load in `reply`. A thread that observes the
        // end observes the result, and what the command did to memory.
        self.state.store(DONE, edge!("queue.done.store", Release));
    }

    /// Ends the command as abandoned, and drops its dependencies.
    ///
    /// # Safety
    /// The same as for [`finish`](Self::finish).
    #[cold]
    pub(crate) unsafe fn abandon(&self) {
        // SAFETY: our caller is the worker, or there is none any more.
        unsafe {
            self.work().after = Default::default();
            self.finish(Reply::Abandoned);
        }
    }

    /// Whether it has ended.
    #[inline]
    pub(crate) fn is_done(&self) -> bool {
        // Acquire, edge `queue.done`: pairs with the store in `finish`.
        self.state.load(edge!("queue.done.load", Acquire)) != PENDING
    }

    /// How it ended, if it has.
    #[inline]
    pub(crate) fn reply(&self) -> Option<Reply> {
        if !self.is_done() {
            return None;
        }
        self.watch.read(0);
        // SAFETY: not written again after the store just observed.
        Some(unsafe { *self.reply.get() })
    }
}

/// Whether a command may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    Ready,
    /// The event with this index is not done; [`Listening`] says whether its end is notified.
    Waits(u16, Listening),
    /// A dependency failed.
    Never,
}

/// The result of a command, readable from any thread, even after its queue is dropped.
#[derive(Clone, Debug)]
pub struct Event<'m>(pub(crate) Shared<'m, Entry<'m>>);

impl Event<'_> {
    /// How the command ended, if it has. One load.
    #[inline]
    pub fn reply(&self) -> Option<Reply> {
        self.0.reply()
    }

    /// Whether the command has ended, with success or failure.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.0.is_done()
    }

    /// The command.
    pub fn command(&self) -> &Command {
        self.0.command()
    }

    /// Returns its slot in its queue's pool. No other command of that queue uses the slot while
    /// this event exists.
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
