//! Runs `perf job`, which measures traffic between the ranks of a job.
//!
//! | part | what |
//! |---|---|
//! | `pattern` | which ranks send to which |
//! | `launch` | starts the ranks if no launcher does |
//! | `traffic` | the messages of a rank |
//! | `rows` | the rows that rank 0 writes |
//!
//! A flow is a stream of put-signals from one rank into slots of another. The receiver verifies the
//! payloads, and frees the slots by a signal. Setup is slow. The loop of a row neither blocks nor
//! allocates, and yields the processor when it is idle.

mod launch;
mod pattern;
mod rows;
mod traffic;

use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use clap::Parser;
use fishplate::node::Fabric;
use fishplate::{Job, Limits, Node, PeerId, rails};

use crate::args::{Format, Transport, bounds};
use crate::clock::{self, Clock};
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::sizes;
use crate::variables;

use pattern::Pattern;
use rows::{Rows, Tally};
use traffic::Traffic;

/// Measure traffic between the ranks of a job: many pairs at once, one to many, all to all, a ring.
#[derive(Debug, Parser)]
#[command(name = "fishplate perf job", bin_name = "fishplate perf \
    job", max_term_width = 80, after_long_help = HELP)]
struct JobArgs {
    /// Start this many ranks on this host. Without this option, a launcher must have started them.
    #[arg(
        short = 'N', long, value_name = "N",
        value_parser = sizes::count_in::<u64>(2, fishplate::job::SIZE_MAX as u64)
    )]
    ranks: Option<u64>,
    /// Patterns to run, one after the other: which ranks send to which.
    #[arg(
        short,
        long,
        value_enum,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "all-to-all"
    )]
    pattern: Vec<Pattern>,
    /// Payload sizes in bytes, such as 8, 64K or 1M.
    #[arg(
        short, long, value_name = "LIST", value_delimiter = ',', value_parser = sizes::parse,
        default_value = "8"
    )]
    size: Vec<usize>,
    /// Number of messages per flow, such as 5000 or 100K.
    #[arg(
        short = 'n', long, value_name = "N", value_parser = sizes::parse_count::<u64>,
        default_value = "1000"
    )]
    iters: u64,
    /// Maximum number of messages of a flow that its receiver has not taken yet.
    #[arg(long, value_name = "N", value_parser = sizes::parse_count::<u32>, default_value = "16")]
    window: u32,
    /// Verify every payload.
    #[arg(long)]
    check: bool,
    /// Seed of payloads.
    #[arg(long, value_name = "N", value_parser = sizes::parse_count::<u64>, default_value = "1")]
    seed: u64,
    /// How to write the results.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    /// The same as --format json.
    #[arg(long, conflicts_with = "format")]
    json: bool,
    /// Time limit, such as 90 (seconds), 500ms or 5m: for all ranks to join, and for each row.
    #[arg(
        short = 'T', long, value_name = "TIME", value_parser = sizes::parse_time,
        default_value = "60s"
    )]
    timeout: Duration,
    /// The rank of this process, in a job that another process started.
    #[arg(long, hide = true)]
    member: Option<usize>,
}

const HELP: &str = "\
Start it with a launcher, or let it start the ranks itself:
  mpiexec.hydra -n 8 fishplate perf job --pattern ring --check
  mpirun -n 8 fishplate perf job
  torchrun --no-python --nproc-per-node 8 fishplate perf job
  fishplate perf job --ranks 8 --pattern pairs,all-to-all -s 8,4K
docs/jobs.md lists the variables that set the rank of a process.

Patterns of N ranks:
  pairs        each of the first half to one of the second half
  one-to-many  rank 0 to all others
  many-to-one  all others to rank 0
  all-to-all   each to all others
  ring         each to the next

Rates are sums over all flows, in the time of the slowest rank. cpu/op is
processor time of all ranks per message. first is the time until every flow of
the pattern has delivered a message. For the first pattern it includes
connecting; later patterns reuse connections. startup is the time from the start
of a process until all ranks have joined. memory is the proportional share (PSS)
of a process after the row. Both are the maximum over all ranks.

Exit status: 0 done; 1 the run failed, a rank was lost, or data was wrong; 2 the
command line is invalid; 130 interrupted; 141 the reader of the output exited.";

struct Member {
    job: Job,
    node: Node,
    /// The addresses of all ranks, and the peer ids of the ranks that this rank has connected to.
    addresses: Vec<Vec<u8>>,
    peers: Vec<Option<PeerId>>,
    timeout: Duration,
    clock: Clock,
}

pub fn run(words: &[OsString]) -> Outcome {
    let begun = Instant::now();
    let args = JobArgs::parse_from(words[2..].iter());
    check(&args)?;
    interrupt::watch();
    let timeout = args.timeout;
    let (job, started) = match (args.member, args.ranks) {
        (Some(rank), Some(ranks)) => (launch::join(rank, ranks as usize, timeout)?, None),
        (None, Some(ranks)) => {
            let (job, started) = launch::start(&words[3..], ranks as usize, timeout)?;
            (job, Some(started))
        }
        _ => (Job::from_env(timeout).map_err(|error| job_failed(&error))?, None),
    };
    if job.size() < 2 {
        return Err(Failure::usage(
            "perf job: a job of one rank has no peers; use --ranks N, or a launcher such as \
             mpiexec.hydra -n 4",
        ));
    }
    let outcome = Member::open(job, args.ranks.is_some(), timeout)
        .and_then(|member| member.run_all(&args, begun))
        .or_else(|error| interrupt::check().and(Err(error)));
    match (outcome, started) {
        (Ok(()), Some(started)) => started.leave(),
        // The process that started this rank reports the same error, or names the lost rank.
        (Err(Failure::Lost(_) | Failure::Usage(_) | Failure::Interrupted(_)), None)
            if args.member.is_some() =>
        {
            std::process::exit(1)
        }
        (Err(Failure::Lost(message)), Some(mut started)) => {
            Err(Failure::Lost(started.explain(message)))
        }
        (outcome, _) => outcome,
    }
}

fn check(args: &JobArgs) -> Outcome {
    bounds::iterations(args.iters, 0)?;
    bounds::window(args.window.into())?;
    if args.size.contains(&0) {
        return Err(Failure::usage("size 0: nothing would be transferred; use at least 1 byte"));
    }
    Ok(())
}

fn job_failed(error: &io::Error) -> Failure {
    match error.kind() {
        ErrorKind::InvalidInput => Failure::usage(error.to_string()),
        ErrorKind::UnexpectedEof => Failure::Lost(error.to_string()),
        _ => Failure::run(error.to_string()),
    }
}

impl Member {
    fn open(mut job: Job, one_host: bool, timeout: Duration) -> Outcome<Member> {
        let settings = variables::for_run(Transport::Fabric.window(), timeout)?;
        let most = job.size().max(Limits::DEFAULT.peers.into()) as u16;
        let limits = Limits { peers: most, remotes: 4 * most, operations: 4096, ..Limits::DEFAULT };
        // `Traffic` retries posts between other work, so a post never waits for room.
        let mut builder = Node::builder().limits(limits).connect_timeout(timeout).counters();
        builder = builder.patience(Duration::ZERO);
        if one_host {
            builder = builder.fabric(Fabric::Off);
        } else if settings.library.is_some() {
            // SAFETY: the library comes from a path that the user names as libfabric.
            let library = unsafe { rails::load(&settings) };
            builder = builder.library(library.map_err(|error| Failure::usage(error.to_string()))?);
        }
        let node = builder.settings(settings).open();
        let node = node.map_err(|error| Failure::run(format!("rank {}: {error}", job.rank())))?;
        let addresses = job.allgather(node.address()).map_err(|error| job_failed(&error))?;
        let peers = vec![None; job.size()];
        Ok(Member { job, node, addresses, peers, timeout, clock: Clock::calibrate() })
    }

    fn run_all(mut self, args: &JobArgs, begun: Instant) -> Outcome {
        let startup_s = begun.elapsed().as_secs_f64();
        let format = if args.json { Format::Json } else { args.format };
        let mut rows = Rows::new(format, self.job.rank() == 0);
        rows.headline(args, self.job.size())?;
        let mut wrong = 0;
        for &pattern in &args.pattern {
            wrong += self.run_pattern(args, pattern, startup_s, &mut rows)?;
        }
        self.barrier()?;
        let rank = self.job.rank();
        let closed = self.node.close(self.timeout);
        closed.map_err(|error| {
            Failure::run(format!("rank {rank}: cannot close the node: {error}"))
        })?;
        match wrong {
            0 => Ok(()),
            wrong => Err(Failure::run(format!("{wrong} messages had wrong data"))),
        }
    }

    /// Runs all sizes of a pattern. Returns the number of messages with wrong data in all ranks.
    fn run_pattern(
        &mut self,
        args: &JobArgs,
        pattern: Pattern,
        startup_s: f64,
        rows: &mut Rows,
    ) -> Outcome<u64> {
        let most = args.size.iter().copied().max().unwrap_or(1);
        self.barrier()?;
        let begun = Instant::now();
        let mut traffic = Traffic::open(self, pattern, most, args.window.into())?;
        self.barrier()?;
        let (_, mut first_errors) = traffic.run(self, 1, 1, args.check.then_some(args.seed))?;
        let first_s = begun.elapsed().as_secs_f64();
        let mut wrong = 0;
        for &size in &args.size {
            self.barrier()?;
            let (begun, busy) = (self.clock.now(), clock::processor_ns());
            let (checked, errors) =
                traffic.run(self, size, args.iters, args.check.then_some(args.seed))?;
            let tally = Tally {
                ns: self.clock.ns(self.clock.now().wrapping_sub(begun)),
                cpu_ns: clock::processor_ns() - busy,
                checked,
                errors: errors + std::mem::take(&mut first_errors),
                startup_s,
                first_s,
                pss_bytes: rows::pss(),
            };
            let text = serde_json::to_vec(&tally)
                .map_err(|error| Failure::run(format!("cannot write a message: {error}")))?;
            let all: Vec<Tally> = self
                .gather(&text)?
                .iter()
                .map(|told| serde_json::from_slice(told))
                .collect::<Result<_, _>>()
                .map_err(|error| {
                    Failure::run(format!(
                        "a rank sent an invalid result: {error}; run the same build on all ranks"
                    ))
                })?;
            wrong += rows.row(args, pattern, size, &all)?;
        }
        traffic.close(self)?;
        Ok(wrong)
    }

    /// Exchanges bytes between all ranks, while the node makes progress.
    fn gather(&mut self, word: &[u8]) -> Outcome<Vec<Vec<u8>>> {
        let Member { job, node, .. } = self;
        let all =
            job.allgather_with(word, || _ = node.progress()).map_err(|error| job_failed(&error));
        interrupt::check()?;
        all
    }

    fn barrier(&mut self) -> Outcome {
        self.gather(&[]).map(drop)
    }

    /// Returns the peer id of a rank. Connects to the rank on first use.
    fn peer(&mut self, rank: usize) -> Outcome<PeerId> {
        if let Some(peer) = self.peers[rank] {
            return Ok(peer);
        }
        let peer = self.node.connect(&self.addresses[rank]);
        let peer =
            peer.map_err(|error| Failure::run(format!("cannot connect to rank {rank}: {error}")))?;
        self.peers[rank] = Some(peer);
        Ok(peer)
    }

    #[cold]
    fn look(&mut self) -> Outcome {
        interrupt::check()?;
        match self.node.failed_peers().first() {
            None => Ok(()),
            Some((peer, why)) => {
                let rank = self.peers.iter().position(|known| *known == Some(*peer));
                let name =
                    rank.map_or("a process of another job".into(), |rank| format!("rank {rank}"));
                Err(Failure::lost(&name, why))
            }
        }
    }
}
