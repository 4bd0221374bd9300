//! Raw copies: short ones without a call, very long ones past the caches.

mod stream;

use core::ptr;

/// Copies `len` bytes. Up to 64 bytes are a few loads and stores; more is the platform's `memmove`,
/// and 12 MiB or more are streamed past the caches.
///
/// A short copy loads everything before it stores, so the two ranges may overlap as with `memmove`.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes. Other processes may access both meanwhile.
#[inline(always)]
pub unsafe fn copy_bytes(from: *const u8, to: *mut u8, len: usize) {
    /// Two loads and two stores of `T`
    /// that cover `size_of::<T>() <= len <= 2 * size_of::<T>()` bytes.
    ///
    /// # Safety
    /// As `copy_bytes`, and the bounds on `len`.
    #[inline(always)]
    unsafe fn ends<T: Copy>(from: *const u8, to: *mut u8, len: usize) {
        let last = len - size_of::<T>();
        // SAFETY: both accesses lie within `len` bytes because `size_of::<T>() <= len`.
        unsafe {
            let a = from.cast::<T>().read_unaligned();
            let b = from.add(last).cast::<T>().read_unaligned();
            to.cast::<T>().write_unaligned(a);
            to.add(last).cast::<T>().write_unaligned(b);
        }
    }
    // SAFETY: each arm's length allows its access size; the ranges are the caller's promise.
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
            65..stream::STREAM_MIN => ptr::copy(from, to, len),
            _ => stream::copy(from, to, len),
        }
    }
}

/// As [`copy_bytes`], where the processor may see `to` through a write-combining window, such as
/// one into a device's memory: every later store comes behind these, an announcement of them
/// included.
///
/// # Safety
/// As for [`copy_bytes`].
#[inline(always)]
pub unsafe fn copy_to_window(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy_bytes(from, to, len) };
    // A release store does not wait for write-combining stores on x86-64; elsewhere it does.
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        core::arch::x86_64::_mm_sfence();
    }
}

/// [`copy_bytes`] for messages: copies one word inline and calls for the rest,
/// to keep callers short.
///
/// # Safety
/// As for [`copy_bytes`].
#[inline(always)]
pub unsafe fn copy_message(from: *const u8, to: *mut u8, len: usize) {
    /// # Safety
    /// As for `copy_bytes`.
    #[inline(never)]
    unsafe fn longer(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: the caller's promise.
        unsafe { copy_bytes(from, to, len) };
    }
    // SAFETY: the caller's promise.
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
        for len in 0..200usize {
            for shift in [0usize, 1, 7, 13] {
                let mut bytes: [u8; 300] = core::array::from_fn(|i| i as u8);
                // SAFETY: 20 + shift + 200 < 300; both pointers come from the same array.
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

    /// Streaming copies: every alignment of both ends, no byte beyond them,
    /// overlap in both directions.
    #[test]
    fn a_long_copy_is_exact_at_every_alignment_and_may_overlap() {
        extern crate std;
        use std::vec::Vec;

        const LEN: usize = stream::STREAM_MIN + 77;
        const ROOM: usize = LEN + 4096;
        let value = |i: usize| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8;
        let source: Vec<u8> = (0..ROOM).map(value).collect();
        let mut target = std::vec![0u8; ROOM];
        for (from, to) in [(0, 0), (1, 64), (13, 7), (64, 63)] {
            target.fill(0xee);
            // SAFETY: both ranges lie in their vectors.
            unsafe { copy_bytes(source.as_ptr().add(from), target.as_mut_ptr().add(to), LEN) };
            assert!(target[..to].iter().all(|&b| b == 0xee), "before {to}");
            assert!(target[to..][..LEN] == source[from..][..LEN], "from {from} to {to}");
            assert!(target[to + LEN..].iter().all(|&b| b == 0xee), "behind {to}");
        }
        for (from, to) in [(0, 200), (200, 0)] {
            target.copy_from_slice(&source);
            let base = target.as_mut_ptr();
            // SAFETY: both ranges lie in the one vector, and are reached through the one pointer.
            unsafe { copy_bytes(base.add(from), base.add(to), LEN) };
            assert!(target[to..][..LEN] == source[from..][..LEN], "overlapping, from {from} to {to}");
        }
    }
}
