//! Runs one round of a job: every process sends its bytes to rank 0, and rank 0 sends the bytes of
//! all processes back.
//!
//! A frame begins with two little-endian words, its kind and its length. Its bytes follow. The
//! sockets never block, and lengths are checked before anything is stored.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use super::{CONTRIBUTION_MAX, PAUSE, Ranks};

/// A contribution.
pub(super) const DATA: u32 = 0;
/// The ranks that rank 0 still waits for. Waiting processes remember the latest such frame.
pub(super) const MISSING: u32 = 1;
/// The job has ended: these ranks had not joined by the deadline. The process with the earliest
/// deadline reports them through rank 0.
pub(super) const EXPIRED: u32 = 2;
/// The job has ended: these ranks have exited.
pub(super) const GONE: u32 = 3;
pub(super) const WELCOME: u32 = 4;
/// The process cannot join. The frame contains one word: the reason.
pub(super) const REFUSED: u32 = 5;
pub(super) const RANK: u32 = 6;

pub(super) const TELL: Duration = Duration::from_millis(250);

const BATCH: usize = 64;

#[derive(Debug)]
pub(super) struct Conn {
    stream: TcpStream,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
}

impl Conn {
    pub fn new(stream: TcpStream) -> io::Result<Conn> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Conn { stream, inbox: vec![], outbox: vec![] })
    }

    /// Receives until `want` bytes are buffered. Returns `false` if more are needed.
    pub fn fill(&mut self, want: usize) -> io::Result<bool> {
        let mut bytes = [0; 16 << 10];
        while self.inbox.len() < want {
            let room = bytes.len().min(want - self.inbox.len());
            match self.stream.read(&mut bytes[..room]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(got) => self.inbox.extend(&bytes[..got]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.inbox)
    }

    pub fn frame(&mut self) -> io::Result<Option<(u32, Vec<u8>)>> {
        if !self.fill(8)? {
            return Ok(None);
        }
        let (kind, len) = head(self.inbox[..8].try_into().expect("8 bytes"))?;
        if !self.fill(8 + len)? {
            return Ok(None);
        }
        Ok(Some((kind, self.take().split_off(8))))
    }

    /// Returns whether the process still waits: it is alive and has sent nothing.
    pub fn is_silent(&mut self) -> bool {
        self.inbox.is_empty() && matches!(self.fill(1), Ok(false))
    }

    pub fn say(&mut self, kind: u32, bytes: &[u8]) {
        frame(&mut self.outbox, kind, bytes);
    }

    pub fn flush(&mut self) -> io::Result<bool> {
        let sent = write(&mut self.stream, &self.outbox)?;
        self.outbox.drain(..sent);
        Ok(self.outbox.is_empty())
    }

    /// Sends an optional frame if the socket has room. The next read reports a failure.
    pub fn mention(&mut self, kind: u32, bytes: &[u8]) {
        if let Ok(true) = self.flush() {
            self.say(kind, bytes);
            let _ = self.flush();
        }
    }

    pub fn raw_fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }
}

/// Appends raw bytes without a frame, for the start of a connection.
impl Extend<u8> for Conn {
    fn extend<T: IntoIterator<Item = u8>>(&mut self, bytes: T) {
        self.outbox.extend(bytes);
    }
}

pub(super) fn head(bytes: [u8; 8]) -> io::Result<(u32, usize)> {
    let [kind, len] = [0, 4].map(|at| u32::from_le_bytes([0, 1, 2, 3].map(|n| bytes[at + n])));
    if len as usize > CONTRIBUTION_MAX {
        return Err(ErrorKind::InvalidData.into());
    }
    Ok((kind, len as usize))
}

pub(super) fn frame(into: &mut Vec<u8>, kind: u32, bytes: &[u8]) {
    into.extend(kind.to_le_bytes());
    into.extend((bytes.len() as u32).to_le_bytes());
    into.extend(bytes);
}

fn write(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<usize> {
    let mut sent = 0;
    while sent < bytes.len() {
        match stream.write(&bytes[sent..]) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => sent += written,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    Ok(sent)
}

pub(super) fn sleep_on(fds: impl Iterator<Item = (RawFd, bool)>, pause: Duration) {
    let events = |write| if write { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN };
    let mut set: Vec<_> =
        fds.map(|(fd, write)| libc::pollfd { fd, events: events(write), revents: 0 }).collect();
    // SAFETY: `set` has that many entries. A failure only ends the sleep early.
    unsafe {
        libc::poll(set.as_mut_ptr(), set.len() as libc::nfds_t, pause.as_millis() as libc::c_int)
    };
}

type Wait = (Instant, Duration);

pub(super) fn expired(missing: &Ranks, timeout: Duration) -> io::Error {
    let text = format!(
        "job is incomplete: {missing} did not come within {timeout:?}; check that each runs and \
         has not failed"
    );
    io::Error::new(ErrorKind::TimedOut, text)
}

pub(super) fn gone(ranks: &Ranks) -> io::Error {
    let text = format!("job is over: lost the connection to {ranks}; look for its own error");
    io::Error::new(ErrorKind::UnexpectedEof, text)
}

fn end(others: &mut [Conn], kind: u32, ranks: Ranks, timeout: Duration) -> io::Error {
    others.iter_mut().for_each(|conn| conn.mention(kind, &ranks.encode()));
    if kind == GONE { gone(&ranks) } else { expired(&ranks, timeout) }
}

pub(super) fn lead(
    others: &mut [Conn],
    ours: &[u8],
    (deadline, timeout): Wait,
    meanwhile: &mut dyn FnMut(),
) -> io::Result<Vec<Vec<u8>>> {
    let mut all: Vec<Option<Vec<u8>>> = vec![None; others.len()];
    let mut told = Instant::now();
    loop {
        let mut got = 0;
        for (at, conn) in others.iter_mut().enumerate() {
            match (conn.frame(), &mut all[at]) {
                (Ok(None), _) => {}
                (Ok(Some((DATA, bytes))), place @ None) => {
                    *place = Some(bytes);
                    got += 1;
                    if got % BATCH == 0 {
                        meanwhile();
                    }
                }
                // The peer's deadline expired before ours.
                (Ok(Some((EXPIRED, bytes))), _) => {
                    let ranks = Ranks::decode(&bytes).unwrap_or_else(|| Ranks::one(at as u32 + 1));
                    return Err(end(others, EXPIRED, ranks, timeout));
                }
                _ => return Err(end(others, GONE, Ranks::one(at as u32 + 1), timeout)),
            }
        }
        let absent = (1..).zip(&all).filter(|(_, bytes)| bytes.is_none()).map(|(rank, _)| rank);
        let missing = Ranks::new(absent);
        if missing.count == 0 {
            break;
        }
        if Instant::now() >= deadline {
            return Err(end(others, EXPIRED, missing, timeout));
        }
        if told.elapsed() >= TELL {
            told = Instant::now();
            let waiting = others.iter_mut().zip(&all).filter(|(_, bytes)| bytes.is_some());
            waiting.for_each(|(conn, _)| conn.mention(MISSING, &missing.encode()));
        }
        meanwhile();
        sleep_on(others.iter().map(|conn| (conn.raw_fd(), false)), PAUSE);
    }
    let all: Vec<Vec<u8>> =
        std::iter::once(ours.to_vec()).chain(all.into_iter().flatten()).collect();
    let mut reply = vec![];
    all.iter().for_each(|bytes| frame(&mut reply, DATA, bytes));
    answer(others, &reply, (deadline, timeout), meanwhile)?;
    Ok(all)
}

fn answer(
    others: &mut [Conn],
    reply: &[u8],
    (deadline, timeout): Wait,
    meanwhile: &mut dyn FnMut(),
) -> io::Result<()> {
    let mut sent = vec![0; others.len()];
    let mut moved = 0;
    loop {
        for (at, conn) in others.iter_mut().enumerate() {
            let written = match conn.flush() {
                Ok(true) => write(&mut conn.stream, &reply[sent[at]..]),
                Ok(false) => Ok(0),
                Err(error) => Err(error),
            };
            let Ok(written) = written else {
                let rank = Ranks::one(at as u32 + 1);
                // Skips ranks that have received a part of the reply. They would mistake this frame
                // for the rest of the reply.
                let whole = others
                    .iter_mut()
                    .zip(&sent)
                    .filter(|(_, sent)| [0, reply.len()].contains(sent));
                whole.for_each(|(conn, _)| conn.mention(GONE, &rank.encode()));
                return Err(gone(&rank));
            };
            sent[at] += written;
            moved += written;
            if moved >= BATCH * CONTRIBUTION_MAX {
                moved = 0;
                meanwhile();
            }
        }
        let slow = (1..).zip(&sent).filter(|&(_, &sent)| sent < reply.len()).map(|(rank, _)| rank);
        let missing = Ranks::new(slow);
        if missing.count == 0 {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(expired(&missing, timeout));
        }
        meanwhile();
        sleep_on(
            others.iter().zip(&sent).map(|(conn, &sent)| (conn.raw_fd(), sent < reply.len())),
            PAUSE,
        );
    }
}

pub(super) fn follow(
    leader: &mut Conn,
    ours: &[u8],
    size: usize,
    (deadline, timeout): Wait,
    meanwhile: &mut dyn FnMut(),
) -> io::Result<Vec<Vec<u8>>> {
    let mut all = Vec::with_capacity(size);
    leader.say(DATA, ours);
    // Until rank 0 reports missing ranks, rank 0 itself counts as missing.
    let mut missing = Ranks::one(0);
    while all.len() < size {
        // Reads before reporting a failed write, because rank 0 may have sent a reason before it
        // closed the connection.
        let written = leader.flush();
        match hear(leader, timeout)? {
            Some(Heard::Missing(ranks)) if Instant::now() < deadline => missing = ranks,
            Some(Heard::Frame(DATA, bytes)) => {
                all.push(bytes);
                if all.len() % BATCH != 0 {
                    continue;
                }
            }
            Some(Heard::Frame(..)) => return Err(gone(&Ranks::one(0))),
            None | Some(Heard::Missing(_)) => {
                let written = written.map_err(|_| gone(&Ranks::one(0)))?;
                if Instant::now() >= deadline {
                    leader.mention(EXPIRED, &missing.encode());
                    return Err(expired(&missing, timeout));
                }
                sleep_on([(leader.raw_fd(), !written)].into_iter(), PAUSE);
            }
        }
        meanwhile();
    }
    Ok(all)
}

pub(super) enum Heard {
    Missing(Ranks),
    Frame(u32, Vec<u8>),
}

/// Receives a message from rank 0. Fails if the message says that the job has ended.
pub(super) fn hear(leader: &mut Conn, timeout: Duration) -> io::Result<Option<Heard>> {
    let lost = || gone(&Ranks::one(0));
    let Some((kind, bytes)) = leader.frame().map_err(|_| lost())? else { return Ok(None) };
    if !matches!(kind, MISSING | EXPIRED | GONE) {
        return Ok(Some(Heard::Frame(kind, bytes)));
    }
    let ranks = Ranks::decode(&bytes).ok_or_else(lost)?;
    match kind {
        MISSING => Ok(Some(Heard::Missing(ranks))),
        GONE => Err(gone(&ranks)),
        _ => Err(expired(&ranks, timeout)),
    }
}
