use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use fishplate_core::error::AttachError;
use fishplate_core::rail::Rail;

use super::*;
use crate::ShmConfig;
use crate::testing::{PEER, Seen, TestRail, couple};

fn control(rail: &mut TestRail) -> &mut Control {
    &mut rail.remote(PEER).unwrap().control
}

fn withdraw(number: u32) -> Vec<u8> {
    let mut packet = Writer::new(PacketKind::Withdraw);
    packet.put(number.to_ne_bytes());
    packet.finish()
}

/// B23: segments are freed if they are withdrawn while the peer is stopped or does not read.
#[test]
fn b23_segments_that_come_and_go_are_not_kept_for_a_peer_that_does_not_read() {
    let [mut a, mut b] = couple(ShmConfig::default());
    let mut numbers = Vec::new();
    for _ in 0..1000 {
        let segment = Segment::create(4096).unwrap();
        // SAFETY: nothing accesses the memory.
        let region = unsafe { segment.region(0, 64) }.unwrap();
        let (key, _) = a.register(&region).unwrap();
        a.deregister(key).unwrap();
        numbers.push(segment.number());
    }
    let kept = numbers.iter().filter(|number| Segment::find(**number).is_some()).count();
    assert_eq!(kept, 0);
    let waiting = control(&mut a).notices.len();
    assert!(waiting <= 2, "{waiting} notices wait");
    // When the peer reads again, the remaining packets are consistent.
    let segment = Segment::create(4096).unwrap();
    // SAFETY: the segment outlives the rails, and nothing accesses the memory.
    let region = unsafe { segment.region(0, 64) }.unwrap();
    let (key, _) = a.register(&region).unwrap();
    let mut seen = [Seen::default(), Seen::default()];
    for _ in 0..100 {
        b.check_peers(&mut seen[1]);
        a.check_peers(&mut seen[0]);
    }
    assert!(b.import(PEER, key, 64).unwrap().is_some());
    assert!(seen.iter().all(|seen| seen.down.is_empty()));
}

#[test]
fn two_ends_that_have_more_to_say_than_the_socket_holds_still_exchange() {
    let rails = couple(ShmConfig::default()).map(|mut rail| {
        (0..1000).for_each(|number| control(&mut rail).withdraw(number));
        assert!(control(&mut rail).has_notices(), "the socket is full");
        rail
    });
    let deadline = Instant::now() + Duration::from_secs(20);
    let [a, b] =
        rails.map(|mut rail| std::thread::spawn(move || rail.exchange(PEER, b"here", deadline)));
    for end in [a, b] {
        assert_eq!(end.join().unwrap().as_deref(), Ok(&b"here"[..]));
    }
}

#[test]
fn what_a_peer_said_before_it_left_is_heard_though_it_did_not_read_everything() {
    let [mut a, mut b] = couple(ShmConfig::default());
    let (a, b) = (control(&mut a), control(&mut b));
    b.send_blob(b"never read").unwrap();
    a.send_blob(b"last words").unwrap();
    a.socket.try_send(&Writer::new(PacketKind::Bye).finish(), &[]).unwrap();
    // Closes the socket without reading, like the kernel when a process exits.
    let (other, _) = crate::socket::socket_pair().unwrap();
    // SAFETY: the call takes no pointers. It replaces the socket behind the descriptor of `a`, and
    // `a` still owns that descriptor.
    assert!(unsafe { libc::dup2(other.as_raw_fd(), a.fd().as_raw_fd()) } >= 0);
    assert_eq!(b.take_blob().unwrap().as_deref(), Some(&b"last words"[..]));
    assert_eq!(b.ended(), Some(PeerError::Closed));
}

fn received(rail: &mut TestRail, into: &mut [u8]) -> Option<Packet> {
    control(rail).socket.try_recv(into, Senders::Unnamed, |_| 0).unwrap()
}

#[test]
fn a_peer_that_talks_without_end_keeps_nobody_beyond_his_deadline() {
    let [mut a, mut b] = couple(ShmConfig::default());
    for _ in 0..2 * PASS + 2 {
        control(&mut b).socket.try_send(&withdraw(7), &[]).unwrap();
    }
    let now = Instant::now();
    assert_eq!(control(&mut a).exchange(b"", now), Err(HandshakeError::Deadline));
    assert_eq!(control(&mut a).import(7, 0, 1, now), Err(HandshakeError::Deadline));
    let mut packet = [0; 64];
    let mut left = 0;
    while let Some(packet) = received(&mut a, &mut packet) {
        assert_eq!(packet.len, 20);
        left += 1;
    }
    assert_eq!(left, 2, "of what came, each call took in one pass");
}

#[test]
fn a_peer_that_reads_and_talks_without_end_keeps_nobody_beyond_his_deadline() {
    let [mut a, mut b] = couple(ShmConfig::default());
    (0..1000).for_each(|number| control(&mut a).withdraw(number));
    assert!(control(&mut a).has_notices(), "the socket is full");
    for _ in 0..2 * PASS + 2 {
        control(&mut b).socket.try_send(&withdraw(7), &[]).unwrap();
    }
    assert_eq!(control(&mut a).exchange(b"", Instant::now()), Err(HandshakeError::Deadline));
    let mut left = 0;
    while received(&mut a, &mut [0; 64]).is_some() {
        left += 1;
    }
    assert_eq!(left, PASS + 2, "of what came, one pass was taken in");
}

#[test]
fn nothing_is_awaited_of_a_peer_that_has_ended() {
    let [mut a, b] = couple(ShmConfig::default());
    drop(b);
    let deadline = Instant::now() + Duration::from_secs(40);
    assert_eq!(control(&mut a).import(7, 0, 1, deadline), Err(HandshakeError::HungUp));
    assert_eq!(control(&mut a).import(7, 0, 1, deadline), Err(HandshakeError::HungUp));
    assert!(Instant::now() < deadline - Duration::from_secs(20));
}

#[test]
fn a_peer_whose_segments_are_withdrawn_while_we_use_them_may_announce_others() {
    let config = ShmConfig { max_segments: 2, ..ShmConfig::default() };
    let [mut a, mut b] = couple(config);
    let mut seen = Seen::default();
    for _ in 0..3 {
        let segments = [(); 2].map(|()| Segment::create(4096).unwrap());
        // SAFETY: nothing accesses the memory.
        let keys = segments
            .each_ref()
            .map(|s| a.register(&unsafe { s.region(0, 64) }.unwrap()).unwrap().0);
        for key in keys {
            assert!(b.import(PEER, key, 64).unwrap().is_some());
            a.deregister(key).unwrap();
        }
        b.check_peers(&mut seen);
        assert_eq!(seen.down, []);
    }
}

#[test]
fn more_segments_than_a_peer_takes_are_refused_here_and_cost_no_link() {
    let config = ShmConfig { max_segments: 2, ..ShmConfig::default() };
    let [mut a, mut b] = couple(config);
    let segments = [(); 3].map(|()| Segment::create(4096).unwrap());
    // SAFETY: nothing accesses the memory.
    let regions = segments.each_ref().map(|s| unsafe { s.region(0, 64) }.unwrap());
    let first = a.register(&regions[0]).unwrap().0;
    a.register(&regions[1]).unwrap();
    assert_eq!(a.register(&regions[2]), Err(AttachError::Full("ShmConfig::max_segments")));
    a.register(&regions[1]).expect("another region of a segment that is known");
    a.deregister(first).unwrap();
    a.register(&regions[2]).unwrap();
    let mut seen = Seen::default();
    b.check_peers(&mut seen);
    assert_eq!(seen.down, []);
}

#[test]
fn an_import_may_wait_for_ever() {
    let [mut a, mut b] = couple(ShmConfig { timeout: Duration::MAX, ..ShmConfig::default() });
    let segment = Segment::create(4096).unwrap();
    // SAFETY: the segment outlives the rails, and nothing accesses the memory.
    let region = unsafe { segment.region(0, 64) }.unwrap();
    let (key, _) = a.register(&region).unwrap();
    assert!(b.import(PEER, key, 64).unwrap().is_some());
}

/// A peer that sends a Bye is reported as closed, no matter how many packets precede the Bye.
#[test]
fn a_good_bye_behind_many_packets_is_heard_before_a_process_is_called_dead() {
    let [mut a, mut b] = couple(ShmConfig::default());
    for _ in 0..PASS + 1 {
        control(&mut b).socket.try_send(&withdraw(7), &[]).unwrap();
    }
    drop(b);
    // `/dev/zero` is always readable, like the pidfd of a dead process.
    a.remote(PEER).unwrap().pidfd = Some(std::fs::File::open("/dev/zero").unwrap().into());
    let mut seen = Seen::default();
    for _ in 0..3 {
        a.check_peers(&mut seen);
    }
    assert_eq!(seen.down, [(PEER, PeerError::Closed)]);
}

/// An extension that records its packets, and takes up to `takes` descriptors of each.
#[derive(Debug, Default)]
struct Heard {
    packets: Vec<(u16, Vec<u8>, usize)>,
    takes: usize,
}

impl Extension for Heard {
    const KINDS: RangeInclusive<u16> = 0x200..=0x201;
    const SEGMENTS: u16 = 1;
    const DESCRIPTORS: usize = 3;

    fn new(_: bool) -> Self {
        Heard { takes: 2, ..Heard::default() }
    }

    fn take(&mut self, kind: u16, body: Reader<'_>, fds: &mut Batch) -> Result<(), HandshakeError> {
        self.packets.push((kind, body.rest().to_vec(), fds.by_ref().take(self.takes).count()));
        if body.rest() == b"no" { Err(HandshakeError::BadPacket) } else { Ok(()) }
    }
}

/// Descriptors of files that can be closed without waiting.
#[derive(Debug)]
struct Files(Vec<OwnedFd>);

impl Descriptors for Files {
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd).collect()
    }
}

fn say(rail: &mut TestRail, kind: u16, body: &[u8], fds: usize) {
    let mut packet = Writer::extension(kind);
    packet.extend(body);
    let files = Files((0..fds).map(|_| segment::create(4096).unwrap()).collect());
    rail.line(PEER).unwrap().tell(packet.finish(), Some(Arc::new(files)));
}

fn down(rail: &mut TestRail) -> Option<PeerError> {
    let mut seen = Seen::default();
    rail.check_peers(&mut seen);
    seen.down.first().map(|(_, why)| *why)
}

#[test]
fn an_extension_gets_packets_of_its_kinds_and_their_descriptors() {
    let [mut a, mut b] = couple(ShmConfig::default());
    b.line(PEER).unwrap().extension::<Heard>();
    say(&mut a, 0x200, b"one", 0);
    say(&mut a, 0x201, b"two", 2);
    assert_eq!(down(&mut b), None);
    let mut line = b.line(PEER).unwrap();
    let heard = line.extension::<Heard>();
    assert_eq!(heard.packets, [(0x200, b"one".to_vec(), 0), (0x201, b"two".to_vec(), 2)]);
}

#[test]
fn what_no_extension_takes_ends_the_link() {
    for (kind, body, fds, registered) in [
        (0x200, &b"one"[..], 0, false),
        (0x202, b"one", 0, true),
        (0x1ff, b"one", 0, true),
        (0x200, b"no", 0, true),
        (0x200, b"one", 3, true),
        (8, b"one", 0, true),
        (0xff, b"one", 0, true),
    ] {
        let [mut a, mut b] = couple(ShmConfig::default());
        if registered {
            b.line(PEER).unwrap().extension::<Heard>();
        }
        say(&mut a, kind, body, fds);
        let violation = Some(PeerError::Protocol(Violation::Kind));
        assert_eq!(down(&mut b), violation, "{kind:#x} {body:?} {fds} {registered}");
    }
}

#[test]
fn an_extension_may_announce_as_many_segments_as_it_says() {
    let config = ShmConfig { max_segments: 1, ..ShmConfig::default() };
    for (segments, registered, ends) in
        [(1, false, false), (2, false, true), (2, true, false), (3, true, true)]
    {
        let [mut a, mut b] = couple(config.clone());
        if registered {
            b.line(PEER).unwrap().extension::<Heard>();
        }
        for _ in 0..segments {
            a.line(PEER).unwrap().announce(Segment::create(4096).unwrap());
        }
        assert_eq!(down(&mut b).is_some(), ends, "{segments} segments, registered: {registered}");
    }
}
