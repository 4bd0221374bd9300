//! Little-endian encoding without padding, for all data that processes exchange. Nothing here
//! blocks, allocates or panics.
//!
//! ```
//! use fishplate_core::bytes::{Put, Reader, Short};
//!
//! let mut out = Vec::new();
//! out.put_u16(0x1234).put_u32(5).put(b"tail");
//! assert_eq!(out, [0x34, 0x12, 5, 0, 0, 0, b't', b'a', b'i', b'l']);
//!
//! let mut fields = Reader::new(&out);
//! assert_eq!((fields.u16(), fields.u32(), fields.u64()), (Ok(0x1234), Ok(5), Err(Short)));
//! assert_eq!(fields.rest(), b"tail");
//! ```

/// The error if the input is shorter than the field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Short;

/// Reads fields from the front of a slice. A truncated field is not consumed.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Creates a reader that starts at the first of these bytes.
    #[inline(always)]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Reader { rest: bytes }
    }

    /// Reads the next `len` bytes.
    ///
    /// # Errors
    /// [`Short`] if fewer bytes are left. The other methods that read return the same error.
    #[inline(always)]
    pub fn take(&mut self, len: usize) -> Result<&'a [u8], Short> {
        let (taken, rest) = self.rest.split_at_checked(len).ok_or(Short)?;
        self.rest = rest;
        Ok(taken)
    }

    /// Reads the next `N` bytes.
    #[inline(always)]
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Short> {
        let (taken, rest) = self.rest.split_first_chunk::<N>().ok_or(Short)?;
        self.rest = rest;
        Ok(*taken)
    }

    /// Reads a `u8`.
    #[inline(always)]
    pub fn u8(&mut self) -> Result<u8, Short> {
        self.array().map(u8::from_le_bytes)
    }

    /// Reads a little-endian `u16`.
    #[inline(always)]
    pub fn u16(&mut self) -> Result<u16, Short> {
        self.array().map(u16::from_le_bytes)
    }

    /// Reads a little-endian `u32`.
    #[inline(always)]
    pub fn u32(&mut self) -> Result<u32, Short> {
        self.array().map(u32::from_le_bytes)
    }

    /// Reads a little-endian `u64`.
    #[inline(always)]
    pub fn u64(&mut self) -> Result<u64, Short> {
        self.array().map(u64::from_le_bytes)
    }

    /// Returns the unread bytes.
    #[inline(always)]
    pub const fn rest(self) -> &'a [u8] {
        self.rest
    }
}

/// Appends fields to a [`Writer`] of fixed size, or to a growing collection such as `Vec<u8>`.
pub trait Put {
    /// Appends bytes.
    fn put(&mut self, bytes: &[u8]) -> &mut Self;

    /// Appends a `u8`.
    #[inline(always)]
    fn put_u8(&mut self, value: u8) -> &mut Self {
        self.put(&[value])
    }

    /// Appends a little-endian `u16`.
    #[inline(always)]
    fn put_u16(&mut self, value: u16) -> &mut Self {
        self.put(&value.to_le_bytes())
    }

    /// Appends a little-endian `u32`.
    #[inline(always)]
    fn put_u32(&mut self, value: u32) -> &mut Self {
        self.put(&value.to_le_bytes())
    }

    /// Appends a little-endian `u64`.
    #[inline(always)]
    fn put_u64(&mut self, value: u64) -> &mut Self {
        self.put(&value.to_le_bytes())
    }
}

impl<T: for<'b> Extend<&'b u8>> Put for T {
    fn put(&mut self, bytes: &[u8]) -> &mut Self {
        self.extend(bytes);
        self
    }
}

/// Writes fields into memory of fixed size.
#[derive(Debug)]
pub struct Writer<'a> {
    out: &'a mut [u8],
    len: usize,
}

impl<'a> Writer<'a> {
    /// Creates a writer that starts at the first of these bytes.
    #[inline(always)]
    pub const fn new(out: &'a mut [u8]) -> Self {
        Writer { out, len: 0 }
    }

    /// Returns the number of bytes that all fields so far need. If this exceeds the size of the
    /// memory, the first field that did not fit and all later fields were dropped.
    #[inline(always)]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether no bytes were put so far.
    #[inline(always)]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Put for Writer<'_> {
    #[inline(always)]
    fn put(&mut self, bytes: &[u8]) -> &mut Self {
        let end = self.len.saturating_add(bytes.len());
        if let Some(place) = self.out.get_mut(self.len..end) {
            place.copy_from_slice(bytes);
        }
        self.len = end;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;
    use std::vec::Vec;

    #[test]
    fn fields_come_back_from_either_kind_of_memory() {
        fn fill(out: &mut impl Put) {
            out.put_u8(1)
                .put_u16(0x0203)
                .put_u32(0x0405_0607)
                .put_u64(0x0809_0a0b_0c0d_0e0f)
                .put(b"end");
        }
        let golden = [1, 3, 2, 7, 6, 5, 4, 15, 14, 13, 12, 11, 10, 9, 8, b'e', b'n', b'd'];
        let mut grown = Vec::new();
        fill(&mut grown);
        assert_eq!(grown, golden);
        let mut fixed = [0; 18];
        let mut writer = Writer::new(&mut fixed);
        assert!(writer.is_empty());
        fill(&mut writer);
        assert_eq!((writer.len(), fixed), (18, golden));
        let mut fields = Reader::new(&golden);
        assert_eq!((fields.u8(), fields.u16(), fields.u32()), (Ok(1), Ok(0x0203), Ok(0x0405_0607)));
        assert_eq!((fields.u64(), fields.array()), (Ok(0x0809_0a0b_0c0d_0e0f), Ok(*b"end")));
        assert!(fields.rest().is_empty());
    }

    #[test]
    fn a_field_cut_short_is_refused_and_stays() {
        for cut in 0..8 {
            let bytes = [7; 8];
            let mut fields = Reader::new(&bytes[..cut]);
            assert_eq!(fields.u64(), Err(Short));
            assert_eq!(fields.u32().is_ok(), cut >= 4);
            assert_eq!(fields.take(9), Err(Short));
            assert_eq!(fields.rest().len(), cut - if cut >= 4 { 4 } else { 0 });
        }
    }

    #[test]
    fn what_does_not_fit_is_left_out_with_all_behind_it_and_counted() {
        let mut out = [0xaa; 5];
        let mut writer = Writer::new(&mut out);
        writer.put_u32(0).put_u16(0x1111).put_u8(0x22);
        assert_eq!(writer.len(), 7);
        assert_eq!(out, [0, 0, 0, 0, 0xaa]);
    }
}
