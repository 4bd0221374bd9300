//! The memory under test: a region of the target between canaries, and a source at the origin.

use std::ptr::NonNull;

use fishplate_core::mem::{Region, RegionKind};
use fishplate_core::rail::{Local, Rail, RailKey, Remote};

use super::{Fixture, Link};

/// The byte that fills the canaries and the unwritten region.
pub const CANARY: u8 = 0xc5;

/// Number of canary bytes on each side of a region.
pub const PAD: usize = 64;

/// A region of the target between canaries, and a source at the origin. Both are registered, and
/// the region is imported.
pub struct Field {
    /// All of the target's memory: `PAD` bytes, the region, `PAD` bytes.
    pub whole: Region,
    pub len: usize,
    pub key: RailKey,
    pub mapped: Option<NonNull<u8>>,
    pub source: Region,
    pub desc: u64,
}

impl Field {
    pub fn new<F: Fixture>(link: &mut Link<F::Rail>, len: usize) -> Field {
        let whole = F::memory(link, len + 2 * PAD);
        fill(&whole, CANARY);
        let kind = match whole.kind() {
            RegionKind::Shared { segment, offset } => {
                RegionKind::Shared { segment, offset: offset + PAD as u64 }
            }
            RegionKind::Common { peer, offset } => {
                RegionKind::Common { peer, offset: offset + PAD as u64 }
            }
            kind => kind,
        };
        // SAFETY: the memory has len + 2 PAD bytes and is never freed, and the region begins PAD
        // bytes into it.
        let inner = unsafe { Region::new(whole.ptr().add(PAD), len, kind) };
        let (key, _) = link.target().register(&inner).expect("memory of the fixture is registered");
        let source = leaked(len);
        let (_, desc) = link.origin().register(&source).expect("private memory is registered");
        let mapped = F::import(link, key, len);
        Field { whole, len, key, mapped, source, desc }
    }

    pub fn local(&self, offset: usize, len: usize) -> Local {
        // SAFETY: the tests use offsets inside the source.
        Local { ptr: unsafe { self.source.ptr().add(offset) }, len, desc: self.desc }
    }

    pub fn remote(&self, offset: u64) -> Remote {
        Remote { key: self.key, offset }
    }

    pub fn inside(&self) -> Vec<u8> {
        look(&self.whole)[PAD..PAD + self.len].to_vec()
    }

    pub fn check_canaries(&self, what: &str) {
        let bytes = look(&self.whole);
        assert!(bytes[..PAD].iter().all(|&b| b == CANARY), "{what}: written before the region");
        assert!(
            bytes[PAD + self.len..].iter().all(|&b| b == CANARY),
            "{what}: written after the region"
        );
    }
}

/// Returns zeroed memory that is never freed.
pub fn leaked(len: usize) -> Region {
    let words = Box::leak(vec![0u64; len.div_ceil(8).max(1)].into_boxed_slice());
    // SAFETY: the memory is leaked, so it is always valid. The tests access it only through raw
    // copies.
    unsafe {
        Region::new(NonNull::new(words.as_mut_ptr().cast()).unwrap(), len, RegionKind::Private)
    }
}

/// Returns a copy of a region's bytes.
pub fn look(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    // SAFETY: the region is never freed, and the copy is as long as the region.
    unsafe { std::ptr::copy(region.ptr().as_ptr(), bytes.as_mut_ptr(), region.len()) };
    bytes
}

pub fn fill(region: &Region, byte: u8) {
    // SAFETY: the region is never freed.
    unsafe { std::ptr::write_bytes(region.ptr().as_ptr(), byte, region.len()) };
}

pub fn set(region: &Region, offset: usize, bytes: &[u8]) {
    assert!(offset + bytes.len() <= region.len());
    // SAFETY: the bounds were checked above, and the region is never freed.
    unsafe { std::ptr::copy(bytes.as_ptr(), region.ptr().as_ptr().add(offset), bytes.len()) };
}
