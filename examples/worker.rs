//! An engine in a worker thread, and three threads that use it, each through its own context. Each
//! thread adds to the same counter, then sleeps until the others are done. The rail is a loopback,
//! so one process is enough. Run it with `cargo run --example worker`.

use fishplate::core::engine::{Config, ContextId, HANDLE_MAX, command::Reply};
use fishplate::core::mem::{Region, RegionKind};
use fishplate::core::op::{Amo, AmoOp, Cmp};
use fishplate::core::sync::{event::Channels, host::Host, spin::Policy};
use fishplate::core::{context::Context, queue::QueueStorage, rail::loopback::Loopback};
use fishplate::worker::{self, Options, Wakes};
use fishplate::{Limits, Storage, sys::LinuxHost};
use std::{error::Error, ptr::NonNull, sync::atomic::AtomicU64, thread};

const THREADS: usize = 3;
const EACH: u64 = 100;

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let counter = AtomicU64::new(0);
    let config = Config { contexts: THREADS as u16, window: 16, ..Config::DEFAULT };
    let mut storage = Storage::<1>::new(&config, Limits { peers: 1, ..Limits::DEFAULT });
    let mut engine = storage.engine(config, [Loopback::<64>::new()])?;
    let me = engine.reserve_peer()?;
    engine.connect_peer(me, 1)?;
    // SAFETY: `counter` outlives the engine, and nothing else accesses it.
    let region = unsafe { Region::new(NonNull::from(&counter).cast(), 8, RegionKind::Private) };
    let (ours, mut handle) = (engine.register(region)?, [0; HANDLE_MAX]);
    let len = engine.export(ours, &mut handle)?;
    let theirs = engine.import(me, &handle[..len])?;

    // Each thread holds a context. The worker holds the context's consumer.
    let (host, channels) = (LinuxHost::private(), Channels::<THREADS>::new());
    let mut storage: [QueueStorage<8>; THREADS] = Default::default();
    let mut pairs = vec![];
    for (id, room) in storage.iter_mut().enumerate() {
        let (channel, id) = (channels.queue(id), ContextId(id as u8));
        pairs.push(Context::new(id, &host, channel, room.memory(), Policy::BALANCED)?);
    }
    let (contexts, consumers): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();

    let deadline = host.now_ns() + 20_000_000_000;
    let wakes = Wakes { host: &host, send: &channels.send, arrivals: None };
    let count = |mut context: Context<LinuxHost>| -> Result<u64, Box<dyn Error + Send + Sync>> {
        let add = Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 };
        for _ in 0..EACH {
            let ticket = context.fetch(theirs.at(0), add)?;
            assert!(matches!(context.wait(ticket, deadline)?, Reply::Done(_)), "cannot add");
        }
        Ok(context.wait_signal(ours.at(0), Cmp::Ge, THREADS as u64 * EACH, Some(me), deadline)?)
    };
    let work = (Box::new(engine), consumers);
    thread::scope(|scope| {
        let worker = worker::start(scope, work, wakes, Options::default(), deadline)?;
        let threads: Vec<_> = contexts.into_iter().map(|it| scope.spawn(|| count(it))).collect();
        for (id, thread) in threads.into_iter().enumerate() {
            println!("thread {id} sees {}", thread.join().expect("no thread panics")?);
        }
        println!("the worker did all of it: {}", worker.stop()?.finished);
        Ok(())
    })
}
