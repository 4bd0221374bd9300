//! Implements [`Rail`] for [`GpuRail`]. Host memory and messages go to the inner rail.

use std::ptr::NonNull;
use std::time::Instant;

use fishplate_core::error::{AttachError, CompleteError, PeerError, PostError};
use fishplate_core::forward_rail;
use fishplate_core::mem::{Peer, Region, Untrusted};
use fishplate_core::rail::{Caps, Local, Posted, Rail, RailKey, Remote, Sink};
use fishplate_core::sync::host::Host;

use super::owned::TURN_PASSES;
use super::{GpuRail, GpuSetup, Way, memory};
use crate::Device;

struct Watch<'a, S> {
    sink: &'a mut S,
    fallen: &'a mut Vec<Peer>,
}

#[deny(
    clippy::missing_trait_methods,
    reason = "a report that is not forwarded would use the default, one event at a time"
)]
impl<S: Sink> Sink for Watch<'_, S> {
    #[inline(always)]
    fn done(&mut self, cx: u64, result: Result<(), CompleteError>) {
        self.sink.done(cx, result);
    }

    #[inline(always)]
    fn done_alike(&mut self, cx: u64, count: u32) {
        self.sink.done_alike(cx, count);
    }

    #[inline(always)]
    fn landed(&mut self, peer: Peer, data: u32) {
        self.sink.landed(peer, data);
    }

    #[inline(always)]
    fn message(&mut self, peer: Peer, bytes: Untrusted<'_>) {
        self.sink.message(peer, bytes);
    }

    fn repeats(&mut self, cx: u64) -> bool {
        self.sink.repeats(cx)
    }

    fn peer_down(&mut self, peer: Peer, why: PeerError) {
        self.fallen.push(peer);
        self.sink.peer_down(peer, why);
    }

    fn silent(&mut self, peer: Peer, overdue: bool) -> bool {
        self.sink.silent(peer, overdue)
    }

    fn peer_up(&mut self, peer: Peer) {
        self.sink.peer_up(peer);
    }

    fn called(&mut self) {
        self.sink.called();
    }
}

// SAFETY: the inner rail handles host memory. `import` returns no pointers to device memory. A
// pending transfer completes only after the device has stopped using its memory. `GpuSetup` gives
// no mutable access to the inner rail or the device.
unsafe impl<D: Device, H: Host> Rail for GpuRail<D, H> {
    type Setup<'a>
        = GpuSetup<'a, D, H>
    where
        Self: 'a;

    const COPIES: bool = true;

    fn setup(&mut self) -> GpuSetup<'_, D, H> {
        GpuSetup(self)
    }

    #[inline]
    fn caps(&self) -> Caps {
        self.caps
    }

    fn register(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError> {
        self.register_region(region)
    }

    fn deregister(&mut self, key: RailKey) -> Result<(), AttachError> {
        self.deregister_key(key)
    }

    fn touches(&mut self, memory: Local) -> bool {
        self.touches_memory(memory)
    }

    fn import(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        if memory::is_device(key) {
            let deadline = Instant::now() + self.config.timeout;
            return self.import_device(peer, key, len, Some(deadline)).map(|()| None);
        }
        self.inner.import(peer, key, len)
    }

    fn try_import(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        if memory::is_device(key) {
            return self.import_device(peer, key, len, None).map(|()| None);
        }
        self.inner.try_import(peer, key, len)
    }

    fn release(&mut self, peer: Peer, key: RailKey) {
        if memory::is_device(key) {
            return self.release_device(peer, key);
        }
        self.inner.release(peer, key);
    }

    fn detach(&mut self, peer: Peer) {
        self.detach_peer(peer);
    }

    #[inline]
    unsafe fn post_write(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        if memory::is_host(&local, &remote) {
            // SAFETY: the caller upholds the contract of `Rail::post_write`, which the inner rail
            // requires.
            return unsafe { self.inner.post_write(peer, local, remote, data, cx) };
        }
        // SAFETY: the caller upholds the contract of `Rail::post_write`, which `post` requires for
        // `Put`.
        unsafe { self.post(peer, Way::Put, local, remote, data, cx) }
    }

    #[inline]
    unsafe fn post_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        if memory::is_host(&local, &remote) {
            // SAFETY: the caller upholds the contract of `Rail::post_read`, which the inner rail
            // requires.
            return unsafe { self.inner.post_read(peer, local, remote, cx) };
        }
        // SAFETY: the caller upholds the contract of `Rail::post_read`, which `post` requires for
        // `Get`.
        unsafe { self.post(peer, Way::Get, local, remote, None, cx) }
    }

    unsafe fn post_rendezvous_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        if memory::is_host(&local, &remote) {
            // SAFETY: the caller upholds the contract of `Rail::post_rendezvous_read`, which the
            // inner rail requires.
            return unsafe { self.inner.post_rendezvous_read(peer, local, remote, cx) };
        }
        // SAFETY: the caller upholds the contract of `Rail::post_rendezvous_read`, which includes
        // the contract of `Rail::post_read`.
        unsafe { self.post(peer, Way::Get, local, remote, None, cx) }
    }

    #[inline]
    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        // The part that is polled second gets only the rest of the budget. So the two parts take
        // turns at being first.
        self.passes = self.passes.wrapping_add(1);
        let device_first = self.passes & 1 == 0;
        let mut count = 0;
        if device_first {
            count += self.poll_device(budget, sink);
        }
        let mut watch = Watch { sink, fallen: &mut self.fallen };
        count += self.inner.poll(budget - count, &mut watch);
        if !device_first {
            count += self.poll_device(budget - count, sink);
            // The inner rail flushed in its poll, before the device queued records. So flush again.
            self.inner.flush();
        }
        if !self.fallen.is_empty() {
            self.take_down();
        }
        if count > 0 {
            self.pace.found();
        } else if self.pace.is_ending() {
            self.prepare_sleep();
        }
        if self.passes.is_multiple_of(TURN_PASSES) && self.hears {
            self.turn_now_and_then();
        }
        count
    }

    unsafe fn copy_to(
        &mut self,
        peer: Peer,
        pieces: &[(Local, Remote)],
    ) -> Option<Result<(), PostError>> {
        if pieces.iter().any(|(local, remote)| !memory::is_host(local, remote)) {
            return None;
        }
        // SAFETY: the caller upholds the contract of `Rail::copy_to`, which the inner rail
        // requires.
        unsafe { self.inner.copy_to(peer, pieces) }
    }

    unsafe fn copy_from(
        &mut self,
        peer: Peer,
        pieces: &[(Local, Remote)],
    ) -> Option<Result<(), PostError>> {
        if pieces.iter().any(|(local, remote)| !memory::is_host(local, remote)) {
            return None;
        }
        // SAFETY: the caller upholds the contract of `Rail::copy_from`, which the inner rail
        // requires.
        unsafe { self.inner.copy_from(peer, pieces) }
    }

    #[cold]
    unsafe fn write_device(&mut self, to: Local, from: Untrusted<'_>) -> Result<(), PostError> {
        // SAFETY: the caller upholds the contract of `Rail::write_device`, which
        // `write_device_bytes` requires.
        unsafe { self.write_device_bytes(to, from) }
    }

    #[cold]
    unsafe fn read_device(&mut self, from: Local, into: &mut [u8]) -> Result<(), PostError> {
        // SAFETY: the caller upholds the contract of `Rail::read_device`, which `read_device_bytes`
        // requires.
        unsafe { self.read_device_bytes(from, into) }
    }

    #[cold]
    unsafe fn place_device(
        &mut self,
        to: Local,
        from: Untrusted<'_>,
        copy: &mut u32,
    ) -> Result<(), PostError> {
        // SAFETY: the caller upholds the contract of `Rail::place_device`, which
        // `place_device_bytes` requires.
        unsafe { self.place_device_bytes(to, from, copy) }
    }

    #[cold]
    unsafe fn fetch_device(
        &mut self,
        from: Local,
        into: &mut [u8],
        copy: &mut u32,
    ) -> Result<(), PostError> {
        // SAFETY: the caller upholds the contract of `Rail::fetch_device`, which
        // `fetch_device_bytes` requires.
        unsafe { self.fetch_device_bytes(from, into, copy) }
    }

    fn check_peers<S: Sink>(&mut self, sink: &mut S) {
        // Polls first, to report the last arrivals of a peer before its failure.
        self.poll_device(self.caps.depth, sink);
        let mut watch = Watch { sink, fallen: &mut self.fallen };
        self.inner.check_peers(&mut watch);
        if !self.fallen.is_empty() {
            self.take_down();
        }
        self.turn();
    }

    forward_rail! { self.inner =>
        post_message flush reads_addresses read_address notify doubt
    }
}
