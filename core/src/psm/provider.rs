//! Further calls of libfabric providers: options, several completions at once, and messages from
//! inside a handler. Nothing here blocks or allocates.

use crate::mem::PeerId;
use crate::rail::Rail;

use super::request::MqReq;
use super::status::{Code, Status2};
use super::{Buffer, Mq};

/// What [`Mq::getopt`] and [`Mq::setopt`] are about, under the numbers of `psm2_mq.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Opt {
    /// The longest message that is sent with its payload, in bytes, to other machines.
    #[doc(alias = "PSM2_MQ_RNDV_HFI_SZ")]
    RndvHfiSz = 0x301,
    /// The same within one machine. An engine has one such size, so either option sets it for both.
    #[doc(alias = "PSM2_MQ_RNDV_SHM_SZ")]
    RndvShmSz = 0x302,
    /// Memory for unexpected messages, in MiB. Stored and returned as in PSM2, but without effect:
    /// the engine's memory is fixed.
    #[doc(alias = "PSM2_MQ_MAX_SYSBUF_MBYTES")]
    MaxSysbufMbytes = 0x303,
}

impl Opt {
    /// Returns the option with this number.
    ///
    /// # Errors
    /// [`Code::ParamErr`] if there is none.
    pub fn from_key(key: u32) -> Result<Self, Code> {
        [Opt::RndvHfiSz, Opt::RndvShmSz, Opt::MaxSysbufMbytes]
            .into_iter()
            .find(|option| *option as u32 == key)
            .ok_or(Code::ParamErr)
    }
}

/// The callback's result for a completion: PSM2's 0, 1, above 1, and below 0.
#[doc(alias = "psm2_mq_status_copy_t")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied {
    /// It needs no entry.
    Skipped,
    /// It has an entry.
    Stored,
    /// The queue has an entry, and one is enough.
    StoredLast,
    /// It could not be stored: it stays queued, and so do all later ones.
    Refused,
}

/// The direction and arguments of a message from inside a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fast {
    /// It is sent: to whom, and the flags of [`Mq::isend2`].
    Send(PeerId, u32),
    /// It is received: from one peer or any, and the bits that are compared.
    Receive(Option<PeerId>, [u32; 3]),
}

impl<R: Rail, const RAILS: usize> Mq<'_, '_, R, RAILS> {
    /// The value of an option.
    #[doc(alias = "psm2_mq_getopt")]
    pub fn getopt(&self, option: Opt) -> u32 {
        match option {
            Opt::RndvHfiSz | Opt::RndvShmSz => self.engine.eager_setting(),
            Opt::MaxSysbufMbytes => self.state.max_sysbuf_mbytes,
        }
    }

    /// Changes an option. A size above the engine's setting is lowered
    /// to that; `getopt` returns it.
    #[doc(alias = "psm2_mq_setopt")]
    pub fn setopt(&mut self, option: Opt, value: u32) {
        match option {
            Opt::RndvHfiSz | Opt::RndvShmSz => self.engine.set_eager_max(value),
            Opt::MaxSysbufMbytes => self.state.max_sysbuf_mbytes = value,
        }
    }

    /// Passes completed requests to `copy`, oldest first, each with the index of its entry, until
    /// the entries are full or no request is left. Accepted requests end. Polls only if nothing has
    /// completed. Returns the number of entries.
    #[doc(alias = "psm2_mq_ipeek_dequeue_multi")]
    pub fn ipeek_dequeue_multi(
        &mut self,
        entries: usize,
        mut copy: impl FnMut(MqReq, &Status2, usize) -> Copied,
    ) -> usize {
        let mut stored = 0;
        self.collect();
        if self.state.requests.oldest().is_none() {
            self.poll();
        }
        while stored < entries
            && let Some(index) = self.state.requests.oldest()
        {
            let copied = copy(
                self.state.requests.name(index),
                &self.state.requests.slots[index as usize].status,
                stored,
            );
            if copied == Copied::Refused {
                break;
            }
            self.state.requests.dequeue(index);
            self.state.requests.free(index);
            stored += matches!(copied, Copied::Stored | Copied::StoredLast) as usize;
            if copied == Copied::StoredLast {
                break;
            }
        }
        stored
    }

    /// Begins a send or posts a receive without making progress, for callers inside a pass.
    ///
    /// # Errors
    /// As [`isend2`](Self::isend2) and [`irecv2`](Self::irecv2).
    #[doc(alias = "psm2_mq_fp_msg")]
    pub fn fp_msg(
        &mut self,
        message: Fast,
        tag: [u32; 3],
        buffer: impl Into<Buffer>,
        context: u64,
    ) -> Result<MqReq, Code> {
        match message {
            Fast::Send(to, flags) => self.isend2(to, flags, tag, buffer, context),
            Fast::Receive(source, tagsel) => self.irecv2(source, tag, tagsel, buffer, context),
        }
    }
}
