//! Any number of processes, on one host or several. In each round every process writes to every
//! other one, signals, adds to a counter of rank 0 and sends a tagged message. It checks the data
//! that it receives. Start it with a launcher, such as `mpirun -n 4 all_to_all ROUNDS SECONDS
//! [INTERFACE,..]`, or several times with FISHPLATE_RENDEZVOUS=tcp://HOST:PORT and FISHPLATE_SIZE.

use fishplate::{Cmp, Job, Node, Notice, Signal, config::Settings, core::engine::tag::Tag};
use std::{env::args, error::Error, fmt::Display, time::Duration};

/// Returns the bytes that `from` sends to `to` in a round.
fn bytes(from: usize, to: usize, round: u64, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u64 * 7 + round * 31 + (from * 8 + to) as u64) as u8).collect()
}

/// Says which rank an error is about.
fn of<E: Display>(rank: usize) -> impl Fn(E) -> String {
    move |error| format!("rank {rank}: {error}")
}

fn main() -> Result<(), Box<dyn Error>> {
    let given: Vec<String> = args().skip(1).collect();
    let [rounds, seconds, nics @ ..] = &given[..] else { return Err("say ROUNDS SECONDS".into()) };
    let (rounds, timeout): (u64, _) = (rounds.parse()?, Duration::from_secs(seconds.parse()?));
    let interfaces = nics.iter().flat_map(|names| names.split(',')).map(String::from).collect();
    let mut job = Job::from_env(timeout)?;
    let mut node = Node::builder().settings(Settings { interfaces, ..Settings::DEFAULT }).open()?;
    let (me, size) = (job.rank(), job.size());
    let addresses = job.allgather(node.address())?;
    let peers = addresses.iter().map(|to| node.connect(to)).collect::<Result<Vec<_>, _>>()?;
    // Layout: two slots per process, then one signal word per process, then the counter.
    let slot = |from: usize, round: u64| (2 * from as u64 + round % 2) * 4096;
    let word = |from: usize| size as u64 * 8192 + from as u64 * 8;
    let memory = node.alloc(word(size + 1) as usize)?;
    let handles = job.allgather(node.handle(memory)?)?;
    let imports = (0..size).map(|rank| node.import(peers[rank], &handles[rank]).map_err(of(rank)));
    let there = imports.collect::<Result<Vec<_>, _>>()?;

    for round in 1..=rounds {
        // Every tenth message is long: its receiver reads it from the sender.
        let message = |from, to| bytes(from, to, round, if round % 10 == 0 { 100_000 } else { 64 });
        for (to, &peer) in peers.iter().enumerate() {
            let signal = Signal::add(there[to].at(word(me)), 1);
            let place = there[to].at(slot(me, round));
            node.put_signal(&bytes(me, to, round, 3000)[..], place, signal, Notice::Silent)
                .map_err(of(to))?;
            node.send(peer, round, &message(me, to)[..], Notice::Silent).map_err(of(to))?;
        }
        node.fetch_add(there[0].at(word(size)), 1, timeout).map_err(of(0))?;
        for (from, &peer) in peers.iter().enumerate() {
            node.wait(memory.at(word(from)), Cmp::Ge, round, Some(peer), timeout)
                .map_err(of(from))?;
            let (mut put, mut sent) = (vec![0; 3000], vec![0; 100_000]);
            node.read(memory.at(slot(from, round)), &mut put)?;
            let got =
                node.recv(Some(peer), round, Tag::ZERO, &mut sent, timeout).map_err(of(from))?;
            let len = got.len as usize;
            assert!(put == bytes(from, me, round, 3000), "rank {me}: wrong bytes of rank {from}");
            assert!(sent[..len] == message(from, me), "rank {me}: wrong message of rank {from}");
        }
    }
    node.quiet_all(timeout)?;
    let reach = peers.iter().map(|&peer| node.reach(peer)).collect::<Result<Vec<_>, _>>()?;
    job.barrier_with(|| _ = node.progress())?;
    let near = reach.iter().filter(|reach| reach.shared_memory).count();
    let far: usize = reach.iter().map(|reach| reach.fabric).sum();
    let count = node.load(memory.at(word(size)))?;
    let host = job.local_rank().map_or(String::new(), |rank| format!("local rank {rank}, "));
    println!("rank {me}: {near} near, {far} rails to others, {host}counted {count}");
    Ok(node.close(timeout)?)
}
