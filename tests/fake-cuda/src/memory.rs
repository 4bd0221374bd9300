//! Device memory of all kinds, memory of other processes, and pinned host memory.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::ptr::NonNull;

use fishplate_gpu::fake::{FakePhysical, MemoryKind};
use fishplate_gpu::{DevicePtr, LEGACY_HANDLE, Share, Unshared};

use crate::{
    Code, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, add, answer, code, current,
    find, library, ordinal, put,
};

const GRANULE: usize = 1 << 16;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: c_uint = 1;

/// `CUmemLocation`.
#[repr(C)]
pub struct Location {
    pub kind: c_uint,
    pub id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
pub struct Asked {
    kind: c_uint,
    handles: c_uint,
    location: Location,
    windows: *mut c_void,
    flags: [u8; 8],
}

impl Asked {
    pub fn pinned(shared: bool) -> Asked {
        let handles = if shared { DESCRIPTOR } else { 0 };
        let location = Location { kind: 1, id: 0 };
        Asked { kind: 1, handles, location, windows: std::ptr::null_mut(), flags: [0; 8] }
    }
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub struct Access {
    location: Location,
    flags: c_uint,
}

/// Allocates memory of a kind.
///
/// # Safety
/// `place` is null or writable.
unsafe fn alloc(place: *mut u64, kind: MemoryKind, size: usize) -> Code {
    let taken = current().and_then(|(library, ordinal)| {
        library.process.alloc(ordinal, kind, size as u64).map_err(code)
    });
    // SAFETY: our caller guarantees that `place` is null or writable.
    answer(taken.and_then(|base| unsafe { put(place, base.0) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(place: *mut u64, size: usize) -> Code {
    let kind = library().map_or(MemoryKind::Legacy, |library| library.kind);
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    unsafe { alloc(place, kind, size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocManaged(place: *mut u64, size: usize, _flags: c_uint) -> Code {
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    unsafe { alloc(place, MemoryKind::Managed, size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(place: *mut u64, size: usize, _stream: *mut c_void) -> Code {
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    unsafe { alloc(place, MemoryKind::Pool, size) }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(base: u64) -> Code {
    answer(current().and_then(|(library, ordinal)| {
        let owner = library.process.ordinal_of(DevicePtr(base)).unwrap_or(ordinal);
        library.process.free(owner, DevicePtr(base)).map_err(code)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    names: *const c_uint,
    places: *const *mut c_void,
    ptr: u64,
) -> Code {
    answer(library().and_then(|library| {
        let owner = library.process.ordinal_of(DevicePtr(ptr));
        let found =
            owner.and_then(|ordinal| library.process.allocation(ordinal, DevicePtr(ptr))).ok();
        let is = |share| found.is_some_and(|found| found.share == share);
        // The range attributes of virtual memory describe the reservation, even if nothing is
        // mapped there.
        let reserved = library.process.reservation(DevicePtr(ptr));
        let range = reserved.or(found.map(|found| (found.base, found.size)));
        for at in 0..count as usize {
            // SAFETY: both arrays have `count` entries, as cuda.h requires.
            let (name, place) = unsafe { (*names.add(at), *places.add(at)) };
            // SAFETY: cuda.h requires a result of the attribute's size. All results are zero for
            // memory that the driver does not know.
            unsafe {
                match name {
                    2 if is(Share::Never(Unshared::Host)) => put(place.cast(), 1u32)?,
                    2 => put(place.cast(), if range.is_some() { 2u32 } else { 0 })?,
                    7 => put(place.cast(), found.map_or(0, |found| found.buffer))?,
                    // `CU_DEVICE_INVALID`, if the memory belongs to no device.
                    9 => put(place.cast(), owner.map_or(-2, |ordinal| ordinal as c_int))?,
                    8 => put(place.cast(), u8::from(is(Share::Never(Unshared::Managed))))?,
                    10 => put(place.cast(), u8::from(is(Share::Legacy)))?,
                    11 => put(place.cast(), range.map_or(0, |(base, _)| base.0))?,
                    12 => put(place.cast(), range.map_or(0, |(_, size)| size))?,
                    14 => put(place.cast(), u64::from(is(Share::Descriptor)))?,
                    17 => put(place.cast(), u64::from(is(Share::Never(Unshared::Pool))))?,
                    _ => return Err(INVALID_VALUE),
                }
            }
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, ptr: u64) -> Code {
    let found = current().and_then(|(library, ordinal)| {
        library.process.allocation(ordinal, DevicePtr(ptr)).map_err(|_| NOT_FOUND)
    });
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(found.and_then(|found| unsafe {
        put(base, found.base.0)?;
        put(size, found.size as usize)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuIpcGetMemHandle(place: *mut [u8; LEGACY_HANDLE], ptr: u64) -> Code {
    let made = current().and_then(|(library, ordinal)| {
        library.process.export_legacy(ordinal, DevicePtr(ptr)).map_err(code)
    });
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(made.and_then(|handle| unsafe { put(place, handle) }))
}

/// `CUipcMemHandle`.
#[repr(C)]
pub struct IpcHandle([u8; LEGACY_HANDLE]);

#[unsafe(no_mangle)]
unsafe extern "C" fn cuIpcOpenMemHandle_v2(
    place: *mut u64,
    handle: IpcHandle,
    flags: c_uint,
) -> Code {
    let opened = current().and_then(|(library, ordinal)| match flags {
        1 => library.process.open_legacy(ordinal, &handle.0).map_err(code),
        _ => Err(INVALID_VALUE),
    });
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(opened.and_then(|base| unsafe { put(place, base.0) }))
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcCloseMemHandle(base: u64) -> Code {
    answer(current().and_then(|(library, ordinal)| {
        library.process.close(ordinal, DevicePtr(base)).map_err(code)
    }))
}

/// Checks a request for physical memory.
///
/// # Safety
/// `asked` is null or points to a complete request.
unsafe fn asked(asked: *const Asked) -> Result<(u32, MemoryKind), Code> {
    // SAFETY: our caller guarantees that `asked` is null or complete.
    let asked = unsafe { asked.as_ref() }.ok_or(INVALID_VALUE)?;
    // Only pinned memory of a device is supported.
    if asked.kind != 1 || asked.location.kind != 1 {
        return Err(INVALID_VALUE);
    }
    let kind = match asked.handles {
        0 => MemoryKind::VirtualUnshared,
        DESCRIPTOR => MemoryKind::Virtual,
        _ => return Err(INVALID_VALUE),
    };
    Ok((ordinal(library()?, asked.location.id)?, kind))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAllocationGranularity(
    place: *mut usize,
    what: *const Asked,
    _option: c_uint,
) -> Code {
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(unsafe { asked(what).and_then(|_| put(place, GRANULE)) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemCreate(
    place: *mut u64,
    size: usize,
    what: *const Asked,
    flags: c_ulonglong,
) -> Code {
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    let made = unsafe { asked(what) }.and_then(|(ordinal, kind)| {
        if size == 0 || !size.is_multiple_of(GRANULE) || flags != 0 {
            return Err(INVALID_VALUE);
        }
        library()?.process.create(ordinal, kind, size as u64).map_err(code)
    });
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    unsafe { put_physical(place, made) }
}

/// Writes a handle of physical memory.
///
/// # Safety
/// `place` is null or writable.
unsafe fn put_physical(place: *mut u64, physical: Result<FakePhysical, Code>) -> Code {
    let handle =
        physical.and_then(|physical| Ok(add(&mut library()?.handles().physical, physical)));
    // SAFETY: our caller guarantees that `place` is null or writable.
    answer(handle.and_then(|handle| unsafe { put(place, handle as u64) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemRetainAllocationHandle(place: *mut u64, at: *mut c_void) -> Code {
    let found = library().and_then(|library| {
        let ptr = DevicePtr(at as usize as u64);
        let ordinal = library.process.ordinal_of(ptr).map_err(code)?;
        let share = library.process.allocation(ordinal, ptr).map_err(code)?.share;
        match share {
            Share::Descriptor | Share::Never(Unshared::NoHandleType) => {
                library.process.physical(ptr).map_err(code)
            }
            _ => Err(INVALID_VALUE),
        }
    });
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    unsafe { put_physical(place, found) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemExportToShareableHandle(
    place: *mut c_int,
    handle: u64,
    kind: c_uint,
    flags: c_ulonglong,
) -> Code {
    let made = library().and_then(|library| {
        if kind != DESCRIPTOR || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let physical = find(&mut library.handles().physical, handle as usize)?.clone();
        physical.ok_or(INVALID_HANDLE)?.export().map_err(code)
    });
    // SAFETY: `place` is writable. The caller owns the descriptor from now on.
    answer(made.and_then(|fd| unsafe { put(place, fd.into_raw_fd()) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemImportFromShareableHandle(
    place: *mut u64,
    fd: *mut c_void,
    kind: c_uint,
) -> Code {
    let found = library().and_then(|library| {
        let fd = c_int::try_from(fd as usize)
            .ok()
            .filter(|_| kind == DESCRIPTOR)
            .ok_or(INVALID_VALUE)?;
        // SAFETY: the caller keeps its descriptor open during the call.
        library.process.import(unsafe { BorrowedFd::borrow_raw(fd) }).map_err(code)
    });
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    unsafe { put_physical(place, found) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAddressReserve(
    place: *mut u64,
    size: usize,
    _align: usize,
    _wish: u64,
    _flags: c_ulonglong,
) -> Code {
    let taken = library().and_then(|library| match size > 0 && size.is_multiple_of(GRANULE) {
        true => Ok(library.process.reserve(size as u64)),
        false => Err(INVALID_VALUE),
    });
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(taken.and_then(|base| unsafe { put(place, base.0) }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(base: u64, size: usize) -> Code {
    answer(
        library().and_then(|library| {
            library.process.release(DevicePtr(base), size as u64).map_err(code)
        }),
    )
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(
    base: u64,
    size: usize,
    offset: usize,
    handle: u64,
    _flags: c_ulonglong,
) -> Code {
    answer(current().and_then(|(library, ordinal)| {
        if offset != 0 {
            return Err(INVALID_VALUE);
        }
        let physical = find(&mut library.handles().physical, handle as usize)?
            .clone()
            .ok_or(INVALID_HANDLE)?;
        library.process.map(ordinal, DevicePtr(base), size as u64, &physical).map_err(code)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(base: u64, size: usize) -> Code {
    answer(current().and_then(|(library, ordinal)| {
        let base = DevicePtr(base);
        let there = library.process.allocation(ordinal, base).map_err(code)?;
        if there.base != base || there.size != size as u64 {
            return Err(INVALID_VALUE);
        }
        match library.process.is_opened(base) {
            true => library.process.close(ordinal, base).map_err(code),
            false => library.process.free(ordinal, base).map_err(code),
        }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemSetAccess(
    base: u64,
    size: usize,
    access: *const Access,
    count: usize,
) -> Code {
    answer(library().and_then(|library| {
        // SAFETY: the caller provides `count` entries, and only the first is read.
        let access = unsafe { access.as_ref() }.filter(|_| count == 1).ok_or(INVALID_VALUE)?;
        let ordinal = ordinal(library, access.location.id)?;
        let end = base + size as u64;
        let mut at = base;
        while access.flags == 3 && at < end {
            let there = library.process.allocation(ordinal, DevicePtr(at)).map_err(code)?;
            if there.base.0 != at {
                return Err(INVALID_VALUE);
            }
            at += there.size;
        }
        if at == end { Ok(()) } else { Err(INVALID_VALUE) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(handle: u64) -> Code {
    answer(library().and_then(|library| {
        *find(&mut library.handles().physical, handle as usize)? = None;
        Ok(())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostRegister_v2(ptr: *mut c_void, size: usize, _flags: c_uint) -> Code {
    answer(current().and_then(|(library, ordinal)| {
        let host = NonNull::new(ptr.cast::<u8>()).ok_or(INVALID_VALUE)?;
        let start = ptr as usize;
        let mut handles = library.handles();
        if handles.pins.iter().any(|&(at, len, _)| start < at + len && at < start + size) {
            // `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`.
            return Err(712);
        }
        // SAFETY: the driver's documentation requires the caller to pass valid arguments.
        let seen = unsafe { library.process.pin(ordinal, host, size) }.map_err(code)?;
        handles.pins.push((start, size, seen.0));
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(ptr: *mut c_void) -> Code {
    answer(current().and_then(|(library, ordinal)| {
        let host = NonNull::new(ptr.cast::<u8>()).ok_or(INVALID_VALUE)?;
        let mut handles = library.handles();
        let at = handles.pins.iter().position(|&(at, ..)| at == ptr as usize);
        // `CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED`.
        handles.pins.swap_remove(at.ok_or(713u32)?);
        library.process.unpin(ordinal, host).map_err(code)
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostGetDevicePointer_v2(
    place: *mut u64,
    ptr: *mut c_void,
    _flags: c_uint,
) -> Code {
    let found = library().and_then(|library| {
        let wanted = ptr as usize;
        let handles = library.handles();
        let inside = |&&(at, len, _): &&crate::Pin| at <= wanted && wanted < at + len;
        let (at, _, seen) = handles.pins.iter().find(inside).ok_or(INVALID_VALUE)?;
        Ok(seen + (wanted - at) as u64)
    });
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(found.and_then(|seen| unsafe { put(place, seen) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetHandleForAddressRange(
    handle: *mut c_void,
    ptr: u64,
    len: usize,
    kind: c_uint,
    flags: c_ulonglong,
) -> Code {
    answer(current().and_then(|(library, _)| {
        let whole = ptr.is_multiple_of(4096) && len.is_multiple_of(4096);
        if !whole || kind != 1 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let (fd, _) = library.process.dmabuf(DevicePtr(ptr), len as u64).ok_or(NOT_SUPPORTED)?;
        // SAFETY: the caller provides room for a descriptor.
        unsafe { *handle.cast::<c_int>() = fd.into_raw_fd() };
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuFlushGPUDirectRDMAWrites(_target: c_uint, scope: c_uint) -> Code {
    answer(current().and_then(|(library, ordinal)| match scope {
        100 | 200 => library.process.flush(ordinal).map_err(code),
        _ => Err(INVALID_VALUE),
    }))
}
