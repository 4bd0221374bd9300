//! Joins a job through PMI-1, the protocol of `mpiexec.hydra` and other launchers. It exchanges
//! lines of text over an inherited socket. The lines carry rank 0's id to the other ranks, which
//! then join rank 0 over TCP.
//!
//! Blocks at most until the entry's deadline. The barrier of PMI-1 does not tell which ranks are
//! missing. After the barrier, errors list the missing ranks.

use std::io::{self, ErrorKind};
use std::os::fd::RawFd;
use std::time::Instant;

use super::Job;
use super::id::UniqueId;
use super::leader::Leader;
use super::meet::{self, Entry};

const KEY: &str = "fishplate-job";

const LINE_MAX: usize = 4096;

pub(super) fn join(fd: RawFd, entry: &Entry) -> io::Result<Job> {
    let mut pmi = Pmi { fd, entry, received: vec![] };
    pmi.ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init")?;
    let answer = pmi.ask("cmd=get_my_kvsname", "my_kvsname")?;
    let space = value(&answer, "kvsname").ok_or_else(|| failed("kvsname", &answer))?.to_owned();
    let leader = if entry.rank == Some(0) { Some(Leader::open()?) } else { None };
    if let Some(leader) = &leader {
        let id = leader.id().to_hex();
        pmi.ask(&format!("cmd=put kvsname={space} key={KEY} value={id}"), "put_result")?;
    }
    pmi.ask("cmd=barrier_in", "barrier_out")?;
    let job = match leader {
        Some(leader) => leader.lead_as(entry)?,
        None => {
            let answer = pmi.ask(&format!("cmd=get kvsname={space} key={KEY}"), "get_result")?;
            meet::at_leader(&id(&answer)?, entry)?
        }
    };
    // The launcher treats a process that exits without `finalize` as failed.
    pmi.ask("cmd=finalize", "finalize_ack")?;
    Ok(job)
}

/// Returns whether this process has a socket with that number.
pub(super) fn is_socket(fd: RawFd) -> bool {
    let (mut kind, mut len) = (0, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: `kind` and `len` are writable, and `len` is the size of `kind`. The call fails for
    // any other descriptor.
    unsafe {
        let kind = (&raw mut kind as *mut libc::c_int).cast();
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_TYPE, kind, &mut len) == 0
    }
}

struct Pmi<'a> {
    fd: RawFd,
    entry: &'a Entry,
    received: Vec<u8>,
}

impl Pmi<'_> {
    fn ask(&mut self, line: &str, wanted: &str) -> io::Result<String> {
        let line = format!("{line}\n");
        let mut rest = line.as_bytes();
        while !rest.is_empty() {
            // SAFETY: `rest` is readable for its length.
            let sent = unsafe {
                let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
                libc::send(self.fd, rest.as_ptr().cast(), rest.len(), flags)
            };
            match usize::try_from(sent) {
                Ok(sent) => rest = &rest[sent..],
                Err(_) => self.not_ready(libc::POLLOUT, wanted)?,
            }
        }
        loop {
            if let Some(answer) = answer(&mut self.received, wanted)? {
                return Ok(answer);
            }
            let mut bytes = [0; 1024];
            // SAFETY: `bytes` is writable for its length.
            let got = unsafe {
                libc::recv(self.fd, bytes.as_mut_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT)
            };
            match usize::try_from(got) {
                Ok(0) => {
                    return Err(io::Error::new(
                        ErrorKind::UnexpectedEof,
                        "PMI: the launcher closed the connection; check that it runs, or set \
                         FISHPLATE_RENDEZVOUS",
                    ));
                }
                Ok(got) => self.received.extend(&bytes[..got]),
                Err(_) => self.not_ready(libc::POLLIN, wanted)?,
            }
        }
    }

    fn not_ready(&self, events: i16, wanted: &str) -> io::Result<()> {
        let error = io::Error::last_os_error();
        match error.kind() {
            ErrorKind::Interrupted => return Ok(()),
            ErrorKind::WouldBlock => {}
            kind => {
                return Err(io::Error::new(
                    kind,
                    format!(
                        "PMI: cannot use descriptor {}: {error}; start by a launcher with PMI-1, \
                         or unset PMI_FD",
                        self.fd
                    ),
                ));
            }
        }
        let left = self.entry.deadline.saturating_duration_since(Instant::now());
        let mut poll = libc::pollfd { fd: self.fd, events, revents: 0 };
        let pause = left.as_millis().clamp(1, 1000) as libc::c_int;
        // SAFETY: `poll` is one initialized structure.
        unsafe { libc::poll(&mut poll, 1, pause) };
        if !self.entry.has_expired() || poll.revents != 0 {
            return Ok(());
        }
        let who = match wanted {
            "barrier_out" => format!("not all {} ranks reached PMI's barrier", self.entry.size),
            _ => "the launcher did not answer".into(),
        };
        let text = format!("PMI: {who} within {:?}; check that each rank runs", self.entry.timeout);
        Err(io::Error::new(ErrorKind::TimedOut, text))
    }
}

pub(super) fn answer(received: &mut Vec<u8>, wanted: &str) -> io::Result<Option<String>> {
    let end = received.iter().position(|&byte| byte == b'\n');
    if end.unwrap_or(received.len()) > LINE_MAX {
        return Err(failed(wanted, "an answer of more than 4096 bytes"));
    }
    let Some(end) = end else { return Ok(None) };
    let line: Vec<u8> = received.drain(..=end).collect();
    let answer = String::from_utf8_lossy(&line).trim_end().to_owned();
    let good = value(&answer, "cmd") == Some(wanted) && value(&answer, "rc").unwrap_or("0") == "0";
    if good { Ok(Some(answer)) } else { Err(failed(wanted, &answer)) }
}

pub(super) fn id(answer: &str) -> io::Result<UniqueId> {
    UniqueId::from_hex(value(answer, "value").ok_or_else(|| failed("get", answer))?)
}

fn value<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.split(' ')
        .find_map(|word| word.split_once('=').filter(|(name, _)| *name == key))
        .map(|(_, value)| value)
}

fn failed(what: &str, answer: &str) -> io::Error {
    let text = format!(
        "PMI: {what} failed: the launcher answered {answer:?}; set FISHPLATE_RENDEZVOUS instead"
    );
    io::Error::new(ErrorKind::InvalidData, text)
}
