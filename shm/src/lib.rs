//! The rail between processes of one machine: sealed segments, a handshake, and a
//! [`Rail`](fishplate_core::rail::Rail) over shared memory.
//!
//! | module | contents |
//! |---|---|
//! | `error` | errors of the setup |
//! | `segment` | anonymous memory of fixed size, checked before it is mapped |
//! | `event_page` | the page with the eventcount on which a process sleeps |
//! | `lane` | a ring of records from one producer to one consumer |
//! | `packet`, `socket` | packets over AF_UNIX sockets, with descriptors |
//! | `foreign` | descriptors received from peers, closed without waiting |
//! | `handshake` | connects two processes: [`Listener`], [`connect`], [`Link`] |
//! | [`meeting`] | handshakes with many peers at once, without waiting for any of them |
//! | `identity` | identifies the process at the other end of a socket |
//! | `control` | the socket after the handshake |
//! | `record`, `staged`, `regions`, `cma`, `peer` | the parts of the rail |
//! | `payload` | chooses how payloads leave private memory: kernel copy or lane |
//! | `rail` | [`ShmRail`] |
//! | [`extension`] | the interface for packages that add packets of their own |
//!
//! # Example
//!
//! One end exports a segment, and the other end writes to it and sends a message.
//!
//! ```
//! use std::time::{Duration, Instant};
//!
//! use fishplate_core::mem::{Peer, Untrusted};
//! use fishplate_core::rail::{Rail, RailKey};
//! use fishplate_core::sync::host::SpinHost;
//! use fishplate_shm::{Listener, Segment, ShmConfig, ShmRail, connect};
//!
//! let deadline = Instant::now() + Duration::from_secs(5);
//! let name = format!("@fishplate-doc-{}", std::process::id());
//! let listener = Listener::bind(&name)?;
//! let exporter = std::thread::spawn(move || {
//!     let mut rail = ShmRail::new(SpinHost::new(1), ShmConfig::default()).unwrap();
//!     rail.attach(Peer(0), connect(&name, &rail.profile(), deadline).unwrap()).unwrap();
//!     let segment = Segment::create(4096).unwrap();
//!     // SAFETY: read only after the other end has finished.
//!     let region = unsafe { segment.region(64, 8) }.unwrap();
//!     let (key, _) = rail.register(&region).unwrap();
//!     let bytes = [key.key.to_ne_bytes(), key.base.to_ne_bytes()].concat();
//!     rail.exchange(Peer(0), &bytes, deadline).unwrap();
//!     rail.exchange(Peer(0), &[], deadline).unwrap();
//!     // SAFETY: the other end has written, and writes no more.
//!     unsafe { region.ptr().cast::<u64>().read_volatile() }
//! });
//!
//! let mut rail = ShmRail::new(SpinHost::new(1), ShmConfig::default()).unwrap();
//! rail.attach(Peer(7), listener.accept(&rail.profile(), deadline)?).unwrap();
//! let bytes = rail.exchange(Peer(7), &[], deadline)?;
//! let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
//! let key = RailKey { key: word(0), base: word(8) };
//! let mapped = rail.import(Peer(7), key, 8).unwrap().expect("segments are mapped");
//! // SAFETY: eight bytes were imported, aligned to 64.
//! unsafe { mapped.cast::<u64>().write_volatile(42) };
//! rail.post_message(Peer(7), b"written", Untrusted::from_slice(&[]), 0).unwrap();
//! rail.flush();
//! rail.exchange(Peer(7), &[], deadline)?;
//! assert_eq!(exporter.join().unwrap(), 42);
//! # Ok::<(), fishplate_shm::HandshakeError>(())
//! ```
//!
//! This package does not read the environment, set signal handlers or start threads. A [`Listener`]
//! on a path removes the path when it is dropped. Only a killed process leaves it behind. A program
//! that accepts untrusted peers should provide a closer thread with [`set_closer`]. Peers are never
//! trusted: `lane` and `staged` describe the checks. No call on the progress path waits for a peer,
//! with one exception: an attached peer can delay the kernel's copies between private memory, which
//! [`ShmConfig::force_staging`] avoids. Linux 5.3 or later is required.

mod cma;
mod config;
mod control;
mod due;
mod error;
mod event_page;
pub mod extension;
mod foreign;
#[doc(hidden)]
pub mod fuzzing;
mod handshake;
mod identity;
mod lane;
pub mod meeting;
mod packet;
mod payload;
mod peer;
mod per_process;
mod rail;
mod record;
mod regions;
mod room;
mod roster;
mod segment;
mod socket;
mod staged;
#[cfg(test)]
mod testing;
mod watch;

pub use config::{ShmConfig, Users};
pub use error::{HandshakeError, SegmentError};
pub use event_page::WaitObject;
pub use foreign::{close_aside, has_aside, set_closer};
pub use handshake::{Link, Listener, Profile, Role, connect};
pub use packet::MAX_BLOB;
pub use packet::Nonce;
pub use rail::{ShmRail, ShmSetup};
pub use room::check_room;
pub use segment::Segment;
pub use socket::socket_pair;
