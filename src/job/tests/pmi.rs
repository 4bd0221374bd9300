//! Tests jobs that a PMI-1 launcher starts, and launchers that fail.

use std::os::unix::net::UnixStream;

use super::*;

/// A PMI-1 launcher: one thread that answers each line. Without `complete`, one process never
/// reaches the barrier.
fn launcher(sockets: Vec<UnixStream>, complete: bool) -> thread::JoinHandle<usize> {
    thread::spawn(move || {
        let mut store = std::collections::HashMap::new();
        let (mut at_barrier, mut finalized, mut open) = (0, 0, sockets.len());
        sockets.iter().for_each(|socket| socket.set_nonblocking(true).unwrap());
        let mut received = vec![String::new(); sockets.len()];
        while open > 0 {
            for (mut socket, received) in sockets.iter().zip(&mut received) {
                let mut bytes = [0; 1024];
                match socket.read(&mut bytes) {
                    Ok(0) => open -= 1,
                    Ok(got) => received.push_str(std::str::from_utf8(&bytes[..got]).unwrap()),
                    Err(_) => {}
                }
                let Some((line, rest)) = received.split_once('\n') else { continue };
                let word = |key: &str| {
                    let mut words = line.split(' ').filter_map(|word| word.split_once('='));
                    words.find(|(name, _)| *name == key).map(|(_, value)| value.to_owned()).unwrap()
                };
                let answer = match word("cmd").as_str() {
                    "init" => "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0".to_owned(),
                    "get_my_kvsname" => "cmd=my_kvsname kvsname=kvs_1_0".into(),
                    "put" => {
                        store.insert(word("key"), word("value"));
                        "cmd=put_result rc=0 msg=success".into()
                    }
                    "get" => {
                        format!("cmd=get_result rc=0 msg=success value={}", store[&word("key")])
                    }
                    "barrier_in" => {
                        at_barrier += 1;
                        String::new()
                    }
                    "finalize" => {
                        finalized += 1;
                        "cmd=finalize_ack".into()
                    }
                    other => panic!("{other}"),
                };
                *received = rest.to_owned();
                if !answer.is_empty() {
                    socket.write_all(format!("{answer}\n").as_bytes()).unwrap();
                }
            }
            if at_barrier == sockets.len() && complete {
                at_barrier = 0;
                sockets
                    .iter()
                    .for_each(|mut socket| socket.write_all(b"cmd=barrier_out\n").unwrap());
            }
            sleep(PAUSE);
        }
        finalized
    })
}

fn by_pmi(socket: &UnixStream, rank: usize, timeout: Duration) -> io::Result<Job> {
    let variables = [
        ("PMI_FD", socket.as_raw_fd().to_string()),
        ("PMI_RANK", rank.to_string()),
        ("PMI_SIZE", "3".into()),
    ];
    by(&variables, timeout)
}

#[test]
fn a_launcher_with_pmi_makes_a_job() {
    let (ours, theirs): (Vec<_>, Vec<_>) = (0..3).map(|_| UnixStream::pair().unwrap()).unzip();
    let launcher = launcher(theirs, true);
    run(3, |at| by_pmi(&ours[at], at, SOON).unwrap());
    drop(ours);
    assert_eq!(launcher.join().unwrap(), 3, "each said that it is done");
}

#[test]
fn pmi_that_fails_is_an_error() {
    let (ours, theirs): (Vec<_>, Vec<_>) = (0..3).map(|_| UnixStream::pair().unwrap()).unzip();
    let launcher = launcher(theirs, false);
    let error = by_pmi(&ours[1], 1, Duration::from_secs(2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.to_string().contains("not all 3 ranks"), "{error}");
    drop(ours);
    launcher.join().unwrap();
    let endless = "x".repeat(8192);
    for (answer, text) in [
        ("", "PMI: the launcher closed the connection"),
        ("cmd=response_to_init rc=-1\n", "PMI: response_to_init failed"),
        ("cmd=barrier_out rc=0\n", "PMI: response_to_init failed"),
        ("nonsense\n", "PMI: response_to_init failed"),
        ("cmd=response_to_init rc=0\ncmd=my_kvsname\n", "PMI: kvsname failed"),
        (
            &endless,
            "PMI: response_to_init failed: the launcher answered \"an answer of more than 4096 \
             bytes\"",
        ),
    ] {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(answer.as_bytes()).unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        let error = by_pmi(&ours, 1, SOON).unwrap_err().to_string();
        assert!(error.starts_with(text), "{error}");
    }
    let (gone, _) = UnixStream::pair().unwrap();
    let fd = gone.as_raw_fd();
    drop(gone);
    let variables =
        [("PMI_FD", fd.to_string()), ("PMI_RANK", "1".into()), ("PMI_SIZE", "3".into())];
    assert!(by(&variables, SOON).is_err(), "no descriptor, or no socket");
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let error = by(&[("PMI_FD", ours.as_raw_fd().to_string())], SOON).unwrap_err();
    assert!(error.to_string().starts_with("PMI_FD is set, but not PMI_RANK"), "{error}");
}

#[test]
fn pmi_ignores_the_variables_of_other_launchers() {
    let (ours, theirs): (Vec<_>, Vec<_>) = (0..2).map(|_| UnixStream::pair().unwrap()).unzip();
    let launcher = launcher(theirs, true);
    run(2, |at| {
        let variables = [
            ("PMI_FD", ours[at].as_raw_fd().to_string()),
            ("PMI_RANK", at.to_string()),
            ("PMI_SIZE", "2".into()),
            ("RANK", "0".into()),
            ("WORLD_SIZE", "1".into()),
            ("FISHPLATE_SIZE", "many".into()),
        ];
        by(&variables, SOON).unwrap()
    });
    drop(ours);
    assert_eq!(launcher.join().unwrap(), 2);
}

#[test]
fn a_descriptor_of_an_outer_launcher_is_not_used() {
    let file = std::fs::File::open("/").unwrap();
    for fd in ["many".to_owned(), "-1".into(), i32::MAX.to_string(), file.as_raw_fd().to_string()] {
        let set = |more: &[(&'static str, &str)]| {
            let mut variables =
                vec![("PMI_FD", fd.clone()), ("PMI_RANK", "0".into()), ("PMI_SIZE", "1".into())];
            variables.extend(more.iter().map(|&(name, value)| (name, value.to_owned())));
            let get = |name: &str| {
                variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone())
            };
            environment::way(get, SOON).map(|way| way.to_string()).map_err(|e| e.to_string())
        };
        let refusal = format!(
            "PMI_FD is unusable: {fd:?} given; use a launcher with PMI-1, which opens this \
             descriptor, or unset PMI_FD"
        );
        assert_eq!(set(&[]), Err(refusal.clone()));
        let with_pmix = match pmix::Library::load() {
            Ok(_) => Ok("a launcher with PMIx".to_owned()),
            Err(_) => Err(refusal),
        };
        assert_eq!(set(&[("PMIX_NAMESPACE", "prterun-1")]), with_pmix);
    }
}
