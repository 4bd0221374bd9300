//! Segments for device memory that the two ends of a link share beside the lanes, and the agreement
//! to use them. Each end owns one segment with done words and bounce slots. Slow path: two messages
//! in each direction over the handshake socket, in steps that do not wait.
//!
//! Each end sends an offer with an *epoch* that is random for this link. Then each end echoes the
//! peer's epoch, together with the features that it has mapped and will use. A feature is active if
//! both ends echoed it. Without done words, records in the lane report writes. If the exchange does
//! not finish, the link ends.
//!
//! An end writes only to its own segment, which also holds its cursor over the peer's done words:
//!
//! | contents                       | offset | written by | read by the peer |
//! |--------------------------------|---|---|---|
//! | cursor over the peer's words   | 128 | [`done`](super::done) | yes |
//! | done words                     | 4096, 128 bytes each | [`done`](super::done) | yes |
//! | descriptors of bounce slots    | next, 128 bytes each | [`relay`](super::relay) | yes |
//! | acknowledgements to the peer   | next, 128 bytes each | [`relay`](super::relay) | yes |
//! | bounce slots                   | next page | the device, or the processor | yes |
//!
//! Both ends store the agreed sizes privately, and never read sizes from the segment.

use std::ptr::NonNull;
use std::time::Instant;

use fishplate_core::engine::fuzzing::{number, put};
use fishplate_core::sync::primitive::AtomicU64;
use fishplate_shm::extension::PAGE;
use fishplate_shm::{HandshakeError, Link, Segment, SegmentError};

use super::done::Line;
use super::relay::Descriptor;
use super::share::prepare;

const VERSION: u32 = 2;

const CURSOR: usize = 128;

/// Sizes that must be equal at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Number of done words: a power of two, or 0 for none.
    pub(crate) words: u32,
    /// Number of bounce slots: a power of two, or 0 for none.
    pub(crate) slots: u32,
    /// Size of each slot in bytes, a multiple of the page size.
    pub(crate) chunk: u32,
}

impl Layout {
    fn descriptors(&self) -> usize {
        PAGE + self.words as usize * size_of::<Line>()
    }

    fn acks(&self) -> usize {
        self.descriptors() + self.slots as usize * size_of::<Descriptor>()
    }

    fn bounce(&self) -> usize {
        (self.acks() + self.slots as usize * size_of::<Line>()).next_multiple_of(PAGE)
    }

    fn len(&self) -> usize {
        self.bounce() + self.slots as usize * self.chunk as usize
    }
}

/// The pointers are valid while the mapping exists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairSegment {
    ptr: NonNull<u8>,
    layout: Layout,
}

impl PairSegment {
    fn at<T>(&self, offset: usize) -> *const T {
        // SAFETY: every offset of the layout lies inside the segment, which is as long as the
        // layout.
        unsafe { self.ptr.as_ptr().add(offset).cast_const().cast() }
    }

    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    pub(crate) fn len(&self) -> usize {
        self.layout.len()
    }

    pub(crate) fn cursor(&self) -> *const AtomicU64 {
        self.at(CURSOR)
    }

    pub(crate) fn words(&self) -> *const Line {
        self.at(PAGE)
    }

    pub(crate) fn words_at(&self) -> u64 {
        PAGE as u64
    }

    pub(crate) fn descriptors(&self) -> *const Descriptor {
        self.at(self.layout.descriptors())
    }

    pub(crate) fn acks(&self) -> *const Line {
        self.at(self.layout.acks())
    }

    pub(crate) fn bounce_at(&self, slot: u32) -> u64 {
        self.layout.bounce() as u64 + u64::from(slot) * u64::from(self.layout.chunk)
    }

    pub(crate) fn bounce(&self, slot: u32) -> *mut u8 {
        self.at::<u8>(self.bounce_at(slot) as usize).cast_mut()
    }
}

#[derive(Debug)]
pub(crate) struct Agreed {
    pub(crate) layout: Layout,
    /// Our segment, its mapping, the mapping and the number of the peer's segment. `None` if no
    /// feature is active.
    pub(crate) segments: Option<(Segment, PairSegment, PairSegment, u32)>,
    pub(crate) done: bool,
    pub(crate) relay: bool,
}

// SAFETY: the addresses point into shared mappings, which are not tied to a thread. The segment and
// the link keep them mapped.
unsafe impl Send for Agreed {}

impl Agreed {
    pub(crate) const NOTHING: Agreed = Agreed {
        layout: Layout { words: 0, slots: 0, chunk: 0 },
        segments: None,
        done: false,
        relay: false,
    };
}

const DONE: u32 = 1;
const RELAY: u32 = 2;

/// The offer of one end, or the other end's echo of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Offer {
    flags: u32,
    layout: Layout,
    number: u32,
    epoch: u64,
}

impl Offer {
    fn encode(&self) -> [u8; 32] {
        let mut out = [0; 32];
        let words = [
            VERSION,
            self.flags,
            self.layout.words,
            self.layout.slots,
            self.layout.chunk,
            self.number,
        ];
        for (word, at) in words.into_iter().zip(out.chunks_exact_mut(4)) {
            at.copy_from_slice(&word.to_ne_bytes());
        }
        out[24..].copy_from_slice(&self.epoch.to_ne_bytes());
        out
    }

    fn decode(bytes: &[u8]) -> Result<Self, HandshakeError> {
        let bytes: &[u8; 32] = bytes.try_into().map_err(|_| HandshakeError::BadPacket)?;
        let word = |at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        if word(0) != VERSION {
            return Err(HandshakeError::Version { theirs: word(0) as u16, ours: VERSION as u16 });
        }
        let layout = Layout { words: word(8), slots: word(12), chunk: word(16) };
        let epoch = u64::from(word(24)) | u64::from(word(28)) << 32;
        Ok(Offer { flags: word(4), layout, number: word(20), epoch })
    }
}

pub(crate) fn sample_offer(seed: u64, into: &mut [u8]) -> usize {
    let [a, b, c] = [1, 2, 3].map(|n| number(seed, n));
    let layout = Layout { words: a as u32, slots: b as u32, chunk: c as u32 };
    put(
        into,
        &Offer { flags: (a >> 32) as u32, layout, number: (b >> 32) as u32, epoch: c }.encode(),
    )
}

pub(crate) fn read_offer(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let len = put(again, &Offer::decode(input).ok()?.encode());
    assert_eq!(len, input.len(), "something behind it");
    Some(len)
}

/// If it is dropped, its mappings end with the link.
#[derive(Debug)]
pub(crate) struct Agreement {
    layout: Layout,
    ours: Option<Segment>,
    offer: Offer,
    said: Option<Verdict>,
}

#[derive(Debug)]
struct Verdict {
    usable: u32,
    /// The number of the peer's segment. `mapped` is its address in this process.
    number: u32,
    mapped: Option<NonNull<u8>>,
}

// SAFETY: the address points into a shared mapping, which is not tied to a thread. The link keeps
// it mapped.
unsafe impl Send for Verdict {}

impl Agreement {
    /// Sends our offer, with a segment from `create`. `want` selects done words and bounce slots,
    /// in this order.
    pub(crate) fn begin(
        link: &mut Link,
        layout: Layout,
        want: (bool, bool),
        create: impl FnOnce(usize) -> Result<Segment, SegmentError>,
    ) -> Result<Agreement, HandshakeError> {
        // Comes first, because a peer that has agreed may send packets about device memory at once.
        prepare(link);
        let epoch = u64::from_ne_bytes(link.nonces()[0][..8].try_into().unwrap_or([0; 8]));
        let mut flags = if want.0 && layout.words > 0 { DONE } else { 0 };
        flags |= if want.1 && layout.slots > 0 { RELAY } else { 0 };
        // The link also works without a segment.
        let ours = if flags == 0 { None } else { create(layout.len()).ok() };
        let flags = if ours.is_some() { flags } else { 0 };
        let number = ours.as_ref().map_or(0, Segment::number);
        let mut line = link.line();
        if let Some(segment) = &ours {
            line.announce(segment.clone());
        }
        let offer = Offer { flags, layout, number, epoch };
        line.send_blob(&offer.encode())?;
        Ok(Agreement { layout, ours, offer, said: None })
    }

    /// Returns `None` if more messages are needed. Does not wait.
    pub(crate) fn step(&mut self, link: &mut Link) -> Result<Option<Agreed>, HandshakeError> {
        let layout = self.layout;
        let Some(blob) = link.line().take_blob()? else { return Ok(None) };
        let heard = Offer::decode(&blob)?;
        let Some(Verdict { usable, number, mapped }) = self.said.take() else {
            let both = if heard.layout == layout { self.offer.flags & heard.flags } else { 0 };
            // A correct peer announces its segment before the offer, so the import need not wait.
            let mapped = match both {
                0 => None,
                _ => link.line().import(heard.number, 0, layout.len() as u64, Instant::now()).ok(),
            };
            let usable = if mapped.is_some() { both } else { 0 };
            let verdict = Offer { flags: usable, layout, number: heard.number, epoch: heard.epoch };
            link.line().send_blob(&verdict.encode())?;
            self.said = Some(Verdict { usable, number: heard.number, mapped });
            return self.step(link);
        };
        if (heard.epoch, heard.number) != (self.offer.epoch, self.offer.number) {
            return Err(HandshakeError::BadPacket);
        }
        // Both ends compute the same value, because both use the same two echoes.
        let active = usable & heard.flags;
        let segments = match (active, self.ours.take(), mapped) {
            (1.., Some(segment), Some(ptr)) => {
                let mine = PairSegment { ptr: segment.ptr(), layout };
                Some((segment, mine, PairSegment { ptr, layout }, number))
            }
            (_, ours, mapped) => {
                if mapped.is_some() {
                    // SAFETY: the segment was imported by this agreement, and nothing uses it yet.
                    unsafe { link.line().release(number) };
                }
                if let Some(segment) = ours {
                    link.line().withdraw(segment.number());
                }
                None
            }
        };
        Ok(Some(Agreed { layout, segments, done: active & DONE != 0, relay: active & RELAY != 0 }))
    }

    pub(crate) fn finish(
        mut self,
        link: &mut Link,
        deadline: Instant,
    ) -> Result<Agreed, HandshakeError> {
        loop {
            if let Some(agreed) = self.step(link)? {
                return Ok(agreed);
            }
            link.line().rest(deadline)?;
        }
    }
}

/// Agrees with a segment that is shorter than announced, so that the peer cannot use it.
#[cfg(test)]
pub(crate) fn agree_cut_short(
    link: &mut Link,
    layout: Layout,
    deadline: Instant,
) -> Result<Agreed, HandshakeError> {
    let agreement =
        Agreement::begin(link, layout, (true, true), |len| Segment::create(len - PAGE))?;
    agreement.finish(link, deadline)
}
