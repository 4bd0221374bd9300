//! The assembled transport: the engine of `fishplate-core` over the rails of `fishplate-shm`,
//! `fishplate-gpu` and `fishplate-sys`.
//!
//! Most programs want a [`Node`]: one object per process. Its peers are other processes on this
//! host or elsewhere.
//!
//! Programs with their own memory, rails or threads use the re-exported packages. This package adds
//! [`Storage`] and [`MatchStorage`], which own an engine's memory, and [`worker`], a thread that
//! drives an engine. [`rails`] opens libfabric rails near a process, under a [`guard`], and
//! [`topology`] chooses them.
//!
//! The command-line tool `fishplate` is the package `fishplate-tool`. `fishplate-testing` has a
//! libfabric provider for tests.
//!
//! In this program, two processes write to each other, then signal:
//!
//! ```no_run
//! use fishplate::{Cmp, Job, Node, Notice, Signal};
//! use std::{env::args, error::Error, time::Duration};
//!
//! fn main() -> Result<(), Box<dyn Error>> {
//!     let timeout = Duration::from_secs(20);
//!     let place = args().nth(1).unwrap_or("127.0.0.1:7117".into());
//!     let mut job = Job::join(place, 2, timeout)?;
//!     let mut node = Node::builder().open()?;
//!     let peer = node.connect(job.exchange(node.address())?)?;
//!     let inbox = node.alloc(4096)?;
//!     let theirs = node.import(peer, job.exchange(node.handle(inbox)?)?)?;
//!
//!     let hello = format!("hello from rank {}", job.rank());
//!     let arrived = Signal::set(theirs.at(0), 1);
//!     node.put_signal(hello.as_bytes(), theirs.at(64), arrived, Notice::Silent)?;
//!     node.wait(inbox.at(0), Cmp::Eq, 1, Some(peer), timeout)?;
//!     let before = node.fetch_add(theirs.at(8), 5, timeout)?;
//!
//!     let mut said = vec![0; hello.len()];
//!     node.read(inbox.at(64), &mut said)?;
//!     let said = String::from_utf8_lossy(&said);
//!     println!("rank {} read {said:?}; the counter was {before}", job.rank());
//!     job.barrier_with(|| _ = node.progress())?;
//!     Ok(node.close(timeout)?)
//! }
//! ```
//!
//! `examples/` has more programs. A program can also use the parts alone, such as an engine over
//! one loopback rail:
//!
//! ```
//! use fishplate::core::engine::{Config, ContextId, Issued, Notice, Signal};
//! use fishplate::core::{mem::{Region, RegionKind}, rail::loopback::Loopback};
//! use fishplate::{Limits, Storage};
//!
//! let config = Config { window: 16, ..Config::DEFAULT };
//! let mut storage = Storage::<1>::new(&config, Limits { peers: 1, ..Limits::DEFAULT });
//! let mut engine = storage.engine(config, [Loopback::<64>::new()])?;
//!
//! let me = engine.reserve_peer()?;
//! engine.connect_peer(me, 1)?;
//! let mut words = [7u64, 0, 0, 0];
//! let start = std::ptr::NonNull::from(&mut words).cast();
//! // SAFETY: `words` outlives the engine's use of it, and is read again only after the last put.
//! let region = unsafe { Region::new(start, 32, RegionKind::Private) };
//! let ours = engine.register(region)?;
//! let mut handle = [0; fishplate::core::engine::HANDLE_MAX];
//! let len = engine.export(ours, &mut handle)?;
//! let theirs = engine.import(me, &handle[..len])?;
//!
//! let signal = Signal::set(theirs.at(16), 1);
//! let (context, notice) = (ContextId(0), Notice::Report(0));
//! let issued = engine.put_signal(context, ours.at(0), 8, theirs.at(8), signal, notice).unwrap();
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
pub mod counters;
mod direct;
pub mod guard;
mod handlers;
pub mod job;
pub mod node;
pub mod rails;
mod storage;
pub mod topology;
pub mod worker;

pub use closer::{close_in_background, without_signals};
pub use direct::direct;
pub use fishplate_core::engine::{Issued, Notice, Signal};
pub use fishplate_core::mem::{LocalAddr, PeerId, RemoteAddr};
pub use fishplate_core::op::Cmp;
pub use job::Job;
pub use node::Node;
pub use storage::{FailoverStorage, Limits, MatchStorage, Storage};

#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    mod readme {}
    #[doc = include_str!("../docs/first-program.md")]
    mod first_program {}
    #[cfg(feature = "cuda")]
    #[doc = include_str!("../docs/devices.md")]
    mod devices {}
    #[doc = include_str!("../docs/jobs.md")]
    mod jobs {}
    #[doc = include_str!("../docs/observing.md")]
    mod observing {}
    #[doc = include_str!("../docs/vendoring.md")]
    mod vendoring {}
    #[doc = include_str!("../docs/writing-a-rail.md")]
    mod writing_a_rail {}
}
