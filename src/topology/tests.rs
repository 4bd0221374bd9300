//! Tests with sysfs trees. A few lines describe each tree. The test creates it from files and
//! symbolic links, and then reads it.
//!
//! | line | makes |
//! |---|---|
//! | `pci PATH CLASS VENDOR NODE` | a device below `devices/` and its link in `bus/pci/devices` |
//! | `net PATH NAME MBIT STATE` | an interface of that device; `-` for no device |
//! | `ib PATH NAME RATE STATE` | a verbs device of that device |
//! | `file PATH TEXT`, `link PATH TO` | anything else |

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// A folder, removed when dropped.
struct Tree(PathBuf);

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

static NEXT: AtomicU32 = AtomicU32::new(0);

impl Tree {
    fn new(description: &str) -> Tree {
        // Relaxed: the number only distinguishes folders.
        let name = format!(
            "fishplate-sysfs-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let tree = Tree(std::env::temp_dir().join(name));
        fs::create_dir_all(&tree.0).unwrap();
        for line in description.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let words: Vec<&str> = line.splitn(5, ' ').collect();
            match words[..] {
                ["pci", path, class, vendor, node] => {
                    let device = format!("devices/{path}");
                    tree.file(&format!("{device}/class"), class);
                    tree.file(&format!("{device}/vendor"), vendor);
                    tree.file(&format!("{device}/numa_node"), node);
                    let name = path.rsplit('/').next().unwrap();
                    tree.link(&format!("bus/pci/devices/{name}"), &device);
                }
                ["net", path, name, mbit, state] => {
                    let entry = tree.class(path, "net", name);
                    tree.file(&format!("{entry}/speed"), mbit);
                    tree.file(&format!("{entry}/operstate"), state);
                }
                ["ib", path, name, rate, state] => {
                    let entry = tree.class(path, "infiniband", name);
                    tree.file(&format!("{entry}/ports/1/rate"), &rate.replace('_', " "));
                    tree.file(&format!("{entry}/ports/1/state"), state);
                }
                ["file", path, ..] => tree.file(path, &words[2..].join(" ")),
                ["link", path, to] => tree.link(path, to),
                _ => panic!("{line}"),
            }
        }
        tree
    }

    fn make(&self, path: &str) -> PathBuf {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    fn file(&self, path: &str, text: &str) {
        fs::write(self.make(path), format!("{text}\n")).unwrap();
    }

    fn link(&self, path: &str, to: &str) {
        symlink(self.0.join(to), self.make(path)).unwrap();
    }

    /// Creates an entry of a sysfs class: a folder below its device, a link from the folder to the
    /// device, and a link from the class to the folder.
    fn class(&self, device: &str, class: &str, name: &str) -> String {
        let entry = match device {
            "-" => format!("devices/virtual/{class}/{name}"),
            _ => format!("devices/{device}/{class}/{name}"),
        };
        fs::create_dir_all(self.make(&entry).parent().unwrap().join(name)).unwrap();
        self.link(&format!("class/{class}/{name}"), &entry);
        if device != "-" {
            self.link(&format!("{entry}/device"), &format!("devices/{device}"));
        }
        entry
    }

    fn read(&self) -> Machine {
        Machine::read(&self.0).unwrap()
    }
}

fn read(description: &str) -> Machine {
    Tree::new(description).read()
}

fn gpu(at: &str) -> Anchor {
    Anchor::Gpu(at.parse().unwrap())
}

/// Returns all NICs that have hardware.
fn hardware(machine: &Machine) -> Vec<usize> {
    (0..machine.nics.len()).filter(|&nic| machine.nics[nic].path.is_some()).collect()
}

/// Returns the NICs of each GPU, by name.
fn hands(machine: &Machine, limit: usize) -> BTreeMap<String, Vec<String>> {
    let hand = |gpu: &Gpu| {
        let chosen = machine.choose(&hardware(machine), Anchor::Gpu(gpu.address), limit);
        chosen.into_iter().map(|nic| machine.nics[nic].name.clone()).collect()
    };
    machine.gpus.iter().map(|gpu| (gpu.address.to_string(), hand(gpu))).collect()
}

/// Returns the number of GPUs that use each NIC.
fn load(machine: &Machine, limit: usize) -> BTreeMap<String, usize> {
    let mut load: BTreeMap<String, usize> =
        hardware(machine).into_iter().map(|nic| (machine.nics[nic].name.clone(), 0)).collect();
    hands(machine, limit).into_values().flatten().for_each(|nic| *load.get_mut(&nic).unwrap() += 1);
    load
}

/// Describes two processor sockets with four switches each. Each switch has a GPU and `nics` NICs.
fn switches(nics: usize, verbs: &str, rate: &str) -> String {
    let mut lines = String::new();
    for switch in 0..8 {
        let (root, node) = (0x10 * (1 + switch), switch / 4);
        let below = format!(
            "pci0000:{root:02x}/0000:{root:02x}:01.0/0000:{:02x}:00.0/0000:{:02x}",
            root + 1,
            root + 2
        );
        lines += &format!("pci {below}:00.0/0000:{:02x}:00.0 0x030200 0x10de {node}\n", root + 3);
        for nic in 0..nics {
            let path = format!("{below}:{:02x}.0/0000:{:02x}:00.0", nic + 1, root + 4 + nic);
            lines += &format!("pci {path} 0x020700 0x15b3 {node}\n");
            lines += &format!("ib {path} {verbs}{} {rate} 4:_ACTIVE\n", switch * nics + nic);
        }
    }
    lines
}

#[test]
fn a_gpu_with_a_nic_on_its_switch_gets_that_one() {
    let machine = read(&switches(1, "mlx5_", "400_Gb/sec_(4X_NDR)"));
    assert_eq!((machine.gpus.len(), machine.nics.len()), (8, 8), "{machine:#?}");
    assert!(machine.nics.iter().all(|nic| nic.mbit == Some(400_000) && nic.link == LinkState::Up));
    for (at, (_, nics)) in hands(&machine, 16).into_iter().enumerate() {
        assert_eq!(nics, [format!("mlx5_{at}")]);
    }
}

#[test]
fn thirty_two_nics_give_four_to_each_of_eight_gpus() {
    let machine = read(&switches(4, "rdmap", "100_Gb/sec_(4X_EDR)"));
    let hands = hands(&machine, 16);
    for (at, nics) in hands.values().enumerate() {
        let want: Vec<String> = (0..4).map(|nic| format!("rdmap{}", at * 4 + nic)).collect();
        assert_eq!(*nics, want, "all four, and only near ones");
    }
    assert!(load(&machine, 16).values().all(|&gpus| gpus == 1));
    assert!(
        super::tests::hands(&machine, 2).values().all(|nics| nics.len() == 2),
        "the limit holds"
    );
}

/// As in a DGX H100: each GPU shares a switch with one NIC. Four more ports of two adapters are for
/// storage, two at each socket.
#[test]
fn gpus_of_a_dgx_do_not_use_the_ports_for_storage() {
    let mut tree = switches(1, "mlx5_", "400_Gb/sec_(4X_NDR)");
    for (socket, port) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let root = 0xa0 + 0x10 * socket;
        let path =
            format!("pci0000:{root:02x}/0000:{root:02x}:01.0/0000:{:02x}:00.{port}", root + 1);
        tree += &format!("pci {path} 0x020700 0x15b3 {socket}\n");
        tree += &format!("ib {path} store{} 400_Gb/sec_(4X_NDR) 4:_ACTIVE\n", 2 * socket + port);
    }
    let machine = read(&tree);
    assert_eq!((machine.gpus.len(), machine.nics.len()), (8, 12));
    for (at, (_, nics)) in hands(&machine, 16).into_iter().enumerate() {
        assert_eq!(nics, [format!("mlx5_{at}")]);
    }
}

/// As in a server with eight MI300X: processing accelerators of AMD, each on a switch with a NIC.
#[test]
fn accelerators_of_amd_get_the_nics_on_their_switches() {
    let tree = switches(1, "bnxt_re", "400_Gb/sec_(4X_NDR)");
    let machine = read(&tree.replace("0x030200 0x10de", "0x120000 0x1002"));
    assert!(machine.gpus.iter().all(|gpu| gpu.vendor == 0x1002));
    for (at, (_, nics)) in hands(&machine, 16).into_iter().enumerate() {
        assert_eq!(nics, [format!("bnxt_re{at}")]);
    }
    assert_eq!(load(&machine, 16).len(), 8);
}

/// As in a GH200 with four modules: each GPU and each NIC has a root complex of its own, and a
/// module is a NUMA node.
#[test]
fn gpus_with_root_complexes_of_their_own_get_the_nic_of_their_node() {
    let mut tree = String::new();
    for node in 0..4 {
        let at = 9 + 8 * node;
        tree += &format!(
            "pci pci{at:04x}:00/{at:04x}:00:00.0/{at:04x}:01:00.0 0x030200 0x10de {node}\n"
        );
        let path = format!("pci{node:04x}:00/{node:04x}:00:00.0/{node:04x}:01:00.0");
        tree += &format!("pci {path} 0x020700 0x15b3 {node}\n");
        tree += &format!("ib {path} mlx5_{node} 400_Gb/sec_(4X_NDR) 4:_ACTIVE\n");
    }
    let machine = read(&tree);
    assert_eq!((machine.gpus.len(), machine.nics.len()), (4, 4), "{machine:#?}");
    for (at, (_, nics)) in hands(&machine, 16).into_iter().enumerate() {
        assert_eq!(nics, [format!("mlx5_{at}")]);
    }
}

/// Two GPUs and one NIC on the switch of the first: both use it.
#[test]
fn two_gpus_share_the_only_nic() {
    let machine = read(
        "pci pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0 0x030200 0x10de 0
         pci pci0000:20/0000:20:01.0/0000:21:00.0 0x030200 0x10de 1
         net pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0 a 100000 up",
    );
    let hands = hands(&machine, 16);
    assert!(hands.len() == 2 && hands.values().all(|nics| nics[..] == ["a"]), "{hands:?}");
}

/// Four GPUs and four NICs at one root complex: every NIC is equally near.
const FLAT: &str = "
    pci pci0000:00/0000:00:01.0/0000:01:00.0 0x030200 0x10de 0
    pci pci0000:00/0000:00:02.0/0000:02:00.0 0x030200 0x10de 0
    pci pci0000:00/0000:00:03.0/0000:03:00.0 0x030200 0x10de 0
    pci pci0000:00/0000:00:04.0/0000:04:00.0 0x030200 0x10de 0
    net pci0000:00/0000:00:05.0/0000:05:00.0 a 100000 up
    net pci0000:00/0000:00:06.0/0000:06:00.0 b 100000 up
    net pci0000:00/0000:00:07.0/0000:07:00.0 c 100000 up
    net pci0000:00/0000:00:08.0/0000:08:00.0 d 100000 up";

#[test]
fn equally_near_nics_are_assigned_evenly() {
    let machine = read(FLAT);
    assert!(load(&machine, 16).values().all(|&gpus| gpus == 1), "{:?}", hands(&machine, 16));
    assert_eq!(machine.distance(0, gpu("0000:01:00.0")), Distance::RootComplex);
}

#[test]
fn an_unused_nic_is_preferred_among_equally_near_ones() {
    // The first GPU is nearest to `a`. The second GPU has both NICs at its NUMA node.
    let machine = read(
        "pci pci0000:00/0000:00:01.0/0000:01:00.0 0x030200 0x10de 0
         pci pci0000:40/0000:40:01.0/0000:41:00.0 0x030200 0x10de 0
         net pci0000:00/0000:00:05.0/0000:05:00.0 a 100000 up
         file class/net/b/operstate up
         file class/net/b/speed 100000
         file devices/pci0000:80/0000:80:00.0/0000:81:00.0/numa_node 0
         link class/net/b/device devices/pci0000:80/0000:80:00.0/0000:81:00.0
         file devices/pci0000:00/0000:00:05.0/0000:05:00.0/numa_node 0",
    );
    let hands = hands(&machine, 16);
    assert_eq!(hands["0000:01:00.0"], ["a"], "same root complex");
    assert_eq!(
        hands["0000:41:00.0"],
        ["b"],
        "{hands:?}: both are at its node, and `a` is used already"
    );
}

#[test]
fn balancing_never_chooses_a_more_distant_nic() {
    let machine = read(
        "pci pci0000:00/0000:00:01.0/0000:01:00.0 0x030200 0x10de 0
         pci pci0000:00/0000:00:02.0/0000:02:00.0 0x030200 0x10de 0
         pci pci0000:00/0000:00:03.0/0000:03:00.0 0x030200 0x10de 0
         net pci0000:00/0000:00:05.0/0000:05:00.0 near 100000 up
         file devices/pci0000:00/0000:00:05.0/0000:05:00.0/numa_node 0
         net pci0000:80/0000:80:05.0/0000:85:00.0 far 100000 up
         file devices/pci0000:80/0000:80:05.0/0000:85:00.0/numa_node 1",
    );
    assert_eq!(load(&machine, 16), [("far".into(), 0), ("near".into(), 3)].into());
}

#[test]
fn two_adapters_are_preferred_to_two_ports_of_one() {
    let machine = read(
        "pci pci0000:00/0000:00:01.0/0000:01:00.0 0x030200 0x1002 0
         net pci0000:00/0000:00:05.0/0000:05:00.0 a0 100000 up
         net pci0000:00/0000:00:05.0/0000:05:00.1 a1 100000 up
         net pci0000:00/0000:00:06.0/0000:06:00.0 b0 100000 up",
    );
    assert_eq!(hands(&machine, 2)["0000:01:00.0"], ["a0", "b0"]);
    assert_eq!(hands(&machine, 16)["0000:01:00.0"], ["a0", "b0", "a1"]);
}

#[test]
fn two_sockets_and_one_nic() {
    let machine = read(
        "net pci0000:17/0000:17:00.0/0000:18:00.0 ens1 25000 up
         file devices/pci0000:17/0000:17:00.0/0000:18:00.0/numa_node 1
         net - lo 0 unknown
         net - veth0 10000 up",
    );
    let names: Vec<&str> = machine.nics.iter().map(|nic| nic.name.as_str()).collect();
    assert_eq!(names, ["ens1", "lo", "veth0"], "hardware first");
    assert_eq!(machine.nics[1].mbit, None);
    let distance = |node| machine.distance(0, Anchor::Node(node));
    assert_eq!((distance(1), distance(0)), (Distance::Node, Distance::System));
    assert_eq!(machine.choose(&[0, 1, 2], Anchor::Node(1), 16), [0]);
    assert_eq!(machine.choose(&[0, 1, 2], Anchor::Node(0), 16), [0, 1, 2], "all are equally near");
    assert_eq!(machine.choose(&[2, 1, 1, 9], Anchor::Anywhere, 1), [1]);
}

#[test]
fn one_function_with_interface_and_verbs_is_one_nic() {
    let port = "pci0000:00/0000:00:05.0/0000:05:00.0";
    let machine = read(&format!(
        "net {port} ens5 100000 up\nib {port} mlx5_3 200_Gb/sec_(4X_HDR) 4:_ACTIVE\nib - siw0 ? ?"
    ));
    assert_eq!(machine.nics.len(), 2);
    let nic = &machine.nics[0];
    assert_eq!(
        (nic.name.as_str(), nic.verbs.as_deref(), nic.mbit),
        ("ens5", Some("mlx5_3"), Some(200_000))
    );
    assert_eq!(
        (machine.nic("mlx5_3"), machine.nic("ens5"), machine.nic("siw0")),
        (Some(0), Some(0), Some(1))
    );
    assert_eq!(machine.nic("ens6"), None);
}

#[test]
fn a_machine_without_devices_is_empty_and_a_missing_tree_an_error() {
    let machine = read("");
    assert_eq!(machine, Machine::default());
    assert_eq!(machine.choose(&[0], Anchor::Anywhere, 16), [] as [usize; 0]);
    assert_eq!(machine.choose(&[], gpu("0000:01:00.0"), 16), [] as [usize; 0]);
    assert!(Machine::read(Path::new("/nowhere/at/all")).is_err());
}

#[test]
fn gpus_without_nics_get_none_and_an_unknown_gpu_gets_all() {
    let machine = read("pci pci0000:00/0000:00:01.0/0000:01:00.0 0x030000 0x10de -1");
    assert_eq!(hands(&machine, 16)["0000:01:00.0"], [] as [String; 0]);
    let machine = read(FLAT);
    assert_eq!(machine.choose(&hardware(&machine), gpu("00ff:01:00.0"), 2), [0, 1]);
    assert_eq!(
        machine.choose(&hardware(&machine), gpu("0000:01:00.0"), 0),
        [] as [usize; 0],
        "limit 0"
    );
}

#[test]
fn only_gpus_count_as_gpus() {
    let machine = read(
        "pci pci0000:00/0000:00:01.0 0x030000 0x1a03 0
         pci pci0000:00/0000:00:02.0 0x068000 0x10de 0
         pci pci0000:00/0000:00:03.0 0x120000 0x1002 0
         pci pci0000:00/0000:00:04.0 0x020000 0x10de 0",
    );
    let found: Vec<String> = machine.gpus.iter().map(|gpu| gpu.address.to_string()).collect();
    assert_eq!(found, ["0000:00:03.0"], "no management VGA, no NVSwitch, no NIC");
}

#[test]
fn malformed_files_lose_only_their_own_information() {
    let machine = read(
        "file class/net/bonding_masters bond0
         link class/net/dangling devices/gone
         file class/net/loop/operstate dormant
         link class/net/loop/device class/net/loop/device
         file class/net/loop/speed 4294967295
         file class/net/odd/speed fast
         link class/net/odd/device devices/pci0000:00/not-an-address
         file devices/pci0000:00/not-an-address/numa_node two
         file class/infiniband/x/ports/1/rate -5 Gb/sec
         file bus/pci/devices/garbage/class 0x030200
         file bus/pci/devices/garbage/vendor 0x10de
         file bus/pci/devices/0000:01:00.0/class 0x030200
         file bus/pci/devices/0000:01:00.0/vendor 0x10de
         file bus/pci/devices/0000:02:00.0/class display
         file bus/pci/devices/0000:03:00.0/vendor 0x10de",
    );
    let names: Vec<&str> = machine.nics.iter().map(|nic| nic.name.as_str()).collect();
    assert_eq!(names, ["loop", "odd", "x"], "a dangling link and a plain file are ignored");
    for nic in &machine.nics {
        assert_eq!((&nic.path, nic.node, nic.mbit), (&None, None, None), "{nic:?}");
    }
    assert_eq!(machine.gpus.len(), 1);
    let told = machine.notes.join("\n");
    assert!(["loop", "garbage", "0000:01:00.0"].iter().all(|name| told.contains(name)), "{told}");
    assert_eq!(machine.distance(0, gpu("0000:01:00.0")), Distance::System);
    assert_eq!(machine.distance(99, Anchor::Anywhere), Distance::System);
}

#[test]
fn a_device_has_a_link_if_one_of_its_ports_has() {
    let machine = read(
        "file class/infiniband/mlx4_0/ports/1/state 1: DOWN
         file class/infiniband/mlx4_0/ports/1/rate 10 Gb/sec (4X)
         file class/infiniband/mlx4_0/ports/2/state 4: ACTIVE
         file class/infiniband/mlx4_0/ports/2/rate 56 Gb/sec (4X FDR)
         file class/infiniband/mlx4_1/ports/1/state 1: DOWN
         file class/infiniband/mlx4_1/ports/2/state 1: DOWN
         file class/infiniband/none/node_type 1: CA",
    );
    let links: Vec<_> = machine.nics.iter().map(|nic| (nic.link, nic.mbit)).collect();
    let expected = [(LinkState::Up, Some(56_000)), (LinkState::Down, None)];
    assert_eq!(links, [&expected[..], &[(LinkState::Unknown, None)]].concat());
}

#[test]
fn this_machine_can_be_read() {
    let machine = Machine::here().expect("Linux has /sys");
    for nic in &machine.nics {
        assert!(machine.nic(&nic.name).is_some());
    }
}

/// Checks random machines. Every GPU gets its share of the nearest NICs. No NIC has two or more
/// users more than an equally near NIC.
#[test]
fn assignments_are_balanced_on_random_machines() {
    let mut state = 0x1234_5678_9abc_def1u64;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 8) % below
    };
    for case in 0..300 {
        let mut machine = Machine::default();
        let device = |n: u64, random: &mut dyn FnMut(u64) -> u64| {
            let (root, bridge) = (random(3), random(3));
            let text = format!(
                "/pci0000:{root:02x}/0000:{root:02x}:{bridge:02x}.0/0000:{:02x}:00.0",
                16 + n
            );
            (PciPath::parse(Path::new(&text)).unwrap(), Some((root / 2) as u32))
        };
        for n in 0..1 + random(6) {
            let (path, node) = device(n, &mut random);
            machine.gpus.push(Gpu {
                address: path.address(),
                path: Some(path),
                node,
                vendor: 0x10de,
            });
        }
        for n in 0..1 + random(12) {
            let (path, node) = device(100 + n, &mut random);
            let (name, link) = (format!("n{n}"), LinkState::Up);
            machine.nics.push(Nic {
                name,
                interface: None,
                verbs: None,
                path: Some(path),
                node,
                mbit: None,
                link,
            });
        }
        let share = (machine.nics.len() / machine.gpus.len()).max(1);
        let all = hardware(&machine);
        let hands: Vec<(Anchor, Vec<usize>)> = machine
            .gpus
            .iter()
            .map(|gpu| {
                (Anchor::Gpu(gpu.address), machine.choose(&all, Anchor::Gpu(gpu.address), 16))
            })
            .collect();
        let held = |nic| hands.iter().filter(|(_, hand)| hand.contains(&nic)).count();
        for (gpu, hand) in &hands {
            let nearest = all.iter().map(|&nic| machine.distance(nic, *gpu)).min().unwrap();
            let near = all.iter().filter(|&&nic| machine.distance(nic, *gpu) == nearest).count();
            assert_eq!(hand.len(), share.min(near), "case {case}: {machine:?}");
            for &nic in hand {
                assert_eq!(machine.distance(nic, *gpu), nearest, "case {case}");
                let better = all.iter().find(|&&other| {
                    !hand.contains(&other)
                        && machine.distance(other, *gpu) == nearest
                        && held(other) + 2 <= held(nic)
                });
                assert_eq!(better, None, "case {case}: {hands:?}");
            }
        }
    }
}
