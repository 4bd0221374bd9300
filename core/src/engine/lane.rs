//! The two rings of a queue: one carries commands to its worker, and the other returns their slots.
//! Nothing here blocks or allocates.
//!
//! Neither ring is ever full, because each has at least as many slots as the queue's pool. A
//! completed command returns to its queue through the ring. So releasing its slot takes no atomic
//! operation, unless an event of the command exists.
//!
//! Queue and worker may be dropped in any order. The first side to leave stores its ends of the two
//! rings in the [`Lane`]. The second side takes them and empties both rings, so no slot is lost.
//! Commands that a worker leaves undone end as [`Reply::Abandoned`].
//!
//! | edge        | release               | acquire                | carries                    |
//! |-------------|-----------------------|------------------------|----------------------------|
//! | `lane.left` | `there`, by the first | `there`, by the second | the first side's ring ends |

use core::cell::UnsafeCell;
use core::mem::{ManuallyDrop, MaybeUninit};

use crate::sync::event::{Channel, Listeners};
use crate::sync::host::Host;
use crate::sync::pool::{RawShared, Shared};
use crate::sync::primitive::{AtomicU32, AtomicU64, Ordering, Watch, edge};
use crate::sync::ring::{Consumer, Producer};

use super::ContextId;
use super::command::{Entry, Event, Reply};

mod held;

pub use held::{Held, HeldBy};

/// A command in a ring.
#[derive(Clone, Copy)]
pub struct Posted<'m> {
    pub(super) raw: RawShared<'m, Entry<'m>>,
    /// Whether the result of the command will be read.
    pub(super) report: bool,
}

impl<'m> Posted<'m> {
    pub(crate) fn new(entry: Shared<'m, Entry<'m>>, report: bool) -> Self {
        Posted { raw: entry.into_raw(), report }
    }

    /// Returns the command.
    ///
    /// # Safety
    /// Call this once for each popped command.
    pub(crate) unsafe fn open(self) -> Shared<'m, Entry<'m>> {
        // SAFETY: the caller guarantees that the command was popped and is opened once.
        unsafe { self.raw.open() }
    }
}

type Ends<P, C> = UnsafeCell<MaybeUninit<(P, C)>>;

/// The state that queue and worker share in addition to the rings.
pub struct Lane<'m> {
    /// Bitmask of the sides that have not left: [`QUEUE`], [`CONSUMER`].
    there: AtomicU32,
    /// The queue's ring ends, stored when it leaves. From then on they belong to the worker.
    queue: Ends<Producer<'m, Posted<'m>>, Consumer<'m, Posted<'m>>>,
    /// The worker's ring ends, stored when it leaves. From then on they belong to the queue.
    consumer: Ends<Producer<'m, Posted<'m>>, Consumer<'m, Posted<'m>>>,
    /// Threads that wait for events of this queue, except the queue's own user.
    pub(crate) listeners: Listeners<'m>,
    /// The packed [`Held`] of the worker's last turn.
    held: AtomicU64,
    watch: Watch,
}

const QUEUE: u32 = 1;
const CONSUMER: u32 = 2;

// SAFETY: edge `lane.left` hands over the cells from one side to the other. Their contents may move
// to any thread.
unsafe impl Sync for Lane<'_> {}

impl Lane<'_> {
    /// Creates a lane with both sides.
    pub fn new() -> Self {
        Lane {
            there: AtomicU32::new(QUEUE | CONSUMER),
            queue: UnsafeCell::new(MaybeUninit::uninit()),
            consumer: UnsafeCell::new(MaybeUninit::uninit()),
            listeners: Listeners::new(),
            held: AtomicU64::new(0),
            watch: Watch::new(),
        }
    }
}

impl Default for Lane<'_> {
    fn default() -> Self {
        Self::new()
    }
}

/// The numbers of entries that wait in the two rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    /// Submitted commands that no worker has taken.
    pub send: usize,
    /// Completed commands that their queue has not taken.
    pub recv: usize,
}

/// Dropping it stores the ends in the lane. If the other side has already left, dropping it empties
/// the rings instead.
pub(crate) struct Side<'m> {
    pub outgoing: ManuallyDrop<Producer<'m, Posted<'m>>>,
    pub incoming: ManuallyDrop<Consumer<'m, Posted<'m>>>,
    pub lane: &'m Lane<'m>,
    side: u32,
    left: Option<Consumer<'m, Posted<'m>>>,
}

impl<'m> Side<'m> {
    pub fn both(
        lane: &'m mut Lane<'m>,
        to_worker: (Producer<'m, Posted<'m>>, Consumer<'m, Posted<'m>>),
        from_worker: (Producer<'m, Posted<'m>>, Consumer<'m, Posted<'m>>),
    ) -> [Self; 2] {
        *lane = Lane::new();
        let lane = &*lane;
        let side = |outgoing, incoming, side| Side {
            outgoing: ManuallyDrop::new(outgoing),
            incoming: ManuallyDrop::new(incoming),
            lane,
            side,
            left: None,
        };
        [side(to_worker.0, from_worker.1, QUEUE), side(from_worker.0, to_worker.1, CONSUMER)]
    }

    #[inline]
    pub fn push(&mut self, posted: Posted<'m>) {
        if let Err(full) = self.outgoing.push(posted) {
            // SAFETY: the ring has just returned the command, so it is opened once. The ring is
            // never full, because it is as long as the pool.
            drop(unsafe { full.0.open() });
        }
    }

    #[inline]
    pub fn pop(&mut self) -> Option<Posted<'m>> {
        self.incoming.pop()
    }

    pub fn pending(&mut self) -> Pending {
        let out = self.outgoing.capacity() - self.outgoing.free();
        let inn = self.incoming.len();
        match self.side == QUEUE {
            true => Pending { send: out, recv: inn },
            false => Pending { send: inn, recv: out },
        }
    }

    pub fn held(&self) -> Option<Held> {
        // Relaxed: informational, and orders nothing.
        Held::unpack(self.lane.held.load(Ordering::Relaxed))
    }

    /// Once this is `true`, [`unsent`](Self::unsent) returns the commands that were sent to the
    /// other side.
    #[inline]
    pub fn is_alone(&mut self) -> bool {
        self.left.is_some() || self.other_left()
    }

    pub fn unsent(&mut self) -> Option<Posted<'m>> {
        self.left.as_mut()?.pop()
    }

    #[inline]
    fn other_left(&mut self) -> bool {
        // Acquire, edge `lane.left`: pairs with the subtraction in `drop`.
        if self.lane.there.load(edge!("lane.left.load", Acquire)) != self.side {
            return false;
        }
        // SAFETY: the load above shows that the other side has written its ends and is gone. `left`
        // was `None`, so this is the first call.
        self.left = Some(unsafe { self.take_left() });
        true
    }

    /// # Safety
    /// Called once, after the other side has left.
    unsafe fn take_left(&self) -> Consumer<'m, Posted<'m>> {
        let cell = if self.side == QUEUE { &self.lane.consumer } else { &self.lane.queue };
        self.lane.watch.read((self.side ^ (QUEUE | CONSUMER)) as usize);
        // SAFETY: the caller guarantees that the other side wrote the cell and is gone. The
        // producer in the cell needs no drop.
        unsafe { (*cell.get()).assume_init_read().1 }
    }
}

impl Drop for Side<'_> {
    fn drop(&mut self) {
        if self.left.is_none() && !self.other_left() {
            let cell = if self.side == QUEUE { &self.lane.queue } else { &self.lane.consumer };
            self.lane.watch.write(self.side as usize);
            // SAFETY: `drop` runs once and is the last use of both ends. The cell is this side's
            // until the subtraction below.
            unsafe {
                let ends = (
                    ManuallyDrop::take(&mut self.outgoing),
                    ManuallyDrop::take(&mut self.incoming),
                );
                (*cell.get()).write(ends);
            }
            // Release, edge `lane.left`: hands over the ends of this side. Acquire: takes the ends
            // of the other side if it has just left.
            let there = self.lane.there.fetch_sub(self.side, edge!("lane.left.drop", AcqRel));
            if there != self.side {
                return;
            }
            // SAFETY: the other side has left, so its cell is written, and the cell written above
            // is still this side's.
            unsafe {
                self.left = Some(self.take_left());
                self.incoming = ManuallyDrop::new((*cell.get()).assume_init_read().1);
            }
        }
        while let Some(posted) = self.unsent() {
            // SAFETY: `unsent` has just popped the command, so it is opened once.
            abandon(unsafe { posted.open() }, self.side == QUEUE);
        }
        while let Some(posted) = self.incoming.pop() {
            // SAFETY: the ring has just popped the command, so it is opened once.
            abandon(unsafe { posted.open() }, self.side == CONSUMER);
        }
    }
}

fn abandon(entry: Shared<'_, Entry<'_>>, was_submitted: bool) {
    if was_submitted {
        // SAFETY: the caller acts for the worker, and has taken the command out of the ring or the
        // worker's tables. So it is finished once.
        unsafe { entry.abandon() };
    }
}

/// A command in the engine. Its position in the table is the command's slot in the pool.
#[derive(Default)]
pub struct Flight<'m> {
    entry: Option<Shared<'m, Entry<'m>>>,
    stamp: u32,
    part: Part,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Part {
    /// The whole command. It completes without help from the user.
    #[default]
    Whole,
    /// The get of a copy between peers. The command itself is held.
    Relay,
    /// A receive, which may wait without limit.
    Receive,
}

pub(super) struct Job<'m> {
    pub entry: Shared<'m, Entry<'m>>,
    pub report: bool,
}

impl Job<'_> {
    /// The ticket is stamp and slot, in 48 bits. The engine counts stamps, so a completion for a
    /// dropped consumer never matches another command.
    #[inline]
    pub(super) fn ticket(&self, stamp: &mut u32) -> u64 {
        *stamp = stamp.wrapping_add(1);
        u64::from(*stamp) << 16 | u64::from(self.entry.index().unwrap_or(u16::MAX))
    }
}

/// The worker's side of one queue.
pub struct CommandConsumer<'m> {
    pub(super) context: ContextId,
    side: Side<'m>,
    channel: Channel<'m>,
    flights: &'m mut [Flight<'m>],
    pub(super) flying: u32,
    receiving: u32,
    /// The command that cannot start yet. Later commands wait until it has started.
    pub(super) held: Option<Job<'m>>,
    /// Whether the worker must poll, because nothing notifies it when the held command can start.
    pub(super) restless: bool,
    /// The value last stored in [`Lane::held`].
    noted: u64,
    pub(super) watch: Option<Job<'m>>,
    answered: bool,
}

impl<'m> CommandConsumer<'m> {
    /// Creates the worker's side of the queue that runs in `context`. `flights` is as long as the
    /// queue's pool.
    pub(crate) fn new(
        context: ContextId,
        side: Side<'m>,
        channel: Channel<'m>,
        flights: &'m mut [MaybeUninit<Flight<'m>>],
    ) -> Self {
        for flight in flights.iter_mut() {
            flight.write(Flight::default());
        }
        // SAFETY: the loop above has written every entry.
        let flights = unsafe { &mut *(&raw mut *flights as *mut [Flight<'m>]) };
        CommandConsumer {
            context,
            side,
            channel,
            flights,
            flying: 0,
            receiving: 0,
            held: None,
            restless: false,
            noted: 0,
            watch: None,
            answered: false,
        }
    }

    #[inline]
    pub(super) fn next(&mut self) -> Option<Job<'m>> {
        if let Some(held) = self.held.take() {
            return Some(held);
        }
        let posted = self.side.pop()?;
        // SAFETY: the ring has just popped the command, so it is opened once.
        Some(Job { report: posted.report, entry: unsafe { posted.open() } })
    }

    pub(super) fn readiness(&self, job: &Job<'m>) -> super::command::Readiness {
        // SAFETY: the command was submitted to this worker, which holds no other reference to its
        // work.
        unsafe { job.entry.looks_ready(self.channel.send) }
    }

    #[cold]
    pub(super) fn hold(&mut self, job: Job<'m>, by: HeldBy) {
        self.note(Held { command: job.entry.index().unwrap_or(u16::MAX), by }.pack());
        self.held = Some(job);
    }

    #[inline]
    pub(super) fn note_progress(&mut self) {
        if self.noted != 0 && self.held.is_none() {
            self.note(0);
        }
    }

    fn note(&mut self, word: u64) {
        if self.noted != word {
            self.noted = word;
            // Relaxed: informational, and orders nothing.
            self.side.lane.held.store(word, Ordering::Relaxed);
        }
    }

    pub(super) fn end(&mut self, job: Job<'m>, reply: Reply) {
        // SAFETY: `end` consumes the job, so it ends once, and only this worker has it.
        unsafe { job.entry.finish(reply) };
        self.answered |= job.report;
        self.return_slot(job);
    }

    fn return_slot(&mut self, job: Job<'m>) {
        if self.side.is_alone() {
            return self.forget_queue();
        }
        self.side.push(Posted::new(job.entry, job.report));
    }

    #[cold]
    fn forget_queue(&mut self) {
        while let Some(posted) = self.side.unsent() {
            // SAFETY: `unsent` has just popped the command, so it is opened once.
            drop(unsafe { posted.open() });
        }
    }

    #[inline]
    pub(super) fn launch(&mut self, ticket: u64, job: Job<'m>, part: Part) {
        match self.flights.get_mut(ticket as u16 as usize) {
            Some(flight) => {
                *flight = Flight { entry: Some(job.entry), stamp: (ticket >> 16) as u32, part };
                self.flying += 1;
                self.receiving += u32::from(part == Part::Receive);
            }
            // The table has no entry for this slot, so a completion would not find its job.
            None => self.end(job, Reply::Abandoned),
        }
    }

    #[inline]
    pub(super) fn land(&mut self, ticket: u64) -> Option<(Job<'m>, Part)> {
        let flight = self.flights.get_mut(ticket as u16 as usize)?;
        if flight.stamp != (ticket >> 16) as u32 {
            return None;
        }
        let entry = flight.entry.take()?;
        self.flying -= 1;
        self.receiving -= u32::from(flight.part == Part::Receive);
        Some((Job { entry, report: true }, flight.part))
    }

    pub(super) fn flying_ticket(&self, slot: u16) -> Option<u64> {
        let flight = self.flights.get(usize::from(slot))?;
        flight.entry.as_ref().map(|_| u64::from(flight.stamp) << 16 | u64::from(slot))
    }

    pub(super) fn pending(&mut self) -> Pending {
        self.side.pending()
    }

    /// Notifies the waiters of events that ended since the last call. Returns the number of
    /// wake-ups.
    #[inline]
    pub(super) fn notify<H: Host + ?Sized>(&mut self, host: &H) -> u64 {
        if !self.answered {
            return 0;
        }
        self.answered = false;
        let woke = self.channel.recv.notify(host);
        // The notification above has executed the memory fence that this notification needs.
        u64::from(woke) + self.side.lane.listeners.notify(host)
    }

    pub(super) fn is_idle(&mut self) -> bool {
        let engine_has_receives_alone = self.flying == self.receiving;
        self.held.is_none()
            && self.watch.is_none()
            && engine_has_receives_alone
            && self.side.incoming.is_empty()
    }

    /// Returns whether the queue is gone and everything that it submitted has ended, so that the
    /// consumer may be dropped.
    pub fn is_over(&mut self) -> bool {
        self.is_idle() && self.flying == 0 && self.side.is_alone()
    }
}

impl Drop for CommandConsumer<'_> {
    fn drop(&mut self) {
        let begun = self
            .flights
            .iter_mut()
            .filter(|flight| flight.part != Part::Relay)
            .filter_map(|flight| flight.entry.take());
        let held = [self.held.take(), self.watch.take()].into_iter().flatten().map(|job| job.entry);
        for entry in begun.chain(held) {
            abandon(entry, true);
        }
        self.flights.iter_mut().for_each(|flight| flight.entry = None);
        while let Some(posted) = self.side.pop() {
            // SAFETY: the ring has just popped the command, so it is opened once.
            abandon(unsafe { posted.open() }, true);
        }
    }
}

impl<'m> From<Shared<'m, Entry<'m>>> for Event<'m> {
    fn from(entry: Shared<'m, Entry<'m>>) -> Self {
        Event(entry)
    }
}
