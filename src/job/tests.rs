mod members;
mod pmi;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, sleep};

use super::*;

fn free_address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], super::port::free_port()))
}

const SOON: Duration = Duration::from_secs(60);

/// Runs three rounds with contributions of different lengths.
fn rounds(job: &mut Job) {
    let mut passes = 0;
    for round in 0..3u8 {
        let ours = vec![job.rank() as u8; 1 + job.rank() * 1000 + round as usize];
        let all = job.allgather_with(&ours, || passes += 1).unwrap();
        assert_eq!(all.len(), job.size());
        for (rank, bytes) in all.iter().enumerate() {
            assert_eq!(*bytes, vec![rank as u8; 1 + rank * 1000 + round as usize]);
        }
    }
    job.barrier_with(|| {}).unwrap();
}

/// Runs one thread per process, and checks that each rank occurs once.
fn run(size: usize, join: impl Fn(usize) -> Job + Sync) {
    let mut ranks: Vec<usize> = thread::scope(|scope| {
        let join = &join;
        let one = |at| {
            move || {
                let mut job = join(at);
                rounds(&mut job);
                job.rank()
            }
        };
        let threads: Vec<_> = (0..size).map(|at| scope.spawn(one(at))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    ranks.sort_unstable();
    assert_eq!(ranks, (0..size).collect::<Vec<_>>());
}

/// Joins a job according to these environment variables.
fn by(variables: &[(&str, String)], timeout: Duration) -> io::Result<Job> {
    let get =
        |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone());
    environment::join(get, timeout)
}

#[test]
fn everybody_gets_what_everybody_gave_by_rank() {
    let address = free_address();
    run(5, |_| Job::join(address, 5, SOON).unwrap());
    run(1, |_| Job::alone());
    let error = Job::alone().exchange([]).unwrap_err().to_string();
    assert_eq!(
        error,
        "cannot exchange in a job of 1: exchange is for two processes; use allgather"
    );
}

#[test]
fn an_id_makes_a_job_and_travels_as_128_bytes() {
    let leader = Leader::open().unwrap();
    let id = leader.id();
    let bytes = *id.as_bytes();
    let leader = std::sync::Mutex::new(Some(leader));
    run(4, |rank| match rank {
        0 => leader.lock().unwrap().take().unwrap().lead(4, SOON).unwrap(),
        rank => Job::follow(&UniqueId::from_bytes(&bytes).unwrap(), rank, 4, SOON).unwrap(),
    });
    assert_eq!(UniqueId::from_hex(&id.to_hex()).unwrap().as_bytes(), &bytes);
    for at in [0, 4, 5, 127] {
        let mut bad = bytes;
        bad[at] = 99;
        assert!(UniqueId::from_bytes(&bad).is_err(), "byte {at}");
    }
    assert!(UniqueId::from_bytes(&bytes[1..]).is_err());
    assert_ne!(
        &bytes[8..40],
        &Leader::open().unwrap().id().as_bytes()[8..40],
        "each id has its cookie"
    );
    assert!(!format!("{:?}", id.cookie()).contains(char::is_numeric));
}

#[test]
fn launchers_are_understood() {
    let size = ("FISHPLATE_SIZE", "3".to_string());
    let place = |address: SocketAddr| ("FISHPLATE_RENDEZVOUS", format!("tcp://{address}"));
    let address = free_address();
    run(3, |_| by(&[place(address), size.clone()], SOON).unwrap());
    let launchers = [
        ("FISHPLATE_RANK", "FISHPLATE_SIZE"),
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ];
    for (rank, size) in launchers {
        let address = free_address();
        run(3, |at| {
            let job =
                by(&[place(address), (rank, at.to_string()), (size, "3".into())], SOON).unwrap();
            assert_eq!(job.rank(), at, "{rank}");
            job
        });
    }
    // The store of torchrun listens at `MASTER_PORT`, and the job at the next port.
    let port = free_address().port() - 1;
    let torch = |at: usize| {
        [("RANK", at.to_string()), ("WORLD_SIZE", "2".into()), ("MASTER_ADDR", "127.0.0.1".into())]
    };
    run(2, |at| {
        by(&[&torch(at)[..], &[("MASTER_PORT", port.to_string())]].concat(), SOON).unwrap()
    });
    let meet_at = ("FISHPLATE_RENDEZVOUS", format!("tcp://:{}", free_address().port()));
    run(2, |at| by(&[&torch(at)[..], std::slice::from_ref(&meet_at)].concat(), SOON).unwrap());
    assert_eq!(by(&[], SOON).unwrap().size(), 1);
    assert_eq!(by(&[("RANK", "7".into())], SOON).unwrap().size(), 1, "a rank without a size");
}

#[test]
fn the_launcher_tells_the_number_of_a_process_on_its_host() {
    let told = |variables: &[(&str, &str)]| {
        let variables: Vec<_> =
            variables.iter().map(|&(name, value)| (name, value.to_owned())).collect();
        by(&variables, SOON).unwrap().local_rank()
    };
    let names = [
        "FISHPLATE_LOCAL_RANK",
        "LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "PMI_LOCAL_RANK",
        "SLURM_LOCALID",
    ];
    for (at, name) in names.into_iter().enumerate() {
        assert_eq!(told(&[(name, "3")]), Some(3), "{name}");
        let outer: Vec<_> = names[at + 1..].iter().map(|&name| (name, "0")).collect();
        assert_eq!(
            told(&[&outer[..], &[(name, "3")]].concat()),
            Some(3),
            "{name} is the innermost"
        );
    }
    assert_eq!(told(&[]), None);
    assert_eq!(told(&[("LOCAL_RANK", "-1"), ("SLURM_LOCALID", "2")]), Some(2), "-1 is no number");
    let alone = by(&[("LOCAL_RANK", "4294967297".into())], SOON).unwrap();
    assert_eq!((alone.size(), alone.local_rank()), (1, Some(4294967297)));
}

#[test]
fn variables_that_make_no_sense_are_named() {
    let place = |text: &str| ("FISHPLATE_RENDEZVOUS", text.to_owned());
    let size = |text: &str| ("FISHPLATE_SIZE", text.to_owned());
    let cases: [(&[(&str, String)], &str); 15] = [
        (&[place("tcp://127.0.0.1:1")], "FISHPLATE_SIZE"),
        (&[place("tcp://127.0.0.1"), size("2")], "FISHPLATE_RENDEZVOUS"),
        (&[place("tcp://:7"), size("2")], "MASTER_ADDR"),
        (&[place("udp://127.0.0.1:1"), size("2")], "tcp://HOST:PORT or file:///DIR"),
        (&[place("file://relative"), size("2")], "tcp://HOST:PORT or file:///DIR"),
        (&[place("tcp://127.0.0.1:1"), size("two")], "FISHPLATE_SIZE"),
        (&[place("tcp://127.0.0.1:1"), size("5000")], "1 to 1024"),
        (&[size("2"), ("FISHPLATE_RANK", "0".into())], "set FISHPLATE_RENDEZVOUS"),
        (&[("FISHPLATE_RANK", "1".into())], "not FISHPLATE_SIZE"),
        (&[place("tcp://127.0.0.1:1"), ("FISHPLATE_RANK", "0".into())], "not FISHPLATE_SIZE"),
        (&[place("tcp://127.0.0.1:0"), size("2")], "\"127.0.0.1:0\" given; use tcp://HOST:PORT"),
        (&[place("tcp://:0"), size("2"), ("MASTER_ADDR", "a".into())], "use tcp://HOST:PORT"),
        (&[size("2"), ("MASTER_ADDR", "a".into()), ("MASTER_PORT", "0".into())], "MASTER_PORT"),
        (&[("PMI_FD", "-1".into())], "a launcher with PMI-1"),
        (&[place("tcp://127.0.0.1:1"), size("2"), ("FISHPLATE_COOKIE", "c".repeat(33))], "cookie"),
    ];
    for (variables, named) in cases {
        let error = by(variables, SOON).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{variables:?}: {error}");
        assert!(error.to_string().contains(named), "{variables:?}: {error}");
    }
}

#[test]
fn an_address_without_a_port_is_refused() {
    for address in ["127.0.0.1:0", "127.0.0.1", "127.0.0.1:65536", ""] {
        let error = Job::join(address, 2, SOON).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        assert!(error.to_string().contains("pass HOST:PORT"), "{error}");
    }
}

/// Retries until joining fails with this text. On a busy machine an attempt may fail with another
/// text, because a reply is late or the other process has not joined yet.
fn refused(join: impl Fn(Duration) -> io::Result<Job>, text: &str) {
    let begun = Instant::now();
    for attempt in 1.. {
        let error = join(Duration::from_millis(300) * attempt).unwrap_err().to_string();
        if error.contains(text) {
            return;
        }
        assert!(begun.elapsed() < SOON, "{text:?} is not in: {error}");
        sleep(Duration::from_millis(100) * attempt);
    }
}

/// Retries with longer timeouts until all processes fail with this text. On a busy machine, other
/// ranks may be missing too.
fn sooner_or_later(text: &str, ends: impl Fn(Duration) -> Vec<io::Result<()>>) {
    let begun = Instant::now();
    for attempt in 1.. {
        let errors: Vec<_> = ends(Duration::from_millis(300) * attempt)
            .into_iter()
            .map(|end| end.unwrap_err())
            .collect();
        let right = |error: &io::Error| {
            error.kind() == ErrorKind::TimedOut && error.to_string().contains(text)
        };
        if errors.iter().all(right) {
            return;
        }
        assert!(begun.elapsed() < SOON, "{text:?} is not in: {errors:?}");
    }
}

/// A temporary folder, removed when dropped.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("fishplate-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn variables(&self, size: usize) -> Vec<(&'static str, String)> {
        vec![
            ("FISHPLATE_RENDEZVOUS", format!("file://{}", self.0.display())),
            ("FISHPLATE_SIZE", size.to_string()),
        ]
    }

    fn is_empty(&self) -> bool {
        std::fs::read_dir(&self.0).unwrap().next().is_none()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_folder_makes_jobs_one_after_another_and_keeps_nothing() {
    let folder = Folder::new("meets");
    let path = folder.0.join("fishplate-job");
    run(4, |_| by(&folder.variables(4), SOON).unwrap());
    assert!(folder.is_empty());
    // A rank 0 that was killed leaves an unlocked file, which names a port where nothing listens.
    std::fs::write(&path, Leader::open().unwrap().id().as_bytes()).unwrap();
    run(3, |at| {
        by(&[&folder.variables(3)[..], &[("FISHPLATE_RANK", at.to_string())]].concat(), SOON)
            .unwrap()
    });
    assert!(folder.is_empty());
    // The other ranks remove the file of a killed rank 0 when they give up.
    std::fs::write(&path, Leader::open().unwrap().id().as_bytes()).unwrap();
    let ranked = [&folder.variables(2)[..], &[("FISHPLATE_RANK", "1".into())]].concat();
    assert_eq!(by(&ranked, Duration::from_millis(100)).unwrap_err().kind(), ErrorKind::TimedOut);
    assert!(folder.is_empty());
    // The kernel releases the lock of a killed rank 0 later than its connections.
    let locked = std::fs::File::create(&path).unwrap();
    // SAFETY: the descriptor is open.
    assert_eq!(unsafe { libc::flock(locked.as_raw_fd(), libc::LOCK_EX) }, 0);
    file::remove_if_dead(&path, Duration::from_millis(5));
    assert!(!folder.is_empty(), "rank 0 lives");
    let dying = thread::spawn(move || {
        sleep(Duration::from_millis(50));
        drop(locked);
    });
    file::remove_if_dead(&path, SOON);
    assert!(folder.is_empty());
    dying.join().unwrap();
    let error = by(&Folder(folder.0.join("absent")).variables(2), SOON).unwrap_err();
    assert!(error.to_string().ends_with("create it where all processes can access it"), "{error}");
    // A symbolic link is not followed, because it may point to one of the user's files.
    let other = folder.0.join("other");
    std::fs::write(&other, "precious").unwrap();
    for hard in [false, true] {
        match hard {
            false => std::os::unix::fs::symlink(&other, &path).unwrap(),
            true => std::fs::hard_link(&other, &path).unwrap(),
        }
        assert!(by(&folder.variables(2), Duration::from_millis(100)).is_err());
        std::fs::remove_file(&path).unwrap();
    }
    assert_eq!(std::fs::read(&other).unwrap(), b"precious");
}

#[test]
fn strangers_hold_up_nobody_and_take_no_rank() {
    let address = free_address();
    let leader =
        thread::spawn(move || Job::join(address, 2, SOON).unwrap().exchange(b"a").unwrap());
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
    half.write_all(b"FPj").unwrap();
    let mut crowd: Vec<_> = (0..200).map(|_| connect()).collect();
    for (at, one) in crowd.iter_mut().enumerate() {
        // Sends less than a hello, so rank 0 waits for the rest.
        let _ = one.write_all(&vec![at as u8; at % 40]);
    }
    refused(|timeout| Job::join(address, 9, timeout), "another size");
    refused(
        |timeout| Job::join(address, 9, timeout),
        "check that rank 0 runs, that all have the same address, and that no other program listens \
         there",
    );
    let mut second = Job::join(address, 2, SOON).unwrap();
    assert_eq!((second.rank(), second.exchange(b"b").unwrap()), (1, b"a".to_vec()));
    assert_eq!(leader.join().unwrap(), b"b");
}

#[test]
fn without_the_cookie_nothing_else_is_read() {
    let address = free_address();
    let variables = move |rank: usize, cookie: &str| {
        [
            ("FISHPLATE_RENDEZVOUS", format!("tcp://{address}")),
            ("FISHPLATE_SIZE", "2".to_owned()),
            ("FISHPLATE_RANK", rank.to_string()),
            ("FISHPLATE_COOKIE", cookie.to_owned()),
        ]
    };
    let leader = thread::spawn(move || {
        by(&variables(0, "swordfish"), SOON).unwrap().exchange(b"a").unwrap()
    });
    for wrong in ["", "swordfisg", "swordfish1", "Swordfish"] {
        refused(|timeout| by(&variables(1, wrong), timeout), "no job with this cookie");
    }
    // If a stranger sends a whole hello with a wrong cookie, rank 0 closes the connection without
    // an answer.
    let mut stranger = TcpStream::connect(address).unwrap();
    let hello =
        [&b"FPjob\0\0\x01"[..], &[7; 32], &2u32.to_le_bytes(), &1u32.to_le_bytes()].concat();
    stranger.write_all(&hello).unwrap();
    let mut answer = vec![];
    let _ = stranger.read_to_end(&mut answer);
    assert_eq!(answer, []);
    assert_eq!(by(&variables(1, "swordfish"), SOON).unwrap().exchange(b"b").unwrap(), b"a");
    assert_eq!(leader.join().unwrap(), b"b");
}

#[test]
fn the_missing_are_named_to_all_who_wait() {
    sooner_or_later("ranks 1, 3, 4 did not come", |timeout| {
        let leader = Leader::open().unwrap();
        let id = leader.id();
        let threads = [
            thread::spawn(move || leader.lead(5, timeout * 4)),
            thread::spawn(move || Job::follow(&id, 2, 5, timeout * 8)),
        ];
        threads.map(|thread| thread.join().unwrap().map(drop)).into()
    });
    // Without ranks, the error says how many are missing.
    let error = Job::join(free_address(), 3, Duration::from_millis(30)).unwrap_err();
    assert!(error.to_string().contains("2 processes did not come"), "{error}");
    let error = Job::join("127.0.0.1", 2, SOON).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().ends_with("; pass HOST:PORT"), "{error}");
    for size in [0, SIZE_MAX + 1] {
        let error = Job::join(free_address(), size, SOON).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }
    assert_eq!(
        Ranks::new(3..30).to_string(),
        "ranks 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18 and 11 more"
    );
    for ranks in [Ranks::new(0..40), Ranks { count: 3, first: vec![] }] {
        assert_eq!(Ranks::decode(&ranks.encode()), Some(ranks));
    }
    assert_eq!(
        [Ranks::decode(&[]), Ranks::decode(&[1, 0, 0]), Ranks::decode(&[0; 8])],
        [None, None, None]
    );
}

/// Runs a job of three, with `of(rank, job)` on each rank, and returns the results.
fn three<T: Send + 'static>(of: impl Fn(usize, Job) -> T + Send + Copy + 'static) -> Vec<T> {
    let address = free_address();
    let one = move |rank: usize| {
        let variables = [
            ("FISHPLATE_RENDEZVOUS", format!("tcp://{address}")),
            ("FISHPLATE_SIZE", "3".into()),
            ("FISHPLATE_RANK", rank.to_string()),
        ];
        of(rank, by(&variables, SOON).unwrap())
    };
    let threads: Vec<_> = (0..3).map(|rank| thread::spawn(move || one(rank))).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

#[test]
fn a_rank_that_stays_away_from_a_round_is_named_by_all() {
    static ENDED: [AtomicU32; 3] = [const { AtomicU32::new(0) }; 3];
    for (away, ended) in ENDED.iter().enumerate() {
        sooner_or_later(&format!("rank {away} did not come"), |timeout| {
            ended.store(0, Ordering::Relaxed);
            let mut ends = three(move |rank, mut job| {
                job.timeout = timeout;
                if rank != away {
                    let end = job.allgather([rank as u8]).map(drop);
                    ended.fetch_add(1, Ordering::Relaxed);
                    return end;
                }
                while ended.load(Ordering::Relaxed) < 2 {
                    sleep(PAUSE);
                }
                Ok(())
            });
            ends.remove(away).unwrap();
            ends
        });
    }
}

#[test]
fn a_rank_that_is_gone_is_named_by_all_at_once() {
    for away in 0..3 {
        let begun = Instant::now();
        let ends = three(move |rank, mut job| match rank == away {
            true => Ok(()),
            false => job.allgather([rank as u8]).and_then(|_| job.allgather([])).map(drop),
        });
        for (_, end) in ends.into_iter().enumerate().filter(|(rank, _)| *rank != away) {
            let error = end.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
            assert!(
                error.to_string().contains(&format!("lost the connection to rank {away};")),
                "{error}"
            );
        }
        assert!(begun.elapsed() < SOON / 2);
    }
}

#[test]
fn a_process_that_died_before_the_job_began_may_be_started_again() {
    let leader = Leader::open().unwrap();
    let id = leader.id();
    let leader = thread::spawn(move || leader.lead(3, SOON).map(|job| job.rank()));
    refused(|timeout| Job::follow(&id, 1, 3, timeout), "rank 2 did not come");
    let first = thread::spawn(move || Job::follow(&id, 1, 3, SOON).map(|job| job.rank()));
    // While rank 1 waits, no other process can take its rank.
    refused(|timeout| Job::follow(&id, 1, 3, timeout), "another process has that rank");
    assert_eq!(Job::follow(&id, 2, 3, SOON).unwrap().rank(), 2);
    assert_eq!(leader.join().unwrap().unwrap() + first.join().unwrap().unwrap(), 1);
}

#[test]
fn a_name_with_two_addresses_makes_one_job() {
    let port = free_address().port();
    let both = [SocketAddr::from(([127, 0, 0, 1], port)), SocketAddr::from(([127, 0, 0, 2], port))];
    let leader = thread::spawn(move || Job::join(&both[..], 2, SOON).map(|job| job.rank()));
    let rank = Job::join(&both[..], 2, SOON).unwrap().rank();
    assert_eq!(leader.join().unwrap().unwrap() + rank, 1);
}

#[test]
fn a_host_that_does_not_answer_is_waited_for_no_longer_than_asked() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // SAFETY: the call takes no pointers. It shrinks the backlog so that connections queue up.
    assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
    let short = Duration::from_millis(200);
    let held: Vec<_> =
        (0..8).map_while(|_| TcpStream::connect_timeout(&address, short).ok()).collect();
    let begun = Instant::now();
    assert!(Job::join(address, 2, short).is_err());
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}, {held:?}", begun.elapsed());
}

#[test]
fn rounds_are_not_mixed_up_after_one_that_failed() {
    let address = free_address();
    static FAILED: AtomicU32 = AtomicU32::new(0);
    let leader = thread::spawn(move || {
        let mut job = Job::join(address, 2, SOON).unwrap();
        while FAILED.load(Ordering::Relaxed) == 0 {
            sleep(PAUSE);
        }
        job.timeout = Duration::from_millis(500);
        job.exchange(b"a")
    });
    let mut job = Job::join(address, 2, SOON).unwrap();
    job.timeout = Duration::from_millis(100);
    assert_eq!(job.exchange(b"first").unwrap_err().kind(), ErrorKind::TimedOut);
    FAILED.store(1, Ordering::Relaxed);
    job.timeout = SOON;
    assert_eq!(job.exchange(b"second").unwrap_err().kind(), ErrorKind::NotConnected);
    let _ = leader.join().unwrap();
}

#[test]
fn the_longest_contributions_of_many_pass() {
    let address = free_address();
    let threads: Vec<_> = (0..8)
        .map(|_| {
            thread::spawn(move || {
                let mut job = Job::join(address, 8, SOON).unwrap();
                let all = job.allgather(vec![job.rank() as u8; CONTRIBUTION_MAX]).unwrap();
                assert!(
                    all.iter()
                        .enumerate()
                        .all(|(rank, one)| *one == vec![rank as u8; CONTRIBUTION_MAX])
                );
                assert!(job.allgather(vec![0; CONTRIBUTION_MAX + 1]).is_err());
                job.barrier_with(|| {}).unwrap();
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
