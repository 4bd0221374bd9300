//! Copies of messages: out of memory that another processor has just written, and into memory that it has just read.
//!
//! There `memcpy` is slow where it becomes one string instruction, which it does from some 2 KiB on where the processor announces that as
//! fast: 4 KiB take 90 ns longer so, since a loop lets the transfers of more lines overlap. So it gets pieces that are shorter.

use core::ptr;

use super::copy_bytes;

/// Bytes that `memcpy` gets at once: below 2112, where the C library of GNU begins with string instructions.
const PIECE: usize = 2048;

/// Longest copy in pieces, in bytes: nothing was measured beyond, and string instructions win in the end.
const PIECES_MAX: usize = 16 << 10;

/// Copies `len` bytes that do not overlap, to or from memory that another processor works on as well.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, and they do not overlap. Other processes may read and write both meanwhile.
#[inline(always)]
pub unsafe fn copy_message(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise, here and in the arms.
    unsafe {
        match len {
            8 => copy_bytes(from, to, 8),
            _ => copy_longer(from, to, len),
        }
    }
}

/// # Safety
/// As [`copy_message`].
#[inline(never)]
unsafe fn copy_longer(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise; a piece ends where `len` does at the latest.
    unsafe {
        match len {
            ..=64 => copy_bytes(from, to, len),
            65..=PIECES_MAX => {
                for at in (0..len).step_by(PIECE) {
                    ptr::copy_nonoverlapping(from.add(at), to.add(at), PIECE.min(len - at));
                }
            }
            _ => ptr::copy_nonoverlapping(from, to, len),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;
    use std::vec;
    use std::vec::Vec;

    #[test]
    fn every_length_is_copied_exactly() {
        let source: Vec<u8> =
            (0..PIECES_MAX + 300).map(|n| (n.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
        let mut target = vec![0; source.len() + 128];
        for len in 0..=PIECES_MAX + 200 {
            for shift in [0, len % 64] {
                target.fill(0xa5);
                // SAFETY: `shift + len` lies inside both, which are apart.
                unsafe { copy_message(source.as_ptr().add(shift), target.as_mut_ptr().add(shift), len) };
                let [before, copied, behind] = [0..shift, shift..shift + len, shift + len..shift + len + 64];
                assert!(target[copied.clone()] == source[copied], "{len} at {shift}");
                assert!(
                    target[before].iter().chain(&target[behind]).all(|byte| *byte == 0xa5),
                    "{len} at {shift}: wrote outside"
                );
            }
        }
    }
}
