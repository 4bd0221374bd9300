//! Writes and verifies the contents of checked payloads. They depend on the run's seed, the
//! direction and the iteration.
//!
//! Nothing here blocks or allocates. Payloads are written and read through raw pointers, because a
//! peer may write the same memory at the same time. A payload that changes during the check counts
//! as wrong, and the check has no undefined behaviour.

/// The contents of one payload: word `k` is `base + k * STEP`. If the length is no multiple of 8,
/// the last bytes are the start of one more word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    base: u64,
}

/// Odd, so that all words of a payload are different.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Pattern {
    /// Returns the pattern of payload `iteration` in a direction. If only one side of a test sends,
    /// the test may pass any values that identify the payload.
    #[inline(always)]
    pub fn new(seed: u64, direction: u64, iteration: u64) -> Self {
        // The finalizer of splitmix64 maps neighbouring numbers to unrelated words.
        let mut z =
            seed ^ direction.wrapping_mul(0xd134_2543_de82_ef95) ^ iteration.wrapping_mul(STEP);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Pattern { base: z ^ (z >> 31) }
    }

    #[inline(always)]
    fn word(self, k: usize) -> u64 {
        self.base.wrapping_add((k as u64).wrapping_mul(STEP))
    }

    /// Writes the payload.
    ///
    /// # Safety
    /// `at` is writable for `len` bytes.
    #[inline(always)]
    pub unsafe fn fill(self, at: *mut u8, len: usize) {
        let words = len / 8;
        for k in 0..words {
            // SAFETY: `8 * words <= len`, and the caller guarantees that `len` bytes are valid.
            unsafe { at.cast::<u64>().add(k).write_unaligned(self.word(k)) };
        }
        if !len.is_multiple_of(8) {
            let rest = self.word(words).to_ne_bytes();
            // SAFETY: these are the last `len % 8` bytes of the `len` that the caller guarantees.
            unsafe { core::ptr::copy_nonoverlapping(rest.as_ptr(), at.add(8 * words), len % 8) };
        }
    }

    #[inline(always)]
    pub fn fill_slice(self, bytes: &mut [u8]) {
        // SAFETY: the slice is writable for its length.
        unsafe { self.fill(bytes.as_mut_ptr(), bytes.len()) }
    }

    #[inline(always)]
    pub fn is_in(self, bytes: &[u8]) -> bool {
        // SAFETY: the slice is readable for its length.
        unsafe { self.verify(bytes.as_ptr(), bytes.len()) }
    }

    /// Returns whether `len` bytes at `at` are the whole payload.
    ///
    /// # Safety
    /// `at` is readable for `len` bytes.
    #[inline(always)]
    pub unsafe fn verify(self, at: *const u8, len: usize) -> bool {
        let words = len / 8;
        let mut differing = 0;
        for k in 0..words {
            // SAFETY: `8 * words <= len`, and the caller guarantees that `len` bytes are valid.
            // Each word is read once.
            differing |= unsafe { at.cast::<u64>().add(k).read_unaligned() } ^ self.word(k);
        }
        if !len.is_multiple_of(8) {
            let mut rest = [0; 8];
            // SAFETY: these are the last `len % 8` bytes of the `len` that the caller guarantees.
            unsafe {
                core::ptr::copy_nonoverlapping(at.add(8 * words), rest.as_mut_ptr(), len % 8)
            };
            differing |= u64::from(rest[..len % 8] != self.word(words).to_ne_bytes()[..len % 8]);
        }
        differing == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_changed_byte_is_seen_and_no_byte_beyond_is_touched() {
        for len in [1, 3, 7, 8, 9, 15, 16, 64, 100] {
            let pattern = Pattern::new(1, 2, 3);
            let mut bytes = vec![0xA5u8; len + 8];
            pattern.fill_slice(&mut bytes[..len]);
            assert_eq!(&bytes[len..], [0xA5; 8]);
            let intact = |bytes: &[u8]| pattern.is_in(&bytes[..len]);
            assert!(intact(&bytes));
            for i in 0..len {
                bytes[i] ^= 0x10;
                assert!(!intact(&bytes), "byte {i} of {len}");
                bytes[i] ^= 0x10;
            }
            bytes[len] = 0;
            assert!(intact(&bytes));
        }
    }

    #[test]
    fn payloads_differ_by_seed_direction_and_iteration() {
        let all = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0), (1, 1, 1)]
            .map(|(s, d, i)| Pattern::new(s, d, i).base);
        for (k, a) in all.iter().enumerate() {
            assert!(all[k + 1..].iter().all(|b| a != b));
        }
    }
}
