//! Probes for unexpected messages, and claims them.

use crate::engine::protocol::{Envelope, Sender, Stage};
use crate::engine::tag::Tag;
use crate::mem::PeerId;
use crate::rail::Rail;

use super::request::MqReq;
use super::status::{self, Code, Status, Status2};
use super::{Mq, narrow};

impl<R: Rail, const RAILS: usize> Mq<'_, '_, R, RAILS> {
    /// Finds an unexpected message with a 64-bit tag, and leaves it in the queue. Polls once if no
    /// message matches.
    ///
    /// # Errors
    /// [`Code::NoCompletions`] if no message matches.
    #[doc(alias = "psm2_mq_iprobe")]
    pub fn iprobe(&mut self, tag: u64, tagsel: u64) -> Result<Status, Code> {
        self.probe(None, Tag::from(tag), narrow(tagsel)).map(Status::from)
    }

    /// Like [`iprobe`](Self::iprobe), with a 96-bit tag and a source.
    ///
    /// # Errors
    /// [`Code::NoCompletions`] if no message matches, or [`Code::InternalErr`] if the peer has
    /// failed too. [`Code::ParamErr`] for an unknown peer.
    #[doc(alias = "psm2_mq_iprobe2")]
    pub fn iprobe2(
        &mut self,
        source: Option<PeerId>,
        tag: [u32; 3],
        tagsel: [u32; 3],
    ) -> Result<Status2, Code> {
        self.probe(source, Tag::from_words(tag), !Tag::from_words(tagsel))
    }

    /// Like [`iprobe`](Self::iprobe), but claims the message for [`imrecv`](Self::imrecv).
    ///
    /// # Errors
    /// The errors of [`iprobe`](Self::iprobe), and [`Code::NoMemory`] if every request is in use.
    /// Nothing is claimed then.
    #[doc(alias = "psm2_mq_improbe")]
    pub fn improbe(&mut self, tag: u64, tagsel: u64) -> Result<(MqReq, Status), Code> {
        self.claim(None, Tag::from(tag), narrow(tagsel)).map(|(req, status)| (req, status.into()))
    }

    /// Like [`iprobe2`](Self::iprobe2), but claims the message for [`imrecv`](Self::imrecv).
    ///
    /// # Errors
    /// The errors of [`iprobe2`](Self::iprobe2), and [`Code::NoMemory`] if every request is in use.
    /// Nothing is claimed then.
    #[doc(alias = "psm2_mq_improbe2")]
    pub fn improbe2(
        &mut self,
        source: Option<PeerId>,
        tag: [u32; 3],
        tagsel: [u32; 3],
    ) -> Result<(MqReq, Status2), Code> {
        self.claim(source, Tag::from_words(tag), !Tag::from_words(tagsel))
    }

    fn probe(&mut self, source: Option<PeerId>, tag: Tag, ignore: Tag) -> Result<Status2, Code> {
        match self.engine.probe(source, tag, ignore) {
            Ok(Some(envelope)) => Ok(found(envelope)),
            Ok(None) => {
                self.after_pass();
                Err(Code::NoCompletions)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn claim(
        &mut self,
        source: Option<PeerId>,
        tag: Tag,
        ignore: Tag,
    ) -> Result<(MqReq, Status2), Code> {
        let requests = self.engine.requests_mut().ok_or(Code::ParamErr)?;
        let index = requests.slots.take().ok_or(Code::NoMemory)?;
        let claimed = self.engine.mprobe(source, tag, ignore);
        let requests = self.engine.requests_mut().ok_or(Code::ParamErr)?;
        match claimed {
            Ok(Some(message)) => {
                let slot = &mut requests.slots[index as usize];
                let Envelope { source, tag, len } = message.envelope;
                (slot.source, slot.tag, slot.len) = (Sender::new(source), tag, len);
                (slot.stage, slot.sends, slot.unclaimed) = (Stage::Claimed, false, false);
                slot.claimed = message.id;
                Ok((MqReq(slot.request()), found(message.envelope)))
            }
            Ok(None) => {
                requests.free(index);
                self.after_pass();
                Err(Code::NoCompletions)
            }
            Err(error) => {
                requests.free(index);
                Err(error.into())
            }
        }
    }
}

fn found(envelope: Envelope) -> Status2 {
    let len = status::length(envelope.len);
    Status2 {
        msg_peer: Some(envelope.source),
        msg_tag: envelope.tag.words(),
        msg_length: len,
        nbytes: len,
        ..Status2::EMPTY
    }
}
