//! Two-sided messages: moves payloads from senders to matched receives.
//!
//! Only the waits block, and nothing allocates: all memory is borrowed at
//! [`Engine::attach_matching`], and its size sets every limit. An engine has one matched queue. A
//! message matches in the order of its (context, peer) stream, on any rail.
//!
//! # How a message travels
//!
//! | message | what is sent | the send is done when |
//! |---|---|---|
//! | up to the eager limit, with a credit | *Tagged* with the payload | its bytes are copied |
//! | synchronous, with a credit | *Sync* with the payload, answered by *Fin* | it has matched |
//! | up to 64 bytes, with a grant but no credit | *Short* with the payload | its bytes are copied |
//! | any other | *Rts* alone, answered by *Fin* | the receiver has all it wants |
//!
//! *Rts* describes where the payload is. The receiver reads the payload over all rails. If no rail
//! can read it, the receiver requests *Chunks* with a *Pull*.
//!
//! A *credit* is room at the receiver for one unexpected payload. A stream begins with the number
//! of credits that its receiver configures. A sender without credits keeps the payload and sends
//! only a header. Headers that wait are limited too: a send beyond the limit returns
//! [`OpError::Again`](crate::error::OpError::Again).
//!
//! A receiver doubles a stream's room when more than half of it is in use, or when acknowledgements
//! only return credits. It announces the new room in a *Room* message. The room comes from a pool
//! that all streams share, while it lasts. So messages may be received in any order up to that
//! limit, and a silent peer uses none of the pool. A stream keeps its room until its peer is
//! removed.
//!
//! Beyond the credits, a receiver may have small blocks for short messages. A stream with credits
//! that no longer grow gets a quarter of the remaining blocks at a time, in a Room message.

mod accounts;
mod answers;
mod arrive;
mod config;
mod device;
pub(crate) mod head;
mod lost;
mod next;
mod post;
mod receive;
mod refuse;
mod rendezvous;
mod request;
mod requests;
mod send;
mod short;
mod slot;
mod stock;

pub use config::{MatchConfig, MatchLimits};
pub(crate) use head::FIRST_KIND;
pub use receive::Claimed;
pub(crate) use rendezvous::HINTS;
pub use request::{Cancelled, Destination, Envelope, Received, Request, Status};
pub(crate) use requests::Requests;
pub use send::Payload;
pub(crate) use send::{Caller, Form, SendEnd};
pub use slot::RecvSlot;
pub(crate) use slot::{Sender, Stage};
pub(crate) use stock::Kept;
pub use stock::{Account, BlockSlot, HeaderSlot, SHORT};

use crate::error::AttachError;
use crate::mem::PeerId;
use crate::rail::Rail;

use super::Engine;
use super::table::{PeerSlot, lent};
use super::tag::{MatchStats, Matcher, MatcherConfig, MatcherMemory, PostedSlot};
use stock::{Blocks, Headers, Room};

/// Maximum number of receives that are not hashed while messages match in order.
const LAZILY: u32 = 252;

/// The memory of the protocol, borrowed by the engine, for `S` streams (peers times contexts).
pub struct MatchMemory<'m, const RAILS: usize> {
    /// The matcher's memory: at least one slot for each of `receives`, and at least
    /// [`MatchConfig::unexpected`]`(S)` slots for messages.
    pub matcher: MatcherMemory<'m>,
    /// One slot per receive, until the status of the receive is taken. A
    /// [matched queue](crate::psm) also takes one for each of its sends and claimed messages.
    pub receives: &'m mut [RecvSlot],
    /// One account per stream: `S`.
    pub accounts: &'m mut [Account],
    /// [`MatchConfig::blocks`]`(S)` blocks, then [`MatchConfig::shared_shorts`] short blocks.
    pub blocks: &'m mut [BlockSlot],
    /// [`MatchConfig::block`] bytes for each block that is not short.
    pub block_bytes: &'m mut [u8],
    /// [`SHORT`] bytes for each of [`MatchConfig::shared_shorts`].
    pub short_bytes: &'m mut [u8],
    /// [`MatchConfig::waiting`]`(S)` headers.
    pub headers: &'m mut [HeaderSlot<RAILS>],
    /// Blocks for payloads sent from a slice that wait for their receive, because the send is
    /// synchronous or has no credit. Receives into device memory also use them, for payloads that
    /// arrive in chunks. The last block is reserved for these receives.
    pub outgoing: &'m mut [BlockSlot],
    /// [`MatchConfig::block`] bytes for each block of `outgoing`.
    pub outgoing_bytes: &'m mut [u8],
}

/// Counters of the protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProtocolStats {
    /// Messages sent with their payload.
    pub eager: u64,
    /// Messages sent without their payload, for any reason.
    pub rendezvous: u64,
    /// Messages sent as a header because the receiver had no room; part of `rendezvous`.
    pub credits_exhausted: u64,
    /// Payloads read from the sender's memory, copied from a mapping, or received in chunks.
    pub read: u64,
    /// Payloads received in chunks; part of `read`.
    pub pulled: u64,
    /// Payloads stored until their receive.
    pub kept: u64,
    /// Bytes of the stored payloads.
    pub kept_bytes: u64,
    /// Messages that matched a receive, from peers that the first rail reaches. Includes messages
    /// that were refused while the connection closed.
    pub near: u64,
    /// Counters of the matcher.
    pub matching: MatchStats,
}

pub(crate) struct Protocol<'m, const RAILS: usize> {
    pub matcher: Matcher<'m>,
    pub requests: Requests<'m>,
    pub accounts: &'m mut [Account],
    pub blocks: Blocks<'m>,
    pub headers: Headers<'m, RAILS>,
    pub outgoing: Blocks<'m>,
    pub pulled: rendezvous::Pulled,
    pub reads: u32,
    /// Longest payload that travels in its message, if rails and peer accept it.
    pub eager: u32,
    pub most_eager: u32,
    pub credits: Room,
    pub waiting: Room,
    /// Blocks for short messages that are neither in use nor granted.
    pub shorts: u32,
    /// Maximum number of pieces for device memory that wait here per stream, for puts and for gets
    /// each.
    pub pieces: u8,
    pub stats: ProtocolStats,
}

/// Returns 1 if the first rail reaches the peer.
#[inline(always)]
fn near(peers: &[PeerSlot], peer: u16) -> u64 {
    u64::from(peers[peer as usize].rails & 1)
}

impl<const RAILS: usize> Protocol<'_, RAILS> {
    pub(super) fn at_once(&self) -> u64 {
        self.accounts.iter().map(|account| account.at_once).sum()
    }
}

impl<'m, R: Rail, const RAILS: usize> Engine<'m, R, RAILS> {
    /// Enables tagged messages. Call it once, on both sides, before a peer sends a tagged message.
    /// Without matching, a tagged message violates the protocol and fails the peer. If the two
    /// [`MatchConfig`]s differ, pass the peer's limits to [`join_peer`](Self::join_peer). Slow
    /// path; allocates nothing.
    ///
    /// # Errors
    /// [`AttachError::Memory`] names the memory that is too short. [`AttachError::Config`] names
    /// the value that is out of range, or reports a second call.
    pub fn attach_matching(
        &mut self,
        config: MatchConfig,
        memory: MatchMemory<'m, RAILS>,
    ) -> Result<(), AttachError> {
        let check = |ok: bool, what| if ok { Ok(()) } else { Err(AttachError::Config(what)) };
        let MatchMemory {
            matcher,
            receives,
            accounts,
            blocks,
            block_bytes,
            short_bytes,
            headers,
            outgoing,
            outgoing_bytes,
        } = memory;
        let streams = self.state.peers.len() * self.state.config.contexts as usize;
        let limit = 1 << 24;
        check(self.state.protocol.is_none(), "matching: already attached")?;
        let shared = [config.shared_credits, config.shared_headers, config.shared_shorts];
        check(
            [config.credits, config.headers].iter().chain(&shared).max() <= Some(&limit),
            "matching: credits, headers and each shared_ setting must be at most 2^24",
        )?;
        check(config.headers >= 1, "matching.headers: must be at least 1")?;
        check(config.pieces <= 64, "matching.pieces: must be at most 64")?;
        check(receives.len() < 1 << 31, "matching.receives: must have fewer than 2^31 entries")?;
        lent("matching.accounts (peers x contexts)", accounts.len(), streams)?;
        let shorts = config.shared_shorts as usize;
        let most = config.blocks(streams) + shorts;
        lent("matching.blocks (MatchConfig::blocks plus shared_shorts)", blocks.len(), most)?;
        check(
            short_bytes.len() == shorts * SHORT,
            "matching.short_bytes: must have 64 x shared_shorts bytes",
        )?;
        lent("matching.headers (MatchConfig::waiting)", headers.len(), config.waiting(streams))?;
        check(
            blocks.len() < 1 << 31 && headers.len() < 1 << 31,
            "matching: must have fewer than 2^31 blocks, and fewer than 2^31 headers",
        )?;
        let bytes = |count: usize| count.saturating_mul(config.block());
        lent(
            "matching.block_bytes (MatchConfig::block bytes for each long block)",
            block_bytes.len(),
            bytes(blocks.len() - shorts),
        )?;
        check(
            outgoing.len() < u32::MAX as usize,
            "matching.outgoing: must have fewer than 2^32 - 1 entries",
        )?;
        lent(
            "matching.outgoing_bytes (outgoing x MatchConfig::block)",
            outgoing_bytes.len(),
            bytes(outgoing.len()),
        )?;
        lent("matching.matcher.posted (one per receive)", matcher.posted.len(), receives.len())?;
        lent(
            "matching.matcher.unexpected (MatchConfig::unexpected)",
            matcher.unexpected.len(),
            config.unexpected(streams),
        )?;
        let fits = |rail: &R| rail.caps().max_message >= head::RTS + 16;
        check(
            self.rails.iter().all(fits),
            "rail: must accept messages that hold a request to send",
        )?;
        let matching =
            MatcherConfig { seed: config.seed, lazily: LAZILY, ..MatcherConfig::DEFAULT };
        self.state.protocol = Some(Protocol {
            matcher: Matcher::with_config(matcher, matching)?,
            requests: Requests::new(receives),
            accounts,
            blocks: Blocks::with_short(block_bytes, short_bytes, blocks, config.block()),
            headers: Headers::new(headers),
            outgoing: Blocks::new(outgoing_bytes, outgoing, config.block()),
            pulled: rendezvous::Pulled::EMPTY,
            reads: 0,
            eager: config.eager,
            most_eager: config.eager,
            credits: Room { each: config.credits, left: config.shared_credits },
            waiting: Room { each: config.headers, left: config.shared_headers },
            shorts: config.shared_shorts,
            pieces: config.pieces,
            stats: ProtocolStats::default(),
        });
        for peer in 0..self.state.reached as u16 {
            self.state.reset_accounts(peer);
            self.state.open_accounts(peer);
        }
        Ok(())
    }

    /// Moves the two tables of receives into longer memory. Afterwards the engine does not refer to
    /// the old memory. Does nothing if the two lengths differ, or are not greater than before. Slow
    /// path; allocates nothing.
    #[cold]
    pub fn grow_receives(&mut self, receives: &'m mut [RecvSlot], posted: &'m mut [PostedSlot]) {
        if let Some(protocol) = &mut self.state.protocol
            && receives.len() == posted.len()
        {
            protocol.matcher.grow(posted);
            protocol.requests.slots.grow(receives, RecvSlot::EMPTY);
        }
    }

    /// Returns the requests, if matching is enabled.
    #[inline(always)]
    pub(crate) fn requests(&self) -> Option<&Requests<'m>> {
        self.state.protocol.as_ref().map(|protocol| &protocol.requests)
    }

    /// Returns the requests, if matching is enabled.
    #[inline(always)]
    pub(crate) fn requests_mut(&mut self) -> Option<&mut Requests<'m>> {
        self.state.protocol.as_mut().map(|protocol| &mut protocol.requests)
    }

    /// Ends a request that is in no list and not in the matcher.
    #[inline(always)]
    pub(crate) fn end_request(&mut self, index: u32) {
        if let Some(protocol) = &mut self.state.protocol {
            protocol.requests.end(index, &mut self.state.pending.ends);
        }
    }

    /// Returns whether a request may be waiting for a peer.
    #[cold]
    pub(crate) fn may_wait_for(&self, request: &RecvSlot, peer: PeerId) -> bool {
        let protocol = self.state.protocol.as_ref();
        match request.stage {
            Stage::Posted => {
                let named = protocol.and_then(|protocol| protocol.matcher.source(request.posted));
                named.is_none_or(|source| source == u32::from(peer.index))
            }
            _ => request.source.get() == Some(peer),
        }
    }

    /// Returns the counters; zero without matching.
    pub fn matching_stats(&self) -> ProtocolStats {
        match &self.state.protocol {
            Some(protocol) => ProtocolStats {
                eager: protocol.stats.eager + protocol.at_once(),
                matching: protocol.matcher.stats(),
                ..protocol.stats
            },
            None => ProtocolStats::default(),
        }
    }

    /// Returns whether [matching](Self::attach_matching) is enabled.
    pub fn has_matching(&self) -> bool {
        self.state.protocol.is_some()
    }

    /// Sets the eager limit of later sends, in bytes. The configuration, the rails and the receiver
    /// may lower it. Slow path: visits every peer.
    pub fn set_eager_max(&mut self, bytes: u32) {
        if let Some(protocol) = &mut self.state.protocol {
            protocol.eager = bytes.min(protocol.most_eager);
        }
        (0..self.state.reached).for_each(|peer| self.state.open_accounts(peer as u16));
    }

    /// Returns the longest payload, in bytes, that travels in its message to this peer. It is the
    /// longest slice that [`send`](Self::send) accepts. Returns 0 without matching, or if the peer
    /// is not connected.
    pub fn eager_max(&self, peer: PeerId) -> usize {
        let known = |slot: &&PeerSlot| slot.generation == peer.generation;
        let account = || {
            self.state.peers.get(peer.index as usize).filter(known)?;
            Some(self.state.protocol.as_ref()?.accounts.get(peer.index as usize)?.takes.eager)
        };
        account().unwrap_or(0) as usize
    }

    /// Returns the limit before rails and receivers lower it.
    pub(crate) fn eager_setting(&self) -> u32 {
        self.state.protocol.as_ref().map_or(0, |protocol| protocol.eager)
    }
}
