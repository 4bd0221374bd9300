//! Several engines on one simulated fabric. Each engine is connected to all engines, including
//! itself, and one thread drives them in turn.

use fishplate_core::engine::protocol::MatchLimits;
use fishplate_core::engine::{Config, Engine, Joint};
use fishplate_core::mem::{LocalId, Peer, PeerId, RailId, RemoteId};
use fishplate_core::op::AmoSet;
use fishplate_core::rail::sim::{Dials, Packet, Sim, SimRail};
use fishplate_core::rail::{Caps, Order, Rail, Rails};

use super::tap::{Tap, Verb, shared};
use super::{Random, failover, leak, memory, region, scope};

/// A node's endpoint on a rail of a fabric that is never freed.
pub type End = SimRail<'static, 'static>;

/// An engine of a fleet. Peer `n` is node `n`.
pub struct Node<R: Rail, const RAILS: usize> {
    pub engine: Engine<'static, R, RAILS>,
    pub peers: Vec<PeerId>,
    /// The source region, and the region that other nodes write to.
    pub source: LocalId,
    pub target: LocalId,
    /// The imported target regions of all nodes.
    pub remotes: Vec<RemoteId>,
}

pub fn fabric(
    nodes: u16,
    rails: u16,
    packets: usize,
    dials: Dials,
    seed: u64,
) -> &'static Sim<'static> {
    let sim = Sim::new(leak(Packet::EMPTY, packets), nodes, rails, dials, seed).unwrap();
    scope::leak_one(sim)
}

/// Creates engines on a fabric. `wrap` wraps each endpoint in a rail.
pub fn fleet<R: Rail, const RAILS: usize>(
    sim: &'static Sim<'static>,
    nodes: u16,
    config: Config,
    size: usize,
    wrap: impl FnMut(u16, u16, End) -> R,
) -> Vec<Node<R, RAILS>> {
    prepared(sim, nodes, config, size, wrap, |_| ())
}

/// Like [`fleet`]. `prepare` is called for each engine before it connects.
pub fn prepared<R: Rail, const RAILS: usize>(
    sim: &'static Sim<'static>,
    nodes: u16,
    config: Config,
    size: usize,
    mut wrap: impl FnMut(u16, u16, End) -> R,
    prepare: impl Fn(&mut Engine<'static, R, RAILS>),
) -> Vec<Node<R, RAILS>> {
    let rails = |node| -> [R; RAILS] {
        std::array::from_fn(|rail| wrap(node, rail as u16, attached(sim, node, rail as u16, nodes)))
    };
    join_prepared((0..nodes).map(rails).collect(), config, size, alike, |_| None, prepare)
}

/// Returns a node's endpoint on a rail, attached to the endpoints of all nodes.
fn attached(sim: &'static Sim<'static>, node: u16, rail: u16, nodes: u16) -> End {
    let mut end = sim.endpoint(node, rail);
    for peer in 0..nodes {
        end.attach(Peer(peer), peer).unwrap();
    }
    end
}

/// Creates engines with `count` rails, fewer than their maximum `RAILS`.
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
    join((0..nodes).map(rails).collect(), config, size, alike, |_| None)
}

/// Creates engines that number the fabric's rails differently: node `n` starts with rail `n`.
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
    let joints = |node: usize, other: usize, rails: &[End]| {
        let theirs = |rail| (rail + node + (RAILS - 1) * other) % RAILS;
        (0..rails.len()).map(|rail| joint(rail, theirs(rail), usize::MAX)).collect()
    };
    join((0..nodes).map(rails).collect(), config, size, joints, |_| None)
}

/// Returns the joint of rail `ours` with the peer's rail `theirs`.
pub fn joint(ours: usize, theirs: usize, max_message: usize) -> Joint {
    Joint { ours: RailId(ours as u8), theirs: theirs as u8, max_message }
}

/// Returns joints that pair rails with equal numbers.
pub fn alike<R>(_: usize, _: usize, rails: &[R]) -> Vec<Joint> {
    (0..rails.len()).map(|rail| joint(rail, rail, usize::MAX)).collect()
}

/// Creates engines over each node's rails, which must be attached to each other. Node `n` is
/// `Peer(n)` of every node, including its own. `joints` returns how a node's rails reach the rails
/// of another node. `takes` returns a node's limits of tagged messages. On return all engines are
/// connected.
pub fn join<R: Rail, const RAILS: usize>(
    rails: Vec<impl Into<Rails<R, RAILS>>>,
    config: Config,
    size: usize,
    joints: impl Fn(usize, usize, &[R]) -> Vec<Joint>,
    takes: impl Fn(usize) -> Option<MatchLimits>,
) -> Vec<Node<R, RAILS>> {
    join_prepared(rails, config, size, joints, takes, |_| ())
}

/// Like [`join`]. `prepare` is called for each engine before it connects.
pub fn join_prepared<R: Rail, const RAILS: usize>(
    rails: Vec<impl Into<Rails<R, RAILS>>>,
    config: Config,
    size: usize,
    joints: impl Fn(usize, usize, &[R]) -> Vec<Joint>,
    takes: impl Fn(usize) -> Option<MatchLimits>,
    prepare: impl Fn(&mut Engine<'static, R, RAILS>),
) -> Vec<Node<R, RAILS>> {
    let nodes = rails.len();
    let mut fleet: Vec<Node<R, RAILS>> = rails
        .into_iter()
        .enumerate()
        .map(|(node, rails)| {
            let config = Config { seed: node as u64, ..config };
            let rails = rails.into();
            let joints: Vec<_> = (0..nodes).map(|other| joints(node, other, &rails)).collect();
            let mut engine = Engine::new(config, rails, memory(&config, nodes, 64)).unwrap();
            prepare(&mut engine);
            let peers: Vec<_> = (0..nodes).map(|_| engine.reserve_peer().unwrap()).collect();
            for (other, (&peer, joints)) in peers.iter().zip(&joints).enumerate() {
                engine.join_peer(peer, joints, takes(other)).unwrap();
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
    turn_until(&mut fleet, "all are connected", |fleet| {
        fleet
            .iter()
            .all(|node| node.peers.iter().all(|&peer| node.engine.has_answered(peer) == Ok(true)))
    });
    fleet
}

/// Creates engines with failover over `count` rails. With `closes`, a fence closes the whole
/// endpoint of a rail. `wrap` wraps the endpoint of each rail. Endpoints on the same rail of the
/// fabric have the same limits.
#[expect(clippy::too_many_arguments, reason = "a fleet in its parts")]
pub fn lasting<R: Rail, const RAILS: usize>(
    sim: &'static Sim<'static>,
    nodes: u16,
    count: u16,
    closes: bool,
    config: Config,
    size: usize,
    wrap: impl Fn(u16, End) -> R,
    prepare: impl Fn(&mut Engine<'static, R, RAILS>),
) -> Vec<Node<R, RAILS>> {
    let rails = |node| {
        let mut rails = Rails::<R, RAILS>::new();
        for rail in 0..count {
            let end = attached(sim, node, fabric_rail(node, rail, count), nodes);
            let end = if closes { end.with_closing_fence() } else { end };
            assert!(rails.push(wrap(rail, end)).is_ok());
        }
        rails
    };
    let joints = |node: usize, other: usize, rails: &[R]| {
        let theirs = |rail| (rail + node + (rails.len() - 1) * other) % rails.len();
        let most = |rail: usize| rails[rail].caps().max_message;
        (0..rails.len()).map(|rail| joint(rail, theirs(rail), most(theirs(rail)))).collect()
    };
    let prepare = |engine: &mut Engine<'static, R, RAILS>| {
        engine.attach_failover(failover(&config, nodes.into())).unwrap();
        prepare(engine);
    };
    join_prepared((0..nodes).map(rails).collect(), config, size, joints, |_| None, prepare)
}

/// Returns the fabric's number for a node's rail. Each node numbers the rails differently.
pub fn fabric_rail(node: u16, ours: u16, count: u16) -> u16 {
    (ours + node) % count
}

/// Creates a fleet on unwrapped endpoints.
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

/// The capabilities that the rails of a [`mixed`] fleet have.
pub const KINDS: [fn(Caps) -> Caps; 4] = [
    |caps| caps,
    |caps| Caps { max_message: 128, inject: 0, ..caps },
    |caps| Caps { max_message: 160, max_rma: 24, inject: 8, ..caps },
    |caps| Caps { max_message: 200, max_rma: 1000, inject: 32, ..caps },
];

/// Creates engines with different rails. Each has some of the rails of one fabric, in its own
/// order, and shares at least one with every other engine. The two ends of a rail have different
/// length limits, and some rails preserve order. A post longer than either end's limit fails the
/// test.
pub fn mixed<const RAILS: usize>(
    nodes: u16,
    config: Config,
    size: usize,
    seed: u64,
    takes: impl Fn(usize) -> Option<MatchLimits>,
) -> Vec<Node<Tap<End>, RAILS>> {
    const FABRIC: u16 = 4;
    let mut random = Random(!seed);
    let sim = fabric(nodes, FABRIC, 64, Dials::WILD, seed);
    let common = random.below(FABRIC.into()) as u16;
    for rail in 0..FABRIC {
        if random.below(2) == 0 {
            sim.set_dials(rail, Dials { ordered: true, ..Dials::CALM });
        }
    }
    // For each node: the fabric rails that it uses, each with the index in `KINDS` of its
    // capabilities.
    let plan: Vec<Vec<(u16, usize)>> = (0..nodes)
        .map(|_| {
            let mut rails: Vec<u16> = (0..FABRIC).filter(|&rail| rail == common).collect();
            for rail in (0..FABRIC).filter(|&rail| rail != common) {
                if random.below(2) == 0 {
                    rails.insert(random.below(rails.len() as u64 + 1) as usize, rail);
                }
            }
            rails.into_iter().map(|rail| (rail, random.below(4) as usize)).collect()
        })
        .collect();
    let most = |node: usize, at: usize| KINDS[plan[node][at].1](END).max_message;
    let joints = |node: usize, other: usize| -> Vec<Joint> {
        let there = |rail| plan[other].iter().position(|&(theirs, _)| theirs == rail);
        let ours = plan[node].iter().enumerate();
        ours.filter_map(|(at, &(rail, _))| {
            there(rail).map(|there| joint(at, there, most(other, there)))
        })
        .collect()
    };
    let rails = |node: u16| {
        let mut rails = Rails::<_, RAILS>::new();
        for (at, &(rail, kind)) in plan[node as usize].iter().enumerate() {
            let control = shared();
            let takes: Vec<_> =
                (0..nodes).map(|other| joints(node as usize, other as usize)).collect();
            let takes: Vec<_> = takes
                .iter()
                .map(|joints| {
                    joints
                        .iter()
                        .find(|joint| joint.ours.0 == at as u8)
                        .map_or(0, |j| j.max_message)
                })
                .collect();
            let caps = KINDS[kind](END);
            control.borrow_mut().caps = Some(KINDS[kind]);
            control.borrow_mut().refuse = Some(Box::new(move |post| {
                let most = match post.verb {
                    Verb::Message => caps.max_message.min(takes[post.peer.0 as usize]),
                    _ if takes[post.peer.0 as usize] == 0 => 0,
                    _ => caps.max_rma,
                };
                assert!(
                    post.len <= most,
                    "seed {seed}: {:?} of {} bytes, {most} fit",
                    post.verb,
                    post.len
                );
                None
            }));
            assert!(rails.push(Tap::new(attached(sim, node, rail, nodes), at, &control)).is_ok());
        }
        rails
    };
    let joints = |node: usize, other: usize, _: &[Tap<End>]| joints(node, other);
    join((0..nodes).map(rails).collect(), config, size, joints, takes)
}

/// The capabilities of an unwrapped endpoint.
const END: Caps = Caps {
    max_message: 256,
    max_rma: 1 << 16,
    inject: 64,
    data_bytes: 4,
    order: Order::None,
    native_atomics: AmoSet::NONE,
    depth: 64,
    fresh: false,
    fences: true,
};

/// Makes one pass of every node.
pub fn turn<R: Rail, const RAILS: usize>(fleet: &mut [Node<R, RAILS>]) {
    for node in fleet {
        node.engine.progress();
    }
}

/// Makes passes of every node until `ready` returns true. Panics with the state if that takes too
/// long.
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
