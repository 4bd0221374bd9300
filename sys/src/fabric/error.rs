//! What libfabric answers when it refuses. Codes are kept raw; the library turns them into words
//! ([`Library::describe`](super::library::Library::describe)). Nothing here allocates but
//! [`LoadError`].

use alloc::string::String;
use core::error::Error;
use core::fmt;

use super::raw::*;

/// An error number of libfabric, positive: an `errno` below 256, libfabric's own from there.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Code(pub i32);

/// The numbers that have names here.
macro_rules! named {
    ($($name:ident = $value:expr),* $(,)?) => {
        impl Code {
            /// The C name, if this is a common one.
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
    EAGAIN = libc::EAGAIN, ENOENT = libc::ENOENT, EIO = libc::EIO, ENOMEM = libc::ENOMEM, EACCES = libc::EACCES,
    EFAULT = libc::EFAULT, EBUSY = libc::EBUSY, ENODEV = libc::ENODEV, EINVAL = libc::EINVAL, ENOSPC = libc::ENOSPC,
    ENOSYS = libc::ENOSYS, ENODATA = libc::ENODATA, EMSGSIZE = libc::EMSGSIZE, EOPNOTSUPP = libc::EOPNOTSUPP,
    EADDRINUSE = libc::EADDRINUSE, EADDRNOTAVAIL = libc::EADDRNOTAVAIL, ENETDOWN = libc::ENETDOWN,
    ENETUNREACH = libc::ENETUNREACH, ECONNABORTED = libc::ECONNABORTED, ECONNRESET = libc::ECONNRESET,
    ENOTCONN = libc::ENOTCONN, ESHUTDOWN = libc::ESHUTDOWN, ETIMEDOUT = libc::ETIMEDOUT, EPIPE = libc::EPIPE,
    ECONNREFUSED = libc::ECONNREFUSED, EHOSTDOWN = libc::EHOSTDOWN, EHOSTUNREACH = libc::EHOSTUNREACH,
    EREMOTEIO = libc::EREMOTEIO, ECANCELED = libc::ECANCELED, EKEYREJECTED = libc::EKEYREJECTED,
    EOTHER = FI_EOTHER, ETOOSMALL = FI_ETOOSMALL, EOPBADSTATE = FI_EOPBADSTATE, EAVAIL = FI_EAVAIL,
    EBADFLAGS = FI_EBADFLAGS, ENOEQ = FI_ENOEQ, EDOMAIN = FI_EDOMAIN, ENOCQ = FI_ENOCQ, ECRC = FI_ECRC,
    ETRUNC = FI_ETRUNC, ENOKEY = FI_ENOKEY, ENOAV = FI_ENOAV, EOVERRUN = FI_EOVERRUN, ENORX = FI_ENORX,
}

impl Code {
    /// Refused for now: make progress and try again.
    pub const EAGAIN: Code = Code(FI_EAGAIN);
    /// An error completion is there to be read.
    pub const EAVAIL: Code = Code(FI_EAVAIL);
    /// Not offered.
    pub const ENOSYS: Code = Code(FI_ENOSYS);
    /// No provider answers to what was asked.
    pub const ENODATA: Code = Code(FI_ENODATA);
    /// Taken back before it happened.
    pub const ECANCELED: Code = Code(FI_ECANCELED);

    /// Whether it says that the way to a peer is gone, and what was on it with it.
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

    /// What a call returned: a count from 0 on, or the negative of a code.
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

/// A call at setup that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallError {
    /// The C name of the call.
    pub call: &'static str,
    /// What it returned, or `FI_ENOSYS` if the provider's table does not have it.
    pub code: Code,
}

impl CallError {
    /// The result of a setup call.
    pub(crate) fn check(call: &'static str, returned: isize) -> Result<usize, CallError> {
        Code::check(returned).map_err(|code| CallError { call, code })
    }

    /// The provider's table has no such entry.
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

/// Why there is no libfabric. Not on any path but setup, so it carries words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadError {
    /// The dynamic linker did not find or not accept the library.
    NotFound {
        /// What was looked for.
        path: String,
        /// What the linker said.
        reason: String,
    },
    /// The library has no such function.
    NoSymbol {
        /// What was loaded.
        path: String,
        /// The function.
        symbol: &'static str,
    },
    /// The library is too old.
    TooOld {
        /// What was loaded.
        path: String,
        /// Its version.
        found: (u32, u32),
        /// The lowest version that will do.
        needed: (u32, u32),
    },
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::NotFound { path, reason } => write!(f, "libfabric: cannot load {path:?}: {reason}"),
            LoadError::NoSymbol { path, symbol } => {
                write!(f, "libfabric: {path:?} has no function {symbol}: not a libfabric, or too old")
            }
            LoadError::TooOld { path, found, needed } => write!(
                f,
                "libfabric: {path:?} is version {}.{}, and {}.{} or later is needed",
                found.0, found.1, needed.0, needed.1
            ),
        }
    }
}

impl Error for LoadError {}
