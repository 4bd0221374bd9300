//! What two rails agree on before they are attached. Waits for the other end, until a deadline.

use std::time::Instant;

use fishplate_shm::{HandshakeError, Link, Profile};

use crate::pair::{self, Agreed, Layout};

/// A link whose ends have agreed on what they use for device memory.
#[derive(Debug)]
pub struct GpuLink {
    pub(super) link: Link,
    pub(super) agreed: Agreed,
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
    pub fn agree(&self, mut link: Link, deadline: Instant) -> Result<GpuLink, HandshakeError> {
        let agreed = pair::agree(&mut link, self.layout, self.want, deadline)?;
        Ok(GpuLink { link, agreed })
    }
}

impl GpuLink {
    /// Whether done words report writes, and whether there are bounce slots: the same at both ends.
    pub fn active(&self) -> (bool, bool) {
        (self.agreed.done, self.agreed.relay)
    }

    /// The link.
    pub fn link(&self) -> &Link {
        &self.link
    }
}
