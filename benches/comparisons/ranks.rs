//! Measures jobs with many processes on one host: start-up time, and memory per rank.
//!
//! Usage: ranks [SIZE...], by default 4, 16 and 64. It starts the processes itself; they find each
//! other in a folder (`file://`). Every rank writes to every other rank and checks the data that it
//! receives.
//!
//! | column | maximum over all ranks of                                                      |
//! |--------|--------------------------------------------------------------------------------|
//! | join   | time from the start of the process until `Job::from_env` returns               |
//! | open   | time until the node is open and has all addresses and handles                  |
//! | first  | time until the first put-signal of the left neighbour has arrived              |
//! | all    | time until the put-signals of all ranks have arrived                           |
//! | memory | share of resident memory (Pss): with the node open, one neighbour, all peers   |

use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, fs};

use fishplate::node::Fabric;
use fishplate::{Cmp, Job, Node, Notice, Signal};

const SOON: Duration = Duration::from_secs(300);
const FIGURES: usize = 7;

fn main() {
    if env::var_os("FISHPLATE_RENDEZVOUS").is_some() {
        return rank();
    }
    let sizes: Vec<usize> = env::args().skip(1).map(|size| size.parse().expect("SIZE")).collect();
    println!(
        "| ranks | join ms | open ms | first ms | all ms | open KiB | one neighbour KiB | all \
         peers KiB |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for size in if sizes.is_empty() { vec![4, 16, 64] } else { sizes } {
        let folder = env::temp_dir().join(format!("fishplate-ranks-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let program = env::current_exe().expect("this program");
        let start = |rank: usize| {
            let mut command = Command::new(&program);
            command.env("FISHPLATE_RENDEZVOUS", format!("file://{}", folder.display()));
            command.env("FISHPLATE_SIZE", size.to_string()).env("FISHPLATE_RANK", rank.to_string());
            command.spawn().expect("a process")
        };
        let children: Vec<_> = (0..size).map(start).collect();
        for mut child in children {
            assert!(child.wait().expect("its end").success());
        }
        assert!(fs::read_dir(&folder).expect("the folder").next().is_none(), "something is left");
        fs::remove_dir(&folder).expect("the folder");
    }
}

/// Returns this process's share of resident memory (Pss), in KiB.
fn resident() -> u64 {
    let text = fs::read_to_string("/proc/self/smaps_rollup").expect("smaps_rollup");
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).expect("Pss");
    line.split_whitespace().next().expect("a number").parse().expect("a number")
}

/// The value that rank `from` writes at rank `to`.
fn word(from: usize, to: usize) -> u64 {
    (from * 1000 + to) as u64 + 1
}

fn rank() {
    let begun = Instant::now();
    let spent = || begun.elapsed().as_micros() as u64;
    let mut job = Job::from_env(SOON).expect("a job");
    let (me, size, joined) = (job.rank(), job.size(), spent());
    let mut node = Node::builder().fabric(Fabric::Off).open().expect("a node");
    let memory = node.alloc(size * 16).expect("memory");
    let addresses = job.allgather(node.address()).expect("addresses");
    let handles = job.allgather(node.handle(memory).expect("a handle")).expect("handles");
    let (opened, bare) = (spent(), resident());

    // The payloads follow the signal words.
    let mut told = vec![false; size];
    let mut peers = vec![None; size];
    let mut tell = |node: &mut Node, to: usize| {
        let peer = *peers[to].get_or_insert_with(|| node.connect(&addresses[to]).expect("a peer"));
        if !std::mem::replace(&mut told[to], true) {
            let there = node.import(peer, &handles[to]).expect("its memory");
            let (at, done) =
                (there.at(8 * (size + me) as u64), Signal::set(there.at(8 * me as u64), 1));
            node.put_signal(&word(me, to).to_le_bytes(), at, done, Notice::Silent).expect("a put");
        }
    };
    let hear = |node: &mut Node, from: usize| {
        node.wait(memory.at(8 * from as u64), Cmp::Eq, 1, None, SOON).expect("a signal");
        assert_eq!(
            node.load(memory.at(8 * (size + from) as u64)),
            Ok(word(from, me)),
            "of rank {from}"
        );
    };
    let (left, right) = ((me + size - 1) % size, (me + 1) % size);
    // Connecting needs both ends, so even ranks start with their right neighbour and odd ranks with
    // their left one.
    for to in if me % 2 == 0 { [right, left] } else { [left, right] } {
        tell(&mut node, to);
    }
    hear(&mut node, left);
    let (first, neighbour) = (spent(), resident());
    job.barrier_with(|| _ = node.progress()).expect("a barrier");
    // In each step the ranks form pairs, so no chain of waiting ranks forms.
    for step in 0..size {
        tell(&mut node, (step + size - me) % size);
    }
    (0..size).for_each(|from| hear(&mut node, from));
    node.quiet_all(SOON).expect("quiet");
    let (all, crowded) = (spent(), resident());
    job.barrier_with(|| _ = node.progress()).expect("a barrier");

    let figures = [joined, opened, first, all, bare, neighbour, crowded];
    let told: Vec<u8> = figures.iter().flat_map(|figure| figure.to_le_bytes()).collect();
    let ranks = job.allgather_with(&told, || _ = node.progress()).expect("figures");
    if me == 0 {
        let of = |rank: &Vec<u8>, at: usize| {
            u64::from_le_bytes(rank[8 * at..8 * at + 8].try_into().expect("8"))
        };
        let most: Vec<u64> = (0..FIGURES)
            .map(|at| ranks.iter().map(|rank| of(rank, at)).max().unwrap_or(0))
            .collect();
        let times: Vec<String> =
            most[..4].iter().map(|&us| format!("{:.1}", us as f64 / 1000.0)).collect();
        let sizes: Vec<String> = most[4..].iter().map(u64::to_string).collect();
        println!("| {size} | {} | {} |", times.join(" | "), sizes.join(" | "));
    }
    node.close(SOON).expect("a good end");
}
