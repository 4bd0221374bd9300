//! The tables of an engine: its peers, its registered memory and its imported memory. Also the
//! handles of exported regions.

use core::ptr::{self, NonNull};

use crate::bytes::Reader;
use crate::error::{AttachError, OpError, PeerError};
use crate::mem::{LocalAddr, LocalId, PeerId, Region, RegionKind, RemoteAddr, RemoteId, Zeroable};
use crate::rail::RailKey;

use super::joint::{Pairing, RAILS_MAX};

/// The maximum length of a region's handle, in bytes.
pub const HANDLE_MAX: usize = 512;

/// The version of the handle format.
pub const HANDLE_VERSION: u16 = 5;

const HANDLE_MAGIC: u16 = u16::from_le_bytes(*b"FP");
const HANDLE_HEAD: usize = 24;

/// Returns the length of the handle of a region on `rails` rails, in bytes.
pub const fn handle_len(rails: usize) -> usize {
    HANDLE_HEAD + 16 * rails
}

const _: () = assert!(handle_len(RAILS_MAX) <= HANDLE_MAX);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerState {
    Free,
    Reserved,
    /// Connected, but nothing is sent until the other side has answered.
    Meeting,
    Connected,
    /// Rejects new operations. The other side may not have answered yet, as in `Meeting`.
    Closing,
    Failed(PeerError),
}

impl PeerState {
    #[inline]
    pub(crate) fn is_up(self) -> bool {
        matches!(self, PeerState::Connected | PeerState::Meeting | PeerState::Closing)
    }
}

/// One peer.
#[derive(Clone, Copy, Debug)]
pub struct PeerSlot {
    pub(crate) state: PeerState,
    pub(crate) generation: u16,
    /// Bit i is set if rail i reaches the peer.
    pub(crate) rails: u16,
    /// The rail at which the next choice of a rail begins.
    pub(crate) turn: u8,
    pub(crate) ready: bool,
}

const _: () =
    assert!(size_of::<PeerSlot>() == 8, "a slot must have 8 bytes, so that indexing is a shift");

impl PeerSlot {
    /// A slot without a peer.
    pub const EMPTY: PeerSlot =
        PeerSlot { state: PeerState::Free, generation: 0, rails: 0, turn: 0, ready: false };

    #[inline]
    pub(crate) fn usable(&self) -> Result<(), OpError> {
        match self.state {
            PeerState::Closing => Err(OpError::PeerFailed(PeerError::Closed)),
            PeerState::Connected | PeerState::Meeting => Ok(()),
            PeerState::Failed(why) => Err(OpError::PeerFailed(why)),
            PeerState::Free | PeerState::Reserved => Err(OpError::UnknownPeer),
        }
    }
}

/// One registered region. The slot takes at least a cache line, so that indexing is a shift.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub struct LocalSlot<const RAILS: usize> {
    /// The start of the region, or null if the slot is free.
    pub(crate) ptr: *mut u8,
    /// Number of bytes that the processor may access. 0 if only rails access the memory, so that
    /// every bounds check rejects it.
    pub(crate) len: u64,
    /// Number of bytes that only rails access: device memory, or memory with native atomics.
    /// Otherwise 0.
    pub(crate) device: u64,
    /// The generation of the slot. If the slot is taken, the upper half is
    /// [`Config::owner`](super::Config::owner).
    pub(crate) generation: u32,
    /// The rail that executes atomics in the region, or [`NO_RAIL`].
    pub(crate) native: u8,
    /// The peer with which the region's segment is shared, or [`LocalSlot::OURS`].
    pub(crate) common: u16,
    pub(crate) keys: [RailKey; RAILS],
    pub(crate) desc: [u64; RAILS],
}

// SAFETY: `Region::new` requires that any thread of the process may access the memory.
unsafe impl<const RAILS: usize> Send for LocalSlot<RAILS> {}

impl<const RAILS: usize> LocalSlot<RAILS> {
    /// The value of `common` if the region is not in a segment that is shared with one peer. No
    /// peer has this number.
    pub(crate) const OURS: u16 = u16::MAX;

    /// A slot without a region.
    pub const EMPTY: Self = LocalSlot {
        ptr: ptr::null_mut(),
        len: 0,
        device: 0,
        generation: 0,
        native: NO_RAIL,
        common: Self::OURS,
        keys: [RailKey { key: 0, base: 0 }; RAILS],
        desc: [0; RAILS],
    };

    #[inline]
    pub(crate) fn is_device(&self) -> bool {
        self.device != 0 && self.native == NO_RAIL
    }

    /// Returns whether an import maps into this region, as an import of the process's own memory
    /// does.
    pub(crate) fn holds(&self, remote: &RemoteSlot<RAILS>) -> bool {
        let (start, mapped) = (self.ptr.addr() as u64, remote.mapped.addr() as u64);
        mapped != 0
            && start < mapped.saturating_add(remote.len)
            && mapped < start.saturating_add(self.len)
    }
}

/// One imported region. The slot takes at least a cache line, so that indexing is a shift.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub struct RemoteSlot<const RAILS: usize> {
    /// Where the region is mapped here, or null.
    pub(crate) mapped: *mut u8,
    /// Number of bytes that the processor may access. 0 if only rails access the memory.
    pub(crate) len: u64,
    /// Number of bytes that only rails access. Otherwise 0.
    pub(crate) device: u64,
    /// Whether the slot is taken. In a free slot only `generation` has a meaning.
    pub(crate) taken: bool,
    pub(crate) peer: u16,
    pub(crate) generation: u32,
    /// The number and generation of the region at its owner.
    pub(crate) theirs: (u16, u16),
    /// The rail that mapped the region, or the lowest rail to the owner.
    pub(crate) rail: u8,
    /// Our rail that executes atomics in the region, or [`UNREACHED`], or [`NO_RAIL`].
    pub(crate) native: u8,
    /// Whether the region was imported to read messages, not by the user.
    pub(crate) auto: bool,
    /// Whether the bytes travel in messages (see `carried`).
    pub(crate) carried: bool,
    /// Whether the memory is device memory. Unlike `device`, this stays while the peer closes.
    pub(crate) on_device: bool,
    /// Number of pieces for this memory that its owner keeps per stream. 0 if it takes none.
    pub(crate) pieces: u8,
    /// Number of reads in flight, if `auto` is set.
    pub(crate) uses: u32,
    pub(crate) keys: [RailKey; RAILS],
}

// SAFETY: a mapping belongs to the process, not to a thread. Only raw copies and atomics access it.
unsafe impl<const RAILS: usize> Send for RemoteSlot<RAILS> {}

// SAFETY: zeroed memory is a valid value, because all fields are numbers, flags and raw pointers.
unsafe impl<const RAILS: usize> Zeroable for RemoteSlot<RAILS> {}

impl<const RAILS: usize> RemoteSlot<RAILS> {
    /// A slot without a region.
    pub const EMPTY: Self = RemoteSlot {
        mapped: ptr::null_mut(),
        len: 0,
        device: 0,
        taken: false,
        peer: 0,
        generation: 0,
        theirs: (0, 0),
        rail: 0,
        native: NO_RAIL,
        auto: false,
        carried: false,
        on_device: false,
        pieces: 0,
        uses: 0,
        keys: [RailKey { key: 0, base: 0 }; RAILS],
    };

    pub(crate) fn is_of(&self, peer: u16) -> bool {
        self.taken && self.peer == peer
    }

    /// Returns whether this was imported to read messages from a region of a peer.
    pub(crate) fn reads(&self, peer: u16, theirs: (u16, u16), len: u64) -> bool {
        self.auto && self.peer == peer && self.theirs == theirs && self.len == len
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.auto && self.uses == 0
    }
}

/// The value in place of a rail if the processor executes atomics.
pub(crate) const NO_RAIL: u8 = u8::MAX;

/// The value in place of a rail if a rail of the owner executes atomics and no rail here leads to
/// it.
pub(crate) const UNREACHED: u8 = u8::MAX - 1;

#[inline(always)]
pub(crate) fn in_bounds(offset: u64, len: u64, size: u64) -> bool {
    len <= size && offset <= size - len
}

#[cold]
fn untouchable(offset: u64, len: u64, size: u64, device: u64, native: u8) -> OpError {
    if device != 0 && in_bounds(offset, len, device) {
        return if native == NO_RAIL { OpError::DeviceMemory } else { OpError::NativeAtomics };
    }
    if size == 0 && device == 0 {
        // Closing a peer sets the length of its regions to 0.
        return OpError::PeerFailed(PeerError::Closed);
    }
    OpError::OutOfBounds { offset, len, size: size.max(device) }
}

#[inline(always)]
pub(crate) fn resolve_local<const RAILS: usize>(
    locals: &[LocalSlot<RAILS>],
    addr: LocalAddr,
    len: u64,
) -> Result<NonNull<u8>, OpError> {
    let slot = locals.get(addr.region.index()).ok_or(OpError::UnknownRegion)?;
    let base = match NonNull::new(slot.ptr) {
        Some(base) if slot.generation == addr.region.generation() => base,
        _ => return Err(OpError::UnknownRegion),
    };
    if !in_bounds(addr.offset, len, slot.len) {
        return Err(untouchable(addr.offset, len, slot.len, slot.device, slot.native));
    }
    // SAFETY: the bounds check above passed, so the offset is at most the length of the region. The
    // pointer stays within the region, or one past its end.
    Ok(unsafe { base.add(addr.offset as usize) })
}

#[inline(always)]
pub(crate) fn resolve_remote<const RAILS: usize>(
    remotes: &[RemoteSlot<RAILS>],
    addr: RemoteAddr,
    len: u64,
) -> Result<&RemoteSlot<RAILS>, OpError> {
    let slot = remotes.get(addr.region.index()).ok_or(OpError::UnknownRegion)?;
    if slot.generation != addr.region.generation() || !slot.taken {
        return Err(OpError::UnknownRegion);
    }
    if !in_bounds(addr.offset, len, slot.len) {
        return Err(untouchable(addr.offset, len, slot.len, slot.device, slot.native));
    }
    Ok(slot)
}

/// Returns `true` for memory that only rails access.
#[cold]
pub(crate) fn locate<const RAILS: usize>(
    locals: &[LocalSlot<RAILS>],
    addr: LocalAddr,
    len: u64,
) -> Result<(NonNull<u8>, bool), OpError> {
    match resolve_local(locals, addr, len) {
        Err(OpError::DeviceMemory | OpError::NativeAtomics) => {
            let slot = locals.get(addr.region.index()).ok_or(OpError::UnknownRegion)?;
            let place = slot.ptr.wrapping_add(addr.offset as usize);
            NonNull::new(place).map(|place| (place, true)).ok_or(OpError::UnknownRegion)
        }
        resolved => resolved.map(|place| (place, false)),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Plain,
    /// Only rails, because the region is device memory. Has the number of pieces that the owner
    /// keeps per stream.
    Device(u8),
    /// Only rails, because one of them executes atomics. In an encoded handle this is the owner's
    /// number of that rail. In a decoded handle it is our number for that rail, or [`UNREACHED`].
    Native(u8),
}

impl Access {
    fn code(self) -> u32 {
        match self {
            Access::Plain => 0,
            Access::Device(pieces) => 1 | (pieces as u32) << 8,
            Access::Native(rail) => 2 + rail as u32,
        }
    }

    fn of(code: u32) -> Option<Access> {
        match (code, code as u8) {
            (0, _) => Some(Access::Plain),
            (_, 1) => u8::try_from(code >> 8).ok().map(Access::Device),
            _ => u8::try_from(code.checked_sub(2)?).ok().map(Access::Native),
        }
    }
}

/// The keys are in the order of our rails to the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle<const RAILS: usize> {
    pub theirs: (u16, u16),
    pub len: u64,
    pub access: Access,
    pub keys: [RailKey; RAILS],
}

impl<const RAILS: usize> Handle<RAILS> {
    pub(crate) fn encode(&self, rails: usize, out: &mut [u8]) -> Result<usize, AttachError> {
        let len = handle_len(rails);
        let short = AttachError::BufferTooShort { len: out.len(), least: len };
        let out = out.get_mut(..len).ok_or(short)?;
        out[0..2].copy_from_slice(&HANDLE_MAGIC.to_le_bytes());
        out[2..4].copy_from_slice(&HANDLE_VERSION.to_le_bytes());
        out[4..6].copy_from_slice(&self.theirs.0.to_le_bytes());
        out[6..8].copy_from_slice(&self.theirs.1.to_le_bytes());
        out[8..16].copy_from_slice(&self.len.to_le_bytes());
        out[16..20].copy_from_slice(&(rails as u32).to_le_bytes());
        out[20..24].copy_from_slice(&self.access.code().to_le_bytes());
        for (key, at) in self.keys.iter().zip(out[HANDLE_HEAD..].chunks_exact_mut(16)) {
            at[..8].copy_from_slice(&key.key.to_le_bytes());
            at[8..].copy_from_slice(&key.base.to_le_bytes());
        }
        Ok(len)
    }

    /// Decodes a peer's handle. `rails` is the bitmask of our rails that reach the peer. Ignores
    /// trailing bytes.
    pub(crate) fn decode(bytes: &[u8], pairing: &Pairing, rails: u16) -> Result<Self, AttachError> {
        let mut fields = Reader::new(bytes);
        if fields.u16()? != HANDLE_MAGIC {
            return Err(AttachError::BadHandle);
        }
        let theirs = fields.u16()?;
        if theirs != HANDLE_VERSION {
            return Err(AttachError::Version { theirs, ours: HANDLE_VERSION });
        }
        let (theirs, len) = ((fields.u16()?, fields.u16()?), fields.u64()?);
        let (count, access) = (fields.u32()? as usize, fields.u32()?);
        if !(1..=RAILS_MAX).contains(&count) {
            return Err(AttachError::BadHandle);
        }
        let access = Access::of(access).ok_or(AttachError::BadHandle)?;
        let mut list = [RailKey::default(); RAILS_MAX];
        for key in &mut list[..count] {
            *key = RailKey { key: fields.u64()?, base: fields.u64()? };
        }
        if len == 0 {
            return Err(AttachError::BadRange);
        }
        let keys = pairing.in_our_order(rails, |rail| list[..count].get(rail).copied());
        let keys = keys.ok_or(AttachError::BadHandle)?;
        let access = match access {
            Access::Native(rail) if (rail as usize) < count => {
                let ours = pairing.as_ours(1 << rail) & rails;
                Access::Native(if ours == 0 { UNREACHED } else { ours.trailing_zeros() as u8 })
            }
            Access::Native(_) => return Err(AttachError::BadHandle),
            access => access,
        };
        Ok(Handle { theirs, len, access, keys })
    }
}

/// Checks that memory lent at setup has at least `least` entries. `what` names the field and the
/// formula of its length.
pub(crate) fn lent(what: &'static str, len: usize, least: usize) -> Result<(), AttachError> {
    if len >= least { Ok(()) } else { Err(AttachError::Memory { what, len, least }) }
}

pub(crate) fn reserve_peer(peers: &mut [PeerSlot]) -> Result<PeerId, AttachError> {
    let index = peers
        .iter()
        .position(|p| p.state == PeerState::Free)
        .ok_or(AttachError::Full("memory.peers"))?;
    peers[index].state = PeerState::Reserved;
    Ok(PeerId { index: index as u16, generation: peers[index].generation })
}

/// A region must not be empty, and must be inside the address space. It must be aligned to 8 bytes
/// if it may hold signals and atomics.
pub(crate) fn check_region(region: &Region) -> Result<(), AttachError> {
    let start = region.ptr().as_ptr() as usize;
    if region.is_empty()
        || region.len() > isize::MAX as usize
        || start.checked_add(region.len()).is_none()
    {
        return Err(AttachError::BadRange);
    }
    if !start.is_multiple_of(8) && !matches!(region.kind(), RegionKind::Device { .. }) {
        return Err(AttachError::Misaligned);
    }
    Ok(())
}

pub(crate) fn free_local<const RAILS: usize>(
    locals: &[LocalSlot<RAILS>],
    owner: u16,
) -> Result<LocalId, AttachError> {
    let index =
        locals.iter().position(|l| l.ptr.is_null()).ok_or(AttachError::Full("memory.locals"))?;
    Ok(LocalId::new(index as u32, owned(locals[index].generation, owner)))
}

fn owned(generation: u32, owner: u16) -> u32 {
    (owner as u32) << 16 | generation & 0xffff
}

pub(crate) fn free_remote<const RAILS: usize>(
    remotes: &[RemoteSlot<RAILS>],
    owner: u16,
) -> Result<RemoteId, AttachError> {
    let index = remotes
        .iter()
        .position(|remote| !remote.taken)
        .ok_or(AttachError::Full("memory.remotes"))?;
    Ok(RemoteId::new(index as u32, owned(remotes[index].generation, owner)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(k: u64) -> RailKey {
        RailKey { key: k, base: !k }
    }

    fn decode<const RAILS: usize>(bytes: &[u8], rails: u16) -> Result<Handle<RAILS>, AttachError> {
        Handle::decode(bytes, &Pairing::ALIKE, rails)
    }

    fn handle() -> Handle<3> {
        let keys = [1u64, 2, u64::MAX].map(key);
        Handle { theirs: (9, 65535), len: 1 << 40, access: Access::Plain, keys }
    }

    #[test]
    fn a_handle_comes_back_and_its_tail_is_ignored() {
        let mut bytes = [0xaa; HANDLE_MAX];
        let len = handle().encode(3, &mut bytes).unwrap();
        assert_eq!(len, handle_len(3));
        assert_eq!(decode::<3>(&bytes, 0b111), Ok(handle()));
        assert_eq!(decode::<3>(&bytes[..len], 0b111), Ok(handle()));
        for access in [Access::Device(0), Access::Device(255), Access::Native(0), Access::Native(2)]
        {
            let other = Handle { access, ..handle() };
            other.encode(3, &mut bytes).unwrap();
            assert_eq!(decode::<3>(&bytes, 0b111), Ok(other));
        }
        // Our rails do not reach the rail that executes atomics.
        let reached = decode::<3>(&bytes, 0b011).map(|handle| handle.access);
        assert_eq!(reached, Ok(Access::Native(UNREACHED)));
        for code in [2 + 3, 2 + 254, 1 << 16 | 1, u32::MAX] {
            bytes[20..24].copy_from_slice(&code.to_le_bytes());
            assert_eq!(decode::<3>(&bytes, 0b111), Err(AttachError::BadHandle));
        }
    }

    #[test]
    fn a_device_s_memory_is_located_and_never_resolved() {
        let mut locals = [LocalSlot::<1>::EMPTY; 2];
        locals[1] =
            LocalSlot { ptr: ptr::without_provenance_mut(0x7000), device: 64, ..LocalSlot::EMPTY };
        let at = |offset| LocalId::new(1, 0).at(offset);
        assert_eq!(resolve_local(&locals, at(8), 8), Err(OpError::DeviceMemory));
        assert_eq!(resolve_local(&locals, at(64), 0), Err(OpError::DeviceMemory));
        let outside = OpError::OutOfBounds { offset: 60, len: 8, size: 64 };
        assert_eq!(resolve_local(&locals, at(60), 8), Err(outside));
        assert_eq!(locate(&locals, at(60), 8), Err(outside));
        let (place, device) = locate(&locals, at(56), 8).unwrap();
        assert_eq!((place.as_ptr() as usize, device), (0x7038, true));
    }

    #[test]
    fn a_handle_cut_short_or_of_another_kind_is_refused() {
        let mut bytes = [0; HANDLE_MAX];
        let len = handle().encode(3, &mut bytes).unwrap();
        for cut in 0..len {
            assert_eq!(
                decode::<3>(&bytes[..cut], 0b111),
                Err(AttachError::BadHandle),
                "cut to {cut}"
            );
        }
        // The two sides may have different numbers of rails. Every rail that joins them has a key.
        assert_eq!(decode::<2>(&bytes, 0b11).map(|handle| handle.keys), Ok([1, 2].map(key)));
        assert_eq!(decode::<16>(&bytes, 0b100).map(|handle| handle.keys[2]), Ok(key(u64::MAX)));
        assert_eq!(decode::<16>(&bytes, 0b1001), Err(AttachError::BadHandle));
        for count in [0, 17, u32::MAX] {
            let mut bad = bytes;
            bad[16..20].copy_from_slice(&count.to_le_bytes());
            assert_eq!(decode::<16>(&bad, 1), Err(AttachError::BadHandle), "{count} rails");
        }
        bytes[16] = 4;
        assert_eq!(decode::<3>(&bytes[..len], 1), Err(AttachError::BadHandle), "one key too many");
        bytes[2] = 9;
        assert_eq!(
            decode::<3>(&bytes, 0b111),
            Err(AttachError::Version { theirs: 9, ours: HANDLE_VERSION })
        );
        bytes[0] = 0;
        assert_eq!(decode::<3>(&bytes, 0b111), Err(AttachError::BadHandle));
        let short = AttachError::BufferTooShort { len: len - 1, least: len };
        assert_eq!(handle().encode(3, &mut bytes[..len - 1]), Err(short));
    }

    #[test]
    fn bounds_do_not_overflow() {
        assert!(in_bounds(0, 8, 8));
        assert!(in_bounds(8, 0, 8));
        assert!(!in_bounds(1, 8, 8));
        assert!(!in_bounds(u64::MAX, 2, 8));
        assert!(!in_bounds(2, u64::MAX, 8));
        assert!(!in_bounds(u64::MAX, u64::MAX, u64::MAX));
    }
}
