//! The tricks that a hostile process plays after it has connected to its victim.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use crate::raw::*;

/// What happens to the link of the peer that plays a trick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The victim fails the peer for a protocol violation.
    Blamed,
    /// The victim fails the peer, because it died or closed the link, or because a copy failed.
    Gone,
    /// The victim does not fail the peer.
    Harmless,
    /// The victim may fail the peer for a protocol violation.
    Either,
    /// The victim fails the peer if a copy to or from the peer's memory fails.
    Unreachable,
}
use End::{Blamed, Either, Gone, Harmless, Unreachable};

/// The name of a trick, its outcome, and the function that plays it.
pub type Trick = (&'static str, End, fn(&mut Raw));

/// The key of the victim's private region. It is the first region, so its key is known.
pub const KEY: u64 = 1 << 60 | 1 << 48;
/// The size in bytes of the victim's region, and of the hostile peer's memory.
pub const SIZE: usize = 1 << 16;

/// The address of the hostile peer's private memory, and the number of its segment.
pub const AT: u64 = 1 << 40;
pub const SEGMENT: u32 = 5000;

/// Connects correctly, with memory for the victim to use.
pub fn lend(raw: &mut Raw) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: the flags keep the kernel from replacing another mapping.
    let at =
        unsafe { libc::mmap(AT as *mut _, SIZE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    assert_eq!(at as u64, AT);
    raw.meet();
    keep(segment(raw, SEGMENT, SIZE));
}

/// Changes the access rights of the memory that the victim uses.
fn protect(access: i32) {
    // SAFETY: `lend` mapped the memory, and nothing here refers to it.
    assert_eq!(unsafe { libc::mprotect(AT as *mut _, SIZE, access) }, 0);
}

const WRITE: u32 = 3;
const READ: u32 = 4;
const LAST: u64 = 1 << 32;

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Sends a chunk of 8 bytes of a staged write.
fn write(raw: &mut Raw, key: u64, offset: u64, id: u64) {
    raw.record(WRITE, 8, &words(&[key, offset, id, 0, 0, 0, 0]));
}

fn read(raw: &mut Raw, offset: u64, id: u64, len: u64) {
    raw.record(READ, 0, &words(&[KEY, offset, id, len, 0, 0]));
}

/// Returns the head of a message of the engine.
fn head(kind: u8, seq: u32, rest: &[u64]) -> Vec<u8> {
    let mut message = vec![kind, 0, 0, 0];
    message.extend(seq.to_le_bytes());
    message.extend([0; 8]);
    message.extend(rest.iter().flat_map(|word| word.to_le_bytes()));
    message
}

fn made(fd: i32) -> OwnedFd {
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: callers pass a descriptor that a call just returned, so nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Leaks a value, so that it exists until the process is killed.
fn keep<T>(thing: T) {
    std::mem::forget(thing);
}

/// Returns a TCP connection full of unread bytes. Closing the connection blocks for up to a minute.
pub fn lingering() -> OwnedFd {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // The kernel raises small buffers to its minimum.
    set(listener.as_raw_fd(), libc::SO_RCVBUF, 1);
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    keep(listener.accept().unwrap());
    set(stream.as_raw_fd(), libc::SO_SNDBUF, 1);
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 65536]).is_ok() {}
    set(stream.as_raw_fd(), libc::SO_LINGER, libc::linger { l_onoff: 1, l_linger: 60 });
    stream.into()
}

fn set<T>(socket: i32, option: i32, value: T) {
    let (value, len) = (&raw const value, size_of::<T>() as libc::socklen_t);
    // SAFETY: `value` lives during the call, and its size is passed with it.
    assert_eq!(unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, option, value.cast(), len) }, 0);
}

/// Announces a segment with this descriptor, and closes the descriptor.
fn announce_as_segment(raw: &mut Raw, fd: OwnedFd) {
    raw.send(&announce(1, 4096), &[&fd]);
}

/// Announces a segment of this size as `number`. Returns its descriptor.
fn segment(raw: &mut Raw, number: u32, len: usize) -> OwnedFd {
    let fd = memory(len, 0, SEALS);
    raw.send(&announce(number, len as u64), &[&fd]);
    fd
}

/// Sends a request to send with its payload in a segment.
fn request_from(raw: &mut Raw, segment: u32, size: u64) {
    raw.message(&request_to_send(0, 64, size, shared_key(0, segment), 0));
}

/// Waits until the victim has read all packets from the socket.
fn until_taken(raw: &Raw) {
    say(raw, &packet(BLOB, &[]));
    let mut unread = 1;
    while unread > 0 {
        std::thread::yield_now();
        let socket = raw.socket.as_raw_fd();
        // SAFETY: the call fills the local number.
        assert_eq!(unsafe { libc::ioctl(socket, libc::TIOCOUTQ, &raw mut unread) }, 0);
    }
}

/// Sends a packet without descriptors.
fn say(raw: &Raw, packet: &[u8]) {
    raw.send(packet, &[]);
}

fn flood(raw: &mut Raw, packets: &[Vec<u8>]) {
    for packet in packets.iter().cycle().take(2000) {
        if !raw.send(packet, &[]) {
            return;
        }
    }
}

/// Tells the test that the trick was played.
pub fn played() {
    // SAFETY: the pointer and the length describe a literal of one byte.
    unsafe { libc::write(0, b"p".as_ptr().cast(), 1) };
}

fn noise(seed: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(seed), |x| {
        let x = x ^ x << 13;
        let x = x ^ x >> 7;
        Some(x ^ x << 17)
    })
}

pub fn all() -> impl Iterator<Item = &'static Trick> {
    PACKETS.iter().chain(MEMORY)
}

/// The tricks with packets of the socket, and with the descriptors in them.
pub const PACKETS: &[Trick] = &[
    // Packets of the socket.
    ("noise in a packet", Blamed, |raw| say(raw, &[0xee; 100])),
    ("a packet of one byte", Blamed, |raw| say(raw, &[1])),
    ("a packet of nothing", Gone, |raw| say(raw, &[])),
    ("a packet too long", Blamed, |raw| say(raw, &[0xee; 70_000])),
    ("a second Hello", Blamed, |raw| say(raw, &packet(HELLO, &[0; 52]))),
    ("a second Offer", Blamed, |raw| say(raw, &packet(OFFER, &[0; 16]))),
    ("a second Ready", Blamed, |raw| say(raw, &packet(READY, &[0; 16]))),
    ("a packet of no kind", Blamed, |raw| say(raw, &packet(999, &[]))),
    ("a packet of another version", Blamed, |raw| {
        let mut bytes = packet(BYE, &[]);
        bytes[8] = 77;
        raw.send(&bytes, &[]);
    }),
    ("a packet that says it is longer", Blamed, |raw| {
        let mut bytes = packet(BYE, &[]);
        bytes[12] += 1;
        raw.send(&bytes, &[]);
    }),
    ("a good-bye and more", Gone, |raw| {
        raw.send(&packet(BYE, &[]), &[]);
        flood(raw, &[withdraw(1)]);
    }),
    ("a flood of withdrawals", Harmless, |raw| flood(raw, &[withdraw(1), withdraw(u32::MAX)])),
    ("a flood of rings", Harmless, |raw| flood(raw, &[packet(RING, &[])])),
    ("a ring and more", Blamed, |raw| say(raw, &packet(RING, &[0]))),
    ("a flood of blobs", Blamed, |raw| flood(raw, &[packet(BLOB, &[7; 60_000])])),
    ("a packet of an extension that is not there", Blamed, |raw| say(raw, &packet(0x100, &[]))),
    ("descriptors for an extension that is not there", Blamed, |raw| {
        let fd = memory(4096, 0, SEALS);
        raw.send(&packet(0x100, &[]), &[&fd; 253]);
    }),
    // Announcements of segments.
    ("an announcement without a descriptor", Blamed, |raw| say(raw, &announce(1, 4096))),
    ("an announcement cut short", Blamed, |raw| {
        raw.send(&packet(ANNOUNCE, &[1; 11]), &[&memory(4096, 0, SEALS)]);
    }),
    ("two descriptors with one announcement", Blamed, |raw| {
        let fd = memory(4096, 0, SEALS);
        raw.send(&announce(1, 4096), &[&fd, &fd]);
    }),
    ("one segment a thousand times", Harmless, |raw| {
        let fd = segment(raw, 1, 4096);
        for _ in 0..1000 {
            raw.send(&announce(1, 4096), &[&fd]);
        }
    }),
    ("segments that come and go", Harmless, |raw| {
        for n in 0..500 {
            segment(raw, n, 4096);
            raw.send(&withdraw(n), &[]);
        }
    }),
    ("more segments than agreed", Blamed, |raw| (0..100).for_each(|n| drop(segment(raw, n, 4096)))),
    ("a segment of another size", Blamed, |raw| announce_as_segment(raw, memory(8192, 0, SEALS))),
    ("a segment without seals", Blamed, |raw| announce_as_segment(raw, memory(4096, 0, 0))),
    ("a segment that may still grow", Blamed, |raw| {
        announce_as_segment(raw, memory(4096, 0, libc::F_SEAL_SHRINK));
    }),
    ("a segment without pages", Blamed, |raw| {
        // SAFETY: the name is a C string literal, and the flags are numbers.
        let fd = made(unsafe { libc::memfd_create(c"sparse".as_ptr(), libc::MFD_ALLOW_SEALING) });
        // SAFETY: the calls take only numbers, and the descriptor is ours.
        unsafe {
            libc::ftruncate(fd.as_raw_fd(), 4096);
            libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, SEALS);
        }
        announce_as_segment(raw, fd);
    }),
    ("a segment of huge pages", Blamed, |raw| {
        let flags = libc::MFD_ALLOW_SEALING | libc::MFD_HUGETLB;
        // SAFETY: the name is a C string literal, and the flags are numbers.
        let fd = unsafe { libc::memfd_create(c"huge".as_ptr(), flags) };
        if fd < 0 {
            return announce_as_segment(raw, memory(4096, 0, 0));
        }
        // SAFETY: the calls take only numbers, and the descriptor was just created.
        unsafe {
            libc::ftruncate(fd, 2 << 20);
            libc::fcntl(fd, libc::F_ADD_SEALS, SEALS);
        }
        raw.send(&announce(1, 2 << 20), &[&made(fd)]);
    }),
    ("a segment of 64 MiB, withdrawn at once", Harmless, |raw| {
        drop(segment(raw, 1, 64 << 20));
        raw.send(&withdraw(1), &[]);
    }),
    ("a payload in a segment of 64 MiB, withdrawn at once", Either, |raw| {
        drop(segment(raw, 1, 64 << 20));
        request_from(raw, 1, 64 << 20);
        raw.send(&withdraw(1), &[]);
    }),
    ("a payload in a segment of 64 MiB", Harmless, |raw| {
        segment(raw, 1, 64 << 20);
        until_taken(raw);
        request_from(raw, 1, 64 << 20);
    }),
    ("a payload in a segment full of holes", Harmless, |raw| {
        let fd = segment(raw, 1, 1 << 20);
        until_taken(raw);
        // SAFETY: the call takes only numbers, and the descriptor is ours.
        let punched = unsafe {
            let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            libc::fallocate(fd.as_raw_fd(), flags, 0, 1 << 20)
        };
        assert_eq!(punched, 0);
        request_from(raw, 1, 1 << 20);
    }),
    // Descriptors of every kind.
    ("a socket that lingers as a segment", Blamed, |raw| announce_as_segment(raw, lingering())),
    ("a socket that lingers with a blob", Blamed, |raw| {
        raw.send(&packet(BLOB, &[]), &[&lingering()]);
    }),
    ("253 sockets that linger", Blamed, |raw| {
        let all: Vec<OwnedFd> = (0..16).map(|_| lingering()).collect();
        let all: Vec<&OwnedFd> = all.iter().cycle().take(253).collect();
        raw.send(&announce(1, 4096), &all);
    }),
    ("sockets that linger, left in the queue", Blamed, |raw| {
        raw.send(&[0xee; 100], &[]);
        for _ in 0..4 {
            send(&raw.socket, &packet(BLOB, &[]), &[lingering().as_raw_fd()], libc::MSG_DONTWAIT);
            send(&raw.socket, &[], &[], libc::MSG_DONTWAIT);
        }
    }),
    ("253 pieces of memory of 1 MiB each in one packet", Blamed, |raw| {
        let all: Vec<OwnedFd> = (0..253).map(|_| memory(1 << 20, 0, SEALS)).collect();
        raw.send(&announce(1, 1 << 20), &all.iter().collect::<Vec<_>>());
    }),
    ("a segment with 256 MiB beyond its end", Blamed, |raw| {
        // SAFETY: the name is a C string literal, and the flags are numbers.
        let fd = made(unsafe { libc::memfd_create(c"beyond".as_ptr(), libc::MFD_ALLOW_SEALING) });
        // SAFETY: the calls take only numbers, and the descriptor is ours.
        unsafe {
            assert_eq!(libc::fallocate(fd.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, 0, 256 << 20), 0);
            libc::ftruncate(fd.as_raw_fd(), 4096);
            libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, SEALS);
        }
        announce_as_segment(raw, fd);
    }),
    ("253 segments in one packet", Blamed, |raw| {
        let fd = memory(4096, 0, SEALS);
        raw.send(&announce(1, 4096), &[&fd; 253]);
    }),
    ("a pipe", Blamed, |raw| {
        let mut ends = [0; 2];
        // SAFETY: the call fills the array of two numbers.
        assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
        keep(made(ends[1]));
        announce_as_segment(raw, made(ends[0]));
    }),
    ("an epoll", Blamed, |raw| {
        // SAFETY: the call takes only numbers.
        announce_as_segment(raw, made(unsafe { libc::epoll_create1(0) }));
    }),
    ("an eventfd", Blamed, |raw| {
        // SAFETY: the call takes only numbers.
        announce_as_segment(raw, made(unsafe { libc::eventfd(0, 0) }));
    }),
    ("a timer", Blamed, |raw| {
        // SAFETY: the call takes only numbers.
        announce_as_segment(raw, made(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, 0) }));
    }),
    ("an inotify", Blamed, |raw| {
        // SAFETY: the call takes only numbers.
        announce_as_segment(raw, made(unsafe { libc::inotify_init1(0) }));
    }),
    ("a pidfd", Blamed, |raw| {
        // SAFETY: the call takes only numbers.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) };
        announce_as_segment(raw, made(fd as i32));
    }),
    ("a device", Blamed, |raw| {
        announce_as_segment(raw, std::fs::File::open("/dev/null").unwrap().into())
    }),
    ("a directory", Blamed, |raw| {
        announce_as_segment(raw, std::fs::File::open("/").unwrap().into())
    }),
    ("a file", Blamed, |raw| {
        announce_as_segment(raw, std::fs::File::open("/proc/self/exe").unwrap().into());
    }),
    ("a path", Blamed, |raw| {
        // SAFETY: the path is a C string literal, and the flags are a number.
        announce_as_segment(raw, made(unsafe { libc::open(c"/".as_ptr(), libc::O_PATH) }));
    }),
    ("its own socket", Blamed, |raw| {
        let own = raw.socket.try_clone().unwrap();
        announce_as_segment(raw, own);
    }),
];

/// The tricks with memory, with records of the lane, and with messages.
pub const MEMORY: &[Trick] = &[
    // The memory that the victim uses.
    ("memory that is gone", Unreachable, |_| {
        // SAFETY: `lend` mapped the memory, and nothing here refers to it.
        assert_eq!(unsafe { libc::munmap(AT as *mut _, SIZE) }, 0);
    }),
    ("memory that nobody may access", Unreachable, |_| protect(libc::PROT_NONE)),
    ("memory that nobody may write", Unreachable, |_| protect(libc::PROT_READ)),
    ("memory that comes and goes", Unreachable, |_| {
        for _ in 0..500 {
            protect(libc::PROT_NONE);
            protect(libc::PROT_READ | libc::PROT_WRITE);
        }
    }),
    ("its segment, withdrawn while in use", Either, |raw| {
        // Leaves the victim time to import the segment.
        std::thread::sleep(std::time::Duration::from_millis(5));
        say(raw, &withdraw(SEGMENT));
    }),
    ("stopped while its memory is in use", Harmless, |_| {
        played();
        // SAFETY: the signal stops this process, which the test kills later.
        unsafe { libc::raise(libc::SIGSTOP) };
    }),
    // Records of the lane.
    ("a record of no kind", Blamed, |raw| raw.record(0, 0, &[])),
    ("a record of a kind too many", Blamed, |raw| raw.record(77, 0, &[])),
    ("a message of four gigabytes", Blamed, |raw| raw.record(1, u32::MAX, &[])),
    ("a message too long", Blamed, |raw| raw.record(1, 60_000, &[])),
    ("a write that nobody posted", Blamed, |raw| (0..40).for_each(|n| raw.record(2, n << 20, &[]))),
    ("a write outside its region", Blamed, |raw| write(raw, KEY, SIZE as u64 - 4, 0)),
    ("a write around the end of all memory", Blamed, |raw| write(raw, KEY, u64::MAX - 3, 0)),
    ("a write to no region", Either, |raw| write(raw, KEY ^ 5 << 32, 0, LAST)),
    ("a write that never ends", Harmless, |raw| write(raw, KEY, 16, 0)),
    ("a read of all memory", Blamed, |raw| read(raw, 8, 0, u64::MAX)),
    ("reads whose replies nobody takes", Harmless, |raw| {
        (0..32).for_each(|id| read(raw, 0, id, SIZE as u64));
    }),
    ("one number for two reads", Blamed, |raw| (0..2).for_each(|_| read(raw, 0, 3, SIZE as u64))),
    ("a reply to nothing", Blamed, |raw| raw.record(5, 8, &words(&[1 << 40; 7]))),
    ("the end of nothing", Blamed, |raw| raw.record(6, 0, &words(&[1 << 40; 6]))),
    ("a cursor far ahead", Either, |raw| raw.word(128).store(1 << 40, Ordering::Relaxed)),
    ("a cursor that runs back", Either, |raw| raw.word(128).store(u64::MAX, Ordering::Relaxed)),
    ("a lane full of noise", Either, |raw| {
        for (at, value) in (0..4096 + 1024 * 64).step_by(8).zip(noise(0x5eed)) {
            raw.word(at).store(value, Ordering::Relaxed);
        }
    }),
    ("a stamp in every cell", Either, |raw| {
        for cell in 0..1024u64 {
            raw.word(4096 + cell as usize * 64).store(cell << 1 | 1, Ordering::Relaxed);
        }
    }),
    ("a header that changes while it is read", Either, |raw| {
        raw.begin(1 | 32 << 32, &[9; 32]);
        let at = raw.lane as usize;
        std::thread::spawn(move || {
            // SAFETY: the header is inside our segment, which stays mapped. Both sides access it as
            // an atomic.
            let header = unsafe { &*((at + 4096 + 8) as *const std::sync::atomic::AtomicU64) };
            noise(7).for_each(|value| header.store(value, Ordering::Relaxed));
        });
        raw.publish(1);
    }),
    ("half a record, then stopped", Harmless, |raw| {
        raw.begin(1 | 32 << 32, &[9; 8]);
        played();
        // SAFETY: the signal stops this process, which the test kills later.
        unsafe { libc::raise(libc::SIGSTOP) };
    }),
    ("half a record, then dead", Gone, |raw| {
        raw.begin(1 | 32 << 32, &[9; 8]);
        // SAFETY: the signal ends this process.
        unsafe { libc::raise(libc::SIGKILL) };
    }),
    ("dead without a good-bye, its socket held by a child", Gone, |_| {
        // SAFETY: the process has one thread. The child continues in place of its parent.
        if unsafe { libc::fork() } > 0 {
            // SAFETY: the signal ends this process.
            unsafe { libc::raise(libc::SIGKILL) };
        }
    }),
    ("hung up", Gone, |raw| {
        // SAFETY: the call takes only numbers, and the descriptor is ours.
        unsafe { libc::shutdown(raw.socket.as_raw_fd(), libc::SHUT_RDWR) };
    }),
    // Messages of the engine.
    ("a message of nothing", Blamed, |raw| raw.message(&[])),
    ("a message of no kind", Blamed, |raw| raw.message(&head(255, 0, &[0; 8]))),
    ("a message cut short", Blamed, |raw| raw.message(&head(16, 0, &[]))),
    ("a message far outside the window", Blamed, |raw| raw.message(&head(16, 1 << 20, &[1, 0]))),
    ("a message twice", Either, |raw| (0..2).for_each(|_| raw.message(&head(16, 0, &[9, 0])))),
    ("more messages than credits", Blamed, |raw| {
        (0..64).for_each(|n| raw.message(&head(16, n, &[9, 0])))
    }),
    ("a signal to no region", Blamed, |raw| {
        let mut message = head(1, 0, &[0, 1]);
        (message[12], message[3]) = (77, 8);
        raw.message(&message);
    }),
    ("the end of a message that was never sent", Blamed, |raw| {
        raw.message(&head(19, 0, &[12345, 0]))
    }),
    ("a wish for a message that was never sent", Blamed, |raw| {
        raw.message(&head(20, 0, &[12345, 1, 64]))
    }),
    ("a part of a message that was never asked for", Blamed, |raw| {
        raw.message(&head(21, 0, &[12345, 0, 7]));
    }),
    ("requests from segments that were never announced", Harmless, |raw| {
        for n in 0..4 {
            raw.message(&request_to_send(n, 64, 4096, shared_key(n as u16, 0xdead + n), 0));
        }
    }),
    ("a request from memory that is not there", Harmless, |raw| {
        raw.message(&request_to_send(0, 64, 4096, KEY, 8));
    }),
    ("a request of all memory", Either, |raw| {
        raw.message(&request_to_send(0, u64::MAX, u64::MAX, KEY, 4096));
    }),
    ("a request from a region of no kind", Harmless, |raw| {
        raw.message(&request_to_send(0, 64, 4096, 9 << 60, 0));
    }),
    ("more requests than headers", Blamed, |raw| {
        for n in 0..64 {
            raw.message(&request_to_send(n, 64, 4096, shared_key(0, 1), 0));
        }
    }),
];
