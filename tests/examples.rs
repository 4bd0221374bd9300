//! Runs the examples as real processes and checks their output.
//!
//! `cargo test` builds the examples; `cargo test --test examples` alone does not.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

mod port;

fn start(name: &str, arguments: &[String]) -> Child {
    start_in(&[], name, arguments)
}

fn start_in(variables: &[(&str, &str)], name: &str, arguments: &[String]) -> Child {
    let tests = std::env::current_exe().unwrap();
    let program: PathBuf = tests.parent().unwrap().parent().unwrap().join("examples").join(name);
    let mut command = Command::new(&program);
    command
        .args(arguments)
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap_or_else(|error| {
        panic!("{}: {error}; build it with `cargo build --examples`", program.display())
    })
}

/// Returns the lines that an example printed. Fails unless the example exits with success.
fn output(child: Child) -> Vec<String> {
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    said.lines().map(str::to_owned).collect()
}

/// Returns an unused address.
fn address() -> String {
    format!("127.0.0.1:{}", port::free_port())
}

/// Runs `size` processes of an example and returns their lines in alphabetical order.
fn job(name: &str, size: usize, arguments: &[String]) -> Vec<String> {
    let children: Vec<Child> = (0..size).map(|_| start(name, arguments)).collect();
    let mut lines: Vec<String> = children.into_iter().flat_map(output).collect();
    lines.sort();
    lines
}

/// An example longer than a screen is no longer read.
#[test]
fn examples_are_short() {
    let mut checked = 0;
    let c = "bindings/c/examples";
    for folder in ["examples", c, &format!("{c}/mpi"), "bindings/python/examples"] {
        let all = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap();
        for path in all.map(|entry| entry.unwrap().path()).filter(|path| path.is_file()) {
            let lines = std::fs::read_to_string(&path).unwrap().lines().count();
            // The C program shows an epoll loop too.
            let most = if path.ends_with("events.c") { 80 } else { 60 };
            assert!(lines <= most, "{}: {lines} lines; at most {most}", path.display());
            checked += 1;
        }
    }
    assert!(checked >= 16);
}

#[test]
fn put_signal() {
    let lines = job("put_signal", 2, &[address()]);
    assert_eq!(
        lines,
        [
            "rank 0 read \"hello from rank 1\"; the counter was 0",
            "rank 1 read \"hello from rank 0\"; the counter was 0",
        ]
    );
}

#[test]
fn tagged() {
    let lines = job("tagged", 2, &[address()]);
    assert_eq!(lines, ["tag 1: first", "tag 2: second", "tag 3: 1048576 bytes, the last is 7"]);
}

#[test]
fn overlap() {
    let lines = job("overlap", 2, &[address()]);
    assert_eq!(
        lines,
        [
            "rank 0: counted 15, 500000 bytes are here",
            "rank 1: before [0, 5, 10], and everything is sent"
        ]
    );
}

#[test]
fn halo_with_one_to_five_processes() {
    for size in 1..=5 {
        let lines = job("halo", size, &[size.to_string(), address()]);
        let mut values: Vec<u64> = (0..size as u64).collect();
        for _ in 0..100 {
            let at = |rank: usize| values[rank % size];
            let next = |rank: usize| (at(rank) + at(rank + size - 1) + at(rank + 1)) % 1_000_003;
            values = (0..size).map(next).collect();
        }
        let expected: Vec<String> = values
            .iter()
            .enumerate()
            .map(|(rank, value)| format!("rank {rank} of {size}: {value} after 100 steps"))
            .collect();
        assert_eq!(lines, expected);
    }
}

#[test]
fn all_to_all_with_three_processes() {
    let place = format!("tcp://{}", address());
    let variables = [
        ("FISHPLATE_RENDEZVOUS", &place[..]),
        ("FISHPLATE_SIZE", "3"),
        ("FISHPLATE_LOCAL_RANK", "7"),
    ];
    let children: Vec<Child> =
        (0..3).map(|_| start_in(&variables, "all_to_all", &["20".into(), "60".into()])).collect();
    let mut lines: Vec<String> = children.into_iter().flat_map(output).collect();
    lines.sort();
    let line = |rank: u64, count: u64| {
        format!("rank {rank}: 3 near, 0 rails to others, local rank 7, counted {count}")
    };
    assert_eq!(lines, [line(0, 60), line(1, 0), line(2, 0)]);
}

#[test]
fn worker() {
    let lines = output(start("worker", &[]));
    let expected = ["thread 0 sees 300", "thread 1 sees 300", "thread 2 sees 300"];
    assert_eq!(lines[..3], expected);
    assert_eq!(lines[3..], ["the worker did all of it: true"]);
}

#[test]
fn device() {
    let lines = job("device", 2, &[address()]);
    let rank = |rank| format!("rank {rank}: 524288 of 1048576 bytes are the other's");
    assert_eq!(lines, [rank(0), rank(1)]);
}

#[test]
fn ring() {
    assert_eq!(output(start("ring", &[])), ["1000000 numbers in order, their sum is 499999500000"]);
}

#[test]
fn matcher() {
    let lines = output(start("matcher", &[]));
    let expected =
        ["0x10 from 4 goes to receive 2", "0x10 from 3 goes to receive 1", "0x200 from 5 waits"];
    assert_eq!(lines[..3], expected);
    assert_eq!(lines[3..], ["receive 3 finds 0x200 from 5"]);
}
