//! Takes tensors of other libraries as buffers of calls, and lends memory of the node as tensors of
//! bytes. Both use DLPack, and both support memory of the host and of GPUs. The structures are
//! those of DLPack's `dlpack.h` before version 1.0, which libraries still accept and produce.

use std::ffi::{CStr, c_void};
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use fishplate::node::Gpu;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The names of a new capsule, and of a capsule whose tensor has a new owner.
const FRESH: &CStr = c"dltensor";
const TAKEN: &CStr = c"used_dltensor";

/// Values of `DLDeviceType`: host memory (plain, or pinned by CUDA or ROCm), CUDA memory (plain or
/// managed), and ROCm memory.
const CPU: i32 = 1;
const HOST: [i32; 3] = [CPU, 3, 11];
const CUDA: i32 = 2;
const MANAGED: i32 = 13;
const ROCM: i32 = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    Host,
    Cuda(u32),
    Rocm(u32),
}

impl On {
    /// Returns the device that holds a node's device memory: the host, if host memory stands in for
    /// it.
    pub fn of(gpu: Gpu) -> On {
        match gpu {
            Gpu::Cuda(ordinal) => On::Cuda(ordinal),
            Gpu::Hip(ordinal) => On::Rocm(ordinal),
            _ => On::Host,
        }
    }

    fn from_device((kind, ordinal): (i32, i32)) -> Option<On> {
        match kind {
            CUDA | MANAGED => Some(On::Cuda(ordinal as u32)),
            ROCM => Some(On::Rocm(ordinal as u32)),
            kind => HOST.contains(&kind).then_some(On::Host),
        }
    }

    pub fn with_number(self, number: u32) -> On {
        match self {
            On::Host => On::Host,
            On::Cuda(_) => On::Cuda(number),
            On::Rocm(_) => On::Rocm(number),
        }
    }

    pub fn device(self) -> (i32, i32) {
        match self {
            On::Host => (CPU, 0),
            On::Cuda(ordinal) => (CUDA, ordinal as i32),
            On::Rocm(ordinal) => (ROCM, ordinal as i32),
        }
    }
}

impl fmt::Display for On {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            On::Host => f.write_str("the host"),
            On::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            On::Rocm(ordinal) => write!(f, "hip:{ordinal}"),
        }
    }
}

#[repr(C)]
struct Plain {
    data: *mut c_void,
    device: (i32, i32),
    dimensions: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    /// Strides in elements. Null means compact, in row-major order.
    strides: *const i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: Plain,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

const _: () = assert!(size_of::<Plain>() == 48 && size_of::<Managed>() == 64);

/// Dropping this returns the tensor to its library.
pub(crate) struct Tensor(NonNull<Managed>);

impl Tensor {
    /// Takes the tensor of an object. Returns `None` if the object does not support DLPack.
    ///
    /// # Errors
    /// The tensor is in memory of another kind of device, or not contiguous.
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Option<Tensor>> {
        let Some(take) = object.getattr_opt("__dlpack__")? else { return Ok(None) };
        let device: (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
        let capsule = match On::from_device(device) {
            Some(On::Host) => take.call0()?,
            // -1: the caller has synchronised its streams, so the producer must not synchronise
            // any.
            Some(_) => {
                let options = PyDict::new(object.py());
                options.set_item("stream", -1)?;
                take.call((), Some(&options))?
            }
            None => {
                return Err(PyBufferError::new_err(
                    "the tensor is on a device that is neither CUDA nor ROCm; copy it to the host",
                ));
            }
        };
        // SAFETY: the GIL is held, and the object is alive. The call returns a pointer only for a
        // capsule of this name.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), FRESH.as_ptr()) };
        let managed = NonNull::new(managed.cast()).ok_or_else(|| PyErr::fetch(object.py()))?;
        // SAFETY: the call above has accepted the capsule. In the DLPack protocol, the new name
        // makes us the tensor's owner.
        if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), TAKEN.as_ptr()) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        let tensor = Tensor(managed);
        let known = On::from_device(tensor.plain().device).is_some();
        match tensor.is_contiguous() && tensor.len().is_some() && known {
            true => Ok(Some(tensor)),
            false => Err(PyBufferError::new_err(
                "the tensor is not contiguous, or its elements are not whole bytes; use \
                 .contiguous()",
            )),
        }
    }

    pub fn on(&self) -> On {
        On::from_device(self.plain().device).unwrap_or(On::Host)
    }

    fn plain(&self) -> &Plain {
        // SAFETY: the producer keeps the structure until the deleter is called, in `drop`.
        unsafe { &self.0.as_ref().tensor }
    }

    fn shape(&self) -> &[i64] {
        let plain = self.plain();
        if plain.dimensions <= 0 || plain.shape.is_null() {
            return &[];
        }
        // SAFETY: the producer keeps the shape, an array of `dimensions` numbers.
        unsafe { std::slice::from_raw_parts(plain.shape, plain.dimensions as usize) }
    }

    fn is_contiguous(&self) -> bool {
        if self.plain().strides.is_null() {
            return true;
        }
        let mut expected = 1i64;
        for (at, &extent) in self.shape().iter().enumerate().rev() {
            // SAFETY: the producer keeps the strides, an array of `dimensions` numbers like the
            // shape.
            let stride = unsafe { *self.plain().strides.add(at) };
            if extent != 1 && stride != expected && self.len() != Some(0) {
                return false;
            }
            expected = expected.saturating_mul(extent);
        }
        true
    }

    /// Returns the length in bytes, or `None` if the length or the address is invalid, or if
    /// elements are not whole bytes.
    pub fn len(&self) -> Option<usize> {
        let plain = self.plain();
        let bits = usize::from(plain.bits) * usize::from(plain.lanes);
        // DLPack packs elements that are not a multiple of 8 bits.
        let element = bits.is_multiple_of(8).then_some(bits / 8)?;
        let mut extents = self.shape().iter().map(|&extent| usize::try_from(extent).ok());
        let len = extents.try_fold(element, |len, extent| len.checked_mul(extent?))?;
        (len <= isize::MAX as usize && (len == 0 || !plain.data.is_null())).then_some(len)
    }

    pub fn start(&self) -> NonNull<u8> {
        let plain = self.plain();
        let start = plain.data.cast::<u8>().wrapping_add(plain.byte_offset as usize);
        NonNull::new(start).unwrap_or(NonNull::dangling())
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // Without an interpreter the tensor leaks: its owner may run Python code.
        let _ = Python::try_attach(|_| {
            // SAFETY: the protocol requires that the owner calls the deleter once, which happens
            // here.
            unsafe {
                if let Some(deleter) = self.0.as_ref().deleter {
                    deleter(self.0.as_ptr());
                }
            }
        });
    }
}

struct Lent {
    managed: Managed,
    len: i64,
    _object: Py<PyAny>,
    _loan: Option<Arc<()>>,
}

pub(crate) fn check(options: Option<&Bound<'_, PyDict>>, on: On) -> PyResult<()> {
    let Some(options) = options else { return Ok(()) };
    if options.get_item("copy")?.is_some_and(|copy| copy.is_truthy().unwrap_or(true)) {
        return Err(PyBufferError::new_err(
            "cannot export a copy of the tensor; copy it after the import",
        ));
    }
    match options.get_item("dl_device")?.filter(|device| !device.is_none()) {
        Some(device) if device.extract::<(i32, i32)>()? != on.device() => {
            Err(PyBufferError::new_err(
                "cannot export the tensor to another device; copy it after the import",
            ))
        }
        _ => Ok(()),
    }
}

/// Lends bytes as a tensor of one dimension. The tensor keeps `object` alive, which keeps the bytes
/// valid, and holds `loan`.
pub(crate) fn lend<'py>(
    object: &Bound<'py, PyAny>,
    (start, len): (NonNull<u8>, usize),
    on: On,
    loan: Option<Arc<()>>,
) -> PyResult<Bound<'py, PyAny>> {
    let tensor = Plain {
        data: start.as_ptr().cast(),
        device: on.device(),
        dimensions: 1,
        code: 1,
        bits: 8,
        lanes: 1,
        shape: ptr::null(),
        strides: ptr::null(),
        byte_offset: 0,
    };
    let managed = Managed { tensor, context: ptr::null_mut(), deleter: Some(give_back) };
    let object_held = object.clone().unbind();
    let lent = Lent { managed, len: len as i64, _object: object_held, _loan: loan };
    let lent = Box::into_raw(Box::new(lent));
    // SAFETY: the pointer comes from `Box::into_raw`, and is not shared yet. The capsule gets the
    // managed tensor, and `forget` frees it unless a consumer takes it.
    unsafe {
        (*lent).managed.context = lent.cast();
        (*lent).managed.tensor.shape = &raw const (*lent).len;
        let capsule =
            ffi::PyCapsule_New((&raw mut (*lent).managed).cast(), FRESH.as_ptr(), Some(forget));
        if capsule.is_null() {
            give_back(&raw mut (*lent).managed);
            return Err(PyErr::fetch(object.py()));
        }
        Ok(Bound::from_owned_ptr(object.py(), capsule))
    }
}

/// Frees a tensor that [`lend`] made. The tensor's consumer calls this once, on any thread.
unsafe extern "C" fn give_back(managed: *mut Managed) {
    // SAFETY: the context is the box from `lend`, which has one owner.
    let end = || drop(unsafe { Box::from_raw((*managed).context.cast::<Lent>()) });
    // Without an interpreter the object cannot be released, so it leaks until the process exits.
    let _ = Python::try_attach(|_| end());
}

unsafe extern "C" fn forget(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with the capsule, under the GIL. If no consumer has taken the
    // tensor, the capsule still has the name and the pointer from `lend`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, FRESH.as_ptr()) == 1 {
            give_back(ffi::PyCapsule_GetPointer(capsule, FRESH.as_ptr()).cast());
        }
    }
}
