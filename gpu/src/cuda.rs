//! Drives NVIDIA GPUs through CUDA, and AMD GPUs through HIP. If the driver library is missing at
//! run time, [`Api::devices`] returns [`Absent`], and [`CudaDevice::open`] fails.
//!
//! A [`CudaDevice`] holds its device's primary context, non-blocking streams and events. It may
//! move between threads: each call makes the context current in the calling thread and then
//! restores the previous context. Memory from `cuMemAlloc` is exported by 64-byte handles. Virtual
//! memory is exported by descriptors ([`CudaMemory`]). Memory of other allocators, such as a
//! framework's, is classified by its attributes.
//!
//! HIP's functions mirror CUDA's, with the same arguments, layouts and codes. So one table of
//! functions, under CUDA's names, serves both. The module `hip` has the functions that differ.
//! cudarc declares CUDA's functions and structures. All functions are looked up before the first
//! call. They return a `u32`, because cudarc's error enumeration lacks the codes of newer drivers.
//!
//! - The driver returns the same error for a handle of this process as for an invalid handle. So
//!   each device remembers the last [`REMEMBERED`] handles that it exported, and reports
//!   [`DeviceError::SameProcess`] for them. Older handles of this process give
//!   [`DeviceError::BadHandle`].
//! - A device that is hidden from this process (`CUDA_VISIBLE_DEVICES`) may be reachable anyway. So
//!   [`Device::reaches`] returns `true` for it, and opening its memory may fail.
//! - For virtual memory, CUDA's pointer attributes describe the reserved address range, and
//!   `cuMemGetAddressRange` describes the physical segment. Here an allocation is one segment. HIP
//!   does not report the reserved range. So with HIP, a range over several segments of another
//!   allocator cannot be registered.
//! - HIP exports virtual memory since version 7.14, and dmabuf descriptors for NICs since 7.0. It
//!   does not report pools, so memory from a pool is treated like memory from `hipMalloc`.
//! - Opened memory cannot be exported again. The error is
//!   [`Unshared::NoHandleType`](super::Unshared::NoHandleType).
//! - Pool and managed memory exist for tests ([`CudaDevice::alloc_as`]).

mod driver;
#[cfg(feature = "hip")]
mod hip;
mod library;
mod memory;
mod stream;
mod vmm;

pub use driver::CudaInfo;
pub use library::{Absent, Api};
pub use memory::CudaMemory;

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use cudarc::driver::sys;

use super::{
    Allocation, Bell, Device, DeviceCaps, DeviceError, DevicePtr, Handle, LEGACY_HANDLE, Mark, Uuid,
};
use driver::Driver;
use memory::{Held, Pinned};
use stream::Marks;

/// Number of exported handles that a device remembers, to recognize them as its own.
pub const REMEMBERED: usize = 64;

/// Settings of a [`CudaDevice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaConfig {
    /// Number of CUDA streams.
    pub streams: u8,
    /// Maximum number of outstanding marks, up to 65,536. Each mark is an event.
    pub marks: u32,
    /// The kind of memory that [`Device::alloc`] allocates.
    pub memory: CudaMemory,
}

impl Default for CudaConfig {
    fn default() -> Self {
        CudaConfig { streams: 4, marks: 256, memory: CudaMemory::Legacy }
    }
}

/// One GPU, used by one thread at a time. Dropping it waits for its streams, then frees, closes and
/// unpins all memory that it still holds.
pub struct CudaDevice {
    driver: &'static Driver,
    device: sys::CUdevice,
    context: sys::CUcontext,
    config: CudaConfig,
    caps: DeviceCaps,
    streams: Vec<sys::CUstream>,
    /// One for each stream. They wait for marks and ring bells, so that rings do not delay copies.
    ringers: Vec<sys::CUstream>,
    marks: Marks,
    owned: Vec<Held>,
    /// Whether memory was leaked on purpose. If so, drop does not release the context.
    forsaken: bool,
    opened: Vec<Held>,
    pinned: Vec<Pinned>,
    peers: Vec<(Uuid, bool)>,
    exported: VecDeque<[u8; LEGACY_HANDLE]>,
}

// SAFETY: contexts, streams and events belong to the process, not to a thread. Every call first
// makes the context current in the calling thread.
unsafe impl Send for CudaDevice {}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDevice").field("caps", &self.caps).finish_non_exhaustive()
    }
}

struct Entered {
    driver: &'static Driver,
    previous: Option<sys::CUcontext>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            // SAFETY: `previous` was current in this thread, because `Entered` is not `Send`. A
            // null `previous` leaves the thread without a context.
            unsafe { (self.driver.cuCtxSetCurrent)(previous) };
        }
    }
}

impl CudaDevice {
    /// Opens a device of this process.
    ///
    /// # Errors
    /// [`DeviceError::NoDriver`] if there is no usable driver. [`DeviceError::NoDevice`] with the
    /// number of devices, if `ordinal` is too large.
    pub fn open(api: Api, ordinal: u32, config: CudaConfig) -> Result<CudaDevice, DeviceError> {
        let driver = api.driver()?;
        let device = driver.device(ordinal)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver returned `device`, and the result is written to a local variable.
        driver::check(unsafe { (driver.cuDevicePrimaryCtxRetain)(&raw mut context, device) })?;
        let caps = DeviceCaps {
            uuid: driver.uuid(device)?,
            ordinal,
            streams: config.streams,
            marks: config.marks.min(1 << 16),
            write_word: driver.writes_words(device),
            must_flush: driver.must_flush(device),
        };
        let mut opened = CudaDevice {
            driver,
            device,
            context,
            config,
            caps,
            streams: vec![],
            ringers: vec![],
            marks: Marks::default(),
            owned: vec![],
            forsaken: false,
            opened: vec![],
            pinned: vec![],
            peers: driver.peers(device)?,
            exported: VecDeque::new(),
        };
        opened.make_streams()?;
        Ok(opened)
    }

    #[inline]
    fn enter(&self) -> Result<Entered, DeviceError> {
        let mut now = std::ptr::null_mut();
        // SAFETY: the result is written to a local variable.
        driver::check(unsafe { (self.driver.cuCtxGetCurrent)(&raw mut now) })?;
        let previous = (now != self.context).then_some(now);
        if previous.is_some() {
            // SAFETY: `open` retained the context, and drop releases it.
            driver::check(unsafe { (self.driver.cuCtxSetCurrent)(self.context) })?;
        }
        Ok(Entered { driver: self.driver, previous })
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        if let Ok(_entered) = self.enter() {
            self.end_streams();
            self.give_all_back();
        }
        if self.forsaken {
            return;
        }
        // SAFETY: `open` retained the context once, and this call releases it once.
        unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

// SAFETY: these are the driver's documented guarantees. Addresses stay valid until they are freed,
// closed or unpinned. An event is complete only after all earlier work of its stream.
unsafe impl Device for CudaDevice {
    fn caps(&self) -> DeviceCaps {
        self.caps
    }

    fn alloc(&mut self, size: u64) -> Result<DevicePtr, DeviceError> {
        self.alloc_as(self.config.memory, size)
    }

    unsafe fn free(&mut self, base: DevicePtr) -> Result<(), DeviceError> {
        // SAFETY: the caller upholds the contract of `Device::free`, as `free_owned` requires.
        unsafe { self.free_owned(base) }
    }

    fn forsake(&mut self, base: DevicePtr) {
        let before = self.owned.len();
        self.owned.retain(|owned| owned.base != base);
        self.forsaken |= self.owned.len() < before;
    }

    fn keep(&mut self, base: DevicePtr) {
        self.forsake(base);
    }

    fn allocation(&self, ptr: DevicePtr) -> Result<Allocation, DeviceError> {
        self.attributes(ptr)
    }

    fn export(&mut self, allocation: &Allocation) -> Result<Handle, DeviceError> {
        self.export_allocation(allocation)
    }

    unsafe fn open(&mut self, handle: &Handle, size: u64) -> Result<DevicePtr, DeviceError> {
        // SAFETY: the caller upholds the contract of `Device::open`, as `open_handle` requires.
        unsafe { self.open_handle(handle, size) }
    }

    unsafe fn close(&mut self, base: DevicePtr) -> Result<(), DeviceError> {
        // SAFETY: the caller upholds the contract of `Device::close`, as `close_opened` requires.
        unsafe { self.close_opened(base) }
    }

    fn reaches(&self, uuid: &Uuid) -> bool {
        // Memory of a device that is hidden from this process may still be opened. Memory of the
        // host stand-in cannot.
        *uuid != super::host::UUID
            && self.peers.iter().find(|(peer, _)| peer == uuid).is_none_or(|(_, reaches)| *reaches)
    }

    unsafe fn pin(&mut self, ptr: NonNull<u8>, len: usize) -> Result<DevicePtr, DeviceError> {
        // SAFETY: the caller upholds the contract of `Device::pin`, as `register` requires.
        unsafe { self.register(ptr, len) }
    }

    unsafe fn unpin(&mut self, ptr: NonNull<u8>) -> Result<(), DeviceError> {
        // SAFETY: the caller upholds the contract of `Device::unpin`, as `unregister` requires.
        unsafe { self.unregister(ptr) }
    }

    fn host_view(&self, ptr: DevicePtr, len: u64) -> Option<NonNull<u8>> {
        self.pinned.iter().find_map(|pinned| pinned.view(ptr, len))
    }

    #[inline]
    unsafe fn copy(
        &mut self,
        stream: u8,
        to: DevicePtr,
        from: DevicePtr,
        len: u64,
    ) -> Result<(), DeviceError> {
        let _entered = self.enter()?;
        let stream = self.stream(stream)?;
        // SAFETY: the caller guarantees that both ranges are valid. The stream lives until this
        // value is dropped.
        driver::check(unsafe { (self.driver.cuMemcpyAsync)(to.0, from.0, len as usize, stream) })
    }

    #[inline]
    unsafe fn write_word(
        &mut self,
        stream: u8,
        word: DevicePtr,
        value: u64,
    ) -> Result<(), DeviceError> {
        let _entered = self.enter()?;
        let stream = self.stream(stream)?;
        // With this flag, all earlier writes become visible before the word.
        let flags = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: the caller guarantees that the word is valid. The stream lives until this value
        // is dropped.
        driver::check(unsafe {
            (self.driver.cuStreamWriteValue64_v2)(stream, word.0, value, flags)
        })
    }

    #[inline]
    fn mark(&mut self, stream: u8) -> Result<Mark, DeviceError> {
        self.record(stream)
    }

    #[inline]
    fn reached(&mut self, mark: Mark) -> Result<bool, DeviceError> {
        self.query(mark)
    }

    fn ring(&mut self, stream: u8, mark: Mark, bell: &Bell) -> Result<(), DeviceError> {
        self.ring_at(stream, mark, bell)
    }

    fn dmabuf(&mut self, ptr: DevicePtr, len: u64) -> Option<(OwnedFd, u64)> {
        self.dmabuf_of(ptr, len)
    }

    fn flush_remote_writes(&mut self) -> Result<(), DeviceError> {
        if !self.caps.must_flush {
            return Ok(());
        }
        let _entered = self.enter()?;
        let target =
            sys::CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = sys::CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
        // SAFETY: both arguments are constants that the driver defines.
        driver::check(unsafe { (self.driver.cuFlushGPUDirectRDMAWrites)(target, scope) })
    }
}
