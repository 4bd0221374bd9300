//! One-sided operations. The contract of `fishplate-core` defines their order and completion.
//!
//! An operation that finds no room makes progress until there is room, for at most
//! [`Builder::patience`]. Other calls wait only if they take a timeout.
//!
//! [`Builder::patience`]: super::Builder::patience

use std::hint;
use std::time::Duration;

use fishplate_core::engine::{Issued, Notice, Signal};
use fishplate_core::error::{OpError, WaitError};
use fishplate_core::mem::{LocalAddr, PeerId, RemoteAddr};
use fishplate_core::op::{Amo, AmoOp, Cmp, Completion, Outcome, Token, look_at_signal};

use super::home::CONTEXT;
use super::memory::Slice;
use super::waits::issue;
use super::{Driver, Error, Node, behind};

const LOOKS: u32 = 256;

/// The source of a put's or send's payload.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Bytes. They may be reused when the call returns.
    Bytes(&'a [u8]),
    /// Registered memory. It must not change until the operation is complete.
    Memory(Slice),
}

impl<'a> From<&'a [u8]> for Source<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Source::Bytes(bytes)
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for Source<'a> {
    fn from(bytes: &'a [u8; N]) -> Self {
        Source::Bytes(bytes)
    }
}

impl<'a> From<&'a Vec<u8>> for Source<'a> {
    fn from(bytes: &'a Vec<u8>) -> Self {
        Source::Bytes(bytes)
    }
}

impl From<Slice> for Source<'_> {
    #[inline(always)]
    fn from(slice: Slice) -> Self {
        Source::Memory(slice)
    }
}

impl Node {
    /// Writes to a peer's memory. Unregistered bytes are sent in pieces that rails copy during the
    /// call.
    ///
    /// # Errors
    /// For registered memory, nothing was written. For bytes, the first pieces may have been
    /// written. [`OpError::Unreported`]: the completion of a put of bytes cannot be
    /// [reported](Notice::Report).
    #[doc(alias = "shmem_put_nbi")]
    #[inline(always)]
    pub fn put<'a>(
        &mut self,
        from: impl Into<Source<'a>>,
        to: RemoteAddr,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        match from.into() {
            Source::Memory(Slice { at, len }) => {
                issue!(self, engine => engine.put(CONTEXT, at, len, to, notice))
            }
            Source::Bytes(_) if notice != Notice::Silent => Err(OpError::Unreported),
            Source::Bytes(bytes) => self.inject(bytes, to).map(|()| Issued::Pending(Token::NONE)),
        }
    }

    /// Writes as [`put`](Self::put) does, then signals. The signal is applied once the data and
    /// everything sent earlier to the peer have landed.
    ///
    /// # Errors
    /// The same as [`put`](Self::put). The completion may also be reported for bytes, because it is
    /// the completion of the signal.
    #[doc(alias = "shmem_put_signal_nbi")]
    #[inline(always)]
    pub fn put_signal<'a>(
        &mut self,
        from: impl Into<Source<'a>>,
        to: RemoteAddr,
        signal: Signal,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        match from.into() {
            Source::Memory(Slice { at, len }) => {
                match self.put_signal_mapped(Slice { at, len }, to, signal) {
                    Some(issued) => Ok(issued),
                    None => self.put_signal_later(at, len, to, signal, notice),
                }
            }
            Source::Bytes(bytes) => self.put_signal_bytes(bytes, to, signal, notice),
        }
    }

    /// Puts and signals at once, if the peer's memory is mapped in this process. Bindings call this
    /// before [`put_signal`](Self::put_signal), because it cannot panic. If this returns `None`,
    /// nothing was written, and the caller calls `put_signal`. Hot path.
    #[inline(always)]
    pub fn put_signal_mapped(
        &mut self,
        from: Slice,
        to: RemoteAddr,
        signal: Signal,
    ) -> Option<Issued> {
        self.home.engine.put_signal_mapped(CONTEXT, from.at, from.len, to, signal)
    }

    #[inline(never)]
    fn put_signal_later(
        &mut self,
        at: LocalAddr,
        len: usize,
        to: RemoteAddr,
        signal: Signal,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        issue!(self, engine => engine.put_signal_posted(CONTEXT, at, len, to, signal, notice))
    }

    #[inline(never)]
    fn put_signal_bytes(
        &mut self,
        bytes: &[u8],
        to: RemoteAddr,
        signal: Signal,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        if let Some(issued) = self.home.engine.inject_signal_mapped(CONTEXT, bytes, to, signal) {
            return Ok(issued);
        }
        issue!(self, engine => engine.check_put_signal(to, bytes.len() as u64, signal))?;
        self.inject(bytes, to)?;
        self.signal(signal, notice)
    }

    /// Applies a signal after everything sent earlier to its peer has landed.
    ///
    /// # Errors
    /// The signal was not sent.
    #[inline(always)]
    pub fn signal(&mut self, signal: Signal, notice: Notice) -> Result<Issued, OpError> {
        match self.home.engine.signal_mapped(CONTEXT, signal) {
            Some(issued) => Ok(issued),
            None => self.signal_later(signal, notice),
        }
    }

    #[inline(never)]
    fn signal_later(&mut self, signal: Signal, notice: Notice) -> Result<Issued, OpError> {
        issue!(self, engine => engine.signal_posted(CONTEXT, signal, notice))
    }

    /// Reads a peer's memory into memory of this node. The data has arrived when
    /// [`quiet`](Self::quiet) returns, or when the completion is reported.
    ///
    /// # Errors
    /// The read was not started.
    #[doc(alias = "shmem_get_nbi")]
    #[inline(always)]
    pub fn get(
        &mut self,
        into: Slice,
        from: RemoteAddr,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        issue!(self, engine => engine.get(CONTEXT, into.at, into.len, from, notice))
    }

    /// Writes the first ranges of a list to a peer. Returns the number of written ranges, at most
    /// [`NOW_MAX`](fishplate_core::engine::NOW_MAX). They have landed when the call returns.
    ///
    /// Returns 0 if the first range cannot be written without the peer's help or the network. Use
    /// [`put`](Self::put) for that range. This call copies into mapped memory of a peer on this
    /// host by itself. It has the kernel copy into other memory of that peer, in one system call.
    ///
    /// The writes may overtake operations issued earlier, even across a fence. Later signals and
    /// messages follow them.
    ///
    /// # Errors
    /// If the first range is invalid, nothing was written. If the peer or a copy has failed, a part
    /// may have been written.
    pub fn put_now(&mut self, ranges: &[(Slice, RemoteAddr)]) -> Result<usize, OpError> {
        behind!(self, |node| node.put_now(ranges));
        self.home.engine.put_now(ranges.iter().map(|(from, to)| (from.at, from.len, *to)))
    }

    /// Reads the first ranges of a list, as [`put_now`](Self::put_now) writes them.
    ///
    /// # Errors
    /// The same as [`put_now`](Self::put_now).
    pub fn get_now(&mut self, ranges: &[(Slice, RemoteAddr)]) -> Result<usize, OpError> {
        behind!(self, |node| node.get_now(ranges));
        self.home.engine.get_now(ranges.iter().map(|(into, from)| (into.at, into.len, *from)))
    }

    /// Executes an atomic at a peer in stream order, without fetching.
    ///
    /// # Errors
    /// The atomic was not sent.
    #[inline(always)]
    pub fn amo(&mut self, at: RemoteAddr, amo: Amo, notice: Notice) -> Result<Issued, OpError> {
        issue!(self, engine => engine.amo(CONTEXT, at, amo, notice))
    }

    /// Executes an atomic at a peer in stream order, and waits for the previous value.
    ///
    /// # Errors
    /// [`Error::Op`]: the atomic was not sent. [`Error::Wait`]: the atomic may still be executed.
    /// [`Error::Failed`]: the atomic has failed.
    pub fn fetch(&mut self, at: RemoteAddr, amo: Amo, timeout: Duration) -> Result<u64, Error> {
        behind!(self, |node| node.fetch(at, amo, timeout));
        match self.start_fetch(at, amo)? {
            Issued::Done { value } => Ok(value),
            Issued::Pending(token) => self.finish(token, timeout).map(|end| end.value),
        }
    }

    /// Like [`fetch`](Self::fetch), without waiting: the completion contains the previous value.
    ///
    /// # Errors
    /// The atomic was not sent.
    #[inline]
    pub fn start_fetch(&mut self, at: RemoteAddr, amo: Amo) -> Result<Issued, OpError> {
        issue!(self, engine => engine.fetch(CONTEXT, at, amo, 0))
    }

    /// Waits for one of the node's own operations. If the operation does not complete in time, it
    /// is reaped later.
    fn finish(&mut self, token: Token, timeout: Duration) -> Result<Completion, Error> {
        match self.wait_completion(token, timeout) {
            Ok(end) if end.outcome == Outcome::Done => Ok(end),
            Ok(end) => Err(Error::Failed(end.outcome)),
            Err(error) => {
                self.own.abandon(token);
                Err(error)
            }
        }
    }

    /// Adds to a 64-bit word of a peer, and returns the previous value.
    ///
    /// # Errors
    /// The same as [`fetch`](Self::fetch).
    #[doc(alias = "shmem_atomic_fetch_add")]
    pub fn fetch_add(
        &mut self,
        at: RemoteAddr,
        value: u64,
        timeout: Duration,
    ) -> Result<u64, Error> {
        self.fetch(at, Amo { op: AmoOp::Add, width: 8, operand: value, compare: 0 }, timeout)
    }

    /// Orders writes to the peer: writes issued after the fence land after everything issued before
    /// it. Succeeds for a peer that is not connected or could not be attached, because nothing is
    /// in flight to it.
    ///
    /// # Errors
    /// The peer is unknown or has failed.
    #[doc(alias = "shmem_fence")]
    #[inline]
    pub fn fence(&mut self, peer: PeerId) -> Result<(), OpError> {
        match self.home.engine.fence(CONTEXT, peer) {
            Err(OpError::UnknownPeer) => self.unmet(peer),
            fenced => fenced,
        }
    }

    /// Waits until the peer has applied everything sent to it, and all reads from it are complete.
    /// Succeeds for a peer that is not connected, because nothing is in flight to it.
    ///
    /// # Errors
    /// [`Error::Wait`] names what is missing, or counts the silent operations that have failed. The
    /// reason if the peer could not be attached.
    #[doc(alias = "shmem_quiet")]
    #[inline]
    pub fn quiet(&mut self, peer: PeerId, timeout: Duration) -> Result<(), Error> {
        let home = &mut *self.home;
        // The first attempt does not read the clock.
        match home.engine.quiet(CONTEXT, peer, &mut home.waiter, 0) {
            Ok(()) => Ok(()),
            Err(error) => self.quiet_longer(error, peer, timeout),
        }
    }

    #[cold]
    #[inline(never)]
    fn quiet_longer(
        &mut self,
        error: WaitError,
        peer: PeerId,
        timeout: Duration,
    ) -> Result<(), Error> {
        match self.wait_longer(error, timeout, |engine, waiter, until| {
            engine.quiet(CONTEXT, peer, waiter, until)
        }) {
            Err(Error::Op(OpError::UnknownPeer)) => {
                // The peer may be connected by now.
                behind!(self, |node| node.quiet(peer, timeout));
                self.attachable(peer)?;
                Ok(self.unmet(peer)?)
            }
            quiet => quiet,
        }
    }

    /// Succeeds for a peer that is not connected yet, because nothing is in flight to it.
    #[cold]
    pub(super) fn unmet(&mut self, peer: PeerId) -> Result<(), OpError> {
        behind!(self, |node| node.fence(peer));
        match self.is_met(peer) {
            Some(false) => {
                self.meet_now_and_then();
                // A program may make all its progress by such calls.
                self.home.engine.progress();
                Ok(())
            }
            _ => Err(OpError::UnknownPeer),
        }
    }

    /// Calls [`quiet`](Self::quiet) for every peer.
    ///
    /// # Errors
    /// The error of the first call of [`quiet`](Self::quiet) that fails.
    #[doc(alias = "shmem_quiet")]
    pub fn quiet_all(&mut self, timeout: Duration) -> Result<(), Error> {
        behind!(self, |node| node.quiet_all(timeout));
        self.wait_with(timeout, |engine, waiter, until| engine.quiet_all(CONTEXT, waiter, until))
    }

    /// Waits until the 64-bit word at `at` meets the condition, and returns the word. Everything
    /// that the signal's sender sent before the signal is then visible.
    ///
    /// `from` is the peer that sends the signal, if it is known. If that peer fails, the wait ends.
    /// If the word is in device memory, the device reads it, which takes some microseconds each
    /// time.
    ///
    /// # Errors
    /// [`Error::Wait`] names what is missing, or reports that the peer has failed.
    #[doc(alias = "shmem_signal_wait_until")]
    #[inline]
    pub fn wait(
        &mut self,
        at: LocalAddr,
        cmp: Cmp,
        value: u64,
        from: Option<PeerId>,
        timeout: Duration,
    ) -> Result<u64, Error> {
        let Ok(word) = self.word(at) else { return self.wait_later(at, cmp, value, from, timeout) };
        for _ in 0..LOOKS {
            let now = look_at_signal(word);
            if cmp.holds(now, value) {
                return Ok(now);
            }
            hint::spin_loop();
        }
        self.wait_later(at, cmp, value, from, timeout)
    }

    #[cold]
    #[inline(never)]
    fn wait_later(
        &mut self,
        at: LocalAddr,
        cmp: Cmp,
        value: u64,
        from: Option<PeerId>,
        timeout: Duration,
    ) -> Result<u64, Error> {
        behind!(self, |node| node.wait_later(at, cmp, value, from, timeout));
        if let Some(from) = from.filter(|&from| self.home.engine.peer_error(from).is_err()) {
            self.attach(from);
            self.attachable(from)?;
        }
        self.wait_with(timeout, |engine, waiter, until| {
            match engine.wait_signal(at, cmp, value, from, waiter, until) {
                Err(WaitError::Op(OpError::DeviceMemory)) => {
                    engine.wait_signal_anywhere(at, cmp, value, from, waiter, until)
                }
                waited => waited,
            }
        })
    }

    /// Takes the completion of an operation issued with [`Notice::Report`], if it is complete.
    /// Makes no progress.
    ///
    /// # Errors
    /// The token is unknown, or its completion was taken.
    pub fn test(&mut self, token: Token) -> Result<Option<Completion>, OpError> {
        match self.home.engine.test(token) {
            Ok(end) => Ok(end),
            Err(error) => self.else_behind(error, |node| node.test(token)),
        }
    }

    /// Waits for an operation issued with [`Notice::Report`], and takes its completion.
    ///
    /// # Errors
    /// [`Error::Wait`]: the operation did not complete before the deadline. [`Error::Op`]: the same
    /// as [`test`](Self::test).
    #[inline]
    pub fn wait_completion(
        &mut self,
        token: Token,
        timeout: Duration,
    ) -> Result<Completion, Error> {
        self.wait_with(timeout, |engine, waiter, until| engine.wait(token, waiter, until))
    }

    /// Takes the next completion, in the order of completion. Makes no progress.
    pub fn next_completion(&mut self) -> Option<Completion> {
        if let Driver::Worker(worker) = &self.driver {
            return worker.call(Node::next_completion).ok()?;
        }
        loop {
            let end = self.home.engine.next_completion()?;
            if !self.reap_operation(&end) {
                return Some(end);
            }
        }
    }

    fn inject(&mut self, bytes: &[u8], to: RemoteAddr) -> Result<(), OpError> {
        match issue!(self, engine => engine.inject(CONTEXT, bytes, to)) {
            Err(OpError::TooLong { max, .. }) if max != 0 => {
                let mut at = to;
                for piece in bytes.chunks(max) {
                    issue!(self, engine => engine.inject(CONTEXT, piece, at))?;
                    at.offset = at.offset.saturating_add(piece.len() as u64);
                }
                Ok(())
            }
            injected => injected,
        }
    }
}
