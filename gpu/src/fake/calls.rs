//! The driver calls that allocate, export, open and pin memory.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use super::behaviour::{Call, MemoryKind, Violation};
use super::handle::Named;
use super::memory::FakeMemory;
use super::space::{Keeper, Range, What};
use super::world::{State, start_time};
use super::{FakeDevice, FakeProcess};
use crate::{Allocation, DeviceError, DevicePtr, LEGACY_HANDLE, Share, Unshared, Uuid};

pub(super) const INVALID_VALUE: DeviceError = DeviceError::Driver(1);

const ALREADY_MAPPED: DeviceError = DeviceError::Driver(208);

impl FakeProcess {
    /// Creates a device of the process with its own streams.
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`] if the process does not see the device.
    pub fn device(&self, ordinal: u32) -> Result<FakeDevice, DeviceError> {
        FakeDevice::new(self.clone(), ordinal)
    }

    /// Allocates memory of the given kind.
    ///
    /// # Errors
    /// [`DeviceError::Exhausted`], and errors injected by [`FakeProcess::fail`].
    pub fn alloc(
        &self,
        ordinal: u32,
        kind: MemoryKind,
        size: u64,
    ) -> Result<DevicePtr, DeviceError> {
        if kind == MemoryKind::Segments {
            return self.alloc_segments(ordinal, size);
        }
        let mut state = self.driver.state();
        let device = state.begin(self.place, ordinal, Call::Alloc)?;
        let (memory, align) = state.create(self.place, device, kind, size)?;
        state.devices[device as usize].used += memory.size();
        let process = &mut state.processes[self.place];
        let size = memory.size();
        let what = What::Own { kind, memory, buffer: process.buffer() };
        process.counts.allocs += 1;
        Ok(process.space.map(size, (align, 0), ordinal, what))
    }

    /// Frees memory, and waits for the device.
    ///
    /// # Errors
    /// The driver's code for an invalid value if `base` is not the start of an allocation.
    pub fn free(&self, ordinal: u32, base: DevicePtr) -> Result<(), DeviceError> {
        match self.kept(base, Keeper::Free) {
            Some(size) => self.take_apart(base, size, |segment| self.free_one(ordinal, segment)),
            None => self.free_one(ordinal, base),
        }
    }

    fn free_one(&self, ordinal: u32, base: DevicePtr) -> Result<(), DeviceError> {
        let mut state = self.driver.state();
        state.check_queue(self.place, base);
        let device = state.begin(self.place, ordinal, Call::Free)?;
        let range = state.take(self.place, base, |what| matches!(what, What::Own { .. }))?;
        if let What::Own { memory, .. } = &range.what {
            if memory.free(state.behaviour.poison) > 0 {
                state.violations.push(Violation::FreedWhileOpen);
            }
            state.devices[device as usize].used -= memory.size();
        }
        state.processes[self.place].counts.frees += 1;
        Ok(())
    }

    /// Returns the allocation that contains an address.
    ///
    /// # Errors
    /// [`DeviceError::NotDeviceMemory`] if there is none.
    pub fn allocation(&self, ordinal: u32, ptr: DevicePtr) -> Result<Allocation, DeviceError> {
        let mut state = self.driver.state();
        state.begin(self.place, ordinal, Call::Allocation)?;
        let (base, range) = state.processes[self.place].space.find(ptr, 0)?;
        let (buffer, share) = match &range.what {
            What::Own { kind, buffer, .. } => (*buffer, share(*kind)),
            What::Opened { buffer, .. } => (*buffer, Share::Never(Unshared::NoHandleType)),
            What::Pinned { buffer, .. } => (*buffer, Share::Never(Unshared::Host)),
        };
        let reservation = range.reservation.map(DevicePtr);
        Ok(Allocation { base, size: range.size, buffer, share, reservation })
    }

    /// Returns whether memory opened from another process begins at `base`. Not a driver call.
    pub fn is_opened(&self, base: DevicePtr) -> bool {
        let state = self.driver.state();
        let there = state.processes[self.place].space.at(base);
        there.is_some_and(|range| matches!(range.what, What::Opened { .. }))
    }

    /// Returns the ordinal, in this process, of the device that owns an address.
    ///
    /// # Errors
    /// [`DeviceError::NotDeviceMemory`] if no memory is mapped at the address.
    pub fn ordinal_of(&self, ptr: DevicePtr) -> Result<u32, DeviceError> {
        let state = self.driver.state();
        state.processes[self.place].space.find(ptr, 0).map(|(_, range)| range.ordinal)
    }

    /// Returns a 64-byte handle of the allocation that contains an address.
    ///
    /// # Errors
    /// [`DeviceError::NotExportable`] or [`DeviceError::NotDeviceMemory`].
    pub fn export_legacy(
        &self,
        ordinal: u32,
        ptr: DevicePtr,
    ) -> Result<[u8; LEGACY_HANDLE], DeviceError> {
        let mut state = self.driver.state();
        state.begin(self.place, ordinal, Call::Export)?;
        let process = &state.processes[self.place];
        let (base, range) = process.space.find(ptr, 0)?;
        let memory = match &range.what {
            What::Own { kind: MemoryKind::Legacy, memory, .. } => memory,
            what => return Err(unshared(what)),
        };
        let named = Named {
            owner: process.owner,
            id: memory.id(),
            base: base.0,
            fd: memory.fd().as_raw_fd() as u64,
            offset: if state.behaviour.handles_differ { ptr.0 - base.0 } else { 0 },
        };
        Ok(named.bytes())
    }

    /// Returns a descriptor of the allocation that begins at `base`.
    ///
    /// # Errors
    /// [`DeviceError::NotExportable`], [`DeviceError::NotDeviceMemory`], or
    /// [`DeviceError::Exhausted`] if no descriptors are free.
    pub fn export_descriptor(&self, ordinal: u32, base: DevicePtr) -> Result<OwnedFd, DeviceError> {
        let mut state = self.driver.state();
        state.begin(self.place, ordinal, Call::Export)?;
        let (_, range) = state.processes[self.place].space.find(base, 0)?;
        match &range.what {
            What::Own { kind: MemoryKind::Virtual, memory, .. } => {
                memory.fd().try_clone().map_err(|_| DeviceError::Exhausted)
            }
            what => Err(unshared(what)),
        }
    }

    /// Opens an allocation of another process by its 64-byte handle.
    ///
    /// # Errors
    /// [`DeviceError::BadHandle`], [`DeviceError::SameProcess`], [`DeviceError::NoPeerAccess`], or
    /// the driver's code for memory that is already open.
    pub fn open_legacy(
        &self,
        ordinal: u32,
        handle: &[u8; LEGACY_HANDLE],
    ) -> Result<DevicePtr, DeviceError> {
        let mut state = self.driver.state();
        let device = state.begin(self.place, ordinal, Call::Open)?;
        let named = Named::read(handle)?;
        let process = &state.processes[self.place];
        if named.owner == process.owner {
            return Err(DeviceError::SameProcess);
        }
        let memory = match state.memory_of(named.owner, named.id) {
            Some(memory) => memory,
            None if process.real => Arc::new(from_process(&named)?),
            None => return Err(DeviceError::BadHandle),
        };
        state.open(self.place, ordinal, device, memory, None)
    }

    /// Opens an allocation of another process by its descriptor. The caller keeps the descriptor.
    ///
    /// # Errors
    /// The errors of [`FakeProcess::open_legacy`], and [`DeviceError::BadHandle`] if the size
    /// differs.
    pub fn open_descriptor(
        &self,
        ordinal: u32,
        fd: BorrowedFd<'_>,
        size: u64,
    ) -> Result<DevicePtr, DeviceError> {
        let mut state = self.driver.state();
        let device = state.begin(self.place, ordinal, Call::Open)?;
        let memory = state.import(self.place, fd)?;
        if memory.size() != size {
            return Err(DeviceError::BadHandle);
        }
        state.open(self.place, ordinal, device, memory, None)
    }

    /// Closes an opened allocation, and waits for the device.
    ///
    /// # Errors
    /// The driver's code for an invalid value if no opened allocation begins at `base`.
    pub fn close(&self, ordinal: u32, base: DevicePtr) -> Result<(), DeviceError> {
        match self.kept(base, Keeper::Close) {
            Some(size) => self.take_apart(base, size, |segment| self.close_one(ordinal, segment)),
            None => self.close_one(ordinal, base),
        }
    }

    pub(super) fn close_one(&self, ordinal: u32, base: DevicePtr) -> Result<(), DeviceError> {
        let mut state = self.driver.state();
        state.check_queue(self.place, base);
        state.begin(self.place, ordinal, Call::Close)?;
        let process = &mut state.processes[self.place];
        if let Some(Range { what: What::Opened { memory, times, .. }, .. }) =
            process.space.at_mut(base)
            && *times > 1
        {
            *times -= 1;
            memory.closed();
            process.counts.closes += 1;
            return Ok(());
        }
        let range = state.take(self.place, base, |what| matches!(what, What::Opened { .. }))?;
        if let Some(memory) = range.memory() {
            memory.closed();
        }
        state.processes[self.place].counts.closes += 1;
        Ok(())
    }

    /// Returns whether this process can reach the device `uuid` from its own device `ordinal`. Not
    /// a driver call.
    pub fn reaches(&self, ordinal: u32, uuid: &Uuid) -> bool {
        let state = self.driver.state();
        match (state.machine_device(self.place, ordinal), state.device_of(uuid)) {
            (Ok(own), Some(other)) => state.reach(own, other),
            _ => false,
        }
    }

    /// Pins host memory.
    ///
    /// # Errors
    /// The driver's code for an invalid value if the range is empty.
    ///
    /// # Safety
    /// The bytes stay mapped until [`FakeProcess::unpin`].
    pub unsafe fn pin(
        &self,
        ordinal: u32,
        ptr: NonNull<u8>,
        len: usize,
    ) -> Result<DevicePtr, DeviceError> {
        let mut state = self.driver.state();
        state.begin(self.place, ordinal, Call::Pin)?;
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        let process = &mut state.processes[self.place];
        let what = What::Pinned { ptr: ptr.as_ptr() as usize, buffer: process.buffer() };
        process.counts.pins += 1;
        // Keeps the offset within the page, so that a word has the same alignment at its host
        // address and its device address.
        let place = (4096, ptr.as_ptr() as u64 % 4096);
        Ok(process.space.map(len as u64, place, ordinal, what))
    }

    /// Unpins host memory, and waits for the device.
    ///
    /// # Errors
    /// The driver's code for an invalid value if `ptr` is not the start of pinned memory.
    pub fn unpin(&self, ordinal: u32, ptr: NonNull<u8>) -> Result<(), DeviceError> {
        let mut state = self.driver.state();
        let start = ptr.as_ptr() as usize;
        let is = |what: &What| matches!(what, What::Pinned { ptr: at, .. } if *at == start);
        let pinned = state.processes[self.place].space.all().find(|(_, range)| is(&range.what));
        let base = pinned.map_or(DevicePtr(0), |(base, _)| base);
        state.check_queue(self.place, base);
        state.begin(self.place, ordinal, Call::Unpin)?;
        state.take(self.place, base, is)?;
        state.processes[self.place].counts.unpins += 1;
        Ok(())
    }

    /// Returns the host address of a range, if the processor may access it. Not a driver call.
    pub fn host_view(&self, ptr: DevicePtr, len: u64) -> Option<NonNull<u8>> {
        let state = self.driver.state();
        let (base, range) = state.processes[self.place].space.find(ptr, len).ok()?;
        let seen = state.behaviour.host_view || matches!(range.what, What::Pinned { .. });
        // SAFETY: `find` has checked that the offset lies inside the range.
        let at = unsafe { range.data().add((ptr.0 - base.0) as usize) };
        NonNull::new(at).filter(|_| seen)
    }

    /// Returns a dmabuf descriptor for NICs, and the offset of the range in it. The descriptor
    /// begins at a page. It contains the 8 bytes of that page's address, so that a fake NIC can
    /// check which memory it names.
    pub fn dmabuf(&self, ptr: DevicePtr, len: u64) -> Option<(OwnedFd, u64)> {
        let state = self.driver.state();
        let (base, _) = state.processes[self.place].space.find(ptr, len).ok()?;
        if !state.behaviour.dmabuf {
            return None;
        }
        // SAFETY: the name is a C string literal.
        let fd = unsafe { libc::memfd_create(c"dmabuf".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: `memfd_create` returned this new descriptor, so nothing else owns it.
        let fd = (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })?;
        let start = base.0.max(ptr.0 - ptr.0 % 4096);
        let mut file = File::from(fd);
        file.write_all(&start.to_ne_bytes()).ok()?;
        Some((file.into(), ptr.0 - start))
    }

    /// Makes writes of NICs visible.
    ///
    /// # Errors
    /// The device is lost, or the process was killed.
    pub fn flush(&self, ordinal: u32) -> Result<(), DeviceError> {
        let mut state = self.driver.state();
        state.begin(self.place, ordinal, Call::Flush)?;
        state.flush(self.place);
        Ok(())
    }

    pub(super) fn count_kept(&self) {
        self.driver.state().processes[self.place].counts.kept += 1;
    }

    pub(super) fn count_violation(&self, violation: Violation) {
        self.driver.state().violations.push(violation);
    }
}

impl State {
    /// Returns the alignment that its address needs.
    pub(super) fn create(
        &mut self,
        place: usize,
        device: u32,
        kind: MemoryKind,
        size: u64,
    ) -> Result<(Arc<FakeMemory>, u64), DeviceError> {
        if size == 0 {
            return Err(INVALID_VALUE);
        }
        let (size, align) = match kind {
            MemoryKind::Virtual | MemoryKind::Segments | MemoryKind::VirtualUnshared => {
                let granule = self.behaviour.granule;
                (size.checked_next_multiple_of(granule).ok_or(DeviceError::Exhausted)?, granule)
            }
            _ => (size, 512),
        };
        let id = self.id();
        let gpu = &self.devices[device as usize];
        if gpu.used.checked_add(size).is_none_or(|used| used > self.behaviour.memory) {
            return Err(DeviceError::Exhausted);
        }
        let owner = self.processes[place].owner;
        Ok((Arc::new(FakeMemory::create(size, id, owner, &gpu.uuid)?), align))
    }

    fn check_queue(&mut self, place: usize, base: DevicePtr) {
        let there = self.processes[place].space.at(base).map(|range| range.serial);
        if there.is_some_and(|serial| self.is_in_queue(place, base.0, serial)) {
            self.violations.push(Violation::TakenFromQueue);
        }
    }

    fn take(
        &mut self,
        place: usize,
        base: DevicePtr,
        is: impl Fn(&What) -> bool,
    ) -> Result<Range, DeviceError> {
        let there = self.processes[place].space.at(base).filter(|range| is(&range.what));
        let Some(ordinal) = there.map(|range| range.ordinal) else {
            self.violations.push(Violation::NotTaken);
            return Err(INVALID_VALUE);
        };
        self.wait_for_device(place, ordinal);
        self.processes[place].space.unmap(base).ok_or(INVALID_VALUE)
    }

    pub(super) fn import(
        &self,
        place: usize,
        fd: BorrowedFd<'_>,
    ) -> Result<Arc<FakeMemory>, DeviceError> {
        let fd = fd.try_clone_to_owned().map_err(|_| DeviceError::BadHandle)?;
        let memory = FakeMemory::attach(fd)?;
        match memory.owner() == self.processes[place].owner {
            true => Err(DeviceError::SameProcess),
            false => Ok(Arc::new(memory)),
        }
    }

    pub(super) fn open(
        &mut self,
        place: usize,
        ordinal: u32,
        device: u32,
        memory: Arc<FakeMemory>,
        at: Option<DevicePtr>,
    ) -> Result<DevicePtr, DeviceError> {
        let home = self.device_of(&memory.uuid()).ok_or(DeviceError::BadHandle)?;
        if !memory.lives() {
            return Err(DeviceError::BadHandle);
        }
        if !self.reach(device, home) {
            return Err(DeviceError::NoPeerAccess);
        }
        let (reopen, granule) = (self.behaviour.reopen, self.behaviour.granule);
        let process = &mut self.processes[place];
        let is = |range: &Range| {
            let there =
                matches!(&range.what, What::Opened { memory: at, .. } if at.id() == memory.id());
            there && range.reservation.is_none()
        };
        // Mappings at given addresses are independent: the same memory may have several mappings.
        let open =
            process.space.all().find(|(_, range)| at.is_none() && is(range)).map(|(base, _)| base);
        if let Some(base) = open {
            if let Some(Range { what: What::Opened { times, .. }, .. }) =
                process.space.at_mut(base).filter(|_| reopen)
            {
                *times += 1;
                memory.opened();
                process.counts.opens += 1;
                return Ok(base);
            }
            return Err(ALREADY_MAPPED);
        }
        memory.opened();
        process.counts.opens += 1;
        let (size, buffer) = (memory.size(), process.buffer());
        let what = What::Opened { memory, times: 1, buffer };
        let base = match at.map(|base| (base, process.space.vacant(base, size))) {
            Some((base, reservation)) => {
                process.space.map_at(base, size, reservation, ordinal, what);
                base
            }
            None => process.space.map(size, (granule, 0), ordinal, what),
        };
        Ok(base)
    }
}

fn from_process(named: &Named) -> Result<FakeMemory, DeviceError> {
    if start_time(named.owner.pid) != Some(named.owner.start) {
        return Err(DeviceError::BadHandle);
    }
    let path = format!("/proc/{}/fd/{}", named.owner.pid, named.fd);
    let file =
        OpenOptions::new().read(true).write(true).open(path).map_err(|_| DeviceError::BadHandle)?;
    let memory = FakeMemory::attach(file.into())?;
    // The descriptor number may refer to another file by now.
    if memory.id() != named.id || memory.owner() != named.owner {
        return Err(DeviceError::BadHandle);
    }
    Ok(memory)
}

fn share(kind: MemoryKind) -> Share {
    match kind {
        MemoryKind::Legacy => Share::Legacy,
        MemoryKind::Virtual | MemoryKind::Segments => Share::Descriptor,
        MemoryKind::VirtualUnshared => Share::Never(Unshared::NoHandleType),
        MemoryKind::Pool => Share::Never(Unshared::Pool),
        MemoryKind::Managed => Share::Never(Unshared::Managed),
    }
}

fn unshared(what: &What) -> DeviceError {
    match what {
        What::Own { kind, .. } => match share(*kind) {
            Share::Never(why) => DeviceError::NotExportable(why),
            _ => INVALID_VALUE,
        },
        What::Opened { .. } => DeviceError::NotExportable(Unshared::NoHandleType),
        What::Pinned { .. } => DeviceError::NotExportable(Unshared::Host),
    }
}
