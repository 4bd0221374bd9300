//! Device memory across processes: what a GPU's driver must offer, and how its memory is named.
//!
//! [`Device`] is the small trait under everything here: the host stand-in, the fakes and CUDA
//! implement it. A device belongs to one thread. Its calls enter a driver: those marked *queue*
//! return at once and neither allocate nor wait on a driver that keeps its promises; all others are
//! slow paths and may take a millisecond.
//!
//! | module             | gives                                                                  |
//! |--------------------|------------------------------------------------------------------------|
//! | `host`             | [`HostDevice`]: memory of the processor as a device                    |
//! | `any`              | [`AnyDevice`]: a device of a kind chosen when the program runs         |
//! | [`fake`]           | a driver for tests                                                     |
//! | `export`, `import` | [`Exports`], [`Imports`]: what peers may open, and what is open here   |
//! | `run`              | the memory under a range: an allocation, or adjacent physical segments |
//! | `publish`          | [`Publications`], [`DirectToken`]: buffers by name, in versions        |
//! | `revoke`           | taking memory back before it is freed                                  |
//! | `wire`, `board`    | what is said of all this over the handshake's socket                   |
//! | `share`            | [`Sharing`]: all of it together, over [`Links`]                        |
//!
//! # From a buffer to a transfer
//!
//! The owner [registers](Sharing::register) a range, which exports its allocation once, and
//! [publishes](Sharing::publish) it under a number of its choice. The peer
//! [prefetches](Sharing::prefetch): it waits for a version, opens the allocation, and has a
//! [`DirectToken`] and an [`ImportId`]. Each transfer [begins](Imports::begin) and
//! [ends](Imports::end) with that, no more. Who has a key instead of a token
//! [imports](Sharing::import) by it, which asks the owner for the handle if need be. Before the
//! owner frees the memory it [revokes](Sharing::revoke_and_wait) it.
//!
//! # What every driver has in common
//!
//! - **Whole allocations.** An export names an allocation, never a part of it: offsets travel
//!   beside the handle, counted from the allocation's first byte. Handle bytes are no identity: one
//!   driver gives equal bytes for every address in an allocation, another different ones.
//! - **Segments.** Virtual memory may be many physical segments, mapped side by side at addresses
//!   that were reserved together, as the pools of frameworks that grow are. To a driver each is an
//!   allocation of its own. An export takes all that a range touches, as many descriptors, and an
//!   importer maps them side by side again: one offset reaches all of it.
//! - **Buffer ids.** Freed addresses come back. What tells an allocation from the one that had its
//!   address before is the driver's buffer id, which never repeats within a process.
//! - **Not at home.** A process does not open a handle that it exported: it uses the address
//!   itself.
//! - **Once.** A process opens an allocation at most once, by one cache that counts users.
//! - **Closing is slow.** It may wait for every stream of the device: never beside a transfer.
//! - **Close before free.** Freeing memory that a peer has mapped is undefined: an exporter revokes
//!   first.

mod any;
mod board;
#[cfg(feature = "cuda")]
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
pub use direct::GpuDirect;
pub use error::{AllocId, ExportError};
pub use export::{ExportStats, Exports, MAX_EXPORTS, Registration};
pub use host::HostDevice;
pub use import::{Fault, ImportError, ImportId, ImportLimits, ImportStats, Imported, Imports};
pub use publish::{Binding, DirectToken, MAX_BUFFERS, Publications, PublishError, VERSIONS_KEPT, Wanted};
pub use rail::{
    GpuAgreement, GpuBell, GpuConfig, GpuLink, GpuProfile, GpuRail, GpuSetup, GpuStats, Refused, is_device,
};
pub use revoke::RevokeError;
pub use share::{Links, Published, Sharing, TellError, prepare};

/// A place in the address space that the devices of this process share. Not for the processor to
/// touch, unless [`Device::host_view`] says where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevicePtr(pub u64);

/// Whether `len` bytes at `offset` lie inside of `size` bytes.
#[inline(always)]
fn within(offset: u64, len: u64, size: u64) -> bool {
    offset.checked_add(len).is_some_and(|end| end <= size)
}

impl DevicePtr {
    /// The place `bytes` further on.
    pub fn at(self, bytes: u64) -> Self {
        DevicePtr(self.0 + bytes)
    }
}

/// Names a device on every process of the machine; ordinals are each process's own.
pub type Uuid = [u8; 16];

/// Size of a legacy handle, in bytes.
pub const LEGACY_HANDLE: usize = 64;

/// What a device is and can do. Constant once it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCaps {
    /// Which device.
    pub uuid: Uuid,
    /// Its number in this process.
    pub ordinal: u32,
    /// Streams that copies can be queued on, numbered from 0.
    pub streams: u8,
    /// Marks that can be outstanding at once.
    pub marks: u32,
    /// Whether [`Device::write_word`] is offered.
    pub write_word: bool,
    /// Whether writes by other devices (a NIC) must be flushed
    /// before this process's kernels read them.
    pub must_flush: bool,
}

/// How an allocation can be handed to another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// By a handle of 64 bytes.
    Legacy,
    /// By a file descriptor.
    Descriptor,
    /// Not at all: see [`DeviceError::NotExportable`].
    Never(Unshared),
}

/// Why memory cannot be exported, and what its owner can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unshared {
    /// From a stream-ordered pool: make the pool shareable, or allocate with `cuMemAlloc`.
    Pool,
    /// Managed memory: it moves. Allocate with `cuMemAlloc`.
    Managed,
    /// Host memory that is registered with the driver: register it as host memory.
    Host,
    /// Virtual memory created without a type of handle: ask for POSIX descriptors when creating it.
    NoHandleType,
}

/// Physical segments that one export may be made of: as many descriptors as one packet carries.
pub const MAX_SEGMENTS: usize = fishplate_shm::extension::MAX_FDS;

/// An allocation, as its driver knows it. Of virtual memory: one physical segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// First byte.
    pub base: DevicePtr,
    /// Size in bytes.
    pub size: u64,
    /// The driver's own number, never given again in this process.
    pub buffer: u64,
    /// How it can be exported.
    pub share: Share,
    /// Start of its reserved addresses, which others may share: virtual memory only.
    pub reservation: Option<DevicePtr>,
}

/// What lets another process open an allocation.
#[derive(Debug)]
pub enum Handle {
    /// Opaque bytes.
    Legacy([u8; LEGACY_HANDLE]),
    /// A descriptor.
    Descriptor(OwnedFd),
    /// Descriptors of adjacent physical segments, in order, with the size of each in bytes.
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

/// The end of what was queued on a stream at some moment. Good until it was
/// [`reached`](Device::reached).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(pub u32);

/// What a device did not do. Nothing has changed, unless said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is no driver on this machine.
    NoDriver,
    /// There is no such device in this process: the number of devices that there are.
    NoDevice(u32),
    /// Not an address of device memory.
    NotDeviceMemory,
    /// The memory cannot be given to another process.
    NotExportable(Unshared),
    /// A handle that does not open: stale, damaged, or of another machine.
    BadHandle,
    /// The handle was made by this very process.
    SameProcess,
    /// The exporter's device cannot be reached from this one.
    NoPeerAccess,
    /// Out of memory, address space, or marks.
    Exhausted,
    /// The driver has lost the device; every later call fails too.
    /// The outcome of queued work is unknown.
    Lost(i32),
    /// The driver's own code.
    Driver(i32),
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceError::NoDriver => f.write_str("no GPU driver on this machine"),
            DeviceError::NoDevice(there) => write!(f, "no such device: there are {there}"),
            DeviceError::NotDeviceMemory => f.write_str("not an address of device memory"),
            DeviceError::NotExportable(why) => write!(
                f,
                "the memory cannot be exported: {}",
                match why {
                    Unshared::Pool =>
                        "it is of a stream-ordered pool; make the pool shareable, or allocate with cuMemAlloc",
                    Unshared::Managed => "it is managed memory; allocate with cuMemAlloc",
                    Unshared::Host => "it is host memory; register it as such",
                    Unshared::NoHandleType =>
                        "it was created without a type of handle; ask for POSIX descriptors when creating it",
                }
            ),
            DeviceError::BadHandle => {
                f.write_str("the handle does not open: stale, damaged, or of another machine")
            }
            DeviceError::SameProcess => f.write_str("the handle is of this process: use the address itself"),
            DeviceError::NoPeerAccess => f.write_str("the exporter's device cannot be reached from this one"),
            DeviceError::Exhausted => f.write_str("the device is out of memory, address space or marks"),
            DeviceError::Lost(code) => write!(f, "the device is lost (driver code {code})"),
            DeviceError::Driver(code) => write!(f, "the driver refused (code {code})"),
        }
    }
}

impl std::error::Error for DeviceError {}

/// One GPU as one thread of this process uses it, or what stands in for one.
///
/// # Safety
/// Rails queue copies and touch memory on a device's word:
///
/// - What [`alloc`](Device::alloc) and [`open`](Device::open) return is memory of the size asked
///   for, until it is freed or closed. [`allocation`](Device::allocation) names the bounds of the
///   memory that holds the address, and no more.
/// - What [`pin`](Device::pin) returns leads to those bytes, until they are unpinned.
/// - What [`host_view`](Device::host_view) returns is valid for reads and writes of `len` bytes as
///   long as the memory is allocated or open.
/// - Once [`reached`](Device::reached) says yes, nothing queued on the stream before that mark
///   touches memory any more.
/// - [`caps`](Device::caps) never changes.
pub unsafe trait Device: Send {
    /// What it is and can do.
    fn caps(&self) -> DeviceCaps;

    /// Takes `size` bytes that can be exported. Slow path.
    fn alloc(&mut self, size: u64) -> Result<DevicePtr, DeviceError>;

    /// Gives back what [`alloc`](Device::alloc) gave. Slow path.
    ///
    /// # Safety
    /// Nothing queued uses it, and no peer has it open.
    unsafe fn free(&mut self, base: DevicePtr) -> Result<(), DeviceError>;

    /// Leaves what [`alloc`](Device::alloc) gave allocated for good, also when the device is
    /// dropped: a peer may have it open. Nothing where an importer keeps the memory alive itself.
    /// Slow path.
    fn forsake(&mut self, _base: DevicePtr) {}

    /// Returns the allocation of an address; of virtual memory, the physical segment.
    /// One or two driver calls.
    fn allocation(&self, ptr: DevicePtr) -> Result<Allocation, DeviceError>;

    /// Makes a handle of an allocation. May be repeated. Slow path.
    fn export(&mut self, allocation: &Allocation) -> Result<Handle, DeviceError>;

    /// Opens an allocation of `size` bytes of another process and returns where it begins here.
    /// Segments are mapped side by side, and closed by one [`close`](Device::close). Where segments
    /// have no place, [`DeviceError::BadHandle`]. Slow path.
    ///
    /// # Safety
    /// The handle names memory that its owner keeps until [`close`](Device::close); it may be
    /// written at any time.
    unsafe fn open(&mut self, handle: &Handle, size: u64) -> Result<DevicePtr, DeviceError>;

    /// Closes what [`open`](Device::open) opened. Slow path, and waits for the device.
    ///
    /// # Safety
    /// Nothing queued uses it.
    unsafe fn close(&mut self, base: DevicePtr) -> Result<(), DeviceError>;

    /// Whether copies to and from memory of that device are carried out by this one.
    fn reaches(&self, uuid: &Uuid) -> bool;

    /// Lets the device use memory of the processor, and tells where it sees it. Slow path.
    ///
    /// # Safety
    /// The bytes stay mapped until [`unpin`](Device::unpin).
    unsafe fn pin(&mut self, ptr: NonNull<u8>, len: usize) -> Result<DevicePtr, DeviceError>;

    /// Ends what [`pin`](Device::pin) began. Slow path.
    ///
    /// # Safety
    /// Nothing queued uses the memory.
    unsafe fn unpin(&mut self, ptr: NonNull<u8>) -> Result<(), DeviceError>;

    /// Where the processor may touch these bytes itself, if it may: memory of the host stand-in, or
    /// seen through a window of the bus.
    fn host_view(&self, ptr: DevicePtr, len: u64) -> Option<NonNull<u8>>;

    /// Copies on a stream. Those of one stream end in order, others in any order. *Queue.*
    ///
    /// # Safety
    /// Both ranges are memory of a device, opened, or pinned, until a later [`mark`](Device::mark)
    /// of the stream is reached; they do not overlap.
    unsafe fn copy(
        &mut self,
        stream: u8,
        to: DevicePtr,
        from: DevicePtr,
        len: u64,
    ) -> Result<(), DeviceError>;

    /// Stores a word when everything queued on the stream before has ended and is visible. *Queue.*
    ///
    /// # Safety
    /// As for [`copy`](Device::copy); `word` is a multiple of 8.
    unsafe fn write_word(&mut self, stream: u8, word: DevicePtr, value: u64) -> Result<(), DeviceError>;

    /// Marks the end of what is queued on a stream.
    /// [`DeviceError::Exhausted`] goes away when others are reached. *Queue.*
    fn mark(&mut self, stream: u8) -> Result<Mark, DeviceError>;

    /// Whether all before the mark has ended and is visible to processors and devices; if so, or on
    /// an error, the mark is given back. *Queue.*
    fn reached(&mut self, mark: Mark) -> Result<bool, DeviceError>;

    /// A descriptor by which a NIC reaches these bytes, and where they begin in it; `None`: the
    /// driver gives none. Slow path.
    fn dmabuf(&mut self, ptr: DevicePtr, len: u64) -> Option<(OwnedFd, u64)>;

    /// Makes what other devices (a NIC) wrote into this one's memory visible to it. Nothing where
    /// [`DeviceCaps::must_flush`] is false.
    fn flush_remote_writes(&mut self) -> Result<(), DeviceError>;
}
