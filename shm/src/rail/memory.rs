//! The memory of a rail: registers regions, announces their segments to peers, and imports regions
//! of peers. Slow paths; only an import may wait, for the peer's answer.

use std::ptr::NonNull;

use fishplate_core::error::AttachError;
use fishplate_core::mem::{Peer, Region, RegionKind};
use fishplate_core::rail::RailKey;
use fishplate_core::sync::host::Host;

use super::ShmRail;
use crate::control::Control;
use crate::error::HandshakeError;
use crate::regions::{KeyKind, Owner};
use crate::segment::Segment;
use crate::staged;

impl<H: Host> ShmRail<H> {
    pub(super) fn add_region(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError> {
        let (ptr, len) = (region.ptr(), region.len());
        if len == 0 || (ptr.as_ptr() as usize).checked_add(len).is_none() {
            return Err(AttachError::BadRange);
        }
        let lies = |start: NonNull<u8>, size: usize, offset: u64| {
            staged::within(offset, len as u64, size as u64)
                && start.as_ptr().wrapping_add(offset as usize) == ptr.as_ptr()
        };
        let (owner, base) = match region.kind() {
            RegionKind::Private => (Owner::User, ptr.as_ptr() as u64),
            RegionKind::Shared { segment, offset } => {
                let segment = Segment::find(segment).ok_or(AttachError::UnknownRegion)?;
                if !lies(segment.ptr(), segment.len(), offset) {
                    return Err(AttachError::BadRange);
                }
                (Owner::Segment(segment), offset)
            }
            RegionKind::Common { peer, offset } => {
                let attached = self.attached(peer).ok_or(AttachError::UnknownPeer)?;
                let remote = attached.remote.as_ref().ok_or(AttachError::Unsupported)?;
                let common = remote.common.as_ref().ok_or(AttachError::Unsupported)?;
                if !lies(common.ptr(), common.len(), offset) {
                    return Err(AttachError::BadRange);
                }
                (Owner::Peer(peer, remote.pair_id), offset)
            }
            _ => return Err(AttachError::Unsupported),
        };
        let news = match &owner {
            Owner::Segment(segment) => {
                let known = self.regions.segments();
                let new = known.iter().all(|known| known.number() != segment.number());
                // A peer drops the link if this end announces more segments than the peer expects.
                if new && known.len() >= usize::from(self.config.max_segments) {
                    return Err(AttachError::Full("ShmConfig::max_segments"));
                }
                new.then(|| segment.clone())
            }
            _ => None,
        };
        let key = self.regions.insert(ptr, len as u64, owner)?;
        if let Some(segment) = news {
            for attached in self.peers.iter_mut().flatten() {
                if let Some(remote) = &mut attached.remote {
                    remote.control.announce(segment.clone());
                }
            }
        }
        Ok((RailKey { key, base }, 0))
    }

    pub(super) fn remove_region(&mut self, key: RailKey) {
        // Imports of the region by this process itself can be dropped at once.
        for attached in self.peers.iter_mut().flatten().filter(|attached| attached.remote.is_none())
        {
            attached.forget(key.key);
        }
        let Some(Owner::Segment(segment)) = self.regions.remove(key.key) else { return };
        if self.regions.segments().iter().any(|known| known.number() == segment.number()) {
            return;
        }
        for attached in self.peers.iter_mut().flatten() {
            if let Some(remote) = &mut attached.remote {
                remote.control.withdraw(segment.number());
            }
        }
    }

    /// Imports memory. `map` maps memory that is in a segment of the peer.
    pub(super) fn import_by(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
        map: impl FnOnce(&mut Control, u32) -> Result<NonNull<u8>, HandshakeError>,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        let regions = &self.regions;
        let attached = self.peers.get_mut(usize::from(peer.0)).and_then(Option::as_mut);
        attached.ok_or(AttachError::UnknownPeer)?.import(key, len, |remote, kind| {
            match (remote, kind) {
                (None, _) => match regions.find(key.key, peer) {
                    Some((ptr, size)) if len <= size => Ok(Some(ptr)),
                    Some(_) => Err(AttachError::BadRange),
                    None => Err(AttachError::UnknownRegion),
                },
                (Some(_), KeyKind::Private) => Ok(None),
                (Some(remote), KeyKind::Shared(number)) => {
                    Ok(Some(map(&mut remote.control, number)?))
                }
                (Some(remote), KeyKind::Common(pair)) => {
                    Ok(Some(remote.in_common(pair, key.base, len)?))
                }
            }
        })
    }
}
