//! The error number of a failed call. It stays raw, because a kernel may return an unknown number.

use core::{error::Error, ffi::c_int, fmt};

/// An `errno` value.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Errno(c_int);

macro_rules! named {
    ($($(#[$meta:meta])* $name:ident),* $(,)?) => {
        impl Errno {
            $($(#[$meta])* pub const $name: Self = Self(libc::$name);)*

            /// Returns the C name, if known.
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $(Self(libc::$name) => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

named! {
    /// Operation not permitted.
    EPERM,
    /// No such file or directory.
    ENOENT,
    /// No such process.
    ESRCH,
    /// Interrupted by a signal.
    EINTR,
    /// Bad file descriptor.
    EBADF,
    /// Try again. For a futex: the word had another value.
    EAGAIN,
    /// Out of memory.
    ENOMEM,
    /// Permission denied.
    EACCES,
    /// Bad address.
    EFAULT,
    /// Device or resource busy.
    EBUSY,
    /// File exists.
    EEXIST,
    /// No such device.
    ENODEV,
    /// Invalid argument.
    EINVAL,
    /// Too many open files in the system.
    ENFILE,
    /// Too many open files in this process.
    EMFILE,
    /// No space left.
    ENOSPC,
    /// Broken pipe.
    EPIPE,
    /// The kernel does not know this call.
    ENOSYS,
    /// Operation not supported.
    EOPNOTSUPP,
    /// Connection reset by the peer.
    ECONNRESET,
    /// Connection refused.
    ECONNREFUSED,
    /// The deadline has expired.
    ETIMEDOUT,
}

impl Errno {
    /// Wraps a raw number.
    pub const fn from_raw(raw: c_int) -> Self {
        Self(raw)
    }

    /// Returns the raw number.
    pub const fn raw(self) -> c_int {
        self.0
    }

    /// Returns the error number of this thread's last failed call.
    #[doc(alias = "errno")]
    pub fn last() -> Self {
        // SAFETY: the pointer leads to this thread's `errno`, which is valid while the thread runs.
        Self(unsafe { *libc::__errno_location() })
    }

    pub(crate) fn check(returned: impl Into<i64>) -> Result<i64, Self> {
        match returned.into() {
            ..0 => Err(Self::last()),
            value => Ok(value),
        }
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "errno {} ({name})", self.0),
            None => write!(f, "errno {}", self.0),
        }
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error for Errno {}
