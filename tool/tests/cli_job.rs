//! Tests `perf job`: many ranks in every pattern, and ranks that are lost.

use std::net::TcpListener;
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

mod command;
#[path = "command/schema.rs"]
mod schema;
use command::{fishplate, limit, rows, text};

/// Time limit of a run.
const LIMIT: Duration = Duration::from_secs(20);

#[test]
fn every_pattern_delivers_everything_and_its_rows_fit_the_schema() {
    let job = schema::load("job.json");
    for ranks in [2, 5] {
        let patterns = "pairs,one-to-many,many-to-one,all-to-all,ring";
        let line =
            format!("perf job -N {ranks} -p {patterns} -s 8,100,5K -n 40 --window 4 --check");
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

/// Two ranks with different seeds report every message as wrong. These are the messages of the row,
/// and the first message of each flow, which precedes the row.
#[test]
fn wrong_first_messages_are_errors_of_the_first_row() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let line = "perf job -p ring -n 3 --check --json -T 20 --seed";
    let ranks = [0, 1].map(|rank: u32| {
        fishplate(&format!("{line} {rank}"))
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", "2")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    });
    let _limits = [&ranks[0], &ranks[1]].map(|rank| limit(rank.id(), LIMIT));
    let [first, second] = ranks.map(|rank| rank.wait_with_output().unwrap());
    let told = text(&first.stderr) + &text(&second.stderr);
    assert_eq!([first.status.code(), second.status.code()], [Some(1); 2], "{told}");
    let row: serde_json::Value = serde_json::from_str(&text(&first.stdout)).expect(&told);
    assert_eq!(
        (row["flows"].as_u64(), row["errors"].as_u64()),
        (Some(2), Some(2 * (3 + 1))),
        "{row}"
    );
}

/// Returns the ranks that a process has started. They are its children.
fn ranks_of(parent: u32) -> Vec<i32> {
    let path = format!("/proc/{parent}/task/{parent}/children");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

#[test]
fn a_killed_rank_is_named_and_leaves_no_other_behind() {
    let line = "perf job -N 4 -p all-to-all -n 1e12 -T 20";
    let mut leader = fishplate(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let limit = limit(leader.id(), LIMIT);
    // The leader prints the headline once all ranks have joined. They connect after that.
    std::io::Read::read_exact(leader.stdout.as_mut().unwrap(), &mut [0]).expect("a headline");
    let ranks = ranks_of(leader.id());
    assert_eq!(ranks.len(), 3);
    // SAFETY: `kill` takes no pointers. The leader is a child of the test, and has not reaped this
    // rank.
    assert_eq!(unsafe { libc::kill(ranks[1], libc::SIGKILL) }, 0);
    let output = leader.wait_with_output().unwrap();
    drop(limit);
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    let named = format!("rank 2 (pid {}) was killed by signal 9", ranks[1]);
    assert!(told.contains(&named) && told.lines().count() == 1, "{told}");
    let until = Instant::now() + Duration::from_secs(20);
    // SAFETY: `kill` takes no pointers, and signal 0 only checks that the process exists.
    while ranks.iter().any(|&rank| unsafe { libc::kill(rank, 0) } == 0) {
        assert!(Instant::now() < until, "ranks are left behind");
        sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_rank_that_dies_before_all_have_joined_ends_the_job() {
    let line = "perf job -N 4 -n 1e12 -T 3600";
    let begun = Instant::now();
    let leader = fishplate(line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let ranks = loop {
        let ranks = ranks_of(leader.id());
        // Stops the first rank before it joins, if possible. Waits for the second rank first: the
        // leader starts the second rank only after the first has executed its program, and a
        // stopped process cannot do that.
        if ranks.len() >= 2 {
            // SAFETY: the call takes only numbers, and the leader has not reaped this child yet.
            unsafe { libc::kill(ranks[0], libc::SIGSTOP) };
        }
        if ranks.len() == 3 {
            break ranks;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "the ranks do not start");
    };
    // SAFETY: `kill` takes no pointers, and the leader has not reaped this child yet.
    assert_eq!(unsafe { libc::kill(ranks[1], libc::SIGKILL) }, 0);
    let output = leader.wait_with_output().unwrap();
    let told = text(&output.stderr);
    assert!(begun.elapsed() < Duration::from_secs(60), "{told}");
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains(&format!("rank 2 (pid {}) was killed by signal 9", ranks[1])), "{told}");
}
