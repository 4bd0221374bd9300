//! Moves data: chooses among mapped copies, kernel copies and staging. Nothing here allocates or
//! blocks; a kernel copy is one system call, and now and then another that checks the peer's
//! process.

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
    /// Checks that a peer's lane has room to announce a write that did not go through it.
    #[inline]
    pub fn can_land(&mut self, peer: Peer) -> Result<(), PostError> {
        let attached = find(&mut self.peers, peer).ok_or(PostError::PeerDown)?;
        if attached.blocked {
            return Err(attached.refusal());
        }
        self.roster.warm(attached, peer);
        attached.reserve(1).map(drop)
    }

    /// Announces a write that did not go through the lane and is fully visible to the peer.
    #[inline]
    pub fn land(&mut self, peer: Peer, data: u32) -> Result<(), PostError> {
        self.can_land(peer)?;
        let attached = self.attached(peer).ok_or(PostError::PeerDown)?;
        // SAFETY: one cell was just reserved. Edge `lane.stamp` also publishes the write, which
        // this thread has observed.
        unsafe { attached.out.publish(1, record::header(LANDED, data)) };
        self.mark_due(peer);
        Ok(())
    }

    /// Moves data between local memory and an import, with a completion word if `data` is given.
    ///
    /// # Safety
    /// As for `Rail::post_write` or `Rail::post_read`, by `way`.
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
            // SAFETY: our caller guarantees the same contract.
            Place::Private(address) => unsafe {
                return self.post_private(peer, way, local, address, remote, data, cx);
            },
        };
        // Room for the word first: a refusal must change nothing.
        if data.is_some() {
            self.roster.warm(attached, peer);
            attached.reserve(1)?;
        }
        // SAFETY: the range is inside the import, which stays mapped until it is released. Our
        // caller guarantees the local side.
        unsafe { copy_mapped(way, local, ptr) };
        if let Some(data) = data {
            // SAFETY: one cell was reserved above. Edge `lane.stamp` publishes the data copied
            // before it.
            unsafe { attached.out.publish(1, record::header(LANDED, data)) };
            tell(&mut self.due, &self.host, attached, peer);
        }
        Ok(Posted::Done)
    }

    /// Like `post`, for memory that is not mapped.
    ///
    /// The same as `post`; the range has been checked.
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
            // SAFETY: our caller guarantees the local side.
            match unsafe { direct(attached, way, &[range], &self.host) } {
                Ok(()) => {
                    if let Some(data) = data {
                        // SAFETY: one cell was reserved above. The kernel has made its copy on this
                        // processor before.
                        unsafe { attached.out.publish(1, record::header(LANDED, data)) };
                    }
                    self.mark_due(peer);
                    return Ok(Posted::Done);
                }
                Err(CmaError::Refused) => {}
                Err(CmaError::Gone) => return Err(PostError::PeerDown),
                Err(CmaError::Failed(code)) => {
                    self.ended.push_back((cx, CompleteError::Failed(code)));
                    return Ok(Posted::Pending);
                }
            }
        }
        self.stage(peer, staged::Posted::new(way, local, remote, data, cx))
    }

    /// Posts a staged operation, which goes through the lane in chunks.
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

    /// Reads a payload by the path that was faster recently. See
    /// [`PayloadPaths`](crate::payload::PayloadPaths).
    ///
    /// # Safety
    /// As for `Rail::post_rendezvous_read`.
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
            // SAFETY: our caller guarantees the same contract.
            return unsafe { self.post(peer, Way::Get, local, remote, None, cx) };
        }
        let (by, measured) = attached.payloads.choose(len, || host.now_ns());
        let began = measured.then(|| host.now_ns());
        match by {
            By::Kernel => {
                // SAFETY: our caller guarantees the same contract.
                let posted = unsafe { self.post(peer, Way::Get, local, remote, None, cx) }?;
                let took = began.map(|began| self.host.now_ns().saturating_sub(began));
                // Pending means that the kernel no longer permits copies, or that the memory is not
                // mapped there.
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

    /// Copies and completes at once if possible. Otherwise returns `None`.
    ///
    /// # Safety
    /// As for `Rail::copy_to` or `Rail::copy_from`, by `way`.
    pub(super) unsafe fn copy(
        &mut self,
        peer: Peer,
        way: Way,
        pieces: &[(Local, Remote)],
    ) -> Option<Result<(), PostError>> {
        let Some(attached) = find(&mut self.peers, peer) else { return Some(Err(PostError::PeerDown)) };
        if attached.blocked {
            // A staged write is in flight: a copy now would overtake it.
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
                    // SAFETY: as in `post`.
                    unsafe { copy_mapped(way, *local, ptr.add(remote.offset as usize)) };
                    continue;
                }
                if !attached.cma {
                    return None;
                }
                *range = cma::Range { local: local.ptr, remote: import.base + remote.offset, len: local.len };
            }
            // SAFETY: our caller guarantees the local side.
            match unsafe { direct(attached, way, &ranges[..pieces.len()], &self.host) } {
                Ok(()) => {}
                Err(CmaError::Refused) => return None,
                Err(CmaError::Gone) => return Some(Err(PostError::PeerDown)),
                Err(CmaError::Failed(code)) => return Some(Err(PostError::Provider(code))),
            }
        }
        Some(Ok(()))
    }
}

/// The location of a peer's memory.
enum Place {
    /// Mapped here.
    Mapped(NonNull<u8>),
    /// Not mapped here; the address in the peer.
    Private(u64),
}

/// Resolves the target of a post, or returns why it cannot be posted.
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
        // SAFETY: the offset lies inside the import.
        Some(ptr) => Place::Mapped(unsafe { ptr.add(remote.offset as usize) }),
        None => Place::Private(import.base + remote.offset),
    };
    Ok((attached, place))
}

/// # Safety
/// `local`, and as many bytes at `remote`, are valid for reads and writes according to `way`.
#[inline(always)]
unsafe fn copy_mapped(way: Way, local: Local, remote: NonNull<u8>) {
    let (from, to) = match way {
        Way::Put => (local.ptr, remote),
        Way::Get => (remote, local.ptr),
    };
    // SAFETY: our caller guarantees both ranges. They may overlap if a process is its own peer.
    unsafe { fishplate_core::mem::copy_bytes(from.as_ptr(), to.as_ptr(), local.len) };
}

/// Copies through the kernel. Remembers it if the kernel refuses.
///
/// # Safety
/// The local ranges are valid, for reads or writes by `way`.
unsafe fn direct(
    attached: &mut Attached,
    way: Way,
    ranges: &[cma::Range],
    host: &impl Host,
) -> Result<(), CmaError> {
    let remote = attached.remote.as_mut().ok_or(CmaError::Refused)?;
    // Its process ID may have been reused.
    if !remote.lives(host.now_ns()) {
        return Err(CmaError::Gone);
    }
    // SAFETY: as this function requires.
    let result = unsafe { cma::copy(remote.pid, way, ranges) };
    if result == Err(CmaError::Refused) {
        attached.cma = false;
    }
    result
}

/// Copies out of a peer's process by address. Only a peer that is attached keeps the memory of its
/// sends, so this asks the kernel afterwards whether it still is.
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
    // SAFETY: as this function requires.
    let copied = unsafe { direct(attached, Way::Get, &[range], host) };
    copied.is_ok() && attached.remote.as_mut().is_some_and(|remote| remote.looks_alive())
}
