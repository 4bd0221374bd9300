//! Posts receives, receives claimed messages, and cancels receives.

use crate::engine::protocol::Cancelled;
use crate::engine::tag::Tag;
use crate::error::OpError;
use crate::mem::PeerId;
use crate::rail::Rail;

use super::request::{MqReq, State};
use super::status::{Code, Status2};
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
    /// [`Code::ParamErr`] for an invalid buffer, or if the handle names no claimed message.
    /// [`Code::NoMemory`] as for [`irecv`](Self::irecv). The message stays claimed.
    #[doc(alias = "psm2_mq_imrecv")]
    pub fn imrecv(
        &mut self,
        into: impl Into<Buffer>,
        context: u64,
        req: MqReq,
    ) -> Result<(), Code> {
        let index = self.state.requests.find(req).ok_or(Code::ParamErr)?;
        let State::Claimed(message) = self.state.requests.slots[index as usize].state else {
            return Err(Code::ParamErr);
        };
        let into = into.into();
        into.len()?;
        match self.engine.mrecv(message, into, self.state.requests.word(index)) {
            Ok(request) => {
                let slot = &mut self.state.requests.slots[index as usize];
                (slot.state, slot.context) = (State::Receiving(request), context);
                slot.status.msg_peer = Some(message.envelope.source);
                Ok(())
            }
            Err(OpError::StaleToken) => {
                // Collect earlier completions first, to preserve completion order.
                self.collect();
                let slot = &mut self.state.requests.slots[index as usize];
                slot.context = context;
                slot.status = Status2 { error_code: Code::InternalErr, context, ..Status2::EMPTY };
                self.state.requests.complete(index);
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
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
        let index = self.state.requests.find(req).ok_or(Code::ParamErr)?;
        let slot = &self.state.requests.slots[index as usize];
        match slot.state {
            State::Receiving(request) => match self.engine.cancel(request) {
                Ok(Cancelled::Removed) => {
                    self.collect();
                    Ok(())
                }
                _ => Err(Code::NoCompletions),
            },
            State::Completed | State::Dequeued if slot.receive => Err(Code::NoCompletions),
            _ => Err(Code::ParamErr),
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
        let (index, name) =
            self.state.requests.take(context, true, source).ok_or(Code::NoMemory)?;
        match self.engine.recv_inline(source, tag, ignore, into.into(), name.to_raw()) {
            Ok(request) => {
                self.state.requests.slots[index as usize].state = State::Receiving(request);
                Ok(name)
            }
            Err(error) => {
                self.state.requests.free(index);
                Err(error.into())
            }
        }
    }
}
