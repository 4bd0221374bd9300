//! Tests the output of the binary about GPUs, with and without a driver.

use std::process::{Command, Stdio};

use serde_json::Value;

mod command;
use command::{fishplate, rows, run, text};

#[test]
fn a_machine_without_a_driver_is_told_so_and_nothing_else_suffers() {
    let cache = Command::new("ldconfig").arg("-p").stderr(Stdio::null()).output();
    if cache.is_ok_and(|cache| {
        text(&cache.stdout).contains("libcuda.so") || text(&cache.stdout).contains("libamdhip64.so")
    }) {
        println!(
            "SKIPPED a_machine_without_a_driver_is_told_so_and_nothing_else_suffers: this machine \
             has a driver"
        );
        return;
    }
    let output = fishplate("info --json")
        .env("LD_LIBRARY_PATH", env!("CARGO_TARGET_TMPDIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    assert_eq!(text(&output.stderr), "");
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        told["gpu"],
        serde_json::json!({
            "usable": "no CUDA driver: libcuda is not on this machine; no HIP driver: libamdhip64 \
             is not on this machine"
        })
    );
    assert_eq!(told["transports"]["shm"], "usable");
}

#[test]
fn payloads_in_memory_of_a_device_arrive_whole_directly_and_through_bounce_slots() {
    for test in ["put-signal", "put --window 4", "get", "tag"] {
        for (path, way) in [("direct", ["direct", "stored"]), ("relay", ["relayed", "relayed"])] {
            let line = format!(
                "perf {test} --transport gpu --device host --ipc-path {path} -s 8,5K,300K -n 40 -w \
                 4 --region 1M --check"
            );
            let rows = rows(&line);
            assert_eq!(rows.len(), 3, "{line}");
            for row in rows {
                let fields = ["checked", "errors", "signals_misordered"].map(|field| &row[field]);
                assert_eq!(fields, [&row["iters"], &0.into(), &0.into()], "{line}: {row}");
                assert_eq!(row["devices"], serde_json::json!(["host", "host"]), "{line}: {row}");
                let moved = |how: &str| row["moved"][how].as_u64().unwrap();
                let all = moved("direct") + moved("stored") + moved("relayed");
                let as_asked: u64 =
                    moved(way[0]) + if way[0] == way[1] { 0 } else { moved(way[1]) };
                assert!(as_asked > 0 && as_asked == all, "{line}: {row}");
                assert!(
                    row["lat_ns"]["p50"].as_f64() <= row["lat_ns"]["p99"].as_f64(),
                    "{line}: {row}"
                );
            }
        }
    }
}

#[test]
fn a_missing_device_is_named_in_the_error() {
    for (device, says) in
        [("cuda:99", "cuda:99"), ("host,cuda:99", "cuda:99"), ("hip:99", "hip:99")]
    {
        let output = run(&format!("perf put --transport gpu --device {device} -n 1"));
        assert_eq!(output.status.code(), Some(2));
        let told = text(&output.stderr);
        assert!(told.contains(says) && !told.contains("panicked"), "{told}");
    }
}
