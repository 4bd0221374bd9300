//! Device memory of a node. Only [some rails](super) access it.
//!
//! The program does not access it through host pointers. All calls here are slow paths.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use fishplate_core::error::{AttachError, OpError, PostError};
use fishplate_core::mem::{LocalAddr, LocalId, Region, RegionKind};
use fishplate_gpu::{
    AnyDevice, Device, DeviceError, DevicePtr, ExportError, GpuSetup, GpuStats, Refused,
    RevokeError,
};
use fishplate_sys::LinuxHost;

use super::contact::LOCAL;
use super::memory::Memory;
use super::rail::{NodeRail, NodeSetup};
use super::{Driver, Error, Node, behind};

#[derive(Default)]
pub(super) struct OnDevice {
    /// Registered memory. The flag is `true` if the node allocated it.
    regions: Vec<(LocalId, DevicePtr, bool)>,
}

impl Node {
    /// Allocates `len` bytes of device memory that peers can access. Handles, copies and messages
    /// work as for any [`Memory`]. May wait for the device.
    ///
    /// # Errors
    /// [`Error::NoGpu`]; [`AttachError::BadRange`] if `len` is 0; [`Error::Device`] if the device
    /// has too little memory; or [`Error::Full`] or [`AttachError::Full`].
    pub fn alloc_device(&mut self, len: usize) -> Result<Memory, Error> {
        behind!(self, |node| node.alloc_device(len));
        let mut gpu = self.gpu()?;
        if len == 0 {
            return Err(AttachError::BadRange.into());
        }
        let at = gpu.alloc(len as u64)?;
        // SAFETY: the rail keeps its device, and frees this memory only once it is deregistered and
        // no peer has it open. No other code knows its address.
        let registered = unsafe { self.register_on_device(at, len) };
        match registered {
            Ok(memory) => {
                self.on_device.regions.push((memory.id, at, true));
                Ok(memory)
            }
            Err(error) => {
                let mut gpu = self.gpu()?;
                match error {
                    Error::Attach(AttachError::Kept(_)) => gpu.keep(at),
                    // SAFETY: this call allocated the memory and failed to register it, so nothing
                    // else uses it.
                    _ => unsafe { gpu.give_back(at) },
                }
                Err(error)
            }
        }
    }

    /// Registers memory that the program allocated from the driver of the node's device. The
    /// program allocates it by `cuMemAlloc`, or as exportable virtual memory. May wait for the
    /// device.
    ///
    /// # Errors
    /// [`Error::NoGpu`]; [`Error::Device`] if the device does not know the memory or cannot export
    /// it; or [`Error::Full`] or [`AttachError::Full`].
    ///
    /// # Safety
    /// The same as for [`Region::new`], until the memory was [freed](Node::free) without an error,
    /// or the node was dropped. If freeing it returns [`AttachError::Kept`], the memory must stay
    /// valid for ever.
    ///
    /// The memory also stays valid until each peer that imported it has [released](Node::release)
    /// it, or has failed, or until [`close`](Node::close) has returned without an error.
    pub unsafe fn register_device(&mut self, at: DevicePtr, len: usize) -> Result<Memory, Error> {
        // SAFETY: our caller guarantees the same contract.
        behind!(self, |node| unsafe { node.register_device(at, len) });
        // SAFETY: our caller guarantees the same contract.
        let memory = unsafe { self.register_on_device(at, len) }?;
        self.on_device.regions.push((memory.id, at, false));
        Ok(memory)
    }

    /// # Safety
    /// The same as for [`Region::new`].
    unsafe fn register_on_device(&mut self, at: DevicePtr, len: usize) -> Result<Memory, Error> {
        let ordinal = self.gpu()?.device().caps().ordinal;
        let start = NonNull::new(at.0 as *mut u8).ok_or(DeviceError::NotDeviceMemory)?;
        // SAFETY: our caller guarantees the same contract.
        let region = unsafe { Region::new(start, len, RegionKind::Device { ordinal }) };
        let registered = self.registered(region);
        if let Err(Error::Attach(AttachError::Unsupported | AttachError::System(_))) = registered
            && let Some(Refused::Export(ExportError::Device(why))) = self.gpu()?.why()
        {
            return Err(why.into());
        }
        Ok(Memory { id: registered?, len })
    }

    /// Leaks memory from [`alloc_device`](Self::alloc_device), for bindings to languages where
    /// programs may still use it after the node is dropped. Asks peers to close it.
    ///
    /// # Errors
    /// The memory was freed, or is not from `alloc_device`.
    pub fn keep_device(&mut self, memory: Memory) -> Result<(), Error> {
        behind!(self, |node| node.keep_device(memory));
        let known =
            self.on_device.regions.iter_mut().find(|(id, _, ours)| *id == memory.id && *ours);
        let (_, start, ours) = known.ok_or(AttachError::UnknownRegion)?;
        // From now on the node treats the memory as the program's, and does not free it.
        *ours = false;
        let start = *start;
        self.gpu()?.keep(start);
        Ok(())
    }

    /// Sets whether frees of device memory are deferred. While they are, [`free`](Node::free),
    /// waits and calls that make progress leave freed device memory allocated, and memory of peers
    /// open.
    ///
    /// The driver frees and closes memory only when no kernel of the process runs. So a kernel that
    /// polls a word, and a call that frees memory, may wait for each other for ever. Defer frees
    /// before such a kernel starts, until it has ended.
    ///
    /// While frees are deferred, peers cannot free memory that this node has imported. `false`
    /// immediately frees and closes the deferred memory, and may wait for the device. Calls that
    /// allocate or import device memory, [`disconnect`](Node::disconnect), [`close`](Node::close)
    /// and dropping the node may free and close in any case.
    ///
    /// # Errors
    /// [`Error::NoGpu`].
    pub fn defer_device_frees(&mut self, defer: bool) -> Result<(), Error> {
        behind!(self, |node| node.defer_device_frees(defer));
        self.gpu()?.defer_frees(defer);
        Ok(())
    }

    /// Copies bytes into this node's device memory, and waits for the device.
    ///
    /// # Errors
    /// The range is not inside its region, the region was freed or is not device memory, or the
    /// device fails.
    pub fn write_device(&mut self, at: LocalAddr, bytes: &[u8]) -> Result<(), Error> {
        behind!(self, |node| node.write_device(at, bytes));
        let (mut gpu, place) = self.place_on_device(at, bytes.len())?;
        Ok(gpu.write(place, bytes).map_err(refused)?)
    }

    /// Copies bytes out of this node's device memory, and waits for the device.
    ///
    /// # Errors
    /// The same as [`write_device`](Self::write_device).
    pub fn read_device(&mut self, at: LocalAddr, into: &mut [u8]) -> Result<(), Error> {
        behind!(self, |node| node.read_device(at, into));
        let (mut gpu, place) = self.place_on_device(at, into.len())?;
        Ok(gpu.read(place, into).map_err(refused)?)
    }

    /// Copies between ranges of this node's device memory, and waits for the device. Each range is
    /// (to, from, length).
    ///
    /// # Errors
    /// The same as [`write_device`](Self::write_device), or the two ranges of a copy overlap. Some
    /// copies may be complete.
    pub fn copy_device(&mut self, ranges: &[(LocalAddr, LocalAddr, usize)]) -> Result<(), Error> {
        behind!(self, |node| node.copy_device(ranges));
        let mut places = Vec::with_capacity(ranges.len());
        for &(to, from, len) in ranges {
            places.push((
                self.place_on_device(to, len)?.1,
                self.place_on_device(from, len)?.1,
                len,
            ));
        }
        Ok(self.gpu()?.copy(&places).map_err(refused)?)
    }

    /// Returns the driver's address of this node's device memory, for kernels and the program's own
    /// copies. Valid until the memory is [freed](Node::free) or the node is dropped. Work that the
    /// program queues on a stream is not ordered with the node's operations. It must have finished
    /// before the memory is put, sent or freed.
    ///
    /// # Errors
    /// The same as [`write_device`](Self::write_device).
    pub fn device_ptr(&mut self, at: LocalAddr) -> Result<DevicePtr, Error> {
        behind!(self, |node| node.device_ptr(at));
        Ok(self.place_on_device(at, 0)?.1)
    }

    /// Returns whether work of the device is in flight. Before a sleep, the node must then make the
    /// device ring when that work ends.
    pub(super) fn is_working(&self) -> bool {
        match self.home.engine.rail(LOCAL) {
            Some(NodeRail::Gpu(gpu)) => gpu.is_working(),
            _ => false,
        }
    }

    /// Returns counters of transfers of device memory between this node and peers on this host.
    /// `None`: the node was opened without a device.
    pub fn gpu_stats(&self) -> Option<GpuStats> {
        if let Driver::Worker(worker) = &self.driver {
            return worker.call(|node| node.gpu_stats()).ok().flatten();
        }
        match self.home.engine.rail(LOCAL)? {
            NodeRail::Gpu(gpu) => Some(gpu.stats()),
            _ => None,
        }
    }

    fn place_on_device(
        &mut self,
        at: LocalAddr,
        len: usize,
    ) -> Result<(GpuSetup<'_, AnyDevice, LinuxHost>, DevicePtr), Error> {
        let known = self.on_device.regions.iter().find(|(id, ..)| *id == at.region);
        let start = match (self.home.engine.local_ptr(at, len), known) {
            // `Ok` means that the range is empty.
            (Ok(_) | Err(OpError::DeviceMemory), Some(&(_, start, _))) => start,
            (Ok(_), None) => return Err(DeviceError::NotDeviceMemory.into()),
            (Err(error), _) => return Err(error.into()),
        };
        Ok((self.gpu()?, start.at(at.offset)))
    }

    fn gpu(&mut self) -> Result<GpuSetup<'_, AnyDevice, LinuxHost>, Error> {
        match self.home.engine.rail_mut(LOCAL) {
            Some(NodeSetup::Gpu(gpu)) => Ok(gpu),
            _ => Err(Error::NoGpu),
        }
    }

    /// Handles the deregistration of a region. `kept` is `true` if a provider or a peer may still
    /// use its memory.
    pub(super) fn forget_on_device(&mut self, id: LocalId, kept: bool) {
        let Some(at) = self.on_device.regions.iter().position(|(known, ..)| *known == id) else {
            return;
        };
        let (_, start, ours) = self.on_device.regions.swap_remove(at);
        match self.gpu() {
            Ok(mut gpu) if ours && kept => gpu.keep(start),
            // SAFETY: the node allocated this memory, and has deregistered it. Deregistration fails
            // while an operation or a peer uses the memory.
            Ok(mut gpu) if ours => unsafe { gpu.give_back(start) },
            _ => {}
        }
    }

    /// Asks peers to close all device memory of this node, and waits until they have closed it.
    /// Frees and closes deferred memory first, because two peers that both close may wait for each
    /// other.
    pub(super) fn revoke_device(&mut self, deadline: Option<Instant>) -> Result<(), Error> {
        let deadline = deadline.unwrap_or(Instant::now() + Duration::from_secs(1 << 32));
        let revoked = self.gpu().map(|mut gpu| {
            gpu.defer_frees(false);
            gpu.revoke_all(deadline)
        });
        match revoked {
            Ok(Err(RevokeError::Deadline { peers, .. })) => Err(Error::StillOpen(peers)),
            _ => Ok(()),
        }
    }
}

fn refused(error: PostError) -> DeviceError {
    match error {
        PostError::Provider(code) => DeviceError::Driver(code),
        PostError::Again => DeviceError::Exhausted,
        _ => DeviceError::NotDeviceMemory,
    }
}
