//! Further calls that libfabric providers make: options, several completions at once, and messages
//! from inside a handler. Nothing here blocks or allocates.

use crate::mem::PeerId;
use crate::rail::Rail;

use super::request::MqReq;
use super::status::{Code, Status2};
use super::{Buffer, Mq};

/// An option of [`Mq::getopt`] and [`Mq::setopt`], with its number in `psm2_mq.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Opt {
    /// Maximum length of a message to another machine that is sent with its payload, in bytes.
    #[doc(alias = "PSM2_MQ_RNDV_HFI_SZ")]
    RndvHfiSz = 0x301,
    /// Maximum length of a message within one machine that is sent with its payload, in bytes. An
    /// engine has only one maximum, so each of the two options sets both.
    #[doc(alias = "PSM2_MQ_RNDV_SHM_SZ")]
    RndvShmSz = 0x302,
    /// Memory for unexpected messages, in MiB. The value is stored and returned as in PSM2, but has
    /// no effect: the engine's memory is fixed.
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

/// What the callback did with a completion: PSM2's results 0, 1, above 1, and below 0.
#[doc(alias = "psm2_mq_status_copy_t")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied {
    /// The completion needs no entry.
    Skipped,
    /// The completion has an entry.
    Stored,
    /// The completion has an entry, and the caller wants no more entries now.
    StoredLast,
    /// The completion could not be stored. It stays queued, and so do all later completions.
    Refused,
}

/// The direction and arguments of a message that a handler posts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fast {
    /// A send: its target, and the flags of [`Mq::isend2`].
    Send(PeerId, u32),
    /// A receive: its source, or `None` for any peer, and the tag bits to compare.
    Receive(Option<PeerId>, [u32; 3]),
}

impl<R: Rail, const RAILS: usize> Mq<'_, '_, R, RAILS> {
    /// Returns the value of an option.
    #[doc(alias = "psm2_mq_getopt")]
    pub fn getopt(&self, option: Opt) -> u32 {
        match option {
            Opt::RndvHfiSz | Opt::RndvShmSz => self.engine.eager_setting(),
            Opt::MaxSysbufMbytes => self.state.max_sysbuf_mbytes,
        }
    }

    /// Changes an option. A size above the engine's configured maximum is lowered to it, and
    /// `getopt` returns the lowered size.
    #[doc(alias = "psm2_mq_setopt")]
    pub fn setopt(&mut self, option: Opt, value: u32) {
        match option {
            Opt::RndvHfiSz | Opt::RndvShmSz => self.engine.set_eager_max(value),
            Opt::MaxSysbufMbytes => self.state.max_sysbuf_mbytes = value,
        }
    }

    /// Passes completed requests to `copy`, oldest first, each with the index of its entry. Stops
    /// when the entries are full or no request is left. Frees the accepted requests. Polls only if
    /// no request has completed. Returns the number of entries.
    #[doc(alias = "psm2_mq_ipeek_dequeue_multi")]
    pub fn ipeek_dequeue_multi(
        &mut self,
        entries: usize,
        mut copy: impl FnMut(MqReq, &Status2, usize) -> Copied,
    ) -> usize {
        let mut stored = 0;
        _ = self.look();
        let Some(requests) = self.engine.requests_mut() else { return 0 };
        while stored < entries
            && let Some(oldest) = requests.completed()
        {
            let copied = copy(oldest.req(), &oldest.status(), stored);
            if copied == Copied::Refused {
                break;
            }
            requests.end_oldest();
            stored += matches!(copied, Copied::Stored | Copied::StoredLast) as usize;
            if copied == Copied::StoredLast {
                break;
            }
        }
        stored
    }

    /// Posts a send or a receive without making progress, for callers inside a pass.
    ///
    /// # Errors
    /// The errors of [`isend2`](Self::isend2) and [`irecv2`](Self::irecv2).
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
