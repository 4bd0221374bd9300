//! Checks settings of the kernel, and the hardware that the kernel reports.

use std::path::Path;

use fishplate::topology::{Anchor, Distance, LinkState, Machine};

use super::{Finding, Root};

/// Size of `/dev/shm` in bytes. If it is smaller, other programs and libfabric's provider `shm` may
/// run out of shared memory.
const SHM_LEAST: u64 = 256 << 20;

/// The kernel's names for the initial pid namespace and the initial user namespace.
const FIRST_PID: &str = "pid:[4026531836]";
const FIRST_USER: &str = "user:[4026531837]";

const NVIDIA: u16 = 0x10de;
const AMD: u16 = 0x1002;

pub(super) fn check(root: &Root) -> Vec<Finding> {
    let mut all = vec![yama(root), shm(root), numa(root), governor(root), container(root)];
    match Machine::read(&root.path("sys")) {
        Ok(machine) => all.extend([nics(&machine), gpus(root, &machine)]),
        Err(error) => all.push(Finding::warn(
            "nics",
            format!("cannot read sys/: {error}; rails are chosen without distances"),
            "mount sysfs at /sys",
        )),
    }
    all
}

fn yama(root: &Root) -> Finding {
    match root.line("proc/sys/kernel/yama/ptrace_scope").as_deref() {
        None | Some("0") => {
            Finding::pass("ptrace", "the kernel copies between processes of one user")
        }
        Some(scope) => Finding::warn(
            "ptrace",
            format!("yama's ptrace_scope is {scope}: peers on this host copy long messages twice"),
            "sysctl kernel.yama.ptrace_scope=0",
        ),
    }
}

fn shm(root: &Root) -> Finding {
    let path = root.path("dev/shm");
    let room = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).ok().and_then(|name| {
        let mut told = std::mem::MaybeUninit::<libc::statvfs>::uninit();
        // SAFETY: `name` is a C string. `told` is writable for the answer, and is read only if the
        // call succeeds.
        unsafe {
            (libc::statvfs(name.as_ptr(), told.as_mut_ptr()) == 0).then(|| told.assume_init())
        }
    });
    let remedy = "mount -o remount,size=8G /dev/shm, or --shm-size for the container";
    match room.map(|room| room.f_bavail * room.f_frsize) {
        None => Finding::warn(
            "dev/shm",
            "there is no /dev/shm; libfabric's shm and UCX need it",
            "mkdir -p /dev/shm && mount -t tmpfs tmpfs /dev/shm",
        ),
        Some(free) if free < SHM_LEAST => Finding::warn(
            "dev/shm",
            format!("{} MiB are free in /dev/shm; libfabric's shm and UCX need more", free >> 20),
            remedy,
        ),
        Some(free) => Finding::pass("dev/shm", format!("{} MiB are free in /dev/shm", free >> 20)),
    }
}

fn numa(root: &Root) -> Finding {
    let nodes: Vec<String> = root
        .names("sys/devices/system/node")
        .into_iter()
        .filter(|name| is_numbered(name, "node"))
        .collect();
    let found = format!("NUMA nodes: {}", nodes.len().max(1));
    if nodes.len() < 2 {
        return Finding::pass("numa", found);
    }
    match root.line("proc/sys/kernel/numa_balancing").as_deref() {
        None | Some("0") => Finding::pass("numa", found),
        Some(_) => Finding::warn(
            "numa",
            found + ", and the kernel moves pages between them: registered memory stalls meanwhile",
            "sysctl kernel.numa_balancing=0, and bind processes: numactl --cpunodebind=N \
             --membind=N",
        ),
    }
}

fn is_numbered(name: &str, kind: &str) -> bool {
    name.strip_prefix(kind)
        .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
}

fn governor(root: &Root) -> Finding {
    let cpus = Path::new("sys/devices/system/cpu");
    let mut slow: Vec<(String, String)> = vec![];
    let mut told = 0;
    for name in root.names(cpus).into_iter().filter(|name| is_numbered(name, "cpu")) {
        if let Some(governor) = root.line(cpus.join(&name).join("cpufreq/scaling_governor")) {
            told += 1;
            if governor != "performance" {
                slow.push((name, governor));
            }
        }
    }
    match slow.first() {
        None if told == 0 => {
            Finding::pass("governor", "the kernel does not control the clocks of the processors")
        }
        None => Finding::pass("governor", "all processors are set to performance"),
        Some((name, governor)) => Finding::warn(
            "governor",
            format!(
                "{} of {told} processors are not set to performance ({name}: {governor}): latency \
                 varies",
                slow.len()
            ),
            "cpupower frequency-set -g performance",
        ),
    }
}

fn container(root: &Root) -> Finding {
    let space = |kind: &str| {
        let link = std::fs::read_link(root.path("proc/self/ns").join(kind)).ok()?;
        Some(link.to_string_lossy().into_owned())
    };
    let mut own = vec![];
    if space("pid").is_some_and(|space| space != FIRST_PID) {
        own.push("pid");
    }
    if space("user").is_some_and(|space| space != FIRST_USER) {
        own.push("user");
    }
    // The host's network namespace has no fixed number, so this compares with the namespace of
    // process 1. In a container with its own pid namespace, process 1 belongs to the container, so
    // this finds no difference.
    if let (Some(ours), Ok(first)) = (space("net"), std::fs::read_link(root.path("proc/1/ns/net")))
        && first.as_os_str() != ours.as_str()
    {
        own.push("net");
    }
    if own.is_empty() {
        return Finding::pass("namespaces", "those of the host");
    }
    Finding::warn(
        "namespaces",
        format!(
            "namespaces of its own: {}. Peers in other network namespaces count as other hosts; \
             with other pid or user namespaces the kernel copies nothing between them",
            own.join(", ")
        ),
        "start the job's processes in one container, or with --net=host --pid=host",
    )
}

fn nics(machine: &Machine) -> Finding {
    let real: Vec<_> = machine.nics.iter().filter(|nic| nic.path.is_some()).collect();
    let down: Vec<&str> = real
        .iter()
        .filter(|nic| nic.link == LinkState::Down)
        .map(|nic| nic.name.as_str())
        .collect();
    match (real.len(), down.is_empty()) {
        (0, _) => Finding::pass("nics", "no NIC on the PCI bus; only software interfaces"),
        (count, true) => Finding::pass("nics", format!("NICs: {count}, each with a link")),
        (count, false) => Finding::warn(
            "nics",
            format!("NICs without a link: {} of {count}: {}", down.len(), down.join(", ")),
            "ip link set NAME up; check the cable and the switch",
        ),
    }
}

fn gpus(root: &Root, machine: &Machine) -> Finding {
    if machine.gpus.is_empty() {
        return Finding::pass("gpus", "none");
    }
    let verbs = machine.nics.iter().any(|nic| nic.verbs.is_some());
    let made_by = |vendor| machine.gpus.iter().any(|gpu| gpu.vendor == vendor);
    if made_by(AMD) && !root.path("dev/kfd").exists() {
        return Finding::warn(
            "gpus",
            "there is no /dev/kfd: HIP finds no device",
            "modprobe amdgpu, or --device /dev/kfd --device /dev/dri for the container",
        );
    }
    let modules =
        ["nvidia_peermem", "nv_peer_mem"].map(|name| root.path("sys/module").join(name).exists());
    if made_by(NVIDIA) && verbs && modules == [false; 2] {
        return Finding::warn(
            "gpus",
            "nvidia_peermem is not loaded: NICs register a GPU's memory by dmabuf alone",
            "modprobe nvidia_peermem, or use a driver and a kernel with dmabuf",
        );
    }
    let far: Vec<String> = machine
        .gpus
        .iter()
        .filter(|gpu| {
            let distance = |nic| machine.distance(nic, Anchor::Gpu(gpu.address));
            let real = (0..machine.nics.len()).filter(|&nic| machine.nics[nic].path.is_some());
            real.map(distance).min().is_some_and(|nearest| nearest > Distance::RootComplex)
        })
        .map(|gpu| gpu.address.to_string())
        .collect();
    match far.is_empty() {
        true => Finding::pass(
            "gpus",
            match machine.nics.is_empty() {
                true => format!("GPUs: {}; there is no NIC", machine.gpus.len()),
                false => {
                    format!("GPUs: {}, each with a NIC at its root complex", machine.gpus.len())
                }
            },
        ),
        false => Finding::warn(
            "gpus",
            format!(
                "no NIC at the root complex of {}: its traffic crosses the processors",
                far.join(", ")
            ),
            "use the NIC of that NUMA node, or another slot; in a virtual machine pass the PCIe \
             switch through",
        ),
    }
}
