//! Two processes with workers: while rank 0 computes, its worker answers rank 1, which counts in
//! memory of rank 0 and sends it a long message. Run it twice.

use fishplate::core::engine::tag::Tag;
use fishplate::{Job, Node, Notice, worker::Options};
use std::{env::args, error::Error, thread, time::Duration};

fn main() -> Result<(), Box<dyn Error>> {
    let timeout = Duration::from_secs(20);
    let mut job = Job::join(args().nth(1).unwrap_or("127.0.0.1:7119".into()), 2, timeout)?;
    let mut node = Node::builder().worker(Options::default()).open()?;
    let peer = node.connect(job.exchange(node.address())?)?;
    let memory = node.alloc(1 << 20)?;
    let theirs = node.import(peer, job.exchange(&node.handle(memory)?)?)?;

    if job.rank() == 0 {
        let request = node.post_recv(Some(peer), 1, Tag::ZERO, memory.slice(64..), 0)?;
        job.barrier_with(|| ())?;
        // Stands for a second of work that does not touch the node.
        thread::sleep(Duration::from_secs(1));
        let status = node.test_recv(request)?.ok_or("nothing has arrived meanwhile")?;
        println!(
            "rank 0: counted {}, {} bytes are here",
            node.load(memory.at(0))?,
            status.delivered
        );
    } else {
        job.barrier_with(|| ())?;
        let values: Vec<u64> =
            (0..3).map(|_| node.fetch_add(theirs.at(0), 5, timeout)).collect::<Result<_, _>>()?;
        node.send(peer, 1, memory.slice(..500_000), Notice::Silent)?;
        node.quiet(peer, timeout)?;
        println!("rank 1: before {values:?}, and everything is sent");
    }
    job.barrier_with(|| ())?;
    Ok(node.close(timeout)?)
}
