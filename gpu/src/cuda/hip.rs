//! Functions with the parameters of CUDA's functions, for the HIP functions that differ. All other
//! HIP functions take the same arguments as CUDA's. Structures have the same layouts, and error
//! codes and flags have the same values.
//!
//! Constants and layouts were compared with `hip_runtime_api.h` and `driver_types.h` of HIP 6.2
//! (ROCm 6.2.1), 7.1 and 7.14. The comments on behaviour describe AMD's implementation (`clr`).

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUflushGPUDirectRDMAWritesScope,
    CUflushGPUDirectRDMAWritesTarget, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType, CUmemRangeHandleType,
    CUpointer_attribute, CUstream,
};

use super::library::{Absent, Library};

/// The first version that exports virtual memory as CUDA does. Before HIP 7.1 an import takes a
/// pointer to the descriptor, and until 7.12 `hipMemRetainAllocationHandle` does not count
/// references.
const DESCRIPTORS_SINCE: c_int = 71_400_000;

/// `hipMemcpyDefault`: the runtime finds out where the memory is.
const COPY_DEFAULT: c_uint = 4;

/// `hipEventReleaseToSystem`. Without it, an event may leave writes in the device's caches.
const RELEASE_TO_SYSTEM: c_uint = 0x8000_0000;

/// `hipDeviceAttributeHdpMemFlushCntl`. Its value is a pointer.
const FLUSH_REGISTER: c_uint = 10_005;

const INVALID_VALUE: u32 = 1;
pub(super) const NOT_INITIALIZED: u32 = 3;
const NOT_SUPPORTED: u32 = 801;

struct Hip {
    version: c_int,
    peek_error: unsafe extern "C" fn() -> u32,
    take_error: unsafe extern "C" fn() -> u32,
    get_device: unsafe extern "C" fn(*mut c_int) -> u32,
    set_device: unsafe extern "C" fn(c_int) -> u32,
    device_attribute: unsafe extern "C" fn(*mut c_void, c_uint, c_int) -> u32,
    pointer_attribute: unsafe extern "C" fn(*mut c_void, c_uint, CUdeviceptr) -> u32,
    address_range: unsafe extern "C" fn(*mut CUdeviceptr, *mut usize, CUdeviceptr) -> u32,
    get_access: unsafe extern "C" fn(*mut c_ulonglong, *const CUmemLocation, CUdeviceptr) -> u32,
    retain: unsafe extern "C" fn(*mut CUmemGenericAllocationHandle, CUdeviceptr) -> u32,
    properties: unsafe extern "C" fn(*mut CUmemAllocationProp, CUmemGenericAllocationHandle) -> u32,
    release: unsafe extern "C" fn(CUmemGenericAllocationHandle) -> u32,
    import: unsafe extern "C" fn(
        *mut CUmemGenericAllocationHandle,
        *mut c_void,
        CUmemAllocationHandleType,
    ) -> u32,
    copy: unsafe extern "C" fn(CUdeviceptr, CUdeviceptr, usize, c_uint, CUstream) -> u32,
    create_event: unsafe extern "C" fn(*mut CUevent, c_uint) -> u32,
    range_handle: Option<RangeHandle>,
}

type RangeHandle =
    unsafe extern "C" fn(*mut c_void, CUdeviceptr, usize, CUmemRangeHandleType, c_ulonglong) -> u32;

static HIP: OnceLock<Hip> = OnceLock::new();

pub(super) fn prepare(library: &Library) -> Result<(), Absent> {
    let mut version = 0;
    // SAFETY: HIP's header declares these functions with arguments of the same size and kind. The
    // version is written to a local variable.
    let (hip, code) = unsafe {
        let driver_version: unsafe extern "C" fn(*mut c_int) -> u32 =
            library.function("hipDriverGetVersion")?;
        let code = driver_version(&raw mut version);
        let hip = Hip {
            version: if code == 0 { version } else { 0 },
            peek_error: library.function("hipPeekAtLastError")?,
            take_error: library.function("hipGetLastError")?,
            get_device: library.function("hipGetDevice")?,
            set_device: library.function("hipSetDevice")?,
            device_attribute: library.function("hipDeviceGetAttribute")?,
            pointer_attribute: library.function("hipPointerGetAttribute")?,
            address_range: library.function("hipMemGetAddressRange")?,
            get_access: library.function("hipMemGetAccess")?,
            retain: library.function("hipMemRetainAllocationHandle")?,
            properties: library.function("hipMemGetAllocationPropertiesFromHandle")?,
            release: library.function("hipMemRelease")?,
            import: library.function("hipMemImportFromShareableHandle")?,
            copy: library.function("hipMemcpyAsync")?,
            create_event: library.function("hipEventCreateWithFlags")?,
            range_handle: library.function("hipMemGetHandleForAddressRange").ok(),
        };
        (hip, code)
    };
    HIP.get_or_init(|| hip);
    forget(code);
    Ok(())
}

impl Hip {
    fn attribute(&self, number: c_uint, device: CUdevice) -> c_int {
        let mut value: c_int = 0;
        // SAFETY: all attributes except registers are integers, and the result is written to a
        // local variable.
        match ok(unsafe { (self.device_attribute)((&raw mut value).cast(), number, device) }) {
            Ok(()) => value,
            Err(_) => 0,
        }
    }

    fn flush_register(&self, device: CUdevice) -> *mut u32 {
        let mut register: *mut u32 = std::ptr::null_mut();
        // SAFETY: HIP writes a pointer for this attribute, although it declares the result an
        // integer. The result is written to a local variable.
        match ok(unsafe {
            (self.device_attribute)((&raw mut register).cast(), FLUSH_REGISTER, device)
        }) {
            Ok(()) => register,
            Err(_) => std::ptr::null_mut(),
        }
    }

    fn current(&self) -> Result<CUdevice, u32> {
        let mut device = 0;
        // SAFETY: the result is written to a local variable.
        ok(unsafe { (self.get_device)(&raw mut device) }).map(|()| device)
    }

    /// `None` for memory that is not virtual. `base` is the start of an allocation.
    fn virtual_handles(&self, base: CUdeviceptr) -> Result<Option<u64>, u32> {
        let device = CUmemLocation {
            type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: self.current()?,
        };
        let mut access = 0;
        // SAFETY: the result is written to a local variable. HIP looks up the address among the
        // mappings of virtual memory.
        if ok(unsafe { (self.get_access)(&raw mut access, &raw const device, base) }).is_err() {
            return Ok(None);
        }
        if self.version < DESCRIPTORS_SINCE {
            return Ok(Some(0));
        }
        // SAFETY: zero is valid for all fields.
        let mut asked: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        let mut handle = 0;
        // SAFETY: the results are written to local variables. The handle is retained and then
        // released once.
        unsafe {
            ok((self.retain)(&raw mut handle, base))?;
            let code = forget((self.properties)(&raw mut asked, handle));
            forget((self.release)(handle));
            ok(code)?;
        }
        Ok(Some(asked.requestedHandleTypes.0.into()))
    }
}

fn ok(code: u32) -> Result<(), u32> {
    match forget(code) {
        0 => Ok(()),
        code => Err(code),
    }
}

/// Returns the error code of a call to HIP, and clears the error that the call left in this thread.
/// Otherwise the program would get this error from `hipGetLastError`, as if its own call had
/// failed.
#[inline]
pub(super) fn forget(code: u32) -> u32 {
    if code != 0 {
        clear(code);
    }
    code
}

/// Clears the last error if it has this code. Since HIP 7, a call that succeeds or returns "not
/// ready" leaves the last error unchanged. Such an error may come from the program's own call.
#[cold]
fn clear(code: u32) {
    let Some(hip) = HIP.get() else { return };
    // SAFETY: both functions have no arguments.
    unsafe {
        if (hip.peek_error)() == code {
            (hip.take_error)();
        }
    }
}

/// Looks up a HIP function, and returns a function that calls it and [forgets](forget) its error.
/// The identifiers after the types name the parameters.
macro_rules! function {
    ($library:ident $symbol:ident [$($name:ident: $kind:ty,)*] [] $($rest:ident)*) => {{
        type Function = unsafe extern "C" fn($($kind),*) -> u32;
        static FUNCTION: std::sync::OnceLock<Function> = std::sync::OnceLock::new();

        unsafe extern "C" fn call($($name: $kind),*) -> u32 {
            let Some(function) = FUNCTION.get() else { return hip::NOT_INITIALIZED };
            // SAFETY: our caller keeps the contract of the function, with the same arguments.
            hip::forget(unsafe { function($($name),*) })
        }

        let found: Function = $library.function(stringify!($symbol))?;
        FUNCTION.get_or_init(|| found);
        call
    }};
    (
        $library:ident $symbol:ident [$($named:tt)*] [$kind:ty $(, $more:ty)*]
        $name:ident $($rest:ident)*
    ) => {
        hip::function!($library $symbol [$($named)* $name: $kind,] [$($more),*] $($rest)*)
    };
}
pub(super) use function;

fn with(call: impl FnOnce(&Hip) -> Result<(), u32>) -> u32 {
    HIP.get().ok_or(NOT_INITIALIZED).and_then(call).err().unwrap_or(0)
}

/// HIP has one context per device. Its context functions are deprecated, and popping a context does
/// not restore the device. So a context here is the device's ordinal plus 1.
pub(super) unsafe extern "C" fn retain_context(context: *mut CUcontext, device: CUdevice) -> u32 {
    // SAFETY: the caller provides memory for the result.
    unsafe { context.write((device as usize + 1) as CUcontext) };
    0
}

pub(super) unsafe extern "C" fn release_context(_device: CUdevice) -> u32 {
    0
}

pub(super) unsafe extern "C" fn current_context(context: *mut CUcontext) -> u32 {
    with(|hip| {
        let device = hip.current()?;
        // SAFETY: the caller provides memory for the result.
        ok(unsafe { retain_context(context, device) })
    })
}

pub(super) unsafe extern "C" fn set_context(context: CUcontext) -> u32 {
    // SAFETY: HIP checks the ordinal.
    with(|hip| ok(unsafe { (hip.set_device)((context as usize).wrapping_sub(1) as c_int) }))
}

pub(super) unsafe extern "C" fn device_attribute(
    value: *mut c_int,
    attribute: CUdevice_attribute,
    device: CUdevice,
) -> u32 {
    use CUdevice_attribute as A;
    with(|hip| {
        let get = |number| hip.attribute(number, device);
        let found = match attribute {
            A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => get(67),
            A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID => get(68),
            A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID => get(69),
            A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED => get(88),
            A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED => {
                c_int::from(hip.version >= DESCRIPTORS_SINCE && get(89) != 0)
            }
            A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED => get(94),
            // NICs can access the device's memory if the PCI BAR exposes all of it.
            A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED => get(10_011),
            A::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS => get(10_013),
            // 0: NIC writes are unordered. A device with a flush register needs a flush, and the
            // processor can issue it.
            A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING => 0,
            A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS => {
                c_int::from(!hip.flush_register(device).is_null())
            }
            _ => return Err(INVALID_VALUE),
        };
        // SAFETY: the caller provides memory for the result.
        unsafe { value.write(found) };
        Ok(())
    })
}

/// HIP ignores attributes that it lacks, and writes the size as 32 bits. It does not report pools
/// or the reserved range of virtual memory. The buffer id has 32 bits.
pub(super) unsafe extern "C" fn pointer_attributes(
    count: c_uint,
    names: *mut CUpointer_attribute,
    places: *mut *mut c_void,
    ptr: CUdeviceptr,
) -> u32 {
    use CUpointer_attribute as A;
    with(|hip| {
        let (mut base, mut size) = (0, 0);
        // SAFETY: both results are written to local variables.
        if ok(unsafe { (hip.address_range)(&raw mut base, &raw mut size, ptr) }).is_err() {
            return Err(INVALID_VALUE);
        }
        let handles = hip.virtual_handles(base)?;
        for at in 0..count as usize {
            // SAFETY: the caller provides `count` names and `count` places. Each place is zeroed
            // and at least as large as its attribute.
            unsafe {
                let (name, place) = (*names.add(at), *places.add(at));
                match name {
                    A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => place.cast::<u64>().write(base),
                    A::CU_POINTER_ATTRIBUTE_RANGE_SIZE => place.cast::<u64>().write(size as u64),
                    A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => {
                        place.cast::<u32>().write(handles.is_none().into())
                    }
                    A::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => {
                        place.cast::<u64>().write(handles.unwrap_or(0))
                    }
                    A::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => {}
                    // HIP does not document which device it reports for virtual memory.
                    A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL if handles.is_some() => {
                        place.cast::<c_int>().write(hip.current()?)
                    }
                    name => ok((hip.pointer_attribute)(place, name as c_uint, ptr))?,
                }
            }
        }
        Ok(())
    })
}

/// Fails in versions of HIP that would treat the descriptor as an address.
pub(super) unsafe extern "C" fn import(
    handle: *mut CUmemGenericAllocationHandle,
    descriptor: *mut c_void,
    kind: CUmemAllocationHandleType,
) -> u32 {
    with(|hip| {
        if hip.version < DESCRIPTORS_SINCE {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: the caller provides memory for the result, and the descriptor by value.
        ok(unsafe { (hip.import)(handle, descriptor, kind) })
    })
}

pub(super) unsafe extern "C" fn copy(
    to: CUdeviceptr,
    from: CUdeviceptr,
    len: usize,
    stream: CUstream,
) -> u32 {
    // SAFETY: the caller upholds the contract of the copy.
    with(|hip| ok(unsafe { (hip.copy)(to, from, len, COPY_DEFAULT, stream) }))
}

pub(super) unsafe extern "C" fn create_event(event: *mut CUevent, flags: c_uint) -> u32 {
    // SAFETY: the caller provides memory for the result.
    with(|hip| ok(unsafe { (hip.create_event)(event, flags | RELEASE_TO_SYSTEM) }))
}

pub(super) unsafe extern "C" fn range_handle(
    handle: *mut c_void,
    ptr: CUdeviceptr,
    len: usize,
    kind: CUmemRangeHandleType,
    flags: c_ulonglong,
) -> u32 {
    with(|hip| {
        let range_handle = hip.range_handle.ok_or(NOT_SUPPORTED)?;
        // SAFETY: the caller provides memory for the result.
        ok(unsafe { range_handle(handle, ptr, len, kind, flags) })
    })
}

/// Flushes writes over the bus to the current device, as RCCL does.
pub(super) unsafe extern "C" fn flush(
    _target: CUflushGPUDirectRDMAWritesTarget,
    _scope: CUflushGPUDirectRDMAWritesScope,
) -> u32 {
    with(|hip| {
        let register = hip.flush_register(hip.current()?);
        if register.is_null() {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: the runtime has mapped this register of the device, and any write flushes.
        unsafe { register.write_volatile(1) };
        Ok(())
    })
}
