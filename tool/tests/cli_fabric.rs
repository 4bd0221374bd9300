//! Tests the binary over libfabric as users see it. Without libfabric, these tests print SKIPPED.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

mod command;
#[path = "../../tests/port/mod.rs"]
mod port;
#[path = "command/schema.rs"]
mod schema;
use command::{fishplate, rows, run, run_hint, text};
use port::free_port;

fn info() -> Value {
    serde_json::from_slice(&run("info --json").stdout).expect("info is JSON")
}

/// Returns whether libfabric is unusable. If so, prints that the test is skipped, and the reason.
fn absent(name: &str) -> bool {
    let usable = info()["fabric"]["usable"].as_str().unwrap_or("no answer").to_owned();
    if usable != "usable" {
        println!("SKIPPED {name}: {usable}");
    }
    usable != "usable"
}

fn verified(line: &str) {
    for row in rows(&format!("{line} --check -T 60")) {
        let fields = ["checked", "errors", "signals_misordered"].map(|field| &row[field]);
        assert_eq!(fields, [&row["iters"], &0.into(), &0.into()], "{line}: {row}");
        assert_eq!(row["transport"], "fabric", "{line}");
        schema::check(&schema::load("perf.json"), &row, "row").unwrap();
        let rails = row["failover"]["rails"].as_array().map_or(1, Vec::len);
        assert_eq!(row["rails"], rails, "{line}");
    }
}

#[test]
fn every_test_runs_over_every_software_provider_on_one_rail_and_on_two() {
    if absent("fabric, software providers") {
        return;
    }
    for rails in [
        "--provider tcp --interface lo",
        "--provider tcp --interface lo,lo --rails 2",
        "--provider tcp;ofi_rxm --interface lo",
        "--provider tcp;ofi_rxm --interface lo,lo --rails 2",
        "--provider shm",
        "--provider shm --interface shm,shm --rails 2",
    ] {
        for test in ["put-signal -s 8,5K", "put -s 8,200K --window 16", "get -s 8,200K", "amo"] {
            verified(&format!("perf {test} --transport fabric {rails} -n 100 -w 10"));
        }
    }
}

#[test]
fn signals_are_counted_and_a_worker_drives_the_rails() {
    if absent("fabric, worker") {
        return;
    }
    let rails = "--transport fabric --provider tcp --interface lo,lo --rails 2";
    verified(&format!("perf signal-rate {rails} -n 2000"));
    for test in ["put-signal", "tag"] {
        verified(&format!("perf {test} {rails} -s 8,5K -n 100 -w 10 --mode worker"));
    }
}

#[test]
fn without_a_number_there_are_as_many_iterations_as_there_is_time_for() {
    if absent("fabric, time") {
        return;
    }
    // Each half of a row may take a quarter of the time limit. A million round trips through
    // sockets take longer.
    let rows = rows(&format!("perf put-signal {LO} -T 4"));
    let iters = rows[0]["iters"].as_u64().unwrap();
    assert!((2..1_000_000).contains(&iters), "{iters}");
}

#[test]
fn a_machine_that_gets_slower_in_mid_run_makes_fewer_iterations_of_it() {
    if absent("fabric, a slower machine") {
        return;
    }
    let mut first = listen(&format!("perf put-signal {LO} -T 12 --format json"));
    let (pid, mut second) = (first.id(), None);
    while second.is_none() && first.try_wait().unwrap().is_none() {
        second = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))
            .ok()
            .and_then(|text| text.split_whitespace().next()?.parse::<i32>().ok());
    }
    until_it_measures(pid);
    // From now on, the second process runs for one thirtieth of the time.
    while first.try_wait().unwrap().is_none() {
        for (signal, ms) in [(libc::SIGSTOP, 29), (libc::SIGCONT, 1)] {
            // SAFETY: `kill` takes no pointers. The first process reaps the second process, and is
            // still a child of this test.
            unsafe { libc::kill(second.expect("a second process"), signal) };
            std::thread::sleep(Duration::from_millis(ms));
        }
    }
    let output = first.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

fn listen(line: &str) -> Child {
    fishplate(line)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts")
}

const LO: &str = "--transport fabric --provider tcp --interface lo";

#[test]
fn two_sides_started_apart_find_each_other() {
    if absent("fabric, listen and connect") {
        return;
    }
    let port = free_port();
    let side = listen(&format!("perf put-signal {LO} --listen 127.0.0.1:{port}"));
    verified(&format!("perf put-signal -s 8,1K {LO} -n 200 -w 10 --connect 127.0.0.1:{port}"));
    let output = side.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn the_line_printed_for_the_other_side_works_as_it_is() {
    if absent("fabric, hint") {
        return;
    }
    for (line, says) in [
        (
            "put --provider tcp --interface lo,lo --rails 2",
            "--rails 2 --provider tcp --interface lo,lo",
        ),
        (
            "tag --provider tcp;ofi_rxm --interface lo --region 1M",
            "'tcp;ofi_rxm' --interface lo --region 1M",
        ),
        ("get --provider tcp --interface lo --mode worker", "--mode worker"),
    ] {
        let mut side = fishplate(&format!(
            "perf {line} --transport fabric --listen 127.0.0.1:{}",
            free_port()
        ));
        side.env("FISHPLATE_WINDOW", "64").stdout(Stdio::piped()).stderr(Stdio::piped());
        let told = run_hint(side.spawn().unwrap(), "-n 100 --check");
        assert!(told.starts_with("FISHPLATE_WINDOW=64 ") && told.contains(says), "{told}");
    }
}

#[test]
fn sides_that_do_not_fit_say_what_differs() {
    if absent("fabric, mismatches") {
        return;
    }
    for (theirs, ours, says) in [
        ("--region 1M", "", "region size"),
        ("--rails 2 --interface lo,lo", "", "2 on the other side, 1 here"),
        (
            "--provider tcp;ofi_rxm --interface lo",
            "--provider tcp --interface lo",
            "different providers",
        ),
    ] {
        let port = free_port();
        let with = |more: &str| match more {
            more if more.contains("--provider") => format!("--transport fabric {more}"),
            more if more.contains("--interface") => {
                format!("--transport fabric --provider tcp {more}")
            }
            more => format!("{LO} {more}"),
        };
        let side = listen(&format!("perf put {} --listen 127.0.0.1:{port}", with(theirs)));
        let output = run(&format!("perf put {} -n 100 --connect 127.0.0.1:{port}", with(ours)));
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains(says), "{says}: {told}");
        // The listening side continues, and accepts a process with matching options.
        rows(&format!("perf put {} -n 100 --connect 127.0.0.1:{port}", with(theirs)));
        let output = side.wait_with_output().unwrap();
        let told = text(&output.stderr);
        assert!(output.status.success() && told.contains("# refused"), "{told}");
    }
    for [theirs, ours] in [["shm", "fabric"], ["fabric", "shm"]] {
        let port = free_port();
        let with =
            |transport: &str| if transport == "fabric" { LO } else { "--transport shm" }.to_owned();
        let mut side = listen(&format!("perf put {} --listen 127.0.0.1:{port}", with(theirs)));
        let output = run(&format!("perf put {} -n 100 --connect 127.0.0.1:{port}", with(ours)));
        let told = text(&output.stderr);
        let says = format!("with --transport {theirs}, and this side with --transport {ours}");
        assert!(output.status.code() == Some(1) && told.contains(&says), "{told}");
        side.kill().unwrap();
        side.wait().unwrap();
    }
    let port = free_port();
    let mut environment = listen(&format!("perf put {LO} --listen 127.0.0.1:{port}"));
    let output = fishplate(&format!("perf put {LO} -n 100 --connect 127.0.0.1:{port}"))
        .env("FISHPLATE_WINDOW", "64")
        .output()
        .unwrap();
    assert!(
        text(&output.stderr).contains("window: 128 on the other side, 64 here"),
        "{}",
        text(&output.stderr)
    );
    environment.kill().unwrap();
    environment.wait().unwrap();
}

#[test]
fn strangers_do_not_end_a_side_that_listens_nor_make_it_wait() {
    if absent("fabric, strangers") {
        return;
    }
    let port = free_port();
    let side = listen(&format!("perf put {LO} --listen 127.0.0.1:{port}"));
    let deadline = Instant::now() + Duration::from_secs(20);
    let connect = |says: &[u8]| loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(mut stream) => {
                let _ = stream.write_all(says);
                return stream;
            }
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let mut held: Vec<TcpStream> = (0..64).map(|_| connect(b"")).collect();
    let bad: [&[u8]; 4] = [
        b"GET / HTTP/1.1",
        b"FPBS\x63\0\0\0\0\0\0\0",
        b"FPBS\x01\0\0\0\xff\xff\xff\xff",
        &[0; 5000],
    ];
    held.extend(bad.map(connect));
    drop(connect(b""));
    let begun = Instant::now();
    rows(&format!("perf put {LO} -n 100 --connect 127.0.0.1:{port}"));
    // Each of the 64 silent clients has 5 s to send its greeting.
    assert!(begun.elapsed() < Duration::from_secs(20), "after {:?}", begun.elapsed());
    let output = side.wait_with_output().unwrap();
    let told = text(&output.stderr);
    assert!(output.status.success() && told.contains("is not fishplate"), "{told}");
}

#[test]
fn bad_input_says_what_was_looked_for_and_what_is_there() {
    let mut cases = vec![
        ("put --transport fabric --listen nonsense -T 1", 2, &["nonsense", "HOST:PORT"][..]),
        (
            "put --transport fabric --connect 127.0.0.1:1 --provider tcp -T 1",
            1,
            &["no process listens"],
        ),
    ];
    if absent("fabric, bad input") {
        cases.clear();
    } else {
        cases.extend([
            ("put --transport fabric --provider pigeon", 2, &["pigeon", "tcp, tcp;ofi_rxm"][..]),
            ("put --transport fabric --provider pigeon,post", 2, &["pigeon", "post"]),
            ("put --transport fabric --provider tcp --interface carrier0", 2, &["carrier0", "lo"]),
            (
                "put --transport fabric --provider tcp --interface lo --rails 2",
                2,
                &["2 rails", "lo"],
            ),
            ("put --transport fabric --provider shm --rails 3", 2, &["3 rails", "shm"]),
            ("put --transport fabric --rails 17", 2, &["17"]),
        ]);
    }
    for (line, code, says) in cases {
        let output = run(&format!("perf {line}"));
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{line}: {told}");
        assert!(says.iter().all(|what| told.contains(what)), "{line}: {told}");
        assert!(!told.contains("panicked") && output.stdout.is_empty(), "{line}: {told}");
    }
}

#[test]
fn a_libfabric_that_is_missing_or_none_is_named() {
    for (path, says) in
        [("/nowhere/libfabric.so.1", "/nowhere/libfabric.so.1"), ("libc.so.6", "fi_getinfo")]
    {
        let output = fishplate("perf put --transport fabric")
            .env("FISHPLATE_LIBFABRIC", path)
            .output()
            .unwrap();
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains(says) && told.contains(path), "{told}");
    }
}

#[test]
fn variables_are_told_checked_and_used() {
    let told = info();
    for name in [
        "PROVIDER",
        "INTERFACES",
        "MAX_RAILS",
        "BATCH",
        "STRIPE_THRESHOLD",
        "WINDOW",
        "POLICY",
        "DEADLINE",
    ] {
        let variable = &told["settings"][format!("FISHPLATE_{name}")];
        assert!(
            variable["value"].is_string() && variable["default"].is_string(),
            "{name}: {variable}"
        );
        assert!(variable["meaning"].as_str().is_some_and(|text| text.len() > 10), "{name}");
    }
    let output = fishplate("info --json").env("FISHPLATE_BATCH", "7").output().unwrap();
    let changed: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(changed["settings"]["FISHPLATE_BATCH"]["value"], "7");
    assert_eq!(changed["settings"]["FISHPLATE_BATCH"]["default"], "32");
    for line in ["info", "perf put --transport fabric"] {
        let output = fishplate(line).env("FISHPLATE_POLICY", "chance").output().unwrap();
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(
            told.contains("FISHPLATE_POLICY=chance") && told.contains("least-outstanding"),
            "{told}"
        );
    }
}

#[test]
fn info_tells_of_providers_interfaces_and_memory() {
    if absent("fabric, info") {
        return;
    }
    let told = info();
    let names = told["fabric"]["providers_in_library"].as_str().unwrap();
    let refused = text(&run("perf put --transport fabric --provider foo").stderr);
    assert!(
        names.split(", ").any(|name| name == "tcp") && refused.contains(names),
        "{names}: {refused}"
    );
    let tcp = &told["fabric"]["providers"]["tcp"];
    assert!(tcp["interfaces"]["lo"]["distance"].is_string(), "{tcp}");
    let negotiated = &tcp["negotiated"];
    for field in ["provider", "progress", "threading", "writes_complete_at", "inject_bytes"] {
        assert!(!negotiated[field].is_null(), "{field}: {negotiated}");
    }
    let bytes = negotiated["bytes_per_peer_with_4_rails"].as_u64().expect("rails can be opened");
    assert!(bytes < 16 << 10, "{bytes} bytes per peer");
    // Libfabric's tcp has FI_HMEM only if it was built with a GPU's library; its shm always has it.
    assert!(tcp["device_memory"].is_boolean(), "{tcp}");
    assert_eq!(told["fabric"]["providers"]["shm"]["device_memory"], true);
    let missing = told["fabric"]["providers"]["cxi"]["usable"].as_str().unwrap_or_default();
    assert!(missing == "usable" || missing.contains("cxi"), "why it was rejected: {missing}");
}

/// Waits until a process measures: until it has used 20 more ticks of CPU time. Panics after a
/// minute.
fn until_it_measures(pid: u32) {
    let used = || -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the process lives");
        let fields: Vec<&str> = stat[stat.rfind(')').unwrap() + 2..].split(' ').collect();
        fields[11..13].iter().map(|ticks| ticks.parse::<u64>().unwrap()).sum()
    };
    let (before, deadline) = (used(), Instant::now() + Duration::from_secs(60));
    while used() < before + 20 {
        assert!(Instant::now() < deadline, "the two sides measure");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
#[ignore = "takes 15 s; tests/proofs.sh runs it"]
fn a_side_that_stands_still_for_12_s_is_waited_for_as_long_as_the_run_has() {
    if absent("fabric, a side that stands still") {
        return;
    }
    let port = free_port();
    let side = listen(&format!("perf put {LO} --listen 127.0.0.1:{port}"));
    // Long enough that posts stay in flight.
    let line = format!("perf put -s 256K -n 16000 -T 90 {LO} --connect 127.0.0.1:{port}");
    let mut other = listen(&line);
    let mut first = [0];
    other.stdout.as_mut().unwrap().read_exact(&mut first).expect("the two sides meet");
    until_it_measures(other.id());
    let begun = Instant::now();
    for (signal, wait) in
        [(libc::SIGSTOP, Duration::from_secs(12)), (libc::SIGCONT, Duration::ZERO)]
    {
        // SAFETY: `kill` takes no pointers. The process is a child that the test has not reaped.
        assert_eq!(unsafe { libc::kill(side.id() as i32, signal) }, 0);
        std::thread::sleep(wait);
    }
    for side in [other, side] {
        let output = side.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    assert!(begun.elapsed() > Duration::from_secs(12));
}

#[test]
fn a_killed_side_is_reported_by_the_other_with_peer_and_rail() {
    if absent("fabric, a killed side") {
        return;
    }
    // Kills a side during the setup, and then during the measurement.
    for measuring in [false, true] {
        let port = free_port();
        let mut side = listen(&format!("perf put-signal {LO} --listen 127.0.0.1:{port}"));
        let mut other =
            listen(&format!("perf put-signal -n 1e11 -T 600 {LO} --connect 127.0.0.1:{port}"));
        // The connecting side prints the headline once the two are connected.
        let mut first = [0];
        other.stdout.as_mut().unwrap().read_exact(&mut first).expect("the two sides meet");
        if measuring {
            until_it_measures(other.id());
        }
        side.kill().unwrap();
        let begun = Instant::now();
        let output = other.wait_with_output().unwrap();
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(
            told.contains(&format!("127.0.0.1:{port}")) && told.contains("tcp on lo"),
            "{told}"
        );
        assert!(begun.elapsed() < Duration::from_secs(10), "after {:?}", begun.elapsed());
        side.wait().unwrap();
    }
}
