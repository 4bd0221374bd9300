//! The matched queue of a node. Its sends, receives and probes follow PSM2's rules, as
//! [`fishplate_core::psm`] defines them.
//!
//! Nothing here blocks. Only [`Node::grow_requests`] and connecting a peer allocate. The queue and
//! the receives of the node share one list of completions. So a program that uses the queue must
//! send and receive all its messages through it.

use fishplate_core::engine::tag::Tag;
use fishplate_core::mem::PeerId;
use fishplate_core::psm::{Buffer, Code, Completed, Mq, MqReq, Opt, Stats, Status2};

use super::Node;
use super::distant::Peers;
use super::rail::NodeRail;
use crate::config::RAILS_LIMIT;

/// The matched queue of a [`Node`]. It borrows the node.
pub struct Queue<'n>(Mq<'n, 'static, NodeRail, RAILS_LIMIT>, &'n mut Peers);

impl Node {
    /// Returns the matched queue, if the node was opened with [requests](super::Builder::requests)
    /// and without a worker. While a peer on this host is not connected, some of these calls make
    /// system calls and allocate to connect it. So do not keep the queue while the program waits
    /// for such a peer.
    #[doc(alias = "psm2_mq_init")]
    #[inline(always)]
    pub fn queue(&mut self) -> Option<Queue<'_>> {
        // The passes of the queue serve the peers on other hosts.
        if self.peers.dials {
            self.meet_now_and_then();
        }
        self.queue_only()
    }

    /// Returns the [queue](Self::queue), or `None` while some peer on this host is not connected.
    /// Makes no system call, for short calls that must not connect peers.
    #[inline(always)]
    pub fn queue_at_once(&mut self) -> Option<Queue<'_>> {
        if self.peers.dials { None } else { self.queue_only() }
    }

    #[inline(always)]
    fn queue_only(&mut self) -> Option<Queue<'_>> {
        let home = &mut *self.home;
        let state = home.queue.as_mut()?;
        // The engine of a node has matching, and the context.
        Some(Queue(Mq::resume(&mut home.engine, state), &mut self.peers))
    }

    /// Doubles the room for requests of the queue, up to the [limit](super::Builder::requests).
    /// Returns whether the room has grown. Call this when the queue returns [`Code::NoMemory`].
    /// Allocates, and copies all requests.
    #[cold]
    pub fn grow_requests(&mut self) -> bool {
        self.home.grow_requests()
    }
}

impl Queue<'_> {
    /// Repeats a call that was refused, after it has attached the peer on another host that the
    /// call names.
    #[cold]
    #[inline(never)]
    fn attached<T>(
        &mut self,
        peer: Option<PeerId>,
        code: Code,
        mut call: impl FnMut(&mut Mq<'_, 'static, NodeRail, RAILS_LIMIT>) -> Result<T, Code>,
    ) -> Result<T, Code> {
        match (code, peer) {
            (Code::ParamErr, Some(peer)) if self.1.attach(self.0.engine_mut(), peer, false) => {
                call(&mut self.0)
            }
            _ => Err(code),
        }
    }

    /// Serves peers on other hosts that have called or have not answered. Every pass calls this,
    /// because a program may keep the queue during a whole wait.
    #[inline(always)]
    fn meet(&mut self) {
        if self.1.meeting | self.0.engine_mut().has_call() {
            self.1.with_pass(self.0.engine_mut());
        }
    }

    /// Begins a send. If there is no room, later passes post it, in order for each peer.
    ///
    /// # Errors
    /// The same as [`Mq::isend2`].
    #[doc(alias = "psm2_mq_isend2")]
    #[inline(always)]
    pub fn isend2(
        &mut self,
        to: PeerId,
        flags: u32,
        tag: impl Into<Tag>,
        from: impl Into<Buffer>,
        context: u64,
    ) -> Result<MqReq, Code> {
        let (tag, from) = (tag.into(), from.into());
        match self.0.isend2(to, flags, tag, from, context) {
            Ok(req) => Ok(req),
            Err(code) => {
                self.attached(Some(to), code, |mq| mq.isend2(to, flags, tag, from, context))
            }
        }
    }

    /// Sends a short message at once, without a request. If this returns `false`, nothing was sent.
    /// [`isend2`](Self::isend2) then starts the send, or returns the reason for an error.
    #[inline(always)]
    pub fn send2_at_once(
        &mut self,
        to: PeerId,
        tag: impl Into<Tag>,
        from: impl Into<Buffer>,
    ) -> bool {
        self.0.send2_at_once(to, tag, from)
    }

    /// Begins a send like [`isend2`](Self::isend2), if the message is short and can be sent at
    /// once. The request has completed. If this returns `None`, nothing was sent.
    #[inline(always)]
    pub fn isend2_at_once(
        &mut self,
        to: PeerId,
        tag: impl Into<Tag>,
        from: impl Into<Buffer>,
        context: u64,
    ) -> Option<MqReq> {
        self.0.isend2_at_once(to, tag, from, context)
    }

    /// Posts a receive from one peer, or from any if `None`.
    ///
    /// # Errors
    /// The same as [`Mq::irecv2`].
    #[doc(alias = "psm2_mq_irecv2")]
    #[inline(always)]
    pub fn irecv2(
        &mut self,
        source: Option<PeerId>,
        tag: impl Into<Tag>,
        tagsel: impl Into<Tag>,
        into: impl Into<Buffer>,
        context: u64,
    ) -> Result<MqReq, Code> {
        let (tag, tagsel, into) = (tag.into(), tagsel.into(), into.into());
        match self.0.irecv2(source, tag, tagsel, into, context) {
            Ok(req) => Ok(req),
            Err(code) => {
                self.attached(source, code, |mq| mq.irecv2(source, tag, tagsel, into, context))
            }
        }
    }

    /// Posts a receive like [`irecv2`](Self::irecv2), but attaches no peer. If this returns `None`,
    /// nothing was done. `irecv2` then posts the receive, or returns the reason for an error.
    #[inline(always)]
    pub fn irecv2_at_once(
        &mut self,
        source: Option<PeerId>,
        tag: impl Into<Tag>,
        tagsel: impl Into<Tag>,
        into: impl Into<Buffer>,
        context: u64,
    ) -> Option<MqReq> {
        self.0.irecv2(source, tag, tagsel, into, context).ok()
    }

    /// Receives a message that [`improbe2`](Self::improbe2) has claimed.
    ///
    /// # Errors
    /// The same as [`Mq::imrecv`].
    #[doc(alias = "psm2_mq_imrecv")]
    pub fn imrecv(
        &mut self,
        into: impl Into<Buffer>,
        context: u64,
        req: MqReq,
    ) -> Result<(), Code> {
        self.0.imrecv(into, context, req)
    }

    /// Finds a message that no receive has taken. Leaves the message in place.
    ///
    /// # Errors
    /// The same as [`Mq::iprobe2`].
    #[doc(alias = "psm2_mq_iprobe2")]
    pub fn iprobe2(
        &mut self,
        source: Option<PeerId>,
        tag: [u32; 3],
        tagsel: [u32; 3],
    ) -> Result<Status2, Code> {
        self.meet();
        match self.0.iprobe2(source, tag, tagsel) {
            Err(code @ Code::ParamErr) => {
                self.attached(source, code, |mq| mq.iprobe2(source, tag, tagsel))
            }
            found => found,
        }
    }

    /// Finds a message that no receive has taken, and claims the message.
    ///
    /// # Errors
    /// The same as [`Mq::improbe2`].
    #[doc(alias = "psm2_mq_improbe2")]
    pub fn improbe2(
        &mut self,
        source: Option<PeerId>,
        tag: [u32; 3],
        tagsel: [u32; 3],
    ) -> Result<(MqReq, Status2), Code> {
        self.meet();
        match self.0.improbe2(source, tag, tagsel) {
            Err(code @ Code::ParamErr) => {
                self.attached(source, code, |mq| mq.improbe2(source, tag, tagsel))
            }
            found => found,
        }
    }

    /// Returns the oldest completed request, as [`Mq::oldest`] does. Makes no pass.
    #[inline(always)]
    pub fn oldest(&self) -> Option<Completed<'_>> {
        self.0.oldest()
    }

    /// Returns the oldest completed request. Makes a pass if there is none.
    ///
    /// # Errors
    /// The same as [`Mq::ipeek2`].
    #[doc(alias = "psm2_mq_ipeek2")]
    #[inline(always)]
    pub fn ipeek2(&mut self) -> Result<(MqReq, Status2), Code> {
        // Serves peers even if no pass follows: a busy program may find a request in every call.
        self.meet();
        self.0.ipeek2()
    }

    /// Returns the oldest completed request, and makes a pass if there is none. Also returns
    /// whether it made a pass that was not full, as [`Mq::look`] does.
    #[inline(always)]
    pub fn look(&mut self) -> (Option<Completed<'_>>, bool) {
        self.meet();
        self.0.look()
    }

    /// Takes a request if it has completed. Makes no progress.
    ///
    /// # Errors
    /// The same as [`Mq::test2`].
    #[doc(alias = "psm2_mq_test2")]
    #[inline(always)]
    pub fn test2(&mut self, req: &mut Option<MqReq>) -> Result<Status2, Code> {
        self.0.test2(req)
    }

    /// Takes a request if it has completed, after it has passed the request to `take`. Makes no
    /// progress. If this returns `None`, nothing was done: then [`test2`](Self::test2) returns the
    /// reason.
    #[inline(always)]
    pub fn test2_with<T>(
        &mut self,
        req: MqReq,
        take: impl FnOnce(Completed<'_>) -> T,
    ) -> Option<T> {
        self.0.test2_with(req, take)
    }

    /// Cancels a receive that no message has matched.
    ///
    /// # Errors
    /// The same as [`Mq::cancel`].
    #[doc(alias = "psm2_mq_cancel")]
    pub fn cancel(&mut self, req: &Option<MqReq>) -> Result<(), Code> {
        self.0.cancel(req)
    }

    /// Ends the use of the queue, as [`Mq::finish`] does.
    ///
    /// Returns `true` if no remaining operation accesses the program's memory.
    #[doc(alias = "psm2_mq_finalize")]
    pub fn finish(&mut self) -> bool {
        self.0.finish()
    }

    /// Makes one pass. Returns the number of events that the rails reported.
    #[doc(alias = "psm2_poll")]
    #[inline]
    pub fn poll(&mut self) -> u32 {
        self.meet();
        self.0.poll()
    }

    /// Returns a peer that cannot send because its unreceived messages fill this node's buffers.
    /// Also returns whether the open requests can be waiting for that peer. See
    /// [`Mq::crowding_peer`].
    pub fn crowding_peer(&self) -> Option<(PeerId, bool)> {
        self.0.crowding_peer()
    }

    /// Returns the counters.
    #[doc(alias = "psm2_mq_get_stats")]
    pub fn stats(&self) -> Stats {
        self.0.stats()
    }

    /// Returns an option.
    #[doc(alias = "psm2_mq_getopt")]
    pub fn getopt(&self, option: Opt) -> u32 {
        self.0.getopt(option)
    }

    /// Changes an option.
    #[doc(alias = "psm2_mq_setopt")]
    pub fn setopt(&mut self, option: Opt, value: u32) {
        self.0.setopt(option, value);
    }
}
