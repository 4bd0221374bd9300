//! Connects the processes of a job: rank 0 listens, and the others connect and identify themselves.
//!
//! | step | rank 0 | another process |
//! |---|---|---|
//! | 1 | | sends a magic word and the job's cookie |
//! | 2 | closes the connection if they are wrong, else sends [`WELCOME`] | |
//! | 3 | | sends the job's size, and its rank if it has one |
//! | 4 | sends [`MISSING`] ranks at intervals, or [`REFUSED`] | waits |
//! | 5 | sends [`RANK`] once all have joined | |
//!
//! A process that cannot join tries again until its deadline, because an earlier job may still use
//! the address.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::id::{Cookie, UniqueId};
use super::round::{self, Conn, Heard, MISSING, RANK, REFUSED, TELL, WELCOME, sleep_on};
use super::{Job, Ranks, SIZE_MAX, deadline, invalid};

const HELLO: [u8; 8] = *b"FPjob\0\0\x01";
/// Length in bytes of the hello with the cookie, and of the size and rank that follow it.
const HELLO_LEN: usize = 40;
const CLAIM_LEN: usize = 8;

/// Sent instead of a rank by a process that accepts any rank.
const ANY: u32 = u32::MAX;

const AGAIN: Duration = Duration::from_millis(20);
const CONNECT: Duration = Duration::from_secs(2);

/// Time limit for the welcome. The program that listens at the address may belong to no job at all.
const WELCOME_TIME: Duration = Duration::from_secs(5);

const SLICE: Duration = Duration::from_millis(50);

/// Maximum number of connections without a correct cookie that rank 0 keeps, in addition to the
/// size of the job.
const STRANGERS: usize = 64;

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// `None`: the process accepts any rank.
    pub rank: Option<u32>,
    pub size: u32,
    pub cookie: Cookie,
    pub timeout: Duration,
    pub deadline: Instant,
}

impl Entry {
    pub fn new(
        rank: Option<usize>,
        size: usize,
        cookie: Cookie,
        timeout: Duration,
    ) -> io::Result<Entry> {
        if size == 0 || size > SIZE_MAX {
            return Err(invalid(format!(
                "job size out of range: {size} given; use 1 to {SIZE_MAX}"
            )));
        }
        if let Some(rank) = rank.filter(|&rank| rank >= size) {
            return Err(invalid(format!(
                "job rank out of range: {rank} of {size} given; use 0 to {}",
                size - 1
            )));
        }
        let rank = rank.map(|rank| rank as u32);
        Ok(Entry { rank, size: size as u32, cookie, timeout, deadline: deadline(timeout) })
    }

    pub fn has_expired(&self) -> bool {
        Instant::now() >= self.deadline
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rank {
            Some(rank) => write!(f, "rank {rank} of {}", self.size),
            None => write!(f, "a job of {}", self.size),
        }
    }
}

/// Joins with the rank of `entry`. If the entry has no rank, the first process to arrive is rank 0.
/// `claim` tries to become rank 0. `find` returns rank 0's addresses and cookie.
pub(super) fn meet(
    entry: &Entry,
    mut claim: impl FnMut(&Entry) -> io::Result<Option<Job>>,
    mut find: impl FnMut() -> io::Result<(Vec<SocketAddr>, Cookie)>,
) -> io::Result<Job> {
    let mut refusal = None;
    loop {
        if entry.rank.is_none_or(|rank| rank == 0)
            && let Some(job) = claim(entry)?
        {
            return Ok(job);
        }
        if entry.rank != Some(0) {
            let found =
                find().map(|(addresses, cookie)| follow(&addresses, &Entry { cookie, ..*entry }));
            let error = match found {
                Ok(Ok((rank, leader))) => return Ok(Job::follower(rank, leader, entry)),
                Ok(Err(Failed::Over(error))) => return Err(error),
                Ok(Err(Failed::Again(error))) | Err(error) => error,
            };
            // If the deadline cut this attempt short, keeps the error of the previous attempt,
            // which explains more.
            if refusal.is_none() || !entry.has_expired() {
                refusal = Some(error);
            }
        }
        if entry.has_expired() {
            let occupied = || io::Error::other("another job uses its address or folder");
            return Err(not_joined(entry, &refusal.unwrap_or_else(occupied)));
        }
        sleep(AGAIN);
    }
}

pub(super) fn at_address(addresses: &[SocketAddr], entry: &Entry) -> io::Result<Job> {
    let claim = |entry: &Entry| match listen(addresses) {
        Ok(Some(listener)) => Ok(Some(Job::leader(lead(&listener, entry, || Ok(()))?, entry))),
        // Fails only if this process is rank 0 for certain. Without a rank, rank 0 may be on
        // another host.
        Err(error) if entry.rank.is_some() => Err(error),
        _ => Ok(None),
    };
    meet(entry, claim, || Ok((addresses.to_vec(), entry.cookie)))
}

pub(super) fn at_leader(id: &UniqueId, entry: &Entry) -> io::Result<Job> {
    meet(entry, |_| Ok(None), || Ok((id.addresses(), id.cookie())))
}

fn not_joined(entry: &Entry, why: &io::Error) -> io::Error {
    let who = entry.rank.map_or("a process".into(), |rank| format!("rank {rank}"));
    let same =
        if entry.cookie == Cookie::NONE { "same address" } else { "same address and cookie" };
    let text = format!(
        "{who} cannot join its job of {} within {:?}: {why}; check that rank 0 runs, that all have \
         the {same}, and that no other program listens there",
        entry.size, entry.timeout
    );
    io::Error::new(ErrorKind::TimedOut, text)
}

fn listen(addresses: &[SocketAddr]) -> io::Result<Option<TcpListener>> {
    let mut refusal = invalid("rank 0 cannot listen: its host has no address");
    for address in addresses {
        match TcpListener::bind(address) {
            Ok(listener) => return Ok(Some(listener)),
            // Another rank 0 already listens there. If this process tried its other addresses,
            // there could be two.
            Err(error) if error.kind() == ErrorKind::AddrInUse => return Ok(None),
            Err(error) => {
                let text = format!(
                    "rank 0 cannot listen at {address}: {error}; name an address of its host"
                );
                refusal = io::Error::new(error.kind(), text);
            }
        }
    }
    Err(refusal)
}

struct Newcomer {
    conn: Conn,
    welcome: bool,
}

pub(super) fn lead(
    listener: &TcpListener,
    entry: &Entry,
    mut check: impl FnMut() -> io::Result<()>,
) -> io::Result<Vec<Conn>> {
    listener.set_nonblocking(true)?;
    let mut places: Vec<Option<Conn>> = (1..entry.size).map(|_| None).collect();
    // Ranks that have connected at some time. A rank with an earlier deadline closes its connection
    // when that deadline expires, but does not count as missing.
    let mut came = vec![false; places.len()];
    let mut newcomers: Vec<Newcomer> = vec![];
    let mut told = Instant::now();
    loop {
        let most = places.len() + STRANGERS;
        // Limited, because strangers may connect faster than rank 0 closes their connections.
        for _ in 0..2 * most {
            if newcomers.len() == most {
                break;
            }
            let accepted = match listener.accept() {
                Ok((stream, _)) => Conn::new(stream),
                Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                    if !evict(&mut newcomers) {
                        return Err(no_descriptors(&error));
                    }
                    continue;
                }
                Err(_) => break,
            };
            newcomers.extend(accepted.ok().map(|conn| Newcomer { conn, welcome: false }));
        }
        // A process that died before the job formed may be restarted.
        for place in &mut places {
            place.take_if(|conn| !conn.is_silent());
        }
        for newcomer in std::mem::take(&mut newcomers) {
            newcomers.extend(place(newcomer, &mut places, entry));
        }
        // Closes connections only after reading them, so that a process that has sent the cookie
        // stays.
        if newcomers.len() == most {
            evict(&mut newcomers);
        }
        came.iter_mut().zip(&places).for_each(|(came, place)| *came |= place.is_some());
        let missing = ranks_without(places.iter().map(Option::is_some), entry);
        if missing.count == 0 {
            break;
        }
        check()?;
        if entry.has_expired() {
            let never = ranks_without(came.iter().copied(), entry);
            let missing = if never.count == 0 { missing } else { never };
            places
                .iter_mut()
                .flatten()
                .for_each(|conn| conn.mention(round::EXPIRED, &missing.encode()));
            return Err(round::expired(&missing, entry.timeout));
        }
        if told.elapsed() >= TELL {
            told = Instant::now();
            places.iter_mut().flatten().for_each(|conn| conn.mention(MISSING, &missing.encode()));
        }
        let connected = places.iter().flatten().map(|conn| (conn.raw_fd(), false));
        let silent = newcomers.iter().map(|newcomer| (newcomer.conn.raw_fd(), false));
        sleep_on(
            connected.chain(silent).chain([(listener.as_raw_fd(), false)]),
            SLICE.min(entry.left()),
        );
    }
    let mut others: Vec<Conn> = places.into_iter().flatten().collect();
    for (rank, conn) in (1u32..).zip(&mut others) {
        conn.say(RANK, &rank.to_le_bytes());
        // If the socket is full, the first round of the job sends the rest.
        let _ = conn.flush();
    }
    Ok(others)
}

fn evict(newcomers: &mut Vec<Newcomer>) -> bool {
    let at = newcomers.iter().position(|newcomer| !newcomer.welcome);
    at.map(|at| newcomers.remove(at)).is_some()
}

fn no_descriptors(error: &io::Error) -> io::Error {
    let text = format!("rank 0 cannot accept a process of its job: {error}; raise ulimit -n");
    io::Error::new(error.kind(), text)
}

fn ranks_without(there: impl Iterator<Item = bool>, entry: &Entry) -> Ranks {
    let absent = (1..).zip(there).filter(|(_, there)| !there).map(|(rank, _)| rank);
    let missing = Ranks::new(absent);
    if entry.rank.is_some() { missing } else { Ranks { first: vec![], ..missing } }
}

/// Continues the handshake of a connection. Returns the connection if more bytes are needed.
fn place(mut newcomer: Newcomer, places: &mut [Option<Conn>], entry: &Entry) -> Option<Newcomer> {
    if !newcomer.welcome {
        if !newcomer.conn.fill(HELLO_LEN).ok()? {
            return Some(newcomer);
        }
        // Compares the whole cookie at once, so timing does not reveal a partly correct cookie.
        let wanted = [&HELLO[..], &entry.cookie.bytes()[..]].concat();
        let said = newcomer.conn.take();
        let differs = wanted.iter().zip(&said).fold(0, |differs, (a, b)| differs | (a ^ b));
        if differs != 0 {
            return None;
        }
        newcomer.welcome = true;
        newcomer.conn.mention(WELCOME, &[]);
    }
    if !newcomer.conn.fill(CLAIM_LEN).ok()? {
        return Some(newcomer);
    }
    let said = newcomer.conn.take();
    let word = |at: usize| u32::from_le_bytes(said[at..at + 4].try_into().expect("4 bytes"));
    let refuse = |mut newcomer: Newcomer, why: Refusal| {
        newcomer.conn.mention(REFUSED, &(why as u32).to_le_bytes());
        None
    };
    if word(0) != entry.size {
        return refuse(newcomer, Refusal::Size);
    }
    let at = match word(4) {
        ANY if entry.rank.is_none() => places.iter().position(Option::is_none),
        rank if entry.rank.is_some() && rank != ANY => (rank as usize).checked_sub(1),
        _ => return refuse(newcomer, Refusal::Ranks),
    };
    match at.and_then(|at| places.get_mut(at)) {
        Some(free) if free.is_none() => {
            *free = Some(newcomer.conn);
            let missing = ranks_without(places.iter().map(Option::is_some), entry).encode();
            // Tells the process that it has been accepted.
            places[at?].as_mut()?.mention(MISSING, &missing);
            None
        }
        _ => refuse(newcomer, Refusal::Taken),
    }
}

#[derive(Clone, Copy)]
enum Refusal {
    Size = 1,
    Ranks = 2,
    Taken = 3,
}

fn refusal(bytes: &[u8]) -> &'static str {
    match bytes {
        [1, ..] => "rank 0 was given another size",
        [2, ..] => "some processes were given ranks and others were not",
        [3, ..] => "another process has that rank",
        _ => "rank 0 refuses it",
    }
}

enum Failed {
    Again(io::Error),
    Over(io::Error),
}

fn follow(addresses: &[SocketAddr], entry: &Entry) -> Result<(u32, Conn), Failed> {
    let again = |why: String| Failed::Again(io::Error::other(why));
    let mut refused = again("no address is known".into());
    for address in addresses {
        let left = entry.left().clamp(AGAIN, CONNECT);
        match TcpStream::connect_timeout(address, left).and_then(Conn::new) {
            Ok(conn) => match enter(conn, entry) {
                Err(Failed::Again(error)) => refused = again(format!("{address}: {error}")),
                done => return done,
            },
            Err(error) => refused = again(format!("{address}: {error}")),
        }
    }
    Err(refused)
}

fn enter(mut conn: Conn, entry: &Entry) -> Result<(u32, Conn), Failed> {
    let again = |why: &str| Failed::Again(io::Error::other(why.to_owned()));
    conn.extend(HELLO.iter().chain(entry.cookie.bytes()).copied());
    let (mut welcome, mut missing) = (false, None);
    let begun = Instant::now();
    loop {
        let written = conn.flush();
        match round::hear(&mut conn, entry.timeout) {
            Ok(Some(Heard::Missing(ranks))) if welcome && !entry.has_expired() => {
                missing = Some(ranks)
            }
            // Messages from rank 0 do not extend the deadline.
            Ok(Some(Heard::Missing(ranks))) if welcome => {
                return Err(Failed::Over(round::expired(&ranks, entry.timeout)));
            }
            Ok(Some(Heard::Frame(WELCOME, _))) if !welcome => {
                welcome = true;
                let rank = entry.rank.unwrap_or(ANY);
                conn.extend([entry.size, rank].into_iter().flat_map(u32::to_le_bytes));
            }
            Ok(Some(Heard::Frame(RANK, bytes))) if missing.is_some() => {
                let rank = bytes.try_into().map(u32::from_le_bytes).unwrap_or(0);
                let fits =
                    (1..entry.size).contains(&rank) && entry.rank.is_none_or(|ours| ours == rank);
                return if fits { Ok((rank, conn)) } else { Err(again("no job listens there")) };
            }
            Ok(Some(Heard::Frame(REFUSED, bytes))) => return Err(again(refusal(&bytes))),
            Ok(Some(_)) => return Err(again("no job listens there")),
            Err(error) if missing.is_some() => return Err(Failed::Over(error)),
            Err(_) if !welcome => {
                return Err(again("hung up; no job with this cookie listens there"));
            }
            Err(_) => return Err(again("hung up")),
            Ok(None) if entry.has_expired() => {
                return Err(match missing {
                    Some(missing) => Failed::Over(round::expired(&missing, entry.timeout)),
                    None => again("no answer"),
                });
            }
            Ok(None) if !welcome && begun.elapsed() >= WELCOME_TIME => {
                return Err(again("no answer"));
            }
            Ok(None) => {
                let blocked = matches!(written, Ok(false));
                sleep_on([(conn.raw_fd(), blocked)].into_iter(), SLICE.min(entry.left()));
            }
        }
    }
}
