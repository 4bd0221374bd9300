//! Reads a machine from a sysfs tree.
//!
//! | what           | where                                                                       |
//! |----------------|-----------------------------------------------------------------------------|
//! | interfaces     | `class/net/*`: `device`, `speed`, `operstate`                               |
//! | verbs devices  | `class/infiniband/*`: `device`, `ports/*/rate`, `ports/*/state`             |
//! | GPUs           | `bus/pci/devices/*`: `class`, `vendor`                                      |
//! | all of these   | `numa_node` of the PCI device                                               |

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::pci::{PciAddress, PciPath};
use super::{Gpu, LinkState, Machine, Nic};

const NVIDIA: u16 = 0x10de;
const AMD: u16 = 0x1002;

const VALUE_MAX: u64 = 4096;

impl Machine {
    /// Reads the machine that this process runs on.
    ///
    /// # Errors
    /// The same as [`read`](Self::read).
    pub fn here() -> io::Result<Machine> {
        Self::read(Path::new("/sys"))
    }

    /// Reads the tree below `root`. Follows symbolic links, even out of the tree.
    ///
    /// # Errors
    /// Fails only if `root` is not a readable directory. [`notes`](Machine::notes) lists other
    /// files that could not be read.
    pub fn read(root: &Path) -> io::Result<Machine> {
        fs::read_dir(root)?;
        let mut machine = Machine::default();
        machine.read_interfaces(&root.join("class/net"));
        machine.read_verbs(&root.join("class/infiniband"));
        machine.read_gpus(&root.join("bus/pci/devices"));
        let key = |path: &Option<PciPath>| path.as_ref().map(PciPath::address);
        // Puts NICs without an address last, although `None` sorts first.
        machine.nics.sort_by(|a, b| {
            let (x, y) = (key(&a.path), key(&b.path));
            x.is_none().cmp(&y.is_none()).then(x.cmp(&y)).then_with(|| a.name.cmp(&b.name))
        });
        machine.gpus.sort_by_key(|gpu| gpu.address);
        Ok(machine)
    }

    fn read_interfaces(&mut self, class: &Path) {
        for (name, entry) in entries(class) {
            let (path, node) = self.place(&name, &entry);
            // Loopback and some virtual interfaces report -1, which old kernels print without its
            // sign. While a link is down, its speed cannot be read.
            let mbit = value(&entry.join("speed"))
                .and_then(|text| text.parse().ok())
                .filter(|&mbit| mbit > 0 && mbit != u32::MAX);
            let link = match value(&entry.join("operstate")).as_deref() {
                Some("up") => LinkState::Up,
                Some("unknown") | None => LinkState::Unknown,
                Some(_) => LinkState::Down,
            };
            let interface = Some(name.clone());
            self.nics.push(Nic { name, interface, verbs: None, path, node, mbit, link });
        }
    }

    fn read_verbs(&mut self, class: &Path) {
        for (name, entry) in entries(class) {
            let (path, node) = self.place(&name, &entry);
            // A device with several ports has a link if one of them has.
            let ports = entries(&entry.join("ports")).into_iter().map(|(_, port)| {
                let mbit = value(&port.join("rate")).and_then(|text| verbs_mbit(&text));
                match value(&port.join("state")).as_deref().map(|text| text.contains("ACTIVE")) {
                    Some(true) => (LinkState::Up, mbit),
                    Some(false) => (LinkState::Down, mbit),
                    None => (LinkState::Unknown, mbit),
                }
            });
            let order = |port: &(LinkState, Option<u32>)| match port.0 {
                LinkState::Up => 0,
                LinkState::Unknown => 1,
                LinkState::Down => 2,
            };
            let (link, mbit) = ports.min_by_key(order).unwrap_or((LinkState::Unknown, None));
            // A network interface of the same function is the same NIC.
            let same = self
                .nics
                .iter_mut()
                .find(|nic| path.is_some() && nic.path == path && nic.verbs.is_none());
            match same {
                Some(nic) => {
                    nic.verbs = Some(name);
                    nic.mbit = mbit.or(nic.mbit);
                    nic.link = if link == LinkState::Unknown { nic.link } else { link };
                }
                None => {
                    let verbs = Some(name.clone());
                    self.nics.push(Nic { name, interface: None, verbs, path, node, mbit, link });
                }
            }
        }
    }

    fn read_gpus(&mut self, devices: &Path) {
        for (name, entry) in entries(devices) {
            let hex = |file| value(&entry.join(file)).and_then(|text| hex(&text));
            let (Some(class), Some(vendor)) = (hex("class"), hex("vendor")) else {
                continue;
            };
            // VGA and 3D controllers; AMD's accelerators are display controllers or processing
            // accelerators.
            let is_gpu = matches!(
                (vendor as u16, class >> 8),
                (NVIDIA, 0x0300 | 0x0302) | (AMD, 0x0300 | 0x0302 | 0x0380 | 0x1200)
            );
            if !is_gpu {
                continue;
            }
            let Ok(address) = name.parse::<PciAddress>() else {
                self.notes.push(format!("{name}: ignored a GPU whose name is not a PCI address"));
                continue;
            };
            let resolved = fs::canonicalize(&entry).ok();
            let path = resolved.as_deref().and_then(PciPath::parse);
            if path.is_none() {
                self.notes.push(format!("{name}: cannot resolve the PCI path of this GPU"));
            }
            self.gpus.push(Gpu { address, path, node: node(&entry), vendor: vendor as u16 });
        }
    }

    fn place(&mut self, name: &str, entry: &Path) -> (Option<PciPath>, Option<u32>) {
        let device = entry.join("device");
        if fs::symlink_metadata(&device).is_err() {
            return (None, None);
        }
        match fs::canonicalize(&device) {
            Ok(resolved) => {
                let path = PciPath::parse(&resolved);
                // The node is a property of the PCI device;
                // `device` may name something below it (virtio).
                let of_device = resolved.ancestors().find(|at| {
                    at.file_name()
                        .and_then(OsStr::to_str)
                        .is_some_and(|n| n.parse::<PciAddress>().is_ok())
                });
                (path, of_device.and_then(node))
            }
            Err(error) => {
                self.notes.push(format!("{name}: cannot resolve its device: {error}"));
                (None, None)
            }
        }
    }
}

fn entries(folder: &Path) -> Vec<(String, PathBuf)> {
    let Ok(listing) = fs::read_dir(folder) else {
        return vec![];
    };
    let mut found: Vec<_> = listing
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            // `bonding_masters` is a file among the interfaces.
            path.is_dir().then_some((path.file_name()?.to_str()?.to_owned(), path))
        })
        .collect();
    found.sort();
    found
}

fn value(file: &Path) -> Option<String> {
    use std::io::Read;
    let mut text = String::new();
    fs::File::open(file).ok()?.take(VALUE_MAX).read_to_string(&mut text).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

fn hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// Reads the NUMA node. Returns `None` if the kernel reports -1, as on most machines with a single
/// node.
fn node(device: &Path) -> Option<u32> {
    value(&device.join("numa_node"))?.parse().ok()
}

/// Parses a rate such as `400 Gb/sec (4X NDR)` or `2.5 Gb/sec (1X SDR)`.
fn verbs_mbit(text: &str) -> Option<u32> {
    let gbit: f64 = text.split_whitespace().next()?.parse().ok()?;
    (text.contains("Gb/sec") && gbit > 0.0 && gbit < 1e6).then_some((gbit * 1000.0) as u32)
}
