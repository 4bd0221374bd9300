//! Accepts connections and drives many handshakes at once, so that no peer delays another.
//!
//! A process that stays silent or sends invalid data costs only its own connection: each handshake
//! advances when its peer sends, has its own deadline, and fails alone. At most [`MOST`] are open.
//! Beyond that, a new one evicts the oldest of the least advanced. Handshakes that this process
//! [dialled](Meetings::dial) do not count and are not evicted.
//!
//! Slow path: allocates and makes system calls. Only [`Meetings::next`] and [`meet`] wait, at most
//! until their deadline.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::time::{Duration, Instant};

use crate::segment::errno;

/// Maximum number of open handshakes. Dialled handshakes do not count.
pub const MOST: usize = 64;

/// Maximum number of connections accepted in one pass.
const PASS: usize = 16;

/// Pause between two attempts to accept, while [`HalfOpen::may_accept`] returns false.
const PAUSE: Duration = Duration::from_millis(10);

/// Maximum number of refusals that wait for [`Meetings::refused`]. A later refusal replaces the
/// oldest.
const REFUSALS: usize = 8;

/// A handshake over a connected socket. It never waits: each [`step`](Self::step) advances it as
/// far as possible.
pub trait HalfOpen: Sized {
    /// The result of the handshake.
    type Met;
    /// Why a handshake failed.
    type Error: Copy;
    /// The error for a peer that took too long.
    const LATE: Self::Error;

    /// Returns whether connections may be accepted now. Otherwise they wait in the backlog.
    fn may_accept() -> bool {
        true
    }
    /// Converts the errno of a failed system call into an error.
    fn system(code: i32) -> Self::Error;
    /// Sends and receives packets until the handshake would have to wait.
    fn step(self) -> Step<Self>;
    /// Returns the socket to poll.
    fn socket(&self) -> BorrowedFd<'_>;
    /// Returns the events to poll for: `POLLIN`, `POLLOUT` or both.
    fn events(&self) -> i16;
    /// Returns the number of valid messages received so far.
    fn heard(&self) -> u32;
    /// Returns a description of the peer, for error messages.
    fn who(&self) -> String;
}

/// The result of a step.
#[derive(Debug)]
pub enum Step<H: HalfOpen> {
    /// The handshake needs input from the peer, or room in the socket.
    Waits(H),
    /// The handshake is complete.
    Met(H::Met),
    /// The handshake failed, and the connection is closed.
    Failed(H::Error),
}

/// The open handshakes, and the most recent failures.
#[derive(Debug)]
pub struct Meetings<H: HalfOpen> {
    open: Vec<Entry<H>>,
    refused: VecDeque<(String, H::Error)>,
    failed: Vec<(OsString, H::Error)>,
    patience: Duration,
}

#[derive(Debug)]
struct Entry<H> {
    handshake: H,
    who: Who,
    deadline: Instant,
}

#[derive(Debug)]
enum Who {
    /// A process that connected to this listener, with its description.
    Stranger(String),
    Dialled(OsString),
}

impl<H: HalfOpen> Meetings<H> {
    /// Creates an empty set. `patience` is the time limit of each handshake.
    pub fn new(patience: Duration) -> Self {
        Meetings { open: Vec::new(), refused: VecDeque::new(), failed: Vec::new(), patience }
    }

    /// Waits until a handshake completes, and returns its result. Accepts connections while it
    /// waits, and calls `begin` to start the handshake over each connection. The other handshakes
    /// stay open for the next call. Returns `None` if the deadline expired. Polls at least once,
    /// even after the deadline.
    ///
    /// # Errors
    /// [`HalfOpen::system`] with the system's code, if the listener fails.
    pub fn next(
        &mut self,
        listener: BorrowedFd<'_>,
        deadline: Instant,
        mut begin: impl FnMut(OwnedFd) -> Result<H, H::Error>,
    ) -> Result<Option<H::Met>, H::Error> {
        loop {
            let first = self.open.iter().map(|entry| entry.deadline).fold(deadline, Instant::min);
            let ready = self.poll(listener, first)?;
            // Iterates backwards, because `swap_remove` replaces a finished handshake with the last
            // handshake.
            for at in (0..self.open.len()).rev().filter(|&at| ready[at]) {
                if let Some(met) = self.step(at) {
                    return Ok(Some(met));
                }
            }
            let now = Instant::now();
            while let Some(late) = self.open.iter().position(|entry| entry.deadline <= now) {
                self.refuse(late);
            }
            for _ in 0..PASS {
                if !H::may_accept() {
                    break;
                }
                let Some(socket) = self.accept(listener)? else { break };
                if let Some(met) = self.admit(socket, now, &mut begin) {
                    return Ok(Some(met));
                }
            }
            if now >= deadline {
                return Ok(None);
            }
        }
    }

    /// Returns the accepted handshakes that failed since the last call, each with the peer's name
    /// and the error. Keeps at most the last eight, oldest first.
    pub fn refused(&mut self) -> Vec<(String, H::Error)> {
        self.refused.drain(..).collect()
    }

    /// Adds a handshake that this process started with the listener at `address`.
    pub fn dial(&mut self, address: &OsStr, handshake: H) {
        self.enter(handshake, Who::Dialled(address.into()), Instant::now());
    }

    /// Cancels the dialled handshake with the listener at `address`. [`failed`](Self::failed) does
    /// not report it.
    pub fn hang_up(&mut self, address: &OsStr) {
        self.open
            .retain(|entry| !matches!(&entry.who, Who::Dialled(dialled) if dialled == address));
    }

    /// Returns the dialled handshakes that failed since the last call, each with its address and
    /// error.
    pub fn failed(&mut self) -> Vec<(OsString, H::Error)> {
        std::mem::take(&mut self.failed)
    }

    /// Drops each handshake if `keep` returns false for it. [`failed`](Self::failed) reports a
    /// dropped dialled handshake as late.
    pub fn retain(&mut self, mut keep: impl FnMut(&H) -> bool) {
        for entry in self.open.extract_if(.., |entry| !keep(&entry.handshake)) {
            if let Who::Dialled(address) = entry.who {
                self.failed.push((address, H::LATE));
            }
        }
    }

    /// Moves all handshakes into a new set, and leaves this set empty.
    pub fn take(&mut self) -> Self {
        std::mem::replace(self, Meetings::new(self.patience))
    }

    /// Moves the handshakes of another set into this set.
    pub fn absorb(&mut self, mut other: Self) {
        self.open.append(&mut other.open);
        self.failed.append(&mut other.failed);
        other.refused.into_iter().for_each(|(who, error)| self.note(Who::Stranger(who), error));
    }

    fn admit(
        &mut self,
        socket: OwnedFd,
        now: Instant,
        begin: &mut impl FnMut(OwnedFd) -> Result<H, H::Error>,
    ) -> Option<H::Met> {
        if self.strangers().count() >= MOST {
            self.evict();
        }
        let handshake = match begin(socket) {
            Ok(handshake) => handshake,
            Err(error) => {
                self.note(Who::Stranger("a process".into()), error);
                return None;
            }
        };
        let who = Who::Stranger(handshake.who());
        self.enter(handshake, who, now);
        // The first packet of a correct peer has often arrived already.
        self.step(self.open.len() - 1)
    }

    fn enter(&mut self, handshake: H, who: Who, now: Instant) {
        self.open.push(Entry { handshake, who, deadline: now + self.patience });
    }

    fn strangers(&self) -> impl Iterator<Item = usize> {
        (0..self.open.len()).filter(|&at| matches!(self.open[at].who, Who::Stranger(_)))
    }

    fn step(&mut self, at: usize) -> Option<H::Met> {
        let Entry { handshake, who, deadline } = self.open.swap_remove(at);
        match handshake.step() {
            Step::Waits(handshake) => {
                self.open.push(Entry { handshake, who, deadline });
                let last = self.open.len() - 1;
                self.open.swap(at, last);
            }
            Step::Met(met) => return Some(met),
            Step::Failed(error) => self.note(who, error),
        }
        None
    }

    fn evict(&mut self) -> bool {
        let rank = |entry: &Entry<H>| (entry.handshake.heard(), entry.deadline);
        let worst = self.strangers().min_by_key(|&at| rank(&self.open[at]));
        worst.map(|at| self.refuse(at)).is_some()
    }

    fn refuse(&mut self, at: usize) {
        let entry = self.open.swap_remove(at);
        self.note(entry.who, H::LATE);
    }

    fn note(&mut self, who: Who, error: H::Error) {
        match who {
            Who::Dialled(address) => self.failed.push((address, error)),
            Who::Stranger(who) => {
                if self.refused.len() == REFUSALS {
                    self.refused.pop_front();
                }
                self.refused.push_back((who, error));
            }
        }
    }

    /// Returns which open handshakes are ready. While connections may not be accepted, waits at
    /// most for [`PAUSE`].
    fn poll(&self, listener: BorrowedFd<'_>, until: Instant) -> Result<Vec<bool>, H::Error> {
        let entry =
            |fd: BorrowedFd<'_>, events| libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
        let mut polls: Vec<_> =
            self.open.iter().map(|e| entry(e.handshake.socket(), e.handshake.events())).collect();
        let until = if H::may_accept() {
            polls.push(entry(listener, libc::POLLIN));
            until
        } else {
            until.min(Instant::now() + PAUSE)
        };
        poll(&mut polls, until).map_err(H::system)?;
        Ok(polls.iter().map(|poll| poll.revents != 0).collect())
    }

    fn accept(&mut self, listener: BorrowedFd<'_>) -> Result<Option<OwnedFd>, H::Error> {
        loop {
            let code = match accept_now(listener) {
                Ok(socket) => return Ok(Some(socket)),
                Err(code) => code,
            };
            match code {
                libc::EINTR => {}
                libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM if self.evict() => {}
                // According to accept(2), these codes report that the peer's connection failed
                // before it was accepted. The listener itself still works.
                libc::EAGAIN
                | libc::ECONNABORTED
                | libc::EPROTO
                | libc::EPERM
                | libc::ENOPROTOOPT
                | libc::ENETDOWN
                | libc::ENETUNREACH
                | libc::EHOSTDOWN
                | libc::EHOSTUNREACH
                | libc::ENONET => return Ok(None),
                code => return Err(H::system(code)),
            }
        }
    }
}

/// Completes one handshake. Waits for the peer until the deadline.
pub fn meet<H: HalfOpen>(mut handshake: H, deadline: Instant) -> Result<H::Met, H::Error> {
    loop {
        handshake = match handshake.step() {
            Step::Waits(handshake) => handshake,
            Step::Met(met) => return Ok(met),
            Step::Failed(error) => return Err(error),
        };
        if Instant::now() >= deadline {
            return Err(H::LATE);
        }
        let fd = handshake.socket().as_raw_fd();
        poll(&mut [libc::pollfd { fd, events: handshake.events(), revents: 0 }], deadline)
            .map_err(H::system)?;
    }
}

pub(crate) fn accept_now(listener: BorrowedFd<'_>) -> Result<OwnedFd, i32> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: accept4(2) allows null pointers, which mean that the peer's address is not wanted.
    let fd =
        unsafe { libc::accept4(listener.as_raw_fd(), ptr::null_mut(), ptr::null_mut(), flags) };
    if fd < 0 {
        return Err(errno());
    }
    // SAFETY: `accept4` returned this new descriptor, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn poll(polls: &mut [libc::pollfd], until: Instant) -> Result<(), i32> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        // Rounded up, so that `poll` does not return before the deadline.
        let ms = i32::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX);
        // SAFETY: the pointer and the count describe the slice.
        if unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, ms) } >= 0 {
            return Ok(());
        }
        match errno() {
            libc::EINTR => {}
            code => return Err(code),
        }
    }
}
