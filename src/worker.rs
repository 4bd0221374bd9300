//! A thread for a [`Worker`]: started, pinned if asked, and stopped without losing submissions.
//!
//! The thread owns the engine and its desks for as long as it runs, spins and then parks as the
//! [`Policy`] says, and gives both back when it is stopped. It lives within a [`Scope`], so what
//! engine and queues borrow may lie on the stack outside of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, Scope, ScopedJoinHandle};
use std::{fmt, io};

use fishplate_core::engine::Engine;
use fishplate_core::engine::lane::Desk;
use fishplate_core::engine::worker::Worker;
use fishplate_core::rail::Rail;
use fishplate_core::sync::event::EventCount;
use fishplate_core::sync::spin::{Counts, Policy};
use fishplate_sys::{Errno, LinuxHost, affinity};

/// What wakes a worker: its host, the word that its queues ring, and the one that its rail rings.
#[derive(Clone, Copy)]
pub struct Wakes<'a> {
    /// The machine.
    pub host: &'a LinuxHost,
    /// Rung by queues when they submit.
    pub send: &'a EventCount,
    /// Rung when something arrives. Without it the worker never sleeps.
    pub arrivals: Option<&'a EventCount>,
}

/// Where and how a worker runs.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The one processor that the thread may use; `None`: any.
    pub cpu: Option<usize>,
    /// How it waits for work.
    pub policy: Policy,
}

impl Default for Options {
    fn default() -> Self {
        Options { cpu: None, policy: Policy::BALANCED }
    }
}

/// A worker that runs.
pub struct Running<'scope, 'a, E> {
    thread: ScopedJoinHandle<'scope, Result<(E, bool, Counts), Errno>>,
    stop: Arc<AtomicBool>,
    wakes: Wakes<'a>,
}

/// What is left of a worker that stopped.
pub struct Stopped<E> {
    /// The engine and the desks, to be driven by whoever comes next.
    pub parts: E,
    /// Whether it did all that [`Worker::run`] promises of a stop. Of what was submitted, the
    /// engine still has receives that nothing has matched.
    pub finished: bool,
    /// How the thread idled.
    pub counts: Counts,
}

/// Why there is no worker.
#[derive(Debug)]
#[non_exhaustive]
pub enum StartError {
    /// The system starts no more threads.
    Thread(io::Error),
    /// The thread may not run on the processor that it should.
    Pin(Errno),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Thread(error) => write!(f, "cannot start a worker: {error}"),
            Self::Pin(error) => write!(f, "cannot pin a worker: {error}"),
        }
    }
}

impl std::error::Error for StartError {}

/// An engine and the desks that it serves. Boxed:
/// an engine holds its rails, some of which are large, and both move with it.
pub type Parts<'m, 'd, R, const RAILS: usize> = (Box<Engine<'m, R, RAILS>>, Vec<Desk<'d>>);

/// Starts a worker that runs until it is stopped, or until `deadline_ns`.
///
/// # Errors
/// [`StartError::Thread`]. [`Running::stop`] reports a failed pinning; the thread then does
/// nothing.
pub fn start<
    'scope,
    'env,
    'm: 'scope,
    'd: 'scope,
    'a: 'scope,
    R: Rail + Send + 'scope,
    const RAILS: usize,
>(
    scope: &'scope Scope<'scope, 'env>,
    (mut engine, mut desks): Parts<'m, 'd, R, RAILS>,
    wakes: Wakes<'a>,
    options: Options,
    deadline_ns: u64,
) -> Result<Running<'scope, 'a, Parts<'m, 'd, R, RAILS>>, StartError> {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let run = move || {
        options.cpu.map_or(Ok(()), affinity::pin)?;
        let mut worker = Worker::new(&mut engine, &mut desks, options.policy);
        let Wakes { host, send, arrivals } = wakes;
        let finished = worker.run(host, send, arrivals, &stopped, deadline_ns);
        let counts = worker.counts();
        Ok(((engine, desks), finished, counts))
    };
    let thread =
        Builder::new().name("fishplate".into()).spawn_scoped(scope, run).map_err(StartError::Thread)?;
    Ok(Running { thread, stop, wakes })
}

impl<E> Running<'_, '_, E> {
    /// Has the worker do everything that was submitted before this call, and acknowledge what has
    /// arrived, then takes it apart. Blocks until then, or until the worker's deadline.
    ///
    /// # Errors
    /// [`StartError::Pin`]: it never ran.
    ///
    /// # Panics
    /// If the worker's thread did.
    pub fn stop(self) -> Result<Stopped<E>, StartError> {
        // Release: the worker that sees it has everything that was submitted before in its rings.
        self.stop.store(true, Ordering::Release);
        self.wakes.send.notify(self.wakes.host);
        match self.thread.join() {
            Ok(Ok((parts, finished, counts))) => Ok(Stopped { parts, finished, counts }),
            Ok(Err(errno)) => Err(StartError::Pin(errno)),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}
