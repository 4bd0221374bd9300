//! Two processes: each writes to the other, then signals. Run it twice, on one host or on two:
//! `cargo run --example put_signal -- HOST:PORT`, where HOST is the host of the process that starts
//! first.

use fishplate::{Cmp, Job, Node, Notice, Signal};
use std::{env::args, error::Error, time::Duration};

fn main() -> Result<(), Box<dyn Error>> {
    let timeout = Duration::from_secs(20);
    let place = args().nth(1).unwrap_or("127.0.0.1:7117".into());
    let mut job = Job::join(place, 2, timeout)?;
    let mut node = Node::builder().open()?;
    let peer = node.connect(job.exchange(node.address())?)?;
    let inbox = node.alloc(4096)?;
    let theirs = node.import(peer, job.exchange(node.handle(inbox)?)?)?;

    let hello = format!("hello from rank {}", job.rank());
    let arrived = Signal::set(theirs.at(0), 1);
    node.put_signal(hello.as_bytes(), theirs.at(64), arrived, Notice::Silent)?;
    node.wait(inbox.at(0), Cmp::Eq, 1, Some(peer), timeout)?;
    let before = node.fetch_add(theirs.at(8), 5, timeout)?;

    let mut said = vec![0; hello.len()];
    node.read(inbox.at(64), &mut said)?;
    let said = String::from_utf8_lossy(&said);
    println!("rank {} read {said:?}; the counter was {before}", job.rank());
    job.barrier_with(|| _ = node.progress())?;
    Ok(node.close(timeout)?)
}
