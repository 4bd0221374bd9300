//! A ring of processes, each with a part of a field. In each step every process sends its edges to
//! both neighbours with put-signal, then waits for theirs. Start it SIZE times: `cargo run
//! --example halo -- SIZE [HOST:PORT]`.

use fishplate::{Cmp, Job, Node, Notice, Signal};
use std::{env::args, error::Error, time::Duration};

const STEPS: u64 = 100;

fn main() -> Result<(), Box<dyn Error>> {
    let timeout = Duration::from_secs(20);
    let size: usize = args().nth(1).ok_or("say how many processes there are")?.parse()?;
    let mut job = Job::join(args().nth(2).unwrap_or("127.0.0.1:7119".into()), size, timeout)?;
    let mut node = Node::builder().open()?;
    let addresses = job.allgather(node.address())?;
    let rank = job.rank();
    let (left, right) = ((rank + size - 1) % size, (rank + 1) % size);
    let peers = [node.connect(&addresses[left])?, node.connect(&addresses[right])?];

    // Words 0 and 1: the last step received from the left and from the right neighbour. Words 2 to
    // 5: the values from the left and from the right, each with a slot for even and for odd steps.
    let field = node.alloc(64)?;
    let handles = job.allgather(node.handle(field)?)?;
    let there = [node.import(peers[0], &handles[left])?, node.import(peers[1], &handles[right])?];

    let mut value = rank as u64;
    for step in 1..=STEPS {
        for (side, there) in there.iter().enumerate() {
            // This process is the right neighbour of its left neighbour, and vice versa.
            let mine = 1 - side as u64;
            // Alternate between two slots, because a neighbour may be one step behind.
            let edge = there.at(16 + 16 * mine + 8 * (step % 2));
            node.put_signal(
                &value.to_le_bytes(),
                edge,
                Signal::set(there.at(8 * mine), step),
                Notice::Silent,
            )?;
        }
        let mut edges = 0;
        for side in 0..2 {
            node.wait(field.at(8 * side), Cmp::Ge, step, Some(peers[side as usize]), timeout)?;
            edges += node.load(field.at(16 + 16 * side + 8 * (step % 2)))?;
        }
        value += edges;
        value %= 1_000_003;
    }
    println!("rank {rank} of {size}: {value} after {STEPS} steps");
    job.barrier_with(|| _ = node.progress())?;
    Ok(node.close(timeout)?)
}
