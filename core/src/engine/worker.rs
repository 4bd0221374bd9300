//! One thread that drives an engine for others. (UCX calls an object without a thread a worker; this one is a thread's loop.)
//!
//! Each context reaches the worker by a [`Desk`]: a ring of requests in, a ring of answers out. The worker takes a bounded
//! number from each desk in turn, makes one engine pass, and hands out what has ended. It allocates nothing, starts no thread
//! (the caller's thread runs it), and sleeps only in [`Worker::run`], on two words: `send`, which contexts ring when they submit,
//! and the rail's own, which peers ring when something arrives.
//!
//! Answers never find their ring full: a context has at most as many reported requests outstanding as the ring has slots.

use core::cell::Cell;
use core::sync::atomic::Ordering;

use crate::error::{OpError, WaitError};
use crate::mem::{LocalAddr, PeerId, RemoteAddr};
use crate::op::{Amo, Cmp, Completion, Outcome};
use crate::rail::Rail;
use crate::sync::event::EventCount;
use crate::sync::host::Host;
use crate::sync::primitive::AtomicBool;
use crate::sync::ring::{Consumer, Producer};
use crate::sync::spin::{Counts, Idle, Policy, Turn, Waited, wait_until};

use super::protocol::{self, Cancelled, Claimed, Envelope, Payload, Status};
use super::tag::Tag;
use super::wait::{Noted, Pulse};
use super::{ContextId, Engine, Issued, Notice, Signal};

/// What a context asks of the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// [`Engine::put`].
    Put {
        /// The source.
        from: LocalAddr,
        /// Bytes.
        len: usize,
        /// The target.
        to: RemoteAddr,
    },
    /// [`Engine::put_signal`].
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
    /// [`Engine::get`].
    Get {
        /// The target.
        into: LocalAddr,
        /// Bytes.
        len: usize,
        /// The source.
        from: RemoteAddr,
    },
    /// [`Engine::signal`].
    Signal(Signal),
    /// [`Engine::amo`], or with `fetch` [`Engine::fetch`].
    Amo {
        /// The word.
        at: RemoteAddr,
        /// What to do with it.
        amo: Amo,
        /// Whether the answer carries the value from before.
        fetch: bool,
    },
    /// [`Engine::fence`].
    Fence(PeerId),
    /// [`Engine::quiet`]; later requests of the same context wait behind it.
    Quiet(PeerId),
    /// [`Engine::wait_signal`], watched by the worker while it drives everything else.
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
    /// [`Engine::send`], or with `sync` [`Engine::send_sync`].
    Send {
        /// The receiver.
        to: PeerId,
        /// The tag.
        tag: Tag,
        /// The payload and its length in bytes; without it, none.
        from: Option<(LocalAddr, usize)>,
        /// Whether it is done only once it has matched.
        sync: bool,
    },
    /// [`Engine::recv`]; the answer is its status.
    Recv {
        /// The sender, or anybody.
        source: Option<PeerId>,
        /// The tag,
        tag: Tag,
        /// and the bits of it that are not compared.
        ignore: Tag,
        /// The buffer and its length in bytes; without it, none.
        into: Option<(LocalAddr, usize)>,
    },
    /// [`Engine::probe`], or with `claim` [`Engine::mprobe`].
    Probe {
        /// The sender, or anybody.
        source: Option<PeerId>,
        /// The tag,
        tag: Tag,
        /// and the bits of it that are not compared.
        ignore: Tag,
        /// Whether the message is claimed.
        claim: bool,
    },
    /// [`Engine::mrecv`]; the answer is its status.
    ClaimedRecv {
        /// The message.
        message: Claimed,
        /// The buffer and its length in bytes; without it, none.
        into: Option<(LocalAddr, usize)>,
    },
    /// [`Engine::discard`].
    Discard(Claimed),
    /// [`Engine::cancel`] of the receive that was submitted under this ticket. The receive is answered too, once, whatever
    /// this says.
    Cancel(u64),
}

/// A command on its way to the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Comes back with the answer. 48 bits.
    pub ticket: u64,
    /// Whether there is an answer.
    pub report: bool,
    /// What to do.
    pub command: Command,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Done; the value that it fetched or found, or 0.
    Done(u64),
    /// It was posted and failed: never [`Outcome::Done`].
    Failed(Outcome),
    /// It was refused; nothing was done. Never [`OpError::Again`].
    Refused(OpError),
    /// The quiet or the watch that it asked for ended so.
    Wait(WaitError),
    /// The receive has ended.
    Received(Status),
    /// What was found, if anything.
    Found(Option<Envelope>),
    /// What was claimed, if anything was found.
    Claimed(Option<Claimed>),
    /// What became of the receive.
    Cancelled(Cancelled),
}

/// An answer on its way back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The request's.
    pub ticket: u64,
    /// How it ended.
    pub reply: Reply,
}

const TICKET_BITS: u32 = 48;
const TICKET_MASK: u64 = (1 << TICKET_BITS) - 1;

/// The worker's end of one context.
pub struct Desk<'m> {
    context: ContextId,
    requests: Consumer<'m, Request>,
    answers: Producer<'m, Answer>,
    recv: &'m EventCount,
    /// The request that could not be done yet; those behind it wait.
    held: Option<Request>,
    watch: Option<Request>,
    answered: bool,
}

impl<'m> Desk<'m> {
    /// The worker's end of `context`, whose thread sleeps on `recv`.
    pub fn new(
        context: ContextId,
        requests: Consumer<'m, Request>,
        answers: Producer<'m, Answer>,
        recv: &'m EventCount,
    ) -> Self {
        Desk { context, requests, answers, recv, held: None, watch: None, answered: false }
    }

    fn answer(&mut self, ticket: u64, reply: Reply) {
        // A context has at most as many requests outstanding as the ring has slots; one that breaks this loses the answer.
        let _ = self.answers.push(Answer { ticket, reply });
        self.answered = true;
    }

    /// Nothing is submitted or watched.
    fn is_empty(&mut self) -> bool {
        self.held.is_none() && self.watch.is_none() && self.requests.is_empty()
    }
}

/// An engine, the desks it serves, and the idling of its thread. Both are borrowed: once the worker has stopped, the engine may
/// be driven directly, or by another worker.
pub struct Worker<'e, 'm, 'd, R: Rail, const RAILS: usize> {
    engine: &'e mut Engine<'m, R, RAILS>,
    desks: &'e mut [Desk<'d>],
    policy: Policy,
    counts: Counts,
    wakes: u64,
    pulse: Pulse,
}

impl<'e, 'm, 'd, R: Rail, const RAILS: usize> Worker<'e, 'm, 'd, R, RAILS> {
    /// A worker for at most 65,536 `desks`, which idles as `policy` says.
    pub fn new(engine: &'e mut Engine<'m, R, RAILS>, desks: &'e mut [Desk<'d>], policy: Policy) -> Self {
        Worker { engine, desks, policy, counts: Counts::default(), wakes: 0, pulse: Pulse::default() }
    }

    /// The engine, between turns.
    pub fn engine_mut(&mut self) -> &mut Engine<'m, R, RAILS> {
        self.engine
    }

    /// How this thread idled in its last [`run`](Self::run), and the wake-up calls it made in all.
    pub fn counts(&self) -> Counts {
        Counts { wake_syscalls: self.wakes, ..self.counts }
    }

    /// One bounded round over desks and engine. Returns whether anything was done. Never blocks.
    pub fn turn<H: Host>(&mut self, host: &H) -> bool {
        let batch = self.engine.config().batch;
        let mut busy = false;
        for (index, desk) in self.desks.iter_mut().enumerate() {
            busy |= serve(self.engine, desk, index as u64, batch);
        }
        busy |= self.engine.progress() != 0;
        for _ in 0..batch {
            let Some(Completion { tag, outcome, value, .. }) = self.engine.next_completion() else { break };
            busy = true;
            if let Some(desk) = self.desks.get_mut((tag >> TICKET_BITS) as usize) {
                let reply = match outcome {
                    Outcome::Done => Reply::Done(value),
                    outcome => Reply::Failed(outcome),
                };
                desk.answer(tag & TICKET_MASK, reply);
            }
        }
        for _ in 0..batch {
            let Some(status) = self.engine.next_recv() else { break };
            busy = true;
            if let Some(desk) = self.desks.get_mut((status.word >> TICKET_BITS) as usize) {
                desk.answer(status.word & TICKET_MASK, Reply::Received(status));
            }
        }
        for desk in self.desks.iter_mut().filter(|desk| desk.answered) {
            desk.answered = false;
            self.wakes += desk.recv.notify(host) as u64;
        }
        busy
    }

    /// Turns until `stop` is set and everything submitted before is done, or until `deadline_ns`. Sleeps on `send`, which contexts
    /// ring, and on `arrivals`, which the rail rings; without the latter it never sleeps. Whoever sets `stop` rings `send` after it.
    ///
    /// Returns whether it stopped with nothing left to do.
    pub fn run<H: Host>(
        &mut self,
        host: &H,
        send: &EventCount,
        arrivals: Option<&EventCount>,
        stop: &AtomicBool,
        deadline_ns: u64,
    ) -> bool {
        let mut idle = Idle::new(self.policy);
        let slept = Cell::new(false);
        let turn = || {
            let busy = self.turn(host);
            if self.pulse.due(host, slept.replace(false)) {
                self.engine.check_peers();
            }
            // Acquire: pairs with the release store of whoever stops us; what it submitted before is in the rings by then.
            if stop.load(Ordering::Acquire) && !busy && self.is_done() {
                return Turn::Ready;
            }
            match busy || self.engine.has_due() || self.desks.iter().any(|desk| desk.held.is_some()) {
                true => Turn::Busy,
                false if arrivals.is_some() => Turn::Nothing,
                false => Turn::Unnotified,
            }
        };
        let waited = match arrivals {
            Some(arrivals) => {
                let both = [send, arrivals];
                wait_until(host, &mut idle, &Noted { event: &both, slept: &slept }, deadline_ns, turn)
            }
            None => wait_until(host, &mut idle, send, deadline_ns, turn),
        };
        self.counts = idle.counts();
        waited == Waited::Ready
    }

    /// Nothing is submitted, watched or in flight. Asks for the acknowledgements that nobody waits for.
    fn is_done(&mut self) -> bool {
        self.engine.state.ask_for_silent();
        self.engine.state.open == 0 && !self.engine.has_due() && self.desks.iter_mut().all(Desk::is_empty)
    }
}

/// Takes what a context has submitted, at most a batch. Returns whether anything was done.
fn serve<R: Rail, const RAILS: usize>(
    engine: &mut Engine<'_, R, RAILS>,
    desk: &mut Desk<'_>,
    index: u64,
    batch: u32,
) -> bool {
    let mut busy = false;
    if let Some(watch) = desk.watch
        && let Some(reply) = look(engine, watch.command)
    {
        desk.watch = None;
        desk.answer(watch.ticket, reply);
        busy = true;
    }
    for _ in 0..batch {
        let Some(request) = desk.held.take().or_else(|| desk.requests.pop()) else { break };
        match carry_out(engine, desk.context, index, &request) {
            Step::Replied(reply) if request.report => desk.answer(request.ticket, reply),
            Step::Replied(_) | Step::Taken => {}
            Step::Later => {
                desk.held = Some(request);
                break;
            }
            Step::Watch if desk.watch.is_none() => desk.watch = Some(request),
            Step::Watch => {
                desk.held = Some(request);
                break;
            }
        }
        busy = true;
    }
    busy
}

/// What became of a request.
enum Step {
    Replied(Reply),
    /// The engine has it; its completion answers.
    Taken,
    /// No room, or not quiet yet.
    Later,
    Watch,
}

fn carry_out<R: Rail, const RAILS: usize>(
    engine: &mut Engine<'_, R, RAILS>,
    context: ContextId,
    desk: u64,
    request: &Request,
) -> Step {
    let tag = (desk << TICKET_BITS) | (request.ticket & TICKET_MASK);
    let notice = if request.report { Notice::Report(tag) } else { Notice::Silent };
    let issued = match request.command {
        Command::Put { from, len, to } => engine.put(context, from, len, to, notice),
        Command::PutSignal { from, len, to, signal } => {
            engine.put_signal(context, from, len, to, signal, notice)
        }
        Command::Get { into, len, from } => engine.get(context, into, len, from, notice),
        Command::Signal(signal) => engine.signal(context, signal, notice),
        Command::Amo { at, amo, fetch: false } => engine.amo(context, at, amo, notice),
        Command::Amo { at, amo, fetch: true } => engine.fetch(context, at, amo, tag),
        Command::Fence(peer) => engine.fence(context, peer).map(|()| Issued::Done { value: 0 }),
        Command::Quiet(peer) => match engine.try_quiet(context, peer) {
            Ok(true) => Ok(Issued::Done { value: 0 }),
            Ok(false) => return Step::Later,
            Err(error) => return Step::Replied(Reply::Wait(error)),
        },
        Command::Send { to, tag, from, sync } => {
            let payload = from.map_or(Payload::Bytes(&[]), |(at, len)| Payload::Region(at, len));
            match sync {
                true => engine.send_sync(context, to, tag, payload, notice),
                false => engine.send(context, to, tag, payload, notice),
            }
        }
        Command::Recv { source, tag: want, ignore, into } => {
            match engine.recv(source, want, ignore, into, tag) {
                Ok(receive) => return received(engine, request, receive),
                Err(error) => Err(error),
            }
        }
        Command::Probe { source, tag, ignore, claim: false } => match engine.probe(source, tag, ignore) {
            Ok(found) => return Step::Replied(Reply::Found(found)),
            Err(error) => Err(error),
        },
        Command::Probe { source, tag, ignore, claim: true } => match engine.mprobe(source, tag, ignore) {
            Ok(found) => return Step::Replied(Reply::Claimed(found)),
            Err(error) => Err(error),
        },
        Command::ClaimedRecv { message, into } => match engine.mrecv(message, into, tag) {
            Ok(receive) => return received(engine, request, receive),
            Err(error) => Err(error),
        },
        Command::Discard(message) => engine.discard(message).map(|()| Issued::Done { value: 0 }),
        Command::Cancel(ticket) => match engine.cancel_word((desk << TICKET_BITS) | (ticket & TICKET_MASK)) {
            Ok(done) => return Step::Replied(Reply::Cancelled(done)),
            Err(error) => Err(error),
        },
        Command::Watch { .. } => {
            return match look(engine, request.command) {
                Some(reply) => Step::Replied(reply),
                None => Step::Watch,
            };
        }
    };
    match issued {
        Ok(Issued::Done { value }) => Step::Replied(Reply::Done(value)),
        Ok(Issued::Pending(_)) => Step::Taken,
        Err(OpError::Again) => Step::Later,
        Err(error) => Step::Replied(Reply::Refused(error)),
    }
}

/// A receive is posted; without a report, nobody wants to hear of its end.
fn received<R: Rail, const RAILS: usize>(
    engine: &mut Engine<'_, R, RAILS>,
    request: &Request,
    receive: protocol::Request,
) -> Step {
    if !request.report {
        engine.forget(receive);
    }
    Step::Taken
}

/// Looks at a watched word.
fn look<R: Rail, const RAILS: usize>(engine: &Engine<'_, R, RAILS>, watch: Command) -> Option<Reply> {
    let Command::Watch { at, cmp, value, from } = watch else { return None };
    match engine.look(at, cmp, value, from) {
        Ok(None) => None,
        Ok(Some(word)) => Some(Reply::Done(word)),
        Err(error) => Some(Reply::Wait(error)),
    }
}
