//! Attaches peers on other hosts: at their first use, or when they call.
//!
//! A peer *calls* when its first message arrives. The rail drops that message and reports the call
//! ([`FabricRail::next_caller`](fishplate_sys::fabric::FabricRail::next_caller)). This node then
//! attaches the peer, and its engine greets the peer.
//!
//! A message to a node that has not connected this node yet is lost without a call. So a node that
//! has attached a peer repeats its greeting at growing intervals, until the peer answers.

use std::collections::HashSet;

use fishplate_core::mem::{PeerId, RailId};
use fishplate_sys::clock::monotonic_ns;

use super::Error;
use super::contact::{Contact, Stage, to_ms};
use super::events::Events;
use super::home::NodeEngine;
use super::rail::{NodeRail, NodeSetup};
use super::silent::{Kind, Silent};
use super::{MEETING_PASSES, MEETING_PAUSE};

/// Minimum and maximum time between two greetings of a peer that does not answer, in milliseconds.
const AGAIN: [u16; 2] = [2, 500];

/// Time after the first greeting of a peer, in nanoseconds, during which waits [check
/// often](Peers::hurries) whether to repeat it.
const HURRY: u64 = 100_000_000;

/// Longest interval between two greetings, in milliseconds, up to which a peer that has called
/// counts as a [recent caller](Peers::recent_callers).
const PROMPT: u16 = 256;

/// Maximum number of calls and of peers without an answer that one pass handles.
const ONCE: usize = 32;

/// The peers of a node.
#[derive(Default)]
pub(super) struct Peers {
    /// The peers on this host, and the attached peers on other hosts.
    pub contacts: Vec<Contact>,
    pub silent: Silent,
    /// Attached peers that have not answered yet.
    unanswered: Vec<Unanswered>,
    /// Index in `unanswered` of the peer to check next.
    turn: usize,
    /// Waits check often until this time, in nanoseconds.
    hurry_ns: u64,
    /// `passes` counts the calls of [`is_due`](Self::is_due). From `due_ns` on, peers are due.
    passes: u32,
    due_ns: u64,
    /// Ids of peers that were attached and then disconnected: the latest, and those before. If such
    /// a peer is connected again, it is attached at once, so that it learns of the new attachment.
    parted: [HashSet<u64>; 2],
    /// Whether some peers are not connected yet, or have not answered.
    pub meeting: bool,
    /// Whether some peers on this host are not connected yet.
    pub dials: bool,
    /// Whether the node has been shut down. Peers that call now are attached and closed.
    pub closes: bool,
    pub events: Events,
}

struct Unanswered {
    peer: PeerId,
    /// Bit i is set if rail i reaches the peer.
    rails: u16,
    called: bool,
    /// Time of the next greeting, and interval between that greeting and the one after it, in
    /// milliseconds.
    at: u32,
    pause: u16,
}

impl Peers {
    /// Makes a peer known to the rails.
    pub fn expect(
        &mut self,
        engine: &mut NodeEngine,
        peer: PeerId,
        id: u64,
        kind: Kind,
        addresses: &[&[u8]],
    ) -> Result<(), Error> {
        for (pair, address) in kind.pairs.iter().zip(addresses) {
            if let Some(NodeSetup::Fabric(mut guard)) = engine.rail_mut(pair.ours) {
                guard.inner_mut().expect(peer.peer(), address)?;
            }
        }
        self.silent.add(peer, id, kind);
        if self.parted.iter_mut().any(|ids| ids.remove(&id)) {
            self.attach(engine, peer, false);
        }
        Ok(())
    }

    /// Records that a peer was disconnected. Keeps the `most` latest peers, or up to twice as many.
    pub fn part(&mut self, id: u64, most: usize) {
        let [latest, before] = &mut self.parted;
        if latest.len() >= most {
            *before = std::mem::take(latest);
        }
        latest.insert(id);
    }

    /// Attaches a peer that is connected and not attached. Returns `false` for any other peer.
    #[cold]
    pub fn attach(&mut self, engine: &mut NodeEngine, peer: PeerId, called: bool) -> bool {
        let Some((id, kind)) = self.silent.take(peer) else { return false };
        let joined = join(engine, peer, &kind);
        if joined.is_ok() {
            let rails = kind.pairs.iter().fold(0, |rails, pair| rails | 1 << pair.ours.0);
            let (now, pause) = (monotonic_ns(), AGAIN[0]);
            let at = to_ms(now).wrapping_add(pause.into());
            self.unanswered.push(Unanswered { peer, rails, called, at, pause });
            (self.hurry_ns, self.meeting) = (now.saturating_add(HURRY), true);
            if self.closes {
                // Fails only for peers that have left.
                _ = engine.close_peer(peer);
            }
        }
        let stage = match joined {
            Ok(()) => Stage::over_fabric(kind.pairs.clone()),
            Err(error) => {
                for pair in &kind.pairs {
                    if let Some(NodeSetup::Fabric(mut guard)) = engine.rail_mut(pair.ours) {
                        guard.inner_mut().forget_expected(peer.peer());
                    }
                }
                Stage::failed(error)
            }
        };
        self.contacts.push(Contact::distant(peer, id, kind.limits, stage));
        true
    }

    /// Attaches peers that have called, and greets peers again that are due. Call this with each
    /// pass.
    #[cold]
    pub fn with_pass(&mut self, engine: &mut NodeEngine) {
        if engine.has_call() {
            self.answer_calls(engine);
        }
        if self.is_due() {
            self.greet_again(engine, to_ms(monotonic_ns()));
            self.rest();
        }
    }

    /// Counts a pass. Returns whether unconnected or unanswered peers are due. Reads the clock only
    /// in every [`MEETING_PASSES`]th pass.
    pub fn is_due(&mut self) -> bool {
        self.passes = self.passes.wrapping_add(1);
        self.passes.is_multiple_of(MEETING_PASSES) && monotonic_ns() >= self.due_ns
    }

    /// Records that the due peers were served. They are due again after [`MEETING_PAUSE`].
    pub fn rest(&mut self) {
        self.due_ns = monotonic_ns().saturating_add(MEETING_PAUSE);
    }

    /// Attaches peers that have called, and reports rails that have changed. Never waits.
    #[cold]
    pub fn answer_calls(&mut self, engine: &mut NodeEngine) {
        let mut left = ONCE;
        for rail in 1..=u8::MAX {
            loop {
                let Some(setup) = engine.rail_mut(RailId(rail)) else {
                    // Last, because attaching a peer may change rails too.
                    self.events.report(engine);
                    engine.end_call();
                    return;
                };
                let NodeSetup::Fabric(mut guard) = setup else { break };
                let Some(caller) = guard.inner_mut().next_caller() else { break };
                if let Some(peer) = self.silent.at(caller.0) {
                    self.attach(engine, peer, true);
                }
                left -= 1;
                if left == 0 {
                    return;
                }
            }
        }
    }

    /// Greets peers again that have not answered.
    pub fn greet_again(&mut self, engine: &mut NodeEngine, now_ms: u32) {
        for _ in 0..ONCE.min(self.unanswered.len()) {
            self.turn = if self.turn < self.unanswered.len() { self.turn } else { 0 };
            let waiting = &mut self.unanswered[self.turn];
            let peer = waiting.peer;
            let waits =
                engine.peer_error(peer) == Ok(None) && engine.has_answered(peer) == Ok(false);
            if !waits {
                self.unanswered.swap_remove(self.turn);
                continue;
            }
            self.turn += 1;
            if now_ms.wrapping_sub(waiting.at) > u32::MAX / 2 {
                continue;
            }
            waiting.pause = (2 * waiting.pause).min(AGAIN[1]);
            waiting.at = now_ms.wrapping_add(waiting.pause.into());
            // Repeat the greeting only if some rail has sent the earlier ones. Another rail may be
            // stuck.
            let posted =
                (0..u16::BITS as u8).filter(|rail| waiting.rails >> rail & 1 != 0).all(|rail| {
                    matches!(engine.rail(RailId(rail)), Some(NodeRail::Fabric(guard))
                        if guard.inner().has_posts_to(peer.peer()))
                });
            if !posted {
                engine.call_again(peer);
            }
        }
        self.meeting = self.dials || !self.unanswered.is_empty();
    }

    /// Returns the peers that called recently, and so are expected to answer this node's greeting.
    pub fn recent_callers(&self) -> HashSet<PeerId> {
        let recent = |waiting: &&Unanswered| waiting.called && waiting.pause <= PROMPT;
        self.unanswered.iter().filter(recent).map(|waiting| waiting.peer).collect()
    }

    /// Returns whether a wait must check often for peers that are not connected.
    pub fn hurries(&self) -> bool {
        self.meeting && (self.dials || monotonic_ns() < self.hurry_ns)
    }

    /// Returns the peer with this node id.
    pub fn named(&self, id: u64) -> Option<PeerId> {
        let of_id = |contact: &&Contact| contact.id == id;
        let contact = || self.contacts.iter().find(of_id).map(|contact| contact.peer);
        self.silent.named(id).or_else(contact)
    }

    pub fn find(&self, peer: PeerId) -> Option<&Contact> {
        self.contacts.iter().find(|contact| contact.peer == peer)
    }
}

fn join(engine: &mut NodeEngine, peer: PeerId, kind: &Kind) -> Result<(), Error> {
    engine.set_up_peer(peer)?;
    for pair in &kind.pairs {
        if let Some(NodeSetup::Fabric(mut guard)) = engine.rail_mut(pair.ours) {
            guard.inner_mut().attach_expected(peer.peer())?;
            guard.watch(peer.peer(), None);
        }
    }
    Ok(engine.join_peer(peer, &kind.joints, Some(kind.limits))?)
}
