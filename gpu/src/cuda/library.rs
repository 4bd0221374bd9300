//! Loads the libraries of the driver interfaces.

use std::ffi::{CStr, CString, c_void};
use std::fmt;
use std::ptr::NonNull;

use crate::DeviceError;

/// A driver interface. HIP's functions have the parameters of CUDA's, except those in `hip`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Api {
    /// NVIDIA's driver.
    #[cfg(feature = "cuda")]
    Cuda,
    /// AMD's runtime library.
    #[cfg(feature = "hip")]
    Hip,
}

impl Api {
    /// All interfaces of this build.
    pub const ALL: &[Api] = &[
        #[cfg(feature = "cuda")]
        Api::Cuda,
        #[cfg(feature = "hip")]
        Api::Hip,
    ];

    pub(super) fn names(self) -> [&'static str; 3] {
        match self {
            #[cfg(feature = "cuda")]
            Api::Cuda => ["CUDA", "libcuda", "CUDA 11.7"],
            #[cfg(feature = "hip")]
            Api::Hip => ["HIP", "libamdhip64", "ROCm 6.0"],
        }
    }

    fn files(self) -> &'static [&'static CStr] {
        match self {
            #[cfg(feature = "cuda")]
            Api::Cuda => &[c"libcuda.so", c"libcuda.so.1"],
            #[cfg(feature = "hip")]
            Api::Hip => {
                // ROCm installs the unversioned name only together with its headers.
                &[
                    c"libamdhip64.so",
                    c"libamdhip64.so.7",
                    c"libamdhip64.so.6",
                    c"/opt/rocm/lib/libamdhip64.so",
                ]
            }
        }
    }
}

impl fmt::Display for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names()[0].to_ascii_lowercase())
    }
}

/// Why there is no usable driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Absent {
    /// The loader finds no driver library.
    NoLibrary(Api),
    /// The library lacks this function. It is too old, or is not a driver.
    Lacks(Api, &'static str),
    /// The library is the stub of a toolkit, which serves only for linking.
    Stub,
    /// The driver failed to start, with this error code.
    Refuses(Api, i32),
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Absent::NoLibrary(api) => {
                let [name, library, _] = api.names();
                write!(f, "no {name} driver: {library} is not on this machine")
            }
            Absent::Lacks(api, function) => {
                let [name, library, oldest] = api.names();
                write!(
                    f,
                    "no usable {name} driver: {library} lacks {function}; install {oldest} or later"
                )
            }
            Absent::Stub => f.write_str(
                "no CUDA driver: the libcuda in LD_LIBRARY_PATH is a toolkit's stub; remove it \
                 from LD_LIBRARY_PATH",
            ),
            Absent::Refuses(api, code) => {
                write!(f, "the {} driver failed to start: error code {code}", api.names()[0])
            }
        }
    }
}

impl std::error::Error for Absent {}

impl From<Absent> for DeviceError {
    fn from(absent: Absent) -> Self {
        match absent {
            Absent::Refuses(_, code) => DeviceError::Driver(code),
            _ => DeviceError::NoDriver,
        }
    }
}

/// A loaded CUDA or HIP library. Never unloaded.
pub(super) struct Library {
    api: Api,
    handle: NonNull<c_void>,
}

impl Library {
    pub(super) fn open(api: Api) -> Result<Library, Absent> {
        let open = |name: &&CStr| {
            // SAFETY: loading the library runs its initializers, which every program that uses a
            // GPU does. The name ends with a zero byte.
            NonNull::new(unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) })
        };
        let handle = api.files().iter().find_map(open).ok_or(Absent::NoLibrary(api))?;
        Ok(Library { api, handle })
    }

    /// Looks up a function of the library.
    ///
    /// # Safety
    /// `F` is the type of a function pointer with the parameters and result of that function.
    pub(super) unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F, Absent> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let symbol = CString::new(name).expect("the names of functions have no zero byte");
        // SAFETY: the library stays loaded, and the name ends with a zero byte.
        let address = NonNull::new(unsafe { libc::dlsym(self.handle.as_ptr(), symbol.as_ptr()) });
        let address = address.ok_or(Absent::Lacks(self.api, name))?;
        // SAFETY: the caller guarantees that `F` is this function's pointer type. The sizes are
        // equal.
        Ok(unsafe { std::mem::transmute_copy(&address) })
    }
}
