//! Pushes a tensor of one process into a tensor of another, like `python -m fishplate.sweep --path
//! direct`: rank 0 puts the bytes and signals, and rank 1 answers with a message of one byte.
//!
//! Usage: push HOST:PORT BYTES ROUNDS, twice. Rank 0 prints the median of a round in nanoseconds,
//! without the first tenth of the rounds.

use std::env;
use std::time::{Duration, Instant};

use fishplate::core::engine::tag::Tag;
use fishplate::node::Fabric;
use fishplate::{Cmp, Job, Node, Notice, Signal};

const SOON: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = env::args().collect();
    let [_, place, bytes, rounds] = words.as_slice() else {
        return Err("HOST:PORT BYTES ROUNDS".into());
    };
    let (bytes, rounds): (usize, usize) = (bytes.parse()?, rounds.parse()?);
    let mut job = Job::join(place, 2, SOON)?;
    let mut node = Node::builder().fabric(Fabric::Off).open()?;
    let exchanged = job.exchange(node.address())?;
    let peer = node.connect(exchanged)?;
    let memory = node.alloc(bytes)?;
    let word = node.alloc(8)?;
    let handles = [node.handle(memory)?, node.handle(word)?];
    let mut theirs = vec![];
    for handle in handles {
        let handle = job.exchange(handle)?;
        theirs.push(node.import(peer, handle)?);
    }
    let (mut took, mut answer) = (vec![], [0]);
    for turn in 1..=rounds as u64 {
        if job.rank() == 0 {
            let begun = Instant::now();
            let signal = Signal::set(theirs[1].at(0), turn);
            node.put_signal(memory.slice(0..bytes), theirs[0].at(0), signal, Notice::Silent)?;
            node.recv(Some(peer), 2, Tag::ZERO, &mut answer, SOON)?;
            took.push(begun.elapsed());
        } else {
            node.wait(word.at(0), Cmp::Ge, turn, Some(peer), SOON)?;
            node.send(peer, 2, &[0], Notice::Silent)?;
        }
    }
    if job.rank() == 0 {
        let took = &mut took[rounds / 10..];
        took.sort();
        println!("{}", took[took.len() / 2].as_nanos());
    }
    node.quiet(peer, SOON)?;
    node.close(SOON)?;
    Ok(())
}
