//! How the two processes of a run meet:
//! one starts the other, or one listens and the other connects.

use std::ffi::OsStr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use fishplate_core::engine::Config;
use fishplate_shm::{
    HandshakeError, Link, Listener, Profile, Role, SegmentError, ShmConfig, connect, socket_pair,
};
use fishplate_sys::LinuxHost;

use crate::args::{PeerArgs, Plan};
use crate::failure::{Failure, Outcome};
use crate::room;
use crate::sizes;

/// How long a process that has nothing more to do may take to end: it gives its memory back first.
const LEAVE: Duration = Duration::from_secs(10);

/// How long a process that hung up may take to end.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How long a process that was started may take to answer, in seconds.
const START: u64 = 10;

/// How often a listener says whom it has turned away.
pub const LOOK: Duration = Duration::from_millis(100);

/// How many of those it names.
const NAMED: u32 = 16;

/// The engine's settings where the two share memory.
pub const SHARING: Config = Config { window: 256, ..Config::DEFAULT };

/// What a shared-memory rail to one other process is opened with.
pub fn sharing(common_len: usize) -> (LinuxHost, ShmConfig) {
    // The rail itself fences towards peers that sleep without membarrier.
    let host = LinuxHost::shared().peer_uses_membarrier(true);
    let membarrier = host.sleeper_uses_membarrier();
    (host, ShmConfig { max_peers: 1, common_len, membarrier, ..ShmConfig::default() })
}

/// The second process, when this one started it. Dropping it ends it.
pub struct Second {
    child: Child,
}

/// Starts the second process, which inherits a socket to this one, and ends when this one does.
pub fn launch(plan: &Plan, socket: OwnedFd, more: &[String]) -> Outcome<Second> {
    let exe = std::env::current_exe().map_err(|error| {
        Failure::run(format!("cannot find the program to start a second process: {error}"))
    })?;
    let mut command = Command::new(exe);
    command
        .arg("peer")
        .args(["--socket", &socket.as_raw_fd().to_string()])
        .args(["--region", &plan.region.to_string()])
        .args(["--timeout", &plan.timeout.to_string()])
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let (parent, inherited) = (std::process::id(), socket.as_raw_fd());
    // SAFETY: between fork and exec only async-signal-safe calls are made: prctl, fcntl, getppid,
    // _exit.
    unsafe {
        command.pre_exec(move || {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            // The parent may have died before the request was in place.
            if libc::getppid() as u32 != parent {
                libc::_exit(1);
            }
            // In the new process alone it outlives exec.
            match libc::fcntl(inherited, libc::F_SETFD, 0) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    let child = command.spawn().map_err(|error| {
        Failure::run(format!("cannot start a second process: {error}{}", room::remedy(&error)))
    })?;
    Ok(Second { child })
}

/// Starts the second process, with `more` on its command line, and shakes hands with it over a
/// socket that it inherits: there is no name at which anybody else could connect.
pub fn spawn(plan: &Plan, profile: &Profile, more: &[String]) -> Outcome<(Link, Second)> {
    let (here, there) = socket_pair()
        .map_err(|error| Failure::run(format!("cannot make a socket for a second process: {error}")))?;
    let mut second = launch(plan, there, more)?;
    match Link::over(here, Role::First, profile, soon(plan.timeout)) {
        Ok(link) => Ok((link, second)),
        Err(HandshakeError::HungUp) => Err(second.did_not_answer(true, HandshakeError::HungUp)),
        Err(error) => Err(explain(error, "the second process", plan.region)),
    }
}

/// Shakes hands with the process that started this one.
pub fn answer(args: &PeerArgs, profile: &Profile) -> Outcome<Link> {
    Link::over(inherited(args.socket)?, Role::Second, profile, soon(args.timeout))
        .map_err(|error| explain(error, "the first process", args.region))
}

/// When a process that was started must have answered: it is given some time to start, not all
/// there is.
pub fn soon(timeout: u64) -> Instant {
    Instant::now() + Duration::from_secs(timeout.min(START))
}

/// Waits for the other side at an address.
pub fn listen(plan: &Plan, at: &OsStr, profile: &Profile) -> Outcome<Link> {
    let shown = at.to_string_lossy();
    let listener = Listener::bind(at).map_err(|error| match error {
        HandshakeError::InUse => Failure::usage(format!(
            "--listen {shown}: it exists already; if no other process listens there, remove it, or choose another name"
        )),
        HandshakeError::Address => Failure::usage(format!(
            "--listen {shown}: not a usable socket address; use a path of at most 107 bytes, or @NAME"
        )),
        HandshakeError::System(code) => Failure::run(format!(
            "--listen {shown}: {}",
            std::io::Error::from_raw_os_error(code)
        )),
        error => Failure::run(format!("--listen {shown}: {error}")),
    })?;
    eprintln!("# waiting at {shown} for: fishplate perf {} --connect {shown}", crate::args::name(plan.test));
    let deadline = Instant::now() + Duration::from_secs(plan.timeout);
    let mut refusals = Refusals::default();
    loop {
        let met = listener.accept(profile, deadline.min(Instant::now() + LOOK));
        for (who, why) in listener.refused() {
            refusals.tell(&explain(why, &who, plan.region));
        }
        match met {
            Err(HandshakeError::Deadline) if Instant::now() < deadline => {}
            Err(HandshakeError::Deadline) => return Err(refusals.nobody(&shown, plan.timeout)),
            Err(error) => return Err(Failure::run(format!("--listen {shown}: {error}"))),
            Ok(link) => return Ok(link),
        }
    }
}

/// Finds the other side at an address.
pub fn find(at: &OsStr, region: usize, timeout: u64, profile: &Profile) -> Outcome<Link> {
    let shown = at.to_string_lossy();
    // A listener is given some time to appear, not all there is.
    let deadline = Instant::now() + Duration::from_secs(timeout.min(5));
    connect(at, profile, deadline).map_err(|error| match error {
        HandshakeError::Address => Failure::usage(format!(
            "--connect {shown}: not a usable socket address; use a path of at most 107 bytes, or @NAME"
        )),
        HandshakeError::System(libc::ENOENT | libc::ECONNREFUSED) => Failure::run(format!(
            "--connect {shown}: nobody listens there; start the other side with --listen {shown} first"
        )),
        HandshakeError::System(code) => {
            Failure::run(format!("--connect {shown}: {}", std::io::Error::from_raw_os_error(code)))
        }
        error => explain(error, &format!("the process that listens at {shown}"), region),
    })
}

/// What went wrong between two processes that reached each other.
fn explain(error: HandshakeError, who: &str, region: usize) -> Failure {
    if let HandshakeError::Segment(
        error @ (SegmentError::Room { .. }
        | SegmentError::FileSize { .. }
        | SegmentError::System(libc::ENOMEM)),
    ) = error
    {
        return room::lack(region, error);
    }
    Failure::run(match error {
        HandshakeError::Version { theirs, ours } => format!(
            "{who} speaks protocol version {theirs} and this program {ours}: run the same build on both sides"
        ),
        HandshakeError::Mismatch { what: "common length", .. } => format!(
            "{who} was started with another --region; here it is {}: give both the same",
            sizes::show(region)
        ),
        HandshakeError::Mismatch { what, theirs, ours } => {
            format!("{who} has {what} {theirs} and this program {ours}: run the same build on both sides")
        }
        HandshakeError::User(uid) => format!("{who} belongs to user {uid}, who is not admitted"),
        HandshakeError::HungUp => format!("{who} hung up before it was ready"),
        HandshakeError::Deadline => format!("{who} did not answer in time"),
        HandshakeError::BadPacket => format!("{who} does not speak fishplate's protocol"),
        error => format!("{who}: {error}"),
    })
}

/// The socket that this process inherited from the one that started it. To be called before this
/// process opens any of that kind.
pub fn inherited(socket: i32) -> Outcome<OwnedFd> {
    let (mut domain, mut len) = (0i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: a call with plain numbers, which says whether the descriptor exists, and is not
    // inherited any further; the kernel writes one number.
    let known = unsafe {
        let domain = (&raw mut domain).cast();
        libc::fcntl(socket, libc::F_SETFD, libc::FD_CLOEXEC) == 0
            && libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_DOMAIN, domain, &mut len) == 0
    };
    if !known || domain != libc::AF_UNIX {
        let why = "not a socket of a process that measures, which alone starts this one";
        return Err(Failure::usage(format!("--socket {socket}: {why}")));
    }
    // SAFETY: it is open, and nothing in this process has opened such a socket, so it was opened
    // for this use before we began.
    Ok(unsafe { OwnedFd::from_raw_fd(socket) })
}

/// Whom a listener has turned away.
#[derive(Default)]
pub struct Refusals(u32);

impl Refusals {
    /// Says so, of the first few.
    pub fn tell(&mut self, why: &Failure) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            ..=NAMED => eprintln!("# turned away: {why}"),
            n if n == NAMED + 1 => eprintln!("# turned away more, which are not named"),
            _ => {}
        }
    }

    /// Nobody came who fits.
    pub fn nobody(&self, at: &str, timeout: u64) -> Failure {
        let others = match self.0 {
            0 => String::new(),
            n => format!(" but {n} that were turned away"),
        };
        Failure::run(format!(
            "nobody connected to {at} within {timeout} s{others}; start the other side, or wait longer with --timeout"
        ))
    }
}

impl Second {
    /// Why it did not answer. One that dies hangs up first, and is seen to have ended a moment
    /// later.
    pub fn did_not_answer(&mut self, hung_up: bool, why: impl std::fmt::Display) -> Failure {
        let within = if hung_up { LAST_WORDS } else { Duration::ZERO };
        Failure::run(match self.ends(within) {
            Some(how) => format!("the second process (pid {}) {how} before it answered", self.id()),
            None => format!("the second process: {why}"),
        })
    }

    /// Its process number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<String> {
        self.child.try_wait().ok().flatten().map(describe)
    }

    /// How it ended, if it does within a moment.
    pub fn ends(&mut self, within: Duration) -> Option<String> {
        let deadline = Instant::now() + within;
        loop {
            match self.ended() {
                None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
                ended => return ended,
            }
        }
    }

    /// Lets it end by itself.
    pub fn leave(mut self) -> Outcome {
        match self.ends(LEAVE) {
            Some(status) if status == SUCCESS => Ok(()),
            Some(status) => Err(Failure::run(format!("the second process {status}"))),
            None => Err(Failure::run("the second process did not end")),
        }
    }
}

const SUCCESS: &str = "ended";

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(0), _) => SUCCESS.into(),
        (Some(code), _) => format!("ended with exit code {code}"),
        (_, Some(signal)) => format!("was killed by signal {signal}"),
        _ => "ended for no known reason".into(),
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        // An error means that it has ended already, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
