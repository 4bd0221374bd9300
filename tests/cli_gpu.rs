//! What the binary says of GPUs, with and without a driver.

use std::process::{Command, Stdio};

use serde_json::Value;

#[test]
fn a_machine_without_a_driver_is_told_so_and_nothing_else_suffers() {
    let cache = Command::new("ldconfig").arg("-p").stderr(Stdio::null()).output();
    if cache.is_ok_and(|cache| String::from_utf8_lossy(&cache.stdout).contains("libcuda.so")) {
        println!(
            "SKIPPED a_machine_without_a_driver_is_told_so_and_nothing_else_suffers: this machine has a driver"
        );
        return;
    }
    let output = Command::new(env!("CARGO_BIN_EXE_fishplate"))
        .args(["info", "--json"])
        .env("LD_LIBRARY_PATH", env!("CARGO_TARGET_TMPDIR"))
        .stdin(Stdio::null())
        .output()
        .expect("the binary starts");
    assert!(output.status.success(), "{:?}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        told["gpu"],
        serde_json::json!({ "usable": "no CUDA driver: libcuda is not on this machine" })
    );
    assert_eq!(told["transports"]["shm"], "usable");
}
