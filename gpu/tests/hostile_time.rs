//! Checks that no pass over the links takes long, whatever a peer sends about device memory.
//!
//! The hostile peer is a thread that plays one trick over a socket pair. A trick counts as slow if
//! it delays a pass in most attempts.

use std::os::fd::OwnedFd;
use std::thread;

use fishplate_gpu::{HostDevice, ImportLimits, Sharing, prepare};
use fishplate_shm::{Link, Role, ShmConfig, set_closer, socket_pair};

#[path = "../../shm/tests/hostile_time/meter.rs"]
mod meter;
#[path = "../../shm/tests/support/raw.rs"]
mod raw;
mod support;
#[allow(dead_code, reason = "one of the functions is used here")]
#[path = "../../shm/tests/hostile_time/tricks.rs"]
mod tricks;

use meter::{LIMIT, Meter, repeat};
use raw::{Raw, SEALS, memory, packet};
use support::{rail, soon};
use tricks::lingering;

const EXPORT: u16 = 0x100;
const FETCH: u16 = 0x101;
const PUBLISH: u16 = 0x103;
const QUERY: u16 = 0x104;
const REVOKE: u16 = 0x106;

fn say(raw: &Raw, kind: u16, words: &[u64], fds: &[&OwnedFd]) -> bool {
    let body: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    raw.send(&packet(kind, &body), fds)
}

/// Sends an export of allocation `n` with any descriptor.
fn export(raw: &Raw, n: u64, fd: &OwnedFd) -> bool {
    say(raw, EXPORT, &[n, 4096, 1, 1, 2], &[fd])
}

/// The name of a trick, whether the trick ends the link, and the function that plays it.
type Trick = (&'static str, bool, fn(&Raw));

const TRICKS: &[Trick] = &[
    ("a flood of questions after allocations", false, |raw| {
        let _all_sent = (1..2000).all(|n| say(raw, FETCH, &[n], &[]));
    }),
    ("a flood of buffers", true, |raw| {
        let _all_sent = (1..10_000).all(|n| say(raw, PUBLISH, &[n, 1, 1, 0, 8], &[]));
    }),
    ("a flood of questions after buffers", true, |raw| {
        let _all_sent = (1..2000).all(|n| say(raw, QUERY, &[n, 0, 1], &[]));
    }),
    ("a flood of revocations", false, |raw| {
        let _all_sent = (1..2000).all(|n| say(raw, REVOKE, &[n, n], &[]));
    }),
    ("a flood of handles", false, |raw| {
        let fd = memory(4096, 0, SEALS);
        let _all_sent = (1..2000).all(|n| export(raw, n, &fd));
    }),
    ("handles that are slow to close", false, |raw| {
        let _all_sent = (1..100).all(|n| export(raw, n, &lingering()));
    }),
    ("descriptors with a question", true, |raw| {
        say(raw, FETCH, &[1], &[&lingering(), &lingering()]);
    }),
];

#[test]
fn no_trick_makes_a_pass_take_long() {
    // Descriptors that are slow to close stay open until this process exits.
    set_closer(|| {});
    for (name, given_up, play) in TRICKS {
        let longest = repeat(|| {
            let (ours, theirs) = socket_pair().unwrap();
            let config = ShmConfig::default();
            let rail = rail(config.clone());
            let trick = thread::spawn(move || {
                let mut raw = Raw::new(theirs, &config);
                raw.meet();
                play(&raw);
                raw.socket
            });
            let mut link = Link::over(ours, Role::First, &rail.profile(), soon()).unwrap();
            prepare(&mut link);
            let mut links = [Some(link)];
            let mut sharing = Sharing::new(HostDevice::new(), ImportLimits::default());
            let mut meter = Meter::new();
            let mut ended = None;
            let mut pass = || {
                meter.call("a pass", || sharing.turn(&mut links[..]));
                ended = ended.or(links[0].as_mut().and_then(|link| link.line().ended()));
                if ended.is_some() {
                    // After the link is dropped, a peer that still sends gets an error.
                    meter.call("the end", || links[0] = None);
                }
            };
            while !trick.is_finished() {
                pass();
            }
            (0..100).for_each(|_| pass());
            drop(trick.join().unwrap());
            assert_eq!(ended.is_some(), *given_up, "{name}: {ended:?}");
            meter.longest
        });
        assert!(longest.0 <= LIMIT, "{name}: {longest:?}");
    }
}
