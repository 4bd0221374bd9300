//! Users of an engine: a test program, a queue that a worker serves, or a matched queue.

use std::sync::OnceLock;

use fishplate_core::engine::command::{Event, Reply};
use fishplate_core::engine::lane::CommandConsumer;
use fishplate_core::engine::protocol::{Claimed, Received};
use fishplate_core::engine::worker::Worker;
use fishplate_core::engine::{ContextId, Engine};
use fishplate_core::error::OpError;
use fishplate_core::op::Outcome;
use fishplate_core::psm::{Code, Mq, MqReq, MqState};
use fishplate_core::queue::{Command, Queue, QueueStorage};
use fishplate_core::rail::Rail;
use fishplate_core::sync::event::Channels;
use fishplate_core::sync::spin::Policy;
use fishplate_sys::LinuxHost;

use super::program::Tally;

const CX: ContextId = ContextId(0);

/// Maximum number of open commands or requests.
const MOST: usize = 16;

/// The kinds of users. A world's programs issue their operations through one of them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Engine,
    Queue,
    Mq,
}

pub enum User {
    Engine,
    Queue(Box<Queued>),
    Mq(Box<Matched>),
}

impl User {
    pub fn new(kind: Kind) -> User {
        match kind {
            Kind::Engine => User::Engine,
            Kind::Queue => User::Queue(Box::new(Queued::new())),
            Kind::Mq => User::Mq(Box::new(Matched::new())),
        }
    }
}

fn host() -> &'static LinuxHost {
    static HOST: OnceLock<LinuxHost> = OnceLock::new();
    HOST.get_or_init(LinuxHost::private)
}

struct Submitted {
    event: Event<'static>,
    is_recv: bool,
    is_cancelled: bool,
}

/// A queue, its worker's side, and its submitted commands.
pub struct Queued {
    // The fields are declared in drop order. The worker's side must be first.
    consumers: Vec<CommandConsumer<'static>>,
    submitted: Vec<Submitted>,
    queue: Option<Queue<'static, LinuxHost>>,
    storage: *mut (QueueStorage<'static, MOST>, Channels<1>),
}

impl Queued {
    fn new() -> Self {
        let storage = Box::into_raw(Box::new((QueueStorage::new(), Channels::new())));
        // SAFETY: `storage` was just allocated. `drop` frees it after its borrowers.
        let (memory, channels) = unsafe { &mut *storage };
        let made = Queue::new(CX, host(), channels.queue(0), memory.memory(), Policy::BALANCED);
        let (queue, consumer) = made.unwrap();
        Queued { consumers: vec![consumer], submitted: vec![], queue: Some(queue), storage }
    }

    fn queue(&mut self) -> &mut Queue<'static, LinuxHost> {
        self.queue.as_mut().expect("there until it is dropped")
    }

    /// Submits a command. Returns false if the queue is full or the command is invalid.
    pub fn submit(&mut self, command: Command) -> bool {
        let is_recv = matches!(command, Command::Recv { .. } | Command::ClaimedRecv { .. });
        let Ok(command) = self.queue().create(command) else { return false };
        let event = self.queue().submit(command);
        self.submitted.push(Submitted { event, is_recv, is_cancelled: false });
        true
    }

    /// Cancels the receive at index `chosen`, or all receives.
    pub fn cancel(&mut self, chosen: Option<usize>) {
        let Queued { submitted, queue, .. } = self;
        let queue = queue.as_mut().expect("there until it is dropped");
        let mut cancels = vec![];
        for (at, one) in submitted.iter_mut().enumerate().filter(|(_, one)| one.is_recv) {
            if chosen.is_some_and(|chosen| chosen % MOST != at) || one.is_cancelled {
                continue;
            }
            if let Ok(event) = queue.cancel(&one.event) {
                one.is_cancelled = true;
                cancels.push(Submitted { event, is_recv: false, is_cancelled: false });
            }
        }
        submitted.extend(cancels);
    }

    /// Runs one turn of the queue's worker.
    pub fn turn<R: Rail, const RAILS: usize>(&mut self, engine: &mut Engine<'static, R, RAILS>) {
        Worker::new(engine, &mut self.consumers, Policy::BALANCED).turn(host());
    }

    /// Takes the replies. Adds claimed messages to `claimed`.
    pub fn collect(&mut self, claimed: &mut Vec<Claimed>, tally: &mut Tally) {
        self.submitted.retain(|one| {
            let Some(reply) = one.event.reply() else { return true };
            match reply {
                Reply::Done(_) => tally.done += 1,
                Reply::Failed(Outcome::Unknown(_)) => tally.unknown += 1,
                Reply::Failed(_) => tally.failed += 1,
                Reply::Received(status) => {
                    let lost = !matches!(status.outcome, Received::Ok | Received::Truncated);
                    tally.received += u64::from(status.delivered > 0);
                    tally.failed += u64::from(lost);
                }
                Reply::Claimed(found) => claimed.extend(found),
                Reply::Refused(error) => {
                    tally.refused += 1;
                    tally.stale += u64::from(error == OpError::UnknownRegion);
                }
                Reply::Wait(_) => tally.refused += 1,
                Reply::Found(_) | Reply::Cancelled(_) => {}
                Reply::Dependency | Reply::Abandoned => panic!("{reply:?}"),
            }
            false
        });
    }

    /// True if every command has ended.
    pub fn is_over(&self) -> bool {
        self.submitted.is_empty()
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.consumers.clear();
        if !std::thread::panicking() {
            let ended = self.submitted.iter().all(|one| one.event.is_done());
            assert!(ended, "a command outlives its worker");
        }
        self.submitted.clear();
        drop(self.queue.take());
        // SAFETY: `new` allocated `storage`, and its borrowers have been dropped.
        drop(unsafe { Box::from_raw(self.storage) });
    }
}

/// A matched queue, and its open requests.
pub struct Matched {
    state: MqState,
    pub requests: Vec<MqReq>,
    /// Handles of ended requests.
    old: Vec<MqReq>,
}

impl Matched {
    fn new() -> Self {
        Matched { state: MqState::new(CX), requests: vec![], old: vec![] }
    }

    /// Calls a function with the matched queue, and keeps the request that the function returns.
    pub fn call<R: Rail, const RAILS: usize>(
        &mut self,
        engine: &mut Engine<'static, R, RAILS>,
        call: impl FnOnce(&mut Mq<'_, 'static, R, RAILS>) -> Result<Option<MqReq>, Code>,
    ) -> Result<(), Code> {
        let made = call(&mut Mq::new(engine, &mut self.state).unwrap())?;
        self.requests.extend(made);
        Ok(())
    }

    /// Takes the completed requests.
    pub fn collect<R: Rail, const RAILS: usize>(
        &mut self,
        engine: &mut Engine<'static, R, RAILS>,
        tally: &mut Tally,
    ) {
        let mut mq = Mq::new(engine, &mut self.state).unwrap();
        while let Ok((request, _)) = mq.ipeek2() {
            let status = mq.test2(&mut Some(request)).expect("it has completed");
            match status.error_code {
                Code::Ok | Code::Truncation => tally.done += 1,
                _ => tally.failed += 1,
            }
            tally.received += u64::from(status.nbytes > 0);
            self.requests.retain(|open| *open != request);
            self.old.push(request);
            assert_eq!(mq.test2(&mut Some(request)), Err(Code::ParamErr));
        }
        if let Some(old) = self.old.pop() {
            assert_eq!(mq.cancel(&Some(old)), Err(Code::ParamErr));
            tally.stale += 1;
        }
    }

    /// Cancels all receives. Returns true once no request is open.
    pub fn finish<R: Rail, const RAILS: usize>(
        &mut self,
        engine: &mut Engine<'static, R, RAILS>,
    ) -> bool {
        Mq::new(engine, &mut self.state).unwrap().finish()
    }
}
