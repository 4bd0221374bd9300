//! The handshake and its failures: typed errors within the deadline, and no leaks.
//!
//! The raw peer implements the protocol byte by byte, without the crate. So these tests check the
//! layout too.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use fishplate_core::error::{AttachError, PeerError};
use fishplate_core::rail::Rail;
use fishplate_shm::{
    HandshakeError, Link, Listener, Role, Segment, SegmentError, ShmConfig, Users, connect,
    socket_pair,
};

#[path = "support/raw.rs"]
mod raw;
mod support;
use raw::{HELLO, OFFER, READY, SEALS, VERSION, packet};
use support::asleep::{this_thread, until_asleep};
use support::*;

const CELLS: u32 = 64;
const LANE: usize = 4096 + CELLS as usize * 64;
/// Offset of the nonce in a Hello.
const NONCE: usize = 52;

fn config() -> ShmConfig {
    ShmConfig { lane_cells: CELLS, max_message: 1024, ..ShmConfig::default() }
}

/// A peer that does not use this crate.
struct Raw {
    fd: OwnedFd,
    theirs: [u8; 16],
    ours: [u8; 16],
}

impl Raw {
    /// Ignores errors, because the other side may have hung up.
    fn send(&self, bytes: &[u8], fds: &[i32]) {
        raw::send(&self.fd, bytes, fds, 0);
    }

    /// Receives a packet without room for descriptors, so the kernel closes them.
    fn recv(&self) -> Vec<u8> {
        let mut bytes = vec![0; 70_000];
        // SAFETY: the pointer and the length describe `bytes`.
        let n =
            unsafe { libc::recv(self.fd.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        bytes.truncate(n.max(0) as usize);
        bytes
    }

    /// Receives the victim's Hello, and returns it with the other role and another nonce.
    fn hello(&mut self) -> Vec<u8> {
        let mut hello = self.recv();
        assert_eq!(hello.len(), NONCE + 16);
        assert_eq!(hello[..16], packet(HELLO, &[0; NONCE])[..16]);
        self.theirs.copy_from_slice(&hello[NONCE..]);
        hello[16] = 3 - hello[16];
        for byte in &mut hello[NONCE..] {
            *byte = !*byte;
        }
        self.ours.copy_from_slice(&hello[NONCE..]);
        hello
    }

    /// Performs the handshake up to the victim's Offer.
    fn greet(&mut self) {
        let hello = self.hello();
        self.send(&hello, &[]);
        assert_eq!(self.recv()[..12], packet(OFFER, &[])[..12]);
    }

    /// Sends a correct Offer with these descriptors.
    fn offer(&mut self, fds: &[&OwnedFd]) {
        let fds: Vec<i32> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
        self.send(&packet(OFFER, &self.theirs), &fds);
    }

    /// Creates a lane segment for this handshake. `spoil` changes its header before it is sealed.
    fn lane(&self, spoil: impl FnOnce(&mut [u8])) -> OwnedFd {
        let mut head = vec![0; 4096];
        head[..8].copy_from_slice(b"fishplat");
        let sizes = u64::from(VERSION) << 48 | 64 << 32 | u64::from(CELLS);
        head[8..16].copy_from_slice(&sizes.to_ne_bytes());
        head[16..32].copy_from_slice(&self.ours);
        head[32..48].copy_from_slice(&self.theirs);
        spoil(&mut head);
        memory(LANE, &head, SEALS)
    }
}

/// Creates a memfd with this size, content and seals.
fn memory(len: usize, content: &[u8], seals: i32) -> OwnedFd {
    let file = File::from(raw::memory(len, 0, seals));
    file.write_all_at(content, 0).unwrap();
    file.into()
}

fn event_page() -> OwnedFd {
    memory(4096, &[], SEALS)
}

const SOON: Duration = Duration::from_secs(20);

/// Performs a handshake against a raw peer that runs `script`, with `patience` as the deadline.
/// Checks that no descriptor or mapping is left.
fn against(
    patience: Duration,
    script: impl FnOnce(&mut Raw) + Send + 'static,
) -> Result<Link, HandshakeError> {
    let rail = rail(config());
    let profile = rail.profile();
    let before = held();
    let (x, y) = socket_pair().unwrap();
    let peer = thread::spawn(move || {
        let mut raw = Raw { fd: y, theirs: [0; 16], ours: [0; 16] };
        script(&mut raw);
        raw
    });
    let began = Instant::now();
    let result = Link::over(x, Role::Second, &profile, began + patience);
    assert!(began.elapsed() < patience + SOON, "past its deadline");
    drop(peer.join().unwrap());
    if result.is_err() {
        nothing_left(before, "a handshake that failed");
    }
    result
}

#[track_caller]
fn refused(want: HandshakeError, script: impl FnOnce(&mut Raw) + Send + 'static) {
    // All other errors are found before the deadline, even on a busy machine.
    let patience = if want == HandshakeError::Deadline { Duration::from_millis(300) } else { SOON };
    assert_eq!(against(patience, script).map(|_| "a link"), Err(want));
}

#[test]
fn a_correct_raw_peer_connects() {
    let _alone = alone();
    let link = against(SOON, |raw| {
        raw.greet();
        raw.offer(&[&raw.lane(|_| ()), &event_page()]);
        raw.send(&packet(READY, &raw.theirs), &[]);
        assert_eq!(raw.recv(), packet(READY, &raw.ours));
    });
    let link = link.unwrap();
    assert_eq!(link.pid(), std::process::id() as i32);
    assert_eq!(link.nonces()[0].map(|byte| !byte), link.nonces()[1]);
    assert!(link.common().is_none());
}

#[test]
fn hanging_up_at_any_step_is_detected() {
    let _alone = alone();
    let gone = HandshakeError::HungUp;
    let bye = |raw: &Raw| {
        // SAFETY: the call takes only numbers, and the descriptor is ours.
        unsafe { libc::shutdown(raw.fd.as_raw_fd(), libc::SHUT_RDWR) };
    };
    refused(gone, move |raw| bye(raw));
    refused(gone, move |raw| {
        raw.hello();
        bye(raw);
    });
    refused(gone, move |raw| {
        raw.greet();
        bye(raw);
    });
    refused(gone, move |raw| {
        raw.greet();
        raw.offer(&[&raw.lane(|_| ()), &event_page()]);
        raw.recv();
        bye(raw);
    });
}

#[test]
fn silence_at_any_step_ends_at_the_deadline() {
    let _alone = alone();
    let late = HandshakeError::Deadline;
    refused(late, |_| ());
    refused(late, |raw| drop(raw.hello()));
    refused(late, |raw| raw.greet());
    refused(late, |raw| {
        raw.greet();
        raw.offer(&[&raw.lane(|_| ()), &event_page()]);
    });
}

#[test]
fn garbage_at_any_step_is_refused() {
    let _alone = alone();
    let bad = HandshakeError::BadPacket;
    refused(bad, |raw| raw.send(&[0xee; 60_000], &[]));
    refused(bad, |raw| raw.send(&[0xee; 68_000], &[]));
    refused(bad, |raw| raw.send(b"f", &[]));
    refused(bad, |raw| raw.send(&packet(HELLO, &[0; 7]), &[]));
    refused(bad, |raw| raw.send(&packet(99, &[]), &[]));
    refused(bad, |raw| raw.send(&packet(READY, &[0; 16]), &[]));
    // In turn: a wrong length, an extra byte, the same role, the same nonce, an unknown flag.
    for spoil in [
        |hello: &mut Vec<u8>| hello[12] += 1,
        |hello: &mut Vec<u8>| {
            hello.push(0);
            hello[12] += 1;
        },
        |hello: &mut Vec<u8>| hello[16] = 3 - hello[16],
        |hello: &mut Vec<u8>| hello[NONCE..].iter_mut().for_each(|byte| *byte = !*byte),
        |hello: &mut Vec<u8>| hello[17] = 2,
    ] {
        refused(bad, move |raw| {
            let mut hello = raw.hello();
            spoil(&mut hello);
            raw.send(&hello, &[]);
        });
    }
    refused(bad, |raw| {
        raw.greet();
        raw.offer(&[&raw.lane(|_| ()), &event_page()]);
        raw.send(&[1; 100], &[]);
    });
}

#[test]
fn another_version_is_named() {
    let _alone = alone();
    refused(HandshakeError::Version { theirs: 7, ours: VERSION }, |raw| {
        let mut hello = raw.hello();
        hello[8..10].copy_from_slice(&7u16.to_ne_bytes());
        hello[16..].fill(0xff);
        hello.truncate(40);
        raw.send(&hello, &[]);
    });
}

#[test]
fn different_sizes_are_named() {
    let _alone = alone();
    for (at, what, ours) in
        [(20, "cell size", 64), (24, "lane cells", 64), (28, "max message", 1024)]
    {
        refused(HandshakeError::Mismatch { what, theirs: ours + 1, ours }, move |raw| {
            let mut hello = raw.hello();
            hello[at] += 1;
            raw.send(&hello, &[]);
        });
    }
    refused(HandshakeError::Mismatch { what: "common length", theirs: 4096, ours: 0 }, |raw| {
        let mut hello = raw.hello();
        hello[37] = 16;
        raw.send(&hello, &[]);
    });
}

/// B9: an answer that does not echo our new nonce does not come from the peer of this handshake.
#[test]
fn b9_a_wrong_echo_and_a_stale_segment_are_refused() {
    let _alone = alone();
    refused(HandshakeError::Nonce, |raw| {
        raw.greet();
        let (lane, wait_object) = (raw.lane(|_| ()), event_page());
        raw.send(&packet(OFFER, &[5; 16]), &[lane.as_raw_fd(), wait_object.as_raw_fd()]);
    });
    refused(HandshakeError::Nonce, |raw| {
        raw.greet();
        raw.offer(&[&raw.lane(|_| ()), &event_page()]);
        raw.send(&packet(READY, &raw.ours), &[]);
    });
    // Spoils in turn: the creator's nonce, the peer's nonce, the magic number, and the sizes.
    for byte in [16, 32, 0, 8] {
        refused(HandshakeError::Segment(SegmentError::Foreign), move |raw| {
            raw.greet();
            raw.offer(&[&raw.lane(|head| head[byte] ^= 1), &event_page()]);
        });
    }
}

/// B10, B20: descriptors that must not be mapped are refused, and all received descriptors are
/// closed.
#[test]
fn b10_b20_wrong_descriptors_are_refused_and_closed() {
    let _alone = alone();
    let bad = HandshakeError::BadPacket;
    refused(bad, |raw| {
        raw.greet();
        raw.offer(&[]);
    });
    refused(bad, |raw| {
        raw.greet();
        raw.offer(&[&raw.lane(|_| ())]);
    });
    refused(bad, |raw| {
        raw.greet();
        let wait_object = event_page();
        raw.offer(&[
            &raw.lane(|_| ()),
            &wait_object,
            &wait_object,
            &wait_object,
            &wait_object,
            &wait_object,
        ]);
    });
    refused(bad, |raw| {
        let hello = raw.hello();
        let wait_object = event_page();
        raw.send(&hello, &[wait_object.as_raw_fd(); 100]);
    });
    // The packet is longer than any valid one. Its descriptors are closed too.
    refused(bad, |raw| {
        let wait_object = event_page();
        raw.send(&[0xee; 70_000], &[wait_object.as_raw_fd(); 3]);
    });
    let segment = HandshakeError::Segment;
    refused(segment(SegmentError::Unsealed), |raw| {
        raw.greet();
        raw.offer(&[&memory(LANE, &[], libc::F_SEAL_GROW), &event_page()]);
    });
    refused(segment(SegmentError::Unsealed), |raw| {
        raw.greet();
        raw.offer(&[&raw.lane(|_| ()), &memory(4096, &[], libc::F_SEAL_SHRINK)]);
    });
    refused(segment(SegmentError::Size { actual: 4096, expected: LANE as u64 }), |raw| {
        raw.greet();
        raw.offer(&[&event_page(), &event_page()]);
    });
    refused(segment(SegmentError::Unsealed), |raw| {
        raw.greet();
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        raw.offer(&[&file.into(), &event_page()]);
    });
}

#[test]
fn a_user_who_is_not_listed_is_refused() {
    let _alone = alone();
    // SAFETY: the call has no arguments and cannot fail.
    let me = unsafe { libc::geteuid() };
    for (users, admitted) in [(vec![me + 1], false), (vec![], false), (vec![me + 1, me], true)] {
        let picky = rail(ShmConfig { users: Users::Listed(users), ..config() });
        let plain = rail(config());
        let (x, y) = socket_pair().unwrap();
        let profile = plain.profile();
        let other = thread::spawn(move || Link::over(y, Role::First, &profile, soon()).map(drop));
        let link = Link::over(x, Role::Second, &picky.profile(), soon()).map(drop);
        assert_eq!(link, if admitted { Ok(()) } else { Err(HandshakeError::User(me)) });
        assert_eq!(
            other.join().unwrap(),
            if admitted { Ok(()) } else { Err(HandshakeError::HungUp) }
        );
    }
}

/// B19: a path that exists belongs to another program and is kept. Our own path is removed.
#[test]
fn b19_a_path_in_use_is_left_alone() {
    let _alone = alone();
    let path = std::env::temp_dir().join(format!("fishplate-{}.sock", std::process::id()));
    let listener = Listener::bind(&path).unwrap();
    assert_eq!(Listener::bind(&path).map(drop), Err(HandshakeError::InUse));
    let (first, second) = (rail(config()), rail(config()));
    let profile = first.profile();
    let there = path.clone();
    let connecting = thread::spawn(move || connect(&there, &profile, soon()).map(drop));
    listener.accept(&second.profile(), soon()).unwrap();
    connecting.join().unwrap().unwrap();
    drop(listener);
    assert!(!path.exists());

    std::fs::write(&path, b"somebody's").unwrap();
    assert_eq!(Listener::bind(&path).map(drop), Err(HandshakeError::InUse));
    assert_eq!(std::fs::read(&path).unwrap(), b"somebody's");
    std::fs::remove_file(&path).unwrap();
    let listener = Listener::bind(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, b"somebody else's").unwrap();
    drop(listener);
    assert!(path.exists(), "not the file that the listener made");
    std::fs::remove_file(&path).unwrap();

    let name = name();
    let _named = Listener::bind(&name).unwrap();
    assert_eq!(Listener::bind(&name).map(drop), Err(HandshakeError::InUse));
    for address in ["", "@", "a\0b", &"x".repeat(108), &format!("@{}", "x".repeat(108))] {
        assert_eq!(Listener::bind(address).map(drop), Err(HandshakeError::Address));
    }
}

#[test]
fn a_listener_survives_failed_peers_and_clients_wait_for_it() {
    let _alone = alone();
    let address = name();
    let mut near = rail(config());
    assert_eq!(
        connect(&address, &near.profile(), Instant::now() + Duration::from_millis(50)).map(drop),
        Err(HandshakeError::System(libc::ECONNREFUSED))
    );
    let far = rail(config());
    let profile = far.profile();
    let there = address.clone();
    let (begins, began) = mpsc::channel();
    let connecting = thread::spawn(move || {
        begins.send(this_thread()).unwrap();
        connect(&there, &profile, soon())
    });
    // The first attempt to connect was refused, because no listener exists yet.
    until_asleep(began.recv().unwrap());
    let listener = Listener::bind(&address).unwrap();
    let link = listener.accept(&near.profile(), soon()).unwrap();
    let other = connecting.join().unwrap().unwrap();
    assert_eq!(link.nonces(), [other.nonces()[1], other.nonces()[0]]);
    near.attach(PEER, link).unwrap();
    // Dropping a link without attaching it hangs up too.
    drop(other);
    let mut seen = Seen::default();
    near.check_peers(&mut seen);
    assert_eq!(seen.down, [(PEER, PeerError::Closed)]);
    let quick = || Instant::now() + Duration::from_millis(30);
    assert_eq!(listener.accept(&near.profile(), quick()).map(drop), Err(HandshakeError::Deadline));
}

/// Returns the descriptors that a child process would inherit.
fn inherited() -> Vec<i32> {
    // SAFETY: the call takes only numbers. It fails if the descriptor does not exist.
    let flags = |fd| unsafe { libc::fcntl(fd, libc::F_GETFD) };
    (0..1000).filter(|fd| flags(*fd) >= 0 && flags(*fd) & libc::FD_CLOEXEC == 0).collect()
}

/// B20: peers that connect and leave again leak nothing. All descriptors close on exec.
#[test]
fn b20_a_thousand_peers_come_and_go_and_leave_nothing() {
    let _alone = alone();
    let ours = inherited();
    let config = ShmConfig { common_len: 8192, ..config() };
    let mut near = rail(config.clone());
    let segment = Segment::create(8192).unwrap();
    // SAFETY: the segment outlives the rail.
    let region = unsafe { segment.region(0, 8192) }.unwrap();
    let (key, _) = near.register(&region).unwrap();
    let mut far = rail(config);
    let before = held();
    for round in 0..1000 {
        let [second, first] = meet(&near, &far, socket_pair().unwrap());
        near.attach(PEER, second).unwrap();
        far.attach(PEER, first).unwrap();
        far.import(PEER, key, 8192).unwrap().unwrap();
        if round == 0 {
            assert!(held().0 > before.0 && held().1 > before.1);
            assert_eq!(inherited(), ours);
        }
        if round % 3 == 0 {
            far.release(PEER, key);
        }
        near.detach(PEER);
        far.detach(PEER);
        nothing_left(before, &format!("round {round}"));
    }
}

/// Takes all free descriptors of this process while it exists.
struct Exhausted {
    _limited: Limited,
    _filled: Vec<OwnedFd>,
}

impl Exhausted {
    fn new() -> Self {
        let open = std::fs::read_dir("/proc/self/fd").unwrap();
        let highest = open
            .map(|fd| fd.unwrap().file_name().to_str().unwrap().parse().unwrap())
            .max()
            .unwrap();
        let limited = Limited::to(highest);
        let any = std::io::stdin();
        let filled =
            std::iter::from_fn(|| std::os::fd::AsFd::as_fd(&any).try_clone_to_owned().ok())
                .collect();
        Exhausted { _limited: limited, _filled: filled }
    }
}

#[test]
fn lack_of_descriptors_is_not_blamed_on_the_peer() {
    let _alone = alone();
    let victim = this_thread();
    refused(HandshakeError::System(libc::EMFILE), move |raw| {
        raw.greet();
        let (lane, wait_object) = (raw.lane(|_| ()), event_page());
        // The victim has closed the descriptors that it needed to send its Offer.
        until_asleep(victim);
        let _exhausted = Exhausted::new();
        raw.offer(&[&lane, &wait_object]);
        assert_eq!(raw.recv(), [], "hung up");
    });

    let config = ShmConfig { timeout: Duration::ZERO, ..config() };
    let (mut near, mut far) = (rail(config.clone()), rail(config));
    let [to_far, to_near] = meet(&near, &far, socket_pair().unwrap());
    near.attach(PEER, to_far).unwrap();
    far.attach(PEER, to_near).unwrap();
    let segments = [(); 2].map(|()| Segment::create(4096).unwrap());
    // SAFETY: the segments outlive the rails.
    let regions = segments.each_ref().map(|segment| unsafe { segment.region(0, 64) }.unwrap());
    far.register(&regions[0]).unwrap();
    let mut seen = Seen::default();
    let exhausted = Exhausted::new();
    near.check_peers(&mut seen);
    let (key, _) = far.register(&regions[1]).unwrap();
    let refused = near.import(PEER, key, 64);
    drop(exhausted);
    assert_eq!(refused, Err(AttachError::System(libc::EMFILE)));
    near.check_peers(&mut seen);
    assert_eq!(seen.down, []);
    assert!(near.import(PEER, key, 64).unwrap().is_some(), "once descriptors are free again");
}
