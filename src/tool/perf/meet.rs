//! How the two processes of a run find each other: one starts the other, or one listens and the other connects.

use std::ffi::OsStr;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use fishplate_shm::{HandshakeError, Link, Listener, Profile, connect};

use crate::tool::args::Plan;
use crate::tool::failure::{Failure, Outcome};
use crate::tool::sizes;

/// How long a process that was told to end may take.
const LEAVE: Duration = Duration::from_secs(2);

/// How often who waits for a process that it has started looks whether that still lives.
const LOOK: Duration = Duration::from_millis(100);

/// The second process, when this one started it. Dropping it ends it.
pub struct Second {
    child: Child,
}

/// Starts the second process, which is to connect to an address, and to end when this one does.
pub fn launch(plan: &Plan, address: &str, more: &[String]) -> Outcome<Second> {
    let exe = std::env::current_exe().map_err(|error| {
        Failure::run(format!("cannot find the program to start a second process: {error}"))
    })?;
    let mut command = Command::new(exe);
    command
        .arg("peer")
        .args(["--connect", address])
        .args(["--region", &plan.region.to_string()])
        .args(["--timeout", &plan.timeout.to_string()])
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let parent = std::process::id();
    // SAFETY: between fork and exec only async-signal-safe calls are made: prctl, getppid, _exit.
    unsafe {
        command.pre_exec(move || {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            // The parent may have died before the request was in place.
            if libc::getppid() as u32 != parent {
                libc::_exit(1);
            }
            Ok(())
        });
    }
    let child =
        command.spawn().map_err(|error| Failure::run(format!("cannot start a second process: {error}")))?;
    Ok(Second { child })
}

/// Starts the second process, with `more` on its command line, and shakes hands with it.
pub fn spawn(plan: &Plan, profile: &Profile, more: &[String]) -> Outcome<(Link, Second)> {
    let mut random = [0u8; 16];
    // SAFETY: 16 bytes, all ours.
    if unsafe { libc::getrandom(random.as_mut_ptr().cast(), random.len(), 0) } != random.len() as isize {
        return Err(Failure::run("the system gives no random numbers"));
    }
    // An abstract name that nobody guesses: nothing is left behind, whoever is killed.
    let address = format!("@fishplate-{:032x}", u128::from_ne_bytes(random));
    let listener = Listener::bind(&address)
        .map_err(|error| Failure::run(format!("cannot listen for a second process: {error}")))?;
    let mut second = launch(plan, &address, more)?;
    let deadline = Instant::now() + Duration::from_secs(plan.timeout.min(10));
    loop {
        let until = deadline.min(Instant::now() + LOOK);
        let met = listener.wait(until).and_then(|()| listener.accept(profile, deadline));
        let error = match met {
            Ok(link) if link.pid() as u32 == second.id() => return Ok((link, second)),
            // Somebody else: hang up.
            Ok(_) => continue,
            Err(error) => error,
        };
        // A process that dies hangs up first, and is seen to have ended a moment later.
        let within = if error == HandshakeError::HungUp { LEAVE } else { Duration::ZERO };
        if let Some(how) = second.ends(within) {
            let pid = second.id();
            return Err(Failure::run(format!("the second process (pid {pid}) {how} before it answered")));
        }
        if error != HandshakeError::Deadline || Instant::now() >= deadline {
            return Err(explain(error, "the second process", plan.region));
        }
    }
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
    eprintln!(
        "# waiting at {shown} for: fishplate perf {} --connect {shown}",
        crate::tool::args::name(plan.test)
    );
    let deadline = Instant::now() + Duration::from_secs(plan.timeout);
    listener.accept(profile, deadline).map_err(|error| match error {
        HandshakeError::Deadline => Failure::run(format!(
            "nobody connected to {shown} within {} s; start the other side, or wait longer with --timeout",
            plan.timeout
        )),
        error => explain(error, &format!("the process that connected to {shown}"), plan.region),
    })
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

impl Second {
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
