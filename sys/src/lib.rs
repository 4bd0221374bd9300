//! Thin FFI under fishplate, over libc. Each wrapper makes one C call. Nothing here starts a thread
//! or reads the environment, and only [`fabric`] allocates.
//!
//! | module         | wraps | blocks |
//! |----------------|---|---|
//! | [`errno`]      | the error number of a failed call |  |
//! | [`clock`]      | `clock_gettime(2)`: monotonic time, processor time of a thread | no |
//! | [`futex`]      | `futex(2)`, `futex_waitv(2)` | until a deadline |
//! | [`membarrier`] | `membarrier(2)`: a barrier on every processor | for microseconds |
//! | [`affinity`]   | `sched_setaffinity(2)`: which processors a thread may run on | no |
//! | [`fabric`]     | libfabric: its objects, and a rail over them | in its slow paths |
//! | [`host`]       | implements [`Host`](fishplate_core::sync::host::Host) | in its two waits |
//!
//! ```
//! use fishplate_core::sync::host::Host;
//! use fishplate_sys::LinuxHost;
//!
//! let host = LinuxHost::private();
//! let start = host.now_ns();
//! assert!(host.now_ns() >= start);
//! ```

#![no_std]

extern crate alloc;

pub mod affinity;
pub mod clock;
pub mod errno;
pub mod fabric;
pub mod futex;
pub mod host;
pub mod index;
pub mod membarrier;

pub use errno::Errno;
pub use host::LinuxHost;
