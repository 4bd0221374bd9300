//! A test rail around another rail that provides "device" memory: memory of this process at
//! addresses that the processor cannot access. An access faults. Only the rail converts to the real
//! address.

use std::ptr::NonNull;

use fishplate_core::error::{AttachError, PostError};
use fishplate_core::forward_rail;
use fishplate_core::mem::{Peer, Region, RegionKind, Untrusted};
use fishplate_core::rail::{Caps, Local, Posted, Rail, RailKey, Remote, Sink};

/// The bit that hides an address. No current processor can access an address with bit 62 set and
/// bit 63 clear.
const VEIL: usize = 1 << 62;

/// The key and the descriptor of device memory that is [apart](Veiled::apart).
const ELSEWHERE: RailKey = RailKey::ELSEWHERE;
const NOT_HERE: u64 = u64::MAX;

/// A rail that wraps `R` and adds device memory.
pub struct Veiled<R> {
    inner: R,
    devices: Vec<RailKey>,
    /// Number of device writes and device reads that the engine requested.
    pub placed: u32,
    pub fetched: u32,
    /// Number of further calls that find no room, of device writes and device reads together.
    pub full: u32,
    /// Number of polls until a copy by `place_device` takes effect, even if it is not continued.
    /// Also the number of calls of `fetch_device` that return `Again` for one copy.
    pub delay: u32,
    /// True if no rail reaches device memory. It cannot be registered, imported or posted, so its
    /// bytes travel in messages.
    pub apart: bool,
    /// True if every import is refused as unsupported.
    pub imports_nothing: bool,
    /// Number of further device writes that report a failure and take effect, perhaps later.
    pub late: u32,
    /// True if device reads are permanently refused.
    pub unreadable: bool,
    /// Limit of the message length in bytes, if below the inner rail's limit.
    pub most: usize,
    /// The copies out of device memory in progress: the copied bytes, and the number of calls so
    /// far. An entry without bytes is free.
    begun: Vec<(Vec<u8>, u32)>,
    /// The copies into device memory in progress: the destination, the bytes, and the number of
    /// polls until the copy takes effect.
    placing: Vec<(Option<Local>, Vec<u8>, u32)>,
}

impl<R> Veiled<R> {
    pub fn new(inner: R) -> Self {
        Veiled {
            inner,
            devices: Vec::new(),
            placed: 0,
            fetched: 0,
            full: 0,
            delay: 0,
            apart: false,
            imports_nothing: false,
            late: 0,
            unreadable: false,
            most: usize::MAX,
            begun: Vec::new(),
            placing: Vec::new(),
        }
    }
}

/// Returns zeroed device memory that is never freed.
pub fn device_region(len: usize) -> Region {
    let ptr = NonNull::from(super::leak(0u64, len.div_ceil(8))).cast::<u8>();
    let ptr = NonNull::new(ptr.as_ptr().map_addr(|addr| addr | VEIL)).unwrap();
    // SAFETY: the memory is leaked, and it is accessed only at its real address.
    unsafe { Region::new(ptr, len, RegionKind::Device { ordinal: 0 }) }
}

/// Returns the real address of device memory.
pub fn unveil(ptr: NonNull<u8>) -> NonNull<u8> {
    NonNull::new(ptr.as_ptr().map_addr(|addr| addr & !VEIL)).unwrap()
}

/// Returns a copy of device memory.
pub fn peek(region: &Region, at: usize, len: usize) -> Vec<u8> {
    assert!(at + len <= region.len());
    let mut bytes = vec![0; len];
    // SAFETY: the range was checked to be inside the region, and the buffer is as long as the
    // range.
    unsafe { std::ptr::copy(unveil(region.ptr()).as_ptr().add(at), bytes.as_mut_ptr(), len) };
    bytes
}

/// Writes device memory.
pub fn poke(region: &Region, at: usize, bytes: &[u8]) {
    assert!(at + bytes.len() <= region.len());
    // SAFETY: the range was checked to be inside the region.
    unsafe { std::ptr::copy(bytes.as_ptr(), unveil(region.ptr()).as_ptr().add(at), bytes.len()) };
}

fn clear(local: Local) -> Local {
    Local { ptr: unveil(local.ptr), ..local }
}

// SAFETY: the inner rail satisfies the contract, and device memory is never mapped. Through `Setup`
// the tests only set the public fields.
unsafe impl<R: Rail> Rail for Veiled<R> {
    type Setup<'a>
        = &'a mut Self
    where
        Self: 'a;

    fn setup(&mut self) -> &mut Self {
        self
    }

    const COPIES: bool = R::COPIES;

    fn caps(&self) -> Caps {
        let caps = self.inner.caps();
        Caps { max_message: caps.max_message.min(self.most), ..caps }
    }

    fn register(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError> {
        let device = matches!(region.kind(), RegionKind::Device { .. });
        if device && self.apart {
            return Ok((ELSEWHERE, NOT_HERE));
        }
        // SAFETY: the creator of the region guarantees that its memory stays valid while
        // registered.
        let real = unsafe { Region::new(unveil(region.ptr()), region.len(), RegionKind::Private) };
        let (key, desc) = self.inner.register(if device { &real } else { region })?;
        if device {
            self.devices.push(key);
        }
        Ok((key, desc))
    }

    fn deregister(&mut self, key: RailKey) -> Result<(), AttachError> {
        if key == ELSEWHERE {
            return Ok(());
        }
        self.devices.retain(|device| *device != key);
        self.inner.deregister(key)
    }

    fn touches(&mut self, memory: Local) -> bool {
        self.inner.touches(clear(memory))
    }

    fn import(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        if key == ELSEWHERE || self.imports_nothing {
            return Err(AttachError::Unsupported);
        }
        let mapped = self.inner.import(peer, key, len)?;
        Ok(mapped.filter(|_| !self.devices.contains(&key)))
    }

    fn release(&mut self, peer: Peer, key: RailKey) {
        if key != ELSEWHERE {
            self.inner.release(peer, key);
        }
    }

    unsafe fn post_write(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        if local.desc == NOT_HERE || remote.key == ELSEWHERE {
            return Err(PostError::Unsupported);
        }
        // SAFETY: our caller guarantees the same contract.
        unsafe { self.inner.post_write(peer, clear(local), remote, data, cx) }
    }

    unsafe fn post_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        if self.unreadable {
            return Err(PostError::BadKey);
        }
        if local.desc == NOT_HERE || remote.key == ELSEWHERE {
            return Err(PostError::Unsupported);
        }
        // SAFETY: our caller guarantees the same contract.
        unsafe { self.inner.post_read(peer, clear(local), remote, cx) }
    }

    fn post_message(
        &mut self,
        peer: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let (len, max) = (head.len() + body.len(), self.caps().max_message);
        if len > max {
            return Err(PostError::TooLong { len, max });
        }
        self.inner.post_message(peer, head, body, cx)
    }

    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        for at in 0..self.placing.len() {
            let (Some(to), bytes, polls) = &mut self.placing[at] else { continue };
            *polls = polls.saturating_sub(1);
            if *polls == 0 && !bytes.is_empty() {
                let (to, bytes) = (clear(*to), std::mem::take(bytes));
                // SAFETY: the caller of `place_device` guarantees that the destination may be
                // written until the copy has ended, and its memory is leaked.
                unsafe { self.inner.write_device(to, Untrusted::from_slice(&bytes)) }.unwrap();
            }
        }
        self.inner.poll(budget, sink)
    }

    unsafe fn write_device(&mut self, to: Local, from: Untrusted<'_>) -> Result<(), PostError> {
        if self.full > 0 {
            self.full -= 1;
            return Err(PostError::Again);
        }
        self.placed += 1;
        // SAFETY: our caller guarantees the same contract.
        unsafe { self.inner.write_device(clear(to), from) }?;
        if self.late > 0 {
            self.late -= 1;
            return Err(PostError::Provider(110));
        }
        Ok(())
    }

    unsafe fn place_device(
        &mut self,
        to: Local,
        from: Untrusted<'_>,
        copy: &mut u32,
    ) -> Result<(), PostError> {
        if self.delay == 0 {
            // SAFETY: our caller guarantees the same contract.
            return unsafe { self.write_device(to, from) };
        }
        if *copy == 0 {
            if self.full > 0 {
                self.full -= 1;
                return Err(PostError::Again);
            }
            self.placed += 1;
            let mut bytes = vec![0; from.len()];
            from.copy_out(&mut bytes);
            self.placing.push((Some(to), bytes, self.delay));
            *copy = self.placing.len() as u32;
        }
        let (to, bytes, _) = &mut self.placing[*copy as usize - 1];
        if self.late > 0 {
            // The copy goes on.
            (self.late, *copy) = (self.late - 1, 0);
            return Err(PostError::Provider(110));
        }
        if !bytes.is_empty() {
            return Err(PostError::Again);
        }
        (*to, *copy) = (None, 0);
        Ok(())
    }

    unsafe fn fetch_device(
        &mut self,
        from: Local,
        into: &mut [u8],
        copy: &mut u32,
    ) -> Result<(), PostError> {
        if *copy == 0 {
            let mut bytes = vec![0; into.len()];
            // SAFETY: our caller guarantees the same contract.
            unsafe { self.read_device(from, &mut bytes) }?;
            let free = self.begun.iter().position(|(bytes, _)| bytes.is_empty());
            let free = free.unwrap_or_else(|| {
                self.begun.push((vec![], 0));
                self.begun.len() - 1
            });
            self.begun[free] = (bytes, self.delay);
            *copy = free as u32 + 1;
        }
        let (bytes, calls) = &mut self.begun[*copy as usize - 1];
        if *calls > 0 {
            *calls -= 1;
            return Err(PostError::Again);
        }
        *copy = 0;
        into.copy_from_slice(&std::mem::take(bytes));
        Ok(())
    }

    unsafe fn read_device(&mut self, from: Local, into: &mut [u8]) -> Result<(), PostError> {
        if self.full > 0 {
            self.full -= 1;
            return Err(PostError::Again);
        }
        self.fetched += 1;
        // SAFETY: our caller guarantees the same contract.
        unsafe { self.inner.read_device(clear(from), into) }
    }

    forward_rail! { self.inner =>
        detach fence late mute fence_left reopen rejoin fences_all is_fenced post_atomic flush
        notify doubt check_peers
    }
}
