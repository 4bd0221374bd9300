//! Fishplate, assembled: the engine of `fishplate-core` over the rails of `fishplate-shm`, on the Linux of `fishplate-sys`.
//!
//! The parts are re-exported under their own names. What this package adds needs `std`:
//! [`Storage`], which owns the memory that an engine borrows; [`MatchStorage`], which owns that of
//! tagged messages; [`worker`], a thread that drives an engine; [`topology`], which chooses NICs;
//! [`config`], what can be set; [`bootstrap`], how two hosts meet; [`rails`], which opens what was
//! chosen, under a [`guard`]; [`close_in_background`], which closes what peers should not have
//! sent. The command-line tool `fishplate` is the package `fishplate-tool`; `fishplate-testing` has a
//! libfabric provider for tests.
//!
//! ```
//! use fishplate::core::engine::{Config, ContextId, Issued, Notice, Signal};
//! use fishplate::core::{mem::{Region, RegionKind}, op::SignalOp, rail::loopback::Loopback};
//! use fishplate::{Limits, Storage};
//!
//! let config = Config { window: 16, ..Config::DEFAULT };
//! let mut storage = Storage::<1>::new(&config, Limits { peers: 1, ..Limits::DEFAULT });
//! let mut engine = storage.engine(config, [Loopback::<64>::new()])?;
//!
//! let me = engine.reserve_peer()?;
//! engine.connect_peer(me, 1)?;
//! let mut words = [7u64, 0, 0, 0];
//! // SAFETY: `words` outlives the engine's use of it, and is read again only after everything is over.
//! let region = unsafe { Region::new(std::ptr::NonNull::from(&mut words).cast(), 32, RegionKind::Private) };
//! let ours = engine.register(region)?;
//! let mut handle = [0; fishplate::core::engine::HANDLE_MAX];
//! let len = engine.export(ours, &mut handle)?;
//! let theirs = engine.import(me, &handle[..len])?;
//!
//! let signal = Signal { at: theirs.at(16), op: SignalOp::Set, value: 1 };
//! let issued = engine.put_signal(ContextId(0), ours.at(0), 8, theirs.at(8), signal, Notice::Report(0)).unwrap();
//! while let Issued::Pending(token) = issued {
//!     engine.progress();
//!     if engine.test(token).unwrap().is_some() {
//!         break;
//!     }
//! }
//! assert_eq!(words, [7, 7, 1, 0]);
//! # Ok::<(), fishplate::core::error::AttachError>(())
//! ```

pub use fishplate_core as core;
pub use fishplate_gpu as gpu;
pub use fishplate_shm as shm;
pub use fishplate_sys as sys;

pub mod bootstrap;
mod closer;
pub mod config;
pub mod guard;
pub mod rails;
mod storage;
pub mod topology;
pub mod worker;

pub use closer::close_in_background;
pub use storage::{Limits, MatchStorage, Storage};
