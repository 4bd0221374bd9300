//! Tests members of a job that violate the protocol or leave. Checks the reports of the other
//! members.

use super::*;
use crate::job::id::Cookie;
use crate::job::round::{Conn, DATA, MISSING, RANK, WELCOME, sleep_on};

/// Joins a job of three as `rank`. Returns once the leader has assigned the rank.
fn member(id: &UniqueId, rank: u32) -> Conn {
    let stream = TcpStream::connect(id.addresses()[0]).unwrap();
    let mut conn = Conn::new(stream).unwrap();
    conn.extend(b"FPjob\0\0\x01".iter().chain(id.cookie().bytes()).copied());
    loop {
        conn.flush().unwrap();
        match conn.frame().unwrap() {
            Some((WELCOME, _)) => conn.extend([3, rank].into_iter().flat_map(u32::to_le_bytes)),
            Some((RANK, bytes)) if bytes == rank.to_le_bytes() => return conn,
            _ => sleep_on([(conn.raw_fd(), false)].into_iter(), PAUSE),
        }
    }
}

#[test]
fn a_member_that_breaks_the_rules_ends_the_job() {
    let frame = |kind: u32, len: u32| [kind, len].into_iter().flat_map(u32::to_le_bytes).collect();
    let cases: [(&str, Vec<u8>); 3] = [
        ("two contributions to one round", [frame(DATA, 0), frame(DATA, 0)].concat()),
        ("one that is too long", frame(DATA, CONTRIBUTION_MAX as u32 + 1)),
        ("an unknown frame", frame(99, 0)),
    ];
    for (what, bytes) in cases {
        let leader = Leader::open().unwrap();
        let id = leader.id();
        let leader = thread::spawn(move || leader.lead(3, SOON).unwrap().allgather([]).map(drop));
        let silent = thread::spawn(move || member(&id, 2));
        let mut rude = member(&id, 1);
        rude.extend(bytes);
        rude.flush().unwrap();
        let error = leader.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{what}: {error}");
        assert!(error.to_string().contains("lost the connection to rank 1;"), "{what}: {error}");
        silent.join().unwrap();
    }
}

#[test]
fn a_rank_that_gives_up_first_tells_the_others_who_is_missing() {
    static ENDED: AtomicU32 = AtomicU32::new(0);
    sooner_or_later("rank 2 did not come", |timeout| {
        ENDED.store(0, Ordering::Relaxed);
        let begun = Instant::now();
        let mut ends = three(move |rank, mut job| {
            if rank == 1 {
                job.timeout = timeout;
            }
            if rank == 2 {
                while ENDED.load(Ordering::Relaxed) < 2 {
                    sleep(PAUSE);
                }
                return Ok(());
            }
            let end = job.allgather([rank as u8]).map(drop);
            ENDED.fetch_add(1, Ordering::Relaxed);
            end
        });
        assert!(begun.elapsed() < SOON, "rank 0 waited for its own deadline");
        ends.pop().unwrap().unwrap();
        ends
    });
}

#[test]
fn a_rank_that_came_and_left_is_not_a_missing_one() {
    sooner_or_later(": rank 2 did not come", |timeout| {
        let leader = Leader::open().unwrap();
        let id = leader.id();
        let threads = [
            thread::spawn(move || leader.lead(3, timeout * 4)),
            thread::spawn(move || Job::follow(&id, 1, 3, timeout)),
        ];
        threads.map(|thread| thread.join().unwrap().map(drop)).into()
    });
}

#[test]
fn a_process_without_a_rank_is_refused_where_others_have_one() {
    let address = free_address();
    let variables = move |rank: Option<&str>| {
        let place = format!("tcp://{address}");
        let mut all = vec![("FISHPLATE_RENDEZVOUS", place), ("FISHPLATE_SIZE", "2".into())];
        all.extend(rank.map(|rank| ("FISHPLATE_RANK", rank.to_owned())));
        all
    };
    let leader =
        thread::spawn(move || by(&variables(Some("0")), SOON).unwrap().exchange(b"a").unwrap());
    while TcpStream::connect(address).is_err() {
        sleep(PAUSE);
    }
    refused(
        |timeout| by(&variables(None), timeout),
        "some processes were given ranks and others were not",
    );
    assert_eq!(by(&variables(Some("1")), SOON).unwrap().exchange(b"b").unwrap(), b"a");
    assert_eq!(leader.join().unwrap(), b"b");
}

#[test]
fn a_leader_that_only_talks_delays_nobody_beyond_the_deadline() {
    let missing = || {
        let ranks = Ranks::one(2).encode();
        [&MISSING.to_le_bytes()[..], &(ranks.len() as u32).to_le_bytes(), &ranks].concat()
    };
    let welcome = [WELCOME, 0].into_iter().flat_map(u32::to_le_bytes).collect::<Vec<u8>>();
    let rank = [RANK, 4, 1].into_iter().flat_map(u32::to_le_bytes).collect::<Vec<u8>>();
    let cases = [
        (vec![], "no job listens there"),
        (welcome.clone(), "rank 2 did not come within"),
        ([welcome, missing(), rank].concat(), "rank 2 did not come within"),
    ];
    for (first, text) in cases {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let id = UniqueId::new(&[at.ip()], at.port(), Cookie::random().unwrap());
        // Each thread ends when its other end hangs up, or when the test ends.
        thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                let (first, again) = (first.clone(), missing().repeat(100));
                thread::spawn(move || {
                    let mut sent = stream.write_all(&first);
                    while sent.is_ok() {
                        sent = stream.write_all(&again);
                    }
                });
            }
        });
        let (begun, timeout) = (Instant::now(), Duration::from_millis(500));
        let error =
            Job::follow(&id, 1, 3, timeout).and_then(|mut job| job.allgather([])).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert!(error.to_string().contains(text), "{error}");
        assert!(begun.elapsed() < SOON, "after {:?}", begun.elapsed());
    }
}
