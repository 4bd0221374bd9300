//! Tests [`Node`] as programs use it: over shared memory, over libfabric's tcp, and with itself as
//! peer. These tests run without a worker. `tests/node_worker.rs` runs the same tests with workers.

mod atomics;
mod departed;
mod descriptor;
mod distant;
mod distant_queue;
mod edges;
mod forked;
mod gpu;
mod lent;
mod lives;
mod meeting;
mod misuse;
mod nics;
mod now;
mod parted;
#[path = "../port/mod.rs"]
mod port;
mod queue;
mod rail_events;
mod rails;
mod sleep;
mod unmet;
mod verbs;

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use fishplate::config::Settings;
use fishplate::node::{Builder, Fabric};
use fishplate::worker::Options;
use fishplate::{Node, PeerId};
use fishplate_testing::fabric::Fake;

/// True if nodes have workers.
const WORKER: bool = matches!(env!("CARGO_CRATE_NAME").as_bytes(), b"node_worker");

/// Returns the builder that all tests start from: with a worker if [`WORKER`].
pub(crate) fn builder() -> Builder {
    match WORKER {
        true => Node::builder().worker(Options::default()),
        false => Node::builder(),
    }
}

/// Time limit of each wait.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// The transport between two nodes of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    SharedMemory,
    /// libfabric's tcp, with these numbers of rails at the two ends.
    Tcp(usize, usize),
}

/// Returns all transports that this machine supports.
pub(crate) fn ways() -> Vec<Way> {
    let tcp = tcp(1).open();
    if let Err(error) = &tcp {
        println!("SKIPPED nodes over tcp: {error}");
    }
    let tcp: &[Way] =
        if tcp.is_ok() { &[Way::Tcp(1, 1), Way::Tcp(2, 2), Way::Tcp(1, 2)] } else { &[] };
    [&[Way::SharedMemory][..], tcp].concat()
}

fn tcp(rails: usize) -> Builder {
    let settings = Settings {
        providers: vec!["tcp".into()],
        interfaces: vec!["lo".into(); rails],
        ..Settings::DEFAULT
    };
    builder().settings(settings).fabric(Fabric::Required).shared_memory(false)
}

/// Returns a builder for nodes on these interfaces of a fake provider.
fn fake(provider: &Fake, interfaces: &[&str]) -> Builder {
    let interfaces = interfaces.iter().map(|name| (*name).to_owned()).collect();
    let settings = Settings { providers: vec!["cxi".into()], interfaces, ..Settings::DEFAULT };
    builder().library(provider.library()).settings(settings).shared_memory(false)
}

impl Way {
    fn builder(self, second: bool) -> Builder {
        match self {
            Way::SharedMemory => builder().fabric(Fabric::Off),
            Way::Tcp(first, other) => tcp(if second { other } else { first }),
        }
    }
}

/// One side of a test: a node, and channels to the other side's thread.
pub(crate) struct Side {
    pub(crate) node: Node,
    pub(crate) peer: PeerId,
    /// Rank of this side: 0 or 1.
    pub(crate) rank: usize,
    pub(crate) send: Sender<Vec<u8>>,
    pub(crate) receive: Receiver<Vec<u8>>,
}

impl Side {
    /// Exchanges bytes with the other side. Makes progress meanwhile.
    pub(crate) fn exchange(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.send.send(bytes.to_vec()).expect("the other side is gone");
        loop {
            match self.receive.try_recv() {
                Ok(bytes) => return bytes,
                Err(std::sync::mpsc::TryRecvError::Disconnected) => {
                    panic!("the other side is gone")
                }
                Err(_) => _ = self.node.progress(),
            }
        }
    }
}

/// Runs both sides of a program, each in its own thread.
pub(crate) fn two(
    way: Way,
    change: impl Fn(Builder) -> Builder + Sync,
    program: impl Fn(Side) + Sync,
) {
    let (to_first, from_second) = channel();
    let (to_second, from_first) = channel();
    let ends = [(to_second, from_second), (to_first, from_first)];
    thread::scope(|scope| {
        for (rank, (send, receive)) in ends.into_iter().enumerate() {
            let (change, program) = (&change, &program);
            scope.spawn(move || {
                let mut node = change(way.builder(rank == 1)).open().unwrap();
                send.send(node.address().to_vec()).unwrap();
                let peer = node.connect(receive.recv().unwrap()).unwrap();
                program(Side { node, peer, rank, send, receive });
            });
        }
    });
}
