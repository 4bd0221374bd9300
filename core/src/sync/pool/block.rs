//! Stores values of different types in slots of one size. A type that is too large does not
//! compile:
//!
//! ```compile_fail,E0080
//! use fishplate_core::sync::pool::Block;
//! let block = Block::<40>::new([0u64; 6]);
//! ```

use core::{
    fmt,
    mem::{MaybeUninit, align_of, size_of},
};

/// Memory for a `Copy` value of at most `BYTES` bytes, aligned to 8. With 40, 104 and 232 bytes a
/// slot takes 64, 128 and 256 bytes.
#[repr(C, align(8))]
pub struct Block<const BYTES: usize>([MaybeUninit<u8>; BYTES]);

impl<const BYTES: usize> Block<BYTES> {
    /// Stores a value in a block. Checks at compile time that the value fits.
    #[inline(always)]
    pub fn new<C: Copy>(value: C) -> Self {
        const { assert!(size_of::<C>() <= BYTES, "the value is larger than its class") };
        const {
            assert!(
                align_of::<C>() <= align_of::<Self>(),
                "the value needs more alignment than its class has"
            )
        };
        let mut block = Self([MaybeUninit::uninit(); BYTES]);
        // SAFETY: the assertion above checks at compile time that the block is large enough and
        // aligned.
        unsafe { block.0.as_mut_ptr().cast::<C>().write(value) };
        block
    }

    /// Copies the value out.
    ///
    /// # Safety
    /// The block was made from a `C`.
    #[inline(always)]
    pub unsafe fn read<C: Copy>(&self) -> C {
        // SAFETY: our caller guarantees that the block holds a `C`. `new` checked the alignment.
        unsafe { self.0.as_ptr().cast::<C>().read() }
    }
}

impl<const BYTES: usize> fmt::Debug for Block<BYTES> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block<{BYTES}>")
    }
}
