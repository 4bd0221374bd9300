//! Helpers of the tests: the helpers of the shared-memory tests, and rails with host memory as the
//! device.

#![allow(dead_code, unused_imports, reason = "each test binary uses its part")]

#[path = "../../../shm/tests/support/mod.rs"]
mod shm;

use std::os::fd::OwnedFd;
use std::thread;

use fishplate_gpu::{GpuConfig, GpuLink, GpuRail, HostDevice};
use fishplate_shm::{Link, Role, ShmConfig};
use fishplate_sys::LinuxHost;

pub use shm::*;

/// A rail over Linux with host memory as the device.
pub type TestGpuRail = GpuRail<HostDevice, LinuxHost>;

pub fn gpu_rail(config: ShmConfig, gpu: GpuConfig) -> TestGpuRail {
    let (host, config) = linux(config);
    GpuRail::new(HostDevice::new(), host, config, gpu).unwrap()
}

/// Performs the handshake and the agreement of two rails, in two threads.
pub fn meet_gpu(
    near: &TestGpuRail,
    far: &TestGpuRail,
    (ours, theirs): (OwnedFd, OwnedFd),
) -> [GpuLink; 2] {
    let profile = far.profile();
    let other = thread::spawn(move || {
        let link = Link::over(theirs, Role::First, profile.profile(), soon()).unwrap();
        profile.agree(link, soon()).unwrap()
    });
    let profile = near.profile();
    let link = Link::over(ours, Role::Second, profile.profile(), soon()).unwrap();
    [profile.agree(link, soon()).unwrap(), other.join().unwrap()]
}
