//! Two processes that continue while rails between them fail. In each round both write, signal,
//! send a tagged message and fetch a counter. Each checks that no data of the other is lost,
//! repeated or out of order. Start it twice: `... --example outlive -- HOST:PORT ROUNDS
//! [INTERFACE,.. [back]]`. With `back` it waits in the middle and before its last rounds until all
//! rails are in use again.

use fishplate::{Cmp, Job, Node, Notice, Signal, config::Settings, core::engine::tag::Tag};
use std::time::{Duration, Instant};
use std::{env::args, error::Error};

/// Maximum number of rounds that a process is ahead of its checks, and the number of slots that
/// this needs.
const AHEAD: u64 = 16;
const SLOTS: u64 = 64;
const SLOT: u64 = 256 << 10;

/// Returns the bytes that `from` writes or sends in a round. Long ones are striped, or read by the
/// receiver.
fn bytes(from: usize, round: u64, every: u64, long: usize) -> Vec<u8> {
    let len = if round.is_multiple_of(every) { long } else { 1000 };
    (0..len as u64).map(|at| (at * 7 + round * 31 + from as u64 * 8) as u8).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let timeout = Duration::from_secs(60);
    let given: Vec<String> = args().skip(1).collect();
    let [to, rounds, nics @ ..] = &given[..] else { return Err("say HOST:PORT ROUNDS".into()) };
    let rounds: u64 = rounds.parse()?;
    let back = nics.get(1).is_some_and(|word| word == "back");
    let interfaces =
        nics.iter().take(1).flat_map(|names| names.split(',')).map(String::from).collect();
    let mut job = Job::join(to, 2, timeout)?;
    let settings = Settings { interfaces, ..Settings::DEFAULT };
    let mut node = Node::builder().settings(settings).shared_memory(false).failover(true).open()?;
    let (me, it) = (job.rank(), 1 - job.rank());
    let addresses = job.allgather(node.address())?;
    let peer = node.connect(&addresses[it])?;
    let (signals, counter) = (SLOTS * SLOT, SLOTS * SLOT + 8);
    let memory = node.alloc(counter as usize + 8)?;
    let handles = job.allgather(node.handle(memory)?)?;
    let there = node.import(peer, &handles[it])?;

    let (mut stall, mut last) = (Duration::ZERO, Instant::now());
    for round in 1..=rounds + AHEAD {
        if round <= rounds {
            let place = there.at(round % SLOTS * SLOT);
            let signal = Signal::add(there.at(signals), 1);
            node.put_signal(&bytes(me, round, 50, 200_000)[..], place, signal, Notice::Silent)?;
            node.send(peer, 7, &bytes(me, round, 70, 100_000)[..], Notice::Silent)?;
            let before = node.fetch_add(there.at(counter), 1, timeout)?;
            assert_eq!(before + 1, round, "rank {me}: an addition was lost, or applied twice");
        }
        if let Some(check) = round.checked_sub(AHEAD).filter(|&check| check > 0) {
            node.wait(memory.at(signals), Cmp::Ge, check, Some(peer), timeout)?;
            let (mut put, mut sent) = (bytes(it, check, 50, 200_000), vec![0; 100_000]);
            let expected = put.clone();
            node.read(memory.at(check % SLOTS * SLOT), &mut put)?;
            assert!(put == expected, "rank {me}: round {check}: wrong bytes were written");
            let len = node.recv(Some(peer), 7, Tag::ZERO, &mut sent, timeout)?.len as usize;
            assert!(
                sent[..len] == bytes(it, check, 70, 100_000),
                "rank {me}: round {check}: wrong message"
            );
        }
        stall = stall.max(last.elapsed());
        last = Instant::now();
        let tenth = (rounds / 10).max(1);
        if back && (round == 5 * tenth || round == 9 * tenth) {
            let end = Instant::now() + timeout;
            while !node.rail_errors(peer)?.is_empty() {
                assert!(Instant::now() < end, "rank {me}: not back: {:?}", node.rail_errors(peer)?);
                node.peer_error(peer)?;
                node.progress();
            }
        }
        if round % tenth == 0 {
            println!("rank {me}: round {round}");
        }
    }
    node.quiet_all(timeout)?;
    job.barrier_with(|| _ = node.progress())?;
    assert_eq!(node.load(memory.at(signals))?, rounds, "rank {me}: signals lost, or applied twice");
    for error in node.rail_errors(peer)? {
        println!("rank {me}: {error}");
    }
    let stats = node.stats();
    println!(
        "rank {me}: {rounds} rounds, {} rails failed, {} returned, {} posts made again, longest \
         stall {} ms",
        stats.rails_failed,
        stats.rails_returned,
        stats.reposted,
        stall.as_millis()
    );
    job.barrier_with(|| _ = node.progress())?;
    Ok(node.close(timeout)?)
}
