//! A buffer of the program, taken through Python's buffer protocol, DLPack or
//! `__cuda_array_interface__`. While a view exists, its exporter keeps the bytes in place: for
//! example, a `bytearray` refuses to grow.

use std::alloc::{Layout, alloc_zeroed};
use std::ffi::CStr;
use std::io::{Error, ErrorKind};
use std::mem;
use std::ptr::NonNull;

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use pyo3::{Bound, Py, PyAny, PyErr, PyResult, Python, ffi};

use crate::dlpack::{On, Tensor};
use crate::error::Fault;

pub(crate) struct View {
    start: NonNull<u8>,
    len: usize,
    readonly: bool,
    place: Place,
    _held: Held,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Host,
    /// The GPU is `None` if unknown.
    Device(Option<On>),
}

#[expect(dead_code, reason = "held until they are dropped")]
enum Held {
    Buffer(Buffer),
    Tensor(Tensor),
    Object(Py<PyAny>),
}

/// Boxed because exporters may point into the structure.
struct Buffer(Box<ffi::Py_buffer>);

// SAFETY: a view is an address, a length and a reference to the exporter. `drop` uses the exporter
// under the GIL only. Any thread may read the other fields.
unsafe impl Send for View {}
// SAFETY: shared views are only read; the fields are numbers and pointers, as explained for `Send`.
unsafe impl Sync for View {}

impl View {
    pub fn to_read(object: &Bound<'_, PyAny>) -> PyResult<View> {
        View::of(object, ffi::PyBUF_SIMPLE)
    }

    pub fn to_write(object: &Bound<'_, PyAny>) -> PyResult<View> {
        View::of(object, ffi::PyBUF_WRITABLE)
    }

    fn of(object: &Bound<'_, PyAny>, flags: i32) -> PyResult<View> {
        // SAFETY: the GIL is held, and the object is alive.
        let is_buffer = unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1
            // CuPy's arrays are in device memory. Their buffer protocol only raises errors.
            && matches!(object.getattr_opt("__cuda_array_interface__"), Ok(None));
        if !is_buffer && let Some(tensor) = Tensor::of(object)? {
            let (start, len) = (tensor.start(), tensor.len().unwrap_or(0));
            let place = match tensor.on() {
                On::Host => Place::Host,
                on if len > 0 => Place::Device(Some(on)),
                _ => Place::Host,
            };
            return Ok(View { start, len, readonly: false, place, _held: Held::Tensor(tensor) });
        }
        if !is_buffer && let Some(array) = object.getattr_opt("__cuda_array_interface__")? {
            return View::of_array(object, &array, flags == ffi::PyBUF_WRITABLE);
        }
        // Requests the format too, to find references to Python objects. NumPy has formats for most
        // types only.
        let formatted = flags | ffi::PyBUF_ND | ffi::PyBUF_FORMAT;
        let (raw, holds_objects) = match Buffer::of(object, formatted) {
            Ok(raw) => {
                let holds_objects = raw.holds_objects();
                (raw, holds_objects)
            }
            Err(_) => (Buffer::of(object, flags)?, is_array_of_objects(object)?),
        };
        if holds_objects {
            return Err(PyBufferError::new_err(
                "the buffer holds references to Python objects; use an array of numbers",
            ));
        }
        // A faulty exporter may return a negative length or a null address.
        if raw.0.len < 0 || raw.0.len > 0 && raw.0.buf.is_null() {
            return Err(PyBufferError::new_err("the buffer has no address, or a negative length"));
        }
        Ok(View {
            start: NonNull::new(raw.0.buf.cast()).unwrap_or(NonNull::dangling()),
            len: raw.0.len as usize,
            readonly: raw.0.readonly != 0,
            place: Place::Host,
            _held: Held::Buffer(raw),
        })
    }

    fn of_array(
        object: &Bound<'_, PyAny>,
        array: &Bound<'_, PyAny>,
        writes: bool,
    ) -> PyResult<View> {
        let wrong =
            |what: &str| PyBufferError::new_err(format!("__cuda_array_interface__: {what}"));
        let array = array.cast::<PyDict>()?;
        let get = |name: &str| array.get_item(name)?.ok_or_else(|| wrong(&format!("no {name:?}")));
        let (start, readonly): (usize, bool) = get("data")?.extract()?;
        let (shape, kind): (Vec<usize>, String) =
            (get("shape")?.extract()?, get("typestr")?.extract()?);
        let width: Option<usize> = kind.get(2..).and_then(|width| width.parse().ok());
        let width = width
            .filter(|_| kind.as_bytes()[1] != b't')
            .ok_or_else(|| wrong(&format!("unknown type {kind:?}")))?;
        let len = shape.iter().try_fold(width, |len, &extent| len.checked_mul(extent));
        let len = len
            .filter(|&len| len <= isize::MAX as usize)
            .ok_or_else(|| wrong(&format!("shape {shape:?} exceeds the address space")))?;
        let strides: Option<Vec<isize>> = match array.get_item("strides")? {
            Some(strides) => strides.extract()?,
            None => None,
        };
        let mut expected = width as isize;
        for (&extent, stride) in shape.iter().rev().zip(strides.into_iter().flatten().rev()) {
            if extent != 1 && stride != expected && len != 0 {
                return Err(wrong("not contiguous; copy the array"));
            }
            expected = expected.saturating_mul(extent as isize);
        }
        if array.get_item("mask")?.is_some_and(|mask| !mask.is_none()) {
            return Err(wrong("masked; copy the array"));
        }
        if readonly && writes {
            return Err(wrong("read-only"));
        }
        let at = NonNull::new(std::ptr::without_provenance_mut(start));
        let (start, place) = match at {
            Some(at) if len > 0 => (at, Place::Device(None)),
            None if len > 0 => return Err(wrong("no address")),
            _ => (NonNull::dangling(), Place::Host),
        };
        Ok(View { start, len, readonly, place, _held: Held::Object(object.clone().unbind()) })
    }

    /// Dangles if the buffer is empty.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_readonly(&self) -> bool {
        self.readonly
    }

    pub fn place(&self) -> Place {
        self.place
    }

    pub fn is_on_device(&self) -> bool {
        self.place != Place::Host
    }

    pub fn on_host(self) -> PyResult<View> {
        match self.place {
            Place::Host => Ok(self),
            Place::Device(_) => {
                Err(PyBufferError::new_err("the tensor is in device memory; copy it to the host"))
            }
        }
    }

    /// Returns the bytes to copy from, or an empty slice if they are in device memory.
    pub fn bytes(&self) -> &[u8] {
        if self.is_on_device() {
            return &[];
        }
        // SAFETY: the exporter keeps `len` bytes in place while the view exists. The program may
        // write them at the same time. They are only copied and nothing depends on their values, so
        // at worst the peer receives a mix.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.len()) }
    }

    /// Returns the bytes to copy to.
    ///
    /// # Safety
    /// The view was taken by [`to_write`](Self::to_write), is [on the host](Self::on_host), and no
    /// other slice of it is in use.
    #[expect(clippy::mut_from_ref, reason = "the bytes are the exporter's, not the view's")]
    pub unsafe fn bytes_mut(&self) -> &mut [u8] {
        // SAFETY: the exporter keeps `len` writable bytes in place while the view exists. The
        // caller guarantees that no other slice is in use.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.len()) }
    }
}

/// Allocates zeroed bytes. The system zeroes the pages of a long buffer when they are first used.
pub(crate) fn zeroed(len: usize) -> Result<Vec<u8>, Fault> {
    let none = || Fault::System(Error::new(ErrorKind::OutOfMemory, "no memory"));
    let layout = Layout::array::<u8>(len).map_err(|_| none())?;
    if len == 0 {
        return Ok(vec![]);
    }
    // SAFETY: the layout is not empty.
    let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(none)?;
    // SAFETY: the allocation has this layout, and `len` initialised bytes. Nothing else owns it.
    Ok(unsafe { Vec::from_raw_parts(start.as_ptr(), len, len) })
}

impl Buffer {
    fn of(object: &Bound<'_, PyAny>, flags: i32) -> PyResult<Buffer> {
        // SAFETY: the structure consists of numbers and pointers that may be zero.
        let mut raw: Box<ffi::Py_buffer> = Box::new(unsafe { mem::zeroed() });
        // SAFETY: the GIL is held, `object` is alive and `raw` is ours. `raw` is used only if the
        // call succeeds.
        match unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &mut *raw, flags) } {
            0 => Ok(Buffer(raw)),
            _ => Err(PyErr::fetch(object.py())),
        }
    }

    /// Returns whether an element has the format `O`. Skips the names of fields, which are between
    /// colons.
    fn holds_objects(&self) -> bool {
        if self.0.format.is_null() {
            return false;
        }
        // SAFETY: the exporter keeps the format, a C string, while the buffer exists.
        let format = unsafe { CStr::from_ptr(self.0.format) };
        format.to_bytes().split(|&byte| byte == b':').step_by(2).any(|part| part.contains(&b'O'))
    }
}

fn is_array_of_objects(array: &Bound<'_, PyAny>) -> PyResult<bool> {
    match array.getattr_opt("dtype")? {
        Some(kind) => {
            Ok(kind.getattr_opt("hasobject")?.is_some_and(|has| has.is_truthy().unwrap_or(true)))
        }
        None => Ok(false),
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Without an interpreter the buffer leaks: its release may run Python code.
        let _ = Python::try_attach(|_| {
            // SAFETY: `PyObject_GetBuffer` filled the structure. It is released once, here, under
            // the GIL.
            unsafe { ffi::PyBuffer_Release(&mut *self.0) }
        });
    }
}
