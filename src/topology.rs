//! Selects the NICs of a process. Uses the information in `/sys` about NICs, GPUs and the PCIe tree
//! between them.
//!
//! Everything here runs at setup. It reads files and allocates, but starts no threads and keeps
//! nothing open. A missing or malformed file affects only its own information.

mod choose;
mod pairing;
mod pci;
mod scan;
#[cfg(test)]
mod tests;

pub use choose::Anchor;
pub use pairing::{FabricEnd, Mismatch, Pairing, RailEnd, joined};
pub use pci::{PciAddress, PciPath};

/// A NIC: one PCI function, or one interface without hardware behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// The kernel's name for the NIC: the network interface if it has one, else the verbs device.
    pub name: String,
    /// The network interface, as in `/sys/class/net`.
    pub interface: Option<String>,
    /// The verbs device, as in `/sys/class/infiniband`.
    pub verbs: Option<String>,
    /// Place in the PCIe tree. `None` for software interfaces, or if the place is unknown.
    pub path: Option<PciPath>,
    /// The NUMA node of the NIC, if known.
    pub node: Option<u32>,
    /// Speed in megabits per second, if known.
    pub mbit: Option<u32>,
    /// Whether the NIC has a link.
    pub link: LinkState,
}

/// The state of a NIC's link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// The NIC has a link.
    Up,
    /// The NIC has no link, or is switched off.
    Down,
    /// The kernel does not report a state, as for loopback and many virtual interfaces.
    Unknown,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The address on the PCI bus.
    pub address: PciAddress,
    /// Place in the PCIe tree, if known.
    pub path: Option<PciPath>,
    /// The NUMA node of the GPU, if known.
    pub node: Option<u32>,
    /// PCI vendor number: 0x10de NVIDIA, 0x1002 AMD.
    pub vendor: u16,
}

/// The distance between two devices; less is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Distance {
    /// Below one PCIe bridge, so traffic between the devices bypasses the processor.
    Switch,
    /// Below one root complex.
    RootComplex,
    /// On the same NUMA node.
    Node,
    /// Farther apart, or unknown.
    System,
}

impl Distance {
    /// Returns the name of the distance.
    pub fn name(self) -> &'static str {
        match self {
            Distance::Switch => "switch",
            Distance::RootComplex => "root-complex",
            Distance::Node => "node",
            Distance::System => "system",
        }
    }
}

/// The devices of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// NICs, in the order of their PCI addresses; then NICs without an address, by name.
    pub nics: Vec<Nic>,
    /// GPUs, in the order of their PCI addresses.
    pub gpus: Vec<Gpu>,
    /// The parts of the tree that could not be used, each with the reason.
    pub notes: Vec<String>,
}

impl Machine {
    /// Returns the index of the NIC with this network interface, verbs device or name.
    pub fn nic(&self, name: &str) -> Option<usize> {
        let is = |held: &Option<String>| held.as_deref() == Some(name);
        self.nics.iter().position(|nic| nic.name == name || is(&nic.interface) || is(&nic.verbs))
    }
}

fn distance(a: (Option<&PciPath>, Option<u32>), b: (Option<&PciPath>, Option<u32>)) -> Distance {
    if let (Some(a), Some(b)) = (a.0, b.0) {
        if a.shared_bridges(b) > 0 {
            return Distance::Switch;
        }
        if a.root() == b.root() {
            return Distance::RootComplex;
        }
    }
    match (a.1, b.1) {
        (Some(a), Some(b)) if a == b => Distance::Node,
        _ => Distance::System,
    }
}
