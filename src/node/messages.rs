//! Tagged messages, matched as MPI matches: in the order in which a peer sent them.
//!
//! The simple forms take any buffer: [`Node::send`] copies what it cannot send at once, and
//! [`Node::recv`] waits and copies into a slice. The posted forms name registered memory, copy
//! nothing, and end with a status.

use std::time::Duration;

use fishplate_core::engine::protocol::{Cancelled, Claimed, Envelope, Payload, Received, Request, Status};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{Issued, Notice};
use fishplate_core::error::OpError;
use fishplate_core::mem::PeerId;
use fishplate_core::op::Token;

use super::memory::{Memory, Slice};
use super::operations::{CONTEXT, INTERNAL, Source, issue};
use super::{Error, Node};

/// Memory of the node's own for messages from and into slices: what is free, and what is in use.
#[derive(Default)]
pub(super) struct Copies {
    /// The last one that came free.
    free: Option<Memory>,
    /// Payloads that their receivers have not read yet.
    sends: Vec<(Token, Memory)>,
    /// Buffers of receives that were given up and matched all the same.
    receives: Vec<(Request, Memory)>,
}

impl Node {
    /// Sends a message. Bytes may be reused on return; long ones are copied. Memory must stay as it
    /// is until the completion, or a quiet. The first message to a peer waits until that is
    /// connected. Allocates for bytes longer than [`eager_max`](Self::eager_max).
    ///
    /// # Errors
    /// [`Error::Op`]: nothing was sent. [`Error::NotConnected`]. Bytes cannot be
    /// [reported](Notice::Report): [`OpError::Unreported`].
    #[doc(alias = "MPI_Isend")]
    #[inline]
    pub fn send<'a>(
        &mut self,
        to: PeerId,
        tag: impl Into<Tag>,
        from: impl Into<Source<'a>>,
        notice: Notice,
    ) -> Result<Issued, Error> {
        let (tag, from) = (tag.into(), from.into());
        let payload = match from {
            Source::Memory(Slice { at, len }) => Payload::Region(at, len),
            Source::Bytes(_) if notice != Notice::Silent => return Err(OpError::Unreported.into()),
            Source::Bytes(bytes) => Payload::Bytes(bytes),
        };
        match issue!(self, engine => engine.send(CONTEXT, to, tag, payload, notice)) {
            Ok(issued) => Ok(issued),
            Err(error) => self.send_slow(to, tag, from, notice, error),
        }
    }

    /// A message to a peer that is not connected yet, or from bytes that are too long to be copied
    /// into it.
    #[cold]
    fn send_slow(
        &mut self,
        to: PeerId,
        tag: Tag,
        from: Source<'_>,
        notice: Notice,
        error: Error,
    ) -> Result<Issued, Error> {
        match (error, from) {
            (Error::Op(OpError::UnknownPeer), _) if self.is_met(to) == Some(false) => {
                self.connected(to)?;
                self.send(to, tag, from, notice)
            }
            (Error::Op(OpError::TooLong { .. }), Source::Bytes(bytes)) => self.send_copy(to, tag, bytes),
            (error, _) => Err(error),
        }
    }

    fn send_copy(&mut self, to: PeerId, tag: Tag, bytes: &[u8]) -> Result<Issued, Error> {
        let copy = self.copy_of(bytes.len())?;
        self.write(copy.at(0), bytes)?;
        let payload = Payload::Region(copy.at(0), bytes.len());
        let notice = Notice::Report(INTERNAL);
        match issue!(self, engine => engine.send(CONTEXT, to, tag, payload, notice)) {
            Ok(Issued::Pending(token)) => {
                self.copies.sends.push((token, copy));
                Ok(Issued::Pending(Token::NONE))
            }
            issued => {
                self.give_back(copy);
                issued
            }
        }
    }

    /// Waits for the oldest message that matches, and copies it into `into`. `source`: from this
    /// peer, or from anybody. Bits that are set in `ignore` are not compared.
    ///
    /// # Errors
    /// [`Error::Wait`]: no message matched before the deadline, and none is consumed.
    /// [`OpError::TooLong`]: the message was longer than `into` and is lost.
    #[doc(alias = "MPI_Recv")]
    pub fn recv(
        &mut self,
        source: Option<PeerId>,
        tag: impl Into<Tag>,
        ignore: Tag,
        into: &mut [u8],
        timeout: Duration,
    ) -> Result<Envelope, Error> {
        let copy = self.copy_of(into.len())?;
        let request = match self.post_recv(source, tag, ignore, copy.slice(..into.len()), INTERNAL) {
            Ok(request) => request,
            Err(error) => {
                self.give_back(copy);
                return Err(error);
            }
        };
        let status = match self.wait_recv(request, timeout) {
            Ok(status) => status,
            Err(error) => {
                if let Ok(Cancelled::Removed) = self.home.engine.cancel(request) {
                    let _ = self.home.engine.test_recv(request);
                    self.give_back(copy);
                } else {
                    self.copies.receives.push((request, copy));
                }
                return Err(error);
            }
        };
        let delivered = (status.delivered as usize).min(into.len());
        let read = self.read(copy.at(0), &mut into[..delivered]);
        match (status.outcome, status.envelope) {
            (Received::Unknown(_), _) => {}
            _ => self.give_back(copy),
        }
        read?;
        match (status.outcome, status.envelope) {
            (Received::Ok, Some(envelope)) => Ok(envelope),
            (Received::Truncated, Some(envelope)) => {
                Err(OpError::TooLong { len: envelope.len as usize, max: into.len() }.into())
            }
            (Received::Failed(fault), _) => Err(Error::Failed(fishplate_core::op::Outcome::Failed(fault))),
            (Received::Unknown(fault), _) => Err(Error::Failed(fishplate_core::op::Outcome::Unknown(fault))),
            _ => Err(OpError::StaleToken.into()),
        }
    }

    /// Posts a receive into memory of the node. `word` comes back in the status. Neither blocks
    /// nor allocates.
    ///
    /// # Errors
    /// [`Error::Op`]: nothing was posted.
    #[doc(alias = "MPI_Irecv")]
    #[inline]
    pub fn post_recv(
        &mut self,
        source: Option<PeerId>,
        tag: impl Into<Tag>,
        ignore: Tag,
        into: Slice,
        word: u64,
    ) -> Result<Request, Error> {
        let tag = tag.into();
        let posted =
            issue!(self, engine => engine.recv(source, tag, ignore, Some((into.at, into.len)), word));
        match posted {
            Err(Error::Op(OpError::UnknownPeer))
                if source.and_then(|peer| self.is_met(peer)) == Some(false) =>
            {
                source.map_or(Ok(()), |peer| self.connected(peer))?;
                issue!(self, engine => engine.recv(source, tag, ignore, Some((into.at, into.len)), word))
            }
            posted => posted,
        }
    }

    /// Waits for a receive, and takes its status.
    ///
    /// # Errors
    /// [`Error::Wait`]: it has not ended before the deadline.
    #[doc(alias = "MPI_Wait")]
    #[inline]
    pub fn wait_recv(&mut self, request: Request, timeout: Duration) -> Result<Status, Error> {
        self.wait_with(timeout, |engine, waiter, until| engine.wait_recv(request, waiter, until))
    }

    /// The status of a receive, if it has ended. Makes no progress.
    ///
    /// # Errors
    /// It was taken before, or never given.
    #[doc(alias = "MPI_Test")]
    pub fn test_recv(&mut self, request: Request) -> Result<Option<Status>, Error> {
        Ok(self.home.engine.test_recv(request)?)
    }

    /// The next receive that has ended and was not taken. Makes no progress.
    pub fn next_recv(&mut self) -> Option<Status> {
        loop {
            let status = self.home.engine.next_recv()?;
            if status.word != INTERNAL {
                return Some(status);
            }
            self.received(status.request);
        }
    }

    /// Ends a receive that nothing has matched.
    ///
    /// # Errors
    /// It has ended and was taken, or was never given.
    #[doc(alias = "MPI_Cancel")]
    pub fn cancel(&mut self, request: Request) -> Result<Cancelled, Error> {
        Ok(self.home.engine.cancel(request)?)
    }

    /// What the oldest message that matches says of itself. Makes one pass if none is here.
    ///
    /// # Errors
    /// The peer is not known, or has failed.
    #[doc(alias = "MPI_Iprobe")]
    pub fn probe(
        &mut self,
        source: Option<PeerId>,
        tag: impl Into<Tag>,
        ignore: Tag,
    ) -> Result<Option<Envelope>, Error> {
        Ok(self.home.engine.probe(source, tag.into(), ignore)?)
    }

    /// [`probe`](Self::probe) that claims the message: no other receive gets it.
    ///
    /// # Errors
    /// As [`probe`](Self::probe).
    #[doc(alias = "MPI_Improbe")]
    pub fn mprobe(
        &mut self,
        source: Option<PeerId>,
        tag: impl Into<Tag>,
        ignore: Tag,
    ) -> Result<Option<Claimed>, Error> {
        Ok(self.home.engine.mprobe(source, tag.into(), ignore)?)
    }

    /// Receives a claimed message, as [`post_recv`](Self::post_recv) does.
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "MPI_Imrecv")]
    pub fn post_mrecv(&mut self, message: Claimed, into: Slice, word: u64) -> Result<Request, Error> {
        Ok(self.home.engine.mrecv(message, Some((into.at, into.len)), word)?)
    }

    /// Longest payload that travels in its message to this peer, in bytes. 0 until it is connected.
    pub fn eager_max(&self, peer: PeerId) -> usize {
        self.home.engine.eager_max(peer)
    }

    /// Memory of at least `len` bytes for a message from or into a slice.
    fn copy_of(&mut self, len: usize) -> Result<Memory, Error> {
        self.reap();
        match self.copies.free.take() {
            Some(memory) if memory.len() >= len => Ok(memory),
            other => {
                other.map_or(Ok(()), |memory| self.free(memory))?;
                self.alloc(len.next_power_of_two().max(4096))
            }
        }
    }

    /// Such memory is not used any more.
    fn give_back(&mut self, memory: Memory) {
        match self.copies.free {
            Some(kept) if kept.len() >= memory.len() => self.drop_copy(memory),
            _ => {
                if let Some(smaller) = self.copies.free.replace(memory) {
                    self.drop_copy(smaller);
                }
            }
        }
    }

    /// Frees memory that nothing uses. Should a provider keep it, it stays with the node.
    fn drop_copy(&mut self, memory: Memory) {
        let _ = self.free(memory);
    }

    /// Takes back the memory of messages that have ended.
    fn reap(&mut self) {
        let sends: Vec<Token> = self.copies.sends.iter().map(|(token, _)| *token).collect();
        for token in sends {
            if let Ok(Some(_)) | Err(OpError::StaleToken) = self.home.engine.test(token) {
                self.sent(token);
            }
        }
        let receives: Vec<Request> = self.copies.receives.iter().map(|(request, _)| *request).collect();
        for request in receives {
            if let Ok(Some(_)) | Err(OpError::StaleToken) = self.home.engine.test_recv(request) {
                self.received(request);
            }
        }
    }

    /// A send from a copy has ended.
    pub(super) fn sent(&mut self, token: Token) {
        if let Some(at) = self.copies.sends.iter().position(|(other, _)| *other == token) {
            let (_, memory) = self.copies.sends.swap_remove(at);
            self.give_back(memory);
        }
    }

    fn received(&mut self, request: Request) {
        if let Some(at) = self.copies.receives.iter().position(|(other, _)| *other == request) {
            let (_, memory) = self.copies.receives.swap_remove(at);
            self.give_back(memory);
        }
    }
}
