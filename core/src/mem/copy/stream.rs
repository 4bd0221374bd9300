//! Copies that bypass the caches, for data too long to stay in them.

use core::ptr;

/// Minimum length of a copy that bypasses the caches, in bytes.
pub(super) const STREAM_MIN: usize = 12 << 20;

/// Bytes copied in one step of the loop: a cache line, which streaming stores fill and write back
/// whole.
const LINE: usize = 64;

/// Like [`copy_bytes`](super::copy_bytes), but other threads may see the stores late and in any
/// order until this returns. On return the stores are ordered before every later store.
///
/// # Safety
/// The conditions of `copy_bytes`, and the ranges do not overlap.
#[cold]
#[inline(never)]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    use core::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    let head = to.align_offset(LINE).min(len);
    let lines = (len - head) / LINE;
    let tail = head + lines * LINE;
    // SAFETY: `head <= tail <= len`, and the lines lie between `head` and `tail`, with targets
    // aligned to `LINE`. SSE2 is part of x86-64. The fence orders the streaming stores before any
    // later store that publishes them. Nothing else orders them.
    unsafe {
        ptr::copy_nonoverlapping(from, to, head);
        for line in 0..lines {
            let source = from.add(head + line * LINE).cast::<__m128i>();
            let target = to.add(head + line * LINE).cast::<__m128i>();
            let words = [
                _mm_loadu_si128(source),
                _mm_loadu_si128(source.add(1)),
                _mm_loadu_si128(source.add(2)),
                _mm_loadu_si128(source.add(3)),
            ];
            _mm_stream_si128(target, words[0]);
            _mm_stream_si128(target.add(1), words[1]);
            _mm_stream_si128(target.add(2), words[2]);
            _mm_stream_si128(target.add(3), words[3]);
        }
        ptr::copy_nonoverlapping(from.add(tail), to.add(tail), len - tail);
        _mm_sfence();
    }
}
