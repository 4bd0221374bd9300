//! Reports, waits for and takes completed requests.

use crate::engine::Waiter;
use crate::engine::protocol::Stage;
use crate::engine::wait::{Drive, block};
use crate::rail::Rail;
use crate::sync::event::Park;
use crate::sync::host::Host;

use super::Mq;
use super::request::{Completed, MqReq};
use super::status::{Code, Status, Status2};

impl<R: Rail, const RAILS: usize> Drive for Mq<'_, '_, R, RAILS> {
    #[inline]
    fn pass(&mut self) -> u32 {
        let events = self.engine.progress();
        self.after_pass();
        events
    }

    fn check(&mut self) {
        self.engine.check_peers();
    }

    fn is_due(&self) -> bool {
        // The engine does not notify when a deferred send has room, so keep polling.
        self.waits() || self.engine.is_due()
    }
}

impl<R: Rail, const RAILS: usize> Mq<'_, '_, R, RAILS> {
    /// Returns the oldest completed request and leaves it in the queue. `test` or `wait` takes it.
    /// Polls only if no request has completed.
    ///
    /// # Errors
    /// [`Code::NoCompletions`] if no request has completed.
    #[doc(alias = "psm2_mq_ipeek")]
    pub fn ipeek(&mut self) -> Result<(MqReq, Status), Code> {
        self.ipeek2().map(|(req, status)| (req, status.into()))
    }

    /// Like [`ipeek`](Self::ipeek), with a status of version 2.
    ///
    /// # Errors
    /// The errors of [`ipeek`](Self::ipeek).
    #[doc(alias = "psm2_mq_ipeek2")]
    #[inline(always)]
    pub fn ipeek2(&mut self) -> Result<(MqReq, Status2), Code> {
        let (oldest, _) = self.look();
        let oldest = oldest.ok_or(Code::NoCompletions)?;
        Ok((oldest.req(), oldest.status()))
    }

    /// Returns the oldest completed request. Does not poll. If there is none,
    /// [`ipeek2`](Self::ipeek2) may find one.
    #[inline(always)]
    pub fn oldest(&self) -> Option<Completed<'_>> {
        self.requests()?.completed()
    }

    /// Returns the oldest completed request. Polls only if no request has completed. Also returns
    /// whether this call has polled, and the rails reported fewer events than
    /// [`Config::batch`](crate::engine::Config::batch). Another pass would then seldom find more.
    #[inline(always)]
    pub fn look(&mut self) -> (Option<Completed<'_>>, bool) {
        let mut drained = false;
        if self.oldest().is_none() {
            drained = self.poll() < self.engine.config().batch;
        }
        (self.oldest(), drained)
    }

    /// Removes the oldest completed request from the completion queue. Free it with
    /// [`req_free`](Self::req_free).
    ///
    /// # Errors
    /// The errors of [`ipeek`](Self::ipeek).
    #[doc(alias = "psm2_mq_ipeek_dequeue")]
    pub fn ipeek_dequeue(&mut self) -> Result<(MqReq, Status2), Code> {
        let (req, status) = self.ipeek2()?;
        if let Some(requests) = self.engine.requests_mut()
            && let Some(index) = requests.oldest()
        {
            requests.dequeue(index);
        }
        Ok((req, status))
    }

    /// Frees a request that was [dequeued](Self::ipeek_dequeue).
    ///
    /// # Errors
    /// [`Code::ParamErr`] if the request was not dequeued.
    #[doc(alias = "psm2_mq_req_free")]
    pub fn req_free(&mut self, req: MqReq) -> Result<(), Code> {
        let requests = self.engine.requests_mut().ok_or(Code::ParamErr)?;
        match requests.find(req.0) {
            Ok(index) if requests.slots[index as usize].stage == Stage::Dequeued => {
                requests.free(index);
                Ok(())
            }
            _ => Err(Code::ParamErr),
        }
    }

    /// Takes a completed request, and clears its handle. Makes no progress.
    ///
    /// # Errors
    /// [`Code::NoCompletions`] if the request has not completed. [`Code::ParamErr`] if it was
    /// already taken or dequeued, or is a claimed message.
    #[doc(alias = "psm2_mq_test")]
    pub fn test(&mut self, req: &mut Option<MqReq>) -> Result<Status, Code> {
        self.test2(req).map(Status::from)
    }

    /// Like [`test`](Self::test), with a status of version 2.
    ///
    /// # Errors
    /// The errors of [`test`](Self::test).
    #[doc(alias = "psm2_mq_test2")]
    #[inline(always)]
    pub fn test2(&mut self, req: &mut Option<MqReq>) -> Result<Status2, Code> {
        let Some(name) = *req else { return Ok(Status2::EMPTY) };
        match self.test2_with(name, |ended| ended.status()) {
            Some(status) => {
                *req = None;
                Ok(status)
            }
            None => Err(self.requests().ok_or(Code::ParamErr)?.why_not(name)),
        }
    }

    /// Like [`test2`](Self::test2), but passes the request to `take`, and then frees it. If this
    /// returns `None`, nothing was done: then `test2` returns the reason.
    #[inline(always)]
    pub fn test2_with<T>(
        &mut self,
        req: MqReq,
        take: impl FnOnce(Completed<'_>) -> T,
    ) -> Option<T> {
        self.engine.requests_mut()?.end_with(req, take)
    }

    /// Waits for a request and takes it. Returns at once if `req` is `None`.
    ///
    /// # Errors
    /// [`Code::NoCompletions`] if the deadline expires; the request stays open. [`Code::ParamErr`]
    /// as for [`test`](Self::test).
    #[doc(alias = "psm2_mq_wait")]
    pub fn wait<H: Host, P: Park>(
        &mut self,
        req: &mut Option<MqReq>,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<Status, Code> {
        self.wait2(req, waiter, deadline_ns).map(Status::from)
    }

    /// Like [`wait`](Self::wait), with a status of version 2.
    ///
    /// # Errors
    /// The errors of [`wait`](Self::wait).
    #[doc(alias = "psm2_mq_wait2")]
    pub fn wait2<H: Host, P: Park>(
        &mut self,
        req: &mut Option<MqReq>,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<Status2, Code> {
        let mut ready = |mq: &mut Self| match mq.test2(req) {
            Err(Code::NoCompletions) => None,
            ended => Some(ended),
        };
        match ready(self) {
            Some(ended) => ended,
            None => block(self, waiter, deadline_ns, ready).unwrap_or(Err(Code::NoCompletions)),
        }
    }
}
