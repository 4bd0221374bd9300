//! Bootstraps a small job: its processes find each other over TCP, by one address that all get.
//!
//! The first process to listen there is rank 0, and the others join it. So the same program,
//! started several times with the same arguments, becomes a job. [`Rendezvous::allgather`] then
//! exchanges bytes, such as a node's address and the handles of its memory. A launcher with its own
//! such call (MPI, PMI) needs none of this.
//!
//! Setup only: it allocates, and each call blocks until its timeout at most. Lengths are checked
//! before anything is stored. A silent unrelated client delays no other process. It is neither
//! encrypted nor authenticated: use it inside a network whose hosts trust each other.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Largest contribution to [`Rendezvous::allgather`], in bytes.
pub const CONTRIBUTION_MAX: usize = 64 << 10;

/// Returns the number of processes of the job.
pub const SIZE_MAX: usize = 1024;

/// The first bytes that a process sends; the size of the job follows.
const HELLO: [u8; 8] = *b"FPrendz1";

/// Interval at which sockets that are not ready are polled.
const PAUSE: Duration = Duration::from_millis(1);

/// A process's rank in a job, and its connections.
#[derive(Debug)]
pub struct Rendezvous {
    rank: usize,
    size: usize,
    /// At rank 0: the connections to ranks 1 and up, in order. At the others: the connection to
    /// rank 0.
    peers: Vec<TcpStream>,
    timeout: Duration,
}

impl Rendezvous {
    /// Joins a job of `size` processes at `address` (HOST:PORT) on the host of rank 0. Waits until
    /// all have joined.
    ///
    /// # Errors
    /// At the deadline: [`ErrorKind::TimedOut`] says how many have joined;
    /// [`ErrorKind::UnexpectedEof`]: rank 0 expects another size. At once:
    /// [`ErrorKind::InvalidInput`]: a size of 0 or above [`SIZE_MAX`]; [`ErrorKind::InvalidData`]:
    /// another program listens there.
    pub fn join(address: impl ToSocketAddrs, size: usize, timeout: Duration) -> io::Result<Rendezvous> {
        if size == 0 || size > SIZE_MAX {
            return Err(io::Error::new(ErrorKind::InvalidInput, "invalid job size: use 1 to 1024 processes"));
        }
        let address: Vec<_> = address.to_socket_addrs()?.collect();
        let deadline = deadline(timeout);
        loop {
            if let Some(listener) = listen(&address) {
                let peers = lead(&listener, size, deadline)?;
                return Ok(Rendezvous { rank: 0, size, peers, timeout });
            }
            match follow(&address, size, deadline) {
                // The connection may have been to rank 0 of an earlier job.
                Err(error) if error.kind() != ErrorKind::InvalidData && Instant::now() < deadline => {
                    sleep(PAUSE);
                }
                followed => {
                    let (rank, stream) = followed?;
                    return Ok(Rendezvous { rank, size, peers: vec![stream], timeout });
                }
            }
        }
    }

    /// Returns the rank of this process, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of processes of the job.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Sends this process's bytes to all, and returns those of all processes, by rank. All
    /// processes call it the same number of times. `meanwhile` runs while this one waits; make a
    /// node's progress there.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`], or a process has ended: the job is over, and later calls fail with
    /// [`ErrorKind::NotConnected`]. [`ErrorKind::InvalidInput`]: more than [`CONTRIBUTION_MAX`]
    /// bytes.
    pub fn allgather_with(&mut self, bytes: &[u8], mut meanwhile: impl FnMut()) -> io::Result<Vec<Vec<u8>>> {
        if bytes.len() > CONTRIBUTION_MAX {
            return Err(io::Error::new(ErrorKind::InvalidInput, "a contribution has at most 64 KiB"));
        }
        // Half a round could be mistaken for the next one, so the connections are kept only after a
        // whole one.
        let mut peers = std::mem::take(&mut self.peers);
        if peers.is_empty() && self.size > 1 {
            return Err(io::Error::new(ErrorKind::NotConnected, "an earlier call of this job failed"));
        }
        let deadline = deadline(self.timeout);
        let mut all = vec![];
        if self.rank == 0 {
            all.push(bytes.to_vec());
            for stream in &mut peers {
                all.push(get(stream, deadline, &mut meanwhile)?);
            }
            for stream in &mut peers {
                for bytes in &all {
                    put(stream, bytes, deadline, &mut meanwhile)?;
                }
            }
        } else {
            let stream = &mut peers[0];
            put(stream, bytes, deadline, &mut meanwhile)?;
            for _ in 0..self.size {
                all.push(get(stream, deadline, &mut meanwhile)?);
            }
        }
        self.peers = peers;
        Ok(all)
    }

    /// [`allgather_with`](Self::allgather_with) without a closure.
    ///
    /// # Errors
    /// As [`allgather_with`](Self::allgather_with).
    pub fn allgather(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<Vec<Vec<u8>>> {
        self.allgather_with(bytes.as_ref(), || {})
    }

    /// Exchanges bytes with the other process of a job of two.
    ///
    /// # Errors
    /// As [`allgather_with`](Self::allgather_with); [`ErrorKind::InvalidInput`] in a job of another
    /// size.
    pub fn exchange(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<Vec<u8>> {
        if self.size != 2 {
            return Err(io::Error::new(
                ErrorKind::InvalidInput,
                "`exchange` needs a job of two processes; use `allgather`",
            ));
        }
        Ok(self.allgather(bytes)?.swap_remove(1 - self.rank))
    }

    /// Waits until all processes have called it. `meanwhile` is as in
    /// [`allgather_with`](Self::allgather_with).
    ///
    /// # Errors
    /// As [`allgather_with`](Self::allgather_with).
    pub fn barrier_with(&mut self, meanwhile: impl FnMut()) -> io::Result<()> {
        self.allgather_with(&[], meanwhile).map(drop)
    }
}

/// Returns the end of a timeout that starts now, at most a century away.
fn deadline(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(Duration::from_secs(u32::MAX.into()))
}

/// Listens at the first address that belongs to this host. `None`: it is in use, or none does.
fn listen(addresses: &[SocketAddr]) -> Option<TcpListener> {
    for address in addresses {
        match TcpListener::bind(address) {
            Ok(listener) => return Some(listener),
            // Rank 0 listens there. A second address of its name must not create a second rank 0.
            Err(error) if error.kind() == ErrorKind::AddrInUse => return None,
            Err(_) => {}
        }
    }
    None
}

/// Waits for ranks 1 and up, numbered in the order of arrival.
fn lead(listener: &TcpListener, size: usize, deadline: Instant) -> io::Result<Vec<TcpStream>> {
    listener.set_nonblocking(true)?;
    let (mut joined, mut silent) = (vec![], Vec::<(TcpStream, Vec<u8>)>::new());
    while joined.len() + 1 < size {
        while let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            if silent.len() < SIZE_MAX {
                silent.push((stream, vec![]));
            }
        }
        for (stream, said) in std::mem::take(&mut silent) {
            if joined.len() + 1 == size {
                break;
            }
            match hello(stream, said, size) {
                Some(Ok(stream)) => joined.push(stream),
                Some(Err(waits)) => silent.push(waits),
                None => {}
            }
        }
        if Instant::now() >= deadline {
            let there = format!("{} of {size} processes have joined", joined.len() + 1);
            return Err(io::Error::new(ErrorKind::TimedOut, there));
        }
        sleep(PAUSE);
    }
    for (at, stream) in joined.iter_mut().enumerate() {
        put(stream, &(at as u32 + 1).to_le_bytes(), deadline, &mut || {})?;
    }
    Ok(joined)
}

/// Continues to read a process's first bytes. `None`: it is not a process of this job.
#[allow(clippy::type_complexity)]
fn hello(
    mut stream: TcpStream,
    mut said: Vec<u8>,
    size: usize,
) -> Option<Result<TcpStream, (TcpStream, Vec<u8>)>> {
    let wanted = [&HELLO[..], &(size as u32).to_le_bytes()].concat();
    let mut bytes = [0; 12];
    match stream.read(&mut bytes[..wanted.len() - said.len()]) {
        Ok(0) => return None,
        Ok(got) => said.extend(&bytes[..got]),
        Err(error) if error.kind() == ErrorKind::WouldBlock => {}
        Err(_) => return None,
    }
    match said.len() == wanted.len() {
        true => (said == wanted).then_some(Ok(stream)),
        false => wanted.starts_with(&said).then_some(Err((stream, said))),
    }
}

/// Joins the listener, and receives this process's rank.
fn follow(addresses: &[SocketAddr], size: usize, deadline: Instant) -> io::Result<(usize, TcpStream)> {
    let mut stream = Err(ErrorKind::AddrNotAvailable.into());
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now()).max(PAUSE);
        stream = TcpStream::connect_timeout(address, left);
        if stream.is_ok() {
            break;
        }
    }
    let mut stream = stream?;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    write_all(&mut stream, &HELLO, deadline, &mut || {})?;
    write_all(&mut stream, &(size as u32).to_le_bytes(), deadline, &mut || {})?;
    let rank = get(&mut stream, deadline, &mut || {})?;
    let rank = rank.try_into().map(u32::from_le_bytes).unwrap_or(0) as usize;
    match rank > 0 && rank < size {
        true => Ok((rank, stream)),
        false => Err(io::Error::new(ErrorKind::InvalidData, "another program listens at this address")),
    }
}

fn put(
    stream: &mut TcpStream,
    bytes: &[u8],
    deadline: Instant,
    meanwhile: &mut impl FnMut(),
) -> io::Result<()> {
    write_all(stream, &(bytes.len() as u32).to_le_bytes(), deadline, meanwhile)?;
    write_all(stream, bytes, deadline, meanwhile)
}

fn get(stream: &mut TcpStream, deadline: Instant, meanwhile: &mut impl FnMut()) -> io::Result<Vec<u8>> {
    let mut len = [0; 4];
    read_exact(stream, &mut len, deadline, meanwhile)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > CONTRIBUTION_MAX {
        return Err(io::Error::new(ErrorKind::InvalidData, "another program listens at this address"));
    }
    let mut bytes = vec![0; len];
    read_exact(stream, &mut bytes, deadline, meanwhile)?;
    Ok(bytes)
}

fn write_all(
    stream: &mut TcpStream,
    mut bytes: &[u8],
    deadline: Instant,
    meanwhile: &mut impl FnMut(),
) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) => not_ready(error, deadline, meanwhile)?,
        }
    }
    Ok(())
}

fn read_exact(
    stream: &mut TcpStream,
    mut into: &mut [u8],
    deadline: Instant,
    meanwhile: &mut impl FnMut(),
) -> io::Result<()> {
    while !into.is_empty() {
        match stream.read(into) {
            Ok(0) => return Err(io::Error::new(ErrorKind::UnexpectedEof, "a process of the job has ended")),
            Ok(got) => into = &mut into[got..],
            Err(error) => not_ready(error, deadline, meanwhile)?,
        }
    }
    Ok(())
}

/// Sleeps a moment after a socket was not ready, until the deadline.
fn not_ready(error: io::Error, deadline: Instant, meanwhile: &mut impl FnMut()) -> io::Result<()> {
    match error.kind() {
        ErrorKind::Interrupted => Ok(()),
        ErrorKind::WouldBlock if Instant::now() < deadline => {
            meanwhile();
            sleep(PAUSE);
            Ok(())
        }
        ErrorKind::WouldBlock => {
            Err(io::Error::new(ErrorKind::TimedOut, "a process of the job did not answer in time in time"))
        }
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::thread;

    fn free_address() -> SocketAddr {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
    }

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn allgather_returns_all_contributions_by_rank() {
        let address = free_address();
        let threads: Vec<_> = (0..5)
            .map(|_| {
                thread::spawn(move || {
                    let mut job = Rendezvous::join(address, 5, SOON).unwrap();
                    let mut passes = 0;
                    for round in 0..3u8 {
                        let ours = vec![job.rank() as u8; 1 + job.rank() * 1000 + round as usize];
                        let all = job.allgather_with(&ours, || passes += 1).unwrap();
                        for (rank, bytes) in all.iter().enumerate() {
                            assert_eq!(*bytes, vec![rank as u8; 1 + rank * 1000 + round as usize]);
                        }
                    }
                    job.barrier_with(|| {}).unwrap();
                    assert!(job.exchange([]).is_err(), "not a job of two");
                    job.rank()
                })
            })
            .collect();
        let mut ranks: Vec<usize> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        ranks.sort_unstable();
        assert_eq!(ranks, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn unrelated_clients_delay_no_process_and_take_no_rank() {
        let address = free_address();
        let leader =
            thread::spawn(move || Rendezvous::join(address, 2, SOON).unwrap().exchange(b"a").unwrap());
        let connect = || loop {
            match TcpStream::connect(address) {
                Ok(stream) => break stream,
                Err(_) => sleep(PAUSE),
            }
        };
        let _silent = connect();
        let mut wrong = connect();
        wrong.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        let mut half = connect();
        half.write_all(&HELLO[..3]).unwrap();
        let mut other_size = connect();
        other_size.write_all(&[&HELLO[..], &9u32.to_le_bytes()].concat()).unwrap();
        let mut second = Rendezvous::join(address, 2, SOON).unwrap();
        assert_eq!((second.rank(), second.exchange(b"b").unwrap()), (1, b"a".to_vec()));
        assert_eq!(leader.join().unwrap(), b"b");
    }

    #[test]
    fn missing_processes_are_counted_and_bad_sizes_refused() {
        let error = Rendezvous::join(free_address(), 3, Duration::from_millis(30)).unwrap_err();
        assert_eq!(
            (error.kind(), error.to_string()),
            (ErrorKind::TimedOut, "1 of 3 processes have joined".into())
        );
        for size in [0, SIZE_MAX + 1] {
            assert_eq!(
                Rendezvous::join(free_address(), size, SOON).unwrap_err().kind(),
                ErrorKind::InvalidInput
            );
        }
        assert_eq!(Rendezvous::join(free_address(), 1, SOON).unwrap().allgather(b"x").unwrap(), [b"x"]);
    }

    #[test]
    fn a_name_with_two_addresses_makes_one_job() {
        let port = free_address().port();
        let both = [SocketAddr::from(([127, 0, 0, 1], port)), SocketAddr::from(([127, 0, 0, 2], port))];
        let leader = thread::spawn(move || Rendezvous::join(&both[..], 2, SOON).map(|job| job.rank()));
        let rank = Rendezvous::join(&both[..], 2, SOON).unwrap().rank();
        assert_eq!(leader.join().unwrap().unwrap() + rank, 1);
    }

    #[test]
    fn an_unresponsive_host_is_awaited_until_the_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        // SAFETY: the call takes no pointers. It shortens the queue of connections.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
        let short = Duration::from_millis(200);
        let held: Vec<_> = (0..8).map_while(|_| TcpStream::connect_timeout(&address, short).ok()).collect();
        let begun = Instant::now();
        assert!(Rendezvous::join(address, 2, short).is_err());
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}, {held:?}", begun.elapsed());
    }

    #[test]
    fn rounds_after_a_failed_one_are_not_mixed_up() {
        let address = free_address();
        let leader = thread::spawn(move || {
            let mut job = Rendezvous::join(address, 2, SOON).unwrap();
            sleep(Duration::from_millis(300));
            job.timeout = Duration::from_millis(500);
            job.exchange(b"a")
        });
        let mut job = Rendezvous::join(address, 2, Duration::from_millis(100)).unwrap();
        assert_eq!(job.exchange(b"first").unwrap_err().kind(), ErrorKind::TimedOut);
        job.timeout = SOON;
        assert!(job.exchange(b"second").is_err(), "an answer to the call before");
        let _ = leader.join().unwrap();
    }

    #[test]
    fn a_round_takes_no_longer_than_a_few_pauses() {
        let address = free_address();
        let run = move || {
            let mut job = Rendezvous::join(address, 3, SOON).unwrap();
            let begun = Instant::now();
            for _ in 0..20 {
                job.allgather([1; 300]).unwrap();
            }
            begun.elapsed()
        };
        let threads: Vec<_> = (0..3).map(|_| thread::spawn(run)).collect();
        for thread in threads {
            let took = thread.join().unwrap();
            assert!(took < Duration::from_millis(500), "20 rounds in {took:?}");
        }
    }

    #[test]
    fn an_ended_process_is_an_error() {
        let address = free_address();
        let leader = thread::spawn(move || Rendezvous::join(address, 2, SOON).unwrap().exchange(b"a"));
        drop(Rendezvous::join(address, 2, SOON).unwrap());
        assert!(leader.join().unwrap().is_err());
    }
}
