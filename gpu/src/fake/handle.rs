//! The 64-byte handle of fake memory. It names the owner process, and the memory's id and
//! descriptor number in that process.

use super::memory::{MAGIC_HANDLE, Owner};
use crate::{DeviceError, LEGACY_HANDLE};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub owner: Owner,
    pub id: u64,
    pub base: u64,
    pub fd: u64,
    /// Offset of the exported address in the allocation. 0 if all handles of an allocation are
    /// equal.
    pub offset: u64,
}

impl Named {
    pub fn bytes(&self) -> [u8; LEGACY_HANDLE] {
        let mut words = [
            MAGIC_HANDLE,
            self.owner.pid,
            self.owner.start,
            self.id,
            self.base,
            self.fd,
            self.offset,
            0,
        ];
        words[7] = sum(&words);
        let mut bytes = [0; LEGACY_HANDLE];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes a handle.
    ///
    /// # Errors
    /// [`DeviceError::BadHandle`] for bytes that no fake driver has made.
    pub fn read(bytes: &[u8; LEGACY_HANDLE]) -> Result<Named, DeviceError> {
        let mut words = [0; LEGACY_HANDLE / 8];
        for (word, from) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(from.try_into().unwrap_or_default());
        }
        let [magic, pid, start, id, base, fd, offset, told] = words;
        if magic != MAGIC_HANDLE || told != sum(&words) {
            return Err(DeviceError::BadHandle);
        }
        Ok(Named { owner: Owner { pid, start }, id, base, fd, offset })
    }
}

fn sum(words: &[u64; 8]) -> u64 {
    words[..7].iter().fold(0xCBF2_9CE4_8422_2325, |sum, word| {
        (sum ^ word).rotate_left(23).wrapping_mul(0x9E37_79B9_7F4A_7C15)
    })
}
