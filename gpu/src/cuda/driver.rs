//! Declares the driver's functions, converts its error codes, and lists its devices.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{self, *};

#[cfg(feature = "hip")]
use super::hip;
use super::library::{Absent, Api, Library};
use crate::{DeviceError, Uuid};

impl Api {
    pub(super) fn driver(self) -> Result<&'static Driver, Absent> {
        static DRIVERS: [OnceLock<Result<Driver, Absent>>; Api::ALL.len()] =
            [const { OnceLock::new() }; Api::ALL.len()];
        let found = DRIVERS[self as usize].get_or_init(|| {
            let driver = self.load()?;
            // SAFETY: 0 is the only value that the driver accepts for the flags.
            match unsafe { (driver.cuInit)(0) } {
                0 | NO_DEVICE => Ok(driver),
                STUB_LIBRARY => Err(Absent::Stub),
                code => Err(Absent::Refuses(self, code as i32)),
            }
        });
        found.as_ref().map_err(|absent| *absent)
    }

    fn load(self) -> Result<Driver, Absent> {
        let library = Library::open(self)?;
        match self {
            #[cfg(feature = "cuda")]
            Api::Cuda => Driver::cuda(&library),
            #[cfg(feature = "hip")]
            Api::Hip => {
                hip::prepare(&library)?;
                Driver::hip(&library)
            }
        }
    }

    /// Returns the ordinal of this thread's current device, or `None` if the thread has none or
    /// there is no usable driver.
    pub fn current(self) -> Option<u32> {
        let driver = self.driver().ok()?;
        let mut current = 0;
        // SAFETY: the result is written to a local variable.
        check(unsafe { (driver.cuCtxGetDevice)(&raw mut current) }).ok()?;
        (0..driver.count().ok()?).find(|ordinal| driver.device(*ordinal) == Ok(current))
    }

    /// Returns the driver's version as text, such as `CUDA 12.6` or `HIP 7.14`.
    ///
    /// # Errors
    /// [`Absent`], with the reason, if there is no usable driver.
    pub fn version(self) -> Result<String, Absent> {
        let driver = self.driver()?;
        let mut version = 0;
        // SAFETY: the result is written to a local variable.
        let code = unsafe { (driver.cuDriverGetVersion)(&raw mut version) };
        let (major, minor) = match (code, self) {
            #[cfg(feature = "cuda")]
            (0, Api::Cuda) => (version / 1000, version % 1000 / 10),
            #[cfg(feature = "hip")]
            (0, Api::Hip) => (version / 10_000_000, version % 10_000_000 / 100_000),
            (code, _) => return Err(Absent::Refuses(self, code as i32)),
        };
        Ok(format!("{} {major}.{minor}", self.names()[0]))
    }

    /// Returns the devices of this process.
    ///
    /// # Errors
    /// [`Absent`], with the reason, if there is no usable driver.
    pub fn devices(self) -> Result<Vec<CudaInfo>, Absent> {
        let driver = self.driver()?;
        let refused = |error| match error {
            DeviceError::Driver(code) | DeviceError::Lost(code) => Absent::Refuses(self, code),
            _ => Absent::Refuses(self, 0),
        };
        let count = driver.count().map_err(refused)?;
        (0..count).map(|ordinal| driver.info(ordinal)).collect::<Result<_, _>>().map_err(refused)
    }
}

/// Declares the driver functions that we use, under CUDA's names. Checks their arguments against
/// cudarc's declarations. The second column is HIP's function with the same arguments, or a
/// function of `hip` that replaces it.
macro_rules! functions {
    ($($name:ident $($hip:ident)::+ ($($argument:ty),*);)*) => {
        /// The driver functions that we use. They return an error code.
        #[expect(non_snake_case, reason = "the driver's names")]
        pub struct Driver {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        const _: () = {
            $(let _: unsafe fn($($argument),*) -> CUresult = sys::$name;)*
        };

        impl Driver {
            #[cfg(feature = "cuda")]
            fn cuda(library: &Library) -> Result<Driver, Absent> {
                // SAFETY: cudarc declares these arguments, and no driver version changes them. A
                // `CUresult` is passed as a `u32`.
                Ok(unsafe { Driver { $($name: library.function(stringify!($name))?),* } })
            }

            #[cfg(feature = "hip")]
            fn hip(library: &Library) -> Result<Driver, Absent> {
                // SAFETY: HIP's header declares the arguments with types of the same size and kind.
                Ok(unsafe {
                    Driver { $($name: functions!(@ library [$($argument),*] $($hip)::+)),* }
                })
            }
        }
    };
    (@ $library:ident $arguments:tt $symbol:ident) => {
        hip::function!($library $symbol [] $arguments a b c d e)
    };
    (@ $library:ident $arguments:tt $replacement:path) => { $replacement };
}

functions! {
    cuInit hipInit(c_uint);
    cuDriverGetVersion hipDriverGetVersion(*mut c_int);
    cuDeviceGetCount hipGetDeviceCount(*mut c_int);
    cuDeviceGet hipDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetName hipDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceTotalMem_v2 hipDeviceTotalMem(*mut usize, CUdevice);
    cuDeviceGetAttribute hip::device_attribute(*mut c_int, CUdevice_attribute, CUdevice);
    cuDeviceGetUuid_v2 hipDeviceGetUuid(*mut CUuuid, CUdevice);
    cuDeviceCanAccessPeer hipDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
    cuDevicePrimaryCtxRetain hip::retain_context(*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease_v2 hip::release_context(CUdevice);
    cuCtxGetCurrent hip::current_context(*mut CUcontext);
    cuCtxGetDevice hipGetDevice(*mut CUdevice);
    cuCtxSetCurrent hip::set_context(CUcontext);
    cuMemAlloc_v2 hipMalloc(*mut CUdeviceptr, usize);
    cuMemFree_v2 hipFree(CUdeviceptr);
    cuMemAllocManaged hipMallocManaged(*mut CUdeviceptr, usize, c_uint);
    cuMemAllocAsync hipMallocAsync(*mut CUdeviceptr, usize, CUstream);
    cuMemGetAddressRange_v2 hipMemGetAddressRange(*mut CUdeviceptr, *mut usize, CUdeviceptr);
    cuPointerGetAttributes hip::pointer_attributes(
        c_uint, *mut CUpointer_attribute, *mut *mut c_void, CUdeviceptr
    );
    cuIpcGetMemHandle hipIpcGetMemHandle(*mut CUipcMemHandle, CUdeviceptr);
    cuIpcOpenMemHandle_v2 hipIpcOpenMemHandle(*mut CUdeviceptr, CUipcMemHandle, c_uint);
    cuIpcCloseMemHandle hipIpcCloseMemHandle(CUdeviceptr);
    cuMemGetAllocationGranularity hipMemGetAllocationGranularity(
        *mut usize, *const CUmemAllocationProp, CUmemAllocationGranularity_flags
    );
    cuMemCreate hipMemCreate(
        *mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong
    );
    cuMemRetainAllocationHandle hipMemRetainAllocationHandle(
        *mut CUmemGenericAllocationHandle, *mut c_void
    );
    cuMemExportToShareableHandle hipMemExportToShareableHandle(
        *mut c_void, CUmemGenericAllocationHandle, CUmemAllocationHandleType, c_ulonglong
    );
    cuMemImportFromShareableHandle hip::import(
        *mut CUmemGenericAllocationHandle, *mut c_void, CUmemAllocationHandleType
    );
    cuMemAddressReserve hipMemAddressReserve(
        *mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong
    );
    cuMemAddressFree hipMemAddressFree(CUdeviceptr, usize);
    cuMemMap hipMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
    cuMemUnmap hipMemUnmap(CUdeviceptr, usize);
    cuMemSetAccess hipMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    cuMemRelease hipMemRelease(CUmemGenericAllocationHandle);
    cuStreamCreate hipStreamCreateWithFlags(*mut CUstream, c_uint);
    cuStreamDestroy_v2 hipStreamDestroy(CUstream);
    cuStreamSynchronize hipStreamSynchronize(CUstream);
    cuStreamWaitEvent hipStreamWaitEvent(CUstream, CUevent, c_uint);
    cuLaunchHostFunc hipLaunchHostFunc(CUstream, CUhostFn, *mut c_void);
    cuMemcpyAsync hip::copy(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuStreamWriteValue64_v2 hipStreamWriteValue64(CUstream, CUdeviceptr, u64, c_uint);
    cuEventCreate hip::create_event(*mut CUevent, c_uint);
    cuEventRecord hipEventRecord(CUevent, CUstream);
    cuEventQuery hipEventQuery(CUevent);
    cuEventDestroy_v2 hipEventDestroy(CUevent);
    cuMemHostRegister_v2 hipHostRegister(*mut c_void, usize, c_uint);
    cuMemHostUnregister hipHostUnregister(*mut c_void);
    cuMemHostGetDevicePointer_v2 hipHostGetDevicePointer(*mut CUdeviceptr, *mut c_void, c_uint);
    cuMemGetHandleForAddressRange hip::range_handle(
        *mut c_void, CUdeviceptr, usize, CUmemRangeHandleType, c_ulonglong
    );
    cuFlushGPUDirectRDMAWrites hip::flush(
        CUflushGPUDirectRDMAWritesTarget, CUflushGPUDirectRDMAWritesScope
    );
}

pub(super) const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
/// HIP's code for an address or a handle that it does not know. CUDA's driver never returns it.
pub(super) const INVALID_DEVICE_POINTER: u32 = 17;
const STUB_LIBRARY: u32 = 34;
const NO_DEVICE: u32 = 100;
const INVALID_DEVICE: u32 = 101;
const INVALID_CONTEXT: u32 = 201;
const MAP_FAILED: u32 = 205;
const PEER_ACCESS_UNSUPPORTED: u32 = 217;
const INVALID_HANDLE: u32 = 400;
pub(super) const NOT_FOUND: u32 = 500;
pub(super) const NOT_READY: u32 = 600;
const TOO_MANY_PEERS: u32 = 711;
pub(super) const NOT_SUPPORTED: u32 = 801;

#[inline]
pub(super) fn check(code: u32) -> Result<(), DeviceError> {
    if code == 0 {
        return Ok(());
    }
    Err(error(code))
}

#[cold]
fn error(code: u32) -> DeviceError {
    match code {
        OUT_OF_MEMORY => DeviceError::Exhausted,
        // The driver is shut down or unavailable, memory or a link has an uncorrectable error, or a
        // kernel faulted. The context is unusable after these errors.
        4 | 46 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 => {
            DeviceError::Lost(code as i32)
        }
        PEER_ACCESS_UNSUPPORTED | TOO_MANY_PEERS => DeviceError::NoPeerAccess,
        code => DeviceError::Driver(code as i32),
    }
}

#[cold]
pub(super) fn open_error(code: u32) -> DeviceError {
    match code {
        INVALID_VALUE
        | INVALID_DEVICE_POINTER
        | INVALID_DEVICE
        | MAP_FAILED
        | INVALID_HANDLE
        | NOT_SUPPORTED => DeviceError::BadHandle,
        INVALID_CONTEXT => DeviceError::SameProcess,
        code => error(code),
    }
}

/// Properties of a device, as the driver reports them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaInfo {
    /// The device's ordinal in this process, from 0.
    pub ordinal: u32,
    /// The device's name, from the driver.
    pub name: String,
    /// Identifies the device in every process.
    pub uuid: Uuid,
    /// Size of the device's memory, in bytes.
    pub memory: u64,
    /// PCI address: domain, bus, device.
    pub pci: (u32, u32, u32),
    /// Whether virtual memory can be exported by descriptors.
    pub descriptors: bool,
    /// Whether the device supports stream-ordered pools (`cuMemAllocAsync`).
    pub pools: bool,
    /// Whether a stream can store a 64-bit word (`cuStreamWriteValue64`).
    pub write_word: bool,
    /// Whether NICs can access the device's memory.
    pub gpudirect: bool,
    /// Whether NIC writes must be flushed before the device reads them.
    pub must_flush: bool,
    /// Ordinals of the devices that this device can access, its own included.
    pub reaches: Vec<u32>,
}

impl Driver {
    pub fn count(&self) -> Result<u32, DeviceError> {
        let mut count = 0;
        // SAFETY: the result is written to a local variable.
        match unsafe { (self.cuDeviceGetCount)(&raw mut count) } {
            NO_DEVICE | 3 => Ok(0),
            code => check(code).map(|()| count.max(0) as u32),
        }
    }

    pub fn device(&self, ordinal: u32) -> Result<CUdevice, DeviceError> {
        let count = self.count()?;
        let wanted = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
        let wanted = wanted.ok_or(DeviceError::NoDevice(count))?;
        let mut device = 0;
        // SAFETY: the result is written to a local variable.
        check(unsafe { (self.cuDeviceGet)(&raw mut device, wanted) })?;
        Ok(device)
    }

    pub fn uuid(&self, device: CUdevice) -> Result<Uuid, DeviceError> {
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: the driver returned `device`, and the result is written to a local variable.
        check(unsafe { (self.cuDeviceGetUuid_v2)(&raw mut uuid, device) })?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    fn attribute(&self, attribute: CUdevice_attribute, device: CUdevice) -> c_int {
        let mut value = 0;
        // SAFETY: the driver returned `device`, and the result is written to a local variable.
        match unsafe { (self.cuDeviceGetAttribute)(&raw mut value, attribute, device) } {
            0 => value,
            _ => 0,
        }
    }

    pub fn writes_words(&self, device: CUdevice) -> bool {
        self.attribute(
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
            device,
        ) != 0
    }

    /// Returns whether NICs can access virtual memory that is allocated for them.
    pub fn virtual_for_nics(&self, device: CUdevice) -> bool {
        let attribute =
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
        self.attribute(attribute, device) != 0
    }

    fn gpudirect(&self, device: CUdevice) -> bool {
        self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, device)
            != 0
    }

    /// Returns whether NIC writes to the device need a flush that the processor can issue. Returns
    /// `false` if NICs cannot write to the device.
    pub fn must_flush(&self, device: CUdevice) -> bool {
        let ordering = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING;
        let owner =
            CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as c_int;
        let options = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS;
        let host =
            CUflushGPUDirectRDMAWritesOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as c_int;
        self.gpudirect(device)
            && self.attribute(ordering, device) < owner
            && self.attribute(options, device) & host != 0
    }

    /// Returns the UUID of each device of this process, and whether `device` can access its memory.
    pub fn peers(&self, device: CUdevice) -> Result<Vec<(Uuid, bool)>, DeviceError> {
        (0..self.count()?)
            .map(|ordinal| {
                let peer = self.device(ordinal)?;
                let mut can = c_int::from(peer == device);
                if peer != device {
                    // SAFETY: the driver returned both devices, and the result is written to a
                    // local variable.
                    check(unsafe { (self.cuDeviceCanAccessPeer)(&raw mut can, device, peer) })?;
                }
                Ok((self.uuid(peer)?, can != 0))
            })
            .collect()
    }

    fn info(&self, ordinal: u32) -> Result<CudaInfo, DeviceError> {
        let device = self.device(ordinal)?;
        let mut name = [0 as c_char; 128];
        // SAFETY: the driver returned `device`, and the buffer is passed with its length.
        check(unsafe { (self.cuDeviceGetName)(name.as_mut_ptr(), name.len() as c_int, device) })?;
        let name: Vec<u8> =
            name.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
        let mut memory = 0;
        // SAFETY: the driver returned `device`, and the result is written to a local variable.
        check(unsafe { (self.cuDeviceTotalMem_v2)(&raw mut memory, device) })?;
        let get = |attribute| self.attribute(attribute, device);
        let reaches = self.peers(device)?.into_iter().enumerate().filter(|(_, (_, can))| *can);
        use CUdevice_attribute as A;
        Ok(CudaInfo {
            ordinal,
            name: String::from_utf8_lossy(&name).into_owned(),
            uuid: self.uuid(device)?,
            memory: memory as u64,
            pci: (
                get(A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID) as u32,
                get(A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) as u32,
                get(A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID) as u32,
            ),
            descriptors: get(A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
                != 0,
            pools: get(A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED) != 0,
            write_word: self.writes_words(device),
            gpudirect: self.gpudirect(device),
            must_flush: self.must_flush(device),
            reaches: reaches.map(|(at, _)| at as u32).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_codes_are_converted() {
        assert_eq!(check(0), Ok(()));
        assert_eq!(check(2), Err(DeviceError::Exhausted));
        assert_eq!(check(700), Err(DeviceError::Lost(700)));
        assert_eq!(check(217), Err(DeviceError::NoPeerAccess));
        assert_eq!(
            check(4_000_000_000),
            Err(DeviceError::Driver(4_000_000_000_u32 as i32)),
            "a code newer than this library"
        );
        assert_eq!(open_error(1), DeviceError::BadHandle);
        assert_eq!(open_error(201), DeviceError::SameProcess);
        assert_eq!(open_error(700), DeviceError::Lost(700));
        assert_eq!(open_error(208), DeviceError::Driver(208));
    }
}
