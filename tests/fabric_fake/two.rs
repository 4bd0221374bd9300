//! Two engines over a fake network. The first sends to the second.

use fishplate_core::engine::{Config, ContextId, Issued, Notice, Signal};
use fishplate_core::error::OpError;
use fishplate_core::op::{Amo, AmoOp, Outcome, SignalOp, Token};
use fishplate_sys::fabric::FabricRail;
use fishplate_testing::fabric::{Fake, Persona};

use crate::behaviour::fleet::{Node, turn, turn_until};
use crate::behaviour::{Random, read, word, write};
use crate::engines::join;
use crate::fixture::Checked;

pub const CX: ContextId = ContextId(0);
const SIZE: usize = 1 << 20;

/// Two nodes. Node 0 sends to node 1.
pub struct Two<const RAILS: usize> {
    pub nodes: Vec<Node<FabricRail, RAILS>>,
    pub fake: Checked,
}

impl<const RAILS: usize> Two<RAILS> {
    pub fn new(name: &str, persona: Persona, config: Config, seed: u64) -> Self {
        let fake = Fake::new(persona.clone(), seed);
        let nodes = join::<RAILS>(&fake, (name, &persona), seed, 2, config, SIZE);
        Two { nodes, fake: Checked(fake) }
    }

    /// Issues an operation. Retries while there is no room.
    pub fn issue(
        &mut self,
        mut call: impl FnMut(&mut Node<FabricRail, RAILS>) -> Result<Issued, OpError>,
    ) -> Issued {
        for _ in 0..200_000 {
            match call(&mut self.nodes[0]) {
                Ok(issued) => return issued,
                Err(OpError::Again) => turn(&mut self.nodes),
                Err(error) => panic!("{error:?}"),
            }
        }
        panic!("no room after many passes");
    }

    pub fn put(&mut self, from: u64, len: usize, to: u64) {
        self.issue(|node| {
            node.engine.put(CX, node.source.at(from), len, node.remotes[1].at(to), Notice::Silent)
        });
    }

    pub fn put_signal(&mut self, from: u64, len: usize, to: u64, word: u64, value: u64) {
        self.issue(|node| {
            let signal = Signal { at: node.remotes[1].at(word), op: SignalOp::Set, value };
            let (from, to) = (node.source.at(from), node.remotes[1].at(to));
            node.engine.put_signal(CX, from, len, to, signal, Notice::Silent)
        });
    }

    pub fn signal(&mut self, word: u64, op: SignalOp, value: u64) {
        self.issue(|node| {
            let signal = Signal { at: node.remotes[1].at(word), op, value };
            node.engine.signal(CX, signal, Notice::Silent)
        });
    }

    pub fn fetch(&mut self, at: u64, amo: Amo) -> u64 {
        let issued = self.issue(|node| node.engine.fetch(CX, node.remotes[1].at(at), amo, 1));
        self.end(issued).expect("a fetch has a value")
    }

    /// Waits for an operation. Returns its value, or `None` if it failed.
    pub fn end(&mut self, issued: Issued) -> Option<u64> {
        let token: Token = match issued {
            Issued::Done { value } => return Some(value),
            Issued::Pending(token) => token,
        };
        let mut ended = None;
        turn_until(&mut self.nodes, "an operation", |nodes| {
            ended = nodes[0].engine.test(token).expect("its token is valid");
            ended.is_some()
        });
        ended
            .filter(|completion| completion.outcome == Outcome::Done)
            .map(|completion| completion.value)
    }

    pub fn quiet(&mut self) {
        turn_until(&mut self.nodes, "quiet", |nodes| {
            let peer = nodes[0].peers[1];
            nodes[0].engine.is_quiet(CX, peer).expect("the peer has not failed")
        });
    }

    pub fn fill(&mut self, len: usize, seed: u64) -> Vec<u8> {
        let mut random = Random(seed);
        let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        write(&self.nodes[0].engine, self.nodes[0].source.at(0), &bytes);
        bytes
    }

    pub fn there(&self, at: u64, len: usize) -> Vec<u8> {
        read(&self.nodes[1].engine, self.nodes[1].target.at(at), len)
    }

    pub fn word(&self, at: u64) -> u64 {
        word(&self.nodes[1].engine, self.nodes[1].target.at(at))
    }
}

pub fn efa<const RAILS: usize>(config: Config, seed: u64) -> Two<RAILS> {
    Two::new("efa-direct", Persona::efa_direct(), config, seed)
}

pub fn amo(op: AmoOp, width: u8, operand: u64, compare: u64) -> Amo {
    Amo { op, width, operand, compare }
}
