//! A node under a lock, shared by all its Python objects.
//!
//! Any thread may call. One thread at a time uses the node. A call that cannot wait keeps the GIL.
//! A call that waits releases the GIL and waits in slices. Between slices other threads take their
//! turn and Python handles signals, so Ctrl-C works. No thread waits for the node's lock while it
//! holds the GIL, and no Python code runs under the lock.
//!
//! A forked child inherits memory that two processes must not use at once. A fork count detects the
//! child, which then neither uses nor closes the node.

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use fishplate::PeerId;
use fishplate::node::{Builder, Gpu};
use pyo3::types::PyAnyMethods;
use pyo3::{PyResult, Python};

use crate::calls::Calls;
use crate::error::Fault;
use crate::inner::Inner;
use crate::lease::{Call, Flight, Flights, Registered};
use crate::view::View;

/// The longest slice of a wait, and the longest slice while other threads wait for the node.
const SLICE: Duration = Duration::from_millis(100);
const SHORT: Duration = Duration::from_millis(1);

/// First wait for room before completions are reaped. Each further wait is twice as long.
const ROOM: Duration = Duration::from_millis(10);

const NAP: Duration = Duration::from_micros(50);

/// Copies of more than this many bytes release the GIL.
pub(crate) const HELD_MAX: usize = 64 << 10;

static FORKS: AtomicU64 = AtomicU64::new(0);

extern "C" fn in_child() {
    // Relaxed: a forked child has only this thread.
    FORKS.fetch_add(1, Ordering::Relaxed);
}

pub(crate) fn watch_forks() {
    static ONCE: Once = Once::new();
    // SAFETY: the handler makes one atomic addition, which POSIX allows in a forked child.
    ONCE.call_once(|| _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) });
}

/// Returns a nonzero number that no other live thread has.
fn me() -> usize {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| std::ptr::from_ref(here).addr())
}

/// True if a tensor over this device memory exists. The node and the `Memory` object hold two of
/// the references.
pub(crate) fn is_lent(loan: &Arc<()>) -> bool {
    Arc::strong_count(loan) > 2
}

/// True if an asyncio loop runs in this thread.
#[cold]
fn is_in_event_loop(py: Python<'_>) -> bool {
    let running = || {
        // A program that uses no loop does not import asyncio.
        let asyncio = py.import("sys")?.getattr("modules")?.get_item("asyncio")?;
        asyncio.call_method0("_get_running_loop")
    };
    running().is_ok_and(|running| !running.is_none())
}

enum State {
    Open(Box<Inner>),
    Closed,
    Broken,
}

pub(crate) struct Shared {
    state: Mutex<State>,
    /// True if the state is not `Open`. Readable without the lock.
    closed: AtomicBool,
    /// The thread that uses the node, or 0. Other threads only compare it with their own number.
    holder: AtomicUsize,
    wanted: AtomicUsize,
    forks: u64,
    pub timeout: Duration,
    /// The address of the node when it was opened.
    address: Vec<u8>,
    pub gpu: Option<Gpu>,
    /// `None` if the node has no descriptor.
    pub calls: Option<Calls>,
}

impl Shared {
    /// Opens a node that waits neither for room nor for peers. The calls of this type wait instead,
    /// up to `patience` or the connect timeout. The connect timeout is also the default timeout.
    pub fn open(
        builder: Builder,
        gpu: Option<Gpu>,
        [patience, connect_timeout, timeout]: [Duration; 3],
    ) -> Result<Shared, Fault> {
        let node =
            catch_unwind(|| builder.open()).map_err(|_| Fault::Broken)?.map_err(Fault::Open)?;
        let address = node.address();
        let calls = node.wait_fd().map(Calls::new).transpose().map_err(Fault::System)?;
        let (flights, registered) = (Flights::default(), Registered::default());
        let (peers, devices, disconnected) = (vec![], vec![], false);
        let inner = Inner {
            node,
            flights,
            registered,
            patience,
            connect_timeout,
            gpu,
            devices,
            peers,
            disconnected,
        };
        Ok(Shared {
            state: Mutex::new(State::Open(Box::new(inner))),
            closed: AtomicBool::new(false),
            holder: AtomicUsize::new(0),
            wanted: AtomicUsize::new(0),
            forks: FORKS.load(Ordering::Relaxed),
            timeout,
            address,
            gpu,
            calls,
        })
    }

    /// Returns the current address, which changes when a rail fails.
    pub fn address(&self, py: Python<'_>) -> Vec<u8> {
        let current = self.at_once(py, |inner| Ok(inner.node.address()));
        current.unwrap_or_else(|_| self.address.clone())
    }

    pub fn enter<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Inner) -> Result<T, Fault> + Send,
    ) -> PyResult<T> {
        self.at_once(py, call).map_err(|fault| fault.raise(py))
    }

    pub fn blocking<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Inner) -> Result<T, Fault> + Send,
    ) -> PyResult<T> {
        let patient = |inner: &mut Inner| inner.patiently(inner.patience, call);
        self.apart(py, patient).map_err(|fault| fault.raise(py))
    }

    /// Makes a call that fails while there is no room or its peer is not connected. If `at_once`,
    /// first tries with the GIL. Then repeats without the GIL until the call succeeds or its
    /// [limit](Inner::limit) expires.
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
                let done =
                    inner.patiently(slice.min(inner.patience.saturating_sub(spent)), &mut call);
                Ok(done.map_err(|fault| (spent < inner.limit(&fault), fault)))
            });
            match done {
                Ok(Ok(done)) => return Ok(done),
                Ok(Err((true, _))) => {}
                Ok(Err((false, fault))) | Err(fault) => return Err(fault.raise(py)),
            }
            slice = SLICE.min(2 * slice);
            self.between(py)?;
            // A refused call returns at once, so pause before the retry.
            py.detach(|| thread::sleep(NAP));
        }
    }

    /// Starts to send or to receive a message. Waits for the peer to connect. In the thread of an
    /// event loop the call starts later instead, when the program's calls find the peer connected.
    pub fn start(&self, py: Python<'_>, call: Call) -> PyResult<Arc<Flight>> {
        if !call.held().is_on_device() {
            match self.at_once(py, |inner| inner.start(&call)) {
                Err(fault) if fault.is_unmet() && is_in_event_loop(py) => {
                    // Keeps `call`, which must not be dropped under the lock.
                    return self.enter(py, |inner| Ok(inner.defer(&call)));
                }
                Err(fault) if fault.may_pass() => {}
                done => return done.map_err(|fault| fault.raise(py)),
            }
        }
        self.issue(py, false, |inner| inner.start(&call))
    }

    /// Repeats `call` in slices until it returns or `timeout` expires. If `look`, first tries once
    /// with the GIL and a timeout of zero.
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
                Err(fault) if fault.is_unmet() && !timeout.is_zero() => {}
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
            // Stores `closed`, fences, then counts the tensors. `Memory::bytes` counts its tensor,
            // fences, then loads `closed`. So a tensor that another thread makes meanwhile is
            // counted here or refused there.
            self.closed.store(true, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            drop(state);
            self.made();
            let Inner { mut node, flights, registered, devices, peers, disconnected, .. } = inner;
            let (own, lent) = registered.into_views();
            // Peers may write exported buffers until they know that the node is closed.
            let gone = |peer: PeerId| match node.peer_error(peer) {
                Ok(Some(error)) => error.is_gone(),
                Ok(None) => true,
                Err(_) => false,
            };
            let told = !lent.is_empty() && !disconnected && peers.into_iter().all(gone);
            let closed = catch_unwind(AssertUnwindSafe(|| {
                for (memory, loan) in devices {
                    if is_lent(&loan) {
                        node.keep_device(memory)?;
                    }
                }
                node.close(timeout)
            }));
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

    /// Makes progress without the GIL, unless another thread uses the node.
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

    pub fn is_closed(&self) -> bool {
        self.forks != FORKS.load(Ordering::Relaxed) || self.closed.load(Ordering::SeqCst)
    }

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

    /// Makes a call with the GIL. Releases the GIL if another thread uses the node.
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

    /// Makes a call under the lock. A panic makes the node unusable. Also returns views to drop
    /// without the lock.
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
                self.closed.store(true, Ordering::SeqCst);
                (Err(Fault::Broken), vec![])
            }
        }
    }

    /// Records that a call was made, because it may have taken a completion that an event loop
    /// awaits.
    fn made(&self) {
        if let Some(calls) = &self.calls {
            calls.made();
        }
    }

    /// Returns true if other threads waited for the node.
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
        let state = mem::replace(
            self.state.get_mut().unwrap_or_else(PoisonError::into_inner),
            State::Closed,
        );
        match state {
            // Never dropped after a fork or a panic: the node belongs to the parent process, or its
            // state may be inconsistent.
            State::Open(inner) if self.forks != FORKS.load(Ordering::Relaxed) => mem::forget(inner),
            State::Open(inner) => {
                let Inner { node, flights, registered, .. } = *inner;
                let (own, lent) = registered.into_views();
                drop(node);
                drop((flights.into_views(), own));
                // Peers may write these buffers until they notice that the node is closed.
                mem::forget(lent);
            }
            State::Closed | State::Broken => {}
        }
    }
}
