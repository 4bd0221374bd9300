//! A context: a thread's handle to an engine that a worker drives; the other end of a
//! [`CommandConsumer`].
//!
//! A thread that drives its engine itself calls [`Engine`](crate::engine::Engine) directly, which
//! is faster. A context is for the other threads.
//!
//! A context offers the verbs of an engine over a [`Queue`], with tickets in place of events.
//! Submitting takes a slot of the queue's pool, writes to its ring, and wakes the worker if it
//! sleeps; it never blocks or allocates. A reply stays in its slot until it is taken by ticket.
//! Only the waits block, until their deadline.

use crate::engine::command::{Command, Reply};
use crate::engine::lane::CommandConsumer;
use crate::engine::protocol::{Cancelled, Claimed, Envelope};
use crate::engine::tag::Tag;
use crate::engine::{ContextId, Signal};
use crate::error::{AttachError, OpError, Stuck, WaitError};
use crate::mem::{LocalAddr, PeerId, RemoteAddr};
use crate::op::{Amo, Cmp};
use crate::queue::{Queue, QueueMemory};
use crate::sync::event::Channel;
use crate::sync::host::Host;
use crate::sync::pool::Id;
use crate::sync::spin::{Counts, Policy};

/// A request whose reply has not been taken. Other contexts reject it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    id: Id,
    /// Identifies the context: the address of its lane.
    of: usize,
}

/// One user of a worker's engine. `Send`, used by one thread at a time.
pub struct Context<'m, H: Host> {
    queue: Queue<'m, H>,
}

impl<'m, H: Host> Context<'m, H> {
    /// Creates a context, and the consumer that its worker serves.
    ///
    /// # Errors
    /// The same as for [`Queue::new`].
    pub fn new(
        id: ContextId,
        host: &'m H,
        channel: Channel<'m>,
        memory: QueueMemory<'m>,
        policy: Policy,
    ) -> Result<(Self, CommandConsumer<'m>), AttachError> {
        let (queue, consumer) = Queue::new(id, host, channel, memory, policy)?;
        Ok((Context { queue }, consumer))
    }

    /// Returns the underlying queue, for commands with events.
    pub fn queue_mut(&mut self) -> &mut Queue<'m, H> {
        &mut self.queue
    }

    /// Returns how this thread idled so far.
    pub fn counts(&self) -> Counts {
        self.queue.counts()
    }

    /// [`Engine::put`](crate::engine::Engine::put).
    pub fn put(&mut self, from: LocalAddr, len: usize, to: RemoteAddr) -> Result<Ticket, OpError> {
        self.ask(Command::Put { from, len, to })
    }

    /// [`Engine::put_signal`](crate::engine::Engine::put_signal).
    pub fn put_signal(
        &mut self,
        from: LocalAddr,
        len: usize,
        to: RemoteAddr,
        signal: Signal,
    ) -> Result<Ticket, OpError> {
        self.ask(Command::PutSignal { from, len, to, signal })
    }

    /// [`Engine::get`](crate::engine::Engine::get).
    pub fn get(&mut self, into: LocalAddr, len: usize, from: RemoteAddr) -> Result<Ticket, OpError> {
        self.ask(Command::Get { into, len, from })
    }

    /// [`Engine::signal`](crate::engine::Engine::signal).
    pub fn signal(&mut self, signal: Signal) -> Result<Ticket, OpError> {
        self.ask(Command::Signal(signal))
    }

    /// [`Engine::amo`](crate::engine::Engine::amo).
    pub fn amo(&mut self, at: RemoteAddr, amo: Amo) -> Result<Ticket, OpError> {
        self.ask(Command::Amo { at, amo, fetch: false })
    }

    /// [`Engine::fetch`](crate::engine::Engine::fetch); the value comes with the reply.
    pub fn fetch(&mut self, at: RemoteAddr, amo: Amo) -> Result<Ticket, OpError> {
        self.ask(Command::Amo { at, amo, fetch: true })
    }

    /// [`Engine::send`](crate::engine::Engine::send). The bytes must not change until its reply.
    ///
    /// A send without room, for example because too many headers wait at the receiver, blocks all
    /// later commands of this context, receives and cancellations included. So post receives first,
    /// or from another context.
    #[doc(alias = "psm2_mq_isend2")]
    pub fn send(
        &mut self,
        to: PeerId,
        tag: Tag,
        from: Option<(LocalAddr, usize)>,
    ) -> Result<Ticket, OpError> {
        self.ask(Command::Send { to, tag, from, sync: false })
    }

    /// [`Engine::send_sync`](crate::engine::Engine::send_sync): answered once it has matched.
    #[doc(alias = "PSM2_MQ_FLAG_SENDSYNC")]
    pub fn send_sync(
        &mut self,
        to: PeerId,
        tag: Tag,
        from: Option<(LocalAddr, usize)>,
    ) -> Result<Ticket, OpError> {
        self.ask(Command::Send { to, tag, from, sync: true })
    }

    /// [`Engine::recv`](crate::engine::Engine::recv): answered with [`Reply::Received`], once.
    #[doc(alias = "psm2_mq_irecv2")]
    pub fn recv(
        &mut self,
        source: Option<PeerId>,
        tag: Tag,
        ignore: Tag,
        into: Option<(LocalAddr, usize)>,
    ) -> Result<Ticket, OpError> {
        self.ask(Command::Recv { source, tag, ignore, into })
    }

    /// [`Engine::probe`](crate::engine::Engine::probe).
    ///
    /// # Errors
    /// The errors of that call, and [`WaitError::Deadline`] if the worker does not answer in time.
    #[doc(alias = "psm2_mq_iprobe2")]
    pub fn probe(
        &mut self,
        source: Option<PeerId>,
        tag: Tag,
        ignore: Tag,
        deadline_ns: u64,
    ) -> Result<Option<Envelope>, WaitError> {
        let ticket = self.ask_until(Command::Probe { source, tag, ignore, claim: false }, deadline_ns)?;
        match self.answer(ticket, deadline_ns)? {
            Reply::Found(found) => Ok(found),
            other => Err(unexpected(other)),
        }
    }

    /// [`Engine::mprobe`](crate::engine::Engine::mprobe). A message claimed after the deadline is
    /// lost.
    ///
    /// # Errors
    /// As [`probe`](Self::probe).
    #[doc(alias = "psm2_mq_improbe2")]
    pub fn mprobe(
        &mut self,
        source: Option<PeerId>,
        tag: Tag,
        ignore: Tag,
        deadline_ns: u64,
    ) -> Result<Option<Claimed>, WaitError> {
        let ticket = self.ask_until(Command::Probe { source, tag, ignore, claim: true }, deadline_ns)?;
        match self.answer(ticket, deadline_ns)? {
            Reply::Claimed(found) => Ok(found),
            other => Err(unexpected(other)),
        }
    }

    /// [`Engine::mrecv`](crate::engine::Engine::mrecv): answered as [`recv`](Self::recv) is.
    #[doc(alias = "psm2_mq_imrecv")]
    pub fn mrecv(&mut self, message: Claimed, into: Option<(LocalAddr, usize)>) -> Result<Ticket, OpError> {
        self.ask(Command::ClaimedRecv { message, into })
    }

    /// [`Engine::discard`](crate::engine::Engine::discard).
    pub fn discard(&mut self, message: Claimed) -> Result<Ticket, OpError> {
        self.ask(Command::Discard(message))
    }

    /// [`Engine::cancel`](crate::engine::Engine::cancel).
    /// Whatever this returns, the receive is still answered, once.
    ///
    /// # Errors
    /// [`OpError::StaleToken`] if the receive has been answered; [`WaitError::Deadline`].
    #[doc(alias = "psm2_mq_cancel")]
    pub fn cancel(&mut self, receive: Ticket, deadline_ns: u64) -> Result<Cancelled, WaitError> {
        let slot = self.queue.slot_of(self.own(receive)?)?;
        let ticket = self.ask_until(Command::Cancel { slot }, deadline_ns)?;
        match self.answer(ticket, deadline_ns)? {
            Reply::Cancelled(done) => Ok(done),
            other => Err(unexpected(other)),
        }
    }

    /// Submits a command without a reply. [`quiet`](Self::quiet) reports whether an accepted
    /// command failed later. Commands that the engine refuses are dropped silently, and so are
    /// those that only produce a reply.
    ///
    /// # Errors
    /// [`OpError::Again`] when all commands are out.
    pub fn submit_silent(&mut self, command: Command) -> Result<(), OpError> {
        self.queue.submit_raw(command, false).map(drop).map_err(|_| OpError::Again)
    }

    /// Orders later writes to the peer after all earlier operations:
    /// [`Engine::fence`](crate::engine::Engine::fence), but a refusal is not reported.
    pub fn fence(&mut self, peer: PeerId) -> Result<(), OpError> {
        self.submit_silent(Command::Fence(peer))
    }

    /// Waits until everything submitted to this peer is applied there.
    ///
    /// # Errors
    /// [`Engine::quiet`](crate::engine::Engine::quiet). After the deadline the worker still holds
    /// the request.
    pub fn quiet(&mut self, peer: PeerId, deadline_ns: u64) -> Result<(), WaitError> {
        let ticket = self.ask_until(Command::Quiet(peer), deadline_ns)?;
        self.value(ticket, deadline_ns).map(drop)
    }

    /// Waits for a signal: [`Engine::wait_signal`](crate::engine::Engine::wait_signal).
    /// The worker polls the word.
    ///
    /// # Errors
    /// The same as for that call. After a deadline the worker still watches; a context has one
    /// watch at a time.
    pub fn wait_signal(
        &mut self,
        at: LocalAddr,
        cmp: Cmp,
        value: u64,
        from: Option<PeerId>,
        deadline_ns: u64,
    ) -> Result<u64, WaitError> {
        let ticket = self.ask_until(Command::Watch { at, cmp, value, from }, deadline_ns)?;
        self.value(ticket, deadline_ns)
    }

    /// Takes the reply to a request, if it has arrived.
    ///
    /// # Errors
    /// [`OpError::StaleToken`] if it was taken before, or is another context's.
    pub fn test(&mut self, ticket: Ticket) -> Result<Option<Reply>, OpError> {
        let id = self.own(ticket)?;
        self.queue.take_reply(id).map_err(|_| OpError::StaleToken)
    }

    /// Waits for the reply to a request, and takes it.
    ///
    /// # Errors
    /// [`WaitError::Deadline`]: the request is still with the worker. [`OpError::StaleToken`] if it
    /// was taken before, or is another context's.
    pub fn wait(&mut self, ticket: Ticket, deadline_ns: u64) -> Result<Reply, WaitError> {
        let id = self.own(ticket)?;
        self.queue.wait_reply(id, deadline_ns)
    }

    /// Returns the number behind a ticket of this context.
    fn own(&self, ticket: Ticket) -> Result<Id, OpError> {
        if ticket.of == self.queue.identity() { Ok(ticket.id) } else { Err(OpError::StaleToken) }
    }

    /// Submits a command that wants a reply. `Again`: all commands are in flight.
    fn ask(&mut self, command: Command) -> Result<Ticket, OpError> {
        match self.queue.submit_raw(command, true) {
            Ok(Some(id)) => Ok(Ticket { id, of: self.queue.identity() }),
            _ => Err(OpError::Again),
        }
    }

    /// [`ask`](Self::ask), waiting for room.
    fn ask_until(&mut self, command: Command, deadline_ns: u64) -> Result<Ticket, WaitError> {
        loop {
            match self.ask(command) {
                Err(OpError::Again) if self.queue.host().now_ns() < deadline_ns => {
                    self.queue.host().yield_now()
                }
                Err(OpError::Again) => return Err(WaitError::Deadline(Stuck::default())),
                other => return Ok(other?),
            }
        }
    }

    /// Waits for the reply to a request whose ticket no other caller holds, and drops the request
    /// at the deadline.
    fn answer(&mut self, ticket: Ticket, deadline_ns: u64) -> Result<Reply, WaitError> {
        let waited = self.wait(ticket, deadline_ns);
        if waited.is_err() {
            self.queue.forget_reply(ticket.id);
        }
        waited
    }

    fn value(&mut self, ticket: Ticket, deadline_ns: u64) -> Result<u64, WaitError> {
        match self.answer(ticket, deadline_ns)? {
            Reply::Done(value) => Ok(value),
            // Quiet and watch are not posted, so they do not fail as posts do.
            other => Err(unexpected(other)),
        }
    }
}

/// Maps a reply of an unexpected kind to an error.
fn unexpected(reply: Reply) -> WaitError {
    match reply {
        Reply::Refused(error) => error.into(),
        Reply::Wait(error) => error,
        _ => OpError::StaleToken.into(),
    }
}
