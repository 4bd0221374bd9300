//! Connects the two processes of a run. Either one process starts the other, or one listens and the
//! other connects.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use fishplate::bootstrap::{self, BootstrapError, Card, Listener, Wire};

use super::setup::Setup;
use crate::args::{Meeting, Mode, Plan, REGION, Transport, name};
use crate::failure::{Failure, Outcome, note};
use crate::interrupt;
use crate::limits;
use crate::sizes;
use crate::variables;

/// A finished process frees its memory before it exits.
const LEAVE: Duration = Duration::from_secs(10);

/// Time limit for a process to exit after it has closed the connection.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Time limit for a new process to answer.
const START: Duration = Duration::from_secs(10);

/// Time limit for the other side to listen.
const APPEAR: Duration = Duration::from_secs(5);

/// Interval between checks for Ctrl-C, and for refused processes to print.
const LOOK: Duration = Duration::from_millis(100);

const NAMED: u32 = 16;

pub struct Met {
    pub wire: Wire,
    pub theirs: Card,
    pub name: String,
    pub second: Option<Second>,
    pub notes: Vec<String>,
}

impl Met {
    fn new((wire, theirs): (Wire, Card), name: String) -> Met {
        Met { wire, theirs, name, second: None, notes: vec![] }
    }
}

pub fn meet(plan: &Plan, setup: &Setup, card: &Card) -> Outcome<Met> {
    let met = match &plan.meeting {
        Meeting::Listen(at) => listen(plan, at, card),
        Meeting::Connect(at) => find(plan, at, card),
        Meeting::Spawn => spawn(plan, setup, card),
    }?;
    card.agree(&met.theirs).map_err(|error| Failure::run(explain(error, &met.name)))?;
    Ok(met)
}

/// Connects to the process that started this one, over the [inherited] socket.
pub fn answer(socket: OwnedFd, card: &Card) -> Outcome<Met> {
    let met = bootstrap::over(socket, card, Instant::now() + START);
    let met = met.map_err(|error| Failure::run(explain(error, "the first process")))?;
    Ok(Met::new(met, "the first process".into()))
}

fn explain(error: BootstrapError, who: &str) -> String {
    match error {
        BootstrapError::Differs { what: "region size", theirs, ours } => format!(
            "{who} was started with another --region: its region size is {}, and here it is {}; \
             use the same on both sides",
            sizes::show(theirs as usize),
            sizes::show(ours as usize)
        ),
        BootstrapError::Differs { what: "transport", theirs, ours } => {
            let [theirs, ours] = [theirs, ours].map(|number| {
                let known =
                    usize::try_from(number).ok().and_then(|at| Transport::value_variants().get(at));
                known.map_or_else(|| number.to_string(), |transport| name(*transport))
            });
            format!(
                "{who} was started with --transport {theirs}, and this side with --transport \
                 {ours}; use the same on both sides"
            )
        }
        error => format!("{who}: {error}"),
    }
}

fn listen(plan: &Plan, at: &str, card: &Card) -> Outcome<Met> {
    let mut listener = Listener::bind(at).map_err(|error| {
        Failure::usage(match error {
            BootstrapError::System(libc::EADDRINUSE) if at.contains('/') => {
                format!("--listen {at}: the file exists already; remove it, or choose another name")
            }
            BootstrapError::System(libc::EADDRINUSE) => {
                format!("--listen {at}: another process listens there; choose another name or port")
            }
            BootstrapError::Address if at.contains('/') || at.starts_with('@') => {
                format!("--listen {at}: too long for a socket; use at most 107 bytes")
            }
            BootstrapError::Address => {
                format!(
                    "--listen {at}: cannot resolve the host name; use an IP address, or \
                     0.0.0.0 for all"
                )
            }
            error => format!("--listen {at}: {error}"),
        })
    })?;
    note(format_args!("# waiting at {at} for: {}", command(plan, card, &reachable(at))));
    let deadline = Instant::now() + plan.timeout;
    let mut turned_away = 0u32;
    loop {
        let met = listener.accept(card, deadline.min(Instant::now() + LOOK));
        interrupt::check()?;
        for (who, why) in listener.refused() {
            turned_away = turned_away.saturating_add(1);
            match turned_away {
                ..=NAMED => {
                    let who = format!("the process at {who}");
                    note(format_args!("# refused: {}", explain(why, &who)))
                }
                n if n == NAMED + 1 => note("# refused more processes, which are not listed"),
                _ => {}
            }
        }
        match met {
            Err(BootstrapError::Deadline) if Instant::now() < deadline => {}
            Err(BootstrapError::Deadline) => {
                let others = match turned_away {
                    0 => String::new(),
                    n => format!(", except {n} that were refused"),
                };
                return Err(Failure::run(format!(
                    "no process connected to {at} within {}{others}; start the other side, or wait \
                     longer with --timeout",
                    sizes::show_time(plan.timeout)
                )));
            }
            Err(error) => return Err(Failure::run(format!("--listen {at}: {error}"))),
            Ok((wire, card)) => {
                let name = match wire.pid() {
                    Some(pid) => format!("the other process (pid {pid})"),
                    None => format!("the process at {}", wire.peer()),
                };
                return Ok(Met::new((wire, card), name));
            }
        }
    }
}

/// Returns a command line for the other side, with the same options as on this side.
fn command(plan: &Plan, card: &Card, at: &str) -> String {
    let variables = variables::for_other_side(plan.transport.window(), &plan.settings);
    let mut line = format!("{variables}fishplate perf {}", name(plan.test));
    if plan.transport != Transport::Shm {
        line += &format!(" --transport {}", name(plan.transport));
    }
    if plan.transport == Transport::Fabric {
        let mut providers: Vec<&str> =
            card.rails.iter().map(|rail| rail.provider.as_str()).collect();
        providers.dedup();
        line += &format!(" --rails {} --provider {}", plan.rails, quoted(&providers.join(",")));
        if !plan.settings.interfaces.is_empty() {
            line += &format!(" --interface {}", quoted(&plan.settings.interfaces.join(",")));
        }
    }
    if plan.region != REGION {
        line += &format!(" --region {}", sizes::show(plan.region));
    }
    if plan.mode == Mode::Worker {
        line += " --mode worker";
    }
    format!("{line} --connect {at}")
}

fn quoted(word: &str) -> String {
    match word.contains(|c: char| !(c.is_alphanumeric() || "_-.,:/@".contains(c))) {
        true => format!("'{word}'"),
        false => word.into(),
    }
}

/// Returns the address to print for the other side. Replaces a wildcard host with `HOST`.
fn reachable(at: &str) -> String {
    match at.rsplit_once(':') {
        Some(("0.0.0.0" | "[::]" | "::" | "*" | "", port)) => format!("HOST:{port}"),
        _ => at.to_owned(),
    }
}

/// Connects to the other side. Waits at most `APPEAR` until the other side listens.
fn find(plan: &Plan, at: &str, card: &Card) -> Outcome<Met> {
    let deadline = Instant::now() + plan.timeout.min(APPEAR);
    let met = bootstrap::connect(at, card, deadline);
    interrupt::check()?;
    let (wire, theirs) = met.map_err(|error| match error {
        BootstrapError::Address if at.contains('/') || at.starts_with('@') => {
            Failure::usage(format!("--connect {at}: too long for a socket; use at most 107 bytes"))
        }
        BootstrapError::Address => Failure::usage(format!(
            "--connect {at}: cannot resolve the host name; check it, or use an IP address"
        )),
        BootstrapError::System(libc::ECONNREFUSED | libc::ENOENT) => Failure::run(format!(
            "--connect {at}: no process listens there; start the other side with --listen {at} \
             first"
        )),
        error => Failure::run(format!(
            "--connect {at}: {}",
            explain(error, "the process that listens there")
        )),
    })?;
    let name = match wire.pid() {
        Some(pid) => format!("the other process (pid {pid})"),
        None => format!("the process at {at}"),
    };
    Ok(Met::new((wire, theirs), name))
}

/// Dropping this kills the process.
pub struct Second {
    child: Child,
}

/// Starts the second process, and connects to it over a socket that it inherits. The socket has no
/// name, so no other process can connect.
fn spawn(plan: &Plan, setup: &Setup, card: &Card) -> Outcome<Met> {
    let (here, there) = UnixStream::pair().map_err(|error| {
        let remedy = limits::remedy(&error);
        Failure::run(format!("cannot create a socket for a second process: {error}{remedy}"))
    })?;
    let mut second = launch(plan, setup, card, there.into())?;
    let met = bootstrap::over(here.into(), card, Instant::now() + START);
    interrupt::check()?;
    match met {
        Ok(met) => {
            let name = format!("the other process (pid {})", second.id());
            Ok(Met { second: Some(second), ..Met::new(met, name) })
        }
        Err(error) => Err(second.did_not_answer(error)),
    }
}

fn launch(plan: &Plan, setup: &Setup, card: &Card, socket: OwnedFd) -> Outcome<Second> {
    let exe = std::env::current_exe().map_err(|error| {
        Failure::run(format!("cannot find this program's file to start a second process: {error}"))
    })?;
    let mut command = Command::new(exe);
    command
        .arg("peer")
        .args(["--socket", &socket.as_raw_fd().to_string()])
        .args(["--region", &plan.region.to_string()])
        .args(["--timeout", &sizes::show_time(plan.timeout)])
        .args(["--transport", &name(plan.transport)])
        .args(["--mode", &name(plan.mode)])
        .args(["--ipc-path", &name(plan.ipc_path)])
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    if setup.crowded {
        command.arg("--crowded");
    }
    if plan.transport == Transport::Fabric {
        // So that the other side makes the same choices.
        let interfaces: Vec<&str> = card.rails.iter().map(|rail| rail.interface.as_str()).collect();
        command
            .args(["--rails", &plan.rails.to_string()])
            .args(["--provider", &card.rails[0].provider])
            .args(["--interface", &interfaces.join(",")]);
    }
    if let Some(device) = plan.devices.get(1) {
        command.args(["--device", &device.to_string()]);
    }
    tie_to_this_process(&mut command);
    let inherited = socket.as_raw_fd();
    // SAFETY: between fork and exec only an async-signal-safe call is made: fcntl.
    unsafe {
        command.pre_exec(move || {
            // The flag is cleared only in the new process, where the descriptor must survive exec.
            match libc::fcntl(inherited, libc::F_SETFD, 0) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    let child = command.spawn().map_err(|error| {
        Failure::run(format!("cannot start a second process: {error}{}", limits::remedy(&error)))
    })?;
    Ok(Second { child })
}

/// When this process exits, makes the kernel kill the process that `command` starts.
pub fn tie_to_this_process(command: &mut Command) {
    let parent = std::process::id();
    // SAFETY: between fork and exec only async-signal-safe calls are made: prctl, getppid, _exit.
    unsafe {
        command.pre_exec(move || {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            // The parent may have died before the request took effect.
            if libc::getppid() as u32 != parent {
                libc::_exit(1);
            }
            Ok(())
        });
    }
}

/// Returns the socket that this process inherited. Call it before this process opens a socket.
pub fn inherited(socket: i32) -> Outcome<OwnedFd> {
    let (mut domain, mut len) = (0i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: `fcntl` takes no pointers and checks that the descriptor exists. `getsockopt` writes
    // one `i32`, and `domain` has room for it.
    let known = unsafe {
        let domain = (&raw mut domain).cast();
        libc::fcntl(socket, libc::F_SETFD, libc::FD_CLOEXEC) == 0
            && libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_DOMAIN, domain, &mut len) == 0
    };
    if !known || domain != libc::AF_UNIX {
        let why = "not a socket from a first process; only `fishplate perf` starts this command";
        return Err(Failure::usage(format!("--socket {socket}: {why}")));
    }
    // SAFETY: the descriptor is open. This process has opened no socket yet, so it inherited this
    // descriptor for this use.
    Ok(unsafe { OwnedFd::from_raw_fd(socket) })
}

impl Second {
    /// Returns why the process did not answer. When a process dies, its connection closes first,
    /// and the process exits a moment later.
    fn did_not_answer(&mut self, why: BootstrapError) -> Failure {
        let within = if why == BootstrapError::HungUp { LAST_WORDS } else { Duration::ZERO };
        let Some(status) = self.ends(within) else {
            return Failure::run(explain(why, "the second process"));
        };
        let told = format!(
            "the second process (pid {}) {} before it answered",
            self.id(),
            describe(status)
        );
        // Code 2: the second process has printed the error of its command line.
        match status.code() {
            Some(2) => Failure::usage(told),
            _ => Failure::run(told),
        }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    fn ends(&mut self, within: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + within;
        loop {
            match self.child.try_wait().ok().flatten() {
                None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
                ended => return ended,
            }
        }
    }

    pub fn fate(&mut self, within: Duration) -> String {
        self.ends(within).map_or_else(|| "has not exited".into(), describe)
    }

    pub fn leave(mut self) -> Outcome {
        match self.ends(LEAVE) {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(Failure::run(format!("the second process {}", describe(status)))),
            None => Err(Failure::run("the second process did not exit")),
        }
    }
}

pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(0), _) => "ended".into(),
        (Some(code), _) => format!("exited with code {code}"),
        (_, Some(signal)) => format!("was killed by signal {signal}"),
        _ => "ended for an unknown reason".into(),
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_means_every_one_of_this_host_is_not_shown_as_one_to_connect_to() {
        for (at, shown) in [
            ("0.0.0.0:7000", "HOST:7000"),
            ("[::]:7000", "HOST:7000"),
            ("10.0.0.2:7000", "10.0.0.2:7000"),
            ("node7:80", "node7:80"),
            ("[fe80::1]:7000", "[fe80::1]:7000"),
            ("/tmp/x", "/tmp/x"),
        ] {
            assert_eq!(reachable(at), shown);
        }
    }

    #[test]
    fn words_are_quoted_where_a_shell_would_split_them() {
        assert_eq!(quoted("tcp;ofi_rxm"), "'tcp;ofi_rxm'");
        assert_eq!(quoted("eth0,eth1"), "eth0,eth1");
    }
}
