//! Device memory across processes: the driver interface of a GPU, and export and import of its
//! memory.
//!
//! All modules build on the small trait [`Device`]. CUDA and HIP, processor memory and the fake
//! driver implement it. A device belongs to one thread, and its methods call the driver. Methods
//! marked *queue* return immediately. They do not allocate or wait, unless the driver does. All
//! other methods are slow paths: they may take a millisecond, and a close may wait for the device.
//!
//! | module             | contents                                                               |
//! |--------------------|------------------------------------------------------------------------|
//! | `host`             | [`HostDevice`]: processor memory as a device                           |
//! | `any`              | [`AnyDevice`]: a device of a kind chosen at run time                   |
//! | [`fake`]           | a driver for tests                                                     |
//! | `export`, `import` | [`Exports`], [`Imports`]: memory for peers, and memory of peers        |
//! | `run`              | the memory under a range: an allocation, or adjacent physical segments |
//! | `publish`          | [`Publications`], [`DirectToken`]: buffers by name, in versions        |
//! | `revoke`           | revocation of memory before it is freed                                |
//! | `wire`, `record`   | the messages over the handshake's socket                               |
//! | `share`            | [`Sharing`]: exports, imports and publications over [`Links`]          |
//!
//! # Example
//!
//! ```
//! use fishplate_gpu::{Device, HostDevice};
//!
//! let mut device = HostDevice::new();
//! let memory = device.alloc(4096)?;
//! assert_eq!(device.allocation(memory)?.base, memory);
//! // SAFETY: nothing uses the memory.
//! unsafe { device.free(memory) }?;
//! # Ok::<(), fishplate_gpu::DeviceError>(())
//! ```
//!
//! # From a buffer to a transfer
//!
//! The owner [registers](Sharing::register) a range, which exports its allocation once, and
//! [publishes](Sharing::publish) it under a number of its choice. The peer calls
//! [`prefetch`](Sharing::prefetch), which waits for a version, opens the allocation, and returns a
//! [`DirectToken`] and an [`ImportId`]. A transfer then needs only [`begin`](Imports::begin) and
//! [`end`](Imports::end). A peer with a key instead of a token [imports](Sharing::import) by key,
//! which requests the handle from the owner if needed. The owner
//! [revokes](Sharing::revoke_and_wait) memory before it frees it.
//!
//! # Common to all drivers
//!
//! - **Whole allocations.** An export covers a whole allocation. Offsets are sent separately from
//!   the handle, and count from the allocation's start. The bytes of a handle do not identify
//!   memory: for two addresses in one allocation, some drivers return equal bytes and others do
//!   not.
//! - **Segments.** Virtual memory, such as a growing pool of a framework, may consist of many
//!   physical segments at adjacent addresses that were reserved together. The driver treats each
//!   segment as an allocation. An export covers all segments that a range touches, with one
//!   descriptor each. The importer maps them at adjacent addresses too, so offsets are valid across
//!   segments.
//! - **Buffer ids.** Addresses are reused after a free. The driver's buffer id, which never repeats
//!   within a process, distinguishes an allocation from earlier ones at its address.
//! - **Not in the same process.** A process does not open its own handles, but uses the memory's
//!   address.
//! - **Opened once.** A device opens an allocation of a peer at most once, through a cache that
//!   counts users.
//! - **Closing is slow.** A close may wait for all streams of the device, so never close during a
//!   transfer.
//! - **Close before free.** Freeing memory that a peer has mapped is undefined behaviour, so the
//!   exporter revokes it first.

mod any;
mod bell;
#[cfg(any(feature = "cuda", feature = "hip"))]
pub mod cuda;
mod direct;
mod done;
mod error;
mod export;
pub mod fake;
#[doc(hidden)]
pub mod fuzzing;
mod host;
mod import;
mod pair;
mod publish;
#[cfg(all(test, fishplate_loom))]
mod races;
mod rail;
mod record;
mod relay;
mod revoke;
mod run;
mod share;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod wire;

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use fishplate_core::sync::primitive;
use fishplate_shm::extension::Descriptors;

pub use any::AnyDevice;
pub use bell::Bell;
pub use direct::GpuDirect;
pub use error::{AllocId, ExportError};
pub use export::{ExportStats, Exports, MAX_EXPORTS, Registration};
pub use host::HostDevice;
pub use import::{Fault, ImportError, ImportId, ImportLimits, ImportStats, Imported, Imports};
pub use publish::{
    Binding, DirectToken, MAX_BUFFERS, Publications, PublishError, VERSIONS_KEPT, Wanted,
};
pub use rail::{
    GpuAgreement, GpuConfig, GpuLink, GpuProfile, GpuRail, GpuSetup, GpuStats, GpuWaitObject,
    Refused, is_device,
};
pub use revoke::RevokeError;
pub use share::{Links, Published, Sharing, TellError, prepare};

/// An address in the address space that all devices of this process share. The processor must not
/// dereference it. [`Device::host_view`] returns a host address if there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevicePtr(pub u64);

#[inline(always)]
fn within(offset: u64, len: u64, size: u64) -> bool {
    offset.checked_add(len).is_some_and(|end| end <= size)
}

impl DevicePtr {
    /// Returns the address `bytes` after this one.
    pub fn at(self, bytes: u64) -> Self {
        DevicePtr(self.0 + bytes)
    }
}

/// Identifies a device in all processes of the machine. An ordinal is valid in one process only.
pub type Uuid = [u8; 16];

/// Size of a legacy handle, in bytes.
pub const LEGACY_HANDLE: usize = 64;

/// Properties of an open device. They never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCaps {
    /// The device's UUID.
    pub uuid: Uuid,
    /// The device's ordinal in this process, from 0.
    pub ordinal: u32,
    /// Number of streams for copies. Streams are numbered from 0.
    pub streams: u8,
    /// Maximum number of outstanding marks.
    pub marks: u32,
    /// Whether [`Device::write_word`] is supported.
    pub write_word: bool,
    /// Whether writes of other devices, such as NICs, must be flushed before kernels of this
    /// process read them.
    pub must_flush: bool,
}

/// How an allocation can be exported to another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// The allocation is exported by a handle of 64 bytes.
    Legacy,
    /// The allocation is exported by a file descriptor.
    Descriptor,
    /// The allocation cannot be exported: see [`DeviceError::NotExportable`].
    Never(Unshared),
}

/// Why memory cannot be exported, and the remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unshared {
    /// The memory belongs to a stream-ordered pool. Make the pool shareable, or use `cuMemAlloc`.
    Pool,
    /// The memory is managed, so it may migrate. Use `cuMemAlloc`.
    Managed,
    /// The memory is host memory registered with the driver. Register it as host memory.
    Host,
    /// The memory is virtual and was created without a handle type. Request POSIX descriptors when
    /// creating it.
    NoHandleType,
}

/// Maximum number of physical segments in one export: the number of descriptors that one packet can
/// carry.
pub const MAX_SEGMENTS: usize = fishplate_shm::extension::MAX_FDS;

/// An allocation as the driver reports it, or one physical segment of virtual memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Address of the first byte.
    pub base: DevicePtr,
    /// Size in bytes.
    pub size: u64,
    /// The driver's buffer id, never reused in this process.
    pub buffer: u64,
    /// How the allocation can be exported.
    pub share: Share,
    /// For virtual memory, the start of the reserved address range. Several allocations may lie in
    /// one range.
    pub reservation: Option<DevicePtr>,
}

/// A handle of an allocation, for opening it in another process.
#[derive(Debug)]
pub enum Handle {
    /// A handle of 64 bytes, opaque to us.
    Legacy([u8; LEGACY_HANDLE]),
    /// A file descriptor.
    Descriptor(OwnedFd),
    /// Descriptors and sizes, in bytes, of adjacent physical segments, in address order.
    Segments(Vec<(OwnedFd, u64)>),
}

impl Descriptors for Handle {
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            Handle::Legacy(_) => Vec::new(),
            Handle::Descriptor(fd) => vec![fd.as_fd()],
            Handle::Segments(segments) => segments.iter().map(|(fd, _)| fd.as_fd()).collect(),
        }
    }
}

/// A position in a stream, like an event. Valid until [`reached`](Device::reached) reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(pub u32);

/// Why a device call failed. Unless a variant says otherwise, nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceError {
    /// This machine has no driver.
    NoDriver,
    /// This process has only that many devices.
    NoDevice(u32),
    /// The address is not device memory.
    NotDeviceMemory,
    /// The memory cannot be exported.
    NotExportable(Unshared),
    /// The memory belongs to another device of this process.
    OtherDevice {
        /// Ordinal of the device that owns the memory.
        owner: u32,
        /// Ordinal of the device that was called.
        asked: u32,
    },
    /// The handle is stale, damaged, or from another machine.
    BadHandle,
    /// This process exported the handle itself. Use the memory's address.
    SameProcess,
    /// The exporter's device cannot be reached from this device.
    NoPeerAccess,
    /// Not enough memory, address space, or marks are left.
    Exhausted,
    /// The driver has lost the device. The outcome of queued work is unknown, and all later calls
    /// fail.
    Lost(i32),
    /// Another error of the driver, with its code.
    Driver(i32),
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceError::NoDriver => f.write_str("no usable GPU driver on this machine"),
            DeviceError::NoDevice(there) => {
                write!(f, "no such device: the number of devices in this process is {there}")
            }
            DeviceError::NotDeviceMemory => f.write_str("the address is not in device memory"),
            DeviceError::NotExportable(why) => write!(
                f,
                "the memory cannot be exported: {}",
                match why {
                    Unshared::Pool =>
                        "it belongs to a stream-ordered pool; make the pool shareable, or allocate \
                         with cuMemAlloc",
                    Unshared::Managed =>
                        "it is managed memory; allocate with cuMemAlloc or hipMalloc",
                    Unshared::Host => "it is host memory; register it as host memory",
                    Unshared::NoHandleType =>
                        "it was created without a handle type; request POSIX descriptors when \
                         creating it",
                }
            ),
            DeviceError::OtherDevice { owner, asked } => {
                write!(f, "the memory belongs to device {owner}, not to device {asked}")
            }
            DeviceError::BadHandle => {
                f.write_str("cannot open the handle: it is stale, damaged, or from another machine")
            }
            DeviceError::SameProcess => {
                f.write_str("the handle belongs to this process; use the address of its memory")
            }
            DeviceError::NoPeerAccess => {
                f.write_str("this device cannot access memory of the exporter's device")
            }
            DeviceError::Exhausted => {
                f.write_str("the device is out of memory, address space or completion marks")
            }
            DeviceError::Lost(code) => {
                write!(f, "the device is lost (driver code {code}); restart the process")
            }
            DeviceError::Driver(code) => write!(f, "the driver call failed with code {code}"),
        }
    }
}

impl std::error::Error for DeviceError {}

/// A GPU or a stand-in for one, used by one thread of this process.
///
/// # Safety
/// Rails rely on these promises when they queue copies and access memory:
///
/// - [`alloc`](Device::alloc) and [`open`](Device::open) return memory of the requested size, valid
///   until it is freed or closed. [`allocation`](Device::allocation) returns the exact bounds of
///   the memory that holds an address.
/// - [`pin`](Device::pin) returns the device address of the pinned bytes, valid until they are
///   unpinned.
/// - [`host_view`](Device::host_view) returns a pointer valid for reads and writes of `len` bytes
///   while the memory is allocated or open.
/// - After [`reached`](Device::reached) has returned `true`, no work queued on the stream before
///   that mark accesses memory.
/// - [`caps`](Device::caps) never changes.
pub unsafe trait Device: Send {
    /// Returns the device's properties.
    fn caps(&self) -> DeviceCaps;

    /// Allocates `size` bytes of exportable memory. Slow path.
    fn alloc(&mut self, size: u64) -> Result<DevicePtr, DeviceError>;

    /// Frees memory from [`alloc`](Device::alloc). Slow path.
    ///
    /// # Safety
    /// No queued work uses the memory, and no peer has it open.
    unsafe fn free(&mut self, base: DevicePtr) -> Result<(), DeviceError>;

    /// Leaks memory from [`alloc`](Device::alloc), even after the device is dropped, because a peer
    /// may have it open. Does nothing if the memory lives as long as its importers. Slow path.
    fn forsake(&mut self, _base: DevicePtr) {}

    /// Leaks memory from [`alloc`](Device::alloc), even after the device is dropped, because a NIC
    /// or the device itself may still access it. Slow path.
    fn keep(&mut self, base: DevicePtr);

    /// Returns the allocation that contains an address. For virtual memory, returns the physical
    /// segment. Makes one or two driver calls.
    fn allocation(&self, ptr: DevicePtr) -> Result<Allocation, DeviceError>;

    /// Exports an allocation as a handle. May be called repeatedly. Slow path.
    fn export(&mut self, allocation: &Allocation) -> Result<Handle, DeviceError>;

    /// Opens an allocation of `size` bytes of another process, and returns its address in this
    /// process. Segments are mapped at adjacent addresses, and one [`close`](Device::close) closes
    /// them all. Fails with [`DeviceError::BadHandle`] if segments are not supported. Slow path.
    ///
    /// # Safety
    /// The handle's owner keeps the memory until [`close`](Device::close). The owner may write to
    /// it at any time.
    unsafe fn open(&mut self, handle: &Handle, size: u64) -> Result<DevicePtr, DeviceError>;

    /// Closes memory that [`open`](Device::open) opened. Slow path: may wait for the device.
    ///
    /// # Safety
    /// No queued work uses the memory.
    unsafe fn close(&mut self, base: DevicePtr) -> Result<(), DeviceError>;

    /// Returns whether this device can copy to and from memory of the device `uuid`.
    fn reaches(&self, uuid: &Uuid) -> bool;

    /// Pins host memory, and returns its device address. Slow path.
    ///
    /// # Safety
    /// The bytes stay mapped until [`unpin`](Device::unpin).
    unsafe fn pin(&mut self, ptr: NonNull<u8>, len: usize) -> Result<DevicePtr, DeviceError>;

    /// Unpins memory that [`pin`](Device::pin) pinned. Slow path.
    ///
    /// # Safety
    /// No queued work uses the memory.
    unsafe fn unpin(&mut self, ptr: NonNull<u8>) -> Result<(), DeviceError>;

    /// Returns a host address of a range, if the processor may access it.
    fn host_view(&self, ptr: DevicePtr, len: u64) -> Option<NonNull<u8>>;

    /// Queues a copy on a stream. Copies complete in order only within a stream. *Queue.*
    ///
    /// # Safety
    /// Both ranges are allocated, opened or pinned, and stay so until a later
    /// [`mark`](Device::mark) of the stream is reached. They do not overlap.
    unsafe fn copy(
        &mut self,
        stream: u8,
        to: DevicePtr,
        from: DevicePtr,
        len: u64,
    ) -> Result<(), DeviceError>;

    /// Queues the store of a word. The device stores it after all earlier work of the stream is
    /// complete and visible. *Queue.*
    ///
    /// # Safety
    /// The word is allocated, opened or pinned, and stays so until a later [`mark`](Device::mark)
    /// of the stream is reached. Its address is a multiple of 8.
    unsafe fn write_word(
        &mut self,
        stream: u8,
        word: DevicePtr,
        value: u64,
    ) -> Result<(), DeviceError>;

    /// Marks the end of the work queued on a stream. Fails with [`DeviceError::Exhausted`] if all
    /// marks are outstanding. Retry after another mark is reached. *Queue.*
    fn mark(&mut self, stream: u8) -> Result<Mark, DeviceError>;

    /// Returns whether all work before the mark is complete and visible to processors and devices.
    /// Frees the mark if it returns `true`, and on an error. *Queue.*
    fn reached(&mut self, mark: Mark) -> Result<bool, DeviceError>;

    /// Rings a bell once the mark, which is outstanding on `stream`, is reached. The bell may ring
    /// at once. If the device is lost, it may never ring, and the bell stays allocated. Does not
    /// delay work of the streams. Slow path: some driver calls.
    ///
    /// # Errors
    /// The bell will not ring.
    fn ring(&mut self, stream: u8, mark: Mark, bell: &Bell) -> Result<(), DeviceError>;

    /// Returns a dmabuf descriptor of a range for NICs, and the offset of the range in it. Returns
    /// `None` if the driver does not support dmabuf. Slow path.
    fn dmabuf(&mut self, ptr: DevicePtr, len: u64) -> Option<(OwnedFd, u64)>;

    /// Makes writes of other devices, such as NICs, visible to this device. Does nothing if
    /// [`DeviceCaps::must_flush`] is false.
    fn flush_remote_writes(&mut self) -> Result<(), DeviceError>;
}
