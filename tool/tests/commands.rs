//! Runs the valid and invalid command lines of `commands.txt`. Compares their exit status and
//! output with the file.
//!
//! A block of the file begins with `$ ` and the command line. `? ` and the exit status follow, then
//! the lines of standard output after `> ` and of standard error after `! `. `#` stands for figures
//! and values that depend on the machine. Names of sockets begin with `@fishplate-`. With `BLESS=1`
//! the test rewrites the file. Command lines write files in `$TMPDIR`.

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

/// Fields that depend on the machine and its load, in addition to fields with fractions.
const MACHINE: [&str; 4] = ["pin", "pss_bytes", "repeats", "floor_unsteady"];

/// Runs a command line, and formats its block.
fn block(line: &str) -> String {
    // Names a libfabric that does not exist, so that commands that need libfabric print the same
    // everywhere.
    // Socket names differ in each run, because concurrent runs on one machine share abstract names.
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
            .filter(|line| !line.starts_with("# floor changed"))
        {
            let _ = writeln!(block, "{}", format!("{mark} {}", plain(line)).trim_end());
        }
    }
    block
}

/// Returns a line of output without the parts that differ between runs or machines.
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
    // A row of CSV. Keeps the first six fields.
    if line.matches(',').count() == 23 && line.starts_with(|c: char| c.is_ascii_digit()) {
        return line.split(',').take(6).collect::<Vec<_>>().join(",") + ",#";
    }
    // A row of a job. Keeps the first five fields.
    if ["pairs ", "ring "].iter().any(|pattern| line.trim_start().starts_with(pattern)) {
        return line.split_whitespace().take(5).collect::<Vec<_>>().join(" ") + " #";
    }
    // A row of a job as CSV. Keeps the first nine fields.
    if line.starts_with("1,job,") {
        return line.split(',').take(9).collect::<Vec<_>>().join(",") + ",#";
    }
    // A row of tag matching. Keeps the first five fields.
    if line.starts_with("1,match,") {
        return line.split(',').take(5).collect::<Vec<_>>().join(",") + ",#";
    }
    let words: Vec<&str> = line.split_whitespace().collect();
    match &words[..] {
        // A row of a table. Keeps the size and the iterations.
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
