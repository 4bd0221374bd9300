//! Tests that `fishplate doctor` reports each fault of a machine, with a remedy. Limits,
//! namespaces, mounts and variables are real. Files in a folder stand for settings of other kernels
//! and for hardware.

mod command;

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use command::text;
use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_fishplate");

/// A tree of files that describes a machine without a fault. Each test changes its tree.
struct Tree(PathBuf);

impl Tree {
    fn new(name: &str) -> Tree {
        let root =
            std::env::temp_dir().join(format!("fishplate-doctor-{name}-{}", std::process::id()));
        fs::create_dir_all(root.join("dev/shm")).unwrap();
        let tree = Tree(root);
        tree.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n");
        tree.write("sys/devices/system/cpu/cpufreq/policy0", "");
        tree.write("sys/devices/system/node/node0/cpulist", "0-3\n");
        tree.write("proc/sys/kernel/yama/ptrace_scope", "0\n");
        tree.write("proc/sys/kernel/numa_balancing", "1\n");
        for (space, of) in [("pid", "self"), ("user", "self"), ("net", "self"), ("net", "1")] {
            let number = if space == "pid" { 4026531836u32 } else { 4026531837 };
            tree.link(&format!("proc/{of}/ns/{space}"), format!("{space}:[{number}]"));
        }
        tree
    }

    fn write(&self, path: &str, content: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn link(&self, path: &str, to: impl AsRef<Path>) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(to, path).unwrap();
    }

    /// Adds a PCI device, and its interface or verbs device.
    fn device(&self, slot: &str, class: &str, vendor: &str) -> String {
        let device = format!("sys/devices/pci{}/{slot}", &slot[..7]);
        self.write(&format!("{device}/class"), class);
        self.write(&format!("{device}/vendor"), vendor);
        self.write(&format!("{device}/numa_node"), "0\n");
        self.link(&format!("sys/bus/pci/devices/{slot}"), self.0.join(&device));
        device
    }

    fn nic(&self, name: &str, slot: &str, state: &str) {
        let device = self.device(slot, "0x020000\n", "0x15b3\n");
        self.write(&format!("{device}/net/{name}/operstate"), state);
        self.link(&format!("{device}/net/{name}/device"), self.0.join(&device));
        self.link(&format!("sys/class/net/{name}"), self.0.join(format!("{device}/net/{name}")));
    }

    fn examined(&self) -> Output {
        Command::new(PROGRAM).args(["doctor", "--json", "--root"]).arg(&self.0).output().unwrap()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns the output of a shell command that ends with the doctor.
fn shell(line: &str) -> Output {
    Command::new("sh").args(["-c", &format!("{line} {PROGRAM} doctor --json")]).output().unwrap()
}

/// Returns the finding of one check: its level, and its text followed by the remedy.
fn finding(output: &Output, check: &str) -> (String, String) {
    let said: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}{}", text(&output.stdout), text(&output.stderr)));
    let levels: Vec<&str> = said["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["level"].as_str().unwrap())
        .collect();
    let (worst, code) = match levels {
        levels if levels.contains(&"FAIL") => ("FAIL", 1),
        levels if levels.contains(&"WARN") => ("WARN", 3),
        _ => ("PASS", 0),
    };
    assert_eq!((said["level"].as_str(), output.status.code()), (Some(worst), Some(code)));
    let one =
        said["findings"].as_array().unwrap().iter().find(|one| one["check"] == check).expect(check);
    for one in said["findings"].as_array().unwrap() {
        assert_eq!(one["level"] == "PASS", one["remedy"] == "", "{one}: a fault has a remedy");
    }
    let word = |name: &str| one[name].as_str().unwrap().to_owned();
    (word("level"), format!("{} -> {}", word("found"), word("remedy")))
}

fn says(output: &Output, check: &str, level: &str, texts: &[&str]) {
    let (found, said) = finding(output, check);
    assert_eq!(found, level, "{check}: {said}");
    for text in texts {
        assert!(said.contains(text), "{check}: {text:?} is not in {said:?}");
    }
}

#[test]
fn limits_of_the_process() {
    says(&shell("ulimit -l 64;"), "memlock", "WARN", &["64 KiB", "memlock"]);
    says(&shell("ulimit -S -l 64;"), "memlock", "WARN", &["64 KiB"]);
    says(
        &shell("ulimit -v 3000000;"),
        "addresses",
        "WARN",
        &["3000000 KiB", "ulimit -v unlimited"],
    );
    says(&shell("ulimit -S -n 1000;"), "descriptors", "WARN", &["1000", "ulimit -n"]);
    says(&shell("ulimit -n 100;"), "descriptors", "FAIL", &["100", "nofile"]);
    // Uses a processor that this process may use, because a container may offer any processor
    // number.
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let allowed =
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
    let pinned =
        format!("taskset -c {}", &allowed[..allowed.find([',', '-']).unwrap_or(allowed.len())]);
    match Command::new("sh").args(["-c", &format!("{pinned} true")]).output() {
        Ok(output) if output.status.success() => {
            says(&shell(&pinned), "processors", "WARN", &["take turns", "taskset"]);
        }
        why => println!("SKIPPED one processor for several threads: {pinned}: {why:?}"),
    }
}

#[test]
fn libfabric_and_launchers() {
    let no_library = shell("FISHPLATE_LIBFABRIC=/nowhere/libfabric.so");
    says(&no_library, "libfabric", "WARN", &["/nowhere/libfabric.so", "apt install libfabric1"]);
    let no_provider = shell("FI_PROVIDER=nonesuch");
    let there = finding(&shell(""), "libfabric").1.contains(':')
        && finding(&shell(""), "libfabric").0 == "PASS";
    match there {
        true => says(
            &no_provider,
            "libfabric",
            "WARN",
            &["no provider for other hosts", "unset FI_PROVIDER"],
        ),
        false => println!("SKIPPED a libfabric without providers: there is no libfabric"),
    }
    says(&shell("FISHPLATE_WINDOW=many"), "libfabric", "FAIL", &["FISHPLATE_WINDOW"]);
    says(
        &shell("WORLD_SIZE=4 RANK=1"),
        "job",
        "FAIL",
        &["4 processes", "set FISHPLATE_RENDEZVOUS"],
    );
    says(&shell("FISHPLATE_RENDEZVOUS=tcp://h:1"), "job", "FAIL", &["set FISHPLATE_SIZE"]);
    let four = shell("FISHPLATE_RENDEZVOUS=tcp://h:1 FISHPLATE_SIZE=4");
    says(&four, "job", "PASS", &["a job of 4, at h:1"]);
    // Variables of another launcher do not matter.
    let (socket, _launcher) = UnixStream::pair().unwrap();
    let by_pmi = Command::new(PROGRAM)
        .args(["doctor", "--json"])
        .envs([("PMI_FD", "0"), ("PMI_RANK", "2"), ("PMI_SIZE", "4")])
        .envs([("RANK", "0"), ("WORLD_SIZE", "1")])
        .stdin(OwnedFd::from(socket))
        .output()
        .unwrap();
    says(&by_pmi, "job", "PASS", &["rank 2 of 4, by PMI-1"]);
    let stale = shell("</dev/null PMI_FD=0 PMI_RANK=2 PMI_SIZE=4");
    says(&stale, "job", "FAIL", &["PMI_FD is unusable", "unset PMI_FD"]);
    says(&shell(""), "job", "PASS", &["alone"]);
}

#[test]
fn namespaces_and_mounts() {
    let unshare = Command::new("unshare").args(["-n", "-m", "true"]).output();
    if !unshare.is_ok_and(|output| output.status.success()) {
        println!("SKIPPED real namespaces: unshare is not permitted");
        return;
    }
    match fs::read_link("/proc/1/ns/net") {
        Ok(_) => says(&shell("unshare -n"), "namespaces", "WARN", &["net", "--net=host"]),
        Err(error) => println!("SKIPPED a real network namespace: /proc/1/ns/net: {error}"),
    }
    says(&shell("unshare --fork --pid"), "namespaces", "WARN", &["pid", "--pid=host"]);
    let small = "unshare -m sh -c 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec \"$@\"' sh";
    says(&shell(small), "dev/shm", "WARN", &["8 MiB", "remount,size"]);
}

#[test]
fn settings_of_the_kernel() {
    let tree = Tree::new("kernel");
    for check in ["ptrace", "governor", "numa", "namespaces", "nics", "gpus"] {
        says(&tree.examined(), check, "PASS", &[]);
    }
    tree.write("proc/sys/kernel/yama/ptrace_scope", "1\n");
    tree.write("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave\n");
    tree.write("sys/devices/system/node/node1/cpulist", "4-7\n");
    let output = tree.examined();
    says(&output, "ptrace", "WARN", &["ptrace_scope is 1", "sysctl kernel.yama.ptrace_scope=0"]);
    says(&output, "governor", "WARN", &["1 of 2", "cpu1: powersave", "cpupower"]);
    says(&output, "numa", "WARN", &["NUMA nodes: 2", "numa_balancing=0"]);
    tree.write("proc/sys/kernel/numa_balancing", "0\n");
    says(&tree.examined(), "numa", "PASS", &["NUMA nodes: 2"]);
    fs::remove_file(tree.0.join("proc/self/ns/net")).unwrap();
    tree.link("proc/self/ns/net", "net:[4026532177]");
    says(&tree.examined(), "namespaces", "WARN", &["net", "--net=host"]);
    fs::remove_dir(tree.0.join("dev/shm")).unwrap();
    says(&tree.examined(), "dev/shm", "WARN", &["no /dev/shm"]);
}

#[test]
fn nics_and_gpus() {
    let tree = Tree::new("devices");
    tree.nic("eth0", "0000:01:00.0", "up\n");
    tree.device("0000:02:00.0", "0x030200\n", "0x10de\n");
    let output = tree.examined();
    says(&output, "nics", "PASS", &["NICs: 1"]);
    // The GPU and the only NIC have different root complexes.
    says(&output, "gpus", "WARN", &["0000:02:00.0", "root complex"]);
    tree.nic("eth1", "0000:03:00.0", "down\n");
    says(&tree.examined(), "nics", "WARN", &["1 of 2", "eth1", "ip link set"]);
    let verbs = tree.0.join("sys/devices/pci0000:01/0000:01:00.0");
    tree.write(
        "sys/devices/pci0000:01/0000:01:00.0/infiniband/mlx5_0/ports/1/state",
        "4: ACTIVE\n",
    );
    tree.link("sys/devices/pci0000:01/0000:01:00.0/infiniband/mlx5_0/device", &verbs);
    tree.link("sys/class/infiniband/mlx5_0", verbs.join("infiniband/mlx5_0"));
    says(&tree.examined(), "gpus", "WARN", &["nvidia_peermem is not loaded", "modprobe"]);
    tree.write("sys/module/nvidia_peermem/refcnt", "0\n");
    says(&tree.examined(), "gpus", "WARN", &["root complex"]);
    tree.device("0000:04:00.0", "0x120000\n", "0x1002\n");
    says(&tree.examined(), "gpus", "WARN", &["no /dev/kfd", "modprobe amdgpu"]);
    tree.write("dev/kfd", "");
    says(&tree.examined(), "gpus", "WARN", &["root complex"]);
}

#[test]
fn people_get_a_line_for_each_check() {
    let output = Command::new("sh")
        .args(["-c", &format!("ulimit -n 100; {PROGRAM} doctor")])
        .output()
        .unwrap();
    let said = text(&output.stdout);
    assert!(said.lines().any(|line| line.starts_with("FAIL  descriptors")), "{said}");
    assert!(said.lines().any(|line| line.trim_start().starts_with("-> ")), "{said}");
    assert_eq!(output.status.code(), Some(1));
}
