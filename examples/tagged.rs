//! Two processes exchange tagged messages. Short ones are received in another order than they were
//! sent. A long one is read by the receiver from the sender's memory. Run it twice.

use fishplate::core::engine::tag::Tag;
use fishplate::{Job, Node, Notice};
use std::{env::args, error::Error, time::Duration};

fn main() -> Result<(), Box<dyn Error>> {
    let timeout = Duration::from_secs(20);
    let mut job = Job::join(args().nth(1).unwrap_or("127.0.0.1:7118".into()), 2, timeout)?;
    let mut node = Node::builder().open()?;
    let peer = node.connect(job.exchange(node.address())?)?;

    if job.rank() == 0 {
        let long = node.alloc(1 << 20)?;
        node.write(long.at(0), &vec![7; long.len()])?;
        node.send(peer, 1, b"first", Notice::Silent)?;
        node.send(peer, 2, b"second", Notice::Silent)?;
        node.send(peer, 3, long.slice(..), Notice::Silent)?;
    } else {
        let mut text = [0; 16];
        for tag in [2, 1] {
            let message = node.recv(Some(peer), tag, Tag::ZERO, &mut text, timeout)?;
            println!("tag {tag}: {}", String::from_utf8_lossy(&text[..message.len as usize]));
        }
        let long = node.alloc(1 << 20)?;
        let request = node.post_recv(None, 3, Tag::ZERO, long.slice(..), 0)?;
        let status = node.wait_recv(request, timeout)?;
        let mut last = [0];
        node.read(long.at(long.len() as u64 - 1), &mut last)?;
        println!("tag 3: {} bytes, the last is {}", status.delivered, last[0]);
    }
    job.barrier_with(|| _ = node.progress())?;
    Ok(node.close(timeout)?)
}
