//! Any number of processes, on one host or several: in each round every process writes to every
//! other one, signals, adds to a counter of rank 0, and sends a tagged message; and checks what it
//! gets. Start it SIZE times: `... --example all_to_all -- SIZE HOST:PORT [ROUNDS [INTERFACE,..]]`.

use fishplate::config::Settings;
use fishplate::core::engine::tag::Tag;
use fishplate::{Cmp, Node, Notice, Rendezvous, Signal};
use std::{env::args, error::Error, time::Duration};

const LEN: usize = 3000;

/// The bytes that `from` sends to `to` in a round.
fn bytes(from: usize, to: usize, round: u64, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u64 * 7 + round * 31 + (from * 8 + to) as u64) as u8).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let timeout = Duration::from_secs(60);
    let arguments: Vec<String> = args().skip(1).collect();
    let size: usize = arguments.first().ok_or("say how many processes there are")?.parse()?;
    let rounds: u64 = arguments.get(2).map_or(Ok(50), |rounds| rounds.parse())?;
    let interfaces = arguments.get(3).map_or(vec![], |names| names.split(',').map(String::from).collect());
    let mut job = Rendezvous::join(arguments.get(1).ok_or("say where they meet")?, size, timeout)?;
    let mut node = Node::builder().settings(Settings { interfaces, ..Settings::DEFAULT }).open()?;
    let me = job.rank();
    let peers =
        job.allgather(node.address())?.iter().map(|to| node.connect(to)).collect::<Result<Vec<_>, _>>()?;
    // Two slots for each process, then a word of signals for each, then the counter.
    let (slot, words) =
        (|from: usize, round: u64| ((2 * from) as u64 + round % 2) * 4096, size as u64 * 8192);
    let memory = node.alloc(size * 8192 + (size + 1) * 8)?;
    let handles = job.allgather(node.handle(memory)?)?;
    let there = peers
        .iter()
        .zip(&handles)
        .map(|(&peer, handle)| node.import(peer, handle))
        .collect::<Result<Vec<_>, _>>()?;

    for round in 1..=rounds {
        // Every tenth message is long: its receiver reads it from the sender.
        let message = |from, to| bytes(from, to, round, if round % 10 == 0 { 100_000 } else { 64 });
        for to in 0..size {
            let signal = Signal::add(there[to].at(words + 8 * me as u64), 1);
            node.put_signal(
                &bytes(me, to, round, LEN)[..],
                there[to].at(slot(me, round)),
                signal,
                Notice::Silent,
            )?;
            node.send(peers[to], round, &message(me, to)[..], Notice::Silent)?;
        }
        node.fetch_add(there[0].at(words + 8 * size as u64), 1, timeout)?;
        for (from, &peer) in peers.iter().enumerate() {
            node.wait(memory.at(words + 8 * from as u64), Cmp::Ge, round, Some(peer), timeout)?;
            let (mut put, mut sent) = (vec![0; LEN], vec![0; 100_000]);
            node.read(memory.at(slot(from, round)), &mut put)?;
            let len = node.recv(Some(peer), round, Tag::ZERO, &mut sent, timeout)?.len as usize;
            if put != bytes(from, me, round, LEN) || sent[..len] != message(from, me) {
                return Err(format!("rank {me}: wrong data of rank {from} in round {round}").into());
            }
        }
    }
    node.quiet_all(timeout)?;
    job.barrier_with(|| _ = node.progress())?;
    let near = peers.iter().filter(|&&peer| node.reach(peer).is_ok_and(|reach| reach.shared_memory)).count();
    let far: usize = peers.iter().map(|&peer| node.reach(peer).map_or(0, |reach| reach.fabric)).sum();
    let count = if me == 0 { node.load(memory.at(words + 8 * size as u64))? } else { 0 };
    println!("rank {me}: {near} near, {far} rails to others, counted {count}");
    Ok(node.close(timeout)?)
}
