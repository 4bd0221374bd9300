//! `perf job`: many ranks at once, in every pattern; and ranks that are lost.

use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

mod command;
#[path = "command/schema.rs"]
mod schema;
use command::{fishplate, rows, text};

#[test]
fn every_pattern_delivers_everything_and_its_rows_fit_the_schema() {
    let job = schema::load("job.json");
    for ranks in [2, 5] {
        let patterns = "pairs,one-to-many,many-to-one,all-to-all,ring";
        let line = format!("perf job -N {ranks} -p {patterns} -s 8,100,5K -n 40 --window 4 --check");
        let rows = rows(&line);
        assert_eq!(rows.len(), 15);
        for row in rows {
            schema::check(&job, &row, "row").unwrap();
            let [flows, checked, errors] =
                ["flows", "checked", "errors"].map(|field| row[field].as_u64().unwrap());
            assert_eq!((checked, errors), (40 * flows, 0), "{row}");
        }
    }
}

/// The ranks that a process has started: its children.
fn ranks_of(parent: u32) -> Vec<i32> {
    let path = format!("/proc/{parent}/task/{parent}/children");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

#[test]
fn a_killed_rank_is_named_and_leaves_no_other_behind() {
    let line = "perf job -N 4 -p all-to-all -n 1e12 -T 3600";
    let mut leader = fishplate(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    // The headline is written when all have met.
    std::io::Read::read_exact(leader.stdout.as_mut().unwrap(), &mut [0]).expect("a headline");
    let ranks = ranks_of(leader.id());
    assert_eq!(ranks.len(), 3);
    // SAFETY: a call with plain numbers. The process is a child of a child that still waits for it.
    assert_eq!(unsafe { libc::kill(ranks[1], libc::SIGKILL) }, 0);
    let output = leader.wait_with_output().unwrap();
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    let named = format!("rank 2 (pid {}) was killed by signal 9", ranks[1]);
    assert!(told.contains(&named) && told.lines().count() == 1, "{told}");
    // SAFETY: a call with plain numbers that sends nothing.
    while ranks.iter().any(|&rank| unsafe { libc::kill(rank, 0) } == 0) {
        assert!(Instant::now() < until, "ranks are left behind");
        sleep(Duration::from_millis(1));
    }
}
