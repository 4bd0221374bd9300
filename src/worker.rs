//! Runs a [`Worker`] on a thread: starts it, pins it if requested, and stops it without losing
//! submissions.
//!
//! The thread owns the engine and its consumers while it runs. It spins and then parks according to
//! the [`Policy`]. It belongs to a [`Scope`], so the engine and queues may borrow from the stack
//! outside the scope.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::{Builder, Scope, ScopedJoinHandle};
use std::{fmt, io};

use fishplate_core::engine::Engine;
use fishplate_core::engine::lane::CommandConsumer;
use fishplate_core::engine::worker::{Worker, stop_worker};
use fishplate_core::rail::Rail;
use fishplate_core::sync::event::EventCount;
use fishplate_core::sync::spin::{Counts, Policy};
use fishplate_sys::{Errno, LinuxHost, affinity};

/// The eventcounts of a worker. Its queues notify one, and its rail notifies the other.
#[derive(Clone, Copy)]
pub struct Wakes<'a> {
    /// Parks and wakes threads.
    pub host: &'a LinuxHost,
    /// Notified by queues on submission.
    pub send: &'a EventCount,
    /// The rail notifies this eventcount when something arrives. Without it the worker never parks.
    pub arrivals: Option<&'a EventCount>,
}

/// The processor and the wait policy of a worker.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Processor to pin the thread to. `None` does not pin it.
    pub cpu: Option<usize>,
    /// How the thread waits for work.
    pub policy: Policy,
}

impl Default for Options {
    fn default() -> Self {
        Options { cpu: None, policy: Policy::BALANCED }
    }
}

/// Handle of a running worker.
pub struct Running<'scope, 'a, E> {
    thread: ScopedJoinHandle<'scope, Result<(E, bool, Counts), Errno>>,
    stop: Arc<AtomicBool>,
    wakes: Wakes<'a>,
}

/// The parts of a worker that stopped.
pub struct Stopped<E> {
    /// The engine and the consumers, which another thread may now drive.
    pub parts: E,
    /// Whether all submissions completed, as [`Worker::run`] describes. Receives without a match
    /// remain in the engine.
    pub finished: bool,
    /// Counters of spins and parks.
    pub counts: Counts,
}

/// The reason why a worker did not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum StartError {
    /// The thread could not be started.
    Thread(io::Error),
    /// The thread could not be pinned.
    Pin(Errno),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Thread(error) => write!(f, "cannot start the worker thread: {error}"),
            Self::Pin(error) => write!(f, "cannot pin the worker thread: {error}"),
        }
    }
}

impl std::error::Error for StartError {}

/// An engine and the consumers that it serves. The engine is boxed because it contains its rails,
/// and some rails are large.
pub type Parts<'m, 'd, R, const RAILS: usize> =
    (Box<Engine<'m, R, RAILS>>, Vec<CommandConsumer<'d>>);

/// Starts a worker. It runs until it is stopped, or until `deadline_ns`.
///
/// # Errors
/// [`StartError::Thread`]. If pinning fails, the thread does nothing, and [`Running::stop`] reports
/// the error.
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
    (mut engine, mut consumers): Parts<'m, 'd, R, RAILS>,
    wakes: Wakes<'a>,
    options: Options,
    deadline_ns: u64,
) -> Result<Running<'scope, 'a, Parts<'m, 'd, R, RAILS>>, StartError> {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let run = move || {
        options.cpu.map_or(Ok(()), affinity::pin)?;
        let mut worker = Worker::new(&mut engine, &mut consumers, options.policy);
        let Wakes { host, send, arrivals } = wakes;
        let finished = worker.run(host, send, arrivals, &stopped, deadline_ns);
        let counts = worker.counts();
        Ok(((engine, consumers), finished, counts))
    };
    let thread = Builder::new()
        .name("fishplate".into())
        .spawn_scoped(scope, run)
        .map_err(StartError::Thread)?;
    Ok(Running { thread, stop, wakes })
}

impl<E> Running<'_, '_, E> {
    /// Stops the worker after it has completed everything submitted before this call and
    /// acknowledged all arrivals. Blocks until then, or until the worker's deadline.
    ///
    /// # Errors
    /// [`StartError::Pin`]: the worker never ran.
    ///
    /// # Panics
    /// If the worker's thread panicked.
    pub fn stop(self) -> Result<Stopped<E>, StartError> {
        stop_worker(&self.stop);
        self.wakes.send.notify(self.wakes.host);
        match self.thread.join() {
            Ok(Ok((parts, finished, counts))) => Ok(Stopped { parts, finished, counts }),
            Ok(Err(errno)) => Err(StartError::Pin(errno)),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}
