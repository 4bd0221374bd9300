//! Device memory: each of two processes puts into the other's device memory, then signals in host
//! memory. Without `cuda:N` or `hip:N` host memory replaces device memory, so no GPU is needed. Run
//! it twice: `cargo run --example device -- HOST:PORT [cuda:N]`.

use fishplate::{Cmp, Job, Node, Notice, Signal};
use std::{env::args, error::Error, time::Duration};

const LEN: usize = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let timeout = Duration::from_secs(20);
    let place = args().nth(1).unwrap_or("127.0.0.1:7117".into());
    let device = args().nth(2).unwrap_or("stand-in".into());
    let mut job = Job::join(place, 2, timeout)?;
    let mut node = Node::builder().gpu(device.parse()?).open()?;
    let peer = node.connect(job.exchange(node.address())?)?;
    let (words, from, into) = (node.alloc(64)?, node.alloc_device(LEN)?, node.alloc_device(LEN)?);
    let their_words = node.import(peer, job.exchange(node.handle(words)?)?)?;
    let theirs = node.import(peer, job.exchange(node.handle(into)?)?)?;

    // Write only to the second half of the device memory. The first half stays zero.
    node.write_device(from.at(0), &[1 + job.rank() as u8; LEN / 2])?;
    node.write_device(into.at(0), &[0; LEN])?;
    job.barrier_with(|| _ = node.progress())?;
    let arrived = Signal::set(their_words.at(0), 1);
    node.put_signal(from.slice(..LEN / 2), theirs.at(LEN as u64 / 2), arrived, Notice::Silent)?;
    node.wait(words.at(0), Cmp::Eq, 1, Some(peer), timeout)?;

    let mut seen = vec![0; LEN];
    node.read_device(into.at(0), &mut seen)?;
    let theirs = seen.iter().filter(|&&byte| byte == 2 - job.rank() as u8).count();
    println!("rank {}: {theirs} of {LEN} bytes are the other's", job.rank());
    job.barrier_with(|| _ = node.progress())?;
    Ok(node.close(timeout)?)
}
