//! Tests `perf match` as users see it: rows, several engines in one run, and invalid command lines.

mod command;
use command::text;

fn run(line: &str) -> std::process::Output {
    command::run(&format!("perf match {line}"))
}

fn rows(line: &str) -> Vec<serde_json::Value> {
    command::rows(&format!("perf match {line}"))
}

#[test]
fn a_row_has_exactly_the_fields_of_its_schema() {
    let fields = [
        "bytes_per_entry",
        "depth",
        "engine",
        "instr_per_op",
        "max_ns",
        "ns_per_op",
        "schema_version",
        "test",
        "workload",
    ];
    for row in rows("--workloads P1,U3,T1 --depths 0,64 -n 200 --rounds 2") {
        let object = row.as_object().unwrap();
        let mut names: Vec<_> = object.keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, fields, "{row}");
        assert_eq!((&row["schema_version"], &row["test"]), (&1.into(), &"match".into()));
        // Some machines cannot count instructions.
        let instructions = &row["instr_per_op"];
        assert!(instructions.is_null() || instructions.as_f64().unwrap() > 10.0, "{row}");
        assert!(row["ns_per_op"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["max_ns"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["bytes_per_entry"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn every_workload_has_a_row_per_engine_and_depth() {
    let rows = rows("--depths 0,3 -n 50 --rounds 1 --patience 10m");
    let count = |workload: &str| rows.iter().filter(|row| row["workload"] == workload).count();
    for workload in ["P1", "P2", "P3", "P4", "P5", "P10", "P11", "U5"] {
        assert_eq!(count(workload), 4, "{workload}: depths 0 and 3");
    }
    for workload in ["P6", "P7", "P8", "P9", "U1", "U2", "U3", "U4", "U6", "C1"] {
        assert_eq!(count(workload), 2, "{workload}: depth 3");
    }
    for (trace, depths) in [("T1", 3), ("T2", 1), ("T3", 3), ("T4", 2), ("T5", 2), ("T6", 2)] {
        assert_eq!(count(trace), 2 * depths, "{trace}");
    }
    let engines: Vec<_> = rows.iter().map(|row| row["engine"].as_str().unwrap()).collect();
    assert!(engines.chunks(2).all(|pair| pair == ["ours", "list"]), "{engines:?}");
}

#[test]
fn ucx_is_an_engine_where_it_is_installed() {
    let output = run(
        "--engines ours,ucx --workloads P1,P3,U2,C1 --depths 1,16 -n 100 --rounds 1 --format json",
    );
    let errors = text(&output.stderr);
    if errors.contains("not installed") {
        assert_eq!(output.status.code(), Some(2), "{errors}");
        println!("SKIPPED ucx_is_an_engine_where_it_is_installed: {errors}");
        return;
    }
    assert!(output.status.success(), "{errors}");
    let told = text(&output.stdout);
    assert_eq!(told.lines().filter(|row| row.contains("\"ucx\"")).count(), 8, "{told}");
}

#[test]
fn mistakes_are_named() {
    for (line, says) in [
        ("--workloads P12", "P12"),
        ("--engines psm9", "psm9"),
        ("--depths 128K", "65536"),
        ("--rounds 0", "0"),
        ("-n x", "`x`"),
    ] {
        let output = run(line);
        assert_eq!(output.status.code(), Some(2), "{line}");
        let errors = text(&output.stderr);
        assert!(errors.contains(says), "{line}: {errors}");
    }
}
