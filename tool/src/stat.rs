//! Prints the counters of running programs: once, or repeatedly with rates. Reads the counter pages
//! of their nodes, so it does not disturb the programs.

use std::io;

use fishplate::counters::{self, GAUGES, NAMES, Snapshot};
use fishplate_core::engine::RailStats;
use serde_json::{Map, Value, json};

use super::args::StatArgs;
use super::failure::{Failure, Outcome};
use super::interrupt;
use super::rails::{GROWING, OneRail};
use super::report::{self, SCHEMA_VERSION};

pub fn run(args: &StatArgs) -> Outcome {
    let mut before = look(args, Failure::usage)?;
    report::print(&written(args, &before, &[])?)?;
    let Some(interval) = args.interval else { return Ok(()) };
    interrupt::watch();
    let mut left = args.count;
    while left != Some(1) {
        interrupt::sleep(interval)?;
        let now = look(args, Failure::run)?;
        report::print(&written(args, &now, &before)?)?;
        before = now;
        left = left.map(|left| left - 1);
    }
    Ok(())
}

/// `fail` creates the failure if there are no counters.
fn look(args: &StatArgs, fail: fn(String) -> Failure) -> Outcome<Vec<Snapshot>> {
    let Some(pid) = args.pid else { return Ok(counters::read_all()) };
    let pages = counters::read(pid).map_err(|error| {
        let remedy = match error.kind() {
            io::ErrorKind::NotFound => "use the id of a running process",
            io::ErrorKind::Unsupported => "use the `fishplate` of the program's own version",
            _ => "run this as its user, or as root",
        };
        fail(format!("cannot read the counters of process {pid}: {error}; {remedy}"))
    })?;
    match pages.is_empty() {
        true => Err(fail(format!(
            "process {pid} has no counters; enable `counters` when it opens its node"
        ))),
        false => Ok(pages),
    }
}

fn written(args: &StatArgs, now: &[Snapshot], before: &[Snapshot]) -> Outcome<String> {
    match (args.json, args.prom) {
        (true, _) => as_json(now),
        (_, true) => Ok(as_prom(now)),
        _ => Ok(as_text(now, before)),
    }
}

fn as_text(now: &[Snapshot], before: &[Snapshot]) -> String {
    let mut text = String::new();
    for page in now {
        text += &format!("process {} node {}\n", page.pid, page.node);
        let earlier = before.iter().find(|one| (one.pid, one.node) == (page.pid, page.node));
        let seconds =
            earlier.map(|one| page.written_ns.saturating_sub(one.written_ns) as f64 / 1e9);
        for (at, (name, value)) in NAMES.iter().zip(page.values).enumerate() {
            text += &format!("  {name:<22} {value:>16}");
            if let (Some(earlier), Some(seconds)) = (earlier, seconds)
                && seconds > 0.0
                && at < NAMES.len() - GAUGES
            {
                text += &format!(
                    " {:>14.0}/s",
                    value.saturating_sub(earlier.values[at]) as f64 / seconds
                );
            }
            text.push('\n');
        }
        for one in of_page(page) {
            if let Some(what) = one.text() {
                text += &format!("  rail {}: {what}\n", one.rail);
            }
        }
    }
    if now.is_empty() {
        text += "no process of this user has counters; enable `counters` when a program opens its \
            node\n";
    }
    text
}

fn as_json(now: &[Snapshot]) -> Outcome<String> {
    let page = |page: &Snapshot| {
        let values = NAMES.iter().zip(page.values);
        let values: Map<String, Value> =
            values.map(|(name, value)| ((*name).into(), value.into())).collect();
        json!({
            "pid": page.pid,
            "node": page.node,
            "written_ns": page.written_ns,
            "counters": values,
            "rails": of_page(page),
        })
    };
    let all: Vec<Value> = now.iter().map(page).collect();
    Ok(json!({ "schema_version": SCHEMA_VERSION, "nodes": all }).to_string() + "\n")
}

fn as_prom(now: &[Snapshot]) -> String {
    let mut text = String::new();
    let mut metric = |name: String, grows: bool, rows: &[(String, u64)]| {
        let (kind, name) = match grows {
            true => ("counter", format!("fishplate_{name}_total")),
            false => ("gauge", format!("fishplate_{name}")),
        };
        text += &format!("# TYPE {name} {kind}\n");
        rows.iter().for_each(|(labels, value)| text += &format!("{name}{{{labels}}} {value}\n"));
    };
    let labels = |page: &Snapshot| format!("pid=\"{}\",node=\"{}\"", page.pid, page.node);
    for (at, name) in NAMES.iter().enumerate() {
        let rows: Vec<_> = now.iter().map(|page| (labels(page), page.values[at])).collect();
        metric(name.to_string(), at < NAMES.len() - GAUGES, &rows);
    }
    for (at, name) in RailStats::NAMES.iter().enumerate() {
        let mut rows = vec![];
        for page in now {
            let row =
                |one: OneRail| (format!("{},rail=\"{}\"", labels(page), one.rail), one.values[at]);
            rows.extend(of_page(page).into_iter().map(row));
        }
        metric(format!("rail_{name}"), at < GROWING, &rows);
    }
    text
}

/// Returns the counters of the libfabric rails, which have the numbers from 1 on.
fn of_page(page: &Snapshot) -> Vec<OneRail> {
    let [.., count] = page.values;
    let all = (0..count).zip(page.rails).skip(1);
    all.map(|(rail, values)| OneRail { rail, values }).collect()
}
