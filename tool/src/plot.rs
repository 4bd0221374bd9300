//! Draws latency and bandwidth by payload size as an SVG picture. The results come from a run
//! (`perf --plot`) or from files that `perf --json` wrote (`fishplate plot`).

mod svg;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::args::PlotArgs;
use super::failure::{Failure, Outcome};
use super::report::Row;

#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    size: f64,
    /// p50 and p99, in nanoseconds.
    latency: Option<[f64; 2]>,
    bytes_per_s: f64,
}

#[derive(Clone, Debug, PartialEq)]
struct Curve {
    name: String,
    points: Vec<Point>,
}

pub struct Picture {
    path: PathBuf,
    file: File,
}

impl Picture {
    pub fn create(path: &Path) -> Outcome<Self> {
        let file = File::create(path).map_err(|error| {
            Failure::usage(format!("cannot write {}: {error}; choose another file", path.display()))
        })?;
        Ok(Picture { path: path.to_owned(), file })
    }

    pub fn draw_rows(self, rows: &[Row]) -> Outcome {
        let mut curves = vec![];
        for row in rows {
            let row = serde_json::to_value(row)
                .map_err(|error| Failure::run(format!("cannot draw a row: {error}")))?;
            add(&mut curves, "", &row);
        }
        self.draw(&curves)
    }

    fn draw(mut self, curves: &[Curve]) -> Outcome {
        self.file
            .write_all(svg::draw(curves).as_bytes())
            .map_err(|error| Failure::run(format!("cannot write {}: {error}", self.path.display())))
    }
}

pub fn run(args: &PlotArgs) -> Outcome {
    let mut curves = vec![];
    for path in &args.results {
        let text = fs::read_to_string(path).map_err(|error| {
            Failure::usage(format!("{}: {error}; name a file of JSON lines", path.display()))
        })?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let prefix = if args.results.len() > 1 { format!("{stem}: ") } else { String::new() };
        let mut rows = 0;
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let row = serde_json::from_str(line).map_err(|error| {
                let at = format!("{} line {}", path.display(), number + 1);
                Failure::usage(format!("{at}: {error}; name a file that perf --json wrote"))
            })?;
            rows += usize::from(add(&mut curves, &prefix, &row));
        }
        if rows == 0 {
            return Err(Failure::usage(format!(
                "{}: no row has a size and a rate; name a file that perf --json wrote",
                path.display()
            )));
        }
    }
    Picture::create(&args.output)?.draw(&curves)
}

/// Adds a row to the curve of its test. Returns whether the row has anything to draw.
fn add(curves: &mut Vec<Curve>, prefix: &str, row: &Value) -> bool {
    let positive =
        |value: &Value| value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
    let (Some(size), Some(bytes_per_s)) = (positive(&row["size"]), positive(&row["bytes_per_s"]))
    else {
        return false;
    };
    let latency = &row["lat_ns"];
    let latency =
        positive(&latency["p50"]).zip(positive(&latency["p99"])).map(|(p50, p99)| [p50, p99]);
    let name = format!("{prefix}{}", describe(row));
    let point = Point { size, latency, bytes_per_s };
    match curves.iter_mut().find(|curve| curve.name == name) {
        Some(curve) => curve.points.push(point),
        None => curves.push(Curve { name, points: vec![point] }),
    }
    true
}

/// Names a curve after the properties that its rows share.
fn describe(row: &Value) -> String {
    let mut name = word(&row["test"]).to_owned();
    if let Some(transport) = row["transport"].as_str() {
        name += &format!(" {transport}");
    }
    match row["rails"].as_u64() {
        Some(0 | 1) | None => {}
        Some(rails) => name += &format!(", {rails} rails"),
    }
    if row["bidirectional"] == true {
        name += ", both directions";
    }
    if row["mode"] == "worker" {
        name += ", worker";
    }
    if let Some(ranks) = row["ranks"].as_u64() {
        name += &format!(", {ranks} ranks {}", word(&row["pattern"]));
    }
    name
}

fn word(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_is_named_by_what_its_rows_share() {
        let name = |text: &str| describe(&serde_json::from_str(text).unwrap());
        assert_eq!(name(r#"{"test":"put","transport":"shm","rails":2}"#), "put shm, 2 rails");
        assert_eq!(name(r#"{"test":"job","ranks":4,"pattern":"ring"}"#), "job, 4 ranks ring");
    }
}
