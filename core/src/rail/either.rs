//! One of two kinds of rail, chosen once: an engine can own shared memory and network rails side by
//! side without an indirect call.

use core::ptr::NonNull;

use super::{Caps, Fence, Local, Posted, Rail, RailKey, Remote, Sink};
use crate::error::{AttachError, PostError};
use crate::mem::{Peer, Region, Untrusted};
use crate::op::Amo;

/// A rail that is an `A` or a `B`. Nest it for more kinds.
#[derive(Debug)]
pub enum Either<A, B> {
    /// The first kind.
    A(A),
    /// The second kind.
    B(B),
}

macro_rules! each {
    ($self:ident, $rail:ident => $call:expr) => {
        match $self {
            Either::A($rail) => $call,
            Either::B($rail) => $call,
        }
    };
}

#[deny(
    clippy::missing_trait_methods,
    reason = "a call that is not passed on gets the default, which knows nothing of the rail"
)]
// SAFETY: each call goes to the one rail inside, which stays the same: `setup` lends out no more
// than that rail does.
unsafe impl<A: Rail, B: Rail> Rail for Either<A, B> {
    type Setup<'a>
        = Either<A::Setup<'a>, B::Setup<'a>>
    where
        Self: 'a;

    const COPIES: bool = A::COPIES || B::COPIES;

    fn setup(&mut self) -> Self::Setup<'_> {
        match self {
            Either::A(rail) => Either::A(rail.setup()),
            Either::B(rail) => Either::B(rail.setup()),
        }
    }

    #[inline(always)]
    fn caps(&self) -> Caps {
        each!(self, rail => rail.caps())
    }

    fn register(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError> {
        each!(self, rail => rail.register(region))
    }

    fn deregister(&mut self, key: RailKey) -> Result<(), AttachError> {
        each!(self, rail => rail.deregister(key))
    }

    fn touches(&self, memory: Local) -> bool {
        each!(self, rail => rail.touches(memory))
    }

    fn import(&mut self, peer: Peer, key: RailKey, len: u64) -> Result<Option<NonNull<u8>>, AttachError> {
        each!(self, rail => rail.import(peer, key, len))
    }

    fn try_import(&mut self, peer: Peer, key: RailKey, len: u64) -> Result<Option<NonNull<u8>>, AttachError> {
        each!(self, rail => rail.try_import(peer, key, len))
    }

    fn release(&mut self, peer: Peer, key: RailKey) {
        each!(self, rail => rail.release(peer, key))
    }

    fn detach(&mut self, peer: Peer) {
        each!(self, rail => rail.detach(peer))
    }

    #[cold]
    fn fence(&mut self, peer: Peer) -> Fence {
        each!(self, rail => rail.fence(peer))
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
        // SAFETY: passed on.
        each!(self, rail => unsafe { rail.post_write(peer, local, remote, data, cx) })
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
        // SAFETY: passed on.
        each!(self, rail => unsafe { rail.post_write_checked(peer, local, remote, data, cx) })
    }

    #[inline(always)]
    unsafe fn post_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: passed on.
        each!(self, rail => unsafe { rail.post_read(peer, local, remote, cx) })
    }

    #[inline(always)]
    unsafe fn post_fetch(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: passed on.
        each!(self, rail => unsafe { rail.post_fetch(peer, local, remote, cx) })
    }

    #[inline(always)]
    fn post_message(
        &mut self,
        peer: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        each!(self, rail => rail.post_message(peer, head, body, cx))
    }

    #[inline(always)]
    unsafe fn post_atomic(
        &mut self,
        peer: Peer,
        amo: Amo,
        remote: Remote,
        fetch: Option<NonNull<u64>>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: passed on.
        each!(self, rail => unsafe { rail.post_atomic(peer, amo, remote, fetch, cx) })
    }

    #[inline(always)]
    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        each!(self, rail => rail.poll(budget, sink))
    }

    #[inline(always)]
    fn flush(&mut self) {
        each!(self, rail => rail.flush())
    }

    #[inline(always)]
    unsafe fn copy_to(&mut self, peer: Peer, local: Local, remote: Remote) -> Option<Result<(), PostError>> {
        // SAFETY: passed on.
        each!(self, rail => unsafe { rail.copy_to(peer, local, remote) })
    }

    #[inline(always)]
    unsafe fn copy_from(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
    ) -> Option<Result<(), PostError>> {
        // SAFETY: passed on.
        each!(self, rail => unsafe { rail.copy_from(peer, local, remote) })
    }

    #[cold]
    unsafe fn place(&mut self, to: Local, from: Untrusted<'_>) -> Result<(), PostError> {
        // SAFETY: passed on.
        each!(self, rail => unsafe { rail.place(to, from) })
    }

    #[cold]
    unsafe fn fetch(&mut self, from: Local, into: &mut [u8]) -> Result<(), PostError> {
        // SAFETY: passed on.
        each!(self, rail => unsafe { rail.fetch(from, into) })
    }

    #[inline(always)]
    fn notify(&mut self, peer: Peer) {
        each!(self, rail => rail.notify(peer))
    }

    fn check_peers<S: Sink>(&mut self, sink: &mut S) {
        each!(self, rail => rail.check_peers(sink))
    }
}
