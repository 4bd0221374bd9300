//! Loads libfabric and its few exported functions at run time. All other calls go through the
//! function tables of its objects.
//!
//! Slow path: loading allocates, makes system calls and runs the library's constructors. A loaded
//! library stays loaded. Its providers start threads and register exit handlers, so unloading is
//! never safe.

use alloc::borrow::ToOwned;
use alloc::string::String;
use core::ffi::{CStr, c_char, c_void};
use core::{fmt, mem};

use super::error::{Code, LoadError};
use super::raw::{self, fi_version};

/// The exported functions that the rail uses.
#[derive(Clone, Copy)]
pub struct Entries {
    /// `fi_getinfo`.
    pub getinfo: raw::getinfo,
    /// `fi_freeinfo`.
    pub freeinfo: raw::freeinfo,
    /// `fi_dupinfo`. `freeinfo` frees the strings of the copy with the C library's `free`.
    pub dupinfo: raw::dupinfo,
    /// `fi_fabric`.
    pub fabric: raw::fabric,
    /// `fi_version`.
    pub version: raw::version,
    /// `fi_strerror`.
    pub strerror: raw::strerror,
    /// `fi_tostr`.
    pub tostr: raw::tostr,
}

/// A loaded libfabric.
#[derive(Clone, Copy)]
pub struct Library {
    pub(super) entries: Entries,
}

impl Library {
    /// The library that is loaded if no path is given.
    pub const NAME: &'static CStr = c"libfabric.so.1";
    /// The oldest supported version.
    pub const OLDEST: (u32, u32) = (1, 17);
    /// The newest API version that is requested, even from later libraries.
    pub const NEWEST: (u32, u32) = (1, 20);

    /// Loads the library at `path`, or [`Library::NAME`].
    ///
    /// # Errors
    /// The library is missing, is not libfabric, or is too old.
    ///
    /// # Safety
    /// The file at `path` is libfabric, because loading runs its constructors.
    #[doc(alias = "dlopen")]
    pub unsafe fn open(path: Option<&CStr>) -> Result<Library, LoadError> {
        let name = path.unwrap_or(Self::NAME);
        let said = || String::from_utf8_lossy(name.to_bytes()).into_owned();
        // SAFETY: the name is a C string, and the caller guarantees that the file is libfabric.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: `dlerror` returns null, or a C string that is valid until this thread calls
            // `dlerror` again.
            let reason = unsafe {
                let text = libc::dlerror();
                if text.is_null() {
                    String::new()
                } else {
                    CStr::from_ptr(text).to_string_lossy().into_owned()
                }
            };
            return Err(LoadError::NotFound { path: said(), reason });
        }
        let find = |symbol: &'static CStr, version: &CStr| -> Result<*mut c_void, LoadError> {
            // SAFETY: the handle is open, and the names are C strings. `dlsym` serves libraries
            // without symbol versions.
            let found = unsafe {
                let versioned = libc::dlvsym(handle, symbol.as_ptr(), version.as_ptr());
                if versioned.is_null() { libc::dlsym(handle, symbol.as_ptr()) } else { versioned }
            };
            match found.is_null() {
                true => Err(LoadError::NoSymbol {
                    path: said(),
                    symbol: symbol.to_str().unwrap_or("?"),
                }),
                false => Ok(found),
            }
        };
        // SAFETY: these are the C signatures of the symbols in these versions. A versioned symbol
        // never changes its signature.
        let entries = unsafe {
            Entries {
                getinfo: mem::transmute::<*mut c_void, raw::getinfo>(find(
                    c"fi_getinfo",
                    c"FABRIC_1.3",
                )?),
                freeinfo: mem::transmute::<*mut c_void, raw::freeinfo>(find(
                    c"fi_freeinfo",
                    c"FABRIC_1.3",
                )?),
                dupinfo: mem::transmute::<*mut c_void, raw::dupinfo>(find(
                    c"fi_dupinfo",
                    c"FABRIC_1.3",
                )?),
                fabric: mem::transmute::<*mut c_void, raw::fabric>(find(
                    c"fi_fabric",
                    c"FABRIC_1.1",
                )?),
                version: mem::transmute::<*mut c_void, raw::version>(find(
                    c"fi_version",
                    c"FABRIC_1.0",
                )?),
                strerror: mem::transmute::<*mut c_void, raw::strerror>(find(
                    c"fi_strerror",
                    c"FABRIC_1.0",
                )?),
                tostr: mem::transmute::<*mut c_void, raw::tostr>(find(c"fi_tostr", c"FABRIC_1.0")?),
            }
        };
        let library = Library { entries };
        let (found, needed) = (library.version(), Self::OLDEST);
        if found < needed {
            return Err(LoadError::TooOld { path: said(), found, needed });
        }
        Ok(library)
    }

    /// Wraps functions that did not come from the dynamic linker.
    ///
    /// # Safety
    /// The functions behave as libfabric's do. Each table of their objects is as long as its `size`
    /// field says.
    pub const unsafe fn from_entries(entries: Entries) -> Library {
        Library { entries }
    }

    /// Returns the library's version: major, minor.
    #[doc(alias = "fi_version")]
    pub fn version(&self) -> (u32, u32) {
        // SAFETY: the function takes no argument.
        let version = unsafe { (self.entries.version)() };
        (version >> 16, version & 0xffff)
    }

    /// Returns the API version to request: the newest version that the library and this package
    /// know.
    pub fn api_version(&self) -> u32 {
        let (major, minor) = self.version().min(Self::NEWEST);
        fi_version(major, minor)
    }

    /// Returns the library's text for a code.
    #[doc(alias = "fi_strerror")]
    pub fn describe(&self, code: Code) -> String {
        // SAFETY: `fi_strerror` accepts every number. The answer is a C string, copied at once.
        unsafe { copy_string((self.entries.strerror)(code.0)) }.unwrap_or_default()
    }

    pub(super) fn entries(&self) -> &Entries {
        &self.entries
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.version();
        write!(f, "libfabric {major}.{minor}")
    }
}

/// Copies a C string. Returns `None` for null.
///
/// # Safety
/// `text` is null or a C string.
pub(super) unsafe fn copy_string(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: our caller guarantees a C string, and null was checked above.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().as_ref().to_owned())
}
