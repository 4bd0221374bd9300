//! A node, to all objects that stand for parts of it.
//!
//! Any thread may call; one at a time is inside. A call that cannot wait keeps the GIL. One that
//! waits gives it up, in slices: in between it lets other threads have their turn and has Python
//! handle signals, so that Ctrl-C ends it. Nobody blocks on the node's lock with the GIL in hand,
//! and no Python code runs under the lock.
//!
//! A forked child inherits memory that two processes must not use at once. It is told apart by a
//! count of forks, and neither uses nor closes the node.

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use fishplate::PeerId;
use fishplate::node::Builder;
use pyo3::{PyResult, Python};

use crate::error::Fault;
use crate::inner::Inner;
use crate::lease::{Flights, Registered};
use crate::view::View;
use crate::waker::Calls;

/// How long a wait is inside without a look at signals; and while other threads call.
const SLICE: Duration = Duration::from_millis(100);
const SHORT: Duration = Duration::from_millis(1);

/// How long a call first waits for room before it reaps what has ended. Then twice as long.
const ROOM: Duration = Duration::from_millis(10);

/// Between two looks whether there is room, or another thread has had its turn.
const NAP: Duration = Duration::from_micros(50);

/// More bytes than this are not copied with the GIL in hand.
pub(crate) const HELD_MAX: usize = 64 << 10;

/// Forks that this process has come through as a child.
static FORKS: AtomicU64 = AtomicU64::new(0);

extern "C" fn in_child() {
    // Relaxed: a child has one thread.
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Counts forks from now on.
pub(crate) fn watch_forks() {
    static ONCE: Once = Once::new();
    // SAFETY: the handler does one atomic addition, which a child may do.
    ONCE.call_once(|| _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) });
}

/// A number that no two threads have at once, and that is not 0.
fn me() -> usize {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| std::ptr::from_ref(here).addr())
}

enum State {
    Open(Box<Inner>),
    Closed,
    Broken,
}

/// A node behind a lock.
pub(crate) struct Shared {
    state: Mutex<State>,
    /// The thread that is inside, or 0. Others read it at any time and compare it with themselves.
    holder: AtomicUsize,
    /// Threads that wait for their turn.
    wanted: AtomicUsize,
    /// The count of forks when the node was opened.
    forks: u64,
    /// How long calls wait that are given no timeout.
    pub timeout: Duration,
    pub address: Vec<u8>,
    /// What an event loop sleeps on. `None`: the node has no descriptor.
    pub calls: Option<Calls>,
}

impl Shared {
    /// Opens a node, which by itself waits neither for room nor for peers: its calls do, for the
    /// patience and the timeout to connect. The last is the default of waits.
    pub fn open(
        builder: Builder,
        [patience, connect_timeout, timeout]: [Duration; 3],
    ) -> Result<Shared, Fault> {
        let node = catch_unwind(|| builder.open()).map_err(|_| Fault::Broken)?.map_err(Fault::Open)?;
        let address = node.address();
        let calls = node.wait_fd().map(Calls::new).transpose().map_err(Fault::System)?;
        let (flights, registered) = (Flights::default(), Registered::default());
        let peers = vec![];
        let inner =
            Inner { node, flights, registered, patience, connect_timeout, peers, disconnected: false };
        Ok(Shared {
            state: Mutex::new(State::Open(Box::new(inner))),
            holder: AtomicUsize::new(0),
            wanted: AtomicUsize::new(0),
            forks: FORKS.load(Ordering::Relaxed),
            timeout,
            address,
            calls,
        })
    }

    /// Makes a call that does not wait, with the GIL.
    pub fn enter<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Inner) -> Result<T, Fault> + Send,
    ) -> PyResult<T> {
        self.at_once(py, call).map_err(|fault| fault.raise(py))
    }

    /// Makes a call that may wait for a while, without the GIL.
    pub fn blocking<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Inner) -> Result<T, Fault> + Send,
    ) -> PyResult<T> {
        let patient = |inner: &mut Inner| inner.patiently(inner.patience, call);
        self.apart(py, patient).map_err(|fault| fault.raise(py))
    }

    /// Makes a call that is refused while there is no room, or its peer is not connected: with the
    /// GIL if `at_once`, and then without it, until it succeeds or the time is up.
    pub fn issue<T: Send>(
        &self,
        py: Python<'_>,
        at_once: bool,
        mut call: impl FnMut(&mut Inner) -> Result<T, Fault> + Send,
    ) -> PyResult<T> {
        if at_once {
            match self.at_once(py, &mut call) {
                Err(fault) if fault.may_pass() => {}
                done => return done.map_err(|fault| fault.raise(py)),
            }
        }
        let (begun, mut slice) = (Instant::now(), ROOM);
        loop {
            let done = self.apart(py, |inner| {
                let spent = begun.elapsed();
                let done = inner.patiently(slice.min(inner.patience.saturating_sub(spent)), &mut call);
                Ok(done.map_err(|fault| (spent < inner.limit(&fault), fault)))
            });
            match done {
                Ok(Ok(done)) => return Ok(done),
                Ok(Err((true, _))) => {}
                Ok(Err((false, fault))) | Err(fault) => return Err(fault.raise(py)),
            }
            slice = SLICE.min(2 * slice);
            self.between(py)?;
            // Not all that is refused has waited.
            py.detach(|| thread::sleep(NAP));
        }
    }

    /// Waits for something that `call` waits for, in slices. With `look`, it is called with a
    /// timeout of zero before, with the GIL.
    pub fn wait<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Duration,
        look: bool,
        mut call: impl FnMut(&mut Inner, Duration) -> Result<T, Fault> + Send,
    ) -> PyResult<T> {
        if look {
            match self.at_once(py, |inner| call(inner, Duration::ZERO)) {
                Err(fault) if fault.is_deadline() && !timeout.is_zero() => {}
                done => return done.map_err(|fault| fault.raise(py)),
            }
        }
        let (begun, mut slice) = (Instant::now(), SLICE);
        loop {
            let left = timeout.saturating_sub(begun.elapsed());
            let done = self.apart(py, |inner| {
                let done = inner.patiently(inner.patience, |inner| call(inner, left.min(slice)));
                let unmet = done.as_ref().is_err_and(Fault::is_unmet);
                Ok((done, unmet && begun.elapsed() < inner.connect_timeout.min(timeout)))
            });
            match done {
                Ok((Err(_), true)) => py.detach(|| thread::sleep(NAP)),
                Ok((Err(fault), false)) if fault.is_deadline() && left > slice => {}
                Ok((done, _)) => return done.map_err(|fault| fault.raise(py)),
                Err(fault) => return Err(fault.raise(py)),
            }
            if self.between(py)? {
                slice = SHORT;
            }
        }
    }

    /// Ends the node. Returns how that went, and what belonged to it.
    pub fn close(&self, py: Python<'_>, timeout: Duration) -> PyResult<()> {
        self.may_enter().map_err(|fault| fault.raise(py))?;
        let (closed, views) = py.detach(|| {
            let mut state = self.turn();
            let inner = match mem::replace(&mut *state, State::Closed) {
                State::Open(inner) => *inner,
                other => {
                    *state = other;
                    return (Ok(()), vec![]);
                }
            };
            drop(state);
            self.made();
            let Inner { mut node, flights, registered, peers, disconnected, .. } = inner;
            let (own, lent) = registered.into_views();
            // Peers write what was lent to them until they know that this node leaves.
            let gone = |peer: PeerId| match node.peer_error(peer) {
                Ok(Some(error)) => error.is_gone(),
                Ok(None) => true,
                Err(_) => false,
            };
            let told = !lent.is_empty() && !disconnected && peers.into_iter().all(gone);
            let closed = catch_unwind(AssertUnwindSafe(|| node.close(timeout)));
            let closed = closed.map_or(Err(Fault::Broken), |closed| closed.map_err(Fault::from));
            let mut views = flights.into_views();
            views.extend(own);
            match told && closed.is_ok() {
                true => views.extend(lent),
                false => mem::forget(lent),
            }
            (closed, views)
        });
        drop(views);
        closed.map_err(|fault| fault.raise(py))
    }

    /// Makes progress, without the GIL, unless another thread is inside.
    pub fn progress(&self) {
        if self.may_enter().is_ok()
            && let Ok(mut state) = self.state.try_lock()
        {
            let progress = |inner: &mut Inner| {
                inner.node.progress();
                Ok(())
            };
            let (_, views) = self.inside(&mut state, progress);
            drop(state);
            drop(views);
        }
    }

    /// Whether no call can succeed any more.
    pub fn is_closed(&self) -> bool {
        match self.state.try_lock() {
            Ok(state) => !matches!(*state, State::Open(_)) || self.forks != FORKS.load(Ordering::Relaxed),
            // A call is under way.
            Err(_) => false,
        }
    }

    /// Whether this thread may ask for its turn.
    fn may_enter(&self) -> Result<(), Fault> {
        if self.forks != FORKS.load(Ordering::Relaxed) {
            return Err(Fault::Forked);
        }
        match self.holder.load(Ordering::Relaxed) == me() {
            true => Err(Fault::Busy),
            false => Ok(()),
        }
    }

    fn turn(&self) -> MutexGuard<'_, State> {
        self.wanted.fetch_add(1, Ordering::Relaxed);
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.wanted.fetch_sub(1, Ordering::Relaxed);
        state
    }

    /// Calls with the GIL; or without it, where another thread is inside.
    fn at_once<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Inner) -> Result<T, Fault> + Send,
    ) -> Result<T, Fault> {
        self.may_enter()?;
        let (done, views) = match self.state.try_lock() {
            Ok(mut state) => self.inside(&mut state, call),
            Err(TryLockError::Poisoned(state)) => self.inside(&mut state.into_inner(), call),
            Err(TryLockError::WouldBlock) => py.detach(|| self.inside(&mut self.turn(), call)),
        };
        drop(views);
        done
    }

    /// Calls without the GIL.
    fn apart<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Inner) -> Result<T, Fault> + Send,
    ) -> Result<T, Fault> {
        self.may_enter()?;
        let (done, views) = py.detach(|| self.inside(&mut self.turn(), call));
        drop(views);
        done
    }

    /// Calls under the lock. A panic ends the node, which is left as it is: nothing inside is
    /// believed any more. Returns views to be released without the lock.
    fn inside<T>(
        &self,
        state: &mut State,
        call: impl FnOnce(&mut Inner) -> Result<T, Fault>,
    ) -> (Result<T, Fault>, Vec<Arc<View>>) {
        let inner = match state {
            State::Open(inner) => inner,
            State::Closed => return (Err(Fault::Closed), vec![]),
            State::Broken => return (Err(Fault::Broken), vec![]),
        };
        self.holder.store(me(), Ordering::Relaxed);
        let done = catch_unwind(AssertUnwindSafe(|| call(inner)));
        self.holder.store(0, Ordering::Relaxed);
        self.made();
        match done {
            Ok(done) => (done, inner.flights.take_released()),
            Err(_) => {
                mem::forget(mem::replace(state, State::Broken));
                (Err(Fault::Broken), vec![])
            }
        }
    }

    /// A call was made, and may have taken what an event loop sleeps for.
    fn made(&self) {
        if let Some(calls) = &self.calls {
            calls.made();
        }
    }

    /// Between two slices: handles signals, and lets other threads have their turn. Whether there
    /// were some.
    fn between(&self, py: Python<'_>) -> PyResult<bool> {
        py.check_signals()?;
        if self.wanted.load(Ordering::Relaxed) == 0 {
            return Ok(false);
        }
        py.detach(|| {
            let begun = Instant::now();
            while self.wanted.load(Ordering::Relaxed) != 0 && begun.elapsed() < SLICE {
                thread::sleep(NAP);
            }
        });
        Ok(true)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let state = mem::replace(self.state.get_mut().unwrap_or_else(PoisonError::into_inner), State::Closed);
        match state {
            // It belongs to the parent, or nothing inside is believed.
            State::Open(inner) if self.forks != FORKS.load(Ordering::Relaxed) => mem::forget(inner),
            State::Open(inner) => {
                let Inner { node, flights, registered, .. } = *inner;
                let (own, lent) = registered.into_views();
                drop(node);
                drop((flights.into_views(), own));
                // Peers write it until they find that this node has gone.
                mem::forget(lent);
            }
            State::Closed | State::Broken => {}
        }
    }
}
