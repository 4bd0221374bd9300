//! The device of the payloads: chosen when a run begins.

#[cfg(feature = "cuda")]
use fishplate_gpu::DeviceError;
#[cfg(feature = "cuda")]
use fishplate_gpu::cuda::{self, CudaConfig, CudaDevice};
use fishplate_gpu::{AnyDevice, HostDevice};

use crate::args::DeviceName;
use crate::failure::{Failure, Outcome};

/// The device that is taken if none is named.
pub fn usual() -> DeviceName {
    #[cfg(feature = "cuda")]
    if cuda::devices().is_ok_and(|devices| !devices.is_empty()) {
        return DeviceName::Cuda(0);
    }
    DeviceName::Host
}

/// Opens a device.
pub fn open(name: DeviceName) -> Outcome<AnyDevice> {
    match name {
        DeviceName::Host => Ok(AnyDevice::Host(HostDevice::new())),
        #[cfg(feature = "cuda")]
        DeviceName::Cuda(ordinal) => match CudaDevice::open(ordinal, CudaConfig::default()) {
            Ok(device) => Ok(AnyDevice::Cuda(Box::new(device))),
            Err(DeviceError::NoDriver) => {
                let why = cuda::devices().map_or_else(|why| why.to_string(), |_| String::new());
                Err(Failure::run(format!("--device {name}: {why}; host needs no driver")))
            }
            Err(error) => Err(Failure::run(format!("--device {name}: {error}"))),
        },
        #[cfg(not(feature = "cuda"))]
        DeviceName::Cuda(_) => {
            Err(Failure::run(format!("--device {name}: this program was built without its feature `cuda`")))
        }
    }
}
