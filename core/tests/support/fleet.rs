//! Several engines on one simulated fabric, each connected to every other (and to itself), driven in turn by one thread.

use fishplate_core::engine::{Config, Engine, Joint};
use fishplate_core::mem::{LocalId, Peer, PeerId, RailId, RemoteId};
use fishplate_core::rail::sim::{Dials, Packet, Sim, SimRail};
use fishplate_core::rail::{Rail, Rails};

use super::{memory, region};

/// A node's end of a rail of a fabric that is never freed.
pub type End = SimRail<'static, 'static>;

/// One engine of a fleet. Peer `n` is node `n`.
pub struct Node<R: Rail, const RAILS: usize> {
    pub engine: Engine<'static, R, RAILS>,
    pub peers: Vec<PeerId>,
    /// What it sends from, and what others write to.
    pub source: LocalId,
    pub target: LocalId,
    /// The targets of all nodes, imported.
    pub remotes: Vec<RemoteId>,
}

pub fn fabric(nodes: u16, rails: u16, packets: usize, dials: Dials, seed: u64) -> &'static Sim<'static> {
    let packets = Box::leak(vec![Packet::EMPTY; packets].into_boxed_slice());
    Box::leak(Box::new(Sim::new(packets, nodes, rails, dials, seed).unwrap()))
}

/// Engines on a fabric; `wrap` makes a rail of each node's end.
pub fn fleet<R: Rail, const RAILS: usize>(
    sim: &'static Sim<'static>,
    nodes: u16,
    config: Config,
    size: usize,
    mut wrap: impl FnMut(u16, u16, End) -> R,
) -> Vec<Node<R, RAILS>> {
    let rails = |node| -> [R; RAILS] {
        std::array::from_fn(|rail| wrap(node, rail as u16, attached(sim, node, rail as u16, nodes)))
    };
    join((0..nodes).map(rails).collect(), config, size, 0)
}

/// The end of a node on a rail of the fabric, attached to those of all nodes.
fn attached(sim: &'static Sim<'static>, node: u16, rail: u16, nodes: u16) -> End {
    let mut end = sim.endpoint(node, rail);
    for peer in 0..nodes {
        end.attach(Peer(peer), peer).unwrap();
    }
    end
}

/// Engines on plain ends of fewer rails than they have room for.
pub fn few<const RAILS: usize>(
    nodes: u16,
    count: u16,
    dials: Dials,
    config: Config,
    size: usize,
    seed: u64,
) -> Vec<Node<End, RAILS>> {
    let sim = fabric(nodes, count, 64, dials, seed);
    let rails = |node| {
        let mut rails = Rails::<End, RAILS>::new();
        for rail in 0..count {
            assert!(rails.push(attached(sim, node, rail, nodes)).is_ok());
        }
        rails
    };
    join((0..nodes).map(rails).collect(), config, size, 0)
}

/// Engines on plain ends that count the rails of the fabric from different ones on: node `n` from rail `n`.
pub fn crossed<const RAILS: usize>(
    nodes: u16,
    dials: Dials,
    config: Config,
    size: usize,
    seed: u64,
) -> Vec<Node<End, RAILS>> {
    let sim = fabric(nodes, RAILS as u16, 64, dials, seed);
    let rails = |node| -> [End; RAILS] {
        std::array::from_fn(|rail| attached(sim, node, (rail as u16 + node) % RAILS as u16, nodes))
    };
    join((0..nodes).map(rails).collect(), config, size, 1)
}

/// Engines over the rails of each node, which are attached to each other: node `n` is everyone's `Peer(n)`, itself included. Node `n`
/// counts rails from `n * shift` on. All have met when it returns.
pub fn join<R: Rail, const RAILS: usize>(
    rails: Vec<impl Into<Rails<R, RAILS>>>,
    config: Config,
    size: usize,
    shift: usize,
) -> Vec<Node<R, RAILS>> {
    let nodes = rails.len();
    let mut fleet: Vec<Node<R, RAILS>> = rails
        .into_iter()
        .enumerate()
        .map(|(node, rails)| {
            let config = Config { seed: node as u64, ..config };
            let rails = rails.into();
            let count = rails.len();
            let mut engine = Engine::new(config, rails, memory(&config, nodes, 64)).unwrap();
            let peers: Vec<_> = (0..nodes).map(|_| engine.reserve_peer().unwrap()).collect();
            for (other, &peer) in peers.iter().enumerate() {
                let theirs = |rail: usize| (rail + (node + (count - 1) * other) * shift) % count;
                let joint = |rail| Joint {
                    ours: RailId(rail as u8),
                    theirs: theirs(rail) as u8,
                    max_message: usize::MAX,
                };
                engine.join_peer(peer, &(0..count).map(joint).collect::<Vec<_>>(), None).unwrap();
            }
            let source = engine.register(region(size)).unwrap();
            let target = engine.register(region(size)).unwrap();
            Node { engine, peers, source, target, remotes: vec![] }
        })
        .collect();
    for to in 0..nodes {
        let mut handle = [0; 512];
        let len = fleet[to].engine.export(fleet[to].target, &mut handle).unwrap();
        for node in &mut fleet {
            let remote = node.engine.import(node.peers[to], &handle[..len]).unwrap();
            node.remotes.push(remote);
        }
    }
    turn_until(&mut fleet, "all have met", |fleet| {
        fleet.iter().all(|node| node.peers.iter().all(|&peer| node.engine.has_answered(peer) == Ok(true)))
    });
    fleet
}

/// A fleet on plain ends.
pub fn plain<const RAILS: usize>(
    nodes: u16,
    dials: Dials,
    config: Config,
    size: usize,
    seed: u64,
) -> (&'static Sim<'static>, Vec<Node<End, RAILS>>) {
    let sim = fabric(nodes, RAILS as u16, 64, dials, seed);
    (sim, fleet(sim, nodes, config, size, |_, _, end| end))
}

/// One pass of every node.
pub fn turn<R: Rail, const RAILS: usize>(fleet: &mut [Node<R, RAILS>]) {
    for node in fleet {
        node.engine.progress();
    }
}

/// Passes of every node until `ready`, or says what did not happen.
pub fn turn_until<R: Rail, const RAILS: usize>(
    fleet: &mut [Node<R, RAILS>],
    what: &str,
    mut ready: impl FnMut(&mut [Node<R, RAILS>]) -> bool,
) {
    for _ in 0..200_000 {
        if ready(fleet) {
            return;
        }
        turn(fleet);
    }
    let stats: Vec<_> = fleet.iter().map(|node| node.engine.stats()).collect();
    panic!("{what}: not after 200000 turns; {stats:?}");
}
