//! A rail on which every peer is this process itself. For tests, and to measure the engine alone.
//!
//! Never blocks, allocates or makes system calls; its memory is inside the value. Events arrive in
//! posting order. Wrap the rail in [`Faulty`](super::faulty::Faulty) for disorder.

use core::ptr::{self, NonNull};

use super::{Caps, Fence, Local, Order, Posted, REOPEN_MAX, Rail, RailKey, Remote, Sink};
use crate::error::{AttachError, PostError};
use crate::mem::{Peer, Region, RegionKind, Untrusted};
use crate::op::{Amo, AmoSet};

const MESSAGE: usize = 256;

const RMA: usize = 1 << 30;

const REGIONS: usize = 16;

/// A registration: the region's address, whether an import maps it, and how often this slot has
/// been used. The use count is part of the key.
#[derive(Clone, Copy)]
struct Registered {
    memory: Option<(NonNull<u8>, usize)>,
    mapped: bool,
    uses: u64,
}

impl Registered {
    fn key(&self, index: usize) -> u64 {
        (self.uses << 8) | (index as u64 + 1)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Maps {
    None,
    Shared,
    All,
}

#[derive(Clone, Copy)]
enum Event {
    Landed(u32),
    Message(u16),
    Done(u64),
    /// The event was dropped, because its peer was detached.
    Gone,
}

#[derive(Clone, Copy)]
struct Slot {
    peer: Peer,
    event: Event,
    bytes: [u8; MESSAGE],
}

/// A rail to this process itself that can queue `DEPTH` events, a power of two.
pub struct Loopback<const DEPTH: usize> {
    slots: [Slot; DEPTH],
    head: u32,
    tail: u32,
    regions: [Registered; REGIONS],
    maps: Maps,
    native_atomics: AmoSet,
}

// SAFETY: the pointers lead to registered memory. The creator of a `Region` guarantees that any
// thread may access it.
unsafe impl<const DEPTH: usize> Send for Loopback<DEPTH> {}

impl<const DEPTH: usize> Loopback<DEPTH> {
    const MASK: u32 = {
        assert!(
            DEPTH.is_power_of_two() && DEPTH >= 4 && DEPTH <= 1 << 16,
            "DEPTH is a power of two from 4 to 65536"
        );
        DEPTH as u32 - 1
    };

    /// Creates a rail that behaves like a network: every operation passes through its queue.
    pub const fn new() -> Self {
        let slot = Slot { peer: Peer(0), event: Event::Done(0), bytes: [0; MESSAGE] };
        let regions = [Registered { memory: None, mapped: false, uses: 0 }; REGIONS];
        Loopback {
            slots: [slot; DEPTH],
            head: 0,
            tail: 0,
            regions,
            maps: Maps::None,
            native_atomics: AmoSet::NONE,
        }
    }

    /// Creates a rail that behaves like shared memory: imported regions are mapped.
    pub const fn mapped() -> Self {
        Loopback { maps: Maps::All, ..Self::new() }
    }

    /// Creates a rail that maps regions registered as [`RegionKind::Shared`] or
    /// [`RegionKind::Common`], and behaves like a network for all other regions.
    pub const fn mapped_where_shared() -> Self {
        Loopback { maps: Maps::Shared, ..Self::new() }
    }

    /// Adds [`Rail::post_atomic`] to this rail.
    pub const fn with_native_atomics(self) -> Self {
        Loopback { native_atomics: AmoSet::ALL, ..self }
    }

    #[inline(always)]
    fn room(&self, events: u32) -> Result<(), PostError> {
        if self.tail.wrapping_sub(self.head) + events > DEPTH as u32 {
            Err(PostError::Again)
        } else {
            Ok(())
        }
    }

    #[inline(always)]
    fn push(&mut self, peer: Peer, event: Event) -> &mut [u8; MESSAGE] {
        let slot = &mut self.slots[(self.tail & Self::MASK) as usize];
        slot.peer = peer;
        slot.event = event;
        self.tail = self.tail.wrapping_add(1);
        &mut slot.bytes
    }

    #[inline(always)]
    fn registered(&self, key: RailKey) -> Option<usize> {
        let index = (key.key as usize & 0xff).wrapping_sub(1);
        (self.regions.get(index)?.key(index) == key.key).then_some(index)
    }

    #[inline(always)]
    fn resolve(&self, remote: Remote, len: usize) -> Result<*mut u8, PostError> {
        if len > RMA {
            return Err(PostError::TooLong { len, max: RMA });
        }
        let place = self.registered(remote.key).ok_or(PostError::BadKey)?;
        let (base, size) = self.regions[place].memory.ok_or(PostError::BadKey)?;
        match remote.offset.checked_add(len as u64) {
            Some(end) if end <= size as u64 => {
                // SAFETY: offset + len <= size, so the pointer stays inside the registered region.
                Ok(unsafe { base.as_ptr().add(remote.offset as usize) })
            }
            _ => Err(PostError::BadKey),
        }
    }
}

impl<const DEPTH: usize> Default for Loopback<DEPTH> {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: an imported region is registered in this process, and the engine keeps it registered
// while an import is in use. Local memory is not accessed after a post returns. A shared reference
// cannot modify the rail.
unsafe impl<const DEPTH: usize> Rail for Loopback<DEPTH> {
    type Setup<'a> = &'a Self;

    const COPIES: bool = false;

    fn setup(&mut self) -> &Self {
        self
    }

    fn caps(&self) -> Caps {
        Caps {
            max_message: MESSAGE,
            max_rma: RMA,
            inject: RMA,
            data_bytes: 4,
            // The bytes of a write land when it is posted, so they may land before earlier messages
            // are reported.
            order: Order::Reports,
            native_atomics: self.native_atomics,
            depth: DEPTH as u32,
            fresh: true,
            fences: true,
        }
    }

    fn register(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError> {
        let free = self
            .regions
            .iter()
            .position(|place| place.memory.is_none())
            .ok_or(AttachError::Full("loopback: 16 regions at most; deregister one"))?;
        let place = &mut self.regions[free];
        place.memory = Some((region.ptr(), region.len()));
        place.mapped = match self.maps {
            Maps::None => false,
            Maps::Shared => region.kind() != RegionKind::Private,
            Maps::All => true,
        };
        Ok((RailKey { key: place.key(free), base: 0 }, 0))
    }

    fn deregister(&mut self, key: RailKey) -> Result<(), AttachError> {
        if let Some(index) = self.registered(key) {
            let Registered { memory, uses, .. } = &mut self.regions[index];
            (*memory, *uses) = (None, *uses + 1);
        }
        Ok(())
    }

    fn touches(&mut self, memory: Local) -> bool {
        // A post copies all bytes before it returns, so no later access remains.
        let _ = memory;
        false
    }

    fn import(
        &mut self,
        _peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        let ptr = self
            .resolve(
                Remote { key, offset: 0 },
                usize::try_from(len).map_err(|_| AttachError::BadRange)?,
            )
            .map_err(|_| AttachError::BadHandle)?;
        let mapped = self.registered(key).is_some_and(|place| self.regions[place].mapped);
        Ok(if mapped { NonNull::new(ptr) } else { None })
    }

    fn release(&mut self, _peer: Peer, _key: RailKey) {}

    fn detach(&mut self, peer: Peer) {
        for slot in &mut self.slots {
            if slot.peer == peer && !matches!(slot.event, Event::Done(_)) {
                slot.event = Event::Gone;
            }
        }
    }

    /// Drops only reports, because a post copies all bytes before it returns.
    #[cold]
    fn fence(&mut self, peer: Peer) -> Fence {
        self.detach(peer);
        Fence::Fenced
    }

    /// Writes nothing, because this rail has no address.
    #[cold]
    fn reopen(&mut self, peer: Peer, _into: &mut [u8; REOPEN_MAX]) -> Option<usize> {
        let mut waiting = (0..self.tail.wrapping_sub(self.head)).map(|n| self.head.wrapping_add(n));
        let reported = !waiting.any(|at| self.slots[(at & Self::MASK) as usize].peer == peer);
        reported.then_some(0)
    }

    #[cold]
    fn rejoin(&mut self, _peer: Peer, address: &[u8]) -> Result<(), AttachError> {
        if address.is_empty() { Ok(()) } else { Err(AttachError::BadHandle) }
    }

    #[inline]
    unsafe fn post_write(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        _cx: u64,
    ) -> Result<Posted, PostError> {
        self.room(1)?;
        let target = self.resolve(remote, local.len)?;
        // SAFETY: our caller guarantees a readable source, and `resolve` checked the target. `copy`
        // allows overlap.
        unsafe { ptr::copy(local.ptr.as_ptr(), target, local.len) };
        if let Some(data) = data {
            self.push(peer, Event::Landed(data));
        }
        Ok(Posted::Done)
    }

    #[inline]
    unsafe fn post_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        self.room(1)?;
        let source = self.resolve(remote, local.len)?;
        // SAFETY: our caller guarantees a writable target, and `resolve` checked the source. `copy`
        // allows overlap.
        unsafe { ptr::copy(source, local.ptr.as_ptr(), local.len) };
        self.push(peer, Event::Done(cx));
        Ok(Posted::Pending)
    }

    #[inline(always)]
    fn post_message(
        &mut self,
        peer: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        _cx: u64,
    ) -> Result<Posted, PostError> {
        self.room(1)?;
        let len = head.len() + body.len();
        if len > MESSAGE {
            return Err(PostError::TooLong { len, max: MESSAGE });
        }
        let bytes = self.push(peer, Event::Message(len as u16));
        let (first, rest) = bytes.split_at_mut(head.len());
        first.copy_from_slice(head);
        body.copy_out(rest);
        Ok(Posted::Done)
    }

    unsafe fn post_atomic(
        &mut self,
        peer: Peer,
        amo: Amo,
        remote: Remote,
        fetch: Option<NonNull<u64>>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        if !self.native_atomics.has(amo.op, amo.width) {
            return Err(PostError::Unsupported);
        }
        self.room(1)?;
        let word = self.resolve(remote, amo.width as usize)?;
        // SAFETY: `resolve` checked that the word is inside the region. The engine checks its
        // alignment before it posts.
        let old = unsafe { amo.apply(word) };
        if let Some(fetch) = fetch {
            // SAFETY: our caller guarantees that `fetch` is writable until the completion.
            unsafe { fetch.as_ptr().write(old) };
        }
        self.push(peer, Event::Done(cx));
        Ok(Posted::Pending)
    }

    #[inline]
    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let n = self.tail.wrapping_sub(self.head).min(budget);
        let mut reported = n;
        for _ in 0..n {
            let slot = &self.slots[(self.head & Self::MASK) as usize];
            self.head = self.head.wrapping_add(1);
            match slot.event {
                Event::Landed(data) => sink.landed(slot.peer, data),
                Event::Gone => reported -= 1,
                Event::Message(len) => {
                    sink.message(slot.peer, Untrusted::from_slice(&slot.bytes[..len as usize]))
                }
                Event::Done(cx) => sink.done(cx, Ok(())),
            }
        }
        reported
    }
}
