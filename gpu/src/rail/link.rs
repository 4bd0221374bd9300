//! The agreement on device memory that two rails make before they are attached.

use std::ops::ControlFlow;
use std::time::Instant;

use fishplate_shm::{HandshakeError, Link, Profile, Segment};

use crate::pair::{Agreed, Agreement, Layout};

/// A link with two ends that have agreed on how to transfer device memory.
#[derive(Debug)]
pub struct GpuLink {
    pub(super) link: Link,
    pub(super) agreed: Agreed,
    pub(super) device: bool,
}

/// An agreement in progress. Dropping it closes the link.
#[derive(Debug)]
pub struct GpuAgreement {
    link: Link,
    agreement: Agreement,
}

/// A rail's settings for the handshake and the agreement. Clones may move to other threads.
#[derive(Clone, Debug)]
pub struct GpuProfile {
    pub(super) profile: Profile,
    pub(super) layout: Layout,
    pub(super) want: (bool, bool),
}

impl GpuProfile {
    /// Returns the settings for the handshake.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Agrees with the other end of a link on done words and bounce slots. The other end must call
    /// this too. Waits at most until the deadline. Slow path.
    ///
    /// # Errors
    /// The deadline expired, or the other end hung up or broke the protocol.
    pub fn agree(&self, link: Link, deadline: Instant) -> Result<GpuLink, HandshakeError> {
        let GpuAgreement { mut link, agreement } = self.begin(link)?;
        let agreed = agreement.finish(&mut link, deadline)?;
        Ok(GpuLink { link, agreed, device: true })
    }

    /// Starts an agreement like [`agree`](Self::agree), without waiting. Slow path.
    ///
    /// # Errors
    /// The offer cannot be sent.
    pub fn begin(&self, mut link: Link) -> Result<GpuAgreement, HandshakeError> {
        let agreement = Agreement::begin(&mut link, self.layout, self.want, Segment::create)?;
        Ok(GpuAgreement { link, agreement })
    }
}

impl GpuAgreement {
    /// Continues the agreement as far as possible without waiting. Slow path.
    ///
    /// # Errors
    /// The other end hung up, or broke the protocol.
    pub fn step(mut self) -> Result<ControlFlow<GpuLink, GpuAgreement>, HandshakeError> {
        Ok(match self.agreement.step(&mut self.link)? {
            Some(agreed) => ControlFlow::Break(GpuLink { link: self.link, agreed, device: true }),
            None => ControlFlow::Continue(self),
        })
    }
}

impl GpuLink {
    /// Wraps a link to a peer that uses a [`ShmRail`](fishplate_shm::ShmRail). The link carries
    /// only host memory.
    pub fn plain(link: Link) -> GpuLink {
        GpuLink { link, agreed: Agreed::NOTHING, device: false }
    }

    /// Returns whether done words report writes, and whether bounce slots exist. Both ends return
    /// the same values.
    pub fn active(&self) -> (bool, bool) {
        (self.agreed.done, self.agreed.relay)
    }

    /// Returns the link.
    pub fn link(&self) -> &Link {
        &self.link
    }
}
