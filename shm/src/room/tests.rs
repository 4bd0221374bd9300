//! Tests the checks on simulated machines: directories with files like those in `/proc` and `/sys`.

use super::*;

/// A simulated machine: a directory that contains the given files.
struct Machine(PathBuf);

impl Machine {
    fn new(name: &str, files: &[(&str, &str)]) -> Self {
        let root =
            std::env::temp_dir().join(format!("fishplate-room-{}-{name}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Machine(root)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

const MEMINFO: (&str, &str) =
    ("proc/meminfo", "MemTotal:  8388608 kB\nMemAvailable:  4194304 kB\nSwapFree:  1048576 kB\n");

const GIB: u64 = 1 << 30;

#[test]
fn a_machine_has_what_is_available_and_its_swap() {
    let machine = Machine::new("plain", &[MEMINFO]);
    assert_eq!(available(&machine.0), 5 * GIB);
    let unknown = Machine::new("unknown", &[("proc/else", "")]);
    assert_eq!(available(&unknown.0), u64::MAX);
}

#[test]
fn the_tightest_group_of_either_version_counts_and_droppable_pages_are_room() {
    let second = Machine::new(
        "second",
        &[
            MEMINFO,
            ("proc/self/cgroup", "0::/outer/inner\n"),
            ("sys/fs/cgroup/outer/memory.max", "2147483648\n"),
            ("sys/fs/cgroup/outer/memory.current", "1610612736\n"),
            ("sys/fs/cgroup/outer/memory.stat", "anon 1\ninactive_file 536870912\n"),
            ("sys/fs/cgroup/outer/inner/memory.max", "max\n"),
            ("sys/fs/cgroup/outer/inner/memory.current", "1\n"),
        ],
    );
    assert_eq!(available(&second.0), GIB);
    let first = Machine::new(
        "first",
        &[
            MEMINFO,
            ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/somewhere/of/the/host\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "805306368\n"),
            (
                "sys/fs/cgroup/memory/memory.stat",
                "inactive_file 9\ntotal_inactive_file 268435456\n",
            ),
        ],
    );
    assert_eq!(available(&first.0), GIB / 2);
}

#[test]
fn more_than_there_is_names_what_there_is_and_little_is_not_asked_for() {
    let machine = Machine::new("full", &[("proc/meminfo", "MemAvailable: 20480 kB\n")]);
    let there = (20 << 20) - RESERVE;
    assert_eq!(check_within(4 << 20, &machine.0), Ok(()));
    assert_eq!(
        check_within(8 << 20, &machine.0),
        Err(SegmentError::Room { asked: 8 << 20, there })
    );
    let none = Machine::new("none", &[("proc/meminfo", "MemAvailable: 0 kB\n")]);
    assert_eq!(check_within(SMALL - 1, &none.0), Ok(()));
    assert!(check_within(SMALL, &none.0).is_err());
}
