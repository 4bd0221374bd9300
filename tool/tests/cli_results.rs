//! Tests the output for other programs: rows that match their schema, histograms, and pictures.
//! Also tests `--duration` and `--bidirectional`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

mod command;
#[path = "command/schema.rs"]
mod schema;
use command::{fishplate, limit, rows, run, text};

/// Returns the path of a file in the target's temporary folder that no other process uses.
fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()))
}

#[test]
fn every_row_fits_the_schema_and_a_row_that_does_not_is_found() {
    let perf = schema::load("perf.json");
    let mut last = Value::Null;
    for line in [
        "put-signal -s 8,100",
        "put --check",
        "put --bidirectional",
        "get --transport loopback",
        "tag --transport sim --seeds 2",
        "signal-rate --mode worker",
        "ring",
        "put --transport gpu --device host",
    ] {
        for row in rows(&format!("perf {line} -n 100 --region 1M")) {
            schema::check(&perf, &row, "row").unwrap_or_else(|why| panic!("{line}: {why}"));
            last = row;
        }
    }
    for row in rows("perf match -n 1 --rounds 1 --workloads P1,T1 --depths 4") {
        schema::check(&schema::load("match.json"), &row, "row").unwrap();
    }
    for (field, value) in
        [("size", 0.into()), ("errors", "none".into()), ("lat_ns", Value::Null), ("new", 1.into())]
    {
        let mut wrong = last.clone();
        wrong[field] = value;
        assert_eq!(schema::check(&perf, &wrong, "row").is_err(), field != "lat_ns", "{field}");
    }
    last.as_object_mut().unwrap().remove("window");
    assert!(schema::check(&perf, &last, "row").unwrap_err().contains("window"));
}

#[test]
fn pool_info_and_doctor_print_what_their_schemas_describe() {
    for row in rows("perf pool -n 100") {
        schema::check(&schema::load("pool.json"), &row, "row").unwrap();
    }
    let whole = |line: &str| serde_json::from_slice::<Value>(&run(line).stdout).unwrap();
    let (mut info, described) = (whole("info --json"), schema::load("info.json"));
    schema::check(&described, &info, "info").unwrap();
    for (name, provider) in info["fabric"]["providers"].as_object().into_iter().flatten() {
        if provider["usable"] == "usable" {
            let of_one = &described["properties"]["fabric"]["properties"]["providers"]["additionalProperties"];
            schema::check(of_one, &whole(&format!("info -p {name} --json")), name).unwrap();
        }
    }
    info["topology"]["nics"] = serde_json::json!({ "eth0": { "interface": "eth0" } });
    let why = schema::check(&described, &info, "info").unwrap_err();
    assert!(
        why.contains("info.topology.nics.eth0") && why.contains("\"verbs\" is missing"),
        "{why}"
    );
    schema::check(&schema::load("doctor.json"), &whole("doctor --json"), "doctor").unwrap();
}

#[test]
fn both_sides_send_at_once_and_both_verify_everything() {
    for test in
        ["put -s 8,3K,100K", "tag-bw -s 8,300,20K", "tag-bw --window 1024", "put --mode worker"]
    {
        for row in rows(&format!("perf {test} --bidirectional --check -n 300 --region 1M")) {
            let counts = ["iters", "checked", "errors"].map(|field| row[field].as_u64().unwrap());
            assert_eq!(counts, [300, 300, 0], "{test}: {row}");
            assert_eq!(row["bidirectional"], true);
        }
    }
    rows("perf tag-bw --bidirectional --window 4096 -n 10K -w 0 --region 1M");
}

#[test]
fn a_duration_is_kept_and_processor_time_is_told() {
    for line in ["put-signal", "put --check", "put --transport loopback", "tag-bw --bidirectional"]
    {
        let begun = Instant::now();
        let mut run = fishplate(&format!("perf {line} -D 600ms --region 1M --json"));
        let run = run.stdout(Stdio::piped()).spawn().unwrap();
        // A run that ignores the duration takes longer than this limit.
        let _limit = limit(run.id(), Duration::from_secs(30));
        let output = run.wait_with_output().unwrap();
        assert!(output.status.success(), "{line}: {:?} after {:?}", output.status, begun.elapsed());
        assert!(begun.elapsed() >= Duration::from_millis(500), "{line}: {:?}", begun.elapsed());
        let row: Value = serde_json::from_slice(&output.stdout).unwrap();
        // On a loaded machine an iteration may take many milliseconds.
        assert!(row["iters"].as_u64().unwrap() > 0, "{line}: {row}");
        assert!(row["cpu_ns_per_op"].as_f64().is_some_and(|ns| ns > 0.0), "{line}: {row}");
        let peer = row["peer_cpu_ns_per_op"].as_f64();
        assert_eq!(peer.is_some_and(|ns| ns > 0.0), !line.contains("loopback"), "{line}: {row}");
    }
}

#[test]
fn a_histogram_has_every_iteration() {
    let path = file("hist.csv");
    rows(&format!("perf put-signal -s 8,64 -n 5000 --region 1M --hist {}", path.display()));
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("test,size,lat_ns,count"));
    let (mut counts, mut last) = (BTreeMap::new(), (0, 0.0));
    for line in lines {
        let fields: Vec<&str> = line.split(',').collect();
        let (size, ns): (u64, f64) = (fields[1].parse().unwrap(), fields[2].parse().unwrap());
        assert!((size, ns) > last, "not sorted: {line}");
        last = (size, ns);
        *counts.entry(size).or_insert(0) += fields[3].parse::<u64>().unwrap();
    }
    assert_eq!(counts, BTreeMap::from([(8, 5000), (64, 5000)]));
}

#[test]
fn pictures_are_drawn_of_a_run_and_of_results() {
    let (picture, results) = (file("run.svg"), file("results.jsonl"));
    let line =
        format!("perf put -s 8,64,512 -n 1000 --region 1M --json --plot {}", picture.display());
    let output = run(&line);
    assert!(output.status.success(), "{}", text(&output.stderr));
    std::fs::write(&results, &output.stdout).unwrap();
    let first = std::fs::read_to_string(&picture).unwrap();
    // Each size has one dot each for p50, p99 and bandwidth.
    assert_eq!(first.matches("<circle").count(), 9, "{first}");
    assert!(first.contains("put shm") && first.contains("prefers-color-scheme: dark"), "{first}");
    let both = format!("plot {0} {0} -o {1}", results.display(), picture.display());
    assert!(run(&both).status.success());
    let second = std::fs::read_to_string(&picture).unwrap();
    assert!(second.contains("results: put shm"), "{second}");
    for (content, says) in
        [("not JSON\n", "line 1"), ("{\"size\":8}\n", "no row has a size"), ("", "no row")]
    {
        std::fs::write(&results, content).unwrap();
        let output = run(&format!("plot {} -o {}", results.display(), picture.display()));
        let told = text(&output.stderr);
        assert!(output.status.code() == Some(2) && told.contains(says), "{content}: {told}");
    }
    assert_eq!(
        run(&format!("plot /nowhere/at/all -o {}", picture.display())).status.code(),
        Some(2)
    );
    std::fs::remove_file(&picture).unwrap();
    std::fs::remove_file(&results).unwrap();
}
