//! What a seat stands on, and how it is set up before it knows of the other.

use std::ptr::NonNull;

use fishplate::{Limits, MatchStorage, Storage};
use fishplate_core::engine::protocol::MatchConfig;
use fishplate_core::engine::{Asleep, Config, Engine, Waiter};
use fishplate_core::error::AttachError;
use fishplate_core::mem::{LocalId, PeerId, RailId};
use fishplate_core::rail::Rail;
use fishplate_sys::LinuxHost;

use super::super::leg::{Leg, SLOTS_AT};
use super::super::seat::{Buffer, RECEIVES, Seat, handle};
use super::super::who::Who;
use crate::clock::Clock;
use crate::failure::Outcome;

/// As in [`seat`](super::super::seat), with less of everything: each seed has its own.
const MATCHING: MatchConfig = MatchConfig { eager: 192, credits: 96, headers: 96, ..MatchConfig::DEFAULT };

/// What a seat stands on.
pub(super) struct Ground<const RAILS: usize> {
    storage: Storage<RAILS>,
    matching: MatchStorage<RAILS>,
    arena: Buffer,
    buffer: Buffer,
}

impl<const RAILS: usize> Ground<RAILS> {
    pub(super) fn new(config: &Config, leg: &Leg) -> Outcome<Self> {
        let bytes = Leg::arena(leg.size).max(SLOTS_AT + leg.window as usize * leg.stride());
        let limits = Limits { peers: 1, locals: 2, remotes: 8, operations: 4 * config.window.max(64) };
        Ok(Ground {
            storage: Storage::new(config, limits),
            matching: MatchStorage::new(&MATCHING, 1, RECEIVES, 1),
            arena: Buffer::new(leg.size, bytes)?,
            buffer: Buffer::new(leg.size, bytes)?,
        })
    }
}

/// Sets an engine up to its handle; `attach` tells its rails of the peer.
pub(super) fn sit<'m, R: Rail, const RAILS: usize>(
    ground: &'m mut Ground<RAILS>,
    config: Config,
    rails: [R; RAILS],
    host: &'m LinuxHost,
    never: &'m Asleep,
    clock: Clock,
    mut attach: impl FnMut(&mut Engine<'m, R, RAILS>, RailId, PeerId) -> Result<(), AttachError>,
) -> Result<(Halfway<'m, R, RAILS>, Vec<u8>), AttachError> {
    let (arena, bytes) = (ground.arena.ptr(), ground.buffer.ptr());
    // SAFETY: arena and buffer belong to the ground,
    // which lends the engine its memory, and so outlive it.
    let (arena_region, buffer_region) = unsafe { (ground.arena.region(), ground.buffer.region()) };
    let mut engine = ground.storage.engine(config, rails)?;
    engine.attach_matching(MATCHING, ground.matching.memory())?;
    let peer = engine.reserve_peer()?;
    for rail in 0..RAILS {
        attach(&mut engine, RailId(rail as u8), peer)?;
    }
    engine.connect_peer(peer, (1 << RAILS) - 1)?;
    let ours = engine.register(arena_region)?;
    let buffer = engine.register(buffer_region)?;
    let handle = handle(&engine, ours)?;
    let halfway =
        Halfway { engine, peer, ours, buffer, arena, bytes, clock, waiter: Waiter::awake(host, never) };
    Ok((halfway, handle))
}

/// A seat that has not yet heard of the other side's memory.
pub(super) struct Halfway<'m, R: Rail, const RAILS: usize> {
    engine: Engine<'m, R, RAILS>,
    peer: PeerId,
    ours: LocalId,
    buffer: LocalId,
    arena: NonNull<u8>,
    bytes: NonNull<u8>,
    clock: Clock,
    waiter: Waiter<'m, LinuxHost>,
}

impl<'m, R: Rail, const RAILS: usize> Halfway<'m, R, RAILS> {
    pub(super) fn import(mut self, handle: &[u8]) -> Result<Seat<'m, R, RAILS>, AttachError> {
        let theirs = self.engine.import(self.peer, handle)?;
        let (driven, name) = ((self.engine, self.waiter), Who::new("this process", vec![]));
        let (arena, buffer) = ((self.ours, self.arena), (self.buffer, self.bytes));
        Ok(Seat::new(driven, self.peer, arena, theirs, buffer, self.clock, name))
    }
}
