//! Finds what makes the transport slow, limited or unusable on this machine, and suggests remedies.
//! Each check has one finding.
//!
//! Reads files, creates and removes its own objects, and changes nothing else.

mod limits;
mod system;
mod transport;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::json;

use super::args::DoctorArgs;
use super::failure::{Failure, Outcome};
use super::report::{self, SCHEMA_VERSION};

/// Exit codes: `FAILS` if a check fails, `WARNS` if there are only warnings.
const FAILS: u8 = 1;
const WARNS: u8 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Pass,
    /// The transport works, but could be faster or larger.
    Warn,
    /// The transport does not work.
    Fail,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Level::Pass => "PASS",
            Level::Warn => "WARN",
            Level::Fail => "FAIL",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Finding {
    check: &'static str,
    level: Level,
    found: String,
    /// Empty if no remedy is needed.
    remedy: String,
}

impl Finding {
    fn pass(check: &'static str, found: impl Into<String>) -> Finding {
        Finding { check, level: Level::Pass, found: found.into(), remedy: String::new() }
    }

    fn warn(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { check, level: Level::Warn, found: found.into(), remedy: remedy.into() }
    }

    fn fail(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { check, level: Level::Fail, found: found.into(), remedy: remedy.into() }
    }
}

struct Root(PathBuf);

impl Root {
    /// `None` if the file cannot be read.
    fn line(&self, path: impl AsRef<Path>) -> Option<String> {
        let text = fs::read_to_string(self.path(path)).ok()?;
        Some(text.lines().next().unwrap_or("").trim().to_owned())
    }

    fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.0.join(path)
    }

    /// Returns the sorted names in a folder. Returns no names if there is no such folder.
    fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.path(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into()).collect();
        names.sort();
        names
    }
}

/// The exit code is 0 if all checks pass.
pub fn run(args: &DoctorArgs) -> Outcome<ExitCode> {
    let root = Root(args.root.clone());
    if !root.path("proc").is_dir() {
        return Err(Failure::usage(format!(
            "--root {}: no folder proc there; name a folder that has proc and sys of a machine",
            args.root.display()
        )));
    }
    let mut findings = limits::check();
    findings.extend(system::check(&root));
    findings.extend(transport::check());
    let worst = findings.iter().map(|finding| finding.level).max().unwrap_or(Level::Pass);
    report::print(&if args.json { as_json(&findings, worst)? } else { as_text(&findings) })?;
    Ok(match worst {
        Level::Pass => ExitCode::SUCCESS,
        Level::Warn => ExitCode::from(WARNS),
        Level::Fail => ExitCode::from(FAILS),
    })
}

fn as_text(findings: &[Finding]) -> String {
    let mut text = String::new();
    for Finding { check, level, found, remedy } in findings {
        text += &format!("{}  {check:<12} {found}\n", level.name());
        if !remedy.is_empty() {
            text += &format!("      {:<12} -> {remedy}\n", "");
        }
    }
    text
}

fn as_json(findings: &[Finding], worst: Level) -> Outcome<String> {
    let all: Vec<_> = findings
        .iter()
        .map(|Finding { check, level, found, remedy }| {
            json!({ "check": check, "level": level.name(), "found": found, "remedy": remedy })
        })
        .collect();
    let whole = json!({ "schema_version": SCHEMA_VERSION, "level": worst.name(), "findings": all });
    serde_json::to_string_pretty(&whole)
        .map(|text| text + "\n")
        .map_err(|error| Failure::run(format!("cannot write JSON: {error}")))
}
