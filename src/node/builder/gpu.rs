//! The device of a node: its name as text, and opening it. Opening loads the driver.

use std::fmt;
use std::str::FromStr;

#[cfg(any(feature = "cuda", feature = "hip"))]
use fishplate_gpu::cuda::{Api, CudaConfig, CudaDevice};
use fishplate_gpu::{AnyDevice, DeviceError, HostDevice};
use fishplate_sys::fabric::rail::DeviceMemory;
#[cfg(any(feature = "cuda", feature = "hip"))]
use fishplate_sys::fabric::rail::Interface;

use crate::direct::StandIn;
use crate::topology::Anchor;
#[cfg(any(feature = "cuda", feature = "hip"))]
use crate::topology::PciAddress;

/// The device of a node. Peers can access its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Gpu {
    /// Host memory in place of device memory, for tests and for machines without a GPU.
    StandIn,
    /// The NVIDIA GPU with this ordinal in this process. Opening the node loads the driver.
    #[cfg(feature = "cuda")]
    Cuda(u32),
    /// The AMD GPU with this ordinal in this process. Opening the node loads HIP.
    #[cfg(feature = "hip")]
    Hip(u32),
}

#[cfg(any(feature = "cuda", feature = "hip"))]
impl Gpu {
    fn driver(self) -> Option<(Api, u32)> {
        match self {
            Gpu::StandIn => None,
            #[cfg(feature = "cuda")]
            Gpu::Cuda(ordinal) => Some((Api::Cuda, ordinal)),
            #[cfg(feature = "hip")]
            Gpu::Hip(ordinal) => Some((Api::Hip, ordinal)),
        }
    }
}

impl Gpu {
    pub(super) fn open(self) -> Result<AnyDevice, DeviceError> {
        #[cfg(any(feature = "cuda", feature = "hip"))]
        if let Some((api, ordinal)) = self.driver() {
            let opened = CudaDevice::open(api, ordinal, CudaConfig::default())?;
            return Ok(AnyDevice::Cuda(Box::new(opened)));
        }
        Ok(AnyDevice::Host(HostDevice::new()))
    }

    pub(super) fn anchor(self) -> Anchor {
        #[cfg(any(feature = "cuda", feature = "hip"))]
        if let Some((api, ordinal)) = self.driver() {
            let gpus = api.devices().unwrap_or_default();
            if let Some(gpu) = gpus.iter().find(|gpu| gpu.ordinal == ordinal) {
                let (domain, bus, device) = gpu.pci;
                let (bus, device) = (bus as u8, device as u8);
                return Anchor::Gpu(PciAddress { domain, bus, device, function: 0 });
            }
        }
        Anchor::here()
    }

    pub(super) fn behind_nic(self) -> Result<Box<dyn DeviceMemory>, DeviceError> {
        match self {
            Gpu::StandIn => Ok(Box::new(StandIn)),
            #[cfg(feature = "cuda")]
            Gpu::Cuda(_) => Ok(crate::direct(self.open()?, Interface::Cuda)),
            #[cfg(feature = "hip")]
            Gpu::Hip(_) => Ok(crate::direct(self.open()?, Interface::Rocr)),
        }
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[cfg(any(feature = "cuda", feature = "hip"))]
        if let Some((api, ordinal)) = self.driver() {
            return write!(f, "{api}:{ordinal}");
        }
        f.write_str("stand-in")
    }
}

impl FromStr for Gpu {
    type Err = NoSuchGpu;

    fn from_str(text: &str) -> Result<Gpu, NoSuchGpu> {
        match text.split_once(':') {
            None if text == "stand-in" => Ok(Gpu::StandIn),
            #[cfg(feature = "cuda")]
            Some(("cuda", ordinal)) => ordinal.parse().map(Gpu::Cuda).map_err(|_| NoSuchGpu),
            #[cfg(feature = "hip")]
            Some(("hip", ordinal)) => ordinal.parse().map(Gpu::Hip).map_err(|_| NoSuchGpu),
            _ => Err(NoSuchGpu),
        }
    }
}

/// The error of a text that names no [`Gpu`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoSuchGpu;

impl fmt::Display for NoSuchGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "no such device; use `stand-in`, `cuda:N` (with feature `cuda`) or `hip:N` (with \
             feature `hip`)",
        )
    }
}

impl std::error::Error for NoSuchGpu {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_survive_a_round_trip() {
        #[cfg(feature = "cuda")]
        assert_eq!(Gpu::Cuda(7).to_string().parse(), Ok(Gpu::Cuda(7)));
        #[cfg(feature = "hip")]
        assert_eq!("hip:0".parse(), Ok(Gpu::Hip(0)));
        assert_eq!(Gpu::StandIn.to_string().parse(), Ok(Gpu::StandIn));
        for text in
            ["", "cuda", "cuda:", "cuda:-1", "cuda:4294967296", "cuda:1:2", "stand-in:0", "hip"]
        {
            assert_eq!(text.parse::<Gpu>(), Err(NoSuchGpu), "{text}");
        }
    }
}
