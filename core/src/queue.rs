//! A queue of commands for an engine that another thread drives. The worker's side is its
//! [`CommandConsumer`].
//!
//! A queue consists of a pool of commands, a ring to the worker, a ring back, and events that hold
//! results. One thread uses a queue at a time. One worker may serve many queues, each with its own
//! rings. Creating and submitting a command takes no allocation, no lock and no system call, unless
//! the worker sleeps and must be woken. Only the waits block, until their deadline.
//!
//! Commands of one queue start in submission order and may complete in any order. [`Cmd::after`]
//! delays a command until another command has succeeded.
//!
//! Dependencies cannot form a cycle. A command depends on earlier commands of its queue and on
//! events. Only submitted commands have events, and a submitted command accepts no more
//! dependencies. So a command waits only for earlier submissions. A cycle does not compile:
//!
//! ```compile_fail,E0382
//! # use fishplate_core::{queue::{Command, Queue}, sync::host::SpinHost};
//! # fn circle(queue: &mut Queue<'static, SpinHost>) {
//! let first = queue.create(Command::Marker).unwrap();
//! let second = queue.create(Command::Marker).unwrap();
//! let first_event = queue.submit(first);
//! let second_event = queue.submit(second.after(&first_event).unwrap());
//! queue.submit(first.after(&second_event).unwrap());
//! # }
//! ```
//!
//! A command itself can still wait for ever, for example a receive that nothing matches, or a
//! marker behind such a receive. Waits end at their deadline. [`Queue::held`] names the command
//! that blocks the worker, and the reason.
//!
//! A queue may be dropped at any time. Its submitted commands still run and its events stay valid.
//! The last event releases the memory. Sharing a queue between threads does not compile:
//!
//! ```compile_fail,E0277
//! fn shared<T: Sync>() {}
//! shared::<fishplate_core::queue::Queue<'static, fishplate_core::sync::host::SpinHost>>();
//! ```

use core::fmt;
use core::mem::MaybeUninit;

use static_assertions::{assert_impl_all, assert_not_impl_any};

use crate::engine::ContextId;
use crate::engine::command::{Entry, Event, Reply};
use crate::engine::lane::{CommandConsumer, Flight, Lane, Posted, Side};
use crate::error::{AttachError, OpError, Stuck, WaitError};
use crate::sync::event::{Channel, Listening};
use crate::sync::host::{Host, SpinHost};
use crate::sync::pool::{self, CreateError, Id, Lease, Pool, Shared, Slot, StaleId};
use crate::sync::ring;
use crate::sync::spin::{Counts, Idle, Policy, Turn, Waited, wait_until};

mod commands;
#[cfg(test)]
mod races;
#[cfg(test)]
mod tests;

pub use crate::engine::command::Command;
pub use crate::engine::lane::{Held, HeldBy, Pending};
pub use commands::CommandError;

/// The memory of a queue with at most `N` commands, a power of two. A command counts towards `N`
/// until its event is dropped.
pub struct QueueStorage<'m, const N: usize = { pool::DEFAULT_CAPACITY }> {
    header: pool::Header,
    slots: [Slot<Entry<'m>>; N],
    submissions: (ring::Header, [MaybeUninit<Posted<'m>>; N]),
    completions: (ring::Header, [MaybeUninit<Posted<'m>>; N]),
    flights: [MaybeUninit<Flight<'m>>; N],
    lane: Lane<'m>,
}

/// The memory of a queue, borrowed while the queue, its worker's side or an event exists. All
/// slices have the same length, a power of two, which is the maximum number of commands.
pub struct QueueMemory<'m> {
    /// The pool of commands: its header, and its slots.
    pub pool: (&'m mut pool::Header, &'m mut [Slot<Entry<'m>>]),
    /// The ring to the worker.
    pub submissions: (&'m mut ring::Header, &'m mut [MaybeUninit<Posted<'m>>]),
    /// The ring from the worker.
    pub completions: (&'m mut ring::Header, &'m mut [MaybeUninit<Posted<'m>>]),
    /// The worker's state of commands that are in the engine.
    pub flights: &'m mut [MaybeUninit<Flight<'m>>],
    /// Holds the rings of both sides after the sides are dropped.
    pub lane: &'m mut Lane<'m>,
}

impl<'m, const N: usize> QueueStorage<'m, N> {
    /// Creates memory for a queue.
    pub fn new() -> Self {
        QueueStorage {
            header: pool::Header::new(),
            slots: core::array::from_fn(|_| Slot::new()),
            submissions: (ring::Header::new(), [const { MaybeUninit::uninit() }; N]),
            completions: (ring::Header::new(), [const { MaybeUninit::uninit() }; N]),
            flights: [const { MaybeUninit::uninit() }; N],
            lane: Lane::new(),
        }
    }

    /// Returns the memory, for [`Queue::new`].
    pub fn memory(&'m mut self) -> QueueMemory<'m> {
        QueueMemory {
            pool: (&mut self.header, &mut self.slots),
            submissions: (&mut self.submissions.0, &mut self.submissions.1),
            completions: (&mut self.completions.0, &mut self.completions.1),
            flights: &mut self.flights,
            lane: &mut self.lane,
        }
    }
}

impl<const N: usize> Default for QueueStorage<'_, N> {
    fn default() -> Self {
        Self::new()
    }
}

/// A queue that submits commands to a worker. It is `Send`, and one thread uses it at a time.
pub struct Queue<'m, H: Host> {
    host: &'m H,
    /// The worker's eventcount, and this queue's own, for waits on events.
    channel: Channel<'m>,
    pool: Pool<'m, Entry<'m>>,
    side: Side<'m>,
    /// Number of submitted commands with slots that were not released.
    pending: u64,
    /// Whether the worker was not notified of the latest submissions.
    untold: bool,
    /// Whether silent commands are in flight: the worker does not notify this thread when they
    /// complete.
    silent: bool,
    idle: Idle,
}

assert_impl_all!(Queue<'static, SpinHost>: Send);
assert_not_impl_any!(Queue<'static, SpinHost>: Sync, Clone);
assert_impl_all!(Event<'static>: Send, Sync);

/// A command that is created but not submitted. Dropping the `Cmd` releases its slot.
#[must_use = "a command does nothing until it is submitted"]
pub struct Cmd<'m> {
    lease: Lease<'m, Entry<'m>>,
}

impl fmt::Debug for Cmd<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cmd").field(self.command()).finish()
    }
}

impl<'m> Cmd<'m> {
    /// Returns the command itself.
    pub fn command(&self) -> &Command {
        self.lease.command()
    }

    /// Delays this command until the command of `event`, in this or another queue, has succeeded.
    /// If that command fails, this command completes as [`Reply::Dependency`].
    ///
    /// # Errors
    /// [`CommandError::TooManyEvents`] for more than
    /// [`MAX_AFTER`](crate::engine::command::MAX_AFTER) events.
    pub fn after(mut self, event: &Event<'m>) -> Result<Self, CommandError> {
        match self.lease.add_after(event.clone()) {
            true => Ok(self),
            false => Err(CommandError::TooManyEvents),
        }
    }
}

impl<'m, H: Host> Queue<'m, H> {
    /// Creates a queue, and the consumer for its worker, in the engine's context `id`. `channel` is
    /// a part of the worker's [`Channels`](crate::sync::event::Channels) that no other queue uses.
    ///
    /// # Errors
    /// [`AttachError::Config`] unless all slices have the same length, a power of two.
    pub fn new(
        id: ContextId,
        host: &'m H,
        channel: Channel<'m>,
        memory: QueueMemory<'m>,
        policy: Policy,
    ) -> Result<(Self, CommandConsumer<'m>), AttachError> {
        let QueueMemory { pool: (header, slots), submissions, completions, flights, lane } = memory;
        let len = slots.len();
        if [submissions.1.len(), completions.1.len(), flights.len()] != [len; 3] {
            return Err(AttachError::Config("queue memory: all slices need the same length"));
        }
        let length = AttachError::Config("queue commands: a power of two up to 65536");
        let pool = Pool::new(header, slots, None).map_err(|_| length)?;
        let to_worker = ring::split(submissions.0, submissions.1).map_err(|_| length)?;
        let from_worker = ring::split(completions.0, completions.1).map_err(|_| length)?;
        let [side, theirs] = Side::both(lane, to_worker, from_worker);
        let queue = Queue {
            host,
            channel,
            pool,
            side,
            pending: 0,
            untold: false,
            silent: false,
            idle: Idle::new(policy),
        };
        Ok((queue, CommandConsumer::new(id, theirs, channel, flights)))
    }

    /// Creates a command in a slot of this queue's pool.
    ///
    /// # Errors
    /// [`CreateError::Full`] if every slot is in use: its command has not completed, or its event
    /// is held. [`CreateError::Refused`] if the arguments are invalid; no slot is taken then.
    #[inline]
    pub fn create(&mut self, command: Command) -> Result<Cmd<'m>, CreateError<CommandError>> {
        self.lease(|| commands::check(&command).map(|()| command)).map(|lease| Cmd { lease })
    }

    #[inline]
    fn lease<E>(
        &mut self,
        command: impl FnOnce() -> Result<Command, E>,
    ) -> Result<Lease<'m, Entry<'m>>, CreateError<E>> {
        if self.pool.outstanding() >= self.pool.capacity() as u64 {
            self.collect();
        }
        let listeners = &self.side.lane.listeners;
        self.pool.create_with(|| command().map(|command| Entry::new(command, listeners)))
    }

    /// Submits a command to the worker, and wakes the worker if it sleeps. The event receives the
    /// result.
    #[inline]
    pub fn submit(&mut self, command: Cmd<'m>) -> Event<'m> {
        let event = self.enqueue(command);
        self.flush();
        event
    }

    /// Submits a command without waking the worker. Call [`flush`](Self::flush) once after several
    /// commands.
    #[inline]
    pub fn enqueue(&mut self, command: Cmd<'m>) -> Event<'m> {
        let [ours, theirs] = command.lease.share_twice();
        self.post(theirs, true);
        Event(ours)
    }

    /// Wakes the worker if it sleeps and there are new submissions.
    #[inline]
    pub fn flush(&mut self) {
        if !self.untold {
            return;
        }
        self.untold = false;
        self.idle.notify(self.host, self.channel.send);
    }

    /// Cancels an unmatched receive of this queue. The receive completes once, cancelled or not. A
    /// cancellation waits behind earlier markers like any command, so put no marker behind a
    /// receive that you may cancel.
    ///
    /// # Errors
    /// [`CreateError::Full`], as for [`create`](Self::create). [`CreateError::Refused`] if the
    /// event belongs to another queue. If its command has completed or is not a receive, the
    /// cancellation completes with [`OpError::StaleToken`].
    #[doc(alias = "psm2_mq_cancel")]
    pub fn cancel(&mut self, receive: &Event<'m>) -> Result<Event<'m>, CreateError<CommandError>> {
        let slot = receive.0.index().filter(|_| self.pool.owns(&receive.0));
        let lease = self
            .lease(|| slot.map(|slot| Command::Cancel { slot }).ok_or(CommandError::OtherQueue))?;
        let [ours, theirs] = lease.share_twice();
        self.post(theirs, true);
        self.flush();
        Ok(Event(ours))
    }

    /// Waits until every submitted command, including receives, has completed or failed.
    ///
    /// # Errors
    /// [`WaitError::Deadline`] if a command is still in flight. If the worker is blocked,
    /// [`held`](Self::held) returns the reason.
    pub fn finish(&mut self, deadline_ns: u64) -> Result<(), WaitError> {
        self.flush();
        self.wait_for(deadline_ns, |queue| {
            queue.collect();
            match queue.pending {
                0 => {
                    queue.silent = false;
                    Turn::Ready
                }
                _ if queue.silent => Turn::Unnotified,
                _ => Turn::Nothing,
            }
        })
    }

    /// Waits until a command of this or another queue has completed.
    ///
    /// # Errors
    /// [`WaitError::Deadline`] if the command is still in flight.
    pub fn wait(&mut self, event: &Event<'m>, deadline_ns: u64) -> Result<Reply, WaitError> {
        self.flush();
        let own = self.pool.owns(&event.0);
        self.wait_for(deadline_ns, |queue| {
            if own {
                queue.collect();
            }
            match event.is_done() {
                true => Turn::Ready,
                false if own || event.listen(queue.channel.recv) == Listening::Standing => {
                    Turn::Nothing
                }
                false => Turn::Unnotified,
            }
        })?;
        event.reply().ok_or(WaitError::Deadline(Stuck::default()))
    }

    /// Returns the number of submitted commands that the worker has not taken, and of completed
    /// commands that this queue has not taken.
    pub fn pending(&mut self) -> Pending {
        self.side.pending()
    }

    /// Returns which command of this queue blocked the worker in its last turn, and why. Use it to
    /// explain an expired wait.
    pub fn held(&self) -> Option<Held> {
        self.side.held()
    }

    /// Returns the counters of this thread's waits.
    pub fn counts(&self) -> Counts {
        self.idle.counts()
    }

    /// Returns the pool's counters.
    pub fn pool_counts(&self) -> pool::Counts {
        self.pool.counts()
    }

    fn wait_for(
        &mut self,
        deadline_ns: u64,
        mut turn: impl FnMut(&mut Self) -> Turn,
    ) -> Result<(), WaitError> {
        let mut idle = self.idle.clone();
        let (host, recv) = (self.host, self.channel.recv);
        let waited = wait_until(host, &mut idle, recv, deadline_ns, || turn(self));
        self.idle = idle;
        match waited {
            Waited::Ready => Ok(()),
            Waited::Expired => Err(WaitError::Deadline(Stuck::default())),
        }
    }

    /// Submits any command. With `report`, returns an id, which takes the place of an event.
    pub(crate) fn submit_raw(
        &mut self,
        command: Command,
        report: bool,
    ) -> Result<Option<Id>, pool::Full<()>> {
        let lease = self.lease(|| Ok::<_, ()>(command)).map_err(|_| pool::Full(()))?;
        if !report {
            self.silent = true;
            self.post(lease.share(), false);
            self.flush();
            return Ok(None);
        }
        let [ours, theirs] = lease.share_twice();
        // The entry occupies a slot of this pool and has no id yet, so this succeeds.
        let id = ours.into_id().map_err(|_| pool::Full(()))?;
        self.post(theirs, true);
        self.flush();
        Ok(Some(id))
    }

    pub(crate) fn take_reply(&mut self, id: Id) -> Result<Option<Reply>, StaleId> {
        self.collect();
        let entry = self.pool.redeem_if(id, Entry::reply)?;
        Ok(entry.map(|(entry, reply)| {
            self.pool.release_shared(entry);
            reply
        }))
    }

    pub(crate) fn wait_reply(&mut self, id: Id, deadline_ns: u64) -> Result<Reply, WaitError> {
        let mut result = Ok(None);
        let waited = self.wait_for(deadline_ns, |queue| {
            result = queue.take_reply(id);
            Turn::ready(!matches!(result, Ok(None)))
        });
        match result {
            Ok(Some(reply)) => Ok(reply),
            Ok(None) => Err(waited.err().unwrap_or(WaitError::Deadline(Stuck::default()))),
            Err(StaleId) => Err(OpError::StaleToken.into()),
        }
    }

    /// The slot is released when the command completes.
    #[cold]
    pub(crate) fn forget_reply(&mut self, id: Id) {
        // The id is stale if the reply was already taken.
        let _ = self.pool.release_id(id);
    }

    pub(crate) fn slot_of(&mut self, id: Id) -> Result<u16, OpError> {
        self.pool.get(id).map(|_| id.index()).map_err(|_| OpError::StaleToken)
    }

    /// The number is unique among live queues.
    #[inline]
    pub(crate) fn identity(&self) -> usize {
        core::ptr::from_ref(self.side.lane) as usize
    }

    #[inline]
    pub(crate) fn host(&self) -> &'m H {
        self.host
    }

    #[inline]
    fn post(&mut self, entry: Shared<'m, Entry<'m>>, report: bool) {
        self.pending += 1;
        self.untold = true;
        self.side.push(Posted::new(entry, report));
    }

    pub(crate) fn collect(&mut self) {
        while let Some(posted) = self.side.pop() {
            self.pending -= 1;
            // SAFETY: the command was just popped, and each command is popped once.
            self.pool.release_shared(unsafe { posted.open() });
        }
        if self.side.is_alone() {
            self.abandon();
        }
    }

    /// The worker is gone and did not take the commands.
    #[cold]
    fn abandon(&mut self) {
        // The worker pushed its last completions before it left.
        while let Some(posted) = self.side.pop() {
            // SAFETY: the command was just popped, and each command is popped once.
            self.pool.release_shared(unsafe { posted.open() });
        }
        while let Some(posted) = self.side.unsent() {
            // SAFETY: the command was just popped, and each command is popped once.
            let entry = unsafe { posted.open() };
            // SAFETY: the worker is gone and did not take the command, so only this thread
            // completes it.
            unsafe { entry.abandon() };
            self.pool.release_shared(entry);
        }
        self.pending = 0;
        self.host.notifier_barrier();
        self.side.lane.listeners.notify(self.host);
    }
}

impl<H: Host> Drop for Queue<'_, H> {
    /// Submitted commands still run, so the worker must be notified.
    fn drop(&mut self) {
        self.flush();
    }
}
