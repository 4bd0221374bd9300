//! Moves data: chooses among mapped copies, kernel copies and staging. Nothing here allocates, and
//! only a kernel copy can block (see [`cma`]).

use std::ptr::NonNull;

use fishplate_core::error::{CompleteError, PostError};
use fishplate_core::mem::Peer;
use fishplate_core::rail::{Local, Posted, Remote};
use fishplate_core::sync::host::Host;

use super::{MAX_ENDED, MAX_RMA, ShmRail, find, tell};
use crate::cma::{self, CmaError, Way};
use crate::payload::By;
use crate::peer::Attached;
use crate::record::{self, LANDED};
use crate::roster::Places;
use crate::staged;

impl<H: Host> ShmRail<H> {
    /// Checks that a peer's lane has room for the record that completes a write made outside of the
    /// lane.
    #[inline]
    pub fn can_land(&mut self, peer: Peer) -> Result<(), PostError> {
        let attached = find(&mut self.peers, peer).ok_or(PostError::PeerDown)?;
        if attached.blocked {
            return Err(attached.refusal());
        }
        self.roster.warm(attached, peer);
        attached.reserve(1).map(drop)
    }

    /// Announces a write that was made outside of the lane and is already fully visible to the
    /// peer.
    #[inline]
    pub fn land(&mut self, peer: Peer, data: u32) -> Result<(), PostError> {
        self.can_land(peer)?;
        let attached = self.attached(peer).ok_or(PostError::PeerDown)?;
        // SAFETY: `can_land` reserved one cell, and nothing was reserved since. Edge `lane.stamp`
        // also publishes the write, because this thread has observed it.
        unsafe { attached.out.publish(1, record::header(LANDED, data)) };
        self.mark_due(peer);
        Ok(())
    }

    /// The peer receives `data`, if given, as the completion word.
    ///
    /// # Safety
    /// The contract of `Rail::post_write` or `Rail::post_read` applies, according to `way`.
    #[inline]
    pub(super) unsafe fn post(
        &mut self,
        peer: Peer,
        way: Way,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let (attached, place) = resolve(&mut self.peers, peer, local.len, remote)?;
        let ptr = match place {
            Place::Mapped(ptr) => ptr,
            // SAFETY: the caller upholds the contract of `post`, which `post_private` requires too.
            // `resolve` has checked the range.
            Place::Private(address) => unsafe {
                return self.post_private(peer, way, local, address, remote, data, cx);
            },
        };
        // Reserves the cell for the completion word first, because a refusal must change nothing.
        if data.is_some() {
            self.roster.warm(attached, peer);
            attached.reserve(1)?;
        }
        // SAFETY: `resolve` has checked that the range lies inside the import, which stays mapped
        // until it is released. The caller guarantees the local range.
        unsafe { copy_mapped(way, local, ptr) };
        if let Some(data) = data {
            // SAFETY: `reserve` returned room for one cell. Edge `lane.stamp` also publishes the
            // data copied above.
            unsafe { attached.out.publish(1, record::header(LANDED, data)) };
            tell(&mut self.due, &self.host, attached, peer);
        }
        Ok(Posted::Done)
    }

    /// Moves data like `post`, to or from private memory.
    ///
    /// # Safety
    /// The contract of `post` applies. The range was checked, and begins at `address` in the peer's
    /// process.
    #[expect(clippy::too_many_arguments, reason = "a post and its resolved address")]
    #[inline(never)]
    unsafe fn post_private(
        &mut self,
        peer: Peer,
        way: Way,
        local: Local,
        address: u64,
        remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let full = self.ended.len() >= MAX_ENDED;
        let attached = find(&mut self.peers, peer).ok_or(PostError::PeerDown)?;
        if attached.cma {
            if full {
                return Err(PostError::Again);
            }
            if data.is_some() {
                self.roster.warm(attached, peer);
                attached.reserve(1)?;
            }
            let range = cma::Range { local: local.ptr, remote: address, len: local.len };
            // SAFETY: the caller guarantees the local range.
            match unsafe { direct::<1>(attached, way, &[range], &self.host) } {
                Ok(()) => {
                    if let Some(data) = data {
                        // SAFETY: `reserve` returned room for one cell. The kernel has made its
                        // copy on this thread before this store.
                        unsafe { attached.out.publish(1, record::header(LANDED, data)) };
                    }
                    self.mark_due(peer);
                    return Ok(Posted::Done);
                }
                Err(CmaError::Refused) => {}
                Err(CmaError::Failed(code)) => {
                    self.ended.push_back((cx, CompleteError::Failed(code)));
                    return Ok(Posted::Pending);
                }
            }
        }
        self.stage(peer, staged::Posted::new(way, local, remote, data, cx))
    }

    fn stage(&mut self, peer: Peer, op: staged::Posted) -> Result<Posted, PostError> {
        let attached = find(&mut self.peers, peer).ok_or(PostError::PeerDown)?;
        self.roster.warm(attached, peer);
        match attached.staged.post(&mut attached.out, op) {
            Ok(()) => {
                attached.blocked |= attached.staged.sending();
                self.mark_due(peer);
                Ok(Posted::Pending)
            }
            Err(refused) => Err(attached.refused(refused)),
        }
    }

    /// Reads a payload by the path that was faster recently: see
    /// [`PayloadPaths`](crate::payload::PayloadPaths).
    ///
    /// # Safety
    /// The contract of `Rail::post_rendezvous_read` applies.
    #[inline(never)]
    pub(super) unsafe fn read_payload(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let (attached, place) = resolve(&mut self.peers, peer, local.len, remote)?;
        let (len, host) = (local.len, &self.host);
        if matches!(place, Place::Mapped(_)) || !attached.cma || len >= self.config.read_from {
            // SAFETY: the caller upholds the contract of `Rail::post_rendezvous_read`, which
            // includes the contract of `Rail::post_read`.
            return unsafe { self.post(peer, Way::Get, local, remote, None, cx) };
        }
        let (by, measured) = attached.payloads.choose(len, || host.now_ns());
        let began = measured.then(|| host.now_ns());
        match by {
            By::Kernel => {
                // SAFETY: the caller upholds the contract of `Rail::post_rendezvous_read`, which
                // includes the contract of `Rail::post_read`.
                let posted = unsafe { self.post(peer, Way::Get, local, remote, None, cx) }?;
                let took = began.map(|began| self.host.now_ns().saturating_sub(began));
                // A pending read is not counted: the kernel refused the copy, or the copy failed.
                if let (Posted::Done, Some(attached)) = (posted, self.attached(peer)) {
                    attached.payloads.copied(len, took);
                }
                Ok(posted)
            }
            By::Lane => {
                let op = staged::Posted::new(Way::Get, local, remote, None, cx);
                let posted = self.stage(peer, staged::Posted { payload: true, ..op })?;
                if let Some(attached) = self.attached(peer) {
                    attached.payloads.asked(len, began);
                }
                Ok(posted)
            }
        }
    }

    /// Copies all pieces before it returns, or returns `None`.
    ///
    /// # Safety
    /// The contract of `Rail::copy_to` or `Rail::copy_from` applies, according to `way`.
    pub(super) unsafe fn copy(
        &mut self,
        peer: Peer,
        way: Way,
        pieces: &[(Local, Remote)],
    ) -> Option<Result<(), PostError>> {
        let Some(attached) = find(&mut self.peers, peer) else {
            return Some(Err(PostError::PeerDown));
        };
        if attached.blocked {
            // A partly sent staged write blocks the peer. A copy now would overtake that write.
            return if attached.is_up() { None } else { Some(Err(PostError::PeerDown)) };
        }
        for pieces in pieces.chunks(cma::PIECES) {
            let mut ranges = [cma::Range::NONE; cma::PIECES];
            for (range, (local, remote)) in ranges.iter_mut().zip(pieces) {
                let import = match attached.import_of(remote.key.key) {
                    Some(import) if import.holds(remote.offset, local.len) => import,
                    _ => return Some(Err(PostError::BadKey)),
                };
                if let Some(ptr) = import.ptr {
                    // SAFETY: `holds` has checked that the range lies inside the import, which
                    // stays mapped until it is released. The caller guarantees the local range.
                    unsafe { copy_mapped(way, *local, ptr.add(remote.offset as usize)) };
                    continue;
                }
                if !attached.cma {
                    return None;
                }
                *range = cma::Range {
                    local: local.ptr,
                    remote: import.base + remote.offset,
                    len: local.len,
                };
            }
            // SAFETY: the caller guarantees the local ranges.
            match unsafe {
                direct::<{ cma::PIECES }>(attached, way, &ranges[..pieces.len()], &self.host)
            } {
                Ok(()) => {}
                Err(CmaError::Refused) => return None,
                Err(CmaError::Failed(code)) => return Some(Err(PostError::Provider(code))),
            }
        }
        Some(Ok(()))
    }
}

enum Place {
    Mapped(NonNull<u8>),
    /// An address in the peer's process.
    Private(u64),
}

#[inline(always)]
fn resolve(
    peers: &mut Places,
    peer: Peer,
    len: usize,
    remote: Remote,
) -> Result<(&mut Attached, Place), PostError> {
    let attached = find(peers, peer).ok_or(PostError::PeerDown)?;
    if attached.blocked {
        return Err(attached.refusal());
    }
    if len > MAX_RMA {
        return Err(PostError::TooLong { len, max: MAX_RMA });
    }
    let import = attached.import_of(remote.key.key).ok_or(PostError::BadKey)?;
    if !import.holds(remote.offset, len) {
        return Err(PostError::BadKey);
    }
    let place = match import.ptr {
        // SAFETY: `holds` has checked that the offset lies inside the import.
        Some(ptr) => Place::Mapped(unsafe { ptr.add(remote.offset as usize) }),
        None => Place::Private(import.base + remote.offset),
    };
    Ok((attached, place))
}

/// Copies between local memory and mapped memory of a peer.
///
/// # Safety
/// Both ranges of `local.len` bytes are valid: the source for reads, the destination for writes.
#[inline(always)]
unsafe fn copy_mapped(way: Way, local: Local, remote: NonNull<u8>) {
    let (from, to) = match way {
        Way::Put => (local.ptr, remote),
        Way::Get => (remote, local.ptr),
    };
    // SAFETY: the caller guarantees both ranges. They may overlap if a rail is its own peer, which
    // `copy_bytes` permits.
    unsafe { fishplate_core::mem::copy_bytes(from.as_ptr(), to.as_ptr(), local.len) };
}

/// Copies through the kernel. If the kernel refuses, or the peer has ended or left, this and later
/// operations are staged. `check_peers` then says why the peer is down.
///
/// # Safety
/// The local ranges are valid for reads with `Put`, and for writes with `Get`.
unsafe fn direct<const N: usize>(
    attached: &mut Attached,
    way: Way,
    ranges: &[cma::Range],
    host: &impl Host,
) -> Result<(), CmaError> {
    let remote = attached.remote.as_mut().ok_or(CmaError::Refused)?;
    // The process ID may have been reused.
    let result = match remote.lives(host.now_ns()) {
        // SAFETY: the caller guarantees the local ranges, as `cma::copy` requires.
        true => unsafe { cma::copy::<N>(remote.pid, way, ranges) },
        false => Err(CmaError::Refused),
    };
    if result == Err(CmaError::Refused) {
        attached.cma = false;
    }
    result
}

/// Copies from an address in the peer's process. Checks after the copy that the peer had not left,
/// and that the process ID was still known to be the peer's, because this thread may be preempted.
///
/// # Safety
/// `local` is writable.
pub(super) unsafe fn read_address(
    attached: &mut Attached,
    local: Local,
    address: u64,
    host: &impl Host,
) -> bool {
    let range = cma::Range { local: local.ptr, remote: address, len: local.len };
    // SAFETY: the caller guarantees that `local` is writable.
    let copied = unsafe { direct::<1>(attached, Way::Get, &[range], host) };
    copied.is_ok()
        && attached.is_there()
        && attached.remote.as_mut().is_some_and(|remote| remote.lives(host.now_ns()))
}
