//! Posting: cuts operations into posts, numbers them and chooses rails. The operations of a stream
//! are posted in the order of issue.
//!
//! A rejected post changes nothing and is tried again in the next pass. A number is taken only when
//! a rail accepts the post that carries it, so no hole stays unfilled.

use core::ptr::NonNull;

use crate::error::{OpError, PeerError, PostError};
use crate::mem::{Peer, RailId, Untrusted};
use crate::op::Fault;
use crate::rail::{Local, Posted, Rail, Remote};

use crate::sync::seq::{Seq, truncate};

use super::failover::Sent;
use super::list::NONE;
use super::load::{LONG, Split, ahead};
use super::pending::OpKind;
use super::post_tag::{GENERATION_MASK, Owner, PostTag, STREAM_POST_MAX};
use super::stream::KEPT;
use super::wire::{Body, HEAD_MAX, Message};
use super::{Engine, RailPolicy, State};

pub(super) enum Blocked {
    /// The window is full. Posting continues after an acknowledgement.
    Window,
    /// A fence or an atomic waits until everything earlier is acknowledged.
    Fence,
    /// A rail executes an atomic. Posting continues after its completion.
    Atomic,
    /// No rail has room. Posting continues in the next pass.
    Rail,
    Budget,
    Refused(RailId, PostError),
    PeerDown,
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    pub(super) fn advance(&mut self, stream: u32) {
        let mut budget = self.state.config.batch.max(4);
        loop {
            let index = self.state.streams[stream as usize].unposted;
            if index == NONE {
                return;
            }
            match self.post_slot(stream, index, &mut budget) {
                Ok(()) => self.state.all_posted(stream, index),
                Err(Blocked::Window | Blocked::Atomic) => return,
                Err(Blocked::Fence) => return self.state.ask(stream),
                Err(Blocked::Rail | Blocked::Budget) => {
                    return self.state.due.push(self.state.streams, stream);
                }
                Err(Blocked::Refused(_, error))
                    if self.state.carry_instead(stream, index, error) => {}
                Err(Blocked::Refused(rail, error)) => {
                    let applied = self.state.streams[stream as usize].in_flight() == 0;
                    let slot = &mut self.state.pending.slots[index as usize];
                    let quiescent = if slot.numbered { applied } else { slot.posts == 0 };
                    slot.fail(Fault::Post(rail, error), quiescent);
                    // The numbers are already acknowledged, so no acknowledgement will arrive for
                    // them.
                    slot.numbered &= !applied;
                    slot.fetch = false;
                    self.state.all_posted(stream, index);
                }
                Err(Blocked::PeerDown) => return,
            }
        }
    }

    pub(super) fn post_inject(&mut self, stream: u32, index: u32) -> Result<(), OpError> {
        let mut budget = 1;
        match self.post_slot(stream, index, &mut budget) {
            Ok(()) => {
                self.state.all_posted(stream, index);
                Ok(())
            }
            Err(Blocked::Refused(rail, error)) => Err(OpError::Rail(rail, error)),
            Err(Blocked::PeerDown) => {
                let peer = self.state.streams[stream as usize].peer;
                Err(self.state.peers[peer as usize].usable().err().unwrap_or(OpError::UnknownPeer))
            }
            Err(_) => {
                // Nothing is in flight, and the caller may try again until there is room.
                self.state.awaits_slot(self.state.streams[stream as usize].peer);
                Err(OpError::Again)
            }
        }
    }

    fn post_slot(&mut self, stream: u32, index: u32, budget: &mut u32) -> Result<(), Blocked> {
        let slot = &self.state.pending.slots[index as usize];
        if slot.fenced {
            if self.state.has_operations_in_flight(stream) {
                return Err(Blocked::Fence);
            }
            self.state.pending.slots[index as usize].fenced = false;
        }
        match self.state.pending.slots[index as usize].kind {
            OpKind::Write => {
                while self.state.pending.slots[index as usize].left != 0 {
                    self.post_piece(stream, index, true, budget)?;
                }
            }
            OpKind::Read => {
                while self.state.pending.slots[index as usize].left != 0 {
                    self.post_piece(stream, index, false, budget)?;
                }
            }
            OpKind::Carry => self.post_carried(stream, index, budget)?,
            OpKind::Fetch => return self.post_fetch(stream, index, budget),
            OpKind::Message => {}
            OpKind::Send => return self.post_send(stream, index),
            OpKind::Atomic => return self.post_native(stream, index),
        }
        match self.state.pending.slots[index as usize].message {
            Some(body) => self.post_numbered(stream, index, body),
            None => Ok(()),
        }
    }

    #[inline]
    pub(super) fn post_piece(
        &mut self,
        stream: u32,
        index: u32,
        write: bool,
        budget: &mut u32,
    ) -> Result<(), Blocked> {
        let state = &mut self.state;
        let s = &state.streams[stream as usize];
        let (peer, word) = (s.peer, s.word(state.mask));
        if write && s.in_flight() >= state.config.window as u64 {
            return Err(Blocked::Window);
        }
        if *budget == 0 {
            return Err(Blocked::Budget);
        }
        *budget -= 1;
        let slot = &state.pending.slots[index as usize];
        let (left, offset, remote, local_region) =
            (slot.left, slot.offset, slot.remote, slot.local_region);
        let (fetch, local_ptr) = (slot.inner, slot.local);
        let Some(local) = NonNull::new(slot.local) else { return Err(Blocked::PeerDown) };
        let inject = local_region == u16::MAX;
        let begun = slot.numbered || slot.posts != 0;
        let mut whole = if inject { left } else { state.piece(peer, left, begun) };
        if state.is_kept(stream) {
            // Failover may move the piece to any joined rail. So the piece must fit all these
            // rails, and they must all reach its memory.
            whole = state.kept_peer(peer).map_or(whole, |kept| whole.min(kept.longest));
            if let Some(rail) = state.unreached(peer, local_region, remote) {
                return Err(Blocked::Refused(rail, PostError::Unsupported));
            }
        }
        let mut tried = if inject { !state.injecting(peer, whole) } else { 0 };
        // `unable` is a rail that does not reach this memory. `full` are rails without room.
        let (mut unable, mut full) = (None, 0);
        let (rail, len, posted) = loop {
            let Some(rail) = state.pick(peer, tried, full, whole) else {
                let able = full != 0 || state.peers[peer as usize].rails & !tried != 0;
                return Err(match unable {
                    Some(rail) if !able => Blocked::Refused(rail, PostError::Unsupported),
                    _ => state.no_room(),
                });
            };
            let mut len = whole.min(state.max_rma[rail]);
            if RAILS > 1 && !inject && state.has_several_rails(peer) {
                len = state.loads.cut(rail, len);
            }
            let desc = state.locals.get(local_region as usize).map_or(0, |local| local.desc[rail]);
            let local = Local { ptr: local, len: len as usize, desc };
            let remote = Remote { key: state.remotes[remote as usize].keys[rail], offset };
            let cx = PostTag { owner: Owner::Op(index), bytes: len as u32 }.pack();
            // SAFETY: both ranges were checked when the operation was submitted. `Region::new`
            // requires that the memory stays valid until the operation ends. An inject is posted
            // only on rails that copy it at once. The remote region may have been released since,
            // so the rail checks it again.
            let result = unsafe {
                match (write, fetch) {
                    (true, _) => {
                        self.rails[rail].post_write(Peer(peer), local, remote, Some(word), cx)
                    }
                    (_, true) => {
                        self.rails[rail].post_rendezvous_read(Peer(peer), local, remote, cx)
                    }
                    _ => self.rails[rail].post_read(Peer(peer), local, remote, cx),
                }
            };
            match result {
                Ok(posted) => break (rail, len, posted),
                Err(PostError::Again) => full |= 1 << rail,
                Err(PostError::Unsupported) => {
                    (tried, unable) = (tried | 1 << rail, Some(RailId(rail as u8)));
                }
                Err(error) => {
                    state.hard_error(peer, rail, error)?;
                    tried |= 1 << rail;
                }
            }
        };
        if write && state.is_kept(stream) {
            state.took = rail as u8;
            let what = Sent::Write { op: index, local: local_ptr, len: len as u32, offset };
            state.keep(stream, what, Untrusted::from_slice(&[]));
        }
        let slot = &mut state.pending.slots[index as usize];
        slot.left -= len;
        slot.offset += len;
        // Wrapping, because a device address is not a pointer into our memory.
        slot.local = slot.local.wrapping_add(len as usize);
        slot.numbered |= write;
        if posted == Posted::Pending {
            slot.posts += 1;
            state.loads.posted(rail, len);
            state.not_waiting(peer, rail);
        }
        if write {
            state.streams[stream as usize].next = state.streams[stream as usize].next.plus(1);
            state.stats.posted += 1;
        }
        Ok(())
    }

    #[inline]
    fn post_numbered(&mut self, stream: u32, index: u32, body: Body) -> Result<(), Blocked> {
        let s = &self.state.streams[stream as usize];
        let (peer, seq, word) = (s.peer, s.next, s.word(self.state.mask));
        if s.in_flight() >= self.state.config.window as u64 {
            return Err(Blocked::Window);
        }
        let slot = &self.state.pending.slots[index as usize];
        let payload = match body {
            // SAFETY: the source was checked when the operation was submitted. `Region::new`
            // requires that it stays valid until the operation ends.
            Body::Signal { data: Some((_, len)), .. } => unsafe {
                Untrusted::new(slot.local, len as usize)
            },
            // SAFETY: only an inject has this body. The inject is posted during the user's call,
            // and its bytes are valid until that call returns.
            Body::Data { .. } => unsafe { Untrusted::new(slot.local, slot.left as usize) },
            _ => Untrusted::from_slice(&[]),
        };
        let owner = Owner::Op(index);
        if self.post_message(stream, peer, word, body, payload, owner)? == Posted::Pending {
            self.state.pending.slots[index as usize].posts += 1;
        }
        if self.state.is_kept(stream) {
            // Injected bytes are valid only during the call.
            let injected = matches!(body, Body::Data { .. });
            let local = if injected { core::ptr::null() } else { payload.as_ptr() };
            let what = Sent::Message { op: index, body, local, len: payload.len() as u32 };
            self.state.keep(
                stream,
                what,
                if injected { payload } else { Untrusted::from_slice(&[]) },
            );
        }
        let slot = &mut self.state.pending.slots[index as usize];
        slot.numbered = true;
        slot.message = None;
        self.state.streams[stream as usize].next = seq.plus(1);
        self.state.stats.posted += 1;
        Ok(())
    }

    /// Sends a message without a number. Returns `false` if no rail has room, or if the peer has
    /// failed. A permanent rejection fails the peer, because the peer waits for this message.
    /// Inlined, so that only the header of this body is encoded.
    #[inline(always)]
    pub(super) fn post_control(&mut self, stream: u32, body: Body) -> bool {
        let s = &self.state.streams[stream as usize];
        let (peer, word) = (s.peer, s.stamp);
        let owner = self.state.control(peer);
        match self.post_message(stream, peer, word, body, Untrusted::from_slice(&[]), owner) {
            Ok(_) => true,
            Err(Blocked::Refused(rail, _)) => {
                self.state.fail_peer(peer, PeerError::Rail(rail));
                false
            }
            Err(_) => false,
        }
    }

    #[inline(always)]
    pub(super) fn post_message(
        &mut self,
        stream: u32,
        peer: u16,
        word: u32,
        body: Body,
        payload: Untrusted<'_>,
        owner: Owner,
    ) -> Result<Posted, Blocked> {
        let s = &self.state.streams[stream as usize];
        // A reply also acknowledges the atomic that it answers. The turn of that atomic ends once
        // the reply is posted.
        let cursor = s.window.expected().plus(matches!(body, Body::Reply { .. }) as u64);
        let mut head = [0; HEAD_MAX];
        let len = Message { context: s.context, word, ack: truncate::<32>(cursor.0), body }
            .encode(&mut head);
        self.post_bytes(stream, peer, &head[..len], payload, owner, cursor)
    }

    #[inline(never)]
    pub(super) fn post_bytes(
        &mut self,
        stream: u32,
        peer: u16,
        head: &[u8],
        payload: Untrusted<'_>,
        owner: Owner,
        cursor: Seq,
    ) -> Result<Posted, Blocked> {
        let state = &mut self.state;
        let bytes = (head.len() + payload.len()) as u32;
        let (mut tried, mut full) = (state.too_short(peer, bytes), 0);
        loop {
            let Some(rail) = state.pick(peer, tried, full, bytes as u64) else {
                return Err(state.no_room());
            };
            match self.rails[rail].post_message(
                Peer(peer),
                head,
                payload,
                PostTag { owner, bytes }.pack(),
            ) {
                Ok(posted) => {
                    if posted == Posted::Pending {
                        state.loads.posted(rail, bytes as u64);
                        if bytes as u64 >= LONG {
                            state.not_waiting(peer, rail);
                        }
                    }
                    let s = &mut state.streams[stream as usize];
                    s.ack_sent = cursor;
                    s.age = 0;
                    if RAILS > 1 {
                        state.took = rail as u8;
                    }
                    return Ok(posted);
                }
                Err(PostError::Again) => full |= 1 << rail,
                Err(error) => {
                    state.hard_error(peer, rail, error)?;
                    tried |= 1 << rail;
                }
            }
        }
    }
}

/// Returns `State::single_max`. `max_rma` is 0 for rails that do not exist.
pub(super) fn single_max(max_rma: &[u64], split: Split) -> u64 {
    let rails = || max_rma.iter().copied().filter(|&most| most != 0);
    let whole = if rails().count() == 1 { u64::MAX } else { split.from.saturating_sub(1) };
    rails().fold(whole.min(STREAM_POST_MAX), u64::min)
}

impl<const RAILS: usize> State<'_, RAILS> {
    /// The rails in `exclude` are not chosen, and those in `full` have refused the post.
    #[inline(always)]
    pub(super) fn pick(&mut self, peer: u16, exclude: u16, full: u16, bytes: u64) -> Option<usize> {
        if RAILS == 1 {
            // A connected peer is reached by at least one rail.
            return ((exclude | full) & 1 == 0).then_some(0);
        }
        let rails = self.peers.get(peer as usize)?.rails;
        self.pick_from(peer, rails & !exclude, full, bytes)
    }

    #[inline(always)]
    pub(super) fn pick_from(
        &mut self,
        peer: u16,
        rails: u16,
        full: u16,
        bytes: u64,
    ) -> Option<usize> {
        if RAILS == 1 {
            return (rails & !full != 0).then_some(0);
        }
        match rails & rails.wrapping_sub(1) {
            0 => (rails & !full != 0).then_some(rails.trailing_zeros() as usize),
            _ => self.pick_of(peer, rails, full, bytes),
        }
    }

    /// Chooses one of several rails. Out of line to keep callers short, and cold so that callers
    /// keep their registers. Returns `None` if no rail has room, or if the post must wait for a
    /// full rail.
    #[cold]
    #[inline(never)]
    fn pick_of(&mut self, peer: u16, rails: u16, full: u16, bytes: u64) -> Option<usize> {
        let (slot, open) = (&mut self.peers[peer as usize], rails & !full);
        if open == 0 {
            return None;
        }
        let rail = match self.config.policy {
            RailPolicy::Fixed => return Some(open.trailing_zeros() as usize),
            RailPolicy::RoundRobin => ahead(open, slot.turn).next()?,
            RailPolicy::LeastOutstanding => {
                let wait = &mut self.pairings[peer as usize].wait;
                self.loads.choose(rails, full, slot.turn, bytes, wait)?
            }
        };
        slot.turn = (rail as u8 + 1) & 15;
        Some(rail)
    }

    /// Ends the wait of other posts for the rail, which has accepted a long post.
    #[inline(always)]
    pub(super) fn not_waiting(&mut self, peer: u16, rail: usize) {
        if RAILS > 1
            && let Some(pairing) = self.pairings.get_mut(peer as usize)
        {
            pairing.wait.end(rail);
        }
    }

    /// Returns the rails that cannot carry a message of this length. It may include rails that do
    /// not reach the peer. With one rail there are none, because the sender already respects the
    /// limit.
    #[inline(always)]
    pub(super) fn too_short(&self, peer: u16, bytes: u32) -> u16 {
        if RAILS == 1 || bytes <= self.shortest {
            0
        } else {
            self.pairings[peer as usize].too_short(bytes)
        }
    }

    pub(super) fn injecting(&self, peer: u16, bytes: u64) -> u16 {
        let copies = |(rail, most): (usize, &u64)| ((*most >= bytes) as u16) << rail;
        let rails = self.peers.get(peer as usize).map_or(0, |slot| slot.rails);
        rails & self.inject.iter().enumerate().map(copies).sum::<u16>()
    }

    #[inline(always)]
    pub(super) fn is_eager(&self, peer: u16, bytes: u64) -> bool {
        let most = |limit: u64| bytes <= limit && bytes > 0;
        most(self.eager as u64) || most(self.config.eager as u64) && most(self.room(peer))
    }

    /// Returns the longest payload of a numbered message to a peer, in bytes.
    pub(super) fn room(&self, peer: u16) -> u64 {
        let longest = self.pairings.get(peer as usize).map_or(0, |pairing| pairing.longest);
        (longest as u64).saturating_sub(HEAD_MAX as u64)
    }

    #[cold]
    pub(super) fn limit_single(&mut self) {
        self.single_max = single_max(&self.max_rma, self.loads.split);
    }

    /// Returns the length of the next piece of an operation, of which some pieces may have `begun`.
    #[inline(always)]
    fn piece(&self, peer: u16, left: u64, begun: bool) -> u64 {
        if RAILS == 1 || !self.has_several_rails(peer) {
            return left;
        }
        self.loads.piece(left, begun)
    }

    #[inline(always)]
    pub(super) fn has_several_rails(&self, peer: u16) -> bool {
        self.peers.get(peer as usize).is_some_and(|slot| slot.rails.count_ones() > 1)
    }

    #[inline]
    pub(super) fn no_room(&mut self) -> Blocked {
        self.stats.refused += 1;
        Blocked::Rail
    }

    /// Fails the operation, the rail, or the peer. Returns `Ok` if other rails may take the post.
    #[cold]
    pub(super) fn hard_error(
        &mut self,
        peer: u16,
        rail: usize,
        error: PostError,
    ) -> Result<(), Blocked> {
        let id = RailId(rail as u8);
        self.stats.failed += 1;
        let of_rail = matches!(error, PostError::Provider(_)) && self.kept_peer(peer).is_some();
        if error != PostError::PeerDown && !of_rail {
            return Err(Blocked::Refused(id, error));
        }
        // A rail that refuses even the first messages was never attached to the peer.
        let first = error == PostError::PeerDown && self.is_meeting(peer);
        let cost = if first { PeerError::Unattached(id) } else { PeerError::Rail(id) };
        self.rail_failed(peer, rail, Fault::Post(id, error), cost);
        if self.peers[peer as usize].state.is_up() { Ok(()) } else { Err(Blocked::PeerDown) }
    }

    #[inline(always)]
    pub(super) fn control(&self, peer: u16) -> Owner {
        Owner::Control(Peer(peer), self.peers[peer as usize].generation & GENERATION_MASK)
    }

    #[inline(always)]
    pub(super) fn is_kept(&self, stream: u32) -> bool {
        RAILS > 1 && self.streams[stream as usize].fence & KEPT != 0
    }

    #[inline]
    fn all_posted(&mut self, stream: u32, index: u32) {
        let s = &mut self.streams[stream as usize];
        let slot = &mut self.pending.slots[index as usize];
        slot.posted = true;
        slot.end = s.next;
        s.unposted = slot.links.next;
        if !slot.numbered {
            slot.acked = true;
            s.ops.remove(&mut self.pending.slots, index);
            s.closing.push(&mut self.pending.slots, index);
            self.end_if_over(index);
        }
    }
}
