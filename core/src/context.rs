//! A context: a thread's handle to an engine that a worker drives. The worker's side is a
//! [`CommandConsumer`].
//!
//! A thread that drives its engine itself calls [`Engine`](crate::engine::Engine) directly, which
//! is faster.
//!
//! A context offers the operations of an engine over a [`Queue`], with tickets in place of events.
//! Submitting takes a slot of the queue's pool, writes to its ring, and wakes the worker if it
//! sleeps. Submitting never blocks or allocates. A reply stays in its slot until the ticket's
//! holder takes it. Only the waits block, until their deadline.

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

/// Identifies a request of a context until its reply is taken. Other contexts reject the ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    id: Id,
    /// Identifies the context by the address of its lane.
    of: usize,
}

/// A thread's handle to an engine that a worker drives. It is `Send`, and one thread uses it at a
/// time.
pub struct Context<'m, H: Host> {
    queue: Queue<'m, H>,
}

impl<'m, H: Host> Context<'m, H> {
    /// Creates a context, and the consumer for its worker.
    ///
    /// # Errors
    /// The errors of [`Queue::new`].
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

    /// Returns the counters of this thread's waits.
    pub fn counts(&self) -> Counts {
        self.queue.counts()
    }

    /// Submits [`Engine::put`](crate::engine::Engine::put).
    pub fn put(&mut self, from: LocalAddr, len: usize, to: RemoteAddr) -> Result<Ticket, OpError> {
        self.ask(Command::Put { from, len, to })
    }

    /// Submits [`Engine::put_signal`](crate::engine::Engine::put_signal).
    pub fn put_signal(
        &mut self,
        from: LocalAddr,
        len: usize,
        to: RemoteAddr,
        signal: Signal,
    ) -> Result<Ticket, OpError> {
        self.ask(Command::PutSignal { from, len, to, signal })
    }

    /// Submits [`Engine::get`](crate::engine::Engine::get).
    pub fn get(
        &mut self,
        into: LocalAddr,
        len: usize,
        from: RemoteAddr,
    ) -> Result<Ticket, OpError> {
        self.ask(Command::Get { into, len, from })
    }

    /// Submits [`Engine::signal`](crate::engine::Engine::signal).
    pub fn signal(&mut self, signal: Signal) -> Result<Ticket, OpError> {
        self.ask(Command::Signal(signal))
    }

    /// Submits [`Engine::amo`](crate::engine::Engine::amo).
    pub fn amo(&mut self, at: RemoteAddr, amo: Amo) -> Result<Ticket, OpError> {
        self.ask(Command::Amo { at, amo, fetch: false })
    }

    /// Submits [`Engine::fetch`](crate::engine::Engine::fetch). The reply contains the fetched
    /// value.
    pub fn fetch(&mut self, at: RemoteAddr, amo: Amo) -> Result<Ticket, OpError> {
        self.ask(Command::Amo { at, amo, fetch: true })
    }

    /// Submits [`Engine::send`](crate::engine::Engine::send). The bytes must not change until the
    /// reply.
    ///
    /// A send may find no room, for example because too many headers wait at the receiver. It then
    /// blocks all later commands of this context, including receives and cancellations. So post
    /// receives first, or from another context.
    #[doc(alias = "psm2_mq_isend2")]
    pub fn send(
        &mut self,
        to: PeerId,
        tag: Tag,
        from: Option<(LocalAddr, usize)>,
    ) -> Result<Ticket, OpError> {
        self.ask(Command::Send { to, tag, from, sync: false })
    }

    /// Submits [`Engine::send_sync`](crate::engine::Engine::send_sync). The reply comes once the
    /// message has matched.
    #[doc(alias = "PSM2_MQ_FLAG_SENDSYNC")]
    pub fn send_sync(
        &mut self,
        to: PeerId,
        tag: Tag,
        from: Option<(LocalAddr, usize)>,
    ) -> Result<Ticket, OpError> {
        self.ask(Command::Send { to, tag, from, sync: true })
    }

    /// Submits [`Engine::recv`](crate::engine::Engine::recv). The only reply is
    /// [`Reply::Received`].
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

    /// Submits [`Engine::probe`](crate::engine::Engine::probe) and waits for the reply.
    ///
    /// # Errors
    /// The errors of `Engine::probe`, and [`WaitError::Deadline`] if the worker does not answer in
    /// time.
    #[doc(alias = "psm2_mq_iprobe2")]
    pub fn probe(
        &mut self,
        source: Option<PeerId>,
        tag: Tag,
        ignore: Tag,
        deadline_ns: u64,
    ) -> Result<Option<Envelope>, WaitError> {
        let ticket =
            self.ask_until(Command::Probe { source, tag, ignore, claim: false }, deadline_ns)?;
        match self.answer(ticket, deadline_ns)? {
            Reply::Found(found) => Ok(found),
            other => Err(unexpected(other)),
        }
    }

    /// Submits [`Engine::mprobe`](crate::engine::Engine::mprobe) and waits for the reply. A message
    /// that the worker claims after the deadline is lost.
    ///
    /// # Errors
    /// The errors of [`probe`](Self::probe).
    #[doc(alias = "psm2_mq_improbe2")]
    pub fn mprobe(
        &mut self,
        source: Option<PeerId>,
        tag: Tag,
        ignore: Tag,
        deadline_ns: u64,
    ) -> Result<Option<Claimed>, WaitError> {
        let ticket =
            self.ask_until(Command::Probe { source, tag, ignore, claim: true }, deadline_ns)?;
        match self.answer(ticket, deadline_ns)? {
            Reply::Claimed(found) => Ok(found),
            other => Err(unexpected(other)),
        }
    }

    /// Submits [`Engine::mrecv`](crate::engine::Engine::mrecv). The only reply is
    /// [`Reply::Received`].
    #[doc(alias = "psm2_mq_imrecv")]
    pub fn mrecv(
        &mut self,
        message: Claimed,
        into: Option<(LocalAddr, usize)>,
    ) -> Result<Ticket, OpError> {
        self.ask(Command::ClaimedRecv { message, into })
    }

    /// Submits [`Engine::discard`](crate::engine::Engine::discard).
    pub fn discard(&mut self, message: Claimed) -> Result<Ticket, OpError> {
        self.ask(Command::Discard(message))
    }

    /// Submits [`Engine::cancel`](crate::engine::Engine::cancel) and waits for the reply. The
    /// receive still gets its own reply, whatever this call returns.
    ///
    /// # Errors
    /// [`OpError::StaleToken`] if the receive's reply was already taken. [`WaitError::Deadline`] if
    /// the worker does not answer in time.
    #[doc(alias = "psm2_mq_cancel")]
    pub fn cancel(&mut self, receive: Ticket, deadline_ns: u64) -> Result<Cancelled, WaitError> {
        let slot = self.queue.slot_of(self.own(receive)?)?;
        let ticket = self.ask_until(Command::Cancel { slot }, deadline_ns)?;
        match self.answer(ticket, deadline_ns)? {
            Reply::Cancelled(done) => Ok(done),
            other => Err(unexpected(other)),
        }
    }

    /// Submits a command without a reply. If an accepted command fails later,
    /// [`quiet`](Self::quiet) reports the failure. Commands that the engine refuses are dropped
    /// silently. Commands that only produce a reply have no effect.
    ///
    /// # Errors
    /// [`OpError::Again`] if every command slot is in use.
    pub fn submit_silent(&mut self, command: Command) -> Result<(), OpError> {
        self.queue.submit_raw(command, false).map(drop).map_err(|_| OpError::Again)
    }

    /// Submits [`Engine::fence`](crate::engine::Engine::fence), which orders later writes to the
    /// peer after all earlier operations. A refusal is not reported.
    pub fn fence(&mut self, peer: PeerId) -> Result<(), OpError> {
        self.submit_silent(Command::Fence(peer))
    }

    /// Waits until all operations submitted to this peer are applied there.
    ///
    /// # Errors
    /// The errors of [`Engine::quiet`](crate::engine::Engine::quiet). After the deadline the worker
    /// still waits for the operations.
    pub fn quiet(&mut self, peer: PeerId, deadline_ns: u64) -> Result<(), WaitError> {
        let ticket = self.ask_until(Command::Quiet(peer), deadline_ns)?;
        self.value(ticket, deadline_ns).map(drop)
    }

    /// Submits [`Engine::wait_signal`](crate::engine::Engine::wait_signal) and waits for the reply.
    /// The worker polls the word.
    ///
    /// # Errors
    /// The errors of `Engine::wait_signal`. After the deadline the worker still watches the word. A
    /// context has one watch at a time.
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
    /// [`OpError::StaleToken`] if the reply was already taken, or the ticket belongs to another
    /// context.
    pub fn test(&mut self, ticket: Ticket) -> Result<Option<Reply>, OpError> {
        let id = self.own(ticket)?;
        self.queue.take_reply(id).map_err(|_| OpError::StaleToken)
    }

    /// Waits for the reply to a request, and takes it.
    ///
    /// # Errors
    /// [`WaitError::Deadline`] if the worker does not reply in time. [`OpError::StaleToken`] if the
    /// reply was already taken, or the ticket belongs to another context.
    pub fn wait(&mut self, ticket: Ticket, deadline_ns: u64) -> Result<Reply, WaitError> {
        let id = self.own(ticket)?;
        self.queue.wait_reply(id, deadline_ns)
    }

    fn own(&self, ticket: Ticket) -> Result<Id, OpError> {
        if ticket.of == self.queue.identity() { Ok(ticket.id) } else { Err(OpError::StaleToken) }
    }

    fn ask(&mut self, command: Command) -> Result<Ticket, OpError> {
        match self.queue.submit_raw(command, true) {
            Ok(Some(id)) => Ok(Ticket { id, of: self.queue.identity() }),
            _ => Err(OpError::Again),
        }
    }

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
            // `Quiet` and `Watch` post nothing, so `Reply::Failed` cannot occur.
            other => Err(unexpected(other)),
        }
    }
}

fn unexpected(reply: Reply) -> WaitError {
    match reply {
        Reply::Refused(error) => error.into(),
        Reply::Wait(error) => error,
        _ => OpError::StaleToken.into(),
    }
}
