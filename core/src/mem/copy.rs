//! Raw copies. Short copies make no call, long copies are split into pieces, and very long copies
//! bypass the caches.

#[cfg(target_arch = "x86_64")]
mod stream;

use core::ptr;

/// Maximum length of one call of `memmove`, in bytes. On Zen, glibc stops using `rep movsb` above
/// the size of the second-level cache. But only `rep movsb` acquires a cache line of another core
/// without reading it.
///
/// Measured on Zen 5 with 1 MiB of second-level cache, copying to memory that another core reads.
/// Times in microseconds, as one call and in pieces: 1 MiB 34 and 28, 4 MiB 119 and 110, 8 MiB 489
/// and 354. With the cores further apart: 1 MiB 157 and 57, 4 MiB 605 and 231.
const PIECE: usize = 256 << 10;

/// Copies `len` bytes. Up to 64 bytes take a few loads and stores. Longer copies call the
/// platform's `memmove`. If the ranges do not overlap, copies above 256 KiB are split into pieces,
/// and on x86-64 copies of 12 MiB or more bypass the caches.
///
/// The two ranges may overlap, as with `memmove`: a short copy loads all bytes before it stores.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes. Other processes may access both meanwhile.
#[inline(always)]
pub unsafe fn copy_bytes(from: *const u8, to: *mut u8, len: usize) {
    /// Copies `size_of::<T>() <= len <= 2 * size_of::<T>()` bytes with two loads and two stores of
    /// `T`.
    ///
    /// # Safety
    /// The conditions of `copy_bytes`, and `len` is within these bounds.
    #[inline(always)]
    unsafe fn ends<T: Copy>(from: *const u8, to: *mut u8, len: usize) {
        let last = len - size_of::<T>();
        // SAFETY: `size_of::<T>() <= len`, so both accesses lie within the ranges that our caller
        // guarantees.
        unsafe {
            let a = from.cast::<T>().read_unaligned();
            let b = from.add(last).cast::<T>().read_unaligned();
            to.cast::<T>().write_unaligned(a);
            to.add(last).cast::<T>().write_unaligned(b);
        }
    }
    // SAFETY: each arm's access size fits the length, and our caller guarantees the ranges.
    unsafe {
        match len {
            8 => to.cast::<u64>().write_unaligned(from.cast::<u64>().read_unaligned()),
            0 => {}
            1 => to.write(from.read()),
            2..=3 => ends::<u16>(from, to, len),
            4..=7 => ends::<u32>(from, to, len),
            9..=16 => ends::<u64>(from, to, len),
            17..=32 => ends::<[u64; 2]>(from, to, len),
            33..=64 => ends::<[u64; 4]>(from, to, len),
            65..=PIECE => ptr::copy(from, to, len),
            _ => long(from, to, len),
        }
    }
}

/// Like [`copy_bytes`], for more than [`PIECE`] bytes.
///
/// # Safety
/// The conditions of [`copy_bytes`].
#[cold]
#[inline(never)]
unsafe fn long(from: *const u8, to: *mut u8, len: usize) {
    if from.addr().abs_diff(to.addr()) < len {
        // SAFETY: our caller guarantees the ranges. `memmove` allows them to overlap.
        return unsafe { ptr::copy(from, to, len) };
    }
    #[cfg(target_arch = "x86_64")]
    if len >= stream::STREAM_MIN {
        // SAFETY: our caller guarantees the ranges, and the check above excludes an overlap.
        return unsafe { stream::copy(from, to, len) };
    }
    for at in (0..len).step_by(PIECE) {
        // SAFETY: the piece ends within `len` bytes, and the check above excludes an overlap.
        unsafe { ptr::copy_nonoverlapping(from.add(at), to.add(at), PIECE.min(len - at)) };
    }
}

/// Like [`copy_bytes`], for a `to` that may be a write-combining mapping, such as a window into
/// device memory. Orders all later stores, such as a signal, after the copy.
///
/// # Safety
/// The conditions of [`copy_bytes`].
#[inline(always)]
pub unsafe fn copy_to_window(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: our caller guarantees the conditions of `copy_bytes`.
    unsafe { copy_bytes(from, to, len) };
    order_window();
}

/// Orders all later stores after earlier stores to a write-combining mapping.
#[inline(always)]
pub fn order_window() {
    // On x86-64 a release store does not wait for write-combining stores. On other processors it
    // does.
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        core::arch::x86_64::_mm_sfence();
    }
}

/// Like [`copy_bytes`], for messages: copies one word inline and calls a function for longer ones,
/// which keeps callers short.
///
/// # Safety
/// The conditions of [`copy_bytes`].
#[inline(always)]
pub unsafe fn copy_message(from: *const u8, to: *mut u8, len: usize) {
    /// Copies a longer message.
    ///
    /// # Safety
    /// The conditions of `copy_bytes`.
    #[inline(never)]
    unsafe fn longer(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: our caller guarantees the conditions of `copy_bytes`.
        unsafe { copy_bytes(from, to, len) };
    }
    // SAFETY: our caller guarantees the ranges, and the one-word copy requires exactly 8 bytes.
    unsafe {
        match len {
            8 => copy_bytes(from, to, 8),
            _ => longer(from, to, len),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_is_copied_exactly_and_overlap_is_allowed() {
        for len in 0..=300usize {
            for shift in [0usize, 1, 7, 13] {
                let mut bytes: [u8; 400] = core::array::from_fn(|i| i as u8);
                // SAFETY: 20 + shift + 300 < 400, and both pointers come from the same array.
                unsafe {
                    let base = bytes.as_mut_ptr();
                    copy_bytes(base.add(20), base.add(20 + shift), len);
                }
                for (i, &byte) in bytes.iter().enumerate() {
                    let inside = i >= 20 + shift && i < 20 + shift + len;
                    let want = if inside { i - shift } else { i };
                    assert_eq!(byte, want as u8, "len {len} shift {shift} at {i}");
                }
            }
        }
    }

    /// Checks copies in pieces and copies that bypass the caches: both ends at every alignment, no
    /// byte written beyond them, overlap in both directions.
    #[test]
    fn a_long_copy_is_exact_at_every_alignment_and_may_overlap() {
        extern crate std;
        use std::vec::Vec;

        const LONGEST: usize = (12 << 20) + 77;
        const ROOM: usize = LONGEST + 512;
        let value = |i: usize| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8;
        let source: Vec<u8> = (0..ROOM).map(value).collect();
        let mut target = std::vec![0u8; ROOM];
        for len in [PIECE, PIECE + 1, 2 * PIECE - 1, 2 * PIECE, 2 * PIECE + 1, LONGEST] {
            for (from, to) in [(0, 0), (1, 64), (13, 7), (64, 63)] {
                target[..len + 512].fill(0xee);
                // SAFETY: both ranges are inside their vectors.
                unsafe { copy_bytes(source.as_ptr().add(from), target.as_mut_ptr().add(to), len) };
                assert!(target[..to].iter().all(|&b| b == 0xee), "{len} bytes, before {to}");
                assert!(target[to..][..len] == source[from..][..len], "{len}, {from} to {to}");
                let behind = &target[to + len..len + 512];
                assert!(behind.iter().all(|&b| b == 0xee), "{len} bytes, behind {to}");
            }
            for (from, to) in [(0, 200), (200, 0)] {
                target.copy_from_slice(&source);
                let base = target.as_mut_ptr();
                // SAFETY: both ranges are inside the same vector, and both pointers come from it.
                unsafe { copy_bytes(base.add(from), base.add(to), len) };
                let copied = &target[to..][..len];
                assert!(copied == &source[from..][..len], "overlap, {len}, {from} to {to}");
            }
        }
    }
}
