//! Connects the nodes of two agents. The agent that has the other agent's info sends a question.
//! The other agent's listening sockets, its *door*, receive the question.
//!
//! Both agents use threads for this, so an agent can connect to an agent that makes no calls. The
//! threads wait for sockets, but never while they hold the lock of an agent.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as LocalAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use fishplate::without_signals;

use crate::intro::{ADMITTED, Info, QUESTION_MAX, Question};
use crate::state::Shared;

const PATIENCE: Duration = Duration::from_secs(5);

/// Maximum time that two nodes take to connect, once each has the other's address.
const MEETING: Duration = Duration::from_secs(10);

const PASS: Duration = Duration::from_micros(100);

/// Number of passes without an arrival before the progress thread sleeps. Acknowledgements of
/// writes are sent 16 passes after the writes arrive.
const IDLE: u32 = 32;

/// Maximum number of connections that are not admitted yet.
const CALLS: usize = 256;

/// A `UnixStream` sends and receives on a TCP socket too.
fn any(stream: TcpStream) -> UnixStream {
    UnixStream::from(OwnedFd::from(stream))
}

fn name(door: u64) -> io::Result<LocalAddr> {
    LocalAddr::from_abstract_name(format!("fishplate-nixl-{door:016x}"))
}

/// Dropping this ends the listening threads.
pub(crate) struct Door {
    local: Arc<UnixListener>,
    network: Option<Arc<TcpListener>>,
}

impl Door {
    /// Opens the sockets. If `network`, also opens a TCP socket for other hosts, and returns its
    /// port.
    pub fn open(door: u64, network: bool) -> io::Result<(Door, u16)> {
        let local = Arc::new(UnixListener::bind_addr(&name(door)?)?);
        let network = match network {
            true => Some(Arc::new(TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?)),
            false => None,
        };
        let port =
            network.as_ref().map_or(Ok(0), |socket| socket.local_addr().map(|at| at.port()))?;
        Ok((Door { local, network }, port))
    }

    pub fn answer(&self, agent: &Arc<Shared>) -> io::Result<()> {
        let calls = Arc::new(AtomicUsize::new(0));
        let (local, ours, count) = (self.local.clone(), Arc::downgrade(agent), calls.clone());
        let accept = move || {
            let (stream, _) = local.accept()?;
            // The socket's name is visible in /proc, so any process can connect.
            if is_own(&stream) { Ok(stream) } else { Err(io::ErrorKind::PermissionDenied.into()) }
        };
        start(move || listen(ours, count, accept))?;
        if let Some(network) = self.network.clone() {
            let ours = Arc::downgrade(agent);
            let accept = move || network.accept().map(|(stream, _)| any(stream));
            start(move || listen(ours, calls, accept))?;
        }
        Ok(())
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        // After the shutdown, `accept` fails on both sockets. `shutdown` works for either socket
        // type.
        for socket in
            [Some(self.local.as_fd()), self.network.as_ref().map(AsFd::as_fd)].into_iter().flatten()
        {
            if let Ok(copy) = socket.try_clone_to_owned() {
                _ = UnixStream::from(copy).shutdown(Shutdown::Both);
            }
        }
    }
}

fn is_own(stream: &UnixStream) -> bool {
    let mut cred = libc::ucred { pid: 0, uid: u32::MAX, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `cred` and `len` are local variables that outlive the call; `len` is the size of
    // `cred`.
    let got = unsafe {
        let (fd, cred) = (stream.as_raw_fd(), (&raw mut cred).cast());
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, cred, &raw mut len) == 0
    };
    // SAFETY: the call takes no arguments and always succeeds.
    got && cred.uid == unsafe { libc::geteuid() }
}

pub(crate) fn hosts() -> Vec<Ipv4Addr> {
    let (mut found, mut first) = (vec![], std::ptr::null_mut());
    // SAFETY: `first` is ours. Entries and addresses stay valid until `freeifaddrs`, and an AF_INET
    // address is a `sockaddr_in`.
    unsafe {
        if libc::getifaddrs(&raw mut first) != 0 {
            return found;
        }
        let mut at = first;
        while let Some(entry) = at.as_ref() {
            if let Some(address) = entry.ifa_addr.as_ref()
                && i32::from(address.sa_family) == libc::AF_INET
                && entry.ifa_flags & libc::IFF_UP as u32 != 0
            {
                let address = entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                found.push(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)));
            }
            at = entry.ifa_next;
        }
        libc::freeifaddrs(first);
    }
    found.retain(|host| !host.is_loopback());
    found
}

fn start(run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    without_signals(|| thread::Builder::new().name("fishplate-nixl".into()).spawn(run)).map(drop)
}

/// Accepts connections until the door is dropped. Each connection gets a short-lived thread.
fn listen(
    agent: Weak<Shared>,
    calls: Arc<AtomicUsize>,
    accept: impl Fn() -> io::Result<UnixStream>,
) {
    loop {
        // Relaxed: the counter publishes no other data.
        while calls.load(Ordering::Relaxed) >= CALLS && agent.strong_count() != 0 {
            thread::sleep(Duration::from_millis(1));
        }
        let stream = match accept() {
            Ok(stream) => stream,
            Err(_) if agent.strong_count() == 0 => return,
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => continue,
            // The process has no descriptors left, or the peer has hung up.
            Err(_) => {
                thread::sleep(Duration::from_millis(10));
                continue;
            }
        };
        calls.fetch_add(1, Ordering::Relaxed);
        let (agent, done) = (agent.clone(), calls.clone());
        let started = start(move || {
            let admitted = serve(&agent, stream);
            done.fetch_sub(1, Ordering::Relaxed);
            if let Ok(Some((peer, stream))) = admitted {
                meet(&agent, peer, Some(stream));
            }
        });
        if started.is_err() {
            calls.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Has a deadline, because a hostile peer may send one byte at a time.
fn read_until(stream: &mut UnixStream, mut into: &mut [u8], deadline: Instant) -> io::Result<()> {
    while !into.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(into) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => into = &mut into[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn serve(agent: &Weak<Shared>, mut stream: UnixStream) -> io::Result<Option<(u64, UnixStream)>> {
    let deadline = Instant::now() + PATIENCE;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut len = [0; 4];
    read_until(&mut stream, &mut len, deadline)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > QUESTION_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; len];
    read_until(&mut stream, &mut bytes, deadline)?;
    let question = Question::decode(&bytes).map_err(|_| io::ErrorKind::InvalidData)?;
    let ours = agent.upgrade().ok_or(io::ErrorKind::NotConnected)?;
    let admitted = ours.with(|state| state.admit(question));
    drop(ours);
    match admitted {
        Some(Ok(peer)) => {
            stream.write_all(&[ADMITTED])?;
            Ok(Some((peer, stream)))
        }
        _ => stream.write_all(&[0]).map(|()| None),
    }
}

/// Starts a thread that sends `question` to the agent that `info` describes. `peer` is that agent's
/// number.
pub(crate) fn ask(agent: Weak<Shared>, peer: u64, info: Info, question: Vec<u8>) -> io::Result<()> {
    start(move || {
        let stream = put(&info, &question).ok();
        let Some(ours) = agent.upgrade() else { return };
        ours.with(|state| state.answered(peer, stream.is_some()));
        drop(ours);
        if stream.is_some() {
            meet(&agent, peer, stream);
        }
    })
}

/// Sends the question to each address in turn. Returns the stream once the agent has admitted us.
fn put(info: &Info, question: &[u8]) -> io::Result<UnixStream> {
    let local = || {
        let stream = UnixStream::connect_addr(&name(info.door)?)?;
        // After the agent has ended, another process could listen on this name.
        if is_own(&stream) { Ok(stream) } else { Err(io::ErrorKind::PermissionDenied.into()) }
    };
    let mut streams = vec![Box::new(local) as Box<dyn Fn() -> io::Result<UnixStream>>];
    for &host in &info.hosts {
        let at = SocketAddr::from((host, info.port));
        streams.push(Box::new(move || TcpStream::connect_timeout(&at, PATIENCE).map(any)));
    }
    let mut result = Err(io::ErrorKind::ConnectionRefused.into());
    for open in streams {
        result = open().and_then(|mut stream| {
            let deadline = Instant::now() + PATIENCE;
            stream.set_write_timeout(Some(PATIENCE))?;
            stream.write_all(&[&(question.len() as u32).to_le_bytes(), question].concat())?;
            let mut answer = [0];
            read_until(&mut stream, &mut answer, deadline)?;
            match answer {
                [ADMITTED] => Ok(stream),
                _ => Err(io::ErrorKind::PermissionDenied.into()),
            }
        });
        if result.is_ok() {
            break;
        }
    }
    result
}

/// Keeps the stream open, because the end of the stream shows that the peer's process has ended.
fn meet(agent: &Weak<Shared>, peer: u64, mut line: Option<UnixStream>) {
    let deadline = Instant::now() + MEETING;
    while let Some(agent) = agent.upgrade() {
        let late = Instant::now() >= deadline;
        let met = agent.with(|state| {
            if let Some(line) = line.take() {
                state.keep(peer, line);
            }
            state.meet(peer, late)
        });
        drop(agent);
        if met != Some(false) {
            return;
        }
        thread::sleep(PASS);
    }
}

/// Starts a thread that makes progress until the agent is closed. After [`IDLE`] passes without an
/// arrival, the thread sleeps for `pause`.
pub(crate) fn drive(agent: Weak<Shared>, pause: Duration) -> io::Result<()> {
    start(move || {
        let (mut known, mut idle) = (0, IDLE);
        while let Some(agent) = agent.upgrade()
            && let Some((moved, arrived)) =
                agent.with(|state| (state.pass(), state.node.stats().arrived))
        {
            idle = if moved || arrived != known { 0 } else { idle.saturating_add(1) };
            known = arrived;
            if idle < IDLE {
                agent.let_others();
                continue;
            }
            drop(agent);
            thread::sleep(pause);
        }
    })
}
