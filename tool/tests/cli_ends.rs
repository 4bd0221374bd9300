//! Tests that a measurement that cannot continue ends by itself. Covers every command over every
//! transport, when either side is killed or exceeds its time limit. The test starts both sides, so
//! that neither side ends only because its parent has ended.

use std::fmt::Write as _;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

mod command;
#[path = "../../tests/port/mod.rs"]
mod port;
use command::{fishplate, run, text};
use port::free_port;

/// Time limit for a side to end after it can notice the reason. Other load may slow it down.
const SOON: Duration = Duration::from_secs(15);

/// Maximum number of pairs of processes at once.
const AT_ONCE: usize = 8;

/// Maximum number of attempts to start two sides. On a busy machine they may not connect within
/// their time limit.
const STARTS: u32 = 5;

/// Held by a running test. The tests run one after the other, because each keeps all processors
/// busy.
static TURN: Mutex<()> = Mutex::new(());

/// The side that is killed or exceeds its time limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Listens,
    Connects,
}

/// One command over one transport.
#[derive(Clone, Debug)]
struct Case {
    words: String,
    /// Whether the sides connect at a TCP port. Otherwise they connect at a path.
    port: bool,
}

fn cases() -> Vec<Case> {
    let mut cases = vec![];
    let mut add = |tests: &[&str], how: &str, port: bool| {
        cases.extend(tests.iter().map(|test| Case { words: format!("{test} {how}"), port }));
    };
    let all = ["put-signal", "put", "put --check", "get", "amo", "tag", "signal-rate", "tag-bw"];
    add(&all, "", false);
    add(&["ring"], "", false);
    add(&all, "--mode worker", false);
    add(&["put-signal", "put", "get", "tag"], "--transport gpu --device host", false);
    let info: Value = serde_json::from_slice(&run("info --json").stdout).expect("info is JSON");
    if info["fabric"]["usable"] == "usable" {
        let tcp = "--transport fabric --provider tcp --interface lo";
        add(&all, tcp, true);
        add(&all, &format!("{tcp} --mode worker"), true);
    } else {
        println!("SKIPPED cases over libfabric: {}", info["fabric"]["usable"]);
    }
    cases
}

/// The two sides of a measurement that never ends by itself.
struct Pair {
    listens: Child,
    connects: Child,
    /// The name of each side in the other side's messages.
    names: [String; 2],
}

impl Pair {
    /// Starts both sides. Returns once they are connected.
    fn start(case: &Case, timeouts: [u32; 2]) -> Result<Self, String> {
        let mut told = String::new();
        for _ in 0..STARTS {
            match Self::try_start(case, timeouts) {
                Ok(pair) => return Ok(pair),
                Err(why) => told = why,
            }
        }
        Err(format!("the two do not meet: {told}"))
    }

    fn try_start(case: &Case, timeouts: [u32; 2]) -> Result<Self, String> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let at = match case.port {
            true => format!("127.0.0.1:{}", free_port()),
            false => path(number).display().to_string(),
        };
        let [theirs, ours] = timeouts;
        let side = |line: String| {
            fishplate(&line)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .expect("the binary starts")
        };
        let listens = side(format!("perf {} --listen {at} -T {theirs}", case.words));
        let mut connects = side(format!("perf {} -n 1e11 --connect {at} -T {ours}", case.words));
        // The connecting side prints the headline once the two are connected.
        let met = connects.stdout.as_mut().unwrap().read_exact(&mut [0]);
        let names = match case.port {
            // The system chooses the port of the connecting side.
            true => ["the process at 127.0.0.1:".into(), format!("the process at {at}")],
            false => [&connects, &listens].map(|child| format!("(pid {})", child.id())),
        };
        let mut pair = Pair { listens, connects, names };
        match met {
            Ok(()) => Ok(pair),
            Err(_) => Err(pair.both()),
        }
    }

    fn side(&mut self, side: Side) -> &mut Child {
        match side {
            Side::Listens => &mut self.listens,
            Side::Connects => &mut self.connects,
        }
    }

    fn name(&self, of: Side) -> &str {
        &self.names[usize::from(of == Side::Listens)]
    }

    fn both(&mut self) -> String {
        let mut told = String::new();
        for side in [Side::Listens, Side::Connects] {
            let output = end(self.side(side)).map_err(|error| text(&error.stderr));
            let _ = write!(told, "{side:?}: {output:?}; ");
        }
        told
    }
}

/// Returns a path in the target's temporary folder that no other process uses.
fn path(number: u32) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("ends-{}-{number}", std::process::id()))
}

/// Returns the output of a side that ends within [`SOON`]. Otherwise kills the side, and returns
/// its output as the error.
fn end(child: &mut Child) -> Result<Output, Output> {
    let deadline = Instant::now() + SOON;
    let status = loop {
        match child.try_wait().expect("a child of this process") {
            Some(status) => break Ok(status),
            None if Instant::now() > deadline => {
                child.kill().expect("a child of this process");
                break Err(child.wait().expect("a child of this process"));
            }
            None => thread::sleep(Duration::from_millis(5)),
        }
    };
    let mut stderr = vec![];
    child.stderr.as_mut().unwrap().read_to_end(&mut stderr).expect("what it said can be read");
    match status {
        Ok(status) => Ok(Output { status, stdout: vec![], stderr }),
        Err(status) => Err(Output { status, stdout: vec![], stderr }),
    }
}

/// Waits until a process measures: until it has used 10 more ticks of CPU time. Returns early if
/// the process has exited or [`SOON`] has passed.
fn until_it_measures(pid: u32) {
    let used = || -> Option<u64> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<&str> = stat[stat.rfind(')')? + 2..].split(' ').collect();
        Some(fields[11..13].iter().filter_map(|ticks| ticks.parse::<u64>().ok()).sum())
    };
    let (Some(before), deadline) = (used(), Instant::now() + SOON) else { return };
    while used().is_some_and(|now| now < before + 10) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(2));
    }
}

/// Checks each case with either side lost, [`AT_ONCE`] at a time. Reports all failures.
fn each(check: impl Fn(&Case, Side) -> Result<(), String> + Sync) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut left: Vec<(Case, Side)> = cases()
        .into_iter()
        .flat_map(|case| [Side::Listens, Side::Connects].map(|side| (case.clone(), side)))
        .collect();
    println!("{} cases", left.len());
    left.reverse();
    let (left, wrong) = (Mutex::new(left), Mutex::new(String::new()));
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let Some((case, side)) = left.lock().unwrap().pop() else { break };
                    if let Err(what) = check(&case, side) {
                        let _ =
                            writeln!(wrong.lock().unwrap(), "{} ({side:?}): {what}", case.words);
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{wrong}");
}

/// Checks that `child` exits with code 1 and an error that contains all of `says`.
fn failed(child: &mut Child, says: &[&str]) -> Result<String, String> {
    let output = end(child).map_err(|late| format!("does not end: {}", text(&late.stderr)))?;
    let told = text(&output.stderr);
    let right = output.status.code() == Some(1)
        && says.iter().all(|part| told.contains(part))
        && !told.contains("panicked");
    if right {
        Ok(told)
    } else {
        Err(format!("{:?}, where {says:?} is due: {told}", output.status))
    }
}

#[test]
fn a_killed_side_ends_the_other_which_names_it() {
    each(|case, side| {
        let mut pair = Pair::start(case, [600, 600])?;
        until_it_measures(pair.connects.id());
        pair.side(side).kill().expect("a child of this process");
        pair.side(side).wait().expect("a child of this process");
        let name = pair.name(side).to_owned();
        let other = if side == Side::Listens { Side::Connects } else { Side::Listens };
        failed(pair.side(other), &["lost ", &name]).map(drop)
    });
}

#[test]
fn a_side_whose_time_is_up_ends_and_so_does_the_other() {
    each(|case, side| {
        let timeouts = if side == Side::Listens { [2, 600] } else { [600, 2] };
        let mut pair = Pair::start(case, timeouts)?;
        let other = if side == Side::Listens { Side::Connects } else { Side::Listens };
        let names = [side, other].map(|side| pair.name(side).to_owned());
        let told = failed(pair.side(side), &["in time", "--timeout", &names[1]]);
        told.and_then(|told| {
            match told.contains("on rail 0") || told.contains(", and operation ") {
                true => Ok(()),
                false => Err(format!("names neither rail nor operation: {told}")),
            }
        })
        .and_then(|()| failed(pair.side(other), &["lost ", &names[0]]).map(drop))
        .inspect_err(|_| drop(pair.both()))
    });
}

#[test]
fn one_process_alone_ends_when_its_time_is_up() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut runs = vec![];
    for transport in ["loopback", "sim"] {
        for test in ["put-signal", "put", "get", "amo", "tag", "signal-rate", "tag-bw"] {
            let line = format!("perf {test} --transport {transport} -n 1e11 -T 1");
            let child = fishplate(&line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
            runs.push((line, child.expect("the binary starts")));
        }
    }
    // Ends all sides before asserting anything.
    let ends: Vec<_> = runs
        .iter_mut()
        .map(|(line, child)| (line, failed(child, &["in time", "--timeout"])))
        .collect();
    for (line, end) in ends {
        assert!(end.is_ok(), "{line}: {end:?}");
    }
}
