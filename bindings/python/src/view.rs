//! A buffer of the program, by Python's buffer protocol. While a view lives, its object keeps the
//! bytes where they are: a `bytearray` refuses to grow, an array to be resized.

use std::mem;
use std::ptr::NonNull;

use pyo3::exceptions::PyBufferError;
use pyo3::{Bound, PyAny, PyErr, PyResult, Python, ffi};

/// A contiguous buffer, released on drop. Boxed: exporters may point into the structure.
pub(crate) struct View(Box<ffi::Py_buffer>);

// SAFETY: a view is an address, a length and a reference to the exporter, which is only touched
// under the GIL, in `drop`. Which thread reads the address makes no difference.
unsafe impl Send for View {}
// SAFETY: as above; nothing is changed through a shared view.
unsafe impl Sync for View {}

impl View {
    /// Bytes to be read.
    pub fn to_read(object: &Bound<'_, PyAny>) -> PyResult<View> {
        View::of(object, ffi::PyBUF_SIMPLE)
    }

    /// Bytes to be written.
    pub fn to_write(object: &Bound<'_, PyAny>) -> PyResult<View> {
        View::of(object, ffi::PyBUF_WRITABLE)
    }

    fn of(object: &Bound<'_, PyAny>, flags: i32) -> PyResult<View> {
        // SAFETY: plain numbers and pointers, all of which may be zero.
        let mut raw: Box<ffi::Py_buffer> = Box::new(unsafe { mem::zeroed() });
        // SAFETY: the GIL is held, the object is alive, and the structure is ours. It is filled
        // only where the call succeeds.
        if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &mut *raw, flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        let view = View(raw);
        // An exporter written in Python could say anything else.
        match view.0.len >= 0 && (view.0.len == 0 || !view.0.buf.is_null()) {
            true => Ok(view),
            false => Err(PyBufferError::new_err("the buffer has no address, or a negative length")),
        }
    }

    /// Its first byte, or an address for none.
    pub fn start(&self) -> NonNull<u8> {
        NonNull::new(self.0.buf.cast()).unwrap_or(NonNull::dangling())
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.0.len as usize
    }

    /// Whether it must not be written.
    pub fn is_readonly(&self) -> bool {
        self.0.readonly != 0
    }

    /// Its bytes, to be copied.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the exporter keeps as many bytes there while the view lives. The program may
        // write them meanwhile; they are only copied, and nothing depends on what they are, so the
        // peer gets a mix at worst.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.len()) }
    }

    /// Its bytes, to be copied into.
    ///
    /// # Safety
    /// It was taken by [`to_write`](Self::to_write), and no other such slice of it is in use.
    #[expect(clippy::mut_from_ref, reason = "the bytes are the exporter's, not the view's")]
    pub unsafe fn bytes_mut(&self) -> &mut [u8] {
        // SAFETY: as in `bytes`; the exporter lets them be written.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.len()) }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // Without an interpreter, the bytes are nobody's any more.
        let _ = Python::try_attach(|_| {
            // SAFETY: filled by `PyObject_GetBuffer`, and released once, here, under the GIL.
            unsafe { ffi::PyBuffer_Release(&mut *self.0) }
        });
    }
}
