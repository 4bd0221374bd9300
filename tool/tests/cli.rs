//! Tests what users see of the binary: output, exit codes, messages, and files that remain.

use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

mod command;
use command::{fishplate, rows, run, run_hint, text};

/// Returns a path in the target's temporary folder that no other process uses.
fn socket(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()))
}

#[test]
fn every_test_runs_on_every_transport_and_verifies_everything() {
    for transport in
        ["loopback -w 20", "loopback -w 20 --rails 3", "sim", "sim --rails 4", "shm -w 20"]
    {
        for test in [
            "put-signal",
            "put --window 16",
            "get",
            "amo",
            "signal-rate --window 16",
            "tag",
            "tag -s 300",
            "tag-bw --window 16",
            "tag-bw --window 16 -s 20K",
        ] {
            let line = format!("perf {test} --transport {transport} -n 300 --check");
            for row in rows(&line) {
                let [iters, checked, errors, misordered] =
                    ["iters", "checked", "errors", "signals_misordered"]
                        .map(|field| row[field].as_u64().unwrap());
                assert_eq!(iters, 300, "{line}: {row}");
                assert_eq!((checked, errors, misordered), (iters, 0, 0), "{line}: {row}");
                assert!(row["msgs_per_s"].as_f64().unwrap() > 0.0, "{line}: {row}");
            }
        }
    }
}

#[test]
fn a_worker_drives_the_engine_and_everything_is_verified() {
    for transport in ["shm", "gpu --device host"] {
        for test in [
            "put-signal",
            "put-signal -s 5K",
            "put --window 16",
            "get",
            "amo",
            "tag",
            "tag -s 5K",
            "signal-rate --window 16",
            "tag-bw --window 16",
        ] {
            if transport != "shm"
                && ["amo", "signal", "tag-bw"].iter().any(|name| test.starts_with(name))
            {
                continue;
            }
            let line = format!("perf {test} --transport {transport} -n 64 -w 16 --mode worker");
            for row in rows(&format!("{line} --check")) {
                let fields = ["checked", "errors", "signals_misordered"].map(|field| &row[field]);
                assert_eq!(fields, [&row["iters"], &0.into(), &0.into()], "{line}: {row}");
                assert_eq!(row["mode"], "worker", "{line}: {row}");
                assert!(row["lat_ns"]["p50"].as_f64().unwrap() > 0.0, "{line}: {row}");
            }
        }
        rows(&format!("perf put --transport {transport} -n 64 -w 16 --window 16 --mode worker"));
    }
}

#[test]
fn rows_have_the_promised_fields() {
    let row = &rows("perf put-signal -s 8 -n 2000 -w 100 --check")[0];
    assert_eq!((&row["schema_version"], &row["test"]), (&1.into(), &"put-signal".into()));
    assert_eq!(
        (&row["transport"], &row["rails"], &row["size"]),
        (&"shm".into(), &1.into(), &8.into())
    );
    let latency: Vec<f64> = ["min", "p50", "p90", "p99", "p999", "max"]
        .map(|field| row["lat_ns"][field].as_f64().unwrap_or_else(|| panic!("{field}: {row}")))
        .to_vec();
    assert!(latency[1..].is_sorted() && latency[0] > 0.0, "{latency:?}");
    assert!(row["floor_ns"].as_f64().unwrap() > 0.0);
    for field in ["bytes_per_s", "arrivals_out_of_order"] {
        assert!(row[field].is_number(), "{field}: {row}");
    }
}

#[test]
fn pools_are_compared_in_every_scenario() {
    let rows = rows("perf pool -n 500 --streams 1,3");
    for row in &rows {
        let fields: Vec<_> = row.as_object().unwrap().keys().map(String::as_str).collect();
        let promised = [
            "schema_version",
            "test",
            "pool",
            "scenario",
            "streams",
            "ns_per_op",
            "ops_per_s",
            "p99_ns",
        ];
        assert!(promised.iter().all(|field| fields.contains(field)), "{row}");
        assert!(row["ops_per_s"].as_f64().unwrap() > 0.0, "{row}");
        assert!(
            row["min_ns_per_op"].as_f64().unwrap() <= row["ns_per_op"].as_f64().unwrap(),
            "{row}"
        );
        assert_eq!(row["to_one_stream"].is_number(), row["scenario"] == "streams", "{row}");
    }
    let has = |pool: &str, scenario: &str, streams: u64| {
        rows.iter().any(|row| {
            row["pool"] == pool && row["scenario"] == scenario && row["streams"] == streams
        })
    };
    for pool in ["fishplate", "mutex-ring-global", "mutex-ring-per-queue", "box"] {
        for (scenario, streams) in [
            ("single-4096", 1),
            ("streams", 1),
            ("streams", 3),
            ("hand-off-4", 1),
            ("lifecycle", 1),
        ] {
            assert!(has(pool, scenario, streams), "{pool} {scenario} {streams}");
        }
    }
    // The allocator has no limit, so its pool is never exhausted.
    assert!(has("fishplate", "exhausted", 1) && !has("box", "exhausted", 1));
}

#[test]
fn sizes_and_layouts_of_every_kind_arrive_intact() {
    for layout in ["adjacent", "split"] {
        let rows = rows(&format!(
            "perf put-signal -s 1,7,24,25,56,57,4K,100K -n 100 -w 10 --check --layout {layout}"
        ));
        assert_eq!(rows.len(), 8);
    }
    rows("perf put -b 1 -e 64K -f 16 -n 200 -w 64 --check");
    rows("perf get -s 3,5000 -n 100 -w 10 --check");
    rows("perf signal-rate --signal set -n 1000");
    rows("perf ring -s 8,16,32,64 -n 2000 -w 100");
}

#[test]
fn large_puts_are_compared_with_memcpy() {
    let row = &rows("perf put -s 1M -n 64 -w 8 --window 8")[0];
    assert!(row["memcpy_bytes_per_s"].as_f64().unwrap() > 0.0, "{row}");
}

#[test]
fn many_seeds_show_disorder_below_and_order_above() {
    let row = &rows("perf put-signal --transport sim --rails 4 --seeds 50 --seed 100")[0];
    assert!(row["arrivals_out_of_order"].as_u64().unwrap() > 0, "{row}");
    assert_eq!(row["signals_misordered"], 0);
    let row =
        &rows("perf put-signal --transport sim --rails 3 --seeds 5 -s 5000 --window 8 -n 64")[0];
    assert_eq!((&row["errors"], &row["checked"]), (&0.into(), &row["iters"]));
}

#[test]
fn csv_and_table_have_headers() {
    let csv = text(&run("perf amo --transport loopback -n 100 --format csv").stdout);
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(lines.len(), 2, "{csv}");
    assert!(lines[0].starts_with("schema_version,test,"), "{csv}");
    assert_eq!(lines[0].split(',').count(), lines[1].split(',').count(), "{csv}");
    let table = text(&run("perf amo --transport loopback -n 100").stdout);
    assert_eq!(table.lines().filter(|line| line.starts_with('#')).count(), 2, "{table}");
    assert!(!table.contains('\u{1b}'), "no colours where nobody sees them: {table}");
}

#[test]
fn bad_input_is_told_with_a_remedy() {
    for (line, code, says) in [
        ("perf put -s 0", 2, "size 0"),
        ("perf put -s 128M", 2, "--region"),
        ("perf put -s 8Q", 2, "`8Q`"),
        ("perf put --rails 0", 2, "--rails 0"),
        ("perf put --rails 17 --transport sim", 2, "at most"),
        ("perf put --window 0", 2, "--window 0"),
        ("perf put -n 0", 2, "-n 0"),
        ("perf put --pin 0,99999", 2, "99999"),
        ("perf put --transport carrier-pigeon", 2, "carrier-pigeon"),
        ("perf teleport", 2, "teleport"),
        ("fly", 2, "fly"),
        ("perf ring --mode worker", 2, "--mode inline"),
        ("perf put-signal --mode worker --transport sim", 2, "two processes"),
        ("perf pool --listen @fishplate-nobody", 2, "--listen has no effect on pool"),
        (
            "perf put-signal --transport sim --seed 18446744073709551615 --seeds 3",
            2,
            "smaller --seed",
        ),
        ("perf put --listen /nowhere/at/all/socket -T 1", 2, "/nowhere/at/all/socket"),
        (
            "perf put --connect @fishplate-nobody-is-here -T 1",
            1,
            "--listen @fishplate-nobody-is-here",
        ),
        ("perf put --listen @fishplate-nobody-comes -T 1", 1, "no process connected"),
    ] {
        let output = run(line);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{line}: {told}");
        assert!(told.contains(says), "{line}: {told}");
        assert!(!told.contains("panicked"), "{line}: {told}");
        assert!(output.stdout.is_empty(), "{line}: {}", text(&output.stdout));
    }
}

#[test]
fn a_listening_path_that_exists_is_left_alone() {
    let path = socket("exists");
    std::fs::write(&path, "precious").unwrap();
    let output = run(&format!("perf put --listen {} -T 1", path.display()));
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains("exists already") && told.contains(path.to_str().unwrap()), "{told}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    std::fs::remove_file(&path).unwrap();
}

/// Starts a listening side. Returns once it listens.
fn listen(line: &str, path: &Path) -> Child {
    let child = fishplate(line)
        .arg("--listen")
        .arg(path)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    soon("somebody listens", || path.exists().then_some(()));
    child
}

#[test]
fn two_sides_started_apart_find_each_other_and_leave_nothing() {
    let path = socket("apart");
    let side = listen("perf put-signal", &path);
    let rows =
        rows(&format!("perf put-signal -s 8,1K -n 500 -w 10 --check --connect {}", path.display()));
    assert_eq!(rows.len(), 2);
    let output = side.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!path.exists());
}

#[test]
fn a_variable_that_must_match_is_used_and_told_to_the_other_side() {
    let path = socket("variables");
    let mut side = fishplate("perf put --region 1M --listen");
    side.arg(&path).env("FISHPLATE_WINDOW", "64").stdout(Stdio::piped()).stderr(Stdio::piped());
    let told = run_hint(side.spawn().unwrap(), "-n 100 --check");
    assert!(told.starts_with("FISHPLATE_WINDOW=64 fishplate perf put --region 1M"), "{told}");
    let mut side = listen("perf put", &path);
    let mut other = fishplate("perf put -n 100 --connect");
    let output = other.arg(&path).env("FISHPLATE_WINDOW", "64").output().unwrap();
    let told = text(&output.stderr);
    assert!(told.contains("window: 256 on the other side, 64 here"), "{told}");
    side.kill().unwrap();
    side.wait().unwrap();
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn sides_that_do_not_match_say_so() {
    let path = socket("mismatch");
    let side = listen("perf put", &path);
    let output = run(&format!("perf get -n 100 --connect {}", path.display()));
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("same test"), "{told}");
    let output = side.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(!path.exists());
}

/// Connects clients. Each client sends some bytes or none, and stays connected.
fn strangers(path: &Path, each: &[&[u8]]) -> Vec<OwnedFd> {
    let name = path.to_str().unwrap().as_bytes();
    let connect = |says: &&[u8]| {
        // SAFETY: an address of zeros is valid, and the name fits it. The descriptor is new, so
        // nothing else owns it.
        unsafe {
            let fd = OwnedFd::from_raw_fd(libc::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0));
            let mut address: libc::sockaddr_un = std::mem::zeroed();
            address.sun_family = libc::AF_UNIX as _;
            std::ptr::copy_nonoverlapping(
                name.as_ptr(),
                address.sun_path.as_mut_ptr().cast(),
                name.len(),
            );
            let len = size_of_val(&address) as u32;
            // The file of the socket appears a moment before the process listens.
            let joined = || libc::connect(fd.as_raw_fd(), (&raw const address).cast(), len) == 0;
            soon("a listener", || joined().then_some(()));
            if !says.is_empty() {
                libc::send(fd.as_raw_fd(), says.as_ptr().cast(), says.len(), libc::MSG_NOSIGNAL);
            }
            fd
        }
    };
    each.iter().map(connect).collect()
}

#[test]
fn strangers_and_sides_that_do_not_fit_do_not_end_a_side_that_listens() {
    let path = socket("strangers");
    let side = listen("perf put --region 1M", &path);
    let mut version = b"FPBS".to_vec();
    version.extend([77, 0, 0, 0, 0, 0, 0, 0]);
    let _bad = strangers(&path, &[b"GET / HTTP/1.1", &[0xee; 1000], &version, b"x"]);
    let _silent = strangers(&path, &[&b""[..]; 64]);
    let output = run(&format!("perf put -n 100 --connect {}", path.display()));
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("--region"), "{told}");
    let begun = Instant::now();
    rows(&format!("perf put --region 1M -n 100 --connect {}", path.display()));
    // Each of the 64 silent clients has 5 s to send its greeting.
    assert!(begun.elapsed() < Duration::from_secs(20), "after {:?}", begun.elapsed());
    let output = side.wait_with_output().unwrap();
    let told = text(&output.stderr);
    assert!(output.status.success(), "{told}");
    for says in ["# refused", "is not fishplate", "--region", "version 77"] {
        assert!(told.contains(says), "{says}: {told}");
    }
}

/// When one process starts the other, a socket pair connects them. Neither end of the pair listens,
/// so no other process can send orders. The nodes listen, but accept only peers that the program
/// has added.
#[test]
fn a_pair_that_started_itself_listens_only_for_peers_of_its_nodes() {
    for transport in ["shm", "gpu --device host"] {
        let mut first =
            fishplate(&format!("perf put-signal --transport {transport} -n 1e11 -T 3600"))
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .expect("the binary starts");
        // The first process prints the headline once the two are connected.
        first.stdout.as_mut().unwrap().read_exact(&mut [0]).expect("the two meet");
        let second = child_of(first.id()).expect("a second process");
        let held: Vec<String> = [first.id(), second].map(sockets).concat();
        let all = std::fs::read_to_string("/proc/net/unix").unwrap();
        first.kill().unwrap();
        first.wait().unwrap();
        let ours = all.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let ours: Vec<_> =
            ours.filter(|line| line.len() > 6 && held.iter().any(|n| n == line[6])).collect();
        // The fields are Num RefCount Protocol Flags Type St Inode [Path]. The flags of a listener
        // contain `__SO_ACCEPTCON`, 0x10000.
        let listens: Vec<_> = ours.iter().filter(|line| line[3] != "00000000").collect();
        let doors = listens.iter().filter(|line| line[7].starts_with("@fishplate-")).count();
        assert!(ours.len() > 2 && listens.len() == 2 && doors == 2, "{ours:?}");
    }
}

/// Returns the inode numbers of a process's sockets.
fn sockets(pid: u32) -> Vec<String> {
    let Ok(open) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return vec![] };
    let links = open.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    links
        .filter_map(|to| Some(to.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect()
}

/// Returns the process that `parent` has started.
fn child_of(parent: u32) -> Option<u32> {
    let children =
        std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

fn kill(pid: u32) {
    // SAFETY: `kill` takes no pointers. The process is a child of a process that this test started.
    assert_eq!(unsafe { libc::kill(pid as i32, libc::SIGKILL) }, 0);
}

/// Returns the value of `look` once it has one. Panics if that takes too long.
fn soon<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_killed_second_process_is_reported_and_a_killed_first_takes_it_along() {
    for (test, kill_second) in
        [("put-signal", true), ("ring", true), ("signal-rate", true), ("put-signal", false)]
    {
        let line = format!("perf {test} -n 1e11 -T 3600");
        let mut first = fishplate(&line)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        // The first process prints the headline once the two are connected.
        first.stdout.as_mut().unwrap().read_exact(&mut [0]).expect("the two meet");
        let second = child_of(first.id()).expect("a second process");
        if kill_second {
            kill(second);
            let output = first.wait_with_output().unwrap();
            let told = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{told}");
            assert!(
                told.contains(&second.to_string()) && told.contains("killed by signal 9"),
                "{told}"
            );
        } else {
            kill(first.id());
            first.wait().unwrap();
            soon("the second process follows the first", || {
                let status =
                    std::fs::read_to_string(format!("/proc/{second}/stat")).unwrap_or_default();
                (status.is_empty() || status.contains(") Z ")).then_some(())
            });
        }
    }
}

#[test]
fn a_second_process_killed_before_the_two_meet_is_told_at_once_and_how_it_ended() {
    let mut first = fishplate("perf put-signal -T 3600").stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    let second = loop {
        match child_of(first.id()) {
            Some(second) => break second,
            None => assert!(
                first.try_wait().unwrap().is_none() && begun.elapsed() < Duration::from_secs(20)
            ),
        }
    };
    kill(second);
    let begun = Instant::now();
    let output = first.wait_with_output().unwrap();
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains(&second.to_string()) && told.contains("killed by signal 9"), "{told}");
    assert!(begun.elapsed() < Duration::from_secs(9), "after {:?}", begun.elapsed());
}

#[test]
fn a_measurement_that_takes_too_long_says_how_far_it_came() {
    for mode in ["inline", "worker"] {
        let output = run(&format!("perf put-signal --mode {mode} -n 1e11 -T 1"));
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains(" of 100000000000 iterations were measured"), "{told}");
        assert!(told.contains("--timeout"), "{told}");
    }
}

#[test]
fn info_tells_the_same_as_text_and_as_json() {
    let value: Value = serde_json::from_slice(&run("info --json").stdout).unwrap();
    assert_eq!(value["schema_version"], 1);
    assert_eq!(value["transports"]["shm"], "usable");
    assert!(
        value["machine"]["cpus"].is_string() && value["layout_bytes"]["ring_header"]["size"] == 256
    );
    let told = text(&run("info -v").stdout);
    assert!(told.contains("machine.cpus") && told.contains("transports.shm"), "{told}");
    let summary = text(&run("info").stdout);
    assert!(
        summary.lines().count() <= 24 && summary.contains("shared memory   usable"),
        "{summary}"
    );
    if value["fabric"]["usable"] != "usable" {
        println!("SKIPPED info of a provider: {}", value["fabric"]["usable"]);
        return;
    }
    let tcp: Value = serde_json::from_slice(&run("info -p tcp --json").stdout).unwrap();
    assert_eq!(tcp, value["fabric"]["providers"]["tcp"]);
    let absent = run("info -p foo");
    let told = text(&absent.stderr);
    assert!(absent.status.code() == Some(2) && told.contains("no provider \"foo\""), "{told}");
}

#[test]
fn without_arguments_it_demonstrates() {
    let output = run("");
    let told = text(&output.stdout);
    assert!(output.status.success(), "{told}\n{}", text(&output.stderr));
    assert!(
        told.contains("Latency") && told.contains("Bandwidth") && told.contains("memcpy"),
        "{told}"
    );
}

fn interrupt(child: &Child) {
    // SAFETY: `kill` takes no pointers. The process is a child that the test has not reaped.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
}

#[test]
fn an_interrupted_run_says_how_far_it_came_and_ends_with_status_130() {
    let info: Value = serde_json::from_slice(&run("info --json").stdout).unwrap();
    let tcp = "put --transport fabric --provider tcp --interface lo";
    let mut lines = vec!["put-signal", "tag --mode worker", "put --transport loopback"];
    match info["fabric"]["usable"] == "usable" {
        true => lines.push(tcp),
        false => {
            println!("SKIPPED an interrupted run over libfabric: {}", info["fabric"]["usable"])
        }
    }
    for line in lines {
        let line = format!("perf {line} -n 1e11 -T 3600");
        let mut child =
            fishplate(&line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).expect("a headline");
        interrupt(&child);
        let output = child.wait_with_output().unwrap();
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{line}: {told}");
        assert!(told.contains("interrupted"), "{line}: {told}");
    }
}

#[test]
fn a_listener_that_is_interrupted_or_killed_does_not_block_the_next() {
    let path = socket("left");
    let side = listen("perf put", &path);
    interrupt(&side);
    let output = side.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert!(!path.exists());
    let mut side = listen("perf put", &path);
    side.kill().unwrap();
    side.wait().unwrap();
    assert!(path.exists());
    let output = run(&format!("perf put --listen {} -T 1", path.display()));
    assert!(text(&output.stderr).contains("no process connected"), "{}", text(&output.stderr));
    assert!(!path.exists());
}

#[test]
fn a_reader_that_goes_away_ends_the_run_by_sigpipe_and_without_a_word() {
    let mut child = fishplate("perf put --transport loopback -b 1 -e 4K -n 1000")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
    assert_eq!((signal, text(&output.stderr)), (Some(libc::SIGPIPE), String::new()));
}
