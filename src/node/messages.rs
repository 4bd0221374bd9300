//! Tagged messages. They match as in MPI: messages of one peer match in the order of their sends.
//!
//! The simple calls take any buffer: [`Node::send`] copies bytes that it cannot send at once, and
//! [`Node::recv`] waits and copies into a slice. The posted calls use registered memory, copy
//! nothing, and return a status.

use std::time::Duration;

use fishplate_core::engine::protocol::{
    Cancelled, Claimed, Envelope, Payload, Received, Request, Status,
};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{Issued, Notice};
use fishplate_core::error::OpError;
use fishplate_core::mem::PeerId;
use fishplate_core::op::{Outcome, Token};

use super::copies::Operation;
use super::home::{CONTEXT, NodeEngine};
use super::memory::Slice;
use super::operations::Source;
use super::waits::{RoomWait, issue};
use super::{Driver, Error, Node, behind};

impl Node {
    /// Sends a message. Bytes may be reused when the call returns, because long bytes are copied.
    /// Registered memory must not change until the send completes, or a quiet returns.
    ///
    /// The first message to a peer on this host waits until the peer is connected. Messages to a
    /// peer on another host are queued until the peer answers. [`quiet`](Self::quiet) tells if it
    /// does not. Queued bytes take a region each: one peer gets an eighth of
    /// [`Limits::locals`](crate::Limits::locals). If its share is used up, the call waits until the
    /// peer answers, for at most [`Builder::patience`](super::Builder::patience).
    ///
    /// For queued bytes, and for bytes longer than [`eager_max`](Self::eager_max), the call
    /// allocates. If no region is left, it waits until the peer has read earlier messages.
    ///
    /// # Errors
    /// [`Error::Op`]: nothing was sent. [`OpError::Again`]: there is no room, or the peer's share
    /// is used up. [`Error::NotConnected`]. [`OpError::Unreported`]: the completion of a send of
    /// bytes cannot be [reported](Notice::Report).
    #[doc(alias = "MPI_Isend")]
    #[inline(always)]
    pub fn send<'a>(
        &mut self,
        to: PeerId,
        tag: impl Into<Tag>,
        from: impl Into<Source<'a>>,
        notice: Notice,
    ) -> Result<Issued, Error> {
        match from.into() {
            Source::Bytes(_) if notice != Notice::Silent => Err(OpError::Unreported.into()),
            Source::Bytes(bytes) => self.send_bytes(to, tag.into(), bytes),
            Source::Memory(slice) => self.send_memory(to, tag.into(), slice, notice),
        }
    }

    #[inline(always)]
    fn send_bytes(&mut self, to: PeerId, tag: Tag, bytes: &[u8]) -> Result<Issued, Error> {
        let payload = Payload::Bytes(bytes);
        match self.home.engine.send_eager(CONTEXT, to, tag, payload) {
            Some(issued) => Ok(issued),
            None => self.send_later(to, tag, Source::Bytes(bytes), Notice::Silent),
        }
    }

    #[inline(never)]
    fn send_memory(
        &mut self,
        to: PeerId,
        tag: Tag,
        from: Slice,
        notice: Notice,
    ) -> Result<Issued, Error> {
        let payload = Payload::Region(from.at, from.len);
        match self.home.engine.send_eager(CONTEXT, to, tag, payload) {
            Some(issued) => Ok(issued),
            None => self.send_later(to, tag, Source::Memory(from), notice),
        }
    }

    #[cold]
    #[inline(never)]
    fn send_later(
        &mut self,
        to: PeerId,
        tag: Tag,
        from: Source<'_>,
        notice: Notice,
    ) -> Result<Issued, Error> {
        // The engine queues no bytes.
        if let Source::Bytes(bytes) = from
            && self.is_unanswered(to)
        {
            return self.send_queued(to, tag, bytes);
        }
        let payload = match from {
            Source::Memory(Slice { at, len }) => Payload::Region(at, len),
            Source::Bytes(bytes) => Payload::Bytes(bytes),
        };
        let error = match issue!(self, engine => engine.send(CONTEXT, to, tag, payload, notice)) {
            Ok(issued) => return Ok(issued),
            Err(error) => error,
        };
        behind!(self, |node| node.send(to, tag, from, notice));
        match (error, from) {
            (OpError::UnknownPeer, _) if self.is_met(to) == Some(false) => {
                self.connected(to)?;
                self.send(to, tag, from, notice)
            }
            (OpError::TooLong { .. }, Source::Bytes(bytes)) => self.send_copy(to, tag, bytes),
            (error, _) => Err(error.into()),
        }
    }

    fn is_unanswered(&self, peer: PeerId) -> bool {
        let engine = &self.home.engine;
        engine.peer_error(peer) == Ok(None) && engine.has_answered(peer) == Ok(false)
    }

    /// Queues a copy, unless the copies for this peer already use its share of the regions.
    fn send_queued(&mut self, to: PeerId, tag: Tag, bytes: &[u8]) -> Result<Issued, Error> {
        let share = usize::from(self.builder.limits.locals / 8).max(1);
        let is_to = |own: &&Operation| own.sends.is_some_and(|(peer, _)| peer == to);
        let mut room =
            RoomWait { looked_ns: 0, deadline_ns: self.deadline_ns(self.builder.patience) };
        while self.is_unanswered(to) {
            if self.own.operations.iter().filter(is_to).count() < share {
                return self.send_copy(to, tag, bytes);
            }
            if !self.waits_for(&mut room) {
                return Err(OpError::Again.into());
            }
        }
        self.send(to, tag, bytes, Notice::Silent)
    }

    fn send_copy(&mut self, to: PeerId, tag: Tag, bytes: &[u8]) -> Result<Issued, Error> {
        let copy = self.copy_of(bytes.len())?;
        self.write(copy.at(0), bytes)?;
        let payload = Payload::Region(copy.at(0), bytes.len());
        match issue!(self, engine => engine.send(CONTEXT, to, tag, payload, Notice::Report(0))) {
            Ok(Issued::Pending(token)) => {
                self.own.operations.push(Operation { token, sends: Some((to, copy)) });
                self.home.engine.count_failure(token)?;
                Ok(Issued::Pending(Token::NONE))
            }
            issued => {
                self.give_back(copy);
                Ok(issued?)
            }
        }
    }

    /// Waits for the oldest message that matches, and copies it into `into`. `source` is the
    /// sender; `None` accepts any peer. Bits set in `ignore` are not compared.
    ///
    /// # Errors
    /// [`Error::Wait`]: no message matched before the deadline. If a message matches just before
    /// the deadline, the call waits up to [`Builder::patience`](super::Builder::patience) longer
    /// for it to arrive. After that the message is lost. [`Error::Truncated`]: the message was
    /// longer than `into`, which contains its first bytes. The rest is lost.
    #[doc(alias = "MPI_Recv")]
    pub fn recv(
        &mut self,
        source: Option<PeerId>,
        tag: impl Into<Tag>,
        ignore: Tag,
        into: &mut [u8],
        timeout: Duration,
    ) -> Result<Envelope, Error> {
        let tag = tag.into();
        behind!(self, |node| node.recv(source, tag, ignore, into, timeout));
        let copy = self.copy_of(into.len())?;
        let request = match self.post_recv(source, tag, ignore, copy.slice(..into.len()), 0) {
            Ok(request) => request,
            Err(error) => {
                self.give_back(copy);
                return Err(error);
            }
        };
        let mut waited = self.wait_recv(request, timeout);
        if waited.is_err() && self.home.engine.cancel(request) == Ok(Cancelled::AlreadyMatched) {
            waited = self.wait_recv(request, self.builder.patience);
        }
        let status = match waited {
            Ok(status) => status,
            Err(error) => {
                self.own.receives.push((request, copy));
                self.reap();
                return Err(error);
            }
        };
        let delivered = (status.delivered as usize).min(into.len());
        let read = self.read(copy.at(0), &mut into[..delivered]);
        self.received(copy, status.outcome);
        read?;
        match (status.outcome, status.envelope) {
            (Received::Ok, Some(envelope)) => Ok(envelope),
            (Received::Truncated, Some(envelope)) => {
                Err(Error::Truncated { len: envelope.len, max: into.len() })
            }
            (Received::Failed(fault), _) => Err(Error::Failed(Outcome::Failed(fault))),
            (Received::Unknown(fault), _) => Err(Error::Failed(Outcome::Unknown(fault))),
            _ => Err(OpError::StaleToken.into()),
        }
    }

    /// Posts a receive into memory of the node. The status contains `word`. Waits for room, at most
    /// [`Builder::patience`](super::Builder::patience), and until `source` is connected. Does not
    /// allocate.
    ///
    /// # Errors
    /// [`Error::Op`]: nothing was posted. [`Error::NotConnected`].
    #[doc(alias = "MPI_Irecv")]
    #[inline(always)]
    pub fn post_recv(
        &mut self,
        source: Option<PeerId>,
        tag: impl Into<Tag>,
        ignore: Tag,
        into: Slice,
        word: u64,
    ) -> Result<Request, Error> {
        let tag = tag.into();
        match self.home.engine.recv(source, tag, ignore, Some((into.at, into.len)), word) {
            Ok(request) => Ok(request),
            Err(error) => self.post_recv_later(source, tag, ignore, into, word, error),
        }
    }

    #[cold]
    #[inline(never)]
    fn post_recv_later(
        &mut self,
        source: Option<PeerId>,
        tag: Tag,
        ignore: Tag,
        into: Slice,
        word: u64,
        error: OpError,
    ) -> Result<Request, Error> {
        let again = move |engine: &mut NodeEngine| {
            engine.recv(source, tag, ignore, Some((into.at, into.len)), word)
        };
        match self.issue_later(error, again) {
            Err(OpError::UnknownPeer) if matches!(self.driver, Driver::Worker(_)) => self
                .else_behind(OpError::UnknownPeer, |node| {
                    node.post_recv(source, tag, ignore, into, word)
                }),
            Err(OpError::UnknownPeer)
                if source.and_then(|peer| self.is_met(peer)) == Some(false) =>
            {
                source.map_or(Ok(()), |peer| self.connected(peer))?;
                self.post_recv(source, tag, ignore, into, word)
            }
            posted => Ok(posted?),
        }
    }

    /// Waits for a receive, and takes its status.
    ///
    /// # Errors
    /// [`Error::Wait`]: the receive did not complete before the deadline.
    #[doc(alias = "MPI_Wait")]
    #[inline]
    pub fn wait_recv(&mut self, request: Request, timeout: Duration) -> Result<Status, Error> {
        self.wait_with(timeout, |engine, waiter, until| engine.wait_recv(request, waiter, until))
    }

    /// Takes the status of a receive, if it is complete. Makes no progress.
    ///
    /// # Errors
    /// The request is unknown, or its status was taken.
    #[doc(alias = "MPI_Test")]
    pub fn test_recv(&mut self, request: Request) -> Result<Option<Status>, Error> {
        match self.home.engine.test_recv(request) {
            Ok(status) => Ok(status),
            Err(error) => self.else_behind(error, |node| node.test_recv(request)),
        }
    }

    /// Takes the status of the next complete receive. Makes no progress.
    // Builds a new value from the cold call's status, so that callers keep a status in registers.
    #[inline(always)]
    pub fn next_recv(&mut self) -> Option<Status> {
        if !self.own.receives.is_empty() || !matches!(self.driver, Driver::Program) {
            let status = self.next_recv_of_others()?;
            return Some(status);
        }
        self.home.engine.next_recv()
    }

    /// Implements [`next_recv`](Self::next_recv) for a front, and for a node that has abandoned
    /// receives.
    #[cold]
    #[inline(never)]
    fn next_recv_of_others(&mut self) -> Option<Status> {
        if let Driver::Worker(worker) = &self.driver {
            return worker.call(Node::next_recv).ok()?;
        }
        loop {
            let status = self.home.engine.next_recv()?;
            match self.own.receives.iter().position(|(request, _)| *request == status.request) {
                Some(at) => {
                    let (_, copy) = self.own.receives.swap_remove(at);
                    self.received(copy, status.outcome);
                }
                None => return Some(status),
            }
        }
    }

    /// Cancels a receive that no message has matched.
    ///
    /// # Errors
    /// The request is unknown, or its status was taken.
    #[doc(alias = "MPI_Cancel")]
    pub fn cancel(&mut self, request: Request) -> Result<Cancelled, Error> {
        behind!(self, |node| node.cancel(request));
        Ok(self.home.engine.cancel(request)?)
    }

    /// Describes the oldest message that matches. Makes one pass if none has arrived. A peer that
    /// is not connected yet has no messages.
    ///
    /// # Errors
    /// The peer is unknown, or has failed.
    #[doc(alias = "MPI_Iprobe")]
    pub fn probe(
        &mut self,
        source: Option<PeerId>,
        tag: impl Into<Tag>,
        ignore: Tag,
    ) -> Result<Option<Envelope>, Error> {
        let tag = tag.into();
        behind!(self, |node| node.probe(source, tag, ignore));
        let found = self.home.engine.probe(source, tag, ignore);
        self.probed(source, found)
    }

    /// Like [`probe`](Self::probe), and claims the message: no other receive gets it.
    ///
    /// # Errors
    /// The same as [`probe`](Self::probe).
    #[doc(alias = "MPI_Improbe")]
    pub fn mprobe(
        &mut self,
        source: Option<PeerId>,
        tag: impl Into<Tag>,
        ignore: Tag,
    ) -> Result<Option<Claimed>, Error> {
        let tag = tag.into();
        behind!(self, |node| node.mprobe(source, tag, ignore));
        let found = self.home.engine.mprobe(source, tag, ignore);
        self.probed(source, found)
    }

    /// Returns the result of a probe. Also connects peers, because a program may make all its
    /// progress by probes.
    fn probed<T>(
        &mut self,
        source: Option<PeerId>,
        found: Result<Option<T>, OpError>,
    ) -> Result<Option<T>, Error> {
        match (found, source) {
            (Err(OpError::UnknownPeer), Some(source)) => {
                // The next call finds what the peer has sent.
                if !self.peers.attach(&mut self.home.engine, source, false) {
                    self.unmet(source)?;
                }
                self.attachable(source).map(|()| None)
            }
            (Ok(None), _) if self.peers.meeting | self.home.engine.has_call() => {
                self.meet_now_and_then();
                Ok(None)
            }
            (found, _) => Ok(found?),
        }
    }

    /// Receives a claimed message, as [`post_recv`](Self::post_recv) does.
    ///
    /// # Errors
    /// The same as [`post_recv`](Self::post_recv).
    #[doc(alias = "MPI_Imrecv")]
    pub fn post_mrecv(
        &mut self,
        message: Claimed,
        into: Slice,
        word: u64,
    ) -> Result<Request, Error> {
        behind!(self, |node| node.post_mrecv(message, into, word));
        Ok(self.home.engine.mrecv(message, Some((into.at, into.len)), word)?)
    }

    /// Returns the maximum eager payload to this peer, in bytes. 0 until the peer is connected.
    pub fn eager_max(&self, peer: PeerId) -> usize {
        if let Driver::Worker(worker) = &self.driver {
            return worker.call(|node| node.eager_max(peer)).unwrap_or(0);
        }
        self.home.engine.eager_max(peer)
    }
}
