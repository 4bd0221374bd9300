//! Compares a node that has one peer with a node that has 128, over shared memory, in one
//! interleaved run of real processes. Measures half the round trip of an 8-byte put-signal to one
//! peer, and the memory that the silent peers cost.
//!
//! Usage: crowd [ROUNDS]. It starts the other two processes itself.
//!
//! | process | its nodes                                                                |
//! |---------|--------------------------------------------------------------------------|
//! | leader  | `alone`, connected to the partner's first; `crowded`, which has 128 peers |
//! | partner | two, one for each node of the leader                                      |
//! | crowd   | 127, each connected to `crowded`, and silent                              |

use std::process::{Child, Command};
use std::time::{Duration, Instant};
use std::{env, fs};

use fishplate::node::{Fabric, Memory, Remote};
use fishplate::{Cmp, Job, Limits, Node, Notice, PeerId, Signal};

const SILENT: usize = 127;
const TRIPS: u64 = 20_000;
const SOON: Duration = Duration::from_secs(60);

fn main() {
    let role = env::var("CROWD_ROLE").unwrap_or_default();
    let rounds: usize = env::args().nth(1).map_or(15, |rounds| rounds.parse().expect("ROUNDS"));
    let at = env::var("CROWD_AT").unwrap_or_else(|_| {
        let free =
            std::net::TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
        free.expect("a free port").to_string()
    });
    let start = |role: &str| -> Child {
        let mut command = Command::new(env::current_exe().expect("this program"));
        let command = command.env("CROWD_ROLE", role).env("CROWD_AT", &at).arg(rounds.to_string());
        command.spawn().expect("a second process")
    };
    match role.as_str() {
        "" => {
            // The first process to listen is rank 0: here the leader, in a thread.
            let leader = std::thread::spawn({
                let at = at.clone();
                move || Job::join(at, 3, SOON).expect("the others")
            });
            std::thread::sleep(Duration::from_millis(200));
            let others = [start("partner"), start("crowd")];
            lead(leader.join().expect("the rendezvous"), rounds);
            for mut other in others {
                assert!(other.wait().expect("its end").success());
            }
        }
        "partner" => pair(Job::join(at, 3, SOON).expect("the leader"), rounds),
        _ => crowd(Job::join(at, 3, SOON).expect("the leader")),
    }
}

fn open(peers: u16) -> Node {
    let limits = Limits { peers, ..Limits::DEFAULT };
    Node::builder().fabric(Fabric::Off).limits(limits).open().expect("a node")
}

/// Packs the addresses of a process's nodes, each preceded by its length.
fn pack(nodes: &[Node]) -> Vec<u8> {
    nodes
        .iter()
        .map(Node::address)
        .flat_map(|address| [&[address.len() as u8], &address[..]].concat())
        .collect()
}

fn unpack(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut all = vec![];
    while let Some((&len, rest)) = bytes.split_first() {
        all.push(rest[..len.into()].to_vec());
        bytes = &rest[len.into()..];
    }
    all
}

/// Exchanges addresses, and returns them by role.
fn addresses(job: &mut Job, role: u8, nodes: &[Node]) -> [Vec<Vec<u8>>; 3] {
    let said = job.allgather([&[role], &pack(nodes)[..]].concat()).expect("all addresses");
    let of = |role: u8| unpack(&said.iter().find(|said| said[0] == role).expect("every role")[1..]);
    [of(0), of(1), of(2)]
}

/// Returns the number of open descriptors of this process.
fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").expect("Linux").count()
}

/// Returns this process's resident memory in bytes, shared memory included.
fn resident() -> u64 {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").expect("Linux");
    let line = rollup.lines().find_map(|line| line.strip_prefix("Rss:")).expect("a size");
    1024 * line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number")
}

struct Side {
    node: Node,
    peer: PeerId,
    ours: Memory,
    theirs: Remote,
    trips: u64,
}

/// Connects the nodes of leader and partner. Both drive progress until all are connected.
fn sides(job: &mut Job, nodes: Vec<Node>, theirs: &[Vec<u8>]) -> Vec<Side> {
    let mut nodes = nodes;
    let peers: Vec<PeerId> = nodes
        .iter_mut()
        .zip(theirs)
        .map(|(node, address)| node.connect(address).expect("a peer"))
        .collect();
    let met = |nodes: &[Node]| {
        nodes.iter().zip(&peers).all(|(node, &peer)| node.reach(peer).expect("known").shared_memory)
    };
    let deadline = Instant::now() + SOON;
    while !met(&nodes) {
        assert!(Instant::now() < deadline, "they do not meet");
        nodes.iter_mut().for_each(|node| _ = node.progress());
    }
    let ours: Vec<Memory> =
        nodes.iter_mut().map(|node| node.alloc(4096).expect("memory")).collect();
    let mut handles = vec![job.rank() as u8 + 10];
    for (node, memory) in nodes.iter().zip(&ours) {
        let handle = node.handle(*memory).expect("a handle");
        handles.extend([&(handle.len() as u16).to_le_bytes()[..], &handle].concat());
    }
    let said = job
        .allgather_with(&handles, || nodes.iter_mut().for_each(|node| _ = node.progress()))
        .expect("handles");
    let other = said.iter().find(|said| said.len() > 1 && **said != handles).expect("the other's");
    let mut rest = &other[1..];
    let mut sides = vec![];
    for ((mut node, peer), ours) in nodes.into_iter().zip(peers).zip(ours) {
        let len = u16::from_le_bytes([rest[0], rest[1]]) as usize;
        let theirs = node.import(peer, &rest[2..2 + len]).expect("an import");
        rest = &rest[2 + len..];
        sides.push(Side { node, peer, ours, theirs, trips: 0 });
    }
    sides
}

impl Side {
    fn say(&mut self) {
        let signal = Signal::set(self.theirs.at(0), self.trips);
        let bytes = self.ours.slice(64..72);
        self.node.put_signal(bytes, self.theirs.at(64), signal, Notice::Silent).expect("room");
    }

    fn hear(&mut self) {
        self.node
            .wait(self.ours.at(0), Cmp::Eq, self.trips, Some(self.peer), SOON)
            .expect("an answer");
    }

    /// Returns half a round trip in nanoseconds, the mean of one round.
    fn ping(&mut self) -> f64 {
        let begun = Instant::now();
        for _ in 0..TRIPS {
            self.trips += 1;
            self.say();
            self.hear();
        }
        begun.elapsed().as_nanos() as f64 / (2 * TRIPS) as f64
    }

    fn pong(&mut self) {
        for _ in 0..TRIPS {
            self.trips += 1;
            self.hear();
            self.say();
        }
    }
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

fn lead(mut job: Job, rounds: usize) {
    let nodes = vec![open(1), open(SILENT as u16 + 1)];
    let [_, partner, silent] = addresses(&mut job, 0, &nodes);
    let mut sides = sides(&mut job, nodes, &partner);
    let (before, open_before) = (resident(), descriptors());
    let node = &mut sides[1].node;
    let peers: Vec<PeerId> =
        silent.iter().map(|address| node.connect(address).expect("room")).collect();
    let deadline = Instant::now() + SOON;
    while !peers.iter().all(|&peer| node.reach(peer).expect("known").shared_memory) {
        assert!(Instant::now() < deadline, "the crowd does not come");
        node.progress();
    }
    let idle = (resident() - before) / SILENT as u64;
    let open = (descriptors() - open_before) / SILENT;
    job.barrier_with(|| sides.iter_mut().for_each(|side| _ = side.node.progress())).expect("all");
    let (mut alone, mut crowded, mut ratios) = (vec![], vec![], vec![]);
    for round in 0..rounds + 2 {
        let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        let mut took = [0.0; 2];
        for side in order {
            took[side] = sides[side].ping();
        }
        // The first rounds warm up.
        if round >= 2 {
            alone.push(took[0]);
            crowded.push(took[1]);
            ratios.push(took[1] / took[0]);
        }
    }
    println!("one idle peer of {}: {idle} bytes, {open} descriptors", SILENT + 1);
    println!("half round trip of 8 bytes, one of one:  {:6.1} ns", median(alone));
    println!("half round trip of 8 bytes, one of {}: {:6.1} ns", SILENT + 1, median(crowded));
    println!("ratio, median of {rounds} rounds: {:.3}", median(ratios));
    job.barrier_with(|| sides.iter_mut().for_each(|side| _ = side.node.progress())).expect("all");
}

fn pair(mut job: Job, rounds: usize) {
    let nodes = vec![open(1), open(1)];
    let [leader, ..] = addresses(&mut job, 1, &nodes);
    let mut sides = sides(&mut job, nodes, &leader);
    job.barrier_with(|| sides.iter_mut().for_each(|side| _ = side.node.progress())).expect("all");
    for round in 0..rounds + 2 {
        for side in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
            sides[side].pong();
        }
    }
    job.barrier_with(|| sides.iter_mut().for_each(|side| _ = side.node.progress())).expect("all");
}

fn crowd(mut job: Job) {
    let mut nodes: Vec<Node> = (0..SILENT).map(|_| open(1)).collect();
    let [leader, ..] = addresses(&mut job, 2, &nodes);
    nodes.iter_mut().for_each(|node| _ = node.connect(&leader[1]).expect("the leader"));
    let mut meet = || {
        nodes.iter_mut().for_each(|node| _ = node.progress());
        std::thread::sleep(Duration::from_micros(100));
    };
    job.allgather_with(&[], &mut meet).expect("handles");
    job.barrier_with(&mut meet).expect("all");
    // From here on this process is silent, and sleeps except in the rendezvous.
    job.barrier_with(|| {}).expect("all");
}
