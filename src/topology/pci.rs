//! PCI addresses, and paths through bridges as in `/sys/devices`.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// A function on a PCI bus, `domain:bus:device.function`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// Domain, also called segment. Some hosts number them beyond 16 bits.
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device.
    pub device: u8,
    /// Function.
    pub function: u8,
}

impl PciAddress {
    /// Returns whether both addresses are functions of one device, such as two ports of one
    /// adapter.
    pub fn same_device(&self, other: &PciAddress) -> bool {
        (self.domain, self.bus, self.device) == (other.domain, other.bus, other.device)
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl FromStr for PciAddress {
    type Err = ();

    /// Parses the kernel's form. Ignores case: CUDA writes upper case.
    fn from_str(text: &str) -> Result<Self, ()> {
        fn hex(text: &str, digits: std::ops::RangeInclusive<usize>) -> Result<u32, ()> {
            if !digits.contains(&text.len()) || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(());
            }
            u32::from_str_radix(text, 16).map_err(|_| ())
        }
        let (rest, function) = text.rsplit_once('.').ok_or(())?;
        let (rest, device) = rest.rsplit_once(':').ok_or(())?;
        let (domain, bus) = rest.rsplit_once(':').ok_or(())?;
        let (device, function) = (hex(device, 2..=2)?, hex(function, 1..=1)?);
        if device > 31 || function > 7 {
            return Err(());
        }
        Ok(PciAddress {
            domain: hex(domain, 4..=8)?,
            bus: hex(bus, 2..=2)? as u8,
            device: device as u8,
            function: function as u8,
        })
    }
}

/// The path from a root complex to a device. Each step except the last is a bridge.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PciPath {
    root: String,
    steps: Vec<PciAddress>,
}

impl PciPath {
    /// Parses a resolved path `/sys/devices/pciDDDD:BB/...`. Ignores the part behind the last PCI
    /// device (`virtio2/net/eth0`). `None` if the path contains no PCI device.
    pub fn parse(resolved: &Path) -> Option<PciPath> {
        let mut parts = resolved.iter().filter_map(|part| part.to_str());
        // On some machines the path has a prefix: `platform/40000000.pcie/pci0000:00`.
        let root = parts.find(|part| part.starts_with("pci") && part.contains(':'))?.to_owned();
        let mut steps = vec![];
        for part in parts {
            match part.parse() {
                Ok(step) => steps.push(step),
                // A host bridge below a bridge (VMD) starts a new domain.
                Err(()) if part.starts_with("pci") && part.contains(':') => {}
                Err(()) => break,
            }
        }
        (!steps.is_empty()).then_some(PciPath { root, steps })
    }

    /// Returns the name of the root complex.
    pub fn root(&self) -> &str {
        &self.root
    }

    /// Returns the address of the device.
    pub fn address(&self) -> PciAddress {
        self.steps[self.steps.len() - 1]
    }

    /// Counts the bridges that are above both devices. Functions of a device that is directly at
    /// the root complex share none.
    pub fn shared_bridges(&self, other: &PciPath) -> usize {
        let bridges = |path: &'_ PciPath| path.steps.len() - 1;
        if self.root != other.root {
            return 0;
        }
        let most = bridges(self).min(bridges(other));
        self.steps.iter().zip(&other.steps).take(most).take_while(|(a, b)| a == b).count()
    }

    pub(super) fn hops(&self, other: &PciPath) -> usize {
        let shared = self.shared_bridges(other);
        (self.steps.len() - 1 - shared) + (other.steps.len() - 1 - shared)
    }
}

impl fmt::Display for PciPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.root)?;
        self.steps.iter().try_for_each(|step| write!(f, "/{step}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse_in_the_kernel_s_and_cuda_s_form() {
        let address: PciAddress = "0000:3B:00.1".parse().unwrap();
        assert_eq!(address.to_string(), "0000:3b:00.1");
        assert!("10000:e1:1f.7".parse::<PciAddress>().is_ok(), "domains beyond 16 bits");
        for wrong in [
            "",
            "pci0000:00",
            "0000:3b:00",
            "3b:00.0",
            "0000:3b:00.8",
            "0000:3b:20.0",
            "0000:+b:00.0",
            "virtio2",
            "0000:3b:00.00",
        ] {
            assert_eq!(wrong.parse::<PciAddress>(), Err(()), "{wrong}");
        }
    }

    fn path(text: &str) -> PciPath {
        PciPath::parse(Path::new(text)).unwrap()
    }

    #[test]
    fn paths_end_at_the_last_pci_device() {
        let nic = path("/sys/devices/pci0000:00/0000:00:03.0/virtio2/net/eth0");
        assert_eq!(
            (nic.root(), nic.address().to_string().as_str()),
            ("pci0000:00", "0000:00:03.0")
        );
        let arm = path("/x/devices/platform/40000000.pcie/pci0001:00/0001:00:00.0/0001:01:00.0");
        assert_eq!(arm.to_string(), "pci0001:00/0001:00:00.0/0001:01:00.0");
        for none in ["/sys/devices/virtual/net/lo", "/sys/devices/pci0000:00", "/", "relative"] {
            assert_eq!(PciPath::parse(Path::new(none)), None, "{none}");
        }
    }

    #[test]
    fn functions_of_one_device_share_only_bridges() {
        let port = |n| path(&format!("/d/pci0000:00/0000:00:01.0/0000:01:00.{n}"));
        assert_eq!(port(0).shared_bridges(&port(1)), 1);
        assert!(port(0).address().same_device(&port(1).address()));
        let at_root = |n| path(&format!("/d/pci0000:00/0000:00:01.{n}"));
        assert_eq!(at_root(0).shared_bridges(&at_root(0)), 0);
        assert_eq!(port(0).hops(&at_root(2)), 1);
    }
}
