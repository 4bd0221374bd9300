//! A job is the group of processes that run one program. Through a [`Job`] they find each other and
//! exchange the bytes that nodes need, such as addresses and handles.
//!
//! ```no_run
//! use fishplate::{Job, Node};
//! use std::time::Duration;
//!
//! let mut job = Job::from_env(Duration::from_secs(60))?;
//! let mut node = Node::builder().open()?;
//! let addresses = job.allgather(node.address())?;
//! let peers: Result<Vec<_>, _> = addresses.iter().map(|address| node.connect(address)).collect();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! All processes exchange bytes over TCP through rank 0. The calls below differ in how the other
//! processes learn where rank 0 listens:
//!
//! | call | how a process learns the address |
//! |---|---|
//! | [`Job::join`] | all are given one HOST:PORT; the first to listen there is rank 0 |
//! | [`Leader::open`], [`Job::follow`] | a [`UniqueId`] that the program hands over |
//! | [`Job::from_env`] | `FISHPLATE_RENDEZVOUS`, PMI-1, PMIx or torchrun's variables |
//!
//! `docs/jobs.md` lists the variables and the launchers.
//!
//! For setup only: every call allocates, and blocks at most until its deadline. When the deadline
//! expires, the error lists the missing ranks. If a process dies, the others report it at once.
//!
//! Each connection must first present the job's [`Cookie`]. Until then, rank 0 reads nothing else
//! from it. The connections are not encrypted.

mod environment;
mod file;
#[doc(hidden)]
pub mod fuzzing;
mod id;
mod leader;
mod meet;
mod pmi;
mod pmix;
#[cfg(test)]
#[path = "../tests/port/mod.rs"]
mod port;
mod round;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::ToSocketAddrs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

pub use id::{Cookie, ID_LEN, UniqueId};
pub use leader::Leader;

use meet::Entry;
use round::Conn;

/// Maximum length of a contribution to [`Job::allgather`], in bytes.
pub const CONTRIBUTION_MAX: usize = 64 << 10;

/// Maximum number of processes in a job. Rank 0 needs a descriptor for each process.
pub const SIZE_MAX: usize = 1024;

const PAUSE: Duration = Duration::from_millis(1);

/// Number of calls of `meanwhile` in a row. One pass of a node handles a few dozen events. With a
/// single pass per interval, peers that stream data to a waiting process would be delayed.
const PASSES: u32 = 64;

/// The number of this process among those of its host. `usize::MAX` if it is not known.
static LOCAL_RANK: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Returns the number that [`Job::from_env`] got from the launcher.
pub(crate) fn local_rank() -> Option<usize> {
    // Relaxed: the number publishes no other data.
    Some(LOCAL_RANK.load(Ordering::Relaxed)).filter(|&rank| rank != usize::MAX)
}

/// Reads an environment variable. Invalid UTF-8 is replaced, so that a malformed
/// cookie is not mistaken for a missing one.
fn variable(name: &str) -> Option<String> {
    Some(std::env::var_os(name)?.to_string_lossy().into_owned())
}

/// The membership of this process in a job.
#[derive(Debug)]
pub struct Job {
    rank: usize,
    size: usize,
    local_rank: Option<usize>,
    links: Links,
    timeout: Duration,
}

#[derive(Debug)]
enum Links {
    Leader(Vec<Conn>),
    Follower(Conn),
    /// A call has failed, so later calls fail too: the rest of a failed round could be mistaken for
    /// the next round.
    Over,
}

impl Job {
    /// Joins the job that the environment describes, and waits until all processes have joined.
    /// Uses the first of these that applies:
    ///
    /// 1. `FISHPLATE_RENDEZVOUS`: `tcp://HOST:PORT` or `file:///DIR`. Rank and size come from
    ///    `FISHPLATE_RANK` and `FISHPLATE_SIZE`, torchrun, Open MPI, PMI or Slurm. Without a rank,
    ///    the first process to arrive is rank 0.
    /// 2. `PMI_FD`: PMI-1, as `mpiexec.hydra` provides it. Rank and size come from `PMI_RANK` and
    ///    `PMI_SIZE`. Ignored if the descriptor is not a socket and `PMIX_NAMESPACE` is set.
    /// 3. `PMIX_NAMESPACE`: PMIx, if the system has `libpmix.so.2`.
    /// 4. `MASTER_ADDR` and `MASTER_PORT`, as set by torchrun: rank 0 listens at the next port.
    /// 5. Otherwise: a job with only this process.
    ///
    /// `FISHPLATE_COOKIE` is the job's cookie for 1 and 4. `timeout` limits this call and each
    /// later call. Nodes that are opened later use the launcher's [`local_rank`](Self::local_rank).
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidInput`]: a variable is malformed, or there are several processes and
    ///   no variable says where rank 0 listens.
    /// - [`ErrorKind::TimedOut`]: the message lists the missing ranks.
    /// - Any error that PMI or PMIx reports.
    pub fn from_env(timeout: Duration) -> io::Result<Job> {
        let job = environment::join(variable, timeout)?;
        // Relaxed: the number publishes no other data.
        LOCAL_RANK.store(job.local_rank.unwrap_or(usize::MAX), Ordering::Relaxed);
        Ok(job)
    }

    /// Describes how [`from_env`](Self::from_env) would join, as text for people. Does not connect.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: a variable is malformed.
    pub fn describe_env() -> io::Result<String> {
        environment::way(variable, Duration::ZERO).map(|way| way.to_string())
    }

    /// Returns the number of this process among those of its host, from the launcher's variables.
    /// For [`Settings::local_rank`](crate::config::Settings::local_rank) of a program that does not
    /// call [`from_env`](Self::from_env).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: `FISHPLATE_LOCAL_RANK` is malformed.
    pub fn local_rank_in_env() -> io::Result<Option<usize>> {
        Ok(environment::local_rank(variable)?.map(|(rank, _)| rank))
    }

    /// Joins a job of `size` processes at `address` (HOST:PORT), and waits until all have joined.
    /// The first process that listens there is rank 0, so the address must belong to a host of the
    /// job. The job has no cookie.
    ///
    /// # Errors
    /// - [`ErrorKind::TimedOut`]: the message says how many are missing, or why this process could
    ///   not join.
    /// - [`ErrorKind::InvalidInput`]: the size is 0 or exceeds [`SIZE_MAX`], or the address has no
    ///   port.
    /// - The system's error if the host does not resolve.
    pub fn join(address: impl ToSocketAddrs, size: usize, timeout: Duration) -> io::Result<Job> {
        let entry = Entry::new(None, size, Cookie::NONE, timeout)?;
        let found = address.to_socket_addrs().map_err(|error| {
            let text = format!("cannot join a job: no address of rank 0: {error}; pass HOST:PORT");
            io::Error::new(error.kind(), text)
        })?;
        let found: Vec<_> = found.collect();
        // Each process would listen at a port of its own.
        if size > 1 && found.iter().any(|address| address.port() == 0) {
            return Err(invalid(
                "cannot join a job: the port is 0; pass HOST:PORT with a port from 1",
            ));
        }
        meet::at_address(&found, &entry)
    }

    /// Joins the [`Leader`]'s job with this id, and waits until all have joined. `rank` is 1 to
    /// `size - 1`.
    ///
    /// # Errors
    /// - [`ErrorKind::TimedOut`]: the message lists the missing ranks, or says why this process
    ///   could not join.
    /// - [`ErrorKind::InvalidInput`]: the rank or size is out of range.
    pub fn follow(id: &UniqueId, rank: usize, size: usize, timeout: Duration) -> io::Result<Job> {
        let entry = Entry::new(Some(rank), size, id.cookie(), timeout)?;
        if rank == 0 {
            return Err(invalid("cannot follow as rank 0; rank 0 calls Leader::lead"));
        }
        meet::at_leader(id, &entry)
    }

    /// Returns a job with only this process.
    pub fn alone() -> Job {
        Job::new(0, 1, Links::Leader(vec![]), Duration::ZERO)
    }

    fn new(rank: u32, size: u32, links: Links, timeout: Duration) -> Job {
        Job { rank: rank as usize, size: size as usize, local_rank: None, links, timeout }
    }

    fn leader(others: Vec<Conn>, entry: &Entry) -> Job {
        Job::new(0, entry.size, Links::Leader(others), entry.timeout)
    }

    fn follower(rank: u32, leader: Conn, entry: &Entry) -> Job {
        Job::new(rank, entry.size, Links::Follower(leader), entry.timeout)
    }

    /// Returns the rank of this process, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of processes in the job.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the number of this process among those of its host, from 0, if the launcher of a job
    /// of [`from_env`](Self::from_env) has set it. Nodes that are opened later use it: see
    /// [`Settings::local_rank`](crate::config::Settings::local_rank).
    pub fn local_rank(&self) -> Option<usize> {
        self.local_rank
    }

    /// Sends this process's bytes to all processes, and returns the bytes of all processes, ordered
    /// by rank. This is a collective call: all processes make it the same number of times.
    /// `meanwhile` runs while this process waits, so that a node can make progress.
    ///
    /// # Errors
    /// - [`ErrorKind::TimedOut`]: the message lists the missing ranks. The job has ended.
    /// - [`ErrorKind::UnexpectedEof`]: the message lists the ranks that exited. The job has ended.
    /// - [`ErrorKind::NotConnected`]: the job has ended in an earlier call.
    /// - [`ErrorKind::InvalidInput`]: more than [`CONTRIBUTION_MAX`] bytes. The job continues.
    pub fn allgather_with(
        &mut self,
        bytes: &[u8],
        mut meanwhile: impl FnMut(),
    ) -> io::Result<Vec<Vec<u8>>> {
        let mut meanwhile = || (0..PASSES).for_each(|_| meanwhile());
        if bytes.len() > CONTRIBUTION_MAX {
            return Err(invalid(format!(
                "contribution too long: {} bytes given; send at most {CONTRIBUTION_MAX}",
                bytes.len()
            )));
        }
        let deadline = deadline(self.timeout);
        match std::mem::replace(&mut self.links, Links::Over) {
            Links::Leader(mut others) => {
                let all =
                    round::lead(&mut others, bytes, (deadline, self.timeout), &mut meanwhile)?;
                self.links = Links::Leader(others);
                Ok(all)
            }
            Links::Follower(mut leader) => {
                let wait = (deadline, self.timeout);
                let all = round::follow(&mut leader, bytes, self.size, wait, &mut meanwhile)?;
                self.links = Links::Follower(leader);
                Ok(all)
            }
            Links::Over => Err(io::Error::new(
                ErrorKind::NotConnected,
                "the job has ended: an earlier call failed",
            )),
        }
    }

    /// Calls [`allgather_with`](Self::allgather_with) without a `meanwhile`.
    ///
    /// # Errors
    /// The same as `allgather_with`.
    pub fn allgather(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<Vec<Vec<u8>>> {
        self.allgather_with(bytes.as_ref(), || {})
    }

    /// Exchanges bytes with the other process of a job of two.
    ///
    /// # Errors
    /// The same as [`allgather_with`](Self::allgather_with), and [`ErrorKind::InvalidInput`] if the
    /// job does not have two processes.
    pub fn exchange(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<Vec<u8>> {
        if self.size != 2 {
            return Err(invalid(format!(
                "cannot exchange in a job of {}: exchange is for two processes; use allgather",
                self.size
            )));
        }
        Ok(self.allgather(bytes)?.swap_remove(1 - self.rank))
    }

    /// Waits until all processes have made this call. `meanwhile` runs while this process waits.
    ///
    /// # Errors
    /// The same as [`allgather_with`](Self::allgather_with).
    pub fn barrier_with(&mut self, meanwhile: impl FnMut()) -> io::Result<()> {
        self.allgather_with(&[], meanwhile).map(drop)
    }
}

fn deadline(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(Duration::from_secs(u32::MAX.into()))
}

fn invalid(why: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, why.into())
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Ranks {
    count: u32,
    /// The first missing ranks. Empty while ranks are not assigned yet.
    first: Vec<u32>,
}

impl Ranks {
    const LISTED: usize = 16;

    fn new(ranks: impl Iterator<Item = u32>) -> Ranks {
        let mut these = Ranks { count: 0, first: vec![] };
        for rank in ranks {
            these.count += 1;
            if these.first.len() < Ranks::LISTED {
                these.first.push(rank);
            }
        }
        these
    }

    fn one(rank: u32) -> Ranks {
        Ranks { count: 1, first: vec![rank] }
    }

    fn encode(&self) -> Vec<u8> {
        [self.count].iter().chain(&self.first).flat_map(|word| word.to_le_bytes()).collect()
    }

    fn decode(bytes: &[u8]) -> Option<Ranks> {
        let words = bytes.chunks(4).map(|word| word.try_into().map(u32::from_le_bytes));
        let words: Vec<u32> = words.collect::<Result<_, _>>().ok()?;
        let (&count, first) = words.split_first()?;
        let whole = first.len() <= Ranks::LISTED && first.len() <= count as usize;
        whole.then(|| Ranks { count, first: first.to_vec() })
    }
}

impl fmt::Display for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.count == 1 { "" } else { "s" };
        if self.first.is_empty() {
            return write!(f, "{} process{}", self.count, if self.count == 1 { "" } else { "es" });
        }
        let listed: Vec<String> = self.first.iter().map(u32::to_string).collect();
        write!(f, "rank{plural} {}", listed.join(", "))?;
        match self.count as usize - self.first.len() {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}
