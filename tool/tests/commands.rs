//! Runs the command lines of `commands.txt`, valid and invalid ones, and compares their exit status
//! and output.
//!
//! A block of the file has `$ ` and the line for the shell, then `? ` and the status. Lines of
//! standard output follow after `> `, and lines of standard error after `! `. `#` stands for
//! figures and values that depend on the machine. Names of sockets begin with `@fishplate-`. With
//! `BLESS=1` the test rewrites the file. Lines that write files do so in `$TMPDIR`.

use std::fmt::Write as _;
use std::path::Path;

mod command;
use command::{shell, text};

#[test]
fn every_command_line_prints_what_is_written_down() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/commands.txt");
    let wanted = std::fs::read_to_string(&path).expect("the file of command lines");
    let lines: Vec<&str> = wanted.lines().filter_map(|line| line.strip_prefix("$ ")).collect();
    assert!(lines.len() >= 75, "{} command lines", lines.len());
    let mut found = String::new();
    for line in &lines {
        let _ = writeln!(found, "{}", block(line));
    }
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, found).expect("the file can be written");
        return;
    }
    let blocks = |text: &str| text.split("\n\n").map(str::to_owned).collect::<Vec<_>>();
    for (wanted, found) in blocks(&wanted).iter().zip(blocks(&found)) {
        assert_eq!(*wanted, found, "\nwanted:\n{wanted}\nfound:\n{found}");
    }
}

/// Fields of rows that depend on the machine and its load, in addition to fractions.
const MACHINE: [&str; 4] = ["pin", "pss_bytes", "repeats", "floor_unsteady"];

/// Runs a command line, and formats its block.
fn block(line: &str) -> String {
    // Names a libfabric that does not exist, so that lines that need it have the same output
    // everywhere.
    // Sockets have other names in each run, because runs on one machine share these names.
    let (written, used) = ("@fishplate-", format!("@fishplate-{}-", std::process::id()));
    let mut shell = shell(&line.replace(written, &used));
    shell
        .env("FISHPLATE_LIBFABRIC", "/nowhere/libfabric.so.1")
        .env("TMPDIR", env!("CARGO_TARGET_TMPDIR"));
    let output = shell.output().unwrap();
    let status = output.status.code().expect("no signal ends it");
    let mut block = format!("$ {line}\n? {status}\n");
    for (mark, bytes) in [('>', &output.stdout), ('!', &output.stderr)] {
        for line in text(bytes)
            .replace(&used, written)
            .lines()
            .filter(|line| !line.starts_with("# floor moved"))
        {
            let _ = writeln!(block, "{}", format!("{mark} {}", plain(line)).trim_end());
        }
    }
    block
}

/// Returns the line without the parts that differ between runs or machines.
fn plain(line: &str) -> String {
    if let Ok(serde_json::Value::Object(row)) = serde_json::from_str(line) {
        let field = |(name, value): (&String, &serde_json::Value)| match value {
            serde_json::Value::Number(number) if number.is_f64() => format!("{name}=#"),
            _ if MACHINE.contains(&name.as_str()) => format!("{name}=#"),
            serde_json::Value::Object(fields) => {
                format!("{name}={{{}}}", fields.keys().cloned().collect::<Vec<_>>().join(","))
            }
            value => format!("{name}={value}"),
        };
        return row.iter().map(field).collect::<Vec<_>>().join(" ");
    }
    // A row of CSV: six fields are known.
    if line.matches(',').count() == 23 && line.starts_with(|c: char| c.is_ascii_digit()) {
        return line.split(',').take(6).collect::<Vec<_>>().join(",") + ",#";
    }
    // A row of a job: five fields are known.
    if ["pairs ", "ring "].iter().any(|pattern| line.trim_start().starts_with(pattern)) {
        return line.split_whitespace().take(5).collect::<Vec<_>>().join(" ") + " #";
    }
    // A row of tag matching: five fields are known.
    if line.starts_with("1,match,") {
        return line.split(',').take(5).collect::<Vec<_>>().join(",") + ",#";
    }
    let words: Vec<&str> = line.split_whitespace().collect();
    match &words[..] {
        // A row of a table: size, iterations, figures.
        [size, iters, figures @ ..]
            if figures.len() >= 11 && size.starts_with(|c: char| c.is_ascii_digit()) =>
        {
            format!("{size} {iters} #")
        }
        _ => {
            let end = [" pin=", " clock=", " build=", "it may use "]
                .iter()
                .filter_map(|mark| line.find(mark))
                .min();
            line[..end.unwrap_or(line.len())].replace(env!("CARGO_PKG_VERSION"), "VERSION")
        }
    }
}
