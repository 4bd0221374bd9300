//! The functions of `libamdhip64.so`, implemented with the functions of `libcuda.so`. Numbers,
//! layouts and behaviour follow HIP 6.2 and 7.1 to 7.14, including the differences from CUDA.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use fishplate_gpu::{DevicePtr, LEGACY_HANDLE};

use crate::memory::{Access, Asked, IpcHandle, Location};
use crate::{
    CONTEXT, Code, INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, NOT_READY, NOT_SUPPORTED, code,
    current, find, library, ordinal, put, version,
};

/// `hipErrorInvalidDevicePointer`.
const INVALID_DEVICE_POINTER: Code = 17;

static REGISTERS: [AtomicU32; 16] = [const { AtomicU32::new(0) }; 16];

thread_local! {
    static LAST_ERROR: Cell<Code> = const { Cell::new(0) };
}

/// Stores the result of a call as the thread's last error. Since HIP 7, success and "not ready" do
/// not replace an earlier error.
fn left(code: Code) -> Code {
    if version() < 70_000_000 || !matches!(code, 0 | NOT_READY) {
        LAST_ERROR.set(code);
    }
    code
}

fn answer(outcome: Result<(), Code>) -> Code {
    left(crate::answer(outcome))
}

#[unsafe(no_mangle)]
extern "C" fn hipGetLastError() -> Code {
    LAST_ERROR.replace(0)
}

#[unsafe(no_mangle)]
extern "C" fn hipPeekAtLastError() -> Code {
    LAST_ERROR.get()
}

/// Declares HIP functions that have the arguments and the behaviour of a CUDA function.
macro_rules! same {
    ($($hip:ident $cuda:ident($($name:ident: $kind:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $hip($($name: $kind),*) -> Code {
            unsafe extern "C" {
                fn $cuda($($name: $kind),*) -> Code;
            }
            // SAFETY: this library defines the function with these arguments. The driver's
            // documentation requires the caller to pass valid arguments.
            left(unsafe { $cuda($($name),*) })
        }
    )*};
}

same! {
    hipInit cuInit(flags: c_uint);
    hipGetDeviceCount cuDeviceGetCount(count: *mut c_int);
    hipDeviceGet cuDeviceGet(device: *mut c_int, wanted: c_int);
    hipDeviceGetName cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int);
    hipDeviceTotalMem cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int);
    hipDeviceGetUuid cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int);
    hipDeviceCanAccessPeer cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int);
    hipMalloc cuMemAlloc_v2(place: *mut u64, size: usize);
    hipMallocManaged cuMemAllocManaged(place: *mut u64, size: usize, flags: c_uint);
    hipMallocAsync cuMemAllocAsync(place: *mut u64, size: usize, stream: *mut c_void);
    hipFree cuMemFree_v2(base: u64);
    hipMemGetAddressRange cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, ptr: u64);
    hipIpcGetMemHandle cuIpcGetMemHandle(place: *mut [u8; LEGACY_HANDLE], ptr: u64);
    hipIpcCloseMemHandle cuIpcCloseMemHandle(base: u64);
    hipMemGetAllocationGranularity cuMemGetAllocationGranularity(
        place: *mut usize, what: *const Asked, option: c_uint
    );
    hipMemCreate cuMemCreate(place: *mut u64, size: usize, what: *const Asked, flags: c_ulonglong);
    hipMemRetainAllocationHandle cuMemRetainAllocationHandle(place: *mut u64, at: *mut c_void);
    hipMemExportToShareableHandle cuMemExportToShareableHandle(
        place: *mut c_int, handle: u64, kind: c_uint, flags: c_ulonglong
    );
    hipMemAddressReserve cuMemAddressReserve(
        place: *mut u64, size: usize, align: usize, wish: u64, flags: c_ulonglong
    );
    hipMemAddressFree cuMemAddressFree(base: u64, size: usize);
    hipMemMap cuMemMap(base: u64, size: usize, offset: usize, handle: u64, flags: c_ulonglong);
    hipMemUnmap cuMemUnmap(base: u64, size: usize);
    hipMemSetAccess cuMemSetAccess(base: u64, size: usize, access: *const Access, count: usize);
    hipMemRelease cuMemRelease(handle: u64);
    hipHostRegister cuMemHostRegister_v2(ptr: *mut c_void, size: usize, flags: c_uint);
    hipHostUnregister cuMemHostUnregister(ptr: *mut c_void);
    hipHostGetDevicePointer cuMemHostGetDevicePointer_v2(
        place: *mut u64, ptr: *mut c_void, flags: c_uint);
    hipMemGetHandleForAddressRange cuMemGetHandleForAddressRange(
        handle: *mut c_void, ptr: u64, len: usize, kind: c_uint, flags: c_ulonglong
    );
    hipStreamCreateWithFlags cuStreamCreate(place: *mut *mut c_void, flags: c_uint);
    hipStreamDestroy cuStreamDestroy_v2(handle: *mut c_void);
    hipStreamSynchronize cuStreamSynchronize(handle: *mut c_void);
    hipStreamWaitEvent cuStreamWaitEvent(
        handle: *mut c_void, event: *mut c_void, flags: c_uint);
    hipLaunchHostFunc cuLaunchHostFunc(
        handle: *mut c_void,
        function: Option<unsafe extern "C" fn(*mut c_void)>,
        data: *mut c_void
    );
    hipStreamWriteValue64 cuStreamWriteValue64_v2(
        handle: *mut c_void, word: u64, value: u64, flags: c_uint);
    hipEventRecord cuEventRecord(event: *mut c_void, handle: *mut c_void);
    hipEventQuery cuEventQuery(event: *mut c_void);
    hipEventDestroy cuEventDestroy_v2(event: *mut c_void);
}

unsafe extern "C" {
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) -> Code;
    fn cuPointerGetAttributes(
        count: c_uint,
        names: *const c_uint,
        places: *const *mut c_void,
        ptr: u64,
    ) -> Code;
    fn cuIpcOpenMemHandle_v2(place: *mut u64, handle: IpcHandle, flags: c_uint) -> Code;
    fn cuMemImportFromShareableHandle(place: *mut u64, fd: *mut c_void, kind: c_uint) -> Code;
    fn cuMemcpyAsync(to: u64, from: u64, len: usize, handle: *mut c_void) -> Code;
    fn cuEventCreate(place: *mut *mut c_void, flags: c_uint) -> Code;
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipDriverGetVersion(place: *mut c_int) -> Code {
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(unsafe { put(place, version()) })
}

/// Returns the current device, initially the first one. Executes the flushes that registers
/// request.
#[unsafe(no_mangle)]
unsafe extern "C" fn hipGetDevice(place: *mut c_int) -> Code {
    let found = library().map(|library| {
        for (device, register) in (0..library.process.devices()).zip(&REGISTERS) {
            if register.swap(0, Ordering::Relaxed) != 0 {
                let _ = library.process.flush(device);
            }
        }
        let now = CONTEXT.get().unwrap_or(0);
        CONTEXT.set(Some(now));
        now as c_int
    });
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(found.and_then(|device| unsafe { put(place, device) }))
}

#[unsafe(no_mangle)]
extern "C" fn hipSetDevice(device: c_int) -> Code {
    answer(
        library()
            .and_then(|library| ordinal(library, device))
            .map(|device| CONTEXT.set(Some(device))),
    )
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_uint,
    device: c_int,
) -> Code {
    let same = match attribute {
        67 => 33,
        68 => 34,
        69 => 50,
        88 => 115,
        89 => 102,
        94 => 110,
        10_011 => 116,
        10_013 => 122,
        10_005 => {
            return answer(library().and_then(|library| {
                let at = ordinal(library, device)?;
                let register = REGISTERS.get(at as usize).ok_or(INVALID_DEVICE)?;
                let there =
                    library.process.driver().behaviour().must_flush.then_some(register.as_ptr());
                // SAFETY: the caller provides room for a pointer, which HIP writes here.
                unsafe { put(value.cast(), there.unwrap_or(std::ptr::null_mut())) }
            }));
        }
        _ => return left(INVALID_VALUE),
    };
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    left(unsafe { cuDeviceGetAttribute(value, same, device) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipPointerGetAttribute(
    place: *mut c_void,
    attribute: c_uint,
    ptr: u64,
) -> Code {
    let found = library().and_then(|library| {
        let at = DevicePtr(ptr);
        library
            .process
            .ordinal_of(at)
            .and_then(|of| library.process.allocation(of, at))
            .map_err(code)
    });
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(found.and_then(|found| unsafe {
        match attribute {
            2 | 8 => match cuPointerGetAttributes(1, &raw const attribute, &raw const place, ptr) {
                0 => Ok(()),
                code => Err(code),
            },
            7 => put(place.cast(), found.buffer as u32),
            9 => put(place.cast(), library()?.process.ordinal_of(DevicePtr(ptr)).map_err(code)?),
            // Not supported here, so that no caller relies on them. HIP writes only 32 bits of a
            // size (12).
            10 | 12 | 14 | 15 | 17 => Err(NOT_SUPPORTED),
            _ => Err(INVALID_VALUE),
        }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipIpcOpenMemHandle(
    place: *mut u64,
    handle: IpcHandle,
    flags: c_uint,
) -> Code {
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    left(match unsafe { cuIpcOpenMemHandle_v2(place, handle, flags) } {
        INVALID_VALUE => INVALID_DEVICE_POINTER,
        code => code,
    })
}

/// Before HIP 7.1 the argument points to the descriptor. Since then it is the descriptor.
#[unsafe(no_mangle)]
unsafe extern "C" fn hipMemImportFromShareableHandle(
    place: *mut u64,
    fd: *mut c_void,
    kind: c_uint,
) -> Code {
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    unsafe {
        let fd = if version() < 70_100_000 {
            fd.cast::<c_int>().read() as usize as *mut c_void
        } else {
            fd
        };
        left(cuMemImportFromShareableHandle(place, fd, kind))
    }
}

/// Accepts only the start address of a mapping of virtual memory.
#[unsafe(no_mangle)]
unsafe extern "C" fn hipMemGetAccess(
    place: *mut u64,
    location: *const Location,
    base: u64,
) -> Code {
    let found = library().and_then(|library| {
        // SAFETY: the driver's documentation requires the caller to pass valid arguments.
        let location = unsafe { location.as_ref() }.filter(|location| location.kind == 1);
        ordinal(library, location.ok_or(INVALID_VALUE)?.id)?;
        let at = DevicePtr(base);
        let owner = library.process.ordinal_of(at).map_err(code)?;
        let found = library.process.allocation(owner, at).map_err(code)?;
        if found.base == at && found.reservation.is_some() { Ok(()) } else { Err(INVALID_VALUE) }
    });
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(found.and_then(|()| unsafe { put(place, 3) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipMemGetAllocationPropertiesFromHandle(
    place: *mut Asked,
    handle: u64,
) -> Code {
    let found = library().and_then(|library| {
        let physical = find(&mut library.handles().physical, handle as usize)?.clone();
        Ok(physical.ok_or(INVALID_HANDLE)?.export().is_ok())
    });
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    answer(found.and_then(|shared| unsafe { put(place, Asked::pinned(shared)) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipMemcpyAsync(
    to: u64,
    from: u64,
    len: usize,
    kind: c_uint,
    handle: *mut c_void,
) -> Code {
    // Rejects all kinds except `hipMemcpyDefault` (4). Other kinds claim where the memory is.
    if kind != 4 {
        return left(INVALID_VALUE);
    }
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    left(unsafe { cuMemcpyAsync(to, from, len, handle) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn hipEventCreateWithFlags(place: *mut *mut c_void, flags: c_uint) -> Code {
    // Without `hipEventReleaseToSystem`, other processes and NICs might not see the written data.
    if flags != 0x8000_0002 || current().is_err() {
        return left(INVALID_VALUE);
    }
    // SAFETY: the driver's documentation requires the caller to pass valid arguments.
    left(unsafe { cuEventCreate(place, 2) })
}
