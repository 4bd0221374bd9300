//! [`Node`], as programs use it: over shared memory, over libfabric's tcp, and to itself.

mod edges;
mod lives;
mod meeting;
mod misuse;
mod verbs;

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use fishplate::config::Settings;
use fishplate::node::{Builder, Fabric};
use fishplate::{Node, PeerId};
use fishplate_testing::fabric::Fake;

/// Longest wait of a test.
const SOON: Duration = Duration::from_secs(20);

/// How two nodes of a test reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    SharedMemory,
    /// This many rails of libfabric's tcp, at either end.
    Tcp(usize, usize),
}

/// All ways that this machine has.
fn ways() -> Vec<Way> {
    let tcp = tcp(1).open();
    if let Err(error) = &tcp {
        println!("SKIPPED nodes over tcp: {error}");
    }
    let tcp: &[Way] = if tcp.is_ok() { &[Way::Tcp(1, 1), Way::Tcp(2, 2), Way::Tcp(1, 2)] } else { &[] };
    [&[Way::SharedMemory][..], tcp].concat()
}

fn tcp(rails: usize) -> Builder {
    let settings =
        Settings { providers: vec!["tcp".into()], interfaces: vec!["lo".into(); rails], ..Settings::DEFAULT };
    Node::builder().settings(settings).fabric(Fabric::Required).shared_memory(false)
}

/// Over these interfaces of a provider inside the process.
fn fake(provider: &Fake, interfaces: &[&str]) -> Builder {
    let interfaces = interfaces.iter().map(|name| (*name).to_owned()).collect();
    let settings = Settings { providers: vec!["cxi".into()], interfaces, ..Settings::DEFAULT };
    Node::builder().library(provider.library()).settings(settings).shared_memory(false)
}

impl Way {
    fn builder(self, second: bool) -> Builder {
        match self {
            Way::SharedMemory => Node::builder().fabric(Fabric::Off),
            Way::Tcp(first, other) => tcp(if second { other } else { first }),
        }
    }
}

/// What a process of a test has.
struct Side {
    node: Node,
    peer: PeerId,
    /// 0 or 1.
    rank: usize,
    send: Sender<Vec<u8>>,
    receive: Receiver<Vec<u8>>,
}

impl Side {
    /// Swaps bytes with the other side. Makes progress meanwhile.
    fn exchange(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.send.send(bytes.to_vec()).expect("the other side is gone");
        loop {
            match self.receive.try_recv() {
                Ok(bytes) => return bytes,
                Err(std::sync::mpsc::TryRecvError::Disconnected) => panic!("the other side is gone"),
                Err(_) => _ = self.node.progress(),
            }
        }
    }
}

/// Runs both sides of a program, each in a thread of its own.
fn two(way: Way, change: impl Fn(Builder) -> Builder + Sync, program: impl Fn(Side) + Sync) {
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
