//! Tests runs under limits of the process, the machine and its control groups. A run ends with an
//! exit code and a remedy, never by a signal.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

mod command;
use command::{run, text};

/// Runs a command line in a shell with limits.
fn limited(limit: &str, line: &str) -> Output {
    let script = format!("{limit}; exec {} {line}", env!("CARGO_BIN_EXE_fishplate"));
    Command::new("sh").args(["-c", &script]).stdin(Stdio::null()).output().expect("a shell starts")
}

/// Checks that the run exited by itself, either successfully or with an error that contains one of
/// `says`. Returns whether it succeeded.
fn ended(what: &str, output: &Output, says: &[&str]) -> bool {
    let told = text(&output.stderr);
    match output.status.code() {
        Some(0) => true,
        Some(1 | 2) => {
            assert!(says.iter().any(|part| told.contains(part)), "{what}: {told}");
            assert!(!told.contains("panicked"), "{what}: {told}");
            false
        }
        _ => panic!("{what}: {:?}: {told}", output.status),
    }
}

#[test]
fn without_addresses_there_is_a_remedy() {
    for line in [
        "perf put-signal -n 100 -w 10",
        "perf put-signal -n 100 -w 10 --mode worker",
        "perf tag --transport loopback -n 100 -w 10",
    ] {
        let (mut refused, mut went_well) = (0, 0);
        // Limits in KiB. With the lowest limits, the libraries do not fit. With the highest limit,
        // everything fits.
        for limit in [14, 18, 24, 40, 100, 150, 250, 270, 280, 290, 640].map(|mib| mib << 10) {
            let set = format!("ulimit -v {limit}");
            if limited(&set, "--version").status.success() {
                let well = ended(&format!("{set}; {line}"), &limited(&set, line), &["ulimit -v"]);
                went_well += u32::from(well);
                refused += u32::from(!well);
            }
        }
        assert!(
            (refused > 0 || line.contains("loopback")) && went_well > 0,
            "{line}: {refused} refused, {went_well} went well"
        );
    }
}

#[test]
fn without_room_for_files_there_is_a_remedy() {
    for blocks in [0, 1, 100, 60_000] {
        let set = format!("ulimit -f {blocks}");
        let output = limited(&set, "perf put-signal -n 100 -w 10");
        assert!(!ended(&set, &output, &["ulimit -f"]), "{set}");
    }
    assert!(ended("enough", &limited("ulimit -f 1000000", "perf put-signal -n 100 -w 10"), &[]));
    // The limit also applies to a file of results.
    let file =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("limited-{}", std::process::id()));
    let line = format!("perf put --transport loopback -n 100 >{}", file.display());
    assert!(!ended(
        "results",
        &limited("ulimit -f 0", &line),
        &["cannot write results: File too large"]
    ));
    fs::remove_file(file).unwrap();
}

#[test]
fn an_unwritable_standard_error_does_not_change_the_exit_status() {
    let waits = format!("perf put-signal --listen @unwritable-{} --timeout 1s", std::process::id());
    for (line, status) in [
        ("perf put-signal -b 0", 2),
        ("stat 1", 2),
        ("perf put-signal -n 100 -w 10 >/dev/full", 1),
        ("perf put --transport loopback -n 100 --format csv", 0),
        (&waits, 1),
    ] {
        let output = limited("true", &format!("{line} 2>/dev/full"));
        assert_eq!(output.status.code(), Some(status), "{line}: {:?}", output.status);
    }
}

#[test]
fn a_small_stack_is_enough() {
    for line in [
        "perf put-signal -n 100 -w 10",
        "perf put-signal -n 100 -w 10 --mode worker",
        "perf put-signal --transport sim --rails 4 --seeds 2",
        "perf pool -n 100 --streams 2",
        "perf match --help",
        "perf --help",
        "info",
    ] {
        let output = limited("ulimit -s 64", line);
        assert!(ended(line, &output, &[]), "{line}: {}", text(&output.stderr));
    }
}

#[test]
fn few_descriptors_and_no_threads_are_errors() {
    // If descriptors run out only in the handshake, the sides wait until the timeout.
    let over = |transport| format!("perf put-signal {transport} -n 100 -w 10 --timeout 5");
    for (line, most) in [(over(""), 16), (over("--transport fabric --provider tcp"), 9)] {
        for descriptors in 3..most {
            let set = format!("ulimit -n {descriptors}");
            if limited(&set, "--version").status.success() {
                let output = limited(&set, &line);
                ended(&set, &output, &["ulimit -n", "hung up", "install libfabric"]);
                let said = text(&output.stderr);
                assert!(!said.contains("ulimit -v"), "{set}: {said}");
            }
        }
    }
}

#[test]
fn a_region_that_the_machine_has_no_memory_for_is_refused() {
    for transport in ["shm", "fabric --provider tcp", "gpu --device host"] {
        let output = run(&format!("perf put --transport {transport} -n 100 --region 64G"));
        let told = text(&output.stderr);
        if output.status.success() {
            println!("SKIPPED {transport}: this machine has memory for such a region");
            continue;
        }
        assert_eq!(output.status.code(), Some(2), "{transport}: {told}");
        assert!(told.contains("--region 64G") && told.contains("smaller"), "{transport}: {told}");
    }
}

/// A memory control group (cgroup v1) with a limit, for the processes of this test.
struct Group(&'static Path);

impl Group {
    fn new(bytes: u64) -> std::io::Result<Self> {
        let name = format!("/sys/fs/cgroup/memory/fishplate-test-{}", std::process::id());
        let path: &'static Path = Path::new(String::leak(name));
        fs::create_dir(path)?;
        let group = Group(path);
        fs::write(path.join("memory.limit_in_bytes"), bytes.to_string())?;
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The group may count a process for a moment after the process has ended.
        for _ in 0..100 {
            if fs::remove_dir(self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

#[test]
fn a_control_group_with_less_memory_than_the_region_takes_is_an_error_and_kills_nobody() {
    let group = match Group::new(192 << 20) {
        Ok(group) => group,
        Err(error) => {
            println!("SKIPPED memory of a control group: none can be made: {error}");
            return;
        }
    };
    let enter = format!("echo $$ >{}/cgroup.procs", group.0.display());
    let told = limited(&enter, "perf put-signal -n 100 -w 10 --region 64M");
    assert!(!ended("too large", &told, &["--region 64M: it needs"]));
    assert!(ended("fits", &limited(&enter, "perf put-signal -n 100 -w 10 --region 4M"), &[]));
}
