//! Memory of a node and of its peers.
//!
//! Peers may write a node's memory at any time, so the node never lends it as a slice. Access to
//! freed memory, or to memory of a failed peer, returns an error.

use std::ops::{Bound, RangeBounds};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use fishplate_core::engine::HANDLE_MAX;
use fishplate_core::error::{AttachError, OpError};
use fishplate_core::mem::{
    LocalAddr, LocalId, PeerId, Region, RegionKind, RemoteAddr, RemoteId, copy_bytes,
};
use fishplate_core::op::{look_at_signal, set_signal};
use fishplate_core::sync::host::Host;
use fishplate_shm::Segment;

use super::{Driver, Error, Node, behind};

/// Registered memory of a node, by id. Valid until it is [freed](Node::free).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub(super) id: LocalId,
    pub(super) len: usize,
}

/// A range of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    pub(super) at: LocalAddr,
    pub(super) len: usize,
}

impl Slice {
    /// Returns the slice of `len` bytes at an address. Bounds are checked when the slice is used.
    #[inline(always)]
    pub const fn new(at: LocalAddr, len: usize) -> Slice {
        Slice { at, len }
    }
}

/// Imported memory of a peer, by id. Valid until it is [released](Node::release), or its peer is
/// removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    id: RemoteId,
}

impl Memory {
    /// Returns the address `offset` bytes from the start.
    #[inline(always)]
    pub fn at(self, offset: u64) -> LocalAddr {
        self.id.at(offset)
    }

    /// Returns a range, in bytes from the start. Bounds are checked when the range is used.
    #[inline(always)]
    pub fn slice(self, range: impl RangeBounds<usize>) -> Slice {
        let start = match range.start_bound() {
            Bound::Included(&start) => start,
            Bound::Excluded(&start) => start.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(&end) => end.saturating_add(1),
            Bound::Excluded(&end) => end,
            Bound::Unbounded => self.len,
        };
        Slice { at: self.id.at(start as u64), len: end.saturating_sub(start) }
    }

    /// Returns the size in bytes.
    pub fn len(self) -> usize {
        self.len
    }

    /// Returns whether the memory is empty.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }
}

impl Remote {
    /// Returns the address `offset` bytes from the start.
    #[inline(always)]
    pub fn at(self, offset: u64) -> RemoteAddr {
        self.id.at(offset)
    }
}

impl Node {
    /// Allocates `len` bytes of zeroed memory that peers on this host can map and NICs can reach.
    /// Slow path: allocates, makes system calls.
    ///
    /// # Errors
    /// There is too little memory, or too few regions are left ([`Error::Full`]). Long messages
    /// from and into slices also use regions.
    pub fn alloc(&mut self, len: usize) -> Result<Memory, Error> {
        behind!(self, |node| node.alloc(len));
        self.alloc_with(len, |region| region)
    }

    /// Like [`alloc`](Self::alloc), but a libfabric rail executes the atomics on this memory, in
    /// hardware if its NIC can. That rail is the first in [`rails`](Self::rails) that has atomics.
    ///
    /// The processor's atomics and those of a rail do not mix. So signals, waits and injected bytes
    /// are refused on these words, and so are atomics of this node and of peers on its host.
    /// [`load`](Self::load) reads a word. Do not store to a word that peers use.
    ///
    /// Each atomic of a stream waits for the previous atomic. A peer with several atomics in flight
    /// is faster with memory from `alloc`.
    ///
    /// # Errors
    /// The same as [`alloc`](Self::alloc); or [`AttachError::Unsupported`] if no rail executes
    /// atomics, or [`Settings::native_atomics`](crate::config::Settings::native_atomics) is off.
    pub fn alloc_native_atomics(&mut self, len: usize) -> Result<Memory, Error> {
        behind!(self, |node| node.alloc_native_atomics(len));
        self.alloc_with(len, Region::with_native_atomics)
    }

    fn alloc_with(
        &mut self,
        len: usize,
        kind: impl FnOnce(Region) -> Region,
    ) -> Result<Memory, Error> {
        let segment = Segment::create(len).map_err(AttachError::from)?;
        // SAFETY: `segments` keeps the segment until the region is deregistered, or for ever if a
        // provider keeps it. The node lends no reference into it.
        let region = unsafe { segment.region(0, len) }.map_err(AttachError::from)?;
        let id = self.registered(kind(region))?;
        self.segments.push((id, segment));
        Ok(Memory { id, len })
    }

    /// Returns the segment of memory from [`alloc`](Self::alloc), for bindings that lend such
    /// memory to programs. The pages stay mapped as long as the [`Segment`] lives, even if the
    /// memory is freed or the node is dropped.
    ///
    /// # Errors
    /// The memory was freed, or is not from `alloc`.
    pub fn segment(&self, memory: Memory) -> Result<Segment, Error> {
        behind!(self, |node| node.segment(memory));
        let known = self.segments.iter().find(|(id, _)| *id == memory.id);
        known.map(|(_, segment)| segment.clone()).ok_or(AttachError::UnknownRegion.into())
    }

    /// Registers memory that the program owns. Peers of this host access it through the kernel,
    /// which is slower than memory from [`alloc`](Self::alloc). Slow path.
    ///
    /// # Errors
    /// The same as [`alloc`](Self::alloc); or the memory is not aligned to 8 bytes.
    ///
    /// # Safety
    /// The same as for [`Region::new`], until the memory was [freed](Self::free) without an error,
    /// or the node was dropped. If freeing it returns [`AttachError::Kept`], the memory must stay
    /// valid for ever.
    ///
    /// Peers of this host write the memory through the kernel, without this node. So it also stays
    /// valid until each peer that imported it has [released](Self::release) it, or has failed.
    pub unsafe fn register(&mut self, start: NonNull<u8>, len: usize) -> Result<Memory, Error> {
        // SAFETY: our caller guarantees the same contract.
        let region = unsafe { Region::new(start, len, RegionKind::Private) };
        Ok(Memory { id: self.registered(region)?, len })
    }

    pub(super) fn registered(&mut self, region: Region) -> Result<LocalId, Error> {
        behind!(self, |node| node.registered(region));
        loop {
            match self.home.engine.register(region) {
                // Frees a copy that is cached for messages, and retries.
                Err(AttachError::Full(_)) if self.drop_kept_copy() => {}
                registered => {
                    let locals = self.builder.limits.locals;
                    return registered.map_err(|error| Error::of(error, "locals", locals));
                }
            }
        }
    }

    /// Frees memory. Slow path.
    ///
    /// # Errors
    /// [`AttachError::InUse`] names the operation that still uses the memory. The memory then stays
    /// registered. [`AttachError::Kept`]: a provider still holds the memory. Memory of
    /// [`register`](Self::register) must then never be reused. [`AttachError::UnknownRegion`]: the
    /// memory was freed before.
    pub fn free(&mut self, memory: Memory) -> Result<(), Error> {
        behind!(self, |node| node.free(memory));
        let freed = self.home.engine.deregister(memory.id);
        let at = self.segments.iter().position(|(id, _)| *id == memory.id);
        match freed {
            Err(AttachError::InUse(_) | AttachError::UnknownRegion) => {}
            Err(AttachError::Kept(_)) => {
                self.forget_on_device(memory.id, true);
                if let Some(at) = at {
                    std::mem::forget(self.segments.swap_remove(at));
                }
            }
            _ => {
                self.forget_on_device(memory.id, false);
                if let Some(at) = at {
                    self.segments.swap_remove(at);
                }
            }
        }
        Ok(freed?)
    }

    /// Returns the handle that peers [import](Self::import), at most 512 bytes.
    ///
    /// # Errors
    /// The memory was freed.
    pub fn handle(&self, memory: Memory) -> Result<Vec<u8>, Error> {
        behind!(self, |node| node.handle(memory));
        let mut bytes = [0; HANDLE_MAX];
        let len = self.home.engine.export(memory.id, &mut bytes)?;
        Ok(bytes[..len].to_vec())
    }

    /// Imports memory of a peer by its handle. Waits until the peer is connected and has announced
    /// the memory, for at most [`Builder::connect_timeout`](super::Builder::connect_timeout). Makes
    /// progress meanwhile. Slow path.
    ///
    /// # Errors
    /// [`Error::NotConnected`]; [`OpError::PeerFailed`]; [`AttachError::Unheard`] if the peer has
    /// freed this allocated memory or makes no progress; the handle is invalid;
    /// [`Error::NoGpuRail`] if no rail and no message can carry this device memory; or
    /// [`Error::Full`].
    pub fn import(&mut self, peer: PeerId, handle: impl AsRef<[u8]>) -> Result<Remote, Error> {
        behind!(self, |node| node.import(peer, handle));
        let deadline_ns = self.deadline_ns(self.builder.connect_timeout);
        self.connected_by(peer, deadline_ns)?;
        let remotes = self.builder.limits.remotes;
        loop {
            let error = match self.home.engine.import(peer, handle.as_ref()) {
                Ok(id) => return Ok(Remote { id }),
                Err(error) => error,
            };
            if error != AttachError::Unheard || self.home.host().now_ns() >= deadline_ns {
                return Err(match error {
                    AttachError::Unsupported => Error::NoGpuRail(peer),
                    // The engine imports from no failed peer, and does not say why it failed.
                    AttachError::UnknownPeer | AttachError::Unattached(_) => {
                        self.home.engine.check_peers();
                        match self.home.engine.peer_error(peer) {
                            Ok(Some(failure)) => Error::Op(OpError::PeerFailed(failure)),
                            _ => error.into(),
                        }
                    }
                    error => Error::of(error, "remotes", remotes),
                });
            }
            self.serve();
        }
    }

    /// Releases imported memory. Slow path.
    ///
    /// # Errors
    /// Operations in flight still use the memory, or it was released before.
    pub fn release(&mut self, memory: Remote) -> Result<(), Error> {
        behind!(self, |node| node.release(memory));
        Ok(self.home.engine.release(memory.id)?)
    }

    /// Returns whether the bytes of imported device memory travel through host memory, because no
    /// rail reaches the device memory. With failover, also returns `true` if only some rails reach
    /// it. Returns `false` if the memory was released.
    pub fn is_carried(&self, memory: Remote) -> bool {
        if let Driver::Worker(worker) = &self.driver {
            return worker.call(|node| node.is_carried(memory)).unwrap_or(false);
        }
        self.home.engine.is_carried(memory.id)
    }

    /// Returns the address of imported memory in this process, if it is mapped. Memory that a peer
    /// on this host got from its [`alloc`](Self::alloc) is mapped. `None`: the memory is not
    /// mapped, or the range does not lie in its region. The memory stays mapped until it is
    /// [released](Self::release) or its peer is removed.
    ///
    /// Accesses through the pointer are not ordered with operations of the node. The peer may use
    /// the memory at any time, so use only atomics and raw copies.
    #[doc(alias = "shmem_ptr")]
    pub fn remote_ptr(&self, at: RemoteAddr, len: usize) -> Option<NonNull<u8>> {
        if let Driver::Worker(worker) = &self.driver {
            return worker.call(|node| node.remote_ptr(at, len)).ok().flatten();
        }
        self.home.engine.remote_ptr(at, len)
    }

    /// Copies bytes into memory of this node. A peer that reads at the same time may see some of
    /// the bytes.
    ///
    /// # Errors
    /// The range is not inside its region, or the region was freed.
    pub fn write(&mut self, at: LocalAddr, bytes: &[u8]) -> Result<(), Error> {
        let place = match self.home.engine.local_ptr(at, bytes.len()) {
            Ok(place) => place,
            Err(error) => return self.else_behind(error, |node| node.write(at, bytes)),
        };
        // SAFETY: `place` is valid for `bytes.len()` bytes, and no Rust reference to them exists.
        unsafe { copy_bytes(bytes.as_ptr(), place.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes out of memory of this node. If peers write at the same time, old and new bytes
    /// may be mixed.
    ///
    /// # Errors
    /// The same as [`write`](Self::write).
    pub fn read(&self, at: LocalAddr, into: &mut [u8]) -> Result<(), Error> {
        let place = match self.home.engine.local_ptr(at, into.len()) {
            Ok(place) => place,
            Err(error) => return self.else_behind(error, |node| node.read(at, into)),
        };
        // SAFETY: `place` is valid for `into.len()` bytes, and no Rust reference to them exists.
        // `into` is exclusive.
        unsafe { copy_bytes(place.as_ptr(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Loads a 64-bit word with acquire ordering. If a signal wrote the word, all data sent before
    /// that signal is visible.
    ///
    /// # Errors
    /// The same as [`write`](Self::write), or the address is not a multiple of 8.
    pub fn load(&self, at: LocalAddr) -> Result<u64, Error> {
        match self.word(at) {
            Ok(word) => Ok(look_at_signal(word)),
            Err(error) => self.else_behind(error, |node| node.load(at)),
        }
    }

    /// Stores a 64-bit word with release ordering.
    ///
    /// # Errors
    /// The same as [`load`](Self::load).
    pub fn store(&mut self, at: LocalAddr, value: u64) -> Result<(), Error> {
        match self.word(at) {
            Ok(word) => {
                set_signal(word, value);
                Ok(())
            }
            Err(error) => self.else_behind(error, |node| node.store(at, value)),
        }
    }

    #[inline]
    pub(super) fn word(&self, at: LocalAddr) -> Result<&AtomicU64, Error> {
        if !at.offset.is_multiple_of(8) {
            return Err(OpError::Misaligned { offset: at.offset, width: 8 }.into());
        }
        let place = self.home.engine.local_ptr(at, 8)?;
        // SAFETY: the word lies in a region that exists while `self` is borrowed. It is aligned,
        // because regions are aligned to 8. It is accessed only by atomics and raw copies.
        Ok(unsafe { place.cast::<AtomicU64>().as_ref() })
    }
}
