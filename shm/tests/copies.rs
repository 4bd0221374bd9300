//! Checks that copies access no byte outside of their ranges. Each range begins or ends next to an
//! inaccessible page.

use std::ptr::{NonNull, null_mut};

use fishplate_core::mem::copy_bytes;

const PAGE: usize = 4096;
/// Large enough for a copy that bypasses the caches, in bytes.
const ROOM: usize = (12 << 20) + PAGE;

/// Memory of [`ROOM`] bytes between two inaccessible pages.
struct Guarded(NonNull<u8>);

impl Guarded {
    fn new() -> Self {
        let (none, both) = (libc::PROT_NONE, libc::PROT_READ | libc::PROT_WRITE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: without MAP_FIXED the kernel chooses a free range.
        let whole = unsafe { libc::mmap(null_mut(), ROOM + 2 * PAGE, none, flags, -1, 0) };
        assert_ne!(whole, libc::MAP_FAILED);
        let room = NonNull::new(whole.cast::<u8>()).unwrap();
        // SAFETY: the first page lies inside the mapping.
        let room = unsafe { room.add(PAGE) };
        // SAFETY: these pages lie inside the new mapping, and nothing refers to them yet.
        assert_eq!(unsafe { libc::mprotect(room.as_ptr().cast(), ROOM, both) }, 0);
        Guarded(room)
    }

    /// Returns the start of the first or the last `len` bytes.
    fn place(&self, len: usize, at_end: bool) -> *mut u8 {
        // SAFETY: the address lies inside the memory, because `len <= ROOM`.
        unsafe { self.0.add(if at_end { ROOM - len } else { 0 }).as_ptr() }
    }
}

#[test]
fn no_copy_reaches_beyond_either_end() {
    const PIECE: usize = 256 << 10;
    let (source, target) = (Guarded::new(), Guarded::new());
    // SAFETY: the memory is `ROOM` bytes long and accessible, and nothing else refers to it.
    let bytes = unsafe { std::slice::from_raw_parts_mut(source.0.as_ptr(), ROOM) };
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = (i.wrapping_mul(0x9e37_79b9) >> 13) as u8;
    }
    for len in (0..=300).chain([PAGE - 1, PIECE, PIECE + 1, 3 * PIECE - 63, ROOM - 65, ROOM]) {
        for (from_end, to_end) in [(false, false), (true, true), (false, true), (true, false)] {
            let (from, to) = (source.place(len, from_end), target.place(len, to_end));
            // SAFETY: both ranges of `len` bytes lie in accessible memory, in different mappings.
            unsafe {
                to.write_bytes(0xee, len);
                copy_bytes(from, to, len);
                let copied = std::slice::from_raw_parts(to, len);
                assert!(copied == std::slice::from_raw_parts(from, len), "{len} bytes");
            }
        }
    }
}
