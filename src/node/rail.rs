//! Combines the kinds of rail of a node in one type, with static dispatch.

use std::ptr::NonNull;

use fishplate_core::error::{AttachError, PostError};
use fishplate_core::forward_rail;
use fishplate_core::mem::{Peer, Region, RegionKind, Untrusted};
use fishplate_core::rail::{Local, Posted, Rail, RailKey, Remote, Sink};
use fishplate_gpu::{AnyDevice, GpuLink, GpuRail, GpuSetup, is_device};
use fishplate_shm::{Link, ShmRail, ShmSetup};
use fishplate_sys::LinuxHost;
use fishplate_sys::clock::monotonic_ns;
use fishplate_sys::fabric::FabricRail;

use crate::guard::{Guard, GuardSetup};

/// The key for peers and the descriptor for posts of device memory that a libfabric rail cannot
/// register.
const ELSEWHERE: RailKey = RailKey::ELSEWHERE;
const NOT_HERE: u64 = u64::MAX;

/// Compared with a niche, the explicit tag saves an instruction per call.
#[repr(u8)]
#[expect(clippy::large_enum_variant, reason = "a box would cost every post a load, to save little")]
pub(super) enum NodeRail {
    Local(ShmRail<LinuxHost>),
    Fabric(Guard<FabricRail>),
    Gpu(Box<GpuRail<AnyDevice, LinuxHost>>),
}

pub(super) enum NodeSetup<'a> {
    Local(ShmSetup<'a, LinuxHost>),
    Fabric(GuardSetup<'a, FabricRail>),
    Gpu(GpuSetup<'a, AnyDevice, LinuxHost>),
}

impl NodeSetup<'_> {
    pub fn attach(&mut self, peer: Peer, link: Link) -> Result<(), AttachError> {
        match self {
            NodeSetup::Local(shm) => shm.attach(peer, link),
            NodeSetup::Gpu(gpu) => gpu.attach(peer, GpuLink::plain(link)),
            NodeSetup::Fabric(_) => Err(AttachError::Unsupported),
        }
    }

    pub fn attach_self(&mut self, peer: Peer) -> Result<(), AttachError> {
        match self {
            NodeSetup::Local(shm) => shm.attach_self(peer),
            NodeSetup::Gpu(gpu) => gpu.attach_self(peer),
            NodeSetup::Fabric(_) => Err(AttachError::Unsupported),
        }
    }
}

/// Size of the most frequent message header, the header of an eager message, in bytes.
const HEAD: usize = 32;

#[cold]
#[inline(never)]
fn aside<T>(call: impl FnOnce() -> T) -> T {
    call()
}

macro_rules! each {
    ($self:ident, $rail:ident => $call:expr) => {
        match $self {
            NodeRail::Local($rail) => $call,
            NodeRail::Fabric($rail) => $call,
            NodeRail::Gpu($rail) => aside(|| $call),
        }
    };
}

/// The hot calls of rails other than shared memory. Kept out of line, because inlined libfabric
/// code would take registers from the shared-memory path. Those in the middle of a caller's hot
/// path are also cold.
impl NodeRail {
    #[cold]
    #[inline(never)]
    fn post_message_elsewhere(
        &mut self,
        peer: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        each!(self, rail => rail.post_message(peer, head, body, cx))
    }

    #[inline(never)]
    fn poll_elsewhere<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        each!(self, rail => rail.poll(budget, sink))
    }

    #[inline(never)]
    fn flush_elsewhere(&mut self) {
        each!(self, rail => rail.flush())
    }

    #[cold]
    #[inline(never)]
    fn notify_elsewhere(&mut self, peer: Peer) {
        each!(self, rail => rail.notify(peer))
    }
}

/// Forwards a post between `$local` and `$remote`. Refuses it if a libfabric rail has not
/// registered one of them.
macro_rules! moves {
    ($self:ident, $local:ident, $remote:ident, $rail:ident => $call:expr) => {
        match $self {
            NodeRail::Fabric(_) if $local.desc == NOT_HERE || $remote.key == ELSEWHERE => {
                Err(PostError::Unsupported)
            }
            _ => each!($self, $rail => $call),
        }
    };
}

#[deny(
    clippy::missing_trait_methods,
    reason = "a call that is not forwarded would use the default, which ignores the rail"
)]
// SAFETY: forwards every call to one rail, and `setup` offers only the setup calls of that rail. A
// refused call has changed nothing.
unsafe impl Rail for NodeRail {
    type Setup<'a> = NodeSetup<'a>;

    const COPIES: bool = true;

    const CLOCK: Option<fn() -> u64> = Some(monotonic_ns);

    fn setup(&mut self) -> NodeSetup<'_> {
        match self {
            NodeRail::Local(rail) => NodeSetup::Local(rail.setup()),
            NodeRail::Fabric(rail) => NodeSetup::Fabric(rail.setup()),
            NodeRail::Gpu(rail) => NodeSetup::Gpu(rail.setup()),
        }
    }

    fn register(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError> {
        match self {
            NodeRail::Fabric(rail) if matches!(region.kind(), RegionKind::Device { .. }) => {
                match rail.register(region) {
                    Err(AttachError::Unsupported | AttachError::System(_)) => {
                        Ok((ELSEWHERE, NOT_HERE))
                    }
                    registered => registered,
                }
            }
            _ => each!(self, rail => rail.register(region)),
        }
    }

    fn deregister(&mut self, key: RailKey) -> Result<(), AttachError> {
        match self {
            NodeRail::Fabric(_) if key == ELSEWHERE => Ok(()),
            _ => each!(self, rail => rail.deregister(key)),
        }
    }

    fn import(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        match self {
            NodeRail::Fabric(_) if key == ELSEWHERE => Err(AttachError::Unsupported),
            NodeRail::Local(_) if is_device(key) => Err(AttachError::Unsupported),
            // Does not wait for the peer. `Node::import` does, and serves other peers meanwhile.
            NodeRail::Gpu(rail) if is_device(key) => rail.try_import(peer, key, len),
            _ => each!(self, rail => rail.import(peer, key, len)),
        }
    }

    fn try_import(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        match self {
            NodeRail::Fabric(_) if key == ELSEWHERE => Err(AttachError::Unsupported),
            NodeRail::Local(_) if is_device(key) => Err(AttachError::Unsupported),
            _ => each!(self, rail => rail.try_import(peer, key, len)),
        }
    }

    fn release(&mut self, peer: Peer, key: RailKey) {
        match self {
            NodeRail::Fabric(_) if key == ELSEWHERE => {}
            _ => each!(self, rail => rail.release(peer, key)),
        }
    }

    #[inline(always)]
    unsafe fn post_write(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: our caller guarantees the same contract.
        moves!(self, local, remote, rail => unsafe {
            rail.post_write(peer, local, remote, data, cx)
        })
    }

    #[inline(always)]
    unsafe fn post_write_checked(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: u32,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: our caller guarantees the same contract.
        moves!(self, local, remote, rail => unsafe {
            rail.post_write_checked(peer, local, remote, data, cx)
        })
    }

    #[inline(always)]
    unsafe fn post_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: our caller guarantees the same contract.
        moves!(self, local, remote, rail => unsafe { rail.post_read(peer, local, remote, cx) })
    }

    #[inline(always)]
    unsafe fn post_rendezvous_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: our caller guarantees the same contract.
        moves!(self, local, remote, rail => unsafe {
            rail.post_rendezvous_read(peer, local, remote, cx)
        })
    }

    #[inline(always)]
    fn post_message(
        &mut self,
        peer: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        match (self, <&[u8; HEAD]>::try_from(head)) {
            (NodeRail::Local(rail), _) => rail.post_message(peer, head, body, cx),
            // Copies the head, because borrowing it would force the shared-memory path to keep its
            // head on the stack too.
            (other, Ok(&head)) => other.post_message_elsewhere(peer, &{ head }, body, cx),
            (other, _) => other.post_message_elsewhere(peer, head, body, cx),
        }
    }

    #[inline(always)]
    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        match self {
            NodeRail::Local(rail) => rail.poll(budget, sink),
            other => other.poll_elsewhere(budget, sink),
        }
    }

    #[inline(always)]
    fn flush(&mut self) {
        match self {
            NodeRail::Local(rail) => rail.flush(),
            other => other.flush_elsewhere(),
        }
    }

    #[inline(always)]
    fn notify(&mut self, peer: Peer) {
        match self {
            NodeRail::Local(rail) => rail.notify(peer),
            other => other.notify_elsewhere(peer),
        }
    }

    forward_rail! { each!(self) =>
        caps touches detach fence late mute fence_left reopen rejoin fences_all is_fenced
        post_atomic copy_to copy_from reads_addresses read_address write_device read_device
        place_device fetch_device doubt check_peers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fishplate_core::mem::RailId;
    use fishplate_sys::fabric::{Ask, FabricConfig, negotiate};
    use fishplate_testing::fabric::{Fake, Persona};

    #[test]
    fn what_libfabric_did_not_register_is_refused_in_every_call_that_names_it() {
        let fake = Fake::new(Persona::cxi(), 1);
        let offer = negotiate(fake.library(), &Ask::new("cxi")).unwrap();
        let open = || {
            let rail = FabricRail::open(&offer, FabricConfig::default()).unwrap();
            NodeRail::Fabric(Guard::new(rail, RailId(0), None))
        };
        let (mut rail, other) = (open(), open());
        let peer = Peer(1);
        let NodeRail::Fabric(guard) = &other else { unreachable!() };
        let address = guard.inner().address().unwrap();
        let NodeSetup::Fabric(mut setup) = rail.setup() else { unreachable!() };
        setup.inner_mut().attach(peer, &address).unwrap();

        let mut memory = [0u64; 8];
        let start = NonNull::from(&mut memory).cast::<u8>();
        let region = |kind| {
            // SAFETY: the memory outlives the rail, and no post uses it.
            unsafe { Region::new(start, 64, kind) }
        };
        let device = region(RegionKind::Device { ordinal: 0 });
        assert_eq!(rail.register(&device), Ok((ELSEWHERE, NOT_HERE)));
        let (key, desc) = rail.register(&region(RegionKind::Private)).unwrap();
        assert!(key != ELSEWHERE && desc != NOT_HERE);

        let post = |rail: &mut NodeRail, desc, key| {
            let (local, remote) = (Local { ptr: start, len: 8, desc }, Remote { key, offset: 0 });
            // SAFETY: the rail refuses each of these posts, so it accesses no memory.
            unsafe {
                [
                    rail.post_write(peer, local, remote, Some(0), 1),
                    rail.post_write_checked(peer, local, remote, 0, 1),
                    rail.post_read(peer, local, remote, 1),
                    rail.post_rendezvous_read(peer, local, remote, 1),
                ]
            }
        };
        let refused = [Err(PostError::Unsupported); 4];
        assert_eq!(post(&mut rail, NOT_HERE, key), refused);
        assert_eq!(post(&mut rail, desc, ELSEWHERE), refused);
        assert_eq!(rail.import(peer, ELSEWHERE, 64), Err(AttachError::Unsupported));
        assert_eq!(rail.try_import(peer, ELSEWHERE, 64), Err(AttachError::Unsupported));
        rail.release(peer, ELSEWHERE);
        assert_eq!(rail.deregister(ELSEWHERE), Ok(()));
        assert_eq!(rail.deregister(key), Ok(()));
    }
}
