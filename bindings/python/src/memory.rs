//! The classes `Memory` and `Slice`: memory of the node.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use fishplate::LocalAddr;
use fishplate::core::error::{AttachError, OpError};
use fishplate::node::{Error, Memory as Named};
use fishplate::shm::Segment;
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyIndexError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PySlice, PyTuple};

use crate::dlpack::{self, On};
use crate::error::Fault;
use crate::inner::Inner;
use crate::shared::{HELD_MAX, Shared, is_lent};
use crate::view::View;

/// Keeps host pages mapped, even after the node is closed.
pub(crate) enum Pages {
    Own(Segment),
    Lent(Arc<View>),
    /// Freed with the node, or later if tensors hold the `Arc`.
    Device(NonNull<u8>, Arc<()>),
}

// SAFETY: the address points to device memory, which is not tied to a thread. The other variants
// are `Send` and `Sync`.
unsafe impl Send for Pages {}
// SAFETY: any thread may use the address of device memory. The other variants are `Sync`.
unsafe impl Sync for Pages {}

/// Registered memory of a node, with the buffer protocol.
#[pyclass(frozen, module = "fishplate")]
pub(crate) struct Memory {
    pub shared: Arc<Shared>,
    pub memory: Named,
    pages: Pages,
    freed: AtomicBool,
}

impl Memory {
    pub fn new(shared: &Arc<Shared>, memory: Named, pages: Pages) -> Memory {
        Memory { shared: shared.clone(), memory, pages, freed: AtomicBool::new(false) }
    }

    fn place(&self, py: Python<'_>, offset: u64, len: usize) -> PyResult<LocalAddr> {
        let size = self.memory.len() as u64;
        match offset.checked_add(len as u64) {
            Some(end) if end <= size => Ok(self.memory.at(offset)),
            _ => Err(out_of_bounds(py, offset, len, size)),
        }
    }

    fn part(slf: &Bound<'_, Self>, start: u64, len: usize) -> PyResult<Slice> {
        slf.get().place(slf.py(), start, len)?;
        Ok(Slice { memory: slf.clone().unbind(), start, len })
    }

    /// Returns the address of an offset, and what a tensor over it must hold. Takes the loan before
    /// it looks: [`free`](Self::free) and [`Shared::close`] say why.
    fn bytes(&self, start: u64) -> PyResult<(NonNull<u8>, Option<Arc<()>>)> {
        let loan = match &self.pages {
            Pages::Device(_, loan) => Some(loan.clone()),
            _ => None,
        };
        fence(Ordering::SeqCst);
        if self.freed.load(Ordering::Relaxed) || self.is_on_device() && self.shared.is_closed() {
            return Err(PyBufferError::new_err("the memory was freed"));
        }
        let pages = match &self.pages {
            Pages::Own(segment) => segment.ptr(),
            Pages::Lent(lent) => lent.start(),
            Pages::Device(start, _) => *start,
        };
        // SAFETY: callers pass only offsets inside the pages.
        Ok((unsafe { pages.add(start as usize) }, loan))
    }

    fn is_on_device(&self) -> bool {
        match &self.pages {
            Pages::Own(_) => false,
            Pages::Lent(lent) => lent.is_on_device(),
            Pages::Device(..) => true,
        }
    }

    fn on(&self) -> On {
        match self.shared.gpu {
            Some(gpu) if self.is_on_device() => On::of(gpu),
            _ => On::Host,
        }
    }

    fn lend<'py>(
        &self,
        object: &Bound<'py, PyAny>,
        (start, len): (u64, usize),
    ) -> PyResult<Bound<'py, PyAny>> {
        let (at, loan) = self.bytes(start)?;
        dlpack::lend(object, (at, len), self.on(), loan)
    }

    fn array<'py>(
        &self,
        py: Python<'py>,
        (start, len): (u64, usize),
    ) -> PyResult<Bound<'py, PyDict>> {
        if self.on() == On::Host {
            return Err(PyAttributeError::new_err("the memory is not on a GPU"));
        }
        let array = PyDict::new(py);
        array.set_item("shape", (len,))?;
        array.set_item("typestr", "|u1")?;
        array.set_item("data", (self.bytes(start)?.0.as_ptr().addr(), false))?;
        array.set_item("strides", py.None())?;
        array.set_item("version", 3)?;
        array.set_item("stream", py.None())?;
        Ok(array)
    }

    /// Fills a `Py_buffer` with a part of the memory. The buffer keeps `object` alive.
    ///
    /// # Safety
    /// `view` is null or points to a `Py_buffer`.
    unsafe fn fill(
        &self,
        object: &Bound<'_, PyAny>,
        (start, len): (u64, usize),
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        if self.is_on_device() {
            return Err(PyBufferError::new_err(
                "the memory is on a device; use a tensor over it, or `read` and `write`",
            ));
        }
        let at = self.bytes(start)?.0.as_ptr().cast();
        // SAFETY: `view` is null or the caller's structure. It receives a reference to `object`,
        // which keeps the pages alive. The range lies inside them, and is writable.
        match unsafe {
            ffi::PyBuffer_FillInfo(view, object.as_ptr(), at, len as ffi::Py_ssize_t, 0, flags)
        } {
            0 => Ok(()),
            _ => Err(PyErr::fetch(object.py())),
        }
    }
}

fn out_of_bounds(py: Python<'_>, offset: u64, len: usize, size: u64) -> PyErr {
    Fault::from(OpError::OutOfBounds { offset, len: len as u64, size }).raise(py)
}

#[pymethods]
impl Memory {
    fn __len__(&self) -> usize {
        self.memory.len()
    }

    fn __repr__(&self) -> String {
        let freed = if self.freed.load(Ordering::Relaxed) { ", freed" } else { "" };
        format!("<fishplate.Memory of {} bytes{freed}>", self.memory.len())
    }

    fn __getitem__(slf: &Bound<'_, Self>, range: &Bound<'_, PyAny>) -> PyResult<Slice> {
        let range = range.cast::<PySlice>()?;
        let found = range.indices(slf.get().memory.len() as isize)?;
        if found.step != 1 {
            return Err(PyIndexError::new_err(
                "invalid slice: memory has no strides; use a step of 1",
            ));
        }
        Memory::part(slf, found.start as u64, (found.stop - found.start).max(0) as usize)
    }

    #[pyo3(signature = (offset, len=None))]
    fn at(slf: &Bound<'_, Self>, offset: u64, len: Option<usize>) -> PyResult<Slice> {
        let rest = (slf.get().memory.len() as u64).saturating_sub(offset) as usize;
        Memory::part(slf, offset, len.unwrap_or(rest))
    }

    fn handle<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let memory = self.memory;
        let handle = self.shared.enter(py, |inner| {
            let handle = inner.node.handle(memory)?;
            inner.registered.exported(memory);
            Ok(handle)
        })?;
        Ok(PyBytes::new(py, &handle))
    }

    fn free(&self, py: Python<'_>) -> PyResult<()> {
        let memory = self.memory;
        let freed = self.shared.enter(py, |inner| {
            // Under the lock, so that calls of two threads do not restore each other's value.
            // Stores `freed`, fences, then counts the tensors. `bytes` counts its tensor, fences,
            // then loads `freed`. So a tensor that another thread makes meanwhile is counted here
            // or refused there.
            let was = self.freed.swap(true, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if matches!(&self.pages, Pages::Device(_, loan) if is_lent(loan)) {
                self.freed.store(was, Ordering::SeqCst);
                return Err(Fault::Lent);
            }
            inner.reap();
            let freed = inner.node.free(memory);
            let gone = inner.node.handle(memory).is_err();
            if gone {
                inner.forget(memory, matches!(freed, Err(Error::Attach(AttachError::Kept(_)))));
            }
            self.freed.store(was || gone, Ordering::SeqCst);
            Ok(freed)
        });
        freed?.map_err(|error| Fault::from(error).raise(py))
    }

    #[pyo3(signature = (offset=0, len=None))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        offset: u64,
        len: Option<usize>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let len = len.unwrap_or((self.memory.len() as u64).saturating_sub(offset) as usize);
        let at = self.place(py, offset, len)?;
        PyBytes::new_with(py, len, |bytes| {
            let on_device = self.is_on_device();
            let read = |inner: &mut Inner| match on_device {
                true => Ok(inner.node.read_device(at, bytes)?),
                false => Ok(inner.node.read(at, bytes)?),
            };
            match len <= HELD_MAX && !on_device {
                true => self.shared.enter(py, read),
                false => self.shared.blocking(py, read),
            }
        })
    }

    #[pyo3(signature = (data, offset=0))]
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>, offset: u64) -> PyResult<()> {
        let view = View::to_read(data)?.on_host()?;
        let at = self.place(py, offset, view.len())?;
        let on_device = self.is_on_device();
        let write = |inner: &mut Inner| match on_device {
            true => Ok(inner.node.write_device(at, view.bytes())?),
            false => Ok(inner.node.write(at, view.bytes())?),
        };
        match view.len() <= HELD_MAX && !on_device {
            true => self.shared.enter(py, write),
            false => self.shared.blocking(py, write),
        }
    }

    #[pyo3(signature = (offset=0))]
    fn load(&self, py: Python<'_>, offset: u64) -> PyResult<u64> {
        let at = self.memory.at(offset);
        self.shared.enter(py, |inner| Ok(inner.node.load(at)?))
    }

    #[pyo3(signature = (value, offset=0))]
    fn store(&self, py: Python<'_>, value: u64, offset: u64) -> PyResult<()> {
        let at = self.memory.at(offset);
        self.shared.enter(py, |inner| Ok(inner.node.store(at, value)?))
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        if self.freed.load(Ordering::Relaxed) || self.shared.is_closed() {
            return Ok(());
        }
        match self.free(py) {
            // Another thread has closed the node meanwhile.
            Err(_) if self.shared.is_closed() => Ok(()),
            freed => freed,
        }
    }

    /// # Safety
    /// `view` is null or points to a `Py_buffer`, as Python guarantees.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        // SAFETY: the caller guarantees that `view` is null or points to a `Py_buffer`.
        unsafe { this.fill(slf.as_any(), (0, this.memory.len()), view, flags) }
    }

    #[pyo3(signature = (**options))]
    fn __dlpack__<'py>(
        slf: &Bound<'py, Self>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let this = slf.get();
        dlpack::check(options, this.on())?;
        this.lend(slf.as_any(), (0, this.memory.len()))
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        self.on().device()
    }

    #[getter(__cuda_array_interface__)]
    fn cuda_array<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.array(py, (0, self.memory.len()))
    }
}

/// A range of memory of the node.
#[pyclass(frozen, module = "fishplate")]
pub(crate) struct Slice {
    memory: Py<Memory>,
    start: u64,
    pub len: usize,
}

impl Slice {
    pub fn at(&self) -> LocalAddr {
        self.memory.get().memory.at(self.start)
    }

    pub fn shared(&self) -> &Arc<Shared> {
        &self.memory.get().shared
    }
}

#[pymethods]
impl Slice {
    fn __len__(&self) -> usize {
        self.len
    }

    fn __repr__(&self) -> String {
        format!("<fishplate.Slice of {} bytes at {}>", self.len, self.start)
    }

    /// # Safety
    /// `view` is null or points to a `Py_buffer`, as Python guarantees.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        // SAFETY: the caller guarantees that `view` is null or points to a `Py_buffer`.
        unsafe { this.memory.get().fill(slf.as_any(), (this.start, this.len), view, flags) }
    }

    #[pyo3(signature = (**options))]
    fn __dlpack__<'py>(
        slf: &Bound<'py, Self>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let this = slf.get();
        dlpack::check(options, this.memory.get().on())?;
        this.memory.get().lend(slf.as_any(), (this.start, this.len))
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        self.memory.get().on().device()
    }

    #[getter(__cuda_array_interface__)]
    fn cuda_array<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.memory.get().array(py, (self.start, self.len))
    }
}
