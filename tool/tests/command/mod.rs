//! Runs the binary as its users do, with one line of arguments and no input.

#![allow(dead_code, reason = "each test program uses a part")]

use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::spawn;
use std::time::Duration;

use serde_json::Value;

pub fn fishplate(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fishplate"));
    command.args(line.split_whitespace()).stdin(Stdio::null());
    command
}

pub fn run(line: &str) -> Output {
    fishplate(line).output().expect("the binary starts")
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a line that must succeed, and returns its rows.
pub fn rows(line: &str) -> Vec<Value> {
    let output = run(&format!("{line} --format json"));
    assert!(output.status.success(), "{line}: {:?}\n{}", output.status, text(&output.stderr));
    let rows: Vec<Value> = text(&output.stdout).lines().map(|l| serde_json::from_str(l).expect(l)).collect();
    assert!(!rows.is_empty(), "{line}");
    rows
}

/// Kills a process that still runs after `time`, so that a test that waits for it ends. Dropping
/// the returned sender cancels it.
pub fn limit(process: u32, time: Duration) -> Sender<()> {
    let (done, over) = channel();
    spawn(move || {
        if over.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
            // SAFETY: `kill` takes no pointers. The process is a child that nothing has reaped.
            unsafe { libc::kill(process as i32, libc::SIGKILL) };
        }
    });
    done
}
