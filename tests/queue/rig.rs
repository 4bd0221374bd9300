//! The fixture: an engine that is its own peer, queues that feed it, and a worker driven by hand.

use std::thread;

use fishplate::MatchStorage;
use fishplate_core::engine::command::{Event, Reply};
use fishplate_core::engine::lane::CommandConsumer;
use fishplate_core::engine::protocol::MatchConfig;
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::worker::Worker;
use fishplate_core::engine::{Config, ContextId, Engine};
use fishplate_core::mem::{LocalId, PeerId, RemoteId};
use fishplate_core::queue::{Cmd, Command, Queue, QueueStorage};
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::sync::event::Channels;
use fishplate_core::sync::pool::CreateError;
use fishplate_core::sync::spin::Policy;
use fishplate_sys::LinuxHost;

use crate::support::{Own, own};

pub const NEVER: u64 = u64::MAX;
/// Maximum number of queues per worker.
pub const QUEUES: usize = 8;
pub const MATCHING: MatchConfig = MatchConfig {
    eager: 128,
    credits: 4,
    headers: 8,
    shared_credits: 0,
    shared_headers: 0,
    shared_shorts: 0,
    pieces: 0,
    seed: 5,
};
/// A deadline that has already expired.
pub const NOW: u64 = 1;

pub type Rails = Faulty<Loopback<64>, 32>;
pub type Hosted = Queue<'static, LinuxHost>;

pub fn leak<T>(value: T) -> &'static mut T {
    Box::leak(Box::new(value))
}

/// Creates an engine that is its own peer over two reordering rails.
pub fn scene(seed: u64, contexts: u16) -> Own<Rails, 2> {
    let rails = std::array::from_fn(|i| {
        Faulty::new(Loopback::new(), Faults::DISORDER, seed * 2 + i as u64)
    });
    let mut own =
        own(Config { contexts, window: 16, eager: 0, ..Config::default() }, rails, 1 << 20);
    let storage = leak(MatchStorage::new(&MATCHING, usize::from(contexts) * 4, 64, 4));
    own.engine.attach_matching(MATCHING, storage.memory()).unwrap();
    own
}

pub fn queue_of<const N: usize>(
    host: &'static LinuxHost,
    channels: &'static Channels<QUEUES>,
    id: u8,
) -> (Hosted, CommandConsumer<'static>) {
    let memory = leak(QueueStorage::<N>::new()).memory();
    Queue::new(ContextId(id), host, channels.queue(id.into()), memory, Policy::BALANCED).unwrap()
}

/// Queues, and a worker that serves them in this thread.
pub struct Bench {
    pub host: &'static LinuxHost,
    pub queues: Vec<Hosted>,
    pub worker: Worker<'static, 'static, 'static, Rails, 2>,
    pub at: Places,
}

#[derive(Clone, Copy)]
pub struct Places {
    pub peer: PeerId,
    pub source: LocalId,
    pub target: LocalId,
    pub remote: RemoteId,
}

pub fn bench(seed: u64, queues: u8) -> Bench {
    let Own { engine, peer, source, target, remote, .. } = scene(seed, queues.into());
    let (host, channels) = (&*leak(LinuxHost::private()), &*leak(Channels::new()));
    let (queues, consumers): (Vec<_>, Vec<_>) =
        (0..queues).map(|id| queue_of::<16>(host, channels, id)).unzip();
    let worker = Worker::new(leak(engine), consumers.leak(), Policy::BALANCED);
    Bench { host, queues, worker, at: Places { peer, source, target, remote } }
}

impl Bench {
    pub fn engine(&mut self) -> &mut Engine<'static, Rails, 2> {
        self.worker.engine_mut()
    }

    pub fn turns_until(&mut self, what: &str, mut ready: impl FnMut() -> bool) {
        for _ in 0..100_000 {
            if ready() {
                return;
            }
            self.worker.turn(self.host);
        }
        panic!("{what}: not after 100000 turns");
    }

    pub fn run(&mut self, queue: usize, command: Command) -> Reply {
        let event = submit(&mut self.queues[queue], command);
        self.turns_until("a command", || event.is_done());
        event.reply().unwrap()
    }
}

pub fn create(queue: &mut Hosted, command: Command) -> Cmd<'static> {
    loop {
        match queue.create(command) {
            Ok(command) => return command,
            Err(CreateError::Full) => thread::yield_now(),
            Err(refused) => panic!("{refused:?}"),
        }
    }
}

pub fn submit(queue: &mut Hosted, command: Command) -> Event<'static> {
    let command = create(queue, command);
    queue.submit(command)
}

pub fn tag(n: u64) -> Tag {
    Tag::new(n, 0)
}
