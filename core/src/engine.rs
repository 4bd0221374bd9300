//! Layer 3: orders operations across rails, which deliver in any order.
//!
//! An [`Engine`] owns its rails and one stream of sequence numbers per (context, peer). One thread
//! drives it: it posts operations, calls [`Engine::progress`], and waits. Nothing here allocates,
//! locks or starts a thread. Only the waits block, and each takes a deadline.
//!
//! # How an operation travels
//!
//! - **Directly**, if the stream has nothing in flight and the peer's memory is mapped, or can be
//!   copied into at once. The operation is a copy or an atomic, and is done on return. Program
//!   order is stream order.
//! - **Numbered**, otherwise: every write and message takes the next number of the stream, on any
//!   rail. The target applies signals and atomics in the order of numbers, when everything before
//!   them has landed. It acknowledges with a cumulative cursor. An operation is done when the
//!   cursor has passed its last number.
//!
//! # Files
//!
//! `peers`, `joint` and `regions` set up peers, rails and memory. `epoch` distinguishes attachments
//! of a peer, and `close` ends them in an orderly way. `failover` continues after a rail has
//! failed. `submit` accepts operations, and `post` cuts them into posts and picks rails. `receive`
//! handles reports of rails, and `service` does the work that became due. `device` applies signals
//! and atomics in device memory. `carried` moves data that no rail reaches. `finish` completes
//! operations, and `wait` blocks. `doubt` asks silent peers. These modules share the state in
//! `window`, `stream`, `pending`, `table`, `load` and `wire`, with lists from `list`. `protocol`
//! sends and receives tagged messages, and `tag` matches them. `worker` drives an engine for other
//! threads, which send it `command`s over a `lane`.

mod carried;
mod close;
pub mod command;
mod device;
mod doubt;
mod epoch;
mod failover;
mod finish;
#[doc(hidden)]
pub mod fuzzing;
mod joint;
pub mod lane;
pub(crate) mod list;
mod load;
mod peers;
mod pending;
mod pieces;
mod post;
mod post_tag;
pub mod protocol;
#[cfg(test)]
mod races;
mod receive;
mod regions;
mod service;
pub(crate) mod slots;
mod stream;
mod submit;
mod table;
mod tables;
pub mod tag;
pub(crate) mod wait;
mod window;
mod wire;
pub mod worker;

pub use failover::{FailoverMemory, FailoverPeer, FailoverStream, RailChange, RailStats, SentSlot};
pub use joint::{Joint, Pairing, RAILS_MAX};
pub use pending::PendingSlot;
pub use stream::Stream;
pub use submit::{Issued, NOW_MAX, Notice, Signal};
pub use table::{HANDLE_MAX, HANDLE_VERSION, LocalSlot, PeerSlot, RemoteSlot, handle_len};
pub use tables::Tables;
pub use wait::{Asleep, Waiter};
pub use window::{Parked, bitmap_words};

use core::mem::MaybeUninit;
use core::ptr::{self, addr_of_mut};

use crate::error::AttachError;
use crate::mem::RailId;
use crate::rail::{Rail, Rails, SomeRails};
use crate::sync::seq::{MAX_WINDOW, Seq};

use device::DeviceTurn;
use doubt::Doubts;
use failover::Failover;
use load::{Loads, Split};
use pending::Pending;
use protocol::Protocol;
use stream::Due;
use table::lent;

/// An independent source of operations, with its own order to each peer. Corresponds to OpenSHMEM's
/// `shmem_ctx_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContextId(pub u8);

/// How posts are spread over the rails that reach a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RailPolicy {
    /// The lowest-numbered rail that has room.
    Fixed,
    /// Round robin. The first rail differs from peer to peer.
    RoundRobin,
    /// The rail that is expected to complete the post first, by its measured speed. Ties are broken
    /// round robin.
    LeastOutstanding,
}

/// The settings of an engine, with defaults. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Number of contexts, 1 to 256. Both sides of a connection use the same number. Default: 1.
    pub contexts: u16,
    /// Maximum number of sequence numbers that a stream has in flight: a power of two up to 2^19.
    /// Both sides use the same window. Default: 128.
    pub window: u32,
    /// Maximum number of events per queue, and of streams with work to do, that a pass handles.
    /// Default: 32.
    pub batch: u32,
    /// Longest payload of a put-signal that is sent as one message. A rail to the peer may have a
    /// lower limit. Default: 192.
    pub eager: u32,
    /// Size from which a write or read is split over rails. Shorter ones are split too, into
    /// shorter pieces, if they take 200 us or more on the fastest rail; `u64::MAX` splits none.
    /// Default: 128 KiB.
    pub stripe_threshold: u64,
    /// Size of the pieces of a split write or read, 1 byte to 2 GiB. Default: 64 KiB.
    pub stripe_chunk: u64,
    /// How rails are chosen. Default: [`RailPolicy::LeastOutstanding`].
    pub policy: RailPolicy,
    /// Number of passes after which a pending acknowledgement is sent as a separate message.
    /// Default: 16.
    pub ack_age: u32,
    /// The first sequence number of every stream, the same on both sides. Default: 0.
    pub first_sequence: u64,
    /// Varies the first rail of round robin from peer to peer, and seeds the epochs of attachments.
    /// Use a different value for each process and each start. Default: 0.
    pub seed: u64,
    /// A number in the id of every region of this engine. Give each engine of a process a different
    /// number. Then an engine rejects the region ids of the other engines.
    pub owner: u16,
}

impl Config {
    /// The defaults of the fields. [`Tables`] for them need a `WINDOW` of 128.
    pub const DEFAULT: Config = Config {
        contexts: 1,
        window: 128,
        batch: 32,
        eager: 192,
        stripe_threshold: 128 << 10,
        stripe_chunk: 64 << 10,
        policy: RailPolicy::LeastOutstanding,
        ack_age: 16,
        first_sequence: 0,
        seed: 0,
        owner: 0,
    };

    /// Returns the number of `u64` words in the bitmaps of `streams` streams.
    pub const fn bitmap_words(&self, streams: usize) -> usize {
        2 * streams * bitmap_words(self.window)
    }
}

impl Default for Config {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// The memory that an engine borrows. The lengths are the limits of the engine.
///
/// For `P` peers, `C` contexts and a window of `W`, lend P `peers`, P `pairings`, P·C `streams`,
/// P·C·W `parked`, and [`Config::bitmap_words`]`(P·C)` words of `bitmap`.
pub struct EngineMemory<'m, const RAILS: usize> {
    /// One slot per peer.
    pub peers: &'m mut [PeerSlot],
    /// One pairing per peer.
    pub pairings: &'m mut [Pairing],
    /// One stream per peer and context.
    pub streams: &'m mut [Stream],
    /// Messages that are stored until all earlier messages have arrived. A slot is never read
    /// before it is written.
    pub parked: &'m mut [MaybeUninit<Parked>],
    /// Bitmaps of the numbers that have arrived. Memory that is already zero is not written at
    /// setup.
    pub bitmap: &'m mut [u64],
    /// One slot per registered region.
    pub locals: &'m mut [LocalSlot<RAILS>],
    /// One slot per imported region.
    pub remotes: &'m mut [RemoteSlot<RAILS>],
    /// One slot per operation in flight.
    pub pending: &'m mut [PendingSlot],
}

/// Counters of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Numbered writes and messages posted.
    pub posted: u64,
    /// Numbered writes and messages that arrived.
    pub arrived: u64,
    /// Arrivals that came before an earlier number; part of `arrived`.
    pub arrivals_out_of_order: u64,
    /// Arrivals of a number that had already arrived.
    pub duplicates: u64,
    /// Writes and messages that were dropped, because they belong to an earlier attachment of their
    /// peer.
    pub stale: u64,
    /// Signals and atomics applied from messages.
    pub applied: u64,
    /// Acknowledgements sent as separate messages.
    pub acks_alone: u64,
    /// Posts that no rail had room for.
    pub refused: u64,
    /// Posts that failed, at the call or at completion.
    pub failed: u64,
    /// Rails that failed while their peer stayed connected.
    pub rails_failed: u64,
    /// Rails that returned to a peer after they had failed.
    pub rails_returned: u64,
    /// Sequence numbers posted again on another rail after a rail failed.
    pub reposted: u64,
    /// Replies sent again after a rail failed.
    pub replied_again: u64,
    /// Calls of [`Engine::progress`].
    pub passes: u64,
}

pub(crate) struct State<'m, const RAILS: usize> {
    pub config: Config,
    /// Mask of the sequence bits in the 32-bit word of a write or message.
    pub mask: u32,
    /// The first peer slot that is not set up; at least 1. The tables from this slot on are
    /// untouched, so a peer costs no memory before it is reserved.
    pub reached: usize,
    pub peers: &'m mut [PeerSlot],
    pub pairings: &'m mut [Pairing],
    pub streams: &'m mut [Stream],
    pub parked: &'m mut [MaybeUninit<Parked>],
    pub bitmap: &'m mut [u64],
    pub locals: &'m mut [LocalSlot<RAILS>],
    pub remotes: &'m mut [RemoteSlot<RAILS>],
    pub pending: Pending<'m>,
    pub due: Due,
    /// Operations in flight on all streams.
    pub open: u32,
    /// Number of failed peers and of streams with failed operations that no quiet has reported yet.
    pub troubles: u32,
    pub device: DeviceTurn,
    /// Whether a peer's memory was written directly since the last `settle`.
    pub direct: bool,
    pub closing: u32,
    /// The epoch of the latest attachment of any peer.
    pub epoch: u32,
    pub hellos: u32,
    /// Whether a peer that is not attached has called, or a reported rail has changed, since the
    /// owner looked.
    pub called: bool,
    pub loads: Loads<RAILS>,
    pub max_rma: [u64; RAILS],
    /// Longest write that each rail copies before the post returns, in bytes.
    pub inject: [u64; RAILS],
    // These hold for all peers, so that the fast path need not look up the limits of a peer.
    /// Longest write, in bytes, that every rail takes in one post. Such a write is not split, and
    /// its length fits the tag of a silent post.
    pub single_max: u64,
    /// Longest payload, in bytes, of a put-signal that is sent to any peer as one message.
    pub eager: u32,
    /// Longest message, in bytes, that every rail accepts to every peer.
    pub shortest: u32,
    pub stats: Stats,
    pub stamp: u32,
    pub failover: Option<Failover<'m>>,
    /// The rail of the latest post, for the records of failover.
    pub took: u8,
    pub protocol: Option<Protocol<'m, RAILS>>,
    /// Number of registered regions of device memory.
    pub devices: u32,
    /// A cache of the imported regions that this engine has read messages from.
    pub hints: [u16; protocol::HINTS],
    pub doubts: Doubts,
}

/// The engine, over at most `RAILS` rails.
pub struct Engine<'m, R: Rail, const RAILS: usize> {
    pub(crate) rails: SomeRails<R, RAILS>,
    pub(crate) state: State<'m, RAILS>,
}

impl<'m, R: Rail, const RAILS: usize> Engine<'m, R, RAILS> {
    /// Creates an engine over `rails`, without peers.
    ///
    /// # Errors
    /// [`AttachError::Config`] names the value that is out of range. [`AttachError::Memory`] names
    /// the memory that is too short.
    pub fn new(
        config: Config,
        rails: impl Into<Rails<R, RAILS>>,
        memory: EngineMemory<'m, RAILS>,
    ) -> Result<Self, AttachError> {
        let mut engine = MaybeUninit::uninit();
        Self::new_in(&mut engine, config, |list| *list = rails.into(), memory)?;
        // SAFETY: `new_in` has initialized the engine.
        Ok(unsafe { engine.assume_init() })
    }

    /// Creates an engine in `place`, such as a new box. An engine over 16 rails can be too large
    /// for a stack. `add` adds the rails to an empty list.
    ///
    /// # Errors
    /// The same as [`new`](Self::new). Nothing is left in `place`.
    pub fn new_in<'p>(
        place: &'p mut MaybeUninit<Self>,
        config: Config,
        add: impl FnOnce(&mut Rails<R, RAILS>),
        memory: EngineMemory<'m, RAILS>,
    ) -> Result<&'p mut Self, AttachError> {
        let engine = place.as_mut_ptr();
        // SAFETY: the fields are disjoint parts of `place`, and may be uninitialized.
        let (rails, state) = unsafe {
            (&mut *addr_of_mut!((*engine).rails).cast(), &mut *addr_of_mut!((*engine).state).cast())
        };
        let rails = SomeRails::begin(rails);
        add(rails);
        if let Err(error) = Self::begin(state, config, rails, memory) {
            // SAFETY: the list is initialized, and nothing uses it afterwards.
            unsafe { ptr::drop_in_place(rails) };
            return Err(error);
        }
        // SAFETY: `begin` has written the state, and has checked that the list has a rail.
        Ok(unsafe { place.assume_init_mut() })
    }

    fn begin(
        state: &mut MaybeUninit<State<'m, RAILS>>,
        config: Config,
        rails: &[R],
        memory: EngineMemory<'m, RAILS>,
    ) -> Result<(), AttachError> {
        let check = |ok: bool, what| if ok { Ok(()) } else { Err(AttachError::Config(what)) };
        let count = rails.len();
        check(RAILS <= RAILS_MAX && count >= 1, "rails: must be 1 to 16")?;
        check(config.contexts >= 1 && config.contexts <= 256, "contexts: must be 1 to 256")?;
        check(
            config.window.is_power_of_two() && config.window as u64 <= MAX_WINDOW,
            "window: must be a power of two up to 2^19",
        )?;
        check(config.batch >= 1, "batch: must be at least 1")?;
        check(
            config.stripe_chunk >= 1 && config.stripe_chunk <= 1 << 31,
            "stripe_chunk: must be 1 byte to 2 GiB",
        )?;
        let EngineMemory { peers, pairings, streams, parked, bitmap, locals, remotes, pending } =
            memory;
        let (each, window) = (peers.len() * config.contexts as usize, config.window as usize);
        check(
            !peers.is_empty() && peers.len() <= u16::MAX as usize,
            "memory.peers: must have 1 to 65535 entries",
        )?;
        lent("memory.pairings (one per peer)", pairings.len(), peers.len())?;
        lent("memory.streams (peers x contexts)", streams.len(), each)?;
        lent("memory.parked (peers x contexts x window)", parked.len(), each * window)?;
        lent("memory.bitmap (Config::bitmap_words)", bitmap.len(), config.bitmap_words(each))?;
        check(locals.len() <= u16::MAX as usize, "memory.locals: must have at most 65535 entries")?;
        check(
            remotes.len() <= u16::MAX as usize,
            "memory.remotes: must have at most 65535 entries",
        )?;
        check(
            !pending.is_empty() && pending.len() < 1 << 30,
            "memory.pending: must have 1 to 2^30 - 1 entries",
        )?;
        let (mut max_rma, mut inject) = ([0; RAILS], [0; RAILS]);
        for ((rail, max), inject) in rails.iter().zip(&mut max_rma).zip(&mut inject) {
            let caps = rail.caps();
            check(caps.data_bytes >= 4, "rail: its writes must carry 4 bytes of completion data")?;
            check(
                caps.max_message >= 64 && caps.max_rma >= 1,
                "rail: must accept writes, and messages of 64 bytes",
            )?;
            *max = (caps.max_rma as u64).min(1 << 31);
            *inject = (caps.inject as u64).min(*max);
        }
        let split = Split { from: config.stripe_threshold, piece: config.stripe_chunk };
        peers.fill(PeerSlot::EMPTY);
        // Write only to entries that an earlier engine has used, so that untouched memory stays
        // untouched.
        let streams = &mut streams[..each];
        streams
            .iter_mut()
            .filter(|stream| !stream.is_empty())
            .for_each(|stream| *stream = Stream::EMPTY);
        // Untouched streams name peer 0, so set up the streams of slot 0. Then no untouched stream
        // names its own peer.
        pairings[0] = Pairing::ALIKE;
        for context in 0..config.contexts as usize {
            streams[context * peers.len()] =
                Stream::new(context as u8, 0, Seq(config.first_sequence));
        }
        bitmap.iter_mut().filter(|word| **word != 0).for_each(|word| *word = 0);
        locals.fill(LocalSlot::EMPTY);
        remotes.iter_mut().filter(|slot| slot.taken || slot.generation != 0).for_each(|slot| {
            *slot = RemoteSlot::EMPTY;
        });
        state.write(State {
            config,
            mask: wire::sequence_mask(config.window),
            reached: 1,
            peers,
            pairings,
            streams,
            parked,
            bitmap,
            locals,
            remotes,
            pending: Pending::new(pending),
            due: Due::EMPTY,
            open: 0,
            troubles: 0,
            device: DeviceTurn::NEW,
            direct: false,
            closing: 0,
            epoch: mix(config.seed) as u32,
            hellos: 0,
            called: false,
            loads: Loads::new(R::CLOCK, split),
            max_rma,
            inject,
            single_max: post::single_max(&max_rma, split),
            eager: config.eager,
            shortest: u32::MAX,
            stats: Stats::default(),
            stamp: 0,
            failover: None,
            took: 0,
            protocol: None,
            devices: 0,
            hints: [u16::MAX; protocol::HINTS],
            doubts: Doubts::NONE,
        });
        Ok(())
    }

    /// Returns a rail for inspection.
    pub fn rail(&self, rail: RailId) -> Option<&R> {
        self.rails.get(rail.0 as usize)
    }

    /// Returns the setup operations of a rail, such as attaching peers. Slow path.
    ///
    /// They cannot revoke memory that the engine uses. This does not compile:
    ///
    /// ```compile_fail,E0596
    /// # use fishplate_core::{engine::Engine, mem::{Peer, RailId}};
    /// # use fishplate_core::rail::{Rail, loopback::Loopback};
    /// # fn detach(engine: &mut Engine<'_, Loopback<4>, 1>) {
    /// engine.rail_mut(RailId(0)).unwrap().detach(Peer(0));
    /// # }
    /// ```
    ///
    /// Replacing the rail does not compile either:
    ///
    /// ```compile_fail,E0308
    /// # use fishplate_core::{engine::Engine, mem::RailId, rail::loopback::Loopback};
    /// # fn swap(engine: &mut Engine<'_, Loopback<4>, 1>) {
    /// core::mem::swap(engine.rail_mut(RailId(0)).unwrap(), &mut Loopback::new());
    /// # }
    /// ```
    pub fn rail_mut(&mut self, rail: RailId) -> Option<R::Setup<'_>> {
        self.rails.get_mut(rail.0 as usize).map(|rail| rail.setup())
    }

    /// Returns a rail without the restrictions of [`rail_mut`](Self::rail_mut), for tests of
    /// engines and rails.
    ///
    /// # Safety
    /// The caller does not:
    ///
    /// - replace or poll the rail;
    /// - undo a registration, an import or a post of the engine;
    /// - post under a context word that the engine uses.
    pub unsafe fn rail_unchecked(&mut self, rail: RailId) -> Option<&mut R> {
        self.rails.get_mut(rail.0 as usize)
    }

    /// Returns the configuration in use.
    pub fn config(&self) -> &Config {
        &self.state.config
    }

    /// Returns the counters. Slow path: adds up the counters that are kept per peer.
    pub fn stats(&self) -> Stats {
        let at_once = self.state.protocol.as_ref().map_or(0, Protocol::at_once);
        let Stats { posted, .. } = self.state.stats;
        let failover = self.state.failover.as_ref();
        let [rails_failed, rails_returned, reposted] = failover.map_or([0; 3], Failover::totals);
        Stats {
            posted: posted + at_once,
            rails_failed,
            rails_returned,
            reposted,
            passes: self.state.loads.passes,
            ..self.state.stats
        }
    }

    /// Makes one bounded pass: handles the events of the rails, then does the work that became due.
    /// Returns the number of events. Never blocks.
    #[inline]
    pub fn progress(&mut self) -> u32 {
        self.state.loads.passes += 1;
        let batch = self.state.config.batch;
        let mut events = 0;
        for (i, rail) in self.rails.iter_mut().enumerate() {
            events += rail.poll(batch, &mut self.state.sink(i));
        }
        let due = self.state.due.len != 0;
        if due {
            self.service();
        }
        let chores = self.state.has_chores();
        if chores {
            self.serve_protocol();
        }
        // Without due work, this pass has posted nothing.
        if due || chores {
            self.flush();
        }
        events
    }

    /// Returns whether a rail has reported a call of a peer that is not attached
    /// ([`Sink::called`](crate::rail::Sink::called)), or a rail to a peer has
    /// [changed](Self::report_rail_changes). Waits then end early, as if their deadline had
    /// expired. Attach the peers, and reset with [`end_call`](Self::end_call).
    #[inline(always)]
    pub fn has_call(&self) -> bool {
        self.state.called
    }

    /// Resets [`has_call`](Self::has_call).
    #[cold]
    pub fn end_call(&mut self) {
        self.state.called = false;
    }

    #[inline(always)]
    fn flush(&mut self) {
        for rail in self.rails.iter_mut() {
            rail.flush();
        }
    }

    /// Checks through the rails whether peers are alive, and fails dead peers. Slow path. The waits
    /// call this. A program that only writes to mapped memory and never waits should call it from
    /// time to time. Writes to the memory of a dead peer succeed, so they do not reveal the
    /// failure.
    #[cold]
    pub fn check_peers(&mut self) {
        for (i, rail) in self.rails.iter_mut().enumerate() {
            rail.check_peers(&mut self.state.sink(i));
        }
        self.rails_checked();
        self.doubt_peers();
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    #[inline(always)]
    pub(crate) fn stream_of(&self, context: u8, peer: u16) -> u32 {
        context as u32 * self.peers.len() as u32 + peer as u32
    }
}

static_assertions::assert_impl_all!(Engine<'static, crate::rail::loopback::Loopback<4>, 1>: Send);

/// Mixes the bits of a number (the finaliser of splitmix64).
pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
