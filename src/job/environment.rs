//! Determines from the launcher's environment variables how the processes of a job find each other.
//! `docs/jobs.md` lists the variables.
//!
//! The caller passes a function that reads the variables, so tests need not change the environment.

use std::net::{SocketAddr, ToSocketAddrs};
use std::num::NonZeroU16;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::Duration;
use std::{fmt, io};

use super::id::Cookie;
use super::meet::{self, Entry};
use super::{Job, file, invalid, pmi, pmix};

/// Names of the rank and size variables of each launcher. The innermost launcher comes first:
/// torchrun may run under Slurm, and Open MPI may run inside a Slurm allocation.
const LAUNCHERS: [[&str; 2]; 5] = [
    ["FISHPLATE_RANK", "FISHPLATE_SIZE"],
    ["RANK", "WORLD_SIZE"],
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
    ["PMI_RANK", "PMI_SIZE"],
    // Slurm sets the size of a step only inside the step. It sets other variables in batch scripts
    // too.
    ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"],
];

/// Variables with the number of a process among those of its host, ordered as [`LAUNCHERS`].
/// Slurm's comes last: if another launcher starts its processes through one Slurm task, the
/// variable is 0 in all of them.
const LOCAL_RANKS: [&str; 6] = [
    "FISHPLATE_LOCAL_RANK",
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "SLURM_LOCALID",
];

/// Joins the job that these variables describe.
pub(super) fn join(get: impl Fn(&str) -> Option<String>, timeout: Duration) -> io::Result<Job> {
    let local_rank = local_rank(&get)?;
    let mut job = way(get, timeout)?.join(timeout)?;
    job.local_rank = match local_rank {
        // PMIx knows the process itself. Variables may be those of an outer launcher.
        Some((_, name)) if name != LOCAL_RANKS[0] && job.local_rank.is_some() => job.local_rank,
        found => found.map(|(rank, _)| rank).or(job.local_rank),
    };
    Ok(job)
}

/// Returns the number of this process among those of its host, and the variable that contains it.
pub(super) fn local_rank(
    get: impl Fn(&str) -> Option<String>,
) -> io::Result<Option<(usize, &'static str)>> {
    for name in LOCAL_RANKS {
        match get(name).filter(|value| !value.is_empty()).map(|value| (value.parse(), value)) {
            Some((Ok(rank), _)) => return Ok(Some((rank, name))),
            Some((Err(_), value)) if name == LOCAL_RANKS[0] => {
                return Err(unusable(name, &value, "a number from 0"));
            }
            // Programs also set LOCAL_RANK to -1, which means none.
            _ => {}
        }
    }
    Ok(None)
}

pub(super) enum Way {
    Address(String, u16, Entry),
    Folder(PathBuf, Entry),
    Pmi(RawFd, Entry),
    Pmix(pmix::Library),
    Alone,
}

impl Way {
    pub fn join(self, timeout: Duration) -> io::Result<Job> {
        match self {
            Way::Address(host, port, entry) => {
                let found = (host.as_str(), port).to_socket_addrs();
                let refusal = |error| {
                    invalid(format!(
                        "the job's host {host:?} has no address: {error}; check its name"
                    ))
                };
                meet::at_address(&found.map_err(refusal)?.collect::<Vec<SocketAddr>>(), &entry)
            }
            Way::Folder(folder, entry) => file::in_folder(&folder, &entry),
            Way::Pmi(fd, entry) => pmi::join(fd, &entry),
            Way::Pmix(library) => pmix::join(&library, timeout),
            Way::Alone => Ok(Job::alone()),
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Way::Address(host, port, entry) => write!(f, "{entry}, at {host}:{port}"),
            Way::Folder(folder, entry) => write!(f, "{entry}, in {}", folder.display()),
            Way::Pmi(fd, entry) => write!(f, "{entry}, by PMI-1 over descriptor {fd}"),
            Way::Pmix(_) => f.write_str("a launcher with PMIx"),
            Way::Alone => f.write_str("no launcher: this process is alone"),
        }
    }
}

pub(super) fn way(get: impl Fn(&str) -> Option<String>, timeout: Duration) -> io::Result<Way> {
    let get = |name: &str| get(name).filter(|value| !value.is_empty());
    // No other program sets FISHPLATE_RANK, so its size was forgotten.
    if get("FISHPLATE_RANK").is_some() && get("FISHPLATE_SIZE").is_none() {
        return Err(invalid("FISHPLATE_RANK is set, but not FISHPLATE_SIZE; set both"));
    }
    if let Some(place) = get("FISHPLATE_RENDEZVOUS") {
        let Some((rank, size)) = place_in_job(&get)? else {
            return Err(invalid(
                "FISHPLATE_RENDEZVOUS is set, but not the job's size; set FISHPLATE_SIZE too",
            ));
        };
        let entry = Entry::new(rank, size, cookie(&get)?, timeout)?;
        return match (place.strip_prefix("tcp://"), place.strip_prefix("file://")) {
            (Some(address), _) => at_address(address, &get, entry),
            (_, Some(folder)) if folder.starts_with('/') => Ok(Way::Folder(folder.into(), entry)),
            _ => Err(unusable("FISHPLATE_RENDEZVOUS", &place, "tcp://HOST:PORT or file:///DIR")),
        };
    }
    let with_pmix = get("PMIX_NAMESPACE").is_some();
    let mut stale = None;
    if let Some(text) = get("PMI_FD") {
        match text.parse().ok().filter(|&fd| pmi::is_socket(fd)) {
            Some(fd) => return Ok(Way::Pmi(fd, by_pmi(&get, timeout)?)),
            // An outer launcher set the variable, for example mpiexec.hydra outside mpirun.
            None if with_pmix => stale = Some(no_socket(&text)),
            None => return Err(no_socket(&text)),
        }
    }
    let mut unloaded = None;
    if with_pmix {
        match (pmix::Library::load(), stale) {
            (Ok(library), _) => return Ok(Way::Pmix(library)),
            // Other variables may be those of the outer launcher too.
            (Err(_), Some(stale)) => return Err(stale),
            (Err(why), None) => unloaded = Some(why),
        }
    }
    let placed = place_in_job(&get)?;
    if let (Some(host), Some(port), Some((rank, size))) =
        (get("MASTER_ADDR"), get("MASTER_PORT"), placed)
    {
        let port: Option<NonZeroU16> = port.parse().ok();
        let port = port.and_then(|port| port.get().checked_add(1));
        let port = port.ok_or_else(|| invalid("MASTER_PORT is invalid; use 1 to 65534"))?;
        return Ok(Way::Address(host, port, Entry::new(rank, size, cookie(&get)?, timeout)?));
    }
    match placed {
        None | Some((_, 1)) => Ok(Way::Alone),
        Some((_, size)) => {
            let why = unloaded.map_or(String::new(), |why| format!(" ({why})"));
            Err(invalid(format!(
                "a job of {size} processes has no way to meet{why}; set FISHPLATE_RENDEZVOUS to \
                 tcp://HOST:PORT or file:///DIR"
            )))
        }
    }
}

/// Reads only PMI's own variables, because others may be those of another launcher.
fn by_pmi(get: &impl Fn(&str) -> Option<String>, timeout: Duration) -> io::Result<Entry> {
    let (Some(rank), Some(size)) = (number(get, "PMI_RANK")?, number(get, "PMI_SIZE")?) else {
        return Err(invalid(
            "PMI_FD is set, but not PMI_RANK and PMI_SIZE; start by a launcher with PMI-1",
        ));
    };
    Entry::new(Some(rank), size, Cookie::NONE, timeout)
}

fn no_socket(fd: &str) -> io::Error {
    unusable("PMI_FD", fd, "a launcher with PMI-1, which opens this descriptor, or unset PMI_FD")
}

fn number(get: &impl Fn(&str) -> Option<String>, name: &str) -> io::Result<Option<usize>> {
    match get(name) {
        Some(value) => value.parse().map(Some).map_err(|_| unusable(name, &value, "a number")),
        None => Ok(None),
    }
}

fn unusable(name: &str, value: &str, use_this: &str) -> io::Error {
    invalid(format!("{name} is unusable: {value:?} given; use {use_this}"))
}

fn cookie(get: &impl Fn(&str) -> Option<String>) -> io::Result<Cookie> {
    get("FISHPLATE_COOKIE").map_or(Ok(Cookie::NONE), |text| text.parse())
}

/// Parses `HOST:PORT`. Without a host, uses torchrun's `MASTER_ADDR`.
fn at_address(
    address: &str,
    get: &impl Fn(&str) -> Option<String>,
    entry: Entry,
) -> io::Result<Way> {
    let wanted = "tcp://HOST:PORT, or tcp://:PORT with MASTER_ADDR";
    let refusal = || unusable("FISHPLATE_RENDEZVOUS", address, wanted);
    let (host, port) = address.rsplit_once(':').ok_or_else(refusal)?;
    let port: NonZeroU16 = port.parse().map_err(|_| refusal())?;
    let host = match host {
        "" => get("MASTER_ADDR").ok_or_else(refusal)?,
        host => host.trim_start_matches('[').trim_end_matches(']').to_owned(),
    };
    Ok(Way::Address(host, port.get(), entry))
}

#[allow(clippy::type_complexity)]
fn place_in_job(
    get: &impl Fn(&str) -> Option<String>,
) -> io::Result<Option<(Option<usize>, usize)>> {
    let number = |name: &str| number(get, name);
    for [rank, size] in LAUNCHERS {
        // Other programs may also set RANK, so the size must be set too.
        match (number(rank), number(size)?) {
            (Ok(Some(rank)), Some(size)) => return Ok(Some((Some(rank), size))),
            (Ok(None), Some(size)) if rank == LAUNCHERS[0][0] => return Ok(Some((None, size))),
            (Err(error), Some(_)) => return Err(error),
            _ => {}
        }
    }
    Ok(None)
}
