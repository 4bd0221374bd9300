//! What two rails agree on before they are attached.

use std::ops::ControlFlow;
use std::time::Instant;

use fishplate_shm::{HandshakeError, Link, Profile, Segment};

use crate::pair::{Agreed, Agreement, Layout};

/// A link whose ends have agreed on what they use for device memory.
#[derive(Debug)]
pub struct GpuLink {
    pub(super) link: Link,
    pub(super) agreed: Agreed,
    /// Whether the peer has a device too.
    pub(super) device: bool,
}

/// An agreement under way. Dropping it hangs up.
#[derive(Debug)]
pub struct GpuAgreement {
    link: Link,
    agreement: Agreement,
}

/// What a rail brings to such an agreement. Clones may go to other threads.
#[derive(Clone, Debug)]
pub struct GpuProfile {
    pub(super) profile: Profile,
    pub(super) layout: Layout,
    pub(super) want: (bool, bool),
}

impl GpuProfile {
    /// What the handshake itself needs.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Agrees with the other end of a link, which does the same.
    /// Waits until the deadline. Slow path.
    pub fn agree(&self, link: Link, deadline: Instant) -> Result<GpuLink, HandshakeError> {
        let GpuAgreement { mut link, agreement } = self.begin(link)?;
        let agreed = agreement.finish(&mut link, deadline)?;
        Ok(GpuLink { link, agreed, device: true })
    }

    /// Begins to [`agree`](Self::agree), and does not wait. Slow path.
    ///
    /// # Errors
    /// The offer cannot be sent.
    pub fn begin(&self, mut link: Link) -> Result<GpuAgreement, HandshakeError> {
        let agreement = Agreement::begin(&mut link, self.layout, self.want, Segment::create)?;
        Ok(GpuAgreement { link, agreement })
    }
}

impl GpuAgreement {
    /// Goes on as far as the other end has. Does not wait. Slow path.
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
    /// A link to a peer whose rail is a [`ShmRail`](fishplate_shm::ShmRail): host memory alone.
    pub fn plain(link: Link) -> GpuLink {
        GpuLink { link, agreed: Agreed::NOTHING, device: false }
    }

    /// Whether done words report writes, and whether there are bounce slots: the same at both ends.
    pub fn active(&self) -> (bool, bool) {
        (self.agreed.done, self.agreed.relay)
    }

    /// The link.
    pub fn link(&self) -> &Link {
        &self.link
    }
}
