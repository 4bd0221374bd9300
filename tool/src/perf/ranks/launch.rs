//! Starts the ranks of a job on this host, if no launcher does. This process is rank 0. It passes
//! the job's id to the other ranks through their standard input.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fishplate::Job;
use fishplate::job::{ID_LEN, Leader, UniqueId};

use super::super::meet::{describe, tie_to_this_process};
use super::job_failed;
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::limits;

const LEAVE: Duration = Duration::from_secs(10);

const LAST_WORDS: Duration = Duration::from_secs(1);

/// A killed process closes its sockets before its parent reaps it, so other ranks may exit first.
const REAPED: Duration = Duration::from_millis(300);

/// Dropping this kills the processes.
pub struct Started {
    children: Vec<Child>,
}

/// Starts the other ranks with the same options, and waits until all have joined.
pub fn start(options: &[OsString], ranks: usize, timeout: Duration) -> Outcome<(Job, Started)> {
    let leader = Leader::open()
        .map_err(|error| Failure::run(format!("cannot listen for ranks: {error}")))?;
    let id = leader.id();
    let exe = std::env::current_exe().map_err(|error| {
        Failure::run(format!("cannot find this program's file to start ranks: {error}"))
    })?;
    let mut started = Started { children: vec![] };
    for rank in 1..ranks {
        let mut command = Command::new(&exe);
        command.args(["perf", "job"]).args(options).args(["--member", &rank.to_string()]);
        tie_to_this_process(command.stdin(Stdio::piped()).stdout(Stdio::null()));
        let mut child = command.spawn().map_err(|error| {
            Failure::run(format!("cannot start rank {rank}: {error}{}", limits::remedy(&error)))
        })?;
        let told = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(id.as_bytes()));
        started.children.push(child);
        told.map_err(|error| {
            Failure::run(format!("cannot send the job's id to rank {rank}: {error}"))
        })?;
    }
    match leader.lead_while(ranks, timeout, || started.check()) {
        Ok(job) => Ok((job, started)),
        Err(error) => interrupt::check().and(Err(Failure::run(error.to_string()))),
    }
}

pub fn join(rank: usize, ranks: usize, timeout: Duration) -> Outcome<Job> {
    interrupt::leave_to_parent();
    let mut id = [0; ID_LEN];
    std::io::stdin().read_exact(&mut id).map_err(|error| {
        Failure::usage(format!(
            "--member {rank}: cannot read the job's id from standard input: {error}"
        ))
    })?;
    let id = UniqueId::from_bytes(&id).map_err(|error| job_failed(&error))?;
    Job::follow(&id, rank, ranks, timeout).map_err(|error| job_failed(&error))
}

impl Started {
    /// Describes how a rank has ended, and returns whether it exited by itself. `None` if no rank
    /// has ended. Prefers a killed rank, because other ranks exit with an error when one is killed.
    fn ended(&mut self) -> Option<(bool, String)> {
        let ended = self.children.iter_mut().enumerate().filter_map(|(at, child)| {
            let status = child.try_wait().ok().flatten()?;
            let told = format!("rank {} (pid {}) {}", at + 1, child.id(), describe(status));
            Some((status.code().is_some(), told))
        });
        ended.min()
    }

    /// Checks while ranks join. Fails if a rank has ended or the user has pressed Ctrl-C.
    fn check(&mut self) -> io::Result<()> {
        match (interrupt::check(), self.ended()) {
            (Ok(()), None) => Ok(()),
            (Ok(()), Some((_, told))) => {
                Err(io::Error::other(format!("{told} before all had joined")))
            }
            (Err(_), _) => Err(io::Error::from(ErrorKind::Interrupted)),
        }
    }

    pub fn explain(&mut self, message: String) -> String {
        let begun = Instant::now();
        loop {
            match self.ended() {
                Some((exited, told)) if !exited || begun.elapsed() >= REAPED => {
                    return format!("{message}; {told}");
                }
                None if begun.elapsed() >= LAST_WORDS => return message,
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    pub fn leave(mut self) -> Outcome {
        let until = Instant::now() + LEAVE;
        for (at, child) in self.children.iter_mut().enumerate() {
            let rank = at + 1;
            loop {
                match child.try_wait().ok().flatten() {
                    Some(status) if status.success() => break,
                    Some(status) => {
                        return Err(Failure::run(format!("rank {rank} {}", describe(status))));
                    }
                    None if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
                    None => return Err(Failure::run(format!("rank {rank} did not exit"))),
                }
            }
        }
        Ok(())
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        for child in &mut self.children {
            // An error means that the process has already exited, as intended.
            let _ = child.kill();
        }
        for child in &mut self.children {
            let _ = child.wait();
        }
    }
}
