//! Posts receives, receives claimed messages, and cancels receives.

use crate::engine::protocol::{Cancelled, Claimed, Destination, Envelope, Received, Sender, Stage};
use crate::engine::tag::Tag;
use crate::error::{OpError, PeerError};
use crate::mem::PeerId;
use crate::op::Fault;
use crate::rail::Rail;

use super::request::MqReq;
use super::status::Code;
use super::{Buffer, Mq, narrow};

impl<R: Rail, const RAILS: usize> Mq<'_, '_, R, RAILS> {
    /// Posts a receive for a 64-bit tag, from any peer.
    ///
    /// # Errors
    /// [`Code::NoMemory`] if every request is in use. [`Code::InternalErr`] if the peer has failed
    /// and left no message that matches. [`Code::ParamErr`] for an unknown peer or an invalid
    /// buffer.
    #[doc(alias = "psm2_mq_irecv")]
    #[doc(alias = "psm_mq_irecv")]
    pub fn irecv(
        &mut self,
        tag: u64,
        tagsel: u64,
        into: impl Into<Buffer>,
        context: u64,
    ) -> Result<MqReq, Code> {
        self.post(None, Tag::from(tag), narrow(tagsel), into.into(), context)
    }

    /// Posts a receive for a 96-bit tag, from one peer, or from any peer if `source` is `None`.
    ///
    /// # Errors
    /// The errors of [`irecv`](Self::irecv).
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
        self.post(source, tag.into(), !tagsel.into(), into.into(), context)
    }

    /// Receives a message that [`improbe`](Self::improbe) has claimed. The handle of the claim
    /// becomes the handle of the receive. If the message was lost with its sender, the receive
    /// completes with [`Code::InternalErr`].
    ///
    /// # Errors
    /// [`Code::ParamErr`] for an invalid buffer, or if the handle names no claimed message. The
    /// message stays claimed.
    #[doc(alias = "psm2_mq_imrecv")]
    pub fn imrecv(
        &mut self,
        into: impl Into<Buffer>,
        context: u64,
        req: MqReq,
    ) -> Result<(), Code> {
        let requests = self.requests().ok_or(Code::ParamErr)?;
        let index = requests.find(req.0).map_err(|_| Code::ParamErr)?;
        let message = self.claimed(index).ok_or(Code::ParamErr)?;
        let into = into.into();
        into.len()?;
        match self.engine.mrecv_in(index, message, into.into(), context) {
            Ok(_) => Ok(()),
            Err(OpError::StaleToken) => {
                if let Some(requests) = self.engine.requests_mut() {
                    let slot = &mut requests.slots[index as usize];
                    (slot.word, slot.source) = (context, Sender::NONE);
                    slot.spoil(Received::Failed(Fault::Peer(PeerError::Removed)));
                    self.engine.end_request(index);
                }
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Discards a claimed message. Its request is freed at once, or as soon as the sender has been
    /// answered.
    pub(super) fn discard(&mut self, index: u32) {
        let Some(message) = self.claimed(index) else { return };
        match self.engine.mrecv_in(index, message, Destination::Nothing, 0) {
            Ok(request) => self.engine.forget(request),
            // The message was lost with its sender.
            Err(_) => {
                if let Some(requests) = self.engine.requests_mut() {
                    requests.free(index);
                }
            }
        }
    }

    fn claimed(&self, index: u32) -> Option<Claimed> {
        let slot = self.requests()?.slots.get(index as usize)?;
        let source = slot.source.get().filter(|_| slot.stage == Stage::Claimed)?;
        let envelope = Envelope { source, tag: slot.tag, len: slot.len };
        Some(Claimed { envelope, id: slot.claimed })
    }

    /// Cancels an unmatched receive. The receive completes, and `wait` or `test` still takes its
    /// status.
    ///
    /// # Errors
    /// [`Code::NoCompletions`] if the receive has matched, or `req` is `None`. Nothing changed
    /// then. [`Code::ParamErr`] for a send, a claimed message, or a finished request.
    #[doc(alias = "psm2_mq_cancel")]
    pub fn cancel(&mut self, req: &Option<MqReq>) -> Result<(), Code> {
        let Some(req) = *req else { return Err(Code::NoCompletions) };
        let requests = self.requests().ok_or(Code::ParamErr)?;
        let index = requests.find(req.0).map_err(|_| Code::ParamErr)?;
        let slot = &requests.slots[index as usize];
        if slot.sends || slot.stage == Stage::Claimed {
            return Err(Code::ParamErr);
        }
        match self.engine.cancel(req.0) {
            Ok(Cancelled::Removed) => Ok(()),
            _ => Err(Code::NoCompletions),
        }
    }

    #[inline(always)]
    fn post(
        &mut self,
        source: Option<PeerId>,
        tag: Tag,
        ignore: Tag,
        into: Buffer,
        context: u64,
    ) -> Result<MqReq, Code> {
        into.len()?;
        let request = self.engine.recv_inline(source, tag, ignore, into.into(), context)?;
        Ok(MqReq(request))
    }
}
