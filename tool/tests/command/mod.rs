//! Runs the binary as users do, with one line of arguments and no input.

#![allow(dead_code, reason = "each test program uses a part")]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
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

/// Runs a command line that must succeed. Returns its rows.
pub fn rows(line: &str) -> Vec<Value> {
    let output = run(&format!("{line} --format json"));
    assert!(output.status.success(), "{line}: {:?}\n{}", output.status, text(&output.stderr));
    let rows: Vec<Value> =
        text(&output.stdout).lines().map(|l| serde_json::from_str(l).expect(l)).collect();
    assert!(!rows.is_empty(), "{line}");
    rows
}

/// Returns a shell that runs a command line. The shell finds the tested binary as `fishplate`.
pub fn shell(line: &str) -> Command {
    let binary = Path::new(env!("CARGO_BIN_EXE_fishplate")).parent().unwrap();
    let path = format!("{}:{}", binary.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("bash");
    shell.args(["-o", "pipefail", "-c", line]).env("PATH", path).stdin(Stdio::null());
    shell
}

/// Runs in a shell the command that the listening side prints for the other side, with `more`
/// appended. Asserts that both sides succeed. Returns the command.
pub fn run_hint(mut side: Child, more: &str) -> String {
    let mut errors = BufReader::new(side.stderr.take().expect("standard error is a pipe"));
    let mut told = String::new();
    let line = loop {
        assert!(errors.read_line(&mut told).unwrap() > 0, "no hint: {told}");
        if let Some((_, line)) = told.lines().last().unwrap_or_default().split_once(" for: ") {
            break line.to_owned();
        }
    };
    let output = shell(&format!("{line} {more}")).output().unwrap();
    assert!(output.status.success(), "{line}: {}", text(&output.stderr));
    assert!(side.wait().unwrap().success(), "{line}");
    line
}

/// Kills the process if it still runs after `time`, so that a test that waits for it ends. To
/// cancel this, drop the returned sender.
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
