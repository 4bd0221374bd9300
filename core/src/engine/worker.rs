//! The loop of a thread that drives an engine for other threads. In UCX, a worker is an object
//! without a thread.
//!
//! Each queue reaches the worker through a [`CommandConsumer`]: a ring of incoming commands, and a
//! ring that returns their slots. The worker takes a bounded number of commands from each consumer
//! in turn, makes one engine pass, and returns the results. It allocates nothing and starts no
//! thread: the caller's thread runs it, and may be pinned. It sleeps only in [`Worker::run`], on
//! two words. Queues notify the eventcount `send` when they submit. Peers notify the rail's own
//! word when something arrives.
//!
//! The worker may sleep while commands wait for the engine, because the rail notifies it. It may
//! sleep while commands wait for events of other workers' queues, because those workers notify it.
//! While a command waits for room in the engine, the worker stays awake, because nothing notifies
//! it of room.

use core::cell::Cell;
use core::ptr::NonNull;

use crate::error::OpError;
use crate::mem::{LocalAddr, copy_bytes};
use crate::op::{Completion, Outcome};
use crate::rail::Rail;
use crate::sync::event::{EventCount, Listening};
use crate::sync::host::Host;
use crate::sync::primitive::{AtomicBool, edge};
use crate::sync::spin::{Counts, Idle, Policy, Turn, Waited, wait_until};

use super::command::{Command, Readiness, Relay, Reply};
use super::lane::{CommandConsumer, HeldBy, Job, Part, Pending};
use super::protocol::{self, Payload};
use super::table::resolve_local;
use super::wait::{Noted, Pulse};
use super::{Engine, Issued, Notice};

const TICKET_BITS: u32 = 48;
const TICKET_MASK: u64 = (1 << TICKET_BITS) - 1;

const PIECE: usize = 256 << 10;

/// Tells a worker to stop once it has handled everything submitted before this call. `stop` is the
/// flag passed to [`Worker::run`]. Wake the worker afterwards.
pub fn stop_worker(stop: &AtomicBool) {
    // Release, edge `worker.stop`: a worker that reads `true` also sees all earlier submissions.
    stop.store(true, edge!("worker.stop.store", Release));
}

/// An engine, the consumers that it serves, and the idle state of its thread. Engine and consumers
/// are borrowed. Once the worker has stopped, the engine may be driven directly or by another
/// worker.
pub struct Worker<'e, 'm, 'd, R: Rail, const RAILS: usize> {
    engine: &'e mut Engine<'m, R, RAILS>,
    consumers: &'e mut [CommandConsumer<'d>],
    policy: Policy,
    counts: Counts,
    wakes: u64,
    pulse: Pulse,
}

impl<'e, 'm, 'd, R: Rail, const RAILS: usize> Worker<'e, 'm, 'd, R, RAILS> {
    /// Creates a worker for at most 65,536 `consumers`.
    pub fn new(
        engine: &'e mut Engine<'m, R, RAILS>,
        consumers: &'e mut [CommandConsumer<'d>],
        policy: Policy,
    ) -> Self {
        Worker {
            engine,
            consumers,
            policy,
            counts: Counts::default(),
            wakes: 0,
            pulse: Pulse::default(),
        }
    }

    /// Returns the engine, between turns.
    pub fn engine_mut(&mut self) -> &mut Engine<'m, R, RAILS> {
        self.engine
    }

    /// Returns how this thread idled in its last [`run`](Self::run), and how many wake-up calls it
    /// has made in total.
    pub fn counts(&self) -> Counts {
        Counts { wake_syscalls: self.wakes, ..self.counts }
    }

    /// Returns how many entries wait in the rings of all the worker's queues.
    pub fn pending(&mut self) -> Pending {
        let each = self.consumers.iter_mut().map(CommandConsumer::pending);
        each.fold(Pending::default(), |all, consumer| Pending {
            send: all.send + consumer.send,
            recv: all.recv + consumer.recv,
        })
    }

    /// Makes one bounded round over the consumers and the engine. Returns whether anything was
    /// done. Never blocks.
    pub fn turn<H: Host>(&mut self, host: &H) -> bool {
        let batch = self.engine.config().batch;
        let mut busy = false;
        for (index, consumer) in self.consumers.iter_mut().enumerate() {
            busy |= serve(self.engine, consumer, index as u64, batch);
        }
        busy |= self.engine.progress() != 0;
        for _ in 0..batch {
            let Some(Completion { tag, outcome, value, .. }) = self.engine.next_completion() else {
                break;
            };
            busy = true;
            if let Some(consumer) = self.consumers.get_mut((tag >> TICKET_BITS) as usize) {
                let reply = match outcome {
                    Outcome::Done => Reply::Done(value),
                    outcome => Reply::Failed(outcome),
                };
                landed(consumer, tag & TICKET_MASK, reply);
            }
        }
        for _ in 0..batch {
            let Some(status) = self.engine.next_recv() else { break };
            busy = true;
            if let Some(consumer) = self.consumers.get_mut((status.word >> TICKET_BITS) as usize) {
                landed(consumer, status.word & TICKET_MASK, Reply::Received(status));
            }
        }
        for consumer in self.consumers.iter_mut() {
            self.wakes += consumer.notify(host);
        }
        busy
    }

    /// Takes turns until `stop` is set and nothing is left to do, or until `deadline_ns`. Sleeps on
    /// `send`, which queues notify, and on `arrivals`, which the rail notifies. Without `arrivals`
    /// it never sleeps. A thread that sets `stop` must notify `send` afterwards.
    ///
    /// Returns whether it stopped with nothing left to do. In that case:
    ///
    /// - Every command submitted before has completed and is applied at its peers, including silent
    ///   commands. An unmatched receive does not delay the stop: it stays in the engine and its
    ///   consumer.
    /// - Everything that has arrived and been applied is acknowledged, and credits are returned. So
    ///   no peer waits for this engine.
    ///
    /// A stop waits for a peer only until the peer has received what was sent and has replied.
    /// Workers may stop in any order once their users have received everything. Operations to a
    /// peer that makes no progress delay the stop until `deadline_ns`, and stay in the engine.
    #[doc(alias = "ucp_worker_flush_nbx")]
    #[doc(alias = "shmem_finalize")]
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
                for consumer in self.consumers.iter() {
                    if let Some(watch) = &consumer.watch
                        && let Command::Watch { from: Some(from), .. } = *watch.entry.command()
                    {
                        self.engine.state.awaits(from);
                    }
                }
                self.engine.check_peers();
            }
            if !busy && self.may_stop(stop) {
                return Turn::Ready;
            }
            match busy || self.engine.has_due() {
                true => Turn::Busy,
                false
                    if arrivals.is_some()
                        && !self.consumers.iter().any(|consumer| consumer.restless) =>
                {
                    Turn::Nothing
                }
                false => Turn::Unnotified,
            }
        };
        let waited = match arrivals {
            Some(arrivals) => {
                let both = [send, arrivals];
                wait_until(
                    host,
                    &mut idle,
                    &Noted { event: &both, slept: &slept },
                    deadline_ns,
                    turn,
                )
            }
            None => wait_until(host, &mut idle, send, deadline_ns, turn),
        };
        self.counts = idle.counts();
        waited == Waited::Ready
    }

    pub(crate) fn may_stop(&mut self, stop: &AtomicBool) -> bool {
        // Acquire, edge `worker.stop`: pairs with the store in `stop_worker`. So `is_done` sees
        // everything that was submitted before.
        stop.load(edge!("worker.stop.load", Acquire)) && self.is_done()
    }

    /// Sends owed acknowledgements, and requests missing ones.
    fn is_done(&mut self) -> bool {
        self.engine.acknowledge_all();
        self.engine.state.ask_all();
        let engine_is_idle = self.engine.state.open == 0 && !self.engine.has_due();
        engine_is_idle
            && !self.engine.is_receiving()
            && self.consumers.iter_mut().all(CommandConsumer::is_idle)
    }
}

/// Takes at most a batch. Returns whether anything was done.
fn serve<R: Rail, const RAILS: usize>(
    engine: &mut Engine<'_, R, RAILS>,
    consumer: &mut CommandConsumer<'_>,
    index: u64,
    batch: u32,
) -> bool {
    let mut busy = false;
    consumer.restless = false;
    if let Some(watch) = &consumer.watch
        && let Some(reply) = look(engine, watch.entry.command())
        && let Some(watch) = consumer.watch.take()
    {
        consumer.end(watch, reply);
        busy = true;
    }
    for _ in 0..batch {
        let Some(job) = consumer.next() else { break };
        match consumer.readiness(&job) {
            Readiness::Ready => {}
            Readiness::Never => {
                consumer.end(job, Reply::Dependency);
                busy = true;
                continue;
            }
            Readiness::Waits(event, listening) => {
                consumer.restless = listening != Listening::Standing;
                consumer.hold(job, HeldBy::Event(event));
                break;
            }
        }
        let ticket = job.ticket(&mut engine.state.stamp);
        match carry_out(engine, consumer, (index << TICKET_BITS) | ticket, &job) {
            Step::Replied(reply) => consumer.end(job, reply),
            // No report is wanted, and the engine no longer needs the command.
            Step::Taken if !job.report => consumer.end(job, Reply::Done(0)),
            Step::Taken => {
                let part = match *job.entry.command() {
                    Command::Recv { .. } => Part::Receive,
                    _ => Part::Whole,
                };
                consumer.launch(ticket, job, part);
            }
            Step::Relayed => {
                let first_half = Job { entry: job.entry.clone(), report: job.report };
                consumer.launch(ticket, first_half, Part::Relay);
                consumer.hold(job, HeldBy::Engine);
                busy = true;
                break;
            }
            Step::Watch if consumer.watch.is_none() => consumer.watch = Some(job),
            Step::Later { moved } => {
                consumer.hold(job, HeldBy::Engine);
                busy |= moved;
                break;
            }
            Step::Full => {
                consumer.restless = true;
                consumer.hold(job, HeldBy::Room);
                break;
            }
            Step::Watch => {
                consumer.hold(job, HeldBy::Engine);
                break;
            }
        }
        busy = true;
    }
    consumer.note_progress();
    busy
}

fn landed(consumer: &mut CommandConsumer<'_>, ticket: u64, reply: Reply) {
    let Some((job, part)) = consumer.land(ticket) else { return };
    if part != Part::Relay {
        return consumer.end(job, reply);
    }
    // The first half of a copy between peers has completed. The command itself is held.
    match (reply, consumer.held.take()) {
        (Reply::Done(_), Some(held)) => {
            // SAFETY: the entry was submitted to this worker, and no other reference to its work
            // exists.
            unsafe { held.entry.work() }.relay = Relay::Read;
            consumer.held = Some(held);
        }
        (reply, Some(held)) => consumer.end(held, reply),
        (_, None) => {}
    }
}

enum Step {
    Replied(Reply),
    /// The command is in the engine. Its completion there will end it.
    Taken,
    Relayed,
    /// The command waits for the engine, or a piece of it was done (`moved`).
    Later {
        moved: bool,
    },
    Full,
    Watch,
}

fn carry_out<R: Rail, const RAILS: usize>(
    engine: &mut Engine<'_, R, RAILS>,
    consumer: &mut CommandConsumer<'_>,
    tag: u64,
    job: &Job<'_>,
) -> Step {
    let context = consumer.context;
    let notice = if job.report { Notice::Report(tag) } else { Notice::Silent };
    // SAFETY: the entry was submitted to this worker, and no other reference to its work exists.
    let work = unsafe { job.entry.work() };
    let mut relayed = false;
    let issued = match *job.entry.command() {
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
            Ok(false) => return Step::Later { moved: false },
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
                Ok(receive) => return received(engine, job, receive),
                Err(error) => Err(error),
            }
        }
        Command::Probe { source, tag, ignore, claim: false } => {
            match engine.probe(source, tag, ignore) {
                Ok(found) => return Step::Replied(Reply::Found(found)),
                Err(error) => Err(error),
            }
        }
        Command::Probe { source, tag, ignore, claim: true } => {
            match engine.mprobe(source, tag, ignore) {
                Ok(found) => return Step::Replied(Reply::Claimed(found)),
                Err(error) => Err(error),
            }
        }
        Command::ClaimedRecv { message, into } => match engine.mrecv(message, into, tag) {
            Ok(receive) => return received(engine, job, receive),
            Err(error) => Err(error),
        },
        Command::Discard(message) => engine.discard(message).map(|()| Issued::Done { value: 0 }),
        Command::Cancel { slot } => {
            let ticket = consumer.flying_ticket(slot).ok_or(OpError::StaleToken);
            match ticket.and_then(|ticket| engine.cancel_word((tag & !TICKET_MASK) | ticket)) {
                Ok(done) => return Step::Replied(Reply::Cancelled(done)),
                Err(error) => Err(error),
            }
        }
        Command::Watch { .. } => {
            return match look(engine, job.entry.command()) {
                Some(reply) => Step::Replied(reply),
                None => Step::Watch,
            };
        }
        Command::Fill { at, len, pattern, width } => {
            let whole = resolve_local(engine.state.locals, at, len as u64);
            return in_pieces(&mut work.progress, len, whole, |to, done, piece| {
                // SAFETY: `resolve_local` checked the whole range, and `piece` bytes from `done` on
                // lie inside it.
                unsafe { fill(to.add(done), piece, pattern, width) }
            });
        }
        Command::Copy { from, len, to } => {
            let resolve = |addr: LocalAddr| resolve_local(engine.state.locals, addr, len as u64);
            let whole = resolve(from).and_then(|from| Ok((from, resolve(to)?)));
            return in_pieces(&mut work.progress, len, whole, |(from, to), done, piece| {
                // SAFETY: `resolve_local` checked both whole ranges, and the pieces lie inside
                // them. `Region::new` requires that they stay valid.
                unsafe { copy_bytes(from.add(done).as_ptr(), to.add(done).as_ptr(), piece) }
            });
        }
        Command::PeerCopy { via, len, to, .. } if work.relay == Relay::Read => {
            engine.put(context, via, len, to, notice)
        }
        Command::PeerCopy { .. } if work.relay == Relay::Reading => {
            return Step::Later { moved: false };
        }
        Command::PeerCopy { from, via, len, .. } => {
            relayed = true;
            engine.get(context, via, len, from, Notice::Report(tag))
        }
        Command::Marker if consumer.flying == 0 && consumer.watch.is_none() => {
            Ok(Issued::Done { value: 0 })
        }
        Command::Marker => return Step::Later { moved: false },
    };
    match issued {
        Ok(Issued::Done { .. }) if relayed => {
            work.relay = Relay::Read;
            Step::Later { moved: true }
        }
        Ok(Issued::Pending(_)) if relayed => {
            work.relay = Relay::Reading;
            Step::Relayed
        }
        Ok(Issued::Done { value }) => Step::Replied(Reply::Done(value)),
        Ok(Issued::Pending(_)) => Step::Taken,
        Err(OpError::Again) => Step::Full,
        Err(error) => Step::Replied(Reply::Refused(error)),
    }
}

fn received<R: Rail, const RAILS: usize>(
    engine: &mut Engine<'_, R, RAILS>,
    job: &Job<'_>,
    receive: protocol::Request,
) -> Step {
    if !job.report {
        engine.forget(receive);
    }
    Step::Taken
}

/// Does one piece. The whole range is resolved first.
fn in_pieces<M>(
    progress: &mut usize,
    len: usize,
    memory: Result<M, OpError>,
    piece: impl FnOnce(M, usize, usize),
) -> Step {
    let memory = match memory {
        Ok(memory) => memory,
        Err(error) => return Step::Replied(Reply::Refused(error)),
    };
    let now = (len - *progress).min(PIECE);
    piece(memory, *progress, now);
    *progress += now;
    if *progress == len { Step::Replied(Reply::Done(0)) } else { Step::Later { moved: true } }
}

/// Repeats a pattern over memory. The pieces of a fill are multiples of its width, so each starts
/// at the first byte of the pattern.
///
/// # Safety
/// `len` bytes from `to` on are writable.
unsafe fn fill(to: NonNull<u8>, len: usize, pattern: u64, width: u8) {
    let bytes = pattern.to_le_bytes();
    let mask = usize::from(width).wrapping_sub(1) & 7;
    for index in 0..len {
        // SAFETY: `index` is below `len`, and the caller guarantees `len` writable bytes.
        unsafe { to.add(index).write(bytes[index & mask]) };
    }
}

fn look<R: Rail, const RAILS: usize>(
    engine: &mut Engine<'_, R, RAILS>,
    watch: &Command,
) -> Option<Reply> {
    let Command::Watch { at, cmp, value, from } = *watch else { return None };
    match engine.look_anywhere(at, cmp, value, from) {
        Ok(None) => None,
        Ok(Some(word)) => Some(Reply::Done(word)),
        Err(error) => Some(Reply::Wait(error)),
    }
}
