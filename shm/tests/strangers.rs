//! Tests that unrelated clients of a listener lose only their own connections.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use fishplate_shm::{HandshakeError, Link, Listener, Role, ShmConfig, connect};

#[path = "support/raw.rs"]
mod raw;
mod support;
use raw::{HELLO, Raw, knock, listen, packet, send};
use support::*;

fn config() -> ShmConfig {
    ShmConfig { lane_cells: 64, max_message: 1024, ..ShmConfig::default() }
}

/// Clients of the listener at `name`, each in a thread that runs until `stop`.
struct Strangers<'s, 'e> {
    scope: &'s Scope<'s, 'e>,
    name: &'s str,
    stop: &'s AtomicBool,
}

impl<'s> Strangers<'s, '_> {
    /// Starts `count` clients. Each connects once and runs `each`. Returns the results.
    fn many<T: Send + 's>(
        &self,
        count: usize,
        each: impl Fn(Raw) -> T + Send + Copy + 's,
    ) -> Vec<T> {
        let (done, all) = mpsc::channel();
        for _ in 0..count {
            let (name, done) = (self.name, done.clone());
            self.scope.spawn(move || {
                done.send(each(Raw::new(knock(name, 0).unwrap(), &config()))).unwrap()
            });
        }
        drop(done);
        all.into_iter().collect()
    }

    /// Starts a client that connects repeatedly, and runs `each` on every connection.
    fn flood(&self, each: impl Fn(OwnedFd) + Send + 's) {
        let (name, stop) = (self.name, self.stop);
        self.scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                knock(name, 0).into_iter().for_each(&each);
            }
        });
    }
}

/// Checks that the expected peer connects in less than half of a handshake's time limit. So the
/// peer did not wait for the other clients. Returns why the other clients were refused. Other load
/// may delay some of the five attempts, but waiting for a client would delay all five.
#[track_caller]
fn meets_beside<T>(
    config: ShmConfig,
    strangers: impl Fn(&Strangers<'_, '_>) -> T,
) -> Vec<HandshakeError> {
    let mut late = vec![];
    while late.len() < 5 {
        match meets_once(config.clone(), &strangers) {
            (refused, took) if took < Duration::from_millis(2500) => return refused,
            (_, took) => late.push(took),
        }
    }
    panic!("{late:?}");
}

/// Makes one attempt. Returns why the other clients were refused, and the attempt's duration.
fn meets_once<T>(
    config: ShmConfig,
    strangers: impl Fn(&Strangers<'_, '_>) -> T,
) -> (Vec<HandshakeError>, Duration) {
    let (near, far) = (rail(config.clone()), rail(config));
    let (name, stop) = (&name(), &AtomicBool::new(false));
    let listener = Listener::bind(name).unwrap();
    thread::scope(|scope| {
        let accepting = scope.spawn(move || {
            let link = listener.accept(&near.profile(), soon()).map(|link| link.nonces()[0]);
            let why: Vec<_> = listener.refused().into_iter().map(|(_, why)| why).collect();
            (link, why)
        });
        let held = strangers(&Strangers { scope, name, stop });
        let begun = Instant::now();
        let there = connect(name, &far.profile(), soon());
        stop.store(true, Ordering::Relaxed);
        let (here, refused) = accepting.join().unwrap();
        assert_eq!(here, there.map(|link| link.nonces()[1]));
        assert!(here.is_ok(), "{here:?}");
        let took = begun.elapsed();
        drop(held);
        (refused, took)
    })
}

#[test]
fn silent_clients_cost_only_their_own_connections() {
    let _alone = alone();
    for count in [4, 64, 200] {
        meets_beside(config(), |strangers| strangers.many(count, |raw| raw.socket));
    }
}

#[test]
fn clients_that_stop_halfway_cost_only_their_own_connections() {
    let _alone = alone();
    meets_beside(config(), |strangers| {
        strangers.many(64, |mut raw| {
            raw.hello([7; 16]);
            raw.socket
        })
    });
    meets_beside(config(), |strangers| {
        strangers.many(64, |mut raw| {
            raw.hello([7; 16]);
            raw.offer();
            raw.socket
        })
    });
}

#[test]
fn invalid_handshakes_are_refused_by_reason() {
    let _alone = alone();
    // Sends bytes, and returns when the listener has hung up.
    fn says(raw: Raw, bytes: &[u8]) {
        raw.send(bytes, &[]);
        while !raw.recv().is_empty() {}
    }
    let refused = |each: fn(Raw), why| {
        assert_eq!(meets_beside(config(), |strangers| strangers.many(3, each)), [why; 3]);
    };
    let bad = HandshakeError::BadPacket;
    refused(|raw| says(raw, &[0xee; 60_000]), bad);
    refused(|raw| says(raw, &[0xee; 70_000]), bad);
    refused(|raw| says(raw, &packet(HELLO, &[0; 7])), bad);
    refused(|raw| says(raw, &packet(raw::READY, &[0; 16])), bad);
    fn version() -> Vec<u8> {
        let mut hello = packet(HELLO, &[]);
        hello[8] = 77;
        hello
    }
    let told = meets_beside(config(), |strangers| strangers.many(1, |raw| says(raw, &version())));
    assert!(matches!(told[..], [HandshakeError::Version { theirs: 77, .. }]), "{told:?}");
    // Replays an answer that was made for another listener.
    refused(
        |mut raw| {
            raw.hello([7; 16]);
            raw.theirs = [9; 16];
            raw.offer();
            while !raw.recv().is_empty() {}
        },
        HandshakeError::Nonce,
    );
    let gone = HandshakeError::HungUp;
    let told = meets_beside(config(), |strangers| strangers.many(3, drop));
    assert!(told.iter().all(|why| *why == gone), "{told:?}");
}

#[test]
fn floods_cost_only_their_own_connections() {
    let _alone = alone();
    meets_beside(config(), |strangers| (0..3).for_each(|_| strangers.flood(drop)));
    meets_beside(config(), |strangers| {
        strangers.flood(|socket| {
            send(&socket, &[0xee; 1000], &[], 0);
        });
        let held = std::sync::Mutex::new(std::collections::VecDeque::new());
        strangers.flood(move |socket| {
            let mut held = held.lock().unwrap();
            held.push_back(socket);
            if held.len() > 100 {
                held.pop_front();
            }
        });
    });
}

/// A listener creates no memory for clients that have only sent a Hello, for any size of the common
/// segment.
#[test]
fn clients_that_only_send_a_hello_cost_no_memory() {
    let _alone = alone();
    let config = ShmConfig { common_len: 64 << 20, ..config() };
    let near = rail(config);
    let name = name();
    let listener = Listener::bind(&name).unwrap();
    let before = held();
    let mut strangers: Vec<_> =
        (0..32).map(|_| Raw::new(knock(&name, 0).unwrap(), &self::config())).collect();
    let profile = near.profile();
    let deadline = || Instant::now() + Duration::from_millis(20);
    assert_eq!(listener.accept(&profile, deadline()).map(drop), Err(HandshakeError::Deadline));
    for (i, raw) in strangers.iter_mut().enumerate() {
        raw.hello([i as u8 + 1; 16]);
    }
    assert_eq!(listener.accept(&profile, deadline()).map(drop), Err(HandshakeError::Deadline));
    assert_eq!(held().1, before.1, "mappings");
    assert_eq!(listener.refused(), []);
    drop(listener);
    drop(strangers);
    assert_eq!(held().0, before.0 - 1, "only the listener itself has gone");
}

/// More clients connect than the kernel queues, and no call accepts them for a while.
#[test]
fn a_full_backlog_delays_and_does_not_refuse() {
    let _alone = alone();
    let (near, far) = (rail(config()), rail(config()));
    let name = name();
    let listener = Listener::bind(&name).unwrap();
    let held: Vec<_> = std::iter::from_fn(|| knock(&name, libc::SOCK_NONBLOCK)).collect();
    assert!(held.len() > 64);
    let quick = Instant::now() + Duration::from_millis(20);
    assert_eq!(connect(&name, &far.profile(), quick).map(drop), Err(HandshakeError::Deadline));
    let profile = far.profile();
    thread::scope(|scope| {
        let there = scope.spawn(|| connect(&name, &profile, soon()).map(|link| link.nonces()[1]));
        let here = listener.accept(&near.profile(), soon()).map(|link| link.nonces()[0]);
        assert_eq!(Ok(there.join().unwrap().unwrap()), here);
    });
}

/// A listener without room hangs up, and the client connects again.
#[test]
fn a_client_whose_connection_is_closed_tries_again() {
    let _alone = alone();
    let (near, far) = (rail(config()), rail(config()));
    let name = name();
    let listener = listen(&name);
    let accept = || listener.accept();
    let profile = far.profile();
    thread::scope(|scope| {
        let there = scope.spawn(|| connect(&name, &profile, soon()).map(|link| link.nonces()[1]));
        drop(accept());
        let raw = Raw::new(accept(), &config());
        assert!(!raw.recv().is_empty(), "its Hello");
        drop(raw);
        let here = Link::over(accept(), Role::First, &near.profile(), soon());
        assert_eq!(here.map(|link| link.nonces()[0]), there.join().unwrap());
    });
}

#[test]
fn a_handshake_continues_in_the_next_call() {
    let _alone = alone();
    let near = rail(config());
    let name = name();
    let listener = Listener::bind(&name).unwrap();
    let mut raw = Raw::new(knock(&name, 0).unwrap(), &config());
    let profile = near.profile();
    let looks = || listener.accept(&profile, Instant::now());
    assert_eq!(looks().map(drop), Err(HandshakeError::Deadline));
    raw.hello([7; 16]);
    assert_eq!(looks().map(drop), Err(HandshakeError::Deadline));
    thread::scope(|scope| {
        let here = scope.spawn(|| listener.accept(&profile, soon()).map(|link| link.nonces()[1]));
        raw.offer();
        raw.ready();
        assert_eq!(here.join().unwrap(), Ok([7; 16]));
    });
    assert_eq!(listener.refused(), []);
    // A call with another rail's profile drops unfinished handshakes.
    let mut raw = Raw::new(knock(&name, 0).unwrap(), &config());
    assert_eq!(looks().map(drop), Err(HandshakeError::Deadline));
    raw.hello([7; 16]);
    let other = rail(config());
    let other = listener.accept(&other.profile(), Instant::now()).map(drop);
    assert_eq!(other, Err(HandshakeError::Deadline));
    // SAFETY: the buffer is a local byte. The call fails with `EAGAIN` on an open connection, and
    // returns 0 on a closed one.
    let n = unsafe {
        libc::recv(raw.socket.as_raw_fd(), [0u8].as_mut_ptr().cast(), 1, libc::MSG_DONTWAIT)
    };
    assert_eq!(n, 0, "hung up");
}
