//! Reads the JSON lines of a budget run from stdin, and prints one line per path: instructions per
//! repeat, the limit, and whether the path is within the limit. Exits with 1 if a limit is
//! exceeded, a comparison fails, or a path was not measured.

use std::collections::BTreeMap;
use std::io::{self, BufRead};
use std::process::ExitCode;

use fishplate_benches::{AT_MOST, BUDGETS, NO_MORE_THAN};
use serde_json::Value;

fn main() -> io::Result<ExitCode> {
    let mut measured = BTreeMap::new();
    for line in io::stdin().lock().lines() {
        if let Some((path, instructions)) = read(&line?) {
            let repeats = BUDGETS
                .iter()
                .find(|budget| budget.name == path)
                .map_or(1, |budget| budget.repeats);
            measured.insert(path, instructions / repeats as f64);
        }
    }

    let mut failures = 0;
    println!(
        "{:<28} {:>9} {:>9} {:>9} {:>9}",
        "instructions", "measured", "recorded", "limit", "per value"
    );
    for budget in BUDGETS {
        let Some(&now) = measured.get(budget.name) else {
            println!("{:<28} NOT MEASURED", budget.name);
            failures += 1;
            continue;
        };
        let limit = budget.limit.map_or("-".into(), |limit| format!("{limit:.1}"));
        let each =
            if budget.per > 1 { format!("{:.2}", now / budget.per as f64) } else { String::new() };
        let over = budget.limit.is_some_and(|limit| now > limit);
        let verdict = if over { "  OVER" } else { "" };
        println!(
            "{:<28} {now:>9.1} {:>9.1} {limit:>9} {each:>9}{verdict}",
            budget.name, budget.measured
        );
        failures += u32::from(over);
    }
    for (ours, theirs) in NO_MORE_THAN {
        let (Some(a), Some(b)) = (measured.get(*ours), measured.get(*theirs)) else { continue };
        // Allows half an instruction for the benchmark's own loop.
        let more = *a > b + 0.5;
        println!(
            "{ours} {a:.1}, no more than {theirs} {b:.1}: {}",
            if more { "FAILS" } else { "holds" }
        );
        failures += u32::from(more);
    }
    for (ours, factor, other) in AT_MOST {
        let (Some(a), Some(b)) = (measured.get(*ours), measured.get(*other)) else { continue };
        let more = *a > b * factor;
        println!(
            "{ours} {a:.1}, at most {factor} x {other} {b:.1}: {}",
            if more { "FAILS" } else { "holds" }
        );
        failures += u32::from(more);
    }
    Ok(if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Parses a line of gungraun's JSON. Returns the path, which is the name of the benchmark's
/// function or case, and its instruction count.
fn read(line: &str) -> Option<(String, f64)> {
    let row: Value = serde_json::from_str(line).ok()?;
    let metric = row.pointer("/profiles/0/data/total/metrics/Ir/values/new")?;
    let path = match row["id"].as_str() {
        Some(case) if case != "run" => case,
        _ => row["function_name"].as_str()?,
    };
    Some((path.to_owned(), metric.as_f64()?))
}
