//! Fishplate's core: one-sided operations over several rails at once, in one order, without
//! allocation, locks or an operating system. A fishplate is the bar that joins two rails.
//!
//! It provides put, get, put-signal, atomics, fence and quiet over any implementation of
//! [`rail::Rail`]. Everything runs on the caller's thread and in the caller's memory.
//!
//! ```
//! use core::ptr::NonNull;
//! use fishplate_core::engine::{Asleep, Config, ContextId, Engine, Notice, Signal, Tables, Waiter};
//! use fishplate_core::mem::{Region, RegionKind};
//! use fishplate_core::op::{Cmp, SignalOp};
//! use fishplate_core::rail::loopback::Loopback;
//! use fishplate_core::sync::host::SpinHost;
//!
//! const CONTEXT: ContextId = ContextId(0);
//! const DEADLINE: u64 = 1_000_000;
//! let mut memory = [0u64; 512];
//! let mut tables = Tables::<1, 1, 128, 4, 16>::new();
//!
//! // An engine over one rail that leads back here, and itself as its only peer.
//! let rails = [Loopback::<16>::new()];
//! let mut engine = Engine::new(Config::DEFAULT, rails, tables.memory()).unwrap();
//! let me = engine.reserve_peer().unwrap();
//! engine.connect_peer(me, 0b1).unwrap();
//!
//! // Register memory, export it as a handle, and import the handle at the peer.
//! let start = NonNull::from(&mut memory).cast();
//! let region = unsafe { Region::new(start, 4096, RegionKind::Private) };
//! let mine = engine.register(region).unwrap();
//! let mut handle = [0; 512];
//! let len = engine.export(mine, &mut handle).unwrap();
//! let theirs = engine.import(me, &handle[..len]).unwrap();
//!
//! // Write 16 bytes, then signal. The signal is visible only once the bytes are.
//! let signal = Signal { at: theirs.at(2048), op: SignalOp::Set, value: 7 };
//! engine.put_signal(CONTEXT, mine.at(0), 16, theirs.at(1024), signal, Notice::Silent).unwrap();
//!
//! let (host, never) = (SpinHost::new(1), Asleep::new());
//! let mut waiter = Waiter::awake(&host, &never);
//! // At the target: when the wait returns, the bytes are there.
//! engine.wait_signal(mine.at(2048), Cmp::Eq, 7, Some(me), &mut waiter, DEADLINE).unwrap();
//! // At the origin: when `quiet` returns, everything is applied at the target.
//! engine.quiet(CONTEXT, me, &mut waiter, DEADLINE).unwrap();
//! ```
//!
//! # The contract
//!
//! - **Order.** Every network write, signal and atomic that a context sends to one peer has a place
//!   in that (context, peer) stream, whatever rail it takes. The receiver applies signals and
//!   atomics in stream order, each only when every earlier write of the stream has landed. Writes
//!   themselves land in any order. Different contexts are independent streams.
//! - **Fence** orders without waiting where the stream order suffices. Otherwise it holds a later
//!   write back until earlier operations are applied. **Quiet** completes: on return every earlier
//!   operation is applied at its target. A quiet without outstanding operations costs a few loads
//!   and no call into a rail.
//! - **Completion** has three outcomes: done; failed and quiescent (the buffer may be reused, and
//!   no part lands later); failed, unknown. A stale or unknown token is an error, never "done".
//!   Every wait takes a deadline. When it expires, the error names the peer, the rail and the first
//!   missing number, as far as they are known.
//! - **No allocation, lock or system call on a hot path.** The caller passes all memory at setup.
//!   The core starts no thread, reads no environment variable and sets no signal handler. A wait
//!   may sleep, through the [`Host`](sync::host::Host) that the caller passes.
//! - **A rail is not a peer.** With [failover](engine::Engine::attach_failover) and rails that can
//!   [fence](rail::Rail::fence), a peer survives the failure of all its rails but one. Every
//!   operation is still applied once and in order.
//! - **A peer is not trusted.** Input from a peer is copied out once and checked: region, bounds,
//!   width, sequence window. Invalid input is rejected with an error that names the violation. It
//!   causes no panic and no write outside a registered region.
//! - **One attachment, one epoch.** Traffic of one attachment of a peer never has an effect in a
//!   later attachment: it is dropped and counted ([`Stats::stale`](engine::Stats)). If a peer
//!   attaches this process again during an attachment, that attachment fails.
//! - **Bounded.** Every queue, window and table has a size fixed at setup. When one is full, the
//!   call returns [`Again`](error::OpError::Again) and changes nothing. A pass handles at most a
//!   configured number of items per queue.
//!
//! # Layers
//!
//! The layers from the bottom up. Each layer imports only earlier layers. All of them share
//! [`bytes`], [`mem`], [`op`] and [`error`].
//!
//! 1. [`sync`]: atomics only. SPSC ring, sequence arithmetic, eventcount, spin-then-park.
//! 2. [`rail`]: one path to the fabric, and rails without hardware: loopback, faulty, simulated.
//! 3. [`engine`]: order on top of rails that have none.
//! 4. [`queue`]: commands for an engine that another thread drives, with events and dependencies.
//! 5. [`context`]: the verbs of an engine, over a queue.
//! 6. [`psm`]: matched queues as PSM and PSM2 define them, over an engine.

#![no_std]

pub mod bytes;
pub mod context;
pub mod engine;
pub mod error;
pub mod mem;
pub mod op;
mod probe;
pub mod psm;
pub mod queue;
pub mod rail;
pub mod sync;
