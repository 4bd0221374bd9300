//! Answers peers on a thread of each endpoint. A peer asks the thread for the address of the
//! endpoint's node, so peers can connect while the program computes.
//!
//! The thread sleeps until a peer asks. Each connection has its own state and deadline, so a slow
//! peer delays no other peer. The thread holds the endpoint's lock only for short steps.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fishplate::{PeerId, without_signals};

use crate::dial::{get, is_own, name, put};
use crate::error::Error;
use crate::frame::{Frame, LEN};
use crate::home::Home;

/// Further connections wait in the backlog.
const CALLS: usize = 256;

const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) struct Sockets {
    pub epid: u64,
    local: UnixListener,
    network: Option<TcpListener>,
}

impl Sockets {
    /// Opens the sockets. The TCP socket listens on `host`.
    pub fn open(host: Option<Ipv4Addr>) -> io::Result<Sockets> {
        let network = host.map(|host| TcpListener::bind((host, 0))).transpose()?;
        let place = match &network {
            None => None,
            Some(listener) => {
                listener.set_nonblocking(true)?;
                Some((host.unwrap_or(Ipv4Addr::UNSPECIFIED), listener.local_addr()?.port()))
            }
        };
        let mut tries = 0;
        loop {
            let random = RandomState::new().build_hasher().finish();
            let epid = match place {
                Some((host, port)) => {
                    u64::from(u32::from(host)) << 32 | u64::from(port) << 16 | random & 0xffff
                }
                None => u64::from(random as u32 | 1),
            };
            tries += 1;
            match UnixListener::bind_addr(&name(epid)?) {
                Ok(local) => {
                    local.set_nonblocking(true)?;
                    return Ok(Sockets { epid, local, network });
                }
                Err(error) if error.kind() != io::ErrorKind::AddrInUse || tries == 100 => {
                    return Err(error);
                }
                Err(_) => {}
            }
        }
    }
}

/// Dropping this joins the thread, and the thread takes the endpoint's lock. So drop this without
/// holding the lock.
pub(crate) struct Door {
    /// The thread stops when this closes.
    wake: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Door {
    /// The thread answers with the frame `own`.
    pub fn start(sockets: Sockets, home: Home, own: Frame) -> io::Result<Door> {
        let (wake, woken) = UnixStream::pair()?;
        woken.set_nonblocking(true)?;
        let keeper = Keeper { sockets, home, own, woken, calls: vec![], meeting: vec![] };
        let run = move || keeper.run();
        let thread = without_signals(|| thread::Builder::new().name("libpsm2".into()).spawn(run))?;
        Ok(Door { wake: Some(wake), thread: Some(thread) })
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.wake = None;
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

struct Call {
    stream: UnixStream,
    question: Box<[u8; LEN]>,
    got: usize,
    answer: Option<Box<[u8; LEN]>>,
    peer: Option<PeerId>,
    sent: usize,
    until: Instant,
}

struct Keeper {
    sockets: Sockets,
    home: Home,
    own: Frame,
    woken: UnixStream,
    calls: Vec<Call>,
    meeting: Vec<PeerId>,
}

impl Keeper {
    fn run(mut self) {
        loop {
            self.sleep();
            match self.woken.read(&mut [0]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                _ => return,
            }
            self.accept();
            self.serve();
            self.meet();
        }
    }

    fn sleep(&self) {
        let entry = |fd: RawFd, events| libc::pollfd { fd, events, revents: 0 };
        let mut fds = vec![entry(self.woken.as_raw_fd(), libc::POLLIN)];
        if self.calls.len() < CALLS {
            fds.push(entry(self.sockets.local.as_raw_fd(), libc::POLLIN));
            fds.extend(
                self.sockets.network.iter().map(|socket| entry(socket.as_raw_fd(), libc::POLLIN)),
            );
        }
        fds.extend(self.calls.iter().map(|call| {
            let events = if call.answer.is_some() { libc::POLLOUT } else { libc::POLLIN };
            entry(call.stream.as_raw_fd(), events)
        }));
        let timeout = match (self.meeting.is_empty(), self.calls.is_empty()) {
            (false, _) => 1,
            (true, false) => 100,
            (true, true) => -1,
        };
        // SAFETY: `fds` holds `fds.len()` entries and outlives the call.
        unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout) };
    }

    fn accept(&mut self) {
        let until = Instant::now() + PATIENCE;
        let mut streams = vec![];
        while self.calls.len() + streams.len() < CALLS {
            match self.sockets.local.accept() {
                Ok((stream, _)) if is_own(&stream) => streams.push(stream),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        while let Some(socket) = &self.sockets.network
            && self.calls.len() + streams.len() < CALLS
        {
            match socket.accept() {
                Ok((stream, _)) => streams.push(UnixStream::from(OwnedFd::from(stream))),
                Err(_) => break,
            }
        }
        for stream in streams {
            if stream.set_nonblocking(true).is_ok() {
                let question = Box::new([0; LEN]);
                self.calls.push(Call {
                    stream,
                    question,
                    got: 0,
                    answer: None,
                    peer: None,
                    sent: 0,
                    until,
                });
            }
        }
    }

    fn serve(&mut self) {
        let now = Instant::now();
        let mut calls = std::mem::take(&mut self.calls);
        calls.retain_mut(|call| call.until > now && matches!(self.step(call), Ok(false)));
        self.calls = calls;
    }

    /// Advances a connection. Returns `true` once the answer is sent.
    fn step(&mut self, call: &mut Call) -> io::Result<bool> {
        if call.answer.is_none() {
            if !get(&mut call.stream, &mut call.question[..], &mut call.got)? {
                return Ok(false);
            }
            let verdict = match Frame::decode(&call.question, &self.own.uuid) {
                Ok(frame) if frame.verdict != 0 => Some(Error::EPID_NETWORK),
                Ok(frame) => {
                    let admitted = self.admit(&frame);
                    call.peer = admitted.ok();
                    admitted.err()
                }
                Err(error) => Some(error),
            };
            let verdict = verdict.map_or(0, |error| error.0 as u8);
            let am = self.home.find_aside().map_or(vec![], |endpoint| endpoint.am_address());
            let mut answer = Frame { verdict, am, ..self.own.clone() };
            if verdict != 0 {
                // Does not tell a refused peer the key of the job or the addresses of nodes.
                (answer.uuid, answer.address, answer.am) = ([0; 16], vec![], vec![]);
            }
            call.answer = Some(Box::new(answer.encode()));
        }
        let Some(answer) = &call.answer else { return Ok(false) };
        if !put(&call.stream, &answer[..], &mut call.sent)? {
            return Ok(false);
        }
        if let (Some(peer), Some(mut endpoint)) = (call.peer, self.home.find_aside()) {
            endpoint.keep(peer, call.stream.try_clone()?);
        }
        Ok(true)
    }

    fn admit(&mut self, frame: &Frame) -> Result<PeerId, Error> {
        let mut endpoint = self.home.find_aside().ok_or(Error::UNREACHABLE)?;
        let peer = endpoint.admit(frame)?;
        drop(endpoint);
        self.meeting.push(peer);
        Ok(peer)
    }

    /// Makes progress on new connections, because the program may make no calls.
    fn meet(&mut self) {
        if self.meeting.is_empty() {
            return;
        }
        match self.home.find_aside() {
            Some(mut endpoint) => {
                endpoint.progress();
                self.meeting.retain(|peer| endpoint.reached(*peer) == Ok(false));
            }
            None => self.meeting.clear(),
        }
    }
}
