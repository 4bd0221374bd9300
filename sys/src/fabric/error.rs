//! libfabric's errors. Codes stay raw; [`Library::describe`](super::library::Library::describe)
//! returns the text of a code. Only [`LoadError`] allocates.

use alloc::string::String;
use core::error::Error;
use core::fmt;

use super::raw::*;

/// A positive libfabric error code. Codes below 256 are `errno` values.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Code(pub i32);

macro_rules! named {
    ($($name:ident = $value:expr),* $(,)?) => {
        impl Code {
            /// Returns the C name, if known.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $(value if value == $value => Some(concat!("FI_", stringify!($name))),)*
                    _ => None,
                }
            }
        }
    };
}

named! {
    EAGAIN = libc::EAGAIN, ENOENT = libc::ENOENT, EIO = libc::EIO, ENOMEM = libc::ENOMEM,
    EACCES = libc::EACCES, EFAULT = libc::EFAULT, EBUSY = libc::EBUSY, ENODEV = libc::ENODEV,
    EINVAL = libc::EINVAL, EMFILE = libc::EMFILE, ENOSPC = libc::ENOSPC, ENOSYS = libc::ENOSYS,
    ENODATA = libc::ENODATA, EMSGSIZE = libc::EMSGSIZE, EOPNOTSUPP = libc::EOPNOTSUPP,
    EADDRINUSE = libc::EADDRINUSE,
    EADDRNOTAVAIL = libc::EADDRNOTAVAIL, ENETDOWN = libc::ENETDOWN, ENETUNREACH = libc::ENETUNREACH,
    ECONNABORTED = libc::ECONNABORTED, ECONNRESET = libc::ECONNRESET, ENOTCONN = libc::ENOTCONN,
    ESHUTDOWN = libc::ESHUTDOWN, ETIMEDOUT = libc::ETIMEDOUT, EPIPE = libc::EPIPE,
    ECONNREFUSED = libc::ECONNREFUSED, EHOSTDOWN = libc::EHOSTDOWN,
    EHOSTUNREACH = libc::EHOSTUNREACH, EREMOTEIO = libc::EREMOTEIO, ECANCELED = libc::ECANCELED,
    EKEYREJECTED = libc::EKEYREJECTED, EOTHER = FI_EOTHER, ETOOSMALL = FI_ETOOSMALL,
    EOPBADSTATE = FI_EOPBADSTATE, EAVAIL = FI_EAVAIL, EBADFLAGS = FI_EBADFLAGS, ENOEQ = FI_ENOEQ,
    EDOMAIN = FI_EDOMAIN, ENOCQ = FI_ENOCQ, ECRC = FI_ECRC, ETRUNC = FI_ETRUNC, ENOKEY = FI_ENOKEY,
    ENOAV = FI_ENOAV, EOVERRUN = FI_EOVERRUN, ENORX = FI_ENORX,
}

impl Code {
    /// Busy. Make progress and try again.
    pub const EAGAIN: Code = Code(FI_EAGAIN);
    /// An error completion can be read.
    pub const EAVAIL: Code = Code(FI_EAVAIL);
    /// Not supported.
    pub const ENOSYS: Code = Code(FI_ENOSYS);
    /// No provider matches the request.
    pub const ENODATA: Code = Code(FI_ENODATA);
    /// The operation was cancelled.
    pub const ECANCELED: Code = Code(FI_ECANCELED);

    /// Returns what to do about the code, as the end of a message. Empty if that is not known.
    pub(super) const fn remedy(self) -> &'static str {
        match self.0 {
            libc::EMFILE => "; raise ulimit -n",
            _ => "",
        }
    }

    /// Returns whether the code means a lost connection to a peer.
    pub const fn is_disconnect(self) -> bool {
        matches!(
            self.0,
            libc::ECONNRESET
                | libc::ECONNREFUSED
                | libc::ECONNABORTED
                | libc::ENOTCONN
                | libc::ESHUTDOWN
                | libc::EPIPE
                | libc::ETIMEDOUT
                | libc::EHOSTDOWN
                | libc::EHOSTUNREACH
                | libc::ENETDOWN
                | libc::ENETUNREACH
                | libc::EREMOTEIO
        )
    }

    /// Returns whether an established connection has broken. `ECANCELED` ends a post that was
    /// queued on such a connection.
    pub(crate) const fn is_break(self) -> bool {
        matches!(
            self.0,
            libc::ECONNRESET
                | libc::ECONNABORTED
                | libc::ENOTCONN
                | libc::ESHUTDOWN
                | libc::EPIPE
                | libc::ECANCELED
        )
    }

    #[inline(always)]
    pub(crate) fn check(returned: isize) -> Result<usize, Code> {
        if returned < 0 { Err(Code(returned.wrapping_neg() as i32)) } else { Ok(returned as usize) }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{} ({name})", self.0),
            None => write!(f, "{}", self.0),
        }
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A failed setup call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallError {
    /// The C name of the call.
    pub call: &'static str,
    /// Code that the call returned, or `FI_ENOSYS` if the provider's table lacks the function.
    pub code: Code,
}

impl CallError {
    pub(crate) fn check(call: &'static str, returned: isize) -> Result<usize, CallError> {
        Code::check(returned).map_err(|code| CallError { call, code })
    }

    pub(crate) const fn missing(call: &'static str) -> CallError {
        CallError { call, code: Code::ENOSYS }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with {}", self.call, self.code)
    }
}

impl Error for CallError {}

/// Why libfabric was not loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadError {
    /// The dynamic linker did not find or load the library.
    NotFound {
        /// The requested path or name.
        path: String,
        /// The linker's message.
        reason: String,
    },
    /// The library lacks a function.
    NoSymbol {
        /// The loaded library.
        path: String,
        /// The missing function.
        symbol: &'static str,
    },
    /// The library is too old.
    TooOld {
        /// The loaded library.
        path: String,
        /// The version of the loaded library.
        found: (u32, u32),
        /// The oldest supported version.
        needed: (u32, u32),
    },
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::NotFound { path, reason } => {
                write!(f, "cannot load libfabric {path:?}: {reason}")
            }
            LoadError::NoSymbol { path, symbol } => {
                write!(
                    f,
                    "{path:?} has no function {symbol}: it is not libfabric, or too old; \
                     install libfabric 1.17 or later"
                )
            }
            LoadError::TooOld { path, found, needed } => write!(
                f,
                "libfabric {path:?} has version {}.{}; install {}.{} or later",
                found.0, found.1, needed.0, needed.1
            ),
        }
    }
}

impl Error for LoadError {}
